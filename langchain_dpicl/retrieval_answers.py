"""DPRetrievalFreeFormRunnable: a text per query, from the private documents near to it, by keywords or embeddings.

Knows wording, plans and what is asked in public; similarities, balances, rows, sums and noise are behind the curator.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from langchain_core.embeddings import Embeddings
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import RunnableConfig
from typing_extensions import override

from langchain_dpicl._answer_spaces import EmbeddingSpace, NoisyKeywordSpace, Outcome
from langchain_dpicl._candidates import PublicModel, PublicSide, answer_template
from langchain_dpicl._individual_filter import IndividualFilter
from langchain_dpicl._query_memo import checked_memo, scope_of_plan
from langchain_dpicl._retrieval_options import (
    check_known,
    checked_balances,
    checked_most,
    compared_text,
    examples_of,
    slots_of,
    templates_of,
    text_of_query,
)
from langchain_dpicl._voting_options import check_flags, wording_of
from langchain_dpicl.asking import Query, TaskWording
from langchain_dpicl.backends.resolve import as_text_backend
from langchain_dpicl.backends.similar import SimilarTexts
from langchain_dpicl.backends.walk import Walk
from langchain_dpicl.callbacks import resolve_budget
from langchain_dpicl.declaring import declare_share, share_of_delta
from langchain_dpicl.free_form import MOST_OWED, AnswerSpace, DPFreeFormRunnable, check_space, memory_of, models_of
from langchain_dpicl.privacy._validate import check_choice, check_int, fail
from langchain_dpicl.privacy.examples import PrivateExamples
from langchain_dpicl.privacy.shares import Reservation
from langchain_dpicl.querying import Exhausted
from langchain_dpicl.release.filtered_sample import Question
from langchain_dpicl.retrieval import RetrievalRunnable
from langchain_dpicl.retrieval_planning import RetrievalPlan, plan_retrieval
from langchain_dpicl.run_events import tells_refusals
from langchain_dpicl.stores.balances import SQLiteBalances
from langchain_dpicl.stores.memos import ReleaseMemo
from langchain_dpicl.tenants import Tenants
from langchain_dpicl.writing import check_texts


class DPRetrievalFreeFormRunnable(RetrievalRunnable, DPFreeFormRunnable):
    r"""Answers each query with a text that the private documents near to it agree on, under differential privacy.

    Who takes part, who is debited and what that costs is as in `DPRetrievalVotingRunnable`. Each unit that takes part
    becomes a prompt, which is answered in the model's own words, in silence. No private answer leaves:

    - "keywords": which public words occur in each answer is noted, as a vector of length 1; the noisy sum is
      released, and the public model writes the answer from the words that stand out of the noise.
    - "embedding": answers are embedded, in silence, and the noisy sum of their unit vectors is released. The answer is
      the nearest of candidates that were written in public.

    Formal guarantees:
      - As `DPRetrievalVotingRunnable`: (epsilon, delta)-DP for one unit under add_remove, paid once, for any number of
        adaptively chosen queries; no balance and no number of participants is shown.
      - Candidates and keywords come from public calls, which see no private document.
      - Where nothing stands out of the noise the answer is `abstain_answer`, and the public model is not asked. Of the
        queries that nobody takes part in, one of twenty (at most) is answered as if somebody had.
      - A release whose answer could not be written is kept for its tenant: asking again is free.

    Build it with `from_documents` or `from_private_examples`. Input: as of `DPFreeFormRunnable`.

    Example:
      >>> from langchain_core.documents import Document
      >>> from langchain_dpicl import Budget, EmbeddedLLM, LocalEmbeddings
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
        with_receipt: bool = False,
        progress: bool | None = None,
        component: str | None = None,
        name: str | None = None,
        **others: Any,
    ) -> DPRetrievalFreeFormRunnable:
        """Plans the noise, declares the share and returns a Runnable that has not spent anything yet.

        All parameters are public and must not be chosen by looking at the documents; the threshold neither.

        Args:
          private: the documents; see `DPRetrievalVotingRunnable`.
          llm: what completes private prompts; see `DPFreeFormRunnable`. It SEES the private prompts.
          embeddings: LangChain embeddings that documents are compared by; they SEE every private document.
          similarity_threshold: least cosine between a document and the query, in (0, 1].
          participations: answers that one unit may take part in.
          aggregation: "keywords" or "embedding", as above.
          answer_embeddings: for "embedding": what SEES the private answers; by default `embeddings`.
          candidates: public answers; see `DPFreeFormRunnable`, as the next seven.
          candidates_llm: the public model, which writes.
          num_candidates: answers that the public model is asked for.
          keyword_domain: the public keywords; by default the words of the query and of the candidates.
          num_keywords: keywords of one answer, at most.
          max_keywords: keywords of a domain that is made for a query, at most.
          answer_prompt: template of the prompt that the public model writes from.
          max_tokens: most tokens of an answer.
          stop: what ends answers.
          budget: a PrivacyBudgetCallbackHandler or Budget; otherwise looked up in `config`, then in the context.
          config: a RunnableConfig whose callbacks may hold the budget.
          epsilon: this component's share of the budget (its noise is calibrated to it); paid once.
          delta: the share's delta; by default in proportion to epsilon.
          noise_multiplier: noise in units of the sensitivity, instead of calibrating.
          max_queries: answers at most, over all processes; they cost nothing more.
          balances: file of balances that outlive the process; see `DPRetrievalVotingRunnable`, as the next three.
          rows: "slots" or "units".
          num_slots: with slots: rows of every query (default 32).
          documents_per_row: a unit's nearest documents that its row shows.
          example_prompt: template of one document; by default its text.
          prefix: template before the documents.
          suffix: template of the query, behind the documents; the answer is what follows.
          example_separator: stands between the parts.
          abstain_answer: the answer where nothing stands out of the noise; none of the candidates.
          on_exhausted: after `max_queries`: "raise", or "zero_shot": the public model's own answer.
          max_query_chars: characters that a query may have, all of its variables together; longer ones are refused
            before any call. None: as a record's text, `private.max_chars`.
          memo_size: answers remembered per tenant and told again, which debits nobody; 0: none.
          memo: where answers outlive the process; see `DPFreeFormRunnable`.
          tenant_max_queries: queries per tenant, counted on the ledger; None: as many as there are.
          with_receipt: answers are `FreeFormResult`; also with `on_exhausted="zero_shot"`.
          progress: whether batches show a bar; None: on a terminal.
          component: name in the ledger.
          name: the Runnable's name in traces.
          **others: refused; what searches or ranks with the reason.

        Raises:
          ConfigurationError: a public fault, or `replace_one`; nothing was charged and no private call was made.
          CapabilityError: the model cannot write text, or these are no embeddings.
          UnsilencableModelError: the model or the embeddings cannot be called in silence.
          PrivacyBudgetError: no budget, another budget, or one that does not suffice.
          LedgerError: the file of balances cannot be used.
          ModelCallError: the model or the embeddings could not be reached.
          MemoError: the memo cannot be used.

        Source: Koskela, Tobaben and Honkela (2023); Wu et al. (2024); docs/proofs/individual-filters.md.
        """
        check_known(others)
        spender = resolve_budget(budget, config)
        read = embeddings if aggregation == "embedding" and answer_embeddings is None else answer_embeddings
        only = (keyword_domain, max_keywords, answer_prompt)
        is_embedded = check_space(private, aggregation, read, candidates, only_keywords=only)
        shown = templates_of(private, example_prompt, suffix)
        wording = wording_of(private, prefix=prefix, separator=example_separator, **shown)
        writes = None if is_embedded else answer_template(wording, answer_prompt)
        _check_public(wording, num_candidates, is_embedded=is_embedded, on_exhausted=on_exhausted)
        check_flags(name=name, progress=progress, max_query_chars=max_query_chars, with_receipt=with_receipt)
        tenants = Tenants(max_queries=tenant_max_queries, memo_size=memo_size)
        kept = checked_memo(memo, budget=spender, memo_size=memo_size, component=component)
        ends: dict[str, Any] = {"max_tokens": max_tokens, "stop": check_texts("stop", stop or (), least=0)}
        count = num_candidates if keyword_domain is None else 0
        public = _public_side(llm, candidates_llm, candidates, count=count, ends=ends)
        words = (keyword_domain, num_keywords, max_keywords)
        space = _space(llm, read if is_embedded else None, public, words=words, ends=ends)
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
        _set_floor(space, plan, _checked_abstention(abstain_answer, public.fixed or ()))
        held = checked_balances(balances, private=private, budget=spender, component=component)
        texts = SimilarTexts(embeddings, threshold=similarity_threshold, most=checked_most(private, documents_per_row))
        said = {"answers": aggregation, "writer": public.name, "candidates_are": public.kind, "space": space.to_dict()}
        asked = {"num_candidates": num_candidates, "max_tokens": max_tokens, "stop": list(ends["stop"])}
        asked["abstain_answer"] = abstain_answer
        seen: dict[str, Any] = {**plan.to_dict(), **wording.to_dict(), **said, **asked, **texts.to_dict()}
        called = component if component is not None else spender.fresh_name("retrieval")
        share = declare_share(
            private, spender, plan, component=called, epsilon=epsilon, public=seen, engines=[space, texts]
        )
        lists = {"candidates": public.fixed, "domain": keyword_domain and list(keyword_domain)}
        models = models_of(llm, candidates_llm, writes)
        told = scope_of_plan(spender, share, dataset_id=private.dataset_id, public={**seen, **lists, **models})
        own = IndividualFilter(private, budget=spender, share=share, plan=plan.release, texts=texts, balances=held)
        handles: dict[str, Any] = {"private": private, "budget": spender, "share": share, "plan": plan, "filter": own}
        options = {"on_exhausted": on_exhausted, "with_receipt": with_receipt, "progress": progress, "name": name}
        answers = {"space": space, "public": public, "answer_prompt": writes, "owed": Tenants(memo_size=MOST_OWED)}
        handles |= {
            "max_query_chars": max_query_chars,
            "wording": wording,
            "rows": None,
            "tenants": tenants,
            "memo": memory_of(kept, told),
        }
        return cls(**handles, **options, **answers)

    @classmethod
    def from_documents(cls, documents: Iterable[Any], **options: Any) -> DPRetrievalFreeFormRunnable:
        """Declares LangChain documents as private examples, and builds the Runnable on them.

        Args:
          documents: `Document` objects, themselves: no vector store and no retriever.
          **options: as for `DPRetrievalVotingRunnable.from_documents`, and those of `from_private_examples`.

        Raises:
          ConfigurationError: a public fault.
          RecordError: a document cannot be read.
        """
        held = [documents]
        del documents
        private, left = examples_of(held, options)
        return cls.from_private_examples(private, **left)

    @override
    def _prepared(self, query: Query, config: RunnableConfig) -> Walk[Any]:
        """Embeds the query and asks for candidates, and so whether everybody whom the release needs is there."""
        direction = yield self.filter.texts.ask_public(compared_text(self.wording, query))
        asked = yield from super()._prepared(query, config)
        return dataclasses.replace(asked, direction=direction)

    @override
    def _released(
        self, query: Query, prepared: Any, ticket: Reservation, config: RunnableConfig, keep: Callable[[Any], None]
    ) -> Walk[Outcome]:
        source, settled = prepared.round.rows, lambda: self.filter.settled
        asks = self._limited(source.ask, config)
        question = Question(prepared.direction, rows=asks, render=prepared.render, width=source.width)
        released = yield from self.filter.participants.release(question, ticket, settled=settled)
        outcome: Outcome = prepared.round.outcome(released)
        keep(outcome)
        return outcome


def _check_public(wording: TaskWording, count: int, *, is_embedded: bool, on_exhausted: str) -> None:
    """Refuses public options that are none."""
    check_choice("on_exhausted", on_exhausted, ("raise", "zero_shot"))
    check_int("num_candidates", count, low=2 if is_embedded else 1)
    text_of_query(wording, ("",) * len(wording.input_variables))


def _checked_abstention(answer: Any, candidates: tuple[str, ...]) -> str:
    """Returns the text for no answer, or refuses what is none or could be an answer."""
    if not isinstance(answer, str) or not answer.strip() or answer.strip() in candidates:
        raise fail("abstain_answer", "a text that is none of the candidates", answer)
    return answer


def _set_floor(space: EmbeddingSpace | NoisyKeywordSpace, plan: RetrievalPlan, answer: str) -> None:
    """Tells a space what noise alone reaches, and what to answer below that."""
    space.abstain_answer = answer
    if isinstance(space, NoisyKeywordSpace):
        space.floor = plan.noise_floor
    else:
        space.floor_of = plan.noise_floor_along


def _public_side(llm: Any, writer: Any, candidates: Any, *, count: int, ends: dict[str, Any]) -> PublicSide:
    own = None if writer is None else PublicModel(writer, **ends)
    return PublicSide(PublicModel(llm, **ends), writer=own, candidates=candidates, count=count)


def _space(
    llm: Any, read: Any, public: PublicSide, *, words: tuple[Any, int, Any], ends: dict[str, Any]
) -> EmbeddingSpace | NoisyKeywordSpace:
    """Returns where answers are compared: by embeddings that read them, or by keywords."""
    engine = as_text_backend(llm)
    if read is not None:
        return EmbeddingSpace(engine, read, fixed=public.fixed, **ends)
    domain, number, most = words
    return NoisyKeywordSpace(engine, domain=domain, num_keywords=number, most=most, **ends)
