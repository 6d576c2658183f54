"""Draws next tokens from public or released rows."""

from __future__ import annotations

import numpy as np
import torch
from numpy.random import Generator

from langchain_dpicl.backends.hf.vocabulary import Floats, Ints, Vocabulary, probabilities
from langchain_dpicl.exceptions import ConfigurationError


class Taste:
    """How a next token is drawn.

    Args:
      temperature: 0 takes the likeliest token.
      top_k: only this many likeliest tokens; None: all.
      top_p: only the likeliest tokens that together have this probability.
      rng: source of the sampling, which protects nobody.
    """

    def __init__(self, temperature: float, top_k: int | None, top_p: float, rng: Generator) -> None:
        if not temperature >= 0:
            raise ConfigurationError(f"expected temperature >= 0, found temperature={temperature}")
        if top_k is not None and top_k < 1:
            raise ConfigurationError(f"expected top_k >= 1 or None, found top_k={top_k}")
        if not 0 < top_p <= 1:
            raise ConfigurationError(f"expected 0 < top_p <= 1, found top_p={top_p}")
        self.temperature = temperature
        self._top_k = top_k
        self._top_p = top_p
        self._rng = rng

    def choose(self, rows: Floats) -> Ints:
        """Returns one column of each row of probabilities."""
        if self.temperature == 0:
            return np.asarray(rows.argmax(axis=1))
        with np.errstate(divide="ignore", invalid="ignore"):
            weights = np.exp((np.log(rows) - np.log(rows.max(axis=1, keepdims=True))) / self.temperature)
        levels = np.cumsum(self._kept(np.nan_to_num(weights)), axis=1)
        coins = self._rng.random((len(rows), 1)) * levels[:, -1:]
        return np.asarray(np.minimum((levels <= coins).sum(axis=1), rows.shape[1] - 1))

    def _kept(self, weights: Floats) -> Floats:
        if self._top_k is None and self._top_p == 1:
            return weights
        order = np.argsort(-weights, axis=1, kind="stable")
        ranked = np.take_along_axis(weights, order, axis=1)
        before = np.cumsum(ranked, axis=1) - ranked
        is_kept = before < self._top_p * ranked.sum(axis=1, keepdims=True)
        if self._top_k is not None:
            is_kept[:, self._top_k :] = False
        out = np.zeros_like(weights)
        np.put_along_axis(out, order, np.where(is_kept, ranked, 0.0), axis=1)
        return out


def likeliest(settled: torch.Tensor, vocabulary: Vocabulary) -> Ints:
    """Returns the likeliest token of each row; the end of the text for a row that failed."""
    failed = settled.amax(dim=1).isnan()
    chosen: Ints = settled.argmax(dim=1).masked_fill(failed, vocabulary.eos).cpu().numpy()
    return chosen


def drawn(rows: Floats, taste: Taste, vocabulary: Vocabulary) -> Ints:
    """Returns a token id per row of probabilities; the end of the text for a row that failed."""
    return np.where(rows.any(axis=1), taste.choose(rows), vocabulary.eos)


def shares(settled: torch.Tensor, vocabulary: Vocabulary) -> Floats:
    """Returns float64[rows, ids]: probabilities by id; 0 for other ids than candidates, and in a failed row."""
    out = np.zeros((settled.shape[0], vocabulary.width))
    out[:, vocabulary.candidates] = probabilities(settled, vocabulary.candidates)
    return out
