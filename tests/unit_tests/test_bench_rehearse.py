"""The benchmark of rehearsals: what it draws, what it counts, and that it tells a planner that is wrong."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from langchain_dpicl.planning.expected_utility import RowDesign
from langchain_dpicl.runs.query_plan import plan_queries

WORDS = {"Sports": ("goal", "match", "team"), "Music": ("album", "song", "band")}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return pytest.importorskip("bench_rehearse")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [
        {
            "text": f"The {words[place % 3]} of day {place} was long.",
            "label_name": label,
            "split": "test" if place % 10 == 0 else "train",
        }
        for place in range(200)
        for label, words in WORDS.items()
    ]
    with gzip.open(tmp_path / "small.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def task_of(bench: ModuleType, folder: Path) -> Any:
    return bench.Task.read(folder, "small", seed=0, examples=20, questions=12)


def test_public_private_and_asked_are_disjoint(bench: ModuleType, folder: Path) -> None:
    task = task_of(bench, folder)
    parts = [{record["text"] for record in part} for part in (task.public, task.private, task.asked)]
    assert not parts[0] & parts[1]
    assert not (parts[0] | parts[1]) & parts[2]
    assert (len(task.public), len(task.asked), task.labels) == (20, 12, ("music", "sports"))
    assert task.public_size == 340 == len(task.private)


def test_rows_are_drawn_as_the_sampler_draws_them(bench: ModuleType, folder: Path) -> None:
    """Slots of 340 units at rate .2, four of each kept: 68 units expected, 13.6 a slot; every slot is full."""
    task = task_of(bench, folder)
    plan = plan_queries(
        340,
        epsilon=1.0,
        delta=1e-5,
        max_queries=5,
        width=2,
        design=RowDesign.choose(num_slots=5, shots_per_slot=4, overfill=3.4),
    )
    rows = task.drawn(plan.release, 0)
    assert len(rows) == 12
    assert {len(own) for own in rows} == {5}
    assert all(len(row) <= 4 for own in rows for row in own)
    assert np.mean([len(row) for own in rows for row in own]) > 3.9
    one = [record["text"] for row in rows[0] for record in row]
    assert len(one) == len(set(one))


def test_the_right_label_stands_first(bench: ModuleType, folder: Path) -> None:
    task = task_of(bench, folder)
    shown = [[task.private[:8]] for _ in task.asked]
    votes = task.votes(shown, calibrated=False)
    assert votes.shape == (12, 2)
    assert set(votes.sum(axis=1)) == {1.0}
    assert votes[:, 0].mean() > 0.6  # words that only one label has


def test_a_goal_that_is_missed_is_told(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    bench.judge("what", 4.0, 3.0)
    bench.judge_least("which", 4.0, 5.0)
    bench.judge("other", 2.0, 3.0)
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said] == ["MISSED", "MISSED", "PASS"]


def test_wrong_decisions_are_counted(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Four cells: spent for nothing, spent well, a gain missed, nothing to gain."""
    cells = [
        {"low": 0.4, "high": 0.6, "said": 0.5, "seen": seen, "free": 0.5, "best_free": 0.5, "spends": spends}
        for seen, spends in ((0.5, True), (0.6, True), (0.6, False), (0.5, False))
    ]
    bench.verdicts(cells)
    said = capsys.readouterr().out
    assert "spends for less than 1 point, % of cells: 25.0" in said
    assert "gains of more than 5 points missed, % of cells: 25.0" in said
    assert "% of these 2: 50.0" in said


@pytest.mark.benches
def test_every_part_prints_its_cells_and_goals(
    bench: ModuleType, folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = ["--data", str(folder), "--sets", "small", "--seeds", "1", "--questions", "12", "--examples", "20"]
    assert bench.main([*given, "--json", str(tmp_path / "out.json")]) == 0
    said = capsys.readouterr().out
    for words in ("Defaults", "After a rehearsal", "PromptPATE", "intervals that hold", "spends in"):
        assert words in said
    found = json.loads((tmp_path / "out.json").read_text())
    assert {part: len(cells) for part, cells in found.items()} == {"defaults": 2, "rehearsed": 4, "labels": 2}
    assert all(0.0 <= cell["seen"] <= 1.0 for cell in found["rehearsed"])


def test_without_data_it_says_so(bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--data", str(tmp_path)]) == 0
    assert "nothing to measure" in capsys.readouterr().out
