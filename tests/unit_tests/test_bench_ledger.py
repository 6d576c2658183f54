"""The ledger benchmark's own arithmetic, and that what it measures is the ledger."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bench_ledger

from langchain_dpicl.stores import SQLiteStore


def test_a_row_counts_pairs_of_all_processes_and_waits_of_single_calls() -> None:
    times = [0.001] * 98 + [0.010, 0.100]
    row = bench_ledger._row("x", 8, times, 3, seconds=5.0)
    assert (row.pairs, row.refused) == (10.0, 3)
    assert (row.p50, row.longest) == pytest.approx((1.0, 100.0))
    assert 1.0 < row.p99 <= 100.0
    assert bench_ledger.line(row).split()[:4] == ["x", "8", "10", "1.00"]


def test_a_row_without_a_call_says_so() -> None:
    row = bench_ledger._row("x", 1, [], 1, seconds=5.0)
    assert row.pairs == 0.0
    assert math.isnan(row.p50)


def test_what_is_counted_stands_in_the_ledger(tmp_path: Path) -> None:
    row = bench_ledger.on_disk(tmp_path, 2, seconds=0.2)
    with SQLiteStore(tmp_path / "budget2.db") as store:
        kinds = [line.kind for line in store.records()]
    assert row.refused == 0
    assert kinds.count("reserve") == kinds.count("commit") == round(row.pairs * 0.2)


def test_the_disk_is_asked_for_its_word(tmp_path: Path) -> None:
    p50, p99 = bench_ledger.sync_ms(tmp_path, times=3)
    assert 0.0 < p50 <= p99
