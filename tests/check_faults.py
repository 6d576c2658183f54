"""Runs every fault of tests/faults in full, prints a table of counts, and fails on a violation.

With --few as many trials as a test makes; with --only TEXT the faults whose name has it, as in `--only L2`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.faults.catalogue import FAULTS, Fault  # noqa: E402
from tests.faults.counts import Count  # noqa: E402
from tests.ledgers import use_simple_prices  # noqa: E402

SHOWN = 5
"""Violations of one fault that are printed."""


class Progress:
    """One line that follows the work, where somebody looks."""

    def __init__(self, words: str, total: int | None = None) -> None:
        self._words, self._done, self._last = words, 0, 0.0
        self._of = "" if total is None else f" of about {total:,}"

    def tick(self) -> None:
        self.show(self._done + 1)

    def show(self, done: int) -> None:
        self._done = done
        if sys.stderr.isatty() and time.monotonic() - self._last > 0.2:
            self._last = time.monotonic()
            print(f"\r{self._words}: {done:,}{self._of}\x1b[K", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def run(fault: Fault, *, is_full: bool) -> tuple[Count, float]:
    """Runs one fault in a folder of its own; returns its counts and seconds."""
    trials = fault.many if is_full else fault.few
    progress = Progress(fault.words, trials)
    folder = Path(tempfile.mkdtemp(prefix="dpicl-faults-"))
    began = time.monotonic()
    try:
        found = fault.count(folder, trials=trials, is_full=is_full, tick=progress.tick)
    finally:
        progress.end()
        shutil.rmtree(folder, ignore_errors=True)
    return found, time.monotonic() - began


def main() -> int:
    """Returns 1 on a violation, or where nothing ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--few", action="store_true")
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    if not hasattr(os, "fork"):
        raise SystemExit("faults: expected a system with fork, found none.")
    use_simple_prices(pytest.MonkeyPatch())  # what a ticket costs decides nothing here
    chosen = [fault for fault in FAULTS if given.only in fault.words and (fault.few or not given.few)]
    width = max((len(fault.words) for fault in chosen), default=0)
    print(f"{'fault':{width}}  {'trials':>7}  {'violations':>10}  {'seconds':>7}  seen", flush=True)
    trials = violations = 0
    for fault in chosen:
        try:
            found, seconds = run(fault, is_full=not given.few)
        except pytest.skip.Exception as reason:
            print(f"{fault.words:{width}}  skipped: {reason}", flush=True)
            continue
        trials += found.trials
        violations += len(found.violations)
        seen = ", ".join(f"{number:,} {what}" for what, number in sorted(found.seen.items()))
        numbers = f"{found.trials:>7,}  {len(found.violations):>10,}  {seconds:>7.1f}"
        print(f"{fault.words:{width}}  {numbers}  {seen}", flush=True)
        print(*(f"  {words}" for words in found.violations[:SHOWN]), sep="\n", end="\n" if found.violations else "")
    print(f"{trials:,} trials, {violations:,} violations")
    return int(violations > 0 or not trials)


if __name__ == "__main__":
    raise SystemExit(main())
