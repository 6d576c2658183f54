"""L1 and L2 with leases: every ticket of a line is granted once, whichever process holds the others, and is killed with them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from langchain_dpicl.exceptions import PrivacyBudgetExceededError
from langchain_dpicl.privacy.extensions.durable_writer import MOST_HELD
from langchain_dpicl.privacy.ledger.shares import Share
from langchain_dpicl.privacy.ledger.state import COMMIT, RESERVE
from langchain_dpicl.privacy.ledger.store import LedgerStore
from tests.faults.children import Child, Start, Teller, together
from tests.faults.counts import Count, require
from tests.faults.places import Place, Places, Terms, lines, reserved

FEW, MANY = Terms(1_500, refundable=True), Terms(1_000_000, refundable=True)
PROCESSES, THREADS = 6, 2
PER_LEDGER = 30
LONGEST = 0.2
WORKING = 0.8
PlaceOfTicket = tuple[int, int]
"""The line that reserved a ticket, and its index there."""


def share_out(places: Places, count: Count, *, trials: int) -> None:
    """Lets processes of some threads each use one ledger up; one of them asks for blocks now and then."""
    for number in range(trials):
        with count.trial(f"ledger {number}"):
            place = places()
            FEW.made(place)[0].close()
            told = together([_use_up(place, has_blocks=not who) for who in range(PROCESSES)])
            _check_used_up(place, [tuple(each) for some in told for each in some["places"]], count)
            count.seen["refused while others held some"] += sum(some["held"] for some in told)


def _use_up(place: Place, *, has_blocks: bool) -> Callable[[Start], Any]:
    def work(start: Start) -> dict[str, Any]:
        budget, share = FEW.opened(place)
        found: list[PlaceOfTicket] = []
        held: list[bool] = []
        start()

        def use() -> None:
            try:
                while True:
                    size = random.choice([1, 40]) if has_blocks and random.random() < 0.1 else 1
                    found.extend(used(share, size))
            except PrivacyBudgetExceededError as error:
                held.append(error.held > 0)

        with ThreadPoolExecutor(THREADS) as pool:
            for thread in [pool.submit(use) for _ in range(THREADS)]:
                thread.result()
        budget.close()
        return {"places": found, "held": sum(held)}

    return work


def used(share: Share, size: int = 1) -> list[PlaceOfTicket]:
    """Uses tickets; returns their places, noted when they burnt."""
    reservation = share.reserve("t", count=size)
    reservation.burn(size)
    burnt = [(reservation.entry, reservation.index + number) for number in range(size)]
    reservation.commit(size)
    return burnt


def check_places(store: LedgerStore, burnt: list[PlaceOfTicket]) -> None:
    """Compares the places of tickets that burnt with the lines."""
    counts = lines(store, RESERVE)
    require(len(set(burnt)) == len(burnt), "a ticket burnt twice")
    require(all(0 <= index < counts.get(entry, 0) for entry, index in burnt), "a ticket burnt that no line reserved")


def _check_used_up(place: Place, burnt: list[PlaceOfTicket], count: Count) -> None:
    budget, share = FEW.opened(place)
    budget.verify()
    store = place.open()
    check_places(store, burnt)
    spent = reserved(store)
    require(len(burnt) == spent == sum(lines(store, COMMIT).values()), f"{len(burnt)} burnt, {spent} charged")
    require(share.remaining("t") == FEW.count - spent >= 0, "what is left is not what the lines say")
    require(not budget.dangling(), "a process that ended well left tickets open")
    budget.close()
    count.seen["granted"] += len(burnt)
    count.seen["leases of several"] += sum(size > 1 for size in lines(store, RESERVE).values())


def kill(places: Places, count: Count, *, trials: int) -> None:
    """Kills processes that use single tickets, three at a time, wherever they are."""
    for first in range(0, trials, PER_LEDGER):
        place = places()
        MANY.made(place)[0].close()
        burnt: list[PlaceOfTicket] = []
        killed = 0
        for number in range(first, min(first + PER_LEDGER, trials), 3):
            with count.trial(f"kill {number}"):
                count.trials += 2  # the second and third of the three
                burnt += _kill_three(place)
                killed += 3
                _check_killed(place, burnt, killed)
        count.seen["granted"] += len(burnt)
        count.seen["leases of several"] += sum(size > 1 for size in lines(place.open(), RESERVE).values())


def _kill_three(place: Place) -> list[PlaceOfTicket]:
    def spend(tell: Teller) -> None:
        share = MANY.opened(place)[1]

        def use() -> None:
            while True:
                reservation = share.reserve("t")
                reservation.burn()
                tell([reservation.entry, reservation.index])
                reservation.commit()

        threading.Thread(target=use, daemon=True).start()
        use()

    children = [Child(spend) for _ in range(3)]
    for child in children:
        if random.random() < WORKING:
            child.wait_for_a_word()
        time.sleep(random.uniform(0, LONGEST))
        child.kill()
    told = [line for child in children for line in child.lines()]
    errors = [line for line in told if isinstance(line, dict)]
    require(not errors, f"a child failed: {errors}")
    return [(entry, index) for entry, index in told]


def _check_killed(place: Place, burnt: list[PlaceOfTicket], killed: int) -> None:
    budget, share = MANY.opened(place)
    budget.verify()
    store = place.open()
    check_places(store, burnt)
    spent = reserved(store)
    # Of each its purse or the leases that it waited for, and for each thread a ticket that was not reported.
    lost = spent - len(burnt)
    require(0 <= lost <= killed * (MOST_HELD + 2), f"{lost} tickets are lost to {killed} killed processes")
    require(share.remaining("t") == MANY.count - spent, "what is left is not what the lines say")
    budget.close()
