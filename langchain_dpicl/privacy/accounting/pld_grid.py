"""Composes dominating pairs on a grid, pessimistically, with dp-accounting.

Every number that leaves this file is an upper bound: curves are replaced by the chords above them, what is cut off
counts as infinite loss, and what floating point may have lost in a Fourier transform is added to delta.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from langchain_dpicl.privacy.accounting import profiles
from langchain_dpicl.privacy.accounting.profiles import FloatArray, Profile

if TYPE_CHECKING:
    from dp_accounting.pld.pld_pmf import PLDPmf

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

    def delta(self, epsilon: float) -> float:
        """Upper bound on delta over both orders of the pair."""

    def error(self, delta: float) -> float:
        """How far its epsilon may lie above that of the dominating pairs."""


@dataclass(frozen=True, slots=True)
class CurveBound:
    """A bound that is one profile: a closed form, without any grid."""

    name: str
    profile: Profile

    def epsilons(self, delta: float) -> tuple[float, float]:
        """See `Bound`."""
        first = profiles.solve(self.profile.up, delta, self.profile.top_up)
        if self.profile.is_symmetric:
            return first, first
        return first, profiles.solve(self.profile.down, delta, self.profile.top_down)

    def delta(self, epsilon: float) -> float:
        """See `Bound`."""
        at = np.array([epsilon])
        return float(max(self.profile.up(at)[0], self.profile.down(at)[0]))

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

    def delta(self, epsilon: float) -> float:
        """See `Bound`."""
        return float(max(losses.pmf().get_delta_for_epsilon(epsilon) for losses in (self.up, self.down))) + self.lost


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

    def delta(self, epsilon: float) -> float:
        """See `Bound`."""
        low, high = 1e-300, 1.0
        while high / low > 1.0 + 1e-6:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if max(self.epsilons(middle)) <= epsilon else (middle, high)
        return high

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


def _masses(curve: profiles.Curve, top: float, *, sign: float) -> tuple[FloatArray, FloatArray]:
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
