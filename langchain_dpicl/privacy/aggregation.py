"""Rows to a bounded sum, and how far that sum can move. Knows no noise, no sampling, no model and no epsilon.

Sensitivities live here, in `logit_sums` and in `gradient_sums`, and nowhere else. Rows enter as whatever a model
returned and leave on a public grid of 32 binary digits, rounded towards zero, so that float64 adds them exactly: the
bounds below hold for the computed sums to the last bit, in any order of rows and any memory layout. Proof:
docs/proofs/aggregation.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, final

import numpy as np
import numpy.typing as npt

from langchain_dpicl.privacy._row_sums import MAX_WIDTH, _RowSum, matrix, non_negative, real_rows, row_appears
from langchain_dpicl.privacy._validate import Adjacency, RowShape, check_adjacency
from langchain_dpicl.privacy.bounded import GRID, BoundedSum, Floats, Sensitivity
from langchain_dpicl.privacy.gradient_sums import ClippedGradientSum
from langchain_dpicl.privacy.logit_sums import ClippedDifferenceMean, ClippedLogitMean

__all__ = [
    "AGGREGATIONS",
    "MAX_WIDTH",
    "Aggregation",
    "BoundedSum",
    "ClippedDifferenceMean",
    "ClippedGradientSum",
    "ClippedLogitMean",
    "KeywordSum",
    "MaxNormalizedSum",
    "ProbabilitySum",
    "Sensitivity",
    "UnitVectorSum",
    "VoteSum",
    "VoteVectorSum",
]


# Vectors in the simplex, or in it or zero: what a row that comes or goes moves, and one that takes another value.
_ONE_APPEARS = Sensitivity(l2=1.0, range=1.0, linf=1.0)
_ONE_CHANGES = Sensitivity(l2=math.sqrt(2.0), range=2.0, linf=1.0)

_PIECE = 4096
"""Rows of vote vectors that are bounded at a time."""


@final
@dataclass(frozen=True, slots=True)
class ProbabilitySum(_RowSum):
    """Sum of probability vectors.

    A row lies in {v >= 0, sum(v) <= 1}: coordinates are cut to [0, 1], then divided by their sum where it exceeds 1.

    Formal guarantees:
      - A row that changes moves the sum by at most sqrt(2) in L2, its coordinates by a range of at most 2.
      - A row that appears or vanishes moves it by at most 1 in L2 and by a range of at most 1.
      - Either moves no coordinate by more than 1, nor the largest one.

    >>> ProbabilitySum().sensitivity(row_shape="units", adjacency="add_remove")
    Sensitivity(l2=1.0, range=1.0, linf=1.0)

    Source: Tang et al. (2024), Privacy-Preserving In-Context Learning with Differentially Private Few-Shot Generation;
      docs/proofs/aggregation.md.
    """

    name: ClassVar[str] = "probability_sum"

    def sensitivity(self, *, row_shape: RowShape, adjacency: Adjacency) -> Sensitivity:
        """Returns L2 sqrt(2) and range 2, or 1 and 1 for unit rows under add_remove; 1 per coordinate."""
        return _ONE_APPEARS if row_appears(row_shape, adjacency) else _ONE_CHANGES

    def bounded_rows(self, rows: npt.NDArray[Any], *, width: int) -> Floats:
        """Returns rows in the sub-simplex, on the grid."""
        steps = np.floor(np.minimum(non_negative(matrix(rows, width)), 1.0) * GRID)
        # Sums of whole steps are exact, so no summation order can move another row; flooring keeps the sum <= 1.
        mass = np.maximum(steps.sum(axis=1, keepdims=True), GRID)  # [n, 1]
        bounded: Floats = np.floor(steps * GRID / mass) / GRID
        return bounded


@final
@dataclass(frozen=True, slots=True)
class VoteSum(_RowSum):
    """Vote histogram: each row votes for its largest coordinate (the first of equals); an all-zero row abstains.

    Formal guarantees:
      - As `ProbabilitySum`: sqrt(2) and 2 where a vote changes, 1 and 1 where a vote appears or vanishes; either
        moves the largest count by at most 1.

    Source: Papernot et al. (2018), Scalable Private Learning with PATE; docs/proofs/aggregation.md.
    """

    name: ClassVar[str] = "vote_sum"

    def sensitivity(self, *, row_shape: RowShape, adjacency: Adjacency) -> Sensitivity:
        """Returns L2 sqrt(2) and range 2, or 1 and 1 for unit rows under add_remove; 1 per coordinate."""
        return ProbabilitySum().sensitivity(row_shape=row_shape, adjacency=adjacency)

    def bounded_rows(self, rows: npt.NDArray[Any], *, width: int) -> Floats:
        """Returns one-hot rows, or zeros for an abstention."""
        weights = non_negative(matrix(rows, width))
        winner = weights.argmax(axis=1)[:, None]  # [n, 1]; where a row abstains its weight is 0
        votes: Floats = ((np.arange(width) == winner) & (weights > 0)).astype(np.float64)
        return votes


@final
@dataclass(frozen=True, slots=True)
class MaxNormalizedSum(_RowSum):
    """Sum of rows divided by their own maximum, so that each row's best coordinate counts one.

    Formal guarantees:
      - A row that changes moves each coordinate by at most 1: a range of 2. One that appears or vanishes moves all
        coordinates the same way by at most 1: a range of 1.
      - No L2 bound (it would grow with the width), so the Gaussian mechanism refuses this sum.

    Source: Tang et al. (2024), report-noisy-max variant; docs/proofs/aggregation.md.
    """

    name: ClassVar[str] = "max_normalized_sum"

    def sensitivity(self, *, row_shape: RowShape, adjacency: Adjacency) -> Sensitivity:
        """Returns range 2, or 1 for unit rows under add_remove; nothing in L2."""
        return Sensitivity(l2=None, range=1.0 if row_appears(row_shape, adjacency) else 2.0)

    def bounded_rows(self, rows: npt.NDArray[Any], *, width: int) -> Floats:
        """Returns rows in [0, 1]^d, on the grid."""
        weights = non_negative(matrix(rows, width))
        peak = weights.max(axis=1, keepdims=True)  # [n, 1]
        bounded: Floats = np.floor(weights / np.where(peak > 0, peak, 1.0) * GRID) / GRID
        return bounded


@final
@dataclass(frozen=True, slots=True)
class UnitVectorSum(_RowSum):
    """Sum of rows divided by their own L2 length, for instance of embeddings of answers.

    A row is cut to a public number of digits below its largest coordinate, so that its length is that of whole
    numbers and exact. A row of zeros, or with a NaN or an infinity anywhere, counts zero.

    Formal guarantees:
      - A row lies in the L2 unit ball exactly: rows of any finite size are divided, none overflows.
      - A row that changes moves the sum by at most 2 in L2; one that appears or vanishes, by at most 1.
      - No range bound is declared, so mechanisms that choose among coordinates refuse this sum.

    Source: Wu et al. (2024), Privacy-Preserving In-Context Learning for Large Language Models, embedding-space
      aggregation (whose published code takes 1 where a row is replaced; opposite rows differ by 2);
      docs/proofs/aggregation.md.
    """

    name: ClassVar[str] = "unit_vector_sum"

    def sensitivity(self, *, row_shape: RowShape, adjacency: Adjacency) -> Sensitivity:
        """Returns L2 2, or 1 for unit rows under add_remove; no range."""
        return Sensitivity(l2=1.0 if row_appears(row_shape, adjacency) else 2.0, range=None)

    def bounded_rows(self, rows: npt.NDArray[Any], *, width: int) -> Floats:
        """Returns rows in the unit ball, on the grid."""
        vectors = matrix(rows, width)
        vectors[~np.isfinite(vectors).all(axis=1)] = 0.0
        exponent = np.frexp(np.abs(vectors).max(axis=1, keepdims=True))[1]  # [n, 1]: peak in [2^(e-1), 2^e)
        digits = (62 - (width - 1).bit_length()) // 2  # squares of so many digits add up below 2^62
        whole = np.trunc(np.ldexp(vectors, digits - exponent))
        square = np.square(whole.astype(np.int64)).sum(axis=1, keepdims=True)  # [n, 1], exact in any order
        # Rounded up by more than the conversion, the root and the quotient can round it down.
        length = np.sqrt(np.maximum(square, 1).astype(np.float64)) * (1.0 + 2.0**-50)
        bounded: Floats = np.trunc(whole / length * GRID) / GRID + 0.0
        return bounded


@final
@dataclass(frozen=True, slots=True)
class VoteVectorSum(_RowSum):
    """Sum of vote vectors divided by their own L2 length: a unit may vote several times, and has one length.

    Numbers that cannot be votes (NaN, infinities, negatives) count zero, the rest is divided as in `UnitVectorSum`. A
    row of zeros abstains. Rows are added in pieces, so a million narrow rows of small numbers need no second copy.

    Formal guarantees:
      - A row has no negative coordinate and lies in the L2 unit ball exactly, however many votes it holds.
      - A row that changes moves the sum by at most sqrt(2) in L2 and by a range of at most 2; one that appears or
        vanishes, by at most 1 in each. Either moves no coordinate by more than 1, nor the largest one.

    >>> VoteVectorSum().bounded_rows([[3, 4, 0]], width=3).round(3).tolist()
    [[0.6, 0.8, 0.0]]

    Source: Xie et al. (2024), Differentially Private Synthetic Data via Foundation Model APIs 2: Text;
      docs/proofs/aggregation.md.
    """

    name: ClassVar[str] = "vote_vector_sum"

    def sensitivity(self, *, row_shape: RowShape, adjacency: Adjacency) -> Sensitivity:
        """Returns L2 sqrt(2) and range 2, or 1 and 1 for unit rows under add_remove; 1 per coordinate."""
        return _ONE_APPEARS if row_appears(row_shape, adjacency) else _ONE_CHANGES

    def bounded_rows(self, rows: npt.NDArray[Any], *, width: int) -> Floats:
        """Returns rows in the non-negative part of the unit ball, on the grid."""
        return UnitVectorSum().bounded_rows(non_negative(matrix(rows, width)), width=width)

    def bound(self, rows: npt.NDArray[Any], *, row_shape: RowShape, adjacency: Adjacency, width: int) -> BoundedSum:
        """Adds rows up, each bounded by itself first, some at a time; whole steps add exactly in any pieces."""
        every, total = real_rows(rows, width), np.zeros(width)
        for first in range(0, len(every), _PIECE):
            total += np.add.reduce(self.bounded_rows(every[first : first + _PIECE], width=width), axis=0)
        return BoundedSum(
            total, self.sensitivity(row_shape=row_shape, adjacency=adjacency), row_shape, check_adjacency(adjacency)
        )


@final
@dataclass(frozen=True, slots=True)
class KeywordSum(_RowSum):
    """Counts, per public keyword, of the rows that hold it: an entry above zero counts one, anything else nothing.

    Formal guarantees:
      - The counts are whole numbers.
      - A row that changes moves each count by at most 1 in either direction: a range of 2. One that appears or
        vanishes moves all counts the same way by at most 1: a range of 1.
      - No L2 bound (it would grow with the number of keywords), so the Gaussian mechanism refuses this sum.

    Source: Wu et al. (2024), Privacy-Preserving In-Context Learning for Large Language Models, keyword-space
      aggregation; docs/proofs/aggregation.md.
    """

    name: ClassVar[str] = "keyword_sum"

    def sensitivity(self, *, row_shape: RowShape, adjacency: Adjacency) -> Sensitivity:
        """Returns range 2, or 1 for unit rows under add_remove; nothing in L2."""
        return Sensitivity(l2=None, range=1.0 if row_appears(row_shape, adjacency) else 2.0)

    def bounded_rows(self, rows: npt.NDArray[Any], *, width: int) -> Floats:
        """Returns rows of zeros and ones."""
        return (matrix(rows, width) > 0).astype(np.float64)


Aggregation: TypeAlias = (
    ProbabilitySum
    | VoteSum
    | MaxNormalizedSum
    | ClippedLogitMean
    | ClippedDifferenceMean
    | UnitVectorSum
    | KeywordSum
    | VoteVectorSum
    | ClippedGradientSum
)
AGGREGATIONS: dict[str, type[Aggregation]] = {
    cls.name: cls
    for cls in (
        ProbabilitySum,
        VoteSum,
        MaxNormalizedSum,
        ClippedLogitMean,
        ClippedDifferenceMean,
        UnitVectorSum,
        KeywordSum,
        VoteVectorSum,
        ClippedGradientSum,
    )
}
"""The closed list, by the name that reports show."""
