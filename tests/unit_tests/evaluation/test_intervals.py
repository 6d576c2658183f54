"""Intervals hold as often as they say, over sample and noise together."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from langchain_dpicl.evaluation import Exact
from langchain_dpicl.evaluation.plan import Counted, NoisyRatio, plan_evaluation
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM

ALARM = 1e-6
RUNS = 300
PAIRS = (0.0, -1.0, 1.0, 0.0)


def noise(rng, scale, size):
    chance = -np.expm1(-1 / scale)
    return rng.geometric(chance, size) - rng.geometric(chance, size)


@pytest.mark.parametrize("of", ["population", "data"])
@pytest.mark.parametrize("case", [
    (2_000, (0.8, 0.2), (1.0, 0.0), 2.0, 1.0),
    (2_000, (0.95, 0.05), (1.0, 0.0), 1.0, 0.25),
    (150, (0.9, 0.1), (1.0, 0.0), 10.0, 1.0),
    (1_000, (0.6, 0.1, 0.2, 0.1), PAIRS, 2.0, 0.5),
    (800, (0.1, 0.2, 0.3, 0.4), (1.0, 2.0, 3.0, 5.0), 4.0, 1.0),
], ids=["accuracy", "small sample", "few units", "difference", "marks"])  # fmt: skip
def test_an_interval_misses_no_more_often_than_it_says(case, of):
    """Each holds the truth in at least 93 % of all runs, the normal part being an approximation; alarm 1e-6."""
    units, shares, scores, scale, rate = case
    rng, held = np.random.default_rng(), 0
    for _ in range(RUNS):
        data = rng.multinomial(units, shares)
        counts = rng.binomial(data, rate) + noise(rng, scale, len(shares))
        truth = np.dot(shares if of == "population" else data / units, scores)
        ratio = NoisyRatio(tuple(map(int, counts)), scores, (min(scores), max(scores)), scale, rate)
        held += bool(ratio.p_values([truth], of=of)[0] >= 0.05)
    assert held > stats.binom.ppf(ALARM, RUNS, 0.93)


@pytest.mark.parametrize("of", ["population", "data"])
@pytest.mark.parametrize("case", [
    (2_000, 0.8, 3, 4.0, 1.0), (2_000, 0.9, 10, 4.0, 1.0), (400, 0.95, 4, 10.0, 0.5), (60, 0.7, 14, 20.0, 1.0),
], ids=["three labels", "ten labels", "a sample", "few units"])  # fmt: skip
def test_an_accuracy_of_two_tables_misses_no_more_often_than_it_says(case, of):
    """The same units counted by label and answer, and by right and wrong; as above."""
    units, accuracy, labels, scale, rate = case
    scores = tuple(float(label == said) for label in range(labels) for said in range(labels + 1))
    shares = np.where(np.array(scores) > 0, accuracy / labels, (1 - accuracy) / labels**2)
    rng, held = np.random.default_rng(), 0
    for _ in range(RUNS):
        data = rng.multinomial(units, shares)
        read = rng.binomial(data, rate)
        right = int(np.dot(read, scores))
        counts, again = (
            read + noise(rng, scale, len(scores)),
            np.array([read.sum() - right, right]) + noise(rng, scale, 2),
        )
        truth = accuracy if of == "population" else np.dot(data, scores) / units
        found = NoisyRatio(
            tuple(map(int, counts)), scores, (0.0, 1.0), scale, rate, Counted(tuple(map(int, again)), (0.0, 1.0))
        )
        held += bool(found.p_values([truth], of=of)[0] >= 0.05)
    assert held > stats.binom.ppf(ALARM, RUNS, 0.93)


def test_planted_bug_a_second_table_whose_noise_is_left_out_is_seen():
    """The gap of both, with the noise that one of them would have alone: it misses far more often."""
    rng, held = np.random.default_rng(), 0
    for _ in range(RUNS):
        right = int(rng.binomial(100, 0.9))
        counts, again = (np.array([right, 100 - right]) + noise(rng, 20.0, 2) for _ in range(2))
        small = Counted(tuple(map(int, again)), (1.0, 0.0))
        found = NoisyRatio(tuple(map(int, counts)), (1.0, 0.0), (0.0, 1.0), 5.0, 1.0, small)
        held += bool(found.p_values([0.9])[0] >= 0.05)
    assert held < stats.binom.ppf(ALARM, RUNS, 0.93)


@pytest.mark.parametrize("counts", [((600, 150, 40, 10), (210, 790)), ((3, -9, 4, -2), (2, 5)), ((-3, -3), (-5, 2))])
def test_an_interval_of_two_tables_holds_its_value_where_both_agree_best(counts):
    first, second = counts
    scores = (1.0, *(0.0,) * (len(first) - 1))
    ratio = NoisyRatio(first, scores, (0.0, 1.0), 4.0, 1.0, Counted(second, (0.0, 1.0)))
    found = ratio.estimate()
    assert found.low <= found.value <= found.high
    if min(first + second) >= 0:
        assert ratio.p_values([found.value])[0] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("units", [50_000, 10**6, 10**8])
def test_an_interval_of_many_units_is_as_narrow_as_they_are_many(units):
    """It was [0, 1] where it fits between two points of a grid."""
    right = int(0.8023 * units)
    small = Counted((units - right, right), (0.0, 1.0))
    ratio = NoisyRatio((right, 0, units - right, 0), (1.0, 0.0, 0.0, 1.0), (0.0, 1.0), 4.0, 1.0, small)
    assert ratio.estimate().half_width == pytest.approx(1.96 * (0.8023 * 0.1977 / units) ** 0.5, rel=0.02)
    assert ratio.estimate(of="data").half_width < 20 / units + 5e-6


def test_an_interval_allows_for_a_large_mark_that_no_unit_of_the_sample_has():
    """One sample of eight has none; held in at least 93 % of all runs, alarm 1e-6."""
    rng, runs, scores, shares = np.random.default_rng(), 2_000, (0.0, 1.0, 100.0), (0.4895, 0.5, 0.0105)
    held = 0
    for _ in range(runs):
        counts = rng.multinomial(200, shares) + noise(rng, 0.2, 3)
        ratio = NoisyRatio(tuple(map(int, counts)), scores, (0.0, 100.0), 0.2, 1.0)
        held += bool(ratio.p_values([np.dot(shares, scores)])[0] >= 0.05)
    assert held > stats.binom.ppf(ALARM, runs, 0.93)


def test_an_interval_that_leaves_out_the_noise_is_seen():
    rng, held = np.random.default_rng(), 0
    for _ in range(RUNS):
        counts = rng.multinomial(150, (0.9, 0.1)) + noise(rng, 20.0, 2)
        held += bool(NoisyRatio(tuple(map(int, counts)), (1.0, 0.0), (0.0, 1.0), 0.05, 1.0).p_values([0.9])[0] >= 0.05)
    assert held < stats.binom.ppf(ALARM, RUNS, 0.93)


def test_the_ends_of_an_interval_are_where_the_chance_passes_the_alarm():
    ratio = NoisyRatio((812, 201), (1.0, 0.0), (0.0, 1.0), 2.0, 1.0)
    found = ratio.estimate(confidence=0.9)
    assert found.low < found.value < found.high
    inside, outside = (
        ratio.p_values([found.low + 1e-3, found.high - 1e-3]),
        ratio.p_values([found.low - 1e-3, found.high + 1e-3]),
    )
    assert (inside >= 0.1).all()
    assert (outside < 0.1).all()


@pytest.mark.parametrize("counts", [(0, 0), (-5, -4), (3, -3)])
def test_counts_that_add_up_to_nothing_say_nothing(counts):
    found = NoisyRatio(counts, (1.0, 0.0), (0.0, 1.0), 8.0, 1.0).estimate()
    assert found.high - found.low > 0.5
    assert 0.0 <= found.low <= found.value <= found.high <= 1.0


@pytest.mark.parametrize("counts", [(-7, 4), (4, -7), (-3, -3)])
def test_an_interval_holds_its_value_where_noise_left_no_answers(counts):
    found = NoisyRatio(counts, (1.0, 0.0), (0.0, 1.0), 2.0, 1.0).estimate()
    assert found.low <= found.value <= found.high


def test_more_right_answers_than_answers_are_nearly_all_right():
    found = NoisyRatio((805, -12), (1.0, 0.0), (0.0, 1.0), 1.0, 1.0).estimate()
    assert 0.97 < found.low <= found.value == found.high == 1.0


@pytest.mark.parametrize("of", ["population", "data"])
@pytest.mark.parametrize(("counts", "scale"), [((100, -36), 10.0), ((11, -10), 2.0), ((43, -10), 2.0)])
def test_where_no_mean_goes_with_the_counts_the_likeliest_are_taken(counts, scale, of):
    found = NoisyRatio(counts, (1.0, 0.0), (0.0, 1.0), scale, 1.0).estimate(of=of)
    assert found.low <= found.value <= found.high


def test_confidence_is_a_chance():
    with pytest.raises(ConfigurationError, match="confidence"):
        NoisyRatio((1, 1), (1.0, 0.0), (0.0, 1.0), 1.0, 1.0).estimate(confidence=1.0)


@pytest.mark.parametrize("accuracy", [0.7, 0.8, 0.9])
@pytest.mark.parametrize("labels", [None, 2, 3, 4, 10, 14, 77])
def test_two_thousand_units_at_half_an_epsilon_are_within_a_tenth_of_no_noise(labels, accuracy):
    widths = [2 if labels is None else Exact.widths(labels)]
    expected = plan_evaluation(2_000, widths=widths, epsilon=0.5, delta=1e-6).expected(accuracy)
    assert expected["population"] <= 1.1 * 1.96 * (accuracy * (1 - accuracy) / 2_000) ** 0.5
    assert expected["data"] < 0.006


@pytest.mark.parametrize("widths", [2, 6, 110, Exact.widths(2), Exact.widths(10)], ids=str)
def test_the_expected_width_allows_for_the_noise_of_every_outcome(widths):
    """Of 15 releases with all right answers in one cell: the median width of what is found is what the plan says."""
    plan = plan_evaluation(2_000, widths=[widths], epsilon=0.5, delta=1e-6)
    rows = np.repeat(np.arange(2.0), [1_600, 400])[:, None].repeat(len(plan.widths[0]), axis=1)
    found = []
    for _ in range(15):
        counts, *again = plan.release.release(rows, rng=SYSTEM_RANDOM)
        scores = (1.0, *(0.0,) * (len(counts) - 1))
        more = (Counted(one, (1.0, 0.0)) for one in again)
        ratio = NoisyRatio(counts, scores, (0.0, 1.0), float(plan.release.scale), 1.0, *more)
        found.append(ratio.estimate().half_width)
    assert np.median(found) == pytest.approx(plan.expected()["population"], rel=0.1)


@pytest.mark.parametrize(
    "widths", [[], [()], [(6, 2, 2)], ["6"], [[6, 2]], [0], [True], 5, None, Exact.widths(10)], ids=str
)
def test_widths_that_are_none_are_refused(widths):
    with pytest.raises(ConfigurationError, match="widths"):
        plan_evaluation(2_000, widths=widths, epsilon=0.5, delta=1e-6)
