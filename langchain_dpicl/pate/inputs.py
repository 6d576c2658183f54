"""Turns public inputs into queries and into entries of a pool."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from langchain_core.documents import Document

from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.released.labelled_pool import PoolEntry
from langchain_dpicl.tasks.templates import FewShotTemplate, Query, public_text

Fields = dict[str, str]


@dataclass(frozen=True, slots=True)
class InputTemplate:
    """Templates of public inputs: as queries, and as demonstrations once they are labelled. Public.

    Attributes:
      wording: the prompt templates.
      text_key: field of the examples that holds the text.
      label_key: field of the examples that holds the label.
    """

    wording: FewShotTemplate
    text_key: str
    label_key: str

    @classmethod
    def of(cls, private: PrivateExamples, wording: FewShotTemplate) -> InputTemplate:
        """Uses the field names of the private examples."""
        if private.label_key is None:
            advice = "Declare PrivateExamples(label_key=..., labels=...)."
            raise fail("private", "examples with a label field, which demonstrations show", None, advice)
        if private.label_key not in wording.example_fields:
            raise fail("example_prompt", f"a template that shows {{{private.label_key}}}", wording.example_prompt)
        return cls(wording, private.text_key, private.label_key)

    @property
    def field_of(self) -> dict[str, str]:
        """The field that fills each variable of the query: the one of that name, or the text for `input`."""
        names = self.wording.input_variables
        if self.label_key in names:
            raise fail("suffix", "a template of the query without its label", f"{{{self.label_key}}}")
        known = set(self.wording.example_fields)
        return {
            name: self.text_key if name not in known and (name == "input" or len(names) == 1) else name
            for name in names
        }

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of a public input: those of a demonstration without the label, and those of the query."""
        shown = (name for name in self.wording.example_fields if name != self.label_key)
        return tuple(dict.fromkeys((*shown, *self.field_of.values())))

    def fields_of(self, public_input: Any) -> Fields:
        """Returns the fields of a public input: text, a document, or a dict of fields (or of the query's variables).

        Other keys of a dict are left out.
        """
        names = self.fields
        if isinstance(public_input, Document) and len(names) == 1:
            public_input = public_input.page_content
        if isinstance(public_input, str) and len(names) == 1:
            return {names[0]: public_input}
        if not isinstance(public_input, Mapping):
            expected = "text" if len(names) == 1 else f"a dict with {list(names)}"
            raise fail("public_inputs", expected, type(public_input).__name__)
        if self.label_key in public_input:
            advice = "Labelled examples are added with add_public_example, which is free."
            raise fail("public_inputs", f"inputs without {self.label_key!r}", sorted(map(str, public_input)), advice)
        variables = {field: name for name, field in self.field_of.items()}
        keys = {name: name if name in public_input else variables.get(name, name) for name in names}
        if missing := [name for name, key in keys.items() if key not in public_input]:
            raise fail("public_inputs", f"a dict with {list(names)}", f"{missing} missing")
        return {name: public_text(f"public_inputs[{name!r}]", public_input[key]) for name, key in keys.items()}

    def query_of(self, fields: Mapping[str, str]) -> Query:
        """Returns the query that asks for the label of a public input."""
        return tuple(fields[field] for field in self.field_of.values())

    def text_of(self, fields: Mapping[str, str]) -> str:
        """Returns the values of an input's query as one text, for comparisons."""
        return "\n".join(self.query_of(fields))

    def waiting(self, inputs: Iterable[Any]) -> list[PoolEntry]:
        """Returns the distinct inputs as waiting entries: equal inputs are charged once."""
        if isinstance(inputs, str | Mapping) or not isinstance(inputs, Iterable):
            raise fail("public_inputs", "a list of inputs", type(inputs).__name__)
        every = [self.fields_of(public_input) for public_input in inputs]
        distinct = {key_of(fields): fields for fields in reversed(every)}  # of equal inputs the first is kept
        return [
            PoolEntry(fields=distinct[key], label=None, status="waiting") for key in dict.fromkeys(map(key_of, every))
        ]


def key_of(fields: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Returns the key of an input: equal inputs have equal keys."""
    return tuple(sorted(fields.items()))
