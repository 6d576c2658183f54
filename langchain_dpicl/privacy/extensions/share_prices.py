"""Prices every kind of share: tickets, several components together, and pools."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy._validate import Adjacency
from langchain_dpicl.privacy.amounts import exact, round_up
from langchain_dpicl.privacy.tickets import Component, Kind, delta_for_mechanisms, price


def share_price(
    components: Sequence[Component], *, delta: float, adjacency: Adjacency, opinions: bool = True
) -> tuple[float, dict[str, Any]]:
    """Returns an upper bound of what the components cost together at `delta`, and how it was computed.

    Formal guarantees:
      - A pool is priced by the closed form of its own notion (GDP or zCDP), everything else as `price` does.
      - Several components never cost more than the sum of their own shares, if their deltas fit into `delta`.
    """
    if len(components) == 1 and components[0].limit is not None:
        return _pool_price(components[0].kind, components[0].limit, delta_for_mechanisms(components, delta))
    joint, pricing = price(components, delta=delta, adjacency=adjacency, opinions=opinions)
    basic = _basic_price(components, delta, adjacency, below=joint)
    return (joint, pricing) if basic is None else (basic, {**pricing, "engine": "sum of shares"})


def _basic_price(components: Sequence[Component], delta: float, adjacency: Adjacency, *, below: float) -> float | None:
    """Returns the sum of the components' own shares if it is valid at `delta` and below the joint price."""
    requested = [(component.epsilon, component.delta) for component in components]
    if len(requested) < 2 or any(epsilon is None or own is None for epsilon, own in requested):
        return None
    total = round_up(sum((exact(epsilon or 0.0) for epsilon, _ in requested), Fraction(0)))
    if total >= below or sum((exact(own or 0.0) for _, own in requested), Fraction(0)) > exact(delta):
        return None
    for component in components:
        cost, _ = share_price((component,), delta=component.delta or 0.0, adjacency=adjacency, opinions=False)
        if cost > (component.epsilon or 0.0):
            return None
    return total


def _pool_price(kind: Kind, limit: float, delta: float) -> tuple[float, dict[str, Any]]:
    closed_form = accounting.gdp_epsilon if kind == "gdp" else accounting.zcdp_epsilon
    return closed_form(limit, delta), {"engine": f"closed form ({kind})", "opinions": [], "skipped": []}
