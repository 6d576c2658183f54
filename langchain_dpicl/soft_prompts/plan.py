"""Plans, calibrates and prices private training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.planning.share_plan import Cost, SharePlan, with_noise_for
from langchain_dpicl.privacy._validate import (
    Adjacency,
    check_adjacency,
    check_int,
    check_positive,
    check_positive_delta,
    fail,
)
from langchain_dpicl.privacy.extensions.gradient_sums import MAX_GRADIENT_WIDTH, ClippedGradientSum
from langchain_dpicl.privacy.extensions.method_tickets import (
    STEP_TEMPLATE,
    shown_release,
    step_release,
    training_tickets,
)
from langchain_dpicl.privacy.ledger.amounts import check_name
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.privacy.mechanisms.release_plan import ReleasePlan

__all__ = ["STEP_TEMPLATE", "TrainingPlan", "plan_training", "steps_of"]


@dataclass(frozen=True, slots=True)
class TrainingPlan(SharePlan):
    """The public plan of `steps` training steps: the release, its tickets and its noise.

    Formal guarantees:
      - `tickets()` are `steps` tickets of `release.block_event(1)`: a fresh secret Poisson sample for each step.
      - All of them together are (epsilon, delta)-DP under `release.adjacency`, the declared gap of the noise included.

    Attributes:
      release: sampling, clipping, noise and adjacency of one step.
      steps: number of training steps.
      width: number of trained parameters.
      public_size: declared units.
      expected_batch_size: expected units of one step; sums of gradients are divided by it, not by the drawn number.
    """

    method: ClassVar[str] = "training"

    release: ReleasePlan
    steps: int
    width: int
    public_size: int
    expected_batch_size: int

    @property
    def sizes(self) -> Mapping[str | None, int]:
        """The declared units, which no label splits."""
        return {None: self.public_size}

    @property
    def sampling_rate(self) -> float:
        """Probability that a unit is in the sample of a step."""
        return self.release.sampler.sampling_rate

    @property
    def l2_clip_norm(self) -> float:
        """Bound on the L2 norm of a unit's gradient."""
        aggregation = self.release.aggregation
        if not isinstance(aggregation, ClippedGradientSum):
            raise fail("aggregation", "clipped gradients", aggregation.name, "Plan with plan_training.")
        return aggregation.l2_clip_norm

    @property
    def average_factor(self) -> float:
        """Factor from a released sum to the average gradient of a step: clip over expected batch size."""
        return self.l2_clip_norm / self.expected_batch_size

    @property
    def noise_scale(self) -> float:
        """Standard deviation of the noise on each coordinate of the average gradient."""
        return self.noise_multiplier * self.release.sensitivity.require("l2") * self.average_factor

    @property
    def noise_to_clip(self) -> float:
        """Expected L2 norm of the noise on the average gradient, over the clip norm."""
        return self.noise_scale * math.sqrt(self.width) / self.l2_clip_norm

    @property
    def epochs(self) -> float:
        """Expected number of samples that contain a unit."""
        return self.steps * self.expected_batch_size / self.public_size

    @property
    def implementation_delta(self) -> float:
        """Declared gap between ideal and drawn noise over all steps."""
        return self.release.implementation_delta(self.steps, width=self.width)

    def tickets(self) -> tuple[Ticket, ...]:
        """Returns the tickets of the share: one per step, refundable while unburnt."""
        return training_tickets(self.release, self.steps)

    def cost(self, *, record_tokens: int = 128, examples_per_unit: int = 1) -> Cost:
        """Returns the gradients of single examples, each one forward and one backward pass, and the tokens of these.

        Args:
          record_tokens: tokens of an example, padded or cut to this cap.
          examples_per_unit: records that are kept of a unit.
        """
        check_int("record_tokens", record_tokens, low=1)
        gradients = self.steps * self.expected_batch_size * check_int("examples_per_unit", examples_per_unit, low=1)
        return Cost(gradients, 0, gradients * record_tokens, 0)

    def expected(self) -> dict[str, float]:
        """Returns how often a unit is drawn, and how the noise on the average gradient compares with the clip."""
        return {"epochs": self.epochs, "noise_scale": self.noise_scale, "noise_to_clip": self.noise_to_clip}

    def _numbers(self) -> dict[str, Any]:
        return {
            "mechanism": self.release.mechanism.name,
            "noise_scale": self.noise_scale,
            "aggregation": self.release.aggregation.name,
            "l2_clip_norm": self.l2_clip_norm,
            "rows": self.release.row_shape,
            "sampling": "poisson",
            "sampling_rate": self.sampling_rate,
            "public_size": self.public_size,
            "expected_batch_size": self.expected_batch_size,
            "steps": self.steps,
            "epochs": self.epochs,
            "width": self.width,
            "release": self.release.to_dict(),
        }

    @classmethod
    def rebuild(cls, shown: Mapping[str, Any]) -> TrainingPlan:
        """Returns the plan of the parameters shown, see `SharePlan.rebuild`.

        Formal guarantees:
          - The clip and the width leave no trace in a ticket: noise is measured in clips, and a gradient is released
            as a whole. They are the author's word, as far as the declared gap of the noise does not tell the width.
        """
        release = shown_release(shown["release"])
        return plan_training(
            shown["public_size"],
            epsilon=None,
            delta=shown["delta"],
            expected_batch_size=shown["expected_batch_size"],
            l2_clip_norm=shown["l2_clip_norm"],
            width=shown["width"],
            steps=shown["steps"],
            adjacency=release.adjacency,
            noise_multiplier=release.mechanism.noise_multiplier,
            partition=shown["dataset_id"],
        )


def plan_training(
    public_size: int,
    *,
    epsilon: float | None,
    delta: float,
    expected_batch_size: int,
    l2_clip_norm: float,
    width: int,
    steps: int | None = None,
    epochs: float | None = None,
    adjacency: Adjacency = "add_remove",
    noise_multiplier: float | None = None,
    partition: str = "private-examples",
    is_rough: bool = False,
) -> TrainingPlan:
    """Calibrates the noise of training steps to `epsilon`, or prices a given noise.

    Duan et al. train soft prompts and prefixes of 1 to 50 virtual tokens with an expected batch size of 1,024, a clip
    of .01 to 4 (mostly .05 to .2) and 10 to 100 epochs.

    Args:
      public_size: declared number of units.
      epsilon: target; the plan's epsilon is an upper bound at most this. None needs `noise_multiplier`.
      delta: the share's delta.
      expected_batch_size: expected units of one step, 1 to `public_size`; each is drawn independently.
      l2_clip_norm: bound on the L2 norm of a unit's gradient.
      width: number of trained parameters.
      steps: training steps; or give `epochs`.
      epochs: expected number of samples that contain a unit; the steps are rounded up.
      adjacency: neighbouring relation.
      noise_multiplier: given noise, over the L2 sensitivity: under replace_one the sensitivity is twice the clip;
        None calibrates.
      partition: the data set's public id.
      is_rough: calibrates several times faster, with a few percent more noise; for comparing many plans.

    Raises:
      ConfigurationError: a public parameter is out of range, or not exactly one of `steps` and `epochs` is given.
    """
    check_adjacency(adjacency)
    check_positive_delta(delta)
    check_int("public_size", public_size, low=1)
    check_int("expected_batch_size", expected_batch_size, low=1, high=public_size)
    check_int("width", width, low=1, high=MAX_GRADIENT_WIDTH)
    check_name("partition", partition)
    release = step_release(
        sampling_rate=expected_batch_size / public_size,
        l2_clip_norm=l2_clip_norm,
        noise_multiplier=1.0,
        adjacency=adjacency,
    )
    count = steps_of(public_size, expected_batch_size, steps=steps, epochs=epochs)
    draft = TrainingPlan(
        release, count, width, public_size, expected_batch_size, partition=partition, epsilon=0.0, delta=delta
    )
    return with_noise_for(draft, epsilon=epsilon, noise_multiplier=noise_multiplier, is_rough=is_rough)


def steps_of(public_size: int, expected_batch_size: int, *, steps: int | None, epochs: float | None) -> int:
    """Returns the number of steps: `steps`, or enough for `epochs`, rounded up."""
    if (steps is None) == (epochs is None):
        actual = "neither" if steps is None else "both"
        raise ConfigurationError(f"steps, epochs: expected one of them, found {actual}. Give steps=... or epochs=....")
    if steps is not None:
        return check_int("steps", steps, low=1)
    # The decimal number as written: the float 1.1 is slightly larger, which could add a step.
    passes = Fraction(repr(check_positive("epochs", epochs)))
    return math.ceil(passes * public_size / expected_batch_size)
