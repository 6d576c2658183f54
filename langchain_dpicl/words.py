"""WordDiscovery: finds words that many units write, by label where labels split the units; its plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from langchain_dpicl._construction import awaitable, tells_how_to_build
from langchain_dpicl.backends.sync_async import Blocking, EffectGenerator
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.budget.events import RunEvents
from langchain_dpicl.budget.handler import BudgetLike, resolve_budget
from langchain_dpicl.exceptions import PrivacyBudgetExceededError
from langchain_dpicl.options.rows import Noise, noise_of
from langchain_dpicl.planning.share_plan import Cost, SharePlan, pricing_delta, with_price
from langchain_dpicl.planning.word_share import FOR_THRESHOLDS, num_branches, one_release, words_with
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy._validate import (
    Adjacency,
    check_delta,
    check_epsilon,
    check_int,
    check_positive_delta,
    fail,
)
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.privacy.extensions.word_release import (
    PAIR_TEMPLATE,
    WORD_TEMPLATE,
    UnitWords,
    Weight,
    WordRelease,
    denied_words,
    word_release,
)
from langchain_dpicl.privacy.ledger.amounts import check_name
from langchain_dpicl.privacy.ledger.shares import Reservation, Share
from langchain_dpicl.privacy.ledger.tickets import Ticket, event_of_tickets
from langchain_dpicl.release.count_release import release_words
from langchain_dpicl.release.declare_share import declare_share, share_of_delta
from langchain_dpicl.released.words import ReleasedWords, WordGroup
from langchain_dpicl.reports.public_words import public_words
from langchain_dpicl.runs.door import door
from langchain_dpicl.runs.release_run import ReleaseRun, RunCall


@dataclass(frozen=True, slots=True)
class WordsPlan(SharePlan):
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
    def sizes(self) -> Mapping[str | None, int]:
        """Nothing: words depend on no declared size."""
        return {}

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

    def cost(self, *, record_tokens: int = 60) -> Cost:
        """Returns no model use: a release of words calls no model."""
        check_int("record_tokens", record_tokens, low=1)
        return Cost(0, 0, 0, 0)

    def found_from(self, confidence: float = 0.95) -> int:
        """Returns how many units must cast a word, among as many as they may, to find it with this probability.

        Args:
          confidence: in (0, 1).

        Raises:
          ConfigurationError: `confidence` out of range.
        """
        return self.release.found_from(confidence)

    def expected(self, confidence: float = 0.95) -> dict[str, float]:
        """Returns the deviation of a sum of weights, and how many units a word needs to be found.

        Args:
          confidence: probability of finding it, in (0, 1).
        """
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
    if not isinstance(pairs, bool):
        raise fail("pairs", "True or False", pairs)
    rule = UnitWords(field, max_values, denied_words(deny), public_words().digest)
    split = tuple(check_name("label", label) for label in labels)
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
class _Label:
    """What is released of one label, or of all units, and the ticket that pays for the release that runs now."""

    label: str | None
    words: tuple[Weight, ...] | None = None
    pairs: tuple[Weight, ...] | None = None
    ticket: Reservation | None = None
    done: bool = False
    busy: bool = False

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
    was released, and `run` makes the rest; what a ticket was burnt for without a result stays empty.

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
        called = payer.fresh_name("words") if component is None else component
        share = declare_share(private, payer, plan, component=called, epsilon=epsilon, public=plan.to_dict())
        return cls(private, plan=plan, share=share, budget=payer)

    afrom_private_examples = awaitable(from_private_examples)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _make(self, item: _Label, call: RunCall) -> EffectGenerator[None]:
        yield Blocking(lambda: self._release(item, call))

    def _release(self, item: _Label, call: RunCall) -> None:
        """Releases the words of a label, and its pairs, each once; what an earlier call released or lost stays so."""
        if item.words is None and not item.is_lost:
            ticket = self._ticket(item, WORD_TEMPLATE, call)
            item.words = release_words(self._private, ticket, plan=self.plan.release, known=public_words())
        self._commit(item)
        if self.plan.pairs is not None and item.words is not None and item.pairs is None and not item.is_lost:
            ticket, known = self._ticket(item, PAIR_TEMPLATE, call), tuple(word for word, _ in item.words)
            item.pairs = release_words(self._private, ticket, plan=self.plan.pairs, known=known)
        self._commit(item)
        item.done = True
        call.tick()

    def _ticket(self, item: _Label, template: str, call: RunCall) -> Reservation:
        item.ticket = ticket = self.share.reserve(template, label=item.label)
        call.events.tickets += 1
        return ticket

    @staticmethod
    def _commit(item: _Label) -> None:
        if item.ticket is not None and item.ticket.uncommitted and not item.is_lost:
            item.ticket.commit()

    def _give_back(self, item: _Label, events: RunEvents) -> None:
        if item.ticket is not None:
            events.tickets -= item.ticket.give_back()  # an unburnt ticket only

    def _examples(self, item: _Label) -> tuple[Weight, ...]:
        return item.words or ()

    def _value(self) -> ReleasedWords:
        if all(item.words is None for item in self._items):
            if self.is_finished:
                msg = f"{self.component!r}: its tickets burnt without a result. Declare another component."
                raise PrivacyBudgetExceededError(msg, requested=1, remaining=0)
            raise fail("result", "a run that has released words", "one that has not", "Call run() first.")
        groups = tuple(WordGroup(item.label, item.words or (), item.pairs or ()) for item in self._items)
        return ReleasedWords(groups, self.report, self.plan.to_dict())

    def __repr__(self) -> str:
        return f"{type(self).__name__}(component={self.component!r}, field={self.plan.release.rule.name!r})"


__all__ = ["WordDiscovery", "plan_words"]
