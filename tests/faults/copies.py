"""L6: ledgers set back and ledgers used twice. An anchor and receipts tell; the file alone cannot, as documented."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import LedgerRollbackError
from langchain_dpicl.privacy.ledger.shares import Share
from langchain_dpicl.stores import FileAnchor, SQLiteStore
from tests.faults.counts import Count, Violation, require
from tests.faults.places import SQLitePlace, Terms, reserved

TERMS = Terms(1_000)
SPENT, MORE = 5, 4


def restore(folder: Path, count: Count, *, trials: int) -> None:
    """Puts older copies in the ledger's place, made in every way that people make them."""
    for number in range(trials):
        for words, copy in COPIES.items():
            with count.trial(f"{words} {number}"):
                scene = folder / f"{words} {number}"
                scene.mkdir()
                _restore(scene, copy, count)
        with count.trial(f"fork {number}"):
            scene = folder / f"fork {number}"
            scene.mkdir()
            _fork(scene, count)


def _by_backup(path: Path, target: Path) -> None:
    with SQLiteStore(path) as store:
        store.backup(target)


def _with_log(path: Path, target: Path) -> None:
    shutil.copy(path, target)
    shutil.copy(f"{path}-wal", f"{target}-wal")


def _file_alone(path: Path, target: Path) -> None:
    shutil.copy(path, target)


COPIES: dict[str, Callable[[Path, Path], None]] = {
    "backup": _by_backup,
    "file and log": _with_log,
    "file without log": _file_alone,
}


def _spend(share: Share, tickets: int) -> None:
    for _ in range(tickets):
        share.reserve("t")


def refused(attempt: Callable[[], object], words: str) -> None:
    """Requires that an attempt reports a ledger set back."""
    try:
        attempt()
    except LedgerRollbackError:
        return
    raise Violation(f"not refused: {words}")


def _restore(scene: Path, copy: Callable[[Path, Path], None], count: Count) -> None:
    place, anchor = SQLitePlace(scene / "budget.db"), FileAnchor.new(scene / "anchor.json")
    share = TERMS.made(place, anchor=anchor)[1]
    _spend(share, SPENT)
    copy(place.path, scene / "copy.db")
    _spend(share, MORE)
    receipt = share.reserve("t")
    for end in ("", "-wal", "-shm"):
        place.path.with_name(f"budget.db{end}").unlink(missing_ok=True)
        if (scene / f"copy.db{end}").exists():
            (scene / f"copy.db{end}").rename(f"{place.path}{end}")
    refused(lambda: share.reserve("t"), "a process that saw the lines")
    refused(lambda: Budget.open(place.open(), anchor=anchor), "an anchor")
    # Documented: the file alone opens, with what was spent since the copy given back. Its receipts tell.
    older, again = TERMS.opened(place)
    older.verify()
    require(reserved(place.open()) <= SPENT, "the copy holds more than was spent")
    refused(lambda: older.check_receipt(receipt), "a receipt of a lost line")
    _spend(again, SPENT + MORE + 1)
    refused(lambda: older.check_receipt(receipt), "a receipt, after the copy grew past it")
    refused(lambda: Budget.open(place.open(), anchor=anchor), "an anchor, after the copy grew past it")
    refused(lambda: share.reserve("t"), "a process that saw the lines, after the copy grew past them")
    count.seen["set back: refused"] += 6
    older.close()


def _fork(scene: Path, count: Count) -> None:
    """Two copies of one ledger are used at two places; both go on past the same line."""
    first, second = SQLitePlace(scene / "first.db"), SQLitePlace(scene / "second.db")
    budget, share = TERMS.made(first)
    _spend(share, SPENT)
    with SQLiteStore(first.path) as store:
        store.backup(second.path)
    twin, twin_share = TERMS.opened(second)
    ours, theirs = share.reserve("t"), twin_share.reserve("t", count=2)
    _spend(share, MORE)
    _spend(twin_share, MORE)
    require(ours.ledger_id == theirs.ledger_id, "the copies are not of one ledger")
    require(ours.entry == theirs.entry, "the copies went on from another line")
    require(ours.entry_hash != theirs.entry_hash, "two histories look the same")
    budget.check_receipt(ours)
    twin.check_receipt(theirs)
    refused(lambda: budget.check_receipt(theirs), "a receipt of the other copy")
    refused(lambda: twin.check_receipt(ours), "a receipt of the other copy")
    anchor = FileAnchor.new(scene / "anchor.json")
    Budget.open(first.open(), anchor=anchor, adopt_anchor=True)
    refused(lambda: Budget.open(second.open(), anchor=anchor), "an anchor that both copies have")
    count.seen["forks: shown by receipts and anchor"] += 1
    budget.close()
    twin.close()
