"""Every planted mistake of a ledger of windows is found by one short schedule, and the real one holds it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from langchain_dpicl.exceptions import DPICLError
from langchain_dpicl.privacy.accounting.events import GaussianEvent
from langchain_dpicl.privacy.extensions import durable_writer as writers
from langchain_dpicl.privacy.extensions import stream_ledger as windows
from langchain_dpicl.privacy.extensions.durable_writer import Purse
from langchain_dpicl.privacy.extensions.stream_ledger import StreamState, Windows, WindowSums, retire
from langchain_dpicl.privacy.ledger.shares import Reservation
from langchain_dpicl.privacy.ledger.state import LedgerState
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.privacy.ledger.writer import Grant
from tests.durable import EarlyStore
from tests.windows.oracle import Entry, by_arrival, first_of_a_block, rows_per_block
from tests.windows.simulator import Simulation

Plant = Callable[[pytest.MonkeyPatch, Simulation], object]


def records(*places: tuple[int, int, int]) -> list[Entry]:
    """Returns one record for each (person, block, label), none of them late."""
    return [Entry(person, block, block, label, 0, number) for number, (person, block, label) in enumerate(places)]


def no_plant(patch: pytest.MonkeyPatch, it: Simulation) -> None:
    """The real ledger."""


@dataclass(frozen=True)
class Case:
    """A mistake, and a schedule that shows it."""

    plant: Plant
    schedule: Callable[[Simulation], None]
    window: int = 1
    entries: Sequence[Entry] = ()
    options: Any = None


# -- schedules --------------------------------------------------------------------------------------------------------


def twice_over(*second: int) -> Callable[[Simulation], None]:
    """A share of one run per window runs on block 0, and then on other blocks."""

    def schedule(it: Simulation) -> None:
        it.declare("a", 0, scale=1.0)
        it.run("a", 0, 0)
        NOW[0] += 1
        it.run("a", *second)

    return schedule


def retired_then_another(it: Simulation) -> None:
    it.declare("a", 0, scale=1.0)
    it.run("a", 0, 0)
    retire(it.desks[0], "a")
    it.declare("b", 0, scale=1.0)
    it.run("b", 0, 0)


def by_label(it: Simulation) -> None:
    tickets = [Ticket("run", GaussianEvent(1.0), label=label) for label in "01"]
    it.declare("a", 0, scale=1.0, price=1.0, tickets=tickets)
    for block, label in enumerate("01"):
        it.run("a", block, block, label=label)


def one_wide_run(it: Simulation) -> None:
    it.declare("a", 0, scale=1.0)
    it.run("a", 0, 2)


def each_block(it: Simulation) -> None:
    it.declare("a", 0, scale=1.0)
    for block in range(2):
        it.run("a", block, block)


def an_exchange(it: Simulation) -> None:
    it.declare("a", 0, scale=1.0, **({"price": 1.0} if it.options_of_case.get("is_half") else {}))  # type: ignore[attr-defined]
    it.run("a", 0, 1)


def used_and_given_back(it: Simulation) -> None:
    it.declare("a", 0, scale=1.0)
    held = it.reserve("a", 0, 0)
    it.release(held)
    held.give_back()
    it.run("a", 0, 0)


def used_by_who_died(it: Simulation) -> None:
    it.declare("a", 0, scale=1.0)
    it.run("a", 0, 0)
    it.restart(0)
    it.run("a", 0, 0)


def deleted_then_again(it: Simulation) -> None:
    it.declare("a", 0, scale=1.0)
    held = it.reserve("a", 0, 0)
    it.release(held)
    it.delete_before(1, held)  # type: ignore[attr-defined]
    it.run("a", 1, 1)


def leased_for_another_run(it: Simulation) -> None:
    it.declare("a", 0, scale=128**0.5, most=128)
    for block in (0, 1):
        it.run("a", block, block)
        it.run("a", block, block)  # the second one of block 0 leases two more
    rest = it.reserve("a", 1, 1, count=it.share("a").remaining("run", blocks=(1, 1)))
    for _ in range(rest.count):
        it.release(rest)


# -- mistakes ---------------------------------------------------------------------------------------------------------

NOW = [0]
touched, extent_of, left_for, left = Windows.touched, Windows.extent_of, StreamState._left_for, StreamState.left
sealed, take = Purse.sealed, Purse.take


def charged_to(patch: pytest.MonkeyPatch, place: Callable[[tuple[int, int]], tuple[int, int]]) -> None:
    """Charges other blocks than those that are read, in the rules and where a process looks ahead."""
    patch.setattr(Windows, "check_blocks", lambda self, component, blocks: place(blocks))
    patch.setattr(StreamState, "left", lambda self, name, slot, blocks=None: left(self, name, slot, place(blocks)))


def of_the_clock(patch: pytest.MonkeyPatch, it: Simulation) -> None:
    """Windows of the time of the release."""
    charged_to(patch, lambda blocks: (NOW[0], NOW[0]))


def last_block_alone(patch: pytest.MonkeyPatch, it: Simulation) -> None:
    """A run over a range is charged to its last block."""
    charged_to(patch, lambda blocks: (blocks[1], blocks[1]))


def one_too_short(patch: pytest.MonkeyPatch, it: Simulation) -> None:
    """Windows of W - 1 blocks."""
    patch.setattr(Windows, "touched", lambda self, extent: (extent[0], max(touched(self, extent)[1] - 1, extent[0])))


def retired_for_nothing(patch: pytest.MonkeyPatch, it: Simulation) -> None:
    """A share that is retired gives its price back for blocks that it has read."""
    patch.setattr(Windows, "extent_of", lambda self, c: None if self.is_retired(c.name) else extent_of(self, c))


def labels_apart(patch: pytest.MonkeyPatch, it: Simulation) -> None:
    """Tickets of each label are counted apart, at the price of one."""
    patch.setattr(windows, "check_extent", lambda component: None)


def read_by(reader: Any) -> Plant:
    return lambda patch, it: patch.setattr(it, "read", reader)


def half_price(patch: pytest.MonkeyPatch, it: Simulation) -> None:
    """A part of a person's records is hidden at the price of a person who comes or goes."""
    it.options_of_case["is_half"] = True  # type: ignore[attr-defined]


def old_view(patch: pytest.MonkeyPatch, it: Simulation) -> None:
    """A writer decides on what stood before the others wrote."""
    before = LedgerState(it.header)

    def old(self: LedgerState, totals: Any, blocks: Any) -> Any:
        unused = type(totals)(totals.component, totals.slot, 0, refundable=True, taken=WindowSums())
        return left_for(before, unused, blocks)

    patch.setattr(StreamState, "_left_for", old)


def burnt_comes_back(patch: pytest.MonkeyPatch, it: Simulation) -> None:
    """A ticket that was used can be given back."""
    patch.setattr(Reservation, "burn", lambda self, count=1: None)


def dead_gives_back(patch: pytest.MonkeyPatch, it: Simulation) -> None:
    """What a dead process had reserved comes back, used or not."""

    def restart(process: int) -> None:
        for entry in list(it.desks[process].refresh().open_reservations()):
            it.desks[1].give_back(Grant(it.store.records(entry.entry - 1, limit=1)[0]), entry.count)

    patch.setattr(it, "restart", restart)


def deleting_refunds(patch: pytest.MonkeyPatch, it: Simulation) -> None:
    """Deleting old blocks gives back what was charged to them."""

    def delete_before(block: int, held: Reservation) -> None:
        it.gone = block
        it.desks[0].give_back(held._grant, 1)

    it.delete_before = delete_before  # type: ignore[attr-defined]


def lease_for_any_run(patch: pytest.MonkeyPatch, it: Simulation) -> None:
    """A ticket that was leased for one run is used in the next one."""
    patch.setattr(Purse, "sealed", lambda self, key: sealed(self, key._replace(blocks=(0, 0))))
    patch.setattr(Purse, "take", lambda self, key: take(self, key._replace(blocks=(0, 0))))
    patch.setattr(writers, "_is_of_other_blocks", lambda wanted, key: False)


ALONE = records((0, 0, 0))
CASES = {
    "windows of wall-clock time": Case(of_the_clock, twice_over(0, 0), entries=ALONE),
    "only the last block is charged": Case(last_block_alone, twice_over(0, 1), entries=ALONE),
    "windows of W - 1": Case(one_too_short, twice_over(1, 1), 2, records((0, 0, 0), (0, 1, 0))),
    "retirement frees read blocks": Case(retired_for_nothing, retired_then_another, entries=ALONE),
    "deletion refunds": Case(deleting_refunds, deleted_then_again, 2, records((0, 0, 0), (0, 1, 0))),
    "labels counted apart": Case(labels_apart, by_label, 2, records((0, 0, 0), (0, 1, 1))),
    "rows per block": Case(read_by(rows_per_block), one_wide_run, 3, records((0, 0, 0), (0, 1, 0), (0, 2, 0))),
    "late records move": Case(
        read_by(by_arrival), each_block, entries=[Entry(0, 0, 0, 0, 0, 0), Entry(0, 0, 1, 1, 0, 1)]
    ),
    "an old view decides": Case(old_view, twice_over(0, 0), entries=ALONE),
    "part of a person at the price of removal": Case(
        half_price, an_exchange, entries=records((0, 0, 0), (0, 1, 1)), options={"exchange": True}
    ),
    "a cap shared by persons": Case(
        read_by(first_of_a_block), one_wide_run, entries=records((0, 0, 0), (1, 0, 1), (2, 0, 1))
    ),
    "burnt tickets come back": Case(burnt_comes_back, used_and_given_back, entries=ALONE),
    "a dead process's tickets come back": Case(dead_gives_back, used_by_who_died, entries=ALONE),
    "a lease of one run used in the next": Case(
        lease_for_any_run, leased_for_another_run, entries=records((0, 1, 0)), options={"most_held": 64}
    ),
}


def ratio_of(case: Case, plant: Plant, patch: pytest.MonkeyPatch) -> float:
    """Runs a schedule up to what is refused; returns its loss by the promise."""
    NOW[0] = 0
    stopped = type("Clock", (), {"monotonic": staticmethod(lambda: 1000.0)})
    patch.setattr(writers, "time", stopped)
    it = Simulation(case.window, 3, case.entries, store=EarlyStore(), **(case.options or {}))
    it.options_of_case = {}  # type: ignore[attr-defined]
    it.delete_before = lambda block, held: setattr(it, "gone", block)  # type: ignore[attr-defined]
    plant(patch, it)
    with contextlib.suppress(DPICLError):  # the rest is refused
        case.schedule(it)
    return it.ratio


@pytest.mark.parametrize("name", CASES)
def test_a_planted_mistake_is_found_by_one_short_schedule(name: str) -> None:
    case = CASES[name]
    with pytest.MonkeyPatch.context() as patch:
        assert ratio_of(case, case.plant, patch) > 1.01, name
    with pytest.MonkeyPatch.context() as patch:
        assert ratio_of(case, no_plant, patch) <= 1 + 1e-9, name
