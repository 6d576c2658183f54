"""Calibrates the noise of plans of answers to queries, and compares row designs at equal epsilon."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from langchain_dpicl._cost import with_noise_for
from langchain_dpicl._query_plan import QueryPlan, RowsPlan
from langchain_dpicl.privacy._validate import (
    Adjacency,
    check_adjacency,
    check_choice,
    check_delta,
    check_int,
    check_real,
    fail,
)
from langchain_dpicl.privacy.amounts import check_name
from langchain_dpicl.privacy.extensions.registry import MECHANISMS, mechanism_by_name
from langchain_dpicl.privacy.mechanisms.bounded import Aggregation
from langchain_dpicl.privacy.mechanisms.noise import Mechanism
from langchain_dpicl.privacy.mechanisms.release_plan import ReleasePlan
from langchain_dpicl.privacy.mechanisms.vote_sums import ProbabilitySum, VoteSum
from langchain_dpicl.row_design import RowDesign, redrawn, shapes_like
from langchain_dpicl.signal import agreement_of, occupancy

__all__ = ["QueryOption", "QueryPlan", "compare_queries", "plan_queries", "query_signal", "recommended_design"]

# Shots per slot that are compared, as far as they divide the records.
_SHOTS = (1, 2, 4, 8, 16)


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
      mechanism: a mechanism (its noise is replaced) or its name.
      noise_multiplier: given noise; None calibrates.
      design: shape of rows; by default `RowDesign.choose(smallest_size=public_size)`.
      constants: public scores of further candidates, such as one to abstain.
      partition: the data set's public id.
      is_rough: calibrates several times faster, with a few percent more noise; for comparisons of many plans.
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


def checked_design(design: RowDesign, adjacency: Adjacency) -> RowDesign:
    """Returns the design after the checks of `RowDesign.choose`, which the constructor does not make."""
    shape = RowDesign.choose(**dataclasses.asdict(design))
    if shape.sampling == "fixed" and adjacency != "replace_one":
        raise fail("sampling", "'poisson' (a fixed-size sample needs adjacency='replace_one')", shape.sampling)
    return shape


# -- comparison --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class QueryOption:
    """One shape of rows with one mechanism, at the requested epsilon.

    Attributes:
      plan: the plan; its noise is up to a few percent higher than that of `plan_queries`.
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
        """Sort key, best first: right labels to a tenth of a percent, then fewer calls, then the default mechanism."""
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
    """Returns the expected signal of one answer, with the guessed agreement that it assumes."""
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

    Compares unit rows and slots of 1, 2, 4 ... shots with the first mechanism, then the other mechanisms on the best
    shape. Shapes with more rows than declared units are omitted.

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
    others_like = shapes_like(start, _SHOTS, sampling=start.sampling)
    shapes = [start, *(shape for shape in others_like if shape != start and shape.num_slots <= public_size)]
    options = [option(first, shape) for shape in shapes]
    # Mechanisms are compared on one shape only: every option costs a calibration.
    best = min(options, key=lambda one: one.rank).plan.design
    options += [option(name, best) for name in others]
    return sorted(options, key=lambda one: one.rank)


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
    """Returns the best shape of rows at 40 records per query, or one per unit if there are fewer units.

    Args:
      public_size: declared number of units.
      epsilon: the share; None, if noise is given instead, returns `RowDesign.choose` without a comparison.
      delta: its delta.
      max_queries: answers that the share pays for.
      labels: labels an answer can have.
      adjacency: neighbouring relation.
      mechanism: "gumbel", "gaussian" or "permute_and_flip".
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
