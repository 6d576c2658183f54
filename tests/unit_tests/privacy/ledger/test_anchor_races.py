"""Anchors that never saw a ledger, lost it, or are shared by two copies that go on at the same moment."""

from __future__ import annotations

from typing import Any

import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import (
    ConfigurationError,
    LedgerRollbackError,
    LedgerUnavailableError,
    PrivacyBudgetExceededError,
)
from langchain_dpicl.privacy.ledger.shares import Reservation, Share
from tests.durable import UNAVAILABLE, DictAnchor, EarlyStore, WatchedStore
from tests.ledgers import budget, share_of, tickets

pytestmark = pytest.mark.usefixtures("simple_prices")


def again(store: WatchedStore, anchor: DictAnchor) -> Share:
    """The share as another process has it."""
    return share_of(Budget.open(store, anchor=anchor))


def used(anchor: DictAnchor, count: int = 3) -> tuple[Budget, WatchedStore, Share]:
    store = WatchedStore()
    ledger = budget(store=store, anchor=anchor)
    share = share_of(ledger)
    for _ in range(count):
        share.reserve("t")
    return ledger, store, share


@pytest.mark.parametrize("count", [0, 3])
def test_an_anchor_that_never_saw_the_ledger_is_taken_only_where_that_is_said(count: int) -> None:
    """A wrong or a new anchor would let an older copy pass."""
    ledger, store, _ = used(DictAnchor(), count)
    stranger = DictAnchor()
    stranger.write("f" * 32, 5, "0" * 64)
    options: dict[str, Any] = {"epsilon": ledger.epsilon, "delta": ledger.delta, "store": store, "anchor": stranger}
    for act in (lambda: Budget.open(store, anchor=stranger), lambda: Budget(**options)):
        with pytest.raises(LedgerRollbackError, match="adopt_anchor=True"):
            act()
    assert list(stranger.known) == ["f" * 32]
    Budget.open(store, anchor=stranger, adopt_anchor=True)
    assert stranger.known[ledger.ledger_id] == store.head()
    again(store, stranger).reserve("t")
    with pytest.raises(LedgerRollbackError):
        Budget.open(used(DictAnchor(), 1)[1], anchor=stranger)


def test_a_ledger_behind_its_anchor_is_refused_also_where_the_anchor_is_adopted() -> None:
    anchor = DictAnchor()
    _, store, share = used(anchor)
    backup = store.snapshot()
    share.reserve("t")
    store.restore(backup)
    with pytest.raises(LedgerRollbackError):
        Budget.open(store, anchor=anchor, adopt_anchor=True)


def test_an_anchor_that_forgot_the_ledger_grants_nothing_more() -> None:
    anchor = DictAnchor()
    ledger, store, share = used(anchor)
    lines = store.snapshot()
    anchor.known.clear()
    with pytest.raises(LedgerRollbackError, match="never"):
        share.reserve("t")
    with pytest.raises(LedgerRollbackError, match="never"):
        ledger.verify()
    assert store.snapshot() == lines


def test_an_anchor_that_keeps_nothing_of_what_it_is_told_grants_nothing() -> None:
    anchor = DictAnchor()
    _, _, share = used(anchor)
    anchor.write = lambda *line: None  # type: ignore[method-assign]
    with pytest.raises(LedgerUnavailableError, match="expected line 5"):
        share.reserve("t")


def test_if_the_anchor_cannot_be_written_no_ledger_is_made() -> None:
    anchor, store = DictAnchor(), WatchedStore()
    anchor.faults["write"] = UNAVAILABLE
    with pytest.raises(LedgerUnavailableError):
        budget(store=store, anchor=anchor)
    assert store.header() is None


@pytest.mark.parametrize("ahead", [1, 2, 3])
@pytest.mark.parametrize("when", ["at_commit", "after_commit"])
def test_of_two_copies_in_a_race_never_both_are_granted(when: str, ahead: int) -> None:
    """The other grants fewer, as many or more lines between our look at the anchor and our own line there."""
    anchor = DictAnchor()
    _, store, _ = used(anchor, 1)
    clone = store.clone()
    there, here = again(store, anchor), again(clone, anchor)
    held = here.reserve("t")
    store.restore(clone.snapshot())  # both stand at line 3
    there.remaining("t")
    setattr(clone, when, lambda kinds: [there.reserve("t") for _ in range(ahead)])
    with pytest.raises(LedgerRollbackError):
        here.reserve("t", count=2)
    assert held.unburnt == 1
    setattr(clone, when, lambda kinds: None)
    there.reserve("t")
    with pytest.raises(LedgerRollbackError):
        here.reserve("t")


def test_a_copy_that_writes_two_lines_at_once_does_not_jump_over_the_others_line() -> None:
    """The other's line 4 was granted; ours would be 4 and 5, and 5 alone would pass for newer."""
    anchor = DictAnchor()
    _, store, _ = used(anchor, 2)
    clone = store.clone()
    there, elsewhere = again(store, anchor), Budget.open(clone, anchor=anchor)
    second = elsewhere.declare("other", tickets=tickets(), epsilon=1.0)
    granted: list[Reservation] = []
    clone.after_commit = lambda kinds: granted.append(there.reserve("t"))
    with pytest.raises(LedgerRollbackError):
        second.reserve("t")  # seals as well
    assert [held.count for held in granted] == [1]
    there.reserve("t")


def test_others_of_the_same_ledger_that_overtake_our_line_in_the_anchor_are_no_rollback() -> None:
    anchor = DictAnchor()
    ledger, store, share = used(anchor, 1)
    other = again(store, anchor)
    write = anchor.write

    def overtaken(ledger_id: str, seq: int, head: str) -> None:
        anchor.write = write  # type: ignore[method-assign]
        other.reserve("t", count=2)
        write(ledger_id, seq, head)

    anchor.write = overtaken  # type: ignore[method-assign]
    assert share.reserve("t").count == 1
    assert (share.remaining("t"), anchor.known[ledger.ledger_id]) == (6, store.head())
    share.reserve("t")


@pytest.mark.parametrize("told", [1, 2])
def test_others_that_write_while_an_anchor_is_adopted_are_no_rollback(told: int) -> None:
    """The anchor knows one or two of the lines that another process wrote meanwhile."""
    _, store, _ = used(DictAnchor(), 2)
    anchor = DictAnchor()
    write = anchor.write

    def overtaken(ledger_id: str, seq: int, head: str) -> None:
        write(ledger_id, seq, head)
        if seq == store.head()[0]:
            anchor.write = write  # type: ignore[method-assign]
            other = again(store, anchor)
            for _ in range(2):
                other.reserve("t")
            line = store.records()[seq + told - 1]
            anchor.known[ledger_id] = line.seq, line.hash  # what the other process has written to it so far

    anchor.write = overtaken  # type: ignore[method-assign]
    ledger = Budget.open(store, anchor=anchor, adopt_anchor=True)
    assert store.head()[0] == 5
    share = share_of(ledger)
    anchor.known[ledger.ledger_id] = 4 + told // 2, store.records()[3 + told // 2].hash
    assert share.remaining("t") == 6
    assert share.reserve("t").count == 1
    assert anchor.known[ledger.ledger_id] == store.head()
    ledger.verify()


@pytest.mark.parametrize("wrong", ["anchor.json", DictAnchor, object(), 5], ids=["text", "class", "object", "number"])
def test_what_is_no_anchor_is_refused_before_a_ledger_is_made(wrong: Any) -> None:
    store = WatchedStore()
    with pytest.raises(ConfigurationError, match="expected a LedgerAnchor"):
        budget(store=store, anchor=wrong)
    assert store.header() is None


@pytest.mark.parametrize("wrong", ["budget.db", WatchedStore, object()], ids=["text", "class", "object"])
def test_what_is_no_store_is_refused(wrong: Any) -> None:
    for act in (lambda: budget(store=wrong), lambda: Budget.open(wrong)):
        with pytest.raises(ConfigurationError, match="expected a LedgerStore"):
            act()


@pytest.mark.parametrize("why", ["refused", "out"])
def test_a_copy_behind_a_line_that_was_matched_and_not_flushed_grants_nothing(why: str) -> None:
    anchor, store = DictAnchor(), EarlyStore()
    there = share_of(budget(store=store, anchor=anchor))
    there.reserve("t")  # lines 1 and 2
    here = share_of(Budget.open(store, anchor=anchor))  # another process: line 2 is the last one it waited for
    backup = store.snapshot()
    for _ in range(3):
        there.reserve("t")  # lines 3 to 5, in the anchor too
    if why == "refused":  # its transaction reads the anchor (line 5) and ends without a flush
        with pytest.raises(PrivacyBudgetExceededError):
            here.reserve("t", count=10)
    else:  # the server dies before the flush, and a standby that lags takes over
        store.at_flush = lambda: (_ for _ in ()).throw(UNAVAILABLE)
        with pytest.raises(LedgerUnavailableError):
            here.reserve("t")
        store.at_flush = lambda: None
    store.restore(backup)
    store.on_disk = len(backup)
    with pytest.raises(LedgerRollbackError):
        here.reserve("t")
