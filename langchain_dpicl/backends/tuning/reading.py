"""Reads texts as the ids that a task shows to a model, and the answers that it learns."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from langchain_dpicl.backends.base import TrainingExample
from langchain_dpicl.backends.hf.tokens import TokenizerMaps
from langchain_dpicl.backends.tuning.tasks import PromptTask
from langchain_dpicl.exceptions import ConfigurationError

# A text is always plain text: special tokens in it are broken up. A text that is too long loses its end, never a word
# of the template. Spaces before a field belong to the field's first token, as tokenizers expect; those at the end of a
# causal template belong to the answer.
_APART = ("a", "b")
"""Two public texts that show what a tokenizer adds around them."""


@dataclass(slots=True, repr=False, eq=False)
class Input:
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

    Args:
      tokenizer: of the transformers package; a copy is used.
      task: the public task.

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
        self._literals, self._carried = self._cut_template()
        self.word_ids = tuple(
            [self._word_id(label, word) for label, word in zip(task.labels, task.words, strict=False)]
        )
        self._check_words()
        self.eos = self._end() if task.writes_text else None
        self._check_room()

    def input(self, text: str, pair: str | None = None) -> Input:
        """Returns the model's input for a text or a pair."""
        if self.task.kind == "sequence_classification":
            return self._joined(text, pair)
        texts = {"text": text, "pair": pair or ""}
        shown = [name for _, name in self._literals if name in texts]
        encoded = [self._encoded(place, texts) for place, (_, name) in enumerate(self._literals) if name in texts]
        cut = dict(zip(shown, _shared_out(encoded, self.room), strict=True))
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
        return Input(ids, [self._frames[False].types[0]] * len(ids), at)

    def answer(self, target: str) -> list[int]:
        """Returns the target: the place of a declared label, or the ids of a text and its end.

        Raises:
          ValueError: not a declared label; its value is not in the message.
        """
        if self.eos is None:
            if target not in self.task.labels:
                raise ValueError("no declared label")
            return [self.task.labels.index(target)]
        text = self._carried[-1] + target if target else ""
        return [*self.tokens.continued(text), self.eos][: self.task.max_target_tokens]

    def read(self, example: TrainingExample) -> tuple[Input, list[int]]:
        """Returns an example's input and answer; raises whatever its content makes a tokenizer raise."""
        return self.input(example.text, example.pair), self.answer(example.target)

    @property
    def room(self) -> int:
        """Tokens of text that one input has room for."""
        template = sum(len(literal) + (name == "mask") for literal, name in self._literals)
        return self.task.max_input_tokens - max(map(len, self._frames.values())) - template

    def _encoded(self, place: int, texts: dict[str, str]) -> list[int]:
        text = texts[self._literals[place][1] or "text"]
        text = self._carried[place] + text if text else ""
        is_first = place == 0 and not self._literals[0][0]
        return self.tokens.encode(text) if is_first else self.tokens.continued(text)

    def _joined(self, text: str, pair: str | None) -> Input:
        """Returns one or two texts in the tokenizer's frame."""
        frame = self._frames[pair is not None]
        texts = [text] if pair is None else [text, pair]
        if len(texts) >= len(frame.around):
            texts = [" ".join(texts)]  # the tokenizer does not join texts
        cut = _shared_out([self.tokens.encode(one) for one in texts], self.task.max_input_tokens - len(frame))
        marked = list(frame.around[0])
        for place, ids in enumerate(cut):
            marked += [(id_, frame.types[place]) for id_ in ids] + list(frame.around[place + 1])
        return Input([id_ for id_, _ in marked], [kind for _, kind in marked])

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
        ids, types = _told(tokenizer, _APART[0])
        text = self.tokens.encode(_APART[0])
        begin = _found(ids, text, 0)
        marked = list(zip(ids, types, strict=True))
        behind = () if self.task.kind == "causal_lm" else tuple(marked[begin + len(text) :])
        return _Frame((tuple(marked[:begin]), behind), (types[begin],))

    def _double(self, tokenizer: Any) -> _Frame | None:
        """Returns the frame of two texts; None if the tokenizer does not join texts."""
        first, second = [self.tokens.encode(text) for text in _APART]
        try:
            ids, types = _told(tokenizer, *_APART)
        except (TypeError, ValueError, NotImplementedError):
            return None
        marked = list(zip(ids, types, strict=True))
        begin = _found(ids, first, 0)
        middle = begin + len(first)
        again = _found(ids, second, middle)
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
        space = self._carried[-1] if self.task.kind == "causal_lm" else ""
        ids = self.tokens.continued(space + word)
        if len(ids) != 1:
            raise ConfigurationError(
                f"words (verbalizers=): expected one token per label, found {len(ids)} for label {label!r} "
                f"({word!r}); take a shorter word that the tokenizer knows, with its space where one stands before it"
            )
        return ids[0]

    def _check_words(self) -> None:
        if len(set(self.word_ids)) != len(self.word_ids):
            same = [word for word, id_ in zip(self.task.words, self.word_ids, strict=True) if self._is_double(id_)]
            raise ConfigurationError(
                f"words (verbalizers=): expected different tokens, found one for {same!r}; take other words"
            )

    def _is_double(self, id_: int) -> bool:
        return self.word_ids.count(id_) > 1

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


def _told(tokenizer: Any, *texts: str) -> tuple[list[int], list[int]]:
    """Returns ids and types of public texts in the tokenizer's frame."""
    encoded = tokenizer(*texts, return_token_type_ids=True)
    ids = list(encoded["input_ids"])
    return ids, list(encoded.get("token_type_ids") or [0] * len(ids))


def _found(ids: Sequence[int], text: Sequence[int], begin: int) -> int:
    """Returns the place of a text among ids, or raises ConfigurationError."""
    for place in range(begin, len(ids) - len(text) + 1):
        if list(ids[place : place + len(text)]) == list(text):
            return place
    raise ConfigurationError(
        "expected a tokenizer that leaves a text as it is between its special tokens, found one that does not; pass "
        "the model's own tokenizer"
    )


def _shared_out(texts: Sequence[list[int]], room: int) -> list[list[int]]:
    """Returns texts cut to `room` ids in all: of two, each keeps half, and what the other leaves.

    >>> _shared_out([[1, 2, 3, 4, 5], [6]], 4)
    [[1, 2, 3], [6]]
    """
    if len(texts) < 2:
        return [ids[:room] for ids in texts]
    first, second = texts
    share = max(room - len(second), (room + 1) // 2)
    first = first[:share]
    return [first, second[: room - len(first)]]
