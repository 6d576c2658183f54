"""An explicit-state checker of the ledger's protocol: breadth first over every order of the steps of some processes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from langchain_dpicl.exceptions import LedgerError
from langchain_dpicl.privacy.ledger.state import COMMIT, GIVE_BACK, RESERVE
from tests.faults.counts import Violation, require
from tests.protocol.world import SNAPSHOT, Lease, Line, Pending, Process, Rules, Totals, World, canonical

Step = tuple[str, World]

_Key = TypeVar("_Key", int, str, tuple[int, int])

VISIBLE, WRITTEN, DURABLE = "visible", "written", "durable"
"""Phases of a line: its lock was given up; the disk has its content; the disk has the name of its log, too."""


@dataclass(frozen=True)
class Scene:
    """What there is, and how often what may go wrong.

    Attributes:
      processes: how many.
      tickets: of the one component.
      lease: most tickets that a process holds.
      divide: a lease takes at most this part of what is left.
      kills: processes killed.
      losses: losses of power; with `server` restarts of the database's host, which its clients survive.
      lost: answers lost.
      returns: leases given back, and rests of leases that wait for the disk.
      closes: ends of processes that move the log into the file where nobody else has it open. 0: there is one log.
      rides: commits wait for the next line.
      anchor: lines are sent to an anchor before tickets are granted.
      copies: the ledger is copied, and the copy put in its place.
      server: see `losses`.
      journal: burns are noted in shared memory, so that tickets of a dead process are given back.
      snapshot: a snapshot line follows so many lines.
      tenants: who reserves.
      cap: most tickets of a tenant.
    """

    processes: int = 2
    tickets: int = 4
    lease: int = 2
    divide: int = 1
    kills: int = 1
    losses: int = 1
    lost: int = 1
    returns: int = 1
    closes: int = 0
    rides: bool = True
    anchor: bool = False
    copies: bool = False
    server: bool = False
    journal: bool = False
    snapshot: int = 0
    tenants: tuple[str, ...] = ("",)
    cap: int | None = None


@dataclass(frozen=True)
class Verdict:
    """What a search found: `fault` is "" where no state is wrong, and `trace` leads to the first that is.

    Attributes:
      fault: what is wrong.
      trace: the steps to it; two processes that are alike may change letters between two of them.
      states: how many were seen.
      reads: most private reads in one of them.
      seconds: how long it took.
      is_complete: whether every state was seen.
    """

    fault: str
    trace: tuple[str, ...]
    states: int
    reads: int
    seconds: float
    is_complete: bool


class Model:
    """The protocol in a scene, with at most one plant: a mistake that the checker has to find."""

    def __init__(self, scene: Scene, plant: str = "") -> None:
        self.scene = scene
        self.plant = plant
        self.rules = Rules(scene.tickets, scene.tenants)
        # A process that looks at the ledger decides something else after a commit line: only that plant needs them one by one.
        self._commits_alone = plant == "a commit puts the ticket back"
        self._watches_seen = scene.server or scene.copies

    def start(self) -> World:
        has_log = not self.scene.closes
        return World(processes=(Process(),) * self.scene.processes, has_log=has_log, is_named=has_log)

    def search(self, *, seconds: float = float("inf"), tick: Callable[[int], object] = lambda _: None) -> Verdict:
        """Visits every state, or those that so many seconds allow; stops at the first that must not be."""
        start, began = self.start(), time.perf_counter()
        parents: dict[World, tuple[World, str] | None] = {start: None}
        queue, reads = deque([start]), 0
        fault, trace = "", []
        while queue and not fault and time.perf_counter() - began < seconds:
            world = queue.popleft()
            reads = max(reads, sum(count for _, count in world.reads))
            try:
                self.check(world)
                for label, found in self.steps(world):
                    key = canonical(found)
                    if key not in parents:
                        parents[key] = world, label
                        queue.append(key)
            except Violation as violation:
                fault, link = str(violation), parents[world]
                while link is not None:
                    trace.append(link[1])
                    link = parents[link[0]]
            tick(len(parents))
        spent = time.perf_counter() - began
        return Verdict(fault, tuple(reversed(trace)), len(parents), reads, spent, is_complete=not queue)

    # Steps

    def steps(self, world: World) -> Iterator[Step]:
        """Yields every next world and what leads to it."""
        for number, process in enumerate(world.processes):
            if process.is_up:
                yield from self._steps_of(world, number, process)
            else:
                yield from self._open(world, number)
        if world.losses < self.scene.losses:
            yield from self._lose_power(world)
        if self.scene.copies and world.copy is None:
            yield "copied", world._replace(copy=world.lines[: world.durable])
        if world.copy is not None and not world.is_restored:
            yield "restored", world._replace(lines=world.copy, durable=len(world.copy), is_restored=True)

    def _lose_power(self, world: World) -> Iterator[Step]:
        # The disk may have written more than it was asked to, and less of what it was not.
        for kept in range(world.durable, len(world.lines) + 1):
            lines = world.lines[:kept]
            rest = world._replace(lines=lines, durable=kept, losses=world.losses + 1)
            if not self.scene.server:
                yield f"power lost, {kept} lines kept", self._rebooted(rest, is_named=True)
            elif kept < len(world.lines):
                processes = tuple(
                    each._replace(pending=() if each.pending and each.pending.phase == VISIBLE else each.pending)
                    for each in world.processes
                )
                yield f"server restarts, {kept} lines kept", rest._replace(processes=processes)
        if not world.is_named:
            rest = world._replace(lines=world.lines[: world.filed], durable=world.filed, losses=world.losses + 1)
            yield "power lost, and the log with its name", self._rebooted(rest._replace(has_log=False), is_named=False)

    def _rebooted(self, world: World, *, is_named: bool) -> World:
        processes = (Process(),) * len(world.processes)
        return world._replace(processes=processes, boot=world.boot + 1, journal=(), is_named=is_named)

    def _open(self, world: World, number: int) -> Iterator[Step]:
        """A process opens the ledger; so does a forked child, which begins without what its parent holds."""
        if self.scene.anchor and world.anchor and not world.holds(*world.anchor):
            require(world.is_restored, "a false alarm: the anchor has a line that a crash took")
            return
        base = world.last_snapshot() if self.scene.snapshot else 0
        if base:
            require(
                self._view(world.lines, base) == self.rules.totals(world.lines), "a snapshot differs from its lines"
            )
        seen = (0, 0)
        if self._watches_seen:
            sure = len(world.lines) if self.plant == "lines count as seen before they are durable" else world.durable
            seen = (sure, world.lines[sure - 1].uid) if sure else (0, 0)
        has_named = world.has_log and (not self.scene.closes or self.plant == "only who made the log writes its name")
        has_named = has_named or self.plant == "nobody writes the name of the log"
        process = Process(is_up=True, seen=seen, base=base, has_named=has_named)
        is_named = world.is_named and world.has_log
        opened = world.replaced(number, process, has_log=True, is_named=is_named)
        yield f"{_name(number)} opens", opened
        if self.scene.anchor and world.lines:
            # It waits for the disk, and tells the anchor of lines whose writers died before they did.
            last = len(world.lines), world.lines[-1].uid
            told = process._replace(seen=last if self._watches_seen else seen)
            told_all = opened.replaced(number, told, durable=len(world.lines), anchor=last)
            yield f"{_name(number)} opens, and tells the anchor", told_all

    def _steps_of(self, world: World, number: int, process: Process) -> Iterator[Step]:
        name = _name(number)
        if world.kills < self.scene.kills:
            yield f"{name} killed", world.replaced(number, Process(), kills=world.kills + 1)
        if world.closed < self.scene.closes and not process.pending:
            yield f"{name} closes", self._closed(world, number)
        if self.plant == "a fork keeps the lease" and process.purse:
            child = process._replace(pending=(), doubt=(), riding=(), burnt=())
            for other, each in enumerate(world.processes):
                if not each.is_up:
                    yield f"{name} forks", world.replaced(other, child)
        for place, lease in enumerate(process.purse):
            yield f"{name} burns of {lease.seq}", self._burn(world, number, place, lease.tenant)
            if self.plant == "a purse does not name the tenant":
                for tenant in self.scene.tenants:
                    yield f"{name} burns of {lease.seq} for {tenant}", self._burn(world, number, place, tenant)
            if world.returned < self.scene.returns and not process.pending:
                yield from self._give_back(world, number, place)
        if not self.scene.rides or self._commits_alone:
            yield from self._commit(world, number)
        if process.pending:
            yield from self._finish(world, number, process.pending)
            yield from self._give_rest_back(world, number, process.pending)
            return
        if process.doubt and self.plant == "a lost answer leases twice":
            seq, uid, count, tenant = process.doubt
            if world.holds(seq, uid):
                again = process._replace(purse=_with(process.purse, Lease(seq, uid, count, tenant)))
                yield f"{name} finds its lost line and takes it (again)", world.replaced(number, again)
        for tenant in self.scene.tenants:
            if not any(lease.tenant == tenant for lease in process.purse):
                yield from self._reserve(world, number, tenant)
        if self.scene.journal or self.plant in _TAKES_FROM_OTHERS:
            yield from self._reclaim(world, number)

    def _closed(self, world: World, number: int) -> World:
        """The last process that closes the file moves the log into it and removes it."""
        rest = world.replaced(number, Process(), closed=world.closed + 1)
        if any(process.is_up for process in rest.processes):
            return rest
        return rest._replace(durable=len(world.lines), filed=len(world.lines), has_log=False, is_named=False)

    def _burn(self, world: World, number: int, place: int, tenant: str) -> World:
        process = world.processes[number]
        lease = process.purse[place]
        rest = process.purse[:place] + process.purse[place + 1 :]
        purse = _with(rest, lease._replace(unburnt=lease.unburnt - 1)) if lease.unburnt > 1 else rest
        burnt = _plus({(seq, uid): count for seq, uid, count in process.burnt}, (lease.seq, lease.uid))
        process = process._replace(purse=purse, burnt=tuple((*key, count) for key, count in burnt))
        journal = world.journal
        if self.scene.journal or self.plant == "the journal is read after a loss of power":
            journal = _plus(dict(journal), lease.uid)
        reads, by_tenant = _plus(dict(world.reads), lease.uid), _plus(dict(world.by_tenant), tenant)
        return world.replaced(number, process, reads=reads, by_tenant=by_tenant, journal=journal)

    def _give_back(self, world: World, number: int, place: int) -> Iterator[Step]:
        process = world.processes[number]
        lease = process.purse[place]
        if not world.holds(lease.seq, lease.uid) or self._refuses(world, process):
            return
        empty = process._replace(purse=process.purse[:place] + process.purse[place + 1 :])
        lines = (*world.lines, Line(GIVE_BACK, lease.seq, lease.unburnt, "", world.made + 1))
        rest = world._replace(lines=lines, made=world.made + 1, returned=world.returned + 1)
        yield f"{_name(number)} gives {lease.unburnt} of {lease.seq} back", rest.replaced(number, empty)
        if world.lost < self.scene.lost:
            kept = process if self.plant == "the purse is emptied after the line" else empty
            yield f"{_name(number)} gives back, answer lost", rest.replaced(number, kept, lost=world.lost + 1)

    def _give_rest_back(self, world: World, number: int, pending: Pending) -> Iterator[Step]:
        """Another thread gives back what a lease that waits has beyond the ticket that was asked for."""
        process = world.processes[number]
        if pending.count < 2 or world.returned >= self.scene.returns or not world.holds(pending.seq, pending.uid):
            return
        if self._refuses(world, process):
            return
        back, left = pending.count - 1, 1
        if self.plant == "a lease that waits goes back as a whole, and is granted":
            back, left = pending.count, 1
        if self.plant == "what goes back of a lease that waits is granted, too":
            left = pending.count
        lines = (*world.lines, Line(GIVE_BACK, pending.seq, back, "", world.made + 1))
        rest = world._replace(lines=lines, made=world.made + 1, returned=world.returned + 1)
        smaller = process._replace(pending=pending._replace(count=left))
        yield f"{_name(number)} gives {back} of {pending.seq} back while it waits", rest.replaced(number, smaller)

    def _commit(self, world: World, number: int) -> Iterator[Step]:
        process = world.processes[number]
        for place, (seq, uid, count) in enumerate(process.burnt):
            less = ((seq, uid, count - 1),) if count > 1 else ()
            burnt = process.burnt[:place] + less + process.burnt[place + 1 :]
            if self.scene.rides:
                rides = process._replace(burnt=burnt, riding=_plus(dict(process.riding), seq))
                if self.plant == "a commit puts the ticket back":
                    others = tuple(lease for lease in process.purse if lease.uid != uid)
                    held = sum(lease.unburnt for lease in process.purse if lease.uid == uid)
                    tenant = world.lines[seq - 1].tenant if seq <= len(world.lines) else ""
                    rides = rides._replace(purse=_with(others, Lease(seq, uid, held + 1, tenant)))
                yield f"{_name(number)} commits (rides)", world.replaced(number, rides)
            elif world.holds(seq, uid):
                lines = (*world.lines, Line(COMMIT, seq, 1, "", world.made + 1))
                process_after = process._replace(burnt=burnt)
                yield (
                    f"{_name(number)} commits",
                    world.replaced(number, process_after, lines=lines, made=world.made + 1),
                )

    def _reserve(self, world: World, number: int, tenant: str) -> Iterator[Step]:
        process, scene = world.processes[number], self.scene
        if self._refuses(world, process):
            return
        left, used, _ = self._view(world.lines, process.base if process.base <= len(world.lines) else 0)
        room = left
        if scene.cap is not None and self.plant != "caps are counted in each process":
            room = min(left, scene.cap - dict(used).get(tenant, 0))
        own = sum(lease.unburnt for lease in process.purse)
        if self.plant == "each tenant has a purse of full size":
            own = sum(lease.unburnt for lease in process.purse if lease.tenant == tenant)
        is_full = own >= scene.lease or (room < 1 and own > 0)
        if is_full and self.plant != "who is refused keeps its purse":
            return  # or it gives back what it holds before it reports exhaustion
        if room < 1:
            if scene.cap is None or left < 1:
                held = sum(lease.unburnt for each in world.processes for lease in each.purse)
                bound = (scene.processes - 1) * scene.lease
                require(left < 1 and held <= bound, f"refused with {left} free and {held} in purses")
            return
        size = max(1, min(scene.lease - own, left // scene.divide, room))
        yield from self._write(world, number, process, tenant, size)
        if scene.rides and not self._commits_alone and process.burnt:
            # Nobody sees a commit that waits: whether it was made by now shows only here.
            riding = tuple((seq, count) for seq, _, count in process.burnt)
            yield from self._write(world, number, process._replace(riding=riding, burnt=()), tenant, size)

    def _write(self, world: World, number: int, process: Process, tenant: str, size: int) -> Iterator[Step]:
        made, lines, name = world.made, world.lines, _name(number)
        before = self.rules.totals(lines)
        for seq, count in process.riding:
            made += 1
            lines = (*lines, Line(COMMIT, seq, count, "", made))
        made += 1
        lines = (*lines, Line(RESERVE, 0, size, tenant, made))
        after = self._accepted(lines, world)
        if after is None:
            return
        seq, uid = len(lines), made
        chain = tuple(line.uid for line in lines) if self.scene.anchor and self.scene.copies else ()
        if self.scene.snapshot and len(lines) - world.last_snapshot() >= self.scene.snapshot:
            made += 1
            totals = before if self.plant == "a snapshot is taken before the lines beside it" else after
            lines = (*lines, Line(SNAPSHOT, 0, 0, "", made, totals))
        waits = process._replace(riding=(), pending=Pending(seq, uid, size, tenant, VISIBLE, chain))
        anchor = world.anchor
        if self.plant == "the anchor gets a line before the line is durable":
            anchor = max(anchor or (0, 0), (seq, uid))
        if self.plant == "a commit is written before its reservation is durable":
            made += 1
            lines = (*lines, Line(COMMIT, seq, 1, "", made))
        if self.plant == "a ticket burns before its line is durable":
            waits = waits._replace(pending=(), purse=_with(process.purse, Lease(seq, uid, size, tenant)))
        wish = f"{size} for {tenant}" if tenant else f"{size}"
        yield f"{name} reserves {wish}", world.replaced(number, waits, lines=lines, made=made, anchor=anchor)
        if world.lost < self.scene.lost:
            doubts = process._replace(riding=(), doubt=(seq, uid, size, tenant))
            lost = world.replaced(number, doubts, lines=lines, made=made, lost=world.lost + 1)
            yield f"{name} reserves {wish}, answer lost", lost

    def _accepted(self, lines: tuple[Line, ...], world: World) -> Totals | None:
        """The totals of new lines, or None where a restored copy lacks what they settle: then nothing is written."""
        fault = ""
        try:
            return self.rules.totals(lines)
        except LedgerError as error:
            fault = str(error)
        require(world.is_restored, f"a line that the rules refuse: {fault}")
        return None

    def _finish(self, world: World, number: int, pending: Pending) -> Iterator[Step]:
        """A line that is visible becomes durable, then known to the anchor; then its tickets are granted."""
        process, name = world.processes[number], _name(number)
        without = world.replaced(number, process._replace(pending=()))
        if pending.phase == VISIBLE:
            if not world.holds(pending.seq, pending.uid):
                yield f"{name}'s flush finds its line gone", without
                return
            phase = DURABLE if process.has_named else WRITTEN
            on_disk = process._replace(pending=pending._replace(phase=phase))
            yield f"{name}'s flush returns", world.replaced(number, on_disk, durable=len(world.lines))
            return
        if pending.phase == WRITTEN:
            named = process._replace(pending=pending._replace(phase=DURABLE), has_named=True)
            yield f"{name} writes the log's name", world.replaced(number, named, is_named=True)
            return
        last = pending.seq, pending.uid
        seen = max(process.seen, last) if self._watches_seen and world.holds(*last) else process.seen
        lease = Lease(*last, pending.count, pending.tenant)
        granted = world.replaced(number, process._replace(pending=(), seen=seen, purse=_with(process.purse, lease)))
        if not self.scene.anchor:
            yield f"{name} is granted {pending.count}", granted
            return
        known = world.anchor or (0, 0)
        if known[0] > pending.seq:
            stands = world.holds(*last) or self.plant == "its own line is not looked for behind the anchor's"
            yield f"{name}'s anchor is ahead", granted if world.holds(*known) and stands else without
        elif known != last and (known[0] == pending.seq or not self._follows(world, pending, known)):
            yield f"{name}'s anchor has another line", without
        else:
            yield f"{name} anchors, is granted {pending.count}", granted._replace(anchor=last)

    def _follows(self, world: World, pending: Pending, known: tuple[int, int]) -> bool:
        """Whether the anchor, given line by line what this process appended to, finds its own line among them."""
        if not known[0] or not pending.chain or self.plant == "the anchor gets the last line only":
            return True
        if self.plant == "the anchor gets lines that are read anew":
            return world.holds(*known)
        return pending.chain[known[0] - 1] == known[1]

    def _reclaim(self, world: World, number: int) -> Iterator[Step]:
        """Gives back open tickets of another process."""
        process = world.processes[number]
        if self._refuses(world, process):
            return
        up = [each for each in world.processes if each.is_up]
        alive = {lease.uid for each in up for lease in each.purse} | {uid for each in up for _, uid, _ in each.burnt}
        alive |= {each.pending.uid for each in up if each.pending}
        riding = {seq for each in up for seq, _ in each.riding}
        mine = {lease.uid for lease in process.purse} | {uid for _, uid, _ in process.burnt}
        for seq, unsettled in self.rules.totals(world.lines).unsettled:
            line = world.lines[seq - 1]
            if line.uid in mine:
                continue
            is_dead = line.uid not in alive and seq not in riding
            if self.plant == "tickets of others return after a while" or (
                is_dead and self.plant == "tickets of the dead return"
            ):
                count = unsettled
            elif is_dead and (not world.boot or self.plant == "the journal is read after a loss of power"):
                committed = self.rules.settled(world.lines).committed.get(line.uid, 0)
                count = unsettled - (dict(world.journal).get(line.uid, 0) - committed)
            else:
                continue
            if count > 0:
                lines = (*world.lines, Line(GIVE_BACK, seq, count, "", world.made + 1))
                yield f"{_name(number)} reclaims {count} of {seq}", world._replace(lines=lines, made=world.made + 1)

    def _refuses(self, world: World, process: Process) -> bool:
        """Whether a process finds that the ledger went back; where it did not, that is a fault of the protocol."""
        is_sound = world.holds(*process.seen)
        if self.scene.anchor and world.anchor:
            is_sound = is_sound and world.holds(*world.anchor)
        require(is_sound or world.is_restored, "a false alarm: a line that was seen is gone, and no copy was restored")
        return not is_sound

    def _view(self, lines: tuple[Line, ...], base: int) -> Totals:
        """What a process finds that opened from snapshot `base` and reads the lines after it."""
        if not base:
            return self.rules.totals(lines)
        snapshot = lines[base - 1].snapshot
        if not snapshot:
            raise Violation("a snapshot without totals")
        left, used, unsettled = snapshot.left, dict(snapshot.used), dict(snapshot.unsettled)
        for seq, line in enumerate(lines[base:], base + 1):
            if line.kind == RESERVE:
                left -= line.count
                used[line.tenant] = used.get(line.tenant, 0) + line.count
                unsettled[seq] = line.count
            elif line.kind in {COMMIT, GIVE_BACK}:
                require(unsettled.get(line.entry, 0) >= line.count, f"line {seq} settles what the snapshot lacks")
                unsettled[line.entry] -= line.count
                if line.kind == GIVE_BACK:
                    left += line.count
                    used[lines[line.entry - 1].tenant] -= line.count
        return Totals(left, _counts(used), _counts(unsettled))

    # Invariants

    def check(self, world: World) -> None:
        """Raises a Violation in a state that must not be."""
        reads = sum(count for _, count in world.reads)
        if self.scene.anchor or not world.is_restored:
            require(reads <= self.scene.tickets, f"{reads} private reads on {self.scene.tickets} tickets")
        if world.is_restored:
            return
        if self.scene.cap is not None:
            for tenant, count in world.by_tenant:
                require(count <= self.scene.cap, f"{count} reads of tenant {tenant!r}, cap {self.scene.cap}")
        sure = world.lines[: world.sure]
        on_disk, visible = self.rules.settled(sure), self.rules.settled(world.lines)
        totals = self.rules.totals(sure)
        charged, used = self.scene.tickets - totals.left, dict(totals.used)
        require(reads <= charged, f"{reads} private reads, {charged} tickets charged on the disk")
        for tenant, count in world.by_tenant:
            require(count <= used.get(tenant, 0), f"{count} reads of tenant {tenant!r}, {used.get(tenant, 0)} charged")
        burnt = dict(world.reads)
        for uid, count in burnt.items():
            require(uid in on_disk.reserved, "a receipt whose line is not on the disk")
            require(count <= on_disk.reserved[uid], "two receipts of one line and index")
        for uid, count in visible.returned.items():
            require(burnt.get(uid, 0) + count <= visible.reserved[uid], "a ticket that was burnt was given back")
        for uid, count in visible.committed.items():
            require(uid in on_disk.reserved, "a commit before its reservation is durable")
            require(count <= burnt.get(uid, 0), "a commit of a ticket that did not burn")


_TAKES_FROM_OTHERS = {
    "tickets of others return after a while",
    "tickets of the dead return",
    "the journal is read after a loss of power",
}


def _name(number: int) -> str:
    return "ABC"[number]


def _with(purse: tuple[Lease, ...], lease: Lease) -> tuple[Lease, ...]:
    return tuple(sorted((*purse, lease)))


def _plus(counts: dict[_Key, int], key: _Key) -> tuple[tuple[_Key, int], ...]:
    """Counts one more under a key."""
    return tuple(sorted((counts | {key: counts.get(key, 0) + 1}).items()))


def _counts(counts: dict[_Key, int]) -> tuple[tuple[_Key, int], ...]:
    return tuple(sorted((key, count) for key, count in counts.items() if count))
