"""Writes a ledger: reads what is new, decides and appends, all inside one exclusive transaction of its store."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from langchain_dpicl.exceptions import (
    ConfigurationError,
    LedgerError,
    LedgerRollbackError,
    PrivacyBudgetMismatchError,
    SealedShareError,
)
from langchain_dpicl.privacy.amounts import exact
from langchain_dpicl.privacy.ledger_state import BIND, RESERVE, SEAL, LedgerState, Slot, allowance, unit_cost
from langchain_dpicl.privacy.refusals import check_same_terms, check_tenant, exceeded, too_few
from langchain_dpicl.privacy.stores import (
    InMemoryStore,
    LedgerHeader,
    LedgerRecord,
    LedgerStore,
    LedgerTransaction,
)
from langchain_dpicl.privacy.tickets import Component, ShareTerms


@dataclass(slots=True, eq=False)
class Standing:
    """Where a declared share stands in this process.

    Attributes:
      terms: what it is charged; None while the plan it belongs to is open.
      refusal: why it can no longer be used; "" if it can.
    """

    terms: ShareTerms | None = None
    refusal: str = ""

    def usable_terms(self, name: str) -> ShareTerms:
        """Returns the terms to seal.

        Raises:
          ConfigurationError: the plan is still open.
          SealedShareError: the share was replaced or given up.
        """
        if self.refusal:
            raise SealedShareError(f"{name!r}: {self.refusal} Use the share declared last, or declare it again.")
        if self.terms is None:
            msg = (
                f"{name!r}: expected a closed plan, found an open one: its joint cost is not known yet. "
                "Leave the `with budget.plan()` block, then run the component."
            )
            raise ConfigurationError(msg)
        return self.terms


@dataclass(slots=True)
class _Writer:
    """Appends lines and applies each to the state at once."""

    view: LedgerTransaction
    state: LedgerState
    applied: Callable[[LedgerRecord], None]
    is_ours: bool
    wrote: bool = False

    def append(self, kind: str, body: Mapping[str, Any]) -> LedgerRecord:
        self.wrote = True
        record = self.view.append(kind, body)
        # A store of others may return anything; ours took the hash from these very members a moment ago.
        self.state.apply(record, is_hashed=self.is_ours)
        self.applied(record)
        return record


class Desk:
    """Serialises this process's reads and writes of one ledger. Safe for threads, and for processes on a durable store.

    Formal guarantees:
      - What is granted is granted after the line that charges it stands in the store.
      - A ledger on which a line that was seen before is gone or changed grants nothing.
    """

    def __init__(
        self, store: LedgerStore, header: LedgerHeader, *, allowed_wrappers: Callable[[], Sequence[str]] = tuple
    ) -> None:
        # `allowed_wrappers` names the modules that the operator allows around private calls; reservations record them.
        self.store = store
        self.header = header
        self._allowed_wrappers = allowed_wrappers
        self._pid = os.getpid()
        self._lock: AbstractContextManager[bool] = threading.RLock()
        self._locks = {self._pid: self._lock}  # by process
        self._state = LedgerState(header)
        self._seen = (0, "")  # number and hash of the last line that stood, kept when the state is read anew
        self._agreed: dict[str, tuple[Component, Component]] = {}

    @property
    def lock(self) -> AbstractContextManager[bool]:
        """Held by the one thread of this process that reads or writes the ledger; reentrant."""
        # After a fork the parent's lock may be held by a thread that does not exist here.
        if self._pid != os.getpid():
            self._move_in()
        return self._lock

    def _move_in(self) -> None:
        """Starts afresh in a forked child: the parent may have held the lock, or been about to write, as it forked."""
        here = os.getpid()
        lock = self._locks.setdefault(here, threading.RLock())
        with lock:
            if self._pid != here:
                self._start_anew()
                self._lock = lock
                self._pid = here  # last: other threads of the child wait above until then

    def _start_anew(self) -> None:
        """Forgets what was read, so that the ledger is read from its first line."""
        self._state = LedgerState(self.header)

    # The five methods below are where `extensions.ledger_outages` and `extensions.ledger_anchor` add their checks.

    def _turn(self) -> AbstractContextManager[object]:
        """Waits until this thread may read or write."""
        return self.lock

    def _read(self, source: LedgerStore | LedgerTransaction, *, is_writing: bool = False) -> None:  # noqa: ARG002
        """Reads what is new, before it is looked at or written behind."""
        self._catch_up(source)

    def _applied(self, record: LedgerRecord) -> None:
        """Is called with every line that was read or written."""

    def _after_commit(self) -> None:
        """Is called after lines were committed, before anything is granted."""

    def _verify_lines(self) -> None:
        """Checks every line from the first on."""
        self._recomputed()
        self.refresh()

    def refresh(self) -> LedgerState:
        """Returns the state after every committed line.

        Raises:
          LedgerError: the ledger went back in time, was changed, or cannot be read.
        """
        with self._turn():
            self._read(self.store)
            return self._state

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[_Writer]:
        """Opens the ledger for this thread alone, caught up; its lines stand if the block ends well."""
        with self._turn():
            writer = None
            try:
                with self.store.transaction() as view:
                    self._read(view, is_writing=True)
                    writer = _Writer(view, self._state, self._applied, is_ours=type(self.store) is InMemoryStore)
                    yield writer
                self._seen = (self._state.seq, self._state.head)
                self._after_commit()
            except BaseException:
                # Whether lines that were written stand is the store's word: read it again from the start.
                if writer is not None and writer.wrote:
                    self._start_anew()
                raise

    def _catch_up(self, source: LedgerStore | LedgerTransaction) -> None:
        known = self._state
        head: Callable[[], tuple[int, str]] | None = getattr(source, "head", None)
        if head is not None and known.seq >= self._seen[0] and head() == (known.seq, known.head):
            return
        fresh = list(source.records(max(known.seq - 1, 0)))
        # The last line seen must still be there: a restored older copy would give budget back.
        number, seen = max(self._seen, (known.seq, known.head))
        place = number - max(known.seq, 1)
        if number and (place >= len(fresh) or fresh[place].hash != seen):
            msg = f"ledger {self.header.ledger_id}: lines seen before are gone or changed. Nothing is granted."
            raise LedgerRollbackError(msg)
        try:
            for record in fresh[1:] if known.seq else fresh:
                known.apply(record)
                self._applied(record)
        except BaseException:
            self._start_anew()  # half a line may stand: read from the start
            raise
        self._seen = (known.seq, known.head)

    def verify(self) -> None:
        """Recomputes the whole chain and every rule from the first line.

        Raises:
          LedgerError: a line was changed, dropped or breaks a rule.
        """
        if self.store.header() != self.header:
            raise LedgerError(f"ledger {self.header.ledger_id}: the header was changed. Nothing is granted.")
        with self.lock:
            self._verify_lines()

    def _recomputed(self, number: int = 0) -> str | None:
        """Applies every line to a new state; returns the hash of line `number`, None where there is none."""
        fresh = LedgerState(self.header)
        head = self.header.digest if number == 0 else None
        for record in self.store.records(0):
            fresh.apply(record)
            if record.seq == number:
                head = record.hash
        return head

    def bind(self, declarations: Sequence[Mapping[str, Any]], attach: Callable[[str], object]) -> None:
        """Binds a data set: attaches the examples, then writes each of their declarations unless it stands already.

        All of them or none: units that were declared again have their first declaration before this one.

        Raises:
          PrivacyBudgetMismatchError: the name has another declaration here, or another ledger of the same place.
        """
        with self.exclusive() as writer:
            known = writer.state.bindings
            for declaration in declarations:
                _check_declared(known.get(declaration["dataset_id"]), declaration)
            keep: Callable[[str], object] | None = getattr(writer.view, "bind", None)
            if keep is not None:  # a place of several ledgers, where no other may have it
                for name in sorted(declaration["dataset_id"] for declaration in declarations):
                    keep(name)  # in one order, so that two who bind the same ones never wait for each other
            # First, so that examples are never on a ledger of which their handle knows nothing.
            attach(self.header.ledger_id)
            for declaration in declarations:
                if declaration["dataset_id"] not in known:
                    writer.append(BIND, declaration)

    def reserve(
        self,
        standing: Standing,
        component: Component,
        slot: Slot,
        *,
        count: int,
        amount: float = 1.0,
        tenant: str | None = None,
        tenant_cap: int | None = None,
    ) -> LedgerRecord:
        """Reserves tickets durably and returns the reservation's line; the first one seals the share.

        Raises:
          PrivacyBudgetExceededError: not so many tickets are left, to all or to the tenant, or the share no longer
            fits.
          SealedShareError: the share was replaced, or is sealed on other terms.
          ConfigurationError: its plan is still open.
        """
        cost = unit_cost(component.kind, amount) * count
        with self.exclusive() as writer:
            terms = standing.usable_terms(component.name)
            sealed = writer.state.sealed_component(component.name)
            if sealed is None:
                left = allowance(component, slot)
            else:
                self._check_same_terms(component, sealed)
                left = writer.state.left(component.name, slot)
            if cost > left:
                raise too_few(component, slot, cost, left)
            if tenant_cap is not None:
                check_tenant(writer.state, component, tenant or "", count=count, cap=tenant_cap)
            # In one transaction: no share is sealed without a reservation, and none is reserved from unsealed.
            if sealed is None:
                self._seal(writer, terms)
            body: dict[str, Any] = {"component": component.name, "template": slot[0], "label": slot[1]}
            body |= {"count": count, "amount": float(amount)}
            if tenant is not None:
                body["tenant"] = tenant
            if named := self._allowed_wrappers():
                body["allowed_wrappers"] = list(named)
            if self.store.durable:
                # Two copies of one ledger that both go on, at the same second and for the same, write two lines.
                body["nonce"] = secrets.token_hex(8)
            return writer.append(RESERVE, body)

    def _check_same_terms(self, wanted: Component, sealed: Component) -> None:
        """Compares the terms once for each pair of objects, which never change."""
        seen = self._agreed.get(wanted.name)
        if seen is None or seen[0] is not wanted or seen[1] is not sealed:
            check_same_terms(wanted, sealed)
            self._agreed[wanted.name] = wanted, sealed

    def _seal(self, writer: _Writer, terms: ShareTerms) -> None:
        taken = [c.name for c in terms.components if c.name in writer.state.shares]
        if taken:
            raise SealedShareError(f"{taken}: sealed meanwhile by another process. Declare the plan again.")
        for name, spent, limit, wanted in self._sums(writer.state, terms):
            if exact(wanted) > limit - spent:
                raise exceeded(name, wanted, max(limit - spent, Fraction(0)), "Other processes sealed shares first.")
        writer.append(SEAL, terms.to_dict())

    def _sums(self, state: LedgerState, terms: ShareTerms) -> Iterator[tuple[str, Fraction, Fraction, float]]:
        epsilon, delta = state.spent
        yield "epsilon", epsilon, exact(self.header.epsilon), terms.epsilon
        yield "delta", delta, exact(self.header.delta), terms.delta

    def settle(self, kind: str, reservation: int, count: int) -> None:
        """Records that reserved tickets were committed or given back."""
        with self.exclusive() as writer:
            writer.append(kind, {"reservation": reservation, "count": count})


def _check_declared(known: Mapping[str, Any] | None, declaration: Mapping[str, Any]) -> None:
    """Refuses another declaration than the one that stands; a key that only one of them has differs unless it is None.

    Raises:
      PrivacyBudgetMismatchError: it is another.
    """
    if known is None:
        return
    changed = [key for key in {**known, **declaration} if known.get(key) != declaration.get(key)]
    if changed:
        raise PrivacyBudgetMismatchError(
            f"{declaration['dataset_id']!r}: expected the declaration this ledger holds, found another in {changed}. "
            "Give a different data set a dataset_id of its own."
        )
