from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from langchain_dpicl.exceptions import ConfigurationError, LedgerError, LedgerUnavailableError
from langchain_dpicl.stores import SQLiteStore, new_store, open_store, sqlite_file, sqlite_ledger
from tests.contracts.store import header, in_child
from tests.sqlite_ledgers import edited, made, numbers, write


class Broken:
    """A connection that can be closed, and nothing else."""

    in_transaction = True

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.close = connection.close

    def execute(self, *_: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")


class TestTransactions:
    """What SQLite can do to one."""

    def test_a_writer_that_waits_too_long_is_refused_and_names_the_file(self, path: Path) -> None:
        made(path)
        store = SQLiteStore(path, timeout=0.1)
        with edited(path) as connection:
            connection.execute("BEGIN IMMEDIATE")
            with pytest.raises(LedgerUnavailableError, match=r"budget\.db: locked"), store.transaction():
                pytest.fail("granted")
            assert store.records() == ()
        write(store, 1)
        assert numbers(store) == [0]

    def test_a_transaction_that_sqlite_gave_up_takes_no_more_lines(self, path: Path) -> None:
        store = made(path, lines=1)
        with pytest.raises(LedgerUnavailableError, match="given up"), store.transaction() as view:
            view.append("note", {"n": 1})
            store._link.connection.execute("ROLLBACK")
            view.append("note", {"n": 2})
        assert numbers(store) == [0]

    def test_a_transaction_that_sqlite_gave_up_does_not_end_well(self, path: Path) -> None:
        store = made(path, lines=1)
        with pytest.raises(LedgerError), store.transaction() as view:
            view.append("note", {"n": 1})
            store._link.connection.execute("ROLLBACK")
        assert numbers(store) == [0]
        write(store, 1)
        assert numbers(store) == [0, 0]

    def test_a_transaction_left_open_by_a_stop_is_undone(self, path: Path) -> None:
        store = made(path, lines=1)
        store._link.connection.execute("BEGIN IMMEDIATE")
        store._link.connection.execute("UPDATE ledgers SET seq = 9")
        assert numbers(store) == [0]
        write(store, 1)
        assert numbers(SQLiteStore(path)) == [0, 0]

    def test_a_connection_that_cannot_undo_is_given_up_for_another(self, path: Path) -> None:
        store = made(path, lines=1)
        store._link.connection.execute("BEGIN IMMEDIATE")
        broken = store._link.connection
        store._link.connection = Broken(broken)
        assert numbers(store) == [0]
        assert store._link.connection is not None
        assert not isinstance(store._link.connection, Broken)
        write(store, 1)
        assert numbers(store) == [0, 0]

    def test_inside_a_transaction_its_thread_reads_what_it_writes(self, path: Path) -> None:
        store = made(path, lines=1)
        with store.transaction() as view:
            line = view.append("note", {"n": 1})
            assert numbers(store) == [0, 1]
            assert store.head() == (2, line.hash)
            assert store.header() is not None
        assert numbers(store) == [0, 1]

    def test_a_ledger_that_vanished_from_its_file_is_refused(self, path: Path) -> None:
        store = made(path, lines=1)
        store._number = 7
        with pytest.raises(LedgerError, match="gone from its file"):
            store.header()

    def test_a_flag_left_by_a_stop_closes_nothing(self, path: Path) -> None:
        store = made(path, lines=1)
        store._link._is_writing = True
        assert numbers(store) == [0]
        write(store, 1)
        assert numbers(store) == [0, 0]

    def test_a_file_put_in_its_place_is_opened_anew_with_all_checks(self, path: Path) -> None:
        store = made(path, lines=3)
        other = made(path.with_name("other.db"), lines=1)
        other.close()
        path.with_name("other.db").rename(path)
        for end in ("-wal", "-shm"):
            Path(f"{path}{end}").unlink()
        assert numbers(store) == [0]
        path.unlink()
        with pytest.raises(LedgerUnavailableError):
            store.records()
        path.write_bytes(b"")
        with pytest.raises(LedgerError, match="empty"), store.transaction():
            pytest.fail("granted")

    def test_threads_that_read_wait_for_the_writer_of_their_handle(self, path: Path) -> None:
        store = made(path)
        with ThreadPoolExecutor(1) as pool:
            with store.transaction() as view:
                reading = pool.submit(numbers, store)
                view.append("note", {"n": 5})
            assert reading.result(60) == [5]


class TestForks:
    """A child forked between transactions opens the file for itself; the parent's file was closed for it."""

    def test_a_child_keeps_its_lines_when_its_parent_closes_the_file(self, path: Path) -> None:
        # Had the file been open, the parent would take the child's log away: SQLite's locks are known per process.
        store = made(path)
        ready, go = os.pipe(), os.pipe()
        pid = os.fork()
        if not pid:
            try:
                write(store, 1)
                os.write(ready[1], b"x")
                os.read(go[0], 1)
                write(store, 1)
            finally:
                os._exit(0)
        os.read(ready[0], 1)
        assert numbers(store) == [0]
        store.close()
        os.write(go[1], b"x")
        os.waitpid(pid, 0)
        assert numbers(SQLiteStore(path)) == [0, 0]

    def test_nothing_of_the_file_is_opened_by_a_child_forked_in_a_transaction(self, path: Path) -> None:
        store = made(path)

        def child() -> None:
            for attempt in (lambda: SQLiteStore(path), store.header, lambda: SQLiteStore.new(path, name="b")):
                with pytest.raises(LedgerError, match="forked while it was in use"):
                    attempt()

        with store.transaction() as view:
            view.append("note", {"n": 1})
            assert in_child(child)
        assert numbers(store) == [1]

    def test_a_fork_that_python_does_not_see_is_seen_by_the_process_id(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = made(path, lines=1)
        monkeypatch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(LedgerError, match="forked while it was in use"):
            store.records()
        with pytest.raises(LedgerError), store.transaction():
            pytest.fail("granted")
        store._link.__del__()
        assert store._link.connection is not None
        monkeypatch.undo()
        assert numbers(store) == [0]

    def test_threads_that_fork_at_once_leave_no_lock_behind(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        made(path).close()
        store = SQLiteStore(path, timeout=0.05)
        monkeypatch.setattr(sqlite_ledger, "_links", lambda: [store._link])

        def fork_meanwhile() -> None:
            sqlite_ledger._before_fork()  # waits for the lock, and does without it
            sqlite_ledger._in_parent()

        def is_free() -> bool:
            return store._link.lock.acquire(blocking=False)

        with ThreadPoolExecutor(2) as pool:
            sqlite_ledger._before_fork()
            pool.submit(fork_meanwhile).result(60)
            assert not pool.submit(is_free).result(60)
            sqlite_ledger._in_parent()
            assert pool.submit(is_free).result(60)

    def test_a_fork_waits_for_the_transactions_of_other_threads(self, path: Path) -> None:
        store = made(path)
        inside, go = threading.Event(), threading.Event()

        def use() -> None:
            with store.transaction() as view:
                view.append("note", {"n": 1})
                inside.set()
                go.wait()

        with ThreadPoolExecutor(1) as pool:
            using = pool.submit(use)
            inside.wait()
            threading.Timer(0.05, go.set).start()
            assert in_child(lambda: write(store, 1))
            using.result()
        assert numbers(store) == [1, 0]


class TestBackup:
    """A copy of all the ledgers of a file."""

    def test_a_backup_is_a_ledger_of_its_own(self, path: Path, tmp_path: Path) -> None:
        store = made(path, lines=3)
        SQLiteStore.new(path, name="second").create(header("b"))
        target = tmp_path / "copy.db"
        store.backup(target)
        write(store, 1)
        assert numbers(SQLiteStore(target)) == [0, 1, 2]
        assert SQLiteStore(target, name="second").header() == SQLiteStore(path, name="second").header()
        assert numbers(store) == [0, 1, 2, 0]
        assert not Path(f"{target}-wal").exists() or Path(f"{target}-wal").stat().st_size == 0

    def test_a_backup_overwrites_nothing_and_needs_no_open_transaction(self, path: Path, tmp_path: Path) -> None:
        store = made(path, lines=1)
        target = tmp_path / "copy.db"
        target.write_bytes(b"precious")
        for found in (target, path):
            with pytest.raises(LedgerError, match="found one"):
                store.backup(found)
        assert target.read_bytes() == b"precious"
        with store.transaction(), pytest.raises(LedgerError, match="no open transaction"):
            store.backup(tmp_path / "other.db")
        assert not (tmp_path / "other.db").exists()
        assert numbers(store) == [0]

    def test_a_backup_waits_for_the_transactions_of_other_threads(self, path: Path, tmp_path: Path) -> None:
        store = made(path)
        with ThreadPoolExecutor(1) as pool:
            with store.transaction() as view:
                copying = pool.submit(store.backup, tmp_path / "copy.db")
                view.append("note", {"n": 7})
            copying.result(60)
        assert numbers(SQLiteStore(tmp_path / "copy.db")) == [7]

    def test_a_backup_of_a_broken_file_is_refused_however_large_it_is(
        self, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made(path, lines=200).close()
        content = bytearray(path.read_bytes())
        content[36:40] = (3).to_bytes(4, "big")  # free pages that the list of free pages does not have
        path.write_bytes(content)
        monkeypatch.setattr(sqlite_file, "QUICK_BYTES", 0)  # larger files are not read as a whole when they are opened
        store = SQLiteStore(path)
        with pytest.raises(LedgerError, match=r"budget\.db: broken"):
            store.backup(tmp_path / "copy.db")
        assert not list(tmp_path.glob("copy*"))

    def test_a_backup_that_fails_leaves_no_file(
        self, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = made(path, lines=1)

        def fail(_: object) -> None:
            raise LedgerUnavailableError("disk")

        monkeypatch.setattr(store._link, "copy_to", fail)
        with pytest.raises(LedgerUnavailableError):
            store.backup(tmp_path / "copy.db")
        assert not list(tmp_path.glob("copy*"))


def test_a_folder_that_may_not_be_read_takes_neither_a_ledger_nor_a_backup(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, made_first = made(path, lines=1), tmp_path / "first.db"

    def unreadable(_: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path))

    monkeypatch.setattr(sqlite_file, "sync_folder", unreadable)
    for make in (SQLiteStore.new, store.backup):
        with pytest.raises(LedgerUnavailableError, match=r"first\.db: expected a folder .*found: Permission denied"):
            make(made_first)
        assert not list(tmp_path.glob("first*"))


class TestPlaces:
    """`open_store` and `new_store` choose by the text."""

    def test_a_path_is_a_sqlite_file(self, path: Path) -> None:
        with pytest.raises(LedgerUnavailableError):
            open_store(path)
        new_store(str(path), name="mine").create(header())
        assert open_store(path, name="mine").header() is not None

    @pytest.mark.parametrize("text", ["postgresql://db.example/app", "postgres://db.example/app"])
    def test_without_the_packages_for_postgresql_the_extra_is_named(
        self, text: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in [name for name in sys.modules if "postgres" in name or name.startswith("psycopg")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "psycopg", None)
        for attempt in (open_store, new_store):
            with pytest.raises(ConfigurationError, match=r"langchain-dpicl\[postgres\]"):
                attempt(text)


def test_words_for_reports_name_no_folder(path: Path) -> None:
    store = made(path)
    assert store.description == "SQLite file budget.db, ledger 'budget'"
    assert repr(store) == f"SQLiteStore({str(path)!r}, name='budget')"


def test_who_the_ledger_is_is_in_the_file_itself(path: Path) -> None:
    store = made(path, lines=2)
    shutil.copy(path, path.with_name("copy.db"))
    copy = SQLiteStore(path.with_name("copy.db"))
    assert copy.header() == store.header()
    assert len(copy.records()) <= 2
