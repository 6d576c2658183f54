"""A black-box audit of `PromptPATELabeler`: no label of a public input gives away more than its ticket is charged for.

Every check of the sound package fails by chance with probability at most 1e-6 (`ALARM`), exactly; there are 24 of
them. Every check has positive controls: bugs planted in the package, under which the same check must fail. The noise is
a test's: one release has a mu, range or epsilon of 2 to 4, where few answers tell a wrong scale. A planted game stops
at its first refutation and may go on to four times the size of the sound one: there each bug is missed with probability
below 1e-3, by simulation of its exact chances, and is looked for again where it was missed.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from langchain_dpicl.audit.targets import labeler_of
from tests import audit_plants as plant
from tests import pate_plants as pate
from tests.pate_games import FIXED, UNITS, LabelGame, refutations

YES, NO = "1,0", "0,1"
ONE_SAMPLE = {"teachers": "one_sample"}
REPLACED, PERMUTE_AND_FLIP = {"adjacency": "replace_one"}, {"mechanism": "permute_and_flip"}
GAUSSIAN = {"mechanism": "gaussian"}
SAMPLED = {"public_size": 4, "num_slots": 1, "noise_multiplier": 1 / 3}  # a quarter of the samples hold a unit
PAIRS = ("1.0,0", "0.00,1", "1.000,0", "0.0000,1", "1.00000,0", "0.000000,1", "1.0000000,0")
ALWAYS = -100.0  # a threshold that every test passes

# --- games: every way of drawing teachers, with every mechanism -------------------------------------------------------

GAMES = {
    # The vote of the only slot changes: margin +1 against -1. An empty slot is asked too, and votes no.
    "fresh slot, gumbel": LabelGame(units=(YES,), neighbour=(), runs=150, options={"noise_multiplier": 0.25}),
    "fresh units, gaussian": LabelGame(
        units=(YES,), neighbour=(), runs=100, options={**UNITS, **GAUSSIAN}, direction=(1.0, 0.0), threshold=0.5
    ),
    # A tie against a gap of 2: there permute-and-flip loses all that it may.
    "fresh slots, permute and flip": LabelGame(
        units=(YES,),
        neighbour=(NO,),
        runs=160,
        options={"public_size": 2, **REPLACED, **PERMUTE_AND_FLIP},
    ),
    "fresh units, test": LabelGame(
        units=(YES,), neighbour=(), runs=150, options={**UNITS, "confident": (1.0, 0.5, 0.5)}, question="test"
    ),
    "fresh slot, answer": LabelGame(
        units=(YES,), neighbour=(), runs=120, options={"confident": (ALWAYS, 0.5, 0.7)}, question="answer"
    ),
    # Three votes are declared; the candidate to abstain stands at 1.2, the label at 2 or 1.
    "abstaining, gumbel": LabelGame(
        units=(YES, YES), neighbour=(YES,), runs=150, options={**UNITS, "public_size": 3, "abstain_below": 0.4}
    ),
    # Here the candidate to abstain is far below: where it moves with the teachers that are there, it wins.
    "abstaining late, gumbel": LabelGame(
        units=(YES, YES), neighbour=(YES,), runs=150, options={**UNITS, "public_size": 3, "abstain_below": 0.1}
    ),
    "abstaining, gaussian": LabelGame(
        units=(YES, YES),
        neighbour=(YES,),
        runs=100,
        options={**UNITS, **GAUSSIAN, "public_size": 3, "abstain_below": 0.5},
    ),
    "sampled units, gumbel": LabelGame(units=(YES, NO), neighbour=(NO,), runs=150, options={**UNITS, **SAMPLED}),
    "sampled slot, gumbel": LabelGame(units=(YES,), neighbour=(), runs=80, options=SAMPLED),
    "sampled slot, gaussian": LabelGame(
        units=(YES,), neighbour=(), runs=100, options={**SAMPLED, **GAUSSIAN}, direction=(1.0, -1.0)
    ),
    # In order, all four pairs begin with no; without the first unit they would begin with yes.
    "fresh pairs": LabelGame(
        units=(NO, YES, NO, YES, NO, YES, NO, YES),
        neighbour=(YES, NO, YES, NO, YES, NO, YES),
        runs=50,
        options={"public_size": 8, "num_slots": 4, "shots_per_slot": 2},
    ),
    # One sample for all the inputs of a run; at rate 1 each of them has its part of the one ticket.
    "one sample, gumbel": LabelGame(
        units=(YES,), neighbour=(), runs=120, options={**ONE_SAMPLE, "noise_multiplier": 0.25}
    ),
    "one sample, permute and flip": LabelGame(
        units=(YES,),
        neighbour=(NO,),
        runs=120,
        options={"public_size": 2, **ONE_SAMPLE, **REPLACED, **PERMUTE_AND_FLIP},
    ),
    "one sample, test": LabelGame(
        units=(YES,),
        neighbour=(),
        runs=120,
        options={**UNITS, **ONE_SAMPLE, "confident": (0.5, 0.5, 0.5)},
        question="test",
    ),
    "one sample, answer": LabelGame(
        units=(YES,), neighbour=(), runs=120, options={**ONE_SAMPLE, "confident": (ALWAYS, 0.5, 0.7)}, question="answer"
    ),
    # The mean of sixteen histograms of one sample tells four times as much as one.
    "one sample, sixteen histograms": LabelGame(
        units=(YES,),
        neighbour=(),
        runs=20,
        options={**ONE_SAMPLE, **GAUSSIAN, "noise_multiplier": 1.0},
        together=16,
        direction=(1.0, -1.0),
    ),
    "one secret sample, two histograms": LabelGame(
        units=(YES,),
        neighbour=(),
        runs=50,
        options={**ONE_SAMPLE, **GAUSSIAN, "public_size": 2, "num_slots": 1, "noise_multiplier": 0.15},
        together=2,
        direction=(1.0, -1.0),
        threshold=0.3,
    ),
    # The first of five one-shot teachers decides between three and two votes.
    "fixed, gumbel": LabelGame(
        units=(YES, YES, YES, NO, NO),
        neighbour=(NO, YES, YES, NO, NO),
        runs=150,
        options={**FIXED, "public_size": 5, "noise_multiplier": 0.25},
    ),
    "fixed, gaussian": LabelGame(
        units=(YES, NO),
        neighbour=(NO, NO),
        runs=100,
        options={**FIXED, **GAUSSIAN, "public_size": 2},
        direction=(1.0, -1.0),
        threshold=-1.0,
    ),
    "fixed, permute and flip": LabelGame(
        units=(YES, NO), neighbour=(NO, NO), runs=120, options={**FIXED, **PERMUTE_AND_FLIP, "public_size": 2}
    ),
    "fixed, test": LabelGame(
        units=(YES, YES),
        neighbour=(NO, YES),
        runs=150,
        options={**FIXED, "public_size": 2, "confident": (1.5, 0.5, 0.7)},
        question="test",
    ),
    "fixed, answer": LabelGame(
        units=(YES, YES, NO),
        neighbour=(NO, YES, NO),
        runs=150,
        options={**FIXED, "public_size": 3, "confident": (ALWAYS, 0.1, 0.7)},
        question="answer",
    ),
    # The target says no, shortly or at length; the first of each pair votes.
    "fixed pairs": LabelGame(
        units=("0.,1", *PAIRS),
        neighbour=("0.00000000,1", *PAIRS),
        runs=50,
        options={**FIXED, "public_size": 8, "num_slots": 4, "shots_per_slot": 2},
    ),
}


@pytest.mark.parametrize("name", [name for name in GAMES if name.endswith(("gumbel", "gaussian", "permute and flip"))])
def test_a_game_plays_the_mechanism_that_it_is_named_after(name):
    game = GAMES[name]
    mechanism = labeler_of(game.units, game.together or game.runs, **game.options).plan.to_dict()["mechanism"]
    assert name.endswith(mechanism.replace("_", " "))


@pytest.mark.parametrize("name", GAMES)
def test_no_label_gives_away_more_than_it_is_charged_for(name):
    """Clopper-Pearson bounds for every outcome and its complement; false alarm at most 1e-6 per game.

    Also, and without any chance: tickets are what was asked and answered, and a run ends where its share is spent.
    """
    assert refutations(GAMES[name]) == []


PLANTS = {
    # noise and its price
    "fresh, gumbel scale halved": ("fresh slot, gumbel", plant.scaled(0.5)),
    "fresh, no noise": ("fresh slot, gumbel", plant.gumbel(np.zeros_like)),
    "fresh, half of it charged": ("fresh slot, gumbel", plant.half_charged),
    "fresh, exponential scale a third": ("fresh slots, permute and flip", plant.scaled(1 / 3)),
    "fresh, sigma halved": ("fresh units, gaussian", plant.scaled(0.5)),
    "fixed, no exponential noise": ("fixed, permute and flip", pate.no_exponential_noise),
    "fixed, sigma halved": ("fixed, gaussian", plant.scaled(0.5)),
    "fresh, sigma of an answer halved": ("fresh slot, answer", plant.scaled(0.5)),
    "one sample, sigma of an answer halved": ("one sample, answer", plant.scaled(0.5)),
    "one sample, no noise": ("one sample, gumbel", plant.gumbel(np.zeros_like)),
    "one sample, no exponential noise": ("one sample, permute and flip", pate.no_exponential_noise),
    # thresholds
    "test without noise": ("fresh units, test", pate.threshold_without_noise),
    "test of a sample without noise": ("one sample, test", pate.threshold_without_noise),
    "fixed, test without noise": ("fixed, test", pate.threshold_without_noise),
    "fixed, noise of the test halved": ("fixed, test", pate.noise_of_the_test_scaled(0.5)),
    "fixed, a test charged for half a vote": ("fixed, test", pate.half_a_vote),
    "abstaining without noise": ("abstaining, gumbel", plant.threshold_on_true_votes),
    "absent teachers abstain": ("abstaining late, gumbel", pate.absent_teachers_abstain),
    "threshold on the true histogram": ("abstaining, gaussian", pate.threshold_on_the_true_histogram),
    "rejected inputs are asked again": ("fresh units, test", pate.goes_on_until_answered),
    "sigmas swapped, answer": ("fixed, answer", pate.sigmas_swapped),
    # teachers
    "everybody charged as a sample": ("sampled slot, gaussian", pate.always_sampled),
    "redrawn until agreed": ("sampled units, gumbel", pate.redrawn_until_agreed),
    "tickets given back": ("sampled slot, gumbel", pate.never_burnt),
    "everybody charged as one secret sample": ("one secret sample, two histograms", pate.always_sampled),
    "one sample charged for one input": ("one sample, sixteen histograms", pate.sample_charged_for_one_input),
    "teachers chosen by validation": ("fixed, gumbel", pate.chosen_by_validation),
    "records dealt by accuracy": ("fixed pairs", pate.ordered_by_accuracy),
    "partition shuffled with a seed of the data": ("fixed pairs", pate.shuffled_by_fingerprint),
    "slots are chunks of a seeded shuffle": ("fresh pairs", pate.shuffled_with_a_seed),
    # stopping, and tickets
    "a run ends at disagreement": ("fixed, permute and flip", pate.stops_at_disagreement),
    "answers given back": ("fixed, answer", pate.answer_given_back),
    "tests not charged": ("fixed, test", pate.never_burnt),
}


@pytest.mark.parametrize("bug", PLANTS)
def test_a_planted_bug_is_caught_in_the_labels(bug, monkeypatch):
    name, plants = PLANTS[bug]
    plants(monkeypatch)
    game = GAMES[name]
    assert plant.seen_in_two(lambda: refutations(dataclasses.replace(game, runs=4 * game.runs), looks=21))
