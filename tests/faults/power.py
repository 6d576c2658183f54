"""L3: a loss of power at any moment of a ledger in a real file. What was granted is there; nothing else appears.

Where the disk failed before, and the power is lost while what it lost is written again, the file may be broken: then it
is refused.
"""

from __future__ import annotations

import contextlib
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import LedgerError, LedgerUnavailableError
from langchain_dpicl.privacy.ledger.shares import Share
from langchain_dpicl.stores import SQLiteStore
from tests.faults.counts import Count, require
from tests.faults.places import SQLitePlace, Terms
from tests.faults.recorded_disk import CAN_RECORD, Disk

TERMS = Terms(100_000)
STEPS = 40
FAILING = 0.08
"""How many waits for the disk fail, in runs in which they do."""

PER_RUN = 20


@dataclass(frozen=True)
class _Moment:
    """What a loss of power leaves, and the lines that the ledger had promised by then."""

    files: dict[str, bytes]
    promised: frozenset[str]


class _Run:
    """Some hands on one ledger, which open, spend and close; and moments at which the power fails."""

    def __init__(
        self, folder: Path, rng: random.Random, *, moments: int, lies: str, failing: bool, opens: bool
    ) -> None:
        self.disk = Disk()
        self.place = SQLitePlace(folder / "budget.db")
        self.rng = rng
        self.moments: list[_Moment] = []
        self.promised: set[str] = set()
        self.faults = 0
        self._hands: list[tuple[Budget, Share]] = []
        self._most = moments
        self._seen = 0
        self._lies = lies
        self._failing = FAILING if failing else 0.0
        self._opens_later = opens

    def spend(self) -> list[str]:
        """Runs it; returns the hashes of all lines at its end."""
        with self.disk.recording():
            TERMS.made(self.place)[0].close()
            self.disk.lies = self._lies
            self.disk.moment = self._meet
            for _ in range(STEPS):
                with contextlib.suppress(LedgerUnavailableError):  # the disk failed: what was asked may stand
                    self._step()
                self._meet()
            self.disk.moment = lambda: None
            for budget, _ in self._hands:
                with contextlib.suppress(LedgerUnavailableError):
                    budget.close()
            store = self.place.open()
            lines = [line.hash for line in store.records()]
            store.close()
        return lines

    def _meet(self) -> None:
        """Keeps a sample of all moments, each as likely as another."""
        self._seen += 1
        place = len(self.moments) if len(self.moments) < self._most else self.rng.randrange(self._seen)
        if place < self._most:
            self.moments[place : place + 1] = [_Moment(self.disk.left(self.rng), frozenset(self.promised))]

    def _step(self) -> None:
        rng = self.rng
        what = rng.random()
        may_open = self._opens_later or not self.faults
        if not self._hands:
            for _ in range(2 * may_open):
                self._open()
        elif len(self._hands) < 3 and what < 0.1:
            if may_open:
                self._open()
        elif what < 0.22:
            self._hands.pop(rng.randrange(len(self._hands)))[0].close()
        else:
            if rng.random() < self._failing:
                self.disk.fails = True
                self.faults += 1
            held = rng.choice(self._hands)[1].reserve("t")
            self.promised.add(held.entry_hash)
            held.burn()
            held.commit(wait=rng.random() < 0.3)

    def _open(self) -> None:
        budget, share = TERMS.opened(self.place)
        self._hands.append((budget, share))
        store = budget._store
        assert isinstance(store, SQLiteStore)
        with store._link.reading():  # as a ledger of any length meets it
            store._link.ask(f"PRAGMA wal_autocheckpoint = {self.rng.choice([5, 40, 1000])}")


def lose_power(
    folder: Path,
    count: Count,
    *,
    trials: int,
    failing: bool = False,
    opens_after_failure: bool = False,
    lies: str = "",
    seed: int | None = None,
) -> None:
    """Opens what a loss of power leaves at `trials` moments, some of each run.

    With `failing` some waits for the disk fail, and lose what they waited for. A process that opens the file after that does not
    hear of it: nobody does unless `opens_after_failure`. With `lies` waits for the "log" or the "folder" do nothing.
    """
    if not CAN_RECORD:
        pytest.skip("SQLite's file system layer cannot be watched here")
    rng = random.Random(seed)
    for first in range(0, trials, PER_RUN):
        place = folder / f"run{first}"
        place.mkdir()
        moments = min(PER_RUN, trials - first)
        run = _Run(place, rng, moments=moments, lies=lies, failing=failing, opens=opens_after_failure)
        lines = run.spend()
        count.seen["failures of the disk"] += run.faults
        for number, moment in enumerate(run.moments):
            with count.trial(f"moment {first + number}"):
                _check(place / f"left{number}", moment, lines, count, may_break=run.faults > 0)
        shutil.rmtree(place)


def _check(folder: Path, moment: _Moment, lines: list[str], count: Count, *, may_break: bool) -> None:
    folder.mkdir()
    for path, content in moment.files.items():
        (folder / Path(path).name).write_bytes(content)
    try:
        store = SQLiteStore(folder / "budget.db")
        budget = Budget.open(store)
        budget.verify()
    except LedgerError:
        count.seen["refused"] += 1
        if may_break:
            return
        raise
    found = [line.hash for line in store.records()]
    budget.close()
    require(found == lines[: len(found)], "lines that were never written, or not in this order")
    lost = moment.promised - set(found)
    require(not lost, f"{len(lost)} lines were granted and are gone")
    count.seen["lines lost that granted nothing"] += len(lines) > len(found)
    count.seen["granted"] += len(moment.promised)
