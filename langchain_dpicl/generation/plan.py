"""Plans a generation (mechanism of a token, noise, tickets, cost, signal), and compares designs at equal epsilon."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeGuard

from langchain_dpicl._calls import warn_caller
from langchain_dpicl.exceptions import ConfigurationError, DPICLError, NoisyPlanWarning
from langchain_dpicl.options import LogitNoise, Noise, OpenLabel
from langchain_dpicl.planning.expected_utility import (
    PUBLIC_SHARE,
    RowDesign,
    agreement_of,
    noise_scale,
    occupancy,
    search_designs,
    shapes_like,
    token_signal,
    with_redraw,
)
from langchain_dpicl.planning.share_plan import (
    Cost,
    SharePlan,
    num_branches,
    plan_first_words,
    terms_shown,
    with_noise_for,
    with_price,
)
from langchain_dpicl.privacy._validate import (
    Adjacency,
    check_adjacency,
    check_choice,
    check_epsilon,
    check_int,
    check_positive,
    check_positive_delta,
    check_real,
    fail,
    round_up_at,
)
from langchain_dpicl.privacy.extensions.logit_sums import LOGIT_MECHANISMS, ClippedDifferenceMean, logit_sum
from langchain_dpicl.privacy.extensions.registry import MECHANISMS, mechanism_by_name
from langchain_dpicl.privacy.extensions.sparse_vector import SparseVectorTest
from langchain_dpicl.privacy.extensions.word_release import FIRST_WORDS_TEMPLATE, UnitWords, WordRelease, word_release
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.privacy.mechanisms.bounded import Aggregation, ProbabilitySum
from langchain_dpicl.privacy.mechanisms.release_plan import GumbelMechanism, ReleasePlan, Sampler

if TYPE_CHECKING:
    from langchain_dpicl.rehearsal.generation import GenerationRehearsal


TOKEN_MECHANISMS: tuple[str, ...] = (*MECHANISMS, *LOGIT_MECHANISMS)
"""Every mechanism that releases tokens, the default first."""
DEFAULT_TEMPERATURE = 1.0
TEST_SHARE = 0.25
"""Cost of one run of the test for free tokens, relative to the private token that ends it (both in zCDP)."""


@dataclass(frozen=True, slots=True)
class TokenRule:
    """A mechanism of generation with its own parameters; frozen and public.

    Attributes:
      mechanism: one of `TOKEN_MECHANISMS`.
      clip: largest magnitude of a (centred) logit or difference; None: computed from temperature and noise.
      temperature: of the released token's softmax; None: 1, or with `clip` computed from clip and noise.
      blend_weight: share of the private rows in the score, for "clip_and_blend"; None: one half.
      center: what is subtracted from a row before clipping: "max" or "none" for "clip_and_blend"; fixed for the others.
      free_tokens: share of the rows in (0, 1): where the total variation between the mean of the rows' next-token
        distributions and the public one is (noisily) below it, the token is drawn from the public one and costs
        nothing. None: every token is private.
      private_tokens: with `free_tokens`, how many tokens of a sample may be private; the rest is public.

    Source: Bhusal et al. (2025); InvisibleInk (2025); docs/proofs/logit-sums.md.
    """

    mechanism: str = "gumbel"
    clip: float | None = None
    temperature: float | None = None
    blend_weight: float | None = None
    center: str | None = None
    free_tokens: float | None = None
    private_tokens: int | None = None

    def __post_init__(self) -> None:
        check_choice("mechanism", self.mechanism, TOKEN_MECHANISMS)
        options = {"clip": self.clip, "blend_weight": self.blend_weight, "center": self.center}
        options |= {"free_tokens": self.free_tokens, "private_tokens": self.private_tokens}
        if not self.is_logit:
            options["temperature"] = self.temperature
            _refuse(options, f"None with mechanism={self.mechanism!r} (they belong to {', '.join(LOGIT_MECHANISMS)})")
            return
        if self.mechanism != "clip_and_blend":
            blend = {"blend_weight": self.blend_weight, "center": self.center}
            _refuse(blend, f"None with mechanism={self.mechanism!r} (they belong to clip_and_blend)")
        if self.clip is not None:
            check_real("clip", self.clip, low=1e-6, high=1e6)
        if self.temperature is not None:
            check_positive("temperature", self.temperature)
        if self.blend_weight is not None:
            check_real("blend_weight", self.blend_weight, low=0.0, high=1.0, low_open=True)
        if self.center is not None:
            check_choice("center", self.center, ("max", "none"))
        if (self.free_tokens is None) != (self.private_tokens is None):
            raise fail("free_tokens, private_tokens", "both or neither", (self.free_tokens, self.private_tokens))
        if self.free_tokens is not None:
            check_real("free_tokens", self.free_tokens, low=0.0, high=1.0, low_open=True, high_open=True)
            check_int("private_tokens", self.private_tokens, low=1)

    @classmethod
    def of(cls, noise: Noise | LogitNoise, temperature: float | None) -> TokenRule:
        """Returns the rule of `noise=`; the temperature is a logit mechanism's own, and otherwise the decoder's."""
        if not isinstance(noise, LogitNoise):
            return cls(noise.mechanism or "gumbel")
        return cls(
            noise.mechanism,
            clip=noise.clip,
            temperature=temperature,
            blend_weight=noise.blend_weight,
            center=noise.center,
            free_tokens=noise.free_below,
            private_tokens=noise.max_private_tokens,
        )

    @property
    def is_logit(self) -> bool:
        """Whether rows are logits."""
        return self.mechanism in LOGIT_MECHANISMS

    @property
    def fixes_noise(self) -> bool:
        """Whether clip and temperature are both given, so that the noise multiplier follows from them."""
        return self.clip is not None and self.temperature is not None

    def plan(
        self,
        sampler: Sampler,
        *,
        num_rows: int,
        noise_multiplier: float,
        adjacency: Adjacency = "add_remove",
        redraw_every: int = 1,
    ) -> ReleasePlan:
        """Returns the plan of one token at this noise; `num_rows` is what means are divided by."""
        if not self.is_logit:
            return release_plan(
                sampler,
                mechanism=self.mechanism,
                noise_multiplier=noise_multiplier,
                adjacency=adjacency,
                redraw_every=redraw_every,
            )
        of_one = self._aggregation(1.0, num_rows).sensitivity(row_shape=sampler.row_shape, adjacency=adjacency)
        unit = of_one.require("range")  # it grows in proportion to the clip
        if self.clip is not None and self.temperature is not None:
            # temperature = noise_multiplier * range, and the range is unit * clip: two of the three decide the third.
            noise_multiplier = self.temperature / (unit * self.clip)
        clip = self.clip
        if clip is None:
            clip = min(1e6, max(1e-6, (self.temperature or DEFAULT_TEMPERATURE) / (unit * noise_multiplier)))
        return ReleasePlan(
            sampler,
            self._aggregation(clip, num_rows),
            GumbelMechanism(noise_multiplier),
            adjacency,
            redraw_every,
            test=self._test(noise_multiplier),
            private_releases=self.private_tokens or 0,
        )

    def _test(self, noise_multiplier: float) -> SparseVectorTest | None:
        """Returns the test whose run costs `TEST_SHARE` of a private token: 2 / n^2 against (1 / noise)^2 / 8."""
        if self.free_tokens is None:
            return None
        return SparseVectorTest(self.free_tokens, min(1e12, 4.0 * noise_multiplier / math.sqrt(TEST_SHARE)))

    def _aggregation(self, clip: float, num_rows: int) -> Aggregation:
        return logit_sum(
            self.mechanism, clip=clip, num_slots=num_rows, blend_weight=self.blend_weight, center=self.center
        )


def release_plan(
    sampler: Sampler,
    *,
    mechanism: str = "gumbel",
    noise_multiplier: float = 1.0,
    adjacency: Adjacency = "add_remove",
    redraw_every: int = 1,
) -> ReleasePlan:
    """Returns the plan that releases a token from summed next-token probabilities."""
    noise = mechanism_by_name(mechanism)(noise_multiplier=noise_multiplier)
    return ReleasePlan(sampler, ProbabilitySum(), noise, adjacency, redraw_every)


def temperature_of(plan: ReleasePlan) -> float | None:
    """Returns the temperature of the released token's softmax; None where rows are no logits."""
    if not plan.aggregation.needs_public:
        return None
    return plan.mechanism.noise_multiplier * plan.sensitivity.require("range")


def public_margin(plan: ReleasePlan) -> float:
    """Returns how far below the last of the public top-K a candidate may be: 2 clip / num_slots (Top-k+), or 0.

    Where differences are added to the public logits, one row moves a score by at most clip / num_slots either way, so
    these are the tokens that one row can lift among the top K. Which constant belongs here does not touch privacy: the
    candidates are a function of the public logits.

    Source: InvisibleInk (2025), Top-k+; its published package divides by num_slots + 1.
    """
    aggregation = plan.aggregation
    return 2.0 * aggregation.clip / aggregation.num_slots if isinstance(aggregation, ClippedDifferenceMean) else 0.0


def _refuse(options: dict[str, Any], expected: str) -> None:
    wrong = [name for name, value in options.items() if value is not None]
    if wrong:
        raise fail(", ".join(wrong), expected, [options[name] for name in wrong])


GUESSED = "a guess"
"""What the chances of a plan rest on where nothing was rehearsed."""
AGREEMENT = 0.6
"""Share of one-shot rows that are taken to want the same token, where nothing is known of the model."""
_MOSTLY = 0.5
"""Below this part of the chance that a token would have without noise, noise decides it."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One generated field of a demonstration and its cap in tokens."""

    name: str
    max_tokens: int

    def __post_init__(self) -> None:
        check_int(f"max_tokens of {self.name}", self.max_tokens, low=1)


def segments_of(label: OpenLabel | None, *, max_tokens: int) -> tuple[Segment, ...]:
    """Returns what a demonstration is written of: its text, after an open label that no public list gives."""
    text = Segment("text", max_tokens)
    if label is None or label.values is not None:
        return (text,)
    # An open label is private text: it is generated before the text, at a cost of its own.
    return Segment("label", label.max_tokens), text


@dataclass(frozen=True, slots=True)
class GenerationPlan(SharePlan):
    """Everything public about one generation: what will run, what it is charged, what it will cost.

    Attributes:
      branches: (label, plan) pairs; one branch with label None where labels do not split the records.
      shots_per_label: demonstrations per branch.
      segments: generated fields in order.
      candidates: width of the public domain per token.
      design: the shape of rows.
      public_sizes: declared units per branch.
      rule: the mechanism with its requested parameters.
      words: the release of words of each branch that comes before its texts; None: no words leave.
    """

    method: ClassVar[str] = "generation"

    branches: tuple[tuple[str | None, ReleasePlan], ...]
    shots_per_label: int
    segments: tuple[Segment, ...]
    candidates: int
    design: RowDesign
    public_sizes: tuple[int, ...]
    rule: TokenRule
    words: WordRelease | None = None

    @property
    def release(self) -> ReleasePlan:
        """The first branch's release plan (branches differ in the sampling rate only)."""
        return self.branches[0][1]

    @property
    def sizes(self) -> Mapping[str | None, int]:
        """Declared units by label."""
        return {label: size for (label, _), size in zip(self.branches, self.public_sizes, strict=True)}

    @property
    def implementation_delta(self) -> float:
        """Declared gap between ideal and drawn noise over the releases that one unit participates in."""
        releases = self.shots_per_label * sum(segment.max_tokens for segment in self.segments)
        # Under replace_one a unit may change its label and so participate in two branches.
        branches = num_branches(len(self.branches), self.release.adjacency)
        of_words = 0.0 if self.words is None else self.words.implementation_delta
        return branches * (of_words + self.release.implementation_delta(releases, width=self.candidates))

    def tickets(self) -> tuple[Ticket, ...]:
        """Returns the tickets of the share: words of each label, if any leave, and those of the texts."""
        if (words := self.words) is None:
            return self.text_tickets()
        first = (Ticket(FIRST_WORDS_TEMPLATE, words.event, label=name, refundable=True) for name, _ in self.branches)
        return (*first, *self.text_tickets())

    def text_tickets(self) -> tuple[Ticket, ...]:
        """Returns the tickets of the texts: one template per segment and block length, per label.

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

    def words_from(self, confidence: float = 0.95) -> int | None:
        """Returns how many units of a label must cast a word for it to be released; None: no words are."""
        return None if self.words is None else self.words.found_from(confidence)

    def cost(self, *, record_tokens: int = 60, instruction_tokens: int = 30) -> Cost:
        """Returns model calls and tokens from public caps (no discount for caches); words call no model."""
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

    def expected(
        self,
        source: float | GenerationRehearsal,
        *,
        label: str | None = None,
        public_agreement: float | None = None,
    ) -> dict[str, Any]:
        """Returns the occupancy of one branch, the chance of the right token, and what that rests on.

        Args:
          source: a rehearsal, or a guessed agreement of rows, which `token_signal` turns into a chance.
          label: of the branch; None: the smallest one, and the chance over all labels where it was rehearsed.
          public_agreement: of a guess, see `expected_values`.

        Raises:
          ConfigurationError: an unknown label, a guess out of range, or a plan that the rehearsal does not speak for.
        """
        sizes = self.sizes
        chosen = min(sizes, key=lambda name: sizes[name]) if label is None else label
        if chosen not in sizes:
            raise fail("label", f"one of {list(sizes)}", label)
        plan = dict(self.branches)[chosen]
        fill = occupancy(plan, sizes[chosen])
        occupied = {"expected_rows": fill.rows, "expected_shots": fill.shots, "empty_slot_prob": fill.empty}
        if _is_rehearsed(source):
            return {**occupied, **source.outlook(self, label=label)}
        agreement = check_real("agreement", source, low=0.0, high=1.0)
        signal = token_signal(
            plan,
            rows=fill.rows,
            agreement=agreement,
            candidates=self.candidates,
            public_agreement=public_agreement,
        )
        return {**occupied, **signal, "rests_on": GUESSED}

    def _numbers(self) -> dict[str, Any]:
        return {
            "mechanism": self.rule.mechanism,
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
            **({} if self.words is None else {"words": self.words.to_dict()}),
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

    @classmethod
    def rebuild(cls, shown: Mapping[str, Any]) -> GenerationPlan:
        """Returns the plan of the parameters shown, see `SharePlan.rebuild`."""
        names = ["clip", "free_tokens", "private_tokens"]
        if shown["mechanism"] == "clip_and_blend":
            names += ["blend_weight", "center"]  # fixed for the others
        return plan_generation(
            {branch["label"]: branch["public_size"] for branch in shown["labels"]},
            mechanism=TokenRule(shown["mechanism"], **{name: shown.get(name) for name in names}),
            design=RowDesign.shown(shown),
            segments=[Segment(name, tokens) for name, tokens in shown["max_tokens"].items()],
            words=None if shown.get("words") is None else word_release(shown["words"]),
            **terms_shown(shown, "redraw_every", "shots_per_label", "candidates"),
        )


def _is_rehearsed(source: float | GenerationRehearsal) -> TypeGuard[GenerationRehearsal]:
    # A rehearsal loads LangChain, which a plan alone does not need.
    if isinstance(source, int | float):
        return False
    from langchain_dpicl.rehearsal.generation import GenerationRehearsal

    if not isinstance(source, GenerationRehearsal):
        raise fail("source", "a guessed agreement, or a GenerationRehearsal", type(source))
    return True


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
    redraw_every: int | Literal["run"] | None = None,
    shots_per_label: int = 1,
    segments: Iterable[Segment] = (Segment("text", 60),),
    candidates: int = 101,
    partition: str = "private-examples",
    words: UnitWords | WordRelease | None = None,
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
      redraw_every: tokens per secret sample, or "run": one sample for a demonstration. None: 1, or all of a
        demonstration if one allocation serves a run.
      shots_per_label: demonstrations per label.
      segments: generated fields and their caps.
      candidates: width of the public domain per token.
      partition: the data set's public id.
      words: what a unit casts for the words that leave before the texts, which then take half of epsilon by
        themselves; or their release; None: no words leave.
    """
    check_adjacency(adjacency)
    check_positive_delta(delta)
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
    if isinstance(words, UnitWords):
        if epsilon is None:
            raise fail("epsilon", "this component's share of the budget, which words are a part of", epsilon)
        terms: dict[str, Any] = {"epsilon": check_epsilon(epsilon), "delta": delta, "adjacency": adjacency}
        words = plan_first_words(words, public_sizes, **terms)
    if words is not None and (words.adjacency != adjacency or not isinstance(words.rule, UnitWords)):
        raise fail("words", f"a release of words under {adjacency!r}", (words.rule.kind, words.adjacency))
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
        words=words,
    )
    if rule.fixes_noise:
        return with_price(draft)
    return with_noise_for(draft, epsilon=epsilon, noise_multiplier=noise_multiplier, with_noise=_with_noise)


def _redraw_period(requested: int | Literal["run"] | None, shape: RowDesign, rule: TokenRule, *, longest: int) -> int:
    """Returns the number of tokens per sample, checked against the shape of rows and the rule."""
    if requested == "run":
        requested = longest
    if requested is not None:
        check_int("redraw_every", requested, low=1, high=longest)
    if shape.sampling == "disjoint":
        if requested not in {None, longest}:
            advice = "A demonstration uses its own batch of the allocation from its first token to its last."
            raise fail("redraw_every", f"None (or max_tokens={longest}) with sampling='disjoint'", requested, advice)
        return longest
    with_redraw(shape)
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


WORD_SHARES = (0.1, 0.2, 0.33, 0.5, 0.7)
"""Parts of epsilon at which `word_shares` looks."""


def word_shares(plan: GenerationPlan, *, epsilon: float) -> list[dict[str, Any]]:
    """Returns, for parts of epsilon that words cost by themselves, how many units a word needs, and the texts' noise.

    The first one is without words. Prices are not added up: words and texts are calibrated together.
    """
    found, rule, words = list[dict[str, Any]](), None if plan.words is None else plan.words.rule, None
    if not isinstance(rule, UnitWords) or plan.rule.fixes_noise:
        return found
    for share in (0.0, *WORD_SHARES):
        if share:
            terms: dict[str, Any] = {"epsilon": epsilon, "delta": plan.delta, "adjacency": plan.adjacency}
            words = plan_first_words(rule, plan.sizes, **terms, share=share)
        draft = dataclasses.replace(plan, words=words)
        made = with_noise_for(draft, epsilon=epsilon, noise_multiplier=None, is_rough=True, with_noise=_with_noise)
        found.append({"share": share, "words_from": made.words_from(), "noise_multiplier": made.noise_multiplier})
    return found


def advanced_composition_epsilon(epsilon_per_token: float, tokens: int, *, delta: float) -> float:
    """Returns epsilon of `tokens` adaptive releases by advanced composition: for comparison only, never charged.

    It is epsilon sqrt(2 tokens ln(1 / delta)) + tokens epsilon (e^epsilon - 1), in plain floats that are not rounded
    up; `math.inf` where that overflows. What `accounting` charges for the same tokens, unsampled, is
    `RepeatedEvent(BoundedRangeEvent(epsilon), tokens)`: epsilon^2 / 8 of zCDP a token, and so a fraction of this.

    Args:
      epsilon_per_token: pure epsilon of one token: the range of a score's change over the temperature.
      tokens: how many tokens are released.
      delta: of the composition.

    Raises:
      ConfigurationError: an argument out of range.

    >>> round(advanced_composition_epsilon(0.1, 100, delta=1e-6), 3)
    6.308

    Source: Dwork and Roth (2014), The Algorithmic Foundations of Differential Privacy, Theorem 3.20, which Bhusal et
      al. (2025) apply as their Lemma 3.
    """
    epsilon = check_epsilon(epsilon_per_token)
    count = check_int("tokens", tokens, low=0)
    spread = math.sqrt(2.0 * count * math.log(1.0 / check_positive_delta(delta)))
    try:
        return epsilon * spread + count * epsilon * math.expm1(epsilon)
    except OverflowError:
        return math.inf if count else 0.0


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
class DesignOption:
    """One design at the requested epsilon.

    Attributes:
      plan: the calibrated plan.
      right_token_prob: expected chance that a token is the one most rows predict: of the smallest declared label by a
        guess, over all labels by a rehearsal.
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
            "overfill": self.plan.design.overfill,
            "sampling": self.plan.design.sampling,
            "redraw_every": self.plan.release.redraw_every,
            "noise_multiplier": round_up_at(self.plan.noise_multiplier),
            **{name: shown[name] for name in names if name in shown},
            "right_token_prob": round(self.right_token_prob, 4),
            "ceiling_prob": round(self.ceiling_prob, 4),
            "private_calls": self.private_calls,
            **dataclasses.asdict(self.local),
        }


def thriftiest(options: Sequence[DesignOption]) -> DesignOption:
    """Returns the option with the fewest tokens to compute among those nearly as good as the first."""
    good = [o for o in options if o.right_token_prob >= options[0].right_token_prob - WORTH_LESS_WORK]
    return min(good, key=lambda option: (option.local.tokens, option.rank))


def best_drawn(options: Iterable[DesignOption]) -> DesignOption | None:
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
    tokens = sum(segment.max_tokens for segment in plan.segments) * num_branches(len(plan.branches), plan.adjacency)
    if plan.design.sampling != "disjoint":
        tokens *= plan.shots_per_label
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
    shots = plan.expected(one_shot, label=label)["expected_shots"]
    agreement = agreement_of(shots, one_shot=one_shot)
    public = PUBLIC_SHARE * one_shot if public_agreement is None else public_agreement
    stated = {"label": label, "public_size": size, "agreement": agreement}
    return {**stated, **plan.expected(agreement, label=label, public_agreement=public)}


def noise_advice(signal: Mapping[str, Any]) -> str:
    """Returns what noise does and what to change, where it decides most tokens; otherwise nothing."""
    if signal["right_token_prob"] >= _MOSTLY * signal.get("ceiling_prob", 1.0):
        return ""
    whose = "" if signal["label"] is None else f" of {signal['label']}"
    advice = "release fewer or shorter texts, or raise epsilon"
    return f"noise decides most tokens; use more records{whose}, {advice}"


def warn_of_noise(plan: GenerationPlan) -> None:
    """Warns the program if noise decides most tokens of a plan, by the usual guess about the model."""
    if advice := noise_advice(signal_of(plan, one_shot=AGREEMENT)):
        warn_caller(NoisyPlanWarning(f"By a guess about the model, {advice}. `dpicl plan` compares designs."))


def _leaders(options: Sequence[DesignOption]) -> list[DesignOption]:
    """Returns the options to continue from: the best or, if some sample from a softmax, the best of both kinds.

    The worse of the two kinds may be better with another sampling, and both share their calibrations.
    """
    drawn = best_drawn(options)
    if drawn is None:
        return list(options[:1])
    return [*[option for option in options if option.plan.rule.mechanism == "gumbel"][:1], drawn]


def _other_samplings(
    options: Sequence[DesignOption], shapes: Sequence[RowDesign], periods: Sequence[int], deal: int | None
) -> Iterator[tuple[str, RowDesign, int]]:
    """Yields the leaders' own and other shapes at every period, and a deal of so many tokens."""
    for leader in _leaders(options):
        name, design = leader.plan.rule.mechanism, leader.plan.design
        for shape in dict.fromkeys((design, *shapes)):
            yield from ((name, shape, period) for period in periods)
        if deal is not None:
            slots = RowDesign.choose(rows="slots", num_slots=design.num_slots, shots_per_slot=design.shots_per_slot)
            yield name, dataclasses.replace(slots, sampling="disjoint"), deal


def compare(
    public_sizes: Mapping[str | None, int],
    *,
    epsilon: float,
    delta: float,
    adjacency: Adjacency = "add_remove",
    base: RowDesign | None = None,
    redraw_every: int | None = None,
    shots_per_label: int = 1,
    segments: Iterable[Segment] = (Segment("text", 60),),
    candidates: int = 101,
    record_tokens: int = 60,
    agreement: float = AGREEMENT,
    public_agreement: float | None = None,
    full_vocabulary: bool = False,
    rule: TokenRule | None = None,
    source: GenerationRehearsal | None = None,
    words: WordRelease | None = None,
) -> list[DesignOption]:
    """Returns designs at equal records per token and equal epsilon, best first (see `DesignOption.rank`).

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
      redraw_every: starting redraw period; None: 1, or the longest cap of a field for disjoint batches.
      shots_per_label: demonstrations per label.
      segments: generated fields and their caps.
      candidates: width of the public domain.
      record_tokens: public cap of a record, in tokens.
      agreement: guessed share of one-shot rows that predict the same token.
      public_agreement: see `signal_of`.
      full_vocabulary: whether the model returns its whole vocabulary, which the logit mechanisms need.
      rule: a mechanism with parameters, compared in place of its defaults; a clip that fixes the noise together with
        a temperature is dropped, because epsilon determines the noise here.
      source: a rehearsal, in place of the two guesses. It ranks designs by what noise destroys: whether texts of rows
        with more shots are better is not in it.
      words: the release of words of each label that comes first in every design.

    Raises:
      ConfigurationError: no design is possible, or logit mechanisms are to be compared by a rehearsal.
    """
    check_real("agreement", agreement, low=0.0, high=1.0)
    if source is not None and full_vocabulary:
        advice = "Compare sums of probabilities by the rehearsal, and logits by a guess."
        raise fail("full_vocabulary", "False with a rehearsal, which measures no logits", full_vocabulary, advice)
    start = base or RowDesign.choose()
    pieces = tuple(segments)
    longest = max(piece.max_tokens for piece in pieces)
    redraw_every = redraw_every or (longest if start.sampling == "disjoint" else 1)
    terms: dict[str, Any] = {"epsilon": epsilon, "delta": delta, "adjacency": adjacency, "words": words}
    terms |= {"shots_per_label": shots_per_label, "segments": pieces, "candidates": candidates}
    rules, shapes = _rules(rule, full_vocabulary), list(shapes_like(start, (1, 2, 4)))
    periods = sorted({1, redraw_every, min(_SHORT_PERIOD, longest), longest})

    def planned(name: str, design: RowDesign, redraw: int) -> GenerationPlan:
        # Mechanisms with the same event share one calibration, which the accountant caches.
        return plan_generation(public_sizes, mechanism=rules[name], design=design, redraw_every=redraw, **terms)

    def option(key: tuple[str, RowDesign, int]) -> DesignOption | None:
        try:
            plan = planned(*key)
        except DPICLError:
            return None
        if source is None:
            signal = signal_of(plan, one_shot=agreement, public_agreement=public_agreement)
        else:
            signal = plan.expected(source)
        chances = signal["right_token_prob"], signal["ceiling_prob"]
        return DesignOption(plan, *chances, plan.cost().private_calls, local_cost(plan, record_tokens=record_tokens))

    starts = (start,) if full_vocabulary else ()
    deal = longest if shots_per_label > 1 else None  # one batch is a Poisson sample
    options = search_designs(
        option,
        lambda _: ((name, start, redraw_every) for name in rules),
        lambda found: ((one.plan.rule.mechanism, shape, redraw_every) for one in _leaders(found) for shape in shapes),
        lambda found: _other_samplings(found, starts, periods, deal),
    )
    if not options:  # planning once more, outside the search, raises the reason
        planned(next(iter(rules)), start, redraw_every)
        raise ConfigurationError("designs: expected one that the declared sizes and caps allow, found none.")
    return options


def _rules(rule: TokenRule | None, full_vocabulary: bool) -> dict[str, TokenRule]:
    """Returns the mechanisms to compare, by name."""
    names = TOKEN_MECHANISMS if full_vocabulary else tuple(MECHANISMS)
    rules = {name: TokenRule(name) for name in names}
    if rule is not None and rule.mechanism in rules:
        rules[rule.mechanism] = dataclasses.replace(rule, clip=None) if rule.fixes_noise else rule
    return rules
