"""`dpicl plan --rehearsal`: chances that rest on what was measured, and what is free."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl.cli.inputs import settings_of
from langchain_dpicl.cli.main import main
from langchain_dpicl.planning.expected_utility import RowDesign
from langchain_dpicl.rehearsal import Rehearsal, propose_rows
from langchain_dpicl.rehearsal.choice import best_free
from langchain_dpicl.runs.query_plan import plan_queries
from tests.unit_tests.rehearsal.test_trying import rehearsed

TERMS = ("--epsilon", "2", "--delta", "1e-6", "--public-size", "3000")
QUERIES = ("--max-queries", "200", "--no-compare")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("plan") / "rehearsal.json"
    rehearsed(zero_shot=0.3, rows={1: 0.4, 4: 0.6, 8: 0.65}, same=0.4).save(path)
    return str(path)


def shown(capsys: pytest.CaptureFixture[str], method: str, *more: str) -> dict[str, Any]:
    assert main(["plan", "--method", method, *TERMS, *more, "--json"]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_without_rows_they_are_those_that_the_rehearsal_proposes(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = propose_rows(Rehearsal.load(file), 3000, epsilon=2.0, delta=1e-6, max_queries=200)
    for method, more in (("voting", ()), ("pate", ("--public-inputs", "900"))):
        out = shown(capsys, method, *QUERIES, *more, "--rehearsal", file)
        assert RowDesign.shown(out["plan"]) == found.design
        signal = out["signal"]
        told = (signal["right_label_prob"], signal["right_label_low"], signal["right_label_high"])
        assert told == (found.right, found.low, found.high)
        assert (signal["rests_on"], out["verdict"]) == (found.rests_on, found.verdict)
        assert out["free"]["right"] == best_free(Rehearsal.load(file)).right
        assert out["plan"]["labels"] == 4, "the rehearsal knows them"


@pytest.mark.parametrize("declared", [("--set", "data.labels=['a','b']"), ("--set", "task.labels=['a','b']")])
def test_a_rehearsal_of_other_labels_is_refused(
    declared: tuple[str, str], file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--set", "data.label_key=label", *declared, "--rehearsal", file)
    assert main(["plan", "--method", "voting", *TERMS, *QUERIES, *given]) == 2
    assert "rehearsal.labels: expected" in capsys.readouterr().err


def test_given_rows_keep_their_shape_and_rest_on_it(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ("--set", "rows.slots=10", "--set", "rows.shots=8")
    out = shown(capsys, "voting", *QUERIES, *rows, "--rehearsal", file)
    design = RowDesign.choose(rows="slots", num_slots=10, shots_per_slot=8)
    plan = plan_queries(3000, epsilon=2.0, delta=1e-6, max_queries=200, width=4, design=design)
    assert plan.expected(Rehearsal.load(file)).items() <= out["signal"].items()
    gain = out["signal"]["right_label_prob"] - out["free"]["right"]
    assert (out["verdict"] == "no better than what is free") is (gain <= 0.02)


@pytest.mark.parametrize("is_rehearsed", [False, True])
def test_votes_of_one_sample_are_refused_as_the_run_refuses_them(
    is_rehearsed: bool, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    known = ["--rehearsal", file] if is_rehearsed else ["--set", "guess.labels=4"]
    assert main(["plan", "--method", "voting", *TERMS, *QUERIES, *known, "--set", "rows.redraw_every=run"]) == 2
    assert "Rows.redraw_every: expected None: every query draws its own sample" in capsys.readouterr().err


def test_given_rows_may_be_sure_to_beat_what_is_free(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rehearsal.json"
    rehearsed(zero_shot=0.25, rows={1: 0.3, 8: 0.45}, questions=24).save(path)
    terms = "--epsilon 4 --delta 1e-7 --public-size 100000 --max-queries 50 --set rows.slots=40 --set rows.shots=8"
    asked = ["plan", "--method", "voting", *terms.split(), "--rehearsal", str(path)]
    assert main([*asked, "--no-compare", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "beats what is free"
    assert main(asked) == 0
    assert "recommended:\n" in capsys.readouterr().out


@pytest.mark.parametrize("method", ["voting", "pate"])
def test_the_recommendation_is_about_its_own_rows_and_not_about_poor_ones_that_were_asked_for(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rehearsal.json"
    rehearsed(zero_shot=0.25, rows={1: 0.3, 8: 0.45}, questions=24).save(path)
    terms = "--epsilon 4 --delta 1e-7 --public-size 100000 --max-queries 50 --set rows.slots=10 --set rows.shots=1"
    asked = ["plan", "--method", method, *terms.split(), "--rehearsal", str(path)]
    assert main([*asked, *(["--public-inputs", "50"] if method == "pate" else [])]) == 0
    text = capsys.readouterr().out
    assert "verdict  no better than what is free" in text, "of the rows that were asked for"
    assert "best first:\n  as measured: the best of several looks better than it is." in text
    best = max(map(float, re.findall(r" ([\d.]+)%", text.partition("best first:")[2])))
    free = float(re.findall(r"^free     (\d+) %", text, re.MULTILINE)[0])
    assert ("recommended: spend nothing" in text) is (best <= free + 2)
    assert ("recommended:\n" in text) is (method == "voting"), "there are better ones"


@pytest.mark.parametrize("known", [(), ("--rehearsal",)])
def test_beside_a_verdict_on_spending_noise_is_not_advised_against_once_more(
    known: tuple[str, ...], file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    known = (*known, file) if known else ("--set", "guess.labels=4")
    assert main(["plan", "--method", "voting", *TERMS, "--max-queries", "20000", "--no-compare", *known]) == 0
    text = capsys.readouterr().out
    assert "the noise takes" in text.partition("advice   ")[2]
    assert ("do not spend like this" in text) is ("verdict  " not in text)


def test_a_settings_file_names_it_too(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "task.toml"
    config.write_text(f'method = "voting"\nmax_queries = 200\n[guess]\nrehearsal = "{file}"\n')
    assert main(["plan", "--config", str(config), *TERMS, "--no-compare"]) == 0
    text = capsys.readouterr().out
    assert "rests on a rehearsal of 96 public examples" in text
    assert "GUESS" not in text
    assert re.search(r"^free     \d+ % by .*, at epsilon 0$", text, re.MULTILINE)
    assert re.search(r"^verdict  (beats|perhaps better than|no better than) what is free$", text, re.MULTILINE)
    assert ("recommended: spend nothing; " in text) is ("no better than what is free" in text) is True
    taken = text.partition("the best that can be bought all the same:")[2]
    settings = settings_of({"method": "voting", **tomllib.loads(taken)})
    assert settings.get("rows") is not None
    assert settings.get("answers").calibrate is False


def test_the_comparison_rests_on_it(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "voting", "--max-queries", "200", "--rehearsal", file)
    rehearsal = Rehearsal.load(file)
    eight = {one["row_right"] for one in out["options"] if one["shots_per_slot"] == 8 and one["overfill"] == 1.5}
    assert all(abs(right - rehearsal.facts(shots=8.0).right) < 0.01 for right in eight)
    found = propose_rows(rehearsal, 3000, epsilon=2.0, delta=1e-6, max_queries=200)
    assert out["recommendation"]["settings"]["rows"] == found.design.option()


def test_retrieval_rests_on_rows_of_one_example(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--set", "retrieval.participations=10", "--set", "retrieval.similarity_threshold=0.5")
    out = shown(capsys, "retrieval", *asked, "--rehearsal", file)
    assert out["signal"]["row_right"] == Rehearsal.load(file).facts(shots=1.0).right
    assert {"free", "verdict"} <= set(out)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--set", "guess.labels=3"], "rows: expected a rehearsal on 3 labels, found '4 labels'"),
        (["--set", "answers.calibrate=true"], "answers.calibrate: expected one of"),
        (["--set", "guess.growth=0.1"], "guess: expected a rehearsal, or guesses in its place"),
    ],
)
def test_what_was_not_rehearsed_is_refused(
    more: list[str], said: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ["--set", "rows.units=20"]
    assert main(["plan", "--method", "voting", *TERMS, *QUERIES, "--rehearsal", file, *rows, *more]) == 2
    assert said in capsys.readouterr().err


def test_a_generation_has_nothing_of_it(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *TERMS, "--no-compare", "--rehearsal", file]) == 2
    assert "--method: expected one of ['voting', 'retrieval', 'pate'] beside --rehearsal" in capsys.readouterr().err


def test_a_rehearsal_alone_is_asked_for_everything_else_at_once(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--rehearsal", file]) == 2
    assert "--method: expected one of ['voting', 'retrieval', 'pate'] beside --rehearsal, found 'generation'." in (
        capsys.readouterr().err
    )
    assert main(["plan", "--method", "voting", "--rehearsal", file]) == 2
    assert "dpicl: --public-size, --epsilon, --delta, --max-queries: expected a value, found none." in (
        capsys.readouterr().err
    )


def test_where_another_noise_comes_first_the_table_says_how_to_have_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rehearsed(zero_shot=0.3, rows={1: 0.3, 8: 0.7}).save(tmp_path / "r.json")
    terms = ["--public-size", "600", "--epsilon", "1", "--delta", "1e-6", "--max-queries", "3", "--rehearsal"]
    asked = ["plan", "--method", "voting", *terms, str(tmp_path / "r.json")]
    assert main(asked) == 0
    text = capsys.readouterr().out
    first = re.search(r"mechanism .*\n +(\w+) ", text)
    assert first is not None
    assert first[1] == "permute_and_flip"
    assert 'noise = "gaussian"' in text.partition("best first:")[2]
    assert "another noise comes first here, --set noise=NAME chooses rows for that one" in text
    assert main([*asked, "--set", f"noise={first[1]}"]) == 0
    assert f'noise = "{first[1]}"' in capsys.readouterr().out
