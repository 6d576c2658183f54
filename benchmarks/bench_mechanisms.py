"""Mechanisms of generation at equal epsilon on real text: accuracy of the demonstrations, distance of the text.

For every mechanism and epsilon: demonstrations are generated from the training records, then (1) the model answers test
questions with them in its prompt, (2) their words are compared with the words of held-out records of the same label:
the Jensen-Shannon distance of the two unigram distributions, 0 for equal and 1 for disjoint ones, averaged over labels.
How far as many real records are from the same held-out ones is printed beside it; a few texts are always far, and texts
of common words alone are nearer than real ones, so compare mechanisms that write equally much.

    python benchmarks/bench_mechanisms.py --data FILE.jsonl.gz [FILE.jsonl.gz ...]
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from bench_trec import Bench, Task, load
from tqdm import tqdm

from langchain_dpicl import ReleasedDemonstrations
from langchain_dpicl.baselines import demonstrations_from_instruction, real_demonstrations_without_privacy
from langchain_dpicl.options import Decoding, LogitNoise, Rows

BLENDS, TEMPERATURES, ROW_COUNTS = (0.25, 0.5, 0.75, 1.0), (0.5, 1.0, 2.0), (20, 40, 80, 160)
WORD = re.compile(r"[A-Za-z']+")


def options_of(max_tokens: int, rows: Rows) -> dict[str, dict[str, Any]]:
    """The mechanisms and sampling plans that are compared, by the name that is printed."""
    kept = rows.replace(redraw_every="run")
    free = LogitNoise("recentered_clip", free_below=0.3, max_private_tokens=max(1, max_tokens // 3))
    return {
        "gumbel, new sample per token (Tang)": {"noise": "gumbel", "rows": rows},
        "gumbel, one sample": {"noise": "gumbel", "rows": kept},
        "re-centred clip, one sample": {"noise": "recentered_clip", "rows": kept},
        "re-centred clip, new sample per token": {"noise": "recentered_clip", "rows": rows},
        "difference clip, one sample": {"noise": "difference_clip", "rows": kept},
        "clip and blend, one sample": {"noise": "clip_and_blend", "rows": kept},
        "re-centred clip, free tokens": {"noise": free, "rows": kept},
        "re-centred clip, disjoint batches": {
            "noise": "recentered_clip",
            "rows": Rows(slots=rows.slots or rows.units, shots=rows.shots, sampling="disjoint"),
        },
    }


def sweep_of(rows: Rows) -> dict[str, dict[str, Any]]:
    """Clip and blend (Bhusal et al. 2025) with one setting changed at a time; epsilon decides the clip."""
    kept = rows.replace(redraw_every="run")
    usual: dict[str, Any] = {"noise": LogitNoise("clip_and_blend"), "rows": kept}
    found = {f"blend weight {w:g}": {**usual, "noise": LogitNoise("clip_and_blend", blend_weight=w)} for w in BLENDS}
    found |= {f"temperature {t:g}": {**usual, "decoding": Decoding(temperature=t)} for t in TEMPERATURES}
    counted = "units" if kept.slots is None else "slots"
    found |= {f"{count} rows": {**usual, "rows": kept.replace(**{counted: count})} for count in ROW_COUNTS}
    return {**found, "logits not centred": {**usual, "noise": LogitNoise("clip_and_blend", center="none")}}


def words_of(texts: Iterable[str]) -> Counter[str]:
    """Counts words."""
    return Counter(word.lower() for text in texts for word in WORD.findall(text))


def distance(left: Mapping[str, int], right: Mapping[str, int]) -> float:
    """Returns the Jensen-Shannon distance (root of the divergence, base 2) of word distributions; 1 if one is empty.

    >>> distance({"a": 2}, {"a": 1}), distance({"a": 1}, {"b": 1})
    (0.0, 1.0)
    """
    if not left or not right:
        return 1.0
    names = sorted({*left, *right})
    p, q = (np.array([counts.get(name, 0) for name in names], dtype=float) for counts in (left, right))
    p, q = p / p.sum(), q / q.sum()
    middle = (p + q) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        parts = [np.nansum(np.where(side > 0, side * np.log2(side / middle), 0.0)) for side in (p, q)]
    return float(np.sqrt(max(0.0, sum(parts) / 2)))


class Mechanisms(Bench):
    """Runs one mechanism at one epsilon and measures what comes out."""

    def __init__(self, task: Task, arguments: argparse.Namespace, shape: dict[str, Any]) -> None:
        trec = SimpleNamespace(
            delta=arguments.delta,
            instruction=arguments.instruction,
            max_tokens=arguments.max_tokens,
            num_slots=shape["num_slots"],
            rows=None,
            shots_per_slot=shape["shots_per_slot"],
        )
        super().__init__(task, trec)  # type: ignore[arg-type]
        self.held_out = {
            label: words_of(row["text"] for row in task.test if row["label_name"] == label) for label in task.labels
        }

    def generated(self, epsilon: float, shots: int, options: dict[str, Any]) -> ReleasedDemonstrations:
        """Private demonstrations by one mechanism, on a budget of their own."""
        return self.protected(epsilon, shots, **options)

    def measured(self, released: ReleasedDemonstrations) -> tuple[float, float, float]:
        """Raw and calibrated accuracy, and the mean distance of words."""
        raw, calibrated = self.accuracy(released)
        apart = [
            distance(words_of(e["text"] for e in released.examples if e["label_name"] == label), self.held_out[label])
            for label in self.task.labels
        ]
        return raw, calibrated, statistics.mean(apart)


def cell(runs: list[tuple[float, float, float]]) -> str:
    """One row of numbers: means, and the standard deviation of the calibrated accuracy."""
    raw, calibrated, apart = zip(*runs, strict=True)
    spread = statistics.pstdev(calibrated)
    return (
        f"{100 * statistics.mean(raw):7.1f}{100 * statistics.mean(calibrated):9.1f} +-{100 * spread:4.1f}"
        f"{statistics.mean(apart):10.3f}"
    )


def run_file(path: Path, arguments: argparse.Namespace, words: dict[str, str]) -> dict[str, Any]:
    """Prints the table of one data set as it grows, and returns its numbers."""
    task = load(path, min_size=arguments.min_size, queries=arguments.queries, words=words)
    shape = {"num_slots": arguments.num_slots, "shots_per_slot": arguments.shots_per_slot}
    bench = Mechanisms(task, arguments, shape)
    print(f"\n{path.name}: declared sizes {task.sizes}; delta {bench.delta:.3g}, add_remove, one record")
    print(
        f"{shape['num_slots']} slots x {shape['shots_per_slot']}, {arguments.shots} demonstrations per label of up to "
        f"{arguments.max_tokens} tokens, {len(task.test)} questions, {arguments.runs} runs"
    )
    print(f"{'':<40}{'epsilon':>8}{'raw':>7}{'calibrated':>16}{'distance':>10}", flush=True)
    table: dict[str, Any] = {}
    samples: list[str] = [f"## {path.name}"]
    public = {**bench.common, "label_key": "label_name", "labels": task.labels, "shots_per_label": arguments.shots}
    plain = {
        "public instruction only": ("0", lambda: demonstrations_from_instruction(**public)),
        "real records (nothing protected)": (
            "inf",
            lambda: real_demonstrations_without_privacy(bench.private(), shots_per_label=arguments.shots),
        ),
    }
    for name, (shown, make) in plain.items():
        table[name] = [bench.measured(make()) for _ in range(arguments.runs)]
        print(f"{name:<40}{shown:>8}{cell(table[name])}", flush=True)
    compared = sweep_of(bench.rows) if arguments.sweep else options_of(arguments.max_tokens, bench.rows)
    compared = {name: options for name, options in compared.items() if arguments.only in name}
    for epsilon in arguments.epsilons:
        for name, options in compared.items():
            runs = []
            for run in tqdm(range(arguments.runs), desc=name, leave=False, disable=None):
                released = bench.generated(epsilon, arguments.shots, options)
                runs.append(bench.measured(released))
                if not run:
                    samples += [f"### {name}, epsilon {epsilon:g}", *first_texts(released, task.labels)]
            table[f"{name}, eps {epsilon:g}"] = runs
            print(f"{name:<40}{epsilon:>8g}{cell(runs)}", flush=True)
    if arguments.samples is not None:
        with arguments.samples.open("a", encoding="utf-8") as file:
            file.write("\n\n".join(samples) + "\n\n")
    return table


def first_texts(released: ReleasedDemonstrations, labels: Iterable[str]) -> list[str]:
    """Returns the first text of each label as it was written: released, hence public."""
    texts = {label: [one["text"] for one in released.examples if one["label_name"] == label] for label in labels}
    return [f"- **{label}**: {' '.join(found[0].split())}" for label, found in texts.items() if found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1.0, 4.0])
    parser.add_argument("--delta", type=float, help="default: 1 / (10 * declared records)")
    parser.add_argument("--shots", type=int, default=4, help="demonstrations per label")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--min-size", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=15)
    parser.add_argument("--num-slots", type=int, default=80)
    parser.add_argument("--shots-per-slot", type=int, default=1)
    parser.add_argument("--words", nargs="*", default=[], metavar="LABEL=WORD", help="show a label as a word")
    parser.add_argument("--instruction", default="Short texts and their labels.")
    parser.add_argument("--sweep", action="store_true", help="settings of clip and blend instead of all mechanisms")
    parser.add_argument("--only", default="", metavar="WORDS", help="of the mechanisms those with this in their name")
    parser.add_argument("--samples", type=Path, metavar="FILE", help="append the first texts of every mechanism here")
    parser.add_argument("--out", type=Path, default=Path("out/bench_mechanisms.json"))
    arguments = parser.parse_args()
    missing = [str(path) for path in arguments.data if not path.is_file()]
    if missing:
        print(f"no data file at {', '.join(missing)}: give some with --data (make bench-mechanisms DATA=...)")
        return 2
    started = time.perf_counter()
    words = dict(pair.split("=", 1) for pair in arguments.words)
    numbers = {path.name: run_file(path, arguments, words) for path in arguments.data}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(numbers, indent=2))
    print(f"\nnumbers in {arguments.out}, {time.perf_counter() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
