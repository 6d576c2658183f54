"""Scores the labels of PUBLIC texts behind trained prompts that have been released."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from langchain_dpicl.backends.hf import loading
from langchain_dpicl.backends.hf import model_checks as weights
from langchain_dpicl.backends.hf.batches import is_out_of_memory
from langchain_dpicl.backends.tuning.engine import check_model
from langchain_dpicl.backends.tuning.prompted_model import Method, PromptedModel, stack_inputs
from langchain_dpicl.backends.tuning.serving import Arrays, has_head, put_head
from langchain_dpicl.backends.tuning.tasks import ModelInput, PromptTask, TaskKind, TaskReader
from langchain_dpicl.exceptions import ConfigurationError, ModelCallError


@dataclass(frozen=True, slots=True)
class ScoringInput:
    """One PUBLIC text or pair, and the name of its prompt."""

    prompt: str
    text: str
    pair: str | None = None


@dataclass(frozen=True, slots=True)
class _ScoringPrompt:
    """A prompt as the model reads it: float32[virtual tokens, width]."""

    method: Method
    numbers: torch.Tensor
    reader: TaskReader
    words: torch.Tensor | None


class SoftPromptScorer:
    """A model that scores labels behind trained prompts of either method and any length.

    Args:
      model: of the transformers package.
      tokenizer: its tokenizer.
      kind: what kind of model it is.
      batch_size: texts that are read together.
      is_own: whether the model is not shared, so that it may be given the head that a prompt was trained with.
    """

    def __init__(self, model: Any, tokenizer: Any, *, kind: TaskKind, batch_size: int, is_own: bool) -> None:
        self.model, self._tokenizer = model, tokenizer
        self.name = loading.public_name(self.model)
        self._kind: TaskKind = kind
        self._batch_size = batch_size
        self._is_own = is_own
        self._prompted: dict[Method, PromptedModel] = {}
        self._taught: dict[str, _ScoringPrompt] = {}
        self._lock = threading.RLock()

    def put(
        self,
        name: str,
        method: Method,
        numbers: NDArray[np.float32],
        *,
        task: PromptTask,
        heads: int | None,
        head: Arrays,
    ) -> str:
        """Adds a prompt float32[virtual tokens, width]; returns the fingerprint of the tokenizer."""
        with self._lock:
            prompted = self._prompted.get(method) or PromptedModel(self.model, method=method, kind=self._kind)
            self._check_sizes(name, prompted, numbers, task, heads)
            self._settle_head(name, head)
            outputs = len(task.labels) if task.kind == "sequence_classification" else None
            check_model(prompted, num_virtual_tokens=len(numbers), num_outputs=outputs)
            reader = TaskReader(self._tokenizer, task)
            words = torch.tensor(reader.word_ids, device=prompted.device) if reader.word_ids else None
            prompt = torch.tensor(numbers, device=prompted.device)
            self._prompted[method] = prompted
            self._taught[name] = _ScoringPrompt(method, prompt, reader, words)
        return reader.tokens.fingerprint

    def weights(self) -> str:
        """Returns the fingerprint of the model's weights, head included; "" if there is none."""
        with self._lock:
            return weights.fingerprint(self.model)

    def _check_sizes(
        self, name: str, prompted: PromptedModel, numbers: NDArray[np.float32], task: PromptTask, heads: int | None
    ) -> None:
        """Refuses a prompt that was trained on another model."""
        count, width = numbers.shape
        expected = ""
        if width != prompted.dim:
            expected = f"{prompted.dim} numbers per virtual token, found {width}"
        elif prompted.method == "prefix" and heads != prompted.num_heads:
            expected = f"{prompted.num_heads} heads with keys, found {heads}"
        elif prompted.limit is not None and count + task.max_input_tokens > prompted.limit:
            expected = (
                f"at most {prompted.limit} tokens, its context, found {count} virtual ones and {task.max_input_tokens}"
            )
        if expected:
            kind = type(self.model).__name__
            raise ConfigurationError(
                f"prompt {name!r}: expected, for {kind}, {expected}; take the model that it was trained on"
            )

    def _settle_head(self, name: str, head: Arrays) -> None:
        """Gives the model the head of its first prompt, and refuses prompts of another head."""
        if not head or has_head(self.model, head):
            return
        if not self._is_own or self._taught or not put_head(self.model, head):
            raise ConfigurationError(
                f"prompt {name!r}: expected a model with the head that it was trained with, found "
                f"{type(self.model).__name__} with another; take that model, or pass the folder of its base to serve "
                "prompts of one head: it is put in there"
            )

    def scores(self, questions: Sequence[ScoringInput]) -> list[NDArray[np.float64]]:
        """Returns float64[labels] per text: the probability of each label, in one forward per batch and method."""
        rows: list[NDArray[np.float64]] = [np.zeros(0)] * len(questions)
        for method in self._prompted:
            places = [place for place, one in enumerate(questions) if self._taught[one.prompt].method == method]
            for start in range(0, len(places), self._batch_size):
                block = places[start : start + self._batch_size]
                answers = self._attempt(method, [questions[place] for place in block])
                for place, answer in zip(block, answers, strict=True):
                    rows[place] = answer
        return rows

    def _attempt(self, method: Method, questions: Sequence[ScoringInput]) -> list[NDArray[np.float64]]:
        kind = ""
        try:
            with self._lock, torch.inference_mode():
                answers = self._score(method, questions)
        except Exception as error:  # noqa: BLE001  whatever a model raises
            kind = "memory" if is_out_of_memory(error) else type(error).__name__
        if kind == "memory":
            raise ModelCallError(f"the model ran out of memory with {len(questions)} texts; lower batch_size")
        if kind:
            raise ModelCallError(f"the model failed on public texts: {kind}")
        if not all(np.isfinite(answer).all() for answer in answers):
            raise ModelCallError("the model gave no numbers for a text; try another dtype or model")
        return answers

    def _score(self, method: Method, questions: Sequence[ScoringInput]) -> list[NDArray[np.float64]]:
        """Reads texts of one method's prompts in one forward."""
        prompted = self._prompted[method]
        if prompted.model.training:
            prompted.model.eval()
        taught = [self._taught[one.prompt] for one in questions]
        read = [one.reader.input(asked.text, asked.pair) for one, asked in zip(taught, questions, strict=True)]
        length = max(len(one.ids) for one in read)
        rows = stack_inputs(
            [one.ids for one in read],
            length=length,
            filler=taught[0].reader.filler,
            device=prompted.device,
            is_causal=prompted.is_causal,
            types=_types(read) if any(one.reader.has_types for one in taught) else None,
        )
        if self._kind == "masked_lm":
            rows.at = torch.tensor([one.at for one in read], device=prompted.device)
        prompts, mask = _side_by_side([one.numbers for one in taught])
        logits = prompted.forward(prompts, rows, prompt_mask=mask)[:, -1].float()
        return [_shares(row, one.words) for row, one in zip(logits, taught, strict=True)]


def _types(read: Sequence[ModelInput]) -> list[list[int]]:
    return [one.types for one in read]


def _side_by_side(prompts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns prompts padded behind to one length, as a head reads the first place, and their masks."""
    count = max(len(one) for one in prompts)
    padded = torch.stack([torch.nn.functional.pad(one, (0, 0, 0, count - len(one))) for one in prompts])
    lengths = torch.tensor([[len(one)] for one in prompts], device=padded.device)
    return padded, torch.arange(count, device=padded.device)[None] < lengths


def _shares(logits: torch.Tensor, words: torch.Tensor | None) -> NDArray[np.float64]:
    """Returns float64[labels]: probabilities among the labels; NaN where the model gives no numbers."""
    chosen = logits if words is None else logits[words]
    shares: NDArray[np.float64] = chosen.cpu().double().softmax(dim=0).numpy()
    return shares
