"""Bounds the privacy loss that counts of outcomes, or right guesses about the canaries of one run, prove."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

from langchain_dpicl.exceptions import UnknownEventError
from langchain_dpicl.privacy.accounting.events import (
    BoundedRangeEvent,
    ComposedEvent,
    Event,
    GaussianEvent,
    PureEvent,
    RepeatedEvent,
    SubsampledEvent,
)
from langchain_dpicl.privacy.extensions.gradient_sums import SampledBallEvent

# Every bound errs on the side of the audited code: a reported violation is one, except with the stated probability.


ALARM = 1e-6
"""Most false alarms of one verdict on sound code."""

POWER = 0.99
"""A verdict of "sound" needs this chance, at least, to have seen half of the noise."""

_UNITS = {GaussianEvent: "mu", BoundedRangeEvent: "range", PureEvent: "epsilon"}


def clopper_pearson_lower(hits: int, runs: int, alarm: float) -> float:
    """Returns the Clopper-Pearson lower bound: above the true chance with probability at most `alarm`."""
    return float(stats.beta.ppf(alarm, hits, runs - hits + 1)) if hits else 0.0


def clopper_pearson_upper(hits: int, runs: int, alarm: float) -> float:
    """Returns the Clopper-Pearson upper bound: below the true chance with probability at most `alarm`."""
    return float(stats.beta.isf(alarm, hits + 1, runs - hits)) if hits < runs else 1.0


def base_of(event: Event) -> GaussianEvent | BoundedRangeEvent | PureEvent:
    """Returns the release inside an event, as on a sample that certainly holds the target."""
    if isinstance(event, SubsampledEvent):
        return base_of(event.event)
    if isinstance(event, SampledBallEvent):
        # On everybody, a replaced gradient moves the sum by twice the clip: by the whole sensitivity.
        return GaussianEvent(event.noise_multiplier)
    if isinstance(event, GaussianEvent | BoundedRangeEvent | PureEvent):
        return event
    raise UnknownEventError(f"audit: expected one release (Gaussian, bounded range or pure), found {event.kind!r}.")


def rate_of(event: Event) -> float:
    """Returns the chance that the target is in the sample."""
    return event.sampling_rate if isinstance(event, SubsampledEvent | SampledBallEvent) else 1.0


def unit_of(event: Event) -> str:
    """Returns in what the loss of one release is counted: "mu", "range" or "epsilon"."""
    return _UNITS[type(base_of(event))]


def claimed_loss(event: Event) -> float:
    """Returns what an event allows, in its unit: mu, range or epsilon of one release on a known sample."""
    base = base_of(event)
    if isinstance(base, GaussianEvent):
        return 1.0 / base.noise_multiplier
    return base.bound if isinstance(base, BoundedRangeEvent) else base.epsilon


def min_parameter(event: Event, chance: float, chance_without: float) -> float:
    """Returns the least parameter of an event of this kind under which an outcome can have these two chances.

    Gaussian: mu, from the trade-off of two normals. Bounded range: the two odds differ by a factor of at most e^range.
    Pure: neither the chances nor those of the complement differ by more than a factor of e^epsilon. On a sample that
    holds the target with probability q: the chance given that it does is at least (chance - (1 - q) without) / q.

    Source: Dong, Roth, Su (2022), equation 6, for normals; Dong, Durfee, Rogers (2020), definition 2.1, for the range.
    """
    base, rate = base_of(event), rate_of(event)
    conditional = (chance - (1.0 - rate) * chance_without) / rate if rate < 1.0 else chance
    if rate < 1.0 and conditional >= 1.0:
        return math.inf
    if conditional <= 0.0 or chance_without >= 1.0:
        return -math.inf
    if isinstance(base, GaussianEvent):
        return float(special.ndtri(conditional) - special.ndtri(chance_without))
    if isinstance(base, BoundedRangeEvent):
        return float(special.logit(conditional) - special.logit(chance_without))
    with np.errstate(divide="ignore"):
        return float(max(np.log(conditional / chance_without), np.log((1.0 - chance_without) / (1.0 - conditional))))


def max_chances(event: Event, chances_without: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns how likely an event lets outcomes be with the target that are this likely without: one minus f."""
    base, rate, bound = base_of(event), rate_of(event), claimed_loss(event)
    conditional: NDArray[np.float64]
    if isinstance(base, GaussianEvent):
        conditional = special.ndtr(special.ndtri(chances_without) + bound)
    elif isinstance(base, BoundedRangeEvent):
        conditional = special.expit(special.logit(chances_without) + bound)
    else:
        conditional = np.minimum(math.exp(bound) * chances_without, 1.0 - math.exp(-bound) * (1.0 - chances_without))
    return rate * conditional + (1.0 - rate) * chances_without


def refutation_power(event: Event, chances: tuple[float, float], *, runs: int, alarm: float = ALARM / 2) -> float:
    """Returns the exact chance that one outcome refutes an event, from its true chances with and without the target.

    Args:
      event: what is claimed.
      chances: of the outcome, with the target and without it.
      runs: of each side.
      alarm: of each of the two confidence bounds.

    >>> from langchain_dpicl.privacy.accounting.events import GaussianEvent
    >>> from scipy.special import ndtr
    >>> root = 2 * 2**0.5  # mu = 2 is claimed_loss, the noise is too small by sqrt(2)
    >>> round(refutation_power(GaussianEvent(0.5), (ndtr(root / 2), ndtr(-root / 2)), runs=707), 3)
    0.987
    """
    hits = np.arange(runs + 1)
    least = np.where(hits > 0, stats.beta.ppf(alarm, np.maximum(hits, 1), runs - hits + 1), 0.0)
    most = np.where(hits < runs, stats.beta.isf(alarm, hits + 1, np.maximum(runs - hits, 1)), 1.0)
    # With x hits, those numbers of hits without the target refute that let `least[x]` be above what is plausible.
    refuting = np.searchsorted(max_chances(event, most), least, side="left") - 1
    chance = stats.binom.pmf(hits, runs, chances[0]) * stats.binom.cdf(refuting, runs, chances[1])
    return float(min(1.0, chance.sum()))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Returns the epsilon of mu-Gaussian differential privacy at `delta`, exactly.

    Source: Dong, Roth, Su (2022), corollary 2.13; Balle and Wang (2018), theorem 8.

    >>> round(gaussian_epsilon(1.0, 1e-5), 4)
    4.3772
    """
    if mu <= 0.0 or not math.isfinite(mu):
        return max(mu, 0.0)

    def excess(epsilon: float) -> float:
        tail = math.exp(epsilon + float(special.log_ndtr(-epsilon / mu - mu / 2)))
        return float(special.ndtr(-epsilon / mu + mu / 2)) - tail - delta

    if excess(0.0) <= 0.0:
        return 0.0
    return float(optimize.brentq(excess, 0.0, mu * mu / 2 + mu * 40.0 + 1.0, xtol=1e-12))


def mu_squared(event: Event) -> float | None:
    """Returns the sum of mu^2 of releases that are all Gaussian and on everybody; None for any other."""
    if isinstance(event, GaussianEvent) or (isinstance(event, SampledBallEvent) and event.sampling_rate >= 1.0):
        return event.noise_multiplier**-2
    if isinstance(event, RepeatedEvent):
        inner = mu_squared(event.event)
        return None if inner is None else event.count * inner
    if isinstance(event, ComposedEvent):
        parts = [mu_squared(one) for one in event.events]
        return None if None in parts else math.fsum(part for part in parts if part is not None)
    return None


def epsilon_lower_bound(event: Event, chance: float, chance_without: float, delta: float) -> float:
    """Returns an epsilon that no (epsilon, delta)-DP mechanism with these two chances is below.

    log((chance - delta) / without), whatever the mechanism is; for Gaussian noise on everybody also the epsilon of the
    mu that the chances need.

    Args:
      event: which kind of release it is claimed to be.
      chance: a lower bound of the outcome's chance with the target.
      chance_without: an upper bound without it.
      delta: of the claim.
    """
    plain = math.log((chance - delta) / chance_without) if chance > delta and chance_without > 0.0 else 0.0
    if isinstance(base_of(event), GaussianEvent) and rate_of(event) >= 1.0:
        plain = max(plain, gaussian_epsilon(min_parameter(event, chance, chance_without), delta))
    return max(0.0, plain)


# Each canary is in the data by a fair coin of its own; a guesser names those it is surest about. `lower_bound` holds
# for any (epsilon, delta); `lower_mu` for runs whose releases are all Gaussian on everybody: their whole trade-off
# curve is known, and the same guesses prove several times as much. Sources: Steinke, Nasr and Jagielski (2023), Privacy
# Auditing with One (1) Training Run; Mahloujifar, Melis and Chaudhuri (2025), Auditing f-Differential Privacy in One
# Run.


_MAX_EPSILON = 200.0
TINY_DELTA = 1e-12
"""A delta at which epsilons are compared: with 2 * canaries * delta far below the alarm, it takes nothing away."""

Least = Callable[[float], float]
"""A trade-off curve: the least chance of an event with a canary, from its chance without, or the reverse."""


def max_chance(right: int, guesses: int, epsilon: float, *, delta: float, canaries: int) -> float:
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
    if max_chance(right, guesses, 0.0, delta=delta, canaries=canaries) >= alarm:
        return 0.0
    if max_chance(right, guesses, _MAX_EPSILON, delta=delta, canaries=canaries) < alarm:
        return _MAX_EPSILON

    def excess(epsilon: float) -> float:
        return max_chance(right, guesses, epsilon, delta=delta, canaries=canaries) - alarm

    return float(optimize.brentq(excess, 0.0, _MAX_EPSILON))


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
