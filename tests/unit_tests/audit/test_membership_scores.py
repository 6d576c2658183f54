"""ROC arithmetic against second sources: scipy's Mann-Whitney, closed forms of normals, randomised response."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from langchain_dpicl.audit.membership import Claim, RocCurve, rate_grid, roc_band
from langchain_dpicl.exceptions import ConfigurationError
from tests.doubles import RepeatableCoins

SCORES = st.lists(st.integers(0, 6).map(float), min_size=1, max_size=30)
MIDPOINTS = (np.arange(40_000) + 0.5) / 40_000
NORMAL = stats.norm.ppf(MIDPOINTS)


class TestCurve:
    @settings(max_examples=25)
    @given(members=SCORES, nonmembers=SCORES)
    def test_the_area_is_the_mann_whitney_statistic_ties_included(
        self, members: list[float], nonmembers: list[float]
    ) -> None:
        statistic = stats.mannwhitneyu(members, nonmembers).statistic
        assert RocCurve.of(members, nonmembers).auc == pytest.approx(statistic / len(members) / len(nonmembers))

    @settings(max_examples=25)
    @given(members=SCORES, nonmembers=SCORES)
    def test_it_rises_from_nothing_to_everything_with_one_point_per_score(
        self, members: list[float], nonmembers: list[float]
    ) -> None:
        curve = RocCurve.of(members, nonmembers)
        points = np.stack([curve.false_positives, curve.true_positives])
        assert points[:, 0].tolist() == [0, 0]
        assert points[:, -1].tolist() == [1, 1]
        assert (np.diff(points, axis=1) >= 0).all()
        assert points.shape[1] == 1 + len({*members, *nonmembers})

    @pytest.mark.parametrize("shift", [0.0, 0.5, 1.0, 2.5])
    def test_normal_scores_have_the_area_and_the_rates_of_the_closed_forms(self, shift: float) -> None:
        curve = RocCurve.of(NORMAL + shift, NORMAL)
        assert curve.auc == pytest.approx(stats.norm.cdf(shift / math.sqrt(2)), abs=1e-4)
        for rate in (0.001, 0.01, 0.1, 0.5):
            expected = stats.norm.cdf(shift + stats.norm.ppf(rate))
            assert curve.tpr_at(rate) == pytest.approx(expected, abs=2e-3)
            assert curve.at([rate])[0] == pytest.approx(expected, abs=2e-3)

    def test_a_low_rate_counts_thresholds_only_and_tosses_no_coins(self) -> None:
        curve = RocCurve.of([1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0])
        assert curve.tpr_at(0.24) == 0.0
        assert curve.tpr_at(0.25) == 0.75
        assert curve.at([0.125]).tolist() == [0.375]

    def test_where_it_rises_straight_up_the_top_counts(self) -> None:
        curve = RocCurve.of([3.0, 2.0], [1.0, 0.0])
        assert curve.at([0.0, 1.0]).tolist() == [1.0, 1.0]
        assert curve.tpr_at(0.0) == 1.0

    def test_a_line_ends_at_the_foot_of_a_rise_and_begins_at_its_top(self) -> None:
        curve = RocCurve.of([3.0, 1.0], [2.0, 0.0])  # up to (0, .5), flat to (.5, .5), up to (.5, 1), flat
        assert curve.at([0.0, 0.25, 0.4999, 0.5, 0.75, 1.0]).tolist() == [0.5, 0.5, 0.5, 1.0, 1.0, 1.0]

    @settings(max_examples=25)
    @given(members=SCORES, nonmembers=SCORES)
    def test_the_area_under_its_lines_is_the_area(self, members: list[float], nonmembers: list[float]) -> None:
        curve = RocCurve.of(members, nonmembers)
        ends = np.unique(curve.false_positives)
        middles = (ends[1:] + ends[:-1]) / 2
        assert np.sum(np.diff(ends) * curve.at(middles)) == pytest.approx(curve.auc)

    @pytest.mark.parametrize("scores", [[], [math.nan], [1.0, math.nan]])
    def test_scores_that_are_none_are_refused(self, scores: list[float]) -> None:
        with pytest.raises(ConfigurationError, match="none of them NaN"):
            RocCurve.of(scores, [1.0])
        with pytest.raises(ConfigurationError, match="none of them NaN"):
            RocCurve.of([1.0], scores)


class TestBand:
    @staticmethod
    def band(members: Any, nonmembers: Any, **options: Any) -> Any:
        return roc_band(members, nonmembers, rng=RepeatableCoins(7), **{"num_resamples": 1000, **options})

    def test_prompts_are_drawn_again_and_not_their_scores(self) -> None:
        """100 prompts of which 60 give all 25 members away: the area is a share of prompts, as wide as a binomial's."""
        members = np.repeat(np.where(np.arange(100) < 60, 1.0, 0.0)[:, None], 25, axis=1)
        low, mean, high = self.band(members, np.full((100, 3), 0.5)).auc
        width = 2 * 1.96 * math.sqrt(0.6 * 0.4 / 100)
        assert mean == pytest.approx(0.6, abs=0.01)
        assert high - low == pytest.approx(width, rel=0.2)

    def test_members_and_nonmembers_of_a_prompt_are_drawn_together(self) -> None:
        """Two prompts far apart. Drawn twice, one of them is distinguished alone; drawn both, they blur."""
        prompt = np.array([[0.0], [10.0]])
        low, mean, high = self.band(prompt + 0.5, np.zeros((2, 4)) + prompt, num_resamples=400).auc
        assert (low, high) == (0.75, 1.0)  # apart they would reach 0 as well
        assert mean == pytest.approx(0.875, abs=0.05)

    def test_its_mean_is_near_the_curve_and_inside_the_band(self) -> None:
        coins = np.random.default_rng(3)
        members, nonmembers = coins.normal(1.0, size=(80, 2)), coins.normal(size=(80, 20))
        band, curve = self.band(members, nonmembers, num_resamples=400), RocCurve.of(members, nonmembers)
        assert (band.low <= band.mean + 1e-3).all()  # a few drawn ones can pull the mean out of the band
        assert (band.mean <= band.high + 1e-3).all()
        assert np.abs(band.mean - curve.at(band.rates))[band.rates > 0.02].max() < 0.05
        assert band.rates.tolist() == rate_grid().tolist()
        assert band.auc[0] < curve.auc < band.auc[2]
        assert band.tpr[0] <= curve.tpr_at(0.01) <= band.tpr[2]

    def test_an_attack_that_never_errs_has_a_band_without_width(self) -> None:
        band = self.band(np.ones((5, 1)), np.zeros((5, 9)), num_resamples=20)
        assert band.auc == (1.0, 1.0, 1.0)
        assert (band.low == 1.0).all()

    def test_it_holds_the_curves_at_each_rate_and_far_fewer_of_them_everywhere(self) -> None:
        coins = np.random.default_rng(11)
        members, nonmembers = coins.normal(0.7, size=(60, 1)), coins.normal(size=(60, 20))
        band = self.band(members, nonmembers)
        draws = [np.random.default_rng(seed).integers(0, 60, 60) for seed in range(300)]
        curves = np.array([RocCurve.of(members[draw], nonmembers[draw]).at(band.rates) for draw in draws])
        inside = (band.low - 1e-9 <= curves) & (curves <= band.high + 1e-9)
        assert inside.mean(axis=0).min() > 0.85
        assert inside.all(axis=1).mean() < 0.8

    def test_more_confidence_is_a_wider_band(self) -> None:
        members, nonmembers = np.random.default_rng(5).normal(size=(2, 40, 3))
        widths = [
            np.ptp(self.band(members, nonmembers, confidence=share, num_resamples=300).auc)
            for share in (0.5, 0.95, 0.999)
        ]
        assert widths == sorted(widths)
        assert widths[0] < 0.6 * widths[1]

    @pytest.mark.parametrize(
        ("members", "nonmembers", "options"),
        [
            ([1.0], [[1.0]], {}),
            ([[1.0]], [[1.0], [2.0]], {}),
            ([[math.nan]], [[1.0]], {}),
            ([[1.0]], [[1.0]], {"confidence": 1.0}),
            ([[1.0]], [[1.0]], {"num_resamples": 1}),
        ],
        ids=["no groups", "unequal groups", "nan", "certain", "one draw"],
    )
    def test_what_is_no_group_or_no_share_is_refused(self, members: Any, nonmembers: Any, options: Any) -> None:
        with pytest.raises(ConfigurationError):
            self.band(members, nonmembers, **options)


class TestClaim:
    @settings(max_examples=25)
    @given(epsilon=st.floats(0.01, 8.0))
    def test_without_delta_the_area_has_a_closed_form(self, epsilon: float) -> None:
        expected = math.exp(epsilon) / (1 + math.exp(epsilon))
        assert Claim(epsilon, 0.0, "replace_one").auc == pytest.approx(expected, rel=1e-12)

    def test_randomised_response_attains_it(self) -> None:
        claim = Claim(math.log(3), 0.0, "replace_one")
        curve = RocCurve.of([1, 1, 1, 0], [1, 0, 0, 0])
        assert curve.auc == pytest.approx(claim.auc)
        assert curve.at(rate_grid()) == pytest.approx([claim.tpr_at(rate) for rate in rate_grid()])

    @pytest.mark.parametrize(("epsilon", "delta"), [(0.3, 0.0), (1.0, 0.01), (4.0, 0.2)])
    def test_the_area_is_the_integral_of_the_two_inequalities(self, epsilon: float, delta: float) -> None:
        def most(false: float) -> float:
            return min(math.exp(epsilon) * false + delta, 1 - math.exp(-epsilon) * (1 - delta - false), 1.0)

        claim = Claim(epsilon, delta, "replace_one")
        bend = (1 - delta) / (1 + math.exp(epsilon))
        area, _ = integrate.quad(most, 0, 1, points=[bend, 1 - delta])
        assert claim.auc == pytest.approx(area, abs=1e-9)
        for rate in (0.0, 0.01, 0.3, 0.9, 1.0):
            assert claim.tpr_at(rate) == pytest.approx(most(rate))

    @pytest.mark.parametrize("epsilon", [0.2, 1.0, 3.0])
    def test_the_gaussian_mechanism_stays_below_it_and_touches_it(self, epsilon: float) -> None:
        mu = 1.0
        above, below = -epsilon / mu + mu / 2, -epsilon / mu - mu / 2
        delta = stats.norm.cdf(above) - math.exp(epsilon) * stats.norm.cdf(below)  # Balle and Wang (2018), theorem 8
        claim = Claim(epsilon, float(delta), "replace_one")
        touching = stats.norm.cdf(below)  # where the curve's slope is e^epsilon
        rates = np.sort([*rate_grid(), touching])
        room = np.array([claim.tpr_at(float(rate)) for rate in rates]) - stats.norm.cdf(mu + stats.norm.ppf(rates))
        assert room.min() == pytest.approx(0.0, abs=1e-12)
        assert room[np.searchsorted(rates, touching)] == pytest.approx(0.0, abs=1e-12)

    def test_adding_and_removing_counts_twice_as_one_record_is_swapped_for_another(self) -> None:
        claim = Claim(1.5, 1e-3, "add_remove")
        assert claim.swapped == pytest.approx((3.0, 1e-3 * (1 + math.exp(1.5))))
        assert claim.auc == Claim(*claim.swapped, "replace_one").auc
        assert Claim(1.5, 1e-3, "replace_one").swapped == (1.5, 1e-3)

    def test_a_claim_of_anything_goes_allows_everything(self) -> None:
        claim = Claim(1e4, 1e-5, "add_remove")
        assert claim.auc == pytest.approx(1.0)
        assert claim.tpr_at(0.01) == 1.0

    @pytest.mark.parametrize(
        "terms", [(0.0, 0.0, "replace_one"), (1.0, 1.0, "replace_one"), (1.0, -0.1, "replace_one"), (1.0, 0.0, "near")]
    )
    def test_what_is_no_claim_is_refused(self, terms: Any) -> None:
        with pytest.raises(ConfigurationError):
            Claim(*terms)
