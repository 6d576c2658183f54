"""`dpicl plan --method retrieval`: what it prints is the plan of the component."""

from __future__ import annotations

import json
import re

import pytest

from langchain_dpicl.cli.main import main
from langchain_dpicl.retrieval import plan_retrieval

ASKED = [
    "plan",
    "--method",
    "retrieval",
    "--public-size",
    "500",
    "--epsilon",
    "2",
    "--delta",
    "1e-6",
    "--set",
    "guess.labels=4",
    "--set",
    "retrieval.similarity_threshold=0.5",
]


def test_it_prints_the_plan_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                *ASKED,
                "--set",
                "retrieval.participations=10",
                "--set",
                "guess.participants=40",
                "--set",
                "cost.price_in=1.0",
                "--json",
            ]
        )
        == 0
    )
    out = json.loads(capsys.readouterr().out)
    plan = plan_retrieval(500, epsilon=2.0, delta=1e-6, participations=10, width=4)
    assert out["plan"] == json.loads(json.dumps(plan.to_dict()))
    assert out["cost"]["private_calls"] == 2 * 32  # calibrated, as the embedded model is
    assert out["cost"]["money"] > 0
    expected = plan.expected(participants=40)
    assert expected.items() <= out["signal"].items()
    assert (expected["rows"], out["signal"]["participants"]) == (32, 40)


def test_it_says_so_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--set", "retrieval.participations=10", "--set", "retrieval.slots=per_unit"]) == 0
    shown = capsys.readouterr().out
    assert "once for all queries" in shown
    assert "one for each unit that takes part" in shown
    assert "30 units take part in a query: a GUESS" in shown
    assert re.search(r"right label \d+ % \(\d+ to \d+\), at most \d+ % \(\d+ to \d+\) whatever the noise", shown)
    assert "rests on a GUESS: `dpicl rehearse FILE` measures it, free" in shown


def test_few_answers_of_each_document_are_advised_where_noise_takes_much(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--set", "retrieval.participations=200"]) == 0
    assert "do not spend like this: the noise takes" in capsys.readouterr().out
    assert main([*ASKED, "--epsilon", "20", "--set", "retrieval.participations=1"]) == 0
    assert "do not spend" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["retrieval.participations=0"],
        ["retrieval.participations=3", "guess.labels=1"],
        ["retrieval.participations=3", "noise=gumbel"],
        ["retrieval.participations=3", "rows.shots=4"],
        ["retrieval.participations=3", "retrieval.slots=every"],
        ["retrieval.participations=3", "budget.adjacency=replace_one"],
        ["retrieval.participations=3", "max_tokens=4"],
    ],
)
def test_what_such_a_plan_cannot_have_is_refused(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, *(part for item in more for part in ("--set", item))]) == 2
    assert capsys.readouterr().err.startswith("dpicl: ")


def test_the_advice_without_a_table_of_retrieval_leads_to_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    place = ASKED.index("retrieval.similarity_threshold=0.5")
    asked = [*ASKED[: place - 1], *ASKED[place + 1 :]]
    assert main(asked) == 2
    advised = re.findall(r"--set retrieval\.\w+=(?=\w)", capsys.readouterr().err)
    half = [option.removeprefix("--set ") + "1" for option in advised]
    assert main([*asked, "--set", half[0]]) == 2
    assert capsys.readouterr().err.endswith(
        "always; missing 1 required keyword-only argument: 'similarity_threshold'.\n"
    )
    assert main([*asked, *(part for one in half for part in ("--set", one))]) == 0
