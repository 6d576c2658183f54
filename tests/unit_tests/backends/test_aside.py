"""Work off the event loop: it is seen to its end, whatever happens to the task that waits for it."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from langchain_dpicl._opaque import PerProcess, this_process
from langchain_dpicl.backends import sync_async as room
from langchain_dpicl.backends.rows.rows import Together
from langchain_dpicl.backends.sync_async import (
    AskBeside,
    Blocking,
    EffectGenerator,
    Outage,
    PublicAnswer,
    ThreadedContext,
    awaitable,
    run_async,
    run_engine,
    run_in_thread,
    run_to_completion,
    run_unawaited,
)
from langchain_dpicl.exceptions import ConfigurationError
from tests.durable import halfway, is_on_loop, no_room, until


class Work:
    """Waits until it is let go; knows whether it has begun and ended."""

    def __init__(self, outcome: Any = "done") -> None:
        self.begun, self.let_go, self.ended = threading.Event(), threading.Event(), threading.Event()
        self.outcome = outcome

    def __call__(self) -> Any:
        self.begun.set()
        assert self.let_go.wait(60)
        self.ended.set()
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome

    async def has_begun(self) -> None:
        await until(self.begun.is_set)


async def test_it_runs_off_the_loop_and_the_loop_goes_on_meanwhile() -> None:
    work, turns = Work(), 0
    task = asyncio.create_task(run_in_thread(work))
    await work.has_begun()
    for _ in range(5):
        await asyncio.sleep(0)
        turns += 1
    work.let_go.set()
    assert (await task, turns) == ("done", 5)
    assert await run_in_thread(is_on_loop) is False


async def test_what_does_not_wait_is_run_where_we_are() -> None:
    assert await run_in_thread(threading.get_ident, is_slow=False) == threading.get_ident()
    assert await run_in_thread(threading.get_ident) != threading.get_ident()


async def test_what_it_raises_is_raised() -> None:
    with pytest.raises(LookupError, match="gone"):
        await run_in_thread(lambda: {}["gone"])


async def test_it_sees_the_callers_context() -> None:
    mark: contextvars.ContextVar[str] = contextvars.ContextVar("mark")
    mark.set("ours")
    assert await run_in_thread(mark.get) == "ours"


@pytest.mark.parametrize("times", [1, 3])
async def test_a_cancellation_is_heard_when_the_work_has_ended(times: int) -> None:
    work = Work()
    task = asyncio.create_task(run_in_thread(work))
    await work.has_begun()
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done()
    work.let_go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.ended.is_set()


async def test_a_cancellation_goes_on_whatever_the_work_raises_and_names_it() -> None:
    work = Work(ValueError("the disk"))
    task = asyncio.create_task(run_in_thread(work))
    await work.has_begun()
    task.cancel()
    work.let_go.set()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    assert isinstance(caught.value.__cause__, ValueError)


async def test_a_timeout_is_told_as_such_after_the_work() -> None:
    work, loop = Work(), asyncio.get_running_loop()

    async def expires() -> None:
        await work.has_begun()
        limit.reschedule(loop.time())
        loop.call_later(0.05, work.let_go.set)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as limit:
            expiring = asyncio.create_task(expires())
            await run_in_thread(work)
    await expiring
    assert work.ended.is_set()


async def test_work_that_has_not_begun_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_POOLS", {})
    monkeypatch.setattr(room, "THREADS", 1)
    first, second = Work(), Work()
    holding = asyncio.create_task(run_in_thread(first))
    await first.has_begun()
    waiting = asyncio.create_task(run_in_thread(second))
    await asyncio.sleep(0.01)
    begun, watched = second.begun, weakref.ref(second)
    del second
    gc.disable()  # a cancellation in a circle would hold what it was to do until the collector comes
    try:
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        del waiting
        first.let_go.set()
        assert await holding == "done"
        assert await run_in_thread(lambda: "behind it") == "behind it"
        assert not begun.is_set()
        await until(lambda: watched() is None)
        assert watched() is None
    finally:
        gc.enable()


async def test_what_has_to_be_done_is_done_also_if_the_cancellation_came_before_it_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room, "_POOLS", {})
    monkeypatch.setattr(room, "THREADS", 1)
    first, second = Work(), Work()
    holding = asyncio.create_task(run_in_thread(first))
    await first.has_begun()
    waiting = asyncio.create_task(run_to_completion(second))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.sleep(0.01)
    first.let_go.set()
    second.let_go.set()
    outcome, stop = await waiting
    assert (outcome(), type(stop), await holding) == ("done", asyncio.CancelledError, "done")


async def test_work_that_no_thread_can_do_is_refused_by_us_and_never_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_POOLS", {})
    log: list[str] = []

    def walk() -> EffectGenerator[None]:
        log.append("begun")
        yield Blocking(lambda: None)

    for ask in (lambda: run_in_thread(lambda: log.append("done")), lambda: run_async(walk(), is_slow=True)):
        with no_room(), pytest.raises(ConfigurationError, match="threads: expected room for one more"):
            await ask()
    await run_in_thread(lambda: log.append("later"))
    assert log == ["later"]
    met = threading.Barrier(2, timeout=20)  # a pool that thinks a thread idle starts no second one
    assert sorted(await asyncio.gather(*(run_in_thread(met.wait) for _ in "ab"))) == [0, 1]


async def test_a_call_of_a_local_engine_is_made_with_threads_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that no thread could make would be a row that abstains, and its answer paid noise."""
    monkeypatch.setattr(room, "_POOLS", {})
    assert await run_engine(is_on_loop) is False
    first, made = Work(), list[int]()
    (pool,) = room._POOLS.values()

    def is_idle() -> bool:  # a thread hands its result over before it is
        return bool(pool._idle_semaphore._value)

    def here(number: int) -> bool:
        made.append(number)
        return is_on_loop()

    def fails() -> None:
        raise ConfigurationError("its own")

    with no_room():
        await until(is_idle)
        assert await run_engine(is_on_loop) is False  # by the thread there is
        await until(is_idle)
        holding = asyncio.create_task(run_engine(first))
        await first.has_begun()
        assert await asyncio.gather(*(run_engine(partial(here, n)) for n in range(3))) == [True] * 3
        with pytest.raises(ConfigurationError, match="its own"):
            await run_engine(fails)
        first.let_go.set()
        assert await holding == "done"
    await run_engine(lambda: None)
    assert made == [0, 1, 2]


async def test_a_cancelled_call_of_a_local_engine_ends_with_its_work_or_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room, "_POOLS", {(this_process(), "dpicl-engine"): ThreadPoolExecutor(1)})
    first, second = Work(ValueError("a prompt")), Work()
    tasks = [asyncio.create_task(run_engine(work)) for work in (first, second)]
    await first.has_begun()
    for task in tasks:
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[1]
    assert not tasks[0].done()
    first.let_go.set()
    with pytest.raises(asyncio.CancelledError) as caught:
        await tasks[0]
    assert (first.ended.is_set(), caught.value.__cause__) == (True, None)
    await run_engine(lambda: None)
    assert not second.begun.is_set()


class Local:
    """Asks an engine on this machine, which computes until it is let go."""

    def __init__(self) -> None:
        self.run = Work()

    async def arun(self) -> Any:
        return await run_engine(self.run)


@pytest.mark.parametrize("kind", ["together", "beside"])
async def test_several_cancellations_end_nothing_before_the_engine_has_ended(kind: str) -> None:
    """Rows that it computes would be kept by nobody, and those who close it would wait for it on the loop."""
    first, second = Local(), Local()
    beside = AskBeside(first, PublicAnswer(lambda: second, Outage()))
    asked = Together((first, second)) if kind == "together" else beside
    task = asyncio.create_task(asked.arun())
    await first.run.has_begun()
    await second.run.has_begun()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0.02)
    first.run.let_go.set()
    await until(first.run.ended.is_set)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0.02)
    assert not task.done()
    second.run.let_go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert second.run.ended.is_set()


async def test_what_is_built_awaited_is_not_built_behind_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_POOLS", {})
    log: list[str] = []

    class Built:
        @classmethod
        def build(cls) -> None:
            log.append("built")

        abuild = awaitable(build)

    with no_room(), pytest.raises(ConfigurationError, match="threads: expected room for one more"):
        await Built.abuild()
    await asyncio.to_thread(lambda: None)
    await run_in_thread(lambda: None)
    assert log == []
    await Built.abuild()
    assert log == ["built"]


async def test_constructors_hold_no_thread_that_their_own_work_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_POOLS", {})
    monkeypatch.setattr(room, "THREADS", 2)
    met = threading.Barrier(2, timeout=20)

    class Built:
        @classmethod
        def build(cls) -> str:
            met.wait()
            return asyncio.run(asyncio.wait_for(run_in_thread(lambda: "built"), 20))

        abuild = awaitable(build)

    assert await asyncio.gather(Built.abuild(), Built.abuild()) == ["built"] * 2


async def test_what_has_to_be_done_is_done_once_where_no_thread_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_POOLS", {})
    log: list[str] = []
    with no_room():
        async with ThreadedContext(noting(log)):
            pass
        run_unawaited(lambda: log.append("cleaned up"))
    await run_in_thread(lambda: None)
    assert log == ["entered on the loop", "left on the loop", "cleaned up"]


class PlainError(Exception):
    """One that can be watched."""


async def test_an_error_brings_no_other_along_and_dies_with_whoever_holds_it() -> None:
    def fail() -> None:
        raise PlainError

    gc.disable()  # an error in a circle, with all its frames, would stay until the collector comes
    try:
        try:
            await run_in_thread(fail)
        except PlainError as error:
            watched, others = weakref.ref(error), (error.__cause__, error.__context__)
        await until(lambda: watched() is None)  # the thread lets go of what it did last a moment later
        assert (watched(), others) == (None, (None, None))
    finally:
        gc.enable()


def test_forty_waits_at_once_share_the_threads() -> None:
    async def main() -> list[int]:
        return await asyncio.gather(*(run_in_thread(lambda n=n: time.sleep(0.001) or n) for n in range(40)))

    assert asyncio.run(main()) == list(range(40))


@pytest.mark.parametrize("has_an_ancestors_number", [False, True])
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_has_threads_of_its_own(monkeypatch: pytest.MonkeyPatch, has_an_ancestors_number: bool) -> None:
    if has_an_ancestors_number:
        monkeypatch.setattr(os, "getpid", lambda: 1)
    asyncio.run(run_in_thread(lambda: None))
    child = os.fork()
    if not child:
        code = 1
        signal.alarm(20)  # it would wait without end for its parent's threads
        try:
            code = 0 if asyncio.run(run_in_thread(os.getpid)) == os.getpid() else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_with_the_number_of_an_ancestor_has_locks_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1)
    locks = PerProcess(threading.Lock)
    with locks.here:
        child = os.fork()
        if not child:
            os._exit(locks.here.locked())
        assert locks.here.locked()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -- blocks --------------------------------------------------------------------------------------------------------


@contextmanager
def noting(log: list[str], enter: Callable[[], Any] = lambda: None) -> Iterator[str]:
    enter()
    log.append("entered" + " on the loop" * is_on_loop())
    try:
        yield "held"
    except BaseException as error:
        log.append(type(error).__name__)
        raise
    finally:
        log.append("left" + " on the loop" * is_on_loop())


@pytest.mark.parametrize("is_slow", [True, False])
async def test_a_block_is_entered_and_left_aside_only_where_it_may_wait(is_slow: bool) -> None:
    log: list[str] = []
    async with ThreadedContext(noting(log), is_slow=is_slow) as held:
        log.append(held)
    where = "" if is_slow else " on the loop"
    assert log == [f"entered{where}", "held", f"left{where}"]


@pytest.mark.parametrize("is_slow", [True, False])
async def test_an_error_passes_through_the_block(is_slow: bool) -> None:
    log: list[str] = []
    with pytest.raises(KeyError):
        async with ThreadedContext(noting(log), is_slow=is_slow):
            raise KeyError
    assert log[1] == "KeyError"


async def test_a_block_that_was_entered_is_left_where_the_cancellation_came_meanwhile() -> None:
    log: list[str] = []
    work = Work()

    async def main() -> None:
        async with ThreadedContext(noting(log, work)):
            log.append("inside")

    task = asyncio.create_task(main())
    await work.has_begun()
    task.cancel()
    work.let_go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert log == ["entered", "CancelledError", "left"]


async def test_a_block_that_could_not_be_entered_is_not_left() -> None:
    log: list[str] = []
    with pytest.raises(ValueError):
        async with ThreadedContext(noting(log, lambda: int("x"))):
            log.append("inside")
    assert log == []


async def test_a_cancellation_while_it_is_left_is_heard_afterwards() -> None:
    work, log = Work(), []

    @contextmanager
    def slow_end() -> Iterator[None]:
        yield
        work()
        log.append("left")

    async def main() -> None:
        async with ThreadedContext(slow_end()):
            pass

    task = asyncio.create_task(main())
    await work.has_begun()
    task.cancel()
    await asyncio.sleep(0.01)
    work.let_go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert log == ["left"]


async def test_a_closed_generator_that_stands_at_a_yield_is_left_before_its_close_returns() -> None:
    log: list[str] = []

    async def numbers() -> Any:
        block = ThreadedContext(noting(log))
        async with block:
            block.is_at_yield = True
            yield 1
            block.is_at_yield = False

    stream = numbers()
    assert await anext(stream) == 1
    await stream.aclose()
    assert log == ["entered", "GeneratorExit", "left"]


async def test_a_coroutine_that_is_closed_in_a_block_leaves_it_in_a_thread() -> None:
    log: list[str] = []

    async def main() -> None:
        async with ThreadedContext(noting(log)):
            await asyncio.get_running_loop().create_future()

    work = main()
    await asyncio.create_task(halfway(work, lambda: "entered" in log))
    work.close()
    await until(lambda: log[-1] == "left")
    assert log == ["entered", "GeneratorExit", "left"]


async def test_a_coroutine_that_is_closed_while_it_enters_leaves_in_a_thread() -> None:
    log: list[str] = []
    gate = Work()

    async def main() -> None:
        async with ThreadedContext(noting(log, gate)):
            log.append("inside")

    work = main()
    await asyncio.create_task(halfway(work, gate.begun.is_set))
    work.close()
    gate.let_go.set()
    await until(lambda: bool(log) and log[-1] == "left")
    assert log == ["entered", "GeneratorExit", "left"]


async def test_clean_up_that_fails_where_nobody_waits_is_told_to_the_log_without_its_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> None:
        raise ValueError("secret")

    with caplog.at_level(logging.WARNING):
        run_unawaited(fail)
        await until(lambda: bool(caplog.records))
    assert "ValueError" in caplog.text
    assert "secret" not in caplog.text


async def test_engines_that_ask_engines_do_not_wait_for_each_other() -> None:
    """As a wrapper that runs a loop of its own: every thread of the pool could wait for one more."""
    await run_engine(lambda: None)
    most = room._pool(room._ENGINE)._max_workers
    asked = [run_engine(lambda: asyncio.run(run_engine(lambda: "inner"))) for _ in range(2 * most)]
    assert await asyncio.wait_for(asyncio.gather(*asked), 60) == ["inner"] * (2 * most)


# -- what is kept ------------------------------------------------------------------------------------------------------


class Text(str):  # noqa: SLOT000  with a weak reference
    """A text that can be watched."""


@contextmanager
def holding(text: str, *, at_start: Callable[[], object] = bool, at_end: Callable[[], object] = bool) -> Iterator[str]:
    at_start()
    try:
        yield text
    finally:
        at_end()


async def enters(work: Work, text: str) -> None:
    async with ThreadedContext(holding(text, at_start=work)):
        pass


async def leaves(work: Work, text: str) -> None:
    async with ThreadedContext(holding(text, at_end=work)):
        shown = text
        raise ValueError(len(shown))


async def walks(work: Work, text: str) -> None:
    def walk() -> EffectGenerator[str]:
        yield Blocking(bool)
        work()
        return text

    await run_async(walk(), is_slow=True)


async def withdraws(work: Work, text: str) -> None:
    others = asyncio.create_task(run_in_thread(work, pool="one"))
    await work.has_begun()
    try:
        await run_in_thread(partial(len, text), pool="one")
    finally:
        work.let_go.set()
        await others


@pytest.mark.parametrize("waits", [enters, leaves, walks, withdraws])
def test_a_cancelled_task_keeps_no_text(waits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a cycle it would stay until the garbage collector comes by."""
    monkeypatch.setattr(room, "THREADS", 1)
    monkeypatch.setattr(room, "_POOLS", {})

    async def main(text: str) -> None:
        work = Work()
        task = asyncio.create_task(waits(work, text))
        del text
        await work.has_begun()
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.sleep(0.01)
        work.let_go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        task = None
        await until(lambda: watched() is None, 2)  # the thread lets go of what it did last a moment later
        assert watched() is None

    watched = weakref.ref(text := Text("a card"))
    begun = main(text)
    del text
    gc.disable()
    try:
        asyncio.run(begun)
    finally:
        gc.enable()
