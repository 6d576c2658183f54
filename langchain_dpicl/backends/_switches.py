"""Finds process-wide observers of calls: patched message classes, pydantic plugins and LiteLLM callbacks."""

from __future__ import annotations

import itertools
import operator
import sys
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ChatMessage, HumanMessage, SystemMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult, Generation, LLMResult
from pydantic import BaseModel

from langchain_dpicl._wrapper_rules import is_within
from langchain_dpicl.backends._standing import DECORATORS, Bench, attribute, modules_of, shown, static, top_of

_CARRIERS: tuple[type, ...] = (
    *(BaseMessage, HumanMessage, AIMessage, AIMessageChunk, SystemMessage, ChatMessage),
    *(Generation, ChatGeneration, ChatGenerationChunk, ChatResult, LLMResult),
)
"""Classes whose objects carry private prompts and answers."""

_MADE_BY = ("__new__", "__init__", "__setattr__")
_VALIDATOR = "__pydantic_validator__"
_VALIDATING = ("validate_python", "validate_json", "validate_strings")

LITELLM = "litellm"
_TOLD = (
    *("callbacks", "input_callback", "success_callback", "failure_callback", "service_callback", "audit_log_callbacks"),
    *("_async_input_callback", "_async_success_callback", "_async_failure_callback"),
    *("pre_call_rules", "post_call_rules", "cache", "log_raw_request_response"),
)
"""Names in LiteLLM's module of observers of every call, and of caches of its answers."""

_TOLD_ONCE = frozenset({*_TOLD, "caching", "logger_fn"})
"""Arguments with which one call gets such an observer."""


class Watched:
    """The present values of some objects' attributes, in one sequence, for comparison with an inspection."""

    __slots__ = ("_asked", "_names")

    def __init__(self, pairs: Sequence[tuple[Any, str]]) -> None:
        self._asked: list[Callable[[str], Any]] = [vars(owner).get for owner, _ in pairs]
        self._names = [name for _, name in pairs]

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[Any]:
        return map(operator.call, self._asked, self._names)


CARRIED = Watched([(kind, name) for kind in _CARRIERS for name in (*_MADE_BY, _VALIDATOR) if name in vars(kind)])
"""What creates and validates messages and answers; one object for every model."""


def before_messages(bench: Bench, tops: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yields (package, place) of wrappers around the creation of messages and answers; `tops`: packages of models."""
    for kind, name in itertools.product(_CARRIERS, _MADE_BY):
        if culprit := bench.culprit(static(kind, name)):
            yield culprit, f"{kind.__name__}.{name}"
    for kind in (*_CARRIERS, *_models_of(tops)):
        for module in dict.fromkeys(_watching(vars(kind).get(_VALIDATOR))):
            if not is_within(module, bench.named):
                yield shown(module), f"the validation of {kind.__name__} (a pydantic plugin)"


def _models_of(tops: Collection[str]) -> Iterator[type]:
    """Yields the existing pydantic classes of some packages, if a pydantic plugin is active."""
    if not getattr(sys.modules.get("pydantic.plugin._loader"), "_plugins", None):
        return
    todo: list[type] = [BaseModel]
    seen: set[type] = set()
    for kind in todo:  # it grows
        below: list[type] = type.__subclasses__(kind)
        fresh = [each for each in below if each not in seen]
        seen.update(fresh)
        todo += fresh
        if top_of(kind.__module__) in tops:
            yield kind


def _watching(validator: Any) -> Iterator[str]:
    """Yields the modules that see what a pydantic class validates; none where pydantic alone does it."""
    for name in _VALIDATING:
        validates = attribute(validator, name)
        if validates is not None and type(validates) is not types.BuiltinFunctionType:
            yield from _handlers_of(validates)


def _handlers_of(validates: Any) -> Iterator[str]:
    """Yields the modules of a plugin's handlers, which pydantic's wrapper encloses; at least one name."""
    cells = (attribute(cell, "cell_contents") for cell in getattr(validates, "__closure__", None) or ())
    enclosed = [item for cell in cells for item in (cell if isinstance(cell, tuple) else (cell,))]
    owners = (attribute(item, "__self__") or item for item in enclosed)
    parts = [validates, *(owner for owner in owners if not isinstance(owner, type))]
    named = [name for part in parts for name in (modules_of(part) or [type(part).__module__])]
    foreign = [name for name in named if top_of(name) not in DECORATORS | {"pydantic_core", "_pydantic_core"}]
    yield from foreign or ["pydantic.plugin"]


def uses_litellm(things: Collection[Any]) -> bool:
    """Whether a model, or an attribute of it, is LiteLLM's or made for it, under any name."""
    values = [value for thing in things for value in (thing, *vars(thing).values())]
    kinds = {base for value in values for base in (value if issubclass(type(value), type) else type(value)).__mro__}
    modules = {value.__name__ for value in values if issubclass(type(value), types.ModuleType)}
    names = {top_of(kind.__module__) for kind in kinds} | {top_of(module) for module in modules}
    return LITELLM in names or any("litellm" in kind.__name__.lower() for kind in kinds)


def litellm_marks() -> list[tuple[Any, tuple[Any, ...]]]:
    """Returns LiteLLM's observers, to be compared before each call: the names, and the contents of collections."""
    module = sys.modules.get(LITELLM)
    if module is None:
        return []
    names = Watched([(module, name) for name in _TOLD])
    collections = [value for value in names if isinstance(value, list | dict | set)]
    return [(names, tuple(names)), *((value, tuple(value)) for value in collections)]


def litellm_trouble(model: Any) -> str:
    """Returns which of LiteLLM's callbacks and caches are set, for all calls or for a model's; "" if none is."""
    module = sys.modules.get(LITELLM)
    callbacks = [] if module is None else [f"litellm.{name}" for name in _TOLD if vars(module).get(name)]
    own = attribute(model, "model_kwargs")
    return ", ".join([*callbacks, *(f"model_kwargs[{name!r}]" for name in sorted(_TOLD_ONCE & set(own or ())))])
