"""Releases counts of values or outcomes, or words that many units write, once, for one ticket."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from langchain_dpicl._opaque import OpaqueRows, run_guarded, this_process
from langchain_dpicl.backends.private_calls.call import OpaqueValue
from langchain_dpicl.backends.sync_async import Effect, EffectGenerator
from langchain_dpicl.exceptions import LedgerError, ModelCallError
from langchain_dpicl.privacy.extensions.outcome_counts import OutcomePlan, Tables
from langchain_dpicl.privacy.extensions.value_counts import Count, CountPlan
from langchain_dpicl.privacy.extensions.word_release import PublicWords, Weight, WordRelease
from langchain_dpicl.privacy.ledger.shares import Reservation
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.privacy.private_examples import Pool, PrivateExamples, Unit
from langchain_dpicl.release.curator import NOT_COMPUTED, opened

T = TypeVar("T")

SampledUnits = tuple[OpaqueValue[Unit], ...]
"""The records of each unit of a secret sample; a removed unit has none."""


def release_counts(private: PrivateExamples, reservation: Reservation, *, plan: CountPlan) -> tuple[Count, ...]:
    """Burns one ticket and releases the counts it pays for; errors as `release_once`; the commit is the caller's."""
    return _released(private, reservation, plan, lambda units: plan.release(units, rng=SYSTEM_RANDOM))


def release_words(
    private: PrivateExamples,
    reservation: Reservation,
    *,
    plan: WordRelease,
    known: PublicWords | Sequence[str],
    gone: frozenset[str] = frozenset(),
) -> tuple[Weight, ...]:
    """Burns one ticket and releases the words or pairs it pays for; errors and commit as for `release_counts`.

    Words of `gone`, which were released before, are cast by no unit.
    """
    plan.check_known(known)
    return _released(private, reservation, plan, lambda units: plan.release(units, known, rng=SYSTEM_RANDOM, gone=gone))


def _released(
    private: PrivateExamples,
    reservation: Reservation,
    plan: CountPlan | WordRelease,
    release: Callable[[Iterable[Iterable[Mapping[str, Any]]]], T],
) -> T:
    pool = opened(private, reservation, plan.event, plan.adjacency, gap=plan.implementation_delta)
    made = run_guarded(lambda: release(map(pool.records, range(pool.num_units))))
    if made is None:
        raise ModelCallError(NOT_COMPUTED)
    return made


def release_outcomes(
    private: PrivateExamples, reservation: Reservation, *, plan: OutcomePlan, ask: Callable[[SampledUnits], Effect]
) -> EffectGenerator[Tables]:
    """Burns one ticket and releases counts of outcomes of a secret sample; the commit is the caller's (a generator).

    Formal guarantees:
      - The ticket burns before any private record is read. What leaves is `plan.release` of the rows, once, in the
        process that drew the sample.
      - Each row counts in at most one cell of each table, whatever is in it.

    Args:
      private: the examples.
      reservation: the ticket.
      plan: sample, tables and noise.
      ask: makes the one question; answered with `OpaqueRows` float64[units, tables], the places of outcomes.

    Raises:
      LedgerError: the model was asked across a fork.
      ModelCallError: the release could not be computed.
    """
    home = this_process()
    pool = opened(private, reservation, plan.event, plan.adjacency, gap=plan.implementation_delta)
    asked = run_guarded(lambda: ask(_sampled(pool, plan)))
    if asked is None:
        raise ModelCallError(NOT_COMPUTED)
    boxed: OpaqueRows = yield asked
    if this_process() != home:  # a fork while the model was asked goes on in both processes; one of them releases
        raise LedgerError("sample: expected the process that drew it, found a fork. Reserve anew there.")
    tables = run_guarded(lambda: plan.release(boxed.take(), rng=SYSTEM_RANDOM))
    if tables is None:
        raise ModelCallError(NOT_COMPUTED)
    return tables


def _sampled(pool: Pool, plan: OutcomePlan) -> SampledUnits:
    """Draws the sample; the records of a unit that cannot be read are none."""
    drawn = plan.draw(pool.num_units, rng=SYSTEM_RANDOM)
    return tuple(OpaqueValue(run_guarded(lambda unit=unit: pool.records(unit)) or ()) for (unit,) in drawn)  # type: ignore[misc]
