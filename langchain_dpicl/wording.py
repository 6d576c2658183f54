"""Turns private records into a generation prompt that ends where the model continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from langchain_dpicl.asking import Pieces, fill_template, template_pieces
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.release.curator import Render
from langchain_dpicl.release.sample import Record


@dataclass(frozen=True, slots=True)
class GenerationWording:
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

    def __post_init__(self) -> None:
        for name in ("instruction", "template"):
            if not isinstance(getattr(self, name), str):
                raise fail(name.replace("template", "generation_prompt"), "text", type(getattr(self, name)).__name__)
        parts = self._parts()
        names = [name for _, name in parts if name is not None]
        if not parts or parts[-1][1] != self.text_key or names.count(self.text_key) != 1:
            expected = f"a template with {{{self.text_key}}} once, at its very end (the model continues there)"
            raise fail("generation_prompt", expected, self.template)
        if unknown := sorted(set(names) - set(self.fields)):
            advice = "Declare them with PrivateExamples(fields=...)."
            raise fail("generation_prompt", f"fields among {sorted(self.fields)}", unknown, advice)
        if self.label_key is not None and self.label_key not in names:
            raise fail("generation_prompt", f"the label field {{{self.label_key}}}", sorted(set(names)))

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
        return fill_template(self._parts(), record)

    def stub(self, upto: str, values: Mapping[str, str]) -> str:
        """Returns the template up to (not including) field `upto`, other fields filled from public `values`."""
        out = ""
        for literal, name in self._parts():
            out += literal
            if name == upto:
                break
            out += values.get(name, "") if name is not None else ""
        return out.rstrip(" ")

    def renderer(self, upto: str, values: Mapping[str, str]) -> Render:
        """Returns the function from a row's records to its prompt; it says with which public text all prompts start."""
        return _Prompts(self, self.stub(upto, values))

    def _parts(self) -> Pieces:
        return template_pieces("generation_prompt", self.template)


@dataclass(frozen=True, slots=True)
class _Prompts:
    """Renders the prompts of one field; holds public text only."""

    wording: GenerationWording
    stub: str

    def __call__(self, records: Sequence[Record]) -> str:
        return "\n\n".join([self.wording.instruction, *(self.wording.record(record) for record in records), self.stub])

    @property
    def shared(self) -> str:
        """What every prompt starts with, whatever its records."""
        return self.wording.instruction + "\n\n"
