"""Trains a soft prompt WITHOUT PRIVACY, as a baseline for comparison (epsilon infinity)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from langchain_dpicl._optimizers import Floats, Optimizer, OptimizerName, Schedule
from langchain_dpicl._training_options import ExampleFields
from langchain_dpicl.backends.base import GradientBackend, RealRows, TrainingExample
from langchain_dpicl.backends.gradients import AskGradients
from langchain_dpicl.privacy._validate import check_int, check_positive, fail
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.soft_prompt import SoftPrompt
from langchain_dpicl.soft_prompts import PromptDPSGD

BASELINE = "soft prompt without privacy"


def soft_prompt_without_privacy(
    trainer: PromptDPSGD,
    records: Iterable[Mapping[str, str]],
    *,
    batch_size: int = 32,
    epochs: float | None = None,
    steps: int | None = None,
    learning_rate: float = 0.01,
    optimizer: OptimizerName = "adam",
    schedule: Schedule = "constant",
    text_key: str = "text",
    target_key: str = "label",
    pair_key: str | None = None,
    told: Callable[[int, Floats], object] | None = None,
) -> SoftPrompt:
    """Trains the prompt WITHOUT clipping and WITHOUT noise: nothing is protected and epsilon is infinite.

    Every epoch deals the records anew into batches; a step follows the mean gradient of its batch.

    Args:
      trainer: the same as for private training.
      records: records that no ledger protects, with the fields below; `PrivateExamples` are refused.
      batch_size: records of one step; an epoch's last batch may be smaller.
      epochs: how often each record is used; or give `steps`.
      steps: training steps.
      learning_rate: size of a step.
      optimizer: "adam" or "sgd".
      schedule: "constant", or "linear" down towards 0.
      text_key: field of the input.
      target_key: field of the answer.
      pair_key: field of the second input, if there is one.
      told: called with the number of each step and the weights after it.

    Raises:
      ConfigurationError: private examples, records that cannot be read, or a parameter out of range.
      ModelCallError: the model failed.

    Source: Duan et al. (2023), Flocks of Stochastic Parrots, without its clips and noise.
    """
    fields = ExampleFields(text_key, target_key, pair_key)
    examples = fields.examples_in("records", records, labels=trainer.task.labels)
    check_int("batch_size", batch_size, low=1)
    per_epoch = -(-len(examples) // batch_size)
    if (steps is None) == (epochs is None):
        raise fail("steps, epochs", "one of them", (steps, epochs))
    passes = check_positive("epochs", epochs) if steps is None else 0.0
    count = check_int("steps", math.ceil(passes * per_epoch) if steps is None else steps, low=1)
    rule = Optimizer(optimizer, learning_rate, schedule, count)
    state = rule.start(trainer.engine.initial(trainer.init_text))
    for batch in _batches(examples, batch_size, count):
        state = rule.updated(state, mean_gradient(trainer.engine, state.weights, batch))
        if told is not None:
            told(state.step, state.weights)
    report = {
        "private": False,
        "epsilon": "infinity",
        "delta": 0.0,
        "baseline": BASELINE,
        "plan": {"steps": count, "batch_size": batch_size, "optimizer": rule.to_dict(), **fields.to_dict()},
    }
    return SoftPrompt.of(trainer.engine, state.weights, report=report)


def mean_gradient(engine: GradientBackend, weights: Floats, examples: Sequence[TrainingExample]) -> Floats:
    """Returns float64[width]: the mean gradient of examples that nothing protects."""
    total = _Total(engine.width)
    asked: _Total = AskGradients(engine, weights, [(example,) for example in examples], total).run().take()
    return asked.value / len(examples)


class _Total:
    """Adds rows as they are: nothing is clipped."""

    def __init__(self, width: int) -> None:
        self.value: Floats = np.zeros(width)

    def add(self, rows: RealRows) -> None:
        self.value += np.asarray(rows, dtype=np.float64).sum(axis=0)

    def clear(self) -> None:
        self.value[:] = 0.0


def _batches(examples: Sequence[TrainingExample], size: int, count: int) -> Iterator[list[TrainingExample]]:
    """Yields `count` batches: epoch after epoch, each dealt anew."""
    made = 0
    while True:
        order = SYSTEM_RANDOM.permutation(len(examples))
        for start in range(0, len(order), size):
            if made == count:
                return
            made += 1
            yield [examples[int(place)] for place in order[start : start + size]]
