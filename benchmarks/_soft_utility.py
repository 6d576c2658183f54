"""Accuracy of prompts at several epsilons, with steps, batch, clip and rate that are the same for all.

Epsilon infinity is `soft_prompt_without_privacy`: nothing is protected there, and its column says so.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from _soft_task import SoftTask

from langchain_dpicl import Budget, PromptDPSGD, SoftPrompt, SoftPromptClassifier
from langchain_dpicl.backends.tuning.prompted_model import PromptedModel, stack_inputs
from langchain_dpicl.backends.tuning.tasks import TaskReader
from langchain_dpicl.baselines import soft_prompt_without_privacy
from langchain_dpicl.options import SoftPromptConfig, TrainableModel, Training
from langchain_dpicl.soft_prompts.plan import engine_of

METHODS = ("soft_prompt", "prefix")
ZERO_SHOT, COMMONEST = "zero-shot", "commonest label"
_BATCH = 64


class SoftBench:
    """Trains prompts of one data set on one frozen model.

    Args:
      model, tokenizer: a masked model.
      task: the data set.
      asked: settings: steps, batch, clip, rate, virtual_tokens, optimizer, schedule.
    """

    def __init__(self, model: Any, tokenizer: Any, task: SoftTask, asked: argparse.Namespace) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.task = task
        self.asked = asked
        self._engines: dict[str, Any] = {}

    @property
    def batch(self) -> int:
        """Expected records of a step."""
        return min(self.asked.batch, len(self.task.records))

    def engine(self, method: str) -> Any:
        """Returns what trains prompts of a method."""
        if method not in self._engines:
            self._engines[method] = engine_of(
                TrainableModel(self.model, self.tokenizer, micro_batch=_BATCH),
                task=self.task.task,
                prompt=SoftPromptConfig(method, self.asked.virtual_tokens),  # type: ignore[arg-type]
            )
        return self._engines[method]

    def trained(self, method: str, epsilon: float) -> SoftPrompt:
        """Returns a prompt at an epsilon, with a budget of its own; infinity: WITHOUT PRIVACY."""
        asked = self.asked
        training = Training(
            expected_batch_size=self.batch,
            steps=asked.steps,
            l2_clip_norm=asked.clip,
            learning_rate=asked.rate,
            optimizer=asked.optimizer,
            schedule=asked.schedule,
        )
        if math.isinf(epsilon):
            return soft_prompt_without_privacy(self.task.records, llm=self.engine(method), training=training)
        run = PromptDPSGD.from_private_examples(
            self.task.private(),
            llm=self.engine(method),
            training=training,
            budget=Budget(epsilon=epsilon, delta=self.task.delta),
            epsilon=epsilon,
        )
        return run.run(progress=False)

    def accuracy(self, prompt: SoftPrompt) -> float:
        """Returns the share of right answers behind a prompt."""
        classifier = SoftPromptClassifier(self.model, prompt, tokenizer=self.tokenizer, batch_size=_BATCH)
        return share_right(classifier.batch(self.task.questions), self.task.right)

    def zero_shot(self) -> float:
        """Returns the share of right answers without a prompt."""
        return share_right(answers(self.model, self.tokenizer, self.task), self.task.right)

    def commonest(self) -> float:
        """Returns the share of the commonest label: what needs no model."""
        return max(self.task.right.count(label) for label in self.task.task.labels) / len(self.task.right)


def scores(model: Any, tokenizer: Any, task: SoftTask) -> torch.Tensor:
    """Returns float32[questions, labels]: how much each label's word fits at the mask, without a prompt."""
    reader = TaskReader(tokenizer, task.task)
    prompted = PromptedModel(model.eval(), method="soft_prompt", kind="masked_lm")
    none = torch.zeros(0, prompted.token_dim, device=prompted.device)
    found = [torch.zeros(0, len(reader.word_ids))]
    for start in range(0, len(task.questions), _BATCH):
        read = [reader.input(text) for text in task.questions[start : start + _BATCH]]
        rows = stack_inputs(
            [one.ids for one in read],
            length=task.task.max_input_tokens,
            filler=reader.filler,
            device=prompted.device,
            is_causal=False,
        )
        rows.at = torch.tensor([one.at for one in read], device=prompted.device)
        with torch.inference_mode():
            logits = prompted.forward(none.expand(len(read), -1, -1), rows)
        found.append(logits[:, 0, list(reader.word_ids)].float().cpu())
    return torch.cat(found)


def answers(model: Any, tokenizer: Any, task: SoftTask) -> list[str]:
    """Returns the label whose word fits best, for each question."""
    return [task.task.labels[place] for place in scores(model, tokenizer, task).argmax(dim=1).tolist()]


def share_right(answered: Sequence[str], right: Sequence[str]) -> float:
    """Returns the share of right answers."""
    return statistics.mean(one == other for one, other in zip(answered, right, strict=True))


def cells(
    bench: SoftBench, epsilons: Sequence[float], *, methods: Sequence[str], runs: int, say: Callable[[str], None]
) -> dict[str, dict[str, list[float]]]:
    """Returns accuracies by method and epsilon, one per run, and beside them those that need no training."""
    found: dict[str, dict[str, list[float]]] = {
        COMMONEST: {"": [bench.commonest()]},
        ZERO_SHOT: {"": [bench.zero_shot()]},
    }
    for method in methods:
        found[method] = {}
        for epsilon in epsilons:
            runs_of: list[float] = []
            for run in range(runs):
                runs_of.append(bench.accuracy(bench.trained(method, epsilon)))
                say(f"{bench.task.title}, {method}, epsilon {epsilon:g}, run {run + 1}: {100 * runs_of[-1]:.1f} %")
            found[method][f"{epsilon:g}"] = runs_of
    return found


def table(title: str, found: Mapping[str, Mapping[str, Sequence[float]]], epsilons: Sequence[float]) -> str:
    """Returns one data set's rows, in percent."""
    heads = ["inf, NOT PRIVATE" if math.isinf(epsilon) else f"epsilon {epsilon:g}" for epsilon in epsilons]
    lines = [f"{title:<34}" + "".join(f"{head:>18}" for head in heads)]
    for name, by_epsilon in found.items():
        shown = "".join(
            f"{_spread(by_epsilon.get(f'{epsilon:g}', by_epsilon.get('', []))):>18}" for epsilon in epsilons
        )
        lines.append(f"{name:<34}{shown}")
    return "\n".join(lines)


def _spread(runs: Sequence[float]) -> str:
    if not runs:
        return "-"
    return f"{100 * statistics.mean(runs):.1f}" + (f" +- {100 * statistics.pstdev(runs):.1f}" if len(runs) > 1 else "")
