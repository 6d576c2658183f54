"""A line belongs to its place by number and by hash: one that has only one of the two right is refused."""

from __future__ import annotations

import dataclasses

import pytest

from langchain_dpicl.exceptions import LedgerError
from langchain_dpicl.privacy.ledger.state import LedgerState
from langchain_dpicl.privacy.ledger.store import LedgerHeader, LedgerRecord, next_record

HEADER = LedgerHeader(ledger_id="l", name="l", epsilon=1.0, delta=1e-6, adjacency="add_remove")
BODY = {"dataset_id": "d"}


def after_one_line() -> tuple[LedgerState, LedgerRecord]:
    state = LedgerState(HEADER)
    first = next_record(0, state.head, "bind", BODY)
    state.apply(first)
    return state, first


def hashed(record: LedgerRecord) -> LedgerRecord:
    """The line with the hash that it asks for: only its place is wrong."""
    return dataclasses.replace(record, hash=record.computed_hash)


@pytest.mark.parametrize(
    ("number", "follows"), [(2, False), (3, True), (1, True), (0, False)], ids=["hash", "skipped", "again", "both"]
)
def test_a_line_of_another_place_is_refused_whatever_its_own_hash_says(number, follows):
    state, first = after_one_line()
    line = next_record(1, first.hash if follows else HEADER.digest, "bind", {"dataset_id": "e"})
    with pytest.raises(LedgerError, match="line 2 does not follow"):
        state.apply(hashed(dataclasses.replace(line, seq=number)))
    assert (state.seq, state.head) == (1, first.hash)
    assert list(state.bindings) == ["d"]


def test_a_line_of_this_place_is_taken():
    state, first = after_one_line()
    state.apply(next_record(1, first.hash, "bind", {"dataset_id": "e"}))
    assert (state.seq, list(state.bindings)) == (2, ["d", "e"])
