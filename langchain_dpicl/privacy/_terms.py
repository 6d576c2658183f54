"""The normal form of an event: what it consists of, how often. Knows no curve, no epsilon and no accountant.

Two events that mean the same are the same `Terms`, so counts add up and the order of composition cannot matter.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from langchain_dpicl.exceptions import ConfigurationError, UnknownEventError
from langchain_dpicl.privacy._validate import Adjacency
from langchain_dpicl.privacy.amounts import effective_delta, exact, round_up
from langchain_dpicl.privacy.events import (
    EVENT_TYPES,
    AllocatedEvent,
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
    SampledBallEvent,
    SubsampledEvent,
    ZCdpEvent,
)

_MAX_WORLDS = 5_000
_MAX_COUNT = 10**12
_HOPELESS = 1e9


@dataclass(frozen=True, order=True, slots=True)
class Terms:
    """A composition without failures, sorted.

    Attributes:
      mu_squared: all unsampled Gaussians together.
      pure: (epsilon, count) of the unsampled pure steps.
      ranges: (bound, count) of the unsampled bounded-range steps.
      rho: all unsampled zCDP steps together.
      sampled: (what is done on one secret sample, its rate, count).
      balls: (mu, rate, count) of Gaussians on a sample's sum of vectors out of a ball.
      allocated: (what is done on each batch, batches, rate, count).
      is_private: False if anything was released without protection.
    """

    mu_squared: float = 0.0
    pure: tuple[tuple[float, int], ...] = ()
    ranges: tuple[tuple[float, int], ...] = ()
    rho: float = 0.0
    sampled: tuple[tuple[Terms, float, int], ...] = ()
    balls: tuple[tuple[float, float, int], ...] = ()
    allocated: tuple[tuple[Terms, int, float, int], ...] = ()
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
class World:
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
        self.balls: Counter[tuple[float, float]] = Counter()
        self.allocated: Counter[tuple[Terms, int, float]] = Counter()
        self.failures: Counter[float] = Counter()
        self.is_private = True

    def add(self, event: Event, count: int) -> None:
        """Adds `count` times `event`."""
        check_event(event)
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
            case SampledBallEvent():
                self._add_ball(event, count)
            case AllocatedEvent():
                self._add_allocated(event, count)
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

    def _add_ball(self, event: SampledBallEvent, count: int) -> None:
        if event.sampling_rate == 1:
            self.add(GaussianEvent(event.noise_multiplier), count)
            return
        mu = 1.0 / float(event.noise_multiplier)
        self.is_private = self.is_private and Terms(mu_squared=mu * mu).is_bounded
        if mu > 0:
            self.balls[mu, float(event.sampling_rate)] += count

    def _add_allocated(self, event: AllocatedEvent, count: int) -> None:
        if event.num_batches == 1:
            self.add(one_batch(event), count)
            return
        base = normal_form(event.event)
        self.is_private = self.is_private and base.is_bounded
        if not base.is_empty:
            self.allocated[base, event.num_batches, float(event.sampling_rate)] += count

    def terms(self) -> Terms:
        """The normal form of everything added."""
        return Terms(
            mu_squared=math.fsum(value * count for value, count in self.gaussian.items()),
            pure=tuple(sorted((value, count) for value, count in self.pure.items() if count)),
            ranges=tuple(sorted((value, count) for value, count in self.ranges.items() if count)),
            rho=math.fsum(value * count for value, count in self.rho.items()),
            sampled=tuple(sorted((base, rate, count) for (base, rate), count in self.sampled.items() if count)),
            balls=tuple(sorted((*ball, count) for ball, count in self.balls.items() if count)),
            allocated=tuple(sorted((*deal, count) for deal, count in self.allocated.items() if count)),
            is_private=self.is_private,
        )

    def failure(self) -> float:
        """The chances of all failures, added exactly and rounded up."""
        return round_up(sum(exact(value) * count for value, count in self.failures.items()))


def check_event(event: object) -> None:
    """Refuses what is not exactly one of the priced classes; a subclass may mean something else."""
    if type(event) not in EVENT_TYPES:
        raise UnknownEventError(
            f"event: expected one of {', '.join(cls.__name__ for cls in EVENT_TYPES)}, found {type(event).__name__}. "
            "An event without a theorem here has no price."
        )


def normal_form(event: Event) -> Terms:
    """The terms of an event without `ParallelEvent`s and without failures, which have no place on secret samples.

    Raises:
      UnknownEventError: there is one, or an event without a theorem.
    """
    world = _world(event)
    if world.failure > 0.0:
        raise UnknownEventError("event: expected failures outside of secret samples, found one inside.")
    return world.terms


def _world(event: Event, labels: tuple[tuple[str, tuple[str, ...]], ...] = ()) -> World:
    """What an event without `ParallelEvent`s does."""
    tally = _Tally()
    tally.add(event, 1)
    return World(tally.terms(), tally.failure(), labels)


def one_batch(event: AllocatedEvent) -> Event:
    """What one batch of a deal costs: parallel composition, as a unit stands in one batch at most."""
    return SubsampledEvent(event.event, event.sampling_rate)


def readings(event: Event, adjacency: Adjacency) -> tuple[Event, ...]:
    """Events each of which bounds `event`: itself, and every deal read as parallel composition.

    Under `replace_one` the second only: there is no theorem for a unit that is replaced inside a secret batch.
    """
    if not any(_deals(event)):
        return (event,)
    in_parallel = _rewritten(event, {}, is_parallel=True)
    return (in_parallel,) if adjacency == "replace_one" else (event, in_parallel)


def _deals(event: Event) -> Iterator[AllocatedEvent]:
    match event:
        case AllocatedEvent():
            yield event
        case RepeatedEvent() | SubsampledEvent():
            yield from _deals(event.event)
        case ComposedEvent():
            for part in event.events:
                yield from _deals(part)
        case ParallelEvent():
            for _, branch in event.branches:
                yield from _deals(branch)


def worlds(event: Event, adjacency: Adjacency) -> tuple[World, ...]:
    """What the event does at each place that a unit may have: its price is the largest of theirs.

    Under `add_remove` a unit has one label per partition; under `replace_one` it may leave one label and join another.
    """
    found: dict[str, list[ParallelEvent]] = {}
    for parallel in _parallels(event):
        known = found.setdefault(parallel.partition, [])
        if parallel not in known:
            known.append(parallel)
    places = [_places(parallels, adjacency) for parallels in found.values()]
    if math.prod(len(p) for p in places) > _MAX_WORLDS:
        raise ConfigurationError(
            f"event: expected at most {_MAX_WORLDS} combinations of labels that cost differently. "
            "Use the same noise for all labels, or fewer partitions."
        )
    distinct: dict[tuple[Terms, float], World] = {}
    for combo in itertools.product(*places):
        branches = dict(itertools.chain.from_iterable(place.branches for place in combo))
        world = _world(_rewritten(event, branches), tuple(zip(found, (place.labels for place in combo), strict=True)))
        distinct.setdefault((world.terms, world.failure), world)
    return tuple(distinct.values())


@dataclass(frozen=True, slots=True)
class _Place:
    """The labels of a unit in one partition, and what each of its parallel events then is."""

    labels: tuple[str, ...]
    branches: tuple[tuple[ParallelEvent, Event], ...]


def _parallels(event: Event) -> Iterator[ParallelEvent]:
    match event:
        case ParallelEvent():
            yield event
            for _, branch in event.branches:
                if any(_parallels(branch)):
                    raise UnknownEventError(
                        "ParallelEvent: expected branches without further ParallelEvents, found a nested one. "
                        "Split by the combined label instead."
                    )
        case RepeatedEvent() | SubsampledEvent() | AllocatedEvent():
            yield from _parallels(event.event)
        case ComposedEvent():
            for part in event.events:
                yield from _parallels(part)


def _places(parallels: list[ParallelEvent], adjacency: Adjacency) -> list[_Place]:
    """What each of a partition's parallel events does to a unit, per place the unit may have."""
    rows: _Rows = dict.fromkeys(sorted({label for parallel in parallels for label, _ in parallel.branches}), ())
    for label in rows:
        rows[label] = tuple(dict(parallel.branches).get(label, NoEvent()) for parallel in parallels)
        for branch in rows[label]:
            _world(branch)  # what no theorem prices is refused, also where another label costs more
    if adjacency == "add_remove" or len(rows) < 2:
        chosen: dict[tuple[str, ...], tuple[Event, ...]] = {(label,): rows[label] for label in _undominated(rows, 1)}
    else:
        pairs = itertools.combinations(_undominated(rows, 2), 2)
        chosen = {(a, b): tuple(map(_both, rows[a], rows[b])) for a, b in pairs}
    nowhere = {(): tuple(NoEvent() for _ in parallels)}
    return [_Place(labels, tuple(zip(parallels, row, strict=True))) for labels, row in (chosen or nowhere).items()]


_Rows = dict[str, tuple[Event, ...]]


def _both(left: Event, joined: Event) -> Event:
    return ComposedEvent((left, joined))


def _undominated(rows: _Rows, keep: int) -> list[str]:
    """Drops labels that `keep` labels still there dominate: no choice of `keep` labels is worse for having them."""
    kept = list(rows)
    for label in rows:
        larger = [other for other in kept if other != label and all(map(dominates, rows[other], rows[label]))]
        if len(larger) >= keep:
            kept.remove(label)
    return kept


def dominates(large: Event, small: Event) -> bool:
    """Whether `large` visibly costs at least what `small` does: same shape, no parameter weaker, or not sampled."""
    if isinstance(large, SampledBallEvent) and isinstance(small, SampledBallEvent):
        large, small = _as_sampled(large), _as_sampled(small)  # compared by the same two numbers
    match large, small:
        case (_, NoEvent()) | (NonPrivateEvent(), _):
            return True
        case (RepeatedEvent(), RepeatedEvent()):
            return large.count >= small.count and dominates(large.event, small.event)
        case (_, SubsampledEvent()):
            return _dominates_sample(large, small)
        case (AllocatedEvent(), AllocatedEvent()):  # more batches hide a unit better
            is_wider = large.num_batches <= small.num_batches and large.sampling_rate >= small.sampling_rate
            return is_wider and dominates(large.event, small.event)
        case (ComposedEvent(), ComposedEvent()):
            return len(large.events) == len(small.events) and all(map(dominates, large.events, small.events))
        case _:
            return large == small or (type(large) is type(small) and _weight(large) >= _weight(small))


def _dominates_sample(large: Event, small: SubsampledEvent) -> bool:
    """A sample is dominated by a larger one, and by what reads everybody: sampling never costs more."""
    if isinstance(large, SubsampledEvent) and large.sampling_rate >= small.sampling_rate:
        return dominates(large.event, small.event) or dominates(large, small.event)
    return dominates(large, small.event)


def _as_sampled(event: SampledBallEvent) -> Event:
    """What it is under add_remove."""
    return SubsampledEvent(GaussianEvent(event.noise_multiplier), event.sampling_rate)


def _weight(event: Event) -> float:
    """What grows with the cost of a leaf; nothing is claimed of other events."""
    match event:
        case GaussianEvent():
            return -event.noise_multiplier
        case PureEvent():
            return event.epsilon
        case BoundedRangeEvent():
            return event.bound
        case ZCdpEvent():
            return event.rho
        case FailureEvent():
            return event.delta
        case _:
            return math.nan


def _rewritten(event: Event, place: dict[ParallelEvent, Event], *, is_parallel: bool = False) -> Event:
    """The event with every split where a unit has its place in it, and, if asked, every deal as one batch."""

    def again(part: Event) -> Event:
        return _rewritten(part, place, is_parallel=is_parallel)

    match event:
        case ParallelEvent() if event in place:
            return place[event]
        case ParallelEvent():
            return ParallelEvent(event.partition, tuple((label, again(branch)) for label, branch in event.branches))
        case AllocatedEvent() if is_parallel:
            return again(one_batch(event))
        case RepeatedEvent() | SubsampledEvent() | AllocatedEvent():
            return dataclasses.replace(event, event=again(event.event))
        case ComposedEvent():
            return ComposedEvent(tuple(map(again, event.events)))
    return event
