"""One walk, two drivers."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from langchain_dpicl.backends.sync_async import Call, TopTokenRequest, run_async, run_sync
from langchain_dpicl.exceptions import ModelCallError
from tests.durable import cancelled_at, halfway, is_on_loop, until


class Give:
    def __init__(self, value: Any) -> None:
        self.value = value

    def run(self) -> Any:
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value

    async def arun(self) -> Any:
        await asyncio.sleep(0)
        return self.run()


def adding(log: list[str], values: list[Any]) -> Any:
    total = 0
    try:
        for value in values:
            total += yield Give(value)
    finally:
        log.append("closed")
    return total


DRIVERS = {
    "sync": run_sync,
    "async": lambda walk: asyncio.run(run_async(walk)),
    "async, steps in threads": lambda walk: asyncio.run(run_async(walk, is_slow=True)),
}


@pytest.mark.parametrize("driver", DRIVERS.values(), ids=DRIVERS)
class TestBothDrivers:
    def test_run_to_the_end_and_return(self, driver: Any) -> None:
        log: list[str] = []
        assert driver(adding(log, [1, 2, 3])) == 6
        assert log == ["closed"]

    @pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), asyncio.CancelledError()])
    def test_an_error_closes_the_walk_before_it_goes_on(self, driver: Any, error: BaseException) -> None:
        log: list[str] = []
        with pytest.raises(type(error)):
            driver(adding(log, [1, error, 3]))
        assert log == ["closed"]

    def test_a_walk_may_handle_an_error_and_go_on(self, driver: Any) -> None:
        def careful() -> Any:
            try:
                yield Give(ValueError("x"))
            except ValueError:
                return (yield Give(7))

        assert driver(careful()) == 7

    def test_a_failed_public_call_takes_nothing_along_of_what_the_engine_raised(self, driver: Any) -> None:
        class Full:
            def top_tokens(self, prompt: str, prefix: Any, *, top_k: int) -> Any:
                raise MemoryError("longest sequence so far: 512")

            async def atop_tokens(self, prompt: str, prefix: Any, *, top_k: int) -> Any:
                return self.top_tokens(prompt, prefix, top_k=top_k)

        def asking() -> Any:
            return (yield TopTokenRequest(Full(), "public", (), 1))  # type: ignore[arg-type]

        with pytest.raises(ModelCallError, match="failed with MemoryError") as caught:
            driver(asking())
        assert caught.value.__cause__ is caught.value.__context__ is None
        assert "so far" not in "".join(traceback.format_exception(caught.value))


# -- steps that may wait -------------------------------------------------------------------------------------------


class Places:
    """A walk of three asks that notes where each step ran and how it ended."""

    def __init__(self, step: Callable[[], None] = lambda: None) -> None:
        self.step = step
        self.log: list[str] = []
        self.busy = 0

    def walk(self) -> Any:
        self._note("begun")
        try:
            for number in range(3):
                yield Noting(self, number)
                self._note(f"step {number}")
        except BaseException as error:
            self._note(type(error).__name__)
            raise
        finally:
            self._note("closed")
        return "end"

    def _note(self, what: str) -> None:
        self.busy += 1
        assert self.busy == 1, "two steps at a time"
        self.step()
        self.log.append(what + " on the loop" * is_on_loop())
        self.busy -= 1


class Noting:
    def __init__(self, places: Places, number: int) -> None:
        self.places, self.number = places, number

    async def arun(self) -> None:
        self.places.log.append(f"ask {self.number}" + " on the loop" * is_on_loop())
        await asyncio.sleep(0)


def test_only_the_asks_run_on_the_loop() -> None:
    places = Places()
    assert asyncio.run(run_async(places.walk(), is_slow=True)) == "end"
    asks = [f"ask {number} on the loop" for number in range(3)]
    assert places.log == ["begun", asks[0], "step 0", asks[1], "step 1", asks[2], "step 2", "closed"]


@pytest.mark.parametrize("times", [1, 3])
def test_a_cancellation_at_any_wait_reaches_the_walk_between_two_steps(times: int) -> None:
    waits = cancelled_at(lambda: run_async(Places().walk(), is_slow=True), 10**6)[1]
    assert waits >= 7
    seen = set()
    for place in range(waits):
        places = Places(lambda: time.sleep(0.001))
        _, _, error = cancelled_at(lambda places=places: run_async(places.walk(), is_slow=True), place, times=times)
        assert type(error) is asyncio.CancelledError
        assert not [line for line in places.log if line.endswith("on the loop") and not line.startswith("ask")]
        assert places.log == [] or places.log[-1] == "closed"
        seen.add(places.log[-2] if places.log else "nothing begun")
    # In a step the cancellation waits; it comes as an error wherever something was still to be done.
    assert {"CancelledError", "step 2"} <= seen


def test_a_walk_may_answer_a_cancellation_and_go_on() -> None:
    log = []

    def careful() -> Any:
        try:
            yield Give(1)
        except asyncio.CancelledError:
            log.append("refused")
        return "kept"

    places = [cancelled_at(lambda: run_async(careful(), is_slow=True), place) for place in range(3)]
    assert "refused" in log
    assert ("kept", None) in [(answer, error) for answer, _, error in places]


def test_a_walk_that_is_left_alone_is_closed_in_a_thread() -> None:
    ended = threading.Event()

    def walk() -> Any:
        try:
            yield Give(1)
            yield Forever()
        finally:
            closed.append(is_on_loop())
            ended.set()

    closed: list[bool] = []

    async def main() -> None:
        work = run_async(walk(), is_slow=True)
        await asyncio.create_task(halfway(work, lambda: bool(Forever.waits)))
        work.close()

    asyncio.run(main())
    assert ended.wait(60)
    assert closed == [False]


class Forever:
    waits: list[int] = []  # noqa: RUF012  of the one test that uses it

    async def arun(self) -> None:
        self.waits.append(1)
        await asyncio.get_running_loop().create_future()


class WatchedError(Exception):
    """One that can be watched."""


def fails() -> Any:
    raise WatchedError


async def afails() -> Any:
    fails()


def failing_step() -> Any:
    yield Give(1)
    fails()


def failing_effect() -> Any:
    yield Call(fails, afails)


async def blocking(walk: Any) -> Any:
    return run_sync(walk)


@pytest.mark.parametrize("make", [failing_step, failing_effect])
@pytest.mark.parametrize("drive", [blocking, run_async, partial(run_async, is_slow=True)], ids=list(DRIVERS))
def test_an_error_dies_with_whoever_holds_it(drive: Any, make: Any) -> None:
    """Its frames may hold prompts: a cycle would keep them until the garbage collector comes by."""

    async def main() -> Any:
        try:
            await drive(make())
        except WatchedError as error:
            watched, others = weakref.ref(error), (error.__cause__, error.__context__)
        await until(lambda: watched() is None)  # the thread lets go of what it did last a moment later
        return watched(), others

    gc.disable()
    try:
        assert asyncio.run(main()) == (None, (None, None))
    finally:
        gc.enable()
