"""Grants what one run of a component on a stream may release: parts of one ticket over all labels, or queries."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

from langchain_dpicl.exceptions import LedgerError, PrivacyBudgetExceededError
from langchain_dpicl.privacy._validate import Adjacency, check_int, fail
from langchain_dpicl.privacy.accounting.events import Event, RepeatedEvent
from langchain_dpicl.privacy.extensions.stream_ledger import StreamShare
from langchain_dpicl.privacy.ledger.shares import Reservation, Share
from langchain_dpicl.privacy.ledger.tickets import Blocks, Ticket, compose_events

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
        self._pid = os.getpid()
        self._run: Reservation | None = None

    @property
    def blocks(self) -> Blocks:
        """What the run reads."""
        return self._blocks

    def remaining(self, template: str, *, label: str | None = None, blocks: Blocks | None = None) -> int:
        """Returns how many parts of this run can still be reserved."""
        del blocks
        return self._parts_left[template, label]

    def reserve(self, template: str, *, label: str | None = None, count: int = 1, **_: Any) -> Reservation:
        """Grants parts of the run; the first call charges the run."""
        check_int("count", count, low=1)
        if os.getpid() != self._pid:  # before the lock, which the parent may have held
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
        component, grant = share._component, run._grant  # noqa: SLF001  its own base
        super().__init__(run._desk, grant, component, slot, count=count, blocks=run.blocks, **how)  # noqa: SLF001
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
