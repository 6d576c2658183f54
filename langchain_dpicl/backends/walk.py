"""One walk, two drivers: a computation that asks a model is written once and driven sync or async.

A walk is a generator that yields asks and receives their answers. Knows nothing of privacy.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

from langchain_dpicl.backends.base import NextTokenBackend, Token
from langchain_dpicl.backends.calls import at_most
from langchain_dpicl.exceptions import DPICLError, ModelCallError

T = TypeVar("T")


class Ask(Protocol):
    """Something to ask of a model, either way."""

    def run(self) -> Any:
        """Answers, blocking."""

    async def arun(self) -> Any:
        """Answers, awaiting."""


Walk: TypeAlias = Generator[Ask, Any, T]


@dataclass(frozen=True, slots=True)
class AskTopTokens:
    """Asks for the likeliest tokens after a PUBLIC prompt; raises ModelCallError when the model is out."""

    backend: NextTokenBackend = field(repr=False)
    prompt: str
    prefix: Sequence[Token]
    top_k: int

    def run(self) -> list[tuple[Token, float]]:
        """Answers, blocking."""
        try:
            return self.backend.top_tokens(self.prompt, self.prefix, top_k=self.top_k)
        except DPICLError:
            raise
        except Exception as error:  # noqa: BLE001  whatever an engine raises
            kind = type(error).__name__
        raise public_failure(kind)

    async def arun(self) -> list[tuple[Token, float]]:
        """Answers, awaiting."""
        try:
            return await self.backend.atop_tokens(self.prompt, self.prefix, top_k=self.top_k)
        except DPICLError:
            raise
        except Exception as error:  # noqa: BLE001  whatever an engine raises
            kind = type(error).__name__
        raise public_failure(kind)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class AtMost:
    """Asks with so many calls in flight at a time; None: as many as the engine makes."""

    ask: Ask
    limit: int | None

    def run(self) -> Any:
        """Answers, blocking."""
        with at_most(self.limit):
            return self.ask.run()

    async def arun(self) -> Any:
        """Answers, awaiting."""
        with at_most(self.limit):
            return await self.ask.arun()


def public_failure(kind: str) -> ModelCallError:
    """Returns the error for a public call that failed; the caller raises it outside of the `except` block.

    Only the kind of what was raised goes on: its text and its frames may tell of the load that private calls made.
    """
    return ModelCallError(f"the public model call failed with {kind}. Check the model and call again.")


def drive(walk: Walk[T]) -> T:
    """Runs a walk to its end, blocking."""
    answer: Any = None
    failure: BaseException | None = None
    while True:
        try:
            ask = walk.send(answer) if failure is None else walk.throw(failure)
        except StopIteration as end:
            result: T = end.value
            return result
        answer, failure = None, None
        try:
            answer = ask.run()
        except BaseException as error:  # noqa: BLE001  the walk must close what it opened before the error goes on
            failure = error


async def adrive(walk: Walk[T]) -> T:
    """Runs a walk to its end, awaiting; a cancellation reaches the walk like any other error."""
    answer: Any = None
    failure: BaseException | None = None
    while True:
        try:
            ask = walk.send(answer) if failure is None else walk.throw(failure)
        except StopIteration as end:
            result: T = end.value
            return result
        answer, failure = None, None
        try:
            answer = await ask.arun()
        except BaseException as error:  # noqa: BLE001  see `drive`
            failure = error
