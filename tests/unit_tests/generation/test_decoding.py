"""Reading one index off a noised vector."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from langchain_dpicl.generation.decoding_loop import TextDecoder


def counts(decoding: TextDecoder, values: list[float], n: int) -> np.ndarray:
    picks = [decoding.choose(np.array(values)) for _ in range(n)]
    return np.bincount(picks, minlength=len(values))


def test_the_default_takes_the_largest() -> None:
    assert TextDecoder().choose(np.array([-5.0, 0.2, 3.0, 1.0])) == 2


@pytest.mark.parametrize("decoding", [TextDecoder(), TextDecoder(temperature=1.0)])
def test_nothing_positive_is_uniform(decoding: TextDecoder) -> None:
    """Chi-square on 4,000 draws over 4 cells; false alarms below 1e-6."""
    seen = counts(decoding, [-1.0, 0.0, -3.0, -0.5], 4000)
    assert stats.chisquare(seen).pvalue > 1e-6


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sampling_follows_the_tempered_values(temperature: float) -> None:
    """Chi-square on 4,000 draws over 3 cells; false alarms below 1e-6; the planted wrong temperature is rejected."""
    weights = np.array([1.0, 2.0, 4.0])

    def pvalue(tested: float) -> float:
        expected = weights ** (1 / tested)
        seen = counts(TextDecoder(temperature=temperature), [*weights, -7.0], 4000)
        assert seen[3] == 0
        return float(stats.chisquare(seen[:3], 4000 * expected / expected.sum()).pvalue)

    assert pvalue(temperature) > 1e-6
    assert pvalue(temperature * 2) < 1e-6


def test_top_k_and_the_nucleus_cut_the_tail() -> None:
    values = [5.0, 3.0, 1.0, 1.0]
    assert counts(TextDecoder(temperature=1.0, top_k=2), values, 400)[2:].sum() == 0
    # 5 of 10 is below .6, so the nucleus holds the first two.
    assert (counts(TextDecoder(temperature=1.0, top_p=0.6), values, 400) > 0).tolist() == [True, True, False, False]
