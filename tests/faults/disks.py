"""L4: a full disk, a quota, a read-only file. Refused; what was granted stays; nothing is granted on what failed."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from langchain_dpicl.exceptions import LedgerError, LedgerUnavailableError
from langchain_dpicl.privacy.ledger.shares import Share
from langchain_dpicl.privacy.ledger.state import RESERVE
from tests.faults.children import Child
from tests.faults.counts import Count, require
from tests.faults.places import SQLitePlace, Terms, lines, reserved

TERMS = Terms(100_000)
RETRIES = 20
NOBODY = 65534


def fill(folder: Path, count: Count, *, trials: int) -> None:
    """Fills a small disk of its own where one can be mounted, and runs into a quota of bytes per file."""
    for number in range(trials):
        with count.trial(f"disk {number}"), small_disk() as disk:
            if disk is not None:
                _check_full(SQLitePlace(disk / "budget.db"), count, before=lambda: None, after=lambda: _grow(disk))
                count.seen["full disks"] += 1
        with count.trial(f"quota {number}"):
            place = SQLitePlace(folder / f"quota{number}.db")
            _check_full(place, count, before=_set_quota, after=lambda: None)
            count.seen["quotas"] += 1


def _check_full(place: SQLitePlace, count: Count, *, before: Callable[[], object], after: Callable[[], object]) -> None:
    """Spends until the disk is full, in a process of its own; `after` makes room again."""
    TERMS.made(place)[0].close()
    told = Child(lambda _: _spend_until_full(place, before)).result()
    granted, late = told["granted"], told["late"]
    after()
    budget, share = TERMS.opened(place)
    budget.verify()
    found = lines(place.open(), RESERVE)
    require(len(granted) > 0, "nothing was granted")
    require(set(granted + late) <= set(found), "granted and not in the ledger")
    count.seen["granted on a retry"] += len(late)
    share.reserve("t")
    require(reserved(place.open()) == len(found) + 1, "the ledger does not go on")
    budget.close()


def _set_quota() -> None:
    import resource  # not on every system

    size = random.randrange(50_000, 400_000)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def _spend_until_full(place: SQLitePlace, before: Callable[[], object]) -> dict[str, list[int]]:
    share = TERMS.opened(place)[1]
    before()
    granted: list[int] = []
    with contextlib.suppress(LedgerUnavailableError):
        while True:
            granted.append(share.reserve("t").entry)
    late = []
    for _ in range(RETRIES):
        with contextlib.suppress(LedgerUnavailableError):
            late.append(share.reserve("t").entry)
    return {"granted": granted, "late": late}


def read_only(folder: Path, count: Count, *, trials: int) -> None:
    """Takes the right to write away: from the file, from file and folder, from the whole disk."""
    for number in range(trials):
        for words, close in {"file": _close_file, "folder": _close_folder}.items():
            with count.trial(f"{words} {number}"), _public_folder() as public:
                place = SQLitePlace(public / "budget.db")
                _check_refused(place, lambda place=place, close=close: close(place.path), count)
                count.seen[f"read-only {words}s"] += 1
        with count.trial(f"disk {number}"), small_disk() as disk:
            if disk is not None:
                _check_disk(disk)
                count.seen["read-only disks"] += 1


def _check_refused(place: SQLitePlace, shut: Callable[[], object], count: Count) -> None:
    """Spends a little, shuts the door and tries again, on a handle that is open and on a new one."""

    def attempts(_: object) -> list[str]:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        budget, share = TERMS.made(place)
        share.reserve("t")
        shut()
        kept = _refusal(lambda: share)
        budget.close()
        return [kept, _refusal(lambda: TERMS.opened(place)[1])]

    outcomes = Child(attempts).result()
    require(outcomes[1] == "LedgerUnavailableError", f"a new handle: {outcomes}")
    # A handle whose log is open may write on where only the file's name is shut; then it stands as any other line.
    require(outcomes[0] in {"LedgerUnavailableError", "granted"}, f"an open handle: {outcomes}")
    count.seen["written through an open handle"] += outcomes[0] == "granted"
    place.path.parent.chmod(0o700)
    place.path.chmod(0o600)
    budget, _ = TERMS.opened(place)
    budget.verify()
    require(reserved(place.open()) == 1 + outcomes.count("granted"), "the ledger holds another number of tickets")
    budget.close()


def _check_disk(disk: Path) -> None:
    """A disk that became read-only; the system does that after errors."""
    place = SQLitePlace(disk / "budget.db")
    budget, share = TERMS.made(place)
    share.reserve("t")
    budget.close()
    _mount(disk, "remount,ro")
    outcome = _refusal(lambda: TERMS.opened(place)[1])
    _mount(disk, "remount,rw")
    require(outcome == "LedgerUnavailableError", f"a read-only disk: {outcome}")
    budget, _ = TERMS.opened(place)
    budget.verify()
    require(reserved(place.open()) == 1, "the ledger holds another number of tickets")
    budget.close()


def _refusal(share: Callable[[], Share]) -> str:
    try:
        share().reserve("t")
    except LedgerError as error:
        return type(error).__name__
    return "granted"


def _close_file(path: Path) -> None:
    path.chmod(0o400)


def _close_folder(path: Path) -> None:
    path.chmod(0o400)
    path.parent.chmod(0o500)


@contextlib.contextmanager
def _public_folder() -> Iterator[Path]:
    """A folder that a user with no rights reaches."""
    folder = Path(tempfile.mkdtemp(prefix="dpicl-fault-"))
    try:
        if os.geteuid() == 0:
            shutil.chown(folder, NOBODY, NOBODY)
        yield folder
    finally:
        folder.chmod(0o700)
        shutil.rmtree(folder)


@contextlib.contextmanager
def small_disk() -> Iterator[Path | None]:
    """Mounts a disk of 300 KiB; yields None where that is not allowed."""
    folder = Path(tempfile.mkdtemp(prefix="dpicl-disk-"))
    try:
        mounted = _mounted(folder)
        try:
            yield folder if mounted else None
        finally:
            if mounted:
                subprocess.run(["umount", "-l", str(folder)], check=True, capture_output=True)
    finally:
        folder.rmdir()


def _mounted(folder: Path) -> bool:
    if os.name != "posix" or os.geteuid() != 0 or not shutil.which("mount"):
        return False
    command = ["mount", "-t", "tmpfs", "-o", "size=300k", "none", str(folder)]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def _grow(disk: Path) -> None:
    _mount(disk, "remount,size=8m")


def _mount(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-o", options, str(disk)], check=True, capture_output=True)
