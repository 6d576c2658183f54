"""Plays games between neighbouring data sets, bounds the privacy loss from the outcomes, and reports the results."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import integrate, optimize, special, stats

from langchain_dpicl.exceptions import DPICLError, UnknownEventError
from langchain_dpicl.planning.expected_utility import entry_of
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy.accounting.events import (
    BoundedRangeEvent,
    ComposedEvent,
    Event,
    GaussianEvent,
    PureEvent,
    RepeatedEvent,
    SubsampledEvent,
)
from langchain_dpicl.privacy.extensions.gradient_sums import SampledBallEvent
from langchain_dpicl.reports.rendering import format_rounded_down, format_rounded_up

# Every bound errs on the side of the audited code: a reported violation is one, except with the stated probability.


ALARM = 1e-6
"""Most false alarms of one verdict on sound code."""

POWER = 0.99
"""A verdict of "sound" needs this chance, at least, to have seen half of the noise."""

_UNITS = {GaussianEvent: "mu", BoundedRangeEvent: "range", PureEvent: "epsilon"}


def clopper_pearson_lower(hits: int, runs: int, alarm: float) -> float:
    """Returns the Clopper-Pearson lower bound: above the true chance with probability at most `alarm`."""
    return float(stats.beta.ppf(alarm, hits, runs - hits + 1)) if hits else 0.0


def clopper_pearson_upper(hits: int, runs: int, alarm: float) -> float:
    """Returns the Clopper-Pearson upper bound: below the true chance with probability at most `alarm`."""
    return float(stats.beta.isf(alarm, hits + 1, runs - hits)) if hits < runs else 1.0


def base_of(event: Event) -> GaussianEvent | BoundedRangeEvent | PureEvent:
    """Returns the release inside an event, as on a sample that certainly holds the target."""
    if isinstance(event, SubsampledEvent):
        return base_of(event.event)
    if isinstance(event, SampledBallEvent):
        # On everybody, a replaced gradient moves the sum by twice the clip: by the whole sensitivity.
        return GaussianEvent(event.noise_multiplier)
    if isinstance(event, GaussianEvent | BoundedRangeEvent | PureEvent):
        return event
    raise UnknownEventError(f"audit: expected one release (Gaussian, bounded range or pure), found {event.kind!r}.")


def rate_of(event: Event) -> float:
    """Returns the chance that the target is in the sample."""
    return event.sampling_rate if isinstance(event, SubsampledEvent | SampledBallEvent) else 1.0


def unit_of(event: Event) -> str:
    """Returns in what the loss of one release is counted: "mu", "range" or "epsilon"."""
    return _UNITS[type(base_of(event))]


def claimed_loss(event: Event) -> float:
    """Returns what an event allows, in its unit: mu, range or epsilon of one release on a known sample."""
    base = base_of(event)
    if isinstance(base, GaussianEvent):
        return 1.0 / base.noise_multiplier
    return base.bound if isinstance(base, BoundedRangeEvent) else base.epsilon


def min_parameter(event: Event, chance: float, chance_without: float) -> float:
    """Returns the least parameter of an event of this kind under which an outcome can have these two chances.

    Gaussian: mu, from the trade-off of two normals. Bounded range: the two odds differ by a factor of at most e^range.
    Pure: neither the chances nor those of the complement differ by more than a factor of e^epsilon. On a sample that
    holds the target with probability q: the chance given that it does is at least (chance - (1 - q) without) / q.

    Source: Dong, Roth, Su (2022), equation 6, for normals; Dong, Durfee, Rogers (2020), definition 2.1, for the range.
    """
    base, rate = base_of(event), rate_of(event)
    conditional = (chance - (1.0 - rate) * chance_without) / rate if rate < 1.0 else chance
    if rate < 1.0 and conditional >= 1.0:
        return math.inf
    if conditional <= 0.0 or chance_without >= 1.0:
        return -math.inf
    if isinstance(base, GaussianEvent):
        return float(special.ndtri(conditional) - special.ndtri(chance_without))
    if isinstance(base, BoundedRangeEvent):
        return float(special.logit(conditional) - special.logit(chance_without))
    with np.errstate(divide="ignore"):
        return float(max(np.log(conditional / chance_without), np.log((1.0 - chance_without) / (1.0 - conditional))))


def max_chances(event: Event, chances_without: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns how likely an event lets outcomes be with the target that are this likely without: one minus f."""
    base, rate, bound = base_of(event), rate_of(event), claimed_loss(event)
    conditional: NDArray[np.float64]
    if isinstance(base, GaussianEvent):
        conditional = special.ndtr(special.ndtri(chances_without) + bound)
    elif isinstance(base, BoundedRangeEvent):
        conditional = special.expit(special.logit(chances_without) + bound)
    else:
        conditional = np.minimum(math.exp(bound) * chances_without, 1.0 - math.exp(-bound) * (1.0 - chances_without))
    return rate * conditional + (1.0 - rate) * chances_without


def refutation_power(event: Event, chances: tuple[float, float], *, runs: int, alarm: float = ALARM / 2) -> float:
    """Returns the exact chance that one outcome refutes an event, from its true chances with and without the target.

    Args:
      event: what is claimed.
      chances: of the outcome, with the target and without it.
      runs: of each side.
      alarm: of each of the two confidence bounds.

    >>> from langchain_dpicl.privacy.accounting.events import GaussianEvent
    >>> from scipy.special import ndtr
    >>> root = 2 * 2**0.5  # mu = 2 is claimed_loss, the noise is too small by sqrt(2)
    >>> round(refutation_power(GaussianEvent(0.5), (ndtr(root / 2), ndtr(-root / 2)), runs=707), 3)
    0.987
    """
    hits = np.arange(runs + 1)
    least = np.where(hits > 0, stats.beta.ppf(alarm, np.maximum(hits, 1), runs - hits + 1), 0.0)
    most = np.where(hits < runs, stats.beta.isf(alarm, hits + 1, np.maximum(runs - hits, 1)), 1.0)
    # With x hits, those numbers of hits without the target refute that let `least[x]` be above what is plausible.
    refuting = np.searchsorted(max_chances(event, most), least, side="left") - 1
    chance = stats.binom.pmf(hits, runs, chances[0]) * stats.binom.cdf(refuting, runs, chances[1])
    return float(min(1.0, chance.sum()))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Returns the epsilon of mu-Gaussian differential privacy at `delta`, exactly.

    Source: Dong, Roth, Su (2022), corollary 2.13; Balle and Wang (2018), theorem 8.

    >>> round(gaussian_epsilon(1.0, 1e-5), 4)
    4.3772
    """
    if mu <= 0.0 or not math.isfinite(mu):
        return max(mu, 0.0)

    def excess(epsilon: float) -> float:
        tail = math.exp(epsilon + float(special.log_ndtr(-epsilon / mu - mu / 2)))
        return float(special.ndtr(-epsilon / mu + mu / 2)) - tail - delta

    if excess(0.0) <= 0.0:
        return 0.0
    return float(optimize.brentq(excess, 0.0, mu * mu / 2 + mu * 40.0 + 1.0, xtol=1e-12))


def mu_squared(event: Event) -> float | None:
    """Returns the sum of mu^2 of releases that are all Gaussian and on everybody; None for any other."""
    if isinstance(event, GaussianEvent) or (isinstance(event, SampledBallEvent) and event.sampling_rate >= 1.0):
        return event.noise_multiplier**-2
    if isinstance(event, RepeatedEvent):
        inner = mu_squared(event.event)
        return None if inner is None else event.count * inner
    if isinstance(event, ComposedEvent):
        parts = [mu_squared(one) for one in event.events]
        return None if None in parts else math.fsum(part for part in parts if part is not None)
    return None


def epsilon_lower_bound(event: Event, chance: float, chance_without: float, delta: float) -> float:
    """Returns an epsilon that no (epsilon, delta)-DP mechanism with these two chances is below.

    log((chance - delta) / without), whatever the mechanism is; for Gaussian noise on everybody also the epsilon of the
    mu that the chances need.

    Args:
      event: which kind of release it is claimed to be.
      chance: a lower bound of the outcome's chance with the target.
      chance_without: an upper bound without it.
      delta: of the claim.
    """
    plain = math.log((chance - delta) / chance_without) if chance > delta and chance_without > 0.0 else 0.0
    if isinstance(base_of(event), GaussianEvent) and rate_of(event) >= 1.0:
        plain = max(plain, gaussian_epsilon(min_parameter(event, chance, chance_without), delta))
    return max(0.0, plain)


# Each canary is in the data by a fair coin of its own; a guesser names those it is surest about. `lower_bound` holds
# for any (epsilon, delta); `lower_mu` for runs whose releases are all Gaussian on everybody: their whole trade-off
# curve is known, and the same guesses prove several times as much. Sources: Steinke, Nasr and Jagielski (2023), Privacy
# Auditing with One (1) Training Run; Mahloujifar, Melis and Chaudhuri (2025), Auditing f-Differential Privacy in One
# Run.


_MAX_EPSILON = 200.0
TINY_DELTA = 1e-12
"""A delta at which epsilons are compared: with 2 * canaries * delta far below the alarm, it takes nothing away."""

Least = Callable[[float], float]
"""A trade-off curve: the least chance of an event with a canary, from its chance without, or the reverse."""


def max_chance(right: int, guesses: int, epsilon: float, *, delta: float, canaries: int) -> float:
    """Returns the most that `right` or more guesses of a run that is (epsilon, delta)-DP can be likely.

    With B binomial(guesses, e^epsilon / (1 + e^epsilon)): P[B >= right], and for delta at most 2 * canaries * delta
    times the largest P[right > B >= right - i] / i.

    Source: Steinke, Nasr, Jagielski (2023), theorem 5.2.
    """
    coin = stats.binom(guesses, 1 / (1 + np.exp(-epsilon)))
    short = np.arange(1, right + 1)
    below = coin.sf(right - short - 1) - coin.sf(right - 1)  # right > B >= right - i
    return float(min(1.0, coin.sf(right - 1) + 2 * canaries * delta * (below / short).max(initial=0.0)))


def lower_bound(right: int, guesses: int, *, delta: float, canaries: int, alarm: float = ALARM) -> float:
    """Returns the least epsilon that the guesses leave possible, at confidence 1 - `alarm`.

    Where 2 * canaries * delta is not far below the alarm, it is 0 whatever was guessed: take a smaller delta.

    >>> round(lower_bound(390, 400, delta=1e-12, canaries=400), 2)
    2.4
    """
    if max_chance(right, guesses, 0.0, delta=delta, canaries=canaries) >= alarm:
        return 0.0
    if max_chance(right, guesses, _MAX_EPSILON, delta=delta, canaries=canaries) < alarm:
        return _MAX_EPSILON

    def excess(epsilon: float) -> float:
        return max_chance(right, guesses, epsilon, delta=delta, canaries=canaries) - alarm

    return float(optimize.brentq(excess, 0.0, _MAX_EPSILON))


def is_possible(least: Least, right: int, guesses: int, *, canaries: int, alarm: float = ALARM) -> bool:
    """Returns whether `right` guesses or more can have a chance of `alarm` under a trade-off curve.

    Sums of chances by the number of right guesses, from the top down: with r for "right", h for "wrong", each of which
    the curve bounds by the other; if what has to be there is more than the share of canaries guessed about, it cannot.

    Source: Mahloujifar, Melis, Chaudhuri (2025), algorithm 3 for two choices.
    """
    hits, misses, most = alarm * right / canaries, alarm * (guesses - right) / canaries, guesses / canaries
    for count in range(right - 1, -1, -1):
        more = max(misses, least(hits))
        hits, misses = hits + count / (guesses - count) * (more - misses), more
        if hits + misses > most:
            return False
    return hits + misses <= most


def lower_mu(right: int, guesses: int, *, canaries: int, alarm: float = ALARM) -> float:
    """Returns a mu that the guesses leave no smaller one possible than, of Gaussian differential privacy.

    >>> round(lower_mu(390, 400, canaries=400), 2)
    0.61
    """

    def fits(mu: float) -> bool:
        def least(x: float) -> float:
            return float(special.ndtr(special.ndtri(x) - mu))

        return is_possible(least, right, guesses, canaries=canaries, alarm=alarm)

    low, high = 0.0, 64.0
    if fits(low):
        return 0.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return low


Verdict: TypeAlias = Literal["sound", "violated", "undecided", "skipped", "failed"]

CANNOT_SEE: tuple[str, ...] = (
    "failures with a chance below about 1e-6 (the delta)",
    "a wrong definition of neighbours, or a wrong unit (one person with five records)",
    "slack or an error of a few percent in an accountant's formula",
    "parameters that were chosen by looking at the data",
    "coins that are weak but look uniform",
    "side channels: timing, traffic, the provider's logs",
    "a ledger that was put back to an older copy",
    "neighbours worse than those that were tried",
    "what the model's provider sees: every private prompt",
)
"""What no audit of this kind catches; proofs, reviews and the ledger's own checks are for those."""


HALF = "half of the noise"
"""What most powers are for."""


class PrivacyAuditError(DPICLError, AssertionError):
    """An audit found a violation, or could not decide where it had to.

    Attributes:
      report: what was found.
    """

    def __init__(self, message: str, *, report: AuditReport) -> None:
        super().__init__(message)
        self.report = report


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditResult:
    """What one check found.

    Attributes:
      check: what was looked at.
      verdict: "violated": the claim is refuted; "sound": it is not, and where there is a `power` it is at least .99;
        "undecided": it is not, but the check was too small to tell; "skipped": it does not fit what is audited, and
        `details` say why; "failed": the check ended with an exception, whose class `details` name.
      lower_bound: epsilon that the answers prove, at `delta`; None where the check is about no epsilon.
      claimed_epsilon: epsilon, at the same delta, of the event that one trial is charged for.
      delta: of both.
      found: the same proof in the event's own unit; `claimed` is what it may be.
      claimed: mu, range or epsilon of one release.
      unit: which of them.
      confidence: chance, at least, that sound code is not called violated.
      runs: trials of each side, or draws that were looked at.
      power: chance that what `power_for` names is called violated; None: not computed, so that "sound" says only that
        nothing was refuted.
      power_for: the fault that `power` is for.
      details: what refutes the claim, or why it is undecided.
      blind_to: what this check in particular cannot see.
    """

    check: str
    verdict: Verdict
    lower_bound: float | None = None
    claimed_epsilon: float | None = None
    delta: float | None = None
    found: float | None = None
    claimed: float | None = None
    unit: str | None = None
    confidence: float = 1.0 - ALARM
    runs: int = 0
    power: float | None = None
    power_for: str = HALF
    details: tuple[str, ...] = ()
    blind_to: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as JSON values; an infinite number is the text "inf"."""
        return {one.name: _plain(getattr(self, one.name)) for one in fields(self)}

    def __str__(self) -> str:
        parts = [f"{self.verdict:<9} {self.check}"]
        if self.claimed_epsilon is not None and self.lower_bound is not None:
            least, claimed = format_rounded_down(self.lower_bound, 3), format_rounded_up(self.claimed_epsilon, 3)
            parts.append(f"epsilon at least {least}, claimed {claimed}")
        if self.found is not None and self.claimed is not None and self.unit != "epsilon":
            parts.append(f"{self.unit} {max(self.found, 0.0):.3g} of {self.claimed:.3g}")
        parts += [f"{self.runs:,} runs"] if self.runs else []
        parts += [f"power {format_rounded_down(self.power, 3)} ({self.power_for})"] if self.power is not None else []
        return "; ".join([*parts, *self.details])


class AuditCheck(NamedTuple):
    """One check: the name of its result, and the function that makes it."""

    name: str
    play: Callable[[], AuditResult]


def result_of(
    check: str,
    faults: Iterable[str],
    *,
    runs: int,
    blind: tuple[str, ...],
    power: float | None = None,
    power_for: str = HALF,
    said: tuple[str, ...] = (),
    is_certain: bool = False,
) -> AuditResult:
    """Returns the result of a check that lists faults; `said` without any, `is_certain` where no chance is involved."""
    details = tuple(dict.fromkeys(faults))[:4]
    verdict: Verdict = "violated" if details else "sound"
    if power is not None and power < POWER and not details:
        verdict, details = (
            "undecided",
            (f"{power_for} would be seen with a chance of {format_rounded_down(power, 2)} only",),
        )
    return AuditResult(
        check=check,
        verdict=verdict,
        confidence=1.0 if is_certain else 1.0 - ALARM,
        runs=runs,
        power=power,
        power_for=power_for,
        details=details or said,
        blind_to=blind,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditReport:
    """All that an audit found.

    Attributes:
      subject: what was audited.
      results: one per check.
      seconds: how long it took.
      cannot_see: what no audit of this kind catches.
    """

    subject: str
    results: tuple[AuditResult, ...]
    seconds: float = 0.0
    cannot_see: tuple[str, ...] = field(default=CANNOT_SEE)

    @property
    def verdict(self) -> Verdict:
        """The worst of all verdicts; what was skipped has none."""
        verdicts = {result.verdict for result in self.results}
        worst: tuple[Verdict, ...] = ("violated", "failed")
        for verdict in worst:
            if verdict in verdicts:
                return verdict
        return "sound" if "sound" in verdicts and "undecided" not in verdicts else "undecided"

    @property
    def ok(self) -> bool:
        """Whether nothing was refuted, and every check came to its end."""
        return self.verdict not in {"violated", "failed"}

    def violations(self) -> tuple[AuditResult, ...]:
        """Returns the checks that refuted a claim."""
        return tuple(result for result in self.results if result.verdict == "violated")

    @property
    def false_alarm(self) -> float:
        """Chance, at most, that sound code fails this audit."""
        return sum(1.0 - result.confidence for result in self.results)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON values."""
        return {
            "subject": self.subject,
            "verdict": self.verdict,
            "false_alarm": self.false_alarm,
            "seconds": round(self.seconds, 2),
            "results": [result.to_dict() for result in self.results],
            "cannot_see": list(self.cannot_see),
        }

    def to_json(self) -> str:
        """Returns the report as JSON."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def summary(self) -> str:
        """Returns what is said after the results: the verdict, how sure it is, and what no audit sees."""
        skipped = sum(result.verdict == "skipped" for result in self.results)
        failed = sum(result.verdict == "failed" for result in self.results)
        checks = f"{len(self.results) - skipped} checks, {skipped} skipped"
        checks += f", {failed} not finished" if failed else ""
        lines = [
            f"{self.subject}: {self.verdict} ({checks}, {self.seconds:.0f} s)",
            f"Sound code is called violated with a chance of at most {_round_up(self.false_alarm)}.",
            "A check with a power would have seen what is named beside it with that chance; others have none computed.",
            "No audit sees:",
        ]
        return "\n".join([*lines, *(f"  - {text}" for text in self.cannot_see)])

    def __str__(self) -> str:
        return "\n".join([*(f"  {result}" for result in self.results), self.summary()])


def _round_up(chance: float) -> str:
    """Returns a chance with one digit, and never a smaller one."""
    if chance <= 0.0:
        return "0"
    unit = 10.0 ** math.floor(math.log10(chance))
    # What sums of 1 - (1 - 1e-6) are off by is no chance: without it 1e-6 would read 2e-06.
    return f"{math.ceil(chance / unit * (1 - 1e-9)) * unit:.0e}"


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


# The adversary knows everything but one unit: it chose records, backend and queries, and sees the answers. From the
# answers alone a game bounds from below, with stated confidence, the loss of one release, in the unit of the event that
# its ticket is charged for.


Law: TypeAlias = Callable[[float], tuple[float, float]]
"""Chances of a game's first outcome with and without the target, if the noise were smaller by a factor."""

LOOSE = "half of the noise: this release loses less than it is charged for; `noise: scale` looks at it"
NOT_NOISE = "half of the noise: the game on everybody looks at it"
_TRIES = 3
BLIND = ("a worse neighbour than this game's", "a share of the noise that is missing and below what `power` is for")


GameT = TypeVar("GameT", bound="Game")


class GameSide(ABC, Generic[GameT]):
    """One data set: the trials that were played on it."""

    def __init__(self, game: GameT, units: tuple[str, ...]) -> None:
        self.game, self.units = game, units
        self.counts: Counter[str] = Counter()

    @property
    def played(self) -> int:
        """Trials so far."""
        return self.counts.total()

    @abstractmethod
    def play(self, runs: int) -> None:
        """Plays so many trials more."""

    @abstractmethod
    def faults(self) -> Iterator[str]:
        """Yields what is wrong without any chance: tickets that do not fit what was asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Game(ABC):
    """One choice of the adversary.

    Attributes:
      name: what is looked at.
      units: the data set with the target.
      neighbour: the data set without it, or with another in its place.
      runs: trials of each side.
      options: of the component's constructor, and `public_size` and `adjacency`.
      direction: where noisy numbers leave, the adversary projects them on it and asks whether they exceed `threshold`.
      threshold: see `direction`.
      law: the true chances of the first outcome, for the power; None: unknown.
      share: with a law that is given one of several outcomes: the share of the trials, at least, that have one of them.
      power_for: what the law is about: what a factor of 2 makes of the component.
      is_tight: whether the game can show all that is charged; otherwise half of the noise cannot be seen, and no power
        is stated.
      delta: at which epsilons are shown.
    """

    name: str = ""
    units: tuple[str, ...]
    neighbour: tuple[str, ...]
    runs: int
    options: Mapping[str, Any] = field(default_factory=dict)
    direction: tuple[float, ...] | None = None
    threshold: float = 0.0
    law: Law | None = None
    share: float = 1.0
    power_for: str = HALF
    is_tight: bool = True
    delta: float = 1e-6

    @abstractmethod
    def sides(self) -> tuple[GameSide[Any], GameSide[Any]]:
        """Builds the component on both data sets."""

    @abstractmethod
    def event(self, side: Any) -> Event:
        """Returns the event that one trial is charged for.

        Args:
          side: one side of the game.
        """

    def outcomes(self) -> tuple[str, ...]:
        """Returns every outcome there can be; of two, one says all."""
        return ("above",)


@dataclass(slots=True)
class Proof:
    """The strongest of what the counts prove."""

    refuted: list[str]
    found: float = -math.inf
    epsilon: float = 0.0


def play(game: Game, *, looks: int = 1, claim: Event | None = None) -> AuditResult:
    """Plays a game. False alarm on sound code: `ALARM`, at one look.

    Args:
      game: what to play.
      looks: how often to look at the counts on the way, and to stop at the first refutation: for planted bugs only,
        since every look may alarm.
      claim: what is claimed instead of what is charged: a positive control, for claims that are known to be false.
    """
    sides = game.sides()
    event = claim or game.event(sides[0])
    proof, played = Proof([]), 0
    for runs in trials_between_looks(game.runs, looks):
        played += runs
        for side in sides:
            side.play(runs)
            proof.refuted += side.faults()
            if side.played < played:
                proof.refuted.append("stop: before everything was answered that was paid for")
        counts, trials = (sides[0].counts, sides[1].counts), (sides[0].played, sides[1].played)
        found = prove_bounds(event, counts, game.outcomes(), delta=game.delta, trials=trials)
        proof = Proof(proof.refuted + found.refuted, found.found, found.epsilon)
        if proof.refuted:
            break
    return _result(game, event, proof, played)


def _result(game: Game, event: Event, proof: Proof, runs: int) -> AuditResult:
    power, adjacency = power_of(game, event), game.options.get("adjacency", "add_remove")
    details = list(dict.fromkeys(proof.refuted))
    if not details and power is not None and power < POWER:
        details.append(
            f"{game.power_for} would be seen with a chance of {format_rounded_down(power, 2)} only: give more runs"
        )
    verdict: Verdict = "violated" if proof.refuted else "sound" if power is None or power >= POWER else "undecided"
    return AuditResult(
        check=game.name or type(game).__name__,
        verdict=verdict,
        lower_bound=proof.epsilon,
        claimed_epsilon=accounting.epsilon_upper_bound(event, delta=game.delta, adjacency=adjacency),
        delta=game.delta,
        found=proof.found,
        claimed=claimed_loss(event),
        unit=unit_of(event),
        runs=runs,
        power=power,
        power_for=game.power_for,
        details=tuple(details),
        blind_to=(*BLIND, *_unseen(game)),
    )


def _unseen(game: Game) -> tuple[str, ...]:
    """Returns why half of the noise cannot be seen, if it cannot."""
    return (LOOSE,) if not game.is_tight else (NOT_NOISE,) if game.power_for != HALF else ()


def power_of(game: Game, event: Event) -> float | None:
    """Returns the exact chance that a game refutes its claim where half of the noise is missing.

    Where `power_for` is not about noise, a factor of 2 is what the game's law makes of it.
    At least: that of its first outcome, or of the complement, whichever is more.
    """
    if game.law is None or not game.is_tight:
        return None
    chances, alarm = game.law(2.0), ALARM / (4 * len(game.outcomes()))
    counted = game.runs * game.share
    # Fewer than this many of the trials count with a chance below 1e-6.
    trials = max(1, math.floor(counted - (5.0 * math.sqrt(counted) if game.share < 1 else 0.0)))
    sides = (chances, (1.0 - chances[0], 1.0 - chances[1]))
    return max(refutation_power(event, side, runs=trials, alarm=alarm) for side in sides)


def prove_bounds(
    event: Event,
    counts: tuple[Counter[str], Counter[str]],
    outcomes: tuple[str, ...],
    *,
    delta: float = 1e-6,
    trials: tuple[int, int] | None = None,
) -> Proof:
    """Returns what the counts of both sides prove: two bounds for each outcome and for its complement.

    Args:
      event: what is claimed.
      counts: of the outcomes that are compared.
      outcomes: those that are looked at.
      delta: at which epsilons are shown.
      trials: of each side, with those that are not counted: a range bounds the odds of outcomes given that it is one of
        them, but an epsilon bounds the chances of what is one among all trials.
    """
    alarm, proof = ALARM / (4 * len(outcomes)), Proof([])
    runs, limit = (counts[0].total(), counts[1].total()), claimed_loss(event)
    everything = runs if trials is None else trials
    for outcome in outcomes:
        hits = (counts[0][outcome], counts[1][outcome])
        for name, seen in ((outcome, hits), (f"not {outcome}", (runs[0] - hits[0], runs[1] - hits[1]))):
            least, most = clopper_pearson_lower(seen[0], runs[0], alarm), clopper_pearson_upper(seen[1], runs[1], alarm)
            lost = min_parameter(event, least, most)
            proof.found = max(proof.found, lost)
            of_all = (
                clopper_pearson_lower(seen[0], everything[0], alarm),
                clopper_pearson_upper(seen[1], everything[1], alarm),
            )
            proof.epsilon = max(proof.epsilon, epsilon_lower_bound(event, *of_all, delta))
            if lost > limit:
                chances = f"above {least:.3g} with the target, below {most:.3g} without"
                proof.refuted.append(f"{name}: {chances}: {unit_of(event)} {lost:.3g} > {limit:.3g}")
    return proof


def trials_between_looks(runs: int, looks: int) -> list[int]:
    """Returns how many trials to play before each look; the last ones are far apart."""
    ends = [round(runs * 2.0 ** ((1 + i - looks) / 4)) for i in range(looks)]
    return [end - start for start, end in itertools.pairwise([0, *ends])]


def control(game: Game) -> AuditResult:
    """Plays a game at half of its noise against the claim of all of it: a positive control.

    Args:
      game: what is played.

    Returns:
      "sound" where this false claim was refuted, in one of three tries; "undecided" where it was not, with a chance of
      (1 - power)^3; "skipped" where half of the noise is not what the game can show.
    """
    check = f"control, half of the noise: {game.name or type(game).__name__}"
    if reason := _unseen(game):
        return AuditResult(check=check, verdict="skipped", confidence=1.0, details=reason)
    claim = game.event(game.sides()[0])
    options = dict(game.options)
    if "confident" in options:
        threshold, *noises = options["confident"]
        options["confident"] = (threshold, *(noise / 2 for noise in noises))
    else:
        options["noise_multiplier"] = options["noise_multiplier"] / 2
    halved, tries = dataclasses.replace(game, options=options), 1
    result = play(halved, claim=claim)
    while result.verdict != "violated" and tries < _TRIES:
        result, tries = play(halved, claim=claim), tries + 1
    is_seen = result.verdict == "violated"
    return dataclasses.replace(
        result,
        check=check,
        verdict="sound" if is_seen else "undecided",
        confidence=1.0,
        details=("refuted, as it has to be",) if is_seen else ("half of the noise was not seen",),
    )


# A second source: written from the definitions, without the package's mechanisms.


Sums = Sequence[float]
Wins = Callable[[Sums, int, float], float]


def gumbel_wins(sums: Sums, place: int, scale: float) -> float:
    """Returns the chance that `place` has the largest sum after Gumbel noise: a softmax."""
    return float(special.softmax(np.array(sums) / scale)[place])


def exponential_wins(sums: Sums, place: int, scale: float) -> float:
    """Returns the chance that `place` has the largest sum after exponential noise (permute-and-flip).

    The integral of e^-x over all x beyond every gap, times the chances 1 - e^-(x - gap) that the others stay below; the
    product is written out.
    """
    gaps = [(other - sums[place]) / scale for at, other in enumerate(sums) if at != place]
    start, total = max(0.0, *gaps), 0.0
    for size in range(len(gaps) + 1):
        for chosen in itertools.combinations(gaps, size):
            total += (-1) ** size * math.exp(sum(chosen) - (1 + size) * start) / (1 + size)
    return total


def gaussian_wins(sums: Sums, place: int, scale: float) -> float:
    """Returns the chance that `place` has the largest sum after Gaussian noise, by a normal integral."""
    gaps = np.array([(sums[place] - other) / scale for at, other in enumerate(sums) if at != place])
    if len(gaps) == 1:
        return float(special.ndtr(gaps[0] / math.sqrt(2.0)))
    density = 1.0 / math.sqrt(2.0 * math.pi)
    integral = integrate.quad(lambda x: density * math.exp(-x * x / 2) * float(special.ndtr(x + gaps).prod()), -9, 9)
    return float(integral[0])


WINS: dict[str, Wins] = {
    "gumbel": gumbel_wins,
    "permute_and_flip": exponential_wins,
    "gaussian": gaussian_wins,
}
"""By the names of mechanisms."""


def index_law(mechanism: str, sums: tuple[Sums, Sums], *, scale: float) -> Law:
    """Returns the chances that the first of several candidates wins.

    Args:
      mechanism: its name.
      sums: of every candidate, constants included, with the target and without it.
      scale: of the noise: multiplier times sensitivity.
    """
    wins = entry_of(WINS, mechanism, "audit/game.WINS")
    return lambda factor: (wins(sums[0], 0, scale / factor), wins(sums[1], 0, scale / factor))


def vector_law(shown: tuple[float, float], *, scale: float, threshold: float) -> Law:
    """Returns the chances that Gaussian noise lifts what the adversary projects on above its threshold.

    Args:
      shown: the projection of the noise-free sum, with the target and without it.
      scale: of the noise along that direction.
      threshold: of the adversary.
    """
    high, low = (value - threshold for value in shown)
    return lambda factor: (float(special.ndtr(high * factor / scale)), float(special.ndtr(low * factor / scale)))


def odds_law(gaps: tuple[float, float]) -> Law:
    """Returns the chances of one of two outcomes, given that it is one of them, from the logarithms of their odds."""
    return lambda factor: (float(special.expit(gaps[0] * factor)), float(special.expit(gaps[1] * factor)))
