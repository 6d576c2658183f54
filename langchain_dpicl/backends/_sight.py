"""Stores what an inspection of a model found, and detects before each call whether any of it has changed."""

from __future__ import annotations

import itertools
import operator
import types
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

Marks: TypeAlias = list[tuple[Any, tuple[Any, ...]]]
"""Collections that can be read again, and what was in them."""


class Sight:
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
