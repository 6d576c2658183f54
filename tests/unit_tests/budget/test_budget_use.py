"""What `Budget.use` counts, when hooks of `on_spent` are called, and how open reservations are paged."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl import PrivacyBudgetCallbackHandler
from langchain_dpicl.budget.budget import Budget, BudgetUse, Waits
from langchain_dpicl.budget.metrics import prometheus_text
from langchain_dpicl.exceptions import ConfigurationError, LedgerUnavailableError, PrivacyBudgetExceededError
from langchain_dpicl.privacy.accounting.events import PureEvent
from langchain_dpicl.privacy.ledger.shares import Share
from langchain_dpicl.privacy.ledger.store import InMemoryStore
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.stores import FileAnchor, SQLiteStore

LIMITS: dict[str, Any] = {"epsilon": 4.0, "delta": 1e-6}


def declare(budget: Budget, name: str = "votes", *, count: int = 10, epsilon: float = 1.0) -> Share:
    ticket = Ticket("query", PureEvent(0.001), max_count=count, refundable=True)
    return budget.declare(name, tickets=[ticket], epsilon=epsilon)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with SQLiteStore.new(tmp_path / "b.db") as store:
        Budget(**LIMITS, store=store)
    return tmp_path / "b.db"


@pytest.fixture(params=["memory", "file", "anchored"])
def budget(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Budget]:
    if request.param == "memory":
        yield Budget(**LIMITS)
        return
    anchor = FileAnchor.new(tmp_path / "a.json") if request.param == "anchored" else None
    with SQLiteStore.new(tmp_path / "c.db") as store:
        yield Budget(**LIMITS, store=store, anchor=anchor)


# --- use --------------------------------------------------------------------------------------------------------------


def test_a_new_ledger_has_no_use(budget: Budget) -> None:
    use = budget.use()
    assert (use.epsilon, use.delta, use.epsilon_spent, use.delta_spent) == (4.0, 1e-6, 0.0, 0.0)
    assert (use.tickets, use.pools, use.lines) == ({}, {}, 0)
    assert (use.wait_ms_p50, use.wait_ms_p99, use.refused, use.outages, use.waiting_commits) == (None, None, 0, 0, 0)


def test_the_use_counts_tickets_by_what_became_of_them(budget: Budget) -> None:
    share = declare(budget)
    declare(budget, "unused")
    reservation = share.reserve("query", count=6)
    reservation.burn(4)
    reservation.commit(3)
    reservation.give_back()
    pool = budget.gdp_pool("labels", epsilon=0.5)
    pool.reserve(mu=pool.mu / 2).burn()
    use = budget.use()
    assert use.tickets == {"votes": (6, 1, 3)}  # the share that was not used is not sealed
    assert use.pools == {"labels": pytest.approx(pool.mu**2 * 0.75)}
    assert use.epsilon_spent == 1.5
    assert use.delta_spent == pytest.approx(1e-6 * 1.5 / 4)
    assert use.wait_ms_p50 is not None
    assert use.wait_ms_p99 is not None
    assert 0.0 < use.wait_ms_p50 <= use.wait_ms_p99


def test_commits_that_wait_are_counted_as_committed_and_shown(path: Path) -> None:
    with SQLiteStore(path) as store:
        budget = Budget.open(store)
        reservation = declare(budget).reserve("query", count=2)
        reservation.burn(2)
        reservation.commit()
        here = budget.use()
        with SQLiteStore(path) as other:
            there = Budget.open(other).use()
        reservation.commit(wait=True)
        after = budget.use()
    assert (here.tickets["votes"], here.waiting_commits) == ((8, 1, 1), 1)
    assert (there.tickets["votes"], there.waiting_commits) == ((8, 2, 0), 0)
    assert (after.tickets["votes"], after.waiting_commits) == ((8, 0, 2), 0)


def test_waits_for_the_disk_are_counted_by_the_process_that_waits(path: Path) -> None:
    with SQLiteStore(path) as store:
        budget = Budget.open(store)
        before, share = budget.use().flushes, declare(budget)
        for _ in range(3):
            share.reserve("query")
        assert budget.use().flushes == before + 3
    memory = Budget(**LIMITS)
    declare(memory).reserve("query")
    assert memory.use().flushes == 0


def test_refusals_are_counted_whether_of_a_limit_or_of_a_tenant(budget: Budget) -> None:
    share = declare(budget)
    share.reserve("query", tenant="acme", tenant_cap=1)
    for count, cap in ((11, None), (1, 1)):
        with pytest.raises(PrivacyBudgetExceededError):
            share.reserve("query", count=count, tenant="acme", tenant_cap=cap)
    assert budget.use().refused == 2


def test_outages_are_counted(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SQLiteStore(path) as store:
        budget = Budget.open(store, anchor=FileAnchor.new(tmp_path / "a.json"), adopt_anchor=True)
        share = declare(budget)
        share.reserve("query")
        monkeypatch.setattr(FileAnchor, "read", lambda *_: (_ for _ in ()).throw(LedgerUnavailableError("down")))
        for _ in range(2):
            with pytest.raises(LedgerUnavailableError):
                share.reserve("query")
        monkeypatch.undo()
        assert (budget.use().outages, budget.use().refused) == (2, 0)


def test_the_use_is_frozen_public_and_json(budget: Budget) -> None:
    declare(budget).reserve("query")
    use = budget.use()
    with pytest.raises(dataclasses.FrozenInstanceError):
        use.lines = 0  # type: ignore[misc]
    data = json.loads(json.dumps(use.to_dict()))
    assert data["tickets"] == {"votes": {"left": 9, "held": 1, "committed": 0}}
    assert set(use.to_dict()) - set(use.ledger_dict()) == {
        "waiting_commits",
        "flushes",
        "wait_ms_p50",
        "wait_ms_p99",
        "refused",
        "outages",
    }


def test_the_use_reads_no_line_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = Budget(**LIMITS, store=InMemoryStore())
    share = declare(budget, count=1000)
    for _ in range(100):
        share.reserve("query")
    budget.use()
    records = InMemoryStore.records
    read: list[int] = []

    def counted(store: InMemoryStore, *args: Any, **how: Any) -> Any:
        found = list(records(store, *args, **how))
        read.append(len(found))
        return found

    monkeypatch.setattr(InMemoryStore, "records", counted)
    assert budget.use().tickets["votes"] == (900, 100, 0)
    assert sum(read) <= 1


def test_a_forked_child_counts_for_itself(path: Path) -> None:
    with SQLiteStore(path) as store:
        budget = Budget.open(store)
        share = declare(budget)
        share.reserve("query")
        there, out = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                before = budget.use()
                share.reserve("query")
                mine = [(each.entry, each.mine) for each in budget.dangling()]
                said = {"before": before.wait_ms_p50, "after": budget.use().wait_ms_p50, "mine": mine}
                os.write(out, json.dumps(said).encode())
            finally:
                os._exit(0)
        os.close(out)
        said = json.loads(os.read(there, 10_000))
        os.waitpid(pid, 0)
        os.close(there)
        assert said["before"] is None
        assert said["after"] > 0.0
        assert said["mine"] == [[2, False], [3, True]]
        assert [(each.entry, each.mine) for each in budget.dangling()] == [(2, True), (3, False)]


def test_waits_add_up_over_processes() -> None:
    first, second = Waits(), Waits()
    for _ in range(98):
        first.add(0.001)
    second.add(0.010)
    second.add(0.100)
    whole = Waits.merged(json.loads(json.dumps(each.to_dict())) for each in (first, second))
    assert whole.count == 100
    assert whole.quantile(0.5) == pytest.approx(0.001, rel=0.02)
    assert whole.quantile(0.99) == pytest.approx(0.010, rel=0.02)
    assert whole.quantile(1.0) == 0.100
    whole.add(0.0)  # a clock that stands still
    assert whole.count == 101


# --- on_spent ---------------------------------------------------------------------------------------------------------


def test_a_hook_is_called_once_when_so_much_of_a_component_is_charged(budget: Budget) -> None:
    share, seen = declare(budget), list[BudgetUse]()
    budget.on_spent(0.8, seen.append, component="votes")
    for _ in range(7):
        share.reserve("query")
    assert seen == []
    share.reserve("query")
    assert [use.tickets["votes"] for use in seen] == [(2, 8, 0)]
    share.reserve("query")
    assert len(seen) == 1


def test_the_label_of_which_least_is_left_counts(budget: Budget) -> None:
    seen: list[BudgetUse] = []
    tickets = [Ticket(name, PureEvent(0.001), max_count=10) for name in ("test", "answer")]
    share = budget.declare("two", tickets=tickets, epsilon=1.0)
    budget.on_spent(0.5, seen.append, component="two")
    share.reserve("test", count=4)
    share.reserve("answer", count=4)
    assert seen == []
    share.reserve("answer")
    assert len(seen) == 1


def test_a_ticket_taken_once_for_all_others_does_not_count_as_the_share_spent(budget: Budget) -> None:
    seen: list[BudgetUse] = []
    once = Ticket("filter", PureEvent(0.001), refundable=True)
    share = budget.declare("near", tickets=[once, Ticket("query", PureEvent(0.001), max_count=10)], epsilon=1.0)
    budget.on_spent(0.8, seen.append, component="near")
    share.reserve("filter")
    share.reserve("query")
    assert (budget.spent_parts()["near"], seen) == (0.1, [])
    share.reserve("query", count=7)
    assert len(seen) == 1


def test_a_share_of_single_tickets_is_spent_where_one_of_them_is(budget: Budget) -> None:
    tickets = [Ticket(name, PureEvent(0.001)) for name in ("first", "second")]
    share = budget.declare("single", tickets=tickets, epsilon=1.0)
    share.reserve("first")
    assert budget.spent_parts()["single"] == 1.0


def test_a_hook_of_a_pool_follows_what_the_pool_has_left(budget: Budget) -> None:
    pool, seen = budget.gdp_pool("labels", epsilon=0.5), list[BudgetUse]()
    budget.on_spent(0.5, seen.append, component="labels")
    pool.reserve(mu=pool.mu * 0.7)
    assert seen == []  # .49 of mu squared
    pool.reserve(mu=pool.mu * 0.2)
    assert len(seen) == 1


@pytest.mark.parametrize("limit", ["epsilon", "delta"])
def test_a_hook_of_the_ledger_follows_whichever_limit_is_nearer(limit: str) -> None:
    budget, seen = Budget(**LIMITS), list[BudgetUse]()
    budget.on_spent(0.75, seen.append)
    ticket = Ticket("query", PureEvent(0.001))
    small = {"epsilon": 0.5, "delta": 1e-8}
    budget.declare("first", tickets=[ticket], **small).reserve("query")
    assert seen == []
    large = small | {limit: LIMITS[limit] * 0.75}
    second = budget.declare("second", tickets=[ticket], **large)
    assert seen == []  # declared, not charged
    second.reserve("query")
    assert len(seen) == 1


def test_what_another_process_charged_counts_at_the_next_reservation(path: Path) -> None:
    seen: list[BudgetUse] = []
    with SQLiteStore(path) as here, SQLiteStore(path) as there:
        ours, theirs = Budget.open(here), Budget.open(there)
        share = declare(ours)
        ours.on_spent(0.5, seen.append, component="votes")
        declare(theirs).reserve("query", count=9)
        assert seen == []
        share.reserve("query")
        assert [use.tickets["votes"].left for use in seen] == [0]


def test_a_hook_that_raises_is_logged_by_type_and_the_tickets_are_granted(
    budget: Budget, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(use: BudgetUse) -> None:
        raise RuntimeError(f"canary {use.lines}")

    seen: list[BudgetUse] = []
    budget.on_spent(0.1, fails)
    budget.on_spent(0.1, seen.append)
    with caplog.at_level(logging.WARNING):
        reservation = declare(budget, epsilon=2.0).reserve("query")
    reservation.burn()
    assert len(seen) == 1
    assert [record.getMessage() for record in caplog.records] == ["on_spent: a hook raised RuntimeError"]
    assert "canary" not in caplog.text


def test_a_refused_reservation_calls_no_hook(budget: Budget) -> None:
    share, seen = declare(budget), list[BudgetUse]()
    budget.on_spent(0.1, seen.append)
    with pytest.raises(PrivacyBudgetExceededError):
        share.reserve("query", count=11)
    assert seen == []


def test_a_hook_runs_without_the_lock_and_may_reserve_itself(budget: Budget) -> None:
    share, others = declare(budget), list[int]()

    def hook(_: BudgetUse) -> None:
        thread = threading.Thread(target=lambda: others.append(share.remaining("query")))
        thread.start()
        thread.join(60.0)
        share.reserve("query")

    budget.on_spent(0.1, hook, component="votes")
    share.reserve("query")
    assert others == [9]
    assert share.remaining("query") == 8


def test_one_of_many_threads_calls_the_hook(budget: Budget) -> None:
    share, seen = declare(budget, count=40), list[BudgetUse]()
    budget.on_spent(0.5, seen.append, component="votes")

    def work() -> None:
        for _ in range(10):
            share.reserve("query")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 1


@pytest.mark.parametrize("part", [0, 0.0, -0.1, 1.01, float("nan"), True, "0.8", None])
def test_a_part_that_is_none_is_refused(part: Any) -> None:
    with pytest.raises(ConfigurationError, match="part: expected"):
        Budget(**LIMITS).on_spent(part, print)


def test_a_hook_that_cannot_be_called_and_an_unknown_component_are_refused() -> None:
    budget = Budget(**LIMITS)
    with pytest.raises(ConfigurationError, match="hook: expected"):
        budget.on_spent(0.8, None)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="component: expected"):
        budget.on_spent(0.8, print, component="votes")
    declare(budget)
    budget.on_spent(0.8, print, component="votes")


def test_the_shared_handler_has_both() -> None:
    handler, seen = PrivacyBudgetCallbackHandler(**LIMITS), list[BudgetUse]()
    share = declare(handler.budget)
    handler.on_spent(0.1, seen.append, component="votes")
    share.reserve("query")
    assert seen == [handler.use()]


# --- what is typed in the wrong place is refused ----------------------------------------------------------------------


@pytest.mark.parametrize("after", [-1, None, "1", 1.5])
def test_lines_come_behind_a_number(budget: Budget, after: Any) -> None:
    with pytest.raises(ConfigurationError, match="after: expected"):
        budget.lines(after=after)


@pytest.mark.parametrize("adopts", ["0", "no", 1, None])
def test_an_anchor_is_adopted_by_true_alone(adopts: Any) -> None:
    with pytest.raises(ConfigurationError, match="adopt_anchor: expected"):
        Budget(**LIMITS, adopt_anchor=adopts)


# --- dangling ---------------------------------------------------------------------------------------------------------


def test_open_reservations_come_in_pages(budget: Budget) -> None:
    share = declare(budget)
    lines = [share.reserve("query").entry for _ in range(5)]
    seen, after = list[int](), 0
    while page := budget.dangling(after=after, limit=2):
        assert len(page) <= 2
        seen += [each.entry for each in page]
        after = page[-1].entry
    assert seen == lines


def test_a_page_is_filled_although_commits_wait(path: Path) -> None:
    with SQLiteStore(path) as store:
        budget = Budget.open(store)
        share = declare(budget)
        first, second = share.reserve("query"), share.reserve("query")
        first.burn()
        first.commit()
        assert [each.entry for each in budget.dangling(limit=1)] == [second.entry]


def test_the_age_of_a_reservation_is_that_of_its_line(budget: Budget, monkeypatch: pytest.MonkeyPatch) -> None:
    share = declare(budget)
    monkeypatch.setattr("langchain_dpicl.privacy.ledger.store._now", lambda: "2020-01-01T00:00:00+00:00")
    old = share.reserve("query")
    monkeypatch.undo()
    young = share.reserve("query")
    assert [each.entry for each in budget.dangling(older_than=timedelta(hours=1))] == [old.entry]
    assert [each.entry for each in budget.dangling(older_than=timedelta(0))] == [old.entry, young.entry]
    assert [each.entry for each in budget.dangling(older_than=timedelta(days=100_000))] == []


@pytest.mark.parametrize("stamp", ["yesterday", "", "2020-01-01"])
def test_a_line_whose_stamp_is_no_time_is_shown_whatever_age_is_asked_for(
    stamp: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = Budget(**LIMITS)
    share = declare(budget)
    monkeypatch.setattr("langchain_dpicl.privacy.ledger.store._now", lambda: stamp)
    share.reserve("query")
    monkeypatch.undo()
    assert len(budget.dangling(older_than=timedelta(days=1))) == 1


@pytest.mark.parametrize("wrong", [{"after": -1}, {"limit": 0}, {"limit": 1.5}, {"older_than": 3600}])
def test_a_page_that_is_none_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        Budget(**LIMITS).dangling(**wrong)


def test_a_reservation_names_its_process(path: Path) -> None:
    with SQLiteStore(path) as store:
        budget = Budget.open(store)
        declare(budget).reserve("query")
        declare(budget, "labels").reserve("query")
        first, second = budget.dangling()
    assert first.holder == second.holder
    assert first.holder is not None
    assert len(bytes.fromhex(first.holder)) == 8
    assert first.mine
    memory = Budget(**LIMITS)
    declare(memory).reserve("query")
    assert [(each.holder, each.mine) for each in memory.dangling()] == [(None, True)]


def test_tenants_are_counted_by_component_without_what_is_held_for_them(budget: Budget) -> None:
    votes, other = declare(budget, count=1_000), declare(budget, "other")
    votes.reserve("query", count=2, tenant="acme")
    for _ in range(3):
        votes.reserve("query", tenant="globex")
    other.reserve("query")
    given = votes.reserve("query", tenant="gone")
    given.give_back()
    found = {
        component: {tenant: count for tenant, count in each.items() if count}
        for component, each in budget.tenants().items()
    }
    assert found == {"votes": {"acme": 2, "globex": 3}, "other": {"": 1}}


def test_parts_are_those_that_hooks_wait_for(budget: Budget) -> None:
    share, parts = declare(budget), list[float]()
    assert budget.spent_parts() == {None: 0.0}
    budget.on_spent(0.3, lambda use: parts.append(budget.spent_parts()["votes"]), component="votes")
    share.reserve("query", count=2)
    assert budget.spent_parts()["votes"] == 0.2
    assert budget.spent_parts()[None] == pytest.approx(0.25)
    share.reserve("query", count=2)
    assert parts == [0.4]


# --- Prometheus -------------------------------------------------------------------------------------------------------


def test_metrics_are_in_the_format_of_prometheus(budget: Budget) -> None:
    share = declare(budget, 'a "b" \\ c')
    share.reserve("query", count=3)
    text = prometheus_text(budget.use(), ledger=budget.name, ledger_id=budget.ledger_id)
    where = f'ledger="budget",ledger_id="{budget.ledger_id}"'
    for line in (
        "# TYPE dpicl_epsilon_spent gauge",
        f"dpicl_epsilon_limit{{{where}}} 4.0",
        f"dpicl_epsilon_spent{{{where}}} 1.0",
        f'dpicl_tickets_left{{{where},component="a \\"b\\" \\\\ c"}} 7',
        f"dpicl_refused_total{{{where}}} 0",
        "# TYPE dpicl_reserve_seconds summary",
    ):
        assert line in text.splitlines()
    assert text.endswith("\n")
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(set(names)) == len(names)
    assert not [line for line in text.splitlines() if not line.startswith("#") and not line.startswith("dpicl_")]


def test_metrics_of_the_ledger_leave_out_what_a_process_counted(budget: Budget) -> None:
    text = prometheus_text(budget.use(), ledger="x", ledger_id="y", process=False)
    assert "dpicl_lines" in text
    assert "refused" not in text
    assert "reserve_seconds" not in text


def test_a_notebook_shows_a_budget_and_nothing_of_it_is_markup() -> None:
    made = Budget(epsilon=4.0, delta=1e-6, name="<b>x</b>", about={"purpose": "<i>support</i>"})
    pool = made.gdp_pool("<u>labels</u>", epsilon=0.5)
    handler = PrivacyBudgetCallbackHandler.from_budget(made)
    shown = handler._repr_html_()
    assert shown == made._repr_html_()
    for words in (
        "Budget &lt;b&gt;x",
        "&lt;i&gt;support",
        "epsilon 4, delta 1e-06, for life",
        "epsilon 3.5, delta 8.75e",
    ):
        assert words in shown, words
    assert "share of &lt;u&gt;labels&lt;/u&gt;</th><td>epsilon 0.5, declared, not begun" in shown
    pool.reserve(mu=pool.mu / 2).burn()
    assert "not begun" not in made._repr_html_()
    assert len(shown) < 1000
