"""Writes a ledger: decides, refuses or appends inside one exclusive transaction, and keeps tickets that are leased."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import secrets
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

from langchain_dpicl.exceptions import (
    ConfigurationError,
    LedgerError,
    LedgerRollbackError,
    LedgerUnavailableError,
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
    UPGRADE,
    LedgerState,
    Slot,
    Undo,
    allowance,
    unit_cost,
)
from langchain_dpicl.privacy.ledger.store import LedgerHeader, LedgerRecord, LedgerStore, LedgerTransaction, in_blocks
from langchain_dpicl.privacy.ledger.tickets import Blocks, Component, ShareTerms, extent_of

MOST_HELD = 64
"""Most tickets of one slot that a process keeps, where nothing else is said."""

LEAST_LEFT = 32
"""A lease takes at most one of so many tickets that are left: near the end every line reserves one."""

HORIZON = 1.0
"""A lease takes what is used in so many seconds at the pace of the one before."""

GROWTH = 4
"""A lease takes at most so many times what the one before took: two requests at once are no pace."""

IDLE_SECONDS = 5.0
"""Tickets of which none was taken for so long are given back."""

_FEW_LOTS = 1024


class PurseKey(NamedTuple):
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
    """Tickets that a line reserved: `index` is the first one's place among those of the line.

    With a lease it is one of several, and may go back into the purse.
    """

    line: LedgerRecord
    index: int = 0
    lease: Lease | None = None


@dataclass(slots=True)
class _Lot:
    """The tickets of one key, and what decides how many the next lease takes."""

    unit: Amount = 0
    sealed: Component | None = None
    grants: list[Grant] = field(default_factory=list)
    size: int = 0
    leased: float = 0.0
    taken: float = 0.0


@dataclass(slots=True, eq=False)
class Lease:
    """A lease: how many tickets one line reserves, and what becomes of that line.

    Attributes:
      key: for whom.
      unit: what one ticket takes of its slot.
      count: how many, with the one that was asked for; fewer once some went back.
      entry: number of its line.
      seen_in: the state that has its line once that is visible; before that nothing of it goes back.
      lot: where its tickets go.
    """

    key: PurseKey
    unit: Amount
    count: int = 1
    entry: int = 0
    seen_in: LedgerState | None = None
    lot: _Lot | None = None


class Purse:
    """The leased tickets of one process. Safe for threads; a forked child starts with an empty one.

    What it holds is counted when it is asked, so that an interrupt at any line leaves no wrong count.

    Formal guarantees:
      - A ticket is handed out once, and only after `fill`, which is called when its line is durable.
      - It is handed out to those only for whom the same line would be written.
      - At most `most_held` tickets of a slot are in it, over all keys.
      - What `remove` returned is not handed out.
      - An interrupt may lose tickets: they stay charged. It gives none away.
    """

    def __init__(self, most_held: int) -> None:
        self.most_held = most_held
        self._lock = threading.Lock()
        self._lots: dict[PurseKey, _Lot] = {}
        self._full: dict[PurseKey, _Lot] = {}  # of these all that hold tickets, and some that held any
        self._pending: set[Lease] = set()  # of which it is not known yet whether their lines are durable
        self._many = _FEW_LOTS
        self._is_closed = False

    def sealed(self, key: PurseKey) -> Component | None:
        """Returns the sealed terms of the tickets of a key, or None if there are none."""
        lot = self._full.get(key)
        return lot.sealed if lot is not None and lot.grants else None

    def take(self, key: PurseKey) -> Grant | None:
        """Hands out one ticket, or None."""
        with self._lock:
            lot = self._full.get(key)
            if lot is None or not lot.grants or self._is_closed:
                return None
            lot.taken = time.monotonic()
            grant = lot.grants.pop()
            if not lot.grants:
                del self._full[key]
            return grant

    def put_back(self, grant: Grant) -> bool:
        """Takes a ticket that never burnt in again; False where it has to go back by a line."""
        lease = grant.lease
        with self._lock:
            if lease is None or not self._has(lease) or self._is_closed or self._room(lease.key) < 1:
                return False
            self._add(lease, grant)
            return True

    def _has(self, lease: Lease) -> bool:
        """Whether the purse was not emptied since."""
        return lease.lot is not None and self._lots.get(lease.key) is lease.lot

    def _add(self, lease: Lease, *grants: Grant) -> None:
        if lease.lot is not None:
            self._full[lease.key] = lease.lot
            lease.lot.grants.extend(grants)

    def _room(self, key: PurseKey) -> int:
        """Returns how many more tickets of a slot may be in it, with those that are pending."""
        place = key.component, key.slot
        held = sum(len(lot.grants) for each, lot in self._full.items() if (each.component, each.slot) == place)
        awaited = (lease.count - 1 for lease in self._pending if (lease.key.component, lease.key.slot) == place)
        return self.most_held - held - sum(awaited)

    def ask(self, lease: Lease, most: int) -> None:
        """Sets the count of a lease: what is used in a second, at the pace of the last one; one to `most`."""
        with self._lock:
            self._forget_old()
            lot = lease.lot = self._lots.setdefault(lease.key, _Lot(lease.unit))
            is_paced = all(each.key != lease.key for each in self._pending)
            size = 1
            if is_paced and not self._is_closed:
                took = max(time.monotonic() - lot.leased, HORIZON / GROWTH)
                size = int(lot.size * HORIZON / took)
            lease.count = max(1, min(size, most, self._room(lease.key)))
            if is_paced:
                lot.size = lease.count
            self._pending.add(lease)

    def fill(self, lease: Lease, line: LedgerRecord, sealed: Component | None) -> Grant:
        """Takes in the tickets of a lease whose line is durable, except for the one that is returned."""
        with self._lock:
            self._pending.discard(lease)
            mine = lease if lease.count > 1 else None
            if lease.lot is not None:
                lease.lot.leased = lease.lot.taken = time.monotonic()
                if mine is not None and not self._is_closed and self._has(lease):
                    lease.lot.sealed = sealed
                    self._add(lease, *(Grant(line, index, lease) for index in reversed(range(1, lease.count))))
        return Grant(line, 0, mine)

    def give_up(self, lease: Lease) -> None:
        """Ends a lease whose line may not be durable: nothing is handed out, and the next one is of one ticket."""
        with self._lock:
            self._pending.discard(lease)
            if lease.lot is not None:
                lease.lot.size = 0

    def remove(
        self, state: LedgerState, is_wanted: Callable[[PurseKey], bool] = lambda _: True, *, idle: bool = False
    ) -> Mapping[int, int]:
        """Removes tickets, those of idle keys or of all that are wanted; returns their number by line.

        Called before the line that gives them back is written: whatever becomes of it, none of them is handed out. Of a
        lease that is pending all go back but the one that was asked for, where `state`, to which the line will be
        added, has the lease's: the disk keeps both, or not the later one.
        """
        removed: Counter[int] = Counter()
        with self._lock:
            before = time.monotonic() - IDLE_SECONDS
            for key, lot in list(self._full.items()):
                if is_wanted(key) and (not idle or lot.taken < before):
                    grants, lot.grants = lot.grants, []
                    del self._full[key]
                    removed.update(grant.line.seq for grant in grants)
            for lease in self._pending:
                if not idle and lease.count > 1 and lease.seen_in is state and is_wanted(lease.key):
                    rest, lease.count = lease.count - 1, 1
                    removed[lease.entry] += rest
        return removed

    def empty(self) -> None:
        """Drops everything: it stays charged, and nothing of it is handed out or taken in again."""
        with self._lock:
            self._full, self._lots, self._pending = {}, {}, set()

    def close(self) -> None:
        """Takes nothing in and hands nothing out from now on."""
        with self._lock:
            self._is_closed = True

    def holds(self, is_wanted: Callable[[PurseKey], bool] = lambda _: True, *, idle: bool = False) -> bool:
        """Returns whether anything that is wanted is in it or pending, or anything of which none was taken lately."""
        with self._lock:
            before = time.monotonic() - IDLE_SECONDS
            full = self._full.items()
            if any(lot.grants and is_wanted(key) and (not idle or lot.taken < before) for key, lot in full):
                return True
            return not idle and any(lease.count > 1 and is_wanted(lease.key) for lease in self._pending)

    def cost(self, component: str, slot: Slot, blocks: Blocks | None = None) -> Amount:
        """Returns what the tickets of a slot, or those for blocks, take of it: their number, mu squared or rho."""
        with self._lock:
            of_slot = [(key, lot) for key, lot in self._full.items() if (key.component, key.slot) == (component, slot)]
            lots = [lot for key, lot in of_slot if blocks is None or key.blocks == blocks]
            return sum(len(lot.grants) * lot.unit for lot in lots)

    def of_tenant(self, component: str, tenant: str) -> int:
        """Returns how many tickets of a component are in it for a tenant."""
        with self._lock:
            full = self._full.items()
            return sum(len(lot.grants) for key, lot in full if (key.component, key.tenant or "") == (component, tenant))

    def by_entry(self) -> Mapping[int, int]:
        """Returns how many tickets are in it, by the number of their line."""
        with self._lock:
            return Counter(grant.line.seq for lot in self._full.values() for grant in lot.grants)

    def _forget_old(self) -> None:
        """Drops keys that hold nothing and were not asked for lately, where there are many."""
        if len(self._lots) < self._many:
            return
        old, awaited = time.monotonic() - HORIZON, {lease.key for lease in self._pending}
        kept = {key: lot for key, lot in self._lots.items() if lot.grants or key in awaited or lot.leased > old}
        self._full = {key: lot for key, lot in kept.items() if lot.grants}
        self._lots, self._many = kept, max(_FEW_LOTS, 2 * len(kept))


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
                "Leave the `with budget.plan()` block, then run the component."
            )
            raise ConfigurationError(msg)
        return self.terms


RIDE_SECONDS = 5.0
"""Commits that waited so long are written by the next call, whatever it is."""


@dataclass(slots=True, eq=False)
class _Carried:
    """Commits that were written in one transaction, and the first of their lines."""

    line: LedgerRecord
    commits: Mapping[int, int]
    is_durable: bool = False
    is_visible: bool = False


class LineAppender:
    """Appends lines and applies each of them to the state at once; takes them back where they may not stand."""

    def __init__(
        self,
        view: LedgerTransaction,
        state: LedgerState,
        waiting: Mapping[int, int],
        applied: Callable[[Sequence[LedgerRecord]], None],
    ) -> None:
        self.view = view
        self.state = state
        self.carried: _Carried | None = None
        self.lease: Lease | None = None  # that the lines reserve
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
        if self._waiting and not self._undos:
            commits = self._waiting.items()
            lines = [self._append(COMMIT, {"reservation": entry, "count": count}) for entry, count in commits]
            self.carried = _Carried(lines[0], self._waiting)

    def add_snapshot(self) -> None:
        """Adds a snapshot, of all lines up to here, if there are lines and it is time for one."""
        if self._undos and self.state.needs_snapshot:
            self._append(SNAPSHOT, self.state.snapshot())

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
        self._applied((record,))
        return record


class LedgerWriter:
    """Serialises this process's reads and writes of one ledger. Safe for threads, and for processes on a durable store.

    A line is visible once its transaction was committed, and durable once the disk holds it. A store with `flush` gives
    its lock up between the two, so that other writers go on meanwhile; with any other store a commit is both. Stores
    write their lines to the disk in order:

      (P) Where line n is durable, every visible line before it is durable.

    A commit of tickets waits in this process and is written in the transaction of the next line. It is lost where the
    process ends first: its ticket then stays charged and open, as if the process had ended before the commit.

    Where one refundable ticket after another is reserved, a line reserves several, which wait in the purse of this
    process (a lease). What it has not used it gives back: when it closes, when nobody asks for more of its kind, and
    before it refuses a request. Nobody else gives it back, since nobody else knows what was used; it is lost where the
    process ends first.

    Formal guarantees:
      (G) Tickets are granted only after the line that charges them is durable. By (P) so is every line on which that
          was decided. What a crash loses was granted to nobody. Tickets enter the purse after that, too.
      - A ledger on which a durable line that was seen before is gone or changed grants nothing.
    """

    def __init__(
        self,
        store: LedgerStore,
        header: LedgerHeader,
        *,
        allowed_wrappers: Callable[[], Sequence[str]] = tuple,
        most_held: int = 1,
    ) -> None:
        # `allowed_wrappers` names the modules that the operator allows around private calls; reservations record them.
        self.store = store
        self.header = header
        self._allowed_wrappers = allowed_wrappers
        self._purse = Purse(most_held)
        self._looked = 0.0  # when it was last found out whether tickets lie idle
        self._pid = os.getpid()
        self._lock: AbstractContextManager[bool] = threading.RLock()
        self._locks = {self._pid: self._lock}  # by process
        self._state = LedgerState(header)
        self._seen = (0, header.digest)  # last durable line ever seen, kept when the state is read anew
        self._visible = self._state, *self._seen  # last line read or written, and the state that has it
        self._flushing: AbstractContextManager[bool] = threading.Lock()
        self.flushes = 0  # how often this process waited for the disk
        self._waiting: dict[int, int] = {}  # tickets whose commit waits, by the line of their reservation
        self._waiting_since = 0.0
        self._doubtful: list[_Carried] = []  # those written of which it is not known whether they are durable
        self._agreed: dict[str, tuple[Component, Component]] = {}
        self._is_broken = False  # whether the last `verify` found a fault

    def __del__(self) -> None:
        # Nothing is written here: this may run within any call of any thread, also in a transaction of the same file.
        if not sys.is_finalizing() and self.__dict__.get("_pid") == os.getpid() and self._has_waiting(is_closing=True):
            _DROPPED.append(self)

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
                self._waiting, self._doubtful = {}, []  # those of the parent, which writes them
                self._purse = Purse(self._purse.most_held)  # as is what it holds
                self._flushing = threading.Lock()
                self._lock = lock
                self._pid = here  # last: other threads of the child wait above until then

    def _start_anew(self) -> None:
        """Forgets what was read, so that the ledger is read from its first line."""
        self._state = LedgerState(self.header)

    # The classes of `extensions.ledger_anchor` override the five methods below, and `_may_skip_to`.

    @contextlib.contextmanager
    def _turn(self, lock: AbstractContextManager[bool]) -> Iterator[None]:
        """Waits until this thread may read or write, or may wait for the disk."""
        with lock:
            try:
                yield
            except LedgerUnavailableError:
                raise
            except LedgerError:
                self._purse.empty()  # of a broken ledger nothing is granted
                raise

    def _read(self, source: LedgerStore | LedgerTransaction, *, is_writing: bool = False) -> None:  # noqa: ARG002
        """Applies new lines, before the state is used or a line is appended."""
        self._catch_up(source)

    def _applied(self, lines: Sequence[LedgerRecord]) -> None:
        """Called with all lines that were read or written, some at a time."""

    def _before_grant(self, state: LedgerState, seq: int) -> None:
        """Called when line `seq` of `state` is durable, before anything is granted on it."""

    def _verify_lines(self) -> None:
        """Checks every line from the first on."""
        self._recomputed()
        self.refresh()

    def refresh(self) -> LedgerState:
        """Returns the state after every committed line; refuses a ledger that was rolled back or changed."""
        write_dropped()
        with self._turn(self.lock):
            self._read(self.store)
            state, seq, head = self._visible
        self._flush(state, seq, head)
        self._write_late()
        return self._state

    def check_ready(self) -> None:
        """Reads all that the next grant rests on, also where it is read before a grant alone, as an anchor is."""
        self.refresh()
        with self._turn(self.lock):
            self._read(self.store, is_writing=True)

    def _write_late(self) -> None:
        """Writes commits that waited for long, and gives back tickets that nobody asks for."""
        now = time.monotonic()
        is_late = bool(self._waiting or self._doubtful) and now - self._waiting_since > RIDE_SECONDS
        if is_late:
            self._waiting_since = now
        if self._is_time_to_look():
            is_late = is_late or self._purse.holds(idle=True)
        if is_late:
            # A reader needs none of it: what cannot be written now waits for the next line.
            with contextlib.suppress(LedgerUnavailableError):
                self.write_waiting()

    def _is_time_to_look(self) -> bool:
        """Whether it is time to look for idle tickets in the purse: once in so many seconds."""
        now = time.monotonic()
        if now - self._looked <= RIDE_SECONDS:
            return False
        self._looked = now
        return True

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
                    writer = LineAppender(view, self._state, self._waiting, self._applied)
                    yield writer
                    if hasattr(self.store, "last_snapshot"):
                        writer.add_snapshot()
                    if writer.carried is not None:
                        self._waiting = {}
                        self._doubtful.append(writer.carried)
            except BaseException:
                # Only the store knows whether the lines were committed: what stands is read again.
                if writer is not None:
                    self._take_back(writer)
                raise
            state, seq, head = self._note_visible()
            if writer.lease is not None:
                writer.lease.seen_in = state
        self._flush(state, seq, head)
        if writer.carried is not None:
            writer.carried.is_durable = True
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
        if self._doubtful:
            self._settle_doubts(source)
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
            f"ledger {self.header.ledger_id}: lines seen before are gone or changed. Nothing is granted."
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

    def _settle_doubts(self, source: LedgerStore | LedgerTransaction) -> None:
        """Finds out which of the doubtful commits stand; the others wait again.

        Outside of a transaction one that is not there may still come: the database may be at work on it.
        """
        doubtful: list[_Carried] = []
        lost: list[_Carried] = []
        is_early = hasattr(self.store, "flush")
        for each in self._doubtful:
            if each.is_durable:
                continue
            line = next(iter(source.records(each.line.seq - 1, limit=1)), None)
            each.is_visible = line is not None and line.hash == each.line.hash
            if not each.is_visible:
                (doubtful if source is self.store else lost).append(each)
            elif is_early and each.line.seq > self._seen[0]:
                doubtful.append(each)  # a database server that restarts may still lose it
        self._doubtful = doubtful  # only after the last read, which may fail
        for each in lost:
            for entry, count in each.commits.items():
                self._note_waiting(entry, count)

    def upgrade(self) -> bool:
        """Brings a ledger of format 1 to format 2; returns whether it was one."""
        with self.exclusive() as writer:
            if writer.state.format > 1:
                return False
            writer.append(UPGRADE, {"format": 2})
            return True

    def verify(self) -> None:
        """Recomputes the whole chain and every rule from the first line, and reads all of the store's file.

        Where it finds a fault, nothing is reserved until it finds none.
        """
        try:
            self._verify_all()
        except LedgerUnavailableError:
            raise
        except LedgerError:
            self._is_broken = True
            self._purse.empty()
            raise
        self._is_broken = False

    def _verify_all(self) -> None:
        check: Callable[[], None] | None = getattr(self.store, "check", None)
        if check is not None:
            check()
        if self.store.header() != self.header:
            raise LedgerError(f"ledger {self.header.ledger_id}: the header was changed. Nothing is granted.")
        with self.lock:
            self._verify_lines()

    def _recomputed(self, number: int = 0) -> str | None:
        """Applies every line to a new state; returns the hash of line `number`, None where there is none."""
        fresh = LedgerState(self.header)
        head = self.header.digest if number == 0 else None
        for block in in_blocks(self.store):
            if fresh.seq < number <= fresh.seq + len(block):
                head = block[number - fresh.seq - 1].hash
            fresh.apply_all(block)
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
        refundable: bool = False,
        blocks: Blocks | None = None,
        run_cap: int | None = None,
    ) -> Grant:
        """Reserves tickets durably, with a line or from the purse; the first reservation seals the share.

        What was leased for other blocks is not granted for these: their windows differ.
        """
        if self._pid != os.getpid():
            self._move_in()  # before the purse is looked at: that of the parent is not this process's to give back
        write_dropped()
        if self._is_broken:
            self.verify()
        wrappers = tuple(self._allowed_wrappers())
        key = PurseKey(component.name, slot, float(amount), tenant, tenant_cap, wrappers, blocks, run_cap)
        is_leased = refundable and count == 1 and self._purse.most_held > 1 and self.store.durable
        if is_leased and (grant := self._from_purse(standing, component, key)) is not None:
            return grant
        while True:
            try:
                return self._by_line(standing, component, key, count=count, is_leased=is_leased)
            except PrivacyBudgetExceededError as error:
                # What this process holds comes first: what is refused then is left to nobody.
                if not self._give_back_held(key, of_tenant=isinstance(error, TenantCapExceededError)):
                    raise

    def _from_purse(self, standing: ShareStatus, component: Component, key: PurseKey) -> Grant | None:
        """Returns a ticket that a durable line of this process reserved for the same request, or None."""
        sealed = self._purse.sealed(key)
        if sealed is None:
            return None
        standing.usable_terms(component.name)
        self._check_same_terms(component, sealed)
        grant = self._purse.take(key)
        self._write_late()  # after that: tickets of which one was taken are not idle
        return grant

    def _by_line(
        self, standing: ShareStatus, component: Component, key: PurseKey, *, count: int, is_leased: bool
    ) -> Grant:
        """Writes a line that reserves tickets; what it leases beyond `count` enters the purse once it is durable."""
        purse = self._purse
        lease = Lease(key, unit_cost(component.kind, key.amount)) if is_leased else None
        try:
            with self.exclusive() as writer:
                terms = standing.usable_terms(component.name)
                sealed = writer.state.sealed_component(component.name)
                most = self._most(writer.state, component, key, count=count)
                # In the same transaction as the reservation: a ledger never holds one line without the other.
                if sealed is None:
                    self._seal(writer, terms)
                if self._is_time_to_look():
                    _return_tickets(writer, purse.remove(writer.state, idle=True))
                if key.blocks is not None:  # what was leased for an earlier run
                    _return_tickets(writer, purse.remove(writer.state, functools.partial(_is_of_other_blocks, key)))
                if lease is not None:
                    purse.ask(lease, most)
                    count = lease.count
                line = writer.append(RESERVE, self._reservation(key, count))
                if lease is not None:
                    lease.entry, writer.lease = line.seq, lease
                sealed = writer.state.sealed_component(component.name)
            if lease is None:
                return Grant(line)
            _watch(self)
            return purse.fill(lease, line, sealed)
        except BaseException:
            if lease is not None:
                purse.give_up(lease)
            raise

    def _most(self, state: LedgerState, component: Component, key: PurseKey, *, count: int) -> int:
        """Returns how many tickets a lease may take, or raises the refusal of `count` of them."""
        name, slot, unit = component.name, key.slot, unit_cost(component.kind, key.amount)
        sealed = state.sealed_component(name)
        if sealed is not None:
            self._check_same_terms(component, sealed)
        asked: dict[str, Any] = {"blocks": key.blocks, "run_cap": key.run_cap}
        state.check_request(component, slot, unit * count, **asked)
        remaining = state.available(component, slot, **asked)
        if unit * count > remaining:
            held = state.unsettled(name, slot) - self._waiting_of(state, name, slot)
            raise too_few(component, slot, unit * count, remaining, held)
        most = int(remaining // unit) // LEAST_LEFT
        if key.cap is None:
            return most
        tenant = key.tenant or ""
        check_tenant(state, component, tenant, count=count, cap=key.cap)
        return min(most, (key.cap - state.used_by(tenant, name)) // LEAST_LEFT)

    def _reservation(self, key: PurseKey, count: int) -> dict[str, Any]:
        """Returns the body of a line that reserves tickets."""
        body: dict[str, Any] = {"component": key.component, "template": key.slot[0], "label": key.slot[1]}
        body |= {"count": count, "amount": key.amount}
        if key.tenant is not None:
            body["tenant"] = key.tenant
        if key.blocks is not None:
            body["blocks"] = list(key.blocks)
        if key.wrappers:
            body["allowed_wrappers"] = list(key.wrappers)
        if self.store.durable:
            # Makes the lines of two diverging copies differ, even for equal requests in the same second.
            body["nonce"] = secrets.token_hex(8)
            body["holder"] = process_name()
        return body

    def _give_back_held(self, refused: PurseKey, *, of_tenant: bool) -> bool:
        """Gives back what a refused request could use: of its tenant, or of its slot; returns whether any was."""
        name, tenant, purse = refused.component, refused.tenant or "", self._purse

        def is_wanted(key: PurseKey) -> bool:
            return key.component == name and ((key.tenant or "") == tenant if of_tenant else key.slot == refused.slot)

        if not purse.holds(is_wanted):
            return False
        with self.exclusive() as writer:
            removed = purse.remove(writer.state, is_wanted)
            _return_tickets(writer, removed)
        return bool(removed)

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

    def return_component(self, writer: LineAppender, name: str) -> None:
        """Gives back all tickets of a component that this process holds."""
        _return_tickets(writer, self._purse.remove(writer.state, lambda key: key.component == name))

    def commit(self, reservation: int, count: int, *, wait: bool = False) -> None:
        """Notes that what tickets released is stored; the line waits for the next one where the store is durable.

        What is noted is written some time, also where `wait` ends in an error.
        """
        with self.lock:
            self._note_waiting(reservation, count)
        if wait or not self.store.durable:
            self.write_waiting()

    def _note_waiting(self, reservation: int, count: int) -> None:
        if not self._waiting:
            self._waiting_since = time.monotonic()
            _watch(self)
        self._waiting[reservation] = self._waiting.get(reservation, 0) + count

    def write_waiting(self, *, is_closing: bool = False) -> None:
        """Writes the commits that wait, and gives back tickets of the purse: idle ones, or all where it closes."""
        with self.lock:
            purse = self._purse
            if is_closing:
                purse.close()
            is_needed = self._has_waiting(is_closing=is_closing)
        if is_needed:
            with self.exclusive() as writer:
                writer.bring_waiting()
                _return_tickets(writer, purse.remove(writer.state, idle=not is_closing))

    def _has_waiting(self, *, is_closing: bool) -> bool:
        """Whether commits wait, or tickets of the purse have to go back: idle ones, or all where it closes."""
        if self._waiting or any(not each.is_durable for each in self._doubtful):
            return True
        return self._purse.holds(idle=not is_closing)

    def waiting(self, entry: int) -> int:
        """Returns how many tickets of a reservation wait for their commit to be written."""
        doubtful = (each.commits for each in self._doubtful if not (each.is_visible or each.is_durable))
        return sum(waiting.get(entry, 0) for waiting in (self._waiting, *doubtful))

    def committed(self, component: Component, slot: Slot) -> int:
        """Returns how many tickets were used and committed, in every process; those that wait here included."""
        with self.lock:
            state = self.refresh()
            if component.name not in state.shares:
                return 0
            reserved = int(state.taken(component.name, slot))
            waiting = self._waiting_of(state, component.name, slot)
            return reserved - state.unsettled(component.name, slot) + waiting

    def _waiting_of(self, state: LedgerState, component: str, slot: Slot) -> int:
        """Returns how many tickets of a slot wait for their commit to be written."""
        entries = {*self._waiting, *(entry for each in self._doubtful for entry in each.commits)}
        return sum(self.waiting(entry) for entry in entries if state.is_of(entry, component, slot))

    def remaining(
        self, component: Component, slot: Slot, blocks: Blocks | None = None, run_cap: int | None = None
    ) -> Amount:
        """Returns what of a slot can still be reserved here: what the ledger has left, and what is in the purse.

        Of a stream: for these blocks, at most `run_cap` of them; None: for any.
        """
        allowance(component, slot)  # refuses a slot that the component has not
        state = self.refresh()
        with self.lock:  # no line that moves tickets between the two is written meanwhile
            left = state.available(component, slot, blocks=blocks, run_cap=run_cap)
            if state.windows is not None and blocks is None:
                return left
            return max(left, 0) + self._purse.cost(component.name, slot, blocks)

    def used_by(self, tenant: str, component: str) -> int:
        """Returns how many tickets of a component a tenant has, without those that are in the purse."""
        state = self.refresh()
        with self.lock:
            return state.used_by(tenant, component) - self._purse.of_tenant(component, tenant)

    def kept(self) -> Mapping[int, int]:
        """Returns how many tickets are in the purse, by the number of their line."""
        return self._purse.by_entry()

    def give_back(self, grant: Grant, count: int) -> None:
        """Lets tickets that never burnt return to the purse, or to their slot."""
        if not self._purse.put_back(grant):
            with self.exclusive() as writer:
                _return_tickets(writer, {grant.line.seq: count})


def _is_of_other_blocks(wanted: PurseKey, key: PurseKey) -> bool:
    """Whether tickets of the same slot were leased for other blocks."""
    return (key.component, key.slot) == (wanted.component, wanted.slot) and key.blocks != wanted.blocks


def _return_tickets(writer: LineAppender, tickets: Mapping[int, int]) -> None:
    """Appends the lines that give tickets back, by the line that reserved them."""
    for entry, count in tickets.items():
        writer.append(GIVE_BACK, {"reservation": entry, "count": count})


_PROCESS_NAMES: dict[int, str] = {}


def process_name() -> str:
    """Returns a random name of this process, which says in its reservations' lines who holds them."""
    # By number, so that a forked child has one of its own.
    return _PROCESS_NAMES.setdefault(os.getpid(), secrets.token_hex(8))


# Each with its store: of objects that refer to each other in a circle, Python might end the store first.
_WITH_WAITING: weakref.WeakKeyDictionary[LedgerWriter, LedgerStore] = weakref.WeakKeyDictionary()
_DROPPED: deque[LedgerWriter] = deque()
"""Those to which nobody refers any more, and which have something to write."""

_ENDS_HERE: list[int] = []
"""The process in which `multiprocessing` knows of `write_all_waiting`: its children end without `atexit`."""


def _watch(writer: LedgerWriter) -> None:
    """Writes what waits in a writer when this process ends, unless it is killed."""
    _WITH_WAITING[writer] = writer.store
    # None as well while another thread imports that module: the next call sees to it.
    here, finalize = [os.getpid()], getattr(sys.modules.get("multiprocessing.util"), "Finalize", None)
    if finalize is not None and here != _ENDS_HERE:
        finalize(None, write_all_waiting, exitpriority=0)
        _ENDS_HERE[:] = here


@atexit.register
def write_all_waiting() -> None:
    """Writes what waits and gives back what is held when the interpreter ends; what cannot be written stays charged."""
    while _DROPPED:
        write_dropped()
    for writer in list(_WITH_WAITING):
        _is_written(writer)


def write_dropped() -> None:
    """Does the same for writers to which nobody refers any more, each once; part of the next call of another one.

    That call waits for one store that is out, not for those of all writers: the others are written by the next calls.
    """
    with contextlib.suppress(IndexError):  # another thread may be first
        while _DROPPED and _is_written(_DROPPED.popleft()):
            pass


def _is_written(writer: LedgerWriter) -> bool:
    """Writes the last lines of a writer, and returns whether that worked."""
    try:
        writer.write_waiting(is_closing=True)
    except Exception:  # noqa: BLE001  whatever a store of others raises is no fault of the call that came next
        return False
    return True


_SHOWN = frozenset({"extra_fields", "label_key", "labels", "public_size", "text_key"})
"""What a declaration says of how records are shown and counted, and not of who is protected."""


def _check_declared(known: Mapping[str, Any] | None, declaration: Mapping[str, Any]) -> None:
    """Refuses a declaration that differs from the bound one; a missing key counts as None."""
    if known is None:
        return
    changed = [key for key in {**known, **declaration} if known.get(key) != declaration.get(key)]
    if changed:
        advice = "Declare it as before, and give a different data set a dataset_id (--dataset-id) of its own."
        if set(changed) <= _SHOWN:
            advice = (
                "Declare it as before, or give the same records, declared otherwise, a dataset_id (--dataset-id) of "
                "their own: what all data sets of a ledger spend adds up."
            )
        raise PrivacyBudgetMismatchError(
            f"{declaration['dataset_id']!r}: expected the declaration this ledger holds, found another in {changed}. "
            f"{advice}"
        )
