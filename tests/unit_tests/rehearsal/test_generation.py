"""Rehearsed generation: fidelity from known probabilities, what is refused, and what a rehearsal holds."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.documents import Document
from numpy.random import PCG64, Generator

from langchain_dpicl import Decoding, EmbeddedLLM, GenerationTask, PrivateExamples
from langchain_dpicl.backends.base import Token, TokenSession
from langchain_dpicl.backends.fake import FakeBackend
from langchain_dpicl.baselines import demonstrations_without_privacy
from langchain_dpicl.exceptions import ConfigurationError, ModelCallError
from langchain_dpicl.generation.grammars import Grammar
from langchain_dpicl.generation.plan import GenerationPlan, Segment, compare, plan_generation, signal_of
from langchain_dpicl.options import OpenLabel
from langchain_dpicl.planning.expected_utility import RowDesign, noise_scale, occupancy
from langchain_dpicl.privacy.extensions.registry import MECHANISMS
from langchain_dpicl.rehearsal import GenerationRehearsal, arehearse_generation, rehearse_generation

CANARY, TOKEN_CANARY = "zx-public-canary-53", "zx-token-canary-54"
WORDS = (" red", " blue", f" {TOKEN_CANARY}")
RED, BLUE = (0.6, 0.3, 0.1), (0.2, 0.7, 0.1)


def says_its_colour(prompt: str, prefix: tuple[bytes, ...]) -> Mapping[str, float]:
    """One word, by the mean of the colours that the prompt shows, and then the end."""
    if prefix:
        return {"": 1.0, **dict.fromkeys(WORDS, 0.0)}
    shown = [RED] * prompt.count("is red") + [BLUE] * prompt.count("is blue")
    return dict(zip(WORDS, np.mean(shown or [(0.3, 0.3, 0.3)], axis=0).tolist(), strict=True))


def engine(**options: Any) -> FakeBackend:
    return FakeBackend(says_its_colour, vocabulary=WORDS, **options)


def examples(reds: int = 4, blues: int = 2) -> list[dict[str, str]]:
    colours = ["red"] * reds + ["blue"] * blues
    return [{"text": f"{CANARY} {place} is {colour}"} for place, colour in enumerate(colours)]


def by_label() -> list[dict[str, str]]:
    """Two labels, of which one is clear-cut and the other is not."""
    clear = [{"text": f"{place} is red", "label": "clear"} for place in range(6)]
    torn = [{"text": f"{place} is {'red' if place % 2 else 'blue'}", "label": "torn"} for place in range(6)]
    return [*clear, *torn]


def rehearsed(records: Any = None, llm: Any = None, **options: Any) -> GenerationRehearsal:
    given: dict[str, Any] = {"max_tokens": 2, "shots": (1,), "progress": False, **options}
    return rehearse_generation(llm or engine(), examples() if records is None else records, **given)


def priced(noise: float = 8.0, *, mechanism: str = "gumbel", sizes: Any = None, **options: Any) -> GenerationPlan:
    given: dict[str, Any] = {"design": units(30), "segments": (Segment("text", 2),), **options}
    given |= {"epsilon": None, "delta": 1e-6, "noise_multiplier": noise, "mechanism": mechanism}
    return plan_generation(sizes or {None: 1000}, **given)


def units(number: int) -> RowDesign:
    return RowDesign.choose(rows="units", num_slots=number)


SUMS = 30 / 6 * np.array([4 * 0.6 + 2 * 0.2, 4 * 0.3 + 2 * 0.7, 6 * 0.1])
"""Of the first token: six rows that stand for the thirty of the plan."""
ENDS = 30.0
"""Of the second one: every row ends, and the three words have nothing."""
STEP = {"top": [0.5], "others": 0, "rest": 0.0}
"""Of a file."""


def softmax(values: Any, scale: float) -> float:
    weights = np.exp((np.asarray(values) - values[0]) / scale)
    return float(1.0 / weights.sum())


class TestFidelity:
    def test_is_the_closed_form_of_known_probabilities(self) -> None:
        rehearsal, plan = rehearsed(), priced()
        scale = noise_scale(plan.release)
        chances = softmax(SUMS, scale), softmax([ENDS, 0.0, 0.0, 0.0], scale)
        assert rehearsal.fidelity(plan) == pytest.approx(np.mean(chances), rel=1e-5)
        assert rehearsal.run(plan) == pytest.approx(np.prod(chances), rel=1e-5)

    def test_falls_with_the_noise_and_grows_with_the_rows(self) -> None:
        rehearsal = rehearsed()
        by_noise = [rehearsal.fidelity(priced(noise)) for noise in (1.0, 4.0, 16.0, 1e6)]
        by_rows = [rehearsal.fidelity(priced(design=units(number))) for number in (10, 30, 90)]
        assert by_noise == sorted(by_noise, reverse=True)
        assert by_rows == sorted(by_rows)
        assert by_noise[-1] == pytest.approx((1 / 3 + 1 / 4) / 2, abs=1e-3)  # of three candidates, then of four

    @pytest.mark.parametrize("mechanism", MECHANISMS)
    def test_by_quadrature_is_that_of_drawn_noise(self, mechanism: str) -> None:
        plan, draws = priced(mechanism=mechanism), 200_000
        rng = Generator(PCG64(7))
        draw = {"gaussian": rng.normal, "permute_and_flip": rng.exponential, "gumbel": rng.gumbel}[mechanism]
        scale = noise_scale(plan.release)
        found = []
        for sums in (SUMS, np.array([ENDS, 0.0, 0.0, 0.0])):
            noise = draw(size=(draws, len(sums))) * scale
            found.append(((sums + noise).argmax(axis=1) == 0).mean())
        error = np.sqrt(np.sum([share * (1 - share) / draws for share in found])) / 2
        assert rehearsed().fidelity(plan) == pytest.approx(np.mean(found), abs=4 * error)

    def test_candidates_that_are_kept_together_count_as_many(self) -> None:
        words = [f" {number:02d}" for number in range(60)]
        chances = np.array([0.4, *np.full(59, 0.6 / 59)])
        flat = FakeBackend(lambda *_: dict(zip(words, chances.tolist(), strict=True)), vocabulary=words)
        rehearsal, plan = rehearsed(llm=flat, max_tokens=1), priced()
        [text] = rehearsal.texts
        assert (len(text.steps[0].top), text.steps[0].others) == (20, 40)
        assert rehearsal.fidelity(plan) == pytest.approx(softmax(30 * chances, noise_scale(plan.release)), rel=1e-4)
        wider = rehearsal.fidelity(dataclasses.replace(plan, candidates=plan.candidates + 30))
        zeros = np.concatenate([30 * chances, np.zeros(30)])
        assert wider == pytest.approx(softmax(zeros, noise_scale(plan.release)), rel=0.02)

    def test_of_a_label_is_that_of_its_texts(self) -> None:
        rehearsal = rehearsed(by_label(), label_key="label")
        plan = priced(sizes={"clear": 1000, "torn": 2000})
        clear, torn = (rehearsal.fidelity(plan, label=label) for label in ("clear", "torn"))
        assert clear > torn
        assert rehearsal.fidelity(plan) == pytest.approx((clear + torn) / 2)
        assert plan.expected(rehearsal)["right_token_prob"] == rehearsal.fidelity(plan)
        assert plan.expected(rehearsal, label="torn")["right_token_prob"] == torn

    def test_lies_in_its_interval_which_is_the_same_each_time(self) -> None:
        rehearsal = rehearsed(by_label(), label_key="label")
        plan = priced(sizes={"clear": 1000, "torn": 2000})
        low, high = rehearsal.interval(plan)
        assert 0.0 <= low < rehearsal.fidelity(plan) < high <= 1.0
        assert rehearsal.interval(plan) == (low, high)

    def test_takes_the_rows_whose_shots_are_nearest_and_says_which(self) -> None:
        rehearsal = rehearsed(shots=(1, 4), num_rows=6)
        assert rehearsal.shots_for(priced()) == 1
        slots = [RowDesign.choose(num_slots=20, shots_per_slot=shots, overfill=1.0) for shots in (1, 4, 8)]
        assert [rehearsal.shots_for(priced(design=design)) for design in slots] == [1, 4, 4]
        assert priced(design=slots[1]).expected(rehearsal)["measured_shots"] == 4


class TestWhatIsAsked:
    def test_calls_are_counted_and_no_example_is_twice_in_a_row(self) -> None:
        llm = engine()
        rehearsal = rehearsed(llm=llm, shots=(1, 4), num_rows=5)
        assert rehearsal.calls == llm.calls["public"] + llm.calls["private_rows"] == 2 * (1 + 5) + 2 * (1 + 5)
        assert [text.rows for text in rehearsal.texts] == [5, 5]

    def test_a_row_of_few_examples_leaves_one_out(self) -> None:
        seen: list[str] = []

        def listens(prompt: str, prefix: tuple[bytes, ...]) -> Mapping[str, float]:
            seen.append(prompt)
            return says_its_colour(prompt, prefix)

        [text] = rehearsed(examples(2, 1), FakeBackend(listens, vocabulary=WORDS), shots=(4,)).texts
        assert (text.shots, text.rows) == (4, 3)
        assert {prompt.count(CANARY) for prompt in seen} == {0, 2}

    def test_it_writes_with_the_candidates_of_a_synthesizer(self) -> None:
        """With the same record in every row both see the same sums."""
        records = ["my card was declined today"] * 40
        asked: list[list[tuple[Token, ...]]] = []
        for write in (
            lambda llm: rehearsed(
                [{"text": one} for one in records], llm, max_tokens=6, decoding=Decoding(candidates=3)
            ),
            lambda llm: demonstrations_without_privacy(
                PrivateExamples(records, public_size=40), llm=llm, max_tokens=6, decoding=Decoding(candidates=3)
            ),
        ):
            llm = _Watched()
            write(llm)
            asked.append(list(dict.fromkeys(llm.domains)))
        assert asked[0] == asked[1]
        assert len(asked[0]) > 2

    async def test_awaiting_finds_the_same(self) -> None:
        found = await arehearse_generation(
            engine(), examples(), max_tokens=2, shots=(1,), config={"max_concurrency": 2}
        )
        assert found == rehearsed()

    def test_documents_are_examples_too(self) -> None:
        records = [Document(one["text"]) for one in examples()]
        assert rehearsed(records).texts == rehearsed().texts

    def test_a_text_ends_at_a_stop(self) -> None:
        lines = FakeBackend(lambda *_: {"a\n": 1.0}, vocabulary=["a\n"])
        [text] = rehearsed(llm=lines, max_tokens=5).texts
        assert len(text.steps) == 1
        [longer] = rehearsed(llm=lines, max_tokens=5, decoding=Decoding(stop=("b",))).texts
        assert len(longer.steps) == 5


class _Watched(FakeBackend):
    """Notes the candidates that its sessions are asked for."""

    def __init__(self) -> None:
        words = ["\n", " my", " card", " was", " declined", " today"]

        def copies(_: str, prefix: tuple[bytes, ...]) -> Mapping[str, float]:
            wanted = words[len(prefix)] if len(prefix) < len(words) else ""
            rest = 0.2 / len(words)
            return {word: 0.8 if word == wanted else rest for word in ["", *words]}

        super().__init__(copies, vocabulary=words)
        self.domains: list[tuple[Token, ...]] = []

    def open(self, prompts: Sequence[str], prefix: Sequence[Token]) -> TokenSession:
        session = super().open(prompts, prefix)
        score = session.score

        def watched(domain: Sequence[Token]) -> Any:
            self.domains.append(tuple(domain))
            return score(domain)

        session.score = watched  # type: ignore[method-assign]
        return session


class TestWhatIsRefused:
    def test_private_examples_and_a_call_too_many_before_any_call(self) -> None:
        llm = engine()
        private = PrivateExamples([one["text"] for one in examples()], public_size=6)
        with pytest.raises(ConfigurationError, match="reads no private record") as refused:
            rehearsed(private, llm)
        assert CANARY not in str(refused.value)
        with pytest.raises(ConfigurationError, match="at least the 14 calls"):
            rehearsed(llm=llm, max_calls=13)
        assert not llm.calls
        assert rehearsed(llm=llm, max_calls=14).calls == 14

    @pytest.mark.parametrize(
        ("options", "named"),
        [
            ({"decoding": Decoding(grammar=Grammar.regex("a+"))}, "grammar"),
            ({"decoding": Decoding(released_words=True)}, "released_words"),
            ({"task": GenerationTask(open_label=OpenLabel("topic"))}, "open_label"),
            ({"task": GenerationTask(hints=("Be brief.",))}, "PrivateEvolution"),
            ({"shots": ()}, "shots"),
            ({"num_rows": 1}, "num_rows"),
            ({"labels": ("red",)}, "label_key"),
            ({"label_key": "colour"}, "colour"),
            ({"origin": "elsewhere"}, "origin"),
            ({"instruction": "a", "task": GenerationTask("b")}, "instruction"),
        ],
    )
    def test_what_cannot_be_rehearsed(self, options: dict[str, Any], named: str) -> None:
        llm = engine()
        with pytest.raises(ConfigurationError, match=named) as refused:
            rehearsed(llm=llm, **options)
        assert CANARY not in str(refused.value)
        assert not llm.calls

    def test_a_label_with_one_example_and_one_that_is_not_declared(self) -> None:
        records = [*by_label(), {"text": "is red", "label": "rare"}]
        with pytest.raises(ConfigurationError, match="two examples of label 'rare'"):
            rehearsed(records, label_key="label")
        with pytest.raises(ConfigurationError, match="label among"):
            rehearsed(records, label_key="label", labels=("clear", "torn"))

    def test_rows_that_all_fail(self) -> None:
        with pytest.raises(ModelCallError, match="all failed"):
            rehearsed(llm=engine(fail_rows_containing=CANARY))

    def test_plans_that_it_does_not_speak_for(self) -> None:
        rehearsal = rehearsed()
        with pytest.raises(ConfigurationError, match="logits, which were not measured"):
            rehearsal.fidelity(priced(mechanism="recentered_clip"))
        with pytest.raises(ConfigurationError, match="rehearsal of labels"):
            rehearsal.fidelity(priced(sizes={"card": 1000}))
        with pytest.raises(ConfigurationError, match="one of"):
            rehearsal.fidelity(priced(), label="card")
        with pytest.raises(ConfigurationError, match="full_vocabulary"):
            compare({None: 1000}, epsilon=1.0, delta=1e-6, source=rehearsal, full_vocabulary=True)


class TestPlans:
    def test_say_what_their_chance_rests_on(self) -> None:
        rehearsal, plan = rehearsed(origin="neighbour"), priced()
        guessed, measured = plan.expected(0.6), plan.expected(rehearsal)
        assert guessed["rests_on"] == signal_of(plan, one_shot=0.6)["rests_on"] == "a guess"
        assert measured["rests_on"] == "a rehearsal of 6 public examples of a neighbouring domain"
        assert measured["expected_rows"] == guessed["expected_rows"] == pytest.approx(30)
        assert (measured["right_token_low"], measured["right_token_high"]) == rehearsal.interval(plan)
        assert measured["run_prob"] == rehearsal.run(plan)

    @pytest.mark.parametrize("source", [1.5, True, "0.6", None])
    def test_take_a_guess_or_a_rehearsal(self, source: Any) -> None:
        with pytest.raises(ConfigurationError, match=r"agreement|source"):
            priced().expected(source)

    def test_are_compared_by_it(self) -> None:
        rehearsal = rehearsed(shots=(1, 4), num_rows=6)
        options = compare(
            {None: 1000}, epsilon=1.0, delta=1e-6, segments=[Segment("text", 5)], base=units(20), source=rehearsal
        )
        found = [option.right_token_prob for option in options]
        assert found == sorted(found, reverse=True)
        assert found == [rehearsal.fidelity(option.plan) for option in options]
        assert len({option.plan.design for option in options}) > 1
        guessed = compare({None: 1000}, epsilon=1.0, delta=1e-6, segments=[Segment("text", 5)], base=units(20))
        assert {option.right_token_prob for option in guessed} != set(found)

    def test_signal_to_noise_is_the_lead_over_the_noise(self) -> None:
        plan = priced(mechanism="gaussian")
        leads = np.mean([SUMS[0] - SUMS[1], ENDS])
        found = rehearsed().outlook(plan)["signal_to_noise"]
        assert found == pytest.approx(leads / noise_scale(plan.release), rel=1e-5)
        assert occupancy(plan.release, 1000).rows == pytest.approx(30)


class TestItsFile:
    def test_holds_no_text_and_no_token(self, tmp_path: Path) -> None:
        rehearsal = rehearsed(instruction=f"{CANARY} is public", decoding=Decoding(stop=(f"{CANARY} stop",)))
        rehearsal.save(tmp_path / "rehearsal.json")
        shown = [repr(rehearsal), rehearsal._repr_html_(), str(rehearsal.to_dict()), str(rehearsal.rows())]
        shown += [str(dataclasses.asdict(rehearsal)), (tmp_path / "rehearsal.json").read_text()]
        shown.append(pickle.dumps(rehearsal).decode("latin-1"))
        assert not [text for text in shown if CANARY in text or TOKEN_CANARY in text]

    def test_another_wording_has_another_digest(self) -> None:
        assert rehearsed(instruction="one").wording != rehearsed(instruction="two").wording
        assert rehearsed().wording != rehearsed(decoding=Decoding(stop=("b",))).wording

    def test_reads_what_the_embedded_model_did_with_made_up_text(self, tmp_path: Path) -> None:
        cards = [f"my card number {place} was declined at the shop" for place in range(6)]
        loans = [f"how do I repay loan {place} before it ends" for place in range(6)]
        records = [{"text": text, "topic": "card"} for text in cards] + [
            {"text": text, "topic": "loan"} for text in loans
        ]
        found = rehearsed(records, EmbeddedLLM(), label_key="topic", max_tokens=8, shots=(1, 4), origin="made_up")
        found.save(tmp_path / "rehearsal.json")
        again = GenerationRehearsal.load(tmp_path / "rehearsal.json")
        assert again == found
        assert (again.labels, again.shots) == (("card", "loan"), (1, 4))
        assert [row["tokens"] > 4 and row["answered"] == pytest.approx(1.0, abs=1e-3) for row in again.rows()] == [
            True
        ] * 2
        plan = priced(sizes={"card": 500, "loan": 500})
        assert again.interval(plan) == found.interval(plan)
        assert 0.0 < again.run(plan) <= again.fidelity(plan) < 1.0

    @pytest.mark.parametrize(
        "change",
        [
            {"model": 3},
            {"origin": "elsewhere"},
            {"num_examples": 0},
            {"candidates": True},
            {"texts": []},
            {"texts": [{"label": None, "shots": 1, "rows": 2, "steps": []}]},
            {"texts": [{"label": None, "shots": 1, "rows": 2, "steps": [{**STEP, "top": []}]}]},
            {"texts": [{"label": None, "shots": 1, "rows": 2, "steps": [{**STEP, "top": [0.5, 0.6]}]}]},
            {"texts": [{"label": None, "shots": 1, "rows": 2, "steps": [{**STEP, "rest": -1.0}]}]},
            {"texts": [{"label": None, "shots": 0, "rows": 2, "steps": [STEP]}]},
            {"texts": [{"label": 4, "shots": 1, "rows": 2, "steps": [STEP]}]},
            {"texts": [{"label": None, "shots": 1, "rows": 2, "steps": [STEP], "text": "more"}]},
            {
                "texts": [
                    {"label": one, "shots": shots, "rows": 2, "steps": [STEP]} for one, shots in (("a", 1), ("b", 4))
                ]
            },
            {"texts": [{"label": None, "shots": 1, "rows": 2, "steps": [{**STEP, "text": "more"}]}]},
            {"texts": ["text"]},
        ],
        ids=str,
    )
    def test_with_other_values_is_refused(self, tmp_path: Path, change: dict[str, Any]) -> None:
        path = tmp_path / "rehearsal.json"
        form = GenerationRehearsal._FORM
        path.write_text(form.text({**rehearsed().to_dict(), **change}))
        with pytest.raises(ConfigurationError, match="generation rehearsal"):
            GenerationRehearsal.load(path)

    def test_that_was_changed_is_refused(self, tmp_path: Path) -> None:
        rehearsed().save(tmp_path / "rehearsal.json")
        state = json.loads((tmp_path / "rehearsal.json").read_text())
        (tmp_path / "rehearsal.json").write_text(json.dumps({**state, "calls": state["calls"] + 1}))
        with pytest.raises(ConfigurationError, match="generation rehearsal"):
            GenerationRehearsal.load(tmp_path / "rehearsal.json")
