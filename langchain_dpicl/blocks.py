"""From private rows to something public, for as many releases as a ticket paid for. Knows no records and no ledger.

Only the curator makes blocks: it has burnt the ticket and drawn the sample before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.backends.base import NextTokenBackend, Token
from langchain_dpicl.backends.rows import AskRows, Boxed, RowSource, guarded, restrict
from langchain_dpicl.backends.walk import Walk
from langchain_dpicl.exceptions import ConfigurationError, LedgerError, ModelCallError, PrivacyBudgetError
from langchain_dpicl.privacy.bounded import BoundedSum
from langchain_dpicl.privacy.plans import ReleasePlan
from langchain_dpicl.privacy.randomness import SYSTEM_RANDOM

Choose: TypeAlias = Callable[[NDArray[np.float64]], int]
"""Post-processing of a noised float64[d] vector into one index."""

NOT_COMPUTED = "the release could not be computed; its ticket stays burnt. Please report this."


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
        self._pid = os.getpid()

    def next_index(self, domain: Sequence[Token]) -> Walk[int]:
        """Releases one index into the public `domain`; a walk (see `backends.walk`)."""
        if self.left <= 0 or self.release is None:
            msg = "Block: expected a release still paid for, found none left. Reserve another block."
            raise PrivacyBudgetError(msg)
        self.left -= 1
        boxed = yield AskRows(self._rows, tuple(domain))
        if os.getpid() != self._pid:
            raise LedgerError("block: expected the process that opened it, found a fork. Reserve anew there.")
        index = guarded(lambda: self._released(boxed, len(domain)))
        if index is None:
            raise ModelCallError(NOT_COMPUTED)
        return index

    def _released(self, boxed: Boxed, width: int) -> int | None:
        """Bounds, sums and noises the rows; nothing else of them goes on."""
        total = summed(Boxed(restrict(boxed.take())), self.plan, width)
        return None if self.release is None else self.release(total)

    def push(self, token: Token) -> None:
        """Appends one released token to every row."""
        self._rows.push(token)

    def close(self) -> None:
        """Drops prompts and caches."""
        self._rows.close()

    def __repr__(self) -> str:
        return "Block(<private>)"


def summed(boxed: Boxed, plan: ReleasePlan, width: int) -> BoundedSum:
    """Returns the bounded sum of rows float64[n, width], which are taken out of their box."""
    with np.errstate(all="ignore"):
        return plan.bound(boxed.take(), width=width)


def noisy_index(plan: ReleasePlan, choose: Choose) -> Callable[[BoundedSum], int]:
    """Returns the function from a sum to the index that `plan.mechanism` releases of it."""

    def release(total: BoundedSum) -> int:
        released = plan.mechanism.release(total, rng=SYSTEM_RANDOM)
        if released.index is not None:
            return released.index
        if released.values is None:
            raise ConfigurationError("mechanism: expected one that releases an index or a vector, found neither.")
        return choose(released.values)

    return release


def argmax_index(total: BoundedSum) -> int:
    """Returns the best index WITHOUT noise: for examples that no ledger protects."""
    return int(np.argmax(total.value))
