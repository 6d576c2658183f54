"""Texts over an API are written at the same time, and the public prompt of a token is asked beside its rows."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from langchain_core.runnables import RunnableLambda

from langchain_dpicl import Noise, Rows
from langchain_dpicl.backends.base import Token
from langchain_dpicl.backends.fake import FakeBackend, word_copier
from langchain_dpicl.backends.rows.rows import Together, advance_together
from langchain_dpicl.backends.sync_async import Call, EffectGenerator, Outage, run_async, run_sync
from langchain_dpicl.exceptions import (
    ConfigurationError,
    ModelCallError,
    PrivacyBudgetExceededError,
    RunInterruptedError,
    UnsilencableModelError,
)
from langchain_dpicl.generation.plan import template_name
from langchain_dpicl.generation.synthesizer import DemonstrationSynthesizer
from langchain_dpicl.options import LocalExecutor
from tests.contracts.front_room import CANARY, Observer
from tests.doubles import WORDS
from tests.durable import until
from tests.unit_tests.backends.rows.test_label_rows import private_things
from tests.unit_tests.generation.test_synthesis import private_examples, synthesizer

SOON = 60.0
TOKENS = 4
TICKET = template_name("text", 1)
DRIVERS = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


class Elsewhere(FakeBackend):
    """An engine of a model elsewhere: notes when each call began and ended, and does what a test wants during it."""

    def __init__(self, *, calls_at_once: int = 32) -> None:
        super().__init__(word_copier(WORDS), max_top_k=len(WORDS) + 1)
        self.calls_at_once = calls_at_once
        self.log: list[tuple[str, str]] = []
        self.on_public: Callable[[str], None] | None = None
        self.on_private: Callable[[], None] | None = None

    def noted(self, kind: str, act: Callable[[], Any]) -> Any:
        self.log.append((kind, "began"))
        try:
            return act()
        finally:
            self.log.append((kind, "ended"))

    def top_tokens(self, prompt: str, prefix: Sequence[Token], *, top_k: int) -> Any:
        def asked() -> Any:
            if self.on_public is not None:
                self.on_public(prompt)
            return super(Elsewhere, self).top_tokens(prompt, prefix, top_k=top_k)

        return self.noted("public", asked)

    async def atop_tokens(self, prompt: str, prefix: Sequence[Token], *, top_k: int) -> Any:
        return await asyncio.to_thread(lambda: self.top_tokens(prompt, prefix, top_k=top_k))

    def open(self, prompts: Sequence[str], prefix: Sequence[Token]) -> Any:
        return _Session(self, super().open(prompts, prefix))


class WatchedError(ConfigurationError):
    """One that can be watched."""


class _Session:
    """Replies with what reads rows of any candidates."""

    def __init__(self, engine: Elsewhere, inner: Any) -> None:
        self.engine = engine
        self.inner = inner

    def report(self) -> Any:
        act = self.engine.on_private or (lambda: None)
        self.engine.noted("private", act)
        return self.inner.score

    async def areport(self) -> Any:
        return await asyncio.to_thread(self.report)

    def read(self, report: Any, domain: Sequence[Token]) -> Any:
        return report(domain)

    def score(self, domain: Sequence[Token]) -> Any:
        return self.read(self.report(), domain)

    async def ascore(self, domain: Sequence[Token]) -> Any:
        return self.read(await self.areport(), domain)

    def push(self, token: Token) -> None:
        self.inner.push(token)

    def close(self) -> None:
        self.inner.close()


def made(llm: Any, **options: Any) -> DemonstrationSynthesizer:
    given: dict[str, Any] = {"max_tokens": TOKENS, "rows": Rows(slots=10, shots=2, redraw_every=1), **options}
    return synthesizer(private_examples(), llm=llm, **given)


def run(maker: DemonstrationSynthesizer, *, is_async: bool, **options: Any) -> Any:
    return asyncio.run(maker.arun(progress=False, **options)) if is_async else maker.run(progress=False, **options)


def spent(maker: DemonstrationSynthesizer) -> int:
    return 2 * TOKENS - sum(maker.share.remaining(TICKET, label=label) for label in ("card", "transfer"))


def charged(maker: DemonstrationSynthesizer) -> int:
    """How many tickets of any length the ledger has charged."""
    tickets = maker.plan.tickets()
    return sum(each.max_count - maker.share.remaining(each.template, label=each.label) for each in tickets)


@DRIVERS
def test_both_texts_are_written_at_the_same_time_and_the_public_prompt_beside_the_rows(is_async: bool) -> None:
    llm = Elsewhere()
    first = threading.Barrier(2, timeout=SOON)  # the public prompts of the two texts, before any ticket burns
    both = threading.Barrier(4, timeout=SOON)  # afterwards the rows and the public prompt of each text
    waits = {"public": 0, "private": 0}

    def public(_: str) -> None:
        waits["public"] += 1
        (first if waits["public"] <= 2 else both).wait()

    def private() -> None:
        waits["private"] += 1
        if waits["private"] > 2:  # the first rows go alone: their public prompts were answered
            both.wait()

    llm.on_public, llm.on_private = public, private
    released = run(made(llm), is_async=is_async)
    assert [example["text"] for example in released.examples] == ["my card was declined", "my transfer is late"]
    assert waits == {"public": 2 * TOKENS, "private": 2 * TOKENS}
    assert not first.broken
    assert not both.broken


@DRIVERS
@pytest.mark.parametrize("redraw_every", [1, 3, "run"])
def test_the_texts_are_those_of_an_engine_here(redraw_every: Any, is_async: bool, tmp_path: Path) -> None:
    rows = Rows(slots=20, shots=2, redraw_every=redraw_every)
    for path in (None, tmp_path / "run.jsonl"):
        released = run(made(Elsewhere(), rows=rows, checkpoint=path), is_async=is_async)
        assert [example["text"] for example in released.examples] == ["my card was declined", "my transfer is late"]


def test_disjoint_batches_of_a_label_are_written_at_the_same_time() -> None:
    rows = Rows(slots=10, shots=2, sampling="disjoint")
    released = run(made(Elsewhere(), rows=rows, shots_per_label=3), is_async=False)
    assert len(released.examples) == 6


@DRIVERS
@pytest.mark.parametrize("redraw_every", [1, 2, "run"])
def test_a_text_is_charged_behind_its_first_public_answer_and_before_any_row(redraw_every: Any, is_async: bool) -> None:
    llm = Elsewhere()
    maker = made(llm, rows=Rows(slots=10, shots=2, redraw_every=redraw_every))
    seen: dict[str, list[int]] = {"public": [], "private": []}
    llm.on_public = lambda _: seen["public"].append(charged(maker))
    llm.on_private = lambda: seen["private"].append(charged(maker))
    run(maker, is_async=is_async)
    tickets = sum(ticket.max_count for ticket in maker.plan.tickets())
    assert seen["public"][0] == 0
    assert seen["private"][0] >= tickets // 2  # of one text at least, all of its tickets
    assert charged(maker) == tickets


@DRIVERS
def test_observers_hear_what_each_text_was_charged(is_async: bool) -> None:
    listener = Observer()
    maker = made(Elsewhere())

    async def arun(_: Any) -> Any:
        return await maker.arun(progress=False)

    step: Any = RunnableLambda(lambda _: maker.run(progress=False), arun)
    asyncio.run(step.ainvoke(0, {"callbacks": [listener]})) if is_async else step.invoke(0, {"callbacks": [listener]})
    assert [(name, data["tickets"]) for name, data in listener.heard] == [("dpicl.charged", TOKENS)] * 2


@DRIVERS
@pytest.mark.parametrize("redraw_every", [1, 2, "run"])
def test_a_run_that_begins_in_an_outage_is_charged_no_ticket(redraw_every: Any, is_async: bool) -> None:
    llm = Elsewhere()
    maker = made(llm, rows=Rows(slots=10, shots=2, redraw_every=redraw_every))
    llm.on_public = failing
    for _ in range(2):
        with pytest.raises(RunInterruptedError):
            run(maker, is_async=is_async)
    assert {kind for kind, _ in llm.log} == {"public"}
    assert charged(maker) == 0
    llm.on_public = None
    assert len(run(maker, is_async=is_async).examples) == 2


def failing(_: str) -> None:
    raise ModelCallError("the server is away. Call again.")


@DRIVERS
def test_an_outage_costs_each_text_in_flight_one_ticket_and_the_run_goes_on(is_async: bool) -> None:
    llm = Elsewhere()
    maker = made(llm)
    calls = [0]

    def public(_: str) -> None:
        calls[0] += 1
        if calls[0] > 4:  # two first questions, then two beside the rows
            failing("")

    llm.on_public = public
    with pytest.raises(RunInterruptedError) as caught:
        run(maker, is_async=is_async)
    assert private_things(caught.value) == []
    assert spent(maker) == 2 * 3  # two tokens of each are written, and one ticket of each is lost
    llm.on_public = None
    released = run(maker, is_async=is_async)
    assert [example["text"] for example in released.examples] == ["my card was", "my transfer is"]


@DRIVERS
def test_an_instrumentor_that_comes_during_a_text_costs_no_ticket(is_async: bool) -> None:
    llm = Elsewhere()
    maker = made(llm)

    def look() -> None:
        if llm.log.count(("private", "ended")) >= 2 * 2:  # two tokens of each text
            raise UnsilencableModelError("an instrumentor would see the prompts")

    llm.check_silent = look  # type: ignore[attr-defined]
    with pytest.raises(UnsilencableModelError):
        run(maker, is_async=is_async)
    assert spent(maker) == 2 * 2
    del llm.check_silent  # type: ignore[attr-defined]
    released = run(maker, is_async=is_async)
    assert [example["text"] for example in released.examples] == ["my card was declined", "my transfer is late"]


@DRIVERS
def test_a_failed_public_call_is_made_again_while_no_private_call_is_in_flight(is_async: bool) -> None:
    llm = Elsewhere()
    failures = [0]

    def public(prompt: str) -> None:
        if prompt.endswith("card:") and ("private", "began") in llm.log:  # the second question, beside the rows
            failures[0] += 1
            if failures[0] == 1:
                failing("")

    llm.on_public = public
    released = run(made(llm), is_async=is_async)
    assert [example["text"] for example in released.examples] == ["my card was declined", "my transfer is late"]
    assert failures[0] > 0
    balance = {"public": 0, "private": 0}
    public_alone = 0
    for kind, event in llm.log:
        balance[kind] += 1 if event == "began" else -1
        public_alone += (kind, event) == ("public", "began") and not balance["private"]
    assert public_alone >= 3  # the two first ones, and the one that was asked again


@DRIVERS
def test_the_failure_of_one_text_changes_no_other(is_async: bool) -> None:
    llm = Elsewhere()
    maker = made(llm)
    llm.on_public = lambda prompt: failing("") if prompt.endswith("card:") else None
    with pytest.raises(RunInterruptedError, match="1 of 2"):
        run(maker, is_async=is_async)
    assert [example["text"] for example in maker.result.examples] == ["my transfer is late"]
    llm.on_public = None
    assert len(run(maker, is_async=is_async).examples) == 2


@pytest.mark.parametrize("failing_texts", [("transfer",), ("card", "transfer")])
@DRIVERS
def test_an_error_of_a_text_dies_with_whoever_holds_it(is_async: bool, failing_texts: tuple[str, ...]) -> None:
    llm = Elsewhere()
    maker = made(llm)

    def fail(prompt: str) -> None:
        if any(f"{label}:" in prompt for label in failing_texts):
            raise WatchedError("a setting")

    async def main() -> Any:
        try:
            await maker.arun(progress=False) if is_async else maker.run(progress=False)
        except WatchedError as error:
            watched = weakref.ref(error)
        await until(lambda: watched() is None, 2)  # a thread lets go of what it did last a moment later
        return watched()

    llm.on_public = fail
    gc.disable()
    try:
        assert asyncio.run(main()) is None
    finally:
        gc.enable()
    assert len(maker.demonstrations) == 2 - len(failing_texts)


def test_a_stream_shows_what_was_written_beside_a_text_that_failed() -> None:
    llm = Elsewhere()
    maker = made(llm)
    llm.on_public = lambda prompt: failing("") if prompt.endswith("card:") else None
    seen: list[Any] = []
    with pytest.raises(RunInterruptedError):
        seen.extend(maker.stream(progress=False))
    assert [example["text"] for example in seen] == ["my transfer is late"]


def test_a_stream_that_was_closed_goes_on_with_what_it_did_not_show() -> None:
    maker = made(Elsewhere())
    stream = maker.stream(progress=False)
    assert next(stream)["text"] == "my card was declined"  # type: ignore[call-overload]
    stream.close()  # type: ignore[attr-defined]
    assert [example["text"] for example in maker.stream(progress=False)] == ["my transfer is late"]


@DRIVERS
def test_with_a_checkpoint_texts_are_written_one_after_the_other(is_async: bool, tmp_path: Path) -> None:
    llm = Elsewhere()
    asked: list[str] = []
    llm.on_public = asked.append
    run(made(llm, checkpoint=tmp_path / "run.jsonl"), is_async=is_async)
    assert [prompt[-5:] for prompt in asked] == [asked[0][-5:]] * TOKENS + [asked[-1][-5:]] * TOKENS
    assert asked[0] != asked[-1]


def test_what_was_written_beside_a_stopped_text_is_shown_by_the_next_stream() -> None:
    llm = Elsewhere()
    maker = made(llm)
    bar: list[str] = []

    def public(prompt: str) -> None:
        if prompt.endswith("card:"):
            failing("")

    llm.on_public = public
    rest = maker._give_back

    def stopped(item: Any, events: Any) -> None:
        rest(item, events)
        if item.done and not bar:
            bar.append("stopped")
            raise KeyboardInterrupt

    maker._give_back = stopped  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        list(maker.stream(progress=False))
    llm.on_public = None
    texts = [example["text"] for example in maker.stream(progress=False)]
    assert texts == ["my transfer is late", "my card was declined"]


def test_a_thread_that_ends_after_a_stop_leaves_no_rows_behind() -> None:
    began, over = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []
    box = ["private rows"]

    def late() -> Any:
        threads.append(threading.current_thread())
        began.set()
        over.wait(SOON)
        return box

    def stop() -> Any:
        began.wait(SOON)
        raise KeyboardInterrupt

    async def never() -> Any:
        raise AssertionError

    with pytest.raises(KeyboardInterrupt) as caught:
        Together((Call(stop, never), Call(late, never))).run()
    over.set()
    threads[0].join()
    frame = caught.value.__traceback__
    held: list[Any] = []
    while frame is not None:
        held += [outcome.value for outcome in frame.tb_frame.f_locals.get("outcomes", [])]
        frame = frame.tb_next
    assert held
    assert box not in held


@DRIVERS
def test_a_share_without_tickets_for_one_text_still_writes_the_others(is_async: bool) -> None:
    again = made(Elsewhere())
    again.share.reserve(TICKET, label="card", count=TOKENS)
    with pytest.raises(PrivacyBudgetExceededError):
        run(again, is_async=is_async)
    assert [example["text"] for example in again.result.examples] == ["my transfer is late"]


@pytest.mark.parametrize(("limit", "texts"), [(1, 1), (7, 1), (8, 2), (None, 2)])
def test_few_calls_in_flight_write_one_text_after_the_other(limit: int | None, texts: int) -> None:
    llm = Elsewhere()
    open_texts: set[str] = set()
    most = 0

    def public(prompt: str) -> None:
        nonlocal most
        open_texts.add(prompt)
        most = max(most, len(open_texts))

    llm.on_public = public
    maker = made(llm, executor=None if limit is None else LocalExecutor(max_concurrency=limit), max_tokens=1)
    stream = maker.stream(progress=False)
    next(iter(stream))
    assert most == texts


@DRIVERS
@pytest.mark.parametrize("where", ["public", "private"])
def test_a_stop_ends_all_texts_and_the_run_can_go_on(where: str, is_async: bool) -> None:
    llm = Elsewhere()
    maker = made(llm)
    began, over = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        if len(llm.log) > (0 if where == "public" and not is_async else 8):  # the aside thread of one takes no Ctrl-C
            began.set()
            over.wait(SOON)
            if not is_async:
                raise KeyboardInterrupt

    setattr(llm, f"on_{where}", wait)

    async def cancelled() -> None:
        task = asyncio.ensure_future(maker.arun(progress=False))
        await asyncio.to_thread(began.wait, SOON)
        task.cancel()
        over.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    if is_async:
        asyncio.run(cancelled())
    else:
        over.set()
        with pytest.raises(KeyboardInterrupt) as caught:
            maker.run(progress=False)
        assert private_things(caught.value) == []
    assert spent(maker) < 2 * TOKENS
    setattr(llm, f"on_{where}", None)
    assert len(run(maker, is_async=is_async).examples) == 2


async def test_a_blocking_run_inside_a_running_loop_does_not_wait_for_that_loop() -> None:
    assert len(made(Elsewhere()).run(progress=False).examples) == 2


def test_no_record_is_in_what_a_failing_public_call_raises() -> None:
    llm = Elsewhere()
    maker = synthesizer(
        private_examples([{"text": f"my card {CANARY}", "topic": "card"}] * 200),
        llm=llm,
        max_tokens=TOKENS,
        noise=Noise(multiplier=0.05),
    )
    llm.on_public = lambda _: failing("") if llm.log.count(("private", "ended")) else None
    with pytest.raises(RunInterruptedError) as caught:
        maker.run(progress=False)
    assert private_things(caught.value) == []


# -- waves ------------------------------------------------------------------------------------------------------------


def steps(place: int, num: int, log: list[Any], *, fails_at: int | None = None) -> EffectGenerator[int]:
    for step in range(num):

        def call(step: int = step) -> int:
            if step == fails_at:
                raise WatchedError(f"step {place}")
            return step

        async def acall(step: int = step) -> int:
            return call(step)

        log.append((place, (yield Call(call, acall))))
    return place


@DRIVERS
def test_waves_end_when_the_longest_computation_does_and_an_error_ends_its_own(is_async: bool) -> None:
    log: list[Any] = []
    walk = advance_together([steps(0, 1, log), steps(1, 3, log, fails_at=1), steps(2, 2, log)])
    outcomes = asyncio.run(run_async(walk)) if is_async else run_sync(walk)
    assert [outcome.value for outcome in outcomes] == [0, None, 2]
    assert isinstance(outcomes[1].error, WatchedError)
    assert log == [(0, 0), (1, 0), (2, 0), (2, 1)]


@DRIVERS
def test_an_error_that_ends_one_computation_dies_with_its_outcome(is_async: bool) -> None:
    """Its frames may hold prompts: a cycle would keep them until the garbage collector comes by."""
    gc.disable()
    try:
        walk = advance_together([steps(0, 1, []), steps(1, 3, [], fails_at=1)])

        async def awaited(walk: Any) -> weakref.ref[BaseException]:  # asyncio keeps what its task returns
            return weakref.ref((await run_async(walk))[1].error)

        watched = asyncio.run(awaited(walk)) if is_async else weakref.ref(run_sync(walk)[1].error)
        del walk
        assert watched() is None
    finally:
        gc.enable()


async def test_an_awaited_call_that_its_client_cancels_is_a_failed_call() -> None:
    async def gone() -> None:
        raise asyncio.CancelledError

    found = await Together((Call(lambda: None, gone), Call(lambda: 1, lambda: asyncio.sleep(0, 1)))).arun()
    assert isinstance(found[0].error, ModelCallError)
    assert found[1].value == 1


def test_an_outage_is_over_once_a_public_call_is_answered() -> None:
    outage = Outage(is_on=True)
    with outage.noted():
        pass
    assert not outage.is_on
