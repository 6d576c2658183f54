"""Answers each query with a label that the private documents similar to it voted for, with an individual filter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
from langchain_core.runnables import RunnableConfig, ensure_config
from pydantic import Field
from typing_extensions import override

from langchain_dpicl._construction import awaitable
from langchain_dpicl.backends.rows.neighbour_rows import SimilarTexts
from langchain_dpicl.backends.sync_async import EffectGenerator, run_async, run_sync
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.budget.handler import BudgetLike, resolve_budget
from langchain_dpicl.exceptions import PrivacyBudgetExceededError
from langchain_dpicl.options import FewShotTask, LabelAnswers, Noise, Retrieval, Serving
from langchain_dpicl.options.base import LLM, TemplateLike, option_of
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.privacy.ledger.shares import Reservation
from langchain_dpicl.privacy.mechanisms.noise import Release
from langchain_dpicl.privacy.mechanisms.vote_sums import ProbabilitySum, VoteSum
from langchain_dpicl.release.declare_share import declare_share
from langchain_dpicl.release.filtered_sample import FilteredQuery
from langchain_dpicl.results import Receipt, RetrievalResult
from langchain_dpicl.retrieval.individual_filter import IndividualFilter
from langchain_dpicl.retrieval.plan import (
    RetrievalPlan,
    document_task,
    least_votes,
    open_balances,
    plan_answers,
    similar_texts,
    text_of_query,
    text_to_compare,
)
from langchain_dpicl.runs.door import door
from langchain_dpicl.runs.query_runnable import QueryRunnable, ResultT, TicketCharge, served
from langchain_dpicl.tasks.labels import VoteOutcome, VotingTask, check_abstain_label, check_other_label, reader_of
from langchain_dpicl.tasks.templates import Query
from langchain_dpicl.voting import LabelRunnable, vote_memo


class RetrievalRunnable(QueryRunnable[ResultT]):
    """Base of Runnables that answer each query from the private documents similar to it.

    Formal guarantees:
      - A document participates if its own similarity to the query reaches the public threshold and its unit has a
        participation left; units that participate are debited before the model is called.
      - All answers together are (epsilon, delta)-DP for one unit, at the share's epsilon and delta, however many
        queries there are and however adaptively they are chosen. The share is charged once, before the first
        document is read.
      - No answer, error, event, receipt or report contains the participants, their number, or a balance. An exhausted
        unit stops participating without a sign; when all are exhausted, answers are noise on zero votes.
    """

    filter: Any = Field(exclude=True, repr=False)
    """The individual filter: an `IndividualFilter`, shared by all copies."""

    @staticmethod
    def _declared(
        private: PrivateExamples,
        budget: Budget,
        plan: RetrievalPlan,
        texts: SimilarTexts,
        retrieval: Retrieval,
        *,
        component: str | None,
        epsilon: float | None,
        report: Mapping[str, Any],
        engine: object,
    ) -> dict[str, Any]:
        """Opens the balances, declares the share and returns the handles."""
        balances = open_balances(retrieval.balances, private=private, budget=budget, component=component)
        name = budget.fresh_name("retrieval") if component is None else component
        share = declare_share(
            private, budget, plan, component=name, epsilon=epsilon, public=report, engines=[engine, texts]
        )
        own = IndividualFilter(private, budget=budget, share=share, plan=plan.release, texts=texts, balances=balances)
        return {"private": private, "budget": budget, "share": share, "plan": plan, "filter": own}

    def warm_up(self, config: RunnableConfig | None = None) -> None:
        """Pays for the share if it is not paid yet, and embeds the documents that are not embedded yet.

        Call it when a service starts; otherwise the first query waits for all embeddings. If interrupted, it continues
        where it stopped. It debits no balance.

        Args:
          config: config of the run, whose callbacks receive the charge.

        Raises:
          PrivacyBudgetError: as of a query.
          LedgerError: as of a query.
        """
        run = ensure_config(config)
        with self._events(run) as events:
            resolve_budget(self.budget, run)
            run_sync(self._warm(partial(self._pay, events)))

    async def awarm_up(self, config: RunnableConfig | None = None) -> None:
        """Asynchronous version of `warm_up`."""
        run = ensure_config(config)
        async with self._events(run) as events:
            resolve_budget(self.budget, run)
            await run_async(self._warm(partial(self._pay, events)), is_slow=self._is_slow)

    def _warm(self, pay: TicketCharge) -> EffectGenerator[None]:
        self._open(pay)
        yield from self.filter.participants.warm()

    @override
    def _open(self, pay: TicketCharge) -> None:
        self.filter.open(pay)

    @override
    def _explain(self, error: PrivacyBudgetExceededError) -> None:
        error.args = (f"{error.args[0]} Single queries are free; max_queries= limits their number.",)


class DPRetrievalVotingRunnable(RetrievalRunnable[RetrievalResult], LabelRunnable[RetrievalResult]):
    r"""Answers each query with a label that the private documents similar to it voted for, under differential privacy.

    For each query every document is compared with it, exactly and independently of the others. Each unit (a document,
    or all documents of one person) that reaches a public similarity and has a participation left becomes one prompt:
    its nearest documents, then the query. The prompts vote, and noise is added to the votes of every declared label.

    The share of the budget is paid once, before the first document is read. It pays for `participations` answers of
    *each* unit: a query about one topic does not reduce the balances of other units. See docs/retrieval-voting.md.

    Formal guarantees:
      - All answers together are (epsilon, delta)-DP for one unit under add_remove, at the share's epsilon and delta,
        for any number of adaptively chosen queries; epsilon is an upper bound.
      - Whether a unit participates is a function of its own documents, of public values and of released answers.
      - Noise is added for every declared label, also when no unit participates; a row that fails casts no vote.
      - Balances and numbers of participants are never shown.

    Build it with `from_private_examples`. Input: the query as text (or a message, or a prompt
    value), or a dict of the wording's variables. Queries are public.

    Example:
      >>> from langchain_core.documents import Document
      >>> from langchain_dpicl import Budget, EmbeddedLLM, FewShotTask, PrivateExamples, Retrieval
      >>> notes = [Document(f"Ward {place}: the patient slept well after the new tablets.") for place in range(40)]
      >>> voter = DPRetrievalVotingRunnable.from_private_examples(
      ...     PrivateExamples(notes, public_size=1_000),
      ...     llm=EmbeddedLLM(),
      ...     retrieval=Retrieval(similarity_threshold=0.3, participations=5),
      ...     budget=Budget(epsilon=8.0, delta=1e-6),
      ...     epsilon=4.0,
      ...     task=FewShotTask(labels=("yes", "no")),
      ... )
      >>> voter.invoke("did patients sleep well after the new tablets?") in {"yes", "no", "abstain"}
      True
    """

    min_votes: float | None = None
    """Noisy votes that an answer needs; None: the label with the most noisy votes is the answer."""

    RESULT = RetrievalResult

    @classmethod
    @door("DPRetrievalVotingRunnable")
    def from_private_examples(
        cls,
        private: PrivateExamples,
        *,
        llm: LLM,
        retrieval: Retrieval,
        max_queries: int = 100_000,
        budget: BudgetLike | None = None,
        epsilon: float | None = None,
        example_prompt: TemplateLike | None = None,
        suffix: TemplateLike | None = None,
        prefix: TemplateLike = "",
        task: FewShotTask | None = None,
        noise: Noise | None = None,
        answers: LabelAnswers | None = None,
        serving: Serving | None = None,
        component: str | None = None,
    ) -> Self:
        """Plans the noise, declares the share and returns a Runnable that has spent nothing so far.

        All parameters are public and must not be chosen by looking at the documents; this includes the threshold.

        Args:
          private: the documents; bound to the budget's ledger here. Its `text_key` is what is compared.
          llm: an engine, an object that carries one, or a LangChain model; see `backends.resolve.as_choice_backend`.
            It receives the private prompts.
          retrieval: a `Retrieval`: which documents take part. Its embeddings receive every private document: use local
            ones unless the provider may see the documents. What searches or ranks, as a vector store does, is refused.
          max_queries: most answers, over all processes; more of them cost no more.
          budget: a PrivacyBudgetCallbackHandler, a Budget, or a RunnableConfig whose callbacks hold one; otherwise
            looked up in the context.
          epsilon: this component's share of the budget (its noise is calibrated to it); paid once.
          example_prompt: template of one document; by default its text (and label, where the examples have one).
          suffix: template of the query, after the documents; the label is what follows.
          prefix: template before the documents.
          task: a `FewShotTask`, in place of the three templates, with labels where the examples declare none.
          noise: a `Noise`, of the mechanism "gaussian".
          answers: a `LabelAnswers`: how labels are read, and how many noisy votes one needs.
          serving: a `Serving`: limits, memory and tenants; cached answers debit no balance.
          component: name in the ledger.

        Raises:
          ConfigurationError: a public fault, or `replace_one`; nothing was charged and no private call was made.
          CapabilityError: the model cannot choose among labels, or the embeddings cannot embed.
          UnsilencableModelError: the model or the embeddings cannot be called without tracing.
          PrivacyBudgetError: no budget, another budget, or one that does not suffice.
          LedgerError: the file of balances cannot be used.
          ModelCallError: the model or the embeddings could not be reached.
          MemoError: the memo cannot be used.

        Source: Koskela, Tobaben and Honkela (2023); docs/proofs/individual-filters.md.
        """
        spender = resolve_budget(budget)
        near = option_of("retrieval", retrieval, Retrieval)
        wanted = option_of("answers", answers, LabelAnswers)
        words = document_task(private, FewShotTask.of(task, example_prompt, suffix, prefix))
        voted = VotingTask.of(private, words, wanted)
        check_abstain_label(wanted, voted.labels)
        check_other_label(wanted)
        text_of_query(voted.wording, ("",) * len(voted.wording.input_variables))
        fields, memo = served(serving, budget=spender, component=component)
        plan = plan_answers(
            private,
            spender,
            near,
            noise=noise,
            epsilon=epsilon,
            max_queries=max_queries,
            width=len(voted.labels),
            aggregation=ProbabilitySum() if wanted.votes == "soft" else VoteSum(),
        )
        texts = similar_texts(private, near)
        voted, scorer, reading = reader_of(llm, voted, is_wanted=wanted.calibrate)
        least = least_votes(wanted, plan)
        report = {**plan.to_dict(), **voted.to_dict(), **reading, **texts.to_dict(), "min_votes": least}
        handles = cls._declared(
            private, spender, plan, texts, near, component=component, epsilon=epsilon, report=report, engine=scorer
        )
        return cls(
            task=voted,
            wording=voted.wording,
            rows=scorer,
            answers=wanted,
            min_votes=least,
            memo=vote_memo(memo, voted, llm, private=private, public=report, budget=spender, share=handles["share"]),
            **handles,
            **fields,
        )

    afrom_private_examples: ClassVar = awaitable(from_private_examples)

    @override
    def _prepare(self, query: Query, config: RunnableConfig) -> EffectGenerator[Any]:
        """Embeds the query and asks the public prompt, which detects an outage before a query is counted."""
        render = self.wording.renderer(self.task.queries(query))
        direction = yield self.filter.texts.request_public(text_to_compare(self.wording, query))
        [row] = yield self.rows.request_public_rows([render(())])
        asks = self._limit_concurrency(self.rows.ask, config)
        return FilteredQuery(direction, rows=asks, render=render, width=len(self.labels)), row

    @override
    def _released(
        self, query: Query, prepared: Any, ticket: Reservation, config: RunnableConfig, keep: Callable[[Any], None]
    ) -> EffectGenerator[VoteOutcome]:
        participants, settled = self.filter.participants, lambda: self.filter.settled
        released = yield from participants.release(prepared[0], ticket, settled=settled)
        outcome = self._outcome(released)
        keep(outcome)
        return outcome

    def _outcome(self, released: Release) -> VoteOutcome:
        votes = tuple(float(value) for value in np.asarray(released.values))
        best = int(np.argmax(votes))
        return (None if self.min_votes is not None and votes[best] < self.min_votes else best), votes

    @override
    def _result(self, outcome: VoteOutcome, receipt: Receipt) -> RetrievalResult:
        floor = {"min_votes": self.min_votes, "noise_stddev": self.plan.noise_stddev}
        return RetrievalResult(**self._fields(outcome), **floor, receipt=receipt)
