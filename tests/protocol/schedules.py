"""Random schedules of the real writer, budget and shares on a scripted store, whose faults come where they hurt.

Some processes, each with some threads, reserve, burn, commit and give back on one ledger. At every call of the store, the
anchor or a lock another thread may go on, the process may be killed, the power may fail, a database server may restart,
an answer may be lost. After every step the lines are compared with what really burnt.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import (
    LedgerError,
    LedgerRollbackError,
    LedgerUnavailableError,
    PrivacyBudgetExceededError,
)
from langchain_dpicl.privacy.accounting.events import PureEvent
from langchain_dpicl.privacy.extensions import durable_writer
from langchain_dpicl.privacy.ledger import state
from langchain_dpicl.privacy.ledger.shares import Reservation
from langchain_dpicl.privacy.ledger.state import BIND, COMMIT, GIVE_BACK, RESERVE, SEAL, SNAPSHOT
from langchain_dpicl.privacy.ledger.store import LedgerHeader, LedgerRecord, next_record
from langchain_dpicl.privacy.ledger.tickets import Ticket
from tests.faults.counts import Violation, require
from tests.protocol.turns import Actor, Ended, Turns, scripted


@dataclass
class Log:
    """The lines of all processes: visible ones, of which the disk has the first `durable`."""

    header: LedgerHeader | None = None
    lines: list[LedgerRecord] = field(default_factory=list)
    durable: int = 0
    late: list[LedgerRecord] = field(default_factory=list)  # a transaction whose answer was lost and that is not over
    is_early: bool = True  # whether lines are visible before they are durable
    ends: set[int] = field(default_factory=set)  # numbers of the last lines of transactions

    def decide(self, *, stands: bool) -> None:
        """Ends the transaction that is not over."""
        if stands and self.late:
            self.add(self.late)
        self.late = []

    def add(self, lines: list[LedgerRecord]) -> None:
        self.lines += lines
        self.ends.add(len(self.lines))
        if not self.is_early:
            self.durable = len(self.lines)

    @property
    def head(self) -> tuple[int, str]:
        if self.lines:
            return self.lines[-1].seq, self.lines[-1].hash
        return 0, "" if self.header is None else self.header.digest


class ScriptedStore:
    """A store of one process. What it raises, and when others go on, the schedule decides."""

    durable = True
    description = "a script"

    def __init__(self, schedule: Schedule, is_dead: Callable[[], bool]) -> None:
        self._schedule = schedule
        self._is_dead = is_dead
        self._open: list[LedgerRecord] | None = None

    def _at(self, place: str) -> None:
        if self._schedule.turns.current is None and self._is_dead():
            raise LedgerUnavailableError("its process is dead")  # the interpreter's end, which a killed one never meets
        self._schedule.meet(place)
        if self._is_dead():
            raise Ended

    def create(self, header: LedgerHeader) -> LedgerHeader:
        log = self._schedule.log
        log.header = log.header or header
        return log.header

    def header(self) -> LedgerHeader | None:
        return self._schedule.log.header

    def records(self, after: int = 0, *, limit: int | None = None) -> Sequence[LedgerRecord]:
        self._at("read")
        return self._schedule.log.lines[after:][:limit]

    def head(self) -> tuple[int, str]:
        self._at("read")
        return self._schedule.log.head

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Any]:
        log = self._schedule.log
        self._at("lock")
        with self._schedule.writing:
            log.decide(stands=self._schedule.rng.random() < 0.5)
            lines: list[LedgerRecord] = []
            yield _Transaction(log, lines)
            self._at("before the commit")
            if lines:
                self._schedule.lose_before(lines)
            log.add(lines)
        self._at("after the commit")

    def last_snapshot(self) -> Sequence[LedgerRecord]:
        self._at("read")
        lines = self._schedule.log.lines
        last = next((line for line in reversed(lines) if line.kind == SNAPSHOT), None)
        return [] if last is None else [*(line for line in lines[: last.seq] if line.kind in {BIND, SEAL}), last]

    def close(self) -> None:
        """There is nothing to close."""


class EarlyStore(ScriptedStore):
    """Gives its lock up when lines are visible, and waits for the disk after that."""

    def transaction(self, *, flush: bool = True) -> Any:
        require(not flush, "the writer waits for the disk under the lock")
        return super().transaction()

    def flush(self, seq: int, head: str) -> None:
        log = self._schedule.log
        self._at("before the flush")
        if seq and (seq > len(log.lines) or log.lines[seq - 1].hash != head):
            raise LedgerUnavailableError("the line is gone")
        log.durable = max(log.durable, len(log.lines))
        self._at("after the flush")


class _Transaction:
    def __init__(self, log: Log, lines: list[LedgerRecord]) -> None:
        self._log = log
        self._lines = lines

    def records(self, after: int = 0, *, limit: int | None = None) -> Sequence[LedgerRecord]:
        return [*self._log.lines, *self._lines][after:][:limit]

    def head(self) -> tuple[int, str]:
        return (self._lines[-1].seq, self._lines[-1].hash) if self._lines else self._log.head

    def append(self, kind: str, body: Mapping[str, Any]) -> LedgerRecord:
        self._lines.append(next_record(*self.head(), kind, body))
        return self._lines[-1]


class ScriptedAnchor:
    """An anchor of all processes, which may be out for a call."""

    description = "a scripted anchor"

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._known: dict[str, tuple[int, str]] = {}

    def read(self, ledger_id: str) -> tuple[int, str] | None:
        self._schedule.meet("read the anchor")
        return self._known.get(ledger_id)

    def write(self, ledger_id: str, seq: int, head: str) -> None:
        self._schedule.meet("before the anchor")
        known = self._known.get(ledger_id, (-1, ""))
        if known[0] == seq and known[1] != head:
            raise LedgerRollbackError("the anchor has another line of this number")
        if known[0] < seq:
            self._known[ledger_id] = seq, head
        self._schedule.meet("after the anchor")


_LOSES = {"before the commit", "after the commit", "before the flush", "after the flush", "read", "before the anchor"}
"""Where an answer may be lost, or the store be out."""


class Process:
    """One process: its hand on the ledger, what it holds, and what it committed."""

    def __init__(self, schedule: Schedule) -> None:
        self.is_dead = False
        self.held: list[Reservation] = []
        self.committed: Counter[int] = Counter()
        self.drawn: Counter[int] = Counter()  # tickets that were granted and have not gone back, by line
        self.budget: Budget | None = None
        self.share: Any = None
        self.opening = schedule.turns.lock()
        self._schedule = schedule

    def open(self) -> None:
        schedule = self._schedule
        store = schedule.kind(schedule, lambda: self.is_dead)
        is_new = schedule.log.header is None
        budget = Budget(
            epsilon=1.0,
            delta=1e-6,
            store=store,
            anchor=schedule.anchor,
            adopt_anchor=is_new,
            most_held=schedule.most_held,
        )
        n = schedule.tickets
        tickets = [Ticket("t", PureEvent(1 / n), max_count=n, refundable=True)]
        self.share, self.budget = budget.declare("c", tickets=tickets, epsilon=1.0), budget


class Schedule:
    """One random schedule; `run` raises a Violation where the lines and what burnt do not agree."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.turns = Turns(rng)
        self.log = Log()
        self.writing = self.turns.lock()
        self.tickets = rng.choice([2, 3, 4, 8, 24, 24])
        self.most_held = rng.choice([1, 2, 4, 4, 64])
        self.least_left = rng.choice([1, 1, 1, 2])
        self.snapshots = rng.choice([5, 12, 4096])
        self.cap = rng.choice([None, None, 2, 5])
        self.kind: type[ScriptedStore] = rng.choice([EarlyStore, EarlyStore, ScriptedStore])
        self.log.is_early = self.kind is EarlyStore
        self.is_server = rng.random() < 0.5
        self.anchor = ScriptedAnchor(self) if rng.random() < 0.4 else None
        self.faults = rng.randint(0, 4)
        self.had_faults = self.faults > 0
        self.burnt: Counter[str] = Counter()
        self.places: set[tuple[str, int]] = set()  # tickets that burnt, by their line and place
        self.processes: list[Process] = []
        self.clock: Any = None
        self._actors: list[tuple[int, Actor]] = []
        self._is_ending = False

    def run(self) -> tuple[int, int]:
        """Returns how many lines there are, and how many tickets burnt."""
        rng = self.rng
        with scripted(self.turns) as self.clock, self._sizes():
            self.processes = [self._started() for _ in range(rng.randint(1, 3))]
            threads = rng.choice([1, 1, 2, 3])
            numbers = [number for number in range(len(self.processes)) for _ in range(threads)]
            self._actors = [(number, Actor(self.turns, self._work(number))) for number in numbers]
            try:
                for _ in range(rng.randint(20, 160)):
                    self._turn()
                    self._meet_fate()
                self.faults, self._is_ending = 0, True
                while not all(actor.is_ended for _, actor in self._actors):
                    self._turn()
                self._look_back()
            finally:
                self._kill(set(range(len(self.processes))))
        return len(self.log.lines), sum(self.burnt.values())

    @contextlib.contextmanager
    def _sizes(self) -> Iterator[None]:
        """Lets leases and snapshots come after few tickets and lines."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(durable_writer, "LEAST_LEFT", self.least_left)
            patch.setattr(state, "SNAPSHOT_LINES", self.snapshots)
            yield

    def _turn(self) -> None:
        """Lets one thread go on."""
        able = [actor for _, actor in self._actors if actor.can_go_on]
        require(able or all(actor.is_ended for _, actor in self._actors), "every thread waits for another")
        if able:
            self.rng.choice(able).resume()
            self.check()

    def _started(self) -> Process:
        return Process(self)

    def _work(self, number: int) -> Callable[[], object]:
        """What one thread does until its end: the calls of a component, in any order."""

        def work() -> None:
            process = self.processes[number]
            while not self._is_ending:
                self.turns.pause()
                with contextlib.suppress(LedgerUnavailableError):
                    self._step(process)

        return work

    def _step(self, process: Process) -> None:
        rng = self.rng
        if process.share is None:
            with process.opening:
                if process.share is None:
                    process.open()
            return
        what = rng.random()
        if rng.random() < 0.05:
            self.clock.seconds += rng.choice([1.0, 6.0])
        if what < 0.4 or not process.held:
            self._reserve(process)
        elif what < 0.65:
            self._burn(rng.choice(process.held))
        elif what < 0.85:
            self._commit(process, rng.choice(process.held))
        elif what < 0.92:
            self._give_back(process, process.held.pop(rng.randrange(len(process.held))))
        else:
            self._look(process)

    def _reserve(self, process: Process) -> None:
        rng = self.rng
        whose = {"tenant": rng.choice(["x", "y"]), "tenant_cap": rng.choice([self.cap, 1])} if self.cap else {}
        try:
            held = process.share.reserve("t", count=rng.choice([1, 1, 1, 1, 1, 2, self.tickets // 2]), **whose)
        except PrivacyBudgetExceededError as error:
            require(error.remaining < error.requested, "refused although enough is left")
            return
        require(held.entry <= self.log.durable, "a ticket was granted whose line is not on the disk")
        process.held.append(held)
        process.drawn[held.entry] += held.count
        if whose:
            line = self.log.lines[held.entry - 1]
            require(line.body["tenant"] == whose["tenant"], "a ticket of another tenant")
            used = self._used(whose["tenant"], held.entry)
            require(used <= whose["tenant_cap"], f"{used} tickets of a tenant, cap {whose['tenant_cap']}")

    def _used(self, tenant: str, last: int) -> int:
        """Returns what a tenant had up to a line."""
        lines = self.log.lines[:last]
        mine = {line.seq for line in lines if line.kind == RESERVE and line.body.get("tenant") == tenant}
        used = sum(line.body["count"] for line in lines if line.seq in mine)
        return used - sum(
            line.body["count"] for line in lines if line.kind == GIVE_BACK and line.body["reservation"] in mine
        )

    def _give_back(self, process: Process, held: Reservation) -> None:
        process.drawn[held.entry] -= held.unburnt  # first: what is lost in between stays charged
        held.give_back()

    def _burn(self, held: Reservation) -> None:
        with contextlib.suppress(PrivacyBudgetExceededError):
            held.burn()
            self.burnt[held.entry_hash] += 1
            place = held.entry_hash, held.index + held.count - held.unburnt - 1
            require(place not in self.places, "two burnt tickets of one line and index")
            self.places.add(place)

    def _commit(self, process: Process, held: Reservation) -> None:
        if held.uncommitted:
            process.committed[held.entry] += 1
            try:
                held.commit(wait=self.rng.random() < 0.3)
            except LedgerUnavailableError:
                raise  # it is noted, and written later
            except LedgerError:
                process.committed[held.entry] -= 1  # another thread was first
                raise

    def _look(self, process: Process) -> None:
        share = process.share
        left = share.remaining("t")
        require(0 <= left <= self.tickets, f"{left} tickets remain of {self.tickets}")
        committed = share.committed("t")
        require(committed <= sum(self.burnt.values()), "more is committed than burnt")
        if self.rng.random() < 0.2:
            process.budget.settle()  # type: ignore[union-attr]

    # Faults

    def meet(self, place: str) -> None:
        """Lets others go on, and may lose the answer."""
        if self.turns.current is None:
            return
        if self.rng.random() < 0.5:
            self.turns.pause()
        if self.faults and place in _LOSES and self.rng.random() < 0.06:
            self.faults -= 1
            raise LedgerUnavailableError(f"lost: {place}")

    def lose_before(self, lines: list[LedgerRecord]) -> None:
        """May lose the connection in a commit: the server is at work on it still."""
        if self.is_server and self.faults and self.turns.current is not None and self.rng.random() < 0.06:
            self.faults -= 1
            self.log.late = list(lines)
            raise LedgerUnavailableError("lost in the commit")

    def _meet_fate(self) -> None:
        """Between two turns: a process is killed, the power fails, a server restarts or ends a transaction."""
        rng = self.rng
        if self.log.late and self.writing.owner is None and rng.random() < 0.2:
            self.log.decide(stands=rng.random() < 0.7)
        if not self.faults or rng.random() > 0.08:
            return
        self.faults -= 1
        if rng.random() < 0.4:
            self._restart({rng.randrange(len(self.processes))})
            return
        if not self.is_server:
            self._restart(set(range(len(self.processes))))
        elif self.writing.owner is not None:
            return  # a transaction is open: it ends first
        self.log.late = []
        kept = rng.randint(self.log.durable, len(self.log.lines))
        ends = [end for end in self.log.ends if end <= kept]
        kept = max([self.log.durable, *ends])  # of a transaction all lines stand, or none
        del self.log.lines[kept:]
        self.log.ends = {end for end in self.log.ends if end <= kept}
        self.log.durable = kept

    def _kill(self, numbers: set[int]) -> None:
        """Ends processes, wherever their threads are."""
        for number in numbers:
            self.processes[number].is_dead = True
        for number, actor in self._actors:
            if number in numbers:
                actor.end()

    def _restart(self, numbers: set[int]) -> None:
        """Kills processes, and starts others in their place."""
        self._kill(numbers)
        for number in numbers:
            self.processes[number] = self._started()
        self._actors = [
            (number, Actor(self.turns, self._work(number)) if number in numbers else actor)
            for number, actor in self._actors
        ]

    # Invariants

    def check(self) -> None:
        """Compares the lines with what burnt."""
        reserved = {line.hash: line for line in self.log.lines if line.kind == RESERVE}
        by_entry = {line.seq: line.hash for line in reserved.values()}
        back: Counter[str] = Counter()
        committed: Counter[str] = Counter()
        for line in self.log.lines:
            if line.kind in {COMMIT, GIVE_BACK}:
                (back if line.kind == GIVE_BACK else committed)[by_entry[line.body["reservation"]]] += line.body[
                    "count"
                ]
        used: Counter[str] = Counter()
        for name, count in self.burnt.items():
            line = reserved.get(name)
            if line is None or line.seq > self.log.durable:
                raise Violation("a ticket burnt whose line is not on the disk")
            require(count + back[name] <= line.body["count"], "a ticket burnt twice, or was given back as well")
            used[line.body.get("tenant", "")] += count
        require(sum(used.values()) <= self.tickets, "more tickets burnt than there are")
        require(not self.cap or all(count <= self.cap for count in used.values()), "a tenant is above its cap")
        for name, count in committed.items():
            require(count <= self.burnt[name], "a commit of a ticket that did not burn")

    def _look_back(self) -> None:
        """Closes what is open, and reads the ledger anew."""
        self.log.decide(stands=self.rng.random() < 0.5)
        for process in self.processes:
            if process.budget is not None and process.share is not None:
                process.budget.close()
                for entry, drawn in process.drawn.items():
                    committed, open_ones = self._settled(entry)
                    wanted = process.committed[entry]
                    require(committed == wanted, f"{wanted} tickets committed, {committed} of them written")
                    # An answer that was lost, also of what was taken back, leaves tickets open.
                    lost = open_ones - (drawn - wanted)
                    require(lost == 0 or (lost > 0 and self.had_faults), f"{lost} tickets of a purse did not return")
        self.check()
        if self.log.header is not None:
            last = self._started()
            last.open()
            last.budget.verify()  # type: ignore[union-attr]

    def _settled(self, entry: int) -> tuple[int, int]:
        """Returns how many tickets of a line are committed, and how many are open."""
        count = self.log.lines[entry - 1].body["count"]
        of = [line for line in self.log.lines if line.body.get("reservation") == entry]
        committed = sum(line.body["count"] for line in of if line.kind == COMMIT)
        return committed, count - sum(line.body["count"] for line in of)


def run(seed: int) -> tuple[int, int]:
    """Runs one schedule; a Violation names its seed."""
    fault = ""
    try:
        return Schedule(seed).run()
    except Violation as violation:
        fault = str(violation)
    except LedgerRollbackError as error:
        fault = f"a false alarm: {error}"
    except LedgerError as error:
        fault = f"{type(error).__name__}: {error}"
    raise Violation(f"schedule {seed}: {fault}")
