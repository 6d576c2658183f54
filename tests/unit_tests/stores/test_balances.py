"""Balances in a file: whose they are, what a reader holds up, and that a debit stands whole or not at all."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl.exceptions import (
    LedgerError,
    LedgerRollbackError,
    LedgerUnavailableError,
    PrivacyBudgetMismatchError,
)
from langchain_dpicl.stores.beside_ledgers import PerCallFile, SQLiteBalances

pytestmark = pytest.mark.traced

TERMS = {"participations": 2, "of": "a"}


def taken(path: Path, **options: Any) -> SQLiteBalances:
    balances = SQLiteBalances(path, **options)
    balances.take_up(TERMS, lambda: {"entry": 1})
    return balances


@contextlib.contextmanager
def reader(path: Path, *, seconds: float | None = None) -> Iterator[None]:
    """Holds a reader's lock, as a backup does; for so long, or as long as the block."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute("BEGIN")
    connection.execute("SELECT * FROM filter").fetchall()
    timer = threading.Timer(seconds or 60.0, connection.close)
    timer.start()
    try:
        yield
    finally:
        timer.cancel() if seconds is None else timer.join()
        connection.close()


def counted(path: Path) -> tuple[int, list[int]]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        (releases,) = connection.execute("SELECT releases FROM filter").fetchone()
        return releases, [count for (count,) in connection.execute("SELECT count FROM taken")]


def test_a_reader_makes_nobody_pay_twice(tmp_path: Path) -> None:
    path, bought = tmp_path / "balances.db", []
    balances = SQLiteBalances(path)
    with reader(path, seconds=0.15):
        found = balances.take_up(TERMS, lambda: bought.append(1) or {"entry": 1})  # type: ignore[func-returns-value]
    assert found == ({"entry": 1}, True)
    assert bought == [1]
    assert SQLiteBalances(path).bind_filter(TERMS) == {"entry": 1}


def test_a_reader_that_does_not_go_is_told_before_anything_is_paid_or_debited(tmp_path: Path) -> None:
    path = tmp_path / "balances.db"
    balances = SQLiteBalances(path, timeout=0.1)
    with reader(path), pytest.raises(LedgerUnavailableError, match="Nothing is granted"):
        balances.take_up(TERMS, pytest.fail)
    assert balances.bind_filter(TERMS) is None
    balances.take_up(TERMS, lambda: {"entry": 1})
    with reader(path), pytest.raises(LedgerUnavailableError):
        balances.debit(["anna"], 0)
    assert counted(path) == (0, [])


def test_a_debit_that_waited_for_a_reader_counts_once(tmp_path: Path) -> None:
    balances = taken(tmp_path / "balances.db")
    with reader(balances.path, seconds=0.15):
        assert balances.debit(["anna", "bo"], 0) == [True, True]
    assert counted(balances.path) == (1, [1, 1])


def test_another_filters_file_in_its_place_is_not_written_to(tmp_path: Path) -> None:
    mine = taken(tmp_path / "mine.db")
    other = SQLiteBalances(tmp_path / "other.db")
    other.take_up({"participations": 1_000, "of": "b"}, lambda: {"entry": 2})
    other.debit(["anna"], 0)
    mine.path.write_bytes(other.path.read_bytes())
    for writes in (lambda: mine.debit(["anna"], 0), lambda: mine.confirm(0), lambda: mine.bind_filter(TERMS)):
        with pytest.raises(PrivacyBudgetMismatchError, match="another's"):
            writes()
    assert counted(mine.path) == (1, [1])


def test_a_file_whose_number_was_changed_by_hand_lets_nobody_in(tmp_path: Path) -> None:
    balances = taken(tmp_path / "balances.db")
    with contextlib.closing(sqlite3.connect(balances.path, isolation_level=None)) as connection:
        connection.execute("DROP TRIGGER filter_grow")
        connection.execute("UPDATE filter SET most = 99")
    with pytest.raises(PrivacyBudgetMismatchError):
        balances.debit(["anna"], 0)


def test_only_what_was_taken_up_is_debited(tmp_path: Path) -> None:
    taken(tmp_path / "balances.db")
    again = SQLiteBalances(tmp_path / "balances.db")
    with pytest.raises(LedgerError, match="none that was paid for"):
        again.debit(["anna"], 0)
    assert again.bind_filter(TERMS) == {"entry": 1}
    assert again.debit(["anna"], 0) == [True]
    with pytest.raises(PrivacyBudgetMismatchError):
        again.bind_filter({**TERMS, "of": "b"})
    assert again.timeout == 60.0


def test_balances_that_know_of_fewer_releases_than_the_ledger_are_told_after_a_debit_too(tmp_path: Path) -> None:
    balances = taken(tmp_path / "balances.db")
    balances.debit(["anna"], 0)
    balances.confirm(1)
    with pytest.raises(LedgerRollbackError, match="two copies go on"):
        balances.confirm(2)


def test_nothing_in_the_file_goes_back(tmp_path: Path) -> None:
    balances = taken(tmp_path / "balances.db")
    balances.debit(["anna"], 0)
    with contextlib.closing(sqlite3.connect(balances.path, isolation_level=None)) as connection:
        for goes_back in (
            "UPDATE taken SET count = 0",
            "UPDATE taken SET unit = x'00'",
            "DELETE FROM taken",
            "DELETE FROM filter",
            "UPDATE filter SET releases = 0",
            "UPDATE filter SET secret = ''",
        ):
            with pytest.raises(sqlite3.IntegrityError):
                connection.execute(goes_back)
    assert balances.debit(["anna"], 1) == [True]
    assert balances.debit(["anna"], 2) == [False]


def test_debits_and_the_count_of_releases_stand_together_or_not_at_all(tmp_path: Path) -> None:
    balances = taken(tmp_path / "balances.db")
    with contextlib.closing(sqlite3.connect(balances.path, isolation_level=None)) as connection:
        connection.execute("CREATE TRIGGER full BEFORE UPDATE ON filter BEGIN SELECT RAISE(ABORT, 'full'); END")
        with pytest.raises(LedgerError):
            balances.debit(["anna", "bo"], 0)
        assert counted(balances.path) == (0, [])
        connection.execute("DROP TRIGGER full")
    assert balances.debit(["anna"], 0) == [True]


@pytest.mark.parametrize(
    "change",
    [
        "secret = replace(secret, substr(secret, 1, 1), 'x')",
        "secret = substr(secret, 3)",
        "secret = secret || 'ab'",
        "secret = x'ff'",
        "line = '{'",
        "line = '[1]'",
        "line = NULL",
        "line = x'7b7d'",
        "line = cast(x'ff' AS TEXT)",
        "releases = 'many'",
        "most = x'02'",
        "terms = x'00'",
    ],
)
def test_a_row_that_holds_something_else_is_refused_as_a_broken_file(change: str, tmp_path: Path) -> None:
    path = tmp_path / "balances.db"
    balances = taken(path)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("DROP TRIGGER filter_grow")
        connection.execute(f"UPDATE filter SET {change}")  # noqa: S608  ours
    with pytest.raises(LedgerError, match="broken or foreign"):
        balances.debit(["unit"], 0)
        SQLiteBalances(path).bind_filter(TERMS)


def test_a_file_without_the_row_of_its_filter_is_refused_as_a_broken_one(tmp_path: Path) -> None:
    path = tmp_path / "balances.db"
    balances = taken(path)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.executescript("DROP TRIGGER filter_stay; DELETE FROM filter;")
    with pytest.raises(LedgerError, match="broken or foreign"):
        balances.debit(["unit"], 0)
    with pytest.raises(LedgerError, match="broken or foreign"):
        SQLiteBalances(path).bind_filter(TERMS)


def sizes(path: Path) -> list[int]:
    return [one.stat().st_size for one in (path, path.with_name(f"{path.name}-journal"))]


def test_no_debit_takes_space_that_was_not_set_aside_before(tmp_path: Path) -> None:
    """The bytes that a debit needs follow from who takes part: on a full disk its failure would tell."""
    balances = taken(tmp_path / "balances.db")
    balances.make_room(3_000)
    kept = sizes(balances.path)
    for count in (0, 1, 3_000, 3_000):
        balances.debit([f"unit {number}" for number in range(count)], 0)
        assert sizes(balances.path) == kept
    SQLiteBalances(balances.path).make_room(3_000)
    assert sizes(balances.path) == kept
    assert counted(balances.path)[0] == 4


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_room_that_was_half_made_when_its_process_died_is_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, steps: int
) -> None:
    """Of three steps the last one gives the pages back: without it all of the file is taken, whatever its size is."""
    balances = taken(tmp_path / "balances.db")
    write, done = PerCallFile.write, []

    def stopped(file: PerCallFile, action: Any) -> Any:
        if len(done) == steps:
            raise KeyboardInterrupt
        done.append(action)
        return write(file, action)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PerCallFile, "write", stopped)
        balances.make_room(500)
    balances.make_room(500)
    kept = sizes(balances.path)
    assert kept[0] < 3 * (1 << 16)  # not made twice
    assert balances.debit([f"unit {number}" for number in range(500)], 0) == [True] * 500
    assert sizes(balances.path) == kept
    with contextlib.closing(sqlite3.connect(balances.path)) as connection:
        assert connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'room'").fetchone() is None
