"""Plays a copy that takes a ledger's place between a commit and the anchor's line, on any store."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import LedgerRollbackError, LedgerUnavailableError
from langchain_dpicl.privacy.accounting.events import PureEvent
from langchain_dpicl.privacy.ledger.shares import Share
from langchain_dpicl.privacy.ledger.store import LedgerStore
from langchain_dpicl.privacy.ledger.tickets import Ticket
from tests.durable import DictAnchor


def opened(store: LedgerStore, anchor: DictAnchor) -> Share:
    """The share as another process has it: three tickets in all."""
    ledger = Budget(epsilon=1.0, delta=1e-6, store=store, anchor=anchor, adopt_anchor=not anchor.known)
    return ledger.declare("c", tickets=(Ticket("t", PureEvent(1 / 3), max_count=3),), epsilon=1.0)


class Reads:
    """Reserves and burns, and counts what burnt."""

    def __init__(self) -> None:
        self.count = 0

    def one(self, share: Share) -> None:
        share.reserve("t").burn()
        self.count += 1


def lagging(anchor: DictAnchor, store: LedgerStore) -> None:
    """Takes the anchor back to where a process that died before it sent its last line left it."""
    line = store.records(0)[-2]
    anchor.known = dict.fromkeys(anchor.known, (line.seq, line.hash))


def race(
    store: LedgerStore, saved: Callable[[], Callable[[], object]], at_commit: Callable[[Callable[[], object]], None]
) -> None:
    """Plays it: `saved` returns what puts the present state back; `at_commit` takes what is to follow the next commit."""
    anchor, reads = DictAnchor(), Reads()
    first, second = opened(store, anchor), opened(store, anchor)
    reads.one(first)
    put_back = saved()
    first.reserve("t")  # its process dies before the anchor is told: nothing is granted on it
    lagging(anchor, store)

    def swap() -> None:
        put_back()
        reads.one(opened(store, anchor))

    at_commit(swap)
    # A store that waits for the disk after its lock looks the line up by then, and finds that the copy has it not.
    fault, words = (LedgerUnavailableError, "gone") if hasattr(store, "flush") else (LedgerRollbackError, "")
    with pytest.raises(fault, match=words):
        reads.one(second)
    granted = sum(line.body["count"] for line in store.records(0) if line.kind == "reserve")
    assert reads.count == granted == 2


def after_next_commit(monkeypatch: pytest.MonkeyPatch, kind: type[Any], act: Callable[[], object]) -> None:
    """Runs `act` once a store of this kind has committed and before its desk goes on."""
    real = kind.transaction

    @contextlib.contextmanager
    def transaction(self: Any, **options: Any) -> Iterator[Any]:
        with real(self, **options) as view:
            yield view
        monkeypatch.setattr(kind, "transaction", real)
        act()

    monkeypatch.setattr(kind, "transaction", transaction)
