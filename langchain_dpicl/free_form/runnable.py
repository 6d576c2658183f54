"""Answers each query with a text from a private release of embeddings or keywords (Wu et al. 2024)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, ClassVar, Self, TypeAlias, cast

from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import RunnableConfig
from pydantic import Field
from typing_extensions import override

from langchain_dpicl._construction import awaitable
from langchain_dpicl.backends.resolve import as_embeddings, as_model, as_text_backend
from langchain_dpicl.backends.sync_async import EffectGenerator
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.budget.handler import BudgetLike, resolve_budget
from langchain_dpicl.exceptions import ModelCallError
from langchain_dpicl.free_form.answers import (
    KEYWORDS,
    AnswerOutcome,
    AnswerRelease,
    CandidateSource,
    EmbeddingAggregator,
    KeywordAggregator,
    NoisyKeywordAggregator,
    PublicModel,
    Space,
    answer_template,
)
from langchain_dpicl.options import EmbeddingAnswers, FewShotTask, KeywordAnswers, Noise, Rows, Serving
from langchain_dpicl.options.base import LLM, TemplateLike, option_of
from langchain_dpicl.options.rows import noise_with
from langchain_dpicl.planning.expected_utility import RowDesign
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.privacy.ledger.shares import Reservation, Share
from langchain_dpicl.release.curator import release_once
from langchain_dpicl.release.declare_share import declare_share, share_of_delta
from langchain_dpicl.release.sample import Record
from langchain_dpicl.results import FreeFormResult, Receipt
from langchain_dpicl.runs.answer_memo import AnswerMemo, Tenant, TenantRegistry, scope_of_plan, traits_of
from langchain_dpicl.runs.door import door
from langchain_dpicl.runs.query_plan import design_of_queries, plan_queries
from langchain_dpicl.runs.query_runnable import QueryRunnable, served
from langchain_dpicl.stores.memos import ReleaseMemo
from langchain_dpicl.tasks.labels import wording_of
from langchain_dpicl.tasks.templates import FewShotTemplate, Query

MOST_OWED = 256
"""Releases of one tenant that wait for their answer to be written."""

TextAnswers: TypeAlias = EmbeddingAnswers | KeywordAnswers


@dataclass(frozen=True, slots=True)
class _PreparedQuery:
    """What is prepared before a ticket is reserved; public."""

    render: Callable[[Sequence[Record]], str]
    zero_shot: str
    round: AnswerRelease
    direction: Any = None
    """Embedding of the query, for retrieval; None: no documents are compared."""


@dataclass(frozen=True, slots=True, eq=False)
class AnswerMaker:
    """The models, templates and aggregation of a component whose answers are texts. Public.

    Attributes:
      options: what the caller gave.
      wording: templates of the prompts.
      space: how private answers are aggregated.
      public: the models and candidates of public calls.
      template: the prompt that an answer is written from; None: the answer is one of the candidates.
      model: name of the engine of the private calls.
      traits: settings of the models, which decide answers.
    """

    options: TextAnswers
    wording: FewShotTemplate
    space: Space
    public: CandidateSource
    template: BasePromptTemplate[Any] | None
    model: str
    traits: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        private: PrivateExamples,
        llm: Any,
        task: FewShotTask,
        options: TextAnswers,
        *,
        near: Any = None,
    ) -> Self:
        """Checks the options and builds what they ask for; `near`: the embeddings of retrieved documents."""
        if task.labels is not None or task.verbalizers is not None:
            raise fail("task", "no labels and no verbalizers, because the answers are texts", "some")
        wording = wording_of(private, task)
        template = answer_template(wording, options.answer_prompt) if isinstance(options, KeywordAnswers) else None
        llm, writer = as_model(llm), as_model(options.writer)
        limits: dict[str, Any] = {"max_tokens": options.max_tokens, "stop": options.stop}
        has_domain = isinstance(options, KeywordAnswers) and options.keywords is not None
        public = CandidateSource(
            PublicModel(llm, **limits),
            writer=None if writer is None else PublicModel(writer, **limits),
            candidates=options.candidates,
            count=0 if has_domain else options.num_candidates,
        )
        engine = as_text_backend(llm)
        space: Space
        if isinstance(options, KeywordAnswers):
            space = KeywordAggregator(engine, options) if near is None else NoisyKeywordAggregator(engine, options)
        else:
            embeddings = as_embeddings(near if options.embeddings is None else options.embeddings)
            space = EmbeddingAggregator(engine, options, embeddings=embeddings, fixed=public.fixed)
        traits = {"reader": traits_of(llm), "public": traits_of(llm if writer is None else writer)}
        name = getattr(engine, "name", type(engine).__name__)
        return cls(options, wording, space, public, template, name, traits)

    def to_dict(self) -> dict[str, Any]:
        """Returns the public parameters, for reports."""
        return {
            **self.wording.to_dict(),
            "answers": self.space.kind,
            "model": self.model,
            "writer": self.public.name,
            "candidates_are": self.public.kind,
            "num_candidates": self.options.num_candidates,
            "max_tokens": self.options.max_tokens,
            "stop": list(self.options.stop),
            "space": self.space.to_dict(),
        }

    def memo(
        self,
        store: ReleaseMemo | None,
        *,
        private: PrivateExamples,
        budget: Budget,
        share: Share,
        report: Mapping[str, Any],
    ) -> AnswerMemo | None:
        """Returns the cache of answers in a memo, by the report and what is too long for it; None: there is no memo."""
        if store is None:
            return None
        domain = self.options.keywords if isinstance(self.options, KeywordAnswers) else None
        lists = {"candidates": self.public.fixed, "domain": domain, "answer_prompt": _prompt_with_names(self.template)}
        public = {**report, **self.traits, **lists}
        scope = scope_of_plan(budget, share, dataset_id=private.dataset_id, public=public)
        return AnswerMemo(store, scope=scope, packed=_outcome_to_json, unpacked=_outcome_from_json)


class DPFreeFormRunnable(QueryRunnable[FreeFormResult]):
    r"""Answers each query with a text that many private few-shot prompts agree on, under differential privacy.

    For each query a fresh secret sample of the private examples is drawn, each row of it becomes a prompt that
    ends with the query, and the model completes each prompt in a call that is not traced. No private answer is
    released, only an aggregate of them:

    - `EmbeddingAnswers`: answers are embedded, in calls that are not traced, and the noisy sum of their unit vectors is
      released. The answer is the nearest of the public candidates.
    - `KeywordAnswers`: which words of a public domain occur in the answers is counted, and an ordered list of common
      ones is released. The public model writes the answer from them.

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
      >>> from langchain_dpicl import Budget, EmbeddedLLM, EmbeddingAnswers, PrivateExamples
      >>> solved = [
      ...     {"question": "card stuck?", "answer": "a new card"},
      ...     {"question": "pin lost?", "answer": "a new pin"},
      ... ]
      >>> private = PrivateExamples(solved, text_key="question", fields=("answer",), public_size=2_000)
      >>> helper = DPFreeFormRunnable.from_private_examples(
      ...     private,
      ...     llm=EmbeddedLLM(),
      ...     max_queries=10,
      ...     budget=Budget(epsilon=2.0, delta=1e-6),
      ...     epsilon=1.0,
      ...     example_prompt="Q: {question}\nA: {answer}",
      ...     suffix="Q: {input}\nA:",
      ...     answers=EmbeddingAnswers(
      ...         embeddings=DeterministicFakeEmbedding(size=16), candidates=("a new card", "a new pin")
      ...     ),
      ... )
      >>> helper.invoke("my card is stuck") in {"a new card", "a new pin"}
      True
    """

    maker: Any = Field(exclude=True, repr=False)
    """How answers are made: an `AnswerMaker`. Public."""

    owed: Any = Field(exclude=True, repr=False)
    """Charged releases by tenant whose answer is not written yet; shared by all copies."""

    RESULT = FreeFormResult

    @classmethod
    @door("DPFreeFormRunnable")
    def from_private_examples(
        cls,
        private: PrivateExamples,
        *,
        llm: LLM,
        max_queries: int,
        budget: BudgetLike | None = None,
        epsilon: float | None = None,
        example_prompt: TemplateLike | None = None,
        suffix: TemplateLike | None = None,
        prefix: TemplateLike = "",
        task: FewShotTask | None = None,
        rows: Rows | None = None,
        noise: Noise | None = None,
        answers: EmbeddingAnswers | KeywordAnswers | None = None,
        serving: Serving | None = None,
        component: str | None = None,
    ) -> Self:
        """Plans the noise, declares the share and returns a Runnable that has spent nothing so far.

        All parameters are public and must not be chosen by looking at the records.

        Args:
          private: the examples; bound to the budget's ledger here. All of them may be drawn, whatever their label.
          llm: an engine that completes text, an object that carries one, or a LangChain chat or completion model; see
            `backends.resolve.as_text_backend`. It receives the private prompts.
          max_queries: queries that the share pays for.
          budget: a PrivacyBudgetCallbackHandler, a Budget, or a RunnableConfig whose callbacks hold one; otherwise
            looked up in the context.
          epsilon: this component's share of the budget (its noise is calibrated to it).
          example_prompt: template of one record; by default text and label on a line each.
          suffix: template of the query, after the examples; the answer is what follows.
          prefix: template before the examples.
          task: a `FewShotTask`, in place of the three templates; without labels.
          rows: a `Rows`: how many prompts, and of how many records; see there.
          noise: a `Noise`; its mechanism follows from `answers`.
          answers: an `EmbeddingAnswers` (the default) or a `KeywordAnswers`: how private answers are aggregated.
          serving: a `Serving`: limits, memory and tenants.
          component: name in the ledger; the same name and plan find the same share, with its remaining tickets.

        Raises:
          ConfigurationError: a public fault; nothing was charged and no private call was made.
          CapabilityError: the model cannot write text, or the embeddings cannot embed.
          UnsilencableModelError: the model or the embeddings cannot be called without tracing.
          PrivacyBudgetError: no budget, another budget, or one that does not suffice.
          ModelCallError: the model or the embeddings could not be reached.
          MemoError: the memo cannot be used.

        Source: Wu et al. (2024), Privacy-Preserving In-Context Learning for Large Language Models.
        """
        spender = resolve_budget(budget)
        words = FewShotTask.of(task, example_prompt, suffix, prefix)
        wanted = cast("TextAnswers", option_of("answers", answers, EmbeddingAnswers, KeywordAnswers))
        fields, memo = served(serving, budget=spender, component=component)
        maker = AnswerMaker.of(private, llm, words, wanted)
        given = noise_with(noise, maker.space.mechanism.name)
        size, wordings = private.public_size_of(None), maker.wording.num_wordings
        shape = design_of_queries(rows, size) or RowDesign.choose_for(wordings, smallest_size=size)
        plan = plan_queries(
            size,
            epsilon=epsilon,
            delta=share_of_delta(spender, epsilon=epsilon, delta=given.delta),
            adjacency=spender.adjacency,
            max_queries=max_queries,
            aggregation=maker.space.aggregation,
            mechanism=maker.space.mechanism,
            noise_multiplier=given.multiplier,
            design=shape.check_wordings(wordings),
            width=maker.space.width,
            partition=private.dataset_id,
        )
        report = {**plan.to_dict(), **maker.to_dict()}
        component = spender.fresh_name("free-form") if component is None else component
        share = declare_share(
            private, spender, plan, component=component, epsilon=epsilon, public=report, engines=[maker.space]
        )
        return cls(
            private=private,
            budget=spender,
            share=share,
            plan=plan,
            wording=maker.wording,
            maker=maker,
            owed=TenantRegistry(memo_size=MOST_OWED),
            memo=maker.memo(memo, private=private, budget=spender, share=share, report=report),
            **fields,
        )

    afrom_private_examples: ClassVar = awaitable(from_private_examples)

    @override
    def _prepare(self, query: Query, config: RunnableConfig) -> EffectGenerator[_PreparedQuery]:
        """Asks for candidates, which calls every model that the release needs."""
        prompts = self.wording.renderer([query])
        variables = dict(zip(self.wording.input_variables, query, strict=True))
        said = yield from self.maker.public.before(prompts(())[0], variables, config)
        aggregation = yield from self.maker.space.prepared(query, said.candidates)
        return _PreparedQuery(prompts.then(itemgetter(0)), said.zero_shot, aggregation)

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
        prompt = self.maker.template.format_prompt(**variables, **{KEYWORDS: ", ".join(keywords)})
        try:
            answer: str = yield from self.maker.public.write(prompt, config)
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


def _prompt_with_names(template: BasePromptTemplate[Any] | None) -> str | None:
    """Returns a template filled with the names of its variables: a text that is the same in every process."""
    if template is None:
        return None
    return template.format_prompt(**{name: f"<{name}>" for name in template.input_variables}).to_string()
