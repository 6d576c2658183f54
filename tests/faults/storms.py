"""L2: kill -9 of whole components. Private calls, counted outside of the process, never exceed the tickets of the ledger.

A query of each of these components makes the same number of private calls, so that calls and tickets can be compared.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.privacy.ledger.state import GIVE_BACK, RESERVE
from langchain_dpicl.stores import SQLiteStore
from tests import ledgers
from tests.faults.children import Child, Teller
from tests.faults.counts import Count, require
from tests.faults.places import lines

QUERIES = 5_000
PER_LEDGER = 25
LONGEST = 0.1
WORKING = 0.9
"""How many are killed after their first private call has begun; the others as they start."""
_EPSILON, _SHARE = 1e6, 1e4


def _voting(budget: Budget, note: Callable[[], object]) -> Callable[[], object]:
    from langchain_dpicl import DPVotingRunnable
    from langchain_dpicl.options import Serving
    from tests.labelling_doubles import CARD, Spy, examples, loud

    spy = Spy()
    spy.at_private = note
    component = DPVotingRunnable.from_private_examples(
        examples(), llm=spy, budget=budget, max_queries=QUERIES, serving=Serving(memo_size=0), **_cheap(loud())
    )
    return lambda: component.invoke(CARD)


def _labelling(budget: Budget, note: Callable[[], object]) -> Callable[[], object]:
    from tests.labelling_doubles import CARD, Spy, labeler

    spy = Spy()
    spy.at_private = note
    inputs = [f"{CARD} {number}" for number in range(100)]
    component = labeler(budget=budget, llm=spy, public_inputs=inputs, component=f"pate {os.getpid()}", epsilon=_SHARE)
    left = itertools.cycle(inputs)
    return lambda: component.label(next(left))


def _free_form(budget: Budget, note: Callable[[], object]) -> Callable[[], object]:
    from langchain_dpicl.options import Serving
    from tests.free_form_doubles import WORDS, Writer, build

    class Noting(Writer):
        def complete(self, prompts: Any, **options: Any) -> Any:
            if any("says: " in prompt for prompt in prompts):
                note()
            return super().complete(prompts, **options)

    options = {"llm": Noting(), "budget": budget, "answers": WORDS, "max_queries": QUERIES, "epsilon": _SHARE}
    component = build(serving=Serving(memo_size=0), **options)
    return lambda: component.invoke("what now?")


def _retrieval(budget: Budget, note: Callable[[], object]) -> Callable[[], object]:
    from langchain_dpicl.backends.fake import FakeBackend
    from tests.retrieval_doubles import CANARY, LABELS, QUIET, examples, records, says_what_it_reads, voter

    class Noting(FakeBackend):
        def score_choices(self, prompts: Any, choices: Any) -> Any:
            if any(CANARY in prompt for prompt in prompts):
                note()
            return super().score_choices(prompts, choices)

    engine = Noting(says_what_it_reads, vocabulary=[f" {label}" for label in LABELS])
    private = examples(*records("cough", "yes", 8), *records("fever", "no", 8))
    # What each document took part in is known to its process alone, so that each has a share of its own.
    component = voter(private, llm=engine, budget=budget, component=f"retrieval {os.getpid()}", **_cheap(QUIET))
    return lambda: component.invoke("cough")


def _cheap(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "epsilon": _SHARE}


ROOMS: dict[str, Callable[[Budget, Callable[[], object]], Callable[[], object]]] = {
    "voting": _voting,
    "PATE": _labelling,
    "free form": _free_form,
    "retrieval": _retrieval,
}
"""By component: returns what spends tickets, given its budget and what notes a private call."""


def storm(folder: Path, count: Count, *, trials: int) -> None:
    """Kills processes that answer queries on one ledger, two at a time, and compares calls with tickets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledgers.accounting, "epsilon_bound", ledgers.free_price)
        for number, name in enumerate(ROOMS):
            # Everything is imported here, and not in each process.
            ROOMS[name](Budget(epsilon=_EPSILON, delta=1e-4), lambda: None)
            share = trials // len(ROOMS) + (number < trials % len(ROOMS))
            for first in range(0, share, PER_LEDGER):
                ledger = KilledLedger(folder / f"{number}-{first}.db", name)
                for kill in range(first, min(first + PER_LEDGER, share), 2):
                    with count.trial(f"{name}, kill {kill}"):
                        count.trials += 1  # the second of the two
                        ledger.kill_two()
                        ledger.check()
                count.seen[f"private calls of {name}"] += ledger.calls


class KilledLedger:
    """A ledger, and a file to which its processes add a byte before each private call."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        self.noted = path.with_suffix(".calls")
        self.noted.touch()
        Budget(epsilon=_EPSILON, delta=1e-4, store=SQLiteStore.new(path)).close()

    @property
    def calls(self) -> int:
        return self.noted.stat().st_size

    def kill_two(self) -> None:
        children = [Child(self.work) for _ in range(2)]
        for child in children:
            if random.random() < WORKING:
                child.wait_for_a_word()
            time.sleep(random.uniform(0, LONGEST))
            child.kill()
        errors = [line for child in children for line in child.lines() if isinstance(line, dict)]
        require(not errors, f"a child failed: {errors}")

    def work(self, tell: Teller) -> None:
        notes = os.open(self.noted, os.O_WRONLY | os.O_APPEND)
        budget = Budget.open(SQLiteStore(self.path, timeout=60.0))

        def note() -> None:
            os.write(notes, b".")
            tell("a private call begins")

        ask = ROOMS[self.name](budget, note)
        while True:
            ask()

    def check(self) -> None:
        budget = Budget.open(SQLiteStore(self.path))
        budget.verify()
        store = SQLiteStore(self.path)
        tickets = sum(lines(store, RESERVE).values()) - sum(lines(store, GIVE_BACK).values())
        budget.close()
        store.close()
        require(self.calls <= tickets, f"{self.calls} private calls, {tickets} tickets")
