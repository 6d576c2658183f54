"""Plans a generation: calibrates its noise and states its tickets, cost and expected signal."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from langchain_dpicl._cost import Cost, priced, with_noise_for
from langchain_dpicl.privacy._validate import (
    Adjacency,
    check_adjacency,
    check_delta,
    check_int,
    check_real,
    fail,
)
from langchain_dpicl.privacy.accounting.events import Event
from langchain_dpicl.privacy.mechanisms.release_plan import ReleasePlan
from langchain_dpicl.privacy.tickets import Ticket, event_of_tickets
from langchain_dpicl.row_design import RowDesign, redrawn
from langchain_dpicl.signal import noise_scale, occupancy, token_signal
from langchain_dpicl.token_rules import TokenRule, temperature_of


@dataclass(frozen=True, slots=True)
class Segment:
    """One generated field of a demonstration and its cap in tokens."""

    name: str
    max_tokens: int

    def __post_init__(self) -> None:
        check_int(f"max_tokens of {self.name}", self.max_tokens, low=1)


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """Everything public about one generation: what will run, what it is charged, what it will cost.

    Attributes:
      branches: (label, plan) pairs; one branch with label None where labels do not split the records.
      shots_per_label: demonstrations per branch.
      segments: generated fields in order.
      candidates: width of the public domain per token.
      partition: the `dataset_id` of the examples, whose units the labels split.
      design: the shape of rows.
      public_sizes: declared units per branch.
      epsilon: upper bound of the whole generation at `delta`.
      delta: the share's delta, the declared gap of the noise included.
      rule: the mechanism with its requested parameters.
    """

    branches: tuple[tuple[str | None, ReleasePlan], ...]
    shots_per_label: int
    segments: tuple[Segment, ...]
    candidates: int
    partition: str
    design: RowDesign
    public_sizes: tuple[int, ...]
    epsilon: float
    delta: float
    rule: TokenRule

    @property
    def release(self) -> ReleasePlan:
        """The first branch's release plan (branches differ in the sampling rate only)."""
        return self.branches[0][1]

    @property
    def noise_multiplier(self) -> float:
        """Noise scale over sensitivity."""
        return self.release.mechanism.noise_multiplier

    @property
    def implementation_delta(self) -> float:
        """Declared gap between ideal and drawn noise over the releases that one unit participates in."""
        releases = self.shots_per_label * sum(segment.max_tokens for segment in self.segments)
        # Under replace_one a unit may change its label and so participate in two branches.
        branches = 2 if self.release.adjacency == "replace_one" and len(self.branches) > 1 else 1
        return branches * self.release.implementation_delta(releases, width=self.candidates)

    def tickets(self) -> tuple[Ticket, ...]:
        """Returns the tickets of the share: one template per segment and block length, per label.

        If one allocation serves all demonstrations of a label, they are one ticket.
        """
        if self.design.sampling == "disjoint":
            name, length = deal_name(self.shots_per_label), sum(segment.max_tokens for segment in self.segments)
            return tuple(
                Ticket(template=name, event=plan.block_event(length), label=label, max_count=1, refundable=False)
                for label, plan in self.branches
            )
        return tuple(
            Ticket(
                template=template_name(segment.name, length),
                event=plan.block_event(length),
                label=label,
                max_count=self.shots_per_label * count,
                refundable=plan.redraw_every == 1,
            )
            for label, plan in self.branches
            for segment in self.segments
            for length, count in plan.blocks(segment.max_tokens)
        )

    def event(self) -> Event:
        """Returns the event of the whole generation."""
        return event_of_tickets(self.tickets(), partition=self.partition)

    def cost(self, *, record_tokens: int = 60, instruction_tokens: int = 30) -> Cost:
        """Returns model calls and tokens from public caps (no discount for caches)."""
        check_int("record_tokens", record_tokens, low=1)
        check_int("instruction_tokens", instruction_tokens, low=0)
        calls = public = tokens_in = 0.0
        per_demo = sum(segment.max_tokens for segment in self.segments)
        # A prompt holds half of a demonstration's tokens on average.
        for (_, plan), size in zip(self.branches, self.public_sizes, strict=True):
            fill = occupancy(plan, size)
            rows = fill.rows if plan.row_shape == "units" else self.design.num_slots
            releases = self.shots_per_label * per_demo
            calls += releases * rows
            public += releases
            prompt = instruction_tokens + fill.shots * record_tokens + per_demo / 2
            tokens_in += releases * (rows * prompt + instruction_tokens + per_demo / 2)
        return Cost(round(calls), round(public), round(tokens_in), round(calls + public))

    def expected_signal(
        self, agreement: float, *, label: str | None = None, public_agreement: float | None = None
    ) -> dict[str, float]:
        """Returns occupancy and `token_signal` at a guessed `agreement` of rows."""
        check_real("agreement", agreement, low=0.0, high=1.0)
        plans = dict(self.branches)
        sizes = dict(zip(plans, self.public_sizes, strict=True))
        chosen = min(sizes, key=lambda name: sizes[name]) if label is None else label
        if chosen not in plans:
            raise fail("label", f"one of {list(plans)}", label)
        plan = plans[chosen]
        fill = occupancy(plan, sizes[chosen])
        return {
            "expected_rows": fill.rows,
            "expected_shots": fill.shots,
            "empty_slot_prob": fill.empty,
            **token_signal(
                plan,
                rows=fill.rows,
                agreement=agreement,
                candidates=self.candidates,
                public_agreement=public_agreement,
            ),
        }

    def to_dict(self) -> dict[str, Any]:
        """Returns the public plan as JSON values."""
        return {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "adjacency": self.release.adjacency,
            "mechanism": self.rule.mechanism,
            "noise_multiplier": self.noise_multiplier,
            "noise_scale": noise_scale(self.release),
            **self._logit_numbers(),
            **dataclasses.asdict(self.design),
            "redraw_every": self.release.redraw_every,
            "shots_per_label": self.shots_per_label,
            "max_tokens": {segment.name: segment.max_tokens for segment in self.segments},
            "candidates": self.candidates,
            "labels": [
                {"label": label, "public_size": size, "sampling_rate": plan.sampler.sampling_rate}
                for (label, plan), size in zip(self.branches, self.public_sizes, strict=True)
            ],
        }

    def _logit_numbers(self) -> dict[str, Any]:
        """Returns the parameters of the logit mechanisms other than their noise."""
        if not self.rule.is_logit:
            return {}
        numbers = self.release.aggregation.to_dict()
        shown: dict[str, Any] = {k: v for k, v in numbers.items() if k in {"clip", "blend_weight", "center"}}
        shown["temperature"] = temperature_of(self.release)
        if self.release.test is not None:
            shown["free_tokens"] = self.release.test.threshold
            shown["private_tokens"] = self.release.private_releases
            shown["test_noise_multiplier"] = self.release.test.noise_multiplier
        return shown


def template_name(segment: str, length: int) -> str:
    """Returns the ticket template of one block."""
    return f"{segment}: {length} token{'s' if length > 1 else ''} on one sample"


def deal_name(num_batches: int) -> str:
    """Returns the ticket template of one allocation."""
    return f"{num_batches} demonstration{'s' if num_batches > 1 else ''} on disjoint batches of one deal"


def plan_generation(
    public_sizes: Mapping[str | None, int],
    *,
    epsilon: float | None,
    delta: float,
    adjacency: Adjacency = "add_remove",
    noise_multiplier: float | None = None,
    mechanism: str | TokenRule = "gumbel",
    design: RowDesign | None = None,
    redraw_every: int | None = None,
    shots_per_label: int = 1,
    segments: Iterable[Segment] = (Segment("text", 60),),
    candidates: int = 101,
    partition: str = "private-examples",
) -> GenerationPlan:
    """Calibrates the noise of a generation to `epsilon`, or prices a given noise.

    Args:
      public_sizes: declared number of units per label ({None: n} where labels do not split).
      epsilon: target; the plan's epsilon is an upper bound at most this. None needs `noise_multiplier`.
      delta: the share's delta.
      adjacency: neighbouring relation.
      noise_multiplier: given noise; None calibrates.
      mechanism: one of `TOKEN_MECHANISMS`, or a `TokenRule` with its parameters.
      design: shape of rows; by default `RowDesign.choose()`.
      redraw_every: tokens per secret sample; None: 1, or all of a demonstration if one allocation serves a run.
      shots_per_label: demonstrations per label.
      segments: generated fields and their caps.
      candidates: width of the public domain per token.
      partition: the data set's public id.
    """
    check_adjacency(adjacency)
    check_delta(delta)
    rule = mechanism if isinstance(mechanism, TokenRule) else TokenRule(mechanism)
    check_int("shots_per_label", shots_per_label, low=1)
    check_int("candidates", candidates, low=2)
    pieces = tuple(segments)
    shape = design or RowDesign.choose()
    redraw_every = _redraw_period(redraw_every, shape, rule, longest=max(piece.max_tokens for piece in pieces))
    if shape.sampling == "fixed" and (adjacency != "replace_one" or len(public_sizes) > 1):
        raise fail("sampling", "'poisson' (a fixed-size sample needs replace_one and no labels)", shape.sampling)
    if rule.fixes_noise and noise_multiplier is not None:
        raise fail("noise_multiplier", "None where clip and temperature are both given", noise_multiplier)
    draft = GenerationPlan(
        branches=tuple(
            (
                label,
                rule.plan(
                    shape.sampler(size, num_batches=shots_per_label),
                    num_rows=shape.num_slots,
                    noise_multiplier=1.0,  # replaced below
                    adjacency=adjacency,
                    redraw_every=redraw_every,
                ),
            )
            for label, size in public_sizes.items()
        ),
        shots_per_label=shots_per_label,
        segments=pieces,
        candidates=candidates,
        partition=partition,
        design=shape,
        public_sizes=tuple(public_sizes.values()),
        epsilon=0.0,
        delta=delta,
        rule=rule,
    )
    if rule.fixes_noise:
        return priced(draft)
    return with_noise_for(draft, epsilon=epsilon, noise_multiplier=noise_multiplier, with_noise=_with_noise)


def _redraw_period(requested: int | None, shape: RowDesign, rule: TokenRule, *, longest: int) -> int:
    """Returns the number of tokens per sample, checked against the shape of rows and the rule."""
    if requested is not None:
        check_int("redraw_every", requested, low=1, high=longest)
    if shape.sampling == "disjoint":
        if requested not in {None, longest}:
            advice = "A demonstration uses its own batch of the allocation from its first token to its last."
            raise fail("redraw_every", f"None (or max_tokens={longest}) with sampling='disjoint'", requested, advice)
        return longest
    redrawn(shape)
    period = requested or 1
    if rule.free_tokens is not None and period < longest:
        raise fail("redraw_every", f"max_tokens={longest}", period, "Free tokens need one sample per demonstration.")
    return period


def _with_noise(plan: GenerationPlan, noise_multiplier: float) -> GenerationPlan:
    branches = tuple(
        (
            label,
            plan.rule.plan(
                branch.sampler,
                num_rows=plan.design.num_slots,
                noise_multiplier=noise_multiplier,
                adjacency=branch.adjacency,
                redraw_every=branch.redraw_every,
            ),
        )
        for label, branch in plan.branches
    )
    return dataclasses.replace(plan, branches=branches)
