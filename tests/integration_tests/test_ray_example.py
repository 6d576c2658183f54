"""`examples/ray_workers.py` writes with worker processes of a real cluster, and finds what stands when it is run again."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from langchain_dpicl.stores import SQLiteStore
from tests.example_files import EXAMPLES

pytestmark = [
    pytest.mark.timeout(1800),  # a cluster starts some ten processes, each of which imports all
    pytest.mark.loopback,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (extra `ray`)"),
]


def run(folder: Path) -> str:
    """Returns what the program says, run as its first lines tell."""
    command = [sys.executable, "ray_workers.py", "--workers", "2", "--folder", str(folder)]
    done = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def lines(folder: Path) -> int:
    """Returns how many lines the ledger has."""
    with contextlib.closing(SQLiteStore(folder / "budget.db")) as store:
        return store.head()[0]


def test_workers_write_with_one_budget_and_a_second_run_finds_what_stands(tmp_path: Path) -> None:
    said = run(tmp_path)
    assert said.count("[card payment]") == said.count("[top up]") == 2
    assert "left in the ledger: epsilon 2\n" in said
    assert "paid once: epsilon 1.99" in said
    assert "recomputed: True" in said
    paid = lines(tmp_path)
    assert paid >= 2 * 8  # reserved and committed, text by text
    assert run(tmp_path) == said
    assert lines(tmp_path) == paid
