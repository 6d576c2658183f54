"""Computes ROC curves, areas, rates and confidence bands of attack scores, and what epsilon allows."""

# A higher score says "member". All rates are shares of members or non-members, in [0, 1].

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from langchain_dpicl.privacy._validate import (
    Adjacency,
    check_adjacency,
    check_int,
    check_positive,
    check_real,
    fail,
)
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM, SecureRandom

Floats = NDArray[np.float64]

LOW_RATE = 0.01
"""The false-positive rate at which attacks are compared (Carlini et al. 2022 argue for low ones)."""

_GRID_POINTS = 101
_LOWEST_RATE = 1e-4


@dataclass(frozen=True, slots=True, eq=False)
class RocCurve:
    """True over false positives, one point per distinct score, from (0, 0) to (1, 1).

    Attributes:
      false_positives: float64[points], rising.
      true_positives: float64[points], rising.
    """

    false_positives: Floats = field(repr=False)
    true_positives: Floats = field(repr=False)

    @classmethod
    def of(cls, members: ArrayLike, nonmembers: ArrayLike) -> RocCurve:
        """Returns the curve of all thresholds "a score of at least t is a member's"; equal scores move together.

        Args:
          members: scores of members, at least one.
          nonmembers: scores of non-members, at least one.

        Raises:
          ConfigurationError: no scores, or scores that are no numbers.
        """
        inside, outside = check_scores("members", members), check_scores("nonmembers", nonmembers)
        scores = np.concatenate([inside, outside])
        order, ends = _thresholds(scores)
        is_member = (np.arange(len(scores)) < len(inside))[order]
        true = np.cumsum(is_member)[ends] / len(inside)
        false = np.cumsum(~is_member)[ends] / len(outside)
        return cls(_from_zero(false), _from_zero(true))

    @property
    def auc(self) -> float:
        """Area under the curve: the chance that a member scores above a non-member, equal scores counted half.

        Source: Hanley and McNeil (1982): the Mann-Whitney statistic over the product of both numbers.
        """
        return float(_area(self.false_positives, self.true_positives))

    def tpr_at(self, false_positive_rate: float = LOW_RATE) -> float:
        """Returns the largest true-positive rate of a threshold whose false-positive rate is at most this.

        No coins are tossed between thresholds: where even the highest score is common among non-members, it is 0.

        Args:
          false_positive_rate: in [0, 1].

        Raises:
          ConfigurationError: the rate is out of range.
        """
        rate = check_real("false_positive_rate", false_positive_rate, low=0.0, high=1.0)
        return float(self.true_positives[self.false_positives <= rate].max())

    def at(self, rates: ArrayLike) -> Floats:
        """Returns float64[rates]: the true-positive rates on the straight lines between the curve's points.

        Coins between two thresholds reach every point of such a line. Where the curve rises straight up its top counts.

        Args:
          rates: float64[rates], false-positive rates in [0, 1].
        """
        return _on_lines(self.false_positives, self.true_positives, np.asarray(rates, dtype=np.float64))


@dataclass(frozen=True, slots=True, eq=False)
class RocBand:
    """Mean and percentile band of ROC curves when whole groups of scores (prompts) are drawn again.

    The band is pointwise: at each rate it holds that share of the curves. Far fewer of them lie inside it everywhere.

    Attributes:
      rates: float64[grid], false-positive rates.
      mean: float64[grid], true-positive rates.
      low, high: float64[grid], the band.
      auc: (low, mean, high) of the area.
      tpr: (low, mean, high) of the true-positive rate at `LOW_RATE`.
      confidence: nominal coverage of the band, at each rate by itself.
    """

    rates: Floats = field(repr=False)
    mean: Floats = field(repr=False)
    low: Floats = field(repr=False)
    high: Floats = field(repr=False)
    auc: tuple[float, float, float]
    tpr: tuple[float, float, float]
    confidence: float


def roc_band(
    members: ArrayLike,
    nonmembers: ArrayLike,
    *,
    num_resamples: int = 400,
    confidence: float = 0.95,
    rng: SecureRandom = SYSTEM_RANDOM,
) -> RocBand:
    """Draws groups of scores with replacement, as many as there are, and returns mean and band of the pooled curves.

    Scores of one prompt hang together, so prompts are drawn and not scores. A band from few prompts is too narrow, and
    where all prompts agree (an attack that never errs) it has no width at all. The mean of the drawn ones compares
    scores within a prompt a little oftener (once more in as many prompts as there are) than the curve of all does.

    Args:
      members: float[groups, m], scores of members by prompt.
      nonmembers: float[groups, n], scores of non-members by prompt.
      num_resamples: how often.
      confidence: nominal coverage, in (0, 1).
      rng: where the draws come from.

    Raises:
      ConfigurationError: scores are no numbers, or the groups differ in number.

    Source: Efron and Tibshirani (1993), percentile intervals of the bootstrap over clusters.
    """
    inside, outside = _group_scores("members", members), _group_scores("nonmembers", nonmembers)
    if len(inside) != len(outside):
        raise fail("members, nonmembers", "as many groups in both", (len(inside), len(outside)))
    check_int("num_resamples", num_resamples, low=2)
    tail = (1 - check_real("confidence", confidence, low=0.0, high=1.0, low_open=True, high_open=True)) / 2
    groups = len(inside)
    order, ends = _thresholds(np.concatenate([inside.ravel(), outside.ravel()]))
    owner = np.concatenate([np.repeat(np.arange(groups), a.shape[1]) for a in (inside, outside)])[order]
    is_member = (np.arange(len(owner)) < inside.size)[order]
    curves, areas, rates_at_low = [], [], []
    grid = rate_grid()
    for _ in range(num_resamples):
        weights = np.bincount(rng.integers(groups, groups), minlength=groups)[owner]
        true = _from_zero(np.cumsum(weights * is_member)[ends] / inside.size)
        false = _from_zero(np.cumsum(weights * ~is_member)[ends] / outside.size)
        curves.append(_on_lines(false, true, grid))
        areas.append(_area(false, true))
        rates_at_low.append(true[false <= LOW_RATE].max())
    low, high = np.quantile(curves, [tail, 1 - tail], axis=0)
    return RocBand(
        rates=grid,
        mean=np.mean(curves, axis=0),
        low=low,
        high=high,
        auc=_interval(areas, tail),
        tpr=_interval(rates_at_low, tail),
        confidence=confidence,
    )


def rate_grid() -> Floats:
    """Returns float64[grid]: false-positive rates from 0 to 1, dense where they are low."""
    return np.unique(
        np.concatenate([[0.0], np.geomspace(_LOWEST_RATE, 1.0, _GRID_POINTS), np.linspace(0, 1, _GRID_POINTS)])
    )


@dataclass(frozen=True, slots=True)
class Claim:
    """What a component claims, and how well any attack can tell a member from an outsider under it.

    The attack here compares a record that was in with one that was not, drawn alike: to change the one for the other
    is to replace one record. A claim for adding or removing one counts twice, as that takes two steps.

    Attributes:
      epsilon: claimed, above 0.
      delta: claimed, in [0, 1).
      adjacency: neighbouring relation of the claim.

    Raises:
      ConfigurationError: a number is out of range.
    """

    epsilon: float
    delta: float
    adjacency: Adjacency

    def __post_init__(self) -> None:
        check_positive("epsilon", self.epsilon)
        check_real("delta", self.delta, low=0.0, high=1.0, high_open=True)
        check_adjacency(self.adjacency)

    @property
    def swapped(self) -> tuple[float, float]:
        """(epsilon, delta) for replacing one record.

        Two steps of the definition: P <= e^eps (e^eps Q + delta) + delta (group privacy; Vadhan 2017, Lemma 2.2).
        """
        if self.adjacency == "replace_one":
            return self.epsilon, self.delta
        return 2 * self.epsilon, min(self.delta * (1 + math.exp(min(self.epsilon, 700.0))), 1.0)

    @property
    def corners(self) -> tuple[Floats, Floats]:
        """Corners of the best ROC curve that the claim allows: false- and true-positive rates.

        Source: Kairouz, Oh and Viswanath (2015), Theorem 2.1: t <= e^eps f + delta, and 1 - f <= e^eps (1 - t) + delta.
        """
        epsilon, delta = self.swapped
        bend = (1 - delta) / (1 + math.exp(min(epsilon, 700.0)))
        false, true = [0.0, bend, 1 - delta, 1.0], [delta, 1 - bend, 1.0, 1.0]
        return np.array(false), np.array(true)

    @property
    def auc(self) -> float:
        """The largest expected area under a curve that the claim allows; e^eps / (1 + e^eps) where delta is 0."""
        return float(_area(*self.corners))

    def tpr_at(self, false_positive_rate: float = LOW_RATE) -> float:
        """Returns the largest expected true-positive rate that the claim allows at this false-positive rate.

        Args:
          false_positive_rate: in [0, 1].

        Raises:
          ConfigurationError: the rate is out of range.
        """
        rate = check_real("false_positive_rate", false_positive_rate, low=0.0, high=1.0)
        return float(_on_lines(*self.corners, np.array([rate]))[0])


def check_scores(name: str, scores: ArrayLike) -> Floats:
    """Returns scores as float64[n].

    Raises:
      ConfigurationError: there are none, or one is NaN. No message holds a score.
    """
    array = np.asarray(scores, dtype=np.float64).ravel()
    if not array.size or np.isnan(array).any():
        raise fail(name, "at least one score, none of them NaN", f"{array.size} scores")
    return array


def _group_scores(name: str, scores: ArrayLike) -> Floats:
    array = np.asarray(scores, dtype=np.float64)
    if array.ndim != 2:
        raise fail(name, "scores by group, float[groups, n]", f"{array.ndim} axes")
    check_scores(name, array)
    return array


def _thresholds(scores: Floats) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the order of the scores, highest first, and where each run of equal ones ends."""
    order = np.argsort(-scores, kind="stable")
    falling = scores[order]
    ends = np.flatnonzero(np.append(falling[1:] < falling[:-1], True))
    return order.astype(np.int64), ends.astype(np.int64)


def _from_zero(rates: NDArray[np.generic]) -> Floats:
    return np.concatenate([[0.0], np.asarray(rates, dtype=np.float64)])


def _area(false: Floats, true: Floats) -> float:
    return float(np.sum(np.diff(false) * (true[1:] + true[:-1])) / 2)


def _on_lines(false: Floats, true: Floats, rates: Floats) -> Floats:
    """Interpolates; at a rate where the curve rises straight up, the highest point counts.

    Just before such a rise the line still ends at its lowest point: both of its ends are kept.
    """
    rates = np.clip(rates, 0.0, 1.0)
    before = np.searchsorted(false, rates, side="right") - 1
    after = np.minimum(before + 1, len(false) - 1)
    width, rise = false[after] - false[before], true[after] - true[before]
    slope = np.divide(rise, width, out=np.zeros_like(width), where=width > 0)
    return np.asarray(true[before] + slope * (rates - false[before]), dtype=np.float64)


def _interval(values: Sequence[float], tail: float) -> tuple[float, float, float]:
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(np.mean(values)), float(high)
