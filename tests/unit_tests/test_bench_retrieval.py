"""The benchmark of retrieved votes prints one line for each voter it compares."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.benches
def test_it_compares_at_equal_epsilon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bench_retrieval

    rows = [
        {"text": f"the {word} number {place}", "label_name": word, "split": "train" if place < 30 else "test"}
        for place in range(32)
        for word in ("card", "boat", "rare")[: 3 if place < 2 else 2]
    ]
    data = tmp_path / "data.jsonl.gz"
    with gzip.open(data, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    task = bench_retrieval.load(data, size=1_000, queries=9, min_share=0.05)
    assert task.labels == ("boat", "card")
    assert len(task.test) == 4
    given = ["--slots", "4", "--participations", "1", "3", "--threshold", "0.3", "--epsilon", "4"]
    bench_retrieval.main(["--data", str(data), *given])
    sys.modules.pop("bench_retrieval")
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in shown[1:]] == ["| 4"] * 3 + ["| none"] * 2
    for line in shown[1:]:
        right, first, second = map(float, line.split(" | ")[2:5])
        assert right == pytest.approx((first + second) / 2)
