"""Snapshots sum a ledger up, so that opening it reads the lines after the last one; verifying reads all of them."""

from __future__ import annotations

import dataclasses
import itertools
import random
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import LedgerError, LedgerRollbackError
from langchain_dpicl.privacy.ledger import state as states
from langchain_dpicl.privacy.ledger.state import SNAPSHOT, LedgerState
from langchain_dpicl.privacy.ledger.store import LedgerHeader, LedgerRecord, next_record
from langchain_dpicl.stores import SQLiteStore
from tests.durable import DictAnchor, EarlyStore
from tests.ledgers import budget, private, tickets

pytestmark = pytest.mark.usefixtures("simple_prices")

EVERY = 7


class SnapshotStore(EarlyStore):
    """Finds its last snapshot; `read` counts the lines that were read."""

    def __init__(self) -> None:
        super().__init__()
        self.read = 0

    def records(self, after: int = 0, *, limit: int | None = None) -> Any:
        lines = super().records(after, limit=limit)
        self.read += len(lines)
        return lines

    def last_snapshot(self) -> list[LedgerRecord]:
        lines = EarlyStore.records(self)
        last = max((line.seq for line in lines if line.kind == SNAPSHOT), default=0)
        return [line for line in lines[:last] if line.kind in {"bind", "seal"} or line.seq == last]


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots every few lines, however large."""
    monkeypatch.setattr(states, "SNAPSHOT_LINES", EVERY)
    due = property(lambda self: self.seq - self._last_snapshot >= EVERY)
    monkeypatch.setattr(LedgerState, "needs_snapshot", due)


def totals(state: LedgerState) -> dict[str, Any]:
    return {**state.snapshot(), "seq": state.seq, "head": state.head, "spent": state.promised()}


def replayed(store: Any) -> LedgerState:
    state = LedgerState(store.header())
    for line in store.records():
        state.apply(line)
    return state


def spend(ledger: Budget, seed: int, steps: int = 60) -> None:
    """Reserves, commits and gives back at random, of tickets and of pools, for tenants and for nobody."""
    rng, held = random.Random(seed), []
    share = ledger.declare("c", tickets=tickets(0.001, 1000, refundable=True), epsilon=1.0)
    pool = ledger.gdp_pool("p", epsilon=0.5)
    for _ in range(steps):
        what = rng.random()
        if what < 0.5 or not held:
            tenant = rng.choice([None, "acme", "zeta"])
            held.append(share.reserve("t", count=rng.randint(1, 3), tenant=tenant))
        elif what < 0.6:
            held.append(pool.reserve(mu=pool.mu / rng.choice([16, 20, 30])))
        else:
            one = held.pop(rng.randrange(len(held)))
            if rng.random() < 0.5:
                one.burn()
                one.commit(wait=rng.random() < 0.5)
            if rng.random() < 0.5:
                one.give_back()


def ledger_on(store: Any, **options: Any) -> Budget:
    return budget(store=store, epsilon=200.0, **options)


@pytest.mark.parametrize("seed", range(6))
def test_a_snapshot_opens_the_very_state_that_all_lines_make(seed: int) -> None:
    store = SnapshotStore()
    ledger = ledger_on(store, most_held=1)  # its own list of open reservations leaves out what it holds for later
    ledger.bind(private())
    spend(ledger, seed)
    ledger.settle()
    assert any(line.kind == SNAPSHOT for line in store.records())
    wanted = totals(replayed(store))
    store.read = 0
    other = Budget.open(store)
    assert totals(other._desk._state) == wanted == totals(ledger._desk._state)
    assert store.read <= EVERY + 5
    assert other.dangling() == ledger.dangling()
    spend(other, seed + 100, 20)  # it goes on by the same rules
    other.verify()
    ledger.verify()
    assert totals(replayed(store)) == totals(other._desk.refresh())


def test_a_snapshot_follows_the_lines_of_its_transaction() -> None:
    store = SnapshotStore()
    ledger = ledger_on(store)
    spend(ledger, 1)
    places = [line.seq for line in store.records() if line.kind == SNAPSHOT]
    assert min(second - first for first, second in itertools.pairwise(places)) >= EVERY
    share_of_it = ledger.declare("c", tickets=tickets(0.001, 1000, refundable=True), epsilon=1.0)
    entries = {share_of_it.reserve("t").entry for _ in range(2 * EVERY)}
    assert not entries & {line.seq for line in store.records() if line.kind == SNAPSHOT}


def changed(line: LedgerRecord, **body: Any) -> LedgerRecord:
    return next_record(line.seq - 1, line.prev, line.kind, {**line.body, **body})


@pytest.mark.parametrize(
    "change",
    [
        {"left": []},
        {"left": [[9999, 1], [1, 1]]},
        {"left": [[-1, 1], [1, 1]]},
        {"used": [["c", "", -3]]},
        {"open": [[2, "c", "t", None, [1, 1], 0, "", "x", None]]},
        {"open": [[2, "nobody", "t", None, [1, 1], 1, "", "x", None]]},
        {"lines": [[1, "0" * 64]]},
        {"wrappers": [3]},
        {"more": 1},
        {"used": None},
    ],
)
def test_a_snapshot_that_is_none_opens_nothing_and_follows_nothing(change: dict[str, Any]) -> None:
    store = SnapshotStore()
    spend(ledger_on(store), 2)
    *named, last = store.last_snapshot()
    wrong = changed(last, **change)
    with pytest.raises(LedgerError, match="no snapshot of the lines before it"):
        LedgerState.from_snapshot(store.header(), [*named, wrong])  # type: ignore[arg-type]
    state = LedgerState(store.header())  # type: ignore[arg-type]
    for line in list(store.records())[: last.seq - 1]:
        state.apply(line)
    before = totals(state)
    with pytest.raises(LedgerError, match="the totals of the lines before it"):
        state.apply(wrong)
    assert totals(state) == before
    undo = state.apply(last)
    undo()
    assert totals(state) == before


def test_a_named_line_that_was_changed_or_is_missing_opens_nothing() -> None:
    store = SnapshotStore()
    spend(ledger_on(store), 2)
    *named, last = store.last_snapshot()
    header = store.header()
    assert header is not None
    for lines in (
        [*named[1:], last],
        [*named, named[-1], last],
        [dataclasses.replace(named[0], body={**named[0].body, "epsilon": 0.1}), *named[1:], last],
        [*named, dataclasses.replace(last, hash="0" * 64)],
        [*named, next_record(last.seq - 1, last.prev, "reserve", last.body)],
    ):
        with pytest.raises(LedgerError):
            LedgerState.from_snapshot(header, lines)


def test_a_line_seen_before_must_be_there_also_behind_a_snapshot() -> None:
    store = SnapshotStore()
    ledger = ledger_on(store)
    spend(ledger, 3, 20)
    seen = ledger._desk._seen
    spend(Budget.open(store), 4, 40)
    ledger._desk._start_anew()
    ledger._desk.refresh()  # over a snapshot that others wrote since
    ledger._desk._start_anew()
    ledger._desk._seen = (seen[0], "0" * 64)
    with pytest.raises(LedgerRollbackError):
        ledger._desk.refresh()


@pytest.mark.parametrize("lag", [0, 1, EVERY + 5, 30])
def test_an_anchor_that_lags_gets_every_line_it_lacks(lag: int) -> None:
    store, anchor = SnapshotStore(), DictAnchor()
    ledger = ledger_on(store, anchor=anchor)
    spend(ledger, 5)
    ledger.settle()
    last = store.head()[0]
    line = store.records(last - lag - 1)[0]
    anchor.known[ledger.ledger_id] = (line.seq, line.hash)
    anchor.log.clear()
    other = Budget.open(store, anchor=anchor)
    assert [seq for _, seq in anchor.log] == list(range(line.seq + 1, last + 1))
    spend(other, 6, 20)
    assert anchor.known[ledger.ledger_id] == store.head()
    anchor.known[ledger.ledger_id] = (line.seq, "0" * 64)
    with pytest.raises(LedgerRollbackError):
        Budget.open(store, anchor=anchor)


@pytest.mark.parametrize("member", ["blocks", "stream"])
def test_members_of_a_later_version_are_refused(member: str) -> None:
    header = LedgerHeader("a" * 32, "x", 4.0, 1e-6, "add_remove")
    line = next_record(0, header.digest, "bind", {"dataset_id": "d", member: 1})
    with pytest.raises(LedgerError, match="members that this version reads"):
        LedgerState(header).apply(line)


def test_only_verifying_finds_a_changed_line_before_the_last_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "b.db"
    with SQLiteStore.new(path) as store:
        ledger = ledger_on(store)
        spend(ledger, 9)
        ledger.settle()
        named, left = {line.seq for line in store.last_snapshot()}, ledger.remaining_epsilon
        first = next(line.seq for line in store.records() if line.kind == "reserve" and line.seq not in named)
    with sqlite3.connect(path) as link:
        link.execute("DROP TRIGGER lines_keep")
        link.execute("UPDATE lines SET body = replace(body, '\"count\":', '\"count\":1') WHERE seq = ?", (first,))
        link.execute(
            "CREATE TRIGGER lines_keep BEFORE UPDATE ON lines\n"
            "BEGIN SELECT RAISE(ABORT, 'lines are never changed'); END"
        )
    link.close()
    with SQLiteStore(path) as store:
        opened = Budget.open(store)
        assert opened.remaining_epsilon == left
        with pytest.raises(LedgerError, match=f"line {first} does not follow"):
            opened.verify()


def test_a_ledger_of_many_shares_is_read_without_summing_them_at_each(monkeypatch: pytest.MonkeyPatch) -> None:
    summed, numbers = 0, states.exact

    def exact(value: float) -> Any:
        nonlocal summed
        summed += 1
        return numbers(value)

    store = SnapshotStore()
    ledger = Budget(epsilon=100.0, delta=1e-6, store=store)
    for number in range(50):
        ledger.declare(f"c{number}", tickets=tickets(count=1), epsilon=1.0).reserve("t")
    monkeypatch.setattr(states, "exact", exact)
    state = replayed(store)
    assert state.promised()[0] == 50
    assert summed <= 5 * 50
