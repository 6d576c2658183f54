"""A web application of one's own that answers by private votes, with FastAPI; one ledger for all its processes.

    dpicl ledger create topics.db --epsilon 4 --delta 1e-5           once, by hand
    DPICL_LEDGER=topics.db python examples/web_application.py
    DPICL_LEDGER=topics.db uvicorn --app-dir examples --workers 2 web_application:app

Both need `pip install "langchain-dpicl[serve]"`. In another shell:

    curl -H "Content-Type: application/json" -d '{"question": "my card was declined"}' http://127.0.0.1:8000/topic

The budget is closed where the application stops. uvicorn ends its processes by a signal that Python does not hear of,
and tickets that a process holds then are lost. Put tenants, keys and limits in front of it, or let `dpicl serve`, which
has them, answer. The "private" questions are made up by `bank_questions.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from bank_questions import LABELS, bank_questions
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field

from langchain_dpicl import DPVotingRunnable, EmbeddedLLM, PrivacyBudgetCallbackHandler, PrivateExamples
from langchain_dpicl.exceptions import ModelCallError, PrivacyBudgetExceededError

SIZE = 1500


class Question(BaseModel):
    """What a customer asks; public, unlike the questions that vote on it."""

    question: str = Field(min_length=1, max_length=500, pattern=r"\S")


class Topic(BaseModel):
    """What the votes say."""

    topic: str
    queries_left: int | None


def make_model() -> Any:
    """The model that votes. It SEES the private prompts: one that you run, or a provider that you trust with them."""
    # With a provider: from langchain_openai import ChatOpenAI; return ChatOpenAI(model="gpt-4.1-mini")
    return EmbeddedLLM()


def make_voter(budget: PrivacyBudgetCallbackHandler) -> DPVotingRunnable:
    """Declares 100 answers at epsilon 3 over all of them; where they are declared already, takes what is left."""
    private = PrivateExamples(
        bank_questions(num_per_label=SIZE),
        label_key="label",
        labels=LABELS,
        public_size=dict.fromkeys(LABELS, SIZE),
        dataset_id="bank-questions",
    )
    return DPVotingRunnable.from_private_examples(
        private, llm=make_model(), budget=budget, epsilon=3.0, max_queries=100, component="topics"
    )


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Opens the ledger that DPICL_LEDGER names; closes it when all answers are given."""
    budget = PrivacyBudgetCallbackHandler.open()
    try:
        app.state.voter = (await asyncio.to_thread(make_voter, budget)).with_receipts()
        yield
    finally:
        budget.close()


app = FastAPI(lifespan=lifespan)


@app.post("/topic")
async def topic(asked: Question) -> Topic:
    """Answers a question by a private vote; the same question again is free."""
    try:
        found = await app.state.voter.ainvoke(asked.question)
    except PrivacyBudgetExceededError as error:
        raise HTTPException(402, "All private answers are given.") from error
    except ModelCallError as error:
        raise HTTPException(503, "The model gave no answer.") from error
    return Topic(topic=found.label, queries_left=found.receipt.queries_left)


if __name__ == "__main__":
    uvicorn.run(app)
