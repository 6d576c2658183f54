"""A RAG app over private notes that never searches them: the notes vote on which PUBLIC page helps, offline.

    python examples/private_notes_rag.py
    python examples/private_notes_rag.py --ask "My money has not arrived"

The usual way puts the notes nearest to a question into a prompt. That has no price in epsilon: one note is nearest
because of all the others, stands in the answer word for word, and adding a note changes what everybody gets. So here

1. a fresh secret sample of notes, drawn without a look at the question, goes into many small prompts, and each says
   which page of the handbook solved such a case. Noise on the votes decides: one ticket (`DPVotingRunnable`);
2. the pages with most noisy votes are retrieved. They are public;
3. a model writes the answer from those pages. It never sees a note, so any provider can do it.

Question and pages are public. The "private" notes are made up; the embedded model, in this process, sees them.
"""

from __future__ import annotations

import argparse
import random
from operator import itemgetter
from typing import Any

from bank_questions import LABELS, bank_questions, new_questions
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from pydantic import Field

from langchain_dpicl import (
    DPVotingRunnable,
    EmbeddedLLM,
    LabelAnswers,
    PrivacyBudgetCallbackHandler,
    PrivacyBudgetExceededError,
    PrivateExamples,
    Rows,
)
from langchain_dpicl.results import VotingResult

SIZE = 1500
NUM_SLOTS = 40
HANDBOOK = {  # public; its page names are the labels that notes vote for
    "card payment": "A pending card payment clears within two days. A declined card payment is never charged.",
    "transfer": "A transfer arrives on the next working day. A transfer can be cancelled while it is pending.",
    "cash withdrawal": "A cash withdrawal abroad has a fee. Report a wrong amount of cash within a month.",
    "top up": "A top up by card arrives at once. A top up in cash takes a day.",
}
NOBODY = "Nobody has solved such a case often enough. A colleague will call you."


def make_model() -> Any:
    """The model that writes the answer. It sees the question and public pages, never a note."""
    # With a provider: from langchain_openai import ChatOpenAI; return ChatOpenAI(model="gpt-4.1-mini")
    return EmbeddedLLM(max_tokens=24, stop=["\n"])


def private_notes() -> list[dict[str, str]]:
    """What staff wrote down: the customer's words, who called back, and the page that helped. Invented."""
    staff = random.Random(5)
    return [
        {"note": f"{record['text']} ({staff.choice('KLMRST')}. called back)", "page": record["label"]}
        for record in bank_questions(num_per_label=SIZE)
    ]


class NotesRetriever(BaseRetriever):
    """Finds public pages by a private vote of notes; a stock retriever for the chain behind it.

    `metadata` of a page holds its noisy votes and the receipt, which are public.
    """

    voter: Any = Field(exclude=True, repr=False)
    max_pages: int = 2
    least: float
    """Share of the expected votes that a page needs. Looking at released votes costs nothing."""

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        told = self.voter.invoke(query, {"callbacks": run_manager.get_child()})
        ranked = sorted(told.scores, key=told.scores.__getitem__, reverse=True)[: self.max_pages]
        enough = [page for page in ranked if told.scores[page] >= self.least * told.expected_votes]
        receipt = told.receipt.model_dump()
        return [
            Document(HANDBOOK[page], metadata={"page": page, "votes": told.scores[page], "receipt": receipt})
            for page in enough
        ]


def make_voter(budget: PrivacyBudgetCallbackHandler, *, max_queries: int = 30) -> DPVotingRunnable:
    """Plans the votes of all questions together, at epsilon 2; nothing is spent yet."""
    private = PrivateExamples(
        private_notes(),
        text_key="note",
        label_key="page",
        labels=LABELS,
        public_size=dict.fromkeys(LABELS, SIZE),
        dataset_id="case-notes",
    )
    return DPVotingRunnable.from_private_examples(
        private,
        llm=EmbeddedLLM(),  # sees the private prompts
        budget=budget,
        epsilon=2.0,
        max_queries=max_queries,
        example_prompt="case: {note}\npage: {page}",
        suffix="case: {input}\npage:",
        rows=Rows(
            slots=NUM_SLOTS,  # prompts per question
            shots=4,  # notes in each
        ),
        answers=LabelAnswers(scores=True),  # noisy votes for every page, on the same ticket
    )


def as_chain(voter: Runnable[Any, VotingResult], *, least: float = 0.25) -> Runnable[Any, Any]:
    """Question -> pages that private notes chose -> answer."""
    template = PromptTemplate.from_template("{pages}\n\nquestion: {input}\nanswer (from the pages above):")
    write = template | make_model() | StrOutputParser() | str.strip

    def answer(state: dict[str, Any]) -> str:
        if not state["found"]:
            return NOBODY
        pages = "\n".join(f"{page.metadata['page']}: {page.page_content}" for page in state["found"])
        return write.invoke({"input": state["input"], "pages": pages})

    found = {
        "input": itemgetter("input"),
        "found": itemgetter("input") | NotesRetriever(voter=voter, least=least),
    }
    return found | RunnablePassthrough.assign(answer=RunnableLambda(answer))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Private notes choose public pages; a model answers from them.")
    parser.add_argument("--ask", action="append", help="a question; may be repeated")
    options = parser.parse_args(argv)
    budget = PrivacyBudgetCallbackHandler(epsilon=4.0, delta=1e-5)
    voter = make_voter(budget)
    chain = as_chain(voter.with_receipts())
    for question in options.ask or [record["text"] for record in new_questions(num_per_label=1)]:
        try:
            state = chain.invoke({"input": question})
        except PrivacyBudgetExceededError as refusal:  # never let a fallback hide it
            print(f"{question}\n   refused: {refusal}")
            break
        shown = [f"{page.metadata['page']} ({page.metadata['votes']:.0f} noisy votes)" for page in state["found"]]
        print(f"{question}\n   pages:  {', '.join(shown) or 'none'}\n   answer: {state['answer']}")
    print("answers: of the model in make_model; the embedded one strings phrases together, and shows the flow alone")
    plan = voter.plan.to_dict()
    print(f"\n{voter}: about {NUM_SLOTS} votes a question, noise of about {plan['noise_scale']:.1f} on each page")
    print(f"all {plan['max_queries']} questions together: epsilon {plan['epsilon']} at delta {plan['delta']:g}")


if __name__ == "__main__":
    main()
