"""Aggregations against the published table, and planted bugs that must turn the contract red."""

from __future__ import annotations

import copy
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest

from langchain_dpicl.exceptions import PrivateAccessError, SensitivityError
from langchain_dpicl.privacy.extensions.joint_exponential import KeywordSum
from langchain_dpicl.privacy.extensions.normalized_sums import MaxNormalizedSum, UnitVectorSum
from langchain_dpicl.privacy.extensions.registry import AGGREGATIONS
from langchain_dpicl.privacy.mechanisms import bounded as aggregation
from langchain_dpicl.privacy.mechanisms.bounded import BoundedSum, ProbabilitySum, Sensitivity, VoteSum
from tests.contracts.aggregation import CASES, AggregationContract, change

SQRT2 = 1.4142135623730951
GRID = Fraction(1, 2**32)
ADD = {"row_shape": "units", "adjacency": "add_remove"}


class TestProbabilitySum(AggregationContract):
    def make(self):
        return ProbabilitySum()

    def table(self):
        return {
            ("slots", "add_remove"): (SQRT2, 2.0, 1.0),
            ("units", "add_remove"): (1.0, 1.0, 1.0),
            ("slots", "replace_one"): (SQRT2, 2.0, 1.0),
            ("units", "replace_one"): (SQRT2, 2.0, 1.0),
        }

    def in_domain(self, row):
        return all(x >= 0 and (x / GRID).denominator == 1 for x in row) and sum(row) <= 1

    def extremes(self, row_shape, adjacency):
        if (row_shape, adjacency) == ("units", "add_remove"):
            return np.zeros((0, 2)), [[1.0, 0.0]], 1
        return [[1.0, 0.0]], [[0.0, 1.0]], 1


class TestVoteSum(TestProbabilitySum):
    def make(self):
        return VoteSum()

    def in_domain(self, row):
        return set(row) <= {0, 1} and sum(row) <= 1


class TestMaxNormalizedSum(AggregationContract):
    def make(self):
        return MaxNormalizedSum()

    def table(self):
        return {
            ("slots", "add_remove"): (None, 2.0, None),
            ("units", "add_remove"): (None, 1.0, None),
            ("slots", "replace_one"): (None, 2.0, None),
            ("units", "replace_one"): (None, 2.0, None),
        }

    def in_domain(self, row):
        return all(0 <= x <= 1 and (x / GRID).denominator == 1 for x in row) and max(row) in {0, 1}

    def extremes(self, row_shape, adjacency):
        if (row_shape, adjacency) == ("units", "add_remove"):
            return np.zeros((0, 2)), [[0.3, 0.0]], 1
        return [[0.3, 0.0]], [[0.0, 0.2]], 1


class TestUnitVectorSum(AggregationContract):
    def make(self):
        return UnitVectorSum()

    def table(self):
        return {
            ("slots", "add_remove"): (2.0, None, None),
            ("units", "add_remove"): (1.0, None, None),
            ("slots", "replace_one"): (2.0, None, None),
            ("units", "replace_one"): (2.0, None, None),
        }

    def in_domain(self, row):
        return sum(x * x for x in row) <= 1 and all((x / GRID).denominator == 1 for x in row)

    def extremes(self, row_shape, adjacency):
        share = 1 - 1e-9  # rounding towards zero costs less than that
        if (row_shape, adjacency) == ("units", "add_remove"):
            return np.zeros((0, 2)), [[3.0, -4.0]], share
        return [[3.0, -4.0]], [[-3.0, 4.0]], share


class TestKeywordSum(TestMaxNormalizedSum):
    def make(self):
        return KeywordSum()

    def in_domain(self, row):
        return set(row) <= {0, 1}


def _unit(agg, rows, width=2):
    return agg.bound(np.asarray(rows, dtype=float), **ADD, width=width).value


# --- values with a second source -------------------------------------------------------------------------------


def test_probability_rows_inside_the_simplex_are_kept_up_to_the_grid():
    rows = np.random.default_rng(1).dirichlet(np.ones(7), size=50)
    kept = ProbabilitySum().bounded_rows(rows, width=7)
    assert np.all(kept <= rows)
    assert np.all(rows - kept < 2.0**-31)


def test_a_row_that_sums_to_more_than_one_is_scaled_and_faults_count_zero():
    np.testing.assert_allclose(_unit(ProbabilitySum(), [[0.9, 0.9]]), [0.5, 0.5], atol=1e-9)
    np.testing.assert_allclose(_unit(ProbabilitySum(), [[math.nan, 0.4]]), [0.0, 0.4], atol=1e-9)
    np.testing.assert_allclose(_unit(ProbabilitySum(), [[math.inf, 0.4]]), [0.0, 0.4], atol=1e-9)
    np.testing.assert_allclose(_unit(ProbabilitySum(), [[-9999.0, 7.0]]), [0.0, 1.0], atol=1e-9)


def test_votes_go_to_the_first_of_the_largest_and_an_empty_row_abstains():
    rows = [[0.2, 0.5, 0.5], [0.0, 0.0, 0.0], [math.nan, -1.0, 5e-324], [7.0, 3.0, 6.0]]
    np.testing.assert_array_equal(_unit(VoteSum(), rows, width=3), [1.0, 1.0, 1.0])


def test_max_normalised_rows_have_a_top_of_one():
    np.testing.assert_allclose(_unit(MaxNormalizedSum(), [[0.2, 0.1], [0.0, 5.0]]), [1.0, 1.5], atol=1e-9)


def test_rows_of_any_finite_size_have_length_one():
    """Squares of the first would overflow, of the second vanish; a fault anywhere makes a row count nothing."""
    half = math.sqrt(0.5)
    rows = [[1e300, -1e300], [5e-324, 5e-324], [1e300, 1.0], [0.0, 0.0], [math.nan, 1.0], [1.0, -math.inf]]
    wanted = [[half, -half], [half, half], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    kept = UnitVectorSum().bounded_rows(np.array(rows), width=2)
    np.testing.assert_allclose(kept, wanted, rtol=0, atol=2.0**-31)
    assert not np.signbit(kept[kept == 0]).any()


@pytest.mark.parametrize("width", [1, 2, 3, 1536, 4096, 2**20])
def test_unit_vectors_keep_their_direction_and_their_integer_length_cannot_overflow(width):
    """Each coordinate is right to a public number of digits below the largest: 31 for one, 21 for 2^20 of them."""
    rows = np.vstack([np.random.default_rng(4).normal(size=width), np.full(width, -np.nextafter(1.0, 0.0))])
    kept = UnitVectorSum().bounded_rows(rows, width=width)
    ideal = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    digits = (62 - math.ceil(math.log2(width))) // 2
    assert np.abs(kept - ideal).max() <= 3 * np.abs(ideal).max() * 2.0 ** -(digits - 1) + 2.0**-32
    for steps in (kept * 2**32).tolist():
        assert sum(int(x) ** 2 for x in steps) <= 2**64


def test_keywords_count_rows_and_not_how_often_a_row_says_them():
    rows = [[3.0, 0.0], [0.5, -2.0], [math.inf, math.nan], [5e-324, 1e308]]
    np.testing.assert_array_equal(_unit(KeywordSum(), rows), [4.0, 1.0])


def test_the_registry_names_each_aggregation_once():
    assert list(AGGREGATIONS) == [
        "probability_sum",
        "vote_sum",
        "max_normalized_sum",
        "clipped_logit_mean",
        "clipped_difference_mean",
        "unit_vector_sum",
        "keyword_sum",
        "vote_vector_sum",
        "clipped_gradient_sum",
    ]


# --- bounded.py ---------------------------------------------------------------------------------------------------


def test_a_missing_norm_is_refused_with_a_mechanism_that_works():
    with pytest.raises(SensitivityError, match="gumbel"):
        Sensitivity(l2=None, range=2.0).require("l2")
    with pytest.raises(SensitivityError, match="gaussian"):
        Sensitivity(l2=1.0, range=None).require("range")
    with pytest.raises(SensitivityError, match=r"'linf'.*gaussian"):
        Sensitivity(l2=1.0, range=2.0).require("linf")
    assert Sensitivity(l2=1.0, range=None).require("l2") == 1.0
    assert [Sensitivity(l2=1.0, range=2.0, linf=3.0).require(norm) for norm in ("l2", "range", "linf")] == [1, 2, 3]


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_sensitivity_is_finite_and_positive(bad):
    with pytest.raises(SensitivityError):
        Sensitivity(l2=bad, range=None)
    with pytest.raises(SensitivityError):
        Sensitivity(l2=None, range=bad)
    with pytest.raises(SensitivityError, match="linf"):
        Sensitivity(l2=None, range=None, linf=bad)


@pytest.mark.parametrize("value", [[math.nan, 0.0], [math.inf, 0.0], [], [[1.0]]])
def test_a_bounded_sum_is_a_finite_vector_and_its_error_hides_it(value):
    with pytest.raises(SensitivityError) as caught:
        BoundedSum(np.array(value), Sensitivity(l2=1.0, range=1.0), "units", "add_remove")
    assert "nan" not in str(caught.value)


def test_a_bounded_sum_owns_its_value_and_cannot_be_copied():
    mine = np.array([1.0, 2.0])
    total = BoundedSum(mine, Sensitivity(l2=1.0, range=1.0), "units", "add_remove")
    mine[0] = 9.0
    assert total.value[0] == 1.0
    assert copy.copy(total) is copy.deepcopy(total) is total
    with pytest.raises(PrivateAccessError):
        pickle.dumps(total)


# --- planted bugs: each must turn the contract red ----------------------------------------------------------------


def _patch_rows(monkeypatch, cls, function):
    monkeypatch.setattr(cls, "bounded_rows", lambda self, rows, *, width: function(np.array(rows, dtype=float)))


def _plant_nan(monkeypatch):
    monkeypatch.setattr(aggregation, "non_negative", lambda matrix: np.where(matrix < 0, 0.0, matrix))
    return TestProbabilitySum


def _plant_infinite_mass(monkeypatch):
    _patch_rows(monkeypatch, ProbabilitySum, lambda rows: np.clip(np.nan_to_num(rows), 0, 1))
    return TestProbabilitySum


def _plant_negative_mass(monkeypatch):
    def bug(rows):
        rows = np.clip(np.nan_to_num(rows), -1, 1)
        return rows / np.maximum(rows.sum(axis=1, keepdims=True), 1.0)

    _patch_rows(monkeypatch, ProbabilitySum, bug)
    return TestProbabilitySum


def _plant_normalising_over_all_rows(monkeypatch):
    def bug(rows):
        rows = np.clip(np.nan_to_num(rows), 0, 1)
        return rows / max(rows.sum(), 1e-300) * 2

    _patch_rows(monkeypatch, ProbabilitySum, bug)
    return TestProbabilitySum


def _plant_forgotten_sqrt2(monkeypatch):
    monkeypatch.setattr(ProbabilitySum, "sensitivity", lambda self, **_: Sensitivity(l2=1.0, range=2.0))
    return TestProbabilitySum


def _plant_range_of_one_for_slots(monkeypatch):
    monkeypatch.setattr(VoteSum, "sensitivity", lambda self, **_: Sensitivity(l2=SQRT2, range=1.0))
    return TestVoteSum


def _plant_a_largest_count_that_moves_by_half(monkeypatch):
    monkeypatch.setattr(VoteSum, "sensitivity", lambda self, **_: Sensitivity(l2=SQRT2, range=2.0, linf=0.5))
    return TestVoteSum


def _plant_two_votes_per_row(monkeypatch):
    _patch_rows(monkeypatch, VoteSum, lambda rows: (np.nan_to_num(rows) > 0).astype(float))
    return TestVoteSum


def _plant_max_over_all_rows(monkeypatch):
    def bug(rows):
        rows = np.clip(np.nan_to_num(rows), 0, None)
        return rows / max(rows[rows > 0].min(initial=np.inf), 1e-12)

    _patch_rows(monkeypatch, MaxNormalizedSum, bug)
    return TestMaxNormalizedSum


def _plant_unit_vectors_that_differ_by_one(monkeypatch):
    """The published code's sensitivity."""
    monkeypatch.setattr(UnitVectorSum, "sensitivity", lambda self, **_: Sensitivity(l2=1.0, range=None))
    return TestUnitVectorSum


def _plant_unit_vectors_like_probabilities(monkeypatch):
    monkeypatch.setattr(UnitVectorSum, "sensitivity", lambda self, **_: Sensitivity(l2=SQRT2, range=None))
    return TestUnitVectorSum


def _plant_vectors_as_they_come(monkeypatch):
    _patch_rows(monkeypatch, UnitVectorSum, lambda rows: np.nan_to_num(rows, posinf=1e6, neginf=-1e6))
    return TestUnitVectorSum


def _plant_one_length_for_all_rows(monkeypatch):
    def bug(rows):
        rows = np.clip(np.nan_to_num(rows), -1e3, 1e3)
        return rows / max(np.linalg.norm(rows, axis=1).min(), 1e-9)

    _patch_rows(monkeypatch, UnitVectorSum, bug)
    return TestUnitVectorSum


def _plant_keywords_as_often_as_said(monkeypatch):
    _patch_rows(monkeypatch, KeywordSum, lambda rows: np.floor(np.clip(np.nan_to_num(rows), 0, 1e6)))
    return TestKeywordSum


def _plant_keyword_range_of_one_for_slots(monkeypatch):
    monkeypatch.setattr(KeywordSum, "sensitivity", lambda self, **_: Sensitivity(l2=None, range=1.0))
    return TestKeywordSum


PLANTED = [value for name, value in sorted(globals().items()) if name.startswith("_plant_")]


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_bug_turns_the_neighbour_test_red(plant, monkeypatch):
    contract = plant(monkeypatch)()
    with pytest.raises((AssertionError, SensitivityError)), np.errstate(all="ignore"):
        contract.test_adversarial_neighbours_stay_within_the_bound()


def test_the_neighbour_test_is_green_without_a_plant():
    for contract in (
        TestProbabilitySum,
        TestVoteSum,
        TestMaxNormalizedSum,
        TestUnitVectorSum,
        TestKeywordSum,
    ):
        contract().test_adversarial_neighbours_stay_within_the_bound()


def test_rounding_towards_zero_is_needed_for_an_exact_simplex(monkeypatch):
    """Without the grid some float row sums to more than one by an ulp; on it, none does."""
    rows = np.random.default_rng(3).random((500, 40)) ** 8
    careless = rows / rows.sum(axis=1, keepdims=True)
    assert any(sum(map(Fraction, row)) > 1 for row in careless.tolist())
    kept = ProbabilitySum().bounded_rows(rows, width=40)
    assert all(sum(map(Fraction, row)) <= 1 for row in kept.tolist())


def test_rounding_towards_zero_is_needed_for_an_exact_ball():
    """Without the grid some float row is longer than one by an ulp; on it, none is."""
    rows = np.random.default_rng(3).normal(size=(500, 40))
    careless = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    assert any(sum(Fraction(x) ** 2 for x in row) > 1 for row in careless.tolist())
    kept = UnitVectorSum().bounded_rows(rows, width=40)
    assert all(sum(Fraction(x) ** 2 for x in row) <= 1 for row in kept.tolist())


@pytest.mark.planted
def test_rounding_to_the_nearest_step_turns_the_domain_test_red(monkeypatch):
    monkeypatch.setattr(aggregation.np, "trunc", np.rint)
    with pytest.raises(AssertionError):
        TestUnitVectorSum().test_any_rows_become_rows_of_the_domain()


# --- constants ------------------------------------------------------------------------------------------------------


CONTRACTS = (TestProbabilitySum, TestVoteSum, TestMaxNormalizedSum, TestKeywordSum)


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.__name__)
@pytest.mark.parametrize(("row_shape", "adjacency"), CASES)
def test_constants_stand_behind_the_sum_do_not_move_and_keep_its_bound(contract, row_shape, adjacency):
    before, after, _ = contract().extremes(row_shape, adjacency)
    how = {"row_shape": row_shape, "adjacency": adjacency, "width": 2}
    sums = [contract().make().bound(np.asarray(rows), **how) for rows in (before, after)]
    with_constants = [total.with_constants((0.25, -7.0)) for total in sums]
    assert change(*with_constants) == change(*sums)
    for total, longer in zip(sums, with_constants, strict=True):
        assert longer.value.tolist() == [*total.value.tolist(), 0.25, -7.0]
        assert longer.sensitivity == total.sensitivity
        assert (longer.row_shape, longer.adjacency) == (row_shape, adjacency)


def test_a_change_that_is_all_of_one_sign_is_felt_beside_a_constant():
    """Both candidates gain one vote: their difference stays, the one to a constant moves by the whole range."""
    rows = np.ones((1, 2))
    gone, there = (KeywordSum().bound(r, **ADD, width=2).with_constants((0.0,)) for r in (np.zeros((0, 2)), rows))
    assert np.ptp((there.value - gone.value)[:2]) == 0
    assert change(gone, there)[1] == KeywordSum().sensitivity(**ADD).range


@pytest.mark.parametrize("constant", [math.nan, math.inf, -math.inf, 2.0**21, 2.0**-33, 0.1])
def test_a_constant_off_the_grid_is_refused(constant):
    total = VoteSum().bound(np.zeros((1, 2)), **ADD, width=2)
    with pytest.raises(SensitivityError, match="constants"):
        total.with_constants((0.0, constant))


def test_no_constants_leave_the_sum_alone():
    total = VoteSum().bound(np.zeros((1, 2)), **ADD, width=2)
    assert total.with_constants(()) is total


def test_a_slack_declaration_turns_the_tightness_test_red(monkeypatch):
    monkeypatch.setattr(ProbabilitySum, "sensitivity", lambda self, **_: Sensitivity(l2=2.0, range=2.0))
    with pytest.raises(AssertionError):
        TestProbabilitySum().test_the_bound_is_reached("slots", "add_remove")


def test_a_slack_bound_on_the_largest_count_turns_the_tightness_test_red(monkeypatch):
    monkeypatch.setattr(VoteSum, "sensitivity", lambda self, **_: Sensitivity(l2=SQRT2, range=2.0, linf=SQRT2))
    with pytest.raises(AssertionError):
        TestVoteSum().test_the_bound_is_reached("slots", "add_remove")


@pytest.mark.planted
def test_a_row_bound_that_sees_its_neighbours_turns_the_locality_test_red(monkeypatch):
    _plant_normalising_over_all_rows(monkeypatch)
    with pytest.raises((AssertionError, SensitivityError)):
        TestProbabilitySum().test_each_row_is_bounded_by_itself_and_order_does_not_matter()
