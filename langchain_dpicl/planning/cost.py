"""The expected cost of a plan in model calls and tokens, and the calibration and price of its noise."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy._validate import check_epsilon, check_int, check_positive, check_real, fail
from langchain_dpicl.privacy.accounting.events import Event
from langchain_dpicl.privacy.extensions.individual_filter import ParticipationPlan
from langchain_dpicl.privacy.ledger.amounts import effective_delta
from langchain_dpicl.privacy.mechanisms.release_plan import ReleasePlan


@dataclass(frozen=True, slots=True)
class Cost:
    """Expected model use, from public caps.

    Attributes:
      private_calls: next-token calls on private prompts.
      public_calls: next-token calls on the public prompt.
      tokens_in: prompt tokens, every call counted in full.
      tokens_out: one per call.
    """

    private_calls: int
    public_calls: int
    tokens_in: int
    tokens_out: int

    def money(self, *, price_in: float, price_out: float) -> float:
        """Returns the price, given prices per million tokens."""
        check_real("price_in", price_in, low=0.0)
        check_real("price_out", price_out, low=0.0)
        return (self.tokens_in * price_in + self.tokens_out * price_out) / 1e6


def check_counts(**counts: int) -> None:
    """Checks numbers of tokens, calls or queries, each at least 1."""
    for name, count in counts.items():
        check_int(name, count, low=1)


class NoisyPlan(Protocol):
    """A frozen plan whose noise can be calibrated and whose price can be computed."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def release(self) -> ReleasePlan | ParticipationPlan:
        """The plan of one release."""

    @property
    def delta(self) -> float:
        """The share's delta."""

    @property
    def implementation_delta(self) -> float:
        """Declared gap between ideal and drawn noise over all releases."""

    def event(self) -> Event:
        """Returns the event of all releases together."""


PlanT = TypeVar("PlanT", bound=NoisyPlan)


def _with_noise(plan: PlanT, noise_multiplier: float) -> PlanT:
    return dataclasses.replace(plan, release=plan.release.with_noise(noise_multiplier))


def with_noise_for(
    draft: PlanT,
    *,
    epsilon: float | None,
    noise_multiplier: float | None,
    is_rough: bool = False,
    with_noise: Callable[[PlanT, float], PlanT] = _with_noise,
) -> PlanT:
    """Returns the plan with noise calibrated to `epsilon`, or with the given noise, and its price."""
    if noise_multiplier is not None:
        return with_price(with_noise(draft, check_positive("noise_multiplier", noise_multiplier)))
    if epsilon is None:
        raise ConfigurationError("epsilon: expected a share of the budget (epsilon=...), found None.")
    target = check_epsilon(epsilon)
    noise = accounting.calibrate(
        lambda x: with_noise(draft, x).event(),
        epsilon=target,
        delta=pricing_delta(draft),
        adjacency=draft.release.adjacency,
        is_rough=is_rough,
    )
    calibrated = with_noise(draft, noise)
    # The coarse price is an upper bound too, and an exact one would take longer than the search.
    return dataclasses.replace(calibrated, epsilon=target) if is_rough else with_price(calibrated)


def with_price(plan: PlanT) -> PlanT:
    """Returns the plan with the epsilon of its event."""
    adjacency = plan.release.adjacency
    bound = accounting.epsilon_upper_bound(plan.event(), delta=pricing_delta(plan), adjacency=adjacency)
    epsilon = _finite_epsilon(bound, noise_multiplier=plan.release.mechanism.noise_multiplier)
    return dataclasses.replace(plan, epsilon=epsilon)


def pricing_delta(plan: NoisyPlan) -> float:
    """Returns the part of delta that is left for the events, after the declared gap of the noise."""
    remaining = effective_delta(plan.delta, plan.implementation_delta)
    if remaining <= 0:
        raise _too_many(plan)
    return remaining


def _too_many(plan: NoisyPlan) -> ConfigurationError:
    """Returns the error that names how many queries delta allows: drawing the noise of each uses a part of it."""
    gap = plan.implementation_delta
    requested = getattr(plan, "max_queries", None) or 1  # a training plan has steps
    possible = int(plan.delta / gap * requested)
    while possible > 0 and effective_delta(plan.delta, gap / requested * possible) <= 0:
        possible -= 1
    if possible < 1 or possible >= requested:
        return fail("delta", f"more than the noise's declared gap {gap:.3g}", plan.delta, "Give a larger delta=.")
    advice = f"Drawing the noise of one query takes {gap / requested:.3g} of delta. Ask less, or give a larger delta=."
    return fail("max_queries", f"at most {possible:,} queries at delta {plan.delta:.3g}", requested, advice)


def _finite_epsilon(bound: float, *, noise_multiplier: float) -> float:
    """Returns a plan's epsilon; refuses an infinite one with advice about its noise."""
    if math.isfinite(bound):
        return bound
    advice = "Raise it; if clip and temperature determine it, raise temperature or lower clip."
    raise fail("noise_multiplier", "noise that bounds the privacy loss by a finite epsilon", noise_multiplier, advice)
