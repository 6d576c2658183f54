"""Refuses models and embeddings whose calls others would see or keep, and notices changes between calls."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import operator
import os
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from langchain_core.callbacks import BaseCallbackHandler, BaseCallbackManager
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseChatModel, BaseLLM
from langchain_core.runnables import Runnable

from langchain_dpicl.backends.private_calls import method_checks
from langchain_dpicl.backends.private_calls.method_checks import (
    HTTP,
    NAMELESS,
    RECORDERS,
    AcceptedWrappers,
    Place,
    allowed_wrappers,
    attribute,
    is_installed,
    is_installed_module,
    is_within,
    modules_of,
    package_label,
    static_attribute,
    top_of,
    tops_of,
)
from langchain_dpicl.exceptions import UnsilencableModelError

Marks: TypeAlias = list[tuple[Any, tuple[Any, ...]]]
"""Collections that can be read again, and what was in them."""


class ModelSnapshot:
    """The objects that an inspection found, as two flat sequences that are compared before each call.

    One comparison for many calls would miss instrumentation that another thread starts meanwhile.
    """

    __slots__ = ("_addresses", "_codes", "_functions", "_lengths", "_places", "_was", "trouble")

    def __init__(self, marks: Marks, trouble: str, functions: Sequence[types.FunctionType] = ()) -> None:
        self.trouble = trouble
        self._places = [now for now, _ in marks]
        self._lengths = [len(was) for _, was in marks]
        self._was = [value for _, was in marks for value in was]  # kept alive, so that no address is reused
        self._addresses = _addresses(self._was, len(self._was))
        self._functions = list(functions)
        self._codes = [*map(_CODE, self._functions)]

    def is_old(self) -> bool:
        """Whether anything has changed since."""
        try:
            if [*map(len, self._places)] != self._lengths or [*map(_CODE, self._functions)] != self._codes:
                return True
            # By identity: a proxy claims to equal what it wraps.
            now = itertools.chain.from_iterable(self._places)
            return _addresses(now, len(self._was)) != self._addresses
        except (RuntimeError, ValueError):  # changed while it was read
            return True


_CODE = operator.attrgetter("__code__")


def _addresses(values: Iterable[Any], count: int) -> bytes:
    """Returns the addresses of some objects as one block of memory."""
    return np.fromiter(values, object, count).tobytes()


# Instrumentation of a provider's SDK, or of a model class, replaces functions that prompts pass through. Known
# recorders are refused wherever they wrap or subclass. In classes of installed distributions any other package is
# refused too, unless `method_checks` shows that it sees no bodies or the operator names it. What users wrap around
# their own code is theirs.
Kind: TypeAlias = Literal["chat", "completion", "decisions"]

GENERATING = ("_generate", "_agenerate")
DECIDING = ("_decide", "_adecide")
CLASSIFYING = ("_classify", "_aclassify")
EMBEDDING = ("embed_documents", "aembed_documents")
"""The methods of a model, sync and async, that private calls go through."""

# By name, so that neither package is imported: a user of such a model has imported it.
DECISION_MODELS = frozenset({("langchain_openai", "OpenAIDecisions"), ("langchain_core", "BaseDecisionModel")})
# Stock objects of `langchain_huggingface` around a pipeline of transformers, by package and name.
_PIPELINES = frozenset({("langchain_huggingface", "HuggingFacePipeline")})
_AROUND_PIPELINES = frozenset({("langchain_huggingface", "ChatHuggingFace")})  # or around an endpoint
_CACHING_STEPS = ("_generate_with_cache", "_agenerate_with_cache", "_generate_helper", "_agenerate_helper")
_PROMPT_TAKERS = frozenset({*GENERATING, *DECIDING, *CLASSIFYING, *EMBEDDING, "_call", "_acall", "_stream", "_astream"})

# OpenAI's and Anthropic's SDKs, and others made by the same generator, have these bases.
_SDK_BASES = frozenset({"SyncAPIClient", "AsyncAPIClient", "SyncAPIResource", "AsyncAPIResource"})
_TRANSPORTS = frozenset({"BaseTransport", "AsyncBaseTransport"})
_CARRYING = HTTP | {"httpx_aiohttp", "pydantic", "typing_extensions"}
_REQUESTING = frozenset({"requests", "urllib3"})
_REQUESTS = frozenset({"create", "parse", "stream", "post", "_post", "request", "_request", "send"})

_MADE_AT_RUN_TIME = 1 << 9
"""The bit of a type's `__flags__` that Python's own types lack."""

_PARTS_OF_PARTS = 3
"""Depth to which clients of any SDK are inspected (`client.chat.completions`); the model is at 0, a client at 1."""

_GATEWAY = "https://gateway.smith.langchain.com"
_OFF = frozenset({"", "false", "0", "no"})
_ON = frozenset({"true", "1", "yes"})

_PROCESS = (
    'hand in backends.PrivateProcess("provider:model") instead, which makes private calls in a process without it'
)
_ADVICE = {
    "sentry_sdk": "or in one whose sentry_sdk.init(..., disabled_integrations=[...]) has this integration in its list; "
    "what Sentry has patched stays patched",
    "opentelemetry.instrumentation.langchain": "or in one that starts it as "
    "LangchainInstrumentor(disable_trace_context_propagation=True)",
}
_ANY_ADVICE = "or take it off (uninstrument) and build the model after that"
_UNKNOWN_ADVICE = "if it reads no request and no answer, call allow_wrappers({!r}) before the model is built"
_TGI_ADVICE = (
    "for TGI, an Inference Endpoint or Hugging Face's router take ChatOpenAI(base_url='http://HOST:PORT/v1', "
    "api_key=..., model=...), which reads log-probabilities too; the HuggingFaceEndpoint itself votes with its text"
)
_PIPELINE_ADVICE = (
    "take LocalLLM or ChatLocal with backend=HuggingFaceBackend(pipeline.model, pipeline.tokenizer), which looks for "
    "them before every private call"
)
_LITELLM_ADVICE = (
    'hand in backends.PrivateProcess("litellm:model"), a process where none of them is set (LiteLLM\'s Router sets '
    "callbacks of its own), or take the provider's own LangChain class"
)


def kind_and_doors(model: Any) -> tuple[Kind, tuple[str, str]]:
    """Returns the kind of a model and the methods that private calls go through."""
    if isinstance(model, BaseChatModel | BaseLLM):
        return ("chat" if isinstance(model, BaseChatModel) else "completion"), GENERATING
    if is_one_of(model, DECISION_MODELS):
        for doors in (DECIDING, CLASSIFYING):
            if all(callable(getattr(type(model), name, None)) for name in doors):
                return "decisions", doors
    raise UnsilencableModelError(
        f"expected a chat or completion model or OpenAIDecisions, found {type(model).__name__}; "
        "pass the model itself, not a chain, fallback or configurable wrapper around it"
    )


def is_one_of(model: Any, classes: frozenset[tuple[str, str]]) -> bool:
    """Whether a model's class, or a base of it, is named; by name, so that no provider's package is imported."""
    return any((top_of(base.__module__), base.__name__) in classes for base in type(model).__mro__)


def is_around_pipelines(model: Any) -> bool:
    """Whether it is the stock chat model that may hold a pipeline's model."""
    return is_one_of(model, _AROUND_PIPELINES)


def pipeline_of(model: Any) -> Any:
    """Returns the pipeline of transformers that a stock object holds; None for anything else."""
    inner = getattr(model, "llm", None) if is_around_pipelines(model) else model
    return getattr(inner, "pipeline", None) if is_one_of(inner, _PIPELINES) else None


def refuse_open_models(model: Any) -> None:
    """Raises UnsilencableModelError for a model that reports its calls to others by design."""
    if pipeline_of(model) is not None:
        raise UnsilencableModelError(
            f"expected a model that writes for private calls, found {type(model).__name__} around a pipeline, which "
            f"does not look for hooks of others; {_PIPELINE_ADVICE}"
        )
    _refuse_overrides(type(model))
    _refuse_closers(type(model))
    attributes, private = attributes_of(model), model.__pydantic_private__ or {}
    declared = {name: getattr(model, name, None) for name in type(model).model_fields}
    _refuse_company(type(model).__name__, {**{k: v for k, v in attributes.items() if k not in private}, **declared})
    refuse_gateway(type(model).__name__, attributes.values())


def attributes_of(thing: Any) -> dict[str, Any]:
    """Returns the attributes of an object by name, including pydantic's private and extra fields and slots."""
    slots = (name for base in type(thing).__mro__ for name in _names(vars(base).get("__slots__", ())))
    attributes = {name: getattr(thing, name, None) for name in slots if not name.startswith("__")}
    for more in ("__dict__", "__pydantic_private__", "__pydantic_extra__"):
        attributes |= getattr(thing, more, None) or {}
    return attributes


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


def _refuse_closers(kind: type) -> None:
    """Raises UnsilencableModelError for a class with a destructor, which would close the client of all copies."""
    if static_attribute(kind, "__del__") is not None:
        raise UnsilencableModelError(
            f"{kind.__name__} closes its client as soon as a copy of it is dropped, and private calls are made on one; "
            "take a newer release (langchain-google-genai 4.4 or newer), or a class without __del__"
        )


def _refuse_company(kind: str, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        inside = value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else [value]
        watched = any(isinstance(item, Runnable | BaseCallbackHandler | BaseCallbackManager) for item in inside)
        if watched and name != "callbacks":
            advice = _TGI_ADVICE if kind == "ChatHuggingFace" else "pass the inner model itself"
            raise UnsilencableModelError(
                f"{kind} holds a runnable or callback handler in {name!r}, which would see the prompts; {advice}"
            )


def refuse_gateway(kind: str, values: Iterable[Any]) -> None:
    """Raises UnsilencableModelError if one of the values is, or has as base_url, an address of the LangSmith gateway.

    The default address counts even if the variable is off by now: it may have been on when the model was built.
    """
    asked = os.environ.get("LANGSMITH_GATEWAY", "")
    gateways = {_GATEWAY} if asked.lower() in _OFF | _ON else {_GATEWAY, asked.rstrip("/")}
    addresses = [str(value if isinstance(value, str) else attribute(value, "base_url")) for value in values]
    if any(f"{address}/".startswith(tuple(f"{gateway}/" for gateway in gateways)) for address in addresses):
        raise UnsilencableModelError(
            f"expected {kind} to call its provider, found the address of the LangSmith gateway, which would see the "
            "prompts; unset LANGSMITH_GATEWAY, or give the model the provider's own base_url=, and build it again"
        )


def hush_clients(model: Any) -> None:
    """Gives a silent copy clients that write no OpenTelemetry spans, as Anthropic's do: with tokens or even prompts."""
    _make(model, _clients(model))
    for name, client in vars(model).copy().items():
        if _is_sdk(type(client)) and hasattr(client, "open_telemetry"):
            vars(model)[name] = client.with_options(open_telemetry=False)


def calls_litellm(model: Any) -> bool:
    """Whether a model, or a part of it, is LiteLLM's or made for it."""
    return method_checks.uses_litellm([thing for thing, _ in _things(model)])


class PromptPath:
    """Checks the functions that a model's prompts pass through; one object per silent model.

    Wrappers that the operator names later are not accepted: the ledger has recorded the earlier list.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._named = allowed_wrappers()
        self._seen: ModelSnapshot | None = None  # one attribute, as threads share it

    def trouble(self) -> str:
        """Returns a message about a wrapper in the path, "" if there is none; inspects again only after a change."""
        seen = self._seen
        if seen is None or seen.is_old():
            seen = self._seen = _look(self._model, self._named)
        return seen.trouble


def _look(model: Any, named: Sequence[str] = ()) -> ModelSnapshot:
    """Inspects the path once; returns a snapshot, with a message about the first package that does not belong there."""
    scene = _Inspection(model, named)
    for thing, depth in _things(model):
        scene.inspect_object(thing, depth)
    scene.inspect_environment()
    trouble = scene.trouble()
    return ModelSnapshot([*scene.marks.values()], trouble, [*scene.functions.values()])


class _Inspection:
    """One inspection: values to compare later, and packages that do not belong in the path."""

    def __init__(self, model: Any, named: Sequence[str]) -> None:
        self.model = model
        self.named = named
        self.marks: dict[int, tuple[Any, tuple[Any, ...]]] = {}
        self.functions: dict[int, types.FunctionType] = {}
        self.found: dict[str, list[str]] = {}
        self.things: list[Any] = []
        self.hooks: list[tuple[type, Any]] = []

    def inspect_object(self, thing: Any, depth: int) -> None:
        self.things.append(thing)
        kind = thing if issubclass(type(thing), type) else type(thing)
        if kind is not thing and (depth <= _PARTS_OF_PARTS or _is_sdk(kind) or _is_http(kind)):
            # For the model only the names: fields may change with each call, and a replaced method is a new name.
            self._mark(thing, vars(thing) if thing is self.model else vars(thing).values())
            requests = [(name, value) for name, value in vars(thing).copy().items() if _is_request(thing, name)]
            self._find(kind, requests, is_strict=_is_sdk(kind) or _is_strict(kind, kind))
        for collection in _client_collections(thing):
            self._mark(collection, collection)
            self.hooks += [(kind, hook) for hook in collection if callable(hook)]
        for base in kind.__mro__:
            if top_of(base.__module__) in RECORDERS:
                self._note(package_label(base.__module__), kind.__name__)
            if _is_looked_at(base):
                self._mark(base, vars(base).values())
                self._find(base, vars(base).copy().items(), is_strict=_is_strict(kind, base))

    def inspect_environment(self) -> None:
        """Inspects what reports every call, and clients that cannot be inspected."""
        for name, value in vars(self.model).copy().items():
            opaque = _opaque(value) if "client" in name else ""
            if opaque and not is_within(opaque, self.named):
                self._note(opaque, f"{type(self.model).__name__}.{name}, which cannot be inspected,")
        sdks = frozenset[str]().union(*(_sdks(type(thing)) for thing in self.things))
        for module, kind in self._strangers(sdks):
            self._note(package_label(module), kind.__name__)
        for kind, hook in self.hooks:
            # Hooks receive each request. Hooks and transports that users write are their own responsibility, and SDKs
            # put some on the client that they are given, as OpenAI's does for Azure. Wrappers may hold others.
            is_whole = isinstance(hook, types.FunctionType) and hook.__closure__ is None
            own = sdks if is_whole else frozenset[str]()
            self._find(kind, [("event_hooks", hook)], is_strict=_is_installed_code(hook), home=own)
        self._mark(method_checks.CARRIED, method_checks.CARRIED)
        if method_checks.uses_litellm(self.things):
            self.marks |= {id(now): (now, was) for now, was in method_checks.litellm_marks()}
        bench = AcceptedWrappers(frozenset({"langchain_core"}), is_strict=True, named=self.named)
        tops = tops_of(base for thing in self.things for base in type(thing).__mro__ if is_installed(base))
        for culprit, place in method_checks.before_messages(bench, tops):
            self._note(culprit, place)

    def _strangers(self, sdks: frozenset[str]) -> Iterator[tuple[str, type]]:
        """Yields modules of other distributions that SDK and HTTP objects inherit from and that nobody named."""
        kinds = [type(thing) for thing in self.things]
        clients = [base for kind in kinds if not (_is_sdk(kind) or _is_http(kind)) for base in kind.__mro__]
        sdks = sdks | tops_of(type(self.model).__mro__) | _CARRYING
        for kind in kinds:
            if _is_sdk(kind) or _is_http(kind):
                known = sdks if _is_sdk(kind) else sdks | tops_of(clients)
                yield from ((module, kind) for module in _modules_of(kind) if not self._is_known(module, known))

    def _is_known(self, module: str, known: frozenset[str]) -> bool:
        return top_of(module) in known or is_within(module, self.named) or not is_installed_module(module)

    def trouble(self) -> str:
        """Returns the message about the first package found, or about LiteLLM's callbacks; "" if there is neither."""
        start = f"{type(self.model).__name__} cannot be called in silence: "
        for culprit, places in self.found.items():
            standing = dict.fromkeys(places)
            where = ", ".join([*standing][:2]) + (f" and {len(standing) - 2} more" if len(standing) > 2 else "")
            return f"{start}{culprit} is in the path of {where} and {_danger_and_advice(culprit)}"
        if not method_checks.uses_litellm(self.things):
            return ""
        callbacks = method_checks.litellm_trouble(self.model)
        return f"{start}{callbacks} would see or store prompts and answers; {_LITELLM_ADVICE}" if callbacks else ""

    def _mark(self, owner: Any, now: Any) -> None:
        self.marks[id(owner)] = (now, tuple(now))

    def _note(self, culprit: str, place: str) -> None:
        self.found.setdefault(culprit, []).append(place)

    def _find(
        self, owner: type, items: Iterable[tuple[str, Any]], *, is_strict: bool, home: frozenset[str] = frozenset()
    ) -> None:
        """Records each method of `owner` that a package beside its own and `home` wraps, under that package's name."""
        top = top_of(owner.__module__)
        place: Place | None = "http" if _is_http(owner) or top in _REQUESTING else None
        bench = AcceptedWrappers(home | {top}, is_strict=is_strict, place=place, named=self.named)
        for name, value in items:
            if (name.startswith("__") and name != "__call__") or (
                top == "langchain_core" and name not in _PROMPT_TAKERS
            ):
                continue
            met: list[types.FunctionType] = []
            culprit = bench.culprit(value, met=met)
            if type(value) not in {property, functools.cached_property}:  # their functions are given no text
                self.functions |= {id(function): function for function in met}
            if culprit:
                self._note(culprit, f"{owner.__name__}.{name}")


def _danger_and_advice(culprit: str) -> str:
    if top_of(culprit) in RECORDERS:
        known = (text for start, text in _ADVICE.items() if culprit.startswith(start))
        return f"would see the prompts; {_PROCESS}, {next(known, _ANY_ADVICE)}"
    named = "" if culprit == NAMELESS else f"; {_UNKNOWN_ADVICE.format(culprit)}"
    return f"may see the prompts, as nothing is known of it; {_PROCESS}, {_ANY_ADVICE}{named}"


def _things(model: Any) -> Iterator[tuple[Any, int]]:
    """Yields the model, its attributes, and those of its clients two levels deep, each with its depth.

    Objects of a known SDK or of the HTTP client are followed to any depth. Attributes of the model whose names are not
    a client's are the user's own objects, and are not inspected.
    """
    _make(model, _clients(model))
    todo: list[tuple[Any, int]] = [(model, 0)]
    seen = {id(model)}
    for thing, depth in todo:  # it grows; the shallow come first
        yield thing, depth
        if issubclass(type(thing), type):
            continue
        if _is_sdk(type(thing)):
            # Created on first use, inside a call; created here, so that it is inspected before the first prompt.
            _make(thing, ["with_raw_response" if hasattr(type(thing), "create") else "messages"])
        # On the class: the object itself may answer to any name.
        is_pydantic = hasattr(type(thing), "__pydantic_private__")
        attributes = [*vars(thing).items(), *((thing.__pydantic_private__ or {}).items() if is_pydantic else ())]
        attributes += [("", item) for collection in _client_collections(thing) for item in collection]
        for name, item in attributes:
            kind = type(item)
            is_known = _is_sdk(kind) or _is_http(kind)
            is_client = thing is model and "client" in name
            is_part = depth < _PARTS_OF_PARTS and not _is_http(type(thing)) and _is_looked_at(kind)
            is_next = is_known or is_part or (is_client and top_of(kind.__module__) in RECORDERS)  # mocks record calls
            is_new = id(item) not in seen and not issubclass(kind, type)
            if is_client and issubclass(kind, type) and id(item) not in seen:
                seen.add(id(item))
                todo.append((item, depth + 1))
            elif is_next and is_new and isinstance(attribute(item, "__dict__"), dict):
                seen.add(id(item))
                is_inside = thing is not model or is_known or is_client
                todo.append((item, depth + 1 if is_inside else _PARTS_OF_PARTS + 1))


def _client_collections(thing: Any) -> list[Any]:
    """Returns the collections in which an HTTP client keeps its transports and hooks."""
    if not _is_http(type(thing)):
        return []
    mounts, hooks = (vars(thing).get(name) for name in ("_mounts", "_event_hooks"))
    collections = [mounts.values()] if isinstance(mounts, dict) else []
    return [*collections, hooks.values(), *hooks.values()] if isinstance(hooks, dict) else collections


def _clients(model: Any) -> list[str]:
    return [name for name in dir(type(model)) if name.endswith("client")]


def _make(thing: Any, names: Iterable[str]) -> None:
    """Makes a thing create its cached parts; a part that cannot be created is not in the path."""
    for name in names:
        if type(static_attribute(type(thing), name)) is functools.cached_property:
            with contextlib.suppress(Exception):
                getattr(thing, name)


def _is_sdk(kind: type) -> bool:
    return any(_is_of_sdk(base) for base in kind.__mro__)


def _is_of_sdk(base: type) -> bool:
    return base.__name__ in _SDK_BASES or base.__name__.endswith("WithRawResponse")


def _is_http(kind: type) -> bool:
    for base in kind.__mro__:
        name = base.__name__
        if name in _TRANSPORTS or (name == "BaseClient" and top_of(base.__module__) in HTTP):
            return True
    return False


def _is_looked_at(base: type) -> bool:
    top = top_of(base.__module__)
    if top == "langchain_core":
        return not _PROMPT_TAKERS.isdisjoint(vars(base))
    if top in HTTP:
        return _is_http(base)  # not what it keeps: addresses, headers, timeouts
    return top not in sys.stdlib_module_names and top not in {"pydantic", "pydantic_core", "typing_extensions"}


def _is_strict(kind: type, base: type) -> bool:
    """Whether wrappers by any package count in a base: in installed classes, not in those that users write."""
    top = top_of(base.__module__)
    return top.startswith("langchain_") or top in HTTP or top in _sdks(kind) or is_installed(base)


def _modules_of(kind: type) -> Iterator[str]:
    """Yields the modules of a class and its bases, by their functions, as SDKs give their name to other classes."""
    for base in kind.__mro__:
        functions = [value for value in vars(base).values() if type(value) is types.FunctionType]
        modules = dict.fromkeys(str(function.__globals__.get("__name__")) for function in functions)
        yield from (module for module in modules if top_of(module) == top_of(base.__module__))


def _sdks(kind: type) -> frozenset[str]:
    """Returns the packages of the SDKs that a class inherits from."""
    return tops_of(base for base in kind.__mro__ if _is_of_sdk(base))


def _is_request(thing: Any, name: str) -> bool:
    """Whether an attribute on an object itself takes requests, or hides a method of its class."""
    value = vars(thing).get(name)
    if type(value) is types.MethodType and _is_sdk(type(value.__self__)):
        is_held = any(value.__self__ is value_held for value_held in [*vars(thing).values()])
        if is_held and static_attribute(type(value.__self__), str(attribute(value, "__name__"))) is value.__func__:
            return False  # a resource keeps methods of the client that it keeps: those are looked at there
    fields = getattr(type(thing), "model_fields", None)
    is_field = isinstance(fields, dict) and name in fields
    return not is_field and (name in _REQUESTS or type(static_attribute(type(thing), name)) is types.FunctionType)


def _opaque(value: Any) -> str:
    """Returns the module of a client that has no function to inspect, such as a module; "" for any other."""
    if issubclass(type(value), types.ModuleType):
        return "" if top_of(value.__name__) == method_checks.LITELLM else value.__name__
    kind = type(value)
    if kind.__module__ == "builtins":  # compiled classes that say nothing of their package say that
        return NAMELESS if kind.__flags__ & _MADE_AT_RUN_TIME else ""
    is_empty = not any(type(item) is types.FunctionType for base in kind.__mro__ for item in vars(base).values())
    return kind.__module__ if is_empty and is_installed(kind) else ""


def _is_installed_code(hook: Any) -> bool:
    """Whether a hook belongs to an installed distribution, and is not the user's own."""
    return any(is_installed_module(module) for module in modules_of(hook))


# A cache of embeddings stores the texts, or hashes that a guessed text can be checked against, and it answers faster
# for a text that it has seen.
_STORING = (("mget", "mset"), ("lookup", "update"))
"""Methods of LangChain's byte stores and of its caches."""

_FOLDERS = ("dir", "directory", "folder", "home", "root")
"""Endings of field names that hold the folder of a model's files, as in `cache_folder`."""

_MEMOISED = type(functools.lru_cache(lambda: None))


def refuse_keepers(embeddings: Embeddings) -> None:
    """Raises UnsilencableModelError for embeddings, or inner ones they hold, that store texts or pass them on."""
    for one in _all_of(embeddings):
        kind, attributes = type(one).__name__, attributes_of(one)
        if reason := _keeping_class(type(one)) or next(
            filter(None, map(_keeping_attribute, attributes, attributes.values())), ""
        ):
            raise UnsilencableModelError(
                f"expected embeddings that keep nothing, found {kind}, {reason}: private answers, or data they can be "
                "guessed from, would stay there; pass the inner embeddings without a cache"
            )
        for name, value in attributes.items():
            if any(isinstance(item, Runnable | BaseCallbackHandler | BaseCallbackManager) for item in _inside(value)):
                raise UnsilencableModelError(
                    f"{kind} holds a runnable or callback handler in {name!r}, which would see the texts; "
                    "pass embeddings without it"
                )
        refuse_gateway(kind, attributes.values())


def _all_of(embeddings: Embeddings) -> Iterator[Embeddings]:
    """Yields embeddings and all embeddings that they hold, at any depth."""
    todo, seen = [embeddings], {id(embeddings)}
    for one in todo:  # it grows
        yield one
        for value in attributes_of(one).values():
            for item in _inside(value):
                if isinstance(item, Embeddings) and id(item) not in seen:
                    seen.add(id(item))
                    todo.append(item)


def _inside(value: Any) -> list[Any]:
    """Returns a value, or the items of a plain collection."""
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple | set | frozenset) else [value]


def _keeping_class(kind: type) -> str:
    """Says why a class stores texts; "" if nothing shows that it does."""
    named = next((base.__name__ for base in kind.__mro__ if "cache" in base.__name__.lower()), "")
    if named:
        return "which is a cache by its name" if named == kind.__name__ else f"a cache by the name of its base {named}"
    for base in kind.__mro__:
        for name, value in vars(base).items():
            if _is_memoised(value):
                return f"whose method {name} remembers its arguments"
    return ""


def _is_memoised(value: Any) -> bool:
    """Whether a method is wrapped by `functools.lru_cache` or `cache`, and takes more than its object."""
    is_static = isinstance(value, staticmethod)
    value = value.__func__ if isinstance(value, classmethod | staticmethod) else value
    if not isinstance(value, _MEMOISED):
        return False
    parameters = inspect.signature(value.__wrapped__).parameters.values()
    return len(parameters) > (0 if is_static else 1) or any(one.kind is one.VAR_POSITIONAL for one in parameters)


def _keeping_attribute(name: str, value: Any) -> str:
    """Says why an attribute stores texts; "" if nothing shows that it does."""
    kinds = {type(item) for item in _inside(value)}  # of which a vocabulary has few
    if any(_has(kind, methods) for kind in kinds for methods in _STORING):
        return f"which holds a store or cache in {name!r}"
    if isinstance(value, _MEMOISED):
        return f"which remembers arguments in {name!r}"
    is_off = value is None or (isinstance(value, int | float) and not value)  # an empty collection is no switch
    if "cache" not in name.lower() or is_off:
        return ""
    is_folder = name.lower().endswith(_FOLDERS) and isinstance(value, str | os.PathLike)
    return "" if is_folder else f"which has a cache in {name!r}"


def _has(kind: type, methods: tuple[str, ...]) -> bool:
    return all(callable(getattr(kind, method, None)) for method in methods)
