"""Labels and sizes that nobody knows, released once and used as if somebody had declared them, offline.

    python examples/unknown_labels.py

A pile of questions has a topic each, typed by the clerk who took the call. Nobody has a list of the topics, and listing
what occurs in the pile would publish the one topic that names a customer. So here

1. the number of customers is counted, with noise: one ticket;
2. topics that enough customers share are found, each with a noisy count, in one spelling: one ticket, most of its delta
   for the threshold;
3. the same customers are declared again, split by the found topics, on the same ledger: from here on any component of
   the package takes them, and what is left of the budget pays for it.

The questions are made up. The model that sorts new questions sees the found topics, and no record.
"""

from __future__ import annotations

import random
from typing import Any

from bank_questions import bank_questions, new_questions
from langchain_core.prompts import PromptTemplate

from langchain_dpicl import (
    EmbeddedLLM,
    LabelClassifier,
    Noise,
    PrivacyBudgetCallbackHandler,
    PrivateExamples,
    ReleasedCounts,
    UnitCounter,
    ValueDiscovery,
    verify_report,
)

SIZE = 150


def make_model() -> Any:
    """The model that sorts new questions. It sees the released topics, never a record."""
    # With a provider: from langchain_openai import ChatOpenAI; return ChatOpenAI(model="gpt-4.1-mini")
    return EmbeddedLLM(max_tokens=4, stop=["\n"])


def private_questions() -> list[dict[str, str]]:
    """Questions with a topic as people type it, and the customer who asked. Invented."""
    clerk = random.Random(7)
    typed = (str.upper, str.title, str.lower, "  {}".format)
    records = [
        {"text": record["text"], "topic": clerk.choice(typed)(record["label"]), "customer": str(number // 2)}
        for number, record in enumerate(bank_questions(num_per_label=SIZE))
    ]
    return [*records, {"text": "About my loan.", "topic": "Mrs Quigley's overdue loan", "customer": "quigley"}]


def released(budget: PrivacyBudgetCallbackHandler) -> tuple[PrivateExamples, int, ReleasedCounts]:
    """Counts customers and finds topics; returns the examples, split by what was found, and both releases."""
    private = PrivateExamples(
        private_questions(),
        fields=("topic",),
        unit_key="customer",  # two questions of one customer are one unit
        records_per_unit=2,
        public_size=10_000,  # a wide guess: nothing rests on it yet
        dataset_id="questions",
    )
    number = (
        UnitCounter.from_private_examples(private, budget=budget, epsilon=0.5, noise=Noise(delta=1e-9))
        .run()
        .public_size()
    )
    found = ValueDiscovery.from_private_examples(private, field="topic", budget=budget, epsilon=1.0).run()
    return found.redeclare(private), int(str(number)), found


def main() -> None:
    budget = PrivacyBudgetCallbackHandler(epsilon=4.0, delta=1e-6)
    by_topic, number, found = released(budget)
    print(f"customers: at least {number} (95 %)")
    for topic, count in found.counts.items():
        print(f"  {topic:<16} about {count}")
    print(f"declared again as {by_topic.dataset_id!r}, with sizes {by_topic.public_size}")

    asked = [record["text"] for record in new_questions(num_per_label=1)]
    prompt = PromptTemplate.from_template("Question: {question}\nThis question is about my")
    sorted_by = LabelClassifier(make_model(), labels=found.values, prompt=prompt).batch(asked)
    for question, topic in zip(asked, sorted_by, strict=True):
        print(f"  {question} -> {topic}")
    verified = verify_report(budget.report())
    print(f"spent: epsilon {verified.epsilon} at delta {verified.delta}, recomputed: {verified.ok}")


if __name__ == "__main__":
    main()
