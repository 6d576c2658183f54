"""Counts units and declared values with noise, and finds values and words that many units share."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from langchain_dpicl._construction import tells_how_to_build
from langchain_dpicl.backends.embedded import load_tables
from langchain_dpicl.backends.rows.answer_rows import STOP_WORDS
from langchain_dpicl.backends.sync_async import Blocking, EffectGenerator, awaitable
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.budget.handler import BudgetLike, resolve_budget
from langchain_dpicl.distributed import tickets_missing
from langchain_dpicl.options import Noise, noise_of
from langchain_dpicl.planning.share_plan import (
    FOR_THRESHOLDS,
    Cost,
    SharePlan,
    num_branches,
    one_release,
    pricing_delta,
    warn_of_few_units,
    with_price,
    words_with,
)
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy._validate import (
    Adjacency,
    check_delta,
    check_epsilon,
    check_flag,
    check_int,
    check_name,
    check_positive_delta,
    fail,
    is_name,
)
from langchain_dpicl.privacy.accounting.events import ComposedEvent, Event, FailureEvent, PureEvent
from langchain_dpicl.privacy.extensions.value_counts import (
    COUNT_TEMPLATE,
    MAX_THRESHOLD,
    MOST_KEYWORDS,
    Count,
    CountPlan,
    DiscreteLaplaceMechanism,
    UnitValues,
    count_release,
    least_count,
    noise_margin,
    words_of,
)
from langchain_dpicl.privacy.extensions.word_release import (
    PAIR_TEMPLATE,
    WORD_TEMPLATE,
    UnitWords,
    Weight,
    WordRelease,
    denied_words,
    word_release,
)
from langchain_dpicl.privacy.ledger.shares import Reservation, Share
from langchain_dpicl.privacy.ledger.tickets import Ticket, event_of_tickets
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.release.count_release import release_counts, release_words
from langchain_dpicl.release.declare_share import declare_share, share_of_delta
from langchain_dpicl.released.counts import ReleasedCounts, ReleasedWords, WordGroup
from langchain_dpicl.reports.verify import public_words
from langchain_dpicl.runs.door import door
from langchain_dpicl.runs.release_run import OneResult, ReleaseRun, RunCall, RunItem

logger = logging.getLogger(__name__)

# Fraction of the share's delta for the threshold; the noise needs hardly any of it.
_FOR_THRESHOLD = 0.99


class _ModelFreePlan(SharePlan):
    """A plan that depends on no declared size and calls no model."""

    @property
    def sizes(self) -> Mapping[str | None, int]:
        """Nothing."""
        return {}

    def cost(self, *, record_tokens: int = 60) -> Cost:
        """Returns no model use."""
        check_int("record_tokens", record_tokens, low=1)
        return Cost(0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class DiscoveryPlan(_ModelFreePlan):
    """The public plan of one release of counts: the release, its ticket and what it can find.

    Formal guarantees:
      - `tickets()` hold the one ticket of `release`; it is (epsilon, delta)-DP under `release.adjacency`.
    """

    method: ClassVar[str] = "counts"

    release: CountPlan

    @property
    def implementation_delta(self) -> float:
        """Declared gap between ideal and drawn noise: 0, the sampler is exact."""
        return 0.0

    @property
    def threshold(self) -> int | None:
        """Least noisy count that is released; None for declared values."""
        return self.release.mechanism.threshold

    @property
    def threshold_delta(self) -> float:
        """The threshold's part of delta; 0 for declared values."""
        event = self.release.event
        parts = event.events if isinstance(event, ComposedEvent) else ()
        return math.fsum(part.delta for part in parts if isinstance(part, FailureEvent))

    @property
    def deviation(self) -> float:
        """Standard deviation of a count, in units."""
        return self.release.deviation

    def tickets(self) -> tuple[Ticket, ...]:
        """Returns the one ticket of the share."""
        return self.release.tickets()

    def expected(self, confidence: float = 0.95) -> dict[str, float | int | None]:
        """Returns the deviation of a count, and how many units a value needs to be found."""
        return {"deviation": self.deviation, "found_from": self.found_from(confidence)}

    def margin(self, confidence: float) -> int:
        """Returns a bound on how far a noisy count is above (or below) the true one, with probability `confidence`."""
        return noise_margin(self.release.scale, confidence)

    def found_from(self, confidence: float = 0.95) -> int | None:
        """Returns how many units must hold a value to find it with this probability; None for declared values."""
        return None if self.threshold is None else self.threshold + self.margin(confidence)

    def _numbers(self) -> dict[str, Any]:
        return {"counts": self.release.to_dict(), "threshold_delta": self.threshold_delta}

    @classmethod
    def rebuild(cls, shown: Mapping[str, Any]) -> DiscoveryPlan:
        """Returns the plan of the parameters shown, see `SharePlan.rebuild`."""
        return _priced(count_release(shown["counts"]), check_delta(shown["delta"]), shown["dataset_id"])


def _declared(values: Any) -> tuple[str, ...] | None:
    return None if values is None else _listed("values", values)


def _listed(name: str, values: Any) -> tuple[str, ...]:
    """Returns public texts; refuses one text, whose letters would be taken for them."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise fail(name, "a list of texts", values)
    listed = tuple(values)
    if strange := {type(each).__name__ for each in listed if not isinstance(each, str)}:
        raise fail(name, "a list of texts", f"{min(strange)} among them")
    return listed


def plan_discovery(
    field: str | None,
    *,
    values: Sequence[str] | None = None,
    max_values: int = 1,
    fold_case: bool = True,
    epsilon: float | None,
    delta: float,
    adjacency: Adjacency = "add_remove",
    noise_multiplier: float | None = None,
    partition: str = "private-examples",
) -> DiscoveryPlan:
    """Chooses noise and threshold for one release of counts.

    Args:
      field: of the records; None counts units.
      values: the declared values; None: unknown, and values that pass a threshold are found.
      max_values: maximum number of values of one unit.
      fold_case: whether values are compared without case.
      epsilon: target of the calibration, and bound of a given noise.
      delta: the share's delta; for unknown values, most of it goes to the threshold.
      adjacency: neighbouring relation.
      noise_multiplier: scale of the noise over the L1 sensitivity, instead of calibrating.
      partition: the `dataset_id` of the examples.

    Raises:
      ConfigurationError: an argument out of range, or the noise costs more than epsilon.

    >>> plan = plan_discovery("director", epsilon=1.0, delta=1e-6)
    >>> plan.threshold, plan.found_from(0.95)
    (15, 17)
    """
    check_delta(delta)
    declared = _declared(values)
    rule = UnitValues(field, max_values, declared, fold_case)
    is_unknown = field is not None and declared is None
    if is_unknown:
        check_positive_delta(delta)
    failure = delta * _FOR_THRESHOLD if is_unknown else 0.0
    if noise_multiplier is None:
        if epsilon is None:
            raise fail("epsilon, noise_multiplier", "one of them", (None, None))
        noise_multiplier = accounting.calibrate(
            lambda noise: _event(noise, failure), epsilon=check_epsilon(epsilon), delta=delta, adjacency=adjacency
        )
    threshold = None
    if is_unknown:
        scale = DiscreteLaplaceMechanism(noise_multiplier).scale(rule.l1_sensitivity(adjacency))
        # Rounding up the sum of the chances of several values may take one more.
        threshold = 1 + least_count(scale, failure / max_values * (1.0 - 1e-6))
        if threshold > MAX_THRESHOLD:
            raise fail("delta", f"one that a threshold up to {MAX_THRESHOLD} gives", delta, "Ask for less noise.")
    release = CountPlan(rule, DiscreteLaplaceMechanism(noise_multiplier, threshold), adjacency)
    plan = _priced(release, delta, partition)
    if epsilon is not None and plan.epsilon > epsilon:
        raise fail("noise_multiplier", f"one that costs at most epsilon {epsilon:g}", noise_multiplier, "Raise it.")
    return plan


def _priced(release: CountPlan, delta: float, partition: str) -> DiscoveryPlan:
    cost = accounting.epsilon_upper_bound(release.event, delta=delta, adjacency=release.adjacency)
    return DiscoveryPlan(release, partition=partition, epsilon=cost, delta=delta)


def _event(noise_multiplier: float, failure: float) -> Event:
    # The failure event is the probability that a value of one unit alone passes the threshold.
    noisy = PureEvent(1.0 / noise_multiplier)
    return ComposedEvent((noisy, FailureEvent(failure))) if failure else noisy


@tells_how_to_build()
class _Counting(ReleaseRun[Count, ReleasedCounts]):
    """One release of counts for one ticket; a repeated call returns the same counts for free."""

    _PREFIX: ClassVar[str]
    _title = "private counts"
    plan: DiscoveryPlan

    def __init__(self, private: PrivateExamples, *, plan: DiscoveryPlan, share: Share, budget: Budget) -> None:
        self._counted: OneResult[tuple[Count, ...]] = OneResult()
        super().__init__(private, [self._counted], plan=plan, budget=budget, share=share)

    @classmethod
    def _planned(
        cls,
        private: PrivateExamples,
        budget: BudgetLike | None,
        rule: UnitValues,
        *,
        epsilon: float | None,
        noise: Noise | None,
        component: str | None,
    ) -> Self:
        """Plans the noise and declares the share; nothing is spent yet."""
        payer, chosen = resolve_budget(budget), noise_of(noise, Noise)
        if chosen.mechanism is not None:
            advice = "Counts have exact discrete Laplace noise."
            raise fail("noise", "Noise(multiplier=..., delta=...)", f"mechanism {chosen.mechanism!r}", advice)
        plan = plan_discovery(
            rule.name,
            values=rule.declared,
            max_values=rule.max_values,
            fold_case=rule.fold_case,
            epsilon=epsilon,
            delta=share_of_delta(payer, epsilon=epsilon, delta=chosen.delta),
            adjacency=payer.adjacency,
            noise_multiplier=chosen.multiplier,
            partition=private.dataset_id,
        )
        if (needed := plan.found_from()) is not None:
            warn_of_few_units("A value", needed, private.public_size_of(None))
        name = payer.fresh_name(cls._PREFIX) if component is None else component
        share = declare_share(private, payer, plan, component=name, epsilon=epsilon, public=plan.to_dict())
        return cls(private, plan=plan, share=share, budget=payer)

    def _make(self, item: OneResult[tuple[Count, ...]], call: RunCall) -> EffectGenerator[None]:
        yield Blocking(lambda: self._count(item, call))

    def _count(self, item: OneResult[tuple[Count, ...]], call: RunCall) -> None:
        item.ticket = ticket = self.share.reserve(COUNT_TEMPLATE)
        call.events.tickets += 1
        with self._committing(ticket, lambda: item.done):
            item.keep(release_counts(self._private, ticket, plan=self.plan.release))
            ticket.commit()
        call.tick()

    def _examples(self, item: OneResult[tuple[Count, ...]]) -> tuple[Count, ...]:
        return item.value or ()

    def _value(self) -> ReleasedCounts:
        if not self.is_finished:
            raise fail("result", "a run that has released its counts", "one that has not", "Call run() first.")
        report = self.report
        return ReleasedCounts(dict(self._counted.value or ()), report, report["plan"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}(component={self.component!r}, field={self.plan.release.rule.name!r})"


class UnitCounter(_Counting):
    """Counts the units, or those of each declared label or value, under pure differential privacy.

    Every declared value gets a noisy count, also values without units. No model is called. The counts are integers
    with exact discrete noise; `ReleasedCounts.public_size` computes a `public_size=` from them, and
    `ReleasedCounts.redeclare` declares the same units with it.

    Formal guarantees:
      - The counts are (epsilon, delta)-DP for one unit, at the share's epsilon and delta; a unit adds one to at most
        `max_values` counts, chosen from that unit alone.
      - Nothing depends on `public_size`: before the count it may be a rough guess.

    Build it with `from_private_examples`; `run` or `arun` counts once.

    Example:
      >>> from langchain_dpicl import Budget, PrivateExamples, UnitCounter
      >>> tickets = [{"text": "my card was declined", "queue": "card"}] * 400
      >>> private = PrivateExamples(tickets, label_key="queue", labels=("card", "transfer"), public_size=10_000)
      >>> counter = UnitCounter.from_private_examples(private, budget=Budget(epsilon=2.0, delta=1e-6), epsilon=0.5)
      >>> counts = counter.run()
      >>> counts.values, 350 < counts.counts["card"] < 450
      (('card', 'transfer'), True)
      >>> sized = counts.redeclare(private)
      >>> sized.public_size["transfer"] < 50
      True
    """

    _PREFIX = "counts"

    @classmethod
    @door("UnitCounter")
    def from_private_examples(
        cls,
        private: PrivateExamples,
        *,
        field: str | None = None,
        values: Sequence[str] | None = None,
        max_values: int = 1,
        fold_case: bool = True,
        budget: BudgetLike | None = None,
        epsilon: float | None = None,
        noise: Noise | None = None,
        component: str | None = None,
    ) -> Self:
        """Plans the noise and declares the share; nothing is spent yet.

        All parameters are public and must not be chosen by looking at the records.

        Args:
          private: the examples; bound to the budget's ledger here.
          field: the declared field to count; None: the label, or units if there is no label.
          values: every value that may occur; None: the declared labels. Other values are not counted.
          max_values: maximum number of values of one unit; noise grows with it.
          fold_case: whether values are compared without case; labels keep their case.
          budget: a PrivacyBudgetCallbackHandler, a Budget, or a RunnableConfig with a handler; None: the context's.
          epsilon: this component's share of the budget (its noise is calibrated to it).
          noise: a `Noise` without a mechanism: multiplier over the L1 sensitivity, and delta; see there.
          component: name in the ledger; the same name and plan reopen the same share with its ticket, if unused.

        Raises:
          ConfigurationError: a public argument is invalid; nothing was charged.
          PrivacyBudgetError: no budget, a different budget, or too small a budget.
        """
        counted = private.label_key if field is None else _check_field(private, field)
        if counted is not None and counted == private.label_key and values is None:
            # The examples were checked against their labels with their case.
            values, fold_case = private.labels, False
        if counted is not None and values is None:
            advice = "Give values=[...], or find them with ValueDiscovery."
            raise fail("values", f"every value that {counted!r} may have", values, advice)
        if counted is None and values is not None:
            raise fail("field", "the field that holds the values", field)
        rule = UnitValues(counted, max_values, _declared(values), fold_case)
        return cls._planned(private, budget, rule, epsilon=epsilon, noise=noise, component=component)

    afrom_private_examples = awaitable(from_private_examples)


class ValueDiscovery(_Counting):
    """Finds undeclared labels or other values of a field that enough units hold.

    A unit names at most `max_values` values; each value gets a noisy count, and values whose count reaches a threshold
    are released with it. The probability that a value of a single unit passes the threshold is charged as part of the
    share's delta. No model is called.

    Formal guarantees:
      - What is released is (epsilon, delta)-DP for one unit, at the share's epsilon and delta, whatever values there
        are; most values that few units hold are not found.
      - Values are released in a normal form (`normalized`), the largest noisy count first.

    Declare the field among `fields`, with no labels; the found values are labels for `ReleasedCounts.redeclare`.

    Build it with `from_private_examples`; `run` or `arun` releases once.

    Example:
      >>> from langchain_dpicl import Budget, PrivateExamples, ValueDiscovery
      >>> films = [{"text": "who made Tenet?", "director": "Christopher Nolan"}] * 90
      >>> films += [{"text": "who made it?", "director": "somebody's cousin"}]
      >>> private = PrivateExamples(films, fields=("director",), public_size=10_000)
      >>> finder = ValueDiscovery.from_private_examples(
      ...     private, field="director", budget=Budget(epsilon=2.0, delta=1e-6), epsilon=1.0
      ... )
      >>> finder.plan.threshold
      16
      >>> found = finder.run()
      >>> found.values
      ('christopher nolan',)
      >>> found.redeclare(private).labels
      ('christopher nolan',)
    """

    _PREFIX = "discovery"

    @classmethod
    @door("ValueDiscovery")
    def from_private_examples(
        cls,
        private: PrivateExamples,
        *,
        field: str,
        max_values: int = 1,
        fold_case: bool = True,
        budget: BudgetLike | None = None,
        epsilon: float | None = None,
        noise: Noise | None = None,
        component: str | None = None,
    ) -> Self:
        """Plans noise and threshold and declares the share; nothing is spent yet.

        All parameters are public and must not be chosen by looking at the records.

        Args:
          private: the examples; bound to the budget's ledger here.
          field: a declared field that is not the label.
          max_values: maximum number of values of one unit, its most frequent ones; noise and threshold grow with it.
          fold_case: whether values are compared without case.
          budget: a PrivacyBudgetCallbackHandler, a Budget, or a RunnableConfig with a handler; None: the context's.
          epsilon: this component's share of the budget (its noise is calibrated to it).
          noise: a `Noise` without a mechanism: multiplier over the L1 sensitivity, and delta, most of which goes to the
            threshold; see there.
          component: name in the ledger; the same name and plan reopen the same share with its ticket, if unused.

        Raises:
          ConfigurationError: a public argument is invalid; nothing was charged.
          PrivacyBudgetError: no budget, a different budget, or too small a budget.
        """
        if _check_field(private, field) == private.label_key:
            advice = "Its labels are declared; to find them, declare the field among `fields` and no labels."
            raise fail("field", "a field whose values are not declared", field, advice)
        rule = UnitValues(field, max_values, None, fold_case)
        return cls._planned(private, budget, rule, epsilon=epsilon, noise=noise, component=component)

    afrom_private_examples = awaitable(from_private_examples)


def _check_field(private: PrivateExamples, field: Any) -> str:
    if field not in private.fields:
        raise fail("field", f"one of the declared fields {list(private.fields)}", field)
    return str(field)


_FEWEST_LETTERS = 3
_SHORTEST = 4
"""Length of a token of the embedded model above which it counts as a word: shorter ones are mostly pieces of words."""


def public_vocabulary(
    texts: Sequence[str] | None = None, *, size: int = 1_000, stop_words: Iterable[str] = STOP_WORDS
) -> tuple[str, ...]:
    """Returns words of PUBLIC texts, the most frequent first.

    Never pass private texts, nor texts that were chosen by looking at private ones: no noise is added. Good public
    texts are of the same domain: help pages, a product catalogue, titles of a public corpus, answers of a model that
    saw no records.

    Args:
      texts: public texts; a word counts once in each, numbers and words of one or two letters not at all. Review
        the list: frequent words ("said", "Monday") are often not topics. None: the words of the embedded model, which
        was trained on public text of many domains (docs/embedded-model.md).
      size: maximum number of words.
      stop_words: words to leave out; English ones by default.

    Raises:
      ConfigurationError: no word is left, `size` is out of range, or `stop_words` is no list.

    >>> public_vocabulary(["The card was lost", "a lost phone"], size=2)
    ('lost', 'phone')
    >>> len(public_vocabulary(size=500))
    500
    """
    check_int("size", size, low=1, high=MOST_KEYWORDS)
    left_out = {word for entry in _listed("stop_words", stop_words) for word in words_of(entry)}
    if texts is not None:
        pages = _listed("texts", texts)
        # Cut as records are in which they are looked for, but for soft hyphens, which are marks of a page's layout.
        counts = Counter(word for page in pages for word in set(words_of(page.replace("\u00ad", ""))))
        found = [word for word in counts.keys() - left_out if _says_something(word)]
        if not found:
            raise fail(
                "texts", "texts with words of at least three letters that are not stop words", f"{len(pages)} without"
            )
        return tuple(sorted(found, key=lambda word: (-counts[word], -len(word), word))[:size])
    tables = load_tables()
    # The embedded model's tokens that begin with a blank are whole words; unigram counts rank them.
    pieces = (token.decode("utf-8", "ignore") for token in tables.token_bytes)
    words = {
        piece[1:]: float(tables.unigram[place])
        for place, piece in enumerate(pieces)
        if piece.startswith(" ") and piece[1:].isalpha() and piece.islower() and len(piece) > _SHORTEST
    }
    ranked = sorted(words.keys() - left_out, key=lambda word: (-words[word], word))
    return tuple(ranked[:size])


def _says_something(word: str) -> bool:
    is_short = word.isascii() and len(word) < _FEWEST_LETTERS
    return not is_short and is_name(word) and any(letter.isalpha() for letter in word)


@dataclass(frozen=True, slots=True)
class WordsPlan(_ModelFreePlan):
    """The public plan of a release of words: releases, tickets and what they can find.

    Formal guarantees:
      - `tickets()` hold one release of words for each label, or one for all units, and as many of pairs where `pairs`
        is not None; together they are (epsilon, delta)-DP under `release.adjacency`.

    Attributes:
      release: what a unit casts, noise and threshold, of words.
      pairs: the same of pairs of released words; None: no pairs.
      labels: the labels that split the units; none: all units together.
    """

    method: ClassVar[str] = "words"

    release: WordRelease
    pairs: WordRelease | None
    labels: tuple[str, ...]

    @property
    def implementation_delta(self) -> float:
        """Declared gap between ideal and drawn noise over the releases that one unit takes part in."""
        rounds = sum(one.implementation_delta for one in (self.release, self.pairs) if one is not None)
        return rounds * num_branches(len(self.labels), self.release.adjacency)

    @property
    def threshold(self) -> float:
        """Least noisy sum of weights that is released."""
        return self.release.mechanism.threshold

    def tickets(self) -> tuple[Ticket, ...]:
        """Returns the tickets of the share: words, and pairs if there are any, of each label."""
        named = ((WORD_TEMPLATE, self.release), (PAIR_TEMPLATE, self.pairs))
        return tuple(
            Ticket(template=template, event=release.event, label=label, refundable=True)
            for label in self.labels or (None,)
            for template, release in named
            if release is not None
        )

    def found_from(self, confidence: float = 0.95) -> int:
        """Returns how many units must cast a word, among as many as they may, to find it with this probability."""
        return self.release.found_from(confidence)

    def expected(self, confidence: float = 0.95) -> dict[str, float]:
        """Returns the deviation of a sum of weights, and how many units a word needs to be found."""
        return {"deviation": self.release.scale, "found_from": self.found_from(confidence)}

    def _numbers(self) -> dict[str, Any]:
        return {
            "words": self.release.to_dict(),
            "pairs": None if self.pairs is None else self.pairs.to_dict(),
            "labels": list(self.labels),
        }

    @classmethod
    def rebuild(cls, shown: Mapping[str, Any]) -> WordsPlan:
        """Returns the plan of the parameters shown, see `SharePlan.rebuild`."""
        words, pairs = word_release(shown["words"]), shown["pairs"]
        second = None if pairs is None else word_release(pairs)
        if not isinstance(words.rule, UnitWords):
            raise fail("words", "a release of words", words.rule.kind)
        if second is not None and second != words.for_pairs():
            raise fail("pairs", f"the noise, threshold and field of the words: {words.for_pairs().to_dict()}", pairs)
        labels = tuple(check_name("label", label) for label in shown["labels"])
        terms = {"partition": shown["dataset_id"], "delta": check_delta(shown["delta"])}
        return with_price(cls(words, second, labels, epsilon=0.0, **terms))


def plan_words(
    field: str = "text",
    *,
    max_values: int = 8,
    deny: Iterable[str] = (),
    pairs: bool = False,
    labels: Sequence[str] = (),
    epsilon: float | None,
    delta: float,
    adjacency: Adjacency = "add_remove",
    noise_multiplier: float | None = None,
    partition: str = "private-examples",
) -> WordsPlan:
    """Chooses noise and threshold for one release of words, and one of pairs if asked for.

    Args:
      field: of the records that holds the text.
      max_values: most words that a unit casts, and most pairs.
      deny: public words that are never released.
      pairs: whether pairs of released words that are neighbours are released too.
      labels: that split the units; none: all units together.
      epsilon: target of the calibration, and bound of a given noise.
      delta: the share's delta; half of it goes to the thresholds.
      adjacency: neighbouring relation.
      noise_multiplier: standard deviation of the noise over the L2 sensitivity, instead of calibrating.
      partition: the `dataset_id` of the examples.

    Raises:
      ConfigurationError: an argument out of range, or the noise costs more than epsilon.

    >>> plan = plan_words(epsilon=1.0, delta=1e-6)
    >>> plan.found_from(0.95), plan_words(epsilon=2.0, delta=1e-6).found_from(0.95)
    (87, 47)
    """
    check_positive_delta(delta)
    check_flag("pairs", pairs)
    rule = UnitWords(field, max_values, denied_words(deny), public_words().digest)
    split = tuple(check_name("label", label) for label in _listed("labels", labels))
    rounds = 2 if pairs else 1
    failure = delta * FOR_THRESHOLDS / rounds / num_branches(len(split), adjacency)

    def planned(noise: float) -> WordsPlan:
        release = words_with(rule, noise, failure, adjacency)
        second = release.for_pairs() if pairs else None
        return WordsPlan(release, second, split, partition=partition, epsilon=0.0, delta=delta)

    if noise_multiplier is None:
        if epsilon is None:
            raise fail("epsilon, noise_multiplier", "one of them", (None, None))
        tickets = planned(1.0).tickets()

        def event(noise: float) -> Any:
            one = one_release(noise, failure)
            return event_of_tickets([dataclasses.replace(each, event=one) for each in tickets], partition=partition)

        noise_multiplier = accounting.calibrate(
            event, epsilon=check_epsilon(epsilon), delta=pricing_delta(planned(1.0)), adjacency=adjacency
        )
    plan = with_price(planned(noise_multiplier))
    if epsilon is not None and plan.epsilon > epsilon:
        raise fail("noise_multiplier", f"one that costs at most epsilon {epsilon:g}", noise_multiplier, "Raise it.")
    return plan


@dataclass(slots=True)
class _Label(RunItem):
    """What is released of one label, or of all units, and the ticket that pays for the release that runs now."""

    label: str | None
    words: tuple[Weight, ...] | None = None
    pairs: tuple[Weight, ...] | None = None

    @property
    def is_lost(self) -> bool:
        """Whether its last ticket burnt and has no result: an error or a stop came between, and no ticket is left."""
        if self.ticket is None or not self.ticket.uncommitted:
            return False
        return (self.words if self.ticket.template == WORD_TEMPLATE else self.pairs) is None


@tells_how_to_build()
class WordDiscovery(ReleaseRun[Weight, ReleasedWords]):
    """Finds words that many units write, and pairs of them.

    A unit casts at most `max_values` words of its texts: those that public text expects least. Each word gets the sum
    of the units' weights with Gaussian noise, and words whose sum reaches a threshold are released with it. The
    probability that a word of a single unit passes the threshold is charged as part of the share's delta. Where the
    examples have labels, each label has a release of its own, for the price of one. No model is called.

    Formal guarantees:
      - What is released is (epsilon, delta)-DP for one unit, at the share's epsilon and delta, whatever words there
        are; most words that few units write are not found.
      - Which words a unit casts depends on that unit, on public lists, and on nothing that other units hold.

    What many people write is released unchanged, names too, and nothing promises that a released word has a least
    number of writers. Declare `unit_key` where one person wrote several records, and read the words before you send
    them on.

    Build it with `from_private_examples`; `run` or `arun` releases once. After an error or Ctrl-C, `result` holds what
    was released, and `run` makes the rest; what a ticket was burnt for without a result stays empty. A label whose
    ticket another process used or holds has no words here; `run` asks for it again, and `is_finished` stays False.

    Example:
      >>> from langchain_dpicl import Budget, PrivateExamples, WordDiscovery
      >>> notes = ["the velda hums at night"] * 400 + ["my secret is xyzzy"]
      >>> private = PrivateExamples(notes, public_size=10_000)
      >>> finder = WordDiscovery.from_private_examples(private, budget=Budget(epsilon=2.0, delta=1e-6), epsilon=1.0)
      >>> finder.plan.found_from(0.95)
      91
      >>> sorted(finder.run().words)
      ['hums', 'night', 'velda']
    """

    _title = "private words"
    _item_name = "label"
    plan: WordsPlan

    def __init__(self, private: PrivateExamples, *, plan: WordsPlan, share: Share, budget: Budget) -> None:
        items = [_Label(label) for label in plan.labels or (None,)]
        self._told: set[tuple[str, str | None]] = set()
        super().__init__(private, items, plan=plan, budget=budget, share=share)

    @classmethod
    @door("WordDiscovery")
    def from_private_examples(
        cls,
        private: PrivateExamples,
        *,
        field: str | None = None,
        max_values: int = 8,
        deny: Iterable[str] = (),
        pairs: bool = False,
        budget: BudgetLike | None = None,
        epsilon: float | None = None,
        noise: Noise | None = None,
        component: str | None = None,
    ) -> Self:
        """Plans noise and threshold and declares the share; nothing is spent yet.

        All parameters are public and must not be chosen by looking at the records.

        Args:
          private: the examples; bound to the budget's ledger here. Their labels, if any, split the release.
          field: the declared field that holds the text; None: the text.
          max_values: most words that a unit casts. Fewer words need fewer units each; more are for breadth, such as 32.
          deny: public words that are never released; each entry stands for all its words.
          pairs: whether a second release finds pairs of released words that are neighbours: with them, two attributes
            that have the same values can be distinguished. It shares epsilon and delta with the first.
          budget: a PrivacyBudgetCallbackHandler, a Budget, or a RunnableConfig with a handler; None: the context's.
          epsilon: this component's share of the budget (its noise is calibrated to it).
          noise: a `Noise` without a mechanism: multiplier over the L2 sensitivity, and delta, half of which goes to the
            thresholds; see there.
          component: name in the ledger; the same name and plan reopen the same share with its tickets, if unused.
            A label whose ticket another process used or holds has no words here.

        Raises:
          ConfigurationError: a public argument is invalid; nothing was charged.
          PrivacyBudgetError: no budget, a different budget, or too small a budget.
        """
        name = private.text_key if field is None else field
        if name not in private.fields or name == private.label_key:
            raise fail("field", f"a declared field with text, of {list(private.fields)}", field)
        payer, chosen = resolve_budget(budget), noise_of(noise, Noise)
        if chosen.mechanism is not None:
            raise fail(
                "noise", "Noise(multiplier=..., delta=...)", f"mechanism {chosen.mechanism!r}", "It is Gaussian."
            )
        plan = plan_words(
            name,
            max_values=max_values,
            deny=deny,
            pairs=pairs,
            labels=private.labels or () if private.label_key is not None else (),
            epsilon=epsilon,
            delta=share_of_delta(payer, epsilon=epsilon, delta=chosen.delta),
            adjacency=payer.adjacency,
            noise_multiplier=chosen.multiplier,
            partition=private.dataset_id,
        )
        size = private.public_size
        most = size if isinstance(size, int) else max(size.values())
        what = "A word of a label" if plan.labels else "A word"
        warn_of_few_units(what, plan.found_from(), most, among=max_values)
        called = payer.fresh_name("words") if component is None else component
        share = declare_share(private, payer, plan, component=called, epsilon=epsilon, public=plan.to_dict())
        return cls(private, plan=plan, share=share, budget=payer)

    afrom_private_examples = awaitable(from_private_examples)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _make(self, item: _Label, call: RunCall) -> EffectGenerator[None]:
        yield Blocking(lambda: self._release(item, call))

    def _release(self, item: _Label, call: RunCall) -> None:
        """Releases the words of a label, and its pairs, each once; what an earlier call released or lost stays so."""
        if item.words is None and (self._is_left(item, WORD_TEMPLATE) or self._ends_empty(item)):
            ticket = self._ticket(item, WORD_TEMPLATE, call)
            item.words = release_words(self._private, ticket, plan=self.plan.release, known=public_words())
        self._commit(item)
        if (
            self.plan.pairs is not None
            and item.words is not None
            and item.pairs is None
            and self._is_left(item, PAIR_TEMPLATE)
        ):
            ticket, known = self._ticket(item, PAIR_TEMPLATE, call), tuple(word for word, _ in item.words)
            item.pairs = release_words(self._private, ticket, plan=self.plan.pairs, known=known)
        self._commit(item)
        item.done = item.words is not None or item.is_lost  # otherwise its ticket may come back
        call.tick()

    def _check_end(self) -> None:
        """Says once of which labels the words, or the pairs, are left out."""
        for item in self._items:
            template = WORD_TEMPLATE if item.words is None else PAIR_TEMPLATE
            is_left_out = item.words is None or (self.plan.pairs is not None and item.pairs is None)
            if is_left_out and (template, item.label) not in self._told:
                self._told.add((template, item.label))
                whose = "" if item.label is None else f" ({item.label})"
                said = "%s: the %s%s are left out: their ticket was lost, or taken by another run."
                logger.warning(said, self.component, template, whose)  # an error would lose what is paid for

    def _is_left(self, item: _Label, template: str) -> bool:
        """Whether a label's ticket is unused: a process that ended may have used it, or lost what it paid for."""
        return not item.is_lost and self.share.remaining(template, label=item.label) > 0

    def _ends_empty(self, item: _Label) -> bool:
        """Whether a label is the last one to ask and no label has words: then the ledger refuses and says why."""
        last = next((one for one in reversed(self._items) if not one.done and not one.is_lost), None)
        return item is last and all(one.words is None for one in self._items)

    def _ticket(self, item: _Label, template: str, call: RunCall) -> Reservation:
        item.ticket = ticket = self.share.reserve(template, label=item.label)
        call.events.tickets += 1
        return ticket

    @staticmethod
    def _commit(item: _Label) -> None:
        if item.ticket is not None and item.ticket.uncommitted and not item.is_lost:
            item.ticket.commit()

    def _examples(self, item: _Label) -> tuple[Weight, ...]:
        return item.words or ()

    def _value(self) -> ReleasedWords:
        if all(item.words is None for item in self._items):
            if self.is_finished:
                raise tickets_missing(self.component, len(self._items))
            raise fail("result", "a run that has released words", "one that has not", "Call run() first.")
        groups = tuple(WordGroup(item.label, item.words or (), item.pairs or ()) for item in self._items)
        report = self.report
        return ReleasedWords(groups, report, report["plan"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}(component={self.component!r}, field={self.plan.release.rule.name!r})"


__all__ = [
    "UnitCounter",
    "ValueDiscovery",
    "WordDiscovery",
    "plan_discovery",
    "plan_words",
    "public_vocabulary",
]
