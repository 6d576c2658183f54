"""How an engine scores labels after PUBLIC prompts. Knows no template, no calibration and no private record."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.backends.base import ChoiceBackend, NextTokenBackend, Rows, Token
from langchain_dpicl.privacy._validate import fail

FIRST_TOKEN_FLOOR = 1e-6
"""Probability of a label whose first token the model did not report; never above the least reported probability."""

_MOST_TOKENS = 1000


class LabelScorer(Protocol):
    """Log-likelihoods of fixed continuations after prompts."""

    def score(self, prompts: Sequence[str], limit: int) -> Rows:
        """Returns float64[prompts, continuations]."""

    async def ascore(self, prompts: Sequence[str], limit: int) -> Rows:
        """Is `score`, awaitable."""


class _WholeLabels:
    """Scores complete continuations in one batch."""

    def __init__(self, engine: ChoiceBackend, continuations: tuple[str, ...]) -> None:
        self._engine = engine
        self._continuations = continuations

    def score(self, prompts: Sequence[str], limit: int) -> Rows:
        del limit
        return self._engine.score_choices(prompts, self._continuations)

    async def ascore(self, prompts: Sequence[str], limit: int) -> Rows:
        del limit
        return await self._engine.ascore_choices(prompts, self._continuations)


class _FirstTokens:
    """Reads each label's first token off the top tokens: a reported token counts for the one label it begins."""

    def __init__(self, engine: NextTokenBackend, continuations: tuple[str, ...]) -> None:
        self._engine = engine
        self._labels = tuple(text.strip() for text in continuations)
        self._begins: dict[Token, frozenset[int]] = {}
        for label in self._labels:
            if not label or sum(other.startswith(label) for other in self._labels) > 1:
                expected = "texts of which none begins another (this model reports first tokens only)"
                raise fail("verbalizers", expected, self._labels)

    def score(self, prompts: Sequence[str], limit: int) -> Rows:
        with ThreadPoolExecutor(max_workers=limit) as pool:
            return np.array(list(pool.map(self._row, prompts)))

    async def ascore(self, prompts: Sequence[str], limit: int) -> Rows:
        gate = asyncio.Semaphore(limit)

        async def row(prompt: str) -> NDArray[np.float64]:
            async with gate:
                return self._read(await self._engine.atop_tokens(prompt, (), top_k=self._top_k()))

        return np.array(await asyncio.gather(*(row(prompt) for prompt in prompts)))

    def _row(self, prompt: str) -> NDArray[np.float64]:
        return self._read(self._engine.top_tokens(prompt, (), top_k=self._top_k()))

    def _top_k(self) -> int:
        limit = self._engine.max_top_k
        return min(_MOST_TOKENS, len(self._engine.vocabulary())) if limit is None else limit

    def _read(self, tokens: Sequence[tuple[Token, float]]) -> NDArray[np.float64]:
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
    """Returns the best scorer of fixed continuations that the engine allows; at most `limit` calls run at once.

    Raises:
      ConfigurationError: first tokens would not tell the continuations apart.
    """
    if isinstance(engine, ChoiceBackend):
        return _WholeLabels(engine, continuations)
    return _FirstTokens(engine, continuations)
