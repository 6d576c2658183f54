"""Commits wait in the process and are written with its next line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from langchain_dpicl import Budget
from langchain_dpicl.exceptions import LedgerError, LedgerUnavailableError
from langchain_dpicl.privacy.extensions import durable_writer as writers
from langchain_dpicl.privacy.ledger.shares import Reservation, Share
from langchain_dpicl.privacy.ledger.state import LedgerState
from langchain_dpicl.privacy.ledger.store import BLOCK, InMemoryStore, in_blocks, next_record
from langchain_dpicl.stores import SQLiteStore
from tests.durable import UNAVAILABLE, WatchedStore, on
from tests.ledgers import budget, share_of

pytestmark = pytest.mark.usefixtures("simple_prices")


def taken(ledger: Budget) -> Share:
    return share_of(ledger, refundable=True)


def kinds(store: InMemoryStore) -> list[str]:
    return [line.kind for line in store.records()]


def used(share: Share, count: int = 1) -> Reservation:
    held = share.reserve("t", count=count)
    held.burn(count)
    return held


def test_a_commit_is_written_in_the_transaction_of_the_next_line_as_one_line_for_each_reservation() -> None:
    store = WatchedStore()
    ledger = budget(store=store)
    share = taken(ledger)
    first, second = used(share, 2), used(share)
    first.commit()
    first.commit()
    second.commit()
    assert "commit" not in kinds(store)
    before = store.calls["transaction"]
    share.reserve("t")
    assert store.calls["transaction"] == before + 1
    assert kinds(store)[-3:] == ["commit", "commit", "reserve"]
    assert [line.body for line in store.records()][-3:-1] == [
        {"reservation": first.entry, "count": 2},
        {"reservation": second.entry, "count": 1},
    ]
    ledger.verify()


def test_what_is_written_late_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = WatchedStore()
    share = taken(budget(store=store))
    used(share, 2).commit()
    began = writers.time.monotonic()
    monkeypatch.setattr(writers, "time", SimpleNamespace(monotonic=lambda: began + 2 * writers.RIDE_SECONDS))
    assert share.committed("t") == 1
    assert kinds(store)[-1] == "commit"
    assert share.committed("t") == 1


def test_what_waits_counts_as_committed_here_and_as_open_elsewhere() -> None:
    store = WatchedStore()
    ledger = budget(store=store)
    share = taken(ledger)
    held = used(share, 2)
    held.commit(2)
    assert (share.committed("t"), ledger.dangling()) == (2, ())
    other = Budget.open(store)
    assert [each.count for each in other.dangling()] == [2]
    ledger.close()
    assert other.dangling() == ()


def test_a_commit_that_is_waited_for_is_written_at_once() -> None:
    store = WatchedStore()
    held = used(taken(budget(store=store)))
    held.commit(wait=True)
    assert kinds(store)[-1] == "commit"


def test_a_commit_that_waited_for_seconds_is_written_by_the_next_look(monkeypatch: pytest.MonkeyPatch) -> None:
    store, clock = WatchedStore(), [0.0]
    monkeypatch.setattr(writers, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    share = taken(budget(store=store))
    used(share).commit()
    share.remaining("t")
    assert kinds(store)[-1] == "reserve"
    clock[0] = writers.RIDE_SECONDS + 1
    share.remaining("t")
    assert kinds(store)[-1] == "commit"


@pytest.mark.parametrize("where", ["at_commit", "after_commit"])
def test_a_transaction_that_failed_is_undone_line_by_line_and_nothing_is_read_again(where: str) -> None:
    store = WatchedStore()
    ledger = budget(store=store)
    share = taken(ledger)
    used(share).commit()
    read = store.calls.get("records", 0)
    setattr(store, where, on("reserve", UNAVAILABLE))
    with pytest.raises(LedgerUnavailableError):
        share.reserve("t")
    used(share).commit()
    stood = where == "after_commit"
    assert share.remaining("t") == 10 - 2 - stood
    assert store.calls.get("records", 0) == read  # the transaction read what it lacked
    ledger.close()
    assert kinds(store).count("commit") == 2
    assert [each.count for each in Budget.open(store).dangling()] == [1] * stood
    Budget.open(store).verify()


def test_a_process_that_ends_writes_what_waits(tmp_path: Path) -> None:
    path = tmp_path / "b.db"
    code = (
        "import sys\n"
        "from langchain_dpicl.privacy.accounting.events import PureEvent\n"
        "from langchain_dpicl.budget.budget import Budget\n"
        "from langchain_dpicl.privacy.ledger.tickets import Ticket\n"
        "from langchain_dpicl.stores.sqlite_ledger import SQLiteStore\n"
        "budget = Budget(epsilon=4.0, delta=1e-6, store=SQLiteStore.new(sys.argv[1]))\n"
        "held = budget.declare('c', tickets=[Ticket('t', PureEvent(0.1), max_count=3)]).reserve('t')\n"
        "held.burn()\n"
        "held.commit()\n"
        "from langchain_dpicl.stores import sqlite_file\n"
        "sync = sqlite_file.sync_log\n"
        "sqlite_file.sync_log = lambda number: (sync(number), print('on the disk'))\n"
    )
    root = Path(__file__).resolve().parents[4]
    ended = subprocess.run(
        [sys.executable, "-c", code, str(path)], check=True, cwd=root, capture_output=True, text=True, timeout=300
    )
    assert ended.stdout.splitlines()[-1:] == ["on the disk"]
    with SQLiteStore(path) as store:
        assert Budget.open(store).dangling() == ()
        assert [line.kind for line in store.records()][-1] == "commit"


def test_a_ledger_is_read_in_blocks_and_stops_where_they_end() -> None:
    store = WatchedStore()
    ledger = budget(store=store, epsilon=4.0)
    asked: list[tuple[int, int | None]] = []
    lines, head = [], store.header().digest  # type: ignore[union-attr]
    for seq in range(2 * BLOCK + 1):
        lines.append(next_record(seq, head, "bind", {"dataset_id": str(seq)}))
        head = lines[-1].hash

    class Blocks:
        def records(self, after: int = 0, *, limit: int | None = None):
            asked.append((after, limit))
            return lines[after:][:limit]

    state = LedgerState(store.header())  # type: ignore[arg-type]
    for block in in_blocks(Blocks()):  # type: ignore[arg-type]
        state.apply_all(block)
    assert (state.seq, len(state.bindings)) == (len(lines), len(lines))
    assert asked == [(0, BLOCK), (BLOCK, BLOCK), (2 * BLOCK, BLOCK)]
    ledger.verify()


@pytest.mark.parametrize("kind", ["bind", "reserve", "commit", "give_back", "seal"])
def test_every_line_can_be_taken_back(kind: str) -> None:
    store = WatchedStore()
    ledger = budget(store=store)
    share = taken(ledger)
    held = share.reserve("t", count=3, tenant="acme")
    held.burn(2)
    held.commit(2, wait=True)
    held.give_back()
    share.reserve("t")
    state = LedgerState(store.header())  # type: ignore[arg-type]

    def shown() -> tuple[object, ...]:
        slot = ("t", None)
        left = state.left("c", slot) if "c" in state.shares else None
        counts = (left, state.used_by("acme", "c"), state.used_by("", "c"), state.unsettled("c", slot))
        names = list(state.shares), list(state.bindings)
        return (*counts, state.promised(), state.seq, state.head, *names, [*state.open_reservations()])

    seen = 0
    for line in [next_record(0, state.head, "bind", {"dataset_id": "d"})] if kind == "bind" else store.records():
        before = shown()
        undo = state.apply(line)
        after = shown()
        if line.kind == kind:
            seen += 1
            undo()
            assert shown() == before != after
            state.apply(line)
            assert shown() == after
    assert seen


def test_a_line_whose_stored_text_was_changed_is_refused(tmp_path: Path) -> None:
    with SQLiteStore.new(tmp_path / "b.db") as store:
        ledger = Budget(epsilon=4.0, delta=1e-6, store=store)
        taken(ledger).reserve("t")
        line = list(store.records())[-1]
        state = LedgerState(ledger._desk.header)
        for each in list(store.records())[:-1]:
            state.apply(each)
        text = line._text.replace('"count":1', '"count":0.5')  # type: ignore[union-attr]
        assert text != line._text
        with pytest.raises(LedgerError, match="does not follow"):
            state.apply(line.read_from(text))


def test_a_read_that_fails_behind_a_lost_answer_loses_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    store = WatchedStore()
    ledger = budget(store=store)
    share = taken(ledger)
    used(share).commit()
    store.at_commit = on("reserve", UNAVAILABLE)
    with pytest.raises(LedgerUnavailableError):
        share.reserve("t")
    with monkeypatch.context() as patch:

        def lost(*_: object, **__: object) -> None:
            raise UNAVAILABLE

        patch.setattr(store, "records", lost)
        with pytest.raises(LedgerUnavailableError):
            share.remaining("t")
    ledger.settle()
    assert kinds(store).count("commit") == 1
    assert ledger.dangling() == ()
