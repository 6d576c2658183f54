"""A copy takes the ledger's place between a commit and the anchor's line: what this process wrote is sent, not read again."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import LedgerRollbackError
from langchain_dpicl.privacy.accounting.events import PureEvent
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.stores import SQLiteStore
from tests.anchor_swaps import after_next_commit, opened, race
from tests.durable import DictAnchor, WatchedStore
from tests.ledgers import budget, private, share_of, tickets

pytestmark = pytest.mark.usefixtures("simple_prices")


def test_a_copy_that_goes_on_between_commit_and_anchor_meets_its_own_line_there() -> None:
    store = WatchedStore()

    def saved() -> Callable[[], object]:
        lines = store.snapshot()
        return lambda: store.restore(lines)

    def then(act: Callable[[], object]) -> None:
        def once(kinds: list[str]) -> None:
            store.after_commit = lambda kinds: None
            act()

        store.after_commit = once

    race(store, saved, then)


def test_a_sqlite_file_that_is_put_back_between_commit_and_anchor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, copy = tmp_path / "budget.db", tmp_path / "copy.db"
    store = SQLiteStore.new(path)

    def saved() -> Callable[[], object]:
        store.backup(copy)

        def back() -> None:
            with contextlib.closing(sqlite3.connect(copy)) as old, contextlib.closing(sqlite3.connect(path)) as new:
                old.backup(new)

        return back

    race(store, saved, lambda act: after_next_commit(monkeypatch, SQLiteStore, act))


def test_an_anchor_ahead_is_compared_with_lines_of_this_chain_not_with_lines_read_again() -> None:
    """Others overtake our line; then the copy whose line the anchor knows takes the ledger's place for one reading."""
    store, anchor = WatchedStore(), DictAnchor()
    share = opened(store, anchor)
    share.reserve("t")
    copy, write = store.clone(), anchor.write

    def others(place: WatchedStore, *names: str) -> None:
        with place.transaction() as view:
            for name in names:
                view.append("bind", private(name).declaration)

    def overtaken(ledger_id: str, seq: int, head: str) -> None:
        write(ledger_id, seq, head)
        others(store, "one", "two")
        others(copy, "three", "four", "five")
        anchor.known = {ledger_id: (4, copy.records(3)[0].hash)}
        left = iter(range(3))

        def third() -> None:
            if next(left, 0) == 2:
                store.restore(copy.snapshot())

        store.at_read = third

    anchor.write = overtaken  # type: ignore[method-assign]
    with pytest.raises(LedgerRollbackError):
        share.reserve("t")


def test_the_anchor_is_told_every_line_also_those_of_others_that_it_missed() -> None:
    store, anchor = WatchedStore(), DictAnchor()
    ledger = budget(epsilon=2.0, store=store, anchor=anchor)
    share = ledger.declare("own", tickets=tickets(), epsilon=1.0)
    blind = share_of(Budget(epsilon=2.0, delta=1e-6, store=store))
    blind.reserve("t")
    blind.reserve("t")
    anchor.log.clear()
    Budget.open(store, anchor=anchor)
    assert [seq for _, seq in anchor.log] == [1, 2, 3]
    blind.reserve("t")
    anchor.log.clear()
    share.reserve("t")
    assert [seq for _, seq in anchor.log] == [4, 5, 6]  # theirs, the seal, ours
    share.reserve("t")
    assert [seq for _, seq in anchor.log] == [4, 5, 6, 7]


def test_an_anchor_that_went_back_is_told_again_what_it_forgot() -> None:
    store, anchor = WatchedStore(), DictAnchor()
    share = opened(store, anchor)
    for _ in range(2):
        share.reserve("t")
    (name,) = anchor.known
    anchor.known = {name: (1, store.records(0)[0].hash)}
    anchor.log.clear()
    share.reserve("t")
    assert [seq for _, seq in anchor.log] == [2, 3, 4]


def test_what_is_kept_of_a_long_ledger_is_what_the_anchor_was_not_told() -> None:
    store, anchor = WatchedStore(), DictAnchor()
    ledger = Budget(epsilon=1.0, delta=1e-6, store=store, anchor=anchor)
    share = ledger.declare("c", tickets=(Ticket("t", PureEvent(0.01), max_count=50),), epsilon=1.0)
    for _ in range(50):
        share.reserve("t")
    assert len(ledger._desk._untold) <= 2
    again = Budget.open(store, anchor=anchor)
    assert len(again._desk._untold) <= 1
