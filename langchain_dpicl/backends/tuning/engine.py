"""Computes gradients of prompts on a frozen local model."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.random import PCG64, Generator
from numpy.typing import NDArray

from langchain_dpicl.backends.base import RealRows, TrainingExample
from langchain_dpicl.backends.gradients import Groups, StartAgainError
from langchain_dpicl.backends.hf import loading, weights
from langchain_dpicl.backends.hf.batches import is_out_of_memory
from langchain_dpicl.backends.tuning.folding import Folding, NetworkFolding, PlainFolding
from langchain_dpicl.backends.tuning.heads import head_of
from langchain_dpicl.backends.tuning.micro import MicroBatches, Read, frozen
from langchain_dpicl.backends.tuning.probes import check_model
from langchain_dpicl.backends.tuning.prompted import METHODS, Method, PromptedModel
from langchain_dpicl.backends.tuning.reading import TaskReader
from langchain_dpicl.backends.tuning.tasks import PromptTask, check_count
from langchain_dpicl.exceptions import ConfigurationError, DPICLError, ModelCallError

__all__ = ["PromptEngine"]

Floats = NDArray[np.float64]

_PEFT_TASKS = {
    "causal_lm": "CAUSAL_LM",
    "masked_lm": "FEATURE_EXTRACTION",  # peft has no task of masks; this one gives the model's own answer
    "sequence_classification": "SEQ_CLS",
}


_AGAIN = "the model ran out of memory halfway; the engine runs fewer rows at a time from now on: call again"


class PromptEngine:
    """A frozen model, a task, and the prompt that is trained; implements `GradientBackend`.

    Formal guarantees:
      - A unit's row is the mean of its examples' gradients with respect to its own copy of the prompt, and a function,
        to the last bit, of the unit's examples, public arguments and the machine: rows run in micro-batches of a public
        shape, tried out with public rows; where rows move each other all the same, they run one by one.
      - An example that cannot be read, or whose loss or gradient is not finite, counts zero in that mean.
      - Weights, flags and buffers of the model are afterwards as they were; it is put into evaluation mode.

    Args:
      model: a model object, or the path of a local folder. An object keeps its weights, dtype and device.
      tokenizer: its tokenizer, or a path; None: from the model's folder.
      method: "soft_prompt": embeddings in front of the input; "prefix": keys and values in every layer.
      num_virtual_tokens: length of the prompt.
      task: what is learnt, public.
      reparameterize: width of the hidden layer of a network that writes the prompt and is trained in its place; None:
        the prompt itself is trained.
      micro_batch: examples that run together.
      device: "cpu", "cuda", ...; None: a folder is loaded to "cuda" if there is one, an object stays.
      dtype: "float32", "bfloat16" or "float16" for a folder; None: float32.
      name: public name for reports; None: the model's own.

    Raises:
      ConfigurationError: options out of range, a tokenizer of another model, words that are not one token each,
        lengths that do not fit into the model's context, or weights made in `torch.inference_mode()`.
      CapabilityError: the model cannot do this, found out with public ids.
      ModelCallError: memory ran out on a single public row.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        method: Method,
        num_virtual_tokens: int,
        task: PromptTask,
        reparameterize: int | None = None,
        micro_batch: int = 16,
        device: str | None = None,
        dtype: str | None = None,
        name: str | None = None,
    ) -> None:
        if method not in METHODS:
            raise ConfigurationError(f"method: expected one of {list(METHODS)}, found {method!r}")
        check_count("num_virtual_tokens", num_virtual_tokens)
        check_count("micro_batch", micro_batch)
        if reparameterize is not None:
            check_count("reparameterize", reparameterize)
        is_folder = isinstance(model, str | os.PathLike)
        dtype = dtype or ("float32" if is_folder else None)
        with torch.inference_mode(mode=False):  # tensors made in that mode can never be part of a gradient
            model, tokenizer = loading.load(model, tokenizer, device=device, dtype=dtype, kind=task.kind)
            _check_has_gradients(model)
            self.method: Method = method
            self.num_virtual_tokens = num_virtual_tokens
            self.task = task
            self.reader = TaskReader(tokenizer, task)
            self.prompted = PromptedModel(model, method=method, kind=task.kind)
            self._name = name or loading.public_name(model)
            self._lock = threading.RLock()
            self._check_fits()
            self._folding = self._made_folding(reparameterize)
            self._batches = MicroBatches(self.prompted, self.reader, self._folding, wanted=micro_batch)
            outputs = len(task.labels) if task.kind == "sequence_classification" else None
            check_model(self.prompted, num_virtual_tokens=num_virtual_tokens, num_outputs=outputs)

    def __copy__(self) -> PromptEngine:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> PromptEngine:
        return self

    def __reduce__(self) -> str:
        raise ConfigurationError(
            "expected no pickling of a PromptEngine, which holds a whole model; construct it in the other process"
        )

    def __repr__(self) -> str:
        return f"PromptEngine({self._name!r}, method={self.method!r}, num_virtual_tokens={self.num_virtual_tokens})"

    @property
    def name(self) -> str:
        """Public name of the model, for reports."""
        return self._name

    @property
    def width(self) -> int:
        """Parameters of the prompt, those of its reparameterisation included."""
        return self._folding.width

    @property
    def tokenizer_fingerprint(self) -> str:
        """Says which tokenizer this is; public."""
        return self.reader.tokens.fingerprint

    def check(self, parameters: Floats | None = None) -> int:
        """Tests the micro-batch with public rows and, at `parameters`, a made-up text's gradient; returns its size."""
        vector = None if parameters is None else self._vector(parameters)
        with self._lock, frozen(self.prompted.model):
            if vector is not None:
                self._batches.check(vector)
            return self._batches.size()

    def initial(self, text: str | None = None) -> Floats:
        """Returns public parameters float64[width] of the prompt that a text is; without text, of random tokens."""
        coins = Generator(PCG64())  # draws public numbers, which protect nobody
        with self._lock, torch.no_grad():
            prompt = self.prompted.written(self._text_ids(text) if text is not None else self._random_ids(coins)).cpu()
            solved = self._folding.solve(prompt, lambda *shape: torch.from_numpy(coins.standard_normal(shape)))
        return np.asarray(solved.float().double().numpy(), dtype=np.float64)

    def arrays(self, parameters: Floats) -> dict[str, NDArray[np.float32]]:
        """Returns the prompt as peft stores it, with a reparameterisation folded in.

        Returns:
          "prompt_embeddings": float32[virtual tokens, embedding], or [virtual tokens, 2 * layers * keys] of a prefix.
        """
        vector = self._vector(parameters)
        with self._lock, torch.no_grad():
            prompt = self._folding.fold(vector).cpu().numpy()
        return {"prompt_embeddings": np.array(prompt, dtype=np.float32)}

    def peft_config(self) -> dict[str, Any]:
        """Returns what an `adapter_config.json` says of such a prompt."""
        shape = self.prompted
        config: dict[str, Any] = {
            "base_model_name_or_path": self._name,
            "inference_mode": True,
            "num_attention_heads": shape.num_heads,
            "num_layers": shape.num_layers,
            "num_transformer_submodules": 1,
            "num_virtual_tokens": self.num_virtual_tokens,
            "revision": None,
            "task_type": _PEFT_TASKS[self.task.kind],
            "token_dim": shape.token_dim,
        }
        if self.method == "prefix":
            own = {"peft_type": "PREFIX_TUNING", "encoder_hidden_size": shape.token_dim, "prefix_projection": False}
        else:
            own = {"peft_type": "PROMPT_TUNING", "prompt_tuning_init": "RANDOM"}
        return config | own

    def head(self) -> dict[str, NDArray[np.float32]]:
        """Returns the frozen head of a classifier, which peft keeps beside the prompt; {} of other models."""
        return head_of(self.prompted.model) if self.task.kind == "sequence_classification" else {}

    def weights_digest(self) -> str:
        """Returns a hash of all weights and buffers of the model, byte for byte."""
        with self._lock:
            return weights.digest(self.prompted.model)

    def weights_fingerprint(self) -> str:
        """Says which weights these are, at a glance and in any precision; "" where it cannot be told."""
        with self._lock:
            return weights.fingerprint(self.prompted.model)

    def gradients(self, parameters: Floats, groups: Groups, *, add: Callable[[RealRows], None]) -> None:
        """Hands `add` the rows of PRIVATE groups; see `GradientBackend`.

        Raises:
          StartAgainError: memory ran out half-way: rows handed over so far are void, and the next call takes less.
          UnsilencableModelError: somebody else's hook would see the examples.
        """
        live = [group for group in groups if group]
        with self._lock, frozen(self.prompted.model):
            vector = self._vector(parameters)
            size = self._batches.size()
            means = _Means(live, self.width)
            for chunk in _chunks(live, size):
                self.prompted.hooks.check()
                reads = [self._batches.read(example) for example in chunk]
                rows = self._batches.private(vector, reads)
                if rows is None:
                    self._batches.shrink(size)
                    raise StartAgainError(_AGAIN)
                means.hand(rows, add)

    async def agradients(self, parameters: Floats, groups: Groups, *, add: Callable[[RealRows], None]) -> None:
        """Is `gradients`, in a worker thread."""
        await asyncio.to_thread(self.gradients, parameters, groups, add=add)

    def losses(self, parameters: Floats, examples: Sequence[TrainingExample]) -> Floats:
        """Returns float64[n]: the losses of PUBLIC examples; NaN where one cannot be read."""
        vector, parts, fault = self._vector(parameters), [np.zeros(0)], ""
        with self._lock, frozen(self.prompted.model):
            size = self._batches.size()
            try:
                for chunk in _chunks([examples], size):
                    reads: list[Read | None] = [self._batches.read(example) for example in chunk]
                    parts.append(self._batches.losses(vector, reads))
            except DPICLError:
                raise
            except Exception as error:  # noqa: BLE001  whatever a model raises
                fault = "memory" if is_out_of_memory(error) else type(error).__name__
        if fault:
            self._batches.free()
            raise ModelCallError(f"the model failed on a public example: {fault}. Check the model and call again.")
        return np.concatenate(parts)

    def _vector(self, parameters: Floats) -> torch.Tensor:
        if np.shape(parameters) != (self.width,):
            raise ConfigurationError(f"parameters: expected shape {(self.width,)}, found {np.shape(parameters)}")
        return self._batches.vector(parameters)

    def _made_folding(self, hidden: int | None) -> Folding:
        shape = self.prompted
        if hidden is None:
            return PlainFolding(self.num_virtual_tokens, shape.dim)
        return NetworkFolding(self.num_virtual_tokens, shape.dim, inner=shape.token_dim, hidden=hidden)

    def _check_fits(self) -> None:
        """Refuses lengths beyond the context, and a tokenizer whose ids the model does not know."""
        limit, task = self.prompted.limit, self.task
        length = self.num_virtual_tokens + task.max_input_tokens + (task.max_target_tokens if task.writes_text else 0)
        if limit is not None and length > limit:
            raise ConfigurationError(
                "expected num_virtual_tokens + max_input_tokens (+ max_target_tokens) <= "
                f"{limit}, the model's context, found {length}; lower one of them"
            )
        reads = self.prompted.facts.reads
        if max([self.reader.filler, *self.reader.word_ids, *self.reader.input("a", "a").ids]) >= reads:
            raise ConfigurationError(
                f"expected the model's own tokenizer, found one whose ids go beyond the {reads} that the model knows"
            )
        known = getattr(self.prompted.model.config, "type_vocab_size", None)
        if known is not None and self.reader.has_types and max(self.reader.input("a", "a").types, default=0) >= known:
            raise ConfigurationError(
                f"expected a tokenizer with at most {known} kinds of parts, as the model has, found one that tells the "
                "parts of a pair apart; take the model's own tokenizer"
            )

    def _text_ids(self, text: str) -> list[int]:
        ids = self.reader.tokens.encode(text)
        if not ids:
            raise ConfigurationError("init text: expected a text with at least one token, found none")
        return (ids * self.num_virtual_tokens)[: self.num_virtual_tokens]

    def _random_ids(self, coins: Generator) -> list[int]:
        tokens = self.reader.tokens
        ids = sorted(id_ for id_ in tokens.known - tokens.special if id_ < self.prompted.facts.reads)
        return [ids[place] for place in coins.integers(len(ids), size=self.num_virtual_tokens).tolist()]


class _Means:
    """Averages the gradients of examples to the rows of their units; shows nothing."""

    def __init__(self, groups: Sequence[Sequence[TrainingExample]], width: int) -> None:
        self._sizes = [len(group) for group in groups]
        self._place = 0
        self._seen = 0
        self._sum = np.zeros(width if any(size > 1 for size in self._sizes) else 0)

    def hand(self, rows: NDArray[np.float32], add: Callable[[RealRows], None]) -> None:
        """Adds the gradients of the next examples, and hands over the rows of complete units."""
        if not self._seen and all(size == 1 for size in self._sizes[self._place : self._place + len(rows)]):
            self._place += len(rows)
            add(rows)
            return
        for row in rows:
            size = self._sizes[self._place]
            self._sum += row
            self._seen += 1
            if self._seen == size:
                add((self._sum / size)[None])
                self._sum[:] = 0.0
                self._seen, self._place = 0, self._place + 1


def _chunks(groups: Sequence[Sequence[TrainingExample]], size: int) -> Iterator[list[TrainingExample]]:
    """Yields the examples of all groups, `size` at a time."""
    chunk: list[TrainingExample] = []
    for group in groups:
        for example in group:
            chunk.append(example)
            if len(chunk) == size:
                yield chunk
                chunk = []
    if chunk:
        yield chunk


def _check_has_gradients(model: Any) -> None:
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise ConfigurationError(
            f"expected a model whose weights were made outside torch.inference_mode(), found {type(model).__name__} "
            "with weights made in it, which have no gradients; load the model again outside of it"
        )
