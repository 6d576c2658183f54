"""How long tickets last at the pace of the last week, by the time stamps of a ledger's lines."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.privacy.accounting.events import GaussianEvent, PureEvent
from langchain_dpicl.privacy.ledger.shares import Share
from langchain_dpicl.privacy.ledger.store import LedgerRecord
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.privacy.ledger.writer import LedgerWriter
from langchain_dpicl.service import service
from langchain_dpicl.service.service import OperatorView, Pace, RefusalLog

pytestmark = pytest.mark.traced

START = datetime(2026, 3, 2, 8, tzinfo=UTC)


class Clock:
    """The time that lines are stamped with."""

    def __init__(self) -> None:
        self.now = START

    def stamp(self) -> str:
        return self.now.isoformat()

    def go(self, **time: float) -> None:
        self.now += timedelta(**time)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    found = Clock()
    monkeypatch.setattr("langchain_dpicl.privacy.ledger.store._now", found.stamp)
    return found


@pytest.fixture
def budget(clock: Clock) -> Budget:
    return Budget(epsilon=4.0, delta=1e-6)


def declare(budget: Budget) -> Share:
    ticket = Ticket("query", PureEvent(0.0001), max_count=1000, refundable=True)
    return budget.declare("votes", tickets=[ticket], epsilon=1.0)


def per_day(pace: Pace, clock: Clock) -> float:
    return pace.per_day(pace.budget.use().lines, clock.now).get("votes", 0.0)


def test_tickets_a_day_are_those_of_the_last_week(budget: Budget, clock: Clock) -> None:
    pace, share = Pace(budget), declare(budget)
    share.reserve("query", count=6)
    assert per_day(pace, clock) == 6 * 24  # the first hour counts as a whole one
    clock.go(days=2)
    share.reserve("query", count=4)
    assert per_day(pace, clock) == 5
    clock.go(days=5, seconds=1)
    assert per_day(pace, clock) == pytest.approx(4 / 7)  # the first six are older than a week
    assert per_day(Pace(budget), clock) == pytest.approx(4 / 7)
    clock.go(days=30)
    assert per_day(pace, clock) == 0


def test_a_ticket_that_was_given_back_counts_for_nothing(budget: Budget, clock: Clock) -> None:
    pace, share = Pace(budget), declare(budget)
    reserved = share.reserve("query", count=5)
    reserved.burn(2)
    reserved.give_back()
    clock.go(days=1)
    assert per_day(pace, clock) == 2


def test_a_line_that_was_stamped_ahead_of_time_counts_as_of_the_line_behind_it(budget: Budget, clock: Clock) -> None:
    share = declare(budget)
    clock.go(days=365)
    share.reserve("query", count=7)
    clock.go(days=-365)
    pace = Pace(budget)
    assert per_day(pace, clock) == 7 * 24
    for _ in range(30):
        clock.go(days=1)
        share.reserve("query", count=2)
        assert per_day(pace, clock) <= 9
    assert per_day(pace, clock) == per_day(Pace(budget), clock) == pytest.approx(16 / 7)  # at both ends of the week


def test_of_a_long_ledger_the_last_lines_are_read(
    budget: Budget, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_LINES", 10)
    share = declare(budget)
    share.reserve("query", count=500)
    for _ in range(10):
        clock.go(hours=12)
        share.reserve("query")
    read: list[int] = []
    lines = Budget.lines

    def counted(budget: Budget, *, after: int = 0) -> object:
        found = lines(budget, after=after)
        read.append(len(found))
        return found

    monkeypatch.setattr(Budget, "lines", counted)
    pace = Pace(budget)
    assert per_day(pace, clock) == pytest.approx(10 / 4.5)
    assert per_day(pace, clock) == pytest.approx(10 / 4.5)
    assert read == [10, 0]


def test_a_share_that_lasts_and_one_that_is_spent(budget: Budget, clock: Clock, tmp_path: Path) -> None:
    clock.now = datetime.now(UTC)  # as the page reads it
    share = declare(budget)
    share.reserve("query", count=100)
    view = OperatorView([budget], RefusalLog(tmp_path / "x"), {("votes", "acme"): 5})
    (found,) = view.to_dict()["ledgers"]
    (votes,) = found["components"]
    assert (votes["left"], votes["spent"], votes["per_day"] > 0) == (900, 0.1, True)
    assert votes["days_left"] == pytest.approx(900 / votes["per_day"])
    assert found["tenants"] == [
        {"component": "votes", "tenant": "acme", "used": 0, "cap": 5, "left": 5},
        {"component": "votes", "tenant": "", "used": 100, "cap": None, "left": None},
    ]
    assert (found["open"], found["oldest_open"][0]["count"]) == (1, 100)
    share.reserve("query", count=900)
    (votes,) = view.to_dict()["ledgers"][0]["components"]
    assert (votes["left"], votes["days_left"], votes["spent"]) == (0, 0.0, 1.0)


def test_a_look_at_a_ledger_for_life_reads_it_as_often_with_many_components(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read: list[None] = []
    refresh = LedgerWriter.refresh
    monkeypatch.setattr(LedgerWriter, "refresh", lambda writer: (read.append(None), refresh(writer))[1])
    reads = set()
    for components in (1, 20):
        budget = Budget(epsilon=40.0, delta=1e-6)
        for place in range(components):
            ticket = Ticket("run", GaussianEvent(20.0), max_count=4)
            budget.declare(f"votes {place}", tickets=[ticket], epsilon=1.0, delta=1e-8).reserve("run")
        view = OperatorView([budget], RefusalLog(tmp_path / "x"), {})
        del read[:]
        assert len(view.to_dict()["ledgers"][0]["components"]) == components
        reads.add(len(read))
    assert len(reads) == 1


def test_a_share_whose_tickets_come_again_has_no_last_day(clock: Clock, tmp_path: Path) -> None:
    clock.now, today = datetime.now(UTC), (datetime.now(UTC) - datetime.fromtimestamp(0, UTC)).days
    budget = Budget(epsilon=4.0, delta=1e-6, per="30 days")
    for name, first, last in (("standing", -30, None), ("a year", -30, today + 335), ("once", -20, today + 9)):
        ticket = Ticket("run", GaussianEvent(20.0), max_count=4)
        share = budget.declare(name, tickets=[ticket], epsilon=1.0, delta=1e-7, extent=(today + first, last))
        share.reserve("run", blocks=(today, today))
    (found,) = OperatorView([budget], RefusalLog(tmp_path / "x"), {}).to_dict()["ledgers"]
    *lasting, once = found["components"]
    assert [(each["left"], each["per_day"] > 0, each["days_left"]) for each in lasting] == [(3, True, None)] * 2
    assert once["days_left"] == pytest.approx(3 / once["per_day"])


def test_tenants_of_the_settings_stand_before_any_number_of_threads(
    budget: Budget, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(service, "_TENANTS_SHOWN", 3)
    share = declare(budget)
    for number in range(4):
        share.reserve("query", tenant=f"thread-{number}")
    view = OperatorView([budget], RefusalLog(tmp_path / "x"), {("votes", "zebra"): 5, ("votes", "acme"): None})
    (found,) = view.to_dict()["ledgers"]
    assert [one["tenant"] for one in found["tenants"]] == ["acme", "zebra", "thread-0"]


def test_readers_at_the_same_time_count_every_ticket_once(
    budget: Budget, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    pace = Pace(budget)
    declare(budget).reserve("query", count=6)
    lines, met = budget.lines, threading.Barrier(2)

    def slow(*, after: int) -> Sequence[LedgerRecord]:
        with contextlib.suppress(threading.BrokenBarrierError):
            met.wait(1)  # until the other reads too, which it must not
        return lines(after=after)

    monkeypatch.setattr(budget, "lines", slow)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(per_day, pace, clock) for _ in range(2)]
        assert [each.result() for each in both] == [6 * 24, 6 * 24]
