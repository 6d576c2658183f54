"""Names the blocks of a stream's time and its windows, and reads both from a header."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any

from langchain_dpicl.privacy._validate import check_choice, check_int, fail
from langchain_dpicl.privacy.data.units import check_number
from langchain_dpicl.privacy.ledger.amounts import check_name
from langchain_dpicl.privacy.ledger.store import LIFE
from langchain_dpicl.privacy.ledger.tickets import Blocks, Extent

LAST_BLOCK = 2**20 - 1
"""The last block that a line may name: after 119 years of hours."""

MOST_BLOCKS = 2**16
"""The longest window, in blocks."""

END = LAST_BLOCK + MOST_BLOCKS
"""No window has a later name."""

ORIGIN = datetime(2001, 1, 1, tzinfo=UTC)
"""The beginning of block 0: midnight of a Monday."""

LENGTHS = {
    "hour": ("PT1H", timedelta(hours=1)),
    "day": ("P1D", timedelta(days=1)),
    "week": ("P7D", timedelta(weeks=1)),
}
"""The periods that a block can have: their ISO 8601 form, and their length."""


@dataclass(frozen=True, slots=True)
class StreamTerms:
    """What the header of a ledger says of its blocks and windows; public.

    Attributes:
      block: period of a block, in the form of ISO 8601.
      origin: beginning of block 0, in the form of ISO 8601.
      window: blocks of a window.
    """

    block: str
    origin: str
    window: int

    def __post_init__(self) -> None:
        check_choice("block", self.block, [period for period, _ in LENGTHS.values()])
        if self.origin != ORIGIN.isoformat():
            raise fail("origin", ORIGIN.isoformat(), self.origin)
        check_int("window", self.window, low=1, high=MOST_BLOCKS)

    @classmethod
    def parse(cls, per: Any) -> StreamTerms | None:
        """Reads a window in words: "30 days"; "life" is None.

        Raises:
          ConfigurationError: it is neither.
        """
        if per == LIFE and isinstance(per, str):
            return None
        found = re.fullmatch(rf"([1-9][0-9]{{0,4}}) ({'|'.join(LENGTHS)})s?", per) if isinstance(per, str) else None
        if found is None or int(found[1]) > MOST_BLOCKS:
            raise fail("per", f'"life", or at most {MOST_BLOCKS} hours, days or weeks, such as "30 days"', per)
        return cls(LENGTHS[found[2]][0], ORIGIN.isoformat(), int(found[1]))

    @property
    def words(self) -> str:
        """A window in words, such as "30 days"; `parse` inverts it."""
        return f"{self.window} {self.name}{'s' * (self.window > 1)}"

    @property
    def name(self) -> str:
        """The period of a block in words, such as "day"."""
        return next(name for name, (period, _) in LENGTHS.items() if period == self.block)

    def block_at(self, seconds: float) -> int:
        """Returns the block of a time in seconds since 1970; a function of that time alone."""
        length = LENGTHS[self.name][1]
        return int((seconds - ORIGIN.timestamp()) // length.total_seconds())

    def blocks_of(self, name: str, day: Any) -> Blocks:
        """Returns the first and the last block of a public day, which may be before block 0; see `day_start`."""
        start = day_start(name, day)
        return self.block_at(start), self.block_at(start + 86_399)

    def to_come(self) -> Extent:
        """Returns the blocks from the present one on."""
        return max(self.block_at(time.time()), 0), None

    def start_of(self, block: int) -> datetime:
        """Returns when a block begins."""
        return ORIGIN + block * LENGTHS[self.name][1]

    def name_of(self, block: int) -> str:
        """Returns a block's beginning in words: "2026-11-02", of an hour "2026-11-02T09"."""
        start = self.start_of(block)
        return f"{start:%Y-%m-%dT%H}" if self.name == "hour" else str(start.date())

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON form; `from_dict` inverts it exactly."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StreamTerms:
        """Rebuilds the terms from a header; refuses a member too much or too little."""
        return cls(**data)


def day_start(name: str, value: Any) -> float:
    """Returns the beginning of a public day in seconds since 1970.

    Args:
      name: of the argument.
      value: a date, or ISO 8601 text such as "2026-11-23".
    """
    day = value
    if isinstance(value, str) and len(value) <= _LONGEST_DAY:
        with contextlib.suppress(ValueError):
            day = date.fromisoformat(value)
    if not isinstance(day, date) or isinstance(day, datetime):
        raise fail(name, 'a day, such as "2026-11-23"', value)
    return datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()


_LONGEST_DAY = 10


def checked_extent(extent: Any) -> Extent:
    """Returns an extent whose blocks are in order."""
    first, last = extent
    check_int("extent", first, low=0, high=LAST_BLOCK)
    return first, None if last is None else check_int("extent", last, low=first, high=LAST_BLOCK)


def runs_touching(length: int, *, every: int, window: int) -> int:
    """Returns how many runs can touch one window: those whose last block is in it, or less than a run behind it.

    Args:
      length: blocks that a run reads.
      every: blocks from one run to the next one.
      window: blocks of a window.
    """
    return (length + window - 2) // every + 1


def hull_of(extents: Sequence[Extent]) -> Extent | None:
    """Returns the least range that holds all of them, or None where there are none."""
    if not extents:
        return None
    lasts = [last for _, last in extents if last is not None]
    return min(first for first, _ in extents), max(lasts) if len(lasts) == len(extents) else None


@dataclass(frozen=True, slots=True)
class StreamDeclaration:
    """What a stream declares beside what `Declaration` holds, all public, as `PrivateStream` documents it."""

    time_key: str
    block: str  # period of a block, in the form of ISO 8601
    grace: int
    sizes: tuple[tuple[int, int], ...]  # people in a range of so many blocks, by length

    def size_of(self, length: int) -> int:
        """Returns the declared number of people in a range: of the next longer one declared, or the longest."""
        return next((size for known, size in self.sizes if known >= length), self.sizes[-1][1])

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON form."""
        sizes = {str(length): size for length, size in self.sizes}
        return {"time_key": self.time_key, "block": self.block, "grace": self.grace, "sizes": sizes}


def make_stream_declaration(*, time_key: str, block: str, grace: int, sizes: Mapping[Any, int]) -> StreamDeclaration:
    """Checks what a stream declares, or what a report shows of it, and freezes it."""
    if not isinstance(sizes, Mapping) or not sizes:
        raise fail("public_size", "people by the length of a range in blocks, such as {7: 400, 30: 1200}", type(sizes))
    lengths = {int(length) if isinstance(length, str) and length.isdecimal() else length: length for length in sizes}
    checked = {
        check_number("length of a range in public_size", each): check_number("public_size", sizes[key])
        for each, key in lengths.items()
    }
    ordered = tuple(sorted(checked.items()))
    if [size for _, size in ordered] != sorted(size for _, size in ordered):
        raise fail("public_size", "no fewer people in a longer range", dict(ordered))
    return StreamDeclaration(check_name("time_key", time_key), block, check_int("grace", grace, low=0), ordered)
