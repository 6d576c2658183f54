"""Confident-GNMax: a noisy threshold first, then a noisy argmax.

Both questions are Gaussian and have an event each, so a ticket may be kept for every test and another for every
answer. No price depends on the votes. Proof: docs/proofs/confident-gnmax.md.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal, final

import numpy as np

from langchain_dpicl.privacy._validate import Adjacency, RowShape, check_int, check_positive, check_real, fail
from langchain_dpicl.privacy.accounting.events import GaussianEvent
from langchain_dpicl.privacy.mechanisms.bounded import (
    LARGEST,
    Aggregation,
    BoundedSum,
    Floats,
    Norm,
    Sensitivity,
    VoteSum,
)
from langchain_dpicl.privacy.mechanisms.randomness import Coins, Noise, SecureRandom
from langchain_dpicl.privacy.mechanisms.release_plan import ROUND_UP, Mechanism, Release, grid_step, rounded


@functools.lru_cache(maxsize=256)
def _compose_tests(test: float, answer: float, tests: int, answers: int) -> GaussianEvent:
    """Returns the event of so many tests and answers: the largest float s with s^2 (tests/t^2 + answers/a^2) <= 1."""
    spent = tests / Fraction(test) ** 2 + answers / Fraction(answer) ** 2
    found = 1.0 / math.sqrt(spent)
    for _ in range(4):  # four units up, more than the two roundings above; then down to the side that is not cheaper
        found = math.nextafter(found, math.inf)
    while Fraction(found) ** 2 * spent > 1:
        found = math.nextafter(found, 0.0)
    return GaussianEvent(found)


@final
@dataclass(frozen=True, slots=True)
class ConfidentGNMaxMechanism(Mechanism):
    """Answers with the noisy best coordinate where a noisy largest one passes a threshold, and not at all elsewhere.

    Formal guarantees:
      - The test is `max(total.value) + N(0, (test_noise_multiplier * linf)^2) >= threshold`. Passed, `index` is the
        argmax of `total.value + N(0, (noise_multiplier * l2)^2 I)`, of fresh noise; failed, `index` is None and the
        second noise is never drawn. Both noisy sums are rounded to a public grid first, as by `GaussianMechanism`.
      - A test costs `test_event`, an answer `answer_event` more, whatever the votes are; `event` bounds one release
        with either outcome.
      - `repeated(tests, answers)` bounds any adaptive run of at most so many of each on the same rows.
      - Coordinates beyond 2^20 in magnitude, which no sum of up to 2^20 rows has, are cut to it before the noise.

    Args:
      noise_multiplier: standard deviation of the answer's noise over the L2 sensitivity, in [1e-9, 1e12].
      test_noise_multiplier: standard deviation of the test's noise over the linf sensitivity, in [1e-9, 1e12].
      threshold: what the largest coordinate has to reach, in the sum's own unit (votes), up to 2^20 in magnitude.

    Raises:
      ConfigurationError: a parameter out of range.

    >>> ConfidentGNMaxMechanism(10.0, 5.0, threshold=120.0).test_event
    GaussianEvent(noise_multiplier=5.0)

    Source: Papernot et al. (2018), Scalable Private Learning with PATE, Algorithm 1, with data-independent prices;
      docs/proofs/confident-gnmax.md.
    """

    noise_multiplier: float
    test_noise_multiplier: float
    threshold: float
    name: ClassVar[str] = "confident_gnmax"
    norm: ClassVar[Norm] = "l2"
    kind: ClassVar[Noise | Coins] = "gaussian"
    releases: ClassVar[Literal["vector", "index", "indices"]] = "index"

    def __post_init__(self) -> None:
        Mechanism.__post_init__(self)
        checked = check_real("test_noise_multiplier", self.test_noise_multiplier, low=1e-9, high=1e12)
        object.__setattr__(self, "test_noise_multiplier", checked)
        threshold = check_real("threshold", self.threshold, low=-LARGEST, high=LARGEST)
        object.__setattr__(self, "threshold", threshold)

    @classmethod
    def of_votes(
        cls,
        *,
        threshold: float,
        sigma_threshold: float,
        sigma_votes: float,
        row_shape: RowShape,
        adjacency: Adjacency,
    ) -> ConfidentGNMaxMechanism:
        """Returns the mechanism whose noises have these standard deviations, in votes.

        Args:
          threshold: votes that the largest count has to reach.
          sigma_threshold: standard deviation of the noise on the largest count.
          sigma_votes: standard deviation of the noise on every count.
          row_shape: "slots" or "units".
          adjacency: "add_remove" or "replace_one".

        Raises:
          ConfigurationError: a parameter out of range.

        >>> made = ConfidentGNMaxMechanism.of_votes(
        ...     threshold=180, sigma_threshold=5, sigma_votes=20, row_shape="units", adjacency="add_remove"
        ... )
        >>> made.noise_multiplier, made.test_noise_multiplier
        (20.0, 5.0)
        """
        votes = VoteSum().sensitivity(row_shape=row_shape, adjacency=adjacency)
        return cls(
            check_positive("sigma_votes", sigma_votes) / votes.require("l2"),
            check_positive("sigma_threshold", sigma_threshold) / votes.require("linf"),
            threshold,
        )

    @property
    def test_event(self) -> GaussianEvent:
        """The event of one test."""
        return GaussianEvent(self.test_noise_multiplier)

    @property
    def answer_event(self) -> GaussianEvent:
        """The event of one answer, without its test."""
        return GaussianEvent(self.noise_multiplier)

    @property
    def event(self) -> GaussianEvent:
        """The event of one release, answered or not: a test and an answer."""
        return self.repeated(1)

    def repeated(self, length: int, answers: int | None = None) -> GaussianEvent:
        """Returns the event of `length` tests, of which at most `answers` are answered; None: all of them.

        Raises:
          ConfigurationError: a count out of range.
        """
        tests = check_int("tests", length, low=1)
        found = tests if answers is None else check_int("answers", answers, low=0, high=tests)
        return _compose_tests(self.test_noise_multiplier, self.noise_multiplier, tests, found)

    def check_sum(self, aggregation: Aggregation, sensitivity: Sensitivity, constants: tuple[float, ...]) -> None:
        """Refuses sums whose largest coordinate is no count of agreement."""
        if sensitivity.linf is None:
            advice = "A threshold needs a bound on the largest coordinate."
            raise fail("aggregation", "vote_sum or probability_sum for confident_gnmax", aggregation.name, advice)
        if constants:
            advice = "The threshold itself says when there is no answer."
            raise fail("constants", "none beside confident_gnmax", constants, advice)

    def implementation_delta(self, d: int) -> float:
        """Returns what one release over `d` candidates may add to delta: d draws for the answer, one for the test."""
        return SecureRandom.implementation_delta(self.kind, check_int("d", d, low=1) + 1)

    def release(self, total: BoundedSum, *, rng: SecureRandom) -> Release:
        """Tests, and answers if the test is passed.

        Args:
          total: float64[d] sum with its L2 and linf sensitivities.
          rng: source of noise.

        Returns:
          The index, or None if the threshold was not reached; the event covers both cases.

        Raises:
          SensitivityError: `total` lacks an L2 or a linf bound.
        """
        scale = self._scale(total)
        test_scale = self.test_noise_multiplier * total.sensitivity.require("linf") * ROUND_UP
        counts = np.minimum(np.maximum(total.value, -LARGEST), LARGEST)  # [d], moves no two sums apart
        if _noisy(counts.max(keepdims=True), test_scale, rng)[0] < self.threshold:
            return Release(index=None, values=None, event=self.event)
        return Release(index=int(_noisy(counts, scale, rng).argmax()), values=None, event=self.event)


def _noisy(counts: Floats, scale: float, rng: SecureRandom) -> Floats:
    """Returns float64[n]: counts with fresh normal noise, rounded to the public grid of `scale`."""
    return rounded(counts, rng.gaussian_draws(counts.size), scale, grid_step(scale))
