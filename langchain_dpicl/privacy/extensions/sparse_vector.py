"""AboveThreshold: asks whether the private rows are far from the public distribution.

"No" may be said any number of times for the price of one run, and what follows a "no" is public. The first "yes"
ends the run. Everything is counted in whole steps of 2^-32 rows, noise included. Proof: docs/proofs/sparse-vector.md.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, final

import numpy as np
import numpy.typing as npt

from langchain_dpicl._opaque import Opaque, this_process
from langchain_dpicl.exceptions import ConfigurationError, LedgerError, PrivacyBudgetError
from langchain_dpicl.privacy._validate import check_int, check_real, fail
from langchain_dpicl.privacy.accounting.events import ComposedEvent, Event, PureEvent, RepeatedEvent
from langchain_dpicl.privacy.extensions.logit_sums import ClippedDifferenceMean, ClippedLogitMean
from langchain_dpicl.privacy.mechanisms.bounded import GRID, LARGEST, ClosedClass, Floats, NamedPart, ProbabilitySum
from langchain_dpicl.privacy.mechanisms.randomness import Coins, SecureRandom
from langchain_dpicl.privacy.mechanisms.release_plan import ReleasePlan

_STEPS = int(GRID)
# The noise is rounded up by more than the rounding of the event can take away.
_ROUND_UP = 1 + Fraction(1, 2**50)
# Rows are cleaned in chunks of so many numbers, which stay in a processor's cache.
_CHUNK = 2**16


@final
class Threshold(Opaque, ClosedClass):
    """One run: a noisy threshold that is kept until something is above it. Made by `SparseVectorTest.start`.

    Formal guarantees:
      - Each question has fresh noise; all questions of a run meet one noisy threshold.
      - After "above" the noisy threshold is gone and every further question is refused, also with several threads.
      - Another process than the one that started it is refused: two answers never come from one threshold by a fork.
      - It is in no repr, and neither copied nor pickled.
    """

    __slots__ = ("_height", "_home", "_lock", "_scale")

    def __init__(self, height: int, scale: int) -> None:
        self._height: int | None = height
        self._scale = scale
        self._lock = threading.Lock()
        self._home = this_process()

    @property
    def is_spent(self) -> bool:
        """True after the answer "above", which is public."""
        return self._height is None

    def is_above(self, statistic: float, *, rng: SecureRandom) -> bool:
        """Asks one question.

        Args:
          statistic: what `SparseVectorTest.statistic` returned, in rows; private.
          rng: source of coins.

        Returns:
          Whether the statistic is above the threshold, both noisy. True ends the run.

        Raises:
          PrivacyBudgetError: the run has ended before.
          LedgerError: another process started the run.
        """
        if this_process() != self._home:
            del statistic  # an error that escapes shows this frame
            raise LedgerError("threshold: expected the process that started it, found a fork. Reserve anew there.")
        with self._lock:
            if self._height is None:
                del statistic
                raise PrivacyBudgetError(
                    'threshold: expected an open run, found one ended by "above". Start another run.'
                )
            is_above = _steps(statistic) + rng.geometric(self._scale) >= self._height
            if is_above:
                self._height = None
        return is_above


@final
@dataclass(frozen=True, slots=True)
class SparseVectorTest(NamedPart):
    """Asks again and again whether rows are far from a public distribution, and pays for the answers "yes" alone.

    Formal guarantees:
      - `statistic` is half the L1 norm of the sum of (row - public), over rows cleaned as by `ProbabilitySum`; a row
        without any mass counts as the public distribution itself. Divided by the number of rows it is the total
        variation distance between the mean of the rows and the public distribution.
      - It moves by at most 1 where a row changes, appears or vanishes, under both adjacencies, exactly, as computed in
        float64, for up to 2^20 rows.
      - One run, from `start` to its first "above" or to its end without one, is `event`: pure, with epsilon =
        2 / noise_multiplier, for questions chosen adaptively. Its coins are exact: `implementation_delta` is 0.
      - r runs, each followed by one private token of event e once it has answered "above", cost
        `ComposedEvent((RepeatedEvent(event, r), RepeatedEvent(e, r)))` on one secret sample, amplified once as a
        block. r is public and counts runs that were started, also the last one that never answered "above"; after
        r private tokens no run is started and all further tokens are public.

    The noisy threshold is threshold * num_rows + E(noise_multiplier), and a question adds E(2 noise_multiplier) to its
    statistic, where E(b) is exponential of mean b, in rows, on a grid of 2^-32. A public constant is added to the
    threshold, such that a statistic that equals it is above with probability 1/2 at the first question.

    Args:
      threshold: share of the rows in (0, 1): a total variation distance.
      noise_multiplier: mean of the threshold's noise, in rows, in [1e-9, 1e12].

    Raises:
      ConfigurationError: a parameter out of range.

    >>> SparseVectorTest(threshold=0.5, noise_multiplier=4.0).event
    PureEvent(epsilon=0.5)

    Source: Amin et al. (2024), Private prediction for large-scale synthetic text generation, section on public tokens;
      Dwork and Roth (2014), Algorithm 1; Lyu, Su and Li (2017), Algorithm 1; exponential noise: Liu et al. (2024),
      Unleash the Power of Ellipsis; docs/proofs/sparse-vector.md.
    """

    threshold: float
    noise_multiplier: float
    name: ClassVar[str] = "sparse_vector"
    kind: ClassVar[Coins] = "geometric"

    def __post_init__(self) -> None:
        checked = check_real("threshold", self.threshold, low=0.0, high=1.0, low_open=True, high_open=True)
        object.__setattr__(self, "threshold", checked)
        noise = check_real("noise_multiplier", self.noise_multiplier, low=1e-9, high=1e12)
        object.__setattr__(self, "noise_multiplier", noise)

    @property
    def event(self) -> PureEvent:
        """The event of one run: any number of answers "below", and at most one "above"."""
        return PureEvent(2.0 / self.noise_multiplier)

    def with_releases(self, event: Event, runs: int) -> Event:
        """Returns the event of `runs` runs, each followed by one release of `event`."""
        return ComposedEvent((RepeatedEvent(self.event, runs), RepeatedEvent(event, runs)))

    def runs(self, plan: ReleasePlan) -> SparseVectorRuns:
        """Returns the runs of this test for one secret sample of a plan."""
        return SparseVectorRuns(self, plan)

    def statistic(self, rows: npt.NDArray[Any], public: npt.NDArray[Any]) -> float:
        """Returns how far the rows are from the public distribution, in rows; private.

        Args:
          rows: real[n, d] private probabilities, one row per slot or per included unit; n may be 0. No values raise.
          public: real[d] public probabilities of the same columns.

        Raises:
          ConfigurationError: a shape, width or dtype that the engine must not return; `public` without any mass.
        """
        base = _public_row(public)  # [d]
        total, present = np.zeros(base.size), 0
        with np.errstate(all="ignore"):
            for chunk in _chunks(np.asarray(rows), base.size):
                cleaned = ProbabilitySum().bounded_rows(chunk, width=base.size)
                present += int(np.count_nonzero(cleaned.any(axis=1)))
                total += cleaned.sum(axis=0)
        return float(np.abs(total - present * base).sum()) / 2.0

    def start(self, num_rows: int, *, rng: SecureRandom) -> Threshold:
        """Starts a run: draws a fresh noisy threshold.

        Args:
          num_rows: public number of rows: of slots, or the expected number of unit rows. Never the realised one.
          rng: source of coins.

        Raises:
          ConfigurationError: `num_rows` out of range.
        """
        rows = check_int("num_rows", num_rows, low=1, high=int(LARGEST))
        scale = math.ceil(Fraction(self.noise_multiplier) * _STEPS * _ROUND_UP)
        # At the threshold, P[2 b E > b E' + c] = (2/3) exp(-c / 2b) is one half for c = 2b ln(4/3).
        middle = int(2 * scale * math.log(4 / 3))
        height = math.floor(Fraction(self.threshold) * rows * _STEPS) + middle + rng.geometric(scale)
        return Threshold(height, 2 * scale)

    def implementation_delta(self, num_questions: int) -> float:
        """Returns what one run of so many questions may add to delta: nothing, its coins are exact."""
        return SecureRandom.implementation_delta(self.kind, check_int("num_questions", num_questions, low=1) + 1)


class SparseVectorRuns(Opaque):
    """The runs of a plan's test on one secret sample, in however many blocks it is read; shows nothing.

    Formal guarantees:
      - At most `plan.private_releases` runs start, and a run that started counts, whatever stops it: a block that goes
        on after a stop goes on in the same run.
    """

    def __init__(self, test: SparseVectorTest, plan: ReleasePlan) -> None:
        if not isinstance(plan.aggregation, ClippedLogitMean | ClippedDifferenceMean):
            raise ConfigurationError("aggregation: expected a mean over a public count, found a sum.")
        self._test = test
        self._left = plan.private_releases
        self._num_rows = plan.aggregation.num_slots
        self._threshold: Threshold | None = None

    @property
    def are_over(self) -> bool:
        """Whether all private releases that were paid for have been made; public."""
        return self._left <= 0 and (self._threshold is None or self._threshold.is_spent)

    def are_far(self, rows: npt.NDArray[Any], public: npt.NDArray[Any], *, rng: SecureRandom) -> bool:
        """Asks whether the rows are far from the public distribution; a "yes" ends the run that was paid for.

        Args:
          rows: real[n, d] private probabilities.
          public: real[d] public probabilities of the same columns.
          rng: source of coins.

        Raises:
          PrivacyBudgetError: no run is left of those that were paid for.
        """
        if self._threshold is None or self._threshold.is_spent:
            if self._left <= 0:
                raise PrivacyBudgetError("test: expected a run still paid for, found none left. Reserve another block.")
            self._left -= 1
            self._threshold = self._test.start(self._num_rows, rng=rng)
        return self._threshold.is_above(self._test.statistic(rows, public), rng=rng)


def _steps(statistic: float) -> int:
    """Returns whole steps, rounded down; what no statistic can be (NaN, negatives, huge numbers) is cut."""
    return math.floor(min(max(0.0, statistic), LARGEST) * GRID)


def _public_row(public: npt.NDArray[Any]) -> Floats:
    """Returns float64[d], cleaned like any row; faults are public."""
    array = np.asarray(public)
    if array.ndim != 1:
        raise fail("public", "a real array of shape (d,)", f"{array.ndim} dimensions")
    base: Floats = ProbabilitySum().bounded_rows(array[np.newaxis], width=array.size)[0]
    if not base.any():
        advice = "The public prompt needs an answer; check the engine."
        raise fail("public", "probabilities with some mass", "none", advice)
    return base


def _chunks(rows: npt.NDArray[Any], width: int) -> list[npt.NDArray[Any]]:
    """Returns the rows, a few at a time; another number of dimensions is left to the check of rows."""
    if rows.ndim != 2:
        return [rows]
    step = max(1, _CHUNK // width)
    return [rows[start : start + step] for start in range(0, rows.shape[0], step)]
