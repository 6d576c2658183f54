"""Names the package whose code wraps a method, and decides whether it is accepted there."""

from __future__ import annotations

import builtins
import contextlib
import functools
import os
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from langchain_dpicl._wrapper_rules import RECORDERS, SHOWING, Place, is_shown, is_within

HTTP = frozenset({"httpx", "httpx2"})
_OWN = __name__.partition(".")[0]
DECORATORS = (
    sys.stdlib_module_names | HTTP | {_OWN, "langchain_core", "pydantic", "tenacity", "typing_extensions"}
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
class Bench:
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
        look = _Look([] if met is None else met)
        for layer, is_wrapper in look.layers(value):
            names = modules_of(layer)
            for name in names:
                if self._is_refused(name, is_wrapper=is_wrapper):
                    return shown(name)
            if any(is_shown(name, self.place) for name in names):
                look.open_up(layer)
                if look.shows:
                    return shown(names[0])
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
class _Look:
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
        if static(type(layer), "_self_wrapper") is not None:  # of the class, as an object may answer to any name
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
    calls = (static(kind, name) for name in ("__call__", "__get__"))
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


def static(kind: type, name: str) -> Any:
    """Returns a class attribute without running descriptors or `__getattr__`."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


def shown(module: str) -> str:
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
