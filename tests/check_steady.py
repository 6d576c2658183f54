"""Runs the whole suite several times, each in another random order, while something else takes all processors.

    python tests/check_steady.py                     ten runs; prints failures by test, and a last line with the counts
    python tests/check_steady.py --runs 1 --seed 7   one run in a known order
    python tests/check_steady.py -- tests/unit_tests -k words     what follows "--" goes to pytest

Modules are put in random order, and tests inside their modules; the seed is printed. Ends with 1 if any test failed, or if
a run did not come to its end. The load is stress-ng's, one process of it for each processor.

Each run is a line of out/steady.jsonl when it has ended. Ten runs may take several starts: a later one counts the lines of
the same files and the same tests, and adds the runs that are missing. Remove the file to begin anew.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOG = ROOT / "out/steady.jsonl"
# Three workers for each processor: beside one process of load, the suite gets three quarters of the machine at most.
WHOLE = (
    "-n",
    str(3 * (os.cpu_count() or 1)),
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
      processor: seconds of processor time.
    """

    seed: int
    code: int
    tests: int
    failures: dict[str, str]
    seconds: float
    processor: float = 0.0

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
        began, used = time.monotonic(), _processor_seconds()
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options], cwd=ROOT, capture_output=True, text=True, check=False
        )
        tests, failures = read(report)
    run = Run(seed, done.returncode, tests, failures, time.monotonic() - began, _processor_seconds() - used)
    if not run.is_whole:
        print(done.stdout[-3000:], done.stderr[-3000:], sep="\n")
    return run


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def state_of_files() -> str:
    """Returns the commit, and a digest of what differs from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    changes = git("diff", "HEAD") + git("status", "--porcelain")
    digest = hashlib.sha256(changes.encode()).hexdigest()[:12]
    return git("rev-parse", "HEAD").strip() + (f"+{digest}" if changes else "")


def earlier(log: Path, state: str, arguments: Sequence[str]) -> list[Run]:
    """Returns the runs of the same tests on the same files; a line that was cut off is none."""
    runs = []
    for line in log.read_text().splitlines() if log.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            entry = json.loads(line)
            if (entry["state"], entry["arguments"]) == (state, list(arguments)):
                runs.append(Run(**entry["run"]))
    return runs


def note(log: Path, state: str, arguments: Sequence[str], run: Run) -> None:
    """Appends the line of a run."""
    log.parent.mkdir(parents=True, exist_ok=True)
    ended = datetime.now(UTC).isoformat(timespec="seconds")
    entry = {"ended": ended, "state": state, "arguments": list(arguments), "run": dataclasses.asdict(run)}
    with log.open("a") as file:
        file.write("\n" * _is_cut_off(log) + json.dumps(entry) + "\n")


def _is_cut_off(log: Path) -> bool:
    text = log.read_bytes()
    return bool(text) and not text.endswith(b"\n")


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
    parser.add_argument(
        "--runs", type=int, default=10, help="how often, with the runs that stand in the log (default 10)"
    )
    parser.add_argument("--seed", type=int, help="of the first order; the next ones count up from it")
    parser.add_argument("pytest", nargs="*", help='behind "--": which tests to run, instead of all')
    given = parser.parse_args(arguments)
    if given.runs < 1:
        parser.error(f"--runs: expected at least 1, found {given.runs}")
    state = state_of_files()
    runs = earlier(LOG, state, given.pytest)
    if runs:
        print(f"{len(runs)} runs stand in {LOG.relative_to(ROOT)} for {state[:20]}")
    first = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    done = {run.seed for run in runs}
    seeds = (seed for seed in itertools.count(first) if seed not in done)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the load too
    with load(os.cpu_count() or 1):
        for seed in itertools.islice(seeds, max(0, given.runs - len(runs))):
            print(f"run {len(runs) + 1} of {given.runs}, order of seed {seed}", flush=True)
            runs.append(once(seed, given.pytest))
            note(LOG, state, given.pytest, runs[-1])
            times = f"{runs[-1].seconds:.0f} s, {runs[-1].processor:.0f} s of processor time"
            print(f"    {runs[-1].tests} tests, {len(runs[-1].failures)} failed, {times}", flush=True)
            for test, message in runs[-1].failures.items():
                print(f"    {test}: {message}", flush=True)
    print(told(runs))
    return int(any(run.failures or not run.is_whole for run in runs))


if __name__ == "__main__":
    sys.exit(main())
