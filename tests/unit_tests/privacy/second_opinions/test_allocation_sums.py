"""Sums of likelihood ratios on a geometric grid: no mass is lost, no mean moves, and what is cut is written down."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from langchain_dpicl.privacy.accounting import profiles as _profiles
from langchain_dpicl.privacy.extensions import random_allocation as _allocation
from langchain_dpicl.privacy.extensions.random_allocation import _add_laws, _Sum

NARROW = _Sum(1, 0.25, -3, np.array([0.1, 0.2, 0.3, 0.25, 0.15]), 0.0, 0.0, 0.0)
WIDE = _Sum(2, 0.125, -8, np.full(20, 0.05), 0.0, 0.0, 0.0)


def ratio(law: _Sum, *, of: int = 1) -> float:
    """The mean of the sum of ratios."""
    return float(law.masses @ law.values) * law.count * of


@pytest.mark.parametrize(
    ("few", "many"), [(NARROW, NARROW), (NARROW, WIDE), (WIDE, WIDE)], ids=["twice", "mixed", "wide"]
)
def test_two_laws_add_up_to_one_with_the_mean_of_both_and_no_mass_lost(few, many):
    lowest, masses = _add_laws(few, many, round(few.step / many.step))
    points = np.exp((lowest + np.arange(len(masses))) * many.step)
    assert masses.min() >= 0.0
    assert masses.sum() == pytest.approx(few.masses.sum() * many.masses.sum(), rel=1e-12)
    assert masses @ points == pytest.approx(ratio(few) + ratio(many), rel=1e-12)


def test_a_finer_grid_holds_the_same_points():
    fine = WIDE.refine()
    stride = round(WIDE.step / fine.step)
    assert stride > 1
    np.testing.assert_allclose(fine.values[::stride], WIDE.values, rtol=1e-12)
    np.testing.assert_array_equal(fine.masses[::stride], WIDE.masses)
    assert fine.masses.sum() == pytest.approx(1.0)


def test_a_sum_knows_what_was_cut_at_either_end():
    masses = np.array([1e-25, 1e-24, 0.5, 0.5, 1e-23, 1e-30, 1e-31])
    given = _Sum(1, 1.0, 1, masses, 0.0, 0.0, 0.0)
    kept = given.trim()
    assert (kept.lowest, kept.masses.tolist()) == (3, [0.5 + masses[:2].sum(), 0.5])
    # Cut are the cells above: each with what it weighs where one summand has the other law, and with its mass.
    assert kept.lost_up == pytest.approx(float((masses * given.values)[4:].sum()), rel=1e-9, abs=0.0)
    assert kept.lost_high == pytest.approx(float(masses[4:].sum()), rel=1e-9, abs=0.0)
    assert kept.lost_low == pytest.approx(float(masses[:2].sum()), rel=1e-9, abs=0.0)
    before = dataclasses.replace(given, lost_up=0.25, lost_high=0.125, lost_low=0.0625).trim()
    assert (before.lost_up, before.lost_high, before.lost_low) == (0.25, 0.125, 0.0625)


def test_what_weighs_much_under_the_other_law_is_kept_however_rare_it_is():
    rare = _Sum(1, 5.0, 0, np.array([0.5, 0.5, 0.0, 1e-20]), 0.0, 0.0, 0.0)
    assert len(rare.trim().masses) == 4  # weighs e^15 as much there
    assert len(dataclasses.replace(rare, step=0.01).trim().masses) == 2


def test_the_share_cut_counts_as_loss_of_the_sum():
    cut = dataclasses.replace(NARROW, lost_up=0.25, lost_high=0.125, lost_low=0.5)
    total = cut.plus(cut)
    assert (total.count, total.lost_high, total.lost_low) == (2, 0.25, 1.0)
    assert total.lost_up == pytest.approx(0.375)


def test_a_grid_answers_down_to_twice_what_it_may_have_lost():
    bound = _profiles.compose([(_profiles.gaussian(0.5), 8)], is_coarse=True)
    assert bound.epsilons(2.0 * bound.lost) == (math.inf, math.inf)
    assert max(bound.epsilons(2.5 * bound.lost)) < math.inf


def test_a_profile_of_one_batch_is_the_profile_itself():
    base = _profiles.gaussian(0.7)
    total = _allocation._sum_of(base, 1)
    assert (total.count, total.masses.sum()) == (1, pytest.approx(1.0))
