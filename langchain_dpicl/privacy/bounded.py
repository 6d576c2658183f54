"""What a sum of rows carries: a hidden value and a public bound. Knows no rows, no noise and no epsilon.

`aggregation` makes these, `mechanisms` reads them; the two know each other only through this module.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from langchain_dpicl.exceptions import PrivateAccessError, SensitivityError
from langchain_dpicl.privacy._validate import Adjacency, RowShape

Floats: TypeAlias = npt.NDArray[np.float64]
Norm: TypeAlias = Literal["l2", "range", "linf"]

GRID = 2.0**32
"""Steps per unit of the public grid on which votes, probabilities, weights and constants lie."""
LARGEST = 2.0**20
"""Coordinates up to this magnitude, on that grid, add and subtract exactly; up to 2^20 rows stay within it."""


class Closed:
    """Base of the classes that can break the promise: nobody derives from a proved class."""

    __slots__ = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in cls.__bases__:
            if issubclass(base, Closed) and base is not Closed and not base.__name__.startswith("_"):
                raise TypeError(
                    f"{base.__name__} is closed: its proof covers exactly this code. "
                    "Add a sibling class with its own page in docs/proofs and run tests/contracts on it."
                )


@dataclass(frozen=True, slots=True)
class Sensitivity(Closed):
    """How far a sum moves between neighbours, per norm; None where nothing is proved.

    Attributes:
      l2: Euclidean length of the change.
      range: length of an interval that holds 0 and every coordinate of the change: at least the largest minus the
        smallest coordinate, which is what a choice among the coordinates, and among constants beside them, can feel.
      linf: the most that any one coordinate moves, and with it the largest one: what a threshold on it can feel.
    """

    l2: float | None
    range: float | None
    linf: float | None = None

    def __post_init__(self) -> None:
        for name, bound in (("l2", self.l2), ("range", self.range), ("linf", self.linf)):
            if bound is not None and not (math.isfinite(bound) and bound > 0):
                raise SensitivityError(f"Sensitivity: expected {name} finite and > 0, or None; found {bound!r}.")

    def require(self, norm: Norm) -> float:
        """Returns the bound in `norm`.

        Raises:
          SensitivityError: nothing is proved in that norm.
        """
        bound: float | None = {"l2": self.l2, "range": self.range, "linf": self.linf}[norm]
        if bound is None:
            other = "gumbel" if norm == "l2" else "gaussian"
            raise SensitivityError(
                f"sensitivity: expected a bound in {norm!r}, found none for this aggregation. "
                f"Choose mechanism={other!r}, or an aggregation that is bounded in {norm!r}."
            )
        return bound


@dataclass(frozen=True, slots=True, eq=False)
class BoundedSum(Closed):
    """A private sum together with the bound that was proved for it.

    Formal guarantees:
      - Between neighbours under `adjacency`, `value` changes by at most `sensitivity`, in each norm that is not None.
      - `value` is finite, read-only, in no repr, and refuses to be copied or pickled.

    Attributes:
      value: float64[d], private until a mechanism has released it.
      sensitivity: the public bound.
      row_shape: "slots" or "units".
      adjacency: the relation under which the bound holds.
    """

    value: Floats = field(repr=False)
    sensitivity: Sensitivity
    row_shape: RowShape
    adjacency: Adjacency

    def __post_init__(self) -> None:
        value = np.array(self.value, dtype=np.float64)
        if value.ndim != 1 or value.size == 0:
            raise SensitivityError(f"BoundedSum: expected float64[d] with d >= 1, found {value.ndim} dimensions.")
        if not np.isfinite(value).all():
            raise SensitivityError("BoundedSum: expected finite coordinates; build sums with `aggregation` only.")
        value.flags.writeable = False
        object.__setattr__(self, "value", value)

    def with_constants(self, constants: tuple[float, ...]) -> BoundedSum:
        """Returns the sum with public constants as further coordinates, for instance an "abstain" candidate.

        Formal guarantees:
          - The bound stays: a constant does not move, and 0 lies in the interval that `range` measures.

        Args:
          constants: public, multiples of 2^-32, at most 2^20 in magnitude. `ReleasePlan.bound` is the door: it rounds
            and checks them, and refuses sums on another grid, from which differences would not be exact.

        Raises:
          SensitivityError: a constant off the grid, too large or not finite.

        Source: docs/proofs/aggregation.md, section "Constants".
        """
        if not constants:
            return self
        added = np.asarray(constants, dtype=np.float64)  # [c]
        if not (np.abs(added) <= LARGEST).all() or (added * GRID % 1.0 != 0).any():
            raise SensitivityError("constants: expected multiples of 2^-32, at most 2^20 in magnitude.")
        return BoundedSum(np.concatenate([self.value, added]), self.sensitivity, self.row_shape, self.adjacency)

    def __reduce__(self) -> NoReturn:
        raise PrivateAccessError("BoundedSum holds private data: it cannot be copied, pickled or sent elsewhere.")
