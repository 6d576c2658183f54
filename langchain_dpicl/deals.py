"""Pays for one secret deal per label with one ticket, and opens its batches for demonstrations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from langchain_dpicl.exceptions import PrivacyBudgetError
from langchain_dpicl.planning import GenerationPlan, deal_name
from langchain_dpicl.privacy.examples import PrivateExamples
from langchain_dpicl.privacy.shares import Reservation, Share
from langchain_dpicl.release.dealt_sample import DealtSample, open_deal
from langchain_dpicl.release.token_block import Block


class Deals:
    """The deals of a generation on disjoint batches: demonstration b of a label reads batch b of the label's deal.

    Formal guarantees:
      - A label's units are dealt once, when its first demonstration begins, after its one ticket burnt; no batch
        releases more than the ticket paid for, over all attempts and resumed runs together.
      - The ticket is committed when the last demonstration of the label is written; it stays spent whatever happens.
      - No field of a demonstration releases more than its own cap, also where another field left some over.
    """

    def __init__(self, private: PrivateExamples, share: Share, plan: GenerationPlan) -> None:
        self._private = private
        self._share = share
        self._plan = plan
        self._reserved: dict[str | None, Reservation] = {}
        self._dealt: dict[str | None, DealtSample] = {}
        self._fields_left: dict[tuple[str | None, int, int], int] = {}

    def reserve(self, label: str | None) -> int:
        """Reserves a label's ticket unless it is; returns how many tickets that took."""
        if label in self._reserved:
            return 0
        self._reserved[label] = self._share.reserve(deal_name(self._plan.shots_per_label), label=label, count=1)
        return 1

    def left(self, label: str | None, number: int, segment: int) -> int:
        """Returns how many releases of one field of a demonstration are still paid for; public.

        None are where a stop struck between burning the ticket and dealing: a deal that is paid for once is not dealt
        twice.
        """
        cap = self._fields_left.get((label, number, segment), self._plan.segments[segment].max_tokens)
        if label in self._dealt:
            return min(cap, self._dealt[label].left_of(number))
        reservation = self._reserved.get(label)
        return cap if reservation is None or reservation.unburnt else 0

    @contextlib.contextmanager
    def open(self, label: str | None, number: int, segment: int, **options: Any) -> Iterator[Block]:
        """Opens a block for what is left of one field of a label's demonstration; see `DealtSample.batch`."""
        if label not in self._reserved:
            raise PrivacyBudgetError("deal: expected a reserved ticket, found none. Call run() of the synthesizer.")
        if label not in self._dealt:
            length = sum(part.max_tokens for part in self._plan.segments)
            self._dealt[label] = open_deal(
                self._private, self._reserved[label], plan=dict(self._plan.branches)[label], length=length
            )
        left = self.left(label, number, segment)
        if left <= 0:
            raise PrivacyBudgetError("deal: expected a release still paid for, found none left. Declare a component.")
        with self._dealt[label].batch(number, length=left, **options) as block:
            try:
                yield block
            finally:
                self._fields_left[label, number, segment] = block.left

    def finish(self, label: str | None) -> None:
        """Commits a label's ticket once all its demonstrations are written, and forgets the deal."""
        if label in self._dealt:
            self._dealt.pop(label).close()
            self._reserved[label].commit()

    def __repr__(self) -> str:
        return "Deals(<private>)"
