"""Private evolution: the model sees no record."""

from langchain_dpicl import EmbeddedLLM, GenerationTask, PrivateEvolution, PrivateExamples
from langchain_dpicl.options import Evolution
from tests.programs.common import TICKETS, handler

run = PrivateEvolution.from_private_examples(
    PrivateExamples([t["text"] for t in TICKETS], public_size=300, dataset_id="p08"),
    llm=EmbeddedLLM(temperature=1.0),
    budget=handler(),
    epsilon=4.0,
    task=GenerationTask("Write a customer message.", hints=("Be brief.",)),
    shots_per_label=2,
    max_tokens=8,
    evolution=Evolution(
        rounds=1, num_variations=0, candidates=("a card payment was declined", "a boat", "transfer failed")
    ),
)
print(run.run(progress=False).examples)
