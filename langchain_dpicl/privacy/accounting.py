"""The only place that computes an epsilon. Knows events, adjacency and delta; no data, no noise, no budget.

Prices are upper bounds, rounded up; noise is rounded up; an event without a theorem is refused. The main engine
composes pessimistic loss distributions with dp-accounting, closed forms are used where they are exact, and
`epsilon_bound` asks a second accountant before it answers. Proofs: docs/proofs/accounting.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from langchain_dpicl.exceptions import AccountantsDisagreeError, ConfigurationError
from langchain_dpicl.privacy import _allocation_opinion, _engine, _opinions, _profiles, _search
from langchain_dpicl.privacy._grid import Bound, CurveBound, GridBound
from langchain_dpicl.privacy._opinions import Opinion
from langchain_dpicl.privacy._terms import Terms, check_event, readings, worlds
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


@dataclass(frozen=True, slots=True)
class _Price:
    """The costliest world of an event and the least bound on it; remembered, so it holds no distributions."""

    terms: Terms
    removed: float
    added: float
    engine: str
    error: float
    delta: float = 0.0  # what failures leave of it

    @property
    def epsilon(self) -> float:
        return max(self.removed, self.added)


def epsilon_bound(event: Event, *, delta: float, adjacency: Adjacency, opinions: bool = True) -> EpsilonBound:
    """Bounds epsilon and compares the bound with an independent computation.

    Formal guarantees:
      - Everything `event` describes, chosen adaptively and interleaved in any order, is (epsilon, delta)-DP.
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
    if opinions and price.delta > 0.0:  # 0 where there is nothing to price, or no price
        heard, skipped = _second_opinions(price, delta=price.delta, adjacency=adjacency)
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
        if not world.is_bounded:
            return 1.0
        terms, _ = world.without_failures(0.0)
        found = () if terms.is_empty else _engine.bounds(terms, adjacency, is_coarse=False)
        largest = max(largest, min((bound.delta(epsilon) for bound in found), default=0.0) + world.failure)
    return largest


# --- pricing ------------------------------------------------------------------------------------------------------


def _priced(event: Event, delta: float, adjacency: Adjacency, *, is_coarse: bool) -> _Price:
    check_event(event)  # before it is hashed
    return _remembered(event, delta, adjacency, is_coarse)


@lru_cache(maxsize=1024)
def _remembered(event: Event, delta: float, adjacency: Adjacency, is_coarse: bool) -> _Price:
    """The least price of all that bound the event."""
    prices = [_price_in(reading, delta, adjacency, is_coarse=is_coarse) for reading in readings(event, adjacency)]
    return min(prices, key=lambda price: price.epsilon)


def _price_in(event: Event, delta: float, adjacency: Adjacency, *, is_coarse: bool) -> _Price:
    """The price of the costliest world; cheap coarse prices, which are bounds too, spare most fine ones."""
    everywhere = worlds(event, adjacency)
    if len(everywhere) == 1 or is_coarse:
        return max((_price_of(t, delta, adjacency, is_coarse=is_coarse) for t in everywhere), key=lambda p: p.epsilon)
    rough = [_price_of(terms, delta, adjacency, is_coarse=True) for terms in everywhere]
    rough.sort(key=lambda price: -price.epsilon)
    worst = _price_of(rough[0].terms, delta, adjacency, is_coarse=False)
    for price in rough[1:]:
        if price.epsilon > worst.epsilon:
            fine = _price_of(price.terms, delta, adjacency, is_coarse=False)
            worst = max(worst, fine, key=lambda p: p.epsilon)
    return worst


def _price_of(terms: Terms, delta: float, adjacency: Adjacency, *, is_coarse: bool) -> _Price:
    if not terms.is_bounded:
        return _Price(terms, math.inf, math.inf, "not private", 0.0)
    terms, delta = terms.without_failures(delta)
    if delta <= 0.0:
        return _Price(terms, math.inf, math.inf, "failures alone reach delta", 0.0)
    if terms.is_empty:
        return _Price(terms, 0.0, 0.0, "nothing released", 0.0)
    prices = list(_bound_prices(_engine.bounds(terms, adjacency, is_coarse=is_coarse), terms, delta))
    if any(price.epsilon == math.inf for price in prices):
        prices.extend(_bound_prices((_engine.last_resort(terms, adjacency),), terms, delta))
    return min(prices, key=lambda price: price.epsilon)


def _bound_prices(bounds: tuple[Bound, ...], terms: Terms, delta: float) -> Iterator[_Price]:
    for bound in bounds:
        removed, added = bound.epsilons(delta)
        yield _Price(terms, removed, added, bound.name, bound.error(delta), delta)


def _up(value: float) -> float:
    """Rounds up to seven significant digits."""
    if value <= 0.0 or not math.isfinite(value):
        return value
    value = max(value, 1e-200)
    scale = 10.0 ** (_DIGITS - math.floor(math.log10(value)))
    return math.ceil(value * scale) / scale


# --- second opinions ----------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _second_opinions(
    price: _Price, *, delta: float, adjacency: Adjacency
) -> tuple[tuple[Opinion, ...], tuple[str, ...]]:
    if price.epsilon == 0.0:
        return (), ("all: epsilon is 0 at this delta",)
    answers = list(_ask_all(price, delta=delta, adjacency=adjacency))
    heard = tuple(answer for answer in answers if isinstance(answer, Opinion))
    return heard, tuple(answer for answer in answers if isinstance(answer, str))


def _ask_all(price: _Price, *, delta: float, adjacency: Adjacency) -> Iterator[Opinion | str]:
    """prv-accountant where it has a theorem and is sound; else our own transform; an attack where we know one."""
    terms = price.terms
    parts = _opinions.prv_parts(terms, adjacency)
    if parts is not None:
        answer = _opinions.prv_opinion(parts, delta=delta, price=price.removed)
        yield _agreeing(answer, price.removed, price.error)
        if isinstance(answer, Opinion):
            return
    else:
        yield "prv-accountant: no theorem for these steps, or unsound on them"
    if terms.ranges and terms == Terms(ranges=terms.ranges):
        yield _agreeing(_opinions.attack_opinion(terms.ranges, delta=delta), price.epsilon, 0.0)
    yield from _allocation_opinions(terms, delta=delta, adjacency=adjacency)
    yield _own_transform(price, delta=delta, adjacency=adjacency)


def _allocation_opinions(terms: Terms, *, delta: float, adjacency: Adjacency) -> Iterator[Opinion | str]:
    """Recomputes every deal by itself, in both orders; what one of them costs, all together cost."""
    for base, num_batches, rate, _ in terms.allocated:
        step = _engine.allocated_step(base, num_batches, rate, adjacency)
        batch = _engine.as_one(base, adjacency)
        is_all = terms == Terms(allocated=((base, num_batches, rate, 1),))
        for is_added, value in enumerate(CurveBound("random allocation", step).epsilons(delta)):
            answer = _allocation_opinion.allocation_opinion(
                batch, num_batches, rate, delta=delta, is_added=bool(is_added)
            )
            answer = _agreeing(answer, value, 0.0)
            if isinstance(answer, Opinion):
                answer = Opinion(answer.name, answer.lower, answer.upper if is_all else math.inf)
            yield answer


def _own_transform(price: _Price, *, delta: float, adjacency: Adjacency) -> Opinion | str:
    """Recomputes the composed bound; where another bound won, the interval says so by reaching below it."""
    steps = _engine.steps(price.terms, adjacency)
    if price.added > price.removed:
        steps = tuple((profile.reversed(), count) for profile, count in steps)
    found = _engine.bounds(price.terms, adjacency, is_coarse=False)
    composed = next((bound for bound in found if isinstance(bound, GridBound)), None)
    value, error = price.epsilon, price.error
    if composed is not None:
        value, error = max(composed.epsilons(delta)), composed.error(delta)
    if not math.isfinite(value):
        return "independent FFT: delta is below what a transform resolves"
    answer = _opinions.fft_opinion(steps, delta=delta, price=value)
    answer = _agreeing(answer, value, error)
    if isinstance(answer, Opinion) and answer.lower > price.epsilon:
        return Opinion(answer.name, 0.0, answer.upper)
    return answer


def _agreeing(answer: Opinion | str, value: float, error: float) -> Opinion | str:
    """Passes an answer on, or refuses: the price must lie above its lower end and reach down to its upper end."""
    if isinstance(answer, str) or (
        answer.lower <= value * (1.0 + 1e-9) + 1e-9 and value * 0.99 - error - 1e-6 <= answer.upper
    ):
        return answer
    raise AccountantsDisagreeError(
        f"epsilon: the engine's bound is {value:.6g} (error at most {error:.2g}), {answer.name} says "
        f"[{answer.lower:.6g}, {answer.upper:.6g}]. No price is given; please report the event."
    )


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
