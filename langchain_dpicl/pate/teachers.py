"""The teachers of a labelling: how they are drawn, and what pays for one input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from langchain_dpicl.backends.rows.label_rows import LabelRows
from langchain_dpicl.backends.sync_async import EffectGenerator
from langchain_dpicl.budget.events import RunEvents
from langchain_dpicl.pate.plan import LabellingPlan
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
from langchain_dpicl.tasks.labels import VotingTask
from langchain_dpicl.tasks.templates import Query

RecordRelease: TypeAlias = Callable[[Release, Reservation], None]
"""Stores a release, before its ticket is committed."""


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
            yield from release_once(
                self._private, ticket, keep=lambda released: keep(released, ticket), **self._how(query, ticket)
            )
        finally:
            events.tickets -= ticket.give_back()

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
        self._opened: tuple[SecretSample, Reservation] | None = None

    @property
    def left(self) -> int:
        """Number of further inputs that the share pays for."""
        if self._opened is not None:
            return min(self._opened[0].left, self._opened[0].answers_left)
        return self.plan.max_queries * self._share.remaining(SAMPLE_TEMPLATE)

    def ask(self, query: Query, events: RunEvents, keep: RecordRelease) -> EffectGenerator[None]:
        """Asks; see `Teachers.ask`. The ticket is committed after the first release."""
        sample, ticket = self._opened or self._open(events)
        keep((yield from sample.next_release(**self._question(query))), ticket)
        if ticket.uncommitted:
            ticket.commit()

    def _open(self, events: RunEvents) -> tuple[SecretSample, Reservation]:
        ticket = self._share.reserve(SAMPLE_TEMPLATE)
        events.tickets += 1
        plan = self.plan
        try:
            sample = open_sample(
                self._private, ticket, plan=plan.release, length=plan.max_queries, answers=plan.max_answers
            )
        finally:
            events.tickets -= ticket.give_back()
        self._opened = sample, ticket
        return self._opened


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
            released = yield from release_once(
                self._private,
                test,
                answer=answer,
                keep=lambda released: keep(released, test),
                **self._how(query, test),
            )
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
