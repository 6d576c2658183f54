"""Votes of a stream read the newest run, on a standing share that never runs out, and no answer outlives its run."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import json
import logging
import os
import pickle
import random
import signal
import sqlite3
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from langchain_dpicl import DPVotingRunnable, PrivacyBudgetCallbackHandler
from langchain_dpicl.backends.fake import FakeBackend
from langchain_dpicl.exceptions import (
    ConfigurationError,
    PrivacyBudgetExceededError,
    PrivacyBudgetMismatchError,
    SealedShareError,
    TenantCapExceededError,
)
from langchain_dpicl.options import Rows, Serving
from langchain_dpicl.privacy._validate import Adjacency
from langchain_dpicl.privacy.extensions import durable_writer as writers
from langchain_dpicl.privacy.extensions import private_streams as streams
from langchain_dpicl.privacy.extensions.stream_ledger import QueryShare
from langchain_dpicl.reports import verify_report
from langchain_dpicl.reports.ledger_audit import check_ledger
from langchain_dpicl.stores import SQLiteMemo
from langchain_dpicl.streams import PrivateRange, PrivateStream
from tests.sealed_files import assert_found, with_digest
from tests.stream_times import DAY, START

LABELS = ("card", "transfer")


def leaning(prompt: str, prefix: Any) -> dict[str, float]:
    return {" card": 0.7, " transfer": 0.2}


ENGINE = FakeBackend(leaning, vocabulary=[" card", " transfer"])


def stream(**declared: Any) -> PrivateStream:
    given = {"dataset_id": "d", "time_key": "at", "unit_key": "user", "public_size": {7: 3000, 30: 9000}}
    some = PrivateStream(**{**given, "label_key": "queue", "labels": LABELS, **declared})
    rng = random.Random(0)
    some.extend(
        {"at": START - 60 * DAY + rng.random() * 400 * DAY, "user": n, "text": "hello", "queue": LABELS[n % 2]}
        for n in range(800)
    )
    return some


def ledger(**options: Any) -> PrivacyBudgetCallbackHandler:
    return PrivacyBudgetCallbackHandler(4.0, 1e-6, **{"per": "30 days", **options})


def voter(source: Any, budget: Any, **options: Any) -> DPVotingRunnable:
    given = {"llm": ENGINE, "budget": budget, "epsilon": 2.0, "max_queries": 5, "component": "votes", **options}
    return DPVotingRunnable.from_private_examples(source, **{"rows": Rows(slots=10, shots=2), **given})


def lines(budget: Any, kind: str) -> list[Any]:
    return [line.body for line in budget.budget._store.records() if line.kind == kind]


def ask(made: DPVotingRunnable, *queries: str, **configurable: Any) -> list[str]:
    return [made.invoke(query, {"configurable": configurable} if configurable else None) for query in queries]


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_every_run_has_its_queries_and_the_share_never_runs_out(adjacency: Adjacency, clock: list[float]) -> None:
    budget, some = ledger(adjacency=adjacency), stream()
    made = voter(some.rolling(30, every=7), budget, serving=Serving(memo_size=0))
    for week in range(12):
        assert made.queries_left == 5
        ask(made, *(f"{week} {n}" for n in range(5)))
        with pytest.raises(PrivacyBudgetExceededError, match=r"of one run.*The next run has its own"):
            made.invoke("one more")
        clock[0] += 7 * DAY
    (seal,), reserved = lines(budget, "seal"), lines(budget, "reserve")
    (ticket,) = seal["components"][0]["tickets"]
    assert (ticket["template"], ticket["label"], ticket["max_count"]) == ("query", None, 45)
    spans = [line["blocks"] for line in reserved]
    assert len(spans) == 60
    first = seal["components"][0]["extent"][0]
    assert spans == [[first + 7 * week, first + 7 * week + 29] for week in range(12) for _ in range(5)]
    assert budget.remaining_epsilon == 2.0
    budget.budget.verify()
    verified = verify_report(budget.budget.report())
    assert verified.ok, verified.problems
    assert check_ledger(budget.budget._store).problems == ()


def test_the_run_is_the_same_wherever_it_is_asked_and_begins_with_the_first_one(clock: list[float]) -> None:
    budget, some = ledger(), stream()
    ask(voter(some.rolling(30, every=7), budget), "first")
    clock[0] += 5 * DAY  # another process begins in the middle of the run, with records of its own
    ask(voter(some.rolling(30, every=7), budget), "second")
    clock[0] += 2 * DAY
    ask(voter(some.rolling(30, every=7), budget), "third")
    first, second, third = (line["blocks"] for line in lines(budget, "reserve"))
    assert first == second
    assert third[0] == first[0] + 7


async def test_a_batch_is_checked_whole_before_a_run_is_read(clock: list[float]) -> None:
    made = voter(stream().rolling(7, every=7), ledger())
    queries = ["one", "q" * 20_001]
    with pytest.raises(ConfigurationError, match="at most 20,000 characters"):
        made.batch(queries)
    with pytest.raises(ConfigurationError, match="at most 20,000 characters"):
        await made.abatch(queries)
    assert made.queries_left == 5
    assert len(made.batch(["one"])) == len(await made.abatch(["two"])) == 1
    assert made.queries_left == 3


def test_kept_answers_belong_to_their_run(clock: list[float], tmp_path: Any) -> None:
    budget = PrivacyBudgetCallbackHandler.create(tmp_path / "l.db", epsilon=4.0, delta=1e-6, per="30 days")
    some = stream()
    how = {"budget": budget, "serving": Serving(memo=tmp_path / "answers.db")}
    made = voter(some.rolling(30, every=7), **how)
    for part in (made, copy.copy(made), made, voter(some.rolling(30, every=7), **how)):
        ask(part, "same")
    assert len(lines(budget, "reserve")) == 1
    clock[0] += 7 * DAY
    for part in (made, copy.copy(made), made, voter(some.rolling(30, every=7), **how)):
        ask(part, "same")
    assert [line["blocks"][0] for line in lines(budget, "reserve")] == [
        START // DAY - 11_323 - 31 + 7 * week for week in range(2)
    ]
    asyncio.run(made.ainvoke("same"))
    assert len(lines(budget, "reserve")) == 2
    budget.close()


def test_a_memo_keeps_as_many_answers_of_all_runs_as_of_one(clock: list[float], tmp_path: Any) -> None:
    path = tmp_path / "answers.db"
    budget = PrivacyBudgetCallbackHandler.create(tmp_path / "l.db", epsilon=4.0, delta=1e-6, per="30 days")
    made = voter(stream().rolling(30, every=7), budget, serving=Serving(memo=SQLiteMemo(path, size=2)))
    for _ in range(3):
        for query in ("one", "two", "two"):
            ask(made, query)
        clock[0] += 7 * DAY
    assert len(lines(budget, "reserve")) == 6  # each run pays for its own
    budget.close()
    with contextlib.closing(sqlite3.connect(path)) as file:
        assert file.execute("SELECT count(*) FROM answers").fetchone() == (2,)


def test_an_answer_reads_the_newest_run_alone(clock: list[float]) -> None:
    some = PrivateStream(
        dataset_id="d", time_key="at", unit_key="user", public_size={7: 20}, label_key="queue", labels=LABELS
    )
    for week in range(3):
        some.extend(
            {
                "at": START + (7 * week - 1.5) * DAY - d * DAY,
                "user": f"{week}-{d}-{n}",
                "text": f"week{week}",
                "queue": "card",
            }
            for d in range(1, 7)
            for n in range(10)
        )
    seen: list[str] = []

    def watched(prompt: str, prefix: Any) -> dict[str, float]:
        seen.append(prompt)
        return leaning(prompt, prefix)

    budget, spy = (
        PrivacyBudgetCallbackHandler(4.0, 1e-3, per="30 days"),
        FakeBackend(watched, vocabulary=[" card", " transfer"]),
    )
    made = voter(some.rolling(7, every=7), budget, llm=spy, max_queries=3, rows=Rows(slots=4, shots=2))
    for week in range(3):
        seen.clear()
        asyncio.run(made.ainvoke("q")) if week % 2 else made.invoke("q")
        found = "".join(seen)
        assert f"week{week}" in found
        assert not any(f"week{other}" in found for other in range(3) if other != week)
        clock[0] += 7 * DAY


def test_looking_at_a_voter_makes_no_record_late(clock: list[float]) -> None:
    seen: list[str] = []

    def watched(prompt: str, prefix: Any) -> dict[str, float]:
        seen.append(prompt)
        return leaning(prompt, prefix)

    some = stream()
    engine = FakeBackend(watched, vocabulary=[" card", " transfer"])
    made = voter(some.rolling(30, every=7), ledger(), llm=engine, rows=Rows(units=300))
    ask(made, "a")
    clock[0] += 7 * DAY
    assert (made.queries_left, "queries_left=5" in repr(made)) == (5, True)
    some.extend({"at": START + 3 * DAY, "user": f"new {n}", "text": "in time", "queue": "card"} for n in range(2_000))
    seen.clear()
    ask(made, "b")
    assert any("in time" in prompt for prompt in seen)


def test_a_range_that_does_not_roll_answers_its_queries_once(clock: list[float]) -> None:
    budget, some = ledger(), stream()
    made = voter(some.last(30), budget)
    ask(made, *"abcde")
    clock[0] += 7 * DAY
    with pytest.raises(PrivacyBudgetExceededError):
        made.invoke("f")
    (seal,) = lines(budget, "seal")
    assert all(line["blocks"] == seal["components"][0]["extent"] for line in lines(budget, "reserve"))
    with pytest.raises(SealedShareError):
        ask(voter(some.last(30), budget), "g")
    assert verify_report(budget.budget.report()).ok


def test_a_leased_ticket_is_void_once_the_run_changes(
    clock: list[float], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = type("Clock", (), {"monotonic": staticmethod(lambda: 1000.0)})
    monkeypatch.setattr(writers, "time", stopped)
    budget = PrivacyBudgetCallbackHandler.create(tmp_path / "l.db", epsilon=4.0, delta=1e-6, per="30 days")
    made = voter(stream().rolling(30, every=7), budget, max_queries=400, serving=Serving(memo_size=0))
    ask(made, *map(str, range(4)))
    leased = [line for line in lines(budget, "reserve") if line["count"] > 1]
    assert leased, "no line leased"
    held = sum(budget.budget._desk.kept().values())
    assert held
    assert made.queries_left == 396
    clock[0] += 7 * DAY
    assert made.queries_left == 400  # the tickets that it holds are of the run before
    ask(made, "next run")
    (given,) = lines(budget, "give_back")
    assert given["count"] == held
    last = lines(budget, "reserve")[-1]
    assert last["blocks"][0] == leased[0]["blocks"][0] + 7
    budget.budget.verify()
    budget.close()


def test_a_ticket_of_another_run_pays_for_nothing(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a component that goes on reserving for the run before."""
    monkeypatch.setattr(QueryShare, "of_run", lambda self, blocks: self)
    made = voter(stream().rolling(30, every=7), ledger())
    ask(made, "a")
    clock[0] += 7 * DAY
    with pytest.raises(PrivacyBudgetMismatchError, match="blocks"):
        made.invoke("b")


@pytest.mark.parametrize(("length", "every", "queries"), [(29, 7, 5), (30, 20, 15)])
def test_runs_of_another_form_are_not_of_the_share_although_their_tickets_are_the_same(
    length: int, every: int, queries: int
) -> None:
    budget, some = ledger(), stream()
    ask(voter(some.rolling(30, every=7), budget), "a")
    with pytest.raises(SealedShareError, match="runs"):
        ask(voter(some.rolling(length, every=every), budget, max_queries=queries), "b")
    ask(voter(some.rolling(30, every=7), budget), "c")


@pytest.mark.traced
def test_a_run_is_capped_in_all_processes_together_and_late_ones_are_refused(clock: list[float]) -> None:
    budget, some = ledger(), stream()
    one, other = (voter(some.rolling(30, every=7), budget) for _ in range(2))
    ask(one, *"abc")
    ask(other, *"de")
    for each in (one, other):
        with pytest.raises(PrivacyBudgetExceededError, match="of one run"):
            each.invoke("f")
    share: Any = one.share
    start = lines(budget, "reserve")[0]["blocks"][0]
    later, sooner = share.of_run((start + 7, start + 36)), share.of_run((start, start + 29))
    later.reserve("query")
    assert (later.remaining("query"), sooner.remaining("query")) == (4, 0)


def test_a_tenant_has_its_cap_over_all_runs(clock: list[float]) -> None:
    made = voter(stream().rolling(30, every=7), ledger(), serving=Serving(tenant_max_queries=3))
    ask(made, "a", "b", tenant="ann")
    clock[0] += 7 * DAY
    ask(made, "a", tenant="ann")
    with pytest.raises(TenantCapExceededError):
        ask(made, "b", tenant="ann")
    ask(made, "b", tenant="bob")


def test_a_retired_component_has_no_query_left_and_asks_no_public_model(clock: list[float]) -> None:
    budget, asked = ledger(), list[str]()

    def heard(prompt: str, prefix: Any) -> dict[str, float]:
        asked.append(prompt)
        return leaning(prompt, prefix)

    engine = FakeBackend(heard, vocabulary=[" card", " transfer"])
    made = voter(stream().rolling(30, every=7), budget, llm=engine)
    made.invoke("one?")
    budget.retire("votes")
    asked.clear()
    assert made.queries_left == 0
    assert budget.budget.spent_parts()["votes"] == 0.0  # no alarm
    with pytest.raises(SealedShareError, match="it was retired"):
        made.invoke("two?")
    assert asked == []


def test_a_voter_made_before_another_process_began_the_runs_is_told_to_be_made_again(clock: list[float]) -> None:
    budget, source = ledger(), stream().rolling(30, every=7)
    late = voter(source, budget)
    clock[0] += DAY
    voter(source, PrivacyBudgetCallbackHandler.open(budget.budget._store)).invoke("one?")
    with pytest.raises(SealedShareError, match=r"found others in \['extent'\]. Another process .* again"):
        late.invoke("two?")
    voter(source, budget).invoke("two?")


def test_when_a_run_is_spent_zero_shot_answers_are_given_until_the_next(clock: list[float]) -> None:
    serving = Serving(on_exhausted="zero_shot", memo_size=0)
    made = voter(stream().rolling(30, every=7), ledger(), serving=serving, max_queries=1).with_receipts()
    assert [made.invoke(q).receipt.source for q in "ab"] == ["release", "zero-shot"]
    clock[0] += 7 * DAY
    assert made.invoke("c").receipt.source == "release"


GONE = "gone"


@pytest.mark.parametrize(
    ("forged", "found"),
    [
        ({"queries_per_run": 6}, "6 queries per run"),
        ({"queries_per_run": GONE}, "queries_per_run"),
        ({"runs_per_window": 3}, "of its runs"),
        ({"runs_per_window": 3, "queries_per_run": 15}, "of its runs"),
        ({"length": 7}, "of its runs"),
        ({"length": 25}, "of its runs"),
        ({"every": 1}, "of its runs"),
        ({"every": None, "runs_per_window": 1, "queries_per_run": 45}, "every"),
        ({"note": "x"}, "of its runs"),
        ({"queries_per_run": 5.0}, "queries_per_run"),
        (dict.fromkeys(("every", "length", "queries_per_run", "runs_per_window"), GONE), "length"),
        (GONE, "stream"),
    ],
)
def test_a_report_that_says_something_else_of_its_runs_is_not_verified(forged: Any, found: str) -> None:
    budget = ledger()
    ask(voter(stream().rolling(30, every=7), budget), "a")
    data = json.loads(json.dumps(budget.budget.report().to_dict()))
    assert verify_report(with_digest(data)).ok
    public = data["shares"][0]["components"][0]["public"]
    shown = public.pop("stream")
    if forged != GONE:
        public["stream"] = {name: value for name, value in {**shown, **forged}.items() if value != GONE}
    assert_found(verify_report(with_digest(data)), found)


@pytest.mark.parametrize("forged", [{"length": 29}, {"every": 30}, {"runs_per_window": 5, "queries_per_run": 1}])
def test_a_report_that_says_something_else_of_its_one_run_is_not_verified(forged: dict[str, Any]) -> None:
    budget = ledger()
    ask(voter(stream().last(30), budget), "a")
    data = json.loads(json.dumps(budget.budget.report().to_dict()))
    assert verify_report(with_digest(data)).ok
    data["shares"][0]["components"][0]["public"]["stream"].update(forged)
    assert_found(verify_report(with_digest(data)), "of its runs")


@pytest.mark.traced
@pytest.mark.parametrize(
    ("options", "declared", "expected"),
    [
        ({"component": None}, {}, "component"),
        ({"rows": Rows(slots=4, shots=2, sampling="fixed")}, {}, "sampling"),
        ({"epsilon": 9.0}, {}, "epsilon"),
        ({"max_queries": 0}, {}, "max_queries"),
        ({"max_queries": 10**12}, {}, "max_queries: expected .*, found 10{12}\\."),
        ({}, {"retention": 36}, "retention"),
    ],
)
def test_what_votes_on_a_stream_cannot_do_is_refused_before_anything_is_charged(
    options: dict[str, Any], declared: dict[str, Any], expected: str
) -> None:
    budget = ledger(adjacency="replace_one")
    with pytest.raises((ConfigurationError, PrivacyBudgetExceededError), match=expected):
        voter(stream(**declared).rolling(30, every=7), budget, **options)
    assert not lines(budget, "bind")


def test_the_shortest_retention_that_is_accepted_suffices_for_the_last_day_of_a_run(clock: list[float]) -> None:
    made = voter(stream(retention=37).rolling(30, every=7), ledger(), serving=Serving(memo_size=0))
    for day in range(15):
        ask(made, str(day) if day % 7 < 5 else "again") if day % 7 in {0, 6} else None
        clock[0] += DAY


def test_a_run_in_use_is_the_only_one_that_is_held(clock: list[float]) -> None:
    some = stream()
    made = voter(some.rolling(30, every=7), ledger())
    ask(made, "a")
    runs: Any = made.runs
    clock[0] += 7 * DAY
    ask(made, "b")
    gc.collect()
    held = [each for each in gc.get_objects() if issubclass(type(each), PrivateRange) and each._stream is some]
    assert held == [runs._current[1]["private"]]
    assert "private" in repr(runs)


def test_queries_of_many_threads_and_tasks_over_a_change_of_run_read_what_they_are_charged_for(
    clock: list[float],
) -> None:
    budget, some = ledger(), stream()
    made = voter(some.rolling(30, every=7), budget, max_queries=60, serving=Serving(memo_size=0))
    asked = threading.Barrier(8)

    def work(place: int) -> None:
        for number in range(4):
            if number == 2:
                asked.wait(60)
                clock[0] = START + 7 * DAY
            made.invoke(f"{place} {number}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))

    async def tasks() -> None:
        clock[0] = START + 14 * DAY
        await asyncio.gather(*(made.ainvoke(f"task {number}") for number in range(10)))

    asyncio.run(tasks())
    counts = Counter(line["blocks"][0] for line in lines(budget, "reserve"))
    first = min(counts)
    # A query that began before the change may be charged to the run before; the curator refuses any other mixture.
    assert set(counts) == {first, first + 7, first + 14}
    assert counts.total() == 42
    assert counts[first + 14] == 10


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("where", ["of the runs", "of the stream"])
def test_a_fork_while_a_thread_begins_a_run_is_not_stuck(
    where: str, clock: list[float], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = PrivacyBudgetCallbackHandler.create(tmp_path / "l.db", epsilon=4.0, delta=1e-6, per="30 days")
    made = voter(stream().rolling(30, every=7), budget)
    ask(made, "a")
    clock[0] += 7 * DAY
    begun, go_on, real = threading.Event(), threading.Event(), streams._units

    def slow(*args: Any) -> Any:  # called while both locks are held
        begun.set()
        go_on.wait(60)
        return real(*args)

    monkeypatch.setattr(streams, "_units", slow)
    thread = threading.Thread(target=lambda: made.invoke("b"))
    thread.start()
    assert begun.wait(60)
    child = os.fork()
    if not child:
        signal.alarm(60)  # a child that is stuck ends by it
        go_on.set()
        fault = 1
        try:
            made.invoke("c") if where == "of the runs" else made.runs._source.stream.extend([])
            fault = 0
        finally:
            os._exit(fault)
    go_on.set()
    thread.join(60)
    assert os.waitpid(child, 0)[1] == 0
    budget.close()


def test_nothing_of_a_voter_on_a_stream_shows_a_record(clock: list[float]) -> None:
    some = stream()
    some.extend([{"at": START - 3 * DAY, "user": "canary", "text": "canary text", "queue": "card"}])
    made = voter(some.rolling(30, every=7), ledger())
    ask(made, "q")
    shown = [repr(made), str(made), repr(made.runs), repr(made.private), str(made.model_dump()), str(made.report)]
    shown += [repr(made._now()), str(made._now().model_dump()), str(made.to_json()), f"{made.runs}"]
    assert not any("canary" in each for each in shown)
    for action in (pickle.dumps, json.dumps):
        with pytest.raises(Exception, match=r"cannot be pickled|not JSON serializable") as caught:
            action(made.runs)
        assert "canary" not in str(caught.value)


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_nothing_but_the_answers_depends_on_the_people_of_a_run(
    adjacency: Adjacency, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    def seen(people: int) -> tuple[list[str], list[Any], list[str]]:
        clock[0] = START
        caplog.clear()
        some = PrivateStream(
            dataset_id="d", time_key="at", unit_key="user", public_size={30: 9000}, label_key="queue", labels=LABELS
        )
        some.extend(
            {"at": START - 5 * DAY + n, "user": n // 3, "text": f"canary {n}", "queue": LABELS[n % 2]}
            for n in range(3 * people)
        )
        budget = ledger(adjacency=adjacency)
        made = voter(some.rolling(30, every=7), budget, max_queries=2)
        shown = [repr(some), repr(made), repr(made.private)]
        for day, queries in ((0, "abcd"), (7, "ae")):
            clock[0] = START + day * DAY
            for query in queries:
                try:
                    made.invoke(query)
                except PrivacyBudgetExceededError as error:
                    shown.append(str(error))
            shown.append(repr(made))
        bodies = [{**line.body, "ledger_id": None} for line in budget.budget._store.records()]
        return shown, bodies, [record.getMessage() for record in caplog.records]

    first = seen(0)
    assert len(first[1]) == 10  # bind, seal, and two lines for each of four queries
    assert "canary" not in str(seen(1))
    assert seen(1) == first == seen(30)
