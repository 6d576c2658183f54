"""Which test runs which lines of the vault, and how long it takes."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import coverage
import pytest

ROOT = Path(__file__).resolve().parents[2]

TESTS = (
    "tests/unit_tests/privacy",
    "tests/unit_tests/stores",
    "tests/unit_tests/backends/test_async_ledger.py",
    "tests/unit_tests/budget/test_budget_in_practice.py",
    "tests/statistical_tests/test_sampling_rates.py",
)
"""The tests that may kill: none of them reads source text, and none is a test of tests (`planted`)."""


@dataclass(frozen=True)
class Covering:
    """What a run of all tests has shown."""

    seconds: dict[str, float]
    lines: dict[str, dict[int, list[str]]]

    def of(self, lines: Mapping[str, Iterable[int]]) -> list[str]:
        """Returns the tests that run one of the lines: the quickest case of each test, then the next case of each."""
        found = {
            test for file, numbers in lines.items() for n in numbers for test in self.lines.get(file, {}).get(n, ())
        }
        cases: dict[str, int] = {}
        ranked = []
        for test in sorted(found, key=lambda test: (self.seconds[test], test)):
            name = test.partition("[")[0]
            cases[name] = cases.get(name, 0) + 1
            ranked.append((cases[name], self.seconds[test], test))
        return [test for _, _, test in sorted(ranked)]

    def of_file(self, file: str) -> list[str]:
        """Returns the tests that run anything of a file."""
        return self.of({file: self.lines.get(file, {})})

    def using(self, name: str) -> dict[str, list[int]]:
        """Returns the lines that have a name in them, by file."""
        word = re.compile(rf"\b{re.escape(name)}\b")
        return {file: [n for n, line in enumerate(_text(file), 1) if word.search(line)] for file in self.lines}


@cache
def _text(file: str) -> list[str]:
    return (ROOT / file).read_text(encoding="utf-8").splitlines()


def stamp(files: Iterable[str]) -> str:
    """Returns a name for the state of the sources and tests."""
    digest = hashlib.sha256()
    for file in sorted({*files, *(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py"))}):
        digest.update(f"{file}\0{(ROOT / file).read_text(encoding='utf-8')}\0".encode())
    return digest.hexdigest()[:16]


class Watch:
    """A pytest plugin that notes what each test runs."""

    def __init__(self, files: Iterable[str]) -> None:
        self.files = sorted(files)
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []
        self.lines: dict[str, dict[int, list[str]]] = {}
        self._coverage = coverage.Coverage(
            data_file=None, config_file=False, include=[str(ROOT / f) for f in self.files]
        )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Iterator[None]:
        self._coverage.start()
        try:
            return (yield)
        finally:
            self._coverage.stop()
            data = self._coverage.get_data()
            for file in self.files:
                found = data.contexts_by_lineno(str(ROOT / file))
                self.lines[file] = {line: sorted(filter(None, tests)) for line, tests in found.items()}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        self._coverage.switch_context(item.nodeid)
        began = time.process_time()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = time.process_time() - began
            self._coverage.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def to_covering(self) -> Covering:
        """Returns what was noted, without the tests that failed: they would fail with every change."""
        failed = set(self.failed)
        lines = {
            file: {line: [test for test in tests if test not in failed] for line, tests in found.items()}
            for file, found in self.lines.items()
        }
        return Covering({test: seconds for test, seconds in self.seconds.items() if test not in failed}, lines)


def save(path: Path, covering: Covering, of: str) -> None:
    """Writes what was found, in few bytes."""
    names = list(covering.seconds)
    number = {name: place for place, name in enumerate(names)}
    lines = {
        file: {line: [number[test] for test in tests] for line, tests in found.items()}
        for file, found in covering.lines.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"of": of, "seconds": covering.seconds, "lines": lines}))


def load(path: Path, of: str | None = None) -> Covering | None:
    """Returns what was found earlier, None where nothing was or the sources have changed."""
    if not path.is_file():
        return None
    text = json.loads(path.read_text())
    if of is not None and text["of"] != of:
        return None
    names = list(text["seconds"])
    lines = {
        file: {int(line): [names[test] for test in tests] for line, tests in found.items()}
        for file, found in text["lines"].items()
    }
    return Covering(text["seconds"], lines)
