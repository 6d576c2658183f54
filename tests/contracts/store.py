"""What every ledger store must do. Subclass `StoreContract`, return an empty store from `make_store`.

A durable store also overrides `reopen`, which returns a second handle on the same ledger, as another process has it.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from langchain_dpicl.exceptions import LedgerError, PrivacyBudgetExceededError
from langchain_dpicl.privacy.events import PureEvent
from langchain_dpicl.privacy.ledger import Budget, Ticket
from langchain_dpicl.privacy.stores import LedgerHeader, LedgerRecord, LedgerStore
from tests.ledgers import use_simple_prices

CONTENDERS = 64
TICKETS = 10


def header(ledger_id: str = "a") -> LedgerHeader:
    return LedgerHeader(ledger_id=ledger_id, name="test", epsilon=4.0, delta=1e-6, adjacency="add_remove")


class StoreContract:
    """The suite. `tmp_path` is there for stores that live in files."""

    def make_store(self, tmp_path: Path) -> LedgerStore:
        """Returns an empty store."""
        raise NotImplementedError

    def reopen(self, store: LedgerStore) -> LedgerStore:
        """Returns another handle on the same ledger."""
        return store

    @pytest.fixture
    def empty(self, tmp_path: Path) -> LedgerStore:
        return self.make_store(tmp_path)

    @pytest.fixture
    def store(self, empty: LedgerStore) -> LedgerStore:
        empty.create(header())
        return empty

    def test_it_is_a_ledger_store_and_says_where_it_lives(self, empty: LedgerStore) -> None:
        assert isinstance(empty, LedgerStore)
        assert isinstance(empty.durable, bool)
        assert empty.description
        assert empty.durable or "dies with this process" in empty.description

    def test_a_store_has_no_header_until_one_is_created(self, empty: LedgerStore) -> None:
        assert empty.header() is None
        assert empty.create(header()) == header_of(empty)
        assert header_of(self.reopen(empty)) == header_of(empty)

    def test_the_first_header_wins(self, store: LedgerStore) -> None:
        standing = self.reopen(store).create(header("b"))
        assert standing.ledger_id == "a"
        assert header_of(store).ledger_id == "a"

    def test_no_transaction_without_a_header(self, empty: LedgerStore) -> None:
        with pytest.raises(LedgerError), empty.transaction() as view:
            view.append("note", {})

    def test_records_are_chained_from_the_header_on(self, store: LedgerStore) -> None:
        with store.transaction() as view:
            first = view.append("note", {"text": "é {brace} \N{SNOWMAN}"})
            second = view.append("note", {"n": 2, "x": 0.1, "none": None})
        assert (first.seq, second.seq) == (1, 2)
        assert (first.prev, second.prev) == (header_of(store).digest, first.hash)
        for line in (first, second):
            assert line.hash == line.computed_hash
        assert list(self.reopen(store).records()) == [first, second]

    def test_records_after_a_line_are_the_later_ones(self, store: LedgerStore) -> None:
        with store.transaction() as view:
            written = [view.append("note", {"n": n}) for n in range(4)]
            assert list(view.records(2)) == written[2:]
        assert list(store.records(1)) == written[1:]
        assert list(store.records(4)) == []
        assert list(store.records(0)) == written

    def test_a_transaction_sees_what_others_committed(self, store: LedgerStore) -> None:
        other = self.reopen(store)
        with store.transaction() as view:
            view.append("note", {"n": 1})
        with other.transaction() as view:
            assert [line.body["n"] for line in view.records()] == [1]
            assert view.append("note", {"n": 2}).seq == 2
        assert [line.body["n"] for line in store.records()] == [1, 2]

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
    def test_a_failed_transaction_leaves_nothing(self, store: LedgerStore, error: type[BaseException]) -> None:
        with store.transaction() as view:
            kept = view.append("note", {"n": 1})
        with pytest.raises(error), store.transaction() as view:
            view.append("note", {"n": 2})
            raise error
        assert list(self.reopen(store).records()) == [kept]
        with store.transaction() as view:
            assert view.append("note", {"n": 3}).prev == kept.hash

    def test_a_transaction_is_dead_once_it_ends(self, store: LedgerStore) -> None:
        with store.transaction() as view:
            view.append("note", {})
        with pytest.raises(LedgerError):
            view.append("note", {})
        with pytest.raises(LedgerError):
            view.records()
        assert len(store.records()) == 1

    def test_transactions_do_not_nest(self, store: LedgerStore) -> None:
        with store.transaction() as outer:
            outer.append("note", {"n": 1})
            with pytest.raises(LedgerError), store.transaction() as inner:
                inner.append("note", {"n": 2})
        assert [line.body["n"] for line in store.records()] == [1]

    def test_a_reader_cannot_change_the_ledger(self, store: LedgerStore) -> None:
        with store.transaction() as view:
            view.append("note", {"inner": {"n": 1}}).body["inner"]["n"] = 7
        store.records()[0].body["inner"]["n"] = 8
        assert store.records()[0].body["inner"]["n"] == 1
        assert store.records()[0].hash == store.records()[0].computed_hash

    def test_only_one_writer_at_a_time(self, store: LedgerStore) -> None:
        start = threading.Barrier(CONTENDERS)

        def contend(_: int) -> bool:
            handle = self.reopen(store)
            start.wait()
            with handle.transaction() as view:
                if len(view.records()) < TICKETS:
                    view.append("note", {})
                    return True
            return False

        with ThreadPoolExecutor(CONTENDERS) as pool:
            assert sum(pool.map(contend, range(CONTENDERS))) == TICKETS
        assert [line.seq for line in store.records()] == list(range(1, TICKETS + 1))

    def test_contenders_on_one_ledger_get_exactly_the_tickets_there_are(
        self, empty: LedgerStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        use_simple_prices(monkeypatch)
        tickets = (Ticket("t", PureEvent(0.1), max_count=TICKETS),)
        Budget(epsilon=1.0, delta=1e-6, store=empty)
        budgets = [Budget.open(self.reopen(empty)) for _ in range(4)]
        shares = [budget.declare("c", tickets=tickets, epsilon=1.0) for budget in budgets]
        start = threading.Barrier(CONTENDERS)

        def contend(number: int) -> str:
            start.wait()
            try:
                shares[number % len(shares)].reserve("t").burn()
            except PrivacyBudgetExceededError:
                return "refused"
            return "granted"

        with ThreadPoolExecutor(CONTENDERS) as pool:
            outcomes = list(pool.map(contend, range(CONTENDERS)))
        assert outcomes.count("granted") == TICKETS
        assert outcomes.count("refused") == CONTENDERS - TICKETS
        budgets[0].verify()


def header_of(store: LedgerStore) -> LedgerHeader:
    found = store.header()
    assert found is not None
    return found


def forged(line: LedgerRecord) -> LedgerRecord:
    """Returns the line with a hash that fits its changed content: what an editor of the file can do."""
    return LedgerRecord.from_dict({**line.to_dict(), "hash": line.computed_hash})
