"""What observers of a run hear of a budget: once, public values only, and with no say in the outcome."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.runnables import RunnableConfig, RunnableLambda

from langchain_dpicl.callbacks import PrivacyBudgetCallbackHandler, get_privacy_budget_callback
from langchain_dpicl.exceptions import (
    ConfigurationError,
    LedgerError,
    ModelCallError,
    NoPrivacyBudgetError,
    PrivacyBudgetError,
    PrivacyBudgetExceededError,
    PrivacyBudgetMismatchError,
    SealedShareError,
)
from langchain_dpicl.privacy.events import PureEvent
from langchain_dpicl.privacy.ledger import Ticket
from langchain_dpicl.run_events import (
    CHARGED,
    REFUSED,
    RunEvents,
    arecord_event,
    record_event,
    refusals_awaited,
    tells_refusals,
)
from tests.contracts.front_room import AsyncObserver, FailingAsyncObserver, FailingObserver, Observer
from tests.ledgers import use_simple_prices


def handler(name: str = "ours") -> PrivacyBudgetCallbackHandler:
    return PrivacyBudgetCallbackHandler(epsilon=2.0, delta=1e-6, name=name)


def exceeded() -> PrivacyBudgetExceededError:
    return PrivacyBudgetExceededError("tickets: requested 2, remaining 1.", requested=2.0, remaining=1.0)


LIMITS = {"name": "ours", "epsilon": 2.0, "delta": 1e-6, "adjacency": "add_remove"}


def run(action: Callable[[], Any], *observers: Any) -> Any:
    """Runs a blocking action inside a LangChain run."""
    return RunnableLambda(lambda _: action()).invoke(0, {"callbacks": list(observers)})


async def arun(action: Callable[[], Any], *observers: Any) -> Any:
    async def step(_: Any) -> Any:
        return await action()

    return await RunnableLambda(step).ainvoke(0, {"callbacks": list(observers)})


# --- one event ------------------------------------------------------------------------------------------------------


def test_events_reach_observers_inside_a_run_and_nobody_outside() -> None:
    listener = Observer()
    record_event(REFUSED, {"requested": 1.0})
    record_event(REFUSED, {"requested": 1.0}, {"callbacks": [listener]})
    asyncio.run(arecord_event(REFUSED, {"requested": 1.0}, {"callbacks": [listener]}))
    assert listener.heard == []
    run(lambda: record_event(REFUSED, {"requested": 1.0}), listener, handler())
    assert listener.heard == [(REFUSED, {"requested": 1.0})]


@pytest.mark.parametrize("explicit", [False, True])
async def test_events_reach_async_observers_on_their_own_loop(explicit: bool) -> None:
    async def refuse(_: Any, config: RunnableConfig) -> None:
        await arecord_event(REFUSED, {"remaining": 0.5}, config if explicit else None)

    listener, awaited = Observer(), AsyncObserver()
    await RunnableLambda(refuse).ainvoke(0, {"callbacks": [listener, awaited]})
    assert listener.heard == awaited.heard == [(REFUSED, {"remaining": 0.5})]
    assert awaited.loops == {id(asyncio.get_running_loop())}


async def test_a_blocking_call_in_async_code_still_reaches_async_observers() -> None:
    async def refuse(_: Any, config: RunnableConfig) -> None:
        record_event(REFUSED, {"remaining": 0.5}, config)

    listener, awaited = Observer(), AsyncObserver()
    await RunnableLambda(refuse).ainvoke(0, {"callbacks": [listener, awaited]})
    assert listener.heard == awaited.heard == [(REFUSED, {"remaining": 0.5})]


def test_a_config_given_inside_a_run_hides_nothing_from_the_runs_observers() -> None:
    outer, given = Observer(), Observer()
    run(lambda: record_event(REFUSED, {"n": 1}, {"callbacks": [given, handler()]}), outer)
    run(lambda: record_event(REFUSED, {"n": 2}, {"callbacks": [outer]}), outer)
    run(lambda: record_event(REFUSED, {"n": 3}, {"callbacks": []}), outer)
    assert outer.heard == [(REFUSED, {"n": 1}), (REFUSED, {"n": 2}), (REFUSED, {"n": 3})]
    assert given.heard == [(REFUSED, {"n": 1})]


def test_tags_and_metadata_of_the_run_come_along() -> None:
    seen: list[Any] = []

    class Tagged(BaseCallbackHandler):
        def on_custom_event(self, name: str, data: Any, *, tags: Any, metadata: Any, **kwargs: Any) -> None:
            seen.append((tags, metadata["tenant"]))

    config: RunnableConfig = {"callbacks": [Tagged()], "tags": ["tagged"], "metadata": {"tenant": "one"}}
    RunnableLambda(lambda _: record_event(REFUSED, {})).invoke(0, config)
    assert seen == [(["tagged"], "one")]


def test_data_that_nobody_hears_is_not_made() -> None:
    made: list[int] = []

    def data() -> dict[str, int]:
        made.append(1)
        return {"n": 1}

    record_event(CHARGED, data)
    run(lambda: record_event(CHARGED, data), handler())
    assert made == []
    listener = Observer()
    run(lambda: record_event(CHARGED, data), listener)
    assert (made, listener.heard) == ([1], [(CHARGED, {"n": 1})])


# --- observers that fail --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("observer", [FailingObserver, FailingAsyncObserver])
def test_an_observers_error_is_logged_and_goes_no_further(observer: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="langchain_dpicl"):
        assert run(lambda: record_event(REFUSED, {}) or "answer", observer()) == "answer"
    assert any("the outcome stands" in line for line in caplog.messages)


@pytest.mark.parametrize("observer", [FailingObserver, FailingAsyncObserver])
async def test_an_observers_error_goes_no_further_in_async_code(
    observer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def tell() -> str:
        await arecord_event(REFUSED, {})
        return "answer"

    with caplog.at_level(logging.WARNING, logger="langchain_dpicl"):
        assert await arun(tell, observer()) == "answer"
    assert any("the outcome stands" in line for line in caplog.messages)


def test_data_that_cannot_be_made_changes_no_outcome() -> None:
    def data() -> dict[str, Any]:
        raise LedgerError("the ledger is gone")

    assert run(lambda: record_event(CHARGED, data) or "answer", Observer()) == "answer"


def test_ctrl_c_in_an_observer_is_a_stop() -> None:
    class Stopped(BaseCallbackHandler):
        def on_custom_event(self, *args: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(lambda: record_event(REFUSED, {}), Stopped())


async def test_a_task_that_is_cancelled_while_it_tells_is_cancelled() -> None:
    started = asyncio.Event()

    class Slow(AsyncCallbackHandler):
        async def on_custom_event(self, *args: Any, **kwargs: Any) -> None:
            started.set()
            await asyncio.sleep(60)

    async def refuse() -> None:
        async with RunEvents("Component", budget=handler()):
            raise exceeded()

    task = asyncio.create_task(arun(refuse, Slow()))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# --- blocks ---------------------------------------------------------------------------------------------------------


def refuse_in_block(error: Exception, **options: Any) -> None:
    with RunEvents("Component", **options):
        raise error


async def arefuse_in_block(error: Exception, **options: Any) -> None:
    async with RunEvents("Component", **options):
        raise error


@pytest.mark.parametrize("is_async", [False, True])
def test_a_refusal_tells_its_class_its_numbers_and_the_budgets_limits(is_async: bool) -> None:
    observer, error, held = Observer(), exceeded(), handler()
    with pytest.raises(PrivacyBudgetExceededError) as caught:
        if is_async:
            asyncio.run(arun(lambda: arefuse_in_block(error, budget=held), observer))
        else:
            run(lambda: refuse_in_block(error, budget=held), observer)
    assert caught.value is error
    told = {"component": "Component", "error": "PrivacyBudgetExceededError", "requested": 2.0, "remaining": 1.0}
    assert observer.heard == [(REFUSED, {**told, "budget": LIMITS})]


@pytest.mark.parametrize(
    "error",
    [
        NoPrivacyBudgetError("none"),
        PrivacyBudgetMismatchError("another"),
        SealedShareError("sealed"),
        LedgerError("broken"),
        PrivacyBudgetError("no"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_refusal_is_told_without_numbers_it_does_not_have(error: PrivacyBudgetError) -> None:
    observer = Observer()
    with pytest.raises(type(error)):
        run(lambda: refuse_in_block(error, budget=handler().budget), observer)
    told = {"component": "Component", "error": type(error).__name__, "requested": None, "remaining": None}
    assert observer.heard == [(REFUSED, {**told, "budget": LIMITS})]


@pytest.mark.parametrize("error", [ConfigurationError("x"), ModelCallError("x"), ValueError("x")], ids=repr)
def test_other_errors_are_no_refusals(error: Exception) -> None:
    observer = Observer()
    with pytest.raises(type(error)):
        run(lambda: refuse_in_block(error, budget=handler()), observer)
    with pytest.raises(type(error)):
        asyncio.run(arun(lambda: arefuse_in_block(error, budget=handler()), observer))
    assert observer.heard == []


def test_the_message_of_a_refusal_is_not_told() -> None:
    observer = Observer()
    with pytest.raises(PrivacyBudgetError):
        run(lambda: refuse_in_block(PrivacyBudgetError("said between us"), budget=handler()), observer)
    assert "said between us" not in repr(observer.heard)


def test_the_budget_is_looked_up_where_it_is_not_given() -> None:
    observer = Observer()
    with pytest.raises(PrivacyBudgetError):
        run(lambda: refuse_in_block(exceeded()), observer, handler())
    with pytest.raises(PrivacyBudgetError), get_privacy_budget_callback(handler=handler()):
        run(lambda: refuse_in_block(exceeded()), observer)
    with pytest.raises(PrivacyBudgetError):
        run(lambda: refuse_in_block(exceeded(), config={"callbacks": [handler()]}), observer)
    for held in ([], [handler("one"), handler("two")]):
        with pytest.raises(PrivacyBudgetError):
            run(lambda: refuse_in_block(exceeded()), observer, *held)
    assert [data["budget"] for _, data in observer.heard] == [LIMITS, LIMITS, LIMITS, None, None]


@pytest.mark.parametrize("is_async", [False, True])
def test_nested_components_tell_once_and_the_innermost_speaks(is_async: bool) -> None:
    observer = Observer()

    def nested() -> None:
        with RunEvents("Outer", budget=handler()):
            RunnableLambda(lambda _: refuse_in_block(exceeded(), budget=handler())).invoke(0)

    async def anested() -> None:
        async with RunEvents("Outer", budget=handler()):
            with RunEvents("Between", budget=handler()):
                await RunnableLambda(lambda _: refuse_in_block(exceeded(), budget=handler())).ainvoke(0)

    with pytest.raises(PrivacyBudgetExceededError):
        asyncio.run(arun(anested, observer)) if is_async else run(nested, observer)
    assert [data["component"] for _, data in observer.heard] == ["Component"]


def test_two_refusals_are_two_events() -> None:
    observer = Observer()
    for _ in range(2):
        with pytest.raises(PrivacyBudgetError):
            run(lambda: refuse_in_block(exceeded(), budget=handler()), observer)
    assert len(observer.named(REFUSED)) == 2


# --- charges --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_what_stays_charged_is_told_at_the_end_of_the_block(
    monkeypatch: pytest.MonkeyPatch, is_async: bool, fails: bool
) -> None:
    use_simple_prices(monkeypatch)
    held, observer = handler(), Observer()
    share = held.budget.declare("votes", tickets=[Ticket("t", PureEvent(0.1), max_count=9)], epsilon=1.0, delta=1e-8)

    def work(events: RunEvents) -> None:
        events.tickets += 5
        events.tickets -= 2
        assert observer.heard == []
        if fails:
            raise exceeded()

    def block() -> None:
        with RunEvents("Component", budget=held, share=share) as events:
            work(events)

    async def ablock() -> None:
        async with RunEvents("Component", budget=held, share=share) as events:
            work(events)

    try:
        asyncio.run(arun(ablock, observer)) if is_async else run(block, observer)
    except PrivacyBudgetExceededError:
        assert fails
    shown = {"name": "votes", "epsilon": 1.0, "delta": 1e-8}
    charged = (CHARGED, {"component": "Component", "tickets": 3, "share": shown, "budget": LIMITS})
    assert observer.heard[0] == charged
    assert [name for name, _ in observer.heard] == [CHARGED, *([REFUSED] if fails else [])]


def test_a_block_that_charged_nothing_tells_nothing() -> None:
    observer = Observer()

    def block() -> None:
        with RunEvents("Component", budget=handler()) as events:
            events.tickets += 1
            events.tickets -= 1

    run(block, observer)
    assert observer.heard == []


# --- constructors ---------------------------------------------------------------------------------------------------


@tells_refusals("Made")
def make(given: int, *, budget: Any = None, config: Any = None) -> int:
    """Doubles."""
    if given < 0:
        raise exceeded()
    return 2 * given


def test_a_function_that_tells_refusals_is_otherwise_itself() -> None:
    assert make(4) == 8
    assert (make.__name__, make.__doc__) == ("make", "Doubles.")
    assert list(inspect.signature(make).parameters) == ["given", "budget", "config"]


def test_a_function_that_tells_refusals_shows_the_budget_it_was_given() -> None:
    observer, told = Observer(), Observer()
    with pytest.raises(PrivacyBudgetExceededError):
        run(lambda: make(-1, budget=handler(), config={"callbacks": [told]}), observer)
    assert [data["budget"] for _, data in observer.heard] == [LIMITS]
    assert told.heard == observer.heard


async def test_blocking_code_can_leave_the_telling_to_async_code() -> None:
    observer = AsyncObserver()
    with pytest.raises(PrivacyBudgetExceededError):
        await arun(lambda: refusals_awaited(lambda: make(-1, budget=handler())), observer)
    assert [data["component"] for _, data in observer.heard] == ["Made"]
    assert observer.loops == {id(asyncio.get_running_loop())}
    assert await arun(lambda: refusals_awaited(lambda: make(2)), observer) == 4
    assert len(observer.heard) == 1


async def test_a_refusal_that_no_component_saw_is_not_told() -> None:
    async def fails() -> None:
        def action() -> None:
            raise exceeded()

        await refusals_awaited(action)

    observer = Observer()
    with pytest.raises(PrivacyBudgetExceededError):
        await arun(fails, observer)
    assert observer.heard == []


def test_what_is_left_to_the_caller_ends_with_the_call() -> None:
    observer = Observer()

    async def twice() -> None:
        for call in (lambda: refusals_awaited(lambda: make(-1)), None):
            with pytest.raises(PrivacyBudgetExceededError):
                make(-1) if call is None else await call()

    asyncio.run(arun(twice, observer))
    assert len(observer.named(REFUSED)) == 2
