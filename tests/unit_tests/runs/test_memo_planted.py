"""Bugs planted in release memos and in agents' allowances: a test that is there has to turn red for each."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl import free_form, voting
from langchain_dpicl.backends.sync_async import EffectGenerator
from langchain_dpicl.runs import answer_memo
from langchain_dpicl.runs import private_tool as tools
from langchain_dpicl.runs.answer_memo import AnswerMemo
from langchain_dpicl.runs.query_runnable import QueryRunnable
from langchain_dpicl.stores import SQLiteMemo, beside_ledgers, memos
from tests.memo_house import House, house, no_prices
from tests.unit_tests import test_graph_memo
from tests.unit_tests.agents import test_agents
from tests.unit_tests.runs import test_query_memo
from tests.unit_tests.stores import test_memos

__all__ = ["house", "no_prices"]

Patch = pytest.MonkeyPatch
Found = Callable[[House], Any]


def shared_between_tenants(patch: Patch) -> None:
    """The tenant is no part of the key."""
    patch.setattr(answer_memo, "tenant_of", lambda name: "everybody")


def told_of_another_plan(patch: Patch) -> None:
    """The parameters of the plan are no part of the key."""
    real = answer_memo.scope_of
    patch.setattr(answer_memo, "scope_of", lambda scope: real({**scope, "plan": {}}))


def told_of_another_ledger_and_data_set(patch: Patch) -> None:
    """The names of ledger, data set and component are no part of the key."""
    real = answer_memo.scope_of
    patch.setattr(answer_memo, "scope_of", lambda scope: real({"plan": scope["plan"]}))


def told_of_another_model(patch: Patch) -> None:
    """What models are like is no part of the key."""
    patch.setattr(voting, "traits_of", lambda model: {})


def the_last_answer_stays(patch: Patch) -> None:
    """The one that ends last is the one whose answer others get."""
    patch.setattr(SQLiteMemo, "_REMEMBER", f"{SQLiteMemo._REMEMBER} OR 1")


def waits_with_the_lock(patch: Patch) -> None:
    """A memo that waits for other processes holds up all memos of its own."""
    patch.setattr(beside_ledgers, "_PATIENCE", 600.0)


def dropped_where_too_many_wait(patch: Patch) -> None:
    """Nobody minds how many answers wait to be written."""
    patch.setattr(AnswerMemo, "_make_room", lambda _: None)


def told_whatever_was_asked(patch: Patch) -> None:
    """The query is no part of the key."""
    patch.setattr(answer_memo, "query_of", lambda query: "anything")


def commit_before_the_memo(patch: Patch) -> None:
    """The ticket is committed, and then the answer is kept."""
    real = voting.release_once

    def late(*args: Any, keep: Any, **options: Any) -> EffectGenerator[Any]:
        released = yield from real(*args, **options)
        keep(released)
        return released

    patch.setattr(voting, "release_once", late)
    patch.setattr(free_form, "release_once", late)


def kept_when_it_is_told(patch: Patch) -> None:
    """The answer is kept with the in-memory one, after the ticket is settled."""
    real = QueryRunnable._finished

    def late(self: Any, tenant: Any, query: Any, outcome: Any, config: Any) -> EffectGenerator[Any]:
        if self.memo is not None:
            self.memo.keep(tenant, query, outcome)
        return (yield from real(self, tenant, query, outcome, config))

    patch.setattr(QueryRunnable, "_keep", lambda *_: None)
    patch.setattr(QueryRunnable, "_finished", late)


def charged_on_a_hit(patch: Patch) -> None:
    """What is answered again costs a ticket."""
    real = QueryRunnable._read_memo

    def charge(self: Any, tenant: Any, query: Any) -> Any:
        found = real(self, tenant, query)
        if found is not None:
            self.share.reserve("query").burn()
        return found

    patch.setattr(QueryRunnable, "_read_memo", charge)


def no_turns(patch: Patch) -> None:
    """Every caller has the turn."""
    patch.setattr(SQLiteMemo, "claim", lambda *_: True)


def turns_for_ever(patch: Patch) -> None:
    """A turn whose holder was killed never ends."""
    patch.setattr(beside_ledgers, "_END_LATE_TURNS", "DELETE FROM turns WHERE ? < 0")


def lost_where_the_memo_is_out(patch: Patch) -> None:
    """An answer that cannot be kept is dropped."""
    patch.setattr(AnswerMemo, "_hold", lambda *_: None)
    patch.setattr(answer_memo.TenantRegistry, "remember", lambda *_: None)


def told_broken(patch: Patch) -> None:
    """Nobody looks whether an answer is the one that was kept."""
    patch.setattr(memos, "check_stored_answer", lambda key, told, digest, where: told)


def kept_for_ever(patch: Patch) -> None:
    """Nothing is dropped."""
    patch.setattr(SQLiteMemo, "_DROP_OLDEST", "SELECT ?1, ?2, ?3")


def not_kept_durably(patch: Patch) -> None:
    """A remembered answer stands in this process alone."""
    patch.setattr(AnswerMemo, "_save", lambda *_: None)


def an_allowance_per_call(patch: Patch) -> None:
    """Every call is another thread to the ledger."""
    numbers = itertools.count()
    patch.setattr(tools, "thread_tenant", lambda thread_id, tenant: f"thread {next(numbers)}")


def all_threads_are_one(patch: Patch) -> None:
    """The allowance is everybody's."""
    patch.setattr(tools, "thread_tenant", lambda thread_id, tenant: "thread")


def a_cap_that_rises(patch: Patch) -> None:
    """The config's cap may be above the component's."""
    patch.setattr(answer_memo, "min", lambda caps, default: max(caps, default=default), raising=False)


def refusals_read_alike(patch: Patch) -> None:
    """The agent cannot tell its allowance from the budget."""
    patch.setattr(tools, "SPENT", tools.CAPPED)


def no_metadata(patch: Patch) -> None:
    """The tool's metadata are left out of the run."""
    patch.setattr(tools.PrivateTool, "standing", lambda *_: {})


def over(test: Callable[..., Any], *args: Any) -> Found:
    return lambda made: test(made, *args)


def with_patch(test: Callable[[House, Patch], Any]) -> Found:
    def run(made: House) -> None:
        with pytest.MonkeyPatch.context() as patch:
            test(made, patch)

    return run


def contract(name: str) -> Found:
    suite = test_memos.TestSQLiteMemo()

    def run(made: House) -> None:
        folder: Path = made.folder
        wants_folder = name in {
            "test_each_tenant_of_a_component_keeps_its_newest_answers",
            "test_a_turn_that_nobody_leaves_ends_by_itself",
        }
        getattr(suite, name)(folder if wants_folder else SQLiteMemo(folder / "memo.db"))

    return run


KILLED = test_query_memo.test_a_kill_loses_at_most_the_ticket_and_no_answer_that_stands_is_paid_for_again
ORDER = test_query_memo.test_the_answer_stands_in_the_memo_before_its_ticket_is_committed

PLANTED: list[tuple[Callable[[Patch], None], Found]] = [
    (shared_between_tenants, over(test_query_memo.test_nothing_is_told_to_another_tenant)),
    (told_of_another_plan, over(test_query_memo.test_nothing_is_told_of_another_plan, {"prefix": "Sort it."})),
    (told_of_another_model, over(test_query_memo.test_nothing_is_told_of_other_instructions_or_another_model, {"instructions": "Say one of:"})),
    (the_last_answer_stays, over(test_query_memo.test_of_two_answers_that_were_paid_for_the_earlier_one_stays)),
    (waits_with_the_lock, lambda made: test_memos.test_a_memo_that_waits_for_others_holds_up_no_other_memo_and_no_fork(made.folder)),
    (dropped_where_too_many_wait, with_patch(test_query_memo.test_while_too_many_paid_answers_wait_no_other_question_is_charged)),
    (told_of_another_ledger_and_data_set, over(test_query_memo.test_nothing_is_told_of_another_plan, {"component": "b"})),
    (told_of_another_ledger_and_data_set, lambda made: test_query_memo.test_nothing_is_told_of_another_data_set_or_ledger(made, made.folder)),
    (told_whatever_was_asked, over(test_query_memo.test_what_was_paid_for_is_told_when_nothing_is_left)),
    (commit_before_the_memo, over(ORDER)),
    (commit_before_the_memo, over(KILLED, "after the commit", 1, "memo")),
    (kept_when_it_is_told, over(ORDER)),
    (kept_when_it_is_told, over(KILLED, "after the commit", 1, "memo")),
    (charged_on_a_hit, over(test_query_memo.test_another_process_is_told_the_same_for_free)),
    (charged_on_a_hit, over(test_graph_memo.test_retries_and_an_interrupt_in_one_process_cost_one_ticket)),
    (no_turns, over(test_query_memo.test_processes_that_ask_the_same_at_once_pay_once)),
    (turns_for_ever, contract("test_a_turn_that_nobody_leaves_ends_by_itself")),
    (lost_where_the_memo_is_out, over(test_query_memo.test_an_answer_that_cannot_be_kept_is_not_told_and_not_lost)),
    (told_broken, contract("test_an_answer_of_another_key_put_in_its_place_is_not_told")),
    (kept_for_ever, contract("test_each_tenant_of_a_component_keeps_its_newest_answers")),
    (not_kept_durably, over(test_graph_memo.test_going_back_in_time_asks_the_same_for_free_and_something_else_for_a_ticket)),
    (an_allowance_per_call, lambda made: asyncio.run(test_agents.test_each_thread_has_its_allowance_over_all_processes(made))),
    (all_threads_are_one, lambda made: asyncio.run(test_agents.test_each_thread_has_its_allowance_over_all_processes(made))),
    (a_cap_that_rises, over(test_agents.test_a_config_may_lower_a_cap_and_never_raise_it)),
    (refusals_read_alike, over(test_agents.test_a_spent_share_reads_otherwise_than_a_used_allowance)),
    (no_metadata, over(test_agents.test_the_tools_own_run_shows_the_budget)),
]  # fmt: skip


@pytest.mark.planted
@pytest.mark.parametrize(("plant", "finds"), PLANTED, ids=[f"{n} {bug.__name__}" for n, (bug, _) in enumerate(PLANTED)])
def test_a_planted_bug_is_found(house: House, monkeypatch: Patch, plant: Callable[[Patch], None], finds: Found) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception, KeyError)):
        finds(house)


@pytest.mark.planted
@pytest.mark.parametrize("finds", [found for _, found in PLANTED], ids=[str(n) for n in range(len(PLANTED))])
def test_without_a_bug_nothing_is_found(house: House, finds: Found) -> None:
    finds(house)
