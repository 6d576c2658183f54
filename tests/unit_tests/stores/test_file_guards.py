"""Files of an open ledger are opened by nobody else in its process: closing one would drop the ledger's locks on it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
from langchain_dpicl.cli.main import main
from langchain_dpicl.exceptions import ConfigurationError, LedgerError, LedgerUnavailableError
from langchain_dpicl.reports.ledger_audit import is_export, read_export, read_receipts
from langchain_dpicl.stores import FileAnchor, SQLiteStore, beside_ledgers, open_anchor
from tests.sqlite_ledgers import made, numbers, write
from tests.unit_tests.stores.test_sqlite_logs import another_process

pytestmark = pytest.mark.skipif(os.name != "posix", reason="only POSIX drops locks")

ALIASES: dict[str, Callable[[Path, Path], object]] = {
    "itself": lambda path, alias: path.parent / path.name,
    "a link": lambda path, alias: alias.symlink_to(path) or alias,
    "a second hard link": lambda path, alias: os.link(path, alias) or alias,
}

READERS: tuple[Callable[[Path], object], ...] = (
    FileAnchor,
    open_anchor,
    FileAnchor.new,
    read_receipts,
    read_export,
    lambda path: is_export(path) or refuse(path),
)


def refuse(path: Path) -> None:
    raise LedgerError("found no export")


@pytest.mark.parametrize("end", ["", "-wal", "-shm"])
@pytest.mark.parametrize("alias", ALIASES)
def test_a_file_of_an_open_ledger_is_not_opened(path: Path, end: str, alias: str) -> None:
    store = made(path, lines=1)
    other = path.with_name("other.json")
    named = ALIASES[alias](Path(f"{path}{end}"), other)
    assert isinstance(named, Path)
    for read in READERS:
        with pytest.raises(LedgerError, match="found"):
            read(named)
    other.unlink(missing_ok=True)
    another_process(path)  # removes the log, if the locks were dropped
    write(store, 1)
    assert numbers(store) == [0, 100, 0]


@pytest.mark.parametrize("alias", ["itself", "a second hard link"])
@pytest.mark.parametrize("end", ["-wal", "-shm"])
def test_a_log_is_no_ledger(path: Path, end: str, alias: str) -> None:
    store = made(path, lines=1)
    named = ALIASES[alias](Path(f"{path}{end}"), path.with_name("other.json"))
    assert isinstance(named, Path)
    for attempt in (SQLiteStore, SQLiteStore.new, store.backup):
        with pytest.raises(LedgerError, match="found"):
            attempt(named)
    another_process(path)
    write(store, 1)
    assert numbers(store) == [0, 100, 0]


@pytest.mark.parametrize("end", ["-wal", "-shm", "-journal"])
def test_nothing_is_made_where_sqlite_would_look_for_a_log(path: Path, end: str) -> None:
    where = path.with_name(f"none.db{end}")
    for make in (FileAnchor.new, SQLiteStore.new, made(path).backup):
        with pytest.raises(LedgerError, match="the log of a database"):
            make(where)
    assert not where.exists()


@pytest.mark.parametrize("end", ["-wal", "-shm", "-journal"])
def test_what_has_the_name_of_a_log_but_no_database_is_opened(path: Path, end: str) -> None:
    made(path, lines=1).close()
    FileAnchor.new(path.with_name("anchor.json")).write("a", 1, "h")
    ledger, anchor = path.with_name(f"ledger{end}"), path.with_name(f"anchor{end}")
    path.rename(ledger)
    path.with_name("anchor.json").rename(anchor)
    with SQLiteStore(ledger) as store:
        write(store, 1)
        assert numbers(store) == [0, 0]
    assert FileAnchor(anchor).read("a") == (1, "h")
    for attempt, place in ((SQLiteStore, ledger), (FileAnchor, anchor)):
        place.with_name(place.name.removesuffix(end)).touch()
        with pytest.raises(LedgerError, match="the log of a database"):
            attempt(place)


@pytest.mark.parametrize("end", ["-wal", "-shm", "-journal"])
def test_no_export_is_written_where_sqlite_would_look_for_a_log(path: Path, end: str) -> None:
    made(path).close()
    assert main(["ledger", "export", str(path), "--out", f"{path}{end}"]) == 2
    assert sorted(found.name for found in path.parent.iterdir()) == [path.name, f"{path.name}.queue"]


def test_an_anchor_that_becomes_a_name_of_the_ledger_is_not_opened(path: Path) -> None:
    anchor = FileAnchor.new(path.with_name("anchor.json"))
    store = made(path, lines=1)
    path.with_name("anchor.json").unlink()
    os.link(path, path.with_name("anchor.json"))
    for attempt in (lambda: anchor.read("a"), lambda: anchor.write("a", 1, "h")):
        with pytest.raises(LedgerError, match="a ledger's that is open here"):
            attempt()
    path.with_name("anchor.json").unlink()
    another_process(path)
    write(store, 1)
    assert numbers(store) == [0, 100, 0]


def test_files_of_ledgers_that_are_closed_are_files_like_others(path: Path) -> None:
    made(path, lines=1).close()
    for reader in (FileAnchor, read_receipts, read_export):
        with pytest.raises((LedgerError, ConfigurationError)) as caught:
            reader(path)
        assert "open here" not in str(caught.value)


def test_an_error_that_is_kept_holds_no_file_of_a_closed_ledger(path: Path) -> None:
    """Systems give the numbers of removed files to new ones; a traceback holds the frames, and what is in them."""
    store = made(path, lines=1)
    kept, anchor = store._link.held, path.with_name("anchor.json")
    os.link(f"{path}-shm", anchor)  # a number that the ledger had, under another name
    with pytest.raises(LedgerError, match="expected a file of its own"):
        FileAnchor(anchor)
    store.close()
    sound = path.with_name("sound.json")
    FileAnchor.new(sound)
    anchor.write_bytes(sound.read_bytes())
    FileAnchor(anchor)
    assert kept is not None


def test_a_ledger_is_not_its_own_anchor(path: Path) -> None:
    link = path.with_name("link.json")
    link.symlink_to(path)
    for anchor in (path, link, str(path)):
        with pytest.raises(ConfigurationError, match="anchor: expected a file of its own"):
            PrivacyBudgetCallbackHandler.create(path, epsilon=1.0, delta=1e-6, anchor=anchor)
        assert not path.exists()
    with pytest.raises(LedgerError, match="the log of a database"):
        PrivacyBudgetCallbackHandler.create(path, epsilon=1.0, delta=1e-6, anchor=f"{path}-wal")
    assert not path.exists()
    PrivacyBudgetCallbackHandler.create(path, epsilon=1.0, delta=1e-6).close()
    for where in (path, link):
        with pytest.raises(ConfigurationError, match="anchor: expected a file of its own"):
            PrivacyBudgetCallbackHandler.open(path, anchor=where)
    assert main(["ledger", "create", str(path.with_name("new.db")), "--epsilon", "1", "--delta", "1e-6"]) == 0


@pytest.mark.parametrize("option", ["--anchor", "--receipt"])
@pytest.mark.parametrize("end", ["", "-wal", "-shm"])
def test_the_command_does_not_open_a_ledger_of_its_process_by_hand(
    path: Path, option: str, end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = made(path)
    assert main(["ledger", "verify", str(path), option, f"{path}{end}"]) == 1
    assert "expected a file of its own" in capsys.readouterr().err
    another_process(path)
    write(store, 1)
    assert numbers(store) == [100, 0]


@pytest.mark.parametrize("step", ["fsync", "sync_folder"])
def test_an_anchor_that_cannot_be_made_leaves_nothing(path: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where = path.with_name("anchor.json")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as then:
        then.setattr(os if step == "fsync" else beside_ledgers, step, full)
        with pytest.raises(LedgerUnavailableError, match="No space left"):
            FileAnchor.new(where)
    assert not where.exists()
    assert FileAnchor.new(where).read("a") is None
