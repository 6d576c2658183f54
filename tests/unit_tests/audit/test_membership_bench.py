"""The membership benchmark: what it attacks, on made-up data, and what it writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import bench_membership
from _membership_systems import MECHANISMS, Systems, worded
from _voting_task import load

from langchain_dpicl import EmbeddedLLM
from langchain_dpicl.audit import plots
from langchain_dpicl.audit.membership import NOTICE

ROWS = [
    {"text": f"{what} {number} of {place}", "label": code, "label_name": name, "split": "train" if number else "test"}
    for code, (name, what) in enumerate([("LOC", "where is house"), ("NUM", "how many at gate")])
    for number in range(12)
    for place in ("the city", "my street", "this town")
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "trec.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS))
    return path


@pytest.mark.benches
def test_prompts_of_real_records_are_attacked_and_written_down(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = {}
    for name in ("plot_roc", "plot_probabilities"):
        monkeypatch.setattr(plots, name, lambda results, path, title: drawn.update({path.name: (results, title)}))
    options = ["--parts", "prompts", "--prompts", "2", "--nonmembers", "4", "--out", str(tmp_path / "out")]
    assert bench_membership.main(["--data", "another", "--data", str(data), *options]) == 0
    told = capsys.readouterr().out
    assert told.startswith(NOTICE)
    rows = [line for line in told.splitlines() if line.startswith("| real")]
    assert [row.split("|")[1].strip() for row in rows] == [
        "real prompt, 1-shot",
        "real prompt, 4-shot",
        "real prompt, 4-shot, text",
        "real prompt, 1-shot, same label",
        "real prompt, 4-shot, same label",
    ]
    numbers = json.loads((tmp_path / "out" / "bench_membership.json").read_text())
    assert (numbers["private"], numbers["notice"]) == (False, NOTICE)
    assert [found["records_per_prompt"] for found in numbers["TREC"]] == [1, 4, 4, 1, 4]
    assert numbers["TREC"][4]["nonmembers"] == "same_label"
    assert f"{numbers['TREC'][1]['auc']:.3f} [" in rows[1]
    assert set(drawn) == {"membership_roc_trec.png", "membership_scores_trec.png"}
    for results, title in drawn.values():
        assert [found.name for found in results] == ["real prompt, 1-shot", "real prompt, 4-shot"]
        assert "TREC" in title


def systems(data: Path, **changes: Any) -> Systems:
    task = worded(load(data, cap=30, questions=1, seed=0, words={}))
    given: dict[str, Any] = {"records": 8, "epsilon": 4.0, "delta": 1e-5, "rows": 2, "queries": 2}
    return Systems(**({"task": task, "llm": EmbeddedLLM(), "public_inputs": ("a", "b", "c")} | given | changes))


def test_labels_are_called_as_they_read(data: Path) -> None:
    task = systems(data).task
    assert task.labels == ("place", "number")
    assert {record["label"] for record in task.records} == {"place", "number"}
    assert task.texts == ((" place",), (" number",))


@pytest.mark.benches
def test_every_component_is_attacked_under_its_claim_and_again_without_its_noise(data: Path) -> None:
    made = systems(data)
    components, controls = list(made.components()), list(made.without_noise())
    assert {target.claim for target in components} == {made.claim}
    assert {target.claim for target in controls} == {None}
    names = [target.name for target in components]
    assert len(names) == len(set(names)) == 11
    assert all(f"DPFewShotPromptTemplate, {mechanism}" in names for mechanism in MECHANISMS)
    for target in [components[0], *components[7:], *controls]:  # one of the mechanisms: they are built alike
        rows = target.build(made.task.records[:8])(["where is it", "how many"])
        assert rows.shape == (2, 2), target.name


def test_no_data_and_settings_that_are_none_end_with_a_line(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_membership.main(["--data", str(tmp_path / "none.jsonl")]) == 2
    assert "no data file at" in capsys.readouterr().out
    out = ["--out", str(tmp_path)]
    assert bench_membership.main(["--data", str(data), "--parts", "prompts", "--nonmembers", "500", *out]) == 2
    assert capsys.readouterr().err.endswith("found 66.\n")


def test_soft_prompts_without_a_model_say_who_makes_one(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = bench_membership.parsed(["--data", str(data), "--parts", "soft", "--soft-base", str(tmp_path)])
    assert list(bench_membership.Bench(asked, EmbeddedLLM(), data).run()) == []
    assert "make bench-soft-prompts" in capsys.readouterr().out
