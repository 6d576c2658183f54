"""Releases on a secret deal of disjoint batches, or on a partition that stays; a ticket pays for each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from langchain_dpicl._opaque import run_guarded
from langchain_dpicl.backends.sync_async import Effect, EffectGenerator
from langchain_dpicl.exceptions import ModelCallError, PrivacyBudgetError
from langchain_dpicl.privacy._validate import check_int
from langchain_dpicl.privacy.data.private_examples import Pool, PrivateExamples
from langchain_dpicl.privacy.extensions.confident_gnmax import ConfidentGNMaxMechanism
from langchain_dpicl.privacy.extensions.fixed_size_slots import BalancedSlots, PartitionedSlots
from langchain_dpicl.privacy.extensions.random_allocation import AllocatedSlots
from langchain_dpicl.privacy.ledger.shares import Reservation
from langchain_dpicl.privacy.mechanisms.noise import Release
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.privacy.mechanisms.release_plan import ReleasePlan
from langchain_dpicl.privacy.mechanisms.sampling import Sample
from langchain_dpicl.release import curator
from langchain_dpicl.release.curator import check_ticket, gap_of, opened, opened_unread
from langchain_dpicl.release.sample import NONE_LEFT, NOT_COMPUTED, Record, Rendered, SecretSample, is_unanswered
from langchain_dpicl.release.token_block import Choose, ReleaseBlock, index_release, public_side

if TYPE_CHECKING:
    from langchain_dpicl.privacy.extensions.sparse_vector import SparseVectorRuns


def open_deal(private: PrivateExamples, reservation: Reservation, *, plan: ReleasePlan, length: int) -> DealtSample:
    """Burns one ticket and deals the units for `length` releases on each batch; errors as `open_block`.

    Args:
      private: the examples.
      reservation: the ticket; its commit is the caller's.
      plan: how to deal, add up and noise.
      length: releases on each batch that the ticket pays for.
    """
    _dealing(plan)
    pool = opened(private, reservation, plan.block_event(length), plan.adjacency, gap=gap_of(plan))
    return DealtSample(pool, plan, length=length)


def _dealing(plan: ReleasePlan) -> AllocatedSlots:
    """Returns the plan's sampler, or refuses one whose draw is no deal."""
    if not isinstance(plan.sampler, AllocatedSlots):
        msg = "sample: expected a deal of batches, found one sample. Declare sampling='disjoint'."
        raise PrivacyBudgetError(msg)
    return plan.sampler


@dataclass(slots=True, repr=False, eq=False)
class _BatchAllowance:
    """What is still paid for on one batch of a deal.

    Attributes:
      left: releases; 0 while the batch is open.
      runs: of the plan's test, if it has one.
    """

    left: int
    runs: SparseVectorRuns | None


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
        self._batches: dict[int, _BatchAllowance] = {}
        super().__init__(pool, plan, length=length)

    def _runs(self) -> SparseVectorRuns | None:
        return None if self.plan.test is None else self.plan.test.runs(self.plan)

    def num_left(self, index: int) -> int:
        """Returns how many releases on one batch of a deal may still begin; public, and 0 while it is open."""
        with self._lock:
            batch = self._batches.get(index)
            return 0 if self._render is None else self.left if batch is None else batch.left

    @contextlib.contextmanager
    def batch(
        self, index: int, *, render: Callable[[Sequence[Record]], str], choose: Choose, length: int, **options: Any
    ) -> Iterator[ReleaseBlock]:
        """Opens up to `length` releases on one batch of a deal; all of a batch together are the sample's length.

        A release that did not begin comes back when the block closes. A batch is open once at a time, and what its
        plan tests goes on in the next block where it stood.

        Args:
          index: which batch, public; the plan's sampler is `AllocatedSlots`.
          render: turns one row's records into its prompt; no records give the public prompt.
          choose: reads an index off a noised vector.
          length: releases.
          options: `backend` and `prefix`, as for `token_block.open_block`.

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
            batch = self._batches.setdefault(index, _BatchAllowance(self.left, self._runs()))
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
            block = run_guarded(
                lambda: ReleaseBlock(render_rows(render, part), plan=self.plan, release=None, side=side, **options)
            )
            if block is None:  # a stop in there would show prompts, and was raised anew without them
                raise ModelCallError(NOT_COMPUTED)
            block.release = index_release(self.plan, choose)
            with contextlib.closing(block):
                yield block
        finally:
            if block is not None:
                used, block.left = options["length"] - block.left, 0
            with self._lock:
                batch.left = had - used


T = TypeVar("T")


class Partition(SecretSample):
    """The slots of one deal that stays, and the releases that tickets paid for on it, one by one."""

    def allow(self) -> None:
        """Adds one release that may answer; the curator calls it, once for every ticket that it burnt for it."""
        with self._lock:
            self.left += 1
            self.answers_left += 1


def open_partition(private: PrivateExamples, *, plan: ReleasePlan, ledger_id: str) -> Partition:
    """Deals the units into slots that stay; no record is read before a ticket burns for a release on them.

    Raises:
      PrivacyBudgetError: the sampler is another, whose draws are amplified and so have to be fresh.
    """
    if not isinstance(plan.sampler, PartitionedSlots):
        raise PrivacyBudgetError("partition: expected PartitionedSlots, found a sampler whose draws are amplified.")
    pool = opened_unread(private, ledger_id=ledger_id)
    return Partition(pool, plan, length=0)


def release_once(
    private: PrivateExamples,
    reservation: Reservation,
    *,
    plan: ReleasePlan,
    rows: Callable[[Rendered[T]], Effect],
    render: Callable[[Sequence[Record]], T],
    width: int,
    keep: Callable[[Release], None] | None = None,
    partition: Partition | None = None,
    answer: Reservation | None = None,
) -> EffectGenerator[Release]:
    """Is `curator.release_once`, also on a partition (an effect generator).

    Formal guarantees:
      - As for `curator.release_once`.
      - With `answer`, which is for a partition and a mechanism that tests before it answers, the ticket is the test's
        alone. The answer's goes back only after the noisy test said no; whatever else happens, both stay charged.

    Args:
      private: the examples.
      reservation: the ticket.
      plan: how to draw, add up and noise.
      rows: makes the one question to the engine; answered with `OpaqueRows` float64[rows, width].
      render: turns one row's records into what the engine is asked; no records give the public question.
      width: columns of a row, public.
      keep: makes what was released durable; called before the ticket is committed.
      partition: from `open_partition`, instead of a fresh sample.
      answer: ticket of the answer, where the test has one of its own.
    """
    if partition is None and answer is None:
        return (
            yield from curator.release_once(
                private, reservation, plan=plan, rows=rows, render=render, width=width, keep=keep
            )
        )
    held = _burn_partition_ticket(private, partition, reservation, answer, plan)
    released = yield from held.next_release(rows=rows, render=render, width=width)
    if keep is not None:
        keep(released)
    if answer is not None and is_unanswered(released):
        answer.give_back()
    elif answer is not None:
        answer.burn()
        answer.commit()
    reservation.commit()
    return released


def _burn_partition_ticket(
    private: PrivateExamples,
    partition: Partition | None,
    ticket: Reservation,
    answer: Reservation | None,
    plan: ReleasePlan,
) -> Partition:
    """Burns a ticket for one release on a partition, and checks the answer's where the test is paid for alone."""
    if partition is None or partition.plan != plan or not isinstance(plan.sampler, PartitionedSlots):
        raise PrivacyBudgetError("partition: expected one of this very plan; found another. Open it from the plan.")
    if answer is None:
        check_ticket(private, ticket, plan.block_event(1), plan.adjacency, gap=gap_of(plan))
    else:
        if not isinstance(plan.mechanism, ConfidentGNMaxMechanism) or answer.unburnt != 1:
            raise PrivacyBudgetError("ticket: expected a mechanism that tests, and one unburnt ticket for its answer.")
        check_ticket(private, ticket, plan.mechanism.test_event, plan.adjacency, gap=gap_of(plan))
        check_ticket(private, answer, plan.mechanism.answer_event, plan.adjacency, gap=gap_of(plan))
    ticket.burn()
    partition.allow()
    return partition


def check_fixed_size(private: PrivateExamples, plan: ReleasePlan, *, ledger_id: str) -> None:
    """Refuses a fixed-size sample of another number of units than declared, before anything is charged.

    Only under `replace_one`, where the number of units is public; every other plan is left unread.

    Raises:
      ConfigurationError: `public_size` is not the number of units.
    """
    if isinstance(plan.sampler, BalancedSlots | PartitionedSlots) and plan.adjacency == "replace_one":
        units = opened_unread(private, ledger_id=ledger_id).num_units
        plan.sampler.draw(units, rng=SYSTEM_RANDOM)
