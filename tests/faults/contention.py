"""L1: 64 contenders on a budget for 10. Exactly 10 are granted, 54 refused, and nothing else happens."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from langchain_dpicl.exceptions import PrivacyBudgetExceededError
from langchain_dpicl.privacy.ledger.shares import Share
from tests.faults.children import Start, together
from tests.faults.counts import Count, require
from tests.faults.places import Place, Places, Terms, reserved

CONTENDERS = 64
TERMS = Terms(10)
HANDLES = 8


def contend(places: Places, count: Count, *, trials: int, mode: str) -> None:
    """Runs trials of one of `MODES`."""
    for number in range(trials):
        with count.trial(f"{mode} {number}"):
            place = places()
            budget, _ = TERMS.made(place)
            outcomes = Counter(MODES[mode](place))
            count.seen += outcomes
            require(outcomes == {"granted": 10, "refused": CONTENDERS - 10}, f"outcomes {dict(outcomes)}")
            budget.verify()
            require(reserved(place.open()) == 10, "the ledger holds another number of tickets")


def attempt(share: Share) -> str:
    try:
        share.reserve("t").burn()
    except PrivacyBudgetExceededError:
        return "refused"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "granted"


def by_threads(place: Place, contenders: int = CONTENDERS, start: Start = lambda: None) -> list[str]:
    """Every eighth thread shares a budget object; the objects share the ledger."""
    shares = [TERMS.opened(place)[1] for _ in range(min(HANDLES, contenders))]
    start()
    barrier = threading.Barrier(contenders)

    def one(number: int) -> str:
        barrier.wait()
        return attempt(shares[number % len(shares)])

    with ThreadPoolExecutor(contenders) as pool:
        return list(pool.map(one, range(contenders)))


def by_tasks(place: Place, contenders: int = CONTENDERS, start: Start = lambda: None) -> list[str]:
    """Tasks of one event loop, which hand the ledger's waits to threads."""
    shares = [TERMS.opened(place)[1] for _ in range(2)]

    async def all_of_them() -> list[str]:
        gate = asyncio.Event()

        async def one(number: int) -> str:
            await gate.wait()
            return await asyncio.to_thread(attempt, shares[number % 2])

        tasks = [asyncio.ensure_future(one(number)) for number in range(contenders)]
        await asyncio.sleep(0)
        start()
        gate.set()
        return await asyncio.gather(*tasks)

    return asyncio.run(all_of_them())


def by_processes(place: Place) -> list[str]:
    def one(start: Start) -> str:
        share = TERMS.opened(place)[1]
        start()
        return attempt(share)

    return together([one] * CONTENDERS)


def by_processes_from_nothing(place: Place) -> list[str]:
    """Workers that come up together: they open, declare and reserve at once."""

    def one(start: Start) -> str:
        start()
        return attempt(TERMS.opened(place)[1])

    return together([one] * CONTENDERS)


def mixed(place: Place) -> list[str]:
    """Eight processes: four of eight threads, four of eight tasks."""

    def threads(start: Start) -> list[str]:
        return by_threads(place, 8, start)

    def tasks(start: Start) -> list[str]:
        return by_tasks(place, 8, start)

    return [outcome for some in together([threads, tasks] * 4) for outcome in some]


MODES: dict[str, Callable[[Place], list[str]]] = {
    "threads": by_threads,
    "asyncio": lambda place: ThreadPoolExecutor(1).submit(by_tasks, place).result(),  # a loop may run here already
    "processes": by_processes,
    "processes from nothing": by_processes_from_nothing,
    "mixed": mixed,
}
