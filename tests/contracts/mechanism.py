"""What every mechanism must do: read one bounded sum, draw once per coordinate, and say what it cost."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import pytest

from langchain_dpicl.exceptions import ConfigurationError, SensitivityError
from langchain_dpicl.privacy.accounting.events import event_from_dict, event_to_dict
from langchain_dpicl.privacy.mechanisms.bounded import BoundedSum, Sensitivity
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from tests.contracts.doubles import CountingRandom, FixedNoise

BOTH = Sensitivity(l2=2.0**0.5, range=2.0, linf=1.0)
ROOM = 10.0
"""What p-values of chi-square tests are multiplied by.

Their law is approximate: where 11 of a kind are expected of 20,000, a p-value is below 1e-6 with a chance of 4e-6.
"""


def bounded(values, sensitivity=BOTH):
    """Returns a bounded sum of these values."""
    return BoundedSum(np.asarray(values, dtype=np.float64), sensitivity, "slots", "add_remove")


def softmax(scores, scale):
    """The exponential mechanism by its definition."""
    weights = [math.exp((s - max(scores)) / scale) for s in scores]
    return [w / sum(weights) for w in weights]


def permute_and_flip(scores, scale):
    """Permute-and-flip by its definition: walk a random order, stop at i with probability exp((s_i - max) / scale)."""
    stop = [math.exp((s - max(scores)) / scale) for s in scores]
    law = [0.0] * len(scores)
    orders = list(itertools.permutations(range(len(scores))))
    for order in orders:
        alive = 1.0 / len(orders)
        for i in order:
            law[i] += alive * stop[i]
            alive *= 1.0 - stop[i]
    return law


class MechanismContract(ABC):
    """Subclass, implement the factories, collect with pytest."""

    narrowest = 1
    """The fewest candidates it takes."""
    further_parameters: ClassVar[dict[str, object]] = {}
    """What it is made of besides its noise multiplier."""

    @abstractmethod
    def make(self, noise_multiplier: float):
        """Returns the mechanism."""

    @abstractmethod
    def expected_event(self, noise_multiplier: float):
        """Returns the event the proof page gives."""

    def apply(self, total, rng, noise_multiplier=1.0):
        """Returns what left, as one comparable value."""
        out = self.make(noise_multiplier).release(total, rng=rng)
        return out.indices or (out.index if out.values is None else tuple(out.values))

    @pytest.mark.parametrize("noise_multiplier", [0.25, 1.0, 7.5])
    def test_the_event_is_the_proved_price_of_the_noise_multiplier(self, noise_multiplier):
        made = self.make(noise_multiplier)
        assert made.event == self.expected_event(noise_multiplier)
        assert made.release(bounded([1.0, 2.0]), rng=SYSTEM_RANDOM).event == made.event
        assert event_from_dict(event_to_dict(made.event)) == made.event

    def test_only_the_declared_kind_of_output_leaves(self):
        out = self.make(1.0).release(bounded([1.0, 2.0, 3.0]), rng=SYSTEM_RANDOM)
        kinds = {"index": out.index, "vector": out.values, "indices": out.indices}
        released = kinds.pop(self.make(1.0).releases)
        assert list(kinds.values()) == [None, None]
        if self.make(1.0).releases == "vector":
            assert released.shape == (3,)
            assert released.dtype == np.float64
        else:
            several = released if isinstance(released, tuple) else (released,)
            assert {type(index) for index in several} == {int}
            assert set(several) <= {0, 1, 2}
            assert len(set(several)) == len(several)
        assert "values" not in repr(out)

    def test_a_sum_without_the_norm_is_refused_before_any_noise_is_drawn(self):
        made, rng = self.make(1.0), CountingRandom()
        other = Sensitivity(l2=None, range=1.0) if made.norm == "l2" else Sensitivity(l2=1.0, range=None)
        with pytest.raises(SensitivityError):
            made.release(bounded([1.0, 2.0], other), rng=rng)
        assert rng.num_bytes == 0

    def test_a_sum_that_was_broken_open_is_refused(self):
        total = bounded([1.0, 2.0])
        object.__setattr__(total, "value", np.array([np.nan, 1.0]))
        with pytest.raises(SensitivityError, match="finite"):
            self.make(1.0).release(total, rng=SYSTEM_RANDOM)

    def test_entropy_is_drawn_afresh_for_equal_queries(self):
        rng, paid = CountingRandom(), [0]
        for _ in range(5):
            self.make(1.0).release(bounded(np.zeros(16)), rng=rng)
            paid.append(rng.num_bytes)
        assert min(np.diff(paid)) >= 16

    def test_equal_queries_give_different_answers_whatever_others_seed(self):
        answers = set()
        for _ in range(64):
            random.seed(7)
            np.random.seed(7)  # noqa: NPY002 - the global generator is the point
            answers.add(self.apply(bounded(np.zeros(1000)), SYSTEM_RANDOM))
        # 64 uniform choices among 1000 hold fewer than 30 distinct ones with probability below 1e-30.
        assert len(answers) >= 30

    @pytest.mark.parametrize("bad", [0.0, -1.0, 1e-10, 1e13, float("nan"), float("inf"), True, "1", None])
    def test_a_noise_multiplier_out_of_range_is_refused(self, bad):
        with pytest.raises(ConfigurationError, match="noise_multiplier"):
            self.make(bad)

    def test_the_implementation_delta_is_small_and_grows_with_the_width(self):
        deltas = [self.make(1.0).implementation_delta(d) for d in (self.narrowest, 100, 50_000)]
        assert deltas == sorted(deltas)
        assert 0 < deltas[0] <= deltas[-1] < 1e-11
        with pytest.raises(ConfigurationError, match="d:"):
            self.make(1.0).implementation_delta(0)

    def test_the_class_is_closed_frozen_and_describes_itself_in_public_terms(self):
        made = self.make(2.5)
        assert made.to_dict() == {"name": made.name, "noise_multiplier": 2.5} | self.further_parameters
        assert json.loads(json.dumps(made.to_dict())) == made.to_dict()
        assert made == self.make(2.5)
        with pytest.raises(dataclasses.FrozenInstanceError):
            made.noise_multiplier = 0.001
        with pytest.raises(TypeError, match="docs/proofs"):
            type("Derived", (type(made),), {})


class NoiseContract(MechanismContract):
    """For mechanisms that add one draw of noise to each coordinate."""

    @abstractmethod
    def scale(self, noise_multiplier: float, sensitivity: Sensitivity) -> float:
        """Returns the noise scale the proof page gives."""

    def test_noise_is_drawn_once_with_one_draw_per_coordinate(self):
        rng = FixedNoise()
        self.make(1.0).release(bounded(np.zeros(11)), rng=rng)
        assert rng.asked == [(self.make(1.0).kind, 11)]

    def test_every_coordinate_pays_for_its_own_entropy(self):
        rng = CountingRandom()
        self.make(1.0).release(bounded(np.zeros(16)), rng=rng)
        assert rng.num_bytes >= 16 * 8

    def test_the_noise_scale_is_the_multiplier_times_the_sensitivity_in_its_own_norm(self):
        """The index flips exactly where the proved scale says; large noise, as vectors are rounded to a grid."""
        big = 2.0**14  # times the scale, in noise: 1e-8 of it is wider than a grid of 2^-16 scales
        for noise_multiplier in (0.5, 3.0):
            for sensitivity in (BOTH, Sensitivity(l2=0.3, range=5.0)):
                scale = self.scale(noise_multiplier, sensitivity)
                for factor, index in ((1 - 1e-8, 0), (1 + 1e-8, 1)):
                    total = bounded([scale * big, 0.0], sensitivity)
                    noise = FixedNoise([0.0, factor * big])
                    out = self.make(noise_multiplier).release(total, rng=noise)
                    found = out.index if out.values is None else int(np.argmax(out.values))
                    assert found == index

    def test_without_noise_the_largest_coordinate_wins(self):
        out = self.make(1.0).release(bounded([0.5, 9.0, 3.0]), rng=FixedNoise())
        assert (out.index if out.values is None else int(np.argmax(out.values))) == 1

    def test_a_choice_loses_no_noise_to_large_scores(self):
        """A million votes each: noise far below the spacing of floats there still decides."""
        if self.make(1.0).releases == "index":
            total = bounded([1e6, 1e6, 1e6 - 1.0], Sensitivity(l2=1.0, range=1.0))
            assert self.make(1.0).release(total, rng=FixedNoise([0.0, 1e-12, 0.5])).index == 1

    def test_each_coordinate_gets_its_own_noise(self):
        for place in range(4):
            noise = np.zeros(4)
            noise[place] = 50.0
            out = self.make(1.0).release(bounded(np.zeros(4)), rng=FixedNoise(noise))
            assert (out.index if out.values is None else int(np.argmax(out.values))) == place
