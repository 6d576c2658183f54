"""Labels public inputs by votes of prompts of private records, here or on workers (PromptPATE, Duan et al. 2023)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias

from langchain_dpicl._construction import awaitable
from langchain_dpicl.backends.resolve import as_choice_backend
from langchain_dpicl.backends.rows.label_rows import LabelRows
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.budget.events import RunEvents
from langchain_dpicl.budget.handler import BudgetLike, resolve_budget
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
from langchain_dpicl.options.answers import LabelAnswers
from langchain_dpicl.options.base import LLM, PublicInput, TemplateLike, Where, option_of, refuse_unused
from langchain_dpicl.options.rows import ConfidentGNMax, Noise, NoiseName, Rows, noise_of
from langchain_dpicl.options.tasks import FewShotTask
from langchain_dpicl.pate.inputs import InputTemplate, key_of
from langchain_dpicl.pate.plan import LabellingPlan, default_design, plan_labelling, rejection
from langchain_dpicl.pate.run import LabellingRun, teachers_of
from langchain_dpicl.planning.expected_utility import RowDesign
from langchain_dpicl.planning.share_plan import Cost
from langchain_dpicl.privacy._validate import check_int, fail
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.privacy.extensions.confident_gnmax import ConfidentGNMaxMechanism
from langchain_dpicl.privacy.extensions.method_tickets import Teachers as TeacherKind
from langchain_dpicl.privacy.mechanisms.noise import Mechanism
from langchain_dpicl.privacy.mechanisms.vote_sums import ProbabilitySum, VoteSum
from langchain_dpicl.release.declare_share import declare_share, share_of_delta
from langchain_dpicl.released.labelled_pool import LabelledPool, PoolEntry
from langchain_dpicl.runs.door import door
from langchain_dpicl.runs.query_plan import recommended_design
from langchain_dpicl.stores import MemoKey, ReleaseMemo
from langchain_dpicl.stores.memos import query_of, scope_of, tenant_of
from langchain_dpicl.tasks.labels import VotingTask, reader_of

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
            raise fail("rows", "a new sample for each input with an executor", self.plan.teachers, advice)

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
    @door("PromptPATELabeler")
    def from_private_examples(
        cls,
        private: PrivateExamples,
        *,
        llm: LLM,
        public_inputs: Sequence[PublicInput] = (),
        max_queries: int | None = None,
        budget: BudgetLike | None = None,
        epsilon: float | None = None,
        example_prompt: TemplateLike | None = None,
        suffix: TemplateLike | None = None,
        task: FewShotTask | None = None,
        rows: Rows | None = None,
        noise: Noise | ConfidentGNMax | NoiseName | None = None,
        answers: LabelAnswers | None = None,
        component: str | None = None,
        checkpoint: Where | None = None,
        executor: ExecutorLike = None,
    ) -> Self:
        """Plans the noise, declares the share and returns a labeler that has spent nothing so far.

        All parameters are public and must not be chosen by looking at the records.

        Args:
          private: the examples; bound to the budget's ledger here. They need a label field.
          llm: an engine, or a LangChain model. It receives the private prompts.
          public_inputs: texts, documents, or dicts of the fields that an example shows; repeated ones count once.
          max_queries: inputs that the share pays for; None: the number of distinct public inputs. Further inputs wait;
            further tickets are for `label`.
          budget: a PrivacyBudgetCallbackHandler, a Budget, or a RunnableConfig whose callbacks hold one; None: looked
            up in the context.
          epsilon: this component's share of the budget (its noise is calibrated to it). If the noise is given, the
            whole share is charged all the same; without `epsilon` the price of the plan is charged.
          example_prompt: template of one record, short for `task=`.
          suffix: template of the public input, after the examples; the label is what follows. Short for `task=`.
          task: a `FewShotTask`: wording, labels and verbalizers; see there.
          rows: a `Rows`: how many teachers, of how many records; see there. By default each input gets a new secret
            sample, amplified. `redraw_every="run"` draws one sample for all inputs, amplified once; its prompts repeat,
            which suits prompt caches. `sampling="partition"` is the paper's: an exact disjoint partition, drawn once
            and kept, nothing amplified; `replace_one` only.
          noise: a `Noise`, its mechanism's name, or a `ConfidentGNMax`; see there. "gaussian" releases one noisy
            histogram per input, from which threshold and label both come; `ConfidentGNMax` is the paper's.
          answers: a `LabelAnswers`: how votes are read, and which share of the votes a label needs; see there. Other
            inputs are rejected. By default half of the share of uniformly random votes, so that inputs are rejected if
            most teachers give no vote. `ConfidentGNMax` has a threshold of its own instead.
          component: name in the ledger; the same name and plan find the same share, with its remaining tickets.
          checkpoint: file that every released label is written to before its ticket is committed. If it exists, the run
            resumes from it: on the same ledger and plan only, with its `max_queries` unless another is given.
          executor: a `RayExecutor`, or "ray": inputs are labelled by workers, each with its own records, model and
            connection to the ledger; a rerun finds the releases of this `component`. Needs a new sample per input.
            None: inputs are labelled in this process.

        Raises:
          ConfigurationError: a public fault; nothing was charged and no private call was made.
          PrivacyBudgetError: no budget, another budget, or one that does not suffice.
          ModelCallError: the model could not be reached.

        Source: Duan et al. (2023), Flocks of Stochastic Parrots; docs/prompt-pate.md explains the differences.
        """
        spender = resolve_budget(budget)
        reading = option_of("answers", answers, LabelAnswers)
        chosen = _checked_noise(noise, reading)
        words = VotingTask.of(private, FewShotTask.of(task, example_prompt, suffix), reading)
        inputs = InputTemplate.of(private, words.wording)
        entries = inputs.waiting(public_inputs)
        path, saved_pool = _read_checkpoint(checkpoint)
        teachers, design = _teachers(option_of("rows", rows, Rows), private.public_size_of(None))
        engine = as_choice_backend(llm, votes="text" if words.votes == "text" else None)
        other = bool(reading.other_label) and _reads_text(engine, words)
        if other and reading.other_label in words.labels:
            raise fail("other_label", "a text that is none of the labels, or ''", reading.other_label)
        least = _least_share(reading, chosen, len(words.labels))
        plan = _planned(
            private,
            words,
            design,
            teachers=teachers,
            noise=chosen,
            scores=reading.scores,
            abstain_below=least,
            width=len(words.labels) + other,
            epsilon=epsilon,
            delta=share_of_delta(spender, epsilon=epsilon, delta=chosen.delta),
            adjacency=spender.adjacency,
            max_queries=_query_count(max_queries, entries, saved_pool),
        )
        words, scorer, read = reader_of(
            engine, words, is_wanted=reading.calibrate, shots=plan.design.shots_per_slot, other=other
        )
        shown = {"text_key": inputs.text_key, "content_free_inputs": list(reading.content_free)}
        public = {**plan.to_dict(), **words.to_dict(), **read, **shown, "abstain_below": least}
        public |= {"other_label": reading.other_label} if other else {}
        name, entries = _resumed(saved_pool, entries, component=component, payer=(private, spender), public=public)
        name = spender.fresh_name("pate") if name is None else name
        declared: dict[str, Any] = {"component": name, "epsilon": epsilon, "public": public}
        elsewhere = _elsewhere(executor, spender, scorer, plan=plan, task=words, inputs=inputs, **declared)
        share = declare_share(private, spender, plan, engines=[scorer], **declared)
        return cls(
            teachers_of(private, share, plan=plan, task=words, rows=scorer),
            entries,
            inputs=inputs,
            engine=engine,
            budget=spender,
            share=share,
            public=public,
            checkpoint=path,
            elsewhere=elsewhere,
        )

    afrom_private_examples = awaitable(from_private_examples)

    def cost(self, **tokens: int) -> Cost:
        """Returns the model calls and tokens of all queries, calibration included; `tokens` as for `plan.cost`."""
        return self.plan.cost(**{"calls_per_row": 1 + len(self.task.content_free), **tokens})


def _checked_noise(noise: object, answers: LabelAnswers) -> Noise | ConfidentGNMax:
    """Returns the noise; refuses answers that labelling does not give."""
    used = ("votes", "calibrate", "content_free", "abstain_below", "scores", "other_label")
    refuse_unused(answers, used, "PromptPATELabeler")
    chosen = noise_of(noise, Noise, ConfidentGNMax)
    kind = chosen.mechanism if isinstance(chosen, Noise) else "ConfidentGNMax"
    if answers.scores and kind not in {None, "gaussian"}:
        raise fail("noise", "'gaussian' with LabelAnswers(scores=True): the others release only labels", kind)
    return chosen


def _teachers(rows: Rows, public_size: int) -> tuple[TeacherKind, RowDesign | None]:
    """Returns how teachers are drawn and their requested shape; None: the planner chooses the shape."""
    if rows.redraw_every not in {None, 1, "run"}:
        advice = "Each input gets its own sample, or all inputs one."
        raise fail("Rows.redraw_every", "None or 'run' for labels", rows.redraw_every, advice)
    if rows.sampling != "partition":
        kind: TeacherKind = "one_sample" if rows.redraw_every == "run" else "fresh"
        return kind, RowDesign.of(rows, smallest_size=public_size)
    if rows.redraw_every is not None or rows.fill is not None:
        raise fail("Rows(sampling='partition')", "no redraw_every and no fill: a partition is drawn once", rows)
    if rows.slots is None and rows.shots == 1:
        return "fixed", None
    return "fixed", RowDesign.of(rows, smallest_size=public_size)


def _least_share(answers: LabelAnswers, noise: Noise | ConfidentGNMax, num_labels: int) -> float | None:
    """Returns the share of the expected votes that a label needs; None: any number is enough."""
    below, is_confident = answers.abstain_below, isinstance(noise, ConfidentGNMax)
    if isinstance(below, float) and is_confident:
        raise fail("abstain_below", "None with ConfidentGNMax, which has a threshold of its own", below)
    if below is None or below == "auto":
        return None if is_confident else 0.5 / num_labels
    return None if below == "never" else below


def _planned(
    private: PrivateExamples,
    task: VotingTask,
    design: RowDesign | None,
    *,
    teachers: TeacherKind,
    noise: Noise | ConfidentGNMax,
    scores: bool,
    abstain_below: float | None,
    width: int,
    **terms: Any,
) -> LabellingPlan:
    """Plans the labels; `terms` are epsilon, delta, adjacency and max_queries."""
    size = private.public_size_of(None)
    mechanism: Mechanism | str
    if isinstance(noise, ConfidentGNMax):
        shape = design or default_design(teachers, size)
        mechanism = ConfidentGNMaxMechanism.of_votes(
            threshold=noise.threshold,
            sigma_threshold=noise.test_stddev,
            sigma_votes=noise.vote_stddev,
            row_shape=shape.rows,
            adjacency=terms["adjacency"],
        )
        given: dict[str, Any] = {"noise_multiplier": None, "max_answers": noise.max_answers}
    else:
        mechanism = noise.mechanism or ("gaussian" if scores else "gumbel")
        is_searched = design is None and teachers == "fresh" and noise.multiplier is None
        shape = (
            recommended_design(size, labels=len(task.labels), mechanism=mechanism, **terms)
            if is_searched
            else design or default_design(teachers, size)
        )
        given = {"noise_multiplier": noise.multiplier, "max_answers": None}
    rejects = rejection(abstain_below, shape, public_size=size, mechanism=mechanism)
    return plan_labelling(
        size,
        teachers=teachers,
        aggregation=ProbabilitySum() if task.votes == "soft" else VoteSum(),
        mechanism=mechanism,
        design=shape,
        width=width + len(rejects["constants"]),
        partition=private.dataset_id,
        **given,
        **rejects,
        **terms,
    )


def _read_checkpoint(checkpoint: Any) -> tuple[Path | None, LabelledPool | None]:
    """Returns the path of a checkpoint, and the pool in it if the file exists."""
    if checkpoint is None:
        return None, None
    if not isinstance(checkpoint, str | os.PathLike):
        raise fail("checkpoint", "the path of a file, or None", type(checkpoint).__name__)
    path = Path(checkpoint)
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK) or path.is_dir():
        raise fail("checkpoint", "a file in a folder that exists and can be written", str(path))
    return path, LabelledPool.load(path) if path.exists() else None


def _query_count(max_queries: int | None, entries: Sequence[PoolEntry], saved_pool: LabelledPool | None) -> int:
    """Returns how many inputs the share pays for: as given, as in the checkpoint, or one for each input."""
    if max_queries is not None:
        return check_int("max_queries", max_queries, low=1)
    if saved_pool is not None:
        return check_int("max_queries of the checkpoint", saved_pool.plan.get("max_queries"), low=1)
    if not entries:
        raise fail("public_inputs", "at least one input, or max_queries= for later inputs", [])
    return len(entries)


def _resumed(
    saved_pool: LabelledPool | None,
    entries: Sequence[PoolEntry],
    *,
    component: str | None,
    payer: tuple[PrivateExamples, Budget],
    public: Mapping[str, Any],
) -> tuple[str | None, list[PoolEntry]]:
    """Returns the component's name and all entries of a run, those of a checkpoint first."""
    if saved_pool is None:
        return component, list(entries)
    name = saved_pool.report.get("component") if component is None else component
    private, budget = payer
    expected: dict[str, Any] = {
        "dataset_id": private.dataset_id,
        "ledger_id": budget.ledger_id,
        "adjacency": budget.adjacency,
    }
    expected["component"] = name
    differing = [key for key, value in expected.items() if saved_pool.report.get(key) != value]
    plain = json.loads(json.dumps(dict(public)))  # tuples are lists in files
    differing += sorted(key for key in {*saved_pool.plan, *plain} if saved_pool.plan.get(key) != plain.get(key))
    if differing:
        advice = (
            "Labels of a lost ledger stay usable for free: PromptPATEExampleSelector.load(path). Or give "
            "another file for this run."
        )
        raise fail("checkpoint", "labels of the same run", f"differences in {differing}", advice)
    known = {key_of(entry.fields) for entry in saved_pool.entries}
    return name, [*saved_pool.entries, *(entry for entry in entries if key_of(entry.fields) not in known)]


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
