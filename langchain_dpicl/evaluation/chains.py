"""Takes a chain apart (prompt | model | parser) and calls its model in silence; the chain is never invoked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from langchain_core.messages import BaseMessage
from langchain_core.output_parsers import CommaSeparatedListOutputParser, JsonOutputParser, StrOutputParser
from langchain_core.prompts import (
    AIMessagePromptTemplate,
    ChatPromptTemplate,
    FewShotPromptTemplate,
    HumanMessagePromptTemplate,
    PromptTemplate,
    SystemMessagePromptTemplate,
)
from langchain_core.runnables import RunnableLambda, RunnableSequence

from langchain_dpicl.backends.langchain.texts import is_no_answer, text_of
from langchain_dpicl.backends.private_calls.call import (
    OpaqueValue,
    Reply,
    Request,
    RetryPolicy,
    quiet_arguments,
    quiet_settings,
    read_silently,
    silence,
    unwrap,
)
from langchain_dpicl.backends.private_calls.call_pool import DEFAULT_CONCURRENCY, CallPool, Crew
from langchain_dpicl.backends.private_calls.public_calls import answer_or_raise
from langchain_dpicl.backends.resolve import as_model
from langchain_dpicl.evaluation.evaluators import Pure, Same
from langchain_dpicl.exceptions import CapabilityError
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM

_PARSERS = (StrOutputParser, JsonOutputParser, CommaSeparatedListOutputParser)
_MESSAGES = (AIMessagePromptTemplate, HumanMessagePromptTemplate, SystemMessagePromptTemplate)
_RELEASED = "langchain_dpicl.prompts"
_SHAPE = "prompt | model, and after it stock parsers or RunnableLambda(Pure(function))"
_LABELS = frozenset({"metadata", "name", "tags"})  # of runs, which private calls are not
_DIGITS = 15  # of the words of a probe
_ADVICE = "Nothing else can be shown to keep private records to itself."

Answer = OpaqueValue[Any]

_CREW = Crew(DEFAULT_CONCURRENCY)
"""The threads of all chains and judges, which answer one after the other."""


@dataclass(frozen=True, repr=False, eq=False)
class SilentChain:
    """A chain whose parts are known: a template that formats, a silent model and pure parsers.

    Formal guarantees:
      - The chain and its steps are never invoked: LangChain's callbacks, tracers, caches and debug output see no run.
      - The answer to a record is computed from that record and public things alone; a record whose template, call or
        parser fails has the answer None and moves no other. Nothing private is kept.

    Attributes:
      prompt: the stock template.
      calls: the silent model.
      steps: what reads the answer, in order.
      fields: the declared field that each variable of the template shows.
      gives_text: whether the answer is a text, as far as is known before: no parser makes it a list or an object.
    """

    prompt: Any
    calls: CallPool
    steps: tuple[Callable[[Any], Any], ...]
    fields: Mapping[str, str]
    stop: tuple[str, ...]
    identity: tuple[Any, ...]
    assumed: tuple[str, ...] = field(default=())
    gives_text: bool = True

    @classmethod
    def of(
        cls,
        chain: Any,
        *,
        known: Sequence[str],
        hidden: frozenset[str] = frozenset(),
        inputs: Mapping[str, str] | None = None,
        retry: RetryPolicy | None = None,
        name: str = "chain",
    ) -> SilentChain:
        """Takes a chain apart; see the class.

        Args:
          chain: `prompt | model | parsers`.
          known: names that a variable of the template may show.
          hidden: those among them that it must not show.
          inputs: field by variable, where their names differ.
          retry: how long each record's call is waited for.
          name: of the parameter, for errors.

        Raises:
          CapabilityError: a step of another class.
          ConfigurationError: a variable that is no declared field, or that would show the reference.
          UnsilencableModelError: a model that cannot be called in silence.
        """
        steps = chain.steps if type(chain) is RunnableSequence else [chain]
        if len(steps) < 2:
            raise _refused(name, steps)
        prompt, inner = _stock_prompt(name, steps[0]), as_model(steps[1])
        read: list[Callable[[Any], Any]] = []
        kinds: list[Any] = []
        assumed: list[str] = []
        rest: list[Any] = steps[2:]
        for step in rest:
            pure = getattr(step, "func", None) if type(step) is RunnableLambda else None
            if type(pure) is Pure:
                assumed.append(pure.name)
                read.append(pure.function)
                kinds.append(Same(pure.function))
            elif type(step) in _PARSERS:
                read.append(step.parse)
                kinds.append((type(step).__name__, _settings(step)))
            else:
                raise _refused(name, steps)
        fields = {variable: (inputs or {}).get(variable, variable) for variable in prompt.input_variables}
        for variable, shown in fields.items():
            if shown in hidden:
                advice = f"Variable {variable!r} would show it the reference."
                raise fail(name, "a template that does not show the label", shown, advice)
            if shown not in known:
                advice = "Name the field of each variable: inputs={variable: field}."
                raise fail(name, f"variables that are among {sorted(set(known) - hidden)}", variable, advice)
        model, bound = unwrap(inner)
        silent = silence(inner)
        stop = bound.get("stop") or getattr(model, "stop", None) or ()
        policy = retry or RetryPolicy()
        if silent.is_chat and kinds and type(rest[0]) is RunnableLambda:
            msg = f"{name}: expected a parser behind a chat model, found a function, which the chain gives a message."
            raise CapabilityError(f"{msg} Here it would get the text: put StrOutputParser() between.")
        gives_text = not rest or type(rest[-1]) in {StrOutputParser, RunnableLambda}
        calls = CallPool(silent, policy, None, crew=_CREW)
        # What makes two chains the same for a kept result; it keeps the model alive, which is compared by identity.
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        sent = (_settings(model, **quiet_settings(model)), _value(quiet_arguments(bound)), _value(stops))
        identity = (_digest(prompt), Same(model), tuple(sorted(fields.items())), *sent, policy, *kinds)
        return cls(prompt, calls, tuple(read), fields, stops, identity, tuple(assumed), gives_text)

    def probe(self) -> None:
        """Calls the model once with the template and public words, so that a wrong key or address costs nothing.

        The words are new each time: LangChain runs with them are runs of this call, also in a thread that is older.

        Raises:
          CapabilityError: the template shows too little of the words to recognize them.
          ModelCallError: the model could not be called.
          UnsilencableModelError: the call started LangChain runs.
        """
        answer_or_raise(self.calls.model.name, self.calls.probe(self._public_request()))

    async def aprobe(self) -> None:
        """Async twin of `probe`, which is another method of the model."""
        answer_or_raise(self.calls.model.name, await self.calls.aprobe(self._public_request()))

    def _public_request(self) -> Request:
        word = f"{SYSTEM_RANDOM.integer_below(10**_DIGITS):0{_DIGITS}}"
        prompt = self.prompt.format_prompt(**dict.fromkeys(self.fields, f"{word} is a public example"))
        if self.fields and word not in prompt.to_string():
            expected = f"expected a template that shows the first {_DIGITS} characters of a field"
            msg = f"{expected}, found fewer. Leave format specifications such as {{text:.5}} out."
            raise CapabilityError(msg)
        return self._request(OpaqueValue(prompt), explain="kind", watch=word)

    def to_dict(self) -> dict[str, Any]:
        """Returns what reports show of it."""
        return {"template": _digest(self.prompt), "model": self.calls.model.name}

    def requests(self, records: Sequence[OpaqueValue[Mapping[str, Any]]]) -> ChainCalls:
        """Returns the effect that answers private records.

        Args:
          records: each with every name of `fields`.
        """
        rendered = [read_silently(lambda box=box: OpaqueValue(self._prompt(box))) for box in records]  # type: ignore[misc]
        return ChainCalls(self, tuple(None if prompt is None else self._request(prompt) for prompt in rendered))

    def _prompt(self, box: OpaqueValue[Mapping[str, Any]]) -> Any:
        return self.prompt.format_prompt(**{name: box.reveal()[shown] for name, shown in self.fields.items()})

    def _request(self, prompt: OpaqueValue[Any], **probed: Any) -> Request:
        render: Any = (
            (lambda value: value.to_messages()) if self.calls.model.is_chat else (lambda value: value.to_string())
        )
        options = {"stop": list(self.stop)} if self.stop else {}
        return Request(cast("OpaqueValue[str]", prompt), render, options, **probed)

    def read(self, reply: Reply) -> Answer | None:
        """Returns the parsed answer, hidden; None where the call or a parser failed.

        Args:
          reply: private.
        """
        return read_silently(lambda: self._parsed(reply))

    def _parsed(self, reply: Reply) -> Answer | None:
        if reply.answer is None or is_no_answer(reply.answer.reveal().finish_reason):
            return None
        found: Any = text_of(reply, self.stop)
        if not found.strip():
            return None
        for step in self.steps:
            found = step(found)
        return OpaqueValue(found)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class ChainCalls:
    """The calls of one chain for some records; answered with one `Answer` or None per record, in their order."""

    chain: SilentChain
    requests: tuple[Request | None, ...]

    def run(self) -> tuple[Answer | None, ...]:
        """Runs, blocking."""
        return self._spread(self.chain.calls.many([one for one in self.requests if one is not None]))

    async def arun(self) -> tuple[Answer | None, ...]:
        """Runs, awaiting."""
        return self._spread(await self.chain.calls.amany([one for one in self.requests if one is not None]))

    def _spread(self, replies: list[Reply]) -> tuple[Answer | None, ...]:
        waiting: Iterator[Reply] = iter(replies)
        return tuple(None if one is None else self.chain.read(next(waiting)) for one in self.requests)


def _stock_prompt(name: str, prompt: Any) -> Any:
    """Returns a template whose formatting is known to do nothing else; a released prompt as the stock one."""
    if type(prompt).__module__ == _RELEASED and hasattr(prompt, "to_stock"):
        prompt = prompt.to_stock()
    if not _is_plain(prompt):
        raise _refused(name, [prompt])
    return prompt


def _is_plain(prompt: Any) -> bool:
    """Whether a template is stock, of f-strings, and calls no function when it formats."""
    partials = getattr(prompt, "partial_variables", None) or {}
    if any(not isinstance(value, str) for value in partials.values()) or getattr(prompt, "output_parser", None):
        return False
    if type(prompt) is PromptTemplate:
        return prompt.template_format == "f-string"
    if type(prompt) is FewShotPromptTemplate:
        is_list = prompt.example_selector is None and prompt.template_format == "f-string"
        return is_list and type(prompt.example_prompt) is PromptTemplate and _is_plain(prompt.example_prompt)
    if type(prompt) is not ChatPromptTemplate:
        return False
    parts: list[Any] = prompt.messages
    return all(
        (isinstance(part, BaseMessage) and type(part).__module__.startswith("langchain_core."))
        or (type(part) in _MESSAGES and type(part.prompt) is PromptTemplate and _is_plain(part.prompt))
        for part in parts
    )


def _refused(name: str, steps: Sequence[Any]) -> CapabilityError:
    found = " | ".join(type(step).__name__ for step in steps)
    return CapabilityError(f"{name}: expected {_SHAPE}, found {found}. {_ADVICE}")


def _digest(prompt: Any) -> str:
    """Returns the hash of all that a template shows: two templates of another text have another one.

    Raises:
      CapabilityError: a fixed message holds what is no JSON, and so cannot be compared.
    """
    try:
        shown = json.dumps(_content(prompt), sort_keys=True)
    except (TypeError, ValueError):
        raise _refused("template", [prompt]) from None
    return hashlib.sha256(shown.encode("utf-8", "surrogatepass")).hexdigest()


def _content(part: Any) -> list[Any]:
    """Returns a plain template, as `_is_plain` takes it, or a part of one, as JSON values.

    Each class is read field by field: the dump of a chat template leaves the text of its messages out.
    """
    kind, partials = type(part).__name__, getattr(part, "partial_variables", None)
    if isinstance(part, BaseMessage):
        return [kind, part.model_dump()]
    if type(part) is PromptTemplate:
        return [kind, part.template, partials]
    if type(part) is FewShotPromptTemplate:
        shown = _content(part.example_prompt)
        return [kind, part.prefix, part.examples, shown, part.suffix, part.example_separator, partials]
    if type(part) is ChatPromptTemplate:
        return [kind, [_content(message) for message in part.messages], partials]
    return [kind, _content(part.prompt), part.additional_kwargs]  # a message's template


def _settings(model: Any, **quiet: Any) -> tuple[tuple[str, Hashable], ...]:
    """Returns the values of a model's fields, which may change while the model stays the same object.

    Args:
      model: or a parser.
      **quiet: fields that have these values in private calls, whatever the model's own are.
    """
    shown = {name: getattr(model, name, None) for name in type(model).model_fields if name not in _LABELS} | quiet
    for own in ("__pydantic_private__", "__pydantic_extra__"):
        shown |= getattr(model, own, None) or {}
    return tuple((name, _value(value)) for name, value in shown.items())


def _value(value: Any, *, depth: int = 8) -> Hashable:
    """Returns what compares JSON values and arrays by their content, and everything else by identity.

    Never by repr: two classes of one name, two secrets and two long arrays print the same.
    """
    kind = type(value)
    if value is None or kind in {str, int, float, bool, bytes}:
        return kind.__name__, repr(value)
    if kind is np.ndarray and not value.dtype.hasobject:
        return kind.__name__, value.dtype.str, value.shape, hashlib.sha256(value.tobytes()).digest()
    if depth and kind in {list, tuple}:
        return (kind.__name__, *(_value(one, depth=depth - 1) for one in value))
    if depth and kind is dict and all(type(key) is str for key in value):
        return (kind.__name__, *((key, _value(value[key], depth=depth - 1)) for key in sorted(value)))
    return Same(value)
