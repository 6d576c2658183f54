"""Plans labels for public inputs (noise, price, cost), and compares plans at equal epsilon."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from langchain_dpicl.backends.base import RowHint
from langchain_dpicl.options import Rows
from langchain_dpicl.planning.expected_utility import (
    ROUGH_DRAWS,
    RowDesign,
    search_designs,
    shot_law,
    vote_chances,
)
from langchain_dpicl.planning.row_law import RowGuess, RowSource, mean_facts
from langchain_dpicl.planning.share_plan import Cost, with_noise_for, with_price
from langchain_dpicl.privacy._validate import (
    Adjacency,
    check_adjacency,
    check_choice,
    check_int,
    check_name,
    check_positive,
    check_positive_delta,
    check_real,
    fail,
    round_up_at,
)
from langchain_dpicl.privacy.accounting.epsilon import MAX_COUNT
from langchain_dpicl.privacy.extensions.confident_gnmax import ConfidentGNMaxMechanism
from langchain_dpicl.privacy.extensions.registry import (
    MECHANISMS,
    TEACHERS,
    Teachers,
    label_tickets,
)
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.privacy.mechanisms.bounded import LARGEST, Aggregation, VoteSum
from langchain_dpicl.privacy.mechanisms.release_plan import Mechanism, ReleasePlan
from langchain_dpicl.runs.query_plan import (
    RowsPlan,
    check_design,
    declared_design,
    expected_votes,
    mechanism_or_usual,
    rejection,
    shown_terms,
)

_STEPS = 100


@dataclass(frozen=True, slots=True)
class LabellingPlan(RowsPlan):
    """Everything public about labels for `max_queries` public inputs: what will run, what it is charged and will cost.

    Formal guarantees:
      - `teachers="fresh"`: `max_queries` tickets of `release.block_event(1)`, a fresh secret sample for each input.
      - `teachers="one_sample"`: one ticket of `release.block_event(max_queries, max_answers)`: all labels come from one
        secret sample, composed inside and amplified once.
      - `teachers="fixed"`: `max_queries` tickets of one release without amplification; with Confident-GNMax instead
        `max_queries` tickets of a test and `max_answers` of an answer.
      - All tickets together are (epsilon, delta)-DP under `release.adjacency`, the declared gap of the noise included.

    Attributes:
      teachers: "fresh", "one_sample" or "fixed".
      max_answers: labels that the share pays for if tests are charged separately; None: one per input.
      threshold: votes below which the largest noisy vote is rejected: post-processing of a released histogram, so
        Gaussian noise only, and free; None: nothing is rejected.
    """

    method: ClassVar[str] = "labels"

    teachers: Teachers = "fresh"
    max_answers: int | None = None
    threshold: float | None = None

    def tickets(self) -> tuple[Ticket, ...]:
        """Returns the tickets of the share; unburnt ones can be handed back."""
        return label_tickets(
            self.release, teachers=self.teachers, max_queries=self.max_queries, max_answers=self.max_answers
        )

    def cost(
        self,
        *,
        record_tokens: int = 60,
        query_tokens: int = 60,
        answer_tokens: int = 1,
        calls_per_row: int = 1,
        public_rows: int = 1,
        student_calls: int = 0,
        student_shots: int = 1,
    ) -> Cost:
        """Returns model calls and tokens over all inputs, from public caps (no discount for caches)."""
        check_int("student_calls", student_calls, low=0)
        check_int("student_shots", student_shots, low=1)
        teachers = RowsPlan.cost(
            self,
            record_tokens=record_tokens,
            query_tokens=query_tokens,
            answer_tokens=answer_tokens,
            calls_per_row=calls_per_row,
            public_rows=public_rows,
        )
        return Cost(
            teachers.private_calls,
            teachers.public_calls + student_calls,
            teachers.tokens_in + student_calls * (student_shots * record_tokens + query_tokens),
            teachers.tokens_out + student_calls * answer_tokens,
        )

    def expected(
        self,
        source: RowSource | None = None,
        *,
        calibrated: bool = False,
        labels: int | None = None,
        abstain_below: float | None = None,
    ) -> dict[str, Any]:
        """Computes `RowsPlan.expected`; a rejected input counts as an abstention, by the plan's own threshold."""
        if abstain_below is not None:
            raise fail("abstain_below", "None: the plan has a threshold, or a constant", abstain_below)
        return expected_votes(self, source, calibrated=calibrated, labels=labels, threshold=self.threshold)

    def right_rows_needed(
        self,
        chance: float = 0.95,
        *,
        source: RowSource | None = None,
        calibrated: bool = False,
        labels: int | None = None,
    ) -> float | None:
        """Returns the least share of right rows at which the right label is released with probability `chance`.

        Rows are taken to be as alike as `source` says. None: no share below one hundred percent is enough.

        Formal guarantees:
          - The result is a multiple of .01; .01 less does not reach `chance`.

        Args:
          chance: wanted probability.
          source: says how alike rows are; None: the usual guess.
          calibrated: whether rows are divided by those on content-free inputs.
          labels: labels that an answer can have; None: all candidates but the constants, "other" of text votes too.
        """
        check_real("chance", chance, low=0.0, high=1.0, low_open=True)
        names = labels or self.width - len(self.release.constants)
        law = shot_law(self.release, self.public_size)
        alike = mean_facts(source or RowGuess(), labels=names, law=law, calibrated=calibrated)

        def is_reached(step: int, draws: int | None = None) -> bool:
            facts = dataclasses.replace(alike, right=step / _STEPS)
            found = vote_chances(self.release, self.public_size, facts=facts, threshold=self.threshold, draws=draws)
            return found.right >= chance

        if not is_reached(_STEPS):
            return None
        # Few draws find the place; all of them correct it.
        step = bisect.bisect_left(range(_STEPS), True, key=lambda at: is_reached(at, ROUGH_DRAWS))
        while not is_reached(step):
            step += 1
        while step > 0 and is_reached(step - 1):
            step -= 1
        return step / _STEPS

    def _numbers(self) -> dict[str, Any]:
        mechanism, test, threshold = self.release.mechanism, None, self.threshold
        if isinstance(mechanism, ConfidentGNMaxMechanism):
            test, threshold = mechanism.test_noise_multiplier, mechanism.threshold
        return {
            **super(LabellingPlan, self)._numbers(),
            "teachers": self.teachers,
            "max_answers": self.max_answers,
            "threshold": threshold,
            "test_noise_multiplier": test,
            "test_noise_scale": None if test is None else test * self.release.sensitivity.require("linf"),
        }

    @classmethod
    def rebuild(cls, shown: Mapping[str, Any]) -> LabellingPlan:
        """Returns the plan of the parameters shown, see `SharePlan.rebuild`.

        Formal guarantees:
          - Where labels and the share of votes that rejects are shown beside the plan, it is the plan they make.
        """
        terms = shown_terms(shown)
        name = terms["mechanism"].name
        rejects: dict[str, Any] = {}
        if check_choice("mechanism", name, (*MECHANISMS, ConfidentGNMaxMechanism.name)) == ConfidentGNMaxMechanism.name:
            terms["noise_multiplier"] = None
        else:
            rejects["threshold"] = shown["threshold"]
        if "abstain_below" in shown:
            size, mechanism = terms["public_size"], terms["mechanism"]
            rejects = rejection(shown["abstain_below"], terms["design"], public_size=size, mechanism=mechanism)
        if isinstance(labels := shown.get("labels"), list):
            constants = rejects.get("constants", terms["constants"])
            terms["width"] = len(labels) + (shown.get("other_label") is not None) + len(constants)
        made = {"teachers": shown["teachers"], "max_answers": shown["max_answers"], **rejects}
        return plan_labelling(**{**terms, **made})


DEFAULT_FIXED_TEACHERS = 200
"""Default number of fixed teachers: one-shot prompts, as many as in the paper."""


def plan_labelling(
    public_size: int,
    *,
    epsilon: float | None,
    delta: float,
    max_queries: int,
    width: int,
    teachers: Teachers = "fresh",
    adjacency: Adjacency = "add_remove",
    aggregation: Aggregation | None = None,
    mechanism: Mechanism | str | None = None,
    noise_multiplier: float | None = None,
    max_answers: int | None = None,
    design: RowDesign | None = None,
    constants: Sequence[float] = (),
    threshold: float | None = None,
    partition: str = "private-examples",
    is_rough: bool = False,
) -> LabellingPlan:
    """Calibrates the noise of labels for `max_queries` inputs to `epsilon`, or prices a given noise.

    Arguments are as of `plan_queries`, but for these:
      - `teachers`: "fresh" draws a new secret sample for every input, "one_sample" one for all of them, "fixed" deals
        the units into slots once and keeps them (`adjacency="replace_one"` only).
      - `mechanism` may be a `ConfidentGNMaxMechanism`, whose noise is kept; `epsilon` is ignored then. With teachers
        that are drawn once, `max_answers` labels are paid for; None: one per input.
      - `design`: for fixed teachers by default a partition into 200 slots of one shot, or one per unit if there are
        fewer.
      - `threshold`: votes below which the largest noisy vote is rejected; Gaussian noise only.
    """
    check_adjacency(adjacency)
    check_positive_delta(delta)
    check_int("public_size", public_size, low=1)
    check_int("max_queries", max_queries, low=1, high=MAX_COUNT)
    check_int("width", width, low=len(constants) + 1)
    check_name("partition", partition)
    check_choice("teachers", teachers, TEACHERS)
    shape = _design(design, teachers=teachers, adjacency=adjacency, public_size=public_size)
    noise = mechanism_or_usual(mechanism, shape)
    draft = LabellingPlan(
        release=ReleasePlan(
            sampler=shape.sampler(public_size),
            aggregation=VoteSum() if aggregation is None else aggregation,
            mechanism=noise,
            adjacency=adjacency,
            redraw_every=max_queries if teachers == "one_sample" else 1,
            constants=tuple(constants),
        ),
        max_queries=max_queries,
        width=width,
        design=shape,
        public_size=public_size,
        partition=partition,
        epsilon=0.0,
        delta=delta,
        teachers=teachers,
        max_answers=_answers(max_answers, noise, teachers=teachers, max_queries=max_queries),
        threshold=_threshold(threshold, noise),
    )
    if isinstance(noise, ConfidentGNMaxMechanism):
        if noise_multiplier is not None:
            raise fail("noise_multiplier", "None: confident_gnmax has its own noise", noise_multiplier)
        return with_price(draft)
    return with_noise_for(draft, epsilon=epsilon, noise_multiplier=noise_multiplier, is_rough=is_rough)


def kind_of_teachers(rows: Rows) -> Teachers:
    """Returns how the teachers of such rows are drawn."""
    if rows.redraw_every not in {None, 1, "run"}:
        advice = "Each input gets its own sample, or all inputs one."
        raise fail("Rows.redraw_every", "None or 'run' for labels", rows.redraw_every, advice)
    if rows.sampling != "partition":
        return "one_sample" if rows.redraw_every == "run" else "fresh"
    if rows.redraw_every is not None:
        raise fail("Rows(sampling='partition')", "no redraw_every: a partition is drawn once", rows)
    return "fixed"


def default_design(teachers: Teachers, public_size: int) -> RowDesign:
    """Returns the shape of rows where none is asked for."""
    if teachers == "fixed":
        return RowDesign.choose(num_slots=min(DEFAULT_FIXED_TEACHERS, public_size), sampling="partition")
    return declared_design(RowHint(), public_size)


def _design(design: RowDesign | None, *, teachers: Teachers, adjacency: Adjacency, public_size: int) -> RowDesign:
    """Returns the shape of rows, checked against how teachers are drawn."""
    requested = design or default_design(teachers, public_size)
    if teachers != "fixed":
        shape = check_design(requested, adjacency)
        if shape.sampling in {"partition", "disjoint"}:
            expected = "'poisson' or 'fixed', or 'partition' for fixed teachers"
            raise fail("sampling", expected, shape.sampling)
        return shape
    if adjacency != "replace_one":
        advice = "Adding a unit moves others between fixed teachers. Use a new sample for each input, which also costs "
        advice += "far less, or a budget with adjacency='replace_one'."
        raise fail("adjacency", "'replace_one' with fixed teachers (sampling='partition')", adjacency, advice)
    shape = check_design(requested, adjacency)
    if shape.sampling != "partition":
        raise fail("sampling", "'partition' with teachers='fixed'", shape.sampling)
    return shape


def _answers(max_answers: int | None, mechanism: Mechanism, *, teachers: Teachers, max_queries: int) -> int | None:
    """Returns the number of answers that are charged separately from their tests; None: none is."""
    if isinstance(mechanism, ConfidentGNMaxMechanism) and teachers != "fresh":
        answers = max_queries if max_answers is None else max_answers
        return check_int("max_answers", answers, low=1, high=max_queries)
    if max_answers is not None:
        expected = "None (only confident_gnmax with teachers that are drawn once charges answers separately)"
        raise fail("max_answers", expected, max_answers)
    return None


def _threshold(threshold: float | None, mechanism: Mechanism) -> float | None:
    """Returns the threshold, which needs a mechanism that releases a noisy vector."""
    if threshold is None:
        return None
    if mechanism.releases != "vector":
        raise fail("threshold", f"None: {mechanism.name} releases no noisy vector", threshold)
    return check_real("threshold", threshold, low=-LARGEST, high=LARGEST)


_AS_GOOD = 0.005
"""Chances of the right label that are taken as equal."""
# Rows, and shots per row.
_REDRAWN = ((20, 4), (40, 1), (200, 1), (10, 4), (40, 4), (20, 8))
# Fixed teachers are not amplified: only more of them raise the signal above the noise.
_FIXED = (100, 200, 400)
# The adjacency that each way of drawing teachers is meant for and compared under.
_HONEST: dict[Teachers, Adjacency] = {"fixed": "replace_one", "one_sample": "add_remove", "fresh": "add_remove"}


class TeacherPrice(NamedTuple):
    """The price of one way of drawing teachers."""

    teachers: Teachers
    adjacency: Adjacency
    sampling_rate: float
    noise_multiplier: float
    epsilon: float
    delta: float

    def to_dict(self) -> dict[str, Any]:
        """Returns the row as JSON values."""
        return self._asdict()


def compare_teachers(
    public_size: int, *, num_teachers: int, noise: float, max_queries: int, delta: float, labels: int = 2
) -> list[TeacherPrice]:
    """Returns the price of the same noise on the same number of one-shot teachers, for each way of drawing them.

    Fixed teachers are priced under `replace_one`, because their partition is not secret; the others are unit rows under
    `add_remove`. Each input releases one histogram with Gaussian noise; its threshold and best label are free.

    Args:
      public_size: declared number of units.
      num_teachers: fixed prompts, or expected prompts of a sample.
      noise: standard deviation in votes.
      max_queries: inputs that get a label.
      delta: the delta of the bounds.
      labels: length of the histogram; it changes only the declared gap of the noise.

    Raises:
      ConfigurationError: a public parameter is out of range.

    >>> [
    ...     round(row.epsilon, 3)
    ...     for row in compare_teachers(6920, num_teachers=200, noise=20, max_queries=500, delta=1e-6)
    ... ]
    [8.306, 1.385, 0.119]
    """
    check_positive("noise", noise)
    check_int("labels", labels, low=2)
    check_int("num_teachers", num_teachers, low=1)

    def row(teachers: Teachers, adjacency: Adjacency) -> TeacherPrice:
        is_fixed = teachers == "fixed"
        design = RowDesign.choose(num_slots=num_teachers, sampling="partition" if is_fixed else "poisson")
        votes = VoteSum().sensitivity(row_shape=design.rows, adjacency=adjacency).require("l2")
        plan = plan_labelling(
            public_size,
            epsilon=None,
            noise_multiplier=noise / votes,
            delta=delta,
            max_queries=max_queries,
            width=labels,
            teachers=teachers,
            adjacency=adjacency,
            mechanism="gaussian",
            design=design,
        )
        rate = plan.release.sampler.sampling_rate
        return TeacherPrice(teachers, adjacency, rate, plan.noise_multiplier, plan.epsilon, delta)

    return [row(teachers, adjacency) for teachers, adjacency in _HONEST.items()]


# -- proposals ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LabellingOption:
    """One plan of labels at the requested epsilon.

    Attributes:
      plan: the plan; its noise is up to a few percent higher than that of `plan_labelling`.
      row_right: chance that a row of this shape votes for the right label.
      right_label_prob: expected chance that an input gets the right label.
      ceiling_prob: the same with any number of such rows and no noise.
      chance: the requested chance.
      calibrated: whether rows are read as they are, or divided by those on content-free inputs.
      calls_per_row: model calls of a row that is read so.
      private_calls: expected private model calls of all inputs.
    """

    plan: LabellingPlan
    row_right: float
    right_label_prob: float
    ceiling_prob: float
    chance: float
    calibrated: bool = False
    calls_per_row: int = 1
    private_calls: int = field(init=False)

    def __post_init__(self) -> None:
        calls = self.plan.cost(calls_per_row=self.calls_per_row).private_calls
        object.__setattr__(self, "private_calls", calls)

    @property
    def is_enough(self) -> bool:
        """Whether the right label is expected with the requested chance."""
        return self.right_label_prob >= self.chance

    @property
    def rank(self) -> tuple[float, ...]:
        """Sort key, best first: enough right labels, for more inputs, with fewer calls, and then more right labels.

        Options without enough right labels come last, those with more right labels first.
        """
        right, calls = -round(self.right_label_prob / _AS_GOOD), float(self.private_calls)
        place = float(MECHANISMS.index(self.plan.release.mechanism.name))
        if self.is_enough:
            return 0.0, -float(self.plan.max_queries), calls, right, place
        return 1.0, right, -float(self.plan.max_queries), calls, place

    def to_dict(self) -> dict[str, Any]:
        """Returns the option's public numbers."""
        design = self.plan.design
        return {
            "teachers": self.plan.teachers,
            "mechanism": self.plan.release.mechanism.name,
            "rows": design.rows,
            "num_slots": design.num_slots,
            "shots_per_slot": design.shots_per_slot,
            "sampling": design.sampling,
            "calibrated": self.calibrated,
            "max_queries": self.plan.max_queries,
            "noise_multiplier": round_up_at(self.plan.noise_multiplier),
            "row_right": round(self.row_right, 4),
            "right_label_prob": round(self.right_label_prob, 4),
            "ceiling_prob": round(self.ceiling_prob, 4),
            "is_enough": self.is_enough,
            "private_calls": self.private_calls,
        }


def propose_labelling(
    public_size: int,
    *,
    epsilon: float,
    delta: float,
    public_inputs: int,
    labels: int,
    adjacency: Adjacency = "add_remove",
    teachers: Sequence[Teachers] = TEACHERS,
    mechanisms: Sequence[str] = ("gaussian", *MECHANISMS),
    designs: Sequence[RowDesign] | None = None,
    max_queries: int | None = None,
    abstain_below: float | None = None,
    source: RowSource | None = None,
    readings: Mapping[bool, int] | None = None,
    chance: float = 0.95,
    wordings: int = 1,
) -> list[LabellingOption]:
    """Returns plans at equal epsilon, best first (see `LabellingOption.rank`), at least one.

    For each way of drawing teachers, compares shapes of rows with the first mechanism, then the other mechanisms on the
    best shape. An option labels as many inputs, out of all, a half, a quarter ... of them, as get the right label with
    probability `chance` at the guessed agreement; if none of these numbers does, the smallest. Shapes with more rows
    than declared units, and fixed teachers under `add_remove`, are omitted.

    Args:
      public_size: declared number of units.
      epsilon: the share.
      delta: its delta.
      public_inputs: number of inputs without labels.
      labels: labels an input can have; at least two inputs per label are tried, if there are as many.
      adjacency: neighbouring relation.
      teachers: ways of drawing teachers.
      mechanisms: names, at least one; shapes are compared with the first.
      designs: shapes of rows to compare, partitions for fixed teachers; by default 40 and 200 rows of
        one record, 10, 20 and 40 of four, 20 of eight, and 100, 200 and 400 fixed teachers.
      max_queries: how many of the inputs get a label; None: as many as possible, see above.
      abstain_below: share of the expected rows below which an input is rejected; None: none is rejected.
      source: where the numbers of rows come from; None: the usual guess.
      readings: calls per row by whether rows are calibrated, of which each option takes the better; None: as they are,
        for one call.
      chance: wanted probability that an input gets the right label.
      wordings: public wordings that slots read in turn; several leave unit rows out.

    Raises:
      ConfigurationError: a public parameter is out of range, or nothing is left to compare.
    """
    check_int("public_size", public_size, low=1)
    check_int("public_inputs", public_inputs, low=1)
    check_int("labels", labels, low=2)
    check_real("chance", chance, low=0.0, high=1.0, low_open=True)
    if not mechanisms or not teachers:
        raise fail("mechanisms, teachers", "at least one of each", (tuple(mechanisms), tuple(teachers)))
    rests, reads = source or RowGuess(), readings or {False: 1}
    search = _TeacherSearch(public_size, epsilon, delta, labels, adjacency, abstain_below, rests, reads, chance)
    counts = _halves(public_inputs, least=2 * labels)
    if max_queries is not None:
        counts = [check_int("max_queries", max_queries, low=1, high=public_inputs)]
    names = [check_choice("mechanism", name, MECHANISMS) for name in dict.fromkeys(mechanisms)]
    options: list[LabellingOption] = []
    for way in dict.fromkeys(teachers):
        check_choice("teachers", way, TEACHERS)
        if way == "fixed" and adjacency != "replace_one":
            continue
        shapes = _shapes(way, public_size) if designs is None else _deal_designs(way, designs)
        options += search.options(way, names, (one for one in shapes if one.takes_wordings(wordings)), counts)
    if not options:
        advice = "Fixed teachers need adjacency='replace_one'."
        raise fail("teachers", "one that these terms allow", tuple(teachers), advice)
    return sorted(options, key=lambda one: one.rank)


class _TeacherSearch(NamedTuple):
    """The parameters that all options share."""

    public_size: int
    epsilon: float
    delta: float
    labels: int
    adjacency: Adjacency
    abstain_below: float | None
    source: RowSource
    readings: Mapping[bool, int]
    chance: float

    def options(
        self, teachers: Teachers, mechanisms: Sequence[str], shapes: Iterable[RowDesign], counts: Sequence[int]
    ) -> list[LabellingOption]:
        """Returns the shapes with the first mechanism, and the other mechanisms on the best shape."""
        first, *others = mechanisms

        def option(key: tuple[str, RowDesign]) -> LabellingOption:
            return self.option(teachers, *key, counts)

        return search_designs(
            option,
            lambda _: ((first, shape) for shape in shapes),
            lambda found: ((name, found[0].plan.design) for name in others if found),
        )

    def option(self, teachers: Teachers, mechanism: str, design: RowDesign, counts: Sequence[int]) -> LabellingOption:
        """Returns the option with the most inputs that get the right label, or with the fewest if none do.

        `counts` descend, so the chance of the right label ascends and a binary search finds the first count.
        """
        plans: dict[int, LabellingOption] = {}

        def is_enough(place: int) -> bool:
            plans[place] = self._option(self._plan(teachers, mechanism, design, counts[place]))
            return plans[place].is_enough

        place = 0
        if not is_enough(0) and len(counts) > 1:
            rest = range(1, len(counts) - 1)  # the last one is used if no other is enough
            place = 1 + bisect.bisect_left(rest, True, key=is_enough)
        if place not in plans:
            is_enough(place)
        return plans[place]

    def _option(self, plan: LabellingPlan) -> LabellingOption:
        """Returns a plan with the share of right rows, read in the better way, and the chances of an input."""
        size, law = plan.public_size, shot_law(plan.release, plan.public_size)
        found = {read: mean_facts(self.source, labels=self.labels, law=law, calibrated=read) for read in self.readings}
        read, facts = max(found.items(), key=lambda item: item[1].right)
        chances = vote_chances(plan.release, size, facts=facts, threshold=plan.threshold)
        ceiling = max(chances.ceiling, chances.right)
        return LabellingOption(plan, facts.right, chances.right, ceiling, self.chance, read, self.readings[read])

    def _plan(self, teachers: Teachers, mechanism: str, design: RowDesign, max_queries: int) -> LabellingPlan:
        rejected = rejection(self.abstain_below, design, public_size=self.public_size, mechanism=mechanism)
        return plan_labelling(
            self.public_size,
            epsilon=self.epsilon,
            delta=self.delta,
            max_queries=max_queries,
            width=self.labels + len(rejected["constants"]),
            teachers=teachers,
            adjacency=self.adjacency,
            mechanism=mechanism,
            design=design,
            is_rough=True,
            **rejected,
        )


def _halves(inputs: int, *, least: int) -> list[int]:
    """Returns the numbers of inputs to try, in descending order."""
    counts = [inputs]
    while counts[-1] // 2 >= least:
        counts.append(counts[-1] // 2)
    return counts


def _deal_designs(teachers: Teachers, designs: Sequence[RowDesign]) -> Iterator[RowDesign]:
    """Yields the shapes, as partitions if teachers are fixed."""
    for shape in designs:
        is_fixed = teachers == "fixed"
        partition = {"num_slots": shape.num_slots, "shots_per_slot": shape.shots_per_slot, "sampling": "partition"}
        yield RowDesign.choose(**partition) if is_fixed else shape  # type: ignore[arg-type]


def _shapes(teachers: Teachers, public_size: int) -> Iterator[RowDesign]:
    """Yields shapes of rows with at most one row per declared unit."""
    if teachers == "fixed":
        for slots in dict.fromkeys(min(slots, public_size) for slots in _FIXED):
            yield RowDesign.choose(num_slots=slots, sampling="partition")
        return
    for rows, shots in dict.fromkeys((min(rows, public_size), shots) for rows, shots in _REDRAWN):
        yield RowDesign.choose(num_slots=rows, shots_per_slot=shots)
