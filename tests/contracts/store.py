"""What every ledger store must do. Subclass `StoreContract`, return an empty store from `make_store`.

A durable store subclasses `DurableStoreContract`, which asks for more ways to the same ledger, and to its neighbours.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import (
    LedgerError,
    LedgerUnavailableError,
    PrivacyBudgetExceededError,
    PrivateAccessError,
)
from langchain_dpicl.privacy.accounting.events import PureEvent
from langchain_dpicl.privacy.ledger.store import LedgerHeader, LedgerRecord, LedgerStore, LedgerTransaction
from langchain_dpicl.privacy.ledger.tickets import Ticket
from tests.contracts.bindings import BindingContract
from tests.ledgers import use_simple_prices

CONTENDERS = 64
TICKETS = 10


def header(ledger_id: str = "a") -> LedgerHeader:
    return LedgerHeader(ledger_id, "test", 4.0, 1e-6, "add_remove", stamp="2026-11-23T08:00:00+00:00")


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


class DurableStoreContract(BindingContract, StoreContract):
    """The suite of a store that outlives its process. Its place may hold several ledgers, each with a name."""

    def reopen(self, store: LedgerStore) -> LedgerStore:
        """Returns another handle on the same ledger, as another process has it."""
        raise NotImplementedError

    def beside(self, store: LedgerStore, name: str) -> LedgerStore:
        """Makes a ledger of that name in the same place."""
        raise NotImplementedError

    def opened(self, store: LedgerStore, name: str) -> LedgerStore:
        """Opens a ledger of that name in the same place."""
        raise NotImplementedError

    def hurry(self, store: LedgerStore) -> None:
        """Lets a handle that waits for a lock give up soon."""

    def test_it_says_that_it_outlives_its_process(self, empty: LedgerStore) -> None:
        assert empty.durable
        assert "dies with" not in empty.description

    def test_the_head_is_the_last_line(self, empty: LedgerStore) -> None:
        assert head_of(empty) == (0, "")
        standing = empty.create(header())
        assert head_of(empty) == (0, standing.digest)
        with empty.transaction() as view:
            first = view.append("note", {})
            assert head_of(view) == (1, first.hash)
            last = view.append("note", {})
            assert head_of(view) == (2, last.hash)
        assert head_of(empty) == head_of(self.reopen(empty)) == (2, last.hash)

    def test_lines_that_are_visible_only_are_flushed_by_number_and_hash(self, store: LedgerStore) -> None:
        if not hasattr(store, "flush"):
            pytest.skip("a commit is durable")
        early: Any = store
        early.flush(*head_of(store))
        with early.transaction(flush=False) as view:
            line = view.append("note", {"n": 1})
        assert list(self.reopen(store).records()) == [line]
        early.flush(line.seq, line.hash)
        other: Any = self.reopen(store)
        other.flush(line.seq, line.hash)
        for number, hashed in ((1, "0" * 64), (2, line.hash), (0, line.hash)):
            with pytest.raises(LedgerUnavailableError, match="gone"):
                early.flush(number, hashed)

    def test_the_last_snapshot_comes_after_the_lines_that_bind_and_seal(self, store: LedgerStore) -> None:
        if not hasattr(store, "last_snapshot"):
            pytest.skip("it has no snapshots")
        finder: Any = store
        assert list(finder.last_snapshot()) == []
        kinds = ["seal", "note", "snapshot", "seal", "note", "snapshot", "seal", "note"]
        with store.transaction() as view:
            lines = [view.append(kind, {"n": n}) for n, kind in enumerate(kinds)]
        assert list(finder.last_snapshot()) == [lines[0], lines[3], lines[5]]
        other = self.beside(store, "beside")
        other.create(header("b"))
        assert list(finder.last_snapshot()) == [lines[0], lines[3], lines[5]]
        beside: Any = other
        assert list(beside.last_snapshot()) == []

    def test_it_lives_on_when_its_handle_is_closed(self, store: LedgerStore) -> None:
        with store.transaction() as view:
            line = view.append("note", {"n": 1})
        other = self.reopen(store)
        close(store)
        assert list(other.records()) == [line]
        close(other)
        assert list(self.reopen(store).records()) == [line]

    def test_a_closed_handle_is_refused_and_closing_again_changes_nothing(self, store: LedgerStore) -> None:
        close(store)
        close(store)
        with pytest.raises(LedgerError):
            store.header()
        with pytest.raises(LedgerError):
            store.records()
        with pytest.raises(LedgerError), store.transaction():
            pass
        assert header_of(self.reopen(store)).ledger_id == "a"

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
    def test_another_process_finds_it_and_writes_on(self, store: LedgerStore) -> None:
        with store.transaction() as view:
            line = view.append("note", {"n": 1})

        def another() -> None:
            with self.reopen(store).transaction() as view:
                view.append("note", {"seen": [line.seq for line in view.records()], "head": head_of(view)})

        assert in_child(another)
        ours, theirs = store.records()
        assert ours == line
        assert theirs.prev == line.hash
        assert theirs.body == {"seen": [1], "head": [1, line.hash]}
        with store.transaction() as view:
            assert view.append("note", {}).seq == 3

    def test_ledgers_of_one_place_do_not_see_each_other(self, store: LedgerStore) -> None:
        other = self.beside(store, "other")
        assert other.header() is None
        other.create(header("b"))
        with store.transaction() as view:
            ours = [view.append("note", {"ours": n}) for n in range(2)]
        with other.transaction() as view:
            assert list(view.records()) == []
            theirs = [view.append("note", {"theirs": n}) for n in range(3)]
        with store.transaction() as view:
            ours.append(view.append("note", {"ours": 2}))
        assert [line.seq for line in ours] == [line.seq for line in theirs] == [1, 2, 3]
        assert list(self.reopen(store).records()) == ours
        assert list(self.opened(store, "other").records()) == theirs
        assert header_of(self.reopen(store)).ledger_id == "a"
        assert header_of(self.opened(store, "other")).ledger_id == "b"
        assert head_of(store) == (3, ours[-1].hash)

    def test_opening_makes_no_ledger(self, store: LedgerStore) -> None:
        for _ in range(2):
            with pytest.raises(LedgerError, match="other"):
                self.opened(store, "other").header()
        assert self.beside(store, "other").header() is None

    def test_an_opened_store_begins_no_ledger_unless_that_is_said(self, empty: LedgerStore) -> None:
        again = self.reopen(empty)
        with pytest.raises(LedgerError, match="opening sets no limits"):
            again.create(header())
        with pytest.raises(LedgerError, match="opening sets no limits"):
            Budget(epsilon=1.0, delta=1e-6, store=self.reopen(empty))
        assert empty.header() is None
        again.may_create = True  # type: ignore[attr-defined]
        assert again.create(header("b")).ledger_id == "b"
        assert self.reopen(empty).create(header()).ledger_id == empty.create(header()).ledger_id == "b"

    def test_a_ledger_is_made_once(self, store: LedgerStore) -> None:
        self.beside(store, "other").create(header("b"))
        with pytest.raises(LedgerError, match="other"):
            self.beside(store, "other")
        assert header_of(self.opened(store, "other")).ledger_id == "b"
        assert header_of(store).ledger_id == "a"

    def test_a_reader_waits_for_no_writer_and_sees_what_was_committed(self, store: LedgerStore) -> None:
        reader = self.reopen(store)
        with store.transaction() as view:
            line = view.append("note", {})
            assert list(reader.records()) == []
            assert head_of(reader) == (0, header_of(reader).digest)
        assert list(reader.records()) == [line]

    def test_a_body_that_is_no_json_leaves_nothing(self, store: LedgerStore) -> None:
        for body in ({"x": float("nan")}, {"x": object()}):
            with pytest.raises((TypeError, ValueError)), store.transaction() as view:
                view.append("note", {"n": 1})
                view.append("note", body)
        assert list(self.reopen(store).records()) == []
        with store.transaction() as view:
            assert view.append("note", {}).seq == 1

    def test_it_is_not_copied_and_not_pickled(self, store: LedgerStore) -> None:
        assert copy.copy(store) is store
        assert copy.deepcopy({"store": store})["store"] is store
        with pytest.raises(PrivateAccessError):
            pickle.dumps(store)

    def test_a_budget_lives_on_in_another_handle(self, empty: LedgerStore, monkeypatch: pytest.MonkeyPatch) -> None:
        use_simple_prices(monkeypatch)
        tickets = (Ticket("t", PureEvent(0.1), max_count=TICKETS),)
        first = Budget(epsilon=1.0, delta=1e-6, store=empty).declare("c", tickets=tickets, epsilon=1.0)
        first.reserve("t", count=4).burn(4)
        again = Budget.open(self.reopen(empty))
        assert (again.epsilon, again.remaining_epsilon) == (1.0, 0.0)
        share = again.declare("c", tickets=tickets, epsilon=1.0)
        assert share.remaining("t") == TICKETS - 4
        with pytest.raises(PrivacyBudgetExceededError):
            share.reserve("t", count=TICKETS - 3)
        again.verify()

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
    def test_a_forked_child_goes_on_beside_its_parent(self, store: LedgerStore) -> None:
        with store.transaction() as view:
            view.append("note", {"by": "parent"})

        def child() -> None:
            with store.transaction() as view:
                assert len(view.records()) == 1
                view.append("note", {"by": "child"})

        assert in_child(child)
        with store.transaction() as view:
            view.append("note", {"by": "parent"})
        assert [line.body["by"] for line in self.reopen(store).records()] == ["parent", "child", "parent"]

    @pytest.mark.parametrize("has_an_ancestors_number", [False, True])
    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
    def test_a_child_forked_inside_a_transaction_can_neither_write_nor_end_it(
        self, store: LedgerStore, monkeypatch: pytest.MonkeyPatch, has_an_ancestors_number: bool
    ) -> None:
        parent = os.getpid()
        if has_an_ancestors_number:
            monkeypatch.setattr(os, "getpid", lambda: parent)
        with contextlib.ExitStack() as stack:
            view = stack.enter_context(store.transaction())
            view.append("note", {"by": "parent"})

            def child() -> None:
                with pytest.raises(LedgerError):
                    view.append("note", {"by": "child"})
                with pytest.raises(LedgerError):
                    stack.close()
                self.hurry(store)
                with pytest.raises(LedgerError), store.transaction() as another:
                    another.append("note", {"by": "child"})

            assert in_child(child)
            assert os.getpid() == parent
        assert [line.body["by"] for line in self.reopen(store).records()] == ["parent"]


def in_child(action: Callable[[], object]) -> bool:
    """Runs `action` in a forked child; returns whether it came to its end."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            action()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return exit_status(pid) == 0


def exit_status(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def close(store: LedgerStore) -> None:
    """Closes a durable store; the Protocol does not ask for it."""
    store.close()  # type: ignore[attr-defined]


def head_of(source: LedgerStore | LedgerTransaction) -> tuple[int, str]:
    """Asks a store, or its transaction, for its last line; the Protocol leaves it open whether it can tell."""
    number, digest = source.head()  # type: ignore[union-attr]
    return number, digest


def header_of(store: LedgerStore) -> LedgerHeader:
    found = store.header()
    assert found is not None
    return found


def forged(line: LedgerRecord) -> LedgerRecord:
    """Returns the line with a hash that fits its changed content: what an editor of the file can do."""
    return LedgerRecord.from_dict({**line.to_dict(), "hash": line.computed_hash})
