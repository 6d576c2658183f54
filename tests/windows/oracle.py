"""What everything released says about one person in one window, computed without any rule of the ledger.

It deletes (or exchanges) one person's records of one window, runs the reader of every release again, and adds up how
far the released sums move, in noise scales, squared. With Gaussian noise that is exact for a fixed schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

LABELS, VOTES = 2, 3


@dataclass(frozen=True)
class Entry:
    """One record."""

    person: int
    block: int
    arrival: int
    label: int
    vote: int
    order: int


@dataclass(frozen=True)
class Released:
    """One released sum of votes by label: what was read, and the noise."""

    first: int
    last: int
    scale: float
    gone: int = 0
    """Blocks below it were deleted when it was read."""
    removed: frozenset[int] = frozenset()
    now: int = 1_000
    labels: frozenset[int] = frozenset(range(LABELS))


Table = dict[tuple[int, int], int]
Reader = Callable[[Sequence[Entry], int, int], Table]


def one_row_each(entries: Sequence[Entry], first: int, last: int) -> Table:
    """A person is one row of a range: the newest record's, a rule of that person alone."""
    rows: dict[int, tuple[int, int]] = {}
    for each in sorted(entries, key=lambda each: (each.block, each.order)):
        if first <= each.block <= last:
            rows[each.person] = each.label, each.vote
    return _counted(rows)


def rows_per_block(entries: Sequence[Entry], first: int, last: int) -> Table:
    """A bug: a person is one row of every block of the range."""
    rows = {(each.person, each.block): (each.label, each.vote) for each in entries if first <= each.block <= last}
    return _counted(rows)


def by_arrival(entries: Sequence[Entry], first: int, last: int) -> Table:
    """A bug: a late record is read into the block in which it came."""
    return one_row_each(
        [Entry(each.person, each.arrival, each.arrival, each.label, each.vote, each.order) for each in entries],
        first,
        last,
    )


def first_of_a_block(entries: Sequence[Entry], first: int, last: int) -> Table:
    """A bug: the first two records of a block are kept, whichever unit's they are."""
    kept: dict[int, list[Entry]] = {}
    for each in sorted(entries, key=lambda each: (each.block, each.order)):
        kept.setdefault(each.block, []).append(each)
    return one_row_each([each for some in kept.values() for each in some[:2]], first, last)


def _counted(rows: dict[object, tuple[int, int]] | dict[int, tuple[int, int]]) -> Table:
    table: Table = {}
    for cell in rows.values():
        table[cell] = table.get(cell, 0) + 1
    return table


def windows_of(
    entries: Sequence[Entry], window: int, num_blocks: int, *, exchange: bool
) -> Iterator[tuple[int, int, int]]:
    """Yields person, first and last block of all windows for which something is promised.

    Under `replace_one` that is what anybody did in any window; under `add_remove` a person who is in one window alone.
    """
    for person in {each.person for each in entries}:
        own = {each.block for each in entries if each.person == person}
        for start in range(1 - window, num_blocks):
            inside = {block for block in own if start <= block < start + window}
            if inside and (exchange or inside == own):
                yield person, start, start + window - 1


def loss(entries: Sequence[Entry], place: tuple[int, int, int], released: Sequence[Released], read: Reader) -> float:
    """Returns how far all sums move without one person's records of one window, in noise scales, squared."""
    total, (person, first, last) = 0.0, place
    for each in released:
        here = [
            one
            for one in entries
            if one.block >= each.gone and one.person not in each.removed and one.arrival <= each.now
        ]
        there = [one for one in here if not (one.person == person and first <= one.block <= last)]
        if len(here) == len(there):
            continue
        before, after = read(here, each.first, each.last), read(there, each.first, each.last)
        cells = [cell for cell in {*before, *after} if cell[0] in each.labels]
        total += sum((before.get(cell, 0) - after.get(cell, 0)) ** 2 for cell in cells) / each.scale**2
    return total


def worst_loss(
    entries: Sequence[Entry],
    window: int,
    num_blocks: int,
    released: Sequence[Released],
    *,
    exchange: bool,
    read: Reader = one_row_each,
) -> float:
    """Returns the largest loss over all persons and windows for which something is promised."""
    places = windows_of(entries, window, num_blocks, exchange=exchange)
    return max((loss(entries, place, released, read) for place in places), default=0.0)
