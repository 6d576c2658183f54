"""Reserves the tickets of a share, burns them before the first private call, and commits them."""

from __future__ import annotations

import threading
from typing import Any

from langchain_dpicl._opaque import Uncopyable, this_process
from langchain_dpicl.exceptions import LedgerError, LedgerUnavailableError, PrivacyBudgetExceededError
from langchain_dpicl.privacy._validate import MAX_NAME_LENGTH, check_int, check_written, fail, round_down
from langchain_dpicl.privacy.accounting.events import Event
from langchain_dpicl.privacy.ledger.state import Slot, allowance
from langchain_dpicl.privacy.ledger.tickets import Blocks, Component, ShareTerms
from langchain_dpicl.privacy.ledger.writer import Grant, LedgerWriter, ShareStatus


class Reservation(Uncopyable):
    """Tickets that are charged, durably, and not yet used. Made by `Share.reserve`.

    Formal guarantees:
      - At most `count` tickets burn, whatever the interleaving of threads, and none in a forked copy.
      - Only tickets that never burnt return, only if refundable, and only to the slot they came from.

    Attributes:
      entry: number of the reservation's line in the ledger; public.
      entry_hash: the line's hash; receipts hold it, so that a rolled back ledger can be detected.
      index: place of its first ticket among those of the line, which may pay for other reservations as well.
      adjacency: the neighbouring relation that the tickets were priced under.
      component: name of the component that reserved it.
      partition: `dataset_id` that declares its labels; None: the component declared none.
      template: the ticket's template ("gdp" or "zcdp" for a pool).
      label: the declared label whose units the tickets may read, or None.
      event: what one ticket may release.
      delta: of the share that paid; at 0 it pays only for noise and samples that are drawn exactly.
      blocks: of a stream, the first and last block that the tickets may read; None otherwise.
    """

    def __init__(
        self,
        desk: LedgerWriter,
        grant: Grant,
        component: Component,
        slot: Slot,
        *,
        count: int,
        event: Event,
        refundable: bool,
        delta: float,
        home: tuple[int, int],
        blocks: Blocks | None = None,
    ) -> None:
        self.ledger_id = desk.header.ledger_id
        self.entry = grant.line.seq
        self.entry_hash = grant.line.hash
        self.index = grant.index
        self.adjacency = desk.header.adjacency
        self.component = component.name
        self.partition = component.partition
        self.template, self.label = slot
        self.count = count
        self.event = event
        self.delta = delta
        self.blocks = blocks
        self.refundable = refundable
        self._desk = desk
        self._grant = grant
        self._lock = threading.Lock()
        self._home = home  # who asked for the tickets: a hook of `Budget.on_spent` may fork before they are here
        self._unburnt = count
        self._uncommitted = 0

    @property
    def unburnt(self) -> int:
        """Tickets that may still burn."""
        return self._unburnt

    @property
    def uncommitted(self) -> int:
        """Tickets burnt and not yet committed."""
        return self._uncommitted

    def burn(self, count: int = 1) -> None:
        """Uses tickets up. Call it before the first private call that they pay for.

        Args:
          count: number of tickets.

        Raises:
          PrivacyBudgetExceededError: fewer tickets are left.
          LedgerError: this is a forked copy of the reservation.
          ConfigurationError: the count is below 1.
        """
        # No line is written: the ledger counts every reserved ticket as spent already.
        check_int("count", count, low=1)
        self._check_home()
        with self._lock:
            if count > self._unburnt:
                msg = f"burn: requested {count} tickets of {self.component!r}, remaining {self._unburnt}. Reserve more."
                raise PrivacyBudgetExceededError(msg, requested=count, remaining=self._unburnt)
            self._unburnt -= count
            self._uncommitted += count

    def commit(self, count: int = 1, *, wait: bool = False) -> None:
        """Records that the noised result of burnt tickets is stored.

        On a durable store the line is written with the next one of this process, or when the budget is closed. Where
        the process ends first, the tickets stay charged and open.

        Args:
          count: number of tickets.
          wait: write the line now.

        Raises:
          LedgerError: fewer tickets are burnt and not yet committed, this is a forked copy of the reservation, or the
            line that was waited for cannot be written now.
          ConfigurationError: the count is below 1.
        """
        check_int("count", count, low=1)
        self._check_home()
        with self._lock:
            if count > self._uncommitted:
                msg = f"commit: expected at most {self._uncommitted} burnt tickets of"
                raise LedgerError(f"{msg} {self.component!r}, found {count}.")
            self._uncommitted -= count
        self._note_stored(count, wait=wait)

    def give_back(self) -> int:
        """Returns refundable, unburnt tickets to their slot, and how many; none of them can burn afterwards."""
        if this_process() != self._home:  # a forked copy: the parent's tickets stay spent
            return 0
        with self._lock:
            # Set to 0 first: if the write fails the tickets stay spent and cannot be used either.
            count, self._unburnt = self._unburnt, 0
            if not count or not self.refundable:
                return 0
            self._return(count)
            return count

    # `RunShare` overrides the two: its reservations are parts of one ticket.

    def _note_stored(self, count: int, *, wait: bool) -> None:
        """Notes in the ledger that results are stored."""
        self._desk.commit(self.entry, count, wait=wait)

    def _return(self, count: int) -> None:
        """Lets tickets that never burnt be reserved again."""
        self._desk.give_back(self._grant, count)

    def _check_home(self) -> None:
        if this_process() != self._home:
            raise LedgerError("reservation: expected the process that reserved it, found a fork. Reserve anew there.")

    def __repr__(self) -> str:
        return f"Reservation({self.component!r}, {self.template!r}, label={self.label!r}, count={self.count})"


class Holding(Uncopyable):
    """The parts that shares and pools have in common."""

    def __init__(self, desk: LedgerWriter, component: Component, standing: ShareStatus) -> None:
        self._desk = desk
        self._component = component
        self._standing = standing

    @property
    def component(self) -> str:
        """Public name of the component."""
        return self._component.name

    @property
    def epsilon(self) -> float | None:
        """The charge of the share (of a joint plan: the whole plan's); None while the plan is open."""
        terms = self._terms()
        return None if terms is None else terms.epsilon

    @property
    def delta(self) -> float | None:
        """As `epsilon`."""
        terms = self._terms()
        return None if terms is None else terms.delta

    @property
    def sealed(self) -> bool:
        """Whether a first reservation has made the share final."""
        return self.component in self._desk.refresh().shares

    @property
    def is_given_up(self) -> bool:
        """Whether it grants nothing: its plan raised, or it was declared anew before its first reservation."""
        return bool(self._standing.refusal)

    def _terms(self) -> ShareTerms | None:
        # Sealed terms never change: the ledger is not read again for them, so they are known in an outage.
        sealed = self._desk.last_read().shares.get(self.component)
        if sealed is None:
            try:
                sealed = self._desk.refresh().shares.get(self.component)
            except LedgerUnavailableError:  # the tickets are those of these terms, also if a worker sealed them
                if self._standing.terms is None:
                    raise
        return sealed.terms if sealed is not None else self._standing.terms

    def _left(self, slot: Slot, blocks: Blocks | None = None) -> float:
        return round_down(self._desk.remaining(self._component, slot, blocks))

    def _take(
        self,
        slot: Slot,
        count: int,
        *,
        event: Event,
        refundable: bool,
        amount: float = 1.0,
        tenant: str | None = None,
        cap: int | None = None,
        blocks: Blocks | None = None,
        run_cap: int | None = None,
    ) -> Reservation:
        home = this_process()
        mine = self._standing, self._component, slot
        how: dict[str, Any] = {"refundable": refundable, "blocks": blocks}
        asked: dict[str, Any] = {"amount": amount, "tenant": tenant, "tenant_cap": cap, "run_cap": run_cap, **how}
        grant = self._desk.reserve(*mine, count=count, **asked)
        delta = self._desk.sealed_delta(self.component)  # another process may have sealed the share at another one
        how |= {"count": count, "event": event, "delta": delta, "home": home}
        return Reservation(self._desk, grant, self._component, slot, **how)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.component!r})"


class Share(Holding):
    """A component's tickets. Made by `Budget.declare`.

    Formal guarantees:
      - Over the ledger's life and all processes, at most `max_count` tickets of each (template, label) are out.
      - The first reservation seals the share in the ledger; from then on its terms cannot change.
    """

    @property
    def event(self) -> Event:
        """What all tickets together may release."""
        return self._component.event

    def remaining(self, template: str, *, label: str | None = None) -> int:
        """Returns how many tickets can still be reserved, without those that other processes hold.

        Args:
          template: of the ticket.
          label: of the ticket.
        """
        return int(self._left((template, label)))

    def committed(self, template: str, *, label: str | None = None) -> int:
        """Returns how many tickets were used and committed, in every process; arguments as `remaining`."""
        slot = template, label
        allowance(self._component, slot)  # refuses a slot that the component has not
        return self._desk.committed(self._component, slot)

    def used_by(self, tenant: str) -> int:
        """Returns how many tickets a tenant has reserved or used, those that other processes hold for it included.

        Args:
          tenant: public name; "": the tickets without a tenant.
        """
        return self._desk.used_by(tenant, self.component)

    def reserve(
        self,
        template: str,
        *,
        label: str | None = None,
        count: int = 1,
        tenant: str | None = None,
        tenant_cap: int | None = None,
        **reads: Any,
    ) -> Reservation:
        """Charges tickets, atomically and durably, before any private record is read.

        A single refundable ticket of a durable ledger may be one of several that an earlier call charged for the same
        request, up to `most_held` of the budget.

        Args:
          template: of the ticket.
          label: of the ticket.
          count: number of tickets.
          tenant: public name of who asks; the ledger counts each tenant's tickets. None: no tenant, "".
          tenant_cap: most tickets of this share that the tenant may have, those of every process together.
          reads: of a stream, what `StreamShare.reserve` takes.

        Raises:
          PrivacyBudgetExceededError: fewer tickets are left, to all or to the tenant, or the share no longer fits the
            budget.
          SealedShareError: the share was replaced, or is sealed on other terms.
          ConfigurationError: no such ticket, a count below 1, or the share's plan is still open.
          LedgerError: the ledger cannot be read or written; nothing is granted.
        """
        ticket = self._component.ticket(template, label)
        check_int("count", count, low=1)
        if tenant is not None and (not isinstance(tenant, str) or len(tenant) > MAX_NAME_LENGTH):
            raise fail("tenant", f"a text of at most {MAX_NAME_LENGTH} characters", type(tenant).__name__)
        check_written("tenant", tenant or "")
        if tenant_cap is not None:
            check_int("tenant_cap", tenant_cap, low=0)
        slot = template, label
        # All that a reservation of tickets sets stands here, so that `reads` cannot set it.
        how: dict[str, Any] = {"event": ticket.event, "refundable": ticket.refundable, "amount": 1.0}
        return self._take(slot, count, tenant=tenant, cap=tenant_cap, **reads, **how)
