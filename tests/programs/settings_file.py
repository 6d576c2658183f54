"""The same task as a file: `dpicl generate --config task.toml` reads it with these lines."""

import tomllib
from typing import Any

from langchain_dpicl import Decoding, DemonstrationSynthesizer, EmbeddedLLM, GenerationTask, Noise, Rows
from tests.programs.common import examples, handler

TASK = """
epsilon = 4.0
shots_per_label = 1
max_tokens = 4
noise = "gumbel"
[task]
instruction = "Write a customer message."
[rows]
slots = 10
shots = 2
[decoding]
candidates = 20
stop = ["\\n"]
"""
found: dict[str, Any] = tomllib.loads(TASK)
run = DemonstrationSynthesizer.from_private_examples(
    examples("p09"),
    llm=EmbeddedLLM(),
    budget=handler(),
    epsilon=found["epsilon"],
    shots_per_label=found["shots_per_label"],
    max_tokens=found["max_tokens"],
    noise=Noise(found["noise"]),
    task=GenerationTask.from_dict(found["task"]),
    rows=Rows.from_dict(found["rows"]),
    decoding=Decoding.from_dict(found["decoding"]),
)
print(run.run(progress=False).examples)
