"""Laws that hold for every event, whatever its price."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from langchain_dpicl.privacy import second_opinions as _opinions
from langchain_dpicl.privacy.accounting import (
    calibrate,
    delta_upper_bound,
    epsilon_bound,
    epsilon_upper_bound,
    gdp_epsilon,
    zcdp_epsilon,
)
from langchain_dpicl.privacy.accounting import epsilon as _engine
from langchain_dpicl.privacy.accounting import profiles as _profiles
from langchain_dpicl.privacy.accounting.epsilon import Terms, normal_form, unit_terms
from langchain_dpicl.privacy.accounting.events import (
    BoundedRangeEvent,
    ComposedEvent,
    Event,
    GaussianEvent,
    NoEvent,
    ParallelEvent,
    PureEvent,
    RepeatedEvent,
    SubsampledEvent,
)
from langchain_dpicl.privacy.extensions.label_places import dominates
from tests.strategies import (
    ADJACENCIES,
    COUNTS,
    DELTAS,
    NOISES,
    RATES,
    compositions,
    leaves,
    noisier,
    parallels,
    sampled,
    steps,
)

laws = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
few = settings(laws, max_examples=10)


def price(event: Event, delta: float, adjacency: str) -> float:
    return epsilon_upper_bound(event, delta=delta, adjacency=adjacency)


@laws
@given(steps(), COUNTS, DELTAS, ADJACENCIES)
def test_one_step_more_never_costs_less(step: Event, count: int, delta: float, adjacency: str) -> None:
    costs = [price(RepeatedEvent(step, n), delta, adjacency) for n in (count, count + 1, 3 * count)]
    assert costs == sorted(costs)


@laws
@given(sampled(), DELTAS, ADJACENCIES)
def test_counts_are_never_ignored(step: Event, delta: float, adjacency: str) -> None:
    """A hundred times as many steps must cost visibly more, unless one step's cost vanishes at this delta."""
    few_steps, many = (price(RepeatedEvent(step, n), delta, adjacency) for n in (10, 1000))
    assert many > few_steps * 1.5 or many == 0.0


@laws
@given(st.lists(steps(), min_size=2, max_size=4), st.randoms(use_true_random=False), DELTAS, ADJACENCIES)
def test_order_and_grouping_of_composition_do_not_matter(
    parts: list[Event], rng: random.Random, delta: float, adjacency: str
) -> None:
    shuffled = list(parts)
    rng.shuffle(shuffled)
    nested = ComposedEvent((ComposedEvent(tuple(shuffled[:2])), *shuffled[2:]))
    assert price(ComposedEvent(tuple(parts)), delta, adjacency) == price(nested, delta, adjacency)


@laws
@given(steps(), st.integers(1, 12), st.integers(1, 12), DELTAS, ADJACENCIES)
def test_repetition_is_composition(step: Event, m: int, n: int, delta: float, adjacency: str) -> None:
    nested = RepeatedEvent(RepeatedEvent(step, m), n)
    split = ComposedEvent((RepeatedEvent(step, m * n - 1), step))
    assert price(nested, delta, adjacency) == price(RepeatedEvent(step, m * n), delta, adjacency)
    assert price(split, delta, adjacency) == price(RepeatedEvent(step, m * n), delta, adjacency)


@laws
@given(leaves(), st.tuples(RATES, st.floats(0.1, 0.95)), COUNTS, DELTAS, ADJACENCIES)
def test_a_lower_sampling_rate_never_costs_more(
    leaf: Event, rates: tuple[float, float], count: int, delta: float, adjacency: str
) -> None:
    rate, share = rates
    rarer, often, always = (
        price(RepeatedEvent(SubsampledEvent(leaf, q), count), delta, adjacency) for q in (rate * share, rate, 1.0)
    )
    assert rarer <= often * (1 + 1e-9)
    assert often <= always * (1 + 2e-3) + 1e-9


@laws
@given(sampled(), COUNTS, DELTAS)
def test_replacing_costs_at_least_what_removing_does(step: Event, count: int, delta: float) -> None:
    event = RepeatedEvent(step, count)
    assert price(event, delta, "replace_one") >= price(event, delta, "add_remove") * (1 - 2e-3) - 1e-9


@laws
@given(compositions(), DELTAS, ADJACENCIES)
def test_delta_and_epsilon_invert_each_other(event: Event, delta: float, adjacency: str) -> None:
    epsilon = price(event, delta, adjacency)
    assert delta_upper_bound(event, epsilon=epsilon, adjacency=adjacency) <= delta * (1 + 1e-5)
    if epsilon > 0:
        assert delta_upper_bound(event, epsilon=epsilon * 0.98, adjacency=adjacency) > delta * 0.9999


@laws
@given(st.lists(st.tuples(NOISES, st.integers(1, 500)), min_size=1, max_size=4), DELTAS, ADJACENCIES)
def test_gaussians_cost_the_exact_closed_form(parts: list[tuple[float, int]], delta: float, adjacency: str) -> None:
    event = ComposedEvent(tuple(RepeatedEvent(GaussianEvent(noise), count) for noise, count in parts))
    mu = math.sqrt(sum(count / noise**2 for noise, count in parts))
    assert price(event, delta, adjacency) == pytest.approx(gdp_epsilon(mu, delta), rel=1e-5)


@pytest.mark.parametrize("bound", [37.0, 100.0, 1000.0, 1e5])
def test_an_attack_on_choices_without_noise_is_a_number_below_what_nobody_exceeds(bound: float) -> None:
    assert 0.97 * 3 * bound < _opinions.range_attack(bound, 3, delta=1e-6) <= 3 * bound


@laws
@given(st.floats(0.02, 4.0), COUNTS, DELTAS, ADJACENCIES)
def test_choices_cost_at_least_the_attack_and_at_most_every_theorem(
    bound: float, count: int, delta: float, adjacency: str
) -> None:
    found = price(RepeatedEvent(BoundedRangeEvent(bound), count), delta, adjacency)
    assert found >= _opinions.range_attack(bound, count, delta=delta) * (1 - 1e-6)
    assert found <= zcdp_epsilon(count * bound**2 / 8, delta) * (1 + 1e-6)
    assert found <= price(RepeatedEvent(PureEvent(bound), count), delta, adjacency) * (1 + 1e-6)


@few
@given(compositions(), DELTAS, ADJACENCIES)
def test_an_independent_computation_agrees(event: Event, delta: float, adjacency: str) -> None:
    bound = epsilon_bound(event, delta=delta, adjacency=adjacency)  # raises where it does not
    for opinion in bound.opinions:
        assert opinion.lower <= bound.epsilon * (1 + 1e-6)
        assert opinion.upper >= bound.epsilon * 0.98 - 0.02 or "FFT" in opinion.name


@laws
@given(compositions(), DELTAS, ADJACENCIES)
def test_moments_are_a_looser_bound_on_the_same_steps(event: Event, delta: float, adjacency: str) -> None:
    terms = unit_terms(event, adjacency)[0].terms
    if not terms.is_empty:
        assert (
            max(_engine.last_resort(terms, adjacency).epsilons(delta))
            >= price(event, delta, adjacency) * (1 - 1e-3) - 1e-9
        )


@laws
@given(compositions(), DELTAS, ADJACENCIES)
def test_coarse_prices_are_bounds_too(event: Event, delta: float, adjacency: str) -> None:
    terms = unit_terms(event, adjacency)[0].terms
    if not terms.is_empty:
        rough, fine = (
            min(max(b.epsilons(delta)) for b in _engine.bounds(terms, adjacency, is_coarse=c)) for c in (True, False)
        )
        assert rough >= fine * (1 - 1e-4) - 1e-9


@laws
@given(sampled(), ADJACENCIES, st.floats(0.02, 0.5))
def test_every_sampled_step_becomes_a_distribution(event: Event, adjacency: str, fraction: float) -> None:
    for profile, _ in _engine.steps(normal_form(event), adjacency):
        for pair in (profile, profile.reversed()):
            _, masses, infinite = _profiles.loss_masses(pair, fraction * _profiles.spread(pair))
            assert masses.sum() + infinite == pytest.approx(1.0, abs=1e-8)


@laws
@given(leaves(), RATES, ADJACENCIES)
def test_profiles_are_convex_and_fall(leaf: Event, rate: float, adjacency: str) -> None:
    ((profile, _),) = _engine.steps(normal_form(SubsampledEvent(leaf, rate)), adjacency)
    for curve, top in ((profile.up, profile.top_up), (profile.down, profile.top_down)):
        x = np.linspace(0, top, 301)
        y = curve(x)
        assert (np.diff(y) <= 1e-15).all()
        slopes = np.diff(y) / np.diff(np.exp(x))
        assert (np.diff(slopes) >= -1e-6 * abs(slopes[0]) - 1e-12).all()


@few
@given(parallels(), DELTAS)
def test_split_data_cost_the_costliest_label_under_add_remove(split: ParallelEvent, delta: float) -> None:
    branches = [price(branch, delta, "add_remove") for _, branch in split.branches]
    assert price(split, delta, "add_remove") == max(branches)


@few
@given(parallels(), DELTAS)
def test_split_data_cost_two_labels_at_most_under_replace_one(split: ParallelEvent, delta: float) -> None:
    total = price(split, delta, "replace_one")
    for _, branch in split.branches:
        assert total >= price(branch, delta, "replace_one") * (1 - 2e-3) - 1e-9
    everything = ComposedEvent(tuple(branch for _, branch in split.branches))
    assert total <= price(everything, delta, "replace_one") * (1 + 2e-3) + 1e-9


@laws
@given(compositions(), st.floats(1.05, 3.0), DELTAS, ADJACENCIES)
def test_what_visibly_dominates_costs_at_least_as_much(
    event: Event, factor: float, delta: float, adjacency: str
) -> None:
    quieter = noisier(event, factor)
    assert dominates(event, quieter)
    assert dominates(event, NoEvent())
    splits = [ParallelEvent(name, (("a", event),)) for name in ("one", "two")]
    assert dominates(splits[0], splits[0])
    assert not dominates(splits[0], splits[1])
    assert normal_form(quieter) == normal_form(event) or not dominates(quieter, event)


@laws
@given(compositions())
def test_normal_forms_are_equal_exactly_for_equal_multisets(event: Event) -> None:
    twice = normal_form(ComposedEvent((event, event)))
    assert twice == normal_form(RepeatedEvent(event, 2))
    assert normal_form(RepeatedEvent(event, 0)) == Terms()


@settings(laws, max_examples=8)
@given(sampled(), COUNTS, st.sampled_from([0.5, 1.0, 4.0]), ADJACENCIES)
def test_calibrated_noise_fits(step: Event, count: int, epsilon: float, adjacency: str) -> None:
    def event_at(x: float) -> Event:
        return noisier(RepeatedEvent(step, count), x)

    found = calibrate(event_at, epsilon=epsilon, delta=1e-6, adjacency=adjacency)
    assert price(event_at(found), 1e-6, adjacency) <= epsilon
    assert found == 1e-3 or price(event_at(found * 0.9988), 1e-6, adjacency) > epsilon


@laws
@given(st.floats(1e-4, 50.0), st.floats(1e-12, 0.4))
def test_the_gaussian_profile_keeps_its_digits(mu: float, delta: float) -> None:
    epsilon = gdp_epsilon(mu, delta)
    curve = _profiles.gaussian(mu).up
    assert curve(np.array([epsilon]))[0] <= delta
    if epsilon > 0:
        assert curve(np.array([epsilon * (1 - 1e-5)]))[0] > delta
