"""What every anchor must do. Subclass `AnchorContract`, return a new anchor from `make_anchor`.

`reopen` returns a second handle on the same anchor, as another process has it.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import LedgerError, LedgerRollbackError
from langchain_dpicl.privacy.accounting.events import PureEvent
from langchain_dpicl.privacy.extensions.ledger_anchor import LedgerAnchor
from langchain_dpicl.privacy.ledger.store import InMemoryStore
from langchain_dpicl.privacy.ledger.tickets import Ticket
from tests.ledgers import use_simple_prices

LEDGER, OTHER = "a" * 32, "b" * 32
HASH, OTHER_HASH = "1" * 64, "2" * 64


class AnchorContract:
    """The suite. `tmp_path` is there for anchors that live in files."""

    def make_anchor(self, tmp_path: Path) -> LedgerAnchor:
        """Returns an anchor that knows no ledger."""
        raise NotImplementedError

    def reopen(self, anchor: LedgerAnchor) -> LedgerAnchor:
        """Returns another handle on the same anchor."""
        raise NotImplementedError

    @pytest.fixture
    def anchor(self, tmp_path: Path) -> LedgerAnchor:
        return self.make_anchor(tmp_path)

    def test_it_is_an_anchor_and_says_where_it_lives(self, anchor: LedgerAnchor) -> None:
        assert isinstance(anchor, LedgerAnchor)
        assert anchor.description

    def test_it_remembers_the_last_line_of_each_ledger(self, anchor: LedgerAnchor) -> None:
        assert anchor.read(LEDGER) is None
        anchor.write(LEDGER, 3, HASH)
        anchor.write(OTHER, 0, OTHER_HASH)
        for handle in (anchor, self.reopen(anchor)):
            assert handle.read(LEDGER) == (3, HASH)
            assert handle.read(OTHER) == (0, OTHER_HASH)

    def test_an_older_line_never_takes_a_newer_ones_place(self, anchor: LedgerAnchor) -> None:
        anchor.write(LEDGER, 3, HASH)
        self.reopen(anchor).write(LEDGER, 2, OTHER_HASH)
        assert anchor.read(LEDGER) == (3, HASH)
        anchor.write(LEDGER, 4, OTHER_HASH)
        assert self.reopen(anchor).read(LEDGER) == (4, OTHER_HASH)

    def test_the_same_line_again_changes_nothing_and_with_another_hash_is_refused(self, anchor: LedgerAnchor) -> None:
        anchor.write(LEDGER, 3, HASH)
        anchor.write(LEDGER, 3, HASH)
        with pytest.raises(LedgerRollbackError):
            self.reopen(anchor).write(LEDGER, 3, OTHER_HASH)
        assert anchor.read(LEDGER) == (3, HASH)

    def test_lines_that_follow_each_other_are_remembered_at_once_as_one_by_one(self, anchor: LedgerAnchor) -> None:
        write_lines = getattr(anchor, "write_lines", None)
        if write_lines is None:
            pytest.skip("it takes one line at a time")
        write_lines(LEDGER, [(seq, HASH) for seq in range(1, 4)])
        assert self.reopen(anchor).read(LEDGER) == (3, HASH)
        write_lines(LEDGER, [(1, HASH), (2, HASH)])
        assert anchor.read(LEDGER) == (3, HASH)
        for first in (2, 3):  # another history: it is found at the line that is known
            with pytest.raises(LedgerRollbackError):
                write_lines(LEDGER, [(seq, OTHER_HASH) for seq in range(first, 9)])
            assert anchor.read(LEDGER) == (3, HASH)
        write_lines(LEDGER, [(3, HASH), (4, OTHER_HASH), (5, OTHER_HASH)])
        assert (anchor.read(LEDGER), anchor.read(OTHER)) == ((5, OTHER_HASH), None)

    def test_writers_at_once_leave_the_last_line(self, anchor: LedgerAnchor) -> None:
        handles = [anchor, *(self.reopen(anchor) for _ in range(3))]

        def write(seq: int) -> None:
            handles[seq % 4].write(LEDGER, seq, f"{seq:064x}")
            found = handles[(seq + 1) % 4].read(LEDGER)
            assert found is not None
            assert found[0] >= seq

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(write, range(40, 0, -1)))
        assert anchor.read(LEDGER) == (40, f"{40:064x}")

    def test_a_budget_follows_it_and_an_older_ledger_is_refused(
        self, anchor: LedgerAnchor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        use_simple_prices(monkeypatch)
        tickets = (Ticket("t", PureEvent(0.1), max_count=10),)
        store = InMemoryStore()
        budget = Budget(epsilon=1.0, delta=1e-6, store=store, anchor=anchor)
        share = budget.declare("c", tickets=tickets, epsilon=1.0)
        share.reserve("t")
        older = copy_of(store)
        share.reserve("t")
        assert self.reopen(anchor).read(budget.ledger_id) == store.head()
        for refused in (older, forked(older)):
            with pytest.raises(LedgerRollbackError):
                Budget.open(refused, anchor=self.reopen(anchor))
        assert Budget.open(store, anchor=self.reopen(anchor)).ledger_id == budget.ledger_id
        with pytest.raises(LedgerError):
            Budget.open(InMemoryStore(), anchor=anchor)


def copy_of(store: InMemoryStore) -> InMemoryStore:
    """Returns what a backup of the store would be."""
    other = InMemoryStore()
    header = store.header()
    assert header is not None
    other.create(dataclasses.replace(header))
    other._lines = list(store._lines)
    return other


def forked(store: InMemoryStore) -> InMemoryStore:
    """Returns a backup that was used again, past the line that the anchor knows."""
    other = copy_of(store)
    share = Budget.open(other).declare("c", tickets=(Ticket("t", PureEvent(0.1), max_count=10),), epsilon=1.0)
    share.reserve("t", count=2)
    share.reserve("t", count=2)
    return other
