"""One secret deal of the units into disjoint batches, for a whole run, and what it costs.

Proof: docs/proofs/allocated-slots.md.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, TypeAlias, final

import numpy as np
import numpy.typing as npt

from langchain_dpicl.privacy._validate import Adjacency, RowShape, check_int
from langchain_dpicl.privacy.accounting import profiles
from langchain_dpicl.privacy.accounting.epsilon import ExtensionEvent, Step, Terms, normal_form, single_profile
from langchain_dpicl.privacy.accounting.events import Event, SubsampledEvent, is_positive, require, require_event
from langchain_dpicl.privacy.accounting.profiles import FloatArray, Profile, loss_masses
from langchain_dpicl.privacy.extensions.label_places import dominates
from langchain_dpicl.privacy.mechanisms.randomness import SecureRandom
from langchain_dpicl.privacy.mechanisms.release_plan import (
    BOTH,
    Sample,
    Sampler,
    amplified,
    assign,
    check_rate,
    poisson,
)

MAX_BATCHES = 100_000
"""Batches of one deal, at most: what the accountant can add up."""

IntArray: TypeAlias = npt.NDArray[np.int64]

_CELLS = 4096
_LARGEST_LOSS = 600.0  # ratios must stay floats; beyond, nothing is gained
_DIGITS = 7
_CUT = 1e-19  # mass that one stage may cut at either end


@final
@dataclass(frozen=True, slots=True)
class AllocatedSlots(Sampler):
    """One secret deal for a whole run: a unit joins with probability `sampling_rate`, in one slot of one batch.

    Formal guarantees:
      - Units are independent of each other; batch and slot are uniform. Adding, removing or replacing one, with the
        coins of the others kept, changes at most one slot of at most one batch. An over-full slot keeps
        `shots_per_slot` of its units, chosen uniformly.
      - There are always `num_batches * num_slots` rows, some possibly empty, for every number of units.
      - `amplify(event)` prices a run that releases `event` on each batch of one draw, under either adjacency.

    Args:
      sampling_rate: probability in (0, 1] that a unit stands anywhere.
      num_batches: batches of a draw, one for each demonstration, public.
      num_slots: rows of a batch, public.
      shots_per_slot: most units in a row, public.

    Raises:
      ConfigurationError: a parameter out of range.

    >>> from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
    >>> sampler = AllocatedSlots(1.0, num_batches=4, num_slots=3, shots_per_slot=10)
    >>> sample = sampler.draw(10, rng=SYSTEM_RANDOM)
    >>> len(sample), [len(sampler.batch(sample, i)) for i in range(4)], len({u for row in sample for u in row})
    (12, [3, 3, 3, 3], 10)

    Source: Feldman and Shenfeld (2025), Privacy Amplification by Random Allocation; docs/proofs/allocated-slots.md.
    """

    sampling_rate: float
    num_batches: int
    num_slots: int
    shots_per_slot: int
    name: ClassVar[str] = "allocated_slots"
    row_shape: ClassVar[RowShape] = "slots"
    adjacencies: ClassVar[frozenset[str]] = BOTH
    is_batched: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "sampling_rate", check_rate(self.sampling_rate))
        check_int("num_batches", self.num_batches, low=1, high=MAX_BATCHES)
        check_int("num_slots", self.num_slots, low=1)
        check_int("shots_per_slot", self.shots_per_slot, low=1)

    @property
    def num_rows(self) -> int:
        """Number of rows of every draw, all batches together, public."""
        return self.num_batches * self.num_slots

    def draw(self, num_units: int, *, rng: SecureRandom) -> Sample:
        """Deals all batches at once, batch after batch; see `PoissonSlots.draw`. A run has one draw and no other."""
        included = poisson(num_units, self.sampling_rate, rng)
        places = rng.integers(self.num_rows, len(included)).tolist()
        return assign(included, places, num_slots=self.num_rows, shots_per_slot=self.shots_per_slot)

    def batch(self, sample: Sample, index: int) -> Sample:
        """Returns the `num_slots` rows of batch 0 .. num_batches - 1 of a draw; another index is refused."""
        first = check_int("index", index, low=0, high=self.num_batches - 1) * self.num_slots
        return sample[first : first + self.num_slots]

    def amplify(self, event: Event) -> Event:
        """Returns the event of a whole run that releases `event` on each batch of one secret draw."""
        if self.num_batches == 1:
            return amplified(event, self.sampling_rate)
        return AllocatedEvent(event, self.num_batches, self.sampling_rate)


@dataclass(frozen=True, slots=True)
class AllocatedEvent(ExtensionEvent):
    """`event` on each of `num_batches` batches of one secret deal; a unit stands in one of them at most.

    Each unit joins with probability `sampling_rate` and then stands in a uniformly random batch, by its own secret
    coins, which serve every release on the deal and no other. `event` is everything that one batch releases.

    Attributes:
      event: all that one batch releases.
      num_batches: batches of the deal, from 1 to `MAX_BATCHES`.
      sampling_rate: probability of being dealt at all, in (0, 1].

    Raises:
      UnknownEventError: a number is out of range, or `event` is none.
    """

    event: Event
    num_batches: int
    sampling_rate: float
    kind: ClassVar[str] = "allocated"
    own_adjacencies: ClassVar[frozenset[str]] = frozenset({"add_remove"})

    def __post_init__(self) -> None:
        count = self.num_batches
        ok = isinstance(count, int) and not isinstance(count, bool) and 1 <= count <= MAX_BATCHES
        require(ok, "AllocatedEvent", f"an integer num_batches in 1 .. {MAX_BATCHES}", count)
        ok = is_positive(self.sampling_rate) and self.sampling_rate <= 1
        require(ok, "AllocatedEvent", "0 < sampling_rate <= 1", self.sampling_rate)
        require_event("AllocatedEvent", self.event)

    @property
    def parts(self) -> tuple[Event, ...]:
        """The event inside."""
        return (self.event,)

    def with_parts(self, parts: tuple[Event, ...]) -> Event:
        """Returns the same event around another.

        Args:
          parts: as many as this one has.
        """
        return dataclasses.replace(self, event=parts[0])

    @property
    def bounded_by(self) -> Event:
        """What one batch costs: parallel composition, as a unit stands in one batch at most.

        Under replace_one nothing else is priced: there is no theorem for a unit that is replaced inside a secret batch.
        """
        return SubsampledEvent(self.event, self.sampling_rate)

    def reduced(self) -> Event | Step:
        """Returns a sampled event where there is one batch, else one step."""
        if self.num_batches == 1:
            return self.bounded_by
        return DealStep(normal_form(self.event), self.num_batches, float(self.sampling_rate))

    def outweighs(self, other: Event) -> bool:
        """Compares two deals: more batches hide a unit better.

        Args:
          other: another event.
        """
        if not isinstance(other, AllocatedEvent):
            return False
        is_wider = self.num_batches <= other.num_batches and self.sampling_rate >= other.sampling_rate
        return is_wider and dominates(self.event, other.event)


@dataclass(frozen=True, slots=True)
class DealStep(Step):
    """All releases on one secret deal.

    Attributes:
      base: what is done on each batch.
      num_batches: batches, at least 2.
      rate: probability of being dealt at all.
    """

    base: Terms
    num_batches: int
    rate: float
    bound_name: ClassVar[str] = "random allocation"

    @property
    def is_empty(self) -> bool:
        """Whether nothing is done on a batch."""
        return self.base.is_empty

    @property
    def is_bounded(self) -> bool:
        """See `Terms.is_bounded`."""
        return self.base.is_bounded

    @property
    def key(self) -> tuple[Terms, int, float]:
        """See `Step`."""
        return self.base, self.num_batches, self.rate

    def profile(self, adjacency: Adjacency) -> Profile:
        """See `Step`."""
        return allocated_step(self.base, self.num_batches, self.rate, adjacency)


@lru_cache(maxsize=256)
def allocated_step(base: Terms, num_batches: int, rate: float, adjacency: Adjacency) -> Profile:
    """All releases on one secret deal: composed inside a batch, allocated, and sampled on top."""
    if adjacency == "replace_one":  # `readings` does not ask for it; no theorem, so one batch's price
        return profiles.symmetrise(single_profile(base, adjacency), rate)
    profile = allocate(single_profile(base, adjacency), num_batches)
    return profile if rate == 1.0 else profiles.amplify_poisson(profile, rate)


# --- the price of a deal ------------------------------------------------------------------------------------------

# With R the likelihood ratio A/B of one batch's dominating pair, the whole run is dominated by the pair whose ratio is
# the mean of independent copies of R. Their sum is composed on a geometric grid. Every step to the grid is a
# mean-preserving spread or a cut that counts as infinite loss, so every number here is an upper bound; nothing is
# subtracted, so small masses keep their digits.


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

    def trim(self) -> _Sum:
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

    def refine(self) -> _Sum:
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
        lowest, masses = _add_laws(self, other, stride)
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
        ).trim()


def _add_laws(few: _Sum, many: _Sum, stride: int) -> tuple[int, FloatArray]:
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
    return _Sum(1, step, lowest, law, infinite, 0.0, absent).trim()


def _sum_of(base: Profile, count: int) -> _Sum:
    """The sum of `count` ratios, by doubling; of slightly fewer, whose mean bounds that of more, beyond 127."""
    one = _one(base)
    total = one
    doublings = max(count.bit_length() - _DIGITS, 0)
    for digit in bin(count >> doublings)[3:] + "0" * doublings:
        fine = total.refine()
        total = fine.plus(fine)
        if digit == "1":
            total = one.plus(total)
    return total


def allocate(base: Profile, num_batches: int) -> Profile:
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
    return profiles.tabulated_profile(x_up, np.minimum(up, 1.0), x_down, np.minimum(down, 1.0))


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
