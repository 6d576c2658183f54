"""Finds the smallest parameter that is cheap enough. Knows no event and no epsilon: only a cost that falls."""

from __future__ import annotations

import math
from collections.abc import Callable

Cost = Callable[[float], float]

_STEP = 4.0


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


def around(cost: Cost, limit: float, guess: float, *, low: float, high: float) -> tuple[float | None, float | None]:
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


def narrow(cost: Cost, limit: float, ends: tuple[float, float], *, tolerance: float) -> tuple[float, float]:
    """Shrinks (costs too much, fits) to a ratio of 1 + tolerance.

    Costs are close to powers of the parameter, so each round interpolates logarithms and tries just above and just
    below that point; it halves the interval where that does not.
    """
    small, large = ends
    while large / small > 1.0 + tolerance:
        width = large / small
        centre = _interpolated(small, large, cost(small), cost(large), limit)
        for x in (centre * (1.0 + tolerance / 3.0), centre / (1.0 + tolerance / 3.0)):
            small, large = _halved(cost, limit, small, large, x)
        if large / small > math.sqrt(width):
            small, large = _halved(cost, limit, small, large, math.sqrt(small * large))
    return small, large


def _halved(cost: Cost, limit: float, small: float, large: float, x: float) -> tuple[float, float]:
    if not small < x < large:
        return small, large
    return (small, x) if cost(x) <= limit else (x, large)


def _interpolated(small: float, large: float, cost_small: float, cost_large: float, limit: float) -> float:
    if not (math.isfinite(cost_small) and 0.0 < cost_large < cost_small):
        return math.sqrt(small * large)
    share = math.log(cost_small / limit) / math.log(cost_small / cost_large)
    return small * math.exp(min(max(share, 0.0), 1.0) * math.log(large / small))
