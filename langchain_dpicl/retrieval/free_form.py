"""Answers each query with a text, from keywords or embeddings of the private documents similar to it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from langchain_core.embeddings import Embeddings
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import RunnableConfig
from typing_extensions import override

from langchain_dpicl._construction import awaitable
from langchain_dpicl.backends.resolve import as_text_backend
from langchain_dpicl.backends.rows.neighbour_rows import SimilarTexts
from langchain_dpicl.backends.sync_async import EffectGenerator
from langchain_dpicl.budget.events import tells_refusals
from langchain_dpicl.budget.handler import resolve_budget
from langchain_dpicl.free_form.answers import (
    AnswerOutcome,
    EmbeddingAggregator,
    NoisyKeywordAggregator,
    answer_template,
)
from langchain_dpicl.free_form.runnable import (
    MOST_OWED,
    AnswerSpace,
    DPFreeFormRunnable,
    check_space,
    identity_of,
    memory_of,
    public_side,
)
from langchain_dpicl.generation.decoding_loop import check_texts
from langchain_dpicl.options import FewShotTask, Serving
from langchain_dpicl.options.answers import Exhausted
from langchain_dpicl.privacy._validate import check_int, fail
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.privacy.ledger.shares import Reservation
from langchain_dpicl.release.declare_share import declare_share, share_of_delta
from langchain_dpicl.release.filtered_sample import FilteredQuery
from langchain_dpicl.results import FreeFormResult
from langchain_dpicl.retrieval.individual_filter import IndividualFilter
from langchain_dpicl.retrieval.plan import (
    RetrievalPlan,
    check_documents_per_row,
    check_option_names,
    examples_of,
    open_balances,
    plan_retrieval,
    slots_of,
    templates_of,
    text_of_query,
    text_to_compare,
)
from langchain_dpicl.retrieval.voting import RetrievalRunnable
from langchain_dpicl.runs.answer_memo import TenantRegistry, scope_of_plan
from langchain_dpicl.runs.query_runnable import served
from langchain_dpicl.stores.balances import SQLiteBalances
from langchain_dpicl.stores.memos import ReleaseMemo
from langchain_dpicl.tasks.labels import wording_of
from langchain_dpicl.tasks.templates import FewShotTemplate, Query


class DPRetrievalFreeFormRunnable(RetrievalRunnable[FreeFormResult], DPFreeFormRunnable):
    r"""Answers each query with a text that the private documents similar to it agree on, under differential privacy.

    Participation, balances and price are those of `DPRetrievalVotingRunnable`. Each participating unit becomes a
    prompt, which the model completes in a call that is not traced. No private answer is released, only an aggregate:

    - "keywords": the public words that occur in each answer are a vector of length 1; the noisy sum is
      released, and the public model writes the answer from the words above the noise floor.
    - "embedding": answers are embedded, in calls that are not traced, and the noisy sum of their unit vectors is
      released. The answer is the nearest of the public candidates.

    Formal guarantees:
      - As `DPRetrievalVotingRunnable`: (epsilon, delta)-DP for one unit under add_remove, paid once, for any number of
        adaptively chosen queries; balances and numbers of participants are never shown.
      - Candidates and keywords come from public calls, which receive no private document.
      - If nothing exceeds the noise floor, the answer is `abstain_answer` and the public model is not called. Of the
        queries without participants, at most one of twenty is answered as if there were some.
      - If the public model fails to write the answer, the release is kept for its tenant: asking again is free.

    Build it with `from_documents` or `from_private_examples`. Input: as of `DPFreeFormRunnable`.

    Example:
      >>> from langchain_core.documents import Document
      >>> from langchain_dpicl import Budget, EmbeddedLLM
      >>> from langchain_dpicl.backends import LocalEmbeddings
      >>> notes = [Document(f"Ward {place}: new tablets, the patient slept well.") for place in range(40)]
      >>> helper = DPRetrievalFreeFormRunnable.from_documents(
      ...     notes,
      ...     public_size=1_000,
      ...     llm=EmbeddedLLM(),
      ...     embeddings=LocalEmbeddings(),
      ...     keyword_domain=["tablets", "well", "slept", "syrup"],
      ...     num_keywords=2,
      ...     similarity_threshold=0.3,
      ...     participations=5,
      ...     budget=Budget(epsilon=8.0, delta=1e-6),
      ...     epsilon=4.0,
      ... )
      >>> isinstance(helper.invoke("how did patients sleep with the new tablets?"), str)
      True
    """

    @classmethod
    @tells_refusals("DPRetrievalFreeFormRunnable")
    def from_private_examples(  # type: ignore[override]
        cls,
        private: PrivateExamples,
        *,
        llm: Any,
        embeddings: Embeddings,
        similarity_threshold: float,
        participations: int,
        aggregation: AnswerSpace = "keywords",
        answer_embeddings: Embeddings | None = None,
        candidates: Any = None,
        candidates_llm: Any = None,
        num_candidates: int = 20,
        keyword_domain: Sequence[str] | None = None,
        num_keywords: int = 10,
        max_keywords: int | None = None,
        answer_prompt: str | BasePromptTemplate[Any] | None = None,
        max_tokens: int = 64,
        stop: Sequence[str] = ("\n",),
        budget: Any = None,
        config: Any = None,
        epsilon: float | None = None,
        delta: float | None = None,
        noise_multiplier: float | None = None,
        max_queries: int = 100_000,
        balances: str | os.PathLike[str] | SQLiteBalances | None = None,
        rows: str = "slots",
        num_slots: int | None = None,
        documents_per_row: int = 1,
        example_prompt: Any = None,
        prefix: str = "",
        suffix: str | None = None,
        example_separator: str = "\n\n",
        abstain_answer: str = "abstain",
        on_exhausted: Exhausted = "raise",
        max_query_chars: int | None = None,
        memo_size: int = 256,
        memo: ReleaseMemo | str | os.PathLike[str] | None = None,
        tenant_max_queries: int | None = None,
        component: str | None = None,
        name: str | None = None,
        **others: Any,
    ) -> DPRetrievalFreeFormRunnable:
        """Plans the noise, declares the share and returns a Runnable that has spent nothing so far.

        All parameters are public and must not be chosen by looking at the documents; this includes the threshold.

        Args:
          private: the documents; see `DPRetrievalVotingRunnable`.
          llm: completes the private prompts, which it receives; see `DPFreeFormRunnable`.
          embeddings: LangChain embeddings that compare documents with queries; they receive every private document.
          similarity_threshold: least cosine between a document and the query, in (0, 1].
          participations: answers that one unit may take part in.
          aggregation: "keywords" or "embedding", as above.
          answer_embeddings: for "embedding": embeddings that receive the private answers; by default `embeddings`.
          candidates: public answers; see `DPFreeFormRunnable`, as the next seven.
          candidates_llm: the public model, which writes.
          num_candidates: answers that the public model is asked for.
          keyword_domain: the public keywords; by default the words of the query and of the candidates.
          num_keywords: most keywords of one answer.
          max_keywords: largest domain that is built for a query.
          answer_prompt: template of the prompt that the public model writes from.
          max_tokens: most tokens of an answer.
          stop: texts that end an answer.
          budget: a PrivacyBudgetCallbackHandler or Budget; otherwise looked up in `config`, then in the context.
          config: a RunnableConfig whose callbacks may hold the budget.
          epsilon: this component's share of the budget (its noise is calibrated to it); paid once.
          delta: the share's delta; by default in proportion to epsilon.
          noise_multiplier: noise in units of the sensitivity, instead of calibrating.
          max_queries: most answers, over all processes; more of them cost no more.
          balances: file of balances that outlives the process; see `DPRetrievalVotingRunnable`, as the next three.
          rows: "slots" or "units".
          num_slots: with slots: rows of every query (default 32).
          documents_per_row: a unit's nearest documents that its row shows.
          example_prompt: template of one document; by default its text.
          prefix: template before the documents.
          suffix: template of the query, after the documents; the answer is what follows.
          example_separator: text between the parts.
          abstain_answer: the answer when nothing exceeds the noise floor; must not be a candidate.
          on_exhausted: after `max_queries`: "raise", or "zero_shot": the public model's own answer.
          max_query_chars: characters that a query may have, all of its variables together; longer ones are refused
            before any call. None: as a record's text, `private.max_chars`.
          memo_size: answers cached per tenant; cache hits debit no balance. 0: none.
          memo: a store of answers that outlives the process; see `DPFreeFormRunnable`.
          tenant_max_queries: queries per tenant, counted on the ledger; None: as many as there are.
          component: name in the ledger.
          name: the Runnable's name in traces.
          **others: refused; the message says why options that search or rank cannot work.

        Raises:
          ConfigurationError: a public fault, or `replace_one`; nothing was charged and no private call was made.
          CapabilityError: the model cannot write text, or `embeddings` cannot embed.
          UnsilencableModelError: the model or the embeddings cannot be called without tracing.
          PrivacyBudgetError: no budget, another budget, or one that does not suffice.
          LedgerError: the file of balances cannot be used.
          ModelCallError: the model or the embeddings could not be reached.
          MemoError: the memo cannot be used.

        Source: Koskela, Tobaben and Honkela (2023); Wu et al. (2024); docs/proofs/individual-filters.md.
        """
        check_option_names(others)
        spender = resolve_budget(budget, config)
        read_by = embeddings if aggregation == "embedding" and answer_embeddings is None else answer_embeddings
        keyword_options = (keyword_domain, max_keywords, answer_prompt)
        is_embedded = check_space(private, aggregation, read_by, candidates, only_keywords=keyword_options)
        templates = templates_of(private, example_prompt, suffix)
        wording = wording_of(private, FewShotTask(prefix=prefix, example_separator=example_separator, **templates))
        template = None if is_embedded else answer_template(wording, answer_prompt)
        _check_public(wording, num_candidates, is_embedded=is_embedded)
        serving = Serving(
            max_query_chars=max_query_chars,
            memo_size=memo_size,
            memo=memo,
            tenant_max_queries=tenant_max_queries,
            on_exhausted=on_exhausted,
        )
        options, store = served(serving, budget=spender, component=component)
        limits: dict[str, Any] = {"max_tokens": max_tokens, "stop": check_texts("stop", stop or (), least=0)}
        count = num_candidates if keyword_domain is None else 0
        public = public_side(llm, candidates_llm, candidates, count=count, limits=limits)
        engine = as_text_backend(llm)
        words: dict[str, Any] = {"domain": keyword_domain, "num_keywords": num_keywords, "most": max_keywords}
        space: EmbeddingAggregator | NoisyKeywordAggregator = (
            EmbeddingAggregator(engine, read_by, fixed=public.fixed, **limits)
            if is_embedded
            else NoisyKeywordAggregator(engine, **words, **limits)
        )
        plan = plan_retrieval(
            private.public_size_of(None),
            epsilon=epsilon,
            delta=share_of_delta(spender, epsilon=epsilon, delta=delta),
            participations=participations,
            width=space.width,
            num_slots=slots_of(rows, num_slots),
            max_queries=max_queries,
            adjacency=spender.adjacency,
            aggregation=space.aggregation,
            noise_multiplier=noise_multiplier,
            partition=private.dataset_id,
        )
        # The floor is known only now: it depends on the calibrated noise, which depends on the space's width.
        _set_floor(space, plan, _check_abstention(abstain_answer, public.fixed or ()))
        balance_file = open_balances(balances, private=private, budget=spender, component=component)
        texts = SimilarTexts(
            embeddings, threshold=similarity_threshold, most=check_documents_per_row(private, documents_per_row)
        )
        model = {"answers": aggregation, "writer": public.name, "candidates_are": public.kind, "space": space.to_dict()}
        asked = {
            "num_candidates": num_candidates,
            **limits,
            "stop": [*limits["stop"]],
            "abstain_answer": abstain_answer,
        }
        report: dict[str, Any] = {**plan.to_dict(), **wording.to_dict(), **model, **asked, **texts.to_dict()}
        component = component if component is not None else spender.fresh_name("retrieval")
        declared: dict[str, Any] = {"component": component, "epsilon": epsilon, "public": report}
        share = declare_share(private, spender, plan, engines=[space, texts], **declared)
        identity = {**report, **identity_of(llm, candidates_llm, template, public=public, domain=keyword_domain)}
        scope = scope_of_plan(spender, share, dataset_id=private.dataset_id, public=identity)
        paid: dict[str, Any] = {"budget": spender, "share": share}
        own = IndividualFilter(private, plan=plan.release, texts=texts, balances=balance_file, **paid)
        handles = {"private": private, "plan": plan, "wording": wording, "filter": own, **paid}
        answers = {
            "space": space,
            "public": public,
            "answer_prompt": template,
            "owed": TenantRegistry(memo_size=MOST_OWED),
        }
        return cls(**handles, **answers, memo=memory_of(store, scope), name=name, **options)

    afrom_private_examples: ClassVar[Any] = awaitable(from_private_examples)  # type: ignore[arg-type]

    @classmethod
    def from_documents(cls, documents: Iterable[Any], **options: Any) -> DPRetrievalFreeFormRunnable:
        """Declares LangChain documents as private examples, and builds the Runnable on them.

        Args:
          documents: the `Document` objects; no vector store and no retriever.
          **options: as for `DPRetrievalVotingRunnable.from_documents`, and those of `from_private_examples`.

        Raises:
          ConfigurationError: a public fault.
          RecordError: a document cannot be read.
        """
        holder = [documents]  # see `DPRetrievalVotingRunnable.from_documents`
        del documents
        private, remaining = examples_of(holder, options)
        return cls.from_private_examples(private, **remaining)

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


def _check_public(wording: FewShotTemplate, count: int, *, is_embedded: bool) -> None:
    """Checks the options of public calls and the variables of the query."""
    check_int("num_candidates", count, low=2 if is_embedded else 1)
    text_of_query(wording, ("",) * len(wording.input_variables))


def _check_abstention(answer: Any, candidates: tuple[str, ...]) -> str:
    """Returns the text for no answer, unless it is blank or a candidate."""
    if not isinstance(answer, str) or not answer.strip() or answer.strip() in candidates:
        raise fail("abstain_answer", "a text that is none of the candidates", answer)
    return answer


def _set_floor(space: EmbeddingAggregator | NoisyKeywordAggregator, plan: RetrievalPlan, answer: str) -> None:
    """Sets the noise floor of a space, which the plan decides, and the answer below it."""
    space.abstain_answer = answer
    if isinstance(space, NoisyKeywordAggregator):
        space.floor = plan.noise_floor
    else:
        space.floor_of = plan.noise_floor_along
