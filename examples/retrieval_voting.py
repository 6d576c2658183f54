"""RAG with a budget per document, offline: the private questions near to a new one vote on where it belongs.

    python examples/retrieval_voting.py

Each private question may take part in ten answers; one that has done so leaves silently, and nothing shows it. The
share of the budget is paid once, before the first is looked at. `bank_questions.py` makes the "private" records up.
"""

from __future__ import annotations

import argparse
from typing import Any

from bank_questions import LABELS, bank_questions, new_questions

from langchain_dpicl import (
    DPRetrievalVotingRunnable,
    EmbeddedLLM,
    LabelAnswers,
    PrivacyBudgetCallbackHandler,
    PrivateExamples,
    Retrieval,
)
from langchain_dpicl.backends import LocalEmbeddings

SIZE = 250
PARTICIPATIONS = 10


def make_model() -> Any:
    """The model that votes. It SEES the private prompts: one that you run, or a provider that you trust with them."""
    # With a provider: from langchain_openai import ChatOpenAI; return ChatOpenAI(model="gpt-4.1-mini")
    return EmbeddedLLM()


def make_voter() -> tuple[DPRetrievalVotingRunnable, PrivacyBudgetCallbackHandler]:
    """Plans any number of answers at epsilon 3 over all of them; nothing is spent yet."""
    private = PrivateExamples(
        bank_questions(num_per_label=SIZE),
        label_key="label",
        labels=LABELS,
        public_size=SIZE * len(LABELS),
        dataset_id="bank-questions",
    )
    budget = PrivacyBudgetCallbackHandler(epsilon=4.0, delta=1e-5)
    voter = DPRetrievalVotingRunnable.from_private_examples(
        private,
        llm=make_model(),  # sees the private prompts
        retrieval=Retrieval(
            LocalEmbeddings(),  # sees every private question; runs here
            similarity_threshold=0.4,  # chosen on invented questions: public
            participations=PARTICIPATIONS,
            slots=64,  # model calls of every answer, however many take part
        ),
        budget=budget,
        epsilon=3.0,
        example_prompt="question: {text}\ntopic: {label}",
        prefix="Questions of bank customers.",
        suffix="question: {input}\ntopic:",
        answers=LabelAnswers(
            calibrate=False,  # a row is to vote for the label of its document
            abstain_label="a person",
        ),
    )
    return voter, budget


def main(argv: list[str] | None = None) -> None:
    argparse.ArgumentParser(description="Votes of retrieved private documents.").parse_args(argv)
    voter, budget = make_voter()
    plan = voter.plan
    print(f"noise of {plan.noise_stddev:.1f} votes on every topic; an answer needs {plan.noise_floor:.1f} of them")
    asked = new_questions(num_per_label=5)
    told = voter.with_receipts().batch([record["text"] for record in asked], {"max_concurrency": 2})
    for record, answer in zip(asked, told, strict=True):
        print(f"{record['text']}\n   -> {answer.label} (it is {record['label']})")
    right = sum(answer.label == record["label"] for record, answer in zip(asked, told, strict=True))
    asked_again = sum(answer.abstained for answer in told)
    print(f"\n{right} of {len(told)} right, {asked_again} for a person; epsilon left: {budget.remaining_epsilon}")
    print(
        "However many questions follow, nothing more is charged: questions leave when they have answered often enough."
    )
    print(budget.report())


if __name__ == "__main__":
    main()
