"""Charges Gaussian and zCDP releases with adaptively chosen parameters to pools of a budget."""

from __future__ import annotations

import dataclasses

from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy._validate import check_delta, check_epsilon, check_int, check_positive, fail
from langchain_dpicl.privacy.accounting.events import GaussianEvent, ZCdpEvent
from langchain_dpicl.privacy.amounts import effective_delta
from langchain_dpicl.privacy.shares import Holding, Reservation
from langchain_dpicl.privacy.tickets import Component


def as_pool(component: Component) -> Component:
    """Returns the pool that a share of this epsilon and delta holds: its mu or rho, rounded down."""
    rest = effective_delta(check_delta(component.delta), component.implementation_delta)
    if rest <= 0:
        raise fail("delta", "more than implementation_delta", component.delta, "Raise delta or run fewer releases.")
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
