"""Clipped gradients and their running sum: the contract of all sums, exactness, and planted bugs."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import threading
import tracemalloc
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_dpicl._opaque import OpaqueRows
from langchain_dpicl.exceptions import ConfigurationError, PrivateAccessError, SensitivityError
from langchain_dpicl.privacy.extensions import gradient_sums
from langchain_dpicl.privacy.extensions.gradient_sums import ClippedGradientSum, RunningSum, running_sum
from langchain_dpicl.privacy.extensions.normalized_sums import UnitVectorSum
from langchain_dpicl.privacy.mechanisms.bounded import Sensitivity, VoteSum
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.privacy.mechanisms.release_plan import (
    GaussianMechanism,
    GumbelMechanism,
    PoissonSlots,
    PoissonUnits,
    ReleasePlan,
)
from langchain_dpicl.release.curator import sum_rows
from tests import row_strategies
from tests.contracts.aggregation import LAW, AggregationContract

CLIP = 0.75
STEPS = 2**32
HOW = {"row_shape": "units", "adjacency": "add_remove"}
NAN, INF = math.nan, math.inf


def running(width, clip=CLIP, adjacency="add_remove"):
    return RunningSum(ClippedGradientSum(clip), row_shape="units", adjacency=adjacency, width=width)


def clipped(rows, clip=CLIP):
    return ClippedGradientSum(clip).bounded_rows(np.asarray(rows), width=np.shape(rows)[1])


def is_in_the_ball(row):
    """True for a row of whole steps whose squares add to at most one, in whole numbers."""
    steps = [x * STEPS for x in row]
    return all(x == int(x) for x in steps) and sum(int(x) ** 2 for x in steps) <= STEPS**2


def plan(aggregation=None, **options):
    parts = {"sampler": PoissonUnits(0.04), "mechanism": GaussianMechanism(1.0), "adjacency": "add_remove"}
    return ReleasePlan(aggregation=aggregation or ClippedGradientSum(CLIP), **{**parts, **options})


class TestClippedGradientSum(AggregationContract):
    row_shapes = ("units",)
    max_width = 2**24

    def make(self):
        return ClippedGradientSum(CLIP)

    def table(self):
        return {("units", "add_remove"): (1.0, None, None), ("units", "replace_one"): (2.0, None, None)}

    def in_domain(self, row):
        return is_in_the_ball(row)

    def extremes(self, row_shape, adjacency):
        share = 1 - 1e-8  # what the length that is divided by exceeds the row's own costs less than that
        if adjacency == "add_remove":
            return np.zeros((0, 2)), [[3.0, -4.0]], share
        return [[3.0, -4.0]], [[-3.0, 4.0]], share


# --- values with a second source --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("width", [1, 5, 300, 20_000])
def test_rows_are_clipped_to_their_own_length_and_never_stretched(width, dtype):
    """v / max(clip, |v|), computed in plain floats; beyond the clip the row is a little shorter, never longer."""
    scales = np.array([[1e-6], [0.01], [1.0], [50.0], [1e12]])
    rows = (np.random.default_rng(1).normal(size=(5, width)) * scales / math.sqrt(width)).astype(dtype)
    exact = rows.astype(np.float64)
    wanted = exact / np.maximum(CLIP, np.linalg.norm(exact, axis=1, keepdims=True))
    kept = clipped(rows)
    np.testing.assert_allclose(kept, wanted, rtol=3e-6, atol=2.0**-32)
    assert np.linalg.norm(kept[0]) < 1e-4
    assert (np.linalg.norm(kept[3:], axis=1) > 1 - 1e-5).all()
    assert all(is_in_the_ball(row) for row in kept.tolist())


def test_rows_of_any_finite_size_are_clipped_and_a_fault_anywhere_counts_nothing():
    half = math.sqrt(0.5)
    rows = [[1e300, -1e300], [5e-324, -5e-324], [1.79e308, 1.0], [0.3, 0.0], [NAN, 1.0], [1.0, -INF], [-0.0, 0.0]]
    wanted = [[half, -half], [0.0, 0.0], [1.0, 0.0], [0.4, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    kept = clipped(np.array(rows))
    np.testing.assert_allclose(kept, wanted, rtol=0, atol=2.0**-27)
    assert not np.signbit(kept[kept == 0]).any()


@pytest.mark.parametrize("clip", [1e-9, 1e9])
def test_the_smallest_and_the_largest_clip_bound_rows_of_every_size(clip):
    sizes = [5e-324, 1e-300, 1e-20, 1e-9, 1e-3, 1.0, 1e9, 1e20, 1.79e308]
    kept = clipped(np.array(sizes)[:, None], clip)
    np.testing.assert_allclose(kept[:, 0], [min(x, clip) / clip for x in sizes], rtol=1e-8, atol=2.0**-32)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 1023, 2**16 + 1, 2**20])
def test_no_row_is_longer_than_one_and_no_square_overflows(width):
    """Rows whose coordinates lose the most where they are cut to whole numbers; whole numbers judge."""
    rows = np.full((3, width), 1e-8, dtype=np.float32)
    rows[0, 0] = 1.0
    rows[1] = np.nextafter(np.float32(1.0), np.float32(0.0))
    rows[2] = np.random.default_rng(2).normal(size=width)
    for row in clipped(rows, 1e-3):
        steps = np.abs(row * STEPS).astype(np.uint64)
        low, high = steps & np.uint64(0xFFFF), steps >> np.uint64(16)  # [d], squares of 17 bits add up below 2^58
        square = (int((high * high).sum()) << 32) + (int((high * low).sum()) << 17) + int((low * low).sum())
        assert (1 - 2.0**-5) * STEPS**2 < square <= STEPS**2


@pytest.mark.parametrize("value", [1.0, np.nextafter(np.float32(1.0), np.float32(0.0)), 1e-30, 1e30])
def test_the_widest_rows_have_a_length_that_does_not_overflow(value):
    """2^24 equal coordinates of the most digits: their length is 2^12 times one, up to what may be cut off."""
    rows = np.broadcast_to(np.float32(value), (1, 2**24))
    (rate,) = ClippedGradientSum(1e-9)._rates(rows)
    length = 2.0**12 * float(np.float32(value))
    assert max(length, 1e-9) <= STEPS / float(rate[0]) <= max(length * (1 + 2.0**-17), 1e-9)


def test_without_what_is_cut_off_a_row_would_be_longer_than_one(monkeypatch):
    rows = np.random.default_rng(2).normal(size=(3, 2**16))
    assert all(is_in_the_ball(row) for row in clipped(rows).tolist())
    monkeypatch.setattr(gradient_sums.math, "isqrt", lambda n: 1e-9 - 1)
    assert not any(is_in_the_ball(row) for row in clipped(rows).tolist())


# --- the running sum --------------------------------------------------------------------------------------------------


def total_of(pieces, width, **options):
    made = running(width, **options)
    for piece in pieces:
        made.add(piece)
    return made.total().value


@LAW
@given(data=st.data(), matrix=row_strategies.any_matrices())
def test_any_cutting_into_batches_and_any_order_gives_the_same_bits(data, matrix):
    width = matrix.shape[1]
    whole = ClippedGradientSum(CLIP).bound(matrix, **HOW, width=width).value
    order = data.draw(st.permutations(range(len(matrix))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(matrix)), max_size=3)))
    pieces = np.split(matrix[list(order)], cuts)
    assert total_of(pieces, width).tobytes() == whole.tobytes()


@pytest.mark.parametrize(("num_rows", "width"), [(300, 3), (40, 5_000), (7, 20_000)])
def test_pieces_threads_and_layouts_give_the_same_bits(num_rows, width, monkeypatch):
    rows = np.random.default_rng(3).normal(size=(num_rows, width)).astype(np.float32)
    rows[num_rows // 2, 1] = NAN
    wanted = clipped(rows).sum(axis=0)  # whole steps: exact in any order
    assert total_of([rows], width).tobytes() == wanted.tobytes()
    assert total_of([np.asfortranarray(rows)], width).tobytes() == wanted.tobytes()
    for across, at_once in ((1, 5), (3, 6), (2_500, 5_000)):
        if width > 1_000 * across:
            continue
        monkeypatch.setattr(gradient_sums, "_ACROSS", across)
        monkeypatch.setattr(gradient_sums, "_AT_ONCE", at_once)
        for many in (0, 2**60):
            monkeypatch.setattr(gradient_sums, "_MANY", many)
            assert total_of([rows], width).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("num_threads", [0, 1])
def test_a_system_without_room_for_threads_adds_the_same(num_threads, monkeypatch):
    """Rows alone reach the sum: an error here would say that there was one."""
    rows = np.random.default_rng(3).normal(size=(7, 20_000))
    monkeypatch.setattr(gradient_sums, "_MANY", 0)
    monkeypatch.setattr(gradient_sums.os, "cpu_count", lambda: 4)
    wanted = total_of([rows], 20_000)
    real, started = threading.Thread.start, []

    def start(thread):
        if len(started) == num_threads:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    assert total_of([rows], 20_000).tobytes() == wanted.tobytes()
    assert len(started) == num_threads


def test_what_a_thread_raises_beside_the_sum_is_raised(monkeypatch):
    rows = np.ones((7, 20_000))
    monkeypatch.setattr(gradient_sums, "_MANY", 0)
    monkeypatch.setattr(gradient_sums.os, "cpu_count", lambda: 2)
    here, helped = threading.get_ident(), threading.Event()
    real = gradient_sums._steps

    def steps(*given):
        if threading.get_ident() == here:
            assert helped.wait(60)
            return real(*given)
        helped.set()
        raise MemoryError

    monkeypatch.setattr(gradient_sums, "_steps", steps)
    with pytest.raises(MemoryError):
        total_of([rows], 20_000)


def test_a_caller_that_turns_numbers_into_errors_does_not_make_a_unit_raise(monkeypatch):
    rows = np.array([[1e308, INF], [NAN, 1.0], [3.0, -4.0]])
    for many in (0, 2**60):
        monkeypatch.setattr(gradient_sums, "_MANY", many)
        with np.errstate(all="raise"):
            np.testing.assert_allclose(total_of([rows], 2), [0.6, -0.8], rtol=1e-7)
            np.testing.assert_allclose(clipped(rows).sum(axis=0), [0.6, -0.8], rtol=1e-7)


def test_no_rows_give_zeros_and_cleared_ones_are_forgotten():
    made = running(3)
    made.add(np.zeros((0, 9)))
    made.add(np.ones((2, 3)))
    made.clear()
    made.add(np.array([[0.0, 0.3, 0.0]]))
    np.testing.assert_allclose(made.total().value, [0.0, 0.4, 0.0], atol=2.0**-32)
    assert total_of([], 4).tolist() == [0.0] * 4


def test_more_rows_than_floats_can_add_are_cut_where_the_mechanism_cuts_them():
    rows = np.ones((2**20 + 4, 2), dtype=np.float32)
    rows[:, 1] = 0.0
    value = total_of([rows], 2, clip=1e-9)
    assert value[0] <= 2**20
    assert value[0] > (2**20) * (1 - 1e-7)
    assert value[1] == 0.0
    more = total_of([rows[:, :1]] * 2, 1, clip=1e-9)
    assert more.tolist() == [2.0**20]


def test_more_rows_than_integers_can_add_are_refused_without_a_number(monkeypatch):
    monkeypatch.setattr(gradient_sums, "MAX_ROWS", 3)
    made = running(2)
    made.add(np.ones((2, 2)))
    with pytest.raises(SensitivityError, match=r"at most 2\^30 rows, found more"):
        made.add(np.ones((2, 2)))


def test_the_total_is_taken_once():
    made = running(2)
    made.total()
    for again in (made.total, made.clear, lambda: made.add(np.ones((1, 2)))):
        with pytest.raises(ConfigurationError, match="found it closed"):
            again()


def test_it_shows_nothing_and_stays_here():
    made = running(2)
    made.add(np.array([[0.123456, 0.4]]))
    assert repr(made) == str(made) == "RunningSum(<private>)"
    assert copy.copy(made) is copy.deepcopy(made) is made
    with pytest.raises(PrivateAccessError):
        pickle.dumps(made)
    with pytest.raises(TypeError, match="docs/proofs"):
        type("Derived", (RunningSum,), {})
    total = made.total()
    assert total.sensitivity == Sensitivity(l2=1.0, range=None)
    assert (total.row_shape, total.adjacency) == ("units", "add_remove")
    assert running(2, adjacency="replace_one").total().sensitivity.l2 == 2.0


@pytest.mark.parametrize(
    "bad", [np.zeros((2, 3)), np.zeros(4), np.zeros((2, 4, 1)), np.full((2, 4), "x"), np.full((2, 4), 1j)]
)
def test_rows_of_another_shape_are_refused_and_add_nothing(bad):
    made = running(4)
    with pytest.raises(ConfigurationError, match=r"rows: expected a real array of shape \(n, 4\)") as caught:
        made.add(bad)
    assert "(2," not in str(caught.value)
    assert made.total().value.tolist() == [0.0] * 4


def test_a_batch_is_copied_in_small_pieces_only():
    """These rows are 64 MB; pieces of 16 MB are copied, the total itself is half a MB, and so is what it is made of."""
    rows = np.ones((256, 2**16), dtype=np.float32)
    tracemalloc.start()
    try:
        made = running(2**16)
        made.add(rows)
        made.total()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 24 * 2**20


@pytest.mark.parametrize("clip", [0.0, -1.0, NAN, INF, True, "1", 1e-10, 1e10])
def test_a_clip_is_a_positive_number_of_a_size_that_gradients_have(clip):
    with pytest.raises(ConfigurationError, match="l2_clip_norm"):
        ClippedGradientSum(clip)


def test_the_clip_is_shown():
    assert ClippedGradientSum(1).to_dict() == {"name": "clipped_gradient_sum", "l2_clip_norm": 1.0}


# --- in a plan --------------------------------------------------------------------------------------------------------


def test_a_plan_makes_its_running_sum_and_takes_back_no_other():
    made, rows = plan(), np.random.default_rng(4).normal(size=(5, 3))
    mine = running_sum(made, 3)
    mine.add(rows)
    total = made.bound(mine, width=3)
    direct = made.bound(rows, width=3)
    assert total.value.tobytes() == direct.value.tobytes()
    assert total.sensitivity == direct.sensitivity == made.sensitivity
    others = [
        (running_sum(made, 4), 3),
        (running_sum(made, 3), 4),
        (running_sum(plan(ClippedGradientSum(2 * CLIP)), 3), 3),
        (running_sum(plan(adjacency="replace_one"), 3), 3),
    ]
    for other, width in others:
        with pytest.raises(ConfigurationError, match="one of this plan"):
            made.bound(other, width=width)


def test_a_box_with_a_running_sum_is_summed_already():
    made, rows = plan(), np.random.default_rng(5).normal(size=(5, 3))
    mine = running_sum(made, 3)
    mine.add(rows)
    assert sum_rows(OpaqueRows(mine), made, 3).value.tobytes() == sum_rows(OpaqueRows(rows), made, 3).value.tobytes()
    with pytest.raises(ConfigurationError, match="one of this plan"):
        sum_rows(OpaqueRows(running_sum(made, 2)), made, 3)


def test_only_gradients_are_added_batch_by_batch():
    for aggregation in (VoteSum(), UnitVectorSum()):
        with pytest.raises(ConfigurationError, match="clipped_gradient_sum for a running sum"):
            running_sum(plan(aggregation), 3)


def test_gradients_of_slots_and_noise_on_one_index_are_refused():
    with pytest.raises(ConfigurationError, match=r"'units' for clipped_gradient_sum, found 'slots'.*PoissonUnits"):
        plan(sampler=PoissonSlots(0.1, num_slots=4, shots_per_slot=1))
    with pytest.raises(ConfigurationError, match="mechanism"):
        plan(mechanism=GumbelMechanism(1.0))
    with pytest.raises(ConfigurationError, match="constants"):
        plan(constants=(0.0,))


def test_an_empty_sample_is_released_as_pure_noise():
    """A deviation of 1 on 4,000 coordinates: their root mean square is within 6 deviations of it (2e-9)."""
    made = plan()
    values = made.mechanism.release(made.bound(running_sum(made, 4_000), width=4_000), rng=SYSTEM_RANDOM).values
    assert abs(math.sqrt(float(np.mean(np.square(values)))) - 1.0) < 6 / math.sqrt(2 * 4_000)


def test_it_rides_in_a_plan_like_any_other_sum():
    made = plan()
    assert made.to_dict()["aggregation"] == {"name": "clipped_gradient_sum", "l2_clip_norm": CLIP}
    assert made.to_dict()["sensitivity"] == {"l2": 1.0, "range": None, "linf": None}
    assert made.with_noise(3.0).aggregation == made.aggregation
    assert dataclasses.replace(made, adjacency="replace_one").sensitivity.l2 == 2.0


# --- planted bugs: each must turn the contract red --------------------------------------------------------------------


def _patch_rates(monkeypatch, lengths):
    """Divides rows by what `lengths` returns of them, float64[n]."""

    def rates(self, rows):
        with np.errstate(all="ignore"):
            real = np.nan_to_num(np.asarray(rows, dtype=np.float64), posinf=1e9, neginf=-1e9)
            return (STEPS / np.maximum(lengths(self, real), 1e-300))[:, None]

    monkeypatch.setattr(ClippedGradientSum, "_rates", rates)


def _plant_no_clip(monkeypatch):
    _patch_rates(monkeypatch, lambda self, rows: np.full(len(rows), self.l2_clip_norm))


def _plant_a_clip_of_every_coordinate(monkeypatch):
    _patch_rates(monkeypatch, lambda self, rows: np.maximum(self.l2_clip_norm, np.abs(rows).max(axis=1)))


def _plant_one_clip_for_all_rows(monkeypatch):
    def lengths(self, rows):
        norms = np.linalg.norm(rows, axis=1)
        return np.full(len(rows), max(self.l2_clip_norm, float(np.median(norms))))

    _patch_rates(monkeypatch, lengths)


def _plant_a_clip_of_twice_the_length(monkeypatch):
    _patch_rates(monkeypatch, lambda self, rows: np.maximum(self.l2_clip_norm, np.linalg.norm(rows, axis=1)) / 2)


def _plant_a_sum_divided_by_how_many_there_are(monkeypatch):
    real = ClippedGradientSum._rates
    monkeypatch.setattr(ClippedGradientSum, "_rates", lambda self, rows: 8 * real(self, rows) / len(rows))


def _plant_gradients_that_differ_by_one_clip(monkeypatch):
    monkeypatch.setattr(ClippedGradientSum, "sensitivity", lambda self, **_: Sensitivity(l2=1.0, range=None))


PLANTED = [value for name, value in sorted(globals().items()) if name.startswith("_plant_")]


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_bug_turns_the_neighbour_test_red(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises((AssertionError, SensitivityError)), np.errstate(all="ignore"):
        TestClippedGradientSum().test_adversarial_neighbours_stay_within_the_bound()


def test_the_neighbour_test_is_green_without_a_plant():
    TestClippedGradientSum().test_adversarial_neighbours_stay_within_the_bound()


def test_a_row_that_failed_and_is_kept_turns_the_neighbour_test_red(monkeypatch):
    monkeypatch.setattr(
        gradient_sums, "_scale_rows", lambda rows, factor: np.nan_to_num(np.multiply(rows, factor, dtype=np.float64))
    )
    real = np.isfinite
    monkeypatch.setattr(gradient_sums.np, "isfinite", lambda values: np.ones_like(real(values)))
    with pytest.raises((AssertionError, SensitivityError)), np.errstate(all="ignore"):
        TestClippedGradientSum().test_adversarial_neighbours_stay_within_the_bound()


@pytest.mark.planted
def test_rounding_to_the_nearest_step_turns_the_domain_test_red(monkeypatch):
    """Length and rounding are each on the safe side; without either, a row leaves the ball."""
    monkeypatch.setattr(gradient_sums, "_ROUND_UP", 1.0)
    monkeypatch.setattr(gradient_sums.math, "isqrt", lambda n: 1e-9 - 1)
    monkeypatch.setattr(gradient_sums.np, "trunc", np.rint)
    with pytest.raises(AssertionError):
        TestClippedGradientSum().test_any_rows_become_rows_of_the_domain()


def test_a_slack_declaration_turns_the_tightness_test_red(monkeypatch):
    monkeypatch.setattr(ClippedGradientSum, "sensitivity", lambda self, **_: Sensitivity(l2=math.sqrt(2.0), range=None))
    with pytest.raises(AssertionError):
        TestClippedGradientSum().test_the_bound_is_reached("units", "add_remove")


def test_a_sum_that_is_not_exact_turns_the_order_test_red(monkeypatch):
    monkeypatch.setattr(gradient_sums, "_steps", lambda rows, rates: gradient_sums._scale_rows(rows, rates / 3.0))
    with pytest.raises(AssertionError):
        TestClippedGradientSum().test_many_rows_add_exactly()


def test_exact_means_in_rational_arithmetic():
    rows = np.random.default_rng(6).normal(size=(300, 4))
    exact = [sum((Fraction(x) for x in column), Fraction(0)) for column in clipped(rows).T.tolist()]
    assert [Fraction(x) for x in total_of([rows[:7], rows[7:]], 4).tolist()] == exact


def test_what_is_measured_is_what_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine may fill its buffer anew as soon as it has handed it over."""
    buffer = np.full((4, 8), 1e-3, dtype=np.float32)
    measure = ClippedGradientSum._rates

    def filled_anew(self: ClippedGradientSum, rows: Any) -> Any:
        rates = measure(self, rows)
        buffer[:] = 1e3
        return rates

    monkeypatch.setattr(ClippedGradientSum, "_rates", filled_anew)
    running = RunningSum(ClippedGradientSum(1.0), row_shape="units", adjacency="add_remove", width=8)
    running.add(buffer)
    value = running.total().value
    assert np.sqrt(value @ value) <= 4.0
    assert np.allclose(value, 4e-3)
