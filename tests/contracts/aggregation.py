"""What every aggregation must do: accept any row, bound it by itself, and never move further than it declares."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from abc import ABC, abstractmethod
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from langchain_dpicl.exceptions import ConfigurationError, PrivateAccessError
from langchain_dpicl.privacy.mechanisms.bounded import BoundedSum
from tests import row_strategies

CASES = (("slots", "add_remove"), ("units", "add_remove"), ("slots", "replace_one"), ("units", "replace_one"))
NAN, INF = float("nan"), float("inf")

# One inherited test serves several classes; without an example database there is nothing that could be mixed up.
LAW = settings(
    deadline=None, database=None, suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow]
)

# Neighbours that honest but careless sums get wrong; every case of the table is in here.
REPLACED = (
    ([[1.0, 0.0], [1.0, 0.0]], [[0.0, 1.0], [1.0, 0.0]]),
    ([[NAN, 0.5], [0.2, 0.2]], [[0.9, 0.1], [0.2, 0.2]]),
    ([[INF, 0.0], [0.2, 0.2]], [[0.0, INF], [0.2, 0.2]]),
    ([[0.0, 0.0], [0.9, 0.9]], [[9.0, 0.0], [0.9, 0.9]]),
    ([[-9999.0, 0.0], [0.2, 0.2]], [[0.0, -9999.0], [0.2, 0.2]]),
    ([[1e308, 1e308], [1.0, 0.5]], [[0.0, 0.0], [1.0, 0.5]]),
    ([[-1e308, 1e308], [1.0, 0.5]], [[1e308, -1e308], [1.0, 0.5]]),
    ([[50.0, 1.0], [1.0, 0.5]], [[0.1, 0.2], [1.0, 0.5]]),
    ([[0.0, INF, -INF], [1.0, 0.5, 0.0]], [[0.0, -INF, INF], [1.0, 0.5, 0.0]]),
    ([[50.0, 0.0], *[[0.1, 0.0]] * 30], [[0.0, 50.0], *[[0.1, 0.0]] * 30]),
)
APPEARING = (
    (np.zeros((0, 2)), [[1.0, 1.0]]),
    (np.zeros((0, 2)), [[0.0, 7.0]]),
    (np.zeros((0, 2)), [[-3.0, NAN]]),
    (np.zeros((0, 2)), [[50.0, -50.0]]),
    (np.zeros((0, 3)), [[0.0, INF, -INF]]),
    ([[1.0, 0.0], [1.0, 0.0]], [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]),
    ([[1.0, 0.0], [1.0, 0.0]], [[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]),
    ([[1.0, 0.0], [1.0, 0.0]], [[1.0, 0.0], [1.0, 0.0], [INF, -INF]]),
    ([[0.3, 0.4], [0.2, 0.1]], [[0.3, 0.4], [0.2, 0.1], [1e308, 1e308]]),
)


def change(before: BoundedSum, after: BoundedSum) -> tuple[Fraction, Fraction, Fraction]:
    """Returns how far a sum moved: squared L2 length, length of the interval from 0 over it, largest coordinate."""
    moved = [Fraction(b) - Fraction(a) for a, b in zip(before.value.tolist(), after.value.tolist(), strict=True)]
    return sum((x * x for x in moved), Fraction(0)), max(0, *moved) - min(0, *moved), max(map(abs, moved))


def reaches(change, share, declared):
    """True if a change, as `change` returns it, comes to `share` of every bound that is declared."""
    squared, spread, farthest = change
    far = declared.l2 is None or squared >= (Fraction(share) * Fraction(declared.l2)) ** 2 * Fraction(1 - 1e-12)
    far = far and (declared.range is None or spread >= Fraction(share) * Fraction(declared.range))
    return far and (declared.linf is None or farthest >= Fraction(share) * Fraction(declared.linf))


class AggregationContract(ABC):
    """Subclass, implement the three factories, collect with pytest."""

    num_rows: int | None = None
    """Set it where the number of slot rows is part of the aggregation."""
    row_shapes = ("slots", "units")
    """Shapes that the aggregation takes; another one is refused."""
    max_width = 2**20
    takes_public = False
    """Set it where the logits of the public prompt are added to the rows: all laws then hold for every such vector."""

    @abstractmethod
    def make(self):
        """Returns the aggregation."""

    @abstractmethod
    def table(self):
        """Returns {(row_shape, adjacency): (l2, range, linf), each or None}: the published table, typed in a second time."""

    @abstractmethod
    def in_domain(self, row):
        """True if a bounded row, as exact fractions, lies where the proof wants it."""

    @abstractmethod
    def extremes(self, row_shape, adjacency):
        """Returns (rows, neighbouring rows, share of each bound they must reach), to show that no bound is slack."""

    def refuses(self, row_shape):
        """Returns whether this shape is none of the aggregation's: then it has to be refused."""
        if row_shape in self.row_shapes:
            return False
        for adjacency in ("add_remove", "replace_one"):
            with pytest.raises(ConfigurationError, match="row_shape"):
                self.make().sensitivity(row_shape=row_shape, adjacency=adjacency)
        return True

    def publics(self, width):
        """Strategy for keyword arguments that carry a public vector, or none, of this width."""
        vectors = st.one_of(st.none(), row_strategies.rows(width), row_strategies.public_logits(width))
        return vectors.map(lambda public: {"public": public}) if self.takes_public else st.just({})

    def awkward_publics(self, width):
        """A few keyword arguments with public vectors that an engine may come up with."""
        if not self.takes_public:
            return [{}]
        kinds = ([0.0], [3.0, -1.0], [NAN], [NAN, 1.0], [INF, 0.0], [-INF], [1e308, -1e308], [1.0 / 3.0, 0.1])
        return [{"public": None}, *({"public": np.resize(np.array(kind), width)} for kind in kinds)]

    def assert_within(self, before, after, row_shape, adjacency, **public):
        before, after = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
        how = {"row_shape": row_shape, "adjacency": adjacency, "width": before.shape[1], **public}
        before, after = self.make().bound(before, **how), self.make().bound(after, **how)
        squared, spread, farthest = change(before, after)
        top = abs(Fraction(float(after.value.max())) - Fraction(float(before.value.max())))
        declared = self.make().sensitivity(row_shape=row_shape, adjacency=adjacency)
        assert declared.l2 is None or squared <= Fraction(declared.l2) ** 2
        assert declared.range is None or spread <= Fraction(declared.range)
        assert declared.linf is None or max(top, farthest) <= Fraction(declared.linf)

    @pytest.mark.parametrize(("row_shape", "adjacency"), CASES)
    def test_declared_sensitivity_is_the_published_one(self, row_shape, adjacency):
        if self.refuses(row_shape):
            return
        declared = self.make().sensitivity(row_shape=row_shape, adjacency=adjacency)
        assert (declared.l2, declared.range, declared.linf) == self.table()[row_shape, adjacency]

    @pytest.mark.parametrize("row_shape", ["slots", "units"])
    def test_the_bound_for_a_replacement_covers_a_removal(self, row_shape):
        """Amplification under replace_one needs both: the unit may be outside one of the two samples."""
        if self.refuses(row_shape):
            return
        replaced = self.make().sensitivity(row_shape=row_shape, adjacency="replace_one")
        removed = self.make().sensitivity(row_shape=row_shape, adjacency="add_remove")
        assert (replaced.range or 0.0) >= (removed.range or 0.0)
        assert (replaced.l2 or 0.0) >= (removed.l2 or 0.0)
        assert (replaced.linf or 0.0) >= (removed.linf or 0.0)

    @settings(LAW, max_examples=60)
    @given(data=st.data(), case=st.sampled_from([c for c in CASES if c != ("units", "add_remove")]))
    def test_a_row_that_changes_moves_the_sum_within_the_bound(self, data, case):
        if self.refuses(case[0]):
            return
        pair = data.draw(row_strategies.replaced_row(num_rows=self.num_rows if case[0] == "slots" else None))
        self.assert_within(*pair, *case, **data.draw(self.publics(pair[0].shape[1])))

    @settings(LAW, max_examples=50)
    @given(data=st.data(), pair=row_strategies.appearing_row())
    def test_a_row_that_appears_or_vanishes_moves_the_sum_within_the_bound(self, data, pair):
        public = data.draw(self.publics(pair[0].shape[1]))
        self.assert_within(*pair, "units", "add_remove", **public)
        self.assert_within(*reversed(pair), "units", "add_remove", **public)

    def test_adversarial_neighbours_stay_within_the_bound(self):
        for before, after in REPLACED:
            for public in self.awkward_publics(np.shape(before)[1]):
                self.assert_within(before, after, "units", "replace_one", **public)
                if "slots" in self.row_shapes and self.num_rows in {None, len(before)}:
                    self.assert_within(before, after, "slots", "add_remove", **public)
        for before, after in APPEARING:
            for public in self.awkward_publics(np.shape(before)[1]):
                self.assert_within(before, after, "units", "add_remove", **public)

    @pytest.mark.parametrize(("row_shape", "adjacency"), CASES)
    def test_the_bound_is_reached(self, row_shape, adjacency):
        if self.refuses(row_shape):
            return
        before, after, share = self.extremes(row_shape, adjacency)
        how = {"row_shape": row_shape, "adjacency": adjacency, "width": np.shape(after)[1]}
        moved = change(self.make().bound(np.asarray(before), **how), self.make().bound(np.asarray(after), **how))
        assert reaches(moved, share, self.make().sensitivity(row_shape=row_shape, adjacency=adjacency))

    @settings(LAW, max_examples=80)
    @given(matrix=row_strategies.any_matrices(), data=st.data())
    def test_any_rows_become_rows_of_the_domain(self, matrix, data):
        self.assert_in_domain(matrix, data.draw(self.publics(matrix.shape[1])))

    @pytest.mark.parametrize("fill", [0.0, NAN, INF, -INF, np.finfo(np.float64).max, np.finfo(np.float64).min])
    @pytest.mark.parametrize("shape", [(0, 3), (2, 3), (3, 1)])
    def test_rows_of_one_extreme_become_rows_of_the_domain(self, fill, shape):
        for public in self.awkward_publics(shape[1]):
            self.assert_in_domain(np.full(shape, fill), public)

    def assert_in_domain(self, matrix, public):
        before, given_before = matrix.copy(), copy.deepcopy(public)
        bounded = self.make().bounded_rows(matrix, width=matrix.shape[1], **public)
        assert bounded.shape == matrix.shape
        assert bounded.dtype == np.float64
        for row in bounded.tolist():
            assert self.in_domain([Fraction(x) for x in row])
        np.testing.assert_array_equal(matrix, before)
        np.testing.assert_equal(public, given_before)

    @settings(LAW, max_examples=40)
    @given(matrix=row_strategies.any_matrices(), data=st.data())
    def test_each_row_is_bounded_by_itself_and_order_does_not_matter(self, matrix, data):
        width = matrix.shape[1]
        public = data.draw(self.publics(width))
        together = self.make().bounded_rows(matrix, width=width, **public)
        pieces = [matrix[i : i + 1].copy() for i in range(len(matrix))]
        alone = [self.make().bounded_rows(piece, width=width, **public)[0] for piece in pieces]
        for left, right in zip(together, alone, strict=True):
            np.testing.assert_array_equal(left, right)
        order = data.draw(st.permutations(range(len(matrix))))
        how = {"row_shape": "units", "adjacency": "add_remove", "width": width, **public}
        np.testing.assert_array_equal(
            self.make().bound(matrix, **how).value, self.make().bound(matrix[list(order)], **how).value
        )

    def test_many_rows_add_exactly(self):
        matrix = np.random.default_rng(0).normal(0.2, 0.4, (4_000, 3))
        for public in self.awkward_publics(3):
            how = {"row_shape": "units", "adjacency": "add_remove", "width": 3, **public}
            rows = self.make().bounded_rows(matrix, width=3, **public).tolist()
            rows.append(self.make().bound(matrix[:0], **how).value.tolist())  # what no row has a part in
            exact = [sum((Fraction(row[i]) for row in rows), Fraction(0)) for i in range(3)]
            assert [Fraction(x) for x in self.make().bound(matrix, **how).value.tolist()] == exact

    def of_no_rows(self, width):
        """The sum of no rows without a public vector."""
        return np.zeros(width)

    @pytest.mark.parametrize("none", [np.zeros((0, 4)), np.zeros((0, 0)), np.array([]), np.zeros((0, 2, 2))])
    def test_no_unit_rows_give_what_is_public_whatever_their_empty_shape(self, none):
        total = self.make().bound(none, row_shape="units", adjacency="add_remove", width=4)
        np.testing.assert_array_equal(total.value, self.of_no_rows(4))

    @pytest.mark.parametrize(
        "bad", [np.zeros((2, 3)), np.zeros(4), np.zeros((2, 4, 1)), np.float64(1.0), np.full((2, 4), "x")]
    )
    def test_an_engine_that_returns_another_shape_is_refused_without_a_count(self, bad):
        with pytest.raises(ConfigurationError, match=r"width|shape") as caught:
            self.make().bound(bad, row_shape="units", adjacency="add_remove", width=4)
        assert "(2," not in str(caught.value)

    @pytest.mark.parametrize("width", [0, -1, True, 2.0, None])
    def test_a_width_that_cannot_be_added_exactly_is_refused(self, width):
        wrong = self.max_width + 1 if width is None else width
        with pytest.raises(ConfigurationError, match="width"):
            self.make().bound(np.zeros((0, 1)), row_shape="units", adjacency="add_remove", width=wrong)

    def test_unknown_shape_or_adjacency_is_refused(self):
        with pytest.raises(ConfigurationError, match="row_shape"):
            self.make().sensitivity(row_shape="rows", adjacency="add_remove")
        with pytest.raises(ConfigurationError, match="adjacency"):
            self.make().sensitivity(row_shape="units", adjacency="remove")

    def test_the_sum_is_hidden_frozen_and_stays_here(self):
        rows = np.array([[0.123456, 0.4], [0.3, 0.1]])
        total = self.make().bound(rows, row_shape="units", adjacency="replace_one", width=2)
        assert "value" not in repr(total)
        assert (total.row_shape, total.adjacency) == ("units", "replace_one")
        with pytest.raises(PrivateAccessError):
            pickle.dumps(total)
        with pytest.raises(ValueError, match="read-only"):
            total.value[0] = 5.0
        with pytest.raises(dataclasses.FrozenInstanceError):
            total.value = rows[0]

    def test_the_class_is_closed_frozen_and_describes_itself_in_public_terms(self):
        made = self.make()
        assert made.to_dict()["name"] == made.name == type(made).name
        assert json.loads(json.dumps(made.to_dict())) == made.to_dict()
        assert made == self.make()
        with pytest.raises(TypeError, match="docs/proofs"):
            type("Derived", (type(made),), {})
