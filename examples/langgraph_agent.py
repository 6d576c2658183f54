"""A LangGraph agent with a private tool: retries and interrupts run nodes again, and nothing is charged twice.

    python examples/langgraph_agent.py                     needs langgraph
    python examples/langgraph_agent.py --folder state      keeps ledger and memo: run it twice, the second time is free
    python examples/langgraph_agent.py --create-agent      the same tool as middleware of create_agent; needs langchain

The agent asks the tool `team_of`, a private vote of past tickets, which team a message belongs to. Then a mail server
hangs up once (a retry runs a node again), and a person has to approve (an interrupt runs a node again). One ticket is
spent. Three things see to that:

- the vote is a node of its own, so its answer is in the checkpoint before anything behind it can fail or wait;
- the voter remembers what it answered a thread: asked the same again, it tells the same, free (`source="memo"`);
- `memo=` keeps that in a file beside the ledger, so another process knows it too, also after a crash.

The tool charges a thread three questions at most, counted by the ledger; a refusal is a message that the agent reads.

The "private" tickets are made up by `bank_questions.py`. The offline agent is a rule that behaves as a chat model.
"""

from __future__ import annotations

import argparse
import operator
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from bank_questions import LABELS, bank_questions
from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.tools import BaseTool
from typing_extensions import TypedDict

from langchain_dpicl import DPVotingRunnable, EmbeddedLLM, PrivacyBudgetCallbackHandler, PrivateExamples, Rows, Serving

SIZE = 1500
NUM_SLOTS = 40
MESSAGE = "I sent money to my sister on Monday and the transfer is still not there."
RULES = "You sort messages of bank customers. Ask the tool which team a message belongs to, then say so in a sentence."
TOOL = {"name": "team_of", "description": "Which team a customer's message belongs to.", "queries_per_thread": 3}


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


def read_records() -> PrivateExamples:
    """What each process does once: it reads the private tickets."""
    return PrivateExamples(
        bank_questions(num_per_label=SIZE),
        label_key="label",
        labels=LABELS,
        public_size=dict.fromkeys(LABELS, SIZE),
        dataset_id="bank-questions",
    )


def make_voter(
    budget: PrivacyBudgetCallbackHandler, *, private: PrivateExamples | None = None, memo: Path | None = None
) -> DPVotingRunnable:
    """Plans twenty private answers at epsilon 1; the name lets another process find the same share on the ledger."""
    return DPVotingRunnable.from_private_examples(
        private or read_records(),
        llm=EmbeddedLLM(),  # sees the private prompts
        budget=budget,
        epsilon=1.0,
        max_queries=20,
        component="team votes",
        example_prompt="message: {text}\nteam: {label}",
        suffix="message: {input}\nteam:",
        rows=Rows(slots=NUM_SLOTS, shots=4),
        serving=Serving(memo=memo),
    )


def as_tool(voter: DPVotingRunnable) -> BaseTool:
    """What the agent may call; the run's config, and with it thread and tenant, goes through."""
    return voter.as_tool(**TOOL)


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
        return {"messages": [tool.invoke(call, config) for call in state["messages"][-1].tool_calls]}

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


def as_agent(voter: DPVotingRunnable, *, checkpointer: Any) -> Any:
    """The same tool in a stock agent, whose model calls carry the budget in their metadata."""
    from langchain.agents import create_agent

    from langchain_dpicl.agents import DPVotingMiddleware

    middleware = [DPVotingMiddleware(voter, **TOOL)]
    return create_agent(make_model(), system_prompt=RULES, middleware=middleware, checkpointer=checkpointer)


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


def open_ledger(folder: Path) -> PrivacyBudgetCallbackHandler:
    """Opens the ledger. Making one is done once and by hand (`dpicl ledger create`); here, where there is none yet."""
    place = folder / "budget.db"
    if not place.exists():
        PrivacyBudgetCallbackHandler.create(place, epsilon=2.0, delta=1e-5).close()
    return PrivacyBudgetCallbackHandler.open(place)


def mail_about(message: str, folder: Path) -> None:
    """Asks, waits for a person, mails; then another process asks the same."""
    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph.types import Command

    private, memo = read_records(), folder / "memo.db"
    budget = open_ledger(folder)
    voter = make_voter(budget, private=private, memo=memo)
    tool, sent = as_tool(voter), []
    graph = as_graph(tool, send=flaky(sent), checkpointer=InMemorySaver())
    thread = {"configurable": {"thread_id": "ticket-17", "tenant": "branch-oslo"}}

    waiting = graph.invoke({"messages": [HumanMessage(message)]}, thread)
    print(f"customer   {message}")
    print(f"agent      {waiting['__interrupt__'][0].value['reply']}")
    print(f"waiting for a person ... {voter}")
    done = graph.invoke(Command(resume=True), thread)
    print(f"mail       {done['sent']} ... {voter}")
    budget.close()

    budget = open_ledger(folder)  # as another process, on another day
    voter = make_voter(budget, private=private, memo=memo)
    as_tool(voter).invoke({"input": message}, thread)
    print(f"asked again by another process: {voter}")
    print(f"epsilon {voter.share.epsilon:g} for all {voter.plan.max_queries}, {budget.remaining_epsilon:g} left")
    budget.close()


def chat_about(message: str, folder: Path) -> None:
    """The same question through `create_agent`."""
    from langgraph.checkpoint.memory import InMemorySaver

    budget = open_ledger(folder)
    voter = make_voter(budget, memo=folder / "memo.db")
    thread = {"configurable": {"thread_id": "ticket-17", "tenant": "branch-oslo"}}
    done = as_agent(voter, checkpointer=InMemorySaver()).invoke({"messages": [HumanMessage(message)]}, thread)
    print(f"agent      {done['messages'][-1].text} ... {voter}")
    budget.close()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A LangGraph agent with a private tool.")
    parser.add_argument("--message", default=MESSAGE, help="what a customer writes")
    parser.add_argument("--folder", type=Path, help="where ledger and memo stay; by default nowhere")
    parser.add_argument("--create-agent", action="store_true", help="a stock agent with middleware, not a graph")
    options = parser.parse_args(argv)
    wanted = "langchain" if options.create_agent else "langgraph"
    if find_spec(wanted) is None:
        sys.exit(f"This example needs {wanted}: pip install {wanted}")
    run = chat_about if options.create_agent else mail_about
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
        run(options.message, options.folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        run(options.message, Path(folder))


if __name__ == "__main__":
    main()
