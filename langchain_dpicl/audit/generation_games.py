"""Games against components that generate or train: demonstrations, private evolution and `PromptDPSGD`."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from langchain_core.embeddings import Embeddings
from langchain_core.runnables import RunnableLambda

from langchain_dpicl.audit import bounds
from langchain_dpicl.audit.adversarial_backends import TOKENS, Opposite, ReadGradients
from langchain_dpicl.audit.bounds import gaussian_epsilon, mu_squared
from langchain_dpicl.audit.closed_forms import vector_law
from langchain_dpicl.audit.game import AuditResult, Game
from langchain_dpicl.audit.targets import plain_steps, share_of, synthesizer_of, training_of
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.evolution.evolution import PrivateEvolution
from langchain_dpicl.generation.synthesizer import DemonstrationSynthesizer
from langchain_dpicl.options import Evolution, Noise
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy._validate import Adjacency
from langchain_dpicl.privacy.accounting.events import Event
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.privacy.extensions.method_tickets import STEP_TEMPLATE
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.soft_prompts.plan import TrainingPlan, plan_training
from langchain_dpicl.soft_prompts.trainer import PromptDPSGD

CANARY_LENGTH = 25.0
"""Length of a canary's gradient, in clips."""
CLIP = 0.1
CANARIES = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class StepGame(Game):
    """A game whose trials are the steps of one run; see `targets.training_of` for its units and options.

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
        self.run = training_of(
            units,
            engine=ReadGradients(game.width),
            training=plain_steps(game.runs, l2_clip_norm=CLIP),
            noise=Noise(multiplier=game.options["noise_multiplier"]),
            adjacency=game.options["adjacency"],
        )
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
      run_options: `noise_multiplier`, `sampling_rate`, `steps`, `adjacency`, `epsilon` and `delta` of the run.
      count: canaries, and trained parameters.
      name: of the check.
    """
    guesses = count // 2
    present = SYSTEM_RANDOM.uniform(count) < 0.5
    run = _train(present, dict(run_options))
    right = right_guesses(run.weights, present, guesses)
    proved, seen, claimed, unit = _prove_epsilon(run.plan, right, guesses, count)
    is_exact = mu_squared(run.plan.event()) is not None
    seen_right, is_seen = _without_noise(run.plan, count)
    words = f"{right} of {guesses} guesses were right"
    blind = f"without any noise {seen_right} would be, which proves too little to tell"
    return AuditResult(
        check=name,
        verdict="violated" if proved > claimed else "sound" if is_seen else "undecided",
        lower_bound=seen,
        claimed_epsilon=run.plan.epsilon if is_exact else claimed,
        delta=run.plan.delta if is_exact else bounds.TINY_DELTA,
        found=proved,
        claimed=claimed,
        unit=unit,
        runs=1,
        details=(words,) if is_seen or proved > claimed else (words, blind),
        blind_to=("noise that is too small, by less than a factor of ten and more: one run is a blunt tool",),
    )


def _prove_epsilon(plan: TrainingPlan, right: int, guesses: int, count: int) -> Proved:
    """Returns what so many right guesses prove."""
    event = plan.event()
    squared = mu_squared(event)
    if squared is not None:
        mu = bounds.lower_mu(right, guesses, canaries=count)
        return mu, gaussian_epsilon(mu, plan.delta), math.sqrt(squared), "mu"
    delta = bounds.TINY_DELTA
    seen = bounds.lower_bound(right, guesses, delta=delta, canaries=count)
    claimed = accounting.epsilon_upper_bound(event, delta=delta, adjacency=plan.release.adjacency)
    return seen, seen, claimed, "epsilon"


def _without_noise(plan: TrainingPlan, count: int) -> tuple[int, bool]:
    """Returns how many guesses are right without any noise, at least, and whether so many refute the claim."""
    share = 1.0 - (1.0 - plan.sampling_rate) ** plan.steps
    right = right_without_noise(share, count=count, is_replaced=plan.release.adjacency == "replace_one")
    proved, _, claimed, _ = _prove_epsilon(plan, right, count // 2, count)
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


def _train(present: Any, options: dict[str, Any]) -> PromptDPSGD:
    count = len(present)
    adjacency = options.get("adjacency", "add_remove")
    is_replaced = adjacency == "replace_one"
    units = [
        f"{place}:{CANARY_LENGTH * CLIP * (1 - 2 * here)}" for place, here in enumerate(present) if here or is_replaced
    ]
    batch = _batch(options.get("sampling_rate", 1.0), count)
    run = training_of(
        units,
        engine=ReadGradients(count),
        training=plain_steps(options.get("steps", 8), expected_batch_size=batch, l2_clip_norm=CLIP),
        noise=Noise(multiplier=options["noise_multiplier"], delta=options.get("delta")),
        public_size=count,
        adjacency=adjacency,
        **({"epsilon": options["epsilon"]} if "epsilon" in options else {}),
    )
    run.run(progress=False)
    if share_of(run).remaining(STEP_TEMPLATE):
        raise RuntimeError("a run ended before its tickets did")
    return run


def right_guesses(scores: Any, present: Any, guesses: int) -> int:
    """Says of the best half of the guesses that they were in, of the others that they were not; counts right ones."""
    order, half = np.argsort(scores), guesses // 2
    return int(present[order[-half:]].sum() + (~present[order[:half]]).sum())


# The adversary chose candidates, embeddings and model, so that both candidates survive every round.


YES, NO = "yes", "no"
MANY = 3
"""Records of the target, all of which say the same: together they have one vote."""
_EPSILON = 1e12
_TEST_NOISE = 0.5


def evolution_of(
    units: Sequence[str],
    rounds: int,
    *,
    embeddings: Embeddings | None = None,
    adjacency: Adjacency = "add_remove",
    noise_multiplier: float = _TEST_NOISE,
) -> PrivateEvolution:
    """Builds an evolution between two candidates over units of several records that say "yes" or "no"."""
    records = [{"text": text, "unit": place} for place, text in enumerate(units) for _ in range(MANY)]
    return PrivateEvolution.from_private_examples(
        PrivateExamples(records, public_size=1, unit_key="unit", records_per_unit=MANY),
        llm=RunnableLambda(_repeat_survivors),
        embeddings=Opposite() if embeddings is None else embeddings,
        budget=Budget(epsilon=_EPSILON, delta=1e-6, adjacency=adjacency),
        epsilon=_EPSILON / 2,
        shots_per_label=1,
        evolution=Evolution(rounds=rounds, num_survivors=2, num_variations=1, candidates=(YES, NO)),
        noise=Noise(multiplier=noise_multiplier),
    )


def _repeat_survivors(_: Any) -> str:
    """Writes nothing new: a variation that is a survivor counts once."""
    return YES


@dataclass(frozen=True, kw_only=True, slots=True)
class EvolutionGame(Game):
    """A game whose trials are rounds; see `evolution_of` for its units and options."""

    def sides(self) -> tuple[EvolvingSide, EvolvingSide]:
        """Prepares both data sets."""
        return EvolvingSide(self, self.units), EvolvingSide(self, self.neighbour)

    def event(self, side: EvolvingSide) -> Event:
        """Returns the event of the ticket of one round."""
        (ticket,) = side.built(1).plan.tickets()
        return ticket.event

    def outcomes(self) -> tuple[str, ...]:
        """Returns where the votes stand; of two sides, one says all."""
        return ("above",)


class EvolvingSide:
    """One data set, and the rounds that were played on it."""

    def __init__(self, game: EvolutionGame, units: tuple[str, ...]) -> None:
        self.game = game
        self.counts: Counter[str] = Counter()
        self._units = units
        self._faults: list[str] = []

    def built(self, rounds: int) -> PrivateEvolution:
        """Builds the component for so many rounds."""
        return evolution_of(self._units, rounds, **self.game.options)

    def play(self, runs: int) -> None:
        """Has so many rounds more voted."""
        evolution = self.built(runs)
        evolution.run(progress=False)
        self.counts.update(self._outcome(votes) for votes in evolution.history[None])
        (ticket,) = evolution.plan.tickets()
        if share_of(evolution).remaining(ticket.template) != runs - len(evolution.history[None]):
            self._faults.append("tickets: the ledger holds another number of them than there were rounds")
        if len({tuple(sorted(votes.items())) for votes in evolution.history[None]}) < len(evolution.history[None]):
            self._faults.append("noise: one histogram came twice")

    def _outcome(self, votes: Mapping[str, float]) -> str:
        direction = self.game.direction or (1.0, -1.0)
        return "above" if votes[YES] * direction[0] + votes[NO] * direction[1] > self.game.threshold else "below"

    @property
    def played(self) -> int:
        """Trials so far."""
        return self.counts.total()

    def faults(self) -> Iterator[str]:
        """Yields what is wrong without any chance."""
        yield from self._faults


def evolution_cases(*, adjacency: str) -> Iterator[Game]:
    """Yields the worst cases of one round: the vote of a unit of several records that goes, or changes."""
    moved = adjacency == "replace_one"
    ends, scale = (1.0, -1.0 if moved else 0.0), _TEST_NOISE * (2.0 if moved else 1.0)
    middle = sum(ends) / 2
    terms: dict[str, Any] = {"adjacency": adjacency, "noise_multiplier": _TEST_NOISE}
    shared: dict[str, Any] = {"units": (YES,), "neighbour": (NO,) if moved else (), "runs": 220, "options": terms}
    yield EvolutionGame(
        name=f"one round: gaussian, votes of a unit, {adjacency}",
        direction=(1.0, -1.0) if moved else (1.0, 0.0),
        threshold=middle,
        law=vector_law(ends, scale=scale, threshold=middle),
        **shared,
    )
    if moved:  # what several votes of one unit would do to the game above is refuted there
        return

    def law(factor: float) -> tuple[float, float]:
        votes = float(MANY) if factor > 1.0 else 1.0
        return vector_law((votes, 0.0), scale=scale, threshold=1.0)(1.0)

    yield EvolutionGame(
        name=f"one round: gaussian, a unit of {MANY} records, {adjacency}",
        direction=(1.0, 0.0),
        threshold=1.0,
        law=law,
        power_for="votes of one unit that are not brought to one length",
        **shared,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenGame(Game):
    """A game whose trials are texts of one token; see `targets.synthesizer_of` for its units and options.

    Attributes:
      public: logits of `TOKENS` after the public prompt.
      kept: texts that count; none: all of them. Two of several are compared where the charge bounds the odds of every
        two outcomes: given that it is one of the two, which one it is is a coin of those odds.
    """

    public: tuple[float, ...] = (0.0,) * len(TOKENS)
    kept: tuple[str, ...] = ()

    def outcomes(self) -> tuple[str, ...]:
        """Returns the token that the target wants; every other one is its complement."""
        return (TOKENS[0].strip(),)

    def sides(self) -> tuple[WritingSide, WritingSide]:
        """Builds the synthesizer on both data sets."""
        return WritingSide(self, self.units), WritingSide(self, self.neighbour)

    def event(self, side: WritingSide) -> Event:
        """Returns the event of the ticket of one token."""
        return side.synthesizer.plan.tickets()[0].event


_AT_ONCE = 250
"""Texts of one synthesizer: with many more, each of them takes longer."""


class WritingSide:
    """One data set, and the texts that were written from it so far."""

    def __init__(self, game: TokenGame, units: tuple[str, ...]) -> None:
        self.game = game
        self.counts: Counter[str] = Counter()
        self.played = 0
        self._units = units
        self._unpaid = False
        self.synthesizer = self._built(min(_AT_ONCE, game.runs))

    def _built(self, tokens: int) -> DemonstrationSynthesizer:
        return synthesizer_of(self._units, tokens, public=self.game.public, **self.game.options)

    def play(self, runs: int) -> None:
        """Has so many texts more written."""
        counted = self.game.kept
        for size in [_AT_ONCE] * (runs // _AT_ONCE) + [runs % _AT_ONCE] * (runs % _AT_ONCE > 0):
            self.synthesizer = self._built(size)
            texts = [text["text"] for text in self.synthesizer.stream(progress=False)]
            self.played += len(texts)
            self.counts.update(text for text in texts if not counted or text in counted)
            (ticket,) = self.synthesizer.plan.tickets()
            remaining = share_of(self.synthesizer).remaining(ticket.template)
            self._unpaid |= remaining != ticket.max_count - len(texts)

    def faults(self) -> Iterator[str]:
        """Yields a fault if the ledger holds another number of tickets than there were texts."""
        if self._unpaid:
            yield "tickets: the ledger holds another number of them than there were texts"
