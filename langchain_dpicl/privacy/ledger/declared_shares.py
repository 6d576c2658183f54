"""Prices the shares that this process declares, and keeps the sum of all shares within the budget."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from langchain_dpicl._lazy import provided
from langchain_dpicl.exceptions import PrivacyBudgetExceededError, SealedShareError
from langchain_dpicl.privacy._validate import check_delta, fail
from langchain_dpicl.privacy.ledger.amounts import exact, round_down
from langchain_dpicl.privacy.ledger.state import LedgerState
from langchain_dpicl.privacy.ledger.tickets import (
    Component,
    Extent,
    ShareTerms,
    event_of_components,
    extent_of,
    price,
)
from langchain_dpicl.privacy.ledger.writer import LedgerWriter, ShareStatus, budget_exceeded, check_same_terms

# A request above the rest by less than this is float rounding (0.1 + 0.2): it gets the rest, never more.
ROUNDING_SLACK = Fraction(1, 10**12)

# The least part of delta for a share that requests no epsilon: some shares cost almost nothing.
MIN_PROPORTION = 1e-3


class DeclaredShares:
    """The shares declared in this process, and the epsilon and delta that all shares leave."""

    _price_together = staticmethod(price)  # overridden for pools, and for what is declared together

    def __init__(self, desk: LedgerWriter) -> None:
        self.desk = desk
        self._standings: dict[str, tuple[Component, ShareStatus]] = {}
        self._names: set[str] = set()

    def fresh_name(self, prefix: str) -> str:
        """Returns the first of `prefix`, `prefix-2`, ... that no component uses, and reserves it."""
        with self.desk.lock:
            used = {*self.desk.refresh().shares, *self.names()}
            number = 1
            while (name := prefix if number == 1 else f"{prefix}-{number}") in used:
                number += 1
            self._names.add(name)
            return name

    def names(self) -> set[str]:
        """Returns the component names used in this process."""
        return {*self._standings, *self._names}

    def admit(self, component: Component) -> ShareStatus:
        """Sets aside a share of one component, unless the same share is declared or sealed already."""
        self.check_extent(component)
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

    def check_extent(self, component: Component) -> None:
        """Refuses a component whose promise is of another kind than the ledger's, with a ConfigurationError."""
        if self.desk.header.stream is not None:
            provided("streams").check_declared(component)
        elif component.extent is not None:
            raise fail("extent", "none: this ledger's promise is for life", component.extent)

    def _admit_new(self, component: Component) -> ShareStatus:
        wanted = component.delta if component.delta is not None else self._proportional_delta(component)
        epsilon, delta = self.fit(component.epsilon, wanted, {component.name}, component.extent)
        requested = None if component.epsilon is None else epsilon
        return self.add_pending(self.priced((component,), epsilon=requested, delta=delta), ShareStatus())

    def _proportional_delta(self, component: Component) -> float:
        """Returns the part of the remaining delta that the share's price is of the ledger's epsilon."""
        limits = self.desk.header
        if limits.delta == 0:
            return 0.0
        remaining = round_down(self.room({component.name}, component.extent)[1])
        if remaining <= 0:
            raise budget_exceeded(f"delta of budget {limits.name!r}", limits.delta, Fraction(0), "No delta remains.")
        # The price at the largest possible delta is the lowest, so the proportion is never too large.
        least, _ = self._price((component,), delta=remaining, adjacency=limits.adjacency, opinions=False)
        proportion = min(max(least / limits.epsilon, MIN_PROPORTION), 1.0)
        return round_down(exact(remaining) * exact(proportion))

    def known(self, component: Component) -> ShareStatus | None:
        """Returns the standing of the same share if it is sealed, or pending on the same terms."""
        with self.desk.lock:
            sealed = self.sealed(component)
            if sealed is not None:
                return sealed
            mine, standing = self._standings.get(component.name, (None, None))
            if mine is None or standing is None or standing.refusal or mine.changed_terms(component):
                return None
            return standing

    def sealed(self, component: Component) -> ShareStatus | None:
        """Returns the standing of the same share if it is sealed; refuses one sealed on other terms."""
        state = self.desk.refresh()
        sealed = state.sealed_component(component.name)
        if sealed is None:
            return None
        check_same_terms(component, sealed)
        return ShareStatus(terms=state.shares[component.name].terms)

    def _price(self, components: Sequence[Component], **how: Any) -> tuple[float, dict[str, Any]]:
        is_plain = len(components) == 1 and components[0].limit is None
        return price(components, **how) if is_plain else self._price_together(components, **how)

    def check_price(
        self, components: Sequence[Component], *, epsilon: float | None, delta: float | None, opinions: bool = False
    ) -> tuple[float, dict[str, Any]]:
        """Returns the price of components, refused above `epsilon`; slow, so it runs without the lock."""
        adjacency = self.desk.header.adjacency
        cost, pricing = self._price(components, delta=check_delta(delta), adjacency=adjacency, opinions=opinions)
        limit = self.desk.header.epsilon if epsilon is None else epsilon
        if cost > limit:
            names = ", ".join(repr(component.name) for component in components)
            advice = "Raise the share or the noise, or declare fewer tickets."
            raise budget_exceeded(f"epsilon of {names}", cost, exact(limit), advice)
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

    def add_pending(self, terms: ShareTerms, standing: ShareStatus) -> ShareStatus:
        """Makes a priced share pending if it fits; it replaces unsealed shares of the same names."""
        names = {component.name for component in terms.components}
        with self.desk.lock:
            if names & set(self.desk.refresh().shares):
                raise SealedShareError(f"{sorted(names)}: another process sealed one of these. Declare them again.")
            # Pricing ran without the lock, so the share has to fit again.
            epsilon, delta = self.fit(terms.epsilon, terms.delta, names, extent_of(terms.components))
            if epsilon < terms.pricing["epsilon"] or delta < terms.delta:
                raise budget_exceeded("epsilon", terms.pricing["epsilon"], exact(epsilon), "Lower the share a little.")
            standing.terms = terms.charged(epsilon)
            for name in names:
                _, old = self._standings.pop(name, (None, None))
                if old is not None:
                    old.refusal = "it was declared anew before its first reservation."
            self._standings.update({component.name: (component, standing) for component in terms.components})
            return standing

    def fit(
        self, epsilon: float | None, delta: float | None, replaced: set[str], extent: Extent | None = None
    ) -> tuple[float, float]:
        """Returns the charge, lowered to the rest if it is above by float rounding only; refuses a larger one."""
        rest = self.room(replaced, extent)
        return self._fitted("epsilon", epsilon or 0.0, rest[0]), self._fitted("delta", delta or 0.0, rest[1])

    def _fitted(self, name: str, requested: float, rest: Fraction) -> float:
        if exact(requested) > rest * (1 + ROUNDING_SLACK):
            advice = "Shares add up; declare components inside `with budget.plan():`, or lower them."
            if not rest:
                advice = "It is spent for good, or set aside. What was released stays free to use."
                if self.desk.header.stream is not None:
                    advice = "In some window of these blocks it is spent or set aside; later blocks bring more."
            raise budget_exceeded(f"{name} of budget {self.desk.header.name!r}", requested, rest, advice)
        return requested if exact(requested) <= rest else round_down(rest)

    def room(self, replaced: set[str] | None = None, extent: Extent | None = None) -> tuple[Fraction, Fraction]:
        """Returns the epsilon and delta that no share has, except shares about to be replaced.

        Of a stream: in every window that touches the blocks of `extent`, or in every window; what is pending counts
        in full where it touches one of them.
        """
        with self.desk.lock:
            state = self.desk.refresh()
            epsilon, delta = state.promised(extent)
            for terms in self.pending(state):
                is_replaced = {component.name for component in terms.components} & (replaced or set())
                if not is_replaced and not state.is_apart(terms, extent):
                    epsilon += exact(terms.epsilon)
                    delta += exact(terms.delta)
            limits = self.desk.header
            none = Fraction(0)
            return max(exact(limits.epsilon) - epsilon, none), max(exact(limits.delta) - delta, none)

    def pending(self, state: LedgerState) -> list[ShareTerms]:
        """Returns the shares declared in this process and not yet sealed."""
        standings = {id(s): s for name, (_, s) in self._standings.items() if name not in state.shares}
        return [s.terms for s in standings.values() if s.terms is not None and not s.refusal]
