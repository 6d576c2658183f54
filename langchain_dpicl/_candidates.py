"""Makes the public calls of free-form answers: candidates, the zero-shot answer, and an answer from keywords."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import BaseMessage
from langchain_core.prompt_values import PromptValue
from langchain_core.prompts import BasePromptTemplate, PromptTemplate
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langchain_core.runnables.config import merge_configs

from langchain_dpicl.asking import TaskWording
from langchain_dpicl.backends._completion import stops_of
from langchain_dpicl.backends._faults import sort
from langchain_dpicl.backends.base import NextTokenBackend, PublicChoiceBackend, TextBackend
from langchain_dpicl.backends.embedded import cut
from langchain_dpicl.backends.resolve import as_text_backend
from langchain_dpicl.backends.silent import unwrap
from langchain_dpicl.backends.walk import Ask, Walk
from langchain_dpicl.exceptions import DPICLError, ModelCallError
from langchain_dpicl.privacy._validate import check_int, fail

NO_STREAM = "nostream"
"""LangGraph's tag for calls whose tokens are not streamed to the user of a graph."""

KEYWORDS = "keywords"
"""Variable of an answer prompt: the released keywords, best first, with commas between them."""

_ANY_CHOICE = ("yes", "no")
"""Choices of a test call that detects whether an engine answers."""

_HINT = "Words that good answers to what follows often hold, the most common first: {" + KEYWORDS + "}"


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class AskInPublic:
    """Makes a public call to code outside this package; reports the class of an error only.

    The text of an error is omitted: texts about load and credit may describe the private calls made before.
    """

    name: str
    ask: Callable[[], Any]
    aask: Callable[[], Awaitable[Any]]

    def run(self) -> Any:
        """Answers, blocking."""
        try:
            return self.ask()
        except DPICLError:
            raise
        except Exception as error:  # noqa: BLE001  foreign code may raise anything
            kind = _kind(error)
        raise self._failed(kind)  # outside the handler, so that the foreign exception is not its context

    async def arun(self) -> Any:
        """Answers, awaiting."""
        try:
            return await self.aask()
        except DPICLError:
            raise
        except Exception as error:  # noqa: BLE001  foreign code may raise anything
            kind = _kind(error)
        raise self._failed(kind)

    def _failed(self, kind: str) -> ModelCallError:
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

    def ask(self, prompt: str | PromptValue, config: RunnableConfig, *, count: int = 1) -> Ask:
        """Returns an `Ask` of `count` equal calls; its answer is the tuple of distinct answers that are not blank."""
        return self.ask_each([prompt] * count, config)

    def ask_each(self, prompts: Sequence[str | PromptValue], config: RunnableConfig) -> Ask:
        """Returns an `Ask` with one call for each public prompt; its answer is as that of `ask`."""
        if isinstance(self._llm, Runnable):
            return self._ask_runnable(self._llm, list(prompts), config)
        return self._ask_engine(self._llm, [text if isinstance(text, str) else text.to_string() for text in prompts])

    def rest(self) -> None:
        """Releases what a run has started for its calls; does nothing by default."""

    def _ask_runnable(self, model: Runnable[Any, Any], prompts: list[Any], config: RunnableConfig) -> Ask:
        def ask() -> tuple[str, ...]:
            answers = [model.invoke(prompts[0], config)] if len(prompts) == 1 else model.batch(prompts, config)
            return self._read(answers)

        async def aask() -> tuple[str, ...]:
            if len(prompts) == 1:
                return self._read([await model.ainvoke(prompts[0], config)])
            return self._read(await model.abatch(prompts, config))

        return AskInPublic(self.name, ask, aask)

    def _ask_engine(self, engine: TextBackend, prompts: list[str]) -> Ask:
        options: dict[str, Any] = {"max_tokens": self._max_tokens, "stop": self._stop}
        if "public" in inspect.signature(engine.complete).parameters:  # such engines need no constant batch shape then
            options["public"] = True

        def ask() -> tuple[str, ...]:
            texts = self._read(engine.complete(prompts, **options))
            # Engines return "" for failed calls too; a second call tells an empty answer from an outage.
            if not texts and isinstance(engine, PublicChoiceBackend):
                engine.score_public(prompts[0], _ANY_CHOICE)
            elif not texts:
                self._check_answers(engine).top_tokens(prompts[0], (), top_k=1)
            return texts

        async def aask() -> tuple[str, ...]:
            texts = self._read(await engine.acomplete(prompts, **options))
            if not texts and isinstance(engine, PublicChoiceBackend):
                await engine.ascore_public(prompts[0], _ANY_CHOICE)
            elif not texts:
                await self._check_answers(engine).atop_tokens(prompts[0], (), top_k=1)
            return texts

        return AskInPublic(self.name, ask, aask)

    def _check_answers(self, engine: TextBackend) -> NextTokenBackend:
        """Returns the engine if it has a call that fails visibly: "" may be an answer or a failed call."""
        if isinstance(engine, NextTokenBackend):
            return engine
        raise ModelCallError(
            f"a public call to {self.name} brought no text before the first of stop={list(self._stop)}. Check the "
            "model, or give another stop=, then ask again"
        )

    def _read(self, answers: Iterable[Any]) -> tuple[str, ...]:
        return distinct(cut(text_of(self.name, answer), self._stop) for answer in answers)


@dataclass(frozen=True, slots=True)
class PublicAnswers:
    """The public answers to a query.

    Attributes:
      zero_shot: an answer of the public model; "" if there is none.
      candidates: distinct answers to choose from, or to take keywords from.
    """

    zero_shot: str
    candidates: tuple[str, ...]


class PublicSide:
    """The public calls of a query, before its ticket is reserved and after its release.

    Formal guarantees:
      - Each model that a query needs is called here first, so that an outage is detected before a ticket is reserved.
      - Calls contain public texts only.

    Args:
      llm: the model of the private calls; called in public too.
      writer: the public model, if it is another one.
      candidates: a list, or a Runnable or function that returns one for each query; None: the public model writes
        them.
      count: answers that the public model is asked for as candidates; 0: none are needed.
    """

    def __init__(
        self, llm: PublicModel, *, writer: PublicModel | None = None, candidates: Any = None, count: int = 0
    ) -> None:
        self._llm = llm
        self._writer = writer or llm
        self._count = 0 if candidates is not None else count
        self.fixed = None if _fetches(candidates) else _listed("candidates", candidates)
        """The candidates if they are the same for every query; otherwise None."""
        self._source = _as_runnable(candidates) if _fetches(candidates) else None

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

    def before(self, prompt: str, query: Mapping[str, str], config: RunnableConfig) -> Walk[PublicAnswers]:
        """Makes the public calls before the ticket is reserved (a walk)."""
        config = merge_configs(config, {"tags": [NO_STREAM]})
        own: tuple[str, ...] = yield self._writer.ask(prompt, config, count=max(1, self._count))
        # The model of the private calls is called too, so that its outage is detected before a ticket is reserved.
        if self._writer is not self._llm:
            yield self._llm.ask(prompt, config)
        zero_shot = own[0] if own else ""
        if self._source is not None:
            return PublicAnswers(zero_shot, (yield self._fetch(self._source, query, config)))
        return PublicAnswers(zero_shot, self.fixed or (own if self._count else ()))

    def write(self, prompt: PromptValue, config: RunnableConfig) -> Walk[str]:
        """Asks the public model for its answer (a walk)."""
        answers: tuple[str, ...] = yield self._writer.ask(prompt, config)
        if not answers:
            raise ModelCallError(f"a public call to {self.name} brought no text before the first stop string")
        return answers[0]

    @staticmethod
    def _fetch(source: Runnable[Any, Any], query: Mapping[str, str], config: RunnableConfig) -> Ask:
        value: Any = next(iter(query.values())) if len(query) == 1 else dict(query)

        def ask() -> tuple[str, ...]:
            return _listed("candidates", source.invoke(value, config)) or ()

        async def aask() -> tuple[str, ...]:
            return _listed("candidates", await source.ainvoke(value, config)) or ()

        return AskInPublic("candidates", ask, aask)


def answer_template(wording: TaskWording, template: Any) -> BasePromptTemplate[Any]:
    """Returns the template that an answer is written from; by default a line of keywords and the zero-shot prompt."""
    if KEYWORDS in wording.input_variables:
        raise fail("suffix, prefix", f"another name than {{{KEYWORDS}}} for a variable of the query", KEYWORDS)
    if template is None:
        between = wording.separator.replace("{", "{{").replace("}", "}}")
        template = between.join([*([wording.prefix] if wording.prefix else []), _HINT, wording.suffix])
    if isinstance(template, str):
        template = _from_text(template)
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


def _from_text(template: str) -> PromptTemplate:
    try:
        return PromptTemplate.from_template(template)
    except (ValueError, IndexError):
        raise fail("answer_prompt", "plain {field} names in an f-string template", template) from None


def text_of(name: str, answer: Any) -> str:
    """Returns the text of a public answer."""
    if isinstance(answer, str):
        return answer
    if isinstance(answer, BaseMessage):
        return str(answer.text)
    if isinstance(answer, Document):
        return answer.page_content
    raise fail(name, "answers that are text, messages or documents", type(answer).__name__)


def distinct(texts: Iterable[str]) -> tuple[str, ...]:
    """Returns the texts without white space around them, each once, blank ones left out."""
    return tuple(dict.fromkeys(text.strip() for text in texts if text.strip()))


def _fetches(candidates: Any) -> bool:
    return isinstance(candidates, Runnable) or callable(candidates)


def _as_runnable(source: Any) -> Runnable[Any, Any]:
    return source if isinstance(source, Runnable) else RunnableLambda(source)


def _listed(name: str, values: Any) -> tuple[str, ...] | None:
    if values is None:
        return None
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise fail(name, "a list of texts, or a Runnable or function that gives one", type(values).__name__)
    return distinct(text_of(name, value) for value in values)


def _kind(error: Exception) -> str:
    return sort(error, explain="kind").detail or type(error).__name__
