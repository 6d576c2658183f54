"""Defines the protocol between driver and workers: orders, jobs, results and retries."""

# Orders, jobs and answers are public: they cross machines, and the operator of the cluster may read them. A job is
# handed out again only after its worker died, and then pays with tickets of its own, as any other job does.

from __future__ import annotations

import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Generator, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar, runtime_checkable

from langchain_dpicl import exceptions
from langchain_dpicl.backends.aside import aside
from langchain_dpicl.exceptions import (
    ConfigurationError,
    DPICLError,
    ModelCallError,
    PrivacyBudgetExceededError,
)
from langchain_dpicl.privacy._validate import check_positive

Kind: TypeAlias = Literal["done", "lost", "busy", "fault"]
Job = TypeVar("Job", bound=Hashable)
Made = TypeVar("Made")

MOST_DEATHS = 4
"""Workers that may die over one job, or as they start, before a run stops."""

START_SECONDS = 900.0
"""How long to wait for the first worker, unless told otherwise: a model may have to be loaded."""

BUSY_SECONDS = 180.0
"""How long a job is held out again while another run has its turn; at least for two turns as the memo has them."""

_END: Any = object()
_PAUSE = 0.25  # seconds between two looks at jobs that others have


@dataclass(frozen=True, slots=True)
class Answer:
    """What a worker says of a job; all of it is public.

    Attributes:
      kind: "done"; "lost": no ticket is left that could pay for it; "busy": another worker has its turn; "fault".
      told: of a job that is done, as JSON values; of one that is busy, how many seconds a turn lasts.
      tickets: tickets that were charged for it.
      error: class of a fault.
      message: of a fault of ours, whose messages are public; of others there is none.
      numbers: requested and remaining, where the budget refused.
    """

    kind: Kind
    told: Any = None
    tickets: int = 0
    error: str = ""
    message: str = ""
    numbers: tuple[float, float] | None = None

    @classmethod
    def of_fault(cls, error: BaseException, *, tickets: int = 0) -> Answer:
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
class Work(Protocol):
    """What is to be done elsewhere, in public terms; it is pickled, and begun once in each worker."""

    @property
    def key(self) -> str:
        """Public name of it: of all that tells it from others. It is the same after pickling."""

    def begin(self, place: Any) -> Callable[[Any], Answer]:
        """Checks a worker's place, and returns what does one job.

        Args:
          place: a `Workplace`.
        """


@dataclass(slots=True, eq=False)
class Hand:
    """One worker, as the one sees it who hands out jobs.

    Attributes:
      handle: what the executor knows it by.
      begun: keys of the works that it has begun.
    """

    handle: Any
    begun: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Flight:
    """A job in progress, or with `job` None an order being begun, for a run, since a time."""

    hand: Hand
    work: str
    job: Any
    run: object
    since: float


class Executor(ABC):
    """Hands jobs to workers. What they are and where they run is said by whoever derives from it.

    Formal guarantees:
      - A worker has one job at a time. One that died is replaced; its job is handed out again behind all others.
      - An answer that came is told, whatever came of others; a fault stops the handing out, not what is under way.
      - What was under way when a run was left is collected by the next one.

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
        self._hands: list[Hand] = []
        self._flights: dict[Any, _Flight] = {}
        self._turn = threading.Lock()

    # -- what a cluster has to do ------------------------------------------------------------------------------------

    @abstractmethod
    def _hire(self) -> Any:
        """Starts a worker without waiting for it; returns its handle."""

    @abstractmethod
    def _dismiss(self, handle: Any) -> None:
        """Ends a worker."""

    @abstractmethod
    def _begin(self, handle: Any, work: Work) -> Any:
        """Has a worker begin an order; returns a handle of its answer."""

    @abstractmethod
    def _do(self, handle: Any, key: str, job: Any) -> Any:
        """Has a worker do a job; returns a handle of its answer."""

    @abstractmethod
    def _ready(self, awaited: Sequence[Any], seconds: float) -> Sequence[Any]:
        """Returns handles whose answers have arrived, after at most so many seconds."""

    @abstractmethod
    def _answer(self, awaited: Any) -> Answer | None:
        """Returns an answer that has arrived; None if the worker died."""

    # -- handing out -------------------------------------------------------------------------------------------------

    def spread(self, work: Work, jobs: Sequence[Job]) -> Iterator[tuple[Job, Answer] | None]:
        """Hands out jobs and yields each with its answer as it comes; now and then None, for the caller to look up.

        Args:
          work: what is to be done.
          jobs: distinct and public.

        Raises:
          ConfigurationError: another run of this executor is under way, or a worker's place does not fit.
          ModelCallError: workers die as they start.
          DPICLError: what a worker raised as it began.
        """
        if not self._turn.acquire(blocking=False):
            raise ConfigurationError("executor: expected one run at a time, found another. Make one executor for each.")
        try:
            yield from _Run(self, work, jobs)
        finally:
            self._turn.release()

    def rest(self) -> None:
        """Ends all workers if none has a job and nobody hands any out; the next run starts others."""
        if self._turn.acquire(blocking=False):
            try:
                if all(flight.job is None for flight in self._flights.values()):
                    self.close()
            finally:
                self._turn.release()

    def close(self) -> None:
        """Ends all workers. A job under way is lost with the ticket that it burnt; what was released is kept."""
        hands, self._hands, self._flights = self._hands, [], {}
        for hand in hands:
            self._dismiss(hand.handle)


class _Run(Generic[Job]):
    """The state of one run: waiting and retried jobs, deaths of workers, charged tickets."""

    def __init__(self, executor: Executor, work: Work, jobs: Sequence[Job]) -> None:
        self.executor = executor
        self.work = work
        self.key = work.key
        self.open = set(jobs)
        under_way = {flight.job for flight in executor._flights.values() if flight.work == self.key}  # noqa: SLF001
        self.waiting = deque(job for job in jobs if job not in under_way)
        self.late: deque[Job] = deque()
        self.deaths: Counter[Any] = Counter()
        self.lost: set[Job] = set()
        self.busy_since: dict[Job, float] = {}
        self.charged: Counter[Job] = Counter()
        self.not_before = 0.0
        self.since = time.monotonic()
        self.stops = False

    def __iter__(self) -> Iterator[tuple[Job, Answer] | None]:
        executor = self.executor
        while self.open and not (self.stops and not self._mine()):
            self._hand_out()
            awaited = list(executor._flights)  # noqa: SLF001  its own module
            if not awaited:
                time.sleep(_PAUSE)
            ready = executor._ready(awaited, _PAUSE) if awaited else ()  # noqa: SLF001
            for one in ready:
                result = self._landed(one)
                if result is not None:
                    yield result
            if not ready:
                self._check_start()
                yield None

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
            return
        for one, flight in begins.items():  # the next run starts others
            del executor._flights[one]  # noqa: SLF001
            self._let_go(flight.hand)
            executor._dismiss(flight.hand.handle)  # noqa: SLF001
        msg = f"no worker has begun within {executor.start_timeout:g} s; look whether the cluster has room"
        raise ModelCallError(msg)

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
            idle.append(Hand(executor._hire()))  # noqa: SLF001
            executor._hands.append(idle[-1])  # noqa: SLF001
        for hand in itertools.islice(idle, wanted):
            if self.key not in hand.begun:
                self._fly(executor._begin(hand.handle, self.work), hand, None)  # noqa: SLF001
            elif (job := self._next()) is not None:
                self._fly(executor._do(hand.handle, self.key, job), hand, job)  # noqa: SLF001

    def _fly(self, awaited: Any, hand: Hand, job: Any) -> None:
        self.executor._flights[awaited] = _Flight(hand, self.key, job, self, time.monotonic())  # noqa: SLF001

    def _next(self) -> Job | None:
        if self.waiting:
            return self.waiting.popleft()
        # What comes late, comes after all others: what they leave over may pay for it.
        if self.late and time.monotonic() >= self.not_before:
            return self.late.popleft()
        return None

    def _landed(self, awaited: Any) -> tuple[Job, Answer] | None:
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

    def _began(self, flight: _Flight, answer: Answer) -> None:
        if answer.kind == "done":
            flight.hand.begun.add(flight.work)
            self.deaths.pop(("begin",), None)  # only deaths in a row stop a run
            return
        self._let_go(flight.hand)
        self.executor._dismiss(flight.hand.handle)  # noqa: SLF001
        if flight.run is self:
            raise answer.as_error()  # of a run that was left it says nothing of what is there now

    def _let_go(self, hand: Hand) -> None:
        if hand in self.executor._hands:  # noqa: SLF001
            self.executor._hands.remove(hand)  # noqa: SLF001

    def _died(self, flight: _Flight) -> tuple[Job, Answer] | None:
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
            return self._told(flight.job, Answer("fault", error="ModelCallError", message=message))
        self.late.append(flight.job)
        return None

    def _told(self, job: Job, answer: Answer) -> tuple[Job, Answer] | None:
        self.charged[job] += answer.tickets
        if answer.kind == "busy":
            since = self.busy_since.setdefault(job, time.monotonic())
            if time.monotonic() - since < max(BUSY_SECONDS, 2.0 * (answer.told or 0.0)):
                self.not_before = time.monotonic() + _PAUSE
                self.late.append(job)
                return None
            message = "expected no other run of this component, found one that has the turn. Wait for its end."
            answer = Answer("fault", error="ConfigurationError", message=message)
        if answer.kind == "lost" and job not in self.lost and len(self.open) > 1:
            self.lost.add(job)  # once more behind all others, which may give tickets back
            self.late.append(job)
            return None
        self.open.discard(job)
        self.stops = self.stops or answer.kind == "fault"
        return job, replace(answer, tickets=self.charged.pop(job))  # of every time that it was asked for


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Workers, and what they are told.

    Attributes:
      executor: who hands out the jobs.
      work: what is to be done; items have its jobs.
      is_ours: whether the executor is nobody else's, and is closed whenever a run ends with no job under way.
    """

    executor: Executor
    work: Work
    is_ours: bool = False

    def rest(self) -> None:
        """Ends the workers behind a run, where they are nobody else's."""
        if self.is_ours:
            self.executor.rest()


async def taken_aside(made: Generator[Made | None]) -> AsyncGenerator[Made]:
    """Yields the results of a run, each step in a thread; a step without a result lets a cancellation in."""
    try:
        while (result := await aside(lambda: next(made, _END))) is not _END:
            if result is not None:
                yield result
    finally:
        await aside(made.close)


def not_paid(component: str, missing: int) -> PrivacyBudgetExceededError:
    """Returns the error for jobs whose tickets burnt in dead workers or stopped runs."""
    msg = (
        f"{component!r}: requested {missing} more, remaining 0: the tickets that were to pay for them burnt in "
        "workers or runs that were stopped. What was released is kept; declare another component for more."
    )
    return PrivacyBudgetExceededError(msg, requested=missing, remaining=0)


__all__ = ["Answer", "Elsewhere", "Executor", "Hand", "Work", "not_paid", "taken_aside"]
