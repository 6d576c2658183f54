"""Runs the calls of one engine, some at a time, sync and async. Knows requests and replies, but not what is asked."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakKeyDictionary

from langchain_dpicl.backends.silent import ProbePolicy, Reply, Request, RetryPolicy, SilentModel
from langchain_dpicl.exceptions import ConfigurationError

DEFAULT_CONCURRENCY = 32
"""Calls in flight at once when `max_concurrency` is not given."""


class Calls:
    """Runs the calls of one engine, at most `limit` at a time over all its sessions; threads stay for reuse."""

    def __init__(self, model: SilentModel, retry: RetryPolicy, limit: int) -> None:
        self._model = model
        self._retry = retry
        self._limit = limit
        self._threads: tuple[int, ThreadPoolExecutor] | None = None
        self._gates: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    @property
    def model(self) -> SilentModel:
        """The silent model that is called."""
        return self._model

    def one(self, request: Request) -> Reply:
        """Makes one call and waits out what is worth waiting for."""
        return self._model.ask(request, retry=self._retry)

    def probe(self, request: Request) -> Reply:
        """Makes one public call with a probe's short patience."""
        return self._model.ask(request, retry=ProbePolicy.of(self._retry))

    async def aone(self, request: Request) -> Reply:
        """Is `one`, awaitable."""
        gate = self._gates.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._limit))
        async with gate:
            return await self._model.aask(request, retry=self._retry)

    def many(self, requests: Sequence[Request]) -> list[Reply]:
        """Makes independent calls; replies come in the order of the requests."""
        if self._threads is None or self._threads[0] != os.getpid():  # threads do not survive a fork
            self._threads = (os.getpid(), ThreadPoolExecutor(self._limit, thread_name_prefix="dpicl"))
        futures = [self._threads[1].submit(self.one, request) for request in requests]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    async def amany(self, requests: Sequence[Request]) -> list[Reply]:
        """Is `many`, awaitable."""
        return list(await asyncio.gather(*(self.aone(request) for request in requests)))


def whole(name: str, value: object) -> int:
    """Returns a whole number >= 1, or raises ConfigurationError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"expected {name} as a whole number >= 1, found {value!r}")
    return value


def limit_of(max_concurrency: int | None) -> int:
    """Returns how many calls may be in flight at once."""
    return DEFAULT_CONCURRENCY if max_concurrency is None else whole("max_concurrency", max_concurrency)
