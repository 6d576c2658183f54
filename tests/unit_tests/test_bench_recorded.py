"""The benchmark of recorded votes: its file, its arithmetic, and that its goal can be missed."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import special

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bench_recorded as bench
from bench_recorded import Cell, Task

from langchain_dpicl.planning.expected_utility import noise_scale
from langchain_dpicl.planning.row_law import RowFacts
from langchain_dpicl.runs.query_plan import QueryPlan

RIGHT, CORRELATION, RIVAL, LABELS = 0.65, 0.55, 0.6, 5
# Noise is given: calibrating it takes longer than all else.
GIVEN: dict[str, Any] = {"public_size": 8_000, "max_queries": 100, "delta": 1e-5, "epsilon": None}


def made_up_words(questions: int, seed: int = 1) -> str:
    """Six votes on each of many questions: Beta chances of the right label, Dirichlet shares of the others."""
    coins = np.random.Generator(np.random.PCG64(seed))
    strength = (1 - CORRELATION) / CORRELATION
    right = coins.beta(RIGHT * strength, (1 - RIGHT) * strength, questions)
    # Two wrong rows agree with chance (alpha + 1) / ((LABELS - 1) alpha + 1), which is RIVAL.
    alpha = (1 - RIVAL) / (RIVAL * (LABELS - 1) - 1)
    others = coins.dirichlet(np.full(LABELS - 1, alpha), questions)
    words = []
    for chance, spread in zip(right, others, strict=True):
        votes = coins.choice(LABELS, size=bench.PROMPTS, p=[chance, *((1 - chance) * spread)])
        words.append("".join("abcde"[vote] for vote in votes))
    return " ".join(words)


def written(path: Path, questions: int = 800) -> Path:
    path.write_text(json.dumps({"source": "made up", "moves": {"labels": LABELS, "votes": made_up_words(questions)}}))
    return path


def plans(labels: int, noise: float = 1.2) -> list[tuple[bench.Design, QueryPlan]]:
    chosen = [one for one in bench.DESIGNS if one.name.startswith(("6 x 8", "20 x 4", "40 unit"))]
    return [(one, one.plan(labels, noise_multiplier=noise, **GIVEN)) for one in chosen]


def cells(task: Task) -> list[Cell]:
    return [bench.cell(task, design, plan, epsilon=1.0, splits=6) for design, plan in plans(task.labels)]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return bench.read_votes(written(tmp_path_factory.mktemp("votes") / "votes.json"))[0]


def test_made_up_votes_come_out_as_predicted_and_independent_rows_do_not(task: Task) -> None:
    found = cells(task)
    assert [each.is_recorded for each in found] == [True, False, False]
    # Errors of halves of 400 questions are about 2 points, and the bootstrap of six rows leaves 2 more.
    assert max(abs(each.bias) for each in found) < 4.5
    reached = bench.verdict(found)
    assert reached.is_met
    assert reached.independent_largest > 20
    assert reached.independent_mean > 3 * reached.mean
    assert reached.lines().startswith("PASS: ")


def test_a_correlation_forced_to_zero_misses_the_goal(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    true = bench.estimate_facts
    monkeypatch.setattr(bench, "estimate_facts", lambda *a, **kw: dataclasses.replace(true(*a, **kw), correlation=0.0))
    reached = bench.verdict(cells(task))
    assert not reached.is_met
    assert reached.lines().startswith("MISSED: ")


def test_chances_of_the_right_label_are_known_ones() -> None:
    sums = np.array([[5.0, 3.0], [2.0, 2.0]])
    (_, gumbel), (_, gaussian), _ = plans(2)
    scale = noise_scale(gumbel.release)
    assert bench.right_chances(gumbel.release, sums) == pytest.approx([1 / (1 + math.exp(-2 / scale)), 0.5])
    expected = special.ndtr(2 / (math.sqrt(2) * noise_scale(gaussian.release)))
    assert bench.right_chances(gaussian.release, sums) == pytest.approx([expected, 0.5])


@pytest.mark.benches
def test_real_noise_agrees_with_exact_chances_and_not_with_those_of_other_noise(task: Task) -> None:
    """6,400 questions tell 0.7 times the noise apart by about 12 standard errors; 5.7 are a false alarm of 2e-8."""
    task = dataclasses.replace(task, votes=np.tile(task.votes, (8, 1)))
    for design, plan in (plans(task.labels, noise=2.5)[0], plans(task.labels, noise=5.0)[1]):
        rng = np.random.Generator(np.random.PCG64(1))
        sums = bench.replayed(task, plan, is_recorded=design.is_recorded, rng=rng)
        hits = bench.real_hits(task, design, plan, rng=rng)
        for factor in (0.7, 1.0):
            other = plan.release.with_noise(plan.release.mechanism.noise_multiplier * factor)
            difference = hits - bench.right_chances(other, sums).mean(axis=1)
            error = difference.std(ddof=1) / math.sqrt(difference.size)
            assert bool(abs(difference.mean()) < 5.7 * error) is (factor == 1.0)


def test_files_are_read_as_the_module_says(tmp_path: Path) -> None:
    found = {
        "source": "made up",
        "closed": {"labels": 18, "votes": "aaabc-ba bbbbbbbb"},
        "open": {"labels": 300, "votes": "aaabcd a-----"},
    }
    path = tmp_path / "votes.json"
    path.write_text(json.dumps(found))
    closed, open_ = bench.read_votes(path)
    assert (closed.labels, open_.labels) == (18, 4)
    assert closed.votes.tolist() == [[0, 0, 0, 1, 2, -1], [1] * 6]
    assert closed.rows().sum(axis=1)[0, :4].tolist() == [3.0, 1.0, 1.0, 0.0]  # no answer is no vote
    path.write_text(json.dumps({"short": {"labels": 3, "votes": "aab"}}))
    with pytest.raises(ValueError, match="short: expected words of at least 6 letters"):
        bench.read_votes(path)


def test_without_a_file_nothing_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--data", str(tmp_path / "none.json")]) == 0
    assert "nothing to replay" in capsys.readouterr().out


def test_votes_of_a_real_model_come_out_as_predicted(shared_dir: Path) -> None:
    path = shared_dir / "data" / "recorded_votes.json"
    if not path.is_file():
        pytest.skip("no recorded votes beside this checkout")
    for task in bench.read_votes(path):
        facts: RowFacts = task.facts()
        assert 0.55 < facts.right < 0.85
        assert 0.45 < facts.correlation < 0.7
        reached = bench.verdict(cells(task))
        assert reached.is_met
        assert reached.independent_mean > 2 * reached.mean


@pytest.mark.benches
def test_every_table_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "PUBLISHED", {"AGNews": bench.PUBLISHED["AGNews"]})
    out = tmp_path / "out" / "numbers.json"
    small = ["--public-size", "1000", "--max-queries", "100", "--splits", "2"]
    ended = bench.main(["--data", str(written(tmp_path / "votes.json", 300)), "--json", str(out), *small])
    numbers, shown = json.loads(out.read_text()), capsys.readouterr().out
    assert len(numbers["cells"]) == len(bench.DESIGNS) * len(bench.EPSILONS)
    assert ended == (0 if numbers["verdict"]["is_met"] and numbers["real_noise_agrees"] else 1)
    assert {"right", "correlation", "rival", "ceiling"} <= set(numbers["moves"])
    assert "## moves: 300 questions, 5 labels" in shown
    assert all(design.name in shown for design in bench.DESIGNS)
    assert ("PASS: mean |error|" in shown) is numbers["verdict"]["is_met"]
    assert set(numbers["in_silico"]["AGNews"]["off"]) == {"3.0", "8.0"}
    assert shown.count("within 1 point") == 7


@pytest.mark.benches
def test_a_curve_of_alike_rows_is_fitted() -> None:
    labels, paper = bench.PUBLISHED["AGNews"]
    found = bench.fit_published(labels, paper, public_size=8_000, max_queries=10_000, delta=1e-5)
    off = np.abs(np.subtract(found["fitted"], found["paper"]))
    assert off.max() < 1.5
    assert np.abs(np.subtract(found["independent"], found["paper"])).max() > 10


@pytest.mark.benches
def test_columns_that_are_predicted_are_not_seen_by_the_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    labels, paper = bench.PUBLISHED["AGNews"]
    terms: dict[str, Any] = {"max_queries": 100, "delta": 1e-5, "is_even": True}
    found = []
    for hidden in (paper[3.0], 10.0):
        monkeypatch.setattr(bench, "PUBLISHED", {"AGNews": (labels, {**paper, 3.0: hidden, 8.0: hidden})})
        found.append(bench.predicted(bench.KNOWN, **terms)["AGNews"])
    assert found[0]["fitted"] == found[1]["fitted"]
    assert found[1]["off"] == {at: found[1]["fitted"][place] - 10.0 for place, at in ((1, 3.0), (2, 8.0))}
    assert bench.without_a_law()["AGNews"]["off"] == dict.fromkeys((3.0, 8.0), paper[math.inf] - 10.0)
