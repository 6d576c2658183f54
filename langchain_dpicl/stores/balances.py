"""Stores the balances of an individual filter in a SQLite file, for the processes of one host."""

# The file is as private as the documents: it shows how often each unit was asked about.

from __future__ import annotations

import json
import os
import secrets
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from langchain_dpicl._opaque import Opaque
from langchain_dpicl.exceptions import (
    ConfigurationError,
    LedgerError,
    LedgerRollbackError,
    PrivacyBudgetMismatchError,
)
from langchain_dpicl.privacy._validate import check_path, check_positive
from langchain_dpicl.privacy.accounting.events import canonical_json
from langchain_dpicl.stores.sqlite_per_call import FileKind, PerCallFile

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
_COUNT = "INSERT INTO taken (unit, count) VALUES (?, 1) ON CONFLICT (unit) DO UPDATE SET count = count + 1"


def _tables_of_a_new_file() -> str:
    # The key is drawn here, where a file is made, so that no variable holds it.
    return f"{_TABLES} INSERT INTO filter (id, secret) VALUES (1, '{secrets.token_hex(_KEY_BYTES)}');"  # noqa: S608  hex


_KIND = FileKind(
    word="balances",
    application_id=0x64704231,  # "dpB1"
    version=1,
    tables=_tables_of_a_new_file,
    repair="Nothing is granted. An older copy is refused as well: declare another component, which pays again.",
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
        timeout = check_positive("timeout", timeout)
        self._terms: str | None = None
        self._file = PerCallFile(check_path("path", path), _KIND, timeout=timeout)

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


def _participations(connection: sqlite3.Connection, name: bytes) -> int:
    row = connection.execute("SELECT count FROM taken WHERE unit = ?", (name,)).fetchone()
    return 0 if row is None else int(row[0])
