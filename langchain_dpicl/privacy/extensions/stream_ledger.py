"""A ledger of a stream: blocks of time, windows, what may be reserved in each, and the tickets of one run.

`LedgerState` and `LedgerBudget` load it for a header that names a stream. docs/proofs/windows.md is its proof.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from fractions import Fraction
from typing import Any, ClassVar, TypeAlias

from langchain_dpicl._opaque import this_process
from langchain_dpicl.exceptions import ConfigurationError, LedgerError, PrivacyBudgetExceededError, SealedShareError
from langchain_dpicl.privacy._validate import Adjacency, Amount, check_choice, check_int, check_name, exact, fail
from langchain_dpicl.privacy.accounting.events import Event, RepeatedEvent
from langchain_dpicl.privacy.extensions.durable_writer import LeasingWriter
from langchain_dpicl.privacy.ledger.shares import Reservation, Share
from langchain_dpicl.privacy.ledger.state import BIND, RESERVE, LedgerState, Slot, allowance, amount_of, pair_of
from langchain_dpicl.privacy.ledger.store import LIFE, LedgerHeader
from langchain_dpicl.privacy.ledger.tickets import (
    Blocks,
    Component,
    Extent,
    ShareTerms,
    Ticket,
    compose_events,
    extent_of,
)
from langchain_dpicl.privacy.ledger.writer import budget_exceeded
from langchain_dpicl.privacy.private_examples import PrivateExamples, check_number

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


# A block is a period of the records' own time; a window is W consecutive blocks. It is named by its last block e here,
# so that it is the blocks e - W + 1 to e, and touches the blocks a to b where a <= e <= b + W - 1. Blocks before the
# first one are empty.
#
#   (R1) For every window the prices of the shares whose extent it touches add to at most the ledger's limits.
#   (R2) For every window, share and kind of ticket, at most `max_count` tickets whose blocks it touches are out.
#
# docs/proofs/windows.md shows that both make the promise true for every window. `LedgerState` applies them to lines.


_Node: TypeAlias = list[Any]
"""Its own amount, the largest sum below it with its own, and two halves; None stands for a node of nothing."""


class WindowSums:
    """An amount for each window, 0 at first: adds to a range, and finds the largest in one, in O(log windows) steps."""

    __slots__ = ("_root", "_size")

    def __init__(self) -> None:
        self._root: _Node | None = None
        self._size = 1  # windows below it, a power of two

    def add(self, windows: Blocks, amount: Amount) -> None:
        """Adds an amount to every window of a range."""
        first, last = windows
        if not 0 <= first <= last <= END:
            raise LedgerError("expected a range of windows")
        while self._size <= last:
            if self._root is not None:
                self._root = [0, max(self._root[1], 0), self._root, None]
            self._size *= 2
        self._root = _added(self._root, (0, self._size - 1), windows, amount)

    def largest(self, windows: Blocks = (0, END)) -> Amount:
        """Returns the largest amount of the windows of a range."""
        first, last = windows
        if first >= self._size:
            return 0
        inside = _largest(self._root, (0, self._size - 1), (first, min(last, self._size - 1)))
        return max(inside, 0) if last >= self._size else inside

    def steps(self) -> list[list[Any]]:
        """Returns every window whose amount differs from that of the one before, with it; equal sums, equal steps."""
        found: list[list[Any]] = []
        before: Amount = 0
        for window, amount in [*_runs(self._root, 0, self._size - 1, 0), (self._size, 0)]:
            if amount != before:
                found.append([window, amount])
                before = amount
        return found

    @classmethod
    def from_steps(cls, steps: Sequence[tuple[int, Amount]]) -> WindowSums:
        """Returns the sums of `steps`."""
        sums = cls()
        for (window, amount), (following, _) in itertools.pairwise(steps):
            sums.add((check_int("window", window, low=0, high=END), following - 1), amount)
        return sums


def _added(node: _Node | None, place: Blocks, windows: Blocks, amount: Amount) -> _Node:
    """Returns the node of the windows of `place` with an amount added to some of them."""
    (low, high), (first, last) = place, windows
    node = [0, 0, None, None] if node is None else node
    if first <= low and high <= last:
        node[0] += amount
        node[1] += amount
        return node
    middle = (low + high) // 2
    if first <= middle:
        node[2] = _added(node[2], (low, middle), windows, amount)
    if last > middle:
        node[3] = _added(node[3], (middle + 1, high), windows, amount)
    left, right = node[2], node[3]
    below = max(0, (left or right)[1]) if left is None or right is None else max(left[1], right[1])
    node[1] = node[0] + below
    return node


def _largest(node: _Node | None, place: Blocks, windows: Blocks) -> Amount:
    """Returns the largest amount of some windows of `place`, without what is added above the node."""
    if node is None:
        return 0
    (low, high), (first, last) = place, windows
    own, top, left, right = node
    if first <= low and high <= last:
        return top  # type: ignore[no-any-return]
    middle = (low + high) // 2
    halves = []
    if first <= middle:
        halves.append(_largest(left, (low, middle), windows))
    if last > middle:
        halves.append(_largest(right, (middle + 1, high), windows))
    return own + max(halves)  # type: ignore[no-any-return]


def _runs(node: _Node | None, low: int, high: int, above: Amount) -> Iterator[tuple[int, Amount]]:
    """Yields where a run of equal amounts may begin, and the amount."""
    if node is None or (node[2] is None and node[3] is None):
        yield low, above + (0 if node is None else node[0])
        return
    middle = (low + high) // 2
    yield from _runs(node[2], low, middle, above + node[0])
    yield from _runs(node[3], middle + 1, high, above + node[0])


class Windows:
    """What is promised for each window of a ledger (R1), and how far its components have read.

    Formal guarantees:
      - What is refused changes nothing.
      - A retired component keeps its price in every window that touches blocks up to the last one it reserved.
    """

    def __init__(self, terms: StreamTerms, *, epsilon: float, delta: float) -> None:
        self.terms = terms
        self._limits = exact(epsilon), exact(delta)
        self._promised = WindowSums(), WindowSums()
        self._reach: dict[str, int] = {}  # last block that a component reserved, also where it was given back
        self._retired: set[str] = set()
        self._is_summed = False  # whether a snapshot says what comes of the shares that are sealed

    def touched(self, extent: Extent) -> Blocks:
        """Returns the first and last window that touch a range of blocks."""
        first, last = extent
        return first, END if last is None else last + self.terms.window - 1

    def meet(self, extent: Extent, other: Extent | None) -> bool:
        """Whether a window touches both ranges; None: all blocks."""
        first, last = self.touched(extent)
        start, end = (0, END) if other is None else self.touched(other)
        return first <= end and start <= last

    def extent_of(self, component: Component) -> Extent | None:
        """Returns the blocks that a component has read or may read; None: none."""
        extent = component.extent
        if extent is None or component.name not in self._retired:
            return extent
        reach = self._reach.get(component.name)
        return None if reach is None else (extent[0], reach)

    @property
    def retired(self) -> dict[str, int | None]:
        """The retired components by name, each with the last block that it reserved."""
        return {name: self._reach.get(name) for name in sorted(self._retired)}

    def is_retired(self, name: str) -> bool:
        """Whether a component may reserve nothing more."""
        return name in self._retired

    def promised(self, extent: Extent | None = None) -> tuple[Fraction, Fraction]:
        """Returns the largest epsilon and the largest delta of the windows that touch blocks; None: of all windows."""
        windows = (0, END) if extent is None else self.touched(extent)
        epsilon, delta = (Fraction(sums.largest(windows)) for sums in self._promised)
        return epsilon, delta

    def seal(self, terms: ShareTerms) -> None:
        """Adds a share to all windows that its extent touches (R1)."""
        for component in terms.components:
            check_extent(component)
        extent = self._hull(terms)
        if extent is None or self._is_summed:
            return
        prices = exact(terms.epsilon), exact(terms.delta)
        for promised, price, limit in zip(self.promised(extent), prices, self._limits, strict=True):
            if promised + price > limit:
                raise LedgerError("expected a share that fits into every window that it touches")
        self._shift(terms, extent, 1)

    def unseal(self, terms: ShareTerms) -> None:
        """Takes a share out of the windows."""
        self._shift(terms, self._hull(terms), -1)

    def retire(self, terms: ShareTerms, name: str) -> None:
        """Ends a component: its extent ends with the last block that it reserved."""
        if name in self._retired:
            raise LedgerError("expected a component that is not retired")
        self._shift(terms, self._hull(terms), -1)
        self._retired.add(name)
        self._shift(terms, self._hull(terms), 1)

    def restore(self, terms: ShareTerms, name: str) -> None:
        """Takes `retire` back."""
        self._shift(terms, self._hull(terms), -1)
        self._retired.remove(name)
        self._shift(terms, self._hull(terms), 1)

    def check_blocks(self, component: Component, blocks: Any) -> Blocks:
        """Returns the blocks that a line reserves tickets for; refuses others than the component may read."""
        extent = component.extent
        is_pair = isinstance(blocks, list | tuple) and len(blocks) == 2 and all(type(each) is int for each in blocks)
        if not is_pair or extent is None or component.name in self._retired:
            raise LedgerError("expected the first and last block, of a component that is not retired")
        first, last = blocks
        if not extent[0] <= first <= last <= (LAST_BLOCK if extent[1] is None else extent[1]):
            raise LedgerError("expected blocks inside the extent of the component")
        return first, last

    def reach(self, name: str, last: int | None) -> int | None:
        """Notes the last block that a component reserved, or puts an earlier note back; returns the one before."""
        before = self._reach.get(name)
        if last is None:
            self._reach.pop(name, None)
        else:
            self._reach[name] = last
        return before

    def to_dict(self) -> dict[str, Any]:
        """Returns what a snapshot holds of it, in a fixed order."""
        return {
            "reach": [[name, last] for name, last in sorted(self._reach.items())],
            "retired": sorted(self._retired),
        }

    def expect_snapshot(self) -> None:
        """Leaves the sums of the shares sealed from now on to `take_over`."""
        self._is_summed = True

    def take_over(self, data: Mapping[str, Any], shares: Sequence[ShareTerms]) -> None:
        """Takes over what a snapshot holds, and sums the shares; refuses those that do not fit (R1)."""
        names = {component.name for terms in shares for component in terms.components}
        self._reach = {name: check_int("reach", last, low=0, high=LAST_BLOCK) for name, last in data["reach"]}
        self._retired = set(data["retired"])
        if not {*self._reach, *self._retired} <= names:
            raise LedgerError("expected sealed components")
        self._is_summed = False
        for terms in shares:
            self._shift(terms, self._hull(terms), 1)
        if any(promised > limit for promised, limit in zip(self.promised(), self._limits, strict=True)):
            raise LedgerError("expected shares that fit into every window")

    def _hull(self, terms: ShareTerms) -> Extent | None:
        """Returns the least range with the blocks of all components of a share."""
        extents = [extent for component in terms.components if (extent := self.extent_of(component)) is not None]
        return hull_of(extents)

    def _shift(self, terms: ShareTerms, extent: Extent | None, sign: int) -> None:
        if extent is None:
            return
        for sums, price in zip(self._promised, (exact(terms.epsilon), exact(terms.delta)), strict=True):
            sums.add(self.touched(extent), sign * price)


def check_extent(component: Component) -> None:
    """Refuses a component of a stream without an extent, or with tickets of single labels.

    Raises:
      LedgerError: it is such a component. A person's label may differ from run to run, so labels are no parts of which
        each person is in one for good: a ticket of a stream is a run over all labels.
    """
    extent = component.extent
    if extent is None:
        raise LedgerError(f"expected the extent of {component.name!r}, in blocks")
    if any(ticket.label is not None for ticket in component.tickets):
        raise LedgerError(f"expected tickets over all labels of {component.name!r}, found some of one label")


RETIRE = "retire"


class StreamState(LedgerState):
    """The totals of a ledger of a stream: what its shares add to, and what was reserved of them, in every window.

    Formal guarantees:
      - (R1) and (R2) hold after every line; a line that would break one is refused.
    """

    windows: Windows

    def __init__(self, header: LedgerHeader) -> None:
        super().__init__(header)
        self.windows = Windows(header.stream, epsilon=header.epsilon, delta=header.delta)

    def _expect_snapshot(self) -> None:
        self.windows.expect_snapshot()

    def _blocks_of(self, *read: Any) -> Blocks:
        ((first, last),) = read
        return check_int("first", first, low=0), check_int("last", last, low=first)

    def _is_possible(self, totals: Any) -> bool:
        # Below 0 where more was reserved over life than one window may have.
        return bool(totals.left <= allowance(totals.component, totals.slot))

    def _take_over_windows(self, body: Mapping[str, Any]) -> None:
        held = body["windows"]
        self.windows.take_over(held, [share.terms for share in self._sealed])
        for totals, steps in zip(self._slots.values(), held["taken"], strict=True):
            totals.taken = WindowSums.from_steps([(at, amount_of(totals.component, pair)) for at, pair in steps])
            if totals.taken.largest() > allowance(totals.component, totals.slot):
                raise LedgerError("expected no more than a window may have")

    def snapshot(self) -> dict[str, Any]:
        """Returns the totals, and those of each window."""
        taken = [[] if it.taken is None else it.taken.steps() for it in self._slots.values()]
        steps = [[[window, pair_of(amount)] for window, amount in each] for each in taken]
        return {**super().snapshot(), "windows": {**self.windows.to_dict(), "taken": steps}}

    def promised(self, extent: Extent | None = None) -> tuple[Fraction, Fraction]:
        """Returns the largest epsilon and the largest delta of the windows that touch blocks; None: of all windows."""
        return self.windows.promised(extent)

    def is_apart(self, terms: ShareTerms, extent: Extent | None) -> bool:
        """Whether no window touches both the blocks of a share and those of `extent`."""
        own = extent_of(terms.components)
        return own is not None and not self.windows.meet(own, extent)

    def check_request(
        self, component: Component, slot: Slot, cost: Amount, *, blocks: Blocks | None, run_cap: int | None
    ) -> None:
        """Refuses what a retired component, or one run, has no more of, and a request without blocks."""
        name = component.name
        if self.windows.is_retired(name):
            raise SealedShareError(f"{name!r}: it was retired. Declare another component for a new share.")
        if blocks is None:
            raise fail("blocks", "those of a range", None)
        if run_cap is None:
            return
        of_run = self._left_of_run(component, slot, blocks, run_cap)
        if of_run < cost and of_run <= self.available(component, slot, blocks=blocks):
            what = f"tickets {slot[0]!r} of one run of {name!r}"
            raise budget_exceeded(what, int(cost), max(of_run, 0), "The next run has its own.")

    def available(
        self, component: Component, slot: Slot, *, blocks: Blocks | None = None, run_cap: int | None = None
    ) -> Amount:
        """Returns what of a slot can be reserved for blocks, and by the run on them."""
        left = super().available(component, slot, blocks=blocks)
        if blocks is None or run_cap is None:
            return left
        return min(left, self._left_of_run(component, slot, blocks, run_cap))

    def _left_of_run(self, component: Component, slot: Slot, blocks: Blocks, cap: Amount) -> Amount:
        """Returns what a run on blocks of a stream has left of `cap`, whatever its windows have left.

        What the run has taken is read where no run before it is counted: in the last window that touches its blocks.
        Runs on later blocks are counted there too, so that a process that is behind them is refused early.
        """
        if component.name not in self.shares:
            return cap
        _, last = self.windows.touched(blocks)
        taken: WindowSums = self._slots[component.name, *slot].taken
        return cap - taken.largest((last, last))

    def _left_for(self, totals: Any, blocks: Extent | None) -> Amount:
        """Returns what may still be reserved for blocks, or for any (R2); nothing of a retired component."""
        if self.windows.is_retired(totals.component.name):
            return 0
        full, taken = allowance(totals.component, totals.slot), totals.taken
        most: Amount = taken.largest() if blocks is None else taken.largest(self.windows.touched(blocks))
        return full - most

    def _read_by(self, component: Component, body: Mapping[str, Any]) -> Blocks:
        return self.windows.check_blocks(component, body["blocks"])

    def _charge(
        self, terms: ShareTerms, price: tuple[Fraction, Fraction], totals: Iterable[Any]
    ) -> Callable[[], object]:
        del price  # `Windows` takes it from the terms
        self.windows.seal(terms)
        for each in totals:
            each.taken = WindowSums()
        return lambda: self.windows.unseal(terms)

    def _refund(self, entry: Any, count: int) -> None:
        super()._refund(entry, count)
        entry.totals.taken.add(self.windows.touched(entry.blocks), -entry.unit * count)

    def _bind(self, seq: int, body: Mapping[str, Any], stamp: str, digest: str) -> Any:
        if body["stream"]["block"] != self.windows.terms.block:
            raise LedgerError("expected a stream of blocks as long as the ledger's")
        return super()._bind(seq, body, stamp, digest)

    def _reserve(self, seq: int, body: Mapping[str, Any], stamp: str, digest: str) -> Any:
        undo, values = super()._reserve(seq, body, stamp, digest)
        name, (_, last) = body["component"], body["blocks"]
        before = self.windows.reach(name, None)
        self.windows.reach(name, max(last, -1 if before is None else before))

        def take_back() -> None:
            self.windows.reach(name, before)
            undo(*values)

        return take_back, ()

    def _retire(self, seq: int, body: Mapping[str, Any], stamp: str, digest: str) -> Any:  # noqa: ARG002  as all rules
        name = body["component"]
        if set(body) != {"component"}:
            raise LedgerError("expected the name of a component of a stream")
        terms = self.shares[name].terms
        self.windows.retire(terms, name)
        return self.windows.restore, (terms, name)

    _RULES: ClassVar[dict[str, Any]] = {
        **LedgerState._RULES,  # noqa: SLF001  its own base
        BIND: _bind,
        RESERVE: _reserve,
        RETIRE: _retire,
    }
    _MEMBERS: ClassVar[Mapping[str, str]] = {"blocks": RESERVE, "stream": BIND}


def retire(desk: LeasingWriter, name: str) -> None:
    """Ends a component of a stream: it reserves no more, and its price leaves the windows that it has not read.

    What this process holds of it is given back first; a component that is retired already stays so.

    Raises:
      SealedShareError: no share of the name is sealed.
    """
    with desk.exclusive() as writer:
        windows = writer.state.windows
        if windows is None or name not in writer.state.shares:
            advice = "Only the component of a stream that has reserved a ticket can be retired."
            raise SealedShareError(f"{name!r}: expected a sealed component of a stream, found none. {advice}")
        if not windows.is_retired(name):
            desk.return_component(writer, name)
            writer.append(RETIRE, {"component": name})


class StreamShare(Share):
    """A component's tickets on a stream.

    Formal guarantees:
      - For every window, at most `max_count` tickets of each template are out whose blocks touch it.
    """

    def remaining(self, template: str, *, label: str | None = None, blocks: Blocks | None = None) -> int:
        """Returns how many tickets can still be reserved, without those that other processes hold.

        Args:
          template: of the ticket.
          label: of the ticket.
          blocks: that they would read; None: whichever blocks, also those of windows that are over.
        """
        return int(self._left((template, label), blocks))

    def reserve(
        self,
        template: str,
        *,
        label: str | None = None,
        blocks: Blocks | None = None,
        run_cap: int | None = None,
        **asked: Any,
    ) -> Reservation:
        """Charges tickets as `Share.reserve` does, for blocks.

        Args:
          template: of the ticket.
          label: of the ticket.
          blocks: the first and last block that the tickets may read, inside the extent of the share.
          run_cap: most tickets for these blocks, those of every process together; None: as many as a window may have.
          asked: what else `Share.reserve` takes.

        Raises:
          ConfigurationError: the share may not read the blocks, or as `Share.reserve`.
        """
        if run_cap is not None:
            check_int("run_cap", run_cap, low=1)
        self._check_blocks(blocks)
        return super().reserve(template, label=label, blocks=blocks, run_cap=run_cap, **asked)

    def _check_blocks(self, blocks: Blocks | None) -> None:
        """Refuses blocks that the share may not read."""
        extent = self._component.extent
        if blocks is None or extent is None:
            raise fail("blocks", "those of a range, for a component of a stream, and none for another", blocks)
        first, last = check_int("first block", blocks[0], low=0), check_int("last block", blocks[1], low=blocks[0])
        end = LAST_BLOCK if extent[1] is None else extent[1]
        if not extent[0] <= first <= last <= end:
            words = f"blocks {extent[0]} to {'any to come' if extent[1] is None else end}"
            advice = "If the clock went back, set it right; a component of another name may read other blocks."
            raise fail("blocks", f"{words}, the extent of {self.component!r}", f"{first} to {last}", advice)


def check_declared(component: Component) -> None:
    """Refuses a component without blocks, or with tickets of single labels, on a ledger of a stream.

    Raises:
      ConfigurationError: it is such a component.
    """
    if component.extent is None:
        advice = "This ledger's promise is for windows of blocks: only what reads ranges of a stream can be charged."
        raise fail("extent", "the first and last block that the component may read", None, advice)
    labels = sorted({ticket.label for ticket in component.tickets if ticket.label is not None})
    if labels:
        advice = (
            "A person's label may differ from run to run, so that labels do not run in parallel. Price a run over all "
            "labels as one ticket."
        )
        raise fail("tickets", "tickets over all labels", labels, advice)


def wrong_kind(private: PrivateExamples, terms: StreamTerms | None, per: str) -> ConfigurationError:
    """Returns the refusal of examples without a time where the promise is for windows, and of a stream elsewhere."""
    declared = private.declaration.get("stream")
    if terms is None:
        advice = 'Make a ledger for windows: PrivacyBudgetCallbackHandler.create(path, ..., per="30 days").'
        return fail("budget", "one whose promise is for windows of a stream", f"per={per!r}", advice)
    if declared is None:
        advice = "Its ranges are PrivateStream(...).last(30) or .rolling(30, every=7); or take a budget for life."
        return fail("private", f"ranges of a stream, since this budget is per {per}", private.dataset_id, advice)
    return fail("block", f"that of the budget, {terms.block}", declared["block"])


RUN_TEMPLATE = "run"
"""The ticket of a whole run of a component on a range of a stream."""


def run_ticket(tickets: Sequence[Ticket], *, runs: int, adjacency: Adjacency) -> Ticket:
    """Returns the ticket of one run, of which there are `runs` per window, from the tickets of all these runs.

    Formal guarantees:
      - In one run a unit has one label, and so takes part in the tickets of all units and in those of one label; under
        `replace_one` it may leave one and join another, and takes part in those of two. The event is the composition.
      - Over several runs a unit may have several labels: the runs compose, and no labels run in parallel.

    Raises:
      ConfigurationError: the labels' tickets differ in what they release, or their number is no multiple of `runs`.
    """
    check_int("runs", runs, low=1)
    by_label: dict[str | None, list[Event]] = {}
    for ticket in tickets:
        count, rest = divmod(ticket.max_count, runs)
        if rest:
            raise fail("runs", f"a divisor of {ticket.max_count} tickets", runs)
        event = ticket.event if count == 1 else RepeatedEvent(ticket.event, count)
        by_label.setdefault(ticket.label, []).append(event)
    of_all = by_label.pop(None, [])
    bundles = [compose_events(events) for events in by_label.values()]
    if not of_all and not bundles:
        raise fail("tickets", "at least one", 0)
    if any(bundle != bundles[0] for bundle in bundles):
        advice = "On a stream declare one public_size for all labels, so that they have the same sampling rate."
        raise fail("public_size", "labels that cost the same", sorted(map(str, by_label)), advice)
    may_move = adjacency == "replace_one" and len(bundles) > 1
    of_labels = [*bundles[:1], *(bundles[:1] if may_move else [])]
    return Ticket(RUN_TEMPLATE, compose_events((*of_all, *of_labels)), max_count=runs)


class RunShare(StreamShare):
    """The share of a component on a stream, seen from one of its runs: grants what one run may release, on its blocks.

    Formal guarantees:
      - The first part that is reserved charges one ticket of the run, durably, for the blocks that it reads.
      - Over this object at most the parts of one run are granted, of each template and label; a fork, which has a
        count of its own, is granted none.
      - What is not used when the process ends stays charged.
    """

    def __init__(self, share: Share, parts: Sequence[Ticket], blocks: Blocks) -> None:
        super().__init__(share._desk, share._component, share._standing)  # noqa: SLF001  its own base
        self._parts = {(part.template, part.label): part for part in parts}
        self._parts_left = Counter({key: part.max_count for key, part in self._parts.items()})
        self._blocks = blocks
        self._guard = threading.Lock()
        self._home = this_process()
        self._run: Reservation | None = None

    @property
    def blocks(self) -> Blocks:
        """What the run reads."""
        return self._blocks

    def remaining(self, template: str, *, label: str | None = None, blocks: Blocks | None = None) -> int:
        """Returns how many parts of this run can still be reserved: none of a run that cannot be charged any more."""
        del blocks
        if self._run is None and super().remaining(RUN_TEMPLATE, blocks=self._blocks) < 1:
            return 0
        return self._parts_left[template, label]

    def reserve(self, template: str, *, label: str | None = None, count: int = 1, **_: Any) -> Reservation:
        """Grants parts of the run; the first call charges the run."""
        check_int("count", count, low=1)
        if this_process() != self._home:  # before the lock, which the parent may have held
            advice = "Make the component anew there: that is a run of its own."
            raise LedgerError(f"run: expected the process that made it, found a fork. {advice}")
        part = self._parts.get((template, label))
        if part is None:
            raise fail("template, label", f"one of {sorted(map(str, self._parts))}", (template, label))
        with self._guard:
            left = self._parts_left[template, label]
            if count > left:
                what = f"parts {template!r} of one run of {self.component!r}"
                raise PrivacyBudgetExceededError(
                    f"{what}: requested {count}, remaining {left}. The next run has its own.",
                    requested=count,
                    remaining=left,
                )
            if self._run is None:
                self._run = super().reserve(RUN_TEMPLATE, blocks=self._blocks)
            self._parts_left[template, label] -= count
        return _PartOfRun(self, self._run, part, count)

    def begin(self) -> None:
        """Burns the ticket of the run, once."""
        with self._guard:
            if self._run is not None and self._run.unburnt:
                self._run.burn()

    def commit(self) -> None:
        """Notes that something of the run is stored, once."""
        with self._guard:
            if self._run is not None and self._run.uncommitted:
                self._run.commit()

    def take_back(self, part: Ticket, count: int) -> None:
        """Lets parts that never burnt be reserved again, in this run."""
        with self._guard:
            self._parts_left[part.template, part.label] += count


class QueryShare(StreamShare):
    """The share of a component on a stream that answers queries, seen from one of its runs.

    A query is a ticket of its own, on the run's blocks: it reads all people, whatever their label.

    Formal guarantees:
      - A ticket that was leased on the blocks of one run pays for no query of another one.
      - Of one run at most `most` tickets are granted, in all processes together. That is no part of the promise: the
        ledger counts what each window may have, and the counts of all runs that touch one add to that.
    """

    def __init__(self, share: Share, blocks: Blocks, most: int) -> None:
        super().__init__(share._desk, share._component, share._standing)  # noqa: SLF001  its own base
        self._blocks = blocks
        self.most = most

    def of_run(self, blocks: Blocks) -> QueryShare:
        """Returns the same share, seen from the run on other blocks."""
        return QueryShare(self, blocks, self.most)

    def remaining(self, template: str, *, label: str | None = None, blocks: Blocks | None = None) -> int:
        """Returns how many queries of this run can still be paid for."""
        del blocks
        return int(self._desk.remaining(self._component, (template, label), self._blocks, self.most))

    def reserve(self, template: str, *, label: str | None = None, count: int = 1, **whose: Any) -> Reservation:
        """Charges queries of the run."""
        of_run: dict[str, Any] = {"blocks": self._blocks, "run_cap": self.most}
        return super().reserve(template, label=label, count=count, **{**whose, **of_run})


class _PartOfRun(Reservation):
    """Parts of a run, each for one release; the run's ticket was charged before, and burns with the first of them."""

    def __init__(self, share: RunShare, run: Reservation, part: Ticket, count: int) -> None:
        slot = part.template, part.label
        how: dict[str, Any] = {"event": part.event, "refundable": part.refundable, "delta": run.delta}
        how |= {"count": count, "blocks": run.blocks, "home": run._home}  # noqa: SLF001  its own base
        super().__init__(run._desk, run._grant, share._component, slot, **how)  # noqa: SLF001  its own base
        self._share = share
        self._part = part

    def burn(self, count: int = 1) -> None:
        """Uses parts up; the first of a run burns its ticket."""
        super().burn(count)
        self._share.begin()

    def _note_stored(self, count: int, *, wait: bool) -> None:
        del count, wait
        self._share.commit()

    def _return(self, count: int) -> None:
        self._share.take_back(self._part, count)
