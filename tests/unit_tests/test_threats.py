"""The catalogue of threats: no row without a test, no test that is not there, no gap that the docs keep quiet about."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.faults.catalogue import FAULTS
from tests.threats import THREATS, Threat

TESTS = Path(__file__).resolve().parents[1]
LIMITS = TESTS.parent / "docs" / "known-limitations.md"
ROWS = {"L": 15, "P": 10, "C": 7, "M": 14}


@cache
def names_in(file: str) -> frozenset[str]:
    """The tests of a file that pytest would run, or that a contract hands on: the file is read, not imported."""
    tree = ast.walk(ast.parse((TESTS / file).read_text(encoding="utf-8")))
    functions = (node for node in tree if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return frozenset(node.name for node in functions if node.name.startswith("test_"))


def missing(threat: Threat) -> list[str]:
    """The tests of a row that are not there."""
    gone = []
    for test in threat.tests:
        if test.startswith("faults: "):
            number = test.removeprefix("faults: ")
            if not any(number in fault.words.split() for fault in FAULTS):
                gone.append(test)
            continue
        file, _, name = test.partition("::")
        if not (TESTS / file).is_file() or (name and name not in names_in(file)):
            gone.append(test)
    return gone


def test_every_row_of_the_catalogue_is_there_once() -> None:
    wanted = [f"{letter}{number}" for letter, last in ROWS.items() for number in range(1, last + 1)]
    assert sorted(THREATS) == sorted([*wanted, "S1-S22"])
    assert all(threat.tests for threat in THREATS.values())


@pytest.mark.parametrize("row", THREATS)
def test_every_test_of_a_row_is_there(row: str) -> None:
    assert missing(THREATS[row]) == []
    assert len(set(THREATS[row].tests)) == len(THREATS[row].tests)


def test_a_test_that_was_renamed_or_taken_away_is_missed() -> None:
    gone = ("unit_tests/test_threats.py::test_of_nothing", "unit_tests/test_nothing.py", "faults: L99")
    assert missing(Threat("", (*gone, "unit_tests/test_threats.py"))) == list(gone)


@pytest.mark.parametrize("row", [row for row, threat in THREATS.items() if threat.limit])
def test_what_stays_open_is_told(row: str) -> None:
    assert THREATS[row].limit in " ".join(LIMITS.read_text(encoding="utf-8").split())
