"""Private votes behind a retriever, offline: public help pages and a customer's question in, a queue and a reply out.

    python examples/rag_voting.py
    python examples/rag_voting.py --graph        the same as a LangGraph graph (needs langgraph)

The budget covers the PRIVATE records, and nothing else: the question and the pages that are retrieved for it become
part of the query, which every observer of the run sees. If documents have to stay private they belong in
`PrivateExamples`, not behind the retriever. The "private" records are made up by `bank_questions.py`.
"""

from __future__ import annotations

import argparse
from operator import itemgetter
from typing import Any, TypedDict

from bank_questions import LABELS, bank_questions, new_questions
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from langchain_dpicl import (
    DPVotingRunnable,
    EmbeddedLLM,
    LabelAnswers,
    PrivacyBudgetCallbackHandler,
    PrivateExamples,
    Rows,
)
from langchain_dpicl.results import VotingResult

SIZE = 500
NUM_SLOTS = 20
PAGES = {
    "card payment": "A card payment can be pending for two days. A declined card payment is never charged.",
    "transfer": "A transfer arrives on the next working day. A transfer can be cancelled while it is pending.",
    "cash withdrawal": "A cash withdrawal abroad has a fee. Report a wrong amount of cash within a month.",
    "top up": "A top up by card arrives at once. A top up in cash takes a day.",
}


class HelpPages(BaseRetriever):
    """Finds the public help page that shares most words with a question."""

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        del run_manager
        words = set(query.lower().replace("?", " ").split())
        best = max(PAGES, key=lambda topic: len(words & set(PAGES[topic].lower().split())))
        return [Document(PAGES[best], metadata={"topic": best})]


def make_model() -> Any:
    """The model that votes. It SEES the private prompts: one that you run, or a provider that you trust with them."""
    # With a provider: from langchain_openai import ChatOpenAI; return ChatOpenAI(model="gpt-4.1-mini")
    return EmbeddedLLM()


def make_voter() -> tuple[DPVotingRunnable, PrivacyBudgetCallbackHandler]:
    """Plans thirty answers at epsilon 2 over all of them; nothing is spent yet."""
    private = PrivateExamples(
        bank_questions(num_per_label=SIZE),
        label_key="label",
        labels=LABELS,
        public_size=dict.fromkeys(LABELS, SIZE),
        dataset_id="bank-questions",
    )
    budget = PrivacyBudgetCallbackHandler(epsilon=4.0, delta=1e-5)
    voter = DPVotingRunnable.from_private_examples(
        private,
        llm=make_model(),  # sees the private prompts
        budget=budget,
        epsilon=2.0,
        max_queries=30,
        example_prompt="question: {text}\ntopic: {label}",
        prefix="Questions of bank customers.",
        suffix="note: {context}\nquestion: {input}\ntopic:",
        rows=Rows(
            slots=NUM_SLOTS,
            shots=4,
        ),
        answers=LabelAnswers(abstain_below=0.2, abstain_label="a person"),
    )
    return voter, budget


def reply_of(state: dict[str, Any]) -> str:
    """Says where a question goes and what the help says about it; public, like everything it is made of."""
    topic = str(state["topic"])
    return f"For {topic}. {PAGES.get(topic, 'Somebody will call you.')}"


def as_chain(voter: DPVotingRunnable) -> Runnable[Any, Any]:
    """Question -> documents -> private votes -> reply."""
    retrieved = {"input": itemgetter("input"), "context": itemgetter("input") | HelpPages()}
    return (
        retrieved
        | RunnablePassthrough.assign(topic=voter.with_receipts())
        | RunnablePassthrough.assign(reply=RunnableLambda(reply_of))
    )


class State(TypedDict, total=False):
    """What the graph passes on."""

    input: str
    context: list[Document]
    topic: VotingResult
    reply: str


def as_graph(voter: DPVotingRunnable) -> Runnable[Any, Any]:
    """Returns `as_chain` as a LangGraph graph."""
    from langgraph.graph import END, START, StateGraph

    pages = HelpPages()
    graph = StateGraph(State)
    graph.add_node("retrieve", lambda state: {"context": pages.invoke(state["input"])})
    graph.add_node("vote", lambda state, config: {"topic": voter.with_receipts().invoke(dict(state), config)})
    graph.add_node("answer", lambda state: {"reply": reply_of(dict(state))})
    for before, after in ((START, "retrieve"), ("retrieve", "vote"), ("vote", "answer"), ("answer", END)):
        graph.add_edge(before, after)
    return graph.compile()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Private votes behind a retriever of public pages.")
    parser.add_argument("--graph", action="store_true", help="run it as a LangGraph graph")
    options = parser.parse_args(argv)
    voter, budget = make_voter()
    chain = as_graph(voter) if options.graph else as_chain(voter)
    asked = [record["text"] for record in new_questions(num_per_label=2)]
    for state in chain.batch([{"input": text} for text in asked]):
        print(f"{state['input']}\n   -> {state['reply']}")
    last = chain.invoke({"input": asked[0]})["topic"].receipt  # asked before: answered again, free
    print(f"\n{last.source}: {last.tickets} tickets, {last.queries_left} of {voter.plan.max_queries} queries left")
    print(budget.report())


if __name__ == "__main__":
    main()
