"""What becomes of a ledger whose log is removed under it: nothing is granted on what nobody else will read."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from langchain_dpicl.exceptions import LedgerUnavailableError
from langchain_dpicl.stores import SQLiteStore
from tests.sqlite_ledgers import made, numbers, write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "budget.db"


OTHER = """
import sqlite3, sys
ledger = sqlite3.connect(sys.argv[1], isolation_level=None)
ledger.execute("BEGIN IMMEDIATE")
seq, head = ledger.execute("SELECT seq, head FROM ledgers").fetchone()
line = (seq + 1, head, '{"n": 100}', f"hash {seq + 1}")
ledger.execute("INSERT INTO lines VALUES (1, ?, ?, 'note', ?, 'then', ?)", line)
ledger.execute("UPDATE ledgers SET seq = ?, head = ?", (line[0], line[3]))
ledger.execute("COMMIT")
ledger.close()
"""


def another_process(path: Path) -> None:
    """Writes a line in a process that shares no lock with this one, and closes the file."""
    subprocess.run([sys.executable, "-S", "-c", OTHER, str(path)], check=True)


def drop_locks(path: Path) -> None:
    """Opens and closes the file, as a copy does: this process's locks on it are gone."""
    path.open("rb").close()


@pytest.mark.skipif(os.name != "posix", reason="only POSIX drops locks")
class TestLogsThatWereRemoved:
    """Another process may remove the log of an open file whose locks this process dropped."""

    def test_the_log_stays_while_the_locks_are_held(self, path: Path) -> None:
        store = made(path, lines=1)
        another_process(path)
        write(store, 1)
        assert numbers(store) == [0, 100, 0]

    def test_nothing_is_granted_on_a_log_that_is_gone(self, path: Path) -> None:
        store = made(path, lines=1)
        drop_locks(path)
        another_process(path)
        with pytest.raises(LedgerUnavailableError, match="use backup"), store.transaction():
            pytest.fail("granted")
        write(store, 1)
        another_process(path)
        assert numbers(store) == numbers(SQLiteStore(path)) == [0, 100, 0, 100]

    def test_a_log_that_goes_before_the_lock_is_held_decides_nothing(self, path: Path) -> None:
        store = made(path, lines=1)
        run = store._link._run

        def late(statement: str) -> None:
            if statement == "BEGIN IMMEDIATE":
                drop_locks(path)
                another_process(path)
            run(statement)

        store._link._run = late  # type: ignore[method-assign]
        with pytest.raises(LedgerUnavailableError, match="use backup"), store.transaction():
            pytest.fail("granted")
        store._link._run = run  # type: ignore[method-assign]
        assert numbers(store) == [0, 100]

    def test_a_log_that_goes_inside_a_transaction_grants_nothing(self, path: Path) -> None:
        store = made(path, lines=1)
        ended = False
        with pytest.raises(LedgerUnavailableError, match="use backup"), store.transaction() as view:
            view.append("note", {"n": 1})
            for end in ("-wal", "-shm"):
                Path(f"{path}{end}").unlink()
            ended = True
        assert ended
        write(store, 1)
        assert numbers(store) == numbers(SQLiteStore(path))
        assert numbers(store)[-1] == 0

    def test_a_file_that_goes_inside_a_transaction_grants_nothing(self, path: Path) -> None:
        store = made(path, lines=1)
        with pytest.raises(LedgerUnavailableError, match="use backup"), store.transaction() as view:
            view.append("note", {"n": 1})
            path.unlink()

    def test_reading_does_not_show_what_a_removed_log_shows(self, path: Path) -> None:
        store = made(path, lines=1)
        drop_locks(path)
        another_process(path)
        another_process(path)
        for attempt in (store.records, store.head, store.header):
            with pytest.raises(LedgerUnavailableError, match="use backup"):
                attempt()
            assert attempt()
            drop_locks(path)
            another_process(path)

    def test_all_stores_of_the_file_are_opened_anew(self, path: Path) -> None:
        stores = [made(path, lines=1), SQLiteStore(path), SQLiteStore(path)]
        drop_locks(path)
        another_process(path)
        with pytest.raises(LedgerUnavailableError, match="use backup"):
            stores[1].records()
        assert [store._link.connection for store in stores] == [None] * 3
        for store in stores:
            write(store, 1)
        another_process(path)
        assert [numbers(store) for store in stores] == [[0, 100, 0, 0, 0, 100]] * 3

    def test_a_new_store_does_not_share_a_removed_log(self, path: Path) -> None:
        old = made(path, lines=1)
        drop_locks(path)
        another_process(path)
        new = SQLiteStore(path)
        assert old._link.connection is None
        write(new, 1)
        write(old, 1)
        another_process(path)
        assert numbers(old) == numbers(new) == [0, 100, 0, 0, 100]

    def test_while_a_thread_uses_a_removed_log_the_file_is_not_opened(self, path: Path) -> None:
        store = made(path, lines=1)
        with ThreadPoolExecutor(1) as pool:
            with pytest.raises(LedgerUnavailableError, match="use backup"), store.transaction() as view:
                view.append("note", {"n": 1})
                for end in ("-wal", "-shm"):
                    Path(f"{path}{end}").unlink()
                with pytest.raises(LedgerUnavailableError, match="another thread"):
                    pool.submit(SQLiteStore, path).result(10)
            assert pool.submit(lambda: numbers(SQLiteStore(path))).result(10) == numbers(store)
