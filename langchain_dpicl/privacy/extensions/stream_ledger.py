"""The rules of a ledger of a stream: its lines, its shares, and what they may reserve, for each window of blocks.

`LedgerState` and `LedgerBudget` load it for a header that names a stream. docs/proofs/windows.md is its proof.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any, ClassVar

from langchain_dpicl.exceptions import ConfigurationError, LedgerError, SealedShareError
from langchain_dpicl.privacy._validate import check_int, fail
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.privacy.extensions.stream_blocks import (
    LAST_BLOCK,
    StreamTerms,
    checked_extent,
    hull_of,
    make_stream_declaration,
)
from langchain_dpicl.privacy.extensions.stream_windows import Windows, WindowSums
from langchain_dpicl.privacy.ledger.amounts import Amount
from langchain_dpicl.privacy.ledger.shares import Reservation, Share
from langchain_dpicl.privacy.ledger.state import BIND, RESERVE, LedgerState, Slot, allowance, amount_of, pair_of
from langchain_dpicl.privacy.ledger.store import LedgerHeader
from langchain_dpicl.privacy.ledger.tickets import Blocks, Component, Extent, ShareTerms, extent_of
from langchain_dpicl.privacy.ledger.writer import LedgerWriter, budget_exceeded

RETIRE = "retire"


class StreamState(LedgerState):
    """The totals of a ledger of a stream: what its shares add to, and what was reserved of them, in every window.

    Formal guarantees:
      - (R1) and (R2) of `stream_windows` hold after every line; a line that would break one is refused.
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

    def _left_for(self, totals: Any, blocks: Blocks | None) -> Amount:
        """Returns what may still be reserved for blocks, or for any (R2)."""
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


def retire(desk: LedgerWriter, name: str) -> None:
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
          blocks: that they would read; None: any blocks.
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


__all__ = [
    "StreamShare",
    "StreamState",
    "StreamTerms",
    "check_declared",
    "checked_extent",
    "hull_of",
    "make_stream_declaration",
    "retire",
    "wrong_kind",
]
