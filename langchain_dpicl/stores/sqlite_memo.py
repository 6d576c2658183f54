"""Released answers in a SQLite file, for the processes of one host. Knows no ledger, no record and no framework.

Each call opens the file, does one thing and closes it: nothing is held between calls, so a fork inherits nothing and a
file that was replaced is seen. No write-ahead log: the file alone is the memo, between calls.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from langchain_dpicl.exceptions import MemoError
from langchain_dpicl.privacy._validate import check_int, check_path, check_positive, check_real
from langchain_dpicl.stores._sqlite_file import _check_local, sync_folder
from langchain_dpicl.stores._sqlite_logs import check_new_name, check_no_log
from langchain_dpicl.stores.memos import (
    MOST_ANSWERS,
    TURN_SECONDS,
    MemoKey,
    ReleaseMemo,
    checked,
    digest_of,
    memo_faults,
    tenant_of,
)

_APPLICATION_ID = 0x64704D31
"""Marks the file as ours, where SQLite keeps such a mark ("dpM1")."""

_VERSION = 1
_TABLES = """
CREATE TABLE answers (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    scope TEXT NOT NULL,
    tenant TEXT NOT NULL,
    query TEXT NOT NULL,
    told TEXT NOT NULL,
    digest TEXT NOT NULL,
    UNIQUE (scope, tenant, query)
);
CREATE TABLE turns (
    scope TEXT NOT NULL,
    tenant TEXT NOT NULL,
    query TEXT NOT NULL,
    holder TEXT NOT NULL,
    until REAL NOT NULL,
    PRIMARY KEY (scope, tenant, query)
) WITHOUT ROWID;
"""
# EXTRA: the end of a commit, which is the removal of its journal, is on the disk as well.
_CONNECTION = "PRAGMA synchronous = EXTRA; PRAGMA fullfsync = 1; PRAGMA trusted_schema = 0; PRAGMA cell_size_check = 1"
_RECALL = "SELECT told, digest FROM answers WHERE scope = ? AND tenant = ? AND query = ?"
_REMEMBER = (
    "INSERT INTO answers (scope, tenant, query, told, digest) VALUES (?, ?, ?, ?, ?) "
    "ON CONFLICT (scope, tenant, query) DO UPDATE SET told = excluded.told, digest = excluded.digest WHERE told = ?"
)
_DROP_OLDEST = (
    "DELETE FROM answers WHERE scope = ?1 AND tenant = ?2 AND number <= (SELECT number FROM answers "
    "WHERE scope = ?1 AND tenant = ?2 ORDER BY number DESC LIMIT 1 OFFSET ?3)"
)
_LONGEST_TURN = 7 * 86400.0
# A turn that seems to end long after any could was taken by a clock that went wrong.
_END_LATE_TURNS = "DELETE FROM turns WHERE until <= ? OR until > ?"
_CLAIM = (
    "INSERT INTO turns (scope, tenant, query, holder, until) VALUES (?, ?, ?, ?, ?) "
    "ON CONFLICT (scope, tenant, query) DO UPDATE SET until = excluded.until WHERE holder = excluded.holder"
)
_LEAVE = "DELETE FROM turns WHERE scope = ? AND tenant = ? AND query = ? AND holder = ?"

T = TypeVar("T")
_PATIENCE, _PAUSE = 0.02, 0.01
"""Seconds that SQLite waits for others, holding this process's lock; and between two tries, holding nothing."""

# SQLite's notes on locks must not be in use when a process forks, or the child believes in locks that it does not hold.
_AT_WORK = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_AT_WORK.acquire, after_in_parent=_AT_WORK.release, after_in_child=_AT_WORK.release)


class SQLiteMemo(ReleaseMemo):
    """Keeps released answers in a SQLite file beside the ledger, for all processes of a host. Makes a missing file.

    Losing the file loses no privacy: what is asked again is charged again. Threads, processes and forks may share it;
    a copy of the file, taken while nobody writes, is a whole memo.

    Formal guarantees:
      - When `remember` returns, the answer is on the disk; a kill leaves the answer of before or of after.
      - An answer is found by its own plan, tenant and query alone, and only unbroken.
      - Of one component at most `size` answers are kept for a tenant: the newest.
      - One process at a time has the turn to answer a question, for at most `turn_seconds`.
      - A file of another kind, a broken one, one of a newer version and one on a network file system are refused.

    Args:
      path: the file; made with rights for its owner alone.
      size: answers kept of one component for one tenant.
      turn_seconds: how long others who ask the same wait for an answer that is under way; at most a week.
      timeout: seconds to wait for other processes that write.

    Raises:
      MemoError: it is no memo's file, broken, or cannot be used.
      ConfigurationError: an argument is out of range.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     memo = SQLiteMemo(folder + "/memo.db")
      ...     memo.durable, memo.description
      (True, 'SQLite file memo.db')
    """

    durable = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        size: int = MOST_ANSWERS,
        turn_seconds: float = TURN_SECONDS,
        timeout: float = 60.0,
    ) -> None:
        self._size = check_int("size", size, low=1)
        self._turn = check_real("turn_seconds", turn_seconds, low=0.0, high=_LONGEST_TURN, low_open=True)
        self._timeout = check_positive("timeout", timeout)
        self._path = check_path("path", path)
        with memo_faults():
            _prepare(self._path)
        (found,) = self._done(lambda connection: connection.execute("PRAGMA quick_check(1)").fetchone())
        if found != "ok":
            raise _broken(self._path, str(found))

    @property
    def path(self) -> Path:
        """The file, links resolved."""
        return self._path

    @property
    def size(self) -> int:
        """Answers kept of one component for one tenant."""
        return self._size

    @property
    def turn_seconds(self) -> float:
        """How long a turn lasts that is not taken again."""
        return self._turn

    @property
    def description(self) -> str:
        """Public words on where the memo lives; no folder, which may name a person."""
        return f"SQLite file {self._path.name}"

    def recall(self, key: MemoKey) -> str | None:
        """Returns what was kept under this key, or None; see `ReleaseMemo`."""
        found = self._done(lambda connection: connection.execute(_RECALL, key).fetchone())
        return None if found is None else checked(key, *found, where=str(self._path))

    def remember(self, key: MemoKey, told: str, *, instead_of: str | None = None) -> None:
        """Keeps an answer, durably, where none stands; see `ReleaseMemo`."""

        def write(connection: sqlite3.Connection) -> None:
            connection.execute(_REMEMBER, (*key, told, digest_of(key, told), instead_of))
            connection.execute(_DROP_OLDEST, (key.scope, key.tenant, self._size))

        self._written(write)

    def claim(self, key: MemoKey, holder: str) -> bool:
        """Takes the turn to answer, anew where it is the holder's, unless somebody else has it; see `ReleaseMemo`."""

        def take(connection: sqlite3.Connection) -> bool:
            now = time.time()
            connection.execute(_END_LATE_TURNS, (now, now + _LONGEST_TURN))
            return connection.execute(_CLAIM, (*key, holder, now + self._turn)).rowcount == 1

        return self._written(take)

    def leave(self, key: MemoKey, holder: str) -> None:
        """Ends a turn; see `ReleaseMemo`."""
        self._written(lambda connection: connection.execute(_LEAVE, (*key, holder)))

    def forget(self, tenant: str) -> int:
        """Drops every answer of a tenant; what it asks again is charged again.

        Components that are at work go on telling what they know; those that are built from now on do not. Agents'
        tools ask under the name of a thread: that is `thread_tenant(thread_id, tenant=...)`, and is dropped by itself.

        Args:
          tenant: its name; "": of nobody in particular.

        Returns:
          How many there were.

        Raises:
          MemoError: the file cannot be written.
        """
        whose = (tenant_of(tenant),)

        def drop(connection: sqlite3.Connection) -> int:
            connection.execute("DELETE FROM turns WHERE tenant = ?", whose)
            return int(connection.execute("DELETE FROM answers WHERE tenant = ?", whose).rowcount)

        return self._written(drop)

    def _written(self, action: Callable[[sqlite3.Connection], T]) -> T:
        """Acts under the file's only write lock; what is written stands if the action ends well."""

        def write(connection: sqlite3.Connection) -> T:
            connection.execute("BEGIN IMMEDIATE")
            done = action(connection)
            connection.execute("COMMIT")
            return done

        return self._done(write)

    def _done(self, action: Callable[[sqlite3.Connection], T]) -> T:
        """Acts on the file that the path names now, if it is ours; as a whole once more while others hold its lock.

        In between nothing is held, so that other memos, threads and forks of this process need not wait as well.
        """
        end = time.monotonic() + self._timeout
        with _errors_of(self._path):
            while True:
                try:
                    return self._tried(action)
                except sqlite3.OperationalError as error:
                    if getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                        raise
                time.sleep(_PAUSE)

    def _tried(self, action: Callable[[sqlite3.Connection], T]) -> T:
        with _AT_WORK, contextlib.closing(_connected(self._path, _PATIENCE)) as connection:
            _check_ours(connection, self._path)
            return action(connection)

    def __repr__(self) -> str:
        return f"SQLiteMemo({str(self._path)!r})" if hasattr(self, "_path") else "SQLiteMemo(not made)"


def _prepare(path: Path) -> None:
    """Makes a missing file, and refuses what cannot be one of ours, without opening it."""
    check_new_name(path, "memo")
    check_no_log(path, "memo")
    if not path.exists():
        _make(path)
    _check_file(path)
    _check_local(path)


def _make(path: Path) -> None:
    """Makes an empty memo, whole or not at all; does nothing where another process is faster."""
    fresh = path.with_name(f"{path.name}.new-{secrets.token_hex(8)}")
    try:
        os.close(os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        with _AT_WORK, _errors_of(path), contextlib.closing(_connected(fresh, 60.0)) as connection:
            connection.executescript(
                f"BEGIN; PRAGMA application_id = {_APPLICATION_ID}; PRAGMA user_version = {_VERSION}; {_TABLES} COMMIT;"
            )
        with contextlib.suppress(FileExistsError):
            os.link(fresh, path)
        fresh.unlink()
        sync_folder(path)
    except OSError as error:
        found = error.strerror or type(error).__name__
        raise MemoError(f"memo {path}: expected a folder to make it in, found: {found}.") from None
    finally:
        fresh.unlink(missing_ok=True)


def _check_file(path: Path) -> None:
    """Refuses what cannot be a memo's file, without opening it."""
    try:
        found = path.stat()
    except OSError as error:
        raise MemoError(f"memo {path}: cannot be used now ({error.strerror}). Look at its folder.") from None
    if not stat.S_ISREG(found.st_mode):
        raise MemoError(f"memo {path}: expected a memo's file, found no plain file. Check the path.")


def _connected(path: Path, timeout: float) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True, timeout=timeout, isolation_level=None)
    try:
        connection.executescript(_CONNECTION)
    except BaseException:
        connection.close()
        raise
    return connection


def _check_ours(connection: sqlite3.Connection, path: Path) -> None:
    found, version = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
    if found != _APPLICATION_ID:
        raise MemoError(f"memo {path}: expected a memo's file, found another one or an empty one. Check the path.")
    if version != _VERSION:
        msg = f"memo {path}: expected tables of version {_VERSION}, found {version}."
        raise MemoError(f"{msg} Upgrade the package, or start a new memo.")


@contextlib.contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Turns what SQLite raises into errors of a memo."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        words = f"{getattr(error, 'sqlite_errorname', type(error).__name__)}: {error}"
        if code in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}:
            raise _broken(path, words) from None
        advice = "Look at the disk, its free space and who else writes; then try again."
        raise MemoError(f"memo {path}: cannot be used now ({words}). {advice}") from None
    except UnicodeDecodeError:
        raise _broken(path, "text that is none") from None


def _broken(path: Path, words: str) -> MemoError:
    return MemoError(
        f"memo {path}: broken or foreign ({words}). Restore a copy; or remove it for a new one, and what is asked "
        "again is charged again."
    )
