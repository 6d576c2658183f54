"""An engine that writes down what it is shown. Lives in tests only: it keeps private prompts on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_dpicl.backends.base import NextTokenBackend, Rows, Token, TokenSession


class SpyBackend:
    """Passes everything to `inner` and records it."""

    def __init__(self, inner: NextTokenBackend) -> None:
        self._inner = inner
        self.public: list[tuple[str, str]] = []
        self.opened: list[tuple[str, ...]] = []
        self.scored: list[tuple[tuple[str, ...], str, Rows]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def top_tokens(self, prompt: str, prefix: Sequence[Token], *, top_k: int) -> list[tuple[Token, float]]:
        self.public.append((prompt, self._inner.decode(prefix)))
        return self._inner.top_tokens(prompt, prefix, top_k=top_k)

    async def atop_tokens(self, prompt: str, prefix: Sequence[Token], *, top_k: int) -> list[tuple[Token, float]]:
        self.public.append((prompt, self._inner.decode(prefix)))
        return await self._inner.atop_tokens(prompt, prefix, top_k=top_k)

    def open(self, prompts: Sequence[str], prefix: Sequence[Token]) -> TokenSession:
        self.opened.append(tuple(prompts))
        return _SpySession(self, tuple(prompts), list(prefix), self._inner.open(prompts, prefix))


class _SpySession:
    def __init__(self, spy: SpyBackend, prompts: tuple[str, ...], prefix: list[Token], inner: TokenSession) -> None:
        self._spy = spy
        self._prompts = prompts
        self._prefix = prefix
        self._inner = inner

    def _note(self, rows: Rows) -> Rows:
        self._spy.scored.append((self._prompts, self._spy.decode(self._prefix), rows.copy()))
        return rows

    def score(self, domain: Sequence[Token]) -> Rows:
        return self._note(self._inner.score(domain))

    async def ascore(self, domain: Sequence[Token]) -> Rows:
        return self._note(await self._inner.ascore(domain))

    def push(self, token: Token) -> None:
        self._inner.push(token)
        self._prefix.append(token)

    def close(self) -> None:
        self._inner.close()
