"""One run of the sparse vector test: what is compared with what, who may ask, how often, and with which noise."""

from __future__ import annotations

import copy
import itertools
import math
import os
import pickle
import sys
import threading
from fractions import Fraction

import pytest

from langchain_dpicl.exceptions import LedgerError, PrivacyBudgetError, PrivateAccessError
from langchain_dpicl.privacy.extensions import sparse_vector as sparse
from langchain_dpicl.privacy.extensions.sparse_vector import SparseVectorTest
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM, SecureRandom
from tests.contracts.doubles import CountingRandom

STEPS = 2**32
MADE = SparseVectorTest(0.5, 4.0)
NAN, INF = float("nan"), float("inf")


class QueuedNoise(SecureRandom):
    """Gives the listed noise, in rows, one per draw, and records the scales that were asked for, in steps."""

    def __init__(self, *rows):
        self.rows, self.asked = list(rows), []

    def geometric(self, scale):
        self.asked.append(scale)
        return int(self.rows.pop(0) * STEPS)


C = 2 * math.log(4 / 3)
"""What is added to the threshold, over the mean of its noise."""


def asked(statistic, *, threshold_noise, noise, made=MADE, num_rows=10):
    """Returns the answer to one question under this noise, in rows."""
    run = made.start(num_rows, rng=QueuedNoise(threshold_noise))
    return run.is_above(statistic, rng=QueuedNoise(noise))


def test_statistic_and_noise_are_compared_with_the_share_of_the_public_rows_and_its_noise():
    limit = 0.5 * 10 + 4.0 * C
    for level, statistic, noise in itertools.product((0.0, 7.0), (0.0, 2.5, 10.0), (0.0, 3.0, 30.0)):
        assert asked(statistic, threshold_noise=level, noise=noise) == (statistic + noise >= limit + level)
    for nudge, answer in ((-1e-8, False), (1e-8, True)):
        assert asked(limit + nudge, threshold_noise=0.0, noise=0.0) is answer
        assert asked(1.0, threshold_noise=3.0, noise=limit + 2.0 + nudge) is answer


def test_a_noisy_statistic_that_equals_the_noisy_threshold_is_above_and_one_step_below_is_not():
    run = MADE.start(10, rng=QueuedNoise(1.0))
    level = run._height / STEPS
    assert not run.is_above(level - 2.0**-32, rng=QueuedNoise(0.0))
    assert not run.is_above(level - 2.0**-33, rng=QueuedNoise(0.0))  # between two steps: rounded down
    assert run.is_above(level - 2.0, rng=QueuedNoise(2.0))


def test_noise_has_the_two_scales_of_the_price():
    rng = QueuedNoise(0.0, 0.0, 0.0, 50.0)
    run = MADE.start(10, rng=rng)
    assert [run.is_above(1.0, rng=rng) for _ in range(3)] == [False, False, True]
    assert rng.asked == [4 * STEPS + 1] + [2 * (4 * STEPS + 1)] * 3


@pytest.mark.parametrize("multiplier", [1e-9, 0.1, 1 / 3, 0.7, 3.0, 49.0, 1e9 / 7, 1e12])
def test_neither_noise_is_less_than_its_price_says(multiplier):
    """1/b + 2/(2b), of the scales in rows, is at most the event's epsilon, and hardly less but where a step is wide."""
    made, rng = SparseVectorTest(0.5, multiplier), QueuedNoise(0.0, 0.0)
    made.start(3, rng=rng).is_above(0.0, rng=rng)
    first, second = (Fraction(scale, STEPS) for scale in rng.asked)
    assert 1 / first + 2 / second <= Fraction(made.event.epsilon)
    assert first <= Fraction(multiplier) * (1 + Fraction(1, 10**14)) + Fraction(1, STEPS)


def test_after_above_the_run_is_over_and_says_so():
    run = MADE.start(10, rng=QueuedNoise(0.0))
    assert not run.is_above(0.0, rng=QueuedNoise(0.0))
    assert not run.is_spent
    assert run.is_above(10.0, rng=QueuedNoise(0.0))
    assert run.is_spent
    rng = CountingRandom()
    for statistic in (0.0, 10.0):
        with pytest.raises(PrivacyBudgetError, match="Start another run"):
            run.is_above(statistic, rng=rng)
    assert rng.num_bytes == 0


def test_a_refusal_shows_no_statistic_in_its_frame():
    run = MADE.start(10, rng=QueuedNoise(0.0))
    assert run.is_above(10.0, rng=QueuedNoise(0.0))
    try:
        run.is_above(3.14159, rng=SYSTEM_RANDOM)
    except PrivacyBudgetError:
        frame = sys.exc_info()[2].tb_next.tb_frame
    assert frame.f_code.co_name == "is_above"
    assert set(frame.f_locals) == {"self", "rng"}


def test_of_many_threads_one_hears_above():
    run, heard, barrier = MADE.start(10, rng=QueuedNoise(0.0)), [], threading.Barrier(8)

    class Slow(SecureRandom):
        def geometric(self, scale):
            threading.Event().wait(0.005)
            return 10 * STEPS

    def ask():
        barrier.wait()
        try:
            heard.append(run.is_above(10.0, rng=Slow()))
        except PrivacyBudgetError:
            heard.append(None)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(heard, key=str) == [None] * 7 + [True]


def test_another_process_is_refused():
    run = MADE.start(10, rng=QueuedNoise(0.0))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            run.is_above(10.0, rng=SYSTEM_RANDOM)
            os.write(writer, b"answered")
        except LedgerError as error:
            shown = error.__traceback__.tb_next.tb_frame.f_locals
            os.write(writer, b"refused" + b" and shown" * ("statistic" in shown))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 32) == b"refused"
    os.close(reader)
    os.close(writer)
    assert not run.is_spent


def test_a_threshold_cannot_be_doubled_and_shows_nothing():
    run = MADE.start(10, rng=SYSTEM_RANDOM)
    assert copy.copy(run) is copy.deepcopy(run) is run
    with pytest.raises(PrivateAccessError):
        pickle.dumps(run)
    assert repr(run) == "Threshold(<private>)"
    assert not hasattr(run, "__dict__")


def test_every_run_and_every_question_draws_its_own_coins():
    rng = CountingRandom()
    run = MADE.start(10_000, rng=rng)  # out of reach
    for _ in range(3):
        before = rng.num_bytes
        assert not run.is_above(0.0, rng=rng)
        assert rng.num_bytes >= before + 4
    heights = {MADE.start(10, rng=SYSTEM_RANDOM)._height for _ in range(50)}
    assert len(heights) == 50


@pytest.mark.parametrize("statistic", [NAN, -1.0, -INF])
def test_what_no_statistic_can_be_is_cut(statistic):
    assert not asked(statistic, threshold_noise=0.0, noise=7.0)
    assert asked(statistic, threshold_noise=0.0, noise=8.0)
    assert asked(INF, threshold_noise=0.0, noise=0.0)


# --- planted bugs ---------------------------------------------------------------------------------------------------


def test_a_threshold_that_is_kept_after_above_turns_the_tests_red(monkeypatch):
    """`_height` can be written once: None is ignored."""
    monkeypatch.setattr(sparse.Threshold, "_height", KeptHeight(sparse.Threshold._height))
    for red in (test_after_above_the_run_is_over_and_says_so, test_of_many_threads_one_hears_above):
        with pytest.raises((AssertionError, IndexError)):
            red()


class KeptHeight:
    """Stands in for a slot and never empties it."""

    def __init__(self, slot):
        self.slot = slot

    def __get__(self, run, owner=None):
        return self.slot.__get__(run, owner)

    def __set__(self, run, value):
        if value is not None:
            self.slot.__set__(run, value)


@pytest.mark.parametrize("multiplier", [1 / 3, 49.0])
def test_noise_that_is_not_rounded_up_turns_the_price_test_red(multiplier, monkeypatch):
    monkeypatch.setattr(sparse, "_ROUND_UP", 1 - Fraction(1, 2**30))
    with pytest.raises(AssertionError):
        test_neither_noise_is_less_than_its_price_says(multiplier)
