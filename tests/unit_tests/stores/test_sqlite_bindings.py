"""Which ledger of a SQLite file has a data set: guarded, and held against the lines."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import LedgerError
from langchain_dpicl.stores import SQLiteStore
from tests.faults.rot import unguarded
from tests.ledgers import private
from tests.sqlite_ledgers import edited


def budget_at(path: Path, name: str, *dataset_ids: str) -> Budget:
    made = Budget(epsilon=1.0, delta=1e-6, store=SQLiteStore.new(path, name=name))
    for dataset_id in dataset_ids:
        made.bind(private(dataset_id))
    return made


def two_ledgers(path: Path) -> None:
    """Makes the file that the tests damage: 'first' has d and e, 'second' has f."""
    budget_at(path, "first", "d", "e").close()
    budget_at(path, "second", "f").close()


class TestGuards:
    @pytest.mark.parametrize(
        "command",
        [
            "DELETE FROM bindings WHERE dataset = 'd'",
            "UPDATE bindings SET ledger = 2 WHERE dataset = 'd'",
            "UPDATE bindings SET dataset = 'x' WHERE dataset = 'd'",
            "INSERT OR REPLACE INTO bindings VALUES ('d', 2)",
            "INSERT INTO bindings VALUES ('d', 2)",
        ],
    )
    def test_bindings_are_never_changed_or_dropped(self, path: Path, command: str) -> None:
        two_ledgers(path)
        with edited(path) as connection, pytest.raises(sqlite3.DatabaseError):
            connection.execute(command)
        assert SQLiteStore(path, name="first").header() is not None

    @pytest.mark.parametrize(
        "command",
        [
            "DELETE FROM bindings",
            "DELETE FROM bindings WHERE dataset = 'f'",
            "UPDATE bindings SET ledger = 2 WHERE dataset = 'd'",
            "UPDATE bindings SET dataset = 'x' WHERE dataset = 'd'",
            "INSERT INTO bindings VALUES ('x', 1)",
        ],
    )
    def test_bindings_that_are_not_those_of_the_lines_are_refused(self, path: Path, command: str) -> None:
        two_ledgers(path)
        with unguarded(path) as connection:
            connection.execute(command)
        for name in ("first", "second"):
            with pytest.raises(LedgerError, match="found other bindings than its lines say"):
                SQLiteStore(path, name=name)
