"""Stores released answers in PostgreSQL, for more than one host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import psycopg
from psycopg import sql

from langchain_dpicl.exceptions import LedgerError, MemoError
from langchain_dpicl.privacy._validate import check_int, check_positive
from langchain_dpicl.privacy.ledger.amounts import check_name
from langchain_dpicl.stores.connected import Connected
from langchain_dpicl.stores.memos import (
    MOST_ANSWERS,
    TURN_SECONDS,
    KeptMemo,
    MemoKey,
    memo_faults,
)
from langchain_dpicl.stores.postgres_connection import PostgresConnection, hide_password

# Tables carry their version in their names: losing what older ones hold costs budget only.
_NAMES = {"answers": "dpicl_memo_1", "turns": "dpicl_memo_turns_1"}
_TABLES = """
CREATE TABLE IF NOT EXISTS {answers} (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    scope text NOT NULL,
    tenant text NOT NULL,
    query text NOT NULL,
    told text NOT NULL,
    digest text NOT NULL,
    UNIQUE (scope, tenant, query)
);
CREATE TABLE IF NOT EXISTS {turns} (
    scope text NOT NULL,
    tenant text NOT NULL,
    query text NOT NULL,
    holder text NOT NULL,
    until timestamptz NOT NULL,
    PRIMARY KEY (scope, tenant, query)
);
"""
_IS_THERE = "SELECT count(*) FROM pg_catalog.pg_tables WHERE schemaname = %s AND tablename = ANY(%s)"
_RECALL = "SELECT told, digest FROM {answers} WHERE scope = %s AND tenant = %s AND query = %s"
_CLAIM = """
INSERT INTO {turns} AS held (scope, tenant, query, holder, until)
VALUES (%s, %s, %s, %s, clock_timestamp() + make_interval(secs => %s))
ON CONFLICT (scope, tenant, query) DO UPDATE SET holder = excluded.holder, until = excluded.until
WHERE held.until <= clock_timestamp() OR held.holder = excluded.holder RETURNING holder
"""
# Of holders that were killed; what somebody else is about to change is left to that one.
_END_LATE_TURNS = """
DELETE FROM {turns} WHERE ctid IN (
    SELECT ctid FROM {turns} WHERE until <= clock_timestamp() FOR UPDATE SKIP LOCKED)
"""


class PostgresMemo(Connected, KeptMemo):
    """Keeps released answers in a PostgreSQL database, for the processes of several hosts.

    `PostgresMemo.new` or `setup()` makes the tables, once; opening makes nothing. Another role than their owner needs
    SELECT, INSERT, UPDATE and DELETE on `dpicl_memo_1` and `dpicl_memo_turns_1`.

    Formal guarantees:
      - When `remember` returns, the answer is on the server's disk.
      - An answer is found by its own plan, tenant and query alone, and only unbroken.
      - Of one component about `size` answers are kept for a tenant: the newest.
      - One process at a time has the turn to answer a question, for at most `turn_seconds` by the server's clock.
      - Neither repr, description nor any error shows the password.

    Args:
      conninfo: as for `PostgresStore`.
      schema: where the tables are.
      size: answers kept of one component for one tenant.
      turn_seconds: how long others who ask the same wait for an answer that is under way.
      timeout: seconds to wait for a connection, a lock, an answer.

    Raises:
      ConfigurationError: an argument is out of range.

    Example:
      >>> PostgresMemo("postgresql://service@db.example/app")
      PostgresMemo(PostgreSQL database app at db.example, memo in schema dpicl)
    """

    _pickle_error = MemoError
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
        self._schema = check_name("schema", schema)
        self._size = check_int("size", size, low=1)
        self._turn = check_positive("turn_seconds", turn_seconds)
        self._names = {key: sql.Identifier(self._schema, name) for key, name in _NAMES.items()}
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
          MemoError: the server cannot be reached, or this role may not make tables.
          ConfigurationError: an argument is out of range.
        """
        secret, conninfo = hide_password(conninfo), ""
        memo = cls(secret(), **options)
        memo.setup()
        return memo

    def setup(self) -> None:
        """Makes the tables where there are none.

        Raises:
          MemoError: the server cannot be reached, or this role may not make tables.
        """

        def make() -> None:
            with connection.transaction():
                if not connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", [self._schema]).fetchall():
                    connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(self._schema)))
                connection.execute(self._query(_TABLES))

        with memo_faults():
            connection = self._link.connect(checked=False)
            try:
                self._link.attempt("the right to make tables", make)
            finally:
                connection.close()

    @property
    def description(self) -> str:
        """Public words on where the memo lives; no user and no password."""
        return f"{self._link.place}, memo in schema {self._schema}"

    def claim(self, key: MemoKey, holder: str) -> bool:
        """Takes the turn to answer, anew where it is the holder's, unless somebody else has it; see `ReleaseMemo`."""
        return self._written((_CLAIM, (*key, holder, self._turn)), (_END_LATE_TURNS, ()))[0] == 1

    def close(self) -> None:
        """Closes the connection; nothing can be asked afterwards."""
        self._link.close()

    def _row(self, key: MemoKey) -> tuple[object, object] | None:
        with self._link.turn() as turn:
            (rows,) = turn.snapshot_query([(self._query(_RECALL), key)])
        return (rows[0][0], rows[0][1]) if rows else None

    def _written(self, *commands: tuple[str, Sequence[Any]]) -> list[int]:
        with memo_faults(), self._link.turn() as turn:
            turn.begin([])
            return turn.commit(*((self._query(command), values) for command, values in commands))

    def _check_tables(self, connection: psycopg.Connection[Any], where: str) -> None:
        rows = connection.execute(_IS_THERE, [self._schema, list(_NAMES.values())]).fetchall()
        if rows[0][0] != len(_NAMES):
            advice = "Run PostgresMemo.new(address), or setup(), once, as their owner."
            raise LedgerError(f"{where}: expected the tables of a memo in schema {self._schema}, found none. {advice}")

    def _query(self, text: str) -> bytes:
        return sql.SQL(text).format(**self._names).as_bytes(None)

    def __repr__(self) -> str:
        return f"PostgresMemo({self.description if hasattr(self, '_link') else 'not made'})"
