"""Releases from private rows, token by token, as many as a ticket paid for.

The curator burns the ticket and opens the pool before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl._opaque import Opaque, OpaqueRows, run_guarded, this_process
from langchain_dpicl.backends.base import Domain, FullBackend, NextTokenBackend, Rows, Token
from langchain_dpicl.backends.rows.rows import (
    FullRowSource,
    LogitRequest,
    PublicRowContext,
    PublicRowRequest,
    RowSource,
    log_rows,
    restrict,
    softmax_rows,
)
from langchain_dpicl.backends.sync_async import AskBeside, Call, Effect, EffectGenerator, PublicAnswer, dropped
from langchain_dpicl.exceptions import (
    ConfigurationError,
    LedgerError,
    ModelCallError,
    PrivacyBudgetError,
)
from langchain_dpicl.privacy.ledger.shares import Reservation
from langchain_dpicl.privacy.mechanisms.bounded import BoundedSum
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.privacy.mechanisms.release_plan import ReleasePlan
from langchain_dpicl.privacy.private_examples import Pool, PrivateExamples
from langchain_dpicl.release.curator import NOT_COMPUTED, Record, Render, draw_sample, gap_of, opened, sum_rows

if TYPE_CHECKING:
    from langchain_dpicl.privacy.extensions.sparse_vector import SparseVectorRuns

Choose: TypeAlias = Callable[[NDArray[np.float64]], int]
"""Post-processing of a noised float64[d] vector into one index."""


class ReleaseBlock(Opaque):
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
        side: PublicRowContext | None = None,
        runs: SparseVectorRuns | None = None,
    ) -> None:
        self.plan = plan
        self.left = length
        self.release = release
        self._rows = _source(backend, tuple(prompts), list(prefix), side)
        self._home = this_process()
        self._runs = runs if runs is not None or plan.test is None else plan.test.runs(plan)

    @property
    def carries_public(self) -> bool:
        """Whether the public prompt is one more row of the block's batch, so that `public_logits` answers."""
        return isinstance(self._rows, FullRowSource)

    def public_logits(self) -> EffectGenerator[NDArray[np.float64]]:
        """Returns float64[V]: the public model's logits on the engine's vocabulary; costs nothing (a generator)."""
        if not isinstance(self._rows, FullRowSource):
            raise ConfigurationError("block: expected an engine whose sessions carry the public prompt, found another.")
        logits: NDArray[np.float64] = yield PublicRowRequest(self._rows)
        return logits

    def next_index(self, domain: Sequence[Token] | Domain) -> EffectGenerator[int]:
        """Releases one index into the public `domain`; an effect generator (see `backends.sync_async`)."""
        shown = domain if isinstance(domain, Domain) else Domain(tuple(domain))
        self._begin()
        if self._is_public:
            return public_index(self.plan, shown)
        return self._index((yield self._ask(shown)), shown)

    def next_beside(
        self, public: PublicAnswer, domain_of: Callable[[Any], Domain]
    ) -> EffectGenerator[tuple[int, Domain]]:
        """Releases one index into a domain that is asked for beside the rows; returns both (an effect generator).

        A public call that failed beside the rows is made again alone; only that one raises.
        """
        if not isinstance(self._rows, RowSource):
            raise ConfigurationError("block: expected an engine whose rows go without the public one, found another.")
        self._begin()
        if self._is_public:
            shown = domain_of((yield public))
            return public_index(self.plan, shown), shown
        replies = yield AskBeside(Call(self._rows.report, self._rows.areport), public, is_final=False)
        with dropped(replies):
            shown = domain_of(public.value if public.value is not None else (yield public))
        boxed = self._rows.read_report(replies, shown.keys)
        return self._index((yield self._ask(shown)) if boxed is None else boxed, shown), shown

    def _begin(self) -> None:
        """Takes one release off what is left."""
        if self.left <= 0 or self.release is None:
            msg = "Block: expected a release still paid for, found none left. Reserve another block."
            raise PrivacyBudgetError(msg)
        self.left -= 1

    @property
    def _is_public(self) -> bool:
        """Whether all that was paid for is released, so that no row is read any more."""
        return self._runs is not None and self._runs.are_over

    def _index(self, boxed: OpaqueRows, shown: Domain) -> int:
        if this_process() != self._home:
            raise LedgerError("block: expected the process that opened it, found a fork. Reserve anew there.")
        index = run_guarded(lambda: self._released(boxed, shown))
        if index is None:
            raise ModelCallError(NOT_COMPUTED)
        return index

    def _ask(self, domain: Domain) -> Effect:
        if isinstance(self._rows, RowSource):
            return Call(partial(self._rows.score, domain.keys), partial(self._rows.ascore, domain.keys))
        if domain.columns is None:
            raise ConfigurationError("domain: expected places in the engine's vocabulary, found keys.")
        return LogitRequest(self._rows, domain.columns)

    def _released(self, boxed: OpaqueRows, domain: Domain) -> int | None:
        """Bounds, sums and noises the rows; nothing else of them goes on."""
        if self.release is None:
            return None
        scored = boxed.take()
        wants_logits = self.plan.aggregation.needs_public
        rows: Rows
        if isinstance(self._rows, FullRowSource):
            rows = scored if wants_logits else softmax_rows(scored)
        else:
            rows = log_rows(scored) if wants_logits else restrict(scored)
        if self._runs is not None:
            public = softmax_rows(public_scores(domain)[None])[0]
            if not self._runs.are_far(softmax_rows(rows), public, rng=SYSTEM_RANDOM):
                return public_index(self.plan, domain)
        return self.release(sum_rows(OpaqueRows(rows), self.plan, len(domain), public=domain.logits))

    def push(self, token: Token) -> None:
        """Appends one released token to every row."""
        self._rows.push(token)

    def close(self) -> None:
        """Drops prompts and caches."""
        self._rows.close()


def block_on(pool: Pool, plan: ReleasePlan, render: Callable[[Sequence[Record]], str], **options: Any) -> ReleaseBlock:
    """Returns a block on a fresh sample, which does not release anything yet.

    A renderer may say, as its attribute `shared`, with which public text all its prompts start.

    Raises:
      ModelCallError: it could not be opened.
      PrivacyBudgetError: the plan is for a deal, whose batches `DealtSample.batch` opens one by one.
    """
    if plan.sampler.is_batched:  # a block on all batches at once would cost more than their deal
        raise PrivacyBudgetError("block: expected one sample, found a deal of batches. Open a sample and its batches.")
    side = public_side(options["backend"], render, plan.sampler.num_rows, options["length"])
    block = run_guarded(
        lambda: ReleaseBlock(draw_sample(pool, plan)(render), plan=plan, release=None, side=side, **options)
    )
    if block is None:  # a stop in there would show prompts, and was raised anew without them
        raise ModelCallError(NOT_COMPUTED)
    return block


def public_side(
    backend: Any, render: Callable[[Sequence[Record]], str], num_rows: int | None, length: int
) -> PublicRowContext | None:
    """Returns what an engine that carries the public prompt gets of it; None for the others."""
    if not isinstance(backend, FullBackend):
        return None
    return PublicRowContext(render(()), getattr(render, "shared", ""), num_rows, max_new_tokens=length)


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
) -> Iterator[ReleaseBlock]:
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
    pool = opened(private, reservation, plan.block_event(length), plan.adjacency, gap=gap_of(plan))
    block = block_on(pool, plan, render, prefix=prefix, backend=backend, length=length)
    block.release = index_release(plan, choose)
    with contextlib.closing(block):
        yield block
    reservation.commit()


def _source(
    backend: NextTokenBackend, prompts: tuple[str | None, ...], prefix: list[Token], side: PublicRowContext | None
) -> RowSource | FullRowSource:
    """Returns what scores the rows: with the public one among them where the engine can and its prompt is given."""
    if side is not None and isinstance(backend, FullBackend):
        return FullRowSource(backend, prompts, prefix, side)
    return RowSource(backend, prompts, prefix)


def index_release(plan: ReleasePlan, choose: Choose) -> Callable[[BoundedSum], int]:
    """Returns the function from a sum to the index that `plan.mechanism` releases of it."""

    def release(total: BoundedSum) -> int:
        released = plan.mechanism.release(total, rng=SYSTEM_RANDOM)
        if released.index is not None:
            return released.index
        if released.values is None:
            raise ConfigurationError("mechanism: expected one that releases an index or a vector, found neither.")
        return choose(released.values)

    return release


def public_scores(domain: Domain) -> NDArray[np.float64]:
    """Returns float64[d]: the public logits of the candidates."""
    if domain.logits is None:
        raise ConfigurationError("domain: expected candidates with public logits, found none.")
    return domain.logits


def public_index(plan: ReleasePlan, domain: Domain) -> int:
    """Draws an index from the public distribution at the plan's temperature; it costs nothing."""
    scale = plan.mechanism.noise_multiplier * plan.sensitivity.require("range")
    scores = np.nan_to_num(public_scores(domain), nan=-np.inf, posinf=np.inf, neginf=-np.inf) / scale
    return int(np.argmax(scores + SYSTEM_RANDOM.gumbel(len(scores))))


def argmax_index(total: BoundedSum) -> int:
    """Returns the best index WITHOUT noise: for examples that no ledger protects."""
    return int(np.argmax(total.value))
