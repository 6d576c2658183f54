"""What a plan can be expected to release: occupancy of slots and the chance of the right index.

Works on public numbers only (declared sizes, rates, noise) and on a stated guess of how far rows agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import stats

from langchain_dpicl.privacy.plans import ReleasePlan
from langchain_dpicl.privacy.sampling import BalancedSlots, PoissonUnits

_GRID = 2001


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How full rows are expected to be, from declared sizes.

    Attributes:
      rows: expected number of rows with at least one unit.
      shots: expected units per row after truncation (slots count empty ones too).
      empty: chance that a slot is empty (0 for unit rows).
    """

    rows: float
    shots: float
    empty: float


def occupancy(plan: ReleasePlan, public_size: int) -> Occupancy:
    """Returns the expected occupancy of one sample from `public_size` units."""
    sampler = plan.sampler
    if isinstance(sampler, PoissonUnits):
        return Occupancy(rows=public_size * sampler.sampling_rate, shots=1.0, empty=0.0)
    shots, slots = sampler.shots_per_slot, sampler.num_slots
    if isinstance(sampler, BalancedSlots):
        filled = min(shots, public_size / slots)
        return Occupancy(rows=min(slots, public_size), shots=filled, empty=max(0.0, 1.0 - public_size / slots))
    counts = np.arange(shots)
    # A slot holds Binomial(n, q / M) units before truncation.
    chance = stats.binom.pmf(counts, public_size, sampler.sampling_rate / slots)
    expected = float((counts * chance).sum() + shots * (1.0 - chance.sum()))
    return Occupancy(rows=slots * (1.0 - float(chance[0])), shots=expected, empty=float(chance[0]))


def votes(rows: float, agreement: float, candidates: int) -> np.ndarray:
    """Returns float64[d] of expected sums: `agreement` on the right index, half the rest on one rival, rest spread."""
    out = np.full(max(candidates, 2), rows * (1 - agreement) / 2 / max(candidates - 2, 1))
    out[0], out[1] = rows * agreement, rows * (1 - agreement) / 2
    return out


def noise_scale(plan: ReleasePlan) -> float:
    """Returns the scale of the noise on the sum (standard deviation, Gumbel or exponential scale)."""
    bound = getattr(plan.sensitivity, plan.mechanism.norm)
    return float(plan.mechanism.noise_multiplier * bound)


def chance_of_right_index(plan: ReleasePlan, *, rows: float, agreement: float, candidates: int) -> float:
    """Returns the probability that the noisy maximum is the right index, by closed form or quadrature.

    Source: the winner of `value + noise` is index 0 with probability `E[prod_i F(v_0 - v_i + noise)]`; for Gumbel
    noise this is the softmax.
    """
    values = votes(rows, agreement, candidates)
    scale = noise_scale(plan)
    gaps = (values[0] - values[1:]) / scale
    if plan.mechanism.name == "gumbel":
        return float(1.0 / (1.0 + np.exp(-gaps).sum()))
    law = stats.norm if plan.mechanism.name == "gaussian" else stats.expon
    u = (np.arange(_GRID) + 0.5) / _GRID
    noise = law.ppf(u)
    unique, counts = np.unique(gaps, return_counts=True)
    log_chance = (counts[:, None] * law.logcdf(unique[:, None] + noise[None, :])).sum(axis=0)
    return float(np.exp(log_chance).mean())


def signal_to_noise(plan: ReleasePlan, *, rows: float, agreement: float) -> float:
    """Returns (right - rival) / standard deviation of the noise."""
    deviation = {"gaussian": 1.0, "gumbel": float(np.pi / np.sqrt(6)), "permute_and_flip": 1.0}[plan.mechanism.name]
    return float(rows * (agreement - (1 - agreement) / 2) / (noise_scale(plan) * deviation))
