"""Holds every number that the build of the embedded model depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_WORDS = """
Answer Article Category Class Context Customer Email Example Genre Input Intent Issue Keyword Label Line
Message Name News Output Problem Query Question Queue Record Reply Request Review Sentence Sentiment Statement
Summary Tags Task Text Ticket Title Topic Tweet Type Utterance
"""
PROMPT_WORDS = (*_WORDS.split(), *_WORDS.lower().split())
"""Words that open the lines of prompts; each is made a token of its own, with and without a space before it."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Every number that the build depends on; the manifest records it."""

    vocabulary: int = 8192
    weights: Mapping[str, float] = field(
        default_factory=lambda: {"banking77": 30.0, "opentrivia": 2.0, "books": 0.5},
    )
    """How often a file counts, by name; 1 where not named."""
    labelled: tuple[str, ...] = ("banking77", "opentrivia")
    """Files of "label: text"; n-grams see one of `PROMPT_WORDS` in the label's place, topics see the label."""
    discount: float = 0.75
    order: int = 4
    thresholds: tuple[float, ...] = (2.0, 2.0, 2.0)
    """An n-gram (n = 2, 3, ...) stays if it gains this many (weighted) nats over its backoff."""
    dimensions: int = 128
    window: int = 10
    vector_weight_cap: float = 10.0
    """Topic vectors count a file at most this often."""
    smoothing: float = 3e-3
    """Smooth inverse frequency (Arora et al., 2017): a token of probability p weighs a / (a + p)."""
    shrinkage: float = 0.2
    passage: int = 40
    """Tokens in one passage when the topic space is whitened within documents."""
    rare: int = 10
    """Tokens seen less often carry no topic; nor do tokens without a letter."""
    clusters: int = 512
    """Groups of tokens that the tilt of the base tells apart."""

    def weight(self, name: str) -> float:
        """Returns how often the file `name` counts."""
        return self.weights.get(name, 1.0)
