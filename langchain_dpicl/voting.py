"""Answers each query with a label: a noisy majority of few-shot prompts made of private records (Panda et al. 2023)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np
from langchain_core.runnables import RunnableConfig
from pydantic import Field
from typing_extensions import override

from langchain_dpicl._opaque import Opaque, PerProcess
from langchain_dpicl.backends.resolve import as_model
from langchain_dpicl.backends.rows.label_rows import Prompts
from langchain_dpicl.backends.sync_async import (
    AskBeside,
    Effect,
    EffectGenerator,
    PublicAnswer,
    awaitable,
    concurrency_limit,
)
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.budget.handler import BudgetLike, resolve_budget
from langchain_dpicl.options import (
    LLM,
    FewShotTask,
    LabelAnswers,
    Noise,
    NoiseName,
    Rows,
    Serving,
    TemplateLike,
    noise_of,
    option_of,
)
from langchain_dpicl.planning.share_plan import Cost
from langchain_dpicl.privacy._validate import calls_at_once, check_int, fail
from langchain_dpicl.privacy.accounting.epsilon import MAX_COUNT
from langchain_dpicl.privacy.extensions.private_streams import RollingRange
from langchain_dpicl.privacy.extensions.registry import mechanism_by_name
from langchain_dpicl.privacy.extensions.stream_ledger import QueryShare
from langchain_dpicl.privacy.ledger.shares import Reservation, Share
from langchain_dpicl.privacy.mechanisms.bounded import ProbabilitySum, VoteSum
from langchain_dpicl.privacy.mechanisms.release_plan import Release
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.rehearsal.choice import ChosenRows, chosen_rows
from langchain_dpicl.rehearsal.rehearsal import Rehearsal
from langchain_dpicl.release.curator import release_once
from langchain_dpicl.release.declare_share import (
    answering_range,
    check_run,
    declare_share,
    runs_per_window,
    share_of_delta,
    stream_runs,
)
from langchain_dpicl.results import Receipt, VotingResult
from langchain_dpicl.runs.answer_memo import AnswerMemo, scope_of_plan, traits_of
from langchain_dpicl.runs.door import door
from langchain_dpicl.runs.query_plan import QueryPlan, plan_queries, rejection
from langchain_dpicl.runs.query_runnable import QueryRunnable, ResultT, served
from langchain_dpicl.stores.memos import ReleaseMemo
from langchain_dpicl.tasks import (
    Query,
    VoteOutcome,
    VotingTask,
    abstention_of,
    check_other_label,
    choice_engine,
    outcome_from_json,
    outcome_to_json,
    reader_of,
)

RunnableT = TypeVar("RunnableT", bound="QueryRunnable[Any]")


class AnsweringRuns(Opaque):
    """The runs of a component that answers queries on a rolling range; all copies of the component share it.

    Formal guarantees:
      - A run begins every `every` blocks from the component's first one on, by the clock and public numbers alone, so
        that it is the same in every process.
      - Range, tickets and kept answers of a query are those of one run.
    """

    def __init__(self, source: RollingRange, first: int) -> None:
        self._source = source
        self._first = first
        self._locks = PerProcess(threading.Lock)
        self._current: tuple[int, dict[str, Any]] | None = None

    @property
    def is_due(self) -> bool:
        """Whether `of_now` has to read another range first."""
        current = self._current
        return current is None or current[0] != self._source.run_start(self._first)

    def share_of_now(self, share: QueryShare) -> QueryShare:
        """Returns the component's share, seen from the newest run; reads no range, so that no record becomes late."""
        start = self._source.run_start(self._first)
        return share.of_run((start, start + self._source.length - 1))

    def of_now(self, component: RunnableT) -> RunnableT:
        """Returns a component as it answers in the newest run."""
        with self._locks.here:
            start = self._source.run_start(self._first)  # inside: who waited goes on with the run that it finds
            if self._current is None or self._current[0] != start:
                self._current = None  # what the last run read is dropped before more is
                private = self._source.run_from(start)
                memo = component.memo
                self._current = (
                    start,
                    {
                        "private": private,
                        "share": component.share.of_run(private.blocks),
                        "memo": None if memo is None else memo.of_run(private.blocks),
                        "tenants": component.tenants.of_run(),
                        "runs": None,
                    },
                )
            return component.model_copy(update=self._current[1])


class LabelRunnable(QueryRunnable[ResultT], Generic[ResultT]):
    """Base of Runnables whose answers are labels that private prompts vote for."""

    task: Any = Field(exclude=True, repr=False)
    """Labels and prompt templates: a `VotingTask`. Public."""

    rows: Any = Field(exclude=True, repr=False)
    """The `LabelRows` that turn prompts into votes."""

    answers: LabelAnswers
    """How labels are read, and when none is given."""

    source: Any = Field(default=None, exclude=True, repr=False)
    """What expectations rest on: a `Rehearsal`, or a guess."""

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

    @override
    def _zero_shot(self, query: Query, prepared: Any, config: RunnableConfig) -> EffectGenerator[VoteOutcome]:
        row = prepared[1]
        # A row of zeros names no label.
        return (int(np.argmax(row)) if row.any() else None), None
        yield  # makes this a generator

    @override
    def _text(self, outcome: VoteOutcome) -> str:
        return self.answers.abstain_label if outcome[0] is None else self.labels[outcome[0]]

    def _fields(self, outcome: VoteOutcome) -> dict[str, Any]:
        """Returns the fields that the results of all such Runnables share."""
        place, votes = outcome
        scores = dict(zip(self.labels, votes, strict=True)) if self.answers.scores and votes else None
        return {"label": self._text(outcome), "abstained": place is None, "scores": scores}


class DPVotingRunnable(LabelRunnable[VotingResult]):
    r"""Answers each query with a label that many private few-shot prompts voted for, under differential privacy.

    For each query a fresh secret sample of the private examples is drawn, each row of it becomes a prompt that
    ends with the query, each prompt votes, and noise is added to the votes of every declared label. The label with the
    most noisy votes is the answer. Gaussian noise pays for the noisy votes themselves, which a memo keeps and
    `LabelAnswers(scores=True)` shows; the other mechanisms release the label alone.

    Formal guarantees:
      - All answers together are (epsilon, delta)-DP for one unit of the private examples, at the share's epsilon and
        delta, for adaptively chosen queries; epsilon is an upper bound.
      - Noise is added for every declared label, with or without votes; a row that fails casts no vote.
      - Over an API the public prompt is asked beside the private rows, after the ticket burnt. Where that call fails it
        is made again, after all private calls of the answer have ended; only where it fails again is there no answer,
        and the ticket stays spent. From then on the public prompt goes first until it is answered, so an outage costs
        one ticket per answer in flight. `Serving(public_first=True)`: it costs none.

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

    RESULT = VotingResult

    def expected(self) -> dict[str, Any]:
        """Returns the chances of an answer and what they rest on, a rehearsal or a guess; see `QueryPlan.expected`."""
        found: dict[str, Any] = self.plan.expected(
            self.source, calibrated=bool(self.task.content_free), abstain_below=self.abstain_below
        )
        return found

    abstain_below: float | None = None
    """Share of the expected votes that an answer needs; None: the label with the most noisy votes is the answer."""

    @classmethod
    @door("DPVotingRunnable", streams=True)
    def from_private_examples(
        cls,
        private: PrivateExamples | RollingRange,
        *,
        llm: LLM,
        max_queries: int,
        budget: BudgetLike | None = None,
        epsilon: float | None = None,
        example_prompt: TemplateLike | None = None,
        suffix: TemplateLike | None = None,
        prefix: TemplateLike = "",
        task: FewShotTask | None = None,
        rows: Rows | Rehearsal | None = None,
        noise: Noise | NoiseName | None = None,
        answers: LabelAnswers | None = None,
        serving: Serving | None = None,
        component: str | None = None,
    ) -> Self:
        """Plans the noise, declares the share and returns a Runnable that has spent nothing so far.

        All parameters are public and must not be chosen by looking at the records.

        Args:
          private: the examples; bound to the budget's ledger here. All of them may be drawn, whatever their label. Or a
            range of a stream: of `stream.rolling(...)` each answer reads the newest run, which begins every `every`
            blocks, and no answer of an earlier run is given again.
          llm: an engine, an object that carries one, a LangChain model, or its name ("openai:gpt-4o"); see
            `backends.resolve.as_choice_backend`. It receives the private prompts.
          max_queries: queries that the share pays for; of a rolling range, those of each run.
          budget: a PrivacyBudgetCallbackHandler or Budget, or a RunnableConfig whose callbacks hold one; None: that of
            the context.
          epsilon: this component's share of the budget (its noise is calibrated to it).
          example_prompt: template of one record; None: text and label on a line each.
          suffix: template of the query, after the examples; the label is what follows. None: as the example.
          prefix: template before the examples.
          task: a `FewShotTask` in place of the three templates, with labels and verbalizers.
          rows: a `Rows`: how many prompts and of how many records; or a `Rehearsal`, which chooses rows, noise and
            calibration. None: the shape that the engine declares, 20 prompts of 4 records; a warning says that the
            plan then rests on a guess.
          noise: a `Noise`, or a mechanism's name: "gaussian" (the paper's noisy maximum; the default for slots),
            "gumbel" (the default for unit rows) or "permute_and_flip".
          answers: a `LabelAnswers`: how labels are read, abstention, scores.
          serving: a `Serving`: cached answers, tenants, limits, and what happens after the last query.
          component: name in the ledger; the same name and plan find the same share, with its remaining tickets.

        Raises:
          ConfigurationError: a public fault; nothing was charged and no private call was made.
          PrivacyBudgetError: no budget, another budget, or one that does not suffice.
          ModelCallError: the model could not be reached.
          MemoError: the memo cannot be used.

        Source: Panda et al. (2023), Differentially Private In-Context Learning.
        """
        spender = resolve_budget(budget)
        per_window, source = runs_per_window(private, spender), private
        runs_at_once = per_window or 1
        private = answering_range(private, spender, component=component)
        answers = option_of("answers", answers, LabelAnswers)
        rows = rows if isinstance(rows, Rehearsal) else option_of("rows", rows, Rows)
        voting = VotingTask.of(private, FewShotTask.of(task, example_prompt, suffix, prefix), answers)
        below = abstention_of(answers, voting.labels)
        check_other_label(answers)
        options, store = served(serving, budget=spender, component=component)
        noise = noise_of(noise, Noise)
        llm = as_model(llm)
        terms: dict[str, Any] = {
            "epsilon": epsilon,
            "delta": share_of_delta(spender, epsilon=epsilon, delta=noise.delta),
            "adjacency": spender.adjacency,
            "max_queries": check_int("max_queries", max_queries, low=1, high=MAX_COUNT // runs_at_once) * runs_at_once,
        }
        engine = choice_engine(llm, voting)
        chosen = chosen_rows(
            rows,
            private.public_size_of(None),
            engine=engine,
            wordings=voting.wording.num_wordings,
            mechanism=_mechanism_of(noise, answers),
            calibrate=answers.calibrate,
            **terms,
        )
        plan = _plan(private, voting, chosen, noise_multiplier=noise.multiplier, abstain_below=below, **terms)
        plan.design.check_wordings(voting.wording.num_wordings)
        voting, scorer, reading = reader_of(engine, voting, is_wanted=chosen.calibrate)
        chosen.check(voting, reading, plan)
        released = {"with_scores": answers.scores, "abstain_below": below}
        public = {**plan.to_dict(), **voting.to_dict(), **reading, **released, **chosen.reported}
        if per_window is not None:
            check_run(component, plan.design.sampling)
        how: dict[str, Any] = {"per_window": per_window, "queries": max_queries}
        runs = stream_runs(source, private.blocks, spender, component=str(component), **how)
        component = component if component is not None else spender.fresh_name("voting")
        paid: dict[str, Any] = {"component": component, "epsilon": epsilon, "runs": runs}
        share = declare_share(private, spender, plan, public=public, engines=[scorer], **paid)
        memo = vote_memo(store, voting, llm, private=private, public=public, budget=spender, share=share)
        if isinstance(source, RollingRange) and runs is not None:
            options["runs"] = AnsweringRuns(source, runs.extent[0])
        return cls(
            private=private if isinstance(source, PrivateExamples) else source,  # no run outlives the next one
            budget=spender,
            share=share,
            plan=plan,
            task=voting,
            wording=voting.wording,
            rows=scorer,
            answers=answers,
            source=chosen.source,
            abstain_below=below,
            memo=memo,
            **options,
        )

    afrom_private_examples: ClassVar = awaitable(from_private_examples)

    @override
    def _prepare(self, query: Query, config: RunnableConfig) -> EffectGenerator[Any]:
        """Asks the public prompt, which shows an outage before a ticket is charged, unless it goes beside the rows."""
        render = self.wording.renderer(self.task.queries(query))
        yield from self.rows.check_room([own for own, *_ in render.public()[1:]])  # the first one is asked
        public = self.rows.public_row(render(()))
        if self.public_first or not self.rows.asks_beside(calls_at_once(config) or concurrency_limit()):
            yield public
        else:
            yield self.rows.request_checks()
        return render, public

    @override
    def _released(
        self, query: Query, prepared: Any, ticket: Reservation, config: RunnableConfig, keep: Callable[[Any], None]
    ) -> EffectGenerator[VoteOutcome]:
        render, public = prepared
        released = yield from release_once(
            self.private,
            ticket,
            plan=self.plan.release,
            rows=partial(self._asked, public, config=config),
            render=render,
            width=len(self.labels),
            keep=lambda release: keep(self._outcome(release)),
        )
        return self._outcome(released)

    def _asked(self, public: PublicAnswer, prompts: Prompts, *, config: RunnableConfig) -> Effect:
        """Returns the effect for the private rows; the public prompt goes beside them where it was not asked yet."""

        def ask(prompts: Prompts) -> Effect:
            rows = self.rows.ask(prompts)
            return rows if public.value is not None else AskBeside(rows, public)

        return self._limit_concurrency(ask, config)(prompts)

    @override
    def _zero_shot(self, query: Query, prepared: Any, config: RunnableConfig) -> EffectGenerator[VoteOutcome]:
        render, public = prepared
        [row] = public.value if public.value is not None else (yield public)
        return (yield from super()._zero_shot(query, (render, row), config))

    def _outcome(self, released: Release) -> VoteOutcome:
        if released.values is None:  # an index: of a label, or of the constant candidate behind them
            return (released.index if released.index in range(len(self.labels)) else None), None
        votes = tuple(float(value) for value in released.values)
        best = int(np.argmax(votes))
        if self.abstain_below is not None and votes[best] < self.abstain_below * self.plan.expected_rows:
            return None, votes
        return best, votes

    @override
    def _result(self, outcome: VoteOutcome, receipt: Receipt) -> VotingResult:
        return VotingResult(**self._fields(outcome), expected_votes=self.plan.expected_rows, receipt=receipt)


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


def _mechanism_of(noise: Noise, answers: LabelAnswers) -> NoiseName | None:
    """Returns the mechanism's name; None: the usual one of the rows."""
    chosen = noise.mechanism or ("gaussian" if answers.scores else None)
    if answers.scores and chosen != "gaussian":
        raise fail("noise", "'gaussian' with LabelAnswers(scores=True) (the others release only an index)", chosen)
    return chosen


def _plan(
    private: PrivateExamples,
    task: VotingTask,
    chosen: ChosenRows,
    *,
    noise_multiplier: float | None,
    abstain_below: float | None,
    **terms: Any,
) -> QueryPlan:
    """Plans the votes; `terms` are epsilon, delta, adjacency and max_queries."""
    size, width = private.public_size_of(None), len(task.labels)
    rejects = rejection(abstain_below, chosen.design, public_size=size, mechanism=chosen.mechanism)
    return plan_queries(
        size,
        aggregation=ProbabilitySum() if task.votes == "soft" else VoteSum(),
        mechanism=mechanism_by_name(chosen.mechanism)(noise_multiplier=1.0),
        noise_multiplier=noise_multiplier,
        design=chosen.design,
        width=width + len(rejects["constants"]),
        constants=rejects["constants"],
        partition=private.dataset_id,
        **terms,
    )
