"""Computes losses and gradients of prompts on a frozen local model, and scores labels behind released ones."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.random import PCG64, Generator
from numpy.typing import NDArray

from langchain_dpicl._opaque import Uncopyable, run_guarded
from langchain_dpicl.backends.base import RealRows, TrainingExample, check_whole
from langchain_dpicl.backends.hf import loading, model_checks
from langchain_dpicl.backends.hf.batches import is_out_of_memory, kind_of
from langchain_dpicl.backends.hf.vocabulary import Vocabulary, distance, tolerance
from langchain_dpicl.backends.rows.gradient_rows import Groups
from langchain_dpicl.backends.sync_async import run_engine
from langchain_dpicl.backends.tuning.prompted_model import (
    METHODS,
    PROBE,
    Arrays,
    Method,
    PromptedModel,
    PromptedRows,
    has_head,
    head_of,
    put_head,
    stack_inputs,
)
from langchain_dpicl.backends.tuning.tasks import ModelInput, PromptTask, TaskKind, TaskReader
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError, DPICLError, ModelCallError

# Every row gets a copy of the prompt; one backward pass of the summed loss gives the gradient of every copy, which is
# the row's own. A row of a matrix product may change its bits with the other rows, so the shape is tested with public
# rows at its first use; where bits change, rows run one at a time.
Read = tuple[ModelInput, list[int]]
_NONE = -100
"""Marks places without a target."""
_FEWEST_ROUNDS = 6
_NUM_TEST_ROWS = 64
"""Public rows that are compared before a size is trusted, and fewest rounds."""
_CHECKED = 3
"""Made-up rows, at least, of which one must have numbers for the model to count as working."""


class MicroBatches:
    """A model, a task, and how many rows run together."""

    def __init__(self, prompted: PromptedModel, reader: TaskReader, *, num_virtual_tokens: int, wanted: int) -> None:
        self.prompted = prompted
        self.reader = reader
        self.shape = num_virtual_tokens, prompted.dim
        self.task = reader.task
        self._wanted = 1 if prompted.facts.mixes_rows else wanted
        self._size: int | None = None
        self._words = torch.tensor(reader.word_ids, dtype=torch.int64, device=prompted.device)
        self._targets = self.task.max_target_tokens if self.task.writes_text else 1
        self.length = self.task.max_input_tokens + self._targets - 1

    def size(self) -> int:
        """Returns how many rows run together; public, and tested once."""
        if self._size is None:
            self._size = self._attempt(self._wanted)
        return self._size

    def shrink(self, size: int) -> None:
        """Remembers that `size` rows do not fit."""
        self.free()
        if size <= 1:
            raise ModelCallError(_NO_ROOM)
        self._size = self._attempt((size + 1) // 2)

    def free(self) -> None:
        """Returns unused memory to the device."""
        gc.collect()
        if self.prompted.device.type == "cuda":
            torch.cuda.empty_cache()

    def read(self, example: TrainingExample) -> Read | None:
        """Returns an example as ids; None where it cannot be read."""
        return run_guarded(lambda: self._read(example))

    def vector(self, parameters: NDArray[np.float64]) -> torch.Tensor:
        """Returns float32[width] on the model's device."""
        return torch.from_numpy(np.array(parameters, dtype=np.float32)).to(self.prompted.device)

    def gradients(self, vector: torch.Tensor, reads: Sequence[Read | None]) -> NDArray[np.float32]:
        """Returns float32[rows, width]; a row that is None, or whose loss or gradient is not finite, is zeros."""
        gradients, fine = self._taken(vector, reads)
        with torch.no_grad():
            return np.asarray(torch.where(fine[:, None], gradients, 0.0).cpu().numpy(), dtype=np.float32)

    def check(self, vector: torch.Tensor) -> None:
        """Computes the gradients of made-up rows until one has numbers; raises ModelCallError if none has.

        As many run together as private ones, in every step, so that memory that gets less is noticed with public rows.
        """
        fault, size = "", self.size()
        try:
            fault = "" if self._has_numbers(vector, size) else _NO_NUMBERS
        except Exception as error:  # noqa: BLE001  whatever a model raises
            fault = _NO_ROOM if is_out_of_memory(error) else f"the model failed on public rows: {type(error).__name__}"
        if fault == _NO_ROOM and size > 1:
            self.shrink(size)
            self.check(vector)
        elif fault:
            self.free()
            raise ModelCallError(fault)

    def _has_numbers(self, vector: torch.Tensor, size: int) -> bool:
        firsts = range(1, 1 + _CHECKED, size)
        batches = ([self._public_read(first + place) for place in range(size)] for first in firsts)
        return any(bool(self._taken(vector, batch)[1].any()) for batch in batches)

    def losses(self, vector: torch.Tensor, reads: Sequence[Read | None]) -> NDArray[np.float64]:
        """Returns float64[rows]; NaN for a row that is None."""
        with torch.no_grad():
            copies = vector.view(self.shape)[None].expand(len(reads), -1, -1)
            losses = self._losses(copies, reads).double().cpu().numpy()
        return np.where([read is not None for read in reads], losses, np.nan)

    def private(self, vector: torch.Tensor, reads: Sequence[Read | None]) -> NDArray[np.float32]:
        """Returns `gradients` of at most `size` rows, with empty rows in the other places.

        If a batch fails, or does not fit into memory, each of its rows runs again in its own place beside empty ones,
        with the same bits. A size that got too large is noticed by `check`: how many batches there are is private, and
        one batch more may not change the size, and so the bits, of the others.
        """
        size = self.size()
        filled = [*reads, *[None] * (size - len(reads))]
        outcome = run_guarded(lambda: self.gradients(vector, filled))
        if outcome is not None:
            return outcome[: len(reads)]
        self.free()
        rows = np.zeros((len(reads), len(vector)), np.float32)
        for place in range(len(reads)):
            alone = [read if at == place else None for at, read in enumerate(filled)]
            one = run_guarded(lambda alone=alone: self.gradients(vector, alone))  # type: ignore[misc]
            if one is not None:
                rows[place] = one[place]
        return rows

    def _taken(self, vector: torch.Tensor, reads: Sequence[Read | None]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns gradients float32[rows, width], and bool[rows], which of them are finite."""
        copies = vector.view(self.shape)[None].repeat(len(reads), 1, 1).requires_grad_()
        with torch.enable_grad():
            losses = self._losses(copies, reads)
            (of_copies,) = torch.autograd.grad(losses.sum(), copies)
        with torch.no_grad():
            gradients = of_copies.flatten(1)
            return gradients, losses.isfinite() & gradients.isfinite().all(dim=1)

    def _read(self, example: TrainingExample) -> Read:
        read = self.reader.read(example)
        if max([*read[0].ids, *(read[1] if self.task.writes_text else ())], default=0) >= self.prompted.facts.reads:
            raise ValueError("an id that the model does not know")
        return read

    def _losses(self, prompts: torch.Tensor, reads: Sequence[Read | None]) -> torch.Tensor:
        """Returns float32[rows]; rows that are None have no target, and so neither loss nor gradient."""
        rows, answers = self._stack(reads)
        logits = self.prompted.forward(prompts, rows, keep=self._targets).float()
        if self.reader.word_ids:
            logits = logits[:, :, self._words]
        counted = (answers != _NONE).sum(dim=1).clamp_(min=1)
        each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), answers, ignore_index=_NONE, reduction="none")
        return each.sum(dim=1) / counted

    def _stack(self, reads: Sequence[Read | None]) -> tuple[PromptedRows, torch.Tensor]:
        """Returns rows at the public shape, and int64[rows, targets]."""
        causal, device = self.prompted.is_causal, self.prompted.device
        inputs = [read[0] if read else ModelInput([], []) for read in reads]
        answers = [read[1] if read else [] for read in reads]
        rows = stack_inputs(
            [one.ids for one in inputs],
            length=self.task.max_input_tokens,
            filler=self.reader.filler,
            device=device,
            is_causal=causal,
            types=[one.types for one in inputs] if self.reader.has_types else None,
        )
        rows.at = None if causal else torch.tensor([one.at for one in inputs], device=device)
        targets = torch.full((len(reads), self._targets), _NONE, dtype=torch.int64)
        for row, answer in enumerate(answers):
            targets[row, : len(answer)] = torch.tensor(answer, dtype=torch.int64)
        targets = targets.to(device)
        if self._targets > 1:
            shown = targets[:, :-1]
            rows.ids = torch.cat([rows.ids, shown.clamp(min=0)], dim=1)
            rows.mask = torch.cat([rows.mask, shown != _NONE], dim=1)
        return rows, targets

    def _attempt(self, size: int) -> int:
        """Returns the largest size up to `size`, halved where memory runs out, whose rows keep their bits."""
        while True:
            verdict = self._verdict(size)
            if verdict == "":
                return size
            if verdict in {"moves", "memory"} and size > 1:
                self.free()
                size = (size + 1) // 2
            else:
                raise ModelCallError(_NO_ROOM if verdict == "memory" else f"the model failed on public rows: {verdict}")

    def _verdict(self, size: int) -> str:
        """Tests a size with public rows; returns "" if it works."""
        try:
            return "" if self._keeps_apart(size) or size == 1 else "moves"
        except Exception as error:  # noqa: BLE001  whatever a model raises
            return kind_of(error)

    def _keeps_apart(self, size: int) -> bool:
        """Whether rows keep their bits whatever their neighbours are and wherever they stand.

        A head with few outputs changes only some rows by their place, and only in the last bit: so many public rows are
        compared, in places and with neighbours that change from round to round.
        """
        prompt = self.prompted.written(self.prompted.public_ids(1, self.shape[0])).flatten()
        known: dict[int, bytes] = {}
        for order in _orders(size):
            rows = self.gradients(prompt, [self._public_read(number) if number else None for number in order])
            for number, row in zip(order, rows, strict=True):
                digest = hashlib.blake2b(row.tobytes()).digest()
                if known.setdefault(number, digest) != digest:
                    return False
        return True

    def _public_read(self, number: int) -> Read:
        """Returns a public row of some length, and an answer."""
        length = 1 + (number * 37) % self.task.max_input_tokens
        ids = self.prompted.public_ids(2 + number, length)
        if self.task.writes_text:
            answer = self.prompted.public_ids(3 + number, 1 + (number * 5 + self._targets // 2) % self._targets)
        else:
            answer = [number % len(self.task.labels)]
        return ModelInput(ids, [0] * length, length // 2), answer


@contextlib.contextmanager
def frozen(model: Any) -> Iterator[None]:
    """Excludes a model's weights from gradients in the block; their flags are restored, the weights never change.

    Gradients can be computed inside even if the caller has switched them off.
    """
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model_checks.end_training_mode(model)
    for parameter in learning:
        parameter.requires_grad_(False)
    try:
        with torch.inference_mode(mode=False):
            yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)


def _orders(size: int) -> Iterator[list[int]]:
    """Yields the order of the public rows in each round: twice as many rows as places, in changing orders."""
    if size == 1:
        yield [1]
        return
    count = next(number for number in itertools.count(2 * size) if all(number % low for low in range(2, number)))
    for turn in range(max(_FEWEST_ROUNDS, _NUM_TEST_ROWS // size)):
        begin, step = turn * (size // 2 + 1), 1 + turn // count
        yield [(begin + step * place) % count for place in range(size)]


_NO_ROOM = (
    "the model ran out of memory with a single row; lower max_input_tokens, or take a smaller model, dtype or prompt"
)
_NO_NUMBERS = (
    "the model has no finite loss and gradient for made-up public texts at the prompt as it stands; "
    "lower the learning rate, or take dtype float32"
)


_PADDING = 5
_OTHER_MODELS = 'an encoder such as BERT or RoBERTa, or a causal model as "causal_lm" with label words'


def check_model(prompted: PromptedModel, *, num_virtual_tokens: int, num_outputs: int | None) -> None:
    """Tests a model with public ids; without `num_outputs` it answers with tokens.

    Raises:
      CapabilityError: it fails, answers in another form or without numbers, ignores a prompt, or reads it in a way of
        its own.
      ModelCallError: memory ran out.
    """
    model_checks.end_training_mode(prompted.model)
    if fault := prompted.attempt(lambda: _fault(prompted, num_virtual_tokens, num_outputs)):
        kind = type(prompted.model).__name__
        raise CapabilityError(
            f"expected a model that takes a {prompted.method} as {prompted.kind}, found {kind}, {fault}"
        )


def _fault(prompted: PromptedModel, count: int, num_outputs: int | None) -> str:
    """Returns what is wrong; "" if nothing is."""
    ids = prompted.public_ids(0, PROBE)
    first, second = (prompted.public_ids(number, count) for number in (1, 2))
    bare = _rows(prompted, ids, PROBE)
    logits = prompted.forward(prompted.written(first)[None], bare)
    if logits.ndim != 3 or logits.shape[1] != 1 or (num_outputs is not None and logits.shape[2] != num_outputs):
        form = f"{logits.shape[-1]} outputs" if logits.ndim == 3 else "an answer of another form"
        return f"with {form}; take a model of that kind, and labels in the order of its head"
    if not bool(logits.isfinite().all()):
        return "whose logits are no numbers: weights are missing or NaN, or the dtype is too narrow; load it again"
    close = tolerance(prompted.model.dtype)
    padded = [
        prompted.forward(prompted.written(first)[None], _rows(prompted, ids, PROBE + _PADDING, filler=filler))
        for filler in ids[: 1 if prompted.is_causal else 3]
    ]
    # The head of a decoder answers at the last place, in the padding; in half precision `close` would let that pass.
    if not (distance(logits, padded[0]) <= close and all(torch.equal(padded[0], other) for other in padded[1:])):
        model = "another model" if prompted.is_causal else _OTHER_MODELS
        return f"which answers otherwise when a row is padded; take {model}{_attention_advice(prompted)}"
    if torch.equal(logits, prompted.forward(prompted.written(second)[None], bare)):
        return f"which ignores it; {_other(prompted)}"
    plain = _plain(prompted, [*first, *ids])
    if plain is not None and not distance(logits, plain) <= close:
        return f"which reads it otherwise than the same tokens as text; take another model, or {_other(prompted)}"
    return ""


def _attention_advice(prompted: PromptedModel) -> str:
    """Advises sdpa where it may help: "eager" reads the padding mask as well, and the head of a decoder is at fault."""
    model = prompted.model
    is_fine = getattr(model.config, "_attn_implementation", None) in {None, "eager", "sdpa"}
    has_head = not prompted.is_causal and any(getattr(module, "is_causal", False) for module in model.modules())
    can_help = getattr(model, "_supports_sdpa", False) and not (is_fine or has_head)
    return ", or attn_implementation='sdpa'" if can_help else ""


def _other(prompted: PromptedModel) -> str:
    return f"pass method={'prefix' if prompted.method == 'soft_prompt' else 'soft_prompt'!r}"


def _rows(prompted: PromptedModel, ids: list[int], length: int, *, filler: int = 0) -> PromptedRows:
    rows = stack_inputs([ids], length=length, filler=filler, device=prompted.device, is_causal=prompted.is_causal)
    rows.at = torch.tensor([PROBE // 2], device=prompted.device)
    return rows


def _plain(prompted: PromptedModel, ids: list[int]) -> torch.Tensor | None:
    """Returns the model's own answer to the same tokens as text; None where a prompt means something else."""
    if prompted.method == "prefix" and not prompted.is_causal:
        return None  # a text's keys and values would also see what stands behind it
    answer: Any = prompted.model(input_ids=torch.tensor([ids], device=prompted.device), return_dict=True)
    logits: torch.Tensor = answer.logits
    if prompted.kind == "sequence_classification":
        return logits[:, None]
    return logits[:, -1:] if prompted.is_causal else logits[:, len(ids) - PROBE + PROBE // 2][:, None]


Floats = NDArray[np.float64]

_PEFT_TASKS = {
    "causal_lm": "CAUSAL_LM",
    "masked_lm": "FEATURE_EXTRACTION",  # peft has no task of masks; this one gives the model's own answer
    "sequence_classification": "SEQ_CLS",
}


class PromptEngine(Uncopyable):
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

    _pickle_advice = "it holds a whole model. Construct it in the other process"

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        method: Method,
        num_virtual_tokens: int,
        task: PromptTask,
        micro_batch: int = 16,
        device: str | None = None,
        dtype: str | None = None,
        name: str | None = None,
    ) -> None:
        if method not in METHODS:
            raise ConfigurationError(f"method: expected one of {list(METHODS)}, found {method!r}")
        check_whole("num_virtual_tokens", num_virtual_tokens)
        check_whole("micro_batch", micro_batch)
        is_folder = isinstance(model, str | os.PathLike)
        dtype = dtype or ("float32" if is_folder else None)
        with torch.inference_mode(mode=False):  # tensors made in that mode can never be part of a gradient
            model, tokenizer, self.random_weights = loading.load(
                model, tokenizer, device=device, dtype=dtype, kind=task.kind
            )
            _check_weights(model)
            self.method: Method = method
            self.num_virtual_tokens = num_virtual_tokens
            self.task = task
            self.reader = TaskReader(tokenizer, task)
            self.prompted = PromptedModel(model, method=method, kind=task.kind)
            self._name = name or loading.public_name(model)
            self._lock = threading.RLock()
            self._check_fits()
            self._batches = MicroBatches(
                self.prompted, self.reader, num_virtual_tokens=num_virtual_tokens, wanted=micro_batch
            )
            outputs = len(task.labels) if task.kind == "sequence_classification" else None
            check_model(self.prompted, num_virtual_tokens=num_virtual_tokens, num_outputs=outputs)

    def __repr__(self) -> str:
        return f"PromptEngine({self._name!r}, method={self.method!r}, num_virtual_tokens={self.num_virtual_tokens})"

    @property
    def name(self) -> str:
        """Public name of the model, for reports."""
        return self._name

    @property
    def width(self) -> int:
        """Parameters of the prompt."""
        return math.prod(self._batches.shape)

    @property
    def tokenizer_fingerprint(self) -> str:
        """Says which tokenizer this is; public."""
        return self.reader.tokens.fingerprint

    def check_writes(self) -> None:
        """Refuses, for a task that writes texts, what `HuggingFaceBackend`, which serves it, refuses in a tokenizer."""
        if self.task.writes_text:
            Vocabulary(self.reader.tokens, self.prompted.facts, ends=None)

    def check(self, parameters: Floats | None = None) -> int:
        """Tests the micro-batch with public rows and, at `parameters`, a made-up text's gradient; returns its size.

        Raises:
          UnsilencableModelError: somebody else's hook would see examples: found here whether a step has any or none.
        """
        vector = None if parameters is None else self._vector(parameters)
        with self._lock, frozen(self.prompted.model):
            self.prompted.hooks.check()
            if vector is not None:
                self._batches.check(vector)
            return self._batches.size()

    def initial(self, text: str | None = None) -> Floats:
        """Returns public parameters float64[width] of the prompt that a text is; without text, of random tokens."""
        coins = Generator(PCG64())  # draws public numbers, which protect nobody
        with self._lock, torch.no_grad():
            prompt = self.prompted.written(self._text_ids(text) if text is not None else self._random_ids(coins))
        return np.asarray(prompt.flatten().double().cpu().numpy(), dtype=np.float64)

    def arrays(self, parameters: Floats) -> dict[str, NDArray[np.float32]]:
        """Returns the prompt as peft stores it.

        Returns:
          "prompt_embeddings": float32[virtual tokens, embedding], or [virtual tokens, 2 * layers * keys] of a prefix.
        """
        prompt = self._vector(parameters).view(self._batches.shape)
        return {"prompt_embeddings": np.array(prompt.cpu().numpy(), dtype=np.float32)}

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
            return model_checks.digest(self.prompted.model)

    def weights_fingerprint(self) -> str:
        """Says which weights these are, at a glance and in any precision; "" where that is unknown."""
        with self._lock:
            return model_checks.fingerprint(self.prompted.model)

    def gradients(self, parameters: Floats, groups: Groups, *, add: Callable[[RealRows], None]) -> None:
        """Hands `add` the rows of PRIVATE groups; see `GradientBackend`.

        Raises:
          UnsilencableModelError: somebody else's hook would see the examples.
        """
        live = [group for group in groups if group]
        with self._lock, frozen(self.prompted.model):
            vector = self._vector(parameters)
            self.prompted.hooks.check()  # also where no group is live: how many there are decides no error
            size = self._batches.size()
            means = _Means(live, self.width)
            for chunk in _chunks(live, size):
                self.prompted.hooks.check()
                reads = [self._batches.read(example) for example in chunk]
                means.hand(self._batches.private(vector, reads), add)

    async def agradients(self, parameters: Floats, groups: Groups, *, add: Callable[[RealRows], None]) -> None:
        """Is `gradients`, in a worker thread."""
        await run_engine(lambda: self.gradients(parameters, groups, add=add))

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
                fault = kind_of(error)
        if fault:
            self._batches.free()
            raise ModelCallError(f"the model failed on a public example: {fault}. Check the model and call again.")
        return np.concatenate(parts)

    def _vector(self, parameters: Floats) -> torch.Tensor:
        if np.shape(parameters) != (self.width,):
            raise ConfigurationError(f"parameters: expected shape {(self.width,)}, found {np.shape(parameters)}")
        return self._batches.vector(parameters)

    def _check_fits(self) -> None:
        """Refuses lengths beyond the context, special tokens in the template, and ids that the model does not know."""
        limit, task = self.prompted.limit, self.task
        length = self.num_virtual_tokens + task.max_input_tokens + (task.max_target_tokens if task.writes_text else 0)
        if limit is not None and length > limit:
            named = "sliding window" if limit == self.prompted.facts.window else "context"
            raise ConfigurationError(
                "expected num_virtual_tokens + max_input_tokens (+ max_target_tokens) <= "
                f"{limit}, the model's {named}, found {length}; lower one of them"
            )
        if special := self.reader.tokens.special_in(task.template):
            raise ConfigurationError(
                f"template: expected no special tokens, found {special}, which would be read letter by letter, as in a "
                "text; describe the input in words"
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
    examples = itertools.chain.from_iterable(groups)
    while chunk := list(itertools.islice(examples, size)):
        yield chunk


def _check_weights(model: Any) -> None:
    """Refuses weights of which no gradient can be taken, or no digest."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ConfigurationError(
            f"expected a model with its weights in memory, found {type(model).__name__} with some offloaded; load it "
            "without offloading"
        )
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise ConfigurationError(
            f"expected a model whose weights were made outside torch.inference_mode(), found {type(model).__name__} "
            "with weights made in it, which have no gradients; load the model again outside of it"
        )


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

    A model of its own (`is_own`), which nobody shares, may be given the head that a prompt was trained with.
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
            return model_checks.fingerprint(self.model)

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
        """Returns float64[labels] per text: the probability of each label.

        A batch runs behind prompts of one method and length: padding between a prompt and its text would move the
        answers of models that see how far apart two tokens are.
        """
        rows: list[NDArray[np.float64]] = [np.zeros(0)] * len(questions)
        alike: dict[tuple[Method, int], list[int]] = {}
        for place, one in enumerate(questions):
            taught = self._taught[one.prompt]
            alike.setdefault((taught.method, len(taught.numbers)), []).append(place)
        for places in alike.values():
            for start in range(0, len(places), self._batch_size):
                block = places[start : start + self._batch_size]
                answers = self._attempt([questions[place] for place in block])
                for place, answer in zip(block, answers, strict=True):
                    rows[place] = answer
        return rows

    def _attempt(self, questions: Sequence[ScoringInput]) -> list[NDArray[np.float64]]:
        kind = ""
        try:
            with self._lock, torch.inference_mode():
                answers = self._score(questions)
        except Exception as error:  # noqa: BLE001  whatever a model raises
            kind = kind_of(error)
        if kind == "memory":
            raise ModelCallError(f"the model ran out of memory with {len(questions)} texts; lower batch_size")
        if kind:
            raise ModelCallError(f"the model failed on public texts: {kind}")
        if not all(np.isfinite(answer).all() for answer in answers):
            raise ModelCallError("the model gave no numbers for a text; try another dtype or model")
        return answers

    def _score(self, questions: Sequence[ScoringInput]) -> list[NDArray[np.float64]]:
        """Reads texts behind prompts of one method and length in one forward."""
        taught = [self._taught[one.prompt] for one in questions]
        prompted = self._prompted[taught[0].method]
        model_checks.end_training_mode(prompted.model)
        read = [one.reader.input(asked.text, asked.pair) for one, asked in zip(taught, questions, strict=True)]
        length = max(len(one.ids) for one in read)
        rows = stack_inputs(
            [one.ids for one in read],
            length=length,
            filler=taught[0].reader.filler,
            device=prompted.device,
            is_causal=prompted.is_causal,
            types=[one.types for one in read] if any(one.reader.has_types for one in taught) else None,
        )
        if self._kind == "masked_lm":
            rows.at = torch.tensor([one.at for one in read], device=prompted.device)
        logits = prompted.forward(torch.stack([one.numbers for one in taught]), rows)[:, -1].float()
        return [_shares(row, one.words) for row, one in zip(logits, taught, strict=True)]


def _shares(logits: torch.Tensor, words: torch.Tensor | None) -> NDArray[np.float64]:
    """Returns float64[labels]: probabilities among the labels; NaN where the model gives no numbers."""
    chosen = logits if words is None else logits[words]
    shares: NDArray[np.float64] = chosen.cpu().double().softmax(dim=0).numpy()
    return shares
