"""Places for one ledger each, and a budget on one, whose prices a person can add up."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.privacy.accounting.events import PureEvent
from langchain_dpicl.privacy.extensions.ledger_anchor import LedgerAnchor
from langchain_dpicl.privacy.ledger.shares import Share
from langchain_dpicl.privacy.ledger.state import COMMIT, GIVE_BACK, RESERVE
from langchain_dpicl.privacy.ledger.store import LedgerStore
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.stores import FileAnchor, SQLiteStore

EPSILON, DELTA = 1.0, 1e-6


class Place(Protocol):
    """Where one ledger lives. Stores that it returns can be closed."""

    words: str

    def new(self) -> LedgerStore:
        """Makes the ledger, without a header."""

    def open(self, *, timeout: float = 60.0) -> LedgerStore:
        """Opens it, as another process does."""

    def hasty(self, timeout: float) -> tuple[LedgerStore, contextlib.AbstractContextManager[None]]:
        """Opens it; in the block that is returned too, a writer waits so long for the lock."""

    def hold(self) -> Callable[[], object]:
        """Takes the write lock past our code; returns what lets it go."""

    def anchor(self) -> LedgerAnchor:
        """Opens an anchor in a second place, making it the first time."""


Places = Callable[[], Place]


@dataclass(frozen=True)
class SQLitePlace:
    """A SQLite file."""

    path: Path

    @property
    def words(self) -> str:
        return self.path.name

    def new(self) -> SQLiteStore:
        return SQLiteStore.new(self.path)

    def open(self, *, timeout: float = 60.0) -> SQLiteStore:
        return SQLiteStore(self.path, timeout=timeout)

    def hasty(self, timeout: float) -> tuple[SQLiteStore, contextlib.AbstractContextManager[None]]:
        return self.open(timeout=timeout), contextlib.nullcontext()  # it waits for nothing but the lock

    def hold(self) -> Callable[[], object]:
        import sqlite3

        connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        connection.execute("BEGIN IMMEDIATE")
        return connection.close

    def anchor(self) -> FileAnchor:
        path = self.path.with_suffix(".anchor.json")
        return FileAnchor(path) if path.exists() else FileAnchor.new(path)


def sqlite_places(folder: Path) -> Places:
    """Returns a factory of SQLite files in a folder."""
    numbers = itertools.count(1)
    return lambda: SQLitePlace(folder / f"budget{next(numbers)}.db")


@dataclass(frozen=True)
class Terms:
    """One component of `count` tickets, which fills the budget."""

    count: int
    refundable: bool = False

    def declared(self, budget: Budget) -> Share:
        # The price is by hand: what a ticket costs decides nothing here.
        ticket = Ticket("t", PureEvent(EPSILON / self.count), max_count=self.count, refundable=self.refundable)
        return budget.declare("c", tickets=(ticket,), epsilon=EPSILON)

    def made(self, place: Place, **options: Any) -> tuple[Budget, Share]:
        """Makes the ledger; returns a hand on it."""
        budget = Budget(epsilon=EPSILON, delta=DELTA, store=place.new(), **options)
        return budget, self.declared(budget)

    def opened(self, place: Place, *, timeout: float = 60.0, **options: Any) -> tuple[Budget, Share]:
        """Opens the ledger, verified; returns a hand on it."""
        budget = Budget.open(place.open(timeout=timeout), **options)
        return budget, self.declared(budget)


def lines(store: LedgerStore, *kinds: str) -> dict[int, int]:
    """Returns the count of tickets of each line of these kinds, by line number."""
    return {line.seq: int(line.body["count"]) for line in store.records() if line.kind in kinds}


def reserved(store: LedgerStore) -> int:
    """Returns how many tickets the ledger holds as spent."""
    return sum(lines(store, RESERVE).values()) - sum(lines(store, GIVE_BACK).values())


def settled(store: LedgerStore) -> int:
    """Returns how many reserved tickets were committed or given back."""
    return sum(lines(store, COMMIT, GIVE_BACK).values())
