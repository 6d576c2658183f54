"""The PromptPATE benchmark's measurements: labels, students, and what both are compared with.

Labels come from the package's own `PromptPATELabeler`, each run on a budget of its own. What protects nothing is called
so, and reads records from holders that no ledger ever sees.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from _pate_task import Inputs, holder
from _voting_rows import CONTENT_FREE
from _voting_task import Task
from numpy.typing import NDArray

from langchain_dpicl import (
    Budget,
    FewShotTask,
    LabelAnswers,
    LabelledPool,
    Noise,
    PromptPATEExampleSelector,
    PromptPATELabeler,
    Rows,
)
from langchain_dpicl.backends.sync_async import run_sync
from langchain_dpicl.baselines import label_votes_without_privacy
from langchain_dpicl.options import Student
from langchain_dpicl.pate.plan import LabellingPlan, plan_labelling
from langchain_dpicl.planning.expected_utility import RowDesign
from langchain_dpicl.privacy._validate import Adjacency
from langchain_dpicl.privacy.extensions.registry import Teachers
from langchain_dpicl.privacy.mechanisms.bounded import VoteSum
from langchain_dpicl.runs.query_plan import expected_rows
from langchain_dpicl.tasks import VotingTask, reader_of

Hits = NDArray[np.bool_]


@dataclass(frozen=True)
class Teaching:
    """One row of a table: who teaches, and with how much noise.

    Attributes:
      teachers: "fresh", "one_sample" or "fixed".
      shots: records of a teacher.
      noise: standard deviation in votes; None: what `epsilon` needs.
      epsilon: of all labels; None: what `noise` costs.
    """

    teachers: Teachers
    shots: int
    noise: float | None = None
    epsilon: float | None = None

    @property
    def name(self) -> str:
        """What the table shows."""
        terms = f"sigma {self.noise:g}" if self.epsilon is None else f"eps {self.epsilon:g}"
        return f"{self.teachers} {self.shots}-shot, {terms}"

    @property
    def adjacency(self) -> Adjacency:
        """The neighbouring relation that these teachers are meant for."""
        return "replace_one" if self.teachers == "fixed" else "add_remove"

    def design(self, num_teachers: int) -> RowDesign:
        """Returns the shape of the teachers; a slot expects as many records as it shows."""
        sampling = "partition" if self.teachers == "fixed" else "poisson"
        return RowDesign.choose(num_slots=num_teachers, shots_per_slot=self.shots, sampling=sampling, overfill=1.0)

    def rows(self, num_teachers: int) -> Rows:
        """Returns the same shape as the option of a labeler."""
        if self.teachers == "fixed":
            return Rows(slots=num_teachers, shots=self.shots, sampling="partition")
        redraw = "run" if self.teachers == "one_sample" else None
        if self.shots == 1:
            return Rows(units=num_teachers, redraw_every=redraw)
        return Rows(slots=num_teachers, shots=self.shots, fill=1.0, redraw_every=redraw)

    def plan(self, size: int, *, num_teachers: int, max_queries: int, width: int, delta: float) -> LabellingPlan:
        """Returns noise and price for so many declared records."""
        design = self.design(num_teachers)
        votes = VoteSum().sensitivity(row_shape=design.rows, adjacency=self.adjacency).require("l2")
        return plan_labelling(
            size,
            epsilon=self.epsilon,
            noise_multiplier=None if self.noise is None else self.noise / votes,
            delta=delta,
            max_queries=max_queries,
            width=width,
            teachers=self.teachers,
            adjacency=self.adjacency,
            mechanism="gaussian",
            design=design,
        )


@dataclass(frozen=True)
class Taught:
    """What a run of the labeler released.

    Attributes:
      pool: the inputs with their labels and noisy votes.
      plan: what the run was planned as.
      truths: place of the right label per entry; None where nobody knows.
    """

    pool: LabelledPool
    plan: LabellingPlan
    truths: tuple[int | None, ...]

    @property
    def num_teachers(self) -> float:
        """Expected number of teachers of an input."""
        return expected_rows(self.plan.design, self.plan.public_size)

    @property
    def consensus(self) -> NDArray[np.float64]:
        """float64[entries]: the largest noisy votes as a share of the teachers: released, hence public."""
        return np.array([max((entry.votes or {}).values(), default=0.0) for entry in self.pool.entries]) / (
            self.num_teachers
        )

    def rejected(self, share: float) -> float:
        """Returns the share of inputs that a threshold at this share of the teachers rejects: post-processing."""
        return float((self.consensus < share).mean())

    def label_accuracy(self, share: float = 0.0) -> float | None:
        """Returns the share of right labels among those that a threshold keeps; None where no truth is known."""
        places = {label: place for place, label in enumerate(self.pool.labels)}
        right = [
            places[entry.label] == truth
            for entry, truth, votes in zip(self.pool.entries, self.truths, self.consensus, strict=True)
            if truth is not None and entry.label is not None and votes >= share
        ]
        return float(np.mean(right)) if right else None

    def first(self, count: int) -> LabelledPool:
        """Returns the pool of the first inputs alone."""
        return replace(self.pool, entries=self.pool.entries[:count])


def teach(
    teaching: Teaching,
    task: Task,
    inputs: Inputs,
    engine: Any,
    *,
    num_teachers: int,
    delta: float,
    abstain_below: float | None,
    text_votes: bool = False,
    content_free: tuple[str, ...] = CONTENT_FREE,
    progress: bool | None = None,
) -> Taught:
    """Labels the inputs by private teachers, on a budget in memory that is exactly what they cost."""
    size = len(inputs.private)
    # What a teacher writes may be no label: such votes count for one more.
    width = len(task.labels) + text_votes
    plan = teaching.plan(size, num_teachers=num_teachers, max_queries=len(inputs.texts), width=width, delta=delta)
    votes: dict[str, Any] = {"votes": "text"} if text_votes else {"content_free": content_free}
    labeler = PromptPATELabeler.from_private_examples(
        holder(task, inputs.private, dataset_id="benchmark"),
        llm=engine,
        public_inputs=inputs.texts,
        budget=Budget(epsilon=plan.epsilon, delta=delta, adjacency=teaching.adjacency),
        epsilon=plan.epsilon,
        task=FewShotTask(
            task.wording.example_prompt,
            task.wording.suffix,
            verbalizers=dict(zip(task.labels, task.texts, strict=True)),
        ),
        rows=teaching.rows(num_teachers),
        noise=Noise("gaussian", multiplier=plan.noise_multiplier),
        answers=LabelAnswers(abstain_below="never" if abstain_below is None else abstain_below, **votes),
    )
    return Taught(labeler.run(progress=progress), labeler.plan, inputs.truths)


def asked(task: Task) -> dict[str, Any]:
    """Returns the wording of a task as options."""
    return {
        "example_prompt": task.wording.example_prompt,
        "suffix": task.wording.suffix,
        "verbalizers": dict(zip(task.labels, task.texts, strict=True)),
        "content_free": CONTENT_FREE,
    }


class Students:
    """Prompts of public text (or of records that nothing protects), asked with one model."""

    def __init__(self, task: Task, engine: Any, content_free: tuple[str, ...] = CONTENT_FREE) -> None:
        self.task = task
        self.engine = engine
        own = dict(zip(task.labels, task.texts, strict=True))
        self._voting = VotingTask(task.labels, own, task.wording, "hard", content_free)

    def answers(self, records: Sequence[Mapping[str, str]], texts: Sequence[str], *, shots: int) -> NDArray[np.int64]:
        """Returns int64[texts]: the labels' places after these demonstrations; -1 where the model names none.

        Args:
          records: the demonstrations; none: zero-shot.
          texts: what is asked.
          shots: how many demonstrations it is for: the package calibrates prompts of one.
        """
        voting, scorer, _ = reader_of(self.engine, self._voting, is_wanted=False if shots > 1 else None)
        prompts = [self.task.wording.renderer(voting.queries((text,)))(records) for text in texts]
        rows = run_sync(_walk(scorer.request_public_rows(prompts)))
        return np.where(rows.any(axis=1), rows.argmax(axis=1), -1)

    def hits(self, records: Sequence[Mapping[str, str]], *, shots: int) -> Hits:
        """Returns bool[questions]: whether the answer is right."""
        return self.answers(records, self.task.questions, shots=shots) == self.task.right

    def of_pool(self, pool: LabelledPool, *, shots: int, **numbers: int) -> Hits | None:
        """Returns the hits of the best prompt of a pool, chosen by the package; None: too few labels to choose."""
        selector = PromptPATEExampleSelector(pool)
        if len(selector.examples) < 2:
            return None
        choice = selector.choose_student(Student(llm=self.engine, shots=shots, **numbers), progress=False)
        chosen = [pool.entries[place] for place in choice.demonstrations]
        return self.hits([{**entry.fields, "label": str(entry.label)} for entry in chosen], shots=shots)


def _walk(question: Any) -> Any:
    return (yield question)


def best_private_prompt_without_privacy(
    students: Students, *, shots: int, candidates: int, validation: int, seed: int
) -> Hits:
    """Returns the hits of the best of many prompts of REAL RECORDS: the upper bound, which protects nobody.

    Each prompt takes labels in turns, as those of students do; the best has the most right on other records.
    """
    coins = random.Random(f"upper bound {seed}")
    records = coins.sample(students.task.records, len(students.task.records))
    held, free = records[:validation], records[validation:]
    truths = np.array([students.task.labels.index(record["label"]) for record in held])
    texts = [record["text"] for record in held]
    if {record["label"] for record in free} != set(students.task.labels):
        raise SystemExit(
            f"{students.task.title}: expected records of every label beside the {len(held)} that are held back, found "
            f"{len(free)}: ask for less --validation, or give more records"
        )
    drawn = [_in_turns(free, students.task.labels, shots, coins) for _ in range(candidates)]
    best = max(drawn, key=lambda records: int((students.answers(records, texts, shots=shots) == truths).sum()))
    return students.hits(best, shots=shots)


def _in_turns(
    records: Sequence[Mapping[str, str]], labels: Sequence[str], shots: int, coins: random.Random
) -> list[Mapping[str, str]]:
    """Draws records of different labels while there are labels left, then again, in a drawn order."""
    order = coins.sample(labels, len(labels))
    wanted = [order[turn % len(order)] for turn in range(shots)]
    pool = {label: [record for record in records if record["label"] == label] for label in set(wanted)}
    return [coins.choice(pool[label]) for label in coins.sample(wanted, shots)]


def ensemble_without_privacy(task: Task, engine: Any, *, num_teachers: int, shots: int, questions: int) -> float:
    """Returns the accuracy of private votes WITHOUT NOISE on evenly chosen questions: nothing is protected."""
    places = [place * len(task.questions) // questions for place in range(min(questions, len(task.questions)))]
    found = label_votes_without_privacy(
        holder(task, task.records, dataset_id="benchmark-without-privacy"),
        [task.questions[place] for place in places],
        llm=engine,
        task=FewShotTask(
            task.wording.example_prompt,
            task.wording.suffix,
            verbalizers=dict(zip(task.labels, task.texts, strict=True)),
        ),
        rows=Rows(slots=num_teachers, shots=shots, fill=1.0) if shots > 1 else Rows(units=num_teachers),
        answers=LabelAnswers(content_free=CONTENT_FREE),
    )
    return float((found.totals.argmax(axis=1) == task.right[places]).mean())
