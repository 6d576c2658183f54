"""Private rows on a local model: read once, grown by released tokens, forgotten when closed. Knows no noise.

What a row holds is seen by the model and by nobody else: not by shapes, sizes, errors or the order of the work. Rows
live in a box that shows nothing. Whatever goes wrong inside is told apart in `_run` and told on from frames that hold
nothing private.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from langchain_dpicl.backends._hf_batches import Batch, Shape, is_out_of_memory
from langchain_dpicl.backends._hf_engine import BLOCK, NO_ROOM, Engine, Kind
from langchain_dpicl.backends._hf_vocabulary import Floats, probabilities, taken
from langchain_dpicl.backends.base import Rows, Token
from langchain_dpicl.exceptions import ConfigurationError, DPICLError, ModelCallError

Read = Callable[[torch.Tensor, slice], Floats]
"""What to take from a chunk's candidates float32[size, width], of the rows in some places: float64[places, d]."""


class _Outcome(enum.Enum):
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
    """

    rows: list[list[int] | None]
    kind: Kind
    shape: Shape
    has_public: bool

    @property
    def num_private(self) -> int:
        """Rows without the public one."""
        return len(self.rows) - self.has_public

    def wanted(self, row_batch: int) -> int:
        """Rows that should run together; public."""
        return len(self.rows) if self.kind == "slots" else row_batch


@dataclass(slots=True, repr=False, eq=False)
class _Chunk:
    """Rows that run together: which row stands in which place, what has been read, and what the model said."""

    members: dict[int, int]
    batch: Batch | None = None
    done: int = 0
    settled: torch.Tensor | None = None
    failed: bool = False


@dataclass(slots=True, repr=False, eq=False)
class _Work:
    """What a session holds until it is closed."""

    private: PrivateRows
    script: list[tuple[int, ...]] = field(default_factory=list)
    chunks: list[_Chunk] | None = None
    size: int = 0
    apart: bool = False
    parked: bool = False


class LocalSession:
    """A batch of prompts on a local model; see `backends.base.FullSession`.

    Formal guarantees:
      - The bits of a row depend on its own prompt, on public text, and on public facts about the machine.

    Args:
      engine: runs the model.
      private: the rows.
      prefix: ids of released tokens.
    """

    def __init__(self, engine: Engine, private: PrivateRows, prefix: Sequence[int]) -> None:
        self._engine = engine
        self._work: _Work | None = _Work(private)
        self._pending = list(prefix)
        self._length = private.shape.length + len(prefix)
        self._limit = engine.limit_at(private.shape)

    def public(self) -> NDArray[np.float64]:
        """Returns float64[V]: next-token logits after the public prompt, in the order of the vocabulary.

        Raises:
          ConfigurationError: the session is closed, or was opened without a public prompt.
          ModelCallError: the model gave no numbers for it.
        """
        ids = self._engine.vocabulary.candidates
        row = self._read(lambda settled, places: taken(settled[places], ids), len(ids), np.nan, public=True)
        if row.shape[0] != 1:
            raise ConfigurationError("expected a session with a public prompt, found none; open it with open_full")
        if np.isnan(row).any():
            raise ModelCallError("the model gave no numbers for the public prompt; try another dtype")
        answer: Floats = row[0]
        return answer

    async def apublic(self) -> NDArray[np.float64]:
        """Is `public`, in a worker thread."""
        return await asyncio.to_thread(self.public)

    def logits(self, columns: NDArray[np.int64] | None = None) -> Rows:
        """Returns float64[rows, d]: logits of the private rows; a failed row is NaN."""
        vocabulary = self._engine.vocabulary
        ids = vocabulary.candidates if columns is None else vocabulary.ids(columns)
        return self._read(lambda settled, places: taken(settled[places], ids), len(ids), np.nan)

    async def alogits(self, columns: NDArray[np.int64] | None = None) -> Rows:
        """Is `logits`, in a worker thread."""
        return await asyncio.to_thread(self.logits, columns)

    def score(self, domain: Sequence[Token]) -> Rows:
        """Returns float64[rows, d]: probabilities on `domain`; 0 for what is no candidate, and in a failed row."""
        ids, is_known = self._engine.vocabulary.known(domain)
        # All rows of a chunk are summed at its one shape, which has been tried out.
        return self._read(lambda settled, places: probabilities(settled, ids)[places] * is_known, len(ids), 0.0)

    async def ascore(self, domain: Sequence[Token]) -> Rows:
        """Is `score`, in a worker thread."""
        return await asyncio.to_thread(self.score, domain)

    def push(self, token: Token) -> None:
        """Appends one released token to every row; it is read when the next answer is wanted.

        Raises:
          ConfigurationError: no token of this model, no room left in its context, or the session is closed.
        """
        with self._engine.lock:
            self._open_work()
            id_ = self._engine.vocabulary.checked(token)
            check_room(self._limit, self._length + 1)
            self._pending.append(id_)
            self._length += 1

    def close(self) -> None:
        """Drops prompts and caches; further calls raise ConfigurationError."""
        with self._engine.lock:
            self._work = None

    def _open_work(self) -> _Work:
        if self._work is None:
            raise ConfigurationError("expected an open session, found a closed one; open another")
        return self._work

    def _read(self, read: Read, width: int, fill: float, *, public: bool = False) -> Rows:
        """Returns float64[rows, width]: what `read` finds in the private rows, or in the public one."""
        with self._engine.lock:
            work = self._open_work()
            self._note_pending(work)
            while (outcome := _run(self._engine, work)) is not _Outcome.DONE:
                work.chunks = None
                if outcome is _Outcome.STOPPED:
                    raise KeyboardInterrupt
                if outcome is _Outcome.FAULT and work.apart:
                    raise ModelCallError("the model failed on public text; try it with model.generate(...)")
                work.apart |= outcome is _Outcome.FAULT
                if outcome is _Outcome.NO_MEMORY:
                    _make_room(self._engine, work)
            with torch.inference_mode():
                return _gathered(work, read, np.full((_wanted(work, public=public)[1], width), fill), public=public)

    def _note_pending(self, work: _Work) -> None:
        """Writes down in which steps tokens are read, so that a repetition takes the same ones."""
        pending, self._pending = self._pending, []
        whole = len(pending) - len(pending) % BLOCK
        work.script += [tuple(pending[place : place + BLOCK]) for place in range(0, whole, BLOCK)]
        work.script += [(token,) for token in pending[whole:]]


def check_room(limit: int | None, length: int) -> None:
    """Raises ConfigurationError if a model has no room for `length` tokens."""
    if limit is not None and length > limit:
        raise ConfigurationError(
            f"expected at most {limit} tokens in the model's context, found {length}: "
            "lower max_prompt_tokens or the number of tokens to write"
        )


def _make_room(engine: Engine, work: _Work) -> None:
    """Halves the batch where its size is public; where the number of rows is not, takes other rows off the device."""
    private = work.private
    engine.free()
    if private.kind == "slots":
        engine.shrink("slots", private.wanted(engine.row_batch), private.shape, found=work.size)
    elif work.parked:
        raise ModelCallError(NO_ROOM)
    else:
        work.parked = True


def _run(engine: Engine, work: _Work) -> _Outcome:
    """Brings all rows to the end of the script."""
    try:
        with torch.inference_mode():
            if work.chunks is None:
                _begin(engine, work)
            for chunk in work.chunks or ():
                if not chunk.failed:
                    chunk.failed = not _advanced(engine, work, chunk)
    except KeyboardInterrupt:
        return _Outcome.STOPPED
    except DPICLError:
        raise
    except BaseException as error:  # noqa: BLE001  whatever a row makes a model raise stays that row's fault
        return _Outcome.NO_MEMORY if is_out_of_memory(error) else _Outcome.FAULT
    return _Outcome.DONE


def _begin(engine: Engine, work: _Work) -> None:
    private = work.private
    count = len(private.rows)
    size = engine.size_for(private.kind, private.wanted(engine.row_batch), private.shape) if count else 1
    work.size = size
    if work.apart:
        work.chunks = [_Chunk({row % size: row}) for row in range(count)]
    else:
        starts = range(0, count, size)
        work.chunks = [_Chunk({row - start: row for row in range(start, min(start + size, count))}) for start in starts]


def _advanced(engine: Engine, work: _Work, chunk: _Chunk) -> bool:
    """Brings one chunk to the end of the script; False if it fails and each row stands alone."""
    try:
        _advance(engine, work, chunk)
    except Exception as error:
        if not work.apart or is_out_of_memory(error):
            raise
        return False
    return True


def _advance(engine: Engine, work: _Work, chunk: _Chunk) -> None:
    raw: torch.Tensor | None = None
    if chunk.batch is None:
        rows = [
            work.private.rows[chunk.members[place]] if place in chunk.members else None for place in range(work.size)
        ]
        chunk.batch = engine.batch(replace(work.private.shape, size=work.size))
        raw = chunk.batch.start([row or [engine.vocabulary.filler] for row in rows])
    elif work.parked and chunk.done < len(work.script):
        chunk.batch.moved(engine.body.device)
    for tokens in work.script[chunk.done :]:
        if len(tokens) == 1:
            raw = chunk.batch.step(torch.full((work.size,), tokens[0], device=engine.body.device))
        else:
            raw = chunk.batch.many(tokens)[:, -1]
    chunk.done = len(work.script)
    if raw is not None:
        chunk.settled = engine.reader.settle(raw)
        if work.parked:
            chunk.batch.moved("cpu")


def _wanted(work: _Work, *, public: bool) -> tuple[int, int]:
    """Returns the first row asked for, and how many."""
    first = int(work.private.has_public)
    return (0, first) if public else (first, len(work.private.rows) - first)


def _gathered(work: _Work, read: Read, out: Rows, *, public: bool) -> Rows:
    """Fills in the answers of the rows asked for, in their order; rows that failed stay as they are."""
    first, count = _wanted(work, public=public)
    for chunk in work.chunks or ():
        places = [place for place, row in chunk.members.items() if first <= row < first + count]
        if chunk.failed or chunk.settled is None or not places:
            continue
        answers = read(chunk.settled, slice(places[0], places[-1] + 1))
        for place in places:
            row = chunk.members[place]
            if work.private.rows[row] is not None:
                out[row - first] = answers[place - places[0]]
    return out
