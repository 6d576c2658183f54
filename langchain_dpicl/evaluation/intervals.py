"""Intervals of rates and means from noisy counts, which hold for the noise and for the sampling together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.privacy._validate import check_choice, check_real

Of: TypeAlias = Literal["population", "data"]
"""What a figure is about: the population that the units were drawn from, or the private units themselves."""

_GRID = 201
_FINE, _ROUNDS = 33, 2
_POINTS = 400
# A small normal part is added to the noise: without it the law lives on a lattice, and the integral below would not
# converge. Its deviation is a tenth of the noise's, or half a count; it only widens the interval.
_DITHER, _LEAST_DITHER = 0.1, 0.5
_TURNS = 6
_LEAST_NOISE = 1e-12


class Estimate(NamedTuple):
    """A figure and its interval.

    Attributes:
      value: the figure.
      low: lower end of the interval.
      high: upper end.
    """

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the interval's width."""
        return (self.high - self.low) / 2


class Counted(NamedTuple):
    """Noisy counts of the cells of one table.

    Attributes:
      counts: noisy count of each cell.
      scores: score of each cell.
    """

    counts: tuple[int, ...]
    scores: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class NoisyRatio:
    """The mean score of the units in some cells, from their noisy counts.

    The value a is in the interval if the gap, the sum of (score - a) x count over the cells, could come from it. The
    law of the gap under a is known: sampling makes it nearly normal around 0, and the noise of each cell, two-sided
    geometric, is added (score - a) times. So nothing has to be known about the true total (Fieller 1954). Where the
    units are counted again in a smaller table, both tables have the same gap without noise, and the gap is the mean of
    the two by the inverse variance of their noise, which follows from a.

    Attributes:
      counts: noisy counts of the cells.
      scores: score of each cell, within `bounds`.
      bounds: least and largest score.
      scale: scale of the noise of a count.
      rate: chance with which a unit was sampled.
      again: the same units in another table, with independent noise of that scale.
    """

    counts: tuple[int, ...]
    scores: tuple[float, ...]
    bounds: tuple[float, float]
    scale: float
    rate: float
    again: Counted | None = None

    @property
    def value(self) -> float:
        """The mean score, within the bounds; in the middle where the noisy counts add up to nothing."""
        low, high = self.bounds
        tables = self._tables
        totals = np.array([math.fsum(table.counts) for table in tables])
        sums = np.array([np.dot(table.counts, table.scores) for table in tables])
        found = (low + high) / 2
        for _ in range(_TURNS if len(tables) > 1 else 1):  # the weights follow from the mean, hardly
            (shares,) = self._shares(np.array([found]))
            if (total := float(shares @ totals)) <= 0:
                return (low + high) / 2
            found = min(high, max(low, float(shares @ sums) / total))
        return found

    @property
    def _tables(self) -> tuple[Counted, ...]:
        return (Counted(self.counts, self.scores), *([] if self.again is None else [self.again]))

    def _shares(self, means: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns float64[n, tables], the weight of each table's gap: by the inverse variance of its noise."""
        noise = [((np.asarray(table.scores)[None, :] - means[:, None]) ** 2).sum(axis=1) for table in self._tables]
        inverse = 1 / np.maximum(np.stack(noise, axis=1), _LEAST_NOISE)
        shares: NDArray[np.float64] = inverse / inverse.sum(axis=1, keepdims=True)
        return shares

    def p_values(self, means: Sequence[float] | NDArray[np.float64], *, of: Of = "population") -> NDArray[np.float64]:
        """Returns how likely a gap at least as large as the one found is, under each mean.

        Args:
          means: float64[n], candidates for the true mean.
          of: "population": the sampled units stand for others too; "data": for the private units alone.
        """
        check_choice("of", of, ("population", "data"))
        wanted = np.asarray(means, dtype=np.float64)[:, None]
        shares = self._shares(wanted[:, 0])
        sums, weights, held = np.zeros((3, len(wanted))), [], []
        for share, table in zip(shares.T, self._tables, strict=True):
            away = np.asarray(table.scores)[None, :] - wanted  # float64[n, cells]
            counts = np.asarray(table.counts, dtype=np.float64)
            sums += share * np.stack([away @ counts, (away**2) @ counts, np.full(len(wanted), counts.sum())])
            kinds, times = np.unique(table.scores, return_counts=True)
            weights.append(share[:, None] * (kinds[None, :] - wanted))
            held.append(times)
        gap, squares, total = np.abs(sums[0]), np.maximum(sums[1], 0.0), np.maximum(sums[2], 1.0)
        # Under the mean a, scores within the bounds deviate by no more than (high - a)(a - low); what was found may
        # deviate less, which a rare score that no unit drew does not exclude: none draws a score of chance 3 / total
        # in 5 % of all samples, and it would add three times the range squared to their sum of squares.
        low, high = self.bounds
        most = np.maximum((high - wanted[:, 0]) * (wanted[:, 0] - low), 0.0)
        seen = squares / total
        is_two_valued = set(self.scores) <= set(self.bounds)
        one = most if is_two_valued else np.minimum(most, seen + 3 * (high - low) ** 2 / total)
        spread = (
            total * np.maximum(one, (high - low) ** 2 / (2 * total)) * (1.0 if of == "population" else 1 - self.rate)
        )
        return _two_sided(gap, spread, np.concatenate(weights, axis=1), np.concatenate(held), self.scale)

    def estimate(self, *, confidence: float = 0.95, of: Of = "population") -> Estimate:
        """Returns the mean and its interval.

        Args:
          confidence: chance that the interval holds the true mean, over sample and noise.
          of: see `p_values`.

        Raises:
          ConfigurationError: an argument out of range.
        """
        alarm = 1 - check_real("confidence", confidence, low=0.0, high=1.0, low_open=True, high_open=True)
        first, last = self.bounds
        # Of many units the interval lies between two points of an even grid.
        grid = np.unique(np.append(np.linspace(first, last, _GRID), self.value))
        chances = self.p_values(grid, of=of)
        # Where noise left more right answers than answers, no mean goes with the counts: those that do best are taken.
        alarm = min(alarm, float(chances.max()))
        kept = np.flatnonzero(chances >= alarm)
        low, high = self._end(grid, kept[0], -1, alarm, of), self._end(grid, kept[-1], 1, alarm, of)
        # Where the noisy counts add up to nothing, the value is the middle, wherever the interval is.
        return Estimate(self.value, min(low, self.value), max(high, self.value))

    def _end(self, grid: NDArray[np.float64], place: int, step: int, alarm: float, of: Of) -> float:
        """Returns an end of the interval, found within the step of the grid that it lies in."""
        if not 0 <= place + step < len(grid):
            return float(grid[place])
        inside, outside = float(grid[place]), float(grid[place + step])
        for _ in range(_ROUNDS):
            fine = np.linspace(inside, outside, _FINE)
            kept = np.flatnonzero(self.p_values(fine, of=of) >= alarm)
            at = min(int(kept[-1]), _FINE - 2) if kept.size else 0
            inside, outside = float(fine[at]), float(fine[at + 1])
        return outside


def _two_sided(
    gap: NDArray[np.float64],
    variance: NDArray[np.float64],
    weights: NDArray[np.float64],
    held: NDArray[np.int64],
    scale: float,
) -> NDArray[np.float64]:
    """Returns P[|G| >= gap] for G = normal + the sum of weight x two-sided geometric noise, all independent.

    `held` is how many cells have each weight. By the characteristic function phi of G, P[|G| < x] is 2/pi times the
    integral of phi(t) sin(t x) / t over t > 0.
    """
    decay = math.exp(-1 / scale)
    noise = 2 * decay / (1 - decay) ** 2 * (weights**2) @ held
    variance = variance + np.maximum(_LEAST_DITHER**2, _DITHER**2 * noise)
    # phi is below 1e-11 from here on: its normal part alone is.
    ends = 7.2 / np.sqrt(variance)
    t = ends[:, None] * (np.arange(_POINTS) + 0.5) / _POINTS  # float64[n, points], by the midpoint rule
    phi = np.exp(-variance[:, None] * t**2 / 2)
    for column, times in zip(weights.T, held, strict=True):
        phi *= ((1 - decay) ** 2 / (1 - 2 * decay * np.cos(column[:, None] * t) + decay**2)) ** times
    inside = 2 / math.pi * (phi * np.sin(gap[:, None] * t) / t).sum(axis=1) * ends / _POINTS
    # Far out the sine turns faster than the grid is fine; there the chance is below the least that anyone asks for.
    is_far = gap > 12 * np.sqrt(variance + noise)
    found: NDArray[np.float64] = np.where(is_far, 0.0, np.clip(1 - inside, 0.0, 1.0))
    return found
