"""Hypothesis strategies for privacy events, kept to sizes that an accountant prices in milliseconds."""

from __future__ import annotations

from hypothesis import strategies as st

from langchain_dpicl.privacy.events import (
    BoundedRangeEvent,
    ComposedEvent,
    Event,
    GaussianEvent,
    NoEvent,
    ParallelEvent,
    PureEvent,
    RepeatedEvent,
    SubsampledEvent,
    ZCdpEvent,
)

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
