"""The stair: the one place where private examples, an engine and the ledger meet.

Every release of the package walks here: burn a ticket -> draw a secret sample -> render prompts -> rows -> bounded sum
-> noise -> something public. A `Block` releases indices token by token, `release_once` one thing per sample. Knows no
prompt wording and no LangChain.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.backends.base import NextTokenBackend, Token
from langchain_dpicl.backends.rows import guarded
from langchain_dpicl.backends.walk import Ask, Walk
from langchain_dpicl.blocks import NOT_COMPUTED, Block, Choose, argmax_index, noisy_index, summed
from langchain_dpicl.exceptions import (
    ModelCallError,
    PrivacyBudgetError,
    PrivacyBudgetMismatchError,
)
from langchain_dpicl.privacy.examples import Pool, PrivateExamples
from langchain_dpicl.privacy.ledger import Reservation
from langchain_dpicl.privacy.mechanisms import Release
from langchain_dpicl.privacy.plans import ReleasePlan
from langchain_dpicl.privacy.randomness import SYSTEM_RANDOM, is_certified
from langchain_dpicl.privacy.sampling import BalancedSlots

T = TypeVar("T")
Record: TypeAlias = Mapping[str, str]
Render: TypeAlias = Callable[[Sequence[Record]], str]
"""Turns one row's records into its prompt; no records give the public prompt."""
Rendered: TypeAlias = tuple[T | None, ...]
"""What each row is asked; None: the row could not be rendered and abstains."""


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
    """
    _check_ticket(private, reservation, plan, length)
    reservation.burn()
    pool = private._pool(reservation.label, ledger_id=reservation.ledger_id)  # noqa: SLF001  the private door
    block = Block(_prompts(pool, plan, render), prefix, backend=backend, plan=plan, length=length, release=None)
    block.release = noisy_index(plan, choose)
    with contextlib.closing(block):
        yield block
    reservation.commit()


def release_once(
    private: PrivateExamples,
    reservation: Reservation,
    *,
    plan: ReleasePlan,
    rows: Callable[[Rendered[T]], Ask],
    render: Callable[[Sequence[Record]], T],
    width: int,
) -> Walk[Release]:
    """Burns one ticket and makes the one release that it pays for, on a fresh secret sample (a walk).

    Formal guarantees:
      - As for `open_block`: the ticket burns before any private record is read and is committed only after the noise;
        what leaves is released by `plan.mechanism` and is `plan.block_event(1)`; a row that fails is all zeros.

    Args:
      private: the examples.
      reservation: the ticket.
      plan: how to draw, add up and noise.
      rows: makes the one question to the engine; answered with `Boxed` float64[rows, width].
      render: turns one row's records into what the engine is asked; no records give the public question.
      width: columns of a row, public.

    Raises:
      PrivacyBudgetMismatchError: as for `open_block`.
      PrivacyBudgetError: as for `open_block`.
      ModelCallError: the release could not be computed.
    """
    _check_ticket(private, reservation, plan, 1)
    reservation.burn()
    pool = private._pool(reservation.label, ledger_id=reservation.ledger_id)  # noqa: SLF001  the private door
    boxed = yield rows(_prompts(pool, plan, render))
    released = guarded(lambda: plan.mechanism.release(summed(boxed, plan, width), rng=SYSTEM_RANDOM))
    if released is None:
        raise ModelCallError(NOT_COMPUTED)
    reservation.commit()
    return released


def release_once_without_privacy(
    private: PrivateExamples,
    *,
    plan: ReleasePlan,
    rows: Callable[[Rendered[T]], Ask],
    render: Callable[[Sequence[Record]], T],
    width: int,
) -> Walk[NDArray[np.float64]]:
    """Returns the sum itself, float64[d], with NO noise and no charge: only for examples that no ledger protects.

    Raises:
      PrivateAccessError: the examples are attached to a ledger.
    """
    pool = private._pool(None, ledger_id=None)  # noqa: SLF001  the private door
    boxed = yield rows(_prompts(pool, plan, render))
    return summed(boxed, plan, width).value


@contextlib.contextmanager
def open_block_without_privacy(
    private: PrivateExamples,
    *,
    label: str | None,
    plan: ReleasePlan,
    length: int,
    backend: NextTokenBackend,
    render: Render,
    prefix: Sequence[Token] = (),
) -> Iterator[Block]:
    """Opens the same block with NO noise and no charge: only for examples that no ledger protects.

    Raises:
      PrivateAccessError: the examples are attached to a ledger.
    """
    pool = private._pool(label, ledger_id=None)  # noqa: SLF001  the private door
    block = Block(_prompts(pool, plan, render), prefix, backend=backend, plan=plan, length=length, release=argmax_index)
    with contextlib.closing(block):
        yield block


def _check_ticket(private: PrivateExamples, reservation: Reservation, plan: ReleasePlan, length: int) -> None:
    """Refuses a ticket that does not pay for `length` releases of `plan` from these examples, before it burns."""
    if reservation.event != plan.block_event(length):
        msg = "ticket: expected a ticket for this very block; found one for another event. Reserve from the plan."
        raise PrivacyBudgetError(msg)
    if reservation.partition not in {None, private.dataset_id} or reservation.adjacency != plan.adjacency:
        wanted = (private.dataset_id, plan.adjacency)
        found = (reservation.partition, reservation.adjacency)
        msg = f"ticket: expected a ticket for (data set, adjacency) {wanted}, found one for {found}."
        raise PrivacyBudgetMismatchError(msg)
    if not is_certified(SYSTEM_RANDOM):
        raise PrivacyBudgetError("ticket: expected the operating system's coins, found another generator.")


def check_fixed_size(private: PrivateExamples, plan: ReleasePlan, *, ledger_id: str) -> None:
    """Refuses a fixed-size sample of another number of units than declared, before anything is charged.

    Only under `replace_one`, where the number of units is public; every other plan is left unread.

    Raises:
      ConfigurationError: `public_size` is not the number of units.
    """
    if isinstance(plan.sampler, BalancedSlots) and plan.adjacency == "replace_one":
        units = private._pool(None, ledger_id=ledger_id).num_units  # noqa: SLF001  the private door
        plan.sampler.draw(units, rng=SYSTEM_RANDOM)


def pool_without_privacy(private: PrivateExamples, label: str | None) -> Pool:
    """Opens a pool with no charge: only for examples that no ledger protects."""
    return private._pool(label, ledger_id=None)  # noqa: SLF001  the private door


def _prompts(pool: Pool, plan: ReleasePlan, render: Callable[[Sequence[Record]], T]) -> Rendered[T]:
    """Draws one secret sample and renders its rows, stopping only for Ctrl-C."""
    # Without a name: a stop before the return would show every prompt in this frame.
    return guarded(lambda: _rendered(pool, plan, render)) or (None,) * (plan.sampler.num_rows or 0)


def _rendered(pool: Pool, plan: ReleasePlan, render: Callable[[Sequence[Record]], T]) -> Rendered[T]:
    """Renders the rows of a fresh sample; a row that cannot be rendered abstains."""
    sample = plan.sampler.draw(pool.num_units, rng=SYSTEM_RANDOM)
    shots = getattr(plan.sampler, "shots_per_slot", None)

    def rendered(row: Sequence[int]) -> T:
        records: list[Record] = []
        for unit in row:
            records += pool.records(unit)
        return render(records[:shots])

    every = guarded(lambda: tuple(map(rendered, sample)))
    return tuple(guarded(lambda row=row: rendered(row)) for row in sample) if every is None else every  # type: ignore[misc]
