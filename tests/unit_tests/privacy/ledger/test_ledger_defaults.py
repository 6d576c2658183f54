"""What is taken where nobody says how much: one ticket, one release, and never more."""

from __future__ import annotations

import pytest

from langchain_dpicl.exceptions import LedgerError, PrivacyBudgetExceededError
from langchain_dpicl.privacy.ledger.store import InMemoryStore
from tests.ledgers import budget, records, share_of, use_simple_prices

TAKERS = {
    "tickets": lambda ledger: share_of(ledger, refundable=True).reserve("t"),
    "gdp": lambda ledger: ledger.gdp_pool("p", epsilon=1.0).reserve(mu=0.5),
    "zcdp": lambda ledger: ledger.zcdp_pool("p", epsilon=1.0).reserve(rho=0.25),
}


@pytest.mark.parametrize("kind", TAKERS)
def test_one_is_reserved_burnt_and_committed_at_a_time(kind, monkeypatch):
    use_simple_prices(monkeypatch)
    store = InMemoryStore()
    held = TAKERS[kind](budget(store=store))
    assert (held.count, held.unburnt, held.uncommitted) == (1, 1, 0)
    held.burn()
    assert (held.unburnt, held.uncommitted) == (0, 1)
    with pytest.raises(PrivacyBudgetExceededError):
        held.burn()
    held.commit()
    assert held.uncommitted == 0
    with pytest.raises(LedgerError):
        held.commit()
    assert [body["count"] for kind_, body in records(store) if kind_ in {"reserve", "commit"}] == [1, 1]


def test_pools_hold_what_their_releases_leave(monkeypatch):
    use_simple_prices(monkeypatch)
    ledger = budget()
    gdp, zcdp = ledger.gdp_pool("g", epsilon=1.0), ledger.zcdp_pool("z", epsilon=1.0)
    gdp.reserve(mu=0.6)
    zcdp.reserve(rho=0.25)
    zcdp.reserve(rho=0.25, count=2)
    assert gdp.remaining_mu_squared == pytest.approx(1.0 - 0.36)
    assert zcdp.remaining_rho == pytest.approx(0.25)
    gdp.reserve(mu=0.6).give_back()
    assert gdp.remaining_mu_squared == pytest.approx(1.0 - 0.36)
    with pytest.raises(PrivacyBudgetExceededError):
        zcdp.reserve(rho=0.125, count=3)
