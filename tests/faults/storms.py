"""L2: kill -9 of whole components. Private calls, counted outside of the process, never exceed the tickets of the ledger.

A ticket of each of these components pays for one private call: a query, a step of training, a text that is written. So
calls and tickets can be compared. An evolution looks at its records once and keeps what it saw for its other rounds.
Handed-out work is done by the workers of an executor in the same process, as those of a Ray cluster do it.
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
from langchain_dpicl.privacy.extensions.value_counts import TOPIC_TEMPLATE
from langchain_dpicl.privacy.ledger.state import GIVE_BACK, RESERVE
from langchain_dpicl.stores import SQLiteStore
from tests import ledgers
from tests.faults.children import Child, Teller
from tests.faults.counts import Count, require

QUERIES = 5_000
PER_LEDGER = 25
LONGEST = 0.1
WORKING = 0.9
"""How many are killed after their first private call has begun; the others as they start."""
_EPSILON, _SHARE, _RUN = 1e6, 1e4, 100.0


def voting_component(budget: Budget, note: Callable[[], object]) -> Any:
    """Returns a voter that notes its private calls."""
    from langchain_dpicl import DPVotingRunnable
    from langchain_dpicl.options import Serving
    from tests.labelling_doubles import Spy, examples, loud

    spy = Spy()
    spy.at_private = note
    return DPVotingRunnable.from_private_examples(
        examples(dataset_id="queues"),
        llm=spy,
        budget=budget,
        max_queries=QUERIES,
        serving=Serving(memo_size=0),
        **_cheap(loud()),
    )


def _voting(budget: Budget, note: Callable[[], object]) -> Callable[[], object]:
    from tests.labelling_doubles import CARD

    component = voting_component(budget, note)
    return lambda: component.invoke(CARD)


def _labelling(budget: Budget, note: Callable[[], object]) -> Callable[[], object]:
    from tests.labelling_doubles import CARD, Spy, labeler

    spy = Spy()
    spy.at_private = note
    inputs = [f"{CARD} {number}" for number in range(100)]
    component = labeler(budget=budget, llm=spy, public_inputs=inputs, component=f"pate {os.getpid()}", epsilon=_SHARE)
    left = itertools.cycle(inputs)
    return lambda: component.label(next(left))


def free_form_component(budget: Budget, note: Callable[[], object]) -> Any:
    """Returns a component that answers in free form and notes its private calls."""
    from langchain_dpicl.options import Serving
    from langchain_dpicl.privacy.private_examples import PrivateExamples
    from tests.free_form_doubles import RECORDS, WORDS, Writer, build

    class Noting(Writer):
        def complete(self, prompts: Any, **options: Any) -> Any:
            if any("says: " in prompt for prompt in prompts):
                note()
            return super().complete(prompts, **options)

    options = {"llm": Noting(), "budget": budget, "answers": WORDS, "max_queries": QUERIES, "epsilon": _SHARE}
    private = PrivateExamples(RECORDS, public_size=len(RECORDS), dataset_id="advice")
    return build(private=private, serving=Serving(memo_size=0), **options)


def _free_form(budget: Budget, note: Callable[[], object]) -> Callable[[], object]:
    component = free_form_component(budget, note)
    return lambda: component.invoke("what now?")


def retrieval_component(budget: Budget, note: Callable[[], object]) -> Any:
    """Returns a component that answers from retrieved documents and notes its private calls."""
    from langchain_dpicl.backends.fake import FakeBackend
    from tests.retrieval_doubles import CANARY, LABELS, QUIET, examples, records, says_what_it_reads, voter

    class Noting(FakeBackend):
        def score_choices(self, prompts: Any, choices: Any) -> Any:
            if any(CANARY in prompt for prompt in prompts):
                note()
            return super().score_choices(prompts, choices)

    engine = Noting(says_what_it_reads, vocabulary=[f" {label}" for label in LABELS])
    private = examples(*records("cough", "yes", 8), *records("fever", "no", 8), dataset_id="letters")
    # What each document took part in is known to its process alone, so that each has a share of its own.
    return voter(private, llm=engine, budget=budget, component=f"retrieval {os.getpid()}", **_cheap(QUIET))


def _retrieval(budget: Budget, note: Callable[[], object]) -> Callable[[], object]:
    component = retrieval_component(budget, note)
    return lambda: component.invoke("cough")


def _fresh(name: str) -> dict[str, Any]:
    """Returns the options of a component that runs once: a name of its own, and a share."""
    return {"component": f"{name} {os.getpid()} {next(_NUMBERS)}", "epsilon": _RUN}


_NUMBERS = itertools.count()


def _noting(note: Callable[[], object], distribution: Any, **options: Any) -> Any:
    """Returns an engine that notes each text for which it opens rows with records."""
    from langchain_dpicl.backends.fake import FakeBackend
    from tests.canary import RECORD

    class Noting(FakeBackend):
        def open(self, prompts: Any, prefix: Any) -> Any:
            if any(RECORD in prompt for prompt in prompts):
                note()
            return super().open(prompts, prefix)

    return Noting(distribution, **options)


def _writer(note: Callable[[], object]) -> Any:
    """Returns an engine that writes a word or two."""
    from tests.ray_places import CHANCES

    return _noting(note, lambda _, prefix: CHANCES if len(prefix) < 2 else {"\n": 1.0}, max_top_k=10)


def _training(budget: Budget, note: Callable[[], object]) -> Callable[[], object]:
    from tests.gradient_doubles import LogisticEngine, examples, prepared

    engine, private = LogisticEngine(), examples(dataset_id="reviews")
    engine.at_gradients = note
    return lambda: prepared(private, engine=engine, budget=budget, block=None, **_fresh("training")).run()


def _generation(budget: Budget, note: Callable[[], object]) -> Callable[[], object]:
    from langchain_dpicl.generation.synthesizer import DemonstrationSynthesizer
    from tests.ray_driver import OPTIONS
    from tests.ray_places import records

    engine = _writer(note)

    def ask() -> None:
        options = {**OPTIONS, "llm": engine, "budget": budget, **_fresh("generation")}
        DemonstrationSynthesizer.from_private_examples(records(), **options).run(progress=False)

    return ask


def _documents(budget: Budget, note: Callable[[], object]) -> Callable[[], object]:
    from langchain_dpicl import DocumentSynthesizer, PrivateExamples
    from langchain_dpicl.backends.fake import word_copier
    from langchain_dpicl.options import Decoding, Rows, Topics
    from tests.canary import RECORD

    words = [" my", " card", " was", " late"]
    private = PrivateExamples([f"my card was late {RECORD}"] * 200, public_size=200, dataset_id="notes")
    given: dict[str, Any] = {
        "llm": _noting(note, word_copier(words), vocabulary=words),
        "topics": Topics(("card", "film"), 1, min_units=20),
        "documents_per_topic": 3,
        "max_tokens": 3,
        "rows": Rows(units=5),
        "decoding": Decoding(candidates="all"),
        "budget": budget,
    }
    return lambda: DocumentSynthesizer.from_private_examples(private, **{**given, **_fresh("documents")}).run(
        progress=False
    )


def _evolution(budget: Budget, note: Callable[[], object]) -> Callable[[], object]:
    from langchain_dpicl import PrivateExamples
    from tests.evolution_doubles import RECORDS, Topical, evolution

    class Noting(Topical):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            if RECORDS[0] in texts:
                note()
            return super().embed_documents(texts)

    private = PrivateExamples(RECORDS, public_size=len(RECORDS), dataset_id="topics")
    return lambda: evolution(private=private, embeddings=Noting(), budget=budget, **_fresh("evolution")).run(
        progress=False
    )


_NOTES: list[Callable[[], object]] = []
"""What notes a private call of a worker in this process."""


def place(ledger: str) -> Any:
    """Returns a worker's place."""
    from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
    from langchain_dpicl.distributed import Workplace
    from langchain_dpicl.stores import SQLiteMemo
    from tests.ray_places import records

    budget = PrivacyBudgetCallbackHandler.open(ledger)
    return Workplace(_writer(_NOTES[-1]), private=records(ledger), budget=budget, memo=SQLiteMemo(f"{ledger}.memo"))


def _handed_out(budget: Budget, note: Callable[[], object]) -> Callable[[], object]:
    from langchain_dpicl.distributed import WorkerFactory
    from langchain_dpicl.generation.synthesizer import DemonstrationSynthesizer
    from tests.crews import Crew
    from tests.ray_driver import OPTIONS
    from tests.ray_places import records

    _NOTES.append(note)
    ledger = str(getattr(budget._store, "path", ""))
    setup = WorkerFactory("tests.faults.storms:place", {"ledger": ledger})

    def ask() -> None:
        options = {**OPTIONS, "llm": _writer(note), "budget": budget, "executor": Crew(setup), **_fresh("handed out")}
        DemonstrationSynthesizer.from_private_examples(records(ledger), **options).run(progress=False)

    return ask


def _cheap(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "epsilon": _SHARE}


ROOMS: dict[str, Callable[[Budget, Callable[[], object]], Callable[[], object]]] = {
    "voting": _voting,
    "PATE": _labelling,
    "free form": _free_form,
    "retrieval": _retrieval,
    "training": _training,
    "generation": _generation,
    "documents": _documents,
    "evolution": _evolution,
    "handed-out generation": _handed_out,
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
        paid = {line.seq: line.body for line in store.records() if line.kind == RESERVE}
        back = [line.body for line in store.records() if line.kind == GIVE_BACK]
        calls = {entry for entry, body in paid.items() if body["template"] != TOPIC_TEMPLATE}  # which no model sees
        tickets = sum(paid[entry]["count"] for entry in calls)
        tickets -= sum(body["count"] for body in back if body["reservation"] in calls)
        budget.close()
        store.close()
        require(self.calls <= tickets, f"{self.calls} private calls, {tickets} tickets")
