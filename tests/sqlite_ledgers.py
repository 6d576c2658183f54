"""Small SQLite ledgers for tests, and ways past their guards."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from langchain_dpicl.privacy.ledger.store import LedgerStore
from langchain_dpicl.stores import SQLiteStore, sqlite_file
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


def mount_of(path: Path) -> str:
    """Returns the number of the mount that a file is on."""
    if not hasattr(os, "O_PATH") or not sqlite_file._MOUNTS.exists():
        pytest.skip("this system lists its mounts elsewhere")
    held = os.open(path, os.O_PATH)
    told = Path(f"/proc/self/fdinfo/{held}").read_text()
    os.close(held)
    return told.partition("mnt_id:")[2].split()[0]
