"""Privacy profiles of dominating pairs, how sampling changes them, and their composition on a grid, pessimistically.

A profile is the hockey-stick divergence
`H_x(A||B) = sup_S A(S) - e^x B(S)` of one pair of distributions, kept as two curves on `x >= 0`, one per order of
the pair, because `H_x(A||B) = 1 - e^x + e^x H_-x(B||A)` gives the rest with full relative precision.

Every number that leaves the grid is an upper bound: curves are replaced by the chords above them, what is cut off
counts as infinite loss, and what floating point may have lost in a Fourier transform is added to delta.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from dp_accounting.pld.pld_pmf import PLDPmf


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
    # More than the rounding of `betaln` can take away, which subtracts numbers as large as lgamma(count).
    lost = 8.0 * math.ulp(math.lgamma(count + 2.0))
    log_probs = lost + log_choose - minority * epsilon - count * math.log1p(math.exp(-epsilon))
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
        is_above = slope > 0.0
        low, high = np.where(is_above, low, at), np.where(is_above, at, high)
        middle = (low + high) / 2.0
        if step < 6:
            at = middle
            continue
        # Newton's steps in log(alpha - 1), inside the bounds, after some halves of them.
        near = at - slope / (2.0 * (alpha - 1.0) * rho + 1.0 / alpha)
        at = np.where((near < low) | (near > high), middle, near)
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
        return y[i] + (y[i + 1] - y[i]) * weight

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


Steps: TypeAlias = Sequence[tuple[Profile, int]]

FFT_ERROR = 2e-14  # delta that one float64 transform may lose
FFT_ERROR_PER_STEP = 1e-15  # and what raising it to a power adds per step; measured: below 2e-16 (see the tests)
_TRIMMED = 1e-6  # losses rarer than this do not count towards the spread of a step, so that grids stay fine
_CUT = 1e-15  # what may be cut per composition; it counts as infinite loss
_AT_ONCE = 1 << 16
VANISHED = -80.0  # the logarithm of what a power of a transform may be to count as 0


class Bound(Protocol):
    """A proved upper bound on the privacy loss of a composition."""

    @property
    def name(self) -> str:
        """What proved it."""

    def epsilons(self, delta: float) -> tuple[float, float]:
        """Upper bounds on epsilon for both orders of the pair."""

    def error(self, delta: float) -> float:
        """How far its epsilon may lie above that of the dominating pairs."""


@dataclass(frozen=True, slots=True)
class CurveBound:
    """A bound that is one profile: a closed form, without any grid."""

    name: str
    profile: Profile

    def epsilons(self, delta: float) -> tuple[float, float]:
        """See `Bound`."""
        first = solve(self.profile.up, delta, self.profile.top_up)
        if self.profile.is_symmetric:
            return first, first
        return first, solve(self.profile.down, delta, self.profile.top_down)

    def error(self, delta: float) -> float:  # noqa: ARG002 - exact at every delta
        """See `Bound`."""
        return 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Losses:
    """A pessimistic distribution of the privacy loss on the multiples of a step.

    dp-accounting's own form of it is made where its code is needed: loading that takes longer than most prices.

    Attributes:
      step: of the grid.
      lowest: the multiple that `masses` starts at.
      masses: float64[n], the chances of the losses from there on.
      infinite: the chance of an infinite loss.
    """

    step: float
    lowest: int
    masses: FloatArray
    infinite: float

    def pmf(self) -> PLDPmf:
        """The same in dp-accounting's form."""
        from dp_accounting.pld import pld_pmf

        return pld_pmf.DensePLDPmf(self.step, self.lowest, self.masses, self.infinite, True)  # pessimistic


@dataclass(frozen=True, slots=True)
class GridBound:
    """A bound composed on a grid of `step`: two loss distributions, one per order of the pair."""

    name: str
    up: Losses
    down: Losses
    step: float
    num_steps: int

    @property
    def lost(self) -> float:
        """What floating point may have taken from delta."""
        return FFT_ERROR + FFT_ERROR_PER_STEP * self.num_steps

    def error(self, delta: float) -> float:
        """See `Bound`: all roundings together, by Hoeffding."""
        spread_out = math.sqrt(self.num_steps / 2.0 * math.log(200.0 / delta))
        return self.num_steps * self.step**2 / 8.0 + self.step * spread_out

    def epsilons(self, delta: float) -> tuple[float, float]:
        """See `Bound`."""
        if delta <= 2.0 * self.lost:
            return math.inf, math.inf
        first = _epsilon(self.up, delta - self.lost)
        return first, first if self.down is self.up else _epsilon(self.down, delta - self.lost)


def _epsilon(losses: Losses, delta: float) -> float:
    found = least_epsilon(losses, delta)
    return found if found >= 0.0 else math.inf  # what is not a number is no bound


def least_epsilon(distribution: Losses, delta: float) -> float:
    """What dp-accounting's `get_epsilon_for_delta(delta)` returns, without its loop over single losses."""
    masses, step, lowest = distribution.masses, distribution.step, distribution.lowest
    upper, lower = float(distribution.infinite), 0.0
    if upper > delta:
        return math.inf
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):  # beyond e^709 it answers infinity
        for stop in range(len(masses), 0, -_AT_ONCE):
            part = masses[max(stop - _AT_ONCE, 0) : stop][::-1]
            losses = (lowest + np.arange(stop - 1, stop - 1 - len(part), -1)) * step
            # What lies above each loss, and with it: the last entry is carried into the next part.
            uppers = np.cumsum(np.append(upper, part))
            lowers = np.cumsum(np.append(lower, np.exp(-losses) * part))
            crossed = (uppers[:-1] > delta) & (np.log((uppers[:-1] - delta) / lowers[:-1]) >= losses)
            is_huge = (uppers[1:] >= delta) & (lowers[1:] == 0.0)  # the loss is so large that its e^-loss is 0
            if is_huge.any():
                return max(0.0, float(losses[int(np.argmax(is_huge))]))
            end = int(np.argmax(crossed)) if crossed.any() else len(part)
            upper, lower = float(uppers[end]), float(lowers[end])
            if end < len(part):
                break
    return 0.0 if upper <= lower + delta else math.log((upper - delta) / lower)


def deltas(distribution: Losses, epsilons: FloatArray) -> FloatArray:
    """What dp-accounting's `get_delta_for_epsilon` returns for finite ascending ones, without its loop over both."""
    masses, infinite = distribution.masses, distribution.infinite
    losses = (np.arange(len(masses)) + distribution.lowest) * distribution.step
    beyond = len(masses) - np.searchsorted(losses, epsilons, side="right")  # how many losses exceed each
    used = slice(len(masses) - int(beyond.max()), None)
    upper = np.cumsum(np.append(infinite, masses[used][::-1]))
    lower = np.cumsum(np.append(0.0, (masses[used] * np.exp(-losses[used]))[::-1]))
    found: FloatArray = upper[beyond] - np.exp(epsilons) * lower[beyond]
    return found


@dataclass(frozen=True, slots=True)
class MomentBound:
    """Chernoff's bound on the same loss distributions: no transform, so it prices deltas below its errors."""

    name: str
    inside: tuple[tuple[Profile, int], ...]

    def epsilons(self, delta: float) -> tuple[float, float]:
        """See `Bound`."""
        first = self._epsilon([p for p, _ in self.inside], delta)
        if all(p.is_symmetric for p, _ in self.inside):
            return first, first
        return first, self._epsilon([p.reversed() for p, _ in self.inside], delta)

    def error(self, delta: float) -> float:  # noqa: ARG002 - never tight
        """See `Bound`: can only be checked from below."""
        return math.inf

    def _epsilon(self, pairs: list[Profile], delta: float) -> float:
        counts = [count for _, count in self.inside]
        step = grid_step(self.inside, is_coarse=False)
        moments, cut = _log_moments(tuple(zip(pairs, counts, strict=True)), step)
        left = delta - cut
        if left <= 0.0:
            return math.inf
        return max(0.0, min((moment + peak - math.log(left)) / power for power, moment, peak in moments))


@lru_cache(maxsize=4)
def _log_moments(parts: tuple[tuple[Profile, int], ...], step: float) -> tuple[list[tuple[float, float, float]], float]:
    """Each power with the logarithm of E e^(power * loss) and its peak, and the mass cut off as infinite loss."""
    found = [(*loss_masses(pair, step), count) for pair, count in parts]
    moments = []
    for power in np.geomspace(1e-2, 1e4, 120).tolist():
        moment = math.fsum(count * _log_moment(low, masses, power * step) for low, masses, _, count in found)
        # Canonne, Kamath, Steinke 2020, Proposition 12, with order 1 + power
        moments.append((power, moment, power * math.log(power / (1.0 + power)) - math.log1p(power)))
    return moments, math.fsum(count * cut for _, _, cut, count in found)


def _log_moment(lowest: int, masses: FloatArray, pull: float) -> float:
    """The logarithm of E e^(pull * index)."""
    exponent = np.log(np.maximum(masses, 1e-320)) + pull * (lowest + np.arange(len(masses)))
    peak = float(exponent.max())
    return peak + math.log(float(np.exp(exponent - peak).sum()))


# --- the grid -----------------------------------------------------------------------------------------------------


def compose(inside: Steps, *, is_coarse: bool) -> GridBound:
    """Composes dominating pairs: all removals together, all additions together (Zhu, Dong, Wang 2022)."""
    step = grid_step(inside, is_coarse=is_coarse)
    up = _compose_families([(connect_dots(p, step), count) for p, count in inside])
    down = up
    if not all(p.is_symmetric for p, _ in inside):
        down = _compose_families([(connect_dots(p.reversed(), step), count) for p, count in inside])
    return GridBound("PLD", up, down, step, sum(count for _, count in inside))


def _compose_families(parts: list[tuple[Losses, int]]) -> Losses:
    with np.errstate(over="ignore"):  # in tail bounds that are then not used
        return reduce(_together, (_self_compose(losses, count) for losses, count in parts))


def _together(one: Losses, other: Losses) -> Losses:
    from dp_accounting.pld import pld_pmf

    both = pld_pmf.compose_pmfs(one.pmf(), other.pmf(), _CUT)
    masses = np.asarray(both._probs)  # noqa: SLF001
    return Losses(both._discretization, both._lower_loss, masses, both._infinity_mass)  # noqa: SLF001


def _self_compose(losses: Losses, count: int) -> Losses:
    """What dp-accounting's `self_compose(count, _CUT)` returns, on fewer cells and in a fraction of its time."""
    if count == 1:
        return losses
    masses = losses.masses
    low, high = _trim_tails(masses, count)
    size = _fast_length(max(high - low + 1, len(masses)))
    spectrum = np.fft.rfft(masses, size)
    is_kept = np.abs(spectrum) > math.exp(VANISHED / count)  # of many steps, all but a few frequencies vanish
    powers = np.zeros_like(spectrum)
    powers[is_kept] = spectrum[is_kept] ** count
    sums = np.fft.irfft(powers, size)  # modulo `size`
    infinite = _CUT - math.expm1(count * math.log1p(-losses.infinite))
    kept = np.roll(sums, -low)[: high - low + 1]
    return Losses(losses.step, losses.lowest * count + low, kept, infinite)


def _fast_length(least: int) -> int:
    """The least product of powers of 2, 3 and 5 from `least` on: scipy says the same, but loading that takes 20 ms."""
    found, five = 1 << (least - 1).bit_length(), 1
    while five < found:
        three = five
        while three < found:
            found = min(found, three << (-(-least // three) - 1).bit_length())
            three *= 3
        five *= 5
    return found


def _trim_tails(masses: FloatArray, count: int) -> tuple[int, int]:
    """The first and the last cell of `count` indices added up, but for `_CUT` of their mass, by Chernoff's bound."""
    cells = len(masses)
    low, high = 0, (cells - 1) * count
    room = math.log(2.0 / _CUT)
    tilts = _tilts(count)
    at_once = max(1, _AT_ONCE // cells)
    for some in (tilts[start : start + at_once] for start in range(0, len(tilts), at_once)):
        grown = np.exp(np.arange(cells) * (some / cells)[:, None])
        # A product of so many wakes BLAS threads, which then spin.
        ups, downs = (masses * grown).sum(axis=1).tolist(), (masses * (1.0 / grown)).sum(axis=1).tolist()
        for tilt, up, down in zip(some.tolist(), ups, downs, strict=True):
            if 0.0 < up < math.inf:
                high = min(high, math.ceil((count * math.log(up) + room) * cells / tilt))
            if 0.0 < down < math.inf:
                low = max(low, math.floor((count * math.log(down) + room) * cells / -tilt))
    return low, high


@lru_cache(maxsize=16)  # a search asks for the same count at many noises
def _tilts(count: int) -> FloatArray:
    """Tilts a factor of 1.4 apart, down to that of a sum as wide as sums of so many indices get.

    The best of them is within 2 % of the best of all.
    """
    return np.geomspace(8.0 / math.sqrt(count), 20.0, 2 + math.ceil(math.log2(2.5 * math.sqrt(count)) * 2.0))


def grid_step(inside: Steps, *, is_coarse: bool) -> float:
    """A power of two below a tenth of the loss deviation of every step, but never more cells than memory is for.

    It does not depend on counts (except where memory forces it up), so one step more never costs less.
    """
    spreads = [(spread(profile), profile, count) for profile, count in inside]
    wanted = min(_cells_wanted(v, profile, count) for v, profile, count in spreads) * (8.0 if is_coarse else 1.0)
    widest = max(profile.top_up + profile.top_down for profile, _ in inside)
    deviation = math.sqrt(math.fsum(count * v * v for v, _, count in spreads))
    room = max(widest / 2 ** (14 if is_coarse else 17), deviation / 2 ** (13 if is_coarse else 15))
    return 2.0 ** max(math.floor(math.log2(wanted)), math.ceil(math.log2(room)))


def _cells_wanted(deviation: float, profile: Profile, count: int) -> float:
    """A single step can afford more cells than one that is repeated."""
    if count > 1:
        return 0.06 * deviation
    return min(0.06 * deviation, max(0.01 * deviation, (profile.top_up + profile.top_down) / 2**13))


@lru_cache(maxsize=1024)
def spread(profile: Profile) -> float:
    """The standard deviation of a step's privacy loss, rare losses left out."""
    right, p_right = _masses(profile.up, profile.top_up, sign=1.0)
    left, p_left = _masses(profile.down, profile.top_down, sign=-1.0)
    p_right = np.where(profile.up(right) >= _TRIMMED, p_right, 0.0)
    mean = float(right @ p_right - left @ p_left)
    variance = float((right * right) @ p_right + (left * left) @ p_left) - mean * mean
    return math.sqrt(variance) if variance > 0 else 1e-3 * (profile.top_up + profile.top_down)


_GEOMETRIC = np.concatenate(([0.0], np.geomspace(1e-8, 1.0, 480)))


def _masses(curve: Curve, top: float, *, sign: float) -> tuple[FloatArray, FloatArray]:
    """Probabilities of the losses sign * x (x > 0) on a coarse geometric grid."""
    x = max(top, 1e-12) * _GEOMETRIC
    value = curve(x) * (np.exp(-x) if sign < 0 else 1.0)
    drop, gap = value[:-1] - value[1:], np.minimum(np.diff(x), 700.0)
    near, far = (np.expm1(gap), -np.expm1(-gap)) if sign > 0 else (-np.expm1(-gap), np.expm1(gap))
    mass = np.zeros_like(x)
    mass[1:] += drop / far
    mass[:-1] -= drop / near
    return x[1:], np.maximum(mass[1:], 0.0)


def connect_dots(profile: Profile, step: float) -> Losses:
    """The loss distribution of the chords above `profile.up`."""
    return Losses(step, *loss_masses(profile, step))


def loss_masses(profile: Profile, step: float) -> tuple[int, FloatArray, float]:
    """Lowest multiple of `step`, probabilities from there on, and the mass at infinite loss.

    Source: Doroshenko et al. 2022, Algorithm 1, with the differences taken of H_x for x >= 0 and of
    H_x - (1 - e^x) for x < 0: what is subtracted cancels exactly, and small values keep their relative precision.
    """
    high = max(math.ceil(profile.top_up / step), 1)
    low = max(math.ceil(profile.top_down / step), 1)
    right = profile.up(np.arange(high + 1) * step)  # H at 0, 1, ..., high
    reach = np.arange(low + 1) * step
    left = profile.down(reach) * np.exp(-reach)  # H - (1 - e^x) at 0, -1, ..., -low
    right[0] = left[0] = max(right[0], left[0])
    widest = min(step, 700.0)  # beyond, e^step is no float; there e^-step is 0 to the last digit
    rise, grow = math.expm1(widest), math.exp(widest)
    top = (right[-2] - right[-1]) / -math.expm1(-step)
    above = (np.diff(right)[1:] - grow * np.diff(right)[:-1]) / rise
    centre = 1.0 + (right[1] - right[0] - grow * (left[0] - left[1])) / rise
    below = (grow * np.diff(left)[1:] - np.diff(left)[:-1]) / rise
    bottom = (left[-2] - left[-1]) / rise - left[-1]
    masses = np.concatenate(([bottom], below[::-1], [centre], above, [top]))
    return -low, np.maximum(masses, 0.0), float(right[-1])
