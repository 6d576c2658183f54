"""Logit sums beside the published formulas, typed in a second time; what a constant changes; Top-k+."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_dpicl.privacy.extensions.logit_sums import ClippedDifferenceMean, ClippedLogitMean
from tests.contracts.aggregation import LAW

INF, NAN = math.inf, math.nan


def score(aggregation, rows, public):
    """Returns the score of filled slots."""
    rows = np.asarray(rows, dtype=float)
    how = {"row_shape": "slots", "adjacency": "add_remove", "width": rows.shape[1]}
    return aggregation.bound(rows, public=public, **how).value


# --- the published formulas, typed in a second time -------------------------------------------------------------------


def clipped(x, clip):
    return max(-clip, min(clip, x))


def softmax(scores, temperature):
    weights = [math.exp((s - max(scores)) / temperature) for s in scores]
    return [w / math.fsum(weights) for w in weights]


def clip_and_blend(rows, public, *, clip, weight):
    """Bhusal et al. (2025): the mean of clipped logits, blended with the clipped public ones."""
    means = [math.fsum(clipped(z, clip) for z in column) / len(rows) for column in zip(*rows, strict=True)]
    return [weight * z + (1 - weight) * clipped(u, clip) for z, u in zip(means, public, strict=True)]


def recentred(rows, clip):
    """Amin et al. (2024): each row's largest logit is put at the clip, then all are clipped and averaged."""
    moved = [[clipped(z + (clip - max(row)), clip) for z in row] for row in rows]
    return [math.fsum(column) / len(rows) for column in zip(*moved, strict=True)]


def difference_clip(rows, public, clip):
    """InvisibleInk (2025): the mean of the public logits plus clipped differences to them."""
    columns = zip(public, zip(*rows, strict=True), strict=True)
    return [math.fsum(u + clipped(z - u, clip) for z in column) / len(rows) for u, column in columns]


def median_clip(rows, public, clip):
    """Ours: the same, with each row's public-weighted lower median taken off its differences first."""
    shares = softmax(public, 1.0)
    moved = []
    for row in rows:
        differences = [z - u for z, u in zip(row, public, strict=True)]
        middle = next(
            d
            for d in sorted(differences)
            if math.fsum(s for s, e in zip(shares, differences, strict=True) if e <= d) >= 0.5
        )
        moved.append([clipped(d - middle, clip) for d in differences])
    return [u + math.fsum(column) / len(rows) for u, column in zip(public, zip(*moved, strict=True), strict=True)]


def logits_of(seed, *, num_rows=5, width=60):
    """Returns rows that agree with a public prompt up to noise, a topic and a constant each, as models' rows do."""
    rng = np.random.default_rng(seed)
    public = rng.normal(-4.0, 4.0, width)
    rows = public + rng.normal(0.0, 0.6, (num_rows, width)) + 2.0 * rng.normal(size=(num_rows, 1))
    rows[:, :3] += 4.0
    rows[0, -1] = -INF
    return rows, public


PUBLISHED = {
    "clip and blend": (
        ClippedLogitMean(3.0, 5, blend_weight=0.4, center="none"),
        lambda rows, public: clip_and_blend(rows, public, clip=3.0, weight=0.4),
    ),
    "clip alone": (
        ClippedLogitMean(3.0, 5, center="none"),
        lambda rows, public: clip_and_blend(rows, public, clip=3.0, weight=1.0),
    ),
    "re-centred": (ClippedLogitMean(6.0, 5), lambda rows, public: recentred(rows, 6.0)),
    "difference clip": (
        ClippedDifferenceMean(0.4, 5, center="none"),
        lambda rows, public: difference_clip(rows, public, 0.4),
    ),
    "median of differences": (ClippedDifferenceMean(0.4, 5), lambda rows, public: median_clip(rows, public, 0.4)),
}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("temperature", [0.8, 1.1])
def test_tokens_have_the_law_of_the_published_formula(name, temperature):
    made, formula = PUBLISHED[name]
    apart = []
    for seed in range(5):
        rows, public = logits_of(seed)
        ours = softmax(score(made, rows, public).tolist(), temperature)
        np.testing.assert_allclose(ours, softmax(formula(rows.tolist(), public.tolist()), temperature), rtol=1e-7)
        others = [softmax(f(rows.tolist(), public.tolist()), temperature) for _, f in PUBLISHED.values()]
        apart.append([np.abs(np.subtract(ours, other)).max() for other in others])
    assert sorted(np.max(apart, axis=0) > 1e-2) == [False, True, True, True, True]  # no two of the five are the same


def test_a_row_that_agrees_with_the_public_prompt_leaves_its_distribution_alone():
    """Up to the grid, whatever constant the row carries: what a null record does in the published accounting."""
    _, public = logits_of(0)
    same = np.tile(public, (5, 1)) + np.arange(5.0)[:, None]
    ours = score(ClippedDifferenceMean(0.4, 5), same, public)
    np.testing.assert_allclose(ours - ours.max(), public - public.max(), atol=1e-9)
    failed = score(ClippedDifferenceMean(0.4, 5), np.full((5, 60), NAN), public)
    np.testing.assert_allclose(failed, public - public.max(), atol=1e-9)


@pytest.mark.parametrize(
    "made", [ClippedLogitMean(2.0, 4, blend_weight=0.5), ClippedDifferenceMean(0.5, 4)], ids=lambda made: made.name
)
@LAW
@given(data=st.data())
def test_constants_on_rows_and_on_the_public_logits_change_nothing(made, data):
    """Multiples of 2^-10 add without rounding, so the scores are equal to the last bit."""
    width = data.draw(st.integers(1, 6))
    whole = st.integers(-(2**15), 2**15)
    vectors = st.lists(whole, min_size=width, max_size=width)
    rows = np.array(data.draw(st.lists(vectors, min_size=4, max_size=4))) / 2.0**10
    public = np.array(data.draw(vectors)) / 2.0**10
    constants = np.array(data.draw(st.lists(whole, min_size=4, max_size=4)))[:, None] / 2.0**10
    moved = score(made, rows + constants, public + data.draw(whole) / 2.0**10)
    np.testing.assert_array_equal(moved, score(made, rows, public))


@pytest.mark.parametrize(
    "made",
    [ClippedLogitMean(2.0, 1, center="none"), ClippedDifferenceMean(0.5, 1, center="none")],
    ids=lambda m: m.name,
)
def test_without_a_centre_a_constant_on_a_row_is_felt(made):
    """The published forms: what the centring removes."""
    rows, public = np.array([[0.1, 0.3, -0.2]]), np.array([0.0, 0.2, -0.1])
    before, after = (score(made, moved, public) for moved in (rows, rows + 100.0))
    assert softmax(before.tolist(), 1.0) != pytest.approx(softmax(after.tolist(), 1.0), abs=1e-3)
