"""Plans: the processor's time of one, in the process that has imported what plans need, cold and warm."""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from _speed_goals import Goal

from langchain_dpicl.generation.plan import plan_generation, signal_of
from langchain_dpicl.pate.plan import plan_labelling
from langchain_dpicl.rehearsal import Rehearsal, propose_rows
from langchain_dpicl.rehearsal.rehearsal import RehearsedShape
from langchain_dpicl.retrieval import plan_retrieval
from langchain_dpicl.runs.query_plan import plan_queries

LIMIT = 100.0
"""Milliseconds of the processor."""
REPEATS = 5
_DELTA = 1e-6


def rehearsed(labels: int, seed: int) -> Rehearsal:
    """Returns a made-up rehearsal of 60 questions: rows of 1, 2, 4 and 8 examples, read in two ways."""
    rng = np.random.default_rng(seed)
    gold = rng.integers(labels, size=60)
    likely, shapes = rng.beta(1.2, 1.0, size=60), list[RehearsedShape]()
    for calibrated in (False, True):
        for shots, deals in ((0, (0,)), *((count, (0, 0, 1, 1)) for count in (1, 2, 4, 8))):
            right = rng.random((60, len(deals))) < np.clip(likely + 0.04 * np.log2(max(shots, 1)), 0, 1)[:, None]
            wrong = (gold[:, None] + rng.integers(1, labels, size=right.shape)) % labels
            votes = np.where(right, gold[:, None], wrong)
            shapes.append(RehearsedShape(shots, calibrated, deals, tuple(map(tuple, votes.tolist()))))
    names = tuple(f"label {place}" for place in range(labels))
    return Rehearsal("made up", "whole labels", names, "", "same", tuple(gold.tolist()), tuple(shapes), 0, ("N/A",))


def plans() -> dict[str, Callable[[int], Any]]:
    """Returns what makes each plan; another number is another plan, of which no price is remembered."""
    kind = itertools.count()

    def terms(seed: int) -> dict[str, Any]:
        return {"epsilon": 1.0 + seed / 50 + next(kind) / 1e4, "delta": _DELTA}

    known = {labels: [rehearsed(labels, seed) for seed in range(REPEATS + 1)] for labels in (4, 14)}

    def proposed(labels: int) -> Callable[[int], Any]:
        return lambda seed: propose_rows(known[labels][seed], 8_000 + seed, **terms(seed), max_queries=1_000)

    return {
        "votes": lambda seed: plan_queries(8_000 + seed, **terms(seed), max_queries=1_000, width=4).expected(),
        "votes, 14 labels": lambda seed: plan_queries(
            8_000 + seed, **terms(seed), max_queries=1_000, width=14
        ).expected(),
        "votes, rehearsed": lambda seed: plan_queries(8_000 + seed, **terms(seed), max_queries=1_000, width=4).expected(
            known[4][seed], calibrated=True
        ),
        "labels of PATE": lambda seed: plan_labelling(
            8_000 + seed, **terms(seed), max_queries=500, width=4
        ).right_rows_needed(),
        "retrieval": lambda seed: plan_retrieval(8_000, **terms(seed), participations=10, width=4).expected(
            participants=20
        ),
        "generation": lambda seed: signal_of(
            plan_generation({None: 8_000 + seed}, **terms(seed), shots_per_label=4), one_shot=0.6
        ),
        "rows that a rehearsal chooses, 4 labels": proposed(4),
        "rows that a rehearsal chooses, 14 labels": proposed(14),
    }


def cold(name: str) -> float:
    """Returns the milliseconds of the first plan of a process, which has imported the planners and nothing else."""
    code = f"import _speed_plans as part; print(part.once(part.plans()[{name!r}], 0))"
    ran = subprocess.run(  # noqa: S603  this very program
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parent
    )
    return float(ran.stdout)


def once(plan: Callable[[int], Any], seed: int) -> float:
    """Returns the milliseconds of the processor that a plan takes."""
    begin = time.process_time()
    plan(seed)
    return 1e3 * (time.process_time() - begin)


def goals() -> list[Goal]:
    """Returns a goal for each plan, warm and cold; the anchor is the limit itself."""
    found = list[Goal]()
    for name, plan in plans().items():
        first = cold(name)
        plan(0)
        warm = statistics.median(once(plan, seed) for seed in range(1, REPEATS + 1))
        for state, took in (("warm", warm), ("first of a process", first)):
            found.append(Goal(f"a plan over 100 ms of processor: {name}, {state}", took, LIMIT, took / LIMIT, 1.0))
    return found
