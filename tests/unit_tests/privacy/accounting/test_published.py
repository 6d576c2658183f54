"""Prices of published papers: their formulas, and what they leave on the table."""

from __future__ import annotations

import math

import mpmath
import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.generation.plan import advanced_composition_epsilon
from langchain_dpicl.privacy.accounting import epsilon_upper_bound
from langchain_dpicl.privacy.accounting.events import (
    BoundedRangeEvent,
    GaussianEvent,
    ParallelEvent,
    PureEvent,
    RepeatedEvent,
    SubsampledEvent,
)
from langchain_dpicl.privacy.extensions.logit_sums import ClippedDifferenceMean, ClippedLogitMean
from langchain_dpicl.privacy.mechanisms.release_plan import GumbelMechanism

# What one token of a sum of limit C / s costs at temperature t, in the published accounting: rho = (C / (s t))^2 / 2.
TOKENS, TEMPERATURE, DELTA = 500, 1.1, 1e-6
CLIPS = {4: 0.258942, 8: 0.604198, 16: 1.294710, 32: 2.675734}
"""The published package's clip for epsilon 10, by batch: the rows and one public prompt."""
REPLACED = {1: (0.0760017, 2.1117), 3: (0.2095022, 6.5291), 5: (0.3313918, 11.1637), 10: (0.6041981, 23.4703)}
"""By the epsilon that package states for a batch of 8: its clip, and what the run costs where a record is replaced."""


def event_of(made, *, row_shape, temperature=TEMPERATURE):
    """The event of one token that is drawn at this temperature."""
    spread = made.sensitivity(row_shape=row_shape, adjacency="add_remove").require("range")
    return GumbelMechanism(temperature / spread).event


def epsilon_of(event, tokens=TOKENS, delta=DELTA):
    return epsilon_upper_bound(RepeatedEvent(event, tokens), delta=delta, adjacency="add_remove")


@given(epsilon=st.floats(1e-6, 5.0), tokens=st.integers(0, 10_000), delta=st.floats(1e-12, 0.5))
def test_advanced_composition_is_the_theorem_to_the_last_digits(epsilon, tokens, delta):
    with mpmath.workdps(40):
        e, k, d = mpmath.mpf(epsilon), tokens, mpmath.mpf(delta)
        exact = e * mpmath.sqrt(2 * k * mpmath.log(1 / d)) + k * e * (mpmath.exp(e) - 1)
    assert advanced_composition_epsilon(epsilon, tokens, delta=delta) == pytest.approx(float(exact), rel=1e-12)


def test_advanced_composition_by_hand():
    assert advanced_composition_epsilon(0.1, 100, delta=1e-6) == pytest.approx(5.25652 + 1.05171, abs=1e-4)
    assert advanced_composition_epsilon(800.0, 1, delta=0.5) == math.inf
    assert advanced_composition_epsilon(800.0, 0, delta=0.5) == 0.0


@pytest.mark.parametrize("bad", [(0.0, 1, 0.1), (math.nan, 1, 0.1), (1.0, -1, 0.1), (1.0, 1.5, 0.1), (1.0, 1, 1.0)])
def test_arguments_out_of_range_are_refused(bad):
    with pytest.raises(ConfigurationError):
        advanced_composition_epsilon(bad[0], bad[1], delta=bad[2])


@pytest.mark.parametrize(("bound", "tokens", "ours"), [(0.1, 100, 2.4191), (0.1, 1000, 8.8459), (1.0, 20, 13.3737)])
def test_the_same_tokens_cost_less_than_by_the_papers_composition(bound, tokens, ours):
    """Reference epsilons of the zCDP conversion; advanced composition takes each token as pure epsilon."""
    charged = epsilon_of(BoundedRangeEvent(bound), tokens)
    assert charged == pytest.approx(ours, rel=2e-4)
    assert charged < epsilon_of(PureEvent(bound), tokens)
    assert advanced_composition_epsilon(bound, tokens, delta=1e-6) > 1.3 * charged


@pytest.mark.parametrize("kind", [ClippedLogitMean, ClippedDifferenceMean])
def test_a_token_costs_half_the_square_of_a_rows_share_over_the_temperature(kind):
    """zCDP of one token, a bounded range E costs E^2 / 8; four times as much where a row is replaced."""
    made = kind(2.0, 16)
    for row_shape, factor in (("units", 1.0), ("slots", 4.0)):
        bound = event_of(made, row_shape=row_shape, temperature=0.8).bound
        assert bound**2 / 8 == pytest.approx(factor * 0.5 * (2.0 / (16 * 0.8)) ** 2, rel=1e-12)


def test_a_blend_pays_for_its_share_of_the_private_mean():
    """Bhusal et al. (2025): 4 lambda c / (s t) where a record is replaced, half of it where it becomes null."""
    made = ClippedLogitMean(5.0, 20, blend_weight=0.3)
    assert event_of(made, row_shape="slots").bound == pytest.approx(4 * 0.3 * 5.0 / (20 * 1.1), rel=1e-12)
    assert event_of(made, row_shape="units").bound == pytest.approx(2 * 0.3 * 5.0 / (20 * 1.1), rel=1e-12)


@pytest.mark.parametrize("batch", CLIPS)
def test_the_published_clips_cost_the_published_epsilon_if_a_record_becomes_null(batch):
    made = ClippedDifferenceMean(CLIPS[batch], batch - 1)
    assert epsilon_of(event_of(made, row_shape="units")) == pytest.approx(10.0, rel=5e-4)
    counted_twice = ClippedDifferenceMean(CLIPS[batch], batch)  # as if the public prompt were a row
    assert epsilon_of(event_of(counted_twice, row_shape="units")) < 9.7


@pytest.mark.parametrize("stated", REPLACED)
def test_the_published_runs_cost_more_where_a_record_is_replaced(stated):
    clip, replaced = REPLACED[stated]
    made = ClippedDifferenceMean(clip, 7)
    assert epsilon_of(event_of(made, row_shape="units")) == pytest.approx(stated, rel=5e-4)
    assert epsilon_of(event_of(made, row_shape="slots")) == pytest.approx(replaced, rel=5e-4)


def test_the_price_that_llamaindex_states_is_far_too_low() -> None:
    """Its pack at 12,000 records of four equal labels, two examples per label, sigma .5, 10 splits of one, 40 tokens."""
    delta = 1 / 12_000
    stated = RepeatedEvent(SubsampledEvent(GaussianEvent(0.5), 8 / 12_000), 40)  # what sigma_to_eps prices
    label = RepeatedEvent(
        SubsampledEvent(GaussianEvent(0.5), 10 / 3_000), 2 * 40
    )  # what a label's records went through
    real = ParallelEvent("news", (("sport", label), ("world", label)))  # a replaced record may change its label
    prices = (
        epsilon_upper_bound(stated, delta=delta, adjacency="add_remove"),
        epsilon_upper_bound(real, delta=delta, adjacency="replace_one"),
        epsilon_upper_bound(real, delta=delta / 10, adjacency="replace_one"),
    )
    assert [round(price, 2) for price in prices] == [0.49, 3.18, 4.35]
