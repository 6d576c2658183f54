"""Compares what runs on data that grows cost under one promise, and how long a reservation takes after many others.

    python benchmarks/bench_growing.py
    python benchmarks/bench_growing.py --reservations 1000000

The promise is (4, 1e-6) per person and 30 days, for Gaussian votes; shown is the noise of one run in votes:
  - a purse per block: every block has its own budget, so that a person has a row in each block of the range;
  - dated shares: every run has a share of its own, and those that touch one window add up;
  - a standing share: the runs that touch one window are priced together, once;
  - one data set for life: the runs of a year are priced together, as without windows.

Ends with 1 if a goal is missed: at most 5 votes for a weekly run over 90 days; and a reservation on 1,000 blocks takes
at most twice as long after all others as after the first tenth of them.
"""

from __future__ import annotations

import argparse
import random
import sys
import time

from langchain_dpicl.privacy.accounting import gdp_mu
from langchain_dpicl.privacy.accounting.events import GaussianEvent
from langchain_dpicl.privacy.extensions.stream_ledger import StreamTerms
from langchain_dpicl.privacy.ledger.state import LedgerState
from langchain_dpicl.privacy.ledger.store import LedgerHeader, next_record
from langchain_dpicl.privacy.ledger.tickets import Component, ShareTerms, Ticket
from langchain_dpicl.streams import PrivateStream

EPSILON, DELTA, WINDOW, BLOCKS = 4.0, 1e-6, 30, 1_000
RUNS = (
    ("weekly, the last 90 days", 90, 7),
    ("daily, the last 30 days", 30, 1),
    ("weekly, its own week", 7, 7),
    ("monthly, the last 30 days", 30, 30),
)
MOST_VOTES, MOST_SLOWER = 5.0, 2.0


def noises(length: int, every: int, window: int = WINDOW) -> tuple[int, float, float, float, float]:
    """Returns the runs that touch a window, and the noise of one: purse per block, dated, standing, for life."""
    stream = PrivateStream(dataset_id="d", time_key="at", unit_key="user", public_size={length: 9_000})
    runs = stream.rolling(length, every=every).runs_per_window(window)
    mu = gdp_mu(EPSILON, DELTA)
    apart = min(length, window) * runs**0.5 / mu
    dated = 1 / gdp_mu(EPSILON / runs, DELTA / runs)
    return runs, apart, dated, runs**0.5 / mu, (365 / every) ** 0.5 / mu


def reservation_times(count: int) -> tuple[float, float, float]:
    """Returns the time of one reservation in microseconds, in the second and in the last tenth of `count`.

    And that of opening what is left from its snapshot, in milliseconds; all of the processor.
    """
    terms = StreamTerms.parse(f"{WINDOW} days")
    state = LedgerState(LedgerHeader("f0" * 16, "bench", EPSILON, 0.5, "add_remove", stream=terms))
    component = Component("c", "tickets", (Ticket("run", GaussianEvent(1e6), max_count=10**9),), extent=(0, None))
    share = ShareTerms((component,), 1.0, DELTA, joint=False, event=component.event, pricing={"epsilon": 1.0})
    sealed = next_record(0, state.head, "seal", share.to_dict())
    state.apply(sealed)
    body = {"component": "c", "template": "run", "label": None, "count": 1, "amount": 1.0}
    rng, tenths = random.Random(0), []
    for _ in range(10):
        spent = 0.0
        for _ in range(count // 10):
            first = rng.randrange(BLOCKS - 90)
            line = next_record(state.seq, state.head, "reserve", {**body, "blocks": [first, first + 89]})
            start = time.process_time()
            state.apply(line)
            spent += time.process_time() - start
            done = next_record(state.seq, state.head, "commit", {"reservation": state.seq, "count": 1})
            state.apply(done)
        tenths.append(1e6 * spent / (count // 10))
    snapshot = next_record(state.seq, state.head, "snapshot", state.snapshot())
    start = time.process_time()
    opened = LedgerState.from_snapshot(state.header, [sealed, snapshot])
    opening = time.process_time() - start
    state.apply(snapshot)
    if opened.snapshot() != state.snapshot():
        raise SystemExit("a ledger that was opened from a snapshot differs")
    return tenths[1], tenths[-1], 1e3 * opening


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reservations", type=int, default=50_000)
    asked = parser.parse_args(argv)
    print(f"noise of one run in votes; ({EPSILON:g}, {DELTA:g}) per person and {WINDOW} days")
    print(f"{'run':28}{'runs':>6}{'purse per block':>18}{'dated':>10}{'standing':>10}{'for life':>10}")
    for name, length, every in RUNS:
        runs, *votes = noises(length, every)
        print(f"{name:28}{runs:>6}{votes[0]:>18.1f}{votes[1]:>10.1f}{votes[2]:>10.1f}{votes[3]:>10.1f}")
    weekly = noises(90, 7)[3]
    early, late, opening = reservation_times(asked.reservations)
    print(f"reservation on {BLOCKS} blocks: {early:.0f} us early, {late:.0f} us after {asked.reservations}")
    print(f"opening from the last snapshot: {opening:.0f} ms")
    goals = {
        f"weekly run over 90 days: {weekly:.2f} votes, at most {MOST_VOTES:g}": weekly <= MOST_VOTES,
        f"later reservations: {late / early:.2f} times as long, at most {MOST_SLOWER:g}": late <= MOST_SLOWER * early,
    }
    for goal, is_met in goals.items():
        print(f"{'met' if is_met else 'MISSED':8}{goal}")
    return int(not all(goals.values()))


if __name__ == "__main__":
    sys.exit(main())
