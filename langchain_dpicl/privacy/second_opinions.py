"""Compares a price with other accountants, which start from the event again; none of them lowers a price.

Four of them: prv-accountant (Gaussians, sampled or not), a Fourier transform of our own on another grid, tilted
towards the price so that small deltas keep their digits, an attack (a lower bound) for bounded-range steps, and sums
on a straight grid for random allocation. prv-accountant is never asked about pure steps: version 0.2.0 answers below
the truth there.

One walk over the event finds the terms and failures of the costliest place anew; what the first reading
(`epsilon.worlds`) has lost shows as another price. Then other accountants are asked about the terms found.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from langchain_dpicl.exceptions import AccountantsDisagreeError
from langchain_dpicl.privacy._validate import Adjacency, exact, round_up, round_up_at
from langchain_dpicl.privacy.accounting import epsilon as engine
from langchain_dpicl.privacy.accounting import profiles
from langchain_dpicl.privacy.accounting.epsilon import Opinion, Price, Terms, UnitTerms, normal_form, price_of
from langchain_dpicl.privacy.accounting.events import (
    ComposedEvent,
    Event,
    FailureEvent,
    ParallelEvent,
    RepeatedEvent,
    SubsampledEvent,
)
from langchain_dpicl.privacy.accounting.profiles import (
    VANISHED,
    CurveBound,
    FloatArray,
    GridBound,
    Profile,
    Steps,
    grid_step,
    spread,
)
from langchain_dpicl.privacy.extensions.gradient_sums import BallStep
from langchain_dpicl.privacy.extensions.random_allocation import AllocatedEvent, DealStep

_Parts = list[tuple[FloatArray, FloatArray, int]]  # losses, logarithms of their probabilities, count

PRV_MAX_COMPOSITIONS = 20_000
_PRV_MAX_EPSILON = 100.0
_PRV_MIN_NOISE = 0.2
_PRV_MAX_CELLS = 2**17
_MAX_CELLS = 2**18
_SUM_CELLS = 32_000

_FILTERING = threading.RLock()
"""Filters of warnings are the process's: two threads that set and restore them in turns would leave these for good."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_FILTERING.acquire, after_in_parent=_FILTERING.release, after_in_child=_FILTERING.release
    )


# --- prv-accountant -----------------------------------------------------------------------------------------------


def prv_parts(terms: Terms, adjacency: Adjacency) -> list[tuple[float, float, int]] | None:
    """(noise multiplier, rate, count) of a composition that prv-accountant knows a theorem for, else None."""
    balls = [(step, count) for step, count in terms.others if isinstance(step, BallStep)]
    if terms.pure or terms.ranges or terms.rho > 0 or len(balls) < len(terms.others):
        return None
    if (terms.sampled or balls) and adjacency != "add_remove":
        return None
    if any(base != Terms(mu_squared=base.mu_squared) for base, _, _ in terms.sampled):
        return None
    parts = [(1.0 / math.sqrt(base.mu_squared), rate, count) for base, rate, count in terms.sampled]
    parts.extend((1.0 / step.mu, step.rate, count) for step, count in balls)
    if terms.mu_squared > 0:
        parts.append((1.0 / math.sqrt(terms.mu_squared), 1.0, 1))
    return parts


def prv_opinion(parts: list[tuple[float, float, int]], *, delta: float, price: float) -> Opinion | str:
    """The interval of prv-accountant for removals, or the reason why it was not asked."""
    name = "prv-accountant"
    counts = [count for _, _, count in parts]
    if sum(counts) > PRV_MAX_COMPOSITIONS:
        return f"{name}: {sum(counts)} compositions are beyond the {PRV_MAX_COMPOSITIONS} that fit its memory"
    if price > _PRV_MAX_EPSILON or any(rate < 1.0 and noise < _PRV_MIN_NOISE for noise, rate, _ in parts):
        return f"{name}: epsilon above {_PRV_MAX_EPSILON:g} or sampled noise below {_PRV_MIN_NOISE:g} is beyond it"
    # Theorem 5.5 of Gopi, Lee, Wutschitz 2021 ties the mesh to the error; its domain is a little wider than epsilon.
    mesh_of_error = math.sqrt(sum(counts) / 2.0 * math.log(12e3 / delta))
    eps_error = max(0.01, 0.005 * price, 2.0 * (1.5 * price + 4.0) * mesh_of_error / _PRV_MAX_CELLS)
    if eps_error > 0.05 * max(price, 1.0):
        return f"{name}: a grid of {_PRV_MAX_CELLS} cells leaves an error of {eps_error:.2g}"
    try:
        return Opinion(name, *_ask_prv(parts, delta=delta, eps_error=eps_error))
    except (RuntimeError, ValueError) as fault:  # its known refusals at large epsilon and at tiny delta
        return f"{name}: refused ({str(fault).strip() or type(fault).__name__})"


def _ask_prv(parts: list[tuple[float, float, int]], *, delta: float, eps_error: float) -> tuple[float, float]:
    from prv_accountant.accountant import PRVAccountant
    from prv_accountant.privacy_random_variables.gaussian_mechanism import GaussianMechanism

    variables = [
        GaussianMechanism(noise_multiplier=noise) if rate == 1.0 else _sampled_gaussian(noise, rate)
        for noise, rate, _ in parts
    ]
    counts = [count for _, _, count in parts]
    with _FILTERING, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # long doubles in a convolution
        warnings.simplefilter("ignore", RuntimeWarning)  # logarithms of masses that underflow
        accountant = PRVAccountant(
            prvs=variables, max_self_compositions=counts, eps_error=eps_error, delta_error=delta * 1e-3
        )
        lower, _, upper = accountant.compute_epsilon(delta=delta, num_self_compositions=counts)
    return max(float(lower), 0.0), float(upper)


@functools.lru_cache(maxsize=64)
def _sampled_gaussian(noise: float, rate: float) -> Any:
    """The variable of a sampled step, which keeps its divergences: each accountant asks for all of them twice."""
    from prv_accountant.privacy_random_variables.poisson_subsampled_gaussian_mechanism import (
        PoissonSubsampledGaussianMechanism,
    )

    variable = PoissonSubsampledGaussianMechanism(sampling_probability=rate, noise_multiplier=noise)
    variable.rdp = functools.cache(variable.rdp)
    return variable


# --- an attack on bounded-range steps -----------------------------------------------------------------------------


def attack_opinion(ranges: tuple[tuple[float, int], ...], *, delta: float) -> Opinion | str:
    """The best attack that repeats one family; the others are let off."""
    name = "attack on bounded-range steps"
    if max(count for _, count in ranges) > _MAX_CELLS:
        return f"{name}: too many steps to add up"
    return Opinion(name, max(range_attack(bound, count, delta=delta) for bound, count in ranges), math.inf)


def range_attack(bound: float, count: int, *, delta: float) -> float:
    """A lower bound: the worst generalised randomised response, repeated (Dong, Durfee, Rogers 2020)."""
    from scipy.special import betaln

    hits = np.arange(count + 1, dtype=np.float64)
    log_choose = -math.log1p(count) - betaln(count - hits + 1.0, hits + 1.0)
    best = 0.0
    for share in np.linspace(0.02, 0.98, 49):
        gain = float(share) * bound  # the loss of a hit; a miss loses gain - bound
        # In logarithms, as either chance may be tiny: a hit has (1 - e^(gain - bound)) / (1 - e^-bound).
        whole = math.log(-math.expm1(-bound))
        log_hit = math.log(-math.expm1(gain - bound)) - whole
        log_miss = gain - bound + math.log(-math.expm1(-gain)) - whole
        losses = hits * gain + (count - hits) * (gain - bound)
        probs = np.exp(log_choose + hits * log_hit + (count - hits) * log_miss)

        def curve(x: FloatArray, losses: FloatArray = losses, probs: FloatArray = probs) -> FloatArray:
            return np.maximum(-np.expm1(np.minimum(x[:, None] - losses, 0.0)), 0.0) @ probs

        best = max(best, _lower_root(curve, delta, top=count * bound))
    return best


def _lower_root(curve: profiles.Curve, delta: float, *, top: float) -> float:
    """The largest x found with curve(x) > delta."""
    low, high = 0.0, top
    for _ in range(40):
        middle = (low + high) / 2.0
        low, high = (middle, high) if curve(np.array([middle]))[0] > delta else (low, middle)
    return low


# --- our own transform --------------------------------------------------------------------------------------------


def fft_opinion(inside: Steps, *, delta: float, price: float) -> Opinion | str:
    """An interval for the composition of dominating pairs, around a known price.

    The chords above a profile round each loss to one of its two neighbours on the grid, up or down with expectation
    at most step^2 / 8 above it, so by Hoeffding all roundings together exceed `shift` with probability below `rare`.
    """
    name = "independent FFT"
    num_steps, rare = sum(count for _, count in inside), delta / 200.0
    step = _opinion_step(inside, num_steps=num_steps, rare=rare, price=price)
    parts = [(*_loss_masses(profile, step), count) for profile, count in inside]
    shift = num_steps * step * step / 8.0 + step * math.sqrt(num_steps / 2.0 * math.log(1.0 / rare))
    logs = [(x, _log(p), count) for x, p, _, count in parts]
    composed = _near_price(logs, step=step, price=price, delta=delta)
    infinite = math.fsum(count * cut for _, _, cut, count in parts)
    lower, upper = composed.interval(delta + rare, delta - infinite)
    if not math.isfinite(upper):
        return f"{name}: its window does not hold epsilon {round_up_at(price)} at delta {delta:.3g}"
    return Opinion(name, max(lower - shift, 0.0), upper)


def _opinion_step(inside: Steps, *, num_steps: int, rare: float, price: float) -> float:
    """Half a percent up to some 100,000 steps, and never a multiple of the engine's grid.

    Beyond, the grid keeps to the spread of the sum, and intervals widen with the root of the count: 1.6 % at 10^6.
    """
    wanted = max(0.005 * price, 1e-4) / math.sqrt(num_steps / 2.0 * math.log(1.0 / rare))
    widest = max(profile.top_up + profile.top_down for profile, _ in inside)
    usual = grid_step(inside, is_coarse=False)
    deviation = math.sqrt(math.fsum(count * spread(profile) ** 2 for profile, count in inside))
    return 0.7 * max(min(usual, max(wanted, usual / 16.0)), 2.0 * widest / _MAX_CELLS, deviation / _SUM_CELLS)


def _loss_masses(profile: Profile, step: float) -> tuple[FloatArray, FloatArray, float]:
    """Losses (odd multiples of step / 2), their probabilities under A, and the mass at infinity, from chord slopes."""
    above = (np.arange(math.ceil(profile.top_up / step) + 1) + 0.5) * step
    below = -(np.arange(math.ceil(profile.top_down / step) + 1) + 0.5)[::-1] * step
    high = profile.up(above)  # H
    low = profile.down(-below) * np.exp(below)  # H - (1 - e^x)
    width, grow = math.expm1(step), math.exp(step)
    # A's mass at x is e^x times the bend there: the slope (in e^x) of the chord before it minus that of the one after.
    across = (low[-1] - math.expm1(below[-1]) - high[0]) / width  # chord over zero, scaled by e^x at its left end
    after_high = np.append((high[:-1] - high[1:]) / width, 0.0)
    p_high = grow * np.concatenate(([across], after_high[:-1])) - after_high
    between_low = (low[:-1] - low[1:]) / width  # below zero, 1 is taken off every slope
    p_low = np.concatenate(([-low[0]], grow * between_low)) - np.append(between_low, across - math.exp(below[-1]))
    masses = np.maximum(np.concatenate((p_low, p_high)), 0.0)
    return np.concatenate((below, above)), masses, float(high[-1])


@dataclass(frozen=True, slots=True)
class _TiltedSum:
    """The composed loss near the price: weights are probabilities times e^(tilt (loss - centre) - log_scale)."""

    losses: FloatArray
    weights: FloatArray
    tilt: float
    centre: float
    log_scale: float
    leak: float

    @property
    def slack(self) -> float:
        """What delta may be off by."""
        return math.exp(min(self.log_scale + 1.0, 700.0)) * self.leak

    def interval(self, most: float, least: float) -> tuple[float, float]:
        """Epsilon at `most` from below and at `least` from above, by all that window or rounding may have lost."""
        first = int(np.searchsorted(self.losses, self.centre - min(1.0 / max(self.tilt, 0.02), 50.0)))
        losses = self.losses[first:]
        distance = losses - self.centre
        above = np.exp(self.log_scale - self.tilt * distance) * self.weights[first:]
        mass = np.cumsum(above[::-1])[::-1]
        above *= np.exp(-distance)
        reduced = np.cumsum(above[::-1])[::-1]
        # H at each loss, and 0 beyond the last.
        deltas = np.append(mass[1:] - np.exp(np.minimum(distance[:-1], 600.0)) * reduced[1:], 0.0)
        found = []
        for target, at_end, at_start in ((most + self.slack, 0.0, 0.0), (least - self.slack, math.inf, losses[0])):
            first = int(np.argmax(deltas <= target))
            if target <= 0.0 or first == 0:
                found.append(float(at_end if target <= 0.0 else at_start))
            else:
                found.append(max(self.centre + math.log((mass[first] - target) / reduced[first]), 0.0))
        return found[0], found[1]


def _near_price(parts: _Parts, *, step: float, price: float, delta: float) -> _TiltedSum:
    """Composes under the tilt whose mean is the price, or under a weaker one where that makes the tails too heavy."""
    tilt = _tilt(parts, price)
    for weaker in (1.0, 0.5, 0.2):
        composed = _tilted_sum(parts, weaker * tilt, step=step, price=price)
        if composed.slack < delta / 200.0:
            return composed
    return _tilted_sum(parts, 0.0, step=step, price=price)


def _tilted_sum(parts: _Parts, tilt: float, *, step: float, price: float) -> _TiltedSum:
    """Composes by one real Fourier transform under an exponential tilt."""
    moments = [_apply_tilt(x, log_p, tilt) for x, log_p, _ in parts]
    counts = [count for _, _, count in parts]
    deviation = math.sqrt(
        math.fsum(c * float(w @ (x - w @ x) ** 2) for (x, _, c), (w, _) in zip(parts, moments, strict=True))
    )
    # Where the tilted mass sits in a single cell its spread is 0; a cell is as fine as the window can tell.
    half, leak = _window(parts, tilt, price=price, deviation=max(deviation, step), step=step)
    size = 2 * half
    spectrum = np.ones(1, dtype=np.complex128)
    for (x, _, count), (weights, _) in zip(parts, moments, strict=True):
        index = np.rint(x / step - 0.5).astype(np.int64) % size
        spectrum = spectrum * _powered(np.fft.rfft(np.bincount(index, weights, minlength=size)), count)
    total = np.fft.irfft(spectrum, size)
    centre = round(price / step - 0.5 * sum(counts))
    losses = (np.arange(centre - half, centre + half) + 0.5 * sum(counts)) * step
    log_scale = math.fsum(c * log_m for c, (_, log_m) in zip(counts, moments, strict=True)) - tilt * price
    return _TiltedSum(losses, np.roll(total, half - centre), tilt, price, log_scale, leak)


def _powered(spectrum: npt.NDArray[np.complex128], count: int) -> npt.NDArray[np.complex128]:
    """The power of a transform; of many steps, all but a few frequencies vanish."""
    is_kept = np.abs(spectrum) > math.exp(VANISHED / count)
    kept = spectrum[is_kept] ** count
    spectrum[:] = 0.0
    spectrum[is_kept] = kept
    return spectrum


def _log(p: FloatArray) -> FloatArray:
    return np.where(p > 0, np.log(np.maximum(p, 1e-320)), -np.inf)


def _apply_tilt(x: FloatArray, log_p: FloatArray, tilt: float) -> tuple[FloatArray, float]:
    """Tilted probabilities and the logarithm of their normaliser."""
    exponent = log_p + tilt * x
    peak = float(exponent.max())
    weights = np.exp(exponent - peak)
    total = float(weights.sum())
    return weights / total, peak + math.log(total)


def _tilt(parts: _Parts, price: float) -> float:
    """The tilt >= 0 under which the composed loss has mean `price`."""

    def mean(tilt: float) -> float:
        return math.fsum(count * float(_apply_tilt(x, log_p, tilt)[0] @ x) for x, log_p, count in parts)

    low, high = 0.0, 1.0
    while mean(high) < price and high < 1e6:
        low, high = high, 2.0 * high
    for _ in range(12):
        middle = (low + high) / 2.0
        low, high = (middle, high) if mean(middle) < price else (low, middle)
    return low


def _window(parts: _Parts, tilt: float, *, price: float, deviation: float, step: float) -> tuple[int, float]:
    """Half the number of cells, and a Chernoff bound on the tilted mass outside them."""
    log_scale = math.fsum(count * _apply_tilt(x, log_p, tilt)[1] for x, log_p, count in parts)
    round_off = 1e-14 * (100.0 + sum(count for _, _, count in parts))
    factors = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0)
    pulls = [sign * factor / deviation for sign in (-1.0, 1.0) for factor in factors]
    logs = [
        math.fsum(c * _apply_tilt(x, log_p, tilt + pull)[1] for x, log_p, c in parts) - log_scale - pull * price
        for pull in pulls
    ]
    half = 2 ** math.ceil(math.log2(10.0 * deviation / step + 2.0))
    while True:
        edges = [log - abs(pull) * half * step for log, pull in zip(logs, pulls, strict=True)]
        leak = 2.0 * math.exp(min(max(min(edges[: len(factors)]), min(edges[len(factors) :])), 0.0))
        if leak < round_off or half >= _MAX_CELLS:
            return half, leak + round_off
        half *= 2


# --- random allocation --------------------------------------------------------------------------------------------
# `random_allocation` adds ratios on a geometric grid, pair by pair. Here they lie on a straight grid and are added by a
# Fourier transform: from above for removals, tilted towards zero for additions. The two share the profile of one batch.

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
    find = _add_one_interval if is_added else _remove_one_interval
    lower, upper = find(base, num_batches, rate, delta, slack)
    return Opinion(name, lower, upper)


def _shift(step: float, num_batches: int, delta: float) -> tuple[float, float]:
    """How far the mean of the ratios may be rounded, and what that leaves out of delta."""
    rare = delta / 200.0
    shift = step * math.sqrt(math.log(max(1.0, step) / rare) / (2.0 * num_batches))
    return shift, rare


# --- random allocation: removals ------------------------------------------------------------------------------------


def _remove_one_interval(
    base: Profile, num_batches: int, rate: float, delta: float, slack: float
) -> tuple[float, float]:
    wanted = delta / rate  # H of the allocation itself, where the sampled one has delta
    if wanted >= 1.0:
        return 0.0, 0.0
    top = profiles.solve(base.up, wanted / 200.0, base.top_up)
    if not math.isfinite(top) or top > 600.0:
        return 0.0, math.inf
    widest = max(math.exp(top), 1.5)
    law, step, infinite, wrapped = _window_law(base, num_batches, widest, wanted / 400.0)
    losses = _means(law, step, num_batches)
    shift, rare = _shift(step, num_batches, wanted)
    far = _root(losses, wanted - infinite - wrapped - slack)
    near = _root(losses, wanted + rare + wrapped + slack)
    return _sampled_loss(near - shift, rate), _sampled_loss(far, rate)


def _sampled_loss(ratio: float, rate: float) -> float:
    return math.log1p(rate * (ratio - 1.0)) if ratio > 1.0 else 0.0


def _window_law(base: Profile, num_batches: int, widest: float, rare: float) -> tuple[FloatArray, float, float, float]:
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


# --- random allocation: additions -----------------------------------------------------------------------------------


def _add_one_interval(base: Profile, num_batches: int, rate: float, delta: float, slack: float) -> tuple[float, float]:
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


# --- random allocation: the grid ------------------------------------------------------------------------------------


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


@lru_cache(maxsize=256)
def second_opinions(
    event: Event, price: Price, *, delta: float, adjacency: Adjacency
) -> tuple[tuple[Opinion, ...], tuple[str, ...]]:
    """Returns what other computations say about a finite price, and which were not asked, with the reason.

    Raises:
      AccountantsDisagreeError: one of them says something else.
    """
    again = _recompute_price(event, price, delta=delta, adjacency=adjacency)
    if again.world.terms.is_empty:
        return (), ()
    if price.epsilon == 0.0:
        return (), ("all: epsilon is 0 at this delta",)
    if delta == 0.0:
        return (), ("all: at delta 0 the price is a sum",)
    answers = list(_ask_all(again, adjacency=adjacency))
    heard = tuple(answer for answer in answers if isinstance(answer, Opinion))
    return heard, tuple(answer for answer in answers if isinstance(answer, str))


def _recompute_price(event: Event, price: Price, *, delta: float, adjacency: Adjacency) -> Price:
    """The price of the costliest place, whose terms and failures are read from the event once more."""
    for in_parallel in (True,) if adjacency == "replace_one" else (False, True):  # as `readings` has them
        world = second_reading(event, price.world.labels, in_parallel=in_parallel)
        again = price_of(world, delta, adjacency, is_coarse=False)
        if math.isclose(again.epsilon, price.epsilon, rel_tol=1e-9):
            return again
    raise AccountantsDisagreeError(
        f"epsilon: the engine's bound is {price.epsilon}, a second reading of the event makes it "
        f"{again.epsilon}. No price is given; please report the event."
    )


def _ask_all(price: Price, *, adjacency: Adjacency) -> Iterator[Opinion | str]:
    """prv-accountant where it has a theorem and is sound; else our own transform; an attack where we know one."""
    terms, delta = price.world.terms, price.delta
    parts = prv_parts(terms, adjacency)
    if parts is not None:
        answer = prv_opinion(parts, delta=delta, price=price.removed)
        yield _agreeing(answer, price.removed, price.error)
        if isinstance(answer, Opinion):
            return
    else:
        yield "prv-accountant: no theorem for these steps, or unsound on them"
    if terms.ranges and terms == Terms(ranges=terms.ranges):
        yield _agreeing(attack_opinion(terms.ranges, delta=delta), price.epsilon, 0.0)
    yield from _allocation_opinions(terms, delta=delta, adjacency=adjacency)
    yield _own_transform(price, adjacency=adjacency)


def _allocation_opinions(terms: Terms, *, delta: float, adjacency: Adjacency) -> Iterator[Opinion | str]:
    """Recomputes every deal by itself, in both orders; what one of them costs, all together cost."""
    for step, _ in terms.others:
        if not isinstance(step, DealStep):
            continue
        batch = engine.single_profile(step.base, adjacency)
        is_all = terms == Terms(others=((step, 1),))
        for is_added, value in enumerate(CurveBound("random allocation", step.profile(adjacency)).epsilons(delta)):
            answer = allocation_opinion(batch, step.num_batches, step.rate, delta=delta, is_added=bool(is_added))
            answer = _agreeing(answer, value, 0.0)
            if isinstance(answer, Opinion):
                answer = Opinion(answer.name, answer.lower, answer.upper if is_all else math.inf)
            yield answer


def _own_transform(price: Price, *, adjacency: Adjacency) -> Opinion | str:
    """Recomputes the composed bound; where another bound won, the interval says so by reaching below it."""
    steps, delta = engine.steps(price.world.terms, adjacency), price.delta
    if price.added > price.removed:
        steps = tuple((profile.reversed(), count) for profile, count in steps)
    found = engine.bounds(price.world.terms, adjacency, is_coarse=False)
    composed = next((bound for bound in found if isinstance(bound, GridBound)), None)
    value, error = price.epsilon, price.error
    if composed is not None:
        value, error = max(composed.epsilons(delta)), composed.error(delta)
    if not math.isfinite(value):
        return "independent FFT: delta is below what a transform resolves"
    answer = fft_opinion(steps, delta=delta, price=value)
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
        f"epsilon: the engine's bound is {value} (error at most {error:.2g}), {answer.name} says "
        f"[{answer.lower}, {answer.upper}]. No price is given; please report the event."
    )


# --- reading the event again --------------------------------------------------------------------------------------

_Labels = tuple[tuple[str, tuple[str, ...]], ...]


def second_reading(event: Event, labels: _Labels, *, in_parallel: bool) -> UnitTerms:
    """Returns what an event does to a unit of the given labels.

    Args:
      event: what was, or will be, released.
      labels: the labels of the unit by partition; their branches compose.
      in_parallel: whether a secret deal is read as one of its batches.

    Raises:
      UnknownEventError: the event has no price.
    """
    parts = list(_parts(event, labels, 1, in_parallel=in_parallel))
    failures = [exact(part.delta) * count for part, count in parts if isinstance(part, FailureEvent)]
    rest = tuple(RepeatedEvent(part, count) for part, count in parts if not isinstance(part, FailureEvent))
    return UnitTerms(normal_form(ComposedEvent(rest)), round_up(sum(failures, Fraction(0))), labels)


def _parts(event: Event, labels: _Labels, count: int, *, in_parallel: bool) -> Iterator[tuple[Event, int]]:
    """Yields what the event consists of, and how often: single releases, samples and deals."""
    match event:
        case RepeatedEvent():
            yield from _parts(event.event, labels, count * event.count, in_parallel=in_parallel)
        case ComposedEvent():
            for part in event.events:
                yield from _parts(part, labels, count, in_parallel=in_parallel)
        case ParallelEvent():
            held = dict(labels).get(event.partition, ())
            for label, branch in event.branches:
                if label in held:
                    yield from _parts(branch, labels, count, in_parallel=in_parallel)
        case AllocatedEvent() if in_parallel or event.num_batches == 1:
            yield from _parts(event.bounded_by, labels, count, in_parallel=in_parallel)
        case SubsampledEvent(sampling_rate=1):
            yield from _parts(event.event, labels, count, in_parallel=in_parallel)
        case SubsampledEvent() | AllocatedEvent():
            inside = _parts(event.event, labels, 1, in_parallel=in_parallel)
            block = ComposedEvent(tuple(RepeatedEvent(part, times) for part, times in inside))
            yield dataclasses.replace(event, event=block), count
        case _:
            yield event, count
