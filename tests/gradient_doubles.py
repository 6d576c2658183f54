"""An engine of gradients made of numpy alone, small examples, and runs of PromptDPSGD on them."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from langchain_dpicl import PrivateExamples
from langchain_dpicl.backends.base import TrainingExample
from langchain_dpicl.backends.tuning.tasks import PromptTask
from langchain_dpicl.exceptions import RunInterruptedError
from langchain_dpicl.options import Noise, SoftPromptConfig, Training
from langchain_dpicl.released.soft_prompt import SoftPrompt
from langchain_dpicl.soft_prompts.trainer import PromptDPSGD
from tests.contracts.front_room import CANARY
from tests.doubles import PanicError
from tests.labelling_doubles import house

LABELS = ("good", "bad")
TASK = PromptTask("causal_lm", "Review: {text}\nIt was", LABELS, (" great", " terrible"))
TRAINING = Training(expected_batch_size=10, steps=4)
# Noise is priced, not calibrated, where its size is of no interest.
RUN: dict[str, Any] = {"epsilon": 1e5, "noise": Noise(multiplier=1.0), "training": TRAINING}


def features(text: str, width: int) -> np.ndarray:
    """What the engine sees of a text: a vector that words make, each its own, and good words the first one."""
    seen = np.zeros(width)
    for word in text.split()[:50]:
        seen[zlib.crc32(word.encode("utf-8", "replace")) % width] += 1.0
    seen[0] = text.count("good") - text.count("bad")
    return seen


class LogisticEngine:
    """Tells good from bad by a weight per feature; does what texts tell it to do."""

    name = "logistic"
    method = "soft_prompt"
    task = TASK
    tokenizer_fingerprint = "words"

    def __init__(self, num_virtual_tokens: int = 2, token_dim: int = 4, *, task: PromptTask = TASK) -> None:
        self.num_virtual_tokens, self.token_dim = num_virtual_tokens, token_dim
        self.width = num_virtual_tokens * token_dim
        self.task = task
        self.calls: list[tuple[tuple[str, ...] | None, ...]] = []
        self.at_gradients: Callable[[], object] = lambda: None
        self.at_losses: Callable[[], object] = lambda: None
        self.checks: list[np.ndarray] = []
        self.at_check: Callable[[], object] = lambda: None

    def check(self, parameters: np.ndarray) -> None:
        self.checks.append(parameters)
        self.at_check()

    def gradients(self, parameters: np.ndarray, groups: Sequence[Any], *, add: Callable[[Any], None]) -> None:
        self.calls.append(tuple(group and tuple(example.text for example in group) for group in groups))
        self.at_gradients()
        rows = [self._row(parameters, group) for group in groups if group]
        for start in range(0, len(rows), 3):  # micro-batches
            add(np.array(rows[start : start + 3]))

    async def agradients(self, parameters: np.ndarray, groups: Sequence[Any], *, add: Callable[[Any], None]) -> None:
        await asyncio.sleep(0)
        self.gradients(parameters, groups, add=add)

    def _row(self, parameters: np.ndarray, group: Sequence[TrainingExample]) -> np.ndarray:
        return np.mean([self._gradient(parameters, example) for example in group], axis=0)

    def _gradient(self, parameters: np.ndarray, example: TrainingExample) -> np.ndarray:
        for order, error in (
            ("RAISES", RuntimeError(example.text)),
            ("PANICS", PanicError(example.text)),
            ("EXITS", SystemExit(example.text)),
        ):
            if order in example.text:
                raise error
        if "FAILS" in example.text or example.target not in self.task.labels:
            return np.zeros(self.width)
        if "NUMBERS" in example.text:
            return np.resize([np.nan, np.inf, 1e300], self.width)
        seen, side = features(example.text, self.width), 1 if example.target == "good" else -1
        return -side * seen / (1 + np.exp(np.clip(side * (parameters @ seen), -50, 50)))

    def losses(self, parameters: np.ndarray, examples: Sequence[TrainingExample]) -> np.ndarray:
        self.at_losses()
        sides = [1 if example.target == "good" else -1 for example in examples]
        margins = [parameters @ features(example.text, self.width) for example in examples]
        return np.logaddexp(0, -np.array(sides) * np.array(margins))

    def initial(self, text: str | None = None) -> np.ndarray:
        return np.full(self.width, 0.0 if text is None else len(text) / 8)

    def arrays(self, parameters: np.ndarray) -> dict[str, np.ndarray]:
        shape = (self.num_virtual_tokens, self.token_dim)
        return {"prompt_embeddings": parameters.reshape(shape).astype(np.float32)}

    def peft_config(self) -> dict[str, Any]:
        sizes = {"num_virtual_tokens": self.num_virtual_tokens, "token_dim": self.token_dim}
        return {"peft_type": "PROMPT_TUNING", "task_type": "CAUSAL_LM", **sizes}

    def weights_digest(self) -> str:
        return "0" * 64


def texts(count: int = 40, word: str = CANARY) -> list[tuple[str, str]]:
    """Texts that say what they are, each with a word of its own."""
    return [(f"{word} {LABELS[i % 2]} {i}", LABELS[i % 2]) for i in range(count)]


def examples(given: Sequence[tuple[str, str]] | None = None, **options: Any) -> PrivateExamples:
    records = [{"text": text, "label": label} for text, label in (texts() if given is None else given)]
    return PrivateExamples(records, **{"label_key": "label", "labels": LABELS, "public_size": 40, **options})


def training(**changes: Any) -> Training:
    """The training of `prepared` with other options."""
    return TRAINING.replace(**changes)


def prepared(
    private: PrivateExamples | None = None,
    *,
    engine: Any = None,
    budget: Any = None,
    epsilon: float | None = 1e5,
    training: Any = TRAINING,
    noise: Noise | None = RUN["noise"],
    prompt: SoftPromptConfig | None = None,
    fields: Mapping[Any, str] | None = None,
    component: str | None = None,
    checkpoint: Any = None,
    block: int | None = 1000,
) -> PromptDPSGD:
    """A run that has not spent anything yet, of four steps, each on ten of forty units.

    All tickets are in one block: what is reserved, burnt and given back then tells what became of every step. None: in
    blocks of a twentieth of the steps.
    """
    made = PromptDPSGD.from_private_examples(
        private or examples(),
        llm=LogisticEngine() if engine is None else engine,
        training=training,
        budget=house() if budget is None else budget,
        epsilon=epsilon,
        prompt=prompt,
        noise=noise,
        fields=fields,
        component=component,
        checkpoint=checkpoint,
    )
    made._block = made._block if block is None else block
    return made


def short_of_steps(made: PromptDPSGD, *, awaited: bool = False) -> SoftPrompt:
    """Runs what is left of a run that lost tickets; returns the prompt that the error holds."""
    with pytest.raises(RunInterruptedError, match="expected a ticket for each step of the plan, found none") as caught:
        asyncio.run(made.arun()) if awaited else made.run()
    assert caught.value.run is made
    assert (made.steps_left, made.is_finished) == (0, False)
    assert made.result.report["step"] < made.plan.steps
    return made.result


PUBLIC = [{"text": "good and good again", "label": "good"}, {"text": "bad", "label": "bad"}]
