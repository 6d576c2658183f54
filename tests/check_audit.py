"""Plays every audit of the package, with every planted bug, and prints what was caught.

One line a check: sound code that is found sound, a false alarm, a planted bug that is caught, one that escapes. Fails if
one escapes, a false alarm is raised or a check is skipped. `--only WORD` plays those whose names hold the word.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
AUDITS = "statistical_tests/test_"
PLAYED = (
    *(
        f"{AUDITS}{name}.py"
        for name in (
            "audit_cases",
            "voting_audit",
            "pate_audit",
            "pate_law",
            "logit_audit",
            "gradient_audit",
            "training_audit",
            "training_sampler",
            "confident_noise",
            "sparse_audit",
            "retrieval_audit",
            "stream_audit",
            "example_audit",
        )
    ),
    "unit_tests/audit/test_counting.py",
    "unit_tests/audit/test_evaluated.py",
    "unit_tests/audit/test_documenting.py",
    "unit_tests/audit/test_joint_plans.py",
    "unit_tests/audit/test_retrieving.py",
    "unit_tests/evolution/test_evolution_privacy.py::test_the_worst_cases_are_sound",
    "unit_tests/evolution/test_evolution_privacy.py::test_a_planted_bug_is_caught_by_a_worst_case",
    "integration_tests/test_ray_cluster.py::test_one_process_has_the_law_and_64_texts_a_label_tell_wrong_noise_and_missing_records",
    "integration_tests/test_ray_cluster.py::test_many_texts_of_workers_have_the_law_of_one_process",
)
WORDS = {
    ("planted", True): "caught",
    ("planted", False): "ESCAPED",
    ("sound", True): "sound",
    ("sound", False): "FALSE ALARM",
}


# Tests that show what a check rejects plant nothing in the package, but are positive controls as well.
CONTROL = re.compile(r"plant|_(is|are|was)_(caught|rejected|found|seen)|_catches_|_would_see_|_tell_wrong_")


class Counts:
    """Says what every check found, as soon as it has, and counts."""

    def __init__(self) -> None:
        self.found: Counter[tuple[str, bool]] = Counter()
        self.bad: list[str] = []
        self.skipped = 0
        self.total = 0
        self.start = time.monotonic()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.total = max(self.total, len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self.total = max(self.total, len(ids))

    def pytest_collectreport(self, report: Any) -> None:
        if report.skipped:  # a whole file
            self._skip(report)

    def _skip(self, report: Any) -> None:
        self.skipped += 1
        self.bad.append(f"SKIPPED: {report.nodeid.split('/')[-1]}\n{report.longreprtext[-1500:]}")
        print(f"[skip] {report.nodeid.split('/')[-1]}", flush=True)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.skipped:  # nothing was played: neither caught nor sound
            self._skip(report)
            return
        if report.when != "call" and not report.failed:
            return
        name = report.nodeid.split("/")[-1].removeprefix("test_")
        kind = "planted" if CONTROL.search(name.split("[")[0]) else "sound"
        word = WORDS[kind, not report.failed]
        self.found[kind, not report.failed] += 1
        done = self.found.total()
        print(f"[{done:>{len(str(self.total))}}/{self.total}] {word:<12}{name}", flush=True)
        if report.failed:
            self.bad.append(f"{word}: {name}\n{report.longreprtext[-1500:]}")

    def table(self) -> str:
        caught, escaped = self.found["planted", True], self.found["planted", False]
        sound, alarms = self.found["sound", True], self.found["sound", False]
        lines = [
            *self.bad,
            "",
            f"planted bugs caught  {caught} of {caught + escaped}",
            f"false alarms         {alarms} of {sound + alarms} checks of the sound code (each at most 1e-6 by chance)",
            f"skipped              {self.skipped}",
            f"time                 {time.monotonic() - self.start:.0f} s",
        ]
        return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="play what holds this word")
    parser.add_argument("-n", type=int, default=0, help="processes")
    arguments = parser.parse_args()
    counts = Counts()
    files = [str(ROOT / "tests" / name) for name in PLAYED]
    chosen = ["-k", arguments.only] if arguments.only else []
    code = pytest.main(
        [
            *files,
            *chosen,
            "-p",
            "no:terminal",
            "-p",
            "no:cacheprovider",
            "-n",
            str(arguments.n),
            "-o",
            "addopts=",
        ],
        plugins=[counts],
    )
    print(counts.table())
    nothing = not counts.found["planted", True] or not counts.found["sound", True]
    return int(code) or int(bool(counts.bad)) or int(nothing and not arguments.only)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
