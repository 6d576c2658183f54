"""Opens the pool of private examples for a ticket that was burnt, and makes the release that it pays for.

The only module that opens pools. Every release comes this way: burn a ticket -> draw a secret sample -> render prompts
-> rows -> bounded sum -> noise -> something public.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from langchain_dpicl.exceptions import PrivacyBudgetError, PrivacyBudgetMismatchError
from langchain_dpicl.privacy._validate import NEEDS_DELTA, Adjacency, fail
from langchain_dpicl.privacy.accounting.events import Event
from langchain_dpicl.privacy.data.private_examples import Pool, PrivateExamples
from langchain_dpicl.privacy.ledger.shares import Reservation
from langchain_dpicl.privacy.mechanisms.noise import Release
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM, is_certified
from langchain_dpicl.privacy.mechanisms.release_plan import ReleasePlan
from langchain_dpicl.release.sample import Record, Rendered, SecretSample, check_one_wording

if TYPE_CHECKING:
    from langchain_dpicl.backends.sync_async import Effect, EffectGenerator

T = TypeVar("T")
Render: TypeAlias = Callable[[Sequence[Record]], str]
"""Turns one row's records into its prompt; no records give the public prompt."""


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
    pool = opened(private, reservation, plan.block_event(length, answers), plan.adjacency, gap=gap_of(plan))
    return SecretSample(pool, plan, length=length, answers=answers)


def release_once(
    private: PrivateExamples,
    reservation: Reservation,
    *,
    plan: ReleasePlan,
    rows: Callable[[Rendered[T]], Effect],
    render: Callable[[Sequence[Record]], T],
    width: int,
    keep: Callable[[Release], None] | None = None,
) -> EffectGenerator[Release]:
    """Burns one ticket and makes its one release, on a fresh secret sample (a generator); errors as `open_block`.

    Formal guarantees:
      - As for `open_block`: the ticket burns before any private record is read and is committed only after the noise;
        what leaves is released by `plan.mechanism` and is `plan.block_event(1)`; a row that fails is all zeros.

    Args:
      private: the examples.
      reservation: the ticket.
      plan: how to draw, add up and noise.
      rows: makes the one question to the engine; answered with `OpaqueRows` float64[rows, width].
      render: turns one row's records into what the engine is asked; no records give the public question.
      width: columns of a row, public.
      keep: makes what was released durable; called before the ticket is committed.
    """
    check_one_wording(render, plan.sampler)
    with contextlib.closing(open_sample(private, reservation, plan=plan)) as sample:
        released = yield from sample.next_release(rows=rows, render=render, width=width)
    if keep is not None:
        keep(released)
    reservation.commit()
    return released


_WIDE = 1024  # no mechanism has to choose more candidates than that from its sum


def gap_of(plan: ReleasePlan) -> float:
    """Returns the declared gap of one release of a plan: 0 only where every coin is drawn exactly."""
    return plan.implementation_delta(1, width=_WIDE)


def opened(private: PrivateExamples, ticket: Reservation, event: Event, adjacency: Adjacency, *, gap: float) -> Pool:
    """Burns a ticket that pays for `event`, and only then opens the pool that it may read."""
    check_ticket(private, ticket, event, adjacency, gap=gap)
    ticket.burn()
    return private._pool(ticket.label, ledger_id=ticket.ledger_id)  # noqa: SLF001  the private door


def opened_unread(private: PrivateExamples, *, ledger_id: str) -> Pool:
    """Opens all units for a caller that reads no record of them before another ticket burnt."""
    return private._pool(None, ledger_id=ledger_id)  # noqa: SLF001  the private door


def check_ticket(
    private: PrivateExamples, reservation: Reservation, event: Event, adjacency: Adjacency, *, gap: float
) -> None:
    """Refuses a ticket that does not pay for `event` under `adjacency` from these examples, before it burns.

    A share with delta 0 promises pure differential privacy: it pays for no release that is drawn with a gap, also where
    its tickets were declared by hand, without the gap.
    """
    if reservation.event != event:
        msg = "ticket: expected a ticket for this very block; found one for another event. Reserve from the plan."
        raise PrivacyBudgetError(msg)
    if reservation.partition not in {None, private.dataset_id} or reservation.adjacency != adjacency:
        wanted, found = (private.dataset_id, adjacency), (reservation.partition, reservation.adjacency)
        msg = f"ticket: expected a ticket for (data set, adjacency) {wanted}, found one for {found}."
        raise PrivacyBudgetMismatchError(msg)
    if gap > 0 and reservation.delta == 0:
        msg = f"ticket: expected one of a share with delta for coins with the declared gap {gap:.3g}, found delta 0."
        raise PrivacyBudgetError(f"{msg} {NEEDS_DELTA}")
    if reservation.blocks != private.blocks:
        wanted_blocks, found_blocks = private.blocks, reservation.blocks
        msg = f"ticket: expected a ticket for the blocks that are read, {wanted_blocks}, found one for {found_blocks}."
        raise PrivacyBudgetMismatchError(msg)
    if not is_certified(SYSTEM_RANDOM):
        raise PrivacyBudgetError("ticket: expected the operating system's coins, found another generator.")


def pool_without_privacy(private: PrivateExamples, label: str | None) -> Pool:
    """Opens a pool with no charge: only for examples that no ledger protects, and of no stream."""
    if private.blocks is not None:
        advice = "A run of DemonstrationSynthesizer pays for what it reads; or build PrivateExamples of public records."
        raise fail("private", "examples that are of no stream", type(private).__name__, advice)
    return private._pool(label, ledger_id=None)  # noqa: SLF001  the private door
