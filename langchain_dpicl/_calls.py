"""Explains wrong calls of constructors by the names of parameters, without a value that was passed."""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import re
import warnings
from abc import ABCMeta
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from langchain_dpicl.exceptions import ConfigurationError

C = TypeVar("C", bound=type)

DOOR = "from_private_examples"
"""The class method that alone builds the components that have it."""
_CONSTRUCTORS = (DOOR, "from_path")
_USUAL_ARGUMENTS = frozenset({"budget", "epsilon", "max_queries", "public_inputs", "public_size"})
"""Parameters with a default that nearly every call passes."""


class SaysHowToBuild(ABCMeta):
    """Answers a constructor that a class does not have, such as `from_llm`, with the one that it has."""

    if not TYPE_CHECKING:  # a type checker that saw a `__getattr__` would accept any name

        def __getattr__(cls, name: str) -> Any:
            with contextlib.suppress(AttributeError):
                return super().__getattr__(name)  # that of pydantic's models; other classes have none
            advice = f" {how_to_build(cls)}" if name.startswith(("from_", "afrom_")) else ""
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}.{advice}")


def tells_how_to_build(call: str = "") -> Callable[[C], C]:
    """Makes a class raise an error that says how to build it (with `call`) for arguments that its constructor lacks."""

    def decorate(cls: C) -> C:
        build: Callable[..., None] = vars(cls)["__init__"]
        takes = inspect.signature(build)

        @functools.wraps(build)
        def checked(self: Any, *args: Any, **kwargs: Any) -> None:
            try:
                if fault := _fault_in(takes, (self, *args), kwargs, door_of(type(self))):
                    wanted = f"Build it with {call}." if call else how_to_build(type(self))
                    raise ConfigurationError(f"{type(self).__name__}: {fault} {wanted}")
                build(self, *args, **kwargs)
            finally:
                del args, kwargs  # crash reporters show the variables of a frame that raises

        type.__setattr__(cls, "__init__", checked)
        return cls

    return decorate


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


def _fault_in(takes: inspect.Signature, args: Iterable[Any], kwargs: Mapping[str, Any], door: str) -> str:
    """Returns what is wrong with a call, or ""; of an unknown name only the known one that is close to it is shown."""
    try:
        takes.bind(*args, **kwargs)
    except TypeError:
        pass
    else:
        return ""
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


def warn_caller(warning: Warning) -> None:
    """Warns at the line of the program that called the package, however deep the call is."""
    level, frame = 1, inspect.currentframe()
    package = __name__.partition(".")[0]
    while (
        frame is not None
        and frame.f_back is not None
        and frame.f_globals.get("__name__", "").partition(".")[0] == package
    ):
        level, frame = level + 1, frame.f_back
    warnings.warn(warning, stacklevel=level)
