"""The stair: the one place where private examples, an engine and the ledger meet.

Every release of the package walks here: burn a ticket -> draw a secret sample -> render prompts -> rows -> bounded sum
-> noise -> something public. A `Block` releases indices token by token, `release_once` one thing per sample. Knows no
prompt wording and no LangChain.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias, TypeVar

from langchain_dpicl.backends.base import NextTokenBackend, Token
from langchain_dpicl.backends.rows import guarded
from langchain_dpicl.backends.similar import SimilarTexts
from langchain_dpicl.backends.walk import Ask, Walk
from langchain_dpicl.blocks import NOT_COMPUTED, Block, Choose, noisy_index
from langchain_dpicl.exceptions import ModelCallError, PrivacyBudgetError, PrivacyBudgetMismatchError
from langchain_dpicl.participants import Participants, Payer
from langchain_dpicl.privacy.accounting.events import Event
from langchain_dpicl.privacy.examples import Pool, PrivateExamples
from langchain_dpicl.privacy.extensions.confident_gnmax import ConfidentGNMaxMechanism
from langchain_dpicl.privacy.extensions.count_histograms import Count, CountPlan
from langchain_dpicl.privacy.extensions.fixed_size_slots import BalancedSlots, PartitionedSlots
from langchain_dpicl.privacy.extensions.individual_filter import Balances, ParticipationPlan
from langchain_dpicl.privacy.ledger import Reservation
from langchain_dpicl.privacy.mechanisms.noise import Release
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM, is_certified
from langchain_dpicl.privacy.mechanisms.release_plan import ReleasePlan
from langchain_dpicl.samples import Record, Rendered, SecretSample, block_on, is_unanswered

T = TypeVar("T")
Plan: TypeAlias = ReleasePlan | CountPlan | ParticipationPlan
Render: TypeAlias = Callable[[Sequence[Record]], str]
"""Turns one row's records into its prompt; no records give the public prompt."""


@contextlib.contextmanager
def open_block(
    private: PrivateExamples,
    reservation: Reservation,
    *,
    plan: ReleasePlan,
    length: int,
    backend: NextTokenBackend,
    render: Render,
    choose: Choose,
    prefix: Sequence[Token] = (),
) -> Iterator[Block]:
    """Burns one ticket and opens the block of releases that it pays for.

    Formal guarantees:
      - The ticket was reserved, durably, and is burnt before any private record is read for it; it is committed only
        after the block ends well, and stays spent whatever happens in between.
      - Everything that leaves the block is an index released by `plan.mechanism`; at most `length` of them, on one
        secret sample; together they are `plan.block_event(length)`, which must be the ticket's own event.
      - One record moves one row: a row whose rendering or scoring fails is all zeros and no other row changes.

    Raises:
      PrivacyBudgetMismatchError: the ticket was priced for another data set, ledger or adjacency.
      PrivacyBudgetError: the ticket does not pay for this block, was spent already, or the coins are not the
        operating system's.
      ModelCallError: the release could not be computed.
    """
    pool = _opened(private, reservation, plan, plan.block_event(length))
    block = block_on(pool, plan, render, prefix=prefix, backend=backend, length=length)
    block.release = noisy_index(plan, choose)
    with contextlib.closing(block):
        yield block
    reservation.commit()


def open_sample(
    private: PrivateExamples,
    reservation: Reservation,
    *,
    plan: ReleasePlan,
    length: int = 1,
    answers: int | None = None,
) -> SecretSample:
    """Burns one ticket and draws the secret sample on which it pays for `length` releases; errors as `open_block`.

    Formal guarantees:
      - As for `open_block`, together `plan.block_event(length, answers)`; the commit is the caller's, when all is safe.

    Args:
      private: the examples.
      reservation: the ticket.
      plan: how to draw, add up and noise.
      length: releases that the ticket pays for.
      answers: how many of them may answer; None: all. Only for a mechanism that tests before it answers.
    """
    pool = _opened(private, reservation, plan, plan.block_event(length, answers))
    return SecretSample(pool, plan, length=length, answers=answers)


def release_counts(private: PrivateExamples, reservation: Reservation, *, plan: CountPlan) -> tuple[Count, ...]:
    """Burns one ticket and releases the counts it pays for; errors as `release_once`; the commit is the caller's."""
    pool = _opened(private, reservation, plan, plan.event)
    counts = guarded(lambda: plan.release(map(pool.records, range(pool.num_units)), rng=SYSTEM_RANDOM))
    if counts is None:
        raise ModelCallError(NOT_COMPUTED)
    return counts


def open_partition(private: PrivateExamples, *, plan: ReleasePlan, ledger_id: str) -> SecretSample:
    """Deals the units into slots that stay; no record is read before a ticket burns for a release on them.

    Raises:
      PrivacyBudgetError: the sampler is another, whose draws are amplified and so have to be fresh.
    """
    if not isinstance(plan.sampler, PartitionedSlots):
        raise PrivacyBudgetError("partition: expected PartitionedSlots, found a sampler whose draws are amplified.")
    pool = private._pool(None, ledger_id=ledger_id)  # noqa: SLF001  the private door
    return SecretSample(pool, plan, length=0)


def release_once(
    private: PrivateExamples,
    reservation: Reservation,
    *,
    plan: ReleasePlan,
    rows: Callable[[Rendered[T]], Ask],
    render: Callable[[Sequence[Record]], T],
    width: int,
    keep: Callable[[Release], None] | None = None,
    partition: SecretSample | None = None,
    answer: Reservation | None = None,
) -> Walk[Release]:
    """Burns one ticket and makes its one release, on a fresh secret sample (a walk); errors as `open_block`.

    Formal guarantees:
      - As for `open_block`: the ticket burns before any private record is read and is committed only after the noise;
        what leaves is released by `plan.mechanism` and is `plan.block_event(1)`; a row that fails is all zeros.
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
        with contextlib.closing(open_sample(private, reservation, plan=plan)) as sample:
            released = yield from sample.next_release(rows=rows, render=render, width=width)
    else:
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
    partition: SecretSample | None,
    ticket: Reservation,
    answer: Reservation | None,
    plan: ReleasePlan,
) -> SecretSample:
    """Burns a ticket for one release on a partition, and checks the answer's where the test is paid for alone."""
    if partition is None or partition.plan != plan or not isinstance(plan.sampler, PartitionedSlots):
        raise PrivacyBudgetError("partition: expected one of this very plan; found another. Open it from the plan.")
    if answer is None:
        _check_ticket(private, ticket, plan, plan.block_event(1))
    else:
        if not isinstance(plan.mechanism, ConfidentGNMaxMechanism) or answer.unburnt != 1:
            raise PrivacyBudgetError("ticket: expected a mechanism that tests, and one unburnt ticket for its answer.")
        _check_ticket(private, ticket, plan, plan.mechanism.test_event)
        _check_ticket(private, answer, plan, plan.mechanism.answer_event)
    ticket.burn()
    partition.allow()
    return partition


def _opened(private: PrivateExamples, ticket: Reservation, plan: Plan, event: Event) -> Pool:
    """Burns a ticket that pays for `event` of `plan`, and only then opens the pool that it may read."""
    _check_ticket(private, ticket, plan, event)
    ticket.burn()
    return private._pool(ticket.label, ledger_id=ticket.ledger_id)  # noqa: SLF001  the private door


def _check_ticket(private: PrivateExamples, reservation: Reservation, plan: Plan, event: Event) -> None:
    """Refuses a ticket that does not pay for `event` of `plan` from these examples, before it burns."""
    if reservation.event != event:
        msg = "ticket: expected a ticket for this very block; found one for another event. Reserve from the plan."
        raise PrivacyBudgetError(msg)
    if reservation.partition not in {None, private.dataset_id} or reservation.adjacency != plan.adjacency:
        wanted, found = (private.dataset_id, plan.adjacency), (reservation.partition, reservation.adjacency)
        msg = f"ticket: expected a ticket for (data set, adjacency) {wanted}, found one for {found}."
        raise PrivacyBudgetMismatchError(msg)
    if not is_certified(SYSTEM_RANDOM):
        raise PrivacyBudgetError("ticket: expected the operating system's coins, found another generator.")


def open_participants(
    private: PrivateExamples,
    ticket: Reservation | None,
    *,
    plan: ParticipationPlan,
    texts: SimilarTexts,
    balances: Balances,
    payer: Payer,
) -> Participants:
    """Burns the one ticket of an individual filter and opens it; errors as `open_block`, the commit is the caller's.

    Formal guarantees:
      - The ticket pays for `plan.event`, all releases under these balances; no record is read before it is burnt.
      - Without a ticket it is opened only on balances that outlive the process and that its caller held against the
        ledger: the line that paid for them stands there.
    """
    if ticket is None and not balances.durable:
        raise PrivacyBudgetError("ticket: expected one for balances of this process, found none. Reserve it.")
    if payer.dataset_id != private.dataset_id or (ticket is not None and not payer.owns(ticket)):
        raise PrivacyBudgetError("ticket: expected one of the filter's own component and examples, found another's.")
    if ticket is None:
        pool = private._pool(None, ledger_id=payer.ledger_id)  # noqa: SLF001  the private door
    else:
        pool = _opened(private, ticket, plan, plan.event)
    return Participants(pool, plan=plan, texts=texts, field=private.text_key, balances=balances, payer=payer)


def check_fixed_size(private: PrivateExamples, plan: ReleasePlan, *, ledger_id: str) -> None:
    """Refuses a fixed-size sample of another number of units than declared, before anything is charged.

    Only under `replace_one`, where the number of units is public; every other plan is left unread.

    Raises:
      ConfigurationError: `public_size` is not the number of units.
    """
    if isinstance(plan.sampler, BalancedSlots | PartitionedSlots) and plan.adjacency == "replace_one":
        units = private._pool(None, ledger_id=ledger_id).num_units  # noqa: SLF001  the private door
        plan.sampler.draw(units, rng=SYSTEM_RANDOM)


def pool_without_privacy(private: PrivateExamples, label: str | None) -> Pool:
    """Opens a pool with no charge: only for examples that no ledger protects."""
    return private._pool(label, ledger_id=None)  # noqa: SLF001  the private door
