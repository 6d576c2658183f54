"""Loads what is needed seldom when it is first used: exported names, and what stands beside the core."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

_LOADERS: dict[str, Callable[[], Any]] = {}


def provide(name: str, loader: Callable[[], Any]) -> None:
    """Says how a module that others must not import is loaded; `privacy/__init__` does so for the core."""
    _LOADERS[name] = loader


def provided(name: str) -> Any:
    """Returns a module of `provide`, loaded."""
    return _LOADERS[name]()


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
