"""An event that no theorem speaks of is refused where it is made; the ends of every range are taken."""

from __future__ import annotations

import math

import pytest

from langchain_dpicl.exceptions import UnknownEventError
from langchain_dpicl.privacy.accounting.events import (
    BoundedRangeEvent,
    ComposedEvent,
    GaussianEvent,
    ParallelEvent,
    PureEvent,
    RepeatedEvent,
    SubsampledEvent,
    ZCdpEvent,
)
from langchain_dpicl.privacy.extensions.gradient_sums import SampledBallEvent
from langchain_dpicl.privacy.extensions.random_allocation import MAX_BATCHES, AllocatedEvent

BASE = GaussianEvent(1.0)
POSITIVE = {
    "gaussian": GaussianEvent,
    "pure": PureEvent,
    "range": BoundedRangeEvent,
    "zcdp": ZCdpEvent,
    "ball": lambda value: SampledBallEvent(value, 0.5),
}
RATES = {
    "subsampled": lambda value: SubsampledEvent(BASE, value),
    "ball": lambda value: SampledBallEvent(1.0, value),
    "allocated": lambda value: AllocatedEvent(BASE, 2, value),
}
COUNTS = {
    "repeated": (lambda value: RepeatedEvent(BASE, value), 0, 2**63 - 1),
    "allocated": (lambda value: AllocatedEvent(BASE, value, 0.5), 1, MAX_BATCHES),
}
INNER = {
    "repeated": lambda event: RepeatedEvent(event, 2),
    "composed": lambda event: ComposedEvent((BASE, event)),
    "subsampled": lambda event: SubsampledEvent(event, 0.5),
    "allocated": lambda event: AllocatedEvent(event, 2, 0.5),
    "parallel": lambda event: ParallelEvent("d", (("a", BASE), ("b", event))),
}


@pytest.mark.parametrize("bad", [0, 0.0, -1.0, math.nan, -math.inf, True, "1", None])
@pytest.mark.parametrize("name", POSITIVE)
def test_an_amount_is_a_number_above_zero(name, bad):
    with pytest.raises(UnknownEventError, match="> 0"):
        POSITIVE[name](bad)
    assert POSITIVE[name](5e-324) == POSITIVE[name](5e-324)
    POSITIVE[name](1)


@pytest.mark.parametrize("name", ["pure", "range", "zcdp"])
def test_an_endless_loss_is_no_event_of_a_theorem(name):
    with pytest.raises(UnknownEventError, match="finite"):
        POSITIVE[name](math.inf)


@pytest.mark.parametrize("bad", [0.0, -0.5, math.nextafter(1.0, 2.0), 1.5, 2, math.inf, math.nan, True, "0.5", None])
@pytest.mark.parametrize("name", RATES)
def test_a_rate_is_above_zero_and_at_most_one(name, bad):
    with pytest.raises(UnknownEventError, match="sampling_rate <= 1"):
        RATES[name](bad)
    RATES[name](5e-324)
    RATES[name](1)


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_is_a_whole_number_of_its_range(name):
    make, least, most = COUNTS[name]
    for bad in (least - 1, most + 1, 1.0, True, False, "2", None, math.nan):
        with pytest.raises(UnknownEventError, match="integer"):
            make(bad)
    make(least)
    make(most)


@pytest.mark.parametrize("bad", [None, "gaussian", 1.0, GaussianEvent, (BASE,)], ids=lambda bad: type(bad).__name__)
@pytest.mark.parametrize("name", INNER)
def test_what_is_inside_is_an_event_too(name, bad):
    with pytest.raises(UnknownEventError, match="event that has a price"):
        INNER[name](bad)
    INNER[name](BASE)


def test_labels_are_sorted_texts_and_each_stands_once():
    event = ParallelEvent("d", (("b", BASE), (1, PureEvent(1.0)), ("a", BASE)))
    assert [label for label, _ in event.branches] == ["1", "a", "b"]
    with pytest.raises(UnknownEventError, match="distinct"):
        ParallelEvent("d", (("1", BASE), (1, BASE)))
