"""Prices several components together with one charge, and releases that are drawn from pools of a budget."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from fractions import Fraction
from typing import Any

from langchain_dpicl.exceptions import ConfigurationError, PrivacyBudgetExceededError, SealedShareError
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy._validate import (
    NEEDS_DELTA,
    Adjacency,
    check_delta,
    check_epsilon,
    check_int,
    check_positive,
    effective_delta,
    exact,
    fail,
    round_down,
    round_up,
)
from langchain_dpicl.privacy.accounting.events import GaussianEvent, ZCdpEvent
from langchain_dpicl.privacy.ledger.budget import MIN_PROPORTION, DeclaredShares
from langchain_dpicl.privacy.ledger.shares import Holding, Reservation
from langchain_dpicl.privacy.ledger.tickets import (
    Component,
    Kind,
    delta_for_mechanisms,
    extent_of,
    implementation_delta_of,
    price,
)
from langchain_dpicl.privacy.ledger.writer import LedgerWriter, ShareStatus


def as_pool(component: Component) -> Component:
    """Returns the pool that a share of this epsilon and delta holds: its mu or rho, rounded down."""
    rest = effective_delta(check_delta(component.delta), component.implementation_delta)
    if rest <= 0:
        advice = NEEDS_DELTA if component.delta == 0 else "Raise delta or run fewer releases."
        raise fail("delta", "more than implementation_delta", component.delta, advice)
    size = accounting.gdp_mu if component.kind == "gdp" else accounting.zcdp_rho
    return dataclasses.replace(component, limit=size(check_epsilon(component.epsilon), rest))


class GdpPool(Holding):
    """A pool for unsampled Gaussian releases with adaptively chosen noise. Made by `Budget.gdp_pool`.

    Formal guarantees:
      - The sum of mu^2 over reserved releases never exceeds `mu`^2, so all of them together are `mu`-GDP however
        adaptively they were chosen, provided each is `mu_i`-GDP given the past.

    Source: Smith and Thakurta (2022); Koskela, Tobaben and Honkela (2023).
    """

    @property
    def mu(self) -> float:
        """The pool's limit."""
        return float(self._component.limit or 0.0)

    @property
    def remaining_mu_squared(self) -> float:
        """The part of mu^2 that can still be reserved."""
        return self._left(("gdp", None))

    def reserve(self, *, mu: float, count: int = 1) -> Reservation:
        """Charges `count` releases that are each `mu`-GDP: unsampled Gaussian noise of `1 / mu` sensitivities.

        Raises:
          PrivacyBudgetExceededError: `requested` and `remaining` are in mu^2.
        """
        check_int("count", count, low=1)
        event = GaussianEvent(1 / check_positive("mu", mu))
        return self._take(("gdp", None), count, amount=mu, event=event, refundable=True)


class ZCdpPool(Holding):
    """A pool for zCDP releases with adaptively chosen parameters. Made by `Budget.zcdp_pool`.

    Formal guarantees:
      - The sum of rho over reserved releases never exceeds `rho`, so all of them together are `rho`-zCDP however
        adaptively they were chosen, provided each is `rho_i`-zCDP given the past.

    Source: Whitehouse et al. (2023).
    """

    @property
    def rho(self) -> float:
        """The pool's limit."""
        return float(self._component.limit or 0.0)

    @property
    def remaining_rho(self) -> float:
        """The part of rho that can still be reserved."""
        return self._left(("zcdp", None))

    def reserve(self, *, rho: float, count: int = 1) -> Reservation:
        """Charges `count` releases that are each `rho`-zCDP without subsampling.

        Raises:
          PrivacyBudgetExceededError: `requested` and `remaining` are in rho.
        """
        check_int("count", count, low=1)
        event = ZCdpEvent(check_positive("rho", rho))
        return self._take(("zcdp", None), count, amount=rho, event=event, refundable=True)


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


# The search for a joint plan's delta computes at most this many prices, and stops at this relative distance.
PROPORTION_STEPS = 10
PROPORTION_TOLERANCE = 1e-6

_OPEN_PLANS: ContextVar[tuple[JointPlan, ...]] = ContextVar("dpicl_open_plans", default=())


class PlannedPromises(DeclaredShares):
    """The declared shares of every kind; components declared inside an open plan become part of the plan."""

    _price_together = staticmethod(share_price)

    def __init__(self, desk: LedgerWriter) -> None:
        super().__init__(desk)
        self._names: set[str] = set()

    @property
    def open_plan(self) -> JointPlan | None:
        """The joint plan whose block this context is in, or None."""
        return next((plan for plan in _OPEN_PLANS.get() if plan.promises is self and plan.open), None)

    def names(self) -> set[str]:
        """Returns the component names used in this process, those of the open plan included."""
        planned = () if self.open_plan is None else self.open_plan.components
        return {*self._standings, *self._names, *planned}

    def fresh_name(self, prefix: str) -> str:
        """Returns the first of `prefix`, `prefix-2`, ... that no component uses, and reserves it."""
        with self.desk.lock:
            used = {*self.desk.refresh().shares, *self.names()}
            number = 1
            while (name := prefix if number == 1 else f"{prefix}-{number}") in used:
                number += 1
            self._names.add(name)
            return name

    def admit(self, component: Component) -> ShareStatus:
        """Adds the component to the open plan; without one, reserves its share."""
        self.check_extent(component)
        plan = self.open_plan
        return super().admit(component) if plan is None else plan.add(component)


class JointPlan:
    """The block of `Budget.plan`: collects components, then prices them together."""

    def __init__(self, promises: PlannedPromises, *, epsilon: float | None, delta: float | None) -> None:
        self.promises = promises
        self.delta = None if delta is None else check_delta(delta)  # None: in proportion to the joint epsilon
        self.open = True
        self.standing = ShareStatus()
        self._epsilon = None if epsilon is None else check_epsilon(epsilon)
        self._components: dict[str, Component] = {}

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the components that were declared so far and not sealed before."""
        return tuple(self._components)

    @property
    def epsilon(self) -> float | None:
        """The joint charge; None while the block is open, or if nothing new was declared in it."""
        return None if self.standing.terms is None else self.standing.terms.epsilon

    def add(self, component: Component) -> ShareStatus:
        """Adds a component to the plan; one that is sealed on the same terms keeps its own share."""
        if component.limit is not None:
            raise ConfigurationError("pool: expected no open plan, found one. Declare pools outside of the block.")
        if component.name in self._components:
            raise fail("component", "a name not yet used in this plan", component.name)
        if component.delta is None and self.delta is None:
            raise fail("epsilon, delta", "one of them, or plan(delta=...)", (None, None), "Give the share as epsilon=.")
        sealed = self.promises.sealed(component)
        if sealed is not None:
            return sealed
        if component.epsilon is not None:
            self.promises.check_price((component,), epsilon=component.epsilon, delta=component.delta)
        self._components[component.name] = component
        return self.standing

    def close(self) -> None:
        """Prices the components together and reserves their joint share."""
        while self._components:
            try:
                self._close(tuple(self._components.values()))
            except (PrivacyBudgetExceededError, SealedShareError):
                if not self._leave_to_others():
                    raise
            else:
                return

    def _leave_to_others(self) -> bool:
        """Takes out of the plan what another process sealed meanwhile on the same terms; returns whether it did."""
        found = {name: self.promises.sealed(component) for name, component in self._components.items()}
        sealed = {name: standing.terms for name, standing in found.items() if standing is not None}
        for name, terms in sealed.items():
            del self._components[name]
            self.standing.terms = terms  # that of the rest replaces it, where there is one
        return bool(sealed)

    def _close(self, components: tuple[Component, ...]) -> None:
        delta = self._proportional_delta(components) if self.delta is None else self.delta
        _, delta = self.promises.fit(self._epsilon, delta, set(self._components), extent_of(components))
        epsilon = self._charge(components, delta) if self._epsilon is None and self.delta is None else self._epsilon
        terms = self.promises.priced(components, epsilon=epsilon, delta=delta, joint=True)
        self.promises.add_pending(terms, self.standing)

    def _proportional_delta(self, components: Sequence[Component]) -> float:
        """Returns the least delta in proportion to the joint epsilon, at most the sum of the components' deltas.

        The cost decreases in delta, so the least one lies between any delta and the proportion of the cost at it:
        every price narrows the range from both sides.
        """
        most = round_down(sum((exact(component.delta or 0.0) for component in components), Fraction(0)))
        gap = exact(implementation_delta_of(components))
        low, high = round_up(gap + (exact(most) - gap) * exact(MIN_PROPORTION)), most
        if most == 0 or most > self.promises.desk.header.delta:
            return most  # all of them pure; or above the limit: the caller refuses it
        if self._epsilon is not None:
            fair = min(self._proportion(self._epsilon), most)
            return fair if fair >= low and self._cost(components, fair) <= self._epsilon else most
        at = most
        for step in range(PROPORTION_STEPS):
            fair = self._proportion(self._cost(components, at))
            low, high = max(low, min(at, fair)), min(high, max(at, fair))
            if high <= low * (1 + PROPORTION_TOLERANCE):
                break
            # Iterating from the proportion converges fast if the cost is flat; every third step bisects.
            at = math.sqrt(low * high) if step % 3 == 2 else min(max(fair, low), high)
        # At the sum of the deltas a plan never costs more than its shares; avoid rounding just below it.
        if high > most * (1 - 2 * PROPORTION_TOLERANCE):
            return most
        cost = self._cost(components, high)
        fair = max(self._proportion(cost), low)
        return fair if self._cost(components, fair) <= cost * (1 + PROPORTION_TOLERANCE) else high

    def _charge(self, components: Sequence[Component], delta: float) -> float | None:
        """Returns the epsilon in proportion to `delta` if it covers the cost and is at most all shares; else None."""
        limits = self.promises.desk.header
        if limits.delta == 0:
            return None  # what the components cost: their epsilons add up
        charge = exact(limits.epsilon) * exact(delta) / exact(limits.delta)
        shares = sum((exact(component.epsilon or 0.0) for component in components), Fraction(0))
        return round_up(charge) if exact(self._cost(components, delta)) < charge <= shares else None

    def _cost(self, components: Sequence[Component], delta: float) -> float:
        return share_price(components, delta=delta, adjacency=self.promises.desk.header.adjacency, opinions=False)[0]

    def _proportion(self, epsilon: float) -> float:
        limits = self.promises.desk.header
        return round_down(exact(limits.delta) * exact(min(epsilon, limits.epsilon)) / exact(limits.epsilon))

    def __repr__(self) -> str:
        return f"JointPlan(components={list(self._components)}, open={self.open})"


@contextmanager
def open_plan(promises: PlannedPromises, *, epsilon: float | None, delta: float | None) -> Iterator[JointPlan]:
    """Runs a joint plan; an exception inside declares nothing, and a plan inside a plan is refused."""
    if promises.open_plan is not None:
        raise ConfigurationError("plan: expected no open plan of this budget, found one. Close it first.")
    plan = JointPlan(promises, epsilon=epsilon, delta=delta)
    token = _OPEN_PLANS.set((*_OPEN_PLANS.get(), plan))
    try:
        yield plan
        plan.close()
    except BaseException:
        plan.standing.refusal = "its plan raised an error, so nothing was declared."
        raise
    finally:
        plan.open = False
        _OPEN_PLANS.reset(token)
