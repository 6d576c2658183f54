"""Checks counts of values and histograms of topics: contribution of a unit, noise, threshold, games."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from scipy import stats

from langchain_dpicl.audit.bounds import ALARM, clopper_pearson_lower
from langchain_dpicl.audit.game import AuditResult, Game, result_of
from langchain_dpicl.backends.fake import FakeBackend, word_copier
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.discovery import UnitCounter, ValueDiscovery
from langchain_dpicl.documents.plan import DocumentsPlan
from langchain_dpicl.documents.synthesizer import DocumentSynthesizer
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.options import Decoding, Noise, Rows, Topics
from langchain_dpicl.privacy._validate import Adjacency
from langchain_dpicl.privacy.accounting.events import ComposedEvent, Event, FailureEvent
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.privacy.extensions.count_histograms import Count, CountPlan, GaussianCountMechanism
from langchain_dpicl.privacy.extensions.outcome_counts import OutcomePlan
from langchain_dpicl.privacy.extensions.topic_partition import TOPIC_TEMPLATE, places, split_by_topics
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.release.curator import pool_without_privacy

# A single unit passes the user's threshold too rarely to be observed. So its chance is recomputed from a second source,
# and its law is played at a delta where it can be observed.


Named: TypeAlias = tuple[str, Callable[[], AuditResult]]

# What a game costs in all is of no interest: its events are compared one by one. No budget is in its way.
_EPSILON = 1e12
MINE, OTHER = "mine", "other"
FIELD = "value"
NOISE = 0.5
_RUNS = {"add_remove": 320, "replace_one": 540}
_VISIBLE_NOISE = Noise(multiplier=1.0, delta=0.1)
"""Noise and delta at which a discovery finds the value of one unit every tenth time."""


def _private(values: tuple[str, ...]) -> PrivateExamples:
    records = [{"text": "made up", FIELD: value} for value in values]
    return PrivateExamples(records, fields=(FIELD,), public_size=1)


def _budget(adjacency: Any, delta: float = 0.1) -> Budget:
    return Budget(epsilon=_EPSILON, delta=delta, adjacency=adjacency)


def counter_of(values: tuple[str, ...], **options: Any) -> UnitCounter:
    """Builds a count of two declared values over units that each hold one, on a budget of its own."""
    arguments = {"adjacency": "add_remove", "noise": Noise(multiplier=NOISE), **options}
    return UnitCounter.from_private_examples(
        _private(values),
        field=FIELD,
        values=(MINE, OTHER),
        budget=_budget(arguments.pop("adjacency")),
        epsilon=_EPSILON / 2,
        **arguments,
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
        """Returns `MINE` where the counts speak for the target."""
        raise NotImplementedError

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


class _CountSide:
    """One data set and the outcomes of its releases so far."""

    def __init__(self, game: OnceGame, units: tuple[str, ...]) -> None:
        self.game, self.units = game, units
        self.counts: Counter[str] = Counter()
        self._has_unused = False

    def play(self, runs: int) -> None:
        """Builds so many components and runs each of them."""
        for _ in range(runs):
            counts, tickets_left = self.game.release(self.game.build(self.units))
            self.counts[self.game.outcome(counts)] += 1
            self._has_unused |= tickets_left != 0

    @property
    def played(self) -> int:
        """Trials so far."""
        return self.counts.total()

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

    def outcome(self, counts: Mapping[str, int]) -> str:
        """Returns whether the counts speak for the target; of another in its place, against it."""
        is_replaced = self.options["adjacency"] == "replace_one"
        return MINE if counts[MINE] >= 1 and (not is_replaced or counts[OTHER] <= 0) else OTHER


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
        options={"adjacency": adjacency, "noise": Noise(multiplier=NOISE)},
        law=laplace_law(moved),
    )


def count_checks(release: CountPlan) -> Iterator[Named]:
    """Yields the checks of one plan of counts, except for games."""
    yield "values: one unit adds no more than charged", lambda: check_contribution(release)
    yield "noise: scale, at your own size", lambda: check_noise(release)
    if release.mechanism.threshold is not None:
        yield "threshold: its chance is charged", lambda: check_threshold(release)
        yield "threshold: one unit alone", lambda: check_single_unit(release.adjacency)


def check_contribution(release: CountPlan) -> AuditResult:
    """Checks that no unit, with any number of records and values, moves the counts by more than is charged."""
    rule, most = release.rule, release.l1_sensitivity
    name = rule.name or "text"
    declared = rule.declared or tuple(f"value {place}" for place in range(12))
    units: list[tuple[dict[str, str], ...]] = [
        (),
        *(tuple({name: value} for value in declared[:size]) for size in range(1, len(declared) + 1)),
        tuple({name: declared[0]} for _ in range(50)),
        tuple({name: text} for text in ("", "\x00", "a" * 500, declared[0].upper(), f" {declared[0]}\t", "NaN")),
    ]
    faults, tried = set[str](), 0
    counts = [Counter(rule.of(unit)) for unit in units]
    for one in counts:
        for other in counts if release.adjacency == "replace_one" else (Counter[str](),):
            moves = [abs(one[value] - other[value]) for value in {*one, *other}]
            tried += 1
            if sum(moves) > most or max(moves, default=0) > 1:
                faults.add(f"a unit moves the counts by {sum(moves)}, charged is {most}")
    check, blind = "values: one unit adds no more than charged", ("units not tried",)
    return result_of(check, sorted(faults), runs=tried, blind=blind, is_certain=True)


def check_noise(release: CountPlan | OutcomePlan, *, draws: int = 4_000) -> AuditResult:
    """Checks the tails of the plan's own noise, whether one count reveals the next, and that one unit gets noise too.

    Binomial tests, exact; against scipy's laws, a second source.
    """
    scale = float(release.scale)
    far = max(1, math.ceil(scale))
    chance, halved = _beyond(release, far), _beyond(release, far, factor=2.0)
    names = [f"value {place}" for place in range(20)]
    counts = {name: 1 if place % 2 else 10**6 for place, name in enumerate(names)}
    drawn = []
    for _ in range(draws // len(names)):
        made = _noisy(release, counts)
        drawn.append([count - counts[name] for name, count in made])
    noises = np.array(drawn)
    tests = {
        "counts of many, above": (noises[:, ::2].ravel() >= far, chance),
        "counts of many, below": (noises[:, ::2].ravel() <= -far, chance),
        "counts of one unit, above": (noises[:, 1::2].ravel() >= far, chance),
        "counts of one unit, below": (noises[:, 1::2].ravel() <= -far, chance),
        "two releases running": ((noises[:-1:2] >= far) & (noises[1::2] >= far), chance**2),
    }
    faults = [
        f"{what}: {int(coins.sum())} of {coins.size}, expected {share * coins.size:.1f}"
        for what, (coins, share) in tests.items()
        if stats.binomtest(int(coins.sum()), coins.size, share).pvalue < ALARM / len(tests)
    ]
    size = noises.size // 2
    fewest = float(stats.binom.ppf(ALARM / (2 * len(tests)), size, chance))
    power = float(stats.binom.cdf(fewest - 1, size, halved))
    blind = ("noise of which a small share is missing",)
    return result_of("noise: scale, at your own size", faults, runs=noises.size, power=power, blind=blind)


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
    mechanism, event = release.mechanism, release.tickets()[0].event
    parts = event.events if isinstance(event, ComposedEvent) else (event,)
    charged = math.fsum(part.delta for part in parts if isinstance(part, FailureEvent))
    rate = 1.0 / float(release.scale)
    least = (mechanism.threshold or 1) - 1
    passes = float(stats.dlaplace(rate).pmf(least)) / -math.expm1(-rate)
    cost = -math.expm1(release.rule.max_values * math.log1p(-min(passes, 1.0 - 1e-12)))
    words = f"values of one unit pass with chance {cost:.3g}, charged is {charged:.3g}"
    faults = [words] if charged < cost * (1.0 - 1e-9) else []
    blind = ("what really runs: see the next check",)
    result = result_of("threshold: its chance is charged", faults, runs=1, blind=blind, is_certain=True)
    return dataclasses.replace(result, details=(words,))


def check_single_unit(adjacency: Any, *, runs: int = 400) -> AuditResult:
    """Plays discoveries over one unit, at a delta that can be seen: its value is found no more often than charged.

    Beside it stand others whose value is common, in every second trial: a threshold that looks at them would move.
    """
    faults, charged, passed, crowd = list[str](), 0.0, 0, (OTHER,) * 40
    for run in range(runs):
        made = finder_of((MINE, *(crowd if run % 2 else ())), adjacency=adjacency)
        event = made.plan.tickets()[0].event
        parts = event.events if isinstance(event, ComposedEvent) else (event,)
        charged = math.fsum(part.delta for part in parts if isinstance(part, FailureEvent))
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
        list(dict.fromkeys(faults)),
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


def document_checks(plan: DocumentsPlan) -> Iterator[Named]:
    """Yields the checks of histogram and topics, except for games."""
    yield "topics: one unit has one, by itself", lambda: check_topics(plan)
    topics = plan.topics
    if isinstance(topics, CountPlan):
        yield "keywords: one unit adds no more than charged", lambda: check_keywords(topics)
        yield "noise: scale, at your own size", lambda: check_noise(topics)
        yield "topics: of the noisy counts alone", lambda: check_topic_choice(plan)


def check_keywords(release: CountPlan) -> AuditResult:
    """Checks that no unit, however much it writes, moves the histogram by more than is charged, in L1 and in L2."""
    rule = release.rule
    name, declared = str(rule.name), rule.declared or ()
    some = declared[: 4 * rule.max_values]
    texts = [" ".join(some[:size]) for size in range(len(some) + 1)]
    texts += [" ".join(some * 20), " ".join(reversed(some)), " ".join(some).upper(), "\x00 \u200b", "?".join(some)]
    units = [(), *(({name: text},) for text in texts), tuple({name: text} for text in texts)]
    faults, tried = set[str](), 0
    counts = [Counter(rule.of(unit)) for unit in units]
    for one in counts:
        for other in counts if release.adjacency == "replace_one" else (Counter[str](),):
            moves = [abs(one[keyword] - other[keyword]) for keyword in {*one, *other}]
            tried += 1
            if sum(moves) > release.l1_sensitivity or max(moves, default=0) > 1:
                faults.add(f"a unit moves the counts by {sum(moves)}, charged is {release.l1_sensitivity}")
            if math.hypot(*moves) > rule.l2_sensitivity(release.adjacency):
                faults.add("a unit moves the counts further in L2 than is charged")
            if not {*one, *other} <= set(declared):
                faults.add("a unit casts a keyword that is not declared")
    return result_of(
        "keywords: one unit adds no more than charged",
        sorted(faults),
        runs=tried,
        blind=("units not tried",),
        is_certain=True,
    )


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
