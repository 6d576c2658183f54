"""The expected cost of a plan in model calls and tokens, and the check that its epsilon is finite."""

from __future__ import annotations

import math
from dataclasses import dataclass

from langchain_dpicl.privacy._validate import check_real, fail


@dataclass(frozen=True, slots=True)
class Cost:
    """Expected model use, from public caps.

    Attributes:
      private_calls: next-token calls on private prompts.
      public_calls: next-token calls on the public prompt.
      tokens_in: prompt tokens, every call counted in full.
      tokens_out: one per call.
    """

    private_calls: int
    public_calls: int
    tokens_in: int
    tokens_out: int

    def money(self, *, price_in: float, price_out: float) -> float:
        """Returns the price, given prices per million tokens."""
        check_real("price_in", price_in, low=0.0)
        check_real("price_out", price_out, low=0.0)
        return (self.tokens_in * price_in + self.tokens_out * price_out) / 1e6


def finite_epsilon(bound: float, *, noise_multiplier: float) -> float:
    """Returns the epsilon of a plan.

    Args:
      bound: what accounting says.
      noise_multiplier: the plan's, for the message.

    Raises:
      ConfigurationError: it is beyond floats.
    """
    if math.isfinite(bound):
        return bound
    advice = "Raise it; where clip and temperature decide it, raise temperature or lower clip."
    raise fail("noise_multiplier", "noise that bounds the privacy loss by a finite epsilon", noise_multiplier, advice)
