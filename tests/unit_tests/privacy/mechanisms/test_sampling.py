"""Samplers against their contract, and the coupling of neighbours that the sensitivities rest on."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy.accounting.events import PureEvent, SubsampledEvent
from langchain_dpicl.privacy.extensions.fixed_size_slots import BalancedSlots, PartitionedSlots
from langchain_dpicl.privacy.extensions.registry import SAMPLERS
from langchain_dpicl.privacy.mechanisms import release_plan
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.privacy.mechanisms.release_plan import PoissonSlots, PoissonUnits, assign
from tests.contracts.doubles import CountingRandom, RecordingRandom, SeededRandom
from tests.contracts.sampler import EVENT, SamplerContract, SecretSamplerContract, members


class TestPoissonSlots(SecretSamplerContract):
    def make(self, num_units):
        return PoissonSlots(min(0.3, 40 / max(num_units, 1)), num_slots=10, shots_per_slot=4)

    def make_full(self, num_units):
        return PoissonSlots(1.0, num_slots=3, shots_per_slot=num_units)

    def expected_size(self, num_units):
        return 40.0


class TestPoissonUnits(SecretSamplerContract):
    def make(self, num_units):
        return PoissonUnits(min(0.3, 40 / max(num_units, 1)))

    def make_full(self, num_units):
        return PoissonUnits(1.0)

    def expected_size(self, num_units):
        return 40.0


class TestBalancedSlots(SecretSamplerContract):
    sizes = (1, 2, 7, 13, 100)

    def make(self, num_units):
        return BalancedSlots(num_slots=5, shots_per_slot=2, public_size=num_units)

    def make_full(self, num_units):
        return BalancedSlots(num_slots=4, shots_per_slot=8, public_size=num_units)

    def expected_size(self, num_units):
        return 10.0


class TestPartitionedSlots(SamplerContract):
    sizes = (1, 2, 7, 13, 100)

    def make(self, num_units):
        return PartitionedSlots(num_slots=5, shots_per_slot=2, public_size=num_units)


# --- the coupling: with everybody else's coins kept, one unit moves one slot ---------------------------------------


def changed_rows(before, after):
    return sum(left != right for left, right in zip(before, after, strict=True))


@st.composite
def coins(draw):
    """Included units in order of priority, their slots, and a public shape."""
    included = draw(st.lists(st.integers(0, 50), unique=True, min_size=1, max_size=25))
    num_slots = draw(st.integers(1, 6))
    slots = draw(st.lists(st.integers(0, num_slots - 1), min_size=len(included), max_size=len(included)))
    return included, slots, num_slots, draw(st.integers(1, 4))


@settings(max_examples=100, deadline=None)
@given(coins=coins(), data=st.data())
def test_removing_one_unit_changes_at_most_the_slot_it_was_in(coins, data):
    included, slots, num_slots, shots = coins
    gone = data.draw(st.integers(0, len(included) - 1))
    shape = {"num_slots": num_slots, "shots_per_slot": shots}
    before = assign(included, slots, **shape)
    after = assign(included[:gone] + included[gone + 1 :], slots[:gone] + slots[gone + 1 :], **shape)
    assert changed_rows(before, after) <= 1
    assert all(left == right or i == slots[gone] for i, (left, right) in enumerate(zip(before, after, strict=True)))
    assert len(members(before)) - len(members(after)) in {0, 1}


@settings(max_examples=100, deadline=None)
@given(coins=coins())
def test_assignment_keeps_each_unit_in_its_own_slot_and_fills_slots_before_turning_away(coins):
    included, slots, num_slots, shots = coins
    sample = assign(included, slots, num_slots=num_slots, shots_per_slot=shots)
    where = dict(zip(included, slots, strict=True))
    assert len(sample) == num_slots
    for slot, row in enumerate(sample):
        assert all(where[unit] == slot for unit in row)
        assert len(row) == min(shots, slots.count(slot))


@pytest.mark.parametrize("num_units", [0, 1, 30, 500])
def test_a_draw_is_exactly_the_assignment_of_its_recorded_coins(num_units):
    rng, made = RecordingRandom(), PoissonSlots(0.2, num_slots=6, shots_per_slot=3)
    sample = made.draw(num_units, rng=rng)
    assert sample == assign(rng.chosen[0], rng.slots[-1], num_slots=6, shots_per_slot=3)
    assert len(rng.slots[-1]) == len(rng.chosen[0])


def test_unit_rows_are_the_recorded_units_one_by_one():
    rng = RecordingRandom()
    sample = PoissonUnits(0.2).draw(100, rng=rng)
    assert sample == tuple((unit,) for unit in rng.chosen[0])


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), data=st.data())
def test_replacing_one_unit_touches_one_balanced_slot(seed, data):
    """Under replace_one positions stay: a draw on the same coins names the same positions, so one row's text moves."""
    made = BalancedSlots(num_slots=5, shots_per_slot=3, public_size=20)
    replaced = data.draw(st.integers(0, 19))
    here, there = (made.draw(20, rng=SeededRandom(seed)) for _ in range(2))
    texts = [f"unit {i}" for i in range(20)]
    other = [*texts[:replaced], "another", *texts[replaced + 1 :]]
    rows = [[texts[unit] for unit in row] for row in here]
    assert changed_rows(rows, [[other[unit] for unit in row] for row in there]) == (replaced in members(here))


def _chunks(included, slots, *, num_slots, shots_per_slot):
    return tuple(tuple(included[i * shots_per_slot : (i + 1) * shots_per_slot]) for i in range(num_slots))


def _round_robin(included, slots, *, num_slots, shots_per_slot):
    return tuple(tuple(included[i::num_slots][:shots_per_slot]) for i in range(num_slots))


def _hand_down(included, slots, *, num_slots, shots_per_slot):
    """An over-full slot passes a unit on to the next one."""
    rows = [[] for _ in range(num_slots)]
    for unit, wanted in zip(included, slots, strict=True):
        for slot in [*range(wanted, num_slots), *range(wanted)]:
            if len(rows[slot]) < shots_per_slot:
                rows[slot].append(unit)
                break
    return tuple(map(tuple, rows))


@pytest.mark.parametrize("bug", [_chunks, _round_robin, _hand_down])
def test_a_partition_that_shifts_its_neighbours_turns_the_coupling_test_red(bug):
    included, slots = list(range(12)), [0, 0, 0, 0, 1, 2, 1, 2, 0, 1, 2, 0]
    worst = max(
        changed_rows(
            bug(included, slots, num_slots=3, shots_per_slot=3),
            bug(included[:i] + included[i + 1 :], slots[:i] + slots[i + 1 :], num_slots=3, shots_per_slot=3),
        )
        for i in range(12)
    )
    assert worst > 1


# --- the exact partition -----------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(num_slots=st.integers(1, 9), shots=st.integers(1, 6), size=st.integers(1, 80), seed=st.integers(0, 99))
def test_a_partition_uses_as_many_units_as_it_can_and_fills_slots_evenly(num_slots, shots, size, seed):
    sample = PartitionedSlots(num_slots, shots, size).draw(size, rng=SeededRandom(seed))
    used = members(sample)
    assert len(used) == len(set(used)) == min(num_slots * shots, size)
    sizes = [len(row) for row in sample]
    assert len(sizes) == num_slots
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= shots


def slots_of_a_unit(draw, size, place, *, trials=4_000):
    """Returns how often each slot holds the unit at one place."""
    made = PartitionedSlots(num_slots=4, shots_per_slot=1, public_size=size)
    counts = [0] * 5
    for _ in range(trials):
        sample = draw(made, size, rng=SYSTEM_RANDOM)
        counts[next((slot for slot, row in enumerate(sample) if place in row), 4)] += 1
    return counts


def statistic(counts, size):
    expected = [sum(counts) / size] * 4 + [sum(counts) * (size - 4) / size]
    return sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True))


@pytest.mark.parametrize("place", [0, 3, 7])
def test_a_partition_moves_one_slot_at_most_whatever_the_order_of_the_units(place):
    """The place of a unit in the file says nothing of its slot; false alarm 1e-7 (chi-square, 4 degrees)."""
    assert statistic(slots_of_a_unit(PartitionedSlots.draw, 8, place), 8) < 39.3


def _by_position(self, num_units, *, rng):
    """Planted: unit i in slot i mod M, which a file sorted by content turns over."""
    return tuple((slot,) for slot in range(self.num_slots))


def test_a_partition_by_position_turns_the_partition_test_red(monkeypatch):
    assert statistic(slots_of_a_unit(_by_position, 8, 3), 8) > 39.3


@pytest.mark.parametrize("size", [1, 200, 10_000])
def test_a_partition_amplifies_nothing_however_few_units_it_uses(size):
    made = PartitionedSlots(num_slots=200, shots_per_slot=1, public_size=size)
    assert made.amplify(EVENT) is EVENT
    assert made.sampling_rate == 1.0


@pytest.mark.parametrize("num_units", [0, 99, 101])
def test_a_partition_refuses_another_number_of_units_without_naming_it(num_units):
    with pytest.raises(ConfigurationError, match="public_size=100") as caught:
        PartitionedSlots(3, 4, 100).draw(num_units, rng=SYSTEM_RANDOM)
    assert str(num_units) not in str(caught.value).replace("100", "")


def test_a_partition_that_takes_the_price_of_a_sample_turns_its_test_red(monkeypatch):
    """What is not in the partition does not hide what is: the places are public."""
    monkeypatch.setattr(PartitionedSlots, "amplify", lambda self, event: SubsampledEvent(event, 200 / self.public_size))
    with pytest.raises(AssertionError):
        test_a_partition_amplifies_nothing_however_few_units_it_uses(10_000)


# --- sizes and public parameters ------------------------------------------------------------------------------------


def test_zero_units_give_empty_slots_and_no_unit_rows():
    assert PoissonSlots(0.5, 3, 2).draw(0, rng=SYSTEM_RANDOM) == ((), (), ())
    assert PoissonSlots(1.0, 3, 2).draw(0, rng=SYSTEM_RANDOM) == ((), (), ())
    assert PoissonUnits(0.5).draw(0, rng=SYSTEM_RANDOM) == ()


def test_fewer_units_than_balanced_places_are_all_used_and_spread_evenly():
    made = BalancedSlots(num_slots=4, shots_per_slot=5, public_size=6)
    for _ in range(20):
        sample = made.draw(6, rng=SYSTEM_RANDOM)
        assert sorted(members(sample)) == list(range(6))
        assert sorted(len(row) for row in sample) == [1, 1, 2, 2]
    assert made.sampling_rate == 1.0


def test_a_full_balanced_draw_fills_every_slot():
    made = BalancedSlots(num_slots=3, shots_per_slot=4, public_size=100)
    assert [len(row) for row in made.draw(100, rng=SYSTEM_RANDOM)] == [4, 4, 4]
    assert made.sampling_rate == 0.12


@pytest.mark.parametrize("num_units", [0, 99, 101])
def test_a_balanced_draw_refuses_another_number_of_units_without_naming_it(num_units):
    with pytest.raises(ConfigurationError, match="public_size=100") as caught:
        BalancedSlots(3, 4, 100).draw(num_units, rng=SYSTEM_RANDOM)
    assert str(num_units) not in str(caught.value).replace("100", "")


def test_slots_of_a_fixed_size_are_proved_under_replace_one_only():
    assert BalancedSlots.adjacencies == PartitionedSlots.adjacencies == {"replace_one"}
    assert PoissonSlots.adjacencies == PoissonUnits.adjacencies == {"add_remove", "replace_one"}


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1, math.nan, True, "0.5", None])
def test_a_sampling_rate_out_of_range_is_refused(rate):
    for make in (PoissonUnits, lambda q: PoissonSlots(q, 2, 2)):
        with pytest.raises(ConfigurationError, match="sampling_rate"):
            make(rate)


@pytest.mark.parametrize("count", [0, -1, 1.5, True, None])
def test_counts_are_positive_integers(count):
    for make in (
        lambda k: PoissonSlots(0.5, k, 1),
        lambda k: PoissonSlots(0.5, 1, k),
        lambda k: BalancedSlots(k, 1, 1),
        lambda k: BalancedSlots(1, k, 1),
        lambda k: BalancedSlots(1, 1, k),
        lambda k: PartitionedSlots(k, 1, 1),
        lambda k: PartitionedSlots(1, k, 1),
        lambda k: PartitionedSlots(1, 1, k),
    ):
        with pytest.raises(ConfigurationError, match="integer"):
            make(count)


@pytest.mark.parametrize("rate", [1e-6, 0.5, 0.75, 1 - 2**-53])
def test_no_rate_below_one_is_priced_as_one_or_lower(rate):
    for made in (PoissonUnits(rate), PoissonSlots(rate, 2, 2)):
        assert made.amplify(PureEvent(1.0)) == SubsampledEvent(PureEvent(1.0), rate)
    assert BalancedSlots(3, 1, 4).amplify(PureEvent(1.0)) == SubsampledEvent(PureEvent(1.0), 0.75)


def test_the_registry_names_each_sampler_once():
    names = ["poisson_slots", "poisson_units", "balanced_slots", "partitioned_slots", "allocated_slots"]
    assert list(SAMPLERS) == names


def test_a_sampler_that_flips_a_coin_per_unit_turns_the_cost_test_red(monkeypatch):
    def per_unit(num_units, sampling_rate, rng):
        return [i for i, taken in enumerate(rng.bernoulli(sampling_rate, min(num_units, 20_000))) if taken]

    monkeypatch.setattr(release_plan, "poisson", per_unit)
    with pytest.raises(AssertionError):
        TestPoissonUnits().test_cost_grows_with_the_sample_not_with_the_data()


def test_the_cost_of_an_empty_sample_is_one_coin_toss():
    rng = CountingRandom()
    PoissonUnits(1e-12).draw(10**6, rng=rng)
    assert rng.num_bytes <= 64
