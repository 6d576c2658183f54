"""A released few-shot prompt, then stock LangChain from then on."""

from langchain_core.load import dumps
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate

from langchain_dpicl import Decoding, DPFewShotPromptTemplate, EmbeddedLLM, Rows
from tests.programs.common import examples, handler

prompt = DPFewShotPromptTemplate.from_private_examples(
    examples("p03"),
    llm=EmbeddedLLM(),
    budget=handler(),
    epsilon=4.0,
    instruction="Write a customer message for the queue.",
    example_prompt=PromptTemplate.from_template("Ticket: {text}\nQueue: {queue}"),
    suffix="Ticket: {input}\nQueue:",
    shots_per_label=1,
    max_tokens=6,
    rows=Rows(units=20),
    decoding=Decoding(candidates=20),
)
stock: PromptTemplate = prompt.to_stock()
answer: str = (stock | EmbeddedLLM(max_tokens=2) | StrOutputParser()).invoke({"input": "my card?"})
print("constructor" in dumps(stock), stock.format(input="x"), "->", answer)
