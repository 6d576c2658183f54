"""Units that are declared again: the same ledger for ever, one label by the unit alone, and gone where they are removed."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from langchain_dpicl import Budget, ConfigurationError, PrivateExamples
from langchain_dpicl.exceptions import PrivacyBudgetMismatchError, PrivateAccessError

CANARY = "canary-7f3a"


def found(records: object, **declared: object) -> PrivateExamples:
    given = {"fields": ("queue",), "public_size": 1_000, "dataset_id": "tickets", **declared}
    return PrivateExamples(records, **given)


def record(queue: str, text: str = "x", user: str = "u") -> dict[str, str]:
    return {"text": text, "queue": queue, "user": user}


def split(private: PrivateExamples, **declared: object) -> PrivateExamples:
    given = {"dataset_id": "split", "public_size": 50, "label_key": "queue", "labels": ("login", "card"), **declared}
    return private.redeclared(**given)


def units_in(private: PrivateExamples, label: str | None) -> list[tuple[dict[str, str], ...]]:
    pool = private._pool(label, ledger_id=private._ledger_id)
    return [pool.records(place) for place in range(pool.num_units)]


def test_units_are_split_by_values_in_their_public_form_and_others_are_in_no_branch() -> None:
    private = found([record(" LOGIN "), record("card"), record("secret"), record("Card")])
    private._attach("ledger")
    made = split(private)
    assert made.labels == ("login", "card")
    assert [unit[0]["queue"] for unit in units_in(made, "login")] == ["login"]
    assert [unit[0]["queue"] for unit in units_in(made, "card")] == ["card", "card"]
    assert [len(unit) for unit in units_in(made, None)] == [1, 1, 0, 1]
    assert made.fields == ("text", "queue")
    assert private.labels is None


def test_a_unit_gets_the_label_it_has_most_often_and_keeps_those_records_alone() -> None:
    records = [record("card", "1"), record("login", "2"), record("CARD", "3"), record("none", "4")]
    private = found(records, unit_key="user", records_per_unit=4)
    private._attach("ledger")
    made = split(private)
    assert [unit["text"] for unit in units_in(made, "card")[0]] == ["1", "3"]
    assert units_in(made, "login") == []
    tied = split(private, dataset_id="cased", labels=("CARD", "card", "login"), fold_case=False)
    assert [unit["text"] for unit in units_in(tied, "CARD")[0]] == ["3"]


queues = st.lists(st.sampled_from(["login", "Card", "no", ""]), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(st.lists(queues, max_size=4), queues)
def test_the_label_of_a_unit_rests_on_that_unit_alone(others: list[list[str]], mine: list[str]) -> None:
    def of(groups: list[list[str]]) -> dict[str, list[tuple[dict[str, str], ...]]]:
        rows = [record(queue, user=str(user)) for user, group in enumerate(groups) for queue in group]
        made = split(found(rows, unit_key="user", records_per_unit=4))
        made._attach("ledger")
        return {label: units_in(made, label) for label in ("login", "card")}

    with_me, without = of([*others, mine]), of(others)
    assert sum(len(with_me[label]) - len(without[label]) for label in with_me) in {0, 1}
    assert all(with_me[label][: len(without[label])] == without[label] for label in with_me)


def test_every_declaration_is_bound_to_the_one_ledger_and_to_no_other() -> None:
    private = found([record("card")])
    made = split(private)
    one, other = Budget(epsilon=1.0, delta=1e-6), Budget(epsilon=1.0, delta=1e-6)
    one.bind(made)
    for declaration in (private, made, split(private, dataset_id="third")):
        with pytest.raises(PrivacyBudgetMismatchError):
            other.bind(declaration)
        with pytest.raises(PrivateAccessError):
            declaration._pool(None, ledger_id=None)
        one.bind(declaration)
    assert [data["dataset_id"] for data in one.report().to_dict()["datasets"]] == ["split", "third", "tickets"]


def test_what_was_opened_without_a_ledger_can_be_bound_under_no_declaration() -> None:
    private = found([record("card")])
    made = split(private)
    made._pool(None, ledger_id=None)
    with pytest.raises(PrivateAccessError):
        Budget(epsilon=1.0, delta=1e-6).bind(private)


@pytest.mark.parametrize("remover", ["first", "second"])
def test_a_unit_that_is_removed_is_gone_under_every_declaration(remover: str) -> None:
    private = found([record("card", CANARY), record("card", "stays")])
    made = split(private)
    private._attach("ledger")
    (private if remover == "first" else made).remove(0)
    assert [len(unit) for unit in units_in(private, None)] == [0, 1]
    assert [len(unit) for unit in units_in(made, "card")] == [0, 1]


def test_sizes_alone_change_and_labels_stay() -> None:
    private = PrivateExamples(
        [{"text": "x", "queue": "card"}], label_key="queue", labels=("login", "card"), public_size=9, dataset_id="old"
    )
    sized = private.redeclared(dataset_id="sized", public_size={"login": 3, "card": 4})
    again = sized.redeclared(dataset_id="again", public_size=7)
    private._attach("ledger")
    assert sized.public_size == {"login": 3, "card": 4}
    assert (again.public_size, again.labels) == (7, ("login", "card"))
    assert units_in(sized, "card") == units_in(again, "card") == units_in(private, "card")
    resized = split(found([record("card")])).redeclared(dataset_id="resized", public_size=7)
    resized._attach("ledger")
    assert [len(units_in(resized, label)) for label in ("login", "card")] == [0, 1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"dataset_id": "tickets"},
        {"label_key": "text"},
        {"label_key": "unknown"},
        {"labels": ("a", "A")},
        {"labels": ()},
        {"labels": None},
        {"label_key": None},
        {"public_size": {"login": 1}},
        {"public_size": 0},
    ],
)
def test_public_faults_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        split(found([record("card")]), **wrong)


def test_labels_that_are_declared_already_are_not_replaced() -> None:
    labelled = split(found([record("card")]))
    with pytest.raises(ConfigurationError, match="label_key"):
        split(labelled, dataset_id="third")
    with pytest.raises(ConfigurationError, match="labels"):
        labelled.redeclared(dataset_id="third", public_size=5, labels=("card",), label_key=None)


def test_nothing_of_the_units_is_shown_and_none_is_copied() -> None:
    made = split(found([record("card", CANARY)]))
    assert CANARY not in repr(made) + str(made) + f"{made}" + repr(made.declaration)
    assert copy.deepcopy(made) is made
    with pytest.raises(PrivateAccessError):
        pickle.dumps(made)
