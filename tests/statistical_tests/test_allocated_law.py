"""The secret deal into batches follows the law that its theorem asks for; planted wrong deals are rejected.

Each assertion that must hold fails by chance with probability at most 1e-6 (`ALARM`).
"""

from __future__ import annotations

import numpy as np
from scipy import stats

from langchain_dpicl.privacy.extensions import random_allocation as sampling
from langchain_dpicl.privacy.extensions.random_allocation import AllocatedSlots
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from tests.contracts.mechanism import ROOM

ALARM = 1e-6
UNITS, DRAWS = 24, 3000
DEAL = AllocatedSlots(0.4, num_batches=3, num_slots=2, shots_per_slot=UNITS)
FULL = AllocatedSlots(1.0, num_batches=2, num_slots=2, shots_per_slot=2)


def places(deal, draws=DRAWS):
    """Returns int[draws, units]: the row of each unit, batch after batch, and -1 for none."""
    found = np.full((draws, UNITS), -1)
    for place in found:
        for row, units in enumerate(deal.draw(UNITS, rng=SYSTEM_RANDOM)):
            place[list(units)] = row
    return found


def place_pvalue(found, rate):
    """Chi-square on joining and on every row of every batch: rate / 6 each."""
    counts = np.bincount(found.ravel() + 1, minlength=7)
    return ROOM * stats.chisquare(counts, found.size * np.array([1 - rate] + [rate / 6] * 6)).pvalue


def unit_pvalue(found):
    """Chi-square on unit x place: no unit prefers one."""
    table = np.array([np.bincount(found[:, unit] + 1, minlength=7) for unit in range(UNITS)])
    return ROOM * stats.chi2_contingency(table).pvalue


def pair_pvalue(found):
    """Chi-square on the places of disjoint pairs of units: independent of each other."""
    table = np.zeros((7, 7))
    np.add.at(table, (found[:, ::2].ravel() + 1, found[:, 1::2].ravel() + 1), 1)
    seen = table.sum(axis=0) > 0
    return ROOM * stats.chi2_contingency(table[np.ix_(seen, seen)]).pvalue


def test_units_join_at_their_rate_and_stand_anywhere_alike_and_independently():
    """Three chi-square tests on 72,000 places, 1e-6 each; a rate off by a tenth is rejected."""
    found = places(DEAL)
    assert place_pvalue(found, 0.4) > ALARM
    assert unit_pvalue(found) > ALARM
    assert pair_pvalue(found) > ALARM
    assert place_pvalue(found, 0.44) < ALARM


def test_a_deal_that_fills_batches_evenly_is_rejected(monkeypatch):
    """Planted: round-robin over the batches, which makes units depend on each other."""

    def dealt(included, slots, *, num_slots, shots_per_slot):
        return tuple(tuple(included[i::num_slots]) for i in range(num_slots))

    monkeypatch.setattr(sampling, "assign", dealt)
    assert pair_pvalue(places(AllocatedSlots(1.0, 3, 2, UNITS))) < ALARM


def test_a_deal_by_position_is_rejected(monkeypatch):
    def by_position(included, slots, *, num_slots, shots_per_slot):
        return tuple(tuple(u for u in included if u % num_slots == i) for i in range(num_slots))

    monkeypatch.setattr(sampling, "assign", by_position)
    assert unit_pvalue(places(DEAL, draws=300)) < ALARM


def test_an_over_full_slot_keeps_each_of_its_units_equally_often():
    """Chi-square on 12,000 kept places of 24 units, false alarm 1e-6; keeping first comers in file order is rejected."""
    kept = places(FULL, draws=1500) >= 0
    assert kept.sum(axis=1).max() <= 8
    assert stats.chisquare(kept.sum(axis=0)).pvalue > ALARM


def test_first_come_first_kept_is_rejected(monkeypatch):
    monkeypatch.setattr(sampling, "poisson", lambda n, q, rng: list(range(rng.binomial(n, q))))
    kept = places(FULL, draws=300) >= 0
    assert stats.chisquare(kept.sum(axis=0)).pvalue < ALARM
