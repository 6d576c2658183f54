"""Demonstrations per second at 1, 2 and 4 workers of a Ray cluster, with a model that makes one wait.

Each call of the fake model takes --call-ms and no CPU, as a client of a server does; texts have --tokens tokens, each
of which asks the model once in public and once in private. Ledger and memo are on a PostgreSQL server of its own (fsync
on, unix socket), or on --postgres. Workers have started before the clock does; what starting takes is beside it.

    make bench-ray
    make bench-ray ARGS="--items 96 --workers 1 2 4 8"
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from langchain_dpicl import (
    Decoding,
    DemonstrationSynthesizer,
    Noise,
    PrivacyBudgetCallbackHandler,
    PrivateExamples,
    Rows,
)
from langchain_dpicl.backends.fake import FakeBackend
from langchain_dpicl.distributed import RayExecutor, Workplace
from langchain_dpicl.stores import PostgresMemo

RECORD = "a private record"
WORDS = {" paid": 0.4, " late": 0.3, " twice": 0.2, " soon": 0.1}


@dataclass(frozen=True)
class Row:
    """One line of the table: workers (0: this process, without Ray), tokens per sample, and what was seen."""

    workers: int
    redraw_every: int
    per_second: float
    start: float


def engine(*, call_ms: float) -> FakeBackend:
    """Returns an engine whose calls take so long: once a token in public, once in private."""
    waited: set[tuple[bytes, ...]] = set()

    def chances(prompt: str, prefix: tuple[bytes, ...]) -> Mapping[str, float]:
        if RECORD not in prompt:
            waited.clear()
            time.sleep(call_ms / 1000)
        elif prefix not in waited:  # the rows of one call wait together
            waited.add(prefix)
            time.sleep(call_ms / 1000)
        return WORDS

    return FakeBackend(chances, max_top_k=4)


def records() -> PrivateExamples:
    return PrivateExamples([f"{RECORD} {place}" for place in range(100)], public_size=100, dataset_id="bench")


def place(*, ledger: str, call_ms: float) -> Workplace:
    """Returns a worker's place; called by its name, in the worker."""
    budget, memo = PrivacyBudgetCallbackHandler.open(ledger), PostgresMemo.open(ledger)
    return Workplace(engine(call_ms=call_ms), private=records(), budget=budget, memo=memo)


def measured(where: str, private: PrivateExamples, workers: int, redraw_every: int, options: argparse.Namespace) -> Row:
    """Writes texts once to start, then so many against the clock."""
    executor = None
    if workers:
        told = {"ledger": where, "call_ms": options.call_ms}
        executor = RayExecutor("bench_ray:place", options=told, num_workers=workers)
    budget = PrivacyBudgetCallbackHandler.open(where)

    def run(items: int, name: str) -> list[float]:
        made = DemonstrationSynthesizer.from_private_examples(
            private,
            llm=engine(call_ms=options.call_ms),
            budget=budget,
            epsilon=50.0,
            noise=Noise(multiplier=20.0),
            shots_per_label=items,
            max_tokens=options.tokens,
            rows=Rows(units=20, redraw_every=redraw_every),
            decoding=Decoding(candidates=4),
            component=f"{name}-{workers}-{redraw_every}",
            executor=executor,
        )
        begun = time.perf_counter()
        return [time.perf_counter() - begun for _ in made.stream(progress=False)]

    try:
        start = run(workers or 1, "start")[-1]
        seen = run(options.items * max(1, workers), "run")
    finally:
        if executor is not None:
            executor.close()
    skipped = max(1, workers)  # workers begin at the same time; from then on they are spread
    return Row(workers, redraw_every, (len(seen) - skipped) / (seen[-1] - seen[skipped - 1]), start)


def shown(rows: Sequence[Row]) -> str:
    """Returns the table."""
    lines = ["workers  tokens/sample  texts/s  efficiency  first text after s"]
    for row in rows:
        one = next(
            (each.per_second for each in rows if (each.workers, each.redraw_every) == (1, row.redraw_every)), None
        )
        share = f"{100 * row.per_second / one / row.workers:8.0f} %" if one and row.workers else " " * 10
        name = str(row.workers) if row.workers else "here"
        lines.append(f"{name:>7}  {row.redraw_every:13}  {row.per_second:7.2f}  {share}  {row.start:18.1f}")
    return "\n".join(lines)


@contextlib.contextmanager
def server(address: str | None) -> Iterator[str]:
    """Yields the address of a database; of a server of its own unless one is given."""
    if address is not None:
        yield address
        return
    from tests.postgres import running

    with running() as own:
        yield f"postgresql://owner@/{own.new_database()}?host={own.folder}&port=5432"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Texts per second by workers of a Ray cluster.")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2, 4], help="0: in this process, without Ray")
    parser.add_argument("--items", type=int, default=24, help="texts per worker")
    parser.add_argument("--tokens", type=int, default=8, help="tokens per text")
    parser.add_argument("--call-ms", type=float, default=50.0, help="what a call of the model takes")
    parser.add_argument("--postgres", help="address of a database for ledger and memo")
    options = parser.parse_args(argv)
    rows: list[Row] = []
    with server(options.postgres) as where:
        PostgresMemo.new(where).close()
        limits: dict[str, Any] = {"epsilon": 1e4, "delta": 1e-3}
        PrivacyBudgetCallbackHandler.create(where, **limits).budget.close()
        private = records()
        for redraw_every in (options.tokens, 1):
            for workers in options.workers:
                rows.append(measured(where, private, workers, redraw_every, options))
                print(rows[-1], file=sys.stderr, flush=True)
    print(shown(rows))


if __name__ == "__main__":
    main()
