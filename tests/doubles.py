"""Test doubles that the package itself must never meet: engines that spy, coins that repeat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from langchain_dpicl.backends.fake import FakeBackend
from langchain_dpicl.privacy.mechanisms.randomness import SecureRandom
from langchain_dpicl.privacy.mechanisms.release_plan import ReleasePlan

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
    """Coins from a seed: the same draws for a data set and its neighbour."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def entropy(self, num_bytes: int) -> bytes:
        return self._generator.bytes(num_bytes)


def sums_before_noise(run: Callable[..., object], *given: Any, **options: Any) -> list[np.ndarray[Any, Any]]:
    """The sums of the releases of a run, before their noise."""
    found: list[Any] = []
    real = ReleasePlan.bound

    def watched(plan: Any, rows: Any, *, width: int) -> Any:
        total = real(plan, rows, width=width)
        found.append(np.asarray(total.value))
        return total

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReleasePlan, "bound", watched)
        run(*given, **options)
    return found
