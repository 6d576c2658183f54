"""The benchmark of data that grows: its table follows from what can touch one window, and its goals are judged."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bench_growing

    yield bench_growing
    sys.modules.pop("bench_growing")


def test_a_standing_share_needs_the_least_noise_where_people_come_again(bench: ModuleType) -> None:
    runs, apart, dated, standing, life = bench.noises(90, 7)
    assert runs == 17
    assert standing <= 5.0 < life < dated < apart
    assert bench.noises(90, 7, window=1)[1] == bench.noises(90, 7, window=1)[3]  # windows of a block are purses


def test_a_missed_goal_ends_with_1(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "reservation_times", lambda count: (10.0, 12.0, 5.0))
    assert bench.main(["--reservations", "100"]) == 0
    monkeypatch.setattr(bench, "reservation_times", lambda count: (10.0, 30.0, 5.0))
    assert bench.main([]) == 1
    assert "MISSED  later reservations" in capsys.readouterr().out


def test_reservations_are_timed(bench: ModuleType) -> None:
    assert min(bench.reservation_times(100)) > 0
