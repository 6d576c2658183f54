"""An engine that carries the public prompt in the batch of the private ones, with scripted faults; and coins by seed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from langchain_dpicl.backends.fake import FakeBackend, word_copier
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy.mechanisms.randomness import SecureRandom
from langchain_dpicl.release import curator
from langchain_dpicl.release import token_block as blocks
from tests.doubles import WORDS, RepeatableCoins


class FullFake(FakeBackend):
    """A `FullBackend`; remembers what its sessions were opened with (never do this outside a test)."""

    def __init__(
        self,
        *args: Any,
        breaks_on: str | None = None,
        fails_on: str | None = None,
        public_fails_at: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.breaks_on, self.fails_on, self.public_fails_at = breaks_on, fails_on, public_fails_at
        self.opened: list[dict[str, Any]] = []
        self.logit_calls = 0
        self.public_calls = 0

    def open_full(self, prompts: Sequence[str | None], prefix: Sequence[Any], **options: Any) -> FullFakeSession:
        self.opened.append({"prompts": tuple(prompts), "prefix": tuple(prefix), **options})
        return FullFakeSession(self, prompts, prefix, options["public"])

    def logits_of(self, prompt: str | None, prefix: Sequence[Any]) -> np.ndarray:
        if prompt is None or (self.fails_on and self.fails_on in prompt):
            return np.full(len(self.vocabulary()), np.nan)
        found = self._probabilities(prompt, tuple(prefix))
        chances = np.array([found.get(token, 0.0) for token in self.vocabulary()])
        with np.errstate(divide="ignore"):
            return np.log(chances) + len(prompt) % 5 / 5.0  # a constant of the row, as logits have


class FullFakeSession:
    def __init__(self, backend: FullFake, prompts: Sequence[str | None], prefix: Sequence[Any], public: str) -> None:
        self._backend, self._prompts, self._prefix, self._public = backend, prompts, list(prefix), public
        self._closed = False

    def public(self) -> np.ndarray:
        self._check()
        self._backend.public_calls += 1
        if self._backend.public_calls == self._backend.public_fails_at:
            raise RuntimeError(f"out of memory near {self._prompts}")
        return self._backend.logits_of(self._public, self._prefix)

    def logits(self, columns: np.ndarray | None = None) -> np.ndarray:
        self._check()
        self._backend.logit_calls += 1
        if self._backend.breaks_on and any(self._backend.breaks_on in (prompt or "") for prompt in self._prompts):
            raise ValueError(f"cannot read {self._prompts}")
        rows = [self._backend.logits_of(prompt, self._prefix) for prompt in self._prompts]
        full = np.array(rows).reshape(len(rows), len(self._backend.vocabulary()))
        return full if columns is None else full[:, columns]

    async def apublic(self) -> np.ndarray:
        await asyncio.sleep(0)
        return self.public()

    async def alogits(self, columns: np.ndarray | None = None) -> np.ndarray:
        await asyncio.sleep(0)
        return self.logits(columns)

    def push(self, token: Any) -> None:
        self._check()
        self._prefix.append(token)

    def close(self) -> None:
        self._closed, self._prompts = True, ()

    def _check(self) -> None:
        if self._closed:
            raise ConfigurationError("closed")


def full_engine(**options: Any) -> FullFake:
    return FullFake(word_copier(WORDS), vocabulary=WORDS, **options)


def same_coins(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Gives every room that draws the same coins, from the start."""
    coins: SecureRandom = RepeatableCoins(seed)
    for room in (blocks, curator):
        monkeypatch.setattr(room, "SYSTEM_RANDOM", coins)
    monkeypatch.setattr(curator, "is_certified", lambda _: True)
