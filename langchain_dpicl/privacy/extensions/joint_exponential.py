"""Releases several of the largest keyword counts at once, by one exponential mechanism over sequences.

Counts are whole numbers, so the sequences of one utility can be counted, and one of them drawn, with whole numbers
only; the weights of the utilities are the one place with roundings. Proof: docs/proofs/joint-exponential.md.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, ClassVar, Literal, final

import numpy as np
import numpy.typing as npt

from langchain_dpicl.exceptions import SensitivityError
from langchain_dpicl.privacy._validate import Adjacency, RowShape, check_int, fail
from langchain_dpicl.privacy.accounting.events import BoundedRangeEvent
from langchain_dpicl.privacy.mechanisms.bounded import (
    LARGEST,
    Aggregation,
    BoundedSum,
    Floats,
    Norm,
    Sensitivity,
    matrix,
    row_appears,
)
from langchain_dpicl.privacy.mechanisms.randomness import DECIMALS, Coins, Noise, SecureRandom
from langchain_dpicl.privacy.mechanisms.release_plan import Mechanism, Release

MAX_CHOICES = 1024
"""Most indices one release may hold."""


@final
@dataclass(frozen=True, slots=True)
class KeywordSum(Aggregation):
    """Counts, per public keyword, of the rows that hold it: an entry above zero counts one, anything else nothing.

    Formal guarantees:
      - The counts are whole numbers.
      - A row that changes moves each count by at most 1 in either direction: a range of 2. One that appears or
        vanishes moves all counts the same way by at most 1: a range of 1.
      - No L2 bound (it would grow with the number of keywords), so the Gaussian mechanism refuses this sum.

    Source: Wu et al. (2024), Privacy-Preserving In-Context Learning for Large Language Models, keyword-space
      aggregation; docs/proofs/aggregation.md.
    """

    name: ClassVar[str] = "keyword_sum"

    def sensitivity(self, *, row_shape: RowShape, adjacency: Adjacency) -> Sensitivity:
        """Returns range 2, or 1 for unit rows under add_remove; nothing in L2."""
        return Sensitivity(l2=None, range=1.0 if row_appears(row_shape, adjacency) else 2.0)

    def bounded_rows(self, rows: npt.NDArray[Any], *, width: int) -> Floats:
        """Returns rows of zeros and ones."""
        return (matrix(rows, width) > 0).astype(np.float64)


class _Sequences:
    """The ordered choices of k distinct counts, sorted into shells: shell v holds those whose largest gap is v.

    Position a may take any of the `near(a, v)` largest counts without passing the gap v. These prefixes of one order
    are nested, so the choices within v number near(0, v) * (near(1, v) - 1) * ... * (near(k-1, v) - k + 1).

    Args:
      counts: float64[d] of whole numbers, private.
      k: length of a sequence, at most d.
    """

    __slots__ = ("_at_least", "_top", "order", "widest")

    def __init__(self, counts: Floats, k: int) -> None:
        levels = (counts - counts.min()).astype(np.int64)  # [d], >= 0
        self.order = np.argsort(-levels, kind="stable")
        self.widest = int(levels.max())
        self._top: list[int] = levels[self.order[:k]].tolist()
        tally = np.bincount(levels)
        self._at_least: list[int] = [*tally[::-1].cumsum()[::-1].tolist(), 0]  # counts at level x or above

    def near(self, a: int, v: int) -> int:
        """Returns how many counts lie at most v below the a-th largest (a from 0); for v = -1, those above it."""
        return self._at_least[max(self._top[a] - v, 0)]

    def factors(self, v: int) -> list[int]:
        """Returns, per position, the choices within v that earlier positions leave."""
        at_least = self._at_least
        return [at_least[top - v if top > v else 0] - a for a, top in enumerate(self._top)]

    def shells(self) -> list[int]:
        """Returns the number of sequences of each largest gap 0 .. widest."""
        within = [math.prod(self.factors(v)) for v in range(self.widest + 1)]
        return [within[0], *(b - a for a, b in itertools.pairwise(within))]

    def firsts(self, v: int) -> list[int]:
        """Returns the number of sequences of shell v by the first position whose gap is v."""
        inside, within = self.factors(v - 1), self.factors(v)
        k = len(within)
        return [math.prod(inside[:a]) * (within[a] - inside[a]) * math.prod(within[a + 1 :]) for a in range(k)]

    def draw(self, v: int, *, rng: SecureRandom) -> tuple[int, ...]:
        """Returns a uniform sequence of shell v, exactly."""
        cumulative = list(itertools.accumulate(self.firsts(v)))
        drawn = rng.integer_below(cumulative[-1])
        first = next(a for a, bound in enumerate(cumulative) if drawn < bound)
        ranks: list[int] = []  # positions in `order`
        for a in range(len(self._top)):
            if a == first:  # exactly v below: none of them can have been taken by an earlier position
                low = self.near(a, v - 1)
                ranks.append(low + rng.integer_below(self.near(a, v) - low))
            else:
                ranks.append(_free(ranks, rng.integer_below(self.near(a, v - (a < first)) - a)))
        return tuple(int(self.order[rank]) for rank in ranks)


def _free(taken: list[int], n: int) -> int:
    """Returns the n-th whole number that is not taken."""
    for rank in sorted(taken):
        if n < rank:
            break
        n += 1
    return n


@final
@dataclass(frozen=True, slots=True)
class JointExponentialMechanism(Mechanism):
    """Releases an ordered sequence of distinct indices, near the largest counts, by one exponential mechanism.

    The utility of a sequence s is -max_i (c_(i) - c_{s_i}), where c_(i) is the i-th largest count.

    Formal guarantees:
      - `indices` is s with probability proportional to exp(utility(s) / (2 noise_multiplier range)), up to
        `implementation_delta`.
      - The event is `BoundedRangeEvent(1 / noise_multiplier)`: between neighbours utilities move within an interval of
        length 2 range.
      - Counts beyond 2^20 in magnitude, which no sum of up to 2^20 rows has, are cut to it first.

    Args:
      noise_multiplier: scale over twice the range of a neighbour's change of the counts, in [1e-9, 1e12].
      num_choices: length of the sequence, public, at most the number of keywords.

    Raises:
      ConfigurationError: a parameter out of range.

    >>> JointExponentialMechanism(0.5, num_choices=10).event
    BoundedRangeEvent(bound=2.0)

    Source: Gillenwater, Joseph, Munoz Medina and Ribero Diaz (2022), A Joint Exponential Mechanism for Differentially
      Private Top-k; docs/proofs/joint-exponential.md.
    """

    noise_multiplier: float
    num_choices: int
    name: ClassVar[str] = "joint_exponential"
    norm: ClassVar[Norm] = "range"
    kind: ClassVar[Noise | Coins] = "weighted_choice"
    releases: ClassVar[Literal["vector", "index", "indices"]] = "indices"

    def __post_init__(self) -> None:
        Mechanism.__post_init__(self)
        check_int("num_choices", self.num_choices, low=1, high=MAX_CHOICES)

    @property
    def event(self) -> BoundedRangeEvent:
        """The event of one release."""
        return BoundedRangeEvent(1.0 / self.noise_multiplier)

    def implementation_delta(self, d: int) -> float:
        """Returns what one release over `d` keywords may add to delta: that of one weighted choice, whatever d is."""
        self._check_domain(check_int("d", d, low=1))
        return SecureRandom.implementation_delta(self.kind)

    def check_sum(self, aggregation: Aggregation, sensitivity: Sensitivity, constants: tuple[float, ...]) -> None:
        """Refuses sums other than `KeywordSum`."""
        del sensitivity, constants
        if not isinstance(aggregation, KeywordSum):
            advice = "Its exact sampler counts sequences by whole-number gaps; choose KeywordSum()."
            raise fail("aggregation", "keyword_sum for joint_exponential", aggregation.name, advice)

    def _check_domain(self, d: int) -> None:
        if d < self.num_choices:
            raise fail("num_choices", f"at most the {d} keywords of the public domain", self.num_choices)

    def release(self, total: BoundedSum, *, rng: SecureRandom) -> Release:
        """Chooses the sequence.

        Args:
          total: float64[d] counts with their range sensitivity.
          rng: source of coins.

        Raises:
          ConfigurationError: fewer keywords than choices (both are public).
          SensitivityError: `total` carries no range bound, or is no vector of whole numbers.
        """
        self._check_domain(total.value.size)
        scale = 2.0 * self._scale(total)
        if (total.value % 1.0 != 0).any():
            raise SensitivityError(f"{self.name}: expected whole numbers; build counts with KeywordSum only.")
        counts = np.minimum(np.maximum(total.value, -LARGEST), LARGEST)  # moves no count further than before
        sequences = _Sequences(counts, self.num_choices)
        weights = _weights(sequences.shells(), scale)
        indices = sequences.draw(rng.weighted_choice(weights), rng=rng)
        return Release(index=None, values=None, event=self.event, indices=indices)


def _weights(shells: list[int], scale: float) -> list[Decimal]:
    """Returns shells[v] * exp(-v / scale), to a relative 10^-50."""
    ctx = DECIMALS
    powers = itertools.accumulate(itertools.repeat(_decay(scale), len(shells) - 1), ctx.multiply, initial=Decimal(1))
    return [ctx.multiply(Decimal(number), power) for number, power in zip(shells, powers, strict=True)]


@functools.lru_cache(maxsize=64)
def _decay(scale: float) -> Decimal:
    """Returns exp(-1 / scale), which public numbers alone make: half of the time of a small release."""
    return DECIMALS.exp(DECIMALS.divide(Decimal(-1), Decimal(scale)))
