"""Runs schedules of several processes against the real ledger, and asks the oracle what they gave away.

Prices are mu squared and add up, so that the ledger's epsilon is the limit of what the oracle adds up.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from langchain_dpicl.exceptions import DPICLError
from langchain_dpicl.privacy._validate import Adjacency
from langchain_dpicl.privacy.accounting.events import GaussianEvent
from langchain_dpicl.privacy.extensions.durable_writer import LeasingWriter
from langchain_dpicl.privacy.extensions.stream_ledger import StreamShare, StreamTerms, retire
from langchain_dpicl.privacy.ledger.shares import Reservation
from langchain_dpicl.privacy.ledger.state import LedgerState
from langchain_dpicl.privacy.ledger.store import InMemoryStore, LedgerHeader, LedgerStore
from langchain_dpicl.privacy.ledger.tickets import Component, ShareTerms, Ticket, event_of_components
from langchain_dpicl.privacy.ledger.writer import ShareStatus
from tests.windows.oracle import LABELS, VOTES, Entry, Reader, Released, one_row_each, worst_loss

SLACK = 1e-9


def header(window: int, *, limit: float = 1.0, adjacency: Adjacency = "add_remove") -> LedgerHeader:
    """Returns the header of a ledger of days."""
    stream = StreamTerms.parse(f"{window} days")
    return LedgerHeader("f0" * 16, "test", limit, 0.5, adjacency, "2026-01-02T03:04:05+00:00", stream=stream)


def terms_of(
    name: str,
    extent: tuple[int, int | None],
    *,
    scale: float,
    most: int,
    price: float | None = None,
    tickets: Sequence[Ticket] | None = None,
) -> ShareTerms:
    """Returns a share of `most` tickets per window, each of Gaussian noise of `scale`, at their price in mu squared."""
    runs = [Ticket("run", GaussianEvent(scale), max_count=most, refundable=True)] if tickets is None else tickets
    component = Component(name, "tickets", tuple(runs), extent=extent, partition="d")
    epsilon = most / scale**2 if price is None else price
    return ShareTerms((component,), epsilon, 1e-6, joint=False, event=event_of_components((component,)), pricing={})


@dataclass
class Simulation:
    """Several processes on one ledger, the records that they read, and all that they released."""

    window: int
    num_blocks: int
    entries: Sequence[Entry]
    exchange: bool = False
    limit: float = 1.0
    read: Reader = one_row_each
    store: LedgerStore = field(default_factory=InMemoryStore)
    processes: int = 2
    most_held: int = 1
    released: list[Released] = field(default_factory=list)
    gone: int = 0
    removed: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        adjacency: Adjacency = "replace_one" if self.exchange else "add_remove"
        self.header = self.store.create(header(self.window, limit=self.limit, adjacency=adjacency))
        self.desks = [self._desk() for _ in range(self.processes)]
        self.terms: dict[str, tuple[ShareTerms, float]] = {}

    def _desk(self) -> LeasingWriter:
        return LeasingWriter(self.store, self.header, most_held=self.most_held)

    def restart(self, process: int) -> None:
        """Kills a process and starts it again: what it had reserved and not used stays charged."""
        self.desks[process] = self._desk()

    def declare(
        self, name: str, first: int, last: int | None = None, *, scale: float = 2.0, most: int = 1, **terms: Any
    ) -> None:
        """Declares a share in every process; the first reservation seals it."""
        # A vote that moves is a step of 1 in two cells, one that comes or goes a step of 1 in one.
        price = terms.pop("price", (2 if self.exchange else 1) * most / scale**2)
        self.terms[name] = terms_of(name, (first, last), scale=scale, most=most, price=price, **terms), scale

    def share(self, name: str, process: int = 0) -> StreamShare:
        """Returns a process's share."""
        terms, _ = self.terms[name]
        return StreamShare(self.desks[process], terms.components[0], ShareStatus(terms=terms))

    def reserve(self, name: str, first: int, last: int, *, count: int = 1, process: int = 0, **how: Any) -> Reservation:
        """Reserves tickets."""
        return self.share(name, process).reserve("run", count=count, blocks=(first, last), **how)

    def release(self, held: Reservation, *, now: int | None = None, reads: tuple[int, int] | None = None) -> None:
        """Burns a ticket, reads the blocks and releases: those of the ticket, as the curator sees to."""
        held.burn()
        first, last = held.blocks if reads is None else reads  # type: ignore[misc]
        labels = frozenset(range(LABELS)) if held.label is None else frozenset((int(held.label),))
        now = self.num_blocks if now is None else now
        self.released.append(Released(first, last, self.terms[held.component][1], self.gone, self.removed, now, labels))

    def run(self, name: str, first: int, last: int, **how: Any) -> None:
        """Reserves a ticket and releases."""
        self.release(self.reserve(name, first, last, **how))

    @property
    def ratio(self) -> float:
        """The largest loss of all that was released, by the limit."""
        worst = worst_loss(
            self.entries, self.window, self.num_blocks, self.released, exchange=self.exchange, read=self.read
        )
        return worst / self.limit

    def verified(self) -> LedgerState:
        """Returns the state that all lines make, in a process that was not there."""
        state = LedgerState(self.header)
        state.apply_all(self.store.records())
        return state


def some_people(rng: random.Random, num_blocks: int, window: int) -> list[Entry]:
    """Returns persons of one block, of one window with another label each day, always there, at the edges, and late."""
    entries: list[Entry] = []

    def add(person: int, block: int, label: int, vote: int, late: int = 0) -> None:
        if 0 <= block < num_blocks:
            entries.append(Entry(person, block, block + late, label, vote, len(entries)))

    start = rng.randrange(num_blocks)
    add(0, start, 0, 0)
    for day in range(min(window, num_blocks)):
        add(1, start + day, day % LABELS, day % VOTES, late=rng.choice((0, 0, 1)))
    for block in range(num_blocks):
        add(2, block, rng.randrange(LABELS), block % VOTES)
    for block in (start, start + window - 1, start + window):
        add(3, block, rng.randrange(LABELS), rng.randrange(VOTES), late=rng.choice((0, 2)))
    for _ in range(rng.randrange(6)):
        add(rng.randrange(4, 6), rng.randrange(num_blocks), rng.randrange(LABELS), rng.randrange(VOTES))
    return entries


def random_schedule(seed: int, *, exchange: bool, store: LedgerStore | None = None, most_held: int = 1) -> Simulation:
    """Runs one random life of a stream: dated and standing shares, several processes, crashes, and greed."""
    rng = random.Random(seed)
    num_blocks = rng.randrange(3, 11)
    window = rng.choice((1, 2, 3, 4, num_blocks))
    entries = some_people(rng, num_blocks, window)
    stores = {} if store is None else {"store": store}
    it = Simulation(window, num_blocks, entries, exchange=exchange, most_held=most_held, **stores)
    greedy = rng.random() < 0.5
    for now in range(num_blocks):
        for _ in range(rng.randrange(1, 7)):
            try:
                _act(it, rng, now, greedy=greedy)
            except DPICLError:
                continue  # refused
    return it


def _act(it: Simulation, rng: random.Random, now: int, *, greedy: bool) -> None:
    process, act, names = rng.randrange(it.processes), rng.random(), list(it.terms)
    if act < 0.3 or not names:
        most = rng.randrange(1, 5)
        scale = (2 if greedy else rng.choice((2, 3, 4, 6))) * most**0.5 * rng.choice((0.5, 1, 1))
        first = rng.randrange(max(0, now - 2), now + 2) if rng.random() < 0.5 else 0
        last = None if rng.random() < 0.5 else first + rng.randrange(it.num_blocks)
        it.declare(f"s{len(names)}", first, last, scale=scale, most=most)
    elif act < 0.9:
        name = names[-1] if greedy and rng.random() < 0.7 else rng.choice(names)
        last = rng.randrange(it.gone, now + 1) if rng.random() < 0.4 else now
        first = max(it.gone, last - rng.randrange(it.num_blocks))
        count = rng.choice((1, 1, 2))
        held = it.reserve(name, first, last, count=count, process=process)
        done = rng.randrange(count + 1) if rng.random() < 0.2 else count
        for _ in range(done):
            it.release(held, now=now)
        if done and rng.random() < 0.5:
            held.commit(done)
        if rng.random() < 0.15:
            it.restart(process)
        else:
            held.give_back()
    elif act < 0.95:
        retire(it.desks[process], rng.choice(names))
    elif act < 0.98:
        it.gone = max(it.gone, now - rng.randrange(1, 4))
    else:
        it.removed |= {rng.randrange(6)}
