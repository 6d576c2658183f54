"""What training keeps between steps: the optimizers, the public grid of weights, and the file it goes on from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.soft_prompts.checkpoint import TrainingCheckpoint, check_checkpoint_path
from langchain_dpicl.soft_prompts.options import LARGEST_WEIGHT, WEIGHT_GRID, Optimizer, OptimizerState, on_grid
from tests.sealed_files import resealed

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


# --- checkpoints ------------------------------------------------------------------------------------------------------

TERMS = {"component": "c", "ledger_id": "l", "dataset_id": "d", "adjacency": "add_remove"}
PUBLIC = {"steps": 10, "training": {"labels": ("a", "b"), "rate": 0.1}}


def kept(rule: Optimizer = RULES[0], steps: int = 3) -> TrainingCheckpoint:
    return TrainingCheckpoint(**TERMS, public=PUBLIC, state=walked(rule, steps))


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_what_is_read_goes_on_with_the_same_bits(rule: Optimizer, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    made = kept(rule)
    made.save(path)
    read = TrainingCheckpoint.load(path, width=5, num_moments=rule.num_moments)
    assert read.state.step == 3
    read.check_is_of(**TERMS, public=PUBLIC)
    for gradient in gradients(4):
        one, other = rule.update(made.state, gradient), rule.update(read.state, gradient)
        made, read = (TrainingCheckpoint(**TERMS, public=PUBLIC, state=state) for state in (one, other))
        assert one.weights.tobytes() == other.weights.tobytes()
        assert [moment.tobytes() for moment in one.moments] == [moment.tobytes() for moment in other.moments]


def test_the_file_is_plain_json_without_a_byte_of_pickle(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    kept().save(path)
    found = json.loads(path.read_text(encoding="ascii"))
    assert set(found) == {"format", "version", *TERMS, "public", "step", "weights", "moments", "content_digest"}
    assert [one.name for one in tmp_path.iterdir()] == ["c.json"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.json"
    kept(steps=1).save(path)
    old = path.read_bytes()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        kept(steps=2).save(path)
    assert path.read_bytes() == old
    assert [one.name for one in tmp_path.iterdir()] == ["c.json"]


def _edited(path: Path, **changes: Any) -> None:
    path.write_text(resealed(path.read_text(), **changes))


def _b64(values: Any, dtype: str = "<f8") -> str:
    import base64

    return base64.b64encode(np.array(values, dtype=dtype).tobytes()).decode()


HALF_STEP = _b64([0.5 / WEIGHT_GRID, 0, 0, 0, 0])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "other"}, "format"),
        ({"version": 2}, "version 1"),
        ({"weights": ...}, "exactly the keys"),
        ({"extra": 1}, "exactly the keys"),
        ({"component": 5}, "text under"),
        ({"step": -1}, "step"),
        ({"step": True}, "step"),
        ({"step": 1.5}, "step"),
        ({"weights": None}, "5 float64"),
        ({"weights": "not base64 ü"}, "5 float64"),
        ({"weights": _b64([1, 2, 3])}, "5 float64"),
        ({"weights": _b64([np.nan] * 5)}, "finite"),
        ({"weights": HALF_STEP}, "multiples of 2"),
        ({"weights": _b64([2.0**21] * 5)}, "at most 2"),
        ({"moments": [_b64([0] * 5)]}, "2 vectors"),
        ({"moments": {}}, "list of vectors"),
        ({"moments": [_b64([0] * 5), _b64([np.inf] * 5)]}, r"moments\[1\]"),
        ({"public": 7}, "JSON object"),
    ],
)
def test_a_file_that_was_not_written_so_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    kept().save(path)
    _edited(path, **change)
    with pytest.raises(ConfigurationError, match=said):
        TrainingCheckpoint.load(path, width=5, num_moments=2)


@pytest.mark.parametrize("text", ["", "\x80\x04K\x01.", "[]", "{", '{"step": NaN}', "[" * 100_000])
def test_text_that_is_no_checkpoint_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigurationError, match="training checkpoint"):
        TrainingCheckpoint.load(path, width=5, num_moments=2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"component": "d"}, "component: 'c' in the file, 'd' here"),
        ({"ledger_id": "m"}, "ledger_id: 'l' in the file, 'm' here"),
        ({"dataset_id": "e"}, "dataset_id: 'd' in the file, 'e' here"),
        ({"adjacency": "replace_one"}, "adjacency: 'add_remove' in the file, 'replace_one' here"),
        ({"public": {**PUBLIC, "steps": 11}}, "steps: 10 in the file, 11 here"),
        ({"public": {**PUBLIC, "more": 1}}, "more: 'nothing' in the file, 1 here"),
        ({"public": {"steps": 10}}, "training.labels: ['a', 'b'] in the file, 'nothing' here; training.rate: 0.1 in"),
        (
            {"public": {**PUBLIC, "epochs": 2.0, "release": {"s": 1}}},
            "epochs: 'nothing' in the file, 2.0 here; release.s",
        ),
        ({"public": {**PUBLIC, "steps": 11, "epochs": 2.0}}, "(steps: 10 in the file, 11 here)"),
        ({"public": {**PUBLIC, "init_text": "x" * 900}}, "xxx here"),
    ],
    ids=["component", "ledger", "data", "adjacency", "steps", "more", "less", "followers alone", "followers", "long"],
)
def test_a_file_of_another_run_is_refused_by_what_differs(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    """With what is in the file, and what is here; what follows from a number that differs is not told beside it."""
    kept().save(tmp_path / "c.json")
    read = TrainingCheckpoint.load(tmp_path / "c.json", width=5, num_moments=2)
    with pytest.raises(ConfigurationError, match="state of this run") as caught:
        read.check_is_of(**{**TERMS, "public": PUBLIC, **change})
    assert said in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_file_is_read_before_it_is_known_how_long_its_vectors_have_to_be(tmp_path: Path) -> None:
    """So that a run is told which option differs, and not that some vector is too long."""
    kept().save(tmp_path / "c.json")
    read = TrainingCheckpoint.load(tmp_path / "c.json")
    read.check_sizes(width=5, num_moments=2)
    for sizes, said in (({"width": 6, "num_moments": 2}, "6 float64"), ({"width": 5, "num_moments": 0}, "0 vectors")):
        with pytest.raises(ConfigurationError, match=said):
            read.check_sizes(**sizes)
    _edited(tmp_path / "c.json", weights="", moments=[])
    with pytest.raises(ConfigurationError, match="weights: expected the base64 of float64"):
        TrainingCheckpoint.load(tmp_path / "c.json")


def test_paths_that_cannot_be_written_are_refused_before_anything_is_paid(tmp_path: Path) -> None:
    assert check_checkpoint_path(None) is None
    assert check_checkpoint_path(str(tmp_path / "new.json")) == tmp_path / "new.json"
    for path in (5, tmp_path, tmp_path / "missing" / "c.json"):
        with pytest.raises(ConfigurationError, match=r"^checkpoint: expected"):
            check_checkpoint_path(path)
