"""Cells of the methods that vote: labels per query (Panda et al.), and PromptPATE (Duan et al.)."""

from __future__ import annotations

from typing import Any

from _pate_runs import Students, Teaching, best_private_prompt_without_privacy, teach
from _tables_cells import INSTRUCTION, NON_PRIVATE, ZERO, Cell
from _tables_files import DataFile, labelled, labelled_setting
from _tables_room import Knobs, Result, Room, delta_of, epsilon_of, frozen, in_front
from _voting_rows import ALL_CONTENT_FREE, Method, Voters, clean_hits, noisy_accuracies
from _voting_task import Task

from langchain_dpicl.pate.plan import LabellingPlan
from langchain_dpicl.planning.expected_utility import noise_deviation
from langchain_dpicl.runs.query_plan import QueryPlan

VOTING_KNOBS: dict[str, Any] = {
    "questions": 300,
    "cap": 8_000,
    "num_slots": 10,
    "shots": 4,
    "mechanism": "gaussian",
    "overfill": 1.0,
    "queries": 10_000,
    "draws": 50,
    "content_free": 0,
    "longest_match": None,
}
"""The setting of Panda et al.: 10 slots of 4 shots, 10,000 declared queries, at most 8,000 records. content_free: how
many inputs without content calibrate each row; 0: rows are not calibrated."""

PATE_KNOBS: dict[str, Any] = {
    "questions": 300,
    "cap": 50_000,
    "inputs": 200,
    "teachers": 200,
    "shots": 4,
    "student_shots": 4,
    "candidates": 50,
    "validation": 100,
    "upper_candidates": 200,
    "content_free": 1,
    "longest_match": None,
}
"""Fresh teachers per input, noise for the epsilon of the column; a student of four labelled inputs. content_free: how
many inputs without content calibrate teachers of one record and zero-shot."""


def voting(room: Room, cell: Cell, knobs: Knobs) -> Result:
    """Measures labels per query."""
    task = _voting_task(room, cell, knobs)
    engine = room.engines.of(knobs["longest_match"])
    if cell.at == INSTRUCTION:
        asked = Voters(in_front(task, room.file.instruction), engine, progress=_silent)
        return {"accuracy": float(asked.zero_shot(calibrate=False).mean())}
    key = ("voters", *frozen(knobs, "questions", "cap", "content_free", "longest_match"))
    content_free = ALL_CONTENT_FREE[: knobs["content_free"]]
    terms: dict[str, Any] = {"content_free": content_free} if content_free else {}
    voters = room.once(key, lambda: Voters(task, engine, progress=_silent, **terms))
    if cell.at == ZERO:
        return {
            "accuracy": float(voters.zero_shot(calibrate=False).mean()),
            "calibrated": float(voters.zero_shot(calibrate=True).mean()),
        }
    plan = voting_plan(room, task, knobs, epsilon=epsilon_of(cell))
    matrices = voters.matrices(plan.design, calibrate=bool(content_free))
    if cell.at == NON_PRIVATE:
        return {"accuracy": float(clean_hits(plan, matrices, task.right).mean())}
    found = noisy_accuracies(plan, matrices, task.right, draws=knobs["draws"])
    return {
        "accuracy": float(found.mean()),
        "sd_of_noise": float(found.std()),
        "noise_in_votes": noise_deviation(plan.release),
        "sampling_rate": plan.release.sampler.sampling_rate,
    }


def voting_plan(room: Room, task: Task, knobs: Knobs, *, epsilon: float) -> QueryPlan:
    """Returns the noise of a setting."""
    method = Method(knobs["num_slots"], knobs["shots"], knobs["mechanism"], overfill=knobs["overfill"])
    size = len(task.records)
    terms = {"delta": delta_of(size), "max_queries": knobs["queries"], "adjacency": "add_remove"}
    key = ("voting", method, size, len(task.labels), epsilon, knobs["queries"])
    return room.plan(key, lambda: method.plan(task, epsilon=epsilon, **terms))


def voting_cost_plan(room: Room, file: DataFile, knobs: Knobs) -> QueryPlan:
    """Returns a plan to count calls by: they are the same at every epsilon."""
    task = labelled(file, questions=1, seed=0, cap=knobs["cap"])
    return voting_plan(room, task, knobs, epsilon=4.0)


def _voting_task(room: Room, cell: Cell, knobs: Knobs) -> Task:
    terms = {"questions": knobs["questions"], "cap": knobs["cap"], "seed": cell.seed}
    return room.once(("labelled", *terms.values()), lambda: labelled(room.file, **terms))


def _silent(items: Any, desc: str) -> Any:
    del desc
    return items


def pate(room: Room, cell: Cell, knobs: Knobs) -> Result:
    """Measures a student of privately labelled inputs.

    Where too few labels of a pool are left to choose a student, the accuracy is that of zero-shot: what one would use.
    """
    terms = {"questions": knobs["questions"], "cap": knobs["cap"], "seed": cell.seed}
    found = room.once(("setting", *terms.values()), lambda: labelled_setting(room.file, **terms))
    engine, shots = room.engines.of(knobs["longest_match"]), knobs["student_shots"]
    content_free = ALL_CONTENT_FREE[: knobs["content_free"]]
    if cell.at == INSTRUCTION:
        asked = Students(in_front(found.task, room.file.instruction), engine, content_free)
        return {"accuracy": float(asked.hits((), shots=shots).mean())}
    students = Students(found.task, engine, content_free)
    if cell.at == ZERO:
        return {"accuracy": float(students.hits((), shots=shots).mean())}
    if cell.at == NON_PRIVATE:
        terms = {"candidates": knobs["upper_candidates"], "validation": knobs["validation"], "seed": cell.seed}
        return {"accuracy": float(best_private_prompt_without_privacy(students, shots=shots, **terms).mean())}
    inputs = found.inputs(knobs["inputs"], seed=cell.seed)
    size = len(inputs.private)
    taught = teach(
        Teaching("fresh", knobs["shots"], epsilon=epsilon_of(cell)),
        found.task,
        inputs,
        engine,
        num_teachers=min(knobs["teachers"], size // knobs["shots"]),
        delta=delta_of(size),
        abstain_below=None,
        content_free=content_free,
        progress=False,
    )
    search = {"num_candidates": knobs["candidates"], "num_validation": knobs["validation"], "seed": cell.seed}
    hits = students.of_pool(taught.pool, shots=shots, **search)
    is_without = hits is None
    hits = students.hits((), shots=shots) if hits is None else hits
    right = taught.label_accuracy()
    return {
        "accuracy": float(hits.mean()),
        "no_student": float(is_without),
        "epsilon": taught.pool.epsilon,
        **({} if right is None else {"labels_right": right}),
    }


def pate_cost_plan(file: DataFile, knobs: Knobs) -> LabellingPlan:
    """Returns a plan to count calls by."""
    found = labelled(file, questions=1, seed=0, cap=knobs["cap"])
    size = len(found.records)
    return Teaching("fresh", knobs["shots"], epsilon=4.0).plan(
        size,
        num_teachers=min(knobs["teachers"], size // knobs["shots"]),
        max_queries=knobs["inputs"],
        width=len(found.labels),
        delta=delta_of(size),
    )
