"""The common case: as today, word for word."""

from langchain_core.runnables import RunnableLambda

from langchain_dpicl import DPVotingRunnable, EmbeddedLLM
from tests.programs.common import examples, handler

voter = DPVotingRunnable.from_private_examples(
    examples("p01"),
    llm=EmbeddedLLM(),
    budget=handler(),
    epsilon=1.0,
    max_queries=50,
    example_prompt="Ticket: {text}\nQueue: {queue}",
    suffix="Ticket: {input}\nQueue:",
)
label: str = voter.invoke("where is my card?")


def upper(text: str) -> str:
    return text.upper()


shout: str = (voter | RunnableLambda(upper)).invoke({"input": "send it"})
print(label, shout, voter.queries_left)
