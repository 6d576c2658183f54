"""The public plan of a share: what a component releases, what it is charged and costs, and what words take of it."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from langchain_dpicl._calls import warn_caller
from langchain_dpicl.exceptions import ConfigurationError, NoisyPlanWarning
from langchain_dpicl.options import html_table
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy._validate import (
    NEEDS_DELTA,
    Adjacency,
    check_epsilon,
    check_int,
    check_positive,
    check_real,
    effective_delta,
    fail,
)
from langchain_dpicl.privacy.accounting.events import ComposedEvent, Event, FailureEvent, GaussianEvent
from langchain_dpicl.privacy.extensions.word_release import (
    FIRST_WORDS_TEMPLATE,
    ThresholdedGaussianMechanism,
    UnitWords,
    WordRelease,
    least_threshold,
)
from langchain_dpicl.privacy.ledger.tickets import Ticket, event_of_tickets
from langchain_dpicl.reports.verify import public_words


@dataclass(frozen=True, slots=True)
class Cost:
    """Expected model use, from public caps.

    Attributes:
      private_calls: next-token calls on private prompts; of training, gradients of single examples.
      public_calls: next-token calls on the public prompt.
      tokens_in: prompt tokens, every call counted in full.
      tokens_out: one per call.
    """

    private_calls: int
    public_calls: int
    tokens_in: int
    tokens_out: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.private_calls + other.private_calls,
            self.public_calls + other.public_calls,
            self.tokens_in + other.tokens_in,
            self.tokens_out + other.tokens_out,
        )

    def money(self, *, price_in: float, price_out: float) -> float:
        """Returns the price, given prices per million tokens."""
        check_real("price_in", price_in, low=0.0)
        check_real("price_out", price_out, low=0.0)
        return (self.tokens_in * price_in + self.tokens_out * price_out) / 1e6


def check_counts(**counts: int) -> None:
    """Checks numbers of tokens, calls or queries, each at least 1."""
    for name, count in counts.items():
        check_int(name, count, low=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharePlan(ABC):
    """Base of the plans of all methods: what will run, what it is charged and what it will cost, in public numbers.

    Formal guarantees:
      - `tickets()` are what the share is charged for; together they are (epsilon, delta)-DP under `adjacency`, the
        declared gap of the noise included.
      - `type(plan).rebuild(plan.to_dict())` shows the same and has the same tickets.

    Attributes:
      partition: the `dataset_id` of the examples, whose units the labels split.
      epsilon: upper bound of everything that the plan releases, at `delta`.
      delta: the share's delta, the declared gap of the noise included.
    """

    method: ClassVar[str]
    """The name by which a plan that is shown is rebuilt."""

    partition: str
    epsilon: float
    delta: float

    if TYPE_CHECKING:  # a field of most plans, a property of the others

        @property
        def release(self) -> Any:
            """The plan of one release; of the first label if labels split the units."""

    @property
    def adjacency(self) -> Adjacency:
        """The neighbouring relation."""
        adjacency: Adjacency = self.release.adjacency
        return adjacency

    @property
    def noise_multiplier(self) -> float:
        """Noise scale over sensitivity."""
        return float(self.release.mechanism.noise_multiplier)

    @property
    @abstractmethod
    def sizes(self) -> Mapping[str | None, int]:
        """Declared units by label; of None where labels do not split them; empty if the plan depends on no size."""

    @property
    @abstractmethod
    def implementation_delta(self) -> float:
        """Declared gap between ideal and drawn noise, over the releases that one unit takes part in."""

    @abstractmethod
    def tickets(self) -> tuple[Ticket, ...]:
        """Returns the tickets of the share."""

    def event(self) -> Event:
        """Returns the event of all releases together."""
        return event_of_tickets(self.tickets(), partition=self.partition)

    @abstractmethod
    def cost(self, *, record_tokens: int = 60) -> Cost:
        """Returns the expected model use, from public caps.

        Args:
          record_tokens: cap of a record.
        """

    @abstractmethod
    def expected(self, *guesses: Any, **named: Any) -> dict[str, Any]:
        """Returns what is expected of the releases, at public guesses."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the public plan as JSON values, from which `rebuild` makes it again."""
        return {
            "method": self.method,
            "dataset_id": self.partition,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "implementation_delta": self.implementation_delta,
            "adjacency": self.adjacency,
            "noise_multiplier": self.noise_multiplier,
            **self._numbers(),
        }

    @abstractmethod
    def _numbers(self) -> dict[str, Any]:
        """Returns what the method shows beside what every plan shows."""

    @classmethod
    @abstractmethod
    def rebuild(cls, shown: Mapping[str, Any]) -> Self:
        """Returns the plan of the parameters shown, by the planner and with all its checks, priced anew.

        Args:
          shown: the result of `to_dict`; what a component shows beside its plan is not read.

        Raises:
          ConfigurationError: parameters out of range, or that do not fit together.
          LookupError, TypeError, AttributeError: `shown` has another form.
        """

    def _repr_html_(self) -> str:
        return html_table(type(self).__name__, self.to_dict())


def terms_shown(shown: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Returns what a planner takes of a shown plan: the terms of every share, and the parameters of these names."""
    taken = {name: shown[name] for name in ("delta", "adjacency", "noise_multiplier", *names)}
    return {"epsilon": None, "partition": shown["dataset_id"], **taken}


PlanT = TypeVar("PlanT", bound=SharePlan)


def _with_noise(plan: PlanT, noise_multiplier: float) -> PlanT:
    louder: dict[str, Any] = {"release": plan.release.with_noise(noise_multiplier)}
    return dataclasses.replace(plan, **louder)


def with_noise_for(
    draft: PlanT,
    *,
    epsilon: float | None,
    noise_multiplier: float | None,
    is_rough: bool = False,
    near: float | None = None,
    with_noise: Callable[[PlanT, float], PlanT] = _with_noise,
) -> PlanT:
    """Returns the plan with noise calibrated to `epsilon`, or with the given noise, and its price."""
    if noise_multiplier is not None:
        return with_price(with_noise(draft, check_positive("noise_multiplier", noise_multiplier)))
    if epsilon is None:
        raise ConfigurationError("epsilon: expected a share of the budget (epsilon=...), found None.")
    target = check_epsilon(epsilon)
    noise = accounting.calibrate(
        lambda x: with_noise(draft, x).event(),
        epsilon=target,
        delta=pricing_delta(draft),
        adjacency=draft.release.adjacency,
        is_rough=is_rough,
        near=near,
    )
    calibrated = with_noise(draft, noise)
    # The coarse price is an upper bound too, and an exact one would take longer than the search.
    return dataclasses.replace(calibrated, epsilon=target) if is_rough else with_price(calibrated)


def with_price(plan: PlanT) -> PlanT:
    """Returns the plan with the epsilon of its event."""
    adjacency = plan.release.adjacency
    bound = accounting.epsilon_upper_bound(plan.event(), delta=pricing_delta(plan), adjacency=adjacency)
    epsilon = _finite_epsilon(bound, noise_multiplier=plan.release.mechanism.noise_multiplier)
    return dataclasses.replace(plan, epsilon=epsilon)


def pricing_delta(plan: SharePlan) -> float:
    """Returns the part of delta that is left for the events, after the declared gap of the noise."""
    remaining = effective_delta(plan.delta, plan.implementation_delta)
    if remaining < 0 or (remaining == 0 and plan.delta > 0):
        raise _too_many(plan)
    return remaining


def _too_many(plan: SharePlan) -> ConfigurationError:
    """Returns the error that names how many queries delta allows: drawing the noise of each uses a part of it."""
    gap = plan.implementation_delta
    if plan.delta == 0:
        return fail("delta", f"more than the noise's declared gap {gap:.3g}", plan.delta, NEEDS_DELTA)
    requested = getattr(plan, "max_queries", None) or 1  # a training plan has steps
    possible = int(plan.delta / gap * requested)
    while possible > 0 and effective_delta(plan.delta, gap / requested * possible) <= 0:
        possible -= 1
    if possible < 1 or possible >= requested:
        advice = "Ask for fewer tokens, texts, steps or queries, or give a larger delta=."
        return fail("delta", f"more than the noise's declared gap {gap:.3g}", plan.delta, advice)
    advice = f"Drawing the noise of one query takes {gap / requested:.3g} of delta. Ask less, or give a larger delta=."
    return fail("max_queries", f"at most {possible:,} queries at delta {plan.delta:.3g}", requested, advice)


def _finite_epsilon(bound: float, *, noise_multiplier: float) -> float:
    """Returns a plan's epsilon; refuses an infinite one with advice about its noise."""
    if math.isfinite(bound):
        return bound
    advice = "Raise it; if clip and temperature determine it, raise temperature or lower clip."
    raise fail("noise_multiplier", "noise that bounds the privacy loss by a finite epsilon", noise_multiplier, advice)


FOR_THRESHOLDS = 0.5
"""Part of a share's delta for the thresholds of released words."""
WORD_SHARE = 0.5
"""Part of epsilon that words cost alone where texts leave too. At a half the texts' noise grows by 6 to 12 %, at .7 by
14 to 25 % for words of a quarter fewer units; at a fifth a word needs more than twice the units (`word_shares`)."""
WORDS_BEFORE_TEXTS = 32
"""Words that a unit casts where they open the vocabulary of texts. Of 4 to 64, the most words of other texts are found
at 16 to 64, on public trivia and questions to a bank (`bench_facts.py --breadth`)."""
_GAPS_OF_WORDS = 2.0**-80
"""More than the declared gaps of all releases of words together, for the search of their noise."""


def num_branches(labels: int, adjacency: Adjacency) -> int:
    """Returns how many labels one change of a unit can concern: a unit that is replaced may change its label."""
    return 2 if adjacency == "replace_one" and labels > 1 else 1


def one_release(noise: float, failure: float) -> Event:
    """Returns what a release costs at most whose threshold `words_with` found."""
    return ComposedEvent((GaussianEvent(noise), FailureEvent(failure)))


def warn_of_few_units(what: str, needed: int, size: int, *, among: int = 1) -> None:
    """Warns the program that even what all declared units hold may not be found, before it pays for that.

    Args:
      what: the thing to be found, and of what.
      needed: how many units must hold it, to find it with a chance of 95 %.
      size: the most units that may hold it: of all labels, where one number is declared for all.
      among: how many words each of them casts; those that cast fewer count for more.
    """
    if needed > size:
        held = "hold it" if among == 1 else f"hold it among {among} words each"
        said = f"{what} is found with a chance of 95 % if {needed:,} units {held}, and only {size:,} are declared"
        warn_caller(NoisyPlanWarning(f"{said}. Raise epsilon, or use more records."))


def words_with(rule: UnitWords, noise: float, failure: float, adjacency: Adjacency) -> WordRelease:
    """Returns a release with the least threshold that lets words of one unit alone through with at most a chance."""
    threshold = least_threshold(noise, rule.max_words, adjacency, failure)
    return WordRelease(rule, ThresholdedGaussianMechanism(noise, threshold), adjacency)


def noise_of_words(event: Callable[[float], Event], *, epsilon: float, delta: float, adjacency: Adjacency) -> float:
    """Returns the least noise at which releases of words cost so much by themselves."""
    left = effective_delta(delta, _GAPS_OF_WORDS)
    return accounting.calibrate(event, epsilon=epsilon, delta=left, adjacency=adjacency)


def words_before_texts(text_key: str) -> UnitWords:
    """Returns what a unit casts where released words open the vocabulary of texts."""
    return UnitWords(text_key, WORDS_BEFORE_TEXTS, (), public_words().digest)


def plan_first_words(
    rule: UnitWords,
    labels: Iterable[str | None],
    *,
    epsilon: float,
    delta: float,
    adjacency: Adjacency,
    share: float = WORD_SHARE,
) -> WordRelease:
    """Returns the release of words of each label that costs a part of epsilon by itself, before texts.

    Args:
      rule: what a unit casts.
      labels: that split the units; None alone: all units together.
      epsilon: of words and texts.
      delta: of the share; half of it goes to the thresholds.
      adjacency: neighbouring relation.
      share: part of epsilon, in (0, 1).
    """
    split = tuple(labels)
    failure = delta * FOR_THRESHOLDS / num_branches(len(split), adjacency)

    def event(noise: float) -> Event:
        one = one_release(noise, failure)
        return event_of_tickets([Ticket(FIRST_WORDS_TEMPLATE, one, label=label) for label in split], partition="labels")

    noise = noise_of_words(event, epsilon=epsilon * share, delta=delta, adjacency=adjacency)
    return words_with(rule, noise, failure, adjacency)
