"""A RAG app over private notes that are searched without limit and paid for once, offline.

    python examples/synthetic_documents.py
    python examples/synthetic_documents.py --ask "My money has not arrived"

A retriever over the notes themselves has no price in epsilon: it shows one note word for word, and which one depends on
all the others. So here, once,

1. every customer's notes cast a few keywords of a public vocabulary; a noisy histogram finds those of many customers;
2. for each of them a model writes texts token by token, from fresh secret samples of the notes that hold it;
3. the texts go into a vector store.

From then on everything is public and free: a stock retriever, any model, any number of questions, caches and traces.
The "private" notes are made up; the embedded model, in this process, sees them while texts are written.
"""

from __future__ import annotations

import argparse
import random
from operator import itemgetter
from typing import Any

from bank_questions import bank_questions, new_questions
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough

from langchain_dpicl import (
    DocumentSynthesizer,
    EmbeddedLLM,
    PrivacyBudgetCallbackHandler,
    PrivateExamples,
    SyntheticDocuments,
    verify_report,
)
from langchain_dpicl.options import Topics

SIZE = 1500
VOCABULARY = tuple(  # public: the index of the bank's own help pages
    (
        "app|account|bank|balance|card|cash|cheque|currency|deposit|exchange|fee|identity|interest|limit|loan|mortgage|"
        "passcode|payment|pin|receipt|refund|rate|statement|top up|transfer|travel|withdrawal"
    ).split("|")
)


def make_model() -> Any:
    """The model that answers. It sees the question and synthetic notes, never a note."""
    # With a provider: from langchain_openai import ChatOpenAI; return ChatOpenAI(model="gpt-4.1-mini")
    return EmbeddedLLM(max_tokens=24, stop=["\n"])


def private_notes() -> list[Document]:
    """Notes on calls, as a loader gives them, with the customer as `source`. Invented."""
    staff = random.Random(5)
    return [
        Document(f"{record['text']} ({staff.choice('KLMRST')}. called back)", metadata={"source": str(number)})
        for number, record in enumerate(bank_questions(num_per_label=SIZE))
    ]


def released(budget: PrivacyBudgetCallbackHandler) -> SyntheticDocuments:
    """Spends the one share: topics and texts together, at epsilon 3."""
    private = PrivateExamples(
        private_notes(),  # or a loader
        public_size=4 * SIZE,
        unit_key="source",
        dataset_id="case notes",
    )
    synthesizer = DocumentSynthesizer.from_private_examples(
        private,
        llm=EmbeddedLLM(),  # sees the private prompts
        topics=Topics(VOCABULARY, num_topics=6),
        documents_per_topic=2,
        max_tokens=14,
        budget=budget,
        epsilon=3.0,
    )
    plan = synthesizer.plan  # public: nothing is spent yet
    print(f"planned: epsilon {plan.epsilon}; a keyword of {plan.found_from(0.95)} customers is found")
    return synthesizer.run(progress=False)


def as_chain(documents: SyntheticDocuments) -> Runnable[Any, Any]:
    """Question -> synthetic notes -> answer: stock LangChain, public from end to end."""
    retriever = documents.as_retriever(search_kwargs={"k": 3})  # or documents.to_vector_store(FAISS(...))
    template = PromptTemplate.from_template("{notes}\nnote: {input}\nnote:")
    answer = template | make_model() | StrOutputParser() | str.strip
    with_notes = RunnablePassthrough.assign(
        notes=lambda state: "\n".join(f"note: {each.page_content}" for each in state["found"])
    )
    found = {"input": itemgetter("input"), "found": itemgetter("input") | retriever}
    return found | with_notes | RunnablePassthrough.assign(answer=answer)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Private notes become synthetic ones; a stock RAG chain searches them."
    )
    parser.add_argument("--ask", action="append", help="a question; may be repeated")
    options = parser.parse_args(argv)
    budget = PrivacyBudgetCallbackHandler(epsilon=4.0, delta=1e-6)
    documents = released(budget)
    print("topics: ", ", ".join(f"{topic} (about {count})" for topic, count in documents.topics))
    chain = as_chain(documents)
    for question in options.ask or [record["text"] for record in new_questions(num_per_label=1)]:
        state = chain.invoke({"input": question})
        print(f"{question}\n   nearest: {state['found'][0].page_content}\n   answer:  {state['answer']}")
    print("answers: of the model in make_model; the embedded one strings phrases together, and shows the flow alone")
    verified = verify_report(documents)
    print(f"paid once: epsilon {verified.epsilon} at delta {verified.delta}, recomputed: {verified.ok}")


if __name__ == "__main__":
    main()
