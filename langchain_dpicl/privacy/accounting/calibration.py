"""Finds the least parameter that costs at most an epsilon; bounds delta; converts to Gaussian DP and zCDP."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import (
    Adjacency,
    check_adjacency,
    check_delta,
    check_epsilon,
    check_positive,
    check_positive_delta,
    check_real,
    round_up_at,
)
from langchain_dpicl.privacy.accounting import profiles
from langchain_dpicl.privacy.accounting.epsilon import (
    _price,
    _up,
    bounds,
    check_event,
    epsilon_upper_bound,
    readings,
    unit_terms,
)
from langchain_dpicl.privacy.accounting.events import Event
from langchain_dpicl.privacy.accounting.profiles import Bound, CurveBound, GridBound

Cost = Callable[[float], float]

_NOISE_TOLERANCE = 1e-4
# Significant digits of what is found: prices of one event differ between processors in the seventh digit, and at small
# deltas before it, and a share that another host declares must have the same noise.
_NOISE_DIGITS = 4
_ROUGH_TOLERANCE = 0.02 + 1e-9  # the first steps from a good guess are as wide, give or take a rounding
_STEP = 4.0
_NEARLY, _AIM = 0.98, 0.99  # shares of the limit: from which on a search by secants ends, and what it aims at
# Power of the cost in a noise multiplier, where one price is known: between 1 of much noise and 3 of little.
_USUAL_POWER = 1.5
_MOST_SECANTS, _FARTHEST = 8, 100.0  # and the farthest step, as a logarithm: secants of a flat cost have no end


def calibrate(
    event_at: Callable[[float], Event],
    *,
    epsilon: float,
    delta: float,
    adjacency: Adjacency,
    low: float = 1e-3,
    high: float = 1e5,
    is_rough: bool = False,
    near: float | None = None,
) -> float:
    """Finds the smallest parameter whose event costs at most `epsilon`, rounded up to four digits.

    Formal guarantees:
      - The event of the returned x costs at most `epsilon`: checked on the fine grid at the end, or, if `is_rough`, on
        the coarse one, whose prices are upper bounds too.

    Args:
      event_at: from a public parameter (usually a noise multiplier) to an event that costs less when it grows.
      epsilon: the limit, > 0.
      delta: from 0, which only pure steps have a price at, to below 1.
      adjacency: "add_remove" or "replace_one".
      low: least parameter to consider, > 0.
      high: largest parameter to consider.
      is_rough: whether a comparison of many designs asks: several times faster, and a few percent above the smallest.
      near: a guess, from which secants lead to what fits in a few steps; None: steps of 4 from 1 on.

    Returns:
      The parameter, within 0.1 % of the smallest that fits unless `is_rough`.

    Raises:
      ConfigurationError: even `high` costs more than `epsilon`, or an argument is out of range.
      UnknownEventError: no theorem prices the event.
    """
    check_epsilon(epsilon)
    check_delta(delta)
    check_adjacency(adjacency)
    check_real("high", high, low=check_positive("low", low), low_open=True)

    def rough(x: float) -> float:
        return _price(event_at(x), delta, adjacency, is_coarse=True).epsilon

    def exact(x: float) -> float:
        return epsilon_upper_bound(event_at(x), delta=delta, adjacency=adjacency)

    guess = None if near is None else min(max(check_positive("near", near), low), high)
    fits = None if guess is None else by_secants(rough, epsilon, guess, low=low, high=high)
    if fits is None:
        too_small, fits = bracket(rough, epsilon, low=low, high=high)
        if too_small is not None and fits is not None:
            _, fits = narrow(rough, epsilon, (too_small, fits), tolerance=_ROUGH_TOLERANCE)
    if is_rough and fits is not None:
        return fits
    too_small, enough = bracket_near(exact, epsilon, high if fits is None else fits, low=low, high=high)
    if enough is None:
        raise ConfigurationError(
            f"epsilon: expected at least {round_up_at(exact(high))}, found {epsilon!r}: even the parameter {high:g} "
            "costs that. Ask for fewer releases, a lower sampling rate or a larger delta."
        )
    if too_small is None:
        return enough
    ends = narrow(exact, epsilon, (too_small, enough), tolerance=_NOISE_TOLERANCE)
    rounded = (min(_up(end, _NOISE_DIGITS), high) for end in ends)
    return next((x for x in rounded if exact(x) <= epsilon), ends[1])


def bracket(cost: Cost, limit: float, *, low: float, high: float) -> tuple[float | None, float | None]:
    """(costs too much, fits), a factor of four apart, from 1 outwards; None where an end of [low, high] was met."""
    x = min(max(1.0, low), high)
    if cost(x) > limit:
        while x < high:
            larger = min(_STEP * x, high)
            if cost(larger) <= limit:
                return x, larger
            x = larger
        return x, None
    while x > low:
        smaller = max(x / _STEP, low)
        if cost(smaller) > limit:
            return smaller, x
        x = smaller
    return None, x


def bracket_near(
    cost: Cost, limit: float, guess: float, *, low: float, high: float
) -> tuple[float | None, float | None]:
    """The same around a good guess: a few percent apart."""
    below, above = guess, guess
    factor = 1.02
    while cost(above) > limit:
        if above >= high:
            return above, None
        below, above, factor = above, min(above * factor, high), factor * factor
    while cost(below) <= limit:
        if below <= low:
            return None, below
        above, below, factor = below, max(below / factor, low), factor * factor
    return below, above


def by_secants(cost: Cost, limit: float, guess: float, *, low: float, high: float) -> float | None:
    """A parameter that fits and costs nearly the limit; None if the secants of the logarithms lead to none."""
    x, power = guess, _USUAL_POWER
    before: tuple[float, float] | None = None
    for _ in range(_MOST_SECANTS):
        price = cost(x)
        if _NEARLY * limit <= price <= limit:
            return x
        if not 0.0 < price < math.inf:
            return None
        if before is not None:
            power = (math.log(before[1]) - math.log(price)) / math.log(x / before[0])
        if power <= 0.0:
            return None
        before = x, price
        way = (math.log(price) - math.log(_AIM * limit)) / power
        x = min(max(x * math.exp(min(way, _FARTHEST)), low), high)
        if math.isclose(x, before[0]):
            return None
    return None


def narrow(cost: Cost, limit: float, ends: tuple[float, float], *, tolerance: float) -> tuple[float, float]:
    """Shrinks (costs too much, fits) to a ratio of 1 + tolerance.

    Costs are close to powers of the parameter, so each round interpolates logarithms and tries just above and just
    below that point; it halves the interval where that does not.
    """
    small, large = ends
    while large / small > 1.0 + tolerance:
        width = large / small
        centre = _interpolate(small, large, cost(small), cost(large), limit)
        for x in (centre * (1.0 + tolerance / 3.0), centre / (1.0 + tolerance / 3.0)):
            small, large = _bisect(cost, limit, small, large, x)
        if large / small > math.sqrt(width):
            small, large = _bisect(cost, limit, small, large, math.sqrt(small * large))
    return small, large


def _bisect(cost: Cost, limit: float, small: float, large: float, x: float) -> tuple[float, float]:
    if not small < x < large:
        return small, large
    return (small, x) if cost(x) <= limit else (x, large)


def _interpolate(small: float, large: float, cost_small: float, cost_large: float, limit: float) -> float:
    if not (math.isfinite(cost_small) and 0.0 < cost_large < cost_small):
        return math.sqrt(small * large)
    share = math.log(cost_small / limit) / math.log(cost_small / cost_large)
    return small * math.exp(min(max(share, 0.0), 1.0) * math.log(large / small))


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
        largest = max(largest, min((delta_of(bound, epsilon) for bound in found), default=0.0) + world.failure)
    return largest


def delta_of(bound: Bound, epsilon: float) -> float:
    """Upper bound on delta over both orders of the pair, at a given epsilon."""
    if isinstance(bound, CurveBound):
        at = np.array([epsilon])
        return float(max(bound.profile.up(at)[0], bound.profile.down(at)[0]))
    if isinstance(bound, GridBound):
        return float(max(each.pmf().get_delta_for_epsilon(epsilon) for each in (bound.up, bound.down))) + bound.lost
    low, high = 1e-300, 1.0
    while high / low > 1.0 + 1e-6:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if max(bound.epsilons(middle)) <= epsilon else (middle, high)
    return high


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
    return _curve_epsilon(profiles.gaussian(check_positive("mu", mu)), delta)


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
    return _curve_epsilon(profiles.zcdp(check_positive("rho", rho)), delta)


def gdp_mu(epsilon: float, delta: float) -> float:
    """The largest mu, rounded down, with `gdp_epsilon(mu, delta) <= epsilon`.

    Args:
      epsilon: the limit, > 0.
      delta: in (0, 1).

    Raises:
      ConfigurationError: an argument is out of range.
    """
    return _largest(profiles.gaussian, epsilon, delta)


def zcdp_rho(epsilon: float, delta: float) -> float:
    """The largest rho, rounded down, with `zcdp_epsilon(rho, delta) <= epsilon`.

    Args:
      epsilon: the limit, > 0.
      delta: in (0, 1).

    Raises:
      ConfigurationError: an argument is out of range.
    """
    return _largest(profiles.zcdp, epsilon, delta)


def _curve_epsilon(profile: profiles.Profile, delta: float) -> float:
    return _up(max(CurveBound("closed form", profile).epsilons(check_positive_delta(delta))))


def _largest(family: Callable[[float], profiles.Profile], epsilon: float, delta: float) -> float:
    at, limit = np.array([check_epsilon(epsilon)]), check_positive_delta(delta)
    low, high = 1e-12, 1e8
    if family(low).up(at)[0] > limit:  # else as they always were: sealed pools name what comes out
        low = 1e-30
    for _ in range(80):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if family(middle).up(at)[0] <= limit else (low, middle)
    while _curve_epsilon(family(low), delta) > epsilon:  # that price is rounded up
        low *= 1.0 - 5e-7
    return low
