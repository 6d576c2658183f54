"""What labelling by teachers costs: published settings, priced by our events and by second sources written here.

All prices are independent of the data. delta is 1e-6 throughout.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import optimize, stats

from langchain_dpicl.privacy.accounting import epsilon_upper_bound
from langchain_dpicl.privacy.accounting.events import GaussianEvent, RepeatedEvent, SubsampledEvent
from langchain_dpicl.privacy.extensions.confident_gnmax import ConfidentGNMaxMechanism
from langchain_dpicl.privacy.extensions.fixed_size_slots import PartitionedSlots
from langchain_dpicl.privacy.mechanisms.bounded import VoteSum
from langchain_dpicl.privacy.mechanisms.release_plan import GaussianMechanism, PoissonUnits, ReleasePlan

DELTA, QUERIES, TEACHERS, SIGMA = 1e-6, 500, 200, 20.0
SST2, AGNEWS = 6_920, 46_377
"""Numbers of private records of the two settings."""


def gdp_delta(mu, epsilon):
    """The profile of N(mu, 1) against N(0, 1) (Balle and Wang 2018, Theorem 8)."""
    gap = stats.norm.logcdf(-epsilon / mu - mu / 2)
    return stats.norm.cdf(-epsilon / mu + mu / 2) - math.exp(epsilon + gap)


def gdp_epsilon(mu):
    """Inverts it."""
    return optimize.brentq(lambda epsilon: gdp_delta(mu, epsilon) - DELTA, 0, 1000, xtol=1e-13)


def sampled_delta(mu, rate, epsilon):
    """The larger profile of (1 - q) N(0, 1) + q N(mu, 1) against N(0, 1), and the other way round, by Neyman-Pearson."""

    def tail(above, side):
        """P[side * (N - above) > 0] for the two normals."""
        return stats.norm.sf(side * above), stats.norm.sf(side * (above - mu))

    def best(log_ratio, side):
        """(mixture, plain) chances of where the ratio N(mu, 1) : N(0, 1) is beyond exp(log_ratio)."""
        plain, moved = tail(log_ratio / mu + mu / 2, side)
        return (1 - rate) * plain + rate * moved, plain

    mixture, plain = best(math.log((math.exp(epsilon) - 1 + rate) / rate), side=1)
    removed = mixture - math.exp(epsilon) * plain
    low = (math.exp(-epsilon) - 1 + rate) / rate
    if low <= 0:  # the mixture is nowhere so small
        return removed
    mixture, plain = best(math.log(low), side=-1)
    return max(removed, plain - math.exp(epsilon) * mixture)


def sampled_epsilon(mu, rate):
    """Inverts it."""
    return optimize.brentq(lambda epsilon: sampled_delta(mu, rate, epsilon) - DELTA, 1e-9, 20, xtol=1e-13)


def plan(sampler, adjacency):
    """Returns noisy histograms with a standard deviation of 20 votes."""
    l2 = VoteSum().sensitivity(row_shape=sampler.row_shape, adjacency=adjacency).require("l2")
    return ReleasePlan(sampler, VoteSum(), GaussianMechanism(SIGMA / l2), adjacency)


def cost(event, adjacency):
    return epsilon_upper_bound(event, delta=DELTA, adjacency=adjacency)


# --- the three kinds of teachers, 500 inputs, about 200 teachers, 20 votes of noise ------------------------------------


def test_fixed_teachers_cost_8_31():
    made = plan(PartitionedSlots(TEACHERS, 1, SST2), "replace_one")
    found = cost(made.event(QUERIES), "replace_one")
    assert found == pytest.approx(8.31, abs=5e-3)
    assert found == pytest.approx(gdp_epsilon(math.sqrt(2 * QUERIES) / SIGMA), rel=3e-7)


@pytest.mark.parametrize(("size", "stated"), [(SST2, 1.3846), (AGNEWS, 0.22568)])
def test_one_secret_sample_for_the_run_is_amplified_once(size, stated):
    """A closed form: one Gaussian of all the releases, sampled."""
    made = plan(PoissonUnits(TEACHERS / size), "add_remove")
    found = cost(made.block_event(QUERIES), "add_remove")
    assert found == pytest.approx(stated, rel=1e-4)
    assert found == pytest.approx(sampled_epsilon(math.sqrt(QUERIES) / SIGMA, TEACHERS / size), rel=1e-6)


def test_the_rounded_figure_of_1_39_belongs_to_a_rate_rounded_to_0_029():
    """200 of 6,920 is 0.028902, which costs 1.385; only the rounded rate costs what rounds to 1.39."""
    mu = math.sqrt(QUERIES) / SIGMA
    assert round(sampled_epsilon(mu, TEACHERS / SST2), 2) == 1.38
    assert round(sampled_epsilon(mu, 0.029), 2) == 1.39


def repeated_sampled_epsilon(mu, rate, count, step=2e-6, cells=2**18):
    """`count` fresh samples: losses on a grid of `step`, each rounded to the nearest, added up by a Fourier transform."""
    edges = (np.arange(cells + 1) - cells / 2 - 0.5) * step
    ratio = (np.exp(np.abs(edges)) - 1 + rate) / rate, (np.exp(-np.abs(edges)) - 1 + rate) / rate

    def mass(sign):
        """Of the loss under the mixture (sign 1), or of the other loss under N(0, 1) (sign -1)."""
        above = np.where(sign * edges >= 0, *ratio)
        x = np.log(np.maximum(above, 1e-300)) / mu + mu / 2  # where the loss is `sign * edges` under the mixture
        chance = stats.norm.cdf(x) if sign < 0 else (1 - rate) * stats.norm.cdf(x) + rate * stats.norm.cdf(x - mu)
        return sign * np.diff(chance)

    def delta(masses, epsilon):
        losses = (np.arange(cells) - cells / 2) * step
        return float(masses @ np.maximum(-np.expm1(epsilon - losses), 0))

    def epsilon(sign):
        once = np.fft.rfft(np.fft.ifftshift(mass(sign)))
        masses = np.fft.fftshift(np.fft.irfft(once**count, cells))
        return optimize.brentq(lambda x: delta(masses, x) - DELTA, 0, 0.2, xtol=1e-9)

    return max(epsilon(1), epsilon(-1))


@pytest.mark.parametrize(("size", "stated"), [(SST2, 0.11924), (AGNEWS, 0.015362)])
def test_fresh_teachers_per_input_cost_least(size, stated):
    """Above the second source by less than 2 in 10,000, as our losses are rounded up: three digits hold."""
    made = plan(PoissonUnits(TEACHERS / size), "add_remove")
    found = cost(made.event(QUERIES), "add_remove")
    reference = repeated_sampled_epsilon(1 / SIGMA, TEACHERS / size, QUERIES)
    assert found == pytest.approx(stated, rel=1e-4)
    assert reference <= found <= reference * (1 + 2e-4)


# --- confident answers from a fixed partition: a table of prices, all inputs answered ----------------------------------

COUNTS = (1, 100, 200, 500)
TABLE = {
    (180, 1, 20): (4.9004, 97.0856, 167.0298, 356.8987),
    (180, 5, 20): (0.8887, 11.8112, 18.1634, 33.1069),
    (390, 1, 50): (4.8888, 96.7762, 166.4691, 355.6260),
    (320, 5, 50): (0.8430, 11.1296, 17.0721, 30.9885),
}
"""(threshold, its noise, the noise of the votes): epsilons of 1, 100, 200 and 500 inputs, to four decimals."""
ANSWERS_ONLY = {20: (0.2740, 3.3076, 4.8866, 8.3062), 50: (0.1029, 1.2120, 1.7656, 2.9216)}


def confident(threshold, sigma_threshold, sigma_votes):
    return ConfidentGNMaxMechanism.of_votes(
        threshold=threshold,
        sigma_threshold=sigma_threshold,
        sigma_votes=sigma_votes,
        row_shape="slots",
        adjacency="replace_one",
    )


@pytest.mark.parametrize("setting", TABLE, ids=str)
def test_confident_answers_cost_what_the_table_says(setting):
    """To its four decimals; the closed form agrees to 1.1e-6, as prices are rounded up at the seventh digit."""
    made = confident(*setting)
    mu_squared = 1 / setting[1] ** 2 + 2 / setting[2] ** 2
    for inputs, stated in zip(COUNTS, TABLE[setting], strict=True):
        found = cost(made.repeated(inputs, inputs), "replace_one")
        assert found == pytest.approx(stated, abs=0.5e-4 + 1.1e-6 * stated)
        assert found == pytest.approx(gdp_epsilon(math.sqrt(inputs * mu_squared)), rel=1.1e-6)


@pytest.mark.parametrize("sigma_votes", ANSWERS_ONLY)
def test_answers_without_tests_cost_what_the_table_says(sigma_votes):
    made = confident(0.0, 1.0, sigma_votes)
    for inputs, stated in zip(COUNTS, ANSWERS_ONLY[sigma_votes], strict=True):
        found = cost(RepeatedEvent(made.answer_event, inputs), "replace_one")
        assert found == pytest.approx(stated, abs=0.5e-4 + 1.1e-6 * stated)


def test_an_input_without_an_answer_costs_its_test_alone():
    made = confident(180, 5, 20)
    found = [cost(made.repeated(500, answers), "replace_one") for answers in (0, 100, 500)]
    assert found == sorted(found)
    assert found[0] == pytest.approx(gdp_epsilon(math.sqrt(500) / 5), rel=1.1e-6)
    assert found[1] == pytest.approx(gdp_epsilon(math.sqrt(500 / 25 + 100 * 2 / 400)), rel=1.1e-6)


def test_one_noisy_histogram_makes_the_threshold_free():
    """Threshold and label from one release of 20 votes of noise: 8.3 where the two questions cost 33.1."""
    histogram = plan(PartitionedSlots(TEACHERS, 1, SST2), "replace_one").event(QUERIES)
    both = confident(180, 5, 20).repeated(QUERIES, QUERIES)
    assert cost(histogram, "replace_one") == pytest.approx(ANSWERS_ONLY[20][-1], abs=1e-4)
    assert cost(histogram, "replace_one") < cost(both, "replace_one") / 3


# --- planted mistakes in a price ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event",
    [
        RepeatedEvent(GaussianEvent(SIGMA), QUERIES),  # the forgotten sqrt(2)
        SubsampledEvent(
            RepeatedEvent(GaussianEvent(SIGMA / math.sqrt(2)), QUERIES), TEACHERS / SST2
        ),  # an open partition
        RepeatedEvent(GaussianEvent(SIGMA / math.sqrt(2)), QUERIES - 1),
    ],
    ids=["no sqrt 2", "a partition taken for a sample", "one input too few"],
)
def test_a_mistake_in_the_price_of_fixed_teachers_is_seen(event):
    assert cost(event, "replace_one") != pytest.approx(gdp_epsilon(math.sqrt(2 * QUERIES) / SIGMA), rel=1e-3)


def test_one_sample_priced_as_fresh_ones_would_be_far_too_cheap():
    rate = TEACHERS / SST2
    fresh = RepeatedEvent(SubsampledEvent(GaussianEvent(SIGMA), rate), QUERIES)
    assert cost(fresh, "add_remove") < sampled_epsilon(math.sqrt(QUERIES) / SIGMA, rate) / 10
