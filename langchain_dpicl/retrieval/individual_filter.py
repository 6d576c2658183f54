"""Opens the individual privacy filter of a share once, and pays for it, in memory or in a file."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from langchain_dpicl._opaque import Uncopyable
from langchain_dpicl.backends.rows.neighbour_rows import SimilarTexts
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import PrivacyBudgetExceededError
from langchain_dpicl.privacy.accounting.events import canonical_json
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.privacy.extensions.individual_filter import (
    FILTER_TEMPLATE,
    QUERY_TEMPLATE,
    MemoryBalances,
    ParticipationPlan,
)
from langchain_dpicl.privacy.ledger.shares import Reservation, Share
from langchain_dpicl.release.filtered_sample import FilteredSample, FilterShare, open_participants
from langchain_dpicl.runs.query_runnable import TicketCharge
from langchain_dpicl.stores.balances import SQLiteBalances

_DIED = (
    "Its balances were in the memory of the process that paid for them and are lost with it: it is unknown how often "
    "each document participated. Declare another component, which pays again; or give balances= a file from the start, "
    "which outlives processes and is shared by them."
)
_PATIENCE, _PAUSE = 5.0, 0.01
"""Seconds to wait for the process that holds the ticket to write to the file, and between two reads of the file."""


class IndividualFilter(Uncopyable):
    """One set of balances of one share; shared by all copies of a component.

    Formal guarantees:
      - Its ticket burns once, before the first record is read: in this process or, with balances in a file, in the
        first process that opens it. Balances in memory are available to the process that paid for them only.

    Args:
      private: the documents.
      budget: the budget that pays.
      share: the share that the ticket is reserved from.
      plan: what the ticket pays for.
      texts: finds similar documents.
      balances: the file of balances; None: they stay in memory.
    """

    def __init__(
        self,
        private: PrivateExamples,
        *,
        budget: Budget,
        share: Share,
        plan: ParticipationPlan,
        texts: SimilarTexts,
        balances: SQLiteBalances | None,
    ) -> None:
        self.private = private
        self.budget = budget
        self.share = share
        self.plan = plan
        self.texts = texts
        self.balances = balances
        self._lock = threading.Lock()
        self._locks = {os.getpid(): self._lock}
        self._opened: FilteredSample | None = None

    @property
    def participants(self) -> FilteredSample | None:
        """The opened filter; None: not opened in this process yet."""
        return self._opened

    @property
    def settled(self) -> int:
        """Number of queries that the ledger records as committed; public."""
        return self.share.committed(QUERY_TEMPLATE)

    def open(self, pay: TicketCharge) -> None:
        """Opens the filter: pays for it, or uses the one that another process paid for; later calls do nothing."""
        # A lock per process: one that another thread held at a fork would stay locked in the child.
        with self._locks.setdefault(os.getpid(), threading.Lock()):
            if self._opened is None:
                self._opened = self._in_memory(pay) if self.balances is None else self._on_disk(self.balances, pay)

    def _in_memory(self, pay: TicketCharge) -> FilteredSample:
        try:
            with pay(FILTER_TEMPLATE) as ticket:
                opened = self._made(ticket, MemoryBalances(self.plan.participations))
                ticket.commit(wait=True)
        except PrivacyBudgetExceededError as error:
            self._explain(error)
            raise
        return opened

    def _on_disk(self, balances: SQLiteBalances, pay: TicketCharge) -> FilteredSample:
        terms = self._terms()
        if balances.bind_filter(terms) is None:
            opened: FilteredSample | None = None
            try:
                with pay(FILTER_TEMPLATE) as ticket:  # the ledger is waited for before the file's lock is taken
                    opened = self._bought(balances, ticket, terms)
            except PrivacyBudgetExceededError as error:
                if not self._was_paid_elsewhere(balances, terms):
                    self._explain(error)
                    raise
            if opened is not None:
                return opened
        # A file that names a line of another ledger, or none, must not grant participations.
        line = balances.bind_filter(terms)
        self.budget.check_receipt(line)
        return self._made(None, balances)

    def _bought(self, balances: SQLiteBalances, ticket: Reservation, terms: Mapping[str, Any]) -> FilteredSample | None:
        """Burns the ticket and records it in the file; None: another process was first and nothing burnt."""
        made: list[FilteredSample] = []

        def buy() -> Mapping[str, Any]:
            made.append(self._made(ticket, balances))
            return {"ledger_id": ticket.ledger_id, "entry": ticket.entry, "entry_hash": ticket.entry_hash}

        # `take_up` holds the lock of the file and calls `buy` only if no other process has paid.
        balances.take_up(terms, buy)
        if not made:
            return None
        ticket.commit(wait=True)  # the file now names the line that paid for it
        return made[0]

    def _was_paid_elsewhere(self, balances: SQLiteBalances, terms: Mapping[str, Any]) -> bool:
        """Returns whether another process has paid for the file; waits while one may be writing to it."""
        end = time.monotonic() + min(_PATIENCE, balances.timeout)
        while True:
            # The file is written before the ledger commits: so the file is read after the ledger.
            is_over = self.share.remaining(FILTER_TEMPLATE) > 0 or self.share.committed(FILTER_TEMPLATE) > 0
            if balances.bind_filter(terms) is not None:
                return True
            if is_over or time.monotonic() > end:
                return False
            time.sleep(_PAUSE)

    def _made(self, ticket: Reservation | None, balances: MemoryBalances | SQLiteBalances) -> FilteredSample:
        payer = FilterShare(self.budget.ledger_id, self.share.component, self.private.dataset_id)
        options: dict[str, Any] = {"plan": self.plan, "texts": self.texts, "payer": payer}
        return open_participants(self.private, ticket, balances=balances, **options)

    def _terms(self) -> dict[str, Any]:
        """Returns what identifies the filter: ledger, component, data set and plan."""
        plan = canonical_json(self.plan.to_dict())
        return {
            "ledger_id": self.budget.ledger_id,
            "component": self.share.component,
            "dataset_id": self.private.dataset_id,
            "participations": self.plan.participations,
            "plan": hashlib.sha256(plan.encode()).hexdigest(),
        }

    def _explain(self, error: PrivacyBudgetExceededError) -> None:
        if self.share.sealed and not self.share.remaining(FILTER_TEMPLATE):
            where = "The file of balances is new, or belongs to another filter. " if self.balances else ""
            error.args = (f"{error.args[0]} {where}{_DIED}",)

    def __repr__(self) -> str:
        return f"IndividualFilter({self.share.component!r}, opened={self._opened is not None})"
