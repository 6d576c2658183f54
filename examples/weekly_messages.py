"""A year of messages, and every week new demonstrations of the last 30 days, on one budget that never runs out.

    python examples/weekly_messages.py

The "private" messages are made up by `bank_questions.py`. The budget is for windows: about any 30 days of a person's
messages, everything together is (4, 1e-6)-DP.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from bank_questions import LABELS, bank_questions
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate

from langchain_dpicl import (
    DPFewShotPromptTemplate,
    EmbeddedLLM,
    GenerationTask,
    PrivacyBudgetCallbackHandler,
    Rows,
    verify_report,
)
from langchain_dpicl.streams import PrivateStream

WEEKS = 52
PEOPLE = 12_000
MESSAGES = 1_500  # a week
NUM_ROWS = 40
INSTRUCTION = "Questions of bank customers."


def make_model() -> Any:
    """The model that serves. It sees released demonstrations and the customer's question, never a message."""
    # With a provider: from langchain_openai import ChatOpenAI; return ChatOpenAI(model="gpt-4.1-mini", max_tokens=8)
    return EmbeddedLLM(max_tokens=4, stop=["\n"])


def messages(start: datetime, week: int) -> Iterator[dict[str, Any]]:
    """The messages of one week, in no order."""
    rng = random.Random(week)
    asked = bank_questions(num_per_label=MESSAGES // len(LABELS) + 1)
    for record in rng.sample(asked, min(MESSAGES, len(asked))):
        made = start + timedelta(days=7 * week, seconds=rng.randrange(7 * 86_400))
        yield {**record, "created": made, "user": rng.randrange(PEOPLE)}


def main() -> None:
    start = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0) - timedelta(days=7 * WEEKS + 2)
    stream = PrivateStream(
        dataset_id="messages",
        time_key="created",
        unit_key="user",
        label_key="label",
        labels=LABELS,
        public_size={7: MESSAGES, 30: 4 * MESSAGES},
        retention=7 * WEEKS + 60,
    )
    budget = PrivacyBudgetCallbackHandler(epsilon=4.0, delta=1e-6, per="30 days")
    lengths: Counter[int] = Counter()
    prompt = None
    for week in range(WEEKS):
        stream.extend(messages(start, week))
        if week < 4:
            continue  # the first 30 days
        day = (start + timedelta(days=7 * week + 6)).date()
        prompt = DPFewShotPromptTemplate.from_private_examples(
            stream.rolling(30, every=7, until=day),
            llm=EmbeddedLLM(),  # sees the private prompts: a model that you run, or a provider that you trust with them
            budget=budget,
            epsilon=4.0,
            component="weekly examples",
            rows=Rows(units=NUM_ROWS),
            max_tokens=8,
            instruction=INSTRUCTION,
            task=GenerationTask(record_prompt="topic: {label}\nquestion: {text}"),
            example_prompt=PromptTemplate.from_template("question: {text}\ntopic: {label}"),
            prefix=INSTRUCTION,
            suffix="question: {input}\ntopic:",
        )
        lengths[len(prompt.examples or [])] += 1
        if week % 12 == 4:
            print(f"{day}  {(prompt.examples or [{}])[0].get('text', '')!r}")
    assert prompt is not None
    chain = prompt | make_model() | StrOutputParser()
    print(f"served     {chain.invoke({'input': 'my card was stolen'}).strip()!r}")

    report = budget.budget.report()
    checked = verify_report(prompt.released)
    print(f"runs       {sum(lengths.values())}, on one share of epsilon {report.epsilon:g}; verified: {checked.ok}")
    stream_words = report.to_dict()["stream"]
    print(f"promise    {stream_words['promise']}")
    for stay in stream_words["longer_stays"]:
        print(f"           present for {stay['blocks']} days: at most epsilon {stay['epsilon']}")


if __name__ == "__main__":
    main()
