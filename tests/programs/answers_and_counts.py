"""Free answers, a count, a classifier in a chain."""

from langchain_core.prompts import PromptTemplate

from langchain_dpicl import (
    DPFreeFormRunnable,
    EmbeddedLLM,
    EmbeddingAnswers,
    LabelAnswers,
    LabelClassifier,
    Rows,
    UnitCounter,
)
from tests.programs.common import examples, handler

counts = UnitCounter.from_private_examples(examples("p10"), budget=handler(), epsilon=1.0).run()
ask = DPFreeFormRunnable.from_private_examples(
    examples("p10b"),
    llm=EmbeddedLLM(),
    budget=handler(),
    epsilon=2.0,
    max_queries=10,
    example_prompt="Q: {text}\nA: {queue}",
    suffix="Q: {input}\nA:",
    rows=Rows(units=20),
    answers=EmbeddingAnswers(candidates=("a card question", "a transfer question"), max_tokens=6),
)
classify = LabelClassifier(
    EmbeddedLLM(),
    labels=("card", "transfer"),
    prompt=PromptTemplate.from_template("Ticket: {input}\nQueue:"),
    answers=LabelAnswers(calibrate=True),
)
label: str = classify.invoke({"input": "my card"})
print(dict(counts.counts), ask.invoke("my card?"), label)
