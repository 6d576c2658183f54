"""Asks an engine for the gradients of private units and adds them up as they come. Knows no noise and no ledger.

The rows of a step can be larger than memory: an engine hands them over in pieces, and what adds them keeps the total
alone. Whatever a record does to an engine costs that record's own row.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.backends.base import GradientBackend, RealRows, TrainingExample
from langchain_dpicl.backends.rows import Boxed, aguarded, guarded
from langchain_dpicl.exceptions import DPICLError, ModelCallError, PrivateAccessError

Groups: TypeAlias = Sequence[Sequence[TrainingExample] | None]
"""One group of examples per unit; None for a unit whose examples could not be rendered."""

_MOST_STARTS = 64
"""An engine halves its batches when it starts again, so that it needs far fewer."""
_MOST_STARTS_ALONE = 16
_STOPPED = "the engine of the gradients stopped. Check the model and call again."


class GradientTotal(Protocol):
    """Bounds each row by itself and adds it."""

    def add(self, rows: Any) -> None:
        """Adds rows real[k, width].

        Raises:
          ConfigurationError: rows of another width.
        """

    def clear(self) -> None:
        """Forgets all rows."""


class StartAgainError(ModelCallError):
    """Raised by an engine that has to begin a call anew at a smaller public size: what it handed over is void."""


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class AskGradients:
    """Asks for the rows of one training step; the box that it answers with holds their total.

    An engine that raises anything but our errors is asked again group by group, so that a fault stays in its own row.
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
        """Answers, blocking.

        Raises:
          ModelCallError: the engine failed on what is public.
          ConfigurationError: parameters or rows of another width.
        """
        # What is raised in there would show private frames: it is raised anew from here.
        try:
            failure = guarded(self._asked)
            if failure is None:
                self.total.clear()
                failure = guarded(self._one_by_one)
        finally:
            self._forget()
        return self._answer(failure)

    async def arun(self) -> Boxed:
        """Is `run`, awaitable."""
        try:
            failure = await aguarded(self._aasked)
            if failure is None:
                self.total.clear()
                failure = await aguarded(self._aone_by_one)
        finally:
            self._forget()
        return self._answer(failure)

    def _forget(self) -> None:
        """Lets go of what is private: the frames of an error may hold this question for long."""
        object.__setattr__(self, "groups", ())

    def __reduce__(self) -> NoReturn:
        raise PrivateAccessError("AskGradients holds private examples: it cannot be copied, pickled or sent elsewhere.")

    def _answer(self, failure: DPICLError | _Done | None) -> Boxed:
        if failure is None:
            raise ModelCallError(_STOPPED)
        if isinstance(failure, DPICLError):
            raise failure
        return Boxed(self.total)

    def _asked(self) -> DPICLError | _Done | None:
        for _ in range(_MOST_STARTS):
            counted = _Counted(self.total, sum(map(bool, self.groups)))
            try:
                self.backend.gradients(self.parameters, self.groups, add=counted.add)
            except StartAgainError:
                counted.close()
                self.total.clear()
            except DPICLError as error:
                return _bare(error)
            else:
                return _DONE
            finally:
                counted.close()
        return None

    async def _aasked(self) -> DPICLError | _Done | None:
        for _ in range(_MOST_STARTS):
            counted = _Counted(self.total, sum(map(bool, self.groups)))
            try:
                await self.backend.agradients(self.parameters, self.groups, add=counted.add)
            except StartAgainError:
                counted.close()
                self.total.clear()
            except DPICLError as error:
                return _bare(error)
            else:
                return _DONE
            finally:
                counted.close()
        return None

    def _one_by_one(self) -> DPICLError | _Done:
        for group in self.groups:
            held = _Held()
            found = guarded(lambda group=group, held=held: self._alone(group, held))  # type: ignore[misc]
            if isinstance(failure := self._kept(found, held), DPICLError):
                return failure
        return _DONE

    async def _aone_by_one(self) -> DPICLError | _Done:
        for group in self.groups:
            held = _Held()
            found = await aguarded(lambda group=group, held=held: self._aalone(group, held))  # type: ignore[misc]
            if isinstance(failure := self._kept(found, held), DPICLError):
                return failure
        return _DONE

    def _alone(self, group: Sequence[TrainingExample] | None, held: _Held) -> DPICLError | _Done:
        for _ in range(_MOST_STARTS_ALONE):
            counted = _Counted(held, bool(group))
            try:
                self.backend.gradients(self.parameters, [group], add=counted.add)
            except StartAgainError:
                counted.close()
                held.clear()
            except DPICLError as error:
                return _bare(error)
            else:
                return _DONE
            finally:
                counted.close()
        return ModelCallError(_STOPPED)

    async def _aalone(self, group: Sequence[TrainingExample] | None, held: _Held) -> DPICLError | _Done:
        for _ in range(_MOST_STARTS_ALONE):
            counted = _Counted(held, bool(group))
            try:
                await self.backend.agradients(self.parameters, [group], add=counted.add)
            except StartAgainError:
                counted.close()
                held.clear()
            except DPICLError as error:
                return _bare(error)
            else:
                return _DONE
            finally:
                counted.close()
        return ModelCallError(_STOPPED)

    def _kept(self, found: DPICLError | _Done | None, held: _Held) -> DPICLError | _Done:
        """Adds a row that was computed whole; a group that made the engine raise has none."""
        if found is not _DONE:
            return found or _DONE
        try:
            for rows in held.rows:
                self.total.add(rows)
        except DPICLError as error:
            return _bare(error)
        return _DONE


class _Done:
    """Says that an engine has answered."""

    __slots__ = ()


_DONE = _Done()


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
        """Adds rows.

        Raises:
          ModelCallError: there are too many.
        """
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
