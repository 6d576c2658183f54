"""Answers each query with a text from a private release of embeddings or keywords (Wu et al. 2024)."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from operator import itemgetter
from typing import Any, ClassVar, Self, TypeAlias, cast

import numpy as np
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.messages import BaseMessage
from langchain_core.prompt_values import PromptValue
from langchain_core.prompts import BasePromptTemplate, PromptTemplate
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langchain_core.runnables.config import merge_configs
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import override

from langchain_dpicl._opaque import this_process
from langchain_dpicl._templates import Template
from langchain_dpicl.backends.base import NextTokenBackend, PublicChoiceBackend, TextBackend, cut_at_stop
from langchain_dpicl.backends.base import Rows as EngineRows
from langchain_dpicl.backends.langchain.texts import is_refusal, stops_of
from langchain_dpicl.backends.private_calls.call import classify_error, unwrap
from langchain_dpicl.backends.private_calls.embeddings import SilentEmbeddings
from langchain_dpicl.backends.resolve import as_embeddings, as_model, as_text_backend
from langchain_dpicl.backends.rows.answer_rows import AnswerRows, Keywords
from langchain_dpicl.backends.rows.label_rows import check_room
from langchain_dpicl.backends.sync_async import (
    Call,
    Effect,
    EffectGenerator,
    apublic_call,
    awaitable,
    check_silent,
    public_call,
)
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.budget.handler import BudgetLike, resolve_budget
from langchain_dpicl.exceptions import ModelCallError, PrivacyBudgetExceededError
from langchain_dpicl.options import (
    LLM,
    EmbeddingAnswers,
    FewShotTask,
    KeywordAnswers,
    Noise,
    Rows,
    Serving,
    TemplateLike,
    noise_with,
    option_of,
)
from langchain_dpicl.planning.expected_utility import RowDesign
from langchain_dpicl.privacy._validate import check_int, fail
from langchain_dpicl.privacy.extensions.joint_exponential import MAX_CHOICES, JointExponentialMechanism, KeywordSum
from langchain_dpicl.privacy.extensions.normalized_sums import UnitVectorSum, VoteVectorSum
from langchain_dpicl.privacy.ledger.shares import Reservation, Share
from langchain_dpicl.privacy.mechanisms.release_plan import GaussianMechanism, Release
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.release.curator import Record, release_once
from langchain_dpicl.release.declare_share import declare_share, share_of_delta
from langchain_dpicl.results import FreeFormResult, Receipt
from langchain_dpicl.runs.answer_memo import AnswerMemo, Tenant, scope_of_plan, traits_of
from langchain_dpicl.runs.door import door
from langchain_dpicl.runs.query_plan import design_of_queries, plan_queries
from langchain_dpicl.runs.query_runnable import QueryRunnable, served
from langchain_dpicl.stores.memos import ReleaseMemo
from langchain_dpicl.tasks import FewShotTemplate, Query, wording_of

NO_STREAM = "nostream"
"""LangGraph's tag for calls whose tokens are not streamed to the user of a graph."""

KEYWORDS = "keywords"
"""Variable of an answer prompt: the released keywords, best first, with commas between them."""

_ANY_CHOICE = ("yes", "no")
"""Choices of a test call that detects whether an engine answers."""

_HINT = "Words that good answers to what follows often hold, the most common first: {" + KEYWORDS + "}"


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class PublicRequest:
    """Makes a public call to code outside this package; reports the class of an error only.

    The text of an error is omitted: texts about load and credit may describe the private calls made before.
    """

    name: str
    ask: Callable[[], Any]
    aask: Callable[[], Awaitable[Any]]
    read: Callable[[Any], Any] = lambda found: found
    """Checks what came back."""

    def run(self) -> Any:
        """Answers, blocking."""
        return public_call(lambda: self.read(self.ask()), self._failed)

    async def arun(self) -> Any:
        """Answers, awaiting."""

        async def answer() -> Any:
            return self.read(await self.aask())

        return await apublic_call(answer, self._failed)

    def _failed(self, error: Exception) -> ModelCallError:
        kind = classify_error(error, explain="kind").detail or type(error).__name__
        return ModelCallError(f"a public call to {self.name} failed ({kind}). Check it, then ask again")


class PublicModel:
    """A model that answers public prompts: a Runnable in traced calls, or an engine.

    Args:
      llm: a Runnable from a prompt to text or a message; or an engine that completes text.
      max_tokens: most tokens of an engine's answer; a Runnable has its own limit.
      stop: texts that end an answer.
    """

    def __init__(self, llm: Any, *, max_tokens: int, stop: Sequence[str]) -> None:
        self._llm: Runnable[Any, Any] | TextBackend = llm if isinstance(llm, Runnable) else as_text_backend(llm)
        self._max_tokens = check_int("max_tokens", max_tokens, low=1)
        self._stop = stops_of(stop)
        self.name = type(unwrap(llm)[0]).__name__
        """Public name, for messages."""

    def ask(self, prompt: str | PromptValue, config: RunnableConfig, *, count: int = 1) -> Effect:
        """Returns an `Effect` of `count` equal calls, answered by a tuple of distinct answers that are not blank."""
        return self.request_each([prompt] * count, config)

    def request_each(self, prompts: Sequence[str | PromptValue], config: RunnableConfig) -> Effect:
        """Returns an `Effect` with one call for each public prompt; its answer is as that of `ask`."""
        if isinstance(self._llm, Runnable):
            return self._ask_runnable(self._llm, list(prompts), config)
        return self._ask_engine(self._llm, [text if isinstance(text, str) else text.to_string() for text in prompts])

    @property
    def is_engine(self) -> bool:
        """Whether it is asked with the limits of private calls; a Runnable has settings, and caches, of its own."""
        return not isinstance(self._llm, Runnable)

    def rest(self) -> None:
        """Releases what a run has started for its calls; does nothing by default."""

    def _ask_runnable(self, model: Runnable[Any, Any], prompts: list[Any], config: RunnableConfig) -> Effect:
        if len(prompts) == 1:
            one = partial(model.invoke, prompts[0], config), partial(model.ainvoke, prompts[0], config)
            return PublicRequest(self.name, *one, lambda answer: self._read([answer]))
        calls = partial(model.batch, prompts, config), partial(model.abatch, prompts, config)
        return PublicRequest(self.name, *calls, self._read)

    def _ask_engine(self, engine: TextBackend, prompts: list[str]) -> Effect:
        options: dict[str, Any] = {"max_tokens": self._max_tokens, "stop": self._stop}
        # An engine that cuts private prompts refuses public ones of that length; any shows whether it answers.
        probe = "" if hasattr(engine, "check_public") else prompts[0]
        if "public" in inspect.signature(engine.complete).parameters:  # such engines need no constant batch shape then
            options["public"] = True

        def ask() -> tuple[str, ...]:
            texts = self._read(_list_of_texts(self.name, engine.complete(prompts, **options), len(prompts)))
            # Engines return "" for failed calls too; a second call tells an empty answer from an outage.
            if not texts and isinstance(engine, PublicChoiceBackend):
                engine.score_public(prompts[0], _ANY_CHOICE)
            elif not texts:
                self._check_answers(engine).top_tokens(probe, (), top_k=1)
            return texts

        async def aask() -> tuple[str, ...]:
            texts = self._read(_list_of_texts(self.name, await engine.acomplete(prompts, **options), len(prompts)))
            if not texts and isinstance(engine, PublicChoiceBackend):
                await engine.ascore_public(prompts[0], _ANY_CHOICE)
            elif not texts:
                await self._check_answers(engine).atop_tokens(probe, (), top_k=1)
            return texts

        return PublicRequest(self.name, ask, aask)

    def _check_answers(self, engine: TextBackend) -> NextTokenBackend:
        """Returns the engine if it has a call that fails visibly: "" may be an answer or a failed call."""
        if isinstance(engine, NextTokenBackend):
            return engine
        raise ModelCallError(
            f"a public call to {self.name} brought no text before the first of stop={list(self._stop)}. Check the "
            "model, or give another stop=, then ask again"
        )

    def _read(self, answers: Iterable[Any]) -> tuple[str, ...]:
        return distinct_texts(
            cut_at_stop(text_of(self.name, answer), self._stop, is_stripped=True) for answer in answers
        )


def _list_of_texts(name: str, answers: Any, count: int) -> Sequence[str]:
    """Returns an engine's answers; in another form, private ones would count as failed, and noise alone answer."""
    is_list = isinstance(answers, list | tuple)
    if is_list and len(answers) == count and all(isinstance(answer, str) for answer in answers):
        return cast("Sequence[str]", answers)
    found = "others, or another number" if is_list else type(answers).__name__
    expected = f"expected a list of texts from {name}, one for each prompt ({count})"
    raise ModelCallError(f"{expected}, found {found}. Check its `complete`")


class PrivateDoor:
    """Asks a public prompt as private ones are asked: with the same engine and the same options.

    A call that fails for every row would leave an answer of noise alone, and the public model is asked with its own
    settings.

    Args:
      engine: of the private calls.
      name: of the model, for messages.
      max_tokens: most tokens of an answer.
      stop: texts that end an answer.
    """

    def __init__(self, engine: TextBackend, *, name: str, max_tokens: int, stop: Sequence[str]) -> None:
        self._engine, self._name = engine, name
        self._options: dict[str, Any] = {"max_tokens": max_tokens, "stop": stops_of(stop)}
        self.tells_failures = hasattr(engine, "complete_public")  # from blank answers
        self._opened: set[tuple[int, int]] = set()  # processes in which it was

    def check_room(self, prompts: Sequence[str]) -> EffectGenerator[None]:
        """Raises ModelCallError for a public prompt that private calls would cut (an effect generator)."""
        return check_room(self._engine, prompts)

    def check(self, prompt: str, *, answers: Sequence[str] = (), is_same: bool = False) -> EffectGenerator[None]:
        """Raises where private calls would be heard, fail or bring nothing (an effect generator).

        Args:
          prompt: public.
          answers: of the model in public, if its engine tells no failures: with some, the engine is asked once in each
            process, as that takes a whole private batch.
          is_same: whether the engine itself gave them, with the same limits.
        """
        check_silent(self._engine)
        if answers and this_process() in self._opened:
            return
        text: str = yield self._ask(prompt)
        if answers and is_same and not text.strip():
            raise ModelCallError(
                f"{self._name} answers a public prompt, but brings no text for it where it is asked as for private "
                "ones. Check its `complete`"
            )
        self._opened.add(this_process())

    def _ask(self, prompt: str) -> Effect:
        engine, options = cast("Any", self._engine), self._options
        if self.tells_failures:
            calls = (
                partial(engine.complete_public, prompt, **options),
                partial(engine.acomplete_public, prompt, **options),
            )
            return PublicRequest(self._name, *calls)
        calls = partial(engine.complete, [prompt], **options), partial(engine.acomplete, [prompt], **options)
        return PublicRequest(self._name, *calls, lambda found: _list_of_texts(self._name, found, 1)[0])


@dataclass(frozen=True, slots=True)
class CandidateAnswers:
    """The public answers to a query.

    Attributes:
      zero_shot: an answer of the public model; "" if there is none.
      candidates: distinct answers to choose from, or to take keywords from; none where no ticket is left.
    """

    zero_shot: str
    candidates: tuple[str, ...]


class CandidateSource:
    """The public calls of a query, before its ticket is reserved and after its release.

    Formal guarantees:
      - Each model that a query needs is called here first, so that an outage is detected before a ticket is reserved.
      - Calls contain public texts only.

    Args:
      llm: the model of the private calls; called in public too.
      door: the way of its private calls.
      writer: the public model, if it is another one.
      candidates: a list, or a Runnable or function that returns one for each query; None: the public model writes
        them.
      count: answers that the public model is asked for as candidates; 0: none are needed.
    """

    def __init__(
        self,
        llm: PublicModel,
        *,
        door: PrivateDoor,
        writer: PublicModel | None = None,
        candidates: Any = None,
        count: int = 0,
    ) -> None:
        self._llm, self._door = llm, door
        self._writer = writer or llm
        self._count = 0 if candidates is not None else count
        self.fixed = None if _fetches(candidates) else _candidate_texts(candidates)
        """The candidates if they are the same for every query; otherwise None."""
        self._source: Runnable[Any, Any] | None = None
        if _fetches(candidates):
            self._source = candidates if isinstance(candidates, Runnable) else RunnableLambda(candidates)

    @property
    def name(self) -> str:
        """Name of the public model, for reports."""
        return self._writer.name

    @property
    def kind(self) -> str:
        """Where candidates come from, for reports."""
        if self.fixed is not None:
            return "given"
        return "fetched" if self._source else "written" if self._count else "none"

    def before(
        self, prompts: Sequence[str], query: Mapping[str, str], config: RunnableConfig, *, pays: bool = True
    ) -> EffectGenerator[CandidateAnswers]:
        """Makes the public calls before the ticket is reserved; without one, that for the zero-shot answer alone.

        Args:
          prompts: of the query without records, one for each wording; the first is asked.
          query: values of the query's variables.
          config: of the calls.
          pays: whether a ticket will be reserved.
        """
        if pays:
            yield from self._door.check_room(prompts)
        prompt, *_ = prompts
        config = merge_configs(config, {"tags": [NO_STREAM]})
        own: tuple[str, ...] = yield self._writer.ask(prompt, config, count=max(1, self._count) if pays else 1)
        zero_shot = own[0] if own else ""
        if not pays:
            return CandidateAnswers(zero_shot, ())
        answers: tuple[str, ...] = ()
        if not self._door.tells_failures:
            answers = own if self._writer is self._llm else (yield self._llm.ask(prompt, config))
        # Private calls have limits of their own, and no cache: a call made as they are made shows what they meet.
        yield from self._door.check(prompt, answers=answers, is_same=self._llm.is_engine)
        if self._source is not None:
            return CandidateAnswers(zero_shot, (yield self._fetch(self._source, query, config)))
        return CandidateAnswers(zero_shot, self.fixed or (own if self._count else ()))

    def write(self, prompt: PromptValue, config: RunnableConfig) -> EffectGenerator[str]:
        """Asks the public model for its answer (an effect generator)."""
        answers: tuple[str, ...] = yield self._writer.ask(prompt, config)
        if not answers:
            raise self.no_text()
        return answers[0]

    def no_text(self) -> ModelCallError:
        """Returns the error of an answer without text: a blank or cut one, or a refusal."""
        advice = "Check the model, then ask again"
        return ModelCallError(f"a public call to {self.name} brought no text before the first stop string. {advice}")

    @staticmethod
    def _fetch(source: Runnable[Any, Any], query: Mapping[str, str], config: RunnableConfig) -> Effect:
        value: Any = next(iter(query.values())) if len(query) == 1 else dict(query)

        calls = partial(source.invoke, value, config), partial(source.ainvoke, value, config)
        return PublicRequest("candidates", *calls, lambda found: _candidate_texts(found) or ())


def answer_template(wording: FewShotTemplate, template: Any) -> BasePromptTemplate[Any]:
    """Returns the template that an answer is written from; by default a line of keywords and the zero-shot prompt."""
    if KEYWORDS in wording.input_variables:
        raise fail("suffix, prefix", f"another name than {{{KEYWORDS}}} for a variable of the query", KEYWORDS)
    if template is None:
        between = wording.separator.replace("{", "{{").replace("}", "}}")
        template = between.join([*([wording.prefix] if wording.prefix else []), _HINT, wording.suffix])
    if isinstance(template, str):
        template = PromptTemplate.from_template(Template.of("answer_prompt", template).text)
    if not isinstance(template, BasePromptTemplate):
        raise fail("answer_prompt", "text or a prompt template", type(template).__name__)
    variables = set(template.input_variables)
    if KEYWORDS not in variables or not variables <= {KEYWORDS, *wording.input_variables}:
        expected = f"a template with {{{KEYWORDS}}} and variables among {list(wording.input_variables)}"
        raise fail("answer_prompt", expected, sorted(variables))
    try:  # fails here rather than after a charged release
        template.format_prompt(**dict.fromkeys(variables, "text"))
    except Exception as error:  # noqa: BLE001  a template class may raise anything
        fault = type(error).__name__
    else:
        return template
    raise fail("answer_prompt", "a template that texts can be filled into", fault)


def text_of(name: str, answer: Any) -> str:
    """Returns the text of a public answer; "" where a private one would not count, such as one beside a tool call."""
    if isinstance(answer, str):
        return answer
    if isinstance(answer, BaseMessage):
        return "" if is_refusal(answer) else str(answer.text)
    if isinstance(answer, Document):
        return answer.page_content
    raise fail(name, "answers that are text, messages or documents", type(answer).__name__)


def distinct_texts(texts: Iterable[str]) -> tuple[str, ...]:
    """Returns the texts without white space around them, each once, blank ones left out."""
    return tuple(dict.fromkeys(text.strip() for text in texts if text.strip()))


def _fetches(candidates: Any) -> bool:
    return isinstance(candidates, Runnable) or callable(candidates)


def _candidate_texts(values: Any) -> tuple[str, ...] | None:
    if values is None:
        return None
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise fail("candidates", "a list of texts, or a Runnable or function that gives one", type(values).__name__)
    return distinct_texts(text_of("candidates", value) for value in values)


MOST_KEYWORDS = 256
"""Default of the largest keyword domain that is built for a query."""

_TOO_FEW = (
    "Give writer= a model with a temperature above 0 (and without tools or a response cache), your own candidates=, "
    "other embeddings=, or another stop= if answers begin with one. Nothing was charged."
)


@dataclass(frozen=True, slots=True)
class AnswerOutcome:
    """The public state of one answer.

    Attributes:
      answer: the text; None: to be written from the keywords.
      keywords: released, best first.
      similarities: cosine to the released sum, by candidate.
      abstained: nothing exceeded the noise floor; the text is the abstention text.
    """

    answer: str | None
    keywords: tuple[str, ...] | None = None
    similarities: dict[str, float] | None = None
    abstained: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class AnswerRelease:
    """One query prepared for its release.

    Attributes:
      rows: turns private prompts into rows.
      outcome: computes the outcome from the release (post-processing).
    """

    rows: AnswerRows
    outcome: Callable[[Release], AnswerOutcome]


class EmbeddingAggregator:
    """Aggregates answers by embedding them; releases the noisy sum of their unit vectors.

    Attributes:
      floor_of: number of candidates to the least length along the nearest one; public, from the plan.
      abstain_answer: the text below that length.
    """

    kind = "embedding"
    floor_of: Callable[[int], float] | None = None

    def __init__(
        self, engine: TextBackend, answers: EmbeddingAnswers, *, embeddings: Any, fixed: tuple[str, ...] | None
    ) -> None:
        if not isinstance(embeddings, Embeddings | SilentEmbeddings):
            raise fail("embeddings", "LangChain embeddings", type(embeddings).__name__)
        if fixed is not None:
            _check_candidates(fixed)
        self.abstain_answer = answers.abstain_answer
        self.embeddings = embeddings if isinstance(embeddings, SilentEmbeddings) else SilentEmbeddings(embeddings)
        self._rows = AnswerRows.embedded(engine, self.embeddings, max_tokens=answers.max_tokens, stop=answers.stop)
        self._fixed = None if fixed is None else (fixed, self._checked(fixed, self.embeddings.public(fixed)))

    aggregation = UnitVectorSum()
    mechanism = GaussianMechanism(1.0)

    @property
    def width(self) -> int:
        """Columns of a row."""
        return self._rows.width

    def prepared(self, query: Sequence[str], candidates: tuple[str, ...]) -> EffectGenerator[AnswerRelease]:
        """Embeds the candidates and drops those without a direction; of fixed ones, embeds one to detect an outage."""
        del query
        _check_candidates(candidates)
        # Fixed candidates were embedded at construction; one is embedded again to detect an outage before the ticket.
        if self._fixed is not None:
            yield self._embedded(candidates[:1])
            return self._round(*self._fixed)
        vectors = yield self._embedded(candidates)
        known = vectors.any(axis=1)
        candidates = tuple(compress(candidates, known))
        _check_candidates(candidates)
        return self._round(candidates, vectors[known])

    @staticmethod
    def _checked(candidates: tuple[str, ...], vectors: EngineRows) -> EngineRows:
        for text, vector in zip(candidates, vectors, strict=True):
            if not vector.any():
                expected = "texts that the embeddings tell something about"
                raise fail("candidates", expected, text, "Leave it out, or give other embeddings=.")
        return vectors

    def _embedded(self, texts: tuple[str, ...]) -> Effect:
        return Call(partial(self.embeddings.public, texts), partial(self.embeddings.apublic, texts))

    def _round(self, candidates: tuple[str, ...], vectors: EngineRows) -> AnswerRelease:
        return AnswerRelease(self._rows, partial(self._nearest, candidates, vectors))

    def _nearest(self, candidates: tuple[str, ...], vectors: EngineRows, released: Release) -> AnswerOutcome:
        """Returns the candidate nearest to the released sum, the first of equals; below the floor the abstention text.

        Args:
          candidates: public.
          vectors: their embeddings, float64[candidates, width].
          released: the noisy sum of the rows.
        """
        # The mean is the sum over a public count, which changes no cosine.
        total = np.asarray(released.values)
        near = cosines(total, vectors)
        similarities = dict(zip(candidates, near.tolist(), strict=True))
        floor = None if self.floor_of is None else self.floor_of(len(candidates))
        if floor is not None and float(near.max() * np.linalg.norm(total)) < floor:
            return AnswerOutcome(self.abstain_answer, similarities=similarities, abstained=True)
        return AnswerOutcome(candidates[int(near.argmax())], similarities=similarities)

    def to_dict(self) -> dict[str, Any]:
        """Returns the public parameters, for reports."""
        return {"embeddings": self.embeddings.name}


class KeywordAggregator:
    """Aggregates answers by counting public keywords in them; releases the most common ones, in order."""

    kind = "keywords"
    aggregation = KeywordSum()

    def __init__(self, engine: TextBackend, answers: KeywordAnswers) -> None:
        most = MOST_KEYWORDS if answers.max_keywords is None else answers.max_keywords
        self._number = check_int("num_keywords", answers.num_keywords, low=1, high=MAX_CHOICES)
        self._most = check_int("max_keywords", most, low=self._number)
        self._fixed = None if answers.keywords is None else self._checked(Keywords(answers.keywords))
        self._engine = engine
        self._options: dict[str, Any] = {"max_tokens": answers.max_tokens, "stop": answers.stop}
        self.abstain_answer = answers.abstain_answer

    @property
    def mechanism(self) -> JointExponentialMechanism:
        """The mechanism; its noise is calibrated by the plan."""
        return JointExponentialMechanism(1.0, num_choices=self._number)

    @property
    def width(self) -> int:
        """Most columns of a row."""
        return self._most if self._fixed is None else len(self._fixed)

    def prepared(self, query: Sequence[str], candidates: tuple[str, ...]) -> EffectGenerator[AnswerRelease]:
        """Builds the keyword domain of the query."""
        domain = self._fixed or self._checked(Keywords.of_texts([*query, *candidates], most=self._most))
        rows = AnswerRows.keywords(self._engine, domain, **self._options)
        return AnswerRelease(rows, partial(self._outcome, domain.words))
        yield  # makes this a generator

    def _outcome(self, words: tuple[str, ...], released: Release) -> AnswerOutcome:
        """Returns the released keywords, from which the answer is written later."""
        return AnswerOutcome(None, keywords=tuple(words[index] for index in released.indices or ()))

    def _checked(self, domain: Keywords) -> Keywords:
        if len(domain) < self._number:
            advice = "Lower num_keywords=, or give keywords=, candidates= or more num_candidates=. Nothing was"
            raise fail(
                "keywords",
                f"at least num_keywords={self._number} in the public domain",
                len(domain),
                advice + " charged.",
            )
        return domain

    def to_dict(self) -> dict[str, Any]:
        """Returns the public parameters, for reports."""
        return {"num_keywords": self._number, "keywords": "made for each query" if self._fixed is None else "given"}


class NoisyKeywordAggregator(KeywordAggregator):
    """As `KeywordAggregator`, with Gaussian noise on every keyword: the keywords of an answer are a vector of length 1.

    Attributes:
      floor: least noisy weight of a returned keyword; public, from the plan.
      abstain_answer: the text if no keyword reaches the floor.
    """

    aggregation = VoteVectorSum()  # type: ignore[assignment]
    floor: float = 0.0

    @override
    def _outcome(self, words: tuple[str, ...], released: Release) -> AnswerOutcome:
        """Returns the keywords above the noise floor, best first; without any, the answer is the abstention text."""
        weights = np.asarray(released.values)
        best = np.argsort(-weights, kind="stable")[: self._number].tolist()
        found = tuple(words[place] for place in best if weights[place] >= self.floor)
        if not found:
            return AnswerOutcome(self.abstain_answer, keywords=(), abstained=True)
        return AnswerOutcome(None, keywords=found)


Space: TypeAlias = EmbeddingAggregator | KeywordAggregator


def cosines(vector: NDArray[np.float64], rows: EngineRows) -> NDArray[np.float64]:
    """Returns float64[n]: the cosine of the angle to each row, 0 for zero vectors; finite for all finite floats.

    >>> cosines(np.array([3.0, 4.0]), np.array([[1.0, 0.0], [0.0, 0.0], [1e300, 1e300]])).round(2).tolist()
    [0.6, 0.0, 0.99]
    """
    near: NDArray[np.float64] = _unit(rows) @ _unit(vector[None, :])[0]
    return near


def _unit(rows: EngineRows) -> EngineRows:
    """Returns rows of length 1, or 0; divides by the largest entry first, whose square may overflow."""
    peak = np.abs(rows).max(axis=1, keepdims=True)  # [n, 1]
    scaled = np.divide(rows, peak, out=np.zeros_like(rows), where=peak > 0)
    length = np.sqrt(np.square(scaled).sum(axis=1, keepdims=True))
    unit: EngineRows = np.divide(scaled, length, out=scaled, where=length > 0)
    return unit


_CHOICE = "at least 2 distinct public answers to choose from, which the embeddings tell something about"


def _check_candidates(candidates: tuple[str, ...]) -> None:
    if len(candidates) < 2:
        raise fail("candidates", _CHOICE, len(candidates), _TOO_FEW)


TextAnswers: TypeAlias = EmbeddingAnswers | KeywordAnswers


@dataclass(frozen=True, slots=True)
class _PreparedQuery:
    """What is prepared before a ticket is reserved; public."""

    render: Callable[[Sequence[Record]], str]
    zero_shot: str
    round_if_paid: AnswerRelease | None
    """None: no ticket was left."""
    direction: Any = None
    """Embedding of the query, for retrieval; None: no documents are compared."""

    @property
    def round(self) -> AnswerRelease:
        """The release; where a ticket came back since, the query is refused as if none had."""
        if self.round_if_paid is None:
            msg = "query: requested 1 ticket, remaining 0 before the public calls; one came back since. Ask again."
            raise PrivacyBudgetExceededError(msg, requested=1, remaining=0)
        return self.round_if_paid


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
        engine = as_text_backend(llm)
        name = getattr(engine, "name", type(engine).__name__)
        public = CandidateSource(
            PublicModel(llm, **limits),
            door=PrivateDoor(engine, name=name, **limits),
            writer=None if writer is None else PublicModel(writer, **limits),
            candidates=options.candidates,
            count=0 if has_domain else options.num_candidates,
        )
        space: Space
        if isinstance(options, KeywordAnswers):
            space = KeywordAggregator(engine, options) if near is None else NoisyKeywordAggregator(engine, options)
        else:
            embeddings = as_embeddings(near if options.embeddings is None else options.embeddings)
            space = EmbeddingAggregator(engine, options, embeddings=embeddings, fixed=public.fixed)
        traits = {"reader": traits_of(llm), "public": traits_of(llm if writer is None else writer)}
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
        return AnswerMemo(store, scope=scope, packed=dataclasses.asdict, unpacked=_outcome_from_json)


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
        is reserved. One more is made as private calls are, untraced and past caches, so that what would fail them all
        costs nothing.
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
        kind = "slots" if wordings > 1 else None  # the place of a unit row is secret
        shape = design_of_queries(rows, size) or RowDesign.choose(rows=kind, smallest_size=size)
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
            owed={},
            memo=maker.memo(memo, private=private, budget=spender, share=share, report=report),
            **fields,
        )

    afrom_private_examples: ClassVar = awaitable(from_private_examples)

    @override
    def _prepare(self, query: Query, config: RunnableConfig) -> EffectGenerator[_PreparedQuery]:
        """Asks for candidates, which calls every model that the release needs; without a ticket for one answer."""
        prompts = self.wording.renderer([query])
        public = [own for own, *_ in prompts.public()]
        variables = dict(zip(self.wording.input_variables, query, strict=True))
        pays = self.on_exhausted == "raise" or self._has_ticket(self.tenants.of(config))
        said = yield from self.maker.public.before(public, variables, config, pays=pays)
        aggregation = (yield from self.maker.space.prepared(query, said.candidates)) if pays else None
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
        return prepared.round.outcome(released)

    @override
    def _read_memo(self, tenant: Tenant, query: Query) -> AnswerOutcome | None:
        owed: AnswerOutcome | None = self.owed.get((tenant.name, query))
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
            # First: the call below may fail or be cancelled, and the release is charged. Tickets limit how many wait.
            self.owed[tenant.name, query] = owed
            answer = yield from self._written(query, owed.keywords or (), config)
            outcome = dataclasses.replace(owed, answer=answer)
            self._keep(tenant, query, outcome, instead_of=owed)
            if self.owed.get((tenant.name, query)) is owed:
                self.owed.pop((tenant.name, query), None)
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
        if not prepared.zero_shot:
            raise self.maker.public.no_text()
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


def _outcome_from_json(stored: Mapping[str, Any]) -> AnswerOutcome:
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
