"""Games against `PromptDPSGD`: released weights step by step, and canaries of a whole run."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from langchain_dpicl.audit import one_run
from langchain_dpicl.audit.bounds import gaussian_epsilon, mu_squared
from langchain_dpicl.audit.components import share_of, training_of
from langchain_dpicl.audit.games import Game
from langchain_dpicl.audit.readers import ReadGradients
from langchain_dpicl.audit.results import AuditResult
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy.accounting.events import Event
from langchain_dpicl.privacy.extensions.training_tickets import STEP_TEMPLATE
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.training_planning import TrainingPlan, plan_training
from langchain_dpicl.training_run import TrainingRun

LOUD = 25.0
"""Length of a canary's gradient, in clips."""
CLIP = 0.1
CANARIES = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class StepGame(Game):
    """A game whose trials are the steps of one run; see `components.training_of` for its units and options.

    Units are gradients along axes: "0:2.5" is one of length 2.5 along the first axis. The adversary looks whether the
    released sum, in clips, points further along `direction` than `threshold`.

    Attributes:
      width: trained parameters.
      far: where a sum that was not clipped stands, and no other.
    """

    width: int = 4
    far: float = math.inf

    def outcomes(self) -> tuple[str, ...]:
        """Returns two outcomes of three: below the threshold, or far beyond it."""
        return ("below", "far")

    def outcome(self, moved: float) -> str:
        """Returns where a released sum stands."""
        return "below" if moved <= self.threshold else "above" if moved <= self.far else "far"

    def sides(self) -> tuple[TrainingSide, TrainingSide]:
        """Prepares a run on both data sets."""
        return TrainingSide(self, self.units), TrainingSide(self, self.neighbour)

    def event(self, side: TrainingSide) -> Event:
        """Returns the event of the ticket of one step."""
        return side.run.plan.tickets()[0].event


class TrainingSide:
    """One run, and where its steps went so far."""

    def __init__(self, game: StepGame, units: tuple[str, ...]) -> None:
        self.game = game
        self.counts: Counter[str] = Counter()
        self.run = training_of(units, game.runs, engine=ReadGradients(game.width), l2_clip_norm=CLIP, **game.options)
        self._stream = self.run.stream(progress=False)
        self._weights = self.run.weights

    def play(self, runs: int) -> None:
        """Makes so many steps more."""
        direction = np.array(self.game.direction)
        for _ in itertools.islice(self._stream, runs):
            before, self._weights = self._weights, self.run.weights
            moved = (before - self._weights) / self.run.plan.average_factor  # the released sum, in clips
            self.counts[self.game.outcome(float(direction @ moved))] += 1

    @property
    def played(self) -> int:
        """Trials so far."""
        return self.counts.total()

    def faults(self) -> Iterator[str]:
        """Yields a fault if there were more steps than were paid for."""
        if self.run.steps_left != self.run.plan.steps - self.counts.total():
            yield "tickets: the ledger holds another number of them than there were steps"


Proved: TypeAlias = tuple[float, float, float, str]
"""What guesses prove, the same as an epsilon, what is claimed, and the unit of the first and the third."""


def canaries(
    run_options: dict[str, Any], *, count: int = CANARIES, name: str = "one run, many canaries"
) -> AuditResult:
    """Trains once with many canaries, half of them left out by fair coins, and guesses from the weights which.

    Every canary has an axis of its own: the worst there can be; under replace_one those left out turn round instead.
    The guesser speaks of half of them. Runs without sampling are compared by their mu, which tells several times as
    much; others by their epsilon at a delta of 1e-12. "Sound" says that a run without any noise would have been
    refuted, but for a chance of 1e-6: a sampled run may draw few canaries, and no noise is needed to hide the others.

    Args:
      run_options: options of `PromptDPSGD.prepare`, the rate as `sampling_rate`, `steps`, and `adjacency`.
      count: canaries, and trained parameters.
      name: of the check.
    """
    guesses = count // 2
    present = SYSTEM_RANDOM.uniform(count) < 0.5
    run = _trained(present, dict(run_options))
    right = right_guesses(run.weights, present, guesses)
    proved, seen, claimed, unit = _proved(run.plan, right, guesses, count)
    is_exact = mu_squared(run.plan.event()) is not None
    seen_right, is_seen = _without_noise(run.plan, count)
    words = f"{right} of {guesses} guesses were right"
    blind = f"without any noise {seen_right} would be, which proves too little to tell"
    return AuditResult(
        check=name,
        verdict="violated" if proved > claimed else "sound" if is_seen else "undecided",
        lower_bound=seen,
        claimed_epsilon=run.plan.epsilon if is_exact else claimed,
        delta=run.plan.delta if is_exact else one_run.TINY_DELTA,
        found=proved,
        claimed=claimed,
        unit=unit,
        runs=1,
        details=(words,) if is_seen or proved > claimed else (words, blind),
        blind_to=("noise that is too small, by less than a factor of ten and more: one run is a blunt tool",),
    )


def _proved(plan: TrainingPlan, right: int, guesses: int, count: int) -> Proved:
    """Returns what so many right guesses prove."""
    event = plan.event()
    squared = mu_squared(event)
    if squared is not None:
        mu = one_run.lower_mu(right, guesses, canaries=count)
        return mu, gaussian_epsilon(mu, plan.delta), math.sqrt(squared), "mu"
    delta = one_run.TINY_DELTA
    seen = one_run.lower_bound(right, guesses, delta=delta, canaries=count)
    claimed = accounting.epsilon_upper_bound(event, delta=delta, adjacency=plan.release.adjacency)
    return seen, seen, claimed, "epsilon"


def _without_noise(plan: TrainingPlan, count: int) -> tuple[int, bool]:
    """Returns how many guesses are right without any noise, at least, and whether so many refute the claim."""
    share = 1.0 - (1.0 - plan.sampling_rate) ** plan.steps
    right = right_without_noise(share, count=count, is_replaced=plan.release.adjacency == "replace_one")
    proved, _, claimed, _ = _proved(plan, right, count // 2, count)
    return right, proved > claimed


def right_without_noise(share: float, *, count: int, is_replaced: bool = False) -> int:
    """Returns how many guesses are right without any noise, at least, but for a chance below 1e-6.

    Present canaries that were drawn stand out. Of the others those that are guessed to be in or out are coins, and
    absent ones are more likely among them; replaced ones stand out on the other side, by coins of the same chance.

    Args:
      share: of the present canaries that are drawn once at least.
      count: canaries, each present by a fair coin; half of them are guessed about.
      is_replaced: whether those that are absent turn round instead.
    """
    half, seen = count // 4, count * share / 2
    drawn = max(0.0, seen - 5.0 * math.sqrt(seen * (1.0 - share / 2)))
    present = min(half, math.floor(drawn))
    absent = 0.5 if is_replaced else 1.0 / (2.0 - share)
    sides = [(half - present, 1.0 - absent), (half - present if is_replaced else half, absent)]
    mean = sum(size * chance for size, chance in sides)
    spread = math.sqrt(sum(size * chance * (1.0 - chance) for size, chance in sides))
    certain = 2 * present if is_replaced else present
    return certain + max(0, math.floor(mean - 5.0 * spread))


def can_refute(options: dict[str, Any], *, count: int = CANARIES) -> bool:
    """Returns whether canaries could refute the claim of such a run if there were no noise."""
    plan = plan_training(
        count,
        epsilon=None,
        delta=options.get("delta", 1e-6),
        expected_batch_size=_batch(options["sampling_rate"], count),
        l2_clip_norm=CLIP,
        width=count,
        steps=options["steps"],
        adjacency=options["adjacency"],
        noise_multiplier=options["noise_multiplier"],
    )
    return _without_noise(plan, count)[1]


def _batch(rate: float, count: int) -> int:
    return max(1, round(rate * count))


def _trained(present: Any, options: dict[str, Any]) -> TrainingRun:
    count = len(present)
    is_replaced = options.get("adjacency") == "replace_one"
    units = [f"{place}:{LOUD * CLIP * (1 - 2 * here)}" for place, here in enumerate(present) if here or is_replaced]
    batch = _batch(options.pop("sampling_rate", 1.0), count)
    steps = options.pop("steps", 8)
    engine = ReadGradients(count)
    made = {"public_size": count, "expected_batch_size": batch, "l2_clip_norm": CLIP, **options}
    run = training_of(units, steps, engine=engine, **made)
    run.run(progress=False)
    if share_of(run).remaining(STEP_TEMPLATE):
        raise RuntimeError("a run ended before its tickets did")
    return run


def right_guesses(scores: Any, present: Any, guesses: int) -> int:
    """Says of the best half of the guesses that they were in, of the others that they were not; counts right ones."""
    order, half = np.argsort(scores), guesses // 2
    return int(present[order[-half:]].sum() + (~present[order[:half]]).sum())
