"""The workers' benchmark: its own arithmetic, and a model that makes one wait once for all rows of a call."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bench_ray
from bench_ray import RECORD, Row, engine, shown


def test_efficiency_is_against_one_worker_of_the_same_plan() -> None:
    rows = [Row(0, 8, 2.0, 1.0), Row(1, 8, 2.0, 5.0), Row(4, 8, 6.0, 9.0), Row(2, 1, 1.0, 9.0)]
    cells = [line.split() for line in shown(rows).splitlines()[1:]]
    assert cells[0] == ["here", "8", "2.00", "1.0"]
    assert cells[2] == ["4", "8", "6.00", "75", "%", "9.0"]
    assert cells[3] == ["2", "1", "1.00", "9.0"]  # nothing to compare with


def test_rows_of_one_call_wait_together(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(bench_ray.time, "sleep", waits.append)
    made = engine(call_ms=50.0)
    for prefix in ([], [b" paid"]):
        made.top_tokens("in public", prefix, top_k=4)
        made.open([f"{RECORD} {place}" for place in range(7)], prefix).score([b" late"])
    assert waits == [0.05] * 4
