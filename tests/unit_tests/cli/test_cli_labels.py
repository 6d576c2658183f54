"""`dpicl plan --method pate`: labels for public inputs, before anything is spent."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl import Budget, LabelAnswers, PrivateExamples, PromptPATELabeler
from langchain_dpicl.backends.fake import FakeBackend
from langchain_dpicl.cli.main import main
from langchain_dpicl.options import FewShotTask
from langchain_dpicl.pate.plan import compare_teachers, plan_labelling, propose_labelling
from langchain_dpicl.planning.expected_utility import RowDesign, noise_deviation
from langchain_dpicl.planning.row_law import RowGuess
from langchain_dpicl.privacy.extensions.registry import TEACHERS
from tests.unit_tests.rehearsal.test_trying import rehearsed

ROWS = ("--set", "rows.units=30", "--no-compare")
TERMS: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-6}
SLOTS = ("--set", "rows.slots=30")


def run(*more: str, size: str = "2000") -> int:
    terms = ["--epsilon", "1", "--delta", "1e-6", "--set", "guess.public_inputs=40", "--public-size", size]
    return main(["plan", "--method", "pate", *terms, *more])


def shown(capsys: pytest.CaptureFixture[str], *more: str, size: str = "2000") -> dict[str, Any]:
    assert run("--json", *more, size=size) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_it_is_the_plan_of_all_inputs_and_the_comparison_says_how_many_are_right_often_enough(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = shown(capsys, "--set", "guess.labels=3", "--set", "noise=gaussian", *ROWS)
    design = RowDesign.choose(num_slots=30)
    plan = plan_labelling(2000, **TERMS, max_queries=40, width=3, mechanism="gaussian", design=design, threshold=5.0)
    assert out["plan"] == {"labels": 3, "public_inputs": 40, **plan.to_dict()}
    expected = plan.expected()
    assert {"chance": 0.95, "right_rows_needed": plan.right_rows_needed(0.95), **expected}.items() <= out[
        "signal"
    ].items()
    assert out["options"] == []
    good = [
        "guess.labels=3",
        "guess.skill=0.95",
        "guess.correlation=0.01",
        "guess.public_inputs=2000",
        "guess.chance=0.9",
    ]
    told = [part for item in good for part in ("--set", item)]
    few = json_of(capsys, *told, "--set", "rows.units=10", size="300")
    assert few["plan"]["max_queries"] == 2000
    assert 6 < few["recommendation"]["max_queries"] < 2000
    assert few["recommendation"]["right_label_prob"] >= 0.9
    out = shown(capsys, "--set", "guess.labels=3", "--set", "rows.units=30")
    assert {one["max_queries"] for one in out["options"]} == {40}, "fewer inputs would not reach the chance either"


@pytest.mark.parametrize("given", [{}, {"abstain_below": 0.4}, {"abstain_below": "never"}])
@pytest.mark.filterwarnings("ignore::langchain_dpicl.exceptions.RestsOnGuessWarning")
def test_the_plan_is_that_of_a_component_with_the_same_settings(
    given: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [part for name, value in given.items() for part in ("--set", f"answers.{name}={value}")]
    out = shown(capsys, "--set", "guess.labels=3", "--no-compare", *answers)
    private = PrivateExamples(
        [{"text": "x", "label": "a"}], label_key="label", labels=("a", "b", "c"), public_size=2000
    )
    own = PromptPATELabeler.from_private_examples(
        private,
        llm=FakeBackend(lambda _, __: {" a": 1.0}, vocabulary=[" a", " b", " c"]),
        max_queries=40,
        budget=Budget(epsilon=1.0, delta=1e-6),
        epsilon=1.0,
        task=FewShotTask("{text} {label}", "{text}", labels=("a", "b", "c")),
        answers=LabelAnswers(**given),
    )
    same = {"threshold", "constants", "candidates", "num_slots", "shots_per_slot", "mechanism"}
    assert {name: out["plan"][name] for name in same} == {name: own.plan.to_dict()[name] for name in same}


def test_the_advice_keeps_the_answers_that_it_was_computed_for(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--set", "guess.labels=3", *ROWS[:-1], "--set", "answers.abstain_below=0.3"]
    found = shown(capsys, *asked)["recommendation"]["settings"]
    assert found["answers"] == {"abstain_below": 0.3}
    assert run(*asked) == 0
    assert "answers = {abstain_below = 0.3}" in capsys.readouterr().out.partition("recommended:")[2]


def json_of(capsys: pytest.CaptureFixture[str], *more: str, size: str) -> dict[str, Any]:
    terms = ["--epsilon", "1", "--delta", "1e-6", "--public-size", size]
    assert main(["plan", "--method", "pate", *terms, *more, "--json"]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_the_three_teachers_stand_side_by_side_at_the_plans_own_noise_or_at_a_given_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    design = RowDesign.choose(num_slots=30)
    plan = plan_labelling(2000, **TERMS, max_queries=40, width=2, design=design)
    for given, noise in (([], noise_deviation(plan.release)), (["--set", "guess.noise=5.0"], 5.0)):
        found = shown(capsys, "--set", "guess.labels=2", "--max-queries", "40", *given, *ROWS)["teachers"]
        rows = compare_teachers(2000, num_teachers=30, noise=noise, max_queries=40, delta=1e-6)
        assert found["prices"] == [row.to_dict() for row in rows]
        assert (found["noise"], found["num_teachers"], found["max_queries"]) == (noise, 30, 40)
        fixed, one_sample, fresh = (row["epsilon"] for row in found["prices"])
        assert fixed > one_sample > fresh > 0


def test_the_comparison_is_that_of_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        "--set",
        "rows.units=30",
        "--set",
        "noise=gaussian",
        "--set",
        "guess.chance=0.9",
        "--set",
        "guess.skill=0.7",
    ]
    out = shown(
        capsys,
        "--set",
        "guess.labels=3",
        *rows,
        "--set",
        "answers.abstain_below=0.3",
        "--max-queries",
        "20",
        "--set",
        "rows.sampling=poisson",
    )
    options = propose_labelling(
        2000,
        **TERMS,
        public_inputs=40,
        labels=3,
        max_queries=20,
        teachers=TEACHERS,
        mechanisms=("gaussian", "gumbel", "permute_and_flip"),
        designs=[RowDesign.choose(num_slots=30)],
        abstain_below=0.3,
        source=RowGuess(skill=0.7),
        readings={False: 2},
        chance=0.9,
    )
    hidden = {"settings", "money", "overfill"}
    found = [{name: value for name, value in one.items() if name not in hidden} for one in out["options"]]
    assert found == [option.to_dict() for option in options]
    assert out["recommendation"] == out["options"][0]
    assert (out["plan"]["mechanism"], out["plan"]["threshold"], out["plan"]["constants"]) == ("gaussian", 9.0, [])
    assert len(out["options"]) == 3 * len({option["teachers"] for option in out["options"]})


def test_the_comparison_has_the_calls_and_money_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["guess.labels=2", "rows.units=30", "noise=gaussian", "cost.price_in=500.0"]
    told = [part for item in asked for part in ("--set", item)]
    out = shown(capsys, *told, "--set", "answers.abstain_below=never", "--max-queries", "40")
    same = [one for one in out["options"] if (one["teachers"], one["mechanism"]) == ("fresh", "gaussian")]
    assert [(one["private_calls"], one["money"]) for one in same] == [
        (out["cost"]["private_calls"], out["cost"]["money"])
    ]


@pytest.mark.parametrize("calibrate", [None, True, False])
def test_the_comparison_takes_the_better_reading_of_those_that_were_rehearsed(
    calibrate: bool | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw, better = (rehearsed(zero_shot=0.3, rows={1: right, 4: right}) for right in (0.5, 0.8))
    shapes = (*raw.shapes, *(dataclasses.replace(shape, calibrated=True) for shape in better.shapes))
    both = dataclasses.replace(raw, shapes=shapes, content_free=("N/A",))
    both.save(tmp_path / "rehearsal.json")
    told = ["--rehearsal", str(tmp_path / "rehearsal.json"), "--set", "rows.units=30", "--set", "noise=gaussian"]
    told += [] if calibrate is None else ["--set", f"answers.calibrate={str(calibrate).lower()}"]
    out = shown(capsys, *told, "--set", "cost.price_in=500.0", "--max-queries", "40")
    is_calibrated = calibrate is not False
    assert out["cost"]["private_calls"] == 40 * 30 * (1 + is_calibrated)
    for one in out["options"]:
        assert one["row_right"] == pytest.approx(both.facts(shots=1.0, calibrated=is_calibrated).right, abs=0.001)
        assert one["private_calls"] == out["cost"]["private_calls"]
        assert one["money"] == pytest.approx(out["cost"]["money"])
        assert one["settings"]["answers"] == {"calibrate": is_calibrated}
    assert run(*told, "--max-queries", "40") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("  fresh ", "  one_sample "))]
    assert {line.endswith(" calibrated") for line in lines if "units" in line} == {is_calibrated}


def test_calls_tokens_and_money_are_those_of_teachers_and_students(capsys: pytest.CaptureFixture[str]) -> None:
    tokens = [
        "--set",
        "cost.record_tokens=50",
        "--set",
        "cost.query_tokens=20",
        "--set",
        "cost.answer_tokens=2",
        "--set",
        "cost.calls_per_row=3",
    ]
    prices = [
        "--set",
        "cost.price_in=2.0",
        "--set",
        "cost.price_out=10.0",
        "--max-queries",
        "40",
    ]
    told = ("--set", "guess.labels=2", *tokens, *prices, *ROWS)
    out = shown(capsys, *told)
    cost, student = out["cost"], out["student"]
    assert (cost["private_calls"], cost["public_calls"]) == (40 * 30 * 3, 40 * 3)
    assert cost["tokens_in"] == 3600 * 70 + 120 * 20
    assert cost["calls_per_query"] == pytest.approx((3600 + 120) / 40)
    # 20 prompts of 4 shots, each tried on half of the inputs.
    assert (student["private_calls"], student["public_calls"]) == (0, 20 * 20 * 3)
    assert student["tokens_in"] == 1200 * (4 * 50 + 20)
    for each in (cost, student):
        assert each["tokens_out"] == 2 * (each["private_calls"] + each["public_calls"])
        assert each["money"] == pytest.approx((each["tokens_in"] * 2 + each["tokens_out"] * 10) / 1e6)
    assert run(*told) == 0
    assert "PromptPATEExampleSelector makes up to 1,200 public calls more" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "plan"),
    [
        (("--set", "rows.redraw_every=run"), {"teachers": "one_sample", "sampling": "poisson", "num_slots": 30}),
        (
            ("--set", "rows.sampling=partition", *SLOTS, "--adjacency", "replace_one"),
            {"teachers": "fixed", "sampling": "partition", "num_slots": 30, "rows": "slots", "sampling_rate": 1.0},
        ),
        (
            ("--set", "rows.sampling=fixed", *SLOTS, "--adjacency", "replace_one"),
            {"teachers": "fresh", "sampling": "fixed"},
        ),
    ],
)
def test_teachers_are_drawn_as_asked(
    given: tuple[str, ...], plan: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ["--no-compare"] if "--adjacency" in given else ROWS
    found = shown(capsys, "--set", "guess.labels=2", "--set", "noise=gaussian", *given, *rows)["plan"]
    assert plan.items() <= found.items()


def test_the_labels_of_the_sizes_are_counted_and_their_units_added(capsys: pytest.CaptureFixture[str]) -> None:
    plan = shown(capsys, "--public-size", "transfer=900", *ROWS, size="card=1100")["plan"]
    assert (plan["labels"], plan["candidates"], plan["public_size"]) == (2, 3, 2000), "and one that abstains"


def test_in_words_it_says_what_is_rejected_and_what_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    terms = ["--set", "guess.labels=2", "--set", "noise=gaussian", "--max-queries", "40", *ROWS]
    assert run(*terms, "--set", "answers.abstain_below=never") == 0
    assert "rejected" not in capsys.readouterr().out
    assert run(*terms) == 0
    plain = capsys.readouterr().out
    assert "rejected 0.0 %" in plain
    assert "rests on a GUESS: `dpicl rehearse FILE` measures it, free" in plain
    most = re.search(
        r"needed   no noise level reaches 95 %: with rows this alike at most (\d+) %; (\d+) % of rows", plain
    )
    assert most is not None
    assert int(most[1]) < 95 <= int(most[2]) + 5
    assert re.search(rf"at most {most[1]} % \(\d+ to \d+\) whatever the noise", plain)
    assert run(*terms, "--set", "answers.abstain_below=1.0", "--set", "guess.skill=0.1") == 0
    assert re.search(r"rejected (\d+)\.\d %", capsys.readouterr().out)
    good = ["--set", "guess.skill=0.95", "--set", "guess.correlation=0.01"]
    assert run(*terms, *good) == 0
    assert re.search(r"needed   \d+ % of rows right for 95 % right labels", capsys.readouterr().out)
    assert run(*terms, *good, "--set", "answers.abstain_below=1.0") == 0
    assert "needed   no share of right rows reaches 95 % at this noise" in capsys.readouterr().out


def test_the_command_of_the_page_runs_and_its_advice_is_a_settings_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "cli.md").read_text()
    found = re.search(r"^dpicl (plan --method pate .*)$", page, re.MULTILINE)
    assert found is not None
    assert main(shlex.split(found[1])) == 0
    printed = capsys.readouterr().out
    assert set(re.findall(r"^  (\w+) +gumbel", printed, re.MULTILINE)) == {"fresh", "one_sample"}
    for epsilon in ("8.307 ", "1.385 ", "0.1193 "):
        assert f"epsilon {epsilon}" in printed
    advice = tmp_path / "advice.toml"
    advice.write_text(printed.partition("recommended:")[2])
    asked = ["--set", "guess.labels=2", "--set", "guess.public_inputs=500", "--no-compare", "--config", str(advice)]
    assert run(*asked, size="6920") == 0
    assert "units, 200 x 1 shot(s), 2 labels" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "guess.labels: expected the number of labels, at least 2, found None"),
        (["guess.labels=1"], "guess.labels: expected the number of labels, at least 2, found 1"),
        (["guess.public_inputs=0"], "guess.public_inputs: expected a number greater than or equal to 1"),
        (["guess.labels=2", "max_queries=0"], "max_queries: expected an integer >= 1"),
        (["cost.record_tokens=0"], "cost.record_tokens: expected a number greater than or equal to 1"),
        (["guess.chance=1.5"], "guess.chance: expected a number less than or equal to 1"),
        (["guess.noise=0"], "guess.noise: expected a number greater than 0"),
        (["answers.abstain_below=nan"], "LabelAnswers.abstain_below: expected"),
        (["max_tokens=5"], "found 'max_tokens'"),
        (["guess.labels=2", "rows.sampling=partition"], "adjacency: expected 'replace_one' with fixed teachers"),
        (["guess.labels=2", "budget.delta=1e-3"], "delta: expected at most 1/(10 * public_size)"),
        (["guess.labels=2", "rows.units=3000"], "public_size: expected at least 3000 units, one for each row"),
    ],
)
def test_what_a_run_would_refuse_is_refused(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = [part for item in given for part in ("--set", item)]
    terms = ["--epsilon", "1", "--public-size", "2000", "--set", "guess.public_inputs=40", "--set", "budget.delta=1e-6"]
    assert main(["plan", "--method", "pate", "--no-compare", *terms, *told]) == 2
    assert said in capsys.readouterr().err


def test_without_public_inputs_there_is_nothing_to_label(capsys: pytest.CaptureFixture[str]) -> None:
    terms = ["--set", "guess.labels=2", "--epsilon", "1", "--delta", "1e-6", "--public-size", "2000"]
    assert main(["plan", "--method", "pate", *terms]) == 2
    assert "guess.public_inputs: expected the number of public inputs, found None" in capsys.readouterr().err
