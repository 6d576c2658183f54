"""Stores for tests that say they are durable: slow, watched, failing, gone back in time; and tasks cancelled at will."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from typing import Any

import pytest

from langchain_dpicl.exceptions import LedgerRollbackError, LedgerUnavailableError
from langchain_dpicl.privacy.extensions.durable_writer import write_all_waiting
from langchain_dpicl.privacy.ledger.store import InMemoryStore, LedgerHeader, LedgerRecord


def is_on_loop() -> bool:
    """Whether this thread runs an event loop just now."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@contextlib.contextmanager
def no_room() -> Iterator[None]:
    """A system without room for one more thread of ours, or of an event loop."""
    start = threading.Thread.start

    def none(thread: threading.Thread) -> None:
        if thread.name.startswith(("dpicl-aside", "dpicl-building", "dpicl-engine", "asyncio")):
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", none)
        yield


class WatchedStore(InMemoryStore):
    """Says that it is durable, takes its time, and remembers what was asked of it on an event loop.

    Attributes:
      on_loop: names of what was called on a running event loop.
      calls: how often each thing was called.
      delay: seconds that a transaction takes.
      at_commit: called with the lines of a transaction when it ends well, before they stand.
      after_commit: called when they stand; what it raises is an answer that was lost.
      at_read: called before anything is read outside of a transaction.
    """

    durable = True
    description = "a disk of paper"

    def __init__(self, delay: float = 0.0) -> None:
        super().__init__()
        self.delay = delay
        self.on_loop: list[str] = []
        self.calls: dict[str, int] = {}
        self.open = 0
        self.at_commit: Callable[[list[str]], object] = lambda kinds: None
        self.after_commit: Callable[[list[str]], object] = lambda kinds: None
        self.at_read: Callable[[], object] = lambda: None

    def _seen(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        if is_on_loop():
            self.on_loop.append(name)

    def create(self, header: LedgerHeader) -> LedgerHeader:
        self._seen("create")
        return super().create(header)

    def header(self) -> LedgerHeader | None:
        self._seen("header")
        return super().header()

    def records(self, after: int = 0, *, limit: int | None = None) -> Sequence[LedgerRecord]:
        self._seen("records")
        self.at_read()
        return super().records(after, limit=limit)

    def head(self) -> tuple[int, str]:
        self._seen("head")
        self.at_read()
        return super().head()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Any]:
        self._seen("transaction")
        kinds: list[str] = []
        with super().transaction() as view:
            self.open += 1
            try:
                before = len(self._lines)
                time.sleep(self.delay)
                yield view
                kinds = [line.kind for line in self._lines[before:]]
                if kinds:
                    self.at_commit(kinds)
            finally:
                self.open -= 1
        if kinds:
            self.after_commit(kinds)

    def snapshot(self) -> list[Any]:
        """What a backup would hold."""
        return list(self._lines)

    def restore(self, lines: list[Any]) -> None:
        """Puts a backup in the ledger's place."""
        self._lines[:] = lines

    def clone(self) -> WatchedStore:
        """Another host's copy of the same file."""
        other = WatchedStore(self.delay)
        other._header, other._lines = self._header, list(self._lines)
        return other


class EarlyStore(WatchedStore):
    """Gives its lock up when lines are visible, and has them on its disk after `flush`, as a database server does.

    Attributes:
      on_disk: how many lines a restart of the server keeps.
      at_flush: called before a flush puts the lines that are visible by then on the disk.
    """

    description = "a server with a disk"

    def __init__(self, delay: float = 0.0) -> None:
        super().__init__(delay)
        self.on_disk = 0
        self.at_flush: Callable[[], object] = lambda: None

    @contextlib.contextmanager
    def transaction(self, *, flush: bool = True) -> Iterator[Any]:
        with super().transaction() as view:
            yield view
        if flush:
            self.flush(*self.head())

    def flush(self, seq: int, head: str) -> None:
        self._seen("flush")
        self.at_flush()
        with self._lock:
            if seq and (seq > len(self._lines) or self._lines[seq - 1].hash != head):
                raise LedgerUnavailableError("the line is gone")
            self.on_disk = len(self._lines)

    def restart(self) -> None:
        """Loses what was visible only."""
        with self._lock:
            del self._lines[self.on_disk :]


def on(kind: str, error: BaseException, *, times: int = 1) -> Callable[[list[str]], None]:
    """Raises at transactions that write a line of a kind, so many times."""
    left = [times]

    def step(kinds: list[str]) -> None:
        if kind in kinds and left[0] > 0:
            left[0] -= 1
            raise error

    return step


class DictAnchor:
    """An anchor in this process that logs the lines it takes; `faults` are raised by what they name: read or write."""

    description = "a stone in the garden"

    def __init__(self) -> None:
        self.known: dict[str, tuple[int, str]] = {}
        self.faults: dict[str, BaseException] = {}
        self.log: list[tuple[str, int]] = []

    def read(self, ledger_id: str) -> tuple[int, str] | None:
        if "read" in self.faults:
            raise self.faults["read"]
        return self.known.get(ledger_id)

    def write(self, ledger_id: str, seq: int, head: str) -> None:
        if "write" in self.faults:
            raise self.faults["write"]
        known = self.known.get(ledger_id, (-1, ""))
        if known[0] == seq and known[1] != head:
            raise LedgerRollbackError("two lines of one number")
        if known[0] < seq:
            self.known[ledger_id] = (seq, head)
            self.log.append((ledger_id, seq))


UNAVAILABLE = LedgerUnavailableError("the disk is full")


class _Cancelled:
    """Awaits a coroutine and cancels its task when it waits for the `place`-th time."""

    def __init__(self, work: Coroutine[Any, Any, Any], place: int, *, times: int) -> None:
        self.work, self.place, self.times = work, place, times
        self.waits = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        inner = self.work.__await__()
        task = asyncio.current_task()
        assert task is not None
        step: Callable[[], Any] = lambda: inner.send(None)  # noqa: E731
        while True:
            try:
                waits_for = step()
            except StopIteration as end:
                return end.value
            if self.place <= self.waits < self.place + self.times:
                asyncio.get_running_loop().call_soon(task.cancel)
            self.waits += 1
            try:
                yield waits_for
            except BaseException as error:
                step = lambda error=error: inner.throw(error)  # noqa: E731
            else:
                step = lambda: inner.send(None)  # noqa: E731


def cancelled_at(
    make: Callable[[], Coroutine[Any, Any, Any]], place: int, *, times: int = 1
) -> tuple[Any, int, BaseException | None]:
    """Runs a coroutine, cancelling its task at its `place`-th wait; returns its answer, its waits and its error."""

    async def run() -> tuple[Any, int, BaseException | None]:
        waiting = _Cancelled(make(), place, times=times)

        async def inner() -> Any:
            return await waiting

        task = asyncio.create_task(inner())
        try:
            return await task, waiting.waits, None
        except BaseException as error:
            return None, waiting.waits, error

    return asyncio.run(run())


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Waits until something holds, or gives up without a word: the test looks itself."""
    for _ in range(int(seconds / 0.002)):
        if condition():
            return
        await asyncio.sleep(0.002)


class Halfway:
    """Runs a coroutine by hand until a condition holds, and leaves it where it waits; awaited by a task."""

    def __init__(self, work: Coroutine[Any, Any, Any], until: Callable[[], bool]) -> None:
        self.work, self.until = work, until

    def __await__(self) -> Generator[None, None, None]:
        waits_for = self.work.send(None)
        while not self.until():
            if waits_for is None or waits_for.done():
                waits_for = self.work.send(None)
            if waits_for is not None:
                waits_for._asyncio_future_blocking = False
            yield


async def halfway(work: Coroutine[Any, Any, Any], until: Callable[[], bool]) -> None:
    """Awaits a `Halfway`: what it yields then goes to the loop."""
    await Halfway(work, until)


def spent(store: InMemoryStore) -> Mapping[str, int]:
    """Tickets by what became of them, as the lines alone tell."""
    out = {"reserve": 0, "commit": 0, "give_back": 0}
    write_all_waiting()
    for line in store.records():
        if line.kind in out:
            out[line.kind] += line.body["count"]
    return out
