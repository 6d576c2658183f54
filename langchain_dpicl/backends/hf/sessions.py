"""Sessions of private rows on a local model, and next tokens after PUBLIC prompts with a cache of the last two."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from langchain_dpicl.backends.base import Rows, Token
from langchain_dpicl.backends.hf.batches import GrowingBatch
from langchain_dpicl.backends.hf.chunks import NoRoomTogetherError, PrivateRows, Read, SessionState, blank, fill
from langchain_dpicl.backends.hf.engine import BLOCK, Engine
from langchain_dpicl.backends.hf.vocabulary import Floats, probabilities, select_logits
from langchain_dpicl.exceptions import ConfigurationError, ModelCallError


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
        return await asyncio.to_thread(self.public)

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
        return await asyncio.to_thread(self.logits, columns)

    def score(self, domain: Sequence[Token]) -> Rows:
        """Returns float64[rows, d]: probabilities on `domain`; 0 for other keys, and in a failed row."""
        ids, is_known = self._engine.vocabulary.known(domain)
        # Rows are summed at the shape of their chunk, which has been tested to keep rows apart.
        return self._read(lambda lazy, places: probabilities(lazy.settled(), ids)[places] * is_known, len(ids), 0.0)

    async def ascore(self, domain: Sequence[Token]) -> Rows:
        """Is `score`, in a worker thread."""
        return await asyncio.to_thread(self.score, domain)

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

    Args:
      engine: runs the model.
      length: tokens that every prompt is padded to.
      room: tokens to make room for.
      begun: ids that all prompts begin with and that are read apart.
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
