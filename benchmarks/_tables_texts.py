"""Cells of generated demonstrations: of labelled texts, and of texts with a slot (Tang et al.)."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import bench_trec
from _tables_cells import INSTRUCTION, NOISELESS, NON_PRIVATE, ZERO, Cell
from _tables_files import DataFile, SlotTask, exact, generation_task, labelled, overlap, slot_task
from _tables_room import Knobs, Result, Room, delta_of, epsilon_of, in_front

from langchain_dpicl import (
    Budget,
    Decoding,
    DemonstrationSynthesizer,
    GenerationTask,
    ReleasedDemonstrations,
    Rows,
)
from langchain_dpicl.backends.resolve import as_text_backend
from langchain_dpicl.baselines import (
    demonstrations_from_instruction,
    demonstrations_without_privacy,
    real_demonstrations_without_privacy,
)
from langchain_dpicl.generation.plan import GenerationPlan, Segment, plan_generation
from langchain_dpicl.options import OpenLabel
from langchain_dpicl.planning.expected_utility import RowDesign

TEXT_KNOBS: dict[str, Any] = {
    "questions": 1_000,
    "cap": 50_000,
    "min_size": 100,
    "shots": 4,
    "max_tokens": 15,
    "num_slots": 80,
    "shots_per_slot": 1,
    "mechanism": "gumbel",
    "redraw_every": 1,
    "public_top_k": 100,
    "longest_match": None,
}
"""Tang's rows on TREC (80 of one record, 15 tokens, a fresh sample per token) for data sets that are not theirs."""
TEXT_OWN: dict[str, dict[str, Any]] = {
    "trec": {"mechanism": "gaussian", "public_top_k": None},
    "agnews": {"mechanism": "gaussian", "num_slots": 10, "shots_per_slot": 2, "max_tokens": 100},
    "dbpedia": {"mechanism": "gaussian", "num_slots": 40, "shots_per_slot": 2, "max_tokens": 100},
}
"""What Tang et al. (table 9) set for their data sets; None: every token is a candidate."""

SLOT_KNOBS: dict[str, Any] = {
    "questions": 1_000,
    "cap": 50_000,
    "shots": 4,
    "max_tokens": 20,
    "max_label_tokens": 5,
    "num_slots": 20,
    "shots_per_slot": 4,
    "mechanism": "gumbel",
    "redraw_every": 1,
    "public_top_k": 100,
    "answer_tokens": 8,
    "longest_match": None,
}
"""Tang's MIT setting (20 slots of 4 shots, 20 tokens), but the slot is written under the mechanism, too."""


_VOCABULARY = 8_192
"""Candidates that a plan counts calls by where every token is one; calls do not depend on it."""


class Generation(bench_trec.Bench):
    """The benchmark of demonstrations with a cell's knobs.

    Args:
      task: the data.
      engine: the model.
      knobs: of the cell.
      instruction: what stands first in every prompt.
    """

    def __init__(self, task: bench_trec.Task, engine: Any, knobs: Knobs, *, instruction: str) -> None:
        delta = delta_of(sum(task.sizes.values()))
        told = {"delta": delta, "instruction": instruction, "max_tokens": knobs["max_tokens"], "rows": None}
        super().__init__(task, SimpleNamespace(**told, **_shape(knobs)))  # type: ignore[arg-type]
        self.model = engine
        self.common = {**self.common, "llm": engine, "decoding": Decoding(candidates=knobs["public_top_k"] or "all")}
        self.rows = self.rows.replace(redraw_every=knobs["redraw_every"])
        self.knobs = knobs

    def released(self, at: str, epsilon: float) -> ReleasedDemonstrations | None:
        """Returns the demonstrations of a column."""
        shots = self.knobs["shots"]
        if at == ZERO:
            return None
        if at == INSTRUCTION:
            public = {"label_key": "label_name", "labels": self.task.labels, "shots_per_label": shots}
            return demonstrations_from_instruction(**self.common, **public)
        if at == NOISELESS:
            return demonstrations_without_privacy(self.private(), shots_per_label=shots, rows=self.rows, **self.common)
        if at == NON_PRIVATE:
            return real_demonstrations_without_privacy(self.private(), shots_per_label=shots)
        return DemonstrationSynthesizer.from_private_examples(
            self.private(),
            budget=Budget(epsilon=epsilon, delta=self.delta),
            epsilon=epsilon,
            shots_per_label=shots,
            rows=self.rows,
            noise=self.knobs["mechanism"],
            **self.common,
        ).run(progress=False)


def generation(room: Room, cell: Cell, knobs: Knobs) -> Result:
    """Measures demonstrations of labelled texts; "accuracy" is calibrated, as in the paper."""
    bench = room.once(("generation", str(knobs)), lambda: _bench(room, cell, knobs))
    epsilon = 0.0 if cell.epsilon is None else cell.epsilon
    released = bench.released(cell.at, epsilon)
    if released is not None:
        released = dataclasses.replace(released, examples=tuple(in_order(released.examples, cell.seed)))
    raw, calibrated = bench.accuracy(released)
    return {"accuracy": calibrated, "raw": raw}


def in_order(examples: Sequence[Mapping[str, str]], seed: int) -> list[dict[str, str]]:
    """Returns demonstrations in the order that a public seed draws."""
    return [dict(one) for one in random.Random(f"order {seed}").sample(list(examples), len(examples))]


def _bench(room: Room, cell: Cell, knobs: Knobs) -> Generation:
    task = labelled(room.file, questions=knobs["questions"], seed=cell.seed, cap=knobs["cap"])
    sized = generation_task(task, min_size=knobs["min_size"])
    return Generation(sized, room.engines.of(knobs["longest_match"]), knobs, instruction=room.file.instruction)


def _shape(knobs: Knobs) -> dict[str, Any]:
    return {"num_slots": knobs["num_slots"], "shots_per_slot": knobs["shots_per_slot"]}


def generation_cost_plan(file: DataFile, knobs: Knobs) -> GenerationPlan:
    """Returns a plan to count calls by."""
    task = generation_task(labelled(file, questions=1, seed=0, cap=knobs["cap"]), min_size=knobs["min_size"])
    return _priced(task.sizes, knobs, (Segment("text", knobs["max_tokens"]),))


def _priced(sizes: Mapping[str | None, int] | Mapping[str, int], knobs: Knobs, segments: Any) -> GenerationPlan:
    return plan_generation(
        dict(sizes),
        epsilon=4.0,
        delta=delta_of(sum(sizes.values())),
        mechanism=knobs["mechanism"],
        design=RowDesign.choose(**_shape(knobs)),
        redraw_every=knobs["redraw_every"],
        shots_per_label=knobs["shots"],
        segments=segments,
        candidates=(knobs["public_top_k"] or _VOCABULARY) + 1,
    )


# -- slots -------------------------------------------------------------------------------------------------------


def slots(room: Room, cell: Cell, knobs: Knobs) -> Result:
    """Measures demonstrations of texts with a slot: the share of answers that are exactly what was to be found."""
    terms = {"questions": knobs["questions"], "cap": knobs["cap"], "seed": cell.seed}
    plain = room.once(("slots", *terms.values()), lambda: slot_task(room.file, **terms))
    task: SlotTask = in_front(plain, room.file.instruction)
    engine = room.engines.of(knobs["longest_match"])
    examples: list[dict[str, str]] = []
    if cell.at == NON_PRIVATE:
        examples = random.Random(f"real {cell.seed}").sample(task.records, min(knobs["shots"], len(task.records)))
    elif cell.at != ZERO:
        examples = in_order(written_slots(task, engine, knobs, room.file.instruction, cell).examples, cell.seed)
    render = [task.wording.renderer([(text,)]) for text in task.questions]
    prompts = [one(examples)[0] for one in render]
    answers = as_text_backend(engine).complete(prompts, max_tokens=knobs["answer_tokens"], stop=("\n",))
    return scored(answers, task)


def scored(answers: Sequence[str], task: SlotTask) -> Result:
    """Returns the share of exact answers, and the mean F1 of words."""
    pairs = list(zip(answers, task.right, strict=True))
    return {
        "accuracy": sum(exact(*pair) for pair in pairs) / len(pairs),
        "overlap": sum(overlap(*pair) for pair in pairs) / len(pairs),
    }


def written_slots(task: SlotTask, engine: Any, knobs: Knobs, instruction: str, cell: Cell) -> ReleasedDemonstrations:
    """Returns private demonstrations, the slot written first; no slot of a record is ever copied."""
    size, epsilon = len(task.records), epsilon_of(cell)
    private = task.private()
    label, text = (part.split(":")[0] for part in reversed(task.wording.example_prompt.split("\n")))
    return DemonstrationSynthesizer.from_private_examples(
        private,
        llm=engine,
        budget=Budget(epsilon=epsilon, delta=delta_of(size)),
        epsilon=epsilon,
        instruction=instruction,
        task=GenerationTask(
            record_prompt=f"{label}: {{slot}}\n{text}: {{text}}",
            open_label=OpenLabel("slot", max_tokens=knobs["max_label_tokens"]),
        ),
        shots_per_label=knobs["shots"],
        max_tokens=knobs["max_tokens"],
        noise=knobs["mechanism"],
        rows=Rows(slots=knobs["num_slots"], shots=knobs["shots_per_slot"], redraw_every=knobs["redraw_every"]),
        decoding=Decoding(candidates=knobs["public_top_k"] or "all"),
    ).run(progress=False)


def slots_cost_plan(file: DataFile, knobs: Knobs) -> GenerationPlan:
    """Returns a plan to count calls by."""
    size = min(file.train, knobs["cap"])
    segments = (Segment("label", knobs["max_label_tokens"]), Segment("text", knobs["max_tokens"]))
    return _priced({None: size}, knobs, segments)
