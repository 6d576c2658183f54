"""The core's budget: what it grants and writes, without what the public budget adds."""

from __future__ import annotations

import itertools
import subprocess
import sys
import uuid
from typing import Any

import pytest

from langchain_dpicl import Budget
from langchain_dpicl.backends import allow_wrappers
from langchain_dpicl.exceptions import (
    ConfigurationError,
    DPICLError,
    LedgerError,
    PrivacyBudgetExceededError,
    SealedShareError,
)
from langchain_dpicl.privacy.ledger.budget import LedgerBudget
from langchain_dpicl.privacy.ledger.shares import Share
from langchain_dpicl.privacy.ledger.store import InMemoryStore
from tests.ledgers import private, tickets, use_simple_prices


@pytest.fixture(autouse=True)
def _priced(monkeypatch: pytest.MonkeyPatch) -> None:
    use_simple_prices(monkeypatch)
    numbers = itertools.count()
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=next(numbers) % 1))
    monkeypatch.setattr("langchain_dpicl.privacy.ledger.store._stamp_of", lambda second: "2026-11-23T08:00:00+00:00")


def used(kind: type[LedgerBudget]) -> InMemoryStore:
    """A ledger on which tickets were reserved, used and given back."""
    store = InMemoryStore()
    ledger = kind(epsilon=4.0, delta=1e-6, store=store)
    ledger.bind(private())
    share = ledger.declare("c", tickets=tickets(refundable=True), epsilon=1.0)
    held = share.reserve("t", count=3, tenant="ann", tenant_cap=4)
    held.burn()
    held.commit()
    held.give_back()
    return store


def test_both_budgets_write_the_same_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("langchain_dpicl.privacy.ledger.budget._IDENTITIES", {})
    mine = used(LedgerBudget)
    monkeypatch.setattr("langchain_dpicl.privacy.ledger.budget._IDENTITIES", {})
    public = used(Budget)
    assert len(mine.records()) == 5
    assert mine.records() == public.records()


def test_the_core_refuses_what_the_public_budget_refuses() -> None:
    ledger = LedgerBudget(epsilon=4.0, delta=1e-6)
    share = ledger.declare("c", tickets=tickets(), epsilon=1.0)
    share.reserve("t", count=9)
    with pytest.raises(PrivacyBudgetExceededError):
        share.reserve("t", count=2)
    with pytest.raises(PrivacyBudgetExceededError):
        ledger.declare("d", tickets=tickets(), epsilon=3.5)
    with pytest.raises(SealedShareError):
        ledger.declare("c", tickets=tickets(0.05), epsilon=1.0)
    with pytest.raises(PrivacyBudgetExceededError):
        ledger.check_fits("e", epsilon=3.5, delta=1e-9)


def test_the_core_refuses_a_ledger_that_went_back() -> None:
    store = InMemoryStore()
    share = LedgerBudget(epsilon=4.0, delta=1e-6, store=store).declare("c", tickets=tickets(), epsilon=1.0)
    share.reserve("t")
    del store._lines[-1]
    with pytest.raises(LedgerError, match="gone or changed"):
        share.reserve("t")


def test_only_the_public_budget_records_what_operators_allow_around_private_calls() -> None:
    allow_wrappers("a.wrapper")
    bodies: dict[type, Any] = {}
    for kind in (LedgerBudget, Budget):
        store = InMemoryStore()
        kind(epsilon=4.0, delta=1e-6, store=store).declare("c", tickets=tickets(), epsilon=1.0).reserve("t")
        bodies[kind] = store.records()[-1].body
    assert "allowed_wrappers" not in bodies[LedgerBudget]
    assert bodies[Budget]["allowed_wrappers"] == ["a.wrapper"]


BESIDE = """
import sys, types
package = types.ModuleType("langchain_dpicl")  # without all that its face imports
package.__path__ = sys.argv[1:]
sys.modules["langchain_dpicl"] = package
from langchain_dpicl.privacy.ledger.budget import LedgerBudget
print(sorted(name for name in sys.modules if ".extensions" in name or ".report" in name or "shown" in name))
"""


def test_the_core_imports_nothing_that_stands_beside_it() -> None:
    import langchain_dpicl

    command = [sys.executable, "-c", BESIDE, *langchain_dpicl.__path__]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("word", [{"amount": 1e-9}, {"event": None}, {"refundable": True}, {"cap": 9}, {"other": 1}])
def test_a_ticket_costs_what_was_declared_whatever_a_reservation_asks_for(word: dict[str, Any]) -> None:
    ledger = LedgerBudget(epsilon=4.0, delta=1e-6)
    share = ledger.declare("c", tickets=tickets(), epsilon=1.0)
    with pytest.raises(TypeError, match=next(iter(word))):
        share.reserve("t", **word)
    assert ledger._store.records() == ()


@pytest.mark.parametrize("reads", [{"blocks": (0, 0)}, {"run_cap": 1}, {"blocks": (0, 0), "run_cap": 1}])
def test_a_promise_for_life_grants_nothing_for_blocks(reads: dict[str, Any]) -> None:
    ledger = LedgerBudget(epsilon=4.0, delta=1e-6)
    share = ledger.declare("c", tickets=tickets(), epsilon=1.0)
    with pytest.raises(ConfigurationError, match="for life"):
        share.reserve("t", **reads)
    assert ledger._store.records() == ()


@pytest.mark.parametrize("reads", [{}, {"run_cap": 1}, {"blocks": (0, 3), "run_cap": 0}, {"blocks": (3, 0)}])
def test_a_plain_share_of_a_stream_grants_nothing_without_blocks(reads: dict[str, Any]) -> None:
    ledger = LedgerBudget(epsilon=4.0, delta=1e-6, per="3 days")
    its = ledger.declare("c", tickets=tickets(), epsilon=1.0, extent=(0, None))
    plain = Share(its._desk, its._component, its._standing)
    with pytest.raises(DPICLError):
        plain.reserve("t", **reads)
    assert ledger._store.records() == ()
