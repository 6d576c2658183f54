"""Confident-GNMax with the operating system's coins: its law, audits of both of its prices, planted bugs.

Each assertion that must hold fails by chance with probability at most 1e-6 (`ALARM`); each planted bug passes by
chance with a probability far below that, at the fixed sizes used here.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import integrate, stats

from langchain_dpicl.privacy.accounting import epsilon_bound
from langchain_dpicl.privacy.extensions import confident_gnmax as confident
from langchain_dpicl.privacy.extensions.confident_gnmax import ConfidentGNMaxMechanism
from langchain_dpicl.privacy.mechanisms.bounded import Sensitivity, VoteSum
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM, SecureRandom
from tests.contracts.doubles import FixedDraws
from tests.contracts.mechanism import ROOM

ALARM = 1e-6
SLOTS = {"row_shape": "slots", "adjacency": "add_remove"}
ALWAYS = -(2.0**20)


def counted(*votes):
    """Returns the bounded sum of so many slots for each label."""
    rows = np.repeat(np.eye(len(votes)), votes, axis=0)
    return VoteSum().bound(rows, width=len(votes), **SLOTS)


# --- planted bugs -----------------------------------------------------------------------------------------------------

noisy, gaussian_draws, require = confident._noisy, SecureRandom.gaussian_draws, Sensitivity.require


def plant_threshold_without_noise(patch):
    """The exact largest count decides whether there is an answer."""
    patch.setattr(confident, "_noisy", lambda counts, *how: counts if counts.size == 1 else noisy(counts, *how))


def plant_one_draw_for_test_and_answer(patch):
    """The answer's noise begins with that of its test."""
    kept = []

    def draws(self, n):
        if n == 1:
            kept[:] = gaussian_draws(self, 1).values
            return FixedDraws(kept)
        return FixedDraws([*kept, *gaussian_draws(self, n - 1).values])

    patch.setattr(SecureRandom, "gaussian_draws", draws)


def plant_half_the_variance(patch):
    """Standard deviations over sqrt(2), in both questions."""
    patch.setattr(confident, "_noisy", lambda counts, scale, rng: noisy(counts, scale / math.sqrt(2), rng))


def plant_test_noise_of_a_moved_vote(patch):
    """The test's noise is scaled by the length of a moved vote, sqrt(2), not by what the largest count moves."""
    patch.setattr(Sensitivity, "require", lambda self, norm: require(self, "l2" if norm == "linf" else norm))


def plant_test_noise_of_half_a_vote(patch):
    """As if one vote moved the largest count by one half."""
    half = Sensitivity(l2=math.sqrt(2), range=2.0, linf=0.5)
    patch.setattr(VoteSum, "sensitivity", lambda self, **_: half)


def plant_votes_of_length_one(patch):
    """The forgotten sqrt(2)."""
    patch.setattr(VoteSum, "sensitivity", lambda self, **_: Sensitivity(l2=1.0, range=2.0, linf=1.0))


# --- the law of what leaves -------------------------------------------------------------------------------------------

VOTES, THRESHOLD, SIGMA_THRESHOLD, SIGMA_VOTES = (6, 4, 2), 4.0, 2.0, 1.5


def law(sigma_threshold=SIGMA_THRESHOLD, sigma_votes=SIGMA_VOTES):
    """Returns the chances of (no answer, each label) by the definition: a normal tail, and a normal integral each."""
    passed = stats.norm.sf((THRESHOLD - max(VOTES)) / sigma_threshold)

    def wins(i):
        gaps = [(VOTES[i] - other) / sigma_votes for j, other in enumerate(VOTES) if j != i]
        return integrate.quad(lambda x: stats.norm.pdf(x) * np.prod(stats.norm.cdf(x + np.array(gaps))), -9, 9)[0]

    return np.array([1 - passed, *(passed * wins(i) for i in range(len(VOTES)))])


def outcomes(releases):
    """Returns how often nothing and each label left, with these noises in the multipliers of a moved vote."""
    made = ConfidentGNMaxMechanism(SIGMA_VOTES / math.sqrt(2), SIGMA_THRESHOLD, threshold=THRESHOLD)
    total = counted(*VOTES)
    found = [made.release(total, rng=SYSTEM_RANDOM).index for _ in range(releases)]
    return np.bincount([0 if index is None else 1 + index for index in found], minlength=1 + len(VOTES))


def pvalue(found, chances):
    """Chi-square p-value of counted outcomes against a law."""
    return ROOM * stats.chisquare(found, chances * found.sum() / chances.sum()).pvalue


def test_answers_and_refusals_have_the_probabilities_of_the_definition():
    """Chi-square over 4 outcomes, 5,000 releases, false alarm 1e-6; 0.7 or 1.3 of either noise is rejected."""
    found = outcomes(5_000)
    assert pvalue(found, law()) > ALARM
    for factor in (0.7, 1.3):
        assert pvalue(found, law(sigma_threshold=SIGMA_THRESHOLD * factor)) < ALARM
        assert pvalue(found, law(sigma_votes=SIGMA_VOTES * factor)) < ALARM


@pytest.mark.parametrize(
    "plant",
    [
        plant_threshold_without_noise,
        plant_one_draw_for_test_and_answer,
        plant_half_the_variance,
        plant_test_noise_of_a_moved_vote,
        plant_test_noise_of_half_a_vote,
        plant_votes_of_length_one,
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_planted_noise_changes_the_law(plant, monkeypatch):
    plant(monkeypatch)
    releases = 6_000 if plant is plant_one_draw_for_test_and_answer else 3_000  # what is correlated shows least
    assert pvalue(outcomes(releases), law()) < ALARM


# --- audits: what moves between neighbours, against the price -----------------------------------------------------------

DELTA, MU = 0.3, 2.0
# A likely answer that leaves half of the time then shows most of the price.


def bound_on_epsilon(made, before, after, is_hit, *, trials):
    """Returns a lower bound on epsilon from how often `is_hit` holds in two neighbouring worlds.

    Clopper-Pearson, each end wrong with probability at most ALARM / 4.
    """

    def hits(total):
        return sum(is_hit(made.release(total, rng=SYSTEM_RANDOM).index) for _ in range(trials))

    likely, rare = hits(before), hits(after)
    low = stats.beta.ppf(ALARM / 4, likely, trials - likely + 1) if likely else 0.0
    high = stats.beta.ppf(1 - ALARM / 4, rare + 1, trials - rare)
    return math.log(max(low - DELTA, 1e-300) / high)


def price(event):
    """Returns epsilon at DELTA."""
    return epsilon_bound(event, delta=DELTA, adjacency="add_remove").epsilon


def audited_test(trials=2_000):
    """Returns (lower bound, price) where the test is nearly all of it: a slot moves, the largest count is 8 or 7."""
    made = ConfidentGNMaxMechanism.of_votes(threshold=8.0, sigma_threshold=1 / MU, sigma_votes=1e5, **SLOTS)
    return bound_on_epsilon(made, counted(8, 4), counted(7, 5), lambda index: index is not None, trials=trials), price(
        made.event
    )


def audited_answer(trials=2_000):
    """Returns (lower bound, price) where the answer is nearly all of it: the counts are equal, or 2 apart."""
    made = ConfidentGNMaxMechanism.of_votes(
        threshold=ALWAYS, sigma_threshold=1e5, sigma_votes=math.sqrt(2) / MU, **SLOTS
    )
    return bound_on_epsilon(made, counted(6, 6), counted(5, 7), lambda index: index == 0, trials=trials), price(
        made.event
    )


def audited_both(trials=2_000):
    """Returns (lower bound, price) where both tell: the largest count falls by 1, its lead by 2."""
    made = ConfidentGNMaxMechanism.of_votes(
        threshold=7.5, sigma_threshold=1 / 1.3, sigma_votes=math.sqrt(2) / 1.3, **SLOTS
    )
    return bound_on_epsilon(made, counted(8, 6), counted(7, 7), lambda index: index == 0, trials=trials), price(
        made.event
    )


@pytest.mark.parametrize("audit", [audited_test, audited_answer, audited_both])
def test_neighbouring_slots_lose_no_more_than_the_price(audit):
    """At delta 0.3; the lower bound is above the price with probability at most 1e-6, and no empty one."""
    found, cost = audit()
    assert 1.8 < cost < 2.2
    assert 0.1 < found <= cost


@pytest.mark.parametrize(
    ("plant", "audit", "trials"),
    [
        (plant_threshold_without_noise, audited_test, 1_000),
        (plant_test_noise_of_half_a_vote, audited_test, 2_000),
        (plant_half_the_variance, audited_answer, 6_000),
    ],
    ids=["threshold without noise", "test noise of half a vote", "half the variance of the answer"],
)
def test_the_audit_catches_a_planted_bug(plant, audit, trials, monkeypatch):
    plant(monkeypatch)
    found, cost = audit(trials)
    assert found > cost


@pytest.mark.parametrize(("free", "audit"), [("test", audited_test), ("answer", audited_answer)])
def test_the_audit_catches_a_half_of_the_release_that_costs_nothing(free, audit, monkeypatch):
    """Free tests are what some published figures need."""
    charged = {"test": "answer_event", "answer": "test_event"}[free]
    monkeypatch.setattr(ConfidentGNMaxMechanism, "event", property(lambda self: getattr(self, charged)))
    found, cost = audit()
    assert found > cost
