"""Events that only look like ours have no price, wherever they stand in an event."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import UnknownEventError
from langchain_dpicl.privacy._validate import Adjacency
from langchain_dpicl.privacy.accounting import delta_upper_bound, epsilon_upper_bound
from langchain_dpicl.privacy.accounting.events import (
    ComposedEvent,
    Event,
    GaussianEvent,
    NoEvent,
    ParallelEvent,
    RepeatedEvent,
    SubsampledEvent,
)
from langchain_dpicl.privacy.extensions.random_allocation import AllocatedEvent
from langchain_dpicl.privacy.ledger.tickets import Ticket


class Quiet(GaussianEvent):
    """Says that it is nothing once it is rebuilt."""

    def with_parts(self, parts: tuple[Event, ...]) -> Event:
        return NoEvent()


class QuietRepeat(RepeatedEvent):
    def with_parts(self, parts: tuple[Event, ...]) -> Event:
        return NoEvent()


class QuietDeal(AllocatedEvent):
    own_adjacencies = frozenset()

    @property
    def bounded_by(self) -> Event:
        return NoEvent()


LOUD = 0.05
FAKES: dict[str, Callable[[], Event]] = {
    "leaf": lambda: Quiet(LOUD),
    "repeat": lambda: QuietRepeat(GaussianEvent(LOUD), 3),
    "deal": lambda: QuietDeal(GaussianEvent(LOUD), 3, 1.0),
}
AROUND: dict[str, Callable[[Event], Event]] = {
    "alone": lambda event: event,
    "composed": lambda event: ComposedEvent((event,)),
    "repeated": lambda event: RepeatedEvent(event, 2),
    "sampled": lambda event: SubsampledEvent(event, 0.5),
    "parallel": lambda event: ParallelEvent("d", (("a", event), ("b", NoEvent()))),
    "deep": lambda event: ComposedEvent((RepeatedEvent(ComposedEvent((event, GaussianEvent(1.0))), 2),)),
}


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("fake", FAKES)
def test_a_subclass_has_no_price_wherever_it_stands(fake: str, around: str, adjacency: Adjacency) -> None:
    event = AROUND[around](FAKES[fake]())
    with pytest.raises(UnknownEventError):
        epsilon_upper_bound(event, delta=1e-6, adjacency=adjacency)
    with pytest.raises(UnknownEventError):
        delta_upper_bound(event, epsilon=1.0, adjacency=adjacency)


@pytest.mark.parametrize("fake", FAKES)
def test_a_subclass_buys_no_share(fake: str) -> None:
    budget = Budget(epsilon=0.1, delta=1e-6, adjacency="replace_one")
    with pytest.raises(UnknownEventError):
        budget.declare("fake", tickets=[Ticket("t", ComposedEvent((FAKES[fake](),)))], epsilon=0.1)
