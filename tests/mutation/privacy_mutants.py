"""The bugs of published code for private in-context learning, each planted in ours, and what turns red.

Nineteen of them: noise (sigma and its grid of wrong values), who stands in which row, where coins come from, tokens, and
labels of public inputs. Each has tests of the suite that must fail with it and pass without. Two cannot be written in
this code without patching: rows are drawn inside a release that nobody can repeat ("redrawn until valid"), and no
sampler sees the order of units ("slots by index"); they are patched in all the same.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from langchain_dpicl.privacy.extensions.confident_gnmax import ConfidentGNMaxMechanism
from langchain_dpicl.privacy.extensions.logit_sums import ClippedLogitMean
from langchain_dpicl.privacy.mechanisms import release_plan
from langchain_dpicl.privacy.mechanisms import release_plan as mechanisms
from langchain_dpicl.privacy.mechanisms.randomness import SecureRandom
from tests import audit_games, pate_games
from tests import audit_plants as plant
from tests import pate_plants as pate
from tests.contracts.doubles import FixedDraws
from tests.statistical_tests import (
    test_confident_noise,
    test_logit_audit,
    test_noise,
    test_pate_audit,
    test_sampling_rates,
    test_voting_audit,
)
from tests.unit_tests.privacy.extensions import test_confident, test_logit_sums
from tests.unit_tests.privacy.mechanisms import test_aggregation, test_mechanisms, test_sampling

Patch = pytest.MonkeyPatch
Red = Callable[[], object]


@dataclass(frozen=True)
class Planted:
    """One bug."""

    words: str
    plants: Callable[[Patch], object]
    red: tuple[Red, ...]


def game(name: str) -> Red:
    """A game of the voting audit, at the size at which planted bugs are found with probability above 1 - 1e-12."""

    def play() -> None:
        played = test_voting_audit.GAMES[name]
        assert audit_games.refutations(dataclasses.replace(played, runs=4 * played.runs)) == []

    return play


def label_game(name: str) -> Red:
    """A game of the labelling audit, at its own size: what these bugs do to tickets shows without any chance."""
    return lambda: _none(pate_games.refutations(test_pate_audit.GAMES[name]))


def _none(found: list[str]) -> None:
    assert found == []


def many_releases() -> None:
    """The scale of 40,000 noise values: 5 % are seven standard errors beyond the bound."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_noise, "RELEASES", 2_000)
        test_noise.test_released_noise_has_the_declared_scale_on_every_coordinate(3.0)


def of(function: Callable[..., object], *given: Any) -> Red:
    return functools.partial(function, *given)


def noise_from_elsewhere(patch: Patch) -> None:
    """Laplace noise of the right variance, from a generator that is not the package's."""
    generator = np.random.default_rng()
    patch.setattr(SecureRandom, "gaussian_draws", lambda self, n: FixedDraws(generator.laplace(size=n) / math.sqrt(2)))


def twice_the_rows_in_the_divisor(patch: Patch) -> None:
    """The clip is divided by twice as many rows as there are, the sum is not."""
    test_logit_audit.plant_half_the_sensitivity(patch, ClippedLogitMean)


def twice_the_sampling_rate(patch: Patch) -> None:
    """A unit joins twice as often as is charged."""
    real = release_plan.poisson
    patch.setattr(release_plan, "poisson", lambda n, rate, rng: real(n, min(1.0, 2 * rate), rng))


def answers_alone_are_priced(patch: Patch) -> None:
    patch.setattr(ConfidentGNMaxMechanism, "repeated", lambda self, *counts: self.answer_event)


EVERY_LABEL = test_voting_audit.test_every_label_has_fresh_noise_of_the_claimed_scale
RATE = of(
    test_sampling_rates.test_poisson_units_join_at_the_declared_rate_equally_and_independently,
    release_plan.PoissonUnits(0.15),
)
SIMPLEX = of(test_aggregation.TestProbabilitySum().test_adversarial_neighbours_stay_within_the_bound)
SCALE = test_mechanisms.TestGaussian().test_the_noise_scale_is_the_multiplier_times_the_sensitivity_in_its_own_norm
CONTRACT = (
    test_sampling.TestPoissonSlots().test_no_unit_appears_twice_and_none_is_invented,
    test_sampling.TestPoissonUnits().test_no_unit_appears_twice_and_none_is_invented,
)

PLANTED = (
    Planted(
        "sigma / sqrt 2",
        plant.sensitivity_of_one,
        (
            game("slot, gaussian index"),
            of(EVERY_LABEL, "slots"),
            of(test_noise.test_released_noise_has_the_declared_scale_on_every_coordinate, 3.0),
        ),
    ),
    Planted("sigma 5 % low", plant.scaled(0.95), (many_releases, SCALE)),
    Planted(
        "wrong number of rows (x 2)",
        twice_the_rows_in_the_divisor,
        (
            test_logit_sums.TestClippedLogitMean().test_adversarial_neighbours_stay_within_the_bound,
            of(
                test_logit_audit.test_what_tokens_certify_is_below_what_is_claimed_and_near_to_it, "re-centred", "slots"
            ),
        ),
    ),
    Planted(
        "a record in two subsets",
        lambda patch: (plant.overlapping_slots(patch), plant.unit_drawn_with_replacement(patch)),
        CONTRACT,
    ),
    Planted(
        "slots by index",
        plant.slots_in_order,
        (test_sampling_rates.test_slots_are_chosen_uniformly_and_independently_of_the_unit, game("pairs in slots")),
    ),
    Planted(
        "no noise",
        plant.gumbel(np.zeros_like),
        (of(test_voting_audit.test_no_answer_gives_away_more_than_it_is_charged_for, "units, gumbel"),),
    ),
    Planted("noise on one label only", plant.gaussian(test_voting_audit.only(0)), (of(EVERY_LABEL, "slots"),)),
    Planted(
        "redrawn until valid",
        plant.redrawn_until(plant.not_empty),
        (test_voting_audit.test_every_query_has_a_sample_of_its_own_at_the_charged_rate,),
    ),
    Planted("noise used for two queries", plant.used_twice(plant.gaussian), (of(EVERY_LABEL, "units"),)),
    Planted(
        "coins with a seed",
        plant.seeded_once,
        (test_voting_audit.test_two_processes_that_begin_alike_release_different_scores,),
    ),
    Planted(
        "another family of noise, past the one door",
        noise_from_elsewhere,
        (
            test_mechanisms.TestGaussian().test_every_coordinate_pays_for_its_own_entropy,
            of(test_noise.test_released_noise_has_the_declared_scale_on_every_coordinate, 3.0),
        ),
    ),
    Planted(
        "token: sigma / sqrt 2",
        lambda patch: patch.setattr(mechanisms, "ROUND_UP", math.sqrt(0.5)),
        (of(test_logit_audit.test_tokens_follow_the_softmax_of_the_score_over_the_temperature, "re-centred"),),
    ),
    Planted("token: no subsample", plant.always_sampled, (RATE,)),
    Planted("token: sampling rate doubled", twice_the_sampling_rate, (RATE,)),
    Planted("token: probabilities above one", test_aggregation._plant_infinite_mass, (SIMPLEX,)),
    Planted("token: NaN accepted", test_aggregation._plant_nan, (SIMPLEX,)),
    Planted(
        "labels: threshold without noise",
        pate.threshold_without_noise,
        (test_confident_noise.test_answers_and_refusals_have_the_probabilities_of_the_definition,),
    ),
    Planted("labels: free where rejected", pate.rejected_for_free, (label_game("fixed, test"),)),
    Planted(
        "labels: test free where answered",
        lambda patch: (pate.tests_free_where_answered(patch), answers_alone_are_priced(patch)),
        (
            label_game("fixed, test"),
            of(test_confident.test_one_event_costs_what_its_tests_and_answers_cost_one_by_one, 500, 500, "replace_one"),
        ),
    ),
)
