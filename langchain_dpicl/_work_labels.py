"""Labelling public inputs elsewhere: what a worker is told, and how it keeps each release before its commit.

Knows inputs, plans and the memo of released labels; records, votes and sums are the curator's.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from langchain_dpicl._labelling_options import InputWording
from langchain_dpicl._labelling_run import LabellingRun
from langchain_dpicl._voting_options import VotingTask
from langchain_dpicl.backends.label_rows import LabelRows
from langchain_dpicl.backends.resolve import as_choice_backend
from langchain_dpicl.declaring import declare_share
from langchain_dpicl.exceptions import MemoError, PrivacyBudgetExceededError
from langchain_dpicl.executors import Answer
from langchain_dpicl.labelled_pool import PoolEntry
from langchain_dpicl.labelling_planning import LabellingPlan
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.stores import MemoKey, ReleaseMemo
from langchain_dpicl.stores.memos import query_of, scope_of, tenant_of
from langchain_dpicl.teachers import teachers_of
from langchain_dpicl.working import Workplace

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
        """Public name: of ledger and component."""
        return f"{self.ledger_id}/{self.component}"

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
            private, budget, self.plan, component=self.component, epsilon=self.epsilon, public=self.public
        )
        scope = scope_of({"work": "label", "component": self.key, "dataset_id": private.dataset_id, **self.public})
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
    _at: tuple[MemoKey, int] | None = None

    def keep_in(self, memo: ReleaseMemo, scope: str) -> None:
        """Says where releases are kept."""
        self._memo, self._scope = memo, scope

    def answer(self, job: InputJob) -> Answer:
        """Returns the label that stands in the memo, or has it released and puts it there."""
        key = MemoKey(self._scope, tenant_of(""), query_of([part for pair in job for part in pair]))
        told = self._memo.recall(key)
        if told is not None:
            return Answer("done", json.loads(told))
        holder, left = secrets.token_hex(16), self.queries_left
        if not self._memo.claim(key, holder):
            return Answer("busy")
        try:
            told = self._memo.recall(key)
            entry = PoolEntry.from_dict(json.loads(told)) if told is not None else self._ask(job, key)
        except PrivacyBudgetExceededError:
            return Answer("lost")
        except Exception as error:  # noqa: BLE001  told by its kind
            return Answer.of_fault(error, tickets=min(1, max(0, left - self.queries_left)))
        finally:
            self._memo.leave(key, holder)
        return Answer("done", entry.to_dict(), tickets=int(told is None))

    def _ask(self, job: InputJob, key: MemoKey) -> PoolEntry:
        place = self._place(dict(job))
        # A release that was stopped before it stood in the memo is not told, and waits again.
        self._entries[place] = dataclasses.replace(self._entries[place], label=None, status="waiting", votes=None)
        self._at = key, place
        try:
            return self.label(dict(job))
        finally:
            self._at = None

    def _save(self) -> None:
        """Keeps the release that was just made."""
        if self._at is None or self._entries[self._at[1]].status == "waiting":
            return
        key, place = self._at
        told = json.dumps(self._entries[place].to_dict())
        self._memo.remember(key, told)
        if self._memo.recall(key) != told:
            raise MemoError("memo: expected no label for this input, found that another run has released one.")


__all__ = ["InputJob", "LabelWork"]
