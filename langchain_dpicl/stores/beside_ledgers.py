"""What one host keeps in files beside ledgers: anchors, memos of released answers, balances of filters."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

from langchain_dpicl._opaque import Opaque, this_process
from langchain_dpicl._plain_files import check_path, read_plain
from langchain_dpicl.exceptions import (
    ConfigurationError,
    LedgerError,
    LedgerRollbackError,
    LedgerUnavailableError,
    PrivacyBudgetMismatchError,
)
from langchain_dpicl.privacy._validate import check_int
from langchain_dpicl.privacy.accounting.events import canonical_json
from langchain_dpicl.stores import sqlite_ledger  # noqa: F401  its fork handlers have to be registered before ours
from langchain_dpicl.stores.memos import MOST_ANSWERS, TURN_SECONDS, KeptMemo, MemoKey, memo_faults
from langchain_dpicl.stores.rows import LedgerHead, check_seconds
from langchain_dpicl.stores.sqlite_file import (
    _check_local,
    check_free,
    check_new_name,
    check_no_log,
    file_identity_or_none,
    is_mounted_alone,
    sync_folder,
)

# EXTRA: the removal of the journal, which ends a commit, is on the disk as well. A journal that stays is ended by zeros
# at its beginning, which are on the disk then, too.
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
    """What differs between kinds of files."""

    word: str
    application_id: int
    version: int
    tables: Callable[[], str]
    repair: str
    keeps_journal: bool = False
    """Whether the journal stays, without content that counts, so that no later write needs space for it."""


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
            if self._kind.keeps_journal:
                connection.execute("PRAGMA journal_mode = PERSIST")
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
        if file_identity_or_none(self.path) is None:
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
            with contextlib.suppress(OSError):  # where it could not be made, the error of that is raised
                fresh.unlink()

    def _check_kind(self, connection: sqlite3.Connection) -> None:
        mark, version = (
            connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
        )
        shown = f"{self._kind.word} {self.path.name}"
        if mark != self._kind.application_id:
            msg = f"{shown}: expected a file that was made as one, found another or an empty one. Name another file."
            raise LedgerError(msg)
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


_MEMO_TABLES = """
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


def _tables_of_a_new_memo() -> str:
    return _MEMO_TABLES


_MEMO_KIND = FileKind(
    word="memo",
    application_id=0x64704D31,  # "dpM1"
    version=1,
    tables=_tables_of_a_new_memo,
    repair="Restore a copy; or remove it for a new one, and queries asked before are charged again.",
)
_RECALL = "SELECT told, digest FROM answers WHERE scope = ? AND tenant = ? AND query = ?"
_END_LATE_TURNS = "DELETE FROM turns WHERE until <= ?"
_CLAIM = (
    "INSERT INTO turns (scope, tenant, query, holder, until) VALUES (?, ?, ?, ?, ?) "
    "ON CONFLICT (scope, tenant, query) DO UPDATE SET holder = excluded.holder, until = excluded.until "
    "WHERE holder = excluded.holder OR until > ?"
)


class SQLiteMemo(KeptMemo):
    """Keeps released answers in a SQLite file beside the ledger, for all processes of a host. Makes a missing file.

    Losing the file loses no privacy: what is asked again is charged again. Threads, processes and forks may share it;
    a copy of the file, taken while nobody writes, is a whole memo.

    Formal guarantees:
      - When `remember` returns, the answer is on the disk; a kill leaves the answer of before or of after.
      - An answer is found by its own plan, tenant and query alone, and only unbroken.
      - Of one component at most `size` answers are kept for a tenant: the newest.
      - One process at a time has the turn to answer a question, for at most `turn_seconds`. Where the clock goes
        back, the turn ends within twice that time from then.
      - A file of another kind, a broken one, one of a newer version and one on a network file system are refused.

    Args:
      path: the file; made with rights for its owner alone.
      size: answers kept of one component for one tenant.
      turn_seconds: how long others who ask the same wait for an answer that is under way; the same in all processes.
        With less than half of the holder's a process takes its turn over, and a second ticket of the share is charged.
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

    _REMEMBER = (
        "INSERT INTO answers (scope, tenant, query, told, digest) VALUES (?, ?, ?, ?, ?) "
        "ON CONFLICT (scope, tenant, query) DO UPDATE SET told = excluded.told, digest = excluded.digest WHERE told = ?"
    )
    _DROP_OLDEST = (
        "DELETE FROM answers WHERE scope = ?1 AND tenant = ?2 AND number <= (SELECT number FROM answers "
        "WHERE scope = ?1 AND tenant = ?2 ORDER BY number DESC LIMIT 1 OFFSET ?3)"
    )
    _LEAVE = "DELETE FROM turns WHERE scope = ? AND tenant = ? AND query = ? AND holder = ?"
    _FORGET = ("DELETE FROM answers WHERE tenant = ?", "DELETE FROM turns WHERE tenant = ?")

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        size: int = MOST_ANSWERS,
        turn_seconds: float = TURN_SECONDS,
        timeout: float = 60.0,
    ) -> None:
        self._size = check_int("size", size, low=1)
        self._turn = check_seconds("turn_seconds", turn_seconds)
        timeout, path = check_seconds("timeout", timeout), check_path("path", path)
        with memo_faults():
            self._file = PerCallFile(path, _MEMO_KIND, timeout=timeout)

    @property
    def path(self) -> Path:
        """The file, links resolved."""
        return self._file.path

    @property
    def description(self) -> str:
        """Public words on where the memo lives; no folder, which may name a person."""
        return f"SQLite file {self.path.name}"

    def claim(self, key: MemoKey, holder: str) -> bool:
        """Takes the turn to answer, anew where it is the holder's, unless somebody else has it; see `ReleaseMemo`."""

        def take(connection: sqlite3.Connection) -> bool:
            now = time.time()  # not before the wait for the file, in which others may take a turn
            connection.execute(_END_LATE_TURNS, (now,))
            # What ends later than two turns from now was taken before the clock went back.
            claimed = connection.execute(_CLAIM, (*key, holder, now + self._turn, now + 2 * self._turn))
            return claimed.rowcount == 1

        with memo_faults():
            return self._file.write(take)

    def _row(self, key: MemoKey) -> tuple[object, object] | None:
        row = self._file.read(lambda connection: connection.execute(_RECALL, key).fetchone())
        return None if row is None else (row[0], row[1])

    def _written(self, *commands: tuple[str, Sequence[Any]]) -> list[int]:
        with memo_faults():
            return self._file.write(lambda one: [one.execute(command, values).rowcount for command, values in commands])

    def __repr__(self) -> str:
        return f"SQLiteMemo({str(self.path)!r})" if hasattr(self, "_file") else "SQLiteMemo(not made)"


# The file is as private as the documents: it shows how often each unit was asked about.


_KEY_BYTES = 32
_BALANCES_TABLES = """
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
_NEW_ROOM, _END_ROOM = "CREATE TABLE IF NOT EXISTS room (filler BLOB)", "DROP TABLE IF EXISTS room"
_HAS_ROOM = "SELECT 1 FROM sqlite_master WHERE name = 'room'"
_ROOM_PIECE, _LEAST_ROOM = 1 << 16, 1 << 16
_BYTES_PER_UNIT = 128
"""Set aside for each declared unit: twice what its row takes up, as pages are not filled."""
_COUNT = "INSERT INTO taken (unit, count) VALUES (?, 1) ON CONFLICT (unit) DO UPDATE SET count = count + 1"


def _tables_of_new_balances() -> str:
    # The key is drawn here, where a file is made, so that no variable holds it.
    return f"{_BALANCES_TABLES} INSERT INTO filter (id, secret) VALUES (1, '{secrets.token_hex(_KEY_BYTES)}');"  # noqa: S608  hex


_BALANCES_KIND = FileKind(
    word="balances",
    application_id=0x64704231,  # "dpB1"
    version=1,
    tables=_tables_of_new_balances,
    repair="Nothing is granted. An older copy is refused as well: declare another component, which pays again.",
    keeps_journal=True,
)


class SQLiteBalances(Opaque):
    """Balances that outlive the process, for all processes of a host that share one filter. Makes a missing file.

    Formal guarantees:
      - A unit is let in at most as often as declared, over all processes, forks and threads; the debits of a release
        stand on the disk, together, when `debit` returns, and nothing gives one back. A kill leaves all or none.
      - The file belongs to one filter of one ledger, by the line that paid for it, permanently. The process that took
        it up debits no other's: what stands in the file's place is looked at in each transaction.
      - An older copy of it, or one of two copies that go on, is refused: the ledger counts releases, too, and a file
        that knows of fewer has missed some. It is looked at before the debits and once more when the ledger has them.
        Debits that a kill cut off from their line in the ledger count in the file alone: a copy that lacks no more
        queries than there were of these is not found.
      - Behind `make_room` no debit makes the file or its journal longer, however many units take part.
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

    __slots__ = ("_file", "_terms")
    durable = True

    def __init__(self, path: str | os.PathLike[str], *, timeout: float = 60.0) -> None:
        if not isinstance(path, str | os.PathLike):
            raise ConfigurationError(f"balances: expected the path of a file, found {type(path).__name__}.")
        timeout = check_seconds("timeout", timeout)
        self._terms: str | None = None
        self._file = PerCallFile(check_path("path", path), _BALANCES_KIND, timeout=timeout)

    @property
    def path(self) -> Path:
        """The file, links resolved."""
        return self._file.path

    @property
    def timeout(self) -> float:
        """Seconds to wait for other processes that write."""
        return self._file.timeout

    def bind_filter(self, terms: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Takes the file for a filter that was paid for, and returns the line that did; None: nobody has.

        Args:
          terms: what identifies the filter, as JSON values; with `participations`.

        Raises:
          PrivacyBudgetMismatchError: the file is another filter's.
        """
        wanted = self._own(terms)
        line = self._file.read(lambda connection: self._line(connection, wanted))
        self._terms = self._terms if line is None else wanted
        return line

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

        result = self._file.write(take)
        self._terms = wanted
        return result

    def make_room(self, units: int) -> None:
        """Gives the file and its journal the size that they need for all units; call it before records are read.

        How much a debit writes follows from who takes part, and so would its failure on a full disk. Before each query:
        where a process dies in a debit, SQLite undoes it and removes the journal.

        Args:
          units: declared number of units; there is room for about twice as many.

        Raises:
          ConfigurationError: a count below 1.
          LedgerError: there is no space, or the file cannot be written.
        """
        size = _LEAST_ROOM + _BYTES_PER_UNIT * check_int("units", units, low=1)
        # The first read undoes what a process that died has left, so that sizes are looked at behind it.
        is_free = self._file.read(lambda connection: connection.execute(_HAS_ROOM).fetchone()) is None
        if is_free and min(map(_size_of, (self.path, self.path.with_name(f"{self.path.name}-journal")))) >= size:
            return

        def fill_file(connection: sqlite3.Connection) -> None:
            connection.execute(_END_ROOM)  # of a process that died before it ended it
            connection.execute(_NEW_ROOM)
            pieces = [(_ROOM_PIECE,)] * -(-size // _ROOM_PIECE)
            connection.executemany("INSERT INTO room VALUES (randomblob(?))", pieces)  # a disk may leave zeros out

        def fill_journal(connection: sqlite3.Connection) -> None:
            connection.execute(_NEW_ROOM)  # another process may have ended it
            connection.execute("UPDATE room SET filler = randomblob(?)", (_ROOM_PIECE,))

        self._file.write(fill_file)
        self._file.write(fill_journal)
        self._file.write(lambda connection: connection.execute(_END_ROOM))  # its pages stay in the file, free

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
            has_one = [_participations(connection, name) < most for name in names]
            connection.executemany(
                _COUNT, [(name,) for name, is_let_in in zip(names, has_one, strict=True) if is_let_in]
            )
            connection.execute("UPDATE filter SET releases = releases + 1")
            return has_one

        return self._file.write(write)

    def confirm(self, settled: int) -> None:
        """Refuses where the ledger knows of more debited releases than the file: another copy let somebody in, too.

        Args:
          settled: releases that the ledger knows to have been debited, that of who asks included.

        Raises:
          LedgerRollbackError: the file knows of fewer.
          PrivacyBudgetMismatchError: another filter's file took its place.
          LedgerError: it cannot be read.
        """
        self._file.read(lambda connection: self._most(connection, settled))

    def _own(self, terms: Mapping[str, Any]) -> str:
        """Returns the terms as they stand in the file, which have to be those that were taken up here before."""
        wanted = canonical_json(dict(terms))
        if self._terms not in {None, wanted}:
            raise self._mismatch()
        return wanted

    def _line(self, connection: sqlite3.Connection, wanted: str) -> Mapping[str, Any] | None:
        (stored,) = self._row(connection, terms=str | None)
        if stored not in {None, wanted}:
            raise self._mismatch()
        return None if stored is None else self._read(*self._row(connection, line=str))

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
        row = connection.execute(f"SELECT {', '.join(columns)} FROM filter").fetchone()  # noqa: S608  names of ours
        if row is None or not all(isinstance(value, kind) for value, kind in zip(row, columns.values(), strict=True)):
            raise self._file.broken("no row of a filter")
        return tuple(row)

    def _key(self, connection: sqlite3.Connection) -> bytes:
        (secret,) = self._row(connection, secret=str)
        try:
            key = bytes.fromhex(secret)
        except ValueError:
            key = b""
        if len(key) != _KEY_BYTES:
            raise self._file.broken("no key")
        return key

    def _read(self, line: str) -> Mapping[str, Any]:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise self._file.broken("no line of a ledger")
        return value

    def _mismatch(self) -> PrivacyBudgetMismatchError:
        msg = f"balances {self.path.name}: expected those of this filter, found another's."
        return PrivacyBudgetMismatchError(f"{msg} Give every filter (ledger, component and plan) its own file.")

    def _fault(self, counts: tuple[int, int] | None) -> LedgerError:
        if counts is None:
            return LedgerError(f"balances {self.path.name}: expected a filter's, found none that was paid for.")
        msg = f"balances {self.path.name}: expected {counts[1]} releases or more, as the ledger counts, found "
        advice = (
            "An older copy took the file's place, or two copies go on. Nobody is let in: bring the file itself back."
        )
        return LedgerRollbackError(f"{msg}{counts[0]}. {advice}")

    def __repr__(self) -> str:
        return f"SQLiteBalances({self.path.name!r}, content=<private>)" if hasattr(self, "_file") else "SQLiteBalances"


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _participations(connection: sqlite3.Connection, name: bytes) -> int:
    row = connection.execute("SELECT count FROM taken WHERE unit = ?", (name,)).fetchone()
    return 0 if row is None else int(row[0])


# The file belongs on another disk than the ledger: an anchor that is restored together with it reveals nothing.


_FORMAT = "dpicl-anchor"
_VERSION = 1
_ANCHOR_PAUSE = 0.002
_MAX_BYTES = 1 << 26
"""Bytes of the largest anchor: about 500,000 ledgers."""


class FileAnchor:
    """Remembers the last line of ledgers in a small file of JSON. Opening makes nothing; `FileAnchor.new` does.

    Formal guarantees:
      - What `write` took is on the disk when it returns, and a reader sees the old file or the whole new one.
      - Over all processes of this host, a ledger's line number never goes down, and a line once written never gets
        another hash.

    It protects from an older copy of the ledger, restored by mistake, if it is on another disk. It does not protect
    from somebody who may write to both files, as the process that spends must: against that use `PostgresAnchor` under
    another role than the owner of its table.

    Args:
      path: the file. Its mode and owner stay as they are, as far as the writer may give a file away.
      timeout: seconds to wait for other writers.

    Raises:
      LedgerUnavailableError: the file is missing or cannot be read.
      LedgerError: it is no anchor, or a file of a ledger that is open in this process.
      ConfigurationError: the timeout is out of range.
    """

    def __init__(self, path: str | os.PathLike[str], *, timeout: float = 60.0) -> None:
        self._path = check_path("path", path)
        self._timeout = check_seconds("timeout", timeout)
        self._load()

    @classmethod
    def new(cls, path: str | os.PathLike[str], *, timeout: float = 60.0) -> FileAnchor:
        """Makes an anchor that knows no ledger yet, and opens it.

        Args:
          path: the file, as of the class.
          timeout: seconds to wait, as of the class.

        Raises:
          ConfigurationError: `path` is no path of a file, or the timeout is out of range.
          LedgerError: something is at `path`, or it is a name for a database's log.
          LedgerUnavailableError: it cannot be written there; nothing is left of it.
        """
        where = check_path("path", path)
        fault: LedgerError | None = None
        check_new_name(where, "anchor")
        check_free(where, "anchor")
        try:
            _make(where, _text({}))
        except FileExistsError:
            fault = LedgerError(f"anchor {where}: expected no file there, found one. Open it, or choose another path.")
        except OSError as error:
            fault = _unavailable(where, error)
        if fault is not None:
            raise fault
        return cls(where, timeout=timeout)

    @property
    def description(self) -> str:
        """Public words on where the anchor lives."""
        return f"file {self._path.name}"

    def read(self, ledger_id: str) -> tuple[int, str] | None:
        """Returns number and hash of the last line known of a ledger, or None if none was ever written.

        Raises:
          LedgerUnavailableError: the file is missing or cannot be read.
          LedgerError: it is no anchor.
        """
        return self._load().get(ledger_id)

    def write(self, ledger_id: str, seq: int, head: str) -> None:
        """Remembers line `seq` with hash `head`, durably, unless a later one is known.

        Raises:
          LedgerRollbackError: that line is known with another hash: the ledger has two histories.
          LedgerUnavailableError: the file cannot be locked or written; what it knew it still knows.
          LedgerError: it is no anchor.
        """
        self.write_lines(ledger_id, [(seq, head)])

    def write_lines(self, ledger_id: str, lines: Sequence[tuple[int, str]]) -> None:
        """Does what `write` does with one line after the other, at the cost of one.

        Args:
          ledger_id: random name of the ledger.
          lines: number and hash of each, in their order.
        """
        with self._alone():
            known = self._load()
            last = known.get(ledger_id)
            if last is not None and dict(lines).get(last.seq, last.hash) != last.hash:
                raise LedgerRollbackError(
                    f"ledger {ledger_id}: line {last.seq} is anchored with another hash in {self.description}: the "
                    "ledger has two histories. Nothing is granted; find the copy that was used meanwhile."
                )
            newest = LedgerHead(*lines[-1])
            if last is None or last.seq < newest.seq:
                self._save({**known, ledger_id: newest})
            elif last == newest:  # as at an opening; not for each line of a process that lags
                self._check_replaceable()

    def _load(self) -> dict[str, LedgerHead]:
        check_free(self._path, "anchor")
        fault: LedgerError
        try:
            data = read_plain(self._path, _MAX_BYTES)
        except ConfigurationError as error:
            fault = LedgerError(f"anchor: {error}")
        except OSError as error:
            fault = _unavailable(self._path, error)
        else:
            return _parsed(data, self._path)
        raise fault

    def _save(self, known: dict[str, LedgerHead]) -> None:
        text = _text(known)
        if len(text) > _MAX_BYTES:
            raise LedgerError(
                f"anchor {self._path}: expected at most {_MAX_BYTES} bytes. Make another for further ledgers."
            )
        try:
            _replace(self._path, text)
            sync_folder(self._path)
        except OSError as error:
            fault = _unavailable(self._path, error)
        else:
            return
        raise fault

    def _check_replaceable(self) -> None:
        """Refuses a file that a new line could not replace, before one is charged."""
        may = os.access(self._path.parent, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)
        found = "" if may else "a folder that this process may not write"
        with contextlib.suppress(OSError):  # it went away: the next line says so
            folder, owner = self._path.parent.stat(), self._path.stat().st_uid
            if folder.st_mode & stat.S_ISVTX and os.geteuid() not in {0, folder.st_uid, owner}:
                found = "a file of another owner in a folder whose files their owners alone may replace"
        if not found and is_mounted_alone(self._path):
            found = "a file that is mounted alone"
        if found:
            raise LedgerUnavailableError(
                f"anchor {self._path}: expected a file that can be replaced, found {found}. Nothing is granted. "
                "Keep it in a folder that this process may write, and mount the folder."
            )

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Holds the file's lock, which other writers wait for; a writer that dies loses it."""
        end = time.monotonic() + self._timeout
        while True:
            with self._opened() as number:
                # Another process put a new file in its place meanwhile: the lock of the old one is worth nothing.
                if self._lock(number):
                    owner = this_process()
                    try:
                        yield
                    finally:
                        if this_process() == owner:
                            _unlock(number)
                    return
            if time.monotonic() > end:
                raise LedgerUnavailableError(f"anchor {self._path}: locked by another process. Nothing is granted.")
            time.sleep(_ANCHOR_PAUSE)

    def _lock(self, number: int) -> bool:
        """Takes the lock of the open file unless somebody holds it; returns whether it is the anchor's, and ours."""
        try:
            _flock(number)
            return os.path.samestat(os.fstat(number), self._path.stat())
        except BlockingIOError:
            return False
        except OSError as error:
            raise _unavailable(self._path, error) from None

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        check_free(self._path, "anchor")
        try:
            number = os.open(self._path, os.O_RDWR)
        except OSError as error:
            raise _unavailable(self._path, error) from None
        try:
            yield number
        finally:
            os.close(number)

    def __repr__(self) -> str:
        return f"FileAnchor({str(self._path)!r})"


def _flock(number: int) -> None:
    try:
        import fcntl
    except ModuleNotFoundError:
        raise ConfigurationError("anchor: expected a system with file locks (fcntl). Use PostgresAnchor.") from None
    fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _unlock(number: int) -> None:
    """Gives the lock back: closing alone leaves it with a child that was forked meanwhile."""
    import fcntl

    fcntl.flock(number, fcntl.LOCK_UN)


def _make(path: Path, text: str) -> None:
    """Makes a file, whole or not at all: what is half of an anchor would stand in the way of another try."""
    with path.open("x", encoding="ascii", newline="\n") as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            sync_folder(path)
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def _replace(path: Path, text: str) -> None:
    """Puts a file in place of the one at `path`, with its mode, and its group and owner where they may be given."""
    old = path.stat()
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        with part.open("x", encoding="ascii", newline="\n") as file:
            file.write(text)
            file.flush()
            for user, group in ((-1, old.st_gid), (old.st_uid, -1)):
                with contextlib.suppress(PermissionError):  # only root gives a file to another owner
                    os.fchown(file.fileno(), user, group)
            os.fchmod(file.fileno(), stat.S_IMODE(old.st_mode))
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _text(known: dict[str, LedgerHead]) -> str:
    """Returns the file's text. Its digest tells a flipped bit, which would forget a ledger whose name it hits."""
    ledgers = {name: list(head) for name, head in known.items()}
    state = {"format": _FORMAT, "version": _VERSION, "digest": _digest(ledgers), "ledgers": ledgers}
    return json.dumps(state, indent=1) + "\n"


def _digest(ledgers: object) -> str:
    return hashlib.sha256(canonical_json(ledgers).encode("utf-8", "replace")).hexdigest()


def _parsed(data: bytes, path: Path) -> dict[str, LedgerHead]:
    try:
        state: Any = json.loads(data)
        ledgers = state["ledgers"]
        known = {str(name): LedgerHead(*line) for name, line in ledgers.items()}
        expected = {"format": _FORMAT, "version": _VERSION, "digest": _digest(ledgers), "ledgers": ledgers}
        lines_are_sound = all(type(head.seq) is int and type(head.hash) is str for head in known.values())
        sound = state == expected and lines_are_sound
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        sound = False
    if sound:
        return known
    raise LedgerError(f"anchor {path}: expected an anchor of version {_VERSION}, found something else. Restore it.")


def _unavailable(path: Path, error: OSError) -> LedgerUnavailableError:
    reason = error.strerror or type(error).__name__
    return LedgerUnavailableError(f"anchor {path}: cannot be used now ({reason}). Nothing is granted.")
