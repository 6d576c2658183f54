from __future__ import annotations

import copy
import dataclasses
import os
import pickle
from pathlib import Path

import pytest

from langchain_dpicl.exceptions import LedgerError
from langchain_dpicl.privacy.stores import InMemoryStore, LedgerHeader, LedgerRecord, LedgerStore, next_record
from tests.contracts.store import StoreContract, header


class TestInMemoryStore(StoreContract):
    def make_store(self, tmp_path: Path) -> LedgerStore:
        return InMemoryStore()


def test_header_and_lines_survive_their_json_form() -> None:
    first = header()
    assert LedgerHeader.from_dict(first.to_dict()) == first
    line = next_record(0, first.digest, "note", {"x": 0.1})
    assert LedgerRecord.from_dict(line.to_dict()) == line


@pytest.mark.parametrize(
    "change",
    [
        {"ledger_format": 2},
        {"epsilon": -1.0},
        {"epsilon": float("nan")},
        {"delta": 0.0},
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
    with pytest.raises(LedgerError):
        pickle.dumps(store)
    assert "dies with this process" in repr(store)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_cannot_spend_the_parents_ledger_again() -> None:
    store = InMemoryStore()
    store.create(header())
    child = os.fork()
    if child == 0:
        refused = 0
        for attempt in (
            store.header,
            store.records,
            lambda: store.create(header()),
            lambda: store.transaction().__enter__(),
        ):
            try:
                attempt()
            except LedgerError:
                refused += 1
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    assert store.header() is not None
