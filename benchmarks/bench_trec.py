"""Accuracy of private demonstrations on a labelled data set, next to every baseline.

Reads JSON lines (plain or gzipped) with `text`, `label_name` (or `label`) and `split` ("train" is private, "test" is
asked). Two tables: the methods at one number of shots, and the number of shots at one epsilon; mean and standard
deviation over runs. Labels with fewer than `--min-size` records are dropped before anything else (a public choice, as
in the paper on TREC).

    python benchmarks/bench_trec.py --data FILE.jsonl.gz
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _voting_task import labelled_rows
from langchain_core.prompts import PromptTemplate
from tqdm import tqdm

from langchain_dpicl import (
    DemonstrationSynthesizer,
    DPFewShotPromptTemplate,
    EmbeddedLLM,
    LabelAnswers,
    LabelClassifier,
    PrivacyBudgetCallbackHandler,
    PrivateExamples,
    ReleasedDemonstrations,
)
from langchain_dpicl.baselines import (
    demonstrations_from_instruction,
    demonstrations_without_privacy,
    real_demonstrations_without_privacy,
)
from langchain_dpicl.options import GenerationTask, Rows

EXAMPLE = PromptTemplate.from_template("text: {text}\nlabel: {label_name}")
GENERATION = "label: {label_name}\ntext: {text}"


@dataclass(frozen=True)
class Task:
    """A data set, ready to ask."""

    train: list[dict[str, str]]
    test: list[dict[str, str]]
    labels: tuple[str, ...]
    sizes: dict[str, int]
    dropped: dict[str, int]


def load(path: Path, *, min_size: int, queries: int, words: dict[str, str]) -> Task:
    """Reads the data; sizes per label are declared as public, labels are shown as `words` where given."""
    rows = labelled_rows(path)
    names = [str(row["label_name"] if "label_name" in row else row["label"]) for row in rows]
    named = [
        {"text": row["text"], "label_name": words.get(name, name), "split": row["split"]}
        for row, name in zip(rows, names, strict=True)
    ]
    sizes = Counter(row["label_name"] for row in named if row["split"] == "train")
    kept = tuple(sorted(label for label, size in sizes.items() if size >= min_size))
    strip = lambda row: {"text": row["text"], "label_name": row["label_name"]}  # noqa: E731
    train = [strip(row) for row in named if row["split"] == "train" and row["label_name"] in kept]
    test = [strip(row) for row in named if row["split"] == "test" and row["label_name"] in kept]
    step = max(1, len(test) // queries)
    dropped = {label: size for label, size in sizes.items() if label not in kept}
    return Task(train, test[::step][:queries], kept, {label: sizes[label] for label in kept}, dropped)


def _rows(shape: str | None, number: int, shots: int) -> Rows:
    """Returns the shape of rows that was typed; unit rows by default where they show one record."""
    is_slots = shape == "slots" or (shape is None and shots > 1)
    return Rows(slots=number, shots=shots) if is_slots else Rows(units=number, shots=shots)


class Bench:
    """Makes demonstrations by every method and asks the test questions."""

    def __init__(self, task: Task, arguments: argparse.Namespace) -> None:
        self.task = task
        self.arguments = arguments
        self.model = EmbeddedLLM()
        self.delta = 1 / (10 * sum(task.sizes.values())) if arguments.delta is None else arguments.delta
        self.common: dict[str, Any] = {
            "llm": self.model,
            "task": GenerationTask(arguments.instruction, GENERATION),
            "max_tokens": arguments.max_tokens,
        }
        self.rows = _rows(arguments.rows, arguments.num_slots, arguments.shots_per_slot or 1)

    def private(self) -> PrivateExamples:
        """A fresh holder of the training records."""
        return PrivateExamples(
            self.task.train,
            label_key="label_name",
            labels=self.task.labels,
            public_size=self.task.sizes,
            exact_size_is_public=True,
        )

    def protected(self, epsilon: float, shots: int, **way: Any) -> ReleasedDemonstrations:
        """Private demonstrations, on a budget of their own; `way` holds rows and noise other than the usual ones."""
        return DemonstrationSynthesizer.from_private_examples(
            self.private(),
            budget=PrivacyBudgetCallbackHandler(epsilon=epsilon, delta=self.delta),
            epsilon=epsilon,
            shots_per_label=shots,
            **{"rows": self.rows, **self.common, **way},
        ).run(progress=False)

    def methods(self, shots: int) -> list[tuple[str, Callable[[], ReleasedDemonstrations | None]]]:
        """Every row of the first table."""
        public = {**self.common, "label_key": "label_name", "labels": self.task.labels, "shots_per_label": shots}
        rows: list[tuple[str, Callable[[], ReleasedDemonstrations | None]]] = [("zero-shot", lambda: None)]
        rows.append(("instruction only, eps 0", lambda: demonstrations_from_instruction(**public)))
        rows += [(f"private, eps {e:g}", lambda e=e: self.protected(e, shots)) for e in self.arguments.epsilons]
        rows.append(
            (
                "no noise, eps inf",
                lambda: demonstrations_without_privacy(
                    self.private(), shots_per_label=shots, rows=self.rows, **self.common
                ),
            )
        )
        rows.append(
            (
                "real records, eps inf",
                lambda: real_demonstrations_without_privacy(self.private(), shots_per_label=shots),
            )
        )
        return rows

    def accuracy(self, released: ReleasedDemonstrations | None) -> tuple[float, float]:
        """Raw and calibrated accuracy on the test questions."""
        prompt = DPFewShotPromptTemplate(
            examples=[] if released is None else list(released.examples),
            example_prompt=EXAMPLE,
            prefix=self.arguments.instruction,
            suffix="text: {input}\nlabel:",
        )
        queries = [row["text"] for row in self.task.test]
        right = [row["label_name"] for row in self.task.test]
        out = []
        for calibrate in (False, True):
            how = None if calibrate else LabelAnswers(calibrate=False)
            classifier = LabelClassifier(self.model, labels=self.task.labels, prompt=prompt, answers=how)
            answers = classifier.batch(list(queries))
            out.append(sum(a == r for a, r in zip(answers, right, strict=True)) / len(right))
        return out[0], out[1]


def cells(runs: Sequence[tuple[float, float]]) -> list[str]:
    """Mean and standard deviation, raw and calibrated, in percent."""
    return [f"{100 * statistics.mean(c):.1f} +- {100 * statistics.pstdev(c):.1f}" for c in zip(*runs, strict=True)]


def show(
    title: str, rows: list[tuple[str, Callable[[], ReleasedDemonstrations | None]]], bench: Bench
) -> dict[str, Any]:
    """Runs the rows of one table, prints it as it grows, and returns its numbers."""
    print(f"\n{title}\n{'':<26}{'raw':>16}{'calibrated':>16}", flush=True)
    table = {}
    for name, make in rows:
        repeats = 1 if name == "zero-shot" else bench.arguments.runs
        runs = [bench.accuracy(make()) for _ in tqdm(range(repeats), desc=name, leave=False, disable=None)]
        table[name] = runs
        raw, calibrated = cells(runs)
        print(f"{name:<26}{raw:>16}{calibrated:>16}", flush=True)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1.0, 2.0, 4.0, 8.0])
    parser.add_argument("--delta", type=float, help="default: 1 / (10 * declared records)")
    parser.add_argument("--shots", type=int, nargs="+", default=[1, 2, 4, 8, 12], help="per label, second table")
    parser.add_argument("--table-shots", type=int, default=4, help="per label, first table")
    parser.add_argument("--shots-epsilon", type=float, default=4.0, help="epsilon of the second table")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--min-size", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=15)
    parser.add_argument("--num-slots", type=int, default=80)
    parser.add_argument("--rows", choices=("units", "slots"))
    parser.add_argument("--shots-per-slot", type=int)
    parser.add_argument("--words", nargs="*", default=[], metavar="LABEL=WORD", help="show a label as a word")
    parser.add_argument("--instruction", default="Short texts and their labels.")
    parser.add_argument("--out", type=Path, default=Path("out/bench.json"))
    arguments = parser.parse_args()
    if not arguments.data.is_file():
        print(f"no data file at {arguments.data}: give one with --data FILE.jsonl.gz (make bench-trec DATA=...)")
        return 2
    started = time.perf_counter()
    words = dict(pair.split("=", 1) for pair in arguments.words)
    task = load(arguments.data, min_size=arguments.min_size, queries=arguments.queries, words=words)
    bench = Bench(task, arguments)
    print(f"{arguments.data.name}: declared sizes {task.sizes}, dropped {task.dropped or 'none'}")
    print(f"{len(task.test)} questions")
    print(f"delta {bench.delta:.3g}, add_remove, one record; about {arguments.num_slots} rows per token")
    methods = show(f"accuracy, {arguments.table_shots} shots per label", bench.methods(arguments.table_shots), bench)
    by_shots = show(
        f"accuracy at epsilon {arguments.shots_epsilon:g} by shots per label",
        [(f"{n} shots", lambda n=n: bench.protected(arguments.shots_epsilon, n)) for n in arguments.shots],
        bench,
    )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"methods": methods, "shots": by_shots, "sizes": task.sizes}, indent=2))
    print(f"\nnumbers in {arguments.out}, {time.perf_counter() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
