"""The one place that writes a ledger: catch up, decide, append, all inside one exclusive transaction.

Knows no records, no accountant and no component's purpose. Safe for threads of this process and, with a durable
store, for other processes on the same ledger.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from langchain_dpicl._wrapper_rules import allowed_wrappers
from langchain_dpicl.exceptions import (
    ConfigurationError,
    LedgerError,
    LedgerRollbackError,
    LedgerUnavailableError,
    PrivacyBudgetMismatchError,
    SealedShareError,
)
from langchain_dpicl.privacy.amounts import exact
from langchain_dpicl.privacy.anchored import never_seen, read_anchor, write_anchor
from langchain_dpicl.privacy.ledger_state import BIND, RESERVE, SEAL, LedgerState, Slot, allowance, unit_cost
from langchain_dpicl.privacy.refusals import check_same_terms, check_tenant, exceeded, too_few
from langchain_dpicl.privacy.stores import (
    InMemoryStore,
    LedgerAnchor,
    LedgerHeader,
    LedgerRecord,
    LedgerStore,
    LedgerTransaction,
)
from langchain_dpicl.privacy.tickets import Component, ShareTerms

# Whoever waited longer than this, in seconds, and through an outage of the ledger, does not try it again by itself:
# of many who wait in turn the last would wait for ever.
PATIENCE = 10.0


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
    is_ours: bool
    untold: dict[int, str]
    wrote: bool = False

    def append(self, kind: str, body: Mapping[str, Any]) -> LedgerRecord:
        self.wrote = True
        record = self.view.append(kind, body)
        # A store of others may return anything; ours took the hash from these very members a moment ago.
        self.state.apply(record, is_hashed=self.is_ours)
        self.untold[record.seq] = record.hash
        return record


class Desk:
    """One process's hand on one ledger. With an anchor, the ledger's last line is remembered there too.

    Formal guarantees:
      - What is granted is granted after the line that charges it stands in the store, and in the anchor.
      - The anchor is told hashes of the chain that this process wrote its own line on, and compared with them. Nothing
        is read again for it after a commit: a copy may have taken the ledger's place by then.
      - A ledger on which a line that was seen before, here or in the anchor, is gone or changed grants nothing.
    """

    def __init__(self, store: LedgerStore, header: LedgerHeader, anchor: LedgerAnchor | None = None) -> None:
        self.store = store
        self.header = header
        self.anchor = anchor
        self._pid = os.getpid()
        self._lock: AbstractContextManager[bool] = threading.RLock()
        self._locks = {self._pid: self._lock}  # by process
        self._state = LedgerState(header)
        self._seen = (0, "")  # number and hash of the last line that stood, kept when the state is read anew
        self._anchored = (-1, "")  # the anchor's line that was last found on the chain
        self._untold: dict[int, str] = {}  # with an anchor: hashes of the lines after that one, as they were applied
        self._adopts = False  # whether an anchor that does not know the ledger is taken all the same
        self._doubtful: dict[tuple[int, str], LedgerRecord] = {}  # settlements that failed and may stand all the same
        self._agreed: dict[str, tuple[Component, Component]] = {}
        self._outages = 0

    @property
    def lock(self) -> AbstractContextManager[bool]:
        """Held by the one thread of this process that reads or writes the ledger; reentrant."""
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
        self._state, self._untold = LedgerState(self.header), {}

    def open(self, *, adopt_anchor: bool = False) -> None:
        """Reads the whole ledger, and brings an anchor that lags behind up to its last line.

        Args:
          adopt_anchor: the anchor is new to this ledger, or has missed so much that its last line is taken at once.

        Raises:
          LedgerError: the ledger is broken, or cannot be read.
          LedgerRollbackError: a line that the anchor knows is not on it, or the anchor has never seen the ledger.
        """
        with self.lock:
            self._adopts = adopt_anchor
            try:
                state = self.refresh()
                if self.anchor is not None and self._anchored[0] < state.seq:
                    self._anchor_last_line(self.anchor)
            finally:
                self._adopts = False

    def refresh(self) -> LedgerState:
        """Returns the state after every committed line.

        Raises:
          LedgerError: the ledger went back in time, was changed, or cannot be read.
        """
        outages, since = self._outages, time.monotonic()
        with self.lock:
            if self._outages != outages:
                self._check_turn(since)
            try:
                self._read(self.store)
            except LedgerUnavailableError:
                self._outages += 1
                raise
            return self._state

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[_Writer]:
        """Opens the ledger for this thread alone, caught up; its lines stand if the block ends well."""
        outages, since = self._outages, time.monotonic()
        with self.lock:
            if self._outages != outages:
                self._check_turn(since)
            writer = None
            try:
                with self.store.transaction() as view:
                    self._read(view, is_writing=True)
                    untold = {} if self.anchor is None else self._untold
                    writer = _Writer(view, self._state, is_ours=type(self.store) is InMemoryStore, untold=untold)
                    yield writer
                self._seen = (self._state.seq, self._state.head)
                if self.anchor is not None and self._anchored[0] < self._state.seq:
                    self._anchor_last_line(self.anchor)
            except BaseException as error:
                # Whether lines that were written stand is the store's word: read it again from the start.
                if writer is not None and writer.wrote:
                    self._start_anew()
                self._outages += isinstance(error, LedgerUnavailableError)
                raise

    def _check_turn(self, since: float) -> None:
        """Refuses a turn that came late because the ledger was out."""
        if time.monotonic() - since > PATIENCE:
            msg = f"ledger: expected one that answers, found {self.store.description} out while others waited for it."
            raise LedgerUnavailableError(f"{msg} Nothing is granted; try again.")

    def _read(self, source: LedgerStore | LedgerTransaction, *, is_writing: bool = False) -> None:
        """Catches up, and compares with the anchor where lines are read from the start or about to be written."""
        if self.anchor is None or not (is_writing or not self._state.seq):
            self._catch_up(source)
            return
        # The anchor first: meanwhile others may go on, never back.
        known = read_anchor(self.anchor, self.header.ledger_id)
        if known is not None and known[0] < self._anchored[0]:  # it forgot lines, and is to be told them again
            self._anchored = (-1, "")
            self._start_anew()
        self._catch_up(source, known)
        if known is None and self._adopts:
            return
        if known is None or known != self._anchored:
            self._check_known(known, self.anchor, self._head_at(known))

    def _check_known(self, known: tuple[int, str] | None, anchor: LedgerAnchor, head: str | None) -> None:
        """Refuses a ledger that the anchor does not know, or whose line of that number has another hash than it knows.

        Args:
          known: what the anchor knows.
          anchor: the anchor.
          head: hash of the ledger's line of that number; None where there is none.
        """
        if known is None:
            raise never_seen(anchor, self.header.ledger_id)
        if head != known[1]:
            msg = (
                f"ledger {self.header.ledger_id}: expected line {known[0]} as the anchor knows it "
                f"({anchor.description}), found {self._state.seq} lines without it. An older copy, or one that "
                "went on elsewhere, took the ledger's place: nothing is granted on it. Bring the ledger itself back."
            )
            raise LedgerRollbackError(msg)
        self._set_anchored(known)

    def _set_anchored(self, known: tuple[int, str]) -> None:
        self._anchored = known
        self._untold = {seq: head for seq, head in self._untold.items() if seq > known[0]}

    def _head_at(self, known: tuple[int, str] | None) -> str | None:
        """Returns the hash that the anchor's line has on the chain that was read, None where there is none."""
        if known is None or known[0] == 0:
            return self.header.digest
        return self._state.head if known[0] == self._state.seq else self._untold.get(known[0])

    def _anchor_last_line(self, anchor: LedgerAnchor) -> None:
        """Tells the anchor what was read and written here, and looks whether it holds that.

        Line by line: of two copies that go on at the same moment, one meets the other's line of the same number.
        """
        name, last = self.header.ledger_id, (self._state.seq, self._state.head)
        if not self._adopts:
            for line in self._untold.items():
                if line[0] < last[0]:
                    write_anchor(anchor, name, line)
        write_anchor(anchor, name, last)
        known = read_anchor(anchor, name)
        if known is not None and known[0] < last[0]:
            msg = f"anchor: expected line {last[0]} in {anchor.description}, where it was written, found {known[0]}."
            raise LedgerUnavailableError(f"{msg} Nothing is granted; what the ledger holds stays charged.")
        if known != last:
            self._catch_up(self.store)  # others may have gone on, in this ledger or in a copy
            self._check_known(known, anchor, self._head_at(known))
        self._set_anchored(known or last)

    def _catch_up(self, source: LedgerStore | LedgerTransaction, anchored: tuple[int, str] | None = None) -> None:
        """Reads what is new; with an anchor, keeps the hashes of the lines from the one that it knows on."""
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
        first = max(self._anchored[0], (anchored or self._anchored)[0])
        try:
            for record in fresh[1:] if known.seq else fresh:
                known.apply(record)
                if self.anchor is not None and (record.seq == first or (record.seq > first and not self._adopts)):
                    self._untold[record.seq] = record.hash
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
            known = None if self.anchor is None else read_anchor(self.anchor, self.header.ledger_id)
            fresh, heads = LedgerState(self.header), {0: self.header.digest}
            for record in self.store.records(0):
                fresh.apply(record)
                if known is not None and record.seq == known[0]:
                    heads[record.seq] = record.hash
            self.refresh()
            if self.anchor is not None:
                self._check_known(known, self.anchor, None if known is None else heads.get(known[0]))

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
            if sealed is None:
                self._seal(writer, terms)
            body: dict[str, Any] = {"component": component.name, "template": slot[0], "label": slot[1]}
            body |= {"count": count, "amount": float(amount)}
            if tenant is not None:
                body["tenant"] = tenant
            if named := allowed_wrappers():
                body["allowed_wrappers"] = list(named)
            if self.store.durable:
                # Two copies of one ledger that both go on, at the same second and for the same, write two lines.
                body["nonce"] = secrets.token_hex(8)
            return writer.append(RESERVE, body)

    def _check_same_terms(self, wanted: Component, sealed: Component) -> None:
        """Is `check_same_terms`, once for two objects: neither ever changes."""
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
        """Records that reserved tickets were committed or given back; after a failure, the same again is the same."""
        body = {"reservation": reservation, "count": count}
        record = None
        try:
            with self.exclusive() as writer:
                if self._doubtful:
                    record = self._standing_after_all(writer.view, kind, body)
                if record is None:
                    record = writer.append(kind, body)
        except BaseException:
            if record is not None:  # an answer may have been lost behind the line
                self._doubtful[reservation, kind] = record
            raise
        if self._doubtful:
            self._doubtful.pop((reservation, kind), None)

    def _standing_after_all(self, view: LedgerTransaction, kind: str, body: Mapping[str, Any]) -> LedgerRecord | None:
        """Returns the line of a settlement whose answer was lost, if it stands."""
        earlier = self._doubtful.get((body["reservation"], kind))
        if earlier is None or dict(earlier.body) != body:
            return None
        found = next(iter(view.records(earlier.seq - 1)), None)
        return found if found is not None and found.hash == earlier.hash else None


def _check_declared(known: Mapping[str, Any] | None, declaration: Mapping[str, Any]) -> None:
    """Refuses another declaration than the one that stands; what only one of them says is another, unless it is None.

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
