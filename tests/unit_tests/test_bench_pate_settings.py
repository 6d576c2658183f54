"""What the PromptPATE benchmark takes, and how it refuses the rest: with one clear line and no traceback."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bench_pate
from _pate_runs import Students, Teaching, best_private_prompt_without_privacy
from _pate_task import setting

from langchain_dpicl import EmbeddedLLM
from langchain_dpicl.backends import TextVoteBackend
from langchain_dpicl.backends.fake import FakeBackend
from tests.bench_doubles import written

# Exactly the fields that --help asks for.
ROWS = [
    {"text": f"{word} {split} {place}", "label_name": word, "split": split}
    for split, count in (("train", 40), ("test", 10), ("dev", 6))
    for word in ("up", "down")
    for place in range(count)
]
SMALL = ["--inputs=4", "--questions=6", "--candidates=2", "--validation=3", "--ensemble-questions=2", "--repeats=1"]
GIVEN = {"questions": 8, "cap": 1_000, "seed": 0, "words": {}, "most_chars": 400}


def engine() -> FakeBackend:
    return FakeBackend(lambda prompt, prefix: {" up": 0.6, " down": 0.4}, vocabulary=[" up", " down"])


def run(monkeypatch: pytest.MonkeyPatch, *given: object) -> int:
    monkeypatch.setattr(sys, "argv", ["bench_pate.py", *map(str, given)])
    monkeypatch.setattr(bench_pate, "load_model", lambda name: engine())
    monkeypatch.setattr(bench_pate, "ROWS", (Teaching("fresh", 1, noise=20.0),))
    monkeypatch.setattr(bench_pate, "MORE_ROWS", ())
    monkeypatch.setattr(bench_pate, "UPPER_CANDIDATES", 3)
    monkeypatch.setattr(bench_pate, "pictures", lambda measured, folder: [])
    return bench_pate.main()


def refusal(capsys: pytest.CaptureFixture[str], *given: str) -> str:
    """Returns the last line of what the command says to options that it refuses, after one of usage."""
    with pytest.raises(SystemExit) as caught:
        bench_pate.parsed(given)
    assert caught.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2, lines
    return lines[-1]


class TestFiles:
    def test_the_fields_that_help_asks_for_are_enough(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        named = set(re.findall(r"`(\w+)`", bench_pate.__doc__ or ""))
        assert {frozenset(row) for row in ROWS} == {frozenset(named)}
        data, other = (
            written(tmp_path / "moves.jsonl", ROWS),
            written(tmp_path / "else.jsonl", [{**ROWS[0], "text": "up!"}]),
        )
        out = tmp_path / "out"
        assert run(monkeypatch, "--data", data, "--public", other, *SMALL, "--out", out) == 0
        assert set(json.loads((out / "bench_pate.json").read_text())) == {"moves", "moves <- else"}

    def test_that_give_no_public_input_are_refused(self, tmp_path: Path) -> None:
        data = written(tmp_path / "moves.jsonl", ROWS)
        found = setting(data, written(tmp_path / "again.jsonl", ROWS), **GIVEN)
        with pytest.raises(SystemExit, match="moves <- again: no public inputs"):
            found.inputs(3, seed=0)

    def test_with_too_few_records_for_a_prompt_are_refused(self, tmp_path: Path) -> None:
        students = Students(setting(written(tmp_path / "moves.jsonl", ROWS), None, **GIVEN).task, engine())
        with pytest.raises(SystemExit, match="every label beside the 80 that are held back, found 0"):
            best_private_prompt_without_privacy(students, shots=1, candidates=1, validation=99, seed=0)


class TestOptions:
    def test_public_inputs_for_an_unknown_file_are_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        said = refusal(capsys, "--data", "a/sst2.jsonl.gz", "trec.jsonl", "--public", "x.jsonl", "zz=/nope.jsonl")
        assert said.endswith("--public zz=: expected the stem of a --data file (sst2, trec)")
        assert refusal(capsys, "--public", "zz=/nope.jsonl").endswith("(none given)")

    def test_the_last_data_counts_and_public_inputs_of_an_earlier_one_are_no_mistake(self) -> None:
        # As `make bench-pate ARGS="--data FILE"` gives them: its own files first.
        found = bench_pate.parsed(["--data", "sst2.jsonl", "--public", "sst2=imdb.jsonl", "--data", "mine.jsonl"])
        assert found.data == [Path("mine.jsonl")]
        assert bench_pate.public_of(found.data[0], found.public) == [None]
        assert bench_pate.parsed([]).data == []

    @pytest.mark.parametrize("value", ["0", "-1", "1.5", "many", ""])
    def test_there_is_at_least_one_input(self, value: str, capsys: pytest.CaptureFixture[str]) -> None:
        said = refusal(capsys, f"--inputs={value}")
        assert said.endswith(f"argument --inputs: expected a whole number of at least 1, found {value!r}")

    @pytest.mark.parametrize(
        "name",
        ["questions", "candidates", "validation", "ensemble-questions", "teachers", "repeats", "cap", "most-chars"],
    )
    def test_there_is_at_least_one_of_everything_else(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert f"--{name}: expected a whole number of at least 1" in refusal(capsys, f"--{name}", "0")

    def test_a_word_stands_for_a_label(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "expected LABEL=WORD, found 'up'" in refusal(capsys, "--words", "up")
        assert bench_pate.parsed(["--words", "up=rise"]).words == ["up=rise"]

    @pytest.mark.parametrize(
        ("given", "shown"), [(("--delta", 0), "delta"), (("--abstain-below", 2), "LabelAnswers.abstain_below")]
    )
    def test_what_the_package_refuses_is_one_line(
        self,
        given: tuple[str, int],
        shown: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        data = written(tmp_path / "moves.jsonl", ROWS)
        assert run(monkeypatch, "--data", data, *SMALL, *given, "--out", tmp_path) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"bench_pate.py: {shown}: expected a number")


class TestTextAlone:
    def test_a_batch_votes_as_one_prompt_after_the_other(self) -> None:
        choices = [" colour", " number"]
        shown = "Word: red\nKind: colour\n\nWord: seven\nKind: number\n\nWord: {}\nKind:"
        prompts = [*(shown.format(word) for word in ("blue", "nine", "six", "green")), "The weather is", ""]
        alone = TextVoteBackend(EmbeddedLLM(), instructions="", max_tokens=1)
        votes = bench_pate.BatchWriter().score_with_other(prompts, choices)
        assert np.array_equal(votes, alone.score_with_other(prompts, choices))
        assert set(votes.argmax(axis=1)) == {0, 1, 2}

    def test_has_the_papers_teachers_inputs_and_shots(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        found = bench_pate.parsed(["--text-votes"])
        assert (found.teachers, found.inputs) == (400, 200)
        assert (bench_pate.parsed([]).teachers, bench_pate.parsed([]).inputs) == (200, 50)
        out = tmp_path / "out"
        data = written(tmp_path / "agnews.jsonl", ROWS)
        assert run(monkeypatch, "--data", data, *SMALL, "--text-votes", "--teachers", 4, "--out", out) == 0
        numbers = json.loads((out / "bench_pate.json").read_text())["AGNews"]
        assert list(numbers["rows"]) == ["fresh 2-shot, sigma 50"]
        assert list(numbers["zero_shot"]) == ["2"]
        assert "0.056  does not hold; 74.6 % right" in capsys.readouterr().out
