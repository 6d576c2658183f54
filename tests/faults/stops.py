"""L10: cancellation, time limits and interrupts anywhere. What was reserved stays; the ledger goes on."""

from __future__ import annotations

import asyncio
import gc
import linecache
import random
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import langchain_dpicl
from langchain_dpicl.privacy.extensions.durable_writer import MOST_HELD
from langchain_dpicl.privacy.ledger.shares import Share
from langchain_dpicl.privacy.ledger.state import GIVE_BACK
from tests.faults.counts import Count, require
from tests.faults.places import Place, Places, Terms, lines, reserved, settled

TERMS = Terms(100_000, refundable=True)
PACKAGE = str(Path(langchain_dpicl.__file__).parent)
PER_LEDGER = 25
STOPS = (KeyboardInterrupt, GeneratorExit, asyncio.CancelledError)


def interrupt(places: Places, count: Count, *, trials: int) -> None:
    """Stops reserve, commit and give back at a line of our code: at every line if `trials` is large enough."""
    place, share = _fresh(places)
    steps: dict[str, Callable[[], object]] = {
        "reserve": lambda: share.reserve("t"),
        "commit": partial(_burnt(share).commit, wait=True),
        "give back": share.reserve("t").give_back,
    }
    sizes = {name: stopped_at(step, sys.maxsize)[1] for name, step in steps.items()}
    moments = [(name, line) for name, size in sizes.items() for line in range(size)]
    chosen = moments if trials >= len(moments) else sorted(random.sample(moments, trials))
    for number, (name, line) in enumerate(chosen, start=1):
        known = len(count.violations)
        with count.trial(f"{name}, line {line}"):
            _interrupt(place, share, name, line, count)
        if len(count.violations) > known or number % PER_LEDGER == 0:
            place, share = _fresh(places)  # what a violation left behind is not the next one's
    count.seen["lines"] = len(moments)


def _fresh(places: Places) -> tuple[Place, Share]:
    place = places()
    _, share = TERMS.made(place)
    share.reserve("t")
    return place, share


def _burnt(share: Share) -> Any:
    reservation = share.reserve("t")
    reservation.burn()
    return reservation


def _interrupt(place: Place, share: Share, name: str, line: int, count: Count) -> None:
    store = place.open()

    def spent() -> int:
        return reserved(store) - sum(share._desk.kept().values())

    before = spent()
    reservation = None if name == "reserve" else _burnt(share) if name == "commit" else share.reserve("t")
    step = {
        "reserve": lambda: share.reserve("t"),
        "commit": partial(reservation.commit, wait=True) if reservation else None,
    }.get(name)
    done, _ = stopped_at(step or reservation.give_back, line)
    after = spent()
    if done:
        require(after == before + (name != "give back"), f"{after - before} tickets are spent")
    # A lease that was stopped stays charged, and nothing of it is handed out.
    require(before <= after <= before + MOST_HELD, f"{after - before} tickets are spent")
    require(after > before or name != "commit", "a reservation is gone")
    count.seen["stopped"] += not done
    # Others go on, and the handle itself, from this thread and another: no lock and no transaction was left behind.
    other, door = TERMS.opened(place)  # nobody else holds the lock: it is free at once, or left behind
    door.reserve("t")
    other.close()
    share.reserve("t")
    thread = threading.Thread(target=share.reserve, args=("t",), daemon=True)
    thread.start()
    thread.join(60)
    require(not thread.is_alive(), "a lock was left behind")
    require(spent() == after + 3, "the ledger does not go on")
    store.close()


def stopped_at(step: Callable[[], object], line: int, within: str = PACKAGE, of: str = "") -> tuple[bool, int]:
    """Runs a step until its `line`th line within our package, or within one class of a file.

    Returns whether it came to its end, and its lines.
    """
    seen = 0
    entered: set[tuple[FrameType, int]] = set()
    last: dict[FrameType, int] = {}
    error = random.choice(STOPS)

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal seen
        name, number = frame.f_code.co_filename, frame.f_lineno
        if not name.startswith(within) or not frame.f_code.co_qualname.startswith(of):
            return None
        words = linecache.getline(name, number).split()
        # Interrupts come after calls. At `try`, and at `with` on the way out, there is none, and nothing is guarded yet
        # or any more. From Python 3.12 on nothing is at a later turn of a comprehension, either, for what a trace raises.
        is_turn, last[frame] = last.get(frame) == number, number
        if event == "line" and not is_turn and (frame, number) not in entered and words != ["try:"]:
            if words[:1] == ["with"]:
                entered.add((frame, number))
            seen += 1
            if seen == line + 1:
                raise error
        return trace

    before = sys.gettrace()
    gc.disable()  # what is cleared away meanwhile is no line of the step
    sys.settrace(trace)
    try:
        step()
    except STOPS:
        return False, seen
    finally:
        sys.settrace(before)
        gc.enable()
    return True, seen


def cancel(places: Places, count: Count, *, trials: int) -> None:
    """Cancels a task that reserves, calls a model and commits, at any of its awaits; or lets its time run out."""
    place = places()
    TERMS.made(place)[0].close()
    for number in range(trials):
        with count.trial(f"task {number}"), ThreadPoolExecutor(1) as pool:  # a loop may run in this thread already
            pool.submit(asyncio.run, _cancel_one(place, number, count)).result()


async def _cancel_one(place: Place, number: int, count: Count) -> None:
    _, share = TERMS.opened(place)
    store = place.open()
    before, committed = reserved(store), settled(store)
    reached: list[str] = []

    async def work() -> None:
        reservation = await asyncio.to_thread(share.reserve, "t", count=3)
        reached.append("reserved")
        reservation.burn(3)
        await asyncio.sleep(0.002)  # the model
        reached.append("called")
        await asyncio.to_thread(reservation.commit, 3, wait=True)
        reached.append("committed")

    async def stop() -> None:
        if number % 2:
            await asyncio.wait_for(work(), random.uniform(0, 0.02))
            return
        task = asyncio.ensure_future(work())
        for _ in range(random.randrange(12)):
            await asyncio.sleep(0)
        await asyncio.sleep(random.choice([0, 0.001, 0.004]))
        task.cancel()
        await task

    try:
        await stop()
    except (asyncio.CancelledError, TimeoutError):
        count.seen["cancelled"] += 1
    await asyncio.get_running_loop().shutdown_default_executor()  # what a thread began it ends
    spent = reserved(store) - before
    require(spent in {0, 3} and (spent == 3 or not reached), f"{spent} spent, reached {reached}")
    require(settled(store) - committed == 3 or "committed" not in reached, "a commit is gone")
    require(not lines(store, GIVE_BACK), "tickets were given back")
    store.close()
