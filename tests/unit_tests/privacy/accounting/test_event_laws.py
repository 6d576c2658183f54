"""Laws of prices over every kind of event in every other that may hold it, failures, labels, balls and deals included."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from langchain_dpicl.exceptions import UnknownEventError
from langchain_dpicl.privacy.accounting import delta_upper_bound, epsilon_bound, epsilon_upper_bound
from langchain_dpicl.privacy.accounting.epsilon import price_of, unit_terms
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
    event_from_dict,
    event_to_dict,
)
from langchain_dpicl.privacy.extensions.gradient_sums import SampledBallEvent
from langchain_dpicl.privacy.extensions.label_places import dominates
from langchain_dpicl.privacy.extensions.random_allocation import AllocatedEvent
from langchain_dpicl.privacy.extensions.registry import EVENT_TYPES
from langchain_dpicl.privacy.second_opinions import second_reading
from tests.strategies import ADJACENCIES, DELTAS, RATES, beside_failures, everything, leaves, noisier

laws = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
EVENTS = st.one_of(everything(), beside_failures())
UNSPLIT = everything(2, in_branch=True)
EPSILONS = (0.0, 0.3, 2.0)

GRIDS = 1e-3
"""What a smaller event may cost more than a larger one, as a share of epsilon, where both hold several kinds of steps.

The grid of a composition follows the spread of its steps, and a block of unsampled steps is one step. One part more may
make the grid finer, and the bound on the larger event then lies closer to the truth: 61.14644 and 61.12856 with one
bounded-range step more is the largest such difference seen. Both are upper bounds. Counts are held to no tolerance.
"""


def price(event: Event, delta: float, adjacency: str) -> float:
    return epsilon_upper_bound(event, delta=delta, adjacency=adjacency)


def at_most(small: float, large: float) -> bool:
    return small <= large * (1 + GRIDS) + 1e-9


# --- delta and epsilon ----------------------------------------------------------------------------------------------


def check_delta_of(event: Event, delta: float, adjacency: str) -> None:
    """What is (epsilon, delta) by one function is so by the other; an infinite epsilon has a reason."""
    epsilon = price(event, delta, adjacency)
    if epsilon < math.inf:
        assert delta_upper_bound(event, epsilon=epsilon, adjacency=adjacency) <= delta * (1 + 1e-5)
    else:
        assert delta_upper_bound(event, epsilon=300.0, adjacency=adjacency) >= delta * (1 - 1e-5)


@settings(laws, max_examples=120)
@given(EVENTS, DELTAS, ADJACENCIES)
def test_delta_at_the_reported_epsilon_is_not_above_delta(event: Event, delta: float, adjacency: str) -> None:
    check_delta_of(event, delta, adjacency)


ONE_OF_EACH: dict[type, Event] = {
    NoEvent: NoEvent(),
    NonPrivateEvent: NonPrivateEvent(),
    GaussianEvent: GaussianEvent(4.0),
    PureEvent: PureEvent(0.2),
    BoundedRangeEvent: BoundedRangeEvent(0.3),
    ZCdpEvent: ZCdpEvent(0.01),
    FailureEvent: FailureEvent(4e-7),
    RepeatedEvent: RepeatedEvent(PureEvent(0.1), 3),
    ComposedEvent: ComposedEvent((GaussianEvent(8.0), PureEvent(0.1))),
    SubsampledEvent: SubsampledEvent(GaussianEvent(1.0), 0.2),
    SampledBallEvent: SampledBallEvent(1.0, 0.2),
    AllocatedEvent: AllocatedEvent(GaussianEvent(2.0), 3, 0.5),
    ParallelEvent: ParallelEvent("data", (("a", GaussianEvent(10.0)), ("b", PureEvent(0.1)), ("c", ZCdpEvent(0.004)))),
}
BESIDE = (GaussianEvent(12.0), PureEvent(0.12))
HOLDERS = {
    RepeatedEvent: lambda inner: RepeatedEvent(inner, 2),
    ComposedEvent: lambda inner: ComposedEvent((inner, FailureEvent(1e-8))),
    SubsampledEvent: lambda inner: SubsampledEvent(inner, 0.4),
    AllocatedEvent: lambda inner: AllocatedEvent(inner, 2, 0.8),
    ParallelEvent: lambda inner: ParallelEvent("other", tuple(zip("xyz", (inner, *BESIDE), strict=True))),
}
REFUSED = {
    (SubsampledEvent, FailureEvent): "outside of secret samples",
    (AllocatedEvent, FailureEvent): "outside of secret samples",
    (ParallelEvent, ParallelEvent): "nested",
}


def test_every_kind_of_event_is_in_the_table() -> None:
    assert set(ONE_OF_EACH) == set(EVENT_TYPES)
    holding = {
        kind for kind, event in ONE_OF_EACH.items() if {"event", "events", "branches"} & set(event_to_dict(event))
    }
    assert holding == set(HOLDERS)


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
@pytest.mark.parametrize("inner", EVENT_TYPES, ids=lambda kind: kind.kind)
@pytest.mark.parametrize("outer", HOLDERS, ids=lambda kind: kind.kind)
def test_every_kind_in_every_other_is_refused_or_keeps_the_laws(outer: type, inner: type, adjacency: str) -> None:
    event = HOLDERS[outer](ONE_OF_EACH[inner])
    assert event_from_dict(event_to_dict(event)) == event
    if (outer, inner) in REFUSED:
        with pytest.raises(UnknownEventError, match=REFUSED[outer, inner]):
            price(event, 1e-6, adjacency)
        return
    if inner is NonPrivateEvent:
        assert price(event, 1e-6, adjacency) == math.inf
        return
    wholes = [event]
    if adjacency == "replace_one":  # a unit of the labels has two places there, and one else
        wholes.append(ComposedEvent((event, FailureEvent(1e-7), ONE_OF_EACH[ParallelEvent])))
    for whole in wholes:
        bound = epsilon_bound(whole, delta=1e-6, adjacency=adjacency)  # raises where a second opinion differs
        assert bound.epsilon == price(whole, 1e-6, adjacency) < 20
        check_delta_of(whole, 1e-6, adjacency)
    epsilon = price(event, 1e-6, adjacency)  # beside others the same is asked of random events, below
    assert at_most(epsilon, price(RepeatedEvent(event, 2), 2e-6, adjacency))
    assert price(noisier(event, 2.0), 1e-6, adjacency) <= epsilon * (1 + 1e-9)
    assert price(ComposedEvent((event, FailureEvent(1e-6))), 1e-6, adjacency) == math.inf


# --- counts, noise, parts -------------------------------------------------------------------------------------------


@laws
@given(EVENTS, st.integers(1, 20), DELTAS, ADJACENCIES)
def test_one_more_never_costs_less(event: Event, count: int, delta: float, adjacency: str) -> None:
    costs = [price(RepeatedEvent(event, n), delta, adjacency) for n in (count, count + 1, 3 * count)]
    assert costs == sorted(costs)


@laws
@given(EVENTS, st.floats(1.05, 5.0), DELTAS, ADJACENCIES)
def test_more_noise_never_costs_more(event: Event, factor: float, delta: float, adjacency: str) -> None:
    assert price(noisier(event, factor), delta, adjacency) <= price(event, delta, adjacency) * (1 + 1e-9)


@laws
@given(EVENTS, everything(1), DELTAS, ADJACENCIES)
def test_one_part_more_never_costs_less(event: Event, more: Event, delta: float, adjacency: str) -> None:
    both = price(ComposedEvent((event, more)), delta, adjacency)
    assert at_most(price(event, delta, adjacency), both)
    assert at_most(price(more, delta, adjacency), both)


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_several_deals_and_balls_cost_the_same_in_any_order(adjacency: str) -> None:
    deals = AllocatedEvent(GaussianEvent(4.0), 2, 0.5), AllocatedEvent(GaussianEvent(5.0), 2, 0.5)
    parts = SampledBallEvent(2.0, 0.1), *deals, SampledBallEvent(3.0, 0.2), *[ONE_OF_EACH[ParallelEvent]] * 2
    assert price(ComposedEvent(parts), 1e-6, adjacency) == price(ComposedEvent(parts[::-1]), 1e-6, adjacency)


@laws
@given(EVENTS, ADJACENCIES)
def test_a_larger_delta_never_costs_more(event: Event, adjacency: str) -> None:
    costs = [price(event, delta, adjacency) for delta in (1e-2, 1e-3, 1e-5, 1e-8)]
    assert costs == sorted(costs)


@laws
@given(EVENTS, st.floats(1e-9, 1e-4), DELTAS, ADJACENCIES)
def test_a_failure_costs_what_it_takes_of_delta(event: Event, failure: float, delta: float, adjacency: str) -> None:
    both = ComposedEvent((event, FailureEvent(failure)))
    if failure >= delta:
        assert price(both, delta, adjacency) == math.inf
    else:
        assert price(both, delta, adjacency) >= price(event, delta, adjacency)
        assert at_most(price(both, delta, adjacency), price(event, (delta - failure) * (1 - 1e-9), adjacency))


# --- labels ---------------------------------------------------------------------------------------------------------


def partitions_of(event: Event) -> dict[str, set[str]]:
    match event:
        case ParallelEvent():
            return {event.partition: {label for label, _ in event.branches}}
        case RepeatedEvent() | SubsampledEvent() | AllocatedEvent():
            return partitions_of(event.event)
        case ComposedEvent():
            found: dict[str, set[str]] = {}
            for part in event.events:
                for partition, labels in partitions_of(part).items():
                    found.setdefault(partition, set()).update(labels)
            return found
        case _:
            return {}


@settings(laws, max_examples=100)
@given(EVENTS, DELTAS, ADJACENCIES)
def test_no_place_of_a_unit_costs_more_than_the_event(event: Event, delta: float, adjacency: str) -> None:
    """Every label, or pair of labels, is priced by itself; the price of the event leaves out those that are dominated."""
    size = 1 if adjacency == "add_remove" else 2
    partitions = partitions_of(event)
    assume(partitions)
    places = [
        [(name, labels) for labels in itertools.combinations(sorted(held), size)] for name, held in partitions.items()
    ]
    costs = [
        min(
            price_of(second_reading(event, place, in_parallel=flag), delta, adjacency, is_coarse=False).epsilon
            for flag in (True, adjacency == "replace_one")
        )
        for place in itertools.product(*places)
    ]
    assert at_most(max(costs), price(event, delta, adjacency))
    assert at_most(price(event, delta, adjacency), max(costs))


def has_failures(event: Event) -> bool:
    return "failure" in str(event_to_dict(event))


@st.composite
def weaker(draw: st.DrawFn, event: Event) -> Event:
    """What tells visibly no more than `event`: somewhere more noise, fewer repetitions, smaller samples or samples."""
    match event:
        case RepeatedEvent():
            small: Event = RepeatedEvent(draw(weaker(event.event)), draw(st.integers(0, event.count)))
        case ComposedEvent():
            small = ComposedEvent(tuple(draw(weaker(part)) for part in event.events))
        case SubsampledEvent():
            small = SubsampledEvent(draw(weaker(event.event)), event.sampling_rate * draw(st.floats(0.05, 1.0)))
        case AllocatedEvent():
            batches = event.num_batches + (draw(st.integers(0, 3)) if event.num_batches > 1 else 0)
            small = AllocatedEvent(draw(weaker(event.event)), batches, event.sampling_rate)
        case _:
            small = noisier(event, draw(st.floats(1.0, 3.0)))
    if not has_failures(small) and draw(st.booleans()):
        small = SubsampledEvent(small, draw(RATES))
    return small


@settings(laws, max_examples=100)
@given(st.data(), UNSPLIT, DELTAS, ADJACENCIES)
def test_what_dominates_costs_at_least_as_much(data: st.DataObject, large: Event, delta: float, adjacency: str) -> None:
    small = data.draw(weaker(large))
    assert dominates(large, small)
    assert at_most(price(small, delta, adjacency), price(large, delta, adjacency))
    for epsilon in EPSILONS:
        of_small, of_large = (delta_upper_bound(e, epsilon=epsilon, adjacency=adjacency) for e in (small, large))
        assert of_small <= of_large * (1 + 2e-3) + 1e-12


_SMALL = st.one_of(
    st.sampled_from([1.0, 3.0]).map(GaussianEvent), st.sampled_from([0.2, 0.9]).map(PureEvent), st.just(NoEvent())
)
_FEW = st.recursive(
    _SMALL,
    lambda inner: st.one_of(
        st.builds(RepeatedEvent, inner, st.integers(1, 2)),
        st.tuples(inner, inner).map(ComposedEvent),
        st.builds(SubsampledEvent, inner, st.sampled_from([0.1, 0.6, 1.0])),
        st.builds(AllocatedEvent, inner, st.integers(1, 2), st.sampled_from([0.6, 1.0])),
    ),
    max_leaves=3,
)


@settings(laws, max_examples=60)
@given(_FEW, _FEW, ADJACENCIES)
def test_whatever_is_said_to_dominate_costs_at_least_as_much(large: Event, small: Event, adjacency: str) -> None:
    assume(dominates(large, small))
    for delta in (1e-3, 1e-8):
        assert at_most(price(small, delta, adjacency), price(large, delta, adjacency))


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_a_step_on_everybody_dominates_the_same_step_on_a_sample(adjacency: str) -> None:
    for large in (GaussianEvent(2.0), PureEvent(0.5), BoundedRangeEvent(0.5), ZCdpEvent(0.05)):
        for rate in (0.001, 0.3, 0.9, 0.999):
            small = SubsampledEvent(noisier(large, 1.0), rate)
            assert dominates(large, small)
            assert dominates(RepeatedEvent(large, 5), RepeatedEvent(small, 4))
            assert dominates(RepeatedEvent(large, 5), SubsampledEvent(RepeatedEvent(noisier(large, 2.0), 5), rate))
            assert not dominates(small, large)
            assert not dominates(noisier(large, 2.0), small)
            assert not dominates(RepeatedEvent(large, 4), RepeatedEvent(large, 5))
            assert not dominates(RepeatedEvent(large, 4), RepeatedEvent(small, 5))
            assert price(small, 1e-6, adjacency) <= price(large, 1e-6, adjacency)
    block = ComposedEvent((GaussianEvent(2.0), PureEvent(0.5)))
    assert dominates(block, SubsampledEvent(block, 0.5))
    assert dominates(SubsampledEvent(block, 0.1), SubsampledEvent(SubsampledEvent(block, 0.1), 0.5))
    assert not dominates(SubsampledEvent(block, 0.1), SubsampledEvent(block, 0.5))
    assert not dominates(PureEvent(0.5), SubsampledEvent(block, 0.5))


@laws
@given(leaves(), st.tuples(RATES, RATES), st.integers(1, 9), DELTAS, ADJACENCIES)
def test_labels_of_which_one_reads_everybody_are_one_world(
    leaf: Event, rates: tuple[float, float], count: int, delta: float, adjacency: str
) -> None:
    rare = RepeatedEvent(leaf, count)
    common, largest = (RepeatedEvent(SubsampledEvent(leaf, rate), count) for rate in sorted(rates, reverse=True))
    event = ParallelEvent("data", (("common", common), ("largest", largest), ("rare", rare)))
    assert len(unit_terms(event, adjacency)) == 1
    worst = rare if adjacency == "add_remove" else ComposedEvent((rare, common))
    assert price(event, delta, adjacency) == price(worst, delta, adjacency)
