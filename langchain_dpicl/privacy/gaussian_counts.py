"""Gaussian noise on counts of declared values, for units that stand for many of them. Knows no ledger, no model.

A unit of k values moves k counts: Laplace noise grows with k, Gaussian noise with its root. Proof:
docs/proofs/value-counts.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, final

import numpy as np

from langchain_dpicl.privacy._validate import Adjacency, check_int, check_real, fail
from langchain_dpicl.privacy.bounded import BoundedSum, Closed, Sensitivity
from langchain_dpicl.privacy.events import GaussianEvent
from langchain_dpicl.privacy.mechanisms import GaussianMechanism
from langchain_dpicl.privacy.randomness import SecureRandom
from langchain_dpicl.privacy.unit_values import _AtMost


@final
@dataclass(frozen=True, slots=True)
class GaussianCountMechanism(Closed):
    """Adds normal noise to the counts of declared values and rounds them to whole numbers.

    Formal guarantees:
      - The counts are those of `GaussianMechanism` on the vector of all counts, at their L2 sensitivity, rounded: a
        post-processing. The event is `GaussianEvent(noise_multiplier)`.
      - Every declared value gets a count, whether anybody holds it or not. Counts above 2^20 are cut to it first.

    Args:
      noise_multiplier: standard deviation of the noise over the L2 sensitivity, in [1e-9, 1e12].

    Raises:
      ConfigurationError: `noise_multiplier` out of range.

    Source: Balle and Wang (2018), Theorem 8; docs/proofs/value-counts.md, section "Keywords".
    """

    noise_multiplier: float
    threshold: ClassVar[None] = None
    name: ClassVar[str] = "gaussian"

    def __post_init__(self) -> None:
        checked = check_real("noise_multiplier", self.noise_multiplier, low=1e-9, high=1e12)
        object.__setattr__(self, "noise_multiplier", checked)

    def scale(self, rule: _AtMost, adjacency: Adjacency) -> Fraction:
        """Returns the standard deviation of the noise, in counts.

        Args:
          rule: what a unit stands for.
          adjacency: neighbouring relation.
        """
        return Fraction(self.noise_multiplier * rule.l2_sensitivity(adjacency))

    def event(self, declared: tuple[str, ...] | None) -> GaussianEvent:
        """Returns what one release costs.

        Args:
          declared: the values that get a count.

        Raises:
          ConfigurationError: they are not declared: Gaussian noise has no threshold here.
        """
        if declared is None:
            raise fail("values", "declared ones, of which every one gets a count", declared)
        return GaussianEvent(self.noise_multiplier)

    def implementation_delta(self, num_values: int) -> float:
        """Returns what one release may add to delta, beyond the ideal mechanism.

        Args:
          num_values: how many values are declared.
        """
        return GaussianMechanism(self.noise_multiplier).implementation_delta(check_int("num_values", num_values, low=1))

    def release(
        self,
        counts: Mapping[str, int],
        *,
        declared: Iterable[str],
        rule: _AtMost,
        adjacency: Adjacency,
        rng: SecureRandom,
    ) -> tuple[tuple[str, int], ...]:
        """Returns the declared values with noisy counts, in their order.

        Args:
          counts: how many units hold each value; private.
          declared: the declared values, public.
          rule: what a unit stands for; holds the sensitivity.
          adjacency: neighbouring relation.
          rng: source of noise.
        """
        names = tuple(declared)
        held = np.array([counts.get(name, 0) for name in names], dtype=np.float64)
        moved = Sensitivity(l2=rule.l2_sensitivity(adjacency), range=None)
        released = GaussianMechanism(self.noise_multiplier).release(
            BoundedSum(held, moved, "units", adjacency), rng=rng
        )
        noisy = () if released.values is None else released.values.tolist()
        return tuple((name, math.floor(count + 0.5)) for name, count in zip(names, noisy, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Returns the public parameters, for reports."""
        return {"name": self.name, "noise_multiplier": self.noise_multiplier}
