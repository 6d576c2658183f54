"""Answers each query with a text from a private release of embeddings or keywords (Wu et al. 2024)."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

from langchain_core.embeddings import Embeddings
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import RunnableConfig
from pydantic import Field
from typing_extensions import override

from langchain_dpicl._construction import awaitable
from langchain_dpicl.backends.resolve import as_text_backend
from langchain_dpicl.backends.sync_async import EffectGenerator
from langchain_dpicl.budget.events import tells_refusals
from langchain_dpicl.budget.handler import resolve_budget
from langchain_dpicl.exceptions import ModelCallError
from langchain_dpicl.free_form.answers import (
    KEYWORDS,
    AnswerOutcome,
    AnswerRelease,
    CandidateSource,
    EmbeddingAggregator,
    KeywordAggregator,
    PublicModel,
    Space,
    answer_template,
)
from langchain_dpicl.generation.decoding_loop import check_texts
from langchain_dpicl.options import FewShotTask, Serving
from langchain_dpicl.options.answers import Exhausted
from langchain_dpicl.planning.expected_utility import RowDesign
from langchain_dpicl.privacy._validate import check_choice, check_int, fail
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.privacy.ledger.shares import Reservation
from langchain_dpicl.release.curator import release_once
from langchain_dpicl.release.declare_share import declare_share, share_of_delta
from langchain_dpicl.release.sample import Record
from langchain_dpicl.results import FreeFormResult, Receipt
from langchain_dpicl.runs.answer_memo import AnswerMemo, Tenant, TenantRegistry, scope_of_plan, traits_of
from langchain_dpicl.runs.query_plan import plan_queries
from langchain_dpicl.runs.query_runnable import QueryRunnable, served
from langchain_dpicl.stores.memos import ReleaseMemo
from langchain_dpicl.tasks.labels import wording_of
from langchain_dpicl.tasks.templates import Query

AnswerSpace: TypeAlias = Literal["embedding", "keywords"]

MOST_OWED = 256


@dataclass(frozen=True, slots=True)
class _PreparedQuery:
    """What is prepared before a ticket is reserved; public."""

    render: Callable[[Sequence[Record]], str]
    zero_shot: str
    round: AnswerRelease
    direction: Any = None
    """Embedding of the query, for retrieval; None: no documents are compared."""


class DPFreeFormRunnable(QueryRunnable[FreeFormResult]):
    r"""Answers each query with a text that many private few-shot prompts agree on, under differential privacy.

    For each query a fresh secret sample of the private examples is drawn, each row of it becomes a prompt that
    ends with the query, and the model completes each prompt in a call that is not traced. No private answer is
    released, only an aggregate of them:

    - "embedding": answers are embedded, in calls that are not traced, and the noisy sum of their unit vectors is
      released. The answer is the nearest of the public candidates.
    - "keywords": which words of a public domain occur in the answers is counted, and an ordered list of common ones is
      released. The public model writes the answer from them.

    Formal guarantees:
      - All answers together are (epsilon, delta)-DP for one unit of the private examples, at the share's epsilon and
        delta, for adaptively chosen queries; epsilon is an upper bound.
      - Candidates and keywords come from public calls, which receive no private record and are made before the ticket
        is reserved.
      - A row that fails, or answers nothing, adds zeros; one record moves one row.
      - If the public model fails to write the answer, the release is kept for its tenant: asking again is free.

    Build it with `from_private_examples`. Input: the query as text (or a message, or a prompt value), or a dict of the
    wording's variables. Queries are public: only the private records are protected.

    Example:
      >>> from langchain_core.embeddings import DeterministicFakeEmbedding
      >>> from langchain_dpicl import Budget, EmbeddedLLM, PrivateExamples
      >>> solved = [
      ...     {"question": "card stuck?", "answer": "a new card"},
      ...     {"question": "pin lost?", "answer": "a new pin"},
      ... ]
      >>> private = PrivateExamples(solved, text_key="question", fields=("answer",), public_size=2_000)
      >>> helper = DPFreeFormRunnable.from_private_examples(
      ...     private,
      ...     llm=EmbeddedLLM(),
      ...     embeddings=DeterministicFakeEmbedding(size=16),
      ...     candidates=["a new card", "a new pin"],
      ...     example_prompt="Q: {question}\nA: {answer}",
      ...     suffix="Q: {input}\nA:",
      ...     budget=Budget(epsilon=2.0, delta=1e-6),
      ...     epsilon=1.0,
      ...     max_queries=10,
      ... )
      >>> helper.invoke("my card is stuck") in {"a new card", "a new pin"}
      True
    """

    space: Any = Field(exclude=True, repr=False)
    """How answers are aggregated: an `EmbeddingAggregator` or a `KeywordAggregator`."""

    public: Any = Field(exclude=True, repr=False)
    """The models and candidates of public calls: a `PublicRowContext`."""

    answer_prompt: Any = Field(default=None, exclude=True, repr=False)
    """The template that an answer is written from; None: the answer is one of the candidates."""

    owed: Any = Field(exclude=True, repr=False)
    """Charged releases by tenant whose answer is not written yet; shared by all copies."""

    RESULT = FreeFormResult

    @classmethod
    @tells_refusals("DPFreeFormRunnable")
    def from_private_examples(
        cls,
        private: PrivateExamples,
        *,
        llm: Any,
        max_queries: int,
        aggregation: AnswerSpace = "embedding",
        embeddings: Embeddings | None = None,
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
        example_prompt: Any = None,
        prefix: str = "",
        suffix: str | None = None,
        example_separator: str = "\n\n",
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
        component: str | None = None,
        name: str | None = None,
    ) -> DPFreeFormRunnable:
        """Plans the noise, declares the share and returns a Runnable that has spent nothing so far.

        All parameters are public and must not be chosen by looking at the records.

        Args:
          private: the examples; bound to the budget's ledger here. All of them may be drawn, whatever their label.
          llm: an engine that completes text, an object that carries one, or a LangChain chat or completion model; see
            `backends.resolve.as_text_backend`. It receives the private prompts.
          max_queries: queries that the share pays for.
          aggregation: "embedding" or "keywords", as above.
          embeddings: LangChain embeddings, for "embedding". They receive the private answers.
          candidates: public answers: a list, or a Runnable or function that gives one for a query's text (its variables
            as a dict, where there are several). Never from private records. By default the public model writes them.
          candidates_llm: the public model: it writes candidates, the zero-shot answer and the answer from keywords, in
            traced calls, with its own settings. A Runnable from a prompt to text, or an engine; by default `llm`.
          num_candidates: answers that the public model is asked for, if it writes the candidates. Equal ones count
            once, so it needs a temperature above 0.
          keyword_domain: the public keywords; by default the words of the query and of the candidates.
          num_keywords: keywords of one release.
          max_keywords: largest domain that is built for a query; 256 by default.
          answer_prompt: template of the prompt that the public model writes the answer from, with {keywords} and the
            query's variables; by default the prompt without examples, under a line with the keywords.
          max_tokens: most tokens of a private answer (and of public ones, where an engine writes them).
          stop: texts that end an answer, private or public.
          budget: a PrivacyBudgetCallbackHandler or Budget; otherwise looked up in `config`, then in the context.
          config: a RunnableConfig whose callbacks may hold the budget.
          epsilon: this component's share of the budget (its noise is calibrated to it).
          delta: the share's delta; by default in proportion to epsilon.
          noise_multiplier: noise in units of the sensitivity, instead of calibrating (its cost must fit `epsilon`).
          example_prompt: template of one record; by default text and label on a line each.
          prefix: template before the examples.
          suffix: template of the query, after the examples; the answer is what follows.
          example_separator: text between the parts.
          rows: "units" (every sampled unit is a one-shot prompt; the default) or "slots" (k-shot prompts).
          num_slots: number of slots, or expected number of unit rows.
          shots_per_slot: records per slot; 1 for unit rows.
          sampling: "poisson", or "fixed" (balanced partition; `replace_one` only).
          overfill: expected units per shot of a slot.
          on_exhausted: "raise", or "zero_shot": the public model's own answer, for free; the receipt says so.
          max_query_chars: characters that a query may have, all of its variables together; longer ones are refused
            before any call. None: as a record's text, `private.max_chars`.
          memo_size: answers cached per tenant; cache hits are not charged. 0: every query is charged.
          memo: a store of answers that outlives the process, so that another process returns them for free: the path of
            a SQLite file (created if missing), or a `ReleaseMemo` such as `PostgresMemo`. Needs `component` and a
            durable ledger.
          tenant_max_queries: charged queries per tenant (`config["configurable"]["tenant"]`), counted on the ledger and
            so over all processes; None: as many as the ledger allows.
          component: name in the ledger; the same name and plan find the same share, with its remaining tickets.
          name: the Runnable's name in traces.

        Raises:
          ConfigurationError: a public fault; nothing was charged and no private call was made.
          CapabilityError: the model cannot write text, or `embeddings` cannot embed.
          UnsilencableModelError: the model or the embeddings cannot be called without tracing.
          PrivacyBudgetError: no budget, another budget, or one that does not suffice.
          ModelCallError: the model or the embeddings could not be reached.
          MemoError: the memo cannot be used.

        Source: Wu et al. (2024), Privacy-Preserving In-Context Learning for Large Language Models.
        """
        spender = resolve_budget(budget, config)
        is_embedded = check_space(
            private, aggregation, embeddings, candidates, only_keywords=(keyword_domain, max_keywords, answer_prompt)
        )
        task = FewShotTask(example_prompt, suffix, prefix=prefix, example_separator=example_separator)
        wording = wording_of(private, task)
        template = None if is_embedded else answer_template(wording, answer_prompt)
        check_int("num_candidates", num_candidates, low=2 if is_embedded else 1)
        serving = Serving(
            max_query_chars=max_query_chars,
            memo_size=memo_size,
            memo=memo,
            tenant_max_queries=tenant_max_queries,
            on_exhausted=on_exhausted,
        )
        options, store = served(serving, budget=spender, component=component)
        shape: dict[str, Any] = {"num_slots": num_slots, "shots_per_slot": shots_per_slot, "overfill": overfill}
        limits: dict[str, Any] = {"max_tokens": max_tokens, "stop": check_texts("stop", stop or (), least=0)}
        count = num_candidates if keyword_domain is None else 0
        public = public_side(llm, candidates_llm, candidates, count=count, limits=limits)
        engine = as_text_backend(llm)
        words: dict[str, Any] = {"domain": keyword_domain, "num_keywords": num_keywords, "most": max_keywords}
        space: Space = (
            EmbeddingAggregator(engine, embeddings, fixed=public.fixed, **limits)
            if is_embedded
            else KeywordAggregator(engine, **words, **limits)
        )
        plan = plan_queries(
            private.public_size_of(None),
            epsilon=epsilon,
            delta=share_of_delta(spender, epsilon=epsilon, delta=delta),
            adjacency=spender.adjacency,
            max_queries=max_queries,
            aggregation=space.aggregation,
            mechanism=space.mechanism,
            noise_multiplier=noise_multiplier,
            design=RowDesign.choose(rows=rows, sampling=sampling, smallest_size=private.public_size_of(None), **shape),
            width=space.width,
            partition=private.dataset_id,
        )
        model = {"answers": aggregation, "model": getattr(engine, "name", type(engine).__name__), "writer": public.name}
        asked = {"candidates_are": public.kind, "num_candidates": num_candidates, **limits, "stop": [*limits["stop"]]}
        report = {**plan.to_dict(), **wording.to_dict(), **model, **asked, **space.to_dict()}
        component = component if component is not None else spender.fresh_name("free-form")
        declared: dict[str, Any] = {"component": component, "epsilon": epsilon, "public": report}
        share = declare_share(private, spender, plan, engines=[space], **declared)
        identity = {**report, **identity_of(llm, candidates_llm, template, public=public, domain=keyword_domain)}
        scope = scope_of_plan(spender, share, dataset_id=private.dataset_id, public=identity)
        handles = {"private": private, "budget": spender, "share": share, "plan": plan, "wording": wording}
        answers = {
            "space": space,
            "public": public,
            "answer_prompt": template,
            "owed": TenantRegistry(memo_size=MOST_OWED),
        }
        return cls(**handles, **answers, memo=memory_of(store, scope), name=name, **options)

    afrom_private_examples: ClassVar[Any] = awaitable(from_private_examples)

    @override
    def _prepare(self, query: Query, config: RunnableConfig) -> EffectGenerator[_PreparedQuery]:
        """Asks for candidates, which calls every model that the release needs."""
        prompts = self.wording.renderer([query])
        variables = dict(zip(self.wording.input_variables, query, strict=True))
        answers = yield from self.public.before(prompts(())[0], variables, config)
        aggregation = yield from self.space.prepared(query, answers.candidates)
        return _PreparedQuery(lambda records: prompts(records)[0], answers.zero_shot, aggregation)

    @override
    def _released(
        self,
        query: Query,
        prepared: _PreparedQuery,
        ticket: Reservation,
        config: RunnableConfig,
        keep: Callable[[Any], None],
    ) -> EffectGenerator[AnswerOutcome]:
        source = prepared.round.rows
        released = yield from release_once(
            self.private,
            ticket,
            plan=self.plan.release,
            rows=self._limit_concurrency(source.ask, config),
            render=prepared.render,
            width=source.width,
            keep=lambda release: keep(prepared.round.outcome(release)),
        )
        outcome: AnswerOutcome = prepared.round.outcome(released)
        return outcome

    @override
    def _read_memo(self, tenant: Tenant, query: Query) -> AnswerOutcome | None:
        owed: AnswerOutcome | None = self.owed.recall(tenant, query)
        if owed is not None and self.memo is None:
            return owed
        stored: AnswerOutcome | None = super()._read_memo(
            tenant, query
        )  # another process may have written it meanwhile
        return owed if stored is None else stored

    @override
    def _is_whole(self, outcome: AnswerOutcome) -> bool:
        return outcome.answer is not None

    @override
    def _finished(
        self, tenant: Tenant, query: Query, outcome: AnswerOutcome, config: RunnableConfig
    ) -> EffectGenerator[AnswerOutcome]:
        """Writes the answer from released keywords; until then the release is kept in `owed`."""
        if outcome.answer is None:
            owed = outcome
            self.owed.remember(
                tenant, query, owed
            )  # first: the call below may fail or be cancelled, and the release is charged
            answer = yield from self._written(query, owed.keywords or (), config)
            outcome = dataclasses.replace(owed, answer=answer)
            self._keep(tenant, query, outcome, instead_of=owed)
            self.owed.forget(tenant, query, owed)
        finished: AnswerOutcome = yield from super()._finished(tenant, query, outcome, config)
        return finished

    def _written(self, query: Query, keywords: tuple[str, ...], config: RunnableConfig) -> EffectGenerator[str]:
        variables = dict(zip(self.wording.input_variables, query, strict=True))
        prompt = self.answer_prompt.format_prompt(**variables, **{KEYWORDS: ", ".join(keywords)})
        try:
            answer: str = yield from self.public.write(prompt, config)
        except ModelCallError as error:
            failed = str(error).rstrip(". ")
        else:
            return answer
        where = " and in this process" if self.memo is None else ""
        raise ModelCallError(
            f"{failed}. The release stays charged and is kept: asking again, as the same tenant{where}, writes the "
            f"answer for free from its keywords, {list(keywords)}"
        )

    @override
    def _zero_shot(
        self, query: Query, prepared: _PreparedQuery, config: RunnableConfig
    ) -> EffectGenerator[AnswerOutcome]:
        return AnswerOutcome(prepared.zero_shot)
        yield  # makes this a generator

    @override
    def _text(self, outcome: AnswerOutcome) -> str:
        return outcome.answer or ""

    @override
    def _result(self, outcome: AnswerOutcome, receipt: Receipt) -> FreeFormResult:
        return FreeFormResult(
            answer=self._text(outcome),
            keywords=outcome.keywords,
            similarities=outcome.similarities,
            abstained=outcome.abstained,
            receipt=receipt,
        )


def _outcome_to_json(outcome: AnswerOutcome) -> dict[str, Any]:
    """Returns an outcome as JSON values."""
    return dataclasses.asdict(outcome)


def _outcome_from_json(stored: Mapping[str, Any]) -> AnswerOutcome:
    """Returns an outcome as it was kept."""
    answer, words, cosines = (stored[name] for name in ("answer", "keywords", "similarities"))
    if not isinstance(answer, str) and not (answer is None and words is not None):
        raise TypeError("no answer")
    if not (words is None or (isinstance(words, list) and all(isinstance(word, str) for word in words))):
        raise TypeError("no keywords")
    shown = None if cosines is None else {str(text): float(cosine) for text, cosine in cosines.items()}
    words = None if words is None else tuple(words)
    return AnswerOutcome(answer, keywords=words, similarities=shown, abstained=stored.get("abstained", False) is True)


def memory_of(store: ReleaseMemo | None, scope: Mapping[str, Any]) -> AnswerMemo | None:
    """Returns the cache of a component's answers in a memo; None: there is no memo."""
    return (
        None if store is None else AnswerMemo(store, scope=scope, packed=_outcome_to_json, unpacked=_outcome_from_json)
    )


def public_side(llm: Any, writer: Any, candidates: Any, *, count: int, limits: dict[str, Any]) -> CandidateSource:
    """Returns the public calls of a component whose private calls `llm` answers; `writer` None: `llm` writes."""
    own = None if writer is None else PublicModel(writer, **limits)
    return CandidateSource(PublicModel(llm, **limits), writer=own, candidates=candidates, count=count)


def identity_of(
    llm: Any,
    writer: Any,
    template: BasePromptTemplate[Any] | None,
    *,
    public: CandidateSource,
    domain: Sequence[str] | None,
) -> dict[str, Any]:
    """Returns what decides an answer besides the report: models, template and lists, which are too long for reports."""
    models = {"reader": traits_of(llm), "public": traits_of(llm if writer is None else writer)}
    lists = {"candidates": public.fixed, "domain": domain and list(domain)}
    return {**models, **lists, "answer_prompt": _prompt_with_names(template)}


def _prompt_with_names(template: BasePromptTemplate[Any] | None) -> str | None:
    """Returns a template filled with the names of its variables: a text that is the same in every process."""
    if template is None:
        return None
    return template.format_prompt(**{name: f"<{name}>" for name in template.input_variables}).to_string()


def check_space(
    private: Any, aggregation: Any, embeddings: Any, candidates: Any, *, only_keywords: tuple[Any, Any, Any]
) -> bool:
    """Returns whether answers are aggregated as embeddings; refuses options that the other aggregation ignores."""
    if not isinstance(private, PrivateExamples):
        raise fail("private", "PrivateExamples", type(private).__name__)
    check_choice("aggregation", aggregation, ("embedding", "keywords"))
    if aggregation == "keywords":
        if embeddings is not None:
            raise fail("embeddings", "None with aggregation='keywords'", type(embeddings).__name__)
        if only_keywords[0] is not None and (only_keywords[1] is not None or candidates is not None):
            advice = "These options build a domain, and keyword_domain= is one; leave them out."
            raise fail("keyword_domain", "no max_keywords= and no candidates= beside it", "one of them", advice)
        return False
    if any(option is not None for option in only_keywords):
        options = "keyword_domain, max_keywords, answer_prompt"
        raise fail(options, "None with aggregation='embedding'", "one of them")
    return True
