"""Bounds the privacy loss of one run from the right guesses about its canaries."""

# Each canary is in the data by a fair coin of its own; a guesser names those it is surest about. `lower_bound` holds
# for any (epsilon, delta); `lower_mu` for runs whose releases are all Gaussian on everybody: their whole trade-off
# curve is known, and the same guesses prove several times as much. Sources: Steinke, Nasr and Jagielski (2023), Privacy
# Auditing with One (1) Training Run; Mahloujifar, Melis and Chaudhuri (2025), Auditing f-Differential Privacy in One
# Run.

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy import optimize, special, stats

from langchain_dpicl.audit.bounds import ALARM

_MOST = 200.0
TINY_DELTA = 1e-12
"""A delta at which epsilons are compared: with 2 * canaries * delta far below the alarm, it takes nothing away."""

Least = Callable[[float], float]
"""A trade-off curve: the least chance of an event with a canary, from its chance without, or the reverse."""


def chance(right: int, guesses: int, epsilon: float, *, delta: float, canaries: int) -> float:
    """Returns the most that `right` or more guesses of a run that is (epsilon, delta)-DP can be likely.

    With B binomial(guesses, e^epsilon / (1 + e^epsilon)): P[B >= right], and for delta at most 2 * canaries * delta
    times the largest P[right > B >= right - i] / i.

    Source: Steinke, Nasr, Jagielski (2023), theorem 5.2.
    """
    coin = stats.binom(guesses, 1 / (1 + np.exp(-epsilon)))
    short = np.arange(1, right + 1)
    below = coin.sf(right - short - 1) - coin.sf(right - 1)  # right > B >= right - i
    return float(min(1.0, coin.sf(right - 1) + 2 * canaries * delta * (below / short).max(initial=0.0)))


def lower_bound(right: int, guesses: int, *, delta: float, canaries: int, alarm: float = ALARM) -> float:
    """Returns the least epsilon that the guesses leave possible, at confidence 1 - `alarm`.

    Where 2 * canaries * delta is not far below the alarm, it is 0 whatever was guessed: take a smaller delta.

    >>> round(lower_bound(390, 400, delta=1e-12, canaries=400), 2)
    2.4
    """
    if chance(right, guesses, 0.0, delta=delta, canaries=canaries) >= alarm:
        return 0.0
    if chance(right, guesses, _MOST, delta=delta, canaries=canaries) < alarm:
        return _MOST

    def excess(epsilon: float) -> float:
        return chance(right, guesses, epsilon, delta=delta, canaries=canaries) - alarm

    return float(optimize.brentq(excess, 0.0, _MOST))


def is_possible(least: Least, right: int, guesses: int, *, canaries: int, alarm: float = ALARM) -> bool:
    """Returns whether `right` guesses or more can have a chance of `alarm` under a trade-off curve.

    Sums of chances by the number of right guesses, from the top down: with r for "right", h for "wrong", each of which
    the curve bounds by the other; if what has to be there is more than the share of canaries guessed about, it cannot.

    Args:
      least: the curve.
      right: right guesses.
      guesses: all guesses, their number fixed before.
      canaries: canaries.
      alarm: the chance.

    Source: Mahloujifar, Melis, Chaudhuri (2025), algorithm 3 for two choices.
    """
    hits, misses, most = alarm * right / canaries, alarm * (guesses - right) / canaries, guesses / canaries
    for count in range(right - 1, -1, -1):
        more = max(misses, least(hits))
        hits, misses = hits + count / (guesses - count) * (more - misses), more
        if hits + misses > most:
            return False
    return hits + misses <= most


def lower_mu(right: int, guesses: int, *, canaries: int, alarm: float = ALARM) -> float:
    """Returns a mu that the guesses leave no smaller one possible than, of Gaussian differential privacy.

    >>> round(lower_mu(390, 400, canaries=400), 2)
    0.61
    """

    def fits(mu: float) -> bool:
        def least(x: float) -> float:
            return float(special.ndtr(special.ndtri(x) - mu))

        return is_possible(least, right, guesses, canaries=canaries, alarm=alarm)

    low, high = 0.0, 64.0
    if fits(low):
        return 0.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return low
