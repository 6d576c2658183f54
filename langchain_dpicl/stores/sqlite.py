"""Stores ledgers in a SQLite file, for the threads and processes of one host."""

# SQLite's lock admits one writer at a time, and every commit is on the disk before it returns. A file restored to an
# older copy is a valid ledger: only an anchor in another place can tell.

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from langchain_dpicl.exceptions import LedgerError
from langchain_dpicl.privacy._validate import check_path, check_positive
from langchain_dpicl.privacy.amounts import check_name
from langchain_dpicl.privacy.stores import LedgerHeader, LedgerRecord, LedgerTransaction
from langchain_dpicl.stores._connected import Connected
from langchain_dpicl.stores._rows import COLUMNS, Head, View, header_of, header_text, row_of
from langchain_dpicl.stores._sqlite_file import errors_of, make_file, remove_file, sync_folder
from langchain_dpicl.stores._sqlite_link import Link, opened
from langchain_dpicl.stores._sqlite_logs import check_new_name

_LINES = f"SELECT {', '.join(COLUMNS)} FROM lines WHERE ledger = ? AND seq > ? ORDER BY seq"  # noqa: S608  our columns
_ADD = f"INSERT INTO lines (ledger, {', '.join(COLUMNS)}) VALUES (?{', ?' * len(COLUMNS)})"  # noqa: S608  our columns
_HEAD = (
    "SELECT ledgers.seq, ledgers.head, lines.hash FROM ledgers "
    "LEFT JOIN lines ON lines.ledger = ledgers.id AND lines.seq = ledgers.seq WHERE ledgers.id = ?"
)
_OWNER = "SELECT ledgers.id, ledgers.name FROM bindings JOIN ledgers ON ledgers.id = ledger WHERE dataset = ?"
_BIND = "INSERT INTO bindings (dataset, ledger) VALUES (?, ?)"
_BOUND = "SELECT json_extract(body, '$.dataset_id'), ledger FROM lines WHERE kind = 'bind'"
_BINDINGS = "SELECT dataset, ledger FROM bindings"


class SQLiteStore(Connected):
    """One ledger of a SQLite file. Opening makes nothing; `SQLiteStore.new` does.

    A store that was opened does not begin a ledger, even where there is room for one: only one made by `new` does, or
    one whose `may_create` was set on purpose, to finish what a stopped process began.

    Threads may share it. A child forked outside a transaction opens the file for itself; one forked inside is refused.

    Formal guarantees:
      - When a transaction ends well its lines are on the disk: the write-ahead log is synchronised at each commit.
      - A transaction holds the file's only write lock from its start, so nothing is decided on stale lines.
      - What is no ledger's file, broken, of a newer version or on a network file system is refused at opening. A path
        that names another file than before is opened anew, with all checks.
      - If the disk fails in a commit, a `LedgerUnavailableError` is raised, and the lines may stand.

    Copy the file by `backup`: a copy of the file alone lacks what is still in its log. A process that holds a ledger
    must not open, copy or hash the file or its log itself: on POSIX systems that drops its locks, and another process
    may then remove the log that it writes to. Where that happens the next call is refused, and nothing is granted.

    Args:
      path: the file; links to it are resolved, so that every name of it is the same ledger.
      name: which of the file's ledgers; they do not see each other.
      timeout: seconds to wait for other processes; many that share a ledger need the 60.

    Attributes:
      may_create: whether `create` may write a header.

    Raises:
      LedgerError: it is no ledger's file, or holds no ledger of that name.
      LedgerUnavailableError: it is missing, locked or cannot be read.
      ConfigurationError: name or timeout is unusable.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     with SQLiteStore.new(folder + "/budget.db") as store:
      ...         store.durable, store.description
      (True, "SQLite file budget.db, ledger 'budget'")
    """

    durable = True

    def __init__(self, path: str | os.PathLike[str], *, name: str = "budget", timeout: float = 60.0) -> None:
        self._path = check_path("path", path)
        self._name = check_name("name", name)
        self._timeout = check_positive("timeout", timeout)
        self.may_create = False
        self._number = 0
        self._view: View | None = None
        self._link = Link(self._path, timeout=self._timeout, check=self._find)

    @classmethod
    def new(cls, path: str | os.PathLike[str], *, name: str = "budget", timeout: float = 60.0) -> SQLiteStore:
        """Makes room for a ledger, in a new file or beside the ledgers of an existing one, and opens it.

        It has no header until `Budget(epsilon=, delta=, store=...)` writes its limits.

        Args:
          path: the file, as of the class.
          name: which ledger.
          timeout: seconds to wait, as of the class.

        Raises:
          LedgerError: a ledger of that name is there, or the file is no ledger's file.
          LedgerUnavailableError: the file cannot be made or written.
          ConfigurationError: name or timeout is unusable.
        """
        where = check_path("path", path)
        check_name("name", name)
        wait = check_positive("timeout", timeout)
        check_new_name(where, "ledger")
        make_file(where, timeout=wait)
        with contextlib.closing(opened(where, timeout=wait)) as connection, errors_of(where):
            added = connection.execute("INSERT OR IGNORE INTO ledgers (name) VALUES (?)", (name,)).rowcount
        if not added:
            advice = "Open it, or give the new one another name."
            raise LedgerError(f"ledger {where}: expected no ledger named {name!r}, found one. {advice}")
        store = cls(where, name=name, timeout=timeout)
        store.may_create = True
        return store

    @property
    def path(self) -> Path:
        """The file, links resolved."""
        return self._path

    @property
    def name(self) -> str:
        """Which of the file's ledgers it is."""
        return self._name

    @property
    def description(self) -> str:
        """Public words on where the ledger lives; no folder, which may name a person."""
        return f"SQLite file {self._path.name}, ledger {self._name!r}"

    def create(self, header: LedgerHeader) -> LedgerHeader:
        """Writes `header` if there is none yet; returns the one that stands (the first writer wins).

        Raises:
          LedgerError: there is none, and the store was opened and not made: its header may have been lost.
        """
        with self._link.writing():
            known = self._rows().header()
            if known is None:
                self._check_may_create()
                self._rows().begin(header)
        if known is None:
            self._link.settle()  # who the ledger is must not be in the log alone, which a careless copy leaves behind
        return known or header

    def _check_may_create(self) -> None:
        if not self.may_create:
            raise LedgerError(
                f"ledger {self._path}: expected a ledger with limits, found only room for one ({self._name!r}), and "
                "opening begins none. Restore a whole copy if limits were there; if its making stopped half-way, "
                "`dpicl ledger create` finishes it."
            )

    def header(self) -> LedgerHeader | None:
        """Returns the header, or None before `create`."""
        with self._link.reading():
            return self._rows().header()

    def records(self, after: int = 0) -> Sequence[LedgerRecord]:
        """Returns every line with `seq > after`, as they stand at one moment."""
        with self._link.reading():
            return View(self._rows()).records(after)

    def head(self) -> tuple[int, str]:
        """Returns the number and hash of the last line, or 0 and the header's digest."""
        with self._link.reading():
            return self._rows().head()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[LedgerTransaction]:
        """Opens the ledger for its only writer, after waiting for its turn; keeps lines only if the block ends well."""
        with self._link.writing():
            rows = self._rows()
            if rows.header() is None:
                raise LedgerError("ledger: expected a header, found none. Call create(header) first.")
            view = View(rows)
            try:
                yield view
            finally:
                view.alive = False

    def backup(self, path: str | os.PathLike[str]) -> None:
        """Copies the whole file as it stands now, all its ledgers, to a new file, and checks the copy.

        A restored backup gives back what was spent after it: only an anchor tells.

        Args:
          path: a file that is not there yet.

        Raises:
          ConfigurationError: `path` is no path of a file.
          LedgerError: something is at `path`, or inside a transaction.
          LedgerUnavailableError: it cannot be written.
        """
        target = check_path("path", path)
        self._link.check_idle()
        check_new_name(target, "backup")
        if not make_file(target, timeout=self._timeout):
            raise LedgerError(f"backup {target}: expected no file there, found one. Choose another path.")
        try:
            with contextlib.closing(opened(target, timeout=self._timeout)) as copy, errors_of(target):
                self._link.copy_to(copy)
            opened(target, timeout=self._timeout).close()
            sync_folder(target)
        except BaseException:
            remove_file(target)
            raise

    def close(self) -> None:
        """Moves the log into the file and closes it; the store cannot be used afterwards. Again changes nothing."""
        self._link.close()

    def _find(self, connection: sqlite3.Connection) -> None:
        """Finds the ledger in its file."""
        with errors_of(self._path):
            known = dict(connection.execute("SELECT name, id FROM ledgers").fetchall())
        if self._name not in known:
            names = sorted(map(str, known))
            advice = "Check the name; a new ledger is made on purpose (SQLiteStore.new, dpicl ledger create)."
            raise LedgerError(f"ledger {self._path}: expected a ledger named {self._name!r}, found {names}. {advice}")
        self._number = known[self._name]
        self._check_bindings(connection)

    def _check_bindings(self, connection: sqlite3.Connection) -> None:
        """Refuses a file whose bindings are not those of its lines, for all its ledgers."""
        with errors_of(self._path):
            connection.execute("BEGIN")
            bound, stored = (set(connection.execute(query)) for query in (_BOUND, _BINDINGS))
            connection.execute("COMMIT")
        if stored <= bound and {dataset for dataset, _ in stored} == {dataset for dataset, _ in bound}:
            return
        raise LedgerError(
            f"ledger {self._path}: expected for each data set the ledger that has it, found other bindings than its "
            "lines say. Nothing is granted; restore an untouched copy."
        )

    def _rows(self) -> _Rows:
        return _Rows(self._link, self._number)

    def __repr__(self) -> str:
        return f"SQLiteStore({str(self._path)!r}, name={self._name!r})"


class _Rows:
    """The rows of one ledger, inside `Link.reading` or `Link.writing`."""

    def __init__(self, link: Link, number: int) -> None:
        self._link = link
        self._number = number
        self._known: Head | None = None  # the last line of a transaction, which nobody else can move

    def header(self) -> LedgerHeader | None:
        return header_of(*self._one("SELECT header, digest FROM ledgers WHERE id = ?"))

    def begin(self, header: LedgerHeader) -> None:
        command = "UPDATE ledgers SET header = ?, digest = ?, head = ? WHERE id = ?"
        self._link.write(command, header_text(header), header.digest, header.digest, self._number)

    def head(self) -> Head:
        if self._known is not None:
            return self._known
        seq, head, last = self._one(_HEAD)
        if type(seq) is not int or not isinstance(head, str | None) or (seq and last != head):
            raise LedgerError(f"ledger {self._link.path}: its last line is gone or changed. Restore an untouched copy.")
        return Head(seq, head or "")

    def lines(self, after: int) -> Iterable[Sequence[Any]]:
        return self._link.ask(_LINES, self._number, after)

    def add(self, record: LedgerRecord) -> None:
        self._link.write(_ADD, self._number, *row_of(record))
        self._link.write("UPDATE ledgers SET seq = ?, head = ? WHERE id = ?", record.seq, record.hash, self._number)
        self._known = Head(record.seq, record.hash)

    def bind(self, dataset_id: str) -> str | None:
        for number, name in self._link.ask(_OWNER, dataset_id):
            return None if number == self._number else str(name)
        self._link.write(_BIND, dataset_id, self._number)
        return None

    def _one(self, query: str) -> tuple[Any, ...]:
        rows = self._link.ask(query, self._number)
        if not rows:
            raise LedgerError(f"ledger {self._link.path}: gone from its file. Restore an untouched copy.")
        return rows[0]
