"""Refuses embeddings that store texts or pass them on: caches, byte stores, memoised methods, handlers, runnables."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Iterator, Mapping
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler, BaseCallbackManager
from langchain_core.embeddings import Embeddings
from langchain_core.runnables import Runnable

from langchain_dpicl.backends._preflight import held_by, refuse_gateway
from langchain_dpicl.exceptions import UnsilencableModelError

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
        kind, attributes = type(one).__name__, held_by(one)
        if reason := _kept_by(type(one)) or next(filter(None, map(_kept_in, attributes, attributes.values())), ""):
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
        for value in held_by(one).values():
            for item in _inside(value):
                if isinstance(item, Embeddings) and id(item) not in seen:
                    seen.add(id(item))
                    todo.append(item)


def _inside(value: Any) -> list[Any]:
    """Returns a value, or the items of a plain collection."""
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple | set | frozenset) else [value]


def _kept_by(kind: type) -> str:
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


def _kept_in(name: str, value: Any) -> str:
    """Says why an attribute stores texts; "" if nothing shows that it does."""
    stored = [item for item in _inside(value) if any(_has(item, methods) for methods in _STORING)]
    if stored and not isinstance(value, str | bytes):
        return f"which holds a store or cache in {name!r}"
    if isinstance(value, _MEMOISED):
        return f"which remembers arguments in {name!r}"
    is_off = value is None or (isinstance(value, int | float) and not value)  # an empty collection is no switch
    if "cache" not in name.lower() or is_off:
        return ""
    is_folder = name.lower().endswith(_FOLDERS) and isinstance(value, str | os.PathLike)
    return "" if is_folder else f"which has a cache in {name!r}"


def _has(item: Any, methods: tuple[str, ...]) -> bool:
    return all(callable(getattr(type(item), method, None)) for method in methods)
