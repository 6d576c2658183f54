"""PromptPATE in the settings of Duan et al. (2023): private teachers, students that learn from them, honest epsilons.

Reads JSON lines (plain or gzipped) with `text`, `label_name` and `split`: "train" is private, the student is asked
questions of "test". Public inputs come from "dev" or what is left of "test", or from "train" of another file. With the
embedded model everything runs offline; it is a toy, and where it learns nothing from examples the tables say so.

    python benchmarks/bench_pate.py --data FILE.jsonl.gz [FILE ...] [--public [STEM=]FILE ...]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _pate_pictures import Curve, pictures
from _pate_runs import Students, Taught, Teaching, best_private_prompt_without_privacy, ensemble_without_privacy, teach
from _pate_tables import (
    LEGEND,
    TEXT_TERMS,
    Bounds,
    PaperTerms,
    Row,
    bounds_lines,
    head,
    honest_lines,
    published_lines,
)
from _pate_task import PUBLISHED_TEXT, Setting, setting
from _tables_room import reads_once
from tqdm import tqdm

from langchain_dpicl import EmbeddedLLM
from langchain_dpicl.backends import TextVoteBackend
from langchain_dpicl.backends.base import Rows
from langchain_dpicl.backends.embedded import EmbeddedModel
from langchain_dpicl.backends.langchain.texts import ChoiceNames
from langchain_dpicl.backends.resolve import as_choice_backend
from langchain_dpicl.cli.inputs import Model, load_model
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.pate.plan import TeacherPrice, compare_teachers

TERMS = PaperTerms()
ROWS = (Teaching("fresh", 1, noise=TERMS.noise), Teaching("fresh", 4, noise=TERMS.noise))
MORE_ROWS = (
    Teaching("fresh", 4, epsilon=1.0),
    Teaching("one_sample", 1, noise=TERMS.noise),
    Teaching("one_sample", 4, noise=TERMS.noise),
    Teaching("fixed", 1, noise=TERMS.noise),
    Teaching("fixed", 4, noise=TERMS.noise),
)
CURVE = ROWS[1]
SHOTS = (1, 4)
TEXT_SHOTS = {"sst2": 2, "agnews": 2, "dbpedia": 1}
"""Records of a prompt where models give text alone (Table 3); 4 on TREC and on what the paper has not."""
QUERIES = (10, 20, 50, 100, 200, 500)
QUICK = {"inputs": 50, "questions": 300, "candidates": 20, "ensemble_questions": 60, "validation": 40}
FULL = {"inputs": 500, "questions": 300, "candidates": 50, "ensemble_questions": 300, "validation": 100}
UPPER_CANDIDATES = 200


class BatchWriter(TextVoteBackend):
    """The embedded model as an engine of which only what it writes is seen, asked for many prompts at once.

    Its votes are those of its base, which asks one prompt after the other: no row of the model depends on the others.
    A prompt is sent alone, and as many tokens are written as the longest choice has.
    """

    def __init__(self) -> None:
        super().__init__(EmbeddedLLM(), instructions="")
        self._writer = reads_once(EmbeddedModel())

    def score_with_other(self, prompts: Sequence[str], choices: Sequence[str]) -> Rows:
        """Returns float64[prompts, choices + 1]: 0 for the choice that is named, or in the last column; else -inf."""
        names = ChoiceNames(choices)
        most = max(self._writer.count_tokens(f" {choice.strip()}") for choice in choices)
        places = [names.named(text) for text in self._writer.complete(prompts, max_tokens=most)]
        rows = np.full((len(prompts), len(choices) + 1), -np.inf)
        rows[range(len(places)), [len(choices) if place is None else place for place in places]] = 0.0
        return rows

    def score_choices(self, prompts: Sequence[str], choices: Sequence[str]) -> Rows:
        """Returns the same without the last column."""
        return self.score_with_other(prompts, choices)[:, :-1]

    def score_public(self, prompt: str, choices: Sequence[str]) -> Rows:
        """Returns the row of one prompt."""
        row: Rows = self.score_choices([prompt], choices)[0]
        return row

    async def ascore_with_other(self, prompts: Sequence[str], choices: Sequence[str]) -> Rows:
        """Is `score_with_other`."""
        return self.score_with_other(prompts, choices)

    async def ascore_choices(self, prompts: Sequence[str], choices: Sequence[str]) -> Rows:
        """Is `score_choices`."""
        return self.score_choices(prompts, choices)

    async def ascore_public(self, prompt: str, choices: Sequence[str]) -> Rows:
        """Is `score_public`."""
        return self.score_public(prompt, choices)


class Bench:
    """One run: its settings and its numbers."""

    def __init__(self, arguments: argparse.Namespace, model: Any) -> None:
        self.arguments = arguments
        self.engine = writer_of(arguments, model) if arguments.text_votes else as_choice_backend(model)
        self.numbers: dict[str, Any] = {}
        self.measured: dict[str, tuple[Bounds, list[Row], Curve]] = {}
        self._bounds: dict[Path, Bounds] = {}
        self.terms = TEXT_TERMS if arguments.text_votes else TERMS

    def shots(self, path: Path) -> tuple[int, ...]:
        """Returns how many records students show, each a column."""
        return (TEXT_SHOTS.get(stem_of(path), 4),) if self.arguments.text_votes else SHOTS

    def rows(self, path: Path, *, in_full: bool) -> list[Teaching]:
        """Returns the teachers of a data set."""
        if self.arguments.text_votes:
            return [Teaching("fresh", shots, noise=self.terms.noise) for shots in self.shots(path)]
        return [row for row in ROWS + MORE_ROWS * in_full if self.arguments.only in row.name]

    def run(self, path: Path, other: Path | None, *, rows: Sequence[Teaching]) -> None:
        """Measures and prints one setting."""
        asked = self.arguments
        words = dict(pair.split("=", 1) for pair in asked.words)
        options = {"questions": asked.questions, "cap": asked.cap, "seed": asked.seed, "most_chars": asked.most_chars}
        found = setting(path, other, words=words, **options)
        inputs = found.inputs(asked.inputs, seed=asked.seed)
        delta = min(asked.delta, 1 / (10 * len(inputs.private)))
        print(f"\n## {found.name}: {len(inputs.private):,} private records, {len(inputs.texts)} public inputs", end=" ")
        print(f"from {inputs.source}, {len(found.task.questions)} questions, {len(found.task.labels)} labels")
        size, terms, shots = len(inputs.private), self.terms, self.shots(path)
        prices: list[TeacherPrice] = []
        if asked.text_votes:
            print("\n".join(published_lines(PUBLISHED_TEXT.get(found.name))))
        else:
            most = min(terms.num_teachers, size)
            lowest = min(terms.delta, delta)
            noise, labels = terms.noise, len(found.task.labels)
            prices = compare_teachers(
                size, num_teachers=most, noise=noise, max_queries=terms.max_queries, delta=lowest, labels=labels
            )
            print("\n".join(honest_lines(found.name, size, prices, terms._replace(num_teachers=most, delta=delta))))
        bounds = self.bounds(path, found)
        print(f"\nthis run: {asked.teachers} teachers, delta {delta:g}, add_remove (fixed: replace_one)")
        print(head(shots))
        lines = {"candidates": UPPER_CANDIDATES, "teachers": asked.teachers, "questions": asked.ensemble_questions}
        print("\n".join(bounds_lines(bounds, **lines)), flush=True)
        kept = []
        for teaching in rows:
            kept.append(self.row(teaching, found, shown=shots, delta=delta))
            print(kept[-1].shown(bounds), flush=True)
        drawn = next((row for row in kept if row.teaching == CURVE), kept[-1])
        curve = self.curve(drawn, found, shots=max(shots), delta=delta)
        self.measured[found.name] = bounds, kept, curve
        self.numbers[found.name] = {
            "private_records": size,
            "public_inputs": len(inputs.texts),
            "source": inputs.source,
            "delta": delta,
            "honest_at_the_papers_terms": [price.to_dict() for price in prices],
            **bounds.to_dict(),
            "rows": {row.teaching.name: row.to_dict(bounds) for row in kept},
            "by_queries": curve.to_dict(),
        }

    def bounds(self, path: Path, found: Setting) -> Bounds:
        """Returns what students are compared with; the same for all settings of one private data set."""
        asked, task = self.arguments, found.task
        if path not in self._bounds:
            students = Students(task, self.engine)
            options = {"candidates": UPPER_CANDIDATES, "validation": asked.validation, "seed": asked.seed}
            self._bounds[path] = Bounds(
                zero={shots: students.hits((), shots=shots) for shots in self.shots(path)},
                upper={
                    shots: best_private_prompt_without_privacy(students, shots=shots, **options)
                    for shots in self._shown(self.shots(path), f"{found.name}: best private prompts")
                },
                constant=task.right == task.commonest,
                ensemble={
                    shots: ensemble_without_privacy(
                        task,
                        self.engine,
                        num_teachers=min(asked.teachers, len(task.records) // shots),
                        shots=shots,
                        questions=asked.ensemble_questions,
                    )
                    for shots in self._shown(self.shots(path), f"{found.name}: ensembles")
                },
            )
        return self._bounds[path]

    def row(self, teaching: Teaching, found: Setting, *, shown: Sequence[int], delta: float) -> Row:
        """Runs one kind of teachers, and the students of its labels, once per repeat."""
        asked, students = self.arguments, Students(found.task, self.engine)
        row = Row(teaching, students={shots: [] for shots in shown})
        for seed in self._shown(self._seeds(), f"{found.name}: {teaching.name}"):
            inputs = found.inputs(asked.inputs, seed=seed)
            taught = teach(
                teaching,
                found.task,
                inputs,
                self.engine,
                num_teachers=min(asked.teachers, len(inputs.private) // teaching.shots),
                delta=delta,
                abstain_below=asked.abstain_below,
                text_votes=asked.text_votes,
            )
            row.runs.append(taught)
            for shots in shown:
                row.students[shots].append(students.of_pool(taught.pool, shots=shots, **self._search(seed)))
        return row

    def curve(self, row: Row, found: Setting, *, shots: int, delta: float) -> Curve:
        """Returns what students make of the first inputs of each run: free, the labels are released."""
        students = Students(found.task, self.engine)
        most = len(row.runs[0].pool.entries)
        counts = tuple(sorted({*(count for count in QUERIES if count < most), most}))

        def accuracies(count: int) -> Iterator[float]:
            for seed, run in zip(self._seeds(), row.runs, strict=True):
                hits = students.of_pool(run.first(count), shots=shots, **self._search(seed))
                if hits is not None:
                    yield float(hits.mean())

        def price(count: int, run: Taught) -> float:
            terms = {"num_teachers": run.plan.design.num_slots, "width": run.plan.width, "delta": delta}
            return row.teaching.plan(run.plan.public_size, max_queries=count, **terms).epsilon

        found_by_count = tuple(
            tuple(accuracies(count)) for count in self._shown(counts, f"{found.name}: by number of inputs")
        )
        epsilons = tuple(price(count, row.runs[0]) for count in counts)
        return Curve(row.teaching.name, counts, epsilons, found_by_count, shots)

    def _seeds(self) -> range:
        return range(self.arguments.seed, self.arguments.seed + self.arguments.repeats)

    def _search(self, seed: int) -> dict[str, int]:
        return {"num_candidates": self.arguments.candidates, "num_validation": self.arguments.validation, "seed": seed}

    @staticmethod
    def _shown(items: Sequence[Any], desc: str) -> Any:
        return tqdm(items, desc=desc, leave=False, disable=None)


def public_of(path: Path, given: Sequence[str]) -> list[Path | None]:
    """Returns where the public inputs of a private file come from: itself, and every other file named for it."""
    pairs = [pair.rpartition("=") for pair in given]
    return [None, *(Path(other) for name, _, other in pairs if name in {"", stem_of(path)})]


def stem_of(path: Path) -> str:
    """Returns the name that a private file has in `--public`."""
    return path.name.partition(".")[0]


def model_of(asked: argparse.Namespace) -> Any:
    """Returns the embedded model, one by name, or one behind an OpenAI-compatible address."""
    if asked.model_url is None:
        found = load_model(Model(name=asked.model))
        return reads_once(found) if isinstance(found, EmbeddedModel) else found
    from langchain_openai import ChatOpenAI, OpenAI

    key = os.environ.get("OPENAI_API_KEY", "none")
    terms: dict[str, Any] = {"model": asked.model_name, "base_url": asked.model_url, "api_key": key}
    return OpenAI(**terms) if asked.completions else ChatOpenAI(**terms)


def writer_of(asked: argparse.Namespace, model: Any) -> TextVoteBackend:
    """Returns the same model as an engine of which only what it writes is seen."""
    if asked.model == "embedded" and asked.model_url is None:
        return BatchWriter()
    return TextVoteBackend(model)


def count(text: str) -> int:
    """Returns a number of things."""
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {text!r}")
    return int(text)


def word(text: str) -> str:
    """Returns a pair of label and word as it stands."""
    if "=" not in text:
        raise argparse.ArgumentTypeError(f"expected LABEL=WORD, found {text!r}")
    return text


def parsed(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the settings."""
    usage = "%(prog)s --data FILE [FILE ...] [--public [STEM=]FILE ...] [OPTION ...]"
    shape: Any = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter, "usage": usage}
    parser = argparse.ArgumentParser(**shape)
    add = parser.add_argument
    data: dict[str, Any] = {"type": Path, "nargs": "+", "default": [], "metavar": "FILE", "action": "append"}
    add("--data", **data, help="private data sets, one after the other; the last --data counts")
    add("--public", nargs="*", default=[], metavar="[STEM=]FILE", help="other public inputs, for all or one of them")
    add("--full", action="store_true", help="500 inputs, 50 candidates, every row for every setting: hours")
    add("--model", default="embedded", help="'embedded', or module:attribute of a model or engine")
    add("--model-url", metavar="URL", help="OpenAI-compatible address instead, ending in /v1; it SEES the records")
    add("--model-name", default="model", help="model name the server knows; the key is OPENAI_API_KEY")
    add("--completions", action="store_true", help="completion endpoint instead of chat")
    add("--inputs", type=count, help="public inputs; default 50, with --full 500, with --text-votes 200")
    add("--questions", type=count, help="questions for students; default 300")
    add("--candidates", type=count, help="student prompts tried; default 20, with --full 50")
    add("--validation", type=count, help="most labels held back to try them on; default 40, with --full 100")
    add("--ensemble-questions", type=count, help="questions for votes without noise; default 60, with --full 300")
    add("--teachers", type=count, help="expected teachers of an input; default 200, with --text-votes 400")
    add("--repeats", type=count, default=3, help="of the public choices")
    add("--delta", type=float, default=TERMS.delta, help="at most 1 / (10 * records) is taken")
    add("--abstain-below", type=float, help="share of the teachers that a label needs; default: none")
    add("--text-votes", action="store_true", help="see only what the model writes: the paper's setting of Claude")
    add("--only", default="", metavar="WORDS", help="of the rows those with this in their name")
    add("--cap", type=count, default=50_000, help="most private records")
    add("--most-chars", type=count, default=400, help="public inputs are cut to so many characters")
    add("--seed", type=int, default=0, help="public: questions, inputs, candidates; never noise or teachers")
    add("--words", type=word, nargs="*", default=[], metavar="LABEL=WORD", help="show a label as a word")
    add("--out", type=Path, default=Path("out"), metavar="FOLDER", help="of bench_pate.json and the pictures")
    arguments = parser.parse_args(given)
    # What make gives by default names its own files, also where another --data replaces them.
    stems = sorted({stem_of(path) for paths in arguments.data for path in paths})
    for name in (pair.rpartition("=")[0] for pair in arguments.public):
        if name and name not in stems:
            parser.error(f"--public {name}=: expected the stem of a --data file ({', '.join(stems) or 'none given'})")
    arguments.data = arguments.data[-1] if arguments.data else []
    if not any(arguments.only in row.name for row in ROWS + MORE_ROWS):
        parser.error(f"--only: expected words of a row ({', '.join(row.name for row in ROWS + MORE_ROWS)})")
    usual = {"teachers": TERMS.num_teachers, **(FULL if arguments.full else QUICK)}
    if arguments.text_votes:
        usual |= {"teachers": TEXT_TERMS.num_teachers, "inputs": TEXT_TERMS.max_queries}
    for name, value in usual.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments


def main() -> int:
    """Runs the benchmark; what the package refuses about the settings ends it with that one line."""
    asked = parsed()
    try:
        return measured(asked)
    except ConfigurationError as error:
        problem = str(error)
    print(f"bench_pate.py: {problem}", file=sys.stderr)
    return 2


def measured(asked: argparse.Namespace) -> int:
    """Measures every setting; returns the exit code."""
    started = time.perf_counter()
    settings = [(path, other) for path in asked.data for other in public_of(path, asked.public)]
    missing = {str(path) for pair in settings for path in pair if path is not None and not path.is_file()}
    if missing or not settings:
        print(f"no data file at {', '.join(sorted(missing)) or '...'}: give one with --data FILE.jsonl.gz")
        return 2
    bench = Bench(asked, model_of(asked))
    print(LEGEND)
    for place, (path, other) in enumerate(settings):
        in_full = asked.full or place == len(settings) - 1
        bench.run(path, other, rows=bench.rows(path, in_full=in_full))
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "bench_pate.json").write_text(json.dumps(bench.numbers, indent=2))
    drawn = ", ".join(str(path) for path in pictures(bench.measured, asked.out))
    print(f"\npictures: {drawn}" if drawn else "\nno pictures: pip install matplotlib")
    print(f"numbers in {asked.out / 'bench_pate.json'}, {time.perf_counter() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
