"""The public prompt of an answer over an API: beside the private rows, alone where that failed, first in an outage."""

from __future__ import annotations

import asyncio
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, ChatResult

from langchain_dpicl import DPVotingRunnable, Rows, Serving
from langchain_dpicl._opaque import OpaqueRows
from langchain_dpicl.backends import TextVoteBackend
from langchain_dpicl.backends.private_calls.call import RetryPolicy
from langchain_dpicl.backends.sync_async import AskBeside, Effect, Outage, PublicAnswer
from langchain_dpicl.exceptions import CapabilityError, ModelCallError, NoisyPlanWarning, UnsilencableModelError
from tests.contracts.front_room import CANARY
from tests.unit_tests.backends.rows.test_label_rows import private_things
from tests.unit_tests.voting.test_voting import LABELS, house, voter

ROWS = 4  # with the public call fewer than the threads of an event loop on one core
SOON = 60.0
DRIVERS = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


class Chat(BaseChatModel):
    """Answers "card"; notes when each call began and ended, and does what a test wants for public ones."""

    log: Any = None
    on_public: Any = None
    on_private: Any = None

    @property
    def _llm_type(self) -> str:
        return "chat"

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **options: Any) -> ChatResult:
        text = str(messages[0].content)
        if "Snow is white" in text:  # the probe
            return said()
        kind = "private" if CANARY in text else "public"
        self.log.append((kind, "began"))
        try:
            act = self.on_private if kind == "private" else self.on_public
            if act is not None:
                act()
        finally:
            self.log.append((kind, "ended"))
        return said()

    async def _agenerate(self, messages: Any, stop: Any = None, run_manager: Any = None, **options: Any) -> ChatResult:
        return await asyncio.to_thread(self._generate, messages, stop, None, **options)


def said() -> ChatResult:
    return ChatResult(generations=[ChatGeneration(message=AIMessage("card"))])


class DownError(Exception):
    """What a client raises while its server is away."""


def failing(times: float) -> Callable[[], None]:
    """Raises for the first calls."""
    left = [times]

    def act() -> None:
        if left[0] > 0:
            left[0] -= 1
            raise DownError

    return act


def made(chat: Chat, **options: Any) -> DPVotingRunnable:
    chat.log = []
    engine = TextVoteBackend(chat, retry=RetryPolicy(max_attempts=1))
    given: dict[str, Any] = {
        "llm": engine,
        "budget": house(adjacency="replace_one"),
        "rows": Rows(slots=ROWS, shots=8, sampling="fixed"),  # no row is empty, which would read as a public prompt
        "serving": Serving(memo_size=0),
        "max_queries": 9,
    }
    return voter(**{**given, **options})


def ask(runnable: DPVotingRunnable, config: Any = None, *, is_async: bool) -> str:
    return asyncio.run(runnable.ainvoke("which?", config)) if is_async else runnable.invoke("which?", config)


def left(runnable: DPVotingRunnable) -> int:
    return int(runnable.share.remaining("query"))


@DRIVERS
def test_the_public_call_is_in_flight_together_with_the_private_ones(is_async: bool) -> None:
    together = threading.Barrier(ROWS + 1, timeout=SOON)
    chat = Chat(on_public=together.wait, on_private=together.wait)
    assert ask(made(chat), is_async=is_async) == "card"
    assert not together.broken
    assert len(chat.log) == 2 * (ROWS + 1)


@DRIVERS
def test_a_failure_beside_the_rows_is_asked_again_alone_after_them(is_async: bool) -> None:
    chat = Chat(on_public=failing(1), on_private=lambda: time.sleep(0.05))
    runnable = made(chat)
    assert ask(runnable, is_async=is_async) == "card"
    assert chat.log[-2:] == [("public", "began"), ("public", "ended")]
    assert chat.log.count(("private", "ended")) == ROWS
    assert chat.log.count(("public", "ended")) == 2
    assert left(runnable) == 8


@DRIVERS
def test_an_outage_costs_the_ticket_in_flight_and_the_public_call_goes_first_until_one_succeeds(is_async: bool) -> None:
    chat = Chat(on_public=failing(4))
    runnable = made(chat)
    with pytest.raises(ModelCallError):
        ask(runnable, is_async=is_async)
    assert left(runnable) == 8
    for _ in range(2):
        chat.log.clear()
        with pytest.raises(ModelCallError):
            ask(runnable, is_async=is_async)
        assert {kind for kind, _ in chat.log} == {"public"}
    assert left(runnable) == 8
    chat.log.clear()
    assert ask(runnable, is_async=is_async) == "card"
    assert chat.log[:2] == [("public", "began"), ("public", "ended")]
    together = threading.Barrier(ROWS + 1, timeout=SOON)
    chat.on_public = chat.on_private = together.wait
    assert ask(runnable, is_async=is_async) == "card"


@DRIVERS
def test_what_an_outage_raises_holds_nothing_private(is_async: bool) -> None:
    with pytest.raises(ModelCallError) as caught:
        ask(made(Chat(on_public=failing(2))), is_async=is_async)
    assert private_things(caught.value) == []


@DRIVERS
def test_private_rows_that_fail_end_no_public_call(is_async: bool) -> None:
    chat = Chat(on_private=failing(ROWS), on_public=lambda: time.sleep(0.05))
    runnable = made(chat)
    assert ask(runnable, is_async=is_async) in LABELS
    assert chat.log.count(("public", "ended")) == 1


class Undecided(Chat):
    """Names no label after public prompts, or after private ones."""

    unsure: str

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **options: Any) -> ChatResult:
        named = super()._generate(messages, stop, run_manager, **options)
        is_unsure = self.unsure == ("private" if CANARY in str(messages[0].content) else "public")
        return ChatResult(generations=[ChatGeneration(message=AIMessage("who knows"))]) if is_unsure else named


@DRIVERS
@pytest.mark.parametrize("public_first", [False, True], ids=["beside", "first"])
def test_a_public_answer_without_a_label_warns_once_and_a_private_one_never(public_first: bool, is_async: bool) -> None:
    for unsure, expected in (("public", [NoisyPlanWarning]), ("private", [])):
        runnable = made(Undecided(unsure=unsure), serving=Serving(memo_size=0, public_first=public_first))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                ask(runnable, is_async=is_async)
        assert [warning.category for warning in caught] == expected, unsure


@DRIVERS
def test_with_public_first_an_outage_is_free(is_async: bool) -> None:
    runnable = made(Chat(on_public=failing(9)), serving=Serving(memo_size=0, public_first=True))
    for _ in range(3):
        with pytest.raises(ModelCallError):
            ask(runnable, is_async=is_async)
    assert left(runnable) == 9


class Listed(TextVoteBackend):
    """Gives rows that nobody reads, and only where they are awaited."""

    async def ascore_choices(self, prompts: Sequence[str], choices: Sequence[str]) -> Any:
        return (await super().ascore_choices(prompts, choices)).tolist()


def test_awaited_rows_of_another_form_are_refused_before_a_ticket_burns() -> None:
    runnable = made(Chat(), llm=Listed(Chat(log=[])))
    for _ in range(2):
        with pytest.raises(CapabilityError, match="ascore_choices, for no prompts too, found list"):
            ask(runnable, is_async=True)
    assert left(runnable) == 9
    assert ask(runnable, is_async=False) == "card"


@DRIVERS
def test_an_instrumentor_that_comes_later_costs_nothing(is_async: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = Chat()
    runnable = made(chat)
    assert ask(runnable, is_async=is_async) == "card"
    recorder: dict[str, Any] = {"__name__": "opentelemetry.instrumentation.later"}
    exec("def wrapped(call): return lambda *given, **options: call(*given, **options)", recorder)  # noqa: S102  a package
    for door in ("_generate", "_agenerate"):
        monkeypatch.setattr(Chat, door, recorder["wrapped"](getattr(Chat, door)))
    chat.log.clear()
    for _ in range(2):
        with pytest.raises(UnsilencableModelError):
            ask(runnable, is_async=is_async)
    assert chat.log == []
    assert left(runnable) == 8


@DRIVERS
@pytest.mark.parametrize("limit", [1, 2, 8])
def test_no_more_calls_are_in_flight_than_the_config_allows(limit: int, is_async: bool) -> None:
    chat = Chat(on_private=lambda: time.sleep(0.05), on_public=lambda: time.sleep(0.05))
    assert (
        ask(made(chat, rows=Rows(slots=12, shots=3, sampling="fixed")), {"max_concurrency": limit}, is_async=is_async)
        == "card"
    )
    in_flight = most = 0
    for _, event in chat.log:
        in_flight += 1 if event == "began" else -1
        most = max(most, in_flight)
    assert most <= limit


async def test_a_blocking_answer_inside_a_running_loop_does_not_wait_for_that_loop() -> None:
    assert made(Chat()).invoke("which?") == "card"


async def test_a_cancelled_answer_is_cancelled_and_its_ticket_stays_spent() -> None:
    began, over = threading.Event(), threading.Event()

    def wait() -> None:
        began.set()
        over.wait(SOON)

    runnable = made(Chat(on_public=wait, on_private=wait))
    task = asyncio.ensure_future(runnable.ainvoke("which?"))
    await asyncio.to_thread(began.wait, SOON)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    over.set()
    assert left(runnable) == 8


@DRIVERS
def test_a_spent_share_answers_zero_shot_with_one_public_call(is_async: bool) -> None:
    chat = Chat()
    serving = Serving(memo_size=0, on_exhausted="zero_shot")
    runnable = made(chat, serving=serving, max_queries=1)
    ask(runnable, is_async=is_async)
    chat.log.clear()
    assert ask(runnable, is_async=is_async) == "card"
    assert chat.log == [("public", "began"), ("public", "ended")]


class GivenRows(Effect):
    """Rows that are there at once."""

    def __init__(self, box: OpaqueRows) -> None:
        self.box = box

    def run(self) -> OpaqueRows:
        return self.box

    async def arun(self) -> OpaqueRows:
        return self.box


class NeverAnswers(Effect):
    """A public call that hangs until it is stopped."""

    def run(self) -> Any:
        raise KeyboardInterrupt

    async def arun(self) -> Any:
        await asyncio.Event().wait()


async def test_an_answer_that_is_cancelled_while_the_public_call_hangs_holds_no_rows() -> None:
    box = OpaqueRows(CANARY)
    beside = AskBeside(GivenRows(box), PublicAnswer(NeverAnswers, Outage()))
    task = asyncio.ensure_future(beside.arun())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(IndexError):  # the box is empty
        box.take()


def test_a_stop_while_the_public_call_is_waited_for_leaves_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    box = OpaqueRows(CANARY)
    asked = PublicAnswer(lambda: GivenRows(OpaqueRows("a")), Outage())

    class Interrupted(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            super().join(timeout)
            raise KeyboardInterrupt

    monkeypatch.setattr(threading, "Thread", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        AskBeside(GivenRows(box), asked).run()
    with pytest.raises(IndexError):
        box.take()


def test_what_stops_a_public_call_beside_rows_stops_the_answer_and_drops_the_rows() -> None:
    class Stops:
        def run(self) -> Any:
            raise KeyboardInterrupt

    box = OpaqueRows("rows")
    with pytest.raises(KeyboardInterrupt):
        AskBeside(GivenRows(box), PublicAnswer(Stops, Outage())).run()
    assert box._rows == []
