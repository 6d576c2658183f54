"""SQLite files that every call opens and closes, for the processes of one host."""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from langchain_dpicl.exceptions import LedgerError, LedgerUnavailableError
from langchain_dpicl.stores import sqlite_ledger  # noqa: F401  its fork handlers have to be registered before ours
from langchain_dpicl.stores.sqlite_file import _check_local, check_new_name, check_no_log, sync_folder

# EXTRA: the removal of the journal, which ends a commit, is on the disk as well.
_CONNECTION = "PRAGMA synchronous = EXTRA; PRAGMA fullfsync = 1; PRAGMA trusted_schema = 0; PRAGMA cell_size_check = 1"
_BROKEN = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CONSTRAINT}
_PATIENCE, _PAUSE = 0.02, 0.01
"""Seconds that SQLite waits for others, with `_AT_WORK` held; and between two attempts, with nothing held."""

# A fork in the middle of a call would copy SQLite's table of locks, and the child would rely on locks it does not hold.
# What runs in a call may take the lock of a ledger's connection. Before a fork the handlers registered last run first,
# so the forking thread takes the locks in the same order, and neither thread waits for the other.
_AT_WORK = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_AT_WORK.acquire, after_in_parent=_AT_WORK.release, after_in_child=_AT_WORK.release)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FileKind:
    """What differs between kinds of files.

    Attributes:
      word: what error messages call such a file.
      application_id: the mark in the file's header.
      version: of the tables.
      tables: returns the script that makes them.
      repair: what to do about a broken file, for error messages.
    """

    word: str
    application_id: int
    version: int
    tables: Callable[[], str]
    repair: str


class PerCallFile:
    """One file of a kind, which is made if it is missing; each call is one transaction on its own connection.

    Nothing is held between calls: a fork inherits nothing, and a file that was replaced is noticed. There is no
    write-ahead log, so that between calls the file alone is complete. All errors are `LedgerError`.
    """

    def __init__(self, path: Path, kind: FileKind, *, timeout: float) -> None:
        self.path = path
        self.timeout = timeout
        self._kind = kind
        self._prepare()
        (answer,) = self.read(lambda connection: connection.execute("PRAGMA quick_check(1)").fetchone())
        if answer != "ok":
            raise self.broken(str(answer))

    def read(self, action: Callable[[sqlite3.Connection], T]) -> T:
        """Runs an action on the file as it stands at one moment."""
        return self._done(action, begin="BEGIN")

    def write(self, action: Callable[[sqlite3.Connection], T]) -> T:
        """Runs an action once, under the file's only lock; it is committed if it returns.

        The lock excludes readers, too, because a commit that had to wait for one could fail after the action did
        something that cannot be undone, such as a payment.
        """
        return self._done(action, begin="BEGIN EXCLUSIVE")

    def broken(self, words: str) -> LedgerError:
        """Returns the error for a file whose content is not what was written."""
        return LedgerError(f"{self._kind.word} {self.path.name}: broken or foreign ({words}). {self._kind.repair}")

    def _done(self, action: Callable[[sqlite3.Connection], T], *, begin: str) -> T:
        end = time.monotonic() + self.timeout
        with self._errors():
            while True:
                with _AT_WORK, contextlib.ExitStack() as stack:
                    connection = self._begun(begin, stack, is_last=time.monotonic() > end)
                    if connection is not None:
                        result = action(connection)
                        connection.execute("COMMIT")
                        return result
                time.sleep(_PAUSE)

    def _begun(self, begin: str, stack: contextlib.ExitStack, *, is_last: bool) -> sqlite3.Connection | None:
        """Returns a connection inside a transaction, which the stack closes; None if another process has the lock."""
        try:
            connection = stack.enter_context(contextlib.closing(_connect(self.path, _PATIENCE)))
            connection.execute(begin)
            self._check_kind(connection)  # this first read gives a reader its shared lock
        except sqlite3.OperationalError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_BUSY or is_last:
                raise
            return None
        return connection

    def _prepare(self) -> None:
        """Makes a missing file, and refuses what cannot be one of this kind, without opening it."""
        check_new_name(self.path, self._kind.word)
        check_no_log(self.path, self._kind.word)
        if not self.path.exists():
            self._make()
        try:
            mode = self.path.stat().st_mode
        except OSError as error:
            reason = error.strerror
            raise LedgerUnavailableError(f"{self._kind.word} {self.path}: cannot be used now ({reason}).") from None
        if not stat.S_ISREG(mode):
            msg = f"{self._kind.word} {self.path}: expected a regular file, found something else. Check the path."
            raise LedgerError(msg)
        _check_local(self.path)

    def _make(self) -> None:
        """Makes the file, whole or not at all; does nothing if another process is faster."""
        fresh, kind = self.path.with_name(f"{self.path.name}.new-{secrets.token_hex(8)}"), self._kind
        try:
            os.close(os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
            with _AT_WORK, self._errors(), contextlib.closing(_connect(fresh, 60.0)) as connection:
                connection.executescript(
                    f"BEGIN; PRAGMA application_id = {kind.application_id}; PRAGMA user_version = {kind.version}; "
                    f"{kind.tables()} COMMIT;"
                )
            # A link fails where the name exists, unlike a rename, which would replace the file of another process.
            with contextlib.suppress(FileExistsError):
                os.link(fresh, self.path)
            fresh.unlink()
            sync_folder(self.path)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            msg = f"{kind.word} {self.path}: expected a folder to make it in, found: {reason}."
            raise LedgerUnavailableError(msg) from None
        finally:
            fresh.unlink(missing_ok=True)

    def _check_kind(self, connection: sqlite3.Connection) -> None:
        mark, version = (
            connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
        )
        shown = f"{self._kind.word} {self.path.name}"
        if mark != self._kind.application_id:
            raise LedgerError(f"{shown}: expected a file of this kind, found another or an empty one. Check the path.")
        if version != self._kind.version:
            msg = f"{shown}: expected tables of version {self._kind.version}, found {version}. Upgrade the package."
            raise LedgerError(msg)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turns SQLite's errors into errors of a ledger, by name alone: their text may quote a row."""
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter for a text with a flipped bit
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
            words = getattr(error, "sqlite_errorname", type(error).__name__)
        else:
            return
        if code in _BROKEN:
            raise self.broken(words)
        advice = "Nothing is granted. Look at the disk, its free space and who else writes; then try again."
        raise LedgerUnavailableError(f"{self._kind.word} {self.path.name}: cannot be used now ({words}). {advice}")


def _connect(path: Path, timeout: float) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True, timeout=timeout, isolation_level=None)
    try:
        connection.executescript(_CONNECTION)
    except BaseException:
        connection.close()
        raise
    return connection
