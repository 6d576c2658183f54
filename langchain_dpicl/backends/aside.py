"""Runs blocking work in threads, always to its end, so that cancelled tasks leave nothing half-done."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from functools import partial
from types import TracebackType
from typing import Generic, TypeVar

THREADS = 32
"""Threads for such work in one process; they mostly wait."""

T = TypeVar("T")
_POOLS: dict[int, ThreadPoolExecutor] = {}
logger = logging.getLogger(__name__)


async def aside(action: Callable[[], T], *, is_slow: bool = True) -> T:
    """Runs `action` in a thread and returns what it returns.

    Formal guarantees:
      - It ends, well or not, after `action` has ended, or before it began; also when the task is cancelled.
      - A cancellation goes on whatever `action` returns or raises. The event loop never waits.

    Args:
      action: what may wait; it runs in a copy of the caller's context.
      is_slow: False: it does not block, so it runs here and now.
    """
    if not is_slow:
        return action()
    result, stop = await seen_through(action, is_optional=True)
    if stop is not None:
        raise stop
    try:
        return result()
    finally:
        del result  # breaks a cycle: it holds the error, whose frames hold it


async def seen_through(
    action: Callable[[], T], *, is_optional: bool = False, if_left: Callable[[], object] | None = None
) -> tuple[Callable[[], T], asyncio.CancelledError | None]:
    """Runs `action` in a thread to its end; returns a function that gives its outcome, and a cancellation that came.

    Args:
      action: what may wait.
      is_optional: whether a cancellation withdraws work that has not begun; then the outcome is that cancellation.
      if_left: run in a thread after `action` has ended well, where the coroutine that awaits it was closed meanwhile.
    """
    future = _pool().submit(contextvars.copy_context().run, action)
    stop: asyncio.CancelledError | None = None
    has_ended = False
    while not has_ended:  # once at least, so that others have their turn
        try:
            await _ended(future)
            has_ended = True
        except asyncio.CancelledError as error:
            stop = error
            if is_optional and future.cancel():
                return future.result, stop
            has_ended = future.done()
        except GeneratorExit:
            if if_left is not None:
                future.add_done_callback(partial(_left, if_left))
            raise
    if stop is not None:
        stop.__cause__ = future.exception()
    return future.result, stop


def leave(action: Callable[[], object]) -> None:
    """Runs `action` in a thread that nothing awaits: for clean-up where awaiting is no longer possible."""

    def run() -> None:
        try:
            action()
        except BaseException as error:  # noqa: BLE001  nothing could catch it
            logger.warning("an abandoned run could not be cleaned up: %s", type(error).__name__)

    try:
        _pool().submit(run)
    except RuntimeError:  # the interpreter is going down, and starts no thread any more
        run()


class Aside(Generic[T]):
    """Enters and leaves a context manager in threads: `async with Aside(tickets) as entered:`.

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
        result, stop = await seen_through(
            manager.__enter__, if_left=lambda: manager.__exit__(GeneratorExit, GeneratorExit(), None)
        )
        entered = result()
        if stop is not None:
            await self.__aexit__(type(stop), stop, stop.__traceback__)
            raise stop
        return entered

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        manager = self._manager
        if not self._is_slow:
            return manager.__exit__(kind, error, trace)
        if kind is not None and issubclass(kind, GeneratorExit) and not self.is_at_yield:
            leave(lambda: manager.__exit__(kind, error, trace))
            return False
        result, stop = await seen_through(lambda: manager.__exit__(kind, error, trace))
        if stop is not None:
            raise stop
        return result()


def _left(then: Callable[[], object], ended: Future[T]) -> None:
    if ended.exception() is None:
        leave(then)


async def _ended(future: Future[T]) -> None:
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


def _pool() -> ThreadPoolExecutor:
    """Returns this process's threads: they do not survive a fork."""
    here = os.getpid()
    return _POOLS.get(here) or _POOLS.setdefault(here, ThreadPoolExecutor(THREADS, thread_name_prefix="dpicl-aside"))


__all__ = ["Aside", "aside", "leave", "seen_through"]
