"""The tables of the embedded model: its tokens, n-grams, words with their directions, and groups of tokens."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import pairwise
from pathlib import Path

import numpy as np
import tiktoken
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

PATTERN = r"\n\n|'(?i:[sdmt]|ll|ve|re)(?!\p{L})| ?\p{L}{1,40}| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]{1,8}|\n|\s"
"""How text is cut before byte pairs are merged; every character belongs to one piece."""

WORDS = re.compile("[a-z]{2,}(?![a-z]|['’]t)")
"""How lower-case text is cut into words for topics; a single letter says nothing, and neither does "won" of "won't"."""

END = 256
"""The blank line: it separates segments, opens every prompt, and ends a text (EOS)."""

LOG_STEP = 1 / 16
"""Stored log-probabilities are multiples of this, rounded down."""

VECTOR_SCALE = 64
"""Directions of words are unit vectors times this, as int8: coarse, so that they pack well."""

GROUP_SCALE = 127
"""Directions of groups are vectors of length 1 or less times this, as int8."""

WEIGHT_SCALE = 255
"""The heaviest word's weight, as uint8."""

NO_WORD = 65535
"""In `token_words`, a token that is not one whole word."""

UNIT = 4096
"""Topics are unit vectors times this, rounded, so that their sums are exact."""

_NO_MEANING = 0.05
"""What a token without a meaning weighs as an answer, beside one that has one."""

_LOADING = threading.Lock()


@dataclass(frozen=True)
class NgramLevel:
    """The n-grams of one order as children of the order below: parent i owns entries starts[i] to starts[i + 1]."""

    starts: Ints
    tokens: NDArray[np.uint16]
    probabilities: Floats


class ModelTables:
    """Read-only arrays; one instance serves every model and thread.

    Attributes:
      encoding: the byte-pair vocabulary.
      token_bytes: the bytes of each token.
      readable: bool[V], whether those bytes are complete UTF-8.
      unigram: float64[V], sums to 1.
      words: the number of each word that has a topic; `len(words)` stands for all others.
      contributions: float32[words + 1, k] of integers, direction times weight: what a word adds to a topic.
      centre: float64[k], the mean of the unit topics of public passages.
      token_words: int64[V], the word that a token is, in all its spellings; `len(words)` for other tokens.
      groups: int64[V], the group of tokens of like meaning; the last group has none.
      answers: float64[V], what a token weighs as an answer before anything is known; little if it means nothing.
      answer_mass: float64[groups], the sums of `answers`.
      centroids: float32[groups, k] of integers: directions times `GROUP_SCALE`, zeros for the last group.
      topical: float64[V], sums to 1: how often each token that opens a word with a topic is met, common words less.
    """

    def __init__(self, path: Path) -> None:
        with np.load(path, allow_pickle=False) as arrays:
            text, lengths = arrays["token_bytes"].tobytes(), arrays["token_lengths"]
            borders = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).tolist()
            self.token_bytes: tuple[bytes, ...] = tuple(text[first:last] for first, last in pairwise(borders))
            unigram = arrays["unigram"].astype(np.float64)
            self.unigram: Floats = unigram / unigram.sum()
            self._levels: list[NgramLevel] = []
            while (order := len(self._levels) + 2) and f"tokens{order}" in arrays:
                self._levels.append(
                    NgramLevel(
                        np.concatenate([[0], np.cumsum(arrays[f"children{order}"], dtype=np.int64)]),
                        arrays[f"tokens{order}"],
                        np.exp(-LOG_STEP * arrays[f"steps{order}"].astype(np.float64)),
                    )
                )
            words = arrays["words"].tobytes().decode().split()
            self.words = {word: number for number, word in enumerate(words)}
            weights = arrays["weights"].astype(np.float32)
            contributions = np.zeros((len(words) + 1, arrays["directions"].shape[1]), np.float32)
            np.multiply(arrays["directions"], weights[:, None], out=contributions[:-1])
            self.contributions: NDArray[np.float32] = contributions
            self.centre: Floats = arrays["centre"].astype(np.float64)
            token_words = arrays["token_words"].astype(np.int64)
            self.token_words: Ints = np.where(token_words == NO_WORD, len(words), token_words)
            centroids = arrays["centroids"].astype(np.float32)
            self.centroids: NDArray[np.float32] = np.vstack([centroids, np.zeros_like(centroids[:1])])
            self.groups: Ints = arrays["groups"].astype(np.int64)
            # Of tokens that are alike otherwise, the commonest is the likeliest answer.
            self.answers: Floats = np.where(self.groups < len(centroids), 1.0, _NO_MEANING) + self.unigram
            mass = np.bincount(self.groups, self.answers, minlength=len(self.centroids))
            self.answer_mass: Floats = np.asarray(mass, np.float64)
        opens = np.array([token.startswith(b" ") for token in self.token_bytes])
        topical = self.unigram * np.append(weights, np.float32(0))[self.token_words] * opens
        self.topical: Floats = topical / max(topical.sum(), np.finfo(np.float64).tiny)
        self.readable = np.array([_is_text(token) for token in self.token_bytes])
        self.encoding = tiktoken.Encoding(
            "dpicl-embedded",
            pat_str=PATTERN,
            mergeable_ranks={token: rank for rank, token in enumerate(self.token_bytes)},
            special_tokens={},
        )

    @property
    def size(self) -> int:
        """Number of tokens."""
        return len(self.token_bytes)

    @property
    def order(self) -> int:
        """The longest n-gram."""
        return len(self._levels) + 1

    def words_of(self, text: str) -> list[int]:
        """Returns the numbers of the words of `text` that have a topic."""
        found = map(self.words.get, WORDS.findall(text.lower()))
        return [number for number in found if number is not None]

    def topics(self, sums: Floats) -> Floats:
        """Returns float64[rows, k] of integers: unit topics times `UNIT`, less the mean text; zeros where none is.

        Args:
          sums: float64[rows, k], sums of `contributions`.
        """
        centred = unit_rows(sums) - self.centre * np.any(sums, axis=1, keepdims=True)
        return np.asarray(np.rint(unit_rows(centred) * UNIT))

    def next_token(self, context: Sequence[int]) -> Floats:
        """Returns float64[V]: the interpolated n-gram distribution after `context` (at most order - 1 tokens count)."""
        row = self.unigram.copy()
        for length in range(1, self.order):
            if length > len(context):
                break
            entries = self._entries(context[len(context) - length :])
            if entries is None:
                continue
            level = self._levels[length - 1]
            continuations = level.probabilities[entries]
            row *= 1.0 - continuations.sum()
            row[level.tokens[entries]] += continuations
        return row

    def _entries(self, context: Sequence[int]) -> slice | None:
        """Returns the trie entries that continue `context`, or None where it was never seen."""
        node = int(context[0])
        for level, token in zip(self._levels, context[1:], strict=False):
            first, last = level.starts[node], level.starts[node + 1]
            node = int(first + np.searchsorted(level.tokens[first:last], token))
            if node == last or level.tokens[node] != token:
                return None
        starts = self._levels[len(context) - 1].starts
        return slice(int(starts[node]), int(starts[node + 1])) if starts[node] < starts[node + 1] else None


def unit_rows(rows: Floats) -> Floats:
    """Scales each row to length 1; a zero row stays zero. The bits of a row depend on that row alone."""
    length = np.sqrt((rows * rows).sum(axis=1))
    return np.asarray(rows / np.where(length > 0, length, 1.0)[:, None])


def _is_text(token: bytes) -> bool:
    """Whether bytes are complete UTF-8."""
    try:
        token.decode()
    except UnicodeDecodeError:
        return False
    return True


@cache
def _load(path: Path) -> ModelTables:
    return ModelTables(path)


def load_tables(path: Path | None = None) -> ModelTables:
    """Returns the shipped tables (or those at `path`), read once per process."""
    with _LOADING:
        if path is not None:
            return _load(path)
        with resources.as_file(resources.files("langchain_dpicl.backends") / "data" / "model.npz") as shipped:
            return _load(shipped)
