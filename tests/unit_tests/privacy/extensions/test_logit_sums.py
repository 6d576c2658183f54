"""Logit sums: the contract with public logits, published formulas as second sources, and planted bugs that turn red."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_dpicl.exceptions import ConfigurationError, SensitivityError
from langchain_dpicl.privacy.extensions import logit_sums
from langchain_dpicl.privacy.extensions.logit_sums import ClippedDifferenceMean, ClippedLogitMean
from langchain_dpicl.privacy.mechanisms.bounded import BoundedSum, Sensitivity
from tests import row_strategies
from tests.contracts.aggregation import LAW, AggregationContract

INF, NAN = math.inf, math.nan
UNITS = {"row_shape": "units", "adjacency": "add_remove"}
SLOTS = {"row_shape": "slots", "adjacency": "add_remove"}


class LogitSumContract(AggregationContract):
    """What both sums share: four limits where a row changes, two where one appears."""

    takes_public = True
    clip, num_rows = 3.0, 2
    weight = 1.0

    @property
    def limit(self):
        return self.weight * self.clip / self.num_rows

    def table(self):
        return {
            ("slots", "add_remove"): (None, 4 * self.limit, None),
            ("units", "add_remove"): (None, 2 * self.limit, None),
            ("slots", "replace_one"): (None, 4 * self.limit, None),
            ("units", "replace_one"): (None, 4 * self.limit, None),
        }

    def in_domain(self, row):
        step = Fraction(self.make()._step)
        return all(abs(x) <= Fraction(self.limit) and (x / step).denominator == 1 for x in row)

    def extremes(self, row_shape, adjacency):
        high, low = [0.0, INF, -INF], [0.0, -INF, INF]
        filler = [[0.0, 0.0, 0.0]] * (self.num_rows - 1)
        share = 1 - 1e-8  # rounding towards the grid costs less than that
        if (row_shape, adjacency) == ("units", "add_remove"):
            return np.zeros((0, 3)), [high], share
        return [high, *filler], [low, *filler], share

    def of_no_rows(self, width):
        clipped = self.clip if self.make().center == "max" else 0.0
        return np.full(width, (1 - self.weight) * clipped)


class TestClippedLogitMean(LogitSumContract):
    def make(self):
        return ClippedLogitMean(self.clip, self.num_rows)


class TestClippedLogitMeanBlendedWithAwkwardNumbers(LogitSumContract):
    clip, num_rows, weight = 0.75, 3, 0.3

    def make(self):
        return ClippedLogitMean(self.clip, self.num_rows, blend_weight=self.weight)

    def of_no_rows(self, width):
        return np.rint(LogitSumContract.of_no_rows(self, width) / self.make()._step) * self.make()._step


class TestClippedLogitMeanAsTheEngineHasThem(LogitSumContract):
    clip, num_rows, weight = 0.7, 3, 0.9

    def make(self):
        return ClippedLogitMean(self.clip, self.num_rows, blend_weight=self.weight, center="none")


class TestClippedDifferenceMean(LogitSumContract):
    clip, num_rows = 0.25, 2

    def make(self):
        return ClippedDifferenceMean(self.clip, self.num_rows)

    def of_no_rows(self, width):
        return np.zeros(width)


class TestClippedDifferenceMeanWithAwkwardNumbers(TestClippedDifferenceMean):
    clip, num_rows = 0.7, 3

    def make(self):
        return ClippedDifferenceMean(self.clip, self.num_rows, center="none")


CONTRACTS = (
    TestClippedLogitMean,
    TestClippedLogitMeanBlendedWithAwkwardNumbers,
    TestClippedLogitMeanAsTheEngineHasThem,
    TestClippedDifferenceMean,
    TestClippedDifferenceMeanWithAwkwardNumbers,
)


def score(aggregation, rows, public=None, *, how=UNITS):
    rows = np.asarray(rows, dtype=float)
    return aggregation.bound(rows, width=rows.shape[1], public=public, **how).value


# --- the median -------------------------------------------------------------------------------------------------------


@LAW
@given(data=st.data())
def test_the_median_splits_the_public_mass_of_a_row_in_halves(data):
    width = data.draw(st.integers(1, 12))
    public = np.asarray(data.draw(row_strategies.public_logits(width)))
    public = logit_sums._public_logits(public, width)
    row = np.array(data.draw(st.lists(st.floats(-9, 9), min_size=width, max_size=width)))
    (middle,) = logit_sums._weighted_median(row[None], public)
    mass = np.exp(public - public.max())
    assert middle in row
    assert mass[row <= middle].sum() >= (0.5 - 1e-9) * mass.sum()
    assert mass[row < middle].sum() <= (0.5 + 1e-9) * mass.sum()


def test_the_median_reads_the_likeliest_candidates_only_and_the_first_of_equals():
    likely = logit_sums._likeliest(np.arange(1000.0))
    assert sorted(likely.tolist()) == list(range(744, 1000))
    assert sorted(logit_sums._likeliest(np.zeros(1000)).tolist()) == list(range(256))
    mixed = np.zeros(1000)
    mixed[[5, 999]] = 1.0
    assert sorted(logit_sums._likeliest(mixed).tolist()) == [*range(255), 999]
    public = np.concatenate([np.zeros(256), np.full(10_000, -1.0)])
    row = np.concatenate([np.full(256, 2.0), np.full(10_000, -7.0)])[None]  # the tail holds more mass
    assert logit_sums._weighted_median(row, public).tolist() == [2.0]


# --- faults and edges -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("center", ["max", "none"])
def test_the_logit_mean_divides_by_the_public_count_and_an_absent_or_failed_row_is_zero(center):
    mean = ClippedLogitMean(3.0, 4, center=center)
    np.testing.assert_allclose(score(mean, [[3.0, -8.0]]), [0.75, -0.75], atol=1e-9)
    np.testing.assert_array_equal(score(mean, np.zeros((0, 2))), [0.0, 0.0])
    np.testing.assert_array_equal(score(mean, [[NAN, 3.0]]), [0.0, 0.0])
    np.testing.assert_allclose(score(mean, [[INF, -INF], [NAN, NAN]]), [0.75, -0.75], atol=1e-9)


def test_a_centred_row_keeps_the_clips_range_below_its_largest_logit():
    mean = ClippedLogitMean(3.0, 1)
    np.testing.assert_allclose(score(mean, [[-500.0, -504.0, -507.0, -INF]]), [3.0, -1.0, -3.0, -3.0], atol=1e-8)
    np.testing.assert_allclose(score(mean, [[-INF, -INF]]), [3.0, 3.0], atol=1e-8)
    np.testing.assert_allclose(score(mean, [[INF, 7.0]]), [3.0, -3.0], atol=1e-8)


def test_public_logits_of_any_content_give_a_public_score():
    mean = ClippedDifferenceMean(0.5, 1)
    none = np.zeros((0, 3))
    floor = -(2.0**15)
    for public, wanted in (
        ([2.0, 0.0, -INF], [0.0, -2.0, floor]),
        ([2.0, 0.0, NAN], [0.0, -2.0, floor]),
        ([INF, 0.0, -INF], [0.0, floor, floor]),
        ([NAN, NAN, NAN], [0.0, 0.0, 0.0]),
        ([-INF, -INF, -INF], [0.0, 0.0, 0.0]),
        ([-1e308, 1e308, 0.0], [floor, 0.0, floor]),
    ):
        assert score(mean, none, np.array(public)).tolist() == wanted


def test_public_logits_of_another_shape_are_refused():
    for bad in (np.zeros(2), np.zeros((1, 3)), np.array(["x", "y", "z"])):
        with pytest.raises(ConfigurationError, match="shape"):
            score(ClippedDifferenceMean(0.5, 1), np.zeros((1, 3)), bad)


def test_a_blend_moves_from_the_public_to_the_private_scores_and_its_price_with_it():
    rows, public = np.array([[9.0, 0.0]]), np.array([0.0, 9.0])
    shares = [0.25, 0.5, 1.0]
    made = [ClippedLogitMean(2.0, 1, blend_weight=weight) for weight in shares]
    gaps = [np.subtract(*score(one, rows, public)) for one in made]
    np.testing.assert_allclose(gaps, [4.0 * (2 * weight - 1) for weight in shares], atol=1e-8)
    assert [one.sensitivity(**SLOTS).range for one in made] == [4 * 2.0 * weight for weight in shares]


@pytest.mark.parametrize("made", [ClippedLogitMean(3.0, 4), ClippedDifferenceMean(3.0, 4)], ids=lambda made: made.name)
def test_every_slot_has_to_be_filled(made):
    with pytest.raises(ConfigurationError, match="num_slots=4"):
        made.bound(np.zeros((3, 2)), row_shape="slots", adjacency="add_remove", width=2)


@pytest.mark.parametrize("kind", [ClippedLogitMean, ClippedDifferenceMean])
@pytest.mark.parametrize(
    ("clip", "slots"),
    [(0.0, 1), (-1.0, 1), (NAN, 1), (1e7, 1), (1.0, 0), (1.0, 2.0), (1.0, 2**20 + 1), (True, 1), (1e-6, 1000)],
)
def test_public_numbers_out_of_range_are_refused(kind, clip, slots):
    with pytest.raises(ConfigurationError, match=r"clip|num_slots"):
        kind(clip, slots)


@pytest.mark.parametrize("weight", [0.0, -0.5, 1.5, NAN, None, 1e-9])
def test_a_blend_weight_out_of_range_is_refused(weight):
    with pytest.raises(ConfigurationError, match="blend_weight"):
        ClippedLogitMean(1.0, 1, blend_weight=weight)


def test_a_centre_that_is_not_proved_for_this_sum_is_refused():
    with pytest.raises(ConfigurationError, match="center"):
        ClippedLogitMean(1.0, 1, center="median")
    with pytest.raises(ConfigurationError, match="center"):
        ClippedDifferenceMean(1.0, 1, center="max")


def test_parameters_are_described():
    described = ClippedLogitMean(2, 5, blend_weight=1).to_dict()
    assert described == {
        "name": "clipped_logit_mean",
        "clip": 2.0,
        "num_slots": 5,
        "blend_weight": 1.0,
        "center": "max",
    }
    assert ClippedDifferenceMean(2.0, 5).to_dict() == {
        "name": "clipped_difference_mean",
        "clip": 2.0,
        "num_slots": 5,
        "center": "median",
    }


# --- the grid ---------------------------------------------------------------------------------------------------------

SIZES = [
    *(
        ClippedLogitMean(clip, slots, blend_weight=weight)
        for clip, slots, weight in itertools.product((0.3, 3.0, 1e6), (1, 3, 2**20), (1.0, 0.05))
    ),
    *(ClippedDifferenceMean(clip, slots) for clip, slots in itertools.product((0.011, 0.7, 1e6), (1, 3, 2**20))),
]


@pytest.mark.parametrize("made", SIZES, ids=str)
def test_the_largest_scores_and_all_their_differences_are_whole_steps_that_a_float_holds(made):
    """2^20 rows at their limit beside the largest public score: the argument of the proof page, in whole numbers."""
    step, limit = Fraction(made._step), Fraction(made._limit)
    assert math.log2(step).is_integer()
    share = (made.bounded_rows(np.array([[0.0, INF, -INF]]), width=3)[0]).tolist()
    shares = [abs(int(Fraction(x) / step)) for x in share]
    assert max(shares) * step <= limit < (max(shares) + 2) * step
    reach = Fraction(made._reach) / step
    assert reach.denominator == 1
    most = 2**20 * max(shares) + int(reach)
    assert 2 * most <= 2**53
    assert max(shares) >= 500  # a share keeps at least nine digits
    public = made.bound(np.zeros((0, 2)), width=2, public=np.array([0.0, -INF]), **UNITS).value
    weight = 1 - getattr(made, "blend_weight", 0.0)
    spread = weight * min(2.0**15, math.inf if made.name == "clipped_difference_mean" else 2 * made.clip)
    assert public[0] - public[1] == pytest.approx(spread, rel=1e-9, abs=0)


@pytest.mark.parametrize("cls", [cls for cls in CONTRACTS if cls.num_rows == 3])
def test_rounding_away_from_zero_turns_the_domain_test_red(cls, monkeypatch):
    """A limit of 0.7 / 3 is no whole number of steps."""
    monkeypatch.setattr(logit_sums.np, "trunc", lambda x, out: np.copysign(np.ceil(np.abs(x)), x, out=out))
    with pytest.raises(AssertionError):
        cls().assert_in_domain(np.array([[0.0, INF, -INF]]), {})


def test_floats_off_the_grid_add_up_to_more_than_one_sum(monkeypatch):
    """Why there is a grid: 0.1 + 0.2 + 0.3 depends on the order."""
    monkeypatch.setattr(logit_sums.np, "trunc", lambda x, out: x)
    for cls in CONTRACTS:
        with pytest.raises(AssertionError):
            cls().test_many_rows_add_exactly()


def test_a_public_score_off_the_grid_is_rounded_beside_the_rows(monkeypatch):
    monkeypatch.setattr(logit_sums.np, "rint", lambda x: x)
    for cls in CONTRACTS[1:3]:
        with pytest.raises(AssertionError):
            cls().test_many_rows_add_exactly()


@pytest.mark.parametrize("made", SIZES, ids=str)
def test_scores_relative_to_the_best_one_are_exact_however_far_behind(made):
    """What the error budget of noisy maxima rests on."""
    rng = np.random.default_rng(9)
    public = np.append(rng.normal(0.0, 9.0, 40), [-INF, -1e4 / 3, -3e4 / 7])
    value = score(made, rng.normal(0.0, 5.0, (7, 43)), public)
    relative = [Fraction(x) for x in (value - value.max()).tolist()]
    assert relative == [Fraction(x) - Fraction(float(value.max())) for x in value.tolist()]
    assert all((x / Fraction(made._step)).denominator == 1 for x in relative)


# --- planted bugs: each must turn the contract red --------------------------------------------------------------------

SUMS = {ClippedLogitMean: CONTRACTS[:3], ClippedDifferenceMean: CONTRACTS[3:]}


def _plant_no_clip(patch, cls):
    patch.setattr(cls, "bounded_rows", lambda self, rows, **_: np.nan_to_num(np.array(rows, float), posinf=1e6) / 2)


def _plant_nan(patch, cls):
    real = cls.bounded_rows

    def bug(self, rows, *, width, public=None):
        bounded = real(self, rows, width=width, public=public)
        return np.where(np.isnan(np.reshape(rows, bounded.shape)), rows, bounded)

    patch.setattr(cls, "bounded_rows", bug)


def _plant_realised_count(patch, cls):
    """The mean over the rows that are there."""
    real = cls.bounded_rows
    patch.setattr(
        cls, "bounded_rows", lambda self, rows, **how: real(self, rows, **how) * self.num_slots / max(len(rows), 1)
    )


def _plant_a_weight_that_only_the_price_knows(patch, cls):
    real = cls.bounded_rows

    def bug(self, rows, **how):
        return real(self, rows, **how) / getattr(self, "blend_weight", 0.5)

    patch.setattr(cls, "bounded_rows", bug)


def _plant_half_the_sensitivity(patch, cls):
    real = cls.sensitivity
    patch.setattr(cls, "sensitivity", lambda self, **how: Sensitivity(l2=None, range=real(self, **how).range / 2))


def _plant_a_centre_of_all_rows(patch, cls):
    """One constant would do; centres that depend on all rows let a row move the others' shares."""
    real = cls._place

    def bug(self, part, centers, public):
        real(self, part, centers, public)
        if len(part):
            part -= np.mean(np.clip(part, -1e3, 1e3), axis=0)

    patch.setattr(cls, "_place", bug)


def _plant_a_public_score_of_the_private_mean(patch, cls):
    real = cls.bound

    def bug(self, rows, *, width, public=None, **how):
        rows = np.reshape(rows, (-1, width))
        seen = np.nan_to_num(np.clip(rows, -1e3, 1e3)).mean(axis=0) if len(rows) else np.zeros(width)
        total = real(self, rows, width=width, public=public, **how)
        return BoundedSum(total.value + seen, total.sensitivity, total.row_shape, total.adjacency)

    patch.setattr(cls, "bound", bug)


PLANTED = [value for name, value in sorted(globals().items()) if name.startswith("_plant_")]


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
@pytest.mark.parametrize("kind", SUMS)
def test_a_planted_bug_turns_the_neighbour_test_red(plant, kind, monkeypatch):
    plant(monkeypatch, kind)
    caught = 0
    for cls in SUMS[kind]:
        try:
            with np.errstate(all="ignore"):
                cls().test_adversarial_neighbours_stay_within_the_bound()
        except (AssertionError, SensitivityError):
            caught += 1
    assert caught >= len(SUMS[kind]) - (plant is _plant_a_weight_that_only_the_price_knows)  # one has weight 1


def test_the_neighbour_test_is_green_without_a_plant():
    for cls in CONTRACTS:
        cls().test_adversarial_neighbours_stay_within_the_bound()
