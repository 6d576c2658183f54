"""Computes label probabilities after private or public prompts, from the scores that an engine gives to labels."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import sys
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl._calls import warn_caller
from langchain_dpicl._opaque import OpaqueRows, run_guarded
from langchain_dpicl.backends.base import (
    BlankAnswerError,
    ChoiceBackend,
    NextTokenBackend,
    PublicChoiceBackend,
    Rows,
    Token,
)
from langchain_dpicl.backends.langchain.logprobs import LOST, is_whole
from langchain_dpicl.backends.langchain.texts import ChoiceNames
from langchain_dpicl.backends.rows.answer_rows import STOP_WORDS
from langchain_dpicl.backends.sync_async import (
    LEAST_BESIDE,
    Blocking,
    Call,
    Effect,
    EffectGenerator,
    Guarded,
    Outage,
    PublicAnswer,
    TopTokenRequest,
    Walk,
    apublic_call,
    calls_at_once,
    check_silent,
    concurrency_limit,
    public_call,
    run_async,
    run_sync,
    start_calls,
)
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError, ModelCallError, NoisyPlanWarning

# All readers compute each row from its own numbers, in order, by operations that IEEE 754 rounds one by one: a row's
# numbers cannot depend on its place or on other rows. No number makes a reader raise.
LEAST_WEIGHT = sys.float_info.min
"""Least content-free probability to divide by, where every label has a likelihood."""

NO_LABEL = -1
"""The place of tokens that begin a label and may as well begin another one or be words of their own."""

LEAST_REPORTED = 1e-6
"""The same where labels may go unreported: those count at least the smallest probability that is reported."""

# Tokenizers cut before white space, before a sign inside a word, between letters and digits, and after three digits or
# each; what is behind the cut is never in a first token.
_FIRST_PIECE = re.compile(r"\d{1,3}|.[^\s\d!-/:-@\[-`{-~]*", re.DOTALL)
_OPENERS = STOP_WORDS - {"down", "off", "out", "over", "up"}  # which open few sentences and are cut off words
_TURKISH_LOWER, _TURKISH_UPPER = str.maketrans("I\u0130", "\u0131i"), str.maketrans("i\u0131", "\u0130I")
_GUESSED = ". Where they end is guessed, as the tokenizer is unknown; LangChainBackend(llm, tokenizer=...) knows it"


def check_verbalizers(verbalizers: object) -> tuple[tuple[str, ...], ...]:
    """Returns the distinct texts of each label, or raises ConfigurationError; two labels may not share a text."""
    groups = _check_sequence(verbalizers)
    rows = [_check_sequence(texts) for texts in groups or ()]
    if groups is None or len(groups) < 2 or not all(row and all(map(_is_text, row)) for row in rows):
        raise ConfigurationError(
            "expected verbalizers as one list of non-empty texts for each of at least two labels, found "
            f"{verbalizers!r}; a label with a single text is a list of one"
        )
    labels = tuple(tuple(dict.fromkeys(str(text) for text in row or ())) for row in rows)
    known: dict[str, int] = {}
    for place, text in ((place, text.strip()) for place, texts in enumerate(labels) for text in texts):
        if known.setdefault(text, place) != place:
            raise ConfigurationError(
                f"expected verbalizers that differ between labels, found {text!r} for two of them; give others"
            )
    return labels


def softmax(scores: Rows) -> Rows:
    """Returns float64[rows, texts] probabilities from log-likelihoods; NaN and infinities count as impossible."""
    with np.errstate(over="ignore", invalid="ignore"):
        weights = _exp(scores - np.maximum.reduce(scores, axis=1, keepdims=True))
    total = _in_order(weights)
    if math.isfinite(np.add.reduce(total, axis=None)):  # no NaN, and a finite best text in each row: the same numbers
        return weights / total
    finite = np.isfinite(scores)
    top = np.max(scores, axis=1, keepdims=True, where=finite, initial=-np.inf)  # -inf: every text is impossible
    with np.errstate(over="ignore", invalid="ignore"):
        weights = _exp(np.where(finite, scores - top, -np.inf))
    total = _in_order(weights)  # >= 1 unless all are impossible: the likeliest text counts 1
    return np.divide(weights, total, out=weights, where=total > 0.0)


def log_of_probabilities(scores: Rows) -> Rows:
    """Returns the exponentials of log-probabilities, scaled down where those of a row sum to more than 1."""
    weights = _exp(np.where(np.isfinite(scores), np.minimum(scores, 0.0), -np.inf))
    total = _in_order(weights)
    return np.divide(weights, total, out=weights, where=total > 1.0)


def per_label(texts: Rows, places: Sequence[int], width: int) -> Rows:
    """Returns float64[rows, width] label probabilities: the sums over each label's texts, in order."""
    out = np.zeros((len(texts), width))
    for column, place in enumerate(places):
        out[:, place] += texts[:, column]
    return out


def _exp(exponents: Rows) -> Rows:
    """Returns the exponential of each number alone: a vectorised one may round by the place in the array."""
    return np.fromiter(map(math.exp, exponents.ravel().tolist()), np.float64, exponents.size).reshape(exponents.shape)


def _in_order(weights: Rows) -> Rows:
    """Returns float64[rows, 1]: the sum of each row, added from the first column to the last."""
    return np.add.accumulate(weights, axis=1)[:, -1:]


def shares(reported: Iterable[tuple[int, float]], width: int) -> list[float]:
    """Returns [width] the labels' shares of their common mass; non-numbers count as 0.

    Zeros if there is none, or if more lies at `NO_LABEL`: what that says is unknown, and the rest would decide alone.
    """
    out = [0.0] * (width + 1)  # the last is that of `NO_LABEL`
    for place, value in reported:
        if 0.0 < value < math.inf:
            out[place] += min(value, 1.0)
    unknown, total = out.pop(), sum(out)
    return [value / total for value in out] if total > unknown else [0.0] * width


def calibrate_contextually(own: list[float], content_free: Sequence[list[float]], *, is_exact: bool) -> list[float]:
    """Returns `own` divided by the mean of `content_free`, renormalised.

    Content-free rows of zeros (their calls failed) are left out of the mean; without any other, or where `own` is
    zeros, `own` is returned as it is.

    Args:
      own: [labels] probabilities.
      content_free: [labels] probabilities each.
      is_exact: False: a label may go unreported, and then counts the smallest mean that is reported.

    Source: Zhao et al. (2021), section 4: W = diag(p_cf)^-1, b = 0.
    """
    answered = [row for row in content_free if any(row)] if content_free and any(own) else []
    if not answered:
        return own
    means = [sum(column) / len(answered) for column in zip(*answered, strict=True)]
    reported = min((mean for mean in means if mean > 0.0), default=0.0)  # a mean of the smallest numbers may be 0
    least = LEAST_WEIGHT if is_exact else max(LEAST_REPORTED, reported)
    ratios = [value / max(mean, least) for value, mean in zip(own, means, strict=True)]  # finite: own <= 1
    top = max(ratios)
    weights = [ratio / top for ratio in ratios]
    total = sum(weights)
    return [weight / total for weight in weights]


def tokens_of_vocabulary(
    labels: Sequence[Sequence[str]],
    decoded: Iterable[tuple[Token, str]],
    encode: Callable[[str], Sequence[Token]] | None = None,
    *,
    has_parts: bool = True,
    is_chat: bool = False,
) -> dict[Token, int]:
    """Returns the tokens that begin texts, with the place of their label, as `tokens_of_bytes`.

    A spelling that is a token, or whose first word is, is known to begin with it. Where tokens are bytes, parts of
    characters are among them if `has_parts`, as engines do not list these.
    """
    spelled = [(token, word if (word := text.lstrip()) == text else f" {word}") for token, text in decoded]
    words = {word for _, word in spelled}
    known = encode or (lambda text: [word.encode() for word in (text, _first_word(text)) if word in words])
    own = _own_beginnings(labels, known, has_parts)
    label_of: dict[Token, int] = {}
    for token, word in spelled:
        place = own.get(LOST if "\ufffd" in word else word.encode())
        if place is not None:
            label_of[token] = place
    if has_parts and any(isinstance(token, bytes) for token, _ in spelled):
        label_of |= {token: place for token, place in own.items() if not is_whole(token)}
    served = set(label_of.values()) & _served(labels, own, known, is_chat=is_chat, is_whole_known=encode is not None)
    return _each_has_one(labels, label_of, served)


def tokens_of_bytes(
    labels: Sequence[Sequence[str]],
    encode: Callable[[str], Sequence[Token]] | None = None,
    *,
    has_parts: bool = True,
    is_chat: bool = False,
) -> dict[Token, int]:
    """Returns the tokens that begin texts, of all byte strings that may be such a token, with the place of their label.

    With and without a space in front; as written, lower, upper and capitalised, as English and as Turkish do it; in the
    Unicode form as written and composed. A token may be a part of a character. Beginnings that run beyond the first
    token are included, but do not count as distinguishing. A beginning is no label's (`NO_LABEL`)

    - if it is shorter than the first token of the spelling, where that is known: another word, such as "Hi" of "High";
    - if spellings of several labels begin so, but for those with a longer first token, unless it is known to be the
      first token of one label alone as that is written, and none of the others as those are written;
    - if it may be a part of a character of a text, but the provider lost its bytes (`LOST`);
    - where the tokenizer is unknown, if it is a word in `STOP_WORDS` as sentences write them (" a", " in", " The"; "In"
      and "The" where the text is not written so), unless it is the text's own first word. "in" without a space and "IN"
      count: "in|voice" and "IN|VOICE" begin so, and an answer in words does not. So does " Out", cut " Out|age".

    A label needs a first token of its own as it is written, with a space in front or without; of a chat model, without
    where that is known.

    Args:
      labels: the texts of each label.
      encode: the model's tokenizer; None: unknown, so that first tokens end where those of usual tokenizers do.
      has_parts: whether the engine reports parts of characters; others may decode every token that they score.
      is_chat: whether the model's answers begin without a space.
    """
    own = _own_beginnings(labels, encode, has_parts)
    return _each_has_one(labels, own, _served(labels, own, encode, is_chat=is_chat), _GUESSED if encode is None else "")


def _each_has_one(
    labels: Sequence[Sequence[str]], label_of: dict[Any, int], served: set[int], advice: str = ""
) -> dict[Any, int]:
    missing = [texts for place, texts in enumerate(labels) if place not in served]
    if missing:
        raise ConfigurationError(
            "expected verbalizers whose first tokens distinguish the labels (this model reports next tokens only), "
            f"found no first token of its own for {missing!r}; give other verbalizers, of which none begins with the "
            "first token of another (of 'Q1' that is 'Q'), behind a space or without, and show them in the prompt, or "
            f'take votes="text"{advice}'
        )
    return label_of


def _own_beginnings(
    labels: Sequence[Sequence[str]], encode: Callable[[str], Sequence[Token]] | None, has_parts: bool
) -> dict[bytes, int]:
    """Returns the label of each beginning of a text, in bytes, with and without a space; see `tokens_of_bytes`."""
    claims: dict[bytes, dict[int, int]] = {}
    counting: set[bytes] = set()
    for place, texts in enumerate(labels):
        written = {form for text in texts for form in _forms(text)}
        for text in _all_spellings([texts]):
            first = _first_tokens(text, encode) if encode is not None else ()
            for space in (b"", b" "):
                known = tuple([token for token in first if token.startswith(b" ") == bool(space)])
                for length in range(1, len(text.encode()) + 1):
                    token, is_written = space + text.encode()[:length], text in written
                    # 0: shorter than a known first token; 1: a guess; 2: known; 3 and 4: so, of a text as written.
                    claim = 1 + bool(known) + 2 * is_written if not known or token.startswith(known) else 0
                    by_label = claims.setdefault(token, {})
                    by_label[place] = max(claim, by_label.get(place, 0))
                    if claim and not _is_other_word(token, text, is_written=is_written, is_first=bool(known)):
                        counting.add(token)
    own: dict[bytes, int] = {}
    for token, by_label in claims.items():
        if has_parts or is_whole(token):
            most = max(by_label.values())  # odd: a guess, which is no reason to prefer a label
            rivals = [place for place, claim in by_label.items() if most % 2 or claim >= most - 1]
            own[token] = rivals[0] if len(rivals) == 1 and token in counting else NO_LABEL
    return own if all(text.isascii() for texts in labels for text in texts) else own | {LOST: NO_LABEL}


def _served(
    labels: Sequence[Sequence[str]],
    own: Mapping[bytes, int],
    encode: Callable[[str], Sequence[Token]] | None,
    *,
    is_chat: bool,
    is_whole_known: bool = True,
) -> set[int]:
    """Returns the labels with a known first token of their own as rows show them; a chat model puts no space in front.

    Unless `is_whole_known`, also those with a text of which none is known.
    """
    served = set()
    for place, texts in enumerate(labels):
        of_texts = [[token for form in _forms(text) for token in _first_tokens(form, encode)] for text in texts]
        first = [*chain(*of_texts)]
        if is_whole_known:
            first = first or [token for text in _all_spellings([texts]) for token in _first_tokens(text, encode)]
        plain = [token for token in first if not token.startswith(b" ")]
        written = plain if is_chat and plain else first
        if any(own.get(token) == place for token in written) or not (is_whole_known or all(of_texts)):
            served.add(place)
    return served


def _first_tokens(text: str, encode: Callable[[str], Sequence[Token]] | None) -> list[bytes]:
    """Returns the first tokens of a text with and without a space that spell some of it, or the guess."""
    if encode is None:
        return [_first_piece(text).encode()]
    found, spelled = (*encode(text)[:1], *encode(f" {text}")[:1]), f" {text}".encode()
    tokens = [token for token in found if isinstance(token, bytes) and token.strip()]
    return [token for token in tokens if spelled.startswith((token, b" " + token))]


def _is_other_word(token: bytes, text: str, *, is_written: bool, is_first: bool) -> bool:
    """Whether a beginning that is shorter than the first word is a word by itself, written as sentences write it.

    So are the letters "a" and "I" where the label is written otherwise.

    Args:
      token: the beginning, with a space in front or without.
      text: a spelling of a label.
      is_written: whether the label is written so, as rows show it: an answer "Theft" then begins with "The".
      is_first: whether it is known to be the first token of the text, or longer.
    """
    beginning, word = token.decode("utf-8", "replace").lstrip(), _first_piece(text)
    is_other = len(beginning) < len(word) and not is_first if len(word) > 1 else not is_written
    if not is_other or beginning.casefold() not in _OPENERS:
        return False
    has_space = token.startswith(b" ")
    as_first = beginning.istitle() and (has_space or len(beginning) == 1 or not is_written)
    return as_first or (has_space and beginning.islower())


def _first_piece(text: str) -> str:
    piece = _FIRST_PIECE.match(text)
    return piece[0] if piece is not None else text


def _first_word(text: str) -> str:
    """Returns the first piece of a text that may have a space in front, with that space."""
    plain = text.removeprefix(" ")
    return text[: len(text) - len(plain)] + _first_piece(plain)


def _all_spellings(labels: Sequence[Sequence[str]]) -> Iterator[str]:
    return chain.from_iterable(map(_spellings, chain.from_iterable(labels)))


def _forms(text: str) -> tuple[str, ...]:
    """Returns a text as it is and in composed Unicode, as models write it."""
    return tuple(dict.fromkeys((text.strip(), unicodedata.normalize("NFC", text.strip()))))


def _spellings(text: str) -> Iterator[str]:
    """Yields the forms of a text in other cases too."""
    for plain in _forms(text):
        if _first_piece(plain).casefold() in {"a", "i"}:
            yield from (plain, plain.swapcase())
            continue
        folded = plain.casefold()  # "ss" in place of a sharp s
        cases = [plain, plain.lower(), plain.capitalize(), plain.upper(), folded, folded.capitalize()]
        if plain[0] in "iI" or not plain.isascii():
            lower, upper = plain.translate(_TURKISH_LOWER).lower(), plain.translate(_TURKISH_UPPER).upper()
            cases += [lower, upper[:1] + lower[1:], upper]
        yield from dict.fromkeys(cases)


def _check_sequence(values: object) -> Sequence[object] | None:
    return values if isinstance(values, Sequence) and not isinstance(values, str | bytes) else None


def _is_text(text: object) -> bool:
    """Whether it is a non-blank text that can be encoded (a lone surrogate cannot)."""
    return (
        isinstance(text, str)
        and bool(text.strip())
        and not any("\ud800" <= character <= "\udfff" for character in text)
    )


_LOG_PROBABILITY_KINDS = frozenset({"decisions", "text votes"})


@runtime_checkable
class OtherBackend(PublicChoiceBackend, Protocol):
    """Distinguishes an answer that names no choice from a failed call, for private prompts too."""

    def score_with_other(self, prompts: Sequence[str], choices: Sequence[str]) -> Rows:
        """Returns float64[prompts, choices + 1]: `score_choices`, and last 0 where an answer names no choice.

        Only a row that failed is -inf everywhere.
        """

    async def ascore_with_other(self, prompts: Sequence[str], choices: Sequence[str]) -> Rows:
        """Async twin of `score_with_other`."""


@runtime_checkable
class FirstTokenBackend(NextTokenBackend, Protocol):
    """Reports of a public prompt's first token what it reports of a private one's."""

    def first_tokens(self, prompt: str) -> list[tuple[Token, float]]:
        """Returns all that is reported after a PUBLIC prompt, likeliest first, parts of characters among it.

        Raises:
          ModelCallError: the call failed.
        """

    async def afirst_tokens(self, prompt: str) -> list[tuple[Token, float]]:
        """Async twin of `first_tokens`."""


def label_scorer(engine: Any, labels: tuple[tuple[str, ...], ...], *, other: bool = False) -> Scorer:
    """Returns the best way to score labels that the engine allows; `other`: a last column for answers without one."""
    if isinstance(engine, ChoiceBackend):
        choices = _Choices(engine, labels)
        scorer = _WithOther(engine, choices) if other else choices
        scorer.check_form()
        return scorer
    if isinstance(engine, NextTokenBackend):
        if other:
            raise _no_other(_FirstTokens.kind)
        return _FirstTokens(engine, labels)
    raise CapabilityError(
        f"expected an engine that scores choices or next tokens, found {type(engine).__name__}; see "
        "backends.resolve.as_choice_backend"
    )


class Scorer(ABC):
    """One way to score labels; calls may raise, reading scores may not."""

    kind: str
    width: int
    columns: int
    is_exact: bool
    """Whether every label has a likelihood; False: one without a probability may have gone unreported."""

    has_public_calls: bool
    """Whether `public` tells a failed call from an answer without a label, by a call that may be tried for minutes."""

    calls_at_once: int = 1
    """Calls of a model elsewhere in flight at once; 1: a public call gains nothing beside others."""

    method: str = ""
    """The engine's method of private prompts alone; "": public ones go through it too, which shows the form of rows."""

    _has_awaited_form: bool = False

    def check_form(self) -> None:
        """Refuses an engine whose private rows have a form that nobody reads, or to which labels are ambiguous."""
        if self.method:
            _check_form(self.score([]).run(), self.method)

    async def acheck_form(self) -> None:
        """As `check_form`, of the awaited method; no constructor can await it, so the first query does, uncharged."""
        if self.method and not self._has_awaited_form:
            _check_form(await self.score([]).arun(), f"a{self.method}")
            self._has_awaited_form = True

    @abstractmethod
    def score(self, prompts: Sequence[str]) -> Effect:
        """Returns the effect that computes float64[prompts, columns] for private prompts, in one call."""

    @abstractmethod
    def read(self, scores: Rows) -> Rows:
        """Returns float64[prompts, width] label probabilities from float64[prompts, columns], each row alone."""

    @abstractmethod
    def public(self, prompt: str) -> EffectGenerator[list[float]]:
        """Returns the label probabilities of one public prompt; raises where its call failed (an effect generator)."""

    def of_batches(self, *, needs_text: bool) -> Scorer:  # noqa: ARG002  an override does
        """Returns the scorer of many public prompts: this one, or one that reports more about failed calls.

        Args:
          needs_text: whether an answer without text, where only text is written, is an error.
        """
        return self

    def batch(self, rows: object, num_prompts: int) -> list[list[float] | None]:
        """Returns the label probabilities after each public prompt; None if the call failed or no label is named."""
        scores = fitting(rows, num_prompts, self.columns)
        if scores is None:
            raise _misshapen(num_prompts, self.columns)
        return [row if any(row) else None for row in self.read(scores).tolist()]


class _Choices(Scorer):
    """Scores complete texts."""

    def __init__(self, engine: ChoiceBackend, labels: tuple[tuple[str, ...], ...]) -> None:
        self.kind = engine.kind if isinstance(engine, PublicChoiceBackend) else "whole labels"
        self._reading = log_of_probabilities if self.kind in _LOG_PROBABILITY_KINDS else softmax
        self.is_exact = self.kind not in _LOG_PROBABILITY_KINDS
        own = tuple(map(_distinguishable_texts, labels)) if self.kind in _LOG_PROBABILITY_KINDS else labels
        self.texts = tuple(text for texts in own for text in texts)
        self.places = tuple(place for place, texts in enumerate(own) for _ in texts)
        self.width, self.columns = len(own), len(self.texts)
        self._engine = engine
        self._public = engine if isinstance(engine, PublicChoiceBackend) else None
        self.has_public_calls = self._public is not None
        self.calls_at_once = calls_at_once(engine)
        self.method = "" if self._public is None else "score_choices"

    def score(self, prompts: Sequence[str]) -> Effect:
        return Call(
            lambda: self._engine.score_choices(prompts, self.texts),
            lambda: self._engine.ascore_choices(prompts, self.texts),
        )

    def read(self, scores: Rows) -> Rows:
        texts = self._reading(scores)
        return texts if self.columns == self.width else per_label(texts, self.places, self.width)

    def of_batches(self, *, needs_text: bool) -> Scorer:
        tells = self.kind == "text votes" and isinstance(self._engine, OtherBackend)
        return _WithOther(self._engine, self, is_counted=not needs_text) if tells else self

    def public(self, prompt: str) -> EffectGenerator[list[float]]:
        engine = self._public
        if engine is None:
            return self._answer((yield self.score([prompt])))
        yield Call(lambda: None, self.acheck_form)  # the constructor has checked the blocking method
        row = yield Call(
            lambda: engine.score_public(prompt, self.texts), lambda: engine.ascore_public(prompt, self.texts)
        )
        return self._answer(row[None])

    def _answer(self, scores: Rows) -> list[float]:
        fitted = fitting(scores, 1, self.columns)
        if fitted is None:
            raise _misshapen(1, self.columns)
        row: list[float] = self.read(fitted)[0].tolist()
        if not any(row) and self._public is None:  # by its contract the call failed
            raise ModelCallError(
                "the engine has no likelihood for any label after a public prompt; check the model and the length of "
                "the prompt, then call again"
            )
        return row


class _WithOther(Scorer):
    """Scores complete texts, with one more column for answers that name none of them; for text votes only."""

    method = "score_with_other"

    def __init__(self, engine: ChoiceBackend, choices: _Choices, *, is_counted: bool = True) -> None:
        if choices.kind != "text votes":
            raise _no_other(choices.kind)
        if not isinstance(engine, OtherBackend):
            raise CapabilityError(
                "expected with other=True an engine that distinguishes an answer without a label from a failed call "
                f"(score_with_other), found {type(engine).__name__}; take TextVoteBackend, or other=False"
            )
        self._engine, self._choices, self._is_counted = engine, choices, is_counted
        self.kind, self.is_exact, self.has_public_calls = choices.kind, choices.is_exact, choices.has_public_calls
        self.calls_at_once = choices.calls_at_once
        self.width, self.columns = choices.width + 1, choices.columns + 1
        self._places = (*choices.places, choices.width)

    def score(self, prompts: Sequence[str]) -> Effect:
        return Call(
            lambda: self._engine.score_with_other(prompts, self._choices.texts),
            lambda: self._engine.ascore_with_other(prompts, self._choices.texts),
        )

    def read(self, scores: Rows) -> Rows:
        return per_label(log_of_probabilities(scores), self._places, self.width)

    def of_batches(self, *, needs_text: bool) -> Scorer:
        return _WithOther(self._engine, self._choices, is_counted=not needs_text)

    def public(self, prompt: str) -> EffectGenerator[list[float]]:
        yield Call(lambda: None, self.acheck_form)  # the constructor has checked the blocking method
        try:
            row = yield from self._choices.public(prompt)
        except BlankAnswerError:
            if not self._is_counted:
                raise
            row = [0.0] * self._choices.width
        return _or_other(row)


class _FirstTokens(Scorer):
    """Scores the tokens that labels begin with."""

    kind = "first tokens"
    is_exact = False
    has_public_calls = True

    def __init__(self, engine: NextTokenBackend, labels: tuple[tuple[str, ...], ...]) -> None:
        self._engine = engine
        self.calls_at_once = calls_at_once(engine)
        self._place_of = _own_tokens(engine, labels)
        self._domain = tuple(self._place_of)
        self._places = tuple(self._place_of.values())
        self.width, self.columns = len(labels), len(self._domain)

    def score(self, prompts: Sequence[str]) -> Effect:
        return Walk(partial(self._score, prompts))

    def _score(self, prompts: Sequence[str]) -> EffectGenerator[Rows]:
        with contextlib.closing(self._engine.open(prompts, ())) as session:
            rows: Rows = yield Call(lambda: session.score(self._domain), lambda: session.ascore(self._domain))
            return rows

    def read(self, scores: Rows) -> Rows:
        per_row: list[list[tuple[int, float]]] = [[] for _ in scores]
        at, columns = scores.nonzero()  # few: a top-k engine reports at most k of all beginnings
        for row, column, value in zip(at.tolist(), columns.tolist(), scores[at, columns].tolist(), strict=True):
            per_row[row].append((self._places[column], value))
        return np.array([shares(own, self.width) for own in per_row]).reshape(len(per_row), self.width)

    def public(self, prompt: str) -> EffectGenerator[list[float]]:
        return self._shares((yield self._top_tokens(prompt)))

    def _top_tokens(self, prompt: str) -> TopTokenRequest | Call:
        engine = self._engine
        if isinstance(engine, FirstTokenBackend):
            return Call(lambda: engine.first_tokens(prompt), lambda: engine.afirst_tokens(prompt))
        limit = engine.max_top_k
        return TopTokenRequest(engine, prompt, (), len(engine.vocabulary()) if limit is None else limit)

    def _shares(self, tokens: Sequence[tuple[Token, float]]) -> list[float]:
        own = self._place_of
        return shares([(own[token], value) for token, value in tokens if token in own], self.width)


def _or_other(row: list[float]) -> list[float]:
    """Returns the row of a public prompt whose call succeeded, with the column of answers without a label."""
    return [*row, 0.0 if any(row) else 1.0]


def _own_tokens(engine: NextTokenBackend, labels: tuple[tuple[str, ...], ...]) -> dict[Token, int]:
    has_parts, is_chat = isinstance(engine, FirstTokenBackend), bool(getattr(engine, "is_chat", False))
    read: Callable[..., dict[Token, int]] = partial(tokens_of_bytes, labels, has_parts=has_parts, is_chat=is_chat)
    if engine.max_top_k is None:
        spelled = [(key, engine.decode([key])) for key in engine.vocabulary()]
        read = partial(tokens_of_vocabulary, labels, spelled, has_parts=has_parts, is_chat=is_chat)
    elif not isinstance(engine.eos, bytes):
        raise CapabilityError(
            f"expected top tokens with their bytes as keys, found keys of type {type(engine.eos).__name__}: without a "
            'vocabulary their texts are not known; take an engine with a vocabulary, or votes="text"'
        )
    spell: Callable[[str], Sequence[Token]] | None = getattr(engine, "spell", None)
    with contextlib.suppress(CapabilityError):  # its tokenizer is unknown
        return read(spell)
    return read()


def _distinguishable_texts(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the texts of one label that an answer can distinguish, the first of those that it cannot."""
    distinct: list[str] = []
    for text in texts:
        with contextlib.suppress(ConfigurationError):  # the rule is that of `ChoiceNames`; each text is known to be one
            ChoiceNames([*distinct, text])
            distinct.append(text)
    return tuple(distinct)


def _no_other(kind: str) -> ConfigurationError:
    return ConfigurationError(
        f"expected other=True with text votes only, found {kind!r}: this kind divides all "
        'probability among the labels, so every answer has one; pass other=False, or votes="text"'
    )


def _check_form(rows: object, method: str) -> None:
    """Raises CapabilityError where the rows of no prompts show that those of any private prompts would not be read."""
    if not isinstance(rows, np.ndarray) or rows.dtype.kind != "f":
        raise CapabilityError(
            f"expected a float64 array from the engine's {method}, for no prompts too, found "
            f"{getattr(rows, 'dtype', type(rows).__name__)}. Return np.array(rows, dtype=np.float64)"
        )


def _misshapen(num_prompts: int, columns: int) -> ModelCallError:
    return ModelCallError(
        f"expected float64[{num_prompts}, {columns}] for public prompts, found an answer of another shape or type; "
        "check the engine"
    )


def fitting(rows: object, num_rows: int, columns: int) -> Rows | None:
    """Returns float64[num_rows, columns], or None for anything else."""
    if not isinstance(rows, np.ndarray) or rows.shape != (num_rows, columns) or rows.dtype.kind != "f":
        return None
    if type(rows) is np.ndarray and rows.dtype == np.float64:
        return rows
    with np.errstate(all="ignore"):  # a wider number may not fit
        return np.asarray(rows, dtype=np.float64)


MOST_AT_ONCE = 64
"""Public prompts per call of the engine, content-free ones included."""

_NO_LABEL = (
    "The answer to a public prompt gives no label any probability ({}): rows with such answers {}. Rows that show "
    'records can name one where only records show how it is written (" X", "3"). Say in the prompt that a label is '
    "wanted, give verbalizers that begin differently, as the model writes them, or its tokenizer "
    "(LangChainBackend(llm, tokenizer=...)), or switch its thinking off; where the model writes the space before a "
    "label as a token of its own, end the prompt with a space."
)
_ABSTAIN = "abstain too, private ones at the full charge, and if all do, noise alone decides"
_COUNT_FOR_NONE = "count for none, private ones at the full charge, and if all do, the input gets no label"

_ALONE_AT_ONCE = 8
"""Public prompts that are asked again at once, each alone, where every error is kept."""

LabelScores: TypeAlias = list[float]
"""The probability of each label after one prompt; zeros: its answer names no label."""

Prompts: TypeAlias = tuple[tuple[str, ...] | None, ...]
"""One entry per row: (prompt with the query, prompt with content-free input 1, ...); None: the row abstains."""


def check_room(engine: object, prompts: Sequence[str]) -> EffectGenerator[None]:
    """Raises ModelCallError for a PUBLIC prompt that the engine would cut; asks nothing (an effect generator)."""
    check: Callable[[str], None] | None = getattr(engine, "check_public", None)  # of engines that cut prompts
    if check is None:
        return
    for prompt in prompts:
        yield Blocking(partial(check, prompt))


class LabelRows:
    """Label probabilities of private prompts, one row each.

    What is read depends on the engine (`kind`):

    - "whole labels": the likelihoods of all texts, normalised over them and summed per label.
    - "decisions": the probabilities as the model gives them, summed per label; they may sum to less than 1.
    - "text votes": 1 for the label that the answer names, or zeros.
    - "first tokens": the probability of the tokens that begin texts of one label alone, renormalised over the labels.
      The tokens are chosen at construction, from the vocabulary, or from the texts and the tokenizer, if known, and
      are public; see `tokens_of_bytes`.

    Calibrated rows are divided by the mean of the same row's probabilities on its content-free prompts and
    renormalised (Zhao et al., 2021). A content-free prompt that failed is left out of the mean; without any, the row
    stays uncalibrated.

    With `other`, one more column at the end is 1 where an answer names no label: a refusal, say, or an empty text. A
    row that failed stays zeros.

    Formal guarantees:
      - Row i is a function of its own prompts, the texts and public settings alone: no prompt, failure or number of
        other rows moves a bit of it, wherever the engine's own rows have that property.
      - Each row is >= 0 and sums to <= 1 (up to rounding); it is zeros where it is None or its query's call failed.
      - Nothing raises for the content of a prompt; nothing of a prompt is kept once its `Effect` has answered.

    Args:
      engine: scores choices, or next tokens.
      verbalizers: the texts of each label, which may be several; public, taken verbatim.
      calibrate: whether content-free prompts are scored and divided by.
      other: whether answers that name no label are counted; for text votes alone.

    Raises:
      ConfigurationError: the verbalizers are no lists of texts, two labels share one, or the engine cannot tell the
        labels apart; or text votes are to be calibrated, or other answers to be counted where there are none.
      CapabilityError: the engine scores neither choices nor next tokens, or reports top tokens that are not bytes; or
        it cannot tell an answer without a label from a failed call, and `other` is asked for.

    >>> from langchain_dpicl.backends.fake import FakeBackend, scripted
    >>> fake = FakeBackend(scripted({" card": 0.5, " cash": 0.25, " coin": 0.25}), max_top_k=3)
    >>> rows = LabelRows(fake, [[" card"], [" cash", " coin"]], calibrate=False)
    >>> rows.kind, rows.ask((("a private prompt",), None)).run().take().tolist()
    ('whole labels', [[0.5, 0.5], [0.0, 0.0]])
    """

    def __init__(
        self,
        engine: ChoiceBackend | NextTokenBackend,
        verbalizers: Sequence[Sequence[str]],
        *,
        calibrate: bool,
        other: bool = False,
    ) -> None:
        labels = check_verbalizers(verbalizers)
        self._engine = engine
        self._scorer = label_scorer(engine, labels, other=other)
        self._other = bool(other)
        if calibrate and self._scorer.kind == "text votes":
            raise ConfigurationError(
                f"expected calibrate=False with text votes, found calibrate={calibrate!r}: a text vote has no "
                "probabilities; take a model with logprobs to calibrate"
            )
        self._calibrate = bool(calibrate)
        self._outage = Outage()
        self._has_warned = False

    def __repr__(self) -> str:
        counts = ", counts_other=True" if self._other else ""
        return f"LabelRows(kind={self.kind!r}, width={self.width}, calibrates={self._calibrate}{counts})"

    @property
    def kind(self) -> str:
        """What is read of the engine: "whole labels", "decisions", "first tokens" or "text votes"."""
        return self._scorer.kind

    @property
    def width(self) -> int:
        """Number of labels, and one more where other answers are counted."""
        return self._scorer.width

    @property
    def calibrates(self) -> bool:
        """Whether probabilities are divided by those on content-free prompts."""
        return self._calibrate

    @property
    def counts_other(self) -> bool:
        """Whether the last column counts answers that name no label."""
        return self._other

    def ask(self, prompts: Prompts) -> Effect:
        """Returns the effect that computes float64[prompts, width], boxed; it runs once.

        Args:
          prompts: PRIVATE; see `Prompts`. Without calibration only the first prompt of a row is scored.
        """
        asked = prompts if self._calibrate else tuple([row and row[:1] for row in prompts])
        return _LabelRequest(self._engine, self._scorer, asked)

    def request_public_rows(self, prompts: Sequence[tuple[str, ...]], *, needs_text: bool = False) -> Effect:
        """Returns the effect that computes float64[prompts, width] after PUBLIC prompts; zeros: no label is named.

        Args:
          prompts: (prompt with the query, prompt with content-free input 1, ...) each.
          needs_text: whether an answer without text, and a prompt that the engine would cut, count as failed calls, as
            of prompts that stand for private ones: all those may be answered as blankly, and keep no record.

        The answer raises ModelCallError where a call failed, one on a content-free input included. The first without a
        label warns (`NoisyPlanWarning`).
        """
        return Walk(lambda: self._public_rows(prompts, needs_text=needs_text))

    def _public_rows(
        self, prompts: Sequence[tuple[str, ...]], *, needs_text: bool
    ) -> EffectGenerator[NDArray[np.float64]]:
        asked = [row if self._calibrate else row[:1] for row in prompts]
        texts = [text for row in asked for text in row]
        scores: Mapping[str, LabelScores] = yield self.request_public_texts(
            texts, is_whole=needs_text, needs_text=needs_text
        )
        rows = [self.calibrated(scores[own], [scores[text] for text in free]) for own, *free in asked]
        labels = self.width - self._other  # a column behind them counts answers without one
        if not all(any(row[:labels]) for row in rows):
            self._warn_without_label()
        return np.array(rows, dtype=np.float64).reshape(len(rows), self.width)

    def public_row(self, prompts: tuple[str, ...]) -> PublicAnswer:
        """Returns the effect for float64[1, width] after one PUBLIC row of prompts; raises as `request_public_rows`."""
        return PublicAnswer(lambda: self.request_public_rows([prompts], needs_text=True), self._outage)

    def check_room(self, texts: Sequence[str]) -> EffectGenerator[None]:
        """Raises ModelCallError for a PUBLIC prompt that the engine would cut; asks nothing (an effect generator)."""
        return check_room(self._engine, texts)

    def asks_beside(self, limit: int | None) -> bool:
        """Whether a public row goes beside private ones: the model is elsewhere, many calls overlap, and it answered.

        Args:
          limit: calls that may be in flight at once; None: as many as the engine makes.
        """
        most = self._scorer.calls_at_once
        return min(most, limit or most) >= LEAST_BESIDE and not self._outage.is_on

    def request_checks(self) -> Effect:
        """Returns the effect that refuses, before a ticket, what a public call that goes first would; asks no prompt.

        It raises UnsilencableModelError where others would hear the private rows, CapabilityError where awaited ones
        have a form that nobody reads.
        """
        return Call(partial(check_silent, self._engine), self._acheck)

    async def _acheck(self) -> None:
        check_silent(self._engine)
        await apublic_call(self._scorer.acheck_form)

    def request_public_texts(
        self, texts: Sequence[str], *, is_whole: bool, keep_errors: bool = False, needs_text: bool = False
    ) -> Effect:
        """Returns the effect that computes a dict from each PUBLIC text to its uncalibrated `LabelScores`.

        The first goes alone where the engine has public calls, which detects an outage at once, and the others go in
        batches; a repeated one is scored once. One that failed in its batch is scored again alone, and so is one whose
        answer names no label if the engine's batches do not distinguish that from a failure.

        Args:
          texts: complete prompts.
          is_whole: whether a text that the engine would cut counts as a failed call.
          keep_errors: whether a failed call's ModelCallError takes the place of its scores; else the first is raised,
            and no further batch is asked.
          needs_text: see `request_public_rows`.
        """
        scorer = self._scorer.of_batches(needs_text=needs_text)
        check = getattr(self._engine, "check_public", None) if is_whole else None  # of engines that cut prompts
        return _PublicTextsRequest(scorer, tuple(dict.fromkeys(texts)), self.width, keep_errors, check)

    def calibrated(self, own: LabelScores, free: Sequence[LabelScores]) -> LabelScores:
        """Returns scores divided by the mean of those after content-free prompts; see `calibrate_contextually`."""
        return calibrate_contextually(own, free, is_exact=self._scorer.is_exact)

    def _warn_without_label(self) -> None:
        """Warns, once, that a PUBLIC prompt was answered without a label."""
        if not self._has_warned:
            self._has_warned = True  # before: where warnings are errors, the next answer is not lost as well
            effect = _COUNT_FOR_NONE if self._other else _ABSTAIN
            warn_caller(NoisyPlanWarning(_NO_LABEL.format(self.kind, effect)))


@dataclass(slots=True, repr=False, eq=False)
class _LabelRequest:
    """Computes the private rows of one release, for the aggregation alone."""

    engine: object
    scorer: Scorer
    prompts: Prompts
    is_answered: bool = field(default=False)

    def run(self) -> OpaqueRows:
        self._once()
        try:
            start_calls(self.engine)
            # The frames below hold private values; a stop is raised again from a frame without them.
            return Guarded(self._rows).run() or self._nothing()
        finally:
            self.prompts = ()

    async def arun(self) -> OpaqueRows:
        self._once()
        try:
            return await Guarded(self._rows).arun() or self._nothing()
        finally:
            self.prompts = ()

    def _once(self) -> None:
        """Refuses a second run, which would have no rows, as if every record were gone."""
        if self.is_answered:
            raise ConfigurationError("expected one call, found a second; make new rows for each query")
        self.is_answered = True

    def _nothing(self) -> OpaqueRows:
        return OpaqueRows(self._empty(len(self.prompts)))

    def _texts(self) -> list[str]:
        return [text for row in self.prompts if row for text in row]

    def _rows(self) -> EffectGenerator[OpaqueRows]:
        texts = self._texts()
        found = (yield Guarded(partial(self._score, texts))) if texts else self._empty(0)
        if found is None:
            found = self._empty(len(texts))
            for place, text in enumerate(texts):
                one = yield Guarded(partial(self._score, [text]))
                found[place] = 0.0 if one is None else one[0]
        return self._spread(found)

    def _score(self, texts: list[str]) -> EffectGenerator[Rows | None]:
        fitted = fitting((yield self.scorer.score(texts)), len(texts), self.scorer.columns)
        return None if fitted is None else self.scorer.read(fitted)

    def _empty(self, num_texts: int) -> Rows:
        return np.zeros((num_texts, self.scorer.width))

    def _spread(self, found: Rows) -> OpaqueRows:
        """Makes each row of the probabilities after its own prompts, which are adjacent; one that failed is zeros."""
        if len(found) == len(self.prompts) and None not in self.prompts:  # one prompt each, in their order
            return OpaqueRows(np.array(found, dtype=np.float64))
        rows = self._empty(len(self.prompts))
        first = 0
        for place, texts in enumerate(self.prompts):
            if texts:
                rows[place] = found[first] if len(texts) == 1 else self._calibrated(found[first : first + len(texts)])
                first += len(texts)
        return OpaqueRows(rows)

    def _calibrated(self, found: Rows) -> LabelScores | float:
        own, *free = found.tolist()
        row = run_guarded(lambda: calibrate_contextually(own, free, is_exact=self.scorer.is_exact))
        return 0.0 if row is None else row


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class _PublicTextsRequest:
    """Computes the label scores after each of many public texts."""

    scorer: Scorer
    texts: tuple[str, ...]
    width: int
    keep_errors: bool
    check: Callable[[str], None] | None

    def run(self) -> dict[str, LabelScores | ModelCallError]:
        return public_call(lambda: run_sync(self._score()))

    async def arun(self) -> dict[str, LabelScores | ModelCallError]:
        return await apublic_call(lambda: run_async(self._score()))

    def _score(self) -> EffectGenerator[dict[str, LabelScores | ModelCallError]]:
        found: dict[str, LabelScores | ModelCallError] = {}
        if self.check is not None:
            found |= yield Blocking(partial(self._refused, self.check))
        texts = [text for text in self.texts if text not in found]
        num_alone = int(self.scorer.has_public_calls or len(texts) == 1)
        found |= yield self._each_alone(texts[:num_alone])
        for first in range(num_alone, len(texts), MOST_AT_ONCE):
            batch = texts[first : first + MOST_AT_ONCE]
            read = self._read(batch, (yield self.scorer.score(batch)))
            found |= read | (yield self._each_alone([text for text in batch if text not in read]))
        return found

    def _refused(self, check: Callable[[str], None]) -> dict[str, ModelCallError]:
        """Returns what is wrong with the texts that the engine would cut, or raises it."""
        refused = {}
        for text in self.texts:
            try:
                check(text)
            except ModelCallError as error:
                if not self.keep_errors:
                    raise
                refused[text] = error
        return refused

    def _each_alone(self, texts: Sequence[str]) -> Call:
        return Call(partial(self._alone, texts), partial(self._aalone, texts))

    def _read(self, texts: Sequence[str], scores: object) -> dict[str, LabelScores | ModelCallError]:
        rows = self.scorer.batch(scores, len(texts))
        return {text: row[: self.width] for text, row in zip(texts, rows, strict=True) if row is not None}

    def _alone(self, texts: Sequence[str]) -> dict[str, LabelScores | ModelCallError]:
        if not self.keep_errors:
            return {text: run_sync(self.scorer.public(text))[: self.width] for text in texts}

        def ask(text: str) -> LabelScores | ModelCallError:
            try:
                return public_call(lambda: run_sync(self.scorer.public(text)))[: self.width]
            except ModelCallError as error:
                return error

        with ThreadPoolExecutor(concurrency_limit() or _ALONE_AT_ONCE) as pool:
            return dict(zip(texts, pool.map(ask, texts), strict=True))

    async def _aalone(self, texts: Sequence[str]) -> dict[str, LabelScores | ModelCallError]:
        if not self.keep_errors:
            return {text: (await run_async(self.scorer.public(text)))[: self.width] for text in texts}
        gate = asyncio.Semaphore(concurrency_limit() or _ALONE_AT_ONCE)

        async def ask(text: str) -> LabelScores | ModelCallError:
            async with gate:
                try:
                    return (await apublic_call(lambda: run_async(self.scorer.public(text))))[: self.width]
                except ModelCallError as error:
                    return error

        return dict(zip(texts, await asyncio.gather(*map(ask, texts)), strict=True))
