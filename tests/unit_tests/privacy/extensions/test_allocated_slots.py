"""The secret deal into batches: its contract, and the coupling of neighbours that its theorem rests on."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy.accounting.events import SubsampledEvent
from langchain_dpicl.privacy.extensions.random_allocation import MAX_BATCHES, AllocatedEvent, AllocatedSlots
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.privacy.mechanisms.release_plan import PoissonSlots, assign
from tests.contracts.doubles import RecordingRandom, SeededRandom
from tests.contracts.sampler import EVENT, SecretSamplerContract, members


class TestAllocatedSlots(SecretSamplerContract):
    def make(self, num_units):
        return AllocatedSlots(min(0.3, 40 / max(num_units, 1)), num_batches=3, num_slots=4, shots_per_slot=5)

    def make_full(self, num_units):
        return AllocatedSlots(1.0, num_batches=3, num_slots=2, shots_per_slot=num_units)

    def expected_size(self, num_units):
        return 40.0

    def test_everybody_is_drawn_at_rate_one_and_the_event_is_not_amplified(self):
        made = self.make_full(30)
        assert sorted(members(made.draw(30, rng=SYSTEM_RANDOM))) == list(range(30))
        assert made.amplify(EVENT) == AllocatedEvent(EVENT, 3, 1.0)

    def test_below_rate_one_the_event_is_amplified_by_exactly_that_rate(self):
        made = self.make(100)
        assert made.sampling_rate < 1
        assert made.amplify(EVENT) == AllocatedEvent(EVENT, 3, made.sampling_rate)


def test_one_batch_is_a_sample_like_any_other():
    assert AllocatedSlots(0.2, 1, 3, 4).amplify(EVENT) == SubsampledEvent(EVENT, 0.2)
    assert AllocatedSlots(1.0, 1, 3, 4).amplify(EVENT) is EVENT


@pytest.mark.parametrize("num_units", [0, 1, 30, 500])
def test_a_deal_is_exactly_the_assignment_of_its_recorded_coins(num_units):
    rng, made = RecordingRandom(), AllocatedSlots(0.4, num_batches=5, num_slots=3, shots_per_slot=4)
    sample = made.draw(num_units, rng=rng)
    assert sample == assign(rng.chosen[0], rng.slots[-1], num_slots=15, shots_per_slot=4)
    assert [row for i in range(5) for row in made.batch(sample, i)] == list(sample)


def changed(before, after):
    return sum(left != right for left, right in zip(before, after, strict=True))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_removing_one_unit_changes_one_slot_of_one_batch(data):
    """With everybody else's coins kept; an over-full slot may take in the next unit that wanted it."""
    made = AllocatedSlots(1.0, data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)))
    units = data.draw(st.permutations(range(data.draw(st.integers(1, 25)))))
    places = [data.draw(st.integers(0, made.num_rows - 1)) for _ in units]
    gone = data.draw(st.integers(0, len(units) - 1))
    shape = {"num_slots": made.num_rows, "shots_per_slot": made.shots_per_slot}
    before = assign(units, places, **shape)
    after = assign(units[:gone] + units[gone + 1 :], places[:gone] + places[gone + 1 :], **shape)
    batches = [(made.batch(before, i), made.batch(after, i)) for i in range(made.num_batches)]
    moved = [changed(*pair) for pair in batches]
    assert sum(moved) <= 1
    assert all(count == 0 or i == places[gone] // made.num_slots for i, count in enumerate(moved))


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), replaced=st.integers(0, 29))
def test_replacing_one_unit_moves_nobody(seed, replaced):
    """The deal sees positions only, so what is replaced has the place of the old unit: one row's text changes."""
    made = AllocatedSlots(0.8, num_batches=4, num_slots=2, shots_per_slot=3)
    here, there = (made.draw(30, rng=SeededRandom(seed)) for _ in range(2))
    texts = [f"unit {i}" for i in range(30)]
    other = [*texts[:replaced], "another", *texts[replaced + 1 :]]
    rows = [[texts[unit] for unit in row] for row in here]
    assert changed(rows, [[other[unit] for unit in row] for row in there]) == (replaced in members(here))


def _drawn_anew(self, num_units, *, rng):
    """Planted: each batch has a draw of its own, so a unit may stand in several."""
    one = PoissonSlots(self.sampling_rate, self.num_slots, self.shots_per_slot)
    return tuple(row for _ in range(self.num_batches) for row in one.draw(num_units, rng=rng))


def test_batches_drawn_one_by_one_turn_the_contract_red(monkeypatch):
    monkeypatch.setattr(AllocatedSlots, "draw", _drawn_anew)
    with pytest.raises(AssertionError):
        TestAllocatedSlots().test_no_unit_appears_twice_and_none_is_invented()


@pytest.mark.parametrize("index", [-1, 3, 1.5, True, None])
def test_a_batch_that_is_not_there_is_refused(index):
    made = AllocatedSlots(0.5, 3, 2, 2)
    with pytest.raises(ConfigurationError, match="index"):
        made.batch(made.draw(9, rng=SYSTEM_RANDOM), index)


@pytest.mark.parametrize("count", [0, -1, 1.5, True, None])
def test_a_shape_that_is_no_count_is_refused(count):
    for shape in itertools.permutations((count, 2, 2)):
        with pytest.raises(ConfigurationError, match="integer"):
            AllocatedSlots(0.5, *shape)
    with pytest.raises(ConfigurationError, match="sampling_rate"):
        AllocatedSlots(0.0, 2, 2, 2)
    with pytest.raises(ConfigurationError, match="num_batches"):
        AllocatedSlots(0.5, MAX_BATCHES + 1, 2, 2)
