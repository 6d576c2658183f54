"""Every component of ours that charges, through every door it has, and inside graphs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypedDict

import pytest
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, RetryPolicy, interrupt

from langchain_dpicl.backends.fake import FakeBackend, word_copier
from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
from langchain_dpicl.exceptions import DPICLError, PrivacyBudgetExceededError
from langchain_dpicl.generation.synthesizer import DemonstrationSynthesizer
from langchain_dpicl.options import Decoding, GenerationTask, Noise, Rows
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.prompts import DPFewShotChatMessagePromptTemplate, DPFewShotPromptTemplate
from langchain_dpicl.runs.query_runnable import RELEASE
from tests.contracts.front_room import (
    CANARY,
    CHARGED,
    REFUSED,
    AsyncObserver,
    ChargingRunnableContract,
    Door,
    FrontRoomContract,
    Observer,
    Room,
    Unlucky,
)
from tests.doubles import WORDS
from tests.tiny_vote import TinyVoteScene

DESIGN: dict[str, Any] = {
    "epsilon": 2000.0,
    "noise": Noise(multiplier=0.05),
    "rows": Rows(units=20),
    "task": GenerationTask(record_prompt="{topic}: {text}"),
    "instruction": "Messages.",
}


# -- demonstrations ----------------------------------------------------------------------------------------------


class MakesDemonstrations(FrontRoomContract):
    def make_private(self) -> PrivateExamples:
        records = [{"text": f"my card was declined\n{CANARY}", "topic": "card"}] * 20
        records += [{"text": f"my transfer is late\n{CANARY}", "topic": "transfer"}] * 20
        sizes = {"card": 20, "transfer": 20}
        return PrivateExamples(records, label_key="topic", labels=tuple(sizes), public_size=sizes)

    def make_engine(self) -> FakeBackend:
        return FakeBackend(word_copier(WORDS), vocabulary=WORDS)


async def _arun(made: DemonstrationSynthesizer, _: Any) -> list[Any]:
    return list((await made.arun()).examples)


async def _astream(made: DemonstrationSynthesizer, _: Any) -> list[Any]:
    return [example async for example in made.astream()]


class TestDemonstrationSynthesizer(MakesDemonstrations):
    doors: ClassVar[Mapping[str, Door]] = {
        "run": Door(lambda made, _: list(made.run().examples)),
        "arun": Door(_arun),
        "stream": Door(lambda made, _: list(made.stream())),
        "astream": Door(_astream),
    }

    def make(self, room: Room, **options: Any) -> DemonstrationSynthesizer:
        given = {"budget": room.budget, "max_tokens": 6, **DESIGN, **options}
        return DemonstrationSynthesizer.from_private_examples(room.private, llm=room.engine, **given)

    def make_refused(self, room: Room) -> DemonstrationSynthesizer:
        self.make(room, component="twice").run()
        return self.make(room, component="twice")

    def faulty_constructions(self, room: Room) -> Sequence[Callable[[], Any]]:
        faults: list[dict[str, Any]] = [
            {"max_tokens": 0},
            {"budget": "one"},
            {"decoding": Decoding(stop=("",))},
            {"task": GenerationTask(record_prompt="{x}")},
        ]
        return [lambda fault=fault: self.make(room, **fault) for fault in faults]

    def test_each_demonstration_is_told_as_a_charge_of_its_own(self, room: Room) -> None:
        observer = Observer()
        made = self.make(room)
        RunnableLambda(lambda _: made.run()).invoke(0, {"callbacks": [observer]})
        told = observer.named(CHARGED)
        assert [data["tickets"] for data in told] == [5, 5]
        assert {data["component"] for data in told} == {"DemonstrationSynthesizer"}
        assert told[0]["share"] == {"name": "few-shot", "epsilon": 2000.0, "delta": made.plan.delta}

    def test_what_goes_back_after_a_failure_is_not_told_as_a_charge(self, room: Room) -> None:
        room.engine._fail_public_call = 3
        made, observer = self.make(room), Observer()

        def twice(_: Any) -> None:
            with pytest.raises(DPICLError):
                made.run()
            made.run()

        RunnableLambda(twice).invoke(0, {"callbacks": [observer]})
        assert [data["tickets"] for data in observer.named(CHARGED)] == [2, 3, 5]
        assert room.charged == room.releases == 10
        assert observer.named(REFUSED) == []

    @pytest.mark.parametrize("options", [{"budget": None}, {"epsilon": 2e5, "noise": Noise(multiplier=0.5)}])
    def test_a_refused_construction_is_told_once(self, room: Room, options: dict[str, Any]) -> None:
        observer = Observer()
        before = room.lines()
        with pytest.raises(DPICLError):
            RunnableLambda(lambda _: [self.make(room, **options)]).invoke(0, {"callbacks": [observer]})
        (told,) = observer.named(REFUSED)
        assert told["component"] == "DemonstrationSynthesizer"
        assert (told["budget"] is None) == (options.get("budget", 0) is None)
        assert room.lines() == before

    def test_a_budget_of_the_runs_own_config_is_shown_in_the_refusal(self, room: Room) -> None:
        observer = Observer()
        config: RunnableConfig = {"callbacks": [observer, room.budget]}
        options = {"budget": None, "epsilon": 2e5, "noise": Noise(multiplier=0.5)}
        with pytest.raises(PrivacyBudgetExceededError) as refusal:
            RunnableLambda(lambda _: [self.make(room, **options)]).invoke(0, config)
        (told,) = observer.named(REFUSED)
        assert told == {
            "component": "DemonstrationSynthesizer",
            "error": "PrivacyBudgetExceededError",
            "requested": refusal.value.requested,
            "remaining": refusal.value.remaining,
            "budget": {"name": "house", "epsilon": 1e5, "delta": 1e-4, "adjacency": "add_remove"},
        }


async def _amade(maker: Callable[[bool], Any], _: Any) -> list[Any]:
    return list((await maker(True)).examples)


class MakesPrompts(MakesDemonstrations):
    """The component is a function that makes the template: that is what charges."""

    template: ClassVar[Any]
    looks: ClassVar[dict[str, Any]]
    doors: ClassVar[Mapping[str, Door]] = {
        "from_private_examples": Door(lambda maker, _: list(maker(False).examples)),
        "afrom_private_examples": Door(_amade),
    }

    def make(self, room: Room, **options: Any) -> Callable[[bool], Any]:
        given = {"llm": room.engine, "budget": room.budget, "max_tokens": 6, **DESIGN, **self.looks, **options}

        def maker(is_async: bool) -> Any:
            way = self.template.afrom_private_examples if is_async else self.template.from_private_examples
            return way(room.private, **given)

        return maker

    def make_refused(self, room: Room) -> Callable[[bool], Any]:
        return self.make(room, epsilon=2e5, noise=Noise(multiplier=0.5))

    def faulty_constructions(self, room: Room) -> Sequence[Callable[[], Any]]:
        faults: list[dict[str, Any]] = [
            {"max_tokens": 0},
            {"example_prompt": PromptTemplate.from_template("{nothing}")},
            {"template_format": "jinja2"},
        ]
        makers = [self.make(room, **fault) for fault in faults]
        sync = [lambda maker=maker: maker(False) for maker in makers]
        return [*sync, *(lambda maker=maker: asyncio.run(maker(True)) for maker in makers)]

    def test_the_template_that_comes_out_costs_nothing_more(self, room: Room) -> None:
        prompt, observer = self.make(room)(False), Observer()
        charged = room.charged
        for _ in range(3):
            prompt.invoke({"input": "my"}, {"callbacks": [observer]})
        asyncio.run(prompt.ainvoke({"input": "my"}, {"callbacks": [observer]}))
        assert room.charged == charged
        assert observer.heard == []


class TestDPFewShotPromptTemplate(MakesPrompts):
    template = DPFewShotPromptTemplate
    looks: ClassVar[dict[str, Any]] = {
        "example_prompt": PromptTemplate.from_template("{text} -> {topic}"),
        "suffix": "{input} ->",
    }


class TestDPFewShotChatMessagePromptTemplate(MakesPrompts):
    template = DPFewShotChatMessagePromptTemplate
    looks: ClassVar[dict[str, Any]] = {
        "example_prompt": ChatPromptTemplate.from_messages([("human", "{text}"), ("ai", "{topic}")]),
        "suffix": "{input}",
    }


# -- inside graphs -----------------------------------------------------------------------------------------------


class State(TypedDict):
    question: str
    answer: str


def graph(*steps: Any, retry: RetryPolicy | None = None, checkpointer: Any = None) -> Any:
    """A graph of nodes in a row, each with the retry policy."""
    built = StateGraph(State)
    names = [f"step {number}" for number in range(len(steps))]
    for name, step in zip(names, steps, strict=True):
        built.add_node(name, step, retry_policy=retry)
    for one, other in zip([START, *names], [*names, END], strict=True):
        built.add_edge(one, other)
    return built.compile(checkpointer=checkpointer)


def ask_node(component: Any) -> Any:
    def node(state: State) -> dict[str, str]:
        return {"answer": component.invoke(state["question"])}

    return node


def aask_node(component: Any) -> Any:
    async def node(state: State) -> dict[str, str]:
        return {"answer": await component.ainvoke(state["question"])}

    return node


def chain_node(component: Any) -> Any:
    return RunnableLambda(lambda state: state["question"]) | component | RunnableLambda(lambda a: {"answer": a})


def _state(question: str) -> Any:
    return {"question": question, "answer": ""}


async def _graph_ainvoke(c: Any, q: list[str]) -> list[Any]:
    return [(await graph(aask_node(c)).ainvoke(_state(q[0])))["answer"]]


async def _graph_astream(c: Any, q: list[str]) -> list[Any]:
    modes = ["values", "updates", "messages", "custom"]
    found = [item async for item in graph(aask_node(c)).astream(_state(q[0]), stream_mode=modes)]
    return [data["step 0"]["answer"] for mode, data in found if mode == "updates"]


async def _graph_events(c: Any, q: list[str]) -> list[Any]:
    events = [event async for event in graph(chain_node(c)).astream_events(_state(q[0]), version="v2")]
    ends = [event for event in events if event["event"] == "on_chain_end" and event["run_id"] == events[0]["run_id"]]
    return [event["data"]["output"]["answer"] for event in ends]


class TestInsideAGraph(TinyVoteScene, FrontRoomContract):
    """The smallest Runnable that charges, entered through nodes."""

    told: ClassVar[list[str]] = [RELEASE, CHARGED]
    make_refused = ChargingRunnableContract.make_refused
    check_charges = ChargingRunnableContract.check_charges
    doors: ClassVar[Mapping[str, Door]] = {
        "node": Door(lambda c, q: [graph(ask_node(c)).invoke(_state(q[0]))["answer"]]),
        "async node": Door(_graph_ainvoke),
        "chain as node": Door(lambda c, q: [graph(chain_node(c)).invoke(_state(q[0]))["answer"]]),
        "batch of graphs": Door(
            lambda c, q: [out["answer"] for out in graph(ask_node(c)).batch([_state(one) for one in q])],
            answers=lambda questions: questions,
        ),
        "node streamed": Door(
            lambda c, q: [
                data["step 0"]["answer"] for data in graph(ask_node(c)).stream(_state(q[0]), stream_mode="updates")
            ]
        ),
        "async node streamed": Door(_graph_astream),
        "node with events": Door(_graph_events),
        "two nodes": Door(
            lambda c, q: [graph(ask_node(c), ask_node(c)).invoke(_state(q[0]))["answer"]] * 2, answers=lambda _: 2
        ),
    }

    @pytest.mark.parametrize("is_async", [False, True])
    def test_a_nodes_retry_policy_pays_for_every_attempt_and_shows_it(self, room: Room, is_async: bool) -> None:
        component, unlucky, observer = self.make(room), Unlucky(2), Observer()
        policy = RetryPolicy(initial_interval=0.001, jitter=False, retry_on=ValueError)
        built = graph(chain_node(component | unlucky), retry=policy)
        config: RunnableConfig = {"callbacks": [observer]}
        if is_async:
            asyncio.run(built.ainvoke(_state("question"), config))
        else:
            built.invoke(_state("question"), config)
        assert room.charged == room.releases == len(observer.named(CHARGED)) == 3

    def test_a_nodes_retry_policy_asks_again_after_a_refusal_but_nothing_is_spent(self, room: Room) -> None:
        component, observer = self.make_refused(room), Observer()
        before = room.lines()
        policy = RetryPolicy(initial_interval=0.001, jitter=False)
        with pytest.raises(PrivacyBudgetExceededError):
            graph(ask_node(component), retry=policy).invoke(_state("question"), {"callbacks": [observer]})
        assert len(observer.named(REFUSED)) == policy.max_attempts
        assert room.lines() == before

    def test_a_policy_that_leaves_our_errors_alone_asks_once(self, room: Room) -> None:
        component, observer = self.make_refused(room), AsyncObserver()
        policy = RetryPolicy(initial_interval=0.001, retry_on=lambda error: not isinstance(error, DPICLError))
        with pytest.raises(PrivacyBudgetExceededError):
            asyncio.run(
                graph(aask_node(component), retry=policy).ainvoke(_state("question"), {"callbacks": [observer]})
            )
        assert len(observer.named(REFUSED)) == 1

    def test_a_node_that_is_resumed_runs_again_and_pays_again(self, room: Room) -> None:
        component, observer = self.make(room), Observer()

        def node(state: State) -> dict[str, str]:
            answer = component.invoke(state["question"])
            return {"answer": f"{answer} {interrupt('go on?')}"}

        built = graph(node, checkpointer=InMemorySaver())
        config: RunnableConfig = {"callbacks": [observer], "configurable": {"thread_id": "one"}}
        built.invoke(_state("question"), config)
        assert built.invoke(Command(resume="yes"), config)["answer"].endswith(" yes")
        assert room.charged == room.releases == len(observer.named(CHARGED)) == 2

    def test_an_older_checkpoint_gives_no_budget_back(self, room: Room) -> None:
        component = self.make(room, max_queries=2)
        built = graph(ask_node(component), ask_node(component), checkpointer=InMemorySaver())
        config: RunnableConfig = {"configurable": {"thread_id": "one"}}
        built.invoke(_state("question"), config)
        start = [state for state in built.get_state_history(config) if state.next == ("step 0",)]
        with pytest.raises(PrivacyBudgetExceededError):
            built.invoke(None, start[0].config)
        assert room.charged == room.releases == 2

    def test_the_graphs_config_can_carry_the_budget(self, room: Room) -> None:
        own = self.make(room)
        graph(ask_node(own)).invoke(_state("question"), {"callbacks": [room.budget]})
        assert room.charged == 1
        other = PrivacyBudgetCallbackHandler(epsilon=1.0, delta=1e-6)
        with pytest.raises(DPICLError, match="expected 'house'"):
            graph(ask_node(own)).invoke(_state("question"), {"callbacks": [other]})
        assert room.charged == 1
