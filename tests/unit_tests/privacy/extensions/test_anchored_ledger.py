"""A ledger with an anchor: an older copy, or one that went on elsewhere, grants nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import (
    LedgerError,
    LedgerRollbackError,
    LedgerUnavailableError,
    PrivacyBudgetExceededError,
)
from langchain_dpicl.privacy.extensions import durable_writer, ledger_anchor
from langchain_dpicl.privacy.extensions.ledger_anchor import LedgerAnchor
from langchain_dpicl.privacy.ledger.shares import Reservation, Share
from langchain_dpicl.privacy.ledger.writer import LedgerWriter
from tests.durable import UNAVAILABLE, DictAnchor, WatchedStore, on, spent
from tests.ledgers import budget, share_of

pytestmark = pytest.mark.usefixtures("simple_prices")


def taken(ledger: Budget) -> Share:
    return share_of(ledger, refundable=True)


def again(store: WatchedStore, anchor: DictAnchor | None = None) -> Share:
    """The share as another process has it."""
    return taken(Budget.open(store, anchor=anchor))


def used(anchor: DictAnchor, count: int = 3) -> tuple[Budget, WatchedStore, Share]:
    store = WatchedStore()
    ledger = budget(store=store, anchor=anchor)
    share = taken(ledger)
    for _ in range(count):
        share.reserve("t")
    return ledger, store, share


def test_the_double_is_an_anchor() -> None:
    assert isinstance(DictAnchor(), LedgerAnchor)


def test_an_anchor_knows_a_ledger_from_its_start_and_each_line_that_is_written() -> None:
    anchor, store = DictAnchor(), WatchedStore()
    ledger = budget(store=store, anchor=anchor)
    assert anchor.known == {ledger.ledger_id: (0, store.header().digest)}  # type: ignore[union-attr]
    share = taken(ledger)
    assert [seq for _, seq in anchor.log] == [0]  # nothing was written
    share.reserve("t")  # seals as well: two lines, one transaction
    held = share.reserve("t")
    held.burn()
    held.commit(wait=True)
    assert anchor.log == [(ledger.ledger_id, seq) for seq in range(5)]
    assert anchor.known[ledger.ledger_id] == store.head()
    with pytest.raises(PrivacyBudgetExceededError):
        share.reserve("t", count=99)
    assert len(anchor.log) == 5


def test_without_an_anchor_an_older_copy_gives_budget_back_to_a_new_process() -> None:
    store = WatchedStore()
    share = taken(budget(store=store))
    share.reserve("t", count=4)
    backup = store.snapshot()
    share.reserve("t", count=6)
    store.restore(backup)
    assert again(store).remaining("t") == 6  # the documented limit


def test_an_older_copy_is_refused_at_open_by_the_anchor() -> None:
    anchor = DictAnchor()
    _, store, share = used(anchor)
    backup = store.snapshot()
    share.reserve("t")
    store.restore(backup)
    with pytest.raises(LedgerRollbackError, match="expected line 5 as the anchor knows it"):
        Budget.open(store, anchor=anchor)
    assert issubclass(LedgerRollbackError, LedgerError)


def test_an_emptied_ledger_is_refused_at_open_by_the_anchor() -> None:
    anchor = DictAnchor()
    _, store, _ = used(anchor)
    store.restore([])
    with pytest.raises(LedgerRollbackError):
        Budget.open(store, anchor=anchor)


def test_the_process_that_was_there_refuses_an_older_copy_with_the_same_error() -> None:
    for anchor in (None, DictAnchor()):
        store = WatchedStore()
        share = taken(budget(store=store, anchor=anchor))
        backup = store.snapshot()
        share.reserve("t")
        store.restore(backup)
        with pytest.raises(LedgerRollbackError):
            share.reserve("t")
        assert store.snapshot() == backup


@pytest.mark.parametrize("lead", [0, 1, 4])
def test_a_clone_that_went_on_elsewhere_grants_nothing(lead: int) -> None:
    """Two hosts with one anchor: the first to write after the cut goes on, the other stops, however far it came."""
    anchor = DictAnchor()
    ledger, store, share = used(anchor)
    clone = store.clone()
    for _ in range(lead):
        taken(Budget.open(clone)).reserve("t")  # without the anchor: nobody hears of it
    share.reserve("t")
    lines = len(clone.snapshot())
    with pytest.raises(LedgerRollbackError):
        again(clone, anchor).reserve("t")
    assert len(clone.snapshot()) == lines
    ledger.verify()
    share.reserve("t")


def test_of_two_open_hosts_the_second_to_spend_is_refused_before_it_writes() -> None:
    anchor = DictAnchor()
    _, store, share = used(anchor)
    clone = store.clone()
    elsewhere = again(clone, anchor)
    assert elsewhere.remaining("t") == 7
    share.reserve("t")
    before = clone.snapshot()
    with pytest.raises(LedgerRollbackError):
        elsewhere.reserve("t")
    assert clone.snapshot() == before


def test_of_two_hosts_that_write_at_the_same_moment_one_is_refused() -> None:
    anchor = DictAnchor()
    _, store, share = used(anchor)
    clone = store.clone()
    elsewhere = again(clone, anchor)
    clone.at_commit = lambda kinds: share.reserve("t")  # between the look at the anchor and the commit
    with pytest.raises(LedgerRollbackError):
        elsewhere.reserve("t")
    clone.at_commit = lambda kinds: None
    share.reserve("t")
    with pytest.raises(LedgerRollbackError):
        elsewhere.reserve("t")


def test_others_that_go_on_between_two_looks_are_no_rollback() -> None:
    anchor = DictAnchor()
    ledger, store, share = used(anchor)
    other = again(store, anchor)
    for _ in range(2):
        other.reserve("t")
        assert share.remaining("t") == other.remaining("t")
        share.reserve("t")
        ledger.verify()
    assert spent(store)["reserve"] == 7


def test_a_check_that_writes_a_waiting_line_does_not_go_back_to_the_anchor_s_earlier_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The commit that waited moves the anchor on within `verify`; then another process's line is not there yet."""
    anchor = DictAnchor()
    ledger, store, share = used(anchor)
    other = again(store, anchor)
    held = share.reserve("t")
    held.burn()
    held.commit()
    before, later = anchor.known[ledger.ledger_id], time.monotonic() + durable_writer.RIDE_SECONDS + 1
    with monkeypatch.context() as patched:
        patched.setattr(durable_writer, "time", SimpleNamespace(monotonic=lambda: later))
        ledger.verify()
    assert anchor.known[ledger.ledger_id] == store.head() != before  # the check wrote the line
    write, meanwhile = anchor.write, []

    def write_late(ledger_id: str, seq: int, head: str) -> None:
        anchor.write = write  # type: ignore[method-assign]
        meanwhile.append(share.reserve("t"))
        write(ledger_id, seq, head)

    anchor.write = write_late  # type: ignore[method-assign]
    other.reserve("t")
    assert meanwhile


def test_an_anchor_is_read_before_the_ledger_so_others_may_go_on_meanwhile() -> None:
    anchor = DictAnchor()
    _, store, _ = used(anchor)
    other = again(store, anchor)
    read, turns = anchor.read, []

    def read_late(ledger_id: str) -> Any:
        if not turns:
            turns.append(1)
            other.reserve("t")
        return read(ledger_id)

    anchor.read = read_late  # type: ignore[method-assign]
    assert again(store, anchor).remaining("t") == 6


def test_an_anchor_that_lags_is_brought_up_at_open() -> None:
    """A crash between the commit and the anchor's line."""
    anchor = DictAnchor()
    ledger, store, _ = used(anchor)
    again(store).reserve("t")
    assert anchor.known[ledger.ledger_id][0] == 4
    Budget.open(store, anchor=anchor)
    assert anchor.known[ledger.ledger_id] == store.head()


def test_one_anchor_serves_several_ledgers() -> None:
    anchor = DictAnchor()
    one, two = used(anchor, 2)[0], used(anchor, 5)[0]
    assert (anchor.known[one.ledger_id][0], anchor.known[two.ledger_id][0]) == (3, 6)


def test_a_changed_line_under_the_anchor_is_refused() -> None:
    anchor = DictAnchor()
    ledger, store, _ = used(anchor)
    anchor.known[ledger.ledger_id] = (2, "0" * 64)
    with pytest.raises(LedgerRollbackError, match="line 2"):
        Budget.open(store, anchor=anchor)
    with pytest.raises(LedgerRollbackError, match="line 2"):
        ledger.verify()


def test_verify_asks_the_anchor_also_where_nothing_is_read_anew() -> None:
    anchor = DictAnchor()
    ledger, _, _ = used(anchor)
    ledger.verify()
    anchor.known[ledger.ledger_id] = (40, "0" * 64)
    with pytest.raises(LedgerRollbackError, match="line 40"):
        ledger.verify()


# -- an anchor that fails --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [UNAVAILABLE, OSError(28, "No space left"), KeyError("secret")])
def test_if_the_anchor_cannot_be_written_nothing_is_granted_and_the_charge_stays(fault: Exception) -> None:
    anchor = DictAnchor()
    ledger, store, share = used(anchor, 1)
    anchor.faults["write"] = fault
    with pytest.raises(LedgerUnavailableError) as caught:
        share.reserve("t", count=2)
    assert "secret" not in "".join(traceback.format_exception(caught.value))
    assert caught.value.__context__ is None
    assert spent(store)["reserve"] == 3
    anchor.faults.clear()
    assert share.remaining("t") == 7
    assert [(left.entry, left.count) for left in ledger.dangling()] == [(2, 1), (3, 2)]
    share.reserve("t")
    assert anchor.known[ledger.ledger_id] == store.head()


@pytest.mark.parametrize("fault", [UNAVAILABLE, PermissionError(13, "secret")])
def test_if_the_anchor_cannot_be_read_nothing_is_written_or_granted(fault: Exception) -> None:
    anchor = DictAnchor()
    _, store, share = used(anchor, 1)
    lines = store.snapshot()
    anchor.faults["read"] = fault
    for act in (lambda: share.reserve("t"), lambda: Budget.open(store, anchor=anchor)):
        with pytest.raises(LedgerUnavailableError) as caught:
            act()
        assert "secret" not in str(caught.value)
        assert caught.value.__context__ is None
    assert store.snapshot() == lines
    assert share.remaining("t") == 9  # looking needs no anchor


def test_a_commit_whose_anchor_failed_is_written_once() -> None:
    anchor = DictAnchor()
    ledger, store, share = used(anchor, 0)
    held = share.reserve("t")
    held.burn()
    anchor.faults["write"] = UNAVAILABLE
    with pytest.raises(LedgerUnavailableError):
        held.commit(wait=True)
    anchor.faults.clear()
    assert spent(store) == {"reserve": 1, "commit": 1, "give_back": 0}
    assert (held.uncommitted, ledger.dangling()) == (0, ())
    share.reserve("t")
    assert anchor.known[ledger.ledger_id] == store.head()


# -- answers that were lost -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_commit_whose_answer_was_lost_stands_once(where: str) -> None:
    store = WatchedStore()
    ledger = budget(store=store)
    held = taken(ledger).reserve("t", count=2)
    held.burn(2)
    setattr(store, "at_commit" if where == "before" else "after_commit", on("commit", UNAVAILABLE))
    with pytest.raises(LedgerUnavailableError):
        held.commit(wait=True)
    assert (spent(store)["commit"], held.uncommitted) == (1, 1)
    held.commit()
    assert (spent(store)["commit"], held.uncommitted, ledger.dangling()) == (2, 0, ())
    ledger.verify()


def test_a_commit_that_others_lines_follow_is_still_known() -> None:
    store = WatchedStore()
    share = taken(budget(store=store))
    held, other = share.reserve("t"), again(store)
    held.burn()
    store.after_commit = on("commit", UNAVAILABLE)
    with pytest.raises(LedgerUnavailableError):
        held.commit(wait=True)
    other.reserve("t")
    assert spent(store)["commit"] == 1


def test_a_line_of_another_in_the_place_of_a_lost_commit_is_not_taken_for_it() -> None:
    store = WatchedStore()
    share = taken(budget(store=store))
    held, other = share.reserve("t"), again(store)
    held.burn()
    store.at_commit = on("commit", UNAVAILABLE)  # it never stood
    with pytest.raises(LedgerUnavailableError):
        held.commit(wait=True)
    other.reserve("t")  # takes its number
    assert spent(store)["commit"] == 1
    assert held.uncommitted == 0


@pytest.mark.parametrize("where", ["at_commit", "after_commit"])
def test_tickets_whose_return_was_not_answered_stay_unusable(where: str) -> None:
    store = WatchedStore()
    share = taken(budget(store=store))
    held = share.reserve("t", count=3)
    setattr(store, where, on("give_back", UNAVAILABLE))
    with pytest.raises(LedgerUnavailableError):
        held.give_back()
    assert (held.unburnt, held.give_back()) == (0, 0)
    with pytest.raises(PrivacyBudgetExceededError):
        held.burn()
    assert share.remaining("t") == (7 if where == "at_commit" else 10)


@pytest.mark.parametrize("where", ["at_commit", "after_commit"])
def test_a_reservation_whose_answer_was_lost_grants_nothing_and_counts_if_it_stands(where: str) -> None:
    store = WatchedStore()
    ledger = budget(store=store)
    share = taken(ledger)
    setattr(store, where, on("reserve", UNAVAILABLE))
    with pytest.raises(LedgerUnavailableError):
        share.reserve("t", count=4)
    stands = where == "after_commit"
    assert share.remaining("t") == (6 if stands else 10)
    assert [left.count for left in ledger.dangling()] == [4] * stands
    assert share.reserve("t", count=6 if stands else 10).unburnt == (6 if stands else 10)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, GeneratorExit, SystemExit])
def test_a_stop_at_any_point_of_a_write_leaves_the_ledger_usable(stop: type[BaseException]) -> None:
    for where in ("at_commit", "after_commit"):
        store = WatchedStore()
        share = taken(budget(store=store))
        setattr(store, where, on("reserve", stop()))
        with pytest.raises(stop):
            share.reserve("t")
        share.reserve("t")
        assert spent(store)["reserve"] == 10 - share.remaining("t") == (2 if where == "after_commit" else 1)


# -- forks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_an_ancestors_number", [False, True])
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_forked_while_another_thread_writes_reads_and_spends_on_its_own(
    monkeypatch: pytest.MonkeyPatch, has_an_ancestors_number: bool
) -> None:
    if has_an_ancestors_number:
        monkeypatch.setattr(os, "getpid", lambda: 1)
    store = WatchedStore()
    ledger = budget(store=store)
    share = taken(ledger)
    share.reserve("t")
    store._check_process = lambda: None  # type: ignore[method-assign]  as a store that opens anew in each process
    inside, go_on = threading.Event(), threading.Event()

    def hold(_: list[str]) -> None:
        inside.set()
        assert go_on.wait(60)

    store.at_commit = hold
    writer = threading.Thread(target=lambda: share.reserve("t"))
    writer.start()
    assert inside.wait(60)
    child = os.fork()
    if not child:
        code = 1
        signal.alarm(20)  # to wait for the parent's lock would be to wait without end
        try:
            store._lock, store._view, store.at_commit = threading.RLock(), None, lambda kinds: None
            del store._lines[2:]  # what the parent had not committed
            share.reserve("t", count=9)
            code = 0 if share.remaining("t") == 0 and ledger.remaining_epsilon == 3.0 else 2
        finally:
            os._exit(code)
    go_on.set()
    writer.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert share.remaining("t") == 8


def test_a_budget_never_makes_a_ledger_in_a_store_that_was_merely_opened() -> None:
    class Opened(WatchedStore):
        def create(self, header: Any) -> Any:
            raise LedgerError("no ledger is here, and none is made")

    with pytest.raises(LedgerError, match="none is made"):
        budget(store=Opened())
    with pytest.raises(LedgerError, match="expected a ledger, found none"):
        Budget.open(Opened())


def test_closing_a_budget_closes_its_store() -> None:
    closed = []
    store = WatchedStore()
    ledger = budget(store=store)
    ledger.close()  # nothing to close
    store.close = lambda: closed.append(1)  # type: ignore[attr-defined]
    ledger.close()
    assert closed == [1]


def test_an_anchor_that_can_be_read_and_not_written_costs_one_ticket_and_not_one_for_each_try() -> None:
    anchor = DictAnchor()
    ledger, store, share = used(anchor)
    write = anchor.write
    anchor.write = _unwritable  # type: ignore[method-assign]
    for _ in range(5):
        assert isinstance(_outcome(lambda: share.reserve("t")), LedgerUnavailableError)
    assert [line.kind for line in store.records()].count("reserve") == 4
    anchor.write = write  # type: ignore[method-assign]
    assert share.reserve("t").count == 1
    last = store.records()[-1]
    assert anchor.known == {ledger.ledger_id: (last.seq, last.hash)}
    assert [seq for _, seq in anchor.log] == list(range(last.seq + 1))  # line by line, as before
    assert again(store, anchor).reserve("t").count == 1


def _refuses_first(method: Callable[..., Any], fault: Exception) -> Callable[..., Any]:
    """The method of an anchor that fails each time it is asked first, and not at the second try."""
    tries: set[tuple[Any, ...]] = set()

    def asked(*wanted: Any) -> Any:
        if wanted not in tries:
            tries.add(wanted)
            raise fault
        tries.discard(wanted)
        return method(*wanted)

    return asked


@pytest.mark.parametrize("fault", [UNAVAILABLE, OSError(11, "secret")])
def test_an_anchor_that_is_locked_now_and_then_costs_no_ticket(fault: Exception) -> None:
    anchor = DictAnchor()
    ledger, store, share = used(anchor)
    anchor.write = _refuses_first(anchor.write, fault)  # type: ignore[method-assign]
    anchor.read = _refuses_first(anchor.read, fault)  # type: ignore[method-assign]
    for _ in range(5):
        share.reserve("t").burn()
    assert spent(store)["reserve"] == 8
    assert anchor.known[ledger.ledger_id] == store.head()


def test_the_error_of_an_anchor_that_cannot_be_written_says_what_stays_charged() -> None:
    anchor = DictAnchor()
    _, store, share = used(anchor)
    anchor.faults["write"] = UNAVAILABLE
    with pytest.raises(LedgerUnavailableError, match="the disk is full") as caught:
        share.reserve("t")
    assert f"up to line {store.head()[0]} stays charged" in str(caught.value)


@pytest.mark.parametrize("method", ["read", "write"])
def test_an_error_of_an_anchor_without_words_is_no_answer(method: str) -> None:
    anchor = DictAnchor()
    _, _, share = used(anchor)
    anchor.faults[method] = LedgerUnavailableError()
    with pytest.raises(
        LedgerUnavailableError, match=rf"expected to {method}.* a stone in the garden, found it unavail"
    ):
        share.reserve("t")


def test_an_anchor_that_waited_by_itself_is_not_asked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_anchor, "_SOON", -1.0)
    anchor = DictAnchor()
    _, _, share = used(anchor, 1)
    tries: list[Any] = []

    def locked(*wanted: Any) -> None:
        tries.append(wanted)
        raise UNAVAILABLE

    anchor.write = locked  # type: ignore[method-assign]
    with pytest.raises(LedgerUnavailableError):
        share.reserve("t")
    assert len(tries) == 1


def _unwritable(*_: object) -> None:
    raise UNAVAILABLE


# -- outages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", ["the writer", "the store"])
@pytest.mark.parametrize("patience", [0.0, 60.0])
def test_who_waited_long_through_an_outage_hears_of_it_without_another_wait(
    patience: float, of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = WatchedStore()
    monkeypatch.setattr(durable_writer, "LOCK_TIMEOUT", patience if of == "the writer" else 60.0)
    if of == "the store":
        store.timeout = patience  # type: ignore[attr-defined]
    share = taken(budget(store=store))
    share.reserve("t")
    store.calls.clear()
    started, all_stand, turn = threading.Event(), threading.Event(), LedgerWriter._turn
    in_line: set[int] = set()

    def noted(desk: LedgerWriter, lock: Any) -> Any:
        in_line.add(threading.get_ident())
        if len(in_line) == 5:
            all_stand.set()
        return turn(desk, lock)

    monkeypatch.setattr(LedgerWriter, "_turn", noted)

    def stuck(_: list[str]) -> None:
        if started.is_set():
            return
        started.set()
        assert all_stand.wait(60)
        raise UNAVAILABLE

    store.at_commit = stuck

    def first() -> Any:
        return _outcome(lambda: share.reserve("t"))

    def later() -> Any:
        assert started.wait(60)
        return _outcome(lambda: share.reserve("t"))

    with ThreadPoolExecutor(5) as pool:
        told = [one.result() for one in [pool.submit(first), *(pool.submit(later) for _ in range(4))]]
    others = LedgerUnavailableError if not patience else Reservation
    assert [type(one) for one in told] == [LedgerUnavailableError, *[others] * 4]
    assert store.calls["transaction"] == (1 if not patience else 5)
    assert share.reserve("t").count == 1  # who asks anew is answered anew


@pytest.mark.parametrize("took", [5.0, 4.0])
def test_after_an_outage_one_thread_tries_and_the_others_do_not_wait_behind_it(
    took: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault that came at once is no outage: who comes then waits for its turn."""
    now = 100.0
    monkeypatch.setattr(durable_writer, "time", SimpleNamespace(monotonic=lambda: now))
    store = WatchedStore()
    share = taken(budget(store=store))
    share.reserve("t")
    store.calls.clear()
    tries, asked = threading.Event(), threading.Event()

    def slow(_: list[str]) -> None:
        nonlocal now
        now += took  # of 10 seconds
        raise UNAVAILABLE

    def held(_: list[str]) -> None:
        store.at_commit = lambda _: None
        tries.set()
        assert asked.wait(60)

    store.at_commit = slow
    assert isinstance(_outcome(lambda: share.reserve("t")), LedgerUnavailableError)
    store.at_commit = held
    with ThreadPoolExecutor(5) as pool:
        first = pool.submit(share.reserve, "t")
        assert tries.wait(60)
        others = [pool.submit(_outcome, lambda: share.reserve("t")) for _ in range(4)]
        if took == 5.0:
            assert [type(one.result(60)) for one in others] == [LedgerUnavailableError] * 4
        asked.set()
        assert first.result(60).count == 1
        kinds = {type(one.result(60)) for one in others}
    assert kinds == {LedgerUnavailableError if took == 5.0 else Reservation}
    assert store.calls["transaction"] == (2 if took == 5.0 else 6)
    assert share.reserve("t").count == 1


def _outcome(act: Any) -> Any:
    try:
        return act()
    except LedgerError as error:
        return error
