"""Asks an engine for scores of labels, and reads label probabilities from them."""

from __future__ import annotations

import contextlib
import math
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import numpy as np

from langchain_dpicl.backends.base import ChoiceBackend, NextTokenBackend, PublicChoiceBackend, Rows, Token
from langchain_dpicl.backends.langchain.texts import ChoiceNames
from langchain_dpicl.backends.rows.public_beside import calls_at_once
from langchain_dpicl.backends.sync_async import TopTokenRequest
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError, ModelCallError

# All readers compute each row from its own numbers, in order, by operations that IEEE 754 rounds one by one: a row's
# numbers cannot depend on its place or on other rows. No number makes a reader raise.
LEAST_WEIGHT = sys.float_info.min
"""Least content-free probability to divide by, where every label has a likelihood."""

LEAST_REPORTED = 1e-6
"""The same where labels may go unreported: that is no proof that they are impossible."""

# Tokenizers cut before white space and before a sign inside a word; what is behind the cut is never in a first token.
_FIRST_WORD = re.compile(r".[^\s!-/:-@\[-`{-~]*", re.DOTALL)


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
    finite = np.isfinite(scores)
    if finite.all():  # the same numbers, in fewer steps
        with np.errstate(over="ignore"):
            weights = _exp(scores - scores.max(axis=1, keepdims=True))
        return weights / _in_order(weights)
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
    """Returns [width] the labels' shares of their common mass, zeros if there is none; non-numbers count as 0."""
    out = [0.0] * width
    for place, value in reported:
        if 0.0 < value < math.inf:
            out[place] += min(value, 1.0)
    total = sum(out)
    return [value / total for value in out] if total > 0.0 else out


def calibrate_contextually(own: list[float], content_free: Sequence[list[float]], *, least: float) -> list[float]:
    """Returns `own` divided by the mean of `content_free`, renormalised.

    Content-free rows of zeros (their calls failed) are left out of the mean; without any other, or where `own` is
    zeros, `own` is returned as it is.

    Source: Zhao et al. (2021), section 4: W = diag(p_cf)^-1, b = 0.
    """
    answered = [row for row in content_free if any(row)] if content_free and any(own) else []
    if not answered:
        return own
    means = [sum(column) / len(answered) for column in zip(*answered, strict=True)]
    ratios = [value / max(mean, least) for value, mean in zip(own, means, strict=True)]  # finite: own <= 1
    top = max(ratios)
    weights = [ratio / top for ratio in ratios]
    total = sum(weights)
    return [weight / total for weight in weights]


def tokens_of_vocabulary(labels: Sequence[Sequence[str]], decoded: Iterable[tuple[Token, str]]) -> dict[Token, int]:
    """Returns the tokens that begin texts of exactly one label, with that label's place; case does not count."""
    begun = _beginnings(labels)
    label_of: dict[Token, int] = {}
    for token, text in decoded:
        place = begun.get(text.lstrip().casefold())
        if place is not None:
            label_of[token] = place
    return _each_has_one(labels, label_of, set(label_of.values()))


def tokens_of_bytes(labels: Sequence[Sequence[str]]) -> dict[Token, int]:
    """Returns what `tokens_of_vocabulary` does for an unknown vocabulary: every byte string that may be such a token.

    With and without a space in front; as written, lower, upper and capitalised; whole characters only. Beginnings that
    run beyond the first word are included, but do not count as distinguishing, as tokens hardly ever do.
    """
    begun = _beginnings(labels)
    label_of: dict[Token, int] = {}
    served: set[int] = set()
    for text in chain.from_iterable(map(_spellings, chain.from_iterable(labels))):
        word = _FIRST_WORD.match(text)
        for length in range(1, len(text) + 1):
            place = begun.get(text[:length].casefold())
            if place is not None:
                token = text[:length].encode()
                label_of[token] = label_of[b" " + token] = place
                if word is not None and length <= word.end():
                    served.add(place)
    return _each_has_one(labels, label_of, served)


def _each_has_one(labels: Sequence[Sequence[str]], label_of: dict[Token, int], served: set[int]) -> dict[Token, int]:
    missing = [texts for place, texts in enumerate(labels) if place not in served]
    if missing:
        raise ConfigurationError(
            "expected verbalizers whose first tokens distinguish the labels (this model reports next tokens only), "
            f"found no first token of its own for {missing!r}; give other verbalizers, of which none begins with "
            'the first word of another, or take votes="text"'
        )
    return label_of


def _beginnings(labels: Sequence[Sequence[str]]) -> dict[str, int | None]:
    """Returns every beginning of a case-folded text and its label; None where texts of several labels begin so."""
    begun: dict[str, int | None] = {}
    for place, texts in enumerate(labels):
        for text in texts:
            folded = text.strip().casefold()
            for length in range(1, len(folded) + 1):
                beginning = folded[:length]
                begun[beginning] = place if begun.get(beginning, place) == place else None
    return begun


def _spellings(text: str) -> Iterator[str]:
    plain = text.strip()
    yield from dict.fromkeys((plain, plain.lower(), plain.capitalize(), plain.upper()))


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


def label_scorer(engine: Any, labels: tuple[tuple[str, ...], ...], *, other: bool = False) -> Scorer:
    """Returns the best way to score labels that the engine allows; `other`: a last column for answers without one."""
    if isinstance(engine, ChoiceBackend):
        choices = _Choices(engine, labels)
        return _WithOther(engine, choices) if other else choices
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
    least: float
    has_public_calls: bool
    """Whether `public` tells a failed call from an answer without a label, by a call that may be tried for minutes."""

    calls_at_once: int = 1
    """Calls of a model elsewhere in flight at once; 1: a public call gains nothing beside others."""

    @abstractmethod
    def score(self, prompts: Sequence[str]) -> Rows:
        """Returns float64[prompts, columns] for private prompts, in one call."""

    @abstractmethod
    async def ascore(self, prompts: Sequence[str]) -> Rows:
        """Async twin of `score`."""

    @abstractmethod
    def read(self, scores: Rows) -> Rows:
        """Returns float64[prompts, width] label probabilities from float64[prompts, columns], each row alone."""

    @abstractmethod
    def public(self, prompt: str) -> list[float]:
        """Returns the label probabilities of one public prompt; raises where its call failed."""

    @abstractmethod
    async def apublic(self, prompt: str) -> list[float]:
        """Async twin of `public`."""

    def of_batches(self) -> Scorer:
        """Returns the scorer of many public prompts: this one, or one that reports more about failed calls."""
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
        self.least = LEAST_REPORTED if self.kind in _LOG_PROBABILITY_KINDS else LEAST_WEIGHT
        own = tuple(map(_distinguishable_texts, labels)) if self.kind in _LOG_PROBABILITY_KINDS else labels
        self.texts = tuple(text for texts in own for text in texts)
        self.places = tuple(place for place, texts in enumerate(own) for _ in texts)
        self.width, self.columns = len(own), len(self.texts)
        self._engine = engine
        self._public = engine if isinstance(engine, PublicChoiceBackend) else None
        self.has_public_calls = self._public is not None
        self.calls_at_once = calls_at_once(engine)
        if self._public is not None:
            self._public.score_choices([], self.texts)  # makes no call, but refuses ambiguous texts

    def score(self, prompts: Sequence[str]) -> Rows:
        return self._engine.score_choices(prompts, self.texts)

    async def ascore(self, prompts: Sequence[str]) -> Rows:
        return await self._engine.ascore_choices(prompts, self.texts)

    def read(self, scores: Rows) -> Rows:
        texts = self._reading(scores)
        return texts if self.columns == self.width else per_label(texts, self.places, self.width)

    def of_batches(self) -> Scorer:
        tells = self.kind == "text votes" and isinstance(self._engine, OtherBackend)
        return _WithOther(self._engine, self) if tells else self

    def public(self, prompt: str) -> list[float]:
        if self._public is not None:
            return self._answer(self._public.score_public(prompt, self.texts)[None])
        return self._answer(self._engine.score_choices([prompt], self.texts))

    async def apublic(self, prompt: str) -> list[float]:
        if self._public is not None:
            return self._answer((await self._public.ascore_public(prompt, self.texts))[None])
        return self._answer(await self._engine.ascore_choices([prompt], self.texts))

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

    def __init__(self, engine: ChoiceBackend, choices: _Choices) -> None:
        if choices.kind != "text votes":
            raise _no_other(choices.kind)
        if not isinstance(engine, OtherBackend):
            raise CapabilityError(
                "expected with other=True an engine that distinguishes an answer without a label from a failed call "
                f"(score_with_other), found {type(engine).__name__}; take TextVoteBackend, or other=False"
            )
        self._engine, self._choices = engine, choices
        self.kind, self.least, self.has_public_calls = choices.kind, choices.least, choices.has_public_calls
        self.calls_at_once = choices.calls_at_once
        self.width, self.columns = choices.width + 1, choices.columns + 1
        self._places = (*choices.places, choices.width)

    def score(self, prompts: Sequence[str]) -> Rows:
        return self._engine.score_with_other(prompts, self._choices.texts)

    async def ascore(self, prompts: Sequence[str]) -> Rows:
        return await self._engine.ascore_with_other(prompts, self._choices.texts)

    def read(self, scores: Rows) -> Rows:
        return per_label(log_of_probabilities(scores), self._places, self.width)

    def public(self, prompt: str) -> list[float]:
        return _or_other(self._choices.public(prompt))

    async def apublic(self, prompt: str) -> list[float]:
        return _or_other(await self._choices.apublic(prompt))


class _FirstTokens(Scorer):
    """Scores the tokens that labels begin with."""

    kind = "first tokens"
    least = LEAST_REPORTED
    has_public_calls = True

    def __init__(self, engine: NextTokenBackend, labels: tuple[tuple[str, ...], ...]) -> None:
        self._engine = engine
        self.calls_at_once = calls_at_once(engine)
        self._place_of = _own_tokens(engine, labels)
        self._domain = tuple(self._place_of)
        self._places = tuple(self._place_of.values())
        self.width, self.columns = len(labels), len(self._domain)

    def score(self, prompts: Sequence[str]) -> Rows:
        with contextlib.closing(self._engine.open(prompts, ())) as session:
            return session.score(self._domain)

    async def ascore(self, prompts: Sequence[str]) -> Rows:
        with contextlib.closing(self._engine.open(prompts, ())) as session:
            return await session.ascore(self._domain)

    def read(self, scores: Rows) -> Rows:
        per_row: list[list[tuple[int, float]]] = [[] for _ in scores]
        at, columns = scores.nonzero()  # few: a top-k engine reports at most k of all beginnings
        for row, column, value in zip(at.tolist(), columns.tolist(), scores[at, columns].tolist(), strict=True):
            per_row[row].append((self._places[column], value))
        return np.array([shares(own, self.width) for own in per_row]).reshape(len(per_row), self.width)

    def public(self, prompt: str) -> list[float]:
        return self._shares(self._top_tokens(prompt).run())

    async def apublic(self, prompt: str) -> list[float]:
        return self._shares(await self._top_tokens(prompt).arun())

    def _top_tokens(self, prompt: str) -> TopTokenRequest:
        limit = self._engine.max_top_k
        return TopTokenRequest(self._engine, prompt, (), len(self._engine.vocabulary()) if limit is None else limit)

    def _shares(self, tokens: Sequence[tuple[Token, float]]) -> list[float]:
        own = self._place_of
        return shares([(own[token], value) for token, value in tokens if token in own], self.width)


def _or_other(row: list[float]) -> list[float]:
    """Returns the row of a public prompt whose call succeeded, with the column of answers without a label."""
    return [*row, 0.0 if any(row) else 1.0]


def _own_tokens(engine: NextTokenBackend, labels: tuple[tuple[str, ...], ...]) -> dict[Token, int]:
    if engine.max_top_k is None:
        return tokens_of_vocabulary(labels, ((token, engine.decode([token])) for token in engine.vocabulary()))
    if not isinstance(engine.eos, bytes):
        raise CapabilityError(
            f"expected top tokens with their bytes as keys, found keys of type {type(engine.eos).__name__}: without a "
            'vocabulary their texts are not known; take an engine with a vocabulary, or votes="text"'
        )
    return tokens_of_bytes(labels)


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
