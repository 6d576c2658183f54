"""Computes losses, and each row's gradient of its own prompt, in micro-batches of one public shape."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from langchain_dpicl.backends.base import TrainingExample
from langchain_dpicl.backends.hf.batches import is_out_of_memory
from langchain_dpicl.backends.rows import guarded
from langchain_dpicl.backends.tuning.folding import Folding
from langchain_dpicl.backends.tuning.prompted import PromptedModel, Rows, stacked
from langchain_dpicl.backends.tuning.reading import Input, TaskReader
from langchain_dpicl.exceptions import ModelCallError

# Every row gets a copy of the prompt; one backward pass of the summed loss gives the gradient of every copy, which is
# the row's own. A row of a matrix product may change its bits with the other rows, so the shape is tested with public
# rows at its first use; where bits change, rows run one at a time.
Read = tuple[Input, list[int]]
_NONE = -100
"""Marks places without a target."""
_FEWEST_ROUNDS = 6
_LOOKED_AT = 64
"""Public rows that are compared before a size is trusted, and fewest rounds."""
_CHECKED = 3
"""Made-up rows of which at least one must have numbers for the model to count as working."""


class MicroBatches:
    """A model, a task, and how many rows run together.

    Args:
      prompted: the model.
      reader: the task.
      folding: how parameters become a prompt.
      wanted: rows that run together if they fit into memory and leave each other's bits alone.
    """

    def __init__(self, prompted: PromptedModel, reader: TaskReader, folding: Folding, *, wanted: int) -> None:
        self.prompted = prompted
        self.reader = reader
        self.folding = folding
        self.task = reader.task
        self._wanted = 1 if prompted.facts.mixes_rows else wanted
        self._size: int | None = None
        self._words = torch.tensor(reader.word_ids, dtype=torch.int64, device=prompted.device)
        self._targets = self.task.max_target_tokens if self.task.writes_text else 1
        self.length = self.task.max_input_tokens + self._targets - 1

    def size(self) -> int:
        """Returns how many rows run together; public, and tested once."""
        if self._size is None:
            self._size = self._tried(self._wanted)
        return self._size

    def shrink(self, size: int) -> None:
        """Remembers that `size` rows do not fit."""
        self.free()
        if size <= 1:
            raise ModelCallError(_NO_ROOM)
        self._size = self._tried((size + 1) // 2)

    def free(self) -> None:
        """Returns unused memory to the device."""
        gc.collect()
        if self.prompted.device.type == "cuda":
            torch.cuda.empty_cache()

    def read(self, example: TrainingExample) -> Read | None:
        """Returns an example as ids; None where it cannot be read."""
        return guarded(lambda: self._read(example))

    def vector(self, parameters: NDArray[np.float64]) -> torch.Tensor:
        """Returns float32[width] on the model's device."""
        return torch.from_numpy(np.array(parameters, dtype=np.float32)).to(self.prompted.device)

    def gradients(self, vector: torch.Tensor, reads: Sequence[Read | None]) -> NDArray[np.float32]:
        """Returns float32[rows, width]; a row that is None, or whose loss or gradient is not finite, is zeros."""
        gradients, fine = self._taken(vector, reads)
        with torch.no_grad():
            return np.asarray(torch.where(fine[:, None], gradients, 0.0).cpu().numpy(), dtype=np.float32)

    def check(self, vector: torch.Tensor) -> None:
        """Computes the gradients of made-up rows until one has numbers; raises ModelCallError if none has."""
        fault = ""
        try:
            tried = (self._taken(vector, [self._public_read(number)])[1] for number in range(1, 1 + _CHECKED))
            fault = "" if any(bool(fine) for fine in tried) else _NO_NUMBERS
        except Exception as error:  # noqa: BLE001  whatever a model raises
            fault = _NO_ROOM if is_out_of_memory(error) else f"the model failed on public rows: {type(error).__name__}"
        if fault:
            self.free()
            raise ModelCallError(fault)

    def losses(self, vector: torch.Tensor, reads: Sequence[Read | None]) -> NDArray[np.float64]:
        """Returns float64[rows]; NaN for a row that is None."""
        with torch.no_grad():
            copies = self.folding.fold(vector)[None].expand(len(reads), -1, -1)
            losses = self._losses(copies, reads).double().cpu().numpy()
        return np.where([read is not None for read in reads], losses, np.nan)

    def private(self, vector: torch.Tensor, reads: Sequence[Read | None]) -> NDArray[np.float32] | None:
        """Returns `gradients` of at most `size` rows, with empty rows in the other places; None if memory ran out.

        If a batch fails, each of its rows runs again in its own place beside empty ones, with the same bits.
        """
        size = self.size()
        filled = [*reads, *[None] * (size - len(reads))]
        outcome = guarded(lambda: self._unless_full(vector, filled))
        if outcome is not None:
            return outcome[: len(reads)] if isinstance(outcome, np.ndarray) else None
        self.free()
        rows = np.zeros((len(reads), self.folding.width), np.float32)
        for place in range(len(reads)):
            alone = [read if at == place else None for at, read in enumerate(filled)]
            one = guarded(lambda alone=alone: self._unless_full(vector, alone))  # type: ignore[misc]
            if isinstance(one, bool):
                return None
            if one is not None:
                rows[place] = one[place]
        return rows

    def _taken(self, vector: torch.Tensor, reads: Sequence[Read | None]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns gradients float32[rows, width], and bool[rows], which of them are finite."""
        with torch.no_grad():
            prompt = self.folding.fold(vector)
        copies = prompt[None].repeat(len(reads), 1, 1).requires_grad_()
        with torch.enable_grad():
            losses = self._losses(copies, reads)
            (of_copies,) = torch.autograd.grad(losses.sum(), copies)
        with torch.no_grad():
            gradients = self.folding.pull(vector, of_copies)
            return gradients, losses.isfinite() & gradients.isfinite().all(dim=1)

    def _unless_full(self, vector: torch.Tensor, reads: Sequence[Read | None]) -> NDArray[np.float32] | bool:
        """Returns gradients; False if memory ran out; raises every other error."""
        try:
            return self.gradients(vector, reads)
        except Exception as error:
            if is_out_of_memory(error):
                return False
            raise

    def _read(self, example: TrainingExample) -> Read:
        read = self.reader.read(example)
        if max([*read[0].ids, *(read[1] if self.task.writes_text else ())], default=0) >= self.prompted.facts.reads:
            raise ValueError("an id that the model does not know")
        return read

    def _losses(self, prompts: torch.Tensor, reads: Sequence[Read | None]) -> torch.Tensor:
        """Returns float32[rows]; rows that are None have no target, and so neither loss nor gradient."""
        rows, answers = self._stacked(reads)
        logits = self.prompted.forward(prompts, rows, keep=self._targets).float()
        if self.reader.word_ids:
            logits = logits[:, :, self._words]
        counted = (answers != _NONE).sum(dim=1).clamp_(min=1)
        each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), answers, ignore_index=_NONE, reduction="none")
        return each.sum(dim=1) / counted

    def _stacked(self, reads: Sequence[Read | None]) -> tuple[Rows, torch.Tensor]:
        """Returns rows at the public shape, and int64[rows, targets]."""
        causal, device = self.prompted.is_causal, self.prompted.device
        inputs = [read[0] if read else Input([], []) for read in reads]
        answers = [read[1] if read else [] for read in reads]
        rows = stacked(
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

    def _tried(self, size: int) -> int:
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
            return "memory" if is_out_of_memory(error) else type(error).__name__

    def _keeps_apart(self, size: int) -> bool:
        """Whether rows keep their bits whatever their neighbours are and wherever they stand.

        A head with few outputs changes only some rows by their place, and only in the last bit: so many public rows are
        compared, in places and with neighbours that change from round to round.
        """
        prompt = self.folding.solve(self._public_prompt(), _ramp).to(self.prompted.device, torch.float32)
        known: dict[int, bytes] = {}
        for order in _orders(size):
            rows = self.gradients(prompt, [self._public_read(number) if number else None for number in order])
            for number, row in zip(order, rows, strict=True):
                digest = hashlib.blake2b(row.tobytes()).digest()
                if known.setdefault(number, digest) != digest:
                    return False
        return True

    def _public_prompt(self) -> torch.Tensor:
        count = self.folding.num_virtual_tokens
        return self.prompted.written(self.prompted.public_ids(1, count)).cpu()

    def _public_read(self, number: int) -> Read:
        """Returns a public row of some length, and an answer."""
        length = 1 + (number * 37) % self.task.max_input_tokens
        ids = self.prompted.public_ids(2 + number, length)
        if self.task.writes_text:
            answer = self.prompted.public_ids(3 + number, 1 + (number * 5 + self._targets // 2) % self._targets)
        else:
            answer = [number % len(self.task.labels)]
        return Input(ids, [0] * length, length // 2), answer


@contextlib.contextmanager
def frozen(model: Any) -> Iterator[None]:
    """Excludes a model's weights from gradients in the block; their flags are restored, the weights never change.

    Gradients can be computed inside even if the caller has switched them off.
    """
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if model.training:
        model.eval()
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
    for turn in range(max(_FEWEST_ROUNDS, _LOOKED_AT // size)):
        begin, step = turn * (size // 2 + 1), 1 + turn // count
        yield [(begin + step * place) % count for place in range(size)]


def _ramp(*shape: int) -> torch.Tensor:
    """Returns fixed public numbers of about unit size."""
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return torch.sin(numbers * 12.9898 + 4.1414).view(shape)


_NO_ROOM = (
    "the model ran out of memory with a single row; lower max_input_tokens, or take a smaller model, dtype or prompt"
)
_NO_NUMBERS = (
    "the model has no finite loss and gradient for made-up public texts at the prompt as it stands; "
    "lower the learning rate, or take dtype float32"
)
