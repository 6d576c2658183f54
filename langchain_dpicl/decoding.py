"""Chooses one index from a noised vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.privacy._validate import check_int, check_real
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM


@dataclass(frozen=True, slots=True)
class Decoding:
    """Chooses a token from noised probabilities.

    Formal guarantees:
      - A function of the noised vector and fresh random numbers only, so it costs nothing (post-processing).
      - Negative entries count as 0; if nothing is positive the choice is uniform.

    Attributes:
      temperature: 0 takes the largest entry; above 0 samples proportionally to `value ** (1 / temperature)`.
      top_k: sample among the `top_k` largest only (None: all).
      top_p: sample among the fewest largest entries that hold this share of the mass (1: all).
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        check_real("temperature", self.temperature, low=0.0)
        check_real("top_p", self.top_p, low=0.0, high=1.0, low_open=True)
        if self.top_k is not None:
            check_int("top_k", self.top_k, low=1)

    @property
    def is_default(self) -> bool:
        """Whether this is plain argmax, the only decoding an index-only mechanism allows."""
        return self == Decoding()

    def choose(self, values: NDArray[np.float64]) -> int:
        """Returns an index into `values`, float64[d]."""
        weights = np.maximum(values, 0.0)
        if not (weights > 0).any():
            return int(SYSTEM_RANDOM.integers(len(weights), 1)[0])
        if self.temperature == 0:
            return int(np.argmax(weights))
        return self._sample(weights / weights.sum())

    def _sample(self, weights: NDArray[np.float64]) -> int:
        order = np.argsort(-weights, kind="stable")
        share = weights[order]
        # Nucleus: the entry that crosses top_p stays in.
        keep = (np.cumsum(share) - share) < self.top_p
        if self.top_k is not None:
            keep &= np.arange(len(share)) < self.top_k
        keep &= share > 0
        logits = np.log(share[keep]) / self.temperature
        chance = np.exp(logits - logits.max())
        cumulative = np.cumsum(chance / chance.sum())
        pick = int(np.searchsorted(cumulative, SYSTEM_RANDOM.uniform(1)[0], side="right"))
        return int(order[keep][min(pick, len(cumulative) - 1)])

    def to_dict(self) -> dict[str, Any]:
        """Returns the public parameters."""
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
