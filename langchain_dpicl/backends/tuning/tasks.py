"""Defines what a prompt is trained for, and reads texts and answers as token ids."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, get_args

from langchain_dpicl._templates import Template
from langchain_dpicl.backends.base import TrainingExample, check_whole
from langchain_dpicl.backends.hf.tokens import TokenizerMaps
from langchain_dpicl.exceptions import ConfigurationError

TaskKind: TypeAlias = Literal["causal_lm", "masked_lm", "sequence_classification"]
Pieces: TypeAlias = tuple[tuple[str, str | None], ...]
"""(literal text, name of the field that stands behind it or None) pairs."""

_KINDS: tuple[TaskKind, ...] = get_args(TaskKind)
_MAX_FIELDS = {"text": 1, "pair": 1, "mask": 1}
_TEMPLATES: dict[TaskKind, str] = {"causal_lm": "{text}\nLabel:", "masked_lm": "{text} {mask}"}
_NON_SPACE = re.compile(r"\S")


@dataclass(frozen=True, slots=True)
class PromptTask:
    r"""How one text, or a pair, becomes the input of a local model, and what its answer is.

    All of it is public: no template, label or length may be chosen by looking at private records.

    Attributes:
      kind: "causal_lm": the answer follows the input; "masked_lm": the answer stands at the mask;
        "sequence_classification": the model has a head with one output per label.
      template: the input. `{text}` once; `{pair}` where there is a second text; `{mask}` once for a masked model. Of a
        causal model the answer follows right behind. "": `{text}\nLabel:` of a causal model, `{text} {mask}` of a
        masked one, and for a head the text, or the two as the tokenizer joins them. No special tokens.
      labels: the classes; () for a causal model that writes free text.
      words: one per label, as it stands in the text behind the template, with its space where there is one; each is
        one token. (): each label behind a space; none for free text and for a head, whose outputs are the labels in
        their order.
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
            check_whole(name, getattr(self, name))
        if self.kind != "sequence_classification":
            object.__setattr__(self, "template", self.template or _TEMPLATES[self.kind])
            object.__setattr__(self, "words", self.words or tuple(f" {label}" for label in self.labels))
        self._check_template()
        self._check_labels()

    @property
    def pieces(self) -> Pieces:
        """The template, taken apart."""
        return Template.of("template", self.template).pieces

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
        repeated = [name for name in names if names.count(name) > _MAX_FIELDS.get(name, 0)]
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
                raise _fault("words", f"none: {what} need no words", list(self.words))
        elif len(self.words) != len(self.labels) or len(set(self.words)) != len(self.words):
            raise _fault("words", f"one for each of the {len(self.labels)} labels, all different", list(self.words))
        elif silent := [word for word in self.words if not _NON_SPACE.search(word)]:
            raise _fault("words", "words with something in them", silent)


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        raise _fault(name, "a list of texts", type(value).__name__)
    return tuple(value)


def _fault(name: str, expected: str, found: object, advice: str = "") -> ConfigurationError:
    return ConfigurationError(f"{name}: expected {expected}, found {found!r}" + (f"; {advice}" if advice else ""))


# A text is always plain text: special tokens in it are broken up. A text that is too long loses its end, never a word
# of the template. Spaces before a field belong to the field's first token, as tokenizers expect; those at the end of a
# causal template belong to the answer.
_APART = ("a", "b")
"""Two public texts that show what a tokenizer adds around them."""


@dataclass(slots=True, repr=False, eq=False)
class ModelInput:
    """One input as the model reads it; shows nothing.

    Attributes:
      ids: at most `max_input_tokens` of them.
      types: the type of each.
      at: the place of the mask; 0 where there is none.
    """

    ids: list[int]
    types: list[int]
    at: int = 0


@dataclass(frozen=True, slots=True)
class _Frame:
    """What a tokenizer adds around one or two texts: (ids, type) before, between and behind; types of the texts."""

    around: tuple[tuple[tuple[int, int], ...], ...]
    types: tuple[int, ...]

    def __len__(self) -> int:
        return sum(map(len, self.around))


class TaskReader:
    """Turns texts into inputs, and answers into targets.

    Raises:
      ConfigurationError: a word is not one token of its own, there is no mask or end where one is needed, or the
        template leaves no room for a text.
    """

    def __init__(self, tokenizer: Any, task: PromptTask) -> None:
        self.task = task
        self.tokens = TokenizerMaps(tokenizer, chat=False)
        own = copy.deepcopy(tokenizer)
        pad = own.pad_token_id
        self.filler = int(pad) if pad is not None else min(self.tokens.known - self.tokens.special, default=0)
        self._frames = {False: self._single(own)}
        if task.kind == "sequence_classification":
            self._frames[True] = self._double(own) or self._frames[False]
        self.has_types = any(kind for frame in self._frames.values() for kind in frame.types)
        self._mask = self._mask_id(own)
        self._literals, self._spaces = self._cut_template()
        self.word_ids = tuple(
            [self._word_id(label, word) for label, word in zip(task.labels, task.words, strict=False)]
        )
        self._check_words()
        self.eos = self._end() if task.writes_text else None
        self._check_room()

    def input(self, text: str, pair: str | None = None) -> ModelInput:
        """Returns the model's input for a text or a pair."""
        if self.task.kind == "sequence_classification":
            return self._joined(text, pair)
        texts = {"text": text, "pair": pair or ""}
        shown = [name for _, name in self._literals if name in texts]
        encoded = [self._encoded(place, texts) for place, (_, name) in enumerate(self._literals) if name in texts]
        cut = dict(zip(shown, _cut_texts(encoded, self.room), strict=True))
        before, behind = self._frames[False].around
        ids, at = [id_ for id_, _ in before], 0
        for literal, name in self._literals:
            ids += literal
            if name == "mask":
                at = len(ids)
                ids.append(self._mask)
            elif name is not None:
                ids += cut[name]
        ids += [id_ for id_, _ in behind]
        return ModelInput(ids, [self._frames[False].types[0]] * len(ids), at)

    def answer(self, target: str) -> list[int]:
        """Returns the target: the place of a declared label, or the ids of a text and its end.

        Raises:
          ValueError: not a declared label; its value is not in the message.
        """
        if self.eos is None:
            if target not in self.task.labels:
                raise ValueError("no declared label")
            return [self.task.labels.index(target)]
        text = self._spaces[-1] + target if target else ""
        return [*self.tokens.continued(text), self.eos][: self.task.max_target_tokens]

    def read(self, example: TrainingExample) -> tuple[ModelInput, list[int]]:
        """Returns an example's input and answer; raises whatever its content makes a tokenizer raise."""
        return self.input(example.text, example.pair), self.answer(example.target)

    @property
    def room(self) -> int:
        """Tokens of text that one input has room for."""
        template = sum(len(literal) + (name == "mask") for literal, name in self._literals)
        return self.task.max_input_tokens - max(map(len, self._frames.values())) - template

    def _encoded(self, place: int, texts: dict[str, str]) -> list[int]:
        text = texts[self._literals[place][1] or "text"]
        text = self._spaces[place] + text if text else ""
        is_first = place == 0 and not self._literals[0][0]
        return self.tokens.encode(text) if is_first else self.tokens.continued(text)

    def _joined(self, text: str, pair: str | None) -> ModelInput:
        """Returns one or two texts in the tokenizer's frame."""
        frame = self._frames[pair is not None]
        texts = [text] if pair is None else [text, pair]
        if len(texts) >= len(frame.around):
            texts = [" ".join(texts)]  # the tokenizer does not join texts
        cut = _cut_texts([self.tokens.encode(one) for one in texts], self.task.max_input_tokens - len(frame))
        marked = list(frame.around[0])
        for place, ids in enumerate(cut):
            marked += [(id_, frame.types[place]) for id_ in ids] + list(frame.around[place + 1])
        return ModelInput([id_ for id_, _ in marked], [kind for _, kind in marked])

    def _cut_template(self) -> tuple[list[tuple[list[int], str | None]], list[str]]:
        """Returns the template as (ids, field behind them) pairs, and the spaces that go with each field."""
        literals: list[tuple[list[int], str | None]] = []
        carried: list[str] = []
        for place, (literal, name) in enumerate(self.task.pieces):
            shown = literal.rstrip(" ") if name is not None or self.task.kind == "causal_lm" else literal
            encode = self.tokens.continued if place else self.tokens.encode
            literals.append((encode(shown) if shown else [], name))
            carried.append(literal[len(shown) :])
        if not literals or literals[-1][1] is not None:
            literals.append(([], None))  # the answer, or the end, follows right behind a field
            carried.append("")
        return literals, carried

    def _single(self, tokenizer: Any) -> _Frame:
        """Returns the frame of one text; a causal text has no end."""
        ids, types = _tokenize_framed(tokenizer, _APART[0])
        text = self.tokens.encode(_APART[0])
        begin = _find_ids(ids, text, 0)
        marked = list(zip(ids, types, strict=True))
        behind = () if self.task.kind == "causal_lm" else tuple(marked[begin + len(text) :])
        return _Frame((tuple(marked[:begin]), behind), (types[begin],))

    def _double(self, tokenizer: Any) -> _Frame | None:
        """Returns the frame of two texts; None if the tokenizer does not join texts."""
        first, second = [self.tokens.encode(text) for text in _APART]
        try:
            ids, types = _tokenize_framed(tokenizer, *_APART)
        except (TypeError, ValueError, NotImplementedError):
            return None
        marked = list(zip(ids, types, strict=True))
        begin = _find_ids(ids, first, 0)
        middle = begin + len(first)
        again = _find_ids(ids, second, middle)
        around = (tuple(marked[:begin]), tuple(marked[middle:again]), tuple(marked[again + len(second) :]))
        return _Frame(around, (types[begin], types[again]))

    def _mask_id(self, tokenizer: Any) -> int:
        if self.task.kind != "masked_lm":
            return 0
        mask = getattr(tokenizer, "mask_token_id", None)
        if mask is None:
            raise ConfigurationError(
                f"expected a tokenizer with a mask for kind {self.task.kind!r}, found {type(tokenizer).__name__} "
                'without; take the tokenizer of a masked model, or kind "causal_lm"'
            )
        return int(mask)

    def _word_id(self, label: str, word: str) -> int:
        """Returns the one token of a label's word."""
        space = self._spaces[-1] if self.task.kind == "causal_lm" else ""
        ids = self.tokens.continued(space + word)
        if len(ids) != 1:
            advice = "with its space where one stands before it"
            if space:
                advice = "without a space, as it follows a space at the template's end"
            raise ConfigurationError(
                f"words: expected one token per label, found {len(ids)} for label {label!r} "
                f"({space + word!r}); take a shorter word that the tokenizer knows, {advice}"
            )
        return ids[0]

    def _check_words(self) -> None:
        if len(set(self.word_ids)) != len(self.word_ids):
            found = zip(self.task.words, self.word_ids, strict=True)
            same = [word for word, id_ in found if self.word_ids.count(id_) > 1]
            raise ConfigurationError(f"words: expected different tokens, found one for {same!r}; take other words")

    def _end(self) -> int:
        if self.tokens.eos is None:
            raise ConfigurationError(
                "expected a tokenizer with an end of the text (eos_token), found none; set one: free text ends with it"
            )
        return int(self.tokens.eos)

    def _check_room(self) -> None:
        if self.room < 1:
            limit = self.task.max_input_tokens
            raise ConfigurationError(
                f"max_input_tokens: expected room for a text beside the template, found {limit}, of which the template "
                f"takes {limit - self.room}; raise it, or shorten the template"
            )


def _tokenize_framed(tokenizer: Any, *texts: str) -> tuple[list[int], list[int]]:
    """Returns ids and types of public texts in the tokenizer's frame."""
    encoded = tokenizer(*texts, return_token_type_ids=True)
    ids = list(encoded["input_ids"])
    return ids, list(encoded.get("token_type_ids") or [0] * len(ids))


def _find_ids(ids: Sequence[int], text: Sequence[int], begin: int) -> int:
    """Returns the place of a text among ids, or raises ConfigurationError."""
    for place in range(begin, len(ids) - len(text) + 1):
        if list(ids[place : place + len(text)]) == list(text):
            return place
    raise ConfigurationError(
        "expected a tokenizer that leaves a text as it is between its special tokens, found one that does not; pass "
        "the model's own tokenizer"
    )


def _cut_texts(texts: Sequence[list[int]], room: int) -> list[list[int]]:
    """Returns texts cut to `room` ids in all: of two, each keeps half, and what the other leaves.

    >>> _cut_texts([[1, 2, 3, 4, 5], [6]], 4)
    [[1, 2, 3], [6]]
    """
    if len(texts) < 2:
        return [ids[:room] for ids in texts]
    first, second = texts
    share = max(room - len(second), (room + 1) // 2)
    first = first[:share]
    return [first, second[: room - len(first)]]
