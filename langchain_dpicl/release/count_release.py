"""Releases counts of values once, for one ticket."""

from __future__ import annotations

from langchain_dpicl.backends.rows.rows import run_guarded
from langchain_dpicl.exceptions import ModelCallError
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.privacy.extensions.count_histograms import Count, CountPlan
from langchain_dpicl.privacy.ledger.shares import Reservation
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.release.curator import opened
from langchain_dpicl.release.token_block import NOT_COMPUTED


def release_counts(private: PrivateExamples, reservation: Reservation, *, plan: CountPlan) -> tuple[Count, ...]:
    """Burns one ticket and releases the counts it pays for; errors as `release_once`; the commit is the caller's."""
    pool = opened(private, reservation, plan.event, plan.adjacency)
    counts = run_guarded(lambda: plan.release(map(pool.records, range(pool.num_units)), rng=SYSTEM_RANDOM))
    if counts is None:
        raise ModelCallError(NOT_COMPUTED)
    return counts
