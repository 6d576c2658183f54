"""The voting benchmark's own arithmetic: what it reads, what it counts, and what it calls a gap."""

from __future__ import annotations

import gzip
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import _voting_speed
import bench_voting
from _voting_rows import (
    Measured,
    Method,
    Voters,
    answer,
    clean_hits,
    gap_closed,
    is_above,
    measure,
    noisy_accuracies,
    published_gap_closed,
)
from _voting_task import PAPER, Task, load, read_rows

from langchain_dpicl.baselines import label_votes_without_privacy
from langchain_dpicl.options import FewShotTask, LabelAnswers, Rows
from langchain_dpicl.planning.expected_utility import noise_deviation
from langchain_dpicl.privacy.extensions.registry import mechanism_by_name
from langchain_dpicl.privacy.mechanisms.bounded import VoteSum
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.privacy.mechanisms.release_plan import ReleasePlan
from langchain_dpicl.runs.query_plan import QueryPlan
from tests.bench_doubles import engine, hits, written

ROWS = [
    {"text": f"{word} {i}", "label": code, "label_name": word, "split": split}
    for split, count in (("train", 20), ("test", 8), ("dev", 5))
    for code, word in enumerate(("up", "down"))
    for i in range(count)
]
TERMS: dict[str, Any] = {"delta": 1e-6, "max_queries": 10, "adjacency": "add_remove"}


def task(tmp_path: Path, **options: Any) -> Task:
    return load(
        written(tmp_path / "moves.jsonl", ROWS), **{"cap": 100, "questions": 100, "seed": 0, "words": {}} | options
    )


def voters(tmp_path: Path) -> Voters:
    return Voters(task(tmp_path), engine(), progress=lambda items, desc: items)


class TestReading:
    def test_train_is_private_and_test_is_asked(self, tmp_path: Path) -> None:
        read = task(tmp_path)
        assert (len(read.records), len(read.questions), read.labels) == (40, 16, ("down", "up"))
        assert {record["label"] for record in read.records} == {"up", "down"}
        assert all(read.labels[place] in text for text, place in zip(read.questions, read.right, strict=True))

    def test_a_packed_file_reads_the_same(self, tmp_path: Path) -> None:
        packed = load(written(tmp_path / "moves.jsonl.gz", ROWS), cap=100, questions=100, seed=0, words={})
        assert packed.questions == task(tmp_path).questions

    def test_caps_hold_and_the_seed_fixes_what_is_asked(self, tmp_path: Path) -> None:
        first, again, other = (task(tmp_path, cap=9, questions=5, seed=seed) for seed in (1, 1, 2))
        assert (len(first.records), len(first.questions)) == (9, 5)
        assert (first.records, first.questions) == (again.records, again.questions)
        assert (first.records, first.questions) != (other.records, other.questions)

    @pytest.mark.parametrize("questions", [2, 6, 16])
    def test_questions_have_the_labels_in_proportion(self, tmp_path: Path, questions: int) -> None:
        read = task(tmp_path, questions=questions)
        assert np.bincount(read.right).tolist() == [questions // 2] * 2
        assert len(set(read.questions)) == questions

    def test_labels_read_as_the_words_given_for_them(self, tmp_path: Path) -> None:
        read = task(tmp_path, words={"up": "rise"})
        (prompt,) = read.wording.renderer([("what?",)])([{"text": "it grew", "label": "up"}])
        assert prompt == "Text: it grew\nLabel: rise\n\nText: what?\nLabel:"
        assert read.texts == ((" down",), (" rise",))

    @pytest.mark.parametrize(
        "rows",
        [[r for r in ROWS if r["split"] == "train"], [r for r in ROWS if r["label"] == 1]],
        ids=["split", "label"],
    )
    def test_a_file_without_two_splits_and_two_labels_is_refused(self, tmp_path: Path, rows: Any) -> None:
        with pytest.raises(SystemExit, match="expected both splits"):
            load(written(tmp_path / "moves.jsonl", rows), cap=9, questions=9, seed=0, words={})

    def test_a_pair_reads_as_one_text_and_its_val_is_asked(self, tmp_path: Path) -> None:
        pairs = [
            {"premise": f"It rains {i}.", "hypothesis": "It is wet.", "label": label, "split": split}
            for split in ("train", "val")
            for i, label in enumerate(("entailment", "not_entailment"))
        ]
        task = load(written(tmp_path / "rte.jsonl", pairs), cap=9, questions=9, seed=0, words={})
        assert {record["text"] for record in task.records} == {
            f"It rains {i}.\nQuestion: It is wet. True or false?" for i in (0, 1)
        }
        assert (len(task.questions), task.texts) == (2, ((" true",), (" false",)))

    def test_a_name_or_a_code_is_label_enough(self, tmp_path: Path) -> None:
        for left_out, labels in (("label", ("down", "up")), ("label_name", ("0", "1"))):
            rows = [{key: value for key, value in row.items() if key != left_out} for row in ROWS]
            read = load(written(tmp_path / "moves.jsonl", rows), cap=9, questions=9, seed=0, words={})
            assert read.labels == labels
        bare = [*ROWS, {"text": "up", "split": "test"}]
        with pytest.raises(SystemExit, match=r"moves\.jsonl: expected rows of train and test with label"):
            load(written(tmp_path / "moves.jsonl", bare), cap=9, questions=9, seed=0, words={})

    @pytest.mark.parametrize(
        ("name", "content", "said"),
        [
            ("a.jsonl", b'{"text": "a"}\nswordfish\n', "line 2: expected one JSON object per line"),
            ("a.jsonl", b"\xff\xfe", "line 1: expected one JSON object per line"),
            ("a.jsonl", b'{"text": "a"}\n["swordfish"]', "line 2: expected a JSON object with text"),
            ("a.jsonl", b'{"swordfish": 1}', "line 1: expected a JSON object with text"),
            ("a.jsonl.gz", b'{"text": "swordfish"}', "expected a readable gzipped file"),
            ("a.jsonl.gz", gzip.compress(b'{"text": "swordfish"}')[:-9], "expected a readable gzipped file"),
        ],
        ids=["no JSON", "no text", "a list", "other fields", "not packed", "cut off"],
    )
    def test_a_file_of_another_form_is_refused_in_one_line_without_its_content(
        self, tmp_path: Path, name: str, content: bytes, said: str
    ) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SystemExit) as caught:
            read_rows(tmp_path / name)
        message = str(caught.value.code)
        assert message.startswith(f"{name}: {said}")
        assert "swordfish" not in message
        assert "\n" not in message


class TestVotes:
    def test_are_those_of_the_baseline_without_noise(self, tmp_path: Path) -> None:
        # Every record is a row of its own, so that nothing is left to chance.
        everyone = Method(40, 1, "gumbel", rows="units")
        one = voters(tmp_path)
        totals = [
            a_plan("gumbel", 1.0).release.bound(rows, width=2).value
            for rows in one.matrices(everyone.design(), calibrate=False)
        ]
        found = label_votes_without_privacy(
            one.task.private(),
            one.task.questions,
            llm=engine(),
            task=FewShotTask(one.task.wording.example_prompt, one.task.wording.suffix, labels=one.task.labels),
            rows=Rows(units=40),
            answers=LabelAnswers(calibrate=False),
        )
        assert np.array_equal(totals, found.totals)
        assert sorted(map(tuple, found.totals.tolist())) == [(0.0, 40.0)] * 8 + [(20.0, 20.0)] * 8

    def test_are_scored_once_for_all_methods_of_one_shape(self, tmp_path: Path) -> None:
        one = voters(tmp_path)
        first = one.matrices(Method(10, 2, "gumbel").design(), calibrate=False)
        assert one.matrices(Method(10, 2, "gaussian", votes="soft").design(), calibrate=False) is first
        assert one.matrices(Method(10, 2, "gumbel").design(), calibrate=True) is not first
        assert {rows.shape for rows in first} == {(10, 2)}

    def test_calibrated_rows_differ_from_raw_ones(self, tmp_path: Path) -> None:
        design = Method(40, 1, "gumbel", rows="units").design()
        one = voters(tmp_path)
        raw, calibrated = (sum(rows.sum() for rows in one.matrices(design, calibrate=c)) for c in (False, True))
        assert raw == pytest.approx(calibrated)  # rows are probabilities in either case
        downs = [sum(rows[:, 0].sum() for rows in one.matrices(design, calibrate=c)) for c in (False, True)]
        assert downs[1] > 1.2 * downs[0]

    def test_zero_shot_asks_without_records(self, tmp_path: Path) -> None:
        one = voters(tmp_path)
        assert np.array_equal(one.zero_shot(calibrate=False), one.task.right == 1)


def a_plan(mechanism: str, noise: float, *, width: int = 2) -> QueryPlan:
    """Returns a plan with this noise, whatever it costs."""
    design = Method(10, 1, mechanism).design()
    release = ReleasePlan(design.sampler(1_000), VoteSum(), mechanism_by_name(mechanism)(noise), "add_remove")
    return QueryPlan(release, 1, width, design, 1_000, partition="moves", epsilon=math.inf, delta=1e-6)


@pytest.mark.parametrize("mechanism", ["gumbel", "gaussian", "permute_and_flip"])
class TestNoise:
    def test_next_to_none_leaves_the_votes_as_they_are(self, mechanism: str) -> None:
        matrices = [np.eye(2)[[0, 0, 1]], np.eye(2)[[0, 1, 1]]] * 5
        right = np.array([0, 0] * 5)
        plan = a_plan(mechanism, 1e-6)
        assert noisy_accuracies(plan, matrices, right, draws=7).tolist() == [0.5] * 7
        assert clean_hits(plan, matrices, right).tolist() == [True, False] * 5

    def test_of_any_size_is_fresh_for_every_question_and_draw(self, mechanism: str) -> None:
        # 4,000 fair coins: six standard deviations are passed with a chance of 2e-9. The deviation over 20 draws is
        # within these factors but with a chance of 2e-8 (chi-square with 19 degrees of freedom); it is 0.5 if a draw
        # is shared by all questions, and 0 if noise is shared by all draws.
        matrices, right = [np.eye(2)[[0] * 10]] * 200, np.zeros(200, dtype=int)
        found = noisy_accuracies(a_plan(mechanism, 1e6), matrices, right, draws=20)
        assert abs(found.mean() - 0.5) < 6 * 0.5 / math.sqrt(4_000)
        assert 0.25 < found.std(ddof=1) / (0.5 / math.sqrt(200)) < 2.0

    def test_has_the_deviation_that_the_table_shows(self, mechanism: str) -> None:
        plan = a_plan(mechanism, 3.0)
        shown = noise_deviation(plan.release)
        law = {"gaussian": 3 * math.sqrt(2), "gumbel": 6 * math.pi / math.sqrt(6), "permute_and_flip": 6.0}
        assert shown == pytest.approx(law[mechanism])

    def test_decides_among_all_labels(self, mechanism: str) -> None:
        released = a_plan(mechanism, 1e-6, width=3).release.mechanism.release(
            a_plan(mechanism, 1e-6, width=3).release.bound(np.eye(3)[[2, 2, 1]], width=3), rng=SYSTEM_RANDOM
        )
        assert answer(released) == 2


class TestGap:
    def test_is_closed_by_the_share_of_the_way_to_no_noise(self) -> None:
        assert gap_closed(hits(40), hits(80), 0.6) == pytest.approx(0.5)
        assert gap_closed(hits(40), hits(80), 0.8) == pytest.approx(1.0)
        assert gap_closed(hits(40), hits(80), 0.3) == pytest.approx(-0.25)

    @pytest.mark.parametrize("clean", [30, 40, 43])
    def test_is_none_where_records_do_not_help(self, clean: int) -> None:
        assert gap_closed(hits(40), hits(clean), 0.5) is None

    def test_is_judged_on_the_same_questions(self) -> None:
        # Four questions more and none lost is two standard errors; four more with many lost is chance.
        assert is_above(hits(45), hits(40))
        shuffled = np.roll(hits(45), 50)
        assert not is_above(shuffled, hits(40))
        assert not is_above(np.array([True]), np.array([False]))

    def test_of_the_paper_is_what_its_table_says(self) -> None:
        closed = {title: round(100 * published_gap_closed(numbers, 1.0)) for title, numbers in PAPER.items()}
        assert closed == {"SST-2": 80, "Amazon": 87, "AGNews": 77, "TREC": 69}
        assert {published_gap_closed(numbers, math.inf) for numbers in PAPER.values()} == {1.0}


@pytest.mark.benches
class TestTables:
    def test_a_line_shows_noise_accuracies_and_the_gap(self) -> None:
        noisy = {1.0: np.array([0.5, 0.596]), 8.0: np.array([0.74, 0.74])}
        found = Measured(noisy, {1.0: 4.04, 8.0: 1.0}, hits(80), hits(40), hits(50), 0.005)
        assert bench_voting.measured_line("a row", found).split() == [
            *("a", "row", "4.0", "1.0", "54.8+-4.8", "74.0+-0.0", "80.0", "37", "85")
        ]
        assert found.to_dict()["by_epsilon"]["8"]["closed"] == pytest.approx(0.85)

    @pytest.mark.parametrize(
        ("zero", "constant", "said"), [(79, 50, "no gap"), (40, 79, "no signal"), (40, 50, "  25")]
    )
    def test_a_row_that_says_nothing_says_so(self, zero: int, constant: int, said: str) -> None:
        found = Measured({1.0: np.array([0.5])}, {1.0: 1.0}, hits(80), hits(zero), hits(constant), 0.005)
        assert bench_voting.measured_line("a row", found).endswith(f"      80.0{said:>12}")

    def test_measuring_uses_one_plan_per_epsilon(self, tmp_path: Path) -> None:
        one = voters(tmp_path)
        zero = one.zero_shot(calibrate=False)
        method = Method(40, 1, "gaussian", rows="units")
        found = measure(method, one, epsilons=[0.5, 20.0], draws=3, zero=zero, **TERMS)
        assert found.deviation[0.5] > 5 * found.deviation[20.0]
        assert (found.sampling_rate, found.clean.mean()) == (1.0, 1.0)
        assert found.closed(20.0) == pytest.approx(2 * found.noisy[20.0].mean() - 1)


@pytest.mark.benches
class TestCommand:
    def test_prints_tables_and_writes_their_numbers(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        small = (Method(4, 2, "gumbel"),)
        monkeypatch.setattr(bench_voting, "PAPER_ROWS", small)
        monkeypatch.setattr(bench_voting, "OTHER_ROWS", (Method(4, 2, "gumbel", votes="soft"),))
        monkeypatch.setattr(bench_voting, "RATE_ROWS", small)
        monkeypatch.setattr(bench_voting, "QUERY_ROWS", small)
        monkeypatch.setattr(bench_voting, "QUERIES", (1, 10))
        out = tmp_path / "numbers.json"
        given = [
            "bench_voting.py",
            "--data",
            str(written(tmp_path / "moves.jsonl", ROWS)),
            "--parts",
            "accuracy",
            "queries",
        ]
        given += ["rates", "--epsilons", "8", "--questions", "4", "--draws", "2", "--queries", "5", "--json", str(out)]
        monkeypatch.setattr(sys, "argv", given)
        assert bench_voting.main() == 0
        printed = capsys.readouterr().out
        assert "moves: 40 private records, 4 questions, 2 labels" in printed
        numbers = json.loads(out.read_text())["moves"]
        setting = "5 queries, delta 1e-05, add_remove"
        assert list(numbers[f"the paper's rows: {setting}"]) == ["4 x 2 gumbel"]
        assert list(numbers[f"other rows and votes: {setting}"]) == ["4 x 2 gumbel soft"]
        by_queries = numbers["by declared queries: 10 x 16"]
        noise = [by_queries[f"{n} gumbel"]["by_epsilon"]["8"]["noise_deviation"] for n in (1, 10)]
        assert noise[0] < noise[1]

    def test_says_what_is_missing(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "argv", ["bench_voting.py", "--data", "nowhere.jsonl"])
        assert bench_voting.main() == 2
        assert "nowhere.jsonl" in capsys.readouterr().out

    def test_times_answers_and_judges_them(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(_voting_speed, "QUERIES", 500)
        found = _voting_speed.measure_speed(rounds=5, batches=5, queries=20)
        printed = capsys.readouterr().out
        passes = [found["bare_release"]["p50"] < 0.5, found["chat"]["p50"] < found["batch"]["p50"]]
        assert [word in printed for word in ("PASS", "FAIL")] == [any(passes), not all(passes)]
        assert found["release"]["p95"] >= found["release"]["p50"] > 0
        assert found["memory"]["peak_bytes"] > 0

    def test_passes_only_what_is_below_its_limit(self) -> None:
        assert [_voting_speed.verdict(value, 0.5) for value in (0.4, 0.5, 0.6)] == ["PASS", "FAIL", "FAIL"]
