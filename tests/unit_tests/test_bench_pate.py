"""The PromptPATE benchmark's own arithmetic: what is public, what it costs, who is compared with whom."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.language_models import FakeListChatModel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bench_pate
from _pate_pictures import Curve, pictures
from _pate_runs import (
    Students,
    Taught,
    Teaching,
    best_private_prompt_without_privacy,
    ensemble_without_privacy,
    teach,
)
from _pate_tables import Bounds, PaperTerms, Row, honest_lines
from _pate_task import PUBLISHED, Inputs, Setting, setting

from langchain_dpicl import LabelledPool, verify_report
from langchain_dpicl.backends.fake import FakeBackend
from langchain_dpicl.backends.langchain.texts import TextVoteBackend
from langchain_dpicl.pate.plan import compare_teachers
from langchain_dpicl.released.labelled_pool import PoolEntry
from tests.bench_doubles import engine, hits, written
from tests.loopback_provider import provider

WORDS = ("up", "down")
SPLITS = {"train": 40, "test": 10, "dev": 6}
ROWS = [
    {"text": f"{word} {split} {i}", "label": code, "label_name": word, "split": split}
    for split, count in SPLITS.items()
    for code, word in enumerate(WORDS)
    for i in range(count)
]
OTHER = [
    {"text": f"{word} elsewhere {i}", "label": code, "split": "train"}
    for code, word in enumerate(WORDS)
    for i in range(9)
]
LABELS = ("down", "up")
DELTA = 1e-6


def made(tmp_path: Path, *, rows: Any = ROWS, other: Any = None, **options: Any) -> Setting:
    second = None if other is None else written(tmp_path / "elsewhere.jsonl", other)
    given = {"questions": 8, "cap": 1_000, "seed": 0, "words": {}, "most_chars": 400} | options
    return setting(written(tmp_path / "moves.jsonl", rows), second, **given)


def texts_of(records: Any) -> set[str]:
    return {record["text"] for record in records}


class TestPublicInputs:
    def test_come_from_dev_then_from_what_is_left_of_test_then_from_train(self, tmp_path: Path) -> None:
        found = made(tmp_path)
        assert [found.inputs(count, seed=0).source for count in (12, 13)] == ["dev", "held back from train"]
        without = made(tmp_path, rows=[row for row in ROWS if row["split"] != "dev"])
        assert [without.inputs(count, seed=0).source for count in (12, 13)] == ["test", "held back from train"]

    @pytest.mark.parametrize("count", [12, 30])
    def test_are_no_questions_and_no_private_records(self, tmp_path: Path, count: int) -> None:
        rows = [row for row in ROWS if row["split"] != "dev"]
        found = made(tmp_path, rows=rows)
        inputs = found.inputs(count, seed=0)
        assert len(set(inputs.texts)) == count
        assert not set(inputs.texts) & (set(found.task.questions) | texts_of(inputs.private))
        assert len(inputs.private) == (80 if count == 12 else 80 - count)

    def test_of_another_file_leave_the_private_records_alone_and_keep_their_labels(self, tmp_path: Path) -> None:
        found = made(tmp_path, other=OTHER)
        inputs = found.inputs(18, seed=0)
        assert (found.name, inputs.source) == ("moves <- elsewhere", "another data set")
        assert inputs.private == found.task.records
        # That file names labels by code alone; the private file says what a code means.
        assert all(LABELS[place] == text.split()[0] for text, place in zip(inputs.texts, inputs.truths, strict=True))

    def test_without_labels_have_no_truths(self, tmp_path: Path) -> None:
        bare = [{"text": row["text"], "split": "train"} for row in OTHER]
        assert set(made(tmp_path, other=bare).inputs(5, seed=0).truths) == {None}

    def test_follow_the_seed_and_are_cut(self, tmp_path: Path) -> None:
        found = made(tmp_path, other=[{**row, "text": f"{row['text']} {'and on' * 9}"} for row in OTHER], most_chars=30)
        first, again, other = (found.inputs(5, seed=seed) for seed in (1, 1, 2))
        assert first == again
        assert first.texts != other.texts
        assert set(map(len, first.texts)) == {30}


def plan(teaching: Teaching, size: int, **terms: Any) -> Any:
    return teaching.plan(size, **{"num_teachers": 200, "max_queries": 500, "width": 2, "delta": DELTA} | terms)


class TestPrices:
    def test_are_the_honest_ones_at_the_papers_terms(self) -> None:
        found = [plan(Teaching(kind, 1, noise=20.0), 6_920) for kind in ("fixed", "one_sample", "fresh")]
        compared = compare_teachers(6_920, num_teachers=200, noise=20, max_queries=500, delta=DELTA)
        assert [p.epsilon for p in found] == [price.epsilon for price in compared]
        assert [round(p.epsilon, 3) for p in found] == [8.306, 1.385, 0.119]

    @pytest.mark.parametrize("kind", ["fixed", "one_sample", "fresh"])
    @pytest.mark.parametrize("shots", [1, 4])
    def test_noise_is_in_votes_whatever_the_rows(self, kind: Any, shots: int) -> None:
        row = Row(
            Teaching(kind, shots, noise=20.0), [Taught(a_pool(), plan(Teaching(kind, shots, noise=20.0), 900), ())]
        )
        assert row.noise == pytest.approx(20.0, rel=1e-12)

    def test_an_epsilon_gives_the_noise(self) -> None:
        loose, tight = (plan(Teaching("fresh", 4, epsilon=epsilon), 6_920) for epsilon in (1.0, 0.1))
        assert 0.99 < loose.epsilon <= 1.0
        assert tight.noise_multiplier > 5 * loose.noise_multiplier

    def test_nothing_of_the_papers_epsilons_is_honest(self) -> None:
        for name, size in (("SST-2", 6_920), ("AGNews", 46_377), ("TREC", 5_452)):
            (fixed, *_) = compare_teachers(size, num_teachers=200, noise=20, max_queries=500, delta=DELTA)
            assert fixed.epsilon > 29 * PUBLISHED[name].epsilon


def a_pool(*labels: str | None, votes: Any = None) -> LabelledPool:
    entries = [
        PoolEntry(
            {"text": f"text {place}"},
            label,
            "rejected" if label is None else "labelled",
            {"down": 0.0, "up": 0.0} if votes is None else {"down": -3.0, "up": votes[place]},
        )
        for place, label in enumerate(labels)
    ]
    shown = {label: label for label in LABELS}
    return LabelledPool(tuple(entries), label_key="label", labels=LABELS, shown=shown, report={}, plan={})


class TestLabels:
    def taught(self) -> Taught:
        pool = a_pool("up", "up", "down", None, votes=[10.0, 5.0, 4.0, 2.0])
        return Taught(pool, plan(Teaching("fresh", 1, noise=1.0), 100, num_teachers=10), (1, 0, 0, 0))

    def test_are_judged_by_the_share_of_teachers_behind_them(self) -> None:
        found = self.taught()
        assert found.consensus.tolist() == pytest.approx([1.0, 0.5, 0.4, 0.2])
        assert [found.rejected(share) for share in (0.0, 0.45, 0.9)] == [0.0, 0.5, 0.75]
        assert found.label_accuracy() == pytest.approx(2 / 3)  # what has no label is neither right nor wrong
        assert found.label_accuracy(0.45) == 0.5
        assert found.label_accuracy(0.9) == 1.0
        assert found.label_accuracy(1.1) is None

    def test_without_known_truths_have_no_accuracy(self) -> None:
        pool = a_pool("up", "down", votes=[10.0, 5.0])
        assert (
            Taught(pool, plan(Teaching("fresh", 1, noise=1.0), 100, num_teachers=10), (None, None)).label_accuracy()
            is None
        )

    @pytest.mark.parametrize("kind", ["fresh", "one_sample", "fixed"])
    def test_come_from_the_package_on_a_budget_that_is_their_price(self, tmp_path: Path, kind: Any) -> None:
        found = made(tmp_path, rows=[{**row, "text": f"{row['text']}, {more}"} for row in ROWS for more in range(4)])
        inputs = found.inputs(6, seed=0)
        # 20 teachers of about 8 records: one has none of "down" with a chance of 0.02, so that half of them know it but
        # for a chance of 1e-12. Noise of 1e-3.
        taught = teach(
            Teaching(kind, 8, noise=1e-3), found.task, inputs, engine(is_neutral=True), num_teachers=20, delta=DELTA,
            abstain_below=None, progress=False,
        )  # fmt: skip
        assert taught.label_accuracy() == 1.0
        assert taught.plan.epsilon == taught.pool.epsilon
        assert verify_report(taught.pool).ok
        assert [entry.fields["text"] for entry in taught.pool.entries] == list(inputs.texts)
        assert taught.first(2).entries == taught.pool.entries[:2]

    def test_of_teachers_that_give_text_alone_may_be_none(self, tmp_path: Path) -> None:
        found = made(tmp_path)
        inputs = found.inputs(2, seed=0)
        # Of 60 expected teachers none is drawn with a chance of 1e-26.
        given: Any = {"num_teachers": 60, "delta": DELTA, "abstain_below": None, "progress": False, "text_votes": True}
        for said, label in (("up", "up"), ("no idea", None)):
            model = TextVoteBackend(FakeListChatModel(responses=[said]))
            pool = teach(Teaching("fresh", 1, noise=1e-3), found.task, inputs, model, **given).pool
            assert {entry.label for entry in pool.entries} == {label}

    def test_drown_in_much_noise(self, tmp_path: Path) -> None:
        found = made(tmp_path, other=OTHER)
        rows = [Teaching("fresh", 4, noise=1e4)] * 3
        inputs = found.inputs(18, seed=0)
        given: Any = {"num_teachers": 20, "delta": DELTA, "abstain_below": None, "progress": False}
        hits = [teach(row, found.task, inputs, engine(), **given).label_accuracy() for row in rows]
        # 54 fair coins: all right with a chance of 6e-17.
        assert hits != [1.0] * 3


@pytest.mark.benches
class TestStudents:
    def test_of_no_examples_say_what_the_model_says(self, tmp_path: Path) -> None:
        found = made(tmp_path)
        hits = Students(found.task, engine()).hits((), shots=4)
        assert np.array_equal(hits, found.task.right == LABELS.index("up"))

    def test_of_one_demonstration_are_calibrated(self, tmp_path: Path) -> None:
        found = made(tmp_path)
        students = Students(found.task, engine())
        # "N/A" is as likely "up" as any other text, so that calibration leaves a tie, which the first label wins.
        assert students.answers((), ["up there"], shots=4).tolist() == [1]
        assert students.answers((), ["up there"], shots=1).tolist() == [0]

    def test_that_write_no_label_are_wrong(self, tmp_path: Path) -> None:
        found = made(tmp_path)
        for said, right in (("up", 0.5), ("no idea", 0.0)):
            model = TextVoteBackend(FakeListChatModel(responses=[said]))
            assert Students(found.task, model).hits((), shots=1).mean() == right

    def test_learn_from_a_pool_of_right_labels(self, tmp_path: Path) -> None:
        found = made(tmp_path)
        texts = [("up 1", "up"), ("down 1", "down"), ("up 2", "up"), ("down 2", "down")]
        entries = tuple(PoolEntry({"text": text}, label, "public") for text, label in texts)
        pool = LabelledPool(entries, **public_task(found))
        numbers = {"num_candidates": 5, "num_validation": 2, "seed": 0}
        assert Students(found.task, engine()).of_pool(pool, shots=2, **numbers).mean() == 1.0

    def test_of_fewer_than_two_labels_are_none(self, tmp_path: Path) -> None:
        found = made(tmp_path)
        pool = LabelledPool((PoolEntry({"text": "up 1"}, "up", "public"),), **public_task(found))
        numbers = {"num_candidates": 5, "num_validation": 2, "seed": 0}
        assert Students(found.task, engine()).of_pool(pool, shots=2, **numbers) is None


def public_task(found: Setting) -> dict[str, Any]:
    """What a pool holds besides its entries: the plan tells how prompts read."""
    inputs = Inputs(("up 1", "down 1"), (1, 0), found.task.records, "test")
    given: Any = {"num_teachers": 5, "delta": DELTA, "abstain_below": None, "progress": False}
    pool = teach(Teaching("fresh", 1, noise=50.0), found.task, inputs, engine(), **given).pool
    return {"label_key": "label", "labels": LABELS, "shown": pool.shown, "report": {}, "plan": pool.plan}


@pytest.mark.benches
class TestWithoutPrivacy:
    def test_the_best_prompt_is_the_one_that_other_records_confirm(self, tmp_path: Path) -> None:
        # One record in forty holds the word that the model learns everything from.
        rows = [
            {**row, "text": row["text"] + (" key" if row["split"] == "train" and row["text"].endswith("7") else "")}
            for row in ROWS
        ]
        found = made(tmp_path, rows=rows)

        def reading(prompt: str, prefix: tuple[bytes, ...]) -> dict[str, float]:
            shown, _, asked = prompt.rpartition("Text: ")
            is_down = asked.startswith("down") if "key" in shown else asked.startswith("up")
            return {" up": 0.1 + 0.8 * (not is_down), " down": 0.1 + 0.8 * is_down}

        students = Students(found.task, FakeBackend(reading, vocabulary=[" up", " down"]))
        given: Any = {"shots": 2, "validation": 10, "seed": 0}
        assert best_private_prompt_without_privacy(students, candidates=60, **given).mean() == 1.0
        assert students.hits((), shots=2).mean() == 0.0

    def test_the_ensemble_is_right_where_most_of_its_teachers_are(self, tmp_path: Path) -> None:
        task = made(tmp_path).task
        asked: Any = {"num_teachers": 20, "questions": 8}
        assert ensemble_without_privacy(task, engine(is_neutral=True), shots=4, **asked) == 1.0
        unteachable = FakeBackend(lambda prompt, prefix: {" up": 0.9, " down": 0.1}, vocabulary=[" up", " down"])
        assert ensemble_without_privacy(task, unteachable, shots=4, **asked) == 0.5


def bounds(**given: Any) -> Bounds:
    usual = {"zero": {1: hits(30), 4: hits(40)}, "upper": {1: hits(80), 4: hits(90)}, "constant": hits(50)}
    return Bounds(**{**usual, "ensemble": {1: 0.7}, **given})


def a_row(*accuracies: int, teaching: Teaching | None = None) -> Row:
    shown = teaching or Teaching("fresh", 1, noise=20.0)
    runs = [
        Taught(a_pool("up", "down", votes=[12.0, 4.0]), plan(shown, 900, num_teachers=10), (1, 1)) for _ in accuracies
    ]
    return Row(shown, runs, {1: [hits(right) for right in accuracies], 4: [None for _ in accuracies]})


@pytest.mark.benches
class TestTables:
    def test_the_gap_is_measured_from_the_better_zero_shot(self) -> None:
        assert bounds().closed(0.6, shots=1) == pytest.approx(0.5)
        assert bounds().closed(0.65, shots=4) == pytest.approx(0.5)
        assert bounds(upper={1: hits(42), 4: hits(42)}).closed(0.6, shots=1) is None

    def test_a_row_shows_price_labels_and_students(self) -> None:
        line = a_row(50, 70).shown(bounds())
        assert line.split()[:6] == ["fresh", "1-shot,", "sigma", "20", "inf", "50.0+-0.0"]
        assert line.split()[6:] == ["50", "60.0+-10.0", "50", "-", "no", "gap"]

    def test_labels_that_nobody_can_judge_are_a_dash(self) -> None:
        row = a_row(50)
        row.runs = [replace(run, truths=(None, None)) for run in row.runs]
        assert row.shown(bounds()).split()[5] == "-"
        assert row.to_dict(bounds())["label_accuracy"] == []

    def test_a_row_that_says_nothing_says_so(self) -> None:
        said = a_row(50).shown(bounds(constant=hits(90)))
        assert said.count("no signal") == 2
        assert a_row(50).shown(bounds(upper={1: hits(41), 4: hits(41)}, constant=hits(10))).count("no gap") == 2

    def test_json_holds_what_the_line_rounds(self) -> None:
        found = a_row(50, 70).to_dict(bounds())
        assert found["students"]["1"] == {"accuracy": [0.5, 0.7], "closed": pytest.approx(0.5)}
        assert found["students"]["4"] == {"accuracy": [], "closed": None}
        assert found["by_threshold"]["0.5"] == {"rejected": 0.5, "label_accuracy": [1.0, 1.0]}
        assert json.loads(json.dumps(bounds().to_dict()))["ensemble_without_privacy"] == {"1": 0.7}

    def test_the_published_epsilon_stands_beside_the_honest_ones(self) -> None:
        prices = compare_teachers(6_920, num_teachers=200, noise=20, max_queries=500, delta=DELTA)
        lines = honest_lines("SST-2", 6_920, prices, PaperTerms())
        assert [line.split()[1] for line in lines[1:]] == ["8.306", "1.385", "0.1192", "0.178"]
        assert "does not hold" in lines[-1]
        assert len(honest_lines("moves", 6_920, prices, PaperTerms())) == len(lines) - 1


CURVE = Curve("fresh", (10, 20), (0.1, 0.2), ((), (0.5, 0.6)), 4)


@pytest.mark.benches
class TestPictures:
    def test_are_drawn_for_every_setting(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        measured = {name: (bounds(), [a_row(50, 70)], CURVE) for name in ("one", "two")}
        drawn = pictures(measured, tmp_path / "new")
        assert [path.name for path in drawn] == ["pate_consensus.png", "pate_queries.png"]
        contents = [path.read_bytes() for path in drawn]
        assert all(content.startswith(b"\x89PNG") for content in contents)
        assert contents[0] != contents[1]

    def test_need_matplotlib(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        assert pictures({"one": (bounds(), [a_row(50)], CURVE)}, tmp_path) == []


@pytest.mark.benches
class TestCommand:
    def run(self, monkeypatch: pytest.MonkeyPatch, *given: object) -> int:
        monkeypatch.setattr(sys, "argv", ["bench_pate.py", *map(str, given)])
        return bench_pate.main()

    def test_prints_tables_and_writes_numbers_and_pictures(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(bench_pate, "load_model", lambda name: engine())
        monkeypatch.setattr(bench_pate, "QUERIES", (2, 4, 99))
        monkeypatch.setattr(bench_pate, "UPPER_CANDIDATES", 5)
        monkeypatch.setattr(bench_pate, "ROWS", (Teaching("fixed", 4, noise=20.0),))
        monkeypatch.setattr(bench_pate, "MORE_ROWS", (bench_pate.CURVE,))
        monkeypatch.setattr(bench_pate, "pictures", lambda measured, folder: [folder / name for name in measured])
        data, other = written(tmp_path / "moves.jsonl", ROWS), written(tmp_path / "elsewhere.jsonl", OTHER)
        small = ["--inputs", 6, "--questions", 8, "--candidates", 3, "--validation", 3, "--ensemble-questions", 2]
        out = tmp_path / "out"
        given = ["--data", data, "--public", f"moves={other}", "--teachers", 10, "--repeats", 2, *small]
        assert self.run(monkeypatch, *given, "--out", out) == 0
        printed = capsys.readouterr().out
        assert "## moves: 80 private records, 6 public inputs from dev, 8 questions, 2 labels" in printed
        assert "## moves <- elsewhere: 80 private records, 6 public inputs from another data set" in printed
        numbers = json.loads((out / "bench_pate.json").read_text())
        assert [len(numbers[name]["rows"]) for name in ("moves", "moves <- elsewhere")] == [1, 2]
        found = numbers["moves <- elsewhere"]
        assert found["by_queries"]["queries"] == [2, 4, 6]
        assert found["by_queries"]["epsilons"] == sorted(found["by_queries"]["epsilons"])
        assert all(len(row["label_accuracy"]) == 2 for row in found["rows"].values())
        assert f"pictures: {out / 'moves'}, {out / 'moves <- elsewhere'}" in printed

    def test_the_curve_teaches_students_from_the_first_labels_only(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[tuple[int, int, int]] = []

        class Recorder:
            def __init__(self, *args: Any) -> None: ...

            def of_pool(self, pool: LabelledPool, *, shots: int, seed: int, **numbers: int) -> Any:
                seen.append((len(pool.entries), shots, seed))
                return hits(len(pool.entries)) if len(pool.entries) > 2 else None

        monkeypatch.setattr(bench_pate, "Students", Recorder)
        monkeypatch.setattr(bench_pate, "QUERIES", (2, 3, 9))
        taught = Taught(a_pool(*["up"] * 5), plan(bench_pate.CURVE, 900, num_teachers=10), (1,) * 5)
        bench = bench_pate.Bench(bench_pate.parsed(["--repeats", "2", "--seed", "7"]), engine())
        curve = bench.curve(Row(bench_pate.CURVE, [taught, taught]), made(tmp_path), shots=4, delta=DELTA)
        assert seen == [(count, 4, seed) for count in (2, 3, 5) for seed in (7, 8)]
        assert curve.accuracies == ((), (0.03, 0.03), (0.05, 0.05))
        assert curve.epsilons[2] == plan(bench_pate.CURVE, 900, num_teachers=10, max_queries=5).epsilon

    def test_says_what_is_missing(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        data = written(tmp_path / "moves.jsonl", ROWS)
        assert self.run(monkeypatch) == 2
        assert self.run(monkeypatch, "--data", data, "--public", tmp_path / "nowhere.jsonl") == 2
        assert "nowhere.jsonl" in capsys.readouterr().out

    def test_other_inputs_go_to_the_file_that_they_name(self) -> None:
        given = ["sst2=imdb.jsonl", "trec=qqp.jsonl", "all.jsonl"]
        assert bench_pate.public_of(Path("x/sst2.jsonl.gz"), given) == [None, Path("imdb.jsonl"), Path("all.jsonl")]
        assert bench_pate.public_of(Path("agnews.jsonl"), given[:2]) == [None]

    @pytest.mark.loopback  # httpx asks the system what sockets it has
    @pytest.mark.parametrize(
        ("options", "kind"), [([], "ChatOpenAI"), (["--completions"], "OpenAI")], ids=["chat", "completions"]
    )
    def test_an_address_makes_a_stock_client(
        self, options: list[str], kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("langchain_openai")
        monkeypatch.setenv("OPENAI_API_KEY", "a key")
        given = ["--model-url", "http://127.0.0.1:1/v1", "--model-name", "small", *options]
        model = bench_pate.model_of(bench_pate.parsed(given))
        assert (type(model).__name__, model.model_name, model.openai_api_base) == (kind, "small", given[1])
        assert model.openai_api_key.get_secret_value() == "a key"

    @pytest.mark.loopback
    def test_a_server_of_the_usual_kind_can_be_the_model(self, tmp_path: Path) -> None:
        pytest.importorskip("langchain_openai")
        begins = dict(
            zip(WORDS, ("Why", "funds"), strict=True)
        )  # among the five words that the served model begins with
        rows = [{**row, "label_name": begins[str(row["label_name"])]} for row in ROWS]
        with provider() as served:
            asked = bench_pate.parsed(["--model-url", served.url, "--completions"])
            bench = bench_pate.Bench(asked, bench_pate.model_of(asked))
            places = Students(made(tmp_path, rows=rows).task, bench.engine).answers((), ["up"], shots=4)
        assert places.tolist() in ([0], [1])
