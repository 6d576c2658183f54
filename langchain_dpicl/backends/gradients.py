"""Asks an engine for the gradients of private units and adds them up as they come. Knows no noise and no ledger.

The rows of a step can be larger than memory: an engine hands them over in pieces, and what adds them keeps the total
alone. Whatever a record does to an engine costs that record's own row.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.backends.base import GradientBackend, RealRows, TrainingExample
from langchain_dpicl.backends.rows import Boxed, aguarded, guarded
from langchain_dpicl.backends.walk import Walk, adrive, drive, public_failure
from langchain_dpicl.exceptions import DPICLError, ModelCallError, PrivateAccessError

Groups: TypeAlias = Sequence[Sequence[TrainingExample] | None]
"""One group of examples per unit; None for a unit whose examples could not be rendered."""

_MOST_STARTS = 64
"""An engine halves its batches when it starts again, so that it needs far fewer."""
_STOPPED = "the engine of the gradients stopped. Check the model and call again."


class GradientTotal(Protocol):
    """Bounds each row by itself and adds it."""

    def add(self, rows: Any) -> None:
        """Adds rows real[k, width]."""

    def clear(self) -> None:
        """Forgets all rows."""


class StartAgainError(ModelCallError):
    """Raised by an engine that has to begin a call anew at a smaller public size: what it handed over is void."""


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class AskGradients:
    """Asks for the rows of one training step; the box that it answers with holds their total.

    An engine that raises anything but our errors is asked again group by group, so that a fault stays in its own row.
    Therefore a device that has died would look like units that all fail, and training would go on with noise alone: so
    the engine is tried out with made-up rows as well, behind the private ones and whatever those were.
    Asked once: the groups are let go of with the answer.

    Args:
      backend: the engine.
      parameters: float64[width], public.
      groups: private; one per included unit.
      total: adds the rows; it is this step's alone.
    """

    backend: GradientBackend
    parameters: NDArray[np.float64]
    groups: Groups
    total: GradientTotal

    def run(self) -> Boxed:
        """Answers, blocking."""
        # What is raised in there would show private frames: it is raised anew from here.
        try:
            failure = drive(self._asked())
        finally:
            self._forget()
        return self._answer(failure)

    async def arun(self) -> Boxed:
        """Is `run`, awaitable."""
        try:
            failure = await adrive(self._asked())
        finally:
            self._forget()
        return self._answer(failure)

    def _forget(self) -> None:
        """Lets go of what is private: the frames of an error may hold this question for long."""
        object.__setattr__(self, "groups", ())

    def __reduce__(self) -> NoReturn:
        raise PrivateAccessError("AskGradients holds private examples: it cannot be copied, pickled or sent elsewhere.")

    def _answer(self, failure: DPICLError | None) -> Boxed:
        if failure is not None:
            raise failure
        return Boxed(self.total)

    def _asked(self) -> Walk[DPICLError | None]:
        """Has all rows added, and then looks whether the engine works, whatever they were; returns what went wrong."""
        outcome = yield from self._tried(None, self.total)
        if outcome is None:
            self.total.clear()
            outcome = yield from self._one_by_one()
        return outcome if isinstance(outcome, DPICLError) else (yield AskCheck(self.backend, self.parameters))

    def _tried(self, place: int | None, total: GradientTotal | _Held) -> Walk[DPICLError | _Done | None]:
        """Asks for one group's row, or for all, as often as the engine has to start again; None: a group made it raise.

        No local holds a group: Ctrl-C goes on through this frame.
        """
        for _ in range(_MOST_STARTS):
            counted = _Counted(total, sum(map(bool, self._groups_at(place))))
            try:
                outcome: DPICLError | _Done | None = yield _Call(
                    self.backend, self.parameters, self._groups_at(place), counted
                )
            finally:
                counted.close()
            if not isinstance(outcome, StartAgainError):
                return outcome
            total.clear()
        return ModelCallError(_STOPPED)

    def _groups_at(self, place: int | None) -> Groups:
        return self.groups if place is None else (self.groups[place],)

    def _one_by_one(self) -> Walk[DPICLError | _Done]:
        for place in range(len(self.groups)):
            pending = _Held()
            try:
                outcome = yield from self._tried(place, pending)
                if outcome is _DONE:
                    outcome = guarded(lambda pending=pending: self._kept(pending)) or ModelCallError(_STOPPED)  # type: ignore[misc]
            finally:
                pending.clear()
            if isinstance(outcome, DPICLError):
                return outcome
        return _DONE

    def _kept(self, pending: _Held) -> DPICLError | _Done:
        """Adds a row that was computed whole; a group that made the engine raise has none."""
        try:
            for rows in pending.rows:
                self.total.add(rows)
        except DPICLError as error:
            return _bare(error)
        return _DONE


class _Done:
    """Says that an engine has answered."""

    __slots__ = ()


_DONE = _Done()


@dataclass(frozen=True, slots=True)
class AskCheck:
    """Asks whether an engine still works at released weights: it is tried out with made-up rows, always the same ones.

    Knows no record, so what it answers says nothing about one. Answered with what is wrong; None: nothing is.

    Attributes:
      backend: the engine.
      weights: float64[width], public.
    """

    backend: GradientBackend = field(repr=False)
    weights: NDArray[np.float64] = field(repr=False)

    def run(self) -> DPICLError | None:
        """Answers, blocking."""
        try:
            self.backend.check(self.weights)
        except DPICLError as error:
            return _bare(error)
        except Exception as error:  # noqa: BLE001  whatever an engine raises
            return public_failure(type(error).__name__)
        return None

    async def arun(self) -> DPICLError | None:
        """Answers, awaiting."""
        return await asyncio.to_thread(self.run)


@dataclass(slots=True, repr=False, eq=False)
class _Call:
    """One call of the engine, private; answered with an error of ours, _DONE, or None if the engine raised another."""

    backend: GradientBackend
    parameters: NDArray[np.float64]
    groups: Groups
    counted: _Counted

    def run(self) -> DPICLError | _Done | None:
        """Answers, blocking."""
        try:
            return guarded(self._run)
        finally:
            self.groups = ()

    async def arun(self) -> DPICLError | _Done | None:
        """Answers, awaiting."""
        try:
            return await aguarded(self._arun)
        finally:
            self.groups = ()

    def _run(self) -> DPICLError | _Done:
        try:
            self.backend.gradients(self.parameters, self.groups, add=self.counted.add)
        except DPICLError as error:
            return _bare(error)
        return _DONE

    async def _arun(self) -> DPICLError | _Done:
        try:
            await self.backend.agradients(self.parameters, self.groups, add=self.counted.add)
        except DPICLError as error:
            return _bare(error)
        return _DONE


class _Held:
    """Holds one row until its engine has answered without a fault."""

    __slots__ = ("rows",)

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def add(self, rows: Any) -> None:
        """Holds rows."""
        self.rows.append(np.array(rows))

    def clear(self) -> None:
        """Forgets the rows."""
        self.rows.clear()


class _Counted:
    """Refuses an engine that hands over more rows than there are units: each unit may move the total once.

    An engine that works side by side may raise for one row while others are on their way: what comes after the call
    has ended is of a unit that is asked again, and is dropped.
    """

    __slots__ = ("_left", "_lock", "_total")

    def __init__(self, total: GradientTotal | _Held, most: int) -> None:
        self._total: GradientTotal | _Held | None = total
        self._left = most
        self._lock = threading.Lock()

    def add(self, rows: RealRows) -> None:
        """Adds rows."""
        with self._lock:  # adding is no single step, and `close` waits for it
            if self._total is None:
                return  # an error here would tell, in a log of the engine's, that a row made it raise
            self._left -= len(rows)
            if self._left < 0:
                raise ModelCallError("the engine gave more rows than there are units; each unit has one row at most")
            self._total.add(rows)

    def close(self) -> None:
        """Takes no more rows."""
        with self._lock:
            self._total = None


def _bare(error: DPICLError) -> DPICLError:
    """Returns the same public error without the frames and causes it came through."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
