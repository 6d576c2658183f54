"""Stores ledgers in a SQLite file, for the threads, forks and processes of one host, whose writers take turns."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from langchain_dpicl._opaque import this_process
from langchain_dpicl._plain_files import check_path
from langchain_dpicl.exceptions import LedgerError, LedgerUnavailableError
from langchain_dpicl.privacy._validate import check_name
from langchain_dpicl.privacy.ledger.store import LedgerHeader, LedgerRecord, LedgerTransaction
from langchain_dpicl.stores.rows import (
    COLUMNS,
    ON_PURPOSE,
    Connected,
    LedgerHead,
    RowTransaction,
    check_bindings,
    check_seconds,
    header_of,
    header_text,
    record_of,
    row_of,
)
from langchain_dpicl.stores.sqlite_file import (
    FileIdentity,
    OpenFiles,
    check_new_name,
    check_no_log,
    check_pages,
    close_connection,
    errors_of,
    file_identity,
    log_of,
    make_file,
    open_file,
    remove_file,
    sync_name,
)

# SQLite's own waiting polls, and of many writers some wait for seconds. The queue is a courtesy: SQLite's lock decides
# who writes, so that a queue that nobody can enter, or that was removed, costs fairness and nothing else.


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
        home = this_process()
        try:
            yield
        finally:
            if is_held and this_process() == home:
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
        except (OSError, RuntimeError):  # a folder that this user may not write to, no such locks, no room for a thread
            self._rest_until = time.monotonic() + _PAUSE
            return False
        return True

    def _wait(self, number: int, seconds: float) -> bool:
        is_held = False
        with self._changed:
            try:
                self._is_wanted = True
                if not self._is_waiting:
                    threading.Thread(target=self._take, args=(number, self._changed), daemon=True).start()
                    self._is_waiting = True  # after that; the thread clears it, under this lock
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


# A fork while a file is open copies SQLite's table of locks into the child, where every connection then relies on locks
# that the child does not hold; the parent may also remove the log that the child writes to. So each file is closed
# before a fork, and a file that could not be closed is refused in the child. A process that opens and closes a file by
# other means drops its own locks on it. Another process may then remove the log under an open connection, which
# continues to write to a file without a name. So the log is checked before and after each commit; `sqlite_file`
# decides what happens to a removed log.


class SQLiteConnection:
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
        self.place: FileIdentity | None = None
        self.held: OpenFiles | None = None
        self._check = check
        self._queue = WriterQueue(path)
        self._failures = 0  # of waits for the disk
        self._mended = 0  # how many of them cannot matter any more
        self._is_writing = False
        self._is_closed = False
        self._home = this_process()
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
        """Holds the file's only write lock; what is written is visible if the block ends well, durable after `sync`."""
        with self.lock:
            self.check_idle()
            self._ready()
            with self._queue.turn(self.timeout / 2):
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

    def sync(self, is_there: Callable[[], bool]) -> None:
        """Waits for the disk, without the lock; `is_there` says in a transaction whether what has to last is there.

        Raises:
          LedgerUnavailableError: it is not there, the disk failed, or another file or log is in its place.
        """
        while True:
            with self.reading():
                held, is_visible = self.held, is_there()
            if held is None or not is_visible:
                raise LedgerUnavailableError(
                    f"ledger {self.path}: expected the lines that were written, found them gone: another file took its "
                    "place. Nothing is granted."
                )
            self._wait_for_disk(held)
            with self.lock:
                if held is not self.held:  # closed meanwhile, for a fork: the file is opened anew
                    continue
                if not held.is_whole:
                    self._give_up()
                    raise self._log_error()
                return

    def _wait_for_disk(self, held: OpenFiles) -> None:
        fault, failures = "", self._failures
        try:
            if self._mended < failures:
                self._rescue()
            # Also after that: an old beginning of a log that was cut would be put over the file when power fails.
            held.sync()
        except OSError as error:
            # The system reports a failed write once. What the log holds from there on may miss a part before it, so
            # nothing counts as durable until all of it was moved into the file.
            self._failures += 1
            fault = error.strerror or type(error).__name__
        else:
            if self._failures != failures:  # reported to another thread, and only once
                fault = os.strerror(errno.EIO)
        if fault:
            raise LedgerUnavailableError(
                f"ledger {self.path}: expected a disk that keeps what is written, found: {fault}. Nothing is granted; "
                "what the ledger holds stays charged. Look at the disk; then try again."
            )
        self._mended = failures

    def _rescue(self) -> None:
        """Moves the whole log into the file."""
        with self.lock:
            self.check_idle()
            connection = self._ready()
            with errors_of(self.path):
                is_busy = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        if is_busy:
            raise OSError(errno.EBUSY, "others use its log")

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

    def check_pages(self) -> None:
        """Reads all of the file, and refuses a broken one."""
        with self.lock:
            self.check_idle()
            with errors_of(self.path):
                check_pages(self._ready(), self.path)

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
            self._queue.close()
            self._drop()

    def _ready(self) -> sqlite3.Connection:
        """Returns this process's connection to the file that the path names now."""
        if self._is_closed:
            raise LedgerError(f"ledger {self.path}: expected an open store, found a closed one. Open it again.")
        if self.connection is None:
            self._home = this_process()
        connection = self._own() if self.connection is not None else self._open()
        if file_identity(self.path) != self.place:
            self._give_up()
            connection = self._open()
        self._check_log()
        if connection.in_transaction:  # left by a stop between two lines of ours
            self._roll_back()
        return self.connection or self._open()

    def _open(self) -> sqlite3.Connection:
        self.place = file_identity(self.path)
        connection = open_connection(self.path, timeout=self.timeout)
        try:
            self._check(connection)
            with errors_of(self.path):
                connection.execute("PRAGMA synchronous = NORMAL")  # `sync` waits for the disk, without SQLite's lock
            self.held = OpenFiles(self.path, self.place)
        except BaseException:
            connection.close()
            raise
        self.connection = connection
        return connection

    def _check_log(self) -> None:
        """Gives the file up if the log beside it is not the open one, or if another file is in its place."""
        held = self.held
        if self.connection is None or (held is not None and held.is_whole):
            return
        self._give_up()
        raise self._log_error()

    def _log_error(self) -> LedgerUnavailableError:
        """Returns the error of a log that is not the one beside the file; the caller raises it."""
        return LedgerUnavailableError(
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
        if self._home != this_process():
            raise _forked_error(self.path)
        return self.connection

    def _run(self, statement: str) -> None:
        connection = self._own()
        with errors_of(self.path):
            connection.execute(statement)

    def _roll_back(self) -> None:
        """Undoes what was not committed; a connection that cannot even do that is given up."""
        if self.connection is None or self._home != this_process():
            return
        try:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
        except sqlite3.Error:
            self._drop()

    def _drop(self) -> None:
        """Closes the connection, unless it is a parent's: that would harm it."""
        if self._home == this_process():
            try:
                if self.connection is not None:
                    close_connection(self.connection, self.held)
            finally:  # not before: a thread that opens the file meanwhile would share what is being left
                self.connection = None
                self.held = None

    def leave_removed_log(self, path: Path, place: FileIdentity, *, end: float) -> None:
        """Closes the file if it is the one at `path` and its log was removed; waits until `end` for a thread there."""
        files = self.held  # which another thread may be leaving just now: the last one to close it removes the log
        if self.connection is None or self.place != place or files is None or files.log == log_of(path):
            return
        while self.held is files:  # a fork keeps the lock when it has closed the file, and may wait for the caller's
            if self.lock.acquire(timeout=0.01):
                try:
                    if self.held is files:
                        self._drop()
                    return
                finally:
                    self.lock.release()
            if time.monotonic() > end:
                found = "its log was removed while another thread was using it"
                raise LedgerUnavailableError(f"ledger {path}: {found}. Nothing is granted; try again.")

    def before_fork(self) -> bool:
        """Closes the file until it is used again, unless it is in use; returns whether `lock` was taken."""
        is_locked = self.lock.acquire(timeout=self.timeout)
        if is_locked and self.connection is not None and not self.connection.in_transaction:
            self._drop()
        return is_locked

    def in_child(self, *, was_at_rest: bool) -> None:
        """Forgets the threads of the parent; a connection left open, or being opened, is kept and refused."""
        self.lock = threading.RLock()
        self._queue.close()
        if self.connection is not None or not was_at_rest:
            _LEFT_OPEN.append(self)

    def __del__(self) -> None:
        if self.__dict__.get("connection") is not None:
            self._drop()


def open_connection(path: Path, *, timeout: float) -> sqlite3.Connection:
    """Opens a ledger's file; see `open_file`.

    Refuses where this process was forked while the file was in use, and where it still uses a log that was removed:
    SQLite would take that one for the log of the new connection.
    """
    check_no_log(path, "ledger")
    place = file_identity(path)
    if place in [link.place for link in _LEFT_OPEN]:
        raise _forked_error(path)
    end = time.monotonic() + timeout
    for link in _links():
        link.leave_removed_log(path, place, end=end)
    return open_file(path, timeout=timeout)


def _forked_error(path: Path) -> LedgerError:
    return LedgerError(
        f"ledger {path}: expected a process that opened it itself, found one forked while it was in use. Fork outside "
        "of ledger transactions, or start workers by spawn."
    )


_LINKS: weakref.WeakValueDictionary[int, SQLiteConnection] = weakref.WeakValueDictionary()
_LEFT_OPEN: list[SQLiteConnection] = []


class _ForkGuard(threading.local):
    """The links that this thread holds for the fork that it makes; two threads may fork at once."""

    def __init__(self) -> None:
        self.at_rest: list[SQLiteConnection] = []


_FORKING = _ForkGuard()


def _links() -> list[SQLiteConnection]:
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


# SQLite's lock admits one writer at a time. It is given up when a commit is visible, and the log is synchronised after
# that, once for all who wrote to it meanwhile: its frames follow each other, so whatever is on the disk is a beginning
# of what is visible. A file restored to an older copy is a valid ledger: only an anchor in another place can tell.


_LINES = f"SELECT {', '.join(COLUMNS)} FROM lines WHERE ledger = ? AND seq > ? AND seq <= ? ORDER BY seq"  # noqa: S608  our columns
_ADD = f"INSERT INTO lines (ledger, {', '.join(COLUMNS)}) VALUES (?{', ?' * len(COLUMNS)})"  # noqa: S608  our columns
_HASH = "SELECT hash FROM lines WHERE ledger = ? AND seq = ?"
_HEAD = (
    "SELECT ledgers.seq, ledgers.head, lines.hash FROM ledgers "
    "LEFT JOIN lines ON lines.ledger = ledgers.id AND lines.seq = ledgers.seq WHERE ledgers.id = ?"
)
_OWNER = "SELECT ledgers.id, ledgers.name FROM bindings JOIN ledgers ON ledgers.id = ledger WHERE dataset = ?"
_BIND = "INSERT INTO bindings (dataset, ledger) VALUES (?, ?)"
_NAMED = "INDEXED BY lines_named WHERE kind IN ('bind', 'seal', 'snapshot')"
_BOUND = f"SELECT json_extract(body, '$.dataset_id'), ledger FROM lines {_NAMED} AND kind = 'bind'"  # noqa: S608  ours
_SNAPSHOT = f"SELECT max(seq) FROM lines {_NAMED} AND kind = 'snapshot' AND ledger = ?"  # noqa: S608  our words
_UP_TO = (
    f"SELECT {', '.join(COLUMNS)} FROM lines {_NAMED} "  # noqa: S608  our columns
    "AND (kind <> 'snapshot' OR seq = ?2) AND ledger = ?1 AND seq <= ?2 ORDER BY seq"
)
_BINDINGS = "SELECT dataset, ledger FROM bindings"


class SQLiteStore(Connected):
    """One ledger of a SQLite file. Opening makes nothing; `SQLiteStore.new` does.

    A store that was opened does not begin a ledger, even where there is room for one: only one made by `new` does, or
    one whose `may_create` was set on purpose, to finish what a stopped process began.

    Threads may share it. A child forked outside a transaction opens the file for itself; one forked inside is refused.

    Formal guarantees:
      - When a transaction ends well its lines are on the disk, unless it leaves that to `flush`.
      - A transaction holds the file's only write lock from its start, so nothing is decided on stale lines.
      - What is no ledger's file, of another version or on a network file system is refused at opening. So is a broken
        file, up to 16 MiB; `check` and `backup` read all. A path that names another file than before is opened anew,
        with all checks.
      - If the disk fails in a commit or in `flush`, a `LedgerUnavailableError` is raised, and the lines may stand.

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
        self._timeout = check_seconds("timeout", timeout)
        self.may_create = False
        self._number = 0
        self._link = SQLiteConnection(self._path, timeout=self._timeout, check=self._find)

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
        wait = check_seconds("timeout", timeout)
        check_new_name(where, "ledger")
        make_file(where, timeout=wait)
        with contextlib.closing(open_connection(where, timeout=wait)) as connection, errors_of(where):
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
    def timeout(self) -> float:
        """Seconds to wait for other processes."""
        return self._timeout

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
            self._link.sync(lambda: self._rows().header() == header)
            self._link.settle()  # who the ledger is must not be in the log alone, which a careless copy leaves behind
        return known or header

    def _check_may_create(self) -> None:
        if not self.may_create:
            raise LedgerError(
                f"ledger {self._path}: expected a ledger with limits, found an empty entry ({self._name!r}); "
                "opening sets no limits. Restore a whole copy if limits were there; if creating it was interrupted, "
                "run `dpicl ledger create` again."
            )

    def header(self) -> LedgerHeader | None:
        """Returns the header, or None before `create`."""
        with self._link.reading():
            return self._rows().header()

    def records(self, after: int = 0, *, limit: int | None = None) -> Sequence[LedgerRecord]:
        """Returns the lines with `seq > after`, at most `limit` of them, as they stand at one moment."""
        with self._link.reading():
            return RowTransaction(self._rows()).records(after, limit=limit)

    def head(self) -> tuple[int, str]:
        """Returns the number and hash of the last line, or 0 and the header's digest."""
        with self._link.reading():
            return self._rows().head()

    def last_snapshot(self) -> Sequence[LedgerRecord]:
        """Returns the last snapshot after the lines before it that bind and seal, or nothing."""
        with self._link.reading():
            return self._rows().last_snapshot()

    def check(self) -> None:
        """Reads all of the file.

        Raises:
          LedgerError: its pages do not fit together.
        """
        self._link.check_pages()

    @contextlib.contextmanager
    def transaction(self, *, flush: bool = True) -> Iterator[LedgerTransaction]:
        """Opens the ledger for its only writer, after waiting for its turn; keeps lines only if the block ends well.

        Args:
          flush: wait until the lines are on the disk; otherwise they are visible only, and `flush` waits.
        """
        with self._link.writing():
            rows = self._rows()
            if rows.header() is None:
                raise LedgerError("ledger: expected a header, found none. Call create(header) first.")
            view = RowTransaction(rows)
            try:
                yield view
            finally:
                view.alive = False
            last = rows.head()
        if flush:
            self.flush(*last)

    def flush(self, seq: int, head: str) -> None:
        """Waits until a line, and all before it, are on the disk; other writers go on meanwhile.

        Args:
          seq: number of the line.
          head: its hash.

        Raises:
          LedgerUnavailableError: the ledger does not hold the line, or the disk failed.
        """
        self._link.sync(lambda: self._rows().holds(seq, head))

    def backup(self, path: str | os.PathLike[str]) -> None:
        """Copies the whole file as it stands now, all its ledgers, to a new file, and checks the copy.

        A restored backup gives back what was spent after it: only an anchor tells.

        Args:
          path: a file that is not there yet.

        Raises:
          ConfigurationError: `path` is no path of a file.
          LedgerError: something is at `path`, inside a transaction, or this file is broken.
          LedgerUnavailableError: it cannot be written.
        """
        target = check_path("path", path)
        self._link.check_idle()
        check_new_name(target, "backup")
        if not make_file(target, timeout=self._timeout):
            raise LedgerError(f"backup {target}: expected no file there, found one. Choose another path.")
        try:
            with contextlib.closing(open_connection(target, timeout=self._timeout)) as copy:
                with errors_of(target):
                    self._link.copy_to(copy)
                with errors_of(self._path):  # page by page the copy is what was read: its faults are those of the file
                    check_pages(copy, self._path)
            open_connection(target, timeout=self._timeout).close()
            sync_name(target)
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
            found = f"expected a ledger named {self._name!r}, found {names}"
            raise LedgerError(f"ledger {self._path}: {found}. Check the name; {ON_PURPOSE}")
        self._number = known[self._name]
        self._check_bindings(connection)

    def _check_bindings(self, connection: sqlite3.Connection) -> None:
        """Refuses a file whose bindings are not those of its lines, for all its ledgers."""
        with errors_of(self._path):
            connection.execute("BEGIN")
            bound, stored = (connection.execute(query).fetchall() for query in (_BOUND, _BINDINGS))
            connection.execute("COMMIT")
        check_bindings(stored, bound, f"ledger {self._path}")

    def _rows(self) -> _SQLiteRows:
        return _SQLiteRows(self._link, self._number)

    def __repr__(self) -> str:
        return f"SQLiteStore({str(self._path)!r}, name={self._name!r})"


class _SQLiteRows:
    """The rows of one ledger, inside `SQLiteConnection.reading` or `SQLiteConnection.writing`."""

    def __init__(self, link: SQLiteConnection, number: int) -> None:
        self._link = link
        self._number = number
        self._known: LedgerHead | None = None  # the last line of a transaction, which nobody else can move

    def header(self) -> LedgerHeader | None:
        return header_of(*self._one("SELECT header, digest FROM ledgers WHERE id = ?"))

    def begin(self, header: LedgerHeader) -> None:
        command = "UPDATE ledgers SET header = ?, digest = ?, head = ? WHERE id = ?"
        self._link.write(command, header_text(header), header.digest, header.digest, self._number)

    def head(self) -> LedgerHead:
        if self._known is not None:
            return self._known
        seq, head, last = self._one(_HEAD)
        if type(seq) is not int or not isinstance(head, str | None) or (seq and last != head):
            raise LedgerError(f"ledger {self._link.path}: its last line is gone or changed. Restore an untouched copy.")
        return LedgerHead(seq, head or "")

    def holds(self, seq: int, head: str) -> bool:
        """Whether line `seq` has the hash `head`; line 0 is the header."""
        if seq == 0:
            header = self.header()
            return header is not None and header.digest == head
        return self._link.ask(_HASH, self._number, seq) == [(head,)]

    def last_snapshot(self) -> list[LedgerRecord]:
        """Returns the last snapshot after the lines before it that bind and seal, or nothing."""
        ((last,),) = self._link.ask(_SNAPSHOT, self._number)
        return [] if last is None else [record_of(row) for row in self._link.ask(_UP_TO, self._number, last)]

    def lines(self, after: int, last: int) -> Iterable[Sequence[Any]]:
        return self._link.ask(_LINES, self._number, after, last)

    def add(self, record: LedgerRecord) -> None:
        self._link.write(_ADD, self._number, *row_of(record))
        self._link.write("UPDATE ledgers SET seq = ?, head = ? WHERE id = ?", record.seq, record.hash, self._number)
        self._known = LedgerHead(record.seq, record.hash)

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
