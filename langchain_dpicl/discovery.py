"""UnitCounter and ValueDiscovery: noisy counts of declared values, and discovery of undeclared ones."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from langchain_dpicl._constructing import tells_how_to_build
from langchain_dpicl._runs import report_of
from langchain_dpicl.backends.aside import aside
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.callbacks import resolve_budget
from langchain_dpicl.declaring import declare_share, share_of_delta
from langchain_dpicl.discovery_planning import DiscoveryPlan, plan_discovery
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.privacy.examples import PrivateExamples
from langchain_dpicl.privacy.extensions.count_histograms import COUNT_TEMPLATE, Count
from langchain_dpicl.privacy.shares import Share, Uncopyable
from langchain_dpicl.release.count_release import release_counts
from langchain_dpicl.released_counts import ReleasedCounts
from langchain_dpicl.run_events import RunEvents, tells_refusals


@tells_how_to_build()
class _Counting(Uncopyable):
    """One release of counts for one ticket; a repeated call returns the same counts for free."""

    _PREFIX: ClassVar[str]

    def __init__(self, private: PrivateExamples, *, plan: DiscoveryPlan, share: Share, budget: Budget) -> None:
        self._private = private
        self.plan = plan
        self.share = share
        self.budget = budget
        self._lock = threading.Lock()
        self._counts: tuple[Count, ...] | None = None

    @classmethod
    def _made(
        cls,
        private: PrivateExamples,
        budget: Budget,
        counted: Mapping[str, Any],
        *,
        epsilon: float | None,
        delta: float | None,
        name: str | None,
    ) -> Self:
        """Plans the noise and declares the share; nothing is spent yet."""
        plan = plan_discovery(
            **counted,
            epsilon=epsilon,
            delta=share_of_delta(budget, epsilon=epsilon, delta=delta),
            adjacency=budget.adjacency,
            partition=private.dataset_id,
        )
        name = budget.fresh_name(cls._PREFIX) if name is None else name
        share = declare_share(private, budget, plan, component=name, epsilon=epsilon, public=plan.to_dict())
        return cls(private, plan=plan, share=share, budget=budget)

    def run(self) -> ReleasedCounts:
        """Counts and releases once; later calls return the released counts for free.

        Formal guarantees:
          - The ticket is reserved durably and burnt before a record is read; it stays spent after any later error.

        Raises:
          PrivacyBudgetError: the share does not fit, or another process has used its ticket.
          LedgerError: the ledger cannot be read or written; nothing is granted. Released counts are kept.
          ModelCallError: the counts could not be computed; the ticket stays burnt.
        """
        with self._events() as events:
            self._count(events)
        return self._shown()

    async def arun(self) -> ReleasedCounts:
        """Async version of `run`: the ledger and the records are read in a thread."""
        async with self._events() as events:
            await aside(lambda: self._count(events))
        return await aside(self._shown, is_slow=self.budget.durable)

    def _events(self) -> RunEvents:
        return RunEvents(type(self).__name__, budget=self.budget, share=self.share)

    def _count(self, events: RunEvents) -> None:
        """Releases the counts once; concurrent callers wait."""
        with self._lock:
            if self._counts is not None:
                return
            ticket = self.share.reserve(COUNT_TEMPLATE)
            events.tickets += 1
            try:
                self._counts = release_counts(self._private, ticket, plan=self.plan.release)
                ticket.commit()
            finally:
                events.tickets -= ticket.give_back()  # unburnt tickets only

    def _shown(self) -> ReleasedCounts:
        names = {"dataset_id": self.plan.partition, "ledger_id": self.budget.ledger_id}
        report = report_of(self.budget, self.share, **names)
        return ReleasedCounts(dict(self._counts or ()), report, self.plan.to_dict())

    def __repr__(self) -> str:
        return f"{type(self).__name__}(component={self.share.component!r}, field={self.plan.release.rule.name!r})"


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
    @tells_refusals("UnitCounter")
    def from_private_examples(
        cls,
        private: PrivateExamples,
        *,
        field: str | None = None,
        values: Sequence[str] | None = None,
        max_values: int = 1,
        fold_case: bool = True,
        budget: Any = None,
        config: Any = None,
        epsilon: float | None = None,
        delta: float | None = None,
        noise_multiplier: float | None = None,
        component: str | None = None,
    ) -> UnitCounter:
        """Plans the noise and declares the share; nothing is spent yet.

        All parameters are public and must not be chosen by looking at the records.

        Args:
          private: the examples; bound to the budget's ledger here.
          field: the declared field to count; None: the label, or units if there is no label.
          values: every value that may occur; None: the declared labels. Other values are not counted.
          max_values: maximum number of values of one unit; noise grows with it.
          fold_case: whether values are compared without case; labels keep their case.
          budget: a PrivacyBudgetCallbackHandler or Budget; otherwise looked up in `config`, then in the context.
          config: a RunnableConfig whose callbacks may hold the budget.
          epsilon: this component's share of the budget (its noise is calibrated to it).
          delta: the share's delta; by default in proportion to epsilon.
          noise_multiplier: scale of the noise over the L1 sensitivity, instead of calibrating.
          component: name in the ledger; the same name and plan reopen the same share with its ticket, if unused.

        Raises:
          ConfigurationError: a public argument is invalid; nothing was charged.
          PrivacyBudgetError: no budget, a different budget, or too small a budget.
        """
        counted = private.label_key if field is None else _known_field(private, field)
        is_label = counted is not None and counted == private.label_key
        if is_label and values is None:
            # Declared labels are compared exactly, as the examples were checked against them.
            values, fold_case = private.labels, False
        if counted is not None and values is None:
            advice = "Give values=[...], or find them with ValueDiscovery."
            raise fail("values", f"every value that {counted!r} may have", values, advice)
        if counted is None and values is not None:
            raise fail("field", "the field that holds the values", field)
        what: dict[str, Any] = {"field": counted, "values": values, "max_values": max_values, "fold_case": fold_case}
        what["noise_multiplier"] = noise_multiplier
        return cls._made(private, resolve_budget(budget, config), what, epsilon=epsilon, delta=delta, name=component)

    @classmethod
    async def afrom_private_examples(cls, private: PrivateExamples, **options: Any) -> UnitCounter:
        """Async version of `from_private_examples`: calibration and ledger calls run in a thread."""
        return await asyncio.to_thread(cls.from_private_examples, private, **options)


class ValueDiscovery(_Counting):
    """Finds undeclared labels or other values of a field that enough units hold.

    A unit names at most `max_values` values; each value gets a noisy count, and values whose count reaches a threshold
    are released with it. The probability that a value of a single unit passes the threshold is charged as part of the
    share's delta. No model is called.

    Formal guarantees:
      - What is released is (epsilon, delta)-DP for one unit, at the share's epsilon and delta, whatever values there
        are; most values that few units hold are not found.
      - Values are released in a normal form (`privacy.units.normalized`), the largest noisy count first.

    Declare the field among `fields`, with no labels; the found values are labels for `ReleasedCounts.redeclare`.

    Build it with `from_private_examples`; `run` or `arun` releases once.

    Example:
      >>> from langchain_dpicl import Budget, PrivateExamples, ValueDiscovery
      >>> films = [{"text": "who made Tenet?", "director": "Christopher Nolan"}] * 90
      >>> films += [{"text": "who made it?", "director": "somebody's cousin"}]
      >>> private = PrivateExamples(films, fields=("director",), public_size=10_000)
      >>> finder = ValueDiscovery.from_private_examples(
      ...     private, "director", budget=Budget(epsilon=2.0, delta=1e-6), epsilon=1.0
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
    @tells_refusals("ValueDiscovery")
    def from_private_examples(
        cls,
        private: PrivateExamples,
        field: str,
        *,
        max_values: int = 1,
        fold_case: bool = True,
        budget: Any = None,
        config: Any = None,
        epsilon: float | None = None,
        delta: float | None = None,
        noise_multiplier: float | None = None,
        component: str | None = None,
    ) -> ValueDiscovery:
        """Plans noise and threshold and declares the share; nothing is spent yet.

        All parameters are public and must not be chosen by looking at the records.

        Args:
          private: the examples; bound to the budget's ledger here.
          field: a declared field that is not the label.
          max_values: maximum number of values of one unit, its most frequent ones; noise and threshold grow with it.
          fold_case: whether values are compared without case.
          budget: a PrivacyBudgetCallbackHandler or Budget; otherwise looked up in `config`, then in the context.
          config: a RunnableConfig whose callbacks may hold the budget.
          epsilon: this component's share of the budget (its noise is calibrated to it).
          delta: the share's delta, most of which goes to the threshold; by default in proportion to epsilon.
          noise_multiplier: scale of the noise over the L1 sensitivity, instead of calibrating.
          component: name in the ledger; the same name and plan reopen the same share with its ticket, if unused.

        Raises:
          ConfigurationError: a public argument is invalid; nothing was charged.
          PrivacyBudgetError: no budget, a different budget, or too small a budget.
        """
        if _known_field(private, field) == private.label_key:
            advice = "Its labels are declared; to find them, declare the field among `fields` and no labels."
            raise fail("field", "a field whose values are not declared", field, advice)
        what: dict[str, Any] = {"field": field, "values": None, "max_values": max_values, "fold_case": fold_case}
        what["noise_multiplier"] = noise_multiplier
        return cls._made(private, resolve_budget(budget, config), what, epsilon=epsilon, delta=delta, name=component)

    @classmethod
    async def afrom_private_examples(cls, private: PrivateExamples, field: str, **options: Any) -> ValueDiscovery:
        """Async version of `from_private_examples`: calibration and ledger calls run in a thread."""
        return await asyncio.to_thread(cls.from_private_examples, private, field, **options)


def _known_field(private: PrivateExamples, field: Any) -> str:
    if field not in private.fields:
        raise fail("field", f"one of the declared fields {list(private.fields)}", field)
    return str(field)
