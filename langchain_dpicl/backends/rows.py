"""Scores one batch of private prompts so that a fault stays in its own row. Knows no noise and no ledger.

Holds prompts until closed and shows none.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import numpy as np

from langchain_dpicl.backends.base import NextTokenBackend, Rows, Token, TokenSession


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class AskRows:
    """Asks for the private rows of one release; its answer goes to the aggregation and nowhere else."""

    source: RowSource
    domain: tuple[Token, ...]

    def run(self) -> Rows:
        """Answers, blocking."""
        return self.source.score(self.domain)

    async def arun(self) -> Rows:
        """Answers, awaiting."""
        return await self.source.ascore(self.domain)


@dataclass(slots=True, repr=False, eq=False)
class RowSource:
    """Scores rows through one session; if an engine raises, row by row, so that a fault stays in its own row."""

    backend: NextTokenBackend
    prompts: tuple[str | None, ...]
    prefix: list[Token]
    session: TokenSession | None = field(default=None)

    def _live(self) -> tuple[int, ...]:
        return tuple(i for i, prompt in enumerate(self.prompts) if prompt is not None)

    def _open(self) -> TokenSession:
        if self.session is None:
            texts = [prompt for prompt in self.prompts if prompt is not None]
            self.session = self.backend.open(texts, self.prefix)
        return self.session

    def score(self, domain: tuple[Token, ...]) -> Rows:
        """Returns float64[prompts, d]; a row that abstains or fails is zeros."""
        live = self._live()
        rows = None
        with contextlib.suppress(Exception):
            rows = self._open().score(domain) if live else np.zeros((0, len(domain)))
        if not _fits(rows, len(live), len(domain)):
            rows = np.vstack([self._score_one(i, domain) for i in live])
        return self._spread(rows, live, len(domain))

    async def ascore(self, domain: tuple[Token, ...]) -> Rows:
        """Is `score`, awaitable."""
        live = self._live()
        rows = None
        with contextlib.suppress(Exception):
            rows = await self._open().ascore(domain) if live else np.zeros((0, len(domain)))
        if not _fits(rows, len(live), len(domain)):
            rows = np.vstack([self._score_one(i, domain) for i in live])
        return self._spread(rows, live, len(domain))

    def _score_one(self, row: int, domain: tuple[Token, ...]) -> Rows:
        rows = None
        with contextlib.suppress(Exception):
            session = self.backend.open([self.prompts[row] or ""], self.prefix)
            with contextlib.closing(session):
                rows = session.score(domain)
        return rows if _fits(rows, 1, len(domain)) else np.zeros((1, len(domain)))  # type: ignore[return-value]

    def _spread(self, rows: Rows | None, live: tuple[int, ...], width: int) -> Rows:
        out = np.zeros((len(self.prompts), width))
        if live:
            out[list(live)] = rows
        return out

    def push(self, token: Token) -> None:
        """Appends one released token to every row."""
        self.prefix.append(token)
        if self.session is not None:
            pushed = False
            with contextlib.suppress(Exception):
                self.session.push(token)
                pushed = True
            # A session that cannot go on is opened anew at the next score.
            self.session = self.session if pushed else None

    def close(self) -> None:
        """Drops prompts and caches."""
        session, self.session, self.prompts = self.session, None, ()
        if session is not None:
            with contextlib.suppress(Exception):
                session.close()


def restrict(rows: Rows) -> Rows:
    """Returns each row divided by its own mass on the domain (Tang et al. 2023, Algorithm 1); empty rows stay zero."""
    clean = np.clip(np.nan_to_num(rows, nan=0.0, posinf=0.0, neginf=0.0), 0.0, 1.0)
    mass = clean.sum(axis=1, keepdims=True)
    shares: Rows = np.divide(clean, mass, out=np.zeros_like(clean), where=mass > 0)
    return shares


def _fits(rows: Rows | None, num_rows: int, width: int) -> bool:
    return isinstance(rows, np.ndarray) and rows.shape == (num_rows, width) and rows.dtype.kind == "f"
