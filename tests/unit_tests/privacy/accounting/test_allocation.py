"""Random allocation: its price against brute force, closed cases and published numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from scipy.stats import binom

from langchain_dpicl.exceptions import AccountantsDisagreeError, UnknownEventError
from langchain_dpicl.privacy import second_opinions as _allocation_opinion
from langchain_dpicl.privacy.accounting import calibrate, delta_upper_bound, epsilon_bound, epsilon_upper_bound
from langchain_dpicl.privacy.accounting import epsilon as accounting
from langchain_dpicl.privacy.accounting import profiles as _profiles
from langchain_dpicl.privacy.accounting.epsilon import normal_form
from langchain_dpicl.privacy.accounting.events import (
    BoundedRangeEvent,
    ComposedEvent,
    Event,
    GaussianEvent,
    NoEvent,
    NonPrivateEvent,
    ParallelEvent,
    PureEvent,
    RepeatedEvent,
    SubsampledEvent,
    event_from_dict,
    event_to_dict,
)
from langchain_dpicl.privacy.extensions import random_allocation as _allocation
from langchain_dpicl.privacy.extensions.label_places import dominates
from langchain_dpicl.privacy.extensions.random_allocation import MAX_BATCHES, AllocatedEvent
from tests.contracts.sampler import EVENT

CACHES = (
    accounting.steps,
    accounting._sampled_step,
    _allocation.allocated_step,
    accounting.bounds,
    accounting._cached_price,
)


@pytest.fixture
def no_memory() -> Iterator[None]:
    """Prices made with a planted bug are forgotten before and after."""
    for cache in CACHES:
        cache.cache_clear()
    yield
    for cache in CACHES:
        cache.cache_clear()


def price(event: Event, *, delta: float = 1e-6, adjacency: str = "add_remove") -> float:
    return epsilon_upper_bound(event, delta=delta, adjacency=adjacency)


def tokens(bound: float, count: int = 100) -> Event:
    return RepeatedEvent(BoundedRangeEvent(bound), count)


# --- the event ------------------------------------------------------------------------------------------------------


def test_an_allocated_event_survives_json_and_refuses_nonsense():
    event = AllocatedEvent(tokens(0.1), 16, 0.25)
    assert event_from_dict(event_to_dict(event)) == event
    for batches in (0, -1, 1.5, True, MAX_BATCHES + 1):
        with pytest.raises(UnknownEventError, match="num_batches"):
            AllocatedEvent(EVENT, batches, 0.5)
    for rate in (0.0, 1.1, math.nan, None):
        with pytest.raises(UnknownEventError, match="sampling_rate"):
            AllocatedEvent(EVENT, 2, rate)
    with pytest.raises(UnknownEventError, match="event that has a price"):
        AllocatedEvent(None, 2, 0.5)


# --- the price: closed cases ----------------------------------------------------------------------------------------


def exact_deltas(epsilon: float, batches: int, rate: float, x: float) -> tuple[float, float]:
    """Both orders for randomised response, enumerated over how many batches answer as the unit would."""
    hits = np.arange(batches + 1)
    chance = binom.pmf(hits, batches, 1 / (1 + math.exp(epsilon)))
    mean = (hits * math.exp(epsilon) + (batches - hits) * math.exp(-epsilon)) / batches
    ratio = 1 - rate + rate * mean
    removed = float(chance @ np.maximum(ratio - math.exp(x), 0))
    return removed, float(chance @ np.maximum(1 - math.exp(x) * ratio, 0))


@pytest.mark.parametrize(
    ("epsilon", "batches", "rate"),
    [(0.3, 2, 1.0), (1.0, 3, 1.0), (1.0, 16, 1.0), (4.0, 5, 1.0), (4.0, 64, 1.0), (2.0, 7, 0.3), (1.0, 50, 0.05)],
)
def test_randomised_response_in_a_secret_batch_costs_what_enumeration_says(epsilon, batches, rate):
    profile = _allocation.allocated_step(normal_form(PureEvent(epsilon)), batches, rate, "add_remove")
    for x in np.linspace(0.0, 0.95 * math.log1p(rate * math.expm1(epsilon)), 23):
        removed, added = exact_deltas(epsilon, batches, rate, float(x))
        for curve, exact in ((profile.up, removed), (profile.down, added)):
            found = float(curve(np.array([x]))[0])
            assert exact * (1 - 1e-9) - 1e-18 <= found <= exact * (1 + 1e-3) + 1e-6


def test_without_a_choice_of_batches_the_price_is_that_of_a_sample():
    for inner, rate in itertools.product((GaussianEvent(1.3), tokens(0.2)), (0.1, 1.0)):
        for adjacency in ("add_remove", "replace_one"):
            alone = price(SubsampledEvent(inner, rate), adjacency=adjacency)
            assert price(AllocatedEvent(inner, 1, rate), adjacency=adjacency) == alone


# name: (steps per unit, noise, batches, epochs, delta, lower, upper): the interval of pld-accounting 2.0, and what
# Poisson sampling at the same rate costs.
PUBLISHED = {
    "80 of 1561, quiet": (1.52, 20, 4, 1 / 1561, 0.8595, 0.9017, 0.9697),
    "80 of 1561, loud": (0.58, 20, 4, 1 / 1561, 6.5542, 6.6302, 7.7659),
    "80 of 835, quiet": (1.36, 15, 1, 1 / 835, 0.5006, 0.5254, 0.6278),
    "80 of 835, loud": (0.51, 15, 1, 1 / 835, 4.5618, 4.5896, 6.1657),
    "80 of 2953, loud": (0.50, 40, 2, 1 / 2953, 5.9318, 5.9869, 7.2689),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_gaussian_allocations_cost_what_another_accountant_says(name):
    noise, batches, epochs, delta, low, high, poisson = PUBLISHED[name]
    bound = epsilon_bound(
        RepeatedEvent(AllocatedEvent(GaussianEvent(noise), batches, 1.0), epochs), delta=delta, adjacency="add_remove"
    )
    assert low <= bound.epsilon <= high
    assert len(bound.opinions) >= 2
    sampled = RepeatedEvent(SubsampledEvent(GaussianEvent(noise), 1 / batches), batches * epochs)
    assert price(sampled, delta=delta) == pytest.approx(poisson, rel=2e-3)


def test_a_gaussian_allocation_holds_against_a_simulation():
    """A million runs; Hoeffding's half-width at false alarm 5e-7 per side and curve is .0027."""
    rng, batches, noise = np.random.default_rng(7), 8, 1.0
    profile = _allocation.allocated_step(normal_form(GaussianEvent(noise)), batches, 1.0, "add_remove")
    z = rng.standard_normal((1_000_000, batches))
    without = np.exp(z - 0.5).mean(axis=1)
    z[:, 0] += 1.0
    with_unit = np.exp(z - 0.5).mean(axis=1)
    for x in (0.0, 0.2, 0.5):
        removed = float(np.maximum(1 - math.exp(x) / with_unit, 0).mean())
        added = float(np.maximum(1 - math.exp(x) * without, 0).mean())
        assert float(profile.up(np.array([x]))[0]) == pytest.approx(removed, abs=0.0028)
        assert float(profile.down(np.array([x]))[0]) == pytest.approx(added, abs=0.0028)


# --- the price: brute force over mechanisms that adapt ---------------------------------------------------------------


def tables(rng: np.random.Generator, epsilon: float, batches: int) -> dict[tuple[int, ...], np.ndarray]:
    """For every history, three laws of a bit: without the unit, with it, with its replacement; pairwise epsilon-pure."""
    found = {}
    for length in range(batches):
        for history in itertools.product((0, 1), repeat=length):
            ends = [1 / (1 + math.exp(epsilon)), 1 / (1 + math.exp(-epsilon))]
            found[history] = rng.permutation(np.append(ends, rng.uniform(*ends)))
    return found


def law(table: dict[tuple[int, ...], np.ndarray], batches: int, batch: int | None, who: int) -> np.ndarray:
    """The law of all answers where the unit stands in `batch`, or in none."""
    chances = []
    for answers in itertools.product((0, 1), repeat=batches):
        chance = 1.0
        for i, bit in enumerate(answers):
            one = float(table[answers[:i]][who if i == batch else 0])
            chance *= one if bit else 1 - one
        chances.append(chance)
    return np.array(chances)


def hockey_stick(p: np.ndarray, q: np.ndarray, x: float) -> float:
    return float(np.maximum(p - math.exp(x) * q, 0).sum())


@pytest.mark.parametrize(("batches", "rate"), [(2, 1.0), (4, 1.0), (4, 0.4)])
def test_no_mechanism_that_adapts_to_earlier_batches_costs_more(batches, rate):
    rng, epsilon = np.random.default_rng(3), 1.5
    event = AllocatedEvent(PureEvent(epsilon), batches, rate)
    closest = 0.0
    for _ in range(40):
        table = tables(rng, epsilon, batches)
        absent = law(table, batches, None, 0)
        one, other = (
            (1 - rate) * absent + rate * np.mean([law(table, batches, b, who) for b in range(batches)], axis=0)
            for who in (1, 2)
        )
        for x in (0.0, 0.1, 0.3, 0.6, 0.9):
            allowed = delta_upper_bound(event, epsilon=x, adjacency="add_remove")
            found = max(hockey_stick(one, absent, x), hockey_stick(absent, one, x))
            assert found <= allowed * (1 + 1e-9) + 1e-15
            closest = max(closest, found / allowed) if allowed > 1e-3 else closest
            replaced = max(hockey_stick(one, other, x), hockey_stick(other, one, x))
            assert replaced <= delta_upper_bound(event, epsilon=x, adjacency="replace_one") * (1 + 1e-9) + 1e-15
    assert closest > 0.5  # the bound is in reach: half of it is attained by chance


def test_a_replaced_unit_can_cost_more_than_a_removed_one():
    """Why `replace_one` is not priced by the theorem of `add_remove`."""
    epsilon, batches = 1.0, 2
    low, high = 1 / (1 + math.exp(epsilon)), 1 / (1 + math.exp(-epsilon))
    table = {history: np.array([0.5, low, high]) for history in [(), (0,), (1,)]}
    absent = law(table, batches, None, 0)
    one, other = (np.mean([law(table, batches, b, who) for b in range(batches)], axis=0) for who in (1, 2))
    assert hockey_stick(one, other, 0.0) > 1.5 * hockey_stick(one, absent, 0.0)


def test_a_unit_that_is_replaced_costs_one_batch():
    for rate in (0.2, 1.0):
        allocated = AllocatedEvent(tokens(0.1), 16, rate)
        alone = SubsampledEvent(tokens(0.1), rate)
        assert price(allocated, adjacency="replace_one") == price(alone, adjacency="replace_one")
        assert delta_upper_bound(allocated, epsilon=0.5, adjacency="replace_one") == delta_upper_bound(
            alone, epsilon=0.5, adjacency="replace_one"
        )
    direct = _allocation.allocated_step(normal_form(tokens(0.1)), 16, 0.2, "replace_one")
    sampled = accounting._sampled_step(normal_form(tokens(0.1)), 0.2, "replace_one")
    x = np.linspace(0, 2, 9)
    assert (direct.up(x) == sampled.up(x)).all()


# --- the price: laws ------------------------------------------------------------------------------------------------


def test_more_batches_cost_less_and_never_more_than_one_batch():
    for inner, rate in ((tokens(0.1), 1.0), (GaussianEvent(0.7), 0.2), (PureEvent(2.0), 1.0)):
        costs = [price(SubsampledEvent(inner, rate))]
        costs += [price(AllocatedEvent(inner, batches, rate)) for batches in (2, 3, 64, 200)]
        assert costs == sorted(costs, reverse=True)
        assert costs[-1] < 0.6 * costs[0]


def test_many_runs_of_few_batches_cost_no_more_than_their_batches_in_parallel():
    """Two theorems, and the smaller price is charged for the whole composition."""
    inner = BoundedRangeEvent(0.05)
    runs = RepeatedEvent(AllocatedEvent(inner, 2, 1.0), 200)
    assert price(runs) <= price(RepeatedEvent(inner, 200))
    assert delta_upper_bound(runs, epsilon=0.5, adjacency="add_remove") <= delta_upper_bound(
        RepeatedEvent(inner, 200), epsilon=0.5, adjacency="add_remove"
    )


def test_every_token_and_every_run_counts():
    by_length = [price(AllocatedEvent(tokens(0.1, n), 16, 1.0)) for n in (20, 40, 80)]
    by_count = [price(RepeatedEvent(AllocatedEvent(tokens(0.1, 20), 16, 1.0), n)) for n in (1, 2, 8)]
    assert by_length == sorted(set(by_length))
    assert by_count == sorted(set(by_count))


def test_labels_are_dealt_each_on_their_own():
    inner = AllocatedEvent(tokens(0.1), 16, 0.5)
    both = ParallelEvent("data", (("a", inner), ("b", inner)))
    assert price(both) == price(inner)
    wider = AllocatedEvent(tokens(0.1), 4, 0.5)
    assert dominates(wider, inner)
    assert not dominates(inner, wider)
    assert price(ParallelEvent("data", (("a", inner), ("b", wider)))) == price(wider)
    twice = ComposedEvent((SubsampledEvent(tokens(0.1), 0.5),) * 2)
    assert price(both, adjacency="replace_one") == price(twice, adjacency="replace_one")


def test_nothing_costs_nothing_and_no_protection_costs_everything():
    assert price(AllocatedEvent(NoEvent(), 4, 0.5)) == 0.0
    assert price(AllocatedEvent(NonPrivateEvent(), 4, 0.5)) == math.inf
    assert delta_upper_bound(AllocatedEvent(NonPrivateEvent(), 4, 0.5), epsilon=1.0, adjacency="add_remove") == 1.0
    with pytest.raises(UnknownEventError, match="nested"):
        price(ParallelEvent("d", (("a", AllocatedEvent(ParallelEvent("d", (("a", EVENT),)), 2, 0.5)),)))


def test_losses_beyond_the_grid_gain_nothing():
    loud = _profiles.gaussian(40.0)
    assert _allocation.allocate(loud, 8) is loud


def test_tiny_steps_are_added_without_a_gap():
    """A grid as narrow as the losses; its points lie far from zero once ratios are added."""
    event = AllocatedEvent(BoundedRangeEvent(1e-3), 7, 1.0)
    assert 0.0 < price(event) < price(BoundedRangeEvent(1e-3))


def test_noise_is_calibrated_for_a_whole_run():
    goal = {"epsilon": 1.0, "delta": 1e-6, "adjacency": "add_remove", "is_rough": True}
    noise = calibrate(lambda x: AllocatedEvent(GaussianEvent(x), 4, 1.0), **goal)
    assert 0.9 <= price(AllocatedEvent(GaussianEvent(noise), 4, 1.0)) <= 1.0


# --- second opinions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inner", "batches", "rate"),
    [(tokens(0.05), 4, 1.0), (tokens(0.3), 64, 1.0), (tokens(0.1), 30, 0.2), (GaussianEvent(1.36), 15, 1.0)],
)
def test_a_straight_grid_agrees_in_both_orders(inner, batches, rate):
    bound = epsilon_bound(AllocatedEvent(inner, batches, rate), delta=1e-6, adjacency="add_remove")
    assert bound.engine == "random allocation"
    heard = {opinion.name: opinion for opinion in bound.opinions}
    assert set(heard) == {"straight-grid FFT (removals)", "straight-grid FFT (additions)", "independent FFT"}
    straight = [opinion for name, opinion in heard.items() if name.startswith("straight")]
    highest = max(straight, key=lambda opinion: opinion.upper)
    assert highest.lower <= bound.epsilon <= highest.upper * 1.003
    assert highest.upper <= highest.lower * 1.01


def test_opinions_on_a_part_bound_the_whole_from_below():
    event = ComposedEvent((AllocatedEvent(tokens(0.1), 16, 0.5), GaussianEvent(3.0)))
    bound = epsilon_bound(event, delta=1e-6, adjacency="add_remove")
    straight = [opinion for opinion in bound.opinions if opinion.name.startswith("straight")]
    assert len(straight) == 2
    assert all(opinion.upper == math.inf and opinion.lower < bound.epsilon for opinion in straight)


@pytest.mark.parametrize("factor", [0.5, 1.5])
def test_a_wrong_number_of_batches_is_refused(factor, monkeypatch, no_memory):
    right = _allocation.allocate
    monkeypatch.setattr(_allocation, "allocate", lambda base, batches: right(base, int(factor * batches)))
    with pytest.raises(AccountantsDisagreeError, match="straight-grid"):
        epsilon_bound(AllocatedEvent(tokens(0.11), 16, 0.9), delta=1e-6, adjacency="add_remove")


def test_additions_priced_as_removals_are_refused(monkeypatch, no_memory):
    right = _allocation.allocate
    monkeypatch.setattr(_allocation, "allocate", lambda base, batches: right(base, batches).reversed())
    with pytest.raises(AccountantsDisagreeError, match="straight-grid"):
        epsilon_bound(AllocatedEvent(GaussianEvent(0.9), 16, 1.0), delta=1e-6, adjacency="add_remove")


def test_a_grid_that_moves_all_mass_down_is_refused(monkeypatch, no_memory):
    """Planted: sums go to the point below, which is no bound."""
    right = _allocation._shifts

    def down(step, d):
        whole, share = right(step, d)
        return whole, 0.0 * share

    monkeypatch.setattr(_allocation, "_shifts", down)
    with pytest.raises(AccountantsDisagreeError, match="straight-grid"):
        epsilon_bound(AllocatedEvent(tokens(0.12), 64, 1.0), delta=1e-6, adjacency="add_remove")


@pytest.mark.parametrize("is_added", [False, True])
def test_a_straight_grid_says_what_it_cannot_tell(is_added):
    def opinion(base: _profiles.Profile, delta: float):
        return _allocation_opinion.allocation_opinion(base, 4, 0.5, delta=delta, is_added=is_added)

    assert isinstance(opinion(_profiles.gaussian(1.0), 1e-14), str)
    assert opinion(_profiles.gaussian(1.0), 0.6).lower == 0.0
    assert opinion(_profiles.gaussian(40.0), 1e-6).lower <= 800.0
