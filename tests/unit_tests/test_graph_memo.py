"""Graphs whose nodes run again - retries, interrupts, kills, forks, branches - cost one ticket per question and tenant."""

from __future__ import annotations

import operator
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import pytest
from typing_extensions import TypedDict

from tests.faults.children import Child
from tests.memo_house import DEAF, House, house, no_prices, used

__all__ = ["house", "no_prices"]

pytest.importorskip("langgraph")
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, RetryPolicy, Send, interrupt

THREAD: dict[str, Any] = {"configurable": {"thread_id": "17", "tenant": "oslo"}}


class State(TypedDict, total=False):
    """Public, all of it."""

    question: str
    queue: str
    approved: bool
    queues: Annotated[list[str], operator.add]


def graph_of(voter: Any, saver: Any, *, hang_ups: int = 0, dies: bool = False) -> Any:
    """One node as none should be written: a vote, a fault and an interrupt in it."""
    left = [hang_ups]

    def node(state: State, config: RunnableConfig) -> State:
        told = voter.invoke(state["question"], config)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if left[0]:
            left[0] -= 1
            raise ConnectionError
        return {"queue": told.label, "approved": interrupt(told.label)}

    graph = StateGraph(State)
    again = RetryPolicy(max_attempts=4, initial_interval=0.001, jitter=False, retry_on=ConnectionError)
    graph.add_node("node", node, retry_policy=again)
    graph.add_edge(START, "node")
    graph.add_edge("node", END)
    return graph.compile(checkpointer=saver)


@contextmanager
def process(house: House, **options: Any) -> Iterator[tuple[Any, Any]]:
    """A voter and a checkpointer as a process of its own would open them."""
    budget = house.opened()
    with SqliteSaver.from_conn_string(str(house.folder / "checkpoints.db")) as saver:
        yield house.voter(budget=budget, **DEAF, **options), saver
    budget.close()


def in_another_process(house: House, given: Any, **how: Any) -> Any:
    """Runs the graph in a process of its own; returns what it asks a person, or what it ends with."""

    def act(_: Any) -> Any:
        with process(house) as (voter, saver):
            done = graph_of(voter, saver, **how).invoke(given, THREAD)
            return done["__interrupt__"][0].value if "__interrupt__" in done else [done["queue"], done["approved"]]

    return Child(act)


@pytest.fixture
def closed(house: House) -> House:
    """The house with nothing open in this process, as it forks."""
    house.budget.close()
    return house


def test_an_interrupt_is_resumed_by_another_process_for_free(closed: House) -> None:
    asked = in_another_process(closed, {"question": "where is it?"}).result()
    done = in_another_process(closed, Command(resume=True)).result()
    assert done == [asked, True]
    with process(closed) as (voter, _):
        assert used(voter) == 1


def test_a_process_killed_in_the_node_is_taken_over_for_free(closed: House) -> None:
    assert in_another_process(closed, {"question": "where is it?"}, dies=True).lines() == []
    with process(closed) as (voter, saver):
        assert used(voter) == 1
        waiting = graph_of(voter, saver).invoke(None, THREAD)  # goes on from the checkpoint
        assert waiting["__interrupt__"]
        assert used(voter) == 1


def test_retries_and_an_interrupt_in_one_process_cost_one_ticket(house: House) -> None:
    voter, saver = house.voter(**DEAF), InMemorySaver()
    graph = graph_of(voter, saver, hang_ups=3)
    (waiting,) = graph.invoke({"question": "where is it?"}, THREAD)["__interrupt__"]
    done = graph.invoke(Command(resume=True), THREAD)
    assert (done["queue"], done["approved"]) == (waiting.value, True)
    assert used(voter) == 1


def test_going_back_in_time_asks_the_same_for_free_and_something_else_for_a_ticket(house: House) -> None:
    saver = InMemorySaver()
    graph = graph_of(house.voter(**DEAF), saver)
    (first,) = graph.invoke({"question": "where is it?"}, THREAD)["__interrupt__"]
    graph.invoke(Command(resume=True), THREAD)
    voter = house.voter(**DEAF)  # as another process has it
    graph = graph_of(voter, saver)
    past = next(state for state in graph.get_state_history(THREAD) if state.next == ("node",))
    assert past.config["configurable"]["checkpoint_id"]
    fork = {"configurable": {**past.config["configurable"], "tenant": "oslo"}}
    for _ in range(2):
        (again,) = graph.invoke(None, fork)["__interrupt__"]
        assert again.value == first.value
    assert used(voter) == 1
    other = graph.update_state(fork, {"question": "and this one?"})
    assert graph.invoke(None, {"configurable": {**other["configurable"], "tenant": "oslo"}})["__interrupt__"]
    assert used(voter) == 2


@pytest.mark.parametrize("tenants", [["oslo"], ["oslo", "bergen"]])
async def test_branches_cost_one_ticket_for_each_question_and_tenant(house: House, tenants: list[str]) -> None:
    voter = house.voter(**DEAF)
    questions = ["a", "b", "a", "a", "b"]

    async def vote(state: State, config: RunnableConfig) -> State:
        return {"queues": [f"{state['question']} {(await voter.ainvoke(state['question'], config)).label}"]}

    graph = StateGraph(State)
    graph.add_node("vote", vote)
    graph.add_conditional_edges(START, lambda _: [Send("vote", {"question": text}) for text in questions], ["vote"])
    graph.add_edge("vote", END)
    app = graph.compile()
    for number, tenant in enumerate(tenants, 1):
        done = await app.ainvoke({}, {"configurable": {"tenant": tenant}})
        assert len(set(done["queues"])) == 2
        assert used(voter) == 2 * number


def test_the_state_and_the_checkpoints_hold_no_record(closed: House) -> None:
    from tests.memo_house import CANARY

    in_another_process(closed, {"question": "where is it?"}).result()
    kept = b"".join(path.read_bytes() for path in sorted(Path(closed.folder).iterdir()))
    assert b"where is it?" in kept
    assert CANARY.encode() not in kept
    memo = closed.memo.read_bytes()
    assert b"where is it?" not in memo
    assert b"oslo" not in memo
