"""Soft prompts and prefixes under differential privacy: accuracy by epsilon, and the cost of a step beside others'.

Accuracy: a small masked model is made from public text on the spot (or --model FOLDER), and frozen; "train" of each
data set is private, "test" is asked. Speed: our training step, peft's without privacy, and Opacus' per-sample gradients
around peft's, turn by turn on the same rows and a model with random weights, so that a busy machine is busy for all.
Goals are this package's own.

    python benchmarks/bench_soft_prompts.py --data FILE ... --corpus FOLDER --public FOLDER [--baselines] [--full]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _soft_baselines as baselines
import _soft_corpus as corpus
import _soft_memory as memory
import _soft_profile as profile
import _soft_speed as speed
import _soft_utility as utility
import torch
import transformers
from _local_runs import Times, found_device, progress, race
from _soft_model import BaseSize, base_model
from _soft_speed import SpeedSize, Track
from _soft_task import SoftTask, soft_task

from langchain_dpicl.exceptions import DPICLError

PARTS = ("utility", "speed", "memory", "profile")
KINDS = {"head": "sequence_classification", "masked": "masked_lm"}
GOALS: dict[str, float] = {f"ours_over_peft, {method}, {kind}": 1.3 for method in utility.METHODS for kind in KINDS}
BESIDE = ", by the processor"
"""What a busy machine moves less; shown beside the clock, which the goal is about."""
SMALLER = "ours, micro-batches of half"
EPSILONS = (3.0, 8.0, math.inf)


class Bench:
    """One run: its settings, its numbers, and what they say about the goals.

    Args:
      asked: the settings.
      size: model and rows of the race.
    """

    def __init__(self, asked: argparse.Namespace, size: SpeedSize) -> None:
        self.asked = asked
        self.size = size
        self.numbers: dict[str, Any] = {"size": dataclasses.asdict(size)}
        self.measured: dict[str, float] = {}

    def utility(self) -> None:
        """Accuracy by data set, method and epsilon."""
        asked = self.asked
        if not asked.data:
            print("no data: pass --data FILE ...")
            return
        model, tokenizer = self._base()
        self.numbers["utility"], self.numbers["baselines"] = {}, {}
        for path in asked.data:
            task = soft_task(path, limit=asked.limit, length=asked.length)
            bench = utility.SoftBench(model, tokenizer, task, asked)
            print(
                f"{task.title}: {len(task.records):,} private records, delta {task.delta:g}, {asked.steps} steps of "
                f"{bench.batch} expected, {len(task.right)} questions",
                flush=True,
            )
            began = time.perf_counter()
            found = utility.cells(bench, EPSILONS, methods=asked.methods, runs=asked.runs, say=progress)
            print(utility.table(task.title, found, EPSILONS), flush=True)
            self.numbers["utility"][task.title] = {"accuracy": found, "seconds": time.perf_counter() - began}
            if path.name.startswith(asked.baselines or "\0"):
                self._baselines(model, tokenizer, task)

    def _baselines(self, model: Any, tokenizer: Any, task: SoftTask) -> None:
        """The model itself, tuned by Opacus."""
        if without := speed.missing("opacus", "peft"):
            print(f"baselines: {without}")
            return
        asked = self.asked
        found: dict[str, dict[str, list[float]]] = {}
        for way in baselines.BASELINES:
            name = f"BASELINE, Opacus, {way}"
            found[name] = {}
            for epsilon in EPSILONS:
                share = baselines.tuned_by_opacus(
                    model,
                    tokenizer,
                    task,
                    way=way,
                    epsilon=epsilon,
                    steps=asked.steps,
                    batch=min(asked.batch, len(task.records)),
                    clip=asked.clip,
                    rate=asked.baseline_rate,
                )
                found[name][f"{epsilon:g}"] = [share]
                progress(f"{task.title}, {name}, epsilon {epsilon:g}: {100 * share:.1f} %")
        print("BASELINES on records that no ledger protects, with noise of torch's generator:")
        print(utility.table(task.title, found, EPSILONS), flush=True)
        self.numbers["baselines"][task.title] = found

    def _base(self) -> tuple[Any, Any]:
        """Returns the frozen model and its tokenizer."""
        asked = self.asked
        folder = asked.model
        if folder is None:
            if asked.corpus is None or asked.public is None:
                raise SystemExit("expected --model FOLDER, or --corpus and --public to make one, found neither")
            size = dataclasses.replace(BaseSize(), length=asked.length)
            reads = lambda: corpus.read(asked.corpus, asked.public, most_chars=size.most_chars)  # noqa: E731
            folder = base_model(size, reads, kept=asked.kept, say=progress)
            made = json.loads((folder / "made.json").read_text())
            print(
                f"base model: {size.shown}; made from public text in {made['seconds']:.0f} s, loss of its lessons "
                f"{made['losses'][0]:.2f} to {made['losses'][-1]:.2f}\n"
            )
        model = transformers.AutoModelForMaskedLM.from_pretrained(folder, local_files_only=True)
        return model, transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def speed(self) -> None:
        """The goals: each method, with a head and with label words."""
        without = speed.missing("peft", "opacus")
        self.numbers["speed"] = {}
        if without:
            print(f"peft and Opacus: {without}")
        for kind in self.asked.kinds:
            track = Track(dataclasses.replace(self.size, kind=KINDS[kind]), device=self.asked.device)
            for method in self.asked.methods:
                found = self._race(track, method, is_alone=bool(without))
                print(speed_table(f"{method}, {kind}", found, rows=self.size.rows), flush=True)
                if not without:
                    name = f"ours_over_peft, {method}, {kind}"
                    self.measured[name] = found["ours"].over(found["peft"])
                    self.measured[name + BESIDE] = found["ours"].processor_over(found["peft"])
                told = {name: dataclasses.asdict(one) for name, one in found.items()}
                self.numbers["speed"][f"{method}, {kind}"] = told

    def _race(self, track: Track, method: str, *, is_alone: bool) -> dict[str, Times]:
        turns, rows = self.asked.turns, self.size.rows
        steps = turns + 1
        runners = {"ours": (track.ready("ours", method, steps=steps), rows)}
        if rows > 1:
            runners[SMALLER] = (track.ready("ours", method, steps=steps, micro_batch=(rows + 1) // 2), rows)
        if not is_alone:
            runners |= {way: (track.ready(way, method, steps=steps), rows) for way in speed.WAYS[1:]}
        return race(runners, turns=turns)

    def memory(self) -> None:
        """Peak memory, each in a fresh process."""
        ways = speed.WAYS[:1] if speed.missing("peft", "opacus") else speed.WAYS
        size = dataclasses.replace(self.size, kind=KINDS["head"])
        found: dict[str, Any] = {}
        print(f"{'MiB':<24}{'peak':>10}{'beyond the model':>18}")
        for method in self.asked.methods:
            for way in ways:
                progress(f"peak memory: {way}, {method}")
                one = memory.peak_of(way, method, size, device=self.asked.device)
                found[f"{way}, {method}"] = one
                print(f"{way + ', ' + method:<24}{one['peak']:>10.0f}{one['beyond']:>18.0f}", flush=True)
        self.numbers["memory"] = found

    def profile(self) -> None:
        """Where our time goes."""
        track = Track(dataclasses.replace(self.size, kind=KINDS["head"]), device=self.asked.device)
        found = {method: profile.shares(track, method, steps=self.asked.turns) for method in self.asked.methods}
        print(profile.table(found))
        self.numbers["profile"] = found


def speed_table(title: str, found: dict[str, Times], *, rows: int) -> str:
    """Returns seconds of a step, rows per second, and ratios to peft's step turn by turn."""
    lines = [f"{title:<30}{'step s':>9}{'rows/s':>9}{'over peft':>11}{'processor':>11}{'over Opacus':>13}"]
    for name, one in found.items():
        beside = "".join(
            f"{ratio(one, found[other]):>{width}.2f}" if other in found else f"{'-':>{width}}"
            for other, ratio, width in (
                ("peft", Times.over, 11),
                ("peft", Times.processor_over, 11),
                ("opacus", Times.over, 13),
            )
        )
        lines.append(f"{name:<30}{one.median:>9.3f}{rows / one.median:>9.1f}{beside}")
    return "\n".join(lines)


def verdicts(measured: dict[str, float]) -> str:
    """Returns the last lines: name, value, goal and whether it is met."""
    lines = []
    for name, goal in GOALS.items():
        if name not in measured:
            lines.append(f"{name}: not measured (<= {goal:g})")
            continue
        verdict = "met" if measured[name] <= goal else "MISSED"
        beside = f"; {measured[name + BESIDE]:.3g}{BESIDE.removeprefix(',')}" if name + BESIDE in measured else ""
        lines.append(f"{name}: {measured[name]:.3g} (<= {goal:g}: {verdict}{beside})")
    return "\n".join(lines)


def parsed(given: list[str] | None = None) -> argparse.Namespace:
    """Returns the settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="RoBERTa-base's size in the race, 1,024 records a step")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--methods", nargs="+", choices=utility.METHODS, default=list(utility.METHODS))
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="of model in the race")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="of the race")
    parser.add_argument("--threads", type=int, help="of torch")
    parser.add_argument("--turns", type=int, default=5, help="of each way in the race")
    parser.add_argument("--rows", type=int, default=SpeedSize.rows, help="of a step in the race")
    parser.add_argument("--tokens", type=int, default=SpeedSize.tokens, help="of a row there")
    parser.add_argument("--layers", type=int, help="of the model there")
    parser.add_argument("--width", type=int, help="of the model there, a multiple of 64")
    parser.add_argument("--vocabulary", type=int, help="of the model there")
    parser.add_argument("--data", type=Path, nargs="+", default=[], help="labelled files for accuracy")
    parser.add_argument("--limit", type=int, default=400, help="questions of each")
    parser.add_argument("--runs", type=int, default=1, help="prompts per cell")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, help="expected records of a step; by default 128, or 1,024")
    parser.add_argument("--clip", type=float, default=0.1)
    parser.add_argument("--rate", type=float, default=0.02, help="of Adam, for prompts")
    parser.add_argument("--optimizer", default="adam", choices=("adam", "sgd"))
    parser.add_argument("--schedule", default="linear", choices=("constant", "linear"))
    parser.add_argument("--virtual-tokens", type=int, default=8)
    parser.add_argument("--length", type=int, default=40, help="tokens that a text is padded or cut to")
    parser.add_argument(
        "--baselines", nargs="?", const="sst2", metavar="NAME", help="the model tuned by Opacus, on one file"
    )
    parser.add_argument("--baseline-rate", type=float, default=0.001, help="of Adam there")
    parser.add_argument("--model", type=Path, help="folder of a masked model, instead of making one")
    parser.add_argument("--corpus", type=Path, help="folder of public text to make one from")
    parser.add_argument("--public", type=Path, help="folder of public reviews and questions")
    parser.add_argument("--kept", type=Path, default=Path("out/soft_base"), help="where a model that was made is kept")
    parser.add_argument("--json", type=Path, default=Path("out/bench_soft_prompts.json"), metavar="OUT")
    asked = parser.parse_args(given)
    asked.batch = asked.batch or (1_024 if asked.full else 128)
    return asked


def size_of(asked: argparse.Namespace) -> SpeedSize:
    """Returns the model and the rows of the race that the settings name."""
    base = SpeedSize(layers=12, width=768, vocabulary=50_265) if asked.full else SpeedSize()
    named = {name: getattr(asked, name) for name in ("layers", "width", "vocabulary", "rows", "tokens")}
    return dataclasses.replace(base, **{name: value for name, value in named.items() if value is not None})


def main() -> int:
    asked = parsed()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    started = time.perf_counter()
    bench = Bench(asked, size_of(asked))
    print(f"{found_device(asked.device)}, torch {torch.__version__}; race: {bench.size.shown}, {asked.turns} turns")
    sections: dict[str, tuple[str, Callable[[], None]]] = {
        "utility": ("Accuracy in percent", bench.utility),
        "speed": ("Speed of a training step", bench.speed),
        "memory": ("Memory", bench.memory),
        "profile": ("Where the time of our step goes", bench.profile),
    }
    for name in PARTS:
        if name in asked.parts:
            print(f"\n## {sections[name][0]}\n", flush=True)
            try:
                sections[name][1]()
            except DPICLError as error:
                raise SystemExit(f"{name}: {error}") from error
    bench.numbers["measured"] = bench.measured
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    asked.json.write_text(json.dumps(bench.numbers, indent=2))
    print(f"\nnumbers in {asked.json}, {time.perf_counter() - started:.0f} s\n\n{verdicts(bench.measured)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
