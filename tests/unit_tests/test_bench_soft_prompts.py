"""The soft-prompt benchmark's own arithmetic: what is public, that all use the same rows, and what it calls met."""

from __future__ import annotations

import argparse
import gzip
import json
import lzma
import math
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import _soft_baselines
import _soft_corpus
import _soft_memory
import _soft_model
import _soft_profile
import _soft_utility
import bench_soft_prompts
import numpy as np
import torch
import transformers
from _local_runs import Times, race
from _soft_model import BaseSize, base_model
from _soft_speed import WAYS, SpeedSize, Track
from _soft_task import SoftTask, soft_task

TINY = SpeedSize(layers=1, width=64, vocabulary=100, rows=4, tokens=12, virtual_tokens=2)
BASE = BaseSize(layers=1, width=32, heads=2, vocabulary=420, length=24, prompt=2, lessons=2, steps=4, batch=4)
SETTINGS = argparse.Namespace(
    steps=2, batch=4, clip=0.1, rate=0.02, optimizer="adam", schedule="linear", virtual_tokens=2
)


# ------------------------------------------------------------------------------------------------- public text and model


def write_public(folder: Path) -> None:
    pages = "\n\n".join(f"The {n} old house stood by the sea. It was cold in winter number {n}." for n in range(30))
    for name in _soft_corpus.PLAIN:
        (folder / f"{name}.txt.xz").write_bytes(lzma.compress(pages.encode()))
    taught = "\n\n".join(f"Chapter {n} is of stars.\n\nA company sells {n} things to its customers." for n in range(30))
    (folder / f"{_soft_corpus.TEXTBOOKS}.txt.xz").write_bytes(lzma.compress(taught.encode()))
    quiz = "\n\n".join(
        f"{category}: {question}?"
        for category in ("sports", "science-technology", "world", "history")
        for question in [f"Who won game {n} of the league" for n in range(10)] + ["How many moons are there", "What is"]
    )
    (folder / "opentrivia.txt.xz").write_bytes(lzma.compress(quiz.encode()))
    asked = "\n\n".join(f"card arrival: Where is my card {n}?" for n in range(25))
    (folder / "banking77.txt.xz").write_bytes(lzma.compress(asked.encode()))
    reviews = [
        {"text": f"A {'fine' if n % 2 else 'dull'} film number {n}.<br />I saw it.", "label": n % 2} for n in range(40)
    ]
    write_rows(folder / "ood_imdb.jsonl.gz", [*reviews, {"text": "Never read this.", "label": 1, "split": "test"}])
    write_rows(folder / "ood_qqp_questions.jsonl.gz", [{"text": f"Why is the sky blue {n}?"} for n in range(25)])


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("public")
    write_public(folder)
    return folder


@pytest.fixture(scope="module")
def corpus(public: Path) -> _soft_corpus.Corpus:
    return _soft_corpus.read(public, public, most_chars=2_000)


@pytest.fixture(scope="module")
def base(corpus: _soft_corpus.Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    said: list[str] = []
    folder = base_model(BASE, lambda: corpus, kept=tmp_path_factory.mktemp("kept"), say=said.append)
    assert any("loss of the lessons" in one for one in said)
    return folder


@pytest.fixture(scope="module")
def loaded(base: Path) -> tuple[Any, Any]:
    return transformers.AutoModelForMaskedLM.from_pretrained(base), transformers.AutoTokenizer.from_pretrained(base)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> SoftTask:
    path = tmp_path_factory.mktemp("data") / "sst2.jsonl.gz"
    names = ("negative", "positive")
    train = [{"text": f"It is n't film {n} .", "label_name": names[n % 2], "split": "train"} for n in range(13)]
    test = [{"text": f"A test of {n} .", "label_name": names[n % 4 == 0], "split": "test"} for n in range(8)]
    write_rows(path, train + test)
    return soft_task(path, limit=6, length=24)


def test_reviews_are_labelled_as_they_were_and_only_train_is_read(corpus: _soft_corpus.Corpus) -> None:
    reviews = corpus.shelves["review"]
    assert all("fine" in text for text in reviews["positive"])
    assert all("dull" in text for text in reviews["negative"])
    assert len(reviews["positive"]) == len(reviews["negative"]) == 20
    assert not any("<br" in text or "never" in text for text in corpus.lines)


@pytest.mark.parametrize(
    ("question", "label"),
    [
        ("who wrote it?", "person"),
        ("where is the sea?", "place"),
        ("in which country is it?", "place"),
        ("how many moons are there?", "number"),
        ("how does it work?", "description"),
        ("which animal barks?", "thing"),
        ("what does nasa stand for?", "short"),
    ],
)
def test_a_question_is_labelled_by_its_first_words(question: str, label: str) -> None:
    assert _soft_corpus._asked([question]) == {label: [question]}


def test_missing_public_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"found no books\.txt\.xz.*pass --model"):
        _soft_corpus.read(tmp_path, tmp_path, most_chars=10)


@pytest.mark.benches
def test_the_same_input_finds_the_same_model_and_reads_nothing_again(base: Path) -> None:
    def never() -> Any:
        raise AssertionError("read again")

    assert base_model(BASE, never, kept=base.parent, say=print) == base


@pytest.mark.benches
def test_textbooks_are_a_source_whole_and_a_topic_where_they_are_about_business(corpus: _soft_corpus.Corpus) -> None:
    assert any("stars" in text for text in corpus.shelves["source"]["textbook"])
    assert corpus.shelves["topic"]["business"]
    assert all("company" in text for text in corpus.shelves["topic"]["business"])


@pytest.mark.benches
def test_the_same_input_makes_the_same_model(corpus: _soft_corpus.Corpus, base: Path, tmp_path: Path) -> None:
    again = base_model(BASE, lambda: corpus, kept=tmp_path, say=lambda said: None)
    assert again.name == base.name
    assert (again / "model.safetensors").read_bytes() == (base / "model.safetensors").read_bytes()


@pytest.mark.benches
def test_training_moves_weights_and_label_words_are_single_tokens(
    corpus: _soft_corpus.Corpus, loaded: tuple[Any, Any]
) -> None:
    _, tokenizer = loaded
    for words in _soft_model.WORDS.values():
        for word in words.values():
            assert len(tokenizer.encode(f" {word}", add_special_tokens=False)) == 1
    lessons = _soft_model.lessons(tokenizer, corpus, BASE)
    assert len(lessons) == len(_soft_model.WORDS) + BASE.lessons
    with torch.random.fork_rng():
        torch.manual_seed(0)
        fresh = _soft_model.make_model(BASE, vocabulary=len(tokenizer))
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in corpus.lines]
    before = [weight.clone() for weight in fresh.parameters()]
    losses = _soft_model.taught(fresh, tokenizer, corpus, ids, BASE, say=lambda said: None)
    moved = [not torch.equal(one, other) for one, other in zip(before, fresh.parameters(), strict=True)]
    assert sum(moved) > 0.8 * len(moved)
    assert all(math.isfinite(loss) for loss in losses)


@pytest.mark.benches
def test_vectors_of_tokens_with_the_same_neighbours_are_alike() -> None:
    coins = np.random.default_rng(0)
    # Tokens 10 and 11 stand before 20 or 21, and 12 before 30 or 31.
    lines = [
        [int(first), int(coins.choice([20, 21] if first < 12 else [30, 31]))]
        for first in coins.choice([10, 11, 12], size=3_000)
    ]
    found = _soft_model.near_vectors(lines, 40, 4)
    alike = torch.nn.functional.cosine_similarity(found[10], found[[11, 12]])
    assert alike[0] > 0.9
    assert alike[1] < 0.5


# ------------------------------------------------------------------------------------------------------------- accuracy


def test_train_is_private_and_test_is_asked_in_the_same_wording(task: SoftTask) -> None:
    assert len(task.records) == 13
    assert len(task.questions) == len(task.right) == 6
    assert all(record["text"].startswith("it isn't film") for record in task.records)
    assert all(text.startswith("a test of") and text.endswith(".") for text in task.questions)
    assert task.task.words == (" terrible", " great")


@pytest.mark.parametrize(("count", "delta"), [(13, 7e-3), (6_920, 1e-5), (1_000, 1e-4), (46_377, 2e-6)])
def test_delta_is_a_tenth_of_one_record_rounded_down(task: SoftTask, count: int, delta: float) -> None:
    found = SoftTask("t", task.task, [{"text": "", "label": ""}] * count, [], []).delta
    assert found == pytest.approx(delta)
    assert found <= 1 / (10 * count) * (1 + 1e-9)


@pytest.mark.benches
def test_a_cell_is_trained_at_its_own_epsilon_and_infinity_is_not_private(
    loaded: tuple[Any, Any], task: SoftTask
) -> None:
    bench = _soft_utility.SoftBench(*loaded, task, SETTINGS)
    before = bench.engine("soft_prompt").weights_digest()
    private = bench.trained("soft_prompt", 3.0)
    assert private.report["private"] is True
    assert 0.0 < private.report["epsilon"] <= 3.0
    assert private.report["delta"] == pytest.approx(task.delta)
    assert (private.report["step"], private.report["steps"]) == (2, 2)
    assert bench.trained("soft_prompt", math.inf).report["private"] is False
    assert bench.engine("soft_prompt").weights_digest() == before
    assert 0.0 <= bench.accuracy(private) <= 1.0


@pytest.mark.benches
def test_zero_shot_asks_the_model_itself_at_the_mask(loaded: tuple[Any, Any], task: SoftTask) -> None:
    model, tokenizer = loaded
    words = [tokenizer.encode(word, add_special_tokens=False)[0] for word in task.task.words]
    expected = []
    for text in task.questions:
        ids = tokenizer(f"{text} it was<mask>.", return_tensors="pt")["input_ids"]
        with torch.no_grad():
            expected.append(model(ids).logits[0, (ids[0] == tokenizer.mask_token_id).nonzero()[0, 0], words])
    found = _soft_utility.scores(model, tokenizer, task)
    assert torch.allclose(found, torch.stack(expected), atol=1e-5)
    likeliest = [task.task.labels[int(one.argmax())] for one in expected]
    assert _soft_utility.answers(model, tokenizer, task) == likeliest


@pytest.mark.benches
def test_cells_are_asked_once_per_run_and_shown_in_percent(task: SoftTask, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    bench = _soft_utility.SoftBench(None, None, task, SETTINGS)
    monkeypatch.setattr(bench, "trained", lambda method, epsilon: asked.append((method, epsilon)) or epsilon)
    monkeypatch.setattr(bench, "accuracy", lambda prompt: 0.5 if prompt == 3.0 else 0.75)
    monkeypatch.setattr(bench, "zero_shot", lambda: 0.25)
    found = _soft_utility.cells(bench, [3.0, math.inf], methods=["prefix"], runs=2, say=lambda said: None)
    assert asked == [("prefix", 3.0)] * 2 + [("prefix", math.inf)] * 2
    assert found["prefix"] == {"3": [0.5, 0.5], "inf": [0.75, 0.75]}
    lines = _soft_utility.table("SST-2", found, [3.0, math.inf]).splitlines()
    assert "inf, NOT PRIVATE" in lines[0]
    assert lines[2].split() == ["zero-shot", "25.0", "25.0"]
    assert lines[3].split() == ["prefix", "50.0", "+-", "0.0", "75.0", "+-", "0.0"]


@pytest.mark.benches
@pytest.mark.parametrize("way", _soft_baselines.BASELINES)
@pytest.mark.parametrize("epsilon", [8.0, math.inf])
def test_a_baseline_tunes_a_copy_with_noise_for_its_epsilon(
    loaded: tuple[Any, Any], task: SoftTask, way: str, epsilon: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opacus")
    pytest.importorskip("peft")
    from opacus.optimizers import DPOptimizer

    made: list[dict[str, Any]] = []
    keep = DPOptimizer.__init__
    monkeypatch.setattr(DPOptimizer, "__init__", lambda self, *a, **k: made.append(k) or keep(self, *a, **k))
    model, tokenizer = loaded
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = _soft_baselines.tuned_by_opacus(
        model, tokenizer, task, way=way, epsilon=epsilon, steps=2, batch=4, clip=0.1, rate=0.01
    )
    assert 0.0 <= found <= 1.0
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    if math.isinf(epsilon):
        assert not made
    else:
        plan = _soft_baselines.plan_training(
            13, epsilon=8.0, delta=task.delta, expected_batch_size=4, l2_clip_norm=0.1, width=7, steps=2
        )
        assert made[0]["noise_multiplier"] == pytest.approx(plan.noise_multiplier)
        assert (made[0]["max_grad_norm"], made[0]["expected_batch_size"]) == (0.1, 4)


# ---------------------------------------------------------------------------------------------------------------- speed


@pytest.mark.benches
@pytest.mark.parametrize(("kind", "method"), [("sequence_classification", "soft_prompt"), ("masked_lm", "prefix")])
def test_all_who_race_use_all_rows(kind: str, method: str) -> None:
    pytest.importorskip("opacus")
    pytest.importorskip("peft")
    track = Track(SpeedSize(**{**vars_of(TINY), "kind": kind}))
    runners = {way: (track.ready(way, method, steps=2), TINY.rows) for way in WAYS}
    found = race(runners, turns=1)
    assert all(one.clock[0] > 0.0 for one in found.values())


def vars_of(size: SpeedSize) -> dict[str, Any]:
    return {name: getattr(size, name) for name in SpeedSize.__dataclass_fields__}


@pytest.mark.benches
def test_rows_of_the_race_fill_their_length() -> None:
    track = Track(TINY)
    given = track._given(in_front=0)
    assert given["input_ids"].shape == (TINY.rows, TINY.tokens)
    assert bool(given["attention_mask"].all())
    assert given["labels"].tolist() == [0, 1, 0, 1]


@pytest.mark.benches
def test_only_the_prompt_learns_in_the_others_models() -> None:
    pytest.importorskip("peft")
    for method, width in (("soft_prompt", TINY.width), ("prefix", 2 * TINY.layers * TINY.width)):
        model = Track(TINY)._wrapped(method)
        learning = [tuple(weight.shape) for weight in model.parameters() if weight.requires_grad]
        assert learning == [(TINY.virtual_tokens, width)]


@pytest.mark.benches
def test_the_profile_finds_every_part_and_leaves_everything_as_it_was() -> None:
    before = [getattr(holder, name) for _, holder, name in _soft_profile._PLACES]
    spent = _soft_profile.shares(Track(TINY), "soft_prompt", steps=1)
    assert [getattr(holder, name) for _, holder, name in _soft_profile._PLACES] == before
    assert set(spent) == set(_soft_profile.PARTS)
    assert all(seconds > 0.0 for seconds in spent.values())
    assert len(_soft_profile.table({"prefix": spent}).splitlines()) == 1 + len(spent)


@pytest.mark.benches
def test_memory_is_the_peak_and_what_of_it_came_after_the_model() -> None:
    found = _soft_memory.measured("ours", "soft_prompt", TINY, device="cpu")
    assert 0.0 <= found["beyond"] < found["peak"]
    assert found["peak"] > 50.0  # MiB: Python with torch


# -------------------------------------------------------------------------------------------------------- what it says


@pytest.mark.benches
def test_goals_are_met_or_missed() -> None:
    names = ("ours_over_peft, soft_prompt, head", "ours_over_peft, prefix, head")
    said = bench_soft_prompts.verdicts({names[0]: 1.3, names[1]: 1.31, names[1] + bench_soft_prompts.BESIDE: 1.02})
    assert said.splitlines() == [
        "ours_over_peft, soft_prompt, head: 1.3 (<= 1.3: met)",
        "ours_over_peft, soft_prompt, masked: not measured (<= 1.3)",
        "ours_over_peft, prefix, head: 1.31 (<= 1.3: MISSED; 1.02 by the processor)",
        "ours_over_peft, prefix, masked: not measured (<= 1.3)",
    ]


@pytest.mark.benches
def test_a_ratio_of_the_table_is_ours_over_the_other() -> None:
    times = {"ours": Times((3.0, 3.0), (2.0, 2.0)), "peft": Times((2.0, 2.0), (4.0, 4.0))}
    lines = bench_soft_prompts.speed_table("t", times, rows=30).splitlines()
    assert lines[1].split() == ["ours", "3.000", "10.0", "1.50", "0.50", "-"]


@pytest.mark.benches
def test_every_file_is_asked_on_the_given_model_and_one_has_baselines(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"text": f"Film {n}", "label_name": ("negative", "positive")[n % 2], "split": split}
        for split in ("train", "test")
        for n in range(12)
    ]
    files = [tmp_path / "sst2.jsonl.gz", tmp_path / "other.jsonl.gz"]
    for path in files:
        write_rows(path, [{**row, "label_name": row["label_name"].replace("negative", "no")} for row in rows])
    seen: list[tuple[str, int, Any]] = []

    def cells(bench: Any, epsilons: Any, **_: Any) -> dict[str, Any]:
        seen.append((bench.task.title, bench.model.config.hidden_size, bench.asked.steps))
        return {"prefix": {f"{epsilon:g}": [0.5] for epsilon in epsilons}}

    monkeypatch.setattr(_soft_utility, "cells", cells)
    monkeypatch.setattr(_soft_baselines, "tuned_by_opacus", lambda *a, epsilon, **k: 1.0 / epsilon)
    monkeypatch.setattr(bench_soft_prompts.speed, "missing", lambda *packages: "")
    given = ["--data", *map(str, files), "--model", str(base), "--baselines", "--steps", "3", "--length", "24"]
    bench = bench_soft_prompts.Bench(bench_soft_prompts.parsed(given), TINY)
    bench.utility()
    assert seen == [("SST-2", 32, 3), ("other", 32, 3)]
    assert list(bench.numbers["utility"]) == ["SST-2", "other"]
    assert list(bench.numbers["baselines"]) == ["SST-2"]
    told = capsys.readouterr().out
    assert "12 private records, delta 0.008, 3 steps of 12 expected, 12 questions" in told
    assert "BASELINE, Opacus, LoRA" in told


@pytest.mark.benches
def test_settings_name_the_size(tmp_path: Path) -> None:
    full = bench_soft_prompts.parsed(["--full"])
    assert full.batch == 1_024
    assert bench_soft_prompts.size_of(full).layers == 12
    asked = bench_soft_prompts.parsed(["--layers", "1", "--width", "64", "--rows", "4", "--batch", "7"])
    assert asked.batch == 7
    assert bench_soft_prompts.size_of(asked) == SpeedSize(layers=1, width=64, rows=4)
    with pytest.raises(SystemExit, match="expected --model FOLDER, or --corpus and --public"):
        bench_soft_prompts.Bench(asked, TINY)._base()
