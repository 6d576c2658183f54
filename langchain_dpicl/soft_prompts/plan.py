"""Plans, calibrates and prices private training, and holds its options and the engine that trains."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl._plain_files import read_plain
from langchain_dpicl.backends.base import GradientBackend, TrainingExample
from langchain_dpicl.backends.hf.backend import HuggingFaceBackend
from langchain_dpicl.backends.hf.loading import check_installed
from langchain_dpicl.backends.sync_async import public_call
from langchain_dpicl.backends.tuning.tasks import PromptTask, TaskKind
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.options import SoftPromptConfig, TrainableModel, Training, Where
from langchain_dpicl.planning.share_plan import Cost, SharePlan, with_noise_for
from langchain_dpicl.privacy._validate import (
    Adjacency,
    check_adjacency,
    check_choice,
    check_int,
    check_name,
    check_positive,
    check_positive_delta,
    check_real,
    fail,
)
from langchain_dpicl.privacy.extensions.gradient_sums import MAX_GRADIENT_WIDTH, ClippedGradientSum
from langchain_dpicl.privacy.extensions.registry import shown_release, step_release, training_tickets
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.privacy.mechanisms.release_plan import ReleasePlan
from langchain_dpicl.privacy.private_examples import PrivateExamples, label_text
from langchain_dpicl.release.curator import Record


@dataclass(frozen=True, slots=True)
class TrainingPlan(SharePlan):
    """The public plan of `steps` training steps: the release, its tickets and its noise.

    Formal guarantees:
      - `tickets()` are `steps` tickets of `release.block_event(1)`: a fresh secret Poisson sample for each step.
      - All of them together are (epsilon, delta)-DP under `release.adjacency`, the declared gap of the noise included.

    Attributes:
      release: sampling, clipping, noise and adjacency of one step.
      steps: number of training steps.
      width: number of trained parameters.
      public_size: declared units.
      expected_batch_size: expected units of one step; sums of gradients are divided by it, not by the drawn number.
    """

    method: ClassVar[str] = "training"

    release: ReleasePlan
    steps: int
    width: int
    public_size: int
    expected_batch_size: int

    @property
    def sizes(self) -> Mapping[str | None, int]:
        """The declared units, which no label splits."""
        return {None: self.public_size}

    @property
    def sampling_rate(self) -> float:
        """Probability that a unit is in the sample of a step."""
        return self.release.sampler.sampling_rate

    @property
    def l2_clip_norm(self) -> float:
        """Bound on the L2 norm of a unit's gradient."""
        aggregation = self.release.aggregation
        if not isinstance(aggregation, ClippedGradientSum):
            raise fail("aggregation", "clipped gradients", aggregation.name, "Plan with plan_training.")
        return aggregation.l2_clip_norm

    @property
    def average_factor(self) -> float:
        """Factor from a released sum to the average gradient of a step: clip over expected batch size."""
        return self.l2_clip_norm / self.expected_batch_size

    @property
    def noise_scale(self) -> float:
        """Standard deviation of the noise on each coordinate of the average gradient."""
        return self.noise_multiplier * self.release.sensitivity.require("l2") * self.average_factor

    @property
    def noise_to_clip(self) -> float:
        """Expected L2 norm of the noise on the average gradient, over the clip norm."""
        return self.noise_scale * math.sqrt(self.width) / self.l2_clip_norm

    @property
    def epochs(self) -> float:
        """Expected number of samples that contain a unit."""
        return self.steps * self.expected_batch_size / self.public_size

    @property
    def implementation_delta(self) -> float:
        """Declared gap between ideal and drawn noise over all steps."""
        return self.release.implementation_delta(self.steps, width=self.width)

    def tickets(self) -> tuple[Ticket, ...]:
        """Returns the tickets of the share: one per step, refundable while unburnt."""
        return training_tickets(self.release, self.steps)

    def cost(self, *, record_tokens: int = 128, examples_per_unit: int = 1) -> Cost:
        """Returns the gradients of single examples, each one forward and one backward pass, and the tokens of these."""
        check_int("record_tokens", record_tokens, low=1)
        gradients = self.steps * self.expected_batch_size * check_int("examples_per_unit", examples_per_unit, low=1)
        return Cost(gradients, 0, gradients * record_tokens, 0)

    def expected(self) -> dict[str, float]:
        """Returns how often a unit is drawn, and how the noise on the average gradient compares with the clip."""
        return {"epochs": self.epochs, "noise_scale": self.noise_scale, "noise_to_clip": self.noise_to_clip}

    def _numbers(self) -> dict[str, Any]:
        return {
            "mechanism": self.release.mechanism.name,
            "noise_scale": self.noise_scale,
            "aggregation": self.release.aggregation.name,
            "l2_clip_norm": self.l2_clip_norm,
            "rows": self.release.row_shape,
            "sampling": "poisson",
            "sampling_rate": self.sampling_rate,
            "public_size": self.public_size,
            "expected_batch_size": self.expected_batch_size,
            "steps": self.steps,
            "epochs": self.epochs,
            "width": self.width,
            "release": self.release.to_dict(),
        }

    @classmethod
    def rebuild(cls, shown: Mapping[str, Any]) -> TrainingPlan:
        """Returns the plan of the parameters shown, see `SharePlan.rebuild`.

        Formal guarantees:
          - The clip and the width leave no trace in a ticket: noise is measured in clips, and a gradient is released
            as a whole. They are the author's word, as far as the declared gap of the noise does not tell the width.
        """
        release = shown_release(shown["release"])
        return plan_training(
            shown["public_size"],
            epsilon=None,
            delta=shown["delta"],
            expected_batch_size=shown["expected_batch_size"],
            l2_clip_norm=shown["l2_clip_norm"],
            width=shown["width"],
            steps=shown["steps"],
            adjacency=release.adjacency,
            noise_multiplier=release.mechanism.noise_multiplier,
            partition=shown["dataset_id"],
        )


def plan_training(
    public_size: int,
    *,
    epsilon: float | None,
    delta: float,
    expected_batch_size: int,
    l2_clip_norm: float,
    width: int,
    steps: int | None = None,
    epochs: float | None = None,
    adjacency: Adjacency = "add_remove",
    noise_multiplier: float | None = None,
    partition: str = "private-examples",
    is_rough: bool = False,
) -> TrainingPlan:
    """Calibrates the noise of training steps to `epsilon`, or prices a given noise.

    Duan et al. train soft prompts and prefixes of 1 to 50 virtual tokens with an expected batch size of 1,024, a clip
    of .01 to 4 (mostly .05 to .2) and 10 to 100 epochs.

    Args:
      public_size: declared number of units.
      epsilon: target; the plan's epsilon is an upper bound at most this. None needs `noise_multiplier`.
      delta: the share's delta.
      expected_batch_size: expected units of one step, 1 to `public_size`; each is drawn independently.
      l2_clip_norm: bound on the L2 norm of a unit's gradient.
      width: number of trained parameters.
      steps: training steps; or give `epochs`.
      epochs: expected number of samples that contain a unit; the steps are rounded up.
      adjacency: neighbouring relation.
      noise_multiplier: given noise, over the L2 sensitivity: under replace_one the sensitivity is twice the clip;
        None calibrates.
      partition: the data set's public id.
      is_rough: calibrates several times faster, with a few percent more noise; for comparing many plans.

    Raises:
      ConfigurationError: a public parameter is out of range, or not exactly one of `steps` and `epochs` is given.
    """
    check_adjacency(adjacency)
    check_positive_delta(delta)
    check_int("public_size", public_size, low=1)
    check_int("expected_batch_size", expected_batch_size, low=1, high=public_size)
    check_int("width", width, low=1, high=MAX_GRADIENT_WIDTH)
    check_name("partition", partition)
    release = step_release(
        sampling_rate=expected_batch_size / public_size,
        l2_clip_norm=l2_clip_norm,
        noise_multiplier=1.0,
        adjacency=adjacency,
    )
    count = steps_of(public_size, expected_batch_size, steps=steps, epochs=epochs)
    draft = TrainingPlan(
        release, count, width, public_size, expected_batch_size, partition=partition, epsilon=0.0, delta=delta
    )
    return with_noise_for(draft, epsilon=epsilon, noise_multiplier=noise_multiplier, is_rough=is_rough)


def steps_of(public_size: int, expected_batch_size: int, *, steps: int | None, epochs: float | None) -> int:
    """Returns the number of steps: `steps`, or enough for `epochs`, rounded up."""
    if (steps is None) == (epochs is None):
        actual = "neither" if steps is None else "both"
        raise ConfigurationError(f"steps, epochs: expected one of them, found {actual}. Give steps=... or epochs=....")
    if steps is not None:
        return check_int("steps", steps, low=1)
    # The decimal number as written: the float 1.1 is slightly larger, which could add a step.
    passes = Fraction(repr(check_positive("epochs", epochs)))
    return math.ceil(passes * public_size / expected_batch_size)


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
    """The record fields of a training example; public."""

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

        With `labels` every answer must be one of them, because the loss would silently ignore others; integers and
        booleans are read as text, as `labels_as_text` reads those of private records.
        """
        if isinstance(records, PrivateExamples):
            advice = "Give them to PromptDPSGD.from_private_examples, with a budget."
            raise fail(name, "records that no ledger protects", type(records).__name__, advice)
        if isinstance(records, str | bytes | Mapping) or not isinstance(records, Iterable):
            raise fail(name, "a list of mappings", type(records).__name__)
        wanted = [key for key in (self.text, self.pair, self.target) if key is not None]
        listed = [
            {**record, self.target: label_text(record.get(self.target))}
            if labels and isinstance(record, Mapping)
            else record
            for record in records
        ]
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
    """PUBLIC examples whose loss is shown in training, and how often."""

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


def public_loss(backend: GradientBackend, weights: Floats, examples: tuple[TrainingExample, ...]) -> float:
    """Returns the mean loss of PUBLIC examples at released weights; NaN if none has a finite loss."""
    losses = public_call(lambda: [float(loss) for loss in backend.losses(weights, examples)])
    known = [loss for loss in losses if math.isfinite(loss)]
    return math.fsum(known) / len(known) if known else math.nan


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


_KINDS: dict[str, TaskKind] = {
    "ForSequenceClassification": "sequence_classification",
    "ForMaskedLM": "masked_lm",
    "ForCausalLM": "causal_lm",
    "LMHeadModel": "causal_lm",
}
_MOST_CONFIG = 1 << 24
_BESIDE_GRADIENTS = (
    "task",
    "method",
    "num_virtual_tokens",
    "tokenizer_fingerprint",
    "initial",
    "arrays",
    "peft_config",
)
"""What an engine needs besides the methods of `GradientBackend`, so that its parameters become a `SoftPrompt`."""


def engine_of(
    llm: TrainableModel | HuggingFaceBackend | GradientBackend | Where,
    *,
    task: PromptTask | None = None,
    prompt: SoftPromptConfig | None = None,
    labels: Sequence[str] = (),
) -> Any:
    """Returns the engine that trains a prompt of `llm`; one that computes gradients is returned unchanged.

    Args:
      llm: the model.
      task: template and answers; None: the usual template of the model's kind, and `labels`.
      prompt: what is trained.
      labels: the answers of a task that is not given; (): the prompt learns to write texts.

    Raises:
      ConfigurationError: a wrong type, or an engine that lacks what a `SoftPrompt` is made of.
    """
    wanted = SoftPromptConfig() if prompt is None else prompt
    if not isinstance(wanted, SoftPromptConfig):
        raise fail("prompt", "SoftPromptConfig(...)", type(prompt).__name__)
    if not isinstance(task, PromptTask | None):
        raise fail("task", "PromptTask(...)", type(task).__name__)
    if isinstance(llm, GradientBackend):
        if missing := [name for name in _BESIDE_GRADIENTS if not hasattr(llm, name)]:
            expected = f"an engine that also has {', '.join(missing)}"
            raise fail("llm", expected, type(llm).__name__, "A SoftPrompt is made of them: add them to the engine.")
        if task is not None or wanted.replace(init_text=None) != SoftPromptConfig():
            expected = "no task, and of a prompt init_text alone, together with an engine, which has its own"
            raise fail("task, prompt", expected, "others")
        return llm
    if isinstance(llm, str | os.PathLike | HuggingFaceBackend):
        llm = TrainableModel(llm)
    if not isinstance(llm, TrainableModel):
        expected = "TrainableModel(...), a HuggingFaceBackend or the folder of a local model"
        raise fail("llm", expected, type(llm).__name__, "Give a model object as TrainableModel(model, tokenizer).")
    model, tokenizer = model_parts(llm.model, llm.tokenizer)
    check_installed()
    from langchain_dpicl.backends.tuning.engine import PromptEngine  # imports torch

    engine = PromptEngine(
        model,
        tokenizer,
        method=wanted.method,
        num_virtual_tokens=wanted.num_virtual_tokens,
        task=_default_task(kind_of(model), labels) if task is None else task,
        micro_batch=llm.micro_batch,
        device=llm.device,
        dtype=llm.dtype,
    )
    if not isinstance(llm.model, HuggingFaceBackend):  # which was checked when it was built, with its own end ids
        engine.check_writes()
    return engine


def model_parts(model: Any, tokenizer: Any) -> tuple[Any, Any]:
    """Returns model and tokenizer; for a `HuggingFaceBackend`, the engine's."""
    if not isinstance(model, HuggingFaceBackend):
        return model, tokenizer
    from langchain_dpicl.backends.tuning.prompted_model import parts_of

    if tokenizer is not None:
        raise fail("tokenizer", "None with an engine, which has its own", type(tokenizer).__name__)
    engine, tokenizer = parts_of(model)
    return engine.body.model, tokenizer


def kind_of(model: Any) -> TaskKind:
    """Returns the task kind of a model, by its class name or by the configuration in its folder."""
    names = [type(model).__name__]
    if isinstance(model, str | os.PathLike):
        names = _architectures(Path(model) / "config.json")
    for name in names:
        for ending, kind in _KINDS.items():
            if name.endswith(ending):
                return kind
    expected = f"a model whose class ends in one of {list(_KINDS)}, or the folder of one"
    raise fail("llm", expected, names, "Give task=PromptTask(...) for another.")


def _architectures(path: Path) -> list[str]:
    try:
        names = json.loads(read_plain(path, _MOST_CONFIG)).get("architectures")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        advice = "Hub names are not downloaded: download the model first and pass its folder."
        raise fail("llm", "a model object, or the folder of a local model", str(path.parent), advice) from error
    return [str(name) for name in names] if isinstance(names, list) else []


def _default_task(kind: TaskKind, labels: Sequence[str]) -> PromptTask:
    if kind == "sequence_classification":
        advice = "The order of the labels is that of the head's outputs, which only you know."
        raise fail("task", f'PromptTask("{kind}", labels=[...]) for a model with a head', None, advice)
    return PromptTask(kind, labels=tuple(labels))
