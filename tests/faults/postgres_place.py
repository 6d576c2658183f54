"""A ledger in a real PostgreSQL server, for the faults that any durable store meets."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
from psycopg.conninfo import make_conninfo

from langchain_dpicl.stores.postgres import PostgresAnchor, PostgresStore
from tests.faults.places import Places
from tests.postgres import PostgresServer, running


@contextlib.contextmanager
def hasty(store: PostgresStore, timeout: float) -> Iterator[None]:
    """Has transactions that a store begins in the block wait for a short time only."""
    patience, store._link.timeout = store._link.timeout, timeout
    try:
        yield
    finally:
        store._link.timeout = patience


@dataclass(frozen=True)
class PostgresPlace:
    """A schema with one ledger. Its anchor is in a database beside it."""

    server: PostgresServer
    schema: str
    words: str = "PostgreSQL"

    def new(self) -> PostgresStore:
        return PostgresStore.new(self.server.conninfo(), schema=self.schema)

    def open(self, *, timeout: float = 60.0) -> PostgresStore:
        return PostgresStore(self.server.conninfo(), schema=self.schema, timeout=timeout)

    def hasty(self, timeout: float) -> tuple[PostgresStore, contextlib.AbstractContextManager[None]]:
        store = self.open()  # which takes longer on a busy machine
        return store, hasty(store, timeout)

    def hold(self) -> Callable[[], object]:
        connection = psycopg.connect(self.server.conninfo())
        connection.execute(f"SELECT 1 FROM {self.schema}.dpicl_ledgers FOR UPDATE")  # noqa: S608  our name
        return connection.close

    def anchor(self) -> PostgresAnchor:
        database = f"{self.schema}_anchor"
        with (
            psycopg.connect(self.server.conninfo(), autocommit=True) as connection,
            contextlib.suppress(psycopg.errors.DuplicateDatabase),
        ):
            connection.execute(f"CREATE DATABASE {database}")
        return PostgresAnchor.new(make_conninfo(self.server.conninfo(), dbname=database))


@contextlib.contextmanager
def postgres_places(_: Path) -> Iterator[Places]:
    """Starts a server; yields a factory of schemas."""
    with running() as server:
        yield lambda: PostgresPlace(server, server.fresh("schema"))
