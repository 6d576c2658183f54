"""A sum of rows that are divided by their own maximum."""

from __future__ import annotations

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
        bounded: Floats = np.floor(weights / np.where(peak > 0, peak, 1.0) * GRID) / GRID
        return bounded
