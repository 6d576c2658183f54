"""Privacy profiles of dominating pairs, and how sampling changes them.

A profile is the hockey-stick divergence
`H_x(A||B) = sup_S A(S) - e^x B(S)` of one pair of distributions, kept as two curves on `x >= 0`, one per order of
the pair, because `H_x(A||B) = 1 - e^x + e^x H_-x(B||A)` gives the rest with full relative precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.floating[Any]]
Curve: TypeAlias = Callable[[FloatArray], FloatArray]

TAIL = 1e-18  # a curve may be cut where it has fallen to this; the rest counts as infinite loss
_KNOTS = 2049


@dataclass(frozen=True, eq=False, slots=True)
class Profile:
    """A dominating pair (A, B): A is the output with the unit, B without it.

    Attributes:
      up: H_x(A||B) for x >= 0, float64[n] -> float64[n].
      down: H_x(B||A) for x >= 0.
      top_up: loss from which `up` is negligible, or constant: its value there is mass at infinite loss.
      top_down: the same for `down`.
    """

    up: Curve
    down: Curve
    top_up: float
    top_down: float

    @property
    def is_symmetric(self) -> bool:
        """Whether both orders of the pair share one curve."""
        return self.up is self.down

    def reversed(self) -> Profile:
        """The pair (B, A)."""
        return Profile(self.down, self.up, self.top_down, self.top_up)


def symmetric(curve: Curve, top: float) -> Profile:
    """A pair whose two orders share one curve."""
    return Profile(curve, curve, top, top)


def gaussian(mu: float) -> Profile:
    """The pair N(mu, 1), N(0, 1) (Balle and Wang 2018, Theorem 8)."""
    from scipy.special import log_ndtr

    def curve(x: FloatArray) -> FloatArray:
        log_a = log_ndtr(mu / 2 - x / mu)
        log_b = x + log_ndtr(-mu / 2 - x / mu)
        delta: FloatArray = np.exp(log_a) * -np.expm1(np.minimum(log_b - log_a, 0.0))
        return delta

    return symmetric(curve, mu * mu / 2 + 9.0 * mu)  # Phi(-9) < TAIL


def randomised_response(epsilon: float, count: int = 1) -> Profile:
    """`count` answers of `epsilon`-randomised response: dominates any `count` pure steps (Kairouz et al. 2015)."""
    from scipy.special import betaln

    minority = np.arange(count // 2 + 1, dtype=np.float64)
    log_choose = -math.log1p(count) - betaln(count - minority + 1.0, minority + 1.0)
    log_probs = log_choose - minority * epsilon - count * math.log1p(math.exp(-epsilon))
    losses = (count - 2.0 * minority) * epsilon
    # decayed[m] = sum_{j <= m} probs[j] e^{losses[m] - losses[j]}, the slope of the curve below losses[m]
    decayed = np.exp(np.logaddexp.accumulate(log_probs - losses) + losses)
    gaps = np.append(np.diff(losses[::-1])[::-1], losses[-1])
    values = np.concatenate(([0.0], np.cumsum(decayed * -np.expm1(-gaps))))
    knots = np.append(losses, 0.0)
    if losses[-1] == 0.0:
        knots, values = knots[:-1], values[:-1]
    return _trim_knots(knots[::-1], values[::-1])


def _trim_knots(x: FloatArray, y: FloatArray) -> Profile:
    """A profile through exact convex knots, without the negligible ones."""
    last = max(min(int(np.searchsorted(-y, -TAIL)) + 1, len(x)), 2)
    return symmetric(_interpolated_curve(x[:last], y[:last]), float(x[last - 1]))


def bounded_range(bound: float) -> Profile:
    """The supremum over all `bound`-bounded-range pairs (Dong, Durfee, Rogers 2020; docs/proofs/accounting.md)."""
    scale = -math.expm1(-bound)

    def curve(x: FloatArray) -> FloatArray:
        delta: FloatArray = np.expm1(-np.maximum(bound - x, 0.0) / 2.0) ** 2 / scale
        return delta

    return symmetric(curve, bound)


def zcdp(rho: float) -> Profile:
    """What rho-zCDP implies at every x (Canonne, Kamath, Steinke 2020, Proposition 12; Pinsker at small x)."""
    # KL <= rho, so total variation is below Pinsker's and Bretagnolle-Huber's bounds, and H_x <= H_0.
    cap = min(math.sqrt(rho / 2.0), math.sqrt(-math.expm1(-rho)))

    def curve(x: FloatArray) -> FloatArray:
        alpha = _best_order(rho, x)
        log_delta = (alpha - 1.0) * (alpha * rho - x + np.log1p(-1.0 / alpha)) - np.log(alpha)
        delta: FloatArray = np.minimum(cap, np.exp(np.minimum(log_delta, 0.0)))
        return delta

    return symmetric(curve, rho + 2.0 * math.sqrt(rho * -math.log(TAIL)))


def _best_order(rho: float, x: FloatArray) -> FloatArray:
    """Minimises the bound over orders: the derivative (2a - 1) rho - x + log(1 - 1/a) increases in a."""
    low = np.full_like(x, -30.0)
    high = np.log((x / rho + 1.0) / 2.0 + 0.35 / rho + 1.0)
    at = (low + high) / 2.0
    for step in range(14):
        alpha = 1.0 + np.exp(at)
        slope = (2.0 * alpha - 1.0) * rho - x + (at - np.log(alpha))
        low, high = np.where(slope > 0.0, low, at), np.where(slope > 0.0, at, high)
        # Newton's steps in log(alpha - 1), inside the bounds, after some halves of them.
        near = at - slope / (2.0 * (alpha - 1.0) * rho + 1.0 / alpha)
        at = np.where((step < 6) | (near < low) | (near > high), (low + high) / 2.0, near)
    best: FloatArray = 1.0 + np.exp(at)
    return best


def _chord(part: FloatArray, whole: FloatArray) -> FloatArray:
    """(e^part - 1) / (e^whole - 1) for 0 <= part <= whole, without overflow."""
    return np.exp(part - whole) * np.expm1(-part) / np.expm1(-whole)


def tabulated_profile(x_up: FloatArray, up: FloatArray, x_down: FloatArray, down: FloatArray) -> Profile:
    """The greatest convex profile below the points of both curves, constant after the last; x[0] is 0.

    A true profile is convex in e^x, so what bounds it at the points bounds it through the minorant as well.
    """
    start = _lowest_start(x_up, up, x_down, down)
    first = _interpolated_curve(*convex_minorant(x_up, np.minimum.accumulate(np.minimum(up, start))))
    if down is up:
        return symmetric(first, float(x_up[-1]))
    second = _interpolated_curve(*convex_minorant(x_down, np.minimum.accumulate(np.minimum(down, start))))
    return Profile(first, second, float(x_up[-1]), float(x_down[-1]))


def _lowest_start(x_up: FloatArray, up: FloatArray, x_down: FloatArray, down: FloatArray) -> float:
    """What convexity across x = 0 leaves of the total variation: the lowest line over it, in e^x."""
    with np.errstate(over="ignore"):  # a knot that far away only adds a level line
        right = np.exp(x_up)
    left, at_left = np.exp(-x_down), 1.0 + (down - 1.0) * np.exp(-x_down)  # H_-x(A||B)

    def lines(i: Any, j: Any) -> FloatArray:
        share = (1.0 - left[j]) / np.maximum(right[i] - left[j], 1e-300)
        value: FloatArray = share * up[i] + (1.0 - share) * at_left[j]
        return value

    every_up, every_down = np.arange(1, len(up)), np.arange(1, len(down))
    some = every_down[:: max(len(down) // 64, 1)]
    i = every_up[np.argmin(lines(every_up[:, None], some[None, :]).min(axis=1))]
    for _ in range(4):
        j = every_down[np.argmin(lines(i, every_down))]
        i = every_up[np.argmin(lines(every_up, j))]
    return float(min(up[0], down[0], lines(i, j)))


def _interpolated_curve(x: FloatArray, y: FloatArray) -> Curve:
    def curve(z: FloatArray) -> FloatArray:
        i = np.clip(np.searchsorted(x, z, side="right") - 1, 0, len(x) - 2)
        weight = _chord(np.clip(z - x[i], 0.0, x[i + 1] - x[i]), x[i + 1] - x[i])
        delta: FloatArray = y[i] + (y[i + 1] - y[i]) * weight
        return delta

    return curve


def convex_minorant(x: FloatArray, y: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The vertices of the greatest function below the points that is convex in e^x."""
    kept: list[int] = []
    # Plain floats are several times faster than numpy's; where two knots are equal, only numpy's may be divided by 0.
    at, value = (x.tolist(), y.tolist()) if (np.diff(x) > 0.0).all() else (list(x), list(y))
    for k in range(len(x)):
        while len(kept) > 1:
            i, j = kept[-2], kept[-1]
            left = (value[j] - value[i]) / -math.expm1(at[i] - at[j])
            right = (value[k] - value[j]) / math.expm1(min(at[k] - at[j], 700.0))
            if left <= right:
                break
            kept.pop()
        kept.append(k)
    return x[kept], y[kept]


def minimum(*profiles: Profile) -> Profile:
    """The best convex bound under several valid symmetric bounds of the same mechanism."""
    complete = [p.top_up for p in profiles if p.up(np.array([p.top_up]))[0] <= 10.0 * TAIL]
    x = np.linspace(0.0, min(complete), _KNOTS)
    y = np.minimum.reduce([p.up(x) for p in profiles])
    return tabulated_profile(x, y, x, y)


def _inner_loss(x: FloatArray, rate: float) -> FloatArray:
    """log(1 + (e^x - 1) / rate): the loss of the base that a sampled loss x >= 0 comes from."""
    small = np.log1p(np.expm1(np.minimum(x, 1.0)) / rate)
    large = x - math.log(rate) + np.log1p(-(1.0 - rate) * np.exp(-x))
    return np.where(x < 1.0, small, large)


def _outer_loss(z: float, rate: float) -> float:
    """The inverse of `_inner_loss`."""
    if z < 30.0:
        return math.log1p(rate * math.expm1(z))
    return z + math.log(rate) + math.log1p((1.0 - rate) / rate * math.exp(-z))


def amplify_poisson(base: Profile, rate: float) -> Profile:
    """Poisson sampling under add_remove: the pair ((1 - rate) B + rate A, B).

    Source: Balle, Barthe, Gaboardi 2018 (advanced joint convexity); Zhu, Dong, Wang 2022 (dominating pairs).
    """

    def up(x: FloatArray) -> FloatArray:
        return rate * base.up(_inner_loss(x, rate))

    def down(x: FloatArray) -> FloatArray:
        with np.errstate(over="ignore"):  # where e^x is too large for a number there is no weight
            weight = np.maximum(rate - (1.0 - rate) * np.expm1(x), 0.0)  # 1 - (1 - rate) e^x
        inner = -np.log1p(np.maximum(np.expm1(-x) / rate, 1e-16 - 1.0))
        return np.where(weight > 0.0, weight * base.down(inner), 0.0)

    return Profile(up, down, _outer_loss(base.top_up, rate), -math.log1p(rate * math.expm1(-base.top_down)))


def symmetrise(base: Profile, rate: float) -> Profile:
    """Sampling under replace_one: bounds both orders of the pair of any replacement.

    `base` must be symmetric and bound a replacement as well as a removal inside the sample.

    Source: Balle, Barthe, Gaboardi (2018), advanced joint convexity; docs/proofs/poisson-amplification.md.
    """

    def curve(x: FloatArray) -> FloatArray:
        return rate * base.up(_inner_loss(x, rate))

    return symmetric(curve, _outer_loss(base.top_up, rate))


def solve(curve: Curve, delta: float, top: float) -> float:
    """The smallest x >= 0 with curve(x) <= delta, rounded up; infinity if the curve stays above."""
    low, high = 0.0, top
    for _ in range(12):
        if curve(np.array([high]))[0] <= delta:
            break
        low, high = high, 2.0 * high
    else:
        return math.inf
    for _ in range(10):
        if high - low <= 1e-14 * high:
            break
        x = np.linspace(low, high, 65)
        first = int(np.argmax(curve(x) <= delta))
        if first == 0:
            return low
        low, high = float(x[first - 1]), float(x[first])
    return high
