"""Runs the programs that show how components are used; type checkers read the same files."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).resolve().parents[1] / "programs"
ONLY_TYPED = {"all_components", "soft_prompt", "typos"}
"""They need a trained model, or are wrong on purpose: type checkers alone read them."""
NAMES = sorted(path.stem for path in PROGRAMS.glob("*.py") if path.stem not in {"__init__", "common", *ONLY_TYPED})


@pytest.mark.parametrize("name", NAMES)
def test_a_program_runs_and_prints(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    sys.modules.pop(f"tests.programs.{name}", None)
    runpy.run_module(f"tests.programs.{name}", run_name="__main__")
    assert capsys.readouterr().out.strip()


def test_there_are_as_many_as_the_components() -> None:
    assert len(NAMES) + len(ONLY_TYPED) >= 12
