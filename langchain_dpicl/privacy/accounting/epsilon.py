"""Computes epsilon of events: upper bounds, rounded up; an event without a theorem is refused.

The engine composes pessimistic loss distributions with dp-accounting; closed forms are used where they are exact.
Proofs: docs/proofs/accounting.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from langchain_dpicl._lazy import provided
from langchain_dpicl.privacy._validate import Adjacency, check_adjacency, check_delta, check_real
from langchain_dpicl.privacy.accounting.bounds import Price, bounds, price_of
from langchain_dpicl.privacy.accounting.events import Event
from langchain_dpicl.privacy.accounting.normal_form import check_event, readings, unit_terms

_DIGITS = 6


@dataclass(frozen=True, slots=True)
class Opinion:
    """What another computation says about the same steps.

    Attributes:
      name: who computed it.
      lower: the dominating pairs do cost at least this.
      upper: they cost at most this; infinity where only a lower bound is offered.
    """

    name: str
    lower: float
    upper: float


@dataclass(frozen=True, slots=True)
class EpsilonBound:
    """An upper bound on epsilon and who agrees with it.

    Attributes:
      epsilon: the bound, rounded up; infinity if something was released without protection.
      delta: at which delta.
      adjacency: under which neighbouring relation.
      engine: what proved the bound.
      opinions: intervals of independent computations that were compared with it.
      skipped: second opinions that were not asked, and why.
    """

    epsilon: float
    delta: float
    adjacency: Adjacency
    engine: str
    opinions: tuple[Opinion, ...]
    skipped: tuple[str, ...]


def epsilon_bound(event: Event, *, delta: float, adjacency: Adjacency, opinions: bool = True) -> EpsilonBound:
    """Bounds epsilon and compares the bound with an independent computation.

    Formal guarantees:
      - Everything `event` describes, chosen adaptively and interleaved in any order, is (epsilon, delta)-DP.
      - The failures of every place that a unit may have come out of delta before that place is priced; where nothing is
        left, epsilon is infinite.
      - Composition never ignores a count: `RepeatedEvent(e, n + 1)` costs at least `RepeatedEvent(e, n)`.
      - Under `add_remove` both orders of neighbours are covered: removals compose with removals, additions with
        additions, and the larger result is reported.

    Args:
      event: what was, or will be, released.
      delta: from 0, which only pure steps have a price at, to below 1.
      adjacency: "add_remove" or "replace_one"; noise in `event` is relative to the sensitivity of that relation.
      opinions: whether to ask second accountants (up to seconds).

    Raises:
      UnknownEventError: no theorem prices the event.
      AccountantsDisagreeError: two computations differ beyond their declared errors.
      ConfigurationError: delta or adjacency out of range.

    >>> from langchain_dpicl.privacy.accounting.events import GaussianEvent
    >>> epsilon_bound(GaussianEvent(1.0), delta=1e-5, adjacency="add_remove").epsilon
    4.377179

    Source: Balle and Wang (2018), Theorem 8; Doroshenko et al. (2022), Algorithm 1; Zhu, Dong and Wang (2022),
    composition of dominating pairs; Kairouz, Oh and Viswanath (2015), Theorem 3.3; Canonne, Kamath and Steinke (2020),
    Proposition 12.
    """
    price = _price(event, check_delta(delta), check_adjacency(adjacency), is_coarse=False)
    heard: tuple[Opinion, ...] = ()
    skipped: tuple[str, ...] = ()
    if opinions and price.epsilon < math.inf:
        heard, skipped = second_opinions(event, price, delta=delta, adjacency=adjacency)
    return EpsilonBound(_up(price.epsilon), delta, adjacency, price.engine, heard, skipped)


def second_opinions(
    event: Event, price: Price, *, delta: float, adjacency: Adjacency
) -> tuple[tuple[Opinion, ...], tuple[str, ...]]:
    """Compares a price with other computations, which are loaded for it: they may refuse it and cannot change it."""
    found: tuple[tuple[Opinion, ...], tuple[str, ...]] = provided("second_opinions").second_opinions(
        event, price, delta=delta, adjacency=adjacency
    )
    return found


def epsilon_upper_bound(event: Event, *, delta: float, adjacency: Adjacency) -> float:
    """Bounds epsilon, rounded up, without asking for second opinions. See `epsilon_bound`.

    Args:
      event: what was, or will be, released.
      delta: from 0, which only pure steps have a price at, to below 1.
      adjacency: "add_remove" or "replace_one".

    Raises:
      ConfigurationError: an argument is out of range.
      UnknownEventError: no theorem prices the event.
    """
    return _up(_price(event, check_delta(delta), check_adjacency(adjacency), is_coarse=False).epsilon)


def delta_upper_bound(event: Event, *, epsilon: float, adjacency: Adjacency) -> float:
    """Bounds delta at a given epsilon >= 0, rounded up and never above 1. See `epsilon_bound`.

    Args:
      event: what was, or will be, released.
      epsilon: at which epsilon.
      adjacency: "add_remove" or "replace_one".

    Raises:
      ConfigurationError: an argument is out of range.
      UnknownEventError: no theorem prices the event.
    """
    check_event(event)
    check_real("epsilon", epsilon, low=0.0)
    check_adjacency(adjacency)
    return min(1.0, _up(min(_largest_delta(reading, epsilon, adjacency) for reading in readings(event, adjacency))))


def _largest_delta(event: Event, epsilon: float, adjacency: Adjacency) -> float:
    largest = 0.0
    for world in unit_terms(event, adjacency):
        if not world.terms.is_bounded:
            return 1.0
        found = () if world.terms.is_empty else bounds(world.terms, adjacency, is_coarse=False)
        largest = max(largest, min((bound.delta(epsilon) for bound in found), default=0.0) + world.failure)
    return largest


def _price(event: Event, delta: float, adjacency: Adjacency, *, is_coarse: bool) -> Price:
    check_event(event)  # before it is hashed
    return _cached_price(event, delta, adjacency, is_coarse)


@lru_cache(maxsize=1024)
def _cached_price(event: Event, delta: float, adjacency: Adjacency, is_coarse: bool) -> Price:
    """The least price of all that bound the event."""
    prices = [_price_in(reading, delta, adjacency, is_coarse=is_coarse) for reading in readings(event, adjacency)]
    return min(prices, key=lambda price: price.epsilon)


def _price_in(event: Event, delta: float, adjacency: Adjacency, *, is_coarse: bool) -> Price:
    """The price of the costliest world; cheap coarse prices, which are bounds too, spare most fine ones."""
    everywhere = unit_terms(event, adjacency)
    if len(everywhere) == 1 or is_coarse:
        return max((price_of(w, delta, adjacency, is_coarse=is_coarse) for w in everywhere), key=lambda p: p.epsilon)
    rough = [price_of(world, delta, adjacency, is_coarse=True) for world in everywhere]
    rough.sort(key=lambda price: -price.epsilon)
    worst = price_of(rough[0].world, delta, adjacency, is_coarse=False)
    for price in rough[1:]:
        if price.epsilon > worst.epsilon:
            fine = price_of(price.world, delta, adjacency, is_coarse=False)
            worst = max(worst, fine, key=lambda p: p.epsilon)
    return worst


def _up(value: float) -> float:
    """Rounds up to seven significant digits."""
    if value <= 0.0 or not math.isfinite(value):
        return value
    value = max(value, 1e-200)
    scale = 10.0 ** (_DIGITS - math.floor(math.log10(value)))
    return math.ceil(value * scale) / scale
