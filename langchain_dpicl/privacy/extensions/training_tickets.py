"""Makes the tickets of training steps, and rebuilds their release from a report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_dpicl.privacy._validate import Adjacency, check_int, fail
from langchain_dpicl.privacy.extensions.gradient_sums import ClippedGradientSum
from langchain_dpicl.privacy.extensions.label_tickets import label_release
from langchain_dpicl.privacy.mechanisms.noise import GaussianMechanism
from langchain_dpicl.privacy.mechanisms.release_plan import ReleasePlan
from langchain_dpicl.privacy.mechanisms.sampling import PoissonUnits
from langchain_dpicl.privacy.tickets import Ticket

STEP_TEMPLATE = "step"
"""The ticket template of one training step."""


def step_release(
    *, sampling_rate: float, l2_clip_norm: float, noise_multiplier: float, adjacency: Adjacency
) -> ReleasePlan:
    """Returns the release of one training step: the noisy sum of the clipped gradients of a fresh Poisson sample."""
    return ReleasePlan(
        sampler=PoissonUnits(sampling_rate),
        aggregation=ClippedGradientSum(l2_clip_norm),
        mechanism=GaussianMechanism(noise_multiplier),
        adjacency=adjacency,
    )


def training_tickets(release: ReleasePlan, steps: int) -> tuple[Ticket, ...]:
    """Returns the refundable tickets of `steps` training steps.

    Formal guarantees:
      - One ticket of `release.block_event(1)` for each step: a fresh secret sample every time.
    """
    event = release.block_event(1)
    return (Ticket(template=STEP_TEMPLATE, event=event, max_count=check_int("steps", steps, low=1), refundable=True),)


def training_release(shown: Mapping[str, Any]) -> ReleasePlan:
    """Rebuilds the release of a step from the JSON of `ReleasePlan.to_dict`; errors as `label_release`.

    Formal guarantees:
      - The `to_dict` of the result equals `shown`, its sensitivity included, and it is a training step: Poisson units,
        clipped gradients, Gaussian noise, a fresh sample every time.
    """
    release = label_release(shown)
    parts = (type(release.sampler), type(release.aggregation), type(release.mechanism))
    if parts != (PoissonUnits, ClippedGradientSum, GaussianMechanism) or release.redraw_every != 1:
        expected = "Poisson units, clipped gradients and Gaussian noise, redrawn every step"
        raise fail("release", expected, [shown["sampler"], shown["aggregation"], shown["mechanism"]])
    return release
