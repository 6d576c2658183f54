"""The base of all runs: releases item by item, here or on workers, stops and continues, and keeps a journal."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    aclosing,
    closing,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from langchain_core.runnables import RunnableConfig
from tqdm.auto import tqdm

from langchain_dpicl._opaque import Uncopyable
from langchain_dpicl.backends.rows.together import Outcome, advance_together
from langchain_dpicl.backends.sync_async import (
    EffectGenerator,
    ThreadedContext,
    limit_concurrency,
    run_async,
    run_in_thread,
    run_sync,
)
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.budget.events import RunEvents
from langchain_dpicl.budget.handler import check_config, resolve_budget
from langchain_dpicl.distributed.executor import RemoteExecution, iterate_in_threads, tickets_missing
from langchain_dpicl.exceptions import ConfigurationError, DPICLError, ModelCallError, RunInterruptedError
from langchain_dpicl.options import LocalExecutor
from langchain_dpicl.planning.share_plan import SharePlan
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.privacy.extensions.run_tickets import RunShare
from langchain_dpicl.privacy.extensions.stream_blocks import StreamTerms
from langchain_dpicl.privacy.ledger.shares import Reservation, Share
from langchain_dpicl.reports.claims import RELEASE_FORMAT, unit_of
from langchain_dpicl.reports.stream_claims import reads_claims
from langchain_dpicl.runs.journal import RunJournal

__all__ = ["ReleaseRun", "RunCall", "RunItem", "attempt", "carrying", "new_bar", "report_of", "tick"]

Item = TypeVar("Item")
Result = TypeVar("Result")
T = TypeVar("T")


class RunItem(Protocol):
    """One unit of work of a run (a demonstration, an input, a histogram); holds public or released values only.

    Attributes:
      done: whether the item is complete.
      busy: whether a run is working on it.
    """

    done: bool
    busy: bool


@dataclass(frozen=True, slots=True)
class RunCall:
    """One call of `run` or `stream`.

    Attributes:
      events: reports what is charged: for one item, or for the whole call.
      bar: the progress bar.
      config: the caller's config, or None.
    """

    events: RunEvents
    bar: Any
    config: RunnableConfig | None

    def tick(self) -> None:
        """Moves the bar by one step; a closed terminal must not stop a paid run."""
        tick(self.bar)


class ReleaseRun(ABC, Uncopyable, Generic[Item, Result]):
    """A run: it charges tickets and releases item by item; it can be interrupted and continued.

    Formal guarantees:
      - Released values stay in the run after any error, and every error and Ctrl-C carries the run as `error.run`.
      - Calling `run` again continues with tickets that never burnt; with a checkpoint so does another process.
      - No item is made by two calls at once.

    Attributes:
      plan: what is released, and what it costs; public.
      share: the component's share of the budget; public.
    """

    _item_name: ClassVar[str] = "release"
    """What one item is called in messages."""
    _unit: ClassVar[str] = "release"
    """What the bar counts."""
    _title: ClassVar[str] = "private run"
    """Title of the bar."""
    _reports_per_call: ClassVar[bool] = False
    """Whether charges are reported once per call of `run` or `stream`, not once per item."""

    plan: Any

    def __init__(
        self,
        private: PrivateExamples,
        items: Iterable[Any],
        *,
        plan: Any,
        budget: Budget,
        share: Share,
        journal: RunJournal | None = None,
        executor: RemoteExecution | LocalExecutor | None = None,
    ) -> None:
        self.plan = plan
        self.share = share
        self._private = private
        self._items = list(items)
        self._budget = budget
        self._journal = journal
        self._elsewhere = executor if isinstance(executor, RemoteExecution) else None
        self._max_concurrency = executor.max_concurrency if isinstance(executor, LocalExecutor) else None
        self._lock = threading.Lock()
        self._unstored: list[Reservation] = []
        self._unseen: deque[Any] = deque()

    @property
    def component(self) -> str:
        """Name of the component in the ledger."""
        return self.share.component

    @property
    def is_finished(self) -> bool:
        """Whether everything is released."""
        return all(item.done for item in self._items)

    @property
    def result(self) -> Result:
        """Everything released so far, with its privacy report; free."""
        return self._value()

    @property
    def report(self) -> dict[str, Any]:
        """The privacy report (public); reads the ledger."""
        return report_of(self._budget, self.share, self.plan)

    def run(self, *, progress: bool | None = None, config: RunnableConfig | None = None) -> Result:
        """Releases what is missing and returns everything released.

        Args:
          progress: True shows a bar, False hides it, None shows it on a terminal only.
          config: a RunnableConfig: its callbacks hear of charges and of calls that show no private text; its
            `max_concurrency` limits the model calls in flight.

        Raises:
          RunInterruptedError: a model call failed. Released values are kept, and `error.run.run()` continues with the
            unburnt tickets. Other errors and Ctrl-C carry `run` too.
          PrivacyBudgetError: the tickets could not be reserved, or the config or the context holds another budget.
          LedgerError: the ledger cannot be read or written; nothing is granted.
        """
        for _ in self.stream(progress=progress, config=config):
            pass
        with carrying(run=self):
            return self._value()

    async def arun(self, *, progress: bool | None = None, config: RunnableConfig | None = None) -> Result:
        """Async version of `run`; the calls of one release run concurrently."""
        async for _ in self.astream(progress=progress, config=config):
            pass
        with carrying(run=self):
            return await run_in_thread(self._value, is_slow=self._is_slow)

    def stream(self, *, progress: bool | None = None, config: RunnableConfig | None = None) -> Iterator[Item]:
        """Yields each part once it and those that are written with it are released; arguments and errors as in `run`.

        Raises:
          ConfigurationError: `config` is no config, or another call works on the same item now.
        """
        check_config(config)
        try:
            with (
                carrying(run=self),
                self._events(config) as events,
                self._session(events),
                new_bar(self._steps_left(), self._unit, self._title, progress=progress) as bar,
                closing(self._made(RunCall(events, bar, config))) as made,
            ):
                for item in made:
                    if item is not None:
                        self._show(bar)
                        yield from self._examples(item)
        finally:
            self._rest()

    async def astream(
        self, *, progress: bool | None = None, config: RunnableConfig | None = None
    ) -> AsyncIterator[Item]:
        """Async version of `stream`.

        Raises:
          ConfigurationError: as in `stream`.
        """
        check_config(config)
        try:
            with carrying(run=self):
                async with self._events(config) as events:
                    session = ThreadedContext(self._session(events), is_slow=self._is_slow)
                    async with session:
                        steps = await run_in_thread(self._steps_left, is_slow=self._is_slow)
                        with new_bar(steps, self._unit, self._title, progress=progress) as bar:
                            async with aclosing(self._amade(RunCall(events, bar, config))) as made:
                                async for item in made:
                                    self._show(bar)
                                    session.is_at_yield = True
                                    for example in self._examples(item):
                                        yield example
                                    session.is_at_yield = False
        finally:
            self._rest()

    # -- defined by subclasses ---------------------------------------------------------------------------------------

    @abstractmethod
    def _make(self, item: Any, call: RunCall) -> EffectGenerator[None]:
        """Works on one item (an effect generator); released parts stay in the item after any error."""

    @abstractmethod
    def _examples(self, item: Any) -> Iterable[Item]:
        """Returns what `stream` yields for an item that was worked on; nothing while it is incomplete."""

    @abstractmethod
    def _value(self) -> Result:
        """Returns everything released so far; may wait for the ledger."""

    def _give_back(self, item: Any, events: RunEvents) -> None:
        """Returns an item's unburnt tickets to the share, if they are refundable."""

    def _restore(self, entry: Mapping[str, Any]) -> None:
        """Restores one release from the journal, whose content is untrusted."""
        raise NotImplementedError

    def _job(self, item: Any) -> Hashable:
        """Returns the public job that makes an item on a worker."""
        raise NotImplementedError

    def _take(self, item: Any, result: Any, call: RunCall) -> None:
        """Stores a worker's result in an item, which completes it."""
        raise NotImplementedError

    def _without_tickets(self, missing: int) -> str:
        """Says why jobs found no ticket, for an interruption; "" if that is the end of the run."""
        raise tickets_missing(self.component, missing)

    @contextmanager
    def _session(self, events: RunEvents) -> Iterator[None]:  # noqa: ARG002  for subclasses that hold tickets
        """Wraps one call of `run` or `stream`; stores and commits first what an earlier call could not."""
        with self._lock:
            self._settle()
        yield

    def _groups(self, at_once: int | None) -> Iterator[list[Any]]:  # noqa: ARG002  for subclasses
        """Yields the items to work on, those of one list at once; `at_once` calls may be in flight."""
        return ([item] for item in self._open_items())

    def _open_items(self) -> Iterator[Any]:
        """Yields the items to work on, one after the other."""
        return (item for item in self._items if not item.done)

    def _steps_left(self) -> int:
        """Returns the length of the bar."""
        return sum(1 for item in self._items if not item.done)

    def _so_far(self) -> str:
        """Returns how much is released, as the start of a sentence for error messages."""
        return f"{sum(item.done for item in self._items)} of {len(self._items)} {self._item_name}s are"

    def _show(self, bar: Any) -> None:
        """Shows the state after an item on the bar."""

    def _rest(self) -> None:
        """Stops the workers that this run started."""
        if self._elsewhere is not None:
            self._elsewhere.rest()

    # -- for subclasses ----------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        """Restores what the journal holds; called at the end of a subclass's constructor."""
        for entry in self._journal.entries if self._journal is not None else ():
            self._restore(entry)

    def _record(self, entry: Mapping[str, Any], *tickets: Reservation, arrays: bytes | None = None) -> None:
        """Writes a release into the journal; called before its tickets are committed.

        If that fails, the next call of `run` or `stream` writes it and commits the tickets.
        """
        if self._journal is None:
            return
        with self._lock:
            try:
                self._journal.append(entry, arrays=arrays)
            except BaseException:
                self._unstored += tickets
                raise

    # -- inside ------------------------------------------------------------------------------------------------------

    @property
    def _is_slow(self) -> bool:
        """Whether the steps of a run may block, so that async code runs them in threads."""
        return self._budget.durable or self._journal is not None

    def _settle(self) -> None:
        if self._journal is not None:
            self._journal.flush()
        while self._unstored:
            if self._unstored[-1].uncommitted:  # Ctrl-C may come between the commit and the `pop`
                self._unstored[-1].commit()
            self._unstored.pop()

    def _events(self, config: RunnableConfig | None) -> RunEvents:
        resolve_budget(self._budget, config)  # refuses another budget in the config or the context
        return RunEvents(type(self).__name__, budget=self._budget, share=self.share, config=config)

    def _events_of_item(self, call: RunCall) -> RunEvents | nullcontext[RunEvents]:
        return nullcontext(call.events) if self._reports_per_call else self._events(call.config)

    def _limit(self, call: RunCall) -> int | None:
        """Returns how many model calls the config or the executor allows in flight; None: they do not say."""
        limit: int | None = (call.config or {}).get("max_concurrency") or self._max_concurrency
        return limit

    def _made(self, call: RunCall) -> Generator[Any]:
        """Works on items and yields each; None while workers are busy."""
        return self._run_locally(call) if self._elsewhere is None else self._run_remotely(self._elsewhere, call)

    def _run_locally(self, call: RunCall) -> Generator[Any]:
        limit = self._limit(call)
        yield from self._unseen_items()
        for group in self._groups(limit):
            failure, fault = "", None
            try:
                # Entered from the last to the first, so that their events come in the order of the items.
                with ExitStack() as stack, _limited(limit):
                    made = []
                    for item in reversed(group):
                        events = stack.enter_context(self._events_of_item(call))
                        stack.enter_context(self._at_work(item, events))
                        made.append(attempt(self._make(item, replace(call, events=events))))
                    failure = self._ended(group, run_sync(advance_together(made[::-1])))
            except BaseException as error:
                self._note_done(group)
                if not self._unseen or not isinstance(error, Exception):
                    raise
                fault = error
            yield from self._unseen_items()
            if fault is not None:
                raise fault
            self._check_done(failure)

    async def _amade(self, call: RunCall) -> AsyncGenerator[Any]:
        if self._elsewhere is not None:
            async with aclosing(iterate_in_threads(self._run_remotely(self._elsewhere, call))) as remote:
                async for remote_item in remote:
                    yield remote_item
            return
        is_slow, limit = self._is_slow, self._limit(call)
        for item in self._unseen_items():
            yield item
        groups = self._groups(limit)
        # The next items may be chosen by what the ledger says.
        while (group := await run_in_thread(lambda: next(groups, None), is_slow=is_slow)) is not None:
            failure, fault = "", None
            try:
                async with AsyncExitStack() as stack:
                    made = []
                    for item in reversed(group):
                        events = await stack.enter_async_context(self._events_of_item(call))
                        await stack.enter_async_context(ThreadedContext(self._at_work(item, events), is_slow=is_slow))
                        made.append(attempt(self._make(item, replace(call, events=events))))
                    with _limited(limit):
                        outcomes = await run_async(advance_together(made[::-1]), is_slow=is_slow)
                    failure = self._ended(group, outcomes)
            except BaseException as error:
                self._note_done(group)
                if not self._unseen or not isinstance(error, Exception):
                    raise
                fault = error
            for item in self._unseen_items():
                yield item
            if fault is not None:
                raise fault
            self._check_done(failure)

    def _ended(self, group: Sequence[Any], outcomes: Sequence[Outcome]) -> str:
        """Notes the items that ended well; raises the first error, or returns the first failed call's message."""
        for item, outcome in zip(group, outcomes, strict=True):
            if outcome.error is None and not outcome.value[1]:
                self._unseen.append(item)
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        return next((outcome.value[1] for outcome in outcomes if outcome.value[1]), "")

    def _note_done(self, group: Sequence[Any]) -> None:
        """Notes what ended well beside an error or a stop; after a stop the next call yields it."""
        if len(group) > 1:
            self._unseen += [item for item in group if item.done and all(item is not one for one in self._unseen)]

    def _unseen_items(self) -> Iterator[Any]:
        """Yields the items that ended and were not yielded, also by an earlier call that was closed between two."""
        while self._unseen:
            yield self._unseen.popleft()

    def _run_remotely(
        self, elsewhere: RemoteExecution, call: RunCall, wanted: Iterable[Any] | None = None
    ) -> Generator[Any]:
        """Has workers make the wanted or all open items; stores every result before it raises for the missing ones."""
        items = {self._job(item): item for item in (self._open_items() if wanted is None else wanted)}
        faults: list[DPICLError] = []
        missing = 0
        with ExitStack() as stack, self._events(call.config) as events:
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
                        self._take(items[job], answer.result, call)
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
            failure = self._without_tickets(missing) if missing and not faults else ""
        self._check_done(str(faults[0]) if faults else failure)

    @contextmanager
    def _at_work(self, item: Any, events: RunEvents) -> Iterator[None]:
        """Marks an item as busy, and returns its unburnt tickets at the end."""
        with self._lock:
            # Two runs of one item would burn tickets for the same release twice.
            if item.busy:
                msg = f"{type(self).__name__}: expected no other run of this component's object, found one."
                raise ConfigurationError(f"{msg} Wait for its end.")
            item.busy = True
        try:
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
                f"{type(self).__name__} stopped: {failure.rstrip('.')}. {self._so_far()} released and kept; tickets "
                "that burnt stay charged. Call run() on error.run to continue."
            )
            raise RunInterruptedError(msg, run=self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(component={self.component!r}, plan={self.plan!r})"


def _limited(limit: int | None) -> AbstractContextManager[None]:
    """Limits the calls in flight; None: to what holds already."""
    return nullcontext() if limit is None else limit_concurrency(limit)


def attempt(walk: EffectGenerator[T]) -> EffectGenerator[tuple[T | None, str]]:
    """Runs a walk (an effect generator); returns its result, or the message of a failed model call.

    The caller raises its own error outside `except`, so that the error has no context that could hold private text.
    """
    try:
        return (yield from walk), ""
    except ModelCallError as error:
        return None, str(error)


def report_of(budget: Budget, share: Share, plan: SharePlan, **shown: Any) -> dict[str, Any]:
    """Returns the public privacy report of a share's release; `shown` stands before the budget's own report."""
    inner = budget.report().to_dict()
    return {
        "format": RELEASE_FORMAT,
        "private": True,
        "method": plan.method,
        "component": share.component,
        "ledger_id": budget.ledger_id,
        "dataset_id": plan.partition,
        "unit": unit_of(inner, plan.partition),
        "adjacency": budget.adjacency,
        "epsilon": share.epsilon,
        "delta": share.delta,
        "plan": plan.to_dict(),
        **reads_of(budget, share),
        **shown,
        "budget": inner,
    }


def reads_of(budget: Budget, share: Share) -> dict[str, Any]:
    """Returns the blocks that a run on a stream reads, by number and by name; nothing of another share."""
    terms = StreamTerms.parse(budget.per)
    if terms is None or not isinstance(share, RunShare):
        return {}
    return {"reads": reads_claims(terms, share.blocks)}


def new_bar(total: int, unit: str, words: str, *, progress: bool | None) -> Any:
    """Returns a progress bar; `progress` None: shown on a terminal only, unless TQDM_DISABLE is set."""
    is_off = bool(os.environ.get("TQDM_DISABLE")) or None if progress is None else not progress
    return tqdm(total=total, unit=unit, desc=words, disable=is_off, leave=False)


def tick(bar: Any) -> None:
    """Moves a bar by one step; a closed terminal must not stop a paid run."""
    with suppress(OSError, ValueError):
        bar.update()


@contextmanager
def carrying(**owner: object) -> Iterator[None]:
    """Sets attributes, such as `run=`, on an error that ends the block, so that no release is lost with it."""
    try:
        yield
    except BaseException as error:
        # Exceptions with slots take no attributes; the error itself matters more.
        with suppress(AttributeError, TypeError):
            for name, value in owner.items():
                setattr(error, name, value)
        raise
