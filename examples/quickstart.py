"""Private records in, answers out, the budget at the end. Offline, in a few seconds.

    python examples/quickstart.py

The "private" records are made up by `bank_questions.py`. The embedded model, which runs in this process, sees them;
the model that answers sees only what was released.
"""

from __future__ import annotations

from typing import Any

from bank_questions import LABELS, bank_questions
from langchain_core.prompts import PromptTemplate

from langchain_dpicl import (
    DPFewShotPromptTemplate,
    DPVotingRunnable,
    EmbeddedLLM,
    GenerationTask,
    LabelClassifier,
    PrivacyBudgetCallbackHandler,
    PrivateExamples,
)

SIZE = 1500  # declared number of customers per label; public
QUESTIONS = ("The shop refused my card.", "When does a transfer to Spain arrive?", "The ATM gave me no cash.")


def make_model() -> Any:
    """The model that answers, with released demonstrations."""
    # With a provider: from langchain_openai import ChatOpenAI; return ChatOpenAI(model="gpt-4.1-mini")
    return EmbeddedLLM()


def main() -> None:
    # 1. Wrap the records. From here on nothing shows them, and nothing reads them without a charge.
    records = bank_questions(num_per_label=SIZE)
    private = PrivateExamples(
        [{**record, "customer": number} for number, record in enumerate(records)],
        unit_key="customer",  # protected together; one message of each is used (records_per_unit=1)
        label_key="label",
        labels=LABELS,
        public_size=dict.fromkeys(LABELS, SIZE),
        dataset_id="bank-questions",
    )
    budget = PrivacyBudgetCallbackHandler(epsilon=1.0, delta=1e-6)
    print(private)

    # 2. Pay once for synthetic demonstrations. They are public; use them as often as you like.
    prompt = DPFewShotPromptTemplate.from_private_examples(
        private,
        llm=EmbeddedLLM(),  # sees the private prompts
        budget=budget,
        epsilon=0.5,
        max_tokens=20,
        instruction="Questions of bank customers.",
        task=GenerationTask(record_prompt="topic: {label}\nquestion: {text}"),
        example_prompt=PromptTemplate.from_template("question: {text}\ntopic: {label}"),
        suffix="question: {input}\ntopic:",
    )
    print("\nReleased demonstrations (epsilon 0.5, paid once)")
    for example in prompt.examples or []:
        print(f"   [{example['label']}] {example['text']}")

    classifier = LabelClassifier(make_model(), labels=LABELS, prompt=prompt)  # or prompt | model, for its own words
    print("\nA model answers by them, free")
    for question in QUESTIONS:
        print(f"   {question} -> {classifier.invoke(question)}")

    # 3. Or let the records themselves vote, query by query. On the same budget.
    voter = DPVotingRunnable.from_private_examples(
        private,
        llm=EmbeddedLLM(),  # sees the private prompts
        budget=budget,
        epsilon=0.5,  # for all 20 queries together
        max_queries=20,
        example_prompt="question: {text}\ntopic: {label}",
        suffix="question: {input}\ntopic:",
    )
    print("\nPrivate votes answer (epsilon 0.5 for 20 queries)")
    for question, label in zip(QUESTIONS, voter.batch(list(QUESTIONS)), strict=True):
        print(f"   {question} -> {label}")
    print(f"   {voter}")

    print(f"\nepsilon: {budget.epsilon - budget.remaining_epsilon:g} of {budget.epsilon:g} promised", end=", ")
    print(f"{budget.remaining_epsilon:g} left, delta {budget.delta:g}")
    print("print(budget.report()) says on what, under which adjacency, and what was assumed.")


if __name__ == "__main__":
    main()
