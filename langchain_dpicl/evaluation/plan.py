"""Plans and prices one release of counts of outcomes, and says how wide its intervals will be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from langchain_dpicl.evaluation.intervals import NoisyRatio, Of
from langchain_dpicl.planning.share_plan import Cost, SharePlan, with_noise_for
from langchain_dpicl.privacy._validate import Adjacency, check_adjacency, check_delta, check_int, check_real
from langchain_dpicl.privacy.extensions.count_histograms import DiscreteLaplaceMechanism
from langchain_dpicl.privacy.extensions.outcome_counts import OutcomePlan, OutcomeTable
from langchain_dpicl.privacy.ledger.amounts import check_name
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.privacy.mechanisms.sampling import PoissonUnits


@dataclass(frozen=True, slots=True)
class EvaluationPlan(SharePlan):
    """The public plan of one evaluation: the release, its ticket, its calls and its expected intervals.

    Attributes:
      release: sample, tables and noise.
      public_size: declared number of units.
      sample: units that are read, on average.
      calls_per_unit: model calls for one unit.
    """

    method: ClassVar[str] = "evaluation"

    release: OutcomePlan
    public_size: int
    sample: int
    calls_per_unit: int

    @property
    def sizes(self) -> Mapping[str | None, int]:
        """The declared units, which no label splits."""
        return {None: self.public_size}

    @property
    def implementation_delta(self) -> float:
        """Declared gap between the ideal mechanism and what runs: that of the sample's coins."""
        return self.release.implementation_delta

    def tickets(self) -> tuple[Ticket, ...]:
        """Returns the one ticket of the share."""
        return self.release.tickets()

    def cost(self, *, record_tokens: int = 60) -> Cost:
        """Returns the expected model use, from public caps; see `SharePlan.cost`."""
        check_int("record_tokens", record_tokens, low=1)
        calls = self.sample * self.calls_per_unit
        return Cost(calls, 0, calls * record_tokens, calls)

    def expected(self, accuracy: float = 0.8, confidence: float = 0.95) -> dict[str, float]:
        """Returns the expected half widths of the interval of a rate, in points of 1.

        Args:
          accuracy: public guess of the rate.
          confidence: of the interval.
        """
        check_real("accuracy", accuracy, low=0.0, high=1.0)
        right = round(self.sample * accuracy)
        counts = (right, self.sample - right)
        ratio = NoisyRatio(
            counts, (1.0, 0.0), (0.0, 1.0), float(self.release.scale), self.release.sampler.sampling_rate
        )
        ofs: tuple[Of, ...] = ("population", "data")
        return {of: ratio.estimate(confidence=confidence, of=of).half_width for of in ofs}

    def _numbers(self) -> dict[str, Any]:
        return {
            "outcomes": self.release.to_dict(),
            "public_size": self.public_size,
            "sample": self.sample,
            "sampling_rate": self.release.sampler.sampling_rate,
            "calls_per_unit": self.calls_per_unit,
        }

    @classmethod
    def rebuild(cls, shown: Mapping[str, Any]) -> EvaluationPlan:
        """Returns the plan of the parameters shown, see `SharePlan.rebuild`."""
        return plan_evaluation(
            shown["public_size"],
            widths=shown["outcomes"]["table"]["widths"],
            epsilon=None,
            delta=shown["delta"],
            sample=shown["sample"],
            adjacency=shown["adjacency"],
            noise_multiplier=shown["noise_multiplier"],
            calls_per_unit=shown["calls_per_unit"],
            partition=shown["dataset_id"],
        )


def plan_evaluation(
    public_size: int,
    *,
    widths: Sequence[int],
    epsilon: float | None,
    delta: float,
    sample: int | None = None,
    adjacency: Adjacency = "add_remove",
    noise_multiplier: float | None = None,
    calls_per_unit: int = 1,
    partition: str = "private-examples",
) -> EvaluationPlan:
    """Calibrates the noise of all tables to `epsilon`, or prices a given noise.

    Args:
      public_size: declared number of units.
      widths: number of outcomes of each table.
      epsilon: target; the plan's epsilon is an upper bound at most this. None needs `noise_multiplier`.
      delta: the share's delta; pure noise hardly uses it.
      sample: units that are read, on average; None, or more than there are: all.
      adjacency: neighbouring relation.
      noise_multiplier: scale of the noise over the L1 sensitivity, instead of calibrating.
      calls_per_unit: model calls for one unit.
      partition: the data set's public id.

    Raises:
      ConfigurationError: a public parameter is out of range.

    >>> plan = plan_evaluation(2_000, widths=[2], epsilon=0.5, delta=1e-6)
    >>> {of: round(100 * width, 1) for of, width in plan.expected(0.8).items()}
    {'population': 1.8, 'data': 0.2}
    """
    check_adjacency(adjacency)
    check_delta(delta)
    check_name("partition", partition)
    size = check_int("public_size", public_size, low=1)
    read = size if sample is None else min(size, check_int("sample", sample, low=1))
    release = OutcomePlan(
        PoissonUnits(read / size), OutcomeTable(tuple(widths)), DiscreteLaplaceMechanism(1.0), adjacency
    )
    check_int("calls_per_unit", calls_per_unit, low=1)
    draft = EvaluationPlan(release, size, read, calls_per_unit, partition=partition, epsilon=0.0, delta=delta)
    return with_noise_for(draft, epsilon=epsilon, noise_multiplier=noise_multiplier)
