"""Sums of votes and of probability vectors.

Rows leave on a public grid of 32 binary digits, rounded towards zero, so that float64 adds them exactly in any order.
Proof: docs/proofs/aggregation.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np
import numpy.typing as npt

from langchain_dpicl.privacy._validate import Adjacency, RowShape
from langchain_dpicl.privacy.mechanisms.bounded import (
    GRID,
    Aggregation,
    Floats,
    Sensitivity,
    matrix,
    non_negative,
    row_appears,
)

# Vectors in the simplex, or in it or zero: what a row that comes or goes moves, and one that takes another value.
_ONE_APPEARS = Sensitivity(l2=1.0, range=1.0, linf=1.0)
_ONE_CHANGES = Sensitivity(l2=math.sqrt(2.0), range=2.0, linf=1.0)


@final
@dataclass(frozen=True, slots=True)
class ProbabilitySum(Aggregation):
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
    takes_constants: ClassVar[bool] = True

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
class VoteSum(Aggregation):
    """Vote histogram: each row votes for its largest coordinate (the first of equals); an all-zero row abstains.

    Formal guarantees:
      - As `ProbabilitySum`: sqrt(2) and 2 where a vote changes, 1 and 1 where a vote appears or vanishes; either
        moves the largest count by at most 1.

    Source: Papernot et al. (2018), Scalable Private Learning with PATE; docs/proofs/aggregation.md.
    """

    name: ClassVar[str] = "vote_sum"
    takes_constants: ClassVar[bool] = True

    def sensitivity(self, *, row_shape: RowShape, adjacency: Adjacency) -> Sensitivity:
        """Returns L2 sqrt(2) and range 2, or 1 and 1 for unit rows under add_remove; 1 per coordinate."""
        return ProbabilitySum().sensitivity(row_shape=row_shape, adjacency=adjacency)

    def bounded_rows(self, rows: npt.NDArray[Any], *, width: int) -> Floats:
        """Returns one-hot rows, or zeros for an abstention."""
        weights = non_negative(matrix(rows, width))
        winner = weights.argmax(axis=1)[:, None]  # [n, 1]; where a row abstains its weight is 0
        votes: Floats = ((np.arange(width) == winner) & (weights > 0)).astype(np.float64)
        return votes
