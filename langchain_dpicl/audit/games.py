"""Plays distinguishing games between neighbouring data sets and bounds the privacy loss from the outcomes."""

# The adversary knows everything but one unit: it chose records, backend and queries, and sees the answers. From the
# answers alone a game bounds from below, with stated confidence, the loss of one release, in the unit of the event that
# its ticket is charged for.

from __future__ import annotations

import dataclasses
import itertools
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from langchain_dpicl.audit import bounds
from langchain_dpicl.audit.bounds import ALARM, POWER, highest, lowest
from langchain_dpicl.audit.results import HALF, AuditResult, Verdict
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy._validate import Adjacency
from langchain_dpicl.privacy.accounting.events import Event

Law: TypeAlias = Callable[[float], tuple[float, float]]
"""Chances of a game's first outcome with and without the target, if the noise were smaller by a factor."""

LOOSE = "half of the noise: this release loses less than it is charged for; `noise: scale` looks at it"
NOT_NOISE = "half of the noise: the game on everybody looks at it"
_TRIES = 3
BLIND = ("a worse neighbour than this game's", "a share of the noise that is missing and below what `power` is for")


class Side(Protocol):
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
    def sides(self) -> tuple[Side, Side]:
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
    for runs in pieces(game.runs, looks):
        played += runs
        for side in sides:
            side.play(runs)
            proof.refuted += side.faults()
            if side.played < played:
                proof.refuted.append("stop: before everything was answered that was paid for")
        counts, trials = (sides[0].counts, sides[1].counts), (sides[0].played, sides[1].played)
        found = proved(event, counts, game.outcomes(), delta=game.delta, trials=trials)
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
        claimed=bounds.claimed(event),
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
    return max(bounds.power(event, side, runs=trials, alarm=alarm) for side in sides)


def proved(
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
    runs, limit = (counts[0].total(), counts[1].total()), bounds.claimed(event)
    everything = runs if trials is None else trials
    for outcome in outcomes:
        hits = (counts[0][outcome], counts[1][outcome])
        for name, seen in ((outcome, hits), (f"not {outcome}", (runs[0] - hits[0], runs[1] - hits[1]))):
            least, most = lowest(seen[0], runs[0], alarm), highest(seen[1], runs[1], alarm)
            lost = bounds.loss(event, least, most)
            proof.found = max(proof.found, lost)
            of_all = lowest(seen[0], everything[0], alarm), highest(seen[1], everything[1], alarm)
            proof.epsilon = max(proof.epsilon, bounds.epsilon_seen(event, *of_all, delta))
            if lost > limit:
                chances = f"above {least:.3g} with the target, below {most:.3g} without"
                proof.refuted.append(f"{name}: {chances}: {bounds.unit_of(event)} {lost:.3g} > {limit:.3g}")
    return proof


def price(event: Event, delta: float, *, adjacency: Adjacency) -> float:
    """Returns the epsilon of an event at `delta`, as the package states it."""
    return accounting.epsilon_upper_bound(event, delta=delta, adjacency=adjacency)


def pieces(runs: int, looks: int) -> list[int]:
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
