"""How an engine is asked about labels, and how its answers are read. Knows no noise, no records and no ledger.

A scorer's private calls may raise whatever an engine raises; who calls them keeps that in its own row (`label_rows`).
Its reading of one prompt's scores is pure and raises nothing.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeAlias, TypeVar, cast

import numpy as np

from langchain_dpicl.backends._label_reading import (
    LEAST_REPORTED,
    LEAST_WEIGHT,
    calibrated,
    kept,
    per_label,
    shares,
    softmax,
    tokens_of_bytes,
    tokens_of_vocabulary,
)
from langchain_dpicl.backends.answers import Names
from langchain_dpicl.backends.base import ChoiceBackend, NextTokenBackend, PublicChoiceBackend, Rows, Token
from langchain_dpicl.backends.walk import AskTopTokens
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError, ModelCallError

Reported: TypeAlias = tuple[int, float]
"""A label, and the probability of a token that begins it."""

S = TypeVar("S")
"""What an engine says after one prompt, as a scorer reads it."""

_KEPT = frozenset({"decisions", "text votes"})


def label_scorer(engine: Any, labels: tuple[tuple[str, ...], ...]) -> Scorer[Any]:
    """Returns the best way to score labels that the engine allows.

    Raises:
      ConfigurationError: the engine cannot tell the labels apart.
      CapabilityError: it scores neither choices nor next tokens, or reports top tokens that are not bytes.
    """
    if isinstance(engine, ChoiceBackend):
        return _Choices(engine, labels)
    if isinstance(engine, NextTokenBackend):
        return _FirstTokens(engine, labels)
    raise CapabilityError(
        f"expected an engine that scores choices or next tokens, found {type(engine).__name__}; see "
        "backends.resolve.as_choice_backend"
    )


class Scorer(ABC, Generic[S]):
    """One way to score labels: calls that may raise, and a reading of one row that does not."""

    kind: str
    width: int
    columns: int
    least: float

    @abstractmethod
    def score(self, prompts: Sequence[str]) -> Rows:
        """Returns float64[prompts, columns] for private prompts, in one call."""

    @abstractmethod
    async def ascore(self, prompts: Sequence[str]) -> Rows:
        """Is `score`, awaitable."""

    @abstractmethod
    def split(self, rows: Rows) -> list[S]:
        """Cuts float64[prompts, columns] into what belongs to each prompt."""

    @abstractmethod
    def read(self, scores: S) -> list[float]:
        """Returns the label probabilities of one prompt."""

    @abstractmethod
    def public(self, prompt: str) -> list[float]:
        """Returns the label probabilities of one public prompt; raises where its call failed."""

    @abstractmethod
    async def apublic(self, prompt: str) -> list[float]:
        """Is `public`, awaitable."""

    def row(self, scores: Sequence[S | None]) -> list[float]:
        """Returns the label probabilities of one row: of the query first, then of its content-free prompts."""
        first, *free = scores
        own = [0.0] * self.width if first is None else self.read(first)
        if not free:
            return own
        found = [[0.0] * self.width if one is None else self.read(one) for one in free]
        return calibrated(own, found, least=self.least)


class _Choices(Scorer[list[float]]):
    """Scores complete texts."""

    def __init__(self, engine: ChoiceBackend, labels: tuple[tuple[str, ...], ...]) -> None:
        self.kind = engine.kind if isinstance(engine, PublicChoiceBackend) else "whole labels"
        self._reading = kept if self.kind in _KEPT else softmax
        self.least = LEAST_REPORTED if self.kind in _KEPT else LEAST_WEIGHT
        own = tuple(map(_told_apart, labels)) if self.kind in _KEPT else labels
        self._texts = tuple(text for texts in own for text in texts)
        self._places = tuple(place for place, texts in enumerate(own) for _ in texts)
        self.width, self.columns = len(own), len(self._texts)
        self._engine = engine
        self._public = engine if isinstance(engine, PublicChoiceBackend) else None
        if self._public is not None:
            self._public.score_choices([], self._texts)  # makes no call, but refuses texts that it cannot tell apart

    def score(self, prompts: Sequence[str]) -> Rows:
        return self._engine.score_choices(prompts, self._texts)

    async def ascore(self, prompts: Sequence[str]) -> Rows:
        return await self._engine.ascore_choices(prompts, self._texts)

    def split(self, rows: Rows) -> list[list[float]]:
        return cast("list[list[float]]", rows.tolist())

    def read(self, scores: list[float]) -> list[float]:
        texts = self._reading(scores)
        return texts if self.columns == self.width else per_label(texts, self._places, self.width)

    def public(self, prompt: str) -> list[float]:
        if self._public is not None:
            return self._answer(self._public.score_public(prompt, self._texts)[None])
        return self._answer(self._engine.score_choices([prompt], self._texts))

    async def apublic(self, prompt: str) -> list[float]:
        if self._public is not None:
            return self._answer((await self._public.ascore_public(prompt, self._texts))[None])
        return self._answer(await self._engine.ascore_choices([prompt], self._texts))

    def _answer(self, scores: Rows) -> list[float]:
        found = fitting(scores, 1, self.columns)
        if found is None:
            raise ModelCallError(
                f"expected float64[1, {self.columns}] for a public prompt, found an answer of another shape or type; "
                "check the engine"
            )
        row = self.read(self.split(found)[0])
        if not any(row) and self._public is None:  # by its contract the call failed
            raise ModelCallError(
                "the engine has no likelihood for any label after a public prompt; check the model and the length of "
                "the prompt, then call again"
            )
        return row


class _FirstTokens(Scorer[list[Reported]]):
    """Scores the tokens that labels begin with."""

    kind = "first tokens"
    least = LEAST_REPORTED

    def __init__(self, engine: NextTokenBackend, labels: tuple[tuple[str, ...], ...]) -> None:
        self._engine = engine
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

    def split(self, rows: Rows) -> list[list[Reported]]:
        found: list[list[Reported]] = [[] for _ in rows]
        at, columns = rows.nonzero()  # few: a top-k engine reports at most k of all beginnings
        for row, column, value in zip(at.tolist(), columns.tolist(), rows[at, columns].tolist(), strict=True):
            found[row].append((self._places[column], value))
        return found

    def read(self, scores: list[Reported]) -> list[float]:
        return shares(scores, self.width)

    def public(self, prompt: str) -> list[float]:
        return self._shares(self._top_tokens(prompt).run())

    async def apublic(self, prompt: str) -> list[float]:
        return self._shares(await self._top_tokens(prompt).arun())

    def _top_tokens(self, prompt: str) -> AskTopTokens:
        limit = self._engine.max_top_k
        return AskTopTokens(self._engine, prompt, (), len(self._engine.vocabulary()) if limit is None else limit)

    def _shares(self, tokens: Sequence[tuple[Token, float]]) -> list[float]:
        own = self._place_of
        return shares([(own[token], value) for token, value in tokens if token in own], self.width)


def _own_tokens(engine: NextTokenBackend, labels: tuple[tuple[str, ...], ...]) -> dict[Token, int]:
    if engine.max_top_k is None:
        return tokens_of_vocabulary(labels, ((token, engine.decode([token])) for token in engine.vocabulary()))
    if not isinstance(engine.eos, bytes):
        raise CapabilityError(
            f"expected top tokens with their bytes as keys, found keys of type {type(engine.eos).__name__}: without a "
            'vocabulary their texts are not known; take an engine with a vocabulary, or votes="text"'
        )
    return tokens_of_bytes(labels)


def _told_apart(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the texts of one label that an answer can tell apart; the first of those that it cannot."""
    found: list[str] = []
    for text in texts:
        with contextlib.suppress(ConfigurationError):  # the rule is that of `Names`; each text is known to be one
            Names([*found, text])
            found.append(text)
    return tuple(found)


def fitting(rows: object, num_rows: int, columns: int) -> Rows | None:
    """Returns float64[num_rows, columns], or None for anything else."""
    if not isinstance(rows, np.ndarray) or rows.shape != (num_rows, columns) or rows.dtype.kind != "f":
        return None
    if type(rows) is np.ndarray and rows.dtype == np.float64:
        return rows
    with np.errstate(all="ignore"):  # a wider number may not fit
        return np.asarray(rows, dtype=np.float64)
