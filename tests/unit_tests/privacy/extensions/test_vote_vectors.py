"""Vote vectors of length one: the contract of sums, the sensitivity by neighbours, and planted bugs that turn it red."""

from __future__ import annotations

import numpy as np
import pytest

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy.extensions import normalized_sums as aggregation
from langchain_dpicl.privacy.extensions.normalized_sums import UnitVectorSum, VoteVectorSum
from langchain_dpicl.privacy.mechanisms.bounded import MAX_WIDTH, Sensitivity
from tests.contracts.aggregation import CASES, AggregationContract, change
from tests.unit_tests.privacy.mechanisms.test_aggregation import GRID, SQRT2

ADD = {"row_shape": "units", "adjacency": "add_remove"}


class TestVoteVectorSum(AggregationContract):
    def make(self):
        return VoteVectorSum()

    def table(self):
        return {
            ("slots", "add_remove"): (SQRT2, 2.0, 1.0),
            ("units", "add_remove"): (1.0, 1.0, 1.0),
            ("slots", "replace_one"): (SQRT2, 2.0, 1.0),
            ("units", "replace_one"): (SQRT2, 2.0, 1.0),
        }

    def in_domain(self, row):
        return all(x >= 0 and (x / GRID).denominator == 1 for x in row) and sum(x * x for x in row) <= 1

    def extremes(self, row_shape, adjacency):
        share = 1 - 1e-9  # rounding towards zero costs less than that
        if (row_shape, adjacency) == ("units", "add_remove"):
            return np.zeros((0, 2)), [[7.0, 0.0]], share
        return [[3.0, 0.0]], [[0.0, 4.0]], share


def test_a_unit_with_many_votes_has_the_length_of_one():
    rows = [[3, 4, 0], [400, 0, 0], [1, 1, 1], [0, 0, 0]]
    kept = VoteVectorSum().bounded_rows(np.array(rows), width=3)
    third = 3**-0.5
    np.testing.assert_allclose(kept, [[0.6, 0.8, 0], [1, 0, 0], [third] * 3, [0, 0, 0]], rtol=0, atol=2.0**-31)


def test_what_cannot_be_a_vote_counts_zero_and_the_rest_of_the_row_stays():
    rows = np.array([[np.nan, 2.0], [np.inf, 2.0], [-5.0, 2.0]])
    np.testing.assert_allclose(VoteVectorSum().bounded_rows(rows, width=2), [[0.0, 1.0]] * 3, rtol=0, atol=2.0**-31)


def test_rows_in_pieces_add_to_the_same_bits(monkeypatch):
    rows = np.random.default_rng(3).integers(0, 9, size=(97, 11)).astype(np.float32)
    whole = VoteVectorSum().bound(rows, **ADD, width=11).value
    monkeypatch.setattr(aggregation, "_CELLS", 5 * 11)
    np.testing.assert_array_equal(VoteVectorSum().bound(rows, **ADD, width=11).value, whole)
    np.testing.assert_array_equal(VoteVectorSum().bound(rows[::-1], **ADD, width=11).value, whole)


@pytest.mark.parametrize("num_units", [0, 1])
def test_a_width_that_is_refused_is_refused_whatever_rows_there_are(num_units):
    class Sliced(list):
        shape = (num_units, MAX_WIDTH + 1)

    with pytest.raises(ConfigurationError, match="width"):
        VoteVectorSum().bound(Sliced(range(num_units)), **ADD, width=MAX_WIDTH + 1)


def test_rows_that_exist_some_at_a_time_add_to_the_same_bits(monkeypatch):
    class Sliced:
        def __init__(self, rows):
            self.rows, self.shape, self.most = rows, rows.shape, 0

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, rows):
            self.most = max(self.most, len(self.rows[rows]))
            return self.rows[rows]

    rows = np.random.default_rng(3).integers(0, 9, size=(97, 11)).astype(np.float32)
    whole = VoteVectorSum().bound(rows, **ADD, width=11).value
    monkeypatch.setattr(aggregation, "_CELLS", 5 * 11)
    sliced = Sliced(rows)
    np.testing.assert_array_equal(VoteVectorSum().bound(sliced, **ADD, width=11).value, whole)
    assert sliced.most == 5
    with pytest.raises(ConfigurationError, match="rows"):
        VoteVectorSum().bound(Sliced(rows[:, :3]), **ADD, width=11)
    assert not VoteVectorSum().bound(Sliced(rows[:0]), **ADD, width=11).value.any()


# --- planted bugs --------------------------------------------------------------------------------------------------


def _plant_votes_that_are_not_normalised(patch):
    patch.setattr(UnitVectorSum, "bounded_rows", lambda self, rows, *, width: np.asarray(rows, dtype=float))


def _plant_negative_votes(patch):
    patch.setattr(aggregation, "non_negative", lambda weights: np.where(np.isfinite(weights), weights, 0.0))


def _plant_a_replaced_unit_charged_as_one_that_comes(patch):
    patch.setattr(VoteVectorSum, "sensitivity", lambda self, **_: Sensitivity(l2=1.0, range=1.0, linf=1.0))


PLANTS = [
    _plant_votes_that_are_not_normalised,
    _plant_negative_votes,
    _plant_a_replaced_unit_charged_as_one_that_comes,
]

NEIGHBOURS = [
    ([[1.0, 0.0]], [[0.0, 1.0]]),
    ([[9.0, 9.0]], [[0.0, 1.0]]),
    ([[-3.0, 4.0]], [[4.0, -3.0]]),
    ([[0.0, 0.0]], [[200.0, 1.0]]),
]


def farthest():
    """Returns by how much, at most, the worst neighbours exceed what is declared, in L2; at most 1 where it is right."""
    worst = 0.0
    for row_shape, adjacency in CASES:
        votes = VoteVectorSum()
        declared = votes.sensitivity(row_shape=row_shape, adjacency=adjacency).l2
        for before, after in NEIGHBOURS:
            pair = [(before, after)]
            if (row_shape, adjacency) == ("units", "add_remove"):
                pair = [(np.zeros((0, 2)), before), (np.zeros((0, 2)), after)]
            for one, other in pair:
                sums = [
                    votes.bound(np.asarray(rows), row_shape=row_shape, adjacency=adjacency, width=2)
                    for rows in (one, other)
                ]
                worst = max(worst, float(change(*sums)[0]) ** 0.5 / declared)
    return worst


def test_no_neighbour_moves_the_sum_further_than_declared():
    assert farthest() <= 1.0 + 1e-15


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_each_planted_bug_moves_it_further(plant, monkeypatch):
    plant(monkeypatch)
    assert farthest() > 1.01
