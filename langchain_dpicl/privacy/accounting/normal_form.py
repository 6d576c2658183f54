"""Brings an event to its normal form: what it consists of, and how often.

Two events that mean the same are the same `Terms`, so counts add up and the order of composition cannot matter.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

from langchain_dpicl._lazy import provided
from langchain_dpicl.exceptions import ConfigurationError, UnknownEventError
from langchain_dpicl.privacy._validate import Adjacency
from langchain_dpicl.privacy.accounting.events import (
    CORE_EVENTS,
    BoundedRangeEvent,
    ComposedEvent,
    Event,
    FailureEvent,
    GaussianEvent,
    NoEvent,
    NonPrivateEvent,
    ParallelEvent,
    PureEvent,
    RepeatedEvent,
    SubsampledEvent,
    ZCdpEvent,
    event_parts,
    event_types,
)
from langchain_dpicl.privacy.ledger.amounts import effective_delta, exact, round_up

if TYPE_CHECKING:
    from langchain_dpicl.privacy.accounting.profiles import Profile

_MAX_COUNT = 10**12
_HOPELESS = 1e9


class Step:
    """Base of the steps that extensions price: frozen dataclasses, sorted by class and fields.

    Attributes:
      bound_name: what the bound on a single one is called.
    """

    __slots__ = ()
    bound_name: ClassVar[str]

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """Whether nothing about private data leaves."""

    @property
    @abstractmethod
    def is_bounded(self) -> bool:
        """Whether a finite price is worth computing."""

    @property
    @abstractmethod
    def key(self) -> tuple[Any, ...]:
        """The fields, in their order."""

    @abstractmethod
    def profile(self, adjacency: Adjacency) -> Profile:
        """Returns a dominating pair of one step."""

    def __lt__(self, other: Step) -> bool:
        return (type(self).__name__, self.key) < (type(other).__name__, other.key)


@dataclass(frozen=True, slots=True)
class ExtensionEvent(Event):
    """Base of the events of extensions, which say themselves what they consist of.

    Attributes:
      own_adjacencies: neighbouring relations under which `reduced` is proved; elsewhere `bounded_by` is priced alone.
    """

    own_adjacencies: ClassVar[frozenset[str]]

    @abstractmethod
    def reduced(self) -> Event | Step:
        """Returns an event that means the same, or the step that it is."""

    @property
    def bounded_by(self) -> Event | None:
        """Another event that costs at least as much and is priced as well, or None."""
        return None

    @abstractmethod
    def outweighs(self, other: Event) -> bool:
        """Returns whether this visibly costs at least what `other` does."""


@dataclass(frozen=True, order=True, slots=True)
class Terms:
    """A composition without failures, sorted.

    Attributes:
      mu_squared: all unsampled Gaussians together.
      pure: (epsilon, count) of the unsampled pure steps.
      ranges: (bound, count) of the unsampled bounded-range steps.
      rho: all unsampled zCDP steps together.
      sampled: (what is done on one secret sample, its rate, count).
      others: (step, count) of what extensions price.
      is_private: False if anything was released without protection.
    """

    mu_squared: float = 0.0
    pure: tuple[tuple[float, int], ...] = ()
    ranges: tuple[tuple[float, int], ...] = ()
    rho: float = 0.0
    sampled: tuple[tuple[Terms, float, int], ...] = ()
    others: tuple[tuple[Step, int], ...] = ()
    is_private: bool = True

    @property
    def is_empty(self) -> bool:
        """Whether nothing about private data leaves."""
        return self == Terms()

    @property
    def is_bounded(self) -> bool:
        """Whether a finite price is worth computing; what costs billions counts as not private."""
        pure = math.fsum(value * count for value, count in self.pure + self.ranges)
        return self.is_private and max(self.mu_squared, self.rho, pure) < _HOPELESS

    @property
    def range_rho(self) -> float:
        """What the bounded-range steps cost together as zCDP: bound^2 / 8 each (Cesar and Rogers 2021)."""
        return math.fsum(count * bound * bound / 8.0 for bound, count in self.ranges)


@dataclass(frozen=True, slots=True)
class UnitTerms:
    """What an event does to a unit of one place: the terms to price, and the failures that come out of delta before.

    Attributes:
      terms: everything but the failures.
      failure: chances of all failures, added and rounded up: at least the chance of any of them.
      labels: the labels that the unit has, by partition; under `replace_one` the one it leaves and the one it joins.
    """

    terms: Terms
    failure: float = 0.0
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def delta_left(self, delta: float) -> float:
        """Returns the delta that the failures leave to the terms, rounded down; 0 where they leave nothing."""
        return max(effective_delta(delta, self.failure), 0.0)


class _Tally:
    """Counts leaves; sums are taken once, at the end, so that grouping cannot change a digit."""

    def __init__(self) -> None:
        self.gaussian: Counter[float] = Counter()
        self.pure: Counter[float] = Counter()
        self.ranges: Counter[float] = Counter()
        self.rho: Counter[float] = Counter()
        self.sampled: Counter[tuple[Terms, float]] = Counter()
        self.others: Counter[Step] = Counter()
        self.failures: Counter[float] = Counter()
        self.is_private = True

    def add(self, event: Event, count: int) -> None:
        """Adds `count` times `event`."""
        _check_class(event)
        if count > _MAX_COUNT:
            raise ConfigurationError(f"count: expected at most {_MAX_COUNT} steps of a kind, found {count}.")
        if count == 0:
            return
        match event:
            case RepeatedEvent():
                self.add(event.event, count * event.count)
            case ComposedEvent():
                for part in event.events:
                    self.add(part, count)
            case SubsampledEvent():
                self._add_sampled(event, count)
            case ExtensionEvent():
                self._add_extension(event, count)
            case NonPrivateEvent():
                self.is_private = False
            case _:
                self._add_leaf(event, count)

    def _add_leaf(self, event: Event, count: int) -> None:
        match event:
            case NoEvent():
                pass
            case GaussianEvent():
                mu = 1.0 / float(event.noise_multiplier)
                self.gaussian[mu * mu] += count
            case PureEvent():
                self.pure[float(event.epsilon)] += count
            case BoundedRangeEvent():
                self.ranges[float(event.bound)] += count
            case ZCdpEvent():
                self.rho[float(event.rho)] += count
            case FailureEvent():
                self.failures[float(event.delta)] += count
            case _:
                raise UnknownEventError(
                    f"event: expected a {type(event).__name__} outside of blocks, found one inside."
                )

    def _add_sampled(self, event: SubsampledEvent, count: int) -> None:
        if event.sampling_rate == 1:
            self.add(event.event, count)
            return
        base = normal_form(event.event)
        self.is_private = self.is_private and base.is_bounded
        if not base.is_empty:
            self.sampled[base, float(event.sampling_rate)] += count

    def _add_extension(self, event: ExtensionEvent, count: int) -> None:
        reduced = event.reduced()
        if isinstance(reduced, Event):
            self.add(reduced, count)
            return
        self.is_private = self.is_private and reduced.is_bounded
        if not reduced.is_empty:
            self.others[reduced] += count

    def terms(self) -> Terms:
        """The normal form of everything added."""
        return Terms(
            mu_squared=math.fsum(value * count for value, count in self.gaussian.items()),
            pure=tuple(sorted((value, count) for value, count in self.pure.items() if count)),
            ranges=tuple(sorted((value, count) for value, count in self.ranges.items() if count)),
            rho=math.fsum(value * count for value, count in self.rho.items()),
            sampled=tuple(sorted((base, rate, count) for (base, rate), count in self.sampled.items() if count)),
            others=tuple(sorted((step, count) for step, count in self.others.items() if count)),
            is_private=self.is_private,
        )

    def failure(self) -> float:
        """The chances of all failures, added exactly and rounded up."""
        return round_up(sum(exact(value) * count for value, count in self.failures.items()))


def check_event(event: object) -> None:
    """Refuses an event that is not, with all its parts, exactly of the priced classes.

    A subclass may mean something else, so none of its methods is called before its class is known.
    """
    unchecked: list[object] = [event]
    while unchecked:
        one = unchecked.pop()
        _check_class(one)
        unchecked += cast("Event", one).parts


def _check_class(event: object) -> None:
    if type(event) not in CORE_EVENTS and type(event) not in event_types():
        names = ", ".join(cls.__name__ for cls in event_types())
        raise UnknownEventError(
            f"event: expected one of {names}, found {type(event).__name__}. "
            "An event without a theorem here has no price."
        )


def normal_form(event: Event) -> Terms:
    """The terms of an event without `ParallelEvent`s and without failures, which have no place on secret samples.

    Raises:
      UnknownEventError: there is one, or an event without a theorem.
    """
    world = world_of(event)
    if world.failure > 0.0:
        raise UnknownEventError("event: expected failures outside of secret samples, found one inside.")
    return world.terms


def world_of(event: Event, labels: tuple[tuple[str, tuple[str, ...]], ...] = ()) -> UnitTerms:
    """What an event without `ParallelEvent`s does."""
    tally = _Tally()
    tally.add(event, 1)
    return UnitTerms(tally.terms(), tally.failure(), labels)


def readings(event: Event, adjacency: Adjacency) -> tuple[Event, ...]:
    """Events each of which bounds `event`: itself, and one in which what extensions bound otherwise is replaced.

    Only the second where an extension has no theorem of its own for the adjacency.
    """
    if not any(isinstance(part, ExtensionEvent) for part in event_parts(event)):
        return (event,)
    found: tuple[Event, ...] = provided("label_places").readings(event, adjacency)
    return found


def unit_terms(event: Event, adjacency: Adjacency) -> tuple[UnitTerms, ...]:
    """What the event does at each place that a unit may have: its price is the largest of theirs.

    An event that labels do not split does the same everywhere.
    """
    if not any(isinstance(part, ParallelEvent) for part in event_parts(event)):
        return (world_of(event),)
    found: tuple[UnitTerms, ...] = provided("label_places").unit_terms(event, adjacency)
    return found
