"""What every place that holds several ledgers must do: one data set has one of them, for good, whichever process binds it."""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import PrivacyBudgetMismatchError
from langchain_dpicl.privacy.ledger.store import LedgerStore
from tests.ledgers import private

AT_ONCE = 6


def kinds(store: LedgerStore) -> list[str]:
    return [line.kind for line in store.records()]


def budget_on(store: LedgerStore) -> Budget:
    return Budget(epsilon=1.0, delta=1e-6, store=store)


class BindingContract:
    """The suite, for `DurableStoreContract`. A data set is named anew in each test: a place may outlive a test."""

    beside: Any
    opened: Any
    reopen: Any

    @pytest.fixture
    def dataset_id(self) -> str:
        return f"set {uuid.uuid4().hex}"

    def test_a_data_set_has_one_ledger_of_a_place(self, empty: LedgerStore, dataset_id: str) -> None:
        ours = budget_on(empty)
        theirs = budget_on(self.beside(empty, "other"))
        examples, same_name = private(dataset_id), private(dataset_id)
        ours.bind(examples)
        for other in (theirs, Budget.open(self.opened(empty, "other"))):
            with pytest.raises(PrivacyBudgetMismatchError, match="bound to another of the same database"):
                other.bind(same_name)
        assert kinds(self.opened(empty, "other")) == []
        assert same_name._ledger_id is None
        theirs.bind(private(dataset_id + "2"))
        Budget.open(self.reopen(empty)).bind(examples)
        assert kinds(empty) == ["bind"]

    def test_of_ledgers_that_bind_one_data_set_at_once_one_gets_it(self, store: LedgerStore, dataset_id: str) -> None:
        names = [f"contender {number}" for number in range(AT_ONCE)]
        budgets = [budget_on(self.beside(store, name)) for name in names]
        start = threading.Barrier(AT_ONCE)

        def contend(number: int) -> bool:
            examples = private(dataset_id)
            start.wait()
            try:
                budgets[number].bind(examples)
            except PrivacyBudgetMismatchError:
                return False
            return True

        with ThreadPoolExecutor(AT_ONCE) as pool:
            outcomes = list(pool.map(contend, range(AT_ONCE)))
        assert sum(outcomes) == 1
        assert [kinds(self.opened(store, name)) == ["bind"] for name in names] == outcomes

    def test_a_binding_stands_when_its_transaction_does(self, store: LedgerStore, dataset_id: str) -> None:
        other = self.beside(store, "other")
        budget_on(other)
        with pytest.raises(KeyError), store.transaction() as view:
            view.bind(dataset_id)  # type: ignore[attr-defined]
            view.append("bind", {"dataset_id": dataset_id})
            raise KeyError
        with other.transaction() as view:
            view.bind(dataset_id)
            view.append("bind", {"dataset_id": dataset_id})
        with store.transaction() as view, pytest.raises(PrivacyBudgetMismatchError):
            view.bind(dataset_id)  # type: ignore[attr-defined]
        with self.opened(store, "other").transaction() as view:
            view.bind(dataset_id)

    def test_a_binding_stands_without_a_line(self, store: LedgerStore, dataset_id: str) -> None:
        other = self.beside(store, "other")
        budget_on(other)
        with store.transaction() as view:
            view.bind(dataset_id)  # type: ignore[attr-defined]
        with other.transaction() as view, pytest.raises(PrivacyBudgetMismatchError):
            view.bind(dataset_id)
