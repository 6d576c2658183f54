"""Runs of one release that are kept: the same call again, in this process, gets the kept result and charges nothing."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from langchain_core.runnables import RunnableConfig

from langchain_dpicl.backends.sync_async import AcquireGate, Blocking, EffectGenerator, FairSemaphore, run_in_thread
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.budget.events import RunEvents
from langchain_dpicl.evaluation.asking import Question
from langchain_dpicl.exceptions import RunInterruptedError
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.privacy.ledger.shares import Reservation, Share
from langchain_dpicl.released.files import write_whole
from langchain_dpicl.runs.release_run import ReleaseRun, RunCall

T = TypeVar("T")
Result = TypeVar("Result")


class Saved(ABC):
    """What a run released, as JSON: its report, and below "released" the values; public."""

    report: Mapping[str, Any]

    @abstractmethod
    def _released(self) -> dict[str, Any]:
        """Returns what was released, as JSON values."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the report, which `verify_report` takes, with what was released."""
        return {**self.report, "released": self._released()}

    def to_json(self) -> str:
        """Returns the JSON text of `to_dict`."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the JSON text atomically.

        Args:
          path: file to create or replace; its folder must exist.

        Raises:
          OSError: the folder is missing or cannot be written.
        """
        write_whole(path, self.to_json())


@dataclass(slots=True)
class Released(Generic[T]):
    """The one item of a run: what was released, and the ticket that pays."""

    value: T | None = None
    ticket: Reservation | None = None
    done: bool = False
    busy: bool = False

    def keep(self, value: T) -> None:
        """Keeps what was released; called before its ticket is committed, which may fail."""
        self.value = value
        self.done = True


class OneRelease(ReleaseRun[T, Result]):
    """A run of one release for one ticket, about one question."""

    def __init__(self, private: PrivateExamples, question: Question, **run: Any) -> None:
        self._item: Released[T] = Released()
        super().__init__(private, [self._item], **run)
        self._question = question
        (self._kind,) = self.plan.tickets()

    @abstractmethod
    def _release(self, ticket: Reservation, keep: Callable[[T], None]) -> EffectGenerator[None]:
        """Burns the ticket, releases, keeps what was released, and commits the ticket."""

    @property
    def released(self) -> T:
        """What was released.

        Raises:
          ConfigurationError: nothing was.
        """
        if self._item.value is None:
            raise fail("result", "a release that was made", "none", "Call run() first.")
        return self._item.value

    @property
    def is_lost(self) -> bool:
        """Whether nothing was released and no ticket is left: it burnt, or was charged by a call that was stopped."""
        return not self.is_finished and self.share.remaining(self._kind.template, label=self._kind.label) < 1

    def _make(self, item: Released[T], call: RunCall) -> EffectGenerator[None]:
        kind = self._kind
        item.ticket = ticket = yield Blocking(lambda: self.share.reserve(kind.template, label=kind.label))
        call.events.tickets += 1
        yield from self._release(ticket, item.keep)
        call.tick()

    def _give_back(self, item: Released[T], events: RunEvents) -> None:
        if item.ticket is not None:
            events.tickets -= item.ticket.give_back()  # an unburnt ticket only

    def _examples(self, item: Released[T]) -> tuple[T, ...]:
        return () if item.value is None else (item.value,)

    def _check_done(self, failure: str) -> None:
        if failure:
            msg = f"{type(self).__name__} stopped: {failure.rstrip('.')}. Nothing was released; the ticket that burnt"
            raise RunInterruptedError(f"{msg} stays charged. Call it again: a new release, charged anew.", run=self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(component={self.component!r}, epsilon={self.plan.epsilon:.4g})"


@dataclass(slots=True, eq=False)
class SetAside:
    """The share of one evaluation of the half "test" that a choice on the half "choose" declared with its own.

    Attributes:
      share: of the evaluation; both together cost what one does.
      plan: of the evaluation.
      epsilon: of both.
      terms: what is evaluated: the examples, evaluators and judge.
      chains: the candidates, one of which may be evaluated.
      taken_by: the chain that was.
      free: one item until it is taken.
    """

    share: Share
    plan: Any
    epsilon: float
    terms: Hashable
    chains: tuple[Hashable, ...]
    taken_by: Hashable = None
    free: list[None] = field(default_factory=lambda: [None])

    def take(self, chain: Hashable) -> bool:
        """Takes it for a chain; returns whether it was there, for one of all that ask at once."""
        try:
            self.free.pop()
        except IndexError:
            return False
        self.taken_by = chain
        return True

    def keep(self, budget: Budget) -> None:
        """Keeps it for `find`."""
        vars(budget).setdefault("_kept_tests", []).append(self)

    @staticmethod
    def find(budget: Budget, *, terms: Hashable, chain: Hashable, epsilon: float | None) -> SetAside | None:
        """Returns what is set aside for an evaluation, or was taken by it; None otherwise.

        Args:
          budget: that pays.
          terms: see the class.
          chain: what is evaluated.
          epsilon: of the evaluation; None: whatever was set aside.
        """
        return next(
            (
                one
                for one in vars(budget).get("_kept_tests", ())
                if (one.terms, epsilon or one.epsilon) == (terms, one.epsilon)
                and chain in one.chains
                and one.taken_by in {None, chain}
            ),
            None,
        )


@dataclass(slots=True, eq=False)
class Kept:
    """The place of one call's run; the same calls at once wait here for the first of them, and others do not."""

    run: OneRelease[Any, Any] | None = None
    home: int = 0
    gates: dict[int, FairSemaphore] = field(default_factory=dict)

    @property
    def gate(self) -> FairSemaphore:
        """The gate of this process: one that a forked thread held would never open here."""
        return self.gates.setdefault(os.getpid(), FairSemaphore(1))

    def made(self, make: Callable[[], OneRelease[Any, Any]]) -> OneRelease[Any, Any]:
        """Returns the kept run, or a new one where there is none, it is lost, or it was under way before a fork."""
        run = self.run
        if run is None or (not run.is_finished and (self.home != os.getpid() or run.is_lost)):
            run = make()
            self.run, self.home = run, os.getpid()
        return run


@dataclass(frozen=True, slots=True)
class KeptCall:
    """A call with its place and what makes its run, which declares the share."""

    kept: Kept
    make: Callable[[], OneRelease[Any, Any]]

    @classmethod
    def of(cls, budget: Budget, key: Hashable, make: Callable[[], OneRelease[Any, Any]]) -> KeptCall:
        """Returns the call of these arguments.

        Args:
          budget: that pays.
          key: everything that was asked.
          make: builds the run.
        """
        # In the budget itself: it lives as long as the runs, which hold it.
        return cls(vars(budget).setdefault("_kept_evaluations", {}).setdefault(key, Kept()), make)

    def answer(self, *, progress: bool | None, config: RunnableConfig | None) -> Any:
        """Returns the result, kept or released now.

        Args:
          progress: as of `ReleaseRun.run`.
          config: as of `ReleaseRun.run`.
        """
        with self._alone():
            run = self.kept.made(self.make)
            return run.result if run.is_finished else run.run(progress=progress, config=config)

    async def aanswer(self, *, progress: bool | None, config: RunnableConfig | None) -> Any:
        """Async twin of `answer`."""
        async with self.kept.gate:
            run = await run_in_thread(lambda: self.kept.made(self.make))
            if run.is_finished:
                return await run_in_thread(lambda: run.result)
            return await run.arun(progress=progress, config=config)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        gate = self.kept.gate
        if not AcquireGate(gate).run():
            advice = (
                "Await dp_aevaluate or dp_achoose: a call that blocks the loop cannot wait for one that runs in it."
            )
            raise fail("call", "no other call of these arguments at work on this event loop", "one", advice)
        try:
            yield
        finally:
            gate.__exit__(None, None, None)
