"""Balances of an individual filter in a SQLite file, for the processes of one host. Knows no record, query or model.

The file is as private as the documents: it tells who was asked about how often. Each call opens it, does one thing and
closes it, so a fork inherits nothing and a file that was replaced is seen. No write-ahead log: the file alone counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

from langchain_dpicl.exceptions import (
    ConfigurationError,
    LedgerError,
    LedgerRollbackError,
    LedgerUnavailableError,
    PrivacyBudgetMismatchError,
)
from langchain_dpicl.privacy._validate import check_path, check_positive
from langchain_dpicl.privacy.accounting.events import canonical_json
from langchain_dpicl.privacy.pools import Opaque
from langchain_dpicl.stores._sqlite_file import _check_local, sync_folder
from langchain_dpicl.stores._sqlite_logs import check_new_name, check_no_log

_APPLICATION_ID = 0x64704231
"""Marks the file as ours, where SQLite keeps such a mark ("dpB1")."""
_VERSION = 1
_KEY_BYTES = 32
_TABLES = """
CREATE TABLE filter (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    secret TEXT NOT NULL,
    terms TEXT,
    line TEXT,
    most INTEGER,
    releases INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE taken (
    unit BLOB NOT NULL PRIMARY KEY,
    count INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TRIGGER taken_stay BEFORE DELETE ON taken
BEGIN SELECT RAISE(ABORT, 'a participation is never given back'); END;
CREATE TRIGGER taken_grow BEFORE UPDATE ON taken WHEN NEW.count < OLD.count OR NEW.unit IS NOT OLD.unit
BEGIN SELECT RAISE(ABORT, 'a participation is never given back'); END;
CREATE TRIGGER filter_stay BEFORE DELETE ON filter
BEGIN SELECT RAISE(ABORT, 'a filter is never dropped'); END;
CREATE TRIGGER filter_grow BEFORE UPDATE ON filter
WHEN NEW.releases < OLD.releases OR NEW.secret IS NOT OLD.secret OR (OLD.terms IS NOT NULL
    AND (NEW.terms IS NOT OLD.terms OR NEW.line IS NOT OLD.line OR NEW.most IS NOT OLD.most))
BEGIN SELECT RAISE(ABORT, 'a filter only grows'); END;
"""
# EXTRA: the end of a commit, which is the removal of its journal, is on the disk as well.
_CONNECTION = "PRAGMA synchronous = EXTRA; PRAGMA fullfsync = 1; PRAGMA trusted_schema = 0; PRAGMA cell_size_check = 1"
_COUNT = "INSERT INTO taken (unit, count) VALUES (?, 1) ON CONFLICT (unit) DO UPDATE SET count = count + 1"

T = TypeVar("T")
_PATIENCE, _PAUSE = 0.02, 0.01
"""Seconds that SQLite waits for others, holding this process's lock; and between two tries, holding nothing."""

# SQLite's notes on locks must not be in use when a process forks, or the child believes in locks that it does not hold.
_AT_WORK = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_AT_WORK.acquire, after_in_parent=_AT_WORK.release, after_in_child=_AT_WORK.release)


class SQLiteBalances(Opaque):
    """Balances that outlive the process, for all processes of a host that share one filter. Makes a missing file.

    Formal guarantees:
      - A unit is let in at most as often as declared, over all processes, forks and threads; the debits of a release
        stand on the disk, together, when `debit` returns, and nothing gives one back. A kill leaves all or none.
      - The file belongs to one filter of one ledger, by the line that paid for it, for ever. Whoever took it up debits
        no other's: what stands in the file's place is looked at in each transaction.
      - An older copy of it, or one of two copies that go on, is refused: the ledger counts releases, too, and a file
        that knows of fewer has missed some. It is looked at before the debits and once more when the ledger has them.
      - A unit stands in it under a keyed hash of its name, and how often it took part. The key stands there as well, so
        who reads the file can look for names that they know: protect it as the documents are.
      - A file of another kind, a broken one and one on a network file system are refused, and no error names a unit.

    Args:
      path: the file; made with rights for its owner alone.
      timeout: seconds to wait for other processes that write.

    Raises:
      LedgerError: it is none of these files, broken, or cannot be used.
      ConfigurationError: an argument is out of range.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     balances = SQLiteBalances(folder + "/balances.db")
      ...     balances.take_up({"participations": 1}, lambda: {"entry": 1})
      ...     balances.debit(["a unit"], 0), balances.debit(["a unit", "another"], 1)
      ({'entry': 1}, True)
      ([True], [False, True])
    """

    __slots__ = ("_path", "_terms", "_timeout")
    durable = True

    def __init__(self, path: str | os.PathLike[str], *, timeout: float = 60.0) -> None:
        if not isinstance(path, str | os.PathLike):
            raise ConfigurationError(f"balances: expected the path of a file, found {type(path).__name__}.")
        self._timeout = check_positive("timeout", timeout)
        self._path = check_path("path", path)
        self._terms: str | None = None
        _prepare(self._path)
        (found,) = self._done(lambda connection: connection.execute("PRAGMA quick_check(1)").fetchone())
        if found != "ok":
            raise _broken(self._path, str(found))

    @property
    def path(self) -> Path:
        """The file, links resolved."""
        return self._path

    @property
    def timeout(self) -> float:
        """Seconds to wait for other processes that write."""
        return self._timeout

    def paid_by(self, terms: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Takes the file for a filter that was paid for, and returns the line that did; None: nobody has.

        Args:
          terms: what identifies the filter, as JSON values; with `participations`.

        Raises:
          PrivacyBudgetMismatchError: the file is another filter's.
        """
        wanted = self._own(terms)
        found = self._done(lambda connection: self._line(connection, wanted))
        self._terms = self._terms if found is None else wanted
        return found

    def take_up(self, terms: Mapping[str, Any], buy: Callable[[], Mapping[str, Any]]) -> tuple[Mapping[str, Any], bool]:
        """Takes the file for a filter: pays for it if nobody has, and says which line did, and whether just now.

        Args:
          terms: what identifies the filter, as JSON values; with `participations`.
          buy: burns the ticket and returns the ledger's line; called at most once, while others wait, and asks nobody:
            no other lock is taken in there.

        Raises:
          PrivacyBudgetMismatchError: the file is another filter's.
        """
        wanted = self._own(terms)

        def take(connection: sqlite3.Connection) -> tuple[Mapping[str, Any], bool]:
            line = self._line(connection, wanted)
            if line is not None:
                return line, False
            paid = dict(buy())
            values = (wanted, canonical_json(paid), int(terms["participations"]))
            connection.execute("UPDATE filter SET terms = ?, line = ?, most = ?", values)
            return paid, True

        taken = self._written(take)
        self._terms = wanted
        return taken

    def debit(self, units: Sequence[str], settled: int) -> list[bool]:
        """Takes one participation off every unit that has one left, durably; see `Balances`.

        Args:
          units: distinct names; private.
          settled: releases that the ledger knows to have been debited.

        Raises:
          LedgerRollbackError: the file knows of fewer releases than the ledger.
          PrivacyBudgetMismatchError: another filter's file took its place.
          LedgerError: it cannot be written, or is no filter's that was taken up here.
        """

        def write(connection: sqlite3.Connection) -> list[bool]:
            most = self._most(connection, settled)
            key = self._key(connection)
            names = [blake2b(unit.encode("utf-8", "surrogatepass"), key=key, digest_size=32).digest() for unit in units]
            has_one = [_taken(connection, name) < most for name in names]
            connection.executemany(_COUNT, [(name,) for name, left in zip(names, has_one, strict=True) if left])
            connection.execute("UPDATE filter SET releases = releases + 1")
            return has_one

        return self._written(write)

    def confirm(self, settled: int) -> None:
        """Refuses where the ledger knows of more debited releases than the file: another copy let somebody in, too.

        Args:
          settled: releases that the ledger knows to have been debited, that of who asks included.

        Raises:
          LedgerRollbackError: the file knows of fewer.
          PrivacyBudgetMismatchError: another filter's file took its place.
          LedgerError: it cannot be read.
        """
        self._done(lambda connection: self._most(connection, settled))

    def _own(self, terms: Mapping[str, Any]) -> str:
        """Returns the terms as they stand in the file, which have to be those that were taken up here before."""
        wanted = canonical_json(dict(terms))
        if self._terms not in {None, wanted}:
            raise self._mismatch()
        return wanted

    def _line(self, connection: sqlite3.Connection, wanted: str) -> Mapping[str, Any] | None:
        (found,) = self._row(connection, terms=str | None)
        if found not in {None, wanted}:
            raise self._mismatch()
        return None if found is None else self._read(*self._row(connection, line=str))

    def _most(self, connection: sqlite3.Connection, settled: int) -> int:
        """Returns how often a unit may take part, of a file that is still the filter's own and has missed nothing."""
        terms, most, releases = self._row(connection, terms=str | None, most=int | None, releases=int)
        if terms is None or self._terms is None:
            raise self._fault(None)
        if terms != self._terms or most != json.loads(self._terms)["participations"]:
            raise self._mismatch()
        if releases < settled:
            raise self._fault((releases, settled))
        return int(most)

    def _row(self, connection: sqlite3.Connection, **columns: Any) -> tuple[Any, ...]:
        """Returns columns of the one row of the filter.

        Raises:
          LedgerError: there is none, or one holds another type, as after a flipped bit.
        """
        found = connection.execute(f"SELECT {', '.join(columns)} FROM filter").fetchone()  # noqa: S608  names of ours
        if found is None or not all(
            isinstance(value, kind) for value, kind in zip(found, columns.values(), strict=True)
        ):
            raise _broken(self._path, "no row of a filter")
        return tuple(found)

    def _key(self, connection: sqlite3.Connection) -> bytes:
        (secret,) = self._row(connection, secret=str)
        try:
            key = bytes.fromhex(secret)
        except ValueError:
            key = b""
        if len(key) != _KEY_BYTES:
            raise _broken(self._path, "no key")
        return key

    def _read(self, line: str) -> Mapping[str, Any]:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise _broken(self._path, "no line of a ledger")
        return found

    def _mismatch(self) -> PrivacyBudgetMismatchError:
        msg = f"balances {self._path.name}: expected those of this filter, found another's."
        return PrivacyBudgetMismatchError(f"{msg} Give every filter (ledger, component and plan) its own file.")

    def _fault(self, counts: tuple[int, int] | None) -> LedgerError:
        if counts is None:
            return LedgerError(f"balances {self._path.name}: expected a filter's, found none that was paid for.")
        msg = f"balances {self._path.name}: expected {counts[1]} releases or more, as the ledger counts, found "
        advice = (
            "An older copy took the file's place, or two copies go on. Nobody is let in: bring the file itself back."
        )
        return LedgerRollbackError(f"{msg}{counts[0]}. {advice}")

    def _written(self, action: Callable[[sqlite3.Connection], T]) -> T:
        """Acts, once, under the file's only lock; what is written stands if the action ends well.

        Nobody reads meanwhile, so that a commit waits for nobody: it would fail after what cannot be done again.
        """
        return self._done(action, begin="BEGIN EXCLUSIVE")

    def _done(self, action: Callable[[sqlite3.Connection], T], *, begin: str = "BEGIN") -> T:
        """Acts on the file that the path names now, once, as soon as its lock is free."""
        end = time.monotonic() + self._timeout
        with _errors_of(self._path):
            while True:
                with _AT_WORK, contextlib.ExitStack() as stack:
                    connection = self._begun(begin, stack, is_last=time.monotonic() > end)
                    if connection is not None:
                        done = action(connection)
                        connection.execute("COMMIT")
                        return done
                time.sleep(_PAUSE)

    def _begun(self, begin: str, stack: contextlib.ExitStack, *, is_last: bool) -> sqlite3.Connection | None:
        """Returns a connection that holds the lock, which the stack closes; None: others hold it."""
        try:
            connection = stack.enter_context(contextlib.closing(_connected(self._path, _PATIENCE)))
            connection.execute(begin)
            _check_ours(connection, self._path)  # from its first look on a reader holds its lock
        except sqlite3.OperationalError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_BUSY or is_last:
                raise
            return None
        return connection

    def __repr__(self) -> str:
        return f"SQLiteBalances({self._path.name!r}, content=<private>)" if hasattr(self, "_path") else "SQLiteBalances"


def _taken(connection: sqlite3.Connection, name: bytes) -> int:
    found = connection.execute("SELECT count FROM taken WHERE unit = ?", (name,)).fetchone()
    return 0 if found is None else int(found[0])


def _prepare(path: Path) -> None:
    """Makes a missing file, and refuses what cannot be one of ours, without opening it."""
    check_new_name(path, "balances")
    check_no_log(path, "balances")
    if not path.exists():
        _make(path)
    try:
        found = path.stat()
    except OSError as error:
        raise LedgerUnavailableError(f"balances {path}: cannot be used now ({error.strerror}).") from None
    if not stat.S_ISREG(found.st_mode):
        raise LedgerError(f"balances {path}: expected a file of balances, found no plain file. Check the path.")
    _check_local(path)


def _make(path: Path) -> None:
    """Makes an empty file, whole or not at all; does nothing where another process is faster."""
    fresh = path.with_name(f"{path.name}.new-{secrets.token_hex(8)}")
    try:
        os.close(os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        with _AT_WORK, _errors_of(path), contextlib.closing(_connected(fresh, 60.0)) as connection:
            connection.executescript(
                f"BEGIN; PRAGMA application_id = {_APPLICATION_ID}; PRAGMA user_version = {_VERSION}; {_TABLES} COMMIT;"
            )
            connection.execute("INSERT INTO filter (id, secret) VALUES (1, ?)", (secrets.token_hex(_KEY_BYTES),))
        with contextlib.suppress(FileExistsError):
            os.link(fresh, path)
        fresh.unlink()
        sync_folder(path)
    except OSError as error:
        found = error.strerror or type(error).__name__
        raise LedgerUnavailableError(f"balances {path}: expected a folder to make it in, found: {found}.") from None
    finally:
        fresh.unlink(missing_ok=True)


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
    if (found, version) != (_APPLICATION_ID, _VERSION):
        msg = f"balances {path.name}: expected a file of balances, version {_VERSION}, found another. Check the path."
        raise LedgerError(msg)


@contextlib.contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Turns what SQLite raises into errors of a ledger, which refuse; none quotes a row."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter of a text with a flipped bit
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        words = getattr(error, "sqlite_errorname", type(error).__name__)
    else:
        return
    if code in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CONSTRAINT}:
        raise _broken(path, words)
    advice = "Nobody is let in. Look at the disk, its free space and who else writes; then try again."
    raise LedgerUnavailableError(f"balances {path.name}: cannot be used now ({words}). {advice}")


def _broken(path: Path, words: str) -> LedgerError:
    advice = "Nobody is let in. An older copy will be refused, too: declare another component, which pays again."
    return LedgerError(f"balances {path.name}: broken or foreign ({words}). {advice}")
