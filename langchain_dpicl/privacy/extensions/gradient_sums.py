"""Sums of gradients, each clipped to a public length, added up batch by batch.

A row is one unit's gradient, far too wide for all rows to stand in memory at once. The sum is in units of the clip, on
the public grid of 2^-32, so that adding is exact: batches may be cut and ordered in any way. Proof:
docs/proofs/gradient-sums.md.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, TypeAlias, final

import numpy as np
import numpy.typing as npt

from langchain_dpicl._opaque import Opaque
from langchain_dpicl.exceptions import ConfigurationError, SensitivityError
from langchain_dpicl.privacy._validate import Adjacency, RowShape, check_int, check_real, fail
from langchain_dpicl.privacy.accounting import profiles
from langchain_dpicl.privacy.accounting.epsilon import ExtensionEvent, Step, Terms
from langchain_dpicl.privacy.accounting.events import Event, GaussianEvent, SubsampledEvent, is_positive, require
from langchain_dpicl.privacy.accounting.profiles import FloatArray, Profile, symmetric
from langchain_dpicl.privacy.extensions.label_places import dominates
from langchain_dpicl.privacy.mechanisms.bounded import (
    GRID,
    LARGEST,
    Aggregation,
    BoundedSum,
    ClosedClass,
    Floats,
    Sensitivity,
    real_rows,
    row_appears,
)
from langchain_dpicl.privacy.mechanisms.release_plan import ReleasePlan

Ints: TypeAlias = npt.NDArray[np.int64]

MAX_GRADIENT_WIDTH = 2**24
"""Most parameters a gradient may have: the squares of 19 binary digits each still add exactly in 64-bit integers."""
MAX_ROWS = 2**30
"""Most rows of one sum: that many coordinates of 32 binary digits add exactly in 64-bit integers."""
_ACROSS, _AT_ONCE = 2**13, 2**16
# Columns, and numbers, that are worked on at once: they stay in a processor's cache.
_COPIED, _MANY, _MOST_THREADS = 2**22, 2**21, 8
# So many numbers are copied at once; from so many on, pieces are worked on side by side. Whole numbers add up to the
# same, whichever is first.
_LEAST_EXPONENT = -900
# A row below 2^-900 is zero on the grid, whatever the clip; its exponent is cut so that no power of two overflows.
_ROUND_UP = 1.0 + 2.0**-50


@dataclass(frozen=True, slots=True)
class SampledBallEvent(ExtensionEvent):
    """x + N(0, (noise_multiplier * L2 sensitivity)^2 I), x being the sum of the vectors of one secret sample.

    Each unit is in the sample independently with probability `sampling_rate`; then it adds one vector of a ball around
    zero, else nothing. The sensitivity is that of the adjacency in force: the ball's radius under `add_remove`, where
    this is a `SubsampledEvent` of a `GaussianEvent`, and its diameter under `replace_one`, where that knows less.

    Attributes:
      noise_multiplier: standard deviation over the L2 sensitivity, > 0.
      sampling_rate: probability, in (0, 1].

    Raises:
      UnknownEventError: the multiplier or the rate is out of range.
    """

    noise_multiplier: float
    sampling_rate: float
    kind: ClassVar[str] = "sampled_ball"
    own_adjacencies: ClassVar[frozenset[str]] = frozenset({"add_remove", "replace_one"})

    def __post_init__(self) -> None:
        require(is_positive(self.noise_multiplier), "SampledBallEvent", "noise_multiplier > 0", self.noise_multiplier)
        ok = is_positive(self.sampling_rate) and self.sampling_rate <= 1
        require(ok, "SampledBallEvent", "0 < sampling_rate <= 1", self.sampling_rate)

    def reduced(self) -> Event | Step:
        """Returns a Gaussian where everybody is in the sample, else one step."""
        if self.sampling_rate == 1:
            return GaussianEvent(self.noise_multiplier)
        return BallStep(1.0 / float(self.noise_multiplier), float(self.sampling_rate))

    def outweighs(self, other: Event) -> bool:
        """Compares the two numbers of two such events, as of sampled Gaussians.

        Args:
          other: another event.
        """
        if not isinstance(other, SampledBallEvent):
            return False
        mine, theirs = (SubsampledEvent(GaussianEvent(e.noise_multiplier), e.sampling_rate) for e in (self, other))
        return dominates(mine, theirs)


@dataclass(frozen=True, slots=True)
class BallStep(Step):
    """One Gaussian release of a sample's sum of vectors out of a ball.

    Attributes:
      mu: sensitivity over the noise; under replace_one that of the ball's diameter.
      rate: of the sample, below 1.
    """

    mu: float
    rate: float
    bound_name: ClassVar[str] = "one sampled release, closed form"

    @property
    def is_empty(self) -> bool:
        """Whether the noise is infinite."""
        return self.mu == 0.0

    @property
    def is_bounded(self) -> bool:
        """See `Terms.is_bounded`."""
        return Terms(mu_squared=self.mu * self.mu).is_bounded

    @property
    def key(self) -> tuple[float, float]:
        """See `Step`."""
        return self.mu, self.rate

    def profile(self, adjacency: Adjacency) -> Profile:
        """See `Step`."""
        return _ball_step(self.mu, self.rate, adjacency)


@lru_cache(maxsize=256)
def _ball_step(mu: float, rate: float, adjacency: Adjacency) -> Profile:
    """One Gaussian release of a sample's sum of vectors out of a ball; under replace_one mu is that of its diameter."""
    if adjacency == "replace_one":
        return amplify_replaced_in_ball(mu / 2.0, rate)
    return profiles.amplify_poisson(profiles.gaussian(mu), rate)


def amplify_replaced_in_ball(mu: float, rate: float) -> Profile:
    """Poisson sampling under replace_one of vectors out of a ball of radius mu, in deviations of the Gaussian noise.

    The pair ((1 - rate) N(0, 1) + rate N(mu, 1), (1 - rate) N(0, 1) + rate N(-mu, 1)), for 0 < rate < 1: no two
    vectors of the ball are distinguished better than opposite ones.

    Source: docs/proofs/gradient-sums.md, by Kahane's convexity inequality (1986).
    """
    from scipy.special import log_ndtr

    stays, joins = math.log1p(-rate), math.log(rate)

    def odds(t: float) -> float:  # log(1 - rate + rate e^(mu t - mu^2 / 2))
        return float(np.logaddexp(stays, joins + mu * t - mu * mu / 2.0))

    def curve(x: FloatArray) -> FloatArray:
        with np.errstate(divide="ignore"):  # at x = 0 the logarithm is -inf, and the threshold 0
            log_rise = x + np.log(-np.expm1(-x))  # log(e^x - 1)
        # The loss exceeds x beyond t, where e^(mu t) solves a quadratic equation.
        log_half = stays + log_rise - math.log(2.0) - joins + mu * mu / 2.0 - x / 2.0
        root = np.where(log_half > 300.0, log_half + math.log(2.0), np.arcsinh(np.exp(np.minimum(log_half, 300.0))))
        t = (x / 2.0 + root) / mu
        gain = np.exp(joins + log_ndtr(mu - t)) - np.exp(joins + x + log_ndtr(-mu - t))
        delta: FloatArray = np.maximum(gain - np.exp(stays + log_rise + log_ndtr(-t)), 0.0)
        return delta

    far = mu + 9.0  # Phi(-9) < TAIL
    return symmetric(curve, odds(far) - odds(-far))


@final
@dataclass(frozen=True, slots=True)
class ClippedGradientSum(Aggregation):
    """Sum of rows clipped to `l2_clip_norm` in L2 and divided by it: v / max(l2_clip_norm, |v|).

    A row is the gradient of one unit: its examples are combined first and clipped once. A row of zeros, or with a NaN
    or an infinity anywhere, counts zero. A row is divided by a length of whole numbers, exact and a little above its
    own: by at most 2^-28 for two parameters, 2^-12 for 2^18 and 2^-6 for 2^24, far less where many coordinates matter.

    Formal guarantees:
      - A row lies in the L2 unit ball exactly: rows of any finite size are clipped, none overflows.
      - A row that appears or vanishes moves the sum by at most 1 in L2; one that changes, by at most 2.
      - Unit rows only: the rows of slots, which hold several units, are refused.
      - No range bound is declared, so mechanisms that choose among coordinates refuse this sum.

    Args:
      l2_clip_norm: the length that no gradient exceeds, public, in [1e-9, 1e9].

    Raises:
      ConfigurationError: `l2_clip_norm` out of range.

    >>> ClippedGradientSum(0.1).sensitivity(row_shape="units", adjacency="replace_one")
    Sensitivity(l2=2.0, range=None, linf=None)

    Source: Abadi et al. (2016), Deep Learning with Differential Privacy, Algorithm 1; Duan et al. (2023), Flocks of
      Stochastic Parrots, Algorithm 1; docs/proofs/gradient-sums.md.
    """

    l2_clip_norm: float
    name: ClassVar[str] = "clipped_gradient_sum"

    def __post_init__(self) -> None:
        object.__setattr__(self, "l2_clip_norm", check_real("l2_clip_norm", self.l2_clip_norm, low=1e-9, high=1e9))

    def sensitivity(self, *, row_shape: RowShape, adjacency: Adjacency) -> Sensitivity:
        """Returns L2 1 under add_remove and 2 under replace_one; no range.

        Raises:
          ConfigurationError: rows of slots.
        """
        appears = row_appears(row_shape, adjacency)
        if row_shape != "units":
            advice = "A gradient is that of one unit; sample with PoissonUnits."
            raise fail("row_shape", f"'units' for {self.name}", row_shape, advice)
        return Sensitivity(l2=1.0 if appears else 2.0, range=None)

    def bounded_rows(self, rows: npt.NDArray[Any], *, width: int) -> Floats:
        """Returns rows in the unit ball, on the grid."""
        given = real_rows(rows, width, high=MAX_GRADIENT_WIDTH)
        with np.errstate(all="ignore"):
            return _steps(given, self._rates(given)) / GRID + 0.0

    def bound(
        self,
        rows: npt.NDArray[Any] | RunningSum,
        *,
        row_shape: RowShape,
        adjacency: Adjacency,
        width: int,
        public: npt.NDArray[Any] | None = None,
    ) -> BoundedSum:
        """Adds rows up, each clipped by itself first; see `Aggregation.bound`.

        Args:
          rows: as for `Aggregation.bound`, or a running sum of this very aggregation, which is closed then.
          row_shape: "units".
          adjacency: "add_remove" or "replace_one".
          width: d, public.
          public: not read.

        Raises:
          ConfigurationError: a running sum of another plan or width, or one that was taken already.
        """
        del public
        if type(rows) is RunningSum:
            mine = (self, row_shape, adjacency, width)
            found = (rows.aggregation, rows.row_shape, rows.adjacency, rows.width)
            if found != mine:
                raise fail("running sum", f"one of this plan, {mine}", found, "Make it with running_sum(plan, width).")
            return rows.total()
        running = RunningSum(self, row_shape=row_shape, adjacency=adjacency, width=width)
        running.add(rows)
        return running.total()

    def sampled_event(self, noise: Event, sampling_rate: float, adjacency: Adjacency) -> Event | None:
        """Returns the event of vectors out of a ball: of a clipped gradient it is known that it is near to none."""
        if isinstance(noise, GaussianEvent) and adjacency == "replace_one":
            return SampledBallEvent(noise.noise_multiplier, sampling_rate)
        return None

    def _rates(self, rows: npt.NDArray[Any]) -> Floats:
        """Returns float64[n, 1]: what each row is multiplied by to be in steps of the grid; 0 where it counts zero."""
        width = rows.shape[1]
        high, low = (np.asarray(end, dtype=np.float64) for end in (rows.max(axis=1), rows.min(axis=1)))
        peak = np.maximum(high, -low)  # [n]; a NaN is the largest of all
        exponent = np.maximum(np.frexp(peak)[1], _LEAST_EXPONENT)  # the peak is below 2^exponent
        digits = (62 - (width - 1).bit_length()) // 2  # squares of so many digits add up to at most 2^62
        factor = np.ldexp(1.0, digits - exponent)
        factor[~np.isfinite(peak)] = 0.0
        square = np.zeros(len(rows), dtype=np.int64)
        for columns in _pieces(width, _ACROSS):
            whole = _scale_rows(rows[:, columns], factor[:, None]).astype(np.int64)  # towards zero
            square += np.einsum("ij,ij->i", whole, whole)  # exact in any order
        # What is cut off is below 1 in each coordinate, so at most the root of the width. Rounded up by more than the
        # roundings here, and the two of the product with a row, can take away.
        length = (np.sqrt(square.astype(np.float64)) + (math.isqrt(width - 1) + 1)) * _ROUND_UP
        rates: Floats = (factor * (GRID / np.maximum(length, self.l2_clip_norm * factor)))[:, None]
        return rates


def _scale_rows(rows: npt.NDArray[Any], factor: Floats) -> Floats:
    """Returns float64[n, d]: rows times their own factor[n, 1]; zeros where the factor is zero, whatever the row is."""
    scaled: Floats = np.multiply(rows, factor, dtype=np.float64)
    failed = factor[:, 0] == 0.0
    if failed.any():
        scaled[failed] = 0.0  # infinity times zero is no number
    return scaled


def _steps(rows: npt.NDArray[Any], rates: Floats) -> Floats:
    """Returns float64[n, d]: clipped rows in whole steps of the grid."""
    steps = _scale_rows(rows, rates)
    return np.trunc(steps, out=steps)


def _each(work: Callable[[slice], None], pieces: Sequence[slice], size: int) -> None:
    """Works on all pieces, side by side where there is much to do and the system has room for threads.

    This thread works too: a private number of rows decides whether there is much, and so may not decide about an error.
    """
    waiting = deque(pieces)

    def work_on() -> None:
        while waiting:
            try:
                piece = waiting.popleft()
            except IndexError:  # another thread was faster
                return
            work(piece)

    if size < _MANY or len(pieces) < 2:
        work_on()
        return
    helpers: list[Future[None]] = []
    with ThreadPoolExecutor() as pool:
        with suppress(RuntimeError):  # no room for one more
            for _ in range(min(_MOST_THREADS, os.cpu_count() or 1) - 1):
                helpers.append(pool.submit(work_on))  # noqa: PERF401  those that started are kept
        work_on()
    for helper in helpers:
        helper.result()


def _pieces(length: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, length)) for first in range(0, length, size)]


@final
class RunningSum(Opaque, ClosedClass):
    """Adds clipped gradients as they come; the same bits for any cutting into batches and any order. Shows nothing.

    Formal guarantees:
      - `total()` is the sum of all rows added, each bounded by itself first, exactly; coordinates beyond 2^20 in
        magnitude, which only more than 2^20 rows make, are cut to it, which moves no two sums apart.
      - Total in the numbers, and no rows at all give zeros: see `Aggregation.bound`.
      - A batch is copied in pieces of at most 2^22 numbers, or one row, before it is looked at: what is measured is
        what is added. Beside that, memory of `width` integers is needed and no more.

    Args:
      aggregation: how a row is bounded.
      row_shape: "units".
      adjacency: "add_remove" or "replace_one".
      width: columns of a row, public, up to 2^24.

    Raises:
      ConfigurationError: a width, shape or adjacency that does not fit.
    """

    __slots__ = ("_num_rows", "_steps", "adjacency", "aggregation", "row_shape", "sensitivity", "width")

    def __init__(
        self, aggregation: ClippedGradientSum, *, row_shape: RowShape, adjacency: Adjacency, width: int
    ) -> None:
        self.aggregation = aggregation
        self.sensitivity = aggregation.sensitivity(row_shape=row_shape, adjacency=adjacency)
        self.row_shape, self.adjacency = row_shape, adjacency
        self.width = check_int("width", width, low=1, high=MAX_GRADIENT_WIDTH)
        self._steps: Ints | None = np.zeros(self.width, dtype=np.int64)
        self._num_rows = 0

    def add(self, rows: npt.NDArray[Any]) -> None:
        """Adds private rows, each clipped by itself.

        Args:
          rows: real[n, width]; n may be 0.

        Raises:
          ConfigurationError: the engine filled no such matrix, or the sum was taken already.
          SensitivityError: more than 2^30 rows, which no engine computes.
        """
        steps = self._open()
        given = real_rows(rows, self.width, high=MAX_GRADIENT_WIDTH)
        self._num_rows += len(given)
        if self._num_rows > MAX_ROWS:
            raise SensitivityError("RunningSum: expected at most 2^30 rows, found more. Draw smaller samples.")
        if not given.size:
            return
        for rows_at in _pieces(len(given), max(1, _COPIED // self.width)):
            # Measured and added are the same numbers: an engine may fill its buffer anew meanwhile.
            self._accumulate(np.array(given[rows_at]), steps)

    def _accumulate(self, own: npt.NDArray[Any], steps: Ints) -> None:
        """Adds rows that nobody else can change."""
        rates = np.empty((len(own), 1))
        places = _pieces(len(own), _AT_ONCE // min(self.width, _ACROSS))

        def measure(place: slice) -> None:
            # A caller's numpy error state must not turn a unit's odd number into an exception; threads have their own.
            with np.errstate(all="ignore"):
                rates[place] = self.aggregation._rates(own[place])  # noqa: SLF001 - the two are one proof

        def accumulate(columns: slice) -> None:
            with np.errstate(all="ignore"):
                for place in places:
                    part = np.add.reduce(_steps(own[place, columns], rates[place]), axis=0)
                    steps[columns] += part.astype(np.int64)

        _each(measure, places, own.size)
        _each(accumulate, _pieces(self.width, _ACROSS), own.size)

    def clear(self) -> None:
        """Forgets all rows added so far.

        Raises:
          ConfigurationError: the sum was taken already.
        """
        self._open().fill(0)
        self._num_rows = 0

    def total(self) -> BoundedSum:
        """Returns the sum with its bound, once; the running sum is empty and closed then.

        Raises:
          ConfigurationError: it was taken already.
        """
        steps, self._steps = self._open(), None
        most = int(LARGEST * GRID)
        value = np.clip(steps, -most, most).astype(np.float64) / GRID
        return BoundedSum(value, self.sensitivity, self.row_shape, self.adjacency)

    def _open(self) -> Ints:
        if self._steps is None:
            raise ConfigurationError("RunningSum: expected one whose total was not taken, found it closed. Start anew.")
        return self._steps


def running_sum(plan: ReleasePlan, width: int) -> RunningSum:
    """Returns an empty sum that takes private gradients batch by batch; `plan.bound` closes it.

    Args:
      plan: one that adds gradients.
      width: parameters of a gradient, public.

    Raises:
      ConfigurationError: the plan does not add gradients, or a width out of range.
    """
    if not isinstance(plan.aggregation, ClippedGradientSum):
        advice = "Other rows are bounded together, by bound()."
        raise fail("aggregation", "clipped_gradient_sum for a running sum", plan.aggregation.name, advice)
    return RunningSum(plan.aggregation, row_shape=plan.row_shape, adjacency=plan.adjacency, width=width)
