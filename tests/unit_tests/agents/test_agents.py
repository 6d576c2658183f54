"""Private answers as a tool of agents: allowances per thread, readable refusals, the budget in metadata."""

from __future__ import annotations

import copy
import functools
import importlib
import pickle
import sys
from types import ModuleType
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from pydantic import ValidationError

from langchain_dpicl import Serving, agents
from langchain_dpicl.agents import CAPPED, SPENT, budget_metadata, thread_tenant
from langchain_dpicl.exceptions import (
    ConfigurationError,
    DPICLError,
    LedgerUnavailableError,
    ModelCallError,
    PrivacyBudgetExceededError,
    PrivateAccessError,
    TenantCapExceededError,
)
from langchain_dpicl.runs.query_runnable import QueryRunnable
from langchain_dpicl.stores import SQLiteMemo
from tests.faults.children import Child
from tests.free_form_doubles import embedding
from tests.memo_house import CANARY, DEAF, LABELS, House, house, no_prices, used

__all__ = ["house", "no_prices"]


def thread(number: object = 17, **configurable: Any) -> dict[str, Any]:
    return {"configurable": {"thread_id": str(number), **configurable}}


def call(text: str, number: str = "1") -> dict[str, Any]:
    return {"name": "ask_private_examples", "args": {"input": text}, "id": number, "type": "tool_call"}


# -- the tool --------------------------------------------------------------------------------------------------------


def test_the_tool_answers_with_text_and_keeps_the_receipt_beside_it(house: House) -> None:
    tool = house.voter().as_tool(name="queue_of", queries_per_thread=5)
    told = tool.invoke({**call("where is it?"), "name": "queue_of"}, thread())
    assert (told.content in LABELS, told.status) == (True, "success")
    assert told.artifact["receipt"]["tickets"] == 1
    assert tool.args == {"input": {"title": "Input", "type": "string"}}
    assert tool.description == house.voter()._purpose
    assert house.voter().as_tool(description="Which queue.").description == "Which queue."


def test_the_artifact_is_the_result_also_where_answers_are_texts(house: House) -> None:
    voter = house.voter().model_copy(update={"gives_receipts": False})
    assert voter.invoke("where is it?") in LABELS
    told = voter.as_tool().invoke(call("and now?"))
    assert (told.content, told.artifact["receipt"]["source"]) == (told.artifact["label"], "release")


async def test_each_thread_has_its_allowance_over_all_processes(house: House) -> None:
    tool = house.voter().as_tool(queries_per_thread=2)
    other = house.voter().as_tool(queries_per_thread=2)  # as another process has it
    assert tool.invoke(call("a"), thread()).status == "success"
    assert (await other.ainvoke(call("b"), thread())).status == "success"
    for late in (tool.invoke(call("c"), thread()), await other.ainvoke(call("c"), thread())):
        assert (late.content, late.status) == (CAPPED, "error")
    assert (await tool.ainvoke(call("b"), thread())).status == "success"  # answered again: free
    assert tool.invoke(call("c"), thread(18)).status == "success"
    assert tool.invoke(call("c"), thread(tenant="oslo")).status == "success"  # another tenant's thread of that name
    assert used(house.voter()) == 4


def test_without_an_allowance_of_threads_a_tenant_has_one_for_all_of_them(house: House) -> None:
    tool = house.voter(serving=Serving(memo=house.memo, tenant_max_queries=1)).as_tool()
    assert tool.invoke(call("a"), thread(1, tenant="oslo")).status == "success"
    assert tool.invoke(call("b"), thread(2, tenant="oslo")).content == CAPPED
    assert tool.invoke(call("b"), {"configurable": {"tenant": "bergen"}}).status == "success"
    assert house.voter().share.used_by("oslo") == 1


async def test_a_cap_of_tenants_in_the_config_is_refused_beside_an_allowance_of_threads(house: House) -> None:
    tool, asked = house.voter().as_tool(queries_per_thread=2), thread(tenant="oslo", tenant_max_queries=1)
    words = r"tenant_max_queries: expected none beside queries_per_thread, .*found 1\. .*queries_per_thread=None"
    with pytest.raises(ConfigurationError, match=words):
        tool.invoke(call("a"), asked)
    with pytest.raises(ConfigurationError, match=words):
        await tool.ainvoke(call("a"), asked)
    with pytest.raises(ConfigurationError, match="tenant_max_queries: expected an integer"):
        tool.invoke(call("a"), thread(tenant_max_queries="many"))
    with pytest.raises(ConfigurationError, match="tenant: expected a text"):
        tool.invoke(call("a"), thread(tenant=3))
    assert used(house.voter()) == 0
    assert tool.invoke(call("a"), thread(tenant_max_queries=None)).status == "success"


def test_a_config_may_lower_a_cap_and_never_raise_it(house: House) -> None:
    tool = house.voter(serving=Serving(memo=house.memo, tenant_max_queries=1)).as_tool()
    assert tool.invoke(call("a"), thread(tenant_max_queries=0)).content == CAPPED
    assert tool.invoke(call("a"), thread(tenant_max_queries=9)).status == "success"
    assert tool.invoke(call("b"), thread(tenant_max_queries=9)).content == CAPPED


def test_a_cap_in_the_config_counts_all_threads_where_they_have_no_allowance(house: House) -> None:
    tool = house.voter().as_tool()
    assert tool.invoke(call("a"), thread(1, tenant="oslo", tenant_max_queries=1)).status == "success"
    assert tool.invoke(call("b"), thread(2, tenant="oslo", tenant_max_queries=1)).content == CAPPED


def test_what_a_thread_was_told_is_forgotten_under_its_own_name(house: House) -> None:
    def source() -> str:
        told = house.voter().as_tool(queries_per_thread=5).invoke(call("a"), thread(tenant="oslo"))
        return str(told.artifact["receipt"]["source"])

    told, memo = [source(), source()], SQLiteMemo(house.memo)
    assert memo.forget("oslo") == 0  # whose a thread is, a memo cannot tell
    assert memo.forget(thread_tenant(17, tenant="oslo")) == 1
    assert [*told, source()] == ["release", "memo", "release"]


@pytest.mark.parametrize("way", ["pickle", "copy"])
def test_refusals_go_whole_to_other_processes(way: str) -> None:
    for kind in (PrivacyBudgetExceededError, TenantCapExceededError):
        error = kind("spent.", requested=1, remaining=0.5)
        error.args = ("spent. Build another.",)
        error.add_note("of yours")
        again = pickle.loads(pickle.dumps(error)) if way == "pickle" else copy.copy(error)  # noqa: S301  our own bytes
        assert (type(again), again.args, again.requested, again.remaining) == (kind, error.args, 1, 0.5)
        assert again.__notes__ == ["of yours"]


def errors(kind: type[DPICLError] = DPICLError) -> list[type[DPICLError]]:
    return [kind, *(inner for sub in kind.__subclasses__() for inner in errors(sub))]


@pytest.mark.parametrize("kind", errors())
def test_an_error_leaves_the_run_that_it_carries_in_its_process(house: House, kind: type[DPICLError]) -> None:
    """Otherwise the run's refusal to be pickled hides the error, and Ray runs the task again with other tickets."""
    error = kind.__new__(kind, "the model is down.")  # some want more than a message
    error.run = house.voter()  # type: ignore[attr-defined]  as every run does
    again = pickle.loads(pickle.dumps(error))  # noqa: S301  our own bytes
    assert (type(again), again.args) == (kind, ("the model is down.",))
    assert getattr(again, "run", None) is None


def test_a_tool_is_pickled_as_little_as_its_component(house: House) -> None:
    tool = house.voter().as_tool()
    with pytest.raises(PrivateAccessError, match=r"^DPVotingRunnable: cannot be pickled: a copy would spend"):
        pickle.dumps(tool)
    assert copy.copy(tool).component is tool.component
    assert copy.deepcopy(tool).component.share is tool.component.share


def test_the_component_has_the_last_word_on_caps(house: House) -> None:
    tool = house.voter(serving=Serving(memo=house.memo, tenant_max_queries=1)).as_tool(queries_per_thread=None)
    assert tool.invoke(call("a"), thread()).status == "success"
    assert tool.invoke(call("b"), thread()).content == CAPPED


@pytest.mark.parametrize("door", ["tool", "middleware"])
def test_an_allowance_of_threads_beside_a_cap_of_tenants_is_refused(house: House, door: str) -> None:
    voter = house.voter(serving=Serving(memo=house.memo, tenant_max_queries=9))
    if door == "middleware":
        pytest.importorskip("langchain.agents")
    make = voter.as_tool if door == "tool" else functools.partial(agents.DPVotingMiddleware, voter)
    with pytest.raises(ConfigurationError, match=r"queries_per_thread: expected None.* tenant_max_queries.*found 5"):
        make(queries_per_thread=5)


def test_the_middleware_counts_tenants_where_the_component_has_a_cap_of_them(house: House) -> None:
    pytest.importorskip("langchain.agents")
    capped = house.voter(serving=Serving(memo=house.memo, tenant_max_queries=1))
    [tool] = agents.DPVotingMiddleware(capped).tools
    assert tool.invoke(call("a"), thread(1, tenant="oslo")).status == "success"
    assert tool.invoke(call("b"), thread(2, tenant="oslo")).content == CAPPED
    assert capped.share.used_by("oslo") == 1
    [usual] = agents.DPVotingMiddleware(house.voter()).tools
    assert usual.queries_per_thread == 5


def test_a_spent_share_reads_otherwise_than_a_used_allowance(house: House) -> None:
    tool = house.voter(max_queries=1).as_tool(queries_per_thread=3)
    tool.invoke(call("a"), thread())
    refused = tool.invoke(call("b"), thread())
    assert (refused.content, refused.status, refused.artifact) == (SPENT, "error", None)
    assert tool.invoke(call("a"), thread()).status == "success"
    assert "epsilon" not in SPENT + CAPPED


@pytest.mark.parametrize("error", [ModelCallError, LedgerUnavailableError, ConfigurationError])
def test_other_faults_are_raised(house: House, monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise error("out")

    monkeypatch.setattr(QueryRunnable, "_read_memo", fail)
    with pytest.raises(error):
        house.voter().as_tool(queries_per_thread=5).invoke(call("a"), thread())


def test_without_a_thread_nobody_is_charged(house: House) -> None:
    tool = house.voter().as_tool(queries_per_thread=5)
    for config in ({}, {"configurable": {"tenant": "oslo"}}):
        with pytest.raises(ConfigurationError, match=r"thread.*give queries_per_thread=None"):
            tool.invoke(call("a"), config)
    assert used(house.voter()) == 0


def test_free_form_answers_are_a_tool_as_well() -> None:
    told = embedding().as_tool().invoke(call("what now?"))
    assert (told.content, told.artifact["answer"]) == ("ask the bank", "ask the bank")


@pytest.mark.parametrize("asked", [{"args_schema": dict}, {"arg_types": {"input": str}}])
def test_a_schema_that_the_component_knows_is_refused(house: House, asked: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=rf"{next(iter(asked))}: expected None, .* variables \['input'\]"):
        house.voter().as_tool(**asked)
    with pytest.raises(ConfigurationError, match="args_schema: expected None"):
        house.voter().as_tool(dict)


@pytest.mark.parametrize("bad", [-1, 1.5, "5", "Auto"])
@pytest.mark.parametrize("cap", [None, 9])
def test_an_allowance_out_of_range_is_refused(house: House, bad: Any, cap: int | None) -> None:
    voter = house.voter(serving=Serving(memo=house.memo, tenant_max_queries=cap))
    with pytest.raises(ConfigurationError, match=f"queries_per_thread: expected an integer.*found {bad!r}"):
        voter.as_tool(queries_per_thread=bad)
    pytest.importorskip("langchain.agents")
    words = "'auto', None or an integer" if isinstance(bad, str) else "an integer"
    with pytest.raises(ConfigurationError, match=f"queries_per_thread: expected {words}.*found {bad!r}"):
        agents.DPVotingMiddleware(voter, queries_per_thread=bad)


def test_what_is_no_component_is_refused(house: House) -> None:
    pytest.importorskip("langchain.agents")
    for bad in (None, house.voter().with_config(tags=["x"]), "voter"):
        with pytest.raises(ConfigurationError, match="component"):
            agents.DPVotingMiddleware(bad)  # type: ignore[arg-type]
    for name in ("config", "self", "model_config", "runtime", "_q", "model_dump", "model_extra"):
        clashing = house.voter(
            component=f"of {name}", epsilon=1.0, example_prompt="{text} {queue}", suffix=f"{{{name}}}:"
        )
        with pytest.raises(ConfigurationError, match=f"variables other than .*{name}"):
            clashing.as_tool()


def test_names_of_threads_are_short_unambiguous_and_hashed() -> None:
    names = [thread_tenant("17"), thread_tenant("17", tenant="oslo"), thread_tenant('17", "oslo')]
    assert len(set(names)) == 3
    assert thread_tenant("\U0001f600") != thread_tenant("\ud83d\ude00")
    assert thread_tenant("anna@example.org" * 99).startswith("thread-")
    assert {len(name) for name in names} == {39}


# -- the budget in metadata --------------------------------------------------------------------------------------------


class Seen(BaseCallbackHandler):
    """Keeps the metadata of runs, by kind."""

    def __init__(self) -> None:
        self.models: list[dict[str, Any]] = []
        self.chains: list[dict[str, Any]] = []

    def on_chat_model_start(self, serialized: Any, messages: Any, *, metadata: Any = None, **kwargs: Any) -> None:
        self.models.append(dict(metadata or {}))

    def on_chain_start(self, serialized: Any, inputs: Any, *, metadata: Any = None, **kwargs: Any) -> None:
        if kwargs.get("name") == "DPVotingRunnable":
            self.chains.append(dict(metadata or {}))


def test_metadata_say_what_is_left_in_flat_public_values(house: House) -> None:
    voter = house.voter()
    voter.invoke("a question", {"configurable": {"tenant": "oslo"}})
    assert budget_metadata(voter, tenant="oslo", allowance=3) == {
        "dpicl_component": "queues",
        "dpicl_budget": "budget",
        "dpicl_epsilon": 2e4,
        "dpicl_delta": voter.share.delta,
        "dpicl_queries_left": 39,
        "dpicl_remaining_epsilon": 8e4,
        "dpicl_allowance_left": 2,
    }
    assert "dpicl_allowance_left" not in budget_metadata(voter)
    assert budget_metadata(voter, tenant="oslo", allowance=0)["dpicl_allowance_left"] == 0
    seen = Seen()
    voter.invoke("a question", {"metadata": budget_metadata(voter), "callbacks": [seen]})
    assert seen.chains[0]["dpicl_queries_left"] == 39


def test_the_lowest_cap_is_what_the_metadata_show(house: House) -> None:
    tool = house.voter(serving=Serving(memo=house.memo, tenant_max_queries=3)).as_tool()
    shown = [tool.standing(thread(**given))["dpicl_allowance_left"] for given in ({}, {"tenant_max_queries": 1})]
    assert shown == [3, 1]


def test_metadata_of_a_ledger_that_is_out_say_so(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    voter = house.voter()

    def out(*_: Any) -> Any:
        raise LedgerUnavailableError("out")

    monkeypatch.setattr(type(voter.share), "remaining", out)
    shown = budget_metadata(voter)
    assert shown == {"dpicl_component": "queues", "dpicl_budget": "budget", "dpicl_ledger": "LedgerUnavailableError"}


def test_the_tools_own_run_shows_the_budget(house: House) -> None:
    seen, tool = Seen(), house.voter().as_tool(queries_per_thread=2)
    for text in ("a", "b"):
        tool.invoke(call(text), {**thread(), "callbacks": [seen], "metadata": {"mine": "stays"}})
    assert [shown["dpicl_allowance_left"] for shown in seen.chains] == [2, 1]
    assert [shown["mine"] for shown in seen.chains] == ["stays", "stays"]


# -- create_agent --------------------------------------------------------------------------------------------------------


class Asker(BaseChatModel):
    """Asks the tool each question in turn, then says what it got."""

    questions: list[str]

    @property
    def _llm_type(self) -> str:
        return "asker"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self.bind(tool=tools[0].name, **kwargs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        since = max(place for place, message in enumerate(messages) if isinstance(message, HumanMessage))
        told = [message.text for message in messages[since:] if isinstance(message, ToolMessage)]
        if len(told) < len(self.questions):
            asked = {"name": kwargs["tool"], "args": {"input": self.questions[len(told)]}, "id": f"c{len(messages)}"}
            return ChatResult(generations=[ChatGeneration(message=AIMessage("", tool_calls=[asked]))])
        return ChatResult(generations=[ChatGeneration(message=AIMessage(" | ".join(told)))])


def agent_of(voter: Any, questions: list[str], *, saver: Any = None, before: Any = (), **options: Any) -> Any:
    langchain = pytest.importorskip("langchain.agents")
    middleware = [agents.DPVotingMiddleware(voter, name="queue_of", queries_per_thread=2, **options)]
    return langchain.create_agent(
        Asker(questions=questions), middleware=middleware, checkpointer=saver, interrupt_before=list(before)
    )


SAYS: dict[str, Any] = {"messages": [HumanMessage("Sort these.")]}


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
async def test_an_agent_asks_within_its_allowance_and_reads_refusals(house: House, way: str) -> None:
    seen = Seen()
    agent = agent_of(house.voter(), ["a", "b", "a", "c"])
    config = {**thread(), "callbacks": [seen], "metadata": {"mine": "stays"}}
    done = await agent.ainvoke(SAYS, config) if way == "ainvoke" else agent.invoke(SAYS, config)
    first, second, again, refused = (message for message in done["messages"] if isinstance(message, ToolMessage))
    assert {first.content, second.content} <= set(LABELS)
    assert again.content == first.content
    assert (refused.content, refused.status) == (CAPPED, "error")
    assert CAPPED in done["messages"][-1].content
    assert [shown["dpicl_allowance_left"] for shown in seen.models] == [2, 1, 0, 0, 0]
    assert {shown["mine"] for shown in seen.models} == {"stays"}
    assert used(house.voter()) == 2
    assert CANARY not in str(seen.models) + str(seen.chains) + str(done)


def test_a_question_that_cannot_be_asked_is_a_message_that_the_model_can_mend(house: House) -> None:
    voter = house.voter(serving=Serving(memo=house.memo, max_query_chars=50))
    done = agent_of(voter, [" ", "x" * 51, "a"]).invoke(SAYS, thread())
    blank, long, answered = (message for message in done["messages"] if isinstance(message, ToolMessage))
    assert (blank.status, long.status, answered.status) == ("error", "error", "success")
    assert "expected a query with text" in blank.content
    assert "at most 50 characters" in long.content
    assert used(voter) == 1


def test_a_query_of_several_variables_is_as_long_as_all_of_them(house: House) -> None:
    voter = house.voter(
        component="pairs", example_prompt="{text} {queue}", suffix="{a} {b}:", serving=Serving(max_query_chars=50)
    )
    tool = voter.as_tool()
    with pytest.raises(ValidationError, match="at most 50 characters") as caught:
        tool.invoke({"a": "x" * 30, "b": "x" * 30})
    assert "xxx" not in str(caught.value)  # who asked may see it, logs may not
    assert tool.invoke({"a": "x" * 30, "b": ""}) in LABELS


@pytest.mark.parametrize("questions", [[], ["a"]], ids=["no question", "a question"])
def test_an_agent_without_a_thread_works_until_it_asks(house: House, questions: list[str]) -> None:
    seen = Seen()
    agent = agent_of(house.voter(), questions)
    if questions:
        with pytest.raises(ConfigurationError, match="thread"):
            agent.invoke(SAYS, {"callbacks": [seen]})
    else:
        agent.invoke(SAYS, {"callbacks": [seen]})
    assert "dpicl_queries_left" in seen.models[0]
    assert "dpicl_allowance_left" not in seen.models[0]
    assert used(house.voter()) == 0


def test_two_voters_are_two_tools_of_one_agent(house: House) -> None:
    langchain = pytest.importorskip("langchain.agents")
    pair = [agents.DPVotingMiddleware(house.voter(component=name), name=name) for name in ("one", "two")]
    assert [part.name for part in pair] == ["DPVotingMiddleware[one]", "DPVotingMiddleware[two]"]
    langchain.create_agent(Asker(questions=["a"]), middleware=pair).invoke(SAYS, thread())
    assert [used(house.voter(component=name)) for name in ("one", "two")] == [1, 0]


def test_another_process_goes_on_with_a_thread_and_its_allowance(house: House) -> None:
    sqlite = pytest.importorskip("langgraph.checkpoint.sqlite")
    house.budget.close()

    def act(before: list[str], given: Any) -> list[str]:
        budget = house.opened()
        with sqlite.SqliteSaver.from_conn_string(str(house.folder / "checkpoints.db")) as saver:
            voter = house.voter(budget=budget, **DEAF)
            done = agent_of(voter, ["a", "b", "c"], saver=saver, before=before).invoke(given, thread())
        budget.close()
        return [message.text for message in done["messages"] if isinstance(message, ToolMessage)]

    # Stopped before the second question; then the tools' node runs in another process, and again in a third one.
    assert Child(lambda _: act(["tools"], SAYS)).result() == []
    told = Child(lambda _: act([], None)).result()
    assert told[2] == CAPPED
    again = Child(lambda _: act([], {"messages": [HumanMessage("Once more.")]})).result()
    assert again[:2] == again[3:5] == told[:2]
    house.budget = house.opened()
    assert used(house.voter(**DEAF)) == 2


def test_without_langchain_the_middleware_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "langchain_dpicl.agents")
    monkeypatch.setitem(sys.modules, "langchain", None)
    monkeypatch.setitem(sys.modules, "langchain.agents.middleware", None)
    without = importlib.import_module("langchain_dpicl.agents")
    monkeypatch.setattr("langchain_dpicl.agents", agents)
    assert without.PrivateTool is agents.PrivateTool
    with pytest.raises(ConfigurationError, match=r"langchain-dpicl\[agents\]"):
        _ = without.DPVotingMiddleware
    with pytest.raises(AttributeError):
        _ = without.Nothing


def test_langchain_is_loaded_for_the_middleware_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "langchain_dpicl.agents")
    for name in ("langchain", "langchain.agents", "langchain.agents.middleware"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # a version without what the middleware needs
    with_another = importlib.import_module("langchain_dpicl.agents")
    monkeypatch.setattr("langchain_dpicl.agents", agents)
    assert with_another.PrivateTool is agents.PrivateTool
    assert set(with_another.__all__) <= set(dir(with_another))
    with pytest.raises(ImportError, match="AgentMiddleware"):
        _ = with_another.DPVotingMiddleware
