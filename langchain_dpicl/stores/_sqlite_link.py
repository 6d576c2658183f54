"""Keeps one connection to a SQLite ledger, safe under threads and forks."""

# A fork while a file is open copies SQLite's table of locks into the child, where every connection then relies on locks
# that the child does not hold; the parent may also remove the log that the child writes to. So each file is closed
# before a fork, and a file that could not be closed is refused in the child. A process that opens and closes a file by
# other means drops its own locks on it. Another process may then remove the log under an open connection, which
# continues to write to a file without a name. So the log is checked before and after each commit; `_sqlite_logs`
# decides what happens to a removed log.

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from langchain_dpicl.exceptions import LedgerError, LedgerUnavailableError
from langchain_dpicl.stores._sqlite_file import Place, errors_of, open_file, place_of
from langchain_dpicl.stores._sqlite_logs import Held, check_no_log, leave, log_of


class Link:
    """A connection that is opened anew where the path names another file, and in a child forked between transactions.

    A connection whose log is no longer the one beside the file is given up, with all others of this process on that
    file: they share what SQLite knows of the log, so that only the last one's end makes it look anew.

    Args:
      path: the file, links resolved.
      timeout: seconds to wait for other processes.
      check: is called with every connection before it is used.
    """

    def __init__(self, path: Path, *, timeout: float, check: Callable[[sqlite3.Connection], None]) -> None:
        self.path = path
        self.timeout = timeout
        self.lock = threading.RLock()
        self.connection: sqlite3.Connection | None = None
        self.place: Place | None = None
        self.held: Held | None = None
        self._check = check
        self._is_writing = False
        self._is_closed = False
        self._pid = os.getpid()
        _LINKS[id(self)] = self
        with self.lock:
            self._ready()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Shows the file as it stands at one moment; inside `writing`, with what is being written."""
        with self.lock:
            if self._is_busy:
                yield
                return
            self._ready()
            try:
                self._run("BEGIN")
                yield
            finally:
                self._roll_back()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Holds the file's only write lock; what is written stands if the block ends well."""
        with self.lock:
            self.check_idle()
            self._ready()
            try:
                self._is_writing = True
                self._run("BEGIN IMMEDIATE")
                self._check_log()
                yield
                self._check_log()
                self._run("COMMIT")
                self._check_log()
            except BaseException:
                self._roll_back()
                raise
            finally:
                self._is_writing = False

    @property
    def _is_busy(self) -> bool:
        # A stop may have left the flag, as it may have left a transaction; the two of them mean a `writing` block.
        return self._is_writing and self.connection is not None and self.connection.in_transaction

    def check_idle(self) -> None:
        """Refuses what cannot be done inside a transaction of this thread; waits for those of others."""
        with self.lock:
            if self._is_busy:
                raise LedgerError("ledger: expected no open transaction in this thread, found one. Close it first.")

    def ask(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Returns the rows of a query, inside `reading` or `writing`."""
        with errors_of(self.path):
            return self._own().execute(query, values).fetchall()

    def write(self, command: str, *values: object) -> None:
        """Writes, inside `writing`."""
        connection = self._own()
        if not connection.in_transaction:  # SQLite itself gives a transaction up, for instance when the disk is full
            raise LedgerUnavailableError(f"ledger {self.path}: the transaction was given up. Nothing is granted.")
        with errors_of(self.path):
            connection.execute(command, values)

    def copy_to(self, target: sqlite3.Connection) -> None:
        """Copies the whole file as it stands at one moment."""
        with self.lock:
            self.check_idle()
            self._ready().backup(target)

    def settle(self) -> None:
        """Moves the log into the file as far as nobody is in the way."""
        with self.lock:
            self.check_idle()
            self._ready()
            self._run("PRAGMA wal_checkpoint(PASSIVE)")

    def close(self) -> None:
        """Moves the log into the file and closes it for good."""
        with self.lock:
            self.check_idle()
            self._is_closed = True
            self._drop()

    def _ready(self) -> sqlite3.Connection:
        """Returns this process's connection to the file that the path names now."""
        if self._is_closed:
            raise LedgerError(f"ledger {self.path}: expected an open store, found a closed one. Open it again.")
        if self.connection is None:
            self._pid = os.getpid()
        connection = self._own() if self.connection is not None else self._open()
        if place_of(self.path) != self.place:
            self._give_up()
            connection = self._open()
        self._check_log()
        if connection.in_transaction:  # left by a stop between two lines of ours
            self._roll_back()
        return self.connection or self._open()

    def _open(self) -> sqlite3.Connection:
        self.place = place_of(self.path)
        connection = opened(self.path, timeout=self.timeout)
        try:
            self._check(connection)
            self.held = Held(self.path, self.place)
        except BaseException:
            connection.close()
            raise
        self.connection = connection
        return connection

    def _check_log(self) -> None:
        """Gives the file up if the log beside it is not the open one, or if another file is in its place."""
        if self.connection is None or (self.held is not None and self.held.is_whole):
            return
        self._give_up()
        raise LedgerUnavailableError(
            f"ledger {self.path}: expected the log that was opened with it, found another or none. Nothing is granted; "
            "the next call opens it anew. A process that holds a ledger must not open, copy or hash its files itself, "
            "which drops its locks: use backup."
        )

    def _give_up(self) -> None:
        """Closes this process's connections to the file, but for those in use, which find out for themselves."""
        for link in _links():
            if link.place == self.place and link.lock.acquire(blocking=False):
                try:
                    link._drop()  # noqa: SLF001  another of this class
                finally:
                    link.lock.release()

    def _own(self) -> sqlite3.Connection:
        """Returns the connection, which has to be of this process: a child would commit on its parent's."""
        if self.connection is None:
            raise LedgerUnavailableError(f"ledger {self.path}: the connection was given up. Nothing is granted.")
        if self._pid != os.getpid():
            raise _forked_inside(self.path)
        return self.connection

    def _run(self, statement: str) -> None:
        connection = self._own()
        with errors_of(self.path):
            connection.execute(statement)

    def _roll_back(self) -> None:
        """Undoes what was not committed; a connection that cannot even do that is given up."""
        if self.connection is None or self._pid != os.getpid():
            return
        try:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
        except sqlite3.Error:
            self._drop()

    def _drop(self) -> None:
        """Closes the connection, unless it is a parent's: that would harm it."""
        if self._pid == os.getpid():
            try:
                if self.connection is not None:
                    leave(self.connection, self.held)
            finally:  # not before: a thread that opens the file meanwhile would share what is being left
                self.connection = None
                self.held = None

    def leave_removed_log(self, path: Path, place: Place) -> None:
        """Closes the file if it is the one at `path` and its log was removed; refuses while it is in use."""
        files = self.held  # which another thread may be leaving just now
        if self.connection is None or self.place != place or files is None or files.log == log_of(path):
            return
        if not self.lock.acquire(blocking=False):
            raise LedgerUnavailableError(
                f"ledger {path}: its log was removed while another thread was using it. Nothing is granted; try again."
            )
        try:
            self._drop()
        finally:
            self.lock.release()

    def before_fork(self) -> bool:
        """Closes the file until it is used again, unless it is in use; returns whether `lock` was taken."""
        is_locked = self.lock.acquire(timeout=self.timeout)
        if is_locked and self.connection is not None and not self.connection.in_transaction:
            self._drop()
        return is_locked

    def in_child(self, *, was_at_rest: bool) -> None:
        """Forgets the threads of the parent; a connection left open, or being opened, is kept and refused."""
        self.lock = threading.RLock()
        if self.connection is not None or not was_at_rest:
            _LEFT_OPEN.append(self)

    def __del__(self) -> None:
        if self.__dict__.get("connection") is not None:
            self._drop()


def opened(path: Path, *, timeout: float) -> sqlite3.Connection:
    """Opens a ledger's file; see `open_file`.

    Refuses where this process was forked while the file was in use, and where it still uses a log that was removed:
    SQLite would take that one for the log of the new connection.
    """
    check_no_log(path, "ledger")
    place = place_of(path)
    if place in [link.place for link in _LEFT_OPEN]:
        raise _forked_inside(path)
    for link in _links():
        link.leave_removed_log(path, place)
    return open_file(path, timeout=timeout)


def _forked_inside(path: Path) -> LedgerError:
    return LedgerError(
        f"ledger {path}: expected a process that opened it itself, found one forked while it was in use. Fork outside "
        "of ledger transactions, or start workers by spawn."
    )


_LINKS: weakref.WeakValueDictionary[int, Link] = weakref.WeakValueDictionary()
_LEFT_OPEN: list[Link] = []


class _Forking(threading.local):
    """The links that this thread holds for the fork that it makes; two threads may fork at once."""

    def __init__(self) -> None:
        self.at_rest: list[Link] = []


_FORKING = _Forking()


def _links() -> list[Link]:
    """Returns the links of this process in one order for all threads: those that take several wait for no circle."""
    return sorted((link for link in [found() for found in _LINKS.valuerefs()] if link is not None), key=id)


def _before_fork() -> None:
    for link in _links():
        if link.before_fork():
            _FORKING.at_rest.append(link)


def _in_parent() -> None:
    while _FORKING.at_rest:
        _FORKING.at_rest.pop().lock.release()


def _in_child() -> None:
    at_rest = set(_FORKING.at_rest)
    _FORKING.at_rest.clear()
    for link in _links():
        link.in_child(was_at_rest=link in at_rest)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
