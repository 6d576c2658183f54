"""Speed and memory of private generation on a local model, as ratios measured side by side in one run.

A model of GPT-2's shape with random weights is made on the spot, with a tokenizer of made-up words; nothing is
downloaded. All write the same number of tokens after prompts of the same length, turn by turn, so that a busy machine
is busy for all of them; a ratio is the median over turns. Goals are this package's own.

    python benchmarks/bench_local.py [--full] [--device cuda] [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _local_growth as growth
import _local_invink as invink
import _local_memory as memory
import _local_profile as profile
import _local_utility as utility
import torch
from _local_model import GPT2_SMALL, SMALL, Size
from _local_runs import Place, Times, found_device, progress, race

PARTS = ("speed", "memory", "profile", "growth", "utility")
GOALS: dict[str, tuple[float, str]] = {
    "reprefill_over_ours": (30.0, ">="),
    "invink_over_ours": (1.5, ">="),
    "ours_over_generate": (1.0, "<="),
    "gumbel_over_generate": (1.0, "<="),
    "peak_memory_over_generate": (1.1, "<="),
}
OURS, GUMBEL, PLAIN, TANG, INVINK = "private", "private, gumbel", "model.generate", "re-prefill", "invink"
SHARED = "private, half shared"
"""Half of every prompt is the instruction's, and read once. It is shown; goals are measured without it."""
TANG_TOKENS = 2


class Bench:
    """One run: its settings, its numbers, and what they say about the goals.

    Args:
      arguments: the settings.
      size: model and work.
    """

    def __init__(self, arguments: argparse.Namespace, size: Size) -> None:
        self.arguments = arguments
        self.size = size
        self.numbers: dict[str, Any] = {"size": dataclasses.asdict(size)}
        self.measured: dict[str, float] = {}
        self._place: Place | None = None

    @property
    def place(self) -> Place:
        """The model, made when it is first wanted."""
        if self._place is None:
            self._place = Place(self.size, device=self.arguments.device, dtype=getattr(torch, self.arguments.dtype))
        return self._place

    def speed(self) -> None:
        """Goals a, b and c."""
        size, tokens = self.size, self.size.tokens
        runners = {
            OURS: (self.place.ours("recentered_clip"), tokens),
            GUMBEL: (self.place.ours("gumbel"), tokens),
            SHARED: (self.place.ours("recentered_clip", shared=size.prompt // 2), tokens),
            PLAIN: (self.place.plain(), tokens),
        }
        without = invink.missing()
        if not without and self.arguments.dtype != "float32":
            without = f"float32 alone is measured, not {self.arguments.dtype}"
        with tempfile.TemporaryDirectory() as folder:
            if not without:
                runners[INVINK] = (invink.runner(self.place, Path(folder)), tokens)
            times = race(runners, turns=self.arguments.turns)
        tang = {
            OURS: runners[OURS],
            TANG: (self.place.ours("gumbel", redraw_every=1, tokens=TANG_TOKENS), TANG_TOKENS),
        }
        beside = race(tang, turns=max(2, self.arguments.turns // 2))
        print(speed_table(times, beside[TANG], size))
        if without:
            print(f"{INVINK}: {without}")
        self._judge(times, beside)

    def _judge(self, times: dict[str, Times], beside: dict[str, Times]) -> None:
        found = self.measured
        found["reprefill_over_ours"] = beside[TANG].over(beside[OURS]) * self.size.tokens / TANG_TOKENS
        if INVINK in times:
            found["invink_over_ours"] = times[INVINK].over(times[OURS])
        found["ours_over_generate"] = times[OURS].over(times[PLAIN])
        found["gumbel_over_generate"] = times[GUMBEL].over(times[PLAIN])
        self.numbers["times"] = {name: dataclasses.asdict(one) for name, one in times.items()}
        self.numbers["reprefill"] = {name: dataclasses.asdict(one) for name, one in beside.items()}

    def memory(self) -> None:
        """Goal d: each in a fresh process."""
        found = {}
        for way in memory.WAYS:
            progress(f"peak memory: {way}")
            found[way] = memory.peak_of(way, self.size, device=self.arguments.device, dtype=self.arguments.dtype)
        ours, plain = found["ours"], found["plain"]
        what = "resident" if self.arguments.device == "cpu" else "allocated on the GPU"
        print(
            f"peak, {what}: private {ours['peak']:.0f} MiB, model.generate {plain['peak']:.0f} MiB; "
            f"beyond the model: {ours['beyond']:.0f} and {plain['beyond']:.0f} MiB"
        )
        self.measured["peak_memory_over_generate"] = ours["peak"] / plain["peak"]
        self.numbers["memory"] = found

    def profile(self) -> None:
        """Where our time goes."""
        self.place.ours("recentered_clip", tokens=2)()()
        spent = profile.shares(self.place, self.place.ours("recentered_clip"))
        print(profile.table(spent, tokens=self.size.tokens))
        self.numbers["profile"] = spent

    def growth(self) -> None:
        """What the cost depends on."""
        turns = max(2, self.arguments.turns // 2)
        found = growth.grown(turns=turns, device=self.arguments.device, dtype=getattr(torch, self.arguments.dtype))
        base = growth.BASE
        print(f"from {base.shown}\n{growth.table(found)}")
        growth.picture(found, self.arguments.figure, say=progress)
        self.numbers["growth"] = {name: [dataclasses.asdict(one) for one in some] for name, some in found.items()}

    def utility(self) -> None:
        """What goal a costs in utility."""
        asked = self.arguments
        self.numbers["utility"] = {}
        for name, bench in utility.tasks(asked.data, queries=asked.queries).items():
            num_labels = len(bench.task.labels)
            say = lambda said, name=name: progress(f"{name}: {said}")  # type: ignore[misc]  # noqa: E731
            found = utility.accuracies(bench, asked.epsilon, runs=asked.runs, shots=asked.shots, say=say)
            print(f"{name}, epsilon {asked.epsilon:g}, chance {100 / num_labels:.0f}{'raw':>12}{'calibrated':>15}")
            for way, runs in found.items():
                print(utility.line(way, runs))
            self.numbers["utility"][name] = found


def speed_table(times: dict[str, Times], tang: Times, size: Size) -> str:
    """Returns seconds per text, and each way's time over plain generation's, by the clock and the processor."""
    lines = [f"{'seconds per text':<28}{'median':>9}{'least':>9}{'over plain':>12}{'processor':>11}"]
    for name, one in times.items():
        ratios = f"{one.over(times[PLAIN]):>12.2f}{one.processor_over(times[PLAIN]):>11.2f}"
        lines.append(f"{name:<28}{one.median:>9.2f}{min(one.clock):>9.2f}{ratios}")
    scale = size.tokens / TANG_TOKENS
    lines.append(f"{TANG + ', scaled':<28}{scale * tang.median:>9.2f}{scale * min(tang.clock):>9.2f}")
    lines.append(
        f"({TANG}: {TANG_TOKENS} tokens were timed and taken {scale:g} times. Each of its tokens reads all prompts\n"
        "anew, at the same padded length and with what is written behind them: later ones cost more, not less.)"
    )
    return "\n".join(lines)


def verdicts(measured: dict[str, float]) -> str:
    """Returns the last lines: name, value, goal and whether it is met."""
    lines = []
    for name, (goal, sign) in GOALS.items():
        if name not in measured:
            lines.append(f"{name}: not measured ({sign} {goal:g})")
            continue
        is_met = measured[name] >= goal if sign == ">=" else measured[name] <= goal
        lines.append(f"{name}: {measured[name]:.3g} ({sign} {goal:g}: {'met' if is_met else 'MISSED'})")
    return "\n".join(lines)


def parsed(given: list[str] | None = None) -> argparse.Namespace:
    """Returns the settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the size of GPT-2 small (124 M weights)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--turns", type=int, default=5, help="of each way")
    parser.add_argument("--slots", type=int, default=SMALL.slots)
    parser.add_argument("--tokens", type=int, default=SMALL.tokens)
    parser.add_argument("--prompt", type=int, default=SMALL.prompt, help="tokens per prompt")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--width", type=int, help="of the model, a multiple of 64")
    parser.add_argument("--vocabulary", type=int)
    parser.add_argument("--data", type=Path, help="a labelled file for utility, beside the bank questions")
    parser.add_argument("--epsilon", type=float, default=4.0, help="of the demonstrations in the utility tables")
    parser.add_argument("--shots", type=int, default=2, help="demonstrations per label there")
    parser.add_argument("--runs", type=int, default=5, help="generations per way there")
    parser.add_argument("--queries", type=int, default=200, help="questions there")
    parser.add_argument("--json", type=Path, default=Path("out/bench_local.json"), metavar="OUT")
    parser.add_argument("--figure", type=Path, default=Path("out/bench_local.png"), metavar="OUT")
    return parser.parse_args(given)


def size_of(arguments: argparse.Namespace) -> Size:
    """Returns the model and the work that the settings name."""
    base = GPT2_SMALL if arguments.full else SMALL
    named = {name: getattr(arguments, name) for name in ("slots", "tokens", "prompt", "layers", "width", "vocabulary")}
    return dataclasses.replace(base, **{name: value for name, value in named.items() if value is not None})


def main() -> int:
    arguments = parsed()
    started = time.perf_counter()
    bench = Bench(arguments, size_of(arguments))
    device = found_device(arguments.device)
    print(f"{bench.size.shown}\n{arguments.dtype} on {device}, torch {torch.__version__}; {arguments.turns} turns")
    sections: dict[str, tuple[str, Callable[[], None]]] = {
        "speed": ("Speed", bench.speed),
        "memory": ("Memory", bench.memory),
        "profile": ("Where the time of one private text goes", bench.profile),
        "growth": ("How the time grows", bench.growth),
        "utility": ("Utility at equal epsilon", bench.utility),
    }
    for name in PARTS:
        if name in arguments.parts:
            print(f"\n## {sections[name][0]}\n", flush=True)
            sections[name][1]()
    bench.numbers["measured"] = bench.measured
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(bench.numbers, indent=2))
    print(f"\nnumbers in {arguments.json}, {time.perf_counter() - started:.0f} s\n\n{verdicts(bench.measured)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
