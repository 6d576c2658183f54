"""Loads the shipped tables of the embedded model: vocabulary, n-gram trie and topic vectors."""

from __future__ import annotations

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

END = 256
"""The blank line: it separates segments, opens every prompt, and ends a text (EOS)."""

LOG_STEP = 1 / 16
"""Stored log-probabilities are multiples of this, rounded down."""

VECTOR_SCALE = 254
"""Directions are unit vectors times this, as int8 (a coordinate beyond one half is cut)."""

WEIGHT_SCALE = 255
"""The heaviest token's topic weight, as uint8."""

_LOADING = threading.Lock()


@dataclass(frozen=True)
class NgramLevel:
    """The n-grams of one order as children of the order below: parent i owns entries starts[i] to starts[i + 1]."""

    starts: Ints
    tokens: NDArray[np.uint16]
    probabilities: Floats


class Tables:
    """Read-only arrays; one instance serves every model and thread.

    Attributes:
      encoding: the byte-pair vocabulary.
      token_bytes: the bytes of each token.
      readable: bool[V], whether those bytes are complete UTF-8.
      unigram: float64[V], sums to 1.
      groups: int64[V], the topic group of each token; the last group has no topic.
      centroids: float32[groups, k] of integers: unit vectors times `VECTOR_SCALE`, zeros for the last group.
      contributions: float32[V, k] of integers, direction times weight: what a token adds to its segment's topic.
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
            centroids = arrays["centroids"].astype(np.float32)
            self.centroids: NDArray[np.float32] = np.vstack([centroids, np.zeros_like(centroids[:1])])
            self.groups: Ints = arrays["groups"].astype(np.int64)
            weights = arrays["weights"].astype(np.float32)
            self.contributions: NDArray[np.float32] = arrays["directions"] * weights[:, None]
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


def _is_text(token: bytes) -> bool:
    """Whether bytes are complete UTF-8."""
    try:
        token.decode()
    except UnicodeDecodeError:
        return False
    return True


@cache
def _load(path: Path) -> Tables:
    return Tables(path)


def load_tables(path: Path | None = None) -> Tables:
    """Returns the shipped tables (or those at `path`), read once per process."""
    with _LOADING:
        if path is not None:
            return _load(path)
        with resources.as_file(resources.files("langchain_dpicl.backends") / "data" / "model.npz") as shipped:
            return _load(shipped)
