"""The only place that computes an epsilon. Knows events, adjacency and delta; no data, no noise, no budget.

Prices are upper bounds, rounded up; noise is rounded up; an event without a theorem is refused. The main engine
composes pessimistic loss distributions with dp-accounting, closed forms are used where they are exact, and
`epsilon_bound` reads the event again and asks a second accountant before it answers. Proofs: docs/proofs/accounting.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy import _engine, _profiles, _search
from langchain_dpicl.privacy._grid import CurveBound
from langchain_dpicl.privacy._opinions import Opinion
from langchain_dpicl.privacy._prices import Price, price_of
from langchain_dpicl.privacy._second_opinions import second_opinions
from langchain_dpicl.privacy._terms import check_event, readings, worlds
from langchain_dpicl.privacy._validate import (
    Adjacency,
    check_adjacency,
    check_delta,
    check_epsilon,
    check_positive,
    check_real,
)
from langchain_dpicl.privacy.events import Event

__all__ = [
    "EpsilonBound",
    "Opinion",
    "calibrate",
    "delta_upper_bound",
    "epsilon_bound",
    "epsilon_upper_bound",
    "gdp_epsilon",
    "gdp_mu",
    "zcdp_epsilon",
    "zcdp_rho",
]

_DIGITS = 6
_NOISE_TOLERANCE = 1e-4


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
      delta: in (0, 1).
      adjacency: "add_remove" or "replace_one"; noise in `event` is relative to the sensitivity of that relation.
      opinions: whether to ask second accountants (up to seconds).

    Raises:
      UnknownEventError: no theorem prices the event.
      AccountantsDisagreeError: two computations differ beyond their declared errors.
      ConfigurationError: delta or adjacency out of range.

    >>> from langchain_dpicl.privacy.events import GaussianEvent
    >>> epsilon_bound(GaussianEvent(1.0), delta=1e-5, adjacency="add_remove").epsilon
    4.377179

    Source: Balle and Wang (2018), Theorem 8; Doroshenko et al. (2022), Algorithm 1; Zhu, Dong and Wang (2022),
    composition of dominating pairs; Kairouz, Oh and Viswanath (2015), Theorem 3.3; Canonne, Kamath and Steinke (2020),
    Proposition 12.
    """
    price = _priced(event, check_delta(delta), check_adjacency(adjacency), is_coarse=False)
    heard: tuple[Opinion, ...] = ()
    skipped: tuple[str, ...] = ()
    if opinions and price.epsilon < math.inf:
        heard, skipped = second_opinions(event, price, delta=delta, adjacency=adjacency)
    return EpsilonBound(_up(price.epsilon), delta, adjacency, price.engine, heard, skipped)


def epsilon_upper_bound(event: Event, *, delta: float, adjacency: Adjacency) -> float:
    """Bounds epsilon, rounded up, without asking for second opinions. See `epsilon_bound`.

    Args:
      event: what was, or will be, released.
      delta: in (0, 1).
      adjacency: "add_remove" or "replace_one".

    Raises:
      ConfigurationError: an argument is out of range.
      UnknownEventError: no theorem prices the event.
    """
    return _up(_priced(event, check_delta(delta), check_adjacency(adjacency), is_coarse=False).epsilon)


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
    for world in worlds(event, adjacency):
        if not world.terms.is_bounded:
            return 1.0
        found = () if world.terms.is_empty else _engine.bounds(world.terms, adjacency, is_coarse=False)
        largest = max(largest, min((bound.delta(epsilon) for bound in found), default=0.0) + world.failure)
    return largest


# --- pricing ------------------------------------------------------------------------------------------------------


def _priced(event: Event, delta: float, adjacency: Adjacency, *, is_coarse: bool) -> Price:
    check_event(event)  # before it is hashed
    return _remembered(event, delta, adjacency, is_coarse)


@lru_cache(maxsize=1024)
def _remembered(event: Event, delta: float, adjacency: Adjacency, is_coarse: bool) -> Price:
    """The least price of all that bound the event."""
    prices = [_price_in(reading, delta, adjacency, is_coarse=is_coarse) for reading in readings(event, adjacency)]
    return min(prices, key=lambda price: price.epsilon)


def _price_in(event: Event, delta: float, adjacency: Adjacency, *, is_coarse: bool) -> Price:
    """The price of the costliest world; cheap coarse prices, which are bounds too, spare most fine ones."""
    everywhere = worlds(event, adjacency)
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


# --- the other direction ------------------------------------------------------------------------------------------


def calibrate(
    event_at: Callable[[float], Event],
    *,
    epsilon: float,
    delta: float,
    adjacency: Adjacency,
    low: float = 1e-3,
    high: float = 1e5,
    is_rough: bool = False,
) -> float:
    """Finds the smallest parameter whose event costs at most `epsilon`, rounded up.

    Formal guarantees:
      - The event of the returned x costs at most `epsilon`: checked on the fine grid at the end, or, if `is_rough`, on
        the coarse one, whose prices are upper bounds too.

    Args:
      event_at: from a public parameter (usually a noise multiplier) to an event that costs less when it grows.
      epsilon: the limit, > 0.
      delta: in (0, 1).
      adjacency: "add_remove" or "replace_one".
      low: least parameter to consider, > 0.
      high: largest parameter to consider.
      is_rough: whether a comparison of many designs asks: several times faster, and a few percent above the smallest.

    Returns:
      The parameter, within 0.02 % of the smallest that fits unless `is_rough`.

    Raises:
      ConfigurationError: even `high` costs more than `epsilon`, or an argument is out of range.
      UnknownEventError: no theorem prices the event.
    """
    check_epsilon(epsilon)
    check_delta(delta)
    check_adjacency(adjacency)
    check_real("high", high, low=check_positive("low", low), low_open=True)

    def rough(x: float) -> float:
        return _priced(event_at(x), delta, adjacency, is_coarse=True).epsilon

    def exact(x: float) -> float:
        return epsilon_upper_bound(event_at(x), delta=delta, adjacency=adjacency)

    too_small, enough = _search.bracket(rough, epsilon, low=low, high=high)
    guess = too_small if enough is None else enough
    if too_small is not None and enough is not None:
        _, guess = _search.narrow(rough, epsilon, (too_small, enough), tolerance=0.02)
    if is_rough and guess is not None and enough is not None:
        return guess
    too_small, enough = _search.around(exact, epsilon, float(guess or low), low=low, high=high)
    if enough is None:
        raise ConfigurationError(
            f"epsilon: expected at least {exact(high):.4g}, found {epsilon!r}: even the parameter {high:g} costs that. "
            "Ask for fewer releases, a lower sampling rate or a larger delta."
        )
    if too_small is None:
        return enough
    _, found = _search.narrow(exact, epsilon, (too_small, enough), tolerance=_NOISE_TOLERANCE)
    rounded = min(_up(found), high)
    return rounded if exact(rounded) <= epsilon else found


def gdp_epsilon(mu: float, delta: float) -> float:
    """Bounds epsilon of a mu-GDP mechanism at `delta`, rounded up.

    Args:
      mu: of the mechanism, > 0.
      delta: in (0, 1).

    Raises:
      ConfigurationError: an argument is out of range.

    >>> gdp_epsilon(1.0, 1e-5)
    4.377179

    Source: Dong, Roth and Su (2022), Corollary 2.13 (exact).
    """
    return _curve_epsilon(_profiles.gaussian(check_positive("mu", mu)), delta)


def zcdp_epsilon(rho: float, delta: float) -> float:
    """Bounds epsilon of a rho-zCDP mechanism at `delta`, rounded up.

    Args:
      rho: of the mechanism, > 0.
      delta: in (0, 1).

    Raises:
      ConfigurationError: an argument is out of range.

    >>> zcdp_epsilon(0.0244, 1e-6)
    1.000968

    Source: Canonne, Kamath and Steinke (2020), Proposition 12.
    """
    return _curve_epsilon(_profiles.zcdp(check_positive("rho", rho)), delta)


def gdp_mu(epsilon: float, delta: float) -> float:
    """The largest mu, rounded down, with `gdp_epsilon(mu, delta) <= epsilon`.

    Args:
      epsilon: the limit, > 0.
      delta: in (0, 1).

    Raises:
      ConfigurationError: an argument is out of range.
    """
    return _largest(_profiles.gaussian, epsilon, delta)


def zcdp_rho(epsilon: float, delta: float) -> float:
    """The largest rho, rounded down, with `zcdp_epsilon(rho, delta) <= epsilon`.

    Args:
      epsilon: the limit, > 0.
      delta: in (0, 1).

    Raises:
      ConfigurationError: an argument is out of range.
    """
    return _largest(_profiles.zcdp, epsilon, delta)


def _curve_epsilon(profile: _profiles.Profile, delta: float) -> float:
    return _up(max(CurveBound("closed form", profile).epsilons(check_delta(delta))))


def _largest(family: Callable[[float], _profiles.Profile], epsilon: float, delta: float) -> float:
    at, limit = np.array([check_epsilon(epsilon)]), check_delta(delta)
    low, high = 1e-12, 1e8
    for _ in range(80):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if family(middle).up(at)[0] <= limit else (low, middle)
    while _curve_epsilon(family(low), delta) > epsilon:  # that price is rounded up
        low *= 1.0 - 5e-7
    return low
