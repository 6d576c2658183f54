"""Computes the price of a random allocation a second time: another grid, another sum, other tails.

`random_allocation` adds ratios on a geometric grid, pair by pair. Here they lie on a straight grid and are added by a
Fourier transform: from above for removals, tilted towards zero for additions. The two share the profile of one batch.
"""

from __future__ import annotations

import math

import numpy as np

from langchain_dpicl.privacy.accounting import profiles
from langchain_dpicl.privacy.accounting.epsilon import Opinion
from langchain_dpicl.privacy.accounting.profiles import FloatArray, Profile

_SIZE = 2**18
_ROUND_OFF = 1e-13  # what one transform may lose
_ROUND_OFF_PER_BATCH = 1e-15
_TILT = 12.0  # additions: e^(-12 sum / batches), so that large sums do not come round again
_ROOM = 4.0  # additions: the window, in multiples of the largest sum that matters


def allocation_opinion(base: Profile, num_batches: int, rate: float, *, delta: float, is_added: bool) -> Opinion | str:
    """An interval for one allocation of `base`, sampled at `rate`.

    Rounding a ratio to the grid adds independent noise of mean 0 in an interval as wide as the grid; by Hoeffding the
    mean of the noises exceeds `shift` too rarely to matter.
    """
    name = f"straight-grid FFT ({'additions' if is_added else 'removals'})"
    slack = _ROUND_OFF + _ROUND_OFF_PER_BATCH * num_batches
    if delta / rate <= 100.0 * slack:
        return f"{name}: delta {delta:.3g} is below what its transform resolves"
    find = _added if is_added else _removed
    lower, upper = find(base, num_batches, rate, delta, slack)
    return Opinion(name, lower, upper)


def _shift(step: float, num_batches: int, delta: float) -> tuple[float, float]:
    """How far the mean of the ratios may be rounded, and what that leaves out of delta."""
    rare = delta / 200.0
    shift = step * math.sqrt(math.log(max(1.0, step) / rare) / (2.0 * num_batches))
    return shift, rare


# --- removals -----------------------------------------------------------------------------------------------------


def _removed(base: Profile, num_batches: int, rate: float, delta: float, slack: float) -> tuple[float, float]:
    wanted = delta / rate  # H of the allocation itself, where the sampled one has delta
    if wanted >= 1.0:
        return 0.0, 0.0
    top = profiles.solve(base.up, wanted / 200.0, base.top_up)
    if not math.isfinite(top) or top > 600.0:
        return 0.0, math.inf
    widest = max(math.exp(top), 1.5)
    law, step, infinite, wrapped = _windowed(base, num_batches, widest, wanted / 400.0)
    losses = _means(law, step, num_batches)
    shift, rare = _shift(step, num_batches, wanted)
    far = _root(losses, wanted - infinite - wrapped - slack)
    near = _root(losses, wanted + rare + wrapped + slack)
    return _sampled(near - shift, rate), _sampled(far, rate)


def _sampled(ratio: float, rate: float) -> float:
    return math.log1p(rate * (ratio - 1.0)) if ratio > 1.0 else 0.0


def _windowed(base: Profile, num_batches: int, widest: float, rare: float) -> tuple[FloatArray, float, float, float]:
    """The law under B on the least window out of which the sum of the other batches comes rarely."""
    factor = 1.25
    while True:
        step = factor * widest / _SIZE
        law, infinite = _lattice(base, step, math.ceil(widest / step))
        wrapped = _escape(law, step, num_batches - 1, (factor - 1.0) * widest - 2.0 * step)
        if wrapped <= rare or factor > num_batches + 1:
            return law, step, infinite, wrapped
        factor *= 1.5


def _escape(law: FloatArray, step: float, count: int, room: float) -> float:
    """Chernoff's bound on the chance that `count` ratios add up to more than `room`."""
    points = step * np.arange(len(law))
    if count * points[-1] <= room:
        return 0.0
    logs = [
        count * math.log(max(float(law @ np.exp(pull * points)), 1e-300)) - pull * room
        for pull in np.geomspace(0.05, 300.0, 16) / points[-1]
    ]
    return math.exp(min(*logs, 0.0))


def _means(law: FloatArray, step: float, num_batches: int) -> tuple[FloatArray, FloatArray]:
    """Ratios of the mean above 1, and their probabilities where one batch has the law A."""
    with_unit = law * (step * np.arange(len(law)))
    spectrum = np.fft.rfft(law, _SIZE) ** (num_batches - 1) * np.fft.rfft(with_unit, _SIZE)
    ratios = step * np.arange(_SIZE) / num_batches
    above = ratios > 1.0
    return ratios[above], np.fft.irfft(spectrum, _SIZE)[above]


def _root(losses: tuple[FloatArray, FloatArray], target: float) -> float:
    """The ratio v >= 1 at which E_A max(1 - v / ratio, 0) is `target`."""
    ratios, weights = losses
    if target <= 0.0:
        return math.inf
    mass = np.cumsum(weights[::-1])[::-1]
    reduced = np.cumsum((weights / ratios)[::-1])[::-1]
    below = mass - ratios * reduced <= target
    first = int(np.argmax(below))
    if not below[first]:
        return math.inf
    return max(float((mass[first] - target) / reduced[first]), 1.0) if reduced[first] > 0.0 else float(ratios[first])


# --- additions ----------------------------------------------------------------------------------------------------


def _added(base: Profile, num_batches: int, rate: float, delta: float, slack: float) -> tuple[float, float]:
    step = _ROOM * num_batches / _SIZE
    size = _SIZE // int(_ROOM)  # a ratio above the number of batches never brings the mean below 1
    law, _ = _lattice(base, step, size)
    law = law[:size]
    pull = _TILT / size
    tilted = law * np.exp(-pull * np.arange(size))
    total = float(tilted.sum())
    index = np.arange(size)
    law_of_sum = np.fft.irfft(np.fft.rfft(tilted / total, _SIZE) ** num_batches, _SIZE)[:size]
    weights = law_of_sum * np.exp(pull * index + num_batches * math.log(total))
    gap = step / num_batches
    puts = np.concatenate(([0.0], np.cumsum(np.cumsum(weights))[:-1])) * gap  # E_B max(v - ratio, 0) at v = index * gap
    shift, rare = _shift(step, num_batches, 1e-6 * delta)  # whatever a loss multiplies it with
    lost = slack * math.exp(max(num_batches * math.log(total) + _TILT, 0.0)) + math.exp(-_TILT * (_ROOM - 1.0))
    ratios = gap * index
    _, far = _crossing(ratios, puts, rate, delta - lost)
    least, _ = _crossing(ratios + shift, puts - rare, rate, delta + lost)
    return least, far


def _crossing(ratios: FloatArray, puts: FloatArray, rate: float, delta: float) -> tuple[float, float]:
    """The loss x >= 0 at which e^x rate E_B max(v - ratio, 0) is delta, for the v that sampling makes of e^-x.

    Returns the last loss on the grid that costs more than delta, or 0, and the first that costs no more.
    """
    scale = 1.0 - rate + rate * ratios[ratios <= 1.0]  # e^-x
    with np.errstate(divide="ignore", invalid="ignore"):
        costly = np.flatnonzero(rate * puts[: len(scale)] / scale > delta)  # costs grow with v
    if delta <= 0.0:
        return 0.0, math.inf
    if len(costly) == 0:
        return 0.0, -math.log(scale[-1])
    first = int(costly[0])
    more = max(-math.log(scale[first]), 0.0)
    return more, -math.log(scale[first - 1]) if first > 0 and scale[first - 1] > 0.0 else math.inf


# --- the grid -----------------------------------------------------------------------------------------------------


def _lattice(base: Profile, step: float, size: int) -> tuple[FloatArray, float]:
    """Probabilities under B of the ratios 0, step, ..., size * step, and A's mass beyond."""
    ratios = step * np.arange(size + 1)
    split = int(np.searchsorted(ratios, 1.0))
    small = ratios[1:split]
    puts = np.append(0.0, small * base.down(-np.log(small)))  # E_B max(v - R, 0), without cancellation
    calls = base.up(np.log(ratios[split:]))  # E_B max(R - v, 0)
    across = (calls[0] - puts[-1] - (1.0 - ratios[split - 1])) / step
    low = np.diff(np.concatenate(([0.0], np.diff(puts) / step, [across + 1.0])))
    high = np.diff(np.concatenate(([across], np.diff(calls) / step, [0.0])))
    return np.maximum(np.concatenate((low, high)), 0.0), float(calls[-1])
