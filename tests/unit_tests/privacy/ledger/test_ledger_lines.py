"""Any line at all, in any order: it fits the rules, or it is refused and changes nothing."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import LedgerError
from langchain_dpicl.privacy.ledger.state import LedgerState
from langchain_dpicl.privacy.ledger.store import InMemoryStore, next_record
from tests.ledgers import tickets, use_simple_prices

HUGE = [2**63 - 1, 2**63, 2**64, 10**400, -(2**63)]
ODD: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 14),
    st.sampled_from([*HUGE, 0.0, -0.0, 0.5, 1.0, -1.0, 1e308, 5e-324]),
    st.sampled_from(["", "c", "p", "t", "gdp", "acme", "1"]),
    st.lists(st.integers(), max_size=2),
)
NAMES = st.one_of(st.sampled_from(["c", "p"]), ODD)
SLOTS = st.one_of(st.sampled_from(["t", "gdp"]), ODD)
COUNTS = st.one_of(st.integers(1, 6), ODD)
RESERVE = st.fixed_dictionaries(
    {"component": NAMES, "template": SLOTS, "label": st.one_of(st.none(), ODD), "count": COUNTS, "amount": COUNTS},
    optional={"tenant": st.one_of(st.sampled_from(["", "acme"]), ODD), "more": ODD},
)
GOOD = st.fixed_dictionaries(
    {
        "component": st.just("c"),
        "template": st.just("t"),
        "label": st.none(),
        "count": st.integers(1, 6),
        "amount": st.just(1.0),
    },
    optional={"tenant": st.sampled_from(["", "acme"])},
)
SETTLE = st.fixed_dictionaries({"reservation": st.one_of(st.integers(3, 12), ODD), "count": COUNTS})
LINES = st.one_of(
    st.tuples(st.just("reserve"), st.one_of(GOOD, RESERVE)),
    st.tuples(st.sampled_from(["commit", "give_back"]), SETTLE),
    st.tuples(st.sampled_from(["seal", "bind", "note", ""]), st.dictionaries(st.text(max_size=3), ODD, max_size=3)),
)


def sealed() -> LedgerState:
    """A ledger with a share of ten refundable tickets and a pool, neither of them used."""
    store = InMemoryStore()
    ledger = Budget(epsilon=4.0, delta=1e-6, store=store)
    share = ledger.declare("c", tickets=tickets(refundable=True), epsilon=1.0)
    pool = ledger.gdp_pool("p", epsilon=1.0)
    share.reserve("t").give_back()
    pool.reserve(mu=0.5).give_back()
    return copy.deepcopy(ledger._desk.refresh())


def picture(state: LedgerState) -> Mapping[str, Any]:
    held = {number: (one.totals.component.name, one.unsettled, one.tenant) for number, one in state._open.items()}
    whole = {name: value for name, value in state._used.items() if value}
    return {"at": (state.seq, state.head), "left": left(state), "open": held, "used": whole}


def left(state: LedgerState) -> dict[Any, Any]:
    return {key: totals.left for key, totals in state._slots.items()}


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> LedgerState:
    use_simple_prices(monkeypatch)
    return sealed()


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(lines=st.lists(LINES, max_size=14))
def test_any_line_fits_the_rules_or_is_refused_and_changes_nothing(start: LedgerState, lines: list[Any]) -> None:
    state = copy.deepcopy(start)
    limits = left(start)
    spent = state.promised()
    for kind, body in lines:
        before = picture(state)
        try:
            state.apply(next_record(state.seq, state.head, kind, body))
        except LedgerError:
            assert picture(state) == before
        assert state.promised() == spent
        for key, rest in left(state).items():
            assert 0 <= rest <= limits[key]
            mine = [one for one in state._open.values() if one.totals.component.name == key[0]]
            assert rest + sum((one.unit * one.unsettled for one in mine), Fraction(0)) <= limits[key]
        assert min(state._used.values()) >= 0
        assert sum(n for (component, _), n in state._used.items() if component == "c") == 10 - state.left(
            "c", ("t", None)
        )
        assert all(one.count >= 1 for one in state.open_reservations())
    assert math.isfinite(float(state.promised()[0]))
