"""What a receipt proves, what dangles, and what a tenant may have over all processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import (
    ConfigurationError,
    LedgerError,
    LedgerRollbackError,
    PrivacyBudgetExceededError,
    PrivacyBudgetMismatchError,
)
from langchain_dpicl.privacy.ledger.shares import Reservation, Share
from langchain_dpicl.privacy.ledger.state import OpenReservation
from langchain_dpicl.privacy.ledger.store import InMemoryStore
from langchain_dpicl.privacy.ledger.writer import process_name
from langchain_dpicl.results import Receipt
from tests.durable import UNAVAILABLE, WatchedStore, on
from tests.ledgers import budget, records, share_of, tickets

pytestmark = pytest.mark.usefixtures("simple_prices")


def taken(ledger: Budget) -> Share:
    return share_of(ledger, refundable=True)


def receipt(held: Reservation, **changes: Any) -> Receipt:
    paid = {"ledger_id": held.ledger_id, "entry": held.entry, "entry_hash": held.entry_hash}
    given: dict[str, Any] = {
        "source": "release",
        "tickets": 1,
        "component": "c",
        "dataset_id": "d",
        "adjacency": "add_remove",
        "epsilon": 1.0,
        "delta": 1e-7,
        "mechanism": "gumbel",
        "noise_multiplier": 1.0,
        "queries_left": 3,
    }
    return Receipt(**{**given, **paid, **changes})


# -- receipts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form",
    [
        lambda held: held,
        receipt,
        lambda held: receipt(held).model_dump(),
        lambda held: Receipt.model_validate_json(receipt(held).model_dump_json()),
        lambda held: SimpleNamespace(ledger_id=held.ledger_id, entry=held.entry, entry_hash=held.entry_hash),
        lambda held: {"ledger_id": held.ledger_id, "entry": held.entry},
        lambda held: {"ledger_id": held.ledger_id},
    ],
    ids=["reservation", "receipt", "dict", "read from JSON", "object", "without a hash", "of nothing charged"],
)
def test_a_receipt_of_a_line_that_stands_is_good(form: Any) -> None:
    ledger = budget(store=WatchedStore())
    share = taken(ledger)
    held = [share.reserve("t") for _ in range(4)]
    for one in held:
        ledger.check_receipt(form(one))
    assert [one.entry for one in held] == [2, 3, 4, 5]
    assert len({one.entry_hash for one in held}) == 4


def test_a_receipt_of_before_has_no_hash_and_reads_all_the_same() -> None:
    ledger = budget()
    old = receipt(taken(ledger).reserve("t")).model_dump()
    del old["entry_hash"]
    assert Receipt(**old).entry_hash is None
    ledger.check_receipt(Receipt(**old))


def test_an_older_copy_lacks_the_line_of_a_receipt() -> None:
    store = WatchedStore()
    share = taken(budget(store=store))
    share.reserve("t")
    backup = store.snapshot()
    lost = share.reserve("t", count=2)
    store.restore(backup)
    reopened = Budget.open(store)
    for form in (lost, receipt(lost), {"ledger_id": lost.ledger_id, "entry": lost.entry}):
        with pytest.raises(LedgerRollbackError, match="found 2 lines"):
            reopened.check_receipt(form)


def test_two_copies_that_both_went_on_are_told_apart_by_their_receipts() -> None:
    store = WatchedStore()
    share = taken(budget(store=store))
    share.reserve("t")
    clone = store.clone()
    here, there = share.reserve("t"), taken(Budget.open(clone)).reserve("t")
    assert here.entry == there.entry
    assert here.entry_hash != there.entry_hash
    Budget.open(store).check_receipt(here)
    for ledger, foreign in ((Budget.open(store), there), (Budget.open(clone), here)):
        with pytest.raises(LedgerRollbackError, match="another line with the hash"):
            ledger.check_receipt(foreign)


def test_a_line_that_charges_nothing_is_no_receipts_line() -> None:
    ledger = budget()
    held = taken(ledger).reserve("t")
    with pytest.raises(LedgerRollbackError, match="kind 'seal'"):
        ledger.check_receipt({"ledger_id": held.ledger_id, "entry": 1})


def test_a_line_changed_in_its_place_is_known() -> None:
    store = InMemoryStore()
    ledger = budget(store=store)
    held = taken(ledger).reserve("t")
    store._lines[1] = store._lines[1]._replace(body=store._lines[1].body.replace('"count":1', '"count":0'))
    with pytest.raises(LedgerRollbackError):
        ledger.check_receipt(held)


def test_a_receipt_of_another_ledger_is_refused_as_such() -> None:
    held = taken(budget()).reserve("t")
    with pytest.raises(PrivacyBudgetMismatchError, match=held.ledger_id):
        budget().check_receipt(held)


@pytest.mark.parametrize("entry", [0, -1, True, 1.0, "1", 2**70])
def test_what_is_no_receipt_is_refused(entry: Any) -> None:
    ledger = budget()
    error = LedgerRollbackError if entry == 2**70 else ConfigurationError
    with pytest.raises(error):
        ledger.check_receipt({"ledger_id": ledger.ledger_id, "entry": entry})
    for wrong in (None, 5, "receipt", {}, {"ledger_id": 3}, {"ledger_id": ledger.ledger_id, "entry_hash": b"x"}):
        with pytest.raises(ConfigurationError):
            ledger.check_receipt(wrong)


# -- what dangles ---------------------------------------------------------------------------------------------------


def test_what_was_neither_committed_nor_given_back_dangles_and_counts() -> None:
    store = WatchedStore()
    ledger = budget(store=store)
    share = taken(ledger)
    done, back, half, lost = (share.reserve("t", count=count) for count in (1, 1, 3, 2))
    done.burn()
    done.commit()
    back.give_back()
    half.burn(2)
    half.commit(1, wait=True)
    stamps = {record.seq: record.stamp for record in store.records()}
    wanted = (
        OpenReservation(half.entry, "c", "t", None, 2, stamps[half.entry], process_name(), mine=True),
        OpenReservation(lost.entry, "c", "t", None, 2, stamps[lost.entry], process_name(), mine=True),
    )
    assert ledger.dangling() == wanted
    assert Budget.open(store).dangling() == wanted  # as a process finds them after a crash
    assert share.remaining("t") == 10 - 1 - 3 - 2


def test_pools_dangle_too() -> None:
    ledger = budget()
    held = ledger.gdp_pool("g", epsilon=1.0).reserve(mu=0.5)
    assert [(left.component, left.template, left.label) for left in ledger.dangling()] == [("g", "gdp", None)]
    held.burn()
    held.commit()
    assert ledger.dangling() == ()


def test_a_report_says_nothing_of_what_dangles() -> None:
    ledger = budget()
    share = taken(ledger)
    held = share.reserve("t")
    before = ledger.report().to_dict()
    held.burn()
    held.commit()
    assert ledger.report().to_dict() == before
    share.reserve("t")
    assert ledger.report().to_dict() == before


# -- tenants --------------------------------------------------------------------------------------------------------


def test_a_tenants_tickets_are_counted_on_the_ledger_and_its_cap_refuses_in_every_process() -> None:
    store = WatchedStore()
    here = taken(budget(store=store))
    there = taken(Budget.open(store))
    here.reserve("t", tenant="acme", tenant_cap=3)
    there.reserve("t", tenant="acme", tenant_cap=3, count=2)
    for share in (here, there, taken(Budget.open(store))):
        assert share.used_by("acme") == 3
        with pytest.raises(PrivacyBudgetExceededError, match="for tenant 'acme'") as refusal:
            share.reserve("t", tenant="acme", tenant_cap=3)
        assert (refusal.value.requested, refusal.value.remaining) == (1, 0)
    assert there.reserve("t", tenant="other", tenant_cap=3, count=3).count == 3
    assert (here.used_by("other"), here.used_by("nobody")) == (3, 0)
    assert here.remaining("t") == 4


def test_a_cap_may_be_lowered_later_and_counts_what_was_before_it() -> None:
    share = taken(budget())
    share.reserve("t", tenant="acme", count=4)
    with pytest.raises(PrivacyBudgetExceededError) as refusal:
        share.reserve("t", tenant="acme", tenant_cap=2)
    assert refusal.value.remaining == 0
    assert share.reserve("t", tenant="acme", tenant_cap=5).count == 1


def test_who_gives_no_name_is_counted_as_nobody_in_particular() -> None:
    share = taken(budget())
    share.reserve("t", count=2)
    share.reserve("t", tenant="")
    assert share.used_by("") == 3
    with pytest.raises(PrivacyBudgetExceededError):
        share.reserve("t", tenant_cap=3)


def test_a_ticket_that_went_back_is_the_tenants_again() -> None:
    store = WatchedStore()
    share = taken(budget(store=store))
    held = share.reserve("t", tenant="acme", tenant_cap=3, count=3)
    held.burn()
    held.give_back()
    assert share.used_by("acme") == taken(Budget.open(store)).used_by("acme") == 1
    share.reserve("t", tenant="acme", tenant_cap=3, count=2)


def test_a_tenants_cap_is_of_one_component() -> None:
    ledger = budget()
    taken(ledger).reserve("t", tenant="acme", tenant_cap=1)
    other = ledger.declare("other", tickets=tickets(), epsilon=1.0)
    assert other.used_by("acme") == 0
    other.reserve("t", tenant="acme", tenant_cap=1)


def test_a_refused_tenant_seals_and_writes_nothing() -> None:
    store = InMemoryStore()
    share = taken(budget(store=store))
    with pytest.raises(PrivacyBudgetExceededError):
        share.reserve("t", tenant="acme", tenant_cap=0)
    assert records(store) == []


def test_lines_name_a_tenant_only_where_there_is_one() -> None:
    store = InMemoryStore()
    share = taken(budget(store=store))
    share.reserve("t")
    share.reserve("t", tenant="acme")
    plain, named = (body for kind, body in records(store) if kind == "reserve")
    assert plain == {"component": "c", "template": "t", "label": None, "count": 1, "amount": 1.0}
    assert named == {**plain, "tenant": "acme"}


def test_what_is_no_name_or_cap_is_refused_before_anything_is_written() -> None:
    store = InMemoryStore()
    share = taken(budget(store=store))
    for wrong in (
        {"tenant": 3},
        {"tenant": "x" * 201},
        {"tenant": "\udc80"},
        {"tenant_cap": -1},
        {"tenant_cap": True},
        {"tenant_cap": 1.5},
    ):
        with pytest.raises(ConfigurationError):
            share.reserve("t", **wrong)
    assert records(store) == []


@pytest.mark.parametrize("tenant", [3, None, ["acme"]])
def test_a_line_with_a_tenant_that_is_no_text_is_refused(tenant: Any) -> None:
    store = InMemoryStore()
    ledger = budget(store=store)
    taken(ledger).reserve("t")
    with store.transaction() as view:
        body = {"component": "c", "template": "t", "label": None, "count": 1, "amount": 1.0, "tenant": tenant}
        view.append("reserve", body)
    with pytest.raises(LedgerError, match="names of a tenant and a process as text"):
        Budget.open(store)


def test_many_threads_of_many_tenants_never_get_more_than_their_caps() -> None:
    store = WatchedStore()
    ledger = budget(store=store)
    share_of(ledger, count=500, epsilon=0.001)
    caps = {"a": 3, "b": 7, "": 5}

    def contend(number: int) -> tuple[str, int]:
        share = share_of(Budget.open(store), count=500, epsilon=0.001)
        tenant = list(caps)[number % 3]
        got = 0
        for _ in range(4):
            try:
                share.reserve("t", tenant=tenant or None, tenant_cap=caps[tenant])
            except PrivacyBudgetExceededError:
                continue
            got += 1
        return tenant, got

    with ThreadPoolExecutor(16) as pool:
        got = list(pool.map(contend, range(24)))
    assert {name: sum(count for tenant, count in got if tenant == name) for name in caps} == caps


def test_a_tenants_ticket_that_failed_behind_its_line_counts() -> None:
    store = WatchedStore()
    share = taken(budget(store=store))
    store.after_commit = on("reserve", UNAVAILABLE)
    with pytest.raises(LedgerError):
        share.reserve("t", tenant="acme", tenant_cap=1)
    with pytest.raises(PrivacyBudgetExceededError):
        share.reserve("t", tenant="acme", tenant_cap=1)
