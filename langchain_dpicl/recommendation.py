"""Compares designs at equal epsilon before anything is spent, and says which to take.

Works on public numbers and one stated guess: how far rows agree on the next token, given the shots they see.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from langchain_dpicl.exceptions import ConfigurationError, DPICLError
from langchain_dpicl.planning import GenerationPlan, RowDesign, Segment, plan_generation
from langchain_dpicl.privacy._validate import Adjacency, check_real
from langchain_dpicl.privacy.mechanisms import MECHANISMS

AGREEMENT_PER_DOUBLING = 0.05


@dataclass(frozen=True, slots=True)
class Option:
    """One design at the asked epsilon.

    Attributes:
      plan: the calibrated plan.
      right_token_prob: expected chance that a token of the smallest declared label is the one most rows want.
      private_calls: expected private model calls of the whole generation.
    """

    plan: GenerationPlan
    right_token_prob: float
    private_calls: int

    @property
    def rank(self) -> tuple[float, int, int]:
        """Sorts best first: right tokens to a tenth of a percent, then fewer calls, then the default mechanism."""
        return -round(self.right_token_prob, 3), self.private_calls, MECHANISMS.index(self.plan.release.mechanism.name)

    def to_dict(self) -> dict[str, Any]:
        """Returns the option's public numbers."""
        return {
            "mechanism": self.plan.release.mechanism.name,
            "rows": self.plan.design.rows,
            "num_slots": self.plan.design.num_slots,
            "shots_per_slot": self.plan.design.shots_per_slot,
            "redraw_every": self.plan.release.redraw_every,
            "noise_multiplier": round(self.plan.noise_multiplier, 4),
            "right_token_prob": round(self.right_token_prob, 4),
            "private_calls": self.private_calls,
        }


def agreement_of(shots: float, *, one_shot: float) -> float:
    """Returns the guessed agreement of rows that see `shots` records: `one_shot` plus .05 per doubling, below .99."""
    check_real("agreement", one_shot, low=0.0, high=1.0)
    return float(min(0.99, one_shot + AGREEMENT_PER_DOUBLING * np.log2(max(shots, 1.0))))


def signal_of(plan: GenerationPlan, *, one_shot: float) -> dict[str, Any]:
    """Returns the expected signal of the smallest declared label, with the label and the guessed agreement it rests on.

    Args:
      plan: the plan to look at.
      one_shot: guessed share of one-shot rows that want the same token; rows that see more agree more.
    """
    size, (label, _) = min(zip(plan.public_sizes, plan.branches, strict=True), key=lambda pair: pair[0])
    shots = plan.expected_signal(one_shot, label=label)["expected_shots"]
    agreement = agreement_of(shots, one_shot=one_shot)
    stated = {"label": label, "public_size": size, "agreement": agreement}
    return {**stated, **plan.expected_signal(agreement, label=label)}


def compare(
    public_sizes: Mapping[str | None, int],
    *,
    epsilon: float,
    delta: float,
    adjacency: Adjacency = "add_remove",
    base: RowDesign | None = None,
    redraw_every: int = 1,
    shots_per_label: int = 1,
    max_tokens: int = 60,
    candidates: int = 101,
    agreement: float = 0.6,
) -> list[Option]:
    """Returns designs at equal records per token and equal epsilon, best first (see `Option.rank`).

    First the mechanisms on the given rows, then other row shapes, then other redraw periods, each with the best so far.
    Designs that the declared sizes do not allow are left out.

    Args:
      public_sizes: declared units per label.
      epsilon: the share.
      delta: its delta.
      adjacency: neighbouring relation.
      base: starting shape; its records per token (`num_slots * shots_per_slot`) are kept.
      redraw_every: starting redraw period.
      shots_per_label: demonstrations per label.
      max_tokens: tokens per demonstration.
      candidates: width of the public domain.
      agreement: guessed share of one-shot rows that want the same token.

    Raises:
      ConfigurationError: a public parameter is out of range, or the starting shape fits no mechanism.
    """
    check_real("agreement", agreement, low=0.0, high=1.0)
    start = base or RowDesign.choose()
    shared = {"epsilon": epsilon, "delta": delta, "adjacency": adjacency, "shots_per_label": shots_per_label}
    fixed = {**shared, "segments": (Segment("text", max_tokens),), "candidates": candidates}

    def option(mechanism: str, design: RowDesign, redraw: int) -> Option | None:
        try:
            plan = plan_generation(public_sizes, mechanism=mechanism, design=design, redraw_every=redraw, **fixed)  # type: ignore[arg-type]
        except DPICLError:
            return None
        return Option(plan, signal_of(plan, one_shot=agreement)["right_token_prob"], plan.cost().private_calls)

    seen: dict[tuple[str, RowDesign, int], Option] = {}

    def try_all(tries: list[tuple[str, RowDesign, int]]) -> Option:
        for key in tries:
            found = None if key in seen else option(*key)
            if found is not None:
                seen[key] = found
        if not seen:
            plan_generation(public_sizes, design=start, redraw_every=redraw_every, **fixed)  # type: ignore[arg-type]
            raise ConfigurationError("designs: expected one that the declared sizes and caps allow, found none.")
        return min(seen.values(), key=lambda option: option.rank)

    best = try_all([(name, start, redraw_every) for name in MECHANISMS])
    name = best.plan.release.mechanism.name
    best = try_all([(name, shape, redraw_every) for shape in _shapes(start)])
    try_all([(name, best.plan.design, c) for c in sorted({1, redraw_every, 5, max_tokens}) if c <= max_tokens])
    return sorted(seen.values(), key=lambda option: option.rank)


def _shapes(start: RowDesign) -> Iterator[RowDesign]:
    """Yields row shapes with the same records per token."""
    records = start.num_slots * start.shots_per_slot
    yield RowDesign.choose(rows="units", num_slots=records)
    for shots in (1, 2, 4):
        if records % shots == 0 and records // shots >= 2:
            yield RowDesign.choose(rows="slots", num_slots=records // shots, shots_per_slot=shots)
