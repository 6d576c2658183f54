"""What every component that charges a budget must do, whichever way it is entered.

Subclass `FrontRoomContract` for anything with entry points, `ChargingRunnableContract` for a Runnable that charges one
ticket per question. Charges are read off the ledger, releases are counted at the private door: the two have to agree.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import pickle
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.load import dumps
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda, RunnableParallel, RunnablePassthrough
from pydantic import BaseModel

from langchain_dpicl.backends.fake import FakeBackend
from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
from langchain_dpicl.exceptions import (
    ConfigurationError,
    PrivacyBudgetError,
    PrivacyBudgetExceededError,
    PrivacyBudgetMismatchError,
    PrivateAccessError,
)
from langchain_dpicl.privacy.ledger.store import InMemoryStore
from langchain_dpicl.privacy.private_examples import PrivateExamples

CANARY = "zx-front-room-canary-58"
"""Put it into every private record."""

CHARGED = "dpicl.charged"
REFUSED = "dpicl.refused"
BUDGET_KEYS = {"name", "epsilon", "delta", "adjacency"}

# -- observers ---------------------------------------------------------------------------------------------------


class Observer(BaseCallbackHandler):
    """Writes down the custom events it is sent, and which runs failed."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []
        self.failed = 0

    def on_custom_event(self, name: str, data: Any, **kwargs: Any) -> None:
        self.heard.append((name, copy.deepcopy(data)))

    def on_chain_error(self, error: BaseException, **kwargs: Any) -> None:
        self.failed += 1

    def named(self, name: str) -> list[Any]:
        return [data for heard, data in self.heard if heard == name]


class AsyncObserver(AsyncCallbackHandler):
    """Is `Observer`, awaited; `loops` holds the event loops it was awaited on."""

    named = Observer.named

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []
        self.loops: set[int] = set()

    async def on_custom_event(self, name: str, data: Any, **kwargs: Any) -> None:
        await asyncio.sleep(0)
        self.loops.add(id(asyncio.get_running_loop()))
        self.heard.append((name, data))


class FailingObserver(BaseCallbackHandler):
    """Raises at every custom event, and asks for that to count."""

    raise_error = True
    run_inline = True

    def on_custom_event(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("the observer's own fault")


class FailingAsyncObserver(AsyncCallbackHandler):
    raise_error = True

    async def on_custom_event(self, *args: Any, **kwargs: Any) -> None:
        raise asyncio.CancelledError


# -- doors -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Door:
    """One entry point.

    Attributes:
      ask: (component, questions) -> answers, or a coroutine of them.
      answers: how many answers so many questions give.
      refusals: how often one question is refused when nothing is left.
    """

    ask: Callable[[Any, list[str]], Any]
    answers: Callable[[int], int] = field(default=lambda questions: 1)
    refusals: int = 1

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.ask)


def _many(ask: Callable[[Any, list[str]], Any]) -> Door:
    return Door(ask, answers=lambda questions: questions)


def enter(door: Door, component: Any, questions: list[str], *observers: Any) -> list[Any]:
    """Goes through a door inside a LangChain run; returns what comes back, the error that is raised among it."""

    async def asked(_: Any) -> list[Any]:
        return await door.ask(component, questions)

    try:
        if door.is_async:
            return asyncio.run(RunnableLambda(asked).ainvoke(0, {"callbacks": list(observers)}))
        return RunnableLambda(lambda _: door.ask(component, questions)).invoke(0, {"callbacks": list(observers)})
    except Exception as error:
        return [error]


async def _ainvoke(c: Any, q: list[str]) -> list[Any]:
    return [await c.ainvoke(q[0])]


async def _abatch(c: Any, q: list[str]) -> list[Any]:
    return await c.abatch(q)


async def _abatch_errors(c: Any, q: list[str]) -> list[Any]:
    return await c.abatch(q, return_exceptions=True)


async def _abatch_completed(c: Any, q: list[str]) -> list[Any]:
    return [answer async for _, answer in c.abatch_as_completed(q)]


async def _astream(c: Any, q: list[str]) -> list[Any]:
    return [chunk async for chunk in c.astream(q[0])]


async def _atransform(c: Any, q: list[str]) -> list[Any]:
    async def questions() -> Any:
        yield q[0]

    return [chunk async for chunk in c.atransform(questions())]


async def _events(c: Any, q: list[str]) -> list[Any]:
    events = [event async for event in c.astream_events(q[0], version="v2")]
    ends = [event for event in events if event["event"] == "on_chain_end" and event["run_id"] == events[0]["run_id"]]
    return [event["data"]["output"] for event in ends]


async def _lambda_async(c: Any, q: list[str]) -> list[Any]:
    async def step(question: str) -> Any:
        return await c.ainvoke(question)

    return [await RunnableLambda(step).ainvoke(q[0])]


async def _pipe_astream(c: Any, q: list[str]) -> list[Any]:
    return [chunk async for chunk in _chain(c).astream(q[0])]


async def _amap(c: Any, q: list[str]) -> list[Any]:
    return await c.map().ainvoke(q)


def _chain(c: Any) -> Runnable[Any, Any]:
    return RunnableLambda(str) | c | RunnablePassthrough()


RUNNABLE_DOORS: dict[str, Door] = {
    "invoke": Door(lambda c, q: [c.invoke(q[0])]),
    "ainvoke": Door(_ainvoke),
    "batch": _many(lambda c, q: c.batch(q)),
    "batch returning errors": _many(lambda c, q: c.batch(q, return_exceptions=True)),
    "batch as completed": _many(lambda c, q: [answer for _, answer in c.batch_as_completed(q)]),
    "abatch": _many(_abatch),
    "abatch returning errors": _many(_abatch_errors),
    "abatch as completed": _many(_abatch_completed),
    "stream": Door(lambda c, q: list(c.stream(q[0]))),
    "astream": Door(_astream),
    "astream_events": Door(_events),
    "transform": Door(lambda c, q: list(c.transform(iter(q[:1])))),
    "atransform": Door(_atransform),
    "called in a lambda": Door(lambda c, q: [RunnableLambda(lambda x: c.invoke(x).upper()).invoke(q[0])]),
    "returned by a lambda": Door(lambda c, q: [RunnableLambda(lambda x: c).invoke(q[0])]),
    "awaited in a lambda": Door(_lambda_async),
    "pipe": Door(lambda c, q: [_chain(c).invoke(q[0])]),
    "pipe stream": Door(lambda c, q: list(_chain(c).stream(q[0]))),
    "pipe astream": Door(_pipe_astream),
    "pipe batch": _many(lambda c, q: _chain(c).batch(q)),
    "parallel": Door(
        lambda c, q: [*RunnableParallel(one=c, two=c).invoke(q[0]).values()], answers=lambda _: 2, refusals=2
    ),
    "map": _many(lambda c, q: c.map().invoke(q)),
    "amap": _many(_amap),
    "bind": Door(lambda c, q: [c.bind().invoke(q[0])]),
    "with_config": Door(lambda c, q: [c.with_config(tags=["public"]).invoke(q[0])]),
    "with_listeners": Door(lambda c, q: [c.with_listeners(on_end=lambda run: None).invoke(q[0])]),
    "with_types": Door(lambda c, q: [c.with_types(input_type=str).invoke(q[0])]),
    "with_retry": Door(lambda c, q: [c.with_retry(wait_exponential_jitter=False).invoke(q[0])]),
    "with_retry batch": _many(lambda c, q: c.with_retry(wait_exponential_jitter=False).batch(q)),
    "with_fallbacks": Door(lambda c, q: [c.with_fallbacks([RunnableLambda(len)]).invoke(q[0])]),
    "with_fallbacks batch": _many(lambda c, q: c.with_fallbacks([RunnableLambda(len)]).batch(q)),
    "with_fallbacks stream": Door(lambda c, q: list(c.with_fallbacks([RunnableLambda(len)]).stream(q[0]))),
    "deep copy": Door(lambda c, q: [copy.deepcopy(c).invoke(q[0])]),
}
FEW = "invoke|ainvoke|batch|abatch as completed|stream|astream_events|pipe|with_retry|deep copy"
FEW_DOORS = {name: RUNNABLE_DOORS[name] for name in FEW.split("|")}
"""Without doors that lead to one and the same method, for components that share their class with one of all doors."""


# -- the room ----------------------------------------------------------------------------------------------------


@dataclass
class Room:
    """A budget on a ledger in memory, private examples, and counters at the ledger and at the private door."""

    private: PrivateExamples
    engine: FakeBackend
    store: InMemoryStore
    budget: PrivacyBudgetCallbackHandler
    reads: list[int] = field(default_factory=list)

    @property
    def charged(self) -> int:
        """Tickets that stay charged."""
        signs = {"reserve": 1, "give_back": -1}
        return sum(signs.get(line.kind, 0) * line.body.get("count", 0) for line in self.store.records())

    @property
    def reserved(self) -> int:
        return sum(line.body["count"] for line in self.store.records() if line.kind == "reserve")

    @property
    def releases(self) -> int:
        """How often the private door was opened: once per block."""
        return len(self.reads)

    def lines(self) -> list[Any]:
        return list(self.store.records())


def shown_by(thing: Any) -> str:
    """Every way to look at an object, as one text."""
    looks = [repr(thing), str(thing), format(thing), repr(getattr(thing, "__dict__", ""))]
    if isinstance(thing, Runnable):
        looks.append(dumps(thing))
    if isinstance(thing, BaseModel):
        looks += [repr(thing.model_dump()), repr(list(thing))]
    return "\n".join(looks)


def check_public(observer: Observer) -> None:
    """Events hold public values that are JSON, and those of charges and refusals name the budget."""
    for name, data in observer.heard:
        assert name not in {CHARGED, REFUSED} or set(data["budget"]) == BUDGET_KEYS
        assert json.loads(json.dumps(data)) == data
        assert CANARY not in repr(data)


@pytest.mark.usefixtures("remembered_prices")
class FrontRoomContract(ABC):
    """The suite for anything that charges."""

    doors: ClassVar[Mapping[str, Door]]
    """Every entry point, by name."""

    questions: ClassVar[list[str]] = ["one topic", "two topic", "three topic"]

    told: ClassVar[list[str]] = [CHARGED]
    """The events of one answer, in their order."""

    @abstractmethod
    def make_private(self) -> PrivateExamples:
        """Returns private examples with `CANARY` in every record."""

    @abstractmethod
    def make_engine(self) -> FakeBackend:
        """Returns an engine that can score them."""

    @abstractmethod
    def make(self, room: Room, **options: Any) -> Any:
        """Returns what the doors take, with tickets for at least one round of questions."""

    @abstractmethod
    def make_refused(self, room: Room) -> Any:
        """Returns what the doors take, such that the budget refuses at every door."""

    @abstractmethod
    def faulty_constructions(self, room: Room) -> Sequence[Callable[[], Any]]:
        """Returns constructions with a public fault."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        doors = dict(metafunc.cls.doors)
        if "door" in metafunc.fixturenames:
            metafunc.parametrize("door", doors.values(), ids=doors)
        if "async_door" in metafunc.fixturenames:
            doors = {name: door for name, door in doors.items() if door.is_async}
            metafunc.parametrize("async_door", doors.values(), ids=doors)

    @pytest.fixture
    def room(self, monkeypatch: pytest.MonkeyPatch) -> Room:
        store = InMemoryStore()
        budget = PrivacyBudgetCallbackHandler(epsilon=1e5, delta=1e-4, store=store, name="house")
        room = Room(self.make_private(), self.make_engine(), store, budget)
        real, lock = PrivateExamples._pool, threading.Lock()

        def counted(private: PrivateExamples, label: str | None, *, ledger_id: str | None) -> Any:
            with lock:  # otherwise a thread could note an older number after a later one
                room.reads.append(room.reserved)
            return real(private, label, ledger_id=ledger_id)

        monkeypatch.setattr(PrivateExamples, "_pool", counted)
        return room

    def test_a_construction_charges_and_tells_nothing(self, room: Room) -> None:
        observer = Observer()
        RunnableLambda(lambda _: [self.make(room)]).invoke(0, {"callbacks": [observer]})
        assert (room.reserved, room.releases, observer.heard) == (0, 0, [])

    def test_a_failed_construction_charges_nothing(self, room: Room) -> None:
        faults = self.faulty_constructions(room)
        assert faults
        for fault in faults:
            before, left = room.lines(), room.budget.remaining_epsilon
            with pytest.raises(ConfigurationError):
                fault()
            assert room.lines() == before
            assert room.budget.remaining_epsilon == left
        assert (room.charged, room.releases) == (0, 0)
        assert room.private._ledger_id is None  # free to go elsewhere

    def test_every_door_reserves_before_it_reads_and_charges_what_it_releases(self, room: Room, door: Door) -> None:
        component, observer = self.make(room), Observer()
        answers = enter(door, component, self.questions, observer)
        assert not [answer for answer in answers if isinstance(answer, BaseException)]
        assert room.charged == room.releases > 0
        assert sum(data["tickets"] for data in observer.named(CHARGED)) == room.charged
        assert observer.named(REFUSED) == []
        assert all(reserved >= number for number, reserved in enumerate(room.reads, start=1))
        self.check_charges(room, door, answers)
        for data in observer.named(CHARGED):
            assert set(data) == {"component", "tickets", "share", "budget"}
            assert set(data["share"]) == {"name", "epsilon", "delta"}
        assert {name for name, _ in observer.heard} == set(self.told)
        check_public(observer)

    def check_charges(self, room: Room, door: Door, answers: list[Any]) -> None:
        """Checks what else holds of the charges of one round of questions."""
        assert answers

    def test_a_refusal_is_told_once_and_changes_nothing(self, room: Room, door: Door) -> None:
        component = self.make_refused(room)
        before, read = room.lines(), room.releases
        sync, awaited = Observer(), AsyncObserver()
        outcome = enter(door, component, self.questions[:1], sync, awaited)
        assert outcome
        assert all(isinstance(answer, PrivacyBudgetError) for answer in outcome)
        assert room.lines() == before
        assert room.releases == read
        assert len(sync.named(REFUSED)) == door.refusals
        assert awaited.named(REFUSED) == sync.named(REFUSED)
        for data in sync.named(REFUSED):
            assert set(data) == {"component", "error", "requested", "remaining", "budget"}
            assert data["error"].endswith("Error")
        assert {name for name, _ in sync.heard} == {REFUSED}
        check_public(sync)

    def test_no_observer_takes_away_what_was_paid_for_nor_the_place_of_a_refusal(self, room: Room, door: Door) -> None:
        answers = enter(door, self.make(room), self.questions, FailingObserver(), FailingAsyncObserver())
        assert not [answer for answer in answers if isinstance(answer, BaseException)]
        assert room.charged == room.releases > 0
        component, observer = self.make_refused(room), Observer()
        outcome = enter(door, component, self.questions[:1], FailingObserver(), FailingAsyncObserver(), observer)
        assert all(isinstance(answer, PrivacyBudgetError) for answer in outcome)

    def test_async_doors_await_their_observers_on_the_callers_loop(self, room: Room, async_door: Door) -> None:
        paid, refused, observer = self.make(room), self.make_refused(room), AsyncObserver()
        loops = set()

        async def asked(component: Any) -> None:
            loops.add(id(asyncio.get_running_loop()))
            await async_door.ask(component, self.questions[:1])

        async def both() -> None:
            config: RunnableConfig = {"callbacks": [observer]}
            await RunnableLambda(asked).abatch([paid, refused], config, return_exceptions=True)

        asyncio.run(both())
        assert observer.named(CHARGED)
        assert observer.named(REFUSED)
        assert observer.loops == loops

    def test_nothing_private_shows(self, room: Room) -> None:
        component = self.make(room)
        enter(next(iter(self.doors.values())), component, self.questions)
        for thing in (component, room.budget, room.budget.report()):
            assert CANARY not in shown_by(thing)
        for line in room.lines():
            assert CANARY not in repr(line)


class ChargingRunnableContract(FrontRoomContract):
    """The suite for a Runnable that charges one ticket per question."""

    doors: ClassVar[Mapping[str, Door]] = RUNNABLE_DOORS

    @abstractmethod
    def make(self, room: Room, *, max_queries: int = 6, **options: Any) -> Any:
        """Returns a component with so many tickets, on `options["budget"]` where that is given."""

    def make_refused(self, room: Room) -> Any:
        component = self.make(room, max_queries=1)
        component.invoke(self.questions[0])
        return component

    @pytest.fixture
    def spent(self, room: Room) -> Any:
        """A component whose tickets are gone."""
        return self.make_refused(room)

    def check_charges(self, room: Room, door: Door, answers: list[Any]) -> None:
        assert len(answers) == door.answers(len(self.questions))
        assert room.charged == room.reserved == room.releases == len(answers)

    @pytest.mark.parametrize("is_async", [False, True])
    def test_a_run_with_another_budget_is_refused_and_told(self, room: Room, is_async: bool) -> None:
        component, observer, question = self.make(room), Observer(), self.questions[0]
        other = PrivacyBudgetCallbackHandler(epsilon=1.0, delta=1e-6)
        config: RunnableConfig = {"callbacks": [other, observer]}
        with pytest.raises(PrivacyBudgetMismatchError):
            asyncio.run(component.ainvoke(question, config)) if is_async else component.invoke(question, config)
        assert [data["error"] for data in observer.named(REFUSED)] == ["PrivacyBudgetMismatchError"]
        assert observer.named(REFUSED)[0]["budget"]["name"] == "house"
        assert room.reserved == 0

    def test_a_run_under_its_own_budget_is_no_other_budget(self, room: Room) -> None:
        component = self.make(room)
        component.invoke(self.questions[0], {"callbacks": [room.budget]})
        assert room.charged == 1

    # -- batches -------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("way", ["batch", "abatch", "with_retry", "with_retry abatch", "with_fallbacks"])
    def test_a_batch_gets_the_tickets_there_are_and_keeps_what_it_paid_for(self, room: Room, way: str) -> None:
        component, observer = self.make(room, max_queries=4), Observer()
        if "retry" in way:
            component = component.with_retry(wait_exponential_jitter=False)
        if "fallbacks" in way:
            component = component.with_fallbacks([RunnableLambda(len)])
        config: RunnableConfig = {"callbacks": [observer], "max_concurrency": 3}
        questions = [f"question {number}" for number in range(10)]
        if "abatch" in way:
            answers = asyncio.run(component.abatch(questions, config, return_exceptions=True))
        else:
            answers = component.batch(questions, config, return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, PrivacyBudgetExceededError)]
        assert len(refused) == 6
        assert len([answer for answer in answers if isinstance(answer, str)]) == 4
        assert room.charged == room.releases == 4
        assert len(observer.named(REFUSED)) == 6
        assert len(observer.named(CHARGED)) == 4

    @pytest.mark.parametrize("limit", [1, 3])
    @pytest.mark.parametrize("way", ["batch", "abatch"])
    def test_a_batch_honours_max_concurrency(
        self, room: Room, monkeypatch: pytest.MonkeyPatch, way: str, limit: int
    ) -> None:
        busy = Busy(type(self.make(room)), monkeypatch, expected=limit)
        component = self.make(room, max_queries=12)
        questions = [f"question {number}" for number in range(12)]
        config: RunnableConfig = {"max_concurrency": limit}
        if way == "batch":
            component.batch(questions, config)
        else:
            asyncio.run(component.abatch(questions, config))
        assert busy.most == limit
        assert room.charged == room.releases == 12

    # -- retries -------------------------------------------------------------------------------------------------

    def test_its_own_retry_does_not_follow_a_refusal(self, spent: Any) -> None:
        for wrapped in wrappings(spent):
            observer = Observer()
            with pytest.raises(PrivacyBudgetExceededError):
                wrapped.with_retry(wait_exponential_jitter=False).invoke("again", {"callbacks": [observer]})
            assert len(observer.named(REFUSED)) == 1

    def test_its_own_retry_pays_once_when_a_later_step_fails(self, room: Room) -> None:
        chain = self.make(room).with_retry(wait_exponential_jitter=False) | Unlucky(3)
        with pytest.raises(ValueError, match="unlucky"):
            chain.invoke("question")
        assert room.charged == room.releases == 1

    def test_a_retry_of_the_chain_around_it_pays_each_time_and_shows_it(self, room: Room) -> None:
        observer, unlucky = Observer(), Unlucky(2)
        chain = (self.make(room) | unlucky).with_retry(wait_exponential_jitter=False)
        chain.invoke("question", {"callbacks": [observer]})
        assert room.charged == room.releases == len(observer.named(CHARGED)) == 3

    def test_a_retry_of_the_chain_around_it_cannot_spend_what_is_not_there(self, room: Room) -> None:
        observer = Observer()
        chain = (self.make(room, max_queries=2) | Unlucky(9)).with_retry(
            wait_exponential_jitter=False, stop_after_attempt=5
        )
        with pytest.raises(PrivacyBudgetExceededError):
            chain.invoke("question", {"callbacks": [observer]})
        assert room.charged == room.releases == len(observer.named(CHARGED)) == 2
        assert len(observer.named(REFUSED)) == 3

    # -- fallbacks -----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("name", ["invoke", "ainvoke", "batch", "abatch", "stream", "astream", "transform"])
    def test_its_own_fallbacks_do_not_stand_in_for_a_refusal(self, spent: Any, name: str) -> None:
        for wrapped in wrappings(spent):
            plain, observer = Plain(), Observer()
            guarded = wrapped.with_fallbacks([plain])
            outcome = enter(RUNNABLE_DOORS[name], guarded, ["again"], observer)
            assert [type(answer) for answer in outcome] == [PrivacyBudgetExceededError]
            assert plain.asked == []
            assert len(observer.named(REFUSED)) == 1

    def test_fallbacks_of_the_chain_around_it_catch_everything_and_the_refusal_is_told(self, spent: Any) -> None:
        plain, observer = Plain(), Observer()
        chain = (spent | RunnablePassthrough()).with_fallbacks([plain])
        assert chain.invoke("again", {"callbacks": [observer]}) == "not private"
        assert [data["error"] for data in observer.named(REFUSED)] == ["PrivacyBudgetExceededError"]

    def test_a_chain_that_names_what_it_handles_lets_the_refusal_through(self, spent: Any) -> None:
        plain = Plain()
        chain = (spent | RunnablePassthrough()).with_fallbacks([plain], exceptions_to_handle=(ConnectionError,))
        with pytest.raises(PrivacyBudgetExceededError):
            chain.invoke("again")
        assert plain.asked == []

    # -- handles -------------------------------------------------------------------------------------------------

    def test_copies_spend_the_same_budget(self, room: Room) -> None:
        component = self.make(room, max_queries=6)
        copies = [copy.copy(component), copy.deepcopy(component), component.model_copy(deep=True), component.bind()]
        copies += [copy.deepcopy(component.with_config(tags=["x"])), copy.deepcopy(component | RunnablePassthrough())]
        for one in copies:
            one.invoke("question")
        assert room.charged == room.releases == 6
        with pytest.raises(PrivacyBudgetExceededError):
            component.invoke("question")

    def test_it_cannot_be_pickled_nor_anything_around_it(self, room: Room) -> None:
        component = self.make(room)
        for thing in (component, component.bind(), component | RunnablePassthrough(), component.with_retry()):
            with pytest.raises(PrivateAccessError) as refusal:
                pickle.dumps(thing)
            assert CANARY not in str(refusal.value)

    def test_nothing_private_shows_in_what_is_built_around_it(self, room: Room) -> None:
        component = self.make(room)
        component.invoke(self.questions[0])
        for thing in (
            component | RunnablePassthrough(),
            *wrappings(component),
            component.with_retry(),
            component.map(),
        ):
            assert CANARY not in shown_by(thing)

    def test_events_reach_whoever_streams_them(self, room: Room) -> None:
        async def events(component: Any) -> list[Any]:
            found = []
            try:
                async for event in (RunnableLambda(str) | component).astream_events("question", version="v2"):
                    found.append(event)  # noqa: PERF401  what came before an error counts
            except PrivacyBudgetExceededError:
                found.append({"event": "refused"})
            return [e["name"] for e in found if e["event"] == "on_custom_event"]

        component = self.make(room, max_queries=1)
        assert asyncio.run(events(component)) == self.told
        assert asyncio.run(events(component)) == [REFUSED]


def wrappings(component: Any) -> Iterator[Any]:
    """A component, and the wrappers that users put around it before they ask for retries or fallbacks."""
    yield component
    yield component.bind()
    yield component.with_config(tags=["public"])
    yield component.with_listeners(on_start=lambda run: None)
    yield component.with_types(input_type=str)
    yield component.with_config(tags=["public"]).bind().with_config(run_name="vote")
    yield component.with_retry(wait_exponential_jitter=False)
    yield component.with_fallbacks([RunnableLambda(len)])


class Plain(RunnableLambda[Any, str]):
    """An answer without privacy; remembers who asked for it."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        super().__init__(self._said)

    def _said(self, question: Any) -> str:
        self.asked.append(question)
        return "not private"


class Unlucky(RunnableLambda[Any, Any]):
    """A parser that fails so many times before it works."""

    def __init__(self, failures: int) -> None:
        self.left = failures
        super().__init__(self._parsed)

    def _parsed(self, answer: Any) -> Any:
        if self.left:
            self.left -= 1
            raise ValueError("unlucky")
        return answer


class Busy:
    """Counts how many answers of a component are being made at once; each waits until as many are as expected."""

    def __init__(self, kind: type, monkeypatch: pytest.MonkeyPatch, *, expected: int) -> None:
        self.now = self.most = 0
        self._expected = expected
        self._patience = time.monotonic() + 60
        self._lock = threading.Lock()
        run, arun = kind._run, kind._arun

        def counted(component: Any, *args: Any, **kwargs: Any) -> Any:
            self._enter()
            while self._waits():
                time.sleep(0.001)
            time.sleep(0.001)  # who does not keep to the limit gets in here
            try:
                return run(component, *args, **kwargs)
            finally:
                self._leave()

        async def acounted(component: Any, *args: Any, **kwargs: Any) -> Any:
            self._enter()
            while self._waits():  # noqa: ASYNC110  the same wait as in a thread
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.001)
            try:
                return await arun(component, *args, **kwargs)
            finally:
                self._leave()

        monkeypatch.setattr(kind, "_run", counted)
        monkeypatch.setattr(kind, "_arun", acounted)

    def _enter(self) -> None:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)

    def _waits(self) -> bool:
        return self.most < self._expected and time.monotonic() < self._patience

    def _leave(self) -> None:
        with self._lock:
            self.now -= 1
