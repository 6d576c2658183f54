from __future__ import annotations

import os
import shlex
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl.exceptions import ConfigurationError, LedgerError, LedgerUnavailableError
from langchain_dpicl.privacy.ledger.store import LedgerStore
from langchain_dpicl.stores import SQLiteStore, sqlite_file
from tests.contracts.store import DurableStoreContract, header
from tests.sqlite_ledgers import edited, made, mount_of, numbers, write


class TestSQLiteStore(DurableStoreContract):
    def make_store(self, tmp_path: Path) -> SQLiteStore:
        return SQLiteStore.new(tmp_path / "budget.db")

    def reopen(self, store: LedgerStore) -> SQLiteStore:
        assert isinstance(store, SQLiteStore)
        return SQLiteStore(store.path, name=store.name)

    def beside(self, store: LedgerStore, name: str) -> SQLiteStore:
        assert isinstance(store, SQLiteStore)
        return SQLiteStore.new(store.path, name=name)

    def opened(self, store: LedgerStore, name: str) -> SQLiteStore:
        assert isinstance(store, SQLiteStore)
        return SQLiteStore(store.path, name=name)


class Told:
    """A folder in which every name is the same file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __truediv__(self, _: str) -> Path:
        return self._file


class TestOpening:
    """It makes nothing, and changes nothing that is not a ledger's."""

    def test_a_missing_file_is_not_made(self, path: Path) -> None:
        with pytest.raises(LedgerUnavailableError, match=r"budget\.db.*found none"):
            SQLiteStore(path)
        assert list(path.parent.iterdir()) == []

    def test_a_missing_folder_is_not_made(self, path: Path) -> None:
        for attempt in (SQLiteStore, SQLiteStore.new):
            with pytest.raises(LedgerUnavailableError):
                attempt(path / "nowhere" / "budget.db")
        assert list(path.parent.iterdir()) == []

    @pytest.mark.parametrize(
        ("content", "words"),
        [(b"", "an empty file"), (b"text\n" * 1000, "broken or foreign"), (b"SQLite format 3\0", "broken or foreign")],
        ids=["empty", "text", "cut short"],
    )
    def test_what_is_no_ledger_is_refused_and_left_alone(self, path: Path, content: bytes, words: str) -> None:
        path.write_bytes(content)
        for attempt in (SQLiteStore, SQLiteStore.new):
            with pytest.raises(LedgerError, match=words) as caught:
                attempt(path)
            assert not isinstance(caught.value, LedgerUnavailableError)
        assert path.read_bytes() == content
        assert list(path.parent.iterdir()) == [path]

    def test_a_file_without_tables_yet_is_not_called_another_database(self, path: Path) -> None:
        with edited(path) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
        content = path.read_bytes()
        assert content
        for attempt in (SQLiteStore, SQLiteStore.new):
            with pytest.raises(LedgerError, match="its creation was interrupted or is still running"):
                attempt(path)
        assert path.read_bytes() == content

    @pytest.mark.parametrize("code", [sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_FULL])
    def test_where_nothing_can_be_written_the_export_is_named(self, path: Path, code: int) -> None:
        fault = sqlite3.OperationalError("no")
        fault.sqlite_errorcode, fault.sqlite_errorname = code, "SQLITE"
        with pytest.raises(LedgerUnavailableError) as caught, sqlite_file.errors_of(path):
            raise fault
        assert ("dpicl ledger export" in str(caught.value)) is (code != sqlite3.SQLITE_FULL)

    def test_a_folder_is_refused(self, path: Path) -> None:
        path.mkdir()
        with pytest.raises(LedgerError, match="no plain file"):
            SQLiteStore(path)

    @pytest.mark.parametrize("application", [0, 7])
    def test_another_database_is_refused_and_left_alone(self, path: Path, application: int) -> None:
        with edited(path) as connection:
            connection.execute(f"PRAGMA application_id = {application}")
            connection.execute("CREATE TABLE ledgers (id INTEGER PRIMARY KEY, name TEXT)")
        content = path.read_bytes()
        for attempt in (SQLiteStore, SQLiteStore.new):
            with pytest.raises(LedgerError, match="found another database"):
                attempt(path)
        assert path.read_bytes() == content

    @pytest.mark.parametrize(
        "change",
        [
            "DROP TRIGGER lines_keep",
            "DROP TRIGGER ledgers_grow",
            "ALTER TABLE lines ADD COLUMN note TEXT",
            "CREATE TABLE notes (x)",
            "CREATE TRIGGER more AFTER INSERT ON lines BEGIN SELECT 1; END",
        ],
    )
    def test_other_tables_or_triggers_are_refused(self, path: Path, change: str) -> None:
        made(path).close()
        with edited(path) as connection:
            connection.execute(change)
        with pytest.raises(LedgerError, match="expected the tables and triggers"):
            SQLiteStore(path)

    @pytest.mark.parametrize(
        ("version", "advice"),
        [(4, "Upgrade the package"), (2, r"A development version made them\. Export the ledger with that version")],
    )
    def test_another_version_is_refused(self, path: Path, version: int, advice: str) -> None:
        made(path).close()
        with edited(path) as connection:
            connection.execute(f"PRAGMA user_version = {version}")
        for attempt in (SQLiteStore, lambda path: SQLiteStore.new(path, name="other")):
            with pytest.raises(LedgerError, match=rf"tables of version 3, found version {version}\. {advice}"):
                attempt(path)

    def test_a_fault_that_sqlite_cannot_even_spell_is_a_broken_file(self, path: Path) -> None:
        made(path).close()
        content = path.read_bytes()
        start = content.index(b"CREATE TABLE ledgers")
        for place in range(start, start + 120, 3):
            path.write_bytes(content[:place] + bytes([content[place] | 0x80]) + content[place + 1 :])
            with pytest.raises(LedgerError):
                SQLiteStore(path)

    def test_pages_that_do_not_hang_together_are_refused(self, path: Path) -> None:
        made(path, lines=200).close()
        content = bytearray(path.read_bytes())
        content[36:40] = (3).to_bytes(4, "big")  # free pages that the list of free pages does not have
        path.write_bytes(content)
        with pytest.raises(LedgerError, match="broken"):
            SQLiteStore(path)

    def test_statistics_of_the_tables_do_no_harm(self, path: Path) -> None:
        made(path, lines=3).close()
        with edited(path) as connection:
            connection.execute("ANALYZE")
        assert numbers(SQLiteStore(path)) == [0, 1, 2]

    def test_the_names_that_are_there_are_told(self, path: Path) -> None:
        made(path).close()
        SQLiteStore.new(path, name="second").close()
        with pytest.raises(LedgerError, match=r"named 'third', found \['budget', 'second'\]"):
            SQLiteStore(path, name="third")

    @pytest.mark.parametrize(
        "options", [{"name": ""}, {"name": "a\nb"}, {"timeout": 0}, {"timeout": float("nan")}, {"timeout": 1e7}]
    )
    def test_arguments_out_of_range_are_refused_before_anything_is_made(self, path: Path, options: Any) -> None:
        for attempt in (SQLiteStore, SQLiteStore.new):
            with pytest.raises(ConfigurationError):
                attempt(path, **options)
        assert list(path.parent.iterdir()) == []

    def test_every_name_of_a_file_is_the_same_ledger(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = made(path)
        link = path.with_name("link.db")
        link.symlink_to(path)
        monkeypatch.chdir(path.parent)
        for alias in (link, "budget.db", "./../" + path.parent.name + "/budget.db", os.fspath(link)):
            other = SQLiteStore(alias)
            assert other.path == store.path
            write(other, 1)
        assert numbers(store) == [0] * 4

    def test_a_path_of_any_letters_is_a_path(self, tmp_path: Path) -> None:
        store = SQLiteStore.new(tmp_path / "a ?mode=memory&cache=shared#%41 é.db")
        store.create(header())
        write(store, 1)
        assert [child.name for child in tmp_path.glob("*.db")] == ["a ?mode=memory&cache=shared#%41 é.db"]
        assert numbers(SQLiteStore(store.path)) == [0]

    def test_a_second_hard_link_is_refused(self, path: Path) -> None:
        made(path).close()
        os.link(path, path.with_name("other.db"))
        with pytest.raises(LedgerError, match="2 hard links"):
            SQLiteStore(path)

    def test_a_network_file_system_is_refused(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        made(path).close()
        mounts = path.with_name("mountinfo")
        line = f"{mount_of(path)} 1 0:21 / / rw,relatime shared:1 - {{}} server:/export rw\n"
        monkeypatch.setattr(sqlite_file, "_MOUNTS", mounts)
        kinds = dict.fromkeys(["nfs4", "virtiofs", "fuse", "fuse.sshfs", "fuse.ceph-fuse", "fuse.of-tomorrow"], True)
        for kind, refused in {**kinds, "fuse.fuse-overlayfs": False, "fuseblk": False, "ext4": False}.items():
            mounts.write_text("999999 1 0:999 / /net\u2028 rw - nfs x rw\n" + line.format(kind))
            if refused:
                with pytest.raises(LedgerError, match=f"found {kind}.*PostgreSQL"):
                    SQLiteStore(path)
                with pytest.raises(LedgerError, match=kind):
                    SQLiteStore.new(path.with_name("new.db"))
            else:
                assert SQLiteStore(path).header() is not None
        assert not path.with_name("new.db").exists()

    def test_a_file_that_is_mounted_alone_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As `-v ./budget.db:/app/budget.db` mounts it: its log is beside it, in a folder of each container's own."""
        folder = tmp_path / "of app\\s é"
        folder.mkdir()
        made(folder / "budget.db").close()
        number = mount_of(folder)
        monkeypatch.setattr(sqlite_file, "_MOUNTS", tmp_path / "mountinfo")
        written = str(folder.resolve()).replace("\\", "\\134").replace(" ", "\\040")
        link = tmp_path / "link.db"
        link.symlink_to(folder / "budget.db")
        for place, refused in ((written, False), (f"{written}/budget.db", True), (f"{written}/other.db", False)):
            line = f"{number} 1 0:999 /of/the/host {place} rw,relatime - ext4 /dev/sda1 rw\n"
            sqlite_file._MOUNTS.write_text(line)
            for named in (folder / "budget.db", link):
                if refused:
                    with pytest.raises(LedgerError, match=r"mounted alone.*Mount the folder"):
                        SQLiteStore(named)
                else:
                    assert SQLiteStore(named).header() is not None

    def test_a_ledger_that_linux_mounts_alone_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "app").mkdir()
        (tmp_path / "app" / "budget.db").touch()
        made(tmp_path / "budget.db").close()
        program = "from langchain_dpicl.stores import SQLiteStore; SQLiteStore('app/budget.db')"
        mounted = (
            f"mount --bind budget.db app/budget.db && exec {shlex.quote(sys.executable)} -c {shlex.quote(program)}"
        )
        asked = ["unshare", "--mount", "sh", "-c"]
        (tmp_path / "empty.db").touch()
        try:
            subprocess.run(
                [*asked, "mount --bind budget.db app/budget.db"], cwd=tmp_path, check=True, capture_output=True
            )
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("this process may not mount")
        for command in (mounted, mounted.replace("--bind budget.db", "--bind empty.db")):
            shown = subprocess.run([*asked, command], cwd=tmp_path, capture_output=True, text=True, check=False)
            assert "mounted alone" in shown.stderr
        hidden = mounted.replace("&& exec", "&& mount --bind ../sound app && exec")
        (tmp_path / "sound").mkdir()
        made(tmp_path / "sound" / "budget.db").close()
        hidden = hidden.replace("../sound", "sound")
        assert subprocess.run([*asked, hidden], cwd=tmp_path, capture_output=True, check=False).returncode == 0

    def test_the_file_systems_of_this_system_are_told(self, path: Path) -> None:
        mount_of(path.parent)
        assert sqlite_file._mount_of(Path("/proc/self/status")) == ("proc", "/proc")
        assert "" not in sqlite_file._mount_of(path.parent)
        assert sqlite_file._mount_of(path) == ("", "")  # nothing is there

    def test_a_system_that_tells_no_mounts_opens_its_ledgers(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As gVisor's, which lists mounts and does not say which of them a file is on."""
        made(path).close()
        for told in ("flags:\t02000000\n", "mnt_id:\t999999\n", ""):
            (path.parent / "told").write_text(told)
            monkeypatch.setattr(sqlite_file, "_HELD", Told(path.parent / "told"))
            assert SQLiteStore(path).header() is not None
        monkeypatch.setattr(sqlite_file, "_HELD", path.parent / "no /proc")
        assert SQLiteStore(path).header() is not None

    def test_a_file_system_without_a_write_ahead_log_is_refused(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made(path, lines=2).close()
        connect = sqlite3.connect

        def without_shared_memory(database: str, **options: Any) -> sqlite3.Connection:
            return connect(database + "&vfs=unix-dotfile", **options)

        monkeypatch.setattr(sqlite3, "connect", without_shared_memory)
        with pytest.raises(LedgerError) as caught:
            SQLiteStore(path)
        assert "write-ahead log" in str(caught.value) or "cannot be used" in str(caught.value)
        with pytest.raises(LedgerError):
            SQLiteStore.new(path.with_name("new.db"))
        monkeypatch.undo()
        assert not path.with_name("new.db").exists()
        assert numbers(SQLiteStore(path)) == [0, 1]

    def test_the_disk_is_asked_for_everything_it_can_promise(self, path: Path) -> None:
        """1 is NORMAL: SQLite synchronises log and file where the one is moved into the other, `flush` the rest."""
        store = made(path)
        with store._link.reading():
            answers = {name: store._link.ask(f"PRAGMA {name}") for name in ("journal_mode", "synchronous", "fullfsync")}
        assert answers == {"journal_mode": [("wal",)], "synchronous": [(1,)], "fullfsync": [(1,)]}

    def test_a_new_file_is_its_owners(self, path: Path) -> None:
        made(path)
        assert {child.name: child.stat().st_mode & 0o777 for child in path.parent.iterdir()} == {
            "budget.db": 0o600,
            "budget.db-wal": 0o600,
            "budget.db-shm": 0o600,
            "budget.db.queue": 0o600,
        }

    def test_a_file_is_made_by_one_of_many(self, path: Path) -> None:
        def make(_: int) -> bool:
            try:
                SQLiteStore.new(path).create(header())
            except LedgerError:
                return False
            return True

        with ThreadPoolExecutor(16) as pool:
            assert sum(pool.map(make, range(16))) == 1
        assert SQLiteStore(path).header() is not None


class TestGuards:
    """The tables refuse what no ledger does, whichever process asks."""

    @pytest.mark.parametrize(
        "command",
        [
            "UPDATE lines SET body = '{}' WHERE seq = 1",
            "DELETE FROM lines WHERE seq = 2",
            "DELETE FROM ledgers",
            "INSERT OR REPLACE INTO lines SELECT ledger, seq, prev, kind, '{}', stamp, hash FROM lines",
            "INSERT INTO lines SELECT ledger, 3, 'other', kind, body, stamp, hash FROM lines WHERE seq = 2",
            "INSERT INTO lines SELECT ledger, 4, hash, kind, body, stamp, hash FROM lines WHERE seq = 2",
            "UPDATE ledgers SET seq = 1",
            "UPDATE ledgers SET header = '{}'",
            "UPDATE ledgers SET digest = ''",
            "UPDATE ledgers SET name = 'other'",
        ],
    )
    def test_lines_are_never_changed_dropped_or_put_between(self, path: Path, command: str) -> None:
        store = made(path, lines=2)
        with edited(path) as connection, pytest.raises(sqlite3.DatabaseError):
            connection.execute(command)
        assert numbers(store) == [0, 1]

    def test_lines_lost_at_the_end_are_missed(self, path: Path) -> None:
        made(path, lines=3).close()
        with edited(path) as connection:
            guard = connection.execute("SELECT sql FROM sqlite_master WHERE name = 'lines_stay'").fetchone()[0]
            connection.execute("DROP TRIGGER lines_stay")
            connection.execute("DELETE FROM lines WHERE seq = 3")
            connection.execute(guard)
        store = SQLiteStore(path)
        for ask in (store.head, store.records):
            with pytest.raises(LedgerError, match=r"gone|gap"):
                ask()
        with pytest.raises(LedgerError), store.transaction() as view:
            view.append("note", {})
