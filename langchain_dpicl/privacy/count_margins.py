"""Tail bounds of the noise of counts, as whole numbers."""

from __future__ import annotations

import math
from fractions import Fraction

from langchain_dpicl.privacy._validate import check_real
from langchain_dpicl.privacy.extensions.count_histograms import tail_bound


def noise_margin(scale: Fraction, confidence: float) -> int:
    """Returns the least m with P[noise > m] at most 1 - confidence.

    Args:
      scale: of the noise, in counts.
      confidence: in (0, 1).

    Raises:
      ConfigurationError: `confidence` out of range.
    """
    wrong = 1.0 - check_real("confidence", confidence, low=0.0, high=1.0, low_open=True, high_open=True)
    return least_count(scale, wrong) - 1


def least_count(scale: Fraction, chance: float) -> int:
    """Returns the least t >= 1 with P[noise >= t] at most `chance`."""
    wide = float(scale)
    least = max(1, math.floor(-wide * math.log(chance * (1.0 + math.exp(-1.0 / wide)))) - 1)
    while tail_bound(scale, least) > chance:
        least += 1
    return least
