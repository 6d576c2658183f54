"""A process that reserves one ticket after another writes one line for several, and keeps the rest in a purse."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import itertools
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl import Budget
from langchain_dpicl._opaque import this_process
from langchain_dpicl.exceptions import (
    ConfigurationError,
    LedgerError,
    LedgerRollbackError,
    LedgerUnavailableError,
    PrivacyBudgetExceededError,
    SealedShareError,
    TenantCapExceededError,
)
from langchain_dpicl.privacy.extensions import durable_writer as writers
from langchain_dpicl.privacy.ledger.shares import Reservation, Share
from langchain_dpicl.privacy.ledger.store import InMemoryStore
from langchain_dpicl.privacy.ledger.writer import TicketRequest
from langchain_dpicl.reports.ledger_audit import check_ledger
from langchain_dpicl.stores import SQLiteStore, sqlite_ledger
from tests.durable import UNAVAILABLE, DictAnchor, EarlyStore, WatchedStore, on
from tests.faults.stops import stopped_at
from tests.ledgers import budget, spend_and_leave, tickets

pytestmark = pytest.mark.usefixtures("simple_prices")

MANY = 10_000
HAS_FORK = hasattr(os, "fork")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the ledger reads."""
    now = [1000.0]
    monkeypatch.setattr(writers, "time", type("Clock", (), {"monotonic": staticmethod(lambda: now[0])}))
    return now


def share_of(ledger: Budget, count: int = MANY, **options: Any) -> Share:
    given = tickets(0.5 / count, count, **{"refundable": True, **options})
    return ledger.declare("c", tickets=given, epsilon=1.0)


def made(store: InMemoryStore | None = None, *, count: int = MANY, **options: Any) -> tuple[Budget, Any, Share]:
    store = EarlyStore() if store is None else store
    ledger = budget(store=store, **options)
    return ledger, store, share_of(ledger, count)


def elsewhere(store: Any, count: int = MANY, **options: Any) -> Share:
    """The share as another process has it."""
    return share_of(Budget.open(store, **options), count)


def use(share: Share, count: int = 1, **whose: Any) -> list[Reservation]:
    """Uses tickets one by one."""
    used = []
    for _ in range(count):
        held = share.reserve("t", **whose)
        held.burn()
        held.commit()
        used.append(held)
    return used


def leases(store: InMemoryStore, kind: str = "reserve") -> list[int]:
    return [line.body["count"] for line in store.records() if line.kind == kind]


# --- how many -----------------------------------------------------------------------------------------------------


def test_who_asks_often_gets_four_times_as_many_each_time_up_to_most_held(clock: list[float]) -> None:
    _, store, share = made()
    used = use(share, 300)
    assert leases(store) == [1, 4, 16, 64, 64, 64, 64, 64]
    assert len({(held.entry, held.index) for held in used}) == 300
    assert [held.index for held in used[:5]] == [0, 0, 1, 2, 3]
    assert [held.index for held in used[5:21]] == list(range(16))


def test_a_leased_ticket_has_the_delta_of_its_share_where_the_ledger_has_to_be_read_anew(clock: list[float]) -> None:
    ledger, store, share = made()
    use(share, 2)
    ledger._desk._start_anew()  # what another thread does after an error of the store
    assert share.reserve("t").delta == share.delta == ledger.delta / 4
    assert leases(store) == [1, 4]


def test_who_asks_seldom_holds_nothing(clock: list[float]) -> None:
    _, store, share = made()
    for _ in range(20):
        use(share)
        clock[0] += 2
    assert set(leases(store)) == {1}


def test_who_becomes_slow_holds_what_it_uses_in_a_second(clock: list[float]) -> None:
    _, store, share = made()
    use(share, 85)
    for _ in range(100):
        clock[0] += 0.25
        use(share)
    assert leases(store)[:5] == [1, 4, 16, 64, 64]
    assert leases(store)[5:] == [4] * 9


def test_a_share_of_few_tickets_is_never_leased_and_the_end_of_a_large_one_is_not(clock: list[float]) -> None:
    _, store, share = made(count=63)
    use(share, 63)
    assert leases(store) == [1] * 63
    _, store, share = made(count=1000)
    use(share, 1000)
    assert leases(store)[:8] == [1, 4, 16, 30, 29, 28, 27, 27]  # at most a 32nd of what is left
    assert leases(store)[-63:] == [1] * 63
    assert sum(leases(store)) == 1000
    with pytest.raises(PrivacyBudgetExceededError) as caught:
        share.reserve("t")
    assert (caught.value.remaining, caught.value.held) == (0, 0)


@pytest.mark.parametrize("options", [{"most_held": 1}, {}])
def test_leases_can_be_turned_off_and_a_ledger_in_memory_has_none(options: dict[str, Any]) -> None:
    store = EarlyStore() if options else InMemoryStore()
    _, _, share = made(store, **options)
    use(share, 50)
    assert set(leases(store)) == {1}


def test_most_held_is_a_number_of_at_least_one() -> None:
    for wrong in (0, -1, True, 2.5, "64"):
        with pytest.raises(ConfigurationError, match="most_held"):
            budget(store=EarlyStore(), most_held=wrong)


def test_tickets_that_cannot_go_back_and_blocks_of_several_are_reserved_as_asked(clock: list[float]) -> None:
    store = EarlyStore()
    share = share_of(budget(store=store), refundable=False)
    for _ in range(10):
        share.reserve("t")
    assert leases(store) == [1] * 10
    _, store, share = made()
    for _ in range(10):
        share.reserve("t", count=3)
    assert leases(store) == [3] * 10


def test_a_pool_leases_releases_of_one_size_and_gets_exactly_what_is_left_back(clock: list[float]) -> None:
    store = EarlyStore()
    ledger = budget(store=store)
    pool = ledger.gdp_pool("p", epsilon=1.0)
    full = pool.remaining_mu_squared
    held = [pool.reserve(mu=0.01) for _ in range(20)] + [pool.reserve(mu=0.02)]
    assert leases(store) == [1, 4, 16, 1]
    assert pool.remaining_mu_squared == pytest.approx(full - 20 * 0.01**2 - 0.02**2)
    assert ledger.use().pools["p"] == pool.remaining_mu_squared
    for each in held:
        each.give_back()
    ledger.close()
    assert Budget.open(store).gdp_pool("p", epsilon=1.0).remaining_mu_squared == full


# --- for whom -----------------------------------------------------------------------------------------------------


def test_a_ticket_goes_only_to_those_for_whom_the_same_line_would_be_written(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, wrappers = EarlyStore(), ["a.module"]
    monkeypatch.setattr("langchain_dpicl.budget.budget.allowed_wrappers", lambda: tuple(wrappers))
    share = share_of(budget(store=store))
    whose: list[dict[str, Any]] = [{}, {"tenant": "x"}, {"tenant": "x", "tenant_cap": 5000}, {"tenant": "y"}]
    for _ in range(3):
        use(share, 100, **whose[0])
        for each in whose:
            held = use(share, 5, **each)[-1]
            line = store.records()[held.entry - 1]
            assert line.body.get("tenant") == each.get("tenant")
            assert line.body["allowed_wrappers"] == wrappers
        wrappers.append(f"another{len(wrappers)}.module")
    assert max(leases(store)) == 64


def test_a_cap_holds_over_all_processes_and_one_that_is_lowered_at_once(clock: list[float]) -> None:
    _, store, share = made()
    other = elsewhere(store)
    granted: Counter[str] = Counter()
    for number in range(200):
        with contextlib.suppress(TenantCapExceededError):
            who = (share, other)[number % 2]
            who.reserve("t", tenant="x", tenant_cap=50)
            granted["x"] += 1
    assert granted["x"] == 50 == share.used_by("x")
    use(share, 20, tenant="y", tenant_cap=100)
    assert share.used_by("y") == 20
    assert elsewhere(store).used_by("y") > 20  # those that the first process holds count as used elsewhere
    with pytest.raises(TenantCapExceededError):
        share.reserve("t", tenant="y", tenant_cap=20)
    assert elsewhere(store).used_by("y") == 20  # they went back first
    share.reserve("t", tenant="y", tenant_cap=21)


def test_a_share_that_was_replaced_gets_no_ticket_of_the_purse(clock: list[float]) -> None:
    store = EarlyStore()
    ledger = budget(store=store)
    old = share_of(ledger, MANY)
    new = share_of(ledger, MANY // 2)
    use(new, 100)
    before = len(store.records())
    with pytest.raises(SealedShareError):
        old.reserve("t")
    assert len(store.records()) == before
    use(new)


# --- spend before you look ----------------------------------------------------------------------------------------


def test_nothing_enters_the_purse_before_its_line_is_on_the_disk(clock: list[float]) -> None:
    _, store, share = made()
    use(share, 21)
    store.at_flush = lambda: (_ for _ in ()).throw(UNAVAILABLE)
    for _ in range(3):
        with pytest.raises(LedgerUnavailableError):
            share.reserve("t")
    store.at_flush = lambda: None
    assert leases(store)[-3:] == [64, 1, 1]  # what an outage costs does not grow with every attempt
    held = share.reserve("t")
    assert (held.entry, held.index) == (len(store.records()), 0)
    assert share.remaining("t") == MANY - 21 - 66 - 1


def test_nothing_enters_the_purse_before_the_anchor_has_its_line(clock: list[float]) -> None:
    anchor = DictAnchor()
    store = EarlyStore()
    share = share_of(budget(store=store, anchor=anchor))
    use(share, 21)
    anchor.faults["write"] = UNAVAILABLE
    with pytest.raises(LedgerUnavailableError):
        share.reserve("t")
    anchor.faults.clear()
    held = share.reserve("t")
    assert (held.entry, held.index) == (len(store.records()), 0)
    assert anchor.known[held.ledger_id][0] == held.entry


def test_an_interrupt_costs_its_lease_and_no_later_one(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, store, share = made()
    use(share, 21)
    real = writers.Purse.fill

    def stopped(self: writers.Purse, *given: Any) -> Any:
        monkeypatch.setattr(writers.Purse, "fill", real)
        raise KeyboardInterrupt

    monkeypatch.setattr(writers.Purse, "fill", stopped)
    with pytest.raises(KeyboardInterrupt):
        share.reserve("t")
    lost = len(store.records())
    used = use(share, 100)
    assert lost not in {held.entry for held in used}
    assert leases(store)[3:] == [64, 1, 4, 16, 64, 64]
    assert share.remaining("t") == MANY - 121 - 64
    ledger.verify()


def test_threads_that_empty_one_purse_get_every_ticket_once(clock: list[float]) -> None:
    _, store, share = made(WatchedStore())
    places: list[tuple[int, int]] = []
    used: Callable[[], None] = lambda: places.extend((held.entry, held.index) for held in use(share, 200))  # noqa: E731
    threads = [threading.Thread(target=used) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = {line.seq: line.body["count"] for line in store.records() if line.kind == "reserve"}
    assert len(set(places)) == len(places) == 1600
    assert all(0 <= index < counts[entry] for entry, index in places)
    assert sum(counts.values()) - 1600 <= 64


def test_a_process_holds_at_most_so_many_of_a_slot_over_all_tenants(clock: list[float]) -> None:
    ledger, store, share = made(most_held=16)
    for _ in range(5):
        for tenant in "abcdefgh":
            use(share, 10, tenant=tenant)
            assert sum(ledger._desk.kept().values()) <= 16
    assert max(leases(store)) > 4


def test_of_a_ledger_that_went_back_nothing_is_granted_also_not_what_goes_back_into_the_purse(
    clock: list[float],
) -> None:
    ledger, store, share = made()
    use(share, 30)
    lines = store.snapshot()
    held = share.reserve("t")
    store.restore(lines[:3])
    with pytest.raises(LedgerRollbackError):
        share.remaining("t")
    assert ledger._desk.kept() == {}
    with pytest.raises(LedgerRollbackError):
        held.give_back()
    with pytest.raises(LedgerRollbackError):
        share.reserve("t")
    store.restore(lines)  # the ledger itself is back
    again = share.reserve("t")
    assert (again.entry, again.index) == (len(store.records()), 0)


@pytest.mark.parametrize("change", ["a line", "the header"])
def test_after_a_check_that_failed_nothing_is_handed_out_until_one_passes(clock: list[float], change: str) -> None:
    ledger, store, share = made()
    use(share, 30)
    spare = share.reserve("t")
    lines, header = store.snapshot(), store.header()
    assert header is not None
    if change == "a line":
        store.restore([*lines[:3], lines[3]._replace(stamp="2000-01-01T00:00:00+00:00"), *lines[4:]])
    else:
        store._header = dataclasses.replace(header, name="another")
    with pytest.raises(LedgerError):
        ledger.verify()
    assert ledger._desk.kept() == {}
    for _ in range(3):
        with pytest.raises(LedgerError):
            share.reserve("t")
    assert len(store.records()) == len(lines)
    store.restore(lines)
    store._header = header
    held = use(share, 100)
    assert min(one.entry for one in held) > len(lines)
    spare.give_back()
    ledger.verify()
    ledger.close()
    assert elsewhere(store).remaining("t") == MANY - 30 - 54 - 100


def test_a_check_that_did_not_come_to_its_end_changes_nothing(clock: list[float]) -> None:
    ledger, store, share = made()
    use(share, 30)
    kept = ledger._desk.kept()
    store.at_read = lambda: (_ for _ in ()).throw(UNAVAILABLE)
    with pytest.raises(LedgerUnavailableError):
        ledger.verify()
    assert ledger._desk.kept() == kept
    assert share.reserve("t").entry in kept


def test_tenants_that_come_once_leave_nothing_behind(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "_FEW_LOTS", 8)
    ledger, store, share = made()
    use(share, 30)
    for number in range(300):
        use(share, tenant=f"tenant {number}")
        clock[0] += 0.1
    assert len(ledger._desk._purse._lots) <= 32
    assert set(leases(store)[4:]) == {1}
    use(share, 55)
    assert share.used_by("tenant 7") == 1


def test_a_tenant_at_its_cap_takes_nothing_from_others(clock: list[float]) -> None:
    ledger, store, share = made()
    use(share, 30)
    use(share, 2, tenant="x", tenant_cap=2)
    before = len(store.records())
    for _ in range(3):
        with pytest.raises(TenantCapExceededError):
            share.reserve("t", tenant="x", tenant_cap=2)
    assert len(store.records()) == before
    assert sum(ledger._desk.kept().values()) == 55


# --- what goes back -----------------------------------------------------------------------------------------------


def test_what_is_held_counts_as_left_here_and_as_held_elsewhere(clock: list[float]) -> None:
    ledger, store, share = made()
    use(share, 70)
    assert share.remaining("t") == MANY - 70
    assert share.committed("t") == 70
    assert ledger.dangling() == ()
    assert ledger.use().tickets["c"] == (MANY - 70, 0, 70)
    ledger.settle()
    other = Budget.open(store)
    assert other.use().tickets["c"] == (MANY - 85, 15, 70)
    assert sum(each.count for each in other.dangling()) == 15
    ledger.close()
    assert other.use().tickets["c"] == (MANY - 70, 0, 70)
    assert other.dangling() == ()
    other.verify()


def test_what_nobody_asks_for_goes_back_with_a_later_call(clock: list[float]) -> None:
    ledger, store, share = made()
    use(share, 70)
    other = elsewhere(store)
    clock[0] += 4
    share.remaining("t")
    assert other.remaining("t") == MANY - 85
    clock[0] += 6
    assert share.remaining("t") == MANY - 70
    assert other.remaining("t") == MANY - 70
    assert ledger._desk.kept() == {}


def test_what_lies_idle_goes_back_while_others_are_used(clock: list[float]) -> None:
    _, store, share = made()
    use(share, 70)
    for _ in range(5):
        use(share, tenant="x")  # a line each, with which they go back
        clock[0] += 2
    entries = [line.body["reservation"] for line in store.records() if line.kind == "give_back"]
    assert store.records()[entries[0] - 1].body.get("tenant") is None
    assert leases(store, "give_back")[0] == 15


def test_commits_do_not_wait_for_the_next_lease(clock: list[float]) -> None:
    _, store, share = made()
    use(share, 70)
    clock[0] += 4
    use(share)
    assert sum(leases(store, "commit")) == 21
    clock[0] += 2
    use(share)
    assert sum(leases(store, "commit")) == 71


def test_an_outage_keeps_nobody_from_what_is_held(clock: list[float]) -> None:
    _, store, share = made()
    use(share, 70)
    store.at_commit = on("commit", UNAVAILABLE, times=100)
    clock[0] += 6
    lines = len(store.records())
    held = share.reserve("t")
    held.burn()
    assert held.index > 0
    assert len(store.records()) == lines


def test_a_ticket_that_never_burnt_goes_back_into_the_purse_and_to_the_ledger_where_that_is_full(
    clock: list[float],
) -> None:
    ledger, store, share = made(most_held=4)
    held = [share.reserve("t") for _ in range(1 + 4 + 4)]
    before = len(store.records())
    assert [one.give_back() for one in held[1:5]] == [1] * 4
    assert len(store.records()) == before
    assert ledger._desk.kept() == {held[1].entry: 4}
    assert held[5].give_back() == 1
    assert leases(store, "give_back") == [1]
    with pytest.raises(PrivacyBudgetExceededError):
        held[1].burn()
    again = [share.reserve("t") for _ in range(4)]
    assert {(one.entry, one.index) for one in again} == {(one.entry, one.index) for one in held[1:5]}
    ledger.close()


def test_a_request_that_needs_what_is_held_gets_it(clock: list[float]) -> None:
    _, store, share = made(count=100)
    held = [share.reserve("t", tenant=tenant) for tenant in "aaaabbbb"]
    assert max(leases(store)) > 1
    rest = share.remaining("t")
    assert rest == 92
    block = share.reserve("t", count=rest)  # the purse goes back first
    block.burn(rest)
    with pytest.raises(PrivacyBudgetExceededError):
        share.reserve("t")
    for one in held:
        one.burn()


def test_a_refusal_says_what_others_hold_and_how_much_only_to_the_operator(clock: list[float]) -> None:
    ledger, store, share = made(count=200)
    other = elsewhere(store, count=200)
    use(share, 4)
    use(other, 3)
    ledger.settle()
    left = other.remaining("t")
    block = other.reserve("t", count=left)
    with pytest.raises(PrivacyBudgetExceededError, match="may come back") as caught:
        other.reserve("t")
    kept = sum(ledger._desk.kept().values())
    assert kept > 0
    assert caught.value.held == kept + block.count
    assert str(caught.value.held) not in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).held == caught.value.held  # noqa: S301  just written
    ledger.close()
    use(other, kept)
    with pytest.raises(PrivacyBudgetExceededError):
        other.reserve("t")


def test_what_was_taken_out_for_a_line_that_failed_is_not_handed_out(clock: list[float]) -> None:
    ledger, store, share = made()
    use(share, 70)
    store.after_commit = on("give_back", UNAVAILABLE)
    with pytest.raises(LedgerUnavailableError):
        ledger._desk.write_waiting(is_closing=True)
    assert ledger._desk.kept() == {}
    assert elsewhere(store).remaining("t") == MANY - 70


@pytest.mark.parametrize("whose", [{}, {"tenant": "x", "tenant_cap": 1000}], ids=["all", "a tenant"])
def test_a_request_is_not_refused_what_a_lease_of_another_thread_only_waits_for(
    clock: list[float], whose: dict[str, Any]
) -> None:
    ledger, store, share = made(count=1000 if not whose else MANY)
    used = use(share, 21, **whose)
    blocks: list[Reservation] = []
    large = threading.Thread(target=lambda: blocks.append(share.reserve("t", count=1000 - 22, **whose)))

    def while_it_waits() -> None:
        store.at_flush = lambda: None
        large.start()
        _until(lambda: leases(store, "give_back") or not large.is_alive())

    store.at_flush = while_it_waits
    used += use(share, **whose)
    large.join(60)
    assert [block.count for block in blocks] == [1000 - 22]
    assert leases(store)[3] == leases(store, "give_back")[0] + 1 > 1
    blocks[0].burn(1000 - 22)
    assert ledger._desk.kept() == {}
    with pytest.raises(PrivacyBudgetExceededError):
        share.reserve("t", **whose)
    assert len({(held.entry, held.index) for held in used}) == 22
    ledger.verify()


def _until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("is_lost", [False, True])
def test_an_end_while_a_lease_waits_gives_back_all_of_it_but_the_ticket_that_was_asked_for(
    clock: list[float], is_lost: bool
) -> None:
    ledger, store, share = made()
    use(share, 21)
    closing = threading.Thread(target=ledger.close)

    def while_it_waits() -> None:
        store.at_flush = lambda: None
        closing.start()
        _until(lambda: leases(store, "give_back") or not closing.is_alive())
        if is_lost:
            raise UNAVAILABLE

    store.at_flush = while_it_waits
    used: list[Reservation] = []
    with contextlib.suppress(LedgerUnavailableError):
        used += use(share)
    closing.join(60)
    assert [held.index for held in used] == ([] if is_lost else [0])
    assert leases(store, "give_back") == [63]
    assert ledger._desk.kept() == {}
    assert elsewhere(store).remaining("t") == MANY - 22
    ledger.verify()


def test_nothing_goes_back_of_a_lease_whose_line_a_server_lost_when_another_stands_in_its_place(
    clock: list[float],
) -> None:
    ledger, store, share = made()
    use(share, 21)
    other = elsewhere(store)
    blocks: list[Reservation] = []
    closing = threading.Thread(target=lambda: ledger._desk.write_waiting(is_closing=True))

    def while_it_waits() -> None:
        store.at_flush = lambda: None
        entry = len(store.records())
        store.restart()
        while len(store.records()) < entry:
            blocks.append(other.reserve("t", count=64))
        before = store.calls["transaction"]
        closing.start()
        _until(lambda: store.calls["transaction"] > before)

    store.at_flush = while_it_waits
    with pytest.raises(LedgerUnavailableError, match="gone"):
        share.reserve("t")
    closing.join(60)
    assert leases(store, "give_back") == []
    blocks[-1].burn(64)
    assert elsewhere(store).remaining("t") == MANY - 21 - 64 * len(blocks)


# --- interrupts ---------------------------------------------------------------------------------------------------


PARTS: dict[str, Callable[[Share, Reservation], object]] = {
    "a ticket of the purse": lambda share, held: share.reserve("t"),
    "a ticket that goes back into the purse": lambda share, held: held.give_back(),
    "the first of a new lease": lambda share, held: share.reserve("t", tenant="y"),
    "a block that needs what is held": lambda share, held: share.reserve("t", count=share.remaining("t")),
    "what is left": lambda share, held: share.remaining("t"),
    "tickets that lie idle": lambda share, held: share._desk.write_waiting(),
    "an end": lambda share, held: share._desk.write_waiting(is_closing=True),
}


@pytest.mark.parametrize("name", PARTS)
def test_an_interrupt_at_any_line_of_the_purse_gives_no_ticket_twice_and_leaves_no_wrong_count(
    clock: list[float], name: str
) -> None:
    for line in itertools.count():
        _, store, share = made(count=1500)
        used = use(share, 30) + use(share, 10, tenant="x") + use(share, 1, tenant="y")
        spare = share.reserve("t")
        clock[0] += 10 * (name == "tickets that lie idle")
        is_done, _ = stopped_at(
            lambda share=share, spare=spare: PARTS[name](share, spare), line, within=writers.__file__, of="Purse."
        )
        if is_done:
            assert line > 3
            return
        _check_counts(store, share, used)


def _check_counts(store: EarlyStore, share: Share, used: list[Reservation]) -> None:
    left = share.remaining("t")
    kept = share._desk.kept()
    assert all(count > 0 for count in kept.values())
    assert sum(kept.values()) <= 64
    assert left == elsewhere(store, 1500).remaining("t") + sum(kept.values()) <= 1500
    assert sum(share._desk._purse.of_tenant("c", tenant) for tenant in ("", "x", "y")) == sum(kept.values())
    assert share._desk._purse._room(TicketRequest("c", ("t", None), 1.0, None, None, ())) == 64 - sum(kept.values())
    with contextlib.suppress(PrivacyBudgetExceededError):
        for _ in range(40):
            used += use(share) + use(share, tenant="x")
    counts: Counter[int] = Counter()
    for line in store.records():
        if line.kind == "reserve":
            counts[line.seq] += line.body["count"]
        elif line.kind == "give_back":
            counts[line.body["reservation"]] -= line.body["count"]
    burnt = Counter(held.entry for held in used)
    assert len({(held.entry, held.index) for held in used}) == len(used)
    assert all(burnt[entry] <= counts[entry] for entry in burnt)


# --- receipts -----------------------------------------------------------------------------------------------------


def test_a_receipt_whose_line_has_fewer_tickets_is_refused_and_two_of_one_ticket_are_found(clock: list[float]) -> None:
    ledger, store, share = made()
    used = use(share, 5)
    for held in used:
        ledger.check_receipt(held)
    receipt = {name: getattr(used[-1], name) for name in ("ledger_id", "entry", "entry_hash", "index", "component")}
    ledger.check_receipt({**receipt, "index": None})
    for wrong in (4, -1, True, "0"):
        with pytest.raises(LedgerRollbackError, match="reserved 4 tickets"):
            ledger.check_receipt({**receipt, "index": wrong})
        assert any(
            "index" in problem for problem in check_ledger(store, receipts=[{**receipt, "index": wrong}]).problems
        )
    assert check_ledger(store, receipts=[receipt, receipt, {**receipt, "index": 0}]).problems == ()
    shown = [{**receipt, "queries_left": left} for left in (4, 3)]
    assert check_ledger(store, receipts=[receipt, shown[0]]).problems == ()  # one of them in a shorter form
    problems = check_ledger(store, receipts=shown).problems
    assert [problem for problem in problems if "name one ticket" in problem]


# --- processes ----------------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    place = tmp_path / "ledger.db"
    with SQLiteStore.new(place) as store:
        budget(store=store)
    return place


@pytest.mark.skipif(not HAS_FORK, reason="no forks here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_an_empty_purse_and_its_parent_keeps_its_own(path: Path, clock: list[float]) -> None:
    ledger = Budget.open(SQLiteStore(path))
    share = share_of(ledger)
    use(share, 70)
    kept = ledger._desk.kept()
    assert sum(kept.values()) == 15
    out, there = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            held = use(share, 100)
            os.write(there, json.dumps([(one.entry, one.index) for one in held]).encode())
            ledger._desk.write_waiting(is_closing=True)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    childs = {tuple(place) for place in json.loads(os.read(out, 1 << 20))}
    os.close(out)
    os.close(there)
    assert len(childs) == 100
    assert not {entry for entry, _ in childs} & set(kept)
    mine = {(one.entry, one.index) for one in use(share, 15)}
    assert {entry for entry, _ in mine} == set(kept)
    ledger.close()
    with SQLiteStore(path) as store:
        again = Budget.open(store)
        assert again.use().tickets["c"] == (MANY - 185, 0, 185)
        again.verify()


@pytest.mark.skipif(not HAS_FORK, reason="no forks here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_gives_nothing_of_its_parent_back_whatever_it_asks_for_first(
    path: Path, clock: list[float]
) -> None:
    ledger = Budget.open(SQLiteStore(path))
    share = share_of(ledger)
    use(share, 70)
    kept = sum(ledger._desk.kept().values())
    assert kept > 1
    pid = os.fork()
    if not pid:
        status = 1
        try:
            clock[0] += 10.0  # what the parent holds lies idle
            block = share.reserve("t", count=2)
            block.burn(2)
            block.commit(2, wait=True)
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    with SQLiteStore(path) as store:
        again = Budget.open(store)
        share_of(again)
        assert again.use().tickets["c"].left == MANY - 72 - kept
    ledger.close()


PROGRAM = """
import os, sys
from langchain_dpicl import Budget
from langchain_dpicl.privacy.accounting.events import PureEvent
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.stores import SQLiteStore

share = Budget.open(SQLiteStore(sys.argv[1])).declare(
    "c", tickets=[Ticket("t", PureEvent(5e-5), max_count=10_000, refundable=True)], epsilon=1.0
)
for number in range(int(sys.argv[2])):
    held = share.reserve("t")
    held.burn()
    os.write(1, b"%d %d\\n" % (held.entry, held.index))
    held.commit()
"""


def _run(path: Path, count: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", PROGRAM, str(path), str(count)], stdout=subprocess.PIPE)


def test_a_process_that_ends_without_closing_gives_its_purse_back(path: Path) -> None:
    assert _run(path, 70).wait(300) == 0
    with SQLiteStore(path) as store:
        assert Budget.open(store).use().tickets["c"] == (MANY - 70, 0, 70)


@pytest.mark.parametrize(
    "how", [pytest.param("fork", marks=pytest.mark.skipif(not HAS_FORK, reason="no forks")), "spawn"]
)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_of_multiprocessing_gives_its_purse_back_when_it_ends(path: Path, clock: list[float], how: str) -> None:
    here = Budget.open(SQLiteStore(path))
    use(share_of(here), 30)
    mine = sum(here._desk.kept().values())
    context = multiprocessing.get_context(how)
    ear, mouth = context.Pipe(duplex=False)
    child = context.Process(target=spend_and_leave, args=(str(path), 70, mouth))
    child.start()
    mouth.close()
    assert ear.recv() > 1
    child.join(60)
    assert child.exitcode == 0
    assert here.use().tickets["c"] == (MANY - 100, 0, 100)  # of its parent nothing went back
    assert sum(here._desk.kept().values()) == mine > 1
    here.close()


def test_what_a_dropped_budget_holds_goes_back_with_the_next_call_of_another_one(
    path: Path, clock: list[float]
) -> None:
    for is_in_circle in (False, True):
        ledger = Budget.open(SQLiteStore(path))
        share = share_of(ledger)
        use(share, 30)
        assert sum(ledger._desk.kept().values()) > 1
        if is_in_circle:
            ledger.on_spent(1.0, lambda _, ledger=ledger: ledger)  # type: ignore[misc]
        gc.collect()
        link = weakref.ref(ledger._store._link)  # type: ignore[attr-defined]
        del ledger, share
        gc.collect()
        assert link() in sqlite_ledger._LINKS.values()  # it is closed before a fork
        other = Budget.open(SQLiteStore(path))
        share_of(other)
        assert other.use().tickets["c"] == (MANY - 30 * (1 + is_in_circle), 0, 30 * (1 + is_in_circle))
        other.close()
        del other
        gc.collect()
        assert link() is None


def test_a_dropped_budget_whose_ledger_is_out_keeps_no_other_from_its_own(clock: list[float]) -> None:
    ledger, store, share = made()
    use(share, 30)
    _, there, other = made()
    store.at_commit = on("give_back", UNAVAILABLE, times=100)
    store.at_read = lambda: (_ for _ in ()).throw(UNAVAILABLE)
    del ledger, share
    gc.collect()
    use(other, 3)
    assert not writers._DROPPED
    assert store.snapshot()[-1].kind == "reserve"
    assert leases(there) == [1, 4]


def _drop_budgets_that_are_out(count: int, kind: type[Exception]) -> list[int]:
    """Drops budgets that hold tickets of ledgers whose stores fail; returns a list that grows with each try."""
    tries: list[int] = []

    def fail() -> None:
        tries.append(len(tries))
        raise kind("out")

    budgets = [made() for _ in range(count)]
    for _, store, share in budgets:
        use(share, 30)
        store.at_read = fail
    del budgets, store, share
    gc.collect()
    return tries


@pytest.mark.parametrize("kind", [LedgerUnavailableError, OSError])
def test_a_call_waits_for_one_outage_of_dropped_budgets_at_most_and_raises_none(
    clock: list[float], kind: type[Exception]
) -> None:
    _, _, other = made()
    tries = _drop_budgets_that_are_out(3, kind)
    for calls in (1, 2, 3, 3):
        other.reserve("t")
        assert len(tries) == calls


def test_at_its_end_a_process_gives_back_what_it_holds_beside_a_store_that_fails(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "_WITH_WAITING", weakref.WeakKeyDictionary())
    tries = _drop_budgets_that_are_out(2, OSError)
    broken, ledger = made(), made()
    for _, _, share in (broken, ledger):
        use(share, 30)
    broken[1].at_read = lambda: (_ for _ in ()).throw(OSError("out"))
    writers.write_all_waiting()
    assert len(tries) == 2
    store = ledger[1]
    assert ledger[0]._desk.kept() == {}
    assert Budget.open(store).use().tickets["c"] == (MANY - 30, 0, 30)


def test_tickets_are_handed_out_while_another_thread_imports_multiprocessing(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "_ENDS_HERE", [])
    _, store, share = made()
    with monkeypatch.context() as half:
        half.setitem(sys.modules, "multiprocessing.util", type(sys)("multiprocessing.util"))
        use(share, 3)
    assert leases(store) == [1, 4]
    assert writers._ENDS_HERE == []
    importlib.import_module("multiprocessing.util")
    use(share, 30)
    assert tuple(writers._ENDS_HERE) == (this_process(),)


@pytest.mark.skipif(not HAS_FORK, reason="no forks here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_drops_its_parents_budget_gives_nothing_back(path: Path, clock: list[float]) -> None:
    ledger = Budget.open(SQLiteStore(path))
    share = share_of(ledger)
    use(share, 30)
    kept = ledger._desk.kept()
    pid = os.fork()
    if not pid:
        try:
            del ledger, share
            gc.collect()
            with SQLiteStore(path) as store:
                Budget.open(store).close()
            writers.write_all_waiting()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert {held.entry for held in use(share, sum(kept.values()))} == set(kept)
    ledger.verify()
    ledger.close()


def _spend_until_killed(path: Path, there: int) -> None:
    share = share_of(Budget.open(SQLiteStore(path)), 1_000_000)
    while True:
        held = share.reserve("t")
        held.burn()
        os.write(there, b"%d %d\n" % (held.entry, held.index))
        held.commit()


@pytest.mark.skipif(not HAS_FORK, reason="no forks here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_killed_process_loses_at_most_what_it_held_and_no_ticket_is_granted_twice(
    path: Path, clock: list[float]
) -> None:
    places: list[tuple[int, ...]] = []
    for kills in range(1, 11):
        out, there = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                _spend_until_killed(path, there)
            finally:
                os._exit(1)
        os.close(there)
        with os.fdopen(out, "rb") as pipe:
            told = [pipe.readline() for _ in range(150 + 7 * kills)]
            os.kill(pid, signal.SIGKILL)
            told += pipe.readlines()
        os.waitpid(pid, 0)
        places += [tuple(map(int, line.split())) for line in told if line.endswith(b"\n")]
        assert len(set(places)) == len(places) >= 150 * kills  # of different lines, or of one at different places
        with SQLiteStore(path) as store:
            ledger = Budget.open(store)
            ledger.verify()
            counts = {line.seq: line.body["count"] for line in store.records() if line.kind == "reserve"}
            use_of_all = ledger.use().tickets["c"]
            ledger.close()
        charged = sum(counts.values())
        assert all(0 <= index < counts[entry] for entry, index in places)
        # Of each killed process the purse, or the lease that it waited for, and the ticket that it did not report.
        assert charged - len(places) <= kills * 65
        assert use_of_all.left == 1_000_000 - charged


def test_a_budget_whose_close_failed_hands_nothing_out_and_closes_later(clock: list[float]) -> None:
    ledger, store, share = made()
    use(share, 30)
    assert sum(ledger._desk.kept().values()) == 55
    store.at_commit = on("give_back", UNAVAILABLE)
    with pytest.raises(LedgerUnavailableError):
        ledger.close()
    assert {held.index for held in use(share, 60)} == {0}
    assert leases(store)[-60:] == [1] * 60
    ledger.close()


def test_a_closed_budget_takes_nothing_in(clock: list[float]) -> None:
    ledger, store, share = made()
    held = [share.reserve("t") for _ in range(5)]
    ledger.close()
    assert leases(store, "give_back") == []
    assert held[-1].give_back() == 1
    assert leases(store, "give_back") == [1]
    assert ledger._desk.kept() == {}
    with contextlib.suppress(LedgerError):
        share.reserve("t")
    assert ledger._desk.kept() == {}
