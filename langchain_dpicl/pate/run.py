"""Runs a labelling: draws and pays the teachers of each waiting input, keeps every release, and resumes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any, TypeAlias

from langchain_dpicl._construction import tells_how_to_build
from langchain_dpicl._opaque import Uncopyable
from langchain_dpicl.backends.rows.label_rows import LabelRows
from langchain_dpicl.backends.sync_async import (
    AcquireGate,
    EffectGenerator,
    FairSemaphore,
    run_async,
    run_in_thread,
    run_sync,
)
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.budget.events import RunEvents
from langchain_dpicl.budget.handler import describe_tickets_left
from langchain_dpicl.distributed.executor import RemoteExecution, iterate_in_threads
from langchain_dpicl.exceptions import (
    ConfigurationError,
    DPICLError,
    ModelCallError,
    PrivacyBudgetExceededError,
    RunInterruptedError,
)
from langchain_dpicl.pate.inputs import InputTemplate, key_of
from langchain_dpicl.pate.plan import LabellingPlan
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.privacy.extensions.confident_gnmax import ConfidentGNMaxMechanism
from langchain_dpicl.privacy.extensions.method_tickets import (
    ANSWER_TEMPLATE,
    LABEL_TEMPLATE,
    SAMPLE_TEMPLATE,
    TEST_TEMPLATE,
)
from langchain_dpicl.privacy.ledger.shares import Reservation, Share
from langchain_dpicl.privacy.mechanisms.noise import Release
from langchain_dpicl.release.curator import open_sample
from langchain_dpicl.release.dealt_sample import Partition, open_partition, release_once
from langchain_dpicl.release.sample import SecretSample, is_unanswered
from langchain_dpicl.released.labelled_pool import LabelledPool, PoolEntry
from langchain_dpicl.runs.streamed_run import carrying, new_bar, report_of, tick
from langchain_dpicl.tasks.labels import VotingTask
from langchain_dpicl.tasks.templates import Query

RecordRelease: TypeAlias = Callable[[Release], None]


class Teachers:
    """Teachers with a ticket per input: a fresh secret sample for each input, or the same partition.

    Formal guarantees:
      - One input is one ticket, or one release on a ticket's sample; it is reserved before any private record is read
        and stays charged once it has burnt.
    """

    def __init__(
        self, private: PrivateExamples, share: Share, *, plan: LabellingPlan, task: VotingTask, rows: LabelRows
    ) -> None:
        self.plan = plan
        self.task = task
        self.rows = rows
        self._private = private
        self._share = share
        self._partition: Partition | None = None

    @property
    def left(self) -> int:
        """Number of further inputs that the share pays for."""
        return self._share.remaining(LABEL_TEMPLATE)

    @property
    def used(self) -> int:
        """Number of inputs that the share has paid for, over all processes."""
        return self.plan.max_queries - self.left

    def ask(self, query: Query, events: RunEvents, keep: RecordRelease) -> EffectGenerator[None]:
        """Asks the teachers about one public input (a generator); calls `keep` before the ticket is committed."""
        ticket = self._share.reserve(LABEL_TEMPLATE)
        events.tickets += 1
        try:
            yield from release_once(self._private, ticket, keep=keep, **self._how(query, ticket))
        finally:
            events.tickets -= ticket.give_back()

    def settle(self) -> None:
        """Commits releases that are stored by now; here every release is committed at once."""

    def _how(self, query: Query, ticket: Reservation) -> dict[str, Any]:
        if self.plan.teachers == "fixed" and self._partition is None:
            plan = self.plan.release
            # Opened once and kept: a partition that is drawn again would be another mechanism.
            self._partition = open_partition(self._private, plan=plan, ledger_id=ticket.ledger_id)
        return {"plan": self.plan.release, "partition": self._partition, **self._question(query)}

    def _question(self, query: Query) -> dict[str, Any]:
        render = self.task.wording.renderer(self.task.queries(query))
        return {"rows": self.rows.ask, "render": render, "width": self.rows.width}


class SingleSampleTeachers(Teachers):
    """Teachers from one secret sample for the whole run: one ticket, burnt by the first input."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._ticket: Reservation | None = None
        self._sample: SecretSample | None = None

    @property
    def left(self) -> int:
        """Number of further inputs that the share pays for."""
        if self._sample is not None:
            return min(self._sample.left, self._sample.answers_left)
        return self.plan.max_queries * self._share.remaining(SAMPLE_TEMPLATE)

    def ask(self, query: Query, events: RunEvents, keep: RecordRelease) -> EffectGenerator[None]:
        """Asks; see `Teachers.ask`."""
        if self._sample is None:
            self._open(events)
        if self._sample is not None:
            keep((yield from self._sample.next_release(**self._question(query))))

    def _open(self, events: RunEvents) -> None:
        ticket = self._share.reserve(SAMPLE_TEMPLATE)
        events.tickets += 1
        plan = self.plan
        try:
            self._sample = open_sample(
                self._private, ticket, plan=plan.release, length=plan.max_queries, answers=plan.max_answers
            )
            self._ticket = ticket
        finally:
            events.tickets -= ticket.give_back()

    def settle(self) -> None:
        """Commits the ticket, once."""
        if self._ticket is not None and self._ticket.uncommitted:
            self._ticket.commit()


class TestedTeachers(Teachers):
    """Teachers of a partition whose tests and answers have separate tickets."""

    @property
    def used(self) -> int:
        """Number of inputs that the share has paid for, over all processes."""
        return self.plan.max_queries - self._share.remaining(TEST_TEMPLATE)

    @property
    def left(self) -> int:
        """Number of further inputs that the share pays for."""
        return min(self._share.remaining(TEST_TEMPLATE), self._share.remaining(ANSWER_TEMPLATE))

    def ask(self, query: Query, events: RunEvents, keep: RecordRelease) -> EffectGenerator[None]:
        """Asks; see `Teachers.ask`."""
        # Both tickets are reserved first: a test without a ticket for its answer could not be completed.
        answer = self._share.reserve(ANSWER_TEMPLATE)
        events.tickets += 1
        try:
            test = self._share.reserve(TEST_TEMPLATE)
        except BaseException:
            events.tickets -= answer.give_back()
            raise
        events.tickets += 1
        try:
            released = yield from release_once(self._private, test, answer=answer, keep=keep, **self._how(query, test))
        finally:
            if test.unburnt:  # no record was read: both are handed back
                events.tickets -= test.give_back() + answer.give_back()
        # A test that fails releases no answer, and the curator hands the answer's ticket back.
        events.tickets -= is_unanswered(released)


def teachers_of(
    private: PrivateExamples, share: Share, *, plan: LabellingPlan, task: VotingTask, rows: LabelRows
) -> Teachers:
    """Returns the teachers of a plan."""
    is_tested = isinstance(plan.release.mechanism, ConfidentGNMaxMechanism)
    kind: type[Teachers] = SingleSampleTeachers if plan.teachers == "one_sample" else Teachers
    if plan.teachers == "fixed" and is_tested:
        kind = TestedTeachers
    return kind(private, share, plan=plan, task=task, rows=rows)


@tells_how_to_build()
class LabellingRun(Uncopyable):
    """A run over public inputs that can stop and resume. Made by `PromptPATELabeler`."""

    def __init__(
        self,
        teachers: Teachers,
        entries: Sequence[PoolEntry],
        *,
        inputs: InputTemplate,
        engine: Any,
        budget: Budget,
        share: Share,
        public: Mapping[str, Any],
        checkpoint: Path | None,
        elsewhere: RemoteExecution | None = None,
    ) -> None:
        self.plan: LabellingPlan = teachers.plan
        self.task: VotingTask = teachers.task
        self.rows: LabelRows = teachers.rows
        self.inputs = inputs
        self.engine = engine
        _check_paid(entries, used=teachers.used)
        self._teachers = teachers
        self._entries = list(entries)
        self._places = {key_of(entry.fields): place for place, entry in enumerate(self._entries)}
        self._budget = budget
        self._share = share
        self._public = dict(public)
        self._checkpoint = checkpoint
        self._is_behind = True  # the checkpoint does not hold all releases
        self._gate = FairSemaphore(1)
        self._holder: tuple[int, int | None] | None = None
        self._growing = threading.Lock()
        self._elsewhere = elsewhere

    @property
    def may_wait(self) -> bool:
        """Whether a ledger call may block, so that async code runs it in a thread."""
        return self._budget.durable

    @property
    def queries_left(self) -> int:
        """Number of further inputs that can be paid for."""
        return self._teachers.left

    @property
    def pool(self) -> LabelledPool:
        """Every input with its status and label, and the privacy report (public)."""
        report = report_of(self._budget, self._share, self.plan)
        shown = {label: texts[0].strip() for label, texts in self.task.texts.items()}
        key, labels = self.inputs.label_key, self.task.labels
        return LabelledPool(
            tuple(self._entries), label_key=key, labels=labels, shown=shown, report=report, plan=self._public
        )

    def run(self, *, progress: bool | None = None) -> LabelledPool:
        """Labels the waiting inputs until none waits or the share is spent, and returns the pool.

        Args:
          progress: True shows a bar, False hides it, None shows it on a terminal only.

        Raises:
          RunInterruptedError: the public model call failed; labels released so far are kept, and calling `run`
            again continues. Other errors and Ctrl-C have the attribute `run` too.
          PrivacyBudgetError: the share no longer fits the budget.
        """
        for _ in self.stream(progress=progress):
            pass
        return self.pool

    async def arun(self, *, progress: bool | None = None) -> LabelledPool:
        """Asynchronous version of `run`; the teachers of one input are asked concurrently."""
        async for _ in self.astream(progress=progress):
            pass
        return await run_in_thread(lambda: self.pool, is_slow=self.may_wait)

    def stream(self, *, progress: bool | None = None) -> Iterator[PoolEntry]:
        """Yields each input as soon as it is labelled or rejected; errors as in `run`."""
        if self._elsewhere is not None:
            with self._bar(progress, self._payable()) as bar, closing(self._run_remotely(self._elsewhere, bar)) as made:
                for entry in made:
                    if entry is not None:
                        yield entry
            return
        with self._bar(progress, self._payable()) as bar:
            for place in self._waiting():
                failure = ""
                with self._events() as events, carrying(run=self):
                    try:
                        is_done = run_sync(self._serialised(place, events, _caller()))
                    except ModelCallError as error:
                        failure = str(error)
                self._check_done(failure)
                if not is_done:
                    break
                tick(bar)
                yield self._entries[place]
        self._settle()

    async def astream(self, *, progress: bool | None = None) -> AsyncIterator[PoolEntry]:
        """Asynchronous version of `stream`."""
        is_slow = self.may_wait
        if self._elsewhere is not None:
            with self._bar(progress, await run_in_thread(self._payable)) as bar:
                async with aclosing(iterate_in_threads(self._run_remotely(self._elsewhere, bar))) as made:
                    async for entry in made:
                        yield entry
            return
        with self._bar(progress, await run_in_thread(self._payable, is_slow=is_slow)) as bar:
            for place in self._waiting():
                failure = ""
                async with self._events() as events:
                    with carrying(run=self):
                        try:
                            is_done = await run_async(self._serialised(place, events, _caller()), is_slow=is_slow)
                        except ModelCallError as error:
                            failure = str(error)
                self._check_done(failure)
                if not is_done:
                    break
                tick(bar)
                yield self._entries[place]
        await run_in_thread(self._settle, is_slow=is_slow)

    def label(self, given: Any) -> PoolEntry:
        """Labels one more public input, at the cost of one query; free if the input is answered already.

        Args:
          given: a text, a document, or a dict of the fields that an example shows; public.

        Raises:
          PrivacyBudgetExceededError: the share is spent.
          ModelCallError: the public model call failed; nothing was charged.
          ConfigurationError: the input lacks a field.
        """
        place = self._place(given)
        if self._elsewhere is not None:
            return self._label_remotely(self._elsewhere, place)
        if self._entries[place].status == "waiting":
            with self._events() as events, carrying(run=self):
                if not run_sync(self._serialised(place, events, _caller())):
                    raise self._spent()
            self._settle()
        return self._entries[place]

    async def alabel(self, given: Any) -> PoolEntry:
        """Asynchronous version of `label`."""
        place = await run_in_thread(lambda: self._place(given), is_slow=self.may_wait)
        elsewhere = self._elsewhere
        if elsewhere is not None:
            return await run_in_thread(lambda: self._label_remotely(elsewhere, place))
        if self._entries[place].status == "waiting":
            async with self._events() as events:
                with carrying(run=self):
                    if not await run_async(self._serialised(place, events, _caller()), is_slow=self.may_wait):
                        raise self._spent()
            await run_in_thread(self._settle, is_slow=self.may_wait)
        return self._entries[place]

    def _label_remotely(self, elsewhere: RemoteExecution, place: int) -> PoolEntry:
        """Has a worker label one input; the memo then holds the label for every run."""
        if self._entries[place].status == "waiting":
            with self._bar(progress=False, total=1) as bar:
                for _ in self._run_remotely(elsewhere, bar, [place]):
                    pass
            if self._entries[place].status == "waiting":
                raise self._spent()
        return self._entries[place]

    def _place(self, public_input: Any) -> int:
        """Returns the position of an input, appending it if it is new."""
        fields = self.inputs.fields_of(public_input)
        with self._growing:
            place = self._places.setdefault(key_of(fields), len(self._entries))
            if place == len(self._entries):
                self._entries.append(PoolEntry(fields=fields, label=None, status="waiting"))
            return place

    def _serialised(self, place: int, events: RunEvents, me: tuple[int, int | None]) -> EffectGenerator[bool]:
        """Labels one input under the lock of the run (a generator): concurrent calls label one input at a time."""
        if self._holder == me or not (yield AcquireGate(self._gate)):  # waiting would deadlock
            msg = "label: expected no call inside another one, nor a blocking call below a running event loop."
            raise ConfigurationError(f"{msg} Use alabel.")
        self._holder = me
        try:
            return (yield from self._label(place, events))
        finally:
            self._holder = None
            self._gate.__exit__(None, None, None)

    def _label(self, place: int, events: RunEvents) -> EffectGenerator[bool]:
        """Labels one input (an effect generator); False: the share is spent."""
        if self._entries[place].status != "waiting":
            return True  # another call answered it meanwhile
        if not self._teachers.left:
            return False
        query = self.inputs.query_of(self._entries[place].fields)
        yield self.rows.request_public_rows([self.task.wording.renderer(self.task.queries(query))(())])

        def keep(released: Release) -> None:
            self._entries[place] = self._answered(self._entries[place], released)
            self._is_behind = True
            self._save()

        self._save()  # writes the component's name before anything is charged, and detects a full disk
        try:
            yield from self._teachers.ask(query, events, keep)
        except PrivacyBudgetExceededError:
            if self._teachers.left:  # another reason than a spent share
                raise
            return False  # another run of the same share took the last ticket meanwhile
        return True

    def _save(self) -> None:
        """Writes the checkpoint if it is out of date."""
        with self._growing:  # an older pool must not overwrite a newer one
            if self._checkpoint is not None and self._is_behind:
                self.pool.save(self._checkpoint)
                self._is_behind = False

    def _run_remotely(
        self, elsewhere: RemoteExecution, bar: Any, waiting: Sequence[int] | None = None
    ) -> Generator[PoolEntry | None]:
        """Has workers label the given positions, or all waiting inputs."""
        try:
            yield from self._spread(elsewhere, bar, list(self._waiting()) if waiting is None else waiting)
        finally:
            elsewhere.rest()

    def _spread(self, elsewhere: RemoteExecution, bar: Any, waiting: Sequence[int]) -> Generator[PoolEntry | None]:
        """Has workers label inputs; takes every result before it reports a fault."""
        self._save()
        places = {key_of(self._entries[place].fields): place for place in waiting}
        faults: list[DPICLError] = []
        is_unpaid = False
        with self._events() as events, carrying(run=self):
            try:
                for one in elsewhere.executor.spread(elsewhere.work, list(places)):
                    if one is None:
                        yield None
                        continue
                    job, answer = one
                    events.tickets += answer.tickets
                    if answer.kind == "done":
                        entry = self._entries[places[job]] = PoolEntry.from_dict(answer.result)
                        self._is_behind = True
                        self._save()
                        tick(bar)
                        yield entry
                    elif answer.kind == "fault":
                        faults.append(answer.as_error())
                    else:
                        is_unpaid = True
            except ModelCallError as error:
                faults.append(error)
            # A refusal matters more than a failed call, which a rerun may repair.
            refusal = next((fault for fault in faults if not isinstance(fault, ModelCallError)), None)
            if refusal is not None:
                raise refusal
        unpaid = (
            "some inputs found no ticket, and tickets were handed back afterwards"
            if is_unpaid and self.queries_left
            else ""
        )
        self._check_done(str(faults[0]) if faults else unpaid)

    def _settle(self) -> None:
        """Commits releases once the checkpoint holds them; an earlier write may have failed."""
        with carrying(run=self):
            if any(entry.status != "waiting" for entry in self._entries):
                self._save()
            with self._growing:
                self._teachers.settle()

    def _answered(self, entry: PoolEntry, released: Release) -> PoolEntry:
        """Returns the entry with the label or rejection of a release (post-processing)."""
        labels = self.task.labels
        place, votes = released.index, None
        if released.values is not None:
            values = [float(value) for value in released.values]
            place = max(range(len(values)), key=values.__getitem__)
            names = (*labels, *([self._public["other_label"]] if len(values) > len(labels) else []))
            votes = dict(zip(names, values, strict=True))
            if self.plan.threshold is not None and values[place] < self.plan.threshold:
                place = None
        if place is None or place >= len(labels):
            return PoolEntry(fields=entry.fields, label=None, status="rejected", votes=votes)
        return PoolEntry(fields=entry.fields, label=labels[place], status="labelled", votes=votes)

    def _waiting(self) -> Iterator[int]:
        return (place for place, entry in enumerate(list(self._entries)) if entry.status == "waiting")

    def _events(self) -> RunEvents:
        return RunEvents(type(self).__name__, budget=self._budget, share=self._share)

    def _check_done(self, failure: str) -> None:
        """Raises the interruption outside the handler, so that it has no cause."""
        if failure:
            done = sum(entry.status != "waiting" for entry in self._entries)
            msg = (
                f"Labelling stopped: {failure.rstrip('.')}. {done} of {len(self._entries)} inputs are done and kept; "
                "tickets that burnt stay charged. Call run() on error.run to continue."
            )
            raise RunInterruptedError(msg, run=self)

    def _spent(self) -> PrivacyBudgetExceededError:
        msg = (
            f"label: requested 1 query of {self._share.component!r}, remaining 0. Its {self.plan.max_queries} queries "
            "are spent; build another component for more."
        )
        return PrivacyBudgetExceededError(msg, requested=1, remaining=0)

    def _payable(self) -> int:
        """Returns how many of the waiting inputs can be paid for."""
        return min(self.queries_left, sum(entry.status == "waiting" for entry in self._entries))

    @staticmethod
    def _bar(progress: bool | None, total: int) -> Any:
        return new_bar(total, "input", "private labels", progress=progress)

    def __repr__(self) -> str:
        queries_left = describe_tickets_left(lambda: self.queries_left)
        return f"PromptPATELabeler(component={self._share.component!r}, queries_left={queries_left})"


def _caller() -> tuple[int, int | None]:
    """Returns the calling thread and asyncio task, which detects a call inside another one."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs here
        task = None
    return threading.get_ident(), None if task is None else id(task)


def _check_paid(entries: Sequence[PoolEntry], *, used: int) -> None:
    """Refuses a checkpoint with more releases than the share has paid for."""
    released = sum(entry.status in {"labelled", "rejected"} for entry in entries)
    if released > used:
        expected = f"at most the {used} labels that this component has paid for on this ledger"
        raise fail("checkpoint", expected, released, "Give the component that paid, or another file.")
