"""Plans answers to queries: what runs, its noise, its price; compares row designs at equal epsilon."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from langchain_dpicl.backends.base import RowHint
from langchain_dpicl.options import NoiseName, Rows, option_of
from langchain_dpicl.planning.expected_utility import (
    ROUGH_DRAWS,
    RowDesign,
    noise_scale,
    occupancy,
    ranges,
    right_chance,
    rough_ceiling,
    search_designs,
    shot_law,
    vote_chances,
    with_redraw,
)
from langchain_dpicl.planning.row_law import RowFacts, RowGuess, RowSource, mean_facts
from langchain_dpicl.planning.share_plan import Cost, SharePlan, check_counts, with_noise_for
from langchain_dpicl.privacy._validate import (
    Adjacency,
    check_adjacency,
    check_int,
    check_name,
    check_positive_delta,
    check_real,
    fail,
    round_up_at,
)
from langchain_dpicl.privacy.accounting.epsilon import MAX_COUNT
from langchain_dpicl.privacy.extensions.confident_gnmax import ConfidentGNMaxMechanism
from langchain_dpicl.privacy.extensions.registry import MECHANISMS, mechanism_by_name, shown_release
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.privacy.mechanisms.bounded import Aggregation, ProbabilitySum, VoteSum
from langchain_dpicl.privacy.mechanisms.release_plan import Mechanism, ReleasePlan

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
        return expected_rows(self.design, self.public_size)

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

    def expected(
        self,
        source: RowSource | None = None,
        *,
        calibrated: bool = False,
        labels: int | None = None,
        abstain_below: float | None = None,
    ) -> dict[str, Any]:
        """Returns occupancy and the chances of one release of hard votes, with what they rest on.

        Args:
          source: where the numbers of rows come from: a `Rehearsal`, or a `RowGuess`; None: the usual guess.
          calibrated: whether rows are divided by those on content-free inputs, which a rehearsal tells apart.
          labels: labels that an answer can have; None: all candidates but the constants.
          abstain_below: share of the expected rows that a released noisy vector's largest vote needs; a mechanism that
            releases an index has a constant candidate instead.
        """
        release, size = self.release, self.public_size
        rejects = rejection(abstain_below, self.design, public_size=size, mechanism=release.mechanism)
        return expected_votes(self, source, calibrated=calibrated, labels=labels, threshold=rejects["threshold"])

    def noise_takes(self, source: RowSource, *, labels: int, calibrated: bool = False) -> float:
        """Returns the chance of the right label that noise takes, roughly; rejected answers do not count as taken."""
        law = shot_law(self.release, self.public_size)
        facts = mean_facts(source, labels=labels, law=law, calibrated=calibrated)
        found = vote_chances(self.release, self.public_size, facts=facts, draws=ROUGH_DRAWS)
        return max(0.0, found.without_noise - found.right - found.abstain)

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


def expected_votes(
    plan: RowsPlan,
    source: RowSource | None,
    *,
    calibrated: bool,
    labels: int | None = None,
    threshold: float | None = None,
) -> dict[str, Any]:
    """Computes `RowsPlan.expected`; below `threshold` the largest noisy vote is rejected."""
    release, size = plan.release, plan.public_size
    if not isinstance(release.aggregation, VoteSum | ProbabilitySum):
        expected = "votes or probabilities (other sums have no right label)"
        raise fail("aggregation", expected, release.aggregation.name)
    rests, labels = source or RowGuess(), labels or plan.width - len(release.constants)
    fill, law = occupancy(release, size), shot_law(release, size)
    facts = mean_facts(rests, labels=labels, law=law, calibrated=calibrated)
    chances = vote_chances(release, size, facts=facts, threshold=threshold)

    def right(other: RowFacts) -> float:
        return right_chance(release, size, facts=other, threshold=threshold, draws=ROUGH_DRAWS)

    low, high = rests.interval(right, labels=labels, law=law, calibrated=calibrated)
    most = rests.interval(rough_ceiling, labels=labels, law=law, calibrated=calibrated)
    return {
        "expected_rows": fill.rows,
        "expected_shots": fill.shots,
        "empty_slot_prob": fill.empty,
        "row_right": facts.right,
        "row_correlation": facts.correlation,
        "row_rival": facts.rival,
        **ranges(chances.right, low, high, ceiling=chances.ceiling, most=most),
        "wrong_label_prob": chances.wrong,
        "abstain_prob": chances.abstain,
        "without_noise_prob": chances.without_noise,
        "rests_on": rests.rests_on,
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


_SHOTS = (2, 4, 8)
"""Shots per slot that are compared."""


def plan_queries(
    public_size: int,
    *,
    epsilon: float | None,
    delta: float,
    max_queries: int,
    width: int,
    adjacency: Adjacency = "add_remove",
    aggregation: Aggregation | None = None,
    mechanism: Mechanism | str | None = None,
    noise_multiplier: float | None = None,
    design: RowDesign | None = None,
    constants: Sequence[float] = (),
    partition: str = "private-examples",
    is_rough: bool = False,
    near: float | None = None,
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
      mechanism: a mechanism (its noise is replaced) or its name; None: Gaussian for slots, Gumbel for unit rows.
      noise_multiplier: given noise; None calibrates.
      design: shape of rows; by default 20 slots of 4 records, or fewer where there are fewer units.
      constants: public scores of further candidates, such as one to abstain.
      partition: the data set's public id.
      is_rough: calibrates several times faster, with a few percent more noise; for comparisons of many plans.
      near: a guess of the noise multiplier, near which it is looked for first.
    """
    check_adjacency(adjacency)
    check_positive_delta(delta)
    check_int("public_size", public_size, low=1)
    check_int("max_queries", max_queries, low=1, high=MAX_COUNT)
    check_int("width", width, low=len(constants) + 1)
    check_name("partition", partition)
    shape = with_redraw(check_design(design or declared_design(RowHint(), public_size), adjacency))
    release = ReleasePlan(
        sampler=shape.sampler(public_size),
        aggregation=VoteSum() if aggregation is None else aggregation,
        mechanism=mechanism_or_usual(mechanism, shape),
        adjacency=adjacency,
        constants=tuple(constants),
    )
    draft = QueryPlan(release, max_queries, width, shape, public_size, partition=partition, epsilon=0.0, delta=delta)
    return with_noise_for(draft, epsilon=epsilon, noise_multiplier=noise_multiplier, is_rough=is_rough, near=near)


def design_of_queries(rows: Rows | None, public_size: int, *, usual: RowDesign | None = None) -> RowDesign | None:
    """Returns the shape that `rows=` asks for; None lets the planner choose.

    Where only records of a slot are asked for, there are as many slots as `usual` has.
    """
    rows = option_of("rows", rows, Rows)
    is_open = rows.slots is rows.units is None and rows.shots > 1 and rows.sampling != "partition"
    if is_open and usual is not None and usual.rows == "slots":
        rows = rows.replace(slots=usual.num_slots)
    design = RowDesign.of(rows, smallest_size=public_size)
    if rows.redraw_every is not None:
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
      row_right: chance that a row of this shape votes for the right label.
      right_label_prob: expected chance of releasing the right label.
      private_calls: expected private model calls of all queries.
      calibrated: whether rows are divided by those on content-free inputs.
    """

    plan: QueryPlan
    row_right: float
    right_label_prob: float
    private_calls: int
    calibrated: bool = False

    @property
    def rank(self) -> tuple[float, int, int]:
        """Sort key, best first: right labels to half a point, then fewer calls, then the order of mechanisms."""
        place = MECHANISMS.index(self.plan.release.mechanism.name)
        return -round(self.right_label_prob / _AS_GOOD), self.private_calls, place

    def to_dict(self) -> dict[str, Any]:
        """Returns the option's public numbers."""
        return {
            "mechanism": self.plan.release.mechanism.name,
            **dataclasses.asdict(self.plan.design),
            "calibrated": self.calibrated,
            "noise_multiplier": round_up_at(self.plan.noise_multiplier),
            "row_right": round(self.row_right, 4),
            "right_label_prob": round(self.right_label_prob, 4),
            "private_calls": self.private_calls,
        }


_AS_GOOD = 0.005
"""Chances of the right label that are taken as equal: the one with fewer calls goes first."""
_SLOTS, _UNITS, _FILL = (10, 20, 40), (20, 40), 1.5


def compare_queries(
    public_size: int,
    *,
    epsilon: float,
    delta: float,
    max_queries: int,
    labels: int,
    adjacency: Adjacency = "add_remove",
    aggregation: VoteSum | ProbabilitySum | None = None,
    mechanisms: Sequence[str] = ("gaussian", *MECHANISMS),
    base: RowDesign | None = None,
    abstain_below: float | None = None,
    source: RowSource | None = None,
    readings: Mapping[bool, int] | None = None,
    wordings: int = 1,
) -> list[QueryOption]:
    """Returns designs at equal epsilon, best first (see `QueryOption.rank`).

    Compares 20 and 40 unit rows, and 10, 20 and 40 slots of 2, 4 and 8 records with two fills, with the first
    mechanism; then the other mechanisms on the best shape. Shapes with more records than declared units are omitted.

    Args:
      public_size: declared number of units.
      epsilon: the share.
      delta: its delta.
      max_queries: answers that the share pays for.
      labels: labels an answer can have.
      adjacency: neighbouring relation.
      aggregation: how rows add up; `VoteSum()` by default.
      mechanisms: names, at least one; shapes are compared with the first.
      base: a further shape to compare.
      abstain_below: share of the expected rows that an answer needs: a threshold of a noisy vector, the constant score
        of a further candidate otherwise; None: none.
      source: where the numbers of rows come from; None: the usual guess.
      readings: calls per row by whether rows are calibrated; None: as they are, for one call.
      wordings: public wordings that slots read in turn; several leave unit rows out.
    """
    check_int("labels", labels, low=2)
    check_int("public_size", public_size, low=1)
    if not mechanisms or not set(mechanisms) <= set(MECHANISMS):
        raise fail("mechanisms", f"at least one of {MECHANISMS}", mechanisms)
    rests, reads = source or RowGuess(), readings or {False: 1}
    if base is not None:
        base.check_wordings(wordings)

    def option(key: tuple[str, RowDesign]) -> QueryOption:
        mechanism, design = key
        rejects = rejection(abstain_below, design, public_size=public_size, mechanism=mechanism)
        plan = plan_queries(
            public_size,
            epsilon=epsilon,
            delta=delta,
            max_queries=max_queries,
            width=labels + len(rejects["constants"]),
            adjacency=adjacency,
            aggregation=aggregation,
            mechanism=mechanism,
            design=design,
            constants=rejects["constants"],
            is_rough=True,
        )
        options = (_option(plan, rests, calibrated, calls, rejects["threshold"]) for calibrated, calls in reads.items())
        return min(options, key=lambda one: one.rank)

    first, *others = dict.fromkeys(mechanisms)
    every = [*([] if base is None else [base]), *candidate_shapes(public_size)]
    shapes = dict.fromkeys(shape for shape in every if shape.takes_wordings(wordings))
    # Mechanisms are compared on one shape only: every option costs a calibration.
    return search_designs(
        option,
        lambda _: ((first, shape) for shape in shapes),
        lambda best: ((name, best[0].plan.design) for name in others) if best else (),
    )


def rejection(
    abstain_below: float | None, design: RowDesign, *, public_size: int, mechanism: Mechanism | str
) -> dict[str, Any]:
    """Returns what rejects answers with too few votes: a plan's `constants`, and the `threshold` of a released vector.

    A released vector is compared with the threshold; a released index has one more candidate, to abstain.
    """
    if abstain_below is None:
        return {"constants": (), "threshold": None}
    check_real("abstain_below", abstain_below, low=0.0, high=1.0, low_open=True)
    kind = mechanism_by_name(mechanism) if isinstance(mechanism, str) else type(mechanism)
    if kind is ConfidentGNMaxMechanism:
        raise fail("abstain_below", "None with confident_gnmax, which has a threshold of its own", abstain_below)
    votes = abstain_below * expected_rows(design, public_size)
    if kind.releases == "vector":
        return {"constants": (), "threshold": votes}
    return {"constants": (votes,), "threshold": None}


def _option(plan: QueryPlan, source: RowSource, calibrated: bool, calls: int, threshold: float | None) -> QueryOption:
    size = plan.public_size
    labels = plan.width - len(plan.release.constants)
    facts = mean_facts(source, labels=labels, law=shot_law(plan.release, size), calibrated=calibrated)
    right = right_chance(plan.release, size, facts=facts, threshold=threshold)
    return QueryOption(plan, facts.right, right, plan.cost(calls_per_row=calls).private_calls, calibrated)


def candidate_shapes(public_size: int) -> Iterator[RowDesign]:
    """Yields the shapes that are compared, as far as there are enough units; at least one."""
    for units in _UNITS:
        if units <= public_size:
            yield RowDesign.choose(rows="units", num_slots=units)
    for slots, shots, fill in itertools.product(_SLOTS, _SHOTS, (None, _FILL)):
        shape = RowDesign.choose(rows="slots", num_slots=slots, shots_per_slot=shots, overfill=fill)
        is_new = fill is None or fill != RowDesign.choose(rows="slots", shots_per_slot=shots).overfill
        if is_new and slots * shots * shape.overfill <= public_size:
            yield shape
    if public_size < min(_UNITS):
        yield declared_design(RowHint(), public_size)


def declared_design(hint: RowHint, public_size: int) -> RowDesign:
    """Returns the shape of rows that an engine declares, with fewer records where there are not as many units."""
    slots = min(hint.slots, public_size)
    shots = max(1, min(hint.shots, public_size // slots))
    return RowDesign.choose(rows="slots", num_slots=slots, shots_per_slot=shots)


def mechanism_or_usual(mechanism: Mechanism | str | None, design: RowDesign) -> Mechanism:
    """Returns a mechanism, made of its name if that is given."""
    name = mechanism_for(design) if mechanism is None else mechanism
    return mechanism_by_name(name)(noise_multiplier=1.0) if isinstance(name, str) else name


def mechanism_for(design: RowDesign) -> NoiseName:
    """Returns the mechanism where none was asked for: Gaussian noise in slots, Gumbel noise on unit rows."""
    return "gaussian" if design.rows == "slots" else "gumbel"


def expected_rows(design: RowDesign, public_size: int) -> float:
    """Returns the public number of rows of one answer: the slots, or the expected number of unit rows."""
    sampler = design.sampler(public_size)
    return public_size * sampler.sampling_rate if sampler.num_rows is None else float(sampler.num_rows)
