"""Computes the chance of the right label as a sum over all votes that rows may cast, for many laws of rows at once."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from langchain_dpicl.planning.row_law import RowFacts

Floats = NDArray[np.float64]

_STEP = {"gaussian": 0.5, "gumbel": 0.9}
"""Of the grid of noisy votes, in scales of the noise, whose density is analytic."""
_REACH = {"gaussian": (5.0, 5.0), "gumbel": (3.5, 16.0)}
"""Scales of the noise beyond which it is left out. Together the errors are below 3e-5, with up to 77 labels."""
_MOST_TIES = 38
"""Other labels whose tie with the right one is counted exactly."""
_LEAST_SCALE = 0.05
"""Less noise than this is none: votes are whole numbers."""


@dataclass(frozen=True, slots=True)
class Contest:
    """How rows vote, and the noise on their votes.

    Attributes:
      trials: rows, or units that may be drawn as a row; at most about 150 of them may vote.
      used: chance that one of them votes.
      labels: labels that an answer can have.
      noise: "gaussian" or "gumbel"; None: the most votes win, and equals share.
      scale: of the noise on the votes of each label.
    """

    trials: int
    used: float
    labels: int
    noise: str | None = None
    scale: float = 0.0

    def rights(self, facts: Sequence[RowFacts]) -> Floats:
        """Returns float64[len(facts)]: the chances of the right label, for rows with these numbers.

        The rows of a question are right or wrong by a Beta-binomial law, and the votes of the wrong ones are spread by
        a Dirichlet-multinomial one; both are summed, and the noise is integrated. What depends on the rival alone is
        computed at a few rivals and interpolated between them.

        Args:
          facts: at least one, of this number of labels.
        """
        counts = np.arange(self.most + 1.0)
        # On this scale the chance bends about as much near evenly spread votes as far from them.
        even = 1.0 / (self.labels - 1)
        places = np.log(np.array([max(one.rival - even, 0.0) for one in facts]) + _NEARLY_EVEN)
        nodes = np.linspace(places.min(), places.max(), _num_nodes(float(np.ptp(places))) if self.labels > 2 else 1)
        wins = self._wins(np.exp(nodes) - _NEARLY_EVEN + even, counts)  # [rival, right, wrong]
        shares = [np.prod([(places - to) / (at - to) for to in nodes if to != at], axis=0) for at in nodes]
        own = np.einsum("cf,crw->frw", np.array([np.broadcast_to(share, places.shape) for share in shares]), wins)
        for place, one in enumerate(facts):
            if one.silent > 0.0:
                # Row by row: a product of whole matrices wakes BLAS threads, which then spin.
                own[place] = (own[place][:, None, :] @ _thinned(len(counts), 1.0 - one.silent).T)[:, 0]
        return np.asarray((own * self._votes(facts, counts)).sum(axis=(1, 2)).clip(0.0, 1.0))

    @property
    def most(self) -> int:
        """Most rows that vote; more do so with a chance below 1e-6."""
        mean = self.trials * self.used
        return min(self.trials, int(mean + 5.0 * np.sqrt(mean * (1.0 - self.used)) + 4.0))

    def _votes(self, facts: Sequence[RowFacts], counts: Floats) -> Floats:
        """Returns float64[facts, right, not right]: the chance of so many rows that are right, and that are not."""
        right, wrong = counts[:, None], counts[None, :]
        rows = (right + wrong).clip(0.0, self.trials)
        ways = special.gammaln(self.trials + 1.0) - special.gammaln(self.trials - rows + 1.0)
        ways += special.xlogy(rows, self.used) + special.xlogy(self.trials - rows, 1.0 - self.used)
        ways -= special.gammaln(right + 1.0) + special.gammaln(wrong + 1.0)
        ways[right + wrong > self.trials] = -np.inf
        share = np.array([min(max(one.right, 1e-9), 1.0 - 1e-9) for one in facts])
        alike = np.array([min(max(one.correlation, 1e-5), 0.98) for one in facts])
        first, second = (part * (1.0 - alike) / alike for part in (share, 1.0 - share))
        own = special.gammaln(counts + first[:, None]) - special.gammaln(first)[:, None]
        others = special.gammaln(counts + second[:, None]) - special.gammaln(second)[:, None]
        both = (first + second)[:, None]
        together = special.gammaln(np.arange(2 * len(counts) - 1) + both) - special.gammaln(both)
        places = (right + wrong).astype(np.int64)
        return np.asarray(np.exp(ways + own[:, :, None] + others[:, None, :] - together[:, places]))

    def _wins(self, rivals: Floats, counts: Floats) -> Floats:
        """Returns float64[rivals, right, wrong]: the chance that so many right votes win against so many wrong ones."""
        others, votes = self.labels - 1, counts / max(self.scale, _LEAST_SCALE)
        if self.noise is None or self.scale < _LEAST_SCALE:
            # Equals share: of j others with as many votes each is behind with a chance that is drawn once for all.
            ties, shares = _between_0_and_1((min(others, _MOST_TIES) + 2) // 2)
            behind = counts[:, None] - counts[None, :]  # [right, votes of another]
            below = np.where(behind[:, None, :] > 0, 1.0, np.where(behind[:, None, :] < 0, 0.0, ties[None, :, None]))
            found = _all_below(below.reshape(-1, len(counts)), rivals, others)
            return np.asarray(np.einsum("n,crnw->crw", shares, found.reshape(len(rivals), *below.shape)))
        (low, high), step = _REACH[self.noise], _STEP[self.noise]
        at = np.arange(-low, votes[-1] + high, step)[:, None] - votes  # [noisy votes, votes]
        with np.errstate(over="ignore"):
            below, density = _NOISE[self.noise](at)
        return np.asarray(step * np.einsum("nr,cnw->crw", density, _all_below(below, rivals, others)))


_NEARLY_EVEN = 0.03
"""What is added to a rival before its logarithm is taken."""


def _num_nodes(width: float) -> int:
    """Returns how many rivals stand for all, by the width of the range of their logarithms: errors are below 6e-4."""
    return 1 if width < 1e-9 else 2 + sum(width > one for one in (0.2, 0.7, 1.5, 2.6))


def _normal(at: Floats) -> tuple[Floats, Floats]:
    return special.ndtr(at), np.exp(-(at**2) / 2.0) / np.sqrt(2.0 * np.pi)


def _gumbel(at: Floats) -> tuple[Floats, Floats]:
    tail = np.exp(-at)
    return np.exp(-tail), np.exp(-at - tail)


_NOISE = {"gaussian": _normal, "gumbel": _gumbel}
"""The chance that noise stays below, and its density."""


@functools.lru_cache(maxsize=16)
def _between_0_and_1(count: int) -> tuple[Floats, Floats]:
    """Returns nodes and weights of Gauss-Legendre quadrature."""
    nodes, weights = np.polynomial.legendre.leggauss(count)
    return (nodes + 1.0) / 2.0, weights / 2.0


def _thinned(size: int, chance: float) -> Floats:
    """Returns float64[trials, hits]: the chance of so many hits among fewer than `size` trials."""
    counts = np.arange(size)
    missed = counts[:, None] - counts[None, :]
    return np.asarray(_ways(size) * chance**counts * ((1.0 - chance) ** counts)[missed])


@functools.lru_cache(maxsize=16)
def _ways(size: int) -> Floats:
    """Returns float64[trials, hits]: in how many ways so many of the trials are hits."""
    return np.asarray(special.binom(*np.meshgrid(np.arange(size), np.arange(size), indexing="ij")))


def _all_below(below: Floats, rivals: Floats, others: int) -> Floats:
    """Returns float64[rivals, nodes, votes]: the chance that all other labels, which share these votes, stay below.

    Args:
      below: float64[nodes, votes]: the chance for one label that has so many.
      rivals: chance that two of these votes are for the same label.
      others: the labels that share them.
    """
    if others == 1:
        return np.broadcast_to(below, (len(rivals), *below.shape))
    even = 1.0 / others
    alike = rivals.clip(even + 1e-6, 1.0)[:, None, None]
    alpha = np.maximum((1.0 - alike) / (alike - even) / others, 1e-6)
    votes, scale = np.arange(below.shape[1]), np.log1p(others * alpha)
    # The generating function of a Dirichlet-multinomial law is a power; x is scaled such that no term overflows.
    one, whole = (
        np.exp(special.gammaln(votes + part) - special.gammaln(part) - special.gammaln(votes + 1.0) - votes * scale)
        for part in (alpha, others * alpha)
    )
    return np.asarray(np.moveaxis(_power(np.moveaxis(below * one, 2, 0).copy(), others), 0, 2) / whole)


def _power(series: Floats, exponent: int) -> Floats:
    """Returns float64[d, ...]: the first d terms of a power of each power series, whose terms are float64[d, ...]."""
    result: Floats | None = None
    while True:
        if exponent & 1:
            result = series if result is None else _times(result, series)
        exponent >>= 1
        if not exponent:
            return np.asarray(result)
        series = _times(series, series)


def _times(one: Floats, other: Floats) -> Floats:
    product = np.empty_like(one)
    for place in range(len(one)):
        np.einsum("i...,i...->...", one[: place + 1], other[place::-1], out=product[place])
    return product
