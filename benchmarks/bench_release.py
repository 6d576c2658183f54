"""What our own code costs per private answer, part by part, with a model that answers at once.

Every row of the table is one function under `@part`: it prepares what it needs and returns what is timed. Calls are
timed one by one, so that other work on the machine moves the tail and hardly the median. Run it on an idle core:

    python benchmarks/bench_release.py
    python benchmarks/bench_release.py --seconds 3 --only ledger
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import RunnableConfig, RunnableLambda

from langchain_dpicl import Budget, DPVotingRunnable, LabelAnswers
from langchain_dpicl.backends.private_calls.call import CallPool, OpaqueValue, Request, RetryPolicy, silence
from langchain_dpicl.backends.sync_async import EffectGenerator
from langchain_dpicl.budget.handler import RunEvents, resolve_budget
from langchain_dpicl.privacy.ledger.shares import Share
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.privacy.mechanisms.bounded import VoteSum
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.privacy.mechanisms.release_plan import GumbelMechanism, PoissonUnits, ReleasePlan
from langchain_dpicl.runs.query_runnable import TicketCharge

UNITS = 8000
ROWS = 10
LABELS = 4
QUERIES = 1_000_000
PLAN = ReleasePlan(
    sampler=PoissonUnits(ROWS / UNITS), aggregation=VoteSum(), mechanism=GumbelMechanism(20.0), adjacency="add_remove"
)

Action = Callable[[], object]
Part = Callable[[], Action]
PARTS: dict[str, Part] = {}


def part(name: str) -> Callable[[Part], Part]:
    """Adds a row to the table: the function returns what is timed."""

    def add(prepare: Part) -> Part:
        PARTS[name] = prepare
        return prepare

    return add


# -- what the parts share ----------------------------------------------------------------------------------------


class Instant(BaseChatModel):
    """A model that answers at once."""

    @property
    def _llm_type(self) -> str:
        return "instant"

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        del messages, stop, run_manager, kwargs
        return ChatResult(generations=[ChatGeneration(message=AIMessage("label"))])


class Nothing(DPVotingRunnable):
    """Answers without a release."""

    def _answer_effects(
        self, value: Any, pay: TicketCharge, config: RunnableConfig, kwargs: Mapping[str, Any]
    ) -> EffectGenerator[Any]:
        del pay, config, kwargs
        return value
        yield  # makes this a generator


class Charged(Nothing):
    """Pays for an answer that needs no row."""

    def _answer_effects(
        self, value: Any, pay: TicketCharge, config: RunnableConfig, kwargs: Mapping[str, Any]
    ) -> EffectGenerator[Any]:
        with pay("query") as ticket:
            ticket.burn()
            ticket.commit()
        return (yield from super()._answer_effects(value, pay, config, kwargs))


@cache
def account() -> tuple[Budget, Share]:
    """Returns a budget in memory and a share with tickets for every run of this file."""
    budget = Budget(epsilon=8.0, delta=1e-6)
    ticket = Ticket("query", PLAN.block_event(1), max_count=QUERIES, refundable=True)
    return budget, budget.declare("queries", tickets=[ticket])


def fields() -> dict[str, Any]:
    """Returns the fields of a component that reads nothing but its budget and its share."""
    budget, share = account()
    unread = dict.fromkeys(("private", "plan", "wording", "tenants", "task", "rows"))
    return {**unread, "budget": budget, "share": share, "answers": LabelAnswers()}


def pay_once() -> None:
    """What the ledger does for one query."""
    reservation = account()[1].reserve("query")
    reservation.burn()
    reservation.commit()
    reservation.give_back()


def prompt() -> list[Any]:
    return [HumanMessage("A record and a question")]


# -- the parts -----------------------------------------------------------------------------------------------------


@part("ledger in memory: reserve, burn, commit, give back")
def ledger() -> Action:
    return pay_once


@part(f"sampler: about {ROWS} rows from {UNITS:,} units")
def sampler() -> Action:
    return lambda: PLAN.sampler.draw(UNITS, rng=SYSTEM_RANDOM)


@part(f"Gumbel release of {ROWS} votes for {LABELS} labels")
def release() -> Action:
    rows = np.eye(LABELS)[np.arange(ROWS) % LABELS]
    return lambda: PLAN.mechanism.release(PLAN.bound(rows, width=LABELS), rng=SYSTEM_RANDOM)


@part("events: resolve_budget and RunEvents, nobody listens")
def events() -> Action:
    budget, share = account()
    configs: list[RunnableConfig] = []
    RunnableLambda(lambda _, config: configs.append(config)).invoke(0)  # type: ignore[misc, arg-type]

    def tell() -> None:
        with RunEvents("Component", budget=budget, share=share, config=configs[0]) as run:
            resolve_budget(budget, configs[0])
            run.tickets += 1

    return tell


@part("LangChain run of a Runnable that charges nothing")
def empty_run() -> Action:
    runnable = Nothing(**fields())
    return lambda: runnable.invoke("question")


@part("LangChain run of a Runnable that pays once")
def paid_run() -> Action:
    runnable = Charged(**fields())
    return lambda: runnable.invoke("question")


@part("LangChain run of a stock RunnableLambda")
def stock_run() -> Action:
    runnable = RunnableLambda(lambda question: question)
    return lambda: runnable.invoke("question")


@part("one call, bare: the model's _generate")
def bare_call() -> Action:
    model = Instant()
    return lambda: model._generate(prompt())  # noqa: SLF001  the measure of all calls


@part("one call, silent")
def silent_call() -> Action:
    model, retry, request = silence(Instant()), RetryPolicy(), _request()
    return lambda: model.ask(request, retry=retry)


@part(f"{ROWS} calls, silent, max_concurrency=1")
def silent_calls() -> Action:
    calls, requests = CallPool(silence(Instant()), RetryPolicy(), 1), [_request()] * ROWS
    return lambda: calls.many(requests)


@part(f"{ROWS} calls, LangChain's llm.batch, max_concurrency=1")
def stock_calls() -> Action:
    model = Instant()
    return lambda: model.batch([prompt() for _ in range(ROWS)], {"max_concurrency": 1})


def _request() -> Request:
    return Request(OpaqueValue("A record and a question"), lambda _: prompt(), {})


# -- the table -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Times:
    """Microseconds per call."""

    least: float
    p50: float
    p95: float
    calls: int


def measure(action: Action, *, seconds: float) -> Times:
    """Times single calls for so long, after a warm-up; the collector of garbage stays on, as in use."""
    for _ in range(20):
        action()
    gc.collect()
    times: list[int] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 20:
        start = time.perf_counter_ns()
        action()
        times.append(time.perf_counter_ns() - start)
    least, p50, p95 = (float(np.quantile(times, q)) / 1e3 for q in (0.0, 0.5, 0.95))
    return Times(least, p50, p95, len(times))


def bytes_per_query(queries: int) -> float:
    """Returns how much a ledger in memory grows with each query."""
    pay_once()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(queries):
        pay_once()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return grown / queries


def table(names: list[str], *, seconds: float) -> Iterator[str]:
    """Yields the lines of the table as they are measured."""
    yield f"{'microseconds per call':<58}{'p50':>9}{'p95':>9}{'least':>9}{'calls':>9}"
    for name in names:
        times = measure(PARTS[name](), seconds=seconds)
        yield f"{name:<58}{times.p50:>9.1f}{times.p95:>9.1f}{times.least:>9.1f}{times.calls:>9,}"


def main(arguments: list[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each part is timed")
    parser.add_argument("--only", default="", help="parts whose name holds this text")
    parser.add_argument("--queries", type=int, default=2000, help="queries to weigh the ledger with; 0: do not")
    options = parser.parse_args(arguments)
    names = [name for name in PARTS if options.only in name]
    for line in table(names, seconds=options.seconds):
        print(line, flush=True)
    if options.queries:
        grown = bytes_per_query(options.queries)
        print(f"ledger in memory: {grown:.0f} bytes per query, {grown * 10_000 / 2**20:.1f} MiB for 10,000 queries")
    return 0


if __name__ == "__main__":
    sys.exit(main())
