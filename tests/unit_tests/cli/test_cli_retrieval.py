"""`dpicl plan --method retrieval`: what it prints is the plan of the component."""

from __future__ import annotations

import json

import pytest

from langchain_dpicl.cli.main import main
from langchain_dpicl.retrieval.plan import plan_retrieval

ASKED = ["plan", "--method", "retrieval", "--public-size", "500", "--epsilon", "2", "--delta", "1e-6", "--labels", "4"]


def test_it_prints_the_plan_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--participations", "10", "--participants", "40", "--price-in", "1", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    plan = plan_retrieval(500, epsilon=2.0, delta=1e-6, participations=10, width=4)
    assert out["plan"] == json.loads(json.dumps(plan.to_dict()))
    assert out["cost"]["private_calls"] == 32
    assert out["cost"]["money"] > 0
    assert out["signal"]["rows"] == 32


def test_it_says_so_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--participations", "10", "--rows", "units"]) == 0
    shown = capsys.readouterr().out
    assert "once for all queries" in shown
    assert "one for each unit that takes part" in shown
    assert "not measured" in shown


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--participations", "0"],
        ["--participations", "3", "--labels", "1"],
        ["--participations", "3", "--mechanism", "gumbel"],
        ["--participations", "3", "--shots-per-slot", "4"],
        ["--participations", "3", "--sampling", "poisson"],
        ["--participations", "3", "--rows", "units", "--num-slots", "4"],
        ["--participations", "3", "--adjacency", "replace_one"],
        ["--participations", "3", "--max-tokens", "4"],
    ],
)
def test_what_such_a_plan_cannot_have_is_refused(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, *more]) == 2
    assert capsys.readouterr().err.startswith("dpicl: ")
