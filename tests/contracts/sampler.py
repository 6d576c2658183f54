"""What every sampler must do: look at positions only, keep its public shape, price its own draw; and draw afresh.

A sampler whose draw stays (a partition) keeps the first contract only: it must not be amplified.
"""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod

import pytest

from langchain_dpicl.privacy._validate import ADJACENCIES, ROW_SHAPES
from langchain_dpicl.privacy.accounting.events import BoundedRangeEvent, SubsampledEvent
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from tests.contracts.doubles import CountingRandom, SeededRandom

EVENT = BoundedRangeEvent(0.5)


def members(sample):
    """Returns all unit positions of a sample, in order."""
    return [unit for row in sample for unit in row]


class SamplerContract(ABC):
    """Subclass, implement the factories, collect with pytest."""

    sizes: tuple[int, ...] = (0, 1, 7, 100)
    """Numbers of units to try; a fixed-size sampler narrows it."""

    @abstractmethod
    def make(self, num_units: int):
        """Returns a sampler for about so many units, which leaves some of a hundred out."""

    def test_the_sampler_declares_what_a_plan_needs(self):
        made = self.make(100)
        assert made.row_shape in ROW_SHAPES
        assert made.adjacencies
        assert made.adjacencies <= set(ADJACENCIES)
        assert 0 < made.sampling_rate <= 1
        assert (made.num_rows is None) == (made.row_shape == "units")

    def test_no_unit_appears_twice_and_none_is_invented(self):
        for num_units in self.sizes:
            for _ in range(20):
                drawn = members(self.make(num_units).draw(num_units, rng=SYSTEM_RANDOM))
                assert len(set(drawn)) == len(drawn)
                assert all(type(unit) is int and 0 <= unit < num_units for unit in drawn)

    def test_the_number_of_slots_is_public_for_every_number_of_units(self):
        for num_units in self.sizes:
            made = self.make(num_units)
            sample = made.draw(num_units, rng=SYSTEM_RANDOM)
            if made.num_rows is None:
                assert all(len(row) == 1 for row in sample)
            else:
                assert len(sample) == made.num_rows
                assert all(len(row) <= made.shots_per_slot for row in sample)

    def test_the_draw_is_a_function_of_the_coins_and_the_number_of_units_alone(self):
        made = self.make(100)
        assert made.draw(100, rng=SeededRandom(5)) == made.draw(100, rng=SeededRandom(5))

    def test_the_class_is_closed_frozen_and_describes_itself_in_public_terms(self):
        made = self.make(100)
        described = made.to_dict()
        assert described.pop("name") == made.name
        assert type(made)(**described) == made
        assert json.loads(json.dumps(described)) == described
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, dataclasses.fields(made)[0].name, 1)
        with pytest.raises(TypeError, match="docs/proofs"):
            type("Derived", (type(made),), {})


class SecretSamplerContract(SamplerContract):
    """For samplers whose coins nobody sees: their draws amplify."""

    @abstractmethod
    def make_full(self, num_units: int):
        """Returns the sampler that always includes everybody."""

    @abstractmethod
    def expected_size(self, num_units: int) -> float:
        """Returns the expected number of units that `make(num_units)` draws."""

    def test_draws_are_fresh(self):
        made = self.make(100)
        # Two equal draws have probability below 1e-6 for every implementation here.
        assert len({made.draw(100, rng=SYSTEM_RANDOM) for _ in range(64)}) >= 60

    def test_everybody_is_drawn_at_rate_one_and_the_event_is_not_amplified(self):
        made = self.make_full(30)
        assert made.sampling_rate == 1.0
        assert sorted(members(made.draw(30, rng=SYSTEM_RANDOM))) == list(range(30))
        assert made.amplify(EVENT) is EVENT

    def test_below_rate_one_the_event_is_amplified_by_exactly_that_rate(self):
        made = self.make(100)
        assert made.sampling_rate < 1
        assert made.amplify(EVENT) == SubsampledEvent(EVENT, made.sampling_rate)

    def test_cost_grows_with_the_sample_not_with_the_data(self):
        """Entropy is the clock: 64 bytes per expected unit, plus a kilobyte, whatever the number of units."""
        for num_units in (10**6, 10**9):
            rng = CountingRandom()
            self.make(num_units).draw(num_units, rng=rng)
            assert rng.num_bytes <= 64 * (self.expected_size(num_units) + 50)
