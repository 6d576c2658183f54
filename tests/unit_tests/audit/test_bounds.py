"""What counts prove: every number has a second source."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from scipy import special, stats

from langchain_dpicl.audit import game
from langchain_dpicl.audit.component_games import right_guesses, right_without_noise
from langchain_dpicl.audit.game import prove_bounds
from langchain_dpicl.exceptions import UnknownEventError
from langchain_dpicl.privacy.accounting import epsilon_upper_bound
from langchain_dpicl.privacy.accounting.events import (
    BoundedRangeEvent,
    GaussianEvent,
    PureEvent,
    RepeatedEvent,
    SubsampledEvent,
)
from langchain_dpicl.privacy.extensions.gradient_sums import SampledBallEvent
from tests.contracts.mechanism import permute_and_flip, softmax

EVENTS = [
    GaussianEvent(0.5),
    BoundedRangeEvent(2.0),
    PureEvent(2.0),
    SubsampledEvent(GaussianEvent(0.5), 0.3),
    SubsampledEvent(BoundedRangeEvent(2.0), 0.3),
    SubsampledEvent(PureEvent(2.0), 0.3),
]
ROOT = math.sqrt(2.0)


def kind(event: object) -> str:
    return type(event).__name__


@pytest.mark.parametrize(("hits", "runs"), [(0, 10), (1, 10), (7, 10), (10, 10), (431, 1000)])
def test_bounds_of_a_chance_are_those_of_clopper_and_pearson(hits: int, runs: int) -> None:
    interval = stats.binomtest(hits, runs).proportion_ci(confidence_level=1 - 2e-6, method="exact")
    assert game.clopper_pearson_lower(hits, runs, 1e-6) == pytest.approx(interval.low, rel=1e-9)
    assert game.clopper_pearson_upper(hits, runs, 1e-6) == pytest.approx(interval.high, rel=1e-9)


@pytest.mark.parametrize("event", EVENTS, ids=kind)
def test_what_an_event_allows_is_where_the_loss_is_what_it_claims(event: object) -> None:
    for without in (1e-6, 0.01, 0.3, 0.5, 0.9):
        most = float(game.max_chances(event, np.array(without)))
        assert without < most < 1.0
        assert game.min_parameter(event, most, without) == pytest.approx(game.claimed_loss(event), rel=1e-6)
        assert game.min_parameter(event, most - 1e-4, without) < game.claimed_loss(event)


@pytest.mark.parametrize("event", EVENTS, ids=kind)
def test_the_power_is_the_sum_over_all_pairs_of_counts(event: object) -> None:
    runs, alarm, chances = 30, 0.01, (0.97, 0.06)
    pmf = [stats.binom.pmf(np.arange(runs + 1), runs, chance) for chance in chances]
    expected = 0.0
    least = [game.clopper_pearson_lower(hits, runs, alarm) for hits in range(runs + 1)]
    most = [game.clopper_pearson_upper(hits, runs, alarm) for hits in range(runs + 1)]
    for one, other in itertools.product(range(runs + 1), repeat=2):
        lost = game.min_parameter(event, least[one], most[other])
        if lost > game.claimed_loss(event):
            expected += pmf[0][one] * pmf[1][other]
    assert game.refutation_power(event, chances, runs=runs, alarm=alarm) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("mu", "factor", "runs"), [(1.0, 2.0, 339), (2.0, ROOT, 707), (2.0, 2.0, 191), (2.0, 4.0, 84), (3.0, 2.0, 280)]
)
def test_sizes_are_those_of_the_table_of_optimal_gaussian_tests(mu: float, factor: float, runs: int) -> None:
    """Power .99 at a false alarm of 1e-6, to 4 % of the runs; a tenth fewer do not reach it, and sound claims do not either."""
    half = mu * factor / 2
    chances = (float(special.ndtr(half)), float(special.ndtr(-half)))
    assert game.refutation_power(GaussianEvent(1 / mu), chances, runs=math.ceil(1.04 * runs)) >= 0.99
    assert game.refutation_power(GaussianEvent(1 / mu), chances, runs=round(0.9 * runs)) < 0.99
    assert game.refutation_power(GaussianEvent(1 / (mu * factor)), chances, runs=2 * runs) <= 1e-6


@pytest.mark.parametrize("mu", [0.1, 1.0, 3.7])
def test_the_epsilon_of_a_mu_is_what_the_accountant_says(mu: float) -> None:
    upper = epsilon_upper_bound(GaussianEvent(1 / mu), delta=1e-6, adjacency="add_remove")
    assert game.gaussian_epsilon(mu, 1e-6) == pytest.approx(upper, rel=2e-3)
    assert game.gaussian_epsilon(mu, 1e-6) <= upper


def test_an_epsilon_that_is_seen_is_below_the_true_one() -> None:
    """Randomised response attains its epsilon; of a Gaussian the best test is given as its mu."""
    yes = float(special.expit(1.5))
    assert game.epsilon_lower_bound(PureEvent(1.5), yes, 1 - yes, 1e-9) == pytest.approx(1.5, abs=1e-6)
    chances = float(special.ndtr(1.0)), float(special.ndtr(-1.0))
    assert game.epsilon_lower_bound(GaussianEvent(0.5), *chances, 1e-6) == pytest.approx(
        game.gaussian_epsilon(2.0, 1e-6), rel=1e-9
    )
    assert game.epsilon_lower_bound(PureEvent(1.0), 0.3, 0.5, 1e-6) == 0.0


def test_a_step_on_everybody_is_a_gaussian_and_several_releases_are_refused() -> None:
    assert game.claimed_loss(SampledBallEvent(0.5, 1.0)) == 2.0
    assert game.unit_of(BoundedRangeEvent(1.0)) == "range"
    with pytest.raises(UnknownEventError):
        game.claimed_loss(RepeatedEvent(GaussianEvent(1.0), 2))


def test_an_epsilon_is_proved_by_the_chances_of_an_outcome_among_all_trials_and_a_range_by_its_odds() -> None:
    """Outcomes a, b and many others of a mechanism of epsilon 1: given that it is a or b, a is e^1.5 times as likely."""
    trials, counts = (1_000_000, 1_000_000), (Counter(a=27_183, b=33_109), Counter(a=10_000, b=90_000))
    found = prove_bounds(BoundedRangeEvent(2.0), counts, ("a",), trials=trials)
    assert 0.9 < found.epsilon <= 1.0
    assert 1.9 < found.found <= 2.0
    assert found.refuted == []


# --- laws -------------------------------------------------------------------------------------------------------------

SUMS = (3.0, 2.0, 2.0, 0.0)


@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
def test_chances_to_win_are_those_of_the_definitions(scale: float) -> None:
    for place in range(4):
        assert game.gumbel_wins(SUMS, place, scale) == pytest.approx(softmax(SUMS, scale)[place], rel=1e-9)
        found = game.exponential_wins(SUMS, place, scale)
        assert found == pytest.approx(permute_and_flip(SUMS, scale)[place], rel=1e-9, abs=1e-15)
    assert sum(game.gaussian_wins(SUMS, place, scale) for place in range(4)) == pytest.approx(1.0, abs=1e-9)
    assert game.gaussian_wins((1.0, 0.0), 0, scale) == pytest.approx(stats.norm.cdf(1 / (scale * ROOT)), rel=1e-12)


def test_a_factor_makes_the_noise_smaller() -> None:
    law = game.index_law("gumbel", ((1.0, 0.0), (0.0, 1.0)), scale=1.0)
    assert law(2.0) == pytest.approx((special.expit(2.0), special.expit(-2.0)))
    assert game.odds_law((1.0, -1.0))(2.0) == pytest.approx(law(2.0))
    assert game.vector_law((1.0, 0.0), scale=0.5, threshold=0.5)(2.0) == pytest.approx(
        (special.ndtr(2.0), special.ndtr(-2.0))
    )


# --- one run ----------------------------------------------------------------------------------------------------------


def test_right_guesses_prove_what_randomised_response_needs_for_them() -> None:
    """Without delta: 400 right of 400 leave an epsilon whose coin falls right 400 times with chance 1e-6."""
    coin = 1e-6 ** (1 / 400)
    assert game.lower_bound(400, 400, delta=0.0, canaries=400) == pytest.approx(np.log(coin / (1 - coin)), rel=1e-9)
    assert game.lower_bound(200, 400, delta=0.0, canaries=400) == 0.0
    with_delta = game.lower_bound(390, 400, delta=1e-4, canaries=400)
    assert with_delta < game.lower_bound(390, 400, delta=0.0, canaries=400)
    assert game.lower_bound(400, 400, delta=0.0, canaries=400, alarm=0.9999) < 50


def pure_least(epsilon: float) -> game.Least:
    """Returns the curve of pure epsilon-DP, which randomised response attains."""
    return lambda x: max(math.exp(-epsilon) * x, 1.0 - math.exp(epsilon) * (1.0 - x))


@pytest.mark.parametrize("epsilon", [0.5, 1.5, 4.0])
def test_a_curve_refuses_no_more_guesses_than_its_worst_mechanism_can_have(epsilon: float) -> None:
    """Randomised response answers every canary by a coin of its own: its tail is binomial, exactly."""
    for guesses in (40, 200):
        for alarm in (1e-6, 1e-3, 0.3):
            tails = stats.binom.sf(np.arange(guesses + 1) - 1, guesses, special.expit(epsilon))
            for right in range(guesses // 2, guesses + 1):
                if not game.is_possible(pure_least(epsilon), right, guesses, canaries=guesses, alarm=alarm):
                    assert tails[right] <= alarm, (guesses, alarm, right)
    assert not game.is_possible(pure_least(0.5), 200, 200, canaries=200)


def test_a_mu_that_is_proved_is_below_the_true_one_and_near_enough_to_tell() -> None:
    """300 games with normal scores at mu 1: none above 1, at an alarm of .01 (expected: at most 3); the median is printed."""
    rng, found = np.random.default_rng(1), []
    for _ in range(300):
        present = rng.random(400) < 0.5
        order = np.argsort(rng.normal(size=400) + present)
        right = int(present[order[-100:]].sum() + (~present[order[:100]]).sum())
        found.append(right)
    assert game.lower_mu(max(found), 200, canaries=400, alarm=0.01) <= 1.0
    assert game.lower_mu(int(np.median(found)), 200, canaries=400) > 0.1


def test_guesses_that_prove_nothing_at_a_usual_delta_prove_something_at_a_tiny_one() -> None:
    assert game.lower_bound(200, 200, delta=1e-6, canaries=400) == 0.0
    assert game.lower_bound(200, 200, delta=game.TINY_DELTA, canaries=400) > 2.0
    assert game.lower_mu(200, 200, canaries=400) > 0.7


@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize("share", [0.05, 0.4, 0.634, 0.9, 0.996, 1.0])
def test_as_many_guesses_as_stated_are_right_where_there_is_no_noise(share: float, is_replaced: bool) -> None:
    """300 runs: the bound is 5 standard deviations off twice, so that none is below; and it is not far below all."""
    rng, found, count = np.random.default_rng(3), [], 1_000
    for _ in range(300):
        present, drawn = rng.random(count) < 0.5, rng.random(count) < share
        moved = np.where(present, 1.0, -1.0 if is_replaced else 0.0) * drawn
        found.append(right_guesses(moved + 1e-9 * rng.random(count), present, count // 2))
    least = right_without_noise(share, count=count, is_replaced=is_replaced)
    assert least <= min(found)
    assert least > np.mean(found) - 130
