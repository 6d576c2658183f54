"""What one private answer costs beyond its model calls: time and memory, with models that take no time.

The records are made up and the answers constant.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from bench_release import Instant
from numpy.typing import NDArray
from tqdm import tqdm

from langchain_dpicl import Budget, DPVotingRunnable, LabelAnswers, PrivateExamples, Rows, Serving
from langchain_dpicl.backends import PrivateProcess
from langchain_dpicl.backends.embedded import EmbeddedModel
from langchain_dpicl.backends.sync_async import run_sync
from langchain_dpicl.release.curator import release_once

QUERIES = 100_000
TARGET_MS = 0.5
"""Median of one release of ten rows: ticket, sampler, prompts, rows, sum, noise, commit."""
ALONE = {"max_concurrency": 1}
PLAIN = LabelAnswers(calibrate=False)
LABELS = ("label", "other")  # `Instant` says "label"


class InstantEngine:
    """Scores every choice alike, at once."""

    name = "instant"

    def score_choices(self, prompts: Sequence[str], choices: Sequence[str]) -> NDArray[np.float64]:
        return np.full((len(prompts), len(choices)), -1.0)

    async def ascore_choices(self, prompts: Sequence[str], choices: Sequence[str]) -> NDArray[np.float64]:
        return self.score_choices(prompts, choices)


def voter(llm: Any, *, max_queries: int, **options: Any) -> DPVotingRunnable:
    """Returns a Runnable of 10 slots of 4 shots on 8,000 made-up records by default; ledger in memory."""
    records = [{"text": f"question number {i} about my money", "queue": LABELS[i % 2]} for i in range(8_000)]
    private = PrivateExamples(
        records, label_key="queue", labels=LABELS, public_size={LABELS[0]: 4_000, LABELS[1]: 4_000}
    )
    given: dict[str, Any] = {
        "rows": Rows(slots=10, shots=4),
        "answers": PLAIN,
        "serving": Serving(memo_size=0),
        **options,
    }
    return DPVotingRunnable.from_private_examples(
        private, llm=llm, budget=Budget(epsilon=1.0, delta=1e-5), epsilon=1.0, max_queries=max_queries, **given
    )


@dataclass(frozen=True)
class Times:
    """Milliseconds per call: by the clock, and what the processor spent, which a busy machine adds less to."""

    p50: float
    p95: float
    processor: float

    def shown(self, what: str) -> str:
        """Returns one line."""
        return f"{what:<38}p50 {self.p50:.3f} ms, p95 {self.p95:.3f} ms, processor {self.processor:.3f} ms"


def times_of(calls: Sequence[Callable[[int], Any]], *, rounds: int, warm_up: int, shown: str) -> list[Times]:
    """Times each call; they take turns, so that a busy machine is busy for all of them."""
    taken: list[list[tuple[int, int]]] = [[] for _ in calls]
    for turn in tqdm(range(warm_up + rounds), desc=shown, leave=False, disable=None):
        for call, times in zip(calls, taken, strict=True):
            clock, processor = time.perf_counter_ns(), time.process_time_ns()
            call(turn)
            spent = time.process_time_ns() - processor
            times.append((time.perf_counter_ns() - clock, spent))
    return [_times(times[warm_up:]) for times in taken]


def _times(taken: Sequence[tuple[int, int]]) -> Times:
    clock, processor = np.array(taken, dtype=np.float64).T / 1e6
    p50, p95 = np.percentile(clock, [50, 95])
    return Times(float(p50), float(p95), float(np.median(processor)))


def time_release(rounds: int) -> Times:
    """Times answers with an engine that takes no time."""
    runnable = voter(InstantEngine(), max_queries=QUERIES, **ONE_SHOT)
    answer = lambda turn: runnable.invoke(f"query {turn}", ALONE)  # noqa: E731
    return times_of([answer], rounds=rounds, warm_up=200, shown="answers")[0]


ONE_SHOT: dict[str, Any] = {"rows": Rows(units=10)}
"""Ten rows of one record each, on average: the default shape."""


def time_bare_release(rounds: int) -> Times:
    """Times what an answer is made of without its LangChain run: ticket, sample, prompts, rows, sum, noise, commit."""
    runnable = voter(InstantEngine(), max_queries=QUERIES, **ONE_SHOT)

    def release(turn: int) -> int | None:
        ticket = runnable.share.reserve("query")
        released = release_once(
            runnable.private,
            ticket,
            plan=runnable.plan.release,
            rows=runnable.rows.ask,
            render=runnable.wording.renderer([(f"query {turn}",)]),
            width=len(LABELS),
        )
        return run_sync(released).index

    return times_of([release], rounds=rounds, warm_up=200, shown="releases")[0]


def time_beside_batch(rounds: int) -> tuple[Times, Times]:
    """Times answers of ten rows, and LangChain's `batch` of ten prompts of the same wording, on the same model."""
    chat = Instant()
    runnable = voter(chat, max_queries=QUERIES, answers=PLAIN.replace(votes="text"))
    shots = runnable.wording.renderer([("query",)])([{"text": "question about my money", "queue": LABELS[0]}] * 4)
    prompts = list(shots) * 10
    answer = lambda turn: runnable.invoke(f"query {turn}", ALONE)  # noqa: E731
    ours, theirs = times_of(
        [answer, lambda _: chat.batch(prompts, ALONE)], rounds=rounds, warm_up=20, shown="beside .batch"
    )
    return ours, theirs


def time_in_a_process(rounds: int) -> dict[str, Times]:
    """Times answers of ten rows with an engine here, and with the same engine in a process of its own."""
    found: dict[str, Times] = {}
    for shown, maker in (("instant", InstantEngine), ("embedded", EmbeddedModel)):
        with PrivateProcess(maker) as process:
            answers = [voter(llm, max_queries=QUERIES, **ONE_SHOT) for llm in (maker(), process)]
            calls = [partial(_answer, runnable) for runnable in answers]
            here, there = times_of(calls, rounds=rounds, warm_up=20, shown=f"{shown}, in a process")
        found |= {f"{shown}_here": here, f"{shown}_in_a_process": there}
    return found


def _answer(runnable: DPVotingRunnable, turn: int) -> Any:
    return runnable.invoke(f"query {turn}", ALONE)


def measure_memory(queries: int) -> dict[str, float]:
    """Returns the bytes that stay per query, and the largest amount beyond the start, over `queries` answers."""
    runnable = voter(InstantEngine(), max_queries=QUERIES)
    for turn in range(200):
        runnable.invoke(f"warm up {turn}", ALONE)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for turn in tqdm(range(queries), desc="memory", leave=False, disable=None):
        runnable.invoke(f"query {turn}", ALONE)
    peak = tracemalloc.get_traced_memory()[1] - before
    gc.collect()
    stays = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return {"queries": float(queries), "bytes_per_query": stays / queries, "peak_bytes": float(peak)}


def verdict(value: float, limit: float) -> str:
    """Returns PASS where `value` is below `limit`."""
    return "PASS" if value < limit else "FAIL"


def measure_speed(*, rounds: int = 2_000, batches: int = 300, queries: int = 2_000) -> dict[str, Any]:
    """Measures, prints, and returns the numbers."""
    bare, release = time_bare_release(rounds), time_release(rounds)
    print(bare.shown("one release, 10 rows, instant engine"))
    print(f"  {verdict(bare.p50, TARGET_MS)}: p50 below {TARGET_MS} ms", flush=True)
    print(release.shown("one answer: with its LangChain run"))
    ours, theirs = time_beside_batch(batches)
    print(ours.shown("one answer, 10 rows, fake chat model"))
    print(theirs.shown("LangChain's .batch of 10 such prompts"))
    print(
        f"  {verdict(ours.p50, theirs.p50)}: p50 of one answer (10 rows and the public prompt) below .batch", flush=True
    )
    apart = time_in_a_process(batches)
    for shown in ("instant", "embedded"):
        here, there = apart[f"{shown}_here"], apart[f"{shown}_in_a_process"]
        print(there.shown(f"one answer, {shown} engine, own process"))
        print(
            f"  {there.p50 / here.p50:.2f} times as long as in this process, {there.p50 - here.p50:+.3f} ms", flush=True
        )
    memory = measure_memory(queries)
    stays, peak = memory["bytes_per_query"], memory["peak_bytes"] / 1e6
    print(
        f"{f'memory over {queries:,} answers':<38}{stays:.0f} bytes stay per query, peak {peak:.2f} MB over the start"
    )
    times = {"bare_release": bare, "release": release, "chat": ours, "batch": theirs, **apart}
    return {**{name: asdict(found) for name, found in times.items()}, "memory": memory}
