"""Whole numbers beyond every float, or of more digits than Python spells: refused like any other, before any spend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import ConfigurationError, UnknownEventError
from langchain_dpicl.privacy.accounting.events import (
    BoundedRangeEvent,
    GaussianEvent,
    PureEvent,
    RepeatedEvent,
    ZCdpEvent,
)
from langchain_dpicl.privacy.ledger.shares import Share
from langchain_dpicl.privacy.ledger.store import InMemoryStore
from langchain_dpicl.privacy.ledger.tickets import Ticket
from tests.ledgers import records, use_simple_prices

HUGE = {"2^63": 2**63, "beyond floats": 10**400, "beyond spelling": 10**5000, "beyond spelling, negative": -(10**5000)}
NO_FLOAT = {name: value for name, value in HUGE.items() if name != "2^63"}

Attempt = Callable[[Budget, Share, int], object]

AMOUNTS: dict[str, Attempt] = {
    "epsilon of a budget": lambda budget, share, huge: Budget(epsilon=huge, delta=1e-6),
    "delta of a budget": lambda budget, share, huge: Budget(epsilon=1.0, delta=huge),
    "epsilon that has to fit": lambda budget, share, huge: budget.check_fits("x", epsilon=huge, delta=1e-7),
    "delta that has to fit": lambda budget, share, huge: budget.check_fits("x", epsilon=1.0, delta=huge),
    "epsilon of a share": lambda budget, share, huge: budget.declare("x", tickets=tickets(), epsilon=huge),
    "mu": lambda budget, share, huge: budget.gdp_pool("g", epsilon=1.0).reserve(mu=huge),
    "rho": lambda budget, share, huge: budget.zcdp_pool("z", epsilon=1.0).reserve(rho=huge),
}

COUNTS: dict[str, Attempt] = {
    "tickets": lambda budget, share, huge: Ticket("t", PureEvent(0.1), max_count=huge),
    "reserve": lambda budget, share, huge: share.reserve("t", count=huge),
    "burn": lambda budget, share, huge: share.reserve("t").burn(huge),
    "commit": lambda budget, share, huge: share.reserve("t").commit(huge),
    "cap of a tenant": lambda budget, share, huge: share.reserve("t", tenant="a", tenant_cap=huge),
    "count of a pool": lambda budget, share, huge: budget.gdp_pool("g", epsilon=1.0).reserve(mu=0.1, count=huge),
}

EVENTS: dict[str, Callable[[Any], object]] = {
    "noise": GaussianEvent,
    "epsilon": PureEvent,
    "bound": BoundedRangeEvent,
    "rho": ZCdpEvent,
    "count": lambda huge: RepeatedEvent(PureEvent(0.1), huge),
}


def tickets() -> tuple[Ticket, ...]:
    return (Ticket("t", PureEvent(0.1), max_count=10),)


def refused(attempt: Attempt, value: int) -> None:
    store = InMemoryStore()
    budget = Budget(epsilon=4.0, delta=1e-6, store=store)
    share = budget.declare("c", tickets=tickets(), epsilon=1.0)
    with pytest.raises(ConfigurationError, match="expected") as caught:
        attempt(budget, share, value)
    assert len(str(caught.value)) < 1000
    assert sum(kind == "reserve" for kind, _ in records(store)) <= 1


@pytest.mark.parametrize("name", NO_FLOAT)
@pytest.mark.parametrize("what", AMOUNTS)
def test_an_amount_that_is_no_float_is_refused(what: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_simple_prices(monkeypatch)
    refused(AMOUNTS[what], HUGE[name])


@pytest.mark.parametrize("name", HUGE)
@pytest.mark.parametrize("what", COUNTS)
def test_a_count_that_no_database_keeps_is_refused(what: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_simple_prices(monkeypatch)
    refused(COUNTS[what], HUGE[name])


def test_the_largest_count_is_taken() -> None:
    assert Ticket("t", PureEvent(0.1), max_count=2**63 - 1).max_count == 2**63 - 1


@pytest.mark.parametrize("name", NO_FLOAT)
@pytest.mark.parametrize("what", EVENTS)
def test_an_event_of_a_number_that_is_no_float_is_refused(what: str, name: str) -> None:
    with pytest.raises(UnknownEventError, match="expected"):
        EVENTS[what](HUGE[name])
