"""Converts between epsilon at a delta and the parameters of Gaussian DP and zCDP."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from langchain_dpicl.privacy._validate import check_delta, check_epsilon, check_positive
from langchain_dpicl.privacy.accounting import profiles
from langchain_dpicl.privacy.accounting.epsilon import _up
from langchain_dpicl.privacy.accounting.pld_grid import CurveBound


def gdp_epsilon(mu: float, delta: float) -> float:
    """Bounds epsilon of a mu-GDP mechanism at `delta`, rounded up.

    Args:
      mu: of the mechanism, > 0.
      delta: in (0, 1).

    Raises:
      ConfigurationError: an argument is out of range.

    >>> gdp_epsilon(1.0, 1e-5)
    4.377179

    Source: Dong, Roth and Su (2022), Corollary 2.13 (exact).
    """
    return _curve_epsilon(profiles.gaussian(check_positive("mu", mu)), delta)


def zcdp_epsilon(rho: float, delta: float) -> float:
    """Bounds epsilon of a rho-zCDP mechanism at `delta`, rounded up.

    Args:
      rho: of the mechanism, > 0.
      delta: in (0, 1).

    Raises:
      ConfigurationError: an argument is out of range.

    >>> zcdp_epsilon(0.0244, 1e-6)
    1.000968

    Source: Canonne, Kamath and Steinke (2020), Proposition 12.
    """
    return _curve_epsilon(profiles.zcdp(check_positive("rho", rho)), delta)


def gdp_mu(epsilon: float, delta: float) -> float:
    """The largest mu, rounded down, with `gdp_epsilon(mu, delta) <= epsilon`.

    Args:
      epsilon: the limit, > 0.
      delta: in (0, 1).

    Raises:
      ConfigurationError: an argument is out of range.
    """
    return _largest(profiles.gaussian, epsilon, delta)


def zcdp_rho(epsilon: float, delta: float) -> float:
    """The largest rho, rounded down, with `zcdp_epsilon(rho, delta) <= epsilon`.

    Args:
      epsilon: the limit, > 0.
      delta: in (0, 1).

    Raises:
      ConfigurationError: an argument is out of range.
    """
    return _largest(profiles.zcdp, epsilon, delta)


def _curve_epsilon(profile: profiles.Profile, delta: float) -> float:
    return _up(max(CurveBound("closed form", profile).epsilons(check_delta(delta))))


def _largest(family: Callable[[float], profiles.Profile], epsilon: float, delta: float) -> float:
    at, limit = np.array([check_epsilon(epsilon)]), check_delta(delta)
    low, high = 1e-12, 1e8
    for _ in range(80):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if family(middle).up(at)[0] <= limit else (low, middle)
    while _curve_epsilon(family(low), delta) > epsilon:  # that price is rounded up
        low *= 1.0 - 5e-7
    return low
