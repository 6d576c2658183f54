"""Plans of the logit mechanisms: expected signal by hand, comparison, local cost, and the command line around them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import io
import json
import math
import re
import shlex
import tomllib
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from langchain_dpicl.backends.hf.backend import HuggingFaceBackend
from langchain_dpicl.cli import plan as _cli_plan
from langchain_dpicl.cli.inputs import Model, load_model, settings_of
from langchain_dpicl.cli.main import main
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.generation.plan import (
    TOKEN_MECHANISMS,
    DesignOption,
    GenerationPlan,
    LocalCost,
    Segment,
    TokenRule,
    best_drawn,
    local_cost,
    plan_generation,
    published_epsilon,
    signal_of,
    thriftiest,
)
from langchain_dpicl.generation.synthesizer import DemonstrationSynthesizer
from langchain_dpicl.options import LogitNoise, Noise, noise_of
from langchain_dpicl.planning.expected_utility import RowDesign, occupancy, token_signal
from langchain_dpicl.privacy.extensions.logit_sums import LOGIT_MECHANISMS
from langchain_dpicl.privacy.extensions.random_allocation import AllocatedSlots
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.privacy.mechanisms.release_plan import PoissonSlots, ReleasePlan

PAGE = Path(__file__).resolve().parents[3] / "docs" / "cli.md"
SLOTS = PoissonSlots(sampling_rate=0.1, num_slots=10, shots_per_slot=1)
# Eight of ten slots are filled and say .6, .2, .2; the public prompt says .15, .425, .425.
GUESS = {"rows": 8.0, "agreement": 0.6, "candidates": 3, "public_agreement": 0.15}


def release_of(mechanism: str, **parameters: Any) -> ReleasePlan:
    return TokenRule(mechanism, **parameters).plan(SLOTS, num_rows=10, noise_multiplier=1.0)


class TestExpectedSignal:
    @pytest.mark.parametrize(
        ("mechanism", "parameters", "expected"),
        [
            # Differences log 4, log(8/17) twice; less their median: 2.140, 0, 0; clipped 1, 0, 0; times 8/10.
            ("recentered_clip", {"clip": 1.0, "temperature": 1.0}, 0.281992),
            ("recentered_clip", {"clip": 50.0, "temperature": 1.0}, 0.494363),
            ("recentered_clip", {"clip": 1.0, "temperature": 2.0}, 0.307066),
            # Differences as they are: 1, -.754, -.754 once clipped.
            ("difference_clip", {"clip": 1.0, "temperature": 1.0}, 0.417855),
            # Rows 1, -.0986, -.0986, half of 8/10 of them; public -.0415, 1, 1, half of that.
            ("clip_and_blend", {"clip": 1.0, "temperature": 1.0}, 0.315522),
        ],
    )
    def test_is_the_softmax_of_what_is_clipped_and_added_by_hand(
        self, mechanism: str, parameters: dict[str, float], expected: float
    ) -> None:
        assert token_signal(release_of(mechanism, **parameters), **GUESS)["right_token_prob"] == pytest.approx(
            expected, abs=2e-6
        )

    @pytest.mark.parametrize("mechanism", LOGIT_MECHANISMS)
    def test_is_what_released_tokens_are(self, mechanism: str) -> None:
        """3,000 draws of the mechanism itself: within 6 standard errors (false alarms below 1e-8)."""
        plan = release_of(mechanism, clip=1.5, temperature=0.7)
        rows = np.full((10, 3), np.nan)
        shift = 0.0 if mechanism == "difference_clip" else 3.0  # the others do not feel a row's constant
        rows[:8] = np.log([0.6, 0.2, 0.2]) + shift
        total = plan.bound(rows, width=3, public=np.log([0.15, 0.425, 0.425]))
        seen = np.mean([int(plan.mechanism.release(total, rng=SYSTEM_RANDOM).index == 0) for _ in range(3000)])
        chance = token_signal(plan, **GUESS)["right_token_prob"]
        assert seen == pytest.approx(chance, abs=6 * math.sqrt(chance * (1 - chance) / 3000))

    def test_at_unlimited_epsilon_it_is_the_softmax_of_unclipped_scores(self) -> None:
        """With every slot filled that is what the rows say, whatever the public prompt says; sums pick their largest."""
        signal = token_signal(release_of("difference_clip", clip=0.1, temperature=1.0), **{**GUESS, "rows": 10.0})
        assert signal["ceiling_prob"] == pytest.approx(0.6, abs=1e-6)
        assert signal["right_token_prob"] < 0.2
        sums = TokenRule("gumbel").plan(SLOTS, num_rows=10, noise_multiplier=1.0)
        assert token_signal(sums, **GUESS)["ceiling_prob"] == 1.0
        assert token_signal(sums, **{**GUESS, "agreement": 0.3})["ceiling_prob"] == 0.0

    def test_signal_to_noise_is_the_gap_over_the_deviation_of_gumbel_noise(self) -> None:
        signal = token_signal(release_of("recentered_clip", clip=1.0, temperature=2.0), **GUESS)
        gap = math.log(0.15 / 0.425) + 0.8
        assert signal["signal_to_noise"] == pytest.approx(gap / (2.0 * math.pi / math.sqrt(6)), abs=1e-6)

    @pytest.mark.parametrize("agreement", [0.0, 1.0])
    @pytest.mark.parametrize("mechanism", LOGIT_MECHANISMS)
    def test_certain_rows_are_no_trouble(self, mechanism: str, agreement: float) -> None:
        plan = release_of(mechanism, temperature=1.0)
        assert 0.0 <= token_signal(plan, rows=8.0, agreement=agreement, candidates=50)["right_token_prob"] <= 1.0

    def test_the_public_guess_is_stated_and_does_not_grow_with_the_shots(self) -> None:
        design = RowDesign.choose(rows="slots", num_slots=10, shots_per_slot=4)
        plan = priced({None: 1000}, design=design, mechanism="recentered_clip")
        signal = signal_of(plan, one_shot=0.6)
        assert signal["agreement"] > 0.65
        assert signal["public_agreement"] == pytest.approx(0.15)
        assert plan.expected(0.6)["public_agreement"] == pytest.approx(0.15)
        better = signal_of(plan, one_shot=0.6, public_agreement=0.4)
        assert better["right_token_prob"] > signal["right_token_prob"]
        with pytest.raises(ConfigurationError, match="public_agreement"):
            plan.expected(0.6, public_agreement=1.5)
        assert "public_agreement" not in priced({None: 1000}, design=design).expected(0.6)


def priced(sizes: dict[str | None, int], *, max_tokens: int = 10, **terms: Any) -> GenerationPlan:
    given = {"epsilon": None, "noise_multiplier": 4.0, "delta": 1e-6, "segments": (Segment("text", max_tokens),)}
    return plan_generation(sizes, **{**given, **terms})


def test_a_slot_of_a_batch_is_as_full_as_its_share_of_the_deal() -> None:
    """100 units, 5 batches of 4 slots: a slot is empty where none of the units that join stands in it."""
    sampler = AllocatedSlots(0.5, num_batches=5, num_slots=4, shots_per_slot=3)
    fill = occupancy(TokenRule("gumbel").plan(sampler, num_rows=4, noise_multiplier=1.0), 100)
    assert fill.empty == pytest.approx((1 - 0.5 / 20) ** 100)
    assert fill.rows == pytest.approx(4 * (1 - fill.empty))


class TestLocalCost:
    FIXED = RowDesign.choose(sampling="fixed", num_slots=5, shots_per_slot=2)

    def test_a_prompt_is_read_once_per_sample_and_decoded_after_that(self) -> None:
        """10 tokens on samples of 4, 4 and 2; 5 slots of 2 records and the public row; 3 demonstrations."""
        plan = priced({None: 1000}, design=self.FIXED, adjacency="replace_one", redraw_every=4, shots_per_label=3)
        cost = local_cost(plan, record_tokens=50, instruction_tokens=10)
        read = 3 * 5 * (2 * 50) + 6 * (3 * 10 + 0 + 4 + 8)
        assert cost == LocalCost(prefills=3 * 18, prefilled_tokens=3 * read, decoded_tokens=3 * 6 * (3 + 3 + 1))
        assert cost.tokens == 3 * read + 126

    def test_with_a_sample_for_every_token_nothing_is_decoded(self) -> None:
        plan = priced({None: 1000})
        cost, calls = local_cost(plan), plan.cost()
        assert (cost.decoded_tokens, cost.prefills) == (0, calls.private_calls + calls.public_calls)
        assert cost.prefilled_tokens == calls.tokens_in - cost.prefills // 2  # counted at T/2 there, (T - 1)/2 here

    def test_a_second_field_is_read_behind_the_first(self) -> None:
        fields = (Segment("label", 3), Segment("text", 2))
        plan = priced({None: 1000}, design=self.FIXED, adjacency="replace_one", redraw_every=3, segments=fields)
        cost = local_cost(plan, record_tokens=1, instruction_tokens=0)
        assert cost == LocalCost(prefills=12, prefilled_tokens=2 * 5 * 2 + 6 * 3, decoded_tokens=6 * (2 + 1))


class TestThePapersAccounting:
    def test_composes_pure_tokens_by_advanced_composition(self) -> None:
        """.25 per token, 10 tokens, delta 1e-6: .25 * sqrt(20 ln 1e6) + 10 * .25 * (e^.25 - 1)."""
        plan = priced({None: 1000}, mechanism="clip_and_blend")
        assert published_epsilon(plan) == pytest.approx(4.8657, abs=1e-4)
        assert plan.epsilon < 0.5

    def test_counts_the_tokens_that_one_unit_takes_part_in(self) -> None:
        single = priced({None: 1000}, mechanism="clip_and_blend", max_tokens=20)
        twice = priced({None: 1000}, mechanism="clip_and_blend", shots_per_label=2)
        moved = priced({"a": 1000, "b": 1000}, mechanism="clip_and_blend", adjacency="replace_one")
        assert published_epsilon(single) == published_epsilon(twice) == published_epsilon(moved)
        disjoint = RowDesign.choose(sampling="disjoint")
        once = priced({None: 1000}, mechanism="clip_and_blend", shots_per_label=2, design=disjoint)
        assert published_epsilon(once) == pytest.approx(4.8657, abs=1e-4)

    def test_is_none_where_the_paper_has_none(self) -> None:
        assert published_epsilon(priced({None: 1000})) is None
        plan = priced({None: 1000}, mechanism="clip_and_blend")
        loud = dataclasses.replace(plan, branches=((None, plan.release.with_noise(1e-3)),))
        assert published_epsilon(loud) is None

    def test_is_printed_beside_ours(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        blend = {"type": "exp_mech", "clip": 1.0, "slots": 40, "tau": 1.0, "count": 100}
        noisy = {"type": "gaussian", "noise_multiplier": 1.0, "count": 1}
        terms = {"adjacency": "replace_one", "delta": 1e-6}
        checks = [{"id": "blend", "mechanisms": [blend], **terms}, {"id": "noisy", "mechanisms": [noisy], **terms}]
        (tmp_path / "checks.json").write_text(json.dumps(checks))
        assert main(["epsilon", str(tmp_path / "checks.json")]) == 0
        _, first, second = capsys.readouterr().out.splitlines()
        assert first == "blend  2.4191  (the paper's accounting: 6.30824)"
        assert "paper" not in second


@dataclass
class Shown:
    text: str
    out: dict[str, Any]


@pytest.fixture(scope="module")
def shown() -> Shown:
    """What the command of the page prints; the second print is free."""
    found = re.search(r"^dpicl (plan --public-size 500 .*)$", PAGE.read_text(), re.MULTILINE)
    assert found is not None
    printed = []
    for more in ([], ["--json"]):
        with redirect_stdout(io.StringIO()) as stream:
            assert main([*shlex.split(found[1]), *more]) == 0
        printed.append(stream.getvalue())
    return Shown(printed[0], json.loads(printed[1]))


class TestComparison:
    def test_it_stands_below_the_plan_that_was_asked_for(self, shown: Shown) -> None:
        assert shown.text.startswith("epsilon 0.4999 at delta 1e-06, adjacency add_remove (nothing is spent)")

    def test_it_has_every_mechanism_and_every_way_to_sample(self, shown: Shown) -> None:
        options = shown.out["options"]
        assert {option["mechanism"] for option in options} == set(TOKEN_MECHANISMS)
        drawn = [option for option in options if option["mechanism"] == "recentered_clip"]
        assert {option["redraw_every"] for option in drawn if option["sampling"] == "poisson"} == {1, 5, 40}
        assert {option["redraw_every"] for option in drawn if option["sampling"] == "disjoint"} == {40}
        chances = [round(option["right_token_prob"], 3) for option in options]
        assert chances == sorted(chances, reverse=True)

    def test_mechanisms_with_one_event_have_one_noise(self, shown: Shown) -> None:
        noise: dict[tuple[Any, ...], set[float]] = {}
        for option in shown.out["options"]:
            if option["mechanism"] in {"gumbel", *LOGIT_MECHANISMS}:
                key = tuple(option[name] for name in ("rows", "num_slots", "sampling", "redraw_every"))
                noise.setdefault(key, set()).add(option["noise_multiplier"])
        assert max(map(len, noise.values())) == 1
        assert len(noise) >= 6

    def test_a_starved_share_leaves_less_to_sums_than_to_logits_and_a_new_sample_per_token_more(
        self, shown: Shown
    ) -> None:
        right = {(o["mechanism"], o["rows"], o["redraw_every"]): o["right_token_prob"] for o in shown.out["options"]}
        assert right["gumbel", "units", 40] < 0.3
        assert right["recentered_clip", "units", 40] > 0.59
        assert right["gumbel", "units", 1] > 0.9

    def test_what_is_recommended_is_a_settings_file(self, shown: Shown) -> None:
        assert shown.out["recommendation"] == shown.out["options"][0]
        assert shown.out["recommendation_drawn"]["mechanism"] in LOGIT_MECHANISMS
        for name in ("recommendation", "recommendation_drawn", "recommendation_local"):
            best = shown.out[name]
            assert best in shown.out["options"]
            assert "\n".join(_cli_plan.toml_lines(best["settings"])) in shown.text
            read = settings_of(tomllib.loads("\n".join(_cli_plan.toml_lines(best["settings"]))))
            rows = read.get("rows")
            assert noise_of(read.get("noise"), Noise, LogitNoise).mechanism == best["mechanism"]
            assert (rows.redraw_every or 1, rows.sampling) == (best["redraw_every"], best["sampling"])

    def test_fewer_tokens_are_preferred_within_five_points_only(self) -> None:
        plan = priced({None: 1000}, mechanism="recentered_clip")
        made = [(0.9, 1000), (0.86, 100), (0.84, 10)]
        options = [DesignOption(plan, right, 1.0, 400, LocalCost(1, tokens, 0)) for right, tokens in made]
        assert thriftiest(options) is options[1]
        assert best_drawn(options) is options[0]
        assert best_drawn([DesignOption(priced({None: 1000}), 0.9, 1.0, 400, LocalCost(1, 1, 0))]) is None

    def test_a_parameter_that_was_asked_for_stays_in_the_recommendation(self) -> None:
        def option(mechanism: str) -> DesignOption:
            design = RowDesign.choose(num_slots=4, sampling="disjoint", overfill=2.0)
            plan = priced({None: 1000}, max_tokens=2, mechanism=mechanism, design=design)
            return DesignOption(plan, 0.9, 1.0, 400, LocalCost(1, 1, 0))

        asked = {
            "noise": {"mechanism": "clip_and_blend", "clip": 2.0, "blend_weight": 0.7},
            "decoding": {"temperature": 0.8},
        }
        settings, rule = settings_of(asked), TokenRule("clip_and_blend", clip=2.0, temperature=0.8, blend_weight=0.7)
        found = _cli_plan._generation_settings(settings, option("clip_and_blend"), rule)
        assert found["rows"] == {"slots": 4, "shots": 1, "sampling": "disjoint", "fill": 2.0, "redraw_every": 2}
        assert found["noise"] == {"mechanism": "clip_and_blend", "blend_weight": 0.7}
        assert found["decoding"] == {"temperature": 0.8}
        other = _cli_plan._generation_settings(settings, option("gumbel"), rule)
        assert other["noise"] == "gumbel"
        assert "decoding" not in other


def sets(*items: str) -> list[str]:
    return [part for item in items for part in ("--set", item)]


PLAN = ("plan", "--epsilon", "1", "--delta", "1e-6", "--public-size", "1000", "--max-tokens", "5", "--no-compare")


class TestPlanOnTheCommandLine:
    def test_numbers_and_guesses_are_stated(self, capsys: pytest.CaptureFixture[str]) -> None:
        blend = ["noise.mechanism=clip_and_blend", "noise.blend_weight=0.7", "decoding.temperature=0.8"]
        assert main([*PLAN, *sets(*blend, "guess.public_agreement=0.3")]) == 0
        text = capsys.readouterr().out
        assert re.search(r"of the range: clip [0-9.]+, temperature 0.8, blend weight 0.7\n", text)
        assert "the paper's accounting: epsilon " in text
        assert "its chance after the public prompt: 30.0 % (guess.public_agreement); not measured" in text
        assert "at unlimited epsilon: it is drawn from a softmax" in text

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            (["noise.clip=2.0"], "mechanism"),
            (["noise.mechanism=recentered_clip", "noise.blend_weight=0.5"], "clip_and_blend"),
            (
                ["noise.mechanism=recentered_clip", "noise.clip=90.0", "decoding.temperature=0.1"],
                "noise.clip, decoding.temperature: expected noise that costs at most epsilon 1.0, found",
            ),
            (["noise=recentered_clip", "guess.public_agreement=2"], "guess.public_agreement: expected"),
            (["rows.sampling=fixed"], "sampling: expected 'poisson'"),
            (["noise.multiplier=0.01"], "noise.multiplier: expected noise that costs at most epsilon 1.0, found"),
        ],
    )
    def test_what_a_run_would_refuse_is_refused(
        self, given: list[str], said: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main([*PLAN, *sets(*given)]) == 2
        assert said in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ("noise=clip_and_blend", "noise: expected 'gumbel', 'gaussian', 'permute_and_flip', Noise(...)"),
            ("noise.clip=1.0", "Noise: expected options among"),
            ("decoding.temperature=1.0", "found 'decoding'"),
            ("rows.sampling=disjoint", "sampling"),
        ],
    )
    def test_votes_take_none_of_its_options(self, given: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
        votes = ["--method", "voting", "--max-queries", "9", *sets("guess.labels=2", given)]
        assert main([*PLAN[:7], "--no-compare", *votes]) == 2
        assert said in capsys.readouterr().err

    def test_a_multiplier_that_was_given_is_priced(self, capsys: pytest.CaptureFixture[str]) -> None:
        votes = ["--method", "voting", "--max-queries", "9", "--set", "guess.labels=2"]
        pate = [*votes[2:], "--method", "pate", "--set", "guess.public_inputs=9"]
        asked = ["retrieval.participations=5", "retrieval.similarity_threshold=0.5", "guess.labels=2"]
        retrieval = ["--method", "retrieval", *sets(*asked)]
        training = ["--method", "training", *sets("training.expected_batch_size=100", "training.steps=9")]
        for method in ([*PLAN[7:9], *sets("rows.slots=9")], votes, pate, retrieval, training):
            assert main([*PLAN[:7], "--no-compare", "--json", *method, *sets("noise.multiplier=30.0")]) == 0
            assert json.loads(capsys.readouterr().out)["plan"]["noise_multiplier"] == 30.0

    def test_disjoint_batches_need_no_period(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([*PLAN, *sets("rows.slots=9", "rows.sampling=disjoint", "shots_per_label=2"), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["plan"]["redraw_every"] == 5


class TestGenerateOnTheCommandLine:
    @pytest.fixture
    def records(self, tmp_path: Path) -> Path:
        path = tmp_path / "records.jsonl"
        path.write_text(300 * '{"text": "my card was declined"}\n')
        return path

    def run(self, records: Path, *more: str) -> int:
        terms = ["--out", str(records.with_name("out.json")), "--public-size", "300", "--epsilon", "3"]
        terms += ["--delta", "1e-6", "--quiet", *sets("max_tokens=3", "rows.slots=8")]
        return main(["generate", str(records), *terms, "--model", "tests.engines:ENGINE", *more])

    def test_a_logit_mechanism_runs_and_is_in_the_report(self, records: Path) -> None:
        clipped = ["noise.mechanism=clip_and_blend", "noise.blend_weight=0.8", "decoding.temperature=0.9"]
        assert self.run(records, *sets(*clipped, "rows.redraw_every=run")) == 0
        plan = json.loads(records.with_name("out.json").read_text())["plan"]
        assert (plan["mechanism"], plan["blend_weight"], plan["redraw_every"]) == ("clip_and_blend", 0.8, 3)
        assert plan["temperature"] == pytest.approx(0.9)

    def test_a_fixed_noise_beyond_epsilon_is_refused(self, records: Path) -> None:
        loud = sets("noise.mechanism=recentered_clip", "noise.clip=90.0", "decoding.temperature=0.1")
        assert self.run(records, *loud) == 3

    def test_every_option_reaches_the_synthesizer(self, records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        given: dict[str, Any] = {}

        @functools.wraps(DemonstrationSynthesizer.from_private_examples)
        def asked(*_: Any, **options: Any) -> None:
            given.update(options)
            raise ConfigurationError("seen")

        monkeypatch.setattr(DemonstrationSynthesizer, "from_private_examples", asked)
        noise = ["clip=2.0", "blend_weight=0.7", "center=none", "free_below=0.3", "max_private_tokens=4"]
        told = ["noise.mechanism=clip_and_blend", *(f"noise.{item}" for item in noise), "decoding.temperature=0.8"]
        assert self.run(records, *sets(*told, 'decoding.grammar.regex="[a-z]+"', "rows.sampling=disjoint")) == 2
        wanted = LogitNoise(
            "clip_and_blend", clip=2.0, blend_weight=0.7, center="none", free_below=0.3, max_private_tokens=4
        )
        assert given["noise"] == wanted
        assert given["rows"].sampling == "disjoint"
        assert given["decoding"].temperature == 0.8
        assert given["decoding"].grammar.to_dict()["kind"] == "regex"

    def test_a_grammar_is_of_one_kind(self) -> None:
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
        read = settings_of({"decoding": {"grammar": {"json_schema": schema}}})
        assert read.get("decoding").grammar.to_dict()["kind"] == "json_schema"
        for told in ({"regex": "[a-z]+"}, {"choices": ["a", "b"]}, {"json_schema": schema}):
            asked = settings_of({"decoding": {"grammar": told}})
            assert settings_of(asked.to_dict()) == asked  # what workers get
        for wrong in ({"json_schema": [1]}, {"regex": "a", "lark": "b"}, {"words": ["a"]}):
            with pytest.raises(ConfigurationError, match=r"schema|grammar"):
                settings_of({"decoding": {"grammar": wrong}})


class TestTheFolderOfAModel:
    def test_is_loaded_with_what_was_typed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[Any] = []
        monkeypatch.setattr(
            "langchain_dpicl.backends.hf.backend.HuggingFaceBackend", lambda *a, **k: seen.append((a, k))
        )
        load_model(Model(name=str(tmp_path), dtype="bfloat16", chat=False, max_prompt_tokens=64, device="cpu"))
        load_model(Model(name=str(tmp_path)))
        typed = {"device": "cpu", "dtype": "bfloat16", "max_prompt_tokens": 64, "chat": False}
        assert seen == [((), {"model": str(tmp_path), **typed}), ((), {"model": str(tmp_path)})]
        assert set(typed) <= set(inspect.signature(HuggingFaceBackend).parameters)

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"name": "embedded", "device": "cpu"}, "model.device: expected none unless --model is the folder"),
            ({"name": "tests.engines:ENGINE", "chat": False}, "model.chat: expected none unless"),
            (
                {"name": "./nowhere"},
                "a folder that holds a model, provider:model or module:attribute, found './nowhere'",
            ),
            ({"name": ".", "max_prompt_tokens": 0}, "Model.max_prompt_tokens: expected a number greater than or equal"),
        ],
    )
    def test_and_its_options_belong_together(self, given: dict[str, Any], said: str) -> None:
        with pytest.raises(ConfigurationError, match=re.escape(said)):
            load_model(Model(**given))
