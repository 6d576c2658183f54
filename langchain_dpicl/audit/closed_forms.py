"""Computes the chances of a game's outcome in closed form, from noise-free sums."""

# A second source: written from the definitions, without the package's mechanisms.

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy import integrate, special

from langchain_dpicl.audit.game import Law

Sums = Sequence[float]
Wins = Callable[[Sums, int, float], float]


def gumbel_wins(sums: Sums, place: int, scale: float) -> float:
    """Returns the chance that `place` has the largest sum after Gumbel noise: a softmax."""
    return float(special.softmax(np.array(sums) / scale)[place])


def exponential_wins(sums: Sums, place: int, scale: float) -> float:
    """Returns the chance that `place` has the largest sum after exponential noise (permute-and-flip).

    The integral of e^-x over all x beyond every gap, times the chances 1 - e^-(x - gap) that the others stay below; the
    product is written out.
    """
    gaps = [(other - sums[place]) / scale for at, other in enumerate(sums) if at != place]
    start, total = max(0.0, *gaps), 0.0
    for size in range(len(gaps) + 1):
        for chosen in itertools.combinations(gaps, size):
            total += (-1) ** size * math.exp(sum(chosen) - (1 + size) * start) / (1 + size)
    return total


def gaussian_wins(sums: Sums, place: int, scale: float) -> float:
    """Returns the chance that `place` has the largest sum after Gaussian noise, by a normal integral."""
    gaps = np.array([(sums[place] - other) / scale for at, other in enumerate(sums) if at != place])
    if len(gaps) == 1:
        return float(special.ndtr(gaps[0] / math.sqrt(2.0)))
    density = 1.0 / math.sqrt(2.0 * math.pi)
    integral = integrate.quad(lambda x: density * math.exp(-x * x / 2) * float(special.ndtr(x + gaps).prod()), -9, 9)
    return float(integral[0])


WINS: dict[str, Wins] = {
    "gumbel": gumbel_wins,
    "permute_and_flip": exponential_wins,
    "gaussian": gaussian_wins,
    "joint_exponential": gumbel_wins,
}
"""By the names of mechanisms; joint_exponential: for one keyword."""


def index_law(mechanism: str, sums: tuple[Sums, Sums], *, scale: float, place: int = 0) -> Law:
    """Returns the chances that one of several candidates wins.

    Args:
      mechanism: its name.
      sums: of every candidate, constants included, with the target and without it.
      scale: of the noise: multiplier times sensitivity.
      place: of the candidate.
    """
    wins = WINS[mechanism]
    return lambda factor: (wins(sums[0], place, scale / factor), wins(sums[1], place, scale / factor))


def vector_law(shown: tuple[float, float], *, scale: float, threshold: float) -> Law:
    """Returns the chances that Gaussian noise lifts what the adversary projects on above its threshold.

    Args:
      shown: the projection of the noise-free sum, with the target and without it.
      scale: of the noise along that direction.
      threshold: of the adversary.
    """
    high, low = (value - threshold for value in shown)
    return lambda factor: (float(special.ndtr(high * factor / scale)), float(special.ndtr(low * factor / scale)))


def odds_law(gaps: tuple[float, float]) -> Law:
    """Returns the chances of one of two outcomes, given that it is one of them, from the logarithms of their odds."""
    return lambda factor: (float(special.expit(gaps[0] * factor)), float(special.expit(gaps[1] * factor)))
