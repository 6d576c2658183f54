"""Keeps the tickets that a process leased: charged by durable lines, several by one, and not yet handed out."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from langchain_dpicl.privacy.ledger.amounts import Amount
from langchain_dpicl.privacy.ledger.state import LedgerState, Slot
from langchain_dpicl.privacy.ledger.store import LedgerRecord
from langchain_dpicl.privacy.ledger.tickets import Blocks, Component

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
