"""Corners of sums: numbers of other kinds, a caller's own error state, names of logit sums, signs of zero."""

from __future__ import annotations

import numpy as np
import pytest

from langchain_dpicl.exceptions import ConfigurationError, SensitivityError
from langchain_dpicl.privacy.extensions import gradient_sums
from langchain_dpicl.privacy.extensions.gradient_sums import ClippedGradientSum, RunningSum
from langchain_dpicl.privacy.extensions.joint_exponential import KeywordSum
from langchain_dpicl.privacy.extensions.logit_sums import ClippedDifferenceMean, ClippedLogitMean, logit_sum
from langchain_dpicl.privacy.extensions.normalized_sums import MaxNormalizedSum, UnitVectorSum
from langchain_dpicl.privacy.mechanisms.bounded import ProbabilitySum, VoteSum

SUMS = [
    ProbabilitySum(),
    VoteSum(),
    MaxNormalizedSum(),
    UnitVectorSum(),
    KeywordSum(),
    ClippedLogitMean(2.0, 3),
    ClippedDifferenceMean(0.5, 3),
    ClippedGradientSum(1.0),
]
AS_THEY_COME = [ClippedLogitMean(2.0, 3, center="none"), ClippedDifferenceMean(0.5, 3, center="none")]
SIGNALLING = np.array([[0x7F800001, 0x3F800000], [0x7F800000, 0xFF800000], [0x00000001, 0x7F7FFFFF]], dtype=np.uint32)
HUGE = np.array([[np.finfo(np.longdouble).max, 1], [0.25, 0.5], [np.nan, np.inf]], dtype=np.longdouble)
KINDS = {
    "float32": SIGNALLING.view(
        np.float32
    ),  # a NaN that raises a flag where it is copied, infinities, ends of the range
    "longdouble": HUGE,
    "float16": np.array([[np.inf, 1.0], [6e-8, -1.0], [65504.0, 0.0]], dtype=np.float16),
    "int64": np.array([[2**62, -(2**62)], [0, 0], [1, 2]]),
    "bool": np.array([[True, False], [False, False], [True, True]]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("made", SUMS, ids=lambda made: made.name)
def test_no_number_of_a_row_is_an_error_whatever_state_the_caller_keeps(made, kind):
    """A caller who lets numpy raise would learn from an error what a row holds."""
    with np.errstate(all="raise"):
        rows = made.bounded_rows(KINDS[kind].copy(), width=2)
    assert rows.dtype == np.float64
    assert rows.shape == (3, 2)
    assert np.isfinite(rows).all()


@pytest.mark.parametrize("made", [*SUMS, *AS_THEY_COME], ids=lambda made: "-".join(map(str, made.to_dict().values())))
def test_no_zero_of_a_row_has_a_sign(made):
    rows = np.array([[-1e-300, 1.0], [-0.0, -0.0], [np.nan, -1.0], [-1e-12, -1e-12]])
    bounded = made.bounded_rows(rows, width=2)
    assert not np.signbit(bounded[bounded == 0]).any()


@pytest.mark.parametrize("center", ["max", "none"])
def test_public_logits_are_clipped_on_both_sides(center):
    made = ClippedLogitMean(2.0, 1, blend_weight=0.5, center=center)
    how = {"row_shape": "slots", "adjacency": "add_remove", "width": 3}
    total = made.bound(np.zeros((1, 3)), public=np.array([9.0, 0.0, -9.0]), **how).value
    row = 2.0 if center == "max" else 0.0
    shown = [2.0, -2.0, -2.0] if center == "max" else [2.0, 0.0, -2.0]
    np.testing.assert_allclose(total, [0.5 * row + 0.5 * score for score in shown], atol=1e-6)


def test_each_public_name_means_one_sum():
    assert logit_sum("recentered_clip", clip=1.0, num_slots=2) == ClippedDifferenceMean(1.0, 2, center="median")
    assert logit_sum("difference_clip", clip=1.0, num_slots=2) == ClippedDifferenceMean(1.0, 2, center="none")
    blend = {"clip": 1.0, "num_slots": 2, "blend_weight": 0.25}
    assert logit_sum("clip_and_blend", **blend) == ClippedLogitMean(1.0, 2, blend_weight=0.25, center="max")
    assert logit_sum("clip_and_blend", center="none", **blend).center == "none"
    assert logit_sum("clip_and_blend", clip=1.0, num_slots=2).blend_weight == 0.5


def test_a_running_sum_takes_as_many_rows_as_it_says_and_no_more(monkeypatch):
    monkeypatch.setattr(gradient_sums, "MAX_ROWS", 3)
    running = RunningSum(ClippedGradientSum(1.0), row_shape="units", adjacency="add_remove", width=2)
    running.add(np.ones((2, 2)))
    running.add(np.ones((1, 2)))
    with pytest.raises(SensitivityError, match="rows"):
        running.add(np.ones((1, 2)))
    running.clear()
    running.add(np.ones((3, 2)))
    np.testing.assert_allclose(running.total().value, 3 / np.sqrt(2.0), atol=1e-6)


UNITS = {"row_shape": "units", "adjacency": "add_remove"}


def test_a_running_sum_is_as_wide_as_gradients_are_and_no_wider(monkeypatch):
    wide = 2**20 + 1  # more than a row of any other sum may have
    running = RunningSum(ClippedGradientSum(1.0), width=wide, **UNITS)
    running.add(np.ones((1, wide), dtype=np.float32))
    np.testing.assert_allclose(running.total().value[::wide], wide**-0.5, rtol=1e-3)
    with pytest.raises(ConfigurationError, match="width"):
        RunningSum(ClippedGradientSum(1.0), width=2**24 + 1, **UNITS)
    monkeypatch.setattr(gradient_sums, "MAX_GRADIENT_WIDTH", 4)
    RunningSum(ClippedGradientSum(1.0), width=4, **UNITS)
    with pytest.raises(ConfigurationError, match="width"):
        RunningSum(ClippedGradientSum(1.0), width=5, **UNITS)


@pytest.mark.parametrize("sign", [-1, 1])
def test_coordinates_that_only_more_rows_than_there_can_be_make_are_cut(sign):
    running = RunningSum(ClippedGradientSum(1.0), width=2, **UNITS)
    running._open()[0] = sign * 2**60
    assert running.total().value.tolist() == [sign * 2.0**20, 0.0]
