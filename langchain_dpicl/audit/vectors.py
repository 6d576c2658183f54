"""Checks that released scores have the claimed noise, fresh for each answer to the same query."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from langchain_dpicl.audit.bounds import ALARM
from langchain_dpicl.audit.components import QUERY, voter_of
from langchain_dpicl.audit.results import AuditResult

_FOUR = ("a", "b", "c", "d")


def faults(answers: Sequence[Any], votes: Sequence[float], scale: float) -> set[str]:
    """Returns what is wrong with scores that were released again and again for one query; false alarm `ALARM` in all.

    "scale": a label's variance, or that of all, is not the claimed one (chi-square, exact). "law": the noise is not
    normal (Kolmogorov-Smirnov). "links": labels, or one query and the next, correlate (t test, exact). "repeats": a
    noise vector came twice; by chance below 1e-12 for four labels, 2^16 steps to a scale and 4,000 answers. "grid":
    scores off the public grid. "label": the label is not made of the scores.

    Args:
      answers: results with `scores` and `label`.
      votes: the true votes.
      scale: standard deviation that is claimed for every label.
    """
    values = np.array([list(answer.scores.values()) for answer in answers])  # [runs, labels]
    noise = values - np.array(votes)
    step = 2.0 ** (math.floor(math.log2(scale)) - 16)
    best = [max(answer.scores, key=answer.scores.get) for answer in answers]
    names = {name for name, pvalues in _pvalues(noise / scale).items() if min(pvalues) < ALARM / (3 * len(pvalues))}
    names |= {"repeats"} if len({row.tobytes() for row in noise}) < len(noise) else set()
    names |= {"grid"} if (values % step).any() else set()
    return names | ({"label"} if [answer.label for answer in answers] != best else set())


def _pvalues(noise: NDArray[np.float64]) -> dict[str, list[float]]:
    even, odd = noise[: len(noise) // 2 * 2 : 2], noise[1::2]  # disjoint pairs of queries: independent samples
    pairs = [(noise[:, i], noise[:, j]) for i, j in itertools.combinations(range(noise.shape[1]), 2)]
    pairs += [(even[:, i], odd[:, j]) for i, j in itertools.product(range(noise.shape[1]), repeat=2)]
    constant = [pair for pair in pairs if not (np.ptp(pair[0]) and np.ptp(pair[1]))]
    return {
        "scale": [_variance(column) for column in (*noise.T, noise.ravel())],
        "law": [float(stats.kstest(noise.ravel(), "norm").pvalue)],
        "links": [0.0] if constant else [float(stats.pearsonr(*pair).pvalue) for pair in pairs],
    }


def _variance(noise: NDArray[np.float64]) -> float:
    total = float(np.square(noise).sum())
    return float(2 * min(stats.chi2.cdf(total, noise.size), stats.chi2.sf(total, noise.size)))


def released_scores(*, rows: str, adjacency: str, runs: int = 200) -> AuditResult:
    """Checks the scores that a voter releases: scale, law, links, repeats, grid and label."""
    is_moved = rows == "slots" or adjacency == "replace_one"
    options = {"rows": rows, "adjacency": adjacency, "with_scores": True, "noise_multiplier": 0.7}
    voter = voter_of(("1,0,0,0",), labels=_FOUR, max_queries=runs, **options)
    problems = faults(
        [voter.invoke(QUERY) for _ in range(runs)], (1, 0, 0, 0), 0.7 * (math.sqrt(2.0) if is_moved else 1.0)
    )
    return AuditResult(
        check="scores: the claimed noise on every label, fresh for every answer",
        verdict="violated" if problems else "sound",
        runs=runs,
        details=tuple(sorted(problems)),
        blind_to=("scales that are wrong by less than about 15 %",),
    )
