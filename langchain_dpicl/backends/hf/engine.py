"""Runs a local model at public shapes, and tests with public text which shapes keep rows apart."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar
from weakref import WeakSet

import numpy as np
import torch

from langchain_dpicl.backends.hf import cache as caches
from langchain_dpicl.backends.hf.batches import (
    BatchShape,
    GrowingBatch,
    LeftBatch,
    ModelBody,
    RightBatch,
    is_out_of_memory,
)
from langchain_dpicl.backends.hf.heads import Kind, LazyLogits, keeps_apart
from langchain_dpicl.backends.hf.vocabulary import LogitReader, Vocabulary, distance, probabilities, tolerance
from langchain_dpicl.exceptions import CapabilityError, DPICLError, ModelCallError

# A row of a matrix product may change its bits with the other rows, or with its place. So each shape is tested at its
# first use: one public prompt in all places, beside neighbours of every length. If a bit changes, rows run one at a
# time.
T = TypeVar("T")

BLOCK = 16
"""Known tokens are read in blocks of this many, the rest one by one, as they would be generated."""


ROWS_AT_ONCE = {"cpu": 64, "cuda": 256}
"""Rows of several texts that share a batch, by device: beyond, a step gets longer as its rows get more."""


class ReleasableMemory(Protocol):
    """Holds a secret amount of memory that it can release."""

    def spare(self) -> bool:
        """Releases it; False if there is nothing to release."""


_PROBE = 12


class Engine:
    """A model, its candidate tokens, and what tests have shown about it.

    Args:
      body: the model.
      vocabulary: its candidates.
      row_batch: rows that run together where their number is secret.
      limit: tokens that it can read and write together; None: no limit.

    Attributes:
      rows_at_once: rows of several texts that share a batch; 1 once such a batch did not fit into memory. Public.
    """

    def __init__(self, body: ModelBody, vocabulary: Vocabulary, *, row_batch: int, limit: int | None) -> None:
        self.body = body
        self.vocabulary = vocabulary
        self.row_batch = row_batch
        self.limit = limit
        self.rows_at_once = ROWS_AT_ONCE.get(body.device.type, 1)
        self.reader = LogitReader(vocabulary)
        self.lock = threading.RLock()
        self.holders: WeakSet[ReleasableMemory] = WeakSet()
        self._layout: type[LeftBatch | RightBatch] | None = None
        self._shares = False
        self._sizes: dict[tuple[Kind, int, int, int], int] = {}

    def batch(self, shape: BatchShape) -> GrowingBatch:
        """Returns a new batch."""
        return (RightBatch if shape.is_fast else LeftBatch)(self.body, shape)

    def settle(self, states: torch.Tensor) -> torch.Tensor:
        """Returns float32[rows, width]: the candidates' logits from a batch's states; see `LogitReader.settle`."""
        return self.reader.settle(self.body.head.logits(states))

    def lazy_logits(self, states: torch.Tensor, kind: Kind, publics: Sequence[int] = ()) -> LazyLogits:
        """Returns a batch's states for lazy reading; `publics`: the places of public rows."""
        return LazyLogits(states, self.body.head, self.reader, kind=kind, publics=publics)

    @property
    def layout(self) -> type[LeftBatch | RightBatch]:
        """The padding layout: the fast one if the model supports it."""
        if self._layout is None:
            with self.lock, torch.inference_mode():
                failure = self._failure_of(self._choose_layout)
            self.body.forget()
            if failure:
                raise ModelCallError(failure)
        return self._layout or LeftBatch

    @staticmethod
    def _failure_of(action: Callable[[], None]) -> str:
        """Returns how a public action failed; "" if it did not."""
        try:
            action()
        except DPICLError:
            raise
        except Exception as error:  # noqa: BLE001  whatever a model raises
            return no_room(1) if is_out_of_memory(error) else f"the model failed on public text: {type(error).__name__}"
        return ""

    def shape(self, length: int, room: int, shared: tuple[int, ...] = (), *, reach: int | None = None) -> BatchShape:
        """Returns the shape of one row: fast if `length` and what may come (`reach`, or `room`) fit into the window."""
        window = self.body.facts.window
        is_seen = window is None or length + (room if reach is None else reach) <= window
        is_fast = self.layout is RightBatch and is_seen  # in this order: any layout is learnt before the first row
        return BatchShape(1, length, room, shared if is_fast and self._shares else (), is_fast=is_fast)

    def limit_at(self, shape: BatchShape) -> int | None:
        """Returns the most tokens of a row of a shape."""
        window = self.body.facts.window if shape.is_fast else None
        return min([limit for limit in (self.limit, window) if limit is not None], default=None)

    def left_after(self, length: int) -> int:
        """Returns how many tokens may be written after `length`."""
        return sys.maxsize if self.limit is None else self.limit - length

    def _choose_layout(self) -> None:
        is_plain = caches.is_plain(self.body.config) and self.body.takes_positions
        if is_plain and self._pads_right():
            layout: type[LeftBatch | RightBatch] = RightBatch
            self._shares = self._pads(RightBatch, shared=5)
        elif self._pads(LeftBatch, shared=0):
            layout = LeftBatch
        elif not bool(self.reader.settle(self._unpadded(self._probe(0, _PROBE))).amax().isfinite()):
            raise CapabilityError(
                f"expected a model that gives numbers, found {type(self.body.model).__name__}, whose logits are not: "
                "weights are missing or NaN, or the dtype is too narrow; load it again, or in another dtype"
            )
        else:
            raise CapabilityError(
                f"expected a model that answers alike with and without padding, found "
                f"{type(self.body.model).__name__}, which does not: its rows cannot be brought to one public length"
            )
        self._part_head()
        self._layout = layout

    def _pads_right(self) -> bool:
        """Whether the fast layout works, if need be without stopping forwards early."""
        if self._pads(RightBatch, shared=0):
            return True
        stopped, self.body.stops = self.body.stops, False
        return stopped and self._pads(RightBatch, shared=0)

    def _part_head(self) -> None:
        """Separates the output layer where that is possible."""
        try:
            self.body.head.part(torch.tensor([self._probe(0, 2 * _PROBE)], device=self.body.device))
        except Exception as error:
            if is_out_of_memory(error):
                raise

    def _pads(self, layout: type[LeftBatch | RightBatch], *, shared: int) -> bool:
        """Whether a public prompt gets the same answers as without padding, token by token and in one block."""
        ids, tail = self._probe(0, _PROBE), self._probe(1, 3)
        close, settle = tolerance(self.body.model.dtype), self.reader.settle
        try:
            batch = layout(
                self.body, BatchShape(1, len(ids) + 7, len(tail), tuple(ids[:shared]), is_fast=layout is RightBatch)
            )
            padded = [batch.start([ids[shared:]])]
            mark = batch.mark()
            padded += [batch.step(torch.tensor([token], device=self.body.device)) for token in tail]
            batch.rewind(mark)
            padded.append(batch.many(torch.tensor([tail], device=self.body.device))[:, -1])
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return False
        unpadded = [self._unpadded([*ids, *tail[:count]]) for count in range(len(tail) + 1)]
        pairs = zip(padded, [*unpadded, unpadded[-1]], strict=True)
        return all(distance(settle(left), settle(right)) <= close for left, right in pairs)

    def _unpadded(self, ids: list[int]) -> torch.Tensor:
        answer = self.body.model(input_ids=torch.tensor([ids], device=self.body.device), use_cache=False)
        logits: torch.Tensor = answer.logits
        return logits[:, -1]

    def _probe(self, number: int, length: int) -> list[int]:
        """Returns public ids from all over the vocabulary."""
        keys = self.vocabulary.candidates
        places = (np.arange(length, dtype=np.int64) * 7919 + 104729 * number + 13) % len(keys)
        return [int(id_) for id_ in keys[places]]

    def size_for(self, kind: Kind, wanted: int, shape: BatchShape) -> int:
        """Returns how many rows run together at a shape: at most `wanted`, public, and tested once."""
        key = (kind, wanted, shape.length, len(shape.shared))
        if key not in self._sizes:
            with self.lock, torch.inference_mode():
                self._sizes[key] = self._attempt(kind, 1 if self.body.facts.mixes_rows else wanted, shape)
        return self._sizes[key]

    def shrink(self, kind: Kind, wanted: int, shape: BatchShape, *, size: int) -> None:
        """Remembers that `size` rows do not fit."""
        self.free()
        if size <= 1:
            raise ModelCallError(no_room(1))
        key = (kind, wanted, shape.length, len(shape.shared))
        with self.lock, torch.inference_mode():
            self._sizes[key] = self._attempt(kind, (size + 1) // 2, shape)

    def free(self) -> None:
        """Returns unused memory to the device."""
        self.body.forget()
        gc.collect()
        if self.body.device.type == "cuda":
            torch.cuda.empty_cache()

    def spare(self) -> bool:
        """Frees memory that is held in secret amounts; False if there was none.

        Called before a decision about exhausted memory, so that no decision depends on those amounts.
        """
        spared = [holder.spare() for holder in list(self.holders)]
        if any(spared):
            self.free()
        return any(spared)

    def public(self, action: Callable[[], T], *, again: Callable[[], T] | None = None) -> T:
        """Runs a public action; if memory ran out and other sessions can free some, runs `again` (None: `action`)."""
        kind = ""
        try:
            with self.lock, torch.inference_mode():
                return action()
        except DPICLError:
            raise
        except Exception as error:  # noqa: BLE001  whatever a model raises
            kind = "memory" if is_out_of_memory(error) else type(error).__name__
        # Outside the handler: the error's frames hold memory that is to be freed.
        with self.lock:
            has_room = kind == "memory" and self.spare()
        if has_room:
            return self.public(again or action)
        self.free()
        raise ModelCallError(no_room(1) if kind == "memory" else f"the model failed on a public prompt: {kind}")

    def check_memory(self, shape: BatchShape) -> None:
        """Runs public text at a shape; raises ModelCallError if it does not fit."""
        with self.lock, torch.inference_mode():
            fits = self._fits(lambda: self._keeps_apart(shape, wherever=False))
        if fits is None:
            raise ModelCallError(no_room(shape.size))

    def _attempt(self, kind: Kind, size: int, shape: BatchShape) -> int:
        def verdict(size: int) -> bool | None:
            return self._fits(lambda: self._keeps_apart(replace(shape, size=size), wherever=kind == "units"))

        while size > 1:
            keeps_apart = verdict(size)
            if keeps_apart:
                return size
            self.free()
            size = (size + 1) // 2 if keeps_apart is None else 1
        # Slots that do not fit one by one raise when they run; a secret number of rows may not raise then.
        if kind == "units" and verdict(1) is None:
            raise ModelCallError(
                "the model ran out of memory with a single row beside the public prompt's; lower max_prompt_tokens, "
                "close other sessions, or take a smaller model or dtype"
            )
        return 1

    def _fits(self, action: Callable[[], bool]) -> bool | None:
        """Returns the result of `action`; None if memory ran out, even without what is held in secret amounts."""
        while True:
            try:
                return action()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            if not self.spare():
                return None

    def _keeps_apart(self, shape: BatchShape, *, wherever: bool) -> bool:
        """Whether a row keeps its bits; see `heads.keeps_apart`.

        Where the number of rows is secret there must be room for two batches: the public prompt's, and one beside it.
        """
        half = (shape.size + 1) // 2
        beside = self.batch(shape) if wherever else None
        return keeps_apart(
            lambda number: self._answers(shape, half, number, None if number else beside), half, wherever=wherever
        )

    def _answers(self, shape: BatchShape, half: int, number: int, batch: GrowingBatch | None = None) -> torch.Tensor:
        """Returns the bits of every kind of answer, int64[rows, ...], with the prompt in one half of the places."""
        width = shape.length - len(shape.shared)
        probe = self._probe(2, max(1, (2 * width) // 3))
        rows = [
            probe if (row < half) == (number % 2 == 0) else self._probe(3 + row + 97 * number, 1 + (row * 37) % width)
            for row in range(shape.size)
        ]
        batch = batch or self.batch(shape)
        states = [batch.start(rows)]
        tokens = torch.tensor(self._probe(1, BLOCK), device=self.body.device)
        states.append(batch.many(tokens.expand(shape.size, -1))[:, -1])
        states.append(batch.step(torch.full((shape.size,), self.vocabulary.filler, device=self.body.device)))
        settled = [self.settle(one) for one in states]
        ids = self.vocabulary.candidates[:64]
        shares = [torch.from_numpy(probabilities(one, ids)).view(torch.int64) for one in settled]
        bits = [one.contiguous().view(torch.uint8).to("cpu", torch.int64) for one in (*states, *settled)]
        return torch.cat([*bits, *shares], dim=1)


def no_room(size: int) -> str:
    """Returns the message that a batch of a public size does not fit."""
    if size == 1:
        advice = "a single row; lower max_prompt_tokens, or take a smaller model or dtype"
    else:
        advice = f"a batch of {size} rows; lower row_batch or max_prompt_tokens, or close other sessions"
    return f"the model ran out of memory with {advice}"
