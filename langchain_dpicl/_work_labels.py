"""Labels public inputs in a worker, and stores each release in a shared memo before its ticket is committed."""

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
    """The job of labelling public inputs, built from the driver's plan; public.

    Attributes:
      ledger_id: the driver's ledger.
      component: the component whose share pays.
      epsilon: the requested share.
      plan: the driver's plan.
      task: labels and prompt templates.
      inputs: templates of inputs.
      public: the plan as reports show it.
      reads: whether votes are calibrated, and whether votes without a label count.
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
        """Public key of the whole job, so that a worker never confuses two jobs of one component."""
        return f"{self.ledger_id}/{self.component}/{query_of([repr(self)])}"

    def begin(self, place: Workplace) -> Callable[[InputJob], Answer]:
        """Declares the same share from the worker's own examples, and returns the function that labels one input."""
        private, budget, memo = place.paid(ledger_id=self.ledger_id, num_jobs=self.plan.max_queries)
        engine = as_choice_backend(place.llm, votes="text" if self.task.votes == "text" else None)
        calibrate, other = self.reads
        rows = LabelRows(engine, list(self.task.texts.values()), calibrate=calibrate, other=other)
        model = {"model": getattr(engine, "name", type(engine).__name__), "reads": rows.kind}
        changed = sorted(name for name in model if model[name] != self.public[name])
        if changed:
            raise fail("workplace", "the model that the plan was made with", f"differences in {changed}")
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
    """A run over the inputs of one worker; each release is in the memo before its ticket is committed."""

    _memo: ReleaseMemo
    _scope: str
    _at: tuple[MemoKey, int, JobTurn] | None = None
    _paid: RunEvents | None = None

    def keep_in(self, memo: ReleaseMemo, scope: str) -> None:
        """Sets the memo and the scope of releases."""
        self._memo, self._scope = memo, scope

    def answer(self, job: InputJob) -> Answer:
        """Returns the label in the memo, or releases one and stores it."""
        key = MemoKey(self._scope, tenant_of(""), query_of([part for pair in job for part in pair]))
        text = self._memo.recall(key)
        if text is not None:
            return Answer("done", json.loads(text))
        turn, self._paid = JobTurn(self._memo, key), None
        # One worker per input: two releases for one input would be charged twice.
        if not turn.take():
            return turn.busy()
        try:
            text = self._memo.recall(key)
            entry = self._asked(job, key, turn) if text is None else PoolEntry.from_dict(json.loads(text))
        except TurnLostError:
            return turn.busy(tickets=self._charged())
        except PrivacyBudgetExceededError as error:
            return Answer.of_fault(error) if self.queries_left else Answer("lost")
        except Exception as error:  # noqa: BLE001  reported by its class
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
        """Releases a label, unless an earlier call did, and stores it in the memo."""
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
        """Stores the release; before a release is charged, checks that this worker still holds the turn."""
        if self._at is None:
            return
        key, place, turn = self._at
        if self._entries[place].status == "waiting":
            turn.check(None)
            return
        text = json.dumps(self._entries[place].to_dict())
        self._memo.remember(key, text)
        # The memo keeps the first of two releases; the loser must not commit its own.
        if self._memo.recall(key) != text:
            raise TurnLostError("memo: expected no label for this input, found one that another run released.")


__all__ = ["InputJob", "LabelWork"]
