from __future__ import annotations

import copy
import dataclasses
import inspect
import os
import pickle
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from langchain_dpicl.exceptions import LedgerError, PrivateAccessError
from langchain_dpicl.privacy.ledger.store import InMemoryStore, LedgerHeader, LedgerRecord, LedgerStore, next_record
from tests.contracts.store import StoreContract, header, header_of


class TestInMemoryStore(StoreContract):
    def make_store(self, tmp_path: Path) -> LedgerStore:
        return InMemoryStore()


def test_header_and_lines_survive_their_json_form() -> None:
    first = header()
    assert LedgerHeader.from_dict(first.to_dict()) == first
    line = next_record(after=0, head=first.digest, kind="note", body={"x": 0.1})
    assert line.seq == 1
    assert LedgerRecord.from_dict(line.to_dict()) == line


@pytest.mark.parametrize(
    "change",
    [
        {"ledger_format": 3},
        {"ledger_format": 1},
        {"ledger_format": 0},
        {"ledger_format": True},
        {"epsilon": -1.0},
        {"epsilon": float("nan")},
        {"delta": -1e-9},
        {"adjacency": "zero_out"},
        {"extra": 1},
    ],
)
def test_a_broken_header_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(LedgerError) as caught:
        LedgerHeader.from_dict({**header().to_dict(), **change})
    assert caught.value.__context__ is None


def test_a_line_of_another_shape_is_refused() -> None:
    with pytest.raises(LedgerError, match="expected the fields"):
        LedgerRecord.from_dict({"seq": 1})
    with pytest.raises(LedgerError, match="expected the fields"):
        LedgerRecord.from_dict([1, 2])  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["seq", "prev", "kind", "body", "stamp"])
def test_changing_any_field_of_a_line_changes_its_hash(field: str) -> None:
    line = next_record(0, header().digest, "note", {"x": 0.1})
    other = {"seq": 2, "prev": "0", "kind": "noted", "body": {"x": 0.2}, "stamp": "never"}[field]
    assert dataclasses.replace(line, **{field: other}).computed_hash != line.hash


def test_every_field_of_the_header_is_under_the_first_hash() -> None:
    first = header()
    changes = {"ledger_id": "b", "name": "n", "epsilon": 5.0, "delta": 1e-5, "adjacency": "replace_one", "stamp": "s"}
    assert all(dataclasses.replace(first, **{k: v}).digest != first.digest for k, v in changes.items())


def test_a_store_in_memory_has_no_copy_and_no_pickle() -> None:
    store = InMemoryStore()
    assert copy.copy(store) is store
    assert copy.deepcopy([store])[0] is store
    with pytest.raises(PrivateAccessError):
        pickle.dumps(store)
    assert "dies with this process" in repr(store)


def test_a_stop_as_a_transaction_opens_does_not_close_the_ledger_for_good() -> None:
    store = InMemoryStore()
    store.create(header())
    code = inspect.unwrap(InMemoryStore.transaction).__code__

    def stop(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code is code and event == "line" and store._view is not None:
            raise KeyboardInterrupt
        return stop

    before = sys.gettrace()
    sys.settrace(stop)
    try:
        with pytest.raises(KeyboardInterrupt), store.transaction() as view:
            view.append("note", {"x": 0.1})
    finally:
        sys.settrace(before)
    assert store.records() == ()
    with store.transaction() as view:
        view.append("note", {"x": 0.2})
    assert [line.body for line in store.records()] == [{"x": 0.2}]


@pytest.mark.parametrize("has_an_ancestors_number", [False, True])
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_cannot_spend_the_parents_ledger_again(
    monkeypatch: pytest.MonkeyPatch, has_an_ancestors_number: bool
) -> None:
    if has_an_ancestors_number:
        monkeypatch.setattr(os, "getpid", lambda: 1)
    store = InMemoryStore()
    store.create(header())
    child = os.fork()
    if child == 0:
        refused = 0
        for attempt in (
            store.header,
            store.records,
            store.head,
            lambda: store.create(header()),
            lambda: store.transaction().__enter__(),
        ):
            try:
                attempt()
            except LedgerError:
                refused += 1
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    assert store.header() is not None


def test_the_head_is_the_last_line() -> None:
    store = InMemoryStore()
    store.create(header())
    assert store.head() == (0, header_of(store).digest)
    with store.transaction() as view:
        assert view.head() == store.head()  # type: ignore[attr-defined]
        line = view.append("note", {})
        assert view.head() == (1, line.hash)  # type: ignore[attr-defined]
    assert store.head() == (1, line.hash)
    with pytest.raises(ValueError, match="stop"), store.transaction() as dead:
        dead.append("note", {})
        raise ValueError("stop")
    assert store.head() == (1, line.hash)
    with pytest.raises(LedgerError, match="ended"):
        dead.head()  # type: ignore[attr-defined]


def test_texts_of_equal_bodies_are_kept_once_and_read_apart() -> None:
    store = InMemoryStore()
    store.create(header())
    with store.transaction() as view:
        for kind, n in (("a", 1), ("b", 2), ("a", 1), ("b", 2)):
            view.append(kind, {"n": [n]})
    assert store._lines[0].body is store._lines[2].body
    first, _, third, _ = store.records()
    first.body["n"].append(7)
    assert third.body == {"n": [1]}
