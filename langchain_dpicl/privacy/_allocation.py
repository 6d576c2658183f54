"""The profile of a unit that stands in one of several batches, nobody knows which. Knows curves, no event, no plan.

With R the likelihood ratio A/B of one batch's dominating pair, the whole run is dominated by the pair whose ratio is
the mean of independent copies of R. Their sum is composed on a geometric grid. Every step to the grid is a
mean-preserving spread or a cut that counts as infinite loss, so every number here is an upper bound; nothing is
subtracted, so small masses keep their digits. Proof: docs/proofs/allocated-slots.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from langchain_dpicl.privacy import _profiles as profiles
from langchain_dpicl.privacy._grid import loss_masses
from langchain_dpicl.privacy._profiles import FloatArray, Profile

IntArray: TypeAlias = npt.NDArray[np.int64]

_CELLS = 4096
_LARGEST_LOSS = 600.0  # ratios must stay floats; beyond, nothing is gained
_DIGITS = 7
_CUT = 1e-19  # mass that one stage may cut at either end


@dataclass(frozen=True, slots=True)
class _Sum:
    """The law under B of the sum of `count` independent ratios, on the points e^(step * index).

    Attributes:
      count: summands.
      step: of the grid, in logarithms.
      lowest: index of the first point.
      masses: probabilities.
      lost_up: bounds what was cut above, where one summand has the law A.
      lost_high: bounds what was cut above, where none has.
      lost_low: bounds what was moved up from below.
    """

    count: int
    step: float
    lowest: int
    masses: FloatArray
    lost_up: float
    lost_high: float
    lost_low: float

    @property
    def values(self) -> FloatArray:
        """The points, each divided by `count`: what the mean of the ratios is there."""
        index = self.lowest + np.arange(len(self.masses))
        means: FloatArray = np.exp(index * self.step - math.log(self.count))
        return means

    def trimmed(self) -> _Sum:
        """Cuts what is negligible at both ends."""
        above = np.cumsum((self.masses * self.values)[::-1])[::-1]  # where one summand has the law A
        stop = max(int(np.searchsorted(-above, -_CUT)), 1)
        start = min(int(np.searchsorted(np.cumsum(self.masses), _CUT)), stop - 1)
        kept = self.masses[start:stop].copy()
        moved = float(self.masses[:start].sum())
        kept[0] += moved
        return replace(
            self,
            lowest=self.lowest + start,
            masses=kept,
            lost_up=self.lost_up + (float(above[stop]) if stop < len(above) else 0.0),
            lost_high=self.lost_high + float(self.masses[stop:].sum()),
            lost_low=self.lost_low + moved,
        )

    def refined(self) -> _Sum:
        """The same law on a grid as fine as memory is for; a finer grid holds the points of the coarser."""
        halvings = max(math.floor(math.log2(_CELLS / len(self.masses))), 0)
        if halvings == 0:
            return self
        masses = np.zeros((len(self.masses) - 1) * 2**halvings + 1)
        masses[:: 2**halvings] = self.masses
        return replace(self, step=self.step / 2**halvings, lowest=self.lowest * 2**halvings, masses=masses)

    def plus(self, other: _Sum) -> _Sum:
        """The sum of both; `other` lies on the same grid or on a finer one that holds it."""
        stride = round(self.step / other.step)
        lowest, masses = _added(self, other, stride)
        total = self.count + other.count
        up = self.count * (self.lost_up + other.lost_high) + other.count * (other.lost_up + self.lost_high)
        return _Sum(
            total,
            other.step,
            lowest,
            masses,
            up / total,
            self.lost_high + other.lost_high,
            self.lost_low + other.lost_low,
        ).trimmed()


def _added(few: _Sum, many: _Sum, stride: int) -> tuple[int, FloatArray]:
    """Adds two laws; `stride` steps of `many` make one of `few`.

    Two points i and i + d of a geometric grid add up to a point whose distance from i depends on d alone; the mass goes
    to its two neighbours so that the mean stays.
    """
    step, start, p, q = many.step, few.lowest * stride, few.masses, many.masses
    is_double = few is many
    ends = start + stride * (len(p) - 1), many.lowest + len(q) - 1
    first, last = 0 if is_double else many.lowest - ends[0], ends[1] - start
    shifts, shares = _shifts(step, np.arange(first, last + 1))
    lowest = math.floor(np.logaddexp(start * step, many.lowest * step) / step) - 1
    out = np.zeros(math.floor(np.logaddexp(ends[0] * step, ends[1] * step) / step) + 3 - lowest)
    for d, shift, share in zip(range(first, last + 1), shifts.tolist(), shares.tolist(), strict=True):
        offset = start + d - many.lowest
        low = max(0, -(offset // stride))
        high = min(len(p), (len(q) - 1 - offset) // stride + 1)
        if high <= low:
            continue
        from_q = offset + stride * low
        both = p[low:high] * q[from_q : from_q + stride * (high - low) : stride]
        if is_double and d > 0:
            both *= 2.0
        at = start + stride * low + shift - lowest
        span = stride * (high - low - 1) + 1
        upper = both * share
        both -= upper
        out[at : at + span : stride] += both
        out[at + 1 : at + 1 + span : stride] += upper
    return lowest, out


def _shifts(step: float, d: IntArray) -> tuple[IntArray, FloatArray]:
    """For each d: steps from i to the point below e^(i step) + e^((i + d) step), and the share above it."""
    beyond = np.log1p(np.exp(-np.abs(d) * step))  # from the larger of the two
    whole = np.floor(beyond / step)
    share = np.clip(np.expm1(beyond - whole * step) / math.expm1(step), 0.0, 1.0)
    return whole.astype(np.int64) + np.maximum(d, 0), share


def _one(base: Profile) -> _Sum:
    """The ratio of a single batch."""
    step = (base.top_up + base.top_down) / _CELLS
    lowest, masses, infinite = loss_masses(base, step)
    law = masses * np.exp(-(lowest + np.arange(len(masses))) * step)
    absent = max(float(base.down(np.array([-lowest * step]))[0]), 0.0)  # where the ratio is 0
    law[0] += absent
    return _Sum(1, step, lowest, law, infinite, 0.0, absent).trimmed()


def _sum_of(base: Profile, count: int) -> _Sum:
    """The sum of `count` ratios, by doubling; of slightly fewer, whose mean bounds that of more, beyond 127."""
    one = _one(base)
    total = one
    doublings = max(count.bit_length() - _DIGITS, 0)
    for digit in bin(count >> doublings)[3:] + "0" * doublings:
        fine = total.refined()
        total = fine.plus(fine)
        if digit == "1":
            total = one.plus(total)
    return total


def allocated(base: Profile, num_batches: int) -> Profile:
    """Bounds the pair (mean over b of A in batch b and B in the others, B everywhere), and stays below `base`.

    `base` has to dominate one batch against every strategy. Sampling comes on top, by `profiles.amplified`.

    Source: Feldman and Shenfeld (2025), Privacy Amplification by Random Allocation; docs/proofs/allocated-slots.md.
    """
    if max(base.top_up, base.top_down) > _LARGEST_LOSS:
        return base
    total = _sum_of(base, num_batches)
    x_up, up, x_down, down = _curves(total)
    up = np.minimum(up + total.lost_up, base.up(x_up))
    down = np.minimum(down + total.lost_low + total.lost_high, base.down(x_down))
    return profiles.tabulated(x_up, np.minimum(up, 1.0), x_down, np.minimum(down, 1.0))


def _curves(total: _Sum) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Both orders of the pair at every loss it has, without what was cut.

    With m the mean ratio, H_x = E_B max(m - e^x, 0), and E_B max(1 - e^x m, 0) for the other order.
    """
    values = total.values
    above, below = values > 1.0, values < 1.0
    high, low = np.append(1.0, values[above]), np.append(values[below], 1.0)
    calls = _from_the_end(np.diff(high) * _from_the_end(total.masses[above]))
    puts = np.cumsum(np.diff(low) * np.cumsum(total.masses[below]))
    down = np.append(0.0, puts) / low  # from the lowest ratio up to 1
    return np.log(high), np.append(calls, 0.0), -np.log(low)[::-1], down[::-1]


def _from_the_end(x: FloatArray) -> FloatArray:
    return np.cumsum(x[::-1])[::-1]
