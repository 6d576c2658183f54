"""Maps a generation mechanism's name and parameters to the release plan of one token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from langchain_dpicl.options.rows import LogitNoise, Noise
from langchain_dpicl.privacy._validate import Adjacency, check_choice, check_int, check_positive, check_real, fail
from langchain_dpicl.privacy.extensions.logit_sums import LOGIT_MECHANISMS, ClippedDifferenceMean, logit_sum
from langchain_dpicl.privacy.extensions.registry import MECHANISMS, mechanism_by_name
from langchain_dpicl.privacy.extensions.sparse_vector import SparseVectorTest
from langchain_dpicl.privacy.mechanisms.bounded import Aggregation
from langchain_dpicl.privacy.mechanisms.noise import GumbelMechanism
from langchain_dpicl.privacy.mechanisms.release_plan import ReleasePlan
from langchain_dpicl.privacy.mechanisms.sampling import Sampler
from langchain_dpicl.privacy.mechanisms.vote_sums import ProbabilitySum

__all__ = [
    "LOGIT_MECHANISMS",
    "TOKEN_MECHANISMS",
    "TokenRule",
    "public_margin",
    "release_plan",
    "temperature_of",
]

TOKEN_MECHANISMS: tuple[str, ...] = (*MECHANISMS, *LOGIT_MECHANISMS)
"""Every mechanism that releases tokens, the default first."""
DEFAULT_TEMPERATURE = 1.0
TEST_SHARE = 0.25
"""Cost of one run of the test for free tokens, relative to the private token that ends it (both in zCDP)."""


@dataclass(frozen=True, slots=True)
class TokenRule:
    """A mechanism of generation with its own parameters; frozen and public.

    Attributes:
      mechanism: one of `TOKEN_MECHANISMS`.
      clip: largest magnitude of a (centred) logit or difference; None: computed from temperature and noise.
      temperature: of the released token's softmax; None: 1, or with `clip` computed from clip and noise.
      blend_weight: share of the private rows in the score, for "clip_and_blend"; None: one half.
      center: what is subtracted from a row before clipping: "max" or "none" for "clip_and_blend"; fixed for the others.
      free_tokens: share of the rows in (0, 1): where the total variation between the mean of the rows' next-token
        distributions and the public one is (noisily) below it, the token is drawn from the public one and costs
        nothing. None: every token is private.
      private_tokens: with `free_tokens`, how many tokens of a sample may be private; the rest is public.

    Source: Bhusal et al. (2025); InvisibleInk (2025); docs/proofs/logit-sums.md.
    """

    mechanism: str = "gumbel"
    clip: float | None = None
    temperature: float | None = None
    blend_weight: float | None = None
    center: str | None = None
    free_tokens: float | None = None
    private_tokens: int | None = None

    def __post_init__(self) -> None:
        check_choice("mechanism", self.mechanism, TOKEN_MECHANISMS)
        options = {"clip": self.clip, "blend_weight": self.blend_weight, "center": self.center}
        options |= {"free_tokens": self.free_tokens, "private_tokens": self.private_tokens}
        if not self.is_logit:
            options["temperature"] = self.temperature
            _refuse(options, f"None with mechanism={self.mechanism!r} (they belong to {', '.join(LOGIT_MECHANISMS)})")
            return
        if self.mechanism != "clip_and_blend":
            blend = {"blend_weight": self.blend_weight, "center": self.center}
            _refuse(blend, f"None with mechanism={self.mechanism!r} (they belong to clip_and_blend)")
        if self.clip is not None:
            check_real("clip", self.clip, low=1e-6, high=1e6)
        if self.temperature is not None:
            check_positive("temperature", self.temperature)
        if self.blend_weight is not None:
            check_real("blend_weight", self.blend_weight, low=0.0, high=1.0, low_open=True)
        if self.center is not None:
            check_choice("center", self.center, ("max", "none"))
        if (self.free_tokens is None) != (self.private_tokens is None):
            raise fail("free_tokens, private_tokens", "both or neither", (self.free_tokens, self.private_tokens))
        if self.free_tokens is not None:
            check_real("free_tokens", self.free_tokens, low=0.0, high=1.0, low_open=True, high_open=True)
            check_int("private_tokens", self.private_tokens, low=1)

    @classmethod
    def of(cls, noise: Noise | LogitNoise, temperature: float | None) -> TokenRule:
        """Returns the rule of `noise=`; the temperature is a logit mechanism's own, and otherwise the decoder's."""
        if not isinstance(noise, LogitNoise):
            return cls(noise.mechanism or "gumbel")
        return cls(
            noise.mechanism,
            clip=noise.clip,
            temperature=temperature,
            blend_weight=noise.blend_weight,
            center=noise.center,
            free_tokens=noise.free_below,
            private_tokens=noise.max_private_tokens,
        )

    @property
    def is_logit(self) -> bool:
        """Whether rows are logits."""
        return self.mechanism in LOGIT_MECHANISMS

    @property
    def fixes_noise(self) -> bool:
        """Whether clip and temperature are both given, so that the noise multiplier follows from them."""
        return self.clip is not None and self.temperature is not None

    def plan(
        self,
        sampler: Sampler,
        *,
        num_rows: int,
        noise_multiplier: float,
        adjacency: Adjacency = "add_remove",
        redraw_every: int = 1,
    ) -> ReleasePlan:
        """Returns the plan of one token at this noise; `num_rows` is what means are divided by."""
        if not self.is_logit:
            return release_plan(
                sampler,
                mechanism=self.mechanism,
                noise_multiplier=noise_multiplier,
                adjacency=adjacency,
                redraw_every=redraw_every,
            )
        unit = self._range_of(1.0, sampler, num_rows, adjacency)  # the range grows in proportion to the clip
        if self.clip is not None and self.temperature is not None:
            # temperature = noise_multiplier * range, and the range is unit * clip: two of the three decide the third.
            noise_multiplier = self.temperature / (unit * self.clip)
        clip = self.clip
        if clip is None:
            clip = min(1e6, max(1e-6, (self.temperature or DEFAULT_TEMPERATURE) / (unit * noise_multiplier)))
        return ReleasePlan(
            sampler,
            self._aggregation(clip, num_rows),
            GumbelMechanism(noise_multiplier),
            adjacency,
            redraw_every,
            test=self._test(noise_multiplier),
            private_releases=self.private_tokens or 0,
        )

    def _test(self, noise_multiplier: float) -> SparseVectorTest | None:
        """Returns the test whose run costs `TEST_SHARE` of a private token: 2 / n^2 against (1 / noise)^2 / 8."""
        if self.free_tokens is None:
            return None
        return SparseVectorTest(self.free_tokens, min(1e12, 4.0 * noise_multiplier / math.sqrt(TEST_SHARE)))

    def _range_of(self, clip: float, sampler: Sampler, num_rows: int, adjacency: Adjacency) -> float:
        bound = self._aggregation(clip, num_rows).sensitivity(row_shape=sampler.row_shape, adjacency=adjacency)
        return bound.require("range")

    def _aggregation(self, clip: float, num_rows: int) -> Aggregation:
        return logit_sum(
            self.mechanism, clip=clip, num_slots=num_rows, blend_weight=self.blend_weight, center=self.center
        )


def release_plan(
    sampler: Sampler,
    *,
    mechanism: str = "gumbel",
    noise_multiplier: float = 1.0,
    adjacency: Adjacency = "add_remove",
    redraw_every: int = 1,
) -> ReleasePlan:
    """Returns the plan that releases a token from summed next-token probabilities."""
    noise = mechanism_by_name(mechanism)(noise_multiplier=noise_multiplier)
    return ReleasePlan(sampler, ProbabilitySum(), noise, adjacency, redraw_every)


def temperature_of(plan: ReleasePlan) -> float | None:
    """Returns the temperature of the released token's softmax; None where rows are no logits."""
    if not plan.aggregation.needs_public:
        return None
    return plan.mechanism.noise_multiplier * plan.sensitivity.require("range")


def public_margin(plan: ReleasePlan) -> float:
    """Returns how far below the last of the public top-K a candidate may be: 2 clip / num_slots (Top-k+), or 0.

    Where differences are added to the public logits, one row moves a score by at most clip / num_slots either way, so
    these are the tokens that one row can lift among the top K. Which constant belongs here does not touch privacy: the
    candidates are a function of the public logits.

    Source: InvisibleInk (2025), Top-k+; its published package divides by num_slots + 1.
    """
    aggregation = plan.aggregation
    return 2.0 * aggregation.clip / aggregation.num_slots if isinstance(aggregation, ClippedDifferenceMean) else 0.0


def _refuse(options: dict[str, Any], expected: str) -> None:
    wrong = [name for name, value in options.items() if value is not None]
    if wrong:
        raise fail(", ".join(wrong), expected, [options[name] for name in wrong])
