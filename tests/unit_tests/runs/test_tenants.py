"""Caps and memos per tenant: they refuse and remember, and mint nothing."""

from __future__ import annotations

import copy
import os
import signal
import threading
from typing import Any

import pytest

from langchain_dpicl.exceptions import ConfigurationError, PrivacyBudgetExceededError
from langchain_dpicl.runs.answer_memo import Tenant, TenantRegistry
from tests.contracts.store import in_child


def config(**configurable: Any) -> dict[str, Any]:
    return {"configurable": configurable}


def test_a_tenant_is_named_in_the_config() -> None:
    tenants = TenantRegistry(max_queries=5)
    assert tenants.of({}) == tenants.of(config()) == tenants.of(config(tenant=None)) == Tenant("", 5)
    assert tenants.of(config(tenant="acme")) == Tenant("acme", 5)


@pytest.mark.parametrize(("given", "cap"), [(None, 5), (3, 3), (0, 0), (5, 5), (900, 5)])
def test_a_cap_in_the_config_lowers_and_never_raises(given: int | None, cap: int) -> None:
    assert TenantRegistry(max_queries=5).of(config(tenant_max_queries=given)).cap == cap


def test_without_a_cap_of_the_constructor_that_of_the_config_holds() -> None:
    assert TenantRegistry().of(config(tenant_max_queries=2)).cap == 2
    assert TenantRegistry().of({}).cap is None


@pytest.mark.parametrize(
    "bad",
    [
        {"tenant": 3},
        {"tenant": "x" * 201},
        {"tenant": "\ud800"},
        {"tenant_max_queries": -1},
        {"tenant_max_queries": True},
    ],
)
def test_names_and_caps_that_are_none_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        TenantRegistry().of(config(**bad))


@pytest.mark.parametrize("bad", [{"max_queries": -1}, {"max_queries": 1.5}, {"memo_size": -1}, {"memo_size": "9"}])
def test_limits_out_of_range_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        TenantRegistry(**bad)


def test_charged_seats_stay_taken_and_others_are_given_up() -> None:
    tenants = TenantRegistry()
    acme = Tenant("acme", 2)
    for charged in (True, False, False, True):
        with tenants.seat(acme) as seat:
            seat.charged = charged
    assert tenants.used("acme") == 2
    with pytest.raises(PrivacyBudgetExceededError) as refusal, tenants.seat(acme):
        pass
    assert (refusal.value.requested, refusal.value.remaining) == (1, 0)
    with tenants.seat(Tenant("other", 1)) as seat:
        seat.charged = False
        assert tenants.used("other") == 1
    assert tenants.used("other") == 0


@pytest.mark.parametrize("charged", [True, False, None])
def test_a_failure_gives_up_a_seat_only_where_nothing_was_charged(charged: bool | None) -> None:
    tenants = TenantRegistry()
    with pytest.raises(KeyboardInterrupt), tenants.seat(Tenant("acme", 1)) as seat:
        if charged is not None:
            seat.charged = charged
        raise KeyboardInterrupt
    assert tenants.used("acme") == (0 if charged is False else 1)


def test_seats_under_way_count() -> None:
    tenants = TenantRegistry()
    with tenants.seat(Tenant("acme", 1)), pytest.raises(PrivacyBudgetExceededError), tenants.seat(Tenant("acme", 1)):
        pass


def test_threads_never_get_more_seats_than_the_cap() -> None:
    tenants = TenantRegistry()
    taken = []

    def ask() -> None:
        for _ in range(50):
            try:
                with tenants.seat(Tenant("acme", 10)) as seat:
                    seat.charged = True
                    taken.append(1)
            except PrivacyBudgetExceededError:
                pass

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == tenants.used("acme") == 10


def test_nobody_is_told_what_another_was_told() -> None:
    tenants = TenantRegistry(memo_size=2)
    acme, other = Tenant("acme", None), Tenant("other", None)
    tenants.remember(acme, ("q",), "answer")
    assert tenants.recall(acme, ("q",)) == "answer"
    assert tenants.recall(other, ("q",)) is None
    for number in range(9):
        tenants.remember(other, (str(number),), number)
    assert tenants.recall(acme, ("q",)) == "answer"


def test_the_memo_keeps_the_answers_asked_for_last() -> None:
    tenants, acme = TenantRegistry(memo_size=2), Tenant("acme", None)
    for query in ("a", "b"):
        tenants.remember(acme, query, query)
    assert tenants.recall(acme, "a") == "a"
    tenants.remember(acme, "c", "c")
    assert [tenants.recall(acme, query) for query in ("a", "b", "c")] == ["a", None, "c"]


def test_without_a_memo_nothing_is_kept() -> None:
    tenants, acme = TenantRegistry(memo_size=0), Tenant("acme", None)
    tenants.remember(acme, "a", "a")
    assert tenants.recall(acme, "a") is None


def test_a_copy_is_the_thing_itself() -> None:
    tenants = TenantRegistry(max_queries=1)
    assert copy.copy(tenants) is copy.deepcopy(tenants) is tenants


def test_memory_is_bounded_in_tenants_too() -> None:
    tenants = TenantRegistry(memo_size=1)
    for number in range(1500):
        tenants.remember(Tenant(str(number), None), "q", number)
    remembered = [number for number in range(1500) if tenants.recall(Tenant(str(number), None), "q") is not None]
    assert remembered == list(range(1500 - 1024, 1500))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_query_that_was_asked_at_a_fork_has_its_turn_in_the_child_too() -> None:
    registry = TenantRegistry(memo_size=1)

    def asked() -> None:
        signal.alarm(60)
        with registry.turn(Tenant("", None), "query") as gate, gate:
            assert registry.recall(Tenant("", None), "query") is None

    with registry.turn(Tenant("", None), "query") as gate, gate, registry._lock.here:
        assert in_child(asked)
