"""SQLite's lock is given up before the disk is waited for; nothing is granted before the disk has it."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import LedgerUnavailableError
from langchain_dpicl.privacy.ledger.shares import Share
from langchain_dpicl.stores import SQLiteStore, sqlite_file, sqlite_ledger
from langchain_dpicl.stores.sqlite_file import OpenFiles
from tests.ledgers import budget, share_of

pytestmark = pytest.mark.usefixtures("simple_prices")

QUEUED = pytest.mark.skipif(sqlite_ledger.fcntl is None, reason="no locks of files here")


def made(path: Path) -> tuple[SQLiteStore, Share]:
    store = SQLiteStore.new(path)
    return store, share_of(budget(store=store, epsilon=4.0), refundable=True)


class Disk:
    """Stands in the place of the two calls that wait for the disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.at_log: Callable[[], object] = lambda: None
        self._log, self._folder = sqlite_file.sync_log, sqlite_file.sync_folder
        monkeypatch.setattr(sqlite_file, "sync_log", self._sync_log)
        monkeypatch.setattr(sqlite_file, "sync_folder", self._sync_folder)

    def _sync_log(self, number: int) -> None:
        self.calls.append("log")
        self.at_log()
        self._log(number)

    def _sync_folder(self, path: Path) -> None:
        self.calls.append("folder")
        self._folder(path)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def is_locked(path: Path) -> bool:
    """Whether another connection would have to wait; in a process of its own, as closing a file drops locks here."""
    code = (
        "import sqlite3, sys\n"
        "link = sqlite3.connect(sys.argv[1], timeout=0, isolation_level=None)\n"
        "try:\n"
        "    link.execute('BEGIN IMMEDIATE')\n"
        "except sqlite3.OperationalError:\n"
        "    print('locked')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    return "locked" in done.stdout


def test_the_order_is_commit_unlock_flush_grant(path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    store, share = made(path)
    share.reserve("t")
    order: list[str] = []
    run = store._link._run
    monkeypatch.setattr(store._link, "_run", lambda text: (run(text), order.append(text))[0])

    def look() -> None:
        order.append("locked" if is_locked(path) else "unlocked")
        order.append("flush")

    disk.at_log = look
    entry = share.reserve("t").entry
    order.append(f"granted {entry}")
    order = [step for step in order if step != "BEGIN"]
    assert order == ["BEGIN IMMEDIATE", "COMMIT", "unlocked", "flush", "granted 3"]


def test_the_folder_is_synchronised_once_after_a_log_was_made_and_before_the_first_grant(
    path: Path, disk: Disk
) -> None:
    _, share = made(path)
    disk.calls.clear()
    share.reserve("t")
    share.reserve("t")
    assert disk.calls == ["log", "log"]  # that the limits were written synchronised the folder
    share._desk.store.close()  # type: ignore[attr-defined]
    store = SQLiteStore(path)
    disk.calls.clear()
    share = share_of(Budget.open(store), refundable=True)
    share.reserve("t")
    assert disk.calls[:2] == ["log", "folder"]
    assert disk.calls.count("folder") == 1


def test_a_plain_transaction_is_on_the_disk_when_it_ends(path: Path, disk: Disk) -> None:
    store, _ = made(path)
    disk.calls.clear()
    with store.transaction() as view:
        view.append("bind", {"dataset_id": "d"})
        assert disk.calls == []
    assert disk.calls == ["log"]


def test_a_line_that_is_not_there_is_never_on_the_disk(path: Path) -> None:
    store, share = made(path)
    share.reserve("t")
    seq, head = store.head()
    store.flush(seq, head)
    header = store.header()
    assert header is not None
    store.flush(0, header.digest)
    for line in ((seq, "0" * 64), (seq + 1, head), (0, head)):
        with pytest.raises(LedgerUnavailableError, match="gone"):
            store.flush(*line)


def test_after_a_failed_write_nothing_is_granted_until_the_whole_log_is_in_the_file(path: Path, disk: Disk) -> None:
    """The system reports a failed write once; what is synchronised after it may miss a part before it."""
    made(path)[0].close()
    share = share_of(Budget.open(SQLiteStore(path, timeout=0.2)), refundable=True)

    def fails() -> None:
        raise OSError(5, "Input/output error")

    disk.at_log = fails
    with pytest.raises(LedgerUnavailableError, match="Input/output error"):
        share.reserve("t")
    disk.at_log = lambda: None
    other = SQLiteStore(path)
    with other._link.reading():  # keeps the log from being moved
        assert other._rows().header() is not None
        with pytest.raises(LedgerUnavailableError):
            share.reserve("t")
    other.close()
    sizes: list[int] = []
    disk.at_log = lambda: sizes.append(Path(f"{path}-wal").stat().st_size)
    entry = share.reserve("t").entry
    # The disk has the log's end, too: else a beginning of the old log would be put over the file when power fails.
    assert sizes == [0]
    assert Path(f"{path}-wal").stat().st_size == 0
    with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)) as file:
        assert file.execute("SELECT max(seq) FROM lines").fetchone() == (entry,)


def test_a_failure_reported_to_one_thread_holds_for_all_that_wait(path: Path, disk: Disk) -> None:
    store, share = made(path)

    def fails() -> None:
        raise OSError(5, "Input/output error")

    def flush() -> None:
        with pytest.raises(LedgerUnavailableError, match="Input/output error"):
            store.flush(*store.head())

    def fails_for_another() -> None:
        disk.at_log = fails
        other = threading.Thread(target=flush)
        other.start()
        other.join(60)
        disk.at_log = lambda: None

    disk.at_log = fails_for_another
    with pytest.raises(LedgerUnavailableError, match="Input/output error"):
        share.reserve("t")
    assert share.reserve("t").entry > 0


def test_a_file_closed_for_a_fork_while_the_disk_is_waited_for_is_opened_and_synchronised_again(
    path: Path, disk: Disk
) -> None:
    store, share = made(path)
    share.reserve("t")
    disk.calls.clear()

    def close_once() -> None:
        disk.at_log = lambda: None
        store._link.before_fork()
        store._link.lock.release()

    disk.at_log = close_once
    assert share.reserve("t").entry == 3
    assert disk.calls.count("log") == 2


def test_a_file_is_looked_at_while_no_other_thread_can_close_it_for_a_fork(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, share = made(path)
    share.reserve("t")

    def fork() -> None:
        if store._link.lock.acquire(blocking=False):
            store._link.before_fork()
            store._link.lock.release()
            store._link.lock.release()

    def look(held: OpenFiles) -> bool:
        other = threading.Thread(target=fork)
        other.start()
        other.join(60)
        return is_whole(held)

    is_whole = OpenFiles.is_whole.fget
    monkeypatch.setattr(OpenFiles, "is_whole", property(look))
    assert share.reserve("t").entry == 3


def test_a_file_that_another_thread_is_closing_is_waited_for_and_no_removed_log(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, share = made(path)
    other = SQLiteStore(path)
    store._link.before_fork()  # from here on `other` is the last one, whose end removes the log
    store._link.lock.release()
    found: list[object] = []
    opener = threading.Thread(target=lambda: found.append(share.reserve("t").entry))
    is_looked_at = threading.Event()
    close, log_of = sqlite_ledger.close_connection, sqlite_ledger.log_of

    def close_late(connection: sqlite3.Connection, files: OpenFiles | None) -> None:
        close(connection, files)
        if not is_looked_at.is_set():
            opener.start()
            assert is_looked_at.wait(60)
            opener.join(0.1)  # it ends only where it does not wait

    monkeypatch.setattr(sqlite_ledger, "log_of", lambda path: (is_looked_at.set(), log_of(path))[1])
    monkeypatch.setattr(sqlite_ledger, "close_connection", close_late)
    other.close()
    opener.join(60)
    assert found == [2]


@QUEUED
def test_a_writer_that_waited_in_vain_goes_on_without_the_queue(path: Path) -> None:
    import fcntl

    SQLiteStore.new(path).close()
    store = SQLiteStore(path, timeout=1.0)
    store.may_create = True
    share = share_of(budget(store=store, epsilon=4.0))
    number = os.open(f"{path}.queue", os.O_RDONLY)
    fcntl.flock(number, fcntl.LOCK_EX)  # as a stopped process has it
    began = time.monotonic()
    share.reserve("t")
    assert time.monotonic() - began >= 0.5
    share.reserve("t")  # the queue is left alone for a while
    os.close(number)
    store._link._queue._rest_until = 0.0
    share.reserve("t")
    assert share.remaining("t") == 7


@QUEUED
@pytest.mark.parametrize("stop", [RuntimeError, KeyboardInterrupt])
def test_a_queue_whose_thread_did_not_start_holds_no_later_writer_up(
    path: Path, stop: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    SQLiteStore.new(path).close()
    store = SQLiteStore(path, timeout=20.0)
    store.may_create = True
    share = share_of(budget(store=store, epsilon=4.0))

    def stopped(_: threading.Thread) -> None:
        raise stop("can't start new thread")

    number = os.open(f"{path}.queue", os.O_RDONLY)
    fcntl.flock(number, fcntl.LOCK_EX)
    began = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", stopped)
        with pytest.raises(stop) if stop is KeyboardInterrupt else contextlib.nullcontext():
            share.reserve("t")  # the ledger's own lock is free
    os.close(number)
    store._link._queue._rest_until = 0.0  # a minute later
    share.reserve("t")
    assert time.monotonic() - began < 10.0  # no wait for a thread that there is not, of half the timeout


@QUEUED
def test_writers_take_turns_in_the_queue(path: Path) -> None:
    import fcntl

    store, share = made(path)
    share.reserve("t")
    number = os.open(f"{path}.queue", os.O_RDONLY)
    fcntl.flock(number, fcntl.LOCK_EX)
    with_turn = threading.Thread(target=share.reserve, args=("t",))
    with_turn.start()
    with_turn.join(0.2)
    assert with_turn.is_alive()
    assert not is_locked(path)
    fcntl.flock(number, fcntl.LOCK_UN)
    with_turn.join(60)
    fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it was given up
    os.close(number)
    assert store.head()[0] == 3


@QUEUED
@pytest.mark.parametrize("fault", ["removed", "forbidden"])
def test_a_queue_that_is_gone_or_closed_costs_no_ticket(
    path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, share = made(path)
    share.reserve("t")
    queue = Path(f"{path}.queue")
    queue.unlink()
    if fault == "forbidden":
        real = os.open

        def forbidden(name: object, *rest: int, **options: int) -> int:
            if str(name) == str(queue):
                raise PermissionError(13, "Permission denied")
            return real(name, *rest, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "open", forbidden)
    other = share_of(Budget.open(SQLiteStore(path)), refundable=True)
    assert [share.reserve("t").entry, other.reserve("t").entry] == [3, 4]


@QUEUED
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_keeps_no_place_of_its_parent_in_the_queue(path: Path) -> None:
    store, share = made(path)
    share.reserve("t")
    pid = os.fork()
    if not pid:
        os._exit(0 if store._link._queue._number is None and share.reserve("t").entry == 3 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert share.reserve("t").entry == 4
