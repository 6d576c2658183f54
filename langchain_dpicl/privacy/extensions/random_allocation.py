"""One secret deal of the units into disjoint batches, for a whole run.

Proof: docs/proofs/allocated-slots.md.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, final

from langchain_dpicl.privacy._validate import RowShape, check_int
from langchain_dpicl.privacy.events import MAX_BATCHES, AllocatedEvent, Event
from langchain_dpicl.privacy.mechanisms.randomness import SecureRandom
from langchain_dpicl.privacy.mechanisms.sampling import (
    BOTH,
    Sample,
    Sampler,
    amplified,
    assign,
    check_rate,
    poisson,
)


@final
@dataclass(frozen=True, slots=True)
class AllocatedSlots(Sampler):
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

    >>> from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
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
    adjacencies: ClassVar[frozenset[str]] = BOTH

    def __post_init__(self) -> None:
        object.__setattr__(self, "sampling_rate", check_rate(self.sampling_rate))
        check_int("num_batches", self.num_batches, low=1, high=MAX_BATCHES)
        check_int("num_slots", self.num_slots, low=1)
        check_int("shots_per_slot", self.shots_per_slot, low=1)

    @property
    def num_rows(self) -> int:
        """Number of rows of every draw, all batches together, public."""
        return self.num_batches * self.num_slots

    def draw(self, num_units: int, *, rng: SecureRandom) -> Sample:
        """Deals all batches at once, batch after batch; see `PoissonSlots.draw`. A run has one draw and no other."""
        included = poisson(num_units, self.sampling_rate, rng)
        places = rng.integers(self.num_rows, len(included)).tolist()
        return assign(included, places, num_slots=self.num_rows, shots_per_slot=self.shots_per_slot)

    def batch(self, sample: Sample, index: int) -> Sample:
        """Returns the `num_slots` rows of batch 0 .. num_batches - 1 of a draw; another index is refused."""
        first = check_int("index", index, low=0, high=self.num_batches - 1) * self.num_slots
        return sample[first : first + self.num_slots]

    def amplify(self, event: Event) -> Event:
        """Returns the event of a whole run that releases `event` on each batch of one secret draw."""
        if self.num_batches == 1:
            return amplified(event, self.sampling_rate)
        return AllocatedEvent(event, self.num_batches, self.sampling_rate)

    def to_dict(self) -> dict[str, Any]:
        """Returns the public parameters, for reports."""
        return {"name": self.name, **asdict(self)}
