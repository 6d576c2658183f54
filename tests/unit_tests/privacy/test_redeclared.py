"""Units that are declared again: the same ledger for good, one label by the unit alone, and gone where they are removed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from langchain_dpicl import Budget, DemonstrationSynthesizer, PrivateExamples, verify_report
from langchain_dpicl.backends.fake import FakeBackend, word_copier
from langchain_dpicl.exceptions import ConfigurationError, PrivacyBudgetMismatchError, PrivateAccessError, RecordError
from langchain_dpicl.options import Decoding, Rows
from langchain_dpicl.privacy import private_examples
from langchain_dpicl.privacy.extensions import redeclared
from langchain_dpicl.privacy.ledger import budget as ledger
from langchain_dpicl.privacy.ledger.store import InMemoryStore
from langchain_dpicl.stores import SQLiteStore

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
        {"fold_case": 1},
        {"fold_case": None},
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
    with pytest.raises(ConfigurationError, match="in their order"):  # it broke the ties of the labels there are
        labelled.redeclared(dataset_id="third", public_size=5, labels=("card", "login"))
    with pytest.raises(ConfigurationError, match="first declaration"):
        labelled.redeclared(dataset_id="tickets", public_size=5)


def test_nothing_of_the_units_is_shown_and_none_is_copied() -> None:
    made = split(found([record("card", CANARY)]))
    assert CANARY not in repr(made) + str(made) + f"{made}" + repr(made.declaration)
    assert copy.deepcopy(made) is made
    with pytest.raises(PrivateAccessError):
        pickle.dumps(made)


# -- one name, one split; one ledger, whichever process declares ------------------------------------------------------


@pytest.fixture
def another_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Forgets what only this process knows: which object has a name."""
    return lambda: monkeypatch.setattr(ledger, "_IDENTITIES", {})


def budget_of(store: Any = None) -> Budget:
    return Budget(epsilon=1.0, delta=1e-6, store=InMemoryStore() if store is None else store)


def direct(**declared: object) -> PrivateExamples:
    given = {"dataset_id": "split", "public_size": 50, "label_key": "queue", "labels": ("login", "card"), **declared}
    return found([record("card")], **given)


UNITS = [record("LOGIN"), record("card")]  # of one user: "login" by folded case, "card" otherwise


def test_another_rule_for_labels_is_another_declaration_in_another_process(another_process: Any) -> None:
    budget = budget_of()
    folded = split(found(UNITS, unit_key="user", records_per_unit=2))
    budget.bind(folded)
    another_process()
    cased = split(found(UNITS, unit_key="user", records_per_unit=2), fold_case=False)
    with pytest.raises(PrivacyBudgetMismatchError, match="redeclared"):
        budget.bind(cased)
    budget.bind(split(found(UNITS, unit_key="user", records_per_unit=2)))
    assert cased._ledger_id is None


def test_a_size_alone_keeps_the_rule_that_split_the_units(another_process: Any) -> None:
    budget = budget_of()
    budget.bind(split(found(UNITS)).redeclared(dataset_id="sized", public_size=7))
    for fold_case in (False, True):
        another_process()
        sized = split(found(UNITS), fold_case=fold_case).redeclared(dataset_id="sized", public_size=7)
        if fold_case:
            budget.bind(sized)
        else:
            with pytest.raises(PrivacyBudgetMismatchError, match="redeclared"):
                budget.bind(sized)


@pytest.mark.parametrize("first", ["direct", "redeclared"])
def test_what_is_declared_directly_and_what_is_declared_again_never_share_a_name(
    first: str, another_process: Any
) -> None:
    budget, made = budget_of(), {"direct": direct(), "redeclared": split(found([record("card")]))}
    budget.bind(made.pop(first))
    another_process()
    with pytest.raises(PrivacyBudgetMismatchError, match="redeclared"):
        budget.bind(next(iter(made.values())))


def test_units_of_another_first_declaration_do_not_share_a_name(another_process: Any) -> None:
    budget = budget_of()
    budget.bind(split(found([record("card")])))
    another_process()
    with pytest.raises(PrivacyBudgetMismatchError, match="redeclared"):
        budget.bind(split(found([record("card")], dataset_id="others")))
    assert [data["dataset_id"] for data in budget.report().to_dict()["datasets"]] == ["split", "tickets"]


def test_the_rule_is_shown_where_it_was_used_and_reports_are_checked_with_it() -> None:
    budget, private = budget_of(), found([record("card")])
    assert "redeclared" not in private.declaration
    made = split(private, fold_case=False)
    assert made.declaration["redeclared"] == {"from": "tickets", "fold_case": False, "rule": 2}
    again = made.redeclared(dataset_id="again", public_size=9)
    assert again.declaration["redeclared"] == {"from": "tickets", "fold_case": False, "rule": 2}
    sized = private.redeclared(dataset_id="sized", public_size=9)
    assert sized.declaration["redeclared"] == {"from": "tickets", "fold_case": None, "rule": 2}
    for declared in (again, sized):
        budget.bind(declared)
    assert verify_report(budget.report().to_json()).problems == ()


@pytest.mark.parametrize(
    "changed",
    [{"rule": 1}, {"fold_case": 1}, {"fold_case": "no"}, {"from": "split"}, {"from": 3}, {"more": 1}],
    ids=["rule", "one", "text", "itself", "number", "key"],
)
def test_a_rule_that_is_none_is_a_problem_of_a_report(changed: dict[str, object]) -> None:
    declared = split(found([record("card")])).declaration
    given = {key: value for key, value in declared.items() if key not in {"unit", "extra_fields"}}
    shown = {**given["redeclared"], **changed}
    assert private_examples.make_declaration(**given, fields=declared["extra_fields"]).to_dict() == declared
    with pytest.raises(ConfigurationError):
        private_examples.make_declaration(**{**given, "redeclared": shown}, fields=declared["extra_fields"])


def test_a_line_of_before_with_fewer_members_still_has_its_data_set(another_process: Any) -> None:
    """Direct declarations are what they were; a member that only one side has counts as None on the other."""
    store, private = InMemoryStore(), found([record("card")])
    budget = budget_of(store)
    line = {key: value for key, value in private.declaration.items() if value is not None}
    assert set(line) < set(private.declaration)
    with store.transaction() as view:
        view.append("bind", line)
    budget.bind(private)
    assert len(store.records()) == 1


class TestOneFileOfTwoLedgers:
    """What binds one declaration binds the first one with it, for every process of the place."""

    @pytest.fixture
    def ledgers(self, tmp_path: Path) -> tuple[Budget, Budget]:
        path = tmp_path / "two.db"
        one, other = (budget_of(SQLiteStore.new(path, name=name)) for name in ("one", "other"))
        return one, other

    @pytest.mark.parametrize("bound", [("tickets",), ("split",), ("split", "tickets")])
    @pytest.mark.parametrize("tried", ["tickets", "split", "another"])
    def test_the_same_units_go_to_no_other_ledger(
        self, ledgers: tuple[Budget, Budget], bound: tuple[str, ...], tried: str, another_process: Any
    ) -> None:
        def declared(name: str) -> PrivateExamples:
            private = found([record("card")])
            return private if name == "tickets" else split(private, dataset_id=name)

        one, other = ledgers
        for name in bound:
            one.bind(declared(name))
            another_process()
        with pytest.raises(PrivacyBudgetMismatchError, match="bound to another"):
            other.bind(made := declared(tried))
        assert made._ledger_id is None
        assert len(other._store.records()) == 0
        one.bind(made)
        assert one._store.records()[0].body["dataset_id"] == "tickets"
        for budget in ledgers:
            budget.verify()

    def test_the_file_opens_again_with_both_names(self, ledgers: tuple[Budget, Budget], tmp_path: Path) -> None:
        one, other = ledgers
        one.bind(split(found([record("card")])))
        assert [line.body["dataset_id"] for line in one._store.records()] == ["tickets", "split"]
        for budget in (one, other):
            budget.close()
        again = Budget.open(SQLiteStore(tmp_path / "two.db", name="one"))
        again.verify()
        assert verify_report(again.report()).ok


def test_all_declarations_are_bound_or_none(another_process: Any) -> None:
    store = InMemoryStore()
    budget = budget_of(store)
    budget.bind(found([record("card")], public_size=9))  # the same name, another declaration
    another_process()
    made = split(found([record("card")]))
    with pytest.raises(PrivacyBudgetMismatchError, match="'tickets'"):
        budget.bind(made)
    assert len(store.records()) == 1
    assert made._ledger_id is None


def test_another_object_with_the_first_name_is_refused_in_the_same_process() -> None:
    budget = budget_of()
    budget.bind(split(found([record("card")])))
    with pytest.raises(PrivacyBudgetMismatchError, match="already names other examples"):
        budget.bind(found([record("card")]))
    with pytest.raises(PrivacyBudgetMismatchError, match="'tickets' already names other examples"):
        budget.bind(split(found([record("card")]), dataset_id="third"))


def test_delta_goes_with_the_first_size_as_well() -> None:
    made = split(found([record("card")], public_size=1_000_000))
    with pytest.raises(ConfigurationError, match="'tickets'"):
        budget_of().bind(made)
    with pytest.raises(ConfigurationError, match="'split'"):
        budget_of().bind(split(found([record("card")]), public_size=1_000_000))


# -- a stop while units are read again --------------------------------------------------------------------------------


def locals_of_ours(error: BaseException) -> list[str]:
    seen, at = [], error.__traceback__
    assert error.__context__ is None
    while at is not None:
        assert isinstance(at, TracebackType)
        if "langchain_dpicl" in at.tb_frame.f_code.co_filename.split("/"):
            seen += [repr(value) for value in at.tb_frame.f_locals.values()]
        at = at.tb_next
    return seen


def failing(kind: type[BaseException]) -> Callable[..., str]:
    real = redeclared.normalized

    def normalized(text: str, *, fold_case: bool = True) -> str:
        if CANARY in text:
            raise kind(text)
        return real(text, fold_case=fold_case)

    return normalized


@pytest.mark.parametrize(
    ("raised", "heard"),
    [(KeyboardInterrupt, KeyboardInterrupt), (MemoryError, RecordError), (SystemExit, RecordError)],
)
def test_a_stop_while_bound_units_are_split_shows_none_of_them(
    raised: type[BaseException], heard: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    private = found([record("card", CANARY), record(CANARY, CANARY)])
    budget_of().bind(private)
    monkeypatch.setattr(redeclared, "normalized", failing(raised))
    with pytest.raises(heard) as caught:
        split(private)
    seen = locals_of_ours(caught.value)
    assert seen
    assert [looks for looks in seen if CANARY in looks] == []
    assert CANARY not in str(caught.value)
    monkeypatch.undo()
    assert len(units_in(split(private), "card")) == 1


def test_a_label_of_units_that_were_split_anew_has_no_known_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit that is replaced may leave the one label there is: a sample of fixed size would tell at once."""
    budget = Budget(epsilon=1.0, delta=1e-6, adjacency="replace_one")
    private = found([record("card")] * 60 + [record("login")] * 40, public_size=100)
    made = split(private, labels=("card",), public_size=100)
    words = [" my", " card"]

    def writer(rows: Rows) -> DemonstrationSynthesizer:
        llm = FakeBackend(word_copier(words), vocabulary=words)
        return DemonstrationSynthesizer.from_private_examples(
            made,
            llm=llm,
            budget=budget,
            epsilon=1.0,
            max_tokens=2,
            rows=rows,
            decoding=Decoding(candidates="all"),
        )

    with pytest.raises(ConfigurationError, match=r"sampling.*declared later"):
        writer(Rows(slots=10, sampling="fixed"))
    assert budget.remaining_epsilon == 1.0
    assert private._ledger_id is None
    assert writer(Rows(units=10)).plan.release.sampler.name == "poisson_units"
    assert verify_report(budget.report()).ok
    # Made elsewhere, or before it was refused.
    monkeypatch.setattr("langchain_dpicl.release.declare_share._check_sizes_known", lambda *_: None)
    budget = Budget(epsilon=1.0, delta=1e-6, adjacency="replace_one")
    private = found([record("card")] * 60 + [record("login")] * 40, public_size=100)
    made = split(private, labels=("card",), public_size=100)
    writer(Rows(slots=10, sampling="fixed"))
    assert any("labels whose sizes are private" in problem for problem in verify_report(budget.report()).problems)


@pytest.mark.parametrize("raised", [KeyboardInterrupt, MemoryError])
def test_a_stop_while_a_unit_is_read_shows_nothing_of_it(
    raised: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    private = found([record("card", CANARY), record(f"card {CANARY}", "x")])
    made = split(private)
    private._attach("ledger")
    pool = made._pool(None, ledger_id="ledger")
    monkeypatch.setattr(redeclared, "normalized", failing(raised))
    assert len(pool.records(0)) == 1
    if raised is MemoryError:
        assert pool.records(1) == ()
        return
    with pytest.raises(KeyboardInterrupt) as caught:
        pool.records(1)
    assert [looks for looks in locals_of_ours(caught.value) if CANARY in looks] == []
