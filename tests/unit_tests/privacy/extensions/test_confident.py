"""Confident-GNMax: its contract, both of its prices, the plans it fits into, and planted bugs that turn these red."""

from __future__ import annotations

import json
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from langchain_dpicl.exceptions import ConfigurationError, SensitivityError
from langchain_dpicl.privacy.accounting import epsilon_upper_bound
from langchain_dpicl.privacy.accounting.events import ComposedEvent, GaussianEvent, RepeatedEvent, SubsampledEvent
from langchain_dpicl.privacy.extensions import confident_gnmax as confident
from langchain_dpicl.privacy.extensions.confident_gnmax import ConfidentGNMaxMechanism
from langchain_dpicl.privacy.extensions.fixed_size_slots import BalancedSlots, PartitionedSlots
from langchain_dpicl.privacy.extensions.joint_exponential import KeywordSum
from langchain_dpicl.privacy.extensions.logit_sums import ClippedLogitMean
from langchain_dpicl.privacy.extensions.normalized_sums import MaxNormalizedSum, UnitVectorSum
from langchain_dpicl.privacy.extensions.registry import MECHANISMS
from langchain_dpicl.privacy.mechanisms.bounded import ProbabilitySum, Sensitivity, VoteSum
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM, SecureRandom
from langchain_dpicl.privacy.mechanisms.release_plan import (
    GaussianMechanism,
    GumbelMechanism,
    PoissonUnits,
    ReleasePlan,
)
from tests.contracts.doubles import CountingRandom, FixedDraws
from tests.contracts.mechanism import BOTH, MechanismContract, bounded

ALWAYS = -(2.0**19)
"""A threshold that every sum here passes."""


class QueuedNoise(SecureRandom):
    """Gives the listed noise vectors, one per draw, and records how many coordinates were asked for."""

    def __init__(self, *noise):
        self.noise, self.asked = list(noise), []

    def gaussian_draws(self, n):
        self.asked.append(n)
        return FixedDraws(np.asarray(self.noise.pop(0), dtype=np.float64))


class TestConfidentGNMax(MechanismContract):
    further_parameters = {"test_noise_multiplier": 2.0, "threshold": ALWAYS}  # noqa: RUF012 - the contract declares it

    def make(self, noise_multiplier):
        return ConfidentGNMaxMechanism(noise_multiplier, **self.further_parameters)

    def expected_event(self, noise_multiplier):
        """The largest float whose Gaussian costs no less than both, by the definition."""
        mu_squared = 1 / Fraction(noise_multiplier) ** 2 + Fraction(1, 4)
        found = 1.0 / math.sqrt(mu_squared) * (1 + 2.0**-50)
        while Fraction(found) ** 2 * mu_squared > 1:
            found = math.nextafter(found, 0.0)
        return GaussianEvent(found)


def released(mechanism, values, *noise, sensitivity=BOTH):
    """Returns (index, coordinates asked for per draw) of a release with this noise."""
    rng = QueuedNoise(*noise)
    return mechanism.release(bounded(values, sensitivity), rng=rng).index, rng.asked


# --- what leaves ----------------------------------------------------------------------------------------------------


def test_a_passed_test_is_answered_with_noise_of_its_own_and_a_failed_one_draws_no_more():
    made = ConfidentGNMaxMechanism(1.0, 1.0, threshold=5.0)
    assert released(made, [1.0, 6.0, 2.0], [0.0], [0.0] * 3) == (1, [1, 3])
    assert released(made, [1.0, 4.0, 2.0], [0.0]) == (None, [1])
    assert released(made, [1.0, 4.0, 2.0], [1.5], [9.0, 0.0, 0.0]) == (0, [1, 3])
    assert released(made, [1.0, 6.0, 2.0], [-1.5]) == (None, [1])


def test_a_count_at_the_threshold_passes():
    made = ConfidentGNMaxMechanism(1.0, 1.0, threshold=5.0)
    assert released(made, [5.0, 0.0], [0.0], [0.0, 0.0])[0] == 0
    assert released(made, [5.0 - 2.0**-10, 0.0], [0.0])[0] is None


def test_the_threshold_is_on_the_largest_coordinate_and_no_other_enters():
    made = ConfidentGNMaxMechanism(1.0, 1.0, threshold=5.0)
    assert released(made, [6.0, -(2.0**20), 2.0**-32], [0.0], [0.0] * 3)[0] == 0
    assert released(made, [4.0, 4.0, 4.0], [0.0])[0] is None


BIG = 2.0**14  # times the scale, in noise: 1e-8 of it is wider than a grid of 2^-16 scales


@pytest.mark.parametrize("sensitivity", [BOTH, Sensitivity(l2=0.3, range=5.0, linf=0.25)], ids=["votes", "other"])
@pytest.mark.parametrize("noise_multiplier", [0.5, 3.0])
def test_each_noise_has_the_scale_of_its_own_norm(noise_multiplier, sensitivity):
    """The test flips where multiplier times linf says, the answer where multiplier times L2 says."""
    test_scale, scale = noise_multiplier * sensitivity.linf, 7.0 * noise_multiplier * sensitivity.l2
    made = ConfidentGNMaxMechanism(7.0 * noise_multiplier, noise_multiplier, threshold=test_scale * BIG)
    for factor, is_answered in ((1 - 1e-8, False), (1 + 1e-8, True)):
        index, _ = released(made, [0.0, 0.0], [factor * BIG], [0.0, 0.0], sensitivity=sensitivity)
        assert (index is not None) == is_answered
    always = ConfidentGNMaxMechanism(7.0 * noise_multiplier, noise_multiplier, threshold=ALWAYS)
    for factor, chosen in ((1 - 1e-8, 0), (1 + 1e-8, 1)):
        noise = [0.0], [0.0, factor * BIG]
        assert released(always, [scale * BIG, 0.0], *noise, sensitivity=sensitivity)[0] == chosen


@pytest.mark.parametrize("multiplier", [0.1, 1 / 3, 0.7, 1.0, 49.0])
def test_neither_noise_is_less_than_its_price_says(multiplier, monkeypatch):
    """scale * (1 / multiplier), as the event has it, is at least the sensitivity; over by 1e-14 at most."""
    scales = []
    monkeypatch.setattr(confident, "_noisy", lambda counts, scale, rng: scales.append(scale) or counts)
    for bound in (0.1, 1.0, math.sqrt(2), 4 / 3):
        total = bounded([0.0], Sensitivity(l2=bound, range=None, linf=bound))
        ConfidentGNMaxMechanism(multiplier, multiplier, threshold=ALWAYS).release(total, rng=SYSTEM_RANDOM)
        test_scale, scale = scales[-2:]
        assert test_scale == scale
        assert multiplier * bound < scale < multiplier * bound * (1 + 1e-14)
        assert bound / scale < 1.0 / multiplier


def test_huge_counts_are_cut_and_do_not_overflow():
    made = ConfidentGNMaxMechanism(1.0, 1.0, threshold=2.0**20)
    assert released(made, [-1e300, 1e300], [0.0], [0.0, 0.0])[0] == 1
    assert released(made, [-1e300, 1e300], [-1.0])[0] is None


@pytest.mark.parametrize("sensitivity", [Sensitivity(l2=1.0, range=1.0), Sensitivity(l2=None, range=1.0, linf=1.0)])
def test_a_sum_without_one_of_the_two_norms_is_refused_before_any_noise_is_drawn(sensitivity):
    rng = CountingRandom()
    with pytest.raises(SensitivityError, match=r"linf|l2"):
        ConfidentGNMaxMechanism(1.0, 1.0, threshold=ALWAYS).release(bounded([1.0, 2.0], sensitivity), rng=rng)
    assert rng.num_bytes == 0


def test_the_event_of_a_release_does_not_tell_what_happened():
    passed, failed = (ConfidentGNMaxMechanism(3.0, 2.0, threshold=t) for t in (ALWAYS, -ALWAYS))
    outs = [made.release(bounded([1.0, 2.0]), rng=SYSTEM_RANDOM) for made in (passed, failed)]
    assert [out.index is None for out in outs] == [False, True]
    assert outs[0].event == outs[1].event == passed.event
    assert [(out.values, out.indices) for out in outs] == [(None, None)] * 2


def test_every_draw_is_counted_in_the_implementation_delta():
    per_draw = SecureRandom.implementation_delta("gaussian", 1)
    assert ConfidentGNMaxMechanism(1.0, 1.0, threshold=0.0).implementation_delta(6) == 7 * per_draw


@pytest.mark.parametrize("bad", [0.0, -1.0, 1e-10, 1e13, math.nan, math.inf, True, "1", None])
def test_a_noise_multiplier_of_the_test_out_of_range_is_refused(bad):
    with pytest.raises(ConfigurationError, match="test_noise_multiplier"):
        ConfidentGNMaxMechanism(1.0, bad, threshold=0.0)


@pytest.mark.parametrize("bad", [2.0**20 + 1, -(2.0**21), math.nan, math.inf, True, "1", None])
def test_a_threshold_out_of_range_is_refused(bad):
    with pytest.raises(ConfigurationError, match="threshold"):
        ConfidentGNMaxMechanism(1.0, 1.0, threshold=bad)


# --- noise in votes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row_shape", "adjacency", "l2"),
    [("slots", "add_remove", 2**0.5), ("units", "add_remove", 1.0), ("slots", "replace_one", 2**0.5),
     ("units", "replace_one", 2**0.5)],
)  # fmt: skip
def test_noise_in_votes_is_divided_by_the_sensitivity_of_votes(row_shape, adjacency, l2):
    made = ConfidentGNMaxMechanism.of_votes(
        threshold=180, sigma_threshold=5, sigma_votes=20, row_shape=row_shape, adjacency=adjacency
    )
    assert made == ConfidentGNMaxMechanism(20 / l2, 5.0, threshold=180.0)
    assert type(made.threshold) is float


@pytest.mark.parametrize("field", ["sigma_threshold", "sigma_votes"])
@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, True, "5", None])
def test_a_noise_in_votes_out_of_range_is_refused_by_its_own_name(field, bad):
    votes = {"threshold": 1.0, "sigma_threshold": 1.0, "sigma_votes": 1.0} | {field: bad}
    with pytest.raises(ConfigurationError, match=f"{field}:"):
        ConfidentGNMaxMechanism.of_votes(**votes, row_shape="slots", adjacency="add_remove")


def test_no_other_component_offers_it_by_name():
    assert ConfidentGNMaxMechanism.name not in MECHANISMS


# --- prices ---------------------------------------------------------------------------------------------------------

MULTIPLIERS = st.floats(1e-9, 1e12)


@settings(max_examples=300, deadline=None)
@given(answer=MULTIPLIERS, test=MULTIPLIERS, tests=st.integers(1, 10**6), data=st.data())
@example(answer=1e12, test=1e12, tests=1, data=None)
@example(answer=1e-9, test=1e12, tests=10**6, data=None)
def test_the_event_of_several_is_never_cheaper_than_both_gaussians_and_hardly_dearer(answer, test, tests, data):
    answers = data.draw(st.integers(0, tests)) if data else tests
    found = ConfidentGNMaxMechanism(answer, test, threshold=0.0).repeated(tests, answers).noise_multiplier
    mu_squared = tests / Fraction(test) ** 2 + answers / Fraction(answer) ** 2
    assert Fraction(found) ** 2 * mu_squared <= 1
    assert Fraction(math.nextafter(found, math.inf)) ** 2 * mu_squared > 1


@pytest.mark.parametrize(("tests", "answers"), [(1, 0), (1, 1), (500, 500), (500, 37)])
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_one_event_costs_what_its_tests_and_answers_cost_one_by_one(tests, answers, adjacency):
    made = ConfidentGNMaxMechanism(20 / math.sqrt(2), 5.0, threshold=180.0)
    parts = ComposedEvent((RepeatedEvent(made.test_event, tests), RepeatedEvent(made.answer_event, answers)))
    together, apart = (
        epsilon_upper_bound(event, delta=1e-6, adjacency=adjacency) for event in (made.repeated(tests, answers), parts)
    )
    assert together == pytest.approx(apart, rel=1e-6)
    assert made.repeated(1, 0) == made.test_event
    assert made.event == made.repeated(1, 1)


def test_more_tests_or_answers_cost_more():
    made = ConfidentGNMaxMechanism(20.0, 5.0, threshold=180.0)
    counts = [(1, 0), (1, 1), (2, 1), (2, 2), (100, 2), (100, 100), (101, 100)]
    noises = [made.repeated(*count).noise_multiplier for count in counts]
    assert noises == sorted(noises, reverse=True)
    assert len(set(noises)) == len(counts)


@pytest.mark.parametrize(("tests", "answers", "name"), [(0, 0, "tests"), (2, 3, "answers"), (2, -1, "answers"),
                                                        (True, 0, "tests"), (2, 1.0, "answers")])  # fmt: skip
def test_counts_out_of_range_are_refused(tests, answers, name):
    with pytest.raises(ConfigurationError, match=f"{name}:"):
        ConfidentGNMaxMechanism(1.0, 1.0, threshold=0.0).repeated(tests, answers)


# --- in a plan ------------------------------------------------------------------------------------------------------

CONFIDENT = ConfidentGNMaxMechanism(20.0, 5.0, threshold=120.0)


def plan(sampler=None, aggregation=None, mechanism=CONFIDENT, **options):
    """Returns a plan of votes over a partition, if nothing else is said."""
    sampler = sampler or PartitionedSlots(num_slots=200, shots_per_slot=1, public_size=1000)
    adjacency = "add_remove" if isinstance(sampler, PoissonUnits) else "replace_one"
    return ReleasePlan(sampler, aggregation or VoteSum(), mechanism, adjacency, **options)


def test_a_fixed_partition_pays_for_tests_and_answers_unamplified():
    assert plan().block_event(1) == CONFIDENT.event
    assert plan().block_event(500, answers=30) == CONFIDENT.repeated(500, 30)
    assert plan().block_event(500, answers=0) == CONFIDENT.repeated(500, 0)
    assert plan().event(3) == RepeatedEvent(CONFIDENT.event, 3)


@pytest.mark.parametrize("sampler", [PoissonUnits(0.2), BalancedSlots(200, 1, 1000)], ids=lambda sampler: sampler.name)
def test_a_run_on_one_secret_sample_is_composed_inside_and_amplified_once(sampler):
    assert plan(sampler).block_event(500, answers=30) == SubsampledEvent(CONFIDENT.repeated(500, 30), 0.2)
    assert plan(sampler).block_event(500) == SubsampledEvent(CONFIDENT.repeated(500, 500), 0.2)


@pytest.mark.parametrize(("length", "answers"), [(0, 0), (2, 3), (2, -1), (2, True)])
def test_a_block_with_counts_out_of_range_is_refused(length, answers):
    with pytest.raises(ConfigurationError, match=r"length:|answers:"):
        plan().block_event(length, answers=answers)


@pytest.mark.parametrize("mechanism", [GumbelMechanism(1.0), GaussianMechanism(1.0)], ids=lambda made: made.name)
def test_a_mechanism_that_always_answers_takes_no_number_of_answers(mechanism):
    made = plan(mechanism=mechanism)
    with pytest.raises(ConfigurationError, match=f"answers: expected None: {mechanism.name}"):
        made.block_event(5, answers=5)
    assert made.block_event(5) == RepeatedEvent(mechanism.event, 5)
    assert made.block_event(1) == mechanism.event


@pytest.mark.parametrize("aggregation", [VoteSum(), ProbabilitySum()], ids=lambda made: made.name)
def test_counts_of_agreement_are_accepted_and_tested(aggregation):
    made = plan(aggregation=aggregation)
    rows = np.eye(3)[[0] * 199 + [2]]
    out = made.mechanism.release(made.bound(rows, width=3), rng=QueuedNoise([0.0], [0.0] * 3))
    assert out.index == 0


@pytest.mark.parametrize("aggregation", [MaxNormalizedSum(), ClippedLogitMean(3.0, 200), UnitVectorSum(), KeywordSum()],
                         ids=lambda made: made.name)  # fmt: skip
def test_sums_whose_largest_coordinate_is_no_agreement_are_refused(aggregation):
    with pytest.raises(ConfigurationError, match=r"aggregation|mechanism"):
        plan(aggregation=aggregation)


def test_a_constant_beside_a_threshold_is_refused():
    with pytest.raises(ConfigurationError, match="constants: expected none beside confident_gnmax"):
        plan(constants=(3.0,))


def test_other_noise_for_the_answers_keeps_the_test_and_all_of_it_is_shown():
    louder = plan().with_noise(40.0)
    assert louder.mechanism == ConfidentGNMaxMechanism(40.0, 5.0, threshold=120.0)
    described = json.loads(json.dumps(louder.to_dict()))
    assert described["mechanism"] == louder.mechanism.to_dict()
    assert described["sensitivity"] == {"l2": math.sqrt(2), "range": 2.0, "linf": 1.0}


# --- planted bugs ---------------------------------------------------------------------------------------------------


def _threshold_without_noise(counts, scale, rng):
    return counts if counts.size == 1 else REAL(counts, scale, rng)


def _half_the_noise(counts, scale, rng):
    return REAL(counts, scale / math.sqrt(2), rng)


REAL = confident._noisy


@pytest.mark.parametrize("bug", [_threshold_without_noise, _half_the_noise])
@pytest.mark.parametrize("noise_multiplier", [0.5, 3.0])
def test_a_wrong_noise_turns_the_scale_test_red(bug, noise_multiplier, monkeypatch):
    monkeypatch.setattr(confident, "_noisy", bug)
    with pytest.raises((AssertionError, IndexError)):
        test_each_noise_has_the_scale_of_its_own_norm(noise_multiplier, BOTH)


@pytest.mark.parametrize("norm", ["l2", "range"])
def test_a_foreign_norm_for_the_test_turns_the_scale_test_red(norm, monkeypatch):
    require = Sensitivity.require
    monkeypatch.setattr(Sensitivity, "require", lambda self, asked: require(self, norm if asked == "linf" else asked))
    with pytest.raises(AssertionError):
        test_each_noise_has_the_scale_of_its_own_norm(3.0, BOTH)


def test_a_price_that_forgets_the_tests_turns_the_price_test_red(monkeypatch):
    monkeypatch.setattr(ConfidentGNMaxMechanism, "repeated", lambda self, *counts: self.answer_event)
    with pytest.raises(AssertionError):
        test_one_event_costs_what_its_tests_and_answers_cost_one_by_one(500, 500, "replace_one")


def test_a_price_rounded_to_the_cheap_side_turns_the_price_law_red(monkeypatch):
    real = confident._compose_tests
    monkeypatch.setattr(
        confident, "_compose_tests", lambda *a: GaussianEvent(math.nextafter(real(*a).noise_multiplier, math.inf))
    )
    with pytest.raises(AssertionError):
        test_the_event_of_several_is_never_cheaper_than_both_gaussians_and_hardly_dearer()
