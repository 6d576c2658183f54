"""Threads that take turns: one runs until it pauses, and a random choice says who goes on."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace, TracebackType
from typing import Any, Self

from langchain_dpicl.privacy.extensions import durable_writer, ledger_anchor
from langchain_dpicl.privacy.ledger import shares, writer
from tests.faults.counts import Violation

_LONGEST = 120.0
"""Seconds after which a thread that does not pause counts as stuck."""


def _closed_gate() -> Any:
    """Returns what one thread waits at until another one releases it; a plain lock switches fastest."""
    gate = threading.Lock()
    gate.acquire()
    return gate


class Ended(BaseException):
    """Raised in a thread whose process was killed."""


class Actor:
    """A thread that runs only while it has the turn."""

    def __init__(self, turns: Turns, work: Callable[[], object]) -> None:
        self._turns = turns
        self._work = work
        self._go = _closed_gate()
        self.waits_for: Lock | None = None
        self.is_ended = False
        self.is_killed = False
        self.fault: BaseException | None = None
        self._is_stuck = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._wait()
        try:
            if not self.is_killed:
                self._work()
        except Ended:
            pass
        except BaseException as error:
            self.fault = error
        self.is_ended = True
        if not self._is_stuck:
            self._turns.back.release()

    def _wait(self) -> None:
        if not self._go.acquire(timeout=_LONGEST):
            raise Ended

    def resume(self) -> None:
        """Lets it run until it pauses or ends; called by the test that gives turns."""
        self._turns.current = self
        self._go.release()
        if not self._turns.back.acquire(timeout=_LONGEST):
            self._is_stuck = self.is_ended = True  # nobody waits for it any more
            raise Violation("a thread waits without end")
        self._turns.current = None
        if self.fault is not None:
            raise self.fault

    def pause(self) -> None:
        """Gives the turn back; called by the thread itself."""
        if self.is_killed:
            raise Ended
        self._turns.back.release()
        self._wait()
        if self.is_killed:
            raise Ended

    def end(self) -> None:
        """Kills it, and lets it run to its end: its `finally` blocks find a store that is closed to them."""
        self.is_killed = True
        while not self.is_ended:
            self.resume()
        if not self._is_stuck:
            self._thread.join(_LONGEST)

    @property
    def can_go_on(self) -> bool:
        return not self.is_ended and (self.waits_for is None or self.waits_for.owner is None)


class Turns:
    """The process that has the turn."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.back = _closed_gate()
        self.current: Actor | None = None

    def pause(self) -> None:
        """A place where others may go on."""
        if self.current is not None:
            self.current.pause()

    def lock(self) -> Lock:
        return Lock(self)


class Lock:
    """Stands for the locks of `threading`, reentrant ones included: who waits gives its turn up."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.owner: object = None
        self._depth = 0

    def acquire(self, blocking: bool = True) -> bool:
        current = self._turns.current
        me = self if current is None else current
        if not blocking and self.owner is not None and self.owner is not me:
            return False
        while self.owner is not None and self.owner is not me:
            if current is None or current.is_killed:
                raise Ended
            current.waits_for = self
            current.pause()
            current.waits_for = None
        self.owner = me
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self.owner = None

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@contextmanager
def scripted(turns: Turns) -> Iterator[Any]:
    """Replaces the locks and the clock of the writer and of reservations; yields the clock, whose `seconds` move."""
    now = SimpleNamespace(seconds=0.0)
    locks = SimpleNamespace(Lock=turns.lock, RLock=turns.lock)
    clock = SimpleNamespace(monotonic=lambda: now.seconds)
    places = [(module, "threading", locks) for module in (writer, shares, durable_writer)]
    places += [(module, "time", clock) for module in (durable_writer, ledger_anchor)]
    kept = [(module, name, getattr(module, name)) for module, name, _ in places]
    for module, name, value in places:
        setattr(module, name, value)
    try:
        yield now
    finally:
        for module, name, value in kept:
            setattr(module, name, value)
