"""Plans and prices an evaluation and a choice: how wide intervals will be, and which lead wins."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

from langchain_dpicl.evaluation.intervals import Counted, NoisyRatio, Of
from langchain_dpicl.planning.share_plan import Cost, SharePlan, with_noise_for
from langchain_dpicl.privacy._validate import (
    Adjacency,
    check_adjacency,
    check_choice,
    check_delta,
    check_int,
    check_real,
    fail,
)
from langchain_dpicl.privacy.extensions.count_histograms import DiscreteLaplaceMechanism
from langchain_dpicl.privacy.extensions.joint_exponential import KeywordSum
from langchain_dpicl.privacy.extensions.outcome_counts import CHOICE_TEMPLATE, OutcomePlan, OutcomeTable
from langchain_dpicl.privacy.extensions.part_split import Part
from langchain_dpicl.privacy.ledger.amounts import check_name
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.privacy.mechanisms.noise import GumbelMechanism
from langchain_dpicl.privacy.mechanisms.release_plan import ReleasePlan
from langchain_dpicl.privacy.mechanisms.sampling import PoissonUnits


@dataclass(frozen=True, slots=True)
class EvaluationPlan(SharePlan):
    """The public plan of one evaluation: the release, its ticket, its calls and its expected intervals.

    Attributes:
      release: sample, tables and noise.
      widths: number of outcomes of each table of each evaluator.
      public_size: declared number of units.
      sample: units that are read, on average.
      calls_per_unit: model calls for one unit.
      part: half of the data that is read; None: all of it.
    """

    method: ClassVar[str] = "evaluation"

    release: OutcomePlan
    widths: tuple[tuple[int, ...], ...]
    public_size: int
    sample: int
    calls_per_unit: int
    part: Part | None = None

    @property
    def sizes(self) -> Mapping[str | None, int]:
        """The declared units, of the half that is read or of all."""
        return {self.part: self.public_size}

    @property
    def implementation_delta(self) -> float:
        """Declared gap between the ideal mechanism and what runs: that of the sample's coins."""
        return self.release.implementation_delta

    def tickets(self) -> tuple[Ticket, ...]:
        """Returns the one ticket of the share."""
        return tuple(dataclasses.replace(ticket, label=self.part) for ticket in self.release.tickets())

    def cost(self, *, record_tokens: int = 60) -> Cost:
        """Returns the expected model use, from public caps; see `SharePlan.cost`."""
        check_int("record_tokens", record_tokens, low=1)
        calls = self.sample * self.calls_per_unit
        return Cost(calls, 0, calls * record_tokens, calls)

    def expected(self, accuracy: float = 0.8, confidence: float = 0.95) -> dict[str, float]:
        """Returns the expected half widths of the interval of a rate, in points of 1; of the evaluator with the widest.

        Each outcome brings noise of its own: one of them is right, and all others are wrong, which is the most.

        Args:
          accuracy: public guess of the rate.
          confidence: of the interval.
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
            epsilon=None,
            delta=shown["delta"],
            sample=shown["sample"],
            adjacency=shown["adjacency"],
            noise_multiplier=shown["noise_multiplier"],
            calls_per_unit=shown["calls_per_unit"],
            part=shown["part"],
            partition=shown["dataset_id"],
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
    tables = tuple((one,) if isinstance(one, int) else _both(one) for one in widths)
    flat = tuple(itertools.chain.from_iterable(tables))
    release = OutcomePlan(PoissonUnits(read / size), OutcomeTable(flat), DiscreteLaplaceMechanism(1.0), adjacency)
    check_int("calls_per_unit", calls_per_unit, low=1)
    if part is not None:
        check_choice("part", part, get_args(Part))
    draft = EvaluationPlan(
        release, tables, size, read, calls_per_unit, part, partition=partition, epsilon=0.0, delta=delta
    )
    return with_noise_for(draft, epsilon=epsilon, noise_multiplier=noise_multiplier)


def _both(widths: Any) -> tuple[int, ...]:
    if not isinstance(widths, tuple) or not 1 <= len(widths) <= 2:
        raise fail("widths", "for each evaluator a number of outcomes, or a tuple of one or two", widths)
    return widths


_SURE = 0.9


@dataclass(frozen=True, slots=True)
class ChoicePlan(SharePlan):
    """The public plan of one choice: the release, its ticket, its calls and the lead that wins.

    Attributes:
      release: sample, counts of right answers and noise.
      candidates: number of chains.
      public_size: declared number of units.
      sample: units that are read, on average.
      calls_per_unit: model calls for one unit.
      is_rounded: whether there are other marks than the least and the largest.
      part: half of the data that is read; None: all of it.
    """

    method: ClassVar[str] = "choice"

    release: ReleasePlan
    candidates: int
    public_size: int
    sample: int
    calls_per_unit: int
    is_rounded: bool = False
    part: Part | None = None

    @property
    def sizes(self) -> Mapping[str | None, int]:
        """The declared units, of the half that is read or of all."""
        return {self.part: self.public_size}

    @property
    def implementation_delta(self) -> float:
        """Declared gap between ideal and drawn noise."""
        return self.release.implementation_delta(1, width=self.candidates)

    def tickets(self) -> tuple[Ticket, ...]:
        """Returns the one ticket of the share."""
        event = self.release.block_event(1)
        return (Ticket(template=CHOICE_TEMPLATE, event=event, label=self.part, refundable=True),)

    def cost(self, *, record_tokens: int = 60) -> Cost:
        """Returns the expected model use, from public caps; see `SharePlan.cost`."""
        check_int("record_tokens", record_tokens, low=1)
        calls = self.sample * self.calls_per_unit
        return Cost(calls, 0, calls * record_tokens, calls)

    @property
    def lead(self) -> float:
        """The lead that wins with a chance of 90 % or more, as a share of the range of marks, on the units read.

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
        return plan_choice(
            shown["public_size"],
            candidates=shown["candidates"],
            epsilon=None,
            delta=shown["delta"],
            sample=shown["sample"],
            adjacency=shown["adjacency"],
            noise_multiplier=shown["noise_multiplier"],
            calls_per_unit=shown["calls_per_unit"],
            is_rounded=shown["is_rounded"],
            part=shown["part"],
            partition=shown["dataset_id"],
        )


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
    if not isinstance(is_rounded, bool):
        raise fail("is_rounded", "True or False", is_rounded)
    if part is not None:
        check_choice("part", part, get_args(Part))
    release = ReleasePlan(
        sampler=PoissonUnits(read / size), aggregation=KeywordSum(), mechanism=GumbelMechanism(1.0), adjacency=adjacency
    )
    draft = ChoicePlan(
        release, width, size, read, calls, is_rounded, part, partition=partition, epsilon=0.0, delta=delta
    )
    return with_noise_for(draft, epsilon=epsilon, noise_multiplier=noise_multiplier)
