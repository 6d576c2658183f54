"""Aggregates free-form answers by their embeddings, or by the keywords in them (Wu et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from langchain_core.embeddings import Embeddings
from numpy.typing import NDArray

from langchain_dpicl.backends.answer_rows import AnswerRows
from langchain_dpicl.backends.base import Rows, TextBackend
from langchain_dpicl.backends.embeddings import SilentEmbeddings
from langchain_dpicl.backends.keywords import Keywords
from langchain_dpicl.backends.walk import Walk
from langchain_dpicl.privacy._validate import check_int, fail
from langchain_dpicl.privacy.extensions.joint_exponential import MAX_CHOICES, JointExponentialMechanism, KeywordSum
from langchain_dpicl.privacy.extensions.unit_vector_sums import UnitVectorSum, VoteVectorSum
from langchain_dpicl.privacy.mechanisms.noise import GaussianMechanism, Release

MOST_KEYWORDS = 256
"""Default of the largest keyword domain that is built for a query."""

_TOO_FEW = (
    "Give candidates_llm= a model with a temperature above 0 (and without a response cache), your own candidates=, "
    "or another stop= if answers begin with one. Nothing was charged."
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The public state of one answer.

    Attributes:
      answer: the text; None: to be written from the keywords.
      keywords: released, best first.
      similarities: cosine to the released sum, by candidate.
      abstained: nothing exceeded the noise floor; the text is the abstention text.
    """

    answer: str | None
    keywords: tuple[str, ...] | None = None
    similarities: dict[str, float] | None = None
    abstained: bool = False


class Round(Protocol):
    """One query prepared for its release."""

    @property
    def rows(self) -> AnswerRows:
        """Turns private prompts into rows."""

    def outcome(self, released: Release) -> Outcome:
        """Computes the outcome from the release (post-processing)."""


@dataclass(frozen=True, slots=True, eq=False)
class _AskVectors:
    """Asks for the embeddings of PUBLIC texts."""

    embeddings: SilentEmbeddings
    texts: tuple[str, ...]

    def run(self) -> Rows:
        """Answers, blocking."""
        return self.embeddings.public(self.texts)

    async def arun(self) -> Rows:
        """Answers, awaiting."""
        return await self.embeddings.apublic(self.texts)


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingRound:
    """The public candidates of one query and their embeddings, float64[candidates, width].

    Attributes:
      floor: least length of the released sum along the nearest candidate; None: the nearest is always the answer.
      abstain_answer: the text below the floor.
    """

    rows: AnswerRows
    candidates: tuple[str, ...]
    vectors: Rows
    floor: float | None = None
    abstain_answer: str = ""

    def outcome(self, released: Release) -> Outcome:
        """Returns the candidate nearest to the released sum; the first of equals."""
        # The mean is the sum over a public count, which changes no cosine.
        total = np.asarray(released.values)
        near = cosines(total, self.vectors)
        similarities = dict(zip(self.candidates, near.tolist(), strict=True))
        if self.floor is not None and float(near.max() * np.linalg.norm(total)) < self.floor:
            return Outcome(self.abstain_answer, similarities=similarities, abstained=True)
        return Outcome(self.candidates[int(near.argmax())], similarities=similarities)


class EmbeddingSpace:
    """Aggregates answers by embedding them; releases the noisy sum of their unit vectors.

    Args:
      engine: completes private prompts.
      embeddings: LangChain embeddings, or silent ones; they receive the private answers.
      fixed: the candidates of every query; embedded here.
      max_tokens: most tokens of a private answer.
      stop: what ends an answer.

    Attributes:
      floor_of: number of candidates to the least length along the nearest one; public, from the plan.
      abstain_answer: the text below that length.
    """

    kind = "embedding"
    floor_of: Callable[[int], float] | None = None
    abstain_answer: str = ""

    def __init__(
        self,
        engine: TextBackend,
        embeddings: Any,
        *,
        fixed: tuple[str, ...] | None,
        max_tokens: int,
        stop: Sequence[str],
    ) -> None:
        if not isinstance(embeddings, Embeddings | SilentEmbeddings):
            raise fail("embeddings", "LangChain embeddings with aggregation='embedding'", type(embeddings).__name__)
        if fixed is not None:
            _check_candidates(fixed)
        self.embeddings = embeddings if isinstance(embeddings, SilentEmbeddings) else SilentEmbeddings(embeddings)
        self._rows = AnswerRows.embedded(engine, self.embeddings, max_tokens=max_tokens, stop=stop)
        self._fixed = None if fixed is None else (fixed, self.embeddings.public(fixed))

    aggregation = UnitVectorSum()
    mechanism = GaussianMechanism(1.0)

    @property
    def width(self) -> int:
        """Columns of a row."""
        return self._rows.width

    def prepared(self, query: Sequence[str], candidates: tuple[str, ...]) -> Walk[Round]:
        """Embeds the candidates; of fixed candidates only one, to detect an outage."""
        del query
        _check_candidates(candidates)
        # Fixed candidates were embedded at construction; one is embedded again to detect an outage before the ticket.
        if self._fixed is not None:
            yield _AskVectors(self.embeddings, candidates[:1])
            return self._round(*self._fixed)
        vectors = yield _AskVectors(self.embeddings, candidates)
        return self._round(candidates, vectors)

    def _round(self, candidates: tuple[str, ...], vectors: Rows) -> EmbeddingRound:
        floor = None if self.floor_of is None else self.floor_of(len(candidates))
        return EmbeddingRound(self._rows, candidates, vectors, floor, self.abstain_answer)

    def to_dict(self) -> dict[str, Any]:
        """Returns the public parameters, for reports."""
        return {"embeddings": self.embeddings.name}


@dataclass(frozen=True, slots=True, eq=False)
class KeywordRound:
    """The public keywords of one query."""

    rows: AnswerRows
    words: tuple[str, ...]

    def outcome(self, released: Release) -> Outcome:
        """Returns the released keywords, from which the answer is written later."""
        return Outcome(None, keywords=tuple(self.words[index] for index in released.indices or ()))


class KeywordSpace:
    """Aggregates answers by counting public keywords in them; releases the most common ones, in order.

    Args:
      engine: completes private prompts.
      domain: the keywords of every query; None: the words of the query and of the public candidates.
      num_keywords: keywords of one release.
      most: largest domain that is built for a query; None: 256.
      max_tokens: most tokens of a private answer.
      stop: what ends an answer.
    """

    kind = "keywords"
    aggregation = KeywordSum()

    def __init__(
        self,
        engine: TextBackend,
        *,
        domain: Sequence[str] | None,
        num_keywords: int,
        most: int | None,
        max_tokens: int,
        stop: Sequence[str],
    ) -> None:
        self._number = check_int("num_keywords", num_keywords, low=1, high=MAX_CHOICES)
        self._most = check_int("max_keywords", MOST_KEYWORDS if most is None else most, low=self._number)
        self._fixed = None if domain is None else self._checked(Keywords(domain))
        self._engine = engine
        self._options: dict[str, Any] = {"max_tokens": max_tokens, "stop": stop}

    @property
    def mechanism(self) -> JointExponentialMechanism:
        """The mechanism; its noise is calibrated by the plan."""
        return JointExponentialMechanism(1.0, num_choices=self._number)

    @property
    def width(self) -> int:
        """Most columns of a row."""
        return self._most if self._fixed is None else len(self._fixed)

    def prepared(self, query: Sequence[str], candidates: tuple[str, ...]) -> Walk[Round]:
        """Builds the keyword domain of the query."""
        domain = self._fixed or self._checked(Keywords.of_texts([*query, *candidates], most=self._most))
        return KeywordRound(AnswerRows.keywords(self._engine, domain, **self._options), domain.words)
        yield  # makes this a generator

    def _checked(self, domain: Keywords) -> Keywords:
        if len(domain) < self._number:
            advice = "Lower num_keywords=, or give keyword_domain=, candidates= or more num_candidates=. Nothing was"
            raise fail(
                "keywords",
                f"at least num_keywords={self._number} in the public domain",
                len(domain),
                advice + " charged.",
            )
        return domain

    def to_dict(self) -> dict[str, Any]:
        """Returns the public parameters, for reports."""
        return {"num_keywords": self._number, "keywords": "made for each query" if self._fixed is None else "given"}


@dataclass(frozen=True, slots=True, eq=False)
class NoisyKeywordRound:
    """The public keywords of one query, how many of them are returned at most, and the noise floor."""

    rows: AnswerRows
    words: tuple[str, ...]
    most: int
    floor: float
    abstain_answer: str

    def outcome(self, released: Release) -> Outcome:
        """Returns the keywords above the noise floor, best first; without any, the answer is the abstention text."""
        weights = np.asarray(released.values)
        best = [int(place) for place in np.argsort(-weights, kind="stable")[: self.most]]
        words = tuple(self.words[place] for place in best if weights[place] >= self.floor)
        return Outcome(None, keywords=words) if words else Outcome(self.abstain_answer, keywords=(), abstained=True)


class NoisyKeywordSpace(KeywordSpace):
    """As `KeywordSpace`, with Gaussian noise on every keyword: the keywords of an answer are a vector of length 1.

    Attributes:
      floor: least noisy weight of a returned keyword; public, from the plan.
      abstain_answer: the text if no keyword reaches the floor.
    """

    aggregation = VoteVectorSum()  # type: ignore[assignment]
    floor: float = 0.0
    abstain_answer: str = ""

    def prepared(self, query: Sequence[str], candidates: tuple[str, ...]) -> Walk[Round]:
        """Builds the keyword domain of the query; see `KeywordSpace.prepared`."""
        made: Any = yield from super().prepared(query, candidates)
        return NoisyKeywordRound(made.rows, made.words, self._number, self.floor, self.abstain_answer)


Space: TypeAlias = EmbeddingSpace | KeywordSpace


def cosines(vector: NDArray[np.float64], rows: Rows) -> NDArray[np.float64]:
    """Returns float64[n]: the cosine of the angle to each row, 0 for zero vectors; finite for all finite floats.

    >>> cosines(np.array([3.0, 4.0]), np.array([[1.0, 0.0], [0.0, 0.0], [1e300, 1e300]])).round(2).tolist()
    [0.6, 0.0, 0.99]
    """
    near: NDArray[np.float64] = _unit(rows) @ _unit(vector[None, :])[0]
    return near


def _unit(rows: Rows) -> Rows:
    """Returns rows of length 1, or 0; divides by the largest entry first, whose square may overflow."""
    peak = np.abs(rows).max(axis=1, keepdims=True)  # [n, 1]
    scaled = np.divide(rows, peak, out=np.zeros_like(rows), where=peak > 0)
    length = np.sqrt(np.square(scaled).sum(axis=1, keepdims=True))
    unit: Rows = np.divide(scaled, length, out=scaled, where=length > 0)
    return unit


def _check_candidates(candidates: tuple[str, ...]) -> None:
    if len(candidates) < 2:
        raise fail("candidates", "at least 2 distinct public answers to choose from", len(candidates), _TOO_FEW)
