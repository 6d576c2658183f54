"""Options of rows and of their noise."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, TypeAlias, TypeVar, get_args, overload

from langchain_dpicl.options.base import Count, Delta, Option, Positive, Probability, Share
from langchain_dpicl.privacy._validate import fail, plain_or_type

Sampling: TypeAlias = Literal["poisson", "fixed", "partition", "disjoint"]
NoiseName: TypeAlias = Literal["gumbel", "gaussian", "permute_and_flip"]
LogitNoiseName: TypeAlias = Literal["recentered_clip", "difference_clip", "clip_and_blend"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Rows(Option):
    """How many prompts one release reads, how many records each shows, and how they are drawn.

    A row is one prompt: one vote, one teacher, or one distribution over the next token. `slots` gives a fixed number of
    k-shot prompts; `units` gives one one-shot prompt per sampled unit, with half the noise and an expected number of
    calls. If neither is given, the planner compares shapes and takes the best.

    Args:
      slots: number of prompts with `shots` records each.
      units: expected number of one-shot prompts.
      shots: records per slot.
      sampling: "poisson"; "fixed" (balanced samples, `replace_one` only); "partition" (every unit stays in its slot:
        the fixed teachers of PATE); "disjoint" (one secret allocation for a whole run, a batch per demonstration).
      fill: expected units per shot of a slot; None: 1.5 for slots of one or two shots that are filled at random,
        otherwise 1.
      redraw_every: releases per secret sample: a number of tokens, or "run" (one sample for a whole text, or for all
        labels of a labelling run); None: 1.
    """

    slots: Count | None = None
    units: Count | None = None
    shots: Count = 1
    sampling: Sampling = "poisson"
    fill: Positive | None = None
    redraw_every: Count | Literal["run"] | None = None

    def _check_together(self) -> None:
        if self.slots is not None and self.units is not None:
            raise fail(
                "Rows", "slots or units", "both", "Slots are prompts of a fixed number, units of an expected one."
            )
        if self.units is not None and (self.shots > 1 or self.sampling != "poisson" or self.fill is not None):
            raise fail("Rows(units=)", "shots=1, sampling='poisson' and no fill", self, "Use slots= for these.")
        if self.fill is not None and self.slots is None and self.shots == 1 and self.sampling == "poisson":
            raise fail("Rows.fill", "None without slots", self.fill, "Give slots=, whose shots it fills.")
        if self.fill is not None and self.sampling in {"fixed", "partition"}:
            raise fail("Rows.fill", "None where slots have a fixed number of records", self.fill)


@dataclass(frozen=True, slots=True, repr=False)
class Noise(Option):
    """Which mechanism adds noise, and how much.

    Args:
      mechanism: "gumbel", "gaussian" or "permute_and_flip"; None: "gumbel" where an index is released, "gaussian" where
        a vector is.
      multiplier: noise scale over sensitivity; its cost must fit the component's epsilon. None: calibrated to it.
      delta: the component's part of the budget's delta; None: in proportion to its epsilon.
    """

    mechanism: NoiseName | None = None
    _: KW_ONLY
    multiplier: Positive | None = None
    delta: Delta | None = None


@dataclass(frozen=True, slots=True, repr=False)
class LogitNoise(Option):
    """Noise of the token mechanisms on logits, for engines that report their whole vocabulary.

    Args:
      mechanism: "recentered_clip", "difference_clip" or "clip_and_blend" (Bhusal et al. 2025).
      clip: largest magnitude of a clipped logit or difference; None: what temperature and noise permit.
      blend_weight: weight of the private rows in (0, 1] ("clip_and_blend").
      center: what is subtracted from a row's logits ("clip_and_blend").
      free_below: total variation to the public distribution below which, by a noisy test, a token is public and free.
      max_private_tokens: with `free_below`, the largest number of private tokens per text.
      multiplier: noise scale over sensitivity; None: calibrated.
      delta: the component's part of the budget's delta; None: in proportion to its epsilon.
    """

    mechanism: LogitNoiseName
    _: KW_ONLY
    clip: Positive | None = None
    blend_weight: Share | None = None
    center: Literal["max", "none"] | None = None
    free_below: Probability | None = None
    max_private_tokens: Count | None = None
    multiplier: Positive | None = None
    delta: Delta | None = None

    def _check_together(self) -> None:
        has_blend = self.blend_weight is not None or self.center is not None
        if has_blend and self.mechanism != "clip_and_blend":
            blend = "'clip_and_blend' where blend_weight or center is given"
            raise fail("LogitNoise.mechanism", blend, self.mechanism)
        if (self.free_below is None) != (self.max_private_tokens is None):
            raise fail("LogitNoise", "both of free_below and max_private_tokens, or neither", "one of them")


@dataclass(frozen=True, slots=True, repr=False)
class ConfidentGNMax(Option):
    """The noise of Confident-GNMax (Duan et al. 2023): a noisy test of the winner's votes, then a noisy maximum.

    Args:
      threshold: noisy votes that the winner needs.
      test_stddev: standard deviation of the test's noise, in votes.
      vote_stddev: standard deviation of the noise on the votes, in votes.
      max_answers: labels that the share pays for, if tests are charged apart; None: as many as queries.
      delta: the component's part of the budget's delta; None: in proportion to its epsilon.
    """

    threshold: float
    test_stddev: Positive
    vote_stddev: Positive
    _: KW_ONLY
    max_answers: Count | None = None
    delta: Delta | None = None


N = TypeVar("N", bound=Option)
M = TypeVar("M", bound=Option)


@overload
def noise_of(value: object, kind: type[N], /) -> N: ...
@overload
def noise_of(value: object, kind: type[N], other: type[M], /) -> N | M: ...
@overload
def noise_of(value: object, /, *kinds: type[Any]) -> Any: ...
def noise_of(value: object, /, *kinds: Any) -> Any:
    """Returns the option value of `noise=`: a mechanism's name is short for its option, None for the first kind.

    Args:
      value: what the caller gave.
      kinds: the option values that the component takes, the usual one first.

    Raises:
      ConfigurationError: another value or name.
    """
    if isinstance(value, kinds):
        return value
    if value is None:
        return kinds[0]()
    short = {Noise: get_args(NoiseName), LogitNoise: get_args(LogitNoiseName)}
    for kind in kinds:
        if isinstance(value, str) and value in short.get(kind, ()):
            return kind(value)
    wanted = [repr(name) for kind in kinds for name in short.get(kind, ())]
    raise fail("noise", ", ".join([*wanted, *(f"{kind.__name__}(...)" for kind in kinds)]), plain_or_type(value))


def noise_with(value: object, mechanism: str) -> Noise:
    """Returns the `Noise` of a component that has one mechanism, which `value` may name.

    Args:
      value: what the caller gave.
      mechanism: name of the mechanism.

    Raises:
      ConfigurationError: another value, or another mechanism.
    """
    noise = noise_of(value, Noise)
    if noise.mechanism not in {None, mechanism}:
        raise fail("Noise.mechanism", f"None (this component adds {mechanism!r} noise)", noise.mechanism)
    return noise
