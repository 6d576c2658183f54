"""What speed costs in utility: demonstrations by one sample per token and by one sample each, at the same epsilon.

Accuracy of the embedded model with them, on made-up bank questions and on a labelled file where there is one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from bench_trec import Bench, Task, load

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import bank_questions

WAYS: dict[str, tuple[str, Literal["run"] | None]] = {
    "sample per token, gumbel (Tang)": ("gumbel", None),
    "sample per text, gumbel": ("gumbel", "run"),
    "sample per text, recentered_clip": ("recentered_clip", "run"),
}
"""A run that redraws at every token reads all prompts again for each; one that keeps the sample keeps the cache."""
ROWS = 80
SIZE = 1_500
_WORDS = {"DESC": "description", "ENTY": "thing", "HUM": "person", "LOC": "place", "NUM": "number"}


def bank(*, queries: int, size: int = SIZE) -> Task:
    """Returns the made-up bank questions as a task."""
    rename = lambda row: {"text": row["text"], "label_name": row["label"]}  # noqa: E731
    train = [rename(row) for row in bank_questions.bank_questions(num_per_label=size)]
    asked = bank_questions.new_questions(num_per_label=queries // len(bank_questions.LABELS))
    test = [rename(row) for row in asked]
    return Task(train, test, bank_questions.LABELS, dict.fromkeys(bank_questions.LABELS, size), {})


def settings(*, instruction: str, max_tokens: int, num_slots: int) -> argparse.Namespace:
    """Returns what `bench_trec.Bench` asks for."""
    return argparse.Namespace(
        delta=1e-5,
        instruction=instruction,
        max_tokens=max_tokens,
        num_slots=num_slots,
        rows=None,
        shots_per_slot=None,
        epsilons=[],
    )


def tasks(data: Path | None, *, queries: int, num_slots: int = ROWS, size: int = SIZE) -> dict[str, Bench]:
    """Returns the benches by name; the file's is left out where there is none."""
    found = {
        "bank questions": Bench(
            bank(queries=queries, size=size),
            settings(instruction="Questions of bank customers.", max_tokens=24, num_slots=num_slots),
        )
    }
    if data is not None and data.is_file():
        task = load(data, min_size=100, queries=queries, words=_WORDS)
        instruction = "Questions and the kind of answer they ask for."
        found[data.name.partition(".")[0]] = Bench(
            task, settings(instruction=instruction, max_tokens=15, num_slots=num_slots)
        )
    return found


def accuracies(
    bench: Bench, epsilon: float, *, runs: int, shots: int, say: Callable[[str], None]
) -> dict[str, list[tuple[float, float]]]:
    """Returns (raw, calibrated) accuracies of every run of every way, and of no demonstrations."""
    found = {"no demonstrations": [bench.accuracy(None)]}
    for name, (noise, redraw_every) in WAYS.items():
        found[name] = []
        rows = bench.rows.replace(redraw_every=redraw_every)
        for run in range(runs):
            found[name].append(bench.accuracy(bench.protected(epsilon, shots, noise=noise, rows=rows)))
            say(f"{name}, run {run + 1} of {runs}")
    return found


def line(name: str, runs: list[tuple[float, float]]) -> str:
    """Returns one row of the table, in percent."""
    cells = [f"{100 * statistics.mean(c):.1f} +- {100 * statistics.pstdev(c):.1f}" for c in zip(*runs, strict=True)]
    return f"{name:<36}" + "".join(f"{cell:>15}" for cell in cells)
