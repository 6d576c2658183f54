"""The filter behind a component that answers from retrieved documents: paid for once, opened when first needed.

Knows the share and where balances live; no query, no wording and no record.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from langchain_dpicl.backends.similar import SimilarTexts
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import PrivacyBudgetExceededError
from langchain_dpicl.privacy.accounting.events import canonical_json
from langchain_dpicl.privacy.examples import PrivateExamples
from langchain_dpicl.privacy.extensions.individual_filter import (
    ASKED_TEMPLATE,
    FILTER_TEMPLATE,
    MemoryBalances,
    ParticipationPlan,
)
from langchain_dpicl.privacy.shares import Reservation, Share, Uncopyable
from langchain_dpicl.release.filtered_sample import Participants, Payer, open_participants
from langchain_dpicl.runnables import Pay
from langchain_dpicl.stores.balances import SQLiteBalances

_DIED = (
    "Its balances were in the memory of the process that paid for them, and are gone with it: how often each document "
    "took part is not known any more. Declare another component, which pays again; or give balances= a file from the "
    "start, which outlives processes and is shared by them."
)
_PATIENCE, _PAUSE = 5.0, 0.01
"""Seconds that another process, which has the ticket, gets to write so into the file; and between two looks."""


class IndividualFilter(Uncopyable):
    """One set of balances of one share; shared by all copies of a component.

    Formal guarantees:
      - Its ticket burns before the first record is read, once: in this process, or, with balances in a file, in
        whichever process was first. Another process than the one that holds balances in memory gets none of them.

    Args:
      private: the documents.
      budget: who pays.
      share: where the ticket comes from.
      plan: what the ticket pays for.
      texts: finds who is near.
      balances: where balances outlive the process; None: nowhere.
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
        self._opened: Participants | None = None

    @property
    def participants(self) -> Participants | None:
        """The opened filter; None: it was not paid for yet, in this process."""
        return self._opened

    @property
    def settled(self) -> int:
        """Queries that the ledger holds as committed; public."""
        return self.share.committed(ASKED_TEMPLATE)

    def open(self, pay: Pay) -> None:
        """Pays for the filter, or takes up the one that another process paid for; does nothing where that is done.

        Raises:
          PrivacyBudgetExceededError: its ticket was used, and its balances are gone.
          PrivacyBudgetError: the share does not fit, or the file is another filter's.
          LedgerError: the ledger or the file cannot be used; nothing is granted.
        """
        with self._locks.setdefault(os.getpid(), threading.Lock()):
            if self._opened is None:
                self._opened = self._in_memory(pay) if self.balances is None else self._on_disk(self.balances, pay)

    def _in_memory(self, pay: Pay) -> Participants:
        try:
            with pay(FILTER_TEMPLATE) as ticket:
                opened = self._made(ticket, MemoryBalances(self.plan.participations))
                ticket.commit()
        except PrivacyBudgetExceededError as error:
            self._explain(error)
            raise
        return opened

    def _on_disk(self, balances: SQLiteBalances, pay: Pay) -> Participants:
        terms = self._terms()
        if balances.paid_by(terms) is None:
            opened: Participants | None = None
            try:
                with pay(FILTER_TEMPLATE) as ticket:  # the ledger is waited for before the file's lock is taken
                    opened = self._bought(balances, ticket, terms)
            except PrivacyBudgetExceededError as error:
                if not self._was_paid_elsewhere(balances, terms):
                    self._explain(error)
                    raise
            if opened is not None:
                return opened
        line = balances.paid_by(terms)
        self.budget.check_receipt(line)
        return self._made(None, balances)

    def _bought(self, balances: SQLiteBalances, ticket: Reservation, terms: Mapping[str, Any]) -> Participants | None:
        """Burns the ticket for the file, and says so in it; None: another process was faster, and nothing burnt."""
        made: list[Participants] = []

        def buy() -> Mapping[str, Any]:
            made.append(self._made(ticket, balances))
            return {"ledger_id": ticket.ledger_id, "entry": ticket.entry, "entry_hash": ticket.entry_hash}

        balances.take_up(terms, buy)
        if not made:
            return None
        ticket.commit()  # from here on the file says what paid for it
        return made[0]

    def _was_paid_elsewhere(self, balances: SQLiteBalances, terms: Mapping[str, Any]) -> bool:
        """Returns whether the file was paid for meanwhile; waits while another process may be about to say so."""
        end = time.monotonic() + min(_PATIENCE, balances.timeout)
        while True:
            # A line that is committed stood in the file before: so the file is read after the ledger.
            is_over = self.share.remaining(FILTER_TEMPLATE) > 0 or self.share.committed(FILTER_TEMPLATE) > 0
            if balances.paid_by(terms) is not None:
                return True
            if is_over or time.monotonic() > end:
                return False
            time.sleep(_PAUSE)

    def _made(self, ticket: Reservation | None, balances: MemoryBalances | SQLiteBalances) -> Participants:
        payer = Payer(self.budget.ledger_id, self.share.component, self.private.dataset_id)
        given: dict[str, Any] = {"plan": self.plan, "texts": self.texts, "payer": payer}
        return open_participants(self.private, ticket, balances=balances, **given)

    def _terms(self) -> dict[str, Any]:
        """Returns what identifies the filter: for whom, how often a unit may take part, and what that costs."""
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
            where = "The file of balances is a new one, or not that of this filter. " if self.balances else ""
            error.args = (f"{error.args[0]} {where}{_DIED}",)

    def __repr__(self) -> str:
        return f"IndividualFilter({self.share.component!r}, opened={self._opened is not None})"
