"""Sessions of private rows on a local model: read once, extended by released tokens, dropped when closed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl.backends.base import Rows, Token
from langchain_dpicl.backends.hf.chunks import PrivateRows, Read, Work, blank, fill
from langchain_dpicl.backends.hf.engine import BLOCK, Engine
from langchain_dpicl.backends.hf.vocabulary import Floats, probabilities, taken
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
        self._work: Work | None = Work(private)
        self._pending = list(prefix)
        self._length = private.shape.length + len(prefix)
        self._limit = engine.limit_at(private.shape)

    def public(self) -> NDArray[np.float64]:
        """Returns float64[V]: next-token logits after the public prompt, in the order of the vocabulary."""
        ids = self._engine.vocabulary.candidates
        row = self._read(lambda lazy, places: taken(lazy.rows(places), ids), len(ids), np.nan, public=True)
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
            return self._read(lambda lazy, places: taken(lazy.settled()[places], ids), len(ids), np.nan)
        ids = vocabulary.ids(columns)
        return self._read(lambda lazy, places: taken(lazy.some(ids)[places]), len(ids), np.nan)

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
            self._open_work()
            id_ = self._engine.vocabulary.checked(token)
            check_room(self._limit, self._length + 1)
            self._pending.append(id_)
            self._length += 1

    def close(self) -> None:
        """Drops prompts and caches; further calls raise ConfigurationError."""
        with self._engine.lock:
            self._work = None

    def _open_work(self) -> Work:
        if self._work is None:
            raise ConfigurationError("expected an open session, found a closed one; open another")
        return self._work

    def _read(self, read: Read, width: int, empty: float, *, public: bool = False) -> Rows:
        """Returns float64[rows, width]: the readings of the private rows, or of the public one."""
        with self._engine.lock:
            work = self._open_work()
            self._note_pending(work)
            first = int(work.private.has_public)
            out = blank(first if public else len(work.private.rows) - first, width, empty)
            fill(self._engine, work, read, out, first=0 if public else first)
            return out

    def _note_pending(self, work: Work) -> None:
        """Records in which steps tokens are read, so that a repetition uses the same steps."""
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
