"""`dpicl ledger` where a file has two names, or somebody may only read it."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.cli.main import main
from langchain_dpicl.stores import SQLiteStore, sqlite_file
from tests.contracts.store import in_child
from tests.ledger_files import exported, spend
from tests.sqlite_ledgers import mount_of

NOBODY = 65534

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has neither fork nor file modes")


def dpicl(*arguments: object) -> tuple[int, str]:
    """Runs the command here; returns its code and all that it said."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(["ledger", *map(str, arguments)])
    return code, said.getvalue()


def as_auditor(*arguments: object) -> tuple[int, str]:
    """Runs the command as a user who owns nothing, in a child; what loads modules late was run here before."""
    hear, tell = os.pipe()
    child = os.fork()
    if not child:
        code, said = 99, ""
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            code, said = dpicl(*arguments)
        except BaseException as error:
            said = repr(error)
        finally:
            os.write(tell, said.encode()[:4000])
            os._exit(code)
    os.close(tell)
    with os.fdopen(hear, "rb") as heard:
        said = heard.read().decode()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that others may enter: those of pytest are closed to them."""
    made = Path(tempfile.mkdtemp(prefix="dpicl-"))
    made.chmod(0o755)
    try:
        yield made
    finally:
        made.chmod(0o755)
        shutil.rmtree(made)


@pytest.fixture
def file(folder: Path) -> Path:
    path = folder / "budget.db"
    with SQLiteStore.new(path) as store:
        spend(Budget(epsilon=4.0, delta=1e-6, store=store))
        exported(store, folder / "export.jsonl")
    return path


COMMANDS = (("show",), ("verify",), ("export",), ("backup", "copy.db"))


def test_a_file_of_two_hard_links_is_refused_by_both_names_until_one_is_left(file: Path) -> None:
    other = file.with_name("other.db")
    os.link(file, other)
    before = file.read_bytes()
    for path in (file, other):
        for command, *more in COMMANDS:
            code, said = dpicl(command, path, *(file.with_name(name) for name in more))
            assert (code, "2 hard links" in said) == (1 if command == "verify" else 2, True)
    assert file.read_bytes() == before
    assert sorted(child.name for child in file.parent.iterdir()) == [
        "budget.db",
        "budget.db.queue",
        "export.jsonl",
        "other.db",
    ]
    file.unlink()
    assert dpicl("verify", other)[0] == 0


def test_a_symbolic_link_is_the_ledger_and_its_log_is_beside_the_file(file: Path) -> None:
    (file.parent / "far").mkdir()
    link = file.parent / "far" / "link.db"
    link.symlink_to(file)
    assert dpicl("verify", link)[0] == 0
    with SQLiteStore(link) as store:
        assert store.path == file.resolve()
        spend_more = Budget.open(store).gdp_pool("more", epsilon=0.1)
        spend_more.reserve(mu=spend_more.mu / 2)
        assert [child.name for child in link.parent.iterdir()] == ["link.db"]
    assert dpicl("verify", file)[0] == 0


@pytest.mark.parametrize("is_folder_closed", [False, True])
def test_who_may_only_read_is_told_to_read_an_export(file: Path, is_folder_closed: bool) -> None:
    for command in ("show", "verify", "export"):
        assert dpicl(command, file)[0] == 0
    file.chmod(0o444)
    if is_folder_closed:
        file.parent.chmod(0o555)
    before = file.read_bytes()
    for command in ("show", "verify", "export"):
        code, said = as_auditor(command, file)
        assert (code, "dpicl ledger export" in said) == (1 if command == "verify" else 2, True), said
    assert file.read_bytes() == before
    assert sorted(child.name for child in file.parent.iterdir()) == ["budget.db", "budget.db.queue", "export.jsonl"]
    for command in ("show", "verify"):
        code, said = as_auditor(command, file.with_name("export.jsonl"))
        assert (code, "ledger 'budget'" in said or "Privacy report of 'budget'" in said) == (0, True), said


def test_in_a_folder_that_may_not_be_written_none_is_made(file: Path) -> None:
    limits = ("--epsilon", "1", "--delta", "1e-6")
    assert dpicl("create", file.with_name("new.db"), *limits)[0] == 0
    file.parent.chmod(0o555)
    code, said = as_auditor("create", file.with_name("newer.db"), *limits)
    assert (code, "Permission denied" in said) == (2, True), said
    assert not file.with_name("newer.db").exists()


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can be two users")
def test_the_log_of_whoever_opens_a_ledger_first_belongs_to_the_group_of_the_file(file: Path) -> None:
    """As `dpicl ledger verify` under another account does: what it leaves behind would lock the service out."""
    service, group = 61000, 61001
    for path in (file.parent, file, file.with_name("budget.db.queue")):
        os.chown(path, service, group)
        path.chmod(0o770 if path.is_dir() else 0o660)

    def opened_as(user: int, own_group: int) -> None:
        os.umask(0o022)
        os.setgroups([group])
        os.setgid(own_group)
        os.setuid(user)
        SQLiteStore(file).header()
        os._exit(0)  # killed: what is beside the file stays

    assert in_child(lambda: opened_as(NOBODY, NOBODY))
    assert file.with_name("budget.db-wal").exists()
    assert in_child(lambda: opened_as(service, group))


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can give files away")
def test_root_gives_no_file_away_to_which_a_link_leads(file: Path, tmp_path: Path) -> None:
    (victim := tmp_path / "shadow").touch()
    log = file.with_name("budget.db-wal")
    log.unlink(missing_ok=True)
    log.symlink_to(victim)
    os.chown(file, -1, 61001)
    sqlite_file._share_log(file)
    assert victim.stat().st_gid == os.getegid()
    assert log.lstat().st_gid == 61001


def test_a_ledger_and_an_anchor_that_a_restart_forgets_are_made_with_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_file, "_MOUNTS", tmp_path / "mountinfo")
    for kind in ("tmpfs", "ext4"):
        (tmp_path / "mountinfo").write_text(f"{mount_of(tmp_path)} 1 0:21 / / rw - {kind} none rw\n")
        file, anchor = tmp_path / f"{kind}.db", tmp_path / f"{kind}.json"
        code, said = dpicl("create", file, "--epsilon", 1, "--delta", 1e-6, "--anchor", anchor)
        assert code == 0
        for path in (file, anchor):
            lost = f"{path}: in memory (tmpfs). It is lost when the machine restarts. Keep it on a disk."
            assert (lost in said) == (kind == "tmpfs")


def test_an_export_that_found_no_room_leaves_no_file(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the same command is refused once there is room."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    usual, out = os.fsync, tmp_path / "out.jsonl"
    monkeypatch.setattr(os, "fsync", full)
    assert dpicl("export", file, "--out", out)[0] == 2
    assert not out.exists()
    monkeypatch.setattr(os, "fsync", usual)
    assert dpicl("export", file, "--out", out)[0] == 0
