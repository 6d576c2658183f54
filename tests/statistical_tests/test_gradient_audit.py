"""Noise on sums of clipped gradients: its scale, and what reveals one unit's gradient; planted bugs.

The path is the one of a training step: gradients go into a plan's running sum, its total into the mechanism. Each
assertion that must hold fails by chance with probability at most 1e-6 (`ALARM`); each planted bug passes by chance with
a probability far below that, at the fixed sizes used here.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import special, stats

from langchain_dpicl.privacy.accounting.events import GaussianEvent
from langchain_dpicl.privacy.extensions.gradient_sums import (
    ClippedGradientSum,
    RunningSum,
    SampledBallEvent,
    running_sum,
)
from langchain_dpicl.privacy.mechanisms import release_plan as mechanisms
from langchain_dpicl.privacy.mechanisms.bounded import Sensitivity
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.privacy.mechanisms.release_plan import GaussianMechanism
from langchain_dpicl.soft_prompts.plan import plan_training
from tests import audit_games

ALARM = 1e-6
ADJACENCIES = ("add_remove", "replace_one")


def planned(adjacency, noise_multiplier, *, batch=1, width=8):
    """Returns the plan of a step on everybody: the target is in the sample for sure."""
    terms = {"epsilon": None, "delta": 1e-6, "steps": 1, "expected_batch_size": batch, "l2_clip_norm": 0.1}
    return plan_training(batch, **terms, width=width, noise_multiplier=noise_multiplier, adjacency=adjacency)


def stepped(plan, rows):
    """Returns what leaves a step, as the average gradient that an optimizer takes."""
    running = running_sum(plan.release, plan.width)
    for start in range(0, len(rows), 2):
        running.add(rows[start : start + 2])
    total = plan.release.bound(running, width=plan.width)
    return plan.release.mechanism.release(total, rng=SYSTEM_RANDOM).values * plan.average_factor


# --- the scale of the noise -------------------------------------------------------------------------------------------

RELEASES, WIDTH = 200, 50
GRADIENTS = np.random.default_rng(0).normal(size=(5, WIDTH)).astype(np.float32)


def has_scale(noise, sd):
    """True if all values together, each coordinate and the sum of each step fit: 52 chi-square tests, 1e-6 in all."""

    def pvalue(values, scale):
        statistic = float(np.sum(np.square(values))) / scale**2
        return 2 * min(stats.chi2.cdf(statistic, values.size), stats.chi2.sf(statistic, values.size))

    pvalues = [pvalue(noise, sd), pvalue(noise.sum(axis=1), sd * math.sqrt(WIDTH))]
    pvalues += [pvalue(column, sd) for column in noise.T]
    return min(pvalues) > ALARM / len(pvalues)


def noise_of(plan):
    """Returns float64[200, 50]: what steps on the same gradients carry beside their clipped average."""
    lengths = np.linalg.norm(GRADIENTS.astype(np.float64), axis=1, keepdims=True)
    exact = (GRADIENTS * np.minimum(1.0, 0.1 / lengths)).sum(axis=0) / plan.expected_batch_size
    return np.array([stepped(plan, GRADIENTS) for _ in range(RELEASES)]) - exact


@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_steps_carry_noise_of_the_declared_scale_and_no_other(adjacency):
    plan = planned(adjacency, 0.7, batch=5, width=WIDTH)
    noise = noise_of(plan)
    assert has_scale(noise, plan.noise_scale)
    for wrong in (0.5, 1 / 1.2, 1.2, 2.0):
        assert not has_scale(noise, wrong * plan.noise_scale)
    scaled = noise.ravel() / plan.noise_scale
    assert stats.kstest(scaled, stats.norm().cdf).pvalue > ALARM
    assert abs(np.corrcoef(scaled[:-1], scaled[1:])[0, 1]) < 5 / math.sqrt(scaled.size)  # 6e-7


@pytest.mark.parametrize("factor", [0.5, 1 / 1.2, 1.2, 2.0])
def test_noise_that_was_scaled_on_its_way_is_rejected(factor, monkeypatch):
    monkeypatch.setattr(mechanisms, "ROUND_UP", factor)
    plan = planned("add_remove", 0.7, batch=5, width=WIDTH)
    assert not has_scale(noise_of(plan), plan.noise_scale)


def test_one_draw_for_a_whole_step_is_rejected(monkeypatch):
    real = GaussianMechanism.release

    def bug(self, total, *, rng):
        out = real(self, total, rng=rng)
        out.values[:] = total.value + (out.values - total.value)[0]
        return out

    monkeypatch.setattr(GaussianMechanism, "release", bug)
    plan = planned("add_remove", 0.7, batch=5, width=WIDTH)
    assert not has_scale(noise_of(plan), plan.noise_scale)


# --- what reveals one unit -------------------------------------------------------------------------------------

NOISE, RUNS, FEWER_RUNS = 0.5, 2_000, 500
TARGET = np.array([[3e3, -4e3, 0, 0, 0, 0, 0, 0]], dtype=np.float32)
OTHERS = np.random.default_rng(1).normal(size=(3, 8)).astype(np.float32)


def certified(adjacency, runs=RUNS):
    """Returns the largest mu that answers certify: how far they move where the target is there, gone or opposite.

    The adversary chose all other gradients, knows their part, and looks whether what is left points to the target.
    Clopper-Pearson bounds of both chances; false alarm `ALARM`.
    """
    plan = planned(adjacency, NOISE, batch=4)
    gone = np.zeros((0, 8), dtype=np.float32) if adjacency == "add_remove" else -TARGET
    lengths = np.linalg.norm(OTHERS.astype(np.float64), axis=1, keepdims=True)
    known = (OTHERS * np.minimum(1.0, 0.1 / lengths)).sum(axis=0)
    direction = TARGET[0] / np.linalg.norm(TARGET)
    middle = 0.05 if adjacency == "add_remove" else 0.0  # half way between the two, in units of the gradient
    hits = []
    for target in (TARGET, gone):
        rows = np.vstack([OTHERS[:2], target, OTHERS[2:]])
        seen = np.array([stepped(plan, rows) for _ in range(runs)]) * plan.expected_batch_size - known
        hits.append(int((seen @ direction > middle).sum()))
    least = audit_games.clopper_pearson_lower(hits[0], runs, ALARM / 2)
    most = audit_games.clopper_pearson_upper(hits[1], runs, ALARM / 2)
    return float(special.ndtri(least) - special.ndtri(most))


@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_a_step_gives_away_what_it_is_charged_for_and_no_more(adjacency):
    """False alarm 1e-6; one that certified less than 0.65 of the charge would be blind (1e-11 by chance)."""
    (ticket,) = planned(adjacency, NOISE, batch=4).tickets()
    assert ticket.event in (GaussianEvent(NOISE), SampledBallEvent(NOISE, 1.0))
    assert 0.65 / NOISE < certified(adjacency) <= 1 / NOISE


def plant_half_the_noise(patch):
    patch.setattr(mechanisms, "ROUND_UP", 0.5)


def plant_no_clip(patch):
    patch.setattr(
        ClippedGradientSum, "_rates", lambda self, rows: np.full((len(rows), 1), 2.0**32 / self.l2_clip_norm / 100)
    )


def plant_a_clip_of_each_coordinate(patch):
    def rates(self, rows):
        peak = np.abs(rows).max(axis=1).astype(np.float64)
        return (2.0**32 / np.maximum(peak * 0.7, self.l2_clip_norm))[:, None]

    patch.setattr(ClippedGradientSum, "_rates", rates)


def plant_records_of_a_unit_as_rows(patch):
    """A unit's two examples are clipped one by one, so it counts twice."""
    real = RunningSum.add
    patch.setattr(RunningSum, "add", lambda self, rows: (real(self, rows), real(self, rows[np.abs(rows[:, 0]) > 1e3])))


def plant_half_the_sensitivity(patch):
    real = ClippedGradientSum.sensitivity
    patch.setattr(
        ClippedGradientSum, "sensitivity", lambda self, **how: Sensitivity(l2=real(self, **how).l2 / 2, range=None)
    )


def plant_a_clip_of_twice_the_length(patch):
    real = ClippedGradientSum._rates
    patch.setattr(ClippedGradientSum, "_rates", lambda self, rows: 2 * real(self, rows))


PLANTED = [value for name, value in sorted(globals().items()) if name.startswith("plant_")]


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_a_planted_bug_is_certified_to_give_away_more(plant, adjacency, monkeypatch):
    plant(monkeypatch)
    assert certified(adjacency, FEWER_RUNS) > 1 / NOISE
