"""A ledger's lock is given up when lines are visible; tickets are granted, and anchors written, when they are durable."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import LedgerError, LedgerRollbackError, LedgerUnavailableError
from langchain_dpicl.privacy.ledger.shares import Share
from tests.durable import UNAVAILABLE, DictAnchor, EarlyStore
from tests.ledgers import budget, share_of

pytestmark = pytest.mark.usefixtures("simple_prices")


def made(anchor: DictAnchor | None = None) -> tuple[Budget, EarlyStore, Share]:
    store = EarlyStore()
    ledger = budget(store=store, anchor=anchor)
    return ledger, store, share_of(ledger, refundable=True)


def elsewhere(store: EarlyStore, anchor: DictAnchor | None = None) -> Share:
    """The share as another process has it."""
    return share_of(Budget.open(store, anchor=anchor), refundable=True)


def test_nothing_is_granted_before_the_line_is_on_the_disk() -> None:
    _, store, share = made()
    store.at_flush = lambda: (_ for _ in ()).throw(UNAVAILABLE)
    with pytest.raises(LedgerUnavailableError):
        share.reserve("t")
    assert [line.kind for line in store.records()] == ["seal", "reserve"]
    assert store.on_disk == 0
    store.at_flush = lambda: None
    assert share.remaining("t") == 9  # the charge stands
    held = share.reserve("t")
    assert held.entry == store.on_disk == 3


def test_another_process_writes_while_this_one_waits_for_the_disk() -> None:
    _, store, share = made()
    share.reserve("t")
    other, entries = elsewhere(store), []

    def meanwhile() -> None:
        store.at_flush = lambda: None
        entries.append(other.reserve("t").entry)

    store.at_flush = meanwhile
    assert (share.reserve("t").entry, entries) == (3, [4])
    assert store.on_disk == 4


def test_threads_share_the_wait_for_the_disk() -> None:
    ledger, store, share = made()
    share.reserve("t")
    is_waiting, goes_on = threading.Event(), threading.Event()

    def slow() -> None:
        is_waiting.set()
        goes_on.wait(60)

    store.at_flush, before = slow, ledger._desk.flushes
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(share.reserve, "t")
        is_waiting.wait(60)
        others = [pool.submit(share.reserve, "t") for _ in range(3)]
        while ledger._desk._visible[1] < 6:  # all of them are visible, and noted, while the first one waits
            time.sleep(0.001)
        assert not first.done()
        goes_on.set()
        assert {first.result(60).entry, *(each.result(60).entry for each in others)} == {3, 4, 5, 6}
    assert ledger._desk.flushes == before + 2


def test_a_server_that_loses_visible_lines_raises_no_alarm_and_its_tickets_are_not_granted() -> None:
    ledger, store, share = made()
    kept = share.reserve("t")

    def lost() -> None:
        store.at_flush = lambda: None
        store.restart()

    store.at_flush = lost
    with pytest.raises(LedgerUnavailableError, match="gone"):
        share.reserve("t")
    assert share.remaining("t") == 9
    again = share.reserve("t")
    assert (kept.entry, again.entry) == (2, 3)
    ledger.verify()


def test_a_line_of_another_in_the_place_of_a_lost_one_grants_nothing() -> None:
    _, store, share = made()
    share.reserve("t")
    other = elsewhere(store)

    def lost() -> None:
        store.at_flush = lambda: None
        store.restart()
        other.reserve("t")

    store.at_flush = lost
    with pytest.raises(LedgerUnavailableError, match="gone"):
        share.reserve("t")
    assert share.remaining("t") == 8


def test_a_durable_line_that_is_gone_is_a_rollback() -> None:
    _, store, share = made()
    for _ in range(2):
        share.reserve("t")
    store.on_disk -= 1
    store.restart()
    with pytest.raises(LedgerRollbackError):
        share.reserve("t")
    with pytest.raises(LedgerRollbackError):
        share.remaining("t")


def test_what_a_reader_was_shown_is_durable() -> None:
    _, store, share = made()
    share.reserve("t")
    with store.transaction(flush=False) as view:
        view.append("bind", {"dataset_id": "d"})
    assert store.on_disk == 2
    assert share.remaining("t") == 9
    assert store.on_disk == 3


@pytest.mark.parametrize("fault", ["before", "after"])
def test_commits_that_rode_with_a_lost_line_wait_again(fault: str) -> None:
    ledger, store, share = made()
    held = share.reserve("t", count=2)
    held.burn(2)
    held.commit(2)

    def step() -> None:
        store.at_flush = lambda: None
        if fault == "before":
            store.restart()
        raise UNAVAILABLE

    store.at_flush = step
    with pytest.raises(LedgerUnavailableError):
        share.reserve("t")
    assert share.committed("t") == 2
    ledger.settle()
    assert (share.committed("t"), elsewhere(store).committed("t")) == (2, 2)
    assert [line.body["count"] for line in store.records() if line.kind == "commit"] == [2]


def test_reading_anew_counts_no_commit_twice() -> None:
    ledger, store, share = made()
    held = share.reserve("t", count=3)
    held.burn(3)
    held.commit(wait=True)
    held.commit(2)
    ledger._desk._start_anew()
    assert share.committed("t") == 3
    ledger.settle()
    assert elsewhere(store).committed("t") == 3


def test_a_commit_that_cannot_be_written_keeps_nobody_from_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, store, share = made()
    held = share.reserve("t")
    held.burn()
    held.commit()
    monkeypatch.setattr("langchain_dpicl.privacy.extensions.durable_writer.RIDE_SECONDS", -1.0)
    store.at_commit = lambda kinds: (_ for _ in ()).throw(UNAVAILABLE)
    assert share.remaining("t") == 9
    store.at_commit = lambda kinds: None
    assert share.remaining("t") == 9
    assert elsewhere(store).committed("t") == 1
    assert ledger.dangling() == ()


def test_an_anchor_hears_of_durable_lines_only() -> None:
    anchor = DictAnchor()
    ledger, store, share = made(anchor)
    share.reserve("t")
    seen = []

    def look() -> None:
        seen.append(anchor.known[ledger.ledger_id][0])
        raise UNAVAILABLE

    store.at_flush = look
    for _ in range(2):
        with pytest.raises(LedgerUnavailableError):
            share.reserve("t")
    assert set(seen) == {2}
    assert anchor.known[ledger.ledger_id][0] == 2
    store.restart()
    store.at_flush = lambda: None
    assert share.reserve("t").entry == 3
    assert anchor.known[ledger.ledger_id] == store.head()
    ledger.verify()


def test_an_anchor_gets_every_line_also_where_threads_share_the_wait() -> None:
    anchor = DictAnchor()
    ledger, store, share = made(anchor)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: share.reserve("t"), range(8)))
    assert sorted({seq for _, seq in anchor.log}) == list(range(len(store.records()) + 1))
    assert anchor.known[ledger.ledger_id] == store.head()


def test_a_grant_is_refused_where_the_lines_were_read_anew_before_the_anchor_had_them() -> None:
    anchor = DictAnchor()
    ledger, store, share = made(anchor)
    share.reserve("t")

    def fault() -> None:
        store.at_flush = lambda: None
        ledger._desk._start_anew()  # what another thread does after an error of the store

    store.at_flush = fault
    with pytest.raises(LedgerUnavailableError, match="read anew"):
        share.reserve("t")
    assert share.reserve("t").entry == 4
    assert anchor.known[ledger.ledger_id] == store.head()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_writes_no_commit_of_its_parent_and_waits_for_no_thread_of_it() -> None:
    ledger, store, share = made()
    held = share.reserve("t")
    held.burn()
    held.commit()
    with ledger._desk._flushing:  # as where another thread of the parent waits for the disk
        pid = os.fork()
        if not pid:
            desk, code = ledger._desk, 1
            try:
                with desk.lock:
                    code = 0 if desk._flushing.acquire(timeout=60) and not desk._waiting else 2  # type: ignore[attr-defined]
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    with pytest.raises(LedgerError):
        held.commit()
    ledger.settle()
    assert elsewhere(store).committed("t") == 1
