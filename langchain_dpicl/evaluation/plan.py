"""Plans and prices an evaluation and a choice, with intervals that hold for the noise and for the sampling together."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.planning.share_plan import Cost, SharePlan, terms_shown, with_noise_for
from langchain_dpicl.privacy._validate import (
    Adjacency,
    check_adjacency,
    check_choice,
    check_delta,
    check_flag,
    check_int,
    check_name,
    check_real,
    fail,
)
from langchain_dpicl.privacy.extensions.joint_exponential import KeywordSum
from langchain_dpicl.privacy.extensions.outcome_counts import CHOICE_TEMPLATE, OutcomePlan, OutcomeTable, Part
from langchain_dpicl.privacy.extensions.value_counts import DiscreteLaplaceMechanism
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.privacy.mechanisms.release_plan import GumbelMechanism, PoissonUnits, ReleasePlan

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
    """Noisy counts of the cells of one table."""

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
    return np.where(is_far, 0.0, np.clip(1 - inside, 0.0, 1.0))


@dataclass(frozen=True, slots=True)
class _UnitsPlan(SharePlan):
    """A plan of one release about a sample of the units, or of those of one half.

    Attributes:
      public_size: declared number of units.
      sample: units that are read, on average.
      calls_per_unit: model calls for one unit.
      part: half of the data that is read; None: all of it.
    """

    public_size: int
    sample: int
    calls_per_unit: int
    part: Part | None = field(default=None, kw_only=True)

    @property
    def sizes(self) -> Mapping[str | None, int]:
        """The declared units, of the half that is read or of all."""
        return {self.part: self.public_size}

    def cost(self, *, record_tokens: int = 60) -> Cost:
        """Returns the expected model use, from public caps; see `SharePlan.cost`."""
        check_int("record_tokens", record_tokens, low=1)
        calls = self.sample * self.calls_per_unit
        return Cost(calls, 0, calls * record_tokens, calls)


@dataclass(frozen=True, slots=True)
class EvaluationPlan(_UnitsPlan):
    """The public plan of one evaluation: the release, its ticket, its calls and its expected intervals.

    Attributes:
      release: sample, tables and noise.
      widths: number of outcomes of each table of each evaluator.
    """

    method: ClassVar[str] = "evaluation"

    release: OutcomePlan
    widths: tuple[tuple[int, ...], ...]

    @property
    def implementation_delta(self) -> float:
        """Declared gap between the ideal mechanism and what runs: that of the sample's coins."""
        return self.release.implementation_delta

    def tickets(self) -> tuple[Ticket, ...]:
        """Returns the one ticket of the share."""
        return tuple(dataclasses.replace(ticket, label=self.part) for ticket in self.release.tickets())

    def expected(self, accuracy: float = 0.8, confidence: float = 0.95) -> dict[str, float]:
        """Returns the expected half widths of the interval of a rate, in points of 1; of the evaluator with the widest.

        Each outcome brings noise of its own: one of them is right, and all others are wrong, which is the most.
        """
        check_real("accuracy", accuracy, low=0.0, high=1.0)
        right, scale, rate = (
            round(self.sample * accuracy),
            float(self.release.scale),
            self.release.sampler.sampling_rate,
        )

        def counted(width: int) -> Counted:
            counts = (right, self.sample - right, *(0,) * (width - 2))
            return Counted(counts, (1.0, *(0.0,) * (len(counts) - 1)))

        ratios = [
            NoisyRatio(*counted(first), (0.0, 1.0), scale, rate, *map(counted, second))
            for first, *second in dict.fromkeys(self.widths)
        ]
        ofs: tuple[Of, ...] = ("population", "data")
        return {of: max(one.estimate(confidence=confidence, of=of).half_width for one in ratios) for of in ofs}

    def _numbers(self) -> dict[str, Any]:
        return {
            "outcomes": self.release.to_dict(),
            "widths": [list(tables) for tables in self.widths],
            "public_size": self.public_size,
            "sample": self.sample,
            "sampling_rate": self.release.sampler.sampling_rate,
            "calls_per_unit": self.calls_per_unit,
            "part": self.part,
        }

    @classmethod
    def rebuild(cls, shown: Mapping[str, Any]) -> EvaluationPlan:
        """Returns the plan of the parameters shown, see `SharePlan.rebuild`."""
        return plan_evaluation(
            shown["public_size"],
            widths=[tuple(tables) for tables in shown["widths"]],
            **terms_shown(shown, "sample", "calls_per_unit", "part"),
        )


def plan_evaluation(
    public_size: int,
    *,
    widths: Sequence[int | tuple[int, ...]],
    epsilon: float | None,
    delta: float,
    sample: int | None = None,
    adjacency: Adjacency = "add_remove",
    noise_multiplier: float | None = None,
    calls_per_unit: int = 1,
    part: Part | None = None,
    partition: str = "private-examples",
) -> EvaluationPlan:
    """Calibrates the noise of all tables to `epsilon`, or prices a given noise.

    Args:
      public_size: declared number of units.
      widths: of each evaluator, its number of outcomes; where it has a second table, as `Exact` with 10 labels, both:
        `Exact.widths(10)`, which is (110, 2).
      epsilon: target; the plan's epsilon is an upper bound at most this. None needs `noise_multiplier`.
      delta: the share's delta; pure noise hardly uses it.
      sample: units that are read, on average; None, or more than there are: all.
      adjacency: neighbouring relation.
      noise_multiplier: scale of the noise over the L1 sensitivity, instead of calibrating.
      calls_per_unit: model calls for one unit.
      part: half of the data that is read, of which `public_size` is then the size; None: all of it.
      partition: the data set's public id.

    Raises:
      ConfigurationError: a public parameter is out of range.

    >>> plan = plan_evaluation(2_000, widths=[2], epsilon=0.5, delta=1e-6)
    >>> {of: round(100 * width, 1) for of, width in plan.expected(0.8).items()}
    {'population': 1.8, 'data': 0.2}
    >>> from langchain_dpicl.evaluation import Exact
    >>> plan = plan_evaluation(2_000, widths=[Exact.widths(10)], epsilon=0.5, delta=1e-6)
    >>> {of: round(100 * width, 1) for of, width in plan.expected(0.8).items()}
    {'population': 1.8, 'data': 0.5}
    """
    check_adjacency(adjacency)
    check_delta(delta)
    check_name("partition", partition)
    size = check_int("public_size", public_size, low=1)
    read = size if sample is None else min(size, check_int("sample", sample, low=1))
    if not isinstance(widths, Iterable) or (isinstance(widths, tuple) and all(isinstance(one, int) for one in widths)):
        raise fail("widths", "a list with the widths of each evaluator, such as [Exact.widths(10)] or [2, 3]", widths)
    tables = tuple((one,) if isinstance(one, int) else _both(one) for one in widths)
    flat = tuple(itertools.chain.from_iterable(tables))
    release = OutcomePlan(PoissonUnits(read / size), OutcomeTable(flat), DiscreteLaplaceMechanism(1.0), adjacency)
    check_int("calls_per_unit", calls_per_unit, low=1)
    if part is not None:
        check_choice("part", part, get_args(Part))
    draft = EvaluationPlan(
        size, read, calls_per_unit, release, tables, part=part, partition=partition, epsilon=0.0, delta=delta
    )
    return with_noise_for(draft, epsilon=epsilon, noise_multiplier=noise_multiplier)


def _both(widths: Any) -> tuple[int, ...]:
    if not isinstance(widths, tuple) or not 1 <= len(widths) <= 2:
        raise fail("widths", "for each evaluator a number of outcomes, or a tuple of one or two", widths)
    return widths


_SURE = 0.9


@dataclass(frozen=True, slots=True)
class ChoicePlan(_UnitsPlan):
    """The public plan of one choice: the release, its ticket, its calls and the lead that wins.

    Attributes:
      release: sample, counts of right answers and noise.
      candidates: number of chains.
      is_rounded: whether there are other marks than the least and the largest.
    """

    method: ClassVar[str] = "choice"

    release: ReleasePlan
    candidates: int
    is_rounded: bool = False

    @property
    def implementation_delta(self) -> float:
        """Declared gap between ideal and drawn noise."""
        return self.release.implementation_delta(1, width=self.candidates)

    def tickets(self) -> tuple[Ticket, ...]:
        """Returns the one ticket of the share."""
        event = self.release.block_event(1)
        return (Ticket(template=CHOICE_TEMPLATE, event=event, label=self.part, refundable=True),)

    @property
    def lead(self) -> float:
        """The lead that wins with a chance of 90 % or more, as a share of the range of marks; above 1 no lead does.

        It is one of mean marks on `sample` units: on fewer the same lead wins less often.
        With a lead of L right answers over each of K - 1 others and Gumbel noise of scale s the best is chosen with a
        chance of at least 1 / (1 + (K - 1) exp(-L / s)). Where marks are rounded by a coin, each of n records moves a
        lead by something in an interval of length 1, and half of the 10 % goes to that (Hoeffding 1963).
        """
        scale, others = self.noise_multiplier * self.release.sensitivity.require("range"), self.candidates - 1
        sure = (1 + _SURE) / 2 if self.is_rounded else _SURE
        rounding = math.sqrt(self.sample / 2 * math.log(others / (1 - sure))) if self.is_rounded else 0.0
        return (scale * math.log(sure / (1 - sure) * others) + rounding) / self.sample

    def expected(self) -> dict[str, float]:
        """Returns the lead that wins."""
        return {"lead": self.lead}

    def _numbers(self) -> dict[str, Any]:
        return {
            "release": self.release.to_dict(),
            "candidates": self.candidates,
            "public_size": self.public_size,
            "sample": self.sample,
            "sampling_rate": self.release.sampler.sampling_rate,
            "calls_per_unit": self.calls_per_unit,
            "is_rounded": self.is_rounded,
            "part": self.part,
        }

    @classmethod
    def rebuild(cls, shown: Mapping[str, Any]) -> ChoicePlan:
        """Returns the plan of the parameters shown, see `SharePlan.rebuild`."""
        names = ("public_size", "candidates", "sample", "calls_per_unit", "is_rounded", "part")
        return plan_choice(**terms_shown(shown, *names))


def plan_choice(
    public_size: int,
    *,
    candidates: int,
    epsilon: float | None,
    delta: float,
    sample: int | None = None,
    adjacency: Adjacency = "add_remove",
    noise_multiplier: float | None = None,
    calls_per_unit: int | None = None,
    is_rounded: bool = False,
    part: Part | None = None,
    partition: str = "private-examples",
) -> ChoicePlan:
    """Calibrates the noise of a choice to `epsilon`, or prices a given noise.

    Args:
      public_size: declared number of units.
      candidates: number of chains.
      epsilon: target; the plan's epsilon is an upper bound at most this. None needs `noise_multiplier`.
      delta: the share's delta.
      sample: units that are read, on average; None, or more than there are: all.
      adjacency: neighbouring relation.
      noise_multiplier: scale of the noise over the range that a unit moves, instead of calibrating.
      calls_per_unit: model calls for one unit; None: one of each chain.
      is_rounded: whether there are other marks than the least and the largest.
      part: half of the data that is read, of which `public_size` is then the size; None: all of it.
      partition: the data set's public id.

    Raises:
      ConfigurationError: a public parameter is out of range.

    >>> plan = plan_choice(2_000, candidates=20, epsilon=1.0, delta=1e-6)
    >>> round(100 * plan.lead, 2)
    0.26
    """
    check_adjacency(adjacency)
    check_delta(delta)
    check_name("partition", partition)
    size, width = check_int("public_size", public_size, low=1), check_int("candidates", candidates, low=2)
    read = size if sample is None else min(size, check_int("sample", sample, low=1))
    calls = width if calls_per_unit is None else check_int("calls_per_unit", calls_per_unit, low=1)
    check_flag("is_rounded", is_rounded)
    if part is not None:
        check_choice("part", part, get_args(Part))
    release = ReleasePlan(
        sampler=PoissonUnits(read / size), aggregation=KeywordSum(), mechanism=GumbelMechanism(1.0), adjacency=adjacency
    )
    draft = ChoicePlan(
        size, read, calls, release, width, is_rounded, part=part, partition=partition, epsilon=0.0, delta=delta
    )
    return with_noise_for(draft, epsilon=epsilon, noise_multiplier=noise_multiplier)
