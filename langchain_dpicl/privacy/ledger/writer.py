"""Writes a ledger: reads new lines, decides, refuses or appends inside one exclusive transaction of the store."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from langchain_dpicl.exceptions import (
    ConfigurationError,
    LedgerError,
    LedgerRollbackError,
    PrivacyBudgetExceededError,
    PrivacyBudgetMismatchError,
    SealedShareError,
    TenantCapExceededError,
)
from langchain_dpicl.privacy.ledger.amounts import Amount, exact, round_down, round_up
from langchain_dpicl.privacy.ledger.state import (
    BIND,
    COMMIT,
    GIVE_BACK,
    RESERVE,
    SEAL,
    LedgerState,
    Slot,
    Undo,
    allowance,
    unit_cost,
)
from langchain_dpicl.privacy.ledger.store import LedgerHeader, LedgerRecord, LedgerStore, LedgerTransaction, in_blocks
from langchain_dpicl.privacy.ledger.tickets import Component, ShareTerms


def budget_exceeded(
    what: str,
    requested: float,
    remaining: Amount,
    advice: str,
    *,
    kind: type[PrivacyBudgetExceededError] = PrivacyBudgetExceededError,
) -> PrivacyBudgetExceededError:
    """Returns the refusal of a request; the caller raises it."""
    rest = round_down(remaining)
    msg = f"{what}: requested {requested:.9g}, remaining {rest:.9g}. {advice}"
    return kind(msg, requested=requested, remaining=rest)


def check_same_terms(wanted: Component, sealed: Component) -> None:
    """Raises a SealedShareError if the terms differ from the sealed ones."""
    changed = sealed.changed_terms(wanted)
    if changed:
        msg = (
            f"{wanted.name!r}: expected the terms sealed by its first reservation, found others in {changed}. "
            "Declare the same terms to go on with its tickets, or another component name for a new share."
        )
        raise SealedShareError(msg)


def check_tenant(state: LedgerState, component: Component, tenant: str, *, count: int, cap: int) -> None:
    """Raises a TenantCapExceededError if the request is above what the tenant's cap leaves."""
    remaining = max(cap - state.used_by(tenant, component.name), 0)
    if count > remaining:
        what = f"tickets of {component.name!r} for tenant {tenant!r}"
        advice = f"Its cap is {cap}, in all processes together; raise it."
        raise budget_exceeded(what, count, remaining, advice, kind=TenantCapExceededError)


def too_few(component: Component, slot: Slot, cost: Amount, remaining: Amount) -> PrivacyBudgetExceededError:
    """Returns the refusal of more tickets than a slot holds; the caller raises it."""
    if component.kind == "tickets":
        label = "" if slot[1] is None else f" for label {slot[1]!r}"
        what = f"tickets {slot[0]!r}{label} of {component.name!r}"
    else:
        what = f"{'mu^2' if component.kind == 'gdp' else 'rho'} of pool {component.name!r}"
    advice = "What was reserved stays charged; a new share needs budget of its own."
    return budget_exceeded(what, round_up(cost), remaining, advice)


@dataclass(slots=True, eq=False)
class ShareStatus:
    """The terms of a declared share (None while its plan is open), and why it can no longer be used ("" if it can)."""

    terms: ShareTerms | None = None
    refusal: str = ""

    def usable_terms(self, name: str) -> ShareTerms:
        """Returns the terms to seal; refuses an open plan, and a share that was replaced or given up."""
        if self.refusal:
            raise SealedShareError(f"{name!r}: {self.refusal} Use the share declared last, or declare it again.")
        if self.terms is None:
            msg = (
                f"{name!r}: expected a closed plan, found an open one: its joint cost is not known yet. "
                "Leave the `with budget.plan()` block, then run the component."
            )
            raise ConfigurationError(msg)
        return self.terms


RIDE_SECONDS = 5.0
"""Commits that waited so long are written by the next call, whatever it is."""


class LineAppender:
    """Appends lines and applies each of them to the state at once; takes them back where they may not stand."""

    def __init__(
        self,
        view: LedgerTransaction,
        state: LedgerState,
        waiting: Mapping[int, int],
        applied: Callable[[LedgerRecord], None],
    ) -> None:
        self.view = view
        self.state = state
        self._waiting = waiting
        self._applied = applied
        self._undos: list[Undo] = []
        self._is_whole = True

    def append(self, kind: str, body: Mapping[str, Any]) -> LedgerRecord:
        """Adds a line; the first one of a transaction brings the commits that wait along."""
        self.bring_waiting()
        return self._append(kind, body)

    def bring_waiting(self) -> None:
        """Adds the commits that wait, unless they were added."""
        if not self._undos:
            for entry, count in self._waiting.items():
                self._append(COMMIT, {"reservation": entry, "count": count})

    @property
    def wrote(self) -> bool:
        """Whether lines were added."""
        return bool(self._undos)

    def take_back(self) -> bool:
        """Takes the lines back; returns whether the state is what it was before them."""
        while self._is_whole and self._undos:
            self._is_whole = False
            self._undos.pop()()
            self._is_whole = True
        return self._is_whole

    def _append(self, kind: str, body: Mapping[str, Any]) -> LedgerRecord:
        record = self.view.append(kind, body)
        self._is_whole = False  # an interrupt may leave half a line
        self._undos.append(self.state.apply(record))
        self._is_whole = True
        self._applied(record)
        return record


class LedgerWriter:
    """Serialises this process's reads and writes of one ledger. Safe for threads, and for processes on a durable store.

    A commit waits in this process and is written in the transaction of the next line. It is lost where the process
    ends first: its ticket then stays charged and open, as if the process had ended before the commit.

    Formal guarantees:
      - Tickets are granted only after the store holds the line that charges them.
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
        self._seen = (0, "")  # last line ever seen, kept when the state is read anew
        self._waiting: dict[int, int] = {}  # tickets whose commit waits, by the line of their reservation
        self._waiting_since = 0.0
        self._agreed: dict[str, tuple[Component, Component]] = {}

    @property
    def lock(self) -> AbstractContextManager[bool]:
        """The reentrant lock of this process for reading and writing the ledger."""
        # After a fork the parent's lock may be held by a thread that does not exist here.
        if self._pid != os.getpid():
            self._move_in()
        return self._lock

    def _move_in(self) -> None:
        """Takes a new lock and state in a forked child: the parent may have held the lock while it forked."""
        here = os.getpid()
        lock = self._locks.setdefault(here, threading.RLock())
        with lock:
            if self._pid != here:
                self._start_anew()
                self._waiting = {}  # those of the parent, which writes them
                self._lock = lock
                self._pid = here  # last: other threads of the child wait above until then

    def _start_anew(self) -> None:
        """Forgets what was read, so that the ledger is read from its first line."""
        self._state = LedgerState(self.header)

    # The classes of `extensions.ledger_anchor` override the five methods below.

    def _turn(self) -> AbstractContextManager[object]:
        """Waits until this thread may read or write."""
        return self.lock

    def _read(self, source: LedgerStore | LedgerTransaction, *, is_writing: bool = False) -> None:  # noqa: ARG002
        """Applies new lines, before the state is used or a line is appended."""
        self._catch_up(source)

    def _applied(self, record: LedgerRecord) -> None:
        """Called with every line that was read or written."""

    def _after_commit(self) -> None:
        """Called after lines were committed, before anything is granted."""

    def _verify_lines(self) -> None:
        """Checks every line from the first on."""
        self._recomputed()
        self.refresh()

    def refresh(self) -> LedgerState:
        """Returns the state after every committed line; refuses a ledger that was rolled back or changed."""
        with self._turn():
            self._read(self.store)
            if self._waiting and time.monotonic() - self._waiting_since > RIDE_SECONDS:
                self.write_waiting()
            return self._state

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[LineAppender]:
        """Opens the ledger for this thread alone, with every line read; commits if the block raises nothing."""
        with self._turn():
            if self._state.seq < self._seen[0]:
                self._read(self.store)  # all of it, before others wait for this thread
            writer = None
            try:
                with self.store.transaction() as view:
                    self._read(view, is_writing=True)
                    writer = LineAppender(view, self._state, self._waiting, self._applied)
                    yield writer
                if writer.wrote:
                    self._waiting = {}
                self._seen = (self._state.seq, self._state.head)
                self._after_commit()
            except BaseException:
                # Only the store knows whether the lines were committed: what stands is read again.
                if writer is not None:
                    self._take_back(writer)
                raise

    def _take_back(self, writer: LineAppender) -> None:
        try:
            is_whole = writer.take_back()
        except BaseException:
            self._start_anew()
            raise
        if not is_whole:
            self._start_anew()

    def _catch_up(self, source: LedgerStore | LedgerTransaction) -> None:
        known = self._state
        head: Callable[[], tuple[int, str]] | None = getattr(source, "head", None)
        if head is not None and known.seq >= self._seen[0] and head() == (known.seq, known.head):
            return
        # The last line seen must still be there: a restored older copy would give budget back.
        number, seen = max(self._seen, (known.seq, known.head))
        is_there = not number
        first = max(known.seq, 1)
        try:
            for place, record in enumerate(in_blocks(source, first - 1), start=first):
                if place == number:
                    is_there = record.hash == seen
                    if not is_there:
                        break
                if place > known.seq:
                    known.apply(record)
                    self._applied(record)
                    self._settled_before(record)
            if is_there:
                self._seen = (known.seq, known.head)
                return
        except BaseException:
            self._start_anew()  # half a line may stand: read from the start
            raise
        self._start_anew()
        raise LedgerRollbackError(
            f"ledger {self.header.ledger_id}: lines seen before are gone or changed. Nothing is granted."
        )

    def _settled_before(self, record: LedgerRecord) -> None:
        """Takes a commit off those that wait where its line stands although the store raised an error."""
        if self._waiting and record.kind == COMMIT and (entry := record.body["reservation"]) in self._waiting:
            self._waiting[entry] -= record.body["count"]  # nobody else has these tickets
            if self._waiting[entry] <= 0:
                del self._waiting[entry]

    def verify(self) -> None:
        """Recomputes the whole chain and every rule from the first line."""
        if self.store.header() != self.header:
            raise LedgerError(f"ledger {self.header.ledger_id}: the header was changed. Nothing is granted.")
        with self.lock:
            self._verify_lines()

    def _recomputed(self, number: int = 0) -> str | None:
        """Applies every line to a new state; returns the hash of line `number`, None where there is none."""
        fresh = LedgerState(self.header)
        head = self.header.digest if number == 0 else None
        for record in in_blocks(self.store):
            fresh.apply(record)
            if record.seq == number:
                head = record.hash
        return head

    def bind(self, declarations: Sequence[Mapping[str, Any]], attach: Callable[[str], object]) -> None:
        """Attaches the examples, then writes all of their declarations that the ledger does not hold yet, or none.

        Raises:
          PrivacyBudgetMismatchError: the name has another declaration here, or belongs to another ledger of the store.
        """
        with self.exclusive() as writer:
            known = writer.state.bindings
            for declaration in declarations:
                _check_declared(known.get(declaration["dataset_id"]), declaration)
            claim: Callable[[str], object] | None = getattr(writer.view, "bind", None)
            if claim is not None:  # a store of several ledgers, of which only one may bind a data set
                # Sorted, so that two processes that bind the same data sets cannot deadlock.
                for name in sorted(declaration["dataset_id"] for declaration in declarations):
                    claim(name)
            # Attach first, so that a ledger never holds examples whose handle is not bound to it.
            attach(self.header.ledger_id)
            for declaration in declarations:
                if declaration["dataset_id"] not in known:
                    writer.append(BIND, declaration)

    def reserve(
        self,
        standing: ShareStatus,
        component: Component,
        slot: Slot,
        *,
        count: int,
        amount: float = 1.0,
        tenant: str | None = None,
        tenant_cap: int | None = None,
    ) -> LedgerRecord:
        """Reserves tickets durably and returns the reservation's line; the first reservation seals the share."""
        cost = unit_cost(component.kind, amount) * count
        with self.exclusive() as writer:
            terms = standing.usable_terms(component.name)
            sealed = writer.state.sealed_component(component.name)
            if sealed is None:
                remaining = allowance(component, slot)
            else:
                self._check_same_terms(component, sealed)
                remaining = writer.state.left(component.name, slot)
            if cost > remaining:
                raise too_few(component, slot, cost, remaining)
            if tenant_cap is not None:
                check_tenant(writer.state, component, tenant or "", count=count, cap=tenant_cap)
            # In the same transaction as the reservation: a ledger never holds one line without the other.
            if sealed is None:
                self._seal(writer, terms)
            body: dict[str, Any] = {"component": component.name, "template": slot[0], "label": slot[1]}
            body |= {"count": count, "amount": float(amount)}
            if tenant is not None:
                body["tenant"] = tenant
            if wrappers := self._allowed_wrappers():
                body["allowed_wrappers"] = list(wrappers)
            if self.store.durable:
                # Makes the lines of two diverging copies differ, even for equal requests in the same second.
                body["nonce"] = secrets.token_hex(8)
                body["holder"] = process_name()
            return writer.append(RESERVE, body)

    def _check_same_terms(self, wanted: Component, sealed: Component) -> None:
        """Compares the terms once for each pair of components, which are immutable."""
        seen = self._agreed.get(wanted.name)
        if seen is None or seen[0] is not wanted or seen[1] is not sealed:
            check_same_terms(wanted, sealed)
            self._agreed[wanted.name] = wanted, sealed

    def _seal(self, writer: LineAppender, terms: ShareTerms) -> None:
        sealed = [c.name for c in terms.components if c.name in writer.state.shares]
        if sealed:
            raise SealedShareError(f"{sealed}: sealed meanwhile by another process. Declare the plan again.")
        for name, spent in zip(("epsilon", "delta"), writer.state.spent, strict=True):
            requested, remaining = getattr(terms, name), exact(getattr(self.header, name)) - spent
            if exact(requested) > remaining:
                raise budget_exceeded(
                    name, requested, max(remaining, Fraction(0)), "Other processes sealed shares first."
                )
        writer.append(SEAL, terms.to_dict())

    def commit(self, reservation: int, count: int) -> None:
        """Records that what tickets released is stored; on a durable store the line waits for the next one."""
        if not self.store.durable:
            with self.exclusive() as writer:
                writer.append(COMMIT, {"reservation": reservation, "count": count})
            return
        with self.lock:
            if not self._waiting:
                self._waiting_since = time.monotonic()
                _WITH_WAITING.add(self)
            self._waiting[reservation] = self._waiting.get(reservation, 0) + count

    def write_waiting(self) -> None:
        """Writes the commits that wait."""
        with self.lock:
            if self._waiting:
                with self.exclusive() as writer:
                    writer.bring_waiting()

    def waiting(self, entry: int) -> int:
        """Returns how many tickets of a reservation wait for their commit to be written."""
        return self._waiting.get(entry, 0)

    def committed(self, component: Component, slot: Slot) -> int:
        """Returns how many tickets were used and committed, in every process; those that wait here included."""
        with self.lock:
            state = self.refresh()
            if component.name not in state.shares:
                return 0
            reserved = int(allowance(component, slot) - state.left(component.name, slot))
            waiting = sum(count for entry, count in self._waiting.items() if state.is_of(entry, component.name, slot))
            return reserved - state.unsettled(component.name, slot) + waiting

    def give_back(self, reservation: int, count: int) -> None:
        """Records that tickets that never burnt return to their slot."""
        with self.exclusive() as writer:
            writer.append(GIVE_BACK, {"reservation": reservation, "count": count})


_PROCESS_NAMES: dict[int, str] = {}


def process_name() -> str:
    """Returns a random name of this process, which says in its reservations' lines who holds them."""
    # By number, so that a forked child has one of its own.
    return _PROCESS_NAMES.setdefault(os.getpid(), secrets.token_hex(8))


_WITH_WAITING: weakref.WeakSet[LedgerWriter] = weakref.WeakSet()


@atexit.register
def write_all_waiting() -> None:
    """Writes the commits that wait when the interpreter ends; what cannot be written leaves its tickets open."""
    for writer in list(_WITH_WAITING):
        with contextlib.suppress(LedgerError):
            writer.write_waiting()


def _check_declared(known: Mapping[str, Any] | None, declaration: Mapping[str, Any]) -> None:
    """Refuses a declaration that differs from the bound one; a missing key counts as None."""
    if known is None:
        return
    changed = [key for key in {**known, **declaration} if known.get(key) != declaration.get(key)]
    if changed:
        raise PrivacyBudgetMismatchError(
            f"{declaration['dataset_id']!r}: expected the declaration this ledger holds, found another in {changed}. "
            "Give a different data set a dataset_id of its own."
        )
