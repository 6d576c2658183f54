"""Turns a row's records into one prompt: with a public query, or to generate another record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from langchain_core.documents import Document
from langchain_core.messages import BaseMessage
from langchain_core.prompt_values import ChatPromptValue, PromptValue

from langchain_dpicl._templates import Template
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.release.curator import Render
from langchain_dpicl.release.sample import Record, SlotRenderers

Query: TypeAlias = tuple[str, ...]
"""The public values of the query's variables, in the order of `FewShotTemplate.input_variables`."""
_TEXTS = (str, BaseMessage, Document)


@dataclass(frozen=True, slots=True)
class FewShotTemplate:
    r"""A few-shot prompt: prefix, one formatted example per record, suffix with the query.

    Attributes:
      example_prompt: template of one record, for instance `"Ticket: {text}\nQueue: {queue}"`.
      suffix: template of the query, for instance `"Ticket: {input}\nQueue:"`; the model answers right after it.
      prefix: template before the examples; may use the query's variables too.
      separator: stands between the parts.
      fields: the declared fields of the private records.
      shown: by field, how declared values read in a prompt (labels as their verbalizers).
      others: further wordings of the same query, which slots read in turn after this one.

    Raises:
      ConfigurationError: unknown fields, no query variable or others in another wording, or anything but plain
        `{field}` names in the templates.
    """

    example_prompt: str
    suffix: str
    prefix: str
    separator: str
    fields: tuple[str, ...]
    shown: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    others: tuple[FewShotTemplate, ...] = ()
    _example: Template = field(init=False, repr=False)
    _prefix: Template = field(init=False, repr=False)
    _suffix: Template = field(init=False, repr=False)
    _variables: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.separator, str):
            raise fail("example_separator", "text", type(self.separator).__name__)
        for name in ("example_prompt", "prefix", "suffix"):
            object.__setattr__(self, f"_{name.removesuffix('_prompt')}", Template.of(name, getattr(self, name)))
        object.__setattr__(self, "_variables", tuple(dict.fromkeys((*self._prefix.names, *self._suffix.names))))
        used = self._example.names
        if not used or (unknown := sorted(set(used) - set(self.fields))):
            wrong = unknown if used else self.example_prompt
            advice = "Declare further fields with PrivateExamples(fields=...), or data.fields of a settings file."
            raise fail("example_prompt", f"a template with fields among {sorted(self.fields)}", wrong, advice)
        if not self.input_variables:
            raise fail("suffix", "a template with the query's variable, such as {input}", self.suffix)
        for other in self.others:
            if set(other.input_variables) != set(self.input_variables):
                expected = f"the query's variables {sorted(self.input_variables)} in every wording"
                raise fail("wordings", expected, sorted(other.input_variables))

    @property
    def num_wordings(self) -> int:
        """Wordings that slots read in turn, this one included."""
        return 1 + len(self.others)

    @property
    def input_variables(self) -> tuple[str, ...]:
        """The query's variables, in the order in which they appear."""
        return self._variables

    @property
    def example_fields(self) -> tuple[str, ...]:
        """The fields that an example shows, in the order in which they appear."""
        return self._example.names

    def query(self, value: Any) -> Query:
        """Returns the public values of a caller's input: text, a message, a prompt value, or a dict of these.

        Lists, such as retrieved documents, are joined by blank lines. Roles are written if there are several messages.
        """
        names = self.input_variables
        if not isinstance(value, Mapping):
            if len(names) > 1:
                raise fail("input", f"a dict with {list(names)}", type(value).__name__)
            if isinstance(value, Sequence) and not value and not isinstance(value, str):
                raise fail("input", "text", value)
            return (public_text("input", value),)
        missing = [name for name in names if name not in value]
        if missing:
            raise fail("input", f"a dict with {list(names)}", f"{missing} missing")
        return tuple(public_text(f"input[{name!r}]", value[name]) for name in names)

    def with_content(self, query: Query, text: str) -> Query:
        """Returns the query with `text` as its only variable or, of several, as the one called `input`."""
        names = self.input_variables
        if len(names) == 1:
            return (text,)
        if "input" not in names:
            raise fail("suffix", "one variable, or one called 'input', to calibrate", list(names))
        return tuple(text if name == "input" else value for name, value in zip(names, query, strict=True))

    def renderer(self, queries: Sequence[Query]) -> SlotRenderers[tuple[str, ...]]:
        """Returns the function from a row's records to its prompts, one per query; no records: the public prompts.

        All prompts of one row read the same wording.
        """
        named = [dict(zip(self.input_variables, query, strict=True)) for query in queries]
        return SlotRenderers(tuple([wording.own_renderer(named) for wording in (self, *self.others)]))

    def own_renderer(self, queries: Sequence[Mapping[str, str]]) -> Callable[[Sequence[Record]], tuple[str, ...]]:
        """Returns the renderer of this wording alone; queries hold values by name, which each wording orders anew."""
        ends = [(self._prefix.fill(values), self._suffix.fill(values)) for values in queries]
        around = [([prefix] if prefix else [], suffix) for prefix, suffix in ends]

        def render(records: Sequence[Record]) -> tuple[str, ...]:
            examples = [self._example.fill(record, self.shown) for record in records]
            return tuple([self.separator.join([*before, *examples, suffix]) for before, suffix in around])

        return render

    def to_dict(self) -> dict[str, Any]:
        """Returns the public wording as JSON values."""
        others = {"wordings": [other.to_dict() for other in self.others]} if self.others else {}
        return {
            "example_prompt": self.example_prompt,
            "prefix": self.prefix,
            "suffix": self.suffix,
            "example_separator": self.separator,
            **others,
        }


def public_text(name: str, value: Any) -> str:
    """Returns the text of a public value: text, a number, a LangChain text object, or a list of these."""
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, Sequence) and all(isinstance(item, _TEXTS) for item in value):
        return "\n\n".join(public_text(name, item) for item in value)
    text = _content(value)
    if text is None:
        expected = "text, a message, a prompt value, a document, or a list of these"
        raise fail(name, expected, type(value).__name__)
    return text


def _content(value: Any) -> str | None:
    """Returns the text of a LangChain message, prompt value or document; None for anything else."""
    if isinstance(value, ChatPromptValue) and len(value.messages) == 1:
        return str(value.messages[0].text)
    if isinstance(value, PromptValue):
        return value.to_string()
    if isinstance(value, BaseMessage):
        return str(value.text)
    if isinstance(value, Document):
        return value.page_content
    return None


@dataclass(frozen=True, slots=True)
class GenerationTemplate:
    r"""How private records become a generation prompt, and where the model continues.

    A prompt is the instruction, the row's records, and a stub that ends where the next record's text (or label)
    begins, separated by blank lines. A row without records gives the public prompt.

    Attributes:
      instruction: public task description; `{label_key}` fields are not substituted here.
      template: one record, for instance `"topic: {topic}\nquestion: {question}"`; must end with the text field.
      text_key: the field that is generated.
      label_key: the label's field; None where records have no label.
      fields: the declared fields of the private records.

    Raises:
      ConfigurationError: unknown fields, format specs, or a template that does not end with the text field.
    """

    instruction: str
    template: str
    text_key: str
    label_key: str | None
    fields: tuple[str, ...]
    _record: Template = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.instruction, str):
            raise fail("instruction", "text", type(self.instruction).__name__)
        parsed = Template.of("record_prompt", self.template)
        object.__setattr__(self, "_record", parsed)
        names = [name for _, name in parsed.pieces]
        if self.text_key not in names or names.index(self.text_key) != len(names) - 1:
            expected = f"a template with {{{self.text_key}}} once, at its very end (the model continues there)"
            raise fail("record_prompt", expected, self.template)
        if unknown := sorted(set(parsed.names) - set(self.fields)):
            advice = "Declare them with PrivateExamples(fields=...)."
            raise fail("record_prompt", f"fields among {sorted(self.fields)}", unknown, advice)
        if self.label_key is not None and self.label_key not in names:
            raise fail("record_prompt", f"the label field {{{self.label_key}}}", sorted(parsed.names))

    @classmethod
    def default_template(cls, text_key: str, label_key: str | None) -> str:
        """Returns `label: ...` and `text: ...` on two lines, or the text line alone."""
        text = f"{text_key}: {{{text_key}}}"
        return text if label_key is None else f"{label_key}: {{{label_key}}}\n{text}"

    @property
    def generated_fields(self) -> frozenset[str]:
        """The fields a released demonstration has."""
        return frozenset({self.text_key} | ({self.label_key} if self.label_key else set()))

    def record(self, record: Record) -> str:
        """Returns one record in its template; values are never parsed as templates."""
        return self._record.fill(record)

    def stub(self, upto: str, values: Mapping[str, str]) -> str:
        """Returns the template up to (not including) field `upto`, other fields filled from public `values`."""
        return self._record.fill_before(upto, values).rstrip(" ")

    def renderer(self, upto: str, values: Mapping[str, str]) -> Render:
        """Returns the function from a row's records to its prompt; it says with which public text all prompts start."""
        return _Prompts(self, self.stub(upto, values))


@dataclass(frozen=True, slots=True)
class _Prompts:
    """Renders the prompts of one field; holds public text only."""

    wording: GenerationTemplate
    stub: str

    def __call__(self, records: Sequence[Record]) -> str:
        return "\n\n".join([self.wording.instruction, *(self.wording.record(record) for record in records), self.stub])

    @property
    def shared(self) -> str:
        """What every prompt starts with, whatever its records."""
        return self.wording.instruction + "\n\n"
