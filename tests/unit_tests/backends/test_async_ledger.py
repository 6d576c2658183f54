"""A ledger that may have to be waited for, from async code: never on the event loop, and whole after any cancellation."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from langchain_core.prompts import PromptTemplate

from langchain_dpicl import (
    Budget,
    DPFewShotPromptTemplate,
    DPVotingRunnable,
    GenerationTask,
    Noise,
    PromptPATEExampleSelector,
)
from langchain_dpicl.backends import sync_async
from langchain_dpicl.exceptions import LedgerUnavailableError, PrivacyBudgetExceededError, RunInterruptedError
from langchain_dpicl.options import LabelAnswers, Rows, Serving, Student
from langchain_dpicl.privacy.ledger.store import InMemoryStore
from langchain_dpicl.runs.query_runnable import RELEASE
from tests.contracts.front_room import CANARY, CHARGED, REFUSED, AsyncObserver
from tests.durable import UNAVAILABLE, WatchedStore, cancelled_at, on, spent
from tests.free_form_doubles import keywords
from tests.gradient_doubles import prepared
from tests.labelling_doubles import CARD, SURE, TEACHERS, WIRE, Spy, examples, labeler, loud
from tests.unit_tests.generation.test_synthesis import engine, private_examples, synthesizer
from tests.unit_tests.test_private_frames import locals_of_ours, shows_private

pytestmark = pytest.mark.usefixtures("free_prices")


def house(store: InMemoryStore, adjacency: str = "add_remove") -> Budget:
    return Budget(epsilon=1e6, delta=1e-4, adjacency=adjacency, store=store)  # type: ignore[arg-type]


@dataclass
class Guest:
    """A component on a ledger, and how it is run."""

    run: Callable[[], Coroutine[Any, Any, Any]]
    most: int
    engine: Any = None
    observer: AsyncObserver = field(default_factory=AsyncObserver)


VOTES: dict[str, Any] = {"rows": Rows(units=20), "answers": LabelAnswers(calibrate=False)}
VOTES |= {"noise": Noise(multiplier=0.05), "epsilon": 2e4}


def a_voter(
    store: InMemoryStore, *, budget: Any = None, private: Any = None, receipts: bool = False, **options: Any
) -> Guest:
    spy, observer = Spy(), AsyncObserver()
    given = {"llm": spy, "budget": budget or house(store), "max_queries": 6, **VOTES, **options}
    made = DPVotingRunnable.from_private_examples(private or examples(), **given)
    asked: Any = made.with_receipts() if receipts else made
    config: Any = {"callbacks": [observer], "configurable": {"tenant": "acme", "tenant_max_queries": 6}}
    return Guest(lambda: asked.ainvoke(CARD, config), 1, spy, observer)


def a_free_form(store: InMemoryStore) -> Guest:
    made = keywords(budget=house(store))
    return Guest(lambda: made.ainvoke("what now?"), 1)


def a_synthesizer(store: InMemoryStore, **options: Any) -> Guest:
    made = synthesizer(private_examples(), budget=house(store), max_tokens=2, shots_per_label=1, **options)
    return Guest(made.arun, 4)


def a_deal(store: InMemoryStore) -> Guest:
    return a_synthesizer(store, rows=Rows(sampling="disjoint"))


def a_labeler(store: InMemoryStore, teachers: str, **options: Any) -> Guest:
    adjacency = "replace_one" if teachers == "fixed" else "add_remove"
    spy = Spy()
    made = labeler(budget=house(store, adjacency), rows=TEACHERS[teachers], llm=spy, **options)
    return Guest(made.arun, 4, spy)


def a_single_label(store: InMemoryStore) -> Guest:
    made = labeler(budget=house(store), max_queries=8)
    return Guest(lambda: made.alabel(CARD), 1)


def a_training(store: InMemoryStore, **options: Any) -> Guest:
    return Guest(prepared(budget=house(store), **options).arun, 4)


GUESTS: dict[str, Callable[[InMemoryStore], Guest]] = {
    "voting": lambda store: a_voter(store, receipts=True),
    "voting without receipts": a_voter,
    "free form": a_free_form,
    "generation": a_synthesizer,
    "generation from a deal": a_deal,
    **{f"labels of {kind}": lambda store, kind=kind: a_labeler(store, kind) for kind in TEACHERS},
    "labels of tested teachers": lambda store: a_labeler(store, "fixed", noise=SURE),
    "one label": a_single_label,
    "training": a_training,
    "training in blocks": lambda store: a_training(store, block=2),
}
every_guest = pytest.mark.parametrize("make", GUESTS.values(), ids=GUESTS)


def watched(make: Callable[[InMemoryStore], Guest], delay: float = 0.0) -> tuple[WatchedStore, Guest]:
    store = WatchedStore()
    guest = make(store)
    store.on_loop.clear()
    store.calls.clear()
    store.delay = delay
    return store, guest


@every_guest
def test_a_run_never_asks_a_durable_ledger_on_the_event_loop(make: Callable[[InMemoryStore], Guest]) -> None:
    store, guest = watched(make)
    assert asyncio.run(guest.run()) is not None
    assert store.on_loop == []
    assert store.calls["transaction"] >= 1
    assert 1 <= spent(store)["reserve"] - spent(store)["give_back"] <= guest.most


@every_guest
def test_in_memory_no_thread_is_asked(make: Callable[[InMemoryStore], Guest], monkeypatch: pytest.MonkeyPatch) -> None:
    pools = sync_async._pool

    def no_threads(name: str) -> Any:  # a model of this process has threads of its own
        return pools(name) if name == sync_async._ENGINE else pytest.fail("a thread was asked")

    monkeypatch.setattr(sync_async, "_pool", no_threads)
    store = InMemoryStore()
    assert asyncio.run(make(store).run()) is not None
    assert spent(store)["reserve"] >= 1


@every_guest
def test_the_loop_goes_on_while_the_ledger_is_written(make: Callable[[InMemoryStore], Guest]) -> None:
    store, guest = watched(make)
    gone_on = threading.Event()

    async def main() -> Any:
        loop = asyncio.get_running_loop()

        def at_commit(_: list[str]) -> None:
            gone_on.clear()
            loop.call_soon_threadsafe(gone_on.set)
            assert gone_on.wait(60), "the loop stood still"

        store.at_commit = at_commit
        return await guest.run()

    assert asyncio.run(main()) is not None


async def test_the_loop_waits_for_nobody_who_waits_for_the_ledger() -> None:
    """A pool is locked while its report is read; others that grow it meanwhile wait off the loop as well."""
    store, reads = WatchedStore(), []
    selector = await PromptPATEExampleSelector.afrom_private_examples(
        examples(), budget=house(store), **{"llm": Spy(), "public_inputs": [CARD, WIRE], "max_queries": 9, **loud()}
    )
    loop, gone_on = asyncio.get_running_loop(), threading.Event()
    texts = [f"a card in {colour}" for colour in ("blue", "red", "green")]

    def at_read() -> None:
        reads.append(1)
        gone_on.clear()
        loop.call_soon_threadsafe(loop.call_later, 0.01, gone_on.set)
        assert gone_on.wait(60), "the loop stood still"

    store.at_read = at_read
    grown = [selector.aadd_example({"text": text}) for text in texts]
    *labels, choice = await asyncio.gather(*grown, selector.achoose_student(Student(shots=1, num_candidates=2)))
    assert labels == ["card"] * 3
    assert choice is not None
    assert len(reads) >= 4  # each of the four calls reads it


@pytest.mark.parametrize("act", ["grow", "grow in public", "choose", "label"])
async def test_the_loop_waits_for_no_lock_that_is_held_over_a_read_of_the_ledger(act: str) -> None:
    given: dict[str, Any] = {"llm": Spy(), "public_inputs": [CARD, WIRE], "max_queries": 9, **loud()}
    selector = await PromptPATEExampleSelector.afrom_private_examples(examples(), budget=house(WatchedStore()), **given)
    acts: dict[str, Callable[[], Any]] = {
        "grow": lambda: selector.aadd_example({"text": "a card in blue"}),
        "grow in public": lambda: selector.aadd_public_example({"text": "pay abroad", "queue": "transfer"}),
        "choose": lambda: selector.achoose_student(Student(shots=1, num_candidates=2)),
        "label": lambda: selector._labeler.alabel({"text": "a card in blue"}),
    }
    lock = (selector._labeler._lock if act == "label" else selector._lock).here
    held, gone_on, in_time = threading.Event(), threading.Event(), []

    def hold() -> None:
        with lock:
            held.set()
            in_time.append(gone_on.wait(60))

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(60)
    asyncio.get_running_loop().call_later(0.2, gone_on.set)
    await acts[act]()
    holder.join()
    assert in_time == [True]


@every_guest
@pytest.mark.parametrize("times", [1, 2])
def test_cancelled_at_any_wait_the_charge_stays_and_nothing_is_left_half_done(
    make: Callable[[InMemoryStore], Guest], times: int
) -> None:
    waits = cancelled_at(watched(make)[1].run, 10**6)[1]
    charges, cancelled = set(), 0
    for place in _some(waits):
        store, guest = watched(make)
        answer, _, error = cancelled_at(guest.run, place, times=times)
        cancelled += error is not None
        assert error is None or type(error) is asyncio.CancelledError
        assert answer is not None or error is not None
        assert (store.open, store.on_loop) == (0, [])
        assert not _works_on(store)
        if error is not None:
            assert [value for value in locals_of_ours(error) if CANARY in repr(value)] == shows_private(error) == []
        after = spent(store)
        charges.add(after["reserve"] - after["give_back"])
        assert after["commit"] <= after["reserve"] - after["give_back"] <= guest.most
        ledger = Budget.open(store)
        ledger.verify()
        open_now = sum(left.count for left in ledger.dangling())
        assert open_now == after["reserve"] - after["commit"] - after["give_back"]
        # Nobody waits at a gate that a cancelled run still holds, and the ledger is at rest.
        assert asyncio.run(asyncio.wait_for(_again(guest), 60)) is not None
    assert cancelled >= min(waits, 5) // 2
    assert min(charges) < guest.most or guest.most == 1
    assert len(charges) >= 2


def _some(waits: int) -> list[int]:
    """The first waits, and a spread of the later ones."""
    step = max(1, waits // 12)
    return sorted({*range(min(waits, 10)), *range(0, waits, step)})


def _works_on(store: WatchedStore) -> bool:
    """Whether anything writes on after a run has ended."""
    before = store.head()
    return store.head() != before


async def _again(guest: Guest) -> Any:
    try:
        return await guest.run()
    except PrivacyBudgetExceededError:  # what was charged may have been the last
        return "spent"
    except RunInterruptedError as error:  # steps whose tickets were charged are never made
        return error.run.result


async def test_many_cancelled_runs_at_once_leave_a_ledger_whose_every_charge_is_known() -> None:
    store = WatchedStore(delay=0.001)
    spy = Spy()
    given: Any = {"llm": spy, "budget": house(store), "max_queries": 200, **VOTES, "epsilon": 2e5}
    given |= {"serving": Serving(memo_size=0)}
    made = DPVotingRunnable.from_private_examples(examples(), **given)
    store.on_loop.clear()
    tasks = [asyncio.create_task(made.ainvoke(CARD)) for _ in range(60)]
    for number, task in enumerate(tasks):
        if number % 2:
            asyncio.get_running_loop().call_later(0.002 * number, task.cancel)
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert (store.open, store.on_loop) == (0, [])
    answered = sum(isinstance(one, str) for one in ended)
    assert {type(one) for one in ended} <= {str, asyncio.CancelledError}
    after = spent(store)
    assert after["commit"] >= answered >= 30
    assert after["reserve"] - after["give_back"] <= 60
    assert len(spy.private) <= after["reserve"] - after["give_back"]


# -- building, growing, telling ----------------------------------------------------------------------------------------


async def test_components_are_built_off_the_loop_too() -> None:
    store = WatchedStore()
    ledger = house(store)
    store.on_loop.clear()
    example = PromptTemplate.from_template("{topic}: {text}")
    prompt = await DPFewShotPromptTemplate.afrom_private_examples(
        private_examples(dataset_id="texts"),
        llm=engine(),
        budget=ledger,
        example_prompt=example,
        suffix="{input}:",
        epsilon=2000.0,
        noise=Noise(multiplier=0.05),
        max_tokens=2,
        instruction="Messages.",
        task=GenerationTask(record_prompt="{topic}: {text}"),
    )
    assert prompt.examples
    given: dict[str, Any] = {
        "llm": Spy(),
        "public_inputs": [CARD, WIRE],
        "max_queries": 4,
        "student": Student(shots=1),
        **loud(),
    }
    selector = await PromptPATEExampleSelector.afrom_private_examples(examples(), budget=ledger, **given)
    before, store.on_loop = spent(store)["reserve"], store.on_loop[:]
    assert await selector.aadd_example({"text": "a card in blue"}) == "card"
    await selector.aadd_public_example({"text": "pay abroad", "queue": "transfer"})
    options: Any = {"llm": Spy(), "max_queries": 2, **VOTES}
    voter = await DPVotingRunnable.afrom_private_examples(examples(dataset_id="votes"), budget=ledger, **options)
    assert await voter.abatch([CARD, WIRE]) == ["card", "transfer"]
    assert [chunk async for chunk in voter.astream(CARD)] == ["card"]
    assert store.on_loop == ["transaction", "records"]  # this test's own look
    assert spent(store)["reserve"] == before + 3


async def test_what_observers_are_told_is_read_off_the_loop_and_told_on_it() -> None:
    for make in (GUESTS["voting"], GUESTS["voting without receipts"]):
        store, guest = watched(make)
        await guest.run()
        assert set(guest.observer.loops) == {id(asyncio.get_running_loop())}
        assert store.on_loop == []
        (told,) = guest.observer.named(RELEASE)
        (line,) = [line for line in store.records() if line.kind == "reserve"]
        assert (told["receipt"]["entry"], told["receipt"]["entry_hash"]) == (line.seq, line.hash)
        assert told["receipt"]["queries_left"] == 5
        assert [data["tickets"] for data in guest.observer.named(CHARGED)] == [1]


async def test_a_refusal_of_the_ledgers_tenant_count_is_told_and_asks_nothing_private() -> None:
    private = examples()
    capped: Any = {"serving": Serving(memo_size=0, tenant_max_queries=2), "component": "voting"}
    store, guest = watched(lambda store: a_voter(store, private=private, **capped))
    await guest.run()
    # The same component as another process has it: its own count of the tenant starts at nothing.
    again = a_voter(store, private=private, budget=Budget.open(store), **capped)
    assert await again.run() == "card"
    asked = len(again.engine.public)
    with pytest.raises(PrivacyBudgetExceededError, match="for tenant 'acme'"):
        await again.run()
    assert (len(again.engine.private), len(again.engine.public)) == (1, asked)  # refused before anybody was asked
    assert [data["remaining"] for data in again.observer.named(REFUSED)] == [0]


# -- a ledger that fails meanwhile -------------------------------------------------------------------------------------


@every_guest
@pytest.mark.parametrize("where", ["at_commit", "after_commit"])
def test_a_ledger_that_fails_in_a_run_ends_it_and_a_later_run_goes_on(
    make: Callable[[InMemoryStore], Guest], where: str
) -> None:
    store, guest = watched(make)
    setattr(store, where, on("reserve", UNAVAILABLE))
    with pytest.raises(LedgerUnavailableError) as caught:
        asyncio.run(guest.run())
    assert [value for value in locals_of_ours(caught.value) if CANARY in repr(value)] == []
    assert (store.open, store.on_loop) == (0, [])
    if guest.engine is not None:
        assert guest.engine.private == []
    assert asyncio.run(_again(guest)) is not None
    Budget.open(store).verify()
