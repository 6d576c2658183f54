"""Prices the normal form of an event: the least of every bound that is proved for it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

from langchain_dpicl.privacy._validate import Adjacency
from langchain_dpicl.privacy.accounting import profiles
from langchain_dpicl.privacy.accounting.normal_form import Terms, UnitTerms
from langchain_dpicl.privacy.accounting.pld_grid import (
    Bound,
    CurveBound,
    GridBound,
    Losses,
    MomentBound,
    Steps,
    compose,
    deltas,
    least_epsilon,
)
from langchain_dpicl.privacy.accounting.profiles import FloatArray, Profile
from langchain_dpicl.privacy.ledger.amounts import exact, round_up

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
    found.extend((step.profile(adjacency), count) for step, count in terms.others)
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
    profile = single_profile(base, adjacency)
    return profiles.symmetrise(profile, rate) if adjacency == "replace_one" else profiles.amplify_poisson(profile, rate)


def single_profile(terms: Terms, adjacency: Adjacency) -> Profile:
    """One profile of a whole composition, against every strategy."""
    inside = steps(terms, adjacency)
    is_one = len(inside) == 1 and inside[0][1] == 1
    return inside[0][0] if is_one else _tabulated(compose(inside, is_coarse=False))


def _tabulated(bound: GridBound) -> Profile:
    """The profile of something composed on a grid, as a curve that can be amplified."""
    x_up, up = _table(bound.up, bound.lost)
    if bound.down is bound.up:
        return profiles.tabulated_profile(x_up, up, x_up, up)
    x_down, down = _table(bound.down, bound.lost)
    # Both start at the total variation distance, so the smaller bound holds for both.
    return profiles.tabulated_profile(x_up, np.minimum(up, down[0]), x_down, np.minimum(down, up[0]))


def _table(losses: Losses, lost: float) -> tuple[FloatArray, FloatArray]:
    """Knots of H_x; from the last one on it counts as constant, that is, as mass at infinite loss."""
    floor = 4.0 * (losses.infinite + lost)
    top = least_epsilon(losses, floor) if floor < 1.0 else 0.0
    x = np.linspace(0.0, min(max(top, 1e-9), _LARGEST_LOSS), 4097)
    return x, np.minimum(deltas(losses, x) + lost, 1.0)


# --- bounds on a composition --------------------------------------------------------------------------------------


@lru_cache(maxsize=2)  # of up to 2^20 cells each; prices are remembered elsewhere
def bounds(terms: Terms, adjacency: Adjacency, *, is_coarse: bool) -> tuple[Bound, ...]:
    """All bounds we can prove for a composition that is private and not empty; the least of them is its price."""
    inside = steps(terms, adjacency)
    found: list[Bound] = [] if terms.sampled or terms.others else _closed_forms(terms)
    if len(inside) > 1 or inside[0][1] > 1:
        found.append(compose(inside, is_coarse=is_coarse))
        found.extend(_sum_of_pure(inside))
    elif terms.sampled:
        found.append(CurveBound("one sampled release, closed form", inside[0][0]))
    elif terms.others:
        found.append(CurveBound(terms.others[0][0].bound_name, inside[0][0]))
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


# --- the price of one world -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Price:
    """The least bound on a world; remembered, so it holds no distributions.

    Attributes:
      world: what is priced.
      delta: what the world's failures leave of the delta that was asked for.
      removed: epsilon of removals.
      added: epsilon of additions.
      engine: what proved the bound.
      error: how far the bound may lie above the epsilon of the dominating pairs.
    """

    world: UnitTerms
    delta: float
    removed: float
    added: float
    engine: str
    error: float = 0.0

    @property
    def epsilon(self) -> float:
        """The larger of both orders."""
        return max(self.removed, self.added)


def price_of(world: UnitTerms, delta: float, adjacency: Adjacency, *, is_coarse: bool) -> Price:
    """The least bound on a world at `delta`, of which its failures are taken here and nowhere else."""
    terms, left = world.terms, world.delta_left(delta)
    if not terms.is_bounded:
        return Price(world, left, math.inf, math.inf, "not private")
    if delta == 0.0 and world.failure == 0.0:
        pure = _pure_epsilon(terms)
        return Price(world, left, pure, pure, "sum of pure losses")
    if left <= 0.0:
        return Price(world, left, math.inf, math.inf, "failures alone reach delta")
    if terms.is_empty:
        return Price(world, left, 0.0, 0.0, "nothing released")
    prices = list(_bound_prices(bounds(terms, adjacency, is_coarse=is_coarse), world, left))
    if any(price.epsilon == math.inf for price in prices):
        prices.extend(_bound_prices((last_resort(terms, adjacency),), world, left))
    return min(prices, key=lambda price: price.epsilon)


def _pure_epsilon(terms: Terms) -> float:
    """The epsilons of all pure steps, added: at delta 0 their composition costs no less.

    What is drawn with a gap has no price at delta 0: Gaussians and zCDP steps, secret samples, what extensions price.
    """
    if terms.mu_squared > 0.0 or terms.rho > 0.0 or terms.sampled or terms.others:
        return math.inf
    return round_up(sum((exact(epsilon) * count for epsilon, count in terms.pure + terms.ranges), Fraction(0)))


def _bound_prices(found: tuple[Bound, ...], world: UnitTerms, left: float) -> Iterator[Price]:
    for bound in found:
        removed, added = bound.epsilons(left)
        yield Price(world, left, removed, added, bound.name, bound.error(left))
