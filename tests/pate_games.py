"""Games against `PromptPATELabeler`, as tests of planted bugs play them, and what is wrong with votes and tests.

The games are those of `langchain_dpicl.audit.component_games`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from scipy import stats

from langchain_dpicl.audit.component_games import LabelGame, tickets_expected, tickets_left
from langchain_dpicl.audit.suite import score_faults
from langchain_dpicl.audit.targets import labeler_of
from langchain_dpicl.released.labelled_pool import PoolEntry
from tests.audit_games import ALARM, refutations

__all__ = [
    "FIXED",
    "UNITS",
    "LabelGame",
    "confident_faults",
    "labeler_of",
    "presences",
    "refutations",
    "tickets_expected",
    "tickets_left",
    "vote_faults",
]

UNITS = {"rows": "units"}
# Replaced units, one slot for each, and every unit in every sample: what is audited is the noise and its price.
FIXED = {"teachers": "fixed", "adjacency": "replace_one"}


# --- released votes, law of Confident-GNMax, presence ---------------------------------------------------------------


def vote_faults(entries: Sequence[PoolEntry], votes: Sequence[float], scale: float) -> set[str]:
    """Returns what is wrong with the votes of inputs that all have the same true votes; see `audit_games.faults`."""
    return score_faults([SimpleNamespace(scores=entry.votes, label=entry.label) for entry in entries], votes, scale)


def confident_faults(entries: Sequence[PoolEntry], *, passed: float, yes: float) -> set[str]:
    """Returns what is wrong with tests and answers, each with its claimed chance; false alarm `ALARM` in all.

    "test", "answer": not as often passed, or yes, as claimed (binomial, exact; answers given that the test was
    passed). "links": one test and the next, or one answer and the next, are alike more or less often than
    independent ones.
    """
    tests = [entry.status == "labelled" for entry in entries]
    answers = [entry.label == "yes" for entry in entries if entry.status == "labelled"]
    pvalues = {
        "test": [_binomial(tests, passed)],
        "answer": [_binomial(answers, yes)],
        "links": [_alike(tests, passed), _alike(answers, yes)],
    }
    return {name for name, found in pvalues.items() if min(found) < ALARM / (3 * len(found))}


def _binomial(coins: Sequence[bool], chance: float) -> float:
    return float(stats.binomtest(sum(coins), len(coins), chance).pvalue) if coins else 1.0


def _alike(coins: Sequence[bool], chance: float) -> float:
    pairs = zip(coins[::2], coins[1::2], strict=False)  # disjoint: independent of each other
    return _binomial([one == other for one, other in pairs], chance**2 + (1.0 - chance) ** 2)


def presences(units: tuple[str, ...], runs: int, **options: Any) -> list[bool]:
    """Returns for each input whether a slot's only unit, which alone says yes, was in it; the noise hides nothing."""
    labeler = labeler_of(units, runs, noise_multiplier=0.01, **options)
    return [entry.label == "yes" for entry in labeler.stream(progress=False)]
