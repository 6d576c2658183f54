"""Connects to PostgreSQL with transactions that time out, survive lost connections and show no password."""

# Statements of a transaction go out in one text, one round trip: with the driver's pipelines, servers do not end a
# session that idles in a transaction. What the driver raises is read and dropped, since its messages and frames may
# hold the password; errors that leave this module have our own words only.

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeVar

import psycopg
from psycopg import conninfo as conninfos
from psycopg import errors

from langchain_dpicl.exceptions import ConfigurationError, LedgerError, LedgerUnavailableError
from langchain_dpicl.privacy._validate import check_positive

T = TypeVar("T")
Query = tuple[bytes, Sequence[Any]]
Answers = list[list[tuple[Any, ...]]]

# Local to each transaction, so that poolers and defaults of roles or databases do not matter.
_SETTINGS = b"""SELECT set_config('lock_timeout', %s, true), set_config('statement_timeout', %s, true),
set_config('idle_in_transaction_session_timeout', %s, true), set_config('synchronous_commit', CASE WHEN %s THEN 'off'
WHEN current_setting('synchronous_commit') = 'remote_apply' THEN 'remote_apply' ELSE 'on' END, true)"""
# Whatever a role defaults to. A reader's statements have to see one moment, a writer's what stands by their time.
_READ = b"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_WRITE = b"BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"
_COMMIT = b"COMMIT"
_MARK = b"SELECT pg_logical_emit_message(true, 'dpicl', '')"
_SERVER = b"SELECT current_setting('fsync'), current_setting('server_encoding')"

_LOST = (errors.AdminShutdown, errors.CrashShutdown, errors.IdleInTransactionSessionTimeout, psycopg.InterfaceError)
_FOREIGN = (psycopg.ProgrammingError, psycopg.DataError, psycopg.IntegrityError, psycopg.NotSupportedError)
# What may be quoted of the driver's messages: fixed words that tell whom to call, and no more.
_WORDS = (
    "password authentication failed",
    "no password supplied",
    "no pg_hba.conf entry",
    "Connection refused",
    "No such file or directory",
    "failed to resolve host",
    "timeout expired",
    "starting up",
    "shutting down",
    "too many clients",
    "does not exist",
    "read-only",
    "SSL",
)
_KEPT = 64
"""Texts of statements that a connection keeps."""
_SHOWABLE = re.compile(r"[\w.,:/\[\]-]*")


class _SilentServerError(psycopg.OperationalError):
    """The server stopped answering."""


class _Connection(psycopg.Connection[tuple[Any, ...]]):
    """A connection that ends its wait for a server that stopped answering."""

    patience = math.inf

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._texts: dict[tuple[bytes, tuple[Any, ...]], str] = {}

    def text_of(self, queries: Sequence[Query]) -> str:
        """Returns statements as one text; those that recur were put together before."""
        kept, texts, quoted = self._texts, [], None
        for query, values in queries:
            key = query, tuple(values)
            is_kept = all(type(value) in {str, bool} for value in values)  # no line, and no number of one
            text = kept.get(key) if is_kept else None
            if text is None:
                quoted = quoted or psycopg.ClientCursor(self)
                text = quoted.mogrify(query, values)
                if is_kept and len(kept) < _KEPT:
                    kept[key] = text
            texts.append(text)
        return "; ".join(texts)

    def wait(self, gen: Generator[Any, Any, T], *args: Any, **options: Any) -> T:
        try:
            return super().wait(_run_with_timeout(gen, self.patience), *args, **options)
        except _SilentServerError:
            self.pgconn.finish()  # or the clean-up would wait as long again
            raise


def _run_with_timeout(gen: Generator[Any, Any, T], seconds: float) -> Generator[Any, Any, T]:
    """Hands a conversation with the server on; breaks it off after so long."""
    end = time.monotonic() + seconds
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            if not ready and time.monotonic() > end:
                raise _SilentServerError("no answer")
            wanted = gen.send(ready)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


class _ProcessConnection:
    """What one process holds: the connection, and whose turn it is."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.connection: _Connection | None = None
        self.busy = False

    def drop(self) -> None:
        """Closes the connection; the server undoes what was not committed."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()


class PostgresConnection:
    """The way of one store or anchor to its server. Threads take turns; a forked process gets a hand of its own.

    Args:
      secret: returns what libpq reads; see `hide_password`.
      timeout: seconds to wait for a connection, a lock, an answer.
      check: looks at each new connection to the place that is named, before it is used.
    """

    def __init__(
        self, secret: Callable[[], str], *, timeout: float, check: Callable[[psycopg.Connection[Any], str], None]
    ) -> None:
        self.timeout = check_positive("timeout", timeout)
        self._check = check
        self.place, self._secret = _read_conninfo(secret, self.timeout)
        self._hands: dict[int, _ProcessConnection] = {}
        self.closed = False
        weakref.finalize(self, _close, self._hands)

    @contextlib.contextmanager
    def turn(self) -> Iterator[TransactionLock]:
        """Waits for this thread's turn; what it leaves uncommitted is undone.

        Raises:
          LedgerError: closed, or this thread has its turn already.
        """
        hand = self._hands.setdefault(os.getpid(), _ProcessConnection())
        with hand.lock:
            if self.closed:
                raise LedgerError(f"{self.place}: expected an open store, found one that was closed. Open it again.")
            if hand.busy:
                raise LedgerError("ledger: expected no open transaction in this thread, found one. Close it first.")
            turn = TransactionLock(self, hand)
            with turn, turn:  # ended twice: a stop may fall on the first end
                yield turn

    def connect(self, *, checked: bool = True) -> _Connection:
        """Opens a new connection.

        Raises:
          LedgerUnavailableError: the server cannot be reached or refuses.
          LedgerError: the server, or what it holds, is not fit for a ledger.
        """
        connection = self.attempt("a connection", lambda: _Connection.connect(self._secret()))
        connection.patience = 2 * self.timeout
        try:
            self.attempt("a server for ledgers", lambda: self._look_at(connection, checked=checked))
        except BaseException:
            connection.close()
            raise
        return connection

    def _look_at(self, connection: _Connection, *, checked: bool) -> None:
        connection.autocommit = True  # each BEGIN is ours
        connection.prepare_threshold = None  # poolers hand a transaction to any session
        fsync, encoding = connection.execute(_SERVER).fetchall()[0]
        if fsync != "on" or encoding != "UTF8":
            raise LedgerError(
                f"{self.place}: expected fsync on and encoding UTF8, found {fsync} and {encoding}: what was charged "
                "could be forgotten. Use a server and database with these settings."
            )
        if checked:
            self._check(connection, self.place)

    def attempt(self, wanted: str, action: Callable[[], T]) -> T:
        """Returns what `action` returns, with the driver's errors in our words.

        Raises:
          LedgerUnavailableError: the server could not do it.
          LedgerError: it could not do it with these tables or values.
        """
        try:
            return action()
        except (psycopg.Error, OSError, UnicodeError) as error:
            fault = self.fault(wanted, error)
        raise fault  # out here, so that the driver's error and its frames do not come along

    def fault(self, wanted: str, error: Exception) -> LedgerError:
        """Returns our error for the driver's: its class and code, never its text but for known words."""
        text = str(error)
        words = getattr(error, "sqlstate", None) or next((words for words in _WORDS if words in text), "")
        code = f" ({words})" if words else ""
        foreign = isinstance(error, _FOREIGN) and not isinstance(error, errors.InsufficientPrivilege)
        kind, advice = LedgerUnavailableError, "Try again when the server can."
        if foreign:
            kind, advice = LedgerError, "Restore an untouched copy."  # type: ignore[assignment]
        shown = f"{self.place}: expected {wanted}, found {type(error).__name__}{code}."
        return kind(f"{shown} Nothing is granted. {advice}")

    def close(self) -> None:
        """Closes this process's connection when its turn comes; nothing can be asked afterwards. Again: nothing."""
        self.closed = True
        hand = self._hands.get(os.getpid())
        if hand is not None:
            with hand.lock:  # the thread whose turn it is keeps its connection to the end
                hand.drop()


class TransactionLock:
    """One thread's turn: one transaction at a time."""

    def __init__(self, link: PostgresConnection, hand: _ProcessConnection) -> None:
        self._link = link
        self._hand = hand
        self._pid = os.getpid()

    def __enter__(self) -> None:
        self._hand.busy = True

    def __exit__(self, *_: object) -> None:
        self._end()

    def begin(self, queries: Sequence[Query], *, flush: bool = True) -> Answers:
        """Begins to write, and asks, as `snapshot_query` does; but each statement sees what stands when it runs.

        Without `flush` its commit does not wait for the disk, nor for standbys.
        """
        return self._first([(_WRITE, ()), (_SETTINGS, (*self._limits, not flush)), *queries])[2:]

    def flush(self, query: Query) -> list[tuple[Any, ...]]:
        """Asks, and waits until the server's log, and its synchronous standbys, have everything that was seen.

        A transaction of its own, which writes only to that log: what it sees was written there before its end, and one
        that wrote nothing would not be waited for.
        """
        return self._first([(_WRITE, ()), (_SETTINGS, (*self._limits, False)), query, (_MARK, ()), (_COMMIT, ())])[2]

    def snapshot_query(self, queries: Sequence[Query]) -> Answers:
        """Asks in a transaction of its own, whose statements see one and the same moment.

        On a new connection where the old one was lost while nobody used it: nothing was written yet.

        Raises:
          LedgerUnavailableError: the server cannot be reached, or does not answer in time.
          LedgerError: it cannot answer with these tables.
        """
        return self._first([(_READ, ()), (_SETTINGS, (*self._limits, False)), *queries, (_COMMIT, ())])[2:-1]

    def _first(self, queries: Sequence[Query]) -> Answers:
        wanted = "the ledger within its time limits"
        if self._hand.connection is not None and not _is_idle(self._hand.connection):
            self._hand.drop()  # closed by the server, or left behind by an interrupt
        connection = self._hand.connection
        if connection is not None:
            try:
                return self._ask(queries)[0]
            except psycopg.Error as error:
                fault, lost = self._link.fault(wanted, error), isinstance(error, _LOST)
            lost = lost or connection.closed
            self._hand.drop()
            if not lost:
                raise fault
        self._hand.connection = self._link.connect()
        return self._link.attempt(wanted, lambda: self._ask(queries)[0])

    @property
    def _limits(self) -> tuple[str, str, str]:
        wait = math.ceil(self._link.timeout * 1000)
        return str(wait), str(wait + wait // 4), str(2 * wait)

    def _ask(self, queries: Sequence[Query]) -> tuple[Answers, list[int]]:
        """Sends statements in one go; returns the rows of each, and how many it read or wrote."""
        connection = self._connection
        cursor = connection.execute(connection.text_of(queries).encode())
        rows, counts = [], []
        for _ in queries:
            rows.append(cursor.fetchall() if cursor.description else [])
            counts.append(cursor.rowcount)
            cursor.nextset()
        return rows, counts

    def read(self, query: Query) -> list[tuple[Any, ...]]:
        """Returns the rows of one statement inside the transaction."""
        return self._link.attempt("the ledger's lines", lambda: self._ask([query]))[0][0]

    def commit(self, *queries: Query) -> list[int]:
        """Runs the last statements, commits, and returns how many rows each wrote.

        Raises:
          LedgerUnavailableError: no word came whether they stand; the next reader sees.
        """
        asked = [*queries, (_COMMIT, ())]
        return self._link.attempt("the word that what was written stands", lambda: self._ask(asked))[1][:-1]

    def _end(self) -> None:
        """Undoes what was not committed. Leaves a connection behind that is fit for the next, or none."""
        self._hand.busy = False
        if os.getpid() != self._pid:
            return  # a child that was forked inside the block: the connection is its parent's
        connection = self._hand.connection
        if connection is None or _is_idle(connection):
            return
        try:
            connection.rollback()
        except psycopg.Error:
            self._hand.drop()
        except BaseException:
            self._hand.drop()
            raise

    def check_process(self) -> None:
        """Refuses a child that was forked in the middle: the connection is its parent's."""
        if os.getpid() != self._pid:
            raise LedgerError("ledger: a transaction belongs to the process that opened it. Open another.")

    @property
    def _connection(self) -> _Connection:
        self.check_process()
        if self._hand.connection is None:
            raise LedgerUnavailableError(f"{self._link.place}: the connection was lost. Nothing is granted. Try again.")
        return self._hand.connection


def _is_idle(connection: _Connection) -> bool:
    return connection.pgconn.transaction_status == psycopg.pq.TransactionStatus.IDLE


def _close(hands: dict[int, _ProcessConnection]) -> None:
    # The hand of another process stays as it is: closing it would end the conversation of a parent.
    hand = hands.get(os.getpid())
    if hand is not None:
        hand.drop()


def hide_password(text: str) -> Callable[[], str]:
    """Puts a text that may hold a password where neither a repr nor the variables of a frame show it."""
    return lambda: text


def _read_conninfo(secret: Callable[[], str], timeout: float) -> tuple[str, Callable[[], str]]:
    """Returns public words on the server, and the text to connect with, our defaults added."""
    if not isinstance(secret(), str):
        kind = type(secret()).__name__
        raise ConfigurationError(f"conninfo: expected a text such as postgresql://host/database, found {kind}.")
    defaults = {
        "application_name": "langchain-dpicl",
        "connect_timeout": max(2, math.ceil(timeout)),
        "keepalives_idle": 30,
        "keepalives_interval": 10,
        "keepalives_count": 3,
        "tcp_user_timeout": math.ceil(timeout * 1000),
        # A standby reads stale lines. What the role defaults to does not matter; libpq before 14 knows only that.
        "target_session_attrs": "primary" if psycopg.pq.version() >= 140000 else "read-write",
    }
    try:
        full = _complete_conninfo(secret, defaults)
    except psycopg.Error:
        full = None
    if full is None:
        raise ConfigurationError(
            "conninfo: expected postgresql://user@host:port/database or host=... dbname=..., found a text that libpq "
            "cannot read. It is not shown, as it may hold a password."
        )
    return _words(full), full


def _complete_conninfo(secret: Callable[[], str], defaults: dict[str, Any]) -> Callable[[], str]:
    values = conninfos.conninfo_to_dict(secret())
    missing = {key: value for key, value in defaults.items() if key not in values}
    return hide_password(conninfos.make_conninfo(secret(), **missing, client_encoding="utf8"))


def _words(secret: Callable[[], str]) -> str:
    """Returns which server it is. What looks odd may be half of a mistyped password: then nothing is named."""
    values = conninfos.conninfo_to_dict(secret())
    host, port, name = (str(values.get(key) or "") for key in ("host", "port", "dbname"))
    if not (_SHOWABLE.fullmatch(host) and re.fullmatch(r"[\d,]*", port) and re.fullmatch(r"[\w.-]*", name)):
        return "PostgreSQL"
    at = f" at {host or 'its default host'}" + (f":{port}" if port else "")
    return f"PostgreSQL database {name or 'by default'}{at}"
