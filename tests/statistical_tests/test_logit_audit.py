"""Tokens drawn from logit sums: their law, audits of their price on worst-case neighbours, planted bugs.

An audit plays one token on a sample that holds the target for sure: the price of the base release, which a sampler
then amplifies. Each assertion that must hold fails by chance with probability at most 1e-6 (`ALARM`); each planted bug
passes by chance with a probability far below that, at the fixed sizes used here.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter

import numpy as np
import pytest
from scipy import stats

from langchain_dpicl.privacy.extensions.logit_sums import ClippedDifferenceMean, ClippedLogitMean
from langchain_dpicl.privacy.mechanisms import release_plan as mechanisms
from langchain_dpicl.privacy.mechanisms.bounded import BoundedSum, Sensitivity
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.privacy.mechanisms.release_plan import GumbelMechanism, PoissonSlots, PoissonUnits, ReleasePlan
from tests import audit_games
from tests.contracts.mechanism import ROOM, softmax

ALARM = 1e-6
CLAIMED, RUNS, FEWER_RUNS = 2.0, 6_000, 3_000
WIDTH, SLOTS = 4, 3
INF = math.inf
FOR, AGAINST, ABSENT = [0.0, INF, -INF, 0.0], [0.0, -INF, INF, 0.0], None
SHOWN = np.array([0.5, 0.4, 0.4, 0.5])  # to the neighbours, who fight for the two tokens in the middle

SUMS = {
    "clip and blend": ClippedLogitMean(2.0, SLOTS, blend_weight=0.6, center="none"),
    "re-centred": ClippedLogitMean(2.0, SLOTS),
    "difference clip": ClippedDifferenceMean(0.5, SLOTS, center="none"),
    "median of differences": ClippedDifferenceMean(0.5, SLOTS),
}


def plan_of(made, row_shape, noise_multiplier=1 / CLAIMED):
    """Returns a plan whose token is claimed to be of bounded range `CLAIMED`."""
    sampler = PoissonUnits(0.5) if row_shape == "units" else PoissonSlots(0.5, num_slots=SLOTS, shots_per_slot=1)
    return ReleasePlan(sampler, made, GumbelMechanism(noise_multiplier), "add_remove")


def tokens(plan, target, runs):
    """Returns the tokens drawn with this target beside two rows that agree with the public prompt."""
    rows = np.array([SHOWN, SHOWN] if target is ABSENT else [target, SHOWN, SHOWN])
    return drawn(plan, plan.bound(rows, width=WIDTH, public=SHOWN), runs)


def drawn(plan, total, runs):
    return [plan.mechanism.release(total, rng=SYSTEM_RANDOM).index for _ in range(runs)]


def neighbours(row_shape):
    """The worst two contents of a slot, or a unit that is there or not."""
    return (FOR, AGAINST) if row_shape == "slots" else (FOR, ABSENT)


def certified(plan, row_shape, runs=RUNS):
    """Returns the largest range that the counts certify; false alarm `ALARM`.

    The odds of one token against another differ between neighbours by a factor of at most e^range. How often it is one
    of the two says nothing about which: given that, the counts are binomial.
    """
    sides = [Counter(tokens(plan, target, runs)) for target in neighbours(row_shape)]
    pairs = list(itertools.permutations(range(WIDTH), 2))
    alarm = ALARM / (4 * len(pairs))  # two bounds for each pair, in both orders of the sides
    found = -INF
    for (left, right), (i, j) in itertools.product((sides, sides[::-1]), pairs):
        least = audit_games.clopper_pearson_lower(left[i], left[i] + left[j], alarm)
        most = audit_games.clopper_pearson_upper(right[i], right[i] + right[j], alarm)
        found = max(found, audit_games.min_parameter(plan.mechanism.event, least, most))
    return found


# --- planted bugs -----------------------------------------------------------------------------------------------------


def plant_half_the_temperature(patch, kind):
    del kind
    patch.setattr(mechanisms, "ROUND_UP", 0.5)


def plant_half_the_sensitivity(patch, kind):
    """A clip over the slots, instead of twice that."""
    real = kind.sensitivity
    patch.setattr(kind, "sensitivity", lambda self, **how: Sensitivity(l2=None, range=real(self, **how).range / 2))


def plant_no_clip(patch, kind):
    """Logits within thirty of zero are added as they come."""
    patch.setattr(
        kind, "bounded_rows", lambda self, rows, **_: np.clip(np.array(rows, float), -30.0, 30.0) / self.num_slots
    )


def plant_a_public_offset_from_the_private_mean(patch, kind):
    """What is added to the sum as public has been computed from private rows."""
    real = kind.bound

    def bug(self, rows, *, width, public=None, **how):
        seen = public + np.clip(rows - public, -self.clip, self.clip).mean(axis=0)
        total = real(self, rows, width=width, public=public, **how)
        return BoundedSum(total.value + seen - public, total.sensitivity, total.row_shape, total.adjacency)

    patch.setattr(kind, "bound", bug)


def plant_top_k_of_the_noiseless_aggregate(patch, kind):
    """The candidates are the two best of the private scores."""
    real = kind.bound

    def bug(self, rows, **how):
        total = real(self, rows, **how)
        kept = np.where(total.value >= np.sort(total.value)[-2], total.value, -1e6)
        return BoundedSum(kept, total.sensitivity, total.row_shape, total.adjacency)

    patch.setattr(kind, "bound", bug)


PLANTED = [value for name, value in sorted(globals().items()) if name.startswith("plant_")]


# --- audits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row_shape", ["slots", "units"])
@pytest.mark.parametrize("name", SUMS)
def test_what_tokens_certify_is_below_what_is_claimed_and_near_to_it(name, row_shape):
    """False alarm 1e-6; one that certifies less than half of the claim would be blind (seen: 0.73 and more)."""
    plan = plan_of(SUMS[name], row_shape)
    assert plan.mechanism.event.bound == CLAIMED
    assert CLAIMED / 2 < certified(plan, row_shape) <= CLAIMED


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
@pytest.mark.parametrize(("name", "row_shape"), [("clip and blend", "units"), ("median of differences", "slots")])
def test_a_planted_bug_is_certified_to_cost_more_than_claimed(plant, name, row_shape, monkeypatch):
    plant(monkeypatch, type(SUMS[name]))
    assert certified(plan_of(SUMS[name], row_shape), row_shape, FEWER_RUNS) > CLAIMED


# --- the law ----------------------------------------------------------------------------------------------------------

ROWS = np.array([[1.3, 0.2, -9.0, 0.1], [0.1, 0.4, -0.3, 2.0], [0.5, -0.2, 0.6, -INF]])
PUBLIC = np.array([0.4, 0.3, 0.1, 0.2])
TEMPERATURE, DRAWS = 0.3, 10_000
SCORES = {  # by hand: the sums divided by three rows, the public score added
    "clip and blend": [
        0.6 * (1.3 + 0.1 + 0.5) / 3 + 0.4 * 0.4,
        0.6 * (0.2 + 0.4 - 0.2) / 3 + 0.4 * 0.3,
        0.6 * (-2.0 - 0.3 + 0.6) / 3 + 0.4 * 0.1,
        0.6 * (0.1 + 2.0 - 2.0) / 3 + 0.4 * 0.2,
    ],
    "re-centred": [
        (2.0 + 0.1 + 1.9) / 3,
        (0.9 + 0.4 + 1.2) / 3,
        (-2.0 - 0.3 + 2.0) / 3,
        (0.8 + 2.0 - 2.0) / 3,
    ],
    "difference clip": [
        0.4 + (0.5 - 0.3 + 0.1) / 3,
        0.3 + (-0.1 + 0.1 - 0.5) / 3,
        0.1 + (-0.5 - 0.4 + 0.5) / 3,
        0.2 + (-0.1 + 0.5 - 0.5) / 3,
    ],
    # Differences (0.9 -0.1 -9.1 -0.1), (-0.3 0.1 -0.4 1.8), (0.1 -0.5 0.5 -inf); public masses 0.29 0.26 0.21 0.24.
    "median of differences": [  # medians -0.1, -0.3 and 0.1
        0.4 + (0.5 + 0.0 + 0.0) / 3,
        0.3 + (0.0 + 0.4 - 0.5) / 3,
        0.1 + (-0.5 - 0.1 + 0.4) / 3,
        0.2 + (0.0 + 0.5 - 0.5) / 3,
    ],
}


@pytest.mark.parametrize("name", SUMS)
def test_tokens_follow_the_softmax_of_the_score_over_the_temperature(name):
    """Chi-square on 10,000 tokens, false alarm 1e-6; the law of another temperature or of another sum is rejected."""
    plan = plan_of(SUMS[name], "slots")
    plan = dataclasses.replace(plan, mechanism=GumbelMechanism(TEMPERATURE / plan.sensitivity.require("range")))
    total = plan.bound(ROWS, width=WIDTH, public=PUBLIC)
    counts = np.bincount(drawn(plan, total, DRAWS), minlength=WIDTH)

    def pvalue(scores, temperature):
        return ROOM * stats.chisquare(counts, np.array(softmax(scores, temperature)) * DRAWS).pvalue

    assert pvalue(SCORES[name], TEMPERATURE) > ALARM
    assert max(pvalue(SCORES[name], wrong * TEMPERATURE) for wrong in (0.7, 1.3)) < ALARM
    others = [scores for other, scores in SCORES.items() if other != name]
    assert max(pvalue(scores, TEMPERATURE) for scores in others) < ALARM
