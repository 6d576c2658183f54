"""Runs many random schedules of several processes against a ledger of windows, and asks an oracle what they gave away.

    python tests/check_windows.py --schedules 100000 --jobs 2

Fails where one gave more away than the ledger promises, or where none comes near the promise.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.windows.simulator import SLACK, random_schedule

BLOCK = 250
NEAR = 0.999


def block_of(first: int) -> tuple[float, int, int, list[tuple[str, int]]]:
    """Returns the largest loss by the promise, releases, schedules near the promise, and those above it."""
    worst, releases, near, above = 0.0, 0, 0, []
    for seed in range(first, first + BLOCK):
        for exchange in (False, True):
            it = random_schedule(seed, exchange=exchange)
            ratio = it.ratio
            worst, releases = max(worst, ratio), releases + len(it.released)
            near += ratio >= NEAR
            if ratio > 1 + SLACK:
                above.append(("replace_one" if exchange else "add_remove", seed))
    return worst, releases, near, above


def main() -> int:
    """Prints what was found; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=100_000, help="half of them under each adjacency")
    parser.add_argument("--first", type=int, default=10_000, help="seed of the first one")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    asked = parser.parse_args()
    began = time.monotonic()
    firsts = range(asked.first, asked.first + max(asked.schedules // 2, BLOCK), BLOCK)
    with ProcessPoolExecutor(asked.jobs) as pool:
        found = list(pool.map(block_of, firsts))
    worst, above = max(each[0] for each in found), [one for each in found for one in each[3]]
    near = sum(each[2] for each in found)
    print(
        f"{2 * BLOCK * len(found)} schedules, {sum(each[1] for each in found)} releases: {len(above)} above the "
        f"promise, {near} at {NEAR} of it or more, the largest at {worst:.6f}; {time.monotonic() - began:.0f} s"
    )
    for adjacency, seed in above[:20]:
        print(f"  above the promise: {adjacency}, seed {seed}")
    return int(bool(above) or not near)


if __name__ == "__main__":
    sys.exit(main())
