"""Chooses rows and noise from a rehearsal, and says at several epsilons whether private votes beat what is free."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.random import PCG64, Generator
from numpy.typing import NDArray

from langchain_dpicl._calls import warn_caller
from langchain_dpicl.backends.base import RowHint, row_hint_of
from langchain_dpicl.exceptions import NoisyPlanWarning, RestsOnGuessWarning
from langchain_dpicl.options import NoiseName, Rows, html_table
from langchain_dpicl.planning.expected_utility import RowDesign, ranges, right_chances, rough_ceiling, shot_law
from langchain_dpicl.planning.row_law import RowFacts, RowGuess, RowSource, mean_facts
from langchain_dpicl.privacy._validate import Adjacency, check_int, check_real, fail
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.rehearsal.rehearsal import WIDER, Rehearsal, chance_interval, extremes
from langchain_dpicl.runs.query_plan import (
    QueryPlan,
    RowsPlan,
    candidate_shapes,
    declared_design,
    design_of_queries,
    expected_rows,
    mechanism_for,
    plan_queries,
)
from langchain_dpicl.runs.release_run import new_bar, tick
from langchain_dpicl.tasks import VotingTask, wording_digest

Verdict: TypeAlias = Literal["beats what is free", "perhaps better than what is free", "no better than what is free"]

Floats = NDArray[np.float64]
Weights: TypeAlias = Floats | None
"""How often each question counts; None: once."""

FREE_ROWS = 40
"""Rows of free votes: as many as the largest private design has."""
WORTH = 0.02
"""Gain over what is free from which on private votes are worth their epsilon."""
_SPLITS, _SEED = 3, 20_230_928
_SURE = 1.28
"""Deviations of a one-sided 90 % bound."""


@dataclass(frozen=True, slots=True)
class FreeRival:
    """An answer that costs no privacy.

    Attributes:
      name: what answers.
      shots: public examples of a row; 0: none.
      calibrated: whether rows are divided by those on content-free inputs.
      right: chance of the right label. It is the best of several on the questions that it was measured on: of questions
        that were not asked expect a few points less.
      label: the one that is always answered; None: the model is asked.
    """

    name: str
    shots: int
    calibrated: bool
    right: float
    label: str | None = None


@dataclass(frozen=True, slots=True)
class Proposal:
    """The best rows and noise for private votes, beside the best that is free.

    Attributes:
      plan: the plan of the votes; its noise is up to a few percent higher than a component's.
      calibrated: whether rows are divided by those on content-free inputs.
      row_right: share of rows that are right.
      right: expected chance of the right label: chosen on one half of the questions, predicted on the other.
      low: lower end of its 90 % interval.
      high: upper end of its 90 % interval.
      at_most: chance of the right label with any number of such rows and no noise.
      free: the best that is free.
      gain: expected gain over it, predicted as `right` is, and at most `right - free.right`.
      gain_low: lower end of its 80 % interval.
      verdict: what follows.
      rests_on: what all of it rests on.
      calls_per_row: more than 1 where rows are calibrated.
    """

    plan: QueryPlan
    calibrated: bool
    row_right: float
    right: float
    low: float
    high: float
    at_most: float
    free: FreeRival
    gain: float
    gain_low: float
    verdict: Verdict
    rests_on: str
    calls_per_row: int = 1

    @property
    def spends(self) -> bool:
        """Whether private votes are recommended: they are likely to beat what is free on other questions too."""
        return self.verdict == "beats what is free"

    @property
    def design(self) -> RowDesign:
        """The shape of rows."""
        return self.plan.design

    @property
    def private_calls(self) -> int:
        """Private model calls of one query, calibration included."""
        return round(self.plan.expected_rows) * self.calls_per_row

    def to_dict(self) -> dict[str, Any]:
        """Returns the public numbers as JSON values."""
        design = self.design
        return {
            "epsilon": self.plan.epsilon,
            "max_queries": self.plan.max_queries,
            "rows": design.rows,
            "num_slots": design.num_slots,
            "shots_per_slot": design.shots_per_slot,
            "overfill": design.overfill,
            "mechanism": self.plan.release.mechanism.name,
            "calibrated": self.calibrated,
            "row_right": self.row_right,
            "right_label_prob": self.right,
            "right_label_low": self.low,
            "right_label_high": self.high,
            "ceiling_prob": self.at_most,
            "free": dataclasses.asdict(self.free),
            "gain": self.gain,
            "gain_low": self.gain_low,
            "verdict": self.verdict,
            "rests_on": self.rests_on,
            "private_calls": self.private_calls,
        }

    def _repr_html_(self) -> str:
        return html_table("Proposal", self.to_dict())


def propose_rows(
    rehearsal: Rehearsal,
    public_size: int,
    *,
    epsilon: float,
    delta: float,
    max_queries: int,
    adjacency: Adjacency = "add_remove",
    mechanism: NoiseName | None = None,
    calibrate: bool | None = None,
    max_calls: int | None = None,
    wordings: int = 1,
    free: Sequence[FreeRival] = (),
) -> Proposal:
    """Chooses rows and noise for votes from a rehearsal.

    The best of many plans looks better than it is, because chance takes part in the choice. So the plan is chosen on
    all questions, and its chance is predicted by choosing on one half of them and predicting with the other half.

    Args:
      rehearsal: what the model did with public examples.
      public_size: declared number of units.
      epsilon: the share.
      delta: its delta.
      max_queries: answers that the share pays for.
      adjacency: neighbouring relation.
      mechanism: of all designs; None: Gaussian in slots, Gumbel on unit rows.
      calibrate: how rows are read; None: as the rehearsal speaks for.
      max_calls: most private calls of one query.
      wordings: public wordings that slots read in turn; several leave unit rows out.
      free: further answers that cost no privacy, with their chances on the questions of the rehearsal.

    Raises:
      ConfigurationError: a number out of range, no design within `max_calls`, or rows were not read that way.
    """
    reads = [read for read in rehearsal.readings if calibrate is None or read == calibrate]
    if not reads:
        raise fail("calibrate", f"one of {list(rehearsal.readings)}, as rows were rehearsed", calibrate)
    plans = _plans(
        public_size,
        epsilon=epsilon,
        delta=delta,
        max_queries=max_queries,
        adjacency=adjacency,
        mechanism=mechanism,
        width=len(rehearsal.labels),
        wordings=wordings,
        most=None if max_calls is None else check_int("max_calls", max_calls, low=1),
    )
    if not plans and max_calls is None:
        raise fail("FewShotTask.wordings", "at most as many as there are slots", wordings, "Give fewer wordings.")
    calls = {False: 1, True: 1 + len(rehearsal.content_free)}
    options = [_Option(plan, read, calls[read]) for plan in plans for read in reads]
    options = [option for option in options if max_calls is None or option.calls <= max_calls]
    if not options:
        raise fail("max_calls", "at least the rows of the smallest design", max_calls)
    search = _Search(rehearsal, options, tuple(free))
    chosen, rival = options[search.best(_ALL)], search.rivals[search.best_free(_ALL)][0]
    right, gain = search.cross_fitted()
    # A rival that is chosen with half of the questions is a poor one; the best with all of them has to be beaten too.
    gain = min(gain, right - rival.right)
    facts = mean_facts(rehearsal, labels=len(rehearsal.labels), law=chosen.law, calibrated=chosen.calibrated)
    asked = [*extremes(facts), *rehearsal.resampled(chosen.law, chosen.calibrated)]
    (least, most), rights = np.split(chosen.rights(asked), [2])
    ends = float(least), float(most)
    low, high = chance_interval(right, rights, *ends, questions=len(rehearsal.gold), shift=rehearsal.shift)
    gain_low = gain - _margin(rehearsal, rights, rival)
    return Proposal(
        plan=chosen.plan,
        calibrated=chosen.calibrated,
        row_right=facts.right,
        right=right,
        low=low,
        high=high,
        at_most=max(facts.ceiling(), right),
        free=rival,
        gain=gain,
        gain_low=gain_low,
        verdict=verdict_of(gain, is_sure=gain_low > 0.0 and rehearsal.origin == "same"),
        rests_on=rehearsal.rests_on,
        calls_per_row=chosen.calls_per_row,
    )


def verdict_of(gain: float, *, is_sure: bool = False) -> Verdict:
    """Returns what a gain over what is free amounts to."""
    if gain <= WORTH:
        return "no better than what is free"
    return "beats what is free" if is_sure else "perhaps better than what is free"


def _plans(
    public_size: int, *, most: int | None, mechanism: NoiseName | None, wordings: int, **terms: Any
) -> list[QueryPlan]:
    """Returns a plan of every shape that is compared."""
    shapes = {
        shape: (mechanism_for(shape) if mechanism is None else mechanism, shape.sampler(public_size).sampling_rate)
        for shape in candidate_shapes(public_size)
        if (most is None or expected_rows(shape, public_size) <= most) and shape.takes_wordings(wordings)
    }
    made: dict[RowDesign, QueryPlan] = {}
    for noise in dict.fromkeys(name for name, _ in shapes.values()):
        known: dict[float, float] = {}
        for shape in sorted((one for one in shapes if shapes[one][0] == noise), key=lambda one: shapes[one][1]):
            rate = shapes[shape][1]
            near = known.get(rate, _next_noise(list(known.items())[-2:], rate))
            made[shape] = plan_queries(public_size, mechanism=noise, design=shape, is_rough=True, near=near, **terms)
            known[rate] = made[shape].noise_multiplier
    return [made[shape] for shape in shapes]


def _next_noise(known: Sequence[tuple[float, float]], rate: float) -> float:
    """Returns a guess of the noise multiplier at a larger sampling rate: it grows nearly along a line.

    Args:
      known: the last two smaller rates, each with its noise multiplier.
      rate: of which the noise is looked for.
    """
    if len(known) < 2:
        return math.prod(noise * math.sqrt(rate / at) for at, noise in known)
    (first, low), (second, high) = known
    # Rough noise errs by 2 %, so of two rates that are close the larger may have less.
    return high + max(high - low, 0.0) * (rate - second) / (second - first)


@dataclass(frozen=True, eq=False)
class _Option:
    plan: QueryPlan
    calibrated: bool
    calls_per_row: int

    @functools.cached_property
    def law(self) -> Sequence[tuple[int, float]]:
        return shot_law(self.plan.release, self.plan.public_size)

    @property
    def calls(self) -> float:
        return self.plan.expected_rows * self.calls_per_row

    def facts(self, rehearsal: Rehearsal, weightings: Sequence[Weights]) -> list[RowFacts]:
        return rehearsal.facts_each(self.law, calibrated=self.calibrated, weightings=weightings)

    def rights(self, facts: Sequence[RowFacts]) -> Floats:
        return right_chances(self.plan.release, self.plan.public_size, facts)


_ALL = 0
"""Place of all questions among the parts that a choice is made on; behind it stand halves, two by two."""


@dataclass(frozen=True, eq=False)
class _Search:
    """Chooses among plans, and among what is free, on all questions and on halves of them."""

    rehearsal: Rehearsal
    options: Sequence[_Option]
    further: tuple[FreeRival, ...]

    @functools.cached_property
    def parts(self) -> list[Weights]:
        return [None, *_halves(len(self.rehearsal.gold))]

    @functools.cached_property
    def rights(self) -> Floats:
        """float64[options, parts]: chances of the right label."""
        found = list[Floats]()
        # Readings of one plan differ in the numbers of their rows alone.
        for _, group in itertools.groupby(self.options, key=lambda option: id(option.plan)):
            same = list(group)
            facts = [one for option in same for one in option.facts(self.rehearsal, self.parts)]
            found.extend(same[0].rights(facts).reshape(len(same), -1))
        return np.array(found)

    @functools.cached_property
    def rivals(self) -> list[tuple[FreeRival, Floats]]:
        """What is free, each with float64[parts]: its chances of the right label."""
        further = ((rival, rights_of(self.rehearsal, rival, self.parts)) for rival in self.further)
        return [*_every_rival(self.rehearsal, self.parts), *further]

    @functools.cached_property
    def free(self) -> Floats:
        """float64[rivals, parts]: chances of the right label."""
        return np.array([rights for _, rights in self.rivals])

    def best(self, part: int) -> int:
        """Returns the place of the plan with the most right labels, to half a point, and then with the fewest calls."""
        rights: list[float] = self.rights[:, part].tolist()
        return min(range(len(rights)), key=lambda at: (-round(rights[at] / 0.005), self.options[at].calls))

    def best_free(self, part: int) -> int:
        """Returns the place of the rival with the most right labels."""
        return int(self.free[:, part].argmax())

    def cross_fitted(self) -> tuple[float, float]:
        """Returns the chance of the best plan and its gain, chosen on one half and predicted with the other."""
        found = []
        for one in range(1, len(self.parts)):
            other = one + 1 if one % 2 else one - 1
            right = self.rights[self.best(one), other]
            found.append((right, right - self.free[self.best_free(one), other]))
        means = np.mean(found, axis=0)
        return float(means[0]), float(means[1])


_REHEARSED = ("zero-shot", "zero-shot, calibrated")
"""Names of the prompts that a rehearsal asks; of another answer it knows no single question."""


def against_free(
    rehearsal: Rehearsal, right: float, rights: Floats, *, free: Sequence[FreeRival] = ()
) -> tuple[float, Verdict]:
    """Returns the gain of a plan whose rows were given over the best that is free, and what follows.

    `rights` are the chances of the right label on each of the resamples of the rehearsal.
    """
    rival = max((best_free(rehearsal), *free), key=lambda one: one.right)
    gain = right - rival.right
    is_sure = gain > _margin(rehearsal, rights, rival) and rehearsal.origin == "same"
    return gain, verdict_of(gain, is_sure=is_sure)


def _margin(rehearsal: Rehearsal, rights: Floats, rival: FreeRival) -> float:
    """Returns how much of a gain may be chance: to the end of its one-sided 90 % interval."""
    deviation = float(np.std(rights - rights_of(rehearsal, rival, rehearsal.resamples)))
    if rival.shots == 0 and rival.label is None and rival.name not in _REHEARSED:
        # Not known question by question, so the two are not compared pair by pair: their variances are added.
        deviation = math.sqrt(deviation**2 + rival.right * (1.0 - rival.right) / len(rehearsal.gold))
    return WIDER * _SURE * deviation


def free_rivals(rehearsal: Rehearsal) -> Iterator[FreeRival]:
    """Yields what is free: always one label, the model without examples, and votes of the public examples."""
    every = [rival for rival, _ in _every_rival(rehearsal, [None])]
    yield max((rival for rival in every if rival.label is not None), key=lambda rival: rival.right)
    yield from (rival for rival in every if rival.label is None)


def _every_rival(rehearsal: Rehearsal, weightings: Sequence[Weights]) -> Iterator[tuple[FreeRival, Floats]]:
    """Yields what is free, and each label that could always be answered, with their chances on weighted questions."""
    every = list(_unmeasured(rehearsal))
    shapes = [(rival.shots, rival.calibrated) for rival in every if rival.shots]
    votes = iter(rehearsal.free_votes(shapes, rows=FREE_ROWS, weightings=weightings))
    for rival in every:
        rights = next(votes) if rival.shots else rights_of(rehearsal, rival, weightings)
        yield dataclasses.replace(rival, right=float(rights[0])), rights


def _unmeasured(rehearsal: Rehearsal) -> Iterator[FreeRival]:
    for label in rehearsal.labels:
        yield FreeRival(f"always {label!r}, the most frequent label", 0, False, 0.0, label)
    for read in rehearsal.readings:
        yield FreeRival(_REHEARSED[read], 0, read, 0.0)
        for shots in rehearsal.shots(read):
            if shots >= min(RowHint().shots, max(rehearsal.shots(read))):
                name = f"votes of {FREE_ROWS} rows of your public examples, {shots}-shot"
                yield FreeRival(f"{name}, calibrated" if read else name, shots, read, 0.0)


def rights_of(rehearsal: Rehearsal, rival: FreeRival, weightings: Sequence[Weights]) -> Floats:
    """Returns float64[len(weightings)]: the chance of a rival on weighted questions."""
    if rival.shots:
        votes = rehearsal.free_votes([(rival.shots, rival.calibrated)], rows=FREE_ROWS, weightings=weightings)
        return votes.ravel()
    if rival.name not in _REHEARSED and rival.label is None:
        return np.full(len(weightings), rival.right)
    if rival.label is None:
        return np.array([rehearsal.zero_shot(rival.calibrated, weights=weights) for weights in weightings])
    place = rehearsal.labels.index(rival.label)
    return np.array([rehearsal.label_shares(weights)[place] for weights in weightings])


def best_free(rehearsal: Rehearsal) -> FreeRival:
    """Returns the best that is free, which every verdict compares with.

    It is chosen and measured on the same questions, so that it looks better than it is: on the safe side, not to spend.
    """
    return max(free_rivals(rehearsal), key=lambda rival: rival.right)


def _halves(count: int) -> Iterator[Floats]:
    """Yields halves of the questions, each with the other half behind it."""
    rng = Generator(PCG64(_SEED))
    for _ in range(_SPLITS):
        one = np.zeros(count)
        one[rng.permutation(count)[: count // 2]] = 1.0
        yield one
        yield 1.0 - one


@dataclass(frozen=True, slots=True)
class ChosenRows:
    """The rows of a component, and what its chances rest on.

    Attributes:
      design: the shape.
      mechanism: name of the noise.
      calibrate: whether rows are divided by those on content-free inputs; None: as the engine declares.
      source: where the numbers of rows come from.
      proposal: of rows that a rehearsal chose.
    """

    design: RowDesign
    mechanism: NoiseName
    calibrate: bool | None
    source: RowSource
    proposal: Proposal | None = None

    @property
    def reported(self) -> dict[str, Any]:
        """What a component's public plan says of the rehearsal that chose its rows."""
        return {"rehearsal": self.source.summary()} if isinstance(self.source, Rehearsal) else {}

    def check(self, task: VotingTask, reading: Mapping[str, str], plan: RowsPlan) -> None:
        """Refuses a rehearsal of another task or model; warns of a guess, of noise, and of what is free and as good."""
        if isinstance(self.source, Rehearsal):
            self.source.check_fits(
                labels=task.labels,
                wording=wording_digest(task),
                model=reading["model"],
                reads=reading["reads"],
                content_free=task.content_free,
            )
        else:
            warn_caller(RestsOnGuessWarning(GUESSED))
        readings = getattr(self.source, "readings", (False,))
        calibrated = bool(self.calibrate) if self.calibrate in readings else readings[0]
        taken = plan.noise_takes(self.source, labels=len(task.labels), calibrated=calibrated)
        if taken > _TOO_MUCH_NOISE:
            said = TOO_NOISY.format(points=100 * taken, rests=self.source.rests_on)
            spends = self.proposal is not None and self.proposal.spends  # a verdict alone says whether to spend
            warn_caller(NoisyPlanWarning(said if spends else f"Do not spend like this: {said}"))
        elif self.proposal is not None and self.proposal.verdict == "no better than what is free":
            warn_caller(NoisyPlanWarning(AS_GOOD.format(self.proposal)))


GUESSED = (
    "What this component's answers are worth rests on a guess about the model. rehearse(llm, public_examples), or "
    "`dpicl rehearse FILE`, measures it for nothing; give the result as rows=, --rehearsal or guess.rehearsal."
)
_TOO_MUCH_NOISE = 0.07
"""Chance of the right label that noise may take before a component warns; a plan advises against less."""
TOO_NOISY = (
    "noise takes {points:.0f} points of the chance of a right label, by {rests}. Ask fewer questions, use more "
    "records, or raise epsilon; `dpicl plan` compares designs."
)


AS_GOOD = (
    "Do not spend like this: {0.right:.0%} right labels are no better than what is free, {0.free.right:.0%} by "
    "{0.free.name}, by {0.rests_on}. `dpicl try` compares the two."
)


def chosen_rows(
    rows: Rows | Rehearsal | None,
    public_size: int,
    *,
    engine: object,
    mechanism: NoiseName | None,
    calibrate: bool | None,
    epsilon: float | None,
    wordings: int = 1,
    **terms: Any,
) -> ChosenRows:
    """Returns the rows that a caller asks for, those that a rehearsal speaks for, or those that the engine declares.

    Args:
      rows: the caller's option.
      public_size: declared number of units.
      engine: may declare a shape.
      mechanism: of the noise; None: the usual one of the shape.
      calibrate: the caller's option.
      epsilon: the share; None, where noise is given instead, takes the declared shape.
      wordings: public wordings that slots read in turn.
      terms: delta, adjacency and max_queries, as of `propose_rows`.
    """
    usual = declared_design(row_hint_of(engine), public_size)
    if isinstance(rows, Rehearsal):
        if epsilon is None:
            return ChosenRows(usual, mechanism or mechanism_for(usual), calibrate, rows)
        best = propose_rows(
            rows,
            public_size,
            epsilon=epsilon,
            mechanism=mechanism,
            calibrate=calibrate,
            wordings=wordings,
            **terms,
        )
        name: Any = best.plan.release.mechanism.name
        return ChosenRows(best.design, name, best.calibrated, rows, best)
    shape = design_of_queries(rows, public_size, usual=usual) or usual
    return ChosenRows(shape, mechanism or mechanism_for(shape), calibrate, RowGuess())


EPSILONS = (1.0, 2.0, 4.0, 8.0)
_MOST_OF = 0.5
"""Share of the largest gain that the recommended epsilon brings."""


@dataclass(frozen=True, slots=True)
class TriedOption:
    """A private component at one epsilon.

    Attributes:
      component: "votes" of queries, "labels" of public inputs, or another one.
      epsilon: the share.
      counted: what the share pays for, in words.
      right: expected chance of the right label.
      low: lower end of its range.
      high: upper end of its range.
      at_most: upper end of the range of that chance with any number of such rows and no noise.
      gain: over the best that is free.
      verdict: what follows.
      design: rows and noise, in words.
      calls: model calls of all releases.
      money: what they cost.
      settings: what to give the component: `epsilon`, and the fields of its options.
    """

    component: str
    epsilon: float
    counted: str
    right: float
    low: float
    high: float
    at_most: float
    gain: float
    verdict: Verdict
    design: str
    calls: int
    money: float
    settings: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The option in words."""
        return f"private {self.component}, epsilon {self.epsilon:g}, {self.counted}"

    @property
    def span(self) -> str:
        """The range of the chance, in percent."""
        return f"{100 * self.low:.0f} to {100 * self.high:.0f}"

    def to_dict(self) -> dict[str, Any]:
        """Returns the public numbers as JSON values."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


@dataclass(frozen=True, slots=True)
class Trial:
    """What is free beside what is private, and one recommendation. `try_components` makes it.

    Formal guarantees:
      - A function of a rehearsal and public numbers: nothing private was read, and epsilon is 0.

    Attributes:
      rests_on: what all chances rest on.
      num_labels: labels that an answer can have.
      public_size: declared units.
      delta: of each share.
      free: what costs no privacy.
      options: what does.
      is_same: whether the examples are of the records' domain.
    """

    rests_on: str
    num_labels: int
    public_size: int
    delta: float
    free: tuple[FreeRival, ...]
    options: tuple[TriedOption, ...]
    is_same: bool = True

    @property
    def best_free(self) -> FreeRival:
        """The best that is free."""
        return max(self.free, key=lambda rival: rival.right)

    @property
    def recommended(self) -> TriedOption | None:
        """The least epsilon that brings at least half of the largest sure gain; None: do not spend."""
        return _thriftiest([one for one in self.options if one.verdict == "beats what is free"])

    @property
    def advice(self) -> str:
        """The recommendation in one line."""
        best, free = self.recommended, self.best_free
        if best is not None:
            private = f"private {best.component} at epsilon {best.epsilon:g}: {_percent(best.right)} ({best.span})"
            return f"{private}, {best.verdict} ({_percent(free.right)}, {free.name})"
        unsure = _thriftiest([one for one in self.options if one.verdict == "perhaps better than what is free"])
        if unsure is not None:
            private = (
                f"private {unsure.component} at epsilon {unsure.epsilon:g}: {_percent(unsure.right)} ({unsure.span})"
            )
            return f"none yet: {private} is perhaps better than {_percent(free.right)} ({free.name}); {self._how}"
        if free.right <= 1.0 / self.num_labels + _BY_CHANCE:
            guessing = _percent(1.0 / self.num_labels)
            what = f"nothing tried is better than guessing among {self.num_labels} labels ({guessing})"
            return f"do not spend: {what}; another model or wording may be"
        return f"do not spend: {free.name} says {_percent(free.right)} for nothing"

    @property
    def _how(self) -> str:
        """What would make it surer."""
        if self.is_same:
            return "four times as many public examples (max_examples=, --examples) halve the range"
        return "examples of the records' own domain would make it surer"

    def to_dict(self) -> dict[str, Any]:
        """Returns the public numbers as JSON values."""
        return {
            "rests_on": self.rests_on,
            "labels": self.num_labels,
            "public_size": self.public_size,
            "delta": self.delta,
            "free": [dataclasses.asdict(rival) for rival in self.free],
            "options": [option.to_dict() for option in self.options],
            "recommended": None if self.recommended is None else self.recommended.to_dict(),
            "advice": self.advice,
        }

    def table(self) -> str:
        """Returns free and private answers as a text table, with the recommendation as its last line."""
        wide = 2 + max(map(len, [*(one.name for one in self.free), *(one.name for one in self.options)]))
        lines = [
            f"{self.rests_on}; {self.num_labels} labels, {self.public_size:,} declared units, delta {self.delta:g}",
            f"{'':<{wide}}{'right':>6}  {'range':<10}{'at most':>8}{'calls':>11}{'money':>9}",
        ]
        lines += [f"{rival.name:<{wide}}{_percent(rival.right):>6}  free, epsilon 0" for rival in self.free]
        for option in self.options:
            lines += _option_lines(option, wide)
        lines += _LEGEND
        lines.append(f"recommended: {self.advice}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        shown = {rival.name: f"{_percent(rival.right)}, free" for rival in self.free}
        for option in self.options:
            shown[option.name] = f"{_percent(option.right)} ({option.span}), {option.verdict}"
        return html_table("Trial", {"rests on": self.rests_on, **shown, "recommended": self.advice})


def _thriftiest(options: Sequence[TriedOption]) -> TriedOption | None:
    """Returns the option of the least epsilon that brings at least half of the largest gain."""
    most = max((one.gain for one in options), default=0.0)
    enough = (one for one in options if one.gain >= _MOST_OF * most)
    return min(enough, key=lambda one: (one.epsilon, -one.gain), default=None)


_LEGEND = (
    "right: of answers; range: nine times in ten; at most: without noise, at the upper end of its range;",
    "40 x 4: 40 votes of prompts of 4 records, fill: records drawn for each place of a prompt;",
    "what is free is the best of several on these questions: on others expect a few points less",
)
_BY_CHANCE = 0.05
"""Above guessing by no more than this, what is free tells nothing."""


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _option_lines(option: TriedOption, wide: int) -> Iterator[str]:
    money = f"{option.money:,.2f}" if option.money else "-"  # without a price, 0.00 would read as free
    yield (
        f"{option.name:<{wide}}{_percent(option.right):>6}  {option.span:<10}{_percent(option.at_most):>8}"
        f"{option.calls:>11,}{money:>9}"
    )
    yield f"  {option.verdict}; {option.design}"


def try_components(
    rehearsal: Rehearsal,
    public_size: int,
    *,
    delta: float,
    max_queries: int = 100,
    public_inputs: int | None = None,
    epsilons: Sequence[float] = EPSILONS,
    adjacency: Adjacency = "add_remove",
    free: Iterable[FreeRival] = (),
    private: Iterable[TriedOption] = (),
    max_calls: int | None = None,
    wordings: int = 1,
    price_in: float = 0.0,
    price_out: float = 0.0,
    record_tokens: int = 60,
    query_tokens: int = 60,
    answer_tokens: int = 1,
    progress: bool | None = False,
) -> Trial:
    """Compares what is free with private votes and labels at several epsilons, before anything is spent.

    Args:
      rehearsal: what the model did with public examples; see `rehearse`.
      public_size: declared number of units.
      delta: of each share.
      max_queries: answers that private votes pay for.
      public_inputs: inputs that PromptPATE labels; None: labels are left out.
      epsilons: shares to compare.
      adjacency: neighbouring relation.
      free: further answers that cost no privacy, with their chances.
      private: further components, with theirs.
      max_calls: most private calls of one query.
      wordings: as of `propose_rows`.
      price_in: per million prompt tokens.
      price_out: per million answer tokens.
      record_tokens: cap of a record.
      query_tokens: cap of a query.
      answer_tokens: cap of an answer.
      progress: True shows a bar, False hides it, None shows it on a terminal only.

    Raises:
      ConfigurationError: a number is out of range, or a delta that a ledger would refuse.
    """
    if not epsilons:
        raise fail("epsilons", "at least one", tuple(epsilons))
    check_int("max_queries", max_queries, low=1)
    PrivateExamples([], public_size=public_size).check_delta(delta)
    prices = [check_real(name, price, low=0.0) for name, price in (("price_in", price_in), ("price_out", price_out))]
    caps = {"record_tokens": record_tokens, "query_tokens": query_tokens, "answer_tokens": answer_tokens}
    also = tuple(free)
    counts = [("votes", max_queries, "queries")]
    if public_inputs is not None:
        counts.append(("labels", check_int("public_inputs", public_inputs, low=1), "public inputs"))

    def option(component: str, count: int, what: str, epsilon: float) -> TriedOption:
        found = propose_rows(
            rehearsal,
            public_size,
            epsilon=epsilon,
            delta=delta,
            max_queries=count,
            adjacency=adjacency,
            max_calls=max_calls,
            wordings=wordings,
            free=also,
        )
        calls = 1 + len(rehearsal.content_free) if found.calibrated else 1
        cost = found.plan.cost(**caps, calls_per_row=calls)
        return TriedOption(
            component=component,
            epsilon=epsilon,
            counted=f"{count:,} {what}",
            right=found.right,
            low=found.low,
            high=found.high,
            at_most=_most(rehearsal, found),
            gain=found.gain,
            verdict=found.verdict,
            design=_in_words(found),
            calls=cost.private_calls + cost.public_calls,
            money=cost.money(price_in=prices[0], price_out=prices[1]),
            settings=_settings(found, epsilon, is_labels=component == "labels"),
        )

    rivals = list(free_rivals(rehearsal))
    best_votes = max((rival for rival in rivals if rival.shots), key=lambda rival: rival.right)
    plans: list[TriedOption] = []
    asked = [(*what, epsilon) for what in counts for epsilon in epsilons]
    with new_bar(len(asked), "plan", "plans", progress=progress) as bar:
        for terms in asked:
            plans.append(option(*terms))
            tick(bar)
    return Trial(
        rests_on=rehearsal.rests_on,
        num_labels=len(rehearsal.labels),
        public_size=public_size,
        delta=delta,
        free=(*(rival for rival in rivals if not rival.shots), *also, best_votes),
        options=(*plans, *private),
        is_same=rehearsal.origin == "same",
    )


def _most(rehearsal: Rehearsal, found: Proposal) -> float:
    law = shot_law(found.plan.release, found.plan.public_size)
    ends = rehearsal.interval(rough_ceiling, labels=len(rehearsal.labels), law=law, calibrated=found.calibrated)
    return ranges(found.right, found.low, found.high, ceiling=found.at_most, most=ends)["ceiling_high"]


def _in_words(found: Proposal) -> str:
    design, noise = found.design, found.plan.release.mechanism.name
    reading = ", calibrated" if found.calibrated else ""
    if design.rows == "units":
        return f"{design.num_slots} units, {noise}{reading}"
    return f"{design.num_slots} x {design.shots_per_slot}, fill {design.overfill:g}, {noise}{reading}"


def _settings(found: Proposal, epsilon: float, *, is_labels: bool) -> dict[str, Any]:
    # The chances are those without a threshold, which labels have unless it is taken away.
    answers = {"calibrate": found.calibrated, **({"abstain_below": "never"} if is_labels else {})}
    return {
        "epsilon": epsilon,
        "max_queries": found.plan.max_queries,
        "noise": found.plan.release.mechanism.name,
        "rows": found.design.option(),
        "answers": answers,
    }
