"""What observers of a run hear of a budget: once, public values only, and with no say in the outcome."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import pytest
import wrapt
from langchain_core.callbacks import (
    AsyncCallbackHandler,
    AsyncCallbackManager,
    BaseCallbackHandler,
    BaseCallbackManager,
    CallbackManager,
    manager,
)
from langchain_core.globals import set_debug
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langchain_core.tools import StructuredTool
from langchain_core.tracers import ConsoleCallbackHandler, LangChainTracer
from langchain_core.tracers import context as tracers
from langchain_core.tracers.context import collect_runs, register_configure_hook
from langsmith import Client, run_trees
from langsmith.run_helpers import tracing_context
from langsmith.utils import get_env_var

from langchain_dpicl.backends.sync_async import THREADS, run_in_thread
from langchain_dpicl.budget import handler as run_events
from langchain_dpicl.budget.handler import (
    CHARGED,
    REFUSED,
    PrivacyBudgetCallbackHandler,
    RunEvents,
    arecord_event,
    await_refusals,
    get_privacy_budget_callback,
    record_event,
)
from langchain_dpicl.exceptions import (
    ConfigurationError,
    LedgerError,
    LedgerUnavailableError,
    ModelCallError,
    NoPrivacyBudgetError,
    PrivacyBudgetError,
    PrivacyBudgetExceededError,
    PrivacyBudgetMismatchError,
    SealedShareError,
)
from langchain_dpicl.privacy.accounting.events import PureEvent
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.privacy.ledger.writer import LedgerWriter
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


def test_events_reach_observers_of_a_run_and_those_of_a_config_outside() -> None:
    listener = Observer()
    record_event(REFUSED, {"n": 0})
    record_event(REFUSED, {"n": 1}, {"callbacks": [listener]})
    asyncio.run(arecord_event(REFUSED, {"n": 2}, {"callbacks": [listener]}))
    run(lambda: record_event(REFUSED, {"n": 3}), listener, handler())
    assert listener.heard == [(REFUSED, {"n": n}) for n in (1, 2, 3)]


@pytest.mark.parametrize("explicit", [False, True])
async def test_events_reach_async_observers_on_their_own_loop(explicit: bool) -> None:
    async def refuse(_: Any, config: RunnableConfig) -> None:
        await arecord_event(REFUSED, {"remaining": 0.5}, config if explicit else None)

    listener, awaited = Observer(), AsyncObserver()
    await RunnableLambda(refuse).ainvoke(0, {"callbacks": [listener, awaited]})
    assert listener.heard == awaited.heard == [(REFUSED, {"remaining": 0.5})]
    assert awaited.loops == {id(asyncio.get_running_loop())}


@pytest.mark.parametrize("waits", [False, True])
async def test_a_cancellation_while_what_was_charged_is_sent_ends_the_run_and_not_the_sending(waits: bool) -> None:
    may_go, heard = asyncio.Event(), []

    class Writes(AsyncCallbackHandler):
        async def on_custom_event(self, name: str, data: Any, **_: Any) -> None:
            if waits:
                await may_go.wait()
            heard.append((name, data["tickets"]))

    class OneTicket:
        component, epsilon, delta = "queues", 1.0, 1e-7

    async def pay() -> None:
        async with RunEvents("Component", budget=handler(), share=OneTicket()) as events:
            events.tickets = 1
            asyncio.get_running_loop().call_soon(task.cancel)  # before the first line of any observer

    task = asyncio.create_task(arun(pay, Writes()))
    with pytest.raises(asyncio.CancelledError):
        await task
    may_go.set()
    for _ in range(4):  # turns of the loop
        await asyncio.sleep(0)
    assert heard == [(CHARGED, 1)]


@pytest.mark.parametrize("is_begun", [True, False])
async def test_a_cancellation_while_the_ledger_is_read_for_an_event_goes_on_once_it_is_told(is_begun: bool) -> None:
    reading, may_go, listener = threading.Event(), threading.Event(), Observer()

    def read() -> dict[str, Any]:
        reading.set()
        may_go.wait()
        return {"tickets": 1}

    others = [] if is_begun else [asyncio.ensure_future(run_in_thread(may_go.wait)) for _ in range(THREADS)]
    await asyncio.sleep(0)
    telling = arun(lambda: arecord_event(CHARGED, read, is_slow=True), listener)
    task = asyncio.ensure_future(telling)
    if is_begun:
        await asyncio.to_thread(reading.wait)
    else:
        await asyncio.sleep(0.1)  # it waits for one of the threads, which the others hold
    task.cancel()
    await asyncio.sleep(0)
    may_go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.gather(*others)
    assert listener.heard == [(CHARGED, {"tickets": 1})]


async def test_an_event_is_told_where_the_system_has_no_room_for_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: str) -> Any:
        raise RuntimeError("can't start new thread")

    listener = Observer()
    monkeypatch.setattr("langchain_dpicl.backends.sync_async._pool", full)
    await arun(lambda: arecord_event(CHARGED, lambda: {"tickets": 1}, is_slow=True), listener)
    assert listener.heard == [(CHARGED, {"tickets": 1})]


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


# --- nobody listens, or so it seems -----------------------------------------------------------------------------------


_LATE: ContextVar[Any] = ContextVar("late_listener", default=None)
_ENVIRONMENT: ContextVar[Any] = ContextVar("listener_by_environment", default=None)


@contextmanager
def hook(*args: Any) -> Iterator[None]:
    register_configure_hook(*args)
    registered = tracers._configure_hooks[-1]
    try:
        yield
    finally:
        tracers._configure_hooks.remove(registered)


@contextmanager
def _hooked(observer: Any, _: RunnableConfig) -> Iterator[None]:
    with hook(_LATE, False):
        token = _LATE.set(observer)
        try:
            yield
        finally:
            _LATE.reset(token)


@contextmanager
def _hooked_by_environment(observer: Any, _: RunnableConfig) -> Iterator[None]:
    kind = type("Made", (BaseCallbackHandler,), {"on_custom_event": staticmethod(observer.on_custom_event)})
    with hook(_ENVIRONMENT, True, kind, "DPICL_TEST_LISTENER"), pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPICL_TEST_LISTENER", "1")
        yield


@contextmanager
def _collecting(observer: Any, _: RunnableConfig) -> Iterator[None]:
    with collect_runs() as collector:
        collector.on_custom_event = observer.on_custom_event  # type: ignore[method-assign]
        yield


def _client() -> Client:
    """A client of LangSmith that sends nothing by itself."""
    return Client("http://127.0.0.1:9", api_key="none", auto_batch_tracing=False, info={})


@contextmanager
def _tracing(observer: Any, _: RunnableConfig) -> Iterator[None]:
    tracer = LangChainTracer(client=_client())
    tracer.on_custom_event = observer.on_custom_event  # type: ignore[method-assign]
    token = tracers.tracing_v2_callback_var.set(tracer)
    try:
        yield
    finally:
        tracers.tracing_v2_callback_var.reset(token)


@contextmanager
def _patched_tracer(observer: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LangChainTracer, "on_custom_event", staticmethod(observer.on_custom_event), raising=False)
        yield


@contextmanager
def _traced_by_context(observer: Any, _: RunnableConfig) -> Iterator[None]:
    with _patched_tracer(observer), tracing_context(enabled=True, client=_client()):
        yield


@contextmanager
def _traced_by_environment(observer: Any, _: RunnableConfig) -> Iterator[None]:
    with _patched_tracer(observer), pytest.MonkeyPatch.context() as patch:
        patch.setenv("LANGSMITH_TRACING", "true")
        patch.setattr(run_trees, "_CLIENT", _client())
        get_env_var.cache_clear()
        yield
    get_env_var.cache_clear()


@contextmanager
def _debugging(observer: Any, _: RunnableConfig) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConsoleCallbackHandler, "on_custom_event", staticmethod(observer.on_custom_event))
        set_debug(True)
        try:
            yield
        finally:
            set_debug(False)


@contextmanager
def _added_to_the_manager(observer: Any, config: RunnableConfig) -> Iterator[None]:
    config["callbacks"].add_handler(observer)  # type: ignore[union-attr]
    yield


@contextmanager
def _instrumented_managers(observer: Any, _: RunnableConfig) -> Iterator[None]:
    made = BaseCallbackManager.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.add_handler(observer, True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BaseCallbackManager, "__init__", wraps(made)(init))
        yield


@contextmanager
def _instrumented_configuration(observer: Any, _: RunnableConfig) -> Iterator[None]:
    configure = manager._configure

    def configured(*args: Any, **kwargs: Any) -> Any:
        found = configure(*args, **kwargs)
        found.add_handler(observer)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "_configure", wrapt.FunctionWrapper(configure, lambda _, __, a, k: configured(*a, **k)))
        yield


LATE = [
    _hooked,
    _hooked_by_environment,
    _collecting,
    _tracing,
    _traced_by_context,
    _traced_by_environment,
    _debugging,
    _added_to_the_manager,
    _instrumented_managers,
    _instrumented_configuration,
]


@pytest.mark.parametrize("joins", LATE, ids=lambda joins: joins.__name__)
def test_who_joins_in_the_middle_of_a_run_hears_what_follows(joins: Any) -> None:
    observer = Observer()

    def step(_: Any, config: RunnableConfig) -> None:
        record_event(REFUSED, {"n": 1}, config)
        with joins(observer, config):
            record_event(REFUSED, {"n": 2}, config)

    RunnableLambda(step).invoke(0)
    assert observer.heard == [(REFUSED, {"n": 2})]


@pytest.mark.parametrize("joins", LATE, ids=lambda joins: joins.__name__)
async def test_who_joins_in_the_middle_of_an_async_run_hears_what_follows(joins: Any) -> None:
    observer = Observer()

    async def step(_: Any, config: RunnableConfig) -> None:
        await arecord_event(REFUSED, {"n": 1}, config)
        with joins(observer, config):
            await arecord_event(REFUSED, {"n": 2}, config)

    await RunnableLambda(step).ainvoke(0)
    assert observer.heard == [(REFUSED, {"n": 2})]


@pytest.mark.parametrize("place", ["config", "with_config", "sequence", "binding of a binding", "a tool's run"])
def test_observers_given_before_the_run_hear_it(place: str) -> None:
    observer = Observer()
    step = RunnableLambda(lambda _, config: record_event(REFUSED, {"n": 1}, config))  # type: ignore[misc, arg-type]
    config: RunnableConfig = {"callbacks": [observer]}
    given: Any = {
        "config": lambda: step.invoke(0, config),
        "with_config": lambda: step.with_config(config).invoke(0),
        "sequence": lambda: (RunnableLambda(lambda x: x) | step).invoke(0, config),
        "binding of a binding": lambda: step.with_config(config).with_config({"tags": ["t"]}).invoke(0),
        "a tool's run": lambda: StructuredTool.from_function(
            lambda: step.invoke(0), name="tool", description="runs the step"
        ).invoke({}, config),
    }
    given[place]()
    assert observer.heard == [(REFUSED, {"n": 1})]


@pytest.mark.parametrize("kind", [CallbackManager, AsyncCallbackManager])
def test_a_manager_of_no_run_hides_nothing_from_the_runs_observers(kind: Any) -> None:
    observer, given = Observer(), Observer()
    run(lambda: record_event(REFUSED, {"n": 1}, {"callbacks": kind([])}), observer)
    run(lambda: record_event(REFUSED, {"n": 2}, {"callbacks": kind([given])}), observer)
    assert observer.heard == [(REFUSED, {"n": 1}), (REFUSED, {"n": 2})]
    assert given.heard == [(REFUSED, {"n": 2})]


async def test_streamed_events_hold_what_is_told() -> None:
    async def step(_: Any, config: RunnableConfig) -> None:
        await arecord_event(REFUSED, {"n": 1}, config)

    seen = [event async for event in RunnableLambda(step).astream_events(0, version="v2")]
    assert [event["data"] for event in seen if event["event"] == "on_custom_event"] == [{"n": 1}]


@pytest.mark.parametrize("given", [[], [handler()]], ids=["no handler", "our handler"])
def test_no_manager_is_made_where_nobody_listens(given: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(run_events, "ensure_config", lambda config=None: asked.append(config) or {})

    def step(_: Any, config: RunnableConfig) -> None:
        record_event(REFUSED, {"n": 1}, config)
        assert asked == []
        record_event(REFUSED, {"n": 1}, {"callbacks": []})
        assert len(asked) == 2

    RunnableLambda(step).invoke(0, {"callbacks": given})
    assert len(asked) == 2


def test_a_langchain_that_is_wrapped_when_we_are_imported_is_not_trusted() -> None:
    stock = [door for door in run_events._STOCK if door is not None]
    assert all(map(run_events._is_langchains, stock))
    assert len(stock) == 5
    for door in stock:
        function = door.__func__ if isinstance(door, classmethod) else door

        @wraps(function)
        def around(*args: Any) -> Any:
            return args

        assert around.__module__.startswith("langchain_core.")
        assert not run_events._is_langchains(around)
        assert not run_events._is_langchains(classmethod(around))
        assert not run_events._is_langchains(wrapt.FunctionWrapper(function, lambda w, _, a, k: w(*a, **k)))


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


def test_an_event_that_was_cut_off_with_its_loop_is_kept_until_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def cut_off() -> None:
        begun = asyncio.Event()

        class Hangs(AsyncCallbackHandler):
            async def on_custom_event(self, *args: Any, **kwargs: Any) -> None:
                begun.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(arun(lambda: arecord_event(CHARGED, {}), Hangs()))
        await begun.wait()
        task.cancel()
        await asyncio.wait({task})

    monkeypatch.setattr(run_events, "_TELLING", set())
    for _ in range(3):
        loop = asyncio.new_event_loop()
        loop.run_until_complete(cut_off())
        loop.close()
    assert len(run_events._TELLING) == 1


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


def test_a_charge_is_reported_while_the_ledger_is_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_simple_prices(monkeypatch)
    observer, held = Observer(), handler()
    share = held.budget.declare("votes", tickets=[Ticket("t", PureEvent(0.1), max_count=9)], epsilon=1.0, delta=1e-8)

    def refresh(_: LedgerWriter) -> None:
        raise LedgerUnavailableError("out")

    def block() -> None:
        with RunEvents("Component", budget=held, share=share) as events:
            events.tickets += 1
            monkeypatch.setattr(LedgerWriter, "refresh", refresh)

    run(block, observer)
    shown = {"name": "votes", "epsilon": 1.0, "delta": 1e-8}
    assert observer.heard == [(CHARGED, {"component": "Component", "tickets": 1, "share": shown, "budget": LIMITS})]
    assert not caplog.messages


def test_a_block_that_charged_nothing_tells_nothing() -> None:
    observer = Observer()

    def block() -> None:
        with RunEvents("Component", budget=handler()) as events:
            events.tickets += 1
            events.tickets -= 1

    run(block, observer)
    assert observer.heard == []


# --- constructors ---------------------------------------------------------------------------------------------------


def make(given: int, *, budget: Any = None, config: Any = None) -> int:
    with RunEvents("Made", budget=budget, config=config):
        if given < 0:
            raise exceeded()
        return 2 * given


def test_a_refusal_shows_the_budget_that_was_given() -> None:
    observer, told = Observer(), Observer()
    with pytest.raises(PrivacyBudgetExceededError):
        run(lambda: make(-1, budget=handler(), config={"callbacks": [told]}), observer)
    assert [data["budget"] for _, data in observer.heard] == [LIMITS]
    assert told.heard == observer.heard


async def test_blocking_code_can_leave_the_telling_to_async_code() -> None:
    observer = AsyncObserver()
    with pytest.raises(PrivacyBudgetExceededError):
        await arun(lambda: await_refusals(lambda: make(-1, budget=handler())), observer)
    assert [data["component"] for _, data in observer.heard] == ["Made"]
    assert observer.loops == {id(asyncio.get_running_loop())}
    assert await arun(lambda: await_refusals(lambda: make(2)), observer) == 4
    assert len(observer.heard) == 1


async def test_a_refusal_that_no_component_saw_is_not_told() -> None:
    async def fails() -> None:
        def action() -> None:
            raise exceeded()

        await await_refusals(action)

    observer = Observer()
    with pytest.raises(PrivacyBudgetExceededError):
        await arun(fails, observer)
    assert observer.heard == []


def test_what_is_left_to_the_caller_ends_with_the_call() -> None:
    observer = Observer()

    async def twice() -> None:
        for call in (lambda: await_refusals(lambda: make(-1)), None):
            with pytest.raises(PrivacyBudgetExceededError):
                make(-1) if call is None else await call()

    asyncio.run(arun(twice, observer))
    assert len(observer.named(REFUSED)) == 2
