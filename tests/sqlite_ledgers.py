"""Small SQLite ledgers for tests, and ways past their guards."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from langchain_dpicl.privacy.ledger.store import LedgerStore
from langchain_dpicl.stores import SQLiteStore
from tests.contracts.store import header


def made(path: Path, *, lines: int = 0) -> SQLiteStore:
    store = SQLiteStore.new(path)
    store.create(header())
    write(store, lines)
    return store


def write(store: LedgerStore, lines: int) -> None:
    for number in range(lines):
        with store.transaction() as view:
            view.append("note", {"n": number})


def numbers(store: LedgerStore) -> list[int]:
    return [line.body["n"] for line in store.records()]


@contextlib.contextmanager
def edited(path: Path) -> Iterator[sqlite3.Connection]:
    """Opens the file as anybody can, past our code."""
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        yield connection
    finally:
        connection.close()
