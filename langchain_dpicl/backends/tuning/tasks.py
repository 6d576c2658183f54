"""Defines what a prompt is trained for: how a text is shown to the model, and where the answer is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from string import Formatter
from typing import Any, Literal, TypeAlias, get_args

from langchain_dpicl.exceptions import ConfigurationError

__all__ = ["PromptTask", "TaskKind"]

TaskKind: TypeAlias = Literal["causal_lm", "masked_lm", "sequence_classification"]
Pieces: TypeAlias = tuple[tuple[str, str | None], ...]
"""(literal text, name of the field that stands behind it or None) pairs."""

_KINDS: tuple[TaskKind, ...] = get_args(TaskKind)
_MOST = {"text": 1, "pair": 1, "mask": 1}
_WORDS = "words (verbalizers=)"
"""The name here, and the trainer's option."""
_SPOKEN = re.compile(r"\S")


@dataclass(frozen=True, slots=True)
class PromptTask:
    r"""How one text, or a pair, becomes the input of a local model, and what its answer is.

    All of it is public: no template, label or length may be chosen by looking at private records.

    Attributes:
      kind: "causal_lm": the answer follows the input; "masked_lm": the answer stands at the mask;
        "sequence_classification": the model has a head with one output per label.
      template: the input. `{text}` once; `{pair}` where there is a second text; `{mask}` once for a masked model. Of a
        causal model the answer follows right behind. "" for a head: the text, or the two as the tokenizer joins them.
      labels: what is told apart; () for a causal model that writes free text.
      words: one per label, as it stands in the text behind the template, with its space where there is one; each is
        one token. () for free text and for a head, whose outputs are the labels in their order.
      max_input_tokens: length that every input is padded or cut to; what is cut is text, never the template's words.
      max_target_tokens: most tokens of a free text that is learnt to be written, its end included.

    Raises:
      ConfigurationError: the parts do not go together.

    >>> PromptTask("causal_lm", "Review: {text}\nIt was", ("bad", "good"), (" terrible", " great")).pieces
    (('Review: ', 'text'), ('\nIt was', None))
    """

    kind: TaskKind
    template: str = ""
    labels: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    max_input_tokens: int = 128
    max_target_tokens: int = 64

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise _fault("kind", f"one of {list(_KINDS)}", self.kind)
        if not isinstance(self.template, str):
            raise _fault("template", "text", type(self.template).__name__)
        for name in ("labels", "words"):
            object.__setattr__(self, name, _texts(name, getattr(self, name)))
        for name in ("max_input_tokens", "max_target_tokens"):
            check_count(name, getattr(self, name))
        self._check_template()
        self._check_labels()

    @property
    def pieces(self) -> Pieces:
        """The template, taken apart."""
        return _pieces(self.template)

    @property
    def takes_pair(self) -> bool:
        """Whether the template shows a second text; of a head that depends on each example."""
        return any(name == "pair" for _, name in self.pieces)

    @property
    def writes_text(self) -> bool:
        """Whether the answer is free text."""
        return self.kind == "causal_lm" and not self.labels

    def to_dict(self) -> dict[str, Any]:
        """Returns the task as JSON values; `from_dict` reads them."""
        state = {one.name: getattr(self, one.name) for one in fields(self)}
        return state | {"labels": list(self.labels), "words": list(self.words)}

    @classmethod
    def from_dict(cls, state: object) -> PromptTask:
        """Returns the task that `to_dict` wrote.

        Args:
          state: what `to_dict` gave.

        Raises:
          ConfigurationError: another form, or parts that do not go together.
        """
        names = {one.name for one in fields(cls)}
        if not isinstance(state, Mapping) or set(state) != names:
            raise _fault("task", f"a JSON object with exactly the keys {sorted(names)}", type(state).__name__)
        return cls(**{name: state[name] for name in names})

    def _check_template(self) -> None:
        if self.kind == "sequence_classification":
            if self.template:
                advice = 'a head reads the text as it is; pass template=""'
                raise _fault("template", '"" with kind "sequence_classification"', self.template, advice)
            return
        names = [name for _, name in self.pieces if name is not None]
        known = {"text", "pair"} | ({"mask"} if self.kind == "masked_lm" else set())
        wanted = {"text"} | (known & {"mask"})
        repeated = [name for name in names if names.count(name) > _MOST.get(name, 0)]
        if not wanted <= set(names) <= known or repeated:
            shown = " and ".join(f"{{{name}}} once" for name in sorted(wanted, reverse=True))
            is_masked = self.kind == "causal_lm" and "mask" in names
            advice = "a causal model answers right behind the template, and has no mask" if is_masked else ""
            raise _fault("template", f"{shown}, at most one {{pair}}, and no other field", self.template, advice)

    def _check_labels(self) -> None:
        if len(set(self.labels)) != len(self.labels) or len(self.labels) == 1:
            raise _fault("labels", "at least two labels, all different", list(self.labels))
        if not self.labels and self.kind != "causal_lm":
            is_head = self.kind == "sequence_classification"
            advice = "name the head's outputs, in their order" if is_head else "only a causal model writes free text"
            raise _fault("labels", f'labels with kind "{self.kind}"', [], advice)
        if self.kind == "sequence_classification" or not self.labels:
            if self.words:
                what = "the outputs of a head" if self.labels else "free text"
                raise _fault(_WORDS, f"none: {what} need no words", list(self.words))
        elif len(self.words) != len(self.labels) or len(set(self.words)) != len(self.words):
            raise _fault(_WORDS, f"one for each of the {len(self.labels)} labels, all different", list(self.words))
        elif silent := [word for word in self.words if not _SPOKEN.search(word)]:
            raise _fault(_WORDS, "words with something in them", silent)


def _pieces(template: str) -> Pieces:
    """Returns the parsed template; `{{` and `}}` are braces."""
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise _fault("template", "plain {field} names, and {{ }} for braces", template) from error
    if any(form or conversion for _, _, form, conversion in parts):
        raise _fault("template", "plain {field} names, without format or conversion", template)
    pieces: list[tuple[str, str | None]] = []
    before = ""
    for literal, name, _, _ in parts:
        before += literal  # a written brace ends a part without a field behind it
        if name is not None:
            pieces.append((before, name))
            before = ""
    return (*pieces, (before, None)) if before else tuple(pieces)


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        raise _fault(name, "a list of texts", type(value).__name__)
    return tuple(value)


def check_count(name: str, value: Any) -> None:
    """Refuses anything but a whole number >= 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _fault(name, "a whole number >= 1", value)


def _fault(name: str, expected: str, found: object, advice: str = "") -> ConfigurationError:
    return ConfigurationError(f"{name}: expected {expected}, found {found!r}" + (f"; {advice}" if advice else ""))
