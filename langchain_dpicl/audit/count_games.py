"""Checks released counts of values, topics, words and outcomes: contribution of a unit, noise, threshold, games."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from langchain_core.language_models.llms import LLM
from langchain_core.prompts import PromptTemplate
from scipy import stats
from typing_extensions import override

from langchain_dpicl.audit.component_checks import (
    ExactTests,
    check_noise_scale,
    check_row_contribution,
    check_sampler_rate,
)
from langchain_dpicl.audit.game import (
    ALARM,
    AuditCheck,
    AuditResult,
    Game,
    GameSide,
    clopper_pearson_lower,
    result_of,
)
from langchain_dpicl.backends.fake import FakeBackend, word_copier
from langchain_dpicl.backends.private_calls.call import OpaqueValue
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.discovery import UnitCounter, ValueDiscovery, WordDiscovery
from langchain_dpicl.documents import DocumentsPlan, DocumentSynthesizer
from langchain_dpicl.evaluation.chains import Question
from langchain_dpicl.evaluation.choose import Choosing
from langchain_dpicl.evaluation.evaluate import Evaluation, silent_question
from langchain_dpicl.evaluation.evaluators import Exact
from langchain_dpicl.evaluation.plan import ChoicePlan, EvaluationPlan, plan_choice, plan_evaluation
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.options import Decoding, Noise, Rows, Topics
from langchain_dpicl.privacy._validate import Adjacency
from langchain_dpicl.privacy.accounting.events import ComposedEvent, Event, FailureEvent, GaussianEvent
from langchain_dpicl.privacy.extensions.outcome_counts import OutcomePlan, OutcomeTable, split_in_parts
from langchain_dpicl.privacy.extensions.value_counts import (
    TOPIC_TEMPLATE,
    Count,
    CountPlan,
    GaussianCountMechanism,
    places,
    split_by_topics,
)
from langchain_dpicl.privacy.extensions.word_release import (
    WEIGHT_STEPS,
    WORD_TEMPLATE,
    UnitPairs,
    WordRelease,
    least_threshold,
)
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.release.curator import pool_without_privacy
from langchain_dpicl.release.declare_share import declare_share
from langchain_dpicl.reports.verify import public_words

# A single unit passes the user's threshold too rarely to be observed. So its chance is recomputed from a second source,
# and its law is played at a delta where it can be observed.


EventT = TypeVar("EventT")

# What a game costs in all is of no interest: its events are compared one by one. No budget is in its way.
_EPSILON, _DELTA = 1e12, 0.1
MINE, OTHER = "mine", "other"
FIELD = "value"
NOISE = 0.5
_RUNS = {"add_remove": 320, "replace_one": 540}
_VISIBLE_NOISE = Noise(multiplier=1.0, delta=0.1)
"""Noise and delta at which a discovery finds the value of one unit every tenth time."""


def _private(values: tuple[str, ...]) -> PrivateExamples:
    records = [{"text": "made up", FIELD: value} for value in values]
    return PrivateExamples(records, fields=(FIELD,), public_size=1)


def _budget(adjacency: Any) -> Budget:
    return Budget(epsilon=_EPSILON, delta=_DELTA, adjacency=adjacency)


def counter_of(
    values: tuple[str, ...], *, adjacency: Adjacency = "add_remove", noise_multiplier: float = NOISE
) -> UnitCounter:
    """Builds a count of two declared values over units that each hold one, on a budget of its own."""
    return UnitCounter.from_private_examples(
        _private(values),
        field=FIELD,
        values=(MINE, OTHER),
        budget=_budget(adjacency),
        epsilon=_EPSILON / 2,
        noise=Noise(multiplier=noise_multiplier),
    )


def finder_of(values: tuple[str, ...], **options: Any) -> ValueDiscovery:
    """Builds a discovery over units that each hold one value, on a budget of its own."""
    arguments = {"adjacency": "add_remove", "noise": _VISIBLE_NOISE, **options}
    return ValueDiscovery.from_private_examples(
        _private(values), field=FIELD, budget=_budget(arguments.pop("adjacency")), epsilon=_EPSILON / 2, **arguments
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class OnceGame(Game):
    """A game against a component that releases once: a fresh one for every trial."""

    def build(self, units: tuple[str, ...]) -> Any:
        """Builds the component over units."""
        raise NotImplementedError

    def release(self, made: Any) -> tuple[Mapping[str, int], int]:
        """Runs a component; returns its counts and how many tickets are left."""
        raise NotImplementedError

    def outcome(self, counts: Mapping[str, int]) -> str:
        """Returns `MINE` where the counts speak for the target and, of another in its place, against it."""
        is_replaced = self.options["adjacency"] == "replace_one"
        return MINE if counts[MINE] >= 1 and (not is_replaced or counts[OTHER] <= 0) else OTHER

    def outcomes(self) -> tuple[str, ...]:
        """Returns the first of two outcomes, which says all."""
        return (MINE,)

    def sides(self) -> tuple[_CountSide, _CountSide]:
        """Prepares both data sets."""
        return _CountSide(self, self.units), _CountSide(self, self.neighbour)

    def event(self, side: _CountSide) -> Event:
        """Returns the event of the ticket of one release."""
        event: Event = self.build(side.units).plan.tickets()[0].event
        return event


class _CountSide(GameSide[OnceGame]):
    """One data set and the outcomes of its releases so far."""

    def __init__(self, game: OnceGame, units: tuple[str, ...]) -> None:
        super().__init__(game, units)
        self._has_unused = False

    def play(self, runs: int) -> None:
        """Builds so many components and runs each of them."""
        for _ in range(runs):
            counts, tickets_left = self.game.release(self.game.build(self.units))
            self.counts[self.game.outcome(counts)] += 1
            self._has_unused |= tickets_left != 0

    def faults(self) -> Iterator[str]:
        """Yields a fault if a release has not used its ticket."""
        if self._has_unused:
            yield "tickets: there was a release and its ticket is left"


@dataclass(frozen=True, kw_only=True, slots=True)
class CountGame(OnceGame):
    """A game against `UnitCounter.run`."""

    def build(self, units: tuple[str, ...]) -> UnitCounter:
        """Builds the counter."""
        return counter_of(units, **self.options)

    def release(self, made: UnitCounter) -> tuple[Mapping[str, int], int]:
        """Counts."""
        return made.run().counts, made.share.remaining("counts")


def laplace_law(moved: int) -> Callable[[float], tuple[float, float]]:
    """Returns the chances of `MINE` on both sides, from the factor of the noise, if a unit moves so many counts."""

    def law(factor: float) -> tuple[float, float]:
        decay = math.exp(-factor / (NOISE * moved))
        stays, joins = 1.0 / (1.0 + decay), decay / (1.0 + decay)
        return stays**moved, joins**moved

    return law


def count_games(*, adjacency: str) -> Iterator[CountGame]:
    """Yields the worst case of declared counts: one value that is added, or replaced by another."""
    moved = 2 if adjacency == "replace_one" else 1
    yield CountGame(
        name=f"one count: discrete_laplace, {adjacency}",
        units=(MINE,),
        neighbour=(OTHER,) if moved == 2 else (),
        runs=_RUNS[adjacency],
        options={"adjacency": adjacency, "noise_multiplier": NOISE},
        law=laplace_law(moved),
    )


def _parts(event: Event, kind: type[EventT]) -> list[EventT]:
    parts = event.events if isinstance(event, ComposedEvent) else (event,)
    return [part for part in parts if isinstance(part, kind)]


def _failure_charged(event: Event) -> float:
    return math.fsum(part.delta for part in _parts(event, FailureEvent))


def count_checks(release: CountPlan) -> Iterator[AuditCheck]:
    """Yields the checks of one plan of counts, except for games."""
    yield AuditCheck("values: one unit adds no more than charged", lambda: check_contribution(release))
    yield AuditCheck("noise: scale, at your own size", lambda: check_noise(release))
    if release.mechanism.threshold is not None:
        yield AuditCheck("threshold: its chance is charged", lambda: check_threshold(release))
        yield AuditCheck("threshold: one unit alone", lambda: check_single_unit(release.adjacency))


def check_contribution(release: CountPlan) -> AuditResult:
    """Checks that no unit, with any number of records and values, moves the counts by more than is charged."""
    rule = release.rule
    name = rule.name or "text"
    declared = rule.declared or tuple(f"value {place}" for place in range(12))
    some = declared[: 4 * rule.max_values]
    units: list[tuple[dict[str, str], ...]] = [
        (),
        *(tuple({name: value} for value in some[:size]) for size in range(1, len(some) + 1)),
        tuple({name: declared[0]} for _ in range(50)),
        tuple({name: text} for text in ("", "\x00", "a" * 500, declared[0].upper(), f" {declared[0]}\t", "NaN")),
    ]
    return _contribution("values: one unit adds no more than charged", release, units)


def _contribution(check: str, release: CountPlan, units: Sequence[Any]) -> AuditResult:
    """Checks that none of these units moves the counts by more than is charged, in L1 and in L2."""
    rule, most = release.rule, release.l1_sensitivity
    faults, tried = set[str](), 0
    counts = [Counter(rule.of(unit)) for unit in units]
    if rule.declared is not None and not set().union(*counts) <= set(rule.declared):
        faults.add("a unit casts what is not declared")
    for one in counts:
        for other in counts if release.adjacency == "replace_one" else (Counter[str](),):
            moves = [abs(one[value] - other[value]) for value in {*one, *other}]
            tried += 1
            if sum(moves) > most or max(moves, default=0) > 1:
                faults.add(f"a unit moves the counts by {sum(moves)}, charged is {most}")
            if math.hypot(*moves) > rule.l2_sensitivity(release.adjacency):
                faults.add("a unit moves the counts further in L2 than is charged")
    return result_of(check, sorted(faults), runs=tried, blind=("units not tried",), is_certain=True)


def check_noise(release: CountPlan | OutcomePlan) -> AuditResult:
    """Checks the tails of the plan's own noise, whether one count reveals the next, and that one unit gets noise too.

    Binomial tests, exact; against scipy's laws, a second source. As many counts as the plan has, but 1,000 at most, and
    how many of them never have noise.
    """
    scale = float(release.scale)
    far = max(1, math.ceil(scale))
    chance, halved = _beyond(release, far), _beyond(release, far, factor=2.0)
    width = min(max(20, _num_counts(release)), 1_000)
    names = [f"value {place}" for place in range(width)]
    counts = {name: 1 if place % 2 else 10**6 for place, name in enumerate(names)}
    drawn = []
    for _ in range(max(4, 4_000 // width)):
        made = _noisy(release, counts)
        drawn.append([count - counts[name] for name, count in made])
    noises = np.array(drawn)
    fits, faults = ExactTests(6), list[str]()
    never = (1.0 - 2.0 * _beyond(release, 1)) ** len(noises)
    faults += fits.binomial("counts that never have noise", np.logical_not(noises.any(axis=0)), never)
    for whose, own in (("many", noises[:, ::2]), ("one unit", noises[:, 1::2])):
        faults += fits.binomial(f"counts of {whose}, above", own >= far, chance)
        faults += fits.binomial(f"counts of {whose}, below", own <= -far, chance)
    faults += fits.binomial("two releases running", (noises[:-1:2] >= far) & (noises[1::2] >= far), chance**2)
    power = fits.power(noises.size // 2, chance, halved)
    blind = ("noise of which a small share is missing", "counts behind the 1,000th")
    return result_of("noise: scale, at your own size", faults, runs=noises.size, power=power, blind=blind)


def _num_counts(release: CountPlan | OutcomePlan) -> int:
    """Returns how many counts are released, as far as the plan says."""
    if isinstance(release, OutcomePlan):
        return sum(release.table.widths)
    return len(release.rule.declared or ())


def _beyond(release: CountPlan | OutcomePlan, far: int, *, factor: float = 1.0) -> float:
    """Returns the chance that noise, if it were smaller by a factor, takes a count up by `far` at least."""
    scale = float(release.scale) / factor
    if isinstance(release.mechanism, GaussianCountMechanism):
        return float(stats.norm(0.0, scale).sf(far - 0.5))  # counts are rounded, upwards from a half
    return float(stats.dlaplace(1.0 / scale).sf(far - 1))


def _noisy(release: CountPlan | OutcomePlan, counts: Mapping[str, int]) -> tuple[Count, ...]:
    plan: Any = release  # a Gaussian one has a rule
    arguments: dict[str, Any] = {"declared": tuple(counts), "rng": SYSTEM_RANDOM}
    if isinstance(release.mechanism, GaussianCountMechanism):
        return release.mechanism.release(counts, rule=plan.rule, adjacency=plan.adjacency, **arguments)
    return release.mechanism.release(counts, l1_sensitivity=plan.l1_sensitivity, **arguments)


def check_threshold(release: CountPlan) -> AuditResult:
    """Checks that the ticket charges at least the chance that values of one unit pass, by scipy's law."""
    mechanism, charged = release.mechanism, _failure_charged(release.tickets()[0].event)
    rate = 1.0 / float(release.scale)
    least = (mechanism.threshold or 1) - 1
    passes = float(stats.dlaplace(rate).pmf(least)) / -math.expm1(-rate)
    cost = -math.expm1(release.rule.max_values * math.log1p(-min(passes, 1.0 - 1e-12)))
    words = f"values of one unit pass with chance {cost:.3g}, charged is {charged:.3g}"
    return _charged("threshold: its chance is charged", words, is_enough=charged >= cost * (1.0 - 1e-9))


def _charged(check: str, words: str, *, is_enough: bool) -> AuditResult:
    blind = ("what really runs: see the next check",)
    return result_of(check, () if is_enough else (words,), runs=1, said=(words,), blind=blind, is_certain=True)


def check_single_unit(adjacency: Any) -> AuditResult:
    """Plays discoveries over one unit, at a delta that can be seen: its value is found no more often than charged.

    Beside it stand others whose value is common, in every second trial: a threshold that looks at them would move.
    """
    faults, charged, passed, crowd, runs = list[str](), 0.0, 0, (OTHER,) * 40, 400
    for run in range(runs):
        made = finder_of((MINE, *(crowd if run % 2 else ())), adjacency=adjacency)
        charged = _failure_charged(made.plan.tickets()[0].event)
        try:
            passed += MINE in made.run().counts
        except ConfigurationError:  # counts that a plan cannot release are none of it
            faults.append("what was released is below the threshold of its own plan")
            passed += 1
    least = clopper_pearson_lower(passed, runs, ALARM)
    if least > charged:
        faults.append(f"the value of one unit is found with a chance above {least:.3g}, charged is {charged:.3g}")
    twice = min(1.0, 2.5 * charged)
    fewest = next((hits for hits in range(runs + 1) if clopper_pearson_lower(hits, runs, ALARM) > charged), runs + 1)
    power = float(stats.binom.sf(fewest - 1, runs, twice))
    return result_of(
        "threshold: one unit alone",
        faults,
        runs=runs,
        power=power,
        power_for="two and a half times the chance to be found",
        blind=("thresholds of another delta than this game's",),
    )


_DOCUMENTS_EPSILON = 1e6
_SHARE = 0.5
_DOCUMENTS_RUNS = {"add_remove": 560, "replace_one": 2_000}
_THIRD, _FOURTH = "third", "fourth"
_WORDS = [" one", " two"]
_VOCABULARY = (MINE, OTHER, _THIRD, _FOURTH)


def documents_of(
    units: tuple[str, ...],
    *,
    adjacency: Adjacency = "add_remove",
    noise_multiplier: float = NOISE,
    min_units: int = 10**6,
) -> DocumentSynthesizer:
    """Builds documents over units of two keywords; the histogram makes no topic, so no text is written."""
    return DocumentSynthesizer.from_private_examples(
        PrivateExamples(units, public_size=10),
        llm=FakeBackend(word_copier(_WORDS), vocabulary=_WORDS),
        topics=Topics(
            _VOCABULARY,
            1,
            keywords_per_unit=2,
            epsilon_share=_SHARE,
            min_units=min_units,
        ),
        documents_per_topic=1,
        max_tokens=1,
        budget=Budget(epsilon=_DOCUMENTS_EPSILON, delta=1e-3, adjacency=adjacency),
        epsilon=1.0 / noise_multiplier / _SHARE,
        rows=Rows(units=1),
        decoding=Decoding(candidates="all"),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TopicGame(OnceGame):
    """A game against the histogram of `DocumentSynthesizer.run`."""

    def build(self, units: tuple[str, ...]) -> DocumentSynthesizer:
        """Builds the synthesizer."""
        return documents_of(units, **self.options)

    def release(self, made: DocumentSynthesizer) -> tuple[Mapping[str, int], int]:
        """Releases the histogram."""
        made.run(progress=False)
        counts = {keyword: int(count) for keyword, count in made.counts.items()}  # of a histogram
        return counts, made.share.remaining(TOPIC_TEMPLATE)

    def outcome(self, counts: Mapping[str, int]) -> str:
        """Returns whether the counts of both its keywords speak for the target, and those of another against it."""
        is_replaced = self.options["adjacency"] == "replace_one"
        has_both = all(counts[name] >= 1 for name in (MINE, OTHER))
        return MINE if has_both and (not is_replaced or max(counts[_THIRD], counts[_FOURTH]) <= 0) else OTHER


def document_games(*, adjacency: str) -> Iterator[TopicGame]:
    """Yields the worst case of a histogram: a unit with all its keywords is added, or replaced by another."""
    moved = 4 if adjacency == "replace_one" else 2
    yield TopicGame(
        name=f"one histogram of keywords: discrete_laplace, {adjacency}",
        units=(f"{MINE} {OTHER}",),
        neighbour=(f"{_THIRD} {_FOURTH}",) if moved == 4 else (),
        runs=_DOCUMENTS_RUNS[adjacency],
        options={"adjacency": adjacency, "noise_multiplier": NOISE},
        law=laplace_law(moved),
    )


def document_checks(plan: DocumentsPlan) -> Iterator[AuditCheck]:
    """Yields the checks of histogram and topics, except for games."""
    yield AuditCheck("topics: one unit has one, by itself", lambda: check_topics(plan))
    topics = plan.topics
    if isinstance(topics, CountPlan):
        yield AuditCheck("keywords: one unit adds no more than charged", lambda: check_keywords(topics))
        yield AuditCheck("noise: scale, at your own size", lambda: check_noise(topics))
        yield AuditCheck("topics: of the noisy counts alone", lambda: check_topic_choice(plan))


def check_keywords(release: CountPlan) -> AuditResult:
    """Checks that no unit, however much it writes, moves the histogram by more than is charged, in L1 and in L2."""
    rule = release.rule
    name, declared = str(rule.name), rule.declared or ()
    some = declared[: 4 * rule.max_values]
    texts = [" ".join(some[:size]) for size in range(len(some) + 1)]
    texts += [" ".join(some * 20), " ".join(reversed(some)), " ".join(some).upper(), "\x00 \u200b", "?".join(some)]
    units = [(), *(({name: text},) for text in texts), tuple({name: text} for text in texts)]
    return _contribution("keywords: one unit adds no more than charged", release, units)


def check_topics(plan: DocumentsPlan) -> AuditResult:
    """Checks that each unit stands in the pool of one topic at most, the same one beside any others, and alone."""
    rule = plan.topics.rule
    declared = (plan.topics.rule.declared or ())[:3] if isinstance(plan.topics, CountPlan) else _VOCABULARY[:3]
    name = str(rule.name)
    texts = [" ".join(declared[:size]) for size in range(len(declared) + 1)]
    texts += [" ".join(reversed(declared)), *declared, "nothing of it", "\x00"]
    labels = places(max(1, len(declared)))
    faults, tried = set[str](), 0
    whole = _pools(name, texts, declared, labels)
    for place, text in enumerate(texts):
        where = [label for label, members in whole.items() if place in members]
        alone = [label for label, members in _pools(name, [text], declared, labels).items() if members]
        without = _pools(name, ["", *texts[:place], *texts[place + 1 :]], declared, labels)
        others = {label: len(members - {place}) for label, members in whole.items()}
        tried += 1
        if len(where) > 1:
            faults.add("a unit is in the texts of several topics, which are charged as if it were in one")
        if where != alone:
            faults.add("the topic of a unit depends on the other units")
        if {label: len(members) for label, members in without.items()} != others:
            faults.add("a unit moves others from one topic to another")
    return result_of(
        "topics: one unit has one, by itself", sorted(faults), runs=tried, blind=("units not tried",), is_certain=True
    )


def _pools(name: str, texts: list[str], declared: tuple[str, ...], labels: tuple[str, ...]) -> dict[str, set[int]]:
    """Returns which units stand in the pool of each place, by a field of their own."""
    records = [{name: text, "unit": str(place)} for place, text in enumerate(texts)]
    private = PrivateExamples(records, text_key=name, fields=("unit",), public_size=10)
    made = split_by_topics(private, dataset_id="audited", topic_key="topic", public_size=dict.fromkeys(labels, 1))
    made.name_topics(declared)
    pools = {label: pool_without_privacy(made, label) for label in labels}
    return {
        label: {int(record["unit"]) for position in range(pool.num_units) for record in pool.records(position)}
        for label, pool in pools.items()
    }


def check_topic_choice(plan: DocumentsPlan, *, runs: int = 40) -> AuditResult:
    """Checks on whole runs that topics are those of the largest noisy counts: the exact ones would reveal one unit.

    The noise is wide beside the one unit, so that the order of its counts and of the others is a matter of chance.
    """
    faults, first = set[str](), 0
    for _ in range(runs):
        made = documents_of((MINE,), adjacency=plan.topics.adjacency, noise_multiplier=20.0, min_units=1)
        made.run(progress=False)
        most = sorted(made.counts.items(), key=lambda pair: -pair[1])
        wanted = {count for _, count in most[:1] if count >= 1}
        if {count for _, count in made.topics} != wanted:
            faults.add("topics are others than those of the largest noisy counts")
        first += bool(made.topics) and made.topics[0][0] == MINE
    if first == runs:  # by chance once in 10^20: the noise is much wider than one unit
        faults.add("the keyword of one unit always becomes a topic")
    return result_of(
        "topics: of the noisy counts alone",
        sorted(faults),
        runs=runs,
        blind=("a choice that follows the records rarely",),
        is_certain=True,
    )


_WORD_RUNS = {"add_remove": 650, "replace_one": 1_350}
_VISIBLE_NOISES = (0.25, 2.0)
"""Noises at which a word of one unit is seen: at small ones that of units of one word, at wide ones that of many."""


def made_up(place: int) -> str:
    """Returns one of 26^5 words that no public text holds."""
    digits = []
    for _ in range(5):
        place, digit = divmod(place, 26)
        digits.append(chr(ord("a") + digit))
    return "zq" + "".join(digits)


def word_finder_of(texts: tuple[str, ...], *, delta: float = _DELTA, **options: Any) -> WordDiscovery:
    """Builds a discovery of words over units of one text each, on a budget of its own."""
    arguments = {"adjacency": "add_remove", "noise_multiplier": NOISE, "max_values": 1, **options}
    return WordDiscovery.from_private_examples(
        PrivateExamples(texts, public_size=1),
        budget=Budget(epsilon=_EPSILON, delta=_DELTA, adjacency=arguments.pop("adjacency")),
        epsilon=_EPSILON / 2,
        noise=Noise(multiplier=arguments.pop("noise_multiplier"), delta=delta),
        **arguments,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class WordGame(OnceGame):
    """A game against `WordDiscovery.run` for a word that others hold too, where the Gaussian noise is all there is."""

    def build(self, units: tuple[str, ...]) -> WordDiscovery:
        """Builds the discovery, whose threshold is the same up to `NOISE`: the words have to be as near to it."""
        passed = stats.norm.sf(stats.norm.isf(_DELTA / 2) * NOISE / self.options["noise_multiplier"])
        return word_finder_of(units, delta=min(_DELTA, 2 * float(passed)), **self.options)

    def release(self, made: WordDiscovery) -> tuple[Mapping[str, int], int]:
        """Releases the words."""
        return dict.fromkeys(made.run(progress=False).words, 1), made.share.remaining(WORD_TEMPLATE)

    def outcome(self, counts: Mapping[str, int]) -> str:
        """Returns whether the words speak for the target; of another in its place, against it."""
        is_replaced = self.options["adjacency"] == "replace_one"
        return MINE if MINE in counts and (not is_replaced or OTHER not in counts) else OTHER

    def event(self, side: Any) -> Event:
        """Returns the Gaussian event of the ticket of one release: no failure concerns words that others hold."""
        (noise,) = _parts(OnceGame.event(self, side), GaussianEvent)
        return noise


def word_games(*, adjacency: str) -> Iterator[WordGame]:
    """Yields the worst case of a word that others hold: a unit of one word is added, or replaced by another."""
    options: dict[str, Any] = {"adjacency": adjacency, "noise_multiplier": NOISE}
    is_replaced = adjacency == "replace_one"
    crowd = (MINE, OTHER) * 2 if is_replaced else (MINE,)
    release = word_finder_of((), **options).plan.release

    def law(factor: float) -> tuple[float, float]:
        noise = stats.norm(0.0, release.scale / factor)
        held = len(crowd) // (2 if is_replaced else 1)
        more, less = (float(noise.sf(release.mechanism.threshold - weight)) for weight in (held + 1, held))
        return (more * (1.0 - less), less * (1.0 - more)) if is_replaced else (more, less)

    yield WordGame(
        name=f"one word that others hold: thresholded_gaussian, {adjacency}",
        units=(*crowd, MINE),
        neighbour=(*crowd, OTHER) if is_replaced else crowd,
        runs=_WORD_RUNS[adjacency],
        options=options,
        law=law,
    )


def word_checks(**releases: WordRelease | None) -> Iterator[AuditCheck]:
    """Yields the checks of releases of words by what they release, except for games; none where none leave."""
    looked_at = {
        "one unit adds no more than charged": check_word_contribution,
        "noise, at your own size": check_word_noise,
        "the threshold's chance is charged": check_word_threshold,
        "one unit alone": check_unit_with_a_word,
    }
    for (what, release), (name, check) in itertools.product(releases.items(), looked_at.items()):
        if release is not None:
            yield AuditCheck(f"{what}: {name}", partial(check, release, what))


def check_word_contribution(release: WordRelease, what: str = "words") -> AuditResult:
    """Checks that no unit moves the sums by more than is charged, beside any others, and moves no other unit."""
    rule, limit = release.rule, (1 if release.adjacency == "add_remove" else 2) * WEIGHT_STEPS**2
    some = [made_up(place) for place in range(rule.max_words + 4)]
    known: Any = some if isinstance(rule, UnitPairs) else public_words()
    texts = [" ".join(some[:size]) for size in range(len(some) + 1)]
    texts += [" ".join(some * 9), " ".join(reversed(some)), " ".join(some).upper(), "\x00 \u200b", "?".join(some)]
    units = [(), *(({rule.name: text},) for text in texts), tuple({rule.name: text} for text in texts)]
    crowd, faults, tried = units[3:6], set[str](), 0
    without = release.weights(crowd, known)
    alone = [release.weights([unit], known) for unit in units]
    for unit, mine in zip(units, alone, strict=True):
        beside = release.weights([*crowd, unit], known)
        if any(beside[item] != without[item] + mine[item] for item in {*beside, *without, *mine}):
            faults.add("what a unit casts depends on the other units")
        moves = [{item: beside[item] - without[item] for item in {*beside, *without}}]
        if release.adjacency == "replace_one":
            moves += [{item: mine[item] - other[item] for item in {*mine, *other}} for other in alone]
        for move in moves:
            tried += 1
            square = sum(step**2 for step in move.values())
            if square > limit:
                faults.add(f"a unit moves the sums by {math.sqrt(square) / WEIGHT_STEPS:.4g} in L2, more than charged")
    check, blind = f"{what}: one unit adds no more than charged", ("units not tried",)
    return result_of(check, sorted(faults), runs=tried, blind=blind, is_certain=True)


def check_word_noise(release: WordRelease, what: str = "words") -> AuditResult:
    """Checks the tails of the noise on sums far above the threshold, and whether one reveals the next."""
    charged, draws = _noise_charged(release), 4_000
    far, base = charged, math.ceil(release.mechanism.threshold + 20 * charged + 1)
    weights = {made_up(place): base * WEIGHT_STEPS for place in range(draws)}
    released = dict(release.mechanism.release(weights, adjacency=release.adjacency, rng=SYSTEM_RANDOM))
    noises = np.array([released.get(item, 0.0) - base for item in weights])
    chance, fits = float(stats.norm.sf(1.0)), ExactTests(3)
    faults = fits.binomial("above", noises >= far, chance)
    faults += fits.binomial("below", noises <= -far, chance)
    faults += fits.binomial("two running", (noises[:-1:2] >= far) & (noises[1::2] >= far), chance**2)
    power = fits.power(draws, chance, float(stats.norm.sf(2.0)))
    blind = ("noise of which a small share is missing",)
    return result_of(f"{what}: noise, at your own size", faults, runs=draws, power=power, blind=blind)


def _noise_charged(release: WordRelease) -> float:
    """Returns the deviation that the event charges for, from the sensitivity by hand."""
    noise = math.fsum(part.noise_multiplier for part in _parts(release.event, GaussianEvent))
    return noise * (1.0 if release.adjacency == "add_remove" else math.sqrt(2.0))


def check_word_threshold(release: WordRelease, what: str = "words") -> AuditResult:
    """Checks that the ticket charges at least the chance that any item of one unit passes, by scipy's law."""
    charged, scale = _failure_charged(release.event), _noise_charged(release)
    least = release.mechanism.threshold
    costs = {
        j: -math.expm1(j * math.log1p(-float(stats.norm.sf((least - 1.0 / math.sqrt(j)) / scale))))
        for j in range(1, release.rule.max_words + 1)
    }
    number, cost = max(costs.items(), key=lambda pair: pair[1])
    words = f"one of {number} items of one unit passes with chance {cost:.3g}, charged is {charged:.3g}"
    return _charged(f"{what}: the threshold's chance is charged", words, is_enough=charged >= cost * (1.0 - 1e-9))


def check_unit_with_a_word(release: WordRelease, what: str = "words") -> AuditResult:
    """Plays releases at a delta that can be seen: something of one unit alone leaves no more often than is charged.

    Every unit of a run holds items that no other holds, so that a run is as many trials. Words are played by the
    component itself; units of one item and of the most that the plan allows, 32 at most.
    """
    faults, charged, units = list[str](), 0.0, 5_000
    most = min(release.rule.max_words, 32)
    looks = list(itertools.product(_VISIBLE_NOISES, sorted({1, most})))
    alarm = ALARM / len(looks)
    for noise, size in looks:
        hits, charged = _hits(release, noise, size, most, units)
        if (least := clopper_pearson_lower(hits, units, alarm)) > charged:
            faults.append(f"{size} items at noise {noise}: seen with a chance above {least:.3g}, charged {charged:.3g}")
    fewest = next(hits for hits in range(units + 1) if clopper_pearson_lower(hits, units, alarm) > charged)
    power = float(stats.binom.sf(fewest - 1, units, 1.5 * charged))
    return result_of(
        f"{what}: one unit alone",
        faults,
        runs=len(looks) * units,
        power=power,
        power_for="one and a half times the chance to be found",
        blind=(
            "thresholds of another delta than this game's",
            "units of numbers of items between those that are played",
        ),
    )


def _hits(release: WordRelease, noise: float, size: int, most: int, units: int) -> tuple[int, float]:
    """Returns how many of so many units, alone with `size` items each, something was released of, and the charge."""
    held = [[made_up(unit * most + place) for place in range(size + 1)] for unit in range(units)]
    owner = {word: unit for unit, words in enumerate(held) for word in words}
    if isinstance(release.rule, UnitPairs):
        threshold = least_threshold(noise, most, release.adjacency, _DELTA / 2)
        mechanism = dataclasses.replace(release.mechanism, noise_multiplier=noise, threshold=threshold)
        made = WordRelease(UnitPairs("text", most), mechanism, release.adjacency)
        records = [({"text": " ".join(words)},) for words in held]
        found = [pair.split(" ")[0] for pair, _ in made.release(records, tuple(owner), rng=SYSTEM_RANDOM)]
        return len({owner[word] for word in found}), _failure_charged(made.event)
    texts = tuple(" ".join(words[:size]) for words in held)
    finder = word_finder_of(texts, adjacency=release.adjacency, noise_multiplier=noise, max_values=most)
    charged = _failure_charged(finder.plan.release.event)
    return len({owner[word] for word in finder.run(progress=False).words}), charged


_LABELS = (MINE, OTHER)
_OUTCOME_RUNS = {"add_remove": 480, "replace_one": 1_560}
_CHOICE_RUNS = {"add_remove": 700, "replace_one": 360}
_FEW_CELLS = 4
_HOSTILE = (-1.0, 0.0, 0.5, 1.0, 2.0, 1e300, -1e300, math.inf, -math.inf, math.nan)


class _Reader(LLM):
    """Answers with the record's own text, with a fixed one, or not at all."""

    says: str = ""

    @property
    @override
    def _llm_type(self) -> str:
        return "audited"

    @override
    def _call(self, prompt: str, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> str:
        if prompt.startswith("fails"):
            raise ValueError(prompt)
        return self.says or prompt


def question_over(private: PrivateExamples, *, is_choice: bool = False) -> Question:
    """Returns a chain that says what the record says; for a choice two that always name one label."""
    prompt = PromptTemplate.from_template("{text}")
    chains: dict[str, Any] = {label: prompt | _Reader(says=label) for label in _LABELS}
    chains = chains if is_choice else {"chain": prompt | _Reader()}
    return silent_question(private, chains, Exact(), inputs=None, timeout=None, is_choice=is_choice)


def _private_answers(units: tuple[str, ...]) -> PrivateExamples:
    records = [{"text": MINE, "label": unit} for unit in units]
    return PrivateExamples(records, label_key="label", labels=_LABELS, public_size=1)


def evaluation_of(
    units: tuple[str, ...], *, adjacency: Adjacency = "add_remove", noise_multiplier: float = NOISE
) -> Evaluation:
    """Builds an evaluation over units that the chain calls `MINE`, whatever their label is, on a budget of its own."""
    private, budget = _private_answers(units), Budget(epsilon=_EPSILON, delta=0.1, adjacency=adjacency)
    question = question_over(private)
    plan = plan_evaluation(
        1, widths=question.widths, epsilon=None, delta=0.05, adjacency=adjacency, noise_multiplier=noise_multiplier
    )
    return Evaluation(private, question, plan=plan, budget=budget, share=_declared(private, budget, plan))


def choice_of(
    units: tuple[str, ...], *, adjacency: Adjacency = "add_remove", noise_multiplier: float = NOISE
) -> Choosing:
    """Builds a choice between two chains that each name one label always, on a budget of its own."""
    private, budget = _private_answers(units), Budget(epsilon=_EPSILON, delta=0.1, adjacency=adjacency)
    question = question_over(private, is_choice=True)
    plan = plan_choice(
        1, candidates=2, epsilon=None, delta=0.05, adjacency=adjacency, noise_multiplier=noise_multiplier
    )
    return Choosing(
        private, question, dict.fromkeys(_LABELS), plan=plan, budget=budget, share=_declared(private, budget, plan)
    )


def _declared(private: PrivateExamples, budget: Budget, plan: EvaluationPlan | ChoicePlan) -> Any:
    return declare_share(private, budget, plan, component="audited", epsilon=_EPSILON / 2, public=plan.to_dict())


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationGame(OnceGame):
    """A game against the release of `dp_evaluate`."""

    def build(self, units: tuple[str, ...]) -> Evaluation:
        """Builds the evaluation."""
        return evaluation_of(units, **self.options)

    def release(self, made: Evaluation) -> tuple[Mapping[str, int], int]:
        """Counts the outcomes, in both tables: the lesser count of the target, and the larger one of another."""
        found = made.run(progress=False)
        table, by_score = found.tables["exact"], found.by_score["exact"]
        counts = {MINE: min(table[MINE, MINE], by_score[1.0]), OTHER: max(table[OTHER, MINE], by_score[0.0])}
        return counts, _tickets_left(made)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceGame(OnceGame):
    """A game against the release of `dp_choose`."""

    def build(self, units: tuple[str, ...]) -> Choosing:
        """Builds the choice."""
        return choice_of(units, **self.options)

    def release(self, made: Choosing) -> tuple[Mapping[str, int], int]:
        """Chooses."""
        return {made.run(progress=False).name: 1}, _tickets_left(made)

    def outcome(self, counts: Mapping[str, int]) -> str:
        """Returns the chain that was chosen: that of the target's label, or the other."""
        return MINE if MINE in counts else OTHER


def _tickets_left(made: Evaluation | Choosing) -> int:
    (kind,) = made.plan.tickets()
    return made.share.remaining(kind.template, label=kind.label)


def _gumbel_law(moved: int) -> Callable[[float], tuple[float, float]]:
    """Returns the chances of the target's chain on both sides, from the factor of the noise."""

    def law(factor: float) -> tuple[float, float]:
        wins = 1.0 / (1.0 + math.exp(-factor / (NOISE * moved)))
        return wins, 0.5 if moved == 1 else 1.0 - wins

    return law


def games(plan: EvaluationPlan | ChoicePlan) -> Iterator[OnceGame]:
    """Yields the worst case of a plan: one unit that is added, or replaced by another."""
    adjacency = plan.adjacency
    moved = 2 if adjacency == "replace_one" else 1
    terms: dict[str, Any] = {"units": (MINE,), "options": {"adjacency": adjacency, "noise_multiplier": NOISE}}
    if isinstance(plan, EvaluationPlan):
        yield EvaluationGame(
            name=f"one outcome: discrete_laplace, {adjacency}",
            neighbour=(OTHER,) if moved == 2 else (),
            runs=_OUTCOME_RUNS[adjacency],
            law=laplace_law(2 * moved),  # one cell of each of two tables
            **terms,
        )
    else:
        yield ChoiceGame(
            name=f"one choice: gumbel, {adjacency}",
            neighbour=(OTHER,) if moved == 2 else (),
            runs=_CHOICE_RUNS[adjacency],
            law=_gumbel_law(moved),
            **terms,
        )


ROWS = "rows: one per unit, from its own records"


def checks(plan: EvaluationPlan | ChoicePlan) -> Iterator[AuditCheck]:
    """Yields the checks of a plan, except for games."""
    release: Any = plan.release
    yield AuditCheck("sampler: rate", lambda: check_sampler_rate(release))
    if isinstance(plan, EvaluationPlan):
        yield AuditCheck("outcomes: one unit adds no more than charged", lambda: check_outcome_contribution(release))
        yield AuditCheck("noise: scale, at your own size", lambda: check_noise(release))
        yield AuditCheck(TABLES, lambda: check_tables(release))
    else:
        yield AuditCheck("rows", lambda: check_row_contribution(release))
        yield AuditCheck("noise: scale", lambda: check_noise_scale(release, width=plan.candidates))
    yield AuditCheck(ROWS, check_rows)
    yield AuditCheck(PARTS, check_parts)


def check_outcome_contribution(release: OutcomePlan) -> AuditResult:
    """Checks that no row, whatever stands in it, moves the tables by more than is charged, and no count by more than 1.

    Rows of places and of hostile numbers come, go and replace each other beside others.
    """
    table, tables = release.table, len(release.table.widths)
    places = [np.array([float(min(place, width - 1)) for width in table.widths]) for place in range(3)]
    rows = [*places, *(np.full(tables, number) for number in _HOSTILE)]
    faults, tried = set[str](), 0
    beside = np.array(places)

    def counts(*more: Any) -> list[int]:
        return list(itertools.chain.from_iterable(table.counts(np.array([*beside, *more]))))

    for one in rows:
        others: list[tuple[Any, ...]] = [()]
        others += [(other,) for other in rows] if release.adjacency == "replace_one" else []
        for other in others:
            moves = [abs(a - b) for a, b in zip(counts(one), counts(*other), strict=True)]
            tried += 1
            if sum(moves) > release.l1_sensitivity or max(moves) > 1:
                faults.add(f"a row moves the tables by {sum(moves)}, charged is {release.l1_sensitivity}")
    check = "outcomes: one unit adds no more than charged"
    return result_of(check, sorted(faults), runs=tried, blind=("rows not tried",), is_certain=True)


TABLES = "noise: in every table"


def check_tables(release: OutcomePlan) -> AuditResult:
    """Checks the noise of whole releases, over no unit and over one: in each table, and in two tables together.

    Of wide tables, a few cells are drawn: the noise follows from the number of tables. Binomial tests, exact.
    """
    widths = tuple(min(width, _FEW_CELLS) for width in release.table.widths)
    few = dataclasses.replace(release, table=OutcomeTable(widths))
    scale = float(few.scale)
    far = max(1, math.ceil(scale))
    chance = 2 * float(stats.dlaplace(1.0 / scale).sf(far - 1))
    noises: list[list[int]] = [[] for _ in widths]
    firsts = []
    for run in range(math.ceil(1_600 / min(widths))):
        has_one = run % 2
        drawn = few.release(np.zeros((has_one, len(widths))), rng=SYSTEM_RANDOM)
        for noise, counts in zip(noises, drawn, strict=True):
            noise += [counts[0] - has_one, *counts[1:]]
        firsts.append([abs(counts[0] - has_one) >= far for counts in drawn])
    fits, faults, is_far = ExactTests(2 * len(widths)), list[str](), np.array(firsts)
    for place, noise in enumerate(noises):
        faults += fits.binomial(f"table {place}, far off", np.abs(np.array(noise)) >= far, chance)
    for place in range(len(widths) - 1):
        both = is_far[:, place] & is_far[:, place + 1]
        faults += fits.binomial(f"tables {place} and {place + 1}, far off", both, chance**2)
    halved = 2 * float(stats.dlaplace(2.0 / scale).sf(far - 1))
    power = min(fits.power(len(noise), chance, halved) for noise in noises)
    blind = ("noise of which a small share is missing",)
    return result_of(TABLES, faults, runs=sum(map(len, noises)), power=power, blind=blind)


def check_rows() -> AuditResult:
    """Checks that a unit more adds one row and moves no other, whatever its records do to template, chain and parser.

    Fails, many records, none, and texts that are templates themselves come beside others.
    """
    private = _private_answers((MINE,))
    beside = [[(MINE,), (OTHER,)], [(MINE,), ("fails",), (OTHER,)]]
    more = [(), ("fails",) * 3, (MINE,) * 50, ("{text}",), ("\x00",), ("neither",), ("",)]
    faults = set[str]()
    for is_choice, others in itertools.product((False, True), beside):
        question = question_over(private, is_choice=is_choice)
        without = _rows(question, others)
        for unit in more:
            with_it = _rows(question, [*others, unit])
            if with_it.shape != (len(others) + 1, question.width):
                faults.add("a unit adds other than one row")
            elif not np.array_equal(with_it[:-1], without):
                faults.add("a unit moves the rows of others")
            elif is_choice and not set(with_it[-1].tolist()) <= {0.0, 1.0}:
                faults.add("a row of a choice holds more than right and wrong")
    return result_of(ROWS, sorted(faults), runs=4 * len(more), blind=("own functions that remember",), is_certain=True)


def _rows(question: Question, units: Sequence[tuple[str, ...]]) -> Any:
    records = [tuple({"text": text, "label": text if text in _LABELS else MINE} for text in unit) for unit in units]
    return question.ask([OpaqueValue(unit) for unit in records]).run().take()


PARTS = "parts: a unit is in one half, by itself"


def check_parts() -> AuditResult:
    """Checks that each unit is in one half, the same one with any other units beside it, with names and without."""
    texts, faults = [f"text {place}" for place in range(60)], set[str]()
    for key in (None, "user"):
        whole = _halves(texts, key)
        if sorted(itertools.chain.from_iterable(whole)) != sorted(texts):
            faults.add("a unit is in both halves, or in none")
        for gone in texts[:20]:
            without = _halves([text for text in texts if text != gone], key)
            if without != [half - {gone} for half in whole]:
                faults.add("a unit moves others from one half to the other")
    return result_of(PARTS, sorted(faults), runs=40, blind=("units not tried",), is_certain=True)


def _halves(texts: list[str], key: str | None) -> list[set[str]]:
    private = PrivateExamples([{"text": text, "user": text} for text in texts], unit_key=key, public_size=60)
    pools = [pool_without_privacy(split_in_parts(private), part) for part in ("choose", "test")]
    return [
        {record["text"] for position in range(pool.num_units) for record in pool.records(position)} for pool in pools
    ]
