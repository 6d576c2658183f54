"""Advances several computations in waves: what each of them asks next is asked of the engine at once."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from langchain_dpicl.backends.rows.public_beside import PublicAnswer
from langchain_dpicl.backends.rows.vocabulary_rows import join_texts
from langchain_dpicl.backends.sync_async import (
    Effect,
    EffectGenerator,
    TopTokenRequest,
    public_failure,
    stopping_calls,
)

_PUBLIC = (PublicAnswer, TopTokenRequest)
"""Effects that ask public questions alone; they may raise, so no private call may be in flight beside them."""


@dataclass(slots=True, repr=False, eq=False)
class Outcome:
    """What an effect or a computation returned, or the error that ended it."""

    value: Any = None
    error: BaseException | None = None

    def drop(self) -> None:
        """Forgets both: the value may be a box of private rows."""
        self.value = self.error = None


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Together:
    """Runs effects at once; the answer is a list of `Outcome`, in their order.

    Formal guarantees:
      - An error of one effect ends no other one, and is its outcome. Ctrl-C and a cancellation end all: awaited calls
        are cancelled, and threads begin no further call.
      - Public questions that go alone are asked before the others, and all private calls begin after they ended.

    Attributes:
      effects: what to run; public how many.
    """

    effects: tuple[Effect, ...]

    def run(self) -> list[Outcome]:
        """Runs, blocking; each effect in a thread, but one after the other inside a running event loop."""
        outcomes = [Outcome() for _ in self.effects]
        try:
            for places in self._parts():
                self._run(places, outcomes)
        except BaseException:
            _drop(outcomes)
            raise
        return outcomes

    async def arun(self) -> list[Outcome]:
        """Runs, awaiting."""
        outcomes = [Outcome() for _ in self.effects]
        try:
            for places in self._parts():
                await self._arun(places, outcomes)
        except BaseException:
            _drop(outcomes)
            raise
        return outcomes

    def _parts(self) -> list[list[int]]:
        """Returns the places of public questions that go alone, then those of all other effects."""
        alone = [place for place, effect in enumerate(self.effects) if isinstance(effect, _PUBLIC)]
        return [part for part in (alone, [i for i in range(len(self.effects)) if i not in alone]) if part]

    def _run(self, places: Sequence[int], outcomes: list[Outcome]) -> None:
        lock, left = threading.Lock(), threading.Event()

        def one(place: int) -> None:
            found = Outcome()
            try:
                found.value = self.effects[place].run()
            except BaseException as error:  # noqa: BLE001  raised by `_check_stop`, or the outcome
                found.error = error
            with lock:
                # After a stop nothing takes the rows any more, and frames of the error hold the outcomes.
                if not left.is_set():
                    outcomes[place].value, outcomes[place].error = found.value, found.error
            found.drop()

        # The texts of a local engine share a batch, whose step the first of them makes. Inside a running loop, which is
        # stopped here, a thread might wait for one of its calls.
        if join_texts([self.effects[place] for place in places]) or _is_in_loop():
            for place in places:
                one(place)
                _check_stop(outcomes)
            return
        with stopping_calls():
            threads = [
                threading.Thread(
                    target=contextvars.copy_context().run, args=(one, place), name="dpicl-together", daemon=True
                )
                for place in places[1:]
            ]
            for thread in threads:
                thread.start()
            try:
                one(places[0])
                _check_stop(outcomes)
                for thread in threads:
                    thread.join()
                _check_stop(outcomes)
            except BaseException:
                with lock:
                    left.set()
                raise

    async def _arun(self, places: Sequence[int], outcomes: list[Outcome]) -> None:
        async def one(place: int) -> None:
            try:
                outcomes[place].value = await self.effects[place].arun()
            except Exception as error:  # noqa: BLE001  the outcome
                outcomes[place].error = error

        if join_texts([self.effects[place] for place in places]):
            for place in places:
                await one(place)
            return
        tasks = [asyncio.ensure_future(one(place)) for place in places]
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            raise
        finally:
            for task in tasks:
                task.cancel()  # a coroutine that is closed can await nothing
        for place, task in zip(places, tasks, strict=True):
            if task.cancelled():  # by the client itself, which is a failed call
                outcomes[place].error = public_failure("CancelledError")
            else:
                task.result()


def advance_together(walks: Sequence[EffectGenerator[Any]]) -> EffectGenerator[list[Outcome]]:
    """Runs effect generators to their ends, in waves (an effect generator); an error ends one of them and no other.

    Their own steps run one after the other. A stop, such as Ctrl-C, closes them all.
    """
    if len(walks) == 1:
        return [Outcome((yield from walks[0]))]
    outcomes = [Outcome() for _ in walks]
    replies = dict(enumerate(Outcome() for _ in walks))
    live = dict(enumerate(walks))
    try:
        while live:
            asked: dict[int, Effect] = {}
            for place, walk in list(live.items()):
                reply = replies[place]
                try:
                    asked[place] = walk.send(reply.value) if reply.error is None else walk.throw(reply.error)
                except StopIteration as end:
                    outcomes[place].value = end.value
                    del live[place]
                except Exception as error:  # noqa: BLE001  the outcome
                    outcomes[place].error = error
                    del live[place]
                finally:
                    reply.drop()
            if asked:
                found = yield Together(tuple(asked.values()))
                replies = dict(zip(asked, found, strict=True))
    finally:
        _drop(list(replies.values()))
        with ExitStack() as stack:
            for walk in live.values():
                stack.callback(walk.close)
    return outcomes


def _drop(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        outcome.drop()


def _check_stop(outcomes: Sequence[Outcome]) -> None:
    """Raises what has to stop everything."""
    for outcome in outcomes:
        if outcome.error is not None and not isinstance(outcome.error, Exception):
            raise outcome.error


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
