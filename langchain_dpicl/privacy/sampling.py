"""Which units stand in which row, by secret coins, and how the draw amplifies privacy. Knows positions, no records.

A draw never looks at a unit, only at how many there are; that number is secret under add_remove, so no error and no
public shape depends on it. Proofs: docs/proofs/poisson-slots.md, poisson-units.md, balanced-slots.md,
partitioned-slots.md, allocated-slots.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeAlias, final

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import RowShape, check_int, check_real
from langchain_dpicl.privacy.bounded import Closed
from langchain_dpicl.privacy.events import MAX_BATCHES, AllocatedEvent, Event, SubsampledEvent
from langchain_dpicl.privacy.randomness import SecureRandom

Sample: TypeAlias = tuple[tuple[int, ...], ...]
"""One inner tuple of unit positions per row."""

_BOTH: frozenset[str] = frozenset({"add_remove", "replace_one"})


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


def _poisson(num_units: int, sampling_rate: float, rng: SecureRandom) -> list[int]:
    """Returns a Poisson sample in random order: a binomial size, then a uniform selection of that size."""
    size = rng.binomial(num_units, sampling_rate)
    units: list[int] = rng.choice_without_replacement(num_units, size).tolist()
    return units


def _check_rate(value: float) -> float:
    return check_real("sampling_rate", value, low=0.0, high=1.0, low_open=True)


def _check_public_size(num_units: int, public_size: int) -> None:
    """Refuses another number of units than declared, without telling the number."""
    if num_units != public_size:
        raise ConfigurationError(
            f"public_size: expected the number of units under replace_one, found public_size={public_size}. "
            "Declare the true number, or use adjacency='add_remove' with PoissonSlots."
        )


def _amplified(event: Event, sampling_rate: float) -> Event:
    return event if sampling_rate == 1.0 else SubsampledEvent(event, sampling_rate)


@final
@dataclass(frozen=True, slots=True)
class PoissonSlots(Closed):
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

    >>> from langchain_dpicl.privacy.randomness import SYSTEM_RANDOM
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
    adjacencies: ClassVar[frozenset[str]] = _BOTH

    def __post_init__(self) -> None:
        object.__setattr__(self, "sampling_rate", _check_rate(self.sampling_rate))
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
        included = _poisson(num_units, self.sampling_rate, rng)
        slots = rng.integers(self.num_slots, len(included)).tolist()
        return assign(included, slots, num_slots=self.num_slots, shots_per_slot=self.shots_per_slot)

    def amplify(self, event: Event) -> Event:
        """Returns the event of `event` run on one secret draw."""
        return _amplified(event, self.sampling_rate)

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
class PoissonUnits(Closed):
    """Each unit is a row of its own with probability `sampling_rate`, independently.

    Formal guarantees:
      - A unit never appears twice; with the coins of the others kept, adding or removing one adds or removes one row.
      - The number of rows is secret (`num_rows` is None); a sum over the rows must be scaled by public numbers only.
      - `amplify(event)` prices a block of releases on one draw, under either adjacency.

    Args:
      sampling_rate: probability in (0, 1] that a unit is included.

    Raises:
      ConfigurationError: `sampling_rate` out of range.

    Source: Balle, Barthe, Gaboardi (2018), Poisson amplification; docs/proofs/poisson-units.md.
    """

    sampling_rate: float
    name: ClassVar[str] = "poisson_units"
    row_shape: ClassVar[RowShape] = "units"
    adjacencies: ClassVar[frozenset[str]] = _BOTH
    num_rows: ClassVar[None] = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sampling_rate", _check_rate(self.sampling_rate))

    def draw(self, num_units: int, *, rng: SecureRandom) -> Sample:
        """Draws a fresh secret sample of one-unit rows in random order; see `PoissonSlots.draw`."""
        return tuple([(unit,) for unit in _poisson(num_units, self.sampling_rate, rng)])

    def amplify(self, event: Event) -> Event:
        """Returns the event of `event` run on one secret draw."""
        return _amplified(event, self.sampling_rate)

    def to_dict(self) -> dict[str, Any]:
        """Returns the public parameters, for reports."""
        return {"name": self.name, "sampling_rate": self.sampling_rate}


@final
@dataclass(frozen=True, slots=True)
class BalancedSlots(Closed):
    """A fixed number of units without replacement, dealt evenly over the slots at random; `replace_one` only.

    Formal guarantees:
      - min(num_slots * shots_per_slot, public_size) distinct units are drawn; slots differ by at most one unit.
      - Replacing one unit, coins kept, changes at most one slot. Adding or removing one may change many: hence the
        single adjacency, under which the number of units is public.

    Args:
      num_slots: number of rows, public.
      shots_per_slot: units in a row, public.
      public_size: the number of units, public.

    Raises:
      ConfigurationError: a parameter out of range.

    Source: Balle, Barthe, Gaboardi (2018), without-replacement amplification; docs/proofs/balanced-slots.md.
    """

    num_slots: int
    shots_per_slot: int
    public_size: int
    name: ClassVar[str] = "balanced_slots"
    row_shape: ClassVar[RowShape] = "slots"
    adjacencies: ClassVar[frozenset[str]] = frozenset({"replace_one"})

    def __post_init__(self) -> None:
        for field in ("num_slots", "shots_per_slot", "public_size"):
            check_int(field, getattr(self, field), low=1)

    @property
    def num_rows(self) -> int:
        """Number of rows of every draw, public."""
        return self.num_slots

    @property
    def sampling_rate(self) -> float:
        """Share of the units in every draw."""
        return self._sample_size / self.public_size

    @property
    def _sample_size(self) -> int:
        return min(self.num_slots * self.shots_per_slot, self.public_size)

    def draw(self, num_units: int, *, rng: SecureRandom) -> Sample:
        """Draws a fresh secret sample; see `PoissonSlots.draw`.

        Raises:
          ConfigurationError: the data do not hold `public_size` units (a public fact under replace_one).
        """
        _check_public_size(num_units, self.public_size)
        units = rng.choice_without_replacement(num_units, self._sample_size).tolist()
        return tuple(tuple(units[slot :: self.num_slots]) for slot in range(self.num_slots))

    def amplify(self, event: Event) -> Event:
        """Returns the event of `event` run on one secret draw."""
        return _amplified(event, self.sampling_rate)

    def to_dict(self) -> dict[str, Any]:
        """Returns the public parameters, for reports."""
        return {
            "name": self.name,
            "num_slots": self.num_slots,
            "shots_per_slot": self.shots_per_slot,
            "public_size": self.public_size,
        }


@final
@dataclass(frozen=True, slots=True)
class PartitionedSlots(Closed):
    """An exact partition, dealt once by secret coins and then kept; `replace_one` only, nothing amplified.

    Formal guarantees:
      - min(num_slots * shots_per_slot, public_size) distinct units are dealt evenly over the slots; every unit has one
        slot or none, however the units are ordered.
      - Replacing one unit, coins kept, changes at most one slot: also of every later release on the same deal, so
        those compose. `amplify` returns the event as it is, also where a deal is made anew.

    Args:
      num_slots: number of rows, public.
      shots_per_slot: most units in a row, public.
      public_size: the number of units, public.

    Raises:
      ConfigurationError: a parameter out of range.

    >>> from langchain_dpicl.privacy.randomness import SYSTEM_RANDOM
    >>> dealt = PartitionedSlots(num_slots=2, shots_per_slot=2, public_size=8).draw(8, rng=SYSTEM_RANDOM)
    >>> [len(row) for row in dealt], len({unit for row in dealt for unit in row})
    ([2, 2], 4)

    Source: Papernot et al. (2017), Semi-supervised Knowledge Transfer for Deep Learning from Private Training Data;
      docs/proofs/partitioned-slots.md.
    """

    num_slots: int
    shots_per_slot: int
    public_size: int
    name: ClassVar[str] = "partitioned_slots"
    row_shape: ClassVar[RowShape] = "slots"
    adjacencies: ClassVar[frozenset[str]] = frozenset({"replace_one"})
    sampling_rate: ClassVar[float] = 1.0
    """The rate that is priced: nothing is amplified, however few of the units have a slot."""

    def __post_init__(self) -> None:
        for field in ("num_slots", "shots_per_slot", "public_size"):
            check_int(field, getattr(self, field), low=1)

    @property
    def num_rows(self) -> int:
        """Number of rows of every draw, public."""
        return self.num_slots

    def draw(self, num_units: int, *, rng: SecureRandom) -> Sample:
        """Deals the units; see `PoissonSlots.draw`.

        Raises:
          ConfigurationError: the data do not hold `public_size` units (a public fact under replace_one).
        """
        _check_public_size(num_units, self.public_size)
        dealt = min(self.num_slots * self.shots_per_slot, num_units)
        units = rng.choice_without_replacement(num_units, dealt).tolist()
        return tuple(tuple(units[slot :: self.num_slots]) for slot in range(self.num_slots))

    def amplify(self, event: Event) -> Event:
        """Returns `event`: one deal serves many releases, which no theorem here amplifies."""
        return event

    def to_dict(self) -> dict[str, Any]:
        """Returns the public parameters, for reports."""
        return {
            "name": self.name,
            "num_slots": self.num_slots,
            "shots_per_slot": self.shots_per_slot,
            "public_size": self.public_size,
        }


@final
@dataclass(frozen=True, slots=True)
class AllocatedSlots(Closed):
    """One secret deal for a whole run: a unit joins with probability `sampling_rate`, in one slot of one batch.

    Formal guarantees:
      - Units are independent of each other; batch and slot are uniform. Adding, removing or replacing one, with the
        coins of the others kept, changes at most one slot of at most one batch. An over-full slot keeps
        `shots_per_slot` of its units, chosen uniformly.
      - There are always `num_batches * num_slots` rows, some possibly empty, for every number of units.
      - `amplify(event)` prices a run that releases `event` on each batch of one draw, under either adjacency.

    Args:
      sampling_rate: probability in (0, 1] that a unit stands anywhere.
      num_batches: batches of a draw, one for each demonstration, public.
      num_slots: rows of a batch, public.
      shots_per_slot: most units in a row, public.

    Raises:
      ConfigurationError: a parameter out of range.

    >>> from langchain_dpicl.privacy.randomness import SYSTEM_RANDOM
    >>> sampler = AllocatedSlots(1.0, num_batches=4, num_slots=3, shots_per_slot=10)
    >>> sample = sampler.draw(10, rng=SYSTEM_RANDOM)
    >>> len(sample), [len(sampler.batch(sample, i)) for i in range(4)], len({u for row in sample for u in row})
    (12, [3, 3, 3, 3], 10)

    Source: Feldman and Shenfeld (2025), Privacy Amplification by Random Allocation; docs/proofs/allocated-slots.md.
    """

    sampling_rate: float
    num_batches: int
    num_slots: int
    shots_per_slot: int
    name: ClassVar[str] = "allocated_slots"
    row_shape: ClassVar[RowShape] = "slots"
    adjacencies: ClassVar[frozenset[str]] = _BOTH

    def __post_init__(self) -> None:
        object.__setattr__(self, "sampling_rate", _check_rate(self.sampling_rate))
        check_int("num_batches", self.num_batches, low=1, high=MAX_BATCHES)
        check_int("num_slots", self.num_slots, low=1)
        check_int("shots_per_slot", self.shots_per_slot, low=1)

    @property
    def num_rows(self) -> int:
        """Number of rows of every draw, all batches together, public."""
        return self.num_batches * self.num_slots

    def draw(self, num_units: int, *, rng: SecureRandom) -> Sample:
        """Deals all batches at once, batch after batch; see `PoissonSlots.draw`. A run has one draw and no other."""
        included = _poisson(num_units, self.sampling_rate, rng)
        places = rng.integers(self.num_rows, len(included)).tolist()
        return assign(included, places, num_slots=self.num_rows, shots_per_slot=self.shots_per_slot)

    def batch(self, sample: Sample, index: int) -> Sample:
        """Returns the `num_slots` rows of batch 0 .. num_batches - 1 of a draw; another index is refused."""
        first = check_int("index", index, low=0, high=self.num_batches - 1) * self.num_slots
        return sample[first : first + self.num_slots]

    def amplify(self, event: Event) -> Event:
        """Returns the event of a whole run that releases `event` on each batch of one secret draw."""
        if self.num_batches == 1:
            return _amplified(event, self.sampling_rate)
        return AllocatedEvent(event, self.num_batches, self.sampling_rate)

    def to_dict(self) -> dict[str, Any]:
        """Returns the public parameters, for reports."""
        return {"name": self.name, **asdict(self)}


Sampler: TypeAlias = PoissonSlots | PoissonUnits | BalancedSlots | PartitionedSlots | AllocatedSlots
SAMPLERS: dict[str, type[Sampler]] = {
    cls.name: cls for cls in (PoissonSlots, PoissonUnits, BalancedSlots, PartitionedSlots, AllocatedSlots)
}
"""The closed list, by the name that reports show."""
