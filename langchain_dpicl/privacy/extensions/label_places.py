"""Prices releases that run in parallel over labels: what an event does at each place that a unit may have.

`epsilon` loads it for an event that has a `ParallelEvent`, or an event of an extension. docs/proofs/accounting.md
holds the theorem.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from langchain_dpicl.exceptions import ConfigurationError, UnknownEventError
from langchain_dpicl.privacy._validate import Adjacency
from langchain_dpicl.privacy.accounting.epsilon import ExtensionEvent, Terms, UnitTerms, world_of
from langchain_dpicl.privacy.accounting.events import (
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
)

_MAX_WORLDS = 5_000


def readings(event: Event, adjacency: Adjacency) -> tuple[Event, ...]:
    """Events each of which bounds `event`: itself, and one in which what extensions bound otherwise is replaced.

    Only the second where an extension has no theorem of its own for the adjacency.
    """
    found = [part for part in _extensions(event) if part.bounded_by is not None]
    if not found:
        return (event,)
    bounding = _rewritten(event, {}, is_bounding=True)
    is_priced = all(adjacency in part.own_adjacencies for part in found)
    return (event, bounding) if is_priced else (bounding,)


def _extensions(event: Event) -> Iterator[ExtensionEvent]:
    if isinstance(event, ExtensionEvent):
        yield event
        return
    for part in event.parts:
        yield from _extensions(part)


def unit_terms(event: Event, adjacency: Adjacency) -> tuple[UnitTerms, ...]:
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
    distinct: dict[tuple[Terms, float], UnitTerms] = {}
    for combo in itertools.product(*places):
        branches = dict(itertools.chain.from_iterable(place.branches for place in combo))
        world = world_of(_rewritten(event, branches), tuple(zip(found, (place.labels for place in combo), strict=True)))
        distinct.setdefault((world.terms, world.failure), world)
    return tuple(distinct.values())


@dataclass(frozen=True, slots=True)
class _PartitionPlace:
    """The labels of a unit in one partition, and what each of its parallel events then is."""

    labels: tuple[str, ...]
    branches: tuple[tuple[ParallelEvent, Event], ...]


def _parallels(event: Event) -> Iterator[ParallelEvent]:
    if isinstance(event, ParallelEvent):
        yield event
        if any(True for branch in event.parts for _ in _parallels(branch)):
            raise UnknownEventError(
                "ParallelEvent: expected branches without further ParallelEvents, found a nested one. "
                "Split by the combined label instead."
            )
        return
    for part in event.parts:
        yield from _parallels(part)


def _places(parallels: list[ParallelEvent], adjacency: Adjacency) -> list[_PartitionPlace]:
    """What each of a partition's parallel events does to a unit, per place the unit may have."""
    rows: _Rows = dict.fromkeys(sorted({label for parallel in parallels for label, _ in parallel.branches}), ())
    for label in rows:
        rows[label] = tuple(dict(parallel.branches).get(label, NoEvent()) for parallel in parallels)
        for branch in rows[label]:
            world_of(branch)  # what no theorem prices is refused, also where another label costs more
    if adjacency == "add_remove" or len(rows) < 2:
        chosen: dict[tuple[str, ...], tuple[Event, ...]] = {(label,): rows[label] for label in _drop_dominated(rows, 1)}
    else:
        pairs = itertools.combinations(_drop_dominated(rows, 2), 2)
        chosen = {(a, b): tuple(map(_both, rows[a], rows[b])) for a, b in pairs}
    nowhere = {(): tuple(NoEvent() for _ in parallels)}
    return [
        _PartitionPlace(labels, tuple(zip(parallels, row, strict=True))) for labels, row in (chosen or nowhere).items()
    ]


_Rows = dict[str, tuple[Event, ...]]


def _both(left: Event, joined: Event) -> Event:
    return ComposedEvent((left, joined))


def _drop_dominated(rows: _Rows, keep: int) -> list[str]:
    """Drops labels that `keep` labels still there dominate: no choice of `keep` labels is worse for having them."""
    kept = list(rows)
    for label in rows:
        larger = [other for other in kept if other != label and all(map(dominates, rows[other], rows[label]))]
        if len(larger) >= keep:
            kept.remove(label)
    return kept


def dominates(large: Event, small: Event) -> bool:
    """Whether `large` visibly costs at least what `small` does: same shape, no parameter weaker, or not sampled."""
    match large, small:
        case (_, NoEvent()) | (NonPrivateEvent(), _):
            return True
        case (RepeatedEvent(), RepeatedEvent()):
            return large.count >= small.count and dominates(large.event, small.event)
        case (_, SubsampledEvent()):
            return _dominates_sample(large, small)
        case (ExtensionEvent(), _):
            return large.outweighs(small)
        case (ComposedEvent(), ComposedEvent()):
            return len(large.events) == len(small.events) and all(map(dominates, large.events, small.events))
        case _:
            return large == small or (type(large) is type(small) and _weight(large) >= _weight(small))


def _dominates_sample(large: Event, small: SubsampledEvent) -> bool:
    """A sample is dominated by a larger one, and by what reads everybody: sampling never costs more."""
    if isinstance(large, SubsampledEvent) and large.sampling_rate >= small.sampling_rate:
        return dominates(large.event, small.event) or dominates(large, small.event)
    return dominates(large, small.event)


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


def _rewritten(event: Event, place: dict[ParallelEvent, Event], *, is_bounding: bool = False) -> Event:
    """The event with every split where a unit has its place in it, and, if asked, with what bounds its extensions."""
    if isinstance(event, ParallelEvent) and event in place:
        return place[event]
    if is_bounding and isinstance(event, ExtensionEvent) and event.bounded_by is not None:
        return _rewritten(event.bounded_by, place, is_bounding=True)
    return event.with_parts(tuple(_rewritten(part, place, is_bounding=is_bounding) for part in event.parts))
