"""`dpicl plan --method training`: private training, before anything is spent."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl.cli.main import main
from langchain_dpicl.privacy._validate import round_up_at
from langchain_dpicl.soft_prompts.plan import plan_training


def run(*more: str, size: str = "2000") -> int:
    return main(["plan", "--method", "training", "--epsilon", "2", "--delta", "1e-6", "--public-size", size, *more])


def shown(capsys: pytest.CaptureFixture[str], *more: str, size: str = "2000") -> dict[str, Any]:
    assert run("--json", *more, size=size) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_it_is_the_plan_of_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        "--set",
        "training.expected_batch_size=100",
        "--set",
        "training.l2_clip_norm=0.5",
        "--set",
        "guess.parameters=640",
        "--set",
        "training.epochs=1.5",
    ]
    work = ["--set", "cost.record_tokens=16", "--set", "cost.examples_per_unit=3", "--no-compare"]
    out = shown(capsys, *given, *work)
    terms: dict[str, Any] = {"epsilon": 2.0, "delta": 1e-6, "expected_batch_size": 100, "l2_clip_norm": 0.5}
    plan = plan_training(2000, **terms, width=640, epochs=1.5)
    assert out["plan"] == plan.to_dict()
    assert out["noise_to_clip"] == plan.noise_to_clip
    assert out["cost"] == {"gradients": 30 * 100 * 3, "tokens": 30 * 100 * 3 * 16}
    assert out["options"] == []


def test_other_batches_stand_beside_it_at_as_many_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    options = shown(capsys, "--set", "training.steps=10", "--set", "training.expected_batch_size=600")["options"]
    assert [(option["expected_batch_size"], option["steps"]) for option in options] == [
        (150, 40),
        (300, 20),
        (600, 10),
        (1200, 5),
    ]
    lengths = [option["noise_to_clip"] for option in options]
    assert lengths == sorted(lengths, reverse=True)
    terms: dict[str, Any] = {"epsilon": 2.0, "delta": 1e-6, "expected_batch_size": 300, "l2_clip_norm": 0.1}
    same = plan_training(2000, **terms, width=7680, steps=20, is_rough=True)
    assert options[1]["noise_multiplier"] == round_up_at(same.noise_multiplier)
    assert options[1]["noise_scale"] == same.noise_scale


def test_units_of_all_labels_are_added_and_the_relation_is_the_one_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["--set", "training.steps=5", "--set", "training.expected_batch_size=1024", "--set", "noise=gaussian"]
    given = ["--public-size", "transfer=900", *asked, "--adjacency", "replace_one"]
    plan = shown(capsys, *given, "--no-compare", size="card=1100")["plan"]
    assert (plan["public_size"], plan["adjacency"], plan["mechanism"]) == (2000, "replace_one", "gaussian")


def test_the_command_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "cli.md").read_text()
    found = re.search(r"^dpicl (plan --method training .*)$", page, re.MULTILINE)
    assert found is not None
    assert main(shlex.split(found[1])) == 0
    printed = capsys.readouterr().out
    assert "for 1,316 training steps" in printed
    assert "Duan et al. (2023): batch 1,024" in printed


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "training: expected a table with expected_batch_size, and epochs or steps"),
        (["training.steps=3", "training.epochs=1.0"], "Training: expected epochs or steps, found 'both'"),
        (["training.expected_batch_size=5"], "Training: expected epochs or steps, found 'neither'"),
        (["training.steps=0"], "Training.steps: expected a number greater than or equal to 1, found 0"),
        (["training.epochs=nan"], "Training.epochs: expected"),
        (["training.steps=3", "training.l2_clip_norm=0"], "Training.l2_clip_norm: expected a number greater than 0"),
        (["training.steps=3", "training.expected_batch_size=2001"], "training.expected_batch_size: expected at most"),
        (["training.steps=3", "guess.parameters=0"], "guess.parameters: expected a number greater"),
        (["training.steps=3", "guess.parameters=99999999"], "width: expected an integer >= 1 and <= 16777216"),
        (["training.steps=3", "cost.record_tokens=0"], "cost.record_tokens: expected a number greater"),
        (["training.steps=3", "rows.slots=5"], "found 'rows'"),
        (["training.steps=3", "answers.scores=true"], "found 'answers'"),
        (["training.steps=3", "budget.delta=1e-3"], "delta: expected at most 1/(10 * public_size)"),
    ],
)
def test_what_a_run_would_refuse_is_refused(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = given and ["training.expected_batch_size=100", *given]
    told = [part for item in asked for part in ("--set", item)]
    terms = ["--epsilon", "2", "--set", "budget.delta=1e-6", "--public-size", "2000", "--no-compare"]
    assert main(["plan", "--method", "training", *terms, *told]) == 2
    assert said in capsys.readouterr().err
