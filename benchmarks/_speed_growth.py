"""Costs that grow with queries, units, candidates and vocabulary, each beside an anchor of the same run.

Times are of the processor, memory is what numpy and Python allocated at most.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from _speed_goals import Goal

QUERIES = 1_000_000
UNITS = 1_000_000
EXPECTED = 100_000
VOTERS, CANDIDATES = 30_000, 1_000
ROWS, VOCABULARY = 10, 128_000


def goals(*, queries: int = QUERIES, turns: int = 5) -> list[Goal]:
    """Returns the goals of what grows.

    Args:
      queries: that a voter declares.
      turns: of each of the shorter measurements.
    """
    return [*_voter(queries), *_sample(turns), *_votes(turns), *_tokens(turns)]


def _least(call: Callable[[], Any], turns: int) -> float:
    """Returns the least milliseconds of the processor."""
    least = float("inf")
    for _ in range(turns):
        started = time.process_time_ns()
        call()
        least = min(least, (time.process_time_ns() - started) / 1e6)
    return least


def _peak(call: Callable[[], Any]) -> float:
    """Returns the megabytes that a call allocates at most."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        call()
        return (tracemalloc.get_traced_memory()[1] - before) / 1e6
    finally:
        tracemalloc.stop()


def _voter(queries: int) -> list[Goal]:
    from _voting_speed import ONE_SHOT, InstantEngine, voter

    build = partial(voter, InstantEngine(), **ONE_SHOT)
    build(max_queries=3)  # imports
    taken = _least(lambda: build(max_queries=queries), 1)
    # Other queries than those whose price is remembered by now.
    peak = _peak(lambda: build(max_queries=queries - 1))
    shown = f"a voter of {queries:,} declared queries"
    return [
        Goal(f"{shown}: time / 1 s", taken, 1_000.0, taken / 1_000.0, 1.0),
        Goal(f"{shown}: memory / 100 MB", peak, 100.0, peak / 100.0, 1.0, unit="MB"),
    ]


def _sample(turns: int) -> list[Goal]:
    from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
    from langchain_dpicl.privacy.mechanisms.release_plan import PoissonUnits

    sampler = PoissonUnits(EXPECTED / UNITS)
    taken = _least(lambda: sampler.draw(UNITS, rng=SYSTEM_RANDOM), turns)
    return [
        Goal(f"a Poisson sample of {UNITS:,} units, {EXPECTED:,} expected: time / 50 ms", taken, 50.0, taken / 50, 1.0)
    ]


def _votes(turns: int) -> list[Goal]:
    """Evolution's votes: memory beside that of one dense matrix of float32."""
    from langchain_dpicl.backends.rows.neighbour_rows import UnitVotes
    from langchain_dpicl.privacy.extensions.normalized_sums import VoteVectorSum

    del turns
    near = np.random.default_rng(0).integers(0, CANDIDATES, size=(VOTERS, 1))

    def summed() -> None:
        votes: Any = UnitVotes(np.arange(VOTERS), near, (VOTERS, CANDIDATES))
        VoteVectorSum().bound(votes, row_shape="units", adjacency="add_remove", width=CANDIDATES)

    peak, dense = _peak(summed), 4e-6 * VOTERS * CANDIDATES
    return [
        Goal(
            f"votes of {VOTERS:,} units for {CANDIDATES:,} texts: memory / one matrix",
            peak,
            dense,
            peak / dense,
            0.5,
            unit="MB",
        )
    ]


def _tokens(turns: int) -> list[Goal]:
    """What a token of a whole vocabulary costs beside the model, and numpy's clip, sum and argmax of the same rows."""
    from langchain_dpicl.privacy.extensions.logit_sums import logit_sum
    from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
    from langchain_dpicl.privacy.mechanisms.release_plan import GumbelMechanism

    rng = np.random.default_rng(0)
    rows, public = 3.0 * rng.standard_normal((ROWS, VOCABULARY)), 3.0 * rng.standard_normal(VOCABULARY)
    plain = _least(lambda: np.argmax(np.clip(rows - public, -1.0, 1.0).sum(axis=0) + public), turns)
    total, gumbel = logit_sum("recentered_clip", clip=1.0, num_slots=ROWS), GumbelMechanism(1.0)
    options: dict[str, Any] = {"row_shape": "slots", "adjacency": "add_remove", "width": VOCABULARY, "public": public}
    bound = _least(lambda: total.bound(rows, **options), turns)
    whole = _least(lambda: gumbel.release(total.bound(rows, **options), rng=SYSTEM_RANDOM), turns)
    shown = f"a token of {VOCABULARY:,}, {ROWS} rows"
    return [
        Goal(f"{shown}: its sum / numpy's clip, sum and argmax", bound, plain, bound / plain, 2.0),
        Goal(f"{shown}: its sum and noise / numpy's clip, sum and argmax", whole, plain, whole / plain, 2.0),
    ]
