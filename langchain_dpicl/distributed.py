"""Independent jobs on other processes or machines: executors, workers, Ray. Private records travel only inside jobs."""

from __future__ import annotations

import atexit
import importlib
import itertools
import json
import math
import os
import re
import secrets
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, Literal, Protocol, Self, TypeAlias, TypeVar, runtime_checkable

from langchain_dpicl import exceptions
from langchain_dpicl._opaque import PerProcess, Uncopyable
from langchain_dpicl.backends.sync_async import run_in_thread, run_to_completion
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.budget.handler import resolve_budget
from langchain_dpicl.exceptions import (
    ConfigurationError,
    DPICLError,
    LedgerError,
    MemoError,
    ModelCallError,
    PrivacyBudgetExceededError,
    PrivacyBudgetMismatchError,
)
from langchain_dpicl.options import LocalExecutor
from langchain_dpicl.privacy._validate import check_int, check_positive, check_real, fail
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.stores import MemoKey, ReleaseMemo, SQLiteMemo, SQLiteStore
from langchain_dpicl.stores.memos import TURN_SECONDS

# Orders, jobs and answers are public: they cross machines, and the operator of the cluster may read them. A job is
# handed out again only after its worker died, and then pays with tickets of its own, as any other job does.


Kind: TypeAlias = Literal["done", "lost", "busy", "fault"]
JobKey = TypeVar("JobKey", bound=Hashable)
Result = TypeVar("Result")

MOST_DEATHS = 4
"""Workers that may die over one job, or as they start, before a run stops."""

START_SECONDS = 900.0
"""How long to wait for the first worker, by default: a model may have to be loaded."""

BUSY_SECONDS = 180.0
"""How long a job is held out again while another run has its turn; at least for two turns as the memo has them."""

_END: Any = object()
_PAUSE = 0.25  # seconds between two looks at jobs that others have


@dataclass(frozen=True, slots=True)
class JobResult:
    """What a worker says of a job; all of it is public.

    Attributes:
      kind: "done"; "lost": no ticket is left that could pay for it; "busy": another worker has its turn; "fault".
      result: of a job that is done, as JSON values; of one that is busy, how many seconds a turn lasts; of an order
        that was begun, the version of this package there.
      tickets: tickets that were charged for it.
      error: class of a fault.
      message: of a fault of ours, whose messages are public; of others there is none.
      numbers: requested and remaining, where the budget refused.
    """

    kind: Kind
    result: Any = None
    tickets: int = 0
    error: str = ""
    message: str = ""
    numbers: tuple[float, float] | None = None

    @classmethod
    def of_fault(cls, error: BaseException, *, tickets: int = 0) -> JobResult:
        """Returns the public part of an error: the text of our own, the class alone of others."""
        name = type(error).__name__
        if not isinstance(error, DPICLError):
            return cls("fault", error=name, tickets=tickets)
        numbers = (error.requested, error.remaining) if isinstance(error, PrivacyBudgetExceededError) else None
        return cls("fault", error=name, message=str(error), numbers=numbers, tickets=tickets)

    def as_error(self) -> DPICLError:
        """Returns a worker's fault as an error of this process; a foreign one becomes a failed call."""
        if self.numbers is not None:
            requested, remaining = self.numbers
            return PrivacyBudgetExceededError(self.message, requested=requested, remaining=remaining)
        kind = getattr(exceptions, self.error, None) if self.message else None
        if isinstance(kind, type) and issubclass(kind, DPICLError):
            with suppress(TypeError):  # one that holds more than words
                return kind(self.message)
        return ModelCallError(self.message or f"a worker's call failed ({self.error or 'no answer'})")


@runtime_checkable
class Job(Protocol):
    """What is to be done elsewhere, in public terms; it is pickled, and begun once in each worker."""

    @property
    def key(self) -> str:
        """Public name of it: of all that tells it from others. It is the same after pickling."""

    def begin(self, place: Any) -> Callable[[Any], JobResult]:
        """Checks a worker's place, and returns what does one job."""


@dataclass(slots=True, eq=False)
class WorkerHandle:
    """One worker, as the one sees it who hands out jobs."""

    handle: Any
    begun: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _RunningJob:
    """A job in progress, or with `job` None an order being begun, for a run, since a time."""

    hand: WorkerHandle
    work: str
    job: Any
    run: object
    since: float


class Executor(ABC):
    """Hands jobs to workers. A subclass says what they are and where they run.

    Formal guarantees:
      - A worker has one job at a time. One that died is replaced; its job is handed out again behind all others.
      - An answer that came is returned, whatever came of others; a fault stops the handing out, not what is under way.
      - What was under way when a run was left is collected by the next one; what has ended by then may be given up for
        the room of its worker.

    Attributes:
      num_workers: how many there are at a time.
      start_timeout: seconds to wait for the first worker to have begun.
    """

    num_workers: int

    @property
    def is_one_host(self) -> bool:
        """Whether all workers are on this machine for sure, so that they share its files."""
        return False

    def __init__(self, *, start_timeout: float = START_SECONDS) -> None:
        self.start_timeout = check_positive("start_timeout", start_timeout)
        self._hands: list[WorkerHandle] = []
        self._flights: dict[Any, _RunningJob] = {}
        self._turn = threading.Lock()
        self._resting = PerProcess(threading.Lock)  # held while idle workers are ended

    # -- what a cluster has to do ------------------------------------------------------------------------------------

    @abstractmethod
    def _hire(self) -> Any:
        """Starts a worker without waiting for it; returns its handle."""

    @abstractmethod
    def _dismiss(self, handle: Any) -> None:
        """Ends a worker."""

    def _check_session(self) -> None:  # noqa: B027  most clusters do not end before their executor
        """Forgets workers, and what they have under way, where their cluster ended behind the executor's back."""

    def _make_room(self) -> None:  # noqa: B027  in most clusters workers of others are not known
        """Ends idle workers of other executors where this one, of which none has begun, has no room for one."""

    @abstractmethod
    def _begin(self, handle: Any, work: Job) -> Any:
        """Has a worker begin an order; returns a handle of its answer."""

    @abstractmethod
    def _do(self, handle: Any, key: str, job: Any) -> Any:
        """Has a worker do a job; returns a handle of its answer."""

    @abstractmethod
    def _ready(self, awaited: Sequence[Any], seconds: float) -> Sequence[Any]:
        """Returns handles whose answers have arrived, after at most so many seconds."""

    @abstractmethod
    def _answer(self, awaited: Any) -> JobResult | None:
        """Returns an answer that has arrived; None if the worker died."""

    # -- handing out -------------------------------------------------------------------------------------------------

    def spread(self, work: Job, jobs: Sequence[JobKey]) -> Iterator[tuple[JobKey, JobResult] | None]:
        """Hands out jobs and yields each with its answer as it comes; now and then None, for the caller to look up.

        Args:
          work: what is to be done.
          jobs: distinct and public.

        Raises:
          ConfigurationError: another run of this executor is under way, or a worker's place does not fit.
          ModelCallError: workers die as they start.
          DPICLError: what a worker raised as it began.
        """
        with self._resting.here:  # a run of another executor may be ending idle workers of this one
            has_turn = self._turn.acquire(blocking=False)
        if not has_turn:
            advice = "Wait for its end, or make one executor for each, on a cluster with room for the workers of both."
            raise ConfigurationError(f"executor: expected one run at a time, found another. {advice}")
        try:
            self._check_session()
            yield from _JobQueue(self, work, jobs)
        finally:
            self._turn.release()

    def rest(self) -> None:
        """Ends all workers if none is at a job and nobody hands any out; the next run starts others.

        An answer that no run has collected is given up: what was released for it is kept.
        """
        with self._resting.here:
            if not self._turn.acquire(blocking=False):
                return
            try:
                self._check_session()
                jobs = [one for one, flight in self._flights.items() if flight.job is not None]
                if not jobs or len(self._ready(jobs, 0.0)) == len(jobs):
                    self.close()
            finally:
                self._turn.release()

    def close(self) -> None:
        """Ends all workers. A job under way is lost with the ticket that it burnt; what was released is kept."""
        self._check_session()
        hands, self._hands, self._flights = self._hands, [], {}
        for hand in hands:
            self._dismiss(hand.handle)


class _JobQueue(Generic[JobKey]):
    """The state of one run: waiting and retried jobs, deaths of workers, charged tickets."""

    def __init__(self, executor: Executor, work: Job, jobs: Sequence[JobKey]) -> None:
        self.executor = executor
        self.work = work
        self.key = work.key
        self.open = set(jobs)
        self._flights = executor._flights  # noqa: SLF001  replaced where the executor is closed
        under_way = {flight.job for flight in self._flights.values() if flight.work == self.key}
        self.waiting = deque(job for job in jobs if job not in under_way)
        self.late: deque[JobKey] = deque()
        self.deaths: Counter[Any] = Counter()
        self.lost: set[JobKey] = set()
        self.busy_since: dict[JobKey, float] = {}
        self.charged: Counter[JobKey] = Counter()
        self.not_before = 0.0
        self.since = time.monotonic()
        self.stops = False

    def __iter__(self) -> Iterator[tuple[JobKey, JobResult] | None]:
        executor = self.executor
        while self.open and not (self.stops and not self._mine()):
            self._check_open()
            self._hand_out()
            awaited = list(executor._flights)  # noqa: SLF001  its own module
            if not awaited:
                time.sleep(_PAUSE)
            ready = executor._ready(awaited, _PAUSE) if awaited else ()  # noqa: SLF001
            for one in ready:
                self._check_open()
                result = self._accept_result(one)
                if result is not None:
                    yield result
            if not ready:
                self._check_start()
                yield None

    def _check_open(self) -> None:
        """Stops a run whose executor, or the cluster of its workers, was ended meanwhile."""
        self.executor._check_session()  # noqa: SLF001
        if self.executor._flights is not self._flights:  # noqa: SLF001
            raise ModelCallError(
                "the executor was closed while this run went on, or its cluster ended; run it again to continue"
            )

    def _check_start(self) -> None:
        """Stops a run without workers if none starts in time; a replacement gets as long to start."""
        executor = self.executor
        if any(self.key in hand.begun for hand in executor._hands):  # noqa: SLF001
            return
        begins = {one: flight for one, flight in executor._flights.items() if flight.job is None}  # noqa: SLF001
        if not begins or len(begins) < len(executor._flights):  # noqa: SLF001  others are at work
            return
        oldest = max(self.since, min(flight.since for flight in begins.values()))
        if time.monotonic() - oldest <= executor.start_timeout:
            executor._make_room()  # noqa: SLF001
            return
        for one, flight in begins.items():  # the next run starts others
            del executor._flights[one]  # noqa: SLF001
            self._let_go(flight.hand)
            executor._dismiss(flight.hand.handle)  # noqa: SLF001
        msg = f"no worker has begun within {executor.start_timeout:g} s; look whether the cluster has room"
        keeps = "other runs keep the room of their workers, and on a cluster of yours idle workers keep theirs"
        raise ModelCallError(f"{msg}: {keeps}. End those runs, and close their executors")

    def _mine(self) -> bool:
        flights = self.executor._flights.values()  # noqa: SLF001
        return any(flight.work == self.key and flight.job is not None for flight in flights)

    def _hand_out(self) -> None:
        """Gives every idle worker a job, and starts workers while jobs wait."""
        executor = self.executor
        at_work = {id(flight.hand) for flight in executor._flights.values()}  # noqa: SLF001
        idle = [hand for hand in executor._hands if id(hand) not in at_work]  # noqa: SLF001
        wanted = 0 if self.stops else len(self.waiting) + len(self.late)
        while len(idle) < wanted and len(executor._hands) < executor.num_workers:  # noqa: SLF001
            idle.append(WorkerHandle(executor._hire()))  # noqa: SLF001
            executor._hands.append(idle[-1])  # noqa: SLF001
        for hand in itertools.islice(idle, wanted):
            if self.key not in hand.begun:
                self._fly(executor._begin(hand.handle, self.work), hand, None)  # noqa: SLF001
            elif (job := self._next()) is not None:
                self._fly(executor._do(hand.handle, self.key, job), hand, job)  # noqa: SLF001

    def _fly(self, awaited: Any, hand: WorkerHandle, job: Any) -> None:
        self.executor._flights[awaited] = _RunningJob(hand, self.key, job, self, time.monotonic())  # noqa: SLF001

    def _next(self) -> JobKey | None:
        if self.waiting:
            return self.waiting.popleft()
        # What comes late, comes after all others: what they leave over may pay for it.
        if self.late and time.monotonic() >= self.not_before:
            return self.late.popleft()
        return None

    def _accept_result(self, awaited: Any) -> tuple[JobKey, JobResult] | None:
        """Handles an answer; returns the job and answer to report, if any."""
        flight = self.executor._flights.pop(awaited)  # noqa: SLF001
        answer = self.executor._answer(awaited)  # noqa: SLF001
        if answer is None:
            return self._died(flight)
        if flight.job is None:
            self._began(flight, answer)
            return None
        if flight.work != self.key or flight.job not in self.open:
            return None  # of a run that was left, and is of no use to this one; what it released is kept
        return self._told(flight.job, answer)

    def _began(self, flight: _RunningJob, answer: JobResult) -> None:
        if answer.kind == "done":
            try:  # workers from before `WorkerFactory.place` looked at the version drop the one that is sent to them
                _check_version(driver=_own_version(), worker=answer.result)
            except ConfigurationError as error:
                answer = JobResult.of_fault(error)
        if answer.kind == "done":
            flight.hand.begun.add(flight.work)
            self.deaths.pop(("begin",), None)  # only deaths in a row stop a run
            return
        self._let_go(flight.hand)
        self.executor._dismiss(flight.hand.handle)  # noqa: SLF001
        if flight.run is self:
            raise answer.as_error()  # of a run that was left it says nothing of what is there now

    def _let_go(self, hand: WorkerHandle) -> None:
        if hand in self.executor._hands:  # noqa: SLF001
            self.executor._hands.remove(hand)  # noqa: SLF001

    def _died(self, flight: _RunningJob) -> tuple[JobKey, JobResult] | None:
        """Removes a dead worker; its job is retried behind the others."""
        self._let_go(flight.hand)
        key = ("begin",) if flight.job is None else flight.job
        self.deaths[key] += flight.run is self or flight.job is not None
        too_often = self.deaths[key] >= MOST_DEATHS
        if flight.job is None:
            if too_often:
                raise ModelCallError(f"{MOST_DEATHS} workers died as they started; look at their logs and memory")
            return None
        if flight.work != self.key or flight.job not in self.open:
            return None
        if too_often:
            message = f"{MOST_DEATHS} workers died at one job; look at their logs and memory"
            return self._told(flight.job, JobResult("fault", error="ModelCallError", message=message))
        self.late.append(flight.job)
        return None

    def _told(self, job: JobKey, answer: JobResult) -> tuple[JobKey, JobResult] | None:
        self.charged[job] += answer.tickets
        if answer.kind == "busy":
            since = self.busy_since.setdefault(job, time.monotonic())
            if time.monotonic() - since < max(BUSY_SECONDS, 2.0 * (answer.result or 0.0)):
                self.not_before = time.monotonic() + _PAUSE
                self.late.append(job)
                return None
            message = "expected no other run of this component, found one that has the turn. Wait for its end."
            answer = JobResult("fault", error="ConfigurationError", message=message)
        if answer.kind == "lost" and job not in self.lost and len(self.open) > 1:
            self.lost.add(job)  # once more behind all others, which may give tickets back
            self.late.append(job)
            return None
        self.open.discard(job)
        self.stops = self.stops or answer.kind == "fault"
        return job, replace(answer, tickets=self.charged.pop(job))  # of every time that it was asked for


@dataclass(frozen=True, slots=True)
class RemoteExecution:
    """Workers, and what they get.

    Attributes:
      executor: who hands out the jobs.
      work: what is to be done; items have its jobs.
      is_ours: whether the executor is nobody else's, and is closed whenever a run ends with no job under way.
    """

    executor: Executor
    work: Job
    is_ours: bool = False

    @classmethod
    def of(cls, executor: ExecutorLike, budget: Budget, work: Callable[[Executor], Job]) -> Self | LocalExecutor | None:
        """Returns the workers and what they get, before anything is declared; a LocalExecutor and None as they are.

        Raises:
          LedgerError: not every worker can reach the ledger.
        """
        workers = as_executor(executor)
        if workers is None or isinstance(workers, LocalExecutor):
            return workers
        _check_shared("ledger", budget._store, SQLiteStore, is_one_host=workers.is_one_host)  # noqa: SLF001
        return cls(workers, work(workers), is_ours=executor == "ray")

    def rest(self) -> None:
        """Ends the workers behind a run, where they are nobody else's."""
        if self.is_ours:
            self.executor.rest()


async def iterate_in_threads(made: Generator[Result | None]) -> AsyncGenerator[Result]:
    """Yields the results of a run, each step in a thread; a step without a result lets a cancellation in."""
    try:
        while (result := await run_in_thread(lambda: next(made, _END))) is not _END:
            if result is not None:
                yield result
    finally:
        result, stop = await run_to_completion(made.close)
        if stop is not None:
            raise stop
        result()


def tickets_missing(component: str, missing: int) -> PrivacyBudgetExceededError:
    """Returns the error for jobs whose tickets burnt in dead workers or stopped runs."""
    msg = (
        f"{component!r}: requested {missing} more, remaining 0: the tickets that were to pay for them burnt in "
        "workers or runs that were stopped. What was released is kept; declare another component for more."
    )
    return PrivacyBudgetExceededError(msg, requested=missing, remaining=0)


# The worker reads private examples where it runs. They never leave it: not in an answer, nor in an error, whose frames
# and words stay in the process.


class Workplace(Uncopyable):
    """What a worker works with. A function of yours makes it, in each worker: nothing of it is ever sent there.

    Formal guarantees:
      - It is not pickled, and shows nothing of the records.

    Args:
      llm: the model or engine, on the worker's own device, or a client with the worker's own keys.
      private: the examples, read by the worker; the same, under the same `dataset_id`, in each worker.
      budget: the budget on a ledger that all workers reach: PostgreSQL.
      memo: where released things are kept before their tickets are committed: `PostgresMemo`.

    Raises:
      ConfigurationError: the examples are none.

    Example:
      >>> from langchain_dpicl.backends.fake import FakeBackend, scripted
      >>> Workplace(FakeBackend(scripted({"a": 1.0}), max_top_k=1))
      Workplace(llm=FakeBackend, private=None, budget=None, memo=None)
    """

    def __init__(
        self, llm: Any, *, private: PrivateExamples | None = None, budget: Any = None, memo: ReleaseMemo | None = None
    ) -> None:
        if private is not None and not isinstance(private, PrivateExamples):
            raise fail("private", "PrivateExamples, or None", type(private).__name__)
        self.llm = llm
        self.private = private
        self.budget = budget
        self.memo = memo
        self._is_one_host = False

    def paid(self, *, ledger_id: str, num_jobs: int) -> tuple[PrivateExamples, Budget, ReleaseMemo]:
        """Returns examples, budget and memo for work that spends, if all workers share ledger and memo.

        Args:
          ledger_id: the ledger of the process that hands out the jobs.
          num_jobs: answers that the memo has to hold.

        Raises:
          ConfigurationError: something is missing, or the memo keeps fewer answers.
          PrivacyBudgetMismatchError: the worker has another ledger.
          LedgerError: the ledger or the memo is not one that all workers reach.
        """
        if self.private is None or self.budget is None or self.memo is None:
            raise fail("workplace", "private, budget and memo beside the model", repr(self))
        budget = resolve_budget(self.budget, None)
        if budget.ledger_id != ledger_id:
            msg = f"workplace: expected ledger {ledger_id}, found {budget.ledger_id}. Open the driver's ledger there."
            raise PrivacyBudgetMismatchError(msg)
        _check_shared("ledger", budget._store, SQLiteStore, is_one_host=self._is_one_host)  # noqa: SLF001
        _check_shared("memo", self.memo, SQLiteMemo, is_one_host=self._is_one_host)
        size = getattr(self.memo, "size", 0)
        if size < num_jobs:
            raise fail("memo", f"room for {num_jobs} answers", size, f"Open it with size={num_jobs} or more.")
        # Workers end by being killed, which would lose tickets that are charged before they are asked for.
        budget._desk.write_waiting(is_closing=True)  # noqa: SLF001  from now on none is
        return self.private, budget, self.memo

    def settle(self) -> None:
        """Writes the commits that wait; what cannot be written now goes on waiting."""
        if self.budget is not None:
            with suppress(LedgerError):
                resolve_budget(self.budget, None).settle()

    def __repr__(self) -> str:
        shown = {"private": self.private, "budget": self.budget, "memo": self.memo}
        parts = ", ".join(f"{name}={value and type(value).__name__}" for name, value in shown.items())
        return f"Workplace(llm={type(self.llm).__name__}, {parts})"


class TurnLostError(MemoError):
    """Another worker took over this worker's job."""


class JobLease:
    """A lease on a job, so that no other worker pays for it; a live holder renews it, a dead one loses it in time."""

    def __init__(self, memo: ReleaseMemo, key: MemoKey) -> None:
        self._memo = memo
        self._key = key
        self._holder = secrets.token_hex(16)
        self._seconds: float = getattr(memo, "turn_seconds", TURN_SECONDS)
        self._since = -math.inf

    def take(self) -> bool:
        """Takes or renews the lease; False if another worker has it."""
        now = time.monotonic()  # before it is written: it lasts at least so long
        has_it = self._memo.claim(self._key, self._holder)
        self._since = now if has_it else -math.inf
        return has_it

    def check(self, told: str | None) -> None:
        """Takes the turn again where a quarter of it is over; called right before a ticket is reserved.

        Args:
          told: what stood in the memo as this worker left it.

        Raises:
          TurnLostError: another worker has it, or went on with the job meanwhile.
        """
        if time.monotonic() - self._since < self._seconds / 4:
            return
        if not self.take() or self._memo.recall(self._key) != told:
            raise TurnLostError("memo: expected this worker to hold the job, found that another has taken it over.")

    def held(self, work: Callable[[], JobResult], tickets: Callable[[], int]) -> JobResult:
        """Does a job under the lease, and ends it.

        Args:
          work: the job; it looks into the memo first, as another worker may have finished the job meanwhile.
          tickets: returns how many the job has burnt so far.

        Returns:
          Its answer; busy, with the seconds that a lease lasts, where another worker has the job or takes it over; a
          fault by its class where it raised.
        """
        if not self.take():
            return JobResult("busy", self._seconds)
        try:
            return work()
        except TurnLostError:
            return JobResult("busy", self._seconds, tickets=tickets())
        except Exception as error:  # noqa: BLE001  reported by its class, with its cost
            return JobResult.of_fault(error, tickets=tickets())
        finally:
            with suppress(Exception):  # the lease ends by itself; what was done is reported in any case
                self._memo.leave(self._key, self._holder)


def _check_shared(what: str, target: Any, file_kind: type[Any], *, is_one_host: bool) -> None:
    """Refuses a ledger or memo that other processes or hosts do not share."""
    kind = type(target)
    is_server = kind.__module__.startswith("langchain_dpicl.stores.postgres")
    if is_server or (is_one_host and isinstance(target, file_kind)):
        return
    file = " or, where all workers were started on this host, a SQLite file" if is_one_host else ""
    raise LedgerError(
        f"{what}: expected one that all workers reach, in PostgreSQL{file}, found {kind.__name__}. With one of its own "
        "each worker would spend the whole budget: nothing is granted."
    )


def _own_version() -> str:
    from langchain_dpicl.reports.rendering import own_version  # reports are loaded where they are needed

    return own_version()


def _check_version(*, driver: str | None, worker: str | None) -> None:
    """Refuses a worker whose version of this package is not the driver's; None: of before either said its own."""
    if driver != worker and "unknown" not in {driver, worker}:  # that is a source tree
        older = "an older one"
        msg = f"worker: expected the driver's langchain-dpicl, {driver or older}, found {worker or older}."
        raise ConfigurationError(f"{msg} Install the same version for all: another may add other noise.")


@dataclass(frozen=True, slots=True)
class WorkerFactory:
    """Which function makes a worker's place; public, as it is sent to workers.

    Attributes:
      name: "module:function"; the module can be imported by every worker.
      options: its keyword arguments, public JSON values: paths and names, never records or keys.
      version: of this package, where the jobs are handed out.
    """

    name: str
    options: Mapping[str, Any]
    version: str = field(default_factory=_own_version)

    def place(self) -> Workplace:
        """Calls the function.

        Raises:
          ConfigurationError: this package has another version here; or the function cannot be found, raises, or returns
            something else; of what it raises only the class is shown, as its words may hold private text.
          DPICLError: it raised an error of ours, whose words are public.
        """
        _check_version(driver=getattr(self, "version", None), worker=_own_version())
        module, _, attribute = self.name.partition(":")
        result: Any = None
        try:
            result = getattr(importlib.import_module(module), attribute)(**self.options)
            kind = type(result).__name__
        except DPICLError:
            raise
        except Exception as error:  # noqa: BLE001  whatever the user's module raises
            kind = type(error).__name__
        if not isinstance(result, Workplace):
            msg = f"workplace: expected {self.name} to return a Workplace, found {kind}."
            raise ConfigurationError(f"{msg} Workers import its module: install it there, or set their PYTHONPATH.")
        return result


class Worker:
    """Runs orders and jobs in one process. No method raises, so that no frame is pickled, logged or shown elsewhere."""

    def __init__(self, setup: WorkerFactory, *, is_one_host: bool) -> None:
        self._setup = setup
        self._is_one_host = is_one_host
        self._place: Workplace | None = None
        self._works: dict[str, Callable[[Any], JobResult]] = {}
        self._orders: dict[str, Job] = {}

    def begin(self, work: Job) -> JobResult:
        """Begins an order once; another order under the same key is refused."""
        return _guarded_result(lambda: self._begun(work))

    def do(self, key: str, job: Any) -> JobResult:
        """Runs one job of an order that has begun."""
        return _guarded_result(lambda: self._done(key, job))

    def _done(self, key: str, job: Any) -> JobResult:
        try:
            return self._works[key](job)
        finally:  # a worker is killed when it is no longer needed
            if self._place is not None:
                self._place.settle()

    def _begun(self, work: Job) -> JobResult:
        if self._place is None:
            self._place = self._setup.place()
            self._place._is_one_host = self._is_one_host  # noqa: SLF001  its own module
        key = work.key
        if key not in self._works:
            self._works[key] = work.begin(self._place)
            self._orders[key] = work
        elif self._orders[key] != work:
            raise fail("work", "the order that was begun under this key", "another", "Orders differ by their keys.")
        return JobResult("done", _own_version())

    def __repr__(self) -> str:
        return f"Worker({self._setup.name})"


def _guarded_result(action: Callable[[], JobResult]) -> JobResult:
    """Returns the answer of an action; an exception stays here with its frames."""
    try:
        return action()
    except (SystemExit, KeyboardInterrupt) as error:
        stop = type(error)
    except BaseException as error:  # noqa: BLE001  whatever a work raises
        return JobResult.of_fault(error)
    raise stop  # from a frame without anything private


# What Ray carries, stores and shows (arguments, answers, names, logs) is public: orders, jobs and released results. Ray
# never repeats a job by itself: what burns a ticket runs once for it.


WORKPLACE = "DPICL_WORKPLACE"
"""Environment variable that `executor="ray"` takes the function from, as "module:function"."""

WORKERS = "DPICL_WORKERS"
"""Environment variable that `executor="ray"` takes the number of workers from."""

_SECRET = re.compile(r"://[^/@]*:[^/@]*@|(ssl)?password\s*=", re.IGNORECASE)
_SECRET_NAME = re.compile(
    r"pass(wd|word|phrase)|(?<![a-z])(pass|auth|bearer)(?![a-z])|secret|token(?!iz)|api[_-]?key|credential|authorization",
    re.IGNORECASE,
)
_KEY = re.compile(r"(^|[\W_])[Kk]eys?$|[a-z]Keys?$|KEYS?$")
_FIELD_KEY = re.compile(
    r"(text|label|unit|time|topic|public|exception|input|output|content|id|memory|vector|sort|record|group)_keys?"
)
"""Options of this name say what a field is called."""
_PLACE = re.compile(r"[_-](file|path)$", re.IGNORECASE)

_END_SECONDS = 5.0
"""How long a killed server of Ray may take to be gone."""

STORE_BYTES = 80 * 2**20
"""Memory that a cluster started here sets aside for objects; orders and answers are small."""


_LEAST_NEED = 1e-4  # Ray counts in ten-thousandths
_KNOWN_RESOURCES = frozenset({"CPU", "GPU", "memory", "object_store_memory"})

_STARTED: dict[str, set[RayExecutor]] = {}
"""The cluster that this process started and is connected to, by its node, with the executors that use it."""
_CONNECTING = PerProcess(threading.RLock)


class RayExecutor(Executor):
    """Runs independent jobs of a component in worker processes of a Ray cluster (extra `ray`).

    Each worker makes its own `Workplace` by a function of yours: it reads the records where it runs, loads the model on
    its own device or connects to a server with its own keys, and opens the ledger. Nothing private goes through Ray.

    Formal guarantees:
      - Arguments, answers, names and errors that Ray sees are public; no record and no key is among them.
      - A job runs once for the ticket that it burns: Ray repeats nothing. A worker that is killed loses the tickets
        that it had burnt and not committed, and nothing else; its job is handed out again if a ticket is left for it.
      - A cluster that is started here answers to this process and its workers alone, who share a token; it has no
        dashboard, forwards no logs and sends no usage statistics.

    Args:
      workplace: "module:function" that returns a `Workplace`; every worker has to be able to import the module.
      options: keyword arguments of the function: public JSON values, such as paths. Passwords and keys belong in the
        workers' environment; an address with a password, and text under a name such as `api_key`, are refused.
      address: "auto" or "host:port" of a cluster that this machine is part of; None: `RAY_ADDRESS` if it is set,
        otherwise a cluster of its own on this machine, as with "local", which all executors of this process then use.
        It has room for the workers of the one that started it. Where a run of another executor has room for none, idle
        workers end, and it waits for those of other runs; tasks and actors of your own there are not counted. Where
        Ray is connected already, that connection is used. Ray's client (ray://) is refused: start Ray on this machine,
        with the cluster's address.
      num_workers: workers at a time.
      num_cpus: logical CPUs that Ray sets aside for a worker.
      num_gpus: GPUs of a worker; Ray shows each worker its own.
      resources: further resources of a worker, as Ray names them.
      start_timeout: seconds to wait for the first worker, model and records included, before a run stops. The start
        of a cluster comes before, within Ray's own time.

    Raises:
      ConfigurationError: an argument is out of range, or Ray is not installed.

    Example:
      >>> RayExecutor("my_app.workers:workplace", num_workers=4)
      RayExecutor('my_app.workers:workplace', num_workers=4)
    """

    def __init__(
        self,
        workplace: str,
        *,
        options: Mapping[str, Any] | None = None,
        address: str | None = None,
        num_workers: int = 2,
        num_cpus: float = 1.0,
        num_gpus: float = 0.0,
        resources: Mapping[str, float] | None = None,
        start_timeout: float = START_SECONDS,
    ) -> None:
        super().__init__(start_timeout=start_timeout)
        if not isinstance(workplace, str) or not all(workplace.partition(":")[::2]):
            found = workplace if isinstance(workplace, str) else type(workplace).__name__
            raise fail("workplace", "'module:function' that returns a Workplace", found)
        if address is not None and (not isinstance(address, str) or not address):
            raise fail("address", "the address of a Ray cluster, 'auto', or None", type(address).__name__)
        self._setup = WorkerFactory(workplace, _plain(options))
        self._address = address
        self.num_workers = check_int("num_workers", num_workers, low=1)
        self._needs: dict[str, Any] = {
            "num_cpus": _need("num_cpus", num_cpus),
            "num_gpus": _need("num_gpus", num_gpus),
            "resources": _further_needs(resources),
        }
        self._check_target()
        self._ray: ModuleType = _import_ray(starts_its_own=self._target() is None)
        self._hired_in: tuple[str, str] | None = None

    @classmethod
    def from_environment(cls) -> Self:
        """Returns the executor that `executor="ray"` means: `DPICL_WORKPLACE`, `DPICL_WORKERS` and `RAY_ADDRESS`.

        Raises:
          ConfigurationError: `DPICL_WORKPLACE` is not set, or a value is out of range.
        """
        workplace, number = os.environ.get(WORKPLACE), os.environ.get(WORKERS, "2")
        if not workplace:
            advice = f"Set {WORKPLACE}=module:function, or pass RayExecutor('module:function', ...)."
            raise fail("executor='ray'", f"the function of the workers in {WORKPLACE}", None, advice)
        if not number.isdecimal():
            raise fail(WORKERS, "an integer >= 1", number)
        return cls(workplace, num_workers=int(number))

    @property
    def is_one_host(self) -> bool:
        """Whether all workers are on this machine for sure: in a cluster that is started here."""
        with _CONNECTING.here:  # another thread may be about to start it
            if self._ray.is_initialized():
                return self._node() in _STARTED
            return self._target() is None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the workers, and the cluster if it was started here and no other executor uses it.

        See `Executor.close`.
        """
        super().close()
        with _CONNECTING.here:
            atexit.unregister(self.close)
            for node, users in list(_STARTED.items()):
                users.discard(self)
                if not users:
                    del _STARTED[node]
                    if self._node() == node:  # Ray may have been connected anew since
                        self._ray.shutdown()

    def _node(self) -> str | None:
        """Returns the node that Ray is connected to."""
        return self._ray.get_runtime_context().get_node_id() if self._ray.is_initialized() else None

    def _target(self) -> str | None:
        """Returns the address of somebody's cluster; None: one of its own."""
        address = self._address or os.environ.get("RAY_ADDRESS") or None
        return None if address == "local" else address

    def _check_target(self) -> None:
        if (self._target() or "").startswith("ray://"):
            advice = "Run `ray start --address=HOST:PORT` on this machine and pass 'auto', or submit this as a Ray job."
            raise fail("address", "'auto' or 'host:port' of a cluster that this machine is part of", "ray://", advice)

    def _connect(self) -> None:
        with _CONNECTING.here:
            if not self._ray.is_initialized():
                self._start()
            users = _STARTED.get(self._node() or "")
            if users is not None and self not in users:
                self._check_room()
                users.add(self)
                atexit.register(self.close)

    def _start(self) -> None:
        """Connects to somebody's cluster, or starts one."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if self._target() is not None:
            self._init(address=self._target(), **quiet)
            return
        _check_closed(self._ray)
        cpus = max(1, math.ceil(self.num_workers * self._needs["num_cpus"]))
        resources = {name: math.ceil(self.num_workers * one) for name, one in self._needs["resources"].items()}
        self._init(
            address="local",
            include_dashboard=False,
            num_cpus=cpus,
            object_store_memory=STORE_BYTES,
            resources=resources,
            **quiet,
        )
        _STARTED[self._ray.get_runtime_context().get_node_id()] = set()

    def _check_room(self) -> None:
        """Leaves a cluster that was started here and that no worker would ever find what it needs in."""
        in_all, needs = self._ray.cluster_resources(), self._needs
        shares = "Another executor of this process started it, for its own workers: close it first."
        sees = "Ray counts those that it sees, by CUDA_VISIBLE_DEVICES where it is set."
        asked = [("num_gpus", "GPU", needs["num_gpus"], sees), ("num_cpus", "CPU", needs["num_cpus"], shares)]
        asked += [(f"resources[{name!r}]", name, one, shares) for name, one in needs["resources"].items()]
        for argument, name, needed, advice in asked:
            available = float(in_all.get(name, 0.0))
            if needed > available:
                self.close()
                raise fail(argument, f"at most {available:g}, all that the cluster of this process has", needed, advice)

    def _init(self, **options: Any) -> None:
        """Connects Ray; of what it raises only the class is named, as its text names hosts and files."""
        before = _servers_of(self._ray)
        try:
            self._ray.init(**options)
        except Exception as error:  # noqa: BLE001  whatever Ray raises
            kind = type(error).__name__
        else:
            return
        where, advice = "one at the address given", "Try `ray status`."
        if options["address"] == "local":
            # Ray leaves them up, and they slow the next attempt down. Where it is connected, they are another thread's.
            for server in set() if self._ray.is_initialized() else _servers_of(self._ray) - before:
                with suppress(Exception):  # it has just ended, or takes longer
                    server.kill()
                    server.wait(_END_SECONDS)
            where = "one that starts here"
            advice = (
                "A busy machine may exceed the time that Ray gives it: try again later, or run `ray start --head` and "
                "pass address='auto'."
            )
        raise ConfigurationError(f"executor: expected a Ray cluster, {where}, found none ({kind}). {advice}")

    # -- what `Executor` asks for ------------------------------------------------------------------------------------

    def _hire(self) -> Any:
        self._connect()
        if not self._hands:
            self._hired_in = self._session()
        is_one_host = self.is_one_host  # of the cluster that the worker is started in, however it was connected
        # Ray would start an actor again, or repeat what it was at: a second run on the first one's ticket.
        once = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": 1}
        actor = self._ray.remote(Worker).options(**once, **self._needs)
        return actor.remote(self._setup, is_one_host=is_one_host)

    def _dismiss(self, handle: Any) -> None:
        if self._ray.is_initialized():
            self._ray.kill(handle, no_restart=True)

    def _session(self) -> tuple[str, str] | None:
        """Returns which connection Ray has: handles are of no use in another one, and Ray would start a cluster."""
        if not self._ray.is_initialized():
            return None
        context = self._ray.get_runtime_context()
        return context.get_node_id(), context.get_job_id()

    def _check_session(self) -> None:
        if self._hands and self._session() != self._hired_in:
            self._hands, self._flights = [], {}

    def _make_room(self) -> None:
        # What Ray counts as free lags behind, and is without what a worker has that is starting.
        others = _STARTED.get(self._node() or "", set()) - {self}
        in_all: dict[str, float] = self._ray.cluster_resources() if others else {}

        def is_short(name: str, room: float) -> bool:
            needed = self._need_of(name)
            taken = sum(len(one._hands) * one._need_of(name) for one in others)  # noqa: SLF001  of this class
            return needed > 0.0 and round(taken + needed, 4) > room

        for other in others:
            if any(other._need_of(name) > 0.0 and is_short(name, room) for name, room in in_all.items()):  # noqa: SLF001
                other.rest()

    def _need_of(self, name: str) -> float:
        """Returns how much of a resource, by Ray's name, a worker needs."""
        needs = {"CPU": self._needs["num_cpus"], "GPU": self._needs["num_gpus"], **self._needs["resources"]}
        return float(needs.get(name, 0.0))

    def _begin(self, handle: Any, work: Job) -> Any:
        return handle.begin.remote(work)

    def _do(self, handle: Any, key: str, job: Any) -> Any:
        return handle.do.remote(key, job)

    def _ready(self, awaited: Sequence[Any], seconds: float) -> Sequence[Any]:
        ready, _ = self._ray.wait(list(awaited), num_returns=1, timeout=seconds)
        if ready and len(awaited) > 1:  # all that are there by now, in one look
            ready, _ = self._ray.wait(list(awaited), num_returns=len(awaited), timeout=0)
        return list(ready)

    def _answer(self, awaited: Any) -> JobResult | None:
        try:
            answer = self._ray.get(awaited)
        except self._ray.exceptions.RayError:
            return None  # the worker, its host or its memory is gone
        return answer if isinstance(answer, JobResult) else None

    def __repr__(self) -> str:
        return f"RayExecutor({self._setup.name!r}, num_workers={self.num_workers})"


def as_executor(executor: Any) -> Executor | LocalExecutor | None:
    """Returns an executor as it is, the one of the environment for "ray", and None for None."""
    if executor is None or isinstance(executor, Executor | LocalExecutor):
        return executor
    if executor == "ray":
        return RayExecutor.from_environment()
    shown = executor if isinstance(executor, str) else type(executor).__name__
    raise fail("executor", "'ray', a RayExecutor, a LocalExecutor or None", shown)


def _need(name: str, value: Any) -> float:
    """Returns how much of a resource a worker needs, if Ray can count it."""
    needed = check_real(name, value, low=0.0)
    if 0.0 < needed < _LEAST_NEED:
        raise fail(name, f"0, or a number of at least {_LEAST_NEED}", value)
    if name == "num_gpus" and needed > 1.0 and needed % 1.0:
        raise fail(name, "a whole number, or a part of one GPU", value)
    return needed


def _further_needs(resources: Any) -> dict[str, float]:
    """Returns what a worker needs beside CPUs and GPUs."""
    given: Mapping[Any, Any] = {} if resources is None else resources
    if not isinstance(given, Mapping) or not all(isinstance(name, str) and name for name in given):
        raise fail("resources", "a mapping of names to numbers, no name empty", type(resources).__name__)
    if known := sorted(_KNOWN_RESOURCES & set(given)):
        raise fail("resources", "names of further resources", known, "Use num_cpus and num_gpus.")
    return {name: _need(f"resources[{name!r}]", one) for name, one in given.items()}


def _plain(options: Any) -> dict[str, Any]:
    """Returns keyword arguments that are JSON values: no live object is pickled on its way to a worker."""
    plain = None
    if options is None or isinstance(options, Mapping):
        try:
            plain = json.loads(json.dumps(dict(options or {}), allow_nan=False))
        except (TypeError, ValueError):
            plain = None
    if plain is None:
        advice = "Name files and models; each worker opens its own."
        raise fail("options", "a mapping of JSON values", type(options).__name__, advice)
    if (place := _place_of_secret(plain)) is not None:
        advice = (
            "Ray shows arguments. Take PGPASSWORD, a password file, or a variable of the workers' environment. If "
            "it is the name of a field, call the option otherwise, such as question_field."
        )
        where = f"options[{'.'.join(place)!r}]" if place else "options"
        raise fail(where, "no password and no key", "what may be one (not shown)", advice)
    return dict(plain)


def _place_of_secret(value: Any, *names: str) -> tuple[str, ...] | None:
    """Returns which names lead to text that has a password, or stands under a name that keys have; None: there is none.

    `max_tokens=60` is no text. Of the names those are returned that hold no address.
    """
    if isinstance(value, dict):
        found = (names if _SECRET.search(key) else _place_of_secret(one, *names, key) for key, one in value.items())
        return next((place for place in found if place is not None), None)
    if isinstance(value, list):
        return next((place for one in value if (place := _place_of_secret(one, *names)) is not None), None)
    if not isinstance(value, str) or not value:
        return None
    last = names[-1]
    named = next((count for count, name in enumerate(names, 1) if _SECRET_NAME.search(name)), 0)
    is_key = _KEY.search(last) and not _FIELD_KEY.fullmatch(last.lower())
    if not (_SECRET.search(value) or ((named or is_key) and not _PLACE.search(last))):
        return None
    return tuple(itertools.takewhile(str.isidentifier, names[: named or None]))


def _import_ray(*, starts_its_own: bool) -> ModuleType:
    """Imports Ray; a cluster that it will start answers to those alone who have a token of this process."""
    if starts_its_own and "ray" not in sys.modules:  # which reads it as it is imported
        # Ray's ports are open to the network, and who may use them may run code as we do.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    ray: ModuleType | None = None
    with suppress(ImportError):
        ray = importlib.import_module("ray")
    if ray is None:
        raise ConfigurationError("executor: expected Ray, found none. Install it: pip install 'langchain-dpicl[ray]'.")
    if starts_its_own and not ray.is_initialized():
        _check_closed(ray)
    return ray


def _servers_of(ray: Any) -> set[Any]:
    """Returns the children of this process that run a program of Ray's own folder."""
    try:
        psutil: Any = importlib.import_module("psutil")  # Ray brings one
    except ImportError:
        return set()
    folder, found = f"{Path(ray.__file__).parent}{os.sep}", set()
    with suppress(psutil.Error, OSError):  # a system that does not show them
        for child in psutil.Process().children():
            with suppress(psutil.Error):  # it has just ended
                if any(word.startswith(folder) for word in child.cmdline()):
                    found.add(child)
    return found


def _check_closed(ray: Any) -> None:
    """Refuses to start a cluster that anybody who reaches its ports may use; Ray reads this once, as it is imported."""
    raylet = getattr(ray, "_raylet", None)
    mode = getattr(raylet, "get_authentication_mode", None)
    if mode is None or mode() != raylet.AuthenticationMode.TOKEN:  # type: ignore[union-attr]
        raise ConfigurationError(
            "executor: expected Ray to ask for a token, found that it was imported, or set up, without: a cluster of "
            "its own could not be closed to the network. Make the first RayExecutor before Ray is imported, set "
            "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN before the process starts, or connect Ray yourself."
        )


ExecutorLike = Executor | LocalExecutor | Literal["ray"] | None


__all__ = [
    "RayExecutor",
    "Workplace",
]
