"""The base of runs that generate demonstrations: run, stream, interrupt, continue and report."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Hashable, Iterator, Mapping
from contextlib import ExitStack, aclosing, closing, contextmanager
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from langchain_dpicl.backends.sync_async import EffectGenerator, ThreadedContext, run_async, run_sync
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.budget.events import RunEvents
from langchain_dpicl.distributed.executor import RemoteExecution, iterate_in_threads, tickets_missing
from langchain_dpicl.exceptions import ConfigurationError, DPICLError, ModelCallError, RunInterruptedError
from langchain_dpicl.planning.share_plan import SharePlan
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.privacy.ledger.shares import Share
from langchain_dpicl.released.demonstrations import ReleasedDemonstrations
from langchain_dpicl.runs.streamed_run import StreamedRun, attempt, carrying, report_of

__all__ = ["GenerationRun", "RunItem"]


class RunItem(Protocol):
    """One unit of work of a run (a demonstration, a label's population); holds public or released values only.

    Attributes:
      done: whether the item is complete.
      busy: whether a run is working on it.
    """

    done: bool
    busy: bool


T = TypeVar("T", bound=RunItem)


class GenerationRun(StreamedRun[dict[str, str], ReleasedDemonstrations], Generic[T]):
    """A run that generates demonstrations item by item; it can be interrupted and continued.

    Formal guarantees:
      - Released values stay in the run after any error, and every error carries the run as `run`.
    """

    _noun: ClassVar[str]
    """Name of the run in messages."""
    plan: SharePlan
    """What the run releases and is charged."""

    def __init__(
        self,
        private: PrivateExamples,
        items: list[T],
        *,
        budget: Budget,
        share: Share,
        elsewhere: RemoteExecution | None = None,
    ) -> None:
        self._private = private
        self._items = items
        self._budget = budget
        self._share = share
        self._lock = threading.Lock()
        self._elsewhere = elsewhere

    @property
    def finished(self) -> bool:
        """Whether all demonstrations are released."""
        return all(item.done for item in self._items)

    @property
    @abstractmethod
    def demonstrations(self) -> list[dict[str, str]]:
        """The demonstrations released so far (public)."""

    def stream(self, *, progress: bool | None = None) -> Iterator[dict[str, str]]:
        """Yields each demonstration as soon as its item is complete.

        Args:
          progress: True shows a bar, False hides it, None shows it on a terminal only.

        Raises:
          RunInterruptedError: a public call to the model or the embeddings failed; released values are kept, and
            another `run` or `stream` continues with the unburnt tickets. Other errors and Ctrl-C carry `run`.
          PrivacyBudgetError: the tickets could not be reserved.
        """
        try:
            with self._bar(progress) as bar, closing(self._made(bar)) as made:
                for item in made:
                    if item is not None:
                        self._show(bar)
                        yield from self._examples(item)
        finally:
            self._rest()

    async def astream(self, *, progress: bool | None = None) -> AsyncIterator[dict[str, str]]:
        """Async version of `stream`."""
        try:
            with self._bar(progress) as bar:
                async with aclosing(self._amade(bar)) as made:
                    async for item in made:
                        self._show(bar)
                        for example in self._examples(item):
                            yield example
        finally:
            self._rest()

    def released(self) -> ReleasedDemonstrations:
        """Returns everything released so far with its privacy report."""
        report = report_of(self._budget, self._share, self.plan)
        return ReleasedDemonstrations(tuple(self.demonstrations), report, self._plan_for_report())

    _whole = released

    # -- defined by subclasses ---------------------------------------------------------------------------------------

    @abstractmethod
    def _make(self, item: T, bar: Any, events: RunEvents) -> EffectGenerator[None]:
        """Generates one item (an effect generator); released parts stay in the item after any error."""

    def _job(self, item: T) -> Hashable:
        """Returns the public job that generates an item on a worker."""
        raise NotImplementedError

    def _take(self, item: T, result: Any, bar: Any) -> None:
        """Stores a worker's result in an item, which completes it."""
        raise NotImplementedError

    @abstractmethod
    def _give_back(self, item: T, events: RunEvents) -> None:
        """Returns an item's unburnt tickets to the share, if they are refundable."""

    @abstractmethod
    def _examples(self, item: T) -> list[dict[str, str]]:
        """Returns the demonstrations of one item."""

    @abstractmethod
    def _plan_for_report(self) -> Mapping[str, Any]:
        """Returns the plan as reports show it."""

    @abstractmethod
    def _so_far(self) -> str:
        """Returns how much is released, as the start of a sentence for error messages."""

    @abstractmethod
    def _bar(self, progress: bool | None) -> Any:
        """Returns a progress bar."""

    # -- inside ------------------------------------------------------------------------------------------------------

    def _open_items(self) -> Iterator[T]:
        return (item for item in self._items if not item.done)

    def _made(self, bar: Any) -> Generator[T | None]:
        """Generates items and yields each; None while workers are busy."""
        return self._run_locally(bar) if self._elsewhere is None else self._run_remotely(self._elsewhere, bar)

    def _run_locally(self, bar: Any) -> Generator[T | None]:
        for item in self._open_items():
            with self._events() as events, self._at_work(item, events):
                _, failure = run_sync(attempt(self._make(item, bar, events)))
            self._check_done(failure)
            yield item

    async def _amade(self, bar: Any) -> AsyncGenerator[T]:
        if self._elsewhere is not None:
            async with aclosing(iterate_in_threads(self._run_remotely(self._elsewhere, bar))) as made:
                async for remote_item in made:
                    yield remote_item
            return
        is_slow = self._budget.durable
        for item in self._open_items():
            async with self._events() as events, ThreadedContext(self._at_work(item, events), is_slow=is_slow):
                _, failure = await run_async(attempt(self._make(item, bar, events)), is_slow=is_slow)
            self._check_done(failure)
            yield item

    def _run_remotely(self, elsewhere: RemoteExecution, bar: Any) -> Generator[T | None]:
        """Generates the items on workers; stores every result before it raises for the missing ones."""
        items = {self._job(item): item for item in self._open_items()}
        faults: list[DPICLError] = []
        missing = 0
        with ExitStack() as stack, self._events() as events:
            # All items are marked busy at once, because a job may finish in any order.
            for item in items.values():
                stack.enter_context(self._at_work(item, events))
            try:
                for one in elsewhere.executor.spread(elsewhere.work, list(items)):
                    if one is None:
                        yield None
                        continue
                    job, answer = one
                    events.tickets += answer.tickets
                    if answer.kind == "done":
                        self._take(items[job], answer.result, bar)
                        yield items[job]
                    elif answer.kind == "lost":
                        missing += 1
                    else:
                        faults.append(answer.as_error())
            except ModelCallError as error:
                faults.append(error)
            # A refusal of the budget or a configuration error stops the run; failed model calls are an interruption.
            refusal = next((fault for fault in faults if not isinstance(fault, ModelCallError)), None)
            if refusal is not None:
                raise refusal
            if missing and not faults:
                raise tickets_missing(self._share.component, missing)
        self._check_done(str(faults[0]) if faults else "")

    def _events(self) -> RunEvents:
        return RunEvents(type(self).__name__, budget=self._budget, share=self._share)

    @contextmanager
    def _at_work(self, item: T, events: RunEvents) -> Iterator[None]:
        """Marks an item as busy, returns its unburnt tickets at the end, and attaches this run to every error."""
        with self._lock:
            # Two runs of one item would burn tickets for the same tokens twice.
            if item.busy:
                msg = f"run: expected no other run of this {self._noun}, found one. Wait for its end."
                raise ConfigurationError(msg)
            item.busy = True
        try:
            with carrying(run=self):
                yield
        finally:
            try:
                self._give_back(item, events)
            finally:
                item.busy = False

    def _check_done(self, failure: str) -> None:
        """Raises for an interruption, outside `except`, so that the error has no cause that could hold private text."""
        if failure:
            msg = (
                f"Generation stopped: {failure.rstrip('.')}. {self._so_far()} released and kept; tickets that burnt "
                "stay charged. Call run() on error.run to continue."
            )
            raise RunInterruptedError(msg, run=self)

    def _rest(self) -> None:
        """Stops the workers that this run started."""
        if self._elsewhere is not None:
            self._elsewhere.rest()

    def _show(self, bar: Any) -> None:
        """Shows the state after an item on the bar."""
