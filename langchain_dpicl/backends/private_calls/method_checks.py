"""Decides which wrappers of a method are accepted, and finds process-wide observers of calls."""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib.metadata
import itertools
import operator
import os
import re
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ChatMessage, HumanMessage, SystemMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult, Generation, LLMResult
from pydantic import BaseModel

from langchain_dpicl.exceptions import ConfigurationError

Place: TypeAlias = Literal["http", "torch"]
"""Where a wrapper stands: a method of an HTTP client, or of a torch module."""

# fmt: off
RECORDERS = frozenset({
    "agentops", "aporia", "arize", "braintrust", "comet_llm", "comet_ml", "ddtrace", "deepeval", "elasticapm",
    "galileo", "helicone", "honeyhive", "instana", "keywordsai", "langfuse", "langsmith", "langtrace_python_sdk",
    "literalai", "lmnr", "logfire", "lunary", "maxim", "mlflow", "newrelic", "openinference", "openlit",
    "opentelemetry", "opik", "parea", "patronus", "phoenix", "portkey_ai", "posthog", "promptlayer", "scorecard",
    "sentry_sdk", "traceloop", "trulens", "unittest", "wandb", "weave",
})
# fmt: on
"""Packages that can read what calls send and receive: refused around any method, and as a class."""


@dataclass(frozen=True, slots=True)
class VerifiedWrapper:
    """A wrapper that was shown to see only the address, status and time of a call.

    Attributes:
      module: its module, or a package of such modules.
      place: where that holds.
      distribution: who ships it.
      since: the lowest version that is allowed.
      below: the lowest version that is not allowed any more.
    """

    module: str
    place: Place
    distribution: str
    since: tuple[int, ...]
    below: tuple[int, ...]


ALLOWED = (
    # 0.66b1: canaries in bodies of calls that succeed, fail or break off are in no span and no metric.
    VerifiedWrapper(
        "opentelemetry.instrumentation.httpx", "http", "opentelemetry-instrumentation-httpx", (0, 66), (0, 67)
    ),
    VerifiedWrapper(
        "opentelemetry.instrumentation.requests", "http", "opentelemetry-instrumentation-requests", (0, 66), (0, 67)
    ),
    # 2.75.0: canaries in bodies are in no span and no event, with send_default_pii and max_request_body_size too.
    VerifiedWrapper("sentry_sdk", "http", "sentry-sdk", (2, 75), (3,)),
    # 1.15.0: moves weights and inputs; its hook objects are judged.
    VerifiedWrapper("accelerate", "torch", "accelerate", (1, 15), (2,)),
    # 0.21.2: adds what the adapter computes, and keeps nothing.
    VerifiedWrapper("peft", "torch", "peft", (0, 21), (1,)),
)
"""What may stand before a private call, and why; of `torch` and `transformers` themselves any code may.

Not here: OpenTelemetry's urllib3 instrumentation, whose metrics hold the size of each body, and Datadog's of httpx,
which hands bodies to every subscriber.
"""

SHOWING = frozenset({
    "request_hook", "response_hook", "async_request_hook", "async_response_hook",
    "captured_request_headers", "captured_response_headers",
})  # fmt: skip
"""Options of such wrappers that show bodies, or in headers their size: with one of them set they are refused."""

_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_lock = threading.Lock()
_named: tuple[str, ...] = ()


def allow_wrappers(*modules: str) -> None:
    """Names modules whose wrappers may stand before private calls of this process, on the operator's word.

    For wrappers that are unknown here and that read no request and no answer. Models and engines that are built after
    this call accept them. Every ledger that private work is paid from in this process keeps the names, and its reports
    show them. A name stays until the process ends; other processes, such as workers, name their own.

    Args:
      modules: as errors show them, such as "package.module"; a package stands for its modules.

    Raises:
      ConfigurationError: a name is no module's, or that of a known recorder, which can read what it wraps.

    >>> allow_wrappers()
    """
    global _named  # noqa: PLW0603  one process has one list
    for name in modules:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigurationError(f"allow_wrappers: expected names such as 'package.module', found {name!r}")
        if name.partition(".")[0] in RECORDERS:
            raise ConfigurationError(
                f"allow_wrappers: expected wrappers that read no bodies, found {name!r}, which can record calls; "
                'hand in backends.PrivateProcess("provider:model"), which makes private calls in a process without it'
            )
    with _lock:
        _named = tuple(sorted({*_named, *modules}))


def allowed_wrappers() -> tuple[str, ...]:
    """Returns the names that the operator has given so far, sorted."""
    return _named


def is_within(module: str, names: Sequence[str]) -> bool:
    """Whether a module is one of those named, or stands in a package of that name."""
    return any(module == name or module.startswith(f"{name}.") for name in names)


def is_shown(module: str, place: Place | None) -> bool:
    """Whether the version installed of a module was shown to see no bodies at a place."""
    return place is not None and any(
        rule.place == place
        and is_within(module, [rule.module])
        and rule.since <= _version(rule.distribution) < rule.below
        for rule in ALLOWED
    )


@functools.cache
def _version(distribution: str) -> tuple[int, ...]:
    """Returns the release numbers of a distribution; () where it is not installed, or its version is none."""
    try:
        found = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ()
    release = re.match(r"\d+(\.\d+)*", found)
    return tuple(map(int, release.group().split("."))) if release else ()


HTTP = frozenset({"httpx", "httpx2"})
_PACKAGE = __name__.partition(".")[0]
DECORATORS = (
    sys.stdlib_module_names | HTTP | {_PACKAGE, "langchain_core", "pydantic", "tenacity", "typing_extensions"}
) - {"unittest"}
"""Packages whose decorators and guards wrap methods, and record nothing."""

NAMELESS = "code that belongs to no module"
"""Name of a wrapper without a module; it cannot be allowed."""

_FAMILIES = (["instrumentation"], ["integrations"])
"""Second parts of module names after which an integration's name follows."""

_INSTALLED = ("site-packages", "dist-packages")
_PROXIES = ("FunctionWrapper", "BoundFunctionWrapper", "ObjectProxy", "CallableObjectProxy")
"""Transparent proxy classes of wrapt; compiled ones name `builtins` as their module, or none."""

_MOST_LAYERS = 100
"""Callables that are followed in one method; a method with more is refused."""


@dataclass(frozen=True, slots=True)
class AcceptedWrappers:
    """The packages that may wrap the methods of one class.

    Attributes:
      home: top packages whose code belongs there.
      is_strict: whether other packages are refused unless they are allowed; otherwise known recorders alone.
      place: where the class stands, for wrappers that are allowed in one place.
      named: modules that the operator names.
    """

    home: frozenset[str]
    is_strict: bool
    place: Place | None = None
    named: Sequence[str] = ()

    def culprit(self, value: Any, *, met: list[types.FunctionType] | None = None) -> str:
        """Returns the first package that may not stand before a method, or "".

        Args:
          value: as the class or object holds it.
          met: takes the functions that were looked at, whose code may be replaced later.
        """
        look = _WrapperInspection([] if met is None else met)
        for layer, is_wrapper in look.layers(value):
            names = modules_of(layer)
            for name in names:
                if self._is_refused(name, is_wrapper=is_wrapper):
                    return package_label(name)
            if any(is_shown(name, self.place) for name in names):
                look.open_up(layer)
                if look.shows:
                    return package_label(names[0])
        return NAMELESS if self.is_strict and len(look.seen) > _MOST_LAYERS else ""

    def _is_refused(self, name: str, *, is_wrapper: bool) -> bool:
        """Whether a module's code may not wrap there; for wrapper objects the standard library is no excuse."""
        top = top_of(name)
        if name == NAMELESS:
            return self.is_strict
        if is_shown(name, self.place):
            return False
        if top in RECORDERS:
            return True
        if not self.is_strict or top in self.home or is_within(name, self.named):
            return False
        return top not in DECORATORS or (is_wrapper and top in sys.stdlib_module_names)


@dataclass(slots=True)
class _WrapperInspection:
    """Goes through the layers of one method: what is wrapped, and what each wrapper calls."""

    met: list[types.FunctionType]
    todo: list[tuple[Any, bool]] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)
    shows: bool = False  # whether an option shows a wrapper more than address, status and time

    def layers(self, value: Any) -> Iterator[tuple[Any, bool]]:
        """Yields callables, and whether a wrapper object calls them; by `type`, as proxies imitate other classes."""
        self.todo.append((value, False))
        for layer, is_wrapper in self.todo:  # it grows
            if id(layer) in self.seen or len(self.seen) > _MOST_LAYERS:
                continue
            self.seen.add(id(layer))
            if not self._take_apart(layer, is_wrapper=is_wrapper):
                if type(layer) is types.FunctionType:
                    self.met.append(layer)
                yield layer, is_wrapper

    def open_up(self, layer: Any) -> None:
        """Adds what an accepted function encloses: the callables, and its options."""
        names = layer.__code__.co_freevars if type(layer) is types.FunctionType else ()
        for name, cell in zip(names, getattr(layer, "__closure__", None) or (), strict=False):
            with contextlib.suppress(ValueError):  # an empty cell
                self._note_options({name: cell.cell_contents})
                if _is_code(cell.cell_contents):
                    self.todo.append((cell.cell_contents, False))

    def _note_options(self, options: Mapping[str, Any]) -> None:
        self.shows |= any(name in SHOWING and value is not None and value != [] for name, value in options.items())

    def _take_apart(self, layer: Any, *, is_wrapper: bool) -> bool:
        """Adds the parts of a layer; False if it is code of its own, to be judged by itself."""
        kind = type(layer)
        if kind in {staticmethod, classmethod, types.MethodType}:
            self.todo.append((layer.__func__, is_wrapper))
        elif kind is property:
            self.todo += [(part, is_wrapper) for part in (layer.fget, layer.fset) if part is not None]
        elif kind is functools.cached_property:
            self.todo.append((layer.func, is_wrapper))
        elif kind in {functools.partial, functools.partialmethod}:
            self._note_options(layer.keywords)
            arguments = [*layer.args, *layer.keywords.values()]
            self.todo += [(layer.func, is_wrapper), *((one, False) for one in arguments if _is_code(one))]
        elif _is_code(layer):
            return self._unwrap(layer, is_wrapper=is_wrapper)
        return True

    def _unwrap(self, layer: Any, *, is_wrapper: bool) -> bool:
        """Adds what code wraps; True for a proxy of wrapt, which is only what it calls."""
        wrapper = None
        if (
            static_attribute(type(layer), "_self_wrapper") is not None
        ):  # of the class, as an object may answer to any name
            wrapper = attribute(layer, "_self_wrapper")
        inner = attribute(layer, "__wrapped__")
        self.todo += [(part, flag) for part, flag in ((wrapper, True), (inner, is_wrapper)) if part is not None]
        return wrapper is not None and _is_wrapts(type(layer))


def _is_wrapts(kind: type) -> bool:
    wrapt = sys.modules.get("wrapt")
    return any(getattr(wrapt, name, None) is kind for name in _PROXIES)


def _is_code(value: Any) -> bool:
    """Whether a value runs code when it is called or looked up."""
    return callable(value) or hasattr(type(value), "__get__")


def modules_of(layer: Any) -> list[str]:
    """Returns the modules whose code a layer runs, NAMELESS for one that cannot be named.

    `functools.wraps` copies `__module__`, but not the globals; and code put into a function keeps its own file.
    """
    kind = type(layer)
    if kind is types.FunctionType:
        return _of_function(layer)
    if issubclass(kind, type):
        return [str(layer.__module__)]
    if kind in _BUILT_IN:
        owner = attribute(layer, "__self__") or attribute(layer, "__objclass__")
        if kind is types.BuiltinFunctionType and not isinstance(owner, types.ModuleType | type):
            return [NAMELESS]  # a method of some object, such as a list's append
        named = attribute(layer, "__module__") or getattr(owner, "__module__", None)
        return [named if isinstance(named, str) else NAMELESS]
    module = kind.__module__ if isinstance(kind.__module__, str) and not _poses_as_built_in(kind) else NAMELESS
    calls = (static_attribute(kind, name) for name in ("__call__", "__get__"))
    return [module, *(name for call in calls if type(call) is types.FunctionType for name in _of_function(call))]


def _poses_as_built_in(kind: type) -> bool:
    """Whether a class claims to be Python's own and is not, as compiled classes without a module do."""
    return kind.__module__ == "builtins" and kind is not getattr(builtins, kind.__name__, None) and kind not in _TYPES


_TYPES = frozenset(value for value in vars(types).values() if isinstance(value, type))
_BUILT_IN = frozenset({
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
})  # fmt: skip


def _of_function(function: types.FunctionType) -> list[str]:
    """Returns the module of a function's globals and, if its code is from another file, that file's module."""
    named = function.__globals__.get("__name__")
    if not isinstance(named, str) or not named:
        return [NAMELESS]
    file = function.__code__.co_filename
    if _is_file_of(named, file):
        return [named] if _is_named_alike(function) else [named, NAMELESS]
    return [named, _module_at(file) or NAMELESS]


def _is_named_alike(function: types.FunctionType) -> bool:
    """Whether a function and its code have the same name; decorators that copy the name set `__wrapped__`."""
    return function.__code__.co_qualname == function.__qualname__ or hasattr(function, "__wrapped__")


def _is_file_of(module: str, file: str) -> bool:
    """Whether a module was read from a file; frozen programs keep only the end of its path."""
    own = getattr(sys.modules.get(module), "__file__", None)
    if not isinstance(own, str):
        return file.startswith("<frozen ") or module == "__main__" or _module_at(file) == module
    if own == file or file.startswith("<frozen "):
        return True
    mine, path_of_code = (path.rpartition(".")[0] or path for path in (own, file))
    return mine == path_of_code or (not Path(file).is_absolute() and mine.endswith(os.sep + path_of_code))


def _module_at(file: str) -> str:
    """Returns the dotted name of a file of an installed package; "" for any other."""
    parts = Path(file.rpartition(".")[0]).parts
    place = max((at for at, part in enumerate(parts) if part in _INSTALLED), default=None)
    return "" if place is None else ".".join(parts[place + 1 :]).removesuffix(".__init__")


def is_installed(kind: type) -> bool:
    """Whether a class is of an installed distribution; see `is_installed_module`."""
    return is_installed_module(kind.__module__)


def is_installed_module(name: str) -> bool:
    """Whether a module is of an installed distribution, and not of the standard library or the user's own project.

    Installed means in site-packages, in another folder of distributions, or in an archive.
    """
    file = getattr(sys.modules.get(name), "__file__", None)
    if not isinstance(file, str) or top_of(name) in sys.stdlib_module_names | {"__main__"}:
        return False
    return _is_installed_at(file, name.count("."))


@functools.cache
def _is_installed_at(file: str, depth: int) -> bool:
    path = Path(file)
    if any(part in _INSTALLED for part in path.parts):
        return True
    root = path.parents[min(depth + (path.stem == "__init__"), len(path.parents) - 1)]
    return not root.is_dir() or any(root.glob("*.dist-info"))


def attribute(value: Any, name: str) -> Any:
    """Returns an attribute, or None if there is none or a proxy raises."""
    with contextlib.suppress(Exception):
        return getattr(value, name, None)
    return None


def static_attribute(kind: type, name: str) -> Any:
    """Returns a class attribute without running descriptors or `__getattr__`."""
    for base in kind.__mro__:
        if name in (own := vars(base)):
            return own[name]
    return None


def package_label(module: str) -> str:
    """Returns the name of a module for messages: a recorder's package, with the integration where it has several."""
    if top_of(module) not in RECORDERS:
        return module
    return ".".join(module.split(".")[:3]) if module.split(".")[1:2] in _FAMILIES else top_of(module)


def top_of(module: Any) -> str:
    """Returns the top package of a module."""
    return str(module).partition(".")[0]


def tops_of(kinds: Iterable[type]) -> frozenset[str]:
    """Returns the top packages of some classes."""
    return frozenset(top_of(kind.__module__) for kind in kinds)


_CARRIERS: tuple[type, ...] = (
    *(BaseMessage, HumanMessage, AIMessage, AIMessageChunk, SystemMessage, ChatMessage),
    *(Generation, ChatGeneration, ChatGenerationChunk, ChatResult, LLMResult),
)
"""Classes whose objects carry private prompts and answers."""

_MADE_BY = ("__new__", "__init__", "__setattr__")
_VALIDATOR = "__pydantic_validator__"
_VALIDATING = ("validate_python", "validate_json", "validate_strings")

LITELLM = "litellm"
_LITELLM_SETTINGS = (
    *("callbacks", "input_callback", "success_callback", "failure_callback", "service_callback", "audit_log_callbacks"),
    *("_async_input_callback", "_async_success_callback", "_async_failure_callback"),
    *("pre_call_rules", "post_call_rules", "cache", "log_raw_request_response"),
)
"""Names in LiteLLM's module of observers of every call, and of caches of its answers."""

LITELLM_CHECKED_ONCE = frozenset({*_LITELLM_SETTINGS, "caching", "logger_fn"})
"""Arguments with which one call gets such an observer."""


class WatchedAttributes:
    """The present values of some objects' attributes, in one sequence, for comparison with an inspection."""

    __slots__ = ("_getters", "_names")

    def __init__(self, pairs: Sequence[tuple[Any, str]]) -> None:
        self._getters: list[Callable[[str], Any]] = [vars(owner).get for owner, _ in pairs]
        self._names = [name for _, name in pairs]

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[Any]:
        return map(operator.call, self._getters, self._names)


CARRIED = WatchedAttributes(
    [(kind, name) for kind in _CARRIERS for name in (*_MADE_BY, _VALIDATOR) if name in vars(kind)]
)
"""What creates and validates messages and answers; one object for every model."""


def before_messages(bench: AcceptedWrappers, tops: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yields (package, place) of wrappers around the creation of messages and answers; `tops`: packages of models."""
    for kind, name in itertools.product(_CARRIERS, _MADE_BY):
        if culprit := bench.culprit(static_attribute(kind, name)):
            yield culprit, f"{kind.__name__}.{name}"
    for kind in (*_CARRIERS, *_models_of(tops)):
        for module in dict.fromkeys(_watching(vars(kind).get(_VALIDATOR))):
            if not is_within(module, bench.named):
                yield package_label(module), f"the validation of {kind.__name__} (a pydantic plugin)"


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
    names = WatchedAttributes([(module, name) for name in _LITELLM_SETTINGS])
    collections = [value for value in names if isinstance(value, list | dict | set)]
    return [(names, tuple(names)), *((value, tuple(value)) for value in collections)]


def litellm_trouble(model: Any) -> str:
    """Returns which of LiteLLM's callbacks and caches are set, for all calls or for a model's; "" if none is."""
    module = sys.modules.get(LITELLM)
    callbacks = [] if module is None else [f"litellm.{name}" for name in _LITELLM_SETTINGS if vars(module).get(name)]
    own = attribute(model, "model_kwargs")
    return ", ".join(
        [*callbacks, *(f"model_kwargs[{name!r}]" for name in sorted(LITELLM_CHECKED_ONCE & set(own or ())))]
    )
