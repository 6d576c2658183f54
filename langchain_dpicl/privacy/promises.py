"""What a budget has promised in this process and not yet sealed, and how a share gets in. Knows no record and no model.

A share is priced, set aside here, and sealed in the ledger by its first reservation. Sums are exact; nothing here
draws, reads or releases anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from fractions import Fraction
from typing import Any

from langchain_dpicl.exceptions import ConfigurationError, PrivacyBudgetExceededError, SealedShareError
from langchain_dpicl.privacy._validate import check_delta, check_epsilon, fail
from langchain_dpicl.privacy.amounts import exact, round_down, round_up
from langchain_dpicl.privacy.desk import Desk, Standing
from langchain_dpicl.privacy.ledger_state import LedgerState
from langchain_dpicl.privacy.refusals import check_same_terms, exceeded
from langchain_dpicl.privacy.tickets import (
    Component,
    ShareTerms,
    event_of_components,
    implementation_delta_of,
    price,
)

# A request this little above what remains is float arithmetic (0.1 + 0.2); it gets what remains, never more.
ROUNDING_SLACK = Fraction(1, 10**12)

# The part of delta that a share gets at least when it asks for no epsilon: some shares cost next to none.
MIN_PROPORTION = 1e-3

# A joint plan's delta is looked for with so many prices, and to this relative distance.
PROPORTION_STEPS = 10
PROPORTION_TOLERANCE = 1e-6

_OPEN_PLANS: ContextVar[tuple[JointPlan, ...]] = ContextVar("dpicl_open_plans", default=())


class Promises:
    """The shares declared in this process, and the room that all shares leave."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self._standings: dict[str, tuple[Component, Standing]] = {}
        self._names: set[str] = set()

    @property
    def open_plan(self) -> JointPlan | None:
        """The joint plan whose block this context is in, or None."""
        return next((plan for plan in _OPEN_PLANS.get() if plan.promises is self and plan.open), None)

    def fresh_name(self, prefix: str) -> str:
        """Returns the first of `prefix`, `prefix-2`, ... that nobody was given or has used."""
        with self.desk.lock:
            planned = () if self.open_plan is None else self.open_plan.components
            taken = {*self.desk.refresh().shares, *self._standings, *self._names, *planned}
            number = 1
            while (name := prefix if number == 1 else f"{prefix}-{number}") in taken:
                number += 1
            self._names.add(name)
            return name

    def admit(self, component: Component) -> Standing:
        """Sets aside a share of one component, unless it stands already; inside a plan, hands it to the plan."""
        if self.open_plan is not None:
            return self.open_plan.add(component)
        known = self.known(component)
        if known is not None:
            return known
        try:
            return self._admit_new(component)
        except (PrivacyBudgetExceededError, SealedShareError):
            known = self.known(component)  # another process may have sealed this very share meanwhile
            if known is None:
                raise
        return known

    def _admit_new(self, component: Component) -> Standing:
        wanted = component.delta if component.delta is not None else self._proportional_delta(component)
        epsilon, delta = self.fit(component.epsilon, wanted, {component.name})
        asked = None if component.epsilon is None else epsilon
        return self.set_aside(self.priced((component,), epsilon=asked, delta=delta), Standing())

    def _proportional_delta(self, component: Component) -> float:
        """Returns a delta in the proportion of a share whose epsilon is not known before it is priced."""
        limits = self.desk.header
        left = round_down(self.room({component.name})[1])
        if left <= 0:
            raise exceeded(f"delta of budget {limits.name!r}", limits.delta, Fraction(0), "Every delta is promised.")
        least, _ = price((component,), delta=left, adjacency=limits.adjacency, opinions=False)
        share = min(max(least / limits.epsilon, MIN_PROPORTION), 1.0)
        return round_down(exact(left) * exact(share))

    def known(self, component: Component) -> Standing | None:
        """Returns the standing of the same share if it is sealed, or pending on the same terms.

        Raises:
          SealedShareError: it is sealed on other terms.
        """
        with self.desk.lock:
            sealed = self.sealed(component)
            if sealed is not None:
                return sealed
            mine, standing = self._standings.get(component.name, (None, None))
            if mine is None or standing is None or standing.refusal or mine.changed_terms(component):
                return None
            return standing

    def sealed(self, component: Component) -> Standing | None:
        """Returns the standing of the same share if it is sealed.

        Raises:
          SealedShareError: it is sealed on other terms.
        """
        state = self.desk.refresh()
        sealed = state.sealed_component(component.name)
        if sealed is None:
            return None
        check_same_terms(component, sealed)
        return Standing(terms=state.shares[component.name].terms)

    def check_price(
        self, components: Sequence[Component], *, epsilon: float | None, delta: float | None, opinions: bool = False
    ) -> tuple[float, dict[str, Any]]:
        """Returns the price of components; slow, so it runs without the lock.

        Raises:
          PrivacyBudgetExceededError: they cost more than `epsilon`.
        """
        adjacency = self.desk.header.adjacency
        cost, pricing = price(components, delta=check_delta(delta), adjacency=adjacency, opinions=opinions)
        limit = self.desk.header.epsilon if epsilon is None else epsilon
        if cost > limit:
            names = ", ".join(repr(component.name) for component in components)
            advice = "Raise the share or the noise, or declare fewer tickets."
            raise exceeded(f"epsilon of {names}", cost, exact(limit), advice)
        return cost, pricing

    def priced(
        self, components: Sequence[Component], *, epsilon: float | None, delta: float, joint: bool = False
    ) -> ShareTerms:
        """Returns the terms of a share, second opinions included."""
        cost, pricing = self.check_price(components, epsilon=epsilon, delta=delta, opinions=True)
        return ShareTerms(
            components=tuple(components),
            epsilon=cost if epsilon is None else epsilon,
            delta=delta,
            joint=joint,
            event=event_of_components(components),
            pricing={**pricing, "epsilon": cost},
        )

    def set_aside(self, terms: ShareTerms, standing: Standing) -> Standing:
        """Makes a priced share pending, replacing unsealed ones of the same names.

        Raises:
          PrivacyBudgetExceededError: it does not fit.
          SealedShareError: another process sealed one of the names meanwhile.
        """
        names = {component.name for component in terms.components}
        with self.desk.lock:
            if names & set(self.desk.refresh().shares):
                raise SealedShareError(f"{sorted(names)}: another process sealed one of these. Declare them again.")
            epsilon, delta = self.fit(terms.epsilon, terms.delta, names)
            if epsilon < terms.pricing["epsilon"] or delta < terms.delta:
                raise exceeded("epsilon", terms.pricing["epsilon"], exact(epsilon), "Lower the share a little.")
            standing.terms = terms.charged(epsilon)
            for name in names:
                _, old = self._standings.pop(name, (None, None))
                if old is not None:
                    old.refusal = "it was declared anew before its first reservation."
            self._standings.update({component.name: (component, standing) for component in terms.components})
            return standing

    def fit(self, epsilon: float | None, delta: float | None, replaced: set[str]) -> tuple[float, float]:
        """Returns the charge, lowered to what remains if it is above by float rounding only.

        Raises:
          PrivacyBudgetExceededError: it is above what remains.
        """
        room = self.room(replaced)
        charges = []
        for name, wanted, left in zip(("epsilon", "delta"), (epsilon or 0.0, delta or 0.0), room, strict=True):
            if exact(wanted) > left * (1 + ROUNDING_SLACK):
                advice = "Shares add up; declare components inside `with budget.plan():`, or lower them."
                raise exceeded(f"{name} of budget {self.desk.header.name!r}", wanted, left, advice)
            charges.append(wanted if exact(wanted) <= left else round_down(left))
        return charges[0], charges[1]

    def room(self, replaced: set[str] | None = None) -> tuple[Fraction, Fraction]:
        """Returns epsilon and delta that no share has, leaving out shares about to be replaced."""
        with self.desk.lock:
            state = self.desk.refresh()
            epsilon, delta = state.spent
            for terms in self.pending(state):
                if not {component.name for component in terms.components} & (replaced or set()):
                    epsilon += exact(terms.epsilon)
                    delta += exact(terms.delta)
            limits = self.desk.header
            none = Fraction(0)
            return max(exact(limits.epsilon) - epsilon, none), max(exact(limits.delta) - delta, none)

    def pending(self, state: LedgerState) -> list[ShareTerms]:
        """Returns the shares declared in this process and not yet sealed."""
        standings = {id(s): s for name, (_, s) in self._standings.items() if name not in state.shares}
        return [s.terms for s in standings.values() if s.terms is not None and not s.refusal]


class JointPlan:
    """The block of `Budget.plan`: collects components, then prices them together.

    Attributes:
      promises: whose plan it is.
      delta: the joint delta that was asked for; None: the one in proportion to the joint epsilon.
      open: whether the block is still running.
      standing: the joint share.
    """

    def __init__(self, promises: Promises, *, epsilon: float | None, delta: float | None) -> None:
        self.promises = promises
        self.delta = None if delta is None else check_delta(delta)
        self.open = True
        self.standing = Standing()
        self._epsilon = None if epsilon is None else check_epsilon(epsilon)
        self._components: dict[str, Component] = {}

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the components declared so far and not sealed before."""
        return tuple(self._components)

    @property
    def epsilon(self) -> float | None:
        """The joint charge; None while the block is open, or if nothing new was declared in it."""
        return None if self.standing.terms is None else self.standing.terms.epsilon

    def add(self, component: Component) -> Standing:
        """Takes a component into the plan; one that is sealed on the same terms keeps its own share."""
        if component.limit is not None:
            raise ConfigurationError("pool: expected no open plan, found one. Declare pools outside the plan's block.")
        if component.name in self._components:
            raise fail("component", "a name not yet used in this plan", component.name)
        if component.delta is None and self.delta is None:
            raise fail("epsilon, delta", "one of them, or plan(delta=...)", (None, None), "Give epsilon=, a share.")
        sealed = self.promises.sealed(component)
        if sealed is not None:
            return sealed
        if component.epsilon is not None:
            self.promises.check_price((component,), epsilon=component.epsilon, delta=component.delta)
        self._components[component.name] = component
        return self.standing

    def close(self) -> None:
        """Prices the components together and sets their joint share aside."""
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

        The cost falls with delta, so the least one lies between any delta and the proportion of the cost at it: every
        price narrows the range from both sides.
        """
        most = round_down(sum((exact(component.delta or 0.0) for component in components), Fraction(0)))
        gap = exact(implementation_delta_of(components))
        low, high = round_up(gap + (exact(most) - gap) * exact(MIN_PROPORTION)), most
        if most > self.promises.desk.header.delta:
            return most  # the caller refuses it
        if self._epsilon is not None:
            fair = min(self._proportion(self._epsilon), most)
            return fair if fair >= low and self._cost(components, fair) <= self._epsilon else most
        at = most
        for step in range(PROPORTION_STEPS):
            fair = self._proportion(self._cost(components, at))
            low, high = max(low, min(at, fair)), min(high, max(at, fair))
            if high <= low * (1 + PROPORTION_TOLERANCE):
                break
            # Going on from the proportion is fast where the cost hardly moves; the middle narrows always.
            at = math.sqrt(low * high) if step % 3 == 2 else min(max(fair, low), high)
        # At the sum itself a plan never costs more than its shares: rounding must not push it above.
        if high > most * (1 - 2 * PROPORTION_TOLERANCE):
            return most
        cost = self._cost(components, high)
        fair = max(self._proportion(cost), low)
        return fair if self._cost(components, fair) <= cost * (1 + PROPORTION_TOLERANCE) else high

    def _charge(self, components: Sequence[Component], delta: float) -> float | None:
        """Returns the epsilon in proportion to `delta` where that is what the cost was rounded to; None: the cost."""
        limits = self.promises.desk.header
        charge = exact(limits.epsilon) * exact(delta) / exact(limits.delta)
        shares = sum((exact(component.epsilon or 0.0) for component in components), Fraction(0))
        return round_up(charge) if exact(self._cost(components, delta)) < charge <= shares else None

    def _cost(self, components: Sequence[Component], delta: float) -> float:
        return price(components, delta=delta, adjacency=self.promises.desk.header.adjacency, opinions=False)[0]

    def _proportion(self, epsilon: float) -> float:
        limits = self.promises.desk.header
        return round_down(exact(limits.delta) * exact(min(epsilon, limits.epsilon)) / exact(limits.epsilon))

    def __repr__(self) -> str:
        return f"JointPlan(components={list(self._components)}, open={self.open})"


@contextmanager
def open_plan(promises: Promises, *, epsilon: float | None, delta: float | None) -> Iterator[JointPlan]:
    """Runs a joint plan; an exception inside declares nothing.

    Raises:
      ConfigurationError: a plan of this budget is open already.
    """
    if promises.open_plan is not None:
        raise ConfigurationError("plan: expected no open plan of this budget, found one. Close it first.")
    plan = JointPlan(promises, epsilon=epsilon, delta=delta)
    token = _OPEN_PLANS.set((*_OPEN_PLANS.get(), plan))
    try:
        yield plan
        plan.close()
    except BaseException:
        plan.standing.refusal = "its plan ended in an error, so nothing was declared."
        raise
    finally:
        plan.open = False
        _OPEN_PLANS.reset(token)
