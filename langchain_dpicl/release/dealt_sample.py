"""One secret deal of disjoint batches and the releases that a ticket paid for on each of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_dpicl.backends.rows import guarded
from langchain_dpicl.exceptions import ModelCallError, PrivacyBudgetError
from langchain_dpicl.privacy._validate import check_int
from langchain_dpicl.privacy.examples import Pool, PrivateExamples
from langchain_dpicl.privacy.extensions.random_allocation import AllocatedSlots
from langchain_dpicl.privacy.mechanisms.release_plan import ReleasePlan, TestRuns
from langchain_dpicl.privacy.mechanisms.sampling import Sample
from langchain_dpicl.privacy.shares import Reservation
from langchain_dpicl.release.curator import opened
from langchain_dpicl.release.sample import NONE_LEFT, Record, SecretSample, public_side
from langchain_dpicl.release.token_block import NOT_COMPUTED, Block, Choose, noisy_index


def open_deal(private: PrivateExamples, reservation: Reservation, *, plan: ReleasePlan, length: int) -> DealtSample:
    """Burns one ticket and deals the units for `length` releases on each batch; errors as `open_block`.

    Args:
      private: the examples.
      reservation: the ticket; its commit is the caller's.
      plan: how to deal, add up and noise.
      length: releases on each batch that the ticket pays for.
    """
    _dealing(plan)
    pool = opened(private, reservation, plan.block_event(length), plan.adjacency)
    return DealtSample(pool, plan, length=length)


def _dealing(plan: ReleasePlan) -> AllocatedSlots:
    """Returns the plan's sampler, or refuses one whose draw is no deal."""
    if not isinstance(plan.sampler, AllocatedSlots):
        msg = "sample: expected a deal of batches, found one sample. Declare sampling='disjoint'."
        raise PrivacyBudgetError(msg)
    return plan.sampler


@dataclass(slots=True, repr=False, eq=False)
class _Batch:
    """What is still paid for on one batch of a deal.

    Attributes:
      left: releases; 0 while the batch is open.
      runs: of the plan's test, if it has one.
    """

    left: int
    runs: TestRuns | None


class DealtSample(SecretSample):
    """Up to `length` releases on each batch of one secret deal; shows nothing, refuses copies.

    Args:
      pool: the units, opened by the curator.
      plan: how to deal, add up and noise.
      length: releases on each batch.

    Raises:
      PrivacyBudgetError: the plan does not deal batches.
    """

    def __init__(self, pool: Pool, plan: ReleasePlan, *, length: int) -> None:
        self._sampler = _dealing(plan)
        self._batches: dict[int, _Batch] = {}
        super().__init__(pool, plan, length=length)

    def _runs(self) -> TestRuns | None:
        return None if self.plan.test is None else self.plan.test.runs(self.plan)

    def left_of(self, index: int) -> int:
        """Returns how many releases on one batch of a deal may still begin; public, and 0 while it is open."""
        with self._lock:
            batch = self._batches.get(index)
            return 0 if self._render is None else self.left if batch is None else batch.left

    @contextlib.contextmanager
    def batch(
        self, index: int, *, render: Callable[[Sequence[Record]], str], choose: Choose, length: int, **options: Any
    ) -> Iterator[Block]:
        """Opens up to `length` releases on one batch of a deal; all of a batch together are the sample's length.

        A release that did not begin comes back when the block closes. A batch is open once at a time, and what its
        plan tests goes on in the next block where it stood.

        Args:
          index: which batch, public; the plan's sampler is `AllocatedSlots`.
          render: turns one row's records into its prompt; no records give the public prompt.
          choose: reads an index off a noised vector.
          length: releases.
          options: `backend` and `prefix`, as for `curator.open_block`.

        Raises:
          PrivacyBudgetError: nothing is left of what the ticket paid for on this batch.
          LedgerError: this is a forked copy.
          ModelCallError: the block could not be opened.
        """
        sampler = self._sampler
        check_int("index", index, low=0, high=sampler.num_batches - 1)
        check_int("length", length, low=1)
        self._check_home()
        with self._lock:
            batch = self._batches.setdefault(index, _Batch(self.left, self._runs()))
            render_rows, had = self._render, batch.left
            if render_rows is None or had <= 0:
                raise PrivacyBudgetError(NONE_LEFT)
            batch.left = 0
        used, block = 0, None

        def part(sample: Sample) -> Sample:
            return sampler.batch(sample, index)

        try:
            options |= {"length": min(length, had), "runs": batch.runs}
            side = public_side(options["backend"], render, sampler.num_slots, options["length"])
            block = guarded(
                lambda: Block(render_rows(render, part), plan=self.plan, release=None, side=side, **options)
            )
            if block is None:  # a stop in there would show prompts, and was raised anew without them
                raise ModelCallError(NOT_COMPUTED)
            block.release = noisy_index(self.plan, choose)
            with contextlib.closing(block):
                yield block
        finally:
            if block is not None:
                used, block.left = options["length"] - block.left, 0
            with self._lock:
                batch.left = had - used
