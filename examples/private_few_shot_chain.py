"""A few-shot chain whose demonstrations come from private records: made once, where the records are, served anywhere.

    python examples/private_few_shot_chain.py
    python examples/private_few_shot_chain.py release demonstrations.json      where the records are, once
    python examples/private_few_shot_chain.py serve demonstrations.json        anywhere, without limit, free

What passes from one side to the other is a plain JSON file: demonstrations, and the report of what they cost, which
the serving side checks. The "private" records are made up by `bank_questions.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path
from typing import Any

from bank_questions import LABELS, bank_questions, new_questions
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import Runnable

from langchain_dpicl import (
    DPFewShotPromptTemplate,
    DPICLError,
    EmbeddedLLM,
    GenerationTask,
    LabelClassifier,
    PrivacyBudgetCallbackHandler,
    PrivateExamples,
    ReleasedDemonstrations,
    Rows,
    verify_report,
)

SIZE = 1500
NUM_SLOTS = 80
EPSILON = 3.0
INSTRUCTION = "Questions of bank customers."
TASK: dict[str, Any] = {
    "example_prompt": PromptTemplate.from_template("question: {text}\ntopic: {label}"),
    "prefix": INSTRUCTION,
    "suffix": "question: {input}\ntopic:",
}


def make_model() -> Any:
    """The model that serves. It sees released demonstrations and the customer's question, never a record."""
    # With a provider: from langchain_openai import ChatOpenAI; return ChatOpenAI(model="gpt-4.1-mini", max_tokens=8)
    return EmbeddedLLM(max_tokens=4, stop=["\n"])


def release(path: Path) -> None:
    """Writes private demonstrations to a file; the only function here that has records, and that costs."""
    private = PrivateExamples(
        bank_questions(num_per_label=SIZE),
        label_key="label",
        labels=LABELS,
        public_size=dict.fromkeys(LABELS, SIZE),
        dataset_id="bank-questions",
    )
    budget = PrivacyBudgetCallbackHandler(epsilon=EPSILON, delta=1e-5)
    prompt = DPFewShotPromptTemplate.from_private_examples(
        private,
        llm=EmbeddedLLM(),  # sees the private prompts: a model that you run, or a provider that you trust with them
        budget=budget,
        epsilon=EPSILON,
        shots_per_label=2,
        rows=Rows(units=NUM_SLOTS),
        max_tokens=20,
        instruction=INSTRUCTION,
        task=GenerationTask(record_prompt="topic: {label}\nquestion: {text}"),
        **TASK,
    )
    prompt.save_released(path)
    print(f"released  {len(prompt.examples or [])} demonstrations for epsilon {prompt.epsilon:g} -> {path.name}")
    print(f"          {budget.remaining_epsilon:g} of epsilon {budget.epsilon:g} is left")


def load(path: Path) -> DPFewShotPromptTemplate:
    """Reads the file and refuses one whose report does not add up."""
    try:
        released = ReleasedDemonstrations.load(path)
    except DPICLError as error:
        raise SystemExit(f"{path.name}: {error}") from None
    checked = verify_report(released)
    if not checked.ok:
        raise SystemExit(f"{path.name}: {'; '.join(checked.problems)}")
    print(f"verified  epsilon {checked.epsilon:g}: every price recomputed from the report in the file")
    return DPFewShotPromptTemplate.from_released(released, **TASK)


def as_chain(prompt: DPFewShotPromptTemplate) -> Runnable[dict[str, str], str]:
    """Question -> topic. A stock chain: sync, async, batched, streamed, with callbacks and tracing as usual."""
    return prompt | make_model() | StrOutputParser() | str.strip


async def answer_at_once(chain: Runnable[dict[str, str], str], questions: list[str]) -> list[str]:
    """Answers concurrently."""
    return await chain.abatch([{"input": question} for question in questions])


def serve(path: Path) -> None:
    """Answers new questions; nothing here is private, so nothing is charged."""
    prompt = load(path)
    for example in prompt.examples or []:
        print(f"   [{example['label']}] {example['text']}")
    asked = new_questions(num_per_label=2)
    print("served")
    answers = asyncio.run(answer_at_once(as_chain(prompt), [record["text"] for record in asked]))
    for record, answer in zip(asked, answers, strict=True):
        print(f"   {record['text']} -> {answer}")

    tests = new_questions(num_per_label=25)
    zero_shot = PromptTemplate.from_template(f"{INSTRUCTION}\n\nquestion: {{input}}\ntopic:")
    print(f"accuracy on {len(tests)} new questions, labels compared, embedded model")
    for name, used in (("no examples", zero_shot), ("private demonstrations", prompt)):
        classifier = LabelClassifier(EmbeddedLLM(), labels=LABELS, prompt=used)  # compares all labels, calibrated
        labels = classifier.batch([record["text"] for record in tests])
        right = sum(label == record["label"] for label, record in zip(labels, tests, strict=True))
        print(f"   {name:<24}{right / len(tests):.2f}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A few-shot chain with demonstrations from private records.")
    parser.add_argument("step", nargs="?", choices=("release", "serve"), help="one side alone; default: both")
    parser.add_argument("file", nargs="?", type=Path, help="where the demonstrations are kept")
    options = parser.parse_args(argv)
    if options.step and options.file is None:
        parser.error(f"{options.step}: expected a FILE")
    with tempfile.TemporaryDirectory() as folder:
        path = options.file or Path(folder, "demonstrations.json")
        if options.step != "serve":
            release(path)
        if options.step != "release":
            serve(path)


if __name__ == "__main__":
    main()
