"""Explains wrong calls of constructors by the names of parameters, without a value that was passed."""

from __future__ import annotations

import difflib
import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any

DOOR = "from_private_examples"
"""The class method that alone builds the components that have it."""
_CONSTRUCTORS = (DOOR, "from_path")
_USUAL_ARGUMENTS = frozenset({"budget", "epsilon", "max_queries", "public_inputs", "public_size"})
"""Parameters with a default that nearly every call passes."""


def how_to_build(cls: type[Any]) -> str:
    """Returns a sentence with the call that builds a component."""
    door = door_of(cls)
    if not door:
        return f"Build it with {_call(cls.__name__, cls)}."
    return f"Build it with {_call(f'{cls.__name__}.{door}', getattr(cls, door))}."


def missing_in(takes: inspect.Signature, args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """Returns the names of the required parameters that a call leaves out."""
    given = len(list(args))
    return [
        one.name
        for place, one in enumerate(takes.parameters.values())
        if _is_required(one) and one.name not in kwargs and (one.kind is one.KEYWORD_ONLY or place >= given)
    ]


def described(name: str, function: Callable[..., Any]) -> str:
    """Returns what the docstring of a function says about a parameter; "" where docstrings are left out."""
    text = inspect.getdoc(function) or ""
    found = re.search(rf"^  {name}: (.+?)(?=^\S|^  \S|\Z|\n\n)", text, flags=re.MULTILINE | re.DOTALL)
    return " ".join(found[1].split()) if found else ""


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Returns "Did you mean 'x'?" for the known name closest to one that was given, or ""."""
    near = difflib.get_close_matches(str(name), list(known), 1)
    return f"Did you mean {near[0]!r}?" if near else ""


def door_of(cls: type[Any]) -> str:
    """Returns the name of the class method that builds a component, or ""."""
    names = {name for base in cls.__mro__ for name in vars(base)}  # `hasattr` would ask `SaysHowToBuild`
    return next((name for name in _CONSTRUCTORS if name in names), "")


def fault_in(takes: inspect.Signature, args: Iterable[Any], kwargs: Mapping[str, Any], cls: type[Any]) -> str:
    """Returns what is wrong with a call of a class; of an unknown name only the known one that is close is shown."""
    door = door_of(cls)
    if door == DOOR:
        return f"expected to be built by {door}, found a call of the class."
    known = [name for name in takes.parameters if name != "self"]
    if unknown := [name for name in kwargs if name not in known]:
        return f"expected arguments among {known}, found another. {did_you_mean(unknown[0], known)}".rstrip()
    if missing := missing_in(takes, args, kwargs):
        return f"expected {' and '.join(f'{name}=...' for name in missing)}, found none."
    return f"expected arguments among {known}, each once, found too many."


def _is_required(parameter: inspect.Parameter) -> bool:
    is_collecting = parameter.kind in {parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL}
    return parameter.default is parameter.empty and not is_collecting


def _call(name: str, function: Callable[..., Any]) -> str:
    """Returns the text of a call with the required parameters and the usual ones."""
    shown = []
    for parameter in inspect.signature(function).parameters.values():
        if _is_required(parameter) or parameter.name in _USUAL_ARGUMENTS:
            is_named = parameter.kind is parameter.KEYWORD_ONLY
            shown.append(f"{parameter.name}=..." if is_named else parameter.name)
    return f"{name}({', '.join([*shown, '...'])})"


IS_MADE_UP: ContextVar[bool] = ContextVar("dpicl_is_made_up", default=False)
"""Whether an audit makes up what runs: few records, and rows and noise that it chose. Nobody is warned of them."""


def warn_caller(warning: Warning) -> None:
    """Warns at the line of the program that called the package, however deep the call is."""
    if IS_MADE_UP.get():
        return
    level, frame = 1, inspect.currentframe()
    package = __name__.partition(".")[0]
    while (
        frame is not None
        and frame.f_back is not None
        and frame.f_globals.get("__name__", "").partition(".")[0] == package
    ):
        level, frame = level + 1, frame.f_back
    warnings.warn(warning, stacklevel=level)
