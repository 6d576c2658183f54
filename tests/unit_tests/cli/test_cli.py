"""The `dpicl` command."""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import gzip
import inspect
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl import Budget, Decoding, DPVotingRunnable, LabelAnswers, PrivateExamples
from langchain_dpicl.backends.base import RowHint
from langchain_dpicl.backends.fake import FakeBackend, scripted, word_copier
from langchain_dpicl.cli import main as cli
from langchain_dpicl.cli.inputs import METHODS, as_typed, component_of, private_examples, read_toml, settings_of
from langchain_dpicl.cli.main import main
from langchain_dpicl.cli.plan import money_text, toml_lines
from langchain_dpicl.cli.spending import Call, json_line, release
from langchain_dpicl.exceptions import ConfigurationError, LedgerUnavailableError, ModelCallError, NoisyPlanWarning
from langchain_dpicl.generation.plan import compare, plan_generation, signal_of
from langchain_dpicl.generation.synthesizer import DemonstrationSynthesizer
from langchain_dpicl.options import OPTIONS, GenerationTask, OpenLabel, Rows
from langchain_dpicl.planning.expected_utility import RowDesign
from langchain_dpicl.planning.row_law import RowGuess
from langchain_dpicl.released.demonstrations import ReleasedDemonstrations
from langchain_dpicl.runs.query_plan import compare_queries, declared_design, plan_queries
from langchain_dpicl.stores import SQLiteStore
from tests.check_coverage import shares
from tests.faults.children import Child
from tests.scripted_models import ScriptedChat

ENDS = FakeBackend(scripted(), vocabulary=["my"])
TWO = ("--set", "guess.labels=2")
THREE = ("--set", "guess.labels=3")
CHECKS = {
    "checks": [
        {
            "id": "A",
            "mechanisms": [{"type": "gaussian", "noise_multiplier": 1.0, "count": 1}],
            "adjacency": "any",
            "delta": 1e-5,
        },
        {"id": "B", "mechanisms": [{"type": "pure", "eps": 0.5, "count": 10}], "adjacency": "any", "delta": 1e-6},
    ]
}


def _read_toml(lines: list[str]) -> dict[str, Any]:
    return tomllib.loads("\n".join(lines))


@pytest.fixture
def checks_file(tmp_path: Path) -> Path:
    path = tmp_path / "checks.json"
    path.write_text(json.dumps(CHECKS))
    return path


def test_epsilon_prints_id_and_upper_bound(checks_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["epsilon", str(checks_file)]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()][1][0] == "A"


def test_epsilon_json_is_exactly_a_list_of_id_and_epsilon(
    checks_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["epsilon", str(checks_file), "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert [sorted(row) for row in out] == [["epsilon", "id"]] * 2
    assert out[0]["epsilon"] == pytest.approx(4.3772, abs=1e-3)
    assert out[1]["epsilon"] == pytest.approx(5.0, abs=1e-2)


@pytest.mark.parametrize(
    "content",
    [
        "not json",
        '{"checks": [{"id": "x"}]}',
        '[{"id": "x", "mechanisms": [{"type": "magic"}], "adjacency": "any", "delta": 1e-5}]',
    ],
)
def test_a_broken_file_fails_clearly(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.json"
    path.write_text(content)
    assert main(["epsilon", str(path)]) == 2
    assert capsys.readouterr().err.startswith("dpicl: ")
    assert main(["epsilon", str(tmp_path / "missing.json")]) == 2


def test_plan_shows_noise_calls_money_and_a_recommendation(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--epsilon", "1", "--delta", "1e-6", "--public-size", "12000", "--max-tokens", "20"]
    assert main([*arguments, "--set", "cost.price_in=0.5", "--set", "cost.price_out=1.5", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["plan"]["epsilon"] <= 1.0
    assert out["cost"]["private_calls"] == 20 * 40
    assert out["cost"]["money"] > 0
    assert out["recommendation"] == out["options"][0]
    assert {"signal_to_noise", "right_token_prob", "empty_slot_prob"} <= set(out["signal"])


def test_a_plan_of_texts_says_what_measures_its_guess_and_takes_no_number_of_labels(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["plan", "--epsilon", "1", "--delta", "1e-6", "--max-tokens", "20", "--no-compare"]
    arguments += ["--set", "guess.labels=2", "--public-size"]
    assert main([*arguments, "800"]) == 2
    assert "guess.labels: expected labels with their names for a generation, found 2" in capsys.readouterr().err
    assert main([*arguments, "a=400", "--public-size", "b=400"]) == 0, "they are named"
    shown = capsys.readouterr().out
    assert "rests on a GUESS: rehearse_generation in Python measures it, free" in shown
    assert " out, no price given\n" in shown
    assert (money_text(0.0012), money_text(1.5)) == ("money 0.0012", "money 1.50")
    assert main([*arguments, "a=400", "--public-size", "b=400", "--set", "noise=recentered_clip"]) == 0
    assert "rests on a GUESS, which no rehearsal measures" in capsys.readouterr().out


def test_plan_with_words_before_the_texts_shows_their_price_and_the_cliff(capsys: pytest.CaptureFixture[str]) -> None:
    terms = ["--epsilon", "4", "--delta", "5e-7", "--public-size", "a=2000", "--public-size", "b=90"]
    arguments = ["plan", *terms, "--max-tokens", "5", "--set", "decoding.released_words=true"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    for words in (
        "words    before the texts, 32 of each unit",
        "reach with a chance of 2.5e-07\n",
        "a word of 99 units of a label",
        "names too: read them",
    ):
        assert words in shown
    assert "50%      99 units  multiplier" in shown
    assert "the smallest one declares 90 units: too few for a word" in shown
    for spelling in ("True", "'words.json'", "1", "['velda']"):  # a plan without words, of texts that could hold some
        assert main([*arguments[:-1], f"decoding.released_words={spelling}"]) == 2
        assert "decoding.released_words: expected" in capsys.readouterr().err.lower()


def test_plan_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--public-size", "card=500", "--public-size", "transfer=700"]
    assert (
        main(
            [
                "plan",
                "--epsilon",
                "2",
                "--delta",
                "1e-6",
                *sizes,
                "--max-tokens",
                "10",
                "--set",
                "rows.shots=2",
                "--no-compare",
            ]
        )
        == 0
    )
    text = capsys.readouterr().out
    for word in ("noise", "card: 500 declared units", "transfer: 700", "empty slots", "private + "):
        assert word in text


@pytest.mark.parametrize("sizes", [["x"], ["a=b"], ["10", "a=10"], ["0"]])
def test_plan_refuses_unreadable_or_too_small_sizes(sizes: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    given = [part for size in sizes for part in ("--public-size", size)]
    assert main(["plan", "--epsilon", "1", "--delta", "1e-6", *given, "--no-compare"]) == 2
    assert "dpicl: " in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"\x80\x00\xff binary", b"\xff\xfe{\x00}\x00", b"[" * 100_000, b"9" * 5000])
def test_what_is_no_json_text_is_named_and_refused(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "checks.bin"
    path.write_bytes(content)
    assert main(["epsilon", str(path)]) == 2
    assert "checks.bin: expected JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    "typed",
    [
        "plan --public-size 5000 --max-tokens 4 --no-compare --set noise.multiplier=1.2345",
        "plan --method voting --public-size 8000 --max-queries 90 --set guess.labels=4 --set noise.multiplier=4.4444",
        "plan --method pate --public-size 6920 --public-inputs 99 --set guess.labels=2 --set noise.multiplier=9.1111",
        "plan --method evolution --public-size 8000 --set noise.multiplier=12.3456",
        "discover --by product --set noise.multiplier=2.3456",
        "discover --words --set noise.multiplier=12.3456",
    ],
)
def test_a_printed_bound_of_a_plan_is_not_below_the_bound(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = [*typed.split(), "--epsilon", "8", "--delta", "1e-6"]
    assert main(printed) == 0
    words = capsys.readouterr().out.split()
    assert main([*printed, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    bound = plan.get("plan", plan)["epsilon"]
    assert bound <= float(words[1]) <= bound * (1 + 1e-3)


def test_the_printed_bounds_of_checks_are_not_below_the_bounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {"adjacency": "any", "delta": 1e-6}
    noises = (1.1, 1.3, 1.7, 2.3)
    checks = [
        {"id": f"n{noise}", **shape, "mechanisms": [{"type": "gaussian", "noise_multiplier": noise, "count": 3}]}
        for noise in noises
    ]
    (path := tmp_path / "checks.json").write_text(json.dumps(checks))
    assert main(["epsilon", str(path), "--json"]) == 0
    bounds = [row["epsilon"] for row in json.loads(capsys.readouterr().out)]
    assert main(["epsilon", str(path)]) == 0
    printed = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()[1:]]
    assert all(bound <= shown <= bound * (1 + 1e-5) for bound, shown in zip(bounds, printed, strict=True))


def test_a_byte_order_mark_before_json_is_fine(checks_file: Path) -> None:
    checks_file.write_bytes(b"\xef\xbb\xbf" + checks_file.read_bytes())
    assert main(["epsilon", str(checks_file)]) == 0


PRINTED = """\
epsilon 0.9998 at delta 1e-06, adjacency add_remove, for 10,000 queries (nothing is spent)
noise    gaussian, multiplier 4.3040 of the sensitivity (scale 6.087 on the votes)
rows     slots, 20 x 4 shot(s), fill 1, a new sample for every query, 4 labels
         8000 declared units, sampling rate 0.01000
expected 19.6 rows in use, 3.22 shots each, 1.8 % empty slots
signal   right label 57 % (43 to 77), at most 62 % (45 to 84) whatever the noise; the noise takes 4 points
         57 % of rows are right, with a correlation of 0.55; rests on a GUESS: `dpicl rehearse FILE` measures it, free
advice   do not spend like this: the noise takes 4 points; ask fewer queries, declare more records, or raise epsilon
cost     42.0 calls per query: 400,000 private + 20,000 public calls, 102,449,475 tokens in, 420,000 out, money 52.06
"""


class TestPlanRefusesWhatGenerationWould:
    def run(self, *arguments: str) -> int:
        return main(["plan", "--epsilon", "1", "--no-compare", "--max-tokens", "5", *arguments])

    def test_a_delta_above_a_tenth_of_one_over_all_units(self, capsys: pytest.CaptureFixture[str]) -> None:
        sizes = ["--public-size", "card=500", "--public-size", "transfer=500"]
        assert self.run("--delta", "1e-4", *sizes) == 0
        assert self.run("--delta", "1.1e-4", *sizes) == 2
        assert "delta: expected at most 1/(10 * public_size) = 0.0001" in capsys.readouterr().err

    @pytest.mark.parametrize("sizes", [["card=500", "card=700"], ["500", "700"]])
    def test_sizes_declared_twice(self, sizes: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert self.run("--delta", "1e-6", *(part for size in sizes for part in ("--public-size", size))) == 2
        assert "found several" in capsys.readouterr().err

    @pytest.mark.parametrize("size", ["=500", "card=²", "9" * 5000, "card=-5", "0"])
    def test_sizes_that_are_no_counts(self, size: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.run("--delta", "1e-6", "--public-size", size) == 2
        assert "public" in capsys.readouterr().err

    def test_a_label_may_hold_an_equals_sign(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.run("--delta", "1e-6", "--public-size", "a=b=500") == 0
        assert "a=b: 500 declared units" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("key", "name"),
        [
            ("decoding.candidates", "Decoding.candidates"),
            ("rows.slots", "Rows.slots"),
            ("rows.shots", "Rows.shots"),
            ("rows.redraw_every", "Rows.redraw_every"),
            ("shots_per_label", "shots_per_label"),
        ],
    )
    def test_counts_below_one_by_name(self, key: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.run("--delta", "1e-6", "--public-size", "500", "--set", f"{key}=0") == 2
        error = capsys.readouterr().err
        assert name in error
        assert "found 0" in error


class TestSignalOfAPlan:
    SIZES = ("--public-size", "card=5000", "--public-size", "transfer=45")

    def plan(self, *more: str) -> int:
        design = ["--set", "rows.slots=40", "--max-tokens", "5", "--no-compare"]
        return main(["plan", "--epsilon", "2", "--delta", "1e-6", *self.SIZES, *design, *more])

    def test_it_is_that_of_the_smallest_declared_label(self, capsys: pytest.CaptureFixture[str]) -> None:
        """45 units cannot fill 40 slots as 5,000 do, whichever label is declared first."""
        assert self.plan("--json") == 0
        signal = json.loads(capsys.readouterr().out)["signal"]
        assert (signal["label"], signal["public_size"]) == ("transfer", 45)
        assert signal["empty_slot_prob"] == pytest.approx((1 - 1 / 40) ** 45, abs=1e-9)

    def test_the_default_branch_is_the_smallest_and_any_other_can_be_asked_for(self) -> None:
        plan = plan_generation(
            {"card": 5000, "transfer": 45}, epsilon=2.0, delta=1e-6, design=RowDesign.choose(rows="slots")
        )
        worst, best = plan.expected(0.6), plan.expected(0.6, label="card")
        assert worst == plan.expected(0.6, label="transfer")
        assert worst["right_token_prob"] < best["right_token_prob"]
        with pytest.raises(ConfigurationError, match="label"):
            plan.expected(0.6, label="nobody")

    def test_the_guess_is_stated_beside_what_rests_on_it(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.plan("--set", "guess.agreement=0.7") == 0
        text = capsys.readouterr().out
        assert "for transfer, the smallest declared label: signal-to-noise" in text
        assert "70.0 % of rows want the same token (guess.agreement: 70.0 % of one-shot); not measured" in text
        assert "rests on a GUESS" in text

    def test_where_noise_decides_it_advises_against_spending(self, capsys: pytest.CaptureFixture[str]) -> None:
        terms = ["plan", "--epsilon", "1", "--delta", "1e-6", "--no-compare"]
        assert main([*terms, "--public-size", "few=20", "--public-size", "many=5000"]) == 0
        assert "advice   do not spend like this: noise decides most tokens; use more records of few," in (
            capsys.readouterr().out
        )
        assert main([*terms, "--public-size", "5000"]) == 0
        assert "do not spend" not in capsys.readouterr().out

    def test_designs_that_differ_in_fill_can_be_told_apart_and_the_settings_take_it(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        terms = ["plan", "--public-size", "5000", "--epsilon", "1", "--delta", "1e-6", "--max-tokens", "4"]
        asked = [part for one in ("slots=10", "shots=4", "fill=2.5") for part in ("--set", f"rows.{one}")]
        assert main([*terms, *asked, "--json"]) == 0
        options = json.loads(capsys.readouterr().out)["options"]
        filled = [one["settings"]["rows"] for one in options if one["overfill"] == 2.5]
        assert {"slots": 10, "shots": 4, "fill": 2.5} in filled
        assert all(rows["fill"] == 2.5 for rows in filled)
        assert main([*terms, *asked]) == 0
        lines = [line[:50] for line in capsys.readouterr().out.splitlines() if " slots  10 x 4 " in line]
        assert len(set(lines)) == len(lines)

    def test_a_label_of_fewer_units_than_rows_has_the_rows_that_a_run_has(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        sizes = ["--public-size", "few=20", "--public-size", "many=5000"]
        assert main(["plan", "--epsilon", "1", "--delta", "1e-6", *sizes, "--json", "--no-compare"]) == 0
        planned = json.loads(capsys.readouterr().out)["plan"]
        private = PrivateExamples([], label_key="label", labels=("few", "many"), public_size={"few": 20, "many": 5000})
        many_words = [f" word{number}" for number in range(200)]
        words = FakeBackend(word_copier(many_words), vocabulary=many_words)
        with pytest.warns(NoisyPlanWarning, match="use more records of few"):
            run = DemonstrationSynthesizer.from_private_examples(
                private,
                llm=words,
                budget=Budget(epsilon=1.0, delta=1e-6),
                epsilon=1.0,
                decoding=Decoding(candidates="all"),
            )
        assert planned["num_slots"] == run.plan.to_dict()["num_slots"] == 20

    @pytest.mark.parametrize("size", [[], ["--public-size", "3000"]])
    def test_one_size_over_declared_labels_is_split_as_a_run_splits_it(
        self, size: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """`dpicl check --out` writes labels and one public_size."""
        config = tmp_path / "task.toml"
        declared = '[data]\nlabel_key = "q"\nlabels = ["x", "y"]\n'
        config.write_text(f"{declared}public_size = 3_000\n" if not size else declared)
        asked = ["plan", "--config", str(config), *size, "--epsilon", "1", "--delta", "1e-6", "--max-tokens", "3"]
        assert main([*asked, "--no-compare", "--json"]) == 0
        planned = json.loads(capsys.readouterr().out)
        words = [f" word{number}" for number in range(200)]
        run = DemonstrationSynthesizer.from_private_examples(
            PrivateExamples([], label_key="q", labels=("x", "y"), public_size=3000),
            llm=FakeBackend(word_copier(words), vocabulary=words),
            budget=Budget(epsilon=1.0, delta=1e-6),
            epsilon=1.0,
            max_tokens=3,
        )
        assert planned["plan"] == run.plan.to_dict()
        assert planned["cost"]["private_calls"] == run.plan.cost().private_calls

    @pytest.mark.parametrize("label", [{"max_tokens": 9}, {"values": ["x", "y"]}])
    def test_a_label_that_is_written_is_planned_and_one_of_a_list_is_free(
        self, label: dict[str, Any], capsys: pytest.CaptureFixture[str]
    ) -> None:
        table = toml_lines({"task.open_label": {"key": "q", **label}})[0].strip().replace(" = ", "=", 1)
        asked = ["plan", "--public-size", "4000", "--epsilon", "1", "--delta", "1e-6", "--max-tokens", "3"]
        assert main([*asked, "--set", table, "--set", "rows.units=20", "--set", "data.fields=['q']", "--json"]) == 0
        planned = json.loads(capsys.readouterr().out)
        words = [f" word{number}" for number in range(200)]
        run = DemonstrationSynthesizer.from_private_examples(
            PrivateExamples([], fields=("q",), public_size=4000),
            llm=FakeBackend(word_copier(words), vocabulary=words),
            budget=Budget(epsilon=1.0, delta=1e-6),
            epsilon=1.0,
            max_tokens=3,
            task=GenerationTask(open_label=OpenLabel("q", **label)),
            rows=Rows(units=20),
        )
        assert planned["plan"] == run.plan.to_dict()
        # What is compared writes the same fields; shapes of more shots have fewer rows.
        assert max(option["private_calls"] for option in planned["options"]) == run.plan.cost().private_calls

    def test_a_guess_of_votes_is_no_guess_of_tokens(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.plan("--set", "guess.skill=0.7") == 2
        assert "guess: expected agreement and public_agreement for a generation" in capsys.readouterr().err

    def test_rows_that_see_more_records_are_guessed_to_agree_more(self) -> None:
        plan = plan_generation(
            {None: 5000}, epsilon=2.0, delta=1e-6, design=RowDesign.choose(shots_per_slot=4, overfill=4.0)
        )
        signal = signal_of(plan, one_shot=0.6)
        assert signal["agreement"] == pytest.approx(0.7, abs=0.01)
        assert signal["right_token_prob"] == plan.expected(signal["agreement"])["right_token_prob"]

    def test_the_recommendation_is_the_first_line_of_the_comparison(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["plan", "--epsilon", "2", "--delta", "1e-6", "--public-size", "500", "--max-tokens", "2"]) == 0
        table, recommended = capsys.readouterr().out.split("best first:\n")[1].split("\n\n")
        mechanism, rows, num_slots, _, shots, _, redraw_every, *_ = table.splitlines()[1].split()
        found = tomllib.loads(recommended.removeprefix("recommended:"))
        shape = {"units": int(num_slots)} if rows == "units" else {"slots": int(num_slots), "shots": int(shots)}
        redrawn = {} if redraw_every == "1" else {"redraw_every": int(redraw_every)}
        assert found == {"noise": mechanism, "rows": {**shape, **redrawn}}

    def test_a_comparison_without_a_design_that_fits_says_why(self) -> None:
        with pytest.raises(ConfigurationError, match="public_size"):
            compare({None: 20}, epsilon=1.0, delta=1e-6)
        with pytest.raises(ConfigurationError, match="agreement"):
            compare({None: 500}, epsilon=1.0, delta=1e-6, agreement=1.5)


class TestPlanOfAnswersToQueries:
    TERMS = ("--max-queries", "100", "--epsilon", "1", "--delta", "1e-6")

    def run(self, *more: str, size: str = "2000") -> int:
        return main(["plan", "--method", "voting", *self.TERMS, "--public-size", size, *more])

    def json(self, capsys: pytest.CaptureFixture[str], *more: str, size: str = "2000") -> dict[str, Any]:
        assert self.run("--json", *more, size=size) == 0
        return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]

    def test_it_is_the_plan_of_the_rows_that_a_component_takes(self, capsys: pytest.CaptureFixture[str]) -> None:
        terms: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-6, "max_queries": 100}
        out = self.json(capsys, *THREE, "--no-compare")
        plan = plan_queries(2000, width=3, design=declared_design(RowHint(), 2000), **terms)
        assert plan.release.mechanism.name == "gaussian"
        assert out["plan"] == {"labels": 3, **plan.to_dict()}
        expected = plan.expected()
        noise = expected["without_noise_prob"] - expected["right_label_prob"]
        assert out["signal"] == {**expected, "noise_takes": pytest.approx(max(0.0, noise))}
        assert "recommendation" not in out

    def test_unit_rows_have_gumbel_noise_unless_other_noise_is_asked_for(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        rows = [*THREE, "--set", "rows.units=20", "--no-compare"]
        assert self.json(capsys, *rows)["plan"]["mechanism"] == "gumbel"
        asked = self.json(capsys, *rows, "--set", "noise=permute_and_flip")
        assert asked["plan"]["mechanism"] == "permute_and_flip"

    def test_the_comparison_starts_from_what_is_asked_for(self, capsys: pytest.CaptureFixture[str]) -> None:
        rows = ["--set", "rows.slots=10", "--set", "rows.shots=4", "--set", "noise=gumbel"]
        asked = ["--set", "answers.abstain_below=0.2", "--set", "guess.skill=0.7", "--set", "guess.correlation=0.2"]
        out = self.json(capsys, *THREE, *rows, *asked, "--set", "cost.price_in=2.0")
        assert (out["plan"]["num_slots"], out["plan"]["constants"], out["plan"]["candidates"]) == (10, [2.0], 4)
        terms: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-6, "max_queries": 100, "labels": 3}
        base = RowDesign.choose(rows="slots", num_slots=10, shots_per_slot=4)
        guess = RowGuess(skill=0.7, correlation=0.2)
        names = ("gumbel", "gaussian", "permute_and_flip")
        reads = {False: 2}  # the embedded model is calibrated
        options = compare_queries(
            2000, base=base, abstain_below=0.2, source=guess, mechanisms=names, readings=reads, **terms
        )
        hidden = {"settings", "money"}
        shown = [{name: value for name, value in one.items() if name not in hidden} for one in out["options"]]
        assert shown == [option.to_dict() for option in options]
        moneys = [option.plan.cost(calls_per_row=2).money(price_in=2.0, price_out=0.0) for option in options]
        assert [one["money"] for one in out["options"]] == pytest.approx(moneys)
        assert out["recommendation"] == out["options"][0]

    @pytest.mark.parametrize(
        ("given", "calls"),
        [
            ((), 2),  # the embedded model is calibrated, as a component calibrates it
            (("answers.calibrate=false",), 1),
            (("answers.votes=text",), 1),
            (("model.name=openai:gpt-4.1-mini",), 2),  # a chat model that reports log-probabilities is, too
            (("model.name=anthropic:claude-sonnet-4-5",), 1),  # votes by text
            (("cost.calls_per_row=3",), 3),
        ],
    )
    def test_a_row_makes_as_many_calls_as_that_of_a_component(
        self, given: tuple[str, ...], calls: int, capsys: pytest.CaptureFixture[str]
    ) -> None:
        options = [part for one in given for part in ("--set", one)]
        out = self.json(capsys, *THREE, "--set", "rows.slots=10", "--no-compare", *options)
        assert out["cost"]["calls_per_query"] == calls * 11

    @pytest.mark.parametrize(
        ("given", "answers"),
        [
            ((), LabelAnswers()),
            (("--set", "answers.calibrate=false"), LabelAnswers(calibrate=False)),
            (("--set", "answers.votes=text"), LabelAnswers(votes="text")),
        ],
    )
    def test_the_calls_are_those_that_a_component_with_a_chat_model_announces(
        self, given: tuple[str, ...], answers: LabelAnswers, capsys: pytest.CaptureFixture[str]
    ) -> None:
        private = PrivateExamples([], label_key="label", labels=("a", "b", "c"), public_size=2000)
        voter = DPVotingRunnable.from_private_examples(
            private,
            llm=ScriptedChat(answer=lambda _: {" a": 0.6, " b": 0.3}),
            budget=Budget(epsilon=1.0, delta=1e-6),
            epsilon=1.0,
            max_queries=100,
            suffix="{input}\nLabel:",
            answers=answers,
        )
        planned = self.json(capsys, *THREE, "--set", "model.name=openai:gpt-4.1-mini", "--no-compare", *given)["cost"]
        cost = voter.cost()
        assert (planned["private_calls"], planned["public_calls"]) == (cost.private_calls, cost.public_calls)

    def test_fewer_rows_show_what_they_save(self, capsys: pytest.CaptureFixture[str]) -> None:
        priced = ["--set", "cost.price_in=1.0", "--set", "cost.price_out=3.0", "--set", "cost.calls_per_row=2"]
        out = self.json(capsys, *THREE, *priced)
        found = {(one["num_slots"], one["shots_per_slot"], one["overfill"]): one for one in out["options"]}
        many, few = found[40, 4, 1.0], found[10, 4, 1.0]
        assert many["private_calls"] == 4 * few["private_calls"] == 2 * 40 * 100
        assert many["money"] > 3.5 * few["money"] > 0

    def test_a_recommended_fill_that_is_not_the_usual_one_is_in_the_settings(self) -> None:
        usual = RowDesign.choose(rows="slots", num_slots=10, shots_per_slot=4)
        assert usual.option() == {"slots": 10, "shots": 4}
        filled = RowDesign.choose(rows="slots", num_slots=10, shots_per_slot=4, overfill=1.5)
        assert filled.option() == {"slots": 10, "shots": 4, "fill": 1.5}
        settings = settings_of({"method": "voting", **_read_toml(toml_lines({"rows": filled.option()}))})
        assert RowDesign.of(settings.get("rows")) == filled

    def test_a_recommended_text_of_any_characters_is_a_settings_file(self, capsys: pytest.CaptureFixture[str]) -> None:
        label = '"\U0001f937"'
        assert self.run(*THREE, "--set", "rows.slots=10", "--set", f"answers.abstain_label={label}") == 0
        advice = capsys.readouterr().out.partition("recommended:")[2]
        assert _read_toml([advice])["answers"]["abstain_label"] == json.loads(label)
        other = {"names": {"a b": "\x7f"}}
        assert _read_toml(toml_lines(other)) == other

    def test_a_chance_is_a_range_with_its_ceiling_and_says_that_it_is_a_guess(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The example that once promised 99.8 %."""
        old = ["--max-queries", "10000", "--set", "guess.labels=4", "--set", "rows.units=40", "--no-compare"]
        assert self.run(*old, size="8000") == 0
        text = capsys.readouterr().out
        chance = r"(\d+) % \((\d+) to (\d+)\)"
        found = re.search(rf"right label {chance}, at most {chance} whatever the noise", text)
        assert found is not None
        right, low, high, most, most_low, most_high = map(int, found.groups())
        assert (right, most) == (55, 55)
        assert low < 42
        assert high > 75
        assert low <= most_low < most  # worse rows have a lower ceiling, and better ones a higher one
        assert high <= most_high
        assert "rests on a GUESS: `dpicl rehearse FILE` measures it, free" in text
        assert "99." not in text.partition("signal")[2]
        assert "do not spend" not in text

    def test_where_noise_takes_much_it_advises_against_spending(self, capsys: pytest.CaptureFixture[str]) -> None:
        rows = [*THREE, "--set", "rows.slots=20", "--set", "rows.shots=4", "--no-compare"]
        assert self.run(*rows, "--max-queries", "100", size="20000") == 0
        assert "do not spend" not in capsys.readouterr().out
        assert self.run(*rows, "--max-queries", "20000", size="2000") == 0
        text = capsys.readouterr().out
        found = re.search(r"advice   do not spend like this: the noise takes (\d+) points; ask fewer queries", text)
        assert found is not None
        assert int(found[1]) > 10

    def test_a_better_guess_is_a_better_chance(self, capsys: pytest.CaptureFixture[str]) -> None:
        def right(*guess: str) -> float:
            told = [part for item in guess for part in ("--set", f"guess.{item}")]
            return float(self.json(capsys, *THREE, *told, "--no-compare")["signal"]["right_label_prob"])

        assert right("skill=0.1") < right() < right("skill=0.6")
        assert right() < right("growth=0.2")
        assert right("correlation=0.9") < right("correlation=0.05")

    def test_calls_tokens_and_money_are_those_of_all_queries(self, capsys: pytest.CaptureFixture[str]) -> None:
        caps = {"record_tokens": 50, "query_tokens": 20, "answer_tokens": 2, "calls_per_row": 3}
        prices = {**caps, "price_in": 2.0, "price_out": 10.0}
        told = [part for name, value in prices.items() for part in ("--set", f"cost.{name}={value}")]
        cost = self.json(capsys, *THREE, *told, "--set", "rows.units=40", "--no-compare")["cost"]
        assert (cost["calls_per_query"], cost["private_calls"], cost["public_calls"]) == (123, 12_000, 300)
        assert (cost["tokens_in"], cost["tokens_out"]) == (12_000 * 70 + 300 * 20, 24_600)
        assert cost["money"] == pytest.approx((846_000 * 2 + 24_600 * 10) / 1e6)

    def test_the_labels_of_the_sizes_are_counted_and_their_units_added(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        plan = self.json(capsys, "--public-size", "transfer=900", "--no-compare", size="card=1100")["plan"]
        assert (plan["labels"], plan["candidates"], plan["public_size"]) == (2, 2, 2000)

    def test_a_fixed_sample_is_planned_under_replace_one(self, capsys: pytest.CaptureFixture[str]) -> None:
        fixed = [*TWO, "--set", "rows.sampling=fixed", "--no-compare"]
        plan = self.json(capsys, *fixed, "--adjacency", "replace_one")["plan"]
        assert (plan["sampling"], plan["rows"], plan["sampling_rate"]) == ("fixed", "slots", 0.02)
        assert self.run(*fixed) == 2
        assert "sampling: expected 'poisson'" in capsys.readouterr().err

    def test_in_words_it_says_whether_it_abstains(self, capsys: pytest.CaptureFixture[str]) -> None:
        rows = [*TWO, "--set", "rows.units=40", "--no-compare"]
        assert self.run(*rows) == 0
        assert "abstention" not in capsys.readouterr().out
        assert self.run(*rows, "--set", "answers.abstain_below=1.0", "--set", "guess.skill=0.1") == 0
        found = re.search(r"abstention (\d+)", capsys.readouterr().out)
        assert found is not None
        assert int(found[1]) > 60

    def test_the_command_of_the_page_prints_what_the_share_buys(self, capsys: pytest.CaptureFixture[str]) -> None:
        page = (Path(__file__).resolve().parents[3] / "docs" / "cli.md").read_text()
        shown = re.search(r"^dpicl (plan --method voting .*)$", page, re.MULTILINE)
        assert shown is not None
        assert main([*shlex.split(shown[1]), "--no-compare"]) == 0
        assert capsys.readouterr().out == PRINTED

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ([], "guess.labels: expected the number of labels, at least 2, found None"),
            (["--set", "guess.labels=1"], "guess.labels: expected the number of labels, at least 2, found 1"),
            ([*TWO, "--max-queries", "0"], "max_queries: expected an integer >= 1 and <= 1000000000000, found 0"),
            ([*TWO, "--set", "cost.calls_per_row=0"], "cost.calls_per_row: expected a number greater than or equal"),
            ([*TWO, "--set", "rows.slots=0"], "Rows.slots: expected a number greater than or equal to 1, found 0"),
            (
                [*TWO, "--set", "guess.agreement=0.6"],
                "expected skill, growth and correlation, or a rehearsal, for votes",
            ),
            ([*TWO, "--set", "guess.skill=1.5"], "guess.skill: expected a number less than or equal to 1"),
            ([*TWO, "--rehearsal", "r.json", "--set", "guess.skill=0.5"], "guess: expected a rehearsal, or guesses"),
            ([*TWO, "--rehearsal", "nowhere.json"], "nowhere.json"),
            ([*TWO, "--max-tokens", "5"], "found 'max_tokens'"),
            ([*TWO, "--set", "row.slots=1"], "found 'row'. Did you mean 'rows'"),
            ([*TWO, "--delta", "1e-3"], "delta: expected at most 1/(10 * public_size)"),
            ([*TWO, "--set", "answers.abstain_below=nan"], "LabelAnswers.abstain_below: expected"),
            (
                [*TWO, "--set", "rows.units=3000"],
                "public_size: expected at least 3000 units, one for each row, for every label, found",
            ),
        ],
    )
    def test_what_a_run_would_refuse_is_refused(
        self, given: list[str], said: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.run("--no-compare", *given) == 2
        assert said in capsys.readouterr().err

    @pytest.mark.parametrize("key", ["max_queries", "answers", "serving"])
    def test_a_generation_takes_none_of_its_settings(self, key: str, capsys: pytest.CaptureFixture[str]) -> None:
        terms = ["--epsilon", "1", "--delta", "1e-6", "--public-size", "2000", "--no-compare"]
        assert main(["plan", *terms, "--set", f"{key}=5"]) == 2
        assert f"found '{key}'" in capsys.readouterr().err

    def test_without_a_method_a_generation_is_planned_with_its_own_defaults(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        terms = ["--epsilon", "1", "--delta", "1e-6", "--public-size", "2000", "--no-compare", "--json"]
        assert main(["plan", *terms]) == main(["plan", "--method", "generation", *terms]) == 0
        first, second = re.split(r"(?<=\n\})\n(?=\{)", capsys.readouterr().out.strip())
        assert first == second
        plan = json.loads(first)["plan"]
        assert (plan["max_tokens"], plan["candidates"], plan["redraw_every"]) == ({"text": 60}, 101, 1)
        assert plan["shots_per_label"] == 1


class TestTheCommandItself:
    def test_without_a_command_it_prints_help_and_fails(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([]) == 2
        captured = capsys.readouterr()
        assert "usage: dpicl" in captured.err
        assert not captured.out

    def test_it_knows_its_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--version"]) == 0
        assert capsys.readouterr().out == f"dpicl {metadata.version('langchain-dpicl')}\n"

    def test_help_on_generation_says_what_it_spends_and_who_sees_the_records(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as caught:
            main(["generate", "--help"])
        assert caught.value.code == 0
        text = " ".join(capsys.readouterr().out.split())
        assert "The model sees the records" in text
        assert "Without --ledger each run has a budget of its own: two runs on the same records spend twice" in text

    def test_json_is_all_there_is_on_stdout(self, checks_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
        arguments = [sys.executable, "-m", "langchain_dpicl.cli.main", "epsilon", str(checks_file), "--json"]
        done = subprocess.run(arguments, capture_output=True, text=True, check=True)
        assert json.loads(done.stdout)
        sizes = ["--public-size", "500", "--max-tokens", "5"]
        assert main(["plan", "--epsilon", "1", "--delta", "1e-6", *sizes, "--no-compare", "--json"]) == 0
        assert json.loads(capfd.readouterr().out)

    @pytest.mark.parametrize(
        "error",
        [
            OSError("disk on fire"),
            UnicodeDecodeError("utf-8", b"CANARY", 0, 1, "bad"),
            json.JSONDecodeError("bad", "CANARY", 0),
        ],
    )
    def test_faults_of_reading_and_writing_end_without_a_traceback(
        self, error: Exception, monkeypatch: pytest.MonkeyPatch, checks_file: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def fail(_: Any) -> None:
            raise error

        monkeypatch.setattr("langchain_dpicl.cli.main.read_json", fail)
        assert main(["epsilon", str(checks_file)]) == 2
        said = capsys.readouterr().err
        assert said.startswith("dpicl: ")
        assert "CANARY" not in said

    def test_ctrl_c_has_its_usual_exit_code(self, monkeypatch: pytest.MonkeyPatch, checks_file: Path) -> None:
        def fail(_: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("langchain_dpicl.cli.main.read_json", fail)
        assert main(["epsilon", str(checks_file)]) == 130

    def test_what_nobody_foresaw_is_raised(self, monkeypatch: pytest.MonkeyPatch, checks_file: Path) -> None:
        def fail(_: Any) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr("langchain_dpicl.cli.main.read_json", fail)
        with pytest.raises(ZeroDivisionError):
            main(["epsilon", str(checks_file)])


def test_the_coverage_floor_holds_for_branches_alone_and_for_lines_alone() -> None:
    """Mixed, 990 of 1,000 lines and 15 of 20 branches would pass as 98.5 %."""
    summary = {"covered_lines": 990, "num_statements": 1000, "covered_branches": 15, "num_branches": 20}
    assert shares([summary]) == {"branches": 75.0, "lines": 99.0}
    assert shares([]) == {"branches": 0.0, "lines": 0.0}


CARD, TRANSFER = ("my card was declined", "card"), ("my transfer is late", "transfer")


def json_lines() -> bytes:
    rows = [CARD, TRANSFER] * 150
    return "".join(json.dumps({"text": text, "topic": topic}) + "\n" for text, topic in rows).encode()


def comma_separated() -> bytes:
    return ("text,topic\r\n" + f"{','.join(CARD)}\r\n{','.join(TRANSFER)}\r\n" * 150).encode()


@pytest.mark.parametrize(
    ("method", "key"),
    [
        ("voting", "answers=5"),
        ("pate", "rows=5"),
        ("generation", "decoding=x"),
        ("evolution", "evolution=5"),
        ("retrieval", "retrieval=x"),
        ("training", "training=x"),
        ("voting", "epsilon=x"),
        ("voting", "epsilon=0"),
        ("voting", "epsilon=[1]"),
        pytest.param("voting", f"max_queries={'9' * 5000}", id="a number of more digits than Python reads"),
    ],
)
def test_a_value_of_another_form_is_explained(method: str, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--epsilon", "1", "--delta", "1e-6", "--public-size", "1000", "--no-compare"]
    guessed = ["--set", "guess.labels=2", "--set", "guess.public_inputs=10"]
    guessed += ["--set", "max_queries=10"] if method == "voting" else []
    assert main(["plan", "--method", method, *given, *guessed, "--set", key]) == 2
    assert f"{key.partition('=')[0]}: expected" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 100_000], ids=["digits", "nesting"])
def test_settings_with_a_value_that_is_too_large_to_read_are_refused(value: str, tmp_path: Path) -> None:
    (tmp_path / "task.toml").write_text(f"max_queries = {value}")
    with pytest.raises(ConfigurationError, match=r"task.toml: expected TOML, found"):
        read_toml(tmp_path / "task.toml")


def generate(records: Path, out: Path | str, *more: str, model: str = "tests.engines:ENGINE") -> int:
    labels = ["--label-key", "topic", "--label", "card", "--label", "transfer"]
    sizes = ["--public-size", "card=150", "--public-size", "transfer=150"]
    design = ["--epsilon", "3", "--delta", "1e-6", "--set", "max_tokens=5"]
    return main(["generate", str(records), "--out", str(out), *labels, *sizes, *design, "--model", model, *more])


@pytest.fixture
def records(tmp_path: Path) -> Path:
    path = tmp_path / "records.jsonl"
    path.write_bytes(json_lines())
    return path


@pytest.fixture
def nothing_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that would build a synthesizer, and so declare a share, fails the test."""

    @functools.wraps(DemonstrationSynthesizer.from_private_examples)
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("a share was declared")

    monkeypatch.setattr(DemonstrationSynthesizer, "from_private_examples", fail)


class TestGenerate:
    @pytest.mark.parametrize(("name", "content"), [("r.jsonl", json_lines()), ("r.csv", comma_separated())])
    def test_records_in_demonstrations_and_report_out(
        self, name: str, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path, out = tmp_path / name, tmp_path / "released.json"
        path.write_bytes(content)
        assert generate(path, out) == 0
        released = json.loads(out.read_text())
        assert [example["topic"] for example in released["examples"]] == ["card", "transfer"]
        assert released["report"]["epsilon"] <= 3.0
        assert "add_remove" in capsys.readouterr().out

    def test_texts_of_the_embedded_model_come_with_a_note(
        self, records: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert generate(records, tmp_path / "one.json") == 0
        assert "the embedded model" not in capsys.readouterr().err
        assert generate(records, tmp_path / "two.json", "--set", "max_tokens=2", model="embedded") == 0
        assert "dpicl: note: the embedded model writes keywords" in capsys.readouterr().err

    def test_a_broken_line_is_reported_without_its_content(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "records.jsonl"
        path.write_text('{"text": "CANARY"\n')
        assert generate(path, tmp_path / "out.json") == 2
        captured = capsys.readouterr()
        assert "CANARY" not in captured.out + captured.err
        assert "broken line" in captured.err


@pytest.mark.parametrize("changed", [("--epsilon", "2"), ("--delta", "1e-7")])
def test_a_dry_run_refuses_a_share_that_the_ledger_holds_on_other_terms(
    changed: tuple[str, str],
    records: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["ledger", "create", "l.db", "--epsilon", "8", "--delta", "1e-4"]) == 0
    named = ("--ledger", "l.db", "--component", "mine", "--quiet")
    assert generate(records, "out.json", *named) == 0
    assert generate(records, "again.json", *named, "--dry-run") == 0
    monkeypatch.setattr("langchain_dpicl.privacy.ledger.budget._IDENTITIES", {})  # as in another process
    capsys.readouterr()
    for more in ((), ("--dry-run",)):
        assert generate(records, "again.json", *named, *changed, *more) == 3
        printed = capsys.readouterr()
        assert not printed.out
        assert "'mine': expected the terms sealed by its first reservation, found others in" in printed.err


class TestFormatsOfRecords:
    BOM = b"\xef\xbb\xbf"

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("excel.csv", BOM + comma_separated()),
            ("EXCEL.CSV", comma_separated()),
            ("bom.jsonl", BOM + json_lines()),
            ("lines.JSONL", json_lines()),
            ("packed.jsonl.gz", gzip.compress(json_lines())),
            ("packed.csv.gz", gzip.compress(BOM + comma_separated())),
            ("long.csv", comma_separated() + b"x" * 200_000 + b",card\r\n"),
        ],
    )
    def test_are_read_whoever_wrote_them(self, name: str, content: bytes, tmp_path: Path) -> None:
        path, out = tmp_path / name, tmp_path / "released.json"
        path.write_bytes(content)
        assert generate(path, out, "--quiet") == 0
        assert len(json.loads(out.read_text())["examples"]) == 2

    @pytest.mark.parametrize(
        ("name", "content", "said"),
        [
            ("records.txt", json_lines(), "records.txt: expected JSON lines or CSV, in a file that ends in .jsonl"),
            ("records", json_lines(), "records: expected JSON lines or CSV"),
            ("records.json", b'[{"text": "CANARY"}]', "records.json: expected JSON lines"),
            (
                "array.jsonl",
                b'[{"text": "CANARY"}]',
                "expected JSON lines (.jsonl) or CSV (.csv) in UTF-8, found a JSON a",
            ),
            ("array.jsonl", b'\n[\n  {"text": "CANARY"}\n]', "found a JSON array; write one record per line"),
            ("pretty.jsonl", b'{\n"text": "CANARY"\n}', "found a broken line"),
            ("twice.jsonl", b'{"text": "CANARY", "topic": "card", "topic": "card"}', "found a broken line"),
            ("latin.csv", "text,topic\nCANARY \xe9,card\n".encode("latin-1"), "in UTF-8, found a broken line"),
            ("open.csv", b'text,topic\n"CANARY,card\n', "found a broken line"),
            ("comma.csv", b"text,topic\nCANARY, unquoted,card\n", "found a broken line"),
            ("deep.jsonl", b"[" * 100_000, "expected JSON lines"),
            ("deep.jsonl", b'{"text":' * 100_000, "found a broken line"),
            ("packed.jsonl.gz", b"CANARY", "found a broken line"),
            ("packed.jsonl.gz", gzip.compress(json_lines())[:-20], "found a broken line"),
        ],
    )
    @pytest.mark.usefixtures("nothing_is_spent")
    def test_are_refused_by_name_without_content_or_place(
        self, name: str, content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / name
        path.write_bytes(content)
        assert generate(path, tmp_path / "out.json") == 2
        error = capsys.readouterr().err
        assert said in error
        assert "CANARY" not in error
        assert "CANA" not in error
        assert "line 2" not in error
        assert "line 3" not in error


class TestTheTargetFile:
    @pytest.mark.usefixtures("nothing_is_spent")
    @pytest.mark.parametrize("key", ["checkpoint", "budget.ledger", "budget.anchor", "guess.rehearsal"])
    def test_is_compared_with_a_path_that_no_file_has(
        self, key: str, records: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (config := tmp_path / "task.toml").write_text(f'{key} = "a\\u0000b"')
        assert generate(records, tmp_path / "out.json", "--config", str(config)) == 2
        said = "--out, or a path of the settings: expected the path of a file, found 'a\\x00b'"
        assert said in capsys.readouterr().err

    @pytest.mark.usefixtures("nothing_is_spent")
    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ("nowhere/out.json", "a folder that exists, found nowhere/out.json"),
            ("records.jsonl/out.json", "a folder that exists, found records.jsonl/out.json"),
            (".", "found a folder or a device: ."),
            (os.devnull, f"found a folder or a device: {os.devnull}"),
            ("/dev/stdout", "found a folder or a device: /dev/stdout. Name a new file."),
            ("records.jsonl", "expected another file than those that the command reads or keeps, found records.jsonl"),
            ("x" * 240, "expected a place that can be written, found xxx"),
        ],
    )
    def test_is_checked_before_anything_is_spent(
        self, given: str, said: str, records: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(records.parent)
        assert generate(records, given) == 2
        assert said in capsys.readouterr().err
        assert [path.name for path in records.parent.iterdir()] == ["records.jsonl"]

    @pytest.mark.usefixtures("nothing_is_spent")
    @pytest.mark.parametrize("more", [(), ("--ledger", "l.db", "--component", "a", "--checkpoint", "new.ckpt")])
    def test_that_is_there_already_is_not_replaced(
        self,
        records: Path,
        more: tuple[str, ...],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.chdir(records.parent)
        Path("out.json").write_text("of an earlier run")
        assert generate(records, "out.json", *more) == 2
        assert "--out: expected a file that does not exist yet, found 'out.json'. It may be" in capsys.readouterr().err
        assert Path("out.json").read_text() == "of an earlier run"

    @pytest.mark.usefixtures("nothing_is_spent")
    def test_is_not_compared_with_a_checkpoint_that_is_no_path(
        self, records: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(records.parent)
        Path("out.json").write_text("of an earlier run")
        assert generate(records, "out.json", "--ledger", "l.db", "--component", "a", "--set", "checkpoint=5") == 2
        assert "checkpoint: expected the path of a file, found int." in capsys.readouterr().err

    @pytest.mark.usefixtures("nothing_is_spent")
    @pytest.mark.parametrize("given", [("--checkpoint", "new.ckpt"), ("--set", "checkpoint=new.ckpt")])
    def test_of_a_run_whose_checkpoint_no_budget_outlives_is_not_begun(
        self,
        records: Path,
        given: tuple[str, str],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.chdir(records.parent)
        for more in ((), ("--dry-run",)):
            assert generate(records, "out.json", *given, *more) == 2
            assert "--checkpoint: expected a --ledger beside it, found None." in capsys.readouterr().err
        assert [path.name for path in records.parent.iterdir()] == ["records.jsonl"]

    @pytest.mark.parametrize("is_there", [True, False])
    def test_that_is_empty_as_mktemp_leaves_it_is_taken_and_a_new_one_is_linked(
        self, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_there: bool
    ) -> None:
        replaced, replace = list[Path](), Path.replace
        monkeypatch.setattr(Path, "replace", lambda part, target: replaced.append(target) or replace(part, target))
        out = tmp_path / "out.json"
        if is_there:
            out.touch()
        assert generate(records, out, "--quiet") == 0
        assert (out in replaced) == is_there  # another command's file of that name would be replaced as well
        assert len(ReleasedDemonstrations.load(out).examples) == 2

    def test_that_goes_away_meanwhile_costs_no_demonstration(
        self, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def fail(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(ReleasedDemonstrations, "save", fail)
        assert generate(records, tmp_path / "out.json", "--quiet") == 2
        captured = capsys.readouterr()
        assert "No space left on device" in captured.err
        released = ReleasedDemonstrations.from_json(captured.out)
        assert len(released.examples) == 2
        assert released.epsilon <= 3.0

    @pytest.mark.parametrize("is_there", [True, False])
    @pytest.mark.parametrize(("kind", "name"), [(DemonstrationSynthesizer, "stream"), (ReleasedDemonstrations, "save")])
    def test_that_another_command_writes_meanwhile_stays_and_the_result_is_printed(
        self,
        records: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        *,
        kind: Any,
        name: str,
        is_there: bool,
    ) -> None:
        ours, out = getattr(kind, name), tmp_path / "out.json"
        if is_there:
            out.touch()

        def beside(*given: Any, **options: Any) -> Any:
            out.write_text("of another command")
            return ours(*given, **options)

        monkeypatch.setattr(kind, name, beside)
        assert generate(records, out, "--quiet") == 2
        captured = capsys.readouterr()
        assert "--out: expected a file that no other command writes meanwhile, found" in captured.err
        assert out.read_text() == "of another command"
        assert len(ReleasedDemonstrations.from_json(captured.out).examples) == 2
        assert {path.name for path in tmp_path.iterdir()} == {"out.json", "records.jsonl"}

    def test_that_another_command_writes_while_records_are_read_stays_before_anything_is_charged(
        self, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "out.json"

        def beside(settings: Any) -> PrivateExamples:
            out.write_text("of another command")
            return private_examples(settings)

        def fail(*_: Any, **__: Any) -> None:
            raise AssertionError("it ran")

        monkeypatch.setattr("langchain_dpicl.cli.runs.private_examples", beside)
        monkeypatch.setattr(DemonstrationSynthesizer, "stream", fail)
        assert generate(records, out) == 2
        said = capsys.readouterr()
        assert "It may be paid for, and stays. This command charged nothing: name another file." in said.err
        assert (said.out, out.read_text()) == ("", "of another command")

    def test_is_written_where_the_file_system_has_no_links(
        self, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any) -> None:
            raise OSError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(Path, "hardlink_to", fail)
        assert generate(records, tmp_path / "out.json", "--quiet") == 0
        assert len(ReleasedDemonstrations.load(tmp_path / "out.json").examples) == 2
        assert {path.name for path in tmp_path.iterdir()} == {"out.json", "records.jsonl"}


class TestTheAnchorOption:
    def test_an_older_copy_of_the_ledger_is_refused(
        self, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert main(["ledger", "create", "l.db", "--epsilon", "8", "--delta", "1e-4", "--anchor", "anchor.json"]) == 0
        assert main(["ledger", "backup", "l.db", "older.db"]) == 0
        flag, key, named = ("--anchor", "anchor.json"), ("--set", "budget.anchor=anchor.json"), ("--component", "mine")
        assert generate(records, "out.json", "--ledger", "l.db", *flag, *named, "--quiet") == 0
        monkeypatch.setattr("langchain_dpicl.privacy.ledger.budget._IDENTITIES", {})  # as in another process
        assert generate(records, "two.json", "--ledger", "l.db", *flag, "--component", "other", "--dry-run") == 0
        for anchored in (flag, key, (*flag, "--dry-run")):
            assert generate(records, "two.json", "--ledger", "older.db", *anchored, *named) == 2
            assert "older copy" in capsys.readouterr().err
        assert not Path("two.json").exists()

    @pytest.mark.parametrize("more", [(), ("--dry-run",)])
    def test_is_for_a_ledger(
        self, more: tuple[str, ...], records: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert generate(records, tmp_path / "out.json", "--anchor", str(tmp_path / "anchor.json"), *more) == 2
        assert "--anchor: expected none without --ledger" in capsys.readouterr().err


class TestTheModelOption:
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
        monkeypatch.chdir(tmp_path)
        return tmp_path

    def test_finds_a_module_in_the_current_folder(self, records: Path, folder: Path) -> None:
        (folder / "engine_of_mine.py").write_text("from tests.engines import ENGINE\nclass Box:\n    inner = ENGINE\n")
        assert generate(records, "out.json", "--quiet", model="engine_of_mine:ENGINE") == 0
        assert generate(records, "two.json", "--quiet", model="engine_of_mine:Box.inner") == 0

    @pytest.mark.parametrize(
        ("model", "said"),
        [
            (
                "nowhere",
                "expected 'embedded', a folder that holds a model, provider:model or module:attribute, found 'nowhere'",
            ),
            (
                "",
                "--model: expected 'embedded', a folder that holds a model, provider:model or module:attribute, found ''",
            ),
            (":nothing", "expected 'embedded', a folder that holds a model, provider:model or module:attribute"),
            ("nowhere:nothing", "no module named 'nowhere'"),
            ("tests.nowhere:nothing", "no module named 'tests.nowhere'"),
            ("tests.engines:nothing", "the module 'tests.engines' has no attribute 'nothing'"),
            ("tests.spy_backend:SpyBackend", "found the class"),
            ("langchain_dpicl.cli.main:main", "found the function"),
            ("faulty_module:llm", "importing 'faulty_module' raised KeyError: 'API_KEY is not set'"),
            ("needy_module:llm", "raised ModuleNotFoundError: No module named 'not_installed'"),
            ("leaving_module:llm", "importing 'leaving_module' raised SystemExit: 3"),
        ],
    )
    def test_says_which_part_is_wrong(
        self, model: str, said: str, records: Path, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (folder / "faulty_module.py").write_text("raise KeyError('API_KEY is not set')")
        (folder / "needy_module.py").write_text("import not_installed")
        (folder / "leaving_module.py").write_text("import sys\nsys.exit(3)")
        assert generate(records, "out.json", model=model) == 2
        error = capsys.readouterr().err
        assert error.startswith("dpicl: --model: ")
        assert said in error


class TestAnInterruptedRun:
    @staticmethod
    def stop_at_the_second_text(patch: pytest.MonkeyPatch, error: BaseException) -> None:
        """However many tokens the first one has, which is left to the noise."""
        prompts: list[str] = []
        top_tokens = FakeBackend.top_tokens

        def stopped(self: FakeBackend, prompt: str, *given: Any, **options: Any) -> Any:
            prompts.append(prompt)
            if prompt != prompts[0]:
                raise error
            return top_tokens(self, prompt, *given, **options)

        patch.setattr(FakeBackend, "top_tokens", stopped)

    def test_says_what_is_saved_and_that_a_new_run_starts_over(
        self, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.stop_at_the_second_text(monkeypatch, ModelCallError("down"))
        out = tmp_path / "out.json"
        assert generate(records, out) == 4
        error = capsys.readouterr().err
        assert "1 of 2 demonstrations are released" in error
        assert f"What was released is saved in {out}. A new run starts over, on a budget of its own." in error
        assert "run()" not in error
        assert len(ReleasedDemonstrations.load(out).examples) == 1

    def test_by_hand_keeps_what_was_released(
        self, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.stop_at_the_second_text(monkeypatch, KeyboardInterrupt())
        out = tmp_path / "out.json"
        assert generate(records, out) == 130
        assert f"saved in {out}" in capsys.readouterr().err
        assert len(ReleasedDemonstrations.load(out).examples) == 1

    @pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
    @pytest.mark.parametrize("ignored", [False, True])
    def test_by_the_system_keeps_what_was_released_unless_the_signal_is_ignored(
        self, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, name: str, ignored: bool
    ) -> None:
        """A shell that ends may send SIGHUP again while the run saves."""
        number, streamed, save = (
            getattr(signal, name, signal.SIGTERM),
            DemonstrationSynthesizer.stream,
            ReleasedDemonstrations.save,
        )

        def send() -> None:
            assert signal.getsignal(number) != signal.SIG_DFL, "the signal would end the process"
            signal.raise_signal(number)

        def then_stopped(self: DemonstrationSynthesizer, **options: Any) -> Iterator[Any]:
            for item in streamed(self, **options):
                yield item
                send()

        def stopped_again(self: ReleasedDemonstrations, path: Path) -> None:
            send()
            save(self, path)

        monkeypatch.setattr(DemonstrationSynthesizer, "stream", then_stopped)
        monkeypatch.setattr(ReleasedDemonstrations, "save", stopped_again)
        before = signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
        try:
            assert generate(records, out := tmp_path / "out.json") == (0 if ignored else 130)
            assert signal.getsignal(number) == (signal.SIG_IGN if ignored else signal.SIG_DFL)
        finally:
            signal.signal(number, before)
        assert len(ReleasedDemonstrations.load(out).examples) == (2 if ignored else 1)

    def test_an_outage_of_the_ledger_behind_the_last_ticket_costs_no_demonstration(
        self,
        records: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        streamed = DemonstrationSynthesizer.stream

        def gone(*_: Any, **__: Any) -> None:
            raise LedgerUnavailableError("the database went away")

        def then_out(self: DemonstrationSynthesizer, **options: Any) -> Iterator[Any]:
            yield from streamed(self, **options)
            monkeypatch.setattr(SQLiteStore, "head", gone)

        ledger, out = str(tmp_path / "ledger.db"), tmp_path / "out.json"
        assert cli.main(["ledger", "create", ledger, "--epsilon", "4", "--delta", "1e-5"]) == 0
        monkeypatch.setattr(DemonstrationSynthesizer, "stream", then_out)
        assert generate(records, out, "--ledger", ledger, "--component", "mine") == 2
        assert "the database went away" in capsys.readouterr().err
        assert "mine: the ledger is out of reach: the report is of the ledger as it was read last." in caplog.text
        released = ReleasedDemonstrations.load(out)
        assert len(released.examples) == 2
        assert released.verify().ok

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    @pytest.mark.parametrize(
        "given", ["rows.sampling=poisson", "rows.sampling=disjoint", "decoding.released_words=true"]
    )
    @pytest.mark.parametrize("kept", [(), ("--checkpoint", "new.ckpt")])
    def test_a_run_without_tickets_left_writes_nothing(
        self, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: tuple[str, ...], given: str
    ) -> None:
        monkeypatch.chdir(tmp_path)
        ledger, out = str(tmp_path / "ledger.db"), tmp_path / "again.json"

        def run(path: Path, *more: str) -> Any:
            """In a process of its own, as each binds the records anew."""

            def generated(_: Any) -> tuple[int, str]:
                with contextlib.redirect_stderr(io.StringIO()) as said:
                    paid = ("--ledger", ledger, "--component", "mine", "--set", given, "--max-tokens=1")
                    code = generate(records, path, *paid, *more)
                return code, said.getvalue()

            return Child(generated).result()

        assert cli.main(["ledger", "create", ledger, "--epsilon", "4", "--delta", "1e-5"]) == 0
        assert run(tmp_path / "out.json")[0] == 0
        for _ in range(2):
            code, said = run(out, *kept)
            assert code == 3
            assert ("its checkpoint" if kept or "words" in given else "remaining") in said
            assert not out.exists()

    @pytest.mark.parametrize("more", [(), ("--set", "rows.sampling=disjoint")])
    def test_a_run_whose_paid_texts_are_all_empty_saves_its_report(
        self, records: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
    ) -> None:
        out = tmp_path / "out.json"
        assert generate(records, out, *more, model=f"{__name__}:ENDS") == 3
        assert f"What was released is saved in {out}, with its report." in capsys.readouterr().err
        released = ReleasedDemonstrations.load(out)
        assert (released.examples, released.epsilon) == ((), 3.0)

    def test_goes_on_with_its_checkpoint_and_saves_into_the_same_file(
        self, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert cli.main(["ledger", "create", "l.db", "--epsilon", "8", "--delta", "1e-4"]) == 0
        paid = ("--ledger", "l.db", "--checkpoint", "c.ckpt")
        with monkeypatch.context() as patch:
            TestAnInterruptedRun.stop_at_the_second_text(patch, ModelCallError("down"))
            assert generate(records, "out.json", *paid, "--component", "mine") == 4
        assert len(ReleasedDemonstrations.load("out.json").examples) == 1
        assert generate(records, "out.json", *paid, "--component", "other") == 2
        assert "--out: expected a file that does not exist yet" in capsys.readouterr().err
        monkeypatch.setattr("langchain_dpicl.privacy.ledger.budget._IDENTITIES", {})  # as in another process
        assert generate(records, "out.json", *paid, "--component", "mine") == 0
        assert len(ReleasedDemonstrations.load("out.json").examples) == 2

    def test_an_older_checkpoint_does_not_replace_what_is_paid_for(self, tmp_path: Path) -> None:
        def released(*texts: str, **shown: Any) -> ReleasedDemonstrations:
            report = {"private": False, "epsilon": "infinity", **shown}
            return ReleasedDemonstrations(tuple({"text": text} for text in texts), report, {})

        class Run:
            is_finished = True
            result = released("a")

            def stream(self, *, progress: bool | None) -> list[Any]:
                del progress
                assert self.result != released("a"), "nothing may be spent"
                self.result = released("a", "b", "c")
                return []

        released("a", "b").save(out := tmp_path / "out.json")
        settings = settings_of({"method": "generation"})
        arguments = argparse.Namespace(out=out, json=False, quiet=False)

        def again(run: Run) -> None:
            release(run, Call(arguments, settings, print, print), shown=str, budget=None)

        run = Run()
        refused = r"--checkpoint: expected all that '.*' holds, found 'less'"
        with pytest.raises(ConfigurationError, match=refused):
            again(run)
        assert ReleasedDemonstrations.load(out) == released("a", "b")
        for changed in (None, 5, {"text": "a"}):  # by hand
            out.write_text(json.dumps({"examples": changed, "report": {}}))
            with pytest.raises(ConfigurationError, match="--out: expected a list under 'examples', found"):
                again(run)
        out.write_text(json.dumps({"examples": [{"status": "waiting"}], "report": {}}))
        with pytest.raises(ConfigurationError, match=refused):
            again(run)
        released("a", "a").save(out)
        with pytest.raises(ConfigurationError, match=refused):
            again(run)
        released("b", "a").save(out)
        run.result = released("a", "b")
        arguments.quiet = True
        again(run)
        assert len(ReleasedDemonstrations.load(out).examples) == 3
        released("a", step=2, ledger_id="one").save(out)
        for older, said in (({"step": 1}, refused), ({"step": 2, "ledger_id": "two"}, "--ledger: expected")):
            run.result = released("b", **{"ledger_id": "one", **older})
            with pytest.raises(ConfigurationError, match=said):
                again(run)
        for report in ({"step": 2, "ledger_id": "one"}, {}):  # files of earlier versions say less
            released("a", **report).save(out)
            run.result = released("b", step=2, ledger_id="one")
            again(run)
            assert len(ReleasedDemonstrations.load(out).examples) == 3

    def test_a_reader_of_stdout_that_leaves_does_not_stop_it(self, records: Path, tmp_path: Path) -> None:
        out = tmp_path / "out.json"
        code = f"import sys; from tests.unit_tests.cli.test_cli import generate; sys.exit(generate({str(records)!r}, {str(out)!r}))"
        reader, writer = os.pipe()
        os.close(reader)
        root = Path(__file__).resolve().parents[3]
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, cwd=root, text=True, check=False
        )
        os.close(writer)
        assert done.returncode == 0, done.stderr
        assert "Broken pipe" not in done.stderr
        assert len(ReleasedDemonstrations.load(out).examples) == 2

    @pytest.mark.parametrize(
        ("typed", "written", "code"),
        [
            (["check", "nowhere.jsonl"], "stderr", 2),
            (["--nonsense"], "stderr", 2),
            ([], "stderr", 2),
            (["--help"], "stdout", 0),
            (["vote", "--help-all"], "stdout", 0),
        ],
    )
    def test_readers_that_leave_change_no_exit_code(
        self, typed: list[str], written: str, code: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
        reader, writer = os.pipe()
        os.close(reader)
        asked = [sys.executable, "-m", "langchain_dpicl.cli.main", *typed]
        root = Path(__file__).resolve().parents[3]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, written: writer}
        done = subprocess.run(asked, **streams, cwd=root, check=False)
        os.close(writer)
        assert done.returncode == code
        assert not done.stdout
        assert not done.stderr

    def test_a_stderr_that_is_closed_or_full_for_a_moment_is_told_the_next_words(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Full(io.StringIO):
            is_full = True

            def write(self, text: str) -> int:
                if self.is_full:
                    raise OSError(errno.ENOSPC, "no space")
                return super().write(text)

        stream = Full()
        monkeypatch.setattr(sys, "stderr", stream)
        assert main(["check", "nowhere.jsonl"]) == 2
        stream.is_full = False
        assert main(["check", "nowhere.jsonl"]) == 2
        assert "nowhere.jsonl" in stream.getvalue()
        stream.close()
        assert main(["check", "nowhere.jsonl"]) == 2

    @pytest.mark.parametrize("closed", ["stdin", "stdout", "stderr"])
    def test_a_stream_that_the_shell_closed_does_not_stop_it(
        self, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: str
    ) -> None:
        out = tmp_path / "out.json"
        monkeypatch.setattr(sys, closed, None)
        assert generate(str(records), str(out)) == 0
        assert len(ReleasedDemonstrations.load(out).examples) == 2
        getattr(sys, closed).close()

    @pytest.mark.usefixtures("nothing_is_spent")
    @pytest.mark.parametrize(
        "typed",
        [
            ("plan", "--epsilon", "3", "--delta", "1e-6", "--public-size", "300", "--no-compare"),
            ("ledger", "create", "ledger.db", "--epsilon", "4", "--delta", "1e-5"),
            ("vote", "records.jsonl", "--query", "x"),
            ("generate", "records.jsonl", "--out", "out.json", "--dry-run"),
            ("--version",),
        ],
    )
    def test_a_closed_stdout_is_refused_where_nothing_else_would_hold_what_is_printed(
        self, typed: tuple[str, ...], records: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(records.parent)
        monkeypatch.setattr(sys, "stdout", None)
        assert main([*typed]) == 2
        sys.stdout.close()
        assert (
            "dpicl: stdout: expected an open stream for what is printed, found a closed one." in capsys.readouterr().err
        )
        assert [path.name for path in Path().iterdir()] == ["records.jsonl"]

    @pytest.mark.parametrize("typed", [["--version"], ["epsilon", "checks.json"]])
    def test_a_full_stdout_is_named(
        self, typed: list[str], checks_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(checks_file.parent)
        with Path("/dev/full").open("w", encoding="utf-8") as full:
            monkeypatch.setattr(sys, "stdout", full)
            assert main(typed) == 2
        assert capsys.readouterr().err == "dpicl: stdout: No space left on device.\n"

    def test_a_question_to_a_closed_terminal_is_answered_with_yes_in_advance(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        (path := tmp_path / "public.jsonl").write_text(json.dumps({"text": "a", "label": "b"}) + "\n")
        monkeypatch.setattr(sys, "stdin", None)
        assert main(["rehearse", str(path)]) == 2
        assert capsys.readouterr().err.startswith("dpicl: ")
        sys.stdin.close()

    def test_a_stdout_without_unicode_still_gets_json(self, monkeypatch: pytest.MonkeyPatch) -> None:
        written = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
        cli._say(json_line({"text": "caf\xe9"}))
        cli._say("caf\xe9")
        sys.stdout.flush()
        first, second = written.getvalue().splitlines()
        assert json.loads(first) == {"text": "caf\xe9"}
        assert second == b"caf\\xe9"


@pytest.mark.parametrize(
    ("answers", "mechanism"),
    [("scores=true", "gaussian"), ("votes=soft", "gumbel"), ("abstain_below=auto", "gumbel")],
)
def test_a_plan_of_votes_is_that_of_the_answers_that_are_asked_for(
    answers: str, mechanism: str, capsys: pytest.CaptureFixture[str]
) -> None:
    terms = ["--epsilon", "1", "--delta", "1e-6", "--public-size", "2000", "--max-queries", "100", *TWO, "--no-compare"]
    terms += [] if mechanism == "gaussian" else ["--set", "rows.units=40"]
    assert main(["plan", "--method", "voting", *terms, "--set", f"answers.{answers}", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert plan["mechanism"] == mechanism
    assert bool(plan["constants"]) == (answers == "abstain_below=auto")


@pytest.mark.parametrize(
    ("method", "terms"),
    [
        ("voting", ["--public-size", "8000", "--max-queries", "500", *TWO]),
        ("training", ["--public-size", "8000", "--set", "training={expected_batch_size=30,steps=5}"]),
        ("evolution", ["--public-size", "900", "--set", "evolution.rounds=3"]),
        ("generation", ["--public-size", "8000"]),
    ],
)
def test_the_noise_that_a_plan_prints_is_enough(
    method: str, terms: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["plan", "--method", method, *terms, "--epsilon", "1", "--delta", "1e-6", "--no-compare"]
    assert main(asked) == 0
    printed = re.search(r"multiplier ([\d.]+)", capsys.readouterr().out)
    assert printed is not None
    assert main([*asked, "--set", f"noise.multiplier={printed[1]}", "--json"]) == 0, capsys.readouterr().err
    exact = json.loads(capsys.readouterr().out)["plan"]["noise_multiplier"]
    assert exact == float(printed[1])


def test_a_refusal_of_too_little_noise_rounds_its_cost_up(capsys: pytest.CaptureFixture[str]) -> None:
    terms = ["--epsilon", "1", "--delta", "1e-6", "--public-size", "8000", "--max-queries", "500", *TWO, "--no-compare"]
    assert main(["plan", "--method", "voting", *terms, "--set", "noise.multiplier=1.2507"]) == 2
    assert "costs at most epsilon 1.0, found 1.00002" in capsys.readouterr().err


def test_a_price_below_zero_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    terms = ["--epsilon", "1", "--delta", "1e-6", "--public-size", "500", "--no-compare"]
    assert main(["plan", *terms, "--set", "cost.price_in=-1.0"]) == 2
    assert "cost.price_in: expected a number greater than or equal to 0" in capsys.readouterr().err


def test_a_share_of_a_budget_is_planned_at_its_part_of_delta(capsys: pytest.CaptureFixture[str]) -> None:
    """As it is declared: a run at the whole delta would add less noise than its share pays for."""
    terms = ["--delta", "1e-6", "--public-size", "500", "--no-compare", "--set", "rows.units=20", "--json"]
    plans = []
    for share in (["--epsilon", "4", "--set", "epsilon=1.0"], ["--epsilon", "1", "--set", "noise.delta=2.5e-7"]):
        assert main(["plan", *terms, *share]) == 0
        plans.append(json.loads(capsys.readouterr().out)["plan"])
    assert plans[0]["delta"] == plans[1]["delta"] == Budget(epsilon=4.0, delta=1e-6).default_delta(1.0) == 2.5e-7
    assert plans[0]["noise_multiplier"] == plans[1]["noise_multiplier"]
    assert main(["plan", *terms, "--epsilon", "4", "--delta", "3e-4", "--set", "epsilon=1.0"]) == 2  # as the budget is
    assert "delta: expected at most 1/(10 * public_size)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--epsilon", "0"], "budget.epsilon: expected a number greater than 0"),
        (["--adjacency", "substitution"], "budget.adjacency: expected 'add_remove' or 'replace_one'"),
        (["--set", "data.text=1"], "data: expected options among ["),
        (["--set", "ledger=budget.db"], "found 'ledger'. It stands at the top of a file of `dpicl serve`;"),
    ],
)
def test_faults_of_a_table_have_the_name_that_it_has_in_a_file(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    terms = ["plan", "--epsilon", "1", "--delta", "1e-6", "--public-size", "500", "--no-compare"]
    assert main([*terms, *given]) == 2
    assert said in capsys.readouterr().err


def test_keys_of_another_command_are_named_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    terms = ["plan", "--epsilon", "1", "--delta", "1e-6", "--public-size", "3000", "--no-compare"]
    assert main([*terms, "--set", "task.example_prompt={text}"]) == 2
    said = "found 'example_prompt'. These keys are of FewShotTask"
    assert said in capsys.readouterr().err
    assert main([*terms, "--set", "task.nothing=1"]) == 2
    assert "These keys" not in capsys.readouterr().err


def test_wordings_are_an_array_of_tables_and_take_slots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = tmp_path / "task.toml"
    settings.write_text(
        'method = "voting"\nmax_queries = 20\n'
        '[data]\nlabel_key = "queue"\npublic_size = {card = 300, transfer = 300}\n'
        '[budget]\nepsilon = 4.0\ndelta = 1e-5\n[task]\nsuffix = "Message: {input}\\nQueue:"\n'
        '[[task.wordings]]\nsuffix = "Text: {input}\\nqueue:"\n[[task.wordings]]\nprefix = "Sort."\n'
    )
    for method, more in (("voting", []), ("pate", ["--set", "guess.public_inputs=40"])):
        plan = ["plan", "--config", str(settings), "--method", method, *more]
        assert main([*plan, "--json"]) == 0
        out = json.loads(capsys.readouterr().out)
        assert {option["rows"] for option in out["options"]} == {"slots"}
        assert main([*plan, "--set", "rows.units=40"]) == 2
        assert "expected a slot for each of 3 wordings" in capsys.readouterr().err
    retrieval = ["--method", "retrieval", "--set", "retrieval.participations=4"]
    retrieval += ["--set", "retrieval.similarity_threshold=0.5", "--set", "retrieval.embeddings=a:b"]
    assert main(["plan", "--config", str(settings), *retrieval]) == 2
    assert "FewShotTask.wordings: expected none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("said", "typed"),
    [
        (
            "take Serving(on_exhausted='zero_shot').",
            "take serving.on_exhausted=zero_shot (--set, or the settings file).",
        ),
        (
            "Give Noise(multiplier=..., delta=...)",
            "Give noise.multiplier=... noise.delta=... (--set, or the settings file)",
        ),
        ("give text_key=. (line 5)", "give --text-key (data.text_key). (line 5)"),
        ("Give rows=Rows(slots=...), or none.", "Give rows.slots=... (--set, or the settings file), or none."),
        ("expected a share, found None. Give epsilon=...", "expected a share, found None. Give --epsilon"),
        (
            "words: expected none, found True. Give Topics(words=8).",
            "words: expected none, found True. Give topics.words=8 (--set, or the settings file).",
        ),
        (
            "a record has an integer. Give labels_as_text=True, which reads them.",
            "a record has an integer. Give data.labels_as_text=true (--set, or the settings file), which reads them.",
        ),
        ("a record has an integer. Write str(...) around it.", "a record has an integer. Write it as text."),
        # What is no advice, has no table, or was found or typed, stays.
        ("Give FewShotTask(labels=('yes', 'no'))", "Give FewShotTask(labels=('yes', 'no'))"),
        ("Give Similar(x=1)", "Give Similar(x=1)"),
        ("Rows(n=3)/none.jsonl: No such file", "Rows(n=3)/none.jsonl: No such file"),
        ("found ['rows=Rows(slots=3)'], or Rows(slots=3)", "found ['rows=Rows(slots=3)'], or Rows(slots=3)"),
        ("found public_size=3, epsilon=0.5", "found public_size=3, epsilon=0.5"),
        ("Give Noise(" + "bbbbbbbbbb=" * 4_000, "Give Noise(" + "bbbbbbbbbb=" * 4_000),
    ],
)
def test_advice_for_python_is_told_as_it_is_typed(said: str, typed: str) -> None:
    assert as_typed(said) == typed


def test_options_that_a_setting_holds_are_told_by_the_name_of_its_table() -> None:
    tables: dict[str, str] = {}
    for method in METHODS:
        component = component_of(method)
        takes = inspect.signature(getattr(component, "from_private_examples", component)).parameters
        for name, parameter in takes.items():
            words = set(re.findall(r"\w+", str(parameter.annotation)))
            if name not in {"llm", "prompt"}:  # no table of settings
                tables |= dict.fromkeys(words & {option.__name__ for option in OPTIONS}, name)
    for option in OPTIONS:
        said, table = f"give {option.__name__}(x=1)", tables.get(option.__name__)
        assert as_typed(said) == (said if table is None else f"give {table}.x=1 (--set, or the settings file)")


def test_a_file_that_is_not_there_is_named_as_it_was_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "give Rows(n=3)/none.jsonl"]) == 2
    assert "give Rows(n=3)/none.jsonl: No such file or directory." in capsys.readouterr().err
