"""From the normal form of an event to every bound we can prove for it. Knows no grid and no second opinion."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from langchain_dpicl.privacy import _allocation
from langchain_dpicl.privacy import _profiles as profiles
from langchain_dpicl.privacy._grid import Bound, CurveBound, GridBound, MomentBound, Steps, compose, deltas
from langchain_dpicl.privacy._profiles import FloatArray, Profile
from langchain_dpicl.privacy._terms import Terms
from langchain_dpicl.privacy._validate import Adjacency

if TYPE_CHECKING:
    from dp_accounting.pld.pld_pmf import PLDPmf

_MANY = 200_000  # pure steps; beyond, their exact composition is not worth its table
_PURE_RHO = 0.5  # a pure step is epsilon^2 / 2-zCDP (Bun and Steinke 2016, Proposition 3.3), a Gaussian mu^2 / 2
_LARGEST_LOSS = 600.0  # inside a block on one secret sample; e^x must stay a float

# --- what a composition consists of -------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def steps(terms: Terms, adjacency: Adjacency) -> tuple[tuple[Profile, int], ...]:
    """The dominating pairs of a composition and how often each occurs; unsampled families enter as one block each."""
    found: list[tuple[Profile, int]] = []
    if terms.mu_squared > 0:
        found.append((profiles.gaussian(math.sqrt(terms.mu_squared)), 1))
    found.extend((_pure_block(epsilon, count), 1) for epsilon, count in terms.pure)
    if terms.ranges or terms.rho > 0:
        found.append((_range_block(terms), 1))
    found.extend((_sampled_step(base, rate, adjacency), count) for base, rate, count in terms.sampled)
    found.extend((_ball_step(mu, rate, adjacency), count) for mu, rate, count in terms.balls)
    found.extend((allocated_step(*deal, adjacency), count) for *deal, count in terms.allocated)
    return tuple(found)


def _pure_block(epsilon: float, count: int) -> Profile:
    if count > _MANY:
        return profiles.minimum(profiles.zcdp(_PURE_RHO * count * epsilon**2))
    return profiles.randomised_response(epsilon, count)


def _range_block(terms: Terms) -> Profile:
    """All bounded-range and zCDP steps as one interactive mechanism; see docs/proofs/zcdp-block.md."""
    as_zcdp = profiles.zcdp(terms.range_rho + terms.rho)
    if not terms.ranges:
        return profiles.minimum(as_zcdp)
    one_by_one: list[tuple[Profile, int]] = [(profiles.bounded_range(bound), count) for bound, count in terms.ranges]
    if terms.rho > 0:
        one_by_one.append((profiles.zcdp(terms.rho), 1))
    if len(one_by_one) == 1 and one_by_one[0][1] == 1:
        return one_by_one[0][0]
    options = [as_zcdp, _tabulated(compose(one_by_one, is_coarse=False))]
    if len(one_by_one) == 1 and one_by_one[0][1] <= _MANY:
        options.append(profiles.randomised_response(*terms.ranges[0]))
    return profiles.minimum(*options)


@lru_cache(maxsize=256)
def _sampled_step(base: Terms, rate: float, adjacency: Adjacency) -> Profile:
    """One release, or a block of them, on one secret sample: composed inside, amplified once."""
    profile = as_one(base, adjacency)
    return profiles.symmetrised(profile, rate) if adjacency == "replace_one" else profiles.amplified(profile, rate)


@lru_cache(maxsize=256)
def _ball_step(mu: float, rate: float, adjacency: Adjacency) -> Profile:
    """One Gaussian release of a sample's sum of vectors out of a ball; under replace_one mu is that of its diameter."""
    if adjacency == "replace_one":
        return profiles.replaced_in_ball(mu / 2.0, rate)
    return profiles.amplified(profiles.gaussian(mu), rate)


@lru_cache(maxsize=256)
def allocated_step(base: Terms, num_batches: int, rate: float, adjacency: Adjacency) -> Profile:
    """All releases on one secret deal: composed inside a batch, allocated, and sampled on top."""
    if adjacency == "replace_one":  # `readings` does not ask for it; no theorem, so one batch's price
        return profiles.symmetrised(as_one(base, adjacency), rate)
    profile = _allocation.allocated(as_one(base, adjacency), num_batches)
    return profile if rate == 1.0 else profiles.amplified(profile, rate)


def as_one(terms: Terms, adjacency: Adjacency) -> Profile:
    """One profile of a whole composition, against every strategy."""
    inside = steps(terms, adjacency)
    is_one = len(inside) == 1 and inside[0][1] == 1
    return inside[0][0] if is_one else _tabulated(compose(inside, is_coarse=False))


def _tabulated(bound: GridBound) -> Profile:
    """The profile of something composed on a grid, as a curve that can be amplified."""
    x_up, up = _table(bound.up, bound.lost)
    if bound.down is bound.up:
        return profiles.tabulated(x_up, up, x_up, up)
    x_down, down = _table(bound.down, bound.lost)
    # Both start at the total variation distance, so the smaller bound holds for both.
    return profiles.tabulated(x_up, np.minimum(up, down[0]), x_down, np.minimum(down, up[0]))


def _table(pmf: PLDPmf, lost: float) -> tuple[FloatArray, FloatArray]:
    """Knots of H_x; from the last one on it counts as constant, that is, as mass at infinite loss."""
    floor = 4.0 * (float(pmf.get_delta_for_epsilon(math.inf)) + lost)
    top = float(pmf.get_epsilon_for_delta(floor)) if floor < 1.0 else 0.0
    x = np.linspace(0.0, min(max(top, 1e-9), _LARGEST_LOSS), 4097)
    return x, np.minimum(deltas(pmf, x) + lost, 1.0)


# --- bounds on a composition --------------------------------------------------------------------------------------


@lru_cache(maxsize=32)
def bounds(terms: Terms, adjacency: Adjacency, *, is_coarse: bool) -> tuple[Bound, ...]:
    """All bounds we can prove for a composition that is private and not empty; the least of them is its price."""
    inside = steps(terms, adjacency)
    is_sampled = bool(terms.sampled or terms.balls)
    found: list[Bound] = [] if is_sampled or terms.allocated else _closed_forms(terms)
    if len(inside) > 1 or inside[0][1] > 1:
        found.append(compose(inside, is_coarse=is_coarse))
        found.extend(_sum_of_pure(inside))
    elif is_sampled:
        found.append(CurveBound("one sampled release, closed form", inside[0][0]))
    elif terms.allocated:
        found.append(CurveBound("random allocation", inside[0][0]))
    elif terms.ranges:
        found.append(CurveBound("bounded-range block", inside[0][0]))
    return tuple(found)


def _sum_of_pure(inside: Steps) -> list[Bound]:
    """Where every step's loss is bounded, the sum of the bounds: what few and loud steps cost at most."""
    tops = [(max(p.top_up, p.top_down) * (1.0 + 1e-9), p, count) for p, count in inside]
    if any(curve(np.array([top]))[0] > 0.0 for top, p, _ in tops for curve in (p.up, p.down)):
        return []
    total = math.fsum(count * top for top, _, count in tops)
    return [CurveBound("sum of pure losses", profiles.randomised_response(total))]


def last_resort(terms: Terms, adjacency: Adjacency) -> Bound:
    """A bound for deltas so small that the errors of a transform would swallow them."""
    return MomentBound("moments of the PLD", steps(terms, adjacency))


def _closed_forms(terms: Terms) -> list[Bound]:
    """The bounds on an unsampled composition that need no grid."""
    if terms == Terms(mu_squared=terms.mu_squared):
        return [CurveBound("Gaussian closed form", profiles.gaussian(math.sqrt(terms.mu_squared)))]
    pure = terms.pure + terms.ranges  # a bounded-range step is pure as well
    found: list[Bound] = []
    if len(pure) == 1 and pure[0][1] <= _MANY and terms == Terms(pure=terms.pure, ranges=terms.ranges):
        found.append(CurveBound("optimal composition of pure steps", profiles.randomised_response(*pure[0])))
    pure_rho = math.fsum(_PURE_RHO * count * epsilon**2 for epsilon, count in terms.pure)
    rho = terms.rho + terms.range_rho + terms.mu_squared / 2.0 + pure_rho
    return [*found, CurveBound("zCDP conversion", profiles.zcdp(rho))]
