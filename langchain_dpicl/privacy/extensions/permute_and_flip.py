"""Permute-and-flip: the argmax of a sum plus exponential noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, final

from langchain_dpicl.privacy.accounting.events import PureEvent
from langchain_dpicl.privacy.mechanisms.bounded import BoundedSum, Norm
from langchain_dpicl.privacy.mechanisms.randomness import Coins, Noise, SecureRandom
from langchain_dpicl.privacy.mechanisms.release_plan import NoisyMax, Release


@final
@dataclass(frozen=True, slots=True)
class PermuteAndFlipMechanism(NoisyMax):
    """Releases the argmax of a sum plus exponential noise, which is permute-and-flip.

    Formal guarantees:
      - `index` has the law of permute-and-flip at scale noise_multiplier * range.
      - The event is `PureEvent(1 / noise_multiplier)`; within `implementation_delta` of it.

    Args:
      noise_multiplier: exponential scale over the range of a neighbour's change, in [1e-9, 1e12].

    Raises:
      ConfigurationError: `noise_multiplier` out of range.

    Source: McKenna and Sheldon (2020); Ding, Kifer et al. (2021); docs/proofs/gumbel.md.
    """

    noise_multiplier: float
    name: ClassVar[str] = "permute_and_flip"
    norm: ClassVar[Norm] = "range"
    kind: ClassVar[Noise | Coins] = "exponential"
    releases: ClassVar[Literal["vector", "index", "indices"]] = "index"

    @property
    def event(self) -> PureEvent:
        """The event of one release."""
        return PureEvent(1.0 / self.noise_multiplier)

    def release(self, total: BoundedSum, *, rng: SecureRandom) -> Release:
        """Chooses the noisy best coordinate; see `GumbelMechanism.release`."""
        return self._choose(total, rng.exponential)
