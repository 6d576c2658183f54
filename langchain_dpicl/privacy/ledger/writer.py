"""Writes a ledger: decides, refuses or appends inside one exclusive transaction."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from langchain_dpicl._opaque import PerProcess, this_process
from langchain_dpicl.exceptions import (
    ConfigurationError,
    LedgerError,
    LedgerRollbackError,
    PrivacyBudgetExceededError,
    PrivacyBudgetMismatchError,
    SealedShareError,
    TenantCapExceededError,
)
from langchain_dpicl.privacy._validate import Amount, exact, round_down, round_up
from langchain_dpicl.privacy.ledger.state import (
    BIND,
    COMMIT,
    GIVE_BACK,
    RESERVE,
    SEAL,
    SNAPSHOT,
    LedgerState,
    Slot,
    Undo,
    allowance,
    unit_cost,
)
from langchain_dpicl.privacy.ledger.store import LedgerHeader, LedgerRecord, LedgerStore, LedgerTransaction, in_blocks
from langchain_dpicl.privacy.ledger.tickets import Blocks, Component, ShareTerms, extent_of


class TicketRequest(NamedTuple):
    """All that the line of a reservation names, and the caps that it was compared with."""

    component: str
    slot: Slot
    amount: float
    tenant: str | None
    cap: int | None
    wrappers: tuple[str, ...]
    blocks: Blocks | None = None
    run_cap: int | None = None


@dataclass(frozen=True, slots=True)
class Grant:
    """Tickets that a line reserved: `index` is the first one's place among those of the line."""

    line: LedgerRecord
    index: int = 0


def budget_exceeded(
    what: str,
    requested: float,
    remaining: Amount,
    advice: str,
    *,
    kind: type[PrivacyBudgetExceededError] = PrivacyBudgetExceededError,
    held: int = 0,
) -> PrivacyBudgetExceededError:
    """Returns the refusal of a request; the caller raises it."""
    rest = round_down(remaining)
    msg = f"{what}: requested {requested:.9g}, remaining {rest:.9g}. {advice}"
    return kind(msg, requested=requested, remaining=rest, held=held)


def check_same_terms(wanted: Component, sealed: Component) -> None:
    """Raises a SealedShareError if the terms differ from the sealed ones."""
    changed = sealed.changed_terms(wanted)
    if changed:
        advice = "Declare the same terms to go on with its tickets, or another component name for a new share."
        if changed == ["extent"] and all(each.extent and each.extent[1] is None for each in (wanted, sealed)):
            advice = "Another process began its runs on another day: make the component again, which goes on with them."
        found = f"expected the terms sealed by its first reservation, found others in {changed}"
        raise SealedShareError(f"{wanted.name!r}: {found}. {advice}")


def check_tenant(state: LedgerState, component: Component, tenant: str, *, count: int, cap: int) -> None:
    """Raises a TenantCapExceededError if the request is above what the tenant's cap leaves."""
    remaining = max(cap - state.used_by(tenant, component.name), 0)
    if count > remaining:
        what = f"tickets of {component.name!r} for tenant {tenant!r}"
        advice = f"Its cap is {cap}, in all processes together; raise it."
        raise budget_exceeded(what, count, remaining, advice, kind=TenantCapExceededError)


def too_few(component: Component, slot: Slot, cost: Amount, remaining: Amount, held: int) -> PrivacyBudgetExceededError:
    """Returns the refusal of more tickets than a slot holds; the caller raises it."""
    if component.kind == "tickets":
        label = "" if slot[1] is None else f" for label {slot[1]!r}"
        what = f"tickets {slot[0]!r}{label} of {component.name!r}"
        if component.extent is not None:
            what += " in one window of its blocks"
    else:
        what = f"{'mu^2' if component.kind == 'gdp' else 'rho'} of pool {component.name!r}"
    # Without the number that is held: it tells how often a model failed, and messages are traced.
    advice = (
        "What was used stays charged; what other processes hold and do not use may come back. A new share needs "
        "budget of its own."
    )
    return budget_exceeded(what, round_up(cost), remaining, advice, held=held)


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
                "Leave the `with budget.plan()` block, then run the component. A prompt template or a selector runs as "
                "it is built: build a DemonstrationSynthesizer or a PromptPATELabeler inside the block, and after it "
                "the template or the selector by from_run."
            )
            raise ConfigurationError(msg)
        return self.terms


class LineAppender:
    """Appends lines and applies each of them to the state at once; takes them back where they may not stand."""

    def __init__(
        self, view: LedgerTransaction, state: LedgerState, applied: Callable[[Sequence[LedgerRecord]], None]
    ) -> None:
        self.view = view
        self.state = state
        self._applied = applied
        self._undos: list[Undo] = []
        self._is_whole = True

    def append(self, kind: str, body: Mapping[str, Any]) -> LedgerRecord:
        """Adds a line."""
        record = self.view.append(kind, body)
        self._is_whole = False  # an interrupt may leave half a line
        self._undos.append(self.state.apply(record))
        self._is_whole = True
        self._applied((record,))
        return record

    def add_snapshot(self) -> None:
        """Adds a snapshot, of all lines up to here, if there are lines and it is time for one."""
        if self._undos and self.state.needs_snapshot:
            self.append(SNAPSHOT, self.state.snapshot())

    def take_back(self) -> bool:
        """Takes the lines back; returns whether the state is what it was before them."""
        while self._is_whole and self._undos:
            self._is_whole = False
            self._undos.pop()()
            self._is_whole = True
        return self._is_whole

    # `extensions.durable_writer` overrides the three below.

    def before_commit(self) -> None:
        """Called after the last line."""

    def after_commit(self) -> None:
        """Called when the lines are visible, before others may add theirs."""

    def after_flush(self) -> None:
        """Called when the lines are durable."""


class LedgerWriter:
    """Serialises this process's reads and writes of one ledger. Safe for threads, and for processes on a durable store.

    A line is visible once its transaction was committed, and durable once the disk holds it. A store with `flush` gives
    its lock up between the two, so that other writers go on meanwhile; with any other store a commit is both. Stores
    write their lines to the disk in order:

      (P) Where line n is durable, every visible line before it is durable.

    Formal guarantees:
      (G) Tickets are granted only after the line that charges them is durable. By (P) so is every line on which that
          was decided. What a crash loses was granted to nobody.
      - A ledger on which a durable line that was seen before is gone or changed grants nothing.
    """

    def __init__(
        self,
        store: LedgerStore,
        header: LedgerHeader,
        *,
        allowed_wrappers: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        # `allowed_wrappers` names the modules that the operator allows around private calls; reservations record them.
        self.store = store
        self.header = header
        self._allowed_wrappers = allowed_wrappers
        self._home = this_process()
        self._locks = PerProcess[AbstractContextManager[bool]](threading.RLock)
        self._state = LedgerState(header)
        self._seen = (0, header.digest)  # last durable line ever seen, kept when the state is read anew
        self._visible = self._state, *self._seen  # last line read or written, and the state that has it
        self._flushing: AbstractContextManager[bool] = threading.Lock()
        self.flushes = 0  # how often this process waited for the disk
        self._agreed: dict[str, tuple[Component, Component]] = {}

    @property
    def lock(self) -> AbstractContextManager[bool]:
        """The reentrant lock of this process for reading and writing the ledger."""
        if self._home != this_process():
            self._move_in()
        return self._locks.here

    def _move_in(self) -> None:
        """Takes a new state in a forked child."""
        here = this_process()
        with self._locks.here:
            if self._home != here:
                self._forget_parent()
                self._flushing = threading.Lock()
                self._home = here  # last: other threads of the child wait above until then

    def _forget_parent(self) -> None:
        """Called in a forked child, before its first turn."""
        self._start_anew()

    def _start_anew(self) -> None:
        """Forgets what was read, so that the ledger is read from its first line."""
        self._state = LedgerState(self.header)

    # Classes of `extensions.durable_writer` and `extensions.ledger_anchor` override the five methods below, and others.

    @contextlib.contextmanager
    def _turn(self, lock: AbstractContextManager[bool]) -> Iterator[None]:
        """Waits until this thread may read or write, or may wait for the disk."""
        with lock:
            yield

    def _appender(self, view: LedgerTransaction) -> LineAppender:
        """Returns what adds the lines of one transaction."""
        return LineAppender(view, self._state, self._applied)

    def _read(self, source: LedgerStore | LedgerTransaction, *, is_writing: bool = False) -> None:  # noqa: ARG002
        """Applies new lines, before the state is used or a line is appended."""
        self._catch_up(source)

    def _applied(self, lines: Sequence[LedgerRecord]) -> None:
        """Called with all lines that were read or written, some at a time."""

    def _before_grant(self, state: LedgerState, seq: int) -> None:
        """Called when line `seq` of `state` is durable, before anything is granted on it."""

    def refresh(self) -> LedgerState:
        """Returns the state after every committed line; refuses a ledger that was rolled back or changed."""
        with self._turn(self.lock):
            self._read(self.store)
            state, seq, head = self._visible
        self._flush(state, seq, head)
        return self._state

    def last_read(self) -> LedgerState:
        """Returns the state that `refresh` read last, without a look at the ledger."""
        return self._visible[0]

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[LineAppender]:
        """Opens the ledger for this thread alone, with every line read.

        Where the block raises nothing its lines are committed, and durable when this returns.
        """
        with self._turn(self.lock):
            if self._state.seq < self._seen[0] or hasattr(self.store, "flush"):
                self._read(self.store)  # before others wait for this thread
            writer = None
            try:
                with self._transaction() as view:
                    self._read(view, is_writing=True)
                    writer = self._appender(view)
                    yield writer
                    if hasattr(self.store, "last_snapshot"):
                        writer.add_snapshot()
                    writer.before_commit()
            except BaseException:
                # Only the store knows whether the lines were committed: what stands is read again.
                if writer is not None:
                    self._take_back(writer)
                raise
            state, seq, head = self._note_visible()
            writer.after_commit()
        self._flush(state, seq, head)
        writer.after_flush()
        self._before_grant(state, seq)

    def _transaction(self) -> AbstractContextManager[LedgerTransaction]:
        """Opens a transaction whose lines are visible when it ends, and durable after `_flush`."""
        early: Any = self.store
        return early.transaction(flush=False) if hasattr(early, "flush") else self.store.transaction()

    def _note_visible(self) -> tuple[LedgerState, int, str]:
        """Notes the last line that was read or written."""
        self._visible = last = self._state, self._state.seq, self._state.head
        if not hasattr(self.store, "flush"):
            self._seen = last[1:]
        return last

    def _flush(self, state: LedgerState, seq: int, head: str) -> None:
        """Waits until a visible line is durable. Threads share the waiting, without the lock of the ledger.

        The store looks the line up before it waits, so that a line which a database server lost when it restarted is
        not taken for a durable one.
        """
        flush: Callable[[int, str], None] | None = getattr(self.store, "flush", None)
        if flush is None:
            return
        if self._seen[0] >= seq and self._state is state:
            return
        with self._turn(self._flushing):
            if self._seen[0] >= seq and self._state is state:
                return  # another thread waited for this line, or a later one of the same chain
            known, later, its_head = self._visible
            line = (later, its_head) if known is state else (seq, head)
            flush(*line)
            self.flushes += 1
            # What is seen is durable: a line that a crash may lose must raise no alarm of a rollback.
            self._seen = max(self._seen, line)

    def _take_back(self, writer: LineAppender) -> None:
        try:
            is_whole = writer.take_back()
        except BaseException:
            self._start_anew()
            raise
        if not is_whole:
            self._start_anew()

    def _catch_up(self, source: LedgerStore | LedgerTransaction) -> None:
        """Applies the lines that are new in the source."""
        head: Callable[[], tuple[int, str]] | None = getattr(source, "head", None)
        known = self._state
        if head is None or known.seq < self._seen[0] or head() != (known.seq, known.head):
            self._apply_new(source)
        self._note_visible()

    def _apply_new(self, source: LedgerStore | LedgerTransaction) -> None:
        # The last line seen must still be there: a restored older copy would give budget back.
        number, seen = max(self._seen, (self._state.seq, self._state.head))
        if not self._state.seq and source is self.store:
            self._take_snapshot()
        known = self._state
        is_there = not number
        if 0 < number < known.seq:  # a snapshot was taken over that others wrote since
            line = next(iter(source.records(number - 1, limit=1)), None)
            is_there = line is not None and line.hash == seen
        first = max(known.seq, 1)
        try:
            for block in in_blocks(source, first - 1):
                if first <= number < first + len(block):
                    is_there = block[number - first].hash == seen
                    if not is_there:
                        break
                if new := block[max(known.seq + 1 - first, 0) :]:
                    known.apply_all(new)
                    self._applied(new)
                first += len(block)
        except BaseException:
            self._start_anew()  # half a line may stand: read from the start
            raise
        if is_there:
            return
        self._start_anew()
        if number > self._seen[0]:
            # Visible lines that were not yet durable: a database server that restarted lost them.
            self._apply_new(source)
            return
        raise LedgerRollbackError(
            f"ledger {self.header.ledger_id}: lines seen before are gone or changed. Nothing is granted. Restore the "
            "ledger itself, not an older copy of it."
        )

    def _take_snapshot(self) -> None:
        """Takes over the last snapshot, so that only the lines after it are read; `verify` reads them all."""
        find: Callable[[], Sequence[LedgerRecord]] | None = getattr(self.store, "last_snapshot", None)
        lines = () if find is None else find()
        if lines and self._may_skip_to(lines[-1].seq):
            self._state = LedgerState.from_snapshot(self.header, lines)
            self._applied(lines[-1:])

    def _may_skip_to(self, seq: int) -> bool:  # noqa: ARG002  an override does
        """Whether the lines before `seq` need not be read."""
        return True

    def bind(self, declarations: Sequence[Mapping[str, Any]], attach: Callable[[str], object]) -> None:
        """Attaches the examples, then writes all of their declarations that the ledger does not hold yet, or none.

        Raises:
          PrivacyBudgetMismatchError: the name has another declaration here, or belongs to another ledger of the store.
        """
        with self.exclusive() as writer:
            known = writer.state.bindings
            for declaration in declarations:
                check_declared(known.get(declaration["dataset_id"]), declaration)
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
        refundable: bool = False,
        blocks: Blocks | None = None,
        run_cap: int | None = None,
    ) -> Grant:
        """Reserves tickets durably; the first reservation seals the share."""
        wrappers = tuple(self._allowed_wrappers())
        request = TicketRequest(component.name, slot, float(amount), tenant, tenant_cap, wrappers, blocks, run_cap)
        return self._granted(standing, component, request, count=count, refundable=refundable)

    def _granted(
        self,
        standing: ShareStatus,
        component: Component,
        request: TicketRequest,
        *,
        count: int,
        refundable: bool,  # noqa: ARG002  an override does
    ) -> Grant:
        with self.exclusive() as writer:
            self._admit(writer, standing, component, request, count=count)
            line = writer.append(RESERVE, self._reservation(request, count))
        return Grant(line)

    def _admit(
        self, writer: LineAppender, standing: ShareStatus, component: Component, request: TicketRequest, *, count: int
    ) -> int:
        """Refuses tickets that do not fit, and seals the share if it is not; returns how many could be granted."""
        terms = standing.usable_terms(component.name)
        state, name, slot, unit = writer.state, component.name, request.slot, unit_cost(component.kind, request.amount)
        sealed = state.sealed_component(name)
        if sealed is not None:
            self._check_same_terms(component, sealed)
        asked: dict[str, Any] = {"blocks": request.blocks, "run_cap": request.run_cap}
        state.check_request(component, slot, unit * count, **asked)
        remaining = state.available(component, slot, **asked)
        if unit * count > remaining:
            raise too_few(component, slot, unit * count, remaining, self._unsettled(state, name, slot))
        most = int(remaining // unit)
        if request.cap is not None:
            tenant = request.tenant or ""
            check_tenant(state, component, tenant, count=count, cap=request.cap)
            most = min(most, request.cap - state.used_by(tenant, name))
        # In the same transaction as the reservation: a ledger never holds one line without the other.
        if sealed is None:
            self._seal(writer, terms)
        return most

    def _reservation(self, request: TicketRequest, count: int) -> dict[str, Any]:
        """Returns the body of a line that reserves tickets."""
        body: dict[str, Any] = {"component": request.component, "template": request.slot[0], "label": request.slot[1]}
        body |= {"count": count, "amount": request.amount}
        if request.tenant is not None:
            body["tenant"] = request.tenant
        if request.blocks is not None:
            body["blocks"] = list(request.blocks)
        if request.wrappers:
            body["allowed_wrappers"] = list(request.wrappers)
        if self.store.durable:
            # Makes the lines of two diverging copies differ, even for equal requests in the same second.
            body["nonce"] = secrets.token_hex(8)
            body["holder"] = process_name()
        return body

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
        promised = writer.state.promised(extent_of(terms.components))
        for name, spent in zip(("epsilon", "delta"), promised, strict=True):
            requested, remaining = getattr(terms, name), exact(getattr(self.header, name)) - spent
            if exact(requested) > remaining:
                raise budget_exceeded(
                    name, requested, max(remaining, Fraction(0)), "Other processes sealed shares first."
                )
        writer.append(SEAL, terms.to_dict())

    def commit(self, reservation: int, count: int, *, wait: bool = False) -> None:  # noqa: ARG002  an override does
        """Notes that what tickets released is stored."""
        with self.exclusive() as writer:
            writer.append(COMMIT, {"reservation": reservation, "count": count})

    def committed(self, component: Component, slot: Slot) -> int:
        """Returns how many tickets were used and committed, in every process."""
        with self.lock:
            state = self.refresh()
            if component.name not in state.shares:
                return 0
            return int(state.taken(component.name, slot)) - self._unsettled(state, component.name, slot)

    def _unsettled(self, state: LedgerState, component: str, slot: Slot) -> int:
        """Returns how many tickets of a slot are reserved, and neither committed nor given back."""
        return state.unsettled(component, slot)

    def remaining(
        self, component: Component, slot: Slot, blocks: Blocks | None = None, run_cap: int | None = None
    ) -> Amount:
        """Returns what of a slot can still be reserved here.

        Of a stream: for these blocks, at most `run_cap` of them; None: for any.
        """
        allowance(component, slot)  # refuses a slot that the component has not
        state = self.refresh()
        with self.lock:  # no line that moves tickets between the two is written meanwhile
            return self._remaining(state, component, slot, blocks, run_cap)

    def _remaining(
        self, state: LedgerState, component: Component, slot: Slot, blocks: Blocks | None, run_cap: int | None
    ) -> Amount:
        left = state.available(component, slot, blocks=blocks, run_cap=run_cap)
        return left if state.windows is not None and blocks is None else max(left, 0)

    def sealed_delta(self, component: str) -> float:
        """Returns the delta of a share of which tickets were granted here; 0 where the ledger cannot be read now."""
        share = self._state.shares.get(component)  # not there while the ledger is read anew
        try:
            return (share or self.refresh().shares[component]).terms.delta
        except LedgerError:
            return 0.0  # the ticket is granted: it needs a reservation, to be given back

    def used_by(self, tenant: str, component: str) -> int:
        """Returns how many tickets of a component a tenant has."""
        return self.refresh().used_by(tenant, component)

    def give_back(self, grant: Grant, count: int) -> None:
        """Lets tickets that never burnt return to their slot."""
        with self.exclusive() as writer:
            writer.append(GIVE_BACK, {"reservation": grant.line.seq, "count": count})


_PROCESS_NAMES = PerProcess(lambda: secrets.token_hex(8))


def process_name() -> str:
    """Returns a random name of this process, which says in its reservations' lines who holds them."""
    return _PROCESS_NAMES.here


_SHOWN = frozenset({"extra_fields", "label_key", "labels", "public_size", "text_key"})
"""What a declaration says of how records are shown and counted, and not of who is protected."""


def _rule_of(declaration: Mapping[str, Any]) -> Any:
    """Returns the version of the rule by which units are split; None: they are not."""
    origin = declaration.get("redeclared")
    return origin.get("rule") if isinstance(origin, Mapping) else None


def check_declared(known: Mapping[str, Any] | None, declaration: Mapping[str, Any]) -> None:
    """Refuses a declaration that differs from the bound one; a missing key counts as None."""
    if known is None:
        return
    changed = [key for key in {**known, **declaration} if known.get(key) != declaration.get(key)]
    if changed:
        named = ["fields" if key == "extra_fields" else key for key in changed]  # as they are declared
        advice = "Declare it as before, and give a different data set a dataset_id (--dataset-id) of its own."
        if set(changed) <= _SHOWN:
            advice = (
                "Declare it as before, or give the same records, declared otherwise, a dataset_id (--dataset-id) of "
                "their own: what all data sets of a ledger spend adds up."
            )
        elif all(_rule_of(one) for one in (known, declaration)) and _rule_of(known) != _rule_of(declaration):
            advice = (
                "Another version of this package split these units by another rule: give the data set a dataset_id "
                "(--dataset-id) that this ledger does not hold. What all data sets of a ledger spend adds up."
            )
        raise PrivacyBudgetMismatchError(
            f"{declaration['dataset_id']!r}: expected the declaration this ledger holds, found another in {named}. "
            f"{advice}"
        )
