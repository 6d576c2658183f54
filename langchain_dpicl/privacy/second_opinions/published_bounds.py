"""Computes what published papers would charge, for comparison only.

Prices here are those of the papers, so that a plan can show its own price beside them.
"""

from __future__ import annotations

import math

from langchain_dpicl.privacy._validate import check_delta, check_epsilon, check_int


def advanced_composition_epsilon(epsilon_per_token: float, tokens: int, *, delta: float) -> float:
    """Returns epsilon of `tokens` adaptive releases by advanced composition: for comparison only, never charged.

    It is epsilon sqrt(2 tokens ln(1 / delta)) + tokens epsilon (e^epsilon - 1), in plain floats that are not rounded
    up; `math.inf` where that overflows. What `accounting` charges for the same tokens, unsampled, is
    `RepeatedEvent(BoundedRangeEvent(epsilon), tokens)`: epsilon^2 / 8 of zCDP a token, and so a fraction of this.

    Args:
      epsilon_per_token: pure epsilon of one token: the range of a score's change over the temperature.
      tokens: how many tokens are released.
      delta: of the composition.

    Raises:
      ConfigurationError: an argument out of range.

    >>> round(advanced_composition_epsilon(0.1, 100, delta=1e-6), 3)
    6.308

    Source: Dwork and Roth (2014), The Algorithmic Foundations of Differential Privacy, Theorem 3.20, which Bhusal et
      al. (2025) apply as their Lemma 3.
    """
    epsilon = check_epsilon(epsilon_per_token)
    count = check_int("tokens", tokens, low=0)
    spread = math.sqrt(2.0 * count * math.log(1.0 / check_delta(delta)))
    try:
        return epsilon * spread + count * epsilon * math.expm1(epsilon)
    except OverflowError:
        return math.inf if count else 0.0
