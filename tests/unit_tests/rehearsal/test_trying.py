"""What is free beside what is private, and one recommendation."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import numpy as np
import pytest

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.options import LabelAnswers, Rows
from langchain_dpicl.planning.expected_utility import RowDesign
from langchain_dpicl.rehearsal import FreeRival, Rehearsal, RehearsedShape, Trial, propose_rows, try_components
from langchain_dpicl.rehearsal.choice import against_free, best_free, free_rivals, rights_of, verdict_of

QUESTIONS, LABELS = 96, 4
TERMS: dict[str, Any] = {"delta": 1e-6, "epsilons": (1.0, 4.0)}


def rehearsed(
    *, zero_shot: float, rows: dict[int, float], same: float = 0.0, questions: int = QUESTIONS, seed: int = 7
) -> Rehearsal:
    """Returns a rehearsal with the given shares of right rows.

    Args:
      zero_shot: share of questions that are right without examples.
      rows: share of right rows, by shots.
      same: share of questions that get the same vote in all rows.
      questions: public examples; rows of a few share many, so that private rows are worth more.
      seed: of the votes.
    """
    rng = random.Random(seed)
    gold = tuple(place % LABELS for place in range(questions))

    def vote(right: bool, place: int) -> int:
        return place if right else rng.choice([other for other in range(LABELS) if other != place])

    shapes = [RehearsedShape(0, False, (0,), tuple((vote(rng.random() < zero_shot, place),) for place in gold))]
    for shots, right in rows.items():
        votes = []
        for place in gold:
            one = vote(rng.random() < right, place)
            is_same = rng.random() < same
            deal = [one if is_same else vote(rng.random() < right, place) for _ in range(4)]
            again = [one if is_same else vote(rng.random() < right, place) for _ in range(4)]
            votes.append((*deal, *again))
        shapes.append(RehearsedShape(shots, False, (0, 0, 0, 0, 1, 1, 1, 1), tuple(votes)))
    return Rehearsal("made", "whole labels", ("a", "b", "c", "d"), "0", "same", gold, tuple(shapes), 1)


@pytest.fixture(scope="module")
def alike() -> Rehearsal:
    """Rows err alike, so private ones cannot outvote the public ones."""
    return rehearsed(zero_shot=0.3, rows={1: 0.6, 4: 0.6}, same=0.9)


@pytest.fixture(scope="module")
def trial(alike: Rehearsal) -> Trial:
    return try_components(alike, 3000, **TERMS, max_queries=200, public_inputs=50, price_in=2.0, price_out=5.0)


def test_plans_show_a_bar_where_one_is_asked_for(alike: Rehearsal, capsys: pytest.CaptureFixture[str]) -> None:
    given: dict[str, Any] = {**TERMS, "max_queries": 20, "epsilons": [8.0]}
    assert try_components(alike, 3000, **given) == try_components(alike, 3000, **given, progress=True)
    assert "plans: " in capsys.readouterr().err


def with_gains(trial: Trial, *gains: tuple[float, float, str]) -> Trial:
    """Returns a trial with the given epsilons, gains and verdicts."""
    first = trial.options[0]
    options = [
        dataclasses.replace(first, epsilon=epsilon, gain=gain, verdict=verdict)  # type: ignore[arg-type]
        for epsilon, gain, verdict in gains
    ]
    return dataclasses.replace(trial, options=tuple(options))


class TestTheTable:
    def test_every_private_line_is_what_the_rehearsal_proposes(self, alike: Rehearsal, trial: Trial) -> None:
        asked = [(one.component, one.epsilon) for one in trial.options]
        assert asked == [("votes", 1.0), ("votes", 4.0), ("labels", 1.0), ("labels", 4.0)]
        for option, count in zip(trial.options, (200, 200, 50, 50), strict=True):
            found = propose_rows(alike, 3000, epsilon=option.epsilon, delta=1e-6, max_queries=count)
            assert (option.right, option.low, option.high) == (found.right, found.low, found.high)
            assert (option.verdict, option.gain) == (found.verdict, found.gain)
            cost = found.plan.cost()
            assert option.calls == cost.private_calls + cost.public_calls
            assert option.money == pytest.approx((2.0 * cost.tokens_in + 5.0 * cost.tokens_out) / 1e6)
            assert option.low <= option.right <= option.high <= option.at_most
            assert found.at_most <= option.at_most

    def test_all_of_it_is_printed(self, trial: Trial) -> None:
        text = trial.table()
        assert text == str(trial)
        for option in trial.options:
            [line] = [line for line in text.splitlines() if line.startswith(option.name)]
            assert f"{100 * option.right:.0f} %" in line
            assert option.span in line
            assert f"{option.calls:,}" in line
            assert f"{option.money:,.2f}" in line
            assert f"  {option.verdict}; {option.design}" in text.splitlines()
        for rival in trial.free:
            assert rival.name in text
        assert text.splitlines()[-1] == f"recommended: {trial.advice}"
        assert text.count("recommended") == 1
        assert "rehearsal of 96 public examples" in text

    def test_it_is_json_and_html(self, trial: Trial) -> None:
        shown = json.loads(json.dumps(trial.to_dict()))
        assert len(shown["options"]) == len(trial.options)
        assert shown["advice"] == trial.advice
        assert trial.advice.split(":")[0] in trial._repr_html_()

    def test_settings_are_what_a_component_takes(self, trial: Trial) -> None:
        for option in trial.options:
            Rows(**option.settings["rows"])
            answers = LabelAnswers(**option.settings["answers"])
            assert option.settings["epsilon"] == option.epsilon
            assert answers.abstain_below == ("never" if option.component == "labels" else None), "as was computed"

    def test_several_wordings_are_read_by_slots(self) -> None:
        flat = rehearsed(zero_shot=0.3, rows={1: 0.7, 8: 0.7})  # more shots bring nothing: unit rows are the best
        units, slots = (
            try_components(flat, 3000, delta=1e-6, epsilons=(1.0,), wordings=wordings).options[0] for wordings in (1, 2)
        )
        assert "units" in units.settings["rows"]
        assert "slots" in slots.settings["rows"]

    def test_further_answers_take_part(self, alike: Rehearsal, trial: Trial) -> None:
        best = FreeRival("a rule of thumb", 0, False, 0.99)
        more = try_components(alike, 3000, delta=1e-6, epsilons=(4.0,), free=[best], private=trial.options[:1])
        assert more.best_free == best
        assert more.options[-1] == trial.options[0]
        assert "a rule of thumb says 99 % for nothing" in more.advice

    def test_a_further_answer_that_is_better_leaves_less_of_a_gain(self) -> None:
        good = rehearsed(zero_shot=0.25, rows={4: 0.7, 8: 0.7}, seed=5)
        rule = FreeRival("a rule of thumb", 0, False, 0.97)
        plain, beside = (
            try_components(good, 100_000, delta=1e-7, epsilons=(8.0,), free=free).options[0] for free in ([], [rule])
        )
        assert beside.right == plain.right
        assert beside.gain == pytest.approx(min(plain.gain, plain.right - 0.97))
        none = FreeRival("nothing", 0, False, 0.0)
        assert try_components(good, 100_000, delta=1e-7, epsilons=(8.0,), free=[none]).options[0] == plain


class TestTheRecommendation:
    def test_is_not_to_spend_where_the_public_examples_are_as_good(self, trial: Trial) -> None:
        assert trial.recommended is None
        free = trial.best_free
        assert trial.advice == f"do not spend: {free.name} says {100 * free.right:.0f} % for nothing"

    def test_is_to_spend_where_private_rows_outvote_those_of_few_public_examples(self) -> None:
        small = rehearsed(zero_shot=0.25, rows={1: 0.3, 8: 0.45}, questions=24)
        large = try_components(small, 100_000, delta=1e-6, epsilons=(1.0, 4.0), max_queries=50)
        assert large.recommended is not None
        assert large.recommended.right > large.best_free.right + 0.02
        assert large.advice.startswith("private votes at epsilon 1: ")
        few = try_components(small, 200, delta=1e-6, epsilons=(1.0, 4.0), max_queries=100_000)
        assert few.recommended is None, "noise takes what private rows are worth"

    def test_is_not_to_spend_where_rows_guess(self) -> None:
        guessing = rehearsed(zero_shot=0.25, rows={1: 0.25, 4: 0.25}, seed=3)
        found = try_components(guessing, 100_000, delta=1e-7, epsilons=(8.0,))
        assert found.recommended is None
        assert found.advice.startswith("do not spend: ")

    def test_is_the_least_epsilon_with_half_of_the_largest_gain(self, trial: Trial) -> None:
        sure, perhaps, no = "beats what is free", "perhaps better than what is free", "no better than what is free"
        cases = [
            ([(1.0, 0.03, sure), (2.0, 0.09, sure), (4.0, 0.15, sure)], 2.0),
            ([(1.0, 0.08, sure), (4.0, 0.15, sure)], 1.0),
            ([(1.0, 0.20, perhaps), (4.0, 0.15, sure)], 4.0),
            ([(1.0, 0.05, perhaps), (4.0, 0.01, no)], None),
            ([(1.0, 0.01, no), (4.0, -0.1, no)], None),
        ]
        for gains, epsilon in cases:
            best = with_gains(trial, *gains).recommended
            assert (None if best is None else best.epsilon) == epsilon

    def test_says_how_to_become_sure(self, trial: Trial) -> None:
        advice = with_gains(trial, (1.0, 0.05, "perhaps better than what is free")).advice
        assert advice.startswith("none yet: private votes at epsilon 1: ")
        assert advice.endswith("four times as many public examples (max_examples=, --examples) halve the range")

    def test_names_what_is_private_and_what_is_free(self, trial: Trial) -> None:
        advice = with_gains(trial, (4.0, 0.1, "beats what is free")).advice
        assert advice.startswith("private votes at epsilon 4: ")
        assert trial.best_free.name in advice


class TestWhatIsFree:
    def test_the_most_frequent_label_is_a_rival_too(self) -> None:
        found = rehearsed(zero_shot=0.25, rows={1: 0.25})
        rival = next(one for one in free_rivals(found) if one.label is not None)
        shares = found.label_shares()
        assert rival.right == max(shares)
        assert rival.label == found.labels[shares.index(max(shares))]
        halved = np.zeros(len(found.gold))
        halved[np.array(found.gold) == shares.index(max(shares))] = 1.0
        assert rights_of(found, rival, [halved, 1.0 - halved]).tolist() == [1.0, 0.0]

    def test_it_is_one_answer_with_one_chance_for_every_verdict(self) -> None:
        """Sixteen shapes of rows that guess: the best of them looks better than one whose choice is left out."""
        guessing = rehearsed(zero_shot=0.2, rows=dict.fromkeys(range(1, 17), 0.25), same=0.9, seed=11)
        best = max((one for one in free_rivals(guessing) if one.shots), key=lambda one: one.right)
        assert best.right > 0.29
        trial = try_components(guessing, 3000, delta=1e-6, epsilons=(4.0,))
        found = propose_rows(guessing, 3000, epsilon=4.0, delta=1e-6, max_queries=100)
        assert trial.best_free == best_free(guessing) == best
        assert (found.free.name, found.free.right) == (best.name, pytest.approx(best.right, abs=1e-4))
        assert against_free(guessing, 0.5, np.full(24, 0.5))[0] == 0.5 - best.right

    def test_the_model_without_examples_may_be_the_best(self) -> None:
        found = best_free(rehearsed(zero_shot=0.95, rows={1: 0.4, 4: 0.4}, same=0.9))
        assert found.name == "zero-shot"
        assert found.right > 0.85

    @pytest.mark.parametrize(
        ("rule", "verdict"),
        [
            (0.5, "beats what is free"),  # a gain of 45 points, where a rule of 96 questions errs by 5
            (0.89, "perhaps better than what is free"),
            (0.94, "no better than what is free"),
        ],
    )
    def test_a_plan_of_given_rows_may_be_sure_to_beat_what_is_free(self, rule: float, verdict: str) -> None:
        found = rehearsed(zero_shot=0.2, rows={4: 0.25}, same=0.9)
        rights, further = np.full(24, 0.95), FreeRival("a rule of thumb", 0, False, rule)
        gain, said = against_free(found, 0.95, rights, free=[further])
        assert (gain, said) == (pytest.approx(0.95 - rule), verdict)
        made_up = dataclasses.replace(found, origin="made_up")
        assert against_free(made_up, 0.95, rights, free=[further])[1] != "beats what is free"

    def test_a_gain_is_compared_question_by_question_where_these_are_known(self) -> None:
        found = rehearsed(zero_shot=0.6, rows={4: 0.25}, same=0.9)
        rival = best_free(found)
        assert rival.name == "zero-shot"
        paired = rights_of(found, rival, found.resamples) + 0.03
        assert against_free(found, rival.right + 0.03, paired)[1] == "beats what is free"
        apart = np.random.default_rng(2).permutation(paired)
        assert against_free(found, rival.right + 0.03, apart)[1] == "perhaps better than what is free"

    def test_a_gain_is_worth_two_points(self) -> None:
        assert verdict_of(0.02) == "no better than what is free"
        assert verdict_of(0.021) == "perhaps better than what is free"
        assert verdict_of(0.021, is_sure=True) == "beats what is free"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"epsilons": ()}, "epsilons: expected at least one"),
        ({"max_queries": 0}, "max_queries"),
        ({"public_inputs": 0}, "public_inputs"),
        ({"price_in": -1.0}, "price_in"),
        ({"delta": 1e-3}, "delta: expected at most"),
        ({"max_calls": 1}, "max_calls: expected at least the rows of the smallest design"),
    ],
)
def test_numbers_out_of_range_are_refused(given: dict[str, Any], said: str, alike: Rehearsal) -> None:
    with pytest.raises(ConfigurationError, match=said):
        try_components(alike, 3000, **{"delta": 1e-6, "epsilons": (4.0,), **given})


@pytest.mark.parametrize(
    ("shape", "fields"),
    [
        ({"rows": "units", "num_slots": 20}, {"units": 20}),
        ({"rows": "slots", "num_slots": 20, "shots_per_slot": 4}, {"slots": 20, "shots": 4}),
        (
            {"rows": "slots", "num_slots": 20, "shots_per_slot": 2, "overfill": 1.0},
            {"slots": 20, "shots": 2, "fill": 1.0},
        ),
        ({"num_slots": 20, "sampling": "partition"}, {"slots": 20, "shots": 1, "sampling": "partition"}),
    ],
)
def test_a_design_says_which_rows_ask_for_it(shape: dict[str, Any], fields: dict[str, Any]) -> None:
    design = RowDesign.choose(**shape)
    assert design.option() == fields
    assert RowDesign.of(Rows(**fields)) == design
