"""Calibrates or prices the noise of labels for public inputs, for each way of drawing teachers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_dpicl._cost import priced, with_noise_for
from langchain_dpicl._labelling_plan import LabellingPlan
from langchain_dpicl.privacy._validate import (
    Adjacency,
    check_adjacency,
    check_choice,
    check_delta,
    check_int,
    check_real,
    fail,
)
from langchain_dpicl.privacy.amounts import check_name
from langchain_dpicl.privacy.extensions.confident_gnmax import ConfidentGNMaxMechanism
from langchain_dpicl.privacy.extensions.label_tickets import (
    TEACHERS,
    Teachers,
)
from langchain_dpicl.privacy.extensions.registry import mechanism_by_name
from langchain_dpicl.privacy.mechanisms.bounded import LARGEST, Aggregation
from langchain_dpicl.privacy.mechanisms.noise import Mechanism
from langchain_dpicl.privacy.mechanisms.release_plan import ReleasePlan
from langchain_dpicl.privacy.mechanisms.vote_sums import VoteSum
from langchain_dpicl.query_planning import checked_design, expected_rows
from langchain_dpicl.row_design import RowDesign

__all__ = ["DEFAULT_FIXED_TEACHERS", "LabellingPlan", "plan_labelling", "rejection"]

DEFAULT_FIXED_TEACHERS = 200
"""Default number of fixed teachers: one-shot prompts, as many as in the paper."""


def plan_labelling(
    public_size: int,
    *,
    epsilon: float | None,
    delta: float,
    max_queries: int,
    width: int,
    teachers: Teachers = "fresh",
    adjacency: Adjacency = "add_remove",
    aggregation: Aggregation | None = None,
    mechanism: Mechanism | str = "gumbel",
    noise_multiplier: float | None = None,
    max_answers: int | None = None,
    design: RowDesign | None = None,
    constants: Sequence[float] = (),
    threshold: float | None = None,
    partition: str = "private-examples",
    is_rough: bool = False,
) -> LabellingPlan:
    """Calibrates the noise of labels for `max_queries` inputs to `epsilon`, or prices a given noise.

    Args:
      public_size: declared number of units.
      epsilon: target; the plan's epsilon is an upper bound at most this. None needs `noise_multiplier`. Ignored for
        Confident-GNMax, whose noise is given with the mechanism.
      delta: the share's delta.
      max_queries: inputs that the share pays for.
      width: candidates of one release, `constants` included.
      teachers: "fresh" draws a new secret sample for every input, "one_sample" one for all of them, "fixed" deals the
        units into slots once and keeps them (`adjacency="replace_one"` only).
      adjacency: neighbouring relation.
      aggregation: how rows add up; `VoteSum()` by default.
      mechanism: a mechanism (its noise is replaced) or its name; or a `ConfidentGNMaxMechanism` (its noise is kept).
      noise_multiplier: given noise; None calibrates.
      max_answers: with Confident-GNMax and teachers that are drawn once, the labels that the share pays for; None: one
        per input.
      design: shape of rows; by default `RowDesign.choose(smallest_size=public_size)`, and for fixed teachers a
        partition into 200 slots of one shot, or one per unit if there are fewer.
      constants: public scores of further candidates, such as one to abstain.
      threshold: votes below which the largest noisy vote is rejected; Gaussian noise only.
      partition: the data set's public id.
      is_rough: calibrates several times faster, with a few percent more noise; for comparisons of many plans.
    """
    check_adjacency(adjacency)
    check_delta(delta)
    check_int("public_size", public_size, low=1)
    check_int("max_queries", max_queries, low=1)
    check_int("width", width, low=len(constants) + 1)
    check_name("partition", partition)
    check_choice("teachers", teachers, TEACHERS)
    shape = _design(design, teachers=teachers, adjacency=adjacency, public_size=public_size)
    noise = mechanism_by_name(mechanism)(noise_multiplier=1.0) if isinstance(mechanism, str) else mechanism
    draft = LabellingPlan(
        release=ReleasePlan(
            sampler=shape.sampler(public_size),
            aggregation=VoteSum() if aggregation is None else aggregation,
            mechanism=noise,
            adjacency=adjacency,
            redraw_every=max_queries if teachers == "one_sample" else 1,
            constants=tuple(constants),
        ),
        max_queries=max_queries,
        width=width,
        design=shape,
        public_size=public_size,
        partition=partition,
        epsilon=0.0,
        delta=delta,
        teachers=teachers,
        max_answers=_answers(max_answers, noise, teachers=teachers, max_queries=max_queries),
        threshold=_threshold(threshold, noise),
    )
    if isinstance(noise, ConfidentGNMaxMechanism):
        if noise_multiplier is not None:
            raise fail("noise_multiplier", "None: confident_gnmax has its own noise", noise_multiplier)
        return priced(draft)
    return with_noise_for(draft, epsilon=epsilon, noise_multiplier=noise_multiplier, is_rough=is_rough)


def rejection(
    abstain_below: float | None, design: RowDesign, *, public_size: int, mechanism: Mechanism | str
) -> dict[str, Any]:
    """Returns the arguments of `plan_labelling` that reject inputs with too few votes: `constants` and `threshold`.

    A released histogram is compared with the threshold; a released index has one more candidate, to abstain.
    """
    if abstain_below is None:
        return {"constants": (), "threshold": None}
    check_real("abstain_below", abstain_below, low=0.0, high=1.0, low_open=True)
    kind = mechanism_by_name(mechanism) if isinstance(mechanism, str) else type(mechanism)
    if kind is ConfidentGNMaxMechanism:
        raise fail("abstain_below", "None with confident_gnmax, which has a threshold of its own", abstain_below)
    votes = abstain_below * expected_rows(design, public_size)
    if kind.releases == "vector":
        return {"constants": (), "threshold": votes}
    return {"constants": (votes,), "threshold": None}


def _design(design: RowDesign | None, *, teachers: Teachers, adjacency: Adjacency, public_size: int) -> RowDesign:
    """Returns the shape of rows, checked against how teachers are drawn."""
    if teachers != "fixed":
        shape = checked_design(design or RowDesign.choose(smallest_size=public_size), adjacency)
        if shape.sampling in {"partition", "disjoint"}:
            expected = f"'poisson' or 'fixed' with teachers={teachers!r}"
            raise fail("sampling", expected, shape.sampling, "A partition is for teachers='fixed'.")
        return shape
    if adjacency != "replace_one":
        advice = "Adding a unit moves others between fixed teachers. Use teachers='fresh', which also costs "
        advice += "far less, or a budget with adjacency='replace_one'."
        raise fail("adjacency", "'replace_one' with teachers='fixed'", adjacency, advice)
    slots = min(DEFAULT_FIXED_TEACHERS, public_size)
    requested = design or RowDesign.choose(num_slots=slots, sampling="partition")
    shape = checked_design(requested, adjacency)
    if shape.sampling != "partition":
        raise fail("sampling", "'partition' with teachers='fixed'", shape.sampling)
    return shape


def _answers(max_answers: int | None, mechanism: Mechanism, *, teachers: Teachers, max_queries: int) -> int | None:
    """Returns the number of answers that are charged separately from their tests; None: none is."""
    if isinstance(mechanism, ConfidentGNMaxMechanism) and teachers != "fresh":
        answers = max_queries if max_answers is None else max_answers
        return check_int("max_answers", answers, low=1, high=max_queries)
    if max_answers is not None:
        expected = "None (only confident_gnmax with teachers that are drawn once charges answers separately)"
        raise fail("max_answers", expected, max_answers)
    return None


def _threshold(threshold: float | None, mechanism: Mechanism) -> float | None:
    """Returns the threshold, which needs a mechanism that releases a noisy vector."""
    if threshold is None:
        return None
    if mechanism.releases != "vector":
        raise fail("threshold", f"None: {mechanism.name} releases no noisy vector", threshold)
    return check_real("threshold", threshold, low=-LARGEST, high=LARGEST)
