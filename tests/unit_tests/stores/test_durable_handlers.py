"""Handlers on ledgers that outlive the process: made once, opened ever after, never made by opening."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl import PrivacyBudgetCallbackHandler, PrivateExamples, get_privacy_budget_callback
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.budget.handler import resolve_budget
from langchain_dpicl.exceptions import (
    ConfigurationError,
    LedgerError,
    LedgerRollbackError,
    LedgerUnavailableError,
    PrivacyBudgetMismatchError,
    TenantCapExceededError,
)
from langchain_dpicl.privacy.ledger.store import InMemoryStore
from langchain_dpicl.stores import FileAnchor, SQLiteStore
from tests.durable import DictAnchor, WatchedStore
from tests.ledgers import budget, share_of

pytestmark = pytest.mark.usefixtures("simple_prices")

LIMITS: dict[str, Any] = {"epsilon": 4.0, "delta": 1e-6}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "budget.db"


@pytest.fixture
def made(path: Path) -> Iterator[PrivacyBudgetCallbackHandler]:
    handler = PrivacyBudgetCallbackHandler.create(path, **LIMITS, adjacency="replace_one")
    yield handler
    handler.close()


def test_a_ledger_is_made_once_and_opened_ever_after(made: PrivacyBudgetCallbackHandler, path: Path) -> None:
    share_of(made.budget).reserve("t", count=4)
    for again in (
        PrivacyBudgetCallbackHandler.open(path),
        PrivacyBudgetCallbackHandler.open(str(path)),
        PrivacyBudgetCallbackHandler.open(SQLiteStore(path)),
        PrivacyBudgetCallbackHandler(**LIMITS, adjacency="replace_one", store=path),
        PrivacyBudgetCallbackHandler(4.0, 1e-6, adjacency="replace_one", store=str(path)),
    ):
        assert type(again) is PrivacyBudgetCallbackHandler
        assert (again.budget.ledger_id, again.adjacency) == (made.budget.ledger_id, "replace_one")
        assert share_of(again.budget).remaining("t") == 6
        assert again.remaining_epsilon == 3.0
        again.close()
    with pytest.raises(LedgerError, match="found one"):
        PrivacyBudgetCallbackHandler.create(path, **LIMITS)
    assert share_of(made.budget).remaining("t") == 6


def test_nothing_is_made_by_opening(tmp_path: Path) -> None:
    for act in (
        lambda place: PrivacyBudgetCallbackHandler(**LIMITS, store=place),
        PrivacyBudgetCallbackHandler.open,
        lambda place: get_privacy_budget_callback(**LIMITS, store=place).__enter__(),
        lambda place: get_privacy_budget_callback(store=place).__enter__(),
    ):
        for place in (tmp_path / "none.db", str(tmp_path / "none.db")):
            with pytest.raises(LedgerUnavailableError):
                act(place)
    assert list(tmp_path.iterdir()) == []


def test_limits_that_are_not_the_ledgers_are_refused_and_the_file_is_let_go(
    made: PrivacyBudgetCallbackHandler, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []
    monkeypatch.setattr(SQLiteStore, "close", lambda store: closed.append(store))  # noqa: PLW0108  to be bound
    for wrong in ({"epsilon": 5.0}, {"delta": 1e-7}, {"adjacency": "add_remove"}):
        with pytest.raises(PrivacyBudgetMismatchError):
            PrivacyBudgetCallbackHandler(**{**LIMITS, "adjacency": "replace_one", "store": path, **wrong})
    assert len(closed) == 3
    with pytest.raises(PrivacyBudgetMismatchError):
        PrivacyBudgetCallbackHandler(**LIMITS, store=SQLiteStore(path))
    assert len(closed) == 3  # a store that was handed in is the caller's to close


@pytest.mark.parametrize(
    "fault", [{"epsilon": 0}, {"delta": 2}, {"adjacency": "both"}, {"name": ""}, {"epsilon": float("nan")}]
)
def test_a_fault_of_the_limits_makes_no_file(path: Path, fault: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        PrivacyBudgetCallbackHandler.create(path, **{**LIMITS, **fault})
    assert not path.exists()


def test_one_file_holds_several_named_ledgers(path: Path) -> None:
    names = ("support", "sales", "budget")
    made = [PrivacyBudgetCallbackHandler.create(path, **LIMITS, name=name) for name in names]
    for count, handler in enumerate(made, 1):
        share_of(handler.budget).reserve("t", count=count)
    for count, name in enumerate(names, 1):
        again = PrivacyBudgetCallbackHandler.open(path, name=name)
        assert (again.budget.name, share_of(again.budget).remaining("t")) == (name, 10 - count)
    with pytest.raises(LedgerError, match="nobody"):
        PrivacyBudgetCallbackHandler.open(path, name="nobody")
    with pytest.raises(LedgerError):
        PrivacyBudgetCallbackHandler.create(path, **LIMITS, name="sales")
    assert PrivacyBudgetCallbackHandler(**LIMITS, store=path, name="sales").budget.name == "sales"


def test_a_creation_that_was_stopped_halfway_is_finished_by_creating_again_and_by_nothing_else(path: Path) -> None:
    SQLiteStore.new(path).close()
    for act in (
        lambda: PrivacyBudgetCallbackHandler(**LIMITS, store=path),
        lambda: PrivacyBudgetCallbackHandler.open(path),
        lambda: PrivacyBudgetCallbackHandler.create(SQLiteStore(path), **LIMITS),
        lambda: Budget(**LIMITS, store=SQLiteStore(path)),
    ):
        with pytest.raises(LedgerError, match=r"creation was interrupted|opening sets no limits"):
            act()
    store = SQLiteStore(path)
    assert store.header() is None
    store.close()
    made = PrivacyBudgetCallbackHandler.create(path, **LIMITS)
    assert PrivacyBudgetCallbackHandler.open(path).budget.ledger_id == made.budget.ledger_id


def test_a_store_of_ones_own_is_created_and_opened_like_a_path() -> None:
    store = InMemoryStore()
    with pytest.raises(LedgerError, match="expected a ledger"):
        PrivacyBudgetCallbackHandler.open(store)
    made = PrivacyBudgetCallbackHandler.create(store, **LIMITS)
    assert PrivacyBudgetCallbackHandler.open(store).budget.ledger_id == made.budget.ledger_id
    with pytest.raises(LedgerError, match="found one"):
        PrivacyBudgetCallbackHandler.create(store, **LIMITS)


@pytest.mark.parametrize(
    "wrong",
    [5, b"budget.db", object(), ["budget.db"], SQLiteStore, InMemoryStore],
    ids=["number", "bytes", "object", "list", "class", "memory"],
)
def test_what_names_no_place_is_refused(wrong: Any) -> None:
    for act in (
        lambda: PrivacyBudgetCallbackHandler(**LIMITS, store=wrong),
        lambda: PrivacyBudgetCallbackHandler.open(wrong),
        lambda: PrivacyBudgetCallbackHandler.create(wrong, **LIMITS),
    ):
        with pytest.raises(ConfigurationError, match="a path, an address"):
            act()


@pytest.mark.parametrize("address", ["postgresql://localhost/none", "postgres://localhost/none"])
def test_an_address_goes_to_postgresql(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import langchain_dpicl.stores as rooms

    asked = []

    class Server:
        @staticmethod
        def open(where: str, *, name: str, timeout: float) -> Any:
            asked.append((where, name, timeout))
            return opened

    opened = WatchedStore()
    budget(store=opened)
    monkeypatch.setattr(rooms, "_postgres", lambda: Server)
    assert PrivacyBudgetCallbackHandler.open(address, name="ours", timeout=3.0).budget._store is opened
    assert PrivacyBudgetCallbackHandler(**LIMITS, store=address).budget._store is opened
    assert asked == [(address, "ours", 3.0), (address, "budget", 60.0)]


def test_a_subclass_is_what_its_doors_make(path: Path) -> None:
    class Ours(PrivacyBudgetCallbackHandler):
        pass

    assert type(Ours.create(path, **LIMITS)) is Ours
    assert type(Ours.open(path)) is Ours


# -- anchors ---------------------------------------------------------------------------------------------------------


def test_an_anchor_goes_with_every_door(path: Path, tmp_path: Path) -> None:
    anchor = FileAnchor.new(tmp_path / "anchor.json")
    made = PrivacyBudgetCallbackHandler.create(path, **LIMITS, anchor=anchor)
    share_of(made.budget).reserve("t")
    store = SQLiteStore(path)
    store.backup(tmp_path / "backup.db")
    store.close()
    share_of(made.budget).reserve("t")
    made.close()
    (tmp_path / "backup.db").replace(path)
    again = FileAnchor(tmp_path / "anchor.json")
    for act in (
        lambda: PrivacyBudgetCallbackHandler.open(path, anchor=again),
        lambda: PrivacyBudgetCallbackHandler(**LIMITS, store=path, anchor=again),
        lambda: get_privacy_budget_callback(store=path, anchor=again).__enter__(),
        lambda: get_privacy_budget_callback(**LIMITS, store=path, anchor=again).__enter__(),
        lambda: Budget.open(SQLiteStore(path), anchor=again),
    ):
        with pytest.raises(LedgerRollbackError):
            act()
    assert share_of(PrivacyBudgetCallbackHandler.open(path).budget).remaining("t") == 9  # the documented limit


def test_an_anchor_may_be_named_by_its_path_and_is_made_with_the_ledger(path: Path, tmp_path: Path) -> None:
    where = tmp_path / "anchor.json"
    for absent in (where, str(where)):
        with pytest.raises(LedgerUnavailableError):
            PrivacyBudgetCallbackHandler.open(InMemoryStore(), anchor=absent)
    made = PrivacyBudgetCallbackHandler.create(path, **LIMITS, anchor=str(where))
    share_of(made.budget).reserve("t")
    assert FileAnchor(where).read(made.budget.ledger_id) == SQLiteStore(path).head()
    second = PrivacyBudgetCallbackHandler.create(path, **LIMITS, name="second", anchor=where)
    assert FileAnchor(where).read(second.budget.ledger_id) is not None
    assert PrivacyBudgetCallbackHandler.open(path, anchor=where).budget.ledger_id == made.budget.ledger_id
    PrivacyBudgetCallbackHandler(**LIMITS, store=path, anchor=str(where)).close()


@pytest.mark.parametrize("fault", ["class", "number", "gone", "rotten"])
def test_an_anchor_that_cannot_be_read_is_found_before_a_ledger_is_made(fault: str, path: Path, tmp_path: Path) -> None:
    where = tmp_path / "anchor.json"
    anchor: Any = {"class": FileAnchor, "number": 5}.get(fault) or FileAnchor.new(where)
    if fault == "rotten":
        where.write_text("{}")
    if fault == "gone":
        where.unlink()
    with pytest.raises(ConfigurationError if fault in {"class", "number"} else LedgerError):
        PrivacyBudgetCallbackHandler.create(path, **LIMITS, anchor=anchor)
    assert not path.exists()


def test_a_new_ledger_in_the_place_of_an_anchored_one_is_refused(path: Path, tmp_path: Path) -> None:
    where = tmp_path / "anchor.json"
    PrivacyBudgetCallbackHandler.create(path, **LIMITS, anchor=where).close()
    PrivacyBudgetCallbackHandler.create(tmp_path / "new.db", **LIMITS).close()
    (tmp_path / "new.db").replace(path)
    for act in (
        lambda: PrivacyBudgetCallbackHandler.open(path, anchor=where),
        lambda: PrivacyBudgetCallbackHandler(**LIMITS, store=path, anchor=where),
    ):
        with pytest.raises(LedgerRollbackError, match="never"):
            act()
    PrivacyBudgetCallbackHandler.open(path, anchor=where, adopt_anchor=True).close()
    PrivacyBudgetCallbackHandler.open(path, anchor=where).close()


def test_other_limits_are_answered_with_the_door_that_takes_a_path(
    made: PrivacyBudgetCallbackHandler, path: Path
) -> None:
    assert made.epsilon == 4.0
    with pytest.raises(PrivacyBudgetMismatchError, match=r"PrivacyBudgetCallbackHandler\.open"):
        PrivacyBudgetCallbackHandler(9.0, 1e-6, store=path)


# -- the block -------------------------------------------------------------------------------------------------------


def test_a_block_opens_a_ledger_with_its_own_limits_or_those_given(
    made: PrivacyBudgetCallbackHandler, path: Path
) -> None:
    with get_privacy_budget_callback(store=path) as found:
        assert resolve_budget().ledger_id == made.budget.ledger_id
        assert found.adjacency == "replace_one"
    with get_privacy_budget_callback(**LIMITS, adjacency="replace_one", store=path) as found:
        share_of(found.budget).reserve("t")
    assert found.report().epsilon == 1.0
    with pytest.raises(PrivacyBudgetMismatchError), get_privacy_budget_callback(9.0, 1e-6, store=path):
        pass


@pytest.mark.parametrize(
    "arguments",
    [{"epsilon": 1.0, "store": True}, {"handler": True, "store": True}, {"handler": True, "anchor": True}],
    ids="-".join,
)
def test_a_block_refuses_half_of_the_limits_and_a_handler_beside_a_store(
    arguments: dict[str, Any], made: PrivacyBudgetCallbackHandler, path: Path
) -> None:
    values = {"store": path, "handler": made, "anchor": DictAnchor()}
    given = {name: values.get(name, value) for name, value in arguments.items()}
    with pytest.raises(ConfigurationError), get_privacy_budget_callback(**given):
        pass


# -- one ledger, several processes -----------------------------------------------------------------------------------

ELSEWHERE = """
import json, sys
from langchain_dpicl import PrivacyBudgetCallbackHandler, PrivateExamples
from langchain_dpicl.exceptions import DPICLError
from langchain_dpicl.privacy.accounting.events import PureEvent
from langchain_dpicl.privacy.ledger.tickets import Ticket

handler = PrivacyBudgetCallbackHandler.open(sys.argv[1])
for given in json.loads(sys.argv[2]):
    records = [{"text": "y", "label": "b", "user": "u"}]
    options = {"label_key": "label", "labels": ("a", "b"), "public_size": 1000, **given}
    try:
        handler.bind(PrivateExamples(records, dataset_id="d", **options))
        tickets = (Ticket("t", PureEvent(0.1), max_count=10, refundable=True),)
        share = handler.budget.declare("c", tickets=tickets, epsilon=1.0)
        share.reserve("t", count=3, tenant="acme", tenant_cap=5)
        print("bound", share.remaining("t"))
        share.reserve("t", count=3, tenant="acme", tenant_cap=5)
    except DPICLError as error:
        print(type(error).__name__)
handler.close()
"""


def elsewhere(path: Path, *given: dict[str, Any]) -> list[str]:
    """What another process gets that binds each of these declarations in turn."""
    command = [sys.executable, "-c", ELSEWHERE, str(path), json.dumps(given)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_a_data_set_is_bound_for_good_and_a_tenant_capped_in_every_process(path: Path) -> None:
    """Users are the units: a process that takes records for units would protect less, and is refused."""
    made = PrivacyBudgetCallbackHandler.create(path, **LIMITS)
    records = [{"text": "x", "label": "a", "user": "u"}, {"text": "z", "label": "a", "user": "u"}]
    users: dict[str, Any] = {"unit_key": "user", "records_per_unit": 2}
    declared: Any = {"label_key": "label", "labels": ("a", "b"), "public_size": 1000, **users}
    made.bind(PrivateExamples(records, dataset_id="d", **declared))
    share = share_of(made.budget, refundable=True)
    share.reserve("t", tenant="acme")
    others = [
        {},
        {"unit_key": "user"},
        *({**users, **more} for more in ({"public_size": 9}, {"labels": ["a", "b", "c"]})),
    ]
    told = elsewhere(path, *others, users)
    assert told == ["PrivacyBudgetMismatchError"] * 4 + ["bound 6", "TenantCapExceededError"]
    assert (share.remaining("t"), share.used_by("acme")) == (6, 4)
    share.reserve("t", tenant="acme", tenant_cap=5)
    with pytest.raises(TenantCapExceededError):
        share.reserve("t", tenant="acme", tenant_cap=5)
