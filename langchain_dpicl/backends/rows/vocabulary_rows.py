"""Computes private rows over the whole vocabulary, with the public row in the same batch."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl._opaque import OpaqueRows, run_guarded
from langchain_dpicl.backends.base import FullBackend, FullSession, GroupBackend, Rows, Token
from langchain_dpicl.backends.rows.rows import arun_guarded, fits
from langchain_dpicl.backends.sync_async import apublic_call, bare, public_call, public_failure
from langchain_dpicl.exceptions import DPICLError, ModelCallError


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class PublicRowRequest:
    """Computes the public logits float64[V]; a failure is an error."""

    source: FullRowSource

    def run(self) -> NDArray[np.float64]:
        """Runs, blocking."""
        return self.source.public()

    async def arun(self) -> NDArray[np.float64]:
        """Runs, awaiting."""
        return await self.source.apublic()


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class LogitRequest:
    """Computes the private logits of one release, for the aggregation alone."""

    source: FullRowSource
    columns: NDArray[np.int64]

    def run(self) -> OpaqueRows:
        """Runs, blocking."""
        return self.source.logits(self.columns)

    async def arun(self) -> OpaqueRows:
        """Runs, awaiting."""
        return await self.source.alogits(self.columns)


@dataclass(frozen=True, slots=True)
class PublicRowContext:
    """The public facts of a session with a public row.

    Attributes:
      prompt: the public prompt.
      shared: text that all prompts start with.
      num_rows: number of private rows where it is public, None where it is secret.
      max_new_tokens: most tokens that will be pushed.
    """

    prompt: str
    shared: str = ""
    num_rows: int | None = None
    max_new_tokens: int | None = None


@dataclass(slots=True, repr=False, eq=False)
class FullRowSource:
    """Scores rows over the whole vocabulary beside the public one; if an engine raises, row by row."""

    backend: FullBackend
    prompts: tuple[str | None, ...]
    prefix: list[Token]
    side: PublicRowContext
    session: FullSession | None = field(default=None)

    def public(self) -> NDArray[np.float64]:
        """Returns the public logits float64[V]."""
        # The traceback of a stop or fault would show prompts: both are raised again from here.
        return _answer(run_guarded(self._public))

    async def apublic(self) -> NDArray[np.float64]:
        """Async twin of `public`."""
        return _answer(await arun_guarded(self._apublic))

    def _public(self) -> NDArray[np.float64] | DPICLError:
        try:
            return public_call(lambda: self._open().public())
        except DPICLError as error:
            return bare(error)

    async def _apublic(self) -> NDArray[np.float64] | DPICLError:
        try:
            return await apublic_call(lambda: self._open().apublic())
        except DPICLError as error:
            return bare(error)

    def begun(self) -> FullSession | None:
        """Returns the session, opened; None if that fails, which the next request says."""
        return run_guarded(self._open)

    def logits(self, columns: NDArray[np.int64]) -> OpaqueRows:
        """Returns float64[prompts, d], boxed; a row that abstains or failed is NaN."""
        return self._boxed(run_guarded(lambda: self._open().logits(columns)), columns)

    async def alogits(self, columns: NDArray[np.int64]) -> OpaqueRows:
        """Async twin of `logits`."""
        return self._boxed(await arun_guarded(lambda: self._open().alogits(columns)), columns)

    def push(self, token: Token) -> None:
        """Appends one released token to every row; a failed session is opened again for the next request."""
        self.prefix.append(token)
        if self.session is not None and run_guarded(lambda: self._push(token)) is None:
            self._drop()

    def close(self) -> None:
        """Drops prompts and caches."""
        self.prompts = ()
        self._drop()

    def _drop(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            run_guarded(session.close)

    def _push(self, token: Token) -> bool:
        if self.session is not None:
            self.session.push(token)
        return True

    def _open(self) -> FullSession:
        if self.session is None:
            self.session = self._opened(self.prompts, self.side.num_rows)
        return self.session

    def _opened(self, prompts: tuple[str | None, ...], num_rows: int | None) -> FullSession:
        return self.backend.open_full(
            prompts,
            tuple(self.prefix),
            public=self.side.prompt,
            num_rows=num_rows,
            shared=self.side.shared,
            max_new_tokens=self.side.max_new_tokens,
        )

    def _boxed(self, scored: Rows | None, columns: NDArray[np.int64]) -> OpaqueRows:
        width = len(columns)
        if fits(scored, len(self.prompts), width):
            # In one memory layout, so that sums along a row do not depend on how many rows there are.
            return OpaqueRows(np.ascontiguousarray(scored))
        out = np.full((len(self.prompts), width), np.nan)
        for row in range(len(self.prompts)):
            one = run_guarded(lambda row=row: self._score_one(row, columns))  # type: ignore[misc]
            if fits(one, 1, width):
                out[row] = one[0]
        return OpaqueRows(out)

    def _score_one(self, row: int, columns: NDArray[np.int64]) -> Rows:
        """Scores a row alone, at its place and in the shape of the batch, so that its bits stay the same."""
        place, alone = 0, self.prompts[row : row + 1]
        if self.side.num_rows is not None:
            place, alone = row, tuple(prompt if i == row else None for i, prompt in enumerate(self.prompts))
        with contextlib.closing(self._opened(alone, self.side.num_rows)) as session:
            return session.logits(columns)[place : place + 1]


def join_texts(effects: Sequence[object]) -> bool:
    """Lets sessions of texts that ask at once share a batch; returns whether all effects ask one such engine."""
    requests = [effect for effect in effects if isinstance(effect, PublicRowRequest | LogitRequest)]
    backends = {id(request.source.backend): request.source.backend for request in requests}
    for key, backend in backends.items():
        sources = [request.source for request in requests if id(request.source.backend) == key]
        if isinstance(backend, GroupBackend) and len(sources) > 1:
            sessions = [session for source in sources if (session := source.begun()) is not None]
            run_guarded(lambda backend=backend, sessions=sessions: backend.join(sessions))  # type: ignore[misc]
    is_joined = all(isinstance(backend, GroupBackend) for backend in backends.values())
    return is_joined and len(requests) == len(effects) and len(backends) == 1


def _answer(outcome: NDArray[np.float64] | DPICLError | None) -> NDArray[np.float64]:
    """Returns public logits, or raises the error that replaces them."""
    if outcome is None:
        raise public_failure("a panic")
    if isinstance(outcome, DPICLError):
        raise outcome
    if not bool((outcome < np.inf).all() and np.isfinite(outcome).any()):  # a NaN is below nothing
        raise ModelCallError(
            "the model gave no numbers for the public prompt: expected logits, -inf for tokens that cannot follow, "
            "found NaN, +inf, or -inf alone; check the model on the public prompt, or load it in another dtype"
        )
    return outcome


def log_rows(rows: Rows) -> Rows:
    """Returns the logits of probability rows; a row without mass, which has failed, is NaN."""
    with np.errstate(all="ignore"):
        logits: Rows = np.log(rows)
        logits[~(rows.sum(axis=1) > 0)] = np.nan
    return logits


def softmax_rows(logits: Rows) -> Rows:
    """Returns each row's probabilities on the domain; a row with a NaN, which has failed, is zeros."""
    with np.errstate(all="ignore"):
        weights = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
        shares: Rows = weights / weights.sum(axis=1, keepdims=True)
        shares[~np.isfinite(shares).all(axis=1)] = 0.0
    return shares
