"""L8 and L9: a lock holder that is stuck, and clocks that jump. Time ends waits; it decides nothing else."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import LedgerUnavailableError, PrivacyBudgetExceededError
from tests.faults.counts import Count, Violation, require
from tests.faults.places import Places, Terms, reserved

TERMS = Terms(10)
UNTIL_RELEASE = 0.2
TEN_YEARS = 10 * 365 * 86_400


def stuck(places: Places, count: Count, *, trials: int, held: float, timeout: float) -> None:
    """Holds the write lock, for `held` seconds at most, until one who waits `timeout` is refused; then all go on."""
    for number in range(trials):
        with count.trial(f"holder {number}"):
            place = places()
            TERMS.made(place)[0].close()
            store, in_haste = place.hasty(timeout)
            share = TERMS.declared(Budget.open(store))
            release = place.hold()
            end = threading.Timer(held, release)  # of one who waits for longer than said, who is granted then
            end.start()
            began = time.monotonic()
            try:
                with in_haste:
                    share.reserve("t")
            except LedgerUnavailableError as error:
                waited = time.monotonic() - began
                require(place.words in str(error), f"the message does not name the place: {error}")
            else:
                raise Violation("granted while another held the lock")
            require(waited >= 0.9 * timeout, f"waited {waited:.2f} s")
            require(share.remaining("t") == TERMS.count, "reading waits for the lock")
            end.cancel()
            threading.Timer(UNTIL_RELEASE, release).start()
            patient = TERMS.opened(place, timeout=held + 60)[1]
            patient.reserve("t")
            require(reserved(place.open()) == 1, "the refused reservation stands")
            count.seen["refused, then granted"] += 1


def jump(places: Places, count: Count, *, trials: int) -> None:
    """Moves the clock ten years back or forth between any two steps, of one process and of another."""
    for number in range(trials):
        with count.trial(f"clock {number}"):
            place = places()
            with jumping_clock():
                _, share = TERMS.made(place)
                other, other_share = TERMS.opened(place)
                taken = [share.reserve("t"), other_share.reserve("t", count=4), share.reserve("t", count=5)]
                for some in (share, other_share, TERMS.opened(place)[1]):
                    try:
                        some.reserve("t")
                    except PrivacyBudgetExceededError:
                        count.seen["refused"] += 1
                    else:
                        raise Violation("granted beyond the budget")
                taken[0].burn()
                taken[0].commit(wait=True)
                other.verify()
                require(sum(one.count for one in other.dangling()) == TERMS.count - 1, "a reservation ran out")
            require(TERMS.opened(place)[1].remaining("t") == 0, "time gave tickets back")


@contextmanager
def jumping_clock() -> Iterator[None]:
    """Lets every look at the wall clock return a time of its own, up to ten years off."""
    seconds, nanoseconds = time.time, time.time_ns
    try:
        time.time = lambda: seconds() + random.choice([-1, 0, 1]) * random.uniform(0, TEN_YEARS)
        time.time_ns = lambda: int(time.time() * 1e9)
        yield
    finally:
        time.time, time.time_ns = seconds, nanoseconds
