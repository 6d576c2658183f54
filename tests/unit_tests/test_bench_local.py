"""The local benchmark's own arithmetic: that all write as much, what is counted where, and what it calls met."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import _local_growth
import _local_invink
import _local_memory
import _local_profile
import _local_utility
import bench_local
import torch
from _local_model import FRAME_TOKENS, SMALL, TEMPLATE, Size, input_ids, instruction, make_tokenizer, words
from _local_runs import Place, Times, race

TINY = Size(layers=1, width=64, vocabulary=300, slots=2, prompt=40, tokens=12)
NESTED = 'A = "x"\nB = f"{"all" if A == "x" else A} on {A}"\n'


@pytest.fixture(scope="module")
def place() -> Place:
    return Place(TINY)


# ------------------------------------------------------------------------------------------ what is written and read


@pytest.mark.benches
@pytest.mark.parametrize("mechanism", ["recentered_clip", "gumbel"])
def test_a_private_text_has_as_many_tokens_as_were_asked_for(place: Place, mechanism: str) -> None:
    assert [place.ours(mechanism)()() for _ in range(3)] == [TINY.tokens] * 3


@pytest.mark.benches
def test_plain_generation_writes_as_many(place: Place) -> None:
    assert place.plain()()() == TINY.tokens


@pytest.mark.benches
def test_one_sample_per_token_reads_all_prompts_for_each_token(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    open_full = place.engine.open_full
    monkeypatch.setattr(place.engine, "open_full", lambda *a, **k: opened.append(len(a[0])) or open_full(*a, **k))
    assert place.ours("gumbel", redraw_every=1, tokens=3)()() == 3
    assert opened == [TINY.slots] * 3
    opened.clear()
    assert place.ours("gumbel")()() == TINY.tokens
    assert opened == [TINY.slots]


@pytest.mark.benches
def test_the_end_of_the_text_is_the_last_thing_that_the_model_writes(place: Place) -> None:
    with torch.inference_mode():
        logits = place.model(input_ids(TINY)).logits
    others = logits[..., 2:].amin(dim=-1)
    assert (logits[..., place.model.config.eos_token_id] < others).all()


@pytest.mark.benches
def test_what_was_written_without_spaces_is_read_as_the_same_tokens() -> None:
    tokenizer = make_tokenizer(TINY)
    ids = [*range(2, TINY.vocabulary, 7), 10, 10, 9]
    assert tokenizer.encode("".join(tokenizer.convert_ids_to_tokens(ids)), add_special_tokens=False) == ids


@pytest.mark.benches
@pytest.mark.parametrize("shared", [0, 20])
def test_the_instruction_is_read_once_where_it_is_long(
    place: Place, monkeypatch: pytest.MonkeyPatch, shared: int
) -> None:
    read: list[int] = []
    forward = place.engine._engine.body.forward
    monkeypatch.setattr(
        place.engine._engine.body, "forward", lambda ids, *a, **k: read.append(ids.numel()) or forward(ids, *a, **k)
    )
    place.ours("recentered_clip", shared=shared, tokens=1)()()  # the first one also tries the shape out
    read.clear()
    assert place.ours("recentered_clip", shared=shared, tokens=1)()() == 1
    assert sum(read) == TINY.rows * (TINY.prompt - max(shared - 1, 0))  # the last shared token stays with its row


@pytest.mark.parametrize("shared", [0, 15])
def test_records_fill_their_prompts_and_are_not_cut(shared: int) -> None:
    size = Size(layers=1, width=64, vocabulary=300, slots=2, prompt=40, tokens=12, shared=shared)
    record = words(size.prompt - FRAME_TOKENS - shared, seed=3, vocabulary=300)
    whole = f"{instruction(size)}\n\ntext: {record}\n\ntext:"
    length = len(make_tokenizer(size).encode(whole, add_special_tokens=False))
    assert size.prompt - FRAME_TOKENS + 4 <= length <= size.prompt


@pytest.mark.benches
def test_all_prompts_of_the_other_package_are_as_long_as_ours() -> None:
    private, public, texts = _local_invink.prompts(TINY)
    tokenizer = make_tokenizer(TINY)
    tokenizer.chat_template = TEMPLATE
    said = [private.format("w0", text) for text in texts] + [public.format("w0", "")]
    messages = [[{"role": "system", "content": "w1"}, {"role": "user", "content": one}] for one in said]
    shown = [tokenizer.apply_chat_template(one, tokenize=False) for one in messages]
    assert [len(tokenizer.encode(one, add_special_tokens=False)) for one in shown] == [TINY.prompt] * TINY.rows
    assert len(texts) == TINY.slots
    assert input_ids(TINY).shape == (TINY.rows, TINY.prompt)


def test_only_quotes_within_braces_are_mended() -> None:
    def old_python(source: str) -> Any:
        if 'f"{"' in source:
            raise SyntaxError("f-string: expecting '}'", ("m", 2, 1, "", 2, 1))
        return ast.parse(source)

    found = _local_invink.mended(NESTED, parses=old_python)
    assert found == "A = \"x\"\nB = f\"{'all' if A == 'x' else A} on {A}\"\n"
    values: dict[str, Any] = {}
    exec(found, values)  # noqa: S102  a line of this test
    assert values["B"] == "all on x"


@pytest.mark.benches
def test_a_source_that_is_wrong_otherwise_stays_an_error() -> None:
    with pytest.raises(SyntaxError):
        _local_invink.mended("a = (\n")
    assert _local_invink.mended("a = 1\n") == "a = 1\n"


@pytest.mark.benches
def test_a_missing_package_is_named_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_local_invink.importlib.util, "find_spec", lambda name: None if name == "invink" else name)
    assert _local_invink.missing() == f"not installed: invink ({_local_invink.INSTALL})"


# ------------------------------------------------------------------------------------------------------------ the clock


@pytest.mark.benches
def test_a_ratio_is_taken_turn_by_turn() -> None:
    slow, fast = Times((4.0, 9.0, 30.0), (2.0, 2.0, 2.0)), Times((2.0, 1.0, 10.0), (1.0, 4.0, 1.0))
    assert slow.over(fast) == 3.0  # of 2, 9 and 3; in order of size they would be 4, 4.5 and 3, and their medians 4.5
    assert slow.processor_over(fast) == 2.0
    assert slow.median == 9.0


@pytest.mark.benches
def test_those_who_race_take_turns_and_each_begins_once() -> None:
    order: list[str] = []

    def runner(name: str) -> Any:
        return lambda: lambda: order.append(name) or 5

    found = race({name: (runner(name), 5) for name in "abc"}, turns=3, warm_up=False)
    assert "".join(order) == "abcbcacab"
    assert {name: (len(one.clock), len(one.processor)) for name, one in found.items()} == dict.fromkeys("abc", (3, 3))


@pytest.mark.benches
def test_a_race_in_which_one_wrote_less_is_no_race() -> None:
    with pytest.raises(RuntimeError, match="expected 7 tokens from lazy, found 5"):
        race({"lazy": (lambda: lambda: 5, 7)}, turns=1)


@pytest.mark.benches
def test_a_part_within_a_part_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 1.0, 5.0, 7.0])
    monkeypatch.setattr(_local_profile.time, "perf_counter", lambda: next(ticks))
    watch = _local_profile.Watch()
    with watch.part("outer"):
        watch.wrapped("inner", lambda: None)()
    assert dict(watch.spent) == {"outer": 3.0, "inner": 4.0}


@pytest.mark.benches
def test_the_profile_finds_every_part_and_leaves_everything_as_it_was(place: Place) -> None:
    before = [getattr(holder, name) for _, holder, name in _local_profile._PLACES]
    spent = _local_profile.shares(place, place.ours("recentered_clip"))
    assert [getattr(holder, name) for _, holder, name in _local_profile._PLACES] == before
    assert set(spent) == set(_local_profile.PARTS)
    assert all(seconds > 0.0 for seconds in spent.values())
    assert 0.0 < _local_profile.beyond_model(spent) < 1.0
    assert len(_local_profile.table(spent, tokens=TINY.tokens).splitlines()) == 1 + len(spent)


@pytest.mark.benches
def test_memory_is_the_peak_and_what_of_it_came_after_the_model() -> None:
    found = _local_memory.measured("ours", TINY, device="cpu", dtype="float32")
    assert 0.0 <= found["beyond"] < found["peak"]
    assert found["peak"] > 50.0  # MiB: Python with torch


# -------------------------------------------------------------------------------------------------------- what it says


@pytest.mark.benches
def test_goals_are_met_or_missed_in_their_own_direction() -> None:
    said = bench_local.verdicts({"reprefill_over_ours": 31.0, "ours_over_generate": 1.01, "invink_over_ours": 1.4})
    assert said.splitlines() == [
        "reprefill_over_ours: 31 (>= 30: met)",
        "invink_over_ours: 1.4 (>= 1.5: MISSED)",
        "ours_over_generate: 1.01 (<= 1: MISSED)",
        "gumbel_over_generate: not measured (<= 1)",
        "peak_memory_over_generate: not measured (<= 1.1)",
    ]


@pytest.mark.benches
def test_reading_all_prompts_anew_is_scaled_to_the_whole_text() -> None:
    bench = bench_local.Bench(bench_local.parsed([]), SMALL)
    one, two = Times((2.0, 2.0), (1.0, 1.0)), Times((3.0, 3.0), (1.0, 1.0))
    times = {bench_local.OURS: one, bench_local.GUMBEL: two, bench_local.PLAIN: one, bench_local.INVINK: two}
    bench._judge(times, {bench_local.OURS: one, bench_local.TANG: two})
    assert bench.measured == {
        "reprefill_over_ours": 1.5 * SMALL.tokens / bench_local.TANG_TOKENS,
        "invink_over_ours": 1.5,
        "ours_over_generate": 1.0,
        "gumbel_over_generate": 1.5,
    }
    assert "taken 50 times" in bench_local.speed_table(times, two, SMALL)


@pytest.mark.benches
def test_growth_measures_each_size_once_and_draws_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Size] = []

    def point(size: Size, **_: Any) -> _local_growth.Point:
        measured.append(size)
        return _local_growth.Point(0, 2.0, 1.0, 2.0)

    monkeypatch.setattr(_local_growth, "_point", point)
    found = _local_growth.grown(device="cpu", dtype=torch.float32)
    assert len(set(measured)) == len(measured)
    assert {name: tuple(one.value for one in some) for name, some in found.items()} == _local_growth.STEPS
    assert len(_local_growth.table(found).splitlines()) == 1 + sum(map(len, _local_growth.STEPS.values()))
    _local_growth.picture(found, tmp_path / "new" / "growth.png", say=print)
    assert (tmp_path / "new" / "growth.png").stat().st_size > 1_000


# ------------------------------------------------------------------------------------------------------------- utility


@pytest.mark.benches
def test_ways_are_compared_at_one_epsilon_and_leave_the_bench_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = _local_utility.tasks(Path("nowhere.jsonl.gz"), queries=8, num_slots=5, size=20)["bank questions"]
    rows, seen = bench.rows, []
    monkeypatch.setattr(bench, "protected", lambda epsilon, shots, **way: seen.append((epsilon, shots, way)))
    monkeypatch.setattr(bench, "accuracy", lambda released: (0.25, 0.5))
    found = _local_utility.accuracies(bench, 2.0, runs=1, shots=3, say=lambda said: None)
    assert bench.rows == rows
    assert [(epsilon, shots) for epsilon, shots, _ in seen] == [(2.0, 3)] * 3
    assert [(used["noise"], used["rows"].redraw_every) for *_, used in seen] == [
        ("gumbel", None),
        ("gumbel", "run"),
        ("recentered_clip", "run"),
    ]
    assert set(found) == {"no demonstrations", *_local_utility.WAYS}
    assert "25.0 +- 0.0" in _local_utility.line("a way", found["no demonstrations"])


def test_the_bank_questions_are_a_task_with_declared_sizes() -> None:
    task = _local_utility.bank(queries=8, size=20)
    assert len(task.train) == 80
    assert len(task.test) == 8
    assert set(task.sizes.values()) == {20}
    assert {row["label_name"] for row in task.test} == set(task.labels)
