"""L7 and L14: what is no ledger, or not this one. Refused, and nothing is made or changed."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import (
    LedgerError,
    LedgerUnavailableError,
    PrivacyBudgetError,
    PrivacyBudgetMismatchError,
)
from langchain_dpicl.stores import SQLiteStore
from tests import ledgers
from tests.faults.counts import Count, Violation, require
from tests.faults.places import DELTA, EPSILON, SQLitePlace, Terms
from tests.faults.rot import unguarded

TERMS = Terms(10)
Make = Callable[[Path], object]


def _ledger(path: Path) -> Budget:
    budget, share = TERMS.made(SQLitePlace(path))
    share.reserve("t")
    budget.close()
    return budget


def _sql(*statements: str) -> Make:
    def make(path: Path) -> None:
        _ledger(path)
        with unguarded(path) as connection:
            for statement in statements:
                connection.execute(statement)

    return make


def _other_database(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE lines (seq INTEGER)")
    connection.commit()
    connection.close()


def _linked(path: Path) -> None:
    _ledger(path)
    os.link(path, path.with_name("second name"))


CASES: dict[str, tuple[Make, type[PrivacyBudgetError]]] = {
    "missing": (lambda _: None, LedgerUnavailableError),
    "missing, behind a symlink": (lambda path: path.symlink_to(path.with_name("nowhere")), LedgerUnavailableError),
    "zero-length": (lambda path: path.write_bytes(b""), LedgerError),
    "a folder": (Path.mkdir, LedgerError),
    "text": (lambda path: path.write_text("epsilon = 4\n" * 1000), LedgerError),
    "another database": (_other_database, LedgerError),
    "newer tables": (_sql("PRAGMA user_version = 99"), LedgerError),
    "other tables": (_sql("ALTER TABLE ledgers ADD COLUMN epsilon REAL"), LedgerError),
    "another application's": (_sql("PRAGMA application_id = 1"), LedgerError),
    "a ledger of another name": (_sql("UPDATE ledgers SET name = 'other'"), LedgerError),
    "two hard links": (_linked, LedgerError),
    "cut short": (lambda path: (_ledger(path), os.truncate(path, 5000)), LedgerError),
}


def open_all(folder: Path, count: Count, *, trials: int) -> None:
    """Opens each of them; then ledgers of others, aliases, and file systems without a write-ahead log."""
    for words, (make, error) in CASES.items():
        with count.trial(words):
            path = folder / words / "budget.db"
            path.parent.mkdir()
            make(path)
            before = _listing(path.parent)
            _refused(lambda path=path: TERMS.opened(SQLitePlace(path)), error, words)
            require(_listing(path.parent) == before, "something was made or changed")
            count.seen["refused"] += 1
    for words, check in {"others": _others, "aliases": _aliases, "no log": _no_log}.items():
        with count.trial(words):
            (folder / words).mkdir()
            check(folder / words)


def _listing(folder: Path) -> list[tuple[str, int]]:
    return sorted((child.name, child.lstat().st_size) for child in folder.iterdir())


def _refused(attempt: Callable[[], object], error: type[PrivacyBudgetError], words: str) -> None:
    try:
        attempt()
    except error:
        return
    raise Violation(f"not refused: {words}")


def _others(folder: Path) -> None:
    """Other limits than the ledger's; examples that belong to another ledger."""
    first, second = SQLitePlace(folder / "first.db"), SQLitePlace(folder / "second.db")
    _ledger(first.path)
    _ledger(second.path)
    for limits in ({"epsilon": 2 * EPSILON, "delta": DELTA}, {"epsilon": EPSILON, "delta": DELTA / 2}):
        store = first.open()
        _refused(lambda limits=limits, store=store: Budget(**limits, store=store), PrivacyBudgetMismatchError, "limits")
    examples = ledgers.private("d")
    Budget.open(first.open()).bind(examples)
    _refused(
        lambda: Budget.open(second.open()).bind(examples), PrivacyBudgetMismatchError, "examples of another ledger"
    )


def _aliases(folder: Path) -> None:
    place = SQLitePlace(folder / "budget.db")
    _ledger(place.path)
    (folder / "link.db").symlink_to(place.path)
    (folder / "linked").symlink_to(folder, target_is_directory=True)
    for name in ("link.db", "linked/budget.db", "linked/linked/link.db"):
        TERMS.opened(SQLitePlace(folder / name))[1].reserve("t")
    require(TERMS.opened(place)[1].remaining("t") == TERMS.count - 4, "an alias is another ledger")


def _no_log(folder: Path) -> None:
    """A file system without shared memory, as SQLite's dot-file locking makes it: the journal is not what was asked."""
    place = SQLitePlace(folder / "budget.db")
    _ledger(place.path)
    connect = sqlite3.connect
    try:
        sqlite3.connect = lambda database, **options: connect(f"{database}&vfs=unix-dotfile", **options)
        _refused(place.open, LedgerError, "no write-ahead log")
        _refused(lambda: SQLiteStore.new(folder / "new.db"), LedgerError, "no write-ahead log, new")
    finally:
        sqlite3.connect = connect
    require(not (folder / "new.db").exists(), "a ledger was made")
    require(TERMS.opened(place)[1].remaining("t") == TERMS.count - 1, "the ledger was changed")
