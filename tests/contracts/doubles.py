"""Sources of coins for tests only. The curator refuses them."""

from __future__ import annotations

import random
from collections.abc import Iterable
from fractions import Fraction

import numpy as np

from langchain_dpicl.privacy.mechanisms.randomness import SecureRandom


class CountingRandom(SecureRandom):
    """Real entropy, and a count of the bytes that were asked for."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def entropy(self, num_bytes: int) -> bytes:
        self.num_bytes += num_bytes
        return super().entropy(num_bytes)


class SeededRandom(SecureRandom):
    """The same coins again: two objects of one seed couple two runs."""

    def __init__(self, seed: int) -> None:
        self._source = random.Random(seed)

    def entropy(self, num_bytes: int) -> bytes:
        return self._source.randbytes(num_bytes)


class ScriptedRandom(SecureRandom):
    """Hands out the given 64-bit words in order, and fails when they run out."""

    def __init__(self, words: Iterable[int]) -> None:
        self.words = list(words)

    def entropy(self, num_bytes: int) -> bytes:
        count, rest = divmod(num_bytes, 8)
        assert rest == 0
        assert count <= len(self.words), "the script has run out of words"
        taken, self.words = self.words[:count], self.words[count:]
        return np.array(taken, dtype=np.uint64).tobytes()


class FixedDraws:
    """Normal draws that are exactly these floats."""

    def __init__(self, values) -> None:
        self.values = np.asarray(values, dtype=np.float64)

    def is_below(self, i: int, bound: Fraction) -> bool:
        return Fraction(float(self.values[i])) < bound


class FixedNoise(SecureRandom):
    """Returns the same given noise vector from every noise door, and records how often it was asked."""

    def __init__(self, noise: Iterable[float] | None = None) -> None:
        self.noise = None if noise is None else np.array(list(noise), dtype=np.float64)
        self.asked: list[tuple[str, int]] = []

    def _give(self, kind: str, n: int):
        self.asked.append((kind, n))
        return np.zeros(n) if self.noise is None else self.noise.copy()

    def gaussian_draws(self, n: int):
        return FixedDraws(self._give("gaussian", n))

    def gumbel(self, n: int):
        return self._give("gumbel", n)

    def exponential(self, n: int):
        return self._give("exponential", n)


class RecordingRandom(SecureRandom):
    """Real entropy; keeps the positions and slots that a sampler was given."""

    def __init__(self) -> None:
        self.chosen: list[list[int]] = []
        self.slots: list[list[int]] = []

    def choice_without_replacement(self, n: int, k: int):
        out = super().choice_without_replacement(n, k)
        self.chosen.append(out.tolist())
        return out

    def integers(self, high: int, n: int):
        out = super().integers(high, n)
        self.slots.append(out.tolist())
        return out
