"""Searches the full scenes of the ledger's protocol, every plant, and random schedules of the real writer.

Prints a table and fails on a violation or a plant that was missed. With --small the scenes of the tests, and as many
schedules; with --only TEXT the rows whose name has it; --seconds ends a scene that is not complete by then.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.check_faults import Progress  # noqa: E402
from tests.faults.counts import Violation  # noqa: E402
from tests.ledgers import use_simple_prices  # noqa: E402
from tests.protocol import schedules  # noqa: E402
from tests.protocol.model import Model, Scene  # noqa: E402
from tests.protocol.scenes import FULL, PLANTS, SMALL  # noqa: E402

_PART = 250
"""Schedules that a process runs before it says what it found."""


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


def _prepare() -> None:
    use_simple_prices(pytest.MonkeyPatch())  # what a ticket costs decides nothing here
    if hasattr(os, "sched_setaffinity"):  # Linux; the threads of a schedule take turns, fastest on one processor
        usable = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {usable[os.getpid() % len(usable)]})


def _some_schedules(first: int) -> tuple[int, int, list[str]]:
    """Runs some schedules; returns lines, tickets burnt and violations."""
    lines, burnt, violations = 0, 0, []
    for seed in range(first, first + _PART):
        try:
            found = schedules.run(seed)
            lines, burnt = lines + found[0], burnt + found[1]
        except Violation as violation:
            violations.append(str(violation))
    return lines, burnt, violations


def _schedule(count: int) -> bool:
    """Runs random schedules on every processor, prints a row, and returns whether all were sound."""
    name, began = "random schedules of the real writer", time.perf_counter()
    lines, burnt, violations = 0, 0, []
    progress = Progress(name, count)
    with multiprocessing.get_context("spawn").Pool(initializer=_prepare) as pool:
        for part, found in enumerate(pool.imap_unordered(_some_schedules, range(0, count, _PART)), 1):
            lines, burnt, violations = lines + found[0], burnt + found[1], violations + found[2]
            progress.show(part * _PART)
    progress.end()
    verdict = f"{len(violations)} violations" if violations else "sound"
    spent = time.perf_counter() - began
    print(f"{lines:>11,}  {burnt:>5,}  {spent:>7.1f}  {verdict:6}  {count:,} {name} (lines, burnt tickets)", flush=True)
    print(*(f"{'':29}{words}" for words in violations[:10]), sep="\n", end="\n" if violations else "", flush=True)
    return not violations


def main() -> int:
    """Returns 1 where something is not as expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--schedules", type=int, default=50_000)
    given = parser.parse_args()
    began = time.monotonic()
    rows = [(name, scene, "", "") for name, scene in (SMALL if given.small else FULL).items()]
    rows += [(plant, scene, plant, fault) for plant, (scene, fault) in PLANTS.items()]
    chosen = [row for row in rows if given.only in row[0]]
    print(f"{'states':>11}  {'reads':>5}  {'seconds':>7}  verdict", flush=True)
    well = [_search(*row, given.seconds) for row in chosen]
    if given.only in "random schedules":
        well.append(_schedule(_PART if given.small else given.schedules))
    cpu = sum(os.times()[:4])
    print(f"{sum(well)} of {len(well)} as expected, {time.monotonic() - began:.0f} s, {cpu:.0f} s of processor time")
    return int(not well or not all(well))


if __name__ == "__main__":
    raise SystemExit(main())
