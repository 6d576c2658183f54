"""Puts a changed text into functions that are imported already, decorated ones too."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any


def inner(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def shape(code: CodeType) -> tuple[Any, ...]:
    """Returns what a code object does, without its line numbers and the code inside it."""
    constants = [(type(c).__name__, repr(c)) for c in code.co_consts if not isinstance(c, CodeType)]
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    return code.co_code, constants, names, counts, code.co_exceptiontable, len(inner(code))


Chain = tuple[tuple[CodeType, CodeType], ...]


def changed(old: CodeType, new: CodeType, above: Chain = ()) -> Iterator[Chain]:
    """Yields the pairs of codes from the module's down to each one that differs."""
    here = (*above, (old, new))
    if shape(old) != shape(new):
        yield here
    for one, other in zip(inner(old), inner(new), strict=False):
        yield from changed(one, other, here)


def key(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


class Live:
    """The functions of the imported package, by their code."""

    def __init__(self, folder: Path) -> None:
        gc.unfreeze()
        self._functions: dict[tuple[str, str, int], list[FunctionType]] = {}
        self._caches = []
        for thing in gc.get_objects():
            if isinstance(thing, FunctionType) and thing.__code__.co_filename.startswith(str(folder)):
                self._functions.setdefault(key(thing.__code__), []).append(thing)
            elif isinstance(thing, functools._lru_cache_wrapper):
                self._caches.append(thing)
        gc.freeze()

    def plan(self, file: Path, before: str, after: str) -> list[tuple[FunctionType, CodeType]] | None:
        """Returns which functions take which code; None where exchanging code is not enough."""
        old, new = (compile(text, str(file), "exec", dont_inherit=True) for text in (before, after))
        found = []
        for chain in changed(old, new):
            pairs = [(function, b) for a, b in chain for function in self._functions.get(key(a), ())]
            inside = [a for a, _ in chain if a.co_flags & 1]  # CO_OPTIMIZED: a function's code
            if (
                not pairs
                or chain[-1][0] not in inside
                or any(len(f.__code__.co_freevars) != len(b.co_freevars) for f, b in pairs)
            ):
                return None
            found += pairs
        return found or None

    def clear(self) -> None:
        for cache in self._caches:
            if (cache.__module__ or "").startswith("langchain_dpicl"):
                cache.cache_clear()
