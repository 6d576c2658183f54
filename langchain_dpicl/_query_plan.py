"""The frozen plans of answers to queries: what will run, what it is charged and what it costs."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from langchain_dpicl._cost import Cost, check_counts
from langchain_dpicl.privacy._validate import check_int, check_real, fail
from langchain_dpicl.privacy.accounting.events import Event
from langchain_dpicl.privacy.mechanisms.release_plan import ReleasePlan
from langchain_dpicl.privacy.mechanisms.vote_sums import ProbabilitySum, VoteSum
from langchain_dpicl.privacy.tickets import Ticket, event_of_tickets
from langchain_dpicl.row_design import RowDesign
from langchain_dpicl.signal import noise_deviation, noise_scale, occupancy, vote_chances

QUERY_TEMPLATE = "query"
"""The ticket template of one answer."""


@dataclass(frozen=True, slots=True)
class RowsPlan(ABC):
    """Base of plans of many releases, each from the rows of one public prompt.

    Attributes:
      release: sampling, aggregation, noise and adjacency of one release.
      max_queries: releases that the share pays for.
      width: candidates of one release, constants included.
      design: the shape of rows.
      public_size: declared units.
      partition: the `dataset_id` of the examples.
      epsilon: upper bound of all releases together at `delta`.
      delta: the share's delta, the declared gap of the noise included.
    """

    release: ReleasePlan
    max_queries: int
    width: int
    design: RowDesign
    public_size: int
    partition: str
    epsilon: float
    delta: float

    @property
    def noise_multiplier(self) -> float:
        """Noise scale over sensitivity."""
        return self.release.mechanism.noise_multiplier

    @property
    def implementation_delta(self) -> float:
        """Declared gap between ideal and drawn noise over all releases."""
        return self.release.implementation_delta(self.max_queries, width=self.width)

    @property
    def expected_rows(self) -> float:
        """Rows of one release, public: the slots, or the expected number of unit rows."""
        if self.release.row_shape == "slots":
            return float(self.design.num_slots)
        return self.public_size * self.release.sampler.sampling_rate

    @abstractmethod
    def tickets(self) -> tuple[Ticket, ...]:
        """Returns the tickets of the share."""

    def event(self) -> Event:
        """Returns the event of all releases together."""
        return event_of_tickets(self.tickets(), partition=self.partition)

    def cost(
        self,
        *,
        record_tokens: int = 60,
        query_tokens: int = 60,
        answer_tokens: int = 1,
        calls_per_row: int = 1,
        public_rows: int = 1,
    ) -> Cost:
        """Returns model calls and tokens over all queries, from public caps (no discount for caches)."""
        check_counts(record_tokens=record_tokens, query_tokens=query_tokens)
        check_counts(answer_tokens=answer_tokens, calls_per_row=calls_per_row)
        check_int("public_rows", public_rows, low=0)
        private = self.max_queries * self.expected_rows * calls_per_row
        public = self.max_queries * public_rows * calls_per_row
        shots = occupancy(self.release, self.public_size).shots
        tokens_in = private * (shots * record_tokens + query_tokens) + public * query_tokens
        return Cost(round(private), public, round(tokens_in), round((private + public) * answer_tokens))

    def expected_signal(self, agreement: float) -> dict[str, float]:
        """Returns occupancy, signal-to-noise and the chances of one release at a guessed `agreement` of rows.

        Rows cast hard votes independently; see `signal.vote_chances`. Rows without records vote for nothing.
        """
        return expected_votes(self, agreement)

    def to_dict(self) -> dict[str, Any]:
        """Returns the public plan as JSON values."""
        return {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "implementation_delta": self.implementation_delta,
            "adjacency": self.release.adjacency,
            "mechanism": self.release.mechanism.name,
            "noise_multiplier": self.noise_multiplier,
            # The joint exponential mechanism adds nothing to the sum.
            "noise_scale": None if self.release.mechanism.releases == "indices" else noise_scale(self.release),
            "aggregation": self.release.aggregation.name,
            **dataclasses.asdict(self.design),
            "sampling_rate": self.release.sampler.sampling_rate,
            "public_size": self.public_size,
            "max_queries": self.max_queries,
            "candidates": self.width,
            "constants": list(self.release.constants),
        }


def expected_votes(plan: RowsPlan, agreement: float, *, threshold: float | None = None) -> dict[str, float]:
    """Computes `RowsPlan.expected_signal`; below `threshold` the largest noisy vote is rejected."""
    check_real("agreement", agreement, low=0.0, high=1.0)
    release = plan.release
    if not isinstance(release.aggregation, VoteSum | ProbabilitySum):
        expected = "votes or probabilities (other sums have no right label)"
        raise fail("aggregation", expected, release.aggregation.name)
    fill = occupancy(release, plan.public_size)
    labels = plan.width - len(release.constants)
    chances = vote_chances(release, plan.public_size, agreement=agreement, labels=labels, threshold=threshold)
    right, wrong, *abstained = chances
    # As `vote_chances` assumes: half of the wrong votes go to one rival, or all of them if there are two labels.
    rival = (1.0 - agreement) / min(2, max(1, labels - 1))
    return {
        "expected_rows": fill.rows,
        "expected_shots": fill.shots,
        "empty_slot_prob": fill.empty,
        "signal_to_noise": fill.rows * (agreement - rival) / noise_deviation(release),
        "right_label_prob": float(right),
        "wrong_label_prob": float(wrong),
        "abstain_prob": float(sum(abstained)),
    }


@dataclass(frozen=True, slots=True)
class QueryPlan(RowsPlan):
    """Everything public about answers to `max_queries` queries: what will run, what it is charged, what it will cost.

    Formal guarantees:
      - `tickets()` hold `max_queries` tickets of `release.block_event(1)`: a fresh secret sample for each query.
      - All of them together are (epsilon, delta)-DP under `release.adjacency`, the declared gap of the noise included.

    Attributes:
      release: sampling, aggregation, noise and adjacency of one answer.
      max_queries: answers that the share pays for.
      width: candidates of one release, constants included.
      design: the shape of rows.
      public_size: declared units.
      partition: the `dataset_id` of the examples.
      epsilon: upper bound of all answers together at `delta`.
      delta: the share's delta, the declared gap of the noise included.
    """

    def tickets(self) -> tuple[Ticket, ...]:
        """Returns the tickets of the share: one per query."""
        return (
            Ticket(
                template=QUERY_TEMPLATE,
                event=self.release.block_event(1),
                max_count=self.max_queries,
                refundable=True,
            ),
        )
