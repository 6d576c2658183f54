"""Plays games between neighbouring data sets, bounds the privacy loss from the outcomes, and reports the verdicts."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol, TypeAlias

from langchain_dpicl.audit import bounds
from langchain_dpicl.audit.bounds import ALARM, POWER, clopper_pearson_lower, clopper_pearson_upper
from langchain_dpicl.exceptions import DPICLError
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy._validate import Adjacency
from langchain_dpicl.privacy.accounting.events import Event

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
            parts.append(f"epsilon at least {self.lower_bound:.3g}, claimed {self.claimed_epsilon:.3g}")
        if self.found is not None and self.claimed is not None and self.unit != "epsilon":
            parts.append(f"{self.unit} {max(self.found, 0.0):.3g} of {self.claimed:.3g}")
        parts += [f"{self.runs:,} runs"] if self.runs else []
        parts += [f"power {self.power:.3f} ({self.power_for})"] if self.power is not None else []
        return "; ".join([*parts, *self.details])


def result_of(
    check: str,
    faults: Iterable[str],
    *,
    runs: int,
    blind: tuple[str, ...],
    power: float | None = None,
    power_for: str = HALF,
    is_certain: bool = False,
) -> AuditResult:
    """Returns the result of a check that lists faults; `is_certain` where no chance is involved."""
    details = tuple(dict.fromkeys(faults))[:4]
    verdict: Verdict = "violated" if details else "sound"
    if power is not None and power < POWER and not details:
        verdict, details = "undecided", (f"{power_for} would be seen with a chance of {power:.2f} only",)
    return AuditResult(
        check=check,
        verdict=verdict,
        confidence=1.0 if is_certain else 1.0 - ALARM,
        runs=runs,
        power=power,
        power_for=power_for,
        details=details,
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


class GameSide(Protocol):
    """One data set: the trials that were played on it."""

    counts: Counter[str]

    @property
    def played(self) -> int:
        """Trials so far."""

    def play(self, runs: int) -> None:
        """Plays so many trials more."""

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
    def sides(self) -> tuple[GameSide, GameSide]:
        """Builds the component on both data sets."""

    @abstractmethod
    def event(self, side: Any) -> Event:
        """Returns the event that one trial is charged for.

        Args:
          side: one side of the game.
        """

    @abstractmethod
    def outcomes(self) -> tuple[str, ...]:
        """Returns every outcome there can be; of two, one says all."""


@dataclass(slots=True)
class Proof:
    """The strongest of what the counts prove.

    Attributes:
      refuted: what is above the claim, in words.
      found: largest lower bound in the event's unit.
      epsilon: largest lower bound of epsilon.
    """

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
    power = power_of(game, event)
    details = list(dict.fromkeys(proof.refuted))
    if not details and power is not None and power < POWER:
        details.append(f"{game.power_for} would be seen with a chance of {power:.2f} only: give more runs")
    verdict: Verdict = "violated" if proof.refuted else "sound" if power is None or power >= POWER else "undecided"
    return AuditResult(
        check=game.name or type(game).__name__,
        verdict=verdict,
        lower_bound=proof.epsilon,
        claimed_epsilon=price(event, game.delta, adjacency=game.options.get("adjacency", "add_remove")),
        delta=game.delta,
        found=proof.found,
        claimed=bounds.claimed_loss(event),
        unit=bounds.unit_of(event),
        runs=runs,
        power=power,
        power_for=game.power_for,
        details=tuple(details),
        blind_to=(*BLIND, *_unseen(game)),
    )


def _unseen(game: Game) -> tuple[str, ...]:
    """Returns why half of the noise cannot be seen, if it cannot."""
    return (LOOSE,) if not game.is_tight else (NOT_NOISE,) if game.power_for != HALF else ()


def power_of(game: Game, event: Event, *, factor: float = 2.0, runs: int | None = None) -> float | None:
    """Returns the exact chance that a game refutes its claim where the noise is too small by a factor.

    Where `power_for` is not about noise, the factor is what the game's law makes of it.
    At least: that of its first outcome, or of the complement, whichever is more.
    """
    if game.law is None or not game.is_tight:
        return None
    chances, alarm = game.law(factor), ALARM / (4 * len(game.outcomes()))
    trials = game.runs if runs is None else runs
    # Fewer than this many of the trials count with a chance below 1e-6.
    trials = max(1, math.floor(trials * game.share - (5.0 * math.sqrt(trials * game.share) if game.share < 1 else 0.0)))
    sides = (chances, (1.0 - chances[0], 1.0 - chances[1]))
    return max(bounds.refutation_power(event, side, runs=trials, alarm=alarm) for side in sides)


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
    runs, limit = (counts[0].total(), counts[1].total()), bounds.claimed_loss(event)
    everything = runs if trials is None else trials
    for outcome in outcomes:
        hits = (counts[0][outcome], counts[1][outcome])
        for name, seen in ((outcome, hits), (f"not {outcome}", (runs[0] - hits[0], runs[1] - hits[1]))):
            least, most = clopper_pearson_lower(seen[0], runs[0], alarm), clopper_pearson_upper(seen[1], runs[1], alarm)
            lost = bounds.min_parameter(event, least, most)
            proof.found = max(proof.found, lost)
            of_all = (
                clopper_pearson_lower(seen[0], everything[0], alarm),
                clopper_pearson_upper(seen[1], everything[1], alarm),
            )
            proof.epsilon = max(proof.epsilon, bounds.epsilon_lower_bound(event, *of_all, delta))
            if lost > limit:
                chances = f"above {least:.3g} with the target, below {most:.3g} without"
                proof.refuted.append(f"{name}: {chances}: {bounds.unit_of(event)} {lost:.3g} > {limit:.3g}")
    return proof


def price(event: Event, delta: float, *, adjacency: Adjacency) -> float:
    """Returns the epsilon of an event at `delta`, as the package states it."""
    return accounting.epsilon_upper_bound(event, delta=delta, adjacency=adjacency)


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
