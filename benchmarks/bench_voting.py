"""Accuracy of private votes per query in the setting of Panda et al. (2023), what it depends on, and what it costs.

Reads JSON lines (plain or gzipped) with `text`, `label_name` and `split` ("train" is private, "test" is asked). Votes
are drawn once per question and noise many times. With the embedded model everything runs offline; that model is a toy,
so read what noise takes away, not the accuracies.

    python benchmarks/bench_voting.py --data FILE.jsonl.gz [FILE ...]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from _voting_rows import Measured, Method, Voters, measure, published_gap_closed
from _voting_speed import measure_speed
from _voting_task import PAPER, Task, load
from tqdm import tqdm

from langchain_dpicl.backends.resolve import as_choice_backend
from langchain_dpicl.cli.inputs import Model, load_model

PARTS = ("accuracy", "queries", "rates", "speed")
PAPER_ROWS = (
    Method(10, 4, "gaussian", overfill=1.0, note=" (paper)"),
    Method(10, 16, "gaussian", overfill=1.0, note=" (paper)"),
)
"""The paper's rows at its sampling rate: a slot of 4 shots expects 4 records, and often holds fewer."""
OTHER_ROWS = (
    Method(10, 4, "gumbel"),
    Method(10, 4, "gumbel", votes="soft"),
    Method(10, 4, "gumbel", calibrate=True),
    Method(10, 4, "gumbel", votes="soft", calibrate=True),
    Method(20, 2, "gumbel"),
    Method(40, 1, "gumbel"),
    Method(40, 1, "gumbel", rows="units"),
    Method(40, 1, "gumbel", rows="units", calibrate=True),
    Method(10, 16, "gumbel"),
    Method(10, 16, "gumbel", votes="soft"),
    Method(10, 16, "gumbel", calibrate=True),
    Method(40, 4, "gumbel"),
)
QUERIES = (1, 100, 1_000, 10_000, 100_000)
QUERY_ROWS = (PAPER_ROWS[1], Method(10, 16, "gumbel"))
RATE_ROWS = (
    Method(10, 1, "gumbel"),
    Method(10, 4, "gumbel", overfill=1.0, note=" fill 1"),
    Method(10, 4, "gumbel"),
    Method(10, 4, "gumbel", overfill=2.0, note=" fill 2"),
    Method(40, 4, "gumbel"),
    Method(10, 16, "gumbel"),
    Method(40, 16, "gumbel"),
)
LEGEND = """\
Accuracy in percent, mean +- standard deviation over noise draws on the same votes. Other questions
and other samples of the records move it by about 3 points more: read nothing into less.
M x k   slots of k shots, filled 1.5 times over (paper: once); cal.: each row calibrated on "N/A"
noise   standard deviation of the noise on a label's votes, per epsilon
closed  share of the gap from zero-shot to no noise that DP closes, in percent, per epsilon
        (from calibrated zero-shot where the rows are calibrated)
        "no gap": without noise not better than zero-shot, by two standard errors
        "no signal": without noise not better than always saying the commonest label, by two
        standard errors; such a row says nothing"""
NAME, NOISE, EACH, CLOSED = 25, 5, 11, 4


class Bench:
    """One run: its settings, its tables, and its numbers for `--json`."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.numbers: dict[str, Any] = {}

    def voters(self, path: Path, engine: Any) -> Voters:
        """Reads one data set and says what it is."""
        asked = self.arguments
        words = dict(pair.split("=", 1) for pair in asked.words)
        task = load(path, cap=asked.cap, questions=asked.questions, seed=asked.seed, words=words)
        print(f"\n## {task.title}: {described(task)}")
        return Voters(task, engine, progress=lambda items, desc: tqdm(items, desc=desc, leave=False, disable=None))

    def table(
        self, name: str, voters: Voters, rows: Iterable[tuple[str, Method, int]], *, draws: int
    ) -> dict[str, Measured]:
        """Measures and prints rows: (what to show, method, declared queries)."""
        epsilons = self.arguments.epsilons
        terms = {"delta": self.arguments.delta, "adjacency": self.arguments.adjacency, "draws": draws}
        print(f"\n{name}; {draws} noise draws\n{head(epsilons)}", flush=True)
        zeros = {calibrate: voters.zero_shot(calibrate=calibrate) for calibrate in (False, True)}
        for calibrate, hits in zeros.items():
            print(line("zero-shot cal." if calibrate else "zero-shot", float(hits.mean()), [("", "")] * len(epsilons)))
        out = {}
        for shown, method, queries in rows:
            out[shown] = measure(
                method, voters, epsilons=epsilons, zero=zeros[method.calibrate], max_queries=queries, **terms
            )
            print(measured_line(shown, out[shown]), flush=True)
        kept = self.numbers.setdefault(voters.task.title, {"about": described(voters.task)})
        kept[name] = {shown: found.to_dict() for shown, found in out.items()}
        return out


def described(task: Task) -> str:
    """Returns what the data set is, in public numbers."""
    share = float((task.right == task.commonest).mean())
    error = math.sqrt(share * (1 - share) / len(task.right))
    return (
        f"{len(task.records):,} private records, {len(task.right):,} questions, {len(task.labels)} labels\n"
        f"always saying {task.labels[task.commonest]!r}: {100 * share:.1f} (standard error {100 * error:.1f})"
    )


def head(epsilons: Sequence[float]) -> str:
    """Returns the headings of a table."""
    accuracies = "".join(f"{f'eps {epsilon:g}':>{EACH}}" for epsilon in epsilons)
    num = len(epsilons)
    return f"{'':<{NAME}}{'noise':>{NOISE * num}}{accuracies}{'no noise':>10}{'closed':>{closed_width(num)}}"


def closed_width(num_epsilons: int) -> int:
    """Returns the width of the last column, which may hold words."""
    return max(CLOSED * num_epsilons + 2, 12)


def line(shown: str, clean: float, noisy: Sequence[tuple[str, str]], *, closed: str = "") -> str:
    """Returns one line of a table, from (noise, accuracy) cells per epsilon."""
    noise = "".join(f"{cell:>{NOISE}}" for cell, _ in noisy)
    accuracies = "".join(f"{cell:>{EACH}}" for _, cell in noisy)
    return f"{shown:<{NAME}}{noise}{accuracies}{100 * clean:>10.1f}{closed:>{closed_width(len(noisy))}}".rstrip()


def measured_line(shown: str, found: Measured) -> str:
    """Returns the line of one method."""
    cells = [
        (f"{found.deviation[epsilon]:.1f}", f"{100 * accuracies.mean():.1f}+-{100 * accuracies.std():.1f}")
        for epsilon, accuracies in found.noisy.items()
    ]
    return line(shown, float(found.clean.mean()), cells, closed=closed_cells(found))


def closed_cells(found: Measured) -> str:
    """Returns the shares of the gap that are closed, or why they would say nothing."""
    if not found.beats_commonest:
        return "no signal"
    shares = [found.closed(epsilon) for epsilon in found.noisy]
    return "no gap" if None in shares else "".join(f"{100 * (share or 0.0):>{CLOSED}.0f}" for share in shares)


def beside_the_paper(measured: dict[str, dict[str, Measured]]) -> str:
    """Returns the paper's accuracies with ours under them, for the data sets that it has."""
    out = ["The paper's own numbers (10 x 4, another model; delta and noise not stated)"]
    out.append(
        f"{'':<24}{'zero':>8}" + "".join(f"{f'eps {e}':>8}" for e in (1, 3, 8)) + f"{'no noise':>10}{'closed':>16}"
    )
    for title, numbers in PAPER.items():
        shares = "".join(f"{100 * published_gap_closed(numbers, e):>4.0f}" for e in (1.0, 3.0, 8.0))
        cells = "".join(f"{value:>8.1f}" for value in list(numbers.values())[:4])
        out.append(f"{title + ', paper':<24}{cells}{numbers[math.inf]:>10.1f}{shares:>16}")
        for shown, found in measured.get(title, {}).items():
            out.append(our_line(f"{title}, {shown.removesuffix(' (paper)')}", found))
    return "\n".join(out)


def our_line(shown: str, found: Measured) -> str:
    """Returns our numbers in the columns of the paper's."""
    values = [found.zero.mean(), *(accuracies.mean() for accuracies in found.noisy.values())]
    cells = "".join(f"{100 * value:>8.1f}" for value in values)
    return f"{shown:<24}{cells}{100 * found.clean.mean():>10.1f}{closed_cells(found):>16}"


def parsed(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", default=[], metavar="FILE")
    parser.add_argument(
        "--full", action="store_true", help="1,000 questions, 100 draws everywhere, every table for every file"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--model", default="embedded", help="'embedded', or module:attribute of a model or engine")
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1.0, 3.0, 8.0])
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--adjacency", choices=("add_remove", "replace_one"), default="add_remove")
    parser.add_argument("--queries", type=int, default=10_000, help="declared queries")
    parser.add_argument("--questions", type=int, help="questions asked; default 300, or 1,000 with --full")
    parser.add_argument("--draws", type=int, default=100, help="noise draws of the paper's rows")
    parser.add_argument("--fewer-draws", type=int, help="of all others; default 20, or as --draws with --full")
    parser.add_argument("--cap", type=int, default=8_000, help="most private records")
    parser.add_argument("--seed", type=int, default=0, help="public: which records and questions; never noise")
    parser.add_argument("--words", nargs="*", default=[], metavar="LABEL=WORD", help="show a label as a word")
    parser.add_argument("--json", type=Path, default=Path("out/bench_voting.json"), metavar="OUT")
    arguments = parser.parse_args(given)
    arguments.questions = arguments.questions or (1_000 if arguments.full else 300)
    arguments.fewer_draws = arguments.fewer_draws or (arguments.draws if arguments.full else 20)
    return arguments


def query_rows() -> list[tuple[str, Method, int]]:
    """Returns the rows of the table by declared queries."""
    return [(f"{count:,} {method.mechanism}", method, count) for method in QUERY_ROWS for count in QUERIES]


def rate_rows(size: int, queries: int) -> list[tuple[str, Method, int]]:
    """Returns the rows of the table by sampling rate: what is drawn of `size` records per query."""
    rates = [100 * method.design().sampler(size).sampling_rate for method in RATE_ROWS]
    shapes = [f"{method.num_slots} x {method.shots}{method.note}" for method in RATE_ROWS]
    shown = [f"{rate:.2f} %: {shape}" for rate, shape in zip(rates, shapes, strict=True)]
    return [(name, method, queries) for name, method in zip(shown, RATE_ROWS, strict=True)]


def accuracy_tables(bench: Bench) -> dict[str, dict[str, Measured]]:
    """Prints the tables of every data set; the ablations of the last one alone unless `--full`."""
    asked = bench.arguments
    engine = as_choice_backend(load_model(Model(name=asked.model)))
    paper: dict[str, dict[str, Measured]] = {}
    for place, path in enumerate(asked.data):
        voters = bench.voters(path, engine)
        in_full = asked.full or place == len(asked.data) - 1
        title, queries, fewer = voters.task.title, asked.queries, asked.fewer_draws
        if "accuracy" in asked.parts:
            setting = f"{queries:,} queries, delta {asked.delta:g}, {asked.adjacency}"
            ours = [(method.name, method, queries) for method in PAPER_ROWS]
            paper[title] = bench.table(f"the paper's rows: {setting}", voters, ours, draws=asked.draws)
            others = [(method.name, method, queries) for method in OTHER_ROWS]
            bench.table(f"other rows and votes: {setting}", voters, others, draws=fewer)
        if "queries" in asked.parts and in_full:
            bench.table("by declared queries: 10 x 16", voters, query_rows(), draws=fewer)
        if "rates" in asked.parts and in_full:
            rows = rate_rows(len(voters.task.records), queries)
            bench.table(f"by sampling rate: gumbel, {queries:,} queries", voters, rows, draws=fewer)
    return paper


def main() -> int:
    arguments = parsed()
    started = time.perf_counter()
    missing = [str(path) for path in arguments.data if not path.is_file()]
    asks_data = set(arguments.parts) - {"speed"}
    if missing or (asks_data and not arguments.data):
        print(f"no data file at {', '.join(missing) or '...'}: give one with --data FILE.jsonl.gz, or --parts speed")
        return 2
    bench = Bench(arguments)
    if asks_data:
        print(LEGEND)
        paper = accuracy_tables(bench)
        if paper and arguments.epsilons == [1.0, 3.0, 8.0]:
            print("\n## Beside the paper\n\n" + beside_the_paper(paper))
    if "speed" in arguments.parts:
        print("\n## Speed: what this package adds to model calls that take no time\n", flush=True)
        bench.numbers["speed"] = measure_speed()
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(bench.numbers, indent=2))
    print(f"\nnumbers in {arguments.json}, {time.perf_counter() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
