"""Scores fixed continuations of public prompts with whatever an engine offers."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.backends.base import ChoiceBackend, NextTokenBackend, PublicChoiceBackend, Token
from langchain_dpicl.exceptions import ModelCallError
from langchain_dpicl.privacy._validate import fail

FIRST_TOKEN_FLOOR = 1e-6
"""Probability of a label whose first token the model did not report; never above the least reported probability."""

_MOST_TOKENS = 1000

Row: TypeAlias = NDArray[np.float64]
"""float64[continuations]: log-likelihoods after one prompt; -inf everywhere: the answer names none of them."""


class LabelScorer(Protocol):
    """Log-likelihoods of fixed continuations after prompts."""

    @property
    def kind(self) -> str:
        """How labels are scored, for reports."""

    def score(self, prompts: Sequence[str], limit: int, *, keep_errors: bool = False) -> list[Row | ModelCallError]:
        """Returns one row per prompt; a failed call raises or, with `keep_errors`, stands as its error in the list."""

    async def ascore(
        self, prompts: Sequence[str], limit: int, *, keep_errors: bool = False
    ) -> list[Row | ModelCallError]:
        """Async twin of `score`."""


class _WholeLabels:
    """Scores complete continuations in one batch."""

    kind = "whole labels"

    def __init__(self, engine: ChoiceBackend, continuations: tuple[str, ...]) -> None:
        self._engine = engine
        self._continuations = continuations

    def score(self, prompts: Sequence[str], limit: int, *, keep_errors: bool = False) -> list[Row | ModelCallError]:
        del limit, keep_errors
        return self._checked(self._engine.score_choices(prompts, self._continuations), len(prompts))

    async def ascore(
        self, prompts: Sequence[str], limit: int, *, keep_errors: bool = False
    ) -> list[Row | ModelCallError]:
        del limit, keep_errors
        return self._checked(await self._engine.ascore_choices(prompts, self._continuations), len(prompts))

    def _checked(self, rows: object, count: int) -> list[Row | ModelCallError]:
        scores = np.asarray(rows, dtype=np.float64)
        expected = (count, len(self._continuations))
        if scores.shape != expected:
            raise ModelCallError(f"score: expected shape {expected}, found {scores.shape}.")
        return list(scores)


class _OneByOne(ABC):
    """Scores each prompt by a separate call, at most `limit` at a time."""

    def score(self, prompts: Sequence[str], limit: int, *, keep_errors: bool = False) -> list[Row | ModelCallError]:
        def row(prompt: str) -> Row | ModelCallError:
            try:
                return self._row(prompt)
            except ModelCallError as error:
                if not keep_errors:
                    raise
                return error

        with ThreadPoolExecutor(max_workers=limit) as pool:
            return list(pool.map(row, prompts))

    async def ascore(
        self, prompts: Sequence[str], limit: int, *, keep_errors: bool = False
    ) -> list[Row | ModelCallError]:
        gate = asyncio.Semaphore(limit)

        async def row(prompt: str) -> Row | ModelCallError:
            async with gate:
                try:
                    return await self._arow(prompt)
                except ModelCallError as error:
                    if not keep_errors:
                        raise
                    return error

        tasks = [asyncio.ensure_future(row(prompt)) for prompt in prompts]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:  # after an error the others would go on calling
                task.cancel()

    @abstractmethod
    def _row(self, prompt: str) -> Row: ...

    @abstractmethod
    async def _arow(self, prompt: str) -> Row: ...


class _PublicChoices(_OneByOne):
    """Uses an engine that distinguishes a failed call from an answer without a label."""

    def __init__(self, engine: PublicChoiceBackend, continuations: tuple[str, ...]) -> None:
        engine.score_choices([], continuations)  # makes no call, but refuses labels that it cannot tell apart
        self._engine = engine
        self._continuations = continuations

    @property
    def kind(self) -> str:
        return self._engine.kind

    def _row(self, prompt: str) -> Row:
        return self._engine.score_public(prompt, self._continuations)

    async def _arow(self, prompt: str) -> Row:
        return await self._engine.ascore_public(prompt, self._continuations)


class _FirstTokens(_OneByOne):
    """Scores each label by the top tokens that begin this label and no other."""

    kind = "first tokens"

    def __init__(self, engine: NextTokenBackend, continuations: tuple[str, ...]) -> None:
        self._engine = engine
        self._labels = tuple(text.strip() for text in continuations)
        self._begins: dict[Token, frozenset[int]] = {}
        for label in self._labels:
            if not label or sum(other.startswith(label) for other in self._labels) > 1:
                expected = "texts of which none begins another (this model reports first tokens only)"
                raise fail("verbalizers", expected, self._labels)

    def _row(self, prompt: str) -> Row:
        return self._read(self._engine.top_tokens(prompt, (), top_k=self._top_k()))

    async def _arow(self, prompt: str) -> Row:
        return self._read(await self._engine.atop_tokens(prompt, (), top_k=self._top_k()))

    def _top_k(self) -> int:
        limit = self._engine.max_top_k
        return min(_MOST_TOKENS, len(self._engine.vocabulary())) if limit is None else limit

    def _read(self, tokens: Sequence[tuple[Token, float]]) -> Row:
        """Returns float64[labels]: log of the probability mass of the tokens that begin each label alone."""
        row = np.zeros(len(self._labels))
        shared = 0.0
        for token, probability in tokens:
            begun = self._begun_by(token)
            if len(begun) == 1:
                row[next(iter(begun))] += probability
            elif begun:
                shared += probability
        if shared > 0.5:  # the likeliest next token cannot tell the labels apart
            raise fail("verbalizers", "labels whose first tokens differ", self._labels, "Give other verbalizers.")
        least = min((p for _, p in tokens if p > 0), default=FIRST_TOKEN_FLOOR)
        return np.log(np.maximum(row, min(least, FIRST_TOKEN_FLOOR)))

    def _begun_by(self, token: Token) -> frozenset[int]:
        if token not in self._begins:
            text = self._engine.decode([token]).lstrip()
            begun = (i for i, label in enumerate(self._labels) if text and label.startswith(text))
            self._begins[token] = frozenset(begun)
        return self._begins[token]


def label_scorer(engine: ChoiceBackend | NextTokenBackend, continuations: tuple[str, ...]) -> LabelScorer:
    """Returns the best scorer that the engine allows."""
    if isinstance(engine, PublicChoiceBackend):
        return _PublicChoices(engine, continuations)
    if isinstance(engine, ChoiceBackend):
        return _WholeLabels(engine, continuations)
    return _FirstTokens(engine, continuations)


def settled(
    rows: Sequence[Row | ModelCallError], labels: tuple[str, ...], *, otherwise: str | None, keep_errors: bool
) -> list[Row | ModelCallError]:
    """Replaces rows that name no label by a vote for `otherwise` or an error; raises errors unless `keep_errors`."""
    outcomes = [row if _names_a_label(row) else _unnamed(labels, otherwise) for row in rows]
    for outcome in outcomes:
        if isinstance(outcome, ModelCallError) and not keep_errors:
            raise outcome
    return outcomes


def _names_a_label(row: Row | ModelCallError) -> bool:
    return isinstance(row, ModelCallError) or bool(np.isfinite(row).any())


def _unnamed(labels: tuple[str, ...], otherwise: str | None) -> Row | ModelCallError:
    if otherwise is None:
        return ModelCallError(
            f"the answer to a public prompt names none of the labels {labels!r}, or the engine failed. Ask "
            "for a label in the prompt, or pass otherwise= to say what such an answer counts as."
        )
    return np.where(np.arange(len(labels)) == labels.index(otherwise), 0.0, -np.inf)


def distinct_texts(name: str, values: Sequence[str], *, least: int, empty: bool = False) -> tuple[str, ...]:
    """Returns distinct texts as a tuple, or raises ConfigurationError."""
    expected = f"a sequence of at least {least} distinct {'' if empty else 'non-empty '}texts"
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence) or len(values) < least:
        raise fail(name, expected, values)
    if not all(isinstance(text, str) and (text or empty) for text in values) or len(set(values)) < len(values):
        raise fail(name, expected, values)
    return tuple(values)


def continuations_of(labels: tuple[str, ...], verbalizers: Mapping[str, str] | None) -> tuple[str, ...]:
    """Returns the text that stands for each label, in the order of the labels."""
    if verbalizers is None:
        return tuple(f" {label}" for label in labels)
    if set(verbalizers) != set(labels):
        raise fail("verbalizers", f"one text for each of {labels!r}", sorted(map(str, verbalizers)))
    return distinct_texts("verbalizers", [verbalizers[label] for label in labels], least=2)
