"""Which models can be called in silence, and what stands on a prompt's way. Knows no prompt and makes no call.

Instrumentation of a provider's SDK, or of a model class, replaces functions that prompts pass through. So these are
looked up here: `Way.trouble` names the package that stands in one. Known recorders are refused wherever they stand,
as wrappers or as classes; any other package only in the classes of an SDK or of LangChain, as what users put around
code of their own is theirs.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import os
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypeAlias

from langchain_core.callbacks import BaseCallbackHandler, BaseCallbackManager
from langchain_core.language_models import BaseChatModel, BaseLLM
from langchain_core.runnables import Runnable

from langchain_dpicl.exceptions import UnsilencableModelError

Kind: TypeAlias = Literal["chat", "completion", "decisions"]
Marks: TypeAlias = list[tuple[Any, tuple[Any, ...]]]

GENERATING = ("_generate", "_agenerate")
DECIDING = ("_decide", "_adecide")
CLASSIFYING = ("_classify", "_aclassify")
EMBEDDING = ("embed_documents", "aembed_documents")
"""The doors of a model: the methods, sync and async, that private calls go through."""

# By name, so that neither package is imported: whoever holds such a model has imported it.
DECISION_MODELS = frozenset({("langchain_openai", "OpenAIDecisions"), ("langchain_core", "BaseDecisionModel")})
_CACHING_STEPS = ("_generate_with_cache", "_agenerate_with_cache", "_generate_helper", "_agenerate_helper")
_PROMPT_TAKERS = frozenset({*GENERATING, *DECIDING, *CLASSIFYING, *EMBEDDING, "_call", "_acall", "_stream", "_astream"})

# OpenAI's and Anthropic's SDKs, and others made by the same generator, have these bases.
_SDK_BASES = frozenset({"SyncAPIClient", "AsyncAPIClient", "SyncAPIResource", "AsyncAPIResource"})
_TRANSPORTS = frozenset({"BaseTransport", "AsyncBaseTransport"})
_REQUESTS = frozenset({"create", "parse", "stream", "post", "_post", "request", "_request", "send"})

_HTTP = frozenset({"httpx", "httpx2"})
_DECORATORS = (sys.stdlib_module_names | _HTTP | {"langchain_core", "pydantic", "tenacity", "typing_extensions"}) - {
    "unittest"
}
"""Packages whose decorators wrap methods where these are defined, and record nothing."""

# fmt: off
_RECORDERS = frozenset({
    "agentops", "braintrust", "ddtrace", "elasticapm", "helicone", "langfuse", "langsmith", "literalai", "logfire",
    "lunary", "mlflow", "newrelic", "openinference", "openlit", "opentelemetry", "opik", "portkey_ai", "posthog",
    "sentry_sdk", "traceloop", "unittest", "wandb", "weave",
})
# fmt: on
"""Packages that record calls: refused around any method, and as a class, even of or in a package not known here."""

_FAMILIES = (["instrumentation"], ["integrations"])
"""Second parts of module names that say which one of a package it is."""

_PARTS_OF_PARTS = 3
"""How deep clients of any SDK are looked into, as in `client.chat.completions`: the model is at 0, a client at 1."""

_GATEWAY = "https://gateway.smith.langchain.com"
_OFF = frozenset({"", "false", "0", "no"})
_ON = frozenset({"true", "1", "yes"})

_ADVICE = {
    "sentry_sdk": "make private calls in a process whose sentry_sdk.init(..., disabled_integrations=[...]) has this "
    "integration in its list; what Sentry has patched stays patched",
    "opentelemetry.instrumentation.langchain": "make private calls in a process that starts it as "
    "LangchainInstrumentor(disable_trace_context_propagation=True)",
}
_ANY_ADVICE = "make private calls in a process without it, or take it off (uninstrument) and build the model after that"


def kind_and_doors(model: Any) -> tuple[Kind, tuple[str, str]]:
    """Returns what a model takes and its doors.

    Raises:
      UnsilencableModelError: it is no chat, completion or decision model.
    """
    if isinstance(model, BaseChatModel | BaseLLM):
        return ("chat" if isinstance(model, BaseChatModel) else "completion"), GENERATING
    if any((_top(base.__module__), base.__name__) in DECISION_MODELS for base in type(model).__mro__):
        for doors in (DECIDING, CLASSIFYING):
            if all(callable(getattr(type(model), name, None)) for name in doors):
                return "decisions", doors
    raise UnsilencableModelError(
        f"expected a chat or completion model or OpenAIDecisions, found {type(model).__name__}; "
        "pass the model itself, not a chain, fallback or configurable wrapper around it"
    )


def refuse_open_models(model: Any) -> None:
    """Raises UnsilencableModelError for a model that tells others of its calls by its own making."""
    _refuse_overrides(type(model))
    held, private = held_by(model), model.__pydantic_private__ or {}
    declared = {name: getattr(model, name, None) for name in type(model).model_fields}
    _refuse_company(type(model).__name__, {**{k: v for k, v in held.items() if k not in private}, **declared})
    refuse_gateway(type(model).__name__, held.values())


def held_by(thing: Any) -> dict[str, Any]:
    """Returns the attributes of an object by name: those of pydantic's private and extra fields and slots as well."""
    slots = (name for base in type(thing).__mro__ for name in _names(vars(base).get("__slots__", ())))
    held = {name: getattr(thing, name, None) for name in slots if not name.startswith("__")}
    for more in ("__dict__", "__pydantic_private__", "__pydantic_extra__"):
        held |= getattr(thing, more, None) or {}
    return held


def _names(slots: Any) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def _refuse_overrides(kind: type) -> None:
    for name in _CACHING_STEPS:
        owner = next((base for base in kind.__mro__ if name in vars(base)), None)
        if owner is not None and not owner.__module__.startswith("langchain_core."):
            raise UnsilencableModelError(
                f"{kind.__name__} overrides {name}, a step that private calls leave out; "
                "pass a model that puts its own work into _generate and _agenerate"
            )


def _refuse_company(kind: str, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        inside = value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else [value]
        watched = any(isinstance(item, Runnable | BaseCallbackHandler | BaseCallbackManager) for item in inside)
        if watched and name != "callbacks":
            raise UnsilencableModelError(
                f"{kind} holds a runnable or callback handler in {name!r}, which would see the prompts; "
                "pass the inner model itself"
            )


def refuse_gateway(kind: str, values: Iterable[Any]) -> None:
    """Raises UnsilencableModelError where one of the values is an address of the LangSmith gateway, or has it.

    Its default address counts as well when the variable is off by now: it was on when the model was built.
    """
    asked = os.environ.get("LANGSMITH_GATEWAY", "")
    gateways = {_GATEWAY} if asked.lower() in _OFF | _ON else {_GATEWAY, asked.rstrip("/")}
    addresses = [str(value if isinstance(value, str) else _attribute(value, "base_url")) for value in values]
    if any(f"{address}/".startswith(tuple(f"{gateway}/" for gateway in gateways)) for address in addresses):
        raise UnsilencableModelError(
            f"expected {kind} to call its provider, found the address of the LangSmith gateway, which would see the "
            "prompts; unset LANGSMITH_GATEWAY, or give the model the provider's own base_url=, and build it again"
        )


def hush_clients(model: Any) -> None:
    """Gives a silent copy clients that draw no spans of their own, as Anthropic's do: with tokens, or even prompts."""
    _make(model, _clients(model))
    for name, client in vars(model).copy().items():
        if _is_sdk(type(client)) and hasattr(client, "open_telemetry"):
            vars(model)[name] = client.with_options(open_telemetry=False)


class Way:
    """The functions that a model's prompts pass through; one object per silent model."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._seen: _Sight | None = None  # one attribute, as threads share it

    def trouble(self) -> str:
        """Returns "" where nobody stands on the way, or a message; looks again only when something has changed."""
        seen = self._seen
        if seen is None or seen.is_old():
            seen = self._seen = _Sight(*_look(self._model))
        return seen.trouble


class _Sight:
    """What was found on the way, and where: before each call, all of that is compared, so it is kept as two flat runs.

    Once for many calls would do only if nobody could start instrumenting meanwhile, as another thread can.
    """

    __slots__ = ("_lengths", "_places", "_was", "trouble")

    def __init__(self, marks: Marks, trouble: str) -> None:
        self.trouble = trouble
        self._places = [now for now, _ in marks]
        self._lengths = [len(was) for _, was in marks]
        self._was = [value for _, was in marks for value in was]

    def is_old(self) -> bool:
        """Whether anything has changed since."""
        try:
            if [*map(len, self._places)] != self._lengths:
                return True
            # By identity: a proxy says that it equals what it wraps.
            return any(map(operator.is_not, itertools.chain.from_iterable(self._places), self._was))
        except RuntimeError:  # changed while it was read
            return True


def _look(model: Any) -> tuple[Marks, str]:
    """Returns what stands on the way now, and a message about the first package that does not belong there."""
    marks: dict[int, tuple[Any, tuple[Any, ...]]] = {}
    found: dict[str, list[str]] = {}
    for thing, depth in _things(model):
        kind = type(thing)
        if depth <= _PARTS_OF_PARTS or _is_sdk(kind) or _is_http(kind):
            # Of the model the names: its fields may change with each call, and a method in the way is a new name.
            own: Any = vars(thing) if thing is model else vars(thing).values()
            marks[id(thing)] = (own, tuple(own))
            requests = [(name, value) for name, value in vars(thing).copy().items() if _is_request(thing, name)]
            _find(found, kind, requests, is_strict=_is_sdk(kind) or _is_strict(kind, kind))
        for given in _given(thing):
            marks[id(given)] = (given, tuple(given))
            # Hooks are told of each request. Those that users write are theirs, as transports are that they write.
            _find(found, kind, [("event_hooks", hook) for hook in given if callable(hook)], is_strict=False)
        for base in kind.__mro__:
            if _top(base.__module__) in _RECORDERS:
                found.setdefault(_package(base.__module__), []).append(kind.__name__)
            if _is_looked_at(base):
                marks[id(base)] = (vars(base).values(), tuple(vars(base).values()))
                _find(found, base, vars(base).copy().items(), is_strict=_is_strict(kind, base))
    for culprit, places in found.items():
        advice = next((text for start, text in _ADVICE.items() if culprit.startswith(start)), _ANY_ADVICE)
        standing = dict.fromkeys(places)
        shown = ", ".join([*standing][:2]) + (f" and {len(standing) - 2} more" if len(standing) > 2 else "")
        return list(marks.values()), (
            f"{type(model).__name__} cannot be called in silence: {culprit} stands before {shown} and would see the "
            f"prompts; {advice}"
        )
    return list(marks.values()), ""


def _things(model: Any) -> Iterator[tuple[Any, int]]:
    """Yields the model, what it holds, and what its clients hold two levels deep, each with its depth.

    Objects of a known SDK or of the HTTP client are followed to any depth; what the model holds by a name that is not
    a client's is a user's own object, and not looked into.
    """
    _make(model, _clients(model))
    todo: list[tuple[Any, int]] = [(model, 0)]
    seen = {id(model)}
    for thing, depth in todo:  # it grows; the shallow come first
        yield thing, depth
        if _is_sdk(type(thing)):
            # Made on first use, on the way of a call: looked at before the first prompt passes.
            _make(thing, ["with_raw_response" if hasattr(type(thing), "create") else "messages"])
        # Asked of the class first: an object may answer to any name.
        is_pydantic = hasattr(type(thing), "__pydantic_private__")
        held = [*vars(thing).items(), *((thing.__pydantic_private__ or {}).items() if is_pydantic else ())]
        held += [("", item) for given in _given(thing) for item in given]
        for name, item in held:
            kind = type(item)
            is_known = _is_sdk(kind) or _is_http(kind)
            is_client = thing is model and "client" in name
            is_part = depth < _PARTS_OF_PARTS and not _is_http(type(thing)) and _is_looked_at(kind)
            is_next = is_known or is_part or (is_client and _top(kind.__module__) in _RECORDERS)  # mocks record calls
            is_new = id(item) not in seen and not issubclass(kind, type)
            if is_next and is_new and isinstance(_attribute(item, "__dict__"), dict):
                seen.add(id(item))
                is_inside = thing is not model or is_known or is_client
                todo.append((item, depth + 1 if is_inside else _PARTS_OF_PARTS + 1))


def _given(thing: Any) -> list[Any]:
    """Returns the collections in which an HTTP client keeps the transports and hooks that it was given."""
    if not _is_http(type(thing)):
        return []
    mounts, hooks = (vars(thing).get(name) for name in ("_mounts", "_event_hooks"))
    found = [mounts.values()] if isinstance(mounts, dict) else []
    return [*found, hooks.values(), *hooks.values()] if isinstance(hooks, dict) else found


def _clients(model: Any) -> list[str]:
    return [name for name in dir(type(model)) if name.endswith("client")]


def _make(thing: Any, names: Iterable[str]) -> None:
    """Has a thing make its cached parts; a part that cannot be made is not on the way."""
    for name in names:
        if type(_static(type(thing), name)) is functools.cached_property:
            with contextlib.suppress(Exception):
                getattr(thing, name)


def _is_sdk(kind: type) -> bool:
    return any(_is_of_sdk(base) for base in kind.__mro__)


def _is_of_sdk(base: type) -> bool:
    return base.__name__ in _SDK_BASES or base.__name__.endswith("WithRawResponse")


def _is_http(kind: type) -> bool:
    names = [(_top(base.__module__), base.__name__) for base in kind.__mro__]
    return any(name in _TRANSPORTS or (top in _HTTP and name == "BaseClient") for top, name in names)


def _is_looked_at(base: type) -> bool:
    top = _top(base.__module__)
    if top == "langchain_core":
        return not _PROMPT_TAKERS.isdisjoint(vars(base))
    if top in _HTTP:
        return _is_http(base)  # not what it keeps: addresses, headers, timeouts
    return top not in sys.stdlib_module_names and top not in {"pydantic", "pydantic_core", "typing_extensions"}


def _is_strict(kind: type, base: type) -> bool:
    """Whether any package counts that stands in a base: in an SDK's and LangChain's, not in what users write."""
    top = _top(base.__module__)
    return top.startswith("langchain_") or top in {_top(each.__module__) for each in kind.__mro__ if _is_of_sdk(each)}


def _is_request(thing: Any, name: str) -> bool:
    """Whether an attribute of a thing itself takes requests, or stands before a method of its class."""
    value = vars(thing).get(name)
    if type(value) is types.MethodType and _is_sdk(type(value.__self__)):
        is_held = any(value.__self__ is held for held in [*vars(thing).values()])
        if is_held and _static(type(value.__self__), str(_attribute(value, "__name__"))) is value.__func__:
            return False  # a resource keeps methods of the client that it keeps: those are looked at there
    fields = getattr(type(thing), "model_fields", None)
    is_field = isinstance(fields, dict) and name in fields
    return not is_field and (name in _REQUESTS or type(_static(type(thing), name)) is types.FunctionType)


def _find(found: dict[str, list[str]], owner: type, items: Iterable[tuple[str, Any]], *, is_strict: bool) -> None:
    """Notes each method of `owner` that another package stands before, under that package's name."""
    is_core = _top(owner.__module__) == "langchain_core"
    is_http = _is_http(owner)
    for name, value in items:
        if name.startswith("__") or (is_core and name not in _PROMPT_TAKERS):
            continue
        culprit = _culprit(value, _top(owner.__module__), is_strict=is_strict)
        # Sentry counts HTTP requests in the context of the call, and that is thrown away with the call.
        if culprit and not (is_http and culprit.startswith("sentry_sdk")):
            found.setdefault(culprit, []).append(f"{owner.__name__}.{name}")


def _culprit(value: Any, home: str, *, is_strict: bool) -> str:
    """Returns the package of the first layer around a method that does not belong there, or ""."""
    for layer in _layers(value):
        module = _module(layer)
        top = _top(module)
        if top in _RECORDERS or (is_strict and top != home and top not in _DECORATORS):
            return _package(module)
    return ""


def _package(module: str) -> str:
    """Returns what to call the package of a module: with the integration's name, where it has several."""
    return ".".join(module.split(".")[:3]) if module.split(".")[1:2] in _FAMILIES else _top(module)


def _layers(value: Any) -> Iterator[Any]:
    """Yields a method and what is wrapped inside; by `type`, as proxies pretend to be what they wrap."""
    for _ in range(20):
        kind = type(value)
        if kind in {staticmethod, classmethod, types.MethodType}:
            value = value.__func__
        elif kind is property:
            value = value.fget
        elif kind in {functools.cached_property, functools.partial, functools.partialmethod}:
            value = value.func
        else:
            yield value
            value = _attribute(value, "__wrapped__")
        if value is None:
            return


def _module(layer: Any) -> str:
    """Returns the module whose code a layer is; `functools.wraps` copies `__module__`, but not the globals."""
    kind = type(layer)
    if kind is types.FunctionType:
        return str(layer.__globals__.get("__name__", ""))
    if issubclass(kind, type) or not callable(layer):
        return "builtins"
    wrapper = _attribute(layer, "_self_wrapper")
    if type(wrapper) is types.FunctionType:
        return _module(wrapper)
    return (kind if wrapper is None else type(wrapper)).__module__


def _attribute(value: Any, name: str) -> Any:
    """Returns an attribute of what may be a proxy for something that cannot be had; then, as without it, None."""
    with contextlib.suppress(Exception):
        return getattr(value, name, None)
    return None


def _static(kind: type, name: str) -> Any:
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


def _top(module: str) -> str:
    return module.partition(".")[0]
