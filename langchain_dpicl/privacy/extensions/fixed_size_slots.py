"""Samples and partitions of a fixed number of units, dealt evenly over slots; `replace_one` only.

Proof: docs/proofs/fixed-size-slots.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import RowShape, check_int
from langchain_dpicl.privacy.accounting.events import Event
from langchain_dpicl.privacy.mechanisms.randomness import SecureRandom
from langchain_dpicl.privacy.mechanisms.release_plan import Sample, Sampler, amplified


def _check_public_size(num_units: int, public_size: int) -> None:
    """Refuses another number of units than declared, without telling the number."""
    if num_units != public_size:
        raise ConfigurationError(
            f"public_size: expected the number of units under replace_one, found public_size={public_size}. "
            "Declare the true number, or use adjacency='add_remove' with PoissonSlots."
        )


@dataclass(frozen=True)
class _FixedSizeSlots(Sampler, is_base=True):
    """Deals a fixed number of units, drawn without replacement, evenly over the slots at random."""

    __slots__ = ()
    num_slots: int
    shots_per_slot: int
    public_size: int
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


@final
@dataclass(frozen=True, slots=True)
class BalancedSlots(_FixedSizeSlots):
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

    Source: Balle, Barthe, Gaboardi (2018), without-replacement amplification; docs/proofs/fixed-size-slots.md.
    """

    name: ClassVar[str] = "balanced_slots"

    @property
    def sampling_rate(self) -> float:
        """Share of the units in every draw."""
        return self._sample_size / self.public_size

    def amplify(self, event: Event) -> Event:
        """Returns the event of `event` run on one secret draw."""
        return amplified(event, self.sampling_rate)


@final
@dataclass(frozen=True, slots=True)
class PartitionedSlots(_FixedSizeSlots):
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

    >>> from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
    >>> dealt = PartitionedSlots(num_slots=2, shots_per_slot=2, public_size=8).draw(8, rng=SYSTEM_RANDOM)
    >>> [len(row) for row in dealt], len({unit for row in dealt for unit in row})
    ([2, 2], 4)

    Source: Papernot et al. (2017), Semi-supervised Knowledge Transfer for Deep Learning from Private Training Data;
      docs/proofs/fixed-size-slots.md.
    """

    name: ClassVar[str] = "partitioned_slots"
    sampling_rate: ClassVar[float] = 1.0
    """The rate that is priced: nothing is amplified, however few of the units have a slot."""

    def amplify(self, event: Event) -> Event:
        """Returns `event`: one deal serves many releases, which no theorem here amplifies."""
        return event
