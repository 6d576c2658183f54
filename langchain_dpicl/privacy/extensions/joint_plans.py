"""Composes several components numerically in a joint plan with one charge."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from fractions import Fraction

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import check_delta, check_epsilon, fail
from langchain_dpicl.privacy.amounts import exact, round_down, round_up
from langchain_dpicl.privacy.desk import Standing
from langchain_dpicl.privacy.extensions.share_prices import share_price
from langchain_dpicl.privacy.promises import MIN_PROPORTION, Promises
from langchain_dpicl.privacy.tickets import Component, implementation_delta_of

# The search for a joint plan's delta computes at most this many prices, and stops at this relative distance.
PROPORTION_STEPS = 10
PROPORTION_TOLERANCE = 1e-6

_OPEN_PLANS: ContextVar[tuple[JointPlan, ...]] = ContextVar("dpicl_open_plans", default=())


class PlannedPromises(Promises):
    """The declared shares of every kind; components declared inside an open plan become part of the plan."""

    _price = staticmethod(share_price)

    @property
    def open_plan(self) -> JointPlan | None:
        """The joint plan whose block this context is in, or None."""
        return next((plan for plan in _OPEN_PLANS.get() if plan.promises is self and plan.open), None)

    def names(self) -> set[str]:
        """Returns the component names used in this process, those of the open plan included."""
        planned = () if self.open_plan is None else self.open_plan.components
        return {*super().names(), *planned}

    def admit(self, component: Component) -> Standing:
        """Adds the component to the open plan; without one, reserves its share."""
        plan = self.open_plan
        return super().admit(component) if plan is None else plan.add(component)


class JointPlan:
    """The block of `Budget.plan`: collects components, then prices them together."""

    def __init__(self, promises: PlannedPromises, *, epsilon: float | None, delta: float | None) -> None:
        self.promises = promises
        self.delta = None if delta is None else check_delta(delta)  # None: in proportion to the joint epsilon
        self.open = True
        self.standing = Standing()
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

    def add(self, component: Component) -> Standing:
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
        components = tuple(self._components.values())
        if not components:
            return
        delta = self._proportional_delta(components) if self.delta is None else self.delta
        _, delta = self.promises.fit(self._epsilon, delta, set(self._components))
        epsilon = self._charge(components, delta) if self._epsilon is None and self.delta is None else self._epsilon
        terms = self.promises.priced(components, epsilon=epsilon, delta=delta, joint=True)
        self.promises.set_aside(terms, self.standing)

    def _proportional_delta(self, components: Sequence[Component]) -> float:
        """Returns the least delta in proportion to the joint epsilon, at most the sum of the components' deltas.

        The cost decreases in delta, so the least one lies between any delta and the proportion of the cost at it:
        every price narrows the range from both sides.
        """
        most = round_down(sum((exact(component.delta or 0.0) for component in components), Fraction(0)))
        gap = exact(implementation_delta_of(components))
        low, high = round_up(gap + (exact(most) - gap) * exact(MIN_PROPORTION)), most
        if most > self.promises.desk.header.delta:
            return most  # above the limit: the caller refuses it
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
