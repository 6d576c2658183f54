"""Every method on every data set: zero-shot, instruction only, private at several epsilons, without privacy; and costs.

Each finished cell (method, data set, column, seed) is one line of cells.jsonl under --out, and is never run again: a
run that was killed continues where it stopped. Seeds are of the public choices (which questions, which public inputs,
which order of demonstrations); samples and noise always come from the operating system. The columns without privacy
read the records as they are: give files that are nobody's secret.

    python benchmarks/bench_tables.py --data FILE.jsonl.gz [FILE ...] [--quick] [--methods ...] [--epsilons ...]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _tables_cells import CellStore, Clock, Done, Task, lasting, missing
from _tables_files import DataFile, data_file
from _tables_methods import EMBEDDED, Grid, Method, methods_of
from _tables_pages import show_on_page, write_pages
from _tables_room import Engines, Room
from _tables_soft import SoftModels, found_base

from langchain_dpicl.backends.resolve import as_choice_backend
from langchain_dpicl.cli.inputs import Model, load_model
from langchain_dpicl.exceptions import ConfigurationError, DPICLError

PRICE_IN, PRICE_OUT = 1.0, 4.0
"""Per million tokens: round numbers to calculate with, nobody's price list."""
KNOBS = ("questions", "inputs", "teachers", "queries")
QUICK_SEEDS, SEEDS = 3, 5
KEPT = Path(__file__).with_name("results") / "cells.jsonl"
"""Finished cells of this repository's own runs: they are not run again, and say how long others take."""
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"


@dataclass
class Run:
    """Runs what is missing, one cell after the other.

    Attributes:
      store: where finished cells are kept.
      methods: by name.
      files: by stem.
      engines: whom to ask.
    """

    store: CellStore
    methods: dict[str, Method]
    files: dict[str, DataFile]
    engines: Engines

    def __post_init__(self) -> None:
        self._room: tuple[tuple[str, str, int], Room] | None = None
        self._plans: dict[Any, Any] = {}

    def go(self, tasks: Sequence[Task], *, minutes: float | None) -> str:
        """Runs the tasks that are not finished; returns in words how it ended.

        Args:
          tasks: the cells that are wanted.
          minutes: after which no further cell is begun; None: never.
        """
        started = time.monotonic()
        with self.store.alone():
            done = self.store.read()
            todo = missing(tasks, done)
            clock = Clock([done[task.fingerprint] for task in tasks if task.fingerprint in done] or list(done.values()))
            rest = f"{lasting(clock.left(todo))} on an idle core" if todo else "nothing left"
            if guessed := clock.guessed(todo):
                rest += f", a guess for {guessed:,} cells: none of their method and data is finished"
            print(f"{len(tasks):,} cells, {len(tasks) - len(todo):,} finished before; {rest}", flush=True)
            for place, task in enumerate(todo):
                if minutes is not None and time.monotonic() - started > 60 * minutes:
                    return f"stopped after {minutes:g} minutes, {len(todo) - place:,} cells left: run it again to go on"
                found = self.measured(task)
                clock.add(found)
                rest = lasting(clock.left(todo[place + 1 :]))
                count = f"{len(tasks) - len(todo) + place + 1}/{len(tasks)}"
                accuracy = f"{100 * found.result['accuracy']:.1f} %"
                print(f"[{count}] {task.cell.shown}: {accuracy} ({found.seconds:.1f} s; {rest})", flush=True)
        return "every cell is finished"

    def measured(self, task: Task) -> Done:
        """Measures one cell and keeps it."""
        cell = task.cell
        key = (cell.method, cell.data, cell.seed)
        if self._room is None or self._room[0] != key:
            self._room = key, Room(self.files[cell.data], self.engines, self._plans)
        began = time.process_time()
        result = self.methods[cell.method].measure(self._room[1], cell, task.settings["knobs"])
        return self.store.append(task, result, seconds=round(time.process_time() - began, 3))


def parsed(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    names = tuple(methods_of(SoftModels(None)))
    data: dict[str, Any] = {"type": Path, "nargs": "+", "default": [], "metavar": "FILE", "action": "append"}
    add("--data", **data, help="labelled texts or texts with a slot; the last --data counts")
    add(
        "--methods",
        nargs="+",
        choices=names,
        default=list(names),
        metavar="NAME",
        help=f"in this order, of {', '.join(names)}",
    )
    add("--epsilons", type=positive, nargs="+", default=[1.0, 2.0, 4.0, 8.0])
    add("--seeds", type=count, help=f"of the public choices; default {SEEDS}, with --quick {QUICK_SEEDS}")
    add("--soft-seeds", type=count, help="of promptdpsgd, whose cells take longest; default: as many, with --quick 1")
    add("--quick", action="store_true", help="fewer questions, public inputs and candidates")
    add("--anew", action="store_true", help="measure again what this repository keeps; what --out has stays")
    add("--questions", type=count, help="asked in each cell")
    add("--inputs", type=count, help="public inputs of pate")
    add("--teachers", type=count, help="of pate")
    add("--queries", type=count, help="declared by voting and free-form")
    add("--ablations", action="store_true", help="also the papers' ablations, at epsilon 4")
    add("--ablation-data", nargs="+", metavar="STEM", help="data sets of the ablations; default: all")
    add("--ablation-knobs", nargs="+", metavar="KNOB", help="of the ablations these alone")
    add("--ablation-seeds", type=count, default=3)
    add("--minutes", type=positive, help="begin no further cell after so many")
    add("--show", action="store_true", help="run nothing; write the tables of what is finished")
    add("--write", action="store_true", help="also write the cells, the tables and the page that show them")
    add("--model", default=EMBEDDED, help="'embedded', or module:attribute of a model or engine; it SEES the records")
    add(
        "--soft-model",
        type=Path,
        metavar="FOLDER",
        help="masked model of promptdpsgd; default: made by bench-soft-prompts",
    )
    add("--price-in", type=price, default=PRICE_IN, help=f"per million prompt tokens; {PRICE_IN:g} is an assumption")
    add("--price-out", type=price, default=PRICE_OUT, help=f"per million answer tokens; {PRICE_OUT:g} is an assumption")
    add("--words", type=word, nargs="*", default=[], metavar="LABEL=WORD", help="show a label as a word")
    add("--out", type=Path, default=Path("out/tables"), metavar="FOLDER", help="of cells.jsonl, tables and pictures")
    arguments = parser.parse_args(given)
    arguments.data = arguments.data[-1] if arguments.data else []
    arguments.seeds = arguments.seeds or (QUICK_SEEDS if arguments.quick else SEEDS)
    arguments.soft_seeds = arguments.soft_seeds or (1 if arguments.quick else None)
    return arguments


def count(text: str) -> int:
    """Returns a number of things."""
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {text!r}")
    return int(text)


def positive(text: str) -> float:
    """Returns a number above 0."""
    value = price(text)
    if not value:
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text!r}")
    return value


def price(text: str) -> float:
    """Returns a number that is not below 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, found {text!r}")
    return value


def word(text: str) -> str:
    """Returns a pair of label and word as it stands."""
    if "=" not in text:
        raise argparse.ArgumentTypeError(f"expected LABEL=WORD, found {text!r}")
    return text


def files_of(asked: argparse.Namespace) -> dict[str, DataFile]:
    """Returns the data sets by stem; all are read before the first cell runs."""
    if not asked.data:
        raise SystemExit("no data: give files of the format with --data FILE.jsonl.gz ...")
    words = dict(pair.split("=", 1) for pair in asked.words)
    found: dict[str, DataFile] = {}
    for path in asked.data:
        file = data_file(path, words=words)
        if file.stem in found:
            raise SystemExit(f"--data: expected files of different names, found {file.stem} twice")
        found[file.stem] = file
    return found


def grid_of(asked: argparse.Namespace, files: dict[str, DataFile], models: SoftModels) -> Grid:
    """Returns what is asked for; methods that cannot run here are named and left out."""
    known = methods_of(models)
    methods = [known[name] for name in dict.fromkeys(asked.methods)]
    if any(one.name == "promptdpsgd" for one in methods) and models.absent:
        print(f"promptdpsgd is left out: {models.absent}")
        methods = [one for one in methods if one.name != "promptdpsgd"]
    unknown = sorted(set(asked.ablation_data or ()) - set(files))
    if unknown:
        raise SystemExit(f"--ablation-data: expected stems of --data ({', '.join(files)}), found {', '.join(unknown)}")
    return Grid(
        methods=methods,
        files=list(files.values()),
        epsilons=asked.epsilons,
        seeds=asked.seeds,
        is_quick=asked.quick,
        given={name: getattr(asked, name) for name in KNOBS},
        model=asked.model,
        has_ablations=asked.ablations,
        ablation_files=asked.ablation_data or list(files),
        ablation_seeds=asked.ablation_seeds,
        ablation_knobs=asked.ablation_knobs,
        fewer={"promptdpsgd": asked.soft_seeds} if asked.soft_seeds else {},
    )


def main(given: Sequence[str] | None = None) -> int:
    """Runs what is missing and writes the tables; what the package refuses ends it with one line."""
    asked = parsed(given)
    try:
        return tables(asked)
    except ConfigurationError as error:
        problem = str(error)
    except DPICLError as error:
        problem = f"{error} (finished cells are kept)"
    print(f"bench_tables.py: {problem}", file=sys.stderr)
    return 2


def tables(asked: argparse.Namespace) -> int:
    """Runs what is missing, then writes the tables of all that is finished."""
    files = files_of(asked)
    models = SoftModels(asked.soft_model or found_base(Path("out/soft_base")))
    grid = grid_of(asked, files, models)
    store = CellStore(asked.out / "cells.jsonl", kept=None if asked.anew else KEPT)
    tasks = grid.tasks()
    if not tasks:
        raise SystemExit("expected a data set of one of the methods, found none: see --methods and --data")
    if not asked.show:
        engines = Engines(as_choice_backend(load_model(Model(name=asked.model))), is_embedded=asked.model == EMBEDDED)
        run = Run(store, {one.name: one for one in grid.methods}, files, engines)
        try:
            ending = run.go(tasks, minutes=asked.minutes)
        except KeyboardInterrupt:
            ending = "interrupted: run it again to go on"
        print(ending)
    written = write_pages(grid, store.read(), asked.out, price_in=asked.price_in, price_out=asked.price_out)
    if asked.write:
        wanted = {task.fingerprint for task in tasks}
        finished = {**CellStore(KEPT).read(), **{k: one for k, one in store.read().items() if k in wanted}}
        CellStore(KEPT).keep(finished)
        written += show_on_page(grid, finished, asked.out, results=KEPT.parent, page=PAGE)
    print("written: " + ", ".join(str(path) for path in written))
    return 0


if __name__ == "__main__":
    sys.exit(main())
