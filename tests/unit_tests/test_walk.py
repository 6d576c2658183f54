"""One walk, two drivers."""

from __future__ import annotations

import asyncio
import traceback
from typing import Any

import pytest

from langchain_dpicl.backends.walk import AskTopTokens, adrive, drive
from langchain_dpicl.exceptions import ModelCallError


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


@pytest.mark.parametrize("driver", [drive, lambda walk: asyncio.run(adrive(walk))], ids=["sync", "async"])
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
            return (yield AskTopTokens(Full(), "public", (), 1))  # type: ignore[arg-type]

        with pytest.raises(ModelCallError, match="failed with MemoryError") as caught:
            driver(asking())
        assert caught.value.__cause__ is caught.value.__context__ is None
        assert "512" not in "".join(traceback.format_exception(caught.value))
