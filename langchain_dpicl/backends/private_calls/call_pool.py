"""Runs the calls of one engine on a public number of threads or tasks."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

from langchain_dpicl.backends.private_calls.call import (
    TASK_NAME,
    ProbePolicy,
    Reply,
    Request,
    RetryPolicy,
    SilentModel,
)
from langchain_dpicl.backends.sync_async import CallLimit, FairSemaphore, call_limit, call_stop, concurrency_limit
from langchain_dpicl.exceptions import ConfigurationError, ModelCallError

DEFAULT_CONCURRENCY = 32
"""Calls in flight at once when neither the engine's `max_concurrency` nor that of the run is given."""


_Gates: TypeAlias = tuple[AbstractContextManager[None], FairSemaphore]
"""The gate of the block that limits calls, and the engine's own."""


class CallPool:
    """Runs the calls of one engine, at most `limit` at a time over all its sessions; threads stay for reuse.

    Threads and event loops share the limit, except that blocking calls from a thread with a running event loop have
    a limit of their own: they stop that loop, so waiting for its awaited calls would never end.
    """

    def __init__(
        self, model: SilentModel, retry: RetryPolicy, max_concurrency: int | None, *, crew: Crew | None = None
    ) -> None:
        self._model = model
        self._crew = crew  # threads that others use too; None: threads of its own
        self._retry = retry
        self._given = None if max_concurrency is None else check_whole("max_concurrency", max_concurrency)
        self._processes: dict[tuple[int, int], _Process] = {}

    @property
    def limit(self) -> int:
        """Calls in flight at once: those of a block that allows more where the engine was given no number."""
        if self._given is not None:
            return self._given
        return max(DEFAULT_CONCURRENCY, concurrency_limit() or 0)

    @property
    def model(self) -> SilentModel:
        """The silent model that is called."""
        return self._model

    def start(self) -> None:
        """Starts the threads that it shares with others, so that a process without room for them fails here."""
        here = self._here()
        here.threads(inside_a_loop=self._gates(None)[1] is not here.gate)

    def one(self, request: Request) -> Reply:
        """Makes one call, with the retries of the engine's policy."""
        return self._through(self._gates(call_limit()), request, call_stop())

    def probe(self, request: Request) -> Reply:
        """Makes one public call, with the few retries of a probe."""
        return self._model.ask(request, retry=ProbePolicy.of(self._retry))

    async def aprobe(self, request: Request) -> Reply:
        """Async twin of `probe`."""
        return await self._model.aask(request, retry=ProbePolicy.of(self._retry))

    async def aone(self, request: Request) -> Reply:
        """Async twin of `one`."""
        limit = call_limit()
        if limit is None:
            return await self._athrough(request)
        async with limit.gate:
            return await self._athrough(request)

    def many(self, requests: Sequence[Request]) -> list[Reply]:
        """Makes independent calls; replies come in the order of the requests.

        With a limit of 1 calls run in this thread, unless an event loop runs in it: a model that runs a loop of its own
        works only in another thread then. Only the public limit decides this, never the number of requests, which
        may be private.
        """
        allowed, stop = call_limit(), call_stop()
        gates = self._gates(allowed)
        limit = self.limit if allowed is None else min(self.limit, allowed.most)
        if limit == 1 and gates[1] is self._here().gate:
            return [self._through(gates, request, stop) for request in requests]
        replies: dict[int, Reply] = {}
        waiting = deque(enumerate(requests))

        def work() -> None:
            while waiting:
                try:
                    place, request = waiting.popleft()
                except IndexError:  # another thread was faster
                    return
                replies[place] = self._through(gates, request, stop)

        here = self._here()
        threads = here.threads(inside_a_loop=gates[1] is not here.gate)
        futures = [threads.submit(work) for _ in range(min(limit, len(waiting)))]
        try:
            for future in futures:
                future.result()
        finally:
            waiting.clear()
            for future in futures:
                future.cancel()
        return [replies[place] for place in range(len(requests))]

    async def amany(self, requests: Sequence[Request]) -> list[Reply]:
        """Async twin of `many`: no more tasks than calls are allowed at once, as others can count tasks."""
        allowed = call_limit()
        limit = self.limit if allowed is None else min(self.limit, allowed.most)
        replies: dict[int, Reply] = {}
        waiting = deque(enumerate(requests))

        async def work() -> None:
            while waiting:
                place, request = waiting.popleft()
                replies[place] = await self.aone(request)

        try:
            await asyncio.gather(*(_task(work()) for _ in range(min(limit, len(waiting)))))
        finally:
            waiting.clear()
        return [replies[place] for place in range(len(requests))]

    def _through(self, gates: _Gates, request: Request, stop: threading.Event | None) -> Reply:
        outer, inner = gates
        with outer, inner:
            if stop is not None and stop.is_set():
                raise ModelCallError("the run was stopped before this call. Call it again.")
            return self._model.ask(request, retry=self._retry)

    async def _athrough(self, request: Request) -> Reply:
        async with self._here().gate:
            return await self._model.aask(request, retry=self._retry)

    def _gates(self, limit: CallLimit | None) -> _Gates:
        """Returns what a blocking call goes through; inside a running loop nothing that its awaited calls may hold."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return (nullcontext() if limit is None else limit.gate), self._here().gate
        return nullcontext(), self._here().gate_inside_a_loop

    def _here(self) -> _Process:
        """Returns the threads and gates of this process, for so many calls at once: neither survive a fork."""
        key = os.getpid(), self.limit
        return self._processes.get(key) or self._processes.setdefault(key, _Process(self.limit, self._crew))


def _task(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Returns a task of a constant name: asyncio numbers those without one, and later names would show their number."""
    return asyncio.get_running_loop().create_task(work, name=TASK_NAME)


class Crew:
    """Threads that several call pools share; all of them start at once, so their number tells no number of calls.

    Args:
      size: how many; where more calls are allowed at once, twice as many, or four times, and so on.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._pools: dict[tuple[int, int, bool], ThreadPoolExecutor] = {}
        self._gates: dict[int, threading.Lock] = {}

    def here(self, limit: int = 1, *, inside_a_loop: bool = False) -> ThreadPoolExecutor:
        """Returns the threads of this process: neither they nor a lock that is held survive a fork.

        Args:
          limit: calls at once, public; at least so many threads.
          inside_a_loop: those for a blocking call that stops a running loop, which others do not wait in.

        Raises:
          ConfigurationError: the system starts no more threads.
        """
        number, size = os.getpid(), self._size
        while size < limit:
            size *= 2
        with self._gates.setdefault(number, threading.Lock()):
            if (pool := self._pools.get((number, size, inside_a_loop))) is None:
                pool = ThreadPoolExecutor(size, thread_name_prefix="dpicl-in-loop" if inside_a_loop else "dpicl")
                _start_all(pool, size)
                # Only now: work of another caller would take the place of a start.
                self._pools[number, size, inside_a_loop] = pool
        return pool


def _start_all(pool: ThreadPoolExecutor, size: int) -> None:
    """Starts every thread of a pool: a pool starts one only where all others are at work, so each waits for all."""
    all_here = threading.Barrier(size)
    try:
        for _ in range(size):
            pool.submit(all_here.wait)
    except RuntimeError:  # no more threads: those that wait go on, and end
        all_here.abort()
        pool.shutdown(wait=False, cancel_futures=True)
        advice = "Raise the limit of threads of this user or container, or end other work in this process."
        raise ConfigurationError(
            f"threads: expected to start {size}, found that the system allows fewer. {advice}"
        ) from None


class _Process:
    """The threads and gates of one process."""

    def __init__(self, limit: int, crew: Crew | None) -> None:
        self.gate = FairSemaphore(limit)
        self.gate_inside_a_loop = FairSemaphore(limit)
        self._crew, self._limit = crew, limit
        # None of these starts before its first work. Threads of the first may wait for awaited calls of the loop that a
        # blocking call stops, so a call inside a loop takes the second.
        self._own = (
            ThreadPoolExecutor(limit, thread_name_prefix="dpicl"),
            ThreadPoolExecutor(limit, thread_name_prefix="dpicl-in-loop"),
        )

    def threads(self, *, inside_a_loop: bool) -> ThreadPoolExecutor:
        """Returns the threads for blocking calls."""
        if self._crew is None:
            return self._own[inside_a_loop]
        return self._crew.here(self._limit, inside_a_loop=inside_a_loop)


def check_whole(name: str, value: object) -> int:
    """Returns a whole number >= 1, or raises ConfigurationError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"expected {name} as a whole number >= 1, found {value!r}")
    return value
