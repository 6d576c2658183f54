"""Test doubles that the package itself must never meet: engines that spy, coins that repeat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from langchain_dpicl.backends.fake import FakeBackend
from langchain_dpicl.privacy.mechanisms.randomness import SecureRandom

WORDS = [" my", " card", " was", " declined", " transfer", " is", " late", " top", " up", " failed"]


class PanicError(BaseException):
    """What extensions in other languages raise when they panic."""


class SpyBackend(FakeBackend):
    """Remembers every private prompt it was shown (never do this outside a test)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.private_prompts: list[tuple[str, ...]] = []

    def open(self, prompts: Sequence[str], prefix: Sequence[Any]) -> Any:
        self.private_prompts.append(tuple(prompts))
        return super().open(prompts, prefix)


class RepeatableCoins(SecureRandom):
    """Coins from a seed: the same draws for a data set and its neighbour. Not certified."""

    certified = False

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def entropy(self, num_bytes: int) -> bytes:
        return self._generator.bytes(num_bytes)
