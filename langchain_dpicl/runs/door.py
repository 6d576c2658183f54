"""Wraps constructors of components: reports refusals to the caller's run and explains wrong keywords."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Coroutine, Mapping
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from langchain_dpicl._calls import described, missing_in
from langchain_dpicl.budget.handler import RunEvents
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.options import OPTIONS
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.privacy.extensions.private_streams import PrivateRange, PrivateStream, RollingRange
from langchain_dpicl.privacy.private_examples import PrivateExamples

P = ParamSpec("P")
R = TypeVar("R")

UNDECLARED = (
    "Declare them: PrivateExamples(records, ...). For public records see the functions without privacy in "
    "langchain_dpicl.baselines."
)


NO_STREAM = (
    "Of a stream only DPFewShotPromptTemplate, its chat version, DemonstrationSynthesizer, DPVotingRunnable and "
    "DocumentSynthesizer read ranges, stream.rolling(30, every=7) or stream.last(30). For every other component build "
    "PrivateExamples of the records that it is to read, on a budget for life of their own; of a person who is in both, "
    "the two budgets add up."
)


def door(component: str, *, streams: bool = False) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a constructor under its `@classmethod`.

    A refusal of the budget becomes an event of the caller's run, and a keyword that the constructor does not take
    becomes an error that names the one that was meant, or the option value that holds it. The first argument of every
    constructor is the private examples.

    Raises:
      ConfigurationError: an unknown or missing argument, or records that were not declared; no value is shown.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def opened(*args: P.args, **kwargs: P.kwargs) -> R:
            if refusal := _refusal(component, function.__name__, function, args, kwargs, streams=streams):
                del args, kwargs
                raise refusal
            given: Any = kwargs.get("budget")
            config = given if isinstance(given, Mapping) else None
            with RunEvents(component, budget=given if config is None else None, config=config):  # type: ignore[arg-type]
                return function(*args, **kwargs)

        return opened

    return decorate


def awaits(
    constructor: Callable[Concatenate[Any, P], R], *, streams: bool = False
) -> Callable[[Callable[..., Coroutine[Any, Any, Any]]], Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]]:
    """Decorates the awaitable version of a constructor that also runs what it builds: same signature, same checks."""
    build: Callable[..., Any] = getattr(constructor, "__func__", constructor)

    def decorate(function: Callable[..., Coroutine[Any, Any, Any]]) -> Any:
        @wraps(function)
        async def opened(*args: Any, **kwargs: Any) -> Any:
            if refusal := _refusal("", function.__name__, build, args, kwargs, streams=streams):
                del args, kwargs
                raise refusal
            return await function(*args, **kwargs)

        vars(opened)["__signature__"] = inspect.signature(build)
        return opened

    return decorate


def _refusal(
    component: str, called: str, build: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], *, streams: bool
) -> ConfigurationError | None:
    """Returns the error of a call that does not fit a constructor, or of a first argument that it does not read."""
    if fault := _fault_in(build, inspect.signature(build), args, kwargs):
        return fail(f"{getattr(args[0], '__name__', component)}.{called}", *fault)  # the class, also a subclass
    found = type(args[1] if len(args) > 1 else kwargs["private"])
    is_stream = issubclass(found, PrivateRange | RollingRange | PrivateStream)
    if is_stream and (not streams or found is PrivateStream):
        return fail("private", "a range of a stream" if streams else "PrivateExamples", found.__name__, NO_STREAM)
    if not is_stream and not issubclass(found, PrivateExamples):
        return fail("private", "PrivateExamples", found.__name__, UNDECLARED)
    return None


def _fault_in(
    constructor: Callable[..., Any], takes: inspect.Signature, args: Any, kwargs: Mapping[str, Any]
) -> tuple[str, object, str] | None:
    """Returns what was expected, what was found and advice, or None for a call that fits."""
    names = [name for name in takes.parameters if name not in {"self", "cls"}]
    for name in kwargs:
        if name not in names:
            return f"parameters among {names}", name, _place_of(name, takes)
    if missing := missing_in(takes, args, kwargs):
        words = [f"{name}: {described(name, constructor)}" for name in missing]
        return " and ".join(missing), None, "Give " + " ".join(word.rstrip(": ").rstrip(".") + "." for word in words)
    try:
        takes.bind(*args, **kwargs)
    except TypeError as error:
        return "its parameters, all but the first by name", str(error), ""
    return None


def _place_of(name: str, takes: inspect.Signature) -> str:
    """Returns the parameter that is meant, or the option value whose field is meant."""
    places = {parameter: repr(parameter) for parameter in takes.parameters}
    for parameter in takes.parameters.values():
        words = re.findall(r"\w+", str(parameter.annotation))
        for option in (one for one in OPTIONS if one.__name__ in words):
            for field in inspect.signature(option).parameters:
                places.setdefault(field, f"{parameter.name}={option.__name__}({field}=...)")
    if name in places:
        return f"Give {places[name]}."
    near = difflib.get_close_matches(name, places, 1)
    return f"Did you mean {places[near[0]]}?" if near else ""
