"""L2 on a stream: kill -9 during extend, reserve and retention. No window gives more, and blocks keep their people."""

from __future__ import annotations

import hashlib
import random
import time
from collections import Counter, defaultdict
from typing import Any

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import PrivacyBudgetExceededError
from langchain_dpicl.privacy.accounting.events import PureEvent
from langchain_dpicl.privacy.extensions import private_streams as streams
from langchain_dpicl.privacy.extensions.private_streams import PrivateStream
from langchain_dpicl.privacy.extensions.stream_ledger import StreamTerms
from langchain_dpicl.privacy.ledger.shares import Share
from langchain_dpicl.privacy.ledger.state import GIVE_BACK, RESERVE
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.release.curator import opened
from tests.faults.children import Child, Teller
from tests.faults.counts import Count, require
from tests.faults.places import DELTA, EPSILON, Place, Places

WINDOW, LENGTH, RETENTION = 4, 3, 6
MOST = 96
"""Tickets of a window: several can be leased at once, and two processes use them up in a few days."""
FIRST = 9_000
"""The first day that a component reads."""
PEOPLE, PER_LEDGER, LONGEST = 12, 20, 0.03
WORKING = 0.8
"""How many are killed once they have used some tickets; the others as they open the ledger, or before."""
EVENT = PureEvent(EPSILON / MOST)


def kill(places: Places, count: Count, *, trials: int) -> None:
    """Kills `trials` processes, two of which spend one ledger at a time, while days go by."""
    for first in range(0, trials, PER_LEDGER):
        ledger = _Ledger(places())
        for number in range(first, min(first + PER_LEDGER, trials), 2):
            with count.trial(f"kill {number}"):
                count.trials += 1  # the second of the two
                ledger.kill_two(FIRST + 3 + (number - first) // 6)
                ledger.check()
        count.seen["tickets used"] += sum(map(len, ledger.used.values()))
        count.seen["ranges read"] += len(ledger.read)
        count.seen["windows used up"] += ledger.full


def messages(day: int) -> list[dict[str, Any]]:
    """The records of one day: the same in every process, in no order."""
    start, rng = _terms().start_of(day).timestamp(), random.Random(day)
    found = [
        {"at": start + rng.random() * 86_000, "user": rng.randrange(PEOPLE), "text": f"day {day} number {number}"}
        for number in range(PEOPLE)
    ]
    random.shuffle(found)
    return found


def _terms() -> StreamTerms:
    terms = StreamTerms.parse(f"{WINDOW} days")
    if terms is None:
        raise TypeError("no window")
    return terms


class _Ledger:
    """A ledger of a stream, and what its processes said that they used and read."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.used: dict[tuple[int, int], list[int]] = defaultdict(list)  # places by line and first block
        self.read: dict[tuple[int, int], str] = {}  # a digest of the people by blocks
        self.full = 0
        Budget(epsilon=EPSILON, delta=DELTA, store=place.new(), per=_terms().words).close()

    def kill_two(self, today: int) -> None:
        children = [Child(lambda tell: self.spend(tell, today)) for _ in range(2)]
        for child in children:
            if random.random() < WORKING:
                child.wait_for_words(random.randrange(1, 60))
            time.sleep(random.uniform(0, LONGEST))
            child.kill()
        told = [line for child in children for line in child.lines()]
        errors = [line for line in told if isinstance(line, dict)]
        require(not errors, f"a child failed: {errors}")
        for what, *values in told:
            if what == "used":
                entry, index, first = values
                self.used[entry, first].append(index)
            else:
                first, last, people = values
                require(self.read.setdefault((first, last), people) == people, "blocks have other people than before")

    def spend(self, tell: Teller, today: int) -> None:
        """Lets days go by: records come, old ones are dropped, and each day's run reads the last ones."""
        now = [0.0]
        clock: Any = type("Clock", (), {"time": staticmethod(lambda: now[0])})
        streams.time = clock  # of this process alone, which will be killed
        source = PrivateStream(
            dataset_id="d", time_key="at", unit_key="user", public_size={LENGTH: 100}, grace=0, retention=RETENTION
        )
        budget = Budget.open(self.place.open())
        day = today - LENGTH
        while True:
            now[0] = _terms().start_of(day + 1).timestamp()
            source.extend(messages(day))
            if day > today:
                source.extend(messages(day - 1))  # sent twice, and late
            if day >= today:
                private = source.last(LENGTH)
                budget.bind(private)
                self.use(tell, budget, private)
            day += 1

    def use(self, tell: Teller, budget: Budget, private: Any) -> None:
        share = _share(budget)
        first, last = private.blocks
        for number in range(random.randrange(1, 60)):
            try:
                ticket = share.reserve("query", blocks=private.blocks)
            except PrivacyBudgetExceededError:
                return
            tell(["used", ticket.entry, ticket.index, first])
            pool = opened(private, ticket, EVENT, "add_remove", gap=0.0)
            if number == 0:
                tell(["read", first, last, _digest(pool)])
            ticket.commit()

    def check(self) -> None:
        """Opens what is left as the next process does, and adds up by hand what each window gave."""
        budget = Budget.open(self.place.open())
        budget.verify()
        store = self.place.open()
        lines: dict[int, tuple[int, int]] = {}
        counts: Counter[int] = Counter()
        for line in store.records():
            if line.kind == RESERVE:
                first, last = line.body["blocks"]
                lines[line.seq] = first, last
                counts[line.seq] += line.body["count"]
            elif line.kind == GIVE_BACK:
                counts[line.body["reservation"]] -= line.body["count"]
        for (entry, first), used in self.used.items():
            require(lines.get(entry, (-1, -1))[0] == first, "a ticket was used for blocks that its line does not name")
            require(len(set(used)) == len(used), "a ticket was used twice")
            require(len(used) <= counts[entry], "more tickets were used than their line holds")
        gave: Counter[int] = Counter()
        for entry, (first, last) in lines.items():
            for window in range(first, last + WINDOW):
                gave[window] += counts[entry]
        most = max(gave.values(), default=0)
        require(most <= MOST, f"a window gave {most} tickets of {MOST}")
        self.full = sum(number == MOST for number in gave.values())
        if lines:
            for window, number in gave.items():  # named by its last block, which touches no other run's alone
                blocks = max(window - WINDOW + 1, FIRST), window
                require(_share(budget).remaining("query", blocks=blocks) <= MOST - number, "a window has more left")
        budget.close()


def _share(budget: Budget) -> Share:
    ticket = Ticket("query", EVENT, max_count=MOST, refundable=True)
    return budget.declare("c", tickets=[ticket], epsilon=EPSILON, extent=(FIRST, None))


def _digest(pool: Any) -> str:
    people = sorted(str(pool.records(position)) for position in range(pool.num_units))
    return hashlib.sha256("\n".join(people).encode()).hexdigest()
