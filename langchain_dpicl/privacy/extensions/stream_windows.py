"""Keeps what a ledger of a stream promises, and what was reserved, in every window of consecutive blocks of data."""

# A block is a period of the records' own time; a window is W consecutive blocks. It is named by its last block e here,
# so that it is the blocks e - W + 1 to e, and touches the blocks a to b where a <= e <= b + W - 1. Blocks before the
# first one are empty.
#
#   (R1) For every window the prices of the shares whose extent it touches add to at most the ledger's limits.
#   (R2) For every window, share and kind of ticket, at most `max_count` tickets whose blocks it touches are out.
#
# docs/proofs/windows.md shows that both make the promise true for every window. `LedgerState` applies them to lines.

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

from langchain_dpicl.exceptions import LedgerError
from langchain_dpicl.privacy._validate import check_int
from langchain_dpicl.privacy.extensions.stream_blocks import END, LAST_BLOCK, StreamTerms, hull_of
from langchain_dpicl.privacy.ledger.amounts import Amount, exact
from langchain_dpicl.privacy.ledger.tickets import Blocks, Component, Extent, ShareTerms

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
