"""Answers each query with a text, from keywords or embeddings of the private documents similar to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Self, cast

from langchain_core.runnables import RunnableConfig
from typing_extensions import override

from langchain_dpicl._construction import awaitable
from langchain_dpicl.backends.sync_async import EffectGenerator
from langchain_dpicl.budget.handler import BudgetLike, resolve_budget
from langchain_dpicl.free_form.answers import AnswerOutcome, EmbeddingAggregator, NoisyKeywordAggregator
from langchain_dpicl.free_form.runnable import MOST_OWED, AnswerMaker, DPFreeFormRunnable, TextAnswers
from langchain_dpicl.options import EmbeddingAnswers, FewShotTask, KeywordAnswers, Noise, Retrieval, Serving
from langchain_dpicl.options.base import LLM, TemplateLike, option_of
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.privacy.ledger.shares import Reservation
from langchain_dpicl.release.filtered_sample import FilteredQuery
from langchain_dpicl.results import FreeFormResult
from langchain_dpicl.retrieval.plan import document_task, plan_answers, similar_texts, text_of_query, text_to_compare
from langchain_dpicl.retrieval.voting import RetrievalRunnable
from langchain_dpicl.runs.answer_memo import TenantRegistry
from langchain_dpicl.runs.door import door
from langchain_dpicl.runs.query_runnable import served
from langchain_dpicl.tasks.templates import Query


class DPRetrievalFreeFormRunnable(RetrievalRunnable[FreeFormResult], DPFreeFormRunnable):
    r"""Answers each query with a text that the private documents similar to it agree on, under differential privacy.

    Participation, balances and price are those of `DPRetrievalVotingRunnable`. Each participating unit becomes a
    prompt, which the model completes in a call that is not traced. No private answer is released, only an aggregate:

    - `KeywordAnswers`: the public words that occur in each answer are a vector of length 1; the noisy sum is
      released, and the public model writes the answer from the words above the noise floor.
    - `EmbeddingAnswers`: answers are embedded, in calls that are not traced, and the noisy sum of their unit vectors is
      released. The answer is the nearest of the public candidates.

    Formal guarantees:
      - As `DPRetrievalVotingRunnable`: (epsilon, delta)-DP for one unit under add_remove, paid once, for any number of
        adaptively chosen queries; balances and numbers of participants are never shown.
      - Candidates and keywords come from public calls, which receive no private document.
      - If nothing exceeds the noise floor, the answer is `abstain_answer` and the public model is not called. Of the
        queries without participants, at most one of twenty is answered as if there were some.
      - If the public model fails to write the answer, the release is kept for its tenant: asking again is free.

    Build it with `from_private_examples`. Input: as of `DPFreeFormRunnable`.

    Example:
      >>> from langchain_core.documents import Document
      >>> from langchain_dpicl import Budget, EmbeddedLLM, KeywordAnswers, PrivateExamples, Retrieval
      >>> notes = [Document(f"Ward {place}: new tablets, the patient slept well.") for place in range(40)]
      >>> helper = DPRetrievalFreeFormRunnable.from_private_examples(
      ...     PrivateExamples(notes, public_size=1_000),
      ...     llm=EmbeddedLLM(),
      ...     retrieval=Retrieval(similarity_threshold=0.3, participations=5),
      ...     budget=Budget(epsilon=8.0, delta=1e-6),
      ...     epsilon=4.0,
      ...     answers=KeywordAnswers(keywords=("tablets", "well", "slept", "syrup"), num_keywords=2),
      ... )
      >>> isinstance(helper.invoke("how did patients sleep with the new tablets?"), str)
      True
    """

    @classmethod
    @door("DPRetrievalFreeFormRunnable")
    def from_private_examples(  # type: ignore[override]
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
        answers: KeywordAnswers | EmbeddingAnswers | None = None,
        serving: Serving | None = None,
        component: str | None = None,
    ) -> Self:
        """Plans the noise, declares the share and returns a Runnable that has spent nothing so far.

        All parameters are public and must not be chosen by looking at the documents; this includes the threshold.

        Args:
          private: the documents; see `DPRetrievalVotingRunnable`.
          llm: completes the private prompts, which it receives; see `DPFreeFormRunnable`.
          retrieval: a `Retrieval`: which documents take part; see `DPRetrievalVotingRunnable`.
          max_queries: most answers, over all processes; more of them cost no more.
          budget: a PrivacyBudgetCallbackHandler, a Budget, or a RunnableConfig whose callbacks hold one; otherwise
            looked up in the context.
          epsilon: this component's share of the budget (its noise is calibrated to it); paid once.
          example_prompt: template of one document; by default its text.
          suffix: template of the query, after the documents; the answer is what follows.
          prefix: template before the documents.
          task: a `FewShotTask`, in place of the three templates; without labels.
          noise: a `Noise`, of the mechanism "gaussian".
          answers: a `KeywordAnswers` (the default) or an `EmbeddingAnswers`: how private answers are aggregated, and
            what is answered where nothing exceeds the noise.
          serving: a `Serving`: limits, memory and tenants; cached answers debit no balance.
          component: name in the ledger.

        Raises:
          ConfigurationError: a public fault, or `replace_one`; nothing was charged and no private call was made.
          CapabilityError: the model cannot write text, or the embeddings cannot embed.
          UnsilencableModelError: the model or the embeddings cannot be called without tracing.
          PrivacyBudgetError: no budget, another budget, or one that does not suffice.
          LedgerError: the file of balances cannot be used.
          ModelCallError: the model or the embeddings could not be reached.
          MemoError: the memo cannot be used.

        Source: Koskela, Tobaben and Honkela (2023); Wu et al. (2024); docs/proofs/individual-filters.md.
        """
        spender = resolve_budget(budget)
        near = option_of("retrieval", retrieval, Retrieval)
        wanted = cast("TextAnswers", option_of("answers", answers, KeywordAnswers, EmbeddingAnswers))
        words = document_task(private, FewShotTask.of(task, example_prompt, suffix, prefix))
        fields, memo = served(serving, budget=spender, component=component)
        texts = similar_texts(private, near)
        maker = AnswerMaker.of(private, llm, words, wanted, near=texts.embeddings)
        space = cast("EmbeddingAggregator | NoisyKeywordAggregator", maker.space)
        text_of_query(maker.wording, ("",) * len(maker.wording.input_variables))
        if not wanted.abstain_answer.strip() or wanted.abstain_answer.strip() in (maker.public.fixed or ()):
            raise fail("abstain_answer", "a text that is none of the candidates", wanted.abstain_answer)
        plan = plan_answers(
            private,
            spender,
            near,
            noise=noise,
            epsilon=epsilon,
            max_queries=max_queries,
            width=space.width,
            aggregation=space.aggregation,
        )
        # The floor is known only now: it depends on the calibrated noise, which depends on the space's width.
        if isinstance(space, NoisyKeywordAggregator):
            space.floor = plan.noise_floor
        else:
            space.floor_of = plan.noise_floor_along
        report = {**plan.to_dict(), **maker.to_dict(), "abstain_answer": wanted.abstain_answer, **texts.to_dict()}
        handles = cls._declared(
            private,
            spender,
            plan,
            texts,
            near,
            component=component,
            epsilon=epsilon,
            report=report,
            engine=space,
        )
        return cls(
            wording=maker.wording,
            maker=maker,
            owed=TenantRegistry(memo_size=MOST_OWED),
            memo=maker.memo(memo, private=private, budget=spender, share=handles["share"], report=report),
            **handles,
            **fields,
        )

    afrom_private_examples: ClassVar = awaitable(from_private_examples)  # type: ignore[assignment]

    @override
    def _prepare(self, query: Query, config: RunnableConfig) -> EffectGenerator[Any]:
        """Embeds the query and asks for candidates, which calls every model that the release needs."""
        direction = yield self.filter.texts.request_public(text_to_compare(self.wording, query))
        asked = yield from super()._prepare(query, config)
        return dataclasses.replace(asked, direction=direction)

    @override
    def _released(
        self, query: Query, prepared: Any, ticket: Reservation, config: RunnableConfig, keep: Callable[[Any], None]
    ) -> EffectGenerator[AnswerOutcome]:
        source, settled = prepared.round.rows, lambda: self.filter.settled
        asks = self._limit_concurrency(source.ask, config)
        question = FilteredQuery(prepared.direction, rows=asks, render=prepared.render, width=source.width)
        released = yield from self.filter.participants.release(question, ticket, settled=settled)
        outcome: AnswerOutcome = prepared.round.outcome(released)
        keep(outcome)
        return outcome
