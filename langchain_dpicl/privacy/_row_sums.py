"""The walk that all aggregations share: clean each row by itself, then add. Knows no norm and no sensitivity.

`aggregation`, `logit_sums` and `gradient_sums` hold the closed classes that derive from it, and their bounds.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from langchain_dpicl.privacy._validate import (
    ROW_SHAPES,
    Adjacency,
    RowShape,
    check_adjacency,
    check_choice,
    check_int,
    fail,
)
from langchain_dpicl.privacy.bounded import BoundedSum, Closed, Floats, Sensitivity

MAX_WIDTH = 2**20
"""Most columns a row may have: 2^20 coordinates of 32 binary digits still add exactly in float64."""


def row_appears(row_shape: RowShape, adjacency: Adjacency) -> bool:
    """Returns whether neighbours differ by one row that is there or not; else one row takes another value."""
    check_choice("row_shape", row_shape, ROW_SHAPES)
    return row_shape == "units" and check_adjacency(adjacency) == "add_remove"


def real_rows(rows: npt.NDArray[Any], width: int, *, high: int = MAX_WIDTH) -> npt.NDArray[Any]:
    """Returns rows real[n, width] as they are; faults found here are the engine's, and the same for every data set."""
    check_int("width", width, low=1, high=high)
    array = np.asarray(rows)
    if array.ndim >= 1 and array.shape[0] == 0:
        return np.zeros((0, width))  # the number of rows is secret: no shape of "none" is a fault
    if array.ndim != 2 or array.shape[1] != width or array.dtype.kind not in "fiub":
        found = f"{array.ndim} dimensions, width {array.shape[-1] if array.ndim else 0}, dtype {array.dtype.kind!r}"
        raise fail("rows", f"a real array of shape (n, {width})", found, "The engine must fill every row.")
    return array


def matrix(rows: npt.NDArray[Any], width: int) -> Floats:
    """Returns a float64[n, width] copy of rows; see `real_rows`."""
    array = real_rows(rows, width)
    if array.dtype == np.float64:
        return array.copy(order="C")
    with np.errstate(over="ignore", invalid="ignore"):
        return np.array(array, dtype=np.float64, order="C")


def non_negative(weights: Floats) -> Floats:
    """Returns the matrix with zero for what cannot be a weight: NaN, infinities, negatives."""
    return np.where((weights > 0) & (weights < np.inf), weights, 0.0)


class _RowSum(Closed):
    """The shared walk. Only closed classes derive from it; see the module."""

    __slots__ = ()
    name: ClassVar[str]
    needs_public: ClassVar[bool] = False
    """Whether the public logits belong to the sum (see `logit_sums`)."""

    @abstractmethod
    def sensitivity(self, *, row_shape: RowShape, adjacency: Adjacency) -> Sensitivity:
        """Returns the proved bound; see the class."""

    @abstractmethod
    def bounded_rows(self, rows: npt.NDArray[Any], *, width: int) -> Floats:
        """Returns float64[n, width]: row i is a function of row i of `rows` alone, inside the class's row domain."""

    def bound(self, rows: npt.NDArray[Any], *, row_shape: RowShape, adjacency: Adjacency, width: int) -> BoundedSum:
        """Adds rows up, each bounded by itself first.

        Formal guarantees:
          - Total in the numbers: NaN, infinities, negatives and values of any size give a bounded row, never an error.
          - No rows at all give zeros; nothing depends on a realised count.
          - The sum moves by at most `sensitivity(...)` between neighbours, exactly, as computed in float64, for up to
            2^20 rows.

        Args:
          rows: real[n, d] private rows, one per slot or per included unit; n may be 0.
          row_shape: "slots" (n is public) or "units" (n is secret).
          adjacency: "add_remove" or "replace_one".
          width: d, public.

        Returns:
          float64[d] sum with its bound.

        Raises:
          ConfigurationError: a wrong width, a non-numeric or non-2-d array, an unknown shape or adjacency.
        """
        sensitivity = self.sensitivity(row_shape=row_shape, adjacency=adjacency)
        total = np.add.reduce(self.bounded_rows(rows, width=width), axis=0)
        return BoundedSum(total, sensitivity, row_shape, adjacency)

    def to_dict(self) -> dict[str, Any]:
        """Returns the public parameters, for reports."""
        return {"name": self.name}
