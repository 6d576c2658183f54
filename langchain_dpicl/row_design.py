"""The shape of rows: how many there are, how many records each holds, and how records are drawn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from langchain_dpicl.privacy._validate import ROW_SHAPES, RowShape, check_choice, check_int, check_positive, fail
from langchain_dpicl.privacy.extensions.fixed_size_slots import BalancedSlots, PartitionedSlots
from langchain_dpicl.privacy.extensions.random_allocation import AllocatedSlots
from langchain_dpicl.privacy.mechanisms.sampling import PoissonSlots, PoissonUnits, Sampler

DEFAULT_NUM_SLOTS = 40
DEFAULT_OVERFILL = 1.5
SAMPLINGS = ("poisson", "fixed", "partition", "disjoint")


@dataclass(frozen=True, slots=True)
class RowDesign:
    """The shape of rows before noise is chosen.

    Attributes:
      rows: "units" or "slots".
      num_slots: slots, or expected unit rows.
      shots_per_slot: records per slot (1 for unit rows).
      sampling: "poisson", "fixed" (a secret sample of fixed size), "partition" (every unit stays in one slot) or
        "disjoint" (one secret allocation per run: a unit is in the batch of at most one demonstration).
      overfill: expected units per shot of a slot.
    """

    rows: RowShape
    num_slots: int
    shots_per_slot: int
    sampling: str
    overfill: float

    @classmethod
    def choose(
        cls,
        *,
        rows: str | None = None,
        num_slots: int | None = None,
        shots_per_slot: int | None = None,
        sampling: str = "poisson",
        overfill: float | None = None,
        smallest_size: int | None = None,
    ) -> RowDesign:
        """Fills in defaults: unit rows unless several shots per slot, or another sampling than Poisson, are requested.

        Without `num_slots` there are 40 rows, or `smallest_size` (the least declared size) if that is fewer.
        """
        check_choice("sampling", sampling, SAMPLINGS)
        shots = check_int("shots_per_slot", 1 if shots_per_slot is None else shots_per_slot, low=1)
        shape = rows if rows is not None else ("slots" if shots > 1 or sampling != "poisson" else "units")
        check_choice("rows", shape, ROW_SHAPES)
        if shape == "units" and (shots > 1 or sampling != "poisson"):
            raise fail("rows", "'slots' with several shots per slot or sampling other than 'poisson'", shape)
        most = DEFAULT_NUM_SLOTS if smallest_size is None else min(DEFAULT_NUM_SLOTS, smallest_size)
        slots = check_int("num_slots", most if num_slots is None else num_slots, low=1)
        is_random = shape == "slots" and sampling in {"poisson", "disjoint"}
        fill = (DEFAULT_OVERFILL if is_random else 1.0) if overfill is None else overfill
        return cls(shape, slots, shots, sampling, check_positive("overfill", fill))  # type: ignore[arg-type]

    def sampler(self, public_size: int, *, num_batches: int = 1) -> Sampler:
        """Returns the sampler for a pool of `public_size` declared units."""
        if public_size < self.num_slots:
            raise fail("public_size", f"at least num_slots={self.num_slots}", public_size, "Use fewer slots.")
        if self.sampling == "fixed":
            return BalancedSlots(num_slots=self.num_slots, shots_per_slot=self.shots_per_slot, public_size=public_size)
        if self.sampling == "partition":
            return PartitionedSlots(self.num_slots, self.shots_per_slot, public_size)
        wanted = self.num_slots * self.shots_per_slot * self.overfill
        if self.sampling == "disjoint":
            rate = min(1.0, num_batches * wanted / public_size)
            return AllocatedSlots(rate, num_batches, self.num_slots, self.shots_per_slot)
        rate = min(1.0, wanted / public_size)
        if self.rows == "units":
            return PoissonUnits(sampling_rate=rate)
        return PoissonSlots(sampling_rate=rate, num_slots=self.num_slots, shots_per_slot=self.shots_per_slot)


def redrawn(design: RowDesign) -> RowDesign:
    """Returns the design if its samples are redrawn; a partition or an allocation is not."""
    if design.sampling in {"partition", "disjoint"}:
        advice = "'partition' is for teachers='fixed' only, 'disjoint' for demonstrations."
        raise fail("sampling", "'poisson' or 'fixed'", design.sampling, advice)
    return design


def shapes_like(start: RowDesign, all_shots: Iterable[int], *, sampling: str = "poisson") -> Iterator[RowDesign]:
    """Yields shapes with as many records as `start`: unit rows, then slots of the numbers of shots that divide them."""
    records = start.num_slots * start.shots_per_slot
    yield RowDesign.choose(rows="units", num_slots=records)
    for shots in all_shots:
        slots, rest = divmod(records, shots)
        if rest == 0 and slots >= 2:
            yield RowDesign.choose(rows="slots", num_slots=slots, shots_per_slot=shots, sampling=sampling)
