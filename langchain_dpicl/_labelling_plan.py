"""The frozen plan of labels for public inputs: what will run, what it is charged and what it costs."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Any

from langchain_dpicl._cost import Cost
from langchain_dpicl._query_plan import RowsPlan, expected_votes
from langchain_dpicl.privacy._validate import check_int, check_real
from langchain_dpicl.privacy.extensions.confident_gnmax import ConfidentGNMaxMechanism
from langchain_dpicl.privacy.extensions.label_tickets import (
    Teachers,
    label_tickets,
)
from langchain_dpicl.privacy.tickets import Ticket

_STEPS = 1000  # guesses of the agreement are thousandths


@dataclass(frozen=True, slots=True)
class LabellingPlan(RowsPlan):
    """Everything public about labels for `max_queries` public inputs: what will run, what it is charged and will cost.

    Formal guarantees:
      - `teachers="fresh"`: `max_queries` tickets of `release.block_event(1)`, a fresh secret sample for each input.
      - `teachers="one_sample"`: one ticket of `release.block_event(max_queries, max_answers)`: all labels come from one
        secret sample, composed inside and amplified once.
      - `teachers="fixed"`: `max_queries` tickets of one release without amplification; with Confident-GNMax instead
        `max_queries` tickets of a test and `max_answers` of an answer.
      - All tickets together are (epsilon, delta)-DP under `release.adjacency`, the declared gap of the noise included.

    Attributes:
      release: sampling, aggregation, noise and adjacency of one label.
      max_queries: inputs that the share pays for.
      width: candidates of one release, constants included.
      design: the shape of rows.
      public_size: declared units.
      partition: the `dataset_id` of the examples.
      epsilon: upper bound of all labels together at `delta`.
      delta: the share's delta, the declared gap of the noise included.
      teachers: "fresh", "one_sample" or "fixed".
      max_answers: labels that the share pays for if tests are charged separately; None: one per input.
      threshold: votes below which the largest noisy vote is rejected: post-processing of a released histogram, so
        Gaussian noise only, and free; None: nothing is rejected.
    """

    teachers: Teachers = "fresh"
    max_answers: int | None = None
    threshold: float | None = None

    def tickets(self) -> tuple[Ticket, ...]:
        """Returns the tickets of the share; unburnt ones can be handed back."""
        return label_tickets(
            self.release, teachers=self.teachers, max_queries=self.max_queries, max_answers=self.max_answers
        )

    def cost(
        self,
        *,
        record_tokens: int = 60,
        query_tokens: int = 60,
        answer_tokens: int = 1,
        calls_per_row: int = 1,
        public_rows: int = 1,
        student_calls: int = 0,
        student_shots: int = 1,
    ) -> Cost:
        """Returns model calls and tokens over all inputs, from public caps (no discount for caches)."""
        check_int("student_calls", student_calls, low=0)
        check_int("student_shots", student_shots, low=1)
        teachers = RowsPlan.cost(
            self,
            record_tokens=record_tokens,
            query_tokens=query_tokens,
            answer_tokens=answer_tokens,
            calls_per_row=calls_per_row,
            public_rows=public_rows,
        )
        return Cost(
            teachers.private_calls,
            teachers.public_calls + student_calls,
            teachers.tokens_in + student_calls * (student_shots * record_tokens + query_tokens),
            teachers.tokens_out + student_calls * answer_tokens,
        )

    def expected_signal(self, agreement: float) -> dict[str, float]:
        """Computes `RowsPlan.expected_signal`; a rejected input counts as an abstention."""
        return expected_votes(self, agreement, threshold=self.threshold)

    def agreement_needed(self, chance: float = 0.95) -> float | None:
        """Returns the least agreement of rows at which the right label is released with probability `chance`.

        Formal guarantees:
          - The result is a multiple of .001; if it is not 0, .001 less does not reach `chance`.
        """
        check_real("chance", chance, low=0.0, high=1.0, low_open=True)

        def is_reached(step: int) -> bool:
            return self.expected_signal(step / _STEPS)["right_label_prob"] >= chance

        if not is_reached(_STEPS):
            return None
        return bisect.bisect_left(range(_STEPS), True, key=is_reached) / _STEPS

    def to_dict(self) -> dict[str, Any]:
        """Returns the public plan as JSON values; `verify_report` rebuilds the tickets from `release` in it."""
        out = {
            **RowsPlan.to_dict(self),
            "release": self.release.to_dict(),
            "teachers": self.teachers,
            "max_answers": self.max_answers,
            "threshold": self.threshold,
        }
        mechanism = self.release.mechanism
        if isinstance(mechanism, ConfidentGNMaxMechanism):
            linf = self.release.sensitivity.require("linf")
            out["threshold"] = mechanism.threshold
            out["test_noise_multiplier"] = mechanism.test_noise_multiplier
            out["test_noise_scale"] = mechanism.test_noise_multiplier * linf
        return out
