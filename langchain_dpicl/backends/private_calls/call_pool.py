"""Runs the calls of one engine on a public number of threads or tasks."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from langchain_dpicl.backends.private_calls.call import (
    TASK_NAME,
    ProbePolicy,
    Reply,
    Request,
    RetryPolicy,
    SilentModel,
)
from langchain_dpicl.backends.sync_async import FairSemaphore, concurrency_limit
from langchain_dpicl.exceptions import ConfigurationError

DEFAULT_CONCURRENCY = 32
"""Calls in flight at once when `max_concurrency` is not given."""


class CallPool:
    """Runs the calls of one engine, at most `limit` at a time over all its sessions; threads stay for reuse.

    Threads and event loops share the limit, except that blocking calls from a thread with a running event loop have
    a limit of their own: they stop that loop, so waiting for its awaited calls would never end.
    """

    def __init__(self, model: SilentModel, retry: RetryPolicy, limit: int, *, crew: Crew | None = None) -> None:
        self._model = model
        self._crew = crew  # threads that others use too; None: threads of its own
        self._retry = retry
        self._limit = limit
        self._processes: dict[int, _Process] = {}

    @property
    def limit(self) -> int:
        """Calls in flight at once."""
        return self._limit

    @property
    def model(self) -> SilentModel:
        """The silent model that is called."""
        return self._model

    def start(self) -> None:
        """Starts the threads that it shares with others, so that a process without room for them fails here."""
        self._here()

    def one(self, request: Request) -> Reply:
        """Makes one call, with the retries of the engine's policy."""
        return self._through(self._blocking_gate(), request)

    def probe(self, request: Request) -> Reply:
        """Makes one public call, with the few retries of a probe."""
        return self._model.ask(request, retry=ProbePolicy.of(self._retry))

    async def aone(self, request: Request) -> Reply:
        """Async twin of `one`."""
        async with self._here().gate:
            return await self._model.aask(request, retry=self._retry)

    def many(self, requests: Sequence[Request]) -> list[Reply]:
        """Makes independent calls; replies come in the order of the requests.

        With a limit of 1 calls run in this thread, unless an event loop runs in it: a model that runs a loop of its own
        works only in another thread then. Only the public limit decides this, never the number of requests, which
        may be private.
        """
        gate, limit = self._blocking_gate(), min(self._limit, concurrency_limit() or self._limit)
        if limit == 1 and gate is self._here().gate:
            return [self._through(gate, request) for request in requests]
        replies: dict[int, Reply] = {}
        waiting = deque(enumerate(requests))

        def work() -> None:
            while waiting:
                try:
                    place, request = waiting.popleft()
                except IndexError:  # another thread was faster
                    return
                replies[place] = self._through(gate, request)

        futures = [self._here().threads.submit(work) for _ in range(min(limit, len(waiting)))]
        try:
            for future in futures:
                future.result()
        finally:
            waiting.clear()
            for future in futures:
                future.cancel()
        return [replies[place] for place in range(len(requests))]

    async def amany(self, requests: Sequence[Request]) -> list[Reply]:
        """Async twin of `many`."""
        limit = concurrency_limit()
        if limit is None:
            return list(await asyncio.gather(*map(_task, map(self.aone, requests))))
        own = FairSemaphore(limit)

        async def one(request: Request) -> Reply:
            async with own:
                return await self.aone(request)

        return list(await asyncio.gather(*(_task(one(request)) for request in requests)))

    def _through(self, gate: FairSemaphore, request: Request) -> Reply:
        with gate:
            return self._model.ask(request, retry=self._retry)

    def _blocking_gate(self) -> FairSemaphore:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._here().gate
        return self._here().gate_inside_a_loop

    def _here(self) -> _Process:
        """Returns the threads and gates of this process: neither survive a fork."""
        number = os.getpid()
        if (here := self._processes.get(number)) is None:
            own = (
                ThreadPoolExecutor(self._limit, thread_name_prefix="dpicl") if self._crew is None else self._crew.here()
            )
            here = self._processes.setdefault(number, _Process(self._limit, own))
        return here


def _task(call: Coroutine[Any, Any, Reply]) -> asyncio.Task[Reply]:
    """Returns a task of a constant name: asyncio numbers those without one, and later names would show their number."""
    return asyncio.get_running_loop().create_task(call, name=TASK_NAME)


class Crew:
    """Threads that several call pools share; all of them start at once, so their number tells no number of calls.

    Args:
      size: how many.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._pools: dict[int, ThreadPoolExecutor] = {}
        self._gates: dict[int, threading.Lock] = {}

    def here(self) -> ThreadPoolExecutor:
        """Returns the threads of this process: neither they nor a lock that is held survive a fork.

        Raises:
          ConfigurationError: the system starts no more threads.
        """
        number = os.getpid()
        with self._gates.setdefault(number, threading.Lock()):
            if (pool := self._pools.get(number)) is None:
                pool = ThreadPoolExecutor(self._size, thread_name_prefix="dpicl")
                _start_all(pool, self._size)
                self._pools[number] = pool  # only now: work of another caller would take the place of a start
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
        raise ConfigurationError(f"threads: expected to start {size}, found that no more start. {advice}") from None


class _Process:
    """The threads and gates of one process."""

    def __init__(self, limit: int, threads: ThreadPoolExecutor) -> None:
        self.gate = FairSemaphore(limit)
        self.gate_inside_a_loop = FairSemaphore(limit)
        self.threads = threads


def check_whole(name: str, value: object) -> int:
    """Returns a whole number >= 1, or raises ConfigurationError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"expected {name} as a whole number >= 1, found {value!r}")
    return value


def limit_of(max_concurrency: int | None) -> int:
    """Returns how many calls may be in flight at once."""
    return DEFAULT_CONCURRENCY if max_concurrency is None else check_whole("max_concurrency", max_concurrency)
