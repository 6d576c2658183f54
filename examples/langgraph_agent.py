"""A LangGraph agent with a private tool: retries and interrupts run nodes again, and nothing is charged twice.

    python examples/langgraph_agent.py                     needs langgraph

The agent asks the tool `team_of`, a private vote of past tickets, which team a message belongs to. Then a mail server
hangs up once (a retry runs a node again), and a person has to approve (an interrupt runs a node again). One ticket is
spent. Two things see to that:

- the vote is a node of its own, so its answer is in the checkpoint before anything behind it can fail or wait;
- the voter remembers what it told a tenant: asked the same again, it tells the same, free (`source="memo"`).

The memo lives in the voter, in this process; the checkpoint and the ledger may live longer. So let no `interrupt` and
no fragile call share a node with a private tool: a node that another process runs again would pay again.

The "private" tickets are made up by `bank_questions.py`. The offline agent is a rule that behaves as a chat model.
"""

from __future__ import annotations

import argparse
import operator
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Annotated, Any

from bank_questions import LABELS, bank_questions
from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.tools import BaseTool
from typing_extensions import TypedDict

from langchain_dpicl import (
    DPVotingRunnable,
    EmbeddedLLM,
    PrivacyBudgetCallbackHandler,
    PrivacyBudgetExceededError,
    PrivateExamples,
)

SIZE = 1500
NUM_SLOTS = 40
MESSAGE = "I sent money to my sister on Monday and the transfer is still not there."
RULES = "You sort messages of bank customers. Ask the tool which team a message belongs to, then say so in a sentence."
SPENT = "The privacy budget is spent. Say that a person will look at it."


class RuleAgent(BaseChatModel):
    """Stands for a chat model that calls tools, offline: asks the one tool once, then repeats what it said."""

    @property
    def _llm_type(self) -> str:
        return "rule"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Runnable[Any, AIMessage]:
        """Remembers the name of the tool, as a provider's client would its schema."""
        return self.bind(tool=tools[0].name, **kwargs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        del stop, run_manager
        last = messages[-1]
        if isinstance(last, ToolMessage):
            answer = AIMessage(f"This is for the team {last.text!r}.")
        else:
            call = {"name": kwargs["tool"], "args": {"input": last.text}, "id": f"call-{len(messages)}"}
            answer = AIMessage("", tool_calls=[call])
        return ChatResult(generations=[ChatGeneration(message=answer)])


def make_model() -> Any:
    """The agent's model. It sees the conversation and the tool's answers, never a record."""
    # With a provider: from langchain_openai import ChatOpenAI; return ChatOpenAI(model="gpt-4.1-mini")
    return RuleAgent()


def make_voter(budget: PrivacyBudgetCallbackHandler) -> DPVotingRunnable:
    """Plans twenty private answers at epsilon 1; the name lets another process find the same share on the ledger."""
    private = PrivateExamples(
        bank_questions(num_per_label=SIZE),
        label_key="label",
        labels=LABELS,
        public_size=dict.fromkeys(LABELS, SIZE),
        dataset_id="bank-questions",
    )
    return DPVotingRunnable.from_private_examples(
        private,
        llm=EmbeddedLLM(),  # sees the private prompts
        budget=budget,
        epsilon=1.0,
        max_queries=20,
        component="team votes",
        example_prompt="message: {text}\nteam: {label}",
        suffix="message: {input}\nteam:",
        num_slots=NUM_SLOTS,
        shots_per_slot=4,
        tenant_max_queries=10,
    )


def as_tool(voter: DPVotingRunnable) -> BaseTool:
    """What the agent may call; the run's config, and with it the tenant, goes through."""
    return voter.as_tool(name="team_of", description="Which team a customer's message belongs to.")


class State(TypedDict, total=False):
    """What the graph passes on, and what a checkpoint holds. All of it is public."""

    messages: Annotated[list[AnyMessage], operator.add]
    approved: bool
    sent: str


def as_graph(tool: BaseTool, *, send: Callable[[str], str], checkpointer: Any) -> Any:
    """Agent -> private tool -> agent -> approval -> mail.

    Args:
      tool: the private tool.
      send: sends a mail, or raises ConnectionError.
      checkpointer: where a conversation waits while somebody decides.
    """
    from langgraph.graph import END, START, StateGraph
    from langgraph.types import RetryPolicy, interrupt

    model = make_model().bind_tools([tool])

    def agent(state: State) -> State:
        return {"messages": [model.invoke([HumanMessage(RULES), *state["messages"]])]}

    def ask(state: State, config: RunnableConfig) -> State:
        return {"messages": [answered(tool, call, config) for call in state["messages"][-1].tool_calls]}

    def approve(state: State) -> State:
        return {"approved": bool(interrupt({"reply": state["messages"][-1].text}))}

    def mail(state: State) -> State:
        return {"sent": send(state["messages"][-1].text) if state["approved"] else "not sent"}

    def next_step(state: State) -> str:
        return "ask" if state["messages"][-1].tool_calls else "approve"

    again = RetryPolicy(max_attempts=3, initial_interval=0.01, jitter=False, retry_on=ConnectionError)
    graph = StateGraph(State)
    graph.add_node("agent", agent)
    graph.add_node("ask", ask)
    graph.add_node("approve", approve)
    graph.add_node("mail", mail, retry_policy=again)
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", next_step, ["ask", "approve"])
    for before, after in (("ask", "agent"), ("approve", "mail"), ("mail", END)):
        graph.add_edge(before, after)
    return graph.compile(checkpointer=checkpointer)


def answered(tool: BaseTool, call: Any, config: RunnableConfig) -> ToolMessage:
    """Calls the tool; a spent budget becomes an answer that the agent can read, every other fault is raised."""
    try:
        return tool.invoke(call, config)
    except PrivacyBudgetExceededError:
        return ToolMessage(SPENT, tool_call_id=call["id"], status="error")


def flaky(sent: list[str]) -> Callable[[str], str]:
    """A mail server that hangs up on the first try."""
    tries: list[str] = []

    def send(text: str) -> str:
        tries.append(text)
        if len(tries) == 1:
            raise ConnectionError
        sent.append(text)
        return f"sent at try {len(tries)}"

    return send


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A LangGraph agent with a private tool.")
    parser.add_argument("--message", default=MESSAGE, help="what a customer writes")
    options = parser.parse_args(argv)
    if find_spec("langgraph") is None:
        sys.exit("This example needs langgraph: pip install langgraph")
    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph.types import Command

    budget = PrivacyBudgetCallbackHandler(epsilon=2.0, delta=1e-5)
    voter = make_voter(budget)
    tool, sent = as_tool(voter), []
    graph = as_graph(tool, send=flaky(sent), checkpointer=InMemorySaver())
    thread = {"configurable": {"thread_id": "ticket-17", "tenant": "branch-oslo"}}

    waiting = graph.invoke({"messages": [HumanMessage(options.message)]}, thread)
    print(f"customer   {options.message}")
    print(f"agent      {waiting['__interrupt__'][0].value['reply']}")
    print(f"waiting for a person ... {voter}")
    done = graph.invoke(Command(resume=True), thread)
    print(f"mail       {done['sent']} ... {voter}")
    tool.invoke({"input": options.message}, thread)
    print(f"asked again by the same tenant: {voter}")
    print(f"epsilon {voter.share.epsilon:g} for all {voter.plan.max_queries}, {budget.remaining_epsilon:g} left")


if __name__ == "__main__":
    main()
