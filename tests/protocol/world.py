"""The states of the protocol's model, and the ledger's real rules applied to their lines."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

from langchain_dpicl.privacy.accounting.events import PureEvent
from langchain_dpicl.privacy.ledger.state import COMMIT, GIVE_BACK, RESERVE, LedgerState, Undo
from langchain_dpicl.privacy.ledger.store import LedgerHeader, LedgerRecord, next_record
from langchain_dpicl.privacy.ledger.tickets import Component, ShareTerms, Ticket, event_of_components

SNAPSHOT = "snapshot"


class Line(NamedTuple):
    """A line: `entry` is what a settlement settles; `uid` names it where histories differ, as its hash does."""

    kind: str
    entry: int
    count: int
    tenant: str
    uid: int
    snapshot: Totals | tuple[()] = ()


class Lease(NamedTuple):
    """Tickets of one reserve line that a process holds and has not burnt."""

    seq: int
    uid: int
    unburnt: int
    tenant: str


class Pending(NamedTuple):
    """A reserve line that is visible and whose tickets are not granted yet; `chain` names all lines up to it."""

    seq: int
    uid: int
    count: int
    tenant: str
    phase: str
    chain: tuple[int, ...] = ()


class Process(NamedTuple):
    """A process: its purse, what it burnt and did not commit, the commits that ride, what it waits for and has seen."""

    is_up: bool = False
    purse: tuple[Lease, ...] = ()
    burnt: tuple[tuple[int, int, int], ...] = ()  # (seq, uid, tickets)
    riding: tuple[tuple[int, int], ...] = ()  # (seq, tickets)
    pending: Pending | tuple[()] = ()
    doubt: tuple[Any, ...] = ()  # a reservation whose answer was lost
    seen: tuple[int, int] = (0, 0)
    base: int = 0  # the snapshot that it opened from
    has_named: bool = False  # whether it made the name of the log durable


class World(NamedTuple):
    """Everything: the visible lines, what the disk has of them, the processes, and what really was read."""

    lines: tuple[Line, ...] = ()
    durable: int = 0  # lines whose content the disk has
    filed: int = 0  # lines that were moved from the log into the file
    has_log: bool = True
    is_named: bool = True  # whether the log's name is on the disk
    processes: tuple[Process, ...] = ()
    reads: tuple[tuple[int, int], ...] = ()  # (uid of the reserve line, private reads)
    by_tenant: tuple[tuple[str, int], ...] = ()
    anchor: tuple[int, int] | tuple[()] = ()
    copy: tuple[Line, ...] | None = None
    made: int = 0  # names given to lines
    kills: int = 0
    losses: int = 0
    lost: int = 0
    returned: int = 0
    closed: int = 0
    boot: int = 0
    is_restored: bool = False
    journal: tuple[tuple[int, int], ...] = ()  # (uid, burns): shared memory, which outlives a process and not the host

    @property
    def sure(self) -> int:
        """How many lines a power loss keeps for certain."""
        return self.durable if self.is_named else self.filed

    def holds(self, seq: int, uid: int) -> bool:
        """Whether line `seq` is the one of this name."""
        return seq == 0 or (seq <= len(self.lines) and self.lines[seq - 1].uid == uid)

    def last_snapshot(self) -> int:
        """The number of the last snapshot line, or 0."""
        return max((n for n, line in enumerate(self.lines, 1) if line.kind == SNAPSHOT), default=0)

    def replaced(self, number: int, process: Process, **others: Any) -> World:
        """This world with another state of one process."""
        processes = (*self.processes[:number], process, *self.processes[number + 1 :])
        return self._replace(processes=processes, **others)


class Totals(NamedTuple):
    """What lines add up to: tickets left, used by tenant, and unsettled by reservation."""

    left: int
    used: tuple[tuple[str, int], ...]
    unsettled: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Settled:
    """What stands in lines, by the name of the reserve line."""

    reserved: dict[int, int]
    committed: dict[int, int]
    returned: dict[int, int]


Plain = tuple[tuple[str, int, int, str], ...]
"""Lines without their names: what the totals depend on."""


class Rules:
    """The totals of lines by the real `LedgerState.apply`; other lines are reached by its real undo."""

    def __init__(self, tickets: int, tenants: tuple[str, ...]) -> None:
        ticket = Ticket("t", PureEvent(1e-3), max_count=tickets, refundable=True)
        components = (Component("c", "tickets", (ticket,), epsilon=1.0, delta=1e-7),)
        self._terms = ShareTerms(components, 1.0, 1e-7, False, event_of_components(components), {}).to_dict()
        self._tenants = tenants
        self._state = LedgerState(LedgerHeader("model", "model", 1.0, 1e-6, "add_remove", stamp="-"))
        self._state.apply(next_record(0, self._state.head, "seal", self._terms))
        self._applied: list[tuple[tuple[str, int, int, str], Undo]] = []
        self._known: dict[Plain, Totals] = {}
        self._records: dict[Plain, LedgerRecord] = {}
        self.settled = functools.lru_cache(1 << 16)(_settled)

    def totals(self, lines: tuple[Line, ...]) -> Totals:
        """Raises a LedgerError for lines that the ledger refuses."""
        plain = tuple([line[:4] for line in lines])
        found = self._known.get(plain)
        if found is None:
            self._go_to(plain)
            found = self._known[plain] = self._now()
        return found

    def _go_to(self, plain: Plain) -> None:
        """Takes lines back, and applies others, until the state is the one after these lines."""
        common = 0
        for (line, _), wanted in zip(self._applied, plain, strict=False):
            if line != wanted:
                break
            common += 1
        while len(self._applied) > common:
            self._applied.pop()[1]()
        for number in range(common, len(plain)):
            self._applied.append((plain[number], self._state.apply(self._record(plain[: number + 1]))))

    def _record(self, plain: Plain) -> LedgerRecord:
        """The last of these lines as the ledger has it; the seal is line 1, so that numbers are one higher."""
        found = self._records.get(plain)
        if found is None:
            kind, entry, count, tenant = plain[-1]
            body: dict[str, Any]
            if kind == SNAPSHOT:
                kind, body = "bind", {"dataset_id": f"snapshot {len(plain)}"}  # a line that moves no ticket
            elif kind == RESERVE:
                body = {
                    "component": "c",
                    "template": "t",
                    "label": None,
                    "count": count,
                    "amount": 1.0,
                    "tenant": tenant,
                }
            else:
                body = {"reservation": entry + 1, "count": count}
            found = self._records[plain] = next_record(self._state.seq, self._state.head, kind, body)
        return found

    def _now(self) -> Totals:
        state = self._state
        used = tuple((name, state.used_by(name, "c")) for name in self._tenants if state.used_by(name, "c"))
        unsettled = tuple((opened.entry - 1, opened.count) for opened in state.open_reservations())
        return Totals(int(state.left("c", ("t", None))), used, unsettled)


def _settled(lines: tuple[Line, ...]) -> Settled:
    found = Settled({}, {}, {})
    for line in lines:
        if line.kind == RESERVE:
            found.reserved[line.uid] = line.count
        elif line.kind in {COMMIT, GIVE_BACK}:
            by_name = found.committed if line.kind == COMMIT else found.returned
            uid = lines[line.entry - 1].uid
            by_name[uid] = by_name.get(uid, 0) + line.count
    return found


def canonical(world: World) -> World:
    """One for all worlds that differ in the names of processes and lines only."""
    if world.made != len(world.lines):
        world = _renamed(world)
    return world._replace(processes=tuple(sorted(world.processes)))


def _renamed(world: World) -> World:
    names = {0: 0}
    for line in world.lines + (world.copy or ()):
        names.setdefault(line.uid, len(names))
    others = [uid for uid, _ in world.reads + world.journal]
    others += [world.anchor[1]] if world.anchor else []
    for process in world.processes:
        others += [process.seen[1], *(lease.uid for lease in process.purse), *(uid for _, uid, _ in process.burnt)]
        others += [process.doubt[1]] if process.doubt else []
        others += [process.pending.uid, *process.pending.chain] if process.pending else []
    for uid in sorted(others):
        names.setdefault(uid, len(names))

    def lines(old: tuple[Line, ...]) -> tuple[Line, ...]:
        return tuple(line._replace(uid=names[line.uid]) for line in old)

    def process(old: Process) -> Process:
        pending, doubt = old.pending, old.doubt
        if pending:
            chain = tuple(names[uid] for uid in pending.chain)
            pending = pending._replace(uid=names[pending.uid], chain=chain)
        return old._replace(
            purse=tuple(sorted(lease._replace(uid=names[lease.uid]) for lease in old.purse)),
            burnt=tuple(sorted((seq, names[uid], count) for seq, uid, count in old.burnt)),
            pending=pending,
            doubt=doubt and (doubt[0], names[doubt[1]], *doubt[2:]),
            seen=(old.seen[0], names[old.seen[1]]),
        )

    return world._replace(
        lines=lines(world.lines),
        copy=None if world.copy is None else lines(world.copy),
        processes=tuple(map(process, world.processes)),
        reads=tuple(sorted((names[uid], count) for uid, count in world.reads)),
        journal=tuple(sorted((names[uid], count) for uid, count in world.journal)),
        anchor=world.anchor and (world.anchor[0], names[world.anchor[1]]),
        made=len(names) - 1,
    )
