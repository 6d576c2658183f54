"""Adds noise to a bounded sum and says which event that was.

A noise multiplier is the noise scale over the sensitivity in the mechanism's own norm; nobody multiplies by hand.
Proofs: docs/proofs/gaussian.md, gumbel.md.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar, Literal, Self, final

import numpy as np

from langchain_dpicl.exceptions import SensitivityError
from langchain_dpicl.privacy._validate import check_int, check_real, fail
from langchain_dpicl.privacy.accounting.events import BoundedRangeEvent, Event, GaussianEvent, RepeatedEvent
from langchain_dpicl.privacy.mechanisms.bounded import (
    GRID,
    LARGEST,
    Aggregation,
    BoundedSum,
    ClosedClass,
    Floats,
    Norm,
    Sensitivity,
)
from langchain_dpicl.privacy.mechanisms.randomness import Coins, GaussianDraws, Noise, SecureRandom

# Noise is rounded up by more than the roundings of scale and event together can take away.
ROUND_UP = 1.0 + 2.0**-50
# A noisy vector is rounded to multiples of a power of two that is at most this share of the noise scale,
_GRID_SHARE = 2.0**-16
# but no finer than the grid of the sums, which are at most LARGEST: then every multiple is a float.
_FINEST_GRID = 1.0 / GRID
# Share of (grid + scale + noise) within which float arithmetic may misplace a draw: 256 units of 2^-52.
_MARGIN = 2.0**-44


@dataclass(frozen=True, slots=True, eq=False)
class Release:
    """What one release made public.

    Attributes:
      index: the chosen coordinate, or None.
      values: float64[d] noisy sum on a public grid, or None; free to post-process.
      event: what the accountant charges.
      indices: the chosen coordinates in their released order, or None.
    """

    index: int | None
    values: Floats | None = field(repr=False)
    event: Event
    indices: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Mechanism(ClosedClass, is_base=True):
    """Base of the mechanisms.

    Attributes:
      name: public name.
      norm: norm of the sensitivity that the noise is scaled to.
      kind: what is drawn.
      releases: what leaves.
    """

    __slots__ = ()
    noise_multiplier: float
    name: ClassVar[str]
    norm: ClassVar[Norm]
    kind: ClassVar[Noise | Coins]
    releases: ClassVar[Literal["vector", "index", "indices"]]

    def __post_init__(self) -> None:
        checked = check_real("noise_multiplier", self.noise_multiplier, low=1e-9, high=1e12)
        object.__setattr__(self, "noise_multiplier", checked)

    @property
    @abstractmethod
    def event(self) -> Event:
        """The event of one release."""

    @abstractmethod
    def release(self, total: BoundedSum, *, rng: SecureRandom) -> Release:
        """Releases a noisy function of a sum."""

    def repeated(self, length: int, answers: int | None = None) -> Event:
        """Returns the event of `length` releases on the same rows.

        Args:
          length: public.
          answers: how many of them may answer, for a mechanism that tests first; others always answer.

        Raises:
          ConfigurationError: `answers` with a mechanism that always answers.
        """
        if answers is not None:
            raise fail("answers", f"None: {self.name} answers every time", answers)
        return self.event if length == 1 else RepeatedEvent(self.event, length)

    def check_sum(self, aggregation: Aggregation, sensitivity: Sensitivity, constants: tuple[float, ...]) -> None:
        """Refuses a sum whose bound in `norm` is not all that the proof needs."""

    def with_noise(self, noise_multiplier: float) -> Self:
        """Returns the same mechanism with another noise multiplier."""
        return dataclasses.replace(self, noise_multiplier=noise_multiplier)

    def _scale(self, total: BoundedSum) -> float:
        scale = self.noise_multiplier * total.sensitivity.require(self.norm) * ROUND_UP
        if not np.isfinite(total.value).all():
            raise SensitivityError(f"{self.name}: expected a finite sum; build sums with `aggregation` only.")
        return scale

    def implementation_delta(self, d: int) -> float:
        """Returns what one release over `d` candidates may add to delta, beyond the ideal mechanism.

        Source: docs/proofs/randomness.md, sections 4 and 5.
        """
        return SecureRandom.implementation_delta(self.kind, check_int("d", d, low=1))

    def to_dict(self) -> dict[str, Any]:
        """Returns the public parameters, for reports."""
        return {"name": self.name, "noise_multiplier": self.noise_multiplier}


@functools.lru_cache(maxsize=64)
def _bounded_range(noise_multiplier: float) -> BoundedRangeEvent:
    """Returns the event of Gumbel noise, which every release asks for: public, frozen and so made once."""
    return BoundedRangeEvent(1.0 / noise_multiplier)


class NoisyMax(Mechanism, is_base=True):
    """The argmax of noisy scores; nothing else leaves."""

    __slots__ = ()

    def _choose(self, total: BoundedSum, standard_noise: Callable[[int], Floats]) -> Release:
        scale = self._scale(total)
        # Scores relative to the best one: exact on the grid of sums, and small where it matters.
        scores = total.value - total.value.max()  # [d], <= 0
        index = int((scores + scale * standard_noise(scores.size)).argmax())
        return Release(index=index, values=None, event=self.event)


def grid_step(scale: float) -> float:
    """Returns the public grid of a noisy vector, from its noise scale alone."""
    return max(math.ldexp(_GRID_SHARE, math.frexp(scale)[1] - 1), _FINEST_GRID)


def rounded(value: Floats, draws: GaussianDraws, scale: float, step: float) -> Floats:
    """Returns float64[d]: value + scale * ideal draw, rounded to the nearest multiple of `step` as in real arithmetic.

    Floats decide where they are certain; a sum within their error of the middle between two multiples is settled with
    rationals and fresh coins. Needs |value| <= LARGEST.
    """
    whole = np.rint(value / step)
    rest = value - whole * step  # [d], exact, at most half a step
    cells = (rest + scale * draws.values) / step
    nearest = np.rint(cells)
    doubt = _MARGIN * (1.0 + scale / step * (1.0 + np.abs(draws.values)))  # [d], in steps
    for i in (0.5 - np.abs(cells - nearest) <= doubt).nonzero()[0]:
        lower = math.floor(cells[i])
        middle = Fraction(lower + 0.5) * Fraction(step) - Fraction(float(rest[i]))
        nearest[i] = lower if draws.is_below(int(i), middle / Fraction(scale)) else lower + 1
    return (whole + nearest + 0.0) * step  # + 0.0: no negative zero, whose sign is not part of the ideal result


@final
@dataclass(frozen=True, slots=True)
class GaussianMechanism(Mechanism):
    """Adds independent normal noise to every coordinate of a sum and rounds the result to a public grid.

    Formal guarantees:
      - `values` is `total.value + N(0, (noise_multiplier * L2 sensitivity)^2 I)`, under `total.adjacency`, rounded to
        the nearest multiples of a power of two: between 2^-17 and 2^-16 of the noise scale, and at least 2^-32.
      - It equals the rounding of real normal noise except with a probability that `implementation_delta` covers, so
        `values` may be used by any post-processing (argmax, thresholds, sampling, cutting at zero).
      - The event is `GaussianEvent(noise_multiplier)`.
      - Coordinates beyond 2^20 in magnitude, which no sum of up to 2^20 rows has, are cut to it before the noise.

    The released law is discrete, on a public grid, and a post-processing of the continuous mechanism: its event, also
    subsampled, is exact for a vector that leaves as a whole. Why not the discrete Gaussian: docs/proofs/gaussian.md.

    Args:
      noise_multiplier: standard deviation of the noise over the L2 sensitivity, in [1e-9, 1e12].

    Raises:
      ConfigurationError: `noise_multiplier` out of range.

    >>> GaussianMechanism(2.0).event
    GaussianEvent(noise_multiplier=2.0)

    Source: Balle and Wang (2018), Theorem 8; docs/proofs/gaussian.md.
    """

    noise_multiplier: float
    name: ClassVar[str] = "gaussian"
    norm: ClassVar[Norm] = "l2"
    kind: ClassVar[Noise | Coins] = "gaussian"
    releases: ClassVar[Literal["vector", "index", "indices"]] = "vector"

    @property
    def event(self) -> GaussianEvent:
        """The event of one release."""
        return GaussianEvent(self.noise_multiplier)

    def release(self, total: BoundedSum, *, rng: SecureRandom) -> Release:
        """Adds the noise and rounds.

        Args:
          total: float64[d] sum with its L2 sensitivity.
          rng: source of noise.

        Raises:
          SensitivityError: `total` carries no L2 bound.
        """
        scale = self._scale(total)
        bounded = np.minimum(np.maximum(total.value, -LARGEST), LARGEST)  # moves no two sums apart
        values = rounded(bounded, rng.gaussian_draws(total.value.size), scale, grid_step(scale))  # [d]
        return Release(index=None, values=values, event=self.event)


@final
@dataclass(frozen=True, slots=True)
class GumbelMechanism(NoisyMax):
    """Releases the argmax of a sum plus Gumbel noise: the exponential mechanism.

    Formal guarantees:
      - `index` is i with probability proportional to exp(total.value[i] / (noise_multiplier * range)).
      - The event is `BoundedRangeEvent(1 / noise_multiplier)`; within `implementation_delta` of it.

    Args:
      noise_multiplier: Gumbel scale over the range of a neighbour's change, in [1e-9, 1e12].

    Raises:
      ConfigurationError: `noise_multiplier` out of range.

    Source: McSherry and Talwar (2007); Dong, Durfee, Rogers (2020); docs/proofs/gumbel.md.
    """

    noise_multiplier: float
    name: ClassVar[str] = "gumbel"
    norm: ClassVar[Norm] = "range"
    kind: ClassVar[Noise | Coins] = "gumbel"
    releases: ClassVar[Literal["vector", "index", "indices"]] = "index"

    @property
    def event(self) -> BoundedRangeEvent:
        """The event of one release."""
        return _bounded_range(self.noise_multiplier)

    def release(self, total: BoundedSum, *, rng: SecureRandom) -> Release:
        """Chooses the noisy best coordinate.

        Args:
          total: float64[d] sum with its range sensitivity.
          rng: source of noise.

        Raises:
          SensitivityError: `total` carries no range bound.
        """
        return self._choose(total, rng.gumbel)
