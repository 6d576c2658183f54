"""Labelling public inputs elsewhere: what a worker is told, and how it keeps each release before its commit.

Knows inputs, plans and the memo of released labels; records, votes and sums are the curator's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from langchain_dpicl._labelling_options import InputWording
from langchain_dpicl._labelling_run import LabellingRun
from langchain_dpicl._voting_options import VotingTask
from langchain_dpicl.backends.label_rows import LabelRows
from langchain_dpicl.backends.resolve import as_choice_backend
from langchain_dpicl.declaring import declare_share
from langchain_dpicl.exceptions import PrivacyBudgetExceededError
from langchain_dpicl.executors import Answer
from langchain_dpicl.labelled_pool import PoolEntry
from langchain_dpicl.labelling_planning import LabellingPlan
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.run_events import RunEvents
from langchain_dpicl.stores import MemoKey, ReleaseMemo
from langchain_dpicl.stores.memos import query_of, scope_of, tenant_of
from langchain_dpicl.teachers import teachers_of
from langchain_dpicl.working import JobTurn, TurnLostError, Workplace

InputJob: TypeAlias = tuple[tuple[str, str], ...]
"""The fields of a public input, sorted by name."""


@dataclass(frozen=True, slots=True)
class LabelWork:
    """The order to label public inputs; public, and made from what the driver has planned.

    Attributes:
      ledger_id: the driver's ledger.
      component: whose share pays.
      epsilon: the share as it was asked for.
      plan: what is released, and what it costs.
      task: what is voted on.
      inputs: how inputs read.
      public: what reports show of the plan.
      reads: whether votes are calibrated, and whether those without a label count.
    """

    ledger_id: str
    component: str
    epsilon: float | None
    plan: LabellingPlan
    task: VotingTask
    inputs: InputWording
    public: Mapping[str, Any]
    reads: tuple[bool, bool]

    def __post_init__(self) -> None:
        if self.plan.teachers != "fresh":
            advice = "One secret sample, or one partition, stays in one process."
            raise fail("teachers", "'fresh' with an executor", self.plan.teachers, advice)

    @property
    def key(self) -> str:
        """Public name: of the whole order, so that no worker takes one for another of the same component."""
        return f"{self.ledger_id}/{self.component}/{query_of([repr(self)])}"

    def begin(self, place: Workplace) -> Callable[[InputJob], Answer]:
        """Declares the same share from the worker's own examples, and returns what labels one input.

        Raises:
          ConfigurationError: the worker's model is another, or its place lacks something.
          PrivacyBudgetError: the worker's ledger, or what its examples declare, is another.
        """
        private, budget, memo = place.paid(ledger_id=self.ledger_id, num_jobs=self.plan.max_queries)
        engine = as_choice_backend(place.llm, votes="text" if self.task.votes == "text" else None)
        calibrate, other = self.reads
        rows = LabelRows(engine, list(self.task.texts.values()), calibrate=calibrate, other=other)
        found = {"model": getattr(engine, "name", type(engine).__name__), "reads": rows.kind}
        changed = sorted(name for name in found if found[name] != self.public[name])
        if changed:
            raise fail("workplace", "the model that the plan was made with", f"another in {changed}")
        share = declare_share(
            private,
            budget,
            self.plan,
            component=self.component,
            epsilon=self.epsilon,
            public=self.public,
            engines=[rows],
        )
        where = f"{self.ledger_id}/{self.component}"
        scope = scope_of({"work": "label", "component": where, "dataset_id": private.dataset_id, **self.public})
        run = _KeptRun(
            teachers_of(private, share, plan=self.plan, task=self.task, rows=rows),
            [],
            inputs=self.inputs,
            engine=engine,
            budget=budget,
            share=share,
            public=self.public,
            checkpoint=None,
        )
        run.keep_in(memo, scope)
        return run.answer


class _KeptRun(LabellingRun):
    """A run over the inputs that one worker is given; each release is in the memo before its ticket is committed."""

    _memo: ReleaseMemo
    _scope: str
    _at: tuple[MemoKey, int, JobTurn] | None = None
    _paid: RunEvents | None = None

    def keep_in(self, memo: ReleaseMemo, scope: str) -> None:
        """Says where releases are kept."""
        self._memo, self._scope = memo, scope

    def answer(self, job: InputJob) -> Answer:
        """Returns the label that stands in the memo, or has it released and puts it there."""
        key = MemoKey(self._scope, tenant_of(""), query_of([part for pair in job for part in pair]))
        told = self._memo.recall(key)
        if told is not None:
            return Answer("done", json.loads(told))
        turn, self._paid = JobTurn(self._memo, key), None
        if not turn.take():
            return turn.busy()
        try:
            told = self._memo.recall(key)
            entry = self._asked(job, key, turn) if told is None else PoolEntry.from_dict(json.loads(told))
        except TurnLostError:
            return turn.busy(tickets=self._charged())
        except PrivacyBudgetExceededError as error:
            return Answer.of_fault(error) if self.queries_left else Answer("lost")
        except Exception as error:  # noqa: BLE001  told by its kind
            return Answer.of_fault(error, tickets=self._charged())
        finally:
            turn.leave()
        return Answer("done", entry.to_dict(), tickets=self._charged())

    def _charged(self) -> int:
        return 0 if self._paid is None else self._paid.tickets

    def _events(self) -> RunEvents:
        self._paid = super()._events()
        return self._paid

    def _asked(self, job: InputJob, key: MemoKey, turn: JobTurn) -> PoolEntry:
        """Returns a label that is in the memo now."""
        place = self._place(dict(job))
        self._at = key, place, turn
        try:
            if self._entries[place].status != "waiting":  # released before, when the memo could not be written
                self._save()
                return self._entries[place]
            return self.label(dict(job))
        finally:
            self._at = None

    def _save(self) -> None:
        """Keeps the release that was just made; before it is paid for, looks whether the turn is still ours.

        Raises:
          TurnLostError: another worker has released a label for this input, or is about to.
          MemoError: the memo cannot be used.
        """
        if self._at is None:
            return
        key, place, turn = self._at
        if self._entries[place].status == "waiting":
            turn.check(None)
            return
        told = json.dumps(self._entries[place].to_dict())
        self._memo.remember(key, told)
        if self._memo.recall(key) != told:
            raise TurnLostError("memo: expected no label for this input, found that another run has released one.")


__all__ = ["InputJob", "LabelWork"]
