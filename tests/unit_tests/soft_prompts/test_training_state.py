"""What training keeps between steps: the optimizers, the public grid of weights, and the bytes it goes on from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.soft_prompts.plan import LARGEST_WEIGHT, WEIGHT_GRID, Optimizer, OptimizerState, on_grid

RULES = [
    Optimizer(name, 0.03, schedule, 10)  # type: ignore[arg-type]
    for name in ("adam", "sgd")
    for schedule in ("constant", "linear")
]
NAMES = [f"{rule.name}-{rule.schedule}" for rule in RULES]


def gradients(count: int, width: int = 5) -> np.ndarray:
    return np.random.default_rng(7).normal(size=(count, width)) * np.array([1e-6, 0.01, 1, 30, 1e4])[:width]


def walked(rule: Optimizer, steps: int, start: Any = (0.1, -0.2, 0.3, 7.0, 0.0)) -> OptimizerState:
    state = rule.start(np.array(start))
    for gradient in gradients(steps, len(state.weights)):
        state = rule.update(state, gradient)
    return state


# --- optimizers -------------------------------------------------------------------------------------------------------


def test_adam_is_that_of_the_paper() -> None:
    """Kingma and Ba (2015), Algorithm 1, written down once more, coordinate by coordinate."""
    state = walked(RULES[0], 10)
    for place, start in enumerate((0.1, -0.2, 0.3, 7.0, 0.0)):
        weight, mean, spread = start, 0.0, 0.0
        for t, g in enumerate(gradients(10)[:, place].tolist(), start=1):
            mean, spread = 0.9 * mean + 0.1 * g, 0.999 * spread + 0.001 * g * g
            weight -= 0.03 * (mean / (1 - 0.9**t)) / ((spread / (1 - 0.999**t)) ** 0.5 + 1e-8)
        assert state.weights[place] == pytest.approx(weight, abs=20 / WEIGHT_GRID)
    assert state.step == 10


def test_descent_is_the_gradient_times_the_rate() -> None:
    rule = RULES[2]
    state = walked(rule, 3)
    assert state.weights == pytest.approx(
        np.array([0.1, -0.2, 0.3, 7.0, 0.0]) - 0.03 * gradients(3).sum(axis=0), abs=4 / WEIGHT_GRID
    )
    assert state.moments == ()


def test_a_linear_schedule_goes_down_towards_zero_and_never_below() -> None:
    rule = Optimizer("sgd", 0.5, "linear", 4)
    assert [rule.rate(step) for step in range(6)] == [0.5, 0.375, 0.25, 0.125, 0.0, 0.0]
    assert [RULES[0].rate(step) for step in (0, 9, 99)] == [0.03] * 3


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_weights_are_on_the_public_grid_after_every_step(rule: Optimizer) -> None:
    state = rule.start(np.array([0.1, 1 / 3, -np.pi, 1e-9, 5.0]))
    for gradient in gradients(10):
        assert (state.weights * WEIGHT_GRID % 1.0 == 0).all()
        state = rule.update(state, gradient)
    assert (state.weights * WEIGHT_GRID % 1.0 == 0).all()


def test_weights_stay_finite_whatever_the_rate() -> None:
    state = Optimizer("sgd", 1e3, "constant", 2).start(np.array([0.0, np.inf, -np.inf, np.nan]))
    assert state.weights.tolist() == [0.0, LARGEST_WEIGHT, -LARGEST_WEIGHT, 0.0]
    moved = Optimizer("sgd", 1e3, "constant", 2).update(state, np.array([1e300, 1e308, np.nan, 1.0]))
    assert moved.weights.tolist() == [-LARGEST_WEIGHT, -LARGEST_WEIGHT, 0.0, -1000.0]
    assert not np.signbit(on_grid(np.array([-1e-12]))).any()


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_the_same_state_and_gradient_give_the_same_bits_in_any_error_state(rule: Optimizer) -> None:
    state = walked(rule, 4)
    gradient = np.array([1e-300, 5e-324, 1.0, -1e-200, 0.0])
    usual = rule.update(state, gradient)
    with np.errstate(all="raise"):
        again = rule.update(state, gradient)
    for one, other in zip((usual.weights, *usual.moments), (again.weights, *again.moments), strict=True):
        assert one.tobytes() == other.tobytes()


def test_a_state_cannot_be_written_to_and_is_not_changed_by_a_step() -> None:
    state = walked(RULES[0], 2)
    before = state.weights.tobytes()
    RULES[0].update(state, gradients(1)[0])
    assert state.weights.tobytes() == before
    for values in (state.weights, *state.moments):
        with pytest.raises(ValueError, match="read-only"):
            values[0] = 1.0


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ({"name": "lamb"}, "optimizer"),
        ({"schedule": "cosine"}, "schedule"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"learning_rate": 1e4}, "learning_rate"),
        ({"learning_rate": "fast"}, "learning_rate"),
        ({"steps": 0}, "steps"),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(fault: dict[str, Any], name: str) -> None:
    given: dict[str, Any] = {"name": "adam", "learning_rate": 0.1, "schedule": "constant", "steps": 3, **fault}
    with pytest.raises(ConfigurationError, match=f"^{name}: expected"):
        Optimizer(**given)


# --- the state as bytes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_what_is_read_goes_on_with_the_same_bits(rule: Optimizer) -> None:
    state = walked(rule, 3)
    read = rule.restored(3, state.to_bytes(), width=5)
    for gradient in gradients(4):
        state, read = rule.update(state, gradient), rule.update(read, gradient)
        assert (state.step, state.to_bytes()) == (read.step, read.to_bytes())
    with pytest.raises(ValueError, match="read-only"):
        rule.restored(3, state.to_bytes(), width=5).weights[0] = 1.0


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "found 0"),
        (b"\x80\x04K\x01.", "3 vectors of 5 float64"),
        (np.zeros((2, 5)).tobytes(), "found 80"),
        (np.full((3, 5), np.nan).tobytes(), "finite"),
        (np.array([[0.0] * 5, [0.0] * 5, [np.inf] * 5]).tobytes(), "finite"),
        (np.full((3, 5), 0.5 / WEIGHT_GRID).tobytes(), "multiples of 2"),
        (np.full((3, 5), 2.0**21).tobytes(), "at most 2"),
    ],
)
def test_bytes_that_are_no_state_are_refused(data: bytes, said: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^checkpoint: .*arrays: expected.*{said}"):
        RULES[0].restored(1, data, width=5)
