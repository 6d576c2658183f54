"""The stair: the one place where private examples, an engine and the ledger meet.

Every release of the package walks through a `Block`: burn a ticket -> draw a secret sample -> render prompts ->
score rows -> bounded sum -> noise -> one public index. Knows no prompt wording and no LangChain.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.backends.base import NextTokenBackend, Token
from langchain_dpicl.backends.rows import AskRows, Boxed, RowSource, guarded, restrict
from langchain_dpicl.backends.walk import Walk
from langchain_dpicl.exceptions import (
    ConfigurationError,
    ModelCallError,
    PrivacyBudgetError,
    PrivacyBudgetMismatchError,
)
from langchain_dpicl.privacy.bounded import BoundedSum
from langchain_dpicl.privacy.examples import Pool, PrivateExamples
from langchain_dpicl.privacy.ledger import Reservation
from langchain_dpicl.privacy.plans import ReleasePlan
from langchain_dpicl.privacy.randomness import SYSTEM_RANDOM, is_certified
from langchain_dpicl.privacy.sampling import BalancedSlots

Record: TypeAlias = Mapping[str, str]
Render: TypeAlias = Callable[[Sequence[Record]], str]
"""Turns one row's records into its prompt; no records give the public prompt."""
Choose: TypeAlias = Callable[[NDArray[np.float64]], int]
"""Post-processing of a noised float64[d] vector into one index."""


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
    if reservation.event != plan.block_event(length):
        msg = "open_block: expected a ticket for this very block; found one for another event. Reserve from the plan."
        raise PrivacyBudgetError(msg)
    if reservation.partition not in {None, private.dataset_id} or reservation.adjacency != plan.adjacency:
        wanted = (private.dataset_id, plan.adjacency)
        found = (reservation.partition, reservation.adjacency)
        msg = f"open_block: expected a ticket for (data set, adjacency) {wanted}, found one for {found}."
        raise PrivacyBudgetMismatchError(msg)
    if not is_certified(SYSTEM_RANDOM):
        raise PrivacyBudgetError("open_block: expected the operating system's coins, found another generator.")
    reservation.burn()
    pool = private._pool(reservation.label, ledger_id=reservation.ledger_id)  # noqa: SLF001  the private door
    block = Block(_prompts(pool, plan, render), prefix, backend=backend, plan=plan, length=length, release=None)
    block.release = _noisy(plan, choose)
    with contextlib.closing(block):
        yield block
    reservation.commit()


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
    block = Block(_prompts(pool, plan, render), prefix, backend=backend, plan=plan, length=length, release=_argmax)
    with contextlib.closing(block):
        yield block


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


class Block:
    """Up to `length` releases on one secret sample; holds private prompts until closed, and shows none."""

    def __init__(
        self,
        prompts: Sequence[str | None],
        prefix: Sequence[Token],
        *,
        backend: NextTokenBackend,
        plan: ReleasePlan,
        length: int,
        release: Callable[[BoundedSum], int] | None,
    ) -> None:
        self.plan = plan
        self.left = length
        self.release = release
        self._rows = RowSource(backend, tuple(prompts), list(prefix))

    def next_index(self, domain: Sequence[Token]) -> Walk[int]:
        """Releases one index into the public `domain`; a walk (see `backends.walk`)."""
        if self.left <= 0 or self.release is None:
            msg = "Block: expected a release still paid for, found none left. Reserve another block."
            raise PrivacyBudgetError(msg)
        self.left -= 1
        boxed = yield AskRows(self._rows, tuple(domain))
        index = guarded(lambda: self._released(boxed, len(domain)))
        if index is None:
            raise ModelCallError("the release could not be computed; its ticket stays burnt. Please report this.")
        return index

    def _released(self, boxed: Boxed, width: int) -> int | None:
        """Bounds, sums and noises the rows; nothing else of them goes on."""
        with np.errstate(all="ignore"):
            total = self.plan.aggregation.bound(
                restrict(boxed.take()), row_shape=self.plan.row_shape, adjacency=self.plan.adjacency, width=width
            )
            return None if self.release is None else self.release(total)

    def push(self, token: Token) -> None:
        """Appends one released token to every row."""
        self._rows.push(token)

    def close(self) -> None:
        """Drops prompts and caches."""
        self._rows.close()

    def __repr__(self) -> str:
        return "Block(<private>)"


def _prompts(pool: Pool, plan: ReleasePlan, render: Render) -> Sequence[str | None]:
    """Draws one secret sample and renders its rows, stopping only for Ctrl-C."""
    prompts = guarded(lambda: _rendered(pool, plan, render))
    return prompts if prompts is not None else (None,) * (plan.sampler.num_rows or 0)


def _rendered(pool: Pool, plan: ReleasePlan, render: Render) -> list[str | None]:
    """Renders the rows of a fresh sample; a row that cannot be rendered abstains."""
    sample = plan.sampler.draw(pool.num_units, rng=SYSTEM_RANDOM)
    shots = getattr(plan.sampler, "shots_per_slot", None)
    return [guarded(lambda row=row: render(_records(pool, row)[:shots])) for row in sample]  # type: ignore[misc]


def _records(pool: Pool, members: Sequence[int]) -> list[Record]:
    return [record for unit in members for record in pool.records(unit)]


def _noisy(plan: ReleasePlan, choose: Choose) -> Callable[[BoundedSum], int]:
    def release(total: BoundedSum) -> int:
        released = plan.mechanism.release(total, rng=SYSTEM_RANDOM)
        if released.index is not None:
            return released.index
        if released.values is None:
            raise ConfigurationError("mechanism: expected one that releases an index or a vector, found neither.")
        return choose(released.values)

    return release


def _argmax(total: BoundedSum) -> int:
    return int(np.argmax(total.value))
