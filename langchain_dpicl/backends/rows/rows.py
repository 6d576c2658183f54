"""Scores one batch of private prompts so that a fault stays in its own row."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeGuard, TypeVar

import numpy as np

from langchain_dpicl._opaque import OpaqueRows, run_guarded
from langchain_dpicl.backends.base import NextTokenBackend, ReportSession, Rows, Token, TokenSession
from langchain_dpicl.exceptions import ConfigurationError

T = TypeVar("T")


async def arun_guarded(action: Callable[[], Awaitable[T]]) -> T | None:
    """Async twin of `run_guarded`; a cancellation stops only if this task was cancelled, else the row fails."""
    stop: type[BaseException] | None = None
    try:
        return await action()
    except KeyboardInterrupt:
        stop = KeyboardInterrupt
    except asyncio.CancelledError:
        task = asyncio.current_task()
        stop = asyncio.CancelledError if task is not None and task.cancelling() else None
    except BaseException:  # noqa: BLE001  see `run_guarded`
        stop = None
    if stop is not None:
        raise stop
    return None


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class RowRequest:
    """Computes the private rows of one release, for the aggregation alone."""

    source: RowSource
    domain: tuple[Token, ...]

    def run(self) -> OpaqueRows:
        """Runs, blocking."""
        return self.source.score(self.domain)

    async def arun(self) -> OpaqueRows:
        """Runs, awaiting."""
        return await self.source.ascore(self.domain)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class ReportRequest:
    """Asks for the private rows of one release before its candidates are known; the answer is for `read_report`."""

    source: RowSource

    def run(self) -> OpaqueRows:
        """Runs, blocking."""
        return self.source.report()

    async def arun(self) -> OpaqueRows:
        """Runs, awaiting."""
        return await self.source.areport()


@dataclass(slots=True, repr=False, eq=False)
class RowSource:
    """Scores rows through one session; if an engine raises, row by row, so that a fault stays in its own row."""

    backend: NextTokenBackend
    prompts: tuple[str | None, ...]
    prefix: list[Token]
    session: TokenSession | None = field(default=None)

    def score(self, domain: tuple[Token, ...]) -> OpaqueRows:
        """Returns float64[prompts, d], boxed; a row that abstains or failed is zeros."""
        if not self._live():
            return self._spread(None, domain)
        return self._spread(run_guarded(lambda: self._open().score(domain)), domain)

    async def ascore(self, domain: tuple[Token, ...]) -> OpaqueRows:
        """Async twin of `score`."""
        if not self._live():
            return self._spread(None, domain)
        return self._spread(await arun_guarded(lambda: self._open().ascore(domain)), domain)

    def report(self) -> OpaqueRows:
        """Returns the replies of a session that asks before the candidates are known, boxed; None: there are none."""
        return OpaqueRows(run_guarded(lambda: self._reporting().report()) if self._live() else None)

    async def areport(self) -> OpaqueRows:
        """Async twin of `report`."""
        return OpaqueRows(await arun_guarded(lambda: self._reporting().areport()) if self._live() else None)

    def read_report(self, boxed: OpaqueRows, domain: tuple[Token, ...]) -> OpaqueRows | None:
        """Returns what `score` returns, from replies; None: they cannot be read, and the rows have to be scored."""
        live, found = self._live(), boxed.take()
        scored = run_guarded(lambda: self._reporting().read(found, domain)) if live else None
        return self._spread(scored, domain) if not live or fits(scored, len(live), len(domain)) else None

    def _reporting(self) -> ReportSession:
        session = self._open()
        if not isinstance(session, ReportSession):
            raise ConfigurationError("session: expected one that asks before the candidates are known, found another.")
        return session

    def push(self, token: Token) -> None:
        """Appends one released token to every row; a failed session is opened again for the next score."""
        self.prefix.append(token)
        if self.session is not None and run_guarded(lambda: self._push(token)) is None:
            self.session = None

    def close(self) -> None:
        """Drops prompts and caches."""
        session, self.session, self.prompts = self.session, None, ()
        if session is not None:
            run_guarded(session.close)

    def _push(self, token: Token) -> bool:
        if self.session is not None:
            self.session.push(token)
        return True

    def _live(self) -> tuple[int, ...]:
        return tuple(i for i, prompt in enumerate(self.prompts) if prompt is not None)

    def _open(self) -> TokenSession:
        if self.session is None:
            texts = [prompt for prompt in self.prompts if prompt is not None]
            self.session = self.backend.open(texts, tuple(self.prefix))
        return self.session

    def _spread(self, scored: Rows | None, domain: tuple[Token, ...]) -> OpaqueRows:
        """Puts scored rows into their places; without usable ones, scores row by row."""
        live, width = self._live(), len(domain)
        out = np.zeros((len(self.prompts), width))
        if fits(scored, len(live), width):
            out[list(live)] = scored
        else:
            for row in live:
                one = run_guarded(lambda row=row: self._score_one(row, domain))  # type: ignore[misc]
                out[row] = one[0] if one is not None and fits(one, 1, width) else 0.0
        return OpaqueRows(out)

    def _score_one(self, row: int, domain: tuple[Token, ...]) -> Rows:
        session = self.backend.open([self.prompts[row] or ""], tuple(self.prefix))
        with contextlib.closing(session):
            return session.score(domain)


def restrict(rows: Rows) -> Rows:
    """Returns each row divided by its own mass on the domain (Tang et al. 2023, Algorithm 1); empty rows stay zero."""
    # A caller's numpy error state must not turn a record's odd number into an exception.
    with np.errstate(all="ignore"):
        clean = np.clip(np.nan_to_num(rows, nan=0.0, posinf=0.0, neginf=0.0), 0.0, 1.0)
        mass = clean.sum(axis=1, keepdims=True)
        shares: Rows = np.divide(clean, mass, out=np.zeros_like(clean), where=mass > 0)
    return shares


def fits(rows: Rows | None, num_rows: int, width: int) -> TypeGuard[Rows]:
    """Whether an engine's answer has the requested type and shape."""
    return isinstance(rows, np.ndarray) and rows.shape == (num_rows, width) and rows.dtype.kind == "f"
