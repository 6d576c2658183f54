"""Which ledger of a SQLite file has a data set: kept through versions, guarded, and held against the lines."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import LedgerError, PrivacyBudgetMismatchError
from langchain_dpicl.stores import SQLiteStore, sqlite_file
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


class TestOlderFiles:
    """Files of the first version have lines, and no bindings."""

    @pytest.fixture
    def old(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        with monkeypatch.context() as then:
            then.setattr(sqlite_file, "MIGRATIONS", sqlite_file.MIGRATIONS[:1])
            then.setattr(SQLiteStore, "_check_bindings", lambda self, connection: None)
            then.setattr(SQLiteStore, "last_snapshot", lambda self: [])
            for name, dataset_ids in (("first", ["d", "e"]), ("second", ["d", "f"])):
                made = SQLiteStore.new(path, name=name)
                Budget(epsilon=1.0, delta=1e-6, store=made)
                with made.transaction() as view:
                    for dataset_id in dataset_ids:
                        view.append("bind", private(dataset_id).declaration)
                made.close()
        return path

    def test_what_their_lines_bind_is_bound(self, old: Path) -> None:
        first = Budget.open(SQLiteStore(old, name="first"))
        with edited(old) as connection:
            assert connection.execute("PRAGMA user_version").fetchone() == (3,)
            found = connection.execute("SELECT dataset, ledger FROM bindings ORDER BY dataset").fetchall()
        assert found == [("d", 1), ("e", 1), ("f", 2)]
        with pytest.raises(PrivacyBudgetMismatchError, match="'second'"):
            first.bind(private("f"))
        first.bind(private("e"))

    def test_a_data_set_on_two_of_their_ledgers_goes_on_on_the_first(self, old: Path) -> None:
        first, second = (Budget.open(SQLiteStore(old, name=name)) for name in ("first", "second"))
        first.bind(private("d"))
        with pytest.raises(PrivacyBudgetMismatchError, match="'first'"):
            second.bind(private("d"))
        second.bind(private("f"))
        second.verify()


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
