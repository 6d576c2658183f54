"""The base of option values, and the types of their fields."""

from __future__ import annotations

import dataclasses
import functools
import html
import inspect
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Protocol,
    Self,
    TypeAlias,
    TypeVar,
    get_origin,
    get_type_hints,
    runtime_checkable,
)

from annotated_types import Gt, Interval
from pydantic import BeforeValidator, ConfigDict, SkipValidation, Strict, TypeAdapter, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError

from langchain_dpicl._calls import did_you_mean
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import MAX_INT, fail, plain_or_type

if TYPE_CHECKING:
    from langchain_core.documents import Document
    from langchain_core.embeddings import Embeddings
    from langchain_core.language_models import LanguageModelLike
    from langchain_core.prompts import BasePromptTemplate
    from langchain_core.runnables import Runnable

    LLM: TypeAlias = "LanguageModelLike | Engine | str"
    """A LangChain model, an engine of this package, or "provider:model" as `init_chat_model` takes it."""
    TemplateLike: TypeAlias = "str | BasePromptTemplate[Any]"
    """A prompt template with plain `{field}` names, or a LangChain template that holds one."""
    QueryInput: TypeAlias = "str | Mapping[str, Any] | Document | Sequence[Any]"
    """What a component answers: a text, the query's variables, a document, or messages."""
    PublicInput: TypeAlias = "str | Document | Mapping[str, str]"
    EmbeddingsLike: TypeAlias = "Embeddings | str"
    ModelLike: TypeAlias = "LLM | Runnable[Any, Any]"
    CandidatesLike: TypeAlias = "Sequence[str] | Runnable[Any, Sequence[str]] | Callable[[Any], Sequence[str]]"
    Live: TypeAlias = Any
else:
    _NAME = WithJsonSchema({"type": "string"})
    LLM = Any
    QueryInput = Any
    PublicInput = Any
    TemplateLike = EmbeddingsLike = ModelLike = Live = Annotated[Any, SkipValidation, _NAME]
    CandidatesLike = Annotated[Any, SkipValidation, WithJsonSchema({"type": "array", "items": {"type": "string"}})]

Where: TypeAlias = "str | os.PathLike[str]"
"""The path of a file."""
Count: TypeAlias = Annotated[int, Interval(ge=1, le=MAX_INT)]
CountOrZero: TypeAlias = Annotated[int, Interval(ge=0, le=MAX_INT)]
Positive: TypeAlias = Annotated[float, Gt(0)]
NotNegative: TypeAlias = Annotated[float, Interval(ge=0)]
Probability: TypeAlias = Annotated[float, Interval(gt=0, lt=1)]
Delta: TypeAlias = Annotated[float, Interval(ge=0, lt=1)]
Share: TypeAlias = Annotated[float, Interval(gt=0, le=1)]


def _listed(value: Any) -> Any:
    if isinstance(value, Iterator):  # it may never end
        raise PydanticCustomError("listed", "a list")
    return value


LISTED = BeforeValidator(_listed)
"""Refuses an iterator, before anything is taken from it."""
Texts: TypeAlias = Annotated[tuple[Annotated[str, Strict()], ...], Strict(strict=False), LISTED]
"""Texts; a list becomes a tuple."""

_STRICT = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)


@runtime_checkable
class Engine(Protocol):
    """An engine of this package, such as `HuggingFaceBackend`, or one of yours."""

    @property
    def name(self) -> str:
        """The public name, for reports."""


class _NamesChecked(type):
    """Refuses an unknown option by a message that names the one that was meant."""

    if not TYPE_CHECKING:  # a type checker reads the dataclass's own signature

        def __call__(cls, *values: Any, **options: Any) -> Any:
            for name in options:
                if name not in _defaults(cls):
                    raise fail(
                        cls.__name__, f"options among {list(_defaults(cls))}", name, did_you_mean(name, _defaults(cls))
                    )
            try:
                return super().__call__(*values, **options)
            except TypeError as error:
                missing = [n for n, default in _defaults(cls).items() if default is dataclasses.MISSING]
                wanted = f"named options among {list(_defaults(cls))}" + (f", {missing} always" if missing else "")
                message = f"{cls.__name__}: expected {wanted}; {error}."
            raise ConfigurationError(message)

        @property
        def __signature__(cls) -> inspect.Signature:
            build = inspect.signature(cls.__init__)
            return build.replace(parameters=list(build.parameters.values())[1:])


class Option(metaclass=_NamesChecked):
    """Base of option values: frozen, public and compared by value.

    Options must not be chosen by looking at the records. A field that is None was not given: the planner or the
    component chooses, and `component.plan` shows what.

    Formal guarantees:
      - Holds no record; equal values give equal plans.
      - `from_dict(value.to_dict()) == value` if all fields are JSON values.

    Raises:
      ConfigurationError: a field is out of its range, or two fields exclude each other.
    """

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", **_STRICT)

    def __post_init__(self) -> None:
        """Checks every field that differs from its default, then what fields say together."""
        for name, default in _defaults(type(self)).items():
            value = getattr(self, name)
            if value is not default:
                object.__setattr__(self, name, _checked(type(self), name, value))
        self._check_together()

    def _check_together(self) -> None:
        """Raises if fields exclude each other."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields that differ from their defaults, as JSON values; a model or a store is shown by name."""
        defaults = _defaults(type(self))
        given = {name: getattr(self, name) for name in defaults}
        return {name: _shown(value) for name, value in given.items() if not _equals(value, defaults[name])}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Self:
        """Builds the value from what TOML or JSON holds.

        Args:
          state: fields by name; models and embeddings are written "provider:model".

        Raises:
          ConfigurationError: a name or a value is wrong; says which, and which name is close to it.
        """
        if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
            raise fail(cls.__name__, "a table of fields by name", plain_or_type(state))
        parts = {name: part for name, value in state.items() if (part := _option_in(cls, name, value)) is not None}
        return cls(**{**state, **parts})

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with some fields changed.

        Args:
          changes: the new values of fields.

        Raises:
          ConfigurationError: as the constructor.
        """
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """Returns the JSON schema that editors and `dpicl` read."""
        schema = TypeAdapter(cls).json_schema()
        # Of a class that holds its own kind, pydantic shows a reference alone.
        own = schema["$defs"][cls.__name__] if schema.pop("$ref", None) else {}
        return {**own, **schema}

    def __repr__(self) -> str:
        """Shows what differs from the defaults."""
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.to_dict().items())})"

    def _repr_html_(self) -> str:
        return html_table(type(self).__name__, self.to_dict())


_MOST_SHOWN = 500
"""Characters of a value in a notebook's table."""


def html_table(title: str, values: Mapping[str, Any]) -> str:
    """Returns public values as a table, for notebooks; of a long value its beginning."""
    texts = ((name, str(value)) for name, value in values.items())
    short = ((name, text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]} ...") for name, text in texts)
    cells = (f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>" for name, text in short)
    return f"<table><caption>{html.escape(title)}</caption>{''.join(cells)}</table>"


OptionT = TypeVar("OptionT", bound=Option)


def option_of(name: str, value: object, *kinds: type[OptionT]) -> OptionT:
    """Returns an option value that a caller gave; None stands for the defaults of the first kind.

    Args:
      name: of the parameter, for the message.
      value: what the caller gave.
      kinds: the option values that the component takes, the usual one first.

    Raises:
      ConfigurationError: it is something else.
    """
    if value is None:
        return kinds[0]()
    if isinstance(value, kinds):
        return value
    raise fail(name, " or ".join(f"{kind.__name__}(...)" for kind in kinds), plain_or_type(value))


def refuse_unused(option: Option, used: Collection[str], component: str) -> None:
    """Refuses fields that differ from their defaults and that a component does not use.

    Args:
      option: what the caller gave.
      used: names of the fields that the component uses.
      component: its class, for the message.

    Raises:
      ConfigurationError: there is such a field.
    """
    if unused := sorted(set(option.to_dict()) - set(used)):
        raise fail(type(option).__name__, f"fields among {sorted(used)} for {component}", unused)


@functools.cache
def _defaults(option: type[Option]) -> Mapping[str, Any]:
    return {f.name: f.default for f in dataclasses.fields(option)}  # type: ignore[arg-type]


@functools.cache
def _adapters(option: type[Option]) -> Mapping[str, TypeAdapter[Any]]:
    hints = get_type_hints(option, include_extras=True)
    return {name: TypeAdapter(hints[name], config=_config_of(hints[name])) for name in _defaults(option)}


def _option_in(option: type[Option], name: str, value: Any) -> Option | tuple[Any, ...] | None:
    """Returns the option values that a field takes, built from mappings; None for other fields and values."""
    hint = get_type_hints(option).get(name)
    kinds = [part for part in getattr(hint, "__args__", ()) if isinstance(part, type) and issubclass(part, Option)]
    if kinds and get_origin(hint) is tuple:
        items = value if isinstance(value, list) else ()
        return tuple([kinds[0].from_dict(item) if isinstance(item, Mapping) else item for item in items]) or None
    return kinds[0].from_dict(value) if kinds and isinstance(value, Mapping) else None


def _config_of(hint: Any) -> ConfigDict | None:
    """Returns the configuration of a field; one that is an option value has its own."""
    is_option = any(dataclasses.is_dataclass(part) for part in (hint, *getattr(hint, "__args__", ())))
    return None if is_option else _STRICT


def _checked(option: type[Option], name: str, value: Any) -> Any:
    """Returns a field's value, a list of texts as a tuple."""
    try:
        found = _adapters(option)[name].validate_python(value)
        return tuple(found) if isinstance(found, list) else found
    except ValidationError as error:
        expected = " or ".join(dict.fromkeys(_expected(line) for line in error.errors(include_input=False)))
    raise fail(f"{option.__name__}.{name}", expected, plain_or_type(value))  # a collection may be of records


def _expected(line: Any) -> str:
    """Returns what pydantic expected, as the object of "expected"."""
    context = line.get("ctx", {})
    if isinstance(context.get("error"), ConfigurationError):
        return str(context["error"])
    said = str(line["msg"]).removeprefix("Input should be ").replace("a valid tuple", "a list of texts")
    return f"a number {said}" if said.startswith(("greater", "less")) else said


def _equals(value: Any, default: Any) -> bool:
    try:
        return bool(value is default or (type(value) is type(default) and value == default))
    except (TypeError, ValueError):  # a live object that compares by element
        return False


def _shown(value: Any) -> Any:
    """Returns a JSON value; a live object is shown by its name or that of its class, and by none of its fields."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Option):
        return value.to_dict()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(name): _shown(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_shown(part) for part in value]
    template = getattr(value, "template", None)
    return template if isinstance(template, str) else _name_of(value)


def _name_of(value: Any) -> str:
    names = (getattr(value, attribute, None) for attribute in ("name", "model_name", "model"))
    return next((name for name in names if isinstance(name, str) and name), type(value).__name__)
