"""What every anchor must do, and what the one in a file does besides."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
from langchain_dpicl.cli.main import main
from langchain_dpicl.exceptions import ConfigurationError, LedgerError, LedgerRollbackError, LedgerUnavailableError
from langchain_dpicl.privacy.accounting.events import PureEvent
from langchain_dpicl.privacy.extensions.ledger_anchor import LedgerAnchor
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.stores import FileAnchor, SQLiteStore, beside_ledgers
from tests.contracts.anchor import AnchorContract
from tests.contracts.store import in_child
from tests.ledgers import use_simple_prices


class TestFileAnchor(AnchorContract):
    def make_anchor(self, tmp_path: Path) -> LedgerAnchor:
        return FileAnchor.new(tmp_path / "anchor.json")

    def reopen(self, anchor: LedgerAnchor) -> LedgerAnchor:
        assert isinstance(anchor, FileAnchor)
        return FileAnchor(anchor._path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "anchor.json"


def test_a_missing_file_is_refused_and_not_made(path: Path) -> None:
    with pytest.raises(LedgerUnavailableError, match="No such file"):
        FileAnchor(path)
    with pytest.raises(LedgerUnavailableError):
        FileAnchor.new(path / "nowhere" / "anchor.json")
    assert list(path.parent.iterdir()) == []


def test_a_file_that_went_missing_is_refused(path: Path) -> None:
    anchor = FileAnchor.new(path)
    path.unlink()
    for attempt in (lambda: anchor.read("a"), lambda: anchor.write("a", 1, "h")):
        with pytest.raises(LedgerUnavailableError):
            attempt()
    assert not path.exists()


def test_an_anchor_is_made_once(path: Path) -> None:
    FileAnchor.new(path).write("a", 1, "h")
    with pytest.raises(LedgerError, match="found one"):
        FileAnchor.new(path)
    assert FileAnchor(path).read("a") == (1, "h")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"format": "dpicl-anchor"}'],
    ids=range(8),
)
def test_what_is_no_anchor_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(LedgerError, match="expected an anchor"):
        FileAnchor(path)


def test_no_flipped_bit_makes_it_forget(path: Path) -> None:
    FileAnchor.new(path).write("a" * 32, 123, "h" * 64)
    sound = path.read_bytes()
    refused = 0
    for place in range(len(sound)):
        for bit in range(8):
            try:
                found = beside_ledgers._parsed(
                    sound[:place] + bytes([sound[place] ^ 1 << bit]) + sound[place + 1 :], path
                )
            except LedgerError:
                refused += 1
            else:
                assert found == {"a" * 32: (123, "h" * 64)}, (place, bit)
    assert refused > 7 * len(sound)


@pytest.mark.parametrize("line", [[1.0, "h"], ["1", "h"], [True, "h"], [1, None], [1], [1, "h", 2], 7])
def test_a_line_of_another_shape_is_refused(path: Path, line: object) -> None:
    anchor = FileAnchor.new(path)
    anchor.write("a", 1, "h")
    state = json.loads(path.read_text())
    state["ledgers"]["a"] = line
    path.write_text(json.dumps(state))
    with pytest.raises(LedgerError, match="expected an anchor"):
        anchor.read("a")


def test_a_lock_that_somebody_holds_is_waited_for_and_then_refused(path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    FileAnchor.new(path)
    anchor = FileAnchor(path, timeout=0.05)
    with path.open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(LedgerUnavailableError, match=r"anchor\.json: locked"):
            anchor.write("a", 1, "h")
    anchor.write("a", 1, "h")
    assert anchor.read("a") == (1, "h")


def test_a_writer_that_died_holds_no_lock(path: Path) -> None:
    pytest.importorskip("fcntl")
    anchor = FileAnchor.new(path)

    def die() -> None:
        with anchor._alone():
            os._exit(0)

    assert in_child(die)
    anchor.write("a", 1, "h")


def test_a_child_forked_while_the_lock_was_held_does_not_keep_it(path: Path) -> None:
    pytest.importorskip("fcntl")
    anchor = FileAnchor.new(path, timeout=0.5)
    anchor.write("a", 2, "h")
    end, go = os.pipe()
    with anchor._alone():
        pid = os.fork()
        if not pid:
            os.close(go)
            os.read(end, 1)
            os._exit(0)
    try:
        anchor.write("a", 3, "g")
    finally:
        os.close(go)
        os.waitpid(pid, 0)
    assert anchor.read("a") == (3, "g")


@pytest.mark.parametrize("has_an_ancestors_number", [False, True])
def test_a_child_does_not_give_back_the_lock_of_its_parent(
    path: Path, monkeypatch: pytest.MonkeyPatch, has_an_ancestors_number: bool
) -> None:
    pytest.importorskip("fcntl")
    if has_an_ancestors_number:
        monkeypatch.setattr(os, "getpid", lambda: 1)
    anchor = FileAnchor.new(path)
    other = FileAnchor(path, timeout=0.05)
    with contextlib.ExitStack() as stack:
        stack.enter_context(anchor._alone())
        assert in_child(stack.close)
        with pytest.raises(LedgerUnavailableError, match="locked"):
            other.write("a", 1, "h")
    other.write("a", 1, "h")


@pytest.mark.skipif(os.name != "posix", reason="this system has no modes")
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664], ids=oct)
def test_mode_and_owner_of_the_file_stay(path: Path, mode: int) -> None:
    anchor = FileAnchor.new(path)
    path.chmod(mode)
    if not os.getuid():
        os.chown(path, 65534, 65533)
    before = path.stat()
    anchor.write("a", 1, "h")
    after = path.stat()
    assert after.st_ino != before.st_ino
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)


def test_a_file_that_cannot_be_given_away_is_written_all_the_same(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    anchor = FileAnchor.new(path)
    path.chmod(0o664)

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "fchown", refuse)
    anchor.write("a", 1, "h")
    assert anchor.read("a") == (1, "h")
    assert path.stat().st_mode & 0o777 == 0o664


def test_writers_of_many_processes_and_threads_never_go_back(path: Path) -> None:
    anchor = FileAnchor.new(path)

    def climb() -> None:
        seen = 0
        with ThreadPoolExecutor(4) as pool:
            for seq, _ in enumerate(pool.map(lambda seq: anchor.write("a", seq, f"h{seq}"), range(1, 41)), start=1):
                found = anchor.read("a")
                assert found is not None
                assert found[0] >= max(seq, seen)
                seen = found[0]

    children = [threading.Thread(target=lambda: done.append(in_child(climb))) for _ in range(3)]
    done: list[bool] = []
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert done == [True] * 3
    assert anchor.read("a") == (40, "h40")
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_that_cannot_be_written_is_refused_and_nothing_is_forgotten(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    anchor = FileAnchor.new(path)
    anchor.write("a", 1, "h")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LedgerUnavailableError, match="No space left"):
        anchor.write("a", 2, "g")
    monkeypatch.undo()
    assert anchor.read("a") == (1, "h")
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("why", "found"), [("mounted", "mounted alone"), ("folder", "may not write"), ("sticky", "of another owner")]
)
def test_a_budget_is_not_opened_with_an_anchor_that_its_next_line_could_not_replace(
    path: Path, why: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first query of each process would be charged and refused, and health checks would see nothing wrong."""
    ledger = path.with_name("budget.db")
    PrivacyBudgetCallbackHandler.create(ledger, epsilon=1.0, delta=1e-6, anchor=path).close()
    if why == "mounted":
        monkeypatch.setattr(beside_ledgers, "is_mounted_alone", lambda where: Path(where) == path)
    elif why == "sticky":
        path.parent.chmod(0o1777)
        monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    else:
        monkeypatch.setattr(
            os, "access", lambda where, *_, **__: Path(where) != path.parent
        )  # root may write everywhere
    with pytest.raises(LedgerUnavailableError, match=f"anchor .*{found}"):
        PrivacyBudgetCallbackHandler.open(ledger, anchor=path)
    assert main(["ledger", "verify", str(ledger), "--anchor", str(path)]) == 0  # it only reads
    monkeypatch.undo()
    PrivacyBudgetCallbackHandler.open(ledger, anchor=path).close()


def test_a_ledger_that_went_on_without_its_anchor_is_caught_up_with_at_once(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that was not given it would hold up each one that was: a wait for the disk for each of its lines."""
    ledger, saved = path.with_name("budget.db"), []
    use_simple_prices(monkeypatch)
    PrivacyBudgetCallbackHandler.create(ledger, epsilon=1.0, delta=1e-6, anchor=path).close()
    without = PrivacyBudgetCallbackHandler.open(ledger, most_held=1)
    share = without.budget.declare("c", tickets=(Ticket("t", PureEvent(0.01), max_count=50),), epsilon=1.0)
    for _ in range(20):
        share.reserve("t")
    without.close()
    save = FileAnchor._save
    monkeypatch.setattr(FileAnchor, "_save", lambda self, known: saved.append(known) or save(self, known))
    PrivacyBudgetCallbackHandler.open(ledger, anchor=path).close()
    [known] = saved
    assert [line.seq for line in known.values()] == [len(SQLiteStore(ledger).records())]


def test_an_anchor_with_a_write_of_its_own_is_told_each_line_by_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may tell a second place, where a ticket would be granted whose line stands in the first alone."""
    use_simple_prices(monkeypatch)
    told: list[int] = []

    class Mirrored(FileAnchor):
        def write(self, ledger_id: str, seq: int, head: str) -> None:
            told.append(seq)
            super().write(ledger_id, seq, head)

    anchor, ledger = Mirrored.new(path), path.with_name("budget.db")
    budget = PrivacyBudgetCallbackHandler.create(ledger, epsilon=1.0, delta=1e-6, anchor=anchor).budget
    budget.declare("c", tickets=(Ticket("t", PureEvent(0.01), max_count=50),), epsilon=1.0).reserve("t")
    assert set(range(1, len(SQLiteStore(ledger).records()) + 1)) <= set(told)


def test_a_line_that_the_anchor_has_passed_asks_no_more_of_the_system(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    anchor = FileAnchor.new(path)
    anchor.write("a", 2, "two")
    monkeypatch.setattr(beside_ledgers, "is_mounted_alone", lambda where: True)
    anchor.write("a", 1, "one")
    with pytest.raises(LedgerUnavailableError, match="mounted alone"):
        anchor.write("a", 2, "two")


def test_without_file_locks_nothing_is_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    anchor = FileAnchor.new(path)
    monkeypatch.setitem(__import__("sys").modules, "fcntl", None)
    with pytest.raises(ConfigurationError, match="PostgresAnchor"):
        anchor.write("a", 1, "h")
    assert anchor.read("a") is None


def test_two_histories_are_told(path: Path) -> None:
    anchor = FileAnchor.new(path)
    anchor.write("a", 2, "h")
    with pytest.raises(LedgerRollbackError, match="two histories"):
        anchor.write("a", 2, "g")


def test_an_anchor_that_could_not_be_read_again_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    anchor = FileAnchor.new(tmp_path / "anchor")
    anchor.write("ab" * 16, 1, "cd" * 32)
    kept = (tmp_path / "anchor").read_bytes()
    monkeypatch.setattr("langchain_dpicl.stores.beside_ledgers._MAX_BYTES", len(kept) + 10)
    with pytest.raises(LedgerError, match="expected at most"):
        anchor.write("ef" * 16, 1, "cd" * 32)
    assert (tmp_path / "anchor").read_bytes() == kept
    assert anchor.read("ab" * 16) == (1, "cd" * 32)
