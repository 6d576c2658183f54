"""The benchmark of synthetic documents: what it counts, on a file small enough to know the answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bench_documents


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file of two classes, and a benchmark of one epsilon, two topics and short texts."""
    small = {"NUM_TOPICS": 2, "PER_TOPIC": 1, "MAX_TOKENS": 2, "EPSILONS": (8.0,), "NEIGHBOURS": 1}
    for name, value in small.items():
        monkeypatch.setattr(bench_documents, name, value)
    monkeypatch.setattr(bench_documents, "public_vocabulary", lambda size=3: ("card", "transfer", "boat")[:size])
    rows = [
        {"text": text, "label_name": label, "split": split}
        for split, number in (("train", 60), ("test", 10), ("dev", 1))
        for text, label in (("my card was declined", "card"), ("the transfer is late", "transfer"))
        for _ in range(number)
    ]
    path = tmp_path / "small.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.benches
def test_every_row_is_told(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    bench_documents.main(["--data", str(small), "--questions", "4", "--draws", "1", "--json", str(out)])
    told = json.loads(out.read_text())
    stores = {row["store"].split(",")[0]: row for row in told["small retrieval"]}
    assert stores["all 120 private documents (not private)"]["hits"] == [100.0]
    assert stores["all 120 private documents (not private)"]["near"] == [pytest.approx(100.0)]
    assert {"synthetic", "instruction only"} <= set(stores)
    ((epsilon, share, deviation),) = told["small topics gaussian"]
    assert (epsilon, share, deviation < 3.0) == (8.0, 1.0, True)
    assert "small: 120 private documents" in capsys.readouterr().out


def test_the_bank_needs_no_file() -> None:
    private, test = bench_documents.texts_in(bench_documents.BANK)
    assert (len(private), len(test)) == (6_000, 1_200)
    assert {label for _, label in private} == {label for _, label in test}


def test_a_judge_knows_the_class_of_the_nearest_text() -> None:
    test = [("my card", "card"), ("a late transfer", "transfer")] * 8
    judge = bench_documents.Judge(test, questions=4)
    assert judge.score(["card", "transfer"]) == (100.0, pytest.approx(judge.score(["card", "transfer"])[1]))
    assert judge.score(["card"], ["card"])[0] == 50.0
