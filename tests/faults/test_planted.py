"""Bugs planted in the durable ledger: the fault that is there for each has to count a violation."""

from __future__ import annotations

import contextlib
import random
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl.privacy.extensions import private_streams as streams
from langchain_dpicl.privacy.extensions.ledger_anchor import AnchoredWriter
from langchain_dpicl.privacy.extensions.stream_ledger import StreamTerms, Windows
from langchain_dpicl.privacy.ledger import store as stores
from langchain_dpicl.privacy.ledger import writer
from langchain_dpicl.privacy.ledger.writer import LedgerWriter
from langchain_dpicl.stores import rows as _rows
from langchain_dpicl.stores import sqlite_file, sqlite_ledger
from langchain_dpicl.stores.rows import LedgerHead
from langchain_dpicl.stores.sqlite_ledger import SQLiteConnection, SQLiteStore, WriterQueue
from tests.faults.catalogue import SQLITE
from tests.ledgers import use_simple_prices

Patch = pytest.MonkeyPatch
RUN = SQLiteConnection._run


def _instead(patch: Patch, statement: str, run: Callable[[SQLiteConnection], object]) -> None:
    """Runs something else in place of one statement of a transaction."""
    patch.setattr(SQLiteConnection, "_run", lambda link, given: run(link) if given == statement else RUN(link, given))


def deferred_lock(patch: Patch) -> None:
    """The lock is taken by the first write, after the decision; nobody queues, which would hide it."""
    patch.setattr(WriterQueue, "_enter", lambda queue, seconds: False)
    _instead(patch, "BEGIN IMMEDIATE", lambda link: RUN(link, "BEGIN"))


def forgotten_commit(patch: Patch) -> None:
    """A transaction ends well, and its lines are not committed."""

    def commit(link: SQLiteConnection) -> None:
        if not link.ask("SELECT max(seq) FROM ledgers")[0][0]:  # the header stands
            RUN(link, "COMMIT")

    _instead(patch, "COMMIT", commit)


def decision_on_what_was_seen_before(patch: Patch) -> None:
    """The ledger is read once; what others write is not looked at."""
    catch_up = LedgerWriter._catch_up

    def once(here: LedgerWriter, *given: Any, **options: Any) -> None:
        if not here._state.seq:
            catch_up(here, *given, **options)

    patch.setattr(LedgerWriter, "_catch_up", once)


def no_timeout(patch: Patch) -> None:
    """A waiting writer waits as long as it takes."""
    connect = sqlite3.connect
    patch.setattr(sqlite3, "connect", lambda *given, **options: connect(*given, **{**options, "timeout": 60}))


def made_by_opening(patch: Patch) -> None:
    """A path that holds nothing becomes a new ledger."""
    start = SQLiteStore.__init__

    def start_or_make(store: SQLiteStore, path: Path, **options: Any) -> None:
        if not path.exists():
            sqlite_file.make_file(path.resolve(), timeout=1)
            with contextlib.closing(sqlite3.connect(path)) as connection:
                connection.execute("INSERT INTO ledgers (name) VALUES ('budget')")
                connection.commit()
        start(store, path, **options)

    patch.setattr(SQLiteStore, "__init__", start_or_make)


def other_tables_taken(patch: Patch) -> None:
    """What the tables are is not looked at."""
    patch.setattr(sqlite_file, "_check_schema", lambda *_: None)


def newer_tables_taken(patch: Patch) -> None:
    """What version the tables have is not looked at."""
    patch.setattr(sqlite_file, "_check_version", lambda *_: None)


def hard_links_taken(patch: Patch) -> None:
    """Two names of a file, each with a log of its own."""
    patch.setattr(sqlite_file, "_check_file", sqlite_file.file_identity)


def any_journal_taken(patch: Patch) -> None:
    """The journal mode is asked for, and its answer not heard."""
    patch.setattr(sqlite_file, "_use_log", lambda connection, _: connection.execute("PRAGMA journal_mode = WAL"))


def lost_end_taken(patch: Patch) -> None:
    """Lines that are missing at the end are not missed."""
    patch.setattr(_rows, "records_of", lambda rows, **_: tuple(_rows.record_of(row) for row in rows))
    head = "SELECT seq, hash, hash FROM lines WHERE ledger = ? ORDER BY seq DESC LIMIT 1"
    first = "SELECT 0, digest, NULL FROM ledgers WHERE id = ?"

    def last_there_is(rows: Any) -> LedgerHead:
        found = rows._link.ask(head, rows._number) or rows._link.ask(first, rows._number)
        return LedgerHead(*found[0][:2])

    patch.setattr(sqlite_ledger._SQLiteRows, "head", last_there_is)
    patch.setattr(
        sqlite_ledger._SQLiteRows,
        "lines",
        lambda rows, after: rows._link.ask(sqlite_ledger._LINES, rows._number, after),
    )


def header_not_compared(patch: Patch) -> None:
    """The header's digest is not taken again, nor the first line compared with it."""
    patch.setattr(stores.LedgerHeader, "digest", property(lambda _: "0" * 64))


def lines_not_hashed_again(patch: Patch) -> None:
    """A line is believed if it follows."""
    patch.setattr(stores.LedgerRecord, "computed_hash", property(lambda line: line.hash))
    patch.setattr(stores.LineBlock, "follow", lambda *_: False)  # they are looked at one by one


def anchor_not_asked(patch: Patch) -> None:
    """An anchor is written and never compared."""
    patch.setattr(AnchoredWriter, "_check_known", lambda *_: None)


def same_lines_in_two_histories(patch: Patch) -> None:
    """Two copies that are asked the same at the same second write the same line."""
    patch.setattr(writer.secrets, "token_hex", lambda _: "0")
    now = time.time()
    patch.setattr(time, "time", lambda: now)


def charge_forgotten_when_it_fails(patch: Patch) -> None:
    """A full disk is no reason to refuse, and whether the line is there is not looked at."""
    patch.setattr(SQLiteStore, "flush", lambda store, seq, head: None)

    def write(link: SQLiteConnection, command: str, *values: object) -> None:
        with contextlib.suppress(sqlite3.Error):
            link.connection.execute(command, values)

    def run(link: SQLiteConnection, given: str) -> None:
        with contextlib.suppress(sqlite3.Error):
            link.connection.execute(given)

    patch.setattr(SQLiteConnection, "write", write)
    patch.setattr(SQLiteConnection, "_run", run)


def lock_left_behind(patch: Patch) -> None:
    """A stop inside a transaction leaves it open."""
    undo = SQLiteConnection._roll_back
    patch.setattr(SQLiteConnection, "_roll_back", lambda link: None if link._is_writing else undo(link))


def forks_taken_as_they_are(patch: Patch) -> None:
    """A child writes on its parent's connection."""
    patch.setattr(SQLiteConnection, "before_fork", lambda _: False)
    patch.setattr(SQLiteConnection, "in_child", lambda link, **_: None)
    patch.setattr(SQLiteConnection, "_own", lambda link: link.connection)


def windows_too_short(patch: Patch) -> None:
    """A run is charged to all windows that touch it but the last one."""
    touched = Windows.touched

    def shorter(windows: Windows, extent: Any) -> Any:
        first, last = touched(windows, extent)
        return first, max(last - 1, first)

    patch.setattr(Windows, "touched", shorter)


def records_that_wander(patch: Patch) -> None:
    """What comes late belongs to the day on which it comes."""
    block_at = StreamTerms.block_at

    def of_arrival(terms: StreamTerms, seconds: float) -> int:
        now = block_at(terms, streams.time.time())
        return now if random.random() < 0.2 else block_at(terms, seconds)

    patch.setattr(StreamTerms, "block_at", of_arrival)


PLANTS: list[tuple[Callable[[Patch], None], str, int]] = [
    (deferred_lock, "L1 64 threads", 3),
    (forgotten_commit, "L1 64 threads", 1),
    (decision_on_what_was_seen_before, "L9", 1),
    (forgotten_commit, "L2 kill -9", 10),
    (no_timeout, "L8 lock held 10 s", 1),
    (made_by_opening, "L7", 1),
    (other_tables_taken, "L7", 1),
    (newer_tables_taken, "L7", 1),
    (hard_links_taken, "L7", 1),
    (any_journal_taken, "L7", 1),
    (lost_end_taken, "L5 edited", 1),
    (header_not_compared, "L5 edited", 1),
    (lines_not_hashed_again, "L5 edited", 1),
    (anchor_not_asked, "L3", 5),
    (anchor_not_asked, "L6", 1),
    (same_lines_in_two_histories, "L6", 1),
    (charge_forgotten_when_it_fails, "L4 full", 1),
    (charge_forgotten_when_it_fails, "L4 read-only", 1),
    (lock_left_behind, "L10 stop", 12),
    (forks_taken_as_they_are, "L13", 1),
    (windows_too_short, "L2 a stream", 40),
    (records_that_wander, "L2 a stream", 20),
]


@pytest.mark.parametrize(("plant", "fault", "trials"), PLANTS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_planted_bug_is_counted(
    plant: Callable[[Patch], None], fault: str, trials: int, tmp_path: Path, monkeypatch: Patch
) -> None:
    use_simple_prices(monkeypatch)
    plant(monkeypatch)
    chosen = next(one for one in SQLITE if one.words.startswith(fault))
    found = chosen.count(tmp_path, trials=trials, tick=lambda: None)
    assert found.violations
