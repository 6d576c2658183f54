"""Runs a generator of effects sync or async, so that a computation with model calls is written once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

from langchain_dpicl.backends.aside import leave, seen_through
from langchain_dpicl.backends.base import NextTokenBackend, Token
from langchain_dpicl.backends.calls import Gate, at_most
from langchain_dpicl.exceptions import DPICLError, ModelCallError

T = TypeVar("T")


class Ask(Protocol):
    """One effect, with a blocking and an awaitable way to run it."""

    def run(self) -> Any:
        """Runs, blocking."""

    async def arun(self) -> Any:
        """Runs, awaiting."""


Walk: TypeAlias = Generator[Ask, Any, T]


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Call:
    """Calls a function, or awaits its asynchronous twin."""

    call: Callable[[], Any]
    acall: Callable[[], Awaitable[Any]]

    def run(self) -> Any:
        """Answers, blocking."""
        return self.call()

    async def arun(self) -> Any:
        """Answers, awaiting."""
        return await self.acall()


@dataclass(frozen=True, slots=True)
class AskTopTokens:
    """Requests the likeliest tokens after a PUBLIC prompt; raises ModelCallError if the model fails."""

    backend: NextTokenBackend = field(repr=False)
    prompt: str
    prefix: Sequence[Token]
    top_k: int

    def run(self) -> list[tuple[Token, float]]:
        """Runs, blocking."""
        return public_call(lambda: self.backend.top_tokens(self.prompt, self.prefix, top_k=self.top_k))

    async def arun(self) -> list[tuple[Token, float]]:
        """Runs, awaiting."""
        return await apublic_call(lambda: self.backend.atop_tokens(self.prompt, self.prefix, top_k=self.top_k))


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class AtMost:
    """Runs an effect with at most `limit` calls in flight; None: as many as the engine makes."""

    ask: Ask
    limit: int | None

    def run(self) -> Any:
        """Runs, blocking."""
        with at_most(self.limit):
            return self.ask.run()

    async def arun(self) -> Any:
        """Runs, awaiting."""
        with at_most(self.limit):
            return await self.ask.arun()


@dataclass(slots=True)
class Turn:
    """Waits until no other caller computes the same; returns whether the gate is held from then on."""

    gate: Gate

    def run(self) -> bool:
        """Waits, blocking; does not wait below a running event loop, which may have to run first."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self.gate.__enter__()
            return True
        return self.gate.enter_at_once()

    async def arun(self) -> bool:
        """Waits, awaiting."""
        await self.gate.__aenter__()
        return True


def public_failure(kind: str) -> ModelCallError:
    """Returns the error of a failed public call; the caller raises it outside of the `except` block.

    It names only the type of the cause, whose text and frames may show the load of private calls.
    """
    return ModelCallError(f"the public model call failed with {kind}. Check the model and call again.")


def bare(error: DPICLError) -> DPICLError:
    """Returns a public error without the frames and causes that it came through, which may be private."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def public_call(action: Callable[[], T]) -> T:
    """Returns the result of a public call of an engine; an error that is not ours becomes a `public_failure`."""
    try:
        return action()
    except DPICLError:
        raise
    except Exception as error:  # noqa: BLE001  whatever an engine raises
        kind = type(error).__name__
    raise public_failure(kind)  # outside the handler, so that the engine's error is not its context


async def apublic_call(action: Callable[[], Awaitable[T]]) -> T:
    """Async twin of `public_call`."""
    try:
        return await action()
    except DPICLError:
        raise
    except Exception as error:  # noqa: BLE001  whatever an engine raises
        kind = type(error).__name__
    raise public_failure(kind)


def drive(walk: Walk[T]) -> T:
    """Runs an effect generator to its end, blocking."""
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
        except BaseException as error:  # noqa: BLE001  the generator closes what it opened first
            failure = error


async def adrive(walk: Walk[T], *, is_slow: bool = False) -> T:
    """Runs an effect generator to its end, awaiting; a cancellation is thrown into it like any other error.

    Args:
      walk: the computation.
      is_slow: whether its own steps, between the effects, may block (for a ledger on a disk). They then run in
        threads, one after the other, and a cancellation is thrown in after the step.
    """
    if is_slow:
        return await _adrive_aside(walk)
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


async def _adrive_aside(walk: Walk[T]) -> T:
    """Does what `adrive` does, with the generator's own steps in threads."""
    answer: Any = None
    failure: BaseException | None = None
    has_begun = False
    while True:
        step = _Step(walk, answer, failure)
        answer = None
        # An answer is always delivered: it may be a place at a gate, which the generator then has to leave.
        ended, stop = await seen_through(step, is_optional=not has_begun, if_left=walk.close)
        has_begun = True
        if stop is not None and not step.is_over:
            failure = stop
            continue
        if stop is not None:
            raise stop
        try:
            ask = ended()
        finally:
            del ended  # it holds the error, whose frames hold it
        if ask is None:
            result: T = step.result
            return result
        try:
            answer, failure = await ask.arun(), None
        except GeneratorExit:  # nothing can be awaited any more, the walk's own end included
            leave(walk.close)
            raise
        except BaseException as error:  # noqa: BLE001  see `drive`
            failure = error


class _Step:
    """One step of an effect generator; returns the next effect, None at the end."""

    def __init__(self, walk: Walk[Any], answer: Any, failure: BaseException | None) -> None:
        self.result: Any = None
        self.is_over = False
        self._walk = walk
        self._answer = answer
        self._failure = failure

    def __call__(self) -> Ask | None:
        answer, self._answer = self._answer, None  # may hold boxed private rows, which must not be kept
        self.is_over = True
        try:
            ask = self._walk.send(answer) if self._failure is None else self._walk.throw(self._failure)
        except StopIteration as end:
            self.result = end.value
            return None
        self.is_over = False
        return ask
