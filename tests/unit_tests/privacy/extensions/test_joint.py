"""The joint exponential mechanism: its exact law as run, against the definition, and planted bugs that change it."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from langchain_dpicl.exceptions import ConfigurationError, SensitivityError
from langchain_dpicl.privacy.accounting.events import BoundedRangeEvent
from langchain_dpicl.privacy.extensions import joint_exponential as joint
from langchain_dpicl.privacy.extensions.joint_exponential import JointExponentialMechanism, KeywordSum
from langchain_dpicl.privacy.mechanisms.bounded import Sensitivity
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM, SecureRandom
from tests.contracts.mechanism import MechanismContract, bounded, softmax

ONE = Sensitivity(l2=None, range=1.0)


class TestJointExponential(MechanismContract):
    narrowest = 2
    further_parameters = {"num_choices": 2}  # noqa: RUF012 - the contract declares it

    def make(self, noise_multiplier):
        return JointExponentialMechanism(noise_multiplier, num_choices=2)

    def expected_event(self, noise_multiplier):
        return BoundedRangeEvent(1.0 / noise_multiplier)


# --- the law of the code as it runs, by walking through all of its coins ---------------------------------------------


class Branching(SecureRandom):
    """Takes the listed ways at each exact choice, then the first possible one; records what each choice offered."""

    def __init__(self, ways):
        self.ways, self.offered = list(ways), []

    def _take(self, chances):
        step = len(self.offered)
        self.offered.append([(i, chance) for i, chance in enumerate(chances) if chance])
        return self.offered[step][self.ways[step] if step < len(self.ways) else 0][0]

    def integer_below(self, high):
        assert high >= 1
        return self._take([Fraction(1, high)] * high)

    def weighted_choice(self, weights):
        exact = [Fraction(weight) for weight in weights]
        return self._take([weight / sum(exact) for weight in exact])


def law_of_the_code(counts, k, noise_multiplier, sensitivity=ONE):
    """Returns {sequence: exact probability} of one release."""
    mechanism, total = JointExponentialMechanism(noise_multiplier, k), bounded(counts, sensitivity)
    law, open_ways = {}, [()]
    while open_ways:
        ways = open_ways.pop()
        rng = Branching(ways)
        found = mechanism.release(total, rng=rng).indices
        taken = (*ways, *[0] * (len(rng.offered) - len(ways)))
        for i in range(len(ways), len(taken)):  # later choices: their other ways are walked from here
            open_ways += [(*taken[:i], way) for way in range(1, len(rng.offered[i]))]
        chance = math.prod((offer[way][1] for offer, way in zip(rng.offered, taken, strict=True)), start=Fraction(1))
        law[found] = law.get(found, 0) + chance
    return law


def gap(counts, sequence):
    """Minus the utility, by its definition."""
    ordered = sorted(counts, reverse=True)
    return max(ordered[i] - counts[j] for i, j in enumerate(sequence))


def law_by_definition(counts, k, noise_multiplier, sensitivity=ONE):
    """The exponential mechanism over all sequences, one by one."""
    sequences = list(itertools.permutations(range(len(counts)), k))
    chances = softmax([-gap(counts, s) for s in sequences], 2 * noise_multiplier * sensitivity.range)
    return dict(zip(sequences, chances, strict=True))


def assert_laws_agree(counts, k, noise_multiplier, sensitivity=ONE):
    found = law_of_the_code(counts, k, noise_multiplier, sensitivity)
    assert sum(found.values()) == 1
    wanted = law_by_definition(counts, k, noise_multiplier, sensitivity)
    assert set(found) == set(wanted)
    for sequence, chance in wanted.items():
        assert float(found[sequence]) == pytest.approx(chance, rel=1e-11)


SMALL = [
    ([7.0], 1),
    ([2.0, 2.0], 1),
    ([0.0, 0.0, 0.0], 2),
    ([3.0, 1.0, 1.0, 0.0], 2),
    ([5.0, 5.0, 2.0, 0.0], 3),
    ([3.0, 1.0, 2.0, 0.0], 4),
    ([9.0, 0.0, 8.0, 0.0], 2),
    ([-3.0, 2.0, -1.0], 2),
]


@pytest.mark.parametrize(("counts", "k"), SMALL, ids=str)
@pytest.mark.parametrize("noise_multiplier", [0.25, 1.0, 6.0])
def test_every_sequence_has_the_probability_of_the_definition(counts, k, noise_multiplier):
    assert_laws_agree(counts, k, noise_multiplier)
    assert_laws_agree(counts, k, noise_multiplier, Sensitivity(l2=1.0, range=2.0))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), noise_multiplier=st.floats(0.1, 10.0))
def test_any_small_counts_have_the_law_of_the_definition(data, noise_multiplier):
    counts = data.draw(st.lists(st.integers(0, 7).map(float), min_size=1, max_size=4))
    k = data.draw(st.integers(1, min(3, len(counts))))
    assert_laws_agree(counts, k, noise_multiplier)


def test_shells_count_all_sequences_of_a_large_domain():
    """All of d (d - 1) ... (d - k + 1), exactly, where floats would have lost them."""
    counts = np.floor(200 * np.random.default_rng(0).random(5_000) ** 9)
    shells = joint._Sequences(counts, 40).shells()
    assert sum(shells) == math.perm(5_000, 40)
    assert min(shells) >= 0


# --- the bound on the utility, and so on the event --------------------------------------------------------------------


def moves(counts, changed, k):
    """Returns the exact change of the utility of each sequence."""
    return [gap(counts, s) - gap(changed, s) for s in itertools.permutations(range(len(counts)), k)]


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize(("changes", "spread"), [((0, 1), 1), ((-1, 0), 1), ((-1, 0, 1), 2)])
def test_the_utility_moves_within_twice_the_range_of_the_counts(changes, spread, k):
    """All changes of 62 small tables; with two choices the whole of it is reached, with one half of it."""
    widest = 0
    tables = [*np.random.default_rng(k).integers(0, 4, (60, 4)).tolist(), [3, 1, 0, 0], [4, 2, 1, 0]]
    for counts in tables:
        for change in itertools.product(changes, repeat=4):
            moved = moves(counts, [c + u for c, u in zip(counts, change, strict=True)], k)
            assert max(moved) - min(moved) <= 2 * spread
            widest = max(widest, max(moved) - min(moved))
    assert widest == (spread if k == 1 else 2 * spread)


@pytest.mark.parametrize(("before", "after", "sensitivity"), [
    ([3.0, 1.0, 0.0, 0.0], [4.0, 1.0, 1.0, 0.0], ONE),
    ([4.0, 3.0, 0.0, 1.0], [5.0, 2.0, 1.0, 0.0], Sensitivity(l2=None, range=2.0)),
])  # fmt: skip
@pytest.mark.parametrize("noise_multiplier", [0.3, 2.0])
def test_the_mechanism_has_the_bounded_range_that_its_event_declares(before, after, sensitivity, noise_multiplier):
    here, there = (law_of_the_code(counts, 2, noise_multiplier, sensitivity) for counts in (before, after))
    losses = [math.log(there[s] / here[s]) for s in here]
    bound = JointExponentialMechanism(noise_multiplier, 2).event.bound
    assert max(losses) - min(losses) <= bound
    assert max(losses) - min(losses) >= bound * (1 - 1e-9)  # reached: not a smaller scale would do


# --- weights: 60 digits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-9, 0.37, 2.0, 4e12])
def test_weights_are_shell_sizes_times_an_exponential(scale):
    shells = [1, 0, 3**400, 17, *[5] * 300]
    weights = joint._weights(shells, scale)
    with mpmath.workdps(120):
        for v in (0, 1, 2, 3, 4, 150, 303):
            wanted = shells[v] * mpmath.exp(-mpmath.mpf(v) / mpmath.mpf(scale))
            if wanted:
                assert abs(mpmath.mpf(str(weights[v])) / wanted - 1) < mpmath.mpf(10) ** -48
            else:
                assert weights[v] == 0


def test_weights_of_a_negligible_shell_underflow_to_zero_and_raise_nothing():
    assert [float(w) for w in joint._weights([3, 10**300], 1e-300)] == [3.0, 0.0]


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, -1, 1025, 2.0, True, None])
def test_a_number_of_choices_out_of_range_is_refused(bad):
    with pytest.raises(ConfigurationError, match="num_choices"):
        JointExponentialMechanism(1.0, num_choices=bad)


def test_a_public_domain_of_fewer_keywords_than_choices_is_refused():
    made = JointExponentialMechanism(1.0, num_choices=3)
    with pytest.raises(ConfigurationError, match="at most the 2 keywords"):
        made.release(bounded([1.0, 2.0], ONE), rng=SYSTEM_RANDOM)
    with pytest.raises(ConfigurationError, match="num_choices"):
        made.implementation_delta(2)
    assert made.implementation_delta(3) == 2.0**-90


def test_counts_that_are_no_whole_numbers_are_refused_without_showing_them():
    with pytest.raises(SensitivityError, match="whole numbers") as caught:
        JointExponentialMechanism(1.0, num_choices=1).release(bounded([1.0, 2.375], ONE), rng=SYSTEM_RANDOM)
    assert "2.375" not in str(caught.value)


def test_counts_that_no_sum_of_rows_has_are_cut_first(monkeypatch):
    """At 4 instead of 2^20: the law is that of the cut counts."""
    uncut = law_of_the_code([9.0, 4.0, 8.0, 0.0, -7.0], 2, 1.0)
    monkeypatch.setattr(joint, "LARGEST", 4.0)
    cut = law_of_the_code([9.0, 4.0, 8.0, 0.0, -7.0], 2, 1.0)
    assert cut == law_of_the_code([4.0, 4.0, 4.0, 0.0, -4.0], 2, 1.0) != uncut


def test_counts_of_the_keyword_sum_are_accepted_and_no_keyword_comes_twice():
    rows = np.random.default_rng(1).random((30, 400)) < 0.2
    total = KeywordSum().bound(rows, row_shape="slots", adjacency="add_remove", width=400)
    out = JointExponentialMechanism(0.05, num_choices=25).release(total, rng=SYSTEM_RANDOM)
    assert len(set(out.indices)) == 25
    assert repr(out).endswith(f"indices={out.indices})")


# --- planted bugs: each must turn the law red -------------------------------------------------------------------------


def _plant_earlier_choices_are_not_taken_away(monkeypatch):
    monkeypatch.setattr(joint._Sequences, "factors", lambda self, v: [self.near(a, v) for a in range(len(self._top))])


def _plant_one_too_few(monkeypatch):
    factors = joint._Sequences.factors
    monkeypatch.setattr(joint._Sequences, "factors", lambda self, v: [max(n - 1, 0) for n in factors(self, v)])


def _plant_off_by_one_gap(monkeypatch):
    factors = joint._Sequences.factors
    monkeypatch.setattr(joint._Sequences, "factors", lambda self, v: factors(self, v + 1))


def _plant_all_within_instead_of_the_shell(monkeypatch):
    def shells(self):
        return [math.prod(self.factors(v)) for v in range(self.widest + 1)]

    monkeypatch.setattr(joint._Sequences, "shells", shells)


def _plant_a_scale(factor):
    def plant(monkeypatch):
        weights = joint._weights
        monkeypatch.setattr(joint, "_weights", lambda shells, scale: weights(shells, factor * scale))

    return plant


def _plant_the_first_gap_anywhere(monkeypatch):
    monkeypatch.setattr(joint._Sequences, "firsts", lambda self, v: [1] * len(self._top))


def _plant_taken_keywords_shift_nothing(monkeypatch):
    monkeypatch.setattr(joint, "_free", lambda taken, n: n)


def _plant_the_first_of_a_shell(monkeypatch):
    draw = joint._Sequences.draw

    class First(SecureRandom):
        def integer_below(self, high):
            return 0

    monkeypatch.setattr(joint._Sequences, "draw", lambda self, v, *, rng: draw(self, v, rng=First()))


PLANTED = {
    "half_the_scale": _plant_a_scale(0.5),
    "twice_the_scale": _plant_a_scale(2.0),
    **{name: value for name, value in sorted(globals().items()) if name.startswith("_plant_") and "scale" not in name},
}


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_bug_turns_the_law_red(plant, monkeypatch):
    PLANTED[plant](monkeypatch)
    with pytest.raises(AssertionError):
        assert_laws_agree([3.0, 1.0, 1.0, 0.0], 2, 1.0)
