"""Encloses private units in functions that open a pool of them, remove one, or split them by other labels."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeAlias

from langchain_dpicl._lazy import provided
from langchain_dpicl._opaque import Opaque, run_guarded
from langchain_dpicl.exceptions import PrivateAccessError
from langchain_dpicl.privacy.data.units import Unit, Units, records_of


class Pool(Opaque):
    """The units of one label, or all of them, as the curator reads them. Counts and content are private."""

    __slots__ = ("_count", "_name", "_read", "_version")

    def __init__(
        self,
        count: Callable[[], int],
        read: Callable[[int], Unit],
        name: Callable[[int], str] | None = None,
        version: Callable[[], int] | None = None,
    ) -> None:
        self._count = count
        self._read = read
        self._name = name
        self._version = version

    @property
    def version(self) -> int:
        """A number that each removal raises, after the records are gone; only in a pool of all units."""
        if self._version is None:
            raise PrivateAccessError("Pool: expected a pool of all units, found another.")
        return self._version()

    @property
    def num_units(self) -> int:
        """The private number of units, removed ones included: they keep their position and hold no record."""
        return self._count()

    def records(self, position: int) -> Unit:
        """Returns copies of the records of the unit at `position`; empty if it was removed."""
        if not 0 <= position < self._count():
            raise PrivateAccessError("Pool: expected a position of this pool, found another.")
        return self._read(position)

    def name(self, position: int) -> str:
        """Returns the private name of the unit at `position`; only in a pool of all units."""
        if self._name is None or not 0 <= position < self._count():
            raise PrivateAccessError("Pool: expected a position of a pool of all units, found another.")
        return self._name(position)


OpenPool: TypeAlias = Callable[[str | None], Pool]
"""Opens the pool of a label, or of all units."""
Split: TypeAlias = Callable[[Unit], tuple[Unit, str]]
"""Returns a unit's records of its label, and the label, from that unit alone; () and "" if it has no label."""
Redeclare: TypeAlias = Callable[[tuple[str, ...], Split], OpenPool | None]
"""Splits the units by other labels with the given rule; returns None if that failed."""
Sealed: TypeAlias = tuple[OpenPool, Callable[[str], None], Redeclare]
"""Functions that open a pool, remove a unit, and split the units by other labels."""


def make_opaque_pool(units: Units) -> Sealed:
    """Returns three closures, which are the only references to the content."""

    def open_pool(label: str | None) -> Pool:
        if label is None:
            return Pool(
                lambda: len(units.contents),
                lambda position: tuple(records_of(units, position)),
                name_of_units(units),
                lambda: units.version,
            )
        index = units.by_label[label]
        return Pool(lambda: len(index), lambda position: tuple(records_of(units, index[position])))

    def remove(name: str) -> None:
        # The position stays, so that the units of other positions and all sampling rates do not change.
        position = units.positions.pop(name, None)
        if position is not None:
            units.contents[position] = ()
            units.version += 1  # last: a reader of this number, then of the contents, may keep what is made of them

    def redeclare(labels: tuple[str, ...], split: Split) -> OpenPool | None:
        return run_guarded(lambda: provided("redeclared").split_units(units, labels, split))

    return open_pool, remove, redeclare


def name_of_units(units: Units) -> Callable[[int], str]:
    """Returns a function from a position to the unit's name; "" for a unit that was removed before the first call.

    The list of names is built on the first call: only retrieval needs it, and the time to build it depends on the
    private number of units.
    """
    lock = threading.Lock()
    made: list[list[str]] = []

    def name_of(position: int) -> str:
        with lock:
            if not made:
                made.append(_names(units))
        return made[0][position]

    return name_of


def _names(units: Units) -> list[str]:
    names = [""] * len(units.contents)
    for name, position in list(units.positions.items()):
        names[position] = name
    return names
