"""Means of clipped logits over a public count, with the public model's own logits added.

The scores lie on a public grid, so that float64 adds them exactly. A token drawn with probability proportional to
exp(score / temperature) is the exponential mechanism (`GumbelMechanism`), its temperature the noise multiplier times
the range declared here. Proof: docs/proofs/logit-sums.md.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np
import numpy.typing as npt

from langchain_dpicl.privacy._validate import Adjacency, RowShape, check_choice, check_int, check_real, fail
from langchain_dpicl.privacy.mechanisms.bounded import (
    MAX_WIDTH,
    Aggregation,
    BoundedSum,
    Floats,
    Sensitivity,
    matrix,
    real_rows,
    row_appears,
)

_DIGITS = 31
# Binary digits of a share on the grid: 2^20 shares stay within 2^51 steps, and so does a public score. Their sums, and
# the differences of two sums, are then at most 2^53 steps: whole numbers that float64 holds exactly.
_PUBLIC_DIGITS = 51
_LEAST_LIMIT = 1e-8
"""Least that a row may add at most: below, a share would keep too few digits beside the public score."""
_LOWEST = 2.0**15
"""How far below the largest a public logit can lie: exp of it over any temperature in use is zero."""
_COLUMNS = 4096
_HUGE, _HUGE_PUBLIC = 1e200, 2.0**20
# What infinities count as: far beyond every logit, and what is added to or taken off it does not overflow.
LOGIT_MECHANISMS: tuple[str, ...] = ("recentered_clip", "difference_clip", "clip_and_blend")
"""The public names of the mechanisms that draw a token from such a score, the recommended one first."""
DEFAULT_BLEND_WEIGHT = 0.5
MEDIAN_TOKENS = 256
"""How many of the publicly likeliest candidates the public-weighted median is taken over."""
_WEIGHT_DIGITS = 2.0**40
# Weights of the median are whole numbers below this: sums of 256 of them are exact in any order.


class _LogitSum(Aggregation, is_base=True):
    """What the logit sums share: limits, grid and the public score."""

    __slots__ = ()
    needs_public: ClassVar[bool] = True
    clip: float
    num_slots: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "clip", check_real("clip", self.clip, low=1e-6, high=1e6))
        check_int("num_slots", self.num_slots, low=1, high=MAX_WIDTH)

    def _check_limit(self) -> None:
        """Refuses shares that the grid could not hold; call it last."""
        if self._limit < _LEAST_LIMIT:
            expected = f"a row's share of a score of at least {_LEAST_LIMIT}"
            raise fail("clip", expected, self._limit, "Raise clip or blend_weight, or lower num_slots.")

    @property
    def _limit(self) -> float:
        """Most that one row adds to a score, in magnitude."""
        return self.clip / self.num_slots

    @property
    @abstractmethod
    def _reach(self) -> float:
        """A power of two that no public score exceeds in magnitude."""

    @property
    def _step(self) -> float:
        """The public grid of rows and scores."""
        finest = math.ldexp(1.0, math.frexp(self._limit)[1] - _DIGITS)
        return max(finest, math.ldexp(self._reach, -_PUBLIC_DIGITS))

    @abstractmethod
    def _centers(self, rows: npt.NDArray[Any], tops: Floats, public: Floats) -> Floats:
        """Returns float64[n, 1]: what is taken off each row before it is clipped; `tops` are the rows' largest logits.

        A function of the row itself and of public numbers.
        """

    def _place(self, part: Floats, centers: Floats, public: Floats) -> None:
        """Moves some columns of finite rows in place to where they are clipped."""
        del public
        part -= centers

    @abstractmethod
    def _public_score(self, public: Floats) -> Floats:
        """Returns float64[d]: what is added to the rows' sum."""

    def sensitivity(self, *, row_shape: RowShape, adjacency: Adjacency) -> Sensitivity:
        """Returns a range of 4 times the most that a row adds, half of it for unit rows under add_remove; no L2."""
        changes = 2.0 if row_appears(row_shape, adjacency) else 4.0
        return Sensitivity(l2=None, range=changes * self._limit)

    @np.errstate(over="ignore", invalid="ignore")  # a row of another type may hold what no float64 does
    def bounded_rows(self, rows: npt.NDArray[Any], *, width: int, public: npt.NDArray[Any] | None = None) -> Floats:
        """Returns what each row adds, on the grid; a row with a NaN anywhere, which is one that failed, adds zeros."""
        given = real_rows(rows, width)
        logits = _public_logits(public, width)
        tops = given.max(axis=1, keepdims=True).astype(np.float64)  # [n, 1]; a NaN is the largest of all
        failed = np.isnan(tops[:, 0])
        centers = self._centers(given, np.clip(np.where(np.isnan(tops), 0.0, tops), -_HUGE, _HUGE), logits)
        most = self._limit / self._step  # in steps, exact
        shares = np.empty(given.shape)
        # A vocabulary is wide: some columns at a time stay in the processor's cache.
        for first in range(0, width, _COLUMNS):
            columns = slice(first, first + _COLUMNS)
            part = shares[:, columns]
            part[:] = given[:, columns]
            part[failed] = 0.0
            np.clip(part, -_HUGE, _HUGE, out=part)
            self._place(part, centers, logits[columns])
            # Divide each row, not the sum: what is added is then on the grid, and no share exceeds the limit.
            part *= most / self.clip
            np.clip(part, -most, most, out=part)
            np.trunc(part, out=part)
            part *= self._step
            part += 0.0  # no negative zeros
        shares[failed] = 0.0
        return shares

    def bound(
        self,
        rows: npt.NDArray[Any],
        *,
        row_shape: RowShape,
        adjacency: Adjacency,
        width: int,
        public: npt.NDArray[Any] | None = None,
    ) -> BoundedSum:
        """Adds the rows' shares up, and the public score to them; see `Aggregation.bound`.

        Args:
          rows: real[n, d] logits, each row up to a constant of its own; with slots exactly `num_slots` rows.
          row_shape: "slots" (n is public) or "units" (n is secret).
          adjacency: "add_remove" or "replace_one".
          width: d, public.
          public: real[d] logits of the public prompt, up to a constant; None: all equal. A NaN counts as -inf.

        Raises:
          ConfigurationError: as `Aggregation.bound`, or another number of slots.
        """
        if row_shape == "slots" and np.shape(rows)[:1] != (self.num_slots,):
            raise fail(
                "rows", f"num_slots={self.num_slots} rows", "another count", "Every slot has a row, filled or not."
            )
        sensitivity = self.sensitivity(row_shape=row_shape, adjacency=adjacency)
        total = np.add.reduce(self.bounded_rows(rows, width=width, public=public), axis=0)
        score = self._public_score(_public_logits(public, width))
        placed = np.rint(np.clip(score, -self._reach, self._reach) / self._step) * self._step
        return BoundedSum(total + placed, sensitivity, row_shape, adjacency)


@final
@dataclass(frozen=True, slots=True)
class ClippedLogitMean(_LogitSum):
    """Clip and blend: the mean of clipped logits over a public count, blended with the clipped public logits.

    score = blend_weight * mean(clip(z)) + (1 - blend_weight) * clip(u), with z a row's logits, u the public ones.
    Logits are known up to a constant only; `center` says which constant is taken off before they are clipped.

    Formal guarantees:
      - A row that changes moves the score by a range of at most 4 blend_weight clip / num_slots; one that appears or
        vanishes, by half of that. No L2 bound.
      - A row that failed (a NaN anywhere) and an absent unit row count zero.

    Args:
      clip: largest magnitude a logit may have, public.
      num_slots: what the sum is divided by: the number of slots, or a public expected number of unit rows.
      blend_weight: share of the private mean in the score, in (0, 1]; 1 ignores the public logits.
      center: "max" puts a row's largest logit at `clip`, so that a range of 2 clip below it survives whatever constant
        the engine's logits carry; "none" takes the engine's logits as they are.

    Raises:
      ConfigurationError: `clip` outside [1e-6, 1e6], `num_slots` < 1, another parameter out of range, or a row's share
        blend_weight clip / num_slots below 1e-8.

    Source: Bhusal et al. (2025), clip and blend; Amin et al. (2024), Private prediction for large-scale synthetic text
      generation, for the centring; docs/proofs/logit-sums.md.
    """

    clip: float
    num_slots: int
    blend_weight: float = 1.0
    center: str = "max"
    name: ClassVar[str] = "clipped_logit_mean"

    def __post_init__(self) -> None:
        _LogitSum.__post_init__(self)
        weight = check_real("blend_weight", self.blend_weight, low=0.0, high=1.0, low_open=True)
        object.__setattr__(self, "blend_weight", weight)
        check_choice("center", self.center, ("max", "none"))
        self._check_limit()

    @property
    def _limit(self) -> float:
        return self.blend_weight * self.clip / self.num_slots

    @property
    def _reach(self) -> float:
        return math.ldexp(1.0, math.frexp(self.clip)[1])

    def _centers(self, rows: npt.NDArray[Any], tops: Floats, public: Floats) -> Floats:
        del rows, public
        return tops

    def _place(self, part: Floats, centers: Floats, public: Floats) -> None:
        del public
        if self.center == "max":
            part -= centers
            part += self.clip

    def _public_score(self, public: Floats) -> Floats:
        shown = public[None].copy()
        self._place(shown, public.max(), public)
        score: Floats = (1.0 - self.blend_weight) * np.clip(shown[0], -self.clip, self.clip)
        return score


@final
@dataclass(frozen=True, slots=True)
class ClippedDifferenceMean(_LogitSum):
    """Difference clip: the public logits, plus the mean of clipped differences to them over a public count.

    score = u + mean(clip(z - u - m)), with z a row's logits, u the public ones, and m the row's own centre: 0, or the
    median of z - u weighted by the public distribution. The softmax does not feel a constant, so m costs nothing and
    puts the range of the clip where the public model has its mass, whatever constants z and u carry.

    Formal guarantees:
      - A row that changes moves the score by a range of at most 4 clip / num_slots; one that appears or vanishes, by
        half of that. No L2 bound.
      - A row that failed (a NaN anywhere) and an absent unit row count as the public prompt does: zero difference.

    Args:
      clip: largest magnitude a difference may have, public.
      num_slots: what the sum is divided by: the number of slots, or a public expected number of unit rows.
      center: "median" takes the public-weighted median off each difference, "none" nothing.

    Raises:
      ConfigurationError: `clip` outside [1e-6, 1e6], `num_slots` < 1, another `center`, or clip / num_slots below 1e-8.

    Source: InvisibleInk (2025), difference clipping; the re-centred form is ours; docs/proofs/logit-sums.md.
    """

    clip: float
    num_slots: int
    center: str = "median"
    name: ClassVar[str] = "clipped_difference_mean"

    def __post_init__(self) -> None:
        _LogitSum.__post_init__(self)
        check_choice("center", self.center, ("median", "none"))
        self._check_limit()

    @property
    def _reach(self) -> float:
        return _LOWEST

    def _centers(self, rows: npt.NDArray[Any], tops: Floats, public: Floats) -> Floats:
        if self.center == "none":
            return np.zeros_like(tops)
        likely = _likeliest(public)
        values = np.array(rows[:, likely], dtype=np.float64)  # [n, k]
        values[np.isnan(values)] = 0.0  # of a row that has failed
        return _weighted_median(np.clip(values, -_HUGE, _HUGE) - public[likely], public[likely])[:, None]

    def _place(self, part: Floats, centers: Floats, public: Floats) -> None:
        part -= public
        if self.center == "median":
            part -= centers

    def _public_score(self, public: Floats) -> Floats:
        score: Floats = public - public.max()
        return score


def _public_logits(public: npt.NDArray[Any] | None, width: int) -> Floats:
    """Returns float64[width]: public logits, at most 2^20 in magnitude and none further than 2^15 below the largest."""
    if public is None:
        return np.zeros(width)
    logits = matrix(np.asarray(public)[None], width)[0]
    logits[np.isnan(logits)] = -np.inf
    np.clip(logits, -_HUGE_PUBLIC, _HUGE_PUBLIC, out=logits)
    floored: Floats = np.maximum(logits, logits.max() - _LOWEST)
    return floored


def _weighted_median(differences: Floats, public: Floats) -> Floats:
    """Returns float64[n]: each row's lower median, weighted by the public distribution of its likeliest candidates."""
    likely = _likeliest(public)
    values = differences[:, likely]  # [n, k]
    # Whole numbers, one by one: no layout of memory can round one of them otherwise, so no row can feel another.
    top = float(public[likely].max())
    weights = np.array([math.floor(_WEIGHT_DIGITS * math.exp(u - top)) for u in public[likely].tolist()])  # [k]
    order = np.argsort(values, axis=1, kind="stable")
    below = np.cumsum(weights[order], axis=1)
    middle = (2 * below < weights.sum()).sum(axis=1)
    return np.take_along_axis(values, np.take_along_axis(order, middle[:, None], axis=1), axis=1)[:, 0]


def _likeliest(public: Floats) -> npt.NDArray[np.intp]:
    """Returns where the `MEDIAN_TOKENS` largest public logits are, the first of equals."""
    if public.size <= MEDIAN_TOKENS:
        return np.arange(public.size)
    least = np.partition(public, -MEDIAN_TOKENS)[-MEDIAN_TOKENS]
    above = (public > least).nonzero()[0]
    return np.concatenate([above, (public == least).nonzero()[0][: MEDIAN_TOKENS - above.size]])


def logit_sum(
    mechanism: str, *, clip: float, num_slots: int, blend_weight: float | None = None, center: str | None = None
) -> ClippedLogitMean | ClippedDifferenceMean:
    """Returns the sum behind a mechanism's public name; `blend_weight` and `center` are of "clip_and_blend" alone.

    Raises:
      ConfigurationError: another name, or a parameter out of range.
    """
    check_choice("mechanism", mechanism, LOGIT_MECHANISMS)
    if mechanism == "clip_and_blend":
        weight = DEFAULT_BLEND_WEIGHT if blend_weight is None else blend_weight
        return ClippedLogitMean(clip, num_slots, blend_weight=weight, center=center or "max")
    return ClippedDifferenceMean(clip, num_slots, center="median" if mechanism == "recentered_clip" else "none")
