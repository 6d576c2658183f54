"""Hypothesis strategies for privacy events, kept to sizes that an accountant prices in milliseconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

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
from langchain_dpicl.privacy.extensions.gradient_sums import SampledBallEvent
from langchain_dpicl.privacy.extensions.random_allocation import AllocatedEvent

ADJACENCIES = st.sampled_from(["add_remove", "replace_one"])
DELTAS = st.sampled_from([1e-3, 1e-5, 1e-6, 1e-8])
RATES = st.floats(0.001, 0.5)
NOISES = st.floats(0.4, 20.0)
COUNTS = st.integers(1, 60)


def leaves() -> st.SearchStrategy[Event]:
    """One release that protects something."""
    return st.one_of(
        NOISES.map(GaussianEvent),
        st.floats(0.02, 4.0).map(PureEvent),
        st.floats(0.02, 4.0).map(BoundedRangeEvent),
        st.floats(1e-4, 0.3).map(ZCdpEvent),
    )


def sampled() -> st.SearchStrategy[Event]:
    """A release, or a block of up to eight, on one secret sample."""
    block = st.builds(RepeatedEvent, leaves(), st.integers(1, 8))
    return st.builds(SubsampledEvent, st.one_of(leaves(), block), RATES)


def steps() -> st.SearchStrategy[Event]:
    """What gets repeated and composed."""
    return st.one_of(leaves(), sampled(), sampled(), st.just(NoEvent()))


def compositions() -> st.SearchStrategy[Event]:
    """Up to three families, each repeated."""
    families = st.lists(st.builds(RepeatedEvent, steps(), COUNTS), min_size=1, max_size=3)
    return st.one_of(steps(), families.map(lambda parts: ComposedEvent(tuple(parts))))


def parallels(partition: str = "data") -> st.SearchStrategy[ParallelEvent]:
    """Two to four labels with a branch each."""
    branches = st.dictionaries(st.sampled_from("abcd"), compositions(), min_size=2, max_size=4)
    return branches.map(lambda table: ParallelEvent(partition, tuple(table.items())))


FAILURES = st.sampled_from([1e-10, 3e-9, 2e-7, 4e-6, 3e-4])


def everything(depth: int = 3, *, on_sample: bool = False, in_branch: bool = False) -> st.SearchStrategy[Event]:
    """Every kind of event that has a price, in every other that may hold it.

    A secret sample holds no failures, and a label's branch no further split. Few and small counts: blocks in blocks are
    priced one by one.
    """
    kinds = [leaves(), st.builds(SampledBallEvent, st.floats(0.8, 8.0), RATES), st.just(NoEvent())]
    if not on_sample:
        kinds.append(FAILURES.map(FailureEvent))
    if depth == 0:
        return st.one_of(*kinds)
    inner = everything(depth - 1, on_sample=on_sample, in_branch=in_branch)
    sampled_inner = everything(depth - 1, on_sample=True, in_branch=in_branch)
    kinds += [
        st.builds(RepeatedEvent, inner, st.integers(0, 12)),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: ComposedEvent(tuple(parts))),
        st.builds(SubsampledEvent, inner, st.just(1.0)),
        st.builds(SubsampledEvent, sampled_inner, RATES),
        st.builds(AllocatedEvent, inner, st.just(1), st.just(1.0)),
        st.builds(AllocatedEvent, sampled_inner, st.integers(2, 6), st.one_of(RATES, st.just(1.0))),
    ]
    if not in_branch:
        branch = everything(depth - 1, on_sample=on_sample, in_branch=True)
        kinds += [split(name, branch) for name in ("data", "other")]
    return st.one_of(*kinds)


def split(partition: str, branch: st.SearchStrategy[Event]) -> st.SearchStrategy[ParallelEvent]:
    """Two or three labels with a branch each; one can do what another does on everybody, on a sample."""
    tables = st.dictionaries(st.sampled_from("abc"), branch, min_size=2, max_size=3)
    return tables.map(lambda table: ParallelEvent(partition, tuple(table.items())))


def beside_failures() -> st.SearchStrategy[Event]:
    """Labels that cost differently, with failures beside them and in their branches."""
    parts = st.tuples(parallels(), st.builds(RepeatedEvent, FAILURES.map(FailureEvent), st.integers(1, 3)))
    branch = st.one_of(steps(), st.tuples(steps(), FAILURES.map(FailureEvent)).map(ComposedEvent))
    return st.one_of(
        parts.map(ComposedEvent), split("data", branch), st.tuples(split("data", branch), steps()).map(ComposedEvent)
    )


def noisier(event: Event, factor: float) -> Event:
    """The same event with every noise scale multiplied, and every chance of a failure divided."""
    return _NOISIER[type(event)](event, factor)


def _noisier_inside(event: Any, factor: float) -> Event:
    return dataclasses.replace(event, event=noisier(event.event, factor))


_NOISIER: dict[type, Callable[[Any, float], Event]] = {
    NoEvent: lambda event, factor: event,
    NonPrivateEvent: lambda event, factor: event,
    GaussianEvent: lambda event, factor: GaussianEvent(event.noise_multiplier * factor),
    PureEvent: lambda event, factor: PureEvent(event.epsilon / factor),
    BoundedRangeEvent: lambda event, factor: BoundedRangeEvent(event.bound / factor),
    ZCdpEvent: lambda event, factor: ZCdpEvent(event.rho / factor**2),
    FailureEvent: lambda event, factor: FailureEvent(event.delta / factor),
    SampledBallEvent: lambda event, factor: SampledBallEvent(event.noise_multiplier * factor, event.sampling_rate),
    RepeatedEvent: _noisier_inside,
    SubsampledEvent: _noisier_inside,
    AllocatedEvent: _noisier_inside,
    ComposedEvent: lambda event, factor: ComposedEvent(tuple(noisier(part, factor) for part in event.events)),
    ParallelEvent: lambda event, factor: ParallelEvent(
        event.partition, tuple((label, noisier(branch, factor)) for label, branch in event.branches)
    ),
}
