"""Runs the whole suite several times, each in another random order, while something else takes all processors.

    python tests/check_steady.py                     ten runs; prints failures by test, and a last line with the counts
    python tests/check_steady.py --runs 1 --seed 7   one run in a known order
    python tests/check_steady.py -- tests/unit_tests -k words     what follows "--" goes to pytest

Modules are put in random order, and tests inside their modules; the seed is printed. Ends with 1 if any test failed, or if
a run did not come to its end. The load is stress-ng's, one process of it for each processor.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Two workers for each processor: beside as many processes of load, the suite gets two thirds of the machine.
WHOLE = (
    "-n",
    str(2 * (os.cpu_count() or 1)),
    "--dist",
    "worksteal",
    "-m",
    "not planted and not audited and not benches",
)
TESTS_FAILED = 1  # pytest's exit codes: 0 all passed, 1 some failed; all others are no run
FIRST_LINE = 160


@dataclass(frozen=True)
class Run:
    """What came out of one run.

    Attributes:
      seed: of its order.
      code: pytest's exit code.
      tests: how many ran.
      failures: by test, the first line of what it said.
      seconds: of real time.
    """

    seed: int
    code: int
    tests: int
    failures: dict[str, str]
    seconds: float

    @property
    def is_whole(self) -> bool:
        """Whether tests ran to the end of the run."""
        return self.tests > 0 and self.code == (TESTS_FAILED if self.failures else 0)


@contextlib.contextmanager
def load(processors: int) -> Iterator[None]:
    """Keeps every processor busy.

    Raises:
      SystemExit: stress-ng is not installed, or does not run.
    """
    if shutil.which("stress-ng") is None:
        sys.exit("expected stress-ng on the path, found none. make steady installs it where it may.")
    busy = subprocess.Popen(["stress-ng", "--quiet", "--cpu", str(processors)], stdin=subprocess.DEVNULL)
    try:
        time.sleep(1)
        if busy.poll() is not None:
            sys.exit(f"expected stress-ng to run, it ended with {busy.returncode}")
        yield
    finally:
        busy.terminate()
        busy.wait()


def read(report: Path) -> tuple[int, dict[str, str]]:
    """Returns from a JUnit report how many tests ran, and by test what failed."""
    if not report.exists() or not report.stat().st_size:
        return 0, {}
    cases = list(ET.parse(report).iter("testcase"))  # noqa: S314  pytest wrote it
    failures = {}
    for case in cases:
        for fault in (*case.iter("failure"), *case.iter("error")):
            said = (fault.get("message") or fault.text or "").strip() or "nothing said"
            failures[f"{case.get('classname')}::{case.get('name')}"] = said.splitlines()[0][:FIRST_LINE]
    return len(cases), failures


def once(seed: int, arguments: Sequence[str]) -> Run:
    """Runs the suite in the order of a seed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "--no-header", f"--order-seed={seed}", f"--junit-xml={report}", *(arguments or WHOLE)]
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options], cwd=ROOT, capture_output=True, text=True, check=False
        )
        tests, failures = read(report)
    run = Run(seed, done.returncode, tests, failures, time.monotonic() - began)
    if not run.is_whole:
        print(done.stdout[-3000:], done.stderr[-3000:], sep="\n")
    return run


def told(runs: Sequence[Run]) -> str:
    """Returns failures by test, the most frequent first, and a last line with the counts."""
    counts = Counter(test for run in runs for test in run.failures)
    lines = []
    for test, count in counts.most_common():
        seeds = [run.seed for run in runs if test in run.failures]
        lines.append(f"{count} of {len(runs)}  {test}  (seeds {', '.join(map(str, seeds))})")
        lines += sorted({f"    {run.failures[test]}" for run in runs if test in run.failures})
    broken = [str(run.seed) for run in runs if not run.is_whole]
    if broken:
        lines.append(f"no whole run with the seeds {', '.join(broken)}")
    failed = sum(bool(run.failures) or not run.is_whole for run in runs)
    ran = sum(run.tests for run in runs)
    lines.append(f"{len(runs)} runs, {failed} failed; {ran} tests, {counts.total()} failures of {len(counts)} tests")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a test failed, or a run did not come to its end."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=10, help="how often (default 10)")
    parser.add_argument("--seed", type=int, help="of the first order; the next ones count up from it")
    parser.add_argument("pytest", nargs="*", help='behind "--": which tests to run, instead of all')
    given = parser.parse_args(arguments)
    if given.runs < 1:
        parser.error(f"--runs: expected at least 1, found {given.runs}")
    first = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    runs: list[Run] = []
    with load(os.cpu_count() or 1):
        for seed in range(first, first + given.runs):
            print(f"run {len(runs) + 1} of {given.runs}, order of seed {seed}", flush=True)
            runs.append(once(seed, given.pytest))
            print(f"    {runs[-1].tests} tests, {len(runs[-1].failures)} failed, {runs[-1].seconds:.0f} s", flush=True)
            for test, message in runs[-1].failures.items():
                print(f"    {test}: {message}", flush=True)
    print(told(runs))
    return int(any(run.failures or not run.is_whole for run in runs))


if __name__ == "__main__":
    sys.exit(main())
