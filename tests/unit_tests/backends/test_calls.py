"""Calls run together up to the limit, over all sessions, threads and event loops, and pass the model's rate limiter."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import random
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import HumanMessage
from langchain_core.rate_limiters import BaseRateLimiter, InMemoryRateLimiter

from langchain_dpicl import (
    Budget,
    DemonstrationSynthesizer,
    DPVotingRunnable,
    LabelAnswers,
    PrivacyBudgetCallbackHandler,
    PrivateExamples,
    Rows,
    Serving,
)
from langchain_dpicl.backends.langchain.backend import LangChainBackend
from langchain_dpicl.backends.langchain.texts import TextVoteBackend
from langchain_dpicl.backends.private_calls import call as call_module
from langchain_dpicl.backends.private_calls.call import CallPool, Crew, OpaqueValue, Request, RetryPolicy, silence
from langchain_dpicl.backends.private_calls.embeddings import SilentEmbeddings
from langchain_dpicl.backends.rows.answer_rows import AnswerRows
from langchain_dpicl.backends.rows.label_rows import LabelRows
from langchain_dpicl.backends.rows.neighbour_rows import Candidates, LocalEmbeddings, NearestRows, SimilarTexts
from langchain_dpicl.backends.rows.rows import RowSource
from langchain_dpicl.backends.sync_async import Call, FairSemaphore, LimitConcurrency, limit_concurrency, stopping_calls
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError, ModelCallError
from langchain_dpicl.runs.query_plan import QUERY_TEMPLATE
from tests.scripted_models import ScriptedChat, StatusError, by_word, spread

WORDS = [f" w{i}" for i in range(20)]
DOMAIN = [b" card", b" cash", b""]
QUICK = RetryPolicy(first_wait=0.001, max_wait=0.001)
ANSWERS = by_word({"aaa": {" card": 0.5, " cash": 0.25}, "bbb": {" cash": 0.75, " other": 0.25}}, spread(WORDS))


class Gauge:
    """How many calls run at once.

    A call stays until `hoped` of them have been in together, so that a slow machine cannot make them miss each other.
    """

    def __init__(self, hoped: int = 0) -> None:
        self.now = self.most = self.made = 0
        self.hoped = hoped
        self.patience = time.monotonic() + 60
        self.threads: set[str] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self.now += 1
            self.made += 1
            self.most = max(self.most, self.now)
            self.threads.add(threading.current_thread().name)

    def __exit__(self, *args: object) -> None:
        with self._lock:
            self.now -= 1

    def expect(self, calls: int) -> None:
        """Starts anew: nobody has been in, and the next calls wait for so many."""
        self.most, self.hoped, self.patience = 0, calls, time.monotonic() + 60

    def lonely(self) -> bool:
        """Says whether a call that is in should wait for others; after a minute it has waited enough."""
        return self.most < self.hoped and time.monotonic() < self.patience


def slow(gauge: Gauge, seconds: float = 0.02, **options: Any) -> ScriptedChat:
    class Slow(ScriptedChat):
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            with gauge:
                while gauge.lonely():
                    time.sleep(0.001)
                time.sleep(seconds)
                return super()._generate(*args, **kwargs)

        async def _agenerate(self, *args: Any, **kwargs: Any) -> Any:
            with gauge:
                while gauge.lonely():  # noqa: ASYNC110 - an Event belongs to one loop, and calls come from several
                    await asyncio.sleep(0.001)
                await asyncio.sleep(seconds)
                return super()._generate(*args, **kwargs)

    return Slow(answer=ANSWERS, **options)


def held_up(began: asyncio.Event, over: asyncio.Event, answer: Any = ANSWERS) -> ScriptedChat:
    """A model whose awaited calls say that they began, and wait until it is over."""

    class Waiting(ScriptedChat):
        async def _agenerate(self, *given: Any, **options: Any) -> Any:
            began.set()
            await over.wait()
            return self._generate(*given, **options)

    return Waiting(answer=answer)


class OwnLoop(ScriptedChat):
    """Runs an event loop of its own for each call."""

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        asyncio.run(asyncio.sleep(0))
        return super()._generate(*args, **kwargs)


def request(text: str) -> Request:
    return Request(OpaqueValue(text), lambda prompt: [HumanMessage(prompt)], {})


def in_threads(*actions: Callable[[], Any], within: float = 60.0) -> None:
    """Runs actions at once, each in its own thread; fails if one fails or does not end."""
    errors: list[BaseException] = []

    def run(action: Callable[[], Any]) -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(action,), daemon=True) for action in actions]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + within
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not errors, errors
    assert not any(thread.is_alive() for thread in threads), "they wait without end"


class TestLimit:
    @pytest.mark.parametrize("limit", [1, 2, 5])
    def test_is_one_for_sessions_threads_loops_and_public_calls_together(self, limit: int) -> None:
        gauge = Gauge()
        backend = LangChainBackend(slow(gauge, 0.004), max_concurrency=limit)
        expected = backend.open(["aaa", "bbb"], []).score(DOMAIN)
        before = gauge.made
        gauge.expect(limit)

        def blocking() -> None:
            for _ in range(3):
                rows = backend.open(["aaa", "bbb"] * 3, []).score(DOMAIN)
                assert np.array_equal(rows, np.tile(expected, (3, 1)))

        def public() -> None:
            for _ in range(9):
                assert backend.top_tokens("aaa", [], top_k=1)[0][0] == b" card"

        def awaiting() -> None:
            async def several() -> list[Any]:
                sessions = [backend.open(["aaa", "bbb"] * 3, []) for _ in range(2)]
                return await asyncio.gather(
                    *(session.ascore(DOMAIN) for session in sessions), backend.atop_tokens("aaa", [], top_k=1)
                )

            for rows in asyncio.run(several())[:2]:
                assert np.array_equal(rows, np.tile(expected, (3, 1)))

        in_threads(blocking, blocking, public, awaiting, awaiting)
        assert gauge.most == limit
        assert gauge.made - before == 2 * 18 + 9 + 2 * 13

    def test_does_not_lock_up_a_blocking_call_beside_awaited_ones_of_the_same_loop(self) -> None:
        backend = LangChainBackend(slow(Gauge()), max_concurrency=1)

        async def mixed() -> None:
            session = backend.open(["aaa"] * 3, [])
            task = asyncio.create_task(session.ascore(DOMAIN))
            await asyncio.sleep(0.01)  # the task holds the only place, and this thread is the one that drives it
            assert backend.top_tokens("aaa", [], top_k=1)
            assert session.score(DOMAIN).any()
            assert (await task).any()

        in_threads(lambda: asyncio.run(mixed()))

    async def test_holds_after_a_cancelled_release(self) -> None:
        gauge = Gauge()
        backend = LangChainBackend(slow(gauge), max_concurrency=2)
        for _ in range(3):
            task = asyncio.create_task(backend.open(["aaa"] * 50, []).ascore(DOMAIN))
            await asyncio.sleep(0.03)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert gauge.now == 0
        gauge.expect(2)
        assert (await backend.open(["aaa"] * 6, []).ascore(DOMAIN)).shape == (6, 3)
        assert gauge.most == 2

    def test_is_kept_by_a_failing_row(self) -> None:
        model = slow(Gauge(), 0.0, raises={"bad": StatusError("content", status_code=400)})
        backend = LangChainBackend(model, max_concurrency=1, retry=QUICK)
        in_threads(lambda: [backend.open(["bad", "aaa"], []).score(DOMAIN) for _ in range(5)])

    def test_threads_are_kept_for_the_next_token(self) -> None:
        gauge = Gauge()
        session = LangChainBackend(slow(gauge), max_concurrency=2).open(["aaa"] * 4, [])
        for _ in range(3):
            gauge.expect(2)
            session.score(DOMAIN)
        assert len({name for name in gauge.threads if name.startswith("dpicl")}) == 2

    @pytest.mark.parametrize("prompts", [1, 4])
    def test_calls_one_at_a_time_are_made_in_the_callers_thread(self, prompts: int) -> None:
        gauge = Gauge()
        backend = LangChainBackend(slow(gauge, 0.0), max_concurrency=1)
        made = gauge.made
        backend.open(["aaa"] * prompts, []).score(DOMAIN)
        assert gauge.made - made == prompts
        assert gauge.threads == {threading.current_thread().name}

    @pytest.mark.parametrize("prompts", [1, 2])
    def test_how_many_calls_there_are_does_not_choose_the_thread(self, prompts: int) -> None:
        gauge = Gauge()
        backend = LangChainBackend(slow(gauge, 0.0), max_concurrency=2)
        gauge.threads.clear()
        backend.open(["aaa"] * prompts, []).score(DOMAIN)
        assert all(name.startswith("dpicl") for name in gauge.threads)

    def test_how_many_calls_there_are_does_not_choose_how_many_threads_start(self) -> None:
        started = []
        for prompts in (0, 1, 5):
            calls = CallPool(silence(ScriptedChat(answer=ANSWERS)), QUICK, 8)
            calls.many([request("aaa")] * prompts)
            started += [len(pool._threads) for pool in calls._crew._pools.values()]
        assert started == [8, 8, 8]

    @pytest.mark.parametrize("limit", [1, 8])
    @pytest.mark.parametrize("kind", ["labels", "tokens", "answers", "nearest", "similar"])
    def test_whether_there_is_a_row_does_not_choose_how_many_threads_start(self, kind: str, limit: int) -> None:
        started = []
        for count in (0, 2):
            texts = TextVoteBackend(FakeListChatModel(responses=["card"]), max_concurrency=limit)
            tokens = LangChainBackend(ScriptedChat(answer=ANSWERS), max_concurrency=limit)
            embeddings = SilentEmbeddings(LocalEmbeddings(), max_concurrency=limit)
            rows: list[Any] = ["aaa"] * count + [None]
            units = [("aaa",)] * count + [()]
            near = Candidates(("a",), np.ones((1, embeddings.dimension)))
            labels = LabelRows(texts, [["card"], ["cash"]], calibrate=False)
            words = partial(RowSource(tokens, tuple(rows), []).score, (b" card",))
            asks: dict[str, Any] = {
                "labels": labels.ask(tuple(row and (row,) for row in rows)),
                "tokens": Call(words, partial(asyncio.to_thread, words)),
                "answers": AnswerRows.embedded(texts, embeddings, max_tokens=2).ask(rows),
                "nearest": NearestRows(embeddings).ask(units, near),
                "similar": SimilarTexts(embeddings, threshold=0.5).ask(units, near.directions[0]),
            }
            asks[kind].run()
            pools = [pool for each in (texts, tokens, embeddings) for pool in each._calls._crew._pools.values()]
            started.append([len(pool._threads) for pool in pools])
        assert started[0] == started[1]
        assert set(started[0]) == ({limit} if limit > 1 else set())

    @pytest.mark.parametrize("room", [0, 1, 5])
    def test_where_no_more_threads_start_an_answer_is_right_all_the_same(
        self, room: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Rows that fail together would leave an answer of noise alone, which is paid for and looks like another."""
        start, left = threading.Thread.start, [room]

        def with_little_room(thread: threading.Thread) -> None:
            if thread.name.startswith("dpicl"):
                left[0] -= 1
                if left[0] < 0:
                    raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", with_little_room)
        records = [{"text": f"declined {number}", "queue": "card"} for number in range(100)]
        voter = DPVotingRunnable.from_private_examples(
            PrivateExamples(records, label_key="queue", labels=("card", "cash"), public_size=100),
            llm=FakeListChatModel(responses=["card"]),
            budget=Budget(epsilon=50.0, delta=1e-6),
            epsilon=40.0,
            max_queries=2,
            rows=Rows(slots=20, shots=4),
            answers=LabelAnswers(votes="text"),
        )
        found = voter.with_receipts().invoke("why?")
        assert (found.label, found.receipt.tickets, voter.queries_left) == ("card", 1, 1)
        assert left[0] < 0

    async def test_where_no_more_threads_start_below_a_running_loop_that_is_said(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A model with a loop of its own would fail for all rows at once."""

        def no_room(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        rows = LabelRows(LangChainBackend(ScriptedChat(answer=ANSWERS)), [[" card"], [" cash"]], calibrate=False)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_room)
            for prompts in ((), (("aaa",),)):
                with pytest.raises(ConfigurationError, match="the system allows fewer"):
                    rows.ask(prompts).run()

    def test_the_config_of_a_run_starts_no_million_of_threads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[int] = []
        monkeypatch.setattr(call_module, "_start_all", lambda _, size: asked.append(size))
        calls = CallPool(silence(ScriptedChat(answer=ANSWERS)), QUICK, None)
        with limit_concurrency(1_000_000):
            assert len(calls.many([request("aaa")] * 2)) == 2
        assert asked == [call_module.MOST_THREADS]

    @pytest.mark.parametrize("limit", [1, 2])
    async def test_a_model_with_a_loop_of_its_own_works_below_a_running_one(self, limit: int) -> None:
        calls = CallPool(silence(OwnLoop(answer=ANSWERS)), QUICK, limit)
        assert [reply.fault for reply in calls.many([request("aaa"), request("bbb")])] == [None, None]

    @pytest.mark.parametrize("limit", [1, 2])
    async def test_its_probe_and_a_single_call_work_there_too(self, limit: int) -> None:
        engine = TextVoteBackend(OwnLoop(answer=ANSWERS), max_concurrency=limit, retry=QUICK)
        assert engine.score_public("aaa", ["card", "transfer"])[0] == 0.0

    def test_a_model_that_works_in_its_own_thread_alone_is_refused_where_private_calls_run_in_others(self) -> None:
        here = threading.current_thread()

        class OneThread(ScriptedChat):
            def _generate(self, *args: Any, **kwargs: Any) -> Any:
                if threading.current_thread() is not here:
                    raise ValueError("made in another thread")
                return super()._generate(*args, **kwargs)

        with pytest.raises(CapabilityError, match="made in another thread"):
            TextVoteBackend(OneThread(answer=ANSWERS), retry=QUICK)
        engine = TextVoteBackend(OneThread(answer=ANSWERS), max_concurrency=1, retry=QUICK)
        row = engine.score_public("aaa", ["card", "transfer"])
        assert row.tolist() == engine.score_choices(["aaa"], ["card", "transfer"])[0].tolist() == [0.0, -np.inf]

    @pytest.mark.parametrize("limit", [1, 2])
    def test_a_public_call_runs_where_private_ones_do(self, limit: int) -> None:
        seen: list[bool] = []

        def answer(_: str) -> dict[str, float]:
            seen.append(threading.current_thread() is here)
            return {" card": 1.0}

        here = threading.current_thread()
        calls = CallPool(silence(ScriptedChat(answer=answer)), QUICK, limit)
        calls.one(request("aaa"))
        calls.probe(request("aaa"))
        calls.many([request("aaa")])
        assert seen == [limit == 1] * 3

    def test_a_single_call_does_not_wait_for_the_end_of_a_batch(self) -> None:
        goes_on = threading.Event()

        def answer(prompt: str) -> dict[str, float]:
            if "public" in prompt:
                goes_on.set()
            elif "last" in prompt:
                assert goes_on.wait(20)
            return {" card": 1.0}

        calls = CallPool(silence(ScriptedChat(answer=answer)), RetryPolicy(max_attempts=1), 2)
        with ThreadPoolExecutor(1) as pool:
            rows = pool.submit(calls.many, [request("last"), *[request(f"row {number}") for number in range(9)]])
            assert calls.one(request("public")).fault is None
            assert [reply.fault for reply in rows.result(30)] == [None] * 10

    @pytest.mark.parametrize("limit", [1, 2])
    def test_every_call_of_a_batch_has_a_context_of_its_own(self, limit: int) -> None:
        mark: contextvars.ContextVar[str] = contextvars.ContextVar("mark", default="none")
        seen: list[str] = []

        def answer(text: str) -> dict[str, float]:
            seen.append(mark.get())
            mark.set("the model's")
            return {" card": 1.0}

        mark.set("the caller's")
        CallPool(silence(ScriptedChat(answer=answer)), QUICK, limit).many([request("aaa")] * 3)
        assert (seen, mark.get()) == (["none"] * 3, "the caller's")

    @pytest.mark.parametrize("limit", [1, 2])
    def test_ctrl_c_in_a_batch_ends_it_and_gives_the_place_back(self, limit: int) -> None:
        model = ScriptedChat(answer=ANSWERS, raises={"stop": KeyboardInterrupt})
        calls = CallPool(silence(model), QUICK, limit)

        def batch() -> None:
            for _ in range(limit + 1):
                with pytest.raises(KeyboardInterrupt) as caught:
                    calls.many([request("stop"), *[request("aaa")] * 20])
                assert caught.value.args == ()
                assert caught.value.__context__ is None

        in_threads(batch)
        assert limit > 1 or len(model.seen) == 2
        in_threads(lambda: calls.many([request("aaa")] * 3))

    def test_one_engine_serves_several_event_loops(self) -> None:
        backend = LangChainBackend(ScriptedChat(answer=ANSWERS), max_concurrency=1)
        results: list[Any] = []

        def run() -> None:
            results.append(asyncio.run(backend.open(["aaa"] * 3, []).ascore(DOMAIN)))

        for _ in range(2):
            in_threads(run)
        assert np.array_equal(results[0], results[1])

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    @pytest.mark.filterwarnings("ignore:This process")
    def test_a_forked_process_gets_threads_and_a_limit_of_its_own(self) -> None:
        backend = LangChainBackend(slow(Gauge(), 0.2), max_concurrency=1)
        session = backend.open(["aaa"], [])
        expected = session.score(DOMAIN)
        holder = threading.Thread(target=lambda: session.score(DOMAIN))
        holder.start()
        time.sleep(0.05)  # the only place is taken, and the child inherits no thread that would give it back
        child = os.fork()
        if child == 0:
            os._exit(0 if np.array_equal(session.score(DOMAIN), expected) else 1)
        holder.join()
        deadline = time.monotonic() + 60.0
        while (status := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        if status[0] == 0:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert status == (child, 0)


class TestAtMost:
    @pytest.mark.parametrize(("asked", "own", "limit"), [(1, 4, 1), (2, 4, 2), (9, 4, 4), (None, 1, 1), (None, 3, 3)])
    async def test_a_block_lowers_the_limit_of_an_engine_and_never_raises_it(
        self, asked: int | None, own: int, limit: int
    ) -> None:
        prompts = ["aaa", "bbb"] * 4
        expected = LangChainBackend(ScriptedChat(answer=ANSWERS)).open(prompts, []).score(DOMAIN)
        for awaited in (False, True):
            gauge = Gauge()
            session = LangChainBackend(slow(gauge), max_concurrency=own).open(prompts, [])
            gauge.expect(limit)
            with limit_concurrency(asked):
                rows = await session.ascore(DOMAIN) if awaited else session.score(DOMAIN)
            assert gauge.most == limit
            assert np.array_equal(rows, expected)

    @pytest.mark.parametrize("awaited", [False, True])
    async def test_a_block_raises_the_limit_of_an_engine_without_a_number_of_its_own(
        self, awaited: bool, default_concurrency: int
    ) -> None:
        gauge = Gauge()
        engine = LangChainBackend(slow(gauge))
        gauge.expect(40)
        with limit_concurrency(40):
            session = engine.open(["aaa"] * 50, [])
            await session.ascore(DOMAIN) if awaited else await asyncio.to_thread(session.score, DOMAIN)
        assert gauge.most == 40
        assert engine.calls_at_once == call_module.DEFAULT_CONCURRENCY < default_concurrency == 32

    async def test_a_blocking_call_inside_a_loop_needs_no_thread_that_waits_for_the_calls_of_that_loop(self) -> None:
        began, over = asyncio.Event(), asyncio.Event()
        engine = LangChainBackend(held_up(began, over), max_concurrency=2)
        awaited = asyncio.ensure_future(engine.open(["aaa"] * 2, []).ascore(DOMAIN))
        await began.wait()  # both places are taken until the loop goes on
        threaded = asyncio.ensure_future(asyncio.to_thread(engine.open(["bbb"] * 4, []).score, DOMAIN))
        await asyncio.sleep(0.2)  # its threads wait for a place
        assert engine.open(["aaa", "bbb"], []).score(DOMAIN).shape == (2, 3)
        over.set()
        assert [len(rows) for rows in await asyncio.gather(awaited, threaded)] == [2, 4]

    async def test_threads_that_engines_share_do_not_wait_for_the_calls_of_a_loop_either(self) -> None:
        began, over = asyncio.Event(), asyncio.Event()
        calls = CallPool(silence(held_up(began, over)), QUICK, 2, crew=Crew(2))
        awaited = asyncio.ensure_future(calls.amany([request("aaa")] * 2))
        await began.wait()  # both places are taken until the loop goes on
        threaded = asyncio.ensure_future(asyncio.to_thread(calls.many, [request("bbb")] * 4))
        await asyncio.sleep(0.2)  # its threads wait for a place
        assert len(calls.many([request("aaa")] * 2)) == 2
        over.set()
        assert [len(replies) for replies in await asyncio.gather(awaited, threaded)] == [2, 4]

    async def test_all_sessions_of_a_block_keep_to_one_limit(self) -> None:
        gauge = Gauge()
        engine = LangChainBackend(slow(gauge), max_concurrency=8)
        gauge.expect(2)
        with limit_concurrency(2):
            await asyncio.gather(*(engine.open(["aaa", "bbb"], []).ascore(DOMAIN) for _ in range(4)))
        assert gauge.most == 2

    def test_a_block_that_raises_stops_the_calls_that_its_threads_have_not_begun(self) -> None:
        began, over = threading.Event(), threading.Event()
        calls: list[str] = []

        class Waiting(ScriptedChat):
            def _generate(self, *given: Any, **options: Any) -> Any:
                if str(given[0][0].content)[:3] in {"aaa", "bbb"}:
                    calls.append("call")
                    began.set()
                    over.wait(60.0)
                return super()._generate(*given, **options)

        session = LangChainBackend(Waiting(answer=ANSWERS), max_concurrency=2).open(["aaa", "bbb"] * 4, [])

        def scored() -> None:
            with contextlib.suppress(ModelCallError):
                session.score(DOMAIN)

        with pytest.raises(KeyboardInterrupt), stopping_calls():
            thread = threading.Thread(target=contextvars.copy_context().run, args=(scored,))
            thread.start()
            began.wait(60.0)
            raise KeyboardInterrupt
        over.set()
        thread.join()
        assert 1 <= len(calls) <= 2

    @pytest.mark.parametrize("awaited", [False, True])
    def test_an_ask_keeps_to_it_and_leaves_the_next_one_alone(self, awaited: bool) -> None:
        gauge = Gauge()
        engine = TextVoteBackend(slow(gauge), max_concurrency=3)
        rows = LabelRows(engine, [[" card"], [" cash"]], calibrate=False)
        for limit, most in ((1, 1), (None, 3)):
            gauge.expect(most)
            ask = LimitConcurrency(rows.ask((("aaa",),) * 6), limit)
            boxed = asyncio.run(ask.arun()) if awaited else ask.run()
            assert gauge.most == most
            assert boxed.take().shape == (6, 2)


class HandsOver(ScriptedChat):
    """A model that is awaited, and hands a part of its work to threads of the loop, as that of OpenAI does."""

    async def _agenerate(self, *args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0)
        return await asyncio.to_thread(self._generate, *args, **kwargs)


class OfAnotherLoop(ScriptedChat):
    """A model whose async client is lost, so that awaited calls are blocking ones in threads."""

    async def _agenerate(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("Event loop is closed")


def card_or_cash(number: int) -> PrivateExamples:
    records = [{"text": f"declined {one}", "queue": ("card", "cash")[one % 2]} for one in range(40)]
    return PrivateExamples(
        records, label_key="queue", labels=("card", "cash"), public_size=40, dataset_id=f"both ways {number}"
    )


def a_voter(texts: TextVoteBackend, **serving: Any) -> DPVotingRunnable:
    return DPVotingRunnable.from_private_examples(
        card_or_cash(0),
        llm=texts,
        budget=PrivacyBudgetCallbackHandler(epsilon=99.0, delta=1e-6),
        epsilon=90.0,
        max_queries=4,
        rows=Rows(slots=4, shots=1),
        answers=LabelAnswers(votes="text"),
        serving=Serving(**serving),
    )


def two_of(kind: str, model: type[ScriptedChat]) -> tuple[Any, Callable[[], Any], Callable[[], Any]]:
    """An engine with one place, an awaited answer of it and a blocking one."""
    if kind == "voting":
        texts = TextVoteBackend(model(answer=lambda _: {"card": 1.0}), max_concurrency=1)
        voter = a_voter(texts)
        return texts, lambda: voter.ainvoke("why?"), partial(voter.invoke, "when?")
    tokens = LangChainBackend(model(answer=ANSWERS), max_concurrency=1)
    writers = [
        DemonstrationSynthesizer.from_private_examples(
            card_or_cash(number),
            llm=tokens,
            budget=PrivacyBudgetCallbackHandler(epsilon=99.0, delta=1e-6),
            epsilon=9.0,
            shots_per_label=1,
            max_tokens=1,
            rows=Rows(slots=4, shots=1),
        )
        for number in range(2)
    ]
    return tokens, writers[0].arun, writers[1].run


@pytest.fixture
async def one_thread() -> AsyncIterator[None]:
    """The event loop has one thread for blocking code; the loop is that of the session."""
    loop: Any = asyncio.get_running_loop()
    before = loop._default_executor
    with ThreadPoolExecutor(1) as pool:
        loop.set_default_executor(pool)
        yield
        loop._default_executor = before


class TestBothWays:
    @pytest.mark.usefixtures("one_thread")
    @pytest.mark.parametrize("kind", ["voting", "generation"])
    @pytest.mark.parametrize("model", [ScriptedChat, HandsOver, OfAnotherLoop])
    async def test_an_awaited_answer_needs_no_thread_in_which_blocking_code_waits_for_it(
        self, kind: str, model: type[ScriptedChat]
    ) -> None:
        """LangChain runs steps that block in the threads to which models that are awaited hand their work."""
        engine, awaited, blocking = two_of(kind, model)
        gate = engine._calls._here().gate

        async def queue_for_the_place(answer: Any, *, as_number: int) -> asyncio.Future[Any]:
            asked = asyncio.ensure_future(answer)
            while len(gate._waiting) < as_number:  # noqa: ASYNC110 - no event tells that a call waits
                await asyncio.sleep(0.001)
            return asked

        gate.__enter__()
        answers = [
            await queue_for_the_place(awaited(), as_number=1),
            await queue_for_the_place(asyncio.to_thread(blocking), as_number=2),  # in the loop's only thread
        ]
        gate.__exit__(None, None, None)
        _, left = await asyncio.wait(answers, timeout=10.0)
        if left:
            gate.__exit__(None, None, None)  # one more place: a failure does not hang
        await asyncio.gather(*answers)
        assert not left, "they wait for each other"

    @pytest.mark.parametrize("spent", [0, 4])
    async def test_an_awaited_answer_gives_its_turn_back_before_observers_hear_of_it(self, spent: int) -> None:
        """Those of a refused one, which is answered zero-shot then, too: they may wait for an equal question."""
        voter = a_voter(TextVoteBackend(ScriptedChat(answer=lambda _: {"card": 1.0})), on_exhausted="zero_shot")
        turns: list[dict[Any, Any]] = []

        class Watching(BaseCallbackHandler):
            def on_custom_event(self, *_: Any, **__: Any) -> None:
                turns.append(dict(voter.tenants._turns.here))

        taken = [voter.share.reserve(QUERY_TEMPLATE) for _ in range(spent)]
        assert await voter.ainvoke("why?", {"callbacks": [Watching()]}) == "card"
        assert turns == [{}, {}]
        for ticket in taken:
            ticket.give_back()

    async def test_threads_that_count_what_is_submitted_hear_of_nothing_of_ours(self) -> None:
        """A bounded pool takes a permit, or a lock, for the length of its `submit`."""

        class Counting(ThreadPoolExecutor):
            submitted = 0

            def submit(self, *given: Any, **options: Any) -> Any:
                self.submitted += 1
                return super().submit(*given, **options)

        class Names(ScriptedChat):
            async def _agenerate(self, *given: Any, **options: Any) -> Any:
                return await loop.run_in_executor(executor=pool, func=partial(self._generate, *given, **options))

        loop: Any = asyncio.get_running_loop()
        before = loop._default_executor
        with Counting(1) as pool:
            loop.set_default_executor(pool)
            for model in (HandsOver, Names):
                calls = CallPool(silence(model(answer=ANSWERS)), QUICK, 8)
                assert [reply.fault for reply in await calls.amany([request("aaa")])] == [None]
            loop._default_executor = before
        assert pool.submitted == 0
        assert "run_in_executor" not in vars(type(loop)), "it stays where it is inherited from"

    async def test_a_loop_that_the_model_runs_keeps_its_own_threads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Those of the call may all wait for the end of such loops."""
        monkeypatch.setattr(call_module, "DEFAULT_CONCURRENCY", 1)

        class RunsALoop(ScriptedChat):
            def _generate(self, *given: Any, **options: Any) -> Any:
                return asyncio.run(asyncio.wait_for(asyncio.to_thread(super()._generate, *given, **options), 10.0))

        calls = CallPool(silence(RunsALoop(answer=ANSWERS)), RetryPolicy(max_attempts=1), 1)
        assert [reply.fault for reply in await calls.amany([request("aaa")])] == [None]

    async def test_threads_that_cannot_start_are_tried_once_however_many_rows_there_are(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tries = []
        monkeypatch.setattr(Crew, "here", lambda *given: tries.append(given) or no_room())

        def no_room() -> Any:
            raise ConfigurationError("no room")

        for prompts in (0, 1, 5):
            calls = CallPool(silence(ScriptedChat(answer=ANSWERS)), QUICK, 8)
            await calls.amany([request("aaa")] * prompts)
        assert len(tries) == 3

    async def test_threads_of_awaited_calls_start_whether_there_is_a_row_or_not(self) -> None:
        started = []
        for prompts in (0, 1, 5):
            calls = CallPool(silence(ScriptedChat(answer=ANSWERS)), QUICK, 8)
            await calls.amany([request("aaa")] * prompts)
            started += [(name, len(pool._threads)) for (*_, name), pool in calls._crew._pools.items()]
        assert started == [("awaited", call_module.DEFAULT_CONCURRENCY)] * 3

    async def test_where_no_more_threads_start_awaited_calls_use_those_of_the_loop(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await asyncio.to_thread(lambda: None)  # starts one

        def no_room(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        calls = CallPool(silence(ScriptedChat(answer=ANSWERS)), QUICK, 8)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_room)
            assert [reply.fault for reply in await calls.amany([request("aaa")])] == [None]

    @pytest.mark.parametrize(("loops", "kind"), [("asyncio", "SelectorEventLoop"), ("uvloop", "Loop")])
    @pytest.mark.parametrize("above", ["nothing", "a wrapper", "a mixin of typed loops"])
    def test_work_that_a_model_gives_to_threads_of_its_own_stays_there(self, loops: str, kind: str, above: str) -> None:
        made = getattr(pytest.importorskip(loops), kind)

        class Traced(made):
            def run_in_executor(self, *given: Any) -> Any:
                return made.run_in_executor(self, *given)

        class Mixin(asyncio.AbstractEventLoop):
            pass

        class Typed(Mixin, made.__base__, asyncio.AbstractEventLoop):
            pass

        own, names = ThreadPoolExecutor(1, thread_name_prefix="the-models"), []

        class HasThreads(ScriptedChat):
            async def _agenerate(self, *args: Any, **kwargs: Any) -> Any:
                loop = asyncio.get_running_loop()
                for pool in (own, None):
                    name = await loop.run_in_executor(pool, lambda: threading.current_thread().name)
                    names.append(name.rsplit("_", 1)[0])
                return self._generate(*args, **kwargs)

        calls = CallPool(silence(HasThreads(answer=ANSWERS)), QUICK, 1)
        factory = {"nothing": made, "a wrapper": Traced}.get(above, Typed)
        with asyncio.Runner(loop_factory=factory) as runner:
            assert [reply.fault for reply in runner.run(calls.amany([request("aaa")]))] == [None]
            assert names == ["the-models", "dpicl-awaited"]
            mark = runner.run(asyncio.to_thread(lambda: threading.current_thread().name))
        assert not mark.startswith("dpicl")  # outside of calls the loop's own do the work


class TestGate:
    @pytest.mark.parametrize("limit", [1, 3])
    def test_never_lets_more_in_and_lets_everybody_in(self, limit: int) -> None:
        gate, gauge, coins = FairSemaphore(limit), Gauge(limit), random.Random(limit)
        waits = [coins.random() * 0.002 for _ in range(60)]

        def blocking() -> None:
            for wait in waits:
                with gate, gauge:
                    while gauge.lonely():
                        time.sleep(0.001)
                    time.sleep(wait)

        def awaiting() -> None:
            async def one(wait: float) -> None:
                async with gate:
                    with gauge:
                        await asyncio.sleep(wait)

            async def impatient(wait: float) -> None:
                try:
                    await asyncio.wait_for(one(wait), timeout=0.003)
                except TimeoutError:
                    return

            async def run() -> None:
                await asyncio.gather(*map(one, waits), *map(impatient, waits))

            asyncio.run(run())

        in_threads(blocking, blocking, awaiting, awaiting)
        assert gauge.most == limit
        assert gauge.now == 0
        assert gauge.made >= 4 * 60
        gauge.expect(limit)
        in_threads(*[blocking] * (limit + 1))  # every place was given back
        assert gauge.most == limit

    async def test_serves_who_waits_by_turn(self) -> None:
        gate, order = FairSemaphore(1), []

        async def one(number: int) -> None:
            async with gate:
                order.append(number)
                await asyncio.sleep(0)

        await asyncio.gather(*(one(number) for number in range(8)))
        assert order == list(range(8))

    def test_does_not_wait_for_a_loop_that_is_gone(self) -> None:
        gate = FairSemaphore(1)
        gone = asyncio.new_event_loop()

        async def wait_for_ever() -> None:
            async with gate:
                pass

        with gate:
            task = gone.create_task(wait_for_ever())
            gone.run_until_complete(asyncio.sleep(0))
            gone.close()
        in_threads(gate.__enter__)
        del task

    def test_ctrl_c_while_waiting_takes_no_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gate = FairSemaphore(1)

        def stopped(event: threading.Event, timeout: float | None = None) -> bool:
            raise KeyboardInterrupt

        with gate, monkeypatch.context() as patch:
            patch.setattr(threading.Event, "wait", stopped)
            with pytest.raises(KeyboardInterrupt):
                gate.__enter__()
        in_threads(gate.__enter__)

    def test_a_place_handed_over_to_a_cancelled_task_goes_to_the_next(self) -> None:
        gate = FairSemaphore(1)

        async def run() -> None:
            gate.__enter__()
            waiting = asyncio.create_task(gate.__aenter__())
            await asyncio.sleep(0)
            gate.__exit__(None, None, None)  # handed over, and not yet taken
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await asyncio.wait_for(gate.__aenter__(), timeout=60.0)

        asyncio.run(run())


class Counting(BaseRateLimiter):
    """A rate limiter that counts."""

    def __init__(self) -> None:
        self.sync = self.awaited = 0

    def acquire(self, *, blocking: bool = True) -> bool:
        self.sync += 1
        assert blocking
        return True

    async def aacquire(self, *, blocking: bool = True) -> bool:
        self.awaited += 1
        assert blocking
        return True


class TestRateLimiter:
    async def test_is_asked_before_every_attempt(self) -> None:
        limiter = Counting()
        model = ScriptedChat(
            answer=ANSWERS, rate_limiter=limiter, raises={"bad": StatusError("busy", status_code=503)}, times={"bad": 2}
        )
        backend = LangChainBackend(model, retry=QUICK)
        assert limiter.sync == len(model.seen)
        limiter.sync = 0
        model.seen.clear()
        backend.open(["aaa", "bad", "bbb"], []).score(DOMAIN)
        assert (limiter.sync, limiter.awaited) == (len(model.seen), 0) == (5, 0)
        model.times["bad"] = 1
        await backend.open(["aaa", "bad"], []).ascore(DOMAIN)
        await backend.atop_tokens("aaa", [], top_k=1)
        assert (limiter.sync, limiter.awaited) == (5, 4)
        backend.complete(["aaa"], max_tokens=2)
        await backend.acomplete(["aaa"], max_tokens=2)
        assert (limiter.sync, limiter.awaited) == (6, 5)

    @pytest.mark.parametrize("awaited", [False, True], ids=["blocking", "awaited"])
    def test_slows_all_calls_of_an_engine_down_together(self, awaited: bool) -> None:
        limiter = InMemoryRateLimiter(requests_per_second=100, check_every_n_seconds=0.002, max_bucket_size=1)
        backend = LangChainBackend(ScriptedChat(answer=ANSWERS, rate_limiter=limiter))
        session = backend.open(["aaa"] * 8, [])
        started = time.monotonic()
        rows = asyncio.run(session.ascore(DOMAIN)) if awaited else session.score(DOMAIN)
        assert time.monotonic() - started >= 0.9 * 7 / 100
        assert rows.all(axis=1).sum() == 0
        assert rows[:, 0].tolist() == [pytest.approx(0.5)] * 8
