"""The benchmark of the embedded model: its arithmetic, and that each part measures what it says on small data."""

from __future__ import annotations

import json
import lzma
import math
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

pytestmark = pytest.mark.benches
SPORTS = ["The striker scored two goals in the match.", "She won the tennis final.", "The team lost its last game."]
MUSIC = ["The band recorded a new album.", "An orchestra played the symphony.", "She sang songs at the concert."]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return pytest.importorskip("bench_embedded")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    rows = [
        {"text": f"{text} It was day {place}.", "label_name": label, "split": "test" if place > 7 else "train"}
        for place in range(10)
        for label, texts in (("Sports", SPORTS), ("Music", MUSIC))
        for text in texts
    ]
    data = tmp_path / "small.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return data


def test_correlation_is_one_where_rows_agree_and_low_where_they_do_not(bench: ModuleType) -> None:
    agree = np.repeat([[0.0], [1.0], [1.0]], 4, axis=1)
    apart = np.tile([0.0, 1.0, 1.0, 0.0], (3, 1))
    assert bench.correlation(agree) == pytest.approx(1.0)
    assert bench.correlation(apart) == pytest.approx(-1 / 3)
    assert math.isnan(bench.correlation(np.ones((3, 4))))


def test_correlation_is_that_of_a_beta_mixture(bench: ModuleType) -> None:
    """10,000 questions of Beta(2, 2), whose rows correlate by 1 / 5; 0.03 is more than six standard deviations."""
    coins = np.random.Generator(np.random.PCG64(1))
    chance = coins.beta(2.0, 2.0, (10_000, 1))
    found = bench.correlation((coins.random((10_000, 8)) < chance).astype(float))
    assert found == pytest.approx(0.2, abs=0.03)


def test_parts_measure_small_data(bench: ModuleType, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = "labels,rows,leaks,near,writing"
    assert bench.main(["--data", str(small), "--questions", "12", "--seeds", "1", "--parts", parts]) == 0
    shown = capsys.readouterr().out
    right = {shots: float(share) for shots, share in re.findall(r"(\d) shots: right ([.\d]+)", shown)}
    assert right["0"] >= 0.8  # "sports" and "music" mean what stands near them
    assert right["4"] >= 0.8
    assert [float(share) for share in re.findall(r"repeat one: ([.\d]+)", shown)] == [1.0] * 3
    assert float(re.findall(r"same label: ([.\d]+)", shown)[0]) > 0.9
    assert {"zero-shot", "real records", "real, cut", "epsilon 1", "epsilon 4"} <= set(
        re.findall(r"small +(.*?) +[.\d]+ \(", shown)
    )


def test_public_tasks_ask_texts_that_are_not_shown(bench: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "made_up.txt.xz"
    with lzma.open(path, "wt", encoding="utf-8") as file:
        file.write("\n\n".join(f"top_up: question {label} {place}" for label in "a" for place in range(70)))
    task = bench.public_task(path, "made up", ["top up"])
    assert len(task.asked) == 40
    assert not {text for text, _ in task.asked} & set(task.shown["top up"])
