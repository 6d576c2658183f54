"""Releases on a partition of the units that stays, each paid for by a ticket of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from langchain_dpicl.backends.walk import Ask, Walk
from langchain_dpicl.exceptions import PrivacyBudgetError
from langchain_dpicl.privacy.examples import PrivateExamples
from langchain_dpicl.privacy.extensions.confident_gnmax import ConfidentGNMaxMechanism
from langchain_dpicl.privacy.extensions.fixed_size_slots import BalancedSlots, PartitionedSlots
from langchain_dpicl.privacy.mechanisms.noise import Release
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.privacy.mechanisms.release_plan import ReleasePlan
from langchain_dpicl.privacy.shares import Reservation
from langchain_dpicl.release import curator
from langchain_dpicl.release.curator import check_ticket, opened_unread
from langchain_dpicl.release.sample import Record, Rendered, SecretSample, is_unanswered

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
    rows: Callable[[Rendered[T]], Ask],
    render: Callable[[Sequence[Record]], T],
    width: int,
    keep: Callable[[Release], None] | None = None,
    partition: Partition | None = None,
    answer: Reservation | None = None,
) -> Walk[Release]:
    """Is `curator.release_once`, also on a partition (a walk).

    Formal guarantees:
      - As for `curator.release_once`.
      - With `answer`, which is for a partition and a mechanism that tests before it answers, the ticket is the test's
        alone. The answer's goes back only after the noisy test said no; whatever else happens, both stay charged.

    Args:
      private: the examples.
      reservation: the ticket.
      plan: how to draw, add up and noise.
      rows: makes the one question to the engine; answered with `Boxed` float64[rows, width].
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
    held = _paid_for(private, partition, reservation, answer, plan)
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


def _paid_for(
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
        check_ticket(private, ticket, plan.block_event(1), plan.adjacency)
    else:
        if not isinstance(plan.mechanism, ConfidentGNMaxMechanism) or answer.unburnt != 1:
            raise PrivacyBudgetError("ticket: expected a mechanism that tests, and one unburnt ticket for its answer.")
        check_ticket(private, ticket, plan.mechanism.test_event, plan.adjacency)
        check_ticket(private, answer, plan.mechanism.answer_event, plan.adjacency)
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
