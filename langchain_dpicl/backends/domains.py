"""Holds the public candidates of one token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.backends.base import Token


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Domain:
    """Candidates of one token, and what the public model thinks of them; all of it is public.

    Attributes:
      tokens: the candidates; with `columns`, the vocabulary that they are taken from.
      logits: float64[d] public logits of the candidates, up to a constant; None where nobody asked for them.
      columns: int64[d] places of the candidates in `tokens`, for engines that see the whole vocabulary; else None.
    """

    tokens: Sequence[Token]
    logits: NDArray[np.float64] | None = None
    columns: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.tokens) if self.columns is None else len(self.columns)

    def __repr__(self) -> str:
        return f"Domain({len(self)} candidates)"

    def token(self, index: int) -> Token:
        """Returns the candidate at `index`."""
        return self.tokens[index if self.columns is None else int(self.columns[index])]

    @property
    def keys(self) -> tuple[Token, ...]:
        """The candidates."""
        return tuple(self.tokens) if self.columns is None else tuple(self.tokens[i] for i in self.columns.tolist())

    def only(self, chosen: NDArray[Any]) -> Domain:
        """Returns the candidates at int[k] places, or where bool[d] is true."""
        places = np.flatnonzero(chosen) if chosen.dtype == np.bool_ else chosen
        logits = None if self.logits is None else self.logits[places]
        if self.columns is not None:
            return Domain(self.tokens, logits, self.columns[places])
        return Domain([self.tokens[i] for i in places.tolist()], logits)

    def joined(self, other: Domain) -> Domain:
        """Returns these candidates followed by those of `other`."""
        if not len(other):
            return self
        logits = None if self.logits is None or other.logits is None else np.concatenate([self.logits, other.logits])
        if self.columns is not None and other.columns is not None:
            return Domain(self.tokens, logits, np.concatenate([self.columns, other.columns]))
        return Domain([*self.keys, *other.keys], logits)

    def likeliest(self, top_k: int, *, margin: float = 0.0) -> Domain:
        """Returns the `top_k` publicly likeliest candidates and those within `margin` of the last of them (Top-k+).

        A function of the public logits alone; equals keep their order.

        Source: InvisibleInk (2025), Top-k+.
        """
        if self.logits is None or top_k >= len(self):
            return self
        # NaN and -inf, which cannot follow, come last.
        scores = np.nan_to_num(self.logits, nan=-np.inf, posinf=np.inf, neginf=-np.inf)
        last = np.partition(scores, len(scores) - top_k)[len(scores) - top_k]
        if margin > 0.0 and np.isfinite(last):
            return self.only(scores >= last - margin)
        above = np.flatnonzero(scores > last)
        equal = np.flatnonzero(scores == last)[: top_k - len(above)]
        return self.only(np.sort(np.concatenate([above, equal])))
