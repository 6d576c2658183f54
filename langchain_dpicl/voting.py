"""Answers each query with a label: a noisy majority of few-shot prompts made of private records (Panda et al. 2023)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, get_args

import numpy as np
from langchain_core.runnables import RunnableConfig
from pydantic import Field
from typing_extensions import override

from langchain_dpicl.backends.sync_async import EffectGenerator
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.budget.events import tells_refusals
from langchain_dpicl.budget.handler import resolve_budget
from langchain_dpicl.planning.expected_utility import RowDesign
from langchain_dpicl.planning.share_plan import Cost
from langchain_dpicl.privacy._validate import check_choice, fail
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.privacy.extensions.registry import mechanism_by_name
from langchain_dpicl.privacy.ledger.shares import Reservation, Share
from langchain_dpicl.privacy.mechanisms.noise import Release
from langchain_dpicl.privacy.mechanisms.vote_sums import ProbabilitySum, VoteSum
from langchain_dpicl.release.curator import release_once
from langchain_dpicl.release.declare_share import declare_share, share_of_delta
from langchain_dpicl.results import Receipt, VotingResult
from langchain_dpicl.runs.answer_memo import AnswerMemo, TenantRegistry, open_memo, scope_of_plan, traits_of
from langchain_dpicl.runs.query_plan import QueryPlan, expected_rows, plan_queries, recommended_design
from langchain_dpicl.runs.query_runnable import Exhausted, QueryRunnable
from langchain_dpicl.stores.memos import ReleaseMemo
from langchain_dpicl.tasks.labels import (
    VoteOutcome,
    Votes,
    VotingTask,
    check_abstention,
    check_flags,
    design_of,
    mechanism_of,
    outcome_from_json,
    outcome_to_json,
    reader_of,
)
from langchain_dpicl.tasks.templates import Query


class LabelRunnable(QueryRunnable):
    """Base of Runnables whose answers are labels that private prompts vote for."""

    task: Any = Field(exclude=True, repr=False)
    """Labels and prompt templates: a `VotingTask`. Public."""

    rows: Any = Field(exclude=True, repr=False)
    """The `LabelRows` that turn prompts into votes."""

    with_scores: bool = False
    """Whether noisy votes are returned with the label."""

    abstain_label: str = "abstain"
    """The answer when no label has enough votes."""

    CONFIGURABLE: ClassVar[frozenset[str]] = QueryRunnable.CONFIGURABLE | {"with_scores"}

    @property
    def labels(self) -> tuple[str, ...]:
        """Every label an answer can have; of labels with equal probability a row votes for the first."""
        return tuple(self.task.labels)

    def cost(self, **tokens: int) -> Cost:
        """Returns the model calls and tokens of all queries, calibration included; `tokens` as for `plan.cost`."""
        cost: Cost = self.plan.cost(calls_per_row=1 + len(self.task.content_free), **tokens)
        return cost

    @property
    @override
    def _purpose(self) -> str:
        return f"Answers with one of: {', '.join(self.labels)}. Uses private records, under differential privacy."

    @property
    @override
    def _gives_receipts(self) -> bool:
        return self.with_scores or super()._gives_receipts

    @override
    def _zero_shot(self, query: Query, prepared: Any, config: RunnableConfig) -> EffectGenerator[VoteOutcome]:
        row = prepared[1]
        # A row of zeros names no label.
        return (int(np.argmax(row)) if row.any() else None), None
        yield  # makes this a generator

    def _result(self, outcome: VoteOutcome) -> dict[str, Any]:
        """Returns the fields that the typed results of all such Runnables share."""
        place, votes = outcome
        return {
            "label": self.abstain_label if place is None else self.labels[place],
            "abstained": place is None,
            "scores": dict(zip(self.labels, votes, strict=True)) if self.with_scores and votes else None,
        }


class DPVotingRunnable(LabelRunnable):
    r"""Answers each query with a label that many private few-shot prompts voted for, under differential privacy.

    For each query a fresh secret sample of the private examples is drawn, each row of it becomes a prompt that
    ends with the query, each prompt votes, and noise is added to the votes of every declared label. Only the label
    with the most noisy votes is released, or, with `with_scores=True`, the noisy votes as well.

    Formal guarantees:
      - All answers together are (epsilon, delta)-DP for one unit of the private examples, at the share's epsilon and
        delta, for adaptively chosen queries; epsilon is an upper bound.
      - Noise is added for every declared label, with or without votes; a row that fails votes for nothing.

    Build it with `from_private_examples`. Input: the query as text (or a message, or a prompt value), or a dict of the
    wording's variables. Queries are public: only the private records are protected.

    Example:
      >>> from langchain_dpicl import Budget, EmbeddedLLM, PrivateExamples
      >>> tickets = [{"text": "my card was declined", "queue": "card"}, {"text": "send it abroad", "queue": "transfer"}]
      >>> private = PrivateExamples(tickets, label_key="queue", labels=("card", "transfer"), public_size=2_000)
      >>> voter = DPVotingRunnable.from_private_examples(
      ...     private, llm=EmbeddedLLM(), budget=Budget(epsilon=2.0, delta=1e-6), epsilon=1.0, max_queries=10
      ... )
      >>> voter.invoke("why was my card declined?") in {"card", "transfer"}
      True
    """

    abstain_below: float | None = None
    """Share of the expected votes that an answer needs; None: the label with the most noisy votes is the answer."""

    @classmethod
    @tells_refusals("DPVotingRunnable")
    def from_private_examples(
        cls,
        private: PrivateExamples,
        *,
        llm: Any,
        max_queries: int,
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
        mechanism: str | None = None,
        with_scores: bool = False,
        abstain_below: float | None = None,
        abstain_label: str = "abstain",
        rows: str | None = None,
        num_slots: int | None = None,
        shots_per_slot: int | None = None,
        sampling: str = "poisson",
        overfill: float | None = None,
        on_exhausted: Exhausted = "raise",
        max_query_chars: int | None = None,
        memo_size: int = 256,
        memo: ReleaseMemo | str | os.PathLike[str] | None = None,
        tenant_max_queries: int | None = None,
        with_receipt: bool = False,
        progress: bool | None = None,
        component: str | None = None,
        name: str | None = None,
    ) -> DPVotingRunnable:
        """Plans the noise, declares the share and returns a Runnable that has spent nothing so far.

        All parameters are public and must not be chosen by looking at the records.

        Args:
          private: the examples; bound to the budget's ledger here. All of them may be drawn, whatever their label.
          llm: an engine, an object that carries one, or a LangChain model; see `backends.resolve.as_choice_backend`.
            It receives the private prompts.
          max_queries: queries that the share pays for.
          budget: a PrivacyBudgetCallbackHandler or Budget; otherwise looked up in `config`, then in the context.
          config: a RunnableConfig whose callbacks may hold the budget.
          epsilon: this component's share of the budget (its noise is calibrated to it).
          delta: the share's delta; by default in proportion to epsilon.
          noise_multiplier: noise in units of the sensitivity, instead of calibrating (its cost must fit `epsilon`).
          example_prompt: template of one record; by default text and label on a line each.
          prefix: template before the examples.
          suffix: template of the query, after the examples; the label is what follows. By default as the example.
          example_separator: text between the parts.
          labels: the answers; by default the declared labels of the examples.
          verbalizers: label to the text or texts that stand for it in prompts and answers, taken verbatim; the first
            one is shown in the examples. By default a space and the label.
          votes: "hard": one vote per row; "soft": each row gives its label probabilities; "text": what the model
            writes is its vote, also where it has probabilities.
          calibrate: whether each row's probabilities are divided by those of the same row on content-free inputs
            (Zhao et al. 2021), for that many calls more per row. None: where the model goes on writing the prompt and
            a row holds one record, whose label it would otherwise repeat.
          content_free: inputs without content.
          mechanism: "gumbel" (default), "permute_and_flip", or "gaussian" (the paper's noisy maximum; the default
            with `with_scores`).
          with_scores: releases the noisy votes with the label, on the same ticket.
          abstain_below: share of the expected votes, in (0, 1], under which `abstain_label` is the answer: a further
            candidate with a constant score, or a threshold on the noisy votes ("gaussian"); either costs nothing.
          abstain_label: the answer then.
          rows: "units" (every sampled unit is a one-shot prompt) or "slots" (k-shot prompts). If this and the next two
            are None, the planner compares designs at a constant number of records and takes the best.
          num_slots: number of slots, or expected number of unit rows.
          shots_per_slot: records per slot; 1 for unit rows.
          sampling: "poisson", or "fixed" (balanced partition; `replace_one` only).
          overfill: expected units per shot of a slot.
          on_exhausted: "raise", or "zero_shot": answer without private records, for free; the receipt says so.
          max_query_chars: characters that a query may have, all of its variables together; longer ones are refused
            before any call. None: as a record's text, `private.max_chars`.
          memo_size: answers cached per tenant; cache hits are not charged. 0: every query is charged.
          memo: a store of answers that outlives the process, so that another process returns them for free: the path of
            a SQLite file (created if missing), or a `ReleaseMemo` such as `PostgresMemo`. Needs `component` and a
            durable ledger.
          tenant_max_queries: charged queries per tenant (`config["configurable"]["tenant"]`), counted on the ledger and
            so over all processes; None: as many as the ledger allows.
          with_receipt: answers are `VotingResult`; also with `with_scores` and `on_exhausted="zero_shot"`.
          progress: whether batches show a bar; None: on a terminal.
          component: name in the ledger; the same name and plan find the same share, with its remaining tickets.
          name: the Runnable's name in traces.

        Raises:
          ConfigurationError: a public fault; nothing was charged and no private call was made.
          PrivacyBudgetError: no budget, another budget, or one that does not suffice.
          ModelCallError: the model could not be reached.
          MemoError: the memo cannot be used.

        Source: Panda et al. (2023), Differentially Private In-Context Learning.
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
        check_choice("on_exhausted", on_exhausted, get_args(Exhausted))
        shown: dict[str, Any] = {"with_receipt": with_receipt, "with_scores": with_scores, "progress": progress}
        shown |= {"name": name, "max_query_chars": max_query_chars}
        check_flags(**shown)
        check_abstention(task.labels, abstain_below, abstain_label)
        tenants = TenantRegistry(max_queries=tenant_max_queries, memo_size=memo_size)
        store = open_memo(memo, budget=spender, memo_size=memo_size, component=component)
        shape: dict[str, Any] = {"num_slots": num_slots, "shots_per_slot": shots_per_slot, "overfill": overfill}
        plan = _plan(
            private,
            task,
            design_of(private, rows=rows, sampling=sampling, **shape),
            mechanism=mechanism_of(mechanism, with_scores=with_scores),
            noise_multiplier=noise_multiplier,
            abstain_below=abstain_below,
            epsilon=epsilon,
            delta=share_of_delta(spender, epsilon=epsilon, delta=delta),
            adjacency=spender.adjacency,
            max_queries=max_queries,
        )
        # Built after the plan: whether rows are calibrated depends on the shots that the planner chose.
        task, scorer, reading = reader_of(llm, task, is_wanted=calibrate, shots=plan.design.shots_per_slot)
        released = {"with_scores": with_scores, "abstain_below": abstain_below}
        public = {**plan.to_dict(), **task.to_dict(), **reading, **released}
        component = component if component is not None else spender.fresh_name("voting")
        share = declare_share(
            private, spender, plan, component=component, epsilon=epsilon, public=public, engines=[scorer]
        )
        return cls(
            private=private,
            budget=spender,
            share=share,
            plan=plan,
            task=task,
            wording=task.wording,
            rows=scorer,
            abstain_below=abstain_below,
            abstain_label=abstain_label,
            on_exhausted=on_exhausted,
            tenants=tenants,
            memo=vote_memo(store, task, llm, private=private, public=public, budget=spender, share=share),
            **shown,
        )

    @override
    def configurable_fields(self, **kwargs: Any) -> Any:
        if "with_scores" in kwargs and self.plan.release.mechanism.name != "gaussian":
            mechanism = self.plan.release.mechanism.name
            raise fail("configurable_fields", "with_scores beside mechanism='gaussian' only", mechanism)
        return super().configurable_fields(**kwargs)

    @property
    @override
    def OutputType(self) -> Any:
        return VotingResult if self._gives_receipts else str

    @override
    def _prepare(self, query: Query, config: RunnableConfig) -> EffectGenerator[Any]:
        """Asks the public prompt, which detects an outage before a ticket is charged and gives the zero-shot answer."""
        render = self.wording.renderer(self.task.queries(query))
        row = yield self.rows.request_public(render(()))
        return render, row

    @override
    def _released(
        self, query: Query, prepared: Any, ticket: Reservation, config: RunnableConfig, keep: Callable[[Any], None]
    ) -> EffectGenerator[VoteOutcome]:
        released = yield from release_once(
            self.private,
            ticket,
            plan=self.plan.release,
            rows=self._limit_concurrency(self.rows.ask, config),
            render=prepared[0],
            width=len(self.labels),
            keep=lambda release: keep(self._outcome(release)),
        )
        return self._outcome(released)

    def _outcome(self, released: Release) -> VoteOutcome:
        if released.values is None:  # an index: of a label, or of the constant candidate behind them
            return (released.index if released.index in range(len(self.labels)) else None), None
        votes = tuple(float(value) for value in released.values)
        best = int(np.argmax(votes))
        if self.abstain_below is not None and votes[best] < self.abstain_below * self.plan.expected_rows:
            return None, votes
        return best, votes

    @override
    def _shown(self, outcome: VoteOutcome, receipt: Receipt | None) -> str | VotingResult:
        result = self._result(outcome)
        if receipt is None:
            return str(result["label"])
        return VotingResult(**result, expected_votes=self.plan.expected_rows, receipt=receipt)


def vote_memo(
    store: ReleaseMemo | None,
    task: VotingTask,
    llm: Any,
    *,
    private: PrivateExamples,
    public: Mapping[str, Any],
    budget: Budget,
    share: Share,
) -> AnswerMemo | None:
    """Returns the cache of a component's votes in a memo; None: there is no memo."""
    if store is None:
        return None
    scope = scope_of_plan(budget, share, dataset_id=private.dataset_id, public={**public, "reader": traits_of(llm)})
    unpacked = partial(outcome_from_json, width=len(task.labels))
    return AnswerMemo(store, scope=scope, packed=outcome_to_json, unpacked=unpacked)


def _plan(
    private: PrivateExamples,
    task: VotingTask,
    design: RowDesign | None,
    *,
    mechanism: str,
    noise_multiplier: float | None,
    abstain_below: float | None,
    **terms: Any,
) -> QueryPlan:
    """Plans the votes; `terms` are epsilon, delta, adjacency and max_queries."""
    size, width = private.public_size_of(None), len(task.labels)
    shape = design or recommended_design(size, labels=width, mechanism=mechanism, **terms)
    # A released vector can be compared with a threshold afterwards; a released index needs a candidate to abstain with.
    is_candidate = abstain_below is not None and mechanism != "gaussian"
    constants = (float(abstain_below or 0.0) * expected_rows(shape, size),) if is_candidate else ()
    return plan_queries(
        size,
        aggregation=ProbabilitySum() if task.votes == "soft" else VoteSum(),
        mechanism=mechanism_by_name(mechanism)(noise_multiplier=1.0),
        noise_multiplier=noise_multiplier,
        design=shape,
        width=width + len(constants),
        constants=constants,
        partition=private.dataset_id,
        **terms,
    )
