"""Sums of rows that are divided by their own maximum or by their own L2 length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, final, runtime_checkable

import numpy as np
import numpy.typing as npt

from langchain_dpicl.privacy._validate import Adjacency, RowShape, check_adjacency, check_int
from langchain_dpicl.privacy.mechanisms.bounded import (
    GRID,
    MAX_WIDTH,
    Aggregation,
    BoundedSum,
    Floats,
    ProbabilitySum,
    Sensitivity,
    matrix,
    non_negative,
    real_rows,
    row_appears,
)

_CELLS = 1 << 20
"""Numbers of vote vectors that are bounded at a time."""


@runtime_checkable
class SlicedRows(Protocol):
    """Rows that exist some at a time: a slice of them is a matrix."""

    def __len__(self) -> int:
        """Returns how many rows there are."""

    def __getitem__(self, rows: slice, /) -> npt.NDArray[Any]:
        """Returns real[n, d]: some of the rows."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""


@final
@dataclass(frozen=True, slots=True)
class UnitVectorSum(Aggregation):
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
class VoteVectorSum(Aggregation):
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
        return ProbabilitySum().sensitivity(row_shape=row_shape, adjacency=adjacency)

    def bounded_rows(self, rows: npt.NDArray[Any], *, width: int) -> Floats:
        """Returns rows in the non-negative part of the unit ball, on the grid."""
        return UnitVectorSum().bounded_rows(non_negative(matrix(rows, width)), width=width)

    def bound(
        self,
        rows: npt.NDArray[Any] | SlicedRows,
        *,
        row_shape: RowShape,
        adjacency: Adjacency,
        width: int,
        public: npt.NDArray[Any] | None = None,
    ) -> BoundedSum:
        """Adds rows up, each bounded by itself first, some at a time; whole steps add exactly in any pieces.

        Args:
          rows: real[n, d], or `SlicedRows` of that shape.
          row_shape: "slots" or "units".
          adjacency: "add_remove" or "replace_one".
          width: d, public.
          public: not read.

        Raises:
          ConfigurationError: see `Aggregation.bound`.
        """
        del public
        check_int("width", width, low=1, high=MAX_WIDTH)  # also of no rows: whether there is one is secret
        every: Any = rows
        if isinstance(rows, np.ndarray) or not isinstance(rows, SlicedRows):
            every = real_rows(every, width)
        total = np.zeros(width)
        # Cells of a piece, not rows: candidates may be many.
        step = max(1, _CELLS // width)
        for first in range(0, len(every), step):
            total += np.add.reduce(self.bounded_rows(every[first : first + step], width=width), axis=0)
        return BoundedSum(
            total, self.sensitivity(row_shape=row_shape, adjacency=adjacency), row_shape, check_adjacency(adjacency)
        )


@final
@dataclass(frozen=True, slots=True)
class MaxNormalizedSum(Aggregation):
    """Sum of rows divided by their own maximum, so that each row's best coordinate counts one.

    Formal guarantees:
      - A row that changes moves each coordinate by at most 1: a range of 2. One that appears or vanishes moves all
        coordinates the same way by at most 1: a range of 1.
      - No L2 bound (it would grow with the width), so the Gaussian mechanism refuses this sum.

    Source: Tang et al. (2024), report-noisy-max variant; docs/proofs/aggregation.md.
    """

    name: ClassVar[str] = "max_normalized_sum"
    takes_constants: ClassVar[bool] = True

    def sensitivity(self, *, row_shape: RowShape, adjacency: Adjacency) -> Sensitivity:
        """Returns range 2, or 1 for unit rows under add_remove; nothing in L2."""
        return Sensitivity(l2=None, range=1.0 if row_appears(row_shape, adjacency) else 2.0)

    def bounded_rows(self, rows: npt.NDArray[Any], *, width: int) -> Floats:
        """Returns rows in [0, 1]^d, on the grid."""
        weights = non_negative(matrix(rows, width))
        peak = weights.max(axis=1, keepdims=True)  # [n, 1]
        return np.floor(weights / np.where(peak > 0, peak, 1.0) * GRID) / GRID
