"""Turns a wrong constructor call into an error that says how to build the component and quotes no argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import InitErrorDetails, PydanticCustomError
from typing_extensions import override

from langchain_dpicl._calls import DOOR, did_you_mean, door_of, how_to_build
from langchain_dpicl._opaque import SaysHowToBuild, tells_how_to_build
from langchain_dpicl.exceptions import ConfigurationError, DPICLError

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass as _ModelMeta
else:

    class _ModelMeta(SaysHowToBuild, type(BaseModel)):
        """The class of pydantic's models; see `SaysHowToBuild`."""


_FIXED = frozenset({"missing", "extra_forbidden", "is_instance_of", "literal_error"})
"""Kinds of pydantic errors, besides type errors, whose message does not depend on the input."""


class _AnySchema(GenerateJsonSchema):
    """Describes a field that has no JSON form as one of any value."""

    @override
    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> JsonSchemaValue:
        return {}


class HidesInput(BaseModel, metaclass=_ModelMeta):
    """Base of components that are pydantic models: no error contains its input, also not in `errors()`.

    Formal guarantees:
      - A wrong constructor call, `model_validate` or `model_validate_json` is a ConfigurationError without a cause, a
        context or an input.
      - Where pydantic raises itself, as in a `TypeAdapter`, each of its errors has a field of the class, a kind, and no
        input. It refuses invalid JSON before this class is called, and shows it in that error's `errors()`.
    """

    model_config = ConfigDict(hide_input_in_errors=True)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        fault = _constructor_fault(super().__init__, type(self), args, kwargs)
        if fault:
            del args, kwargs
            raise ConfigurationError(fault)

    @model_validator(mode="wrap")
    @classmethod
    def _without_input(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        lines: list[InitErrorDetails] = []
        if not isinstance(value, (dict, cls)):  # LangChain's validators assume a dict
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
        """As in pydantic, but raises ConfigurationError as the constructor does."""
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            fault = _fault(error, cls)
        del obj
        raise ConfigurationError(fault)

    @classmethod
    @override
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        """As in pydantic, but raises ConfigurationError as the constructor does."""
        try:
            return super().model_validate_json(json_data, **options)
        except ValidationError as error:
            fault = _fault(error, cls)
        del json_data
        raise ConfigurationError(fault)

    @classmethod
    @override
    def model_json_schema(cls, *args: Any, **options: Any) -> dict[str, Any]:
        """As in pydantic; a field that no schema describes, such as LangChain's callables, takes any value there."""
        return super().model_json_schema(*args, **{"schema_generator": _AnySchema, **options})

    @classmethod
    @override
    def parse_raw(cls, b: str | bytes, **options: Any) -> Self:
        """Deprecated name of `model_validate_json`."""
        return cls.model_validate_json(b)


def _constructor_fault(
    build: Callable[..., None], cls: type[BaseModel], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str:
    """Builds the model; returns the error message, or ""."""
    if args:
        return f"{cls.__name__}: expected named arguments only, found positional ones. {how_to_build(cls)}"
    try:
        build(**kwargs)
    except ValidationError as error:
        return _fault(error, cls)
    return ""


def _fault(error: ValidationError, cls: type[BaseModel]) -> str:
    """Returns the errors by field and kind, or the message of this package's own check."""
    lines = error.errors(include_input=False)
    own = [message for line in lines if (message := _own(line))]
    if own:
        return own[0]
    # What a component needs is made by its constructor: nobody could give it here.
    door = door_of(cls)
    if door == DOOR and any(line["type"] == "missing" for line in lines):
        lacking = {_field(line, cls) for line in lines if line["type"] == "missing"}
        given_there = sorted(lacking & set(inspect.signature(getattr(cls, door)).parameters))
        missing = f" Missing: {', '.join(given_there)}." if given_there else ""
        wanted = f"expected to be built by {door}, found a call of the class. {how_to_build(cls)}"
        return f"{cls.__name__}: {wanted}{missing}"
    reasons = dict.fromkeys(f"{_field(line, cls)}: {_reason(line, cls)}" for line in lines)
    return f"{cls.__name__}: {'; '.join(reasons)}. {how_to_build(cls)}"


def _lines_of(error: ValidationError, cls: type[BaseModel]) -> list[InitErrorDetails]:
    lines: list[InitErrorDetails] = []
    for line in error.errors(include_input=False):
        own = _own(line)
        kind = PydanticCustomError(line["type"], "{dpicl}", {"dpicl": own or _reason(line, cls), "is_own": bool(own)})
        lines.append({"type": kind, "loc": (_field(line, cls),), "input": None})
    return lines


def _reason(line: Any, cls: type[BaseModel]) -> str:
    """Returns pydantic's message if it cannot quote the input, else the kind of the error."""
    kind, context = str(line["type"]), line.get("ctx", {})
    if "dpicl" in context:
        return str(context["dpicl"])
    if kind == "extra_forbidden" and line["loc"]:
        return f"{line['msg']} {did_you_mean(line['loc'][0], cls.model_fields)}".rstrip()
    is_fixed = kind in _FIXED or kind.endswith("_type")
    return str(line["msg"]) if is_fixed else kind.replace("_", " ")


def _own(line: Any) -> str:
    """Returns the message of this package's own check, which never quotes private values; "" for other errors."""
    context = line.get("ctx", {})
    if isinstance(context.get("error"), DPICLError):
        return str(context["error"])
    return str(context["dpicl"]) if context.get("is_own") else ""


def _field(line: Any, cls: type[BaseModel]) -> str:
    """Returns the field of an error if the class has it: an unknown name may be a key of private records."""
    name = str(line["loc"][0]) if line["loc"] else ""
    return name if name in cls.model_fields else "another argument"


__all__ = ["HidesInput", "how_to_build", "tells_how_to_build"]
