"""L3: a write-ahead log torn by a power loss. What opens is a prefix of what was written; an anchor refuses lost lines."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import LedgerError, LedgerRollbackError
from langchain_dpicl.stores import FileAnchor, SQLiteStore
from tests.faults.counts import Count, require
from tests.faults.places import SQLitePlace, Terms

TERMS = Terms(1_000)
RESERVATIONS = 60


def tear(folder: Path, count: Count, *, trials: int) -> None:
    """Cuts the log at random offsets; in every other trial the tail is noise, as on a disk that wrote out of order."""
    place, anchor = SQLitePlace(folder / "whole.db"), folder / "anchor.json"
    budget, share = TERMS.made(place, anchor=FileAnchor.new(anchor))
    for _ in range(RESERVATIONS):
        share.reserve("t")
    whole = [line.hash for line in place.open().records()]
    log = Path(f"{place.path}-wal").read_bytes()
    for number in range(trials):
        cut = len(log) if number % 10 == 9 else random.randrange(len(log))  # some logs are whole
        tail = os.urandom(len(log) - cut) if number % 2 else b""
        torn = folder / f"torn{number}.db"
        with count.trial(f"cut at {cut} of {len(log)}, {'noise' if tail else 'nothing'} behind"):
            shutil.copy(place.path, torn)
            Path(f"{torn}-wal").write_bytes(log[:cut] + tail)
            _check(torn, anchor, whole, count)
        for end in ("", "-wal", "-shm"):
            Path(f"{torn}{end}").unlink(missing_ok=True)
    budget.close()


def _check(torn: Path, anchor: Path, whole: list[str], count: Count) -> None:
    """The anchor first: opening the ledger without it may go on with what is left."""
    refusal: LedgerError | None = None
    try:
        Budget.open(SQLiteStore(torn), anchor=FileAnchor(anchor)).close()
    except LedgerRollbackError as error:
        refusal = error
    store = SQLiteStore(torn)
    left = [line.hash for line in store.records()]
    require(left == whole[: len(left)], "what is left is no prefix")
    Budget.open(store).verify()
    store.close()
    lost = len(whole) - len(left)
    require((refusal is not None) == (lost > 0), f"{lost} lines lost, anchor: {refusal}")
    count.seen["lost lines"] += lost > 0
    count.seen["refused by the anchor"] += refusal is not None
