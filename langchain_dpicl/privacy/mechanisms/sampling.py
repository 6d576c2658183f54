"""Draws which units stand in which row, by secret coins, and prices what the draw amplifies.

A draw never looks at a unit, only at how many there are; that number is secret under add_remove, so no error and no
public shape depends on it. Proof: docs/proofs/poisson-slots.md.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, final

from langchain_dpicl.privacy._validate import RowShape, check_int, check_real
from langchain_dpicl.privacy.accounting.events import Event, SubsampledEvent
from langchain_dpicl.privacy.mechanisms.bounded import ClosedClass
from langchain_dpicl.privacy.mechanisms.randomness import SecureRandom

Sample: TypeAlias = tuple[tuple[int, ...], ...]
"""One inner tuple of unit positions per row."""

BOTH: frozenset[str] = frozenset({"add_remove", "replace_one"})


class Sampler(ClosedClass, is_base=True):
    """Base of the samplers.

    Attributes:
      name: public name.
      row_shape: "slots" (a fixed, public number of rows; a unit less or more, coins kept, changes the row of one place
        and leaves the others where they stand) or "units".
      adjacencies: neighbouring relations that it is proved under.
      is_batched: whether a draw is read batch by batch (see `random_allocation`).
    """

    __slots__ = ()
    name: ClassVar[str]
    row_shape: ClassVar[RowShape]
    adjacencies: ClassVar[frozenset[str]]
    is_batched: ClassVar[bool] = False

    if TYPE_CHECKING:  # fields of some samplers, properties or constants of others, or not there

        @property
        def num_slots(self) -> int:
            """Rows of a draw, or of a batch, where rows are slots."""

        @property
        def shots_per_slot(self) -> int:
            """Most units in a row, where rows are slots."""

        @property
        def sampling_rate(self) -> float:
            """Probability that a unit is in a draw, as it is priced."""

        @property
        def num_rows(self) -> int | None:
            """Number of rows of every draw, public; None where it is secret."""

    @abstractmethod
    def draw(self, num_units: int, *, rng: SecureRandom) -> Sample:
        """Draws a fresh secret sample of units 0 .. num_units - 1."""

    @abstractmethod
    def amplify(self, event: Event) -> Event:
        """Returns the event of `event` run on one secret draw."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Returns the public parameters, for reports."""


def assign(included: Sequence[int], slots: Sequence[int], *, num_slots: int, shots_per_slot: int) -> Sample:
    """Puts each included unit into its own slot; a full slot turns later units away. Pure: all coins are arguments.

    Formal guarantees:
      - Striking one unit (and its slot) out of the arguments changes at most one inner tuple.
      - Where `included` is in random order, what stays in an over-full slot is a uniform choice among its units.

    Args:
      included: distinct unit positions, in order of priority.
      slots: for each included unit, its slot in 0 .. num_slots - 1.
      num_slots: length of the result, public.
      shots_per_slot: most units per slot, public.
    """
    rows: list[list[int]] = [[] for _ in range(num_slots)]
    for unit, slot in zip(included, slots, strict=True):
        if len(rows[slot]) < shots_per_slot:
            rows[slot].append(unit)
    return tuple(tuple(row) for row in rows)


def poisson(num_units: int, sampling_rate: float, rng: SecureRandom) -> list[int]:
    """Returns a Poisson sample in random order: a binomial size, then a uniform selection of that size."""
    size = rng.binomial(num_units, sampling_rate)
    units: list[int] = rng.choice_without_replacement(num_units, size).tolist()
    return units


def check_rate(value: float) -> float:
    """Returns a sampling rate in (0, 1], or refuses it."""
    return check_real("sampling_rate", value, low=0.0, high=1.0, low_open=True)


def amplified(event: Event, sampling_rate: float) -> Event:
    """Returns the event of `event` on one secret sample."""
    return event if sampling_rate == 1.0 else SubsampledEvent(event, sampling_rate)


@final
@dataclass(frozen=True, slots=True)
class PoissonSlots(Sampler):
    """Each unit joins with probability `sampling_rate`, in a uniformly random one of `num_slots` slots.

    Formal guarantees:
      - Units are independent of each other; adding, removing or replacing one, with the coins of the others kept,
        changes at most one slot. An over-full slot keeps `shots_per_slot` of its units, chosen uniformly.
      - There are always `num_slots` rows, some possibly empty, for every number of units.
      - `amplify(event)` prices a block of releases on one draw, under either adjacency.

    Args:
      sampling_rate: probability in (0, 1] that a unit is included.
      num_slots: number of rows, public.
      shots_per_slot: most units in a row, public.

    Raises:
      ConfigurationError: a parameter out of range.

    >>> from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
    >>> sample = PoissonSlots(0.5, num_slots=3, shots_per_slot=2).draw(10, rng=SYSTEM_RANDOM)
    >>> len(sample), max(len(row) for row in sample) <= 2
    (3, True)

    Source: Balle, Barthe, Gaboardi (2018), Poisson amplification; docs/proofs/poisson-slots.md.
    """

    sampling_rate: float
    num_slots: int
    shots_per_slot: int
    name: ClassVar[str] = "poisson_slots"
    row_shape: ClassVar[RowShape] = "slots"
    adjacencies: ClassVar[frozenset[str]] = BOTH

    def __post_init__(self) -> None:
        object.__setattr__(self, "sampling_rate", check_rate(self.sampling_rate))
        check_int("num_slots", self.num_slots, low=1)
        check_int("shots_per_slot", self.shots_per_slot, low=1)

    @property
    def num_rows(self) -> int:
        """Number of rows of every draw, public."""
        return self.num_slots

    def draw(self, num_units: int, *, rng: SecureRandom) -> Sample:
        """Draws a fresh secret sample; time and entropy grow with the units drawn, not with `num_units`.

        Args:
          num_units: how many units there are (private); may be 0.
          rng: source of coins.
        """
        included = poisson(num_units, self.sampling_rate, rng)
        slots = rng.integers(self.num_slots, len(included)).tolist()
        return assign(included, slots, num_slots=self.num_slots, shots_per_slot=self.shots_per_slot)

    def amplify(self, event: Event) -> Event:
        """Returns the event of `event` run on one secret draw."""
        return amplified(event, self.sampling_rate)

    def to_dict(self) -> dict[str, Any]:
        """Returns the public parameters, for reports."""
        return {
            "name": self.name,
            "sampling_rate": self.sampling_rate,
            "num_slots": self.num_slots,
            "shots_per_slot": self.shots_per_slot,
        }


@final
@dataclass(frozen=True, slots=True)
class PoissonUnits(Sampler):
    """Each unit is a row of its own with probability `sampling_rate`, independently.

    Formal guarantees:
      - A unit never appears twice; with the coins of the others kept, adding or removing one adds or removes one row.
      - The number of rows is secret (`num_rows` is None); a sum over the rows must be scaled by public numbers only.
      - `amplify(event)` prices a block of releases on one draw, under either adjacency.

    Args:
      sampling_rate: probability in (0, 1] that a unit is included.

    Raises:
      ConfigurationError: `sampling_rate` out of range.

    Source: Balle, Barthe, Gaboardi (2018), Poisson amplification; docs/proofs/poisson-slots.md.
    """

    sampling_rate: float
    name: ClassVar[str] = "poisson_units"
    row_shape: ClassVar[RowShape] = "units"
    adjacencies: ClassVar[frozenset[str]] = BOTH
    num_rows: ClassVar[None] = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sampling_rate", check_rate(self.sampling_rate))

    def draw(self, num_units: int, *, rng: SecureRandom) -> Sample:
        """Draws a fresh secret sample of one-unit rows in random order; see `PoissonSlots.draw`."""
        return tuple([(unit,) for unit in poisson(num_units, self.sampling_rate, rng)])

    def amplify(self, event: Event) -> Event:
        """Returns the event of `event` run on one secret draw."""
        return amplified(event, self.sampling_rate)

    def to_dict(self) -> dict[str, Any]:
        """Returns the public parameters, for reports."""
        return {"name": self.name, "sampling_rate": self.sampling_rate}
