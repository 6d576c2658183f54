"""Cells of answers in free form, by their embeddings (Wu et al.): what a text names, as one of its spans.

Rows, sums and noise are the package's own, as they run for `DPFreeFormRunnable`; only the ledger is left out, because
what is measured is never released.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from _tables_cells import INSTRUCTION, NON_PRIVATE, ZERO, Cell
from _tables_files import DataFile, SlotTask, normal, slot_task, spans
from _tables_room import Knobs, Result, Room, delta_of, epsilon_of, frozen, in_front
from _tables_texts import scored
from _voting_rows import Copied
from langchain_core.embeddings import Embeddings
from numpy.typing import NDArray

from langchain_dpicl.backends.private_calls.embeddings import SilentEmbeddings
from langchain_dpicl.backends.resolve import as_text_backend
from langchain_dpicl.backends.rows.answer_rows import AnswerRows
from langchain_dpicl.backends.sync_async import run_sync
from langchain_dpicl.baselines import release_once_without_privacy
from langchain_dpicl.free_form import cosines
from langchain_dpicl.planning.expected_utility import RowDesign
from langchain_dpicl.privacy.extensions.normalized_sums import UnitVectorSum
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.runs.query_plan import QueryPlan, plan_queries

FREE_KNOBS: dict[str, Any] = {
    "questions": 1_000,
    "cap": 50_000,
    "num_slots": 40,
    "shots": 4,
    "queries": 100,
    "answer_tokens": 6,
    "dimensions": 64,
    "longest_match": None,
}
"""40 slots of 4 shots, 100 declared queries, as many as in Wu et al.; candidates are the spans of up to three words of
the question."""


class WordEmbeddings(Embeddings):
    """Public, offline embeddings: a text is the sum of fixed directions of its words, drawn by their hash.

    Args:
      dimensions: of a vector.
    """

    def __init__(self, dimensions: int) -> None:
        self.dimensions = dimensions

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Returns a vector per text; zeros for no word."""
        return [self._vector(text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        """Returns the vector of a text."""
        return self._vector(text)

    def _vector(self, text: str) -> list[float]:
        total = np.zeros(self.dimensions)
        for word in normal(text).split():
            digest = hashlib.shake_128(word.encode()).digest(self.dimensions)
            total += np.where(np.frombuffer(digest, np.uint8) >= 128, 1.0, -1.0)
        vector: list[float] = total.tolist()
        return vector


class FreeForm:
    """Vectors of private answers, drawn once per question, and the answers that follow.

    Args:
      task: the data.
      engine: the model.
      knobs: of the cells.
    """

    def __init__(self, task: SlotTask, engine: Any, knobs: Knobs) -> None:
        self.task, self.knobs = task, knobs
        self._text = as_text_backend(engine)
        self._embeddings = WordEmbeddings(knobs["dimensions"])
        silent = SilentEmbeddings(self._embeddings)
        self._source = AnswerRows.embedded(self._text, silent, max_tokens=knobs["answer_tokens"], stop=("\n",))
        self._private = task.private()
        self._spans = [spans(text) for text in task.questions]
        self._matrices: list[NDArray[np.float64]] = []

    def zero_shot(self, task: SlotTask) -> Result:
        """Returns how the model does alone: its own answer's nearest span."""
        prompts = [task.wording.renderer([(text,)])(())[0] for text in task.questions]
        answers = self._text.complete(prompts, max_tokens=self.knobs["answer_tokens"], stop=("\n",))
        return self._score(self._vectors(answers))

    def without_noise(self, plan: QueryPlan) -> Result:
        """Returns the nearest spans to the sums themselves: NOT PRIVATE."""
        sums = [plan.release.bound(rows, width=self.width).value for rows in self._drawn(plan)]
        return self._score(np.array(sums))

    def private(self, plan: QueryPlan) -> Result:
        """Returns the nearest spans to noisy sums."""
        totals = [plan.release.bound(rows, width=self.width) for rows in self._drawn(plan)]
        released = [plan.release.mechanism.release(total, rng=SYSTEM_RANDOM).values for total in totals]
        return self._score(np.array(released, dtype=np.float64))

    @property
    def width(self) -> int:
        """Numbers of a vector."""
        return self._source.width

    def _drawn(self, plan: QueryPlan) -> list[NDArray[np.float64]]:
        """Returns the rows of a fresh secret sample per question; drawn the first time."""
        if not self._matrices:
            for text in self.task.questions:
                kept: list[NDArray[np.float64]] = []
                prompts = self.task.wording.renderer([(text,)])
                walk = release_once_without_privacy(
                    self._private,
                    plan=plan.release,
                    rows=lambda asked, kept=kept: Copied(self._source.ask(asked), kept),  # type: ignore[misc]
                    render=lambda records, prompts=prompts: prompts(records)[0],  # type: ignore[misc]
                    width=self.width,
                )
                run_sync(walk)
                self._matrices.append(kept[0])
        return self._matrices

    def _vectors(self, texts: list[str]) -> NDArray[np.float64]:
        return np.array(self._embeddings.embed_documents(texts), dtype=np.float64)

    def _score(self, vectors: NDArray[np.float64]) -> Result:
        answers = [
            choices[int(cosines(vector, self._vectors(choices)).argmax())]
            for vector, choices in zip(vectors, self._spans, strict=True)
        ]
        return scored(answers, self.task)


def free_form(room: Room, cell: Cell, knobs: Knobs) -> Result:
    """Measures answers in free form."""
    terms = {"questions": knobs["questions"], "cap": knobs["cap"], "seed": cell.seed}
    task = room.once(("slots", *terms.values()), lambda: slot_task(room.file, **terms))
    engine = room.engines.of(knobs["longest_match"])
    key = ("free form", *frozen(knobs, *sorted(set(knobs) - {"queries"})))
    bench = room.once(key, lambda: FreeForm(task, engine, knobs))
    if cell.at in {ZERO, INSTRUCTION}:
        return bench.zero_shot(task if cell.at == ZERO else in_front(task, room.file.instruction))
    plan = free_plan(room, len(task.records), knobs, epsilon=epsilon_of(cell))
    return bench.without_noise(plan) if cell.at == NON_PRIVATE else bench.private(plan)


def free_plan(room: Room, size: int, knobs: Knobs, *, epsilon: float) -> QueryPlan:
    """Returns the noise of a setting."""
    key = ("free form", size, epsilon, *frozen(knobs, "num_slots", "shots", "queries", "dimensions"))
    return room.plan(
        key,
        lambda: plan_queries(
            size,
            epsilon=epsilon,
            delta=delta_of(size),
            max_queries=knobs["queries"],
            width=knobs["dimensions"],
            aggregation=UnitVectorSum(),
            mechanism="gaussian",
            design=RowDesign.choose(num_slots=knobs["num_slots"], shots_per_slot=knobs["shots"]),
        ),
    )


def free_cost_plan(room: Room, file: DataFile, knobs: Knobs) -> QueryPlan:
    """Returns a plan to count calls by."""
    return free_plan(room, min(file.train, knobs["cap"]), knobs, epsilon=4.0)
