"""Lets the writers of a SQLite file take turns in the order of their coming."""

# SQLite's own waiting polls, and of many writers some wait for seconds. The queue is a courtesy: SQLite's lock decides
# who writes, so that a queue that nobody can enter, or that was removed, costs fairness and nothing else.

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]

_PAUSE = 60.0
"""Seconds for which a queue is left alone after a wait without success: a process that stopped may be at its head."""


class WriterQueue:
    """A lock beside a file, which one thread of this process at a time waits for. SQLite's lock guards the file.

    A thread of its own waits, since the wait for such a lock cannot be ended.

    Args:
      path: the file of the ledger; the queue adds ".queue" to its name.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rest_until = 0.0
        self._forget()

    def _forget(self) -> None:
        self._number: int | None = None
        self._changed = threading.Condition()
        self._is_waiting = False  # whether a thread waits for the lock
        self._is_wanted = False  # whether anybody waits for that thread
        self._is_held = False

    @contextlib.contextmanager
    def turn(self, seconds: float) -> Iterator[None]:
        """Waits for this process's turn, at most so long, and gives it up when the block ends."""
        is_held = fcntl is not None and self._enter(seconds)
        pid = os.getpid()
        try:
            yield
        finally:
            if is_held and os.getpid() == pid:
                self._leave()

    def close(self) -> None:
        """Leaves the queue; in a forked child what it inherited, so that the parent's place ends with the parent."""
        number = self.__dict__.get("_number")
        self._forget()
        if number is not None:
            os.close(number)

    def __del__(self) -> None:
        self.close()

    def _enter(self, seconds: float) -> bool:
        if time.monotonic() < self._rest_until:
            return False
        try:
            number = self._number
            if number is None:
                mode = self._path.stat().st_mode & 0o666  # who may write to the file may wait in its queue
                number = self._number = os.open(f"{self._path}.queue", os.O_RDONLY | os.O_CREAT, mode)
            if self._is_waiting or not _took(number):
                return self._wait(number, seconds)
        except OSError:  # a folder that this user may not write to, or a file system without such locks
            self._rest_until = time.monotonic() + _PAUSE
            return False
        return True

    def _wait(self, number: int, seconds: float) -> bool:
        is_held = False
        with self._changed:
            self._is_wanted = True
            if not self._is_waiting:
                self._is_waiting = True
                threading.Thread(target=self._take, args=(number, self._changed), daemon=True).start()
            try:
                is_held = self._changed.wait_for(lambda: self._is_held, seconds)
            finally:
                if self._is_held and not is_held:  # an interrupt
                    self._leave()
                self._is_wanted = self._is_held = False
        if not is_held:
            self._rest_until = time.monotonic() + _PAUSE
        return is_held

    def _take(self, number: int, changed: threading.Condition) -> None:
        """Waits for the lock in a thread of its own; gives it up where nobody wants it any more."""
        with contextlib.suppress(OSError):
            fcntl.flock(number, fcntl.LOCK_EX)
        with changed:
            self._is_waiting = False
            if self._is_wanted:
                self._is_held = True
                changed.notify_all()
            else:
                self._leave()

    def _leave(self) -> None:
        if self._number is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(self._number, fcntl.LOCK_UN)


def _took(number: int) -> bool:
    """Takes the lock of an open file unless somebody holds it."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
