"""Runs of one release that are kept: the same call again, in this process, gets the kept result and charges nothing."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from langchain_core.runnables import RunnableConfig

from langchain_dpicl.backends.sync_async import (
    AcquireGate,
    Blocking,
    Effect,
    EffectGenerator,
    FairSemaphore,
    run_in_thread,
)
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.budget.events import RunEvents
from langchain_dpicl.evaluation.asking import Question
from langchain_dpicl.evaluation.evaluators import Same
from langchain_dpicl.exceptions import RunInterruptedError
from langchain_dpicl.options.base import html_table
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

    def _repr_html_(self) -> str:
        shown = {name: self.report.get(name) for name in ("component", "dataset_id", "epsilon", "delta")}
        return html_table(type(self).__name__, {**shown, **self._released()})


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
        self._draws_records = private.records_per_unit > 1
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
    def has_burnt(self) -> bool:
        """Whether the ticket burnt here, and nothing was released."""
        ticket = self._item.ticket
        return not self.is_finished and ticket is not None and ticket.uncommitted > 0

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

    def _rest(self) -> None:
        super()._rest()
        if self.is_finished:  # the budget keeps the run, and would keep the examples
            vars(self).pop("_private", None)

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
        """Keeps it for `find`; a choice that is made again under its name sets aside what it did before."""
        kept = vars(budget).setdefault("_kept_tests", [])
        if not any(one.share.component == self.share.component for one in kept):
            kept.append(self)

    def drop_if_lost(self, call: KeptCall, chain: Hashable) -> bool:
        """Returns whether its ticket is gone: another process or chain has it, or the call that took it left nothing.

        Nothing finds it again then, except for the calls of the chain that has it.

        Args:
          call: the evaluation that would use it.
          chain: what is evaluated.
        """
        # In this order: a call of another thread takes it first, and reserves the ticket then.
        is_left = all(self.share.remaining(one.template, label=one.label) for one in self.plan.tickets())
        taken_by = self.taken_by
        if taken_by not in {None, chain}:  # taken since it was found
            return True
        is_lost = not is_left if taken_by is None else call.key not in call.places
        if is_lost:
            self.chains = ()
        return is_lost

    @staticmethod
    def find(
        budget: Budget, *, terms: Hashable, chain: Hashable, epsilon: float | None, component: str | None
    ) -> SetAside | None:
        """Returns what is set aside for an evaluation, or was taken by it; None otherwise.

        Args:
          budget: that pays.
          terms: see the class.
          chain: what is evaluated.
          epsilon: of the evaluation; None: whatever was set aside.
          component: name that the caller gave; None: none. Under another name an evaluation pays for itself.
        """
        return next(
            (
                one
                for one in vars(budget).get("_kept_tests", ())
                if (one.terms, epsilon or one.epsilon) == (terms, one.epsilon)
                and chain in one.chains
                and one.taken_by in {None, chain}
                and component in {None, one.share.component}
            ),
            None,
        )


@dataclass(slots=True, eq=False)
class Kept:
    """What one call left: its finished run, or a share with an unburnt ticket; the same calls at once wait here.

    Formal guarantees:
      - It holds no private examples: a finished run has dropped them, and any other run is left to its error.
    """

    run: OneRelease[Any, Any] | None = None
    share: Share | None = None
    home: int = 0
    gates: dict[int, FairSemaphore] = field(default_factory=dict)

    @property
    def gate(self) -> FairSemaphore:
        """The gate of this process: one that a forked thread held would never open here."""
        return self.gates.setdefault(os.getpid(), FairSemaphore(1))

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept."""
        return self.run is None and self.share is None

    def left(self, build: Callable[[Share], OneRelease[Any, Any]]) -> OneRelease[Any, Any] | None:
        """Returns a run on the kept share, None where its ticket is gone or another process has it.

        Args:
          build: makes a run on a share.
        """
        if self.share is None:
            return None
        run = build(self.share)
        if self.home == os.getpid() and not run.is_lost:
            return run
        self.share = None
        return None

    def keep_share(self, share: Share) -> Share:
        """Keeps a share that was declared, and returns it."""
        self.share, self.home = share, os.getpid()
        return share

    def keep(self, run: OneRelease[Any, Any]) -> None:
        """Keeps a run that has ended, if it released something; drops a share whose ticket burnt."""
        if run.is_finished:
            self.run, self.share = run, None
        elif run.has_burnt:
            self.share = None


@dataclass(frozen=True, slots=True)
class KeptCall:
    """A call with the places of all calls on its budget, one of which is its own.

    Attributes:
      places: by key.
      key: everything that was asked.
      probe: the public calls that come first: what they find wrong is not charged.
      declare: declares the share.
      build: makes the run on a share.
    """

    places: dict[Hashable, Kept]
    key: Hashable
    probe: Effect
    declare: Callable[[], Share]
    build: Callable[[Share], OneRelease[Any, Any]]

    @classmethod
    def of(cls, budget: Budget, *key: Hashable, **made: Any) -> KeptCall:
        """Returns the call of these arguments.

        Args:
          budget: that pays.
          *key: everything that was asked.
          **made: the other attributes.
        """
        # In the budget itself: it lives as long as the runs, which hold it.
        return cls(vars(budget).setdefault("_kept_evaluations", {}), key, **made)

    def answer(self, *, progress: bool | None, config: RunnableConfig | None) -> Any:
        """Returns the result, kept or released now.

        Args:
          progress: as of `ReleaseRun.run`.
          config: as of `ReleaseRun.run`.
        """
        with self._alone() as kept:
            if kept.run is not None:
                return kept.run.result
            run = kept.left(self.build)
            if run is None:
                self.probe.run()
                run = self.build(kept.keep_share(self.declare()))
            try:
                return run.run(progress=progress, config=config)
            finally:
                kept.keep(run)

    async def aanswer(self, *, progress: bool | None, config: RunnableConfig | None) -> Any:
        """Async twin of `answer`."""
        async with self._aalone() as kept:
            if (finished := kept.run) is not None:
                return await run_in_thread(lambda: finished.result)
            run = await run_in_thread(lambda: kept.left(self.build))
            if run is None:
                await self.probe.arun()
                run = await run_in_thread(lambda: self.build(kept.keep_share(self.declare())))
            try:
                return await run.arun(progress=progress, config=config)
            finally:
                kept.keep(run)

    @contextmanager
    def _alone(self) -> Iterator[Kept]:
        while True:
            kept = self._place()
            if not AcquireGate(kept.gate).run():
                advice = (
                    "Await dp_aevaluate or dp_achoose: a call that blocks the loop cannot wait for one that runs in it."
                )
                raise fail("call", "no other call of these arguments at work on this event loop", "one", advice)
            try:
                if self._is_its_place(kept):
                    yield kept
                    return
            finally:
                self._leave(kept)

    @asynccontextmanager
    async def _aalone(self) -> AsyncIterator[Kept]:
        while True:
            kept = self._place()
            await AcquireGate(kept.gate).arun()
            try:
                if self._is_its_place(kept):
                    yield kept
                    return
            finally:
                self._leave(kept)

    def _place(self) -> Kept:
        return self.places.setdefault(self.key, Kept())

    def _is_its_place(self, kept: Kept) -> bool:
        """Whether the call that was waited for has left its place for this one: it took an empty one away."""
        return self.places.get(self.key) is kept

    def _leave(self, kept: Kept) -> None:
        if kept.is_empty and self._is_its_place(kept):
            del self.places[self.key]
        kept.gate.__exit__(None, None, None)


def identity_of(private: PrivateExamples) -> Hashable:
    """Returns what stands for these examples in what is kept, and does not hold them.

    Args:
      private: the examples.
    """
    return Same(private._identity)  # noqa: SLF001  by which the ledger knows them too
