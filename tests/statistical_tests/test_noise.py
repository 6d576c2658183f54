"""Noise has its declared law and scale; every planted wrong law or scale is rejected.

Each assertion that must hold fails by chance with probability at most 1e-6 (`ALARM`); each planted bug passes by
chance with a probability far below that, at the fixed sizes used here.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from langchain_dpicl.privacy.extensions.logit_sums import ClippedLogitMean
from langchain_dpicl.privacy.extensions.normalized_sums import MaxNormalizedSum
from langchain_dpicl.privacy.extensions.permute_and_flip import PermuteAndFlipMechanism
from langchain_dpicl.privacy.mechanisms import release_plan as mechanisms
from langchain_dpicl.privacy.mechanisms.bounded import ProbabilitySum, Sensitivity, VoteSum
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM, GaussianDraws, SecureRandom
from langchain_dpicl.privacy.mechanisms.release_plan import GaussianMechanism, GumbelMechanism
from tests.contracts.doubles import FixedDraws
from tests.contracts.mechanism import ROOM, bounded, permute_and_flip, softmax

ALARM = 1e-6
N = 20_000
WRONG = (0.7, 1 / math.sqrt(2), 1.3)
LAWS = {"exponential": stats.expon(), "gumbel": stats.gumbel_r(), "gaussian": stats.norm(), "uniform": stats.uniform()}


def ks(values, law):
    """Kolmogorov-Smirnov p-value."""
    return stats.kstest(values, law.cdf).pvalue


def variance_pvalue(values, sd):
    """Two-sided chi-square p-value of a zero-mean normal sample's standard deviation."""
    statistic = float(np.sum(np.square(values))) / sd**2
    return 2 * min(stats.chi2.cdf(statistic, np.size(values)), stats.chi2.sf(statistic, np.size(values)))


def frequency_pvalue(indices, law):
    """Chi-square p-value of chosen indices against a law."""
    return ROOM * stats.chisquare(np.bincount(indices, minlength=len(law)), np.array(law) * len(indices)).pvalue


# --- the standard laws ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LAWS)
def test_draws_follow_their_law(kind):
    """False alarm 1e-6 by Kolmogorov-Smirnov on 20,000 draws."""
    assert ks(getattr(SYSTEM_RANDOM, kind)(N), LAWS[kind]) > ALARM


@pytest.mark.parametrize("kind", ["exponential", "gumbel", "gaussian"])
@pytest.mark.parametrize("factor", WRONG)
def test_draws_of_a_wrong_scale_are_rejected(kind, factor):
    assert ks(factor * getattr(SYSTEM_RANDOM, kind)(N), LAWS[kind]) < ALARM


@pytest.mark.parametrize(
    ("kind", "bug"),
    [
        ("gaussian", lambda n: SYSTEM_RANDOM.uniform(n) * math.sqrt(12) - math.sqrt(3)),
        ("gaussian", lambda n: np.abs(SYSTEM_RANDOM.gaussian(n))),
        ("gaussian", lambda n: (SYSTEM_RANDOM.exponential(n) - SYSTEM_RANDOM.exponential(n)) / math.sqrt(2)),
        ("exponential", lambda n: np.abs(SYSTEM_RANDOM.gaussian(n))),
        ("gumbel", lambda n: -SYSTEM_RANDOM.gumbel(n)),
        ("gumbel", lambda n: SYSTEM_RANDOM.gaussian(n) * math.pi / math.sqrt(6) + np.euler_gamma),
    ],
)
def test_another_family_of_equal_variance_is_rejected(kind, bug):
    assert ks(bug(N), LAWS[kind]) < ALARM


@pytest.mark.parametrize("kind", ["exponential", "gumbel", "gaussian"])
def test_coordinates_are_uncorrelated(kind):
    """Lag-1 and lag-2 correlation of 20,000 draws is within 6 standard errors; a repeated draw is not.

    By chance 2e-9 of normal draws are not, and less than 1e-7 of the others, whose tails are heavier.
    """
    draws = getattr(SYSTEM_RANDOM, kind)(N)
    for lag in (1, 2):
        assert abs(np.corrcoef(draws[:-lag], draws[lag:])[0, 1]) < 6.0 / math.sqrt(N)
    assert abs(np.corrcoef(np.repeat(draws, 2)[:-1], np.repeat(draws, 2)[1:])[0, 1]) > 6.0 / math.sqrt(N)


def test_binades_of_the_uniform_are_geometric():
    """Chi-square over 14 binades of 200,000 draws: refinement neither loses nor adds mass; false alarm 1e-6."""
    exponents = np.minimum(-np.frexp(SYSTEM_RANDOM.uniform(200_000))[1], 13)
    law = [2.0 ** -(k + 1) for k in range(13)] + [2.0**-13]
    assert frequency_pvalue(exponents, law) > ALARM
    assert frequency_pvalue(np.minimum(exponents, 10), law) < ALARM  # a truncated tail


# --- the Gaussian mechanism, from rows to noisy values ---------------------------------------------------------------

ROWS = np.random.default_rng(0).dirichlet(np.ones(20), size=8)
RELEASES = 500


def noise_of(noise_multiplier, *, rng=SYSTEM_RANDOM):
    """Returns float64[500, 20] noise that real releases of real row sums carried."""
    total = ProbabilitySum().bound(ROWS, row_shape="slots", adjacency="add_remove", width=20)
    mechanism = GaussianMechanism(noise_multiplier)
    return np.array([mechanism.release(total, rng=rng).values for _ in range(RELEASES)]) - total.value


def every_coordinate_has(noise, sd):
    """True if the pooled scale, each coordinate's scale and the scale of their sum all fit; 22 tests at 1e-6 / 22."""
    pvalues = [variance_pvalue(noise, sd), variance_pvalue(noise.sum(axis=1), sd * math.sqrt(noise.shape[1]))]
    pvalues += [variance_pvalue(column, sd) for column in noise.T]
    return min(pvalues) > ALARM / len(pvalues)


@pytest.mark.parametrize("noise_multiplier", [0.5, 3.0])
def test_released_noise_has_the_declared_scale_on_every_coordinate(noise_multiplier):
    """False alarm 1e-6 in all; 10,000 noise values."""
    noise = noise_of(noise_multiplier)
    assert every_coordinate_has(noise, noise_multiplier * math.sqrt(2))
    assert ks(noise.ravel() / (noise_multiplier * math.sqrt(2)), stats.norm()) > ALARM


@pytest.mark.parametrize("factor", WRONG)
def test_a_mechanism_of_a_wrong_scale_is_rejected(factor, monkeypatch):
    monkeypatch.setattr(mechanisms, "ROUND_UP", factor)
    assert not every_coordinate_has(noise_of(2.0), 2.0 * math.sqrt(2))


def test_a_forgotten_sqrt2_is_rejected(monkeypatch):
    monkeypatch.setattr(ProbabilitySum, "sensitivity", lambda self, **_: Sensitivity(l2=1.0, range=2.0))
    assert not every_coordinate_has(noise_of(2.0), 2.0 * math.sqrt(2))


def test_a_variance_for_a_scale_is_rejected(monkeypatch):
    monkeypatch.setattr(
        mechanisms.Mechanism, "_scale", lambda self, total: (self.noise_multiplier * total.sensitivity.l2) ** 2
    )
    assert not every_coordinate_has(noise_of(2.0), 2.0 * math.sqrt(2))


class _OneCoordinate(SecureRandom):
    def gaussian_draws(self, n):
        return FixedDraws(SYSTEM_RANDOM.gaussian(n) * math.sqrt(n) * (np.arange(n) == 0))


class _SharedNoise(SecureRandom):
    def gaussian_draws(self, n):
        return FixedDraws(np.repeat(SYSTEM_RANDOM.gaussian(1), n))


class _ReusedNoise(SecureRandom):
    noise = SYSTEM_RANDOM.gaussian(20)

    def gaussian_draws(self, n):
        return FixedDraws(self.noise)


@pytest.mark.parametrize("bug", [_OneCoordinate, _SharedNoise, _ReusedNoise])
def test_noise_on_one_coordinate_shared_or_reused_is_rejected(bug):
    assert not every_coordinate_has(noise_of(2.0, rng=bug()), 2.0 * math.sqrt(2))


# --- the grid of the released vector: cells against the closed form -------------------------------------------------

STEP = 2.0**-32
COARSE = Sensitivity(l2=0.2, range=0.2)  # at noise_multiplier 1e-9 one step of the finest grid is 1.2 scales wide
SCALE = 0.2e-9


def cells(fractions, releases=200):
    """Returns int64[n, d]: released steps of a sum that lies `fractions` of a step above zero."""
    total = bounded(np.asarray(fractions) * STEP, COARSE)
    return np.array([GaussianMechanism(1e-9).release(total, rng=SYSTEM_RANDOM).values for _ in range(releases)]) / STEP


def cell_pvalue(found, fraction):
    """Chi-square p-value of steps -2 .. 3 against the normal mass of each cell."""
    edges = np.arange(-2, 3) + 0.5
    law = np.diff([0.0, *stats.norm.cdf((edges - fraction) * STEP / SCALE), 1.0])
    assert np.array_equal(found, np.rint(found))
    return frequency_pvalue(np.clip(found.ravel().astype(int), -2, 3) + 2, law)


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.5, 0.9, -0.3])
def test_cells_of_a_released_vector_have_the_normal_mass_of_their_interval(fraction):
    """Chi-square over six cells, 20,000 coordinates, false alarm 1e-6; the cells are wider than the noise."""
    assert cell_pvalue(cells(np.full(100, fraction)), fraction) > ALARM


@pytest.mark.parametrize(
    "bug",
    [
        lambda value, draws, scale, step: (np.rint(value / step) + np.rint(scale * draws.values / step)) * step,
        lambda value, draws, scale, step: np.floor((value + scale * draws.values) / step) * step,
        lambda value, draws, scale, step: np.trunc((value + scale * draws.values) / step) * step,
    ],
    ids=["rounded_before_the_noise", "floor", "truncation"],
)
def test_another_rounding_is_rejected(bug, monkeypatch):
    monkeypatch.setattr(mechanisms, "rounded", bug)
    assert cell_pvalue(cells(np.full(100, 0.25)), 0.25) < ALARM


def test_comparisons_settled_with_rationals_have_the_same_law(monkeypatch):
    """Every coordinate is put in doubt: 4,000 of them, false alarm 1e-6; of 1,000 a reversed verdict is rejected."""
    monkeypatch.setattr(mechanisms, "_MARGIN", 1.0)
    assert cell_pvalue(cells(np.full(100, 0.25), 40), 0.25) > ALARM
    is_below = GaussianDraws.is_below
    monkeypatch.setattr(GaussianDraws, "is_below", lambda self, i, bound: not is_below(self, i, bound))
    assert cell_pvalue(cells(np.full(100, 0.25), 10), 0.25) < ALARM


# --- the noisy maxima: frequencies against closed forms --------------------------------------------------------------

VOTES = np.eye(4)[[0, 0, 0, 1, 1, 2]]  # 3, 2, 1 and 0 votes
SCORES = [3.0, 2.0, 1.0, 0.0]
DRAWS = 20_000


def chosen(mechanism, total, draws=DRAWS):
    """Returns the indices of so many releases."""
    return np.array([mechanism.release(total, rng=SYSTEM_RANDOM).index for _ in range(draws)])


def votes(row_shape="slots"):
    """Returns the bounded vote sum of the six rows."""
    return VoteSum().bound(VOTES, row_shape=row_shape, adjacency="add_remove", width=4)


@pytest.mark.parametrize(
    ("mechanism", "law", "other"),
    [(GumbelMechanism(0.5), softmax, permute_and_flip), (PermuteAndFlipMechanism(0.5), permute_and_flip, softmax)],
)
@pytest.mark.parametrize(("row_shape", "spread"), [("slots", 2.0), ("units", 1.0)])
def test_frequencies_of_a_noisy_maximum_are_its_closed_form(mechanism, law, other, row_shape, spread):
    """Chi-square on 20,000 releases, false alarm 1e-6; the law of the other noise, and 0.7 or 1.3 times the scale, are rejected."""
    indices = chosen(mechanism, votes(row_shape))
    assert frequency_pvalue(indices, law(SCORES, 0.5 * spread)) > ALARM
    assert frequency_pvalue(indices, other(SCORES, 0.5 * spread)) < ALARM
    for factor in WRONG:
        assert frequency_pvalue(indices, law(SCORES, 0.5 * spread * factor)) < ALARM


def test_clipped_logits_are_sampled_from_their_softmax():
    """Clip-and-blend: with noise_multiplier = temperature / (4 clip / M), a token follows softmax(mean / temperature)."""
    logits, temperature, aggregation = np.array([[2.0, 0.5, -9.0], [1.0, 0.0, 1.0]]), 0.8, ClippedLogitMean(2.0, 2)
    total = aggregation.bound(logits, row_shape="slots", adjacency="add_remove", width=3)
    indices = chosen(GumbelMechanism(temperature / total.sensitivity.range), total)
    assert frequency_pvalue(indices, softmax([1.5, 0.25, -0.5], temperature)) > ALARM
    assert frequency_pvalue(indices, softmax([1.5, 0.25, -4.0], temperature)) < ALARM  # as if unclipped


AGGREGATIONS = [ProbabilitySum(), VoteSum(), MaxNormalizedSum(), ClippedLogitMean(3.0, 5)]
NOISY_MAXIMA = [GumbelMechanism(0.1), PermuteAndFlipMechanism(0.1)]
PAIRS = [
    *itertools.product(AGGREGATIONS, NOISY_MAXIMA),
    *itertools.product(AGGREGATIONS[:2], [GaussianMechanism(0.1)]),  # the others have no L2 bound
]


@pytest.mark.parametrize(("aggregation", "mechanism"), PAIRS, ids=lambda x: x.name)
def test_an_empty_sample_releases_pure_noise(aggregation, mechanism):
    """No unit rows: the index is uniform. Chi-square on 3,000 releases, false alarm 1e-6; one vote is seen."""
    how = {"row_shape": "units", "adjacency": "add_remove", "width": 6}
    empty = aggregation.bound(np.zeros((0, 6)), **how)
    one = aggregation.bound(np.array([[50.0, 0.0, 0.0, 0.0, 0.0, 0.0]]), **how)

    def indices(total):
        outs = [mechanism.release(total, rng=SYSTEM_RANDOM) for _ in range(3000)]
        return [out.index if out.values is None else int(np.argmax(out.values)) for out in outs]

    assert frequency_pvalue(indices(empty), [1 / 6] * 6) > ALARM
    assert frequency_pvalue(indices(one), [1 / 6] * 6) < ALARM
