"""Modules that an operator lets stand before private calls are kept by the ledger and shown by every report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl import PrivacyBudgetCallbackHandler, verify_report
from langchain_dpicl.backends import allow_wrappers
from langchain_dpicl.backends.private_calls import method_checks
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import ConfigurationError, LedgerError
from langchain_dpicl.privacy.accounting.events import PureEvent
from langchain_dpicl.privacy.ledger.state import RESERVE
from langchain_dpicl.privacy.ledger.store import InMemoryStore
from langchain_dpicl.privacy.ledger.tickets import Ticket

NAMED = ("apm_agent.hooks", "tap")


def share_of(budget: Budget) -> Any:
    ticket = Ticket("answer", PureEvent(0.1), max_count=4, refundable=False)
    return budget.declare("voter", tickets=[ticket], epsilon=1.0, delta=1e-7)


def handler_at(path: Path) -> PrivacyBudgetCallbackHandler:
    return PrivacyBudgetCallbackHandler.create(str(path), epsilon=2.0, delta=1e-6)


def test_nothing_is_said_where_nothing_was_named(tmp_path: Path) -> None:
    handler = handler_at(tmp_path / "ledger")
    share_of(handler.budget).reserve("answer")
    report = handler.report()
    assert "allowed_wrappers" not in report.to_dict()
    assert "operator" not in report.to_text() + report.to_markdown()
    assert verify_report(report.to_json()).ok
    handler.close()


def test_every_report_shows_what_was_named(tmp_path: Path) -> None:
    handler = handler_at(tmp_path / "ledger")
    allow_wrappers(*NAMED)
    report = handler.report()
    assert report.to_dict()["allowed_wrappers"] == [*NAMED]
    assert "apm_agent.hooks, tap." in report.to_text()
    assert "`apm_agent.hooks`, `tap`." in report.to_markdown()
    assert verify_report(report.to_json()).ok
    handler.close()


def test_the_ledger_keeps_what_was_named_when_private_work_was_paid_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a report of another process, in which nothing was named, shows it too."""
    path = tmp_path / "ledger"
    handler = handler_at(path)
    share = share_of(handler.budget)
    share.reserve("answer")
    allow_wrappers("tap")
    share.reserve("answer")
    allow_wrappers("apm_agent.hooks")
    share.reserve("answer")
    handler.close()
    monkeypatch.setattr(method_checks, "_named", ())
    reopened = PrivacyBudgetCallbackHandler.open(str(path))
    assert reopened.report().allowed_wrappers == NAMED
    reopened.budget.verify()
    reopened.close()


def test_names_are_lines_of_the_ledger_that_cannot_be_left_out() -> None:
    allow_wrappers(*NAMED)
    store = InMemoryStore()
    budget = Budget(epsilon=2.0, delta=1e-6, store=store)
    share_of(budget).reserve("answer")
    lines = [record.body for record in store.records(0) if record.kind == RESERVE]
    assert [line["allowed_wrappers"] for line in lines] == [[*NAMED]]


@pytest.mark.parametrize("named", [3, "tap", [1], None])
def test_names_that_are_none_are_refused(named: Any) -> None:
    report = {**Budget(epsilon=2.0, delta=1e-6).report().to_dict(), "allowed_wrappers": named}
    assert not verify_report(report).ok


def test_the_public_door_refuses_what_is_no_module() -> None:
    with pytest.raises(ConfigurationError, match="found 'a b'"):
        allow_wrappers("fine", "a b")
    assert method_checks.allowed_wrappers() == (), "all of them or none"


def test_a_line_with_names_that_are_none_breaks_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(method_checks, "_named", (1,))
    with pytest.raises(LedgerError, match="names of modules"):
        share_of(Budget(epsilon=2.0, delta=1e-6)).reserve("answer")
