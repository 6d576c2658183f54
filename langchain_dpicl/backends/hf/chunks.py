"""Runs private rows on a local model in chunks of a public size, so that a fault costs one row."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from langchain_dpicl.backends.base import Rows
from langchain_dpicl.backends.hf.batches import BatchShape, GrowingBatch, is_out_of_memory
from langchain_dpicl.backends.hf.engine import BLOCK, Engine, no_room
from langchain_dpicl.backends.hf.heads import Kind, LazyLogits
from langchain_dpicl.backends.hf.vocabulary import Floats
from langchain_dpicl.exceptions import DPICLError, ModelCallError

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
