"""Mechanisms against their contract, their prices against closed forms, and planted bugs that turn it red."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import special, stats

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy.accounting.events import BoundedRangeEvent, GaussianEvent, PureEvent
from langchain_dpicl.privacy.extensions.permute_and_flip import PermuteAndFlipMechanism
from langchain_dpicl.privacy.extensions.registry import MECHANISMS, mechanism_by_name
from langchain_dpicl.privacy.mechanisms import release_plan as mechanisms
from langchain_dpicl.privacy.mechanisms.bounded import Sensitivity
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM, GaussianDraws
from langchain_dpicl.privacy.mechanisms.release_plan import GaussianMechanism, GumbelMechanism, Release
from tests.contracts.doubles import FixedNoise, SeededRandom
from tests.contracts.mechanism import NoiseContract, bounded, permute_and_flip, softmax


class TestGaussian(NoiseContract):
    def make(self, noise_multiplier):
        return GaussianMechanism(noise_multiplier)

    def expected_event(self, noise_multiplier):
        return GaussianEvent(noise_multiplier)

    def scale(self, noise_multiplier, sensitivity):
        return noise_multiplier * sensitivity.l2


class TestGumbel(NoiseContract):
    def make(self, noise_multiplier):
        return GumbelMechanism(noise_multiplier)

    def expected_event(self, noise_multiplier):
        return BoundedRangeEvent(1.0 / noise_multiplier)

    def scale(self, noise_multiplier, sensitivity):
        return noise_multiplier * sensitivity.range


class TestPermuteAndFlip(TestGumbel):
    def make(self, noise_multiplier):
        return PermuteAndFlipMechanism(noise_multiplier)

    def expected_event(self, noise_multiplier):
        return PureEvent(1.0 / noise_multiplier)


def test_names_are_the_closed_list_and_the_default_comes_first():
    assert MECHANISMS == ("gumbel", "gaussian", "permute_and_flip")
    assert [mechanism_by_name(name).name for name in MECHANISMS] == list(MECHANISMS)
    with pytest.raises(ConfigurationError, match="laplace"):
        mechanism_by_name("laplace")


def test_a_release_compares_by_identity_and_hides_its_values():
    event = GaussianEvent(1.0)
    release = Release(index=None, values=np.array([1.5, 2.5]), event=event)
    assert "1.5" not in repr(release)
    assert release != Release(index=None, values=np.array([1.5, 2.5]), event=event)


def test_gaussian_values_are_the_sum_plus_scaled_noise_coordinate_by_coordinate():
    """To half a step of the grid: 2^-16 of the power of two below the scale, 4.24."""
    noise = [1.0, -2.0, 0.5]
    out = GaussianMechanism(3.0).release(bounded([10.0, 20.0, 30.0]), rng=FixedNoise(noise))
    unrounded = np.array([10.0, 20.0, 30.0]) + 3 * math.sqrt(2) * np.array(noise)
    np.testing.assert_allclose(out.values, unrounded, rtol=0, atol=2.0**-15 * (1 + 1e-9))


@pytest.mark.parametrize("noise_multiplier", [0.1, 1 / 3, 0.7, 1.0, 49.0])
def test_noise_is_never_less_than_the_price_says(noise_multiplier):
    """scale * (1 / noise_multiplier), as the event has it, is at least the sensitivity; over by 1e-14 at most."""
    for name in MECHANISMS:
        made = mechanism_by_name(name)(noise_multiplier)
        for bound in (0.1, 1.0, math.sqrt(2), 4 / 3):
            scale = made._scale(bounded([0.0], Sensitivity(l2=bound, range=bound)))
            assert noise_multiplier * bound < scale < noise_multiplier * bound * (1 + 1e-14)
            assert bound / scale < 1.0 / noise_multiplier


# --- the grid of a noisy vector -------------------------------------------------------------------------------------


def steps(values, noise_multiplier, sensitivity=None):
    """Returns released values in steps of their grid."""
    scale = noise_multiplier * (sensitivity.l2 if sensitivity else math.sqrt(2))
    return np.asarray(values) / max(2.0 ** (math.floor(math.log2(scale)) - 16), 2.0**-32)


def off_grid(found):
    """True if a value is no whole number of steps."""
    return bool(np.any(found != np.rint(found)))


@pytest.mark.parametrize("noise_multiplier", [1e-9, 1e-5, 0.25, 1.0, 7.5, 1e12])
def test_a_released_vector_lies_on_the_public_grid_whatever_the_sum(noise_multiplier, monkeypatch):
    """Neither fractions of the sum nor the spacing of floats near it survive; without the rounding both do."""
    sums = [0.0, 1 / 3, -1 / 3, 2.0**19 + 2.0**-32, 5e-324, 2.0**20]
    total = bounded(sums * 40)
    release = GaussianMechanism(noise_multiplier).release
    found = steps(release(total, rng=SYSTEM_RANDOM).values, noise_multiplier)
    assert not off_grid(found)
    assert np.abs(found).max() <= 2.0**53
    monkeypatch.setattr(mechanisms, "rounded", lambda value, draws, scale, step: value + scale * draws.values)
    raw = steps(release(total, rng=SYSTEM_RANDOM).values, noise_multiplier)
    assert off_grid(raw[::6])


def test_without_rounding_low_digits_tell_a_large_sum_from_a_small_one(monkeypatch):
    """The classical attack on float noise works on a mechanism that skips the grid, and finds nothing on this one."""
    total = bounded([0.0, 2.0**19 + 2.0**10] * 50)

    def fine_digits():
        values = GaussianMechanism(1.0).release(total, rng=SYSTEM_RANDOM).values
        return np.array([value % 2.0**-33 != 0 for value in values]).reshape(50, 2).mean(axis=0)

    assert fine_digits().tolist() == [0.0, 0.0]
    monkeypatch.setattr(mechanisms, "rounded", lambda value, draws, scale, step: value + scale * draws.values)
    small, large = fine_digits()
    assert small > 0.9
    assert large == 0.0


def test_the_grid_depends_on_the_noise_scale_only():
    for scale in (1e-9, 2.0**-17, 0.3, 1.0, math.sqrt(2), 1e12):
        step = mechanisms.grid_step(scale)
        assert math.frexp(step)[0] == 0.5
        assert step == 2.0**-32 or 2.0**-17 < step / scale <= 2.0**-16


def test_no_released_zero_has_a_sign():
    out = GaussianMechanism(1.0).release(bounded([-1e-9, -0.0, 0.0, 1e-9]), rng=FixedNoise())
    assert out.values.tolist() == [0.0] * 4
    assert not np.signbit(out.values).any()


def test_coordinates_that_no_sum_of_rows_has_are_cut_before_the_noise():
    out = GaussianMechanism(1.0).release(bounded([1e300, -1e300, 2.0**20]), rng=FixedNoise())
    assert out.values.tolist() == [2.0**20, -(2.0**20), 2.0**20]


def test_the_nearest_multiple_is_taken_on_either_side_of_the_middle():
    noise = FixedNoise([0.0, 0.0, 1e-6, -1e-6])
    step = mechanisms.grid_step(math.sqrt(2))
    out = GaussianMechanism(1.0).release(bounded(step * np.array([0.49, 0.51, 3.5, 3.5])), rng=noise)
    assert (out.values / step).tolist() == [0.0, 1.0, 4.0, 3.0]


def close_calls(noise_multiplier, seed):
    """Returns a sum such that with this seed's noise every coordinate lands in the middle of two multiples."""
    scale = noise_multiplier * math.sqrt(2) * mechanisms.ROUND_UP
    step = mechanisms.grid_step(scale)
    noise = scale * SeededRandom(seed).gaussian(200)
    return bounded(np.rint(noise / step) * step + step / 2 - noise)


@pytest.mark.parametrize("noise_multiplier", [0.25, 3.0])
def test_an_error_of_the_float_draw_moves_no_value_even_in_the_middle_of_two_multiples(noise_multiplier, monkeypatch):
    """`ndtri` is made wrong by 50 units in the last place, either way: nothing changes. Floats alone would change."""
    total, ndtri = close_calls(noise_multiplier, seed=5), special.ndtri

    def released(error):
        monkeypatch.setattr(special, "ndtri", lambda half: ndtri(half) * (1 + error * 2.0**-52))
        return GaussianMechanism(noise_multiplier).release(total, rng=SeededRandom(5)).values

    exact = released(0)
    assert np.array_equal(released(50), exact)
    assert np.array_equal(released(-50), exact)
    monkeypatch.setattr(mechanisms, "_MARGIN", 0.0)
    assert np.mean(released(50) != released(-50)) > 0.9


def test_floats_and_rationals_agree_where_floats_are_certain(monkeypatch):
    total = bounded(np.linspace(-3, 3, 500))
    certain = GaussianMechanism(1.0).release(total, rng=SeededRandom(8)).values
    monkeypatch.setattr(mechanisms, "_MARGIN", 1.0)  # now every coordinate is in doubt
    assert np.array_equal(GaussianMechanism(1.0).release(total, rng=SeededRandom(8)).values, certain)


def test_floats_decide_almost_always(monkeypatch):
    """A coordinate is in doubt with probability 2e-8, so three in 100,000 are a false alarm of 1e-9."""
    asked = []
    is_below = GaussianDraws.is_below
    monkeypatch.setattr(GaussianDraws, "is_below", lambda *args: asked.append(args) or is_below(*args))
    GaussianMechanism(1.0).release(bounded(np.zeros(100_000)), rng=SYSTEM_RANDOM)
    assert len(asked) < 3


def test_the_discrete_gaussian_is_not_dominated_by_the_event():
    """Why the vector is a rounded Gaussian: at standard deviation 1 on whole numbers the other law costs more."""
    x = np.arange(-60, 61)
    law = stats.norm.pdf(x) / stats.norm.pdf(x).sum()

    def discrete(epsilon):
        return float(np.maximum(law[:-1] - math.exp(epsilon) * law[1:], 0).sum())

    def continuous(epsilon):
        return stats.norm.cdf(0.5 - epsilon) - math.exp(epsilon) * stats.norm.cdf(-0.5 - epsilon)

    assert discrete(0.0) == pytest.approx(0.399, abs=5e-4)
    assert continuous(0.0) == pytest.approx(0.383, abs=5e-4)
    assert discrete(5.3) / continuous(5.3) == pytest.approx(2.12, abs=0.01)


def test_a_whole_vector_of_an_embedding_has_its_law_and_a_delta_that_counts_for_nothing():
    """4,096 released coordinates, Kolmogorov-Smirnov at 1e-6; noise of 0.7 or 1.3 times the scale is rejected."""
    value = np.random.default_rng(2).normal(size=4096)
    noise = GaussianMechanism(1.5).release(bounded(value, Sensitivity(l2=2.0, range=None)), rng=SYSTEM_RANDOM).values
    noise = (noise - value) / 3.0
    assert stats.kstest(noise, "norm").pvalue > 1e-6
    assert max(stats.kstest(noise / factor, "norm").pvalue for factor in (0.7, 1.3)) < 1e-6
    assert GaussianMechanism(1.5).implementation_delta(4096) < 3.1e-36


# --- the two noisy maxima: exact laws for few candidates, from the definition of each mechanism ---------------------


NEIGHBOURS = [
    ([3.0, 2.0, 0.0], [2.0, 3.0, 0.0]),
    ([1.0, 1.0, 1.0], [2.0, 0.0, 1.0]),
    ([5.0, 0.0, 0.0], [4.0, 0.0, 1.0]),
    ([0.0, 0.0, 0.0], [1.0, 1.0, 0.0]),
]


@pytest.mark.parametrize(("before", "after"), NEIGHBOURS)
@pytest.mark.parametrize("noise_multiplier", [0.3, 1.0, 4.0])
def test_the_exponential_mechanism_has_the_bounded_range_that_its_event_declares(before, after, noise_multiplier):
    spread = np.ptp(np.subtract(after, before))
    losses = np.log(softmax(after, noise_multiplier * spread)) - np.log(softmax(before, noise_multiplier * spread))
    assert np.ptp(losses) <= GumbelMechanism(noise_multiplier).event.bound + 1e-12
    assert np.ptp(losses) >= GumbelMechanism(noise_multiplier).event.bound - 1e-12  # tight: the softmax range is exact


@pytest.mark.parametrize(("before", "after"), NEIGHBOURS)
@pytest.mark.parametrize("noise_multiplier", [0.3, 1.0, 4.0])
def test_permute_and_flip_loses_at_most_the_epsilon_of_its_event(before, after, noise_multiplier):
    spread = np.ptp(np.subtract(after, before))
    here, there = (permute_and_flip(s, noise_multiplier * spread) for s in (before, after))
    assert np.abs(np.log(here) - np.log(there)).max() <= PermuteAndFlipMechanism(noise_multiplier).event.epsilon + 1e-12


def test_the_epsilon_of_permute_and_flip_is_nearly_reached():
    here, there = permute_and_flip([0.0, 40.0], 1.0), permute_and_flip([1.0, 40.0], 1.0)
    assert math.log(there[0] / here[0]) == pytest.approx(1.0, abs=1e-6)


# --- planted bugs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.7, 1 / math.sqrt(2), 0.999, 1.001, 1.3])
@pytest.mark.parametrize("contract", [TestGaussian, TestGumbel, TestPermuteAndFlip])
def test_a_planted_wrong_scale_turns_the_contract_red(contract, factor, monkeypatch):
    monkeypatch.setattr(mechanisms, "ROUND_UP", factor)
    with pytest.raises(AssertionError):
        contract().test_the_noise_scale_is_the_multiplier_times_the_sensitivity_in_its_own_norm()


def _wrong_scale(power, norm):
    def scale(self, total):
        return self.noise_multiplier**power * getattr(total.sensitivity, norm or self.norm)

    return scale


@pytest.mark.parametrize("contract", [TestGaussian, TestGumbel, TestPermuteAndFlip])
def test_a_variance_or_a_foreign_norm_for_the_scale_turns_the_contract_red(contract, monkeypatch):
    other = "range" if contract().make(1.0).norm == "l2" else "l2"
    for power, norm in ((2, None), (0, None), (-1, None), (1, other)):
        monkeypatch.setattr(mechanisms.Mechanism, "_scale", _wrong_scale(power, norm))
        with pytest.raises(AssertionError):
            contract().test_the_noise_scale_is_the_multiplier_times_the_sensitivity_in_its_own_norm()


class OneCoordinate(FixedNoise):
    """Noise on the first coordinate only."""

    def _give(self, kind, n):
        return super()._give(kind, n) * (np.arange(n) == 0)


@pytest.mark.parametrize("contract", [TestGaussian, TestGumbel, TestPermuteAndFlip])
def test_noise_on_one_coordinate_only_turns_the_contract_red(contract, monkeypatch):
    monkeypatch.setattr("tests.contracts.mechanism.FixedNoise", OneCoordinate)
    with pytest.raises(AssertionError):
        contract().test_each_coordinate_gets_its_own_noise()


def _redrawn_until_valid(self, total, *, rng):
    rng.gaussian_draws(total.value.size)
    return GaussianMechanism_release(self, total, rng=rng)


GaussianMechanism_release = GaussianMechanism.release


def test_noise_that_is_drawn_again_turns_the_contract_red(monkeypatch):
    monkeypatch.setattr(GaussianMechanism, "release", _redrawn_until_valid)
    with pytest.raises(AssertionError):
        TestGaussian().test_noise_is_drawn_once_with_one_draw_per_coordinate()
