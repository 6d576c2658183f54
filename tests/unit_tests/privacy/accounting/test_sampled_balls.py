"""Gaussian releases of a Poisson sample's sum of vectors out of a ball: what they cost where one is replaced."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import integrate
from scipy.stats import norm

from langchain_dpicl.exceptions import UnknownEventError
from langchain_dpicl.privacy.accounting import delta_upper_bound, epsilon_bound, epsilon_upper_bound
from langchain_dpicl.privacy.accounting import epsilon as _engine
from langchain_dpicl.privacy.accounting import profiles as _profiles
from langchain_dpicl.privacy.accounting.epsilon import normal_form
from langchain_dpicl.privacy.accounting.events import (
    Event,
    GaussianEvent,
    ParallelEvent,
    RepeatedEvent,
    SubsampledEvent,
    event_from_dict,
    event_to_dict,
)
from langchain_dpicl.privacy.extensions import gradient_sums
from langchain_dpicl.privacy.extensions.gradient_sums import SampledBallEvent
from langchain_dpicl.privacy.extensions.label_places import dominates

SIZE, BATCH = 67_349, 1_024
RATE, DELTA = BATCH / SIZE, 1 / SIZE
# (steps, noise over the clip) of the paper's SST-2, and the epsilon of dp-accounting 0.6 where a unit is replaced
SST2 = [(329, 0.7937, 3.761), (329, 0.5667, 8.973), (1316, 1.0384, 4.933), (1316, 0.6881, 10.608)]


def ball(noise: float, rate: float = 0.1) -> SampledBallEvent:
    return SampledBallEvent(noise, rate)


def price(event: Event, adjacency: str = "replace_one", delta: float = 1e-6) -> float:
    return epsilon_upper_bound(event, delta=delta, adjacency=adjacency)  # type: ignore[arg-type]


# --- second sources ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "noise", "epsilon"), SST2)
def test_the_references_are_met(steps: int, noise: float, epsilon: float) -> None:
    """The noise is that over the clip; a replaced gradient moves the sum by up to two of them."""
    event = RepeatedEvent(ball(noise / 2, RATE), steps)
    found = epsilon_bound(event, delta=DELTA, adjacency="replace_one")
    assert found.epsilon == pytest.approx(epsilon, rel=4e-4)
    assert found.opinions


def test_another_accountant_composes_the_same_pair() -> None:
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution as pld

    other = pld.from_gaussian_mechanism(
        1.5,
        sampling_prob=0.05,
        value_discretization_interval=1e-3,
        neighboring_relation=NeighboringRelation.REPLACE_ONE,
    )
    theirs = other.self_compose(40).get_epsilon_for_delta(1e-5)
    assert price(RepeatedEvent(ball(0.75, 0.05), 40), delta=1e-5) == pytest.approx(theirs, rel=2e-3)


@pytest.mark.parametrize("noise", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("rate", [0.003, 0.3, 0.95])
def test_the_profile_is_the_integral_it_stands_for(rate: float, noise: float) -> None:
    radius = 1 / (2 * noise)
    curve = gradient_sums.amplify_replaced_in_ball(radius, rate).up
    axis = np.linspace(-12, radius + 14, 400_001)
    p, q = ((1 - rate) * norm.pdf(axis) + rate * norm.pdf(axis, sign * radius) for sign in (1, -1))
    for x in (0.0, 1e-3, 0.02, 0.3, 1.0, 3.0):
        exact = integrate.trapezoid(np.maximum(p - math.exp(x) * q, 0.0), axis)
        assert curve(np.array([x]))[0] == pytest.approx(exact, rel=1e-6, abs=1e-10)


def test_no_two_vectors_of_the_ball_are_told_apart_better_than_opposite_ones() -> None:
    """Pairs of vectors, absent ones among them, integrated over the plane; one pair comes to the bound."""
    rate, noise = 0.2, 0.7
    axis = np.linspace(-1 - 6 * noise, 1 + 6 * noise, 200)
    xs, ys = np.meshgrid(axis, axis)
    cell = (axis[1] - axis[0]) ** 2

    def density(vector: tuple[float, float]) -> np.ndarray:
        there = norm.pdf(xs, vector[0], noise) * norm.pdf(ys, vector[1], noise)
        gone = norm.pdf(xs, 0.0, noise) * norm.pdf(ys, 0.0, noise)
        both: np.ndarray = (1 - rate) * gone + rate * there
        return both

    curve = gradient_sums.amplify_replaced_in_ball(1 / noise, rate).up
    corners = [(math.cos(a), math.sin(a)) for a in (0.5, 1.2, 2.0, 2.6, math.pi)]
    others = [(0.0, 0.0), (0.5, 0.0), (-0.5, 0.0), *corners]
    for x in (0.0, 0.1, 0.5):
        bound = float(curve(np.array([x]))[0])
        found = [
            float(np.maximum(density(one) - math.exp(x) * density(other), 0).sum() * cell)
            for other in others
            for one in ((1.0, 0.0), (0.6, 0.0))
        ]
        assert max(found) <= bound + 5e-5  # of the sum over cells
        assert max(found) >= 0.999 * bound


def test_a_fixed_batch_would_cost_what_a_known_attack_finds() -> None:
    """All other units alike: a batch of fixed size then shows whether the one unit is in it. 23 where 3 is claimed."""
    steps, noise, claimed = SST2[0][0], SST2[0][1], 3.0
    added = price(RepeatedEvent(SubsampledEvent(GaussianEvent(noise), RATE), steps), "add_remove", DELTA)
    attack = price(RepeatedEvent(SubsampledEvent(GaussianEvent(noise / 2), RATE), steps), "add_remove", DELTA)
    fixed = price(RepeatedEvent(SubsampledEvent(GaussianEvent(noise / 2), RATE), steps), "replace_one", DELTA)
    assert added == pytest.approx(claimed, abs=2e-3)
    assert attack == pytest.approx(23.26, abs=0.02)
    assert fixed == pytest.approx(24.81, abs=0.02)


# --- laws -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.4, 2.0])
@pytest.mark.parametrize("count", [1, 50])
def test_where_units_come_and_go_it_is_a_sampled_gaussian(noise: float, count: int) -> None:
    mine, usual = RepeatedEvent(ball(noise), count), RepeatedEvent(SubsampledEvent(GaussianEvent(noise), 0.1), count)
    assert price(mine, "add_remove") == price(usual, "add_remove")
    deltas = [delta_upper_bound(event, epsilon=1.0, adjacency="add_remove") for event in (mine, usual)]
    assert deltas[0] == deltas[1]
    heard = epsilon_bound(mine, delta=1e-6, adjacency="add_remove").opinions
    assert [opinion.name for opinion in heard] == ["prv-accountant"]


@pytest.mark.parametrize("noise", [0.3, 0.5, 2.0])
@pytest.mark.parametrize("count", [1, 100])
def test_where_units_are_replaced_it_costs_more_than_a_removal_and_less_than_what_knows_less(
    noise: float, count: int
) -> None:
    removed = price(RepeatedEvent(SubsampledEvent(GaussianEvent(2 * noise), 0.01), count), "add_remove")
    knows_less = price(RepeatedEvent(SubsampledEvent(GaussianEvent(noise), 0.01), count))
    assert removed < price(RepeatedEvent(ball(noise, 0.01), count)) < knows_less


def test_more_noise_fewer_units_and_fewer_steps_cost_less() -> None:
    louder = [price(RepeatedEvent(ball(noise, 0.02), 50)) for noise in (0.2, 0.3, 0.5, 1.0, 5.0, 50.0)]
    rarer = [price(RepeatedEvent(ball(0.5, rate), 50)) for rate in (1.0, 0.7, 0.2, 0.02, 1e-4)]
    fewer = [price(RepeatedEvent(ball(0.5, 0.02), count)) for count in (500, 50, 3, 1)]
    for prices in (louder, rarer, fewer):
        assert prices == sorted(prices, reverse=True)
        assert len(set(prices)) == len(prices)
    assert dominates(ball(0.5, 0.2), ball(0.6, 0.1))
    assert not dominates(ball(0.5, 0.1), ball(0.6, 0.2))
    assert not dominates(ball(0.6, 0.2), ball(0.5, 0.2))


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_a_sample_of_everybody_is_no_sample(adjacency: str) -> None:
    assert normal_form(ball(0.8, 1.0)) == normal_form(GaussianEvent(0.8))
    assert price(ball(0.8, 1.0), adjacency) == price(GaussianEvent(0.8), adjacency)
    nearly = price(ball(0.8, 1 - 1e-9), adjacency)
    assert nearly == pytest.approx(price(GaussianEvent(0.8), adjacency), rel=1e-5)


def test_extremes_have_a_price_or_none_at_all() -> None:
    assert price(ball(1e-6)) == math.inf
    assert 0.0 <= price(ball(1e9, 1e-9)) < 1e-6
    assert 0.0 < price(ball(0.02, 0.5)) < math.inf
    assert price(RepeatedEvent(ball(0.5, 0.02), 0)) == 0.0


def test_inside_other_events_it_keeps_its_price_or_more() -> None:
    """A label's branch under replace_one costs two of them; a sample of a sample no less than the product's rate."""
    alone = RepeatedEvent(ball(0.5, 0.02), 20)
    labelled = ParallelEvent("data", (("a", alone), ("b", alone)))
    assert price(labelled) == pytest.approx(price(RepeatedEvent(ball(0.5, 0.02), 40)), rel=1e-6)
    assert price(labelled, "add_remove") == price(alone, "add_remove")
    twice = price(RepeatedEvent(SubsampledEvent(ball(0.5, 0.2), 0.1), 20))
    assert price(RepeatedEvent(ball(0.5, 0.02), 20)) <= twice * (1 + 1e-6)


def test_it_is_kept_and_read_back_and_bad_numbers_are_refused() -> None:
    event = RepeatedEvent(ball(0.5, 0.02), 3)
    assert event_from_dict(event_to_dict(event)) == event
    assert event_to_dict(ball(0.5, 0.02)) == {"kind": "sampled_ball", "noise_multiplier": 0.5, "sampling_rate": 0.02}
    for noise, rate in ((0.0, 0.1), (-1.0, 0.1), (math.nan, 0.1), (1.0, 0.0), (1.0, 1.5), (True, 0.1)):
        with pytest.raises(UnknownEventError, match="SampledBallEvent"):
            SampledBallEvent(noise, rate)


# --- planted bugs -----------------------------------------------------------------------------------------------------


def test_a_forgotten_replacement_misses_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Priced as a removal, or by the radius where the diameter is meant."""
    for wrong in (
        lambda mu, rate, _: _profiles.amplify_poisson(_profiles.gaussian(mu / 2), rate),
        lambda mu, rate, _: gradient_sums.amplify_replaced_in_ball(mu / 4, rate),
        lambda mu, rate, _: gradient_sums.amplify_replaced_in_ball(mu, rate),
    ):
        for cached in (_engine.steps, _engine.bounds):
            cached.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(gradient_sums, "_ball_step", wrong)
            bounds = _engine.bounds(
                normal_form(RepeatedEvent(ball(0.7937 / 2, RATE), 329)), "replace_one", is_coarse=False
            )
            assert max(bounds[0].epsilons(DELTA)) != pytest.approx(3.761, rel=0.05)
    for cached in (_engine.steps, _engine.bounds):
        cached.cache_clear()
