from __future__ import annotations

import asyncio
import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler, CallbackManager
from langchain_core.language_models import FakeListChatModel
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langchain_core.tracers import context as tracer_context

from langchain_dpicl.budget.handler import (
    PrivacyBudgetCallbackHandler,
    get_privacy_budget_callback,
    resolve_budget,
)
from langchain_dpicl.exceptions import (
    ConfigurationError,
    NoPrivacyBudgetError,
    PrivacyBudgetMismatchError,
    PrivateAccessError,
)
from langchain_dpicl.privacy.accounting.events import PureEvent
from langchain_dpicl.privacy.ledger.budget import LedgerBudget
from langchain_dpicl.privacy.ledger.store import InMemoryStore
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.privacy.private_examples import PrivateExamples
from tests.ledgers import use_simple_prices


def handler(name: str = "ours", **options: Any) -> PrivacyBudgetCallbackHandler:
    return PrivacyBudgetCallbackHandler(epsilon=2.0, delta=1e-6, name=name, **options)


class Listener(BaseCallbackHandler):
    """A handler that holds no budget."""


# --- the handler ---------------------------------------------------------------------------------------------------


def test_a_handler_owns_a_budget_and_forwards_it(monkeypatch: pytest.MonkeyPatch) -> None:
    use_simple_prices(monkeypatch)
    held = handler(adjacency="replace_one", store=InMemoryStore())
    assert (held.budget.epsilon, held.budget.delta, held.budget.adjacency) == (2.0, 1e-6, "replace_one")
    held.bind(PrivateExamples([], public_size=9))
    with held.plan(delta=1e-8) as plan:
        held.budget.declare("c", tickets=[Ticket("t", PureEvent(0.5))])
    assert plan.epsilon == 0.5
    assert held.gdp_pool("g", epsilon=0.5).mu == 0.5
    assert held.zcdp_pool("z", epsilon=0.25).rho == 0.25
    assert held.remaining_epsilon == 0.75
    assert held.report().epsilon == 1.25
    assert "dies with this process" in repr(held)


@pytest.mark.parametrize("fault", [{"epsilon": 0}, {"delta": 2}, {"adjacency": "both"}, {"name": ""}])
def test_a_handler_with_a_public_fault_is_refused(fault: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        PrivacyBudgetCallbackHandler(**{"epsilon": 1.0, "delta": 1e-6, **fault})


def test_a_handler_cannot_be_copied_or_pickled() -> None:
    held = handler()
    assert copy.copy(held) is held
    assert copy.deepcopy({"callbacks": [held]})["callbacks"][0] is held
    with pytest.raises(PrivateAccessError):
        pickle.dumps(held)


def test_a_handler_hears_nothing_of_any_run() -> None:
    flags = [name for name in dir(BaseCallbackHandler) if name.startswith("ignore_")]
    held = handler()
    assert flags
    assert [getattr(held, flag) for flag in flags] == [True] * len(flags)
    assert held.raise_error is True
    assert held.run_inline is True


def test_a_handler_rides_through_every_way_to_run_a_chain() -> None:
    held = handler()
    chain = FakeListChatModel(responses=["hello"]) | RunnableLambda(lambda message: message.content)
    config: RunnableConfig = {"callbacks": [held]}
    assert chain.invoke("hi", config) == "hello"
    assert chain.batch(["hi", "ho"], config) == ["hello", "hello"]
    assert list(chain.stream("hi", config))
    assert asyncio.run(chain.ainvoke("hi", config)) == "hello"
    assert held.remaining_epsilon == 2.0


# --- finding the budget --------------------------------------------------------------------------------------------


def test_without_a_budget_the_search_fails_closed() -> None:
    for config in (None, {}, {"callbacks": None}, {"callbacks": []}, {"callbacks": [Listener()]}):
        with pytest.raises(NoPrivacyBudgetError, match="get_privacy_budget_callback"):
            resolve_budget(None, config)


@pytest.mark.parametrize("wrap", [lambda h: [h], lambda h: [Listener(), h], lambda h: CallbackManager([h])])
def test_the_config_holds_the_budget_as_a_list_or_a_manager(wrap: Any) -> None:
    held = handler()
    assert resolve_budget(config={"callbacks": wrap(held)}) is held.budget


def test_the_constructor_comes_first_and_may_be_a_budget_or_a_handler() -> None:
    held = handler()
    assert resolve_budget(held) is held.budget
    assert resolve_budget(held.budget, {"callbacks": [held]}) is held.budget
    assert resolve_budget({"callbacks": [held]}) is held.budget
    for wrong in ("budget", 4.0, {"epsilon": 1}):
        with pytest.raises(ConfigurationError):
            resolve_budget(wrong)


def test_two_different_budgets_are_refused() -> None:
    mine, other = handler("mine"), handler("other")
    with pytest.raises(PrivacyBudgetMismatchError, match="other"):
        resolve_budget(mine, {"callbacks": [other]})
    with pytest.raises(PrivacyBudgetMismatchError, match="mine"):
        resolve_budget(None, {"callbacks": [mine, other]})
    assert resolve_budget(mine, {"callbacks": [other, mine]}) is mine.budget
    with get_privacy_budget_callback(handler=other), pytest.raises(PrivacyBudgetMismatchError):
        resolve_budget(mine)


def test_a_budget_that_a_config_gives_is_compared_with_the_config_of_the_call() -> None:
    mine, other, third = handler("mine"), handler("other"), handler("third")
    with pytest.raises(PrivacyBudgetMismatchError, match="other"):
        resolve_budget({"callbacks": [mine]}, {"callbacks": [other]})
    assert resolve_budget({"callbacks": [mine]}, {"callbacks": [mine]}) is mine.budget
    assert resolve_budget({"callbacks": [mine]}, {"tags": ["a"]}) is mine.budget
    with get_privacy_budget_callback(handler=third):
        assert resolve_budget({"tags": ["a"]}, {"callbacks": [other]}) is other.budget
    with pytest.raises(ConfigurationError, match="tags"):
        resolve_budget({"tags": "a"}, {"callbacks": [mine]})


def test_two_handles_on_one_ledger_are_one_budget() -> None:
    store = InMemoryStore()
    one, two = handler(store=store), handler(store=store)
    assert one.budget is not two.budget
    assert resolve_budget(one, {"callbacks": [two]}) is one.budget
    assert resolve_budget(None, {"callbacks": [one, two]}).ledger_id == one.budget.ledger_id


def test_a_run_finds_the_callers_budget_by_itself() -> None:
    held = handler()
    step = RunnableLambda(lambda _: resolve_budget().ledger_id)
    wanted = held.budget.ledger_id
    config: RunnableConfig = {"callbacks": [held]}
    assert step.invoke(0, config) == wanted
    assert step.batch([0, 1], config) == [wanted, wanted]
    assert asyncio.run(step.ainvoke(0, config)) == wanted
    assert (RunnableLambda(lambda x: x) | step).with_config(config).invoke(0) == wanted


# --- the context variable ------------------------------------------------------------------------------------------


def test_the_context_variable_is_found_last_and_only_inside_the_block() -> None:
    with get_privacy_budget_callback(epsilon=1.0, delta=1e-6, name="scoped", adjacency="replace_one") as held:
        assert resolve_budget() is held.budget
        assert (held.budget.name, held.budget.adjacency) == ("scoped", "replace_one")
        explicit = handler()
        assert resolve_budget(None, {"callbacks": [explicit]}) is explicit.budget
    with pytest.raises(NoPrivacyBudgetError):
        resolve_budget()
    assert held.report().epsilon == 0.0


def test_blocks_nest_and_close_after_errors() -> None:
    outer = handler()
    with get_privacy_budget_callback(handler=outer):
        with pytest.raises(ZeroDivisionError), get_privacy_budget_callback(epsilon=1.0, delta=1e-6):
            raise ZeroDivisionError
        assert resolve_budget() is outer.budget


def test_a_block_takes_an_existing_handler_or_budget() -> None:
    held = handler()
    with get_privacy_budget_callback(handler=held) as same:
        assert same is held
    with get_privacy_budget_callback(handler=held.budget) as wrapped:
        assert wrapped is not held
        assert resolve_budget() is held.budget
    assert PrivacyBudgetCallbackHandler.from_budget(held.budget).budget is held.budget


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"epsilon": 1.0},
        {"delta": 1e-6},
        {"epsilon": 1.0, "delta": 1e-6, "handler": True},
        {"epsilon": 1.0, "handler": True},
    ],
    ids=str,
)
def test_a_block_takes_limits_or_a_handler(arguments: dict[str, Any]) -> None:
    if "handler" in arguments:
        arguments = {**arguments, "handler": handler()}
    with pytest.raises(ConfigurationError), get_privacy_budget_callback(**arguments):
        pass


def test_a_budget_of_zero_is_refused() -> None:
    with pytest.raises(ConfigurationError), get_privacy_budget_callback(epsilon=0.0, delta=1e-6):
        pass


def test_the_hook_is_registered_once_however_often_the_block_is_used() -> None:
    before = len(tracer_context._configure_hooks)
    for _ in range(50):
        with get_privacy_budget_callback(epsilon=1.0, delta=1e-6):
            pass
    assert len(tracer_context._configure_hooks) == before


def test_the_context_reaches_runs_batches_and_tasks_but_no_foreign_thread() -> None:
    step = RunnableLambda(lambda _: resolve_budget().ledger_id)
    with get_privacy_budget_callback(epsilon=1.0, delta=1e-6) as held:
        wanted = held.budget.ledger_id
        assert step.invoke(0) == wanted
        assert step.batch([0, 1], {"max_concurrency": 2}) == [wanted, wanted]
        assert asyncio.run(step.ainvoke(0)) == wanted
        with ThreadPoolExecutor(1) as pool, pytest.raises(NoPrivacyBudgetError):
            pool.submit(resolve_budget).result()


def test_a_run_sees_the_context_handler_once_even_if_it_is_passed_too() -> None:
    seen: list[int] = []

    def count(_: Any, config: RunnableConfig) -> None:
        handlers = getattr(config["callbacks"], "handlers", [])
        seen.append(sum(isinstance(h, PrivacyBudgetCallbackHandler) for h in handlers))

    with get_privacy_budget_callback(epsilon=1.0, delta=1e-6) as held:
        RunnableLambda(count).invoke(0, {"callbacks": [held]})
    assert seen == [1]


def test_threads_with_their_own_blocks_do_not_meet() -> None:
    barrier = threading.Barrier(4)

    def inside(_: int) -> bool:
        with get_privacy_budget_callback(epsilon=1.0, delta=1e-6) as held:
            barrier.wait()
            return resolve_budget() is held.budget

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(inside, range(4)))


def test_a_handler_shows_the_numbers_of_its_budget() -> None:
    handler = PrivacyBudgetCallbackHandler(epsilon=4.0, delta=1e-6, adjacency="replace_one")
    assert (handler.epsilon, handler.delta, handler.adjacency) == (4.0, 1e-6, "replace_one")
    handler.gdp_pool("pool", epsilon=1.0)
    assert handler.remaining_epsilon == 3.0
    assert handler.remaining_delta == pytest.approx(7.5e-7)


@pytest.mark.parametrize("config", [5, "x", ["y"]])
def test_a_config_of_another_type_is_refused(config: Any) -> None:
    with pytest.raises(ConfigurationError):
        resolve_budget(None, config)


@pytest.mark.parametrize("name", ["epsilon", "delta", "adjacency", "remaining_epsilon", "remaining_delta"])
def test_the_numbers_of_a_handler_cannot_be_set(name: str) -> None:
    held = handler()
    with pytest.raises(AttributeError):
        setattr(held, name, 9.0)


def test_a_mismatch_names_both_ledgers_and_where_each_came_from() -> None:
    mine, other = handler("shared"), handler("shared")
    with pytest.raises(PrivacyBudgetMismatchError) as by_config:
        resolve_budget(mine, {"callbacks": [other]})
    with get_privacy_budget_callback(handler=other), pytest.raises(PrivacyBudgetMismatchError) as by_context:
        resolve_budget(mine)
    with pytest.raises(PrivacyBudgetMismatchError) as by_two:
        resolve_budget(None, {"callbacks": [mine, other]})
    given = f"expected 'shared' (ledger {mine.budget.ledger_id}), given to the constructor"
    found = f"found 'shared' (ledger {other.budget.ledger_id})"
    assert given in str(by_config.value)
    assert f"{found} in the config's callbacks" in str(by_config.value)
    assert given in str(by_context.value)
    assert f"{found} in the block of get_privacy_budget_callback" in str(by_context.value)
    assert mine.budget.ledger_id in str(by_two.value)
    assert other.budget.ledger_id in str(by_two.value)


def test_a_budget_in_place_of_a_config_is_refused_with_what_to_do() -> None:
    held = handler()
    for wrong in (5, held, held.budget):
        with pytest.raises(ConfigurationError, match="budget="):
            resolve_budget(None, wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrap", [lambda h: (h,), lambda h: h, lambda _: 5, lambda _: "x"])
def test_callbacks_of_another_type_are_refused_before_they_are_overlooked(wrap: Any) -> None:
    with pytest.raises(ConfigurationError, match="callbacks"):
        resolve_budget(None, {"callbacks": wrap(handler())})


@pytest.mark.parametrize("wrong", [5, "budget", Listener()])
def test_a_block_refuses_a_handler_of_another_type(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="handler"), get_privacy_budget_callback(handler=wrong):
        pass


def test_a_handler_carries_no_budget_of_the_core() -> None:
    """It would record no allowed wrappers and check no anchor."""
    with pytest.raises(ConfigurationError, match="budget: expected a Budget"):
        PrivacyBudgetCallbackHandler.from_budget(LedgerBudget(epsilon=1.0, delta=1e-6))  # type: ignore[arg-type]
