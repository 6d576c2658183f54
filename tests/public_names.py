"""The modules whose exported names the package promises to keep."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

FACE = "langchain_dpicl"
SUBMODULES = (
    "langchain_dpicl.agents",
    "langchain_dpicl.audit",
    "langchain_dpicl.backends",
    "langchain_dpicl.baselines",
    "langchain_dpicl.discovery",
    "langchain_dpicl.distributed",
    "langchain_dpicl.evaluation",
    "langchain_dpicl.exceptions",
    "langchain_dpicl.options",
    "langchain_dpicl.rehearsal",
    "langchain_dpicl.released",
    "langchain_dpicl.reports",
    "langchain_dpicl.results",
    "langchain_dpicl.soft_prompts",
    "langchain_dpicl.stores",
    "langchain_dpicl.streams",
)


def exported(module: str) -> Sequence[str]:
    """Returns the names that a module exports."""
    names: Sequence[str] = importlib.import_module(module).__all__
    return names


def promised() -> dict[str, str]:
    """Returns the module of each promised name: the face, or else the first submodule that exports it."""
    return {name: module for module in (*reversed(SUBMODULES), FACE) for name in exported(module)}


def load(module: str, name: str) -> Any:
    """Returns what a module exports under a name."""
    return getattr(importlib.import_module(module), name)
