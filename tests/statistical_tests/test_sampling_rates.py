"""Samplers include, spread and truncate as their theorems assume; every planted wrong way is rejected.

Each assertion that must hold fails by chance with probability at most 1e-6 (`ALARM`), exactly (binomial) or by
chi-square; the planted bugs are rejected with power near one at these sizes.
"""

from __future__ import annotations

import collections
import itertools

import numpy as np
import pytest
from scipy import stats

from langchain_dpicl.privacy.extensions.fixed_size_slots import BalancedSlots
from langchain_dpicl.privacy.mechanisms import release_plan
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.privacy.mechanisms.release_plan import PoissonSlots, PoissonUnits
from tests.contracts.mechanism import ROOM
from tests.contracts.sampler import members

ALARM = 1e-6
UNITS, RATE, DRAWS = 60, 0.15, 3000
POISSON = [PoissonUnits(RATE), PoissonSlots(RATE, num_slots=5, shots_per_slot=UNITS)]


def inclusion(sampler, draws=DRAWS):
    """Returns bool[draws, units]: who was drawn when."""
    taken = np.zeros((draws, UNITS), dtype=bool)
    for row in taken:
        row[members(sampler.draw(UNITS, rng=SYSTEM_RANDOM))] = True
    return taken


def rate_pvalue(taken, rate):
    """Exact two-sided binomial p-value of the overall rate."""
    return stats.binomtest(int(taken.sum()), taken.size, rate).pvalue


def homogeneity_pvalue(taken):
    """Chi-square p-value that every unit is drawn equally often."""
    counts = taken.sum(axis=0)
    return ROOM * stats.chisquare(counts).pvalue


def size_pvalue(taken, rate):
    """Two-sided chi-square p-value of the variance of the sample size: independent units make it n q (1 - q)."""
    spread = float(np.sum(np.square(taken.sum(axis=1) - UNITS * rate))) / (UNITS * rate * (1 - rate))
    return ROOM * 2 * min(stats.chi2.cdf(spread, len(taken)), stats.chi2.sf(spread, len(taken)))


@pytest.mark.parametrize("sampler", POISSON, ids=lambda s: s.name)
def test_poisson_units_join_at_the_declared_rate_equally_and_independently(sampler):
    """Three tests at 1e-6 on 180,000 coins; rates off by 10 % are rejected."""
    taken = inclusion(sampler)
    assert rate_pvalue(taken, RATE) > ALARM
    assert homogeneity_pvalue(taken) > ALARM
    assert size_pvalue(taken, RATE) > ALARM
    for factor in (0.9, 1.1):
        assert rate_pvalue(taken, factor * RATE) < ALARM


def test_pairs_of_units_join_independently():
    """Every neighbouring pair occurs at rate q^2: exact binomial on 30 disjoint pairs; false alarm 1e-6."""
    taken = inclusion(POISSON[0])
    both = int((taken[:, ::2] & taken[:, 1::2]).sum())
    assert stats.binomtest(both, DRAWS * UNITS // 2, RATE**2).pvalue > ALARM
    glued = np.repeat(taken[:, ::2], 2, axis=1)  # pairs that come and go together
    assert stats.binomtest(int((glued[:, ::2] & glued[:, 1::2]).sum()), DRAWS * UNITS // 2, RATE**2).pvalue < ALARM


def test_a_fixed_size_sample_sold_as_poisson_is_rejected(monkeypatch):
    size = round(UNITS * RATE)
    monkeypatch.setattr(release_plan, "poisson", lambda n, q, rng: rng.choice_without_replacement(n, size).tolist())
    taken = inclusion(PoissonUnits(RATE))
    assert rate_pvalue(taken, RATE) > ALARM  # the rate alone does not show it
    assert size_pvalue(taken, RATE) < ALARM


def test_a_sample_that_prefers_early_units_is_rejected(monkeypatch):
    monkeypatch.setattr(release_plan, "poisson", lambda n, q, rng: list(range(rng.binomial(n, q))))
    assert homogeneity_pvalue(inclusion(PoissonUnits(RATE), draws=300)) < ALARM


# --- slots ---------------------------------------------------------------------------------------------------------


def together(sampler, draws=DRAWS):
    """Returns (pairs in one slot, pairs drawn)."""
    samples = [sampler.draw(UNITS, rng=SYSTEM_RANDOM) for _ in range(draws)]
    same = sum(len(row) * (len(row) - 1) // 2 for sample in samples for row in sample)
    drawn = sum(len(members(sample)) * (len(members(sample)) - 1) // 2 for sample in samples)
    return same, drawn


def slot_counts(sampler, draws=DRAWS):
    """Returns int[slots] of units, and int[units, slots] of one tracked half."""
    where = np.zeros((UNITS, sampler.num_slots), dtype=int)
    for _ in range(draws):
        for slot, row in enumerate(sampler.draw(UNITS, rng=SYSTEM_RANDOM)):
            for unit in row:
                where[unit, slot] += 1
    return where


def test_slots_are_chosen_uniformly_and_independently_of_the_unit():
    """Chi-square on slots, and on unit x slot, at 1e-6 each."""
    where = slot_counts(POISSON[1])
    assert ROOM * stats.chisquare(where.sum(axis=0)).pvalue > ALARM
    assert ROOM * stats.chi2_contingency(where).pvalue > ALARM


def _occupancy_pvalue(sampler, draws=DRAWS):
    """Chi-square p-value that tracked unit 0's slot says nothing about unit 1's: they share one at rate 1 / M."""
    same, drawn = together(sampler, draws)
    # Pairs within one draw are pairwise independent given the sizes, so the variance is the binomial one.
    z = (same - drawn / sampler.num_slots) / np.sqrt(drawn / sampler.num_slots * (1 - 1 / sampler.num_slots))
    return ROOM * 2 * stats.norm.sf(abs(z))


def test_two_units_share_a_slot_as_often_as_independent_ones():
    """Normal test on about 120,000 pairs, false alarm 1e-6."""
    assert _occupancy_pvalue(POISSON[1]) > ALARM


def test_shuffle_then_deal_is_rejected(monkeypatch):
    def dealt(included, slots, *, num_slots, shots_per_slot):
        return tuple(tuple(included[i::num_slots]) for i in range(num_slots))

    monkeypatch.setattr(release_plan, "assign", dealt)
    assert _occupancy_pvalue(POISSON[1]) < ALARM


FULL = PoissonSlots(1.0, num_slots=3, shots_per_slot=4)  # 60 units for 12 places


def test_an_over_full_slot_keeps_each_of_its_units_equally_often():
    """Chi-square on 18,000 kept places, false alarm 1e-6; keeping the first comers in file order is rejected."""
    kept = np.array([np.isin(np.arange(UNITS), members(FULL.draw(UNITS, rng=SYSTEM_RANDOM))) for _ in range(1500)])
    assert kept.sum(axis=1).max() <= 12
    assert homogeneity_pvalue(kept) > ALARM
    biased = [sorted(members(FULL.draw(UNITS, rng=SYSTEM_RANDOM))) for _ in range(1500)]
    first = np.array([np.isin(np.arange(UNITS), row[:4]) for row in biased])
    assert homogeneity_pvalue(first) < ALARM


def test_truncation_in_file_order_is_rejected(monkeypatch):
    honest = release_plan.poisson
    monkeypatch.setattr(release_plan, "poisson", lambda n, q, rng: sorted(honest(n, q, rng)))
    kept = np.array([np.isin(np.arange(UNITS), members(FULL.draw(UNITS, rng=SYSTEM_RANDOM))) for _ in range(300)])
    assert homogeneity_pvalue(kept) < ALARM


# --- balanced ------------------------------------------------------------------------------------------------------

SMALL = BalancedSlots(num_slots=2, shots_per_slot=2, public_size=5)
PARTITIONS = [
    (frozenset(left), frozenset(right))
    for left in itertools.combinations(range(5), 2)
    for right in itertools.combinations(sorted(set(range(5)) - set(left)), 2)
]


def _partition_pvalue(draw, draws=6000):
    found = collections.Counter(tuple(map(frozenset, draw())) for _ in range(draws))
    assert set(found) <= set(PARTITIONS)
    return ROOM * stats.chisquare([found[p] for p in PARTITIONS]).pvalue


def test_every_balanced_partition_is_equally_likely():
    """Chi-square over all 30 ordered partitions, 6,000 draws, false alarm 1e-6."""
    assert len(PARTITIONS) == 30
    assert _partition_pvalue(lambda: SMALL.draw(5, rng=SYSTEM_RANDOM)) > ALARM


def test_a_balanced_sample_dealt_in_file_order_is_rejected():
    def in_order():
        units = sorted(members(SMALL.draw(5, rng=SYSTEM_RANDOM)))
        return units[::2], units[1::2]

    assert _partition_pvalue(in_order) < ALARM
