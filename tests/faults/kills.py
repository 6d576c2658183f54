"""L2: kill -9 at random moments. What was acknowledged is in the ledger; what dangles is listed and stays spent.

Half of the ledgers have an anchor, which a crash must never put before its ledger.
"""

from __future__ import annotations

import random
import time
from collections import Counter

from langchain_dpicl.privacy.extensions.durable_writer import MOST_HELD
from langchain_dpicl.privacy.extensions.ledger_anchor import LedgerAnchor
from langchain_dpicl.privacy.ledger.state import COMMIT, RESERVE
from tests.faults.children import Child, Teller
from tests.faults.counts import Count, require
from tests.faults.places import Place, Places, Terms, lines, reserved

TERMS = Terms(1_000_000, refundable=True)
PER_LEDGER = 50
LONGEST = 0.05
WORKING = 0.8
"""How many are killed in their work; the others as they open the ledger, or before."""


def kill(places: Places, count: Count, *, trials: int) -> None:
    """Kills `trials` processes: two spend one ledger at a time, and some are killed before they have opened it."""
    for first in range(0, trials, PER_LEDGER):
        ledger = _Ledger(places(), is_anchored=first // PER_LEDGER % 2 == 0)
        for number in range(first, min(first + PER_LEDGER, trials), 2):
            with count.trial(f"kill {number}"):
                count.trials += 1  # the second of the two
                ledger.kill_two()
                ledger.check()
        count.seen["acknowledged"] += len(ledger.acknowledged)
        count.seen["dangling"] += ledger.dangling


class _Ledger:
    """A ledger, and what its processes were granted stands."""

    def __init__(self, place: Place, *, is_anchored: bool) -> None:
        self.place = place
        self.is_anchored = is_anchored
        self.acknowledged: Counter[int] = (
            Counter()
        )  # tickets by line, of which some lines have more than were asked for
        self.settled = 0
        self.killed = 0
        self.dangling = 0
        TERMS.made(place, anchor=self.anchor())[0].close()

    def anchor(self) -> LedgerAnchor | None:
        return self.place.anchor() if self.is_anchored else None

    def kill_two(self) -> None:
        children = [Child(self.spend) for _ in range(2)]
        for child in children:
            if random.random() < WORKING:
                child.wait_for_a_word()
            time.sleep(random.uniform(0, LONGEST))
            child.kill()
            self.killed += 1
        told = [line for child in children for line in child.lines()]
        errors = [line for line in told if isinstance(line, dict)]
        require(not errors, f"a child failed: {errors}")
        for what, entry, number in told:
            self.acknowledged[entry] += number * (what == RESERVE)
        self.settled += sum(number for what, _, number in told if what == COMMIT)

    def spend(self, tell: Teller) -> None:
        """Reserves, burns and commits without end, and tells the parent each time a call has returned."""
        _, share = TERMS.opened(self.place, anchor=self.anchor())
        while True:
            reservation = share.reserve("t", count=random.choice([1, 1, 1, 1, 2, 3]))
            tell([RESERVE, reservation.entry, reservation.count])
            reservation.burn(reservation.count)
            reservation.commit(reservation.count, wait=True)
            tell([COMMIT, reservation.entry, reservation.count])

    def check(self) -> None:
        """Opens what is left as the next process does."""
        budget, share = TERMS.opened(self.place, anchor=self.anchor())
        budget.verify()
        store = self.place.open()
        found, committed = lines(store, RESERVE), lines(store, COMMIT)
        lost = {entry: number for entry, number in self.acknowledged.items() if found.get(entry, 0) < number}
        require(not lost, f"acknowledged and gone: {lost}")
        require(sum(committed.values()) >= self.settled, "acknowledged commits are gone")
        spent = reserved(store)
        unused = spent - self.acknowledged.total()
        require(unused <= self.killed * (MOST_HELD + 3), f"{unused} tickets are lost to {self.killed} killed processes")
        require(share.remaining("t") == TERMS.count - spent, "what is left is not what the lines say")
        dangling = budget.dangling()
        open_tickets = sum(one.count for one in dangling)
        require(open_tickets == spent - sum(committed.values()), "dangling reservations are not all listed")
        self.dangling = len(dangling)
        budget.close()
