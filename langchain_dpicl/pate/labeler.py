"""Labels public inputs by votes of prompts of private records, here or on workers (PromptPATE, Duan et al. 2023)."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias

from langchain_dpicl.backends.resolve import as_choice_backend
from langchain_dpicl.backends.rows.label_rows import LabelRows
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.budget.events import RunEvents, tells_refusals
from langchain_dpicl.budget.handler import resolve_budget
from langchain_dpicl.distributed.executor import (
    JobLease,
    JobResult,
    RemoteExecution,
    TurnLostError,
    Workplace,
    check_reached,
)
from langchain_dpicl.distributed.ray import ExecutorLike, as_executor
from langchain_dpicl.exceptions import PrivacyBudgetExceededError
from langchain_dpicl.pate.options import (
    InputTemplate,
    check_rejection,
    draft_pool,
    labelling_plan,
    query_count,
    read_checkpoint,
    resume_entries,
    teacher_design,
)
from langchain_dpicl.pate.plan import LabellingPlan
from langchain_dpicl.pate.run import LabellingRun, teachers_of
from langchain_dpicl.planning.share_plan import Cost
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.privacy.extensions.method_tickets import Teachers as TeacherKind
from langchain_dpicl.release.declare_share import declare_share, share_of_delta
from langchain_dpicl.released.labelled_pool import LabelledPool, PoolEntry
from langchain_dpicl.stores import MemoKey, ReleaseMemo
from langchain_dpicl.stores.memos import query_of, scope_of, tenant_of
from langchain_dpicl.tasks.labels import Votes, VotingTask, reader_of

InputJob: TypeAlias = tuple[tuple[str, str], ...]
"""The fields of a public input, sorted by name."""


@dataclass(frozen=True, slots=True)
class LabellingJob:
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
    inputs: InputTemplate
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

    def begin(self, place: Workplace) -> Callable[[InputJob], JobResult]:
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
        run = _MemoRun(
            teachers_of(private, share, plan=self.plan, task=self.task, rows=rows),
            [],
            inputs=self.inputs,
            engine=engine,
            budget=budget,
            share=share,
            public=self.public,
            checkpoint=None,
        )
        run.set_memo(memo, scope)
        return run.answer


class _MemoRun(LabellingRun):
    """A run over the inputs of one worker; each release is in the memo before its ticket is committed."""

    _memo: ReleaseMemo
    _scope: str
    _at: tuple[MemoKey, int, JobLease] | None = None
    _paid: RunEvents | None = None

    def set_memo(self, memo: ReleaseMemo, scope: str) -> None:
        """Sets the memo and the scope of releases."""
        self._memo, self._scope = memo, scope

    def answer(self, job: InputJob) -> JobResult:
        """Returns the label in the memo, or releases one and stores it."""
        key = MemoKey(self._scope, tenant_of(""), query_of([part for pair in job for part in pair]))
        text = self._memo.recall(key)
        if text is not None:
            return JobResult("done", json.loads(text))
        turn, self._paid = JobLease(self._memo, key), None
        # One worker per input: two releases for one input would be charged twice.
        if not turn.take():
            return turn.busy()
        try:
            text = self._memo.recall(key)
            entry = self._ask_once(job, key, turn) if text is None else PoolEntry.from_dict(json.loads(text))
        except TurnLostError:
            return turn.busy(tickets=self._charged())
        except PrivacyBudgetExceededError as error:
            return JobResult.of_fault(error) if self.queries_left else JobResult("lost")
        except Exception as error:  # noqa: BLE001  reported by its class
            return JobResult.of_fault(error, tickets=self._charged())
        finally:
            turn.leave()
        return JobResult("done", entry.to_dict(), tickets=self._charged())

    def _charged(self) -> int:
        return 0 if self._paid is None else self._paid.tickets

    def _events(self) -> RunEvents:
        self._paid = super()._events()
        return self._paid

    def _ask_once(self, job: InputJob, key: MemoKey, turn: JobLease) -> PoolEntry:
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


OTHER = "other"
"""Default name of votes without a label."""


class PromptPATELabeler(LabellingRun):
    """Labels public inputs by the votes of private teacher prompts, under differential privacy.

    Formal guarantees:
      - All labels, rejections and noisy votes together are (epsilon, delta)-DP for one unit of the private examples, at
        the share's epsilon and delta; epsilon is an upper bound and does not depend on the votes.
      - Every input's ticket burns before a private record is read for it; the public model is called first, so an
        outage costs nothing. The teachers are never asked again about an answered input.
      - Teachers are drawn at random, never selected by their accuracy.

    Build it with `from_private_examples`; `run` and `arun` label the waiting inputs, and continue after an
    interruption. Inside a LangChain run, observers receive `dpicl.charged` per input and `dpicl.refused`; see
    `budget.events`.
    """

    @classmethod
    @tells_refusals("PromptPATELabeler")
    def from_private_examples(
        cls,
        private: PrivateExamples,
        *,
        llm: Any,
        public_inputs: Sequence[Any] = (),
        max_queries: int | None = None,
        budget: Any = None,
        config: Any = None,
        epsilon: float | None = None,
        delta: float | None = None,
        noise_multiplier: float | None = None,
        example_prompt: Any = None,
        prefix: str = "",
        suffix: str | None = None,
        example_separator: str = "\n\n",
        labels: Sequence[str] | None = None,
        verbalizers: Mapping[str, str | Sequence[str]] | None = None,
        votes: Votes = "hard",
        calibrate: bool | None = None,
        content_free: Sequence[str] = ("N/A",),
        teachers: TeacherKind = "fresh",
        mechanism: str = "gumbel",
        confident: tuple[float, float, float] | None = None,
        max_answers: int | None = None,
        abstain_below: float | Literal["auto"] | None = "auto",
        other_label: str | None = OTHER,
        rows: str | None = None,
        num_slots: int | None = None,
        shots_per_slot: int | None = None,
        sampling: str = "poisson",
        overfill: float | None = None,
        component: str | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        check: Callable[[Any, LabelledPool], object] | None = None,
        executor: ExecutorLike = None,
    ) -> Self:
        """Plans the noise, declares the share and returns a labeler that has spent nothing so far.

        All parameters are public and must not be chosen by looking at the records. The options of prompts, labels,
        votes and rows are those of `DPVotingRunnable.from_private_examples`.

        Args:
          private: the examples; bound to the budget's ledger here. They need a label field.
          llm: an engine, an object that carries one, or a LangChain model. It receives the private prompts.
          public_inputs: texts, documents, or dicts of the fields that an example shows; repeated ones count once.
          max_queries: inputs that the share pays for; by default the number of distinct public inputs. Further
            inputs wait; further tickets are for `label`.
          budget: a PrivacyBudgetCallbackHandler or Budget; otherwise looked up in `config`, then in the context.
          config: a RunnableConfig whose callbacks may hold the budget.
          epsilon: this component's share of the budget (its noise is calibrated to it). If the noise is
            given, the whole share is charged all the same; without `epsilon` the price of the plan is charged.
          delta: the share's delta; by default in proportion to epsilon.
          noise_multiplier: noise in units of the sensitivity, instead of calibrating (its cost must fit `epsilon`).
          example_prompt: template of one record; by default text and label on a line each.
          prefix: template before the examples.
          suffix: template of the public input, after the examples; the label is what follows.
          example_separator: text between the parts.
          labels: the answers; by default the declared labels of the examples.
          verbalizers: label to the text or texts that stand for it.
          votes: "hard", "soft" or "text".
          calibrate: whether teachers are calibrated contextually; see `DPVotingRunnable`.
          content_free: inputs without content.
          teachers: "fresh" (a new secret sample per input, amplified), "one_sample" (one for the whole run, amplified
            once; its prompts repeat, which suits prompt caches), or "fixed" (the paper: an exact disjoint partition,
            drawn once and kept, nothing amplified; `replace_one` only).
          mechanism: "gumbel", "permute_and_flip", "gaussian" (one noisy histogram per input, from which threshold and
            label both come) or "confident_gnmax" (the paper's: a noisy test, then a noisy maximum).
          confident: (threshold, sigma of the test, sigma of the votes), in votes, for "confident_gnmax".
          max_answers: labels that the share pays for if the test is charged separately ("confident_gnmax" with
            "one_sample" or "fixed"); None: `max_queries`.
          abstain_below: share of the expected votes, in (0, 1], that a label needs; otherwise the input is rejected.
            "auto": half of the share of uniformly random votes, so that inputs are rejected if most teachers give no
            vote; "confident_gnmax" has a threshold of its own instead.
            None: the best label always counts.
          other_label: name of votes whose text names no label, a further candidate for models that return text only;
            if it wins, the input is rejected. None: such votes count for nothing.
          rows: "units" or "slots".
          num_slots: teachers: number of slots, or expected number of unit rows.
          shots_per_slot: records per teacher.
          sampling: "poisson", or "fixed" (a balanced sample; `replace_one` only).
          overfill: expected units per shot of a slot.
          component: name in the ledger; the same name and plan find the same share, with its remaining tickets.
          checkpoint: file that every released label is written to before its ticket is committed. If it exists, the run
            resumes from it: on the same ledger and plan only, with its `max_queries` unless another is given.
          check: called with the model's engine and the pool before the share is declared; an error that it raises
            refuses the run.
          executor: a `RayExecutor`, or "ray": inputs are labelled by workers, each with its own records, model and
            connection to the ledger; a rerun finds the releases of this `component`. Needs "fresh" teachers. None:
            inputs are labelled in this process.

        Raises:
          ConfigurationError: a public fault; nothing was charged and no private call was made.
          PrivacyBudgetError: no budget, another budget, or one that does not suffice.
          ModelCallError: the model could not be reached.

        Source: Duan et al. (2023), Flocks of Stochastic Parrots; docs/prompt-pate.md explains the differences.
        """
        spender = resolve_budget(budget, config)
        task = VotingTask.of(
            private,
            labels=labels,
            verbalizers=verbalizers,
            votes=votes,
            calibrate=calibrate,
            content_free=content_free,
            example_prompt=example_prompt,
            prefix=prefix,
            suffix=suffix,
            separator=example_separator,
        )
        inputs = InputTemplate.of(private, task.wording)
        entries = inputs.waiting(public_inputs)
        path, saved_pool = read_checkpoint(checkpoint)
        count = query_count(max_queries, entries, saved_pool)
        shape: dict[str, Any] = {"num_slots": num_slots, "shots_per_slot": shots_per_slot, "overfill": overfill}
        design = teacher_design(private, teachers=teachers, sampling=sampling, rows=rows, **shape)
        engine = as_choice_backend(llm, votes="text" if votes == "text" else None)
        other = other_label is not None and _reads_text(engine, task)
        least = check_rejection(abstain_below, mechanism, other_label, task.labels, has_other=other)
        plan = labelling_plan(
            private,
            task,
            design,
            teachers=teachers,
            mechanism=mechanism,
            confident=confident,
            max_answers=max_answers,
            noise_multiplier=noise_multiplier,
            abstain_below=least,
            width=len(task.labels) + other,
            epsilon=epsilon,
            delta=share_of_delta(spender, epsilon=epsilon, delta=delta),
            adjacency=spender.adjacency,
            max_queries=count,
        )
        task, scorer, read = reader_of(engine, task, is_wanted=calibrate, shots=plan.design.shots_per_slot, other=other)
        wording = {"text_key": inputs.text_key, "content_free_inputs": list(content_free)}
        public = {**plan.to_dict(), **task.to_dict(), **read, **wording, "abstain_below": least}
        public |= {"other_label": other_label} if other else {}
        name, entries = resume_entries(
            saved_pool, entries, component=component, payer=(private, spender), public=public
        )
        if check is not None:
            check(engine, draft_pool(entries, inputs=inputs, task=task, report={}, public=public))
        name = spender.fresh_name("pate") if name is None else name
        declared: dict[str, Any] = {"component": name, "epsilon": epsilon, "public": public}
        elsewhere = _elsewhere(executor, spender, scorer, plan=plan, task=task, inputs=inputs, **declared)
        share = declare_share(private, spender, plan, engines=[scorer], **declared)
        return cls(
            teachers_of(private, share, plan=plan, task=task, rows=scorer),
            entries,
            inputs=inputs,
            engine=engine,
            budget=spender,
            share=share,
            public=public,
            checkpoint=path,
            elsewhere=elsewhere,
        )

    @classmethod
    async def afrom_private_examples(cls, private: PrivateExamples, **options: Any) -> Self:
        """Asynchronous version of `from_private_examples`: a model is probed and noise calibrated in a thread."""
        return await asyncio.to_thread(cls.from_private_examples, private, **options)

    def cost(self, **tokens: int) -> Cost:
        """Returns the model calls and tokens of all queries, calibration included; `tokens` as for `plan.cost`."""
        return self.plan.cost(**{"calls_per_row": 1 + len(self.task.content_free), **tokens})


def _reads_text(engine: Any, task: VotingTask) -> bool:
    """Whether votes are parsed from the text that the engine writes."""
    return LabelRows(engine, list(task.texts.values()), calibrate=False).kind == "text votes"


def _elsewhere(executor: ExecutorLike, budget: Budget, rows: LabelRows, **order: Any) -> RemoteExecution | None:
    """Returns the workers with their job; None: inputs are labelled in this process."""
    workers = as_executor(executor)
    if workers is None:
        return None
    check_reached(budget, is_one_host=workers.is_one_host)
    reads = (rows.calibrates, rows.counts_other)
    work = LabellingJob(ledger_id=budget.ledger_id, reads=reads, **order)
    return RemoteExecution(workers, work, is_ours=executor == "ray")
