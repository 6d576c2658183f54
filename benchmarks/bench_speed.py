"""Every goal about speed in one table: goal, our number, an anchor of the same run, their ratio, PASS or MISSED.

Each part is a module `_speed_NAME.py` with a function `goals`, and runs in a process of its own, one after the other,
at a size of ten minutes on two idle cores for all of them. A ratio of two numbers of one run says more than either:
other work on the machine slows both. Still, leave it alone meanwhile; the load at the start and the end is printed.

    make bench
    make bench ARGS="--parts voting api"
    make bench ARGS="--json FILE"
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _speed_goals import HEAD, Goal, rows_of, table_of

PARTS = {
    "voting": "whole answers of an engine that takes no time",
    "api": "answers and texts over an API that waits 50 ms",
    "local": "texts of a local model",
    "retrieval": "queries of many documents",
    "growth": "everything else that grows",
    "plans": "plans of every method",
}
"""Name of each part, and what it measures."""


def measured(part: str, options: dict[str, Any]) -> list[Goal]:
    """Runs one part here."""
    warnings.simplefilter("ignore")  # plans of made-up records rest on guesses
    found: list[Goal] = importlib.import_module(f"_speed_{part}").goals(**options)
    return found


def run(parts: Sequence[str], options: dict[str, dict[str, Any]] | None = None) -> tuple[list[Goal], dict[str, str]]:
    """Runs parts, each in a process of its own; returns their goals, and why each part without goals has none."""
    found: list[Goal] = []
    missing: dict[str, str] = {}
    for part in parts:
        begin = time.perf_counter()
        if find_spec(f"_speed_{part}") is None:
            missing[part] = "this version does not have it"
            continue
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            try:
                goals = process.submit(measured, part, (options or {}).get(part, {})).result()
            except ImportError as error:  # torch, say, is not in every environment
                missing[part] = f"{error.name} is not installed"
                continue
        print(f"{part}: {PARTS[part]}, {time.perf_counter() - begin:.0f} s", flush=True)
        for cells in rows_of(goals):
            print("  " + " | ".join(cells), flush=True)
        found += goals
    return found, missing


def main(arguments: list[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="which parts")
    parser.add_argument("--json", type=Path, default=Path("out/bench_speed.json"), help="where the numbers go")
    options = parser.parse_args(arguments)
    start = os.getloadavg()[0]
    goals, missing = run(options.parts)
    print(f"\n{table_of(goals)}")
    for part, why in missing.items():
        print(f"| {PARTS[part]} | - | - | - | - | NOT MEASURED: {why} |")
    missed = sum(goal.verdict == "MISSED" for goal in goals)
    load = f"load {start:.1f} at the start, {os.getloadavg()[0]:.1f} at the end, {os.cpu_count()} cores"
    print(f"\n{len(goals)} goals, {missed} missed, {len(missing)} parts not measured; {load}")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    rows = [{**asdict(goal), "verdict": goal.verdict} for goal in goals]
    options.json.write_text(json.dumps({"columns": HEAD, "goals": rows, "missing": missing}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
