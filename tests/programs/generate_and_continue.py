"""A long generation: stream, stop, go on; the error carries the run, whatever the method."""

from typing import Any

from langchain_dpicl import Decoding, DemonstrationSynthesizer, EmbeddedLLM, GenerationTask, Rows, RunInterruptedError
from langchain_dpicl.runs.release_run import ReleaseRun
from tests.programs.common import examples, handler


def finish(run: ReleaseRun[Any, Any]) -> Any:
    """Works for generation, documents, evolution, labelling, training and counts alike."""
    try:
        return run.run(progress=False)
    except RunInterruptedError as error:
        return error.run.result


run = DemonstrationSynthesizer.from_private_examples(
    examples("p04"),
    llm=EmbeddedLLM(),
    budget=handler(),
    epsilon=4.0,
    max_tokens=5,
    shots_per_label=2,
    task=GenerationTask("Write a customer message.", "{queue}: {text}"),
    rows=Rows(slots=10, shots=2, redraw_every="run"),
    decoding=Decoding(candidates=30),
)
first = next(iter(run.stream(progress=False)))
print(first["queue"], run.is_finished, len(run.result.examples))
released = finish(run)
print(run.is_finished, len(released.examples), run.report["epsilon"])
