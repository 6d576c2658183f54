"""Plans answers to queries: what runs, its noise, its price; compares row designs at equal epsilon."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from langchain_dpicl.options.rows import Rows
from langchain_dpicl.planning.design_search import search_designs, shapes_like
from langchain_dpicl.planning.expected_utility import (
    RowDesign,
    agreement_of,
    noise_deviation,
    noise_scale,
    occupancy,
    vote_chances,
    with_redraw,
)
from langchain_dpicl.planning.share_plan import Cost, SharePlan, check_counts, with_noise_for
from langchain_dpicl.privacy._validate import (
    Adjacency,
    check_adjacency,
    check_choice,
    check_delta,
    check_int,
    check_real,
    fail,
)
from langchain_dpicl.privacy.extensions.method_tickets import shown_release
from langchain_dpicl.privacy.extensions.registry import MECHANISMS, mechanism_by_name
from langchain_dpicl.privacy.ledger.amounts import check_name
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.privacy.mechanisms.bounded import Aggregation
from langchain_dpicl.privacy.mechanisms.noise import Mechanism
from langchain_dpicl.privacy.mechanisms.release_plan import ReleasePlan
from langchain_dpicl.privacy.mechanisms.vote_sums import ProbabilitySum, VoteSum

QUERY_TEMPLATE = "query"
"""The ticket template of one answer."""


@dataclass(frozen=True, slots=True)
class RowsPlan(SharePlan):
    """Base of plans of many releases, each from the rows of one public prompt.

    Attributes:
      release: sampling, aggregation, noise and adjacency of one release.
      max_queries: releases that the share pays for.
      width: candidates of one release, constants included.
      design: the shape of rows.
      public_size: declared units.
    """

    release: ReleasePlan
    max_queries: int
    width: int
    design: RowDesign
    public_size: int

    @property
    def sizes(self) -> Mapping[str | None, int]:
        """The declared units, which no label splits."""
        return {None: self.public_size}

    @property
    def implementation_delta(self) -> float:
        """Declared gap between ideal and drawn noise over all releases."""
        return self.release.implementation_delta(self.max_queries, width=self.width)

    @property
    def expected_rows(self) -> float:
        """Rows of one release, public: the slots, or the expected number of unit rows."""
        if self.release.row_shape == "slots":
            return float(self.design.num_slots)
        return self.public_size * self.release.sampler.sampling_rate

    def cost(
        self,
        *,
        record_tokens: int = 60,
        query_tokens: int = 60,
        answer_tokens: int = 1,
        calls_per_row: int = 1,
        public_rows: int = 1,
    ) -> Cost:
        """Returns model calls and tokens over all queries, from public caps (no discount for caches)."""
        check_counts(record_tokens=record_tokens, query_tokens=query_tokens)
        check_counts(answer_tokens=answer_tokens, calls_per_row=calls_per_row)
        check_int("public_rows", public_rows, low=0)
        private = self.max_queries * self.expected_rows * calls_per_row
        public = self.max_queries * public_rows * calls_per_row
        shots = occupancy(self.release, self.public_size).shots
        tokens_in = private * (shots * record_tokens + query_tokens) + public * query_tokens
        return Cost(round(private), public, round(tokens_in), round((private + public) * answer_tokens))

    def expected(self, agreement: float) -> dict[str, float]:
        """Returns occupancy, signal-to-noise and the chances of one release at a guessed `agreement` of rows.

        Rows cast hard votes independently; see `expected_utility.vote_chances`. Rows without records vote for nothing.
        """
        return expected_votes(self, agreement)

    def _numbers(self) -> dict[str, Any]:
        return {
            "mechanism": self.release.mechanism.name,
            # The joint exponential mechanism adds nothing to the sum.
            "noise_scale": None if self.release.mechanism.releases == "indices" else noise_scale(self.release),
            "aggregation": self.release.aggregation.name,
            **dataclasses.asdict(self.design),
            "sampling_rate": self.release.sampler.sampling_rate,
            "public_size": self.public_size,
            "max_queries": self.max_queries,
            "candidates": self.width,
            "constants": list(self.release.constants),
            "release": self.release.to_dict(),
        }


def shown_terms(shown: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a planner takes, from what its `RowsPlan` shows."""
    release = shown_release(shown["release"])
    return {
        "public_size": shown["public_size"],
        "epsilon": None,
        "delta": shown["delta"],
        "max_queries": shown["max_queries"],
        "width": shown["candidates"],
        "adjacency": release.adjacency,
        "aggregation": release.aggregation,
        "mechanism": release.mechanism,
        "noise_multiplier": release.mechanism.noise_multiplier,
        "design": RowDesign.shown(shown),
        "constants": release.constants,
        "partition": shown["dataset_id"],
    }


def expected_votes(plan: RowsPlan, agreement: float, *, threshold: float | None = None) -> dict[str, float]:
    """Computes `RowsPlan.expected`; below `threshold` the largest noisy vote is rejected."""
    check_real("agreement", agreement, low=0.0, high=1.0)
    release = plan.release
    if not isinstance(release.aggregation, VoteSum | ProbabilitySum):
        expected = "votes or probabilities (other sums have no right label)"
        raise fail("aggregation", expected, release.aggregation.name)
    fill = occupancy(release, plan.public_size)
    labels = plan.width - len(release.constants)
    chances = vote_chances(release, plan.public_size, agreement=agreement, labels=labels, threshold=threshold)
    right, wrong, *abstained = chances
    # As `vote_chances` assumes: half of the wrong votes go to one rival, or all of them if there are two labels.
    rival = (1.0 - agreement) / min(2, max(1, labels - 1))
    return {
        "expected_rows": fill.rows,
        "expected_shots": fill.shots,
        "empty_slot_prob": fill.empty,
        "signal_to_noise": fill.rows * (agreement - rival) / noise_deviation(release),
        "right_label_prob": float(right),
        "wrong_label_prob": float(wrong),
        "abstain_prob": float(sum(abstained)),
    }


@dataclass(frozen=True, slots=True)
class QueryPlan(RowsPlan):
    """Everything public about answers to `max_queries` queries: what will run, what it is charged, what it will cost.

    Formal guarantees:
      - `tickets()` hold `max_queries` tickets of `release.block_event(1)`: a fresh secret sample for each query.
      - All of them together are (epsilon, delta)-DP under `release.adjacency`, the declared gap of the noise included.

    """

    method: ClassVar[str] = "queries"

    def tickets(self) -> tuple[Ticket, ...]:
        """Returns the tickets of the share: one per query."""
        return (
            Ticket(
                template=QUERY_TEMPLATE,
                event=self.release.block_event(1),
                max_count=self.max_queries,
                refundable=True,
            ),
        )

    @classmethod
    def rebuild(cls, shown: Mapping[str, Any]) -> QueryPlan:
        """Returns the plan of the parameters shown, see `SharePlan.rebuild`."""
        return plan_queries(**shown_terms(shown))


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
    shape = with_redraw(check_design(design or RowDesign.choose(smallest_size=public_size), adjacency))
    release = ReleasePlan(
        sampler=shape.sampler(public_size),
        aggregation=VoteSum() if aggregation is None else aggregation,
        mechanism=mechanism_by_name(mechanism)(noise_multiplier=1.0) if isinstance(mechanism, str) else mechanism,
        adjacency=adjacency,
        constants=tuple(constants),
    )
    draft = QueryPlan(release, max_queries, width, shape, public_size, partition=partition, epsilon=0.0, delta=delta)
    return with_noise_for(draft, epsilon=epsilon, noise_multiplier=noise_multiplier, is_rough=is_rough)


def design_of_queries(rows: Rows | None, public_size: int) -> RowDesign | None:
    """Returns the shape that `rows=` asks for; None lets the planner choose."""
    design = RowDesign.of(rows, smallest_size=public_size)
    if rows is not None and rows.redraw_every is not None:
        raise fail("Rows.redraw_every", "None: every query draws its own sample", rows.redraw_every)
    return design


def check_design(design: RowDesign, adjacency: Adjacency) -> RowDesign:
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
    return {"agreement": agreement, **plan.expected(agreement)}


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

    def option(key: tuple[str, RowDesign]) -> QueryOption:
        mechanism, design = key
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
    # Mechanisms are compared on one shape only: every option costs a calibration.
    return search_designs(
        option,
        lambda _: ((first, shape) for shape in shapes),
        lambda found: ((name, found[0].plan.design) for name in others),
    )


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
