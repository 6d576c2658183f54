"""The benchmark of retrieved votes reads its data, and prints one line for each voter it compares."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bench_retrieval


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [
        {"text": f"the {word} number {place}", "label_name": word, "split": "train" if place < 30 else "test"}
        for place in range(32)
        for word in ("card", "boat", "rare")[: 3 if place < 2 else 2]
    ]
    path = tmp_path / "data.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def test_rare_labels_are_dropped_from_both_parts(data: Path) -> None:
    task = bench_retrieval.load(data, size=1_000, queries=9, min_share=0.05)
    assert task.labels == ("boat", "card")
    assert (len(task.train), len(task.test)) == (60, 4)


@pytest.mark.benches
def test_it_compares_at_equal_epsilon(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--slots", "4", "--participations", "1", "3", "--threshold", "0.3", "--epsilon", "4"]
    bench_retrieval.main(["--data", str(data), *given])
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in shown[1:]] == ["| 4"] * 3 + ["| none"] * 2
    for line in shown[1:]:
        right, first, second = map(float, line.split(" | ")[2:5])
        assert right == pytest.approx((first + second) / 2)
