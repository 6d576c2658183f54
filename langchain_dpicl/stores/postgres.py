"""Stores ledgers, anchors and released answers in PostgreSQL, for more than one host."""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, ClassVar, Self, TypeVar

import psycopg
from psycopg import conninfo as conninfos
from psycopg import errors, sql

from langchain_dpicl._opaque import PerProcess, this_process
from langchain_dpicl.exceptions import (
    ConfigurationError,
    LedgerError,
    LedgerRollbackError,
    LedgerUnavailableError,
)
from langchain_dpicl.privacy._validate import check_int, check_name, fail
from langchain_dpicl.privacy.ledger.store import LedgerHeader, LedgerRecord, LedgerTransaction, hide_password
from langchain_dpicl.stores.memos import MOST_ANSWERS, TURN_SECONDS, KeptMemo, MemoKey, memo_faults
from langchain_dpicl.stores.rows import (
    OLDER_TABLES,
    ON_PURPOSE,
    Connected,
    LedgerHead,
    RowTransaction,
    check_bindings,
    check_seconds,
    header_of,
    header_text,
    last_of,
    record_of,
    records_of,
    row_of,
)

# Statements of a transaction go out in one text, one round trip: with the driver's pipelines, servers do not end a
# session that idles in a transaction. What the driver raises is read and dropped, since its messages and frames may
# hold the password; errors that leave this module have our own words only.


T = TypeVar("T")
Query = tuple[bytes, Sequence[Any]]
Answers = list[list[tuple[Any, ...]]]

# Local to each transaction, so that poolers and defaults of roles or databases do not matter. Servers before 17 know no
# limit for a transaction.
_SETTINGS = b"""SELECT set_config('lock_timeout', %s, true), set_config('statement_timeout', %s, true),
set_config('idle_in_transaction_session_timeout', %s, true), set_config('synchronous_commit', CASE WHEN %s THEN 'off'
WHEN current_setting('synchronous_commit') = 'remote_apply' THEN 'remote_apply' ELSE 'on' END, true),
set_config('client_min_messages', 'warning', true),
CASE WHEN current_setting('transaction_timeout', true) <> '' THEN set_config('transaction_timeout', '0', true) END"""
# Whatever a role defaults to. A reader's statements have to see one moment, a writer's what stands by their time.
_READ = b"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_WRITE = b"BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"
_COMMIT = b"COMMIT"
_MARK = b"SELECT pg_logical_emit_message(true, 'dpicl', '')"
# Any role may ask. A server that was cloned has the number of the first one, not its start.
_DATABASE = b"SELECT (extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint, current_database()"
_SERVER = b"SELECT current_setting('fsync'), current_setting('server_encoding')"

_LOST = (errors.AdminShutdown, errors.CrashShutdown, errors.IdleInTransactionSessionTimeout, psycopg.InterfaceError)
_FOREIGN = (psycopg.ProgrammingError, psycopg.DataError, psycopg.IntegrityError, psycopg.NotSupportedError)
# What may be quoted of the driver's messages: fixed words that tell whom to call, and no more.
_PASSWORD = ("password authentication failed", "no password supplied")
_STANDBY = ("hot standby", "during recovery", "read-only")
_FOLLOWS = (psycopg.OperationalError, psycopg.NotSupportedError, errors.ReadOnlySqlTransaction)
_WORDS = (
    *_PASSWORD,
    *_STANDBY,
    "no pg_hba.conf entry",
    "Connection refused",
    "No such file or directory",
    "failed to resolve host",
    "timeout expired",
    "starting up",
    "shutting down",
    "too many clients",
    "does not exist",
    "SSL",
)
_MAKING = "to make tables"
_KEPT = 64
"""Texts of statements that a connection keeps."""
_SHOWABLE = re.compile(r"[\w.,:/\[\]-]*")


class _SilentServerError(psycopg.OperationalError):
    """The server stopped answering."""


class _UnconfirmedCommitError(psycopg.OperationalError):
    """The server committed, and an administrator ended its wait for synchronous standbys."""


class _Connection(psycopg.Connection[tuple[Any, ...]]):
    """A connection that ends its wait for a server that stopped answering."""

    patience = math.inf

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._texts: dict[tuple[bytes, tuple[Any, ...]], str] = {}
        self.is_confirmed = True
        self.add_notice_handler(self._note)

    def _note(self, notice: psycopg.errors.Diagnostic) -> None:
        # A cancelled wait for synchronous standbys ends in a warning alone. It is known by the server's own file, since
        # the words depend on the server's language.
        if (notice.source_file or "").endswith("syncrep.c"):
            self.is_confirmed = False

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
        self.timeout = check_seconds("timeout", timeout)
        self._check = check
        self.place, self._secret = _read_conninfo(secret, self.timeout)
        self._hands = PerProcess(_ProcessConnection)
        self.closed = False
        weakref.finalize(self, _close, self._hands)

    @contextlib.contextmanager
    def turn(self) -> Iterator[TransactionLock]:
        """Waits for this thread's turn; what it leaves uncommitted is undone.

        Raises:
          LedgerError: closed, or this thread has its turn already.
        """
        hand = self._hands.here
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

    @property
    def limits(self) -> tuple[str, str, str]:
        """Milliseconds for a lock, for a statement, and between two statements of a transaction."""
        wait = math.ceil(self.timeout * 1000)
        return str(wait), str(wait + wait // 4), str(2 * wait)

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
        kind: type[LedgerError] = LedgerUnavailableError
        advice = "Check PGPASSWORD or ~/.pgpass." if words in _PASSWORD else "Try again later."
        if isinstance(error, errors.InsufficientPrivilege):
            advice = "Give this role its rights (docs/production.md, PostgreSQL)."
            if wanted == _MAKING:
                made = "`dpicl ledger create ADDRESS` those of ledgers, PostgresMemo.new(ADDRESS) those of a memo"
                advice = f"Their owner makes them once: {made}. {advice}"
        elif isinstance(error, _FOLLOWS) and any(found in text for found in _STANDBY):
            advice = "This server only follows another: give the primary's address, or wait until it is promoted."
        elif isinstance(error, errors.UniqueViolation) and error.diag.table_name == _MEMO_NAMES["answers"]:
            # Logical replication copies rows, and no sequences.
            advice = f"Set the sequence of {_MEMO_NAMES['answers']}.number past its rows, as its owner; then try again."
        elif isinstance(error, _FOREIGN):
            kind, advice = LedgerError, "Restore an untouched copy."
        shown = f"{self.place}: expected {wanted}, found {type(error).__name__}{code}."
        return kind(f"{shown} Nothing is granted. {advice}")

    def ask_unchecked(self, wanted: str, query: bytes) -> list[tuple[Any, ...]]:
        """Asks on the connection that there is, or on one that is closed at once: a pooler may have a single one."""
        with self.turn() as turn:
            if self._hands.here.connection is not None:
                return turn.begin([(query, ())])[0]
            with contextlib.closing(self.connect(checked=False)) as connection:
                return self.attempt(wanted, lambda: connection.execute(query).fetchall())

    def close(self) -> None:
        """Closes this process's connection when its turn comes; nothing can be asked afterwards. Again: nothing."""
        self.closed = True
        hand = self._hands.here
        with hand.lock:  # the thread whose turn it is keeps its connection to the end
            hand.drop()


def lead_to_one_database(place: Callable[[], Any], second: Callable[[], Any], *, timeout: float) -> bool:
    """Whether two places, each an address, a store or an anchor, are in the same database of the same server.

    Raises:
      LedgerUnavailableError: one of them cannot be reached.
    """

    def database_of(place: Callable[[], Any]) -> object:
        given = getattr(place(), "_link", None)
        link = given or PostgresConnection(place, timeout=timeout, check=lambda *_: None)
        return link.ask_unchecked("to say which database it is", _DATABASE)

    return bool(database_of(place) == database_of(second))


class TransactionLock:
    """One thread's turn: one transaction at a time."""

    def __init__(self, link: PostgresConnection, hand: _ProcessConnection) -> None:
        self._link = link
        self._hand = hand
        self._home = this_process()

    def __enter__(self) -> None:
        self._hand.busy = True

    def __exit__(self, *_: object) -> None:
        self._end()

    def begin(self, queries: Sequence[Query], *, flush: bool = True) -> Answers:
        """Begins to write, and asks, as `snapshot_query` does; but each statement sees what stands when it runs.

        Without `flush` its commit does not wait for the disk, nor for standbys.
        """
        return self._first([(_WRITE, ()), (_SETTINGS, (*self._link.limits, not flush)), *queries])[2:]

    def flush(self, query: Query) -> list[tuple[Any, ...]]:
        """Asks, and waits until the server's log, and its synchronous standbys, have everything that was seen.

        A transaction of its own, which writes only to that log: what it sees was written there before its end, and one
        that wrote nothing would not be waited for.
        """
        return self._first([(_WRITE, ()), (_SETTINGS, (*self._link.limits, False)), query, (_MARK, ()), (_COMMIT, ())])[
            2
        ]

    def snapshot_query(self, queries: Sequence[Query]) -> Answers:
        """Asks in a transaction of its own, whose statements see one and the same moment.

        On a new connection where the old one was lost while nobody used it: nothing was written yet.

        Raises:
          LedgerUnavailableError: the server cannot be reached, or does not answer in time.
          LedgerError: it cannot answer with these tables.
        """
        return self._first([(_READ, ()), (_SETTINGS, (*self._link.limits, False)), *queries, (_COMMIT, ())])[2:-1]

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

    def _ask(self, queries: Sequence[Query]) -> tuple[Answers, list[int]]:
        """Sends statements in one go; returns the rows of each, and how many it read or wrote."""
        connection = self._connection
        connection.is_confirmed = True  # whatever an interrupt left behind
        cursor = connection.execute(connection.text_of(queries).encode())
        rows, counts = [], []
        for _ in queries:
            rows.append(cursor.fetchall() if cursor.description else [])
            counts.append(cursor.rowcount)
            cursor.nextset()
        if not connection.is_confirmed:
            raise _UnconfirmedCommitError("not on the standbys")
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
        if this_process() != self._home:
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
        if this_process() != self._home:
            raise LedgerError("ledger: a transaction belongs to the process that opened it. Open another.")

    @property
    def _connection(self) -> _Connection:
        self.check_process()
        if self._hand.connection is None:
            raise LedgerUnavailableError(f"{self._link.place}: the connection was lost. Nothing is granted. Try again.")
        return self._hand.connection


def _is_idle(connection: _Connection) -> bool:
    return connection.pgconn.transaction_status == psycopg.pq.TransactionStatus.IDLE


def _close(hands: PerProcess[_ProcessConnection]) -> None:
    # The hand of another process stays as it is: closing it would end the conversation of a parent.
    hands.here.drop()


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


# What is in a database is never changed: opening compares version numbers alone, and so does `setup()` where there are
# tables.


VERSION = 6
"""Of the tables. Those of development versions had smaller numbers, and are refused."""

_ONE_AT_A_TIME = 0x647069636C  # "dpicl": the advisory lock of all set-ups in a database

# Names are found by their bytes: the order of a database's texts changes with the library of its system, and an index
# that was made before then misses rows that are there. The index of lines is for what is read at an opening although a
# snapshot sums it up.
_TABLES = """
CREATE TABLE {migrations} (v integer PRIMARY KEY);
CREATE TABLE {ledgers} (
    name text COLLATE "C" PRIMARY KEY,
    header text,
    digest text,
    seq bigint NOT NULL DEFAULT 0,
    head text
) WITH (fillfactor = 50);
CREATE TABLE {lines} (
    ledger text COLLATE "C" NOT NULL REFERENCES {ledgers} (name),
    seq bigint NOT NULL,
    prev text NOT NULL,
    kind text COLLATE "C" NOT NULL,
    body text NOT NULL,
    stamp text NOT NULL,
    hash text NOT NULL,
    PRIMARY KEY (ledger, seq)
);
CREATE INDEX dpicl_lines_named ON {lines} (ledger, kind, seq) WHERE kind IN ('bind', 'seal', 'snapshot');
CREATE TABLE {bindings} (
    dataset text COLLATE "C" PRIMARY KEY,
    ledger text COLLATE "C" NOT NULL REFERENCES {ledgers} (name)
);
CREATE TABLE {anchors} (
    ledger_id text COLLATE "C" PRIMARY KEY,
    seq bigint NOT NULL,
    head text NOT NULL
) WITH (fillfactor = 50);
"""

# They stop slips and applications; who owns the tables can drop them, and meets the chain and the anchor. That of bound
# data sets finds its table where that is now, since schemas may be renamed.
_GUARDS = """
CREATE FUNCTION {refuse}() RETURNS trigger LANGUAGE plpgsql AS $guard$
BEGIN
    RAISE EXCEPTION 'a ledger only grows: % of % is refused', TG_OP, TG_TABLE_NAME
        USING ERRCODE = 'integrity_constraint_violation';
END
$guard$;
CREATE FUNCTION {forward}() RETURNS trigger LANGUAGE plpgsql AS $guard$
BEGIN
    IF NEW.name <> OLD.name OR NEW.seq < OLD.seq
        OR (OLD.header IS NOT NULL AND (NEW.header, NEW.digest) IS DISTINCT FROM (OLD.header, OLD.digest)) THEN
        RAISE EXCEPTION 'a ledger only grows: % of % is refused', TG_OP, TG_TABLE_NAME
            USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN NEW;
END
$guard$;
CREATE FUNCTION {newer}() RETURNS trigger LANGUAGE plpgsql AS $guard$
BEGIN
    IF NEW.ledger_id <> OLD.ledger_id OR NEW.seq <= OLD.seq THEN
        RAISE EXCEPTION 'an anchor only moves forward: % of % is refused', TG_OP, TG_TABLE_NAME
            USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN NEW;
END
$guard$;
CREATE FUNCTION {bound}() RETURNS trigger LANGUAGE plpgsql AS $guard$
DECLARE
    is_bound boolean;
BEGIN
    EXECUTE format(
        'SELECT EXISTS (SELECT 1 FROM %I.dpicl_bindings WHERE dataset = $1 AND ledger = $2)', TG_TABLE_SCHEMA
    ) INTO is_bound USING NEW.body::json ->> 'dataset_id', NEW.ledger;
    IF NOT is_bound THEN
        RAISE EXCEPTION 'a data set is bound first: % on % is refused', TG_OP, TG_TABLE_NAME
            USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN NEW;
END
$guard$;
CREATE TRIGGER dpicl_lines_stand BEFORE UPDATE OR DELETE OR TRUNCATE ON {lines}
    FOR EACH STATEMENT EXECUTE FUNCTION {refuse}();
CREATE TRIGGER dpicl_ledgers_stand BEFORE DELETE OR TRUNCATE ON {ledgers}
    FOR EACH STATEMENT EXECUTE FUNCTION {refuse}();
CREATE TRIGGER dpicl_ledgers_grow BEFORE UPDATE ON {ledgers}
    FOR EACH ROW EXECUTE FUNCTION {forward}();
CREATE TRIGGER dpicl_bindings_stand BEFORE UPDATE OR DELETE OR TRUNCATE ON {bindings}
    FOR EACH STATEMENT EXECUTE FUNCTION {refuse}();
CREATE TRIGGER dpicl_lines_bound BEFORE INSERT ON {lines}
    FOR EACH ROW WHEN (NEW.kind = 'bind') EXECUTE FUNCTION {bound}();
CREATE TRIGGER dpicl_anchors_stand BEFORE DELETE OR TRUNCATE ON {anchors}
    FOR EACH STATEMENT EXECUTE FUNCTION {refuse}();
CREATE TRIGGER dpicl_anchors_grow BEFORE UPDATE ON {anchors}
    FOR EACH ROW EXECUTE FUNCTION {newer}();
"""

# Not `to_regclass`: it may go by what it knew before the lock of another set-up was waited for.
_ARE_THERE = """
SELECT relname FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
WHERE nspname = %s AND relname = ANY(%s)
"""

_TABLE_NAMES = ("ledgers", "lines", "anchors", "bindings", "migrations")
_NAMES = (*_TABLE_NAMES, "refuse", "forward", "newer", "bound")

Connection = psycopg.Connection[tuple[Any, ...]]


_SET_UP = "Run setup() once, as the tables' owner."


class SchemaTables:
    """The names of the tables in one schema, quoted, which version they have, and what to do where there are none."""

    def __init__(self, schema: str, *, absent: str = _SET_UP) -> None:
        self.schema = schema
        self._absent = absent
        self._names = {name: sql.Identifier(schema, f"dpicl_{name}") for name in _NAMES}

    def query(self, text: str) -> bytes:
        """Returns a statement with `{ledgers}`, `{lines}`, ... put in."""
        return sql.SQL(text).format(**self._names).as_bytes(None)

    def version(self, connection: Connection) -> int:
        """Returns the version of the tables; 0: there are none."""
        if "dpicl_migrations" in self._missing(connection):
            return 0
        rows = connection.execute(self.query("SELECT coalesce(max(v), 0) FROM {migrations}")).fetchall()
        return int(rows[0][0])

    def _missing(self, connection: Connection) -> list[str]:
        """Returns which tables are not there."""
        names = sorted(f"dpicl_{name}" for name in _TABLE_NAMES)
        found = connection.execute(_ARE_THERE, [self.schema, names]).fetchall()
        return [name for name in names if (name,) not in found]

    def check_version(self, connection: Connection, where: str) -> None:
        """Refuses tables of another version."""
        version = self.version(connection)
        if version == VERSION:
            return
        state, advice = f"version {version}", OLDER_TABLES
        if not version:
            state, advice = "none", self._absent
        elif version > VERSION:
            advice = "Use a newer langchain-dpicl."
        raise LedgerError(f"{where}: expected tables of version {VERSION}, found {state}. {advice}")

    def make(self, connection: Connection, where: str) -> None:
        """Makes the tables, in the transaction that is open; does nothing where they are there.

        Raises:
          LedgerError: there are tables of another version, or a part of them.
        """
        if self.version(connection):
            self.check_version(connection, where)
            if missing := self._missing(connection):
                found = f"expected all tables of ledgers, found no {', '.join(missing)}"
                raise LedgerError(f"{where}: {found}. Nothing is made; restore an untouched copy.")
            return
        _make_schema(connection, self.schema)
        connection.execute(self.query(_TABLES + _GUARDS))
        connection.execute(self.query("INSERT INTO {migrations} (v) VALUES (%s)"), [VERSION])


def _check_schema(schema: str) -> str:
    """Returns the name of a schema that the driver and the server take: one reads a %, the other keeps pg_."""
    name = check_name("schema", schema)
    if "%" in name or name.startswith("pg_"):
        raise fail("schema", "a name without % that does not begin with pg_", name)
    return name


def _make_schema(connection: Connection, name: str) -> None:
    # Asked for first: `IF NOT EXISTS` needs the right to make one even where it is there.
    if not connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", [name]).fetchall():
        connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(name)))


# A transaction locks the ledger's own row, which orders the writers of all processes and hosts. Lines wait in this
# process until the block ends and go out in one statement with the new head, then COMMIT: two round trips in all. The
# writer of a ledger does not wait for the disk in it but afterwards, when the row is free for others.


SCHEMA = "dpicl"
TIMEOUT = 60.0
_ROW = "SELECT header, digest, seq, head FROM {ledgers} WHERE name = %s"
_LAST = "SELECT seq, hash FROM {lines} WHERE ledger = %s ORDER BY seq DESC LIMIT 1"
_LINES = "SELECT seq, prev, kind, body, stamp, hash FROM {lines} WHERE ledger = %s AND seq > %s ORDER BY seq LIMIT %s"
_SNAPSHOT = """
WITH last AS (SELECT max(seq) AS seq FROM {lines} WHERE ledger = %s AND kind = 'snapshot')
SELECT lines.seq, prev, kind, body, stamp, hash FROM {lines} AS lines, last
WHERE ledger = %s AND kind IN ('bind', 'seal', 'snapshot') AND lines.seq <= last.seq
    AND (kind <> 'snapshot' OR lines.seq = last.seq) ORDER BY lines.seq
"""
_HASH = """
SELECT hash FROM {lines} WHERE ledger = %s AND seq = %s
UNION ALL SELECT digest FROM {ledgers} WHERE name = %s AND 0 = %s
"""
_NEW = "INSERT INTO {ledgers} (name) VALUES (%s) ON CONFLICT (name) DO NOTHING RETURNING name"
_CREATE = "UPDATE {ledgers} SET header = %s, digest = %s, head = %s WHERE name = %s AND header IS NULL AND seq = 0"
# The row moves from the very line that was found, or no line is written.
_APPEND = """
WITH moved AS (
    UPDATE {ledgers} SET seq = %s, head = %s WHERE name = %s AND seq = %s AND head = %s RETURNING name
)
INSERT INTO {lines} (ledger, seq, prev, kind, body, stamp, hash)
SELECT moved.name, fresh.*
FROM moved, unnest(%s::bigint[], %s::text[], %s::text[], %s::text[], %s::text[], %s::text[]) AS fresh
"""
_STORED = "SELECT dataset, ledger FROM {bindings}"
_BOUND = "SELECT body::json ->> 'dataset_id', ledger FROM {lines} WHERE kind = 'bind'"
_OWNER = "SELECT ledger FROM {bindings} WHERE dataset = %s"
# Waits for another ledger that is binding it, and then leaves it alone.
_BIND = "INSERT INTO {bindings} (dataset, ledger) VALUES (%s, %s) ON CONFLICT (dataset) DO NOTHING"
_ANCHORED = "SELECT seq, head FROM {anchors} WHERE ledger_id = %s"
_ANCHOR = """
INSERT INTO {anchors} AS known (ledger_id, seq, head) VALUES (%s, %s, %s)
ON CONFLICT (ledger_id) DO UPDATE SET seq = excluded.seq, head = excluded.head WHERE known.seq < excluded.seq
"""


class _OnPostgres(Connected):
    """What a store, an anchor and a memo share: the way to the server, making tables, reading, the end."""

    _link: PostgresConnection

    @property
    def description(self) -> str:
        """Public words on where it lives; no user and no password."""
        raise NotImplementedError

    def _make(self, tables: Callable[[Connection], None]) -> None:
        """Makes tables, all or nothing, on a connection of its own, which does not ask for them first.

        `timeout` is for the connection and for the lock of all set-ups; making them takes as long as it takes.
        """
        connection = self._link.connect(checked=False)
        connection.patience = math.inf

        def make() -> None:
            with connection.transaction():
                # Whatever the role's default: each statement has to see what stands once the lock is granted.
                connection.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE")
                connection.execute(_SETTINGS, [self._link.limits[0], "0", self._link.limits[2], False])
                connection.execute("SELECT pg_advisory_xact_lock(%s)", [_ONE_AT_A_TIME])
                tables(connection)
                connection.patience = 2 * self._link.timeout  # the end may wait for a standby that is away

        try:
            self._link.attempt(_MAKING, make)
        finally:
            connection.close()

    def _read(self, queries: Sequence[Query]) -> list[list[tuple[Any, ...]]]:
        with self._link.turn() as turn:
            return turn.snapshot_query(queries)

    def close(self) -> None:
        """Closes the connection; nothing can be asked afterwards."""
        self._link.close()

    def __repr__(self) -> str:
        # Half made, where an argument was refused, it is shown by crash reporters.
        return f"{type(self).__name__}({self.description if hasattr(self, '_link') else 'not made'})"


class _PostgresTables(_OnPostgres):
    """What a store and an anchor share: the tables of ledgers."""

    _ABSENT: ClassVar[str] = _SET_UP

    def __init__(self, secret: Callable[[], str], *, schema: str, timeout: float) -> None:
        self._tables = SchemaTables(_check_schema(schema), absent=self._ABSENT)
        self._link = PostgresConnection(secret, timeout=timeout, check=self._tables.check_version)

    def setup(self) -> None:
        """Makes the tables; does nothing where they are there. Makes no ledger.

        Raises:
          LedgerError: there are tables of another version, or a part of them.
          LedgerUnavailableError: the server cannot be reached, or this role may not make tables.
        """
        self._make(lambda connection: self._tables.make(connection, self._link.place))


class PostgresStore(_PostgresTables):
    """A ledger in a PostgreSQL database, shared by processes and hosts; one database holds many.

    Nothing is made on the way: `setup()` makes the tables and `new` a ledger, once; a store that was opened writes no
    limits, unless `may_create` is set on purpose to finish what a stopped process began. Another role than the tables'
    owner needs SELECT, INSERT and UPDATE on `dpicl_ledgers`, SELECT and INSERT on `dpicl_lines` and on
    `dpicl_bindings`, SELECT on `dpicl_migrations`, and no more.

    Formal guarantees:
      - A line stands on the server's disk, and on its synchronous standbys, before anything is granted for it.
      - Writers follow one another over all hosts: each holds the lock of the ledger's row and sees every earlier line.
      - A wait for a lock, an answer or a connection ends in `LedgerUnavailableError`. Where the answer to a COMMIT is
        lost the charge may stand, and the next reader sees it.
      - Neither repr, description nor any error shows the password.

    Args:
      conninfo: "postgresql://user@host/database" or "host=... dbname=..."; a password may come from libpq's usual
        places. The server has to run with fsync on, the database with encoding UTF8.
      name: which ledger of the database.
      schema: where its tables are.
      timeout: seconds to wait for a connection, a lock, an answer.

    Attributes:
      may_create: whether `create` may write limits.

    Raises:
      ConfigurationError: an argument is out of range.

    Example:
      >>> PostgresStore("postgresql://ledger:secret@db.example/app")
      PostgresStore(PostgreSQL database app at db.example, ledger 'budget' in schema dpicl)
    """

    durable = True
    _ABSENT = f"Check the address; {ON_PURPOSE}"

    def __init__(self, conninfo: str, *, name: str = "budget", schema: str = SCHEMA, timeout: float = TIMEOUT) -> None:
        secret, conninfo = hide_password(conninfo), ""  # crash reporters show the variables of a frame that raises
        self._name = check_name("name", name)
        super().__init__(secret, schema=schema, timeout=timeout)
        self.may_create = False
        self._known: tuple[tuple[str, str], LedgerHeader] | None = None
        query = self._tables.query
        self._row, self._last, self._lines = (query(text) for text in (_ROW, _LAST, _LINES))
        self._locked, self._appended = query(_ROW + " FOR UPDATE"), query(_APPEND)

    @classmethod
    def open(cls, conninfo: str, *, name: str = "budget", schema: str = SCHEMA, timeout: float = TIMEOUT) -> Self:
        """Returns a store of a ledger that is there, and has looked.

        Args:
          conninfo: as of the class.
          name: which ledger.
          schema: where the tables are.
          timeout: seconds to wait, as of the class.

        Raises:
          LedgerError: no ledger of that name, no tables, or tables of another version.
          LedgerUnavailableError: the server cannot be reached or read.
        """
        secret, conninfo = hide_password(conninfo), ""
        store = cls(secret(), name=name, schema=schema, timeout=timeout)
        store.header()
        return store

    @classmethod
    def new(cls, conninfo: str, *, name: str = "budget", schema: str = SCHEMA, timeout: float = TIMEOUT) -> Self:
        """Makes room for a ledger, and the tables in a database without; `Budget(..., store=)` then writes its limits.

        Args:
          conninfo: as of the class.
          name: which ledger.
          schema: where the tables are.
          timeout: seconds to wait, as of the class.

        Raises:
          LedgerError: a ledger of that name is there, or tables of another version.
          LedgerUnavailableError: the server cannot be reached or written.
        """
        secret, conninfo = hide_password(conninfo), ""
        store = cls(secret(), name=name, schema=schema, timeout=timeout)
        store.setup()
        store.may_create = True
        with store._link.turn() as turn:
            if not turn.begin([(store._tables.query(_NEW), [name])])[0]:
                raise LedgerError(f"{store.description}: expected no ledger of that name, found one. Open it instead.")
            turn.commit()
        return store

    @property
    def timeout(self) -> float:
        """Seconds to wait for a connection, a lock, an answer."""
        return self._link.timeout

    @property
    def description(self) -> str:
        """Public words on where the ledger lives; no user and no password."""
        return f"{self._link.place}, ledger {self._name!r} in schema {self._tables.schema}"

    def create(self, header: LedgerHeader) -> LedgerHeader:
        """Writes `header` unless one is there; returns the one that stands.

        Raises:
          LedgerError: none is there, and the store was opened and not made: limits that were there are lost.
        """
        with self._link.turn() as turn:
            found, _ = self._standing(turn.begin([(self._locked, [self._name]), (self._last, [self._name])]))
            if found is None and not self.may_create:
                raise LedgerError(
                    f"{self.description}: expected limits, found an empty entry; opening sets no limits. Restore an "
                    "untouched copy, or, if creating it was interrupted, run `dpicl ledger create` again."
                )
            if found is None:
                values = [header_text(header), header.digest, header.digest, self._name]
                self._check_counts(turn.commit((self._tables.query(_CREATE), values)), 1)
        return found or header

    def header(self) -> LedgerHeader | None:
        """Returns the header, or None before `create`."""
        return self._standing(self._read([(self._row, [self._name]), (self._last, [self._name])]))[0]

    def head(self) -> tuple[int, str]:
        """Returns the number and hash of the last line, or 0 and the header's digest."""
        return self._standing(self._read([(self._row, [self._name]), (self._last, [self._name])]))[1]

    def records(self, after: int = 0, *, limit: int | None = None) -> Sequence[LedgerRecord]:
        """Returns the committed lines with `seq > after`, at most `limit` of them, in order."""
        name = self._name
        *rows, lines = self._read([(self._row, [name]), (self._last, [name]), (self._lines, [name, after, limit])])
        _, head = self._standing(rows)
        after = min(after, head.seq)
        return records_of(lines, after=after, head=head, last=last_of(after, limit, head))

    def last_snapshot(self) -> Sequence[LedgerRecord]:
        """Returns the last snapshot after the lines before it that bind and seal, or nothing."""
        (rows,) = self._read([(self._tables.query(_SNAPSHOT), [self._name, self._name])])
        return [record_of(row) for row in rows]

    def check(self) -> None:
        """Compares which ledger has each data set with the lines of all ledgers of the schema.

        Raises:
          LedgerError: a data set has other ledgers than its lines say, or two.
          LedgerUnavailableError: the server cannot be reached, or this role may not read both tables.
        """
        stored, bound = self._read([(self._tables.query(query), ()) for query in (_STORED, _BOUND)])
        check_bindings(stored, bound, self.description)

    @contextlib.contextmanager
    def transaction(self, *, flush: bool = True) -> Iterator[LedgerTransaction]:
        """Locks the ledger for this thread over all hosts; its lines stand if the block ends well.

        Args:
          flush: wait until they are on the server's disk, and its synchronous standbys; otherwise they are visible
            only, and `flush` waits.
        """
        with self._link.turn() as turn, contextlib.ExitStack() as ends:
            asked: list[Query] = [(self._locked, [self._name]), (self._last, [self._name])]
            known, head = self._standing(turn.begin(asked, flush=flush))
            if known is None:
                raise LedgerError("ledger: expected a header, found none. Call create(header) first.")
            rows = _PostgresRows(self._tables, self._name, head, turn)
            view = RowTransaction(rows)
            ends.callback(setattr, view, "alive", False)
            yield view
            self._append(turn, head, rows)

    def flush(self, seq: int, head: str) -> None:
        """Waits until a line, and all before it, are on the server's disk, and on its synchronous standbys.

        The server writes one log, in order, so that a later transaction that waits for the disk waits for them.

        Args:
          seq: number of the line.
          head: its hash.

        Raises:
          LedgerUnavailableError: the ledger does not hold the line, as where the server restarted before it was on the
            disk; or the server cannot be reached.
        """
        query: Query = self._tables.query(_HASH), [self._name, seq, self._name, seq]
        with self._link.turn() as turn:
            found = turn.flush(query)
        if found != [(head,)]:
            raise LedgerUnavailableError(
                f"{self.description}: expected line {seq} as it was written, found it gone: the server restarted "
                "before it was on the disk. Nothing is granted; try again."
            )

    def _append(self, turn: TransactionLock, old: LedgerHead, rows: _PostgresRows) -> None:
        turn.check_process()
        if not rows.fresh:
            if rows.has_bound:
                turn.commit()
            return
        columns = [list(column) for column in zip(*rows.fresh, strict=True)]
        values = [*rows.head(), self._name, *old, *columns]
        self._check_counts(turn.commit((self._appended, values)), len(rows.fresh))

    def _check_counts(self, written: list[int], expected: int) -> None:
        if written != [expected]:
            msg = f"{self.description}: expected to write {expected} rows, wrote {written}. Somebody ignores the lock."
            raise LedgerError(msg)

    def _standing(self, answers: Sequence[Sequence[Any]]) -> tuple[LedgerHeader | None, LedgerHead]:
        """Returns header and last line; the row of the ledger and the last of its lines have to agree."""
        if not answers[0]:
            found = "expected a ledger of that name, found none"
            raise LedgerError(f"{self.description}: {found}. Check the name; {ON_PURPOSE}")
        (text, digest, seq, last) = answers[0][0]
        header = self._header_of(text, digest)
        start = (0, digest)  # the header's own, as `header_of` compared them
        if (seq, last) != (tuple(answers[1][0]) if answers[1] else start):
            raise LedgerError(
                f"{self.description}: expected line {seq} as the last one, found another end: lines are gone or were "
                "changed. Nothing is granted; restore an untouched copy."
            )
        return header, LedgerHead(seq, last or "")

    def _header_of(self, text: str | None, digest: str | None) -> LedgerHeader | None:
        known = self._known
        if known is not None and known[0] == (text, digest):
            return known[1]
        header = header_of(text, digest)
        if known is not None:
            msg = f"{self.description}: the header was changed, or another ledger took its place. Nothing is granted."
            raise LedgerRollbackError(msg)
        if header is not None and text is not None and digest is not None:
            self._known = (text, digest), header
        return header


class _PostgresRows:
    """The lines of a ledger inside one transaction: those that stand, then those that wait for its end."""

    def __init__(self, tables: SchemaTables, name: str, head: LedgerHead, turn: TransactionLock) -> None:
        self._tables = tables
        self._name = name
        self._old = self._head = head
        self._turn = turn
        self.fresh: list[tuple[int, str, str, str, str, str]] = []
        self.has_bound = False

    def head(self) -> LedgerHead:
        return self._head

    def lines(self, after: int, last: int) -> list[tuple[Any, ...]]:
        old, standing = self._old.seq, []
        if after < old:
            standing = self._turn.read((self._tables.query(_LINES), [self._name, after, min(last, old) - after]))
        return [*standing, *self.fresh[max(after - old, 0) : max(last - old, 0)]]

    def add(self, record: LedgerRecord) -> None:
        self._turn.check_process()
        self.fresh.append(row_of(record))
        self._head = LedgerHead(record.seq, record.hash)

    def bind(self, dataset_id: str) -> str | None:
        owner: Query = self._tables.query(_OWNER), [dataset_id]
        rows = self._turn.read(owner)
        if not rows:
            self._turn.read((self._tables.query(_BIND), [dataset_id, self._name]))
            self.has_bound = True
            rows = self._turn.read(owner)
        return None if rows[0][0] == self._name else str(rows[0][0])


class PostgresAnchor(_PostgresTables):
    """Remembers in a PostgreSQL database how far ledgers have come that live elsewhere.

    It protects where nobody restores it together with the ledger: another server, another owner. One that is new
    knows no ledger; `new` makes its tables, and opening never does.

    Formal guarantees:
      - Once `write` has returned, that line or a later one stands on the server's disk.
      - An older line never takes a newer one's place, here and by a trigger of the table.

    Args:
      conninfo: as for `PostgresStore`.
      schema: where its table is.
      timeout: seconds to wait for a connection, a lock, an answer.

    Raises:
      ConfigurationError: an argument is out of range.
    """

    def __init__(self, conninfo: str, *, schema: str = SCHEMA, timeout: float = TIMEOUT) -> None:
        secret, conninfo = hide_password(conninfo), ""
        super().__init__(secret, schema=schema, timeout=timeout)

    @classmethod
    def new(cls, conninfo: str, *, schema: str = SCHEMA, timeout: float = TIMEOUT) -> Self:
        """Makes the tables where there are none, and returns the anchor.

        Args:
          conninfo: as of the class.
          schema: where the tables are.
          timeout: seconds to wait, as of the class.

        Raises:
          LedgerError: there are tables of another version.
          LedgerUnavailableError: the server cannot be reached or written.
        """
        secret, conninfo = hide_password(conninfo), ""
        anchor = cls(secret(), schema=schema, timeout=timeout)
        anchor.setup()
        return anchor

    @property
    def description(self) -> str:
        """Public words on where the anchor lives; no user and no password."""
        return f"{self._link.place}, anchors in schema {self._tables.schema}"

    def read(self, ledger_id: str) -> tuple[int, str] | None:
        """Returns number and hash of the last line known of a ledger, or None if none was ever written."""
        (rows,) = self._read([(self._tables.query(_ANCHORED), [ledger_id])])
        return (rows[0][0], rows[0][1]) if rows else None

    def write(self, ledger_id: str, seq: int, head: str) -> None:
        """Remembers line `seq` with hash `head`, durably, unless a later one is known.

        Raises:
          LedgerRollbackError: the same number is known with another hash: two copies of one ledger were written to.
          LedgerUnavailableError: the server cannot be reached or written.
        """
        self.write_lines(ledger_id, [(seq, head)])

    def write_lines(self, ledger_id: str, lines: Sequence[tuple[int, str]]) -> None:
        """Does what `write` does with one line after the other, at the cost of two.

        Args:
          ledger_id: random name of the ledger.
          lines: number and hash of each, in their order.
        """
        query = self._tables.query(_ANCHOR)
        with self._link.turn() as turn:
            # The first one locks the row, also where it changes nothing.
            asked: list[Query] = [(query, [ledger_id, *lines[0]]), (self._tables.query(_ANCHORED), [ledger_id])]
            seq, head = turn.begin(asked)[1][0]
            if dict(lines).get(seq, head) != head:
                msg = f"ledger {ledger_id}: line {seq} is known here with another hash. Two copies were written to."
                raise LedgerRollbackError(msg)
            turn.commit(*((query, [ledger_id, *line]) for line in lines[1:][-1:]))


# Tables carry their version in their names: losing what older ones hold costs budget only.
_MEMO_NAMES = {"answers": "dpicl_memo_1", "turns": "dpicl_memo_turns_1"}
_MEMO_TABLES = """
CREATE TABLE IF NOT EXISTS {answers} (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    scope text COLLATE "C" NOT NULL,
    tenant text COLLATE "C" NOT NULL,
    query text COLLATE "C" NOT NULL,
    told text NOT NULL,
    digest text NOT NULL,
    UNIQUE (scope, tenant, query)
);
CREATE TABLE IF NOT EXISTS {turns} (
    scope text COLLATE "C" NOT NULL,
    tenant text COLLATE "C" NOT NULL,
    query text COLLATE "C" NOT NULL,
    holder text NOT NULL,
    until timestamptz NOT NULL,
    PRIMARY KEY (scope, tenant, query)
);
"""
_MEMO_IS_THERE = "SELECT count(*) FROM pg_catalog.pg_tables WHERE schemaname = %s AND tablename = ANY(%s)"
_RECALL = "SELECT told, digest FROM {answers} WHERE scope = %s AND tenant = %s AND query = %s"
# A turn that ends later than two turns from now was taken before the clock went back.
_CLAIM = """
INSERT INTO {turns} AS held (scope, tenant, query, holder, until)
VALUES (%s, %s, %s, %s, clock_timestamp() + make_interval(secs => %s))
ON CONFLICT (scope, tenant, query) DO UPDATE SET holder = excluded.holder, until = excluded.until
WHERE held.until <= clock_timestamp() OR held.holder = excluded.holder
OR held.until > clock_timestamp() + make_interval(secs => %s) RETURNING holder
"""
# Of holders that were killed; what somebody else is about to change is left to that one.
_END_LATE_TURNS = """
DELETE FROM {turns} WHERE ctid IN (
    SELECT ctid FROM {turns} WHERE until <= clock_timestamp() FOR UPDATE SKIP LOCKED)
"""
# Needs the rights that `remember` needs, and changes nothing.
_MAY_REMEMBER = """
WITH added AS (INSERT INTO {answers} (scope, tenant, query, told, digest) SELECT '', '', '', '', '' WHERE false),
dropped AS (DELETE FROM {answers} WHERE false)
UPDATE {answers} SET told = told, digest = digest WHERE false
"""


class PostgresMemo(_OnPostgres, KeptMemo):
    """Keeps released answers in a PostgreSQL database, for the processes of several hosts.

    `PostgresMemo.new` or `setup()` makes the tables, once; opening makes nothing. Another role than their owner needs
    SELECT, INSERT, UPDATE and DELETE on `dpicl_memo_1` and `dpicl_memo_turns_1`.

    Formal guarantees:
      - When `remember` returns, the answer is on the server's disk.
      - An answer is found by its own plan, tenant and query alone, and only unbroken.
      - Of one component about `size` answers are kept for a tenant: the newest.
      - One process at a time has the turn to answer a question, for at most `turn_seconds` by the server's clock.
        Where that goes back, the turn ends within twice that time from then.
      - Neither repr, description nor any error shows the password.

    Args:
      conninfo: as for `PostgresStore`.
      schema: where the tables are.
      size: answers kept of one component for one tenant.
      turn_seconds: as of `SQLiteMemo`.
      timeout: seconds to wait for a connection, a lock, an answer.

    Raises:
      ConfigurationError: an argument is out of range.

    Example:
      >>> PostgresMemo("postgresql://service@db.example/app")
      PostgresMemo(PostgreSQL database app at db.example, memo in schema dpicl)
    """

    _REMEMBER = """
INSERT INTO {answers} AS kept (scope, tenant, query, told, digest) VALUES (%s, %s, %s, %s, %s)
ON CONFLICT (scope, tenant, query) DO UPDATE SET told = excluded.told, digest = excluded.digest WHERE kept.told = %s
"""
    _DROP_OLDEST = """
DELETE FROM {answers} AS old USING (
    SELECT scope, tenant, number FROM {answers} WHERE scope = %s AND tenant = %s ORDER BY number DESC LIMIT 1 OFFSET %s
) AS last WHERE old.scope = last.scope AND old.tenant = last.tenant AND old.number <= last.number
"""
    _LEAVE = "DELETE FROM {turns} WHERE scope = %s AND tenant = %s AND query = %s AND holder = %s"
    _FORGET = ("DELETE FROM {answers} WHERE tenant = %s", "DELETE FROM {turns} WHERE tenant = %s")

    def __init__(
        self,
        conninfo: str,
        *,
        schema: str = "dpicl",
        size: int = MOST_ANSWERS,
        turn_seconds: float = TURN_SECONDS,
        timeout: float = 60.0,
    ) -> None:
        secret, conninfo = hide_password(conninfo), ""  # crash reporters show the variables of a frame that raises
        self._schema = _check_schema(schema)
        self._size = check_int("size", size, low=1)
        self._turn = check_seconds("turn_seconds", turn_seconds)
        self._names = {key: sql.Identifier(self._schema, name) for key, name in _MEMO_NAMES.items()}
        self._link = PostgresConnection(secret, timeout=timeout, check=self._check_tables)

    @classmethod
    def open(cls, conninfo: str, **options: Any) -> Self:
        """Returns a memo whose tables are there, and has looked.

        Args:
          conninfo: as of the class.
          **options: as of the class.

        Raises:
          MemoError: there are no tables, or the server cannot be reached.
          ConfigurationError: an argument is out of range.
        """
        secret, conninfo = hide_password(conninfo), ""
        memo = cls(secret(), **options)
        memo.recall(MemoKey("", "", ""))
        return memo

    @classmethod
    def new(cls, conninfo: str, **options: Any) -> Self:
        """Makes the tables where there are none, and returns the memo.

        Args:
          conninfo: as of the class.
          **options: as of the class.

        Raises:
          MemoError: the server cannot be reached, or this role may not make or use the tables.
          ConfigurationError: an argument is out of range.
        """
        secret, conninfo = hide_password(conninfo), ""
        memo = cls(secret(), **options)
        memo.setup()
        memo.recall(MemoKey("", "", ""))
        return memo

    def setup(self) -> None:
        """Makes the tables where there are none.

        Raises:
          MemoError: the server cannot be reached, or this role may not make tables.
        """

        def tables(connection: Connection) -> None:
            # Asked for first: `IF NOT EXISTS` needs the right to make them even where they are there.
            if not self._has_tables(connection):
                _make_schema(connection, self._schema)
                connection.execute(self._query(_MEMO_TABLES))

        with memo_faults():
            self._make(tables)

    @property
    def description(self) -> str:
        """Public words on where the memo lives; no user and no password."""
        return f"{self._link.place}, memo in schema {self._schema}"

    def claim(self, key: MemoKey, holder: str) -> bool:
        """Takes the turn to answer, anew where it is the holder's, unless somebody else has it; see `ReleaseMemo`.

        A role that may not write answers is refused here, before a ticket is taken.
        """
        claim = _CLAIM, (*key, holder, self._turn, 2 * self._turn)
        return self._written(claim, (_END_LATE_TURNS, ()), (_MAY_REMEMBER, ()))[0] == 1

    def _row(self, key: MemoKey) -> tuple[object, object] | None:
        (rows,) = self._read([(self._query(_RECALL), key)])
        return (rows[0][0], rows[0][1]) if rows else None

    def _written(self, *commands: tuple[str, Sequence[Any]]) -> list[int]:
        with memo_faults(), self._link.turn() as turn:
            turn.begin([])
            return turn.commit(*((self._query(command), values) for command, values in commands))

    def _has_tables(self, connection: psycopg.Connection[Any]) -> bool:
        rows = connection.execute(_MEMO_IS_THERE, [self._schema, list(_MEMO_NAMES.values())]).fetchall()
        return bool(rows[0][0] == len(_MEMO_NAMES))

    def _check_tables(self, connection: psycopg.Connection[Any], where: str) -> None:
        if not self._has_tables(connection):
            advice = "Run PostgresMemo.new(address), or setup(), once, as their owner."
            raise LedgerError(f"{where}: expected the tables of a memo in schema {self._schema}, found none. {advice}")

    def _query(self, text: str) -> bytes:
        return sql.SQL(text).format(**self._names).as_bytes(None)
