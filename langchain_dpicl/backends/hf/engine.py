"""Runs a local model at public shapes, in chunks and sessions, and tests which shapes keep rows apart."""

from __future__ import annotations

import enum
import gc
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray

from langchain_dpicl.backends.base import Rows, Token
from langchain_dpicl.backends.hf import batches
from langchain_dpicl.backends.hf.batches import (
    BatchShape,
    GrowingBatch,
    LeftBatch,
    ModelBody,
    RightBatch,
    is_out_of_memory,
    kind_of,
)
from langchain_dpicl.backends.hf.model_checks import end_training_mode
from langchain_dpicl.backends.hf.vocabulary import (
    Floats,
    Kind,
    LazyLogits,
    LogitReader,
    Vocabulary,
    distance,
    keeps_apart,
    probabilities,
    select_logits,
    tolerance,
)
from langchain_dpicl.backends.sync_async import run_engine
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError, DPICLError, ModelCallError

# A row of a matrix product may change its bits with the other rows, or with its place. So each shape is tested at its
# first use: one public prompt in all places, beside neighbours of every length. If a bit changes, rows run one at a
# time.
T = TypeVar("T")

BLOCK = 16
"""Known tokens are read in blocks of this many, the rest one by one, as they would be generated."""


ROWS_AT_ONCE = {"cpu": 64, "cuda": 256}
"""Rows of several texts that share a batch, by device: beyond, a step gets longer as its rows get more."""


RECHECK_SECONDS = {"cuda": 60.0}
"""Seconds after which it is tested again whether a secret number of rows fits, by device; elsewhere once."""


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
        self._fitting: dict[tuple[str, BatchShape], tuple[int, float]] = {}
        self._recheck_seconds = RECHECK_SECONDS.get(body.device.type, math.inf)

    def batch(self, shape: BatchShape) -> GrowingBatch:
        """Returns a new batch of a model in evaluation mode."""
        end_training_mode(self.body.model)
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
                # Another thread may have chosen it meanwhile; nothing can be chosen twice.
                failure = ""
                if self._layout is None:
                    end_training_mode(self.body.model)
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
        is_plain = batches.is_plain(self.body.config) and self.body.takes_positions
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

    def size_that_fits(self, what: str, shape: BatchShape, run: Callable[[BatchShape], object]) -> int:
        """Returns how many of a secret number of rows run together; public, and tested by `run` alone.

        Others may take memory later, so that an accelerator is tested again, by the clock: a private row that does not
        fit decides nothing.

        Args:
          what: public name of what is run.
          shape: of one row.
          run: runs public rows at a shape, with as much memory as any private ones can take.
        """
        key = (what, shape)
        size, since = self._fitting.get(key) or (self.size_for("units", self.row_batch, shape), -math.inf)
        if time.monotonic() - since < self._recheck_seconds:
            return size
        with self.lock, torch.inference_mode():
            while self._fits(lambda size=size: _ended(run, replace(shape, size=size))) is None:  # type: ignore[misc]
                self.free()
                if size == 1:
                    raise ModelCallError(no_room(1))
                size = self._attempt("units", (size + 1) // 2, shape)
        self._fitting[key] = size, time.monotonic()
        return size

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
            kind = kind_of(error)
        # Outside the handler: the error's frames hold memory that is to be freed.
        with self.lock:
            has_room = kind == "memory" and self.spare()
        if has_room:
            return self.public(again or action)
        self.free()
        raise ModelCallError(no_room(1) if kind == "memory" else f"the model failed on a public prompt: {kind}")

    def by_itself(self, action: Callable[[], T]) -> T:
        """Runs the generation of one private text; raises UnsilencableModelError if a hook of others would see it.

        Others wait: how much memory a text takes is secret, and decides about no other. It is free again at the end.
        """
        with self.lock:
            self.body.hooks.check()
            return self.public(action)

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
        """Whether a row keeps its bits; see `keeps_apart`.

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


def _ended(run: Callable[[BatchShape], object], shape: BatchShape) -> bool:
    """Runs something; True if memory did not run out, whatever else it raises."""
    try:
        run(shape)
    except Exception as error:
        if is_out_of_memory(error):
            raise
    return True


def no_room(size: int) -> str:
    """Returns the message that a batch of a public size does not fit."""
    if size == 1:
        advice = "a single row; lower max_prompt_tokens, or take a smaller model or dtype"
    else:
        advice = f"a batch of {size} rows; lower row_batch or max_prompt_tokens, or close other sessions"
    return f"the model ran out of memory with {advice}"


# What one row makes a model raise costs that row alone: its chunk runs again row by row, each in its own place beside
# empty ones and without a cache, so that it takes no more memory than the chunk did.
# Where memory runs out, chunks whose number is secret give way first: their caches move to main memory or are computed
# again for every token. A private chunk that does not fit even so fails alone.
# Only public facts raise: a public number of rows that does not fit, or the batch of the public prompt.
Read = Callable[[LazyLogits, slice], Floats]
"""Reads float64[places, d] from a chunk's states, for the rows in some places."""


class AttemptOutcome(enum.Enum):
    """How an attempt ended."""

    DONE = enum.auto()
    NO_MEMORY = enum.auto()
    FAULT = enum.auto()
    STOPPED = enum.auto()


@dataclass(slots=True, repr=False, eq=False)
class PrivateRows:
    """Ids of rows, the public one first if there is one; shows nothing.

    Attributes:
      rows: None for a row that could not be read.
      kind: whether their number is public.
      shape: the public shape of one row.
      has_public: whether the first row is the public prompt.
      texts: public number of texts whose rows these are, as many of each, one text after the other.
    """

    rows: list[list[int] | None]
    kind: Kind
    shape: BatchShape
    has_public: bool
    texts: int = 1

    @property
    def per_text(self) -> int:
        """Rows of one text."""
        return len(self.rows) // self.texts

    def is_public(self, row: int) -> bool:
        """Whether a row is a public prompt."""
        return self.has_public and row % self.per_text == 0

    def of(self, text: int) -> slice:
        """Returns where the rows of a text are."""
        return slice(text * self.per_text, (text + 1) * self.per_text)

    def wanted(self, row_batch: int) -> int:
        """Returns how many rows should run together; public."""
        return len(self.rows) if self.kind == "slots" else row_batch


class NoRoomTogetherError(Exception):
    """Rows of several texts do not fit into memory together."""


@dataclass(slots=True, repr=False, eq=False)
class Chunk:
    """Rows that run together.

    Attributes:
      members: row by place.
      is_alone: one row of a chunk that failed; it keeps no cache.
      batch: what has been read; None: nothing, or it was dropped.
      done: steps of the script that the batch has read.
      lazy_logits: the model's last states, of all places or of a row alone.
      read: steps after which they were computed.
      device: where they were computed.
      failed: it is not run any more.
    """

    members: dict[int, int]
    is_alone: bool = False
    batch: GrowingBatch | None = None
    done: int = 0
    lazy_logits: LazyLogits | None = None
    read: int = -1
    device: torch.device | None = None
    failed: bool = False

    @property
    def is_first(self) -> bool:
        """Whether it holds the first row, which is the public one if there is one."""
        return 0 in self.members.values()

    def forget(self) -> None:
        """Drops its cache."""
        self.batch, self.done = None, 0

    def split_rows(self) -> list[Chunk]:
        """Returns its rows, each alone in its place; the public one first."""
        return [Chunk({place: row}, is_alone=True) for place, row in self.members.items()]


@dataclass(slots=True, repr=False, eq=False, weakref_slot=True)
class SessionState:
    """The state of a session until it is closed.

    Attributes:
      private: the rows.
      pending: by text: released tokens that no row has read; None: its session is closed.
      script: the steps in which tokens are read, int64[texts, tokens], so that a repetition takes the same ones.
      chunks: None before they are laid out.
      size: rows of a chunk; public.
      is_lean: whether only the first chunk keeps its cache on the device.
    """

    private: PrivateRows
    pending: list[list[int] | None]
    script: list[torch.Tensor] = field(default_factory=list)
    chunks: list[Chunk] | None = None
    size: int = 0
    is_lean: bool = False

    def note_pending(self, filler: int) -> bool:
        """Adds the pending tokens to the script; False if texts have different numbers of them."""
        counts = {len(tokens) for tokens in self.pending if tokens is not None}
        if len(counts) > 1:
            return False
        count = max(counts, default=0)
        if count:
            # A text that has ended goes on with fillers: the shape of a batch stays.
            tokens = torch.tensor([[filler] * count if one is None else one for one in self.pending])
            whole = count - count % BLOCK
            self.script += [tokens[:, place : place + BLOCK] for place in range(0, whole, BLOCK)]
            self.script += [tokens[:, place : place + 1] for place in range(whole, count)]
            self.pending = [None if one is None else [] for one in self.pending]
        return True

    def leave(self, text: int) -> SessionState:
        """Returns one text's rows on their own, to be read again; its place here stays empty."""
        private, pending = self.private, self.pending[text]
        own = PrivateRows(private.rows[private.of(text)], private.kind, private.shape, private.has_public)
        state = SessionState(own, [pending], [step[text : text + 1] for step in self.script])
        self.close(text)
        return state

    def close(self, text: int) -> None:
        """Drops the prompts of a text; caches go with the last one."""
        self.private.rows[self.private.of(text)] = [None] * self.private.per_text
        self.pending[text] = None

    def spare(self) -> bool:
        """Moves caches of later chunks off the device from now on; False if that frees nothing.

        Only where the number of rows is secret, as the session's memory is a secret amount then.
        """
        if self.is_lean or self.private.kind == "slots":
            return False
        self.is_lean = True
        later = [chunk for chunk in (self.chunks or ())[1:] if chunk.batch is not None]
        for chunk in later:
            move_to_host(chunk)
        return bool(later)


def fill(engine: Engine, work: SessionState, read: Read, out: Rows, *, first: int) -> None:
    """Runs all rows to the end of the script, and puts the reading of row `first + i` into `out[i]`.

    Entries of failed rows are left unchanged.

    Raises:
      ModelCallError: what is public failed.
      NoRoomTogetherError: rows of several texts do not fit.
      UnsilencableModelError: somebody else's hook would see the rows.
      KeyboardInterrupt: it was stopped; the next call goes on.
    """
    place, has_retried = 0, False
    while work.chunks is None or place < len(work.chunks):
        chunk = None if work.chunks is None else work.chunks[place]
        engine.body.hooks.check()
        outcome = _attempt(engine, work, chunk, read, out, first=first)
        if outcome is AttemptOutcome.STOPPED:
            raise KeyboardInterrupt
        if work.chunks is None or chunk is None:
            if outcome is not AttemptOutcome.DONE:
                raise ModelCallError("the model failed on public text; try it with model.generate(...)")
        elif outcome is AttemptOutcome.DONE or (outcome is AttemptOutcome.FAULT and chunk.is_alone):
            chunk.failed |= outcome is AttemptOutcome.FAULT
            place, has_retried = place + 1, False
        elif outcome is AttemptOutcome.FAULT:
            work.chunks[place : place + 1] = chunk.split_rows()
            has_retried = False
            engine.free()
        elif engine.spare():
            continue
        elif work.private.kind == "slots" and not chunk.is_alone:
            _shrink(engine, work)
            place = 0
        elif has_retried:
            _give_up(engine, work, chunk)
        else:
            engine.free()
            has_retried = True


def _shrink(engine: Engine, work: SessionState) -> None:
    """Restarts with fewer rows at a time and, at last, one cache beside the first; their number is public."""
    if work.private.texts > 1:
        engine.free()
        engine.rows_at_once = 1
        raise NoRoomTogetherError
    if work.size == 1 and not work.is_lean:
        work.is_lean = True
        engine.free()
    else:
        engine.shrink("slots", work.private.wanted(engine.row_batch), work.private.shape, size=work.size)
    work.chunks = None


def _give_up(engine: Engine, work: SessionState, chunk: Chunk) -> None:
    """Fails a chunk that does not fit into memory; raises if it or its shape is public."""
    if not work.private.has_public:
        engine.check_memory(replace(work.private.shape, size=work.size))
    elif chunk.is_first:
        raise ModelCallError(no_room(work.size))
    chunk.failed = True


def _attempt(
    engine: Engine, work: SessionState, chunk: Chunk | None, read: Read, out: Rows, *, first: int
) -> AttemptOutcome:
    """Lays out the chunks, or answers for one of them; returns how that ended."""
    outcome = AttemptOutcome.DONE
    try:
        with torch.inference_mode():
            if chunk is None:
                _lay_out(engine, work)
            elif not chunk.failed:
                _advance(engine, work, chunk)
                _put_answers(work, chunk, read, out, first=first)
    except KeyboardInterrupt:
        outcome = AttemptOutcome.STOPPED
    except BaseException as error:
        if chunk is None and isinstance(error, DPICLError):
            raise  # by the engine, on public text
        outcome = AttemptOutcome.NO_MEMORY if is_out_of_memory(error) else AttemptOutcome.FAULT
        error.__traceback__ = None  # so that the error keeps no frame, and no memory, of a row
    if outcome is not AttemptOutcome.DONE and chunk is not None:
        chunk.forget()  # it may have read half of a step
    return outcome


def _lay_out(engine: Engine, work: SessionState) -> None:
    private = work.private
    count = len(private.rows)
    size = engine.size_for(private.kind, private.wanted(engine.row_batch), private.shape) if count else 1
    work.size = size
    starts = range(0, count, size)
    work.chunks = [Chunk({row - start: row for row in range(start, min(start + size, count))}) for start in starts]
    if private.kind == "units":
        engine.holders.add(work)


def _advance(engine: Engine, work: SessionState, chunk: Chunk) -> None:
    """Runs one chunk to the end of the script."""
    if chunk.read == len(work.script):
        return
    raw = torch.empty(0)
    if chunk.batch is None:
        members = [chunk.members.get(place) for place in range(work.size)]
        rows = [None if row is None else work.private.rows[row] for row in members]
        chunk.batch = engine.batch(replace(work.private.shape, size=work.size))
        raw = chunk.batch.start([row or [engine.vocabulary.filler] for row in rows])
    elif work.is_lean and not chunk.is_first:
        chunk.batch.moved(engine.body.device)
    text_of = [chunk.members.get(place, 0) // work.private.per_text for place in range(work.size)]
    for step in work.script[chunk.done :]:
        tokens = step[text_of].to(engine.body.device)
        raw = chunk.batch.step(tokens[:, 0]) if tokens.shape[1] == 1 else chunk.batch.many(tokens)[:, -1]
    publics = [place for place, row in chunk.members.items() if work.private.is_public(row)]
    states = engine.lazy_logits(raw, work.private.kind, publics)
    chunk.done, chunk.device = len(work.script), states.device
    if chunk.is_alone:
        chunk.lazy_logits = states.only([*chunk.members]).to("cpu")
        chunk.forget()
    else:
        chunk.lazy_logits = states
        if work.is_lean and not chunk.is_first:
            move_to_host(chunk)
    chunk.read = len(work.script)


def move_to_host(chunk: Chunk) -> None:
    """Moves a chunk's cache to main memory or, where that frees nothing, drops it."""
    is_kept = False
    if chunk.lazy_logits is not None:
        chunk.lazy_logits = chunk.lazy_logits.to("cpu")
    try:
        is_kept = chunk.batch is not None and chunk.batch.moved("cpu")
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    if not is_kept:
        chunk.forget()


def _put_answers(work: SessionState, chunk: Chunk, read: Read, out: Rows, *, first: int) -> None:
    """Writes a chunk's answers to their rows."""
    places = [place for place, row in chunk.members.items() if 0 <= row - first < len(out)]
    if chunk.lazy_logits is None or chunk.device is None or not places:
        return
    states = chunk.lazy_logits.to(chunk.device)
    if chunk.is_alone:
        # Rows are read at the shape of their chunk, which has been tested to keep rows apart.
        states = states.spread(work.size)
    answers = read(states, slice(places[0], places[-1] + 1))
    for place in places:
        row = chunk.members[place]
        if work.private.rows[row] is not None:
            out[row - first] = answers[place - places[0]]


def blank(count: int, width: int, fill_value: float) -> Rows:
    """Returns float64[count, width] to be filled; raises ModelCallError if main memory does not hold it."""
    try:
        return np.full((count, width), fill_value)
    except MemoryError:
        pass
    raise ModelCallError("main memory ran out for the answers of all rows; ask for fewer columns, or of fewer rows")


class LocalSession:
    """A batch of prompts on a local model; see `backends.base.FullSession`.

    Formal guarantees:
      - The bits of a row depend on its own prompt, on public text, and on public facts about the machine.
    """

    def __init__(self, engine: Engine, private: PrivateRows, prefix: Sequence[int]) -> None:
        self._engine = engine
        self._work: SessionState | None = SessionState(private, [list(prefix)])
        self._text = 0
        self._length = private.shape.length + len(prefix)
        self._limit = engine.limit_at(private.shape)

    def public(self) -> NDArray[np.float64]:
        """Returns float64[V]: next-token logits after the public prompt, in the order of the vocabulary."""
        ids = self._engine.vocabulary.candidates
        row = self._read(lambda lazy, places: select_logits(lazy.rows(places), ids), len(ids), np.nan, public=True)
        if row.shape[0] != 1:
            raise ConfigurationError("expected a session with a public prompt, found none; open it with open_full")
        if np.isnan(row).any():
            raise ModelCallError("the model gave no numbers for the public prompt; try another dtype")
        answer: Floats = row[0]
        return answer

    async def apublic(self) -> NDArray[np.float64]:
        """Is `public`, in a worker thread."""
        return await run_engine(self.public)

    def logits(self, columns: NDArray[np.int64] | None = None) -> Rows:
        """Returns float64[rows, d]: logits of the private rows; a failed row is NaN."""
        vocabulary = self._engine.vocabulary
        if columns is None:
            ids = vocabulary.candidates
            return self._read(lambda lazy, places: select_logits(lazy.settled()[places], ids), len(ids), np.nan)
        ids = vocabulary.ids(columns)
        return self._read(lambda lazy, places: select_logits(lazy.some(ids)[places]), len(ids), np.nan)

    async def alogits(self, columns: NDArray[np.int64] | None = None) -> Rows:
        """Is `logits`, in a worker thread."""
        return await run_engine(lambda: self.logits(columns))

    def score(self, domain: Sequence[Token]) -> Rows:
        """Returns float64[rows, d]: probabilities on `domain`; 0 for other keys, and in a failed row."""
        ids, is_known = self._engine.vocabulary.known(domain)
        # Rows are summed at the shape of their chunk, which has been tested to keep rows apart.
        return self._read(lambda lazy, places: probabilities(lazy.settled(), ids)[places] * is_known, len(ids), 0.0)

    async def ascore(self, domain: Sequence[Token]) -> Rows:
        """Is `score`, in a worker thread."""
        return await run_engine(lambda: self.score(domain))

    def push(self, token: Token) -> None:
        """Appends one released token to every row; it is read with the next request."""
        with self._engine.lock:
            work = self._open_work()
            id_ = self._engine.vocabulary.checked(token)
            check_room(self._limit, self._length + 1)
            self._waiting(work).append(id_)
            self._length += 1

    def close(self) -> None:
        """Drops prompts and caches (a cache that texts share, with the last of them); further calls raise."""
        with self._engine.lock:
            work, self._work = self._work, None
            if work is not None:
                work.close(self._text)

    def _open_work(self) -> SessionState:
        if self._work is None:
            raise ConfigurationError("expected an open session, found a closed one; open another")
        return self._work

    def _waiting(self, work: SessionState) -> list[int]:
        waiting = work.pending[self._text]
        return [] if waiting is None else waiting

    def _read(self, read: Read, width: int, empty: float, *, public: bool = False) -> Rows:
        """Returns float64[rows, width]: the readings of the private rows, or of the public one."""
        with self._engine.lock:
            work = self._open_work()
            if not work.note_pending(self._engine.vocabulary.filler):
                work = self._leave(work)
            try:
                return self._filled(work, read, width, empty, public=public)
            except NoRoomTogetherError:
                work = self._leave(work)
            return self._filled(work, read, width, empty, public=public)

    def _filled(self, work: SessionState, read: Read, width: int, empty: float, *, public: bool) -> Rows:
        rows = work.private.of(self._text)
        first = int(work.private.has_public)
        out = blank(first if public else rows.stop - rows.start - first, width, empty)
        fill(self._engine, work, read, out, first=rows.start + (0 if public else first))
        return out

    def _leave(self, work: SessionState) -> SessionState:
        """Goes on without the texts that shared a batch with this one."""
        self._work, self._text = work.leave(self._text), 0
        self._work.note_pending(self._engine.vocabulary.filler)
        return self._work

    def _key(self) -> tuple[object, ...] | None:
        """Returns the public facts that sessions share which may share a batch; None: it has been read, or may not."""
        work = self._work
        if work is None or work.script or work.chunks is not None or work.private.texts > 1:
            return None
        private = work.private
        is_known = private.kind == "slots" and private.has_public
        return (id(self._engine), private.shape, len(private.rows), len(self._waiting(work))) if is_known else None


def join(sessions: Sequence[LocalSession]) -> None:
    """Lets sessions share one batch that have read nothing and are of one shape; others stay on their own."""
    alike: dict[tuple[object, ...], list[LocalSession]] = {}
    for session in sessions:
        with session._engine.lock:  # noqa: SLF001  of this module
            key = session._key()  # noqa: SLF001
        if key is not None:
            alike.setdefault(key, []).append(session)
    for together in alike.values():
        if len(together) > 1:
            _join(together)


def _join(sessions: Sequence[LocalSession]) -> None:
    with sessions[0]._engine.lock:  # noqa: SLF001  of this module
        works = [session._open_work() for session in sessions]  # noqa: SLF001
        rows = [row for work in works for row in work.private.rows]
        pending = [tokens for work in works for tokens in work.pending]
        joint = SessionState(replace(works[0].private, rows=rows, texts=len(works)), pending)
        for text, session in enumerate(sessions):
            session._work, session._text = joint, text  # noqa: SLF001


def check_room(limit: int | None, length: int) -> None:
    """Raises ConfigurationError if a model has no room for `length` tokens."""
    if limit is not None and length > limit:
        raise ConfigurationError(
            f"expected at most {limit} tokens in the model's context, found {length}: "
            "lower max_prompt_tokens or the number of tokens to write"
        )


_CACHED_PROMPTS = 2


@dataclass(slots=True)
class _KnownPrompt:
    """A public prompt: its first answer and, once it has been continued, the row that continues it."""

    first: torch.Tensor
    batch: GrowingBatch | None = None
    begin: Any = None
    tokens: list[int] = field(default_factory=list)
    last: torch.Tensor | None = None


class PublicPredictor:
    """Answers public prompts.

    The answer to a prompt itself has the bits of a private row of the same text; further tokens run in one row, and
    agree with private rows up to rounding.
    """

    def __init__(self, engine: Engine, *, length: int, room: int, begun: tuple[int, ...]) -> None:
        self._engine = engine
        self._length = length
        self._room = room
        self._begun = begun
        self._known: dict[tuple[int, ...], _KnownPrompt] = {}

    def settled(self, prompt: Sequence[int], prefix: Sequence[int]) -> torch.Tensor:
        """Returns float32[1, width]: the candidates' logits after a prompt and a prefix."""
        check_room(self._engine.limit, self._length + len(prefix))
        logits = self._engine.public(lambda: self._answered(tuple(prompt), list(prefix)))
        if not bool(logits.amax().isfinite()):
            raise ModelCallError("the model gave no numbers for the public prompt; try another dtype")
        return logits

    def _answered(self, prompt: tuple[int, ...], prefix: list[int]) -> torch.Tensor:
        """Answers, and forgets all prompts if that fails: a row may have read half of a step."""
        try:
            return self._settled(prompt, prefix)
        except BaseException:
            self._known.clear()
            raise

    def _settled(self, prompt: tuple[int, ...], prefix: list[int]) -> torch.Tensor:
        known = self._known.pop(prompt, None) or _KnownPrompt(self._first(prompt))
        self._known[prompt] = known  # the last one used comes last
        while len(self._known) > _CACHED_PROMPTS:
            del self._known[next(iter(self._known))]
        return self._continued(known, prompt, prefix) if prefix else known.first

    def _first(self, prompt: tuple[int, ...]) -> torch.Tensor:
        """Computes a prompt in the shape of a private row."""
        engine = self._engine
        shape = engine.shape(self._length, self._room, self._begun)
        size = engine.size_for("units", engine.row_batch, shape)
        rows = [list(prompt[len(shape.shared) :]), *[[engine.vocabulary.filler]] * (size - 1)]
        return engine.settle(engine.batch(replace(shape, size=size, room=1)).start(rows))[:1].clone()

    def _continued(self, known: _KnownPrompt, prompt: tuple[int, ...], prefix: list[int]) -> torch.Tensor:
        engine = self._engine
        if known.batch is None:
            known.batch = engine.batch(engine.shape(len(prompt), self._room, reach=engine.left_after(len(prompt))))
            known.batch.start([list(prompt)])
            known.begin = known.batch.mark()
        if prefix[: len(known.tokens)] != known.tokens or known.last is None:
            known.batch.rewind(known.begin)
            known.tokens, known.last = [], known.first
        raw: torch.Tensor | None = None
        while missing := prefix[len(known.tokens) : len(known.tokens) + BLOCK]:
            if len(missing) == 1:
                raw = known.batch.step(torch.tensor(missing, device=engine.body.device))
            else:
                raw = known.batch.many(torch.tensor([missing], device=engine.body.device))[:, -1]
            known.tokens += missing
        if raw is not None:
            known.last = engine.settle(raw)
        return known.last
