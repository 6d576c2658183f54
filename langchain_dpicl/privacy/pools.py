"""Encloses the content of units in functions that open a pool of them, remove one, or split them anew."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NoReturn, SupportsIndex, TypeAlias, TypeVar

from langchain_dpicl.exceptions import PrivateAccessError
from langchain_dpicl.privacy.units import Unit, Units, records_of

T = TypeVar("T")


class Opaque:
    """Refuses every way out that Python offers by default."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        msg = f"{type(self).__name__}: private content cannot be pickled. Build it again where it is needed."
        raise PrivateAccessError(msg)


class Pool(Opaque):
    """The units of one label, or all of them, as the curator reads them. Counts and content are private.

    Attributes:
      num_units: units in the pool, removed ones included: they keep their position and hold no record.
    """

    __slots__ = ("_count", "_name", "_read")

    def __init__(
        self, count: Callable[[], int], read: Callable[[int], Unit], name: Callable[[int], str] | None = None
    ) -> None:
        self._count = count
        self._read = read
        self._name = name

    @property
    def num_units(self) -> int:
        """Number of positions; private."""
        return self._count()

    def records(self, position: int) -> Unit:
        """Returns copies of the records of the unit at `position`; empty if it was removed."""
        if not 0 <= position < self._count():
            raise PrivateAccessError("Pool: expected a position drawn from this pool; found another.")
        return self._read(position)

    def name(self, position: int) -> str:
        """Returns what the unit at `position` is known by, as a text; private, and only in a pool of all units."""
        if self._name is None or not 0 <= position < self._count():
            raise PrivateAccessError("Pool: expected a position drawn from a pool of all units; found another.")
        return self._name(position)

    def __repr__(self) -> str:
        return "Pool(<private>)"


OpenPool: TypeAlias = Callable[[str | None], Pool]
"""Opens the pool of a label, or of all units."""
Split: TypeAlias = Callable[[Unit], tuple[Unit, str]]
"""Gives a unit's records of its label, and the label, by looking at that unit alone; none and "" where it has none."""
Redeclare: TypeAlias = Callable[[tuple[str, ...], Split], OpenPool | None]
"""Splits the units by other labels, and by the rule that gives a unit its own; None: it failed."""
Sealed: TypeAlias = tuple[OpenPool, Callable[[str], None], Redeclare]
"""What opens, what removes, what splits anew."""


def seal(units: Units) -> Sealed:
    """Closes over the content; only these three functions come out."""

    def open_pool(label: str | None) -> Pool:
        if label is None:
            return Pool(
                lambda: len(units.contents), lambda position: tuple(records_of(units, position)), _name_of(units)
            )
        index = units.by_label[label]
        return Pool(lambda: len(index), lambda position: tuple(records_of(units, index[position])))

    def remove(name: str) -> None:
        # The position stays: which units other positions hold, and every sampling rate, must not change.
        position = units.positions.pop(name, None)
        if position is not None:
            units.contents[position] = ()

    def redeclare(labels: tuple[str, ...], split: Split) -> OpenPool | None:
        return _guarded(lambda: _redeclared(units, labels, split))

    return open_pool, remove, redeclare


NO_SPLIT = "records: the units could not be split. Why is hidden; nothing was released or charged."
"""What is said of a split that failed, for whatever reason."""


def _name_of(units: Units) -> Callable[[int], str]:
    """Returns what tells how a unit is known; "" where it was removed, which holds no record.

    The list of names is made when the first is asked for: only retrieval asks, and the time would show how many there
    are. A unit that is removed afterwards keeps its name in this pool.
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


def _guarded(action: Callable[[], T]) -> T | None:
    """Returns what `action` returns, or None if it raised anything but Ctrl-C, which is raised anew from here.

    Units that are declared again may be a ledger's already: a stop must not carry the frames that read them.
    """
    stopped = False
    try:
        return action()
    except KeyboardInterrupt:
        stopped = True
    except BaseException:  # noqa: BLE001  the one caller raises an error that is the same for all of them
        stopped = False
    if stopped:
        raise KeyboardInterrupt
    return None


def _redeclared(units: Units, labels: tuple[str, ...], split: Split) -> OpenPool:
    """Splits units by other labels; nothing of a unit is kept here, so one that is removed is gone here too."""

    def records(position: int) -> Unit:
        found = _guarded(lambda: split(units.contents[position]))
        return () if found is None else found[0]

    places: dict[str, list[int]] = {label: [] for label in labels}
    for position in range(len(units.contents)):
        label = split(units.contents[position])[1]
        if label:
            places[label].append(position)

    def open_pool(label: str | None) -> Pool:
        if label is None:
            return Pool(lambda: len(units.contents), records, _name_of(units))
        index = places[label]
        return Pool(lambda: len(index), lambda position: records(index[position]))

    return open_pool
