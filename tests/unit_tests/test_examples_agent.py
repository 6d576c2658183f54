"""The agent of `examples/`: nodes that run again spend no second ticket, in this process; and what another one pays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from langchain_dpicl import PrivacyBudgetCallbackHandler
from langchain_dpicl.agents import CAPPED, thread_tenant
from tests.example_files import example
from tests.loopback_provider import Fault, provider

pytest.importorskip("langgraph")
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, RetryPolicy, interrupt

SMALL = {"SIZE": 60, "NUM_SLOTS": 8}
THREAD = {"configurable": {"thread_id": "1", "tenant": "oslo"}}
ASKED = {"messages": [HumanMessage("Where is my transfer?")]}


@pytest.fixture(scope="module")
def agent() -> Iterator[ModuleType]:
    with example("langgraph_agent", **SMALL) as module:
        yield module


@pytest.fixture
def voter(agent: ModuleType) -> Any:
    return agent.make_voter(PrivacyBudgetCallbackHandler(epsilon=2.0, delta=1e-5))


def test_the_example_spends_one_ticket_over_a_retry_an_interrupt_another_process_and_another_agent(
    agent: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("langchain.agents")
    options = ["--message", "Where is my transfer?", "--folder", str(tmp_path / "state")]
    agent.main(options)
    shown = capsys.readouterr().out
    assert shown.count("queries_left=19 of 20") == 3
    assert "mail       sent at try 2 ..." in shown
    (said,) = [label for label in agent.LABELS if f"This is for the team {label!r}." in shown]
    monkeypatch.setattr("langchain_dpicl.privacy.ledger.budget._IDENTITIES", {})  # what another process knows
    agent.main([*options, "--create-agent"])
    again = capsys.readouterr().out
    assert f"This is for the team {said!r}." in again
    assert "queries_left=19 of 20" in again


def test_the_graph_waits_for_a_person_and_resumes_without_asking_again(agent: ModuleType, voter: Any) -> None:
    sent: list[str] = []
    graph = agent.as_graph(agent.as_tool(voter), send=agent.flaky(sent), checkpointer=InMemorySaver())
    waiting = graph.invoke(ASKED, THREAD)
    reply = waiting["__interrupt__"][0].value["reply"]
    assert waiting["messages"][2].content in agent.LABELS
    assert waiting["messages"][2].content in reply
    assert voter.share.used_by(thread_tenant("1", tenant="oslo")) == 1  # both went through graph, node and tool
    assert sent == []
    assert graph.invoke(Command(resume=True), THREAD)["sent"] == "sent at try 2"
    assert sent == [reply]
    assert voter.share.remaining("query") == 19


def test_a_person_who_says_no_sends_nothing(agent: ModuleType, voter: Any) -> None:
    sent: list[str] = []
    graph = agent.as_graph(agent.as_tool(voter), send=agent.flaky(sent), checkpointer=InMemorySaver())
    graph.invoke(ASKED, THREAD)
    assert graph.invoke(Command(resume=False), THREAD)["sent"] == "not sent"
    assert sent == []


def test_a_spent_budget_is_told_to_the_agent_and_other_faults_are_not(agent: ModuleType, voter: Any) -> None:
    tool = agent.as_tool(voter)
    calls = [{"name": "team_of", "args": {"input": text}, "id": "1", "type": "tool_call"} for text in "abcd"]
    *answers, refused = [tool.invoke(call, THREAD) for call in calls]
    assert {answer.status for answer in answers} == {"success"}
    assert (refused.content, refused.status) == (CAPPED, "error")
    with pytest.raises(ValueError, match="thread"):
        tool.invoke(calls[0], {"configurable": {"tenant": "oslo"}})
    assert voter.share.remaining("query") == 17


async def test_a_stock_tool_node_asks_the_same_at_once_for_one_ticket(agent: ModuleType, voter: Any) -> None:
    graph = StateGraph(MessagesState)
    graph.add_node("tools", ToolNode([agent.as_tool(voter)]))
    graph.add_edge(START, "tools")
    graph.add_edge("tools", END)
    asked = enumerate(["card?", "card?", "transfer?", "card?"])
    calls = [{"name": "team_of", "args": {"input": text}, "id": str(i), "type": "tool_call"} for i, text in asked]
    done = await graph.compile().ainvoke({"messages": [AIMessage("", tool_calls=calls)]}, THREAD)
    teams = [message.content for message in done["messages"][1:]]
    assert teams[0] == teams[1] == teams[3]
    assert set(teams) <= set(agent.LABELS)
    assert voter.share.used_by(thread_tenant("1", tenant="oslo")) == 2


def fragile(tool: Any, saver: Any, *, hang_ups: int = 0) -> Any:
    """A graph as the example says not to write one: tool, fault and interrupt in one node."""
    left = [hang_ups]

    def node(state: dict[str, Any]) -> dict[str, Any]:
        team = tool.invoke({"input": "Where is my transfer?"})
        if left[0]:
            left[0] -= 1
            raise ConnectionError
        return {"team": team, "approved": interrupt(team)}

    graph = StateGraph(dict)
    again = RetryPolicy(max_attempts=4, initial_interval=0.001, jitter=False, retry_on=ConnectionError)
    graph.add_node("node", node, retry_policy=again)
    graph.add_edge(START, "node")
    graph.add_edge("node", END)
    return graph.compile(checkpointer=saver)


def test_a_node_that_runs_five_times_is_told_the_same_for_one_ticket(agent: ModuleType, voter: Any) -> None:
    graph = fragile(agent.as_tool(voter), InMemorySaver(), hang_ups=3)
    (waiting,) = graph.invoke({}, THREAD)["__interrupt__"]
    done = graph.invoke(Command(resume=True), THREAD)
    assert (done["team"], done["approved"]) == (waiting.value, True)
    assert voter.share.remaining("query") == 19


@pytest.mark.parametrize("shape", ["example", "fragile", "fragile with a memo"])
def test_another_process_resumes_the_example_for_free_and_a_fragile_graph_pays_again_without_a_memo(
    agent: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    """Without `memo=` what a voter answered dies with it."""
    saver, place = InMemorySaver(), tmp_path / "budget.db"  # both outlive the voter
    PrivacyBudgetCallbackHandler.create(place, epsilon=2.0, delta=1e-5).close()

    def graph_of(voter: Any) -> Any:
        tool = agent.as_tool(voter)
        return (
            agent.as_graph(tool, send=agent.flaky([]), checkpointer=saver)
            if shape == "example"
            else fragile(tool, saver)
        )

    left = []
    for given in (ASKED if shape == "example" else {}, Command(resume=True)):
        monkeypatch.setattr("langchain_dpicl.privacy.ledger.budget._IDENTITIES", {})  # what another process knows
        budget = PrivacyBudgetCallbackHandler.open(place)
        voter = agent.make_voter(budget, memo=tmp_path / "memo.db" if "memo" in shape else None)
        graph_of(voter).invoke(given, THREAD)
        left.append(voter.share.remaining("query"))
        budget.close()
    assert left == ([19, 18] if shape == "fragile" else [19, 19])


def chat(content: str | None, **message: Any) -> Fault:
    """An answer of a chat model that calls tools."""
    choice = {"index": 0, "message": {"role": "assistant", "content": content, **message}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    body = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}
    return Fault(200, json.dumps(body).encode(), {"content-type": "application/json"})


@pytest.mark.loopback
def test_a_provider_calls_the_private_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "team_of", "arguments": '{"input": "Where is it?"}'}}
    with provider() as served, example("langgraph_agent", provider=True, **SMALL) as module:
        monkeypatch.setenv("OPENAI_BASE_URL", served.url)
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        served.script(lambda _: chat(None, tool_calls=[call]), times=1)
        served.script(lambda request: chat(f"For {request.body['messages'][-1]['content']}."), times=1)
        voter = module.make_voter(PrivacyBudgetCallbackHandler(epsilon=2.0, delta=1e-5))
        graph = module.as_graph(module.as_tool(voter), send=module.flaky([]), checkpointer=InMemorySaver())
        waiting = graph.invoke(ASKED, THREAD)
        bodies = [request.body for request in served.received]
    assert waiting["__interrupt__"][0].value["reply"] in {f"For {label}." for label in module.LABELS}
    assert [body["model"] for body in bodies] == ["gpt-4.1-mini"] * 2
    (offered,) = bodies[0]["tools"]
    assert offered["function"]["name"] == "team_of"
    assert list(offered["function"]["parameters"]["properties"]) == ["input"]
    assert voter.share.used_by(thread_tenant("1", tenant="oslo")) == 1
