"""Counts of values with noise: of declared values, or of unknown ones that pass a threshold.

What is not declared may be released only because others hold it too: the noisy count of what one unit alone holds
passes the threshold with a probability that is charged. Proof: docs/proofs/value-counts.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal
from fractions import Fraction
from typing import Any, ClassVar, TypeAlias, final

import numpy as np

from langchain_dpicl.privacy._validate import Adjacency, check_adjacency, check_int, check_real, fail
from langchain_dpicl.privacy.accounting.events import (
    ComposedEvent,
    Event,
    FailureEvent,
    GaussianEvent,
    PureEvent,
    canonical_json,
)
from langchain_dpicl.privacy.extensions.unit_values import UNITS, UnitKeywords, UnitValues, _ValueLimit
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.privacy.mechanisms.bounded import BoundedSum, ClosedClass, Sensitivity
from langchain_dpicl.privacy.mechanisms.noise import GaussianMechanism
from langchain_dpicl.privacy.mechanisms.randomness import SecureRandom

Count: TypeAlias = tuple[str, int]
"""A value and how many units hold it, noise included."""

COUNT_TEMPLATE = "counts"
"""The ticket template of one release of counts."""
MAX_THRESHOLD = 2**53
MAX_SCALE = 2**40
"""Noise of this scale is beyond 2^53, which no count may be, with a probability below e^-8000."""

# Parts of a count in which the scale of the noise is given.
_STEPS = 2**20
# The scale is rounded up by more than the rounding of the event can take away.
_ROUND_UP = 1 + Fraction(1, 2**50)
# Above the roundings of the exponential below, whose argument is 800 at most where the result is no zero.
_TAIL_ROUNDING = 1.0 + 1e-12


@final
@dataclass(frozen=True, slots=True)
class DiscreteLaplaceMechanism(ClosedClass):
    """Adds two-sided geometric noise to whole counts; with a threshold, keeps what reaches it.

    Formal guarantees:
      - Noise z has probability proportional to exp(-|z| / scale), exactly, for ideal coins; scale is at least
        `noise_multiplier` times the L1 sensitivity. `implementation_delta` is 0.
      - Counts of declared values are charged as `PureEvent(1 / noise_multiplier)`.
      - With `threshold`, a value that nobody holds is never released, and one that a single unit holds is with a
        probability below `chance_alone`; `event` adds `FailureEvent(max_values * chance_alone)`.

    Args:
      noise_multiplier: scale of the noise over the L1 sensitivity, in [1e-9, 1e12].
      threshold: least noisy count that is released of values that are not declared, from 2; None: they are declared.

    Raises:
      ConfigurationError: a parameter out of range.

    Source: Ghosh, Roughgarden and Sundararajan (2009), the geometric mechanism; Korolova et al. (2009), the threshold;
      docs/proofs/value-counts.md.
    """

    noise_multiplier: float
    threshold: int | None = None
    name: ClassVar[str] = "discrete_laplace"

    def __post_init__(self) -> None:
        checked = check_real("noise_multiplier", self.noise_multiplier, low=1e-9, high=1e12)
        object.__setattr__(self, "noise_multiplier", checked)
        if self.threshold is not None:
            check_int("threshold", self.threshold, low=2, high=MAX_THRESHOLD)

    def scale(self, l1_sensitivity: int) -> Fraction:
        """Returns the scale of the noise in counts: a multiple of 2^-20, rounded up.

        Args:
          l1_sensitivity: of the counts.
        """
        steps = Fraction(self.noise_multiplier) * l1_sensitivity * _ROUND_UP * _STEPS
        return Fraction(max(1, math.ceil(steps)), _STEPS)

    def chance_alone(self, l1_sensitivity: int) -> float:
        """Returns the chance that a count of 1 reaches the threshold, rounded up to 7 digits.

        Args:
          l1_sensitivity: of the counts.

        Raises:
          ConfigurationError: there is no threshold.
        """
        if self.threshold is None:
            raise fail("threshold", "a whole number for values that are not declared", self.threshold)
        return tail_bound(self.scale(l1_sensitivity), self.threshold - 1)

    def event(self, rule: UnitValues | UnitKeywords, adjacency: Adjacency) -> Event:
        """Returns what one release costs.

        Args:
          rule: what a unit stands for.
          adjacency: neighbouring relation.

        Raises:
          ConfigurationError: the threshold does not go with the values, or is passed by anybody.
        """
        if (self.threshold is None) == (rule.declared is None and rule.name is not None):
            raise fail("threshold", "one for values that are not declared, and none for others", self.threshold)
        noisy = PureEvent(1.0 / self.noise_multiplier)
        if self.threshold is None:
            return noisy
        alone = round_up_to_7_digits(rule.max_values * self.chance_alone(rule.l1_sensitivity(adjacency)))
        if alone >= 1.0:
            raise fail("threshold", "one that a value of one unit hardly ever passes", self.threshold, "Raise it.")
        return ComposedEvent((noisy, FailureEvent(alone)))

    def release(
        self, counts: Mapping[str, int], *, declared: Iterable[str] | None, l1_sensitivity: int, rng: SecureRandom
    ) -> tuple[Count, ...]:
        """Returns values with noisy counts, the largest first; declared ones all, and in their order.

        Args:
          counts: how many units hold each value; private.
          declared: the declared values, public; None: those of `counts` that reach the threshold.
          l1_sensitivity: of the counts.
          rng: source of noise.
        """
        scale = self.scale(l1_sensitivity)

        def noisy(count: int) -> int:
            # A multiple of the numerator's decay, floored: geometric at the quotient (Canonne, Kamath, Steinke 2020).
            up, down = (rng.geometric(scale.numerator) // scale.denominator for _ in range(2))
            return count + up - down

        if declared is not None:
            return tuple((value, noisy(counts.get(value, 0))) for value in declared)
        if self.threshold is None:
            return ()
        drawn = ((value, noisy(count)) for value, count in counts.items() if count > 0)
        found = [(value, count) for value, count in drawn if count >= self.threshold]
        # Sorted by what is released: the order in which records came would reveal them.
        return tuple(sorted(found, key=lambda pair: (-pair[1], pair[0])))

    def to_dict(self) -> dict[str, Any]:
        """Returns the public parameters, for reports."""
        return {"name": self.name, "noise_multiplier": self.noise_multiplier, "threshold": self.threshold}


def tail_bound(scale: Fraction, least: int) -> float:
    """Returns P[z >= least] of the noise for least >= 0: exp(-least / scale) / (1 + exp(-1 / scale)), rounded up.

    Args:
      scale: of the noise.
      least: in whole counts.
    """
    rate = float(1 / scale)
    return round_up_to_7_digits(math.exp(-least * rate) / (1.0 + math.exp(-rate)) * _TAIL_ROUNDING)


def round_up_to_7_digits(value: float) -> float:
    """Returns a positive number at 7 digits, so that every machine says the same of what it computed; never 0."""
    short = Context(prec=7, rounding=ROUND_CEILING).create_decimal(Decimal(max(value, 1e-200)))
    return float(short)


@final
@dataclass(frozen=True, slots=True)
class GaussianCountMechanism(ClosedClass):
    """Adds normal noise to the counts of declared values and rounds them to whole numbers.

    Formal guarantees:
      - The counts are those of `GaussianMechanism` on the vector of all counts, at their L2 sensitivity, rounded: a
        post-processing. The event is `GaussianEvent(noise_multiplier)`.
      - Every declared value gets a count, whether anybody holds it or not. Counts above 2^20 are cut to it first.

    Args:
      noise_multiplier: standard deviation of the noise over the L2 sensitivity, in [1e-9, 1e12].

    Raises:
      ConfigurationError: `noise_multiplier` out of range.

    Source: Balle and Wang (2018), Theorem 8; docs/proofs/value-counts.md, section "Keywords".
    """

    noise_multiplier: float
    threshold: ClassVar[None] = None
    name: ClassVar[str] = "gaussian"

    def __post_init__(self) -> None:
        checked = check_real("noise_multiplier", self.noise_multiplier, low=1e-9, high=1e12)
        object.__setattr__(self, "noise_multiplier", checked)

    def scale(self, rule: _ValueLimit, adjacency: Adjacency) -> Fraction:
        """Returns the standard deviation of the noise, in counts.

        Args:
          rule: what a unit stands for.
          adjacency: neighbouring relation.
        """
        return Fraction(self.noise_multiplier * rule.l2_sensitivity(adjacency))

    def event(self, declared: tuple[str, ...] | None) -> GaussianEvent:
        """Returns what one release costs.

        Args:
          declared: the values that get a count.

        Raises:
          ConfigurationError: they are not declared: Gaussian noise has no threshold here.
        """
        if declared is None:
            raise fail("values", "declared ones, of which every one gets a count", declared)
        return GaussianEvent(self.noise_multiplier)

    def implementation_delta(self, num_values: int) -> float:
        """Returns what one release may add to delta, beyond the ideal mechanism.

        Args:
          num_values: how many values are declared.
        """
        return GaussianMechanism(self.noise_multiplier).implementation_delta(check_int("num_values", num_values, low=1))

    def release(
        self,
        counts: Mapping[str, int],
        *,
        declared: Iterable[str],
        rule: _ValueLimit,
        adjacency: Adjacency,
        rng: SecureRandom,
    ) -> tuple[tuple[str, int], ...]:
        """Returns the declared values with noisy counts, in their order.

        Args:
          counts: how many units hold each value; private.
          declared: the declared values, public.
          rule: what a unit stands for; holds the sensitivity.
          adjacency: neighbouring relation.
          rng: source of noise.
        """
        names = tuple(declared)
        held = np.array([counts.get(name, 0) for name in names], dtype=np.float64)
        moved = Sensitivity(l2=rule.l2_sensitivity(adjacency), range=None)
        released = GaussianMechanism(self.noise_multiplier).release(
            BoundedSum(held, moved, "units", adjacency), rng=rng
        )
        noisy = () if released.values is None else released.values.tolist()
        return tuple((name, math.floor(count + 0.5)) for name, count in zip(names, noisy, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Returns the public parameters, for reports."""
        return {"name": self.name, "noise_multiplier": self.noise_multiplier}


_RULES = (UnitValues, UnitKeywords)
_MECHANISMS = (DiscreteLaplaceMechanism, GaussianCountMechanism)


@dataclass(frozen=True, slots=True)
class CountPlan:
    """How counts of values are released, once: what a unit stands for, noise, threshold and neighbouring relation.

    Formal guarantees:
      - `event` bounds the privacy loss of one `release`; it is computed from what runs.

    Attributes:
      rule: what a unit stands for; holds the sensitivity.
      mechanism: adds the noise; holds the threshold.
      adjacency: the neighbouring relation all of it is stated under.

    Raises:
      ConfigurationError: a part of another class, or parts that do not fit together.
    """

    rule: UnitValues | UnitKeywords
    mechanism: DiscreteLaplaceMechanism | GaussianCountMechanism
    adjacency: Adjacency

    def __post_init__(self) -> None:
        check_adjacency(self.adjacency)
        for name, kinds in (("rule", _RULES), ("mechanism", _MECHANISMS)):
            if type(getattr(self, name)) not in kinds:  # what looks like one can do anything
                expected = f"one of {[kind.__name__ for kind in kinds]}, which a proof covers"
                raise fail(name, expected, type(getattr(self, name)).__name__)
        _ = self.event
        if self.scale > MAX_SCALE:
            expected = f"noise of a scale up to {MAX_SCALE} counts"
            raise fail(
                "noise_multiplier, max_values", expected, (self.mechanism.noise_multiplier, self.rule.max_values)
            )

    @property
    def l1_sensitivity(self) -> int:
        """How far all counts together move between neighbours."""
        return self.rule.l1_sensitivity(self.adjacency)

    @property
    def scale(self) -> Fraction:
        """Scale of the noise, in counts; of Gaussian noise, its standard deviation."""
        if isinstance(self.mechanism, GaussianCountMechanism):
            return self.mechanism.scale(self.rule, self.adjacency)
        return self.mechanism.scale(self.l1_sensitivity)

    @property
    def event(self) -> Event:
        """What one release costs."""
        if isinstance(self.mechanism, GaussianCountMechanism):
            return self.mechanism.event(self.rule.declared)
        return self.mechanism.event(self.rule, self.adjacency)

    @property
    def implementation_delta(self) -> float:
        """The declared gap of the noise: none where its coins are exact."""
        if isinstance(self.mechanism, GaussianCountMechanism):
            return self.mechanism.implementation_delta(len(self.rule.declared or ()))
        return 0.0

    def tickets(self, template: str = COUNT_TEMPLATE) -> tuple[Ticket, ...]:
        """Returns the one ticket of the share; unburnt, it can be handed back.

        Args:
          template: its public name.
        """
        return (Ticket(template=template, event=self.event, refundable=True),)

    def release(self, units: Iterable[Iterable[Mapping[str, Any]]], *, rng: SecureRandom) -> tuple[Count, ...]:
        """Counts and adds the noise.

        Args:
          units: the records of each unit; private.
          rng: source of noise.
        """
        counts: Counter[str] = Counter()
        for records in units:
            counts.update(self.rule.of(records))
        declared = (UNITS,) if self.rule.name is None else self.rule.declared
        if isinstance(self.mechanism, GaussianCountMechanism):
            shape: Any = {"rule": self.rule, "adjacency": self.adjacency}
            return self.mechanism.release(counts, declared=declared or (), rng=rng, **shape)
        return self.mechanism.release(counts, declared=declared, l1_sensitivity=self.l1_sensitivity, rng=rng)

    def to_dict(self) -> dict[str, Any]:
        """Returns the public parameters, for plans and reports."""
        is_gaussian = isinstance(self.mechanism, GaussianCountMechanism)
        return {
            "rule": self.rule.to_dict(),
            "mechanism": self.mechanism.to_dict(),
            "adjacency": self.adjacency,
            "l1_sensitivity": self.l1_sensitivity,
            **({"l2_sensitivity": self.rule.l2_sensitivity(self.adjacency)} if is_gaussian else {}),
            "scale": float(self.scale),
        }


def count_release(shown: Mapping[str, Any]) -> CountPlan:
    """Returns the plan that `CountPlan.to_dict` showed, which shows itself exactly as `shown`.

    Raises:
      ConfigurationError: another mechanism, or parameters that do not fit together.
      LookupError, TypeError: what is shown is of another form.
    """
    for name in ("rule", "mechanism"):
        if not isinstance(shown[name], Mapping):
            raise TypeError(name)
    plan = CountPlan(_rule(shown["rule"]), _mechanism(shown["mechanism"]), shown["adjacency"])
    if canonical_json(plan.to_dict()) != canonical_json(dict(shown)):
        raise fail("release", f"as its parts show it: {plan.to_dict()}", dict(shown))
    return plan


def _rule(shown: Mapping[str, Any]) -> UnitValues | UnitKeywords:
    values = shown["values"]
    if shown.get("kind") == UnitKeywords.kind:
        return UnitKeywords(shown["field"], shown["max_values"], tuple(values))
    declared = None if values is None else tuple(values)
    return UnitValues(shown["field"], shown["max_values"], declared, shown["fold_case"])


def _mechanism(shown: Mapping[str, Any]) -> DiscreteLaplaceMechanism | GaussianCountMechanism:
    if shown.get("name") == GaussianCountMechanism.name:
        return GaussianCountMechanism(shown["noise_multiplier"])
    return DiscreteLaplaceMechanism(shown["noise_multiplier"], shown["threshold"])


def noise_margin(scale: Fraction, confidence: float) -> int:
    """Returns the least m with P[noise > m] at most 1 - confidence.

    Args:
      scale: of the noise, in counts.
      confidence: in (0, 1).

    Raises:
      ConfigurationError: `confidence` out of range.
    """
    wrong = 1.0 - check_real("confidence", confidence, low=0.0, high=1.0, low_open=True, high_open=True)
    return least_count(scale, wrong) - 1


def least_count(scale: Fraction, chance: float) -> int:
    """Returns the least t >= 1 with P[noise >= t] at most `chance`."""
    wide = float(scale)
    least = max(1, math.floor(-wide * math.log(chance * (1.0 + math.exp(-1.0 / wide)))) - 1)
    while tail_bound(scale, least) > chance:
        least += 1
    return least
