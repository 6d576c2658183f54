"""Rehearsals: what is asked, what is kept, what is refused, and the rows that follow."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import pickle
import random
import re
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.documents import Document

from langchain_dpicl import (
    Budget,
    DPVotingRunnable,
    EmbeddedLLM,
    FewShotTask,
    LabelAnswers,
    PrivateExamples,
    PromptPATELabeler,
    verify_report,
)
from langchain_dpicl.backends.fake import FakeBackend
from langchain_dpicl.exceptions import ConfigurationError, ModelCallError, NoisyPlanWarning, RestsOnGuessWarning
from langchain_dpicl.options import ConfidentGNMax
from langchain_dpicl.pate.plan import plan_labelling
from langchain_dpicl.planning.expected_utility import shot_law
from langchain_dpicl.planning.row_law import mean_facts
from langchain_dpicl.rehearsal import (
    Rehearsal,
    RehearsedShape,
    arehearse,
    choice,
    propose_rows,
    rehearsal_cost,
    rehearse,
)

CANARY = "Qz7canary"
LABELS = ("card", "cash", "wire")
TERMS: dict[str, Any] = {"delta": 1e-6, "max_queries": 100}


def examples(count: int = 36, *, canary: bool = False) -> list[dict[str, str]]:
    mark = f"{CANARY} " if canary else ""
    return [
        {"text": f"{mark}note {place} of {LABELS[place % 3]}", "label": LABELS[place % 3]} for place in range(count)
    ]


def reading(skill: Any) -> Any:
    """A model that knows the label of a note with chance `skill(shots)`, by a public hash of the whole prompt."""

    def distribution(prompt: str, prefix: tuple[bytes, ...]) -> dict[str, float]:
        del prefix
        asked = prompt.rpartition("text: ")[2]
        if "N/A" in asked:
            return dict.fromkeys([f" {label}" for label in LABELS], 0.3)
        shots = prompt.count("label: ")
        right = asked.split()[-2] if asked.split()[-1] == "label:" else asked.split()[-1]
        coins = random.Random(zlib.crc32(prompt.encode()))
        best = right if coins.random() < skill(shots) else LABELS[coins.randrange(3)]
        return {f" {label}": 0.6 if label == best else 0.15 for label in LABELS}

    return distribution


def engine(skill: Any = lambda shots: 0.2 + 0.1 * min(shots, 8), **options: Any) -> FakeBackend:
    return FakeBackend(reading(skill), vocabulary=[f" {label}" for label in LABELS], **options)


def rehearsed(llm: Any = None, public: Sequence[Any] | None = None, **options: Any) -> Rehearsal:
    given = {"progress": False, "answers": LabelAnswers(calibrate=False), **options}
    return rehearse(engine() if llm is None else llm, examples() if public is None else public, **given)


@functools.cache
def usual() -> Rehearsal:
    """The one that most tests ask for; nothing changes it."""
    return rehearsed()


class TestWhatIsAsked:
    def test_rows_of_more_examples_are_measured_as_they_are(self) -> None:
        """Right by skill or by one chance in three: .53 with one example, .67 with eight, +- .05 (5 errors)."""
        found = rehearsed()
        for shots in (1, 2, 4, 8):
            skill = 0.2 + 0.1 * shots
            assert found.facts(shots=shots).right == pytest.approx(skill + (1 - skill) / 3, abs=0.12)
        assert found.facts(shots=8).right > found.facts(shots=1).right + 0.2
        assert found.zero_shot(False) == pytest.approx(0.2 + 0.8 / 3, abs=0.35)
        assert found.readings == (False,)

    def test_the_most_of_poor_rows_is_not_less_than_what_one_is_worth(self) -> None:
        def mostly_wrong(prompt: str, prefix: tuple[bytes, ...]) -> dict[str, float]:
            del prefix
            place = max(0, zlib.crc32(prompt.encode()) % 10 - 7)  # the first label, 8 times in 10
            return {f" {label}": 0.8 if label == LABELS[place] else 0.1 for label in LABELS}

        public = [one for one in examples() if one["label"] != LABELS[0]]
        poor = rehearsed(FakeBackend(mostly_wrong, vocabulary=[f" {label}" for label in LABELS]), public)
        rows = [row for row in poor.rows() if row["shots"]]
        assert any(poor.facts(shots=row["shots"]).ceiling() < row["right"] for row in rows)
        assert all(row["ceiling"] >= row["right"] for row in rows)

    def test_a_question_never_stands_among_its_own_examples(self) -> None:
        seen: list[str] = []

        def watched(prompt: str, prefix: tuple[bytes, ...]) -> dict[str, float]:
            seen.append(prompt)
            return reading(lambda _: 0.5)(prompt, prefix)

        rehearsed(FakeBackend(watched, vocabulary=[f" {label}" for label in LABELS]))
        asked = [prompt.rpartition("text: ")[2].removesuffix("\nlabel:") for prompt in seen]
        assert set(asked) == {example["text"] for example in examples()}
        for prompt, question in zip(seen, asked, strict=True):
            shown, _, _ = prompt.rpartition("text: ")
            assert f"text: {question}\n" not in shown

    def test_rows_of_one_deal_share_no_example_and_keep_the_share_of_the_questions_label(self) -> None:
        prompts: list[str] = []

        def watched(prompt: str, prefix: tuple[bytes, ...]) -> dict[str, float]:
            prompts.append(prompt)
            return reading(lambda _: 0.5)(prompt, prefix)

        found = rehearsed(FakeBackend(watched, vocabulary=[f" {label}" for label in LABELS]), shots=(4,))
        [shape] = [one for one in found.shapes if one.shots == 4]
        assert set(shape.deals) == {0, 1}
        by_question: dict[str, list[list[str]]] = {}
        own = {example["text"]: example["label"] for example in examples()}
        for prompt in dict.fromkeys(prompts):
            *shown, asked = [part.split("\n")[0] for part in prompt.split("text: ")[1:]]
            if shown:
                by_question.setdefault(asked, []).append(shown)
        same = []
        for asked, rows in by_question.items():
            half = [rows[place] for place, deal in enumerate(shape.deals) if deal == 0]
            flat = [text for row in half for text in row]
            assert len(flat) == len(set(flat))
            same += [own[text] == own[asked] for row in rows for text in row]
        # 36 questions x 12 rows x 4 examples of three labels: within .055 of a third, 5 errors of independent draws.
        assert np.mean(same) == pytest.approx(1 / 3, abs=0.055)

    def test_calibrated_rows_are_read_beside_raw_ones(self) -> None:
        found = rehearsed(answers=LabelAnswers())
        assert found.readings == (False, True)
        assert found.content_free == ("N/A",)
        assert found.facts(shots=4, calibrated=True).right == found.facts(shots=4).right  # even on "N/A"

    def test_async_gives_the_same(self) -> None:
        answers = LabelAnswers(calibrate=False)
        found = asyncio.run(arehearse(engine(), examples(), progress=False, answers=answers))
        assert found == rehearsed()

    def test_documents_are_examples_too(self) -> None:
        documents = [Document(one["text"], metadata={"label": one["label"]}) for one in examples()]
        assert rehearsed(public=documents) == rehearsed()

    def test_calls_stay_within_what_was_said(self) -> None:
        for llm in (engine(), engine(lambda _: 1.0)):
            found = rehearsed(llm)
            cost = rehearsal_cost(36, num_labels=3, calls_per_row=1)
            assert 0.98 * cost.least.public_calls <= found.calls <= cost.most.public_calls  # a prompt may repeat
            assert llm.calls["choice_rows"] == found.calls


class TestRefusals:
    def test_private_examples_are_refused_before_any_call(self) -> None:
        llm = engine()
        private = PrivateExamples(examples(), label_key="label", labels=LABELS, public_size=500)
        with pytest.raises(ConfigurationError, match="reads no private record"):
            rehearsed(llm, private)
        assert not llm.calls

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            (
                {"max_calls": 100},
                r"max_calls: expected at least the [\d,]+ calls that this rehearsal may need, found 100",
            ),
            ({"origin": "mine"}, "origin"),
            ({"shots": (40,)}, "public_examples: expected at least 80 examples more than there are labels"),
            ({"shots": (0,)}, "shots"),
            ({"shots": ()}, "shots: expected at least one number, found 0"),
            ({"max_examples": 2}, "max_examples"),
            ({"labels": ("card", "cash")}, "a label among"),
            ({"text_key": "body"}, "text under 'body'"),
        ],
    )
    def test_public_faults_are_refused_before_any_call(self, given: dict[str, Any], said: str) -> None:
        llm = engine()
        with pytest.raises(ConfigurationError, match=said):
            rehearsed(llm, **given)
        assert not llm.calls

    def test_texts_that_no_file_holds_are_refused_before_any_call(self) -> None:
        llm, half = engine(), "half\ud800"
        labelled = [{**one, "label": one["label"].replace("wire", half)} for one in examples()]
        task = FewShotTask(verbalizers={"card": [" card"], "cash": [" cash"], half: [" wire"]})
        for given in ({"public": labelled, "task": task}, {"answers": LabelAnswers(content_free=(half,))}):
            with pytest.raises(ConfigurationError, match="valid Unicode text, found 'half of a surrogate pair'"):
                rehearsed(llm, **given)
        assert not llm.calls

    def test_a_failed_call_is_an_error(self) -> None:
        with pytest.raises(ModelCallError):
            rehearsed(engine(fail_rows_containing="note 7 of cash"))


class TestWhatIsKept:
    def test_no_text_of_an_example_is_kept_shown_or_written(self, tmp_path: Path) -> None:
        found = rehearsed(public=examples(canary=True))
        found.save(tmp_path / "r.json")
        shown = [repr(found), found.table(), json.dumps(found.to_dict()), found._repr_html_(), str(vars(found))]
        assert CANARY not in "".join([*shown, (tmp_path / "r.json").read_text()])
        assert CANARY.encode() not in pickle.dumps(found)

    def test_its_digest_stays_what_sealed_components_hold(self) -> None:
        shape = RehearsedShape(0, False, (0,), ((0,), (1,)))
        found = Rehearsal("made", "whole labels", ("a", "b"), "0", "same", (0, 1), (shape,), 1)
        assert found.digest.startswith("af0b789848")

    def test_a_file_gives_the_same_and_a_changed_one_is_refused(self, tmp_path: Path) -> None:
        found = usual()
        found.save(tmp_path / "r.json")
        again = Rehearsal.load(tmp_path / "r.json")
        assert again == found
        assert again.digest == found.digest
        text = (tmp_path / "r.json").read_text()
        (tmp_path / "r.json").write_text(text.replace('"origin": "same"', '"origin": "made_up"'))
        with pytest.raises(ConfigurationError, match="rehearsal"):
            Rehearsal.load(tmp_path / "r.json")

    @pytest.mark.parametrize(
        "change",
        [
            {"origin": "elsewhere"},
            {"labels": ["card", "card", "wire"]},
            {"labels": ["card"]},
            {"gold": [0, 1]},
            {"gold": [9] * 36},
            {"shapes": []},
            {"shapes": [{"shots": 1, "calibrated": False, "deals": [0], "votes": [[7]] * 36}]},
            {"calls": -1},
            {"calls": True},
            {"model": 3},
        ],
    )
    def test_values_that_no_rehearsal_has_are_refused(self, change: dict[str, Any], tmp_path: Path) -> None:
        state = {**usual().to_dict(), **change}
        (tmp_path / "r.json").write_text(Rehearsal._FORM.text(state))
        with pytest.raises(ConfigurationError, match="rehearsal"):
            Rehearsal.load(tmp_path / "r.json")

    def test_numbers_between_measured_shots_are_interpolated(self) -> None:
        found = rehearsed(shots=(2, 8))
        two, four, eight = (found.facts(shots=shots).right for shots in (2, 4, 8))
        assert four == pytest.approx((two + eight) / 2)
        assert found.facts(shots=1) == found.facts(shots=2)
        assert found.facts(shots=64) == found.facts(shots=8)


class TestProposals:
    def test_rows_that_are_worth_more_are_chosen(self) -> None:
        steep = rehearsed(engine(lambda shots: {0: 0.0, 1: 0.0, 2: 0.1, 4: 0.5}.get(shots, 0.9)))
        assert propose_rows(steep, 8_000, epsilon=4.0, **TERMS).design.shots_per_slot == 8
        flat = rehearsed(engine(lambda shots: 0.8 if shots else 0.0))
        found = propose_rows(flat, 8_000, epsilon=4.0, **TERMS)
        assert found.private_calls <= 20  # more rows or shots bring nothing

    def test_each_rival_has_the_chance_of_its_own_votes(self) -> None:
        votes = [rival for rival in choice.free_rivals(usual()) if rival.shots]
        assert len({rival.right for rival in votes}) == len(votes) > 1
        for rival in votes:
            assert rival.right == pytest.approx(choice.rights_of(usual(), rival, [None])[0])

    def test_noise_is_guessed_along_a_line_that_never_falls(self) -> None:
        assert choice._next_noise([(0.01, 1.0), (0.02, 1.5)], 0.04) == pytest.approx(2.5)
        assert choice._next_noise([(0.01, 1.02), (0.0100001, 1.0)], 0.04) == 1.0
        assert choice._next_noise([(0.01, 1.0)], 0.04) == pytest.approx(2.0)

    def test_what_says_nothing_is_not_worth_an_epsilon(self) -> None:
        """Labels that have nothing to do with the texts, five times."""
        for seed in range(5):
            coins = np.random.default_rng(seed)
            public = [{**one, "label": LABELS[int(coins.integers(3))]} for one in examples(60)]
            found = propose_rows(rehearsed(engine(lambda _: 0.0), public), 8_000, epsilon=4.0, **TERMS)
            assert found.verdict != "beats what is free"
            assert found.right < 0.6
            assert found.gain <= found.right - found.free.right, "a rival that is chosen with fewer questions is poorer"

    def test_the_interval_holds_the_number_and_the_ceiling_is_above_it(self) -> None:
        found = propose_rows(usual(), 8_000, epsilon=1.0, **TERMS)
        assert found.low < found.right < found.high
        assert found.right <= found.at_most
        noisy = propose_rows(usual(), 8_000, epsilon=0.02, **TERMS)
        law = shot_law(noisy.plan.release, 8_000)
        without_noise = mean_facts(usual(), labels=3, law=law, calibrated=noisy.calibrated).ceiling()
        assert noisy.at_most == without_noise > noisy.right + 0.1
        assert found.rests_on == "a rehearsal of 36 public examples"
        assert json.loads(json.dumps(found.to_dict()))["verdict"] == found.verdict

    @pytest.mark.parametrize("count", [6, 20, 60])
    def test_questions_that_are_all_answered_right_leave_open_what_so_few_of_them_leave(self, count: int) -> None:
        """The exact one-sided bound of 90 % of `count` right ones in `count`; with noise in between, less is open."""
        sure = rehearsed(engine(lambda _: 1.0), examples(count), shots=(1,))
        bound = 0.1 ** (1 / count)
        found = propose_rows(sure, 8_000, epsilon=4.0, **TERMS)
        assert found.low <= bound < found.right <= found.high == 1.0
        assert found.plan.expected(sure)["right_label_low"] <= bound
        zero_shot, one_shot = sure.rows()
        assert zero_shot["margin"] >= 1.0 - bound
        assert 1.0 - bound**0.5 < one_shot["margin"] < zero_shot["margin"]
        noisy = propose_rows(sure, 50, epsilon=0.05, **TERMS)
        assert noisy.right < 0.4
        assert noisy.high - noisy.low < 0.25 * (1.0 - bound)

    @pytest.mark.parametrize(("count", "right", "correlation"), [(12, 0.97, 0.8), (40, 0.98, 0.7), (40, 0.5, 0.4)])
    def test_nine_intervals_in_ten_hold_the_number(self, count: int, right: float, correlation: float) -> None:
        coins, held = np.random.default_rng(count), 0
        strength = (1.0 - correlation) / correlation
        for _ in range(200):
            shares = coins.beta(right * strength, (1.0 - right) * strength, size=(count, 1))
            votes = [tuple(map(tuple, (coins.random((count, rows)) >= shares).astype(int).tolist())) for rows in (1, 4)]
            shapes = RehearsedShape(0, False, (0,), votes[0]), RehearsedShape(1, False, (0, 0, 1, 1), votes[1])
            found = dataclasses.replace(usual(), labels=LABELS[:2], gold=(0,) * count, shapes=shapes)
            low, high = found.interval(lambda facts: facts.right, labels=2, law=((1, 1.0),), calibrated=False)
            held += low <= right <= high
        assert held >= 180

    def test_another_domain_widens_and_never_beats(self) -> None:
        same, other = (
            propose_rows(rehearsed(origin=origin), 8_000, epsilon=4.0, **TERMS) for origin in ("same", "neighbour")
        )
        assert other.high - other.low > same.high - same.low
        assert other.verdict != "beats what is free"
        assert "neighbouring domain" in other.rests_on

    def test_calls_are_bounded_and_noise_is_kept(self) -> None:
        found = propose_rows(usual(), 8_000, epsilon=4.0, max_calls=10, mechanism="gumbel", **TERMS)
        assert found.private_calls <= 10
        assert found.plan.release.mechanism.name == "gumbel"
        with pytest.raises(ConfigurationError, match="max_calls"):
            propose_rows(usual(), 8_000, epsilon=4.0, max_calls=9, **TERMS)
        with pytest.raises(ConfigurationError, match="calibrate"):
            propose_rows(usual(), 8_000, epsilon=4.0, calibrate=True, **TERMS)

    def test_the_same_rehearsal_proposes_the_same(self) -> None:
        one, other = (propose_rows(rehearsed(), 8_000, epsilon=1.0, **TERMS).to_dict() for _ in range(2))
        assert one == other


def component(kind: Any, rows: Any, **options: Any) -> Any:
    private = PrivateExamples(examples(), label_key="label", labels=options.pop("labels", LABELS), public_size=2_000)
    given = {"llm": engine(), "budget": Budget(epsilon=8.0, delta=1e-6), "epsilon": 4.0, **options}
    return kind.from_private_examples(private, max_queries=20, rows=rows, **given)


class TestComponents:
    @pytest.mark.parametrize("kind", [DPVotingRunnable, PromptPATELabeler])
    def test_take_their_rows_from_a_rehearsal_and_say_so(self, kind: Any) -> None:
        found = usual()
        made = component(kind, found, answers=LabelAnswers(calibrate=False))
        best = propose_rows(found, 2_000, epsilon=4.0, delta=5e-7, max_queries=20)
        assert made.plan.design == best.design
        assert made.plan.release.mechanism.name == best.plan.release.mechanism.name
        assert found.digest in json.dumps(made.report)
        assert made.source is found
        assert made.expected()["rests_on"] == found.rests_on
        assert verify_report(made.report).ok

    def test_labels_in_another_order_are_the_same_task(self) -> None:
        made = component(DPVotingRunnable, usual(), labels=LABELS[::-1])
        assert made.labels == LABELS[::-1]

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"labels": ("card", "cash", "wire", "coin")}, "labels"),
            ({"llm": engine(name="another")}, "rehearsal.model"),
            ({"prefix": "Sort the notes."}, "rehearsal.wording"),
        ],
    )
    def test_refuse_a_rehearsal_of_something_else_before_anything_is_charged(
        self, options: dict[str, Any], said: str
    ) -> None:
        budget = Budget(epsilon=8.0, delta=1e-6)
        with pytest.raises(ConfigurationError, match=said):
            component(DPVotingRunnable, usual(), budget=budget, **options)
        assert budget.remaining_epsilon == 8.0

    def test_without_one_they_warn_that_the_plan_is_a_guess(self) -> None:
        with pytest.warns(RestsOnGuessWarning, match="rehearse") as caught:
            made = component(DPVotingRunnable, None)
        assert caught[0].filename == __file__
        assert made.expected()["rests_on"] == "a guess"
        with warnings.catch_warnings():
            warnings.simplefilter("error", RestsOnGuessWarning)
            component(DPVotingRunnable, usual())

    @pytest.mark.parametrize("kind", [DPVotingRunnable, PromptPATELabeler])
    def test_they_warn_of_noise_before_it_is_paid_for_and_not_of_little(self, kind: Any) -> None:
        with pytest.warns(NoisyPlanWarning, match=r"noise takes \d+ points .*, by a rehearsal of ") as caught:
            made = component(kind, usual(), epsilon=0.03, answers=LabelAnswers(calibrate=False))
        assert [one.filename for one in caught] == [__file__]
        said = made.expected()
        taken = said["without_noise_prob"] - said["right_label_prob"] - said["abstain_prob"]
        points = int(re.findall(r"noise takes (\d+) points", str(caught[0].message))[0])
        assert points == pytest.approx(100 * taken, abs=3)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Do not spend like this: noise")
            component(kind, usual(), epsilon=4.0, answers=LabelAnswers(calibrate=False))

    def test_beside_a_verdict_to_spend_the_warning_of_noise_does_not_say_otherwise(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = {"epsilon": 0.03, "answers": LabelAnswers(calibrate=False)}
        with pytest.warns(NoisyPlanWarning, match=r"^Do not spend like this: noise takes \d+ points"):
            component(DPVotingRunnable, usual(), **asked)
        monkeypatch.setattr(choice.Proposal, "spends", True)
        with pytest.warns(NoisyPlanWarning, match=r"^noise takes \d+ points"):
            component(DPVotingRunnable, usual(), **asked)

    @pytest.mark.parametrize("kind", [DPVotingRunnable, PromptPATELabeler])
    def test_they_warn_where_what_is_free_is_as_good(self, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.warns(NoisyPlanWarning, match="no better than what is free") as caught:
            made = component(kind, usual())
        assert [one.filename for one in caught] == [__file__]
        best = propose_rows(usual(), 2_000, epsilon=4.0, delta=5e-7, max_queries=20)
        said = str(caught[0].message)
        assert f"{best.free.right:.0%} by {best.free.name}" in said
        assert f"{best.right:.0%}" in said
        assert best.rests_on in said
        assert made.queries_left == 20, "a note, and nothing is refused"
        with warnings.catch_warnings():
            warnings.simplefilter("error", NoisyPlanWarning)
            monkeypatch.setattr(choice, "WORTH", -1.0)
            component(kind, usual())


class TestWhatAReviewFound:
    def test_other_answers_in_text_are_no_label_of_the_rehearsal(self) -> None:
        """A candidate for answers that name no label widens a release, and is no label."""
        found = usual()
        plan = plan_labelling(2_000, epsilon=1.0, delta=1e-6, max_queries=20, width=4)
        expected = plan.expected(found, labels=3)
        assert expected["rests_on"] == found.rests_on
        assert plan.right_rows_needed(0.5, source=found, labels=3) is not None
        with pytest.raises(ConfigurationError, match="labels"):
            plan.expected(found)

    def test_confident_gnmax_keeps_rows_that_its_threshold_was_counted_in(self) -> None:
        noise = ConfidentGNMax(28.0, test_stddev=4.0, vote_stddev=4.0)
        made = component(PromptPATELabeler, None, noise=noise, epsilon=8.0)
        assert (made.plan.design.rows, made.plan.design.num_slots) == ("units", 40)
        with pytest.raises(ConfigurationError, match=r"Rows.* with ConfidentGNMax"):
            component(PromptPATELabeler, usual(), noise=noise, epsilon=8.0)

    def test_calls_of_several_content_free_inputs_are_counted(self) -> None:
        answers = LabelAnswers(calibrate=True, content_free=("N/A", "N/A!", "N/A?"))
        found = propose_rows(rehearsed(answers=answers), 8_000, epsilon=4.0, max_calls=80, **TERMS)
        assert found.calibrated
        assert found.private_calls == 4 * round(found.plan.expected_rows) <= 80

    @pytest.mark.parametrize("count", [4, 5, 7])
    def test_few_examples_are_enough_for_a_number(self, count: int) -> None:
        public = [
            {"text": f"note {place} of {LABELS[place % 2]}", "label": LABELS[place % 2]} for place in range(count)
        ]
        found = propose_rows(rehearsed(public=public, shots=(1,)), 8_000, epsilon=4.0, **TERMS)
        assert 0.0 <= found.low <= found.right <= found.high <= 1.0

    @pytest.mark.parametrize(
        "shape",
        [
            {"shots": 100},
            {"shots": 10**9},
            {"shots": 10**400},
            {"deals": [0] * 65, "votes": [[0] * 65] * 36},
            {"deals": [0, 2], "votes": [[0, 0]] * 36},
            {"text": "more"},
        ],
    )
    def test_a_file_that_would_take_all_memory_or_has_impossible_rows_is_refused(
        self, shape: dict[str, Any], tmp_path: Path
    ) -> None:
        state = usual().to_dict()
        one = {"shots": 4, "calibrated": False, "deals": [0, 0], "votes": [[0, 0]] * 36}
        state["shapes"] = [state["shapes"][0], {**one, **shape}]
        (tmp_path / "r.json").write_text(Rehearsal._FORM.text(state))
        with pytest.raises(ConfigurationError, match="rehearsal"):
            Rehearsal.load(tmp_path / "r.json")

    def test_soft_votes_take_a_rehearsal_and_other_content_free_inputs_do_not(self) -> None:
        found = rehearsed(answers=LabelAnswers(calibrate=True))
        component(DPVotingRunnable, found, answers=LabelAnswers(votes="soft"))
        with pytest.raises(ConfigurationError, match="content_free"):
            component(DPVotingRunnable, found, answers=LabelAnswers(content_free=("", "nothing")))

    def test_votes_in_text_cannot_be_calibrated_here_either(self) -> None:
        wanted = LabelAnswers(votes="text", calibrate=True)
        with pytest.raises(ConfigurationError, match=r"LabelAnswers\.calibrate"):
            rehearsed(EmbeddedLLM(), answers=wanted)

    def test_fields_of_further_wordings_are_read(self) -> None:
        public = [{**one, "topic": "money"} for one in examples()]
        task = FewShotTask(
            "text: {text}\nlabel: {label}",
            "text: {input}\nlabel:",
            wordings=(FewShotTask("about {topic}: {text}\nlabel: {label}", "text: {input}\nlabel:"),),
        )
        assert rehearsed(public=public, task=task, shots=(1, 2)).shots(False) == (1, 2)

    def test_wordings_that_no_shape_has_room_for_are_named(self) -> None:
        with pytest.raises(ConfigurationError, match="wordings"):
            propose_rows(usual(), 8_000, epsilon=4.0, wordings=45, **TERMS)
