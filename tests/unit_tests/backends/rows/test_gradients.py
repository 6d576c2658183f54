"""The question of a training step: an engine's fault costs the unit it lies in, and what goes on shows nothing private."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import pickle
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from langchain_dpicl._opaque import OpaqueRows
from langchain_dpicl.backends.base import GradientBackend, TrainingExample
from langchain_dpicl.backends.rows.gradient_rows import GradientRequest
from langchain_dpicl.exceptions import ConfigurationError, DPICLError, ModelCallError, PrivateAccessError
from tests.doubles import PanicError

CANARY = "zxcanaryzx"
WIDTH = 3


class Engine:
    """Hands over the length of each text, two rows at a time, and does what a text tells it."""

    name = "lengths"
    width = WIDTH

    def __init__(self, tricks: dict[str, Callable[[], Any]] | None = None) -> None:
        self.tricks = tricks or {}
        self.calls = 0
        self.checks: list[Any] = []
        self.at_check: Callable[[], object] = lambda: None

    def check(self, parameters: Any) -> None:
        self.checks.append(parameters)
        self.at_check()

    def gradients(self, parameters: Any, groups: Sequence[Any], *, add: Callable[[Any], None]) -> None:
        self.calls += 1
        rows = []
        for group in groups:
            if group:
                for word, trick in self.tricks.items():
                    if word in group[0].text:
                        trick()
                rows.append(np.full(WIDTH, float(np.mean([len(example.text) for example in group]))))
            if len(rows) == 2:
                add(np.array(rows))
                rows.clear()
        if rows:
            add(np.array(rows))

    async def agradients(self, parameters: Any, groups: Sequence[Any], *, add: Callable[[Any], None]) -> None:
        await asyncio.sleep(0)
        self.gradients(parameters, groups, add=add)

    def losses(self, parameters: Any, examples: Sequence[TrainingExample]) -> np.ndarray:
        return np.zeros(len(examples))


class Total:
    """Adds rows of the width that was agreed on."""

    def __init__(self) -> None:
        self.rows: list[float] = []

    def add(self, rows: Any) -> None:
        if rows.shape[1] != WIDTH:
            raise ConfigurationError("another width")
        self.rows += rows[:, 0].tolist()

    def clear(self) -> None:
        self.rows.clear()


def groups(*texts: str | None) -> list[tuple[TrainingExample, ...] | None]:
    return [None if text is None else (TrainingExample(text),) for text in texts]


def asked(engine: Any, given: Any, way: str) -> Total:
    total = Total()
    ask = GradientRequest(engine, np.zeros(WIDTH), given, total)
    boxed = ask.run() if way == "run" else asyncio.run(ask.arun())
    assert isinstance(boxed, OpaqueRows)
    assert boxed.take() is total
    return total


def raise_(error: BaseException) -> Callable[[], None]:
    def trick() -> None:
        raise error

    return trick


@pytest.fixture(params=["run", "arun"])
def way(request: pytest.FixtureRequest) -> str:
    return request.param


def test_the_box_holds_the_total_of_all_rows(way: str) -> None:
    total = asked(Engine(), [*groups("a", None, "bbb"), (), (TrainingExample("cc"), TrainingExample("cccc"))], way)
    assert total.rows == [1.0, 3.0, 3.0]
    assert isinstance(Engine(), GradientBackend)


@pytest.mark.parametrize(
    "error",
    [RuntimeError(CANARY), PanicError(CANARY), SystemExit(CANARY), MemoryError()],
    ids=lambda e: type(e).__name__,
)
def test_what_an_engine_raises_for_a_text_costs_that_unit_alone(way: str, error: BaseException) -> None:
    """Rows that were handed over before it raised are not added twice."""
    engine = Engine({"BAD": raise_(error)})
    assert asked(engine, groups("a", "bb", "ccc", "BAD", "eeeee"), way).rows == [1.0, 2.0, 3.0, 5.0]
    assert engine.calls == 1 + 5


@pytest.mark.parametrize(
    "error", [ModelCallError("public"), ConfigurationError("public")], ids=lambda e: type(e).__name__
)
def test_public_faults_go_on_without_private_frames(way: str, error: DPICLError) -> None:
    def fails() -> None:
        secret = CANARY
        try:
            raise ValueError(secret)  # noqa: TRY301  an error in the middle of another
        except ValueError:
            raise error  # noqa: B904  its context must not go on either

    with pytest.raises(type(error), match="public") as caught:
        asked(Engine({"BAD": fails}), groups("a", "BAD" + CANARY), way)
    assert caught.value.__context__ is None
    assert caught.value.__cause__ is None
    shown = traceback.TracebackException.from_exception(caught.value, capture_locals=True).format()
    assert CANARY not in "".join(shown)
    frames = {frame.name for frame in traceback.extract_tb(caught.value.__traceback__)}
    assert not frames & {"fails", "gradients", "agradients"}


def test_rows_of_another_width_are_a_public_fault(way: str) -> None:
    class Wide(Engine):
        def gradients(self, parameters: Any, groups: Any, *, add: Any) -> None:
            add(np.zeros((1, WIDTH + 1)))

    with pytest.raises(ConfigurationError, match="another width"):
        asked(Wide(), groups("a"), way)


def test_an_engine_that_gives_a_unit_two_rows_is_refused(way: str) -> None:
    class Twice(Engine):
        def gradients(self, parameters: Any, groups: Any, *, add: Any) -> None:
            add(np.zeros((1, WIDTH)))
            add(np.zeros((1, WIDTH)))

    with pytest.raises(ModelCallError, match="more rows than there are units"):
        asked(Twice(), [*groups("a"), None, ()], way)


def test_after_a_fault_too_each_unit_has_one_row_at_most(way: str) -> None:
    class TwiceAlone(Engine):
        def gradients(self, parameters: Any, groups: Any, *, add: Any) -> None:
            if len(groups) > 1:
                raise RuntimeError
            add(np.zeros((2, WIDTH)))

    with pytest.raises(ModelCallError, match="more rows than there are units"):
        asked(TwiceAlone(), groups("a", "b"), way)


def test_a_row_half_handed_over_before_a_fault_is_none(way: str) -> None:
    class Late(Engine):
        def gradients(self, parameters: Any, groups: Any, *, add: Any) -> None:
            super().gradients(parameters, groups, add=add)
            if any(group and "BAD" in group[0].text for group in groups):
                raise RuntimeError

    assert asked(Late(), groups("a", "BAD", "ccc"), way).rows == [1.0, 3.0]


def test_ctrl_c_goes_on_from_a_frame_that_holds_nothing(way: str) -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        asked(Engine({"BAD": raise_(KeyboardInterrupt(CANARY))}), groups("a", "BAD" + CANARY), way)
    shown = traceback.TracebackException.from_exception(caught.value, capture_locals=True).format()
    assert CANARY not in "".join(shown)


@pytest.mark.parametrize("first", [None, RuntimeError], ids=["all at once", "one by one"])
def test_no_frame_that_ctrl_c_leaves_holds_an_example(way: str, first: type[Exception] | None) -> None:
    def stops() -> None:
        if first is not None and engine.calls == 1:
            raise first
        raise KeyboardInterrupt

    def held(value: Any, depth: int = 4) -> bool:
        if isinstance(value, TrainingExample) or depth == 0:
            return isinstance(value, TrainingExample)
        slots = [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
        return any(held(one, depth - 1) for one in [*slots, *(value if isinstance(value, list | tuple) else ())])

    engine = Engine({"BAD": stops})
    question = GradientRequest(engine, np.zeros(WIDTH), groups("a", "BAD"), Total())
    with pytest.raises(KeyboardInterrupt) as caught:
        asyncio.run(question.arun()) if way == "arun" else question.run()
    frames = [frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    ours = [frame for frame in frames if frame.f_globals["__name__"].startswith("langchain_dpicl")]
    assert len(ours) > 3
    assert [name for frame in ours for name, value in frame.f_locals.items() if held(value)] == []
    assert held([TrainingExample("x")])


def test_ctrl_c_while_a_row_is_added_alone_leaves_no_row_behind(way: str) -> None:
    class Stopped(Total):
        def add(self, rows: Any) -> None:
            raise KeyboardInterrupt

    question = GradientRequest(Engine({"BAD": raise_(RuntimeError())}), np.zeros(WIDTH), groups("BAD", "a"), Stopped())
    with pytest.raises(KeyboardInterrupt) as caught:
        asyncio.run(question.arun()) if way == "arun" else question.run()
    frames = [frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    assert "add" not in {frame.f_code.co_name for frame in frames}
    found = [value for frame in frames for value in frame.f_locals.values() if type(value).__name__ == "_PendingRow"]
    assert [value.rows for value in found] == [[]] * len(found) != []


async def test_a_cancelled_task_stops() -> None:
    class Slow(Engine):
        async def agradients(self, parameters: Any, groups: Any, *, add: Any) -> None:
            await asyncio.sleep(60)

    total = Total()
    task = asyncio.create_task(GradientRequest(Slow(), np.zeros(WIDTH), groups("a"), total).arun())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert total.rows == []


def test_the_question_shows_nothing() -> None:
    ask = GradientRequest(Engine(), np.zeros(WIDTH), groups(CANARY), Total())
    assert CANARY not in repr(ask) + str(ask)
    assert CANARY not in repr(ask.run())


class SideBySide(Engine):
    """Works on all groups at once, as threads and tasks do; one of them raises while others are under way."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[threading.Thread] = []

    def gradients(self, parameters: Any, groups: Sequence[Any], *, add: Callable[[Any], None]) -> None:
        raises = any("raises" in group[0].text for group in groups)
        late = threading.Event()

        def work(group: Any) -> None:
            late.wait(60)
            add(np.full((1, WIDTH), 1.0))

        started = [threading.Thread(target=work, args=(group,)) for group in groups if "raises" not in group[0].text]
        for thread in started:
            thread.start()
        self.threads += started
        if raises:
            threading.Timer(0.05, late.set).start()  # the rows come when the call has ended
            raise RuntimeError("one row")
        late.set()
        for thread in started:
            thread.join()

    async def agradients(self, parameters: Any, groups: Sequence[Any], *, add: Callable[[Any], None]) -> None:
        self.gradients(parameters, groups, add=add)


def test_rows_that_come_after_their_call_has_ended_are_not_added_twice(way: str) -> None:
    engine = SideBySide()
    total = asked(engine, groups("a", "bb", "raises", "ccc"), way)
    for thread in engine.threads:
        thread.join()
    assert len(total.rows) == 3


def test_nothing_private_is_held_when_the_answer_is_there(way: str) -> None:
    for tricks in ({}, {CANARY: raise_(RuntimeError("row"))}, {CANARY: raise_(ModelCallError("public"))}):
        question = GradientRequest(Engine(tricks), np.zeros(WIDTH), groups(CANARY), Total())
        with contextlib.suppress(ModelCallError):
            asyncio.run(question.arun()) if way == "arun" else question.run()
        assert not question.groups


def test_examples_and_questions_are_not_copied() -> None:
    example = TrainingExample(CANARY)
    for one in (example, GradientRequest(Engine(), np.zeros(WIDTH), [(example,)], Total())):
        assert copy.copy(one) is copy.deepcopy(one) is one
        with pytest.raises(PrivateAccessError):
            pickle.dumps(one)
