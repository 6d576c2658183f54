"""A unit keeps its label under one declared name: examples that give it another are refused as they are built."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_dpicl import Budget, PrivateExamples
from langchain_dpicl.exceptions import RecordError
from langchain_dpicl.privacy import private_examples
from langchain_dpicl.privacy.private_examples import Pool
from langchain_dpicl.stores import SQLiteStore

CANARY = "zx-moved-canary-12"
ANN = {"user": "ann " + CANARY, "text": CANARY + " card", "queue": "card"}
MOVED = {"user": "ann " + CANARY, "text": CANARY + " transfer", "queue": "transfer"}


HELD: list[Budget] = []
"""Ledgers in memory, which a test keeps alive."""


def people(*records: dict[str, str], **changes: Any) -> PrivateExamples:
    given: dict[str, Any] = {"unit_key": "user", "label_key": "queue", "labels": ("card", "transfer"), **changes}
    return PrivateExamples(records, **{"public_size": 12_000, "dataset_id": "tickets", **given})


def records_only(*said: tuple[str, str], **changes: Any) -> PrivateExamples:
    return people(*({"text": text, "queue": queue} for text, queue in said), **{"unit_key": None, **changes})


def bind(private: PrivateExamples) -> Budget:
    budget = Budget(epsilon=4.0, delta=1e-6)
    budget.bind(private)
    HELD.append(budget)
    return budget


@pytest.fixture(autouse=True)
def _let_go() -> Iterator[None]:
    yield
    HELD.clear()


def test_a_unit_whose_label_moved_since_it_was_bound_is_refused_as_the_examples_are_built() -> None:
    bind(people(ANN))
    with pytest.raises(RecordError, match="another label") as caught:
        people(ANN, MOVED, MOVED)
    error = caught.value
    assert error.__cause__ is error.__context__ is None
    shown = [str(error), repr(error.args)]
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if f"{os.sep}langchain_dpicl{os.sep}" in frame.f_code.co_filename:
            shown += map(repr, frame.f_locals.values())
    assert CANARY not in "".join(shown)
    assert "ann" not in str(error)
    assert "transfer" not in str(error)


def test_equal_records_new_units_missing_units_and_more_records_of_the_same_label_pass() -> None:
    bind(people(ANN))
    people(ANN)
    people(ANN, {**MOVED, "user": "bob"})
    people({**MOVED, "user": "bob"})
    people(ANN, {**ANN, "text": "again"}, MOVED)


@pytest.mark.parametrize(
    "changes", [{"dataset_id": "tickets 2"}, {"label_key": None, "labels": None}, {"labels": ("transfer", "card", "x")}]
)
def test_another_name_or_another_split_is_another_data_set(changes: dict[str, Any]) -> None:
    bind(people(ANN))
    people(MOVED, **changes)


def test_examples_that_no_ledger_took_can_be_corrected() -> None:
    people(ANN)
    PrivateExamples([ANN], public_size=100)._pool(None, ledger_id=None)
    people(MOVED)


def test_a_removed_unit_stays_under_its_label() -> None:
    private = people(ANN)
    bind(private)
    private.remove(ANN["user"])
    with pytest.raises(RecordError, match="another label"):
        people(MOVED)
    early = people({**ANN, "user": "eve"})
    early.remove("eve")
    bind(early)
    with pytest.raises(RecordError, match="another label"):  # the label at construction counts
        people({**MOVED, "user": "eve"})


def test_what_was_bound_earlier_counts_however_much_was_bound_since() -> None:
    for user in ("ann", "bob", "eve"):
        bind(people({**ANN, "user": user}))
    bind(people())
    for user in ("ann", "bob", "eve"):
        with pytest.raises(RecordError, match="another label"):
            people({**MOVED, "user": user})


def test_units_that_are_declared_again_count_under_the_name_they_were_declared_by() -> None:
    again = people(ANN).redeclared(dataset_id="tickets, resized", public_size=11_000)
    bind(again)
    with pytest.raises(RecordError, match="another label"):
        people(MOVED)


def test_a_record_that_is_its_own_unit_is_known_by_its_fields_wherever_it_stands() -> None:
    bind(records_only(("one", "card"), ("two", "transfer")))
    records_only(("new", "transfer"), ("two", "transfer"), ("one", "card"))
    records_only(("one", "card"), ("one", "transfer"))  # another record of the same text
    with pytest.raises(RecordError, match="another label"):
        records_only(("two", "transfer"), ("one", "transfer"))


def test_further_fields_tell_records_apart() -> None:
    def of(shop: str, queue: str) -> PrivateExamples:
        return people({"text": "late", "shop": shop, "queue": queue}, unit_key=None, fields=("shop",))

    bind(of("north", "card"))
    of("south", "transfer")
    with pytest.raises(RecordError, match="another label"):
        of("north", "transfer")


counts = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["card", "transfer"])), max_size=6)


@given(counts, counts)
def test_equal_records_pass_if_no_label_loses_one_while_another_gains_one(
    before: list[tuple[str, str]], now: list[tuple[str, str]]
) -> None:
    HELD.clear()
    private_examples._BOUND.clear()
    bind(records_only(*before))

    def gains(text: str, label: str) -> int:
        return now.count((text, label)) - before.count((text, label))

    moved = any(
        text in {said for said, _ in before} and gains(text, one) < 0 < gains(text, other)
        for text in "ab"
        for one, other in (("card", "transfer"), ("transfer", "card"))
    )
    if moved:
        with pytest.raises(RecordError, match="another label"):
            records_only(*now)
    else:
        records_only(*now)


def test_digests_are_kept_and_no_text() -> None:
    bind(people(ANN))
    bind(records_only((CANARY, "card"), (CANARY, "card")))
    assert CANARY not in repr(private_examples._BOUND)
    assert all(
        len(unit) == 16 for kept in private_examples._BOUND.values() for labels, _ in kept.values() for unit in labels
    )


def test_a_ledger_in_memory_that_is_gone_takes_its_labels_along_and_a_durable_one_does_not(tmp_path: Path) -> None:
    bind(people(ANN))
    HELD.clear()
    people(MOVED)
    store = SQLiteStore.new(tmp_path / "budget.db")
    Budget(epsilon=4.0, delta=1e-6, store=store).bind(people(ANN))
    store.close()
    with pytest.raises(RecordError, match="another label"):
        people(MOVED)


def test_no_record_is_looked_at_again_once_the_examples_are_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    private = people(ANN)
    budget = bind(private)
    for name in ("labels_by_unit", "has_moved", "record_bound_labels"):
        monkeypatch.setattr(f"langchain_dpicl.privacy.private_examples.{name}", None)
    budget.bind(private)
    assert isinstance(private._pool("card", ledger_id=budget.ledger_id), Pool)


def _builds(moved: bool, told: Any) -> None:
    try:
        people(MOVED if moved else ANN)
    except RecordError:
        told.put("refused")
    else:
        told.put("passed")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_child_knows_what_its_parent_bound() -> None:
    bind(people(ANN))
    forks = multiprocessing.get_context("fork")
    for moved, expected in ((True, "refused"), (False, "passed")):
        told = forks.SimpleQueue()
        child = forks.Process(target=_builds, args=(moved, told))
        child.start()
        assert told.get() == expected
        child.join()
