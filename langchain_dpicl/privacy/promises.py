"""Shares that are declared in this process and not yet sealed: prices them and keeps their sum within the budget."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from langchain_dpicl.exceptions import PrivacyBudgetExceededError, SealedShareError
from langchain_dpicl.privacy._validate import check_delta
from langchain_dpicl.privacy.amounts import exact, round_down
from langchain_dpicl.privacy.desk import Desk, Standing
from langchain_dpicl.privacy.ledger_state import LedgerState
from langchain_dpicl.privacy.refusals import check_same_terms, exceeded
from langchain_dpicl.privacy.tickets import (
    Component,
    ShareTerms,
    event_of_components,
    price,
)

# A request this little above what remains is float arithmetic (0.1 + 0.2); it gets what remains, never more.
ROUNDING_SLACK = Fraction(1, 10**12)

# The part of delta that a share gets at least when it asks for no epsilon: some shares cost next to none.
MIN_PROPORTION = 1e-3


class Promises:
    """The shares declared in this process, and the room that all shares leave."""

    _price = staticmethod(price)

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self._standings: dict[str, tuple[Component, Standing]] = {}
        self._names: set[str] = set()

    def fresh_name(self, prefix: str) -> str:
        """Returns the first of `prefix`, `prefix-2`, ... that no component was given or has used."""
        with self.desk.lock:
            taken = {*self.desk.refresh().shares, *self.names()}
            number = 1
            while (name := prefix if number == 1 else f"{prefix}-{number}") in taken:
                number += 1
            self._names.add(name)
            return name

    def names(self) -> set[str]:
        """Returns the names that are taken in this process."""
        return {*self._standings, *self._names}

    def admit(self, component: Component) -> Standing:
        """Sets aside a share of one component, unless the same share is declared or sealed already."""
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
        least, _ = self._price((component,), delta=left, adjacency=limits.adjacency, opinions=False)
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
        cost, pricing = self._price(components, delta=check_delta(delta), adjacency=adjacency, opinions=opinions)
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
            # Pricing took time without the lock, so the share is fitted again before it counts.
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
