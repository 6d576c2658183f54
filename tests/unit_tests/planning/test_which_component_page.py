"""docs/which-component.md shows the costs of the planners and the accuracies of the benchmark's tables."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl.generation.plan import Segment, plan_generation
from langchain_dpicl.pate.plan import plan_labelling
from langchain_dpicl.runs.query_plan import plan_queries
from langchain_dpicl.soft_prompts.plan import plan_training

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "which-component.md"
SHARE: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-6}
PLANS: dict[str, Callable[[], Any]] = {
    "generation": lambda: plan_generation(
        dict.fromkeys("abcd", 3_000), shots_per_label=2, segments=[Segment("text", 40)], **SHARE
    ),
    "PromptPATE": lambda: plan_labelling(12_000, max_queries=200, width=4, **SHARE),
    "voting: 100": lambda: plan_queries(12_000, max_queries=100, width=4, **SHARE),
    "voting: 10,000": lambda: plan_queries(12_000, max_queries=10_000, width=4, **SHARE),
    "soft prompt": lambda: plan_training(
        12_000, expected_batch_size=1_024, l2_clip_norm=0.1, width=7_680, epochs=20, **SHARE
    ),
}
# The standard deviation of a multiplier of 1: Gumbel noise on unit rows, Gaussian noise on slots, which a record moves by
# sqrt(2), and clips of gradients.
STDDEV = {"generation": math.pi / math.sqrt(6), "soft prompt": 1.0}


@pytest.mark.parametrize("name", PLANS)
def test_a_row_of_costs_is_what_the_planner_says(name: str) -> None:
    [row] = re.findall(rf"^\| {name}\b.*$", PAGE.read_text(), re.MULTILINE)
    noise, private = [cell.strip() for cell in row.split("|")[2:4]]
    plan = PLANS[name]()
    assert plan.epsilon <= 1.0
    assert float(noise.split()[0]) == pytest.approx(plan.noise_multiplier * STDDEV.get(name, math.sqrt(2)), abs=0.051)
    if name != "soft prompt":
        assert int(private.replace(",", "")) == plan.cost().private_calls


@pytest.mark.parametrize("data", ["AGNews", "DBPedia", "TREC"])
def test_demonstrations_stand_beside_the_better_of_what_is_free(data: str) -> None:
    tables = (ROOT / "benchmarks" / "results" / "tables.md").read_text()
    row = re.findall(rf"^\| {data} \| few-shot generation \|.*$", tables, re.MULTILINE)[0]
    zero_shot, instruction, private = map(float, re.findall(r"([\d.]+) ±", row)[:3])
    assert f"{data} {private} ({max(zero_shot, instruction)})" in " ".join(PAGE.read_text().replace(" %", "").split())
