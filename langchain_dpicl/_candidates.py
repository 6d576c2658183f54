"""What is asked in public for an answer in free form: candidates, the zero-shot answer, and an answer from keywords.

Every prompt here is public, so calls to LangChain models are made in the open, with the run's own config, for traces to
show them. Knows no private record, no row and no budget.
"""

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
"""LangGraph's tag for calls whose tokens are no part of what a graph says to its user."""


KEYWORDS = "keywords"
"""Variable of an answer prompt: the released keywords, best first, with commas between them."""

_ANY_CHOICE = ("yes", "no")
"""Asked for only to hear whether an engine that chooses among texts answers at all."""

_HINT = "Words that good answers to what follows often hold, the most common first: {" + KEYWORDS + "}"


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class AskInPublic:
    """Asks somebody who is not ours, in public; what fails is told by its kind alone.

    The text of a failure is left out, as texts about load and credit may quote what private calls used before.
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
        except Exception as error:  # noqa: BLE001  whatever the other side raises
            kind = _kind(error)
        raise self._failed(kind)  # outside the handler: the other side's exception is not its context

    async def arun(self) -> Any:
        """Answers, awaiting."""
        try:
            return await self.aask()
        except DPICLError:
            raise
        except Exception as error:  # noqa: BLE001  whatever the other side raises
            kind = _kind(error)
        raise self._failed(kind)

    def _failed(self, kind: str) -> ModelCallError:
        return ModelCallError(f"a public call to {self.name} failed ({kind}). Check it, then ask again")


class PublicModel:
    """A model's own answers to public prompts: a Runnable's in the open, otherwise an engine's.

    Args:
      llm: a Runnable from a prompt to text or a message, called as it is; or an engine that completes text.
      max_tokens: most tokens of an engine's answer; a Runnable has its own limit.
      stop: what ends an answer.

    Raises:
      CapabilityError: `llm` writes no text.
    """

    def __init__(self, llm: Any, *, max_tokens: int, stop: Sequence[str]) -> None:
        self._llm: Runnable[Any, Any] | TextBackend = llm if isinstance(llm, Runnable) else as_text_backend(llm)
        self._max_tokens = check_int("max_tokens", max_tokens, low=1)
        self._stop = stops_of(stop)
        self.name = type(unwrap(llm)[0]).__name__
        """Public name, for messages."""

    def ask(self, prompt: str | PromptValue, config: RunnableConfig, *, count: int = 1) -> Ask:
        """Returns what asks `count` times; answered with the distinct answers as a tuple, without blank ones.

        The answer raises ModelCallError where a call fails.
        """
        return self.ask_each([prompt] * count, config)

    def ask_each(self, prompts: Sequence[str | PromptValue], config: RunnableConfig) -> Ask:
        """Returns what asks each of these public prompts once; answered as `ask`, from all of them together."""
        if isinstance(self._llm, Runnable):
            return self._ask_runnable(self._llm, list(prompts), config)
        return self._ask_engine(self._llm, [text if isinstance(text, str) else text.to_string() for text in prompts])

    def rest(self) -> None:
        """Ends what was started to answer, where something was: a run is over."""

    def _ask_runnable(self, model: Runnable[Any, Any], prompts: list[Any], config: RunnableConfig) -> Ask:
        def ask() -> tuple[str, ...]:
            found = [model.invoke(prompts[0], config)] if len(prompts) == 1 else model.batch(prompts, config)
            return self._read(found)

        async def aask() -> tuple[str, ...]:
            if len(prompts) == 1:
                return self._read([await model.ainvoke(prompts[0], config)])
            return self._read(await model.abatch(prompts, config))

        return AskInPublic(self.name, ask, aask)

    def _ask_engine(self, engine: TextBackend, prompts: list[str]) -> Ask:
        options: dict[str, Any] = {"max_tokens": self._max_tokens, "stop": self._stop}
        if "public" in inspect.signature(engine.complete).parameters:  # engines that then need no public shape
            options["public"] = True

        def ask() -> tuple[str, ...]:
            texts = self._read(engine.complete(prompts, **options))
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
        """Returns the engine where it can be asked again: "" is an answer, but of a call that failed, too."""
        if isinstance(engine, NextTokenBackend):
            return engine
        raise ModelCallError(
            f"a public call to {self.name} brought no text before the first of stop={list(self._stop)}. Check the "
            "model, or give another stop=, then ask again"
        )

    def _read(self, found: Iterable[Any]) -> tuple[str, ...]:
        return distinct(cut(text_of(self.name, answer), self._stop) for answer in found)


@dataclass(frozen=True, slots=True)
class PublicAnswers:
    """What was said in public about a query.

    Attributes:
      zero_shot: an answer of the public model; "" if it has none.
      candidates: distinct answers to choose from, or to take words from.
    """

    zero_shot: str
    candidates: tuple[str, ...]


class PublicSide:
    """Who is asked in public, before a ticket is taken and after a release.

    Formal guarantees:
      - Each model that a query will need is asked here first, so that an outage shows before a ticket is taken.
      - What is asked is made of public texts alone.

    Args:
      llm: the model of the private calls; asked in public too.
      writer: the model that writes in public, where it is another one.
      candidates: a list, or where to fetch one for each query (a Runnable, or a function); None: the public model
        writes them.
      count: answers that the public model is asked for to write candidates; 0: none are needed.
    """

    def __init__(
        self, llm: PublicModel, *, writer: PublicModel | None = None, candidates: Any = None, count: int = 0
    ) -> None:
        self._llm = llm
        self._writer = writer or llm
        self._count = 0 if candidates is not None else count
        self.fixed = None if _fetches(candidates) else _listed("candidates", candidates)
        """The candidates, where they are the same for every query."""
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
        """Asks what is asked before a ticket is taken.

        Args:
          prompt: the public prompt: without records.
          query: the query's variables.
          config: the run's config.

        Raises:
          ModelCallError: somebody did not answer.
        """
        config = merge_configs(config, {"tags": [NO_STREAM]})
        own: tuple[str, ...] = yield self._writer.ask(prompt, config, count=max(1, self._count))
        if self._writer is not self._llm:
            yield self._llm.ask(prompt, config)
        zero_shot = own[0] if own else ""
        if self._source is not None:
            return PublicAnswers(zero_shot, (yield self._fetch(self._source, query, config)))
        return PublicAnswers(zero_shot, self.fixed or (own if self._count else ()))

    def write(self, prompt: PromptValue, config: RunnableConfig) -> Walk[str]:
        """Asks the public model for its answer.

        Raises:
          ModelCallError: the call failed, or brought no text.
        """
        answers: tuple[str, ...] = yield self._writer.ask(prompt, config)
        if not answers:
            raise ModelCallError(f"a public call to {self.name} brought no text before the first stop string")
        return answers[0]

    @staticmethod
    def _fetch(source: Runnable[Any, Any], query: Mapping[str, str], config: RunnableConfig) -> Ask:
        given: Any = next(iter(query.values())) if len(query) == 1 else dict(query)

        def ask() -> tuple[str, ...]:
            return _listed("candidates", source.invoke(given, config)) or ()

        async def aask() -> tuple[str, ...]:
            return _listed("candidates", await source.ainvoke(given, config)) or ()

        return AskInPublic("candidates", ask, aask)


def answer_template(wording: TaskWording, given: Any) -> BasePromptTemplate[Any]:
    """Returns the template that an answer is written from: `given`, or the prompt without examples under a hint.

    Raises:
      ConfigurationError: it is no template, or its variables are not {keywords} and some of the query's.
    """
    if KEYWORDS in wording.input_variables:
        raise fail("suffix, prefix", f"another name than {{{KEYWORDS}}} for a variable of the query", KEYWORDS)
    if given is None:
        between = wording.separator.replace("{", "{{").replace("}", "}}")
        given = between.join([*([wording.prefix] if wording.prefix else []), _HINT, wording.suffix])
    if isinstance(given, str):
        given = _from_text(given)
    if not isinstance(given, BasePromptTemplate):
        raise fail("answer_prompt", "text or a prompt template", type(given).__name__)
    used = set(given.input_variables)
    if KEYWORDS not in used or not used <= {KEYWORDS, *wording.input_variables}:
        expected = f"a template with {{{KEYWORDS}}} and variables among {list(wording.input_variables)}"
        raise fail("answer_prompt", expected, sorted(used))
    try:  # now, and not after a release
        given.format_prompt(**dict.fromkeys(used, "text"))
    except Exception as error:  # noqa: BLE001  whatever a template of any class raises
        fault = type(error).__name__
    else:
        return given
    raise fail("answer_prompt", "a template that texts can be filled into", fault)


def _from_text(template: str) -> PromptTemplate:
    try:
        return PromptTemplate.from_template(template)
    except (ValueError, IndexError):
        raise fail("answer_prompt", "plain {field} names in an f-string template", template) from None


def text_of(name: str, answer: Any) -> str:
    """Returns the text of a public answer.

    Raises:
      ConfigurationError: it is no text, message or document.
    """
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
