"""Keeps the tickets that a process leased: charged by durable lines, several by one, and not yet handed out."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from langchain_dpicl.privacy.ledger.amounts import Amount
from langchain_dpicl.privacy.ledger.blocks import Blocks
from langchain_dpicl.privacy.ledger.state import Slot
from langchain_dpicl.privacy.ledger.store import LedgerRecord
from langchain_dpicl.privacy.ledger.tickets import Component

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
    """All that the line of a reservation names, and the cap that it was compared with."""

    component: str
    slot: Slot
    amount: float
    tenant: str | None
    cap: int | None
    wrappers: tuple[str, ...]
    blocks: Blocks | None = None


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
    pending: int = 0


@dataclass(slots=True, eq=False)
class Lease:
    """A lease; it is pending until it is known whether its line is durable."""

    key: PurseKey
    count: int
    lot: _Lot
    is_pending: bool = True


class Purse:
    """The leased tickets of one process. Safe for threads; a forked child starts with an empty one.

    Formal guarantees:
      - A ticket is handed out once, and only after `fill`, which is called when its line is durable.
      - It is handed out to those only for whom the same line would be written.
      - At most `most_held` tickets of a slot are in it, over all keys.
    """

    def __init__(self, most_held: int) -> None:
        self.most_held = most_held
        self._lock = threading.Lock()
        self._lots: dict[PurseKey, _Lot] = {}
        self._many = _FEW_LOTS
        self._is_closed = False
        # By component and slot; `_held` counts what is in it or pending, the others what is in it.
        self._held: Counter[tuple[str, Slot]] = Counter()
        self._cost: dict[tuple[str, Slot], Amount] = {}
        self._by_tenant: Counter[tuple[str, str]] = Counter()

    def sealed(self, key: PurseKey) -> Component | None:
        """Returns the sealed terms of the tickets of a key, or None if there are none."""
        lot = self._lots.get(key)
        return lot.sealed if lot is not None and lot.grants else None

    def take(self, key: PurseKey) -> Grant | None:
        """Hands out one ticket, or None."""
        with self._lock:
            lot = self._lots.get(key)
            if lot is None or not lot.grants or self._is_closed:
                return None
            lot.taken = time.monotonic()
            self._count(key, lot, -1)
            return lot.grants.pop()

    def put_back(self, grant: Grant) -> bool:
        """Takes a ticket that never burnt in again; False where it has to go back by a line."""
        lease = grant.lease
        with self._lock:
            if lease is None or not self._has(lease):
                return False
            place = lease.key.component, lease.key.slot
            if self._is_closed or self._held[place] >= self.most_held:
                return False
            self._count(lease.key, lease.lot, 1)
            lease.lot.grants.append(grant)
            return True

    def _has(self, lease: Lease) -> bool:
        """Whether the purse was not emptied since."""
        return self._lots.get(lease.key) is lease.lot

    def ask(self, key: PurseKey, unit: Amount, most: int) -> Lease:
        """Returns a lease of what is used in a second, at the pace of the last one: at most `most`, at least one."""
        with self._lock:
            self._forget_old()
            lot = self._lots.setdefault(key, _Lot(unit))
            size = 1
            if not lot.pending and not self._is_closed:
                took = max(time.monotonic() - lot.leased, HORIZON / GROWTH)
                size = int(lot.size * HORIZON / took)
            room = self.most_held - self._held[key.component, key.slot]
            count = max(1, min(size, most, room))
            if not lot.pending:
                lot.size = count
            lot.pending += count
            self._held[key.component, key.slot] += count - 1
            return Lease(key, count, lot)

    def fill(self, lease: Lease, line: LedgerRecord, sealed: Component | None) -> Grant:
        """Takes in the tickets of a lease whose line is durable, except for the one that is returned."""
        key, lot = lease.key, lease.lot
        mine = lease if lease.count > 1 else None
        with self._lock:
            self._end(lease)
            lot.leased = lot.taken = time.monotonic()
            if mine is not None and not self._is_closed and self._has(lease):
                lot.sealed = sealed
                lot.grants += [Grant(line, index, lease) for index in reversed(range(1, lease.count))]
                self._count(key, lot, lease.count - 1)
        return Grant(line, 0, mine)

    def give_up(self, lease: Lease) -> None:
        """Ends a lease whose line may not be durable: nothing is handed out, and the next one is of one ticket."""
        with self._lock:
            self._end(lease)
            lease.lot.size = 0

    def _end(self, lease: Lease) -> None:
        if not lease.is_pending:
            return
        lease.is_pending = False
        lease.lot.pending -= lease.count
        if self._has(lease):
            self._held[lease.key.component, lease.key.slot] -= lease.count - 1

    def remove(self, is_wanted: Callable[[PurseKey], bool] | None = None, *, idle: bool = False) -> Mapping[int, int]:
        """Removes tickets, those of idle keys or of all that are wanted; returns their number by line.

        Called before the line that gives them back is written: whatever becomes of it, none of them is handed out.
        """
        removed: Counter[int] = Counter()
        with self._lock:
            before = time.monotonic() - IDLE_SECONDS
            for key, lot in self._lots.items():
                if lot.grants and (lot.taken < before if idle else is_wanted is None or is_wanted(key)):
                    self._count(key, lot, -len(lot.grants))
                    removed.update(grant.line.seq for grant in lot.grants)
                    lot.grants = []
        return removed

    def empty(self) -> None:
        """Drops everything: it stays charged, and nothing of it is handed out or taken in again."""
        with self._lock:
            self._lots = {}
            self._held, self._by_tenant, self._cost = Counter(), Counter(), {}

    def close(self) -> None:
        """Takes nothing in and hands nothing out from now on."""
        with self._lock:
            self._is_closed = True

    def holds(self, *, idle: bool = False) -> bool:
        """Returns whether anything is in it, or anything of which none was taken lately."""
        with self._lock:
            before = time.monotonic() - IDLE_SECONDS
            return any(lot.grants and (not idle or lot.taken < before) for lot in self._lots.values())

    def cost(self, component: str, slot: Slot, blocks: Blocks | None = None) -> Amount:
        """Returns what the tickets of a slot, or those for blocks, take of it: their number, mu squared or rho."""
        if blocks is None:
            return self._cost.get((component, slot), 0)
        place = component, slot, blocks
        with self._lock:
            lots = [lot for key, lot in self._lots.items() if (key.component, key.slot, key.blocks) == place]
            return sum((lot.unit * len(lot.grants) for lot in lots), 0)

    def of_tenant(self, component: str, tenant: str) -> int:
        """Returns how many tickets of a component are in it for a tenant."""
        return self._by_tenant[component, tenant]

    def by_entry(self) -> Mapping[int, int]:
        """Returns how many tickets are in it, by the number of their line."""
        with self._lock:
            return Counter(grant.line.seq for lot in self._lots.values() for grant in lot.grants)

    def _count(self, key: PurseKey, lot: _Lot, count: int) -> None:
        place = key.component, key.slot
        self._held[place] += count
        self._by_tenant[key.component, key.tenant or ""] += count
        self._cost[place] = self._cost.get(place, 0) + lot.unit * count

    def _forget_old(self) -> None:
        """Drops keys that hold nothing and were not asked for lately, where there are many."""
        if len(self._lots) < self._many:
            return
        old = time.monotonic() - HORIZON
        kept = {key: lot for key, lot in self._lots.items() if lot.grants or lot.pending or lot.leased > old}
        self._lots, self._many = kept, max(_FEW_LOTS, 2 * len(kept))
        self._by_tenant = +self._by_tenant
