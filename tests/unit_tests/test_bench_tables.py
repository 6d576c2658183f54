"""The tables' own promises: nothing is measured twice, a killed run goes on, closures are honest, coins stay secret."""

from __future__ import annotations

import ast
import csv
import inspect
import json
import math
import random
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bench_tables
from _tables_cells import (
    INSTRUCTION,
    NOISELESS,
    NON_PRIVATE,
    ZERO,
    Cell,
    CellStore,
    Clock,
    Done,
    Task,
    lasting,
    missing,
)
from _tables_cost import RECORD_TOKENS, cost_of
from _tables_files import (
    LABELS,
    SLOTS,
    DataFile,
    data_file,
    exact,
    generation_task,
    labelled,
    overlap,
    slot_task,
    spans,
)
from _tables_methods import Grid, Method, methods_of
from _tables_pages import Tables, _setting_lines, show_on_page, write_pages
from _tables_papers import Paper, beside
from _tables_room import Engines, Room, epsilon_of, reads_once
from _tables_soft import SoftModels, found_base
from _tables_sums import Column, closed, closed_shown, columns, share_closed

from langchain_dpicl.audit import plots
from langchain_dpicl.backends.embedded import EmbeddedModel
from langchain_dpicl.exceptions import ConfigurationError, ModelCallError
from langchain_dpicl.privacy.mechanisms import randomness
from tests.bench_doubles import written

BENCHMARKS = Path(bench_tables.__file__).parent
SECRET = "the canary sings at noon"
MOVES = [
    {"text": f"{word} we go number {i}", "label": code, "label_name": word, "split": split}
    for split, count in (("train", 120), ("test", 12))
    for code, word in enumerate(("up", "down"))
    for i in range(count)
]
GENRES = ("comedy", "horror", "western", "drama", "musical")
FILMS = [
    {"text": f"show me a {i} {GENRES[i % 5]} film please", "label": f"{i} {GENRES[i % 5]}", "split": split}
    for split, count in (("train", 90), ("test", 10))
    for i in range(count)
]


@pytest.fixture
def moves(tmp_path: Path) -> DataFile:
    return data_file(written(tmp_path / "moves.jsonl", MOVES), words={})


@pytest.fixture
def films(tmp_path: Path) -> DataFile:
    return data_file(written(tmp_path / "films.jsonl", FILMS), words={})


@pytest.fixture(autouse=True)
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What would have been drawn; the picture itself has its own tests."""
    kept: list[dict[str, Any]] = []
    takes = inspect.signature(plots.plot_utility)
    monkeypatch.setattr(plots, "plot_utility", lambda *args, **named: kept.append(takes.bind(*args, **named).arguments))
    return kept


@pytest.fixture(scope="module")
def engines() -> Engines:
    return Engines(EmbeddedModel(), is_embedded=True)


@dataclass
class Counted:
    """Measures nothing; counts, and stops where asked to."""

    stops_at: int | None = None
    error: type[BaseException] = KeyboardInterrupt
    cells: list[Cell] = field(default_factory=list)

    def __call__(self, room: Room, cell: Cell, knobs: Mapping[str, Any]) -> dict[str, float]:
        if len(self.cells) == self.stops_at:
            raise self.error("stopped")
        self.cells.append(cell)
        return {"accuracy": 0.25}


def counted_method(measure: Counted, name: str = "voting", **changes: Any) -> Method:
    return replace(methods_of(SoftModels(None))[name], measure=measure, ablations={}, **changes)


def grid_of(file: DataFile, *methods: Method, **changes: Any) -> Grid:
    terms: dict[str, Any] = {
        "methods": methods,
        "files": [file],
        "epsilons": [1.0, 8.0],
        "seeds": 2,
        "is_quick": True,
        "given": {},
        "model": "embedded",
        "has_ablations": False,
        "ablation_files": [file.stem],
        "ablation_seeds": 1,
    }
    return Grid(**{**terms, **changes})


def run_of(store: CellStore, grid: Grid) -> bench_tables.Run:
    engines = Engines(None, is_embedded=False)
    return bench_tables.Run(
        store, {one.name: one for one in grid.methods}, {one.stem: one for one in grid.files}, engines
    )


# ---------------------------------------------------------------------------------------------------- finished cells


class TestFinishedCells:
    @pytest.mark.parametrize("error", [KeyboardInterrupt, ModelCallError])
    def test_a_run_that_stops_in_the_middle_goes_on_where_it_stopped(
        self, tmp_path: Path, moves: DataFile, error: type[BaseException]
    ) -> None:
        store, first, second = CellStore(tmp_path / "cells.jsonl"), Counted(stops_at=4, error=error), Counted()
        grid = grid_of(moves, counted_method(first))
        with pytest.raises(error):
            run_of(store, grid).go(grid.tasks(), minutes=None)
        assert run_of(store, grid_of(moves, counted_method(second))).go(grid.tasks(), minutes=None).startswith("every")
        wanted = [task.cell for task in grid.tasks()]
        assert len(wanted) == 2 * 5
        assert first.cells == wanted[:4]
        assert second.cells == wanted[4:]

    def test_a_process_that_is_killed_while_it_writes_loses_that_cell_alone(
        self, tmp_path: Path, moves: DataFile
    ) -> None:
        store, measure = CellStore(tmp_path / "cells.jsonl"), Counted()
        grid = grid_of(moves, counted_method(measure))
        tasks = grid.tasks()
        script = (
            "import json, os, pathlib, signal, sys\n"
            f"sys.path.insert(0, {str(BENCHMARKS)!r})\n"
            "from _tables_cells import Cell, CellStore, Task\n"
            "store = CellStore(pathlib.Path(sys.argv[1]))\n"
            "tasks = [Task(Cell(**cell), settings) for cell, settings in json.load(sys.stdin)]\n"
            "with store.alone():\n"
            "    for task in tasks[:3]:\n"
            "        store.append(task, {'accuracy': .5}, seconds=1.0)\n"
            '    store.path.open(\'a\').write(\'{"cell": {"method": "vot\')\n'
            "    os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        told = json.dumps([[vars(task.cell), dict(task.settings)] for task in tasks])
        killed = subprocess.run([sys.executable, "-c", script, str(store.path)], input=told.encode(), check=False)
        assert killed.returncode == -9
        assert not store.path.read_bytes().endswith(b"\n")
        run_of(store, grid).go(tasks, minutes=None)
        assert measure.cells == [task.cell for task in tasks[3:]]
        assert [json.loads(line)["result"] for line in store.path.read_text().splitlines()] == [
            {"accuracy": 0.5}
        ] * 3 + [{"accuracy": 0.25}] * 7

    def test_finished_cells_are_not_run_again_and_more_epsilons_run_alone(
        self, tmp_path: Path, moves: DataFile
    ) -> None:
        store, measure = CellStore(tmp_path / "cells.jsonl"), Counted()
        grid = grid_of(moves, counted_method(measure))
        for _ in range(2):
            run_of(store, grid).go(grid.tasks(), minutes=None)
        assert len(measure.cells) == len(set(measure.cells)) == len(grid.tasks())
        more = grid_of(moves, counted_method(measure), epsilons=[1.0, 2.0, 8.0])
        run_of(store, more).go(more.tasks(), minutes=None)
        assert [(cell.at, cell.seed) for cell in measure.cells[len(grid.tasks()) :]] == [("2", 0), ("2", 1)]

    @pytest.mark.parametrize("changed", ["questions", "quick", "file", "model", "words"])
    def test_cells_whose_settings_changed_are_measured_anew(
        self, tmp_path: Path, moves: DataFile, changed: str
    ) -> None:
        other = data_file(written(tmp_path / "moves.jsonl", [*MOVES, MOVES[0]]), words={})
        grid = grid_of(moves, counted_method(Counted()))
        new = {
            "questions": replace(grid, given={"questions": 77}),
            "quick": replace(grid, is_quick=False),
            "file": replace(grid, files=[other]),
            "model": replace(grid, model="package.module:llm"),
            "words": replace(grid, files=[replace(moves, words={"up": "rise"})]),
        }[changed]
        done = {task.fingerprint: Done(task.cell, task.fingerprint, {}, 0.0) for task in grid.tasks()}
        assert missing(grid.tasks(), done) == []
        assert missing(new.tasks(), done) == new.tasks()
        assert [task.cell for task in new.tasks()] == [task.cell for task in grid.tasks()]

    def test_two_runs_on_one_file_are_refused(self, tmp_path: Path, moves: DataFile) -> None:
        store, grid = CellStore(tmp_path / "cells.jsonl"), grid_of(moves, counted_method(Counted()))
        with store.alone(), pytest.raises(SystemExit, match="expected no other run"):
            run_of(store, grid).go(grid.tasks(), minutes=None)
        assert run_of(store, grid).go(grid.tasks(), minutes=None)

    @pytest.mark.parametrize("line", [SECRET, "[]", '{"cell": {"method": "x"}}', '{"cell": 3}'])
    def test_a_file_with_a_line_that_is_no_cell_is_refused(self, tmp_path: Path, moves: DataFile, line: str) -> None:
        store, measure = CellStore(tmp_path / "cells.jsonl"), Counted()
        grid = grid_of(moves, counted_method(measure))
        store.append(grid.tasks()[0], {"accuracy": 1.0}, seconds=0.0)
        with store.path.open("a") as file:
            file.write(line + "\n")
        with pytest.raises(SystemExit, match="line 2: expected a finished cell") as caught:
            run_of(store, grid).go(grid.tasks(), minutes=None)
        assert SECRET not in str(caught.value)
        assert measure.cells == []

    def test_cells_that_are_kept_with_the_code_are_not_run_again_and_stay_as_they_are(
        self, tmp_path: Path, moves: DataFile
    ) -> None:
        first, second = Counted(), Counted()
        grid = grid_of(moves, counted_method(first))
        store, kept = CellStore(tmp_path / "cells.jsonl"), CellStore(tmp_path / "kept.jsonl")
        run_of(store, grid).go(grid.tasks()[:4], minutes=None)
        kept.keep(store.read())
        before = kept.path.read_bytes()
        assert kept.read() == store.read()
        assert b"settings" not in before
        again = CellStore(tmp_path / "other.jsonl", kept=kept.path)
        run_of(again, grid_of(moves, counted_method(second))).go(grid.tasks(), minutes=None)
        assert second.cells == [task.cell for task in grid.tasks()[4:]]
        assert len(again.read()) == len(grid.tasks())
        assert kept.path.read_bytes() == before

    def test_no_cell_is_begun_after_the_minutes_are_over(self, tmp_path: Path, moves: DataFile) -> None:
        store, measure = CellStore(tmp_path / "cells.jsonl"), Counted()
        grid = grid_of(moves, counted_method(measure))
        said = run_of(store, grid).go(grid.tasks(), minutes=1e-9)
        assert measure.cells == []
        assert "10 cells left" in said

    def test_the_time_that_is_left_comes_from_cells_of_the_same_kind(self) -> None:
        def cell(at: str, seed: int, method: str = "voting") -> Task:
            return Task(Cell(method, "trec", at, seed), {})

        clock = Clock([Done(cell(ZERO, 0).cell, "", {}, 1.0), Done(cell("4", 0).cell, "", {}, 30.0)])
        assert clock.left([cell(ZERO, 1), cell("4", 1), cell("8", 1)]) == 1.0 + 30.0 + 30.0
        assert clock.left([cell("4", 1, "pate")]) == 15.5
        assert clock.guessed([cell("8", 1), cell(ZERO, 1), cell("4", 1, "pate"), cell("8", 1, "pate")]) == 2
        assert Clock().left([cell("4", 1)]) is None
        assert [lasting(seconds) for seconds in (None, 30.0, 600.0, 7200.0)] == [
            "time left unknown",
            "about 30 s left",
            "about 10 min left",
            "about 2.0 h left",
        ]


# ------------------------------------------------------------------------------------------------------------ closure


def found_of(**by_at: Any) -> dict[str, Column]:
    named = {"zero": ZERO, "without": NON_PRIVATE, "private": "4"}
    return {named[name]: Column(dict(enumerate(values))) for name, values in by_at.items()}


def asking(questions: int) -> dict[str, int]:
    """As many questions as there are, all of them asked by every seed."""
    return {"questions": questions, "most": questions}


class TestClosure:
    def test_the_share_is_that_of_the_gap_between_the_means(self) -> None:
        found = found_of(zero=[0.2, 0.3], private=[0.4, 0.5], without=[0.6, 0.7])
        assert closed(found, "4", **asking(1000)) == pytest.approx(0.5)
        assert closed_shown(found, "4", commonest=0.1, **asking(1000)) == "50"

    @pytest.mark.parametrize(
        ("zero", "private", "without", "share"),
        [(0.2, 0.1, 0.4, -0.5), (0.2, 0.5, 0.4, 1.5), (0.2, 0.2, 0.4, 0.0), (0.2, 0.4, 0.4, 1.0)],
    )
    def test_it_may_be_negative_or_above_one(self, zero: float, private: float, without: float, share: float) -> None:
        assert share_closed(zero, private, without) == pytest.approx(share)

    @pytest.mark.parametrize("without", [[0.5, 0.5], [0.4, 0.4], [0.51, 0.51]])
    def test_there_is_no_gap_where_non_private_is_not_better_than_zero_shot(self, without: list[float]) -> None:
        found = found_of(zero=[0.5, 0.5], private=[0.9, 0.9], without=without)
        assert closed(found, "4", **asking(200)) is None
        assert closed_shown(found, "4", commonest=0.1, **asking(200)) == "no gap"
        assert share_closed(0.5, 0.9, 0.5) is None

    def test_few_questions_and_seeds_that_differ_make_no_gap(self) -> None:
        found = found_of(zero=[0.3, 0.3, 0.3], private=[0.35, 0.35, 0.35], without=[0.4, 0.4, 0.4])
        assert closed(found, "4", **asking(1000)) == pytest.approx(0.5)
        assert closed(found, "4", **asking(50)) is None
        apart = found_of(zero=[0.3, 0.3, 0.3], private=[0.35, 0.35, 0.35], without=[0.1, 0.4, 0.7])
        assert closed(apart, "4", **asking(100_000)) is None

    @pytest.mark.parametrize(("commonest", "shown"), [(0.3, "50"), (0.39, "50 †"), (0.6, "50 †")])
    def test_a_share_says_little_where_the_commonest_answer_is_as_good(self, commonest: float, shown: str) -> None:
        found = found_of(zero=[0.2], private=[0.3], without=[0.4])
        assert closed_shown(found, "4", commonest=commonest, **asking(1000)) == shown

    def test_questions_count_for_the_seeds_that_are_finished_and_once(self) -> None:
        one = found_of(zero=[0.3], private=[0.35], without=[0.4])
        three = found_of(zero=[0.3] * 3, private=[0.35] * 3, without=[0.4] * 3)
        assert closed(one, "4", questions=100, most=10_000) is None
        assert closed(three, "4", questions=100, most=10_000) == pytest.approx(0.5)
        assert closed(three, "4", questions=100, most=100) is None

    def test_only_seeds_that_all_columns_have_are_compared(self) -> None:
        found = found_of(zero=[0.2, 0.2], private=[0.3], without=[0.4, 0.9])
        assert closed(found, "4", **asking(10_000)) == pytest.approx(0.5)
        assert closed_shown({ZERO: found[ZERO]}, "4", commonest=0.1, **asking(10_000)) == ""

    def test_means_and_spreads_are_over_seeds(self) -> None:
        cells = [
            Done(Cell("voting", "trec", "4", seed), "", {"accuracy": share}, 0.0)
            for seed, share in enumerate((0.2, 0.4))
        ]
        assert columns(cells)["4"].shown == "30.0 ± 14.1"
        assert columns(cells[:1])["4"].shown == "20.0"
        assert columns(cells, number="raw") == {}

    def test_the_papers_closures_follow_from_what_they_print(self) -> None:
        shown = {row[:3]: row[-1] for row in beside()}
        closures = {
            ("voting", "AGNews", "Panda et al. (2023), 10 x 4, 10,000 queries"): "77 at 1, 93 at 3, 95 at 8",
            ("voting", "Amazon", "Panda et al. (2023), 10 x 4, 10,000 queries"): "87 at 1, 98 at 3, 100 at 8",
            ("generation", "TREC", "Tang et al. (2023), Table 1, 4 shots, babbage"): "101 at 1",
            ("generation", "AGNews", "Tang et al. (2023), Table 1, 4 shots, babbage"): "unknown",
            ("promptdpsgd", "SST-2", "Duan et al. (2023), soft prompt, RoBERTa-base"): "unknown",
        }
        assert {row: shown[row] for row in closures} == closures
        assert {row[:2]: row[3:5] for row in beside()}["generation", "AGNews"] == ("47.9", "68.0")
        assert Paper("", None, {1.0: 50.0}, 60.0).closed(1.0) is None
        assert Paper("", 40.0, {1.0: 50.0}, 60.0).closed(2.0) is None

    @pytest.mark.parametrize(
        ("data", "model", "closed"),
        [
            ("SST-2", "Babbage", "71 at 0.178"),
            ("AGNews", "Babbage", "60 at 0.248"),
            ("TREC", "Babbage", "67 at 0.281"),
            ("DBPedia", "Babbage", "87 at 0.194"),
            ("SST-2", "Claude", "57 at 0.048"),
        ],
    )
    def test_promptpate_in_the_paper_closes_what_its_three_columns_say(
        self, data: str, model: str, closed: str
    ) -> None:
        found = [row[-1] for row in beside() if row[:2] == ("pate", data) and model in row[2]]
        assert closed in found


# --------------------------------------------------------------------------------------------------------- data sets


class TestFiles:
    def test_many_answers_make_slots_and_few_make_labels(self, moves: DataFile, films: DataFile) -> None:
        assert (moves.kind, moves.train, moves.test, moves.commonest) == (LABELS, 240, 24, 0.5)
        assert (films.kind, films.train, films.test, films.commonest) == (SLOTS, 90, 10, 0.1)

    @pytest.mark.parametrize(
        ("name", "content", "problem"),
        [
            ("a.jsonl", None, "no data file"),
            ("a.jsonl", SECRET, "line 1: expected one JSON object"),
            ("a.jsonl", json.dumps({"label": SECRET, "split": "train"}), "expected a JSON object with text"),
            ("a.jsonl", json.dumps({"text": SECRET, "split": "train"}), "with label"),
            ("a.jsonl", json.dumps({"text": SECRET, "label": 1, "split": "dev"}), "with label"),
            ("a.jsonl", "\n".join(json.dumps(row) for row in MOVES if row["split"] == "train"), "both splits"),
            ("a.jsonl", "\n".join(json.dumps(row) for row in FILMS if row["split"] == "train"), "both train and test"),
            ("a.jsonl.gz", SECRET, "expected a readable gzipped file"),
        ],
        ids=["missing", "no JSON", "no text", "no label", "no split", "labels untested", "slots untested", "no gzip"],
    )
    def test_a_wrong_file_is_refused_before_any_cell_runs(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str | None, problem: str
    ) -> None:
        path, good = tmp_path / name, written(tmp_path / "good.jsonl", MOVES)
        if content is not None:
            path.write_text(content)
        with pytest.raises(SystemExit, match=problem) as caught:
            bench_tables.main(["--data", str(good), str(path), "--out", str(tmp_path / "out")])
        assert SECRET not in str(caught.value) + capsys.readouterr().out
        assert not (tmp_path / "out").exists()

    def test_two_files_of_one_name_are_refused(self, tmp_path: Path) -> None:
        paths = [written(tmp_path / name, MOVES) for name in ("a.jsonl", "a.json")]
        with pytest.raises(SystemExit, match="found a twice"):
            bench_tables.main(["--data", *map(str, paths)])
        with pytest.raises(SystemExit, match="no data"):
            bench_tables.main([])

    def test_the_seed_decides_what_is_asked_and_nothing_else_does(self, moves: DataFile, films: DataFile) -> None:
        terms: dict[str, Any] = {"questions": 6, "cap": 50}
        for draw, file in ((labelled, moves), (slot_task, films)):
            first, again, other = (draw(file, seed=seed, **terms) for seed in (1, 1, 2))
            assert (first.questions, first.records) == (again.questions, again.records)
            assert first.questions != other.questions
            assert (len(first.questions), len(first.records)) == (6, 50)

    def test_a_label_with_few_records_is_left_out_of_generation(self, tmp_path: Path) -> None:
        rows = [*MOVES, *({"text": f"left {i}", "label": 2, "label_name": "left", "split": "train"} for i in range(9))]
        file = data_file(written(tmp_path / "moves.jsonl", rows), words={"up": "rise"})
        task = generation_task(labelled(file, questions=20, seed=0, cap=1000), min_size=10)
        assert (task.labels, task.dropped) == (("down", "rise"), {"left": 9})
        assert {row["label_name"] for row in task.train + task.test} == {"down", "rise"}
        with pytest.raises(SystemExit, match="expected two labels"):
            generation_task(labelled(file, questions=20, seed=0, cap=1000), min_size=500)

    def test_an_answer_counts_where_it_is_exactly_what_was_to_be_found(self) -> None:
        assert [exact(answer, "Dark Comedy") for answer in ("dark  comedy.", "comedy", "")] == [1.0, 0.0, 0.0]
        assert overlap("comedy", "dark comedy") == pytest.approx(2 / 3)
        assert overlap("", "dark comedy") == 0.0
        assert spans("a b c d") == ["a", "a b", "a b c", "b", "b c", "b c d", "c", "c d", "d"]
        assert spans(" ") == [" "]


# ------------------------------------------------------------------------------------------------------------- coins

SMALL: dict[str, dict[str, Any]] = {
    "voting": {"questions": 4, "queries": 4, "draws": 2, "num_slots": 4},
    "pate": {"questions": 4, "inputs": 6, "teachers": 4, "candidates": 2, "validation": 3},
    "generation": {"questions": 4, "shots": 1, "max_tokens": 2, "num_slots": 4},
    "slots": {"questions": 4, "shots": 1, "max_tokens": 2, "max_label_tokens": 1, "num_slots": 4},
    "free-form": {"questions": 3, "queries": 3, "num_slots": 4},
}


def measured(name: str, file: DataFile, engines: Engines, *, at: str, seed: int = 3) -> dict[str, float]:
    method = methods_of(SoftModels(None))[name]
    return method.measure(Room(file, engines, {}), Cell(name, file.stem, at, seed), {**method.knobs, **SMALL[name]})


def global_state() -> list[int]:
    state: list[int] = np.random.get_state()[1].tolist()  # noqa: NPY002  the generator that nobody may touch
    return state


def test_a_model_that_reads_each_text_once_says_the_same() -> None:
    plain, once = EmbeddedModel(), reads_once(EmbeddedModel())
    prompts = [f"Text: {row['text']}\nLabel: {row['label_name']}\n\nText: down we go\nLabel:" for row in MOVES[:3]]
    for _ in range(2):
        assert np.array_equal(
            once.score_choices(prompts, [" up", " down"]), plain.score_choices(prompts, [" up", " down"])
        )
        assert once.complete(prompts, max_tokens=3) == plain.complete(prompts, max_tokens=3)


@pytest.mark.parametrize(("count", "free"), [(0, set()), (1, {"N/A"}), (3, {"N/A", "", "[MASK]"})])
def test_voters_are_calibrated_on_as_many_inputs_without_content_as_the_cell_says(
    count: int, free: set[str], moves: DataFile, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    real = EmbeddedModel.score_choices

    def heard(model: EmbeddedModel, prompts: Sequence[str], choices: Sequence[str]) -> Any:
        asked.extend(prompts)
        return real(model, prompts, choices)

    monkeypatch.setattr(EmbeddedModel, "score_choices", heard)
    method = methods_of(SoftModels(None))["voting"]
    knobs = {**method.knobs, **SMALL["voting"], "content_free": count}
    method.measure(Room(moves, engines, {}), Cell("voting", "moves", NON_PRIVATE, 0), knobs)
    texts = {prompt.rpartition("Text: ")[2].removesuffix("\nLabel:") for prompt in asked}
    assert {text for text in texts if " we go number " not in text} == free


class TestCoins:
    @pytest.mark.parametrize("name", list(SMALL))
    def test_private_cells_draw_from_the_operating_system_and_from_no_seed(
        self, name: str, moves: DataFile, films: DataFile, engines: Engines, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        drawn: list[bytes] = []
        real = randomness.os.urandom

        def recorded(count: int) -> bytes:
            drawn.append(real(count))
            return drawn[-1]

        monkeypatch.setattr(randomness.os, "urandom", recorded)
        states = random.getstate(), global_state()
        file = films if name in {"slots", "free-form"} else moves
        found = measured(name, file, engines, at="8")
        assert 0.0 <= found["accuracy"] <= 1.0
        assert sum(map(len, drawn)) >= 32
        assert states == (random.getstate(), global_state())

    def test_free_columns_read_no_record_and_draw_no_secret_coin(
        self, moves: DataFile, films: DataFile, engines: Engines, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refused(count: int) -> bytes:
            raise AssertionError

        monkeypatch.setattr(randomness.os, "urandom", refused)
        for name in SMALL:
            file = films if name in {"slots", "free-form"} else moves
            assert measured(name, file, engines, at=ZERO) == measured(name, file, engines, at=ZERO)

    def test_seeds_stand_in_no_place_but_the_public_choices(self) -> None:
        paths = [*BENCHMARKS.glob("_tables_*.py"), BENCHMARKS / "bench_tables.py"]
        called = [
            f"{path.name}: {ast.unparse(node)}"
            for path in paths
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call)
        ]
        seeding = re.compile(r"(seed|default_rng|RandomState|Generator|PCG64)\(")
        assert len(paths) > 8
        assert [call for call in called if seeding.search(call.partition(": ")[2].partition("(")[0] + "(")] == []
        coins = [call for call in called if ": random.Random(" in call and ")." not in call]
        assert coins
        assert [call for call in coins if "seed" not in call] == []

    def test_a_column_without_an_epsilon_has_none(self) -> None:
        assert epsilon_of(Cell("voting", "trec", "2", 0)) == 2.0
        for at in (ZERO, INSTRUCTION, NOISELESS):
            assert Cell("voting", "trec", at, 0).epsilon is None
            with pytest.raises(ConfigurationError, match="expected an epsilon"):
                epsilon_of(Cell("voting", "trec", at, 0))


# ------------------------------------------------------------------------------------------------- grid, pages, costs


class TestGrid:
    def test_the_first_seed_of_everything_comes_first_and_kinds_match(self, moves: DataFile, films: DataFile) -> None:
        methods = [one for one in methods_of(SoftModels(None)).values() if one.name != "promptdpsgd"]
        grid = grid_of(moves, *methods, files=[moves, films], has_ablations=True, fewer={"pate": 1})
        tasks = grid.tasks()
        plain = [task.cell for task in tasks if not task.cell.variant]
        assert [cell.seed for cell in plain] == sorted(cell.seed for cell in plain)
        assert {(cell.method, cell.data) for cell in plain} == {
            *((name, "moves") for name in ("generation", "voting", "pate")),
            *((name, "films") for name in ("free-form", "slots")),
        }
        assert {cell.seed for cell in plain if cell.method == "pate"} == {0}
        ats = [cell.at for cell in plain if (cell.method, cell.seed) == ("generation", 0)]
        assert ats == [ZERO, INSTRUCTION, "1", "8", NOISELESS, NON_PRIVATE]
        assert len({task.fingerprint for task in tasks}) == len(tasks)
        smaller = {task.cell.variant for task in tasks if "longest_match" in task.cell.variant}
        assert smaller == {f"longest_match={match}" for match in (1, 2, 4)}
        others = replace(grid, model="package.module:llm").tasks()
        assert len(others) > len(tasks) / 2
        assert not [task.cell for task in others if "longest_match" in task.cell.variant]

    def test_a_paper_s_settings_are_of_its_data_set_and_quick_and_given_ones_come_before_them(
        self, moves: DataFile
    ) -> None:
        method = counted_method(Counted(), own={"moves": {"draws": 7, "questions": 1_000}})
        other = replace(moves, path=moves.path.with_name("others.jsonl"))
        grid = grid_of(moves, method, files=[moves, other], is_quick=False, has_ablations=True)
        assert [grid.knobs(method, file)["draws"] for file in (moves, other)] == [7, method.knobs["draws"]]
        assert {task.settings["knobs"]["draws"] for task in grid.tasks() if task.cell.data == "moves"} == {7}
        of_file = [line for line in _setting_lines(Tables(grid, {})) if " on " in line]
        assert [(line[:12], "draws 7" in line) for line in of_file] == [("  - on moves", True)]
        quick = replace(grid, is_quick=True, given={"questions": 9})
        found = quick.knobs(method, moves)
        assert (found["draws"], found["questions"]) == (method.quick["draws"], 9)
        assert not [line for line in _setting_lines(Tables(quick, {})) if " on " in line]

    def test_every_ablation_changes_a_knob_to_another_value(self) -> None:
        for method in methods_of(SoftModels(None)).values():
            for is_quick in (False, True):
                usual = method.knobs_of(is_quick=is_quick, given={}, variant="")
                for variant in method.variants(usual):
                    changed = method.knobs_of(is_quick=is_quick, given={}, variant=variant)
                    assert [name for name in usual if usual[name] != changed[name]] == [variant.partition("=")[0]]
                assert all(any(value != usual[knob] for value in values) for knob, values in method.ablations.items())

    def test_smaller_models_are_those_of_the_embedded_one(self, engines: Engines) -> None:
        assert engines.of(None) is engines.model
        assert engines.of(2) is engines.of(2) is not engines.model
        with pytest.raises(ConfigurationError, match="expected the embedded model"):
            Engines(object(), is_embedded=False).of(2)


def done_of(grid: Grid, shares: Mapping[str, float], *, seeds: int = 2) -> dict[str, Done]:
    found = {}
    for task in grid.tasks():
        if task.cell.at in shares and task.cell.seed < seeds:
            result = {"accuracy": shares[task.cell.at], "raw": 0.125}
            found[task.fingerprint] = Done(task.cell, task.fingerprint, result, 1.0)
    return found


@pytest.mark.benches
class TestPages:
    def test_tables_show_means_closures_and_what_is_missing(
        self, tmp_path: Path, moves: DataFile, drawn: list[dict[str, Any]]
    ) -> None:
        grid = grid_of(moves, methods_of(SoftModels(None))["voting"], given={"questions": 500})
        shares = {ZERO: 0.1, INSTRUCTION: 0.2, "1": 0.3, NON_PRIVATE: 0.9}
        written_files = write_pages(grid, done_of(grid, shares), tmp_path / "out", price_in=1.0, price_out=4.0)
        page = (tmp_path / "out" / "tables.md").read_text()
        assert "| moves | votes per query | 10.0 ± 0.0 | 20.0 ± 0.0 | 30.0 ± 0.0 | - |  | 90.0 ± 0.0 |" in page
        assert "| moves | votes per query | 25 | - | the same votes without noise |" in page
        assert "| voting | moves | main table | 2 |" in page
        assert "8 of 10 cells finished" in page
        rows = list(csv.DictReader((tmp_path / "out" / "tables.csv").open()))
        assert {row["column"]: row["closed"] for row in rows if row["number"] == "accuracy"}["1"] == "0.25"
        assert {row["mean"] for row in rows if row["number"] == "raw"} == {"0.125"}
        (picture,) = drawn
        row = ("votes per query", "moves")
        assert picture["rows"] == [(*row, 0.0, 0.1, 0.0), (*row, 1.0, 0.3, 0.0), (*row, math.inf, 0.9, 0.0)]
        assert {path.name for path in written_files} == {"tables.md", "tables.csv", "cost.csv", "utility.png"}

    def test_a_gap_that_is_none_is_called_so_and_missing_seeds_are_counted(
        self, tmp_path: Path, moves: DataFile
    ) -> None:
        grid = grid_of(moves, methods_of(SoftModels(None))["voting"])
        shares = {ZERO: 0.5, "1": 0.6, "8": 0.7, NON_PRIVATE: 0.4}
        write_pages(grid, done_of(grid, shares, seeds=1), tmp_path, price_in=1.0, price_out=4.0)
        page = (tmp_path / "tables.md").read_text()
        assert "| moves | votes per query | no gap | no gap |" in page
        assert "50.0 (1)" in page

    def test_ablations_stand_beside_the_value_of_the_main_table(self, moves: DataFile, tmp_path: Path) -> None:
        voting = replace(methods_of(SoftModels(None))["voting"], ablations={"shots": (1, 8)})
        grid = grid_of(moves, voting, has_ablations=True, epsilons=[4.0])
        done = done_of(grid, {"4": 0.5, NON_PRIVATE: 0.75})
        write_pages(grid, done, tmp_path, price_in=1.0, price_out=4.0)
        lines = [line for line in (tmp_path / "tables.md").read_text().splitlines() if "| shots |" in line]
        assert lines == [
            "| votes per query | shots | 1 | eps 4 | 50.0 |",
            "| votes per query | shots | 1 | non-private | 75.0 |",
            "| votes per query | shots | 4 * | eps 4 | 50.0 ± 0.0 |",
            "| votes per query | shots | 4 * | non-private | 75.0 ± 0.0 |",
            "| votes per query | shots | 8 | eps 4 | 50.0 |",
            "| votes per query | shots | 8 | non-private | 75.0 |",
        ]
        assert Tables(grid, done).missing == [task for task in grid.tasks() if task.cell.at not in {"4", NON_PRIVATE}]
        plain = {key: one for key, one in done.items() if not one.cell.variant}
        write_pages(grid, plain, tmp_path, price_in=1.0, price_out=4.0)
        assert "| shots |" not in (tmp_path / "tables.md").read_text()

    def test_the_page_shows_the_ends_of_finished_rows_between_its_marks(self, tmp_path: Path, moves: DataFile) -> None:
        methods = methods_of(SoftModels(None))
        grid = grid_of(moves, methods["voting"], methods["pate"])
        done = {k: one for k, one in done_of(grid, {ZERO: 0.1, "8": 0.3}).items() if one.cell.method == "voting"}
        write_pages(grid, done, tmp_path / "out", price_in=1.0, price_out=4.0)
        page, results, picture = tmp_path / "page.md", tmp_path / "results", tmp_path / "pictures" / "utility.png"
        results.mkdir()
        picture.parent.mkdir()
        (tmp_path / "out" / "utility.png").write_bytes(b"drawn")
        page.write_text("before\n\n<!-- written by make tables, quick -->old<!-- end -->\n\nafter\n")
        for _ in range(2):
            show_on_page(grid, done, tmp_path / "out", results=results, page=page)
        lines = page.read_text().splitlines()
        assert (lines[0], lines[-1]) == ("before", "after")
        assert [line for line in lines if line.startswith("| m")] == [
            "| moves | votes per query | 10.0±0.0 | - | 30.0±0.0 | - |"
        ]
        assert "old" not in page.read_text()
        assert (results / "tables-quick.md").read_text() == (tmp_path / "out" / "tables.md").read_text()
        assert "| voting | TREC |" in (results / "papers.md").read_text()
        assert not picture.exists()
        page.write_text("<!-- written by make tables, full -->old<!-- end -->\n")
        show_on_page(replace(grid, is_quick=False), {}, tmp_path / "out", results=results, page=page)
        assert picture.read_bytes() == b"drawn"
        page.write_text("no marks")
        with pytest.raises(SystemExit, match="expected <!-- written by make tables, quick -->"):
            show_on_page(grid, done, tmp_path / "out", results=results, page=page)

    def test_costs_are_those_of_the_plans_at_the_prices_that_are_given(self, moves: DataFile, films: DataFile) -> None:
        methods = methods_of(SoftModels(None))
        knobs = {**methods["voting"].knobs, "queries": 1000}
        row = cost_of(methods["voting"], moves, knobs)
        assert (row.private_calls, row.public_calls, row.tokens_out) == (10_000, 1_000, 11_000)
        assert row.tokens_in > 10_000 * 2 * RECORD_TOKENS
        assert row.money(price_in=2.0, price_out=3.0) == pytest.approx((2 * row.tokens_in + 3 * row.tokens_out) / 1e6)
        pate = cost_of(methods["pate"], moves, {**methods["pate"].knobs, **SMALL["pate"]})
        assert (pate.private_calls, pate.public_calls) == (6 * 4, 2 * 3)
        free = cost_of(methods["free-form"], films, {**methods["free-form"].knobs, **SMALL["free-form"]})
        assert (free.private_calls, free.public_calls, free.tokens_out) == (3 * 4, 0, 3 * 4 * 6)
        soft = cost_of(methods["promptdpsgd"], moves, methods["promptdpsgd"].knobs)
        assert (soft.gradients, soft.money(price_in=1.0, price_out=1.0)) == (60 * 128, None)


@pytest.mark.benches
class TestCommand:
    def test_a_run_prints_progress_writes_tables_and_runs_nothing_twice(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given = ["--data", str(written(tmp_path / "moves.jsonl", MOVES)), "--quick", "--questions", "4"]
        given += ["--seeds", "1", "--methods", "voting", "--epsilons", "8", "--queries", "4"]
        given += ["--out", str(tmp_path / "out")]
        assert bench_tables.main(given) == 0
        first = capsys.readouterr().out
        assert "[3/4] moves voting eps 8 seed 0: " in first
        assert " left)" in first
        assert (tmp_path / "out" / "tables.md").is_file()
        assert bench_tables.main(given) == 0
        again = capsys.readouterr().out
        assert "4 cells, 4 finished before; nothing left" in again
        assert "[" not in again
        kept = tmp_path / "kept.jsonl"
        CellStore(kept).keep(CellStore(tmp_path / "out" / "cells.jsonl").read())
        monkeypatch.setattr(bench_tables, "KEPT", kept)
        fresh = [*given, "--out", str(tmp_path / "fresh"), "--minutes", "1e-9"]
        for more, said in (([], "4 finished before"), (["--anew"], "0 finished before")):
            bench_tables.main([*fresh, *more])
            assert f"4 cells, {said}" in capsys.readouterr().out
        (tmp_path / "out" / "tables.md").unlink()
        assert bench_tables.main([*given, "--show"]) == 0
        assert "4 of 4 cells finished" in (tmp_path / "out" / "tables.md").read_text()

    def test_trained_prompts_are_left_out_where_there_is_no_base_model(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert found_base(tmp_path) is None
        assert SoftModels(None).absent
        models = SoftModels(None)
        asked = bench_tables.parsed(["--methods", "promptdpsgd", "voting"])
        assert [one.name for one in bench_tables.grid_of(asked, {}, models).methods] == ["voting"]
        assert "promptdpsgd is left out: " in capsys.readouterr().out
        (tmp_path / "base-abc").mkdir()
        (tmp_path / "base-abc" / "made.json").write_text("{}")
        assert found_base(tmp_path) == tmp_path / "base-abc"

    def test_nothing_to_do_and_unknown_stems_are_refused(self, tmp_path: Path) -> None:
        path = str(written(tmp_path / "moves.jsonl", MOVES))
        with pytest.raises(SystemExit, match="of one of the methods"):
            bench_tables.main(["--data", path, "--methods", "slots"])
        with pytest.raises(SystemExit, match="found songs"):
            bench_tables.main(["--data", path, "--methods", "voting", "--ablation-data", "songs"])

    @pytest.mark.parametrize("given", [["--epsilons", "0"], ["--seeds", "0"], ["--price-in", "-1"], ["--words", "up"]])
    def test_settings_that_mean_nothing_are_refused(self, given: list[str]) -> None:
        with pytest.raises(SystemExit):
            bench_tables.parsed(given)
