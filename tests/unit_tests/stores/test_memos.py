"""Release memos: the contract for a SQLite file and for stores of LangChain and LangGraph; files that are none."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import sqlite3
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from langchain_core.stores import InMemoryByteStore, InMemoryStore

from langchain_dpicl.exceptions import ConfigurationError, MemoError
from langchain_dpicl.stores import MemoKey, SQLiteMemo, SQLiteStore, StoreMemo, beside_ledgers, memo_at
from langchain_dpicl.stores.memos import query_of
from tests.contracts.memo import KEY, TOLD, TURN, MemoContract, SharedMemoContract, others
from tests.faults.children import Child, together

HIDDEN = "hunter2"
LONGEST = 90.0
"""Seconds that a small write may take on a busy machine; only a test that fails waits so long."""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def changed(path: Path, statement: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        return connection.execute(statement.format(answers="answers", turns="turns")).fetchall()


class TestSQLiteMemo(SharedMemoContract):
    END_OF_TURNS = "UPDATE {turns} SET until = 1"
    CLOCK_BACK = "UPDATE {turns} SET until = until + 3600"

    def make_memo(self, tmp_path: Path, **options: Any) -> SQLiteMemo:
        return SQLiteMemo(tmp_path / "memo.db", **{"turn_seconds": TURN, **options})

    def reopen(self, memo: Any) -> SQLiteMemo:
        return SQLiteMemo(memo.path, turn_seconds=TURN)

    def change(self, memo: Any, statement: str) -> list[tuple[Any, ...]]:
        return changed(memo.path, statement)


class TestByteStoreMemo(MemoContract):
    def make_memo(self, tmp_path: Path, **options: Any) -> StoreMemo:
        return StoreMemo(InMemoryByteStore(), **options)


class TestLangGraphStoreMemo(MemoContract):
    def make_memo(self, tmp_path: Path, **options: Any) -> StoreMemo:
        store = pytest.importorskip("langgraph.store.memory")
        return StoreMemo(store.InMemoryStore(), **options)


# -- a file that is made, and one that is none ---------------------------------------------------------------------


def test_a_missing_file_is_made_for_its_owner_alone_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        memo = SQLiteMemo(tmp_path / "memo.db")
        memo.remember(KEY, TOLD)
    finally:
        os.umask(old)
    assert stat.S_IMODE(memo.path.stat().st_mode) == 0o600
    assert names(tmp_path) == ["memo.db"]


def test_processes_that_make_it_at_once_make_one(tmp_path: Path) -> None:
    def action(number: int) -> Any:
        def act(start: Any) -> int:
            start()
            SQLiteMemo(tmp_path / "memo.db").remember(KEY._replace(query=query_of([str(number)])), str(number))
            return number

        return act

    assert together([action(number) for number in range(4)]) == [0, 1, 2, 3]
    memo = SQLiteMemo(tmp_path / "memo.db")
    assert [memo.recall(KEY._replace(query=query_of([str(number)]))) for number in range(4)] == ["0", "1", "2", "3"]
    assert names(tmp_path) == ["memo.db"]


def bad_files(folder: Path) -> dict[str, Path]:
    (folder / "text").write_text("notes " * 1000)
    (folder / "empty").touch()
    (folder / "folder").mkdir()
    SQLiteStore.new(folder / "ledger").close()
    with contextlib.closing(sqlite3.connect(folder / "database")) as connection:
        connection.execute("CREATE TABLE answers (told TEXT)")
    SQLiteMemo(folder / "newer")
    changed(folder / "newer", "PRAGMA user_version = 2")
    SQLiteMemo(folder / "torn").remember(KEY, TOLD * 500)
    shutil.copy(folder / "torn", folder / "short")
    with (folder / "torn").open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 4096)
    os.truncate(folder / "short", 5000)
    SQLiteMemo(folder / "dropped")
    changed(folder / "dropped", "DROP TABLE turns")
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["text", "empty", "folder", "ledger", "database", "newer", "torn", "short"])
def test_what_is_no_sound_memo_is_refused_as_it_is(tmp_path: Path, name: str) -> None:
    path = bad_files(tmp_path)[name]
    before = None if path.is_dir() else path.read_bytes()
    with pytest.raises(MemoError, match=f"memo .*{name}"):
        SQLiteMemo(path)
    assert path.is_dir() or path.read_bytes() == before


def test_tables_that_are_gone_are_told_as_a_broken_file(tmp_path: Path) -> None:
    memo = SQLiteMemo(bad_files(tmp_path)["dropped"])
    with pytest.raises(MemoError, match="broken or foreign"):
        memo.claim(KEY, "one")


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(MemoError, match="expected a folder"):
        SQLiteMemo(tmp_path / "none" / "memo.db")


@pytest.mark.parametrize("end", ["-wal", "-journal"])
def test_names_that_sqlite_takes_for_a_log_are_refused(tmp_path: Path, end: str) -> None:
    with pytest.raises(MemoError, match="log"):
        SQLiteMemo(tmp_path / f"budget.db{end}")
    assert names(tmp_path) == []


def test_a_file_on_a_network_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("langchain_dpicl.stores.sqlite_file._mount_of", lambda path: ("nfs4", "/"))
    with pytest.raises(MemoError, match="nfs4"):
        SQLiteMemo(tmp_path / "memo.db")


def test_a_file_that_went_away_is_not_made_again_behind_ones_back(tmp_path: Path) -> None:
    memo = SQLiteMemo(tmp_path / "memo.db")
    memo.path.unlink()
    with pytest.raises(MemoError, match="cannot be used now"):
        memo.recall(KEY)
    assert names(tmp_path) == []


def test_a_file_that_another_writes_to_for_too_long_is_said(tmp_path: Path) -> None:
    memo = SQLiteMemo(tmp_path / "memo.db", timeout=0.05)
    with contextlib.closing(sqlite3.connect(memo.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(MemoError, match="SQLITE_BUSY"):
            memo.remember(KEY, TOLD)
    memo.remember(KEY, TOLD)


def held_by_another_thread(lock: Any) -> bool:
    """Whether another thread holds a re-entrant lock just now."""
    is_free = lock.acquire(blocking=False)
    if is_free:
        lock.release()
    return not is_free


def test_a_memo_that_waits_for_others_holds_up_no_other_memo_and_no_fork(tmp_path: Path) -> None:
    locked, idle = SQLiteMemo(tmp_path / "locked.db", timeout=120.0), SQLiteMemo(tmp_path / "idle.db")
    with contextlib.closing(sqlite3.connect(locked.path, isolation_level=None)) as other, ThreadPoolExecutor(4) as pool:
        other.execute("BEGIN EXCLUSIVE")
        try:
            waiting = [pool.submit(locked.remember, KEY, TOLD) for _ in range(2)] + [pool.submit(locked.recall, KEY)]
            # From here on a memo that kept the lock of this process while it waits would keep it until the rollback.
            while not held_by_another_thread(beside_ledgers._AT_WORK):
                time.sleep(0.001)
            done, _ = wait([pool.submit(idle.remember, KEY, TOLD)], timeout=LONGEST)
            assert done
            assert Child(lambda _: idle.recall(KEY)).result() == TOLD
            assert not any(late.done() for late in waiting)
        finally:
            other.execute("ROLLBACK")
        for late in waiting:
            late.result()


def test_those_who_wait_for_a_memo_wait_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = SQLiteMemo(tmp_path / "locked.db", timeout=2.0)
    waiting: set[int] = set()
    patience, found = time.monotonic() + LONGEST, list[int]()

    def wait_between_two_attempts(seconds: float) -> None:
        waiting.add(threading.get_ident())
        time.sleep(seconds)

    def stands_still_until_all_wait() -> float:
        return 0.0 if len(waiting) < 3 and time.monotonic() < patience else 100.0 + time.monotonic()

    clock = SimpleNamespace(monotonic=stands_still_until_all_wait, sleep=wait_between_two_attempts)
    monkeypatch.setattr(beside_ledgers, "time", clock)

    def refused() -> None:
        with pytest.raises(MemoError, match="SQLITE_BUSY"):
            locked.remember(KEY, TOLD)
        found.append(len(waiting))

    with contextlib.closing(sqlite3.connect(locked.path, isolation_level=None)) as other, ThreadPoolExecutor(3) as pool:
        other.execute("BEGIN EXCLUSIVE")
        for late in [pool.submit(refused) for _ in range(3)]:
            late.result()
    assert found == [3] * 3  # one behind the other, the first would be refused before the others have begun


def test_a_memo_whose_lock_is_given_back_in_time_goes_on(tmp_path: Path) -> None:
    memo = SQLiteMemo(tmp_path / "memo.db", timeout=LONGEST)
    with contextlib.closing(sqlite3.connect(memo.path, isolation_level=None)) as other, ThreadPoolExecutor(1) as pool:
        other.execute("BEGIN IMMEDIATE")
        writing = pool.submit(memo.remember, KEY, TOLD)
        time.sleep(0.1)
        assert not writing.done()
        other.execute("COMMIT")
        writing.result()
    assert memo.recall(KEY) == TOLD


def test_a_wait_for_the_file_is_no_clock_that_went_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    shown = SimpleNamespace(time=lambda: clock[0], monotonic=time.monotonic, sleep=time.sleep)
    monkeypatch.setattr(beside_ledgers, "time", shown)
    late, other = (SQLiteMemo(tmp_path / "memo.db", turn_seconds=30) for _ in range(2))
    write = late._file.write

    def waits(action: Any) -> Any:
        clock[0] += 100.0
        assert other.claim(KEY, "other")
        return write(action)

    monkeypatch.setattr(late._file, "write", waits)
    assert not late.claim(KEY, "late")


@pytest.mark.parametrize(
    "bad",
    [
        {"turn_seconds": -1.0},
        {"size": 0},
        {"turn_seconds": 0.0},
        {"turn_seconds": 1e7},
        {"timeout": 1e7},
        {"size": "3"},
    ],
)
def test_options_out_of_range_are_refused(tmp_path: Path, bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        SQLiteMemo(tmp_path / "memo.db", **bad)
    assert names(tmp_path) == []


# -- processes ---------------------------------------------------------------------------------------------------------


def test_processes_that_ask_at_once_get_one_turn(tmp_path: Path) -> None:
    memo = SQLiteMemo(tmp_path / "memo.db", turn_seconds=TURN)

    def act(start: Any) -> int:
        start()
        return sum(memo.claim(KEY._replace(query=query_of([str(n)])), str(os.getpid())) for n in range(10))

    assert sum(together([act] * 3)) == 10


def test_a_process_killed_as_it_writes_leaves_a_whole_memo(tmp_path: Path) -> None:
    memo = SQLiteMemo(tmp_path / "memo.db")
    memo.remember(KEY, "old")

    def act(tell: Any) -> None:
        tell("ready")
        before = "old"
        for number in range(10**6):
            told = f"new {number}" * 3000
            memo.remember(KEY, told, instead_of=before)
            before = told

    for pause in (0.0, 0.003, 0.01):
        child = Child(act)
        child.wait_for_a_word()
        time.sleep(pause)
        child.kill()
        child.lines()
        found = SQLiteMemo(memo.path).recall(KEY)
        assert found is not None
        assert found == "old" or len(set(found.split("new ")[1:])) == 1
        assert memo.recall(KEY) == found
        memo.remember(KEY, "old", instead_of=found)


def test_a_process_forked_while_a_thread_is_writing_uses_the_memo_as_well(tmp_path: Path) -> None:
    memo = SQLiteMemo(tmp_path / "memo.db")
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(lambda: [memo.remember(KEY, str(n), instead_of=str(n - 1)) for n in range(40)])
        found = [Child(lambda _: [memo.claim(KEY, "child"), memo.leave(KEY, "child")][0]).result() for _ in range(3)]
        writing.result()
    assert found == [True] * 3
    assert memo.recall(KEY) == "39"


# -- other people's stores ---------------------------------------------------------------------------------------------


class BrokenStore(InMemoryStore):
    def mget(self, keys: Any) -> Any:
        raise ConnectionError(f"postgresql://user:{HIDDEN}@host")


class ReadOnlyStore(InMemoryStore):
    def mset(self, key_value_pairs: Any) -> Any:
        raise PermissionError("read-only")


class DictStore:
    """Has the names of a LangChain store, and takes a dict, as bare clients of key-value servers do."""

    def mget(self, keys: Any) -> list[None]:
        return [None for _ in keys]

    def mset(self, mapping: Any) -> None:
        mapping.items()


def test_what_a_store_raises_is_told_by_its_kind_alone() -> None:
    with pytest.raises(MemoError, match="found ConnectionError") as caught:
        StoreMemo(BrokenStore()).recall(KEY)
    assert HIDDEN not in str(caught.value)
    assert caught.value.__context__ is None


@pytest.mark.parametrize("kind", [ReadOnlyStore, DictStore])
def test_a_turn_is_granted_only_where_the_store_can_be_written(kind: Any) -> None:
    memo = StoreMemo(kind())
    assert memo.recall(KEY) is None
    with pytest.raises(MemoError, match="expected a store that answers"):
        memo.claim(KEY, "one")


@pytest.mark.parametrize("kept", [b"{", b"[]", b'{"told": "x"}', b'{"told": "x", "digest": "y"}', b"\xff"])
def test_an_entry_that_is_no_answer_is_not_told(kept: bytes) -> None:
    store = InMemoryByteStore()
    memo = StoreMemo(store)
    memo.remember(KEY, TOLD)
    (path,) = store.yield_keys()
    store.mset([(path, kept)])
    with pytest.raises(MemoError, match="broken"):
        memo.recall(KEY)


@pytest.mark.parametrize("bad", [{}, None, 3, InMemoryStore, object()], ids=["dict", "None", "int", "class", "object"])
def test_what_is_no_store_is_refused(bad: Any) -> None:
    with pytest.raises(ConfigurationError, match="store"):
        StoreMemo(bad)


# -- what may stand behind memo= -------------------------------------------------------------------------------------


def test_a_path_is_a_file_and_a_memo_itself(tmp_path: Path) -> None:
    found = memo_at(tmp_path / "memo.db")
    assert isinstance(found, SQLiteMemo)
    assert memo_at(found) is found
    assert memo_at(str(found.path)).recall(KEY) is None


@pytest.mark.parametrize("bad", [f"postgresql://user:{HIDDEN}@host/app", 3, True, SQLiteMemo, {}])
def test_what_is_no_memo_is_refused_and_no_password_is_shown(bad: Any) -> None:
    with pytest.raises(ConfigurationError, match="memo: expected") as caught:
        memo_at(bad)
    assert HIDDEN not in str(caught.value)


def test_every_part_of_a_key_counts() -> None:
    halves = [KEY._replace(query=query_of([text])) for text in ("\U0001f600", "\ud83d\ude00", "\\ud83d\\ude00")]
    keys = [KEY, *others(), *halves]
    assert len(set(keys)) == len(keys)
    assert [MemoKey(*key) for key in keys] == keys


def test_a_memo_in_a_file_goes_to_another_process_by_its_path(tmp_path: Path) -> None:
    memo = SQLiteMemo(tmp_path / "memo.db")
    key = MemoKey("scope", "tenant", "query")
    memo.remember(key, "answer")
    assert pickle.loads(pickle.dumps(memo)).recall(key) == "answer"  # noqa: S301  our own
