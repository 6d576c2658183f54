"""Answers a wrong call of a constructor with how to build the component, and with nothing of what was passed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError
from typing_extensions import override

from langchain_dpicl.exceptions import ConfigurationError, DPICLError

C = TypeVar("C", bound=type)

_DOORS = ("from_private_examples", "from_private_documents", "from_path")
_SHOWN = frozenset({"budget", "epsilon", "max_queries", "public_inputs"})
"""Parameters with a default that nearly every call gives."""

_FIXED = frozenset({"missing", "extra_forbidden", "is_instance_of", "literal_error"})
"""Kinds of pydantic's errors, beside those of types, whose message is the same whatever was passed."""


class HidesInput(BaseModel):
    """Base of components that are pydantic models: what was passed is in no error, also not in its `errors()`.

    Formal guarantees:
      - A wrong constructor call, `model_validate` or `model_validate_json` is a ConfigurationError without a cause, a
        context or an input.
      - Where pydantic raises for others, as in a `TypeAdapter`, each of its errors has a field of ours, a kind, and no
        input. A text that is no JSON is refused there before this class is asked, and shown in that error's `errors()`.
    """

    model_config = ConfigDict(hide_input_in_errors=True)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Builds the model; see the class."""
        fault = _constructor_fault(super().__init__, type(self), args, kwargs)
        if fault:
            del args, kwargs
            raise ConfigurationError(fault)

    @model_validator(mode="wrap")
    @classmethod
    def _without_input(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        lines: list[InitErrorDetails] = []
        if not isinstance(value, (dict, cls)):  # validators of LangChain take it for a dict
            kind = PydanticCustomError("model_type", "{dpicl}", {"dpicl": "Input should be a dictionary"})
            lines.append({"type": kind, "loc": (), "input": None})
            raise ValidationError.from_exception_data(cls.__name__, lines, hide_input=True)
        try:
            return handler(value)
        except ValidationError as error:
            lines = _lines_of(error, cls)
        raise ValidationError.from_exception_data(cls.__name__, lines, hide_input=True)

    @classmethod
    @override
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """Is pydantic's `model_validate`; raises ConfigurationError as the constructor does."""
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            fault = _fault(error, cls)
        del obj
        raise ConfigurationError(fault)

    @classmethod
    @override
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        """Is pydantic's `model_validate_json`; raises ConfigurationError as the constructor does."""
        try:
            return super().model_validate_json(json_data, **options)
        except ValidationError as error:
            fault = _fault(error, cls)
        del json_data
        raise ConfigurationError(fault)

    @classmethod
    @override
    def parse_raw(cls, b: str | bytes, **options: Any) -> Self:
        """Is `model_validate_json`, under the name of older code."""
        return cls.model_validate_json(b)


def tells_how_to_build(call: str = "") -> Callable[[C], C]:
    """Makes a class answer arguments that its constructor does not take with how to build it.

    Args:
      call: what such a caller wants to write; "": a constructor with another name, or the constructor itself.
    """

    def decorate(cls: C) -> C:
        build: Callable[..., None] = vars(cls)["__init__"]
        takes = inspect.signature(build)

        @functools.wraps(build)
        def checked(self: Any, *args: Any, **kwargs: Any) -> None:
            if not _binds(takes, (self, *args), kwargs):
                del args, kwargs
                wanted = f"Build it with {call}." if call else how_to_build(type(self))
                raise ConfigurationError(f"{type(self).__name__}: expected other arguments. {wanted}")
            build(self, *args, **kwargs)

        type.__setattr__(cls, "__init__", checked)
        return cls

    return decorate


def how_to_build(cls: type[Any]) -> str:
    """Returns a sentence with the call that builds a component.

    Args:
      cls: its class.
    """
    door = next((name for name in _DOORS if hasattr(cls, name)), None)
    if door is None:
        return f"Build it with {_call(cls.__name__, cls)}."
    return f"Build it with {_call(f'{cls.__name__}.{door}', getattr(cls, door))}."


def _call(name: str, function: Callable[..., Any]) -> str:
    """Returns how a call reads: what it needs, and what nearly every call gives."""
    shown = []
    for parameter in inspect.signature(function).parameters.values():
        is_needed = parameter.default is parameter.empty and parameter.kind not in {
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        }
        if is_needed or parameter.name in _SHOWN:
            is_named = parameter.kind is parameter.KEYWORD_ONLY
            shown.append(f"{parameter.name}=..." if is_named else parameter.name)
    return f"{name}({', '.join([*shown, '...'])})"


def _binds(takes: inspect.Signature, args: Iterable[Any], kwargs: dict[str, Any]) -> bool:
    try:
        takes.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _constructor_fault(
    build: Callable[..., None], cls: type[BaseModel], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str:
    """Builds; returns what was wrong, "" if nothing was."""
    if args:
        return f"{cls.__name__}: expected named arguments alone, found others. {how_to_build(cls)}"
    try:
        build(**kwargs)
    except ValidationError as error:
        return _fault(error, cls)
    return ""


def _fault(error: ValidationError, cls: type[BaseModel]) -> str:
    """Returns what is wrong by field and kind; what a check of ours says, where one failed."""
    own = [message for line in error.errors(include_input=False) if (message := _own(line))]
    if own:
        return own[0]
    reasons = dict.fromkeys(f"{_field(line, cls)}: {_reason(line)}" for line in error.errors(include_input=False))
    return f"{cls.__name__}: {'; '.join(reasons)}. {how_to_build(cls)}"


def _lines_of(error: ValidationError, cls: type[BaseModel]) -> list[InitErrorDetails]:
    lines: list[InitErrorDetails] = []
    for line in error.errors(include_input=False):
        own = _own(line)
        kind = PydanticCustomError(line["type"], "{dpicl}", {"dpicl": own or _reason(line), "is_own": bool(own)})
        lines.append({"type": kind, "loc": (_field(line, cls),), "input": None})
    return lines


def _reason(line: Any) -> str:
    """Returns what pydantic says where that is fixed by the class, else the kind of the error alone."""
    kind, context = str(line["type"]), line.get("ctx", {})
    if "dpicl" in context:
        return str(context["dpicl"])
    is_fixed = kind in _FIXED or kind.endswith("_type")
    return str(line["msg"]) if is_fixed else kind.replace("_", " ")


def _own(line: Any) -> str:
    """Returns what our own check said, as it never quotes what is private; "" for any other error."""
    context = line.get("ctx", {})
    if isinstance(context.get("error"), DPICLError):
        return str(context["error"])
    return str(context["dpicl"]) if context.get("is_own") else ""


def _field(line: Any, cls: type[BaseModel]) -> str:
    """Returns the field of an error if the class has it: a name from elsewhere may be a key of somebody's records."""
    name = str(line["loc"][0]) if line["loc"] else ""
    return name if name in cls.model_fields else "another argument"
