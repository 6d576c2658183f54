"""Requests the gradients of private units from an engine, and adds them up as they arrive."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl._opaque import Opaque, OpaqueRows, run_guarded
from langchain_dpicl.backends.base import GradientBackend, RealRows, TrainingExample
from langchain_dpicl.backends.sync_async import (
    EffectGenerator,
    arun_guarded,
    bare,
    public_call,
    run_async,
    run_engine,
    run_sync,
)
from langchain_dpicl.exceptions import DPICLError, ModelCallError

Groups: TypeAlias = Sequence[Sequence[TrainingExample] | None]
"""One group of examples per unit; None for a unit whose examples could not be rendered."""

_STOPPED = "the engine of the gradients stopped. Check the model and call again."


class GradientTotal(Protocol):
    """Bounds each row by itself and adds it."""

    def add(self, rows: Any) -> None:
        """Adds rows real[k, width]; refuses another width."""

    def clear(self) -> None:
        """Drops all rows."""


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class GradientRequest(Opaque):
    """Computes the rows of one training step and boxes their total.

    An engine that raises anything but our errors is called again group by group, so that a fault stays in its own row.
    A dead device would then look like units that all fail, and training would continue on noise alone: so the engine is
    also tested with made-up rows after the private ones. Runs once: the groups are dropped with the answer.

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

    def run(self) -> OpaqueRows:
        """Runs, blocking."""
        # The traceback would show private frames: the failure is raised again from here.
        try:
            failure = run_sync(self._ask_once())
        finally:
            self._forget()
        return self._answer(failure)

    async def arun(self) -> OpaqueRows:
        """Async twin of `run`."""
        try:
            failure = await run_async(self._ask_once())
        finally:
            self._forget()
        return self._answer(failure)

    def _forget(self) -> None:
        """Drops the private groups: an error's frames may keep this object for long."""
        object.__setattr__(self, "groups", ())

    def _answer(self, failure: DPICLError | None) -> OpaqueRows:
        if failure is not None:
            raise failure
        return OpaqueRows(self.total)

    def _ask_once(self) -> EffectGenerator[DPICLError | None]:
        """Adds all rows, then tests the engine, whatever the rows were; returns an error or None."""
        outcome = yield from self._attempt(None, self.total)
        if outcome is None:
            self.total.clear()
            outcome = yield from self._one_by_one()
        return outcome if isinstance(outcome, DPICLError) else (yield CheckRequest(self.backend, self.parameters))

    def _attempt(
        self, place: int | None, total: GradientTotal | _PendingRow
    ) -> EffectGenerator[DPICLError | _EngineDone | None]:
        """Requests one group's row, or all; None: a group made it raise.

        No local may hold a group: Ctrl-C passes through this frame.
        """
        counted = _RowCounter(total, sum(map(bool, self._groups_at(place))))
        try:
            outcome: DPICLError | _EngineDone | None = yield _Call(
                self.backend, self.parameters, self._groups_at(place), counted
            )
        finally:
            counted.close()
        return outcome

    def _groups_at(self, place: int | None) -> Groups:
        return self.groups if place is None else (self.groups[place],)

    def _one_by_one(self) -> EffectGenerator[DPICLError | _EngineDone]:
        for place in range(len(self.groups)):
            pending = _PendingRow()
            try:
                outcome = yield from self._attempt(place, pending)
                if outcome is _DONE:
                    outcome = run_guarded(lambda pending=pending: self._kept(pending)) or ModelCallError(_STOPPED)  # type: ignore[misc]
            finally:
                pending.clear()
            if isinstance(outcome, DPICLError):
                return outcome
        return _DONE

    def _kept(self, pending: _PendingRow) -> DPICLError | _EngineDone:
        """Adds a row that was computed completely."""
        try:
            for rows in pending.rows:
                self.total.add(rows)
        except DPICLError as error:
            return bare(error)
        return _DONE


class _EngineDone:
    """The result of an engine call without an error."""

    __slots__ = ()


_DONE = _EngineDone()


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """Tests whether an engine still works at released weights, with fixed made-up rows; returns an error or None."""

    backend: GradientBackend = field(repr=False)
    weights: NDArray[np.float64] = field(repr=False)

    def run(self) -> DPICLError | None:
        """Runs, blocking."""
        try:
            public_call(lambda: self.backend.check(self.weights))
        except DPICLError as error:
            return bare(error)
        return None

    async def arun(self) -> DPICLError | None:
        """Runs, awaiting."""
        return await run_engine(self.run)


@dataclass(slots=True, repr=False, eq=False)
class _Call:
    """One private call of the engine; returns an error of ours, _DONE, or None if the engine raised another one."""

    backend: GradientBackend
    parameters: NDArray[np.float64]
    groups: Groups
    counted: _RowCounter

    def run(self) -> DPICLError | _EngineDone | None:
        try:
            return run_guarded(self._run)
        finally:
            self.groups = ()

    async def arun(self) -> DPICLError | _EngineDone | None:
        try:
            return await arun_guarded(self._arun)
        finally:
            self.groups = ()

    def _run(self) -> DPICLError | _EngineDone:
        try:
            self.backend.gradients(self.parameters, self.groups, add=self.counted.add)
        except DPICLError as error:
            return bare(error)
        return _DONE

    async def _arun(self) -> DPICLError | _EngineDone:
        try:
            await self.backend.agradients(self.parameters, self.groups, add=self.counted.add)
        except DPICLError as error:
            return bare(error)
        return _DONE


class _PendingRow:
    """Keeps one row until its engine has answered without a fault."""

    __slots__ = ("rows",)

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def add(self, rows: Any) -> None:
        self.rows.append(np.array(rows))

    def clear(self) -> None:
        self.rows.clear()


class _RowCounter:
    """Refuses more rows than there are units: each unit may move the total once.

    A parallel engine may raise for one row while others are still computed: rows that arrive after the call belong to
    units that are computed again, and are dropped.
    """

    __slots__ = ("_left", "_lock", "_total")

    def __init__(self, total: GradientTotal | _PendingRow, most: int) -> None:
        self._total: GradientTotal | _PendingRow | None = total
        self._left = most
        self._lock = threading.Lock()

    def add(self, rows: RealRows) -> None:
        """Adds rows; raises ModelCallError if there are too many."""
        with self._lock:  # adding is no single step, and `close` waits for it
            if self._total is None:
                return  # an error here would reveal, in the engine's log, that a row made it raise
            self._left -= len(rows)
            if self._left < 0:
                raise ModelCallError("the engine gave more rows than there are units; each unit has one row at most")
            self._total.add(rows)

    def close(self) -> None:
        """Drops rows that arrive from now on."""
        with self._lock:
            self._total = None
