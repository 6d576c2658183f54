"""Runs computations with model calls blocking or awaited, with public questions first or beside the private ones."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial, wraps
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeAlias, TypeVar

from langchain_dpicl._opaque import OpaqueRows, run_guarded, this_process
from langchain_dpicl.backends.base import NextTokenBackend, Rows, Token
from langchain_dpicl.exceptions import ConfigurationError, DPICLError, ModelCallError


class FairSemaphore:
    """Admits at most `limit` holders at once, from threads and event loops, in the order of their arrival."""

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], bool]] = deque()

    def __enter__(self) -> None:
        if self._takes(None):  # an event costs more than a free place
            return
        woken = threading.Event()

        def wake() -> bool:
            woken.set()
            return True

        if not self._takes(wake):
            try:
                woken.wait()
            except BaseException:  # Ctrl-C
                self._withdraw(wake)
                raise

    async def __aenter__(self) -> None:
        loop = asyncio.get_running_loop()
        woken = loop.create_future()

        def wake() -> bool:
            try:
                loop.call_soon_threadsafe(lambda: None if woken.done() else woken.set_result(None))
            except RuntimeError:  # its loop is closed: nobody waits any more
                return False
            return True

        if not self._takes(wake):
            try:
                await woken
            except BaseException:  # a cancelled task
                self._withdraw(wake)
                raise

    def __exit__(self, *_: object) -> None:
        self._leave()

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def enter_at_once(self) -> bool:
        """Takes a free place if there is one; returns whether it did."""
        return self._takes(None)

    def _takes(self, wake: Callable[[], bool] | None) -> bool:
        """Takes a free place, or queues `wake` if there is none."""
        with self._lock:
            if self._free:
                self._free -= 1
                return True
            if wake is not None:
                self._waiting.append(wake)
            return False

    def _leave(self) -> None:
        """Hands the place to the next waiter that is still there."""
        with self._lock:
            while self._waiting:
                if self._waiting.popleft()():
                    return
            self._free += 1

    def _withdraw(self, wake: Callable[[], bool]) -> None:
        with self._lock:
            if wake in self._waiting:
                self._waiting.remove(wake)
                return
        self._leave()  # the place was handed over meanwhile


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CallLimit:
    """How many calls a block may have in flight, and the gate that all of them go through."""

    most: int
    gate: FairSemaphore


_LIMIT: ContextVar[CallLimit | None] = ContextVar("dpicl_call_limit", default=None)
_STOP: ContextVar[threading.Event | None] = ContextVar("dpicl_calls_stopped", default=None)


@contextmanager
def limit_concurrency(limit: int | None) -> Iterator[None]:
    """Limits the model calls of the block to `limit` at a time, in all its threads and tasks together.

    None: to the engine's own limit.
    """
    token = _LIMIT.set(None if limit is None else CallLimit(limit, FairSemaphore(limit)))
    try:
        yield
    finally:
        _LIMIT.reset(token)


def call_limit() -> CallLimit | None:
    """Returns the limit that `limit_concurrency` sets here, with its gate."""
    return _LIMIT.get()


def concurrency_limit() -> int | None:
    """Returns the limit that `limit_concurrency` sets here."""
    limit = _LIMIT.get()
    return None if limit is None else limit.most


@contextmanager
def stopping_calls() -> Iterator[None]:
    """Stops the calls of the block's threads where the block raises: those that have not begun are not made."""
    stopped = threading.Event()
    token = _STOP.set(stopped)
    try:
        yield
    except BaseException:
        stopped.set()
        raise
    finally:
        _STOP.reset(token)


def call_stop() -> threading.Event | None:
    """Returns the event that stops the calls made here, if there is one."""
    return _STOP.get()


THREADS = 32
"""Threads for such work in one process; they mostly wait."""

P = ParamSpec("P")
R = TypeVar("R")
_POOLS: dict[tuple[tuple[int, int], str], ThreadPoolExecutor] = {}
_ASIDE, _BUILDING, _ENGINE = "dpicl-aside", "dpicl-building", "dpicl-engine"
"""Threads of short work, of constructors, which may themselves wait for work of the others, and of local engines."""
logger = logging.getLogger(__name__)


async def run_in_thread(action: Callable[[], T], *, is_slow: bool = True, pool: str = _ASIDE) -> T:
    """Runs `action` in a thread and returns what it returns.

    Formal guarantees:
      - It ends, well or not, after `action` has ended, or before it began; also when the task is cancelled.
      - A cancellation goes on whatever `action` returns or raises. The event loop never waits.

    Args:
      action: what may wait; it runs in a copy of the caller's context.
      is_slow: False: it does not block, so it runs here and now.
      pool: whose thread.

    Raises:
      ConfigurationError: the system has no room for a thread; `action` is never run.
    """
    if not is_slow:
        return action()
    result, stop = await run_to_completion(action, is_optional=True, pool=pool)
    try:
        if stop is not None:
            raise stop
        return result()
    finally:
        del result, stop  # breaks cycles: they hold errors, whose frames hold them


async def run_engine(action: Callable[[], T]) -> T:
    """Runs a call of an engine on this machine in a thread, or here where the system has no room for a thread.

    Formal guarantees:
      - Whether `action` runs does not depend on free threads: a call that they fail is a row that abstains.
      - It ends, well or not, after `action` has ended, or before it began; also when the task is cancelled.

    Args:
      action: the blocking call; it runs in a copy of the caller's context.
    """
    result, stop = await run_to_completion(action, is_optional=True, may_run_here=True, pool=_ENGINE)
    try:
        if stop is not None:
            raise stop from None  # frames of the call's own error hold prompts
        return result()
    finally:
        del result, stop  # see `run_in_thread`


class awaitable(Generic[P, R]):  # noqa: N801  used as a decorator is, in a class body
    """The awaitable version of a constructor, with the same signature; the constructor runs in a thread.

    `afrom_private_examples = awaitable(from_private_examples)`; a subclass's own constructor is found by name. A
    cancellation that comes once it has begun is raised when it has ended.
    """

    def __init__(self, constructor: Callable[Concatenate[Any, P], R]) -> None:
        self._name: str = getattr(constructor, "__func__", constructor).__name__

    def __get__(self, instance: object, owner: type[T]) -> Callable[P, Coroutine[Any, Any, T]]:
        build = getattr(owner, self._name)

        @wraps(build)
        async def later(*args: P.args, **kwargs: P.kwargs) -> T:
            return await run_in_thread(partial(build, *args, **kwargs), pool=_BUILDING)

        return later


async def run_to_completion(
    action: Callable[[], T],
    *,
    is_optional: bool = False,
    may_run_here: bool = False,
    if_left: Callable[[], object] | None = None,
    pool: str = _ASIDE,
) -> tuple[Callable[[], T], asyncio.CancelledError | None]:
    """Runs `action` in a thread to its end; returns a function that gives its outcome, and a cancellation that came.

    Args:
      action: what may wait.
      is_optional: whether a cancellation withdraws work that has not begun; then the outcome is that cancellation. So
        does a system without room for a thread, which raises ConfigurationError; other work is then done here.
      may_run_here: whether optional work, too, is done here where there is no room.
      if_left: run in a thread after `action` has ended well, where the coroutine that awaits it was closed meanwhile.
      pool: whose thread.
    """
    work = partial(contextvars.copy_context().run, action)
    future = _begin(work, needs_thread=is_optional and not may_run_here, pool=pool)
    stop: asyncio.CancelledError | None = None
    has_ended = False
    while not has_ended:  # once at least, so that others have their turn
        try:
            await wait_for_thread(future)
            has_ended = True
        except asyncio.CancelledError as error:
            stop = error
            if is_optional and future.cancel():
                break
            has_ended = future.done()
        except GeneratorExit:
            if if_left is not None:
                future.add_done_callback(partial(_run_unawaited_after, if_left))
            raise
    if stop is not None and not future.cancelled():
        stop.__cause__ = future.exception()
    try:
        return future.result, stop
    finally:
        del stop  # see `run_in_thread`


async def cancel_to_completion(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancels tasks and waits for their ends, also where further cancellations come: they go to the tasks alone."""
    while not all(task.done() for task in tasks):
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.wait(tasks)


def run_unawaited(action: Callable[[], object]) -> None:
    """Runs `action` in a thread that nothing awaits: for clean-up where awaiting is no longer possible."""

    def run() -> None:
        try:
            action()
        except BaseException as error:  # noqa: BLE001  nothing could catch it
            logger.warning("an abandoned run could not be cleaned up: %s", type(error).__name__)

    _begin(run, needs_thread=False)


class ThreadedContext(Generic[T]):
    """Enters and leaves a context manager in threads: `async with ThreadedContext(tickets) as entered:`.

    Formal guarantees:
      - What was entered is left, also when a cancellation came while it was entered.

    Args:
      manager: may block when it is entered or left.
      is_slow: False: it does not block, so it is entered and left here and now.

    Attributes:
      is_at_yield: whether an async generator stands at a `yield` of the block, so that its close can be awaited; the
        close of a coroutine cannot, and the manager is then left in a thread that nothing waits for.
    """

    is_at_yield = False

    def __init__(self, manager: AbstractContextManager[T], *, is_slow: bool = True) -> None:
        self._manager = manager
        self._is_slow = is_slow

    async def __aenter__(self) -> T:
        if not self._is_slow:
            return self._manager.__enter__()
        manager = self._manager
        result, stop = await run_to_completion(
            manager.__enter__, if_left=lambda: manager.__exit__(GeneratorExit, GeneratorExit(), None)
        )
        try:
            entered = result()
            if stop is not None:
                await self.__aexit__(type(stop), stop, stop.__traceback__)
                raise stop
            return entered
        finally:
            del result, stop  # see `run_in_thread`

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        manager = self._manager
        if not self._is_slow:
            return manager.__exit__(kind, error, trace)
        if kind is not None and issubclass(kind, GeneratorExit) and not self.is_at_yield:
            run_unawaited(lambda: manager.__exit__(kind, error, trace))
            return False
        result, stop = await run_to_completion(lambda: manager.__exit__(kind, error, trace))
        try:
            if stop is not None:
                raise stop
            return result()
        finally:
            del result, stop  # see `run_in_thread`


def _run_unawaited_after(then: Callable[[], object], ended: Future[T]) -> None:
    if ended.exception() is None:
        run_unawaited(then)


def _begin(action: Callable[[], T], *, needs_thread: bool, pool: str = _ASIDE) -> Future[T]:
    """Gives work to a thread; without room for one it refuses what needs it, and does the rest here and now."""
    future: Future[T] = Future()
    work = [(future, action)]  # the thread that does it takes it out; a pool without a thread keeps the list
    left = None
    try:
        if threading.current_thread().name.startswith(f"{_ENGINE}_") and pool == _ENGINE:
            _do(work)  # a model that asks another one: all threads could wait for one more
        else:
            _pool(pool).submit(_do, work)
    except RuntimeError:  # no room, or the interpreter is going down
        _POOLS.pop((this_process(), pool), None)  # it counts a thread that never began as idle; a new pool counts right
        left = _taken(work)
    if left is not None:
        if needs_thread:
            advice = "Raise the system's limit, unless this process is ending."
            raise ConfigurationError(f"threads: expected room for one more, found none. {advice}")
        _do([left])
    return future


def _do(work: list[tuple[Future[T], Callable[[], T]]]) -> None:
    """Does the work of a list, if it is still there."""
    if (taken := _taken(work)) is None or not taken[0].set_running_or_notify_cancel():
        return
    try:
        result = taken[1]()
    except BaseException as error:  # noqa: BLE001  raised where the future is read
        taken[0].set_exception(error)
        del taken  # breaks a cycle: the error holds this frame
    else:
        taken[0].set_result(result)


def _taken(work: list[T]) -> T | None:
    with suppress(IndexError):  # another thread was faster
        return work.pop()
    return None


async def wait_for_thread(future: Future[T]) -> None:
    """Waits for a thread's work; cancelling the wait does not cancel the work."""
    loop = asyncio.get_running_loop()
    woken = loop.create_future()

    def wake() -> None:
        if not woken.done():
            woken.set_result(None)

    def tell(_: object) -> None:
        with suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits any more
            loop.call_soon_threadsafe(wake)

    future.add_done_callback(tell)
    await woken


def _pool(name: str) -> ThreadPoolExecutor:
    """Returns this process's threads of that name: they do not survive a fork."""
    key = this_process(), name
    size = None if name == _ENGINE else THREADS  # the executor's own number: engines compute
    return _POOLS.get(key) or _POOLS.setdefault(key, ThreadPoolExecutor(size, thread_name_prefix=name))


class Effect(Protocol):
    """One effect, with a blocking and an awaitable way to run it."""

    def run(self) -> Any:
        """Runs, blocking."""

    async def arun(self) -> Any:
        """Runs, awaiting."""


EffectGenerator: TypeAlias = Generator[Effect, Any, T]


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Call:
    """Calls a function, or awaits its asynchronous twin."""

    call: Callable[[], Any]
    acall: Callable[[], Awaitable[Any]]

    def run(self) -> Any:
        """Answers, blocking."""
        return self.call()

    async def arun(self) -> Any:
        """Answers, awaiting."""
        return await self.acall()


class Blocking(Call):
    """Calls a function that blocks; awaited, it runs in a thread, to its end also if the task is cancelled."""

    __slots__ = ()

    def __init__(self, action: Callable[[], Any]) -> None:
        super().__init__(action, partial(run_in_thread, action))


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Walk:
    """Runs an effect generator, which `begin` makes, to its end."""

    begin: Callable[[], EffectGenerator[Any]]

    def run(self) -> Any:
        """Runs, blocking."""
        return run_sync(self.begin())

    async def arun(self) -> Any:
        """Runs, awaiting."""
        return await run_async(self.begin())


async def arun_guarded(action: Callable[[], Awaitable[T]]) -> T | None:
    """Async twin of `run_guarded`; a cancellation stops only if this task was cancelled, else the row fails."""
    stop: type[BaseException] | None = None
    try:
        return await action()
    except KeyboardInterrupt:
        stop = KeyboardInterrupt
    except asyncio.CancelledError:
        task = asyncio.current_task()
        stop = asyncio.CancelledError if task is not None and task.cancelling() else None
    except BaseException:  # noqa: BLE001  see `run_guarded`
        stop = None
    if stop is not None:
        raise stop
    return None


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Guarded:
    """Runs a private effect generator below `run_guarded`: None where it raised, and a stop without its frames."""

    begin: Callable[[], EffectGenerator[Any]]

    def run(self) -> Any:
        """Runs, blocking."""
        return run_guarded(lambda: run_sync(self.begin()))

    async def arun(self) -> Any:
        """Runs, awaiting."""
        return await arun_guarded(lambda: run_async(self.begin()))


@dataclass(frozen=True, slots=True)
class TopTokenRequest:
    """Requests the likeliest tokens after a PUBLIC prompt; raises ModelCallError if the model fails."""

    backend: NextTokenBackend = field(repr=False)
    prompt: str
    prefix: Sequence[Token]
    top_k: int

    def run(self) -> list[tuple[Token, float]]:
        """Runs, blocking."""
        return public_call(lambda: self.backend.top_tokens(self.prompt, self.prefix, top_k=self.top_k))

    async def arun(self) -> list[tuple[Token, float]]:
        """Runs, awaiting."""
        return await apublic_call(lambda: self.backend.atop_tokens(self.prompt, self.prefix, top_k=self.top_k))


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class LimitConcurrency:
    """Runs an effect with at most `limit` calls in flight; None: as many as the engine makes."""

    ask: Effect
    limit: int | None

    def run(self) -> Any:
        """Runs, blocking."""
        with limit_concurrency(self.limit):
            return self.ask.run()

    async def arun(self) -> Any:
        """Runs, awaiting."""
        with limit_concurrency(self.limit):
            return await self.ask.arun()


@dataclass(slots=True)
class AcquireGate:
    """Waits until no other caller computes the same; returns whether the gate is held from then on."""

    gate: FairSemaphore

    def run(self) -> bool:
        """Waits, blocking; does not wait below a running event loop, which may have to run first."""
        if is_in_loop():
            return self.gate.enter_at_once()
        self.gate.__enter__()
        return True

    async def arun(self) -> bool:
        """Waits, awaiting."""
        await self.gate.__aenter__()
        return True


def public_failure(kind: str) -> ModelCallError:
    """Returns the error of a failed public call; the caller raises it outside of the `except` block.

    It names only the type of the cause, whose text and frames may show the load of private calls.
    """
    return ModelCallError(f"the public model call failed with {kind}. Check the model and call again.")


def bare(error: DPICLError) -> DPICLError:
    """Returns a public error without the frames and causes that it came through, which may be private."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def _failure_of(error: Exception) -> ModelCallError:
    return public_failure(type(error).__name__)


def public_call(action: Callable[[], T], failure: Callable[[Exception], ModelCallError] = _failure_of) -> T:
    """Returns the result of a public call of foreign code; an error that is not ours becomes a `failure`."""
    try:
        return action()
    except DPICLError:
        raise
    except Exception as error:  # noqa: BLE001  foreign code may raise anything
        failed = failure(error)
    raise failed  # outside the handler, so that the foreign error is not its context


async def apublic_call(
    action: Callable[[], Awaitable[T]], failure: Callable[[Exception], ModelCallError] = _failure_of
) -> T:
    """Async twin of `public_call`."""
    try:
        return await action()
    except DPICLError:
        raise
    except Exception as error:  # noqa: BLE001  foreign code may raise anything
        failed = failure(error)
    raise failed


def run_sync(walk: EffectGenerator[T]) -> T:
    """Runs an effect generator to its end, blocking."""
    answer: Any = None
    failure: BaseException | None = None
    while True:
        try:
            ask = walk.send(answer) if failure is None else walk.throw(failure)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        finally:
            answer = failure = None  # breaks a cycle: the frames of an error hold this one
        try:
            answer = ask.run()
        except BaseException as error:  # noqa: BLE001  the generator closes what it opened first
            failure = error


async def run_async(walk: EffectGenerator[T], *, is_slow: bool = False) -> T:
    """Runs an effect generator to its end, awaiting; a cancellation is thrown into it like any other error.

    Args:
      walk: the computation.
      is_slow: whether its own steps, between the effects, may block (for a ledger on a disk). They then run in
        threads, one after the other, and a cancellation is thrown in after the step.
    """
    if is_slow:
        return await _run_async_in_threads(walk)
    answer: Any = None
    failure: BaseException | None = None
    while True:
        try:
            ask = walk.send(answer) if failure is None else walk.throw(failure)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        finally:
            answer = failure = None  # see `run_sync`
        try:
            answer = await ask.arun()
        except BaseException as error:  # noqa: BLE001  see `run_sync`
            failure = error


async def _run_async_in_threads(walk: EffectGenerator[T]) -> T:
    """Does what `run_async` does, with the generator's own steps in threads."""
    answer: Any = None
    failure: BaseException | None = None
    has_begun = False
    while True:
        step = _NextEffect(walk, answer, failure)
        answer = failure = None
        # An answer is always delivered: it may be a place at a gate, which the generator then has to leave.
        ended, stop = await run_to_completion(step, is_optional=not has_begun, if_left=walk.close)
        has_begun = True
        if stop is not None and not step.is_over:
            failure = stop
            continue
        try:
            if stop is not None:
                raise stop
            ask = ended()
        finally:
            del ended, stop  # see `run_in_thread`
        if ask is None:
            result: T = step.result
            return result
        try:
            answer, failure = await ask.arun(), None
        except GeneratorExit:  # nothing can be awaited any more, the walk's own end included
            run_unawaited(walk.close)
            raise
        except BaseException as error:  # noqa: BLE001  see `run_sync`
            failure = error


class _NextEffect:
    """One step of an effect generator; returns the next effect, None at the end."""

    def __init__(self, walk: EffectGenerator[Any], answer: Any, failure: BaseException | None) -> None:
        self.result: Any = None
        self.is_over = False
        self._walk = walk
        self._answer = answer
        self._failure = failure

    def __call__(self) -> Effect | None:
        answer, self._answer = self._answer, None  # may hold boxed private rows, which must not be kept
        failure, self._failure = self._failure, None
        self.is_over = True
        try:
            ask = self._walk.send(answer) if failure is None else self._walk.throw(failure)
        except StopIteration as end:
            self.result = end.value
            return None
        finally:
            del answer, failure  # see `run_sync`
        self.is_over = False
        return ask


LEAST_BESIDE = 8
"""Calls in flight from which a public one goes beside private ones: it takes a place of theirs."""


class AwaitedInThreads:
    """Async twins of an engine that computes on this machine: each runs the blocking method in a worker thread."""

    async def atop_tokens(self: Any, prompt: str, prefix: Sequence[Token], *, top_k: int) -> list[tuple[Token, float]]:
        """Is `top_tokens`, in a worker thread."""
        return await run_engine(partial(self.top_tokens, prompt, prefix, top_k=top_k))

    async def ascore_choices(self: Any, prompts: Sequence[str], choices: Sequence[str]) -> Rows:
        """Is `score_choices`, in a worker thread."""
        return await run_engine(partial(self.score_choices, prompts, choices))

    async def acomplete(
        self: Any, prompts: Sequence[str], *, max_tokens: int, stop: Sequence[str] = (), **options: Any
    ) -> list[str]:
        """Is `complete`, which takes the options, in a worker thread."""
        complete = partial(self.complete, prompts, max_tokens=max_tokens, stop=stop, **options)
        return await run_engine(complete)


def calls_at_once(engine: object) -> int:
    """Returns how many calls of a model elsewhere an engine has in flight at once; 1 where it does not say."""
    found = getattr(engine, "calls_at_once", 1)
    return found if type(found) is int else 1


def is_in_loop() -> bool:
    """Whether an event loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def start_thread(action: Callable[[], object], *, name: str) -> threading.Thread | None:
    """Starts a thread with a copy of the caller's context; returns None where the system has no room for it."""
    thread = threading.Thread(target=contextvars.copy_context().run, args=(action,), name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


def run_elsewhere(action: Callable[[], T], *, name: str) -> T:
    """Returns what an action returns in another thread; runs it here where the system has no room for one."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(action())
        except BaseException as error:  # noqa: BLE001  raised in the caller's thread
            outcome.set_exception(error)

    if start_thread(run, name=name) is None:
        return action()
    return outcome.result()


def start_calls(engine: object) -> None:
    """Starts the threads of an engine's calls, also where there is no row to ask: whether they run would show that.

    Where the system has no room for threads, calls are made without. Inside a running event loop that raises
    ConfigurationError: a model that runs a loop of its own would fail for all rows.
    """
    start = getattr(engine, "start_calls", None)
    if start is not None:
        with nullcontext() if is_in_loop() else suppress(ConfigurationError):
            start()


def check_silent(engine: object) -> None:
    """Raises UnsilencableModelError where an engine knows that others would hear a private call made now.

    It makes no call. Ask it before a ticket burns where no public call, which would be refused too, goes first.
    """
    look: Callable[[], None] = getattr(engine, "check_silent", lambda: None)
    look()


@dataclass(slots=True)
class Outage:
    """Whether the last public call of a component failed; its public prompts go first until one succeeds."""

    is_on: bool = False

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Notes whether the public call of the block failed."""
        try:
            yield
        except Exception:
            self.is_on = True
            raise
        self.is_on = False


@dataclass(slots=True, repr=False, eq=False)
class PublicAnswer:
    """The answer to one PUBLIC question, asked once or, where that failed beside private calls, twice.

    Attributes:
      ask: returns the effect that asks.
      outage: of the component.
      value: the answer; None: there is none yet.
      stop: what ended the first try and has to end the caller, such as Ctrl-C.
    """

    ask: Callable[[], Effect]
    outage: Outage
    value: Any = field(default=None)
    stop: BaseException | None = field(default=None)

    def run(self) -> Any:
        """Asks, blocking; raises ModelCallError where the call failed."""
        with self.outage.noted():
            self.value = self.ask().run()
        return self.value

    async def arun(self) -> Any:
        """Asks, awaiting."""
        with self.outage.noted():
            self.value = await self.ask().arun()
        return self.value

    def try_once(self) -> None:
        """Asks, blocking; without an answer `value` stays None."""
        try:
            self.run()
        except Exception:  # noqa: BLE001  asked again, alone; that call raises
            self.value = None
        except BaseException as stop:  # noqa: BLE001  raised by the caller's thread, in which it means something
            self.value, self.stop = None, stop

    async def atry_once(self) -> None:
        """Async twin of `try_once`."""
        try:
            await self.arun()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            self.value = None  # the client's own, which is a failed call
        except Exception:  # noqa: BLE001  asked again, alone; that call raises
            self.value = None


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class AskBeside:
    """Computes private rows while a public question is asked; the answer is the rows alone.

    Formal guarantees:
      - Neither call ends the other: the effect answers after both have ended. A cancelled task stops both; after Ctrl-C
        the thread of the public call ends by itself.
      - A public call that failed beside the rows is made again after all private calls of this answer have ended, and
        only that one raises: whether an answer comes does not depend on how many of them are in flight. A provider's
        limit for a minute may still count them, see `docs/known-limitations.md`.
      - What is raised holds neither rows nor prompts.

    Attributes:
      rows: the effect that computes the private rows.
      public: the question.
      is_final: False: the caller asks again, when no other private call is in flight either.
    """

    rows: Effect
    public: PublicAnswer
    is_final: bool = True

    def run(self) -> OpaqueRows:
        """Runs, blocking; the public call in a thread of its own."""
        # Inside a loop, which is stopped here, a thread might wait for one of its calls.
        aside = None if is_in_loop() else start_thread(self.public.try_once, name="dpicl-public")
        if aside is None:
            self.public.try_once()
        try:
            rows: OpaqueRows = self.rows.run()
        except Exception:
            if aside is not None:
                aside.join()
            raise
        with dropped(rows):
            if aside is not None:
                aside.join()
        if self.public.stop is not None:
            with dropped(rows):
                raise self.public.stop
        if self.public.value is None and self.is_final:
            with dropped(rows):
                self.public.run()
        return rows

    async def arun(self) -> OpaqueRows:
        """Runs, awaiting."""
        aside = asyncio.ensure_future(self.public.atry_once())
        try:
            rows: OpaqueRows = await self.rows.arun()
            with dropped(rows):
                await aside
        except asyncio.CancelledError:
            await cancel_to_completion([aside])
            raise
        finally:
            aside.cancel()  # a coroutine that is closed can await nothing
        if self.public.value is None and self.is_final:
            with dropped(rows):
                await self.public.arun()
        return rows


@contextmanager
def dropped(rows: OpaqueRows) -> Iterator[None]:
    """Drops the rows where the block raises: frames of the error hold the box."""
    try:
        yield
    except BaseException:
        rows.take()
        raise
