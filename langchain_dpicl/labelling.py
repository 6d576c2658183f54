"""Labels public inputs by the votes of prompts made of private records (PromptPATE, Duan et al. 2023)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self

from langchain_dpicl._cost import Cost
from langchain_dpicl._labelling_options import (
    InputWording,
    check_rejection,
    draft_pool,
    kept_at,
    labelling_plan,
    query_count,
    resumed,
    teacher_design,
)
from langchain_dpicl._labelling_run import LabellingRun
from langchain_dpicl._voting_options import Votes, VotingTask, reader_of
from langchain_dpicl._work_labels import LabelWork
from langchain_dpicl.backends.label_rows import LabelRows
from langchain_dpicl.backends.resolve import as_choice_backend
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.callbacks import resolve_budget
from langchain_dpicl.declaring import declare_share, share_of_delta
from langchain_dpicl.executors import Elsewhere
from langchain_dpicl.labelled_pool import LabelledPool
from langchain_dpicl.privacy.examples import PrivateExamples
from langchain_dpicl.privacy.extensions.label_tickets import Teachers as TeacherKind
from langchain_dpicl.ray_executor import ExecutorLike, as_executor
from langchain_dpicl.run_events import tells_refusals
from langchain_dpicl.teachers import teachers_of
from langchain_dpicl.working import check_reached

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
    `run_events`.
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
        inputs = InputWording.of(private, task.wording)
        entries = inputs.waiting(public_inputs)
        path, saved_pool = kept_at(checkpoint)
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
        name, entries = resumed(saved_pool, entries, component=component, payer=(private, spender), public=public)
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


def _elsewhere(executor: ExecutorLike, budget: Budget, rows: LabelRows, **order: Any) -> Elsewhere | None:
    """Returns the workers with their job; None: inputs are labelled in this process."""
    workers = as_executor(executor)
    if workers is None:
        return None
    check_reached(budget, is_one_host=workers.is_one_host)
    reads = (rows.calibrates, rows.counts_other)
    work = LabelWork(ledger_id=budget.ledger_id, reads=reads, **order)
    return Elsewhere(workers, work, is_ours=executor == "ray")
