"""What becomes of a ledger whose log is removed under it: nothing is granted on what nobody else will read."""

from __future__ import annotations

import contextlib
import itertools
import os
import sqlite3
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import langchain_dpicl
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import LedgerRollbackError, LedgerUnavailableError
from langchain_dpicl.stores import SQLiteStore, sqlite_file, sqlite_ledger
from tests.contracts.store import in_child
from tests.ledgers import tickets, use_simple_prices
from tests.sqlite_ledgers import edited, made, numbers, write

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


LOOK = """
import sqlite3, sys
ledger = sqlite3.connect(sys.argv[1], isolation_level=None)
assert ledger.execute("SELECT seq FROM ledgers").fetchone() == (0,)
print("open", flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def newcomer(path: Path, then: str = "ledger.close()\n") -> Iterator[None]:
    """Has the file open in another process, which looked at it; at the end that process does what is in `then`."""
    command = [sys.executable, "-S", "-c", LOOK + then, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        try:
            yield
        finally:
            process.communicate("\n", timeout=60)
    assert process.returncode == 0


MOVE = 'ledger.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()\nledger.close()\n'


def another_process(path: Path, *, moves: bool = False) -> None:
    """Writes a line in a process that shares no lock with this one, and closes the file, its log moved or not."""
    script = OTHER.replace("ledger.close()\n", MOVE) if moves else OTHER
    subprocess.run([sys.executable, "-S", "-c", script, str(path)], check=True)


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
                    pool.submit(SQLiteStore, path, timeout=0.1).result(60)
            assert pool.submit(lambda: numbers(SQLiteStore(path))).result(60) == numbers(store)

    def test_all_threads_that_use_a_removed_log_are_waited_for_no_longer_than_one(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        links = sorted([made(path, lines=1)._link, SQLiteStore(path)._link], key=id)
        delete_log(path)
        clock, tries = itertools.count(), [iter([*[False] * 8, True]), itertools.repeat(False)]
        for link, found in zip(links, tries, strict=True):  # the first thread comes to its end, the second does not
            lock = SimpleNamespace(acquire=lambda timeout, found=found: next(found), release=lambda: None)
            monkeypatch.setattr(link, "lock", lock)
        monkeypatch.setattr(sqlite_ledger, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        with pytest.raises(LedgerUnavailableError, match="another thread"):
            sqlite_ledger.open_connection(path, timeout=10)
        monkeypatch.undo()
        assert next(clock) == 12


def delete_log(path: Path) -> None:
    """Does what somebody does who takes the log for rubbish."""
    for end in ("-wal", "-shm"):
        Path(f"{path}{end}").unlink()


def is_refused(store: SQLiteStore) -> None:
    with pytest.raises(LedgerUnavailableError, match="use backup"):
        write(store, 1)


def is_dropped(store: SQLiteStore) -> None:
    store._link.__del__()
    assert store._link.connection is None


ENDS: dict[str, Callable[[SQLiteStore], object]] = {
    "a transaction": is_refused,
    "closing": SQLiteStore.close,
    "nobody holding it any more": is_dropped,
    "a fork": lambda store: in_child(lambda: None),
    "a new store": lambda store: SQLiteStore(store.path),
}

ENDED = """
import os, subprocess, sys, types
package = types.ModuleType("langchain_dpicl")  # without all that its face imports
package.__path__ = [sys.argv[2]]
sys.modules["langchain_dpicl"] = package
from langchain_dpicl.privacy.ledger.store import LedgerHeader
from langchain_dpicl.stores import SQLiteStore
store = SQLiteStore.new(sys.argv[1])
store.create(LedgerHeader("a", "test", 4.0, 1e-6, "add_remove"))
with store.transaction() as view:
    view.append("note", {"n": 1})
for end in ("-wal", "-shm"):
    os.unlink(sys.argv[1] + end)
subprocess.run([sys.executable, "-S", "-c", sys.argv[3], sys.argv[1]], check=True)
"""


class Child:
    """A forked process that does one thing after another when it is asked to, and says what came of it."""

    def __init__(self, *steps: Callable[[], object]) -> None:
        reader, self._tell = os.pipe()
        self._hear, writer = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            for step in steps:
                os.read(reader, 1)
                try:
                    step()
                    os.write(writer, b"done   ")
                except LedgerUnavailableError:
                    os.write(writer, b"refused")
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
            os._exit(0)
        os.close(writer)
        os.close(reader)

    def told(self) -> str:
        os.write(self._tell, b".")
        return os.read(self._hear, 7).decode().strip()

    def end(self) -> None:
        assert os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]) == 0
        os.close(self._tell)
        os.close(self._hear)


@pytest.mark.skipif(os.name != "posix", reason="elsewhere an open file is not deleted")
class TestLogsDeletedByHand:
    """What a deleted log held is gone for others. It comes back where nobody wrote since, and is never put over theirs."""

    @pytest.mark.parametrize("moves", [False, True], ids=["log stays", "log is moved"])
    @pytest.mark.parametrize("end", ENDS)
    def test_what_others_wrote_since_stands(self, path: Path, end: str, moves: bool) -> None:
        store = made(path, lines=1)
        delete_log(path)
        another_process(path, moves=moves)
        ENDS[end](store)
        assert numbers(SQLiteStore(path)) == [100]
        another_process(path)
        assert numbers(SQLiteStore(path)) == [100, 100]

    @pytest.mark.parametrize("end", ENDS)
    def test_where_nobody_wrote_since_nothing_is_lost(self, path: Path, end: str) -> None:
        store = made(path, lines=3)
        delete_log(path)
        ENDS[end](store)
        assert numbers(SQLiteStore(path)) == [0, 1, 2]

    @pytest.mark.parametrize("made_since", ["a ledger", "a log that is in use"])
    def test_other_work_than_lines_stands_too(self, path: Path, made_since: str) -> None:
        store = made(path, lines=1)
        delete_log(path)
        command = "INSERT INTO ledgers (name) VALUES ('other')"
        script = f"import os, sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute({command!r}); c.commit()"
        if made_since == "a ledger":
            script += "; c.execute('PRAGMA wal_checkpoint(TRUNCATE)').fetchall(); c.close()"
        else:
            script += "; os._exit(0)"  # its log stays, with what it wrote
        subprocess.run([sys.executable, "-S", "-c", script, str(path)], check=True)
        is_refused(store)
        with edited(path) as connection:
            assert connection.execute("SELECT name FROM ledgers").fetchall() == [("budget",), ("other",)]
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]

    @pytest.mark.parametrize("end", ENDS)
    def test_nothing_is_moved_under_somebody_who_has_the_file_open(self, path: Path, end: str) -> None:
        store = made(path, lines=1)
        delete_log(path)
        with newcomer(path, OTHER.partition("None)\n")[2]):
            assert Path(f"{path}-wal").stat().st_size == 0
            ENDS[end](store)
            assert numbers(SQLiteStore(path)) == []
        assert numbers(SQLiteStore(path)) == [100]
        with edited(path) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]

    @pytest.mark.parametrize("fault", [sqlite3.OperationalError, UnicodeDecodeError, KeyboardInterrupt])
    def test_a_look_at_the_file_that_fails_moves_nothing(
        self, path: Path, fault: type[BaseException], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = made(path, lines=1)
        delete_log(path)
        another_process(path)

        def fail(*_: object) -> bool:
            raise fault(*(("utf-8", b"", 0, 1, "") if fault is UnicodeDecodeError else ("stop",)))

        with monkeypatch.context() as then, contextlib.suppress(KeyboardInterrupt):
            then.setattr(sqlite_file, "_is_before", fail)
            store.close()
        assert store._link.connection is None
        assert numbers(SQLiteStore(path)) == [100]

    def test_while_a_thread_leaves_a_removed_log_the_file_is_not_opened(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = made(path, lines=1)
        delete_log(path)
        leave = sqlite_ledger.close_connection
        left: list[object] = []

        def slowly(connection: sqlite3.Connection, held: Any) -> None:
            with pytest.raises(LedgerUnavailableError, match="another thread"):
                pool.submit(SQLiteStore, path, timeout=0.1).result(60)
            leave(connection, held)
            left.append(held)

        with ThreadPoolExecutor(1) as pool, monkeypatch.context() as then:
            then.setattr(sqlite_ledger, "close_connection", slowly)
            is_refused(store)
        assert len(left) == 1
        assert numbers(SQLiteStore(path)) == [0]

    def test_nothing_of_several_processes_is_lost_either(self, path: Path) -> None:
        store = made(path, lines=1)
        other = Child(*[lambda: write(store, 1)] * 3)
        assert other.told() == "done"
        write(store, 1)
        delete_log(path)
        is_refused(store)
        write(store, 1)
        assert [other.told(), other.told()] == ["refused", "done"]
        other.end()
        assert numbers(store) == numbers(SQLiteStore(path)) == [0] * 5

    def test_a_process_that_ends_leaves_what_others_wrote(self, path: Path) -> None:
        package = str(Path(langchain_dpicl.__file__).parent)
        subprocess.run([sys.executable, "-c", ENDED, str(path), package, OTHER], check=True)
        assert numbers(SQLiteStore(path)) == [100]

    def test_a_file_put_in_its_place_keeps_its_log(self, path: Path) -> None:
        other = made(path.with_name("other.db"), lines=3)
        store = made(path, lines=1)
        for end in ("", "-wal"):
            path.with_name(f"copy{end}").write_bytes(Path(f"{other.path}{end}").read_bytes())
            path.with_name(f"copy{end}").replace(f"{path}{end}")
        Path(f"{path}-shm").unlink()
        assert numbers(store) == [0, 1, 2]
        assert numbers(SQLiteStore(path)) == [0, 1, 2]

    def test_no_more_is_granted_than_the_budget_and_what_the_log_held(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        use_simple_prices(monkeypatch)
        many = tickets(epsilon=0.01, count=100)

        def granted(share: Any, count: int) -> int:
            try:
                return int(share.reserve("t", count=count).count)
            except (LedgerUnavailableError, LedgerRollbackError):
                return 0

        def others() -> None:
            share = Budget.open(SQLiteStore(path)).declare("c", tickets=many, epsilon=1.0)
            assert granted(share, 60) == 60

        ours = Budget(epsilon=1.0, delta=1e-6, store=SQLiteStore.new(path)).declare("c", tickets=many, epsilon=1.0)
        child = Child(others)  # forked now: a fork leaves the log behind
        assert granted(ours, 7) == 7
        delete_log(path)
        assert child.told() == "done"
        child.end()
        assert [granted(ours, 30), granted(ours, 30), granted(ours, 1)] == [0, 0, 0]
        last = Budget.open(SQLiteStore(path)).declare("c", tickets=many, epsilon=1.0)
        assert last.remaining("t") == 40

    def test_who_could_not_put_its_lines_back_grants_no_more(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        use_simple_prices(monkeypatch)
        budget = Budget(epsilon=1.0, delta=1e-6, store=SQLiteStore.new(path))
        share = budget.declare("c", tickets=tickets(epsilon=0.01, count=100), epsilon=1.0)
        assert share.reserve("t", count=1).count == 1
        delete_log(path)
        with newcomer(path), pytest.raises(LedgerUnavailableError, match="use backup"):
            share.reserve("t", count=1)
        for _ in range(2):
            with pytest.raises(LedgerRollbackError):
                share.reserve("t", count=1)
