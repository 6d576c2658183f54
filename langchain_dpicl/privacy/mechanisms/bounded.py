"""Bounds each private row by itself, adds the rows up (votes, probabilities), and states how far the sum can move.

Rows leave on a public grid of 32 binary digits, rounded towards zero, so that float64 adds them exactly in any order.
Proof: docs/proofs/aggregation.md.
"""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias, final

import numpy as np
import numpy.typing as npt

from langchain_dpicl._opaque import Opaque
from langchain_dpicl.exceptions import SensitivityError
from langchain_dpicl.privacy._validate import (
    ROW_SHAPES,
    Adjacency,
    RowShape,
    check_adjacency,
    check_choice,
    check_int,
    fail,
)
from langchain_dpicl.privacy.accounting.events import Event

Floats: TypeAlias = npt.NDArray[np.float64]
Norm: TypeAlias = Literal["l2", "range", "linf"]

GRID = 2.0**32
"""Steps per unit of the public grid on which votes, probabilities, weights and constants lie."""
LARGEST = 2.0**20
"""Coordinates up to this magnitude, on that grid, add and subtract exactly; up to 2^20 rows stay within it."""
MAX_WIDTH = 2**20
"""Most columns a row may have: 2^20 coordinates of 32 binary digits still add exactly in float64."""


class ClosedClass:
    """Base of the classes that can break the promise: nobody derives from a proved class.

    A base of a family (`Sampler`, `Aggregation`, `Mechanism`, ...) says so with `is_base=True`. Anybody may derive from
    a base, but a plan accepts none of that: it compares exact types with the lists in `release_plan` and `registry`.
    """

    __slots__ = ()
    _is_base: ClassVar[bool] = True

    def __init_subclass__(cls, *, is_base: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in cls.__bases__:
            if issubclass(base, ClosedClass) and not base._is_base:  # noqa: SLF001 - its own
                raise TypeError(
                    f"{base.__name__} is closed: its proof covers exactly this code. "
                    "Add a sibling class with its own page in docs/proofs and run tests/contracts on it."
                )
        cls._is_base = is_base


class NamedPart(ClosedClass, is_base=True):
    """Base of the parts of a release, which are dataclasses of public parameters.

    Attributes:
      name: public name of the class.
    """

    __slots__ = ()
    name: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """Returns the name and the public parameters, for reports."""
        part: Any = self
        return {"name": self.name, **dataclasses.asdict(part)}


@dataclass(frozen=True, slots=True)
class Sensitivity(ClosedClass):
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
class BoundedSum(Opaque, ClosedClass):
    """A private sum together with the bound that was proved for it.

    Formal guarantees:
      - Between neighbours under `adjacency`, `value` changes by at most `sensitivity`, in each norm that is not None.
      - `value` is finite, read-only, in no repr, and neither copied nor pickled.

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


class Aggregation(NamedPart, is_base=True):
    """Base of the sums: bounds each row by itself, then adds.

    Attributes:
      needs_public: whether the public logits belong to the sum (see `logit_sums`).
      takes_constants: whether constants may stand beside the coordinates: they lie on the same grid and compare.
    """

    __slots__ = ()
    needs_public: ClassVar[bool] = False
    takes_constants: ClassVar[bool] = False

    @abstractmethod
    def sensitivity(self, *, row_shape: RowShape, adjacency: Adjacency) -> Sensitivity:
        """Returns the proved bound; see the class."""

    @abstractmethod
    def bounded_rows(self, rows: npt.NDArray[Any], *, width: int) -> Floats:
        """Returns float64[n, width]: row i is a function of row i of `rows` alone, inside the class's row domain."""

    def bound(
        self,
        rows: npt.NDArray[Any],
        *,
        row_shape: RowShape,
        adjacency: Adjacency,
        width: int,
        public: npt.NDArray[Any] | None = None,
    ) -> BoundedSum:
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
          public: real[d] public logits; read only by sums that need them.

        Returns:
          float64[d] sum with its bound.

        Raises:
          ConfigurationError: a wrong width, a non-numeric or non-2-d array, an unknown shape or adjacency.
        """
        del public
        sensitivity = self.sensitivity(row_shape=row_shape, adjacency=adjacency)
        total = np.add.reduce(self.bounded_rows(rows, width=width), axis=0)
        return BoundedSum(total, sensitivity, row_shape, adjacency)

    def sampled_event(self, noise: Event, sampling_rate: float, adjacency: Adjacency) -> Event | None:
        """Returns a tighter event than the amplified `noise` for one release on a Poisson sample, or None."""
        del noise, sampling_rate, adjacency
        return None


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
