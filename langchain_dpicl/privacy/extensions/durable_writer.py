"""What a writer adds for a ledger on disk: leases, commits that wait for the next line, outages, and `verify`."""

from __future__ import annotations

import atexit
import contextlib
import functools
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, cast

from langchain_dpicl._opaque import this_process
from langchain_dpicl.exceptions import (
    LedgerError,
    LedgerUnavailableError,
    PrivacyBudgetExceededError,
    TenantCapExceededError,
)
from langchain_dpicl.privacy._validate import Amount
from langchain_dpicl.privacy.ledger.state import COMMIT, GIVE_BACK, RESERVE, LedgerState, Slot, unit_cost
from langchain_dpicl.privacy.ledger.store import LedgerHeader, LedgerRecord, LedgerStore, LedgerTransaction, in_blocks
from langchain_dpicl.privacy.ledger.tickets import Blocks, Component
from langchain_dpicl.privacy.ledger.writer import Grant, LedgerWriter, LineAppender, ShareStatus, TicketRequest

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


@dataclass(frozen=True, slots=True)
class LeasedGrant(Grant):
    """A ticket of a lease, which may go back into the purse."""

    lease: Lease | None = None


@dataclass(slots=True)
class _Lot:
    """The tickets of one key, and what decides how many the next lease takes."""

    unit: Amount = 0
    sealed: Component | None = None
    grants: list[LeasedGrant] = field(default_factory=list)
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

    key: TicketRequest
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
        self._lots: dict[TicketRequest, _Lot] = {}
        self._full: dict[TicketRequest, _Lot] = {}  # of these all that hold tickets, and some that held any
        self._pending: set[Lease] = set()  # of which it is not known yet whether their lines are durable
        self._many = _FEW_LOTS
        self._is_closed = False

    def sealed(self, key: TicketRequest) -> Component | None:
        """Returns the sealed terms of the tickets of a key, or None if there are none."""
        lot = self._full.get(key)
        return lot.sealed if lot is not None and lot.grants else None

    def take(self, key: TicketRequest) -> LeasedGrant | None:
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

    def put_back(self, grant: LeasedGrant) -> bool:
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

    def _add(self, lease: Lease, *grants: LeasedGrant) -> None:
        if lease.lot is not None:
            self._full[lease.key] = lease.lot
            lease.lot.grants.extend(grants)

    def _room(self, key: TicketRequest) -> int:
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

    def fill(self, lease: Lease, line: LedgerRecord, sealed: Component | None) -> LeasedGrant:
        """Takes in the tickets of a lease whose line is durable, except for the one that is returned."""
        with self._lock:
            self._pending.discard(lease)
            mine = lease if lease.count > 1 else None
            if lease.lot is not None:
                lease.lot.leased = lease.lot.taken = time.monotonic()
                if mine is not None and not self._is_closed and self._has(lease):
                    lease.lot.sealed = sealed
                    self._add(lease, *(LeasedGrant(line, index, lease) for index in reversed(range(1, lease.count))))
        return LeasedGrant(line, 0, mine)

    def give_up(self, lease: Lease) -> None:
        """Ends a lease whose line may not be durable: nothing is handed out, and the next one is of one ticket."""
        with self._lock:
            self._pending.discard(lease)
            if lease.lot is not None:
                lease.lot.size = 0

    def remove(
        self, state: LedgerState, is_wanted: Callable[[TicketRequest], bool] = lambda _: True, *, idle: bool = False
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

    def holds(self, is_wanted: Callable[[TicketRequest], bool] = lambda _: True, *, idle: bool = False) -> bool:
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


RIDE_SECONDS = 5.0
"""Commits that waited so long are written by the next call, whatever it is."""


@dataclass(slots=True, eq=False)
class _Carried:
    """Commits that were written in one transaction, and the first of their lines."""

    line: LedgerRecord
    commits: Mapping[int, int]
    is_durable: bool = False
    is_visible: bool = False


class CarryingAppender(LineAppender):
    """Brings the commits that wait along with the first line of a transaction."""

    def __init__(
        self,
        view: LedgerTransaction,
        state: LedgerState,
        applied: Callable[[Sequence[LedgerRecord]], None],
        *,
        waiting: Mapping[int, int],
        written: Callable[[_Carried], None],
    ) -> None:
        super().__init__(view, state, applied)
        self.lease: Lease | None = None  # that the lines reserve
        self._carried: _Carried | None = None
        self._waiting = waiting
        self._written = written

    def append(self, kind: str, body: Mapping[str, Any]) -> LedgerRecord:
        """Adds a line; the first one of a transaction brings the commits that wait along."""
        self.bring_waiting()
        return super().append(kind, body)

    def bring_waiting(self) -> None:
        """Adds the commits that wait, unless they were added."""
        if self._waiting and not self._undos:
            append, commits = super().append, self._waiting.items()
            lines = [append(COMMIT, {"reservation": entry, "count": count}) for entry, count in commits]
            self._carried = _Carried(lines[0], self._waiting)

    def before_commit(self) -> None:
        """As of the class above."""
        if self._carried is not None:
            self._written(self._carried)

    def after_commit(self) -> None:
        """As of the class above."""
        if self.lease is not None:
            self.lease.seen_in = self.state

    def after_flush(self) -> None:
        """As of the class above."""
        if self._carried is not None:
            self._carried.is_durable = True


class LeasingWriter(LedgerWriter):
    """Charges tickets before they are asked for, and writes commits with the next line, on a ledger on disk.

    A commit of tickets waits in this process and is written in the transaction of the next line. It is lost where the
    process ends first: its ticket then stays charged and open, as if the process had ended before the commit.

    Where one refundable ticket after another is reserved, a line reserves several, which wait in the purse of this
    process (a lease). What it has not used it gives back: when it closes, when nobody asks for more of its kind, and
    before it refuses a request. Nobody else gives it back, since nobody else knows what was used; it is lost where the
    process ends first.

    Formal guarantees:
      - Tickets enter the purse only after the line that charges them is durable, as (G) of the class above demands.
    """

    def __init__(
        self,
        store: LedgerStore,
        header: LedgerHeader,
        *,
        allowed_wrappers: Callable[[], Sequence[str]] = tuple,
        most_held: int = 1,
    ) -> None:
        # Before the rest: `__del__` looks at them.
        self._purse = Purse(most_held)
        self._waiting: dict[int, int] = {}  # tickets whose commit waits, by the line of their reservation
        self._waiting_since = 0.0
        self._doubtful: list[_Carried] = []  # those written of which it is not known whether they are durable
        self._looked = 0.0  # when it was last found out whether tickets lie idle
        self._is_broken = False  # whether the last `verify` found a fault
        super().__init__(store, header, allowed_wrappers=allowed_wrappers)

    def __del__(self) -> None:
        # Nothing is written here: this may run within any call of any thread, also in a transaction of the same file.
        if sys is None:  # Python has taken its modules apart
            return
        is_ours = self.__dict__.get("_home") == this_process()
        if not sys.is_finalizing() and is_ours and self._has_waiting(is_closing=True):
            _DROPPED.append(self)

    def _forget_parent(self) -> None:
        super()._forget_parent()
        self._waiting, self._doubtful = {}, []  # those of the parent, which writes them
        self._purse = Purse(self._purse.most_held)  # as is what it holds

    @contextlib.contextmanager
    def _turn(self, lock: AbstractContextManager[bool]) -> Iterator[None]:
        with super()._turn(lock):
            try:
                yield
            except LedgerUnavailableError:
                raise
            except LedgerError:
                self._purse.empty()  # of a broken ledger nothing is granted
                raise

    def refresh(self) -> LedgerState:
        """As of the class above; what waited for long is written."""
        write_dropped()
        super().refresh()
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

    def _appender(self, view: LedgerTransaction) -> LineAppender:
        how: dict[str, Any] = {"waiting": self._waiting, "written": self._note_written}
        return CarryingAppender(view, self._state, self._applied, **how)

    def _note_written(self, carried: _Carried) -> None:
        """Takes commits that were written for doubtful, until it is known that they are durable."""
        self._waiting = {}
        self._doubtful.append(carried)

    def _catch_up(self, source: LedgerStore | LedgerTransaction) -> None:
        super()._catch_up(source)
        if self._doubtful:
            self._settle_doubts(source)

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

    def _verify_lines(self) -> None:
        """Checks every line from the first on."""
        self._recomputed()
        self.refresh()

    def _granted(
        self, standing: ShareStatus, component: Component, request: TicketRequest, *, count: int, refundable: bool
    ) -> Grant:
        """Grants tickets of the purse, or of a line.

        What was leased for other blocks is not granted for these: their windows differ.
        """
        if self._home != this_process():
            self._move_in()  # before the purse is looked at: that of the parent is not this process's to give back
        write_dropped()
        if self._is_broken:
            self.verify()
        is_leased = refundable and count == 1 and self._purse.most_held > 1 and self.store.durable
        if is_leased and (grant := self._from_purse(standing, component, request)) is not None:
            return grant
        while True:
            try:
                return self._by_line(standing, component, request, count=count, is_leased=is_leased)
            except PrivacyBudgetExceededError as error:
                # What this process holds comes first: what is refused then is left to nobody.
                if not self._give_back_held(request, of_tenant=isinstance(error, TenantCapExceededError)):
                    raise

    def _from_purse(self, standing: ShareStatus, component: Component, request: TicketRequest) -> Grant | None:
        """Returns a ticket that a durable line of this process reserved for the same request, or None."""
        sealed = self._purse.sealed(request)
        if sealed is None:
            return None
        standing.usable_terms(component.name)
        self._check_same_terms(component, sealed)
        grant = self._purse.take(request)
        self._write_late()  # after that: tickets of which one was taken are not idle
        return grant

    def _by_line(
        self, standing: ShareStatus, component: Component, request: TicketRequest, *, count: int, is_leased: bool
    ) -> Grant:
        """Writes a line that reserves tickets; what it leases beyond `count` enters the purse once it is durable."""
        purse = self._purse
        lease = Lease(request, unit_cost(component.kind, request.amount)) if is_leased else None
        try:
            with self.exclusive() as writer:
                left = self._admit(writer, standing, component, request, count=count)
                if self._is_time_to_look():
                    _return_tickets(writer, purse.remove(writer.state, idle=True))
                if request.blocks is not None:  # what was leased for an earlier run
                    _return_tickets(writer, purse.remove(writer.state, functools.partial(_is_of_other_blocks, request)))
                if lease is not None:
                    purse.ask(lease, left // LEAST_LEFT)
                    count = lease.count
                line = writer.append(RESERVE, self._reservation(request, count))
                if lease is not None:
                    lease.entry, cast("CarryingAppender", writer).lease = line.seq, lease
                sealed = writer.state.sealed_component(component.name)
            if lease is None:
                return Grant(line)
            _watch(self)
            return purse.fill(lease, line, sealed)
        except BaseException:
            if lease is not None:
                purse.give_up(lease)
            raise

    def _give_back_held(self, refused: TicketRequest, *, of_tenant: bool) -> bool:
        """Gives back what a refused request could use: of its tenant, or of its slot; returns whether any was."""
        name, tenant, purse = refused.component, refused.tenant or "", self._purse

        def is_wanted(key: TicketRequest) -> bool:
            return key.component == name and ((key.tenant or "") == tenant if of_tenant else key.slot == refused.slot)

        if not purse.holds(is_wanted):
            return False
        with self.exclusive() as writer:
            removed = purse.remove(writer.state, is_wanted)
            _return_tickets(writer, removed)
        return bool(removed)

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
                cast("CarryingAppender", writer).bring_waiting()
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

    def _unsettled(self, state: LedgerState, component: str, slot: Slot) -> int:
        """Returns how many tickets of a slot are in use, without those that wait for their commit to be written."""
        entries = {*self._waiting, *(entry for each in self._doubtful for entry in each.commits)}
        waiting = sum(self.waiting(entry) for entry in entries if state.is_of(entry, component, slot))
        return super()._unsettled(state, component, slot) - waiting

    def _remaining(
        self, state: LedgerState, component: Component, slot: Slot, blocks: Blocks | None, run_cap: int | None
    ) -> Amount:
        left = super()._remaining(state, component, slot, blocks, run_cap)
        if state.windows is not None and blocks is None:
            return left
        return left + self._purse.cost(component.name, slot, blocks)

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
        if not (isinstance(grant, LeasedGrant) and self._purse.put_back(grant)):
            super().give_back(grant, count)


def _is_of_other_blocks(wanted: TicketRequest, key: TicketRequest) -> bool:
    """Whether tickets of the same slot were leased for other blocks."""
    return (key.component, key.slot) == (wanted.component, wanted.slot) and key.blocks != wanted.blocks


def _return_tickets(writer: LineAppender, tickets: Mapping[int, int]) -> None:
    """Appends the lines that give tickets back, by the line that reserved them."""
    for entry, count in tickets.items():
        writer.append(GIVE_BACK, {"reservation": entry, "count": count})


# Each with its store: of objects that refer to each other in a circle, Python might end the store first.
_WITH_WAITING: weakref.WeakKeyDictionary[LeasingWriter, LedgerStore] = weakref.WeakKeyDictionary()
_DROPPED: deque[LeasingWriter] = deque()
"""Those to which nobody refers any more, and which have something to write."""

_ENDS_HERE: list[tuple[int, int]] = []
"""The process in which `multiprocessing` knows of `write_all_waiting`: its children end without `atexit`."""


def _watch(writer: LeasingWriter) -> None:
    """Writes what waits in a writer when this process ends, unless it is killed."""
    _WITH_WAITING[writer] = writer.store
    # None as well while another thread imports that module: the next call sees to it.
    here, finalize = [this_process()], getattr(sys.modules.get("multiprocessing.util"), "Finalize", None)
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


def _is_written(writer: LeasingWriter) -> bool:
    """Writes the last lines of a writer, and returns whether that worked."""
    try:
        writer.write_waiting(is_closing=True)
    except Exception:  # noqa: BLE001  whatever a store of others raises is no fault of the call that came next
        return False
    return True


# A thread that waited longer than this many seconds through an outage, or than the store's `timeout`, is refused. If
# each of many waiting threads tried the store again, the last would wait without limit.
LOCK_TIMEOUT = 10.0
_SLOW = 0.5
"""What part of that time a fault must have taken for others not to wait behind the next thread that tries."""


class OutageWriter(LeasingWriter):
    """Refuses threads that waited through an outage of the store, and those that would wait for one that tries again.

    So a store that answers nobody holds each thread for one of its waits or two, however many there are.
    """

    _outages = 0
    _out_until = 0.0
    """Until when only one thread at a time tries the store, and the others are refused."""

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[LineAppender]:
        """As of the class above."""
        self._check_queue()
        with super().exclusive() as writer:
            yield writer
        self._out_until = 0.0

    def refresh(self) -> LedgerState:
        """As of the class above."""
        self._check_queue()
        return super().refresh()

    def _check_queue(self) -> None:
        """Refuses who would wait for a thread that tries again, before a ticket is charged, which would be lost."""
        if time.monotonic() < self._out_until and _is_taken(self.lock):
            raise self._outage()

    @contextlib.contextmanager
    def _turn(self, lock: AbstractContextManager[bool]) -> Iterator[None]:
        outages, since = self._outages, time.monotonic()
        patience = min(LOCK_TIMEOUT, getattr(self.store, "timeout", LOCK_TIMEOUT))
        with super()._turn(lock):
            began = time.monotonic()
            if self._outages != outages and began - since > patience:
                raise self._outage()
            try:
                yield
            except LedgerUnavailableError:
                self._outages += 1
                now = time.monotonic()
                if now - began >= _SLOW * patience:
                    self._out_until = now + 2 * patience  # longer than the next try takes
                raise

    def _outage(self) -> LedgerUnavailableError:
        msg = f"ledger: expected it to respond, found {self.store.description} unavailable for other threads."
        return LedgerUnavailableError(f"{msg} Nothing is granted; try again.")


def _is_taken(lock: Any) -> bool:
    """Whether another thread holds a lock now."""
    if not lock.acquire(blocking=False):
        return True
    lock.release()
    return False
