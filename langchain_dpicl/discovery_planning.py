"""Plans, calibrates and prices one release of counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy._validate import Adjacency, check_delta, check_epsilon, fail
from langchain_dpicl.privacy.accounting.events import ComposedEvent, Event, FailureEvent, PureEvent
from langchain_dpicl.privacy.count_margins import least_count, noise_margin
from langchain_dpicl.privacy.extensions.count_histograms import (
    MAX_THRESHOLD,
    CountPlan,
    DiscreteLaplaceMechanism,
)
from langchain_dpicl.privacy.tickets import Ticket
from langchain_dpicl.privacy.unit_values import UnitValues

# Fraction of the share's delta for the threshold; the noise needs hardly any of it.
_FOR_THRESHOLD = 0.99


@dataclass(frozen=True, slots=True)
class DiscoveryPlan:
    """The public plan of one release of counts: the release, its ticket and what it can find.

    Formal guarantees:
      - `tickets()` hold the one ticket of `release`; it is (epsilon, delta)-DP under `release.adjacency`.

    Attributes:
      release: what a unit counts for, noise, threshold and adjacency.
      epsilon: upper bound at `delta`.
      delta: the share's delta, that of the threshold included.
      partition: the `dataset_id` of the examples.
    """

    release: CountPlan
    epsilon: float
    delta: float
    partition: str

    @property
    def implementation_delta(self) -> float:
        """Declared gap between ideal and drawn noise: 0, the sampler is exact."""
        return 0.0

    @property
    def threshold(self) -> int | None:
        """Least noisy count that is released; None for declared values."""
        return self.release.mechanism.threshold

    @property
    def threshold_delta(self) -> float:
        """The threshold's part of delta; 0 for declared values."""
        event = self.release.event
        parts = event.events if isinstance(event, ComposedEvent) else ()
        return math.fsum(part.delta for part in parts if isinstance(part, FailureEvent))

    @property
    def deviation(self) -> float:
        """Standard deviation of a count, in units."""
        rate = float(1 / self.release.scale)
        return math.sqrt(2.0 * math.exp(-rate)) / -math.expm1(-rate)

    def tickets(self) -> tuple[Ticket, ...]:
        """Returns the one ticket of the share."""
        return self.release.tickets()

    def event(self) -> Event:
        """Returns the event of the release."""
        return self.release.event

    def margin(self, confidence: float) -> int:
        """Returns a bound on how far a noisy count is above (or below) the true one, with probability `confidence`."""
        return noise_margin(self.release.scale, confidence)

    def found_from(self, confidence: float = 0.95) -> int | None:
        """Returns how many units must hold a value to find it with this probability; None for declared values."""
        return None if self.threshold is None else self.threshold + self.margin(confidence)

    def to_dict(self) -> dict[str, Any]:
        """Returns the public plan as JSON values."""
        return {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "adjacency": self.release.adjacency,
            "counts": self.release.to_dict(),
            "noise_multiplier": self.release.mechanism.noise_multiplier,
            "threshold_delta": self.threshold_delta,
        }


def plan_discovery(
    field: str | None,
    *,
    values: Sequence[str] | None = None,
    max_values: int = 1,
    fold_case: bool = True,
    epsilon: float | None,
    delta: float,
    adjacency: Adjacency = "add_remove",
    noise_multiplier: float | None = None,
    partition: str = "private-examples",
) -> DiscoveryPlan:
    """Chooses noise and threshold for one release of counts.

    Args:
      field: of the records; None counts units.
      values: the declared values; None: unknown, and values that pass a threshold are found.
      max_values: maximum number of values of one unit.
      fold_case: whether values are compared without case.
      epsilon: target of the calibration, and bound of a given noise.
      delta: the share's delta; for unknown values, most of it goes to the threshold.
      adjacency: neighbouring relation.
      noise_multiplier: scale of the noise over the L1 sensitivity, instead of calibrating.
      partition: the `dataset_id` of the examples.

    Raises:
      ConfigurationError: an argument out of range, or the noise costs more than epsilon.

    >>> plan = plan_discovery("director", epsilon=1.0, delta=1e-6)
    >>> plan.threshold, plan.found_from(0.95)
    (15, 17)
    """
    check_delta(delta)
    declared = None if values is None else tuple(values)
    rule = UnitValues(field, max_values, declared, fold_case)
    is_unknown = field is not None and declared is None
    failure = delta * _FOR_THRESHOLD if is_unknown else 0.0
    if noise_multiplier is None:
        if epsilon is None:
            raise fail("epsilon, noise_multiplier", "one of them", (None, None))
        noise_multiplier = accounting.calibrate(
            lambda noise: _event(noise, failure), epsilon=check_epsilon(epsilon), delta=delta, adjacency=adjacency
        )
    threshold = None
    if is_unknown:
        scale = DiscreteLaplaceMechanism(noise_multiplier).scale(rule.l1_sensitivity(adjacency))
        # Rounding up the sum of the chances of several values may take one more.
        threshold = 1 + least_count(scale, failure / max_values * (1.0 - 1e-6))
        if threshold > MAX_THRESHOLD:
            raise fail("delta", f"one that a threshold up to {MAX_THRESHOLD} gives", delta, "Ask for less noise.")
    release = CountPlan(rule, DiscreteLaplaceMechanism(noise_multiplier, threshold), adjacency)
    cost = accounting.epsilon_upper_bound(release.event, delta=delta, adjacency=adjacency)
    if epsilon is not None and cost > epsilon:
        raise fail("noise_multiplier", f"one that costs at most epsilon {epsilon:g}", noise_multiplier, "Raise it.")
    return DiscoveryPlan(release, cost, delta, partition)


def _event(noise_multiplier: float, failure: float) -> Event:
    # The failure event is the probability that a value of one unit alone passes the threshold.
    noisy = PureEvent(1.0 / noise_multiplier)
    return ComposedEvent((noisy, FailureEvent(failure))) if failure else noisy
