"""Compares designs of rows at equal epsilon, stage by stage."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from langchain_dpicl.planning.expected_utility import RowDesign


class Ranked(Protocol):
    """A planned design that is compared with others."""

    @property
    def rank(self) -> Any:
        """Sort key, best first."""


OptionT = TypeVar("OptionT", bound=Ranked)
KeyT = TypeVar("KeyT", bound=Hashable)


def search_designs(
    option: Callable[[KeyT], OptionT | None], *stages: Callable[[Sequence[OptionT]], Iterable[KeyT]]
) -> list[OptionT]:
    """Returns the options of all stages, best first (by `rank`).

    Args:
      option: plans a design; None: the declared sizes do not allow it.
      stages: each returns which designs to plan next, given the options so far, best first. A design is planned once.
    """
    found: dict[KeyT, OptionT] = {}
    for stage in stages:
        for key in stage(_best_first(found.values())):
            if key not in found and (made := option(key)) is not None:
                found[key] = made
    return _best_first(found.values())


def _best_first(options: Iterable[OptionT]) -> list[OptionT]:
    return sorted(options, key=lambda one: one.rank)


def shapes_like(start: RowDesign, all_shots: Iterable[int], *, sampling: str = "poisson") -> Iterator[RowDesign]:
    """Yields shapes with as many records as `start`: unit rows, then slots of the numbers of shots that divide them."""
    records = start.num_slots * start.shots_per_slot
    yield RowDesign.choose(rows="units", num_slots=records)
    for shots in all_shots:
        slots, rest = divmod(records, shots)
        if rest == 0 and slots >= 2:
            yield RowDesign.choose(rows="slots", num_slots=slots, shots_per_slot=shots, sampling=sampling)
