"""Parses templates with plain `{field}` names and fills texts into them; knows scripts that write no spaces."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from string import Formatter

from langchain_dpicl.exceptions import ConfigurationError

_NAME = re.compile(r"""[^\W\d]([^{}\[\].!:"'\\]*[^{}\[\].!:"'\\\s])?""")
"""A name that a record, and a column of a table, can have: `text`, `Queue Name`, `Ticket #`."""

_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3041-\u30ff\u31f0-\u31ff\u3400-\u9fff\U00020000-\U0003ffff]"
)


def is_unspaced(text: str) -> bool:
    """Whether a text begins with a letter of a script that writes no spaces between words.

    Those are Thai, Lao, Burmese, Khmer, Japanese and Chinese.
    """
    return _UNSPACED.match(text) is not None


def is_field_name(name: str) -> bool:
    """Whether a template can read a field of this name."""
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Template:
    """A parsed f-string template; what is filled in is never parsed.

    Attributes:
      text: the template as it was written.
      pieces: (literal text, name of the field behind it) pairs; the last one may have None for a name.
      names: the fields, each once, in the order in which they appear.
    """

    text: str
    pieces: tuple[tuple[str, str | None], ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, name: str, template: object) -> Template:
        """Parses a text, or a `PromptTemplate` in f-string format and without partial variables.

        Raises:
          ConfigurationError: anything else, or more than plain `{field}` names.
        """
        return cls._read(name, template, specs=False)

    @classmethod
    def text_of(cls, name: str, template: object) -> str:
        """Returns the text of a template that LangChain fills, where names may have formats, such as `{price:.2f}`."""
        return cls._read(name, template, specs=True).text

    @classmethod
    def _read(cls, name: str, template: object, *, specs: bool) -> Template:
        text = template if isinstance(template, str) else getattr(template, "template", None)
        is_other = not isinstance(template, str) and getattr(template, "template_format", None) != "f-string"
        if not isinstance(text, str) or is_other or getattr(template, "partial_variables", None):
            raise ConfigurationError(
                f"{name}: expected text or a PromptTemplate in f-string format without partial variables, found "
                f"{type(template).__name__!r}. Write it as one text, such as 'Message: {{text}}'."
            )
        try:
            parsed = list(Formatter().parse(text))
        except ValueError:
            parsed = None
        if parsed is None or any(
            field is not None
            and (not _NAME.fullmatch(field) or (not specs and (spec or conversion)) or "{" in (spec or ""))
            for _, field, spec, conversion in parsed
        ):
            formatted = [field for _, field, spec, conversion in parsed or () if field and (spec or conversion)]
            parts = [field for _, field, _, _ in parsed or () if field and re.fullmatch(r"[^\W\d].*[.\[].*", field)]
            advice = "Write {{ and }} for braces."
            if formatted and not specs and all(map(_NAME.fullmatch, formatted)):
                advice = f"Leave out what follows the name in {{{formatted[0]}...}}."
            elif parts:
                advice = f"Rename the field {parts[0]!r}: a template reads no name with . or [ in it."
            raise ConfigurationError(
                f"{name}: expected plain {{field}} names in an f-string template, found {text!r}. {advice}"
            )
        pieces: list[tuple[str, str | None]] = []
        before = ""
        for literal, field, _, _ in parsed:
            before += literal  # a written brace ends a part without a field behind it
            if field is not None:
                pieces.append((before, field))
                before = ""
        names = tuple(dict.fromkeys(field for _, field in pieces if field is not None))
        return cls(text, (*pieces, (before, None)) if before else tuple(pieces), names)

    def fill(self, values: Mapping[str, str], shown: Mapping[str, Mapping[str, str]] | None = None) -> str:
        """Returns the template with `values` in it, or "" for those that it lacks.

        Args:
          values: text by field; may be private.
          shown: by field, what stands for some of its values.
        """
        out = ""
        for literal, name in self.pieces:
            if name is None:
                out += literal
                continue
            value = values.get(name, "")
            out += literal + (shown[name].get(value, value) if shown and name in shown else value)
        return out

    def fill_before(self, field: str, values: Mapping[str, str]) -> str:
        """Returns the filled template up to where `field` first stands."""
        place = [name for _, name in self.pieces].index(field)
        *before, (last, _) = self.pieces[: place + 1]
        return Template("", tuple(before), ()).fill(values) + last


def formats_in(template: object) -> Iterator[object]:
    """Yields the template formats used in a (chat) template, whatever its nesting."""
    if isinstance(template, (list, tuple)):
        for part in template:
            yield from formats_in(part)
        return
    if (language := getattr(template, "template_format", None)) is not None:
        yield language
    for name in ("messages", "prompt", "example_prompt"):
        if (inner := getattr(template, name, None)) is not None:
            yield from formats_in(inner)
