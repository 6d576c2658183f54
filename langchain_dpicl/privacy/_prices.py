"""Prices one world of an event: the least of all bounds on its terms, at what its failures leave of delta."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from langchain_dpicl.privacy import _engine
from langchain_dpicl.privacy._grid import Bound
from langchain_dpicl.privacy._terms import World
from langchain_dpicl.privacy._validate import Adjacency


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

    world: World
    delta: float
    removed: float
    added: float
    engine: str
    error: float = 0.0

    @property
    def epsilon(self) -> float:
        """The larger of both orders."""
        return max(self.removed, self.added)


def price_of(world: World, delta: float, adjacency: Adjacency, *, is_coarse: bool) -> Price:
    """The least bound on a world at `delta`, of which its failures are taken here and nowhere else."""
    terms, left = world.terms, world.delta_left(delta)
    if not terms.is_bounded:
        return Price(world, left, math.inf, math.inf, "not private")
    if left <= 0.0:
        return Price(world, left, math.inf, math.inf, "failures alone reach delta")
    if terms.is_empty:
        return Price(world, left, 0.0, 0.0, "nothing released")
    prices = list(_bound_prices(_engine.bounds(terms, adjacency, is_coarse=is_coarse), world, left))
    if any(price.epsilon == math.inf for price in prices):
        prices.extend(_bound_prices((_engine.last_resort(terms, adjacency),), world, left))
    return min(prices, key=lambda price: price.epsilon)


def _bound_prices(bounds: tuple[Bound, ...], world: World, left: float) -> Iterator[Price]:
    for bound in bounds:
        removed, added = bound.epsilons(left)
        yield Price(world, left, removed, added, bound.name, bound.error(left))
