"""Checks topics and histogram of synthetic documents; their texts are audited as a generation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from langchain_dpicl.audit import counting
from langchain_dpicl.audit.counting import MINE, NOISE, OTHER, OnceGame, laplace_law
from langchain_dpicl.audit.results import AuditResult, result_of
from langchain_dpicl.backends.fake import FakeBackend, word_copier
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.documents import DocumentSynthesizer
from langchain_dpicl.documents_planning import DocumentsPlan
from langchain_dpicl.privacy.document_tickets import TOPIC_TEMPLATE, places
from langchain_dpicl.privacy.examples import PrivateExamples
from langchain_dpicl.privacy.topic_examples import split_by_topics
from langchain_dpicl.release.curator import pool_without_privacy

Named: TypeAlias = tuple[str, Callable[[], AuditResult]]

_EPSILON = 1e6
_SHARE = 0.5
_RUNS = {"add_remove": 560, "replace_one": 2_000}
_THIRD, _FOURTH = "third", "fourth"
_WORDS = [" one", " two"]
_VOCABULARY = (MINE, OTHER, _THIRD, _FOURTH)


def documents_of(units: tuple[str, ...], **options: Any) -> DocumentSynthesizer:
    """Builds documents over units of two keywords; the histogram makes no topic, so no text is written."""
    arguments = {"adjacency": "add_remove", "noise_multiplier": NOISE, "least_units": 10**6, **options}
    epsilon = 1.0 / arguments.pop("noise_multiplier") / _SHARE
    return DocumentSynthesizer.from_private_examples(
        PrivateExamples(units, public_size=10),
        llm=FakeBackend(word_copier(_WORDS), vocabulary=_WORDS),
        vocabulary=_VOCABULARY,
        keywords_per_unit=2,
        topic_share=_SHARE,
        topic_noise="discrete_laplace",
        num_topics=1,
        documents_per_topic=1,
        max_tokens=1,
        public_top_k=None,
        num_slots=1,
        budget=Budget(epsilon=_EPSILON, delta=1e-3, adjacency=arguments.pop("adjacency")),
        epsilon=epsilon,
        **arguments,
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
        return made.counts, made._share.remaining(TOPIC_TEMPLATE)  # noqa: SLF001  to be audited

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
        runs=_RUNS[adjacency],
        options={"adjacency": adjacency, "noise_multiplier": NOISE},
        law=laplace_law(moved),
    )


def document_checks(plan: DocumentsPlan) -> Iterator[Named]:
    """Yields the checks of histogram and topics, except for games."""
    yield "keywords: one unit adds no more than charged", lambda: keywords(plan)
    yield "noise: scale, at your own size", lambda: counting.noise(plan.topics)
    yield "topics: one unit has one, by itself", lambda: topics(plan)
    yield "topics: of the noisy counts alone", lambda: choice(plan)


def keywords(plan: DocumentsPlan) -> AuditResult:
    """Checks that no unit, however much it writes, moves the histogram by more than is charged, in L1 and in L2."""
    rule, release = plan.topics.rule, plan.topics
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


def topics(plan: DocumentsPlan) -> AuditResult:
    """Checks that each unit stands in the pool of one topic at most, the same one whoever else is there, and alone."""
    rule = plan.topics.rule
    name, declared = str(rule.name), (rule.declared or ())[:3]
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
    """Returns which units stand in the pool of each place, told by a field of their own."""
    records = [{name: text, "unit": str(place)} for place, text in enumerate(texts)]
    private = PrivateExamples(records, text_key=name, fields=("unit",), public_size=10)
    made = split_by_topics(private, dataset_id="audited", topic_key="topic", public_size=dict.fromkeys(labels, 1))
    made.name_topics(declared)
    pools = {label: pool_without_privacy(made, label) for label in labels}
    return {
        label: {int(record["unit"]) for position in range(pool.num_units) for record in pool.records(position)}
        for label, pool in pools.items()
    }


def choice(plan: DocumentsPlan, *, runs: int = 40) -> AuditResult:
    """Checks on whole runs that topics are those of the largest noisy counts: the exact ones would tell of one unit.

    The noise is wide beside the one unit, so that the order of its counts and of the others is a matter of chance.
    """
    faults, first = set[str](), 0
    for _ in range(runs):
        made = documents_of((MINE,), adjacency=plan.topics.adjacency, noise_multiplier=20.0, least_units=1)
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
