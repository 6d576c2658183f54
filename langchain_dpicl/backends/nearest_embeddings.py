"""Embeddings that need no network, download or torch: hashed words and pieces, with the embedded model's topics."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator

import numpy as np
from langchain_core.embeddings import Embeddings
from typing_extensions import override

from langchain_dpicl.backends._embedded_tables import Floats, load_tables

# For votes that must not leave the machine. They show shared words and rough topics only; a sentence encoder is better
# (docs/private-evolution.md has the measurements).
_WORDS = re.compile(r"[^\W_]+")
_COLUMNS = 1024
_PIECE_SHARE = 0.4
"""Weight of a word's pieces of three letters, all together, beside the word itself."""
_COMMON = 1e-2
"""A word of this frequency in public text counts half."""


class LocalEmbeddings(Embeddings):
    """Embeddings in numpy: 1,024 hashed words and pieces of words, and the topic vector of the embedded model.

    A text's vector depends on that text alone, is the same on every machine, and is kept nowhere. Both halves have
    length 1, or 0 where the text has no word.

    >>> near = LocalEmbeddings().embed_documents(["card declined", "my card was declined", "a film about boats"])
    >>> bool(np.dot(near[0], near[1]) > np.dot(near[0], near[2]))
    True
    """

    def __repr__(self) -> str:
        return "LocalEmbeddings()"

    @override
    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [self.embed_query(text) for text in texts]

    @override
    def embed_query(self, text: str) -> list[float]:
        vector: list[float] = np.concatenate([_unit(_hashed(text)), _unit(_topic(text))]).tolist()
        return vector


def _hashed(text: str) -> Floats:
    """Returns float64[1024]: signed counts of words and their pieces, weighted by rarity."""
    tables = load_tables()
    places, weights = [], []
    for word in _WORDS.findall(text.lower()):
        tokens = tables.encoding.encode_ordinary(f" {word}")
        rarity = _COMMON / (_COMMON + float(tables.unigram[tokens].min(initial=1.0)))
        for feature, weight in _features(word):
            code = zlib.crc32(feature.encode())
            places.append(code % _COLUMNS)
            weights.append(rarity * weight * (1.0 if code >> 31 else -1.0))
    counted = np.bincount(np.array(places, dtype=np.int64), np.array(weights), minlength=_COLUMNS)
    return np.asarray(counted, dtype=np.float64)


def _features(word: str) -> Iterator[tuple[str, float]]:
    """Yields a word and its pieces of three letters, with their weights."""
    yield word, 1.0
    edged = f"<{word}>"
    share = _PIECE_SHARE / np.sqrt(len(edged) - 2)
    for first in range(len(edged) - 2):
        yield f"#{edged[first : first + 3]}", share


def _topic(text: str) -> Floats:
    """Returns the sum of the topics of a text's tokens, as the embedded model computes it."""
    tables = load_tables()
    tokens = tables.encoding.encode_ordinary(f" {text}")
    return np.asarray(tables.contributions[tokens].sum(axis=0), dtype=np.float64)


def _unit(vector: Floats) -> Floats:
    length = float(np.sqrt(np.square(vector).sum()))
    return vector / length if length > 0 else vector
