"""The sparse vector test: its statistic, its price, who may ask how often, and planted bugs that turn these red."""

from __future__ import annotations

import dataclasses
import json
import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy.accounting import epsilon_upper_bound
from langchain_dpicl.privacy.accounting.events import (
    BoundedRangeEvent,
    ComposedEvent,
    PureEvent,
    RepeatedEvent,
    SubsampledEvent,
)
from langchain_dpicl.privacy.extensions.sparse_vector import SparseVectorTest, Threshold
from langchain_dpicl.privacy.mechanisms.bounded import ProbabilitySum
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM, SecureRandom
from tests import row_strategies

STEPS = 2**32
MADE = SparseVectorTest(0.5, 4.0)
NAN, INF = float("nan"), float("inf")


class FixedIntegers(SecureRandom):
    """Gives the listed integers from `integer_below`."""

    def __init__(self, *integers):
        self.integers = list(integers)

    def integer_below(self, high):
        assert 0 <= self.integers[0] < high
        return self.integers.pop(0)


# --- the statistic --------------------------------------------------------------------------------------------------


def moved(before, after, public):
    """Returns how far the statistic moved, exactly."""
    before, after = (np.asarray(rows, dtype=np.float64) for rows in (before, after))
    return abs(Fraction(MADE.statistic(after, public)) - Fraction(MADE.statistic(before, public)))


@st.composite
def with_public(draw, pairs):
    """A pair of neighbours and a public distribution, also of any content, that has some mass."""
    before, after = draw(pairs)
    public = draw(st.one_of(row_strategies.rows(before.shape[1]), st.just(np.eye(before.shape[1])[0])))
    assume(ProbabilitySum().bounded_rows(public[None], width=public.size).any())
    return before, after, public


SPLIT, EDGE = np.array([0.5, 0.5]), np.array([0.0, 1.0])


@settings(deadline=None, max_examples=60)
@given(case=with_public(row_strategies.replaced_row()))
@example(case=([[1.0, 0.0], [0.2, 0.2]], [[0.0, 1.0], [0.2, 0.2]], EDGE))
@example(case=([[NAN, NAN], [0.2, 0.2]], [[1.0, 0.0], [0.2, 0.2]], EDGE))
@example(case=([[NAN, 0.5], [0.2, 0.2]], [[0.9, 0.1], [0.2, 0.2]], SPLIT))
@example(case=([[INF, 0.0], [0.2, 0.2]], [[0.0, 1e308], [0.2, 0.2]], EDGE))
@example(case=([[3.0, 0.0], [0.2, 0.2]], [[0.0, 3.0], [0.2, 0.2]], EDGE))
@example(case=([[0.0, 1.0], [0.5, 0.5], [0.5, 0.5]], [[1.0, 0.0], [0.5, 0.5], [0.5, 0.5]], EDGE))
@example(case=([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]], [[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]], EDGE))
def test_a_row_that_changes_moves_the_statistic_by_at_most_one(case):
    assert moved(*case) <= 1


@settings(deadline=None, max_examples=50)
@given(case=with_public(row_strategies.appearing_row()))
@example(case=(np.zeros((0, 2)), [[1.0, 0.0]], EDGE))
@example(case=([[1.0, 0.0]], [[1.0, 0.0], [NAN, NAN]], EDGE))
@example(case=([[0.2, 0.2]], [[0.2, 0.2], [1e308, 1e308]], SPLIT))
@example(case=([[0.5, 0.5]] * 3, [[0.5, 0.5]] * 3 + [[1.0, 0.0]], EDGE))
def test_a_row_that_appears_moves_the_statistic_by_at_most_one(case):
    assert moved(*case) <= 1


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([[0.0, 1.0]], [[1.0, 0.0]]),
        ([[NAN, NAN]], [[1.0, 0.0]]),
        (np.zeros((0, 2)), [[1.0, 0.0]]),
        ([[0.5, 0.5], [0.0, 1.0]], [[0.5, 0.5], [1.0, 0.0]]),
    ],
    ids=["changes", "abstains", "appears", "beside another"],
)
def test_the_bound_is_reached(before, after):
    assert moved(before, after, EDGE) == 1


def test_many_rows_on_many_columns_stay_exact():
    """300 rows of 1,000 columns, one replaced: the change is what rational arithmetic says, to the last bit."""
    draw = np.random.default_rng(0)
    rows, public = draw.dirichlet(np.full(1000, 0.05), 300), draw.dirichlet(np.full(1000, 0.05))
    other = rows.copy()
    other[17] = np.eye(1000)[5]
    clean = ProbabilitySum()
    base = [int(x * STEPS) for x in clean.bounded_rows(public[None], width=1000)[0].tolist()]
    for matrix in (rows, other):
        steps = (clean.bounded_rows(matrix, width=1000) * STEPS).T.tolist()  # whole numbers, as floats
        sums = [sum(map(int, column)) for column in steps]
        exact = sum(abs(total - 300 * p) for total, p in zip(sums, base, strict=True))
        assert Fraction(MADE.statistic(matrix, public)) == Fraction(exact, 2 * STEPS)
    assert 0 < moved(rows, other, public) <= 1


@pytest.mark.parametrize(("n", "d"), [(1, 1), (1, 50), (40, 3), (7, 70_000)])
def test_the_statistic_over_the_number_of_rows_is_the_total_variation_of_the_mean(n, d):
    """Against the formula, on rows that have all their mass; 2^-32 per coordinate is cut."""
    draw = np.random.default_rng(n * d)
    rows, public = draw.dirichlet(np.full(d, 0.3), n), draw.dirichlet(np.full(d, 0.3))
    distance = 0.5 * np.abs(rows.mean(axis=0) - public).sum()
    assert MADE.statistic(rows, public) / n == pytest.approx(distance, abs=2 * d * 2.0**-32)


def test_rows_that_say_what_the_public_model_says_are_at_no_distance():
    public = np.random.default_rng(1).dirichlet(np.ones(500))
    assert MADE.statistic(np.tile(public, (9, 1)), public) == 0.0
    assert MADE.statistic(np.zeros((0, 500)), public) == 0.0


@pytest.mark.parametrize("row", [[NAN, NAN, NAN], [0.0, 0.0, 0.0], [-1.0, -INF, NAN], [INF, 0.0, 0.0]])
def test_a_row_without_mass_counts_as_the_public_distribution(row):
    public = np.array([0.2, 0.3, 0.5])
    full = np.array([[1.0, 0.0, 0.0], [0.0, 0.7, 0.3]])
    assert MADE.statistic(np.vstack([full, [row]]), public) == MADE.statistic(full, public)
    assert MADE.statistic(np.array([row]), public) == 0.0


def test_order_and_layout_of_rows_do_not_matter():
    rows = np.random.default_rng(2).dirichlet(np.full(3000, 0.1), 60)
    public = rows[3]
    found = {MADE.statistic(given, public) for given in (rows, rows[::-1], np.asfortranarray(rows), rows.tolist())}
    assert len(found) == 1


@pytest.mark.parametrize(
    "rows", [np.zeros((2, 3)), np.zeros(4), np.float64(1.0), np.full((2, 4), "x"), np.ones((2, 4, 1))]
)
def test_an_engine_that_returns_another_shape_is_refused_without_a_count(rows):
    with pytest.raises(ConfigurationError, match="rows: expected a real array") as caught:
        MADE.statistic(rows, np.full(4, 0.25))
    assert "(2," not in str(caught.value)


@pytest.mark.parametrize("none", [np.zeros((0, 4)), np.zeros((0, 0)), np.array([]), np.zeros((0, 2, 2))])
def test_no_unit_rows_are_no_fault_whatever_their_empty_shape(none):
    assert MADE.statistic(none, np.full(4, 0.25)) == 0.0


@pytest.mark.parametrize("public", [[0.0, 0.0], [NAN, NAN], [INF, -1.0], [[0.5, 0.5]], 1.0, []])
def test_a_public_prompt_without_an_answer_is_refused(public):
    with pytest.raises(ConfigurationError, match=r"public: expected|width: expected"):
        MADE.statistic(np.zeros((0, 2)), np.asarray(public, dtype=np.float64))


# --- planted statistics ---------------------------------------------------------------------------------------------


def _whole_distance(self, rows, public):
    return 2.0 * REAL(self, rows, public)


def _uncleaned(self, rows, public):
    return float(np.abs((np.nan_to_num(rows) - public).sum(axis=0)).sum()) / 2


def _over_realised_rows(self, rows, public):
    present = np.nan_to_num(rows).any(axis=1).sum()
    return REAL(self, rows, public) * (len(rows) / present if present else 0.0)


def _softmax_of_mean(self, rows, public, clip=20.0):
    """As published: T of the softmax of the mean of clipped logits, in rows."""
    if not len(rows):
        return 0.0
    with np.errstate(all="ignore"):
        logits = np.clip(np.nan_to_num(np.log(rows)), -clip, clip).mean(axis=0)
    mixed = np.exp(logits - logits.max())
    return len(rows) * 0.5 * float(np.abs(mixed / mixed.sum() - public).sum())


REAL = SparseVectorTest.statistic


@pytest.mark.parametrize("bug", [_whole_distance, _uncleaned, _over_realised_rows, _softmax_of_mean])
def test_another_statistic_turns_the_sensitivity_test_red(bug, monkeypatch):
    monkeypatch.setattr(SparseVectorTest, "statistic", bug)
    with pytest.raises(BaseException) as caught:  # one failure, or a group of several examples
        test_a_row_that_changes_moves_the_statistic_by_at_most_one()
    found = caught.value.exceptions if isinstance(caught.value, BaseExceptionGroup) else [caught.value]
    assert any(isinstance(error, AssertionError) for error in found)


# --- price ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("multiplier", [0.5, 3.0, 7.3])
def test_a_run_costs_what_is_published_for_the_same_noise(multiplier):
    """Amin et al.: Lap(sigma) and Lap(2 sigma) on distances of sensitivity 1/s have rho = 2 / (s sigma)^2."""
    num_rows = 32
    sigma = multiplier / num_rows
    event = SparseVectorTest(0.7, multiplier).event
    assert event == PureEvent(2.0 / multiplier)
    assert event.epsilon**2 / 2 == pytest.approx(2 / (num_rows * sigma) ** 2, rel=1e-12)


def test_runs_and_tokens_compose_inside_and_are_amplified_once():
    """The composition of the docstring has a price below that of its parts in terms of rho, and grows with r."""
    token, prices = BoundedRangeEvent(0.2), []
    for runs in (1, 10, 40):
        block = ComposedEvent((RepeatedEvent(SparseVectorTest(0.5, 8.0).event, runs), RepeatedEvent(token, runs)))
        rho = runs * (0.25**2 / 2 + 0.2**2 / 8)
        price = epsilon_upper_bound(block, delta=1e-6, adjacency="replace_one")
        assert price <= rho + 2 * math.sqrt(rho * math.log(1e6))
        prices.append(price)
        assert epsilon_upper_bound(SubsampledEvent(block, 0.01), delta=1e-6, adjacency="replace_one") < price / 3
    assert prices == sorted(prices)


def chance(levels, answers, scale):
    """Returns the ideal chance of a transcript: whole steps, threshold from 0, question noise of twice the scale."""
    survival = lambda x, at: mpmath.exp(-mpmath.mpf(max(x, 0)) / at)  # noqa: E731
    total = mpmath.mpf(0)
    for height in range(60 * scale):
        term = survival(height, scale) - survival(height + 1, scale)
        for level, answer in zip(levels, answers, strict=True):
            above = survival(height - level, 2 * scale)
            term *= above if answer else 1 - above
        total += term
    return total


@settings(deadline=None, max_examples=30)
@given(data=st.data(), scale=st.integers(1, 5), row=st.integers(1, 4), is_answered=st.booleans())
def test_no_transcript_tells_more_than_the_price(data, scale, row, is_answered):
    """Sums over all thresholds for arbitrary statistics and neighbours within one row of `row` steps."""
    levels = data.draw(st.lists(st.integers(-8, 8), min_size=1, max_size=4))
    others = [level + data.draw(st.integers(-row, row)) for level in levels]
    answers = [False] * (len(levels) - 1) + [is_answered]
    first, second = chance(levels, answers, scale), chance(others, answers, scale)
    price = mpmath.exp(2 * mpmath.mpf(row) / scale)
    assert first <= second * price * (1 + mpmath.mpf(10) ** -9)
    assert second <= first * price * (1 + mpmath.mpf(10) ** -9)


def test_two_questions_attain_the_price():
    first, second = (chance(levels, [False, True], 5) for levels in ((0, 0), (4, -4)))
    assert first / second == pytest.approx(math.exp(2 * 4 / 5), rel=1e-9)


# --- the coins ------------------------------------------------------------------------------------------------------


def test_a_geometric_draw_is_a_rest_and_a_number_of_scales():
    # 3 of 10; kept at once (9 is not below 3). Two coins of exp(-1) that succeed at k = 3, one that fails at k = 2.
    success, failure = (0, 0, 2), (0, 1)
    assert FixedIntegers(3, 9, *success, *success, *failure).geometric(10) == 23
    # 7 of 10, refused at k = 2 (5 < 7, then 8 of 20 is not below 7); then 0 of 10, kept, and no multiple.
    assert FixedIntegers(7, 5, 8, 0, 0, *failure).geometric(10) == 0


@pytest.mark.parametrize("part", range(0, 8, 2))
def test_a_coin_of_an_exponential_is_exact(part):
    """Every path of `integer_below`, weighted, adds up to exp(-part / 7)."""
    chances, left = Fraction(0), Fraction(1)
    for k in range(1, 25):
        stop = 1 - Fraction(part, 7 * k)
        path = [0] * (k - 1) + [7 * k - 1]
        if stop:
            chances += left * stop * FixedIntegers(*path)._decays(part, 7)
        left *= 1 - stop
    assert float(chances) == pytest.approx(math.exp(-part / 7), rel=1e-15)


@pytest.mark.parametrize("bad", [0, -1, 1.0, True])
def test_a_scale_that_is_no_whole_number_is_refused(bad):
    with pytest.raises(ConfigurationError, match="scale"):
        SYSTEM_RANDOM.geometric(bad)


def test_exact_coins_declare_no_delta():
    assert MADE.implementation_delta(10**6) == 0.0
    with pytest.raises(ConfigurationError, match="num_questions"):
        MADE.implementation_delta(0)


# --- parameters -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0.0, 1.0, -0.1, 1.5, NAN, INF, True, "0.5", None])
def test_a_threshold_that_is_no_share_is_refused(bad):
    with pytest.raises(ConfigurationError, match="threshold"):
        SparseVectorTest(bad, 1.0)


@pytest.mark.parametrize("bad", [0.0, -1.0, 1e-10, 1e13, NAN, INF, True, "1", None])
def test_a_noise_multiplier_out_of_range_is_refused(bad):
    with pytest.raises(ConfigurationError, match="noise_multiplier"):
        SparseVectorTest(0.5, bad)


@pytest.mark.parametrize("bad", [0, -1, 2.0, True, 2**20 + 1])
def test_a_number_of_rows_out_of_range_is_refused(bad):
    with pytest.raises(ConfigurationError, match="num_rows"):
        MADE.start(bad, rng=SYSTEM_RANDOM)


def test_the_classes_are_closed_frozen_and_describe_themselves_in_public_terms():
    assert json.loads(json.dumps(MADE.to_dict())) == MADE.to_dict()
    assert MADE.to_dict() == {"name": "sparse_vector", "threshold": 0.5, "noise_multiplier": 4.0}
    assert SparseVectorTest(0.5, 4) == MADE
    with pytest.raises(dataclasses.FrozenInstanceError):
        MADE.threshold = 0.1
    for closed in (SparseVectorTest, Threshold):
        with pytest.raises(TypeError, match="docs/proofs"):
            type("Derived", (closed,), {})
