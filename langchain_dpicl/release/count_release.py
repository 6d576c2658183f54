"""Releases counts of values, or words that many units write, once, for one ticket."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from langchain_dpicl.backends.rows.rows import run_guarded
from langchain_dpicl.exceptions import ModelCallError
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.privacy.extensions.count_histograms import Count, CountPlan
from langchain_dpicl.privacy.extensions.word_release import PublicWords, Weight, WordRelease
from langchain_dpicl.privacy.ledger.shares import Reservation
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.release.curator import opened
from langchain_dpicl.release.token_block import NOT_COMPUTED

T = TypeVar("T")


def release_counts(private: PrivateExamples, reservation: Reservation, *, plan: CountPlan) -> tuple[Count, ...]:
    """Burns one ticket and releases the counts it pays for; errors as `release_once`; the commit is the caller's."""
    return _released(private, reservation, plan, lambda units: plan.release(units, rng=SYSTEM_RANDOM))


def release_words(
    private: PrivateExamples,
    reservation: Reservation,
    *,
    plan: WordRelease,
    known: PublicWords | Sequence[str],
) -> tuple[Weight, ...]:
    """Burns one ticket and releases the words or pairs it pays for; errors and commit as for `release_counts`."""
    plan.check_known(known)
    return _released(private, reservation, plan, lambda units: plan.release(units, known, rng=SYSTEM_RANDOM))


def _released(
    private: PrivateExamples,
    reservation: Reservation,
    plan: CountPlan | WordRelease,
    release: Callable[[Iterable[Iterable[Mapping[str, Any]]]], T],
) -> T:
    pool = opened(private, reservation, plan.event, plan.adjacency)
    made = run_guarded(lambda: release(map(pool.records, range(pool.num_units))))
    if made is None:
        raise ModelCallError(NOT_COMPUTED)
    return made
