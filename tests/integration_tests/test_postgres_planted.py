"""Bugs planted in the ledger on PostgreSQL: the fault that is there for each has to count a violation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from langchain_dpicl.exceptions import LedgerUnavailableError
from langchain_dpicl.stores import postgres
from langchain_dpicl.stores import postgres as postgres_connection
from langchain_dpicl.stores.postgres import Answers, PostgresConnection, Query, TransactionLock
from tests.faults.catalogue import POSTGRES
from tests.faults.counts import Count
from tests.faults.postgres_place import PostgresPlace
from tests.ledgers import use_simple_prices
from tests.postgres import PostgresServer

Patch = pytest.MonkeyPatch


def no_row_lock(patch: Patch) -> None:
    """The ledger's row is read, and not locked. The append still knows which line it follows."""
    start = postgres.PostgresStore.__init__

    def start_unlocked(store: Any, *given: Any, **options: Any) -> None:
        start(store, *given, **options)
        store._locked = store._row

    patch.setattr(postgres.PostgresStore, "__init__", start_unlocked)


def no_row_lock_and_a_blind_append(patch: Patch) -> None:
    """The row is not locked, and its line is not compared. The key of the lines still is."""
    no_row_lock(patch)
    patch.setattr(
        postgres, "_APPEND", postgres._APPEND.replace("AND seq = %s AND head = %s", "AND %s >= 0 AND %s > ''")
    )


def lines_read_before_the_lock(patch: Patch) -> None:
    """What stands is looked at by a reader; then the lock is taken."""
    begin = TransactionLock.begin

    def look_and_begin(turn: TransactionLock, queries: Sequence[Query]) -> Answers:
        found = turn.snapshot_query([(query.replace(b" FOR UPDATE", b""), values) for query, values in queries])
        begin(turn, queries)
        return found

    patch.setattr(TransactionLock, "begin", look_and_begin)


def one_moment_for_writers(patch: Patch) -> None:
    """A writer's statements see what stood when it began to wait."""
    patch.setattr(postgres_connection, "_WRITE", b"BEGIN ISOLATION LEVEL REPEATABLE READ READ WRITE")


def autocommit(patch: Patch) -> None:
    """Each statement stands for itself; the lock is gone before the decision."""
    patch.setattr(postgres_connection, "_WRITE", b"SELECT 1")
    patch.setattr(postgres_connection, "_COMMIT", b"SELECT 1")
    patch.setattr(postgres_connection, "_is_idle", lambda _: True)


def an_answer_that_is_taken_for_granted(patch: Patch) -> None:
    """Where no word comes back the best is assumed."""
    commit = TransactionLock.commit

    def hope(turn: TransactionLock, *queries: Query) -> list[int]:
        with contextlib.suppress(LedgerUnavailableError):
            return commit(turn, *queries)
        return [1] * len(queries)

    patch.setattr(TransactionLock, "commit", hope)


def a_commit_that_is_sent_again(patch: Patch) -> None:
    """Where no word comes back the same is sent once more, on a new connection, with no look at what stands."""
    commit = TransactionLock.commit

    def again(turn: TransactionLock, *queries: Query) -> list[int]:
        try:
            return commit(turn, *queries)
        except LedgerUnavailableError:
            turn._hand.drop()
            turn._hand.connection = turn._link.connect()
            patched = [
                (query.replace(b"AND seq = %s AND head = %s", b"AND %s >= 0 AND %s > ''"), v) for query, v in queries
            ]
            commit(turn, *patched)
            return [1] * len(queries)

    patch.setattr(TransactionLock, "commit", again)


def no_time_limits(patch: Patch) -> None:
    """A held lock is waited for as long as it takes."""
    patch.setattr(PostgresConnection, "limits", property(lambda _: ("0", "0", "0")))
    patch.setattr(postgres_connection, "_run_with_timeout", lambda gen, _: gen)


def a_transaction_left_behind(patch: Patch) -> None:
    """What a stop leaves open stays open."""
    patch.setattr(TransactionLock, "_end", lambda _: None)


def a_server_that_forgets(patch: Patch) -> None:
    """What was said to stand is undone."""
    patch.setattr(postgres_connection, "_COMMIT", b"ROLLBACK")


PLANTS: list[tuple[Callable[[Patch], None], str, int]] = [
    (no_row_lock, "L1 64 processes", 1),
    (no_row_lock_and_a_blind_append, "L1 64 processes", 1),
    (lines_read_before_the_lock, "L1 64 processes", 1),
    (one_moment_for_writers, "L1 64 processes", 1),
    (autocommit, "L1 64 processes", 1),
    (an_answer_that_is_taken_for_granted, "L2 lost answers", 2),
    (a_commit_that_is_sent_again, "L2 lost answers", 2),
    (no_time_limits, "L8 lock held 10 s", 1),
    (a_transaction_left_behind, "L10 stop", 20),
    (a_server_that_forgets, "L2 kill -9", 4),
]


@pytest.mark.parametrize(("plant", "words", "trials"), PLANTS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_planted_bug_is_counted(
    plant: Callable[[Patch], None], words: str, trials: int, postgres: PostgresServer, monkeypatch: Patch
) -> None:
    use_simple_prices(monkeypatch)
    plant(monkeypatch)
    fault = next(fault for fault in POSTGRES if fault.words.startswith(words))
    found = Count()
    with found.watched("between trials"):
        fault.run(lambda: PostgresPlace(postgres, postgres.fresh("schema")), found, trials=trials, **fault.options)
    assert found.violations
