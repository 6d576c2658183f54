"""Votes of retrieved documents beside votes of a random sample, at equal epsilon, over one stream of queries.

Reads JSON lines (plain or gzipped) with `text`, `label_name` and `split` ("train" is private, "test" is asked once).
Both answer with the embedded model and always name a label, the retrieving voter by `abstain_below="never"`, not by
default; its rows show one document, a slot of the sampling one four. The threshold is not tuned: every one that was
tried is in the table.

    python benchmarks/bench_retrieval.py --data FILE.jsonl.gz
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _voting_task import labelled_rows

from langchain_dpicl import (
    DPRetrievalVotingRunnable,
    DPVotingRunnable,
    EmbeddedLLM,
    LabelAnswers,
    Noise,
    PrivacyBudgetCallbackHandler,
    PrivateExamples,
    Retrieval,
    Rows,
    Serving,
)
from langchain_dpicl.backends import LocalEmbeddings

DELTA = 1e-6
LIMIT = 1e9
EXAMPLE, SUFFIX = "text: {text}\nlabel: {label_name}", "text: {input}\nlabel:"


@dataclass(frozen=True)
class Task:
    """A data set, ready to ask.

    Attributes:
      train: the private records.
      test: the questions, each with its label.
      labels: all of them.
    """

    train: list[dict[str, str]]
    test: list[dict[str, str]]
    labels: tuple[str, ...]


def load(path: Path, *, size: int, queries: int, min_share: float) -> Task:
    """Reads the data, evenly thinned to `size` records and `queries` questions; rare labels are dropped in public."""
    rows = labelled_rows(path)
    named = [
        {"text": row["text"], "label_name": str(row["label_name"] if "label_name" in row else row["label"])}
        for row in rows
    ]
    split = {
        part: [each for each, row in zip(named, rows, strict=True) if row["split"] == part]
        for part in ("train", "test")
    }
    known = [each["label_name"] for each in split["train"]]
    labels = tuple(sorted(label for label in set(known) if known.count(label) >= min_share * len(known)))
    kept = {part: [each for each in found if each["label_name"] in labels] for part, found in split.items()}
    return Task(_thinned(kept["train"], size), _thinned(kept["test"], queries), labels)


def _thinned(rows: list[dict[str, str]], count: int) -> list[dict[str, str]]:
    step = max(1, len(rows) // count)
    return rows[::step][:count]


def examples(task: Task) -> PrivateExamples:
    """The private records, all of which may be drawn or retrieved."""
    return PrivateExamples(
        task.train, label_key="label_name", labels=task.labels, public_size=len(task.train), exact_size_is_public=True
    )


def priced(epsilon: float | None, **options: Any) -> dict[str, Any]:
    """What both voters share; without an epsilon the noise is next to nothing, at whatever price."""
    budget = PrivacyBudgetCallbackHandler(epsilon=epsilon or LIMIT, delta=DELTA)
    noise = {"epsilon": epsilon} if epsilon else {"epsilon": LIMIT, "noise": Noise(multiplier=0.01)}
    texts = {"example_prompt": EXAMPLE, "suffix": SUFFIX, "serving": Serving(memo_size=0)}
    return {"llm": EmbeddedLLM(), "budget": budget, **texts, **noise, **options}


def retrieving(task: Task, epsilon: float | None, **options: Any) -> DPRetrievalVotingRunnable:
    """The voter that asks the documents near to a query."""
    answers = LabelAnswers(calibrate=False, abstain_below="never")
    near = Retrieval(LocalEmbeddings(), **options)
    return DPRetrievalVotingRunnable.from_private_examples(
        examples(task), **priced(epsilon, retrieval=near, answers=answers)
    )


def sampling(task: Task, epsilon: float | None) -> DPVotingRunnable:
    """The voter that asks a random sample, at the planner's own shape."""
    return DPVotingRunnable.from_private_examples(
        examples(task), max_queries=len(task.test), **priced(epsilon, rows=Rows(slots=10, shots=4))
    )


def measured(voter: Any, task: Task) -> dict[str, Any]:
    """Asks every question once, and counts right answers in the first and in the second half of the stream."""
    start = time.monotonic()
    told = voter.batch([row["text"] for row in task.test], {"max_concurrency": 1})
    right = [str(answer) == row["label_name"] for answer, row in zip(told, task.test, strict=True)]
    half = len(right) // 2
    return {
        "right": sum(right) / len(right),
        "first half": sum(right[:half]) / max(1, half),
        "second half": sum(right[half:]) / max(1, len(right) - half),
        "seconds per query": (time.monotonic() - start) / len(told),
    }


def rows(task: Task, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields one line of the table after the other."""
    for epsilon in (*arguments.epsilon, None):
        name = "none" if epsilon is None else f"{epsilon:g}"
        voter = sampling(task, epsilon)
        yield {"epsilon": name, "voter": f"random sample, {len(task.test)} queries", **measured(voter, task)}
        for threshold in arguments.threshold:
            for participations in arguments.participations if epsilon else (len(task.test),):
                given = {"similarity_threshold": threshold, "participations": participations}
                made = retrieving(task, epsilon, slots=arguments.slots, **given)
                shown = f"retrieved, {threshold:g}, {participations if epsilon else 'any number of'} participations"
                noise = {"noise": made.plan.noise_stddev}
                yield {"epsilon": name, "voter": shown, **measured(made, task), **noise}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Votes of retrieved documents beside votes of a random sample.")
    parser.add_argument(
        "--data", type=Path, required=True, help="JSON lines, plain or gzipped: text, label_name, split"
    )
    parser.add_argument("--size", type=int, default=5_000, help="private records at most")
    parser.add_argument("--queries", type=int, default=200, help="questions of the stream")
    parser.add_argument("--slots", type=int, default=64, help="rows of a retrieved vote")
    parser.add_argument("--min-share", type=float, default=0.05, help="rarer labels are dropped")
    parser.add_argument("--epsilon", type=float, nargs="*", default=[1.0, 4.0])
    parser.add_argument("--threshold", type=float, nargs="*", default=[0.2, 0.3])
    parser.add_argument("--participations", type=int, nargs="*", default=[1, 5, 25])
    arguments = parser.parse_args(argv)
    task = load(arguments.data, size=arguments.size, queries=arguments.queries, min_share=arguments.min_share)
    print(f"{len(task.train):,} private records, {len(task.test)} queries, {len(task.labels)} labels; delta {DELTA:g}")
    print("| epsilon | who votes | right | first half | second half | noise, votes | seconds |")
    print("|---|---|---|---|---|---|---|")
    for row in rows(task, arguments):
        noise = f"{row['noise']:.1f}" if "noise" in row else "-"
        print(
            f"| {row['epsilon']} | {row['voter']} | {row['right']:.3f} | {row['first half']:.3f} | "
            f"{row['second half']:.3f} | {noise} | {row['seconds per query']:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
