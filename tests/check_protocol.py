"""Searches the full scenes of the ledger's protocol, every plant, and random schedules of the real writer.

Prints a table and fails on a violation or a plant that was missed. With --small the scenes of the tests; with --only TEXT
the rows whose name has it; --seconds ends a scene that is not complete by then.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.check_faults import Progress  # noqa: E402
from tests.protocol.model import Model, Scene  # noqa: E402
from tests.protocol.scenes import FULL, PLANTS, SMALL  # noqa: E402


def _search(name: str, scene: Scene, plant: str, expected: str, seconds: float) -> bool:
    """Searches one scene and prints its row; returns whether it is as expected."""
    progress = Progress(name)
    try:
        found = Model(scene, plant).search(seconds=seconds, tick=progress.show)
    finally:
        progress.end()
    if expected:
        is_well = expected in found.fault
        verdict = "found" if is_well else "MISSED"
    else:
        is_well = not found.fault
        verdict = found.fault or ("sound" if found.is_complete else "sound so far, not complete")
    print(f"{found.states:>11,}  {found.reads:>5}  {found.seconds:>7.1f}  {verdict:6}  {name}", flush=True)
    if not is_well:
        print(*(f"{'':29}{step}" for step in found.trace), sep="\n", flush=True)
    return is_well


def main() -> int:
    """Returns 1 where something is not as expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=600.0)
    given = parser.parse_args()
    began, used = time.monotonic(), os.times()
    rows = [(name, scene, "", "") for name, scene in (SMALL if given.small else FULL).items()]
    rows += [(plant, scene, plant, fault) for plant, (scene, fault) in PLANTS.items()]
    chosen = [row for row in rows if given.only in row[0]]
    print(f"{'states':>11}  {'reads':>5}  {'seconds':>7}  verdict", flush=True)
    well = [_search(*row, given.seconds) for row in chosen]
    cpu = sum(os.times()[:2]) - sum(used[:2])
    print(f"{sum(well)} of {len(well)} as expected, {time.monotonic() - began:.0f} s, {cpu:.0f} s of processor time")
    return int(not well or not all(well))


if __name__ == "__main__":
    raise SystemExit(main())
