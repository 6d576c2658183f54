"""Loads the names that a package exports when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def on_first_use(package: str, home: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the `__getattr__` and the `__dir__` of a package (PEP 562).

    Args:
      package: its `__name__`.
      home: the module that defines each exported name.
    """
    namespace = vars(sys.modules[package])

    def find(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return namespace.setdefault(name, getattr(import_module(home[name]), name))

    return find, lambda: sorted({*namespace, *home})


__all__ = ["on_first_use"]
