"""`dpicl plan --method dpsgd`: private training, before anything is spent."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl.cli.main import main
from langchain_dpicl.soft_prompts.plan import plan_training


def run(*more: str, size: str = "2000") -> int:
    return main(["plan", "--method", "dpsgd", "--epsilon", "2", "--delta", "1e-6", "--public-size", size, *more])


def shown(capsys: pytest.CaptureFixture[str], *more: str, size: str = "2000") -> dict[str, Any]:
    assert run("--json", *more, size=size) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_it_is_the_plan_of_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--expected-batch-size", "100", "--clip-norm", "0.5", "--parameters", "640", "--epochs", "1.5"]
    work = ["--record-tokens", "16", "--examples-per-unit", "3", "--no-compare"]
    out = shown(capsys, *given, *work)
    terms: dict[str, Any] = {"epsilon": 2.0, "delta": 1e-6, "expected_batch_size": 100, "l2_clip_norm": 0.5}
    plan = plan_training(2000, **terms, width=640, epochs=1.5)
    assert out["plan"] == plan.to_dict()
    assert out["noise_to_clip"] == plan.noise_to_clip
    assert out["cost"] == {"gradients": 30 * 100 * 3, "tokens": 30 * 100 * 3 * 16}
    assert out["options"] == []


def test_without_more_it_takes_the_papers_batch_or_all_records(capsys: pytest.CaptureFixture[str]) -> None:
    plan = shown(capsys, "--steps", "4", "--no-compare")["plan"]
    assert (plan["expected_batch_size"], plan["l2_clip_norm"], plan["width"]) == (1024, 0.1, 7680)
    few = shown(capsys, "--steps", "4", "--no-compare", size="500")["plan"]
    assert (few["expected_batch_size"], few["sampling_rate"]) == (500, 1.0)


def test_other_batches_stand_beside_it_at_as_many_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    options = shown(capsys, "--steps", "10", "--expected-batch-size", "600")["options"]
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
    assert options[1]["noise_multiplier"] == round(same.noise_multiplier, 4)
    assert options[1]["noise_scale"] == same.noise_scale


def test_units_of_all_labels_are_added_and_the_relation_is_the_one_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["--public-size", "transfer=900", "--steps", "5", "--adjacency", "replace_one", "--mechanism", "gaussian"]
    plan = shown(capsys, *given, "--no-compare", size="card=1100")["plan"]
    assert (plan["public_size"], plan["adjacency"], plan["mechanism"]) == (2000, "replace_one", "gaussian")


def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "cli.md").read_text()
    found = re.search(r"```console\n\$ dpicl (plan --method dpsgd .*?)\n(.*?)```", page, re.DOTALL)
    assert found is not None
    assert main(shlex.split(found[1])) == 0
    printed = capsys.readouterr().out
    assert printed == found[2]
    assert "for 1,316 training steps" in printed
    assert "Duan et al. (2023): batch 1,024" in printed


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "--steps, --epochs: expected one of them with --method dpsgd"),
        (["--steps", "3", "--epochs", "1"], "--steps, --epochs: expected one of them"),
        (["--steps", "0"], "--steps: expected an integer >= 1, found 0"),
        (["--epochs", "0"], "--epochs: expected a number"),
        (["--epochs", "nan"], "--epochs: expected a number"),
        (["--steps", "3", "--clip-norm", "0"], "--clip-norm: expected a number"),
        (["--steps", "3", "--expected-batch-size", "2001"], "--expected-batch-size: expected at most 2000"),
        (["--steps", "3", "--expected-batch-size", "0"], "--expected-batch-size: expected an integer >= 1"),
        (["--steps", "3", "--parameters", "0"], "--parameters: expected an integer >= 1"),
        (["--steps", "3", "--parameters", "99999999"], "width: expected an integer >= 1 and <= 16777216"),
        (["--steps", "3", "--examples-per-unit", "0"], "--examples-per-unit: expected an integer >= 1"),
        (["--steps", "3", "--record-tokens", "0"], "--record-tokens: expected an integer >= 1"),
        (["--steps", "3", "--mechanism", "gumbel"], "--mechanism: expected gaussian with --method dpsgd"),
        (["--steps", "3", "--rows", "slots"], "--rows: expected none with --method dpsgd"),
        (["--steps", "3", "--num-slots", "5"], "--num-slots: expected none with --method dpsgd"),
        (["--steps", "3", "--sampling", "fixed"], "--sampling: expected none with --method dpsgd"),
        (["--steps", "3", "--agreement", "0.7"], "--agreement: expected none with --method dpsgd"),
        (["--steps", "3", "--price-in", "1"], "--price-in: expected none with --method dpsgd"),
        (["--steps", "3", "--clip", "1"], "--clip: expected none with --method dpsgd"),
        (["--steps", "3", "--labels", "2"], "--labels: expected none with --method dpsgd"),
        (["--steps", "3", "--delta", "1e-3"], "delta: expected at most 1/(10 * public_size)"),
    ],
)
def test_what_a_run_would_refuse_is_refused(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--no-compare", *given) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("method", ["generation", "voting", "pate"])
@pytest.mark.parametrize("given", [["--epochs", "5"], ["--clip-norm", "1"], ["--expected-batch-size", "3"]])
def test_the_other_methods_take_none_of_its_options(
    method: str, given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    terms = ["--epsilon", "1", "--delta", "1e-6", "--public-size", "2000", "--no-compare"]
    assert main(["plan", "--method", method, *terms, *given]) == 2
    assert f"{given[0]}: expected none with --method {method}" in capsys.readouterr().err
