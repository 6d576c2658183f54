"""Updates the weights of a prompt from released gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.privacy._validate import check_choice, check_int, check_real

Floats: TypeAlias = NDArray[np.float64]
OptimizerName: TypeAlias = Literal["adam", "sgd"]
Schedule: TypeAlias = Literal["constant", "linear"]
OPTIMIZERS: tuple[OptimizerName, ...] = get_args(OptimizerName)
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)

WEIGHT_GRID = 2.0**24
"""Steps per unit of the public grid of weights."""
LARGEST_WEIGHT = 2.0**20
"""Largest magnitude of a weight; the grid is exact in float64 up to it."""

_FIRST, _SECOND, _TINY = 0.9, 0.999, 1e-8


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class OptimizerState:
    """The state of training; public, computed from released sums only.

    Attributes:
      step: number of updates so far.
      weights: float64[width] on the grid of 2^-24, read-only.
      moments: float64[width] each, read-only: two for Adam, none for SGD.
    """

    step: int
    weights: Floats
    moments: tuple[Floats, ...] = ()

    def __post_init__(self) -> None:
        for values in (self.weights, *self.moments):
            values.flags.writeable = False

    def is_same(self, other: OptimizerState) -> bool:
        """Whether the other state has the same step and the same bits."""
        mine, theirs = (self.weights, *self.moments), (other.weights, *other.moments)
        return self.step == other.step and [v.tobytes() for v in mine] == [v.tobytes() for v in theirs]

    def __repr__(self) -> str:
        return f"OptimizerState(step={self.step}, width={len(self.weights)})"


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An update rule: Adam (Kingma and Ba 2015) or plain gradient descent.

    Formal guarantees:
      - `updated` is a deterministic function of the state and the released gradient, to the bit.
      - Weights are multiples of 2^-24, at most 2^20 in magnitude, after every step.

    Attributes:
      name: "adam" (moments .9 and .999) or "sgd" (no momentum).
      learning_rate: size of a step.
      schedule: "constant", or "linear" down towards 0 over `steps`.
      steps: number of planned steps.
    """

    name: OptimizerName
    learning_rate: float
    schedule: Schedule
    steps: int

    def __post_init__(self) -> None:
        check_choice("optimizer", self.name, OPTIMIZERS)
        check_choice("schedule", self.schedule, SCHEDULES)
        rate = check_real("learning_rate", self.learning_rate, low=0.0, high=1e3, low_open=True)
        object.__setattr__(self, "learning_rate", rate)
        check_int("steps", self.steps, low=1)

    @property
    def num_moments(self) -> int:
        """Number of vectors beside the weights."""
        return 2 if self.name == "adam" else 0

    def start(self, weights: Floats) -> OptimizerState:
        """Returns the state before the first step; the weights are rounded to their grid."""
        start = on_grid(np.asarray(weights, dtype=np.float64))
        return OptimizerState(0, start, tuple(np.zeros_like(start) for _ in range(self.num_moments)))

    def rate(self, step: int) -> float:
        """Returns the learning rate after `step` steps."""
        if self.schedule == "constant":
            return self.learning_rate
        # Never negative, also for a caller that trains beyond the planned steps.
        return self.learning_rate * max(self.steps - step, 0) / self.steps

    def updated(self, state: OptimizerState, gradient: Floats) -> OptimizerState:
        """Returns the state after one step."""
        step = state.step + 1
        # Independent of the caller's numpy error state.
        with np.errstate(all="ignore"):
            moments: tuple[Floats, ...] = ()
            move = gradient
            if self.name == "adam":
                first = _FIRST * state.moments[0] + (1 - _FIRST) * gradient
                second = _SECOND * state.moments[1] + (1 - _SECOND) * gradient * gradient
                # Kingma and Ba (2015), Algorithm 1: corrects the bias of moments that start at zero.
                mean, spread = first / (1 - _FIRST**step), second / (1 - _SECOND**step)
                moments, move = (first, second), mean / (np.sqrt(spread) + _TINY)
            weights = on_grid(state.weights - self.rate(state.step) * move)
        return OptimizerState(step, weights, moments)

    def to_dict(self) -> dict[str, Any]:
        """Returns the public parameters, for reports."""
        return {
            "name": self.name,
            "learning_rate": self.learning_rate,
            "schedule": self.schedule,
            "weight_grid": 1.0 / WEIGHT_GRID,
        }


def on_grid(weights: Floats) -> Floats:
    """Returns the nearest weights on the public grid; infinities become the largest weight, NaN becomes 0."""
    finite = np.nan_to_num(weights, nan=0.0, posinf=LARGEST_WEIGHT, neginf=-LARGEST_WEIGHT)
    cut: Floats = np.clip(finite, -LARGEST_WEIGHT, LARGEST_WEIGHT)
    return np.rint(cut * WEIGHT_GRID) / WEIGHT_GRID + 0.0  # + 0.0 turns -0.0 into 0.0
