"""Compares designs of a generation at equal epsilon, and says which one to take."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from langchain_dpicl.exceptions import ConfigurationError, DPICLError
from langchain_dpicl.planning import GenerationPlan, Segment, plan_generation
from langchain_dpicl.privacy._validate import Adjacency, check_int, check_real
from langchain_dpicl.privacy.extensions.registry import MECHANISMS
from langchain_dpicl.privacy.second_opinions.published_bounds import advanced_composition_epsilon
from langchain_dpicl.row_design import RowDesign, shapes_like
from langchain_dpicl.signal import PUBLIC_SHARE, agreement_of, occupancy
from langchain_dpicl.token_rules import TOKEN_MECHANISMS, TokenRule

WORTH_LESS_WORK = 0.05
"""Loss in the chance of the right token that `thriftiest` accepts for less computation."""
_SHORT_PERIOD = 5


@dataclass(frozen=True, slots=True)
class LocalCost:
    """Work of a local engine that keeps the KV cache of a sample until the next sample, from public caps.

    The public prompt counts as one more row. Tokens are those of the prompts, without padding and without a discount
    for a shared prefix.

    Attributes:
      prefills: prompts read from their first token, one for each row of every sample.
      prefilled_tokens: tokens of these prompts.
      decoded_tokens: one for each row and token after the first of a sample.
    """

    prefills: int
    prefilled_tokens: int
    decoded_tokens: int

    @property
    def tokens(self) -> int:
        """Every token that passes through the model."""
        return self.prefilled_tokens + self.decoded_tokens


def local_cost(plan: GenerationPlan, *, record_tokens: int = 60, instruction_tokens: int = 30) -> LocalCost:
    """Returns the work of a local engine for the whole generation, every demonstration at its full length."""
    check_int("record_tokens", record_tokens, low=1)
    check_int("instruction_tokens", instruction_tokens, low=0)
    prefills = prefilled = decoded = 0.0
    for (_, release), size in zip(plan.branches, plan.public_sizes, strict=True):
        fill = occupancy(release, size)
        rows = fill.rows if release.row_shape == "units" else plan.design.num_slots
        start = 0
        for segment in plan.segments:
            for length, count in release.blocks(segment.max_tokens):
                for _ in range(count):
                    prefills += rows + 1
                    prefilled += rows * fill.shots * record_tokens + (rows + 1) * (instruction_tokens + start)
                    decoded += (rows + 1) * (length - 1)
                    start += length
    demonstrations = plan.shots_per_label
    return LocalCost(*(round(demonstrations * total) for total in (prefills, prefilled, decoded)))


@dataclass(frozen=True, slots=True)
class Option:
    """One design at the requested epsilon.

    Attributes:
      plan: the calibrated plan.
      right_token_prob: expected chance that a token of the smallest declared label is the one most rows predict.
      ceiling_prob: the same at unlimited epsilon: below 1 if tokens are sampled at a temperature.
      private_calls: expected private model calls of the whole generation.
      local: work of a local engine.
    """

    plan: GenerationPlan
    right_token_prob: float
    ceiling_prob: float
    private_calls: int
    local: LocalCost

    @property
    def rank(self) -> tuple[float, int, int, int]:
        """Sort key, best first: right tokens to a tenth of a percent, fewer calls, fewer tokens, mechanism order."""
        order = TOKEN_MECHANISMS.index(self.plan.rule.mechanism)
        return -round(self.right_token_prob, 3), self.private_calls, self.local.tokens, order

    def to_dict(self) -> dict[str, Any]:
        """Returns the option's public numbers."""
        shown = self.plan.to_dict()
        names = ("clip", "temperature", "blend_weight", "center")
        return {
            "mechanism": self.plan.rule.mechanism,
            "rows": self.plan.design.rows,
            "num_slots": self.plan.design.num_slots,
            "shots_per_slot": self.plan.design.shots_per_slot,
            "sampling": self.plan.design.sampling,
            "redraw_every": self.plan.release.redraw_every,
            "noise_multiplier": round(self.plan.noise_multiplier, 4),
            **{name: shown[name] for name in names if name in shown},
            "right_token_prob": round(self.right_token_prob, 4),
            "ceiling_prob": round(self.ceiling_prob, 4),
            "private_calls": self.private_calls,
            **dataclasses.asdict(self.local),
        }


def thriftiest(options: Sequence[Option]) -> Option:
    """Returns the option with the fewest tokens to compute among those nearly as good as the first."""
    good = [o for o in options if o.right_token_prob >= options[0].right_token_prob - WORTH_LESS_WORK]
    return min(good, key=lambda option: (option.local.tokens, option.rank))


def best_drawn(options: Iterable[Option]) -> Option | None:
    """Returns the best option that samples tokens from a softmax; None: there is none."""
    return next((option for option in options if option.plan.rule.is_logit), None)


def published_epsilon(plan: GenerationPlan) -> float | None:
    """Returns the price of a plan's tokens by the analysis of the clip-and-blend paper, for comparison only.

    The pure epsilon of a token is its range over its temperature; the tokens that one unit participates in compose by
    advanced composition, without amplification. None for plans without logits, for plans with free tokens, which the
    paper does not have, and if the number is not finite.
    """
    if not plan.rule.is_logit or plan.rule.free_tokens is not None:
        return None
    tokens = sum(segment.max_tokens for segment in plan.segments)
    if plan.design.sampling != "disjoint":
        tokens *= plan.shots_per_label
    if plan.release.adjacency == "replace_one" and len(plan.branches) > 1:
        tokens *= 2  # a unit may change its label
    bound = advanced_composition_epsilon(1.0 / plan.noise_multiplier, tokens, delta=plan.delta)
    return bound if math.isfinite(bound) else None


def signal_of(plan: GenerationPlan, *, one_shot: float, public_agreement: float | None = None) -> dict[str, Any]:
    """Returns the expected signal of the smallest declared label, with the label and the guesses that it assumes.

    Args:
      plan: the plan to look at.
      one_shot: guessed share of one-shot rows that predict the same token; rows with more shots agree more.
      public_agreement: guessed chance that the public model gives that token; None: a quarter of `one_shot`, however
        many shots the rows see. It matters to logit mechanisms only, and is stated with them.
    """
    size, (label, _) = min(zip(plan.public_sizes, plan.branches, strict=True), key=lambda pair: pair[0])
    shots = plan.expected_signal(one_shot, label=label)["expected_shots"]
    agreement = agreement_of(shots, one_shot=one_shot)
    public = PUBLIC_SHARE * one_shot if public_agreement is None else public_agreement
    stated = {"label": label, "public_size": size, "agreement": agreement}
    return {**stated, **plan.expected_signal(agreement, label=label, public_agreement=public)}


@dataclass(slots=True)
class _Search:
    """Options by mechanism, shape and redraw period; those that the declared sizes do not allow are omitted.

    Mechanisms with the same event share one calibration, which the accountant caches.
    """

    public_sizes: Mapping[str | None, int]
    terms: dict[str, Any]
    rules: dict[str, TokenRule]
    agreement: float
    public_agreement: float | None
    record_tokens: int
    seen: dict[tuple[str, RowDesign, int], Option] = field(default_factory=dict)

    def plan(self, name: str, design: RowDesign, redraw: int) -> GenerationPlan:
        """Returns a calibrated plan."""
        rule = self.rules[name]
        return plan_generation(self.public_sizes, mechanism=rule, design=design, redraw_every=redraw, **self.terms)

    def add(self, names: Iterable[str], designs: Iterable[RowDesign], redraws: Iterable[int]) -> None:
        """Adds an option for every combination."""
        shapes, periods = list(designs), list(redraws)
        for key in ((name, design, redraw) for name in names for design in shapes for redraw in periods):
            if key in self.seen:
                continue
            try:
                plan = self.plan(*key)
            except DPICLError:
                continue
            signal = signal_of(plan, one_shot=self.agreement, public_agreement=self.public_agreement)
            chances = signal["right_token_prob"], signal["ceiling_prob"]
            local = local_cost(plan, record_tokens=self.record_tokens)
            self.seen[key] = Option(plan, *chances, plan.cost().private_calls, local)

    def options(self) -> list[Option]:
        """Returns the options, best first."""
        return sorted(self.seen.values(), key=lambda option: option.rank)

    def leaders(self) -> list[Option]:
        """Returns the options to continue from: the best or, if some sample from a softmax, the best of both kinds.

        The worse of the two kinds may be better with another sampling, and both share their calibrations.
        """
        options = self.options()
        drawn = best_drawn(options)
        if drawn is None:
            return options[:1]
        return [*[option for option in options if option.plan.rule.mechanism == "gumbel"][:1], drawn]


def compare(
    public_sizes: Mapping[str | None, int],
    *,
    epsilon: float,
    delta: float,
    adjacency: Adjacency = "add_remove",
    base: RowDesign | None = None,
    redraw_every: int | None = None,
    shots_per_label: int = 1,
    max_tokens: int = 60,
    candidates: int = 101,
    record_tokens: int = 60,
    agreement: float = 0.6,
    public_agreement: float | None = None,
    full_vocabulary: bool = False,
    rule: TokenRule | None = None,
) -> list[Option]:
    """Returns designs at equal records per token and equal epsilon, best first (see `Option.rank`).

    Compares the mechanisms on the starting shape, then other row shapes, then other sampling (a new sample every few
    tokens, one per demonstration, one allocation of disjoint batches for all), each with the best mechanism so far or,
    if the model returns its whole vocabulary, with Gumbel noise on probabilities and the best mechanism that samples
    from a softmax. Designs that the declared sizes do not allow are omitted.

    Args:
      public_sizes: declared units per label.
      epsilon: the share.
      delta: its delta.
      adjacency: neighbouring relation.
      base: starting shape; its records per token (`num_slots * shots_per_slot`) are kept.
      redraw_every: starting redraw period; None: 1, or `max_tokens` for disjoint batches.
      shots_per_label: demonstrations per label.
      max_tokens: tokens per demonstration.
      candidates: width of the public domain.
      record_tokens: public cap of a record, in tokens.
      agreement: guessed share of one-shot rows that predict the same token.
      public_agreement: see `signal_of`.
      full_vocabulary: whether the model returns its whole vocabulary, which the logit mechanisms need.
      rule: a mechanism with parameters, compared in place of its defaults; a clip that fixes the noise together with
        a temperature is dropped, because epsilon determines the noise here.
    """
    check_real("agreement", agreement, low=0.0, high=1.0)
    start = base or RowDesign.choose()
    redraw_every = redraw_every or (max_tokens if start.sampling == "disjoint" else 1)
    terms: dict[str, Any] = {"epsilon": epsilon, "delta": delta, "adjacency": adjacency}
    terms |= {"shots_per_label": shots_per_label, "segments": (Segment("text", max_tokens),), "candidates": candidates}
    search = _Search(public_sizes, terms, _rules(rule, full_vocabulary), agreement, public_agreement, record_tokens)
    search.add(search.rules, [start], [redraw_every])
    if not search.seen:  # planning once more, outside the search, raises the reason
        search.plan(next(iter(search.rules)), start, redraw_every)
        raise ConfigurationError("designs: expected one that the declared sizes and caps allow, found none.")
    for leader in search.leaders():
        search.add([leader.plan.rule.mechanism], shapes_like(start, (1, 2, 4)), [redraw_every])
    periods = sorted({1, redraw_every, min(_SHORT_PERIOD, max_tokens), max_tokens})
    for leader in search.leaders():
        name, design = leader.plan.rule.mechanism, leader.plan.design
        search.add([name], dict.fromkeys((design, start) if full_vocabulary else (design,)), periods)
        if shots_per_label > 1:  # one batch is a Poisson sample
            search.add([name], [dataclasses.replace(_as_slots(design), sampling="disjoint")], [max_tokens])
    return search.options()


def _rules(rule: TokenRule | None, full_vocabulary: bool) -> dict[str, TokenRule]:
    """Returns the mechanisms to compare, by name."""
    names = TOKEN_MECHANISMS if full_vocabulary else tuple(MECHANISMS)
    rules = {name: TokenRule(name) for name in names}
    if rule is not None and rule.mechanism in rules:
        rules[rule.mechanism] = dataclasses.replace(rule, clip=None) if rule.fixes_noise else rule
    return rules


def _as_slots(design: RowDesign) -> RowDesign:
    return RowDesign.choose(rows="slots", num_slots=design.num_slots, shots_per_slot=design.shots_per_slot)
