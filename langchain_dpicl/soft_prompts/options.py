"""The options of training: fields of records, public validation records, and optimizers of released gradients."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.backends.base import GradientBackend, TrainingExample
from langchain_dpicl.backends.sync_async import public_failure
from langchain_dpicl.backends.tuning.tasks import PromptTask
from langchain_dpicl.exceptions import ConfigurationError, DPICLError
from langchain_dpicl.options import Training
from langchain_dpicl.privacy._validate import check_choice, check_int, check_real, fail
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.release.sample import Record

FieldNames: TypeAlias = Mapping[Literal["text", "target", "pair"], str]
"""The record fields of the input, the answer and the second input."""

_DEFAULT_ROUNDS = 20
"""Validations of a run, by default."""


def given_fields(fields: FieldNames | None) -> dict[str, str]:
    """Returns the field names that a caller gave; refuses other keys."""
    given: Mapping[Any, str] = {} if fields is None else fields
    if not isinstance(given, Mapping) or not set(given) <= {"text", "target", "pair"}:
        found = sorted(map(str, given)) if isinstance(given, Mapping) else type(given).__name__
        raise fail("fields", "field names under 'text', 'target' and 'pair'", found)
    return dict(given)


@dataclass(frozen=True, slots=True)
class ExampleFields:
    """The record fields of a training example; public.

    Attributes:
      text: field of the input.
      target: field of the answer.
      pair: field of the second input, or None.
    """

    text: str
    target: str
    pair: str | None = None

    @classmethod
    def of(cls, private: PrivateExamples, fields: FieldNames | None) -> ExampleFields:
        """Checks the field names against the declared fields; by default text and label."""
        keys: dict[str, Any] = {"text": private.text_key, "target": private.label_key, **given_fields(fields)}
        if keys["target"] is None:
            advice = 'Declare PrivateExamples(label_key=..., labels=...), or fields=(...) and give {"target": "..."}.'
            raise fail("fields", 'under "target" the field that holds the answer', None, advice)
        for name, key in keys.items():
            if key not in private.fields:
                advice = "Declare further fields with PrivateExamples(fields=...)."
                raise fail("fields", f'under "{name}" a declared field among {list(private.fields)}', key, advice)
        if len(set(keys.values())) != len(keys):
            raise fail("fields", "different fields", list(keys.values()))
        return cls(**keys)

    def labels_of(self, private: PrivateExamples) -> tuple[str, ...]:
        """Returns the declared answers; () for another field than the label, which has no closed list of values."""
        return tuple(private.labels or ()) if self.target == private.label_key else ()

    def check_task(self, task: PromptTask, private: PrivateExamples, *, is_target_given: bool) -> None:
        """Refuses a task that does not fit the fields and the declared labels."""
        if task.writes_text and private.labels and not is_target_given:
            advice = 'Give the task labels, or fields={"target": "..."} to write the label as text.'
            raise fail("task", "one with labels, because the examples have labels", "one that writes texts", advice)
        if task.labels and (unknown := sorted(set(self.labels_of(private)) - set(task.labels))):
            advice = "Give the task the declared labels of the examples."
            raise fail("task", f"the examples' labels among its own, {list(task.labels)}", unknown, advice)
        if task.kind != "sequence_classification" and task.takes_pair != (self.pair is not None):
            expected = "the field that fills {pair}" if task.takes_pair else "nothing: the template has no {pair}"
            raise fail("fields", f'under "pair" {expected}', self.pair)

    def examples_of(self, records: Sequence[Record]) -> tuple[TrainingExample, ...]:
        """Returns the examples of one unit. Runs on private records: keeps nothing."""
        return tuple(
            [
                TrainingExample(
                    record[self.text], None if self.pair is None else record[self.pair], record[self.target]
                )
                for record in records
            ]
        )

    def examples_in(self, name: str, records: Any, *, labels: Sequence[str] = ()) -> tuple[TrainingExample, ...]:
        """Returns the examples of records that no ledger protects; messages name index and field, no content.

        With `labels` every answer must be one of them, because the loss would silently ignore others.
        """
        if isinstance(records, PrivateExamples):
            advice = "Give them to PromptDPSGD.from_private_examples, with a budget."
            raise fail(name, "records that no ledger protects", type(records).__name__, advice)
        if isinstance(records, str | bytes | Mapping) or not isinstance(records, Iterable):
            raise fail(name, "a list of mappings", type(records).__name__)
        wanted = [key for key in (self.text, self.pair, self.target) if key is not None]
        listed = list(records)
        for place, record in enumerate(listed):
            is_whole = isinstance(record, Mapping) and all(isinstance(record.get(key), str) for key in wanted)
            if not is_whole:
                raise ConfigurationError(f"{name}[{place}]: expected a mapping with text under {wanted}.")
            if labels and record[self.target] not in labels:
                raise ConfigurationError(
                    f"{name}[{place}]: expected one of {list(labels)} under {self.target!r}, found another label. "
                    "Correct or leave out the record."
                )
        if not listed:
            raise fail(name, "at least one record", [])
        return self.examples_of(listed)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        return {"text_key": self.text, "pair_key": self.pair, "target_key": self.target}


@dataclass(frozen=True, slots=True)
class Validation:
    """PUBLIC examples whose loss is shown in training, and how often.

    Attributes:
      examples: public.
      every: steps between two validations; the last step is validated too.
    """

    examples: tuple[TrainingExample, ...] = field(repr=False)
    every: int

    @classmethod
    def of(
        cls, fields: ExampleFields, training: Training, *, labels: Sequence[str] = (), steps: int
    ) -> Validation | None:
        """Reads public records; None without records."""
        if training.validation is None:
            return None
        apart = training.validate_every or max(1, math.ceil(steps / _DEFAULT_ROUNDS))
        return cls(fields.examples_in("validation", training.validation, labels=labels), apart)

    def is_due(self, step: int, *, steps_left: int) -> bool:
        """Whether the current step is validated."""
        return step % self.every == 0 or steps_left == 0


@dataclass(frozen=True, slots=True)
class LossRequest:
    """Request for the mean loss of PUBLIC examples at released weights; NaN if none has a finite loss.

    Attributes:
      backend: the engine.
      weights: float64[width], released.
      examples: public.
    """

    backend: GradientBackend = field(repr=False)
    weights: Any = field(repr=False)
    examples: tuple[TrainingExample, ...] = field(repr=False)

    def run(self) -> float:
        """Computes the loss."""
        try:
            losses = [float(loss) for loss in self.backend.losses(self.weights, self.examples)]
        except DPICLError:
            raise
        except Exception as error:  # noqa: BLE001  engines may raise anything
            kind = type(error).__name__
        else:
            known = [loss for loss in losses if math.isfinite(loss)]
            return math.fsum(known) / len(known) if known else math.nan
        raise public_failure(kind)

    async def arun(self) -> float:
        """Async version of `run`."""
        return await asyncio.to_thread(self.run)


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

    def to_bytes(self) -> bytes:
        """Returns weights and moments as little-endian float64, so that a run continues with the same bits."""
        return np.concatenate((self.weights, *self.moments)).astype("<f8").tobytes()

    def __repr__(self) -> str:
        return f"OptimizerState(step={self.step}, width={len(self.weights)})"


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An update rule: Adam (Kingma and Ba 2015) or plain gradient descent.

    Formal guarantees:
      - `update` is a deterministic function of the state and the released gradient, to the bit.
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

    def restored(self, step: int, data: bytes, *, width: int) -> OptimizerState:
        """Returns the state whose `to_bytes` gave `data`, which comes from a file.

        Args:
          step: number of updates so far.
          data: weights and moments.
          width: length of each vector.

        Raises:
          ConfigurationError: they are no state of a run with this optimizer and this many weights.
        """
        count = 1 + self.num_moments
        if len(data) != 8 * count * width:
            raise fail("checkpoint: bytes of its arrays", f"{count} vectors of {width} float64 numbers", len(data))
        # Copied: `frombuffer` returns a read-only view of the file's bytes.
        weights, *moments = np.frombuffer(data, dtype="<f8").astype(np.float64).reshape(count, width)
        if not all(np.isfinite(values).all() for values in (weights, *moments)):
            raise ConfigurationError("checkpoint: its arrays: expected finite numbers.")
        if (np.abs(weights) > LARGEST_WEIGHT).any() or (weights * WEIGHT_GRID % 1.0 != 0).any():
            raise ConfigurationError(
                "checkpoint: its arrays: expected weights that are multiples of 2^-24, at most 2^20."
            )
        return OptimizerState(step, weights, tuple(moments))

    def rate(self, step: int) -> float:
        """Returns the learning rate after `step` steps."""
        if self.schedule == "constant":
            return self.learning_rate
        # Never negative, also for a caller that trains beyond the planned steps.
        return self.learning_rate * max(self.steps - step, 0) / self.steps

    def update(self, state: OptimizerState, gradient: Floats) -> OptimizerState:
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
