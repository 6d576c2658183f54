"""Plans of private answers to queries: calibrates their noise, and compares shapes of rows at equal epsilon.

Knows public numbers only, and one stated guess: how far rows agree. Never sees a record, a query or a model's answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from langchain_dpicl._cost import finite_epsilon
from langchain_dpicl._query_plan import QUERY_TEMPLATE, QueryPlan, RowsPlan
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy._validate import (
    Adjacency,
    check_adjacency,
    check_choice,
    check_delta,
    check_epsilon,
    check_int,
    check_positive,
    check_real,
    fail,
)
from langchain_dpicl.privacy.accounting.events import Event
from langchain_dpicl.privacy.amounts import check_name, effective_delta
from langchain_dpicl.privacy.extensions.individual_filter import ParticipationPlan
from langchain_dpicl.privacy.extensions.registry import MECHANISMS, mechanism_by_name
from langchain_dpicl.privacy.mechanisms.bounded import Aggregation
from langchain_dpicl.privacy.mechanisms.noise import Mechanism
from langchain_dpicl.privacy.mechanisms.release_plan import ReleasePlan
from langchain_dpicl.privacy.mechanisms.vote_sums import ProbabilitySum, VoteSum
from langchain_dpicl.row_design import RowDesign, redrawn
from langchain_dpicl.signal import agreement_of, occupancy

__all__ = [
    "QUERY_TEMPLATE",
    "QueryOption",
    "QueryPlan",
    "compare_queries",
    "plan_queries",
    "query_signal",
    "recommended_design",
]

# Shots per slot that are compared, as far as they divide the records.
_SHOTS = (1, 2, 4, 8, 16)


class NoisyPlan(Protocol):
    """A frozen plan whose noise is still to be found, and then its price: of answers, labels or training steps."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def release(self) -> ReleasePlan | ParticipationPlan:
        """How one thing is released."""

    @property
    def delta(self) -> float:
        """The share's delta."""

    @property
    def implementation_delta(self) -> float:
        """Declared gap between ideal and drawn noise over all releases."""

    def event(self) -> Event:
        """Returns the event of all releases together."""


PlanT = TypeVar("PlanT", bound=NoisyPlan)


def plan_queries(
    public_size: int,
    *,
    epsilon: float | None,
    delta: float,
    max_queries: int,
    width: int,
    adjacency: Adjacency = "add_remove",
    aggregation: Aggregation | None = None,
    mechanism: Mechanism | str = "gumbel",
    noise_multiplier: float | None = None,
    design: RowDesign | None = None,
    constants: Sequence[float] = (),
    partition: str = "private-examples",
    is_rough: bool = False,
) -> QueryPlan:
    """Calibrates the noise of `max_queries` answers to `epsilon`, or prices a given noise.

    Args:
      public_size: declared number of units.
      epsilon: target; the plan's epsilon is an upper bound at most this. None needs `noise_multiplier`.
      delta: the share's delta.
      max_queries: answers that the share pays for, each on a fresh secret sample.
      width: candidates of one release, `constants` included.
      adjacency: neighbouring relation.
      aggregation: how rows add up; `VoteSum()` by default.
      mechanism: a mechanism, whose noise is replaced, or the name of one.
      noise_multiplier: given noise; None calibrates.
      design: shape of rows; by default `RowDesign.choose(smallest_size=public_size)`.
      constants: public scores of further candidates, such as one to abstain.
      partition: the data set's public id.
      is_rough: whether many plans are compared: calibrates several times faster, with a few percent more noise.

    Raises:
      ConfigurationError: a public parameter is out of range.
    """
    check_adjacency(adjacency)
    check_delta(delta)
    check_int("public_size", public_size, low=1)
    check_int("max_queries", max_queries, low=1)
    check_int("width", width, low=len(constants) + 1)
    check_name("partition", partition)
    shape = redrawn(checked_design(design or RowDesign.choose(smallest_size=public_size), adjacency))
    release = ReleasePlan(
        sampler=shape.sampler(public_size),
        aggregation=VoteSum() if aggregation is None else aggregation,
        mechanism=mechanism_by_name(mechanism)(noise_multiplier=1.0) if isinstance(mechanism, str) else mechanism,
        adjacency=adjacency,
        constants=tuple(constants),
    )
    draft = QueryPlan(release, max_queries, width, shape, public_size, partition, epsilon=0.0, delta=delta)
    return with_noise_for(draft, epsilon=epsilon, noise_multiplier=noise_multiplier, is_rough=is_rough)


def with_noise_for(
    draft: PlanT, *, epsilon: float | None, noise_multiplier: float | None, is_rough: bool = False
) -> PlanT:
    """Returns the plan with its noise and price: calibrated to `epsilon`, or of a given noise.

    Args:
      draft: a plan whose noise and epsilon do not matter.
      epsilon: target; None needs `noise_multiplier`.
      noise_multiplier: given noise; None calibrates.
      is_rough: see `plan_queries`.

    Raises:
      ConfigurationError: neither is given, one is out of range, or the noise's gap leaves nothing of delta.
    """
    if noise_multiplier is not None:
        return priced(_with_noise(draft, check_positive("noise_multiplier", noise_multiplier)))
    if epsilon is None:
        raise ConfigurationError("epsilon: expected a share of the budget (epsilon=...), found None.")
    target = check_epsilon(epsilon)
    found = dataclasses.replace(_calibrated(draft, target, is_rough=is_rough), epsilon=target)
    # The coarse price is a bound as well; a fine one would take longer than the search.
    return found if is_rough else priced(found)


def priced(plan: PlanT) -> PlanT:
    """Returns the plan with the epsilon that it costs."""
    adjacency = plan.release.adjacency
    bound = accounting.epsilon_upper_bound(plan.event(), delta=_pricing_delta(plan), adjacency=adjacency)
    epsilon = finite_epsilon(bound, noise_multiplier=plan.release.mechanism.noise_multiplier)
    return dataclasses.replace(plan, epsilon=epsilon)


def checked_design(design: RowDesign, adjacency: Adjacency) -> RowDesign:
    """Returns the design checked anew: one built by hand has seen no check."""
    shape = RowDesign.choose(**dataclasses.asdict(design))
    if shape.sampling == "fixed" and adjacency != "replace_one":
        raise fail("sampling", "'poisson' (a fixed-size sample needs adjacency='replace_one')", shape.sampling)
    return shape


def _pricing_delta(plan: NoisyPlan) -> float:
    left = effective_delta(plan.delta, plan.implementation_delta)
    if left <= 0:
        raise _too_many(plan)
    return left


def _too_many(plan: NoisyPlan) -> ConfigurationError:
    """Says how many queries a delta allows: drawing the noise of each takes a part of it."""
    gap = plan.implementation_delta
    asked = getattr(plan, "max_queries", None) or 1  # training has steps
    possible = int(plan.delta / gap * asked)
    while possible > 0 and effective_delta(plan.delta, gap / asked * possible) <= 0:
        possible -= 1
    if possible < 1 or possible >= asked:
        return fail("delta", f"more than the noise's declared gap {gap:.3g}", plan.delta, "Give a larger delta=.")
    advice = f"Drawing the noise of one query takes {gap / asked:.3g} of delta. Ask less, or give a larger delta=."
    return fail("max_queries", f"at most {possible:,} queries at delta {plan.delta:.3g}", asked, advice)


def _with_noise(plan: PlanT, noise_multiplier: float) -> PlanT:
    return dataclasses.replace(plan, release=plan.release.with_noise(noise_multiplier))


def _calibrated(plan: PlanT, epsilon: float, *, is_rough: bool) -> PlanT:
    noise = accounting.calibrate(
        lambda x: _with_noise(plan, x).event(),
        epsilon=epsilon,
        delta=_pricing_delta(plan),
        adjacency=plan.release.adjacency,
        is_rough=is_rough,
    )
    return _with_noise(plan, noise)


# -- comparison --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class QueryOption:
    """One shape of rows with one mechanism, at the asked epsilon.

    Attributes:
      plan: the plan; its noise is up to a few percent above what `plan_queries` finds.
      agreement: guessed chance that a row of this shape votes for the right label.
      right_label_prob: expected chance of releasing the right label.
      private_calls: expected private model calls of all queries, one per row.
    """

    plan: QueryPlan
    agreement: float
    right_label_prob: float
    private_calls: int

    @property
    def rank(self) -> tuple[float, int, int]:
        """Sorts best first: right labels to a tenth of a percent, then fewer calls, then the default mechanism."""
        return -round(self.right_label_prob, 3), self.private_calls, MECHANISMS.index(self.plan.release.mechanism.name)

    def to_dict(self) -> dict[str, Any]:
        """Returns the option's public numbers."""
        design = self.plan.design
        return {
            "mechanism": self.plan.release.mechanism.name,
            "rows": design.rows,
            "num_slots": design.num_slots,
            "shots_per_slot": design.shots_per_slot,
            "sampling": design.sampling,
            "noise_multiplier": round(self.plan.noise_multiplier, 4),
            "agreement": round(self.agreement, 4),
            "right_label_prob": round(self.right_label_prob, 4),
            "private_calls": self.private_calls,
        }


def query_signal(plan: RowsPlan, *, one_shot: float) -> dict[str, float]:
    """Returns the expected signal of one answer, with the guessed agreement it rests on.

    Args:
      plan: the plan to look at.
      one_shot: guessed chance that a one-shot row votes for the right label; rows that see more agree more.
    """
    agreement = agreement_of(occupancy(plan.release, plan.public_size).shots, one_shot=one_shot)
    return {"agreement": agreement, **plan.expected_signal(agreement)}


def compare_queries(
    public_size: int,
    *,
    epsilon: float,
    delta: float,
    max_queries: int,
    labels: int,
    adjacency: Adjacency = "add_remove",
    aggregation: VoteSum | ProbabilitySum | None = None,
    mechanisms: Sequence[str] = MECHANISMS,
    base: RowDesign | None = None,
    abstain_below: float | None = None,
    agreement: float = 0.6,
) -> list[QueryOption]:
    """Returns designs at equal records per query and equal epsilon, best first (see `QueryOption.rank`).

    Unit rows and slots of 1, 2, 4 ... shots with the first mechanism; then the other mechanisms on the best of them.
    Shapes of more rows than declared units are left out.

    Args:
      public_size: declared number of units.
      epsilon: the share.
      delta: its delta.
      max_queries: answers that the share pays for.
      labels: labels an answer can have.
      adjacency: neighbouring relation.
      aggregation: how rows add up; `VoteSum()` by default.
      mechanisms: names, at least one; shapes are compared with the first.
      base: starting shape; its records per query (`num_slots * shots_per_slot`) are kept.
      abstain_below: share of the expected rows, the constant score of a further candidate; None: there is none.
      agreement: guessed chance that a one-shot row votes for the right label.

    Raises:
      ConfigurationError: a public parameter is out of range, or the starting shape has more rows than units.
    """
    check_int("labels", labels, low=2)
    check_int("public_size", public_size, low=1)
    check_real("agreement", agreement, low=0.0, high=1.0)
    if abstain_below is not None:
        check_real("abstain_below", abstain_below, low=0.0, high=1.0, low_open=True)
    if not mechanisms:
        raise fail("mechanisms", f"at least one of {MECHANISMS}", mechanisms)
    start = base or RowDesign.choose(smallest_size=public_size)

    def option(mechanism: str, design: RowDesign) -> QueryOption:
        constants = () if abstain_below is None else (abstain_below * expected_rows(design, public_size),)
        plan = plan_queries(
            public_size,
            epsilon=epsilon,
            delta=delta,
            max_queries=max_queries,
            width=labels + len(constants),
            adjacency=adjacency,
            aggregation=aggregation,
            mechanism=check_choice("mechanism", mechanism, MECHANISMS),
            design=design,
            constants=constants,
            is_rough=True,
        )
        signal = query_signal(plan, one_shot=agreement)
        return QueryOption(plan, signal["agreement"], signal["right_label_prob"], plan.cost().private_calls)

    first, *others = dict.fromkeys(mechanisms)
    shapes = [start, *(shape for shape in _shapes(start) if shape != start and shape.num_slots <= public_size)]
    found = [option(first, shape) for shape in shapes]
    best = min(found, key=lambda one: one.rank).plan.design
    found += [option(name, best) for name in others]
    return sorted(found, key=lambda one: one.rank)


def recommended_design(
    public_size: int,
    *,
    epsilon: float | None,
    delta: float,
    max_queries: int,
    labels: int,
    adjacency: Adjacency = "add_remove",
    mechanism: str = "gumbel",
) -> RowDesign:
    """Returns the best shape of rows at 40 records per query, or as many as there are units if they are fewer.

    Args:
      public_size: declared number of units.
      epsilon: the share; None, where noise is given instead: `RowDesign.choose`, without a comparison.
      delta: its delta.
      max_queries: answers that the share pays for.
      labels: labels an answer can have.
      adjacency: neighbouring relation.
      mechanism: "gumbel", "gaussian" or "permute_and_flip".

    Raises:
      ConfigurationError: a public parameter is out of range.
    """
    if epsilon is None:
        return RowDesign.choose(smallest_size=check_int("public_size", public_size, low=1))
    options = compare_queries(
        public_size,
        epsilon=epsilon,
        delta=delta,
        max_queries=max_queries,
        labels=labels,
        adjacency=adjacency,
        mechanisms=(mechanism,),
    )
    return options[0].plan.design


def expected_rows(design: RowDesign, public_size: int) -> float:
    """Returns the public number of rows of one answer: the slots, or the expected number of unit rows."""
    sampler = design.sampler(public_size)
    return public_size * sampler.sampling_rate if sampler.num_rows is None else float(sampler.num_rows)


def _shapes(start: RowDesign) -> Iterator[RowDesign]:
    """Yields row shapes with the same records per query: unit rows, then slots of more and more shots."""
    records = start.num_slots * start.shots_per_slot
    yield RowDesign.choose(rows="units", num_slots=records)
    for shots in _SHOTS:
        if records % shots == 0 and records // shots >= 2:
            slots = records // shots
            yield RowDesign.choose(rows="slots", num_slots=slots, shots_per_slot=shots, sampling=start.sampling)
