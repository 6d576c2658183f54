"""Distinguishing games against `PromptPATELabeler`: what labels of public inputs tell apart of two neighbouring sets.

The adversary of `audit_games`: it chose the records, the engine and the inputs, and sees what is said of each input.
What it finds is compared with the event of the ticket that paid, and tickets with what they paid for. Knows no noise
and no internals of the package.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import numpy as np
from scipy import stats

from langchain_dpicl import Budget, PrivateExamples, PromptPATELabeler
from langchain_dpicl.labelled_pool import PoolEntry
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy.events import Event, GaussianEvent, RepeatedEvent, SubsampledEvent
from tests.audit_games import ALARM, ReadVotes, _pieces, _refuted, faults

UNITS = {"rows": "units"}
# Replaced units, one slot for each, and every unit in every sample: what is audited is the noise and its price.
FIXED = {"teachers": "fixed", "adjacency": "replace_one"}
# Games compare what is seen with the events of tickets: what those cost in all is of no interest, and takes seconds.
_EPSILON = 1.0
_BEYOND = 2  # inputs beyond those that the share pays for: they have to wait


def labeler_of(units: tuple[str, ...], paid: int, *, engine: Any = None, **options: Any) -> PromptPATELabeler:
    """Builds the audited component over units that vote as their texts say, with more inputs than it is paid for.

    Args:
      units: text of each unit; see `audit_games.ReadVotes`.
      paid: inputs that the share pays for.
      engine: takes the place of a fresh `ReadVotes`.
      **options: of `from_private_examples`, and `public_size`, `adjacency` and `labels`.
    """
    given = {"noise_multiplier": 0.5, "abstain_below": None, "num_slots": options.get("public_size", 1), **options}
    size, adjacency = given.pop("public_size", 1), given.pop("adjacency", "add_remove")
    labels = given.pop("labels", ("yes", "no"))
    if given.get("teachers") != "fixed":
        given = {"rows": "slots", "overfill": 1.0, **given}
    if "confident" in given:
        given |= {"mechanism": "confident_gnmax", "noise_multiplier": None}
    records = [{"text": unit, "answer": labels[-1]} for unit in units]
    with mock.patch.object(accounting, "epsilon_bound", free_price):
        return PromptPATELabeler.from_private_examples(
            PrivateExamples(records, label_key="answer", labels=labels, public_size=size),
            llm=ReadVotes() if engine is None else engine,
            budget=Budget(epsilon=_EPSILON, delta=1e-6, adjacency=adjacency),
            epsilon=_EPSILON,
            public_inputs=[f"which one, {place}?" for place in range(paid + _BEYOND)],
            max_queries=paid,
            example_prompt="votes {text}\n\n{answer}",
            suffix="{input}",
            calibrate=False,
            **given,
        )


def free_price(event: Event, *, delta: float, adjacency: Any, opinions: bool = True) -> accounting.EpsilonBound:
    return accounting.EpsilonBound(_EPSILON, delta, adjacency, "none", (), ())


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelGame:
    """One choice of the adversary.

    Attributes:
      units: the data set with the target.
      neighbour: the data set without it, or with another in its place.
      runs: trials of each side.
      options: of `labeler_of`.
      together: inputs of one trial on one secret sample, which has a labeler of its own; None: each input is a trial.
      direction: with noisy votes, the adversary projects their mean on it and asks whether it exceeds `threshold`.
      threshold: see `direction`.
      question: what the outcome tells of, and with it which event must cover it: all of a release, or with
        Confident-GNMax whether the "test" was passed, or the "answer" alone.
    """

    units: tuple[str, ...]
    neighbour: tuple[str, ...]
    runs: int
    options: Mapping[str, Any] = field(default_factory=dict)
    together: int | None = None
    direction: tuple[float, ...] | None = None
    threshold: float = 0.0
    question: Literal["release", "test", "answer"] = "release"

    @property
    def outcomes(self) -> tuple[str, ...]:
        """Every outcome there can be; of two, one says all."""
        if self.direction is not None:
            return ("above",)
        if self.question == "test":
            return ("rejected",)
        return ("yes", "no", "rejected") if "abstain_below" in self.options else ("yes",)

    def outcome(self, entries: Sequence[PoolEntry]) -> str:
        """What the adversary makes of the inputs of one trial."""
        if self.direction is None:
            return entries[0].label or entries[0].status
        votes = np.mean([list((entry.votes or {}).values()) for entry in entries], axis=0)
        return "above" if float(np.dot(self.direction, votes)) > self.threshold else "below"

    def event(self, labeler: PromptPATELabeler) -> Event:
        """What the ticket is charged for one trial."""
        mechanism = labeler.plan.release.mechanism
        if self.question != "release":
            return mechanism.test_event if self.question == "test" else mechanism.answer_event
        charged = labeler.plan.tickets()[0].event
        if self.together is None and labeler.plan.teachers == "one_sample":
            # The whole run is one ticket; where the sample is no secret, each input has its part of it.
            return _part_of(charged, labeler.plan.max_queries)
        return _as_one(charged)


def _part_of(event: Event, count: int) -> Event:
    assert isinstance(event, RepeatedEvent)
    assert event.count == count
    return event.event


def _as_one(event: Event) -> Event:
    """Returns an event in the terms of `audit_games.claimed`: n Gaussians on one data set are one of n times mu^2."""
    if isinstance(event, SubsampledEvent):
        return SubsampledEvent(_as_one(event.event), event.sampling_rate)
    if isinstance(event, RepeatedEvent) and isinstance(event.event, GaussianEvent):
        return GaussianEvent(event.event.noise_multiplier / math.sqrt(event.count))
    return event


class _Side:
    """One data set: its trials so far, and whether the tickets add up."""

    def __init__(self, game: LabelGame, units: tuple[str, ...], most: int) -> None:
        self.game, self.counts, self.asked, self.answered = game, Counter[str](), 0, 0
        self.labeler = labeler_of(units, game.together or most, **game.options)
        self._stream = None if game.together else self.labeler.stream(progress=False)
        self._units = units

    def play(self, runs: int) -> None:
        for _ in range(runs):
            entries = self._trial()
            if len(entries) < (self.game.together or 1):
                break
            self.counts[self.game.outcome(entries)] += 1

    def _trial(self) -> list[PoolEntry]:
        if self._stream is None:
            self.asked = self.answered = 0
            self.labeler = labeler_of(self._units, self.game.together or 1, **self.game.options)
            entries = list(self.labeler.stream(progress=False))
        else:
            entries = list(itertools.islice(self._stream, 1))
        self.asked += len(entries)
        self.answered += sum(entry.status == "labelled" for entry in entries)
        return entries

    def goes_on(self) -> bool:
        """Whether a run that is over goes on nevertheless."""
        return self._stream is not None and next(self._stream, None) is not None

    def unpaid(self) -> bool:
        """Whether the ledger holds another number of tickets than there were inputs and answers."""
        return tickets_left(self.labeler) != tickets_expected(self.labeler, self.asked, self.answered)


def tickets_left(labeler: PromptPATELabeler) -> dict[str, int]:
    """Returns how many tickets of each kind the ledger still holds."""
    return {ticket.template: labeler._share.remaining(ticket.template) for ticket in labeler.plan.tickets()}


def tickets_expected(labeler: PromptPATELabeler, asked: int, answered: int) -> dict[str, int]:
    """Returns how many there have to be after so many inputs, of which so many were answered."""
    spent = {"label": asked, "labels": min(asked, 1), "test": asked, "answer": answered}
    return {ticket.template: ticket.max_count - spent[ticket.template] for ticket in labeler.plan.tickets()}


def refutations(game: LabelGame, *, looks: int = 1) -> list[str]:
    """Plays a game; returns what refutes the charge, or nothing. False alarm on a sound package: `ALARM`, at one look.

    Args:
      game: what to play.
      looks: how often to look at the counts on the way, and to stop at the first refutation: for planted bugs only,
        since every look may alarm.
    """
    sides = [_Side(game, units, game.runs) for units in (game.units, game.neighbour)]
    event, played = game.event(sides[0].labeler), 0
    found: list[str] = []
    for runs in _pieces(game.runs, looks):
        played += runs
        for side in sides:
            side.play(runs)
            if side.unpaid():
                found.append("tickets: the ledger holds another number of them than were paid")
            if side.counts.total() < played:
                found.append("stop: before everything was labelled that was paid for")
        if not found:
            found += _refuted(event, (sides[0].counts, sides[1].counts), game.outcomes)
        if found:
            return found
    return ["stop: not where the share is spent"] if any(side.goes_on() for side in sides) else []


# --- released votes, law of Confident-GNMax, presence ---------------------------------------------------------------


def vote_faults(entries: Sequence[PoolEntry], votes: Sequence[float], scale: float) -> set[str]:
    """Returns what is wrong with the votes of inputs that all have the same true votes; see `audit_games.faults`."""
    return faults([SimpleNamespace(scores=entry.votes, label=entry.label) for entry in entries], votes, scale)


def confident_faults(entries: Sequence[PoolEntry], *, passed: float, yes: float) -> set[str]:
    """Returns what is wrong with tests and answers, each with its claimed chance; false alarm `ALARM` in all.

    "test", "answer": not as often passed, or yes, as claimed (binomial, exact; answers given that the test was
    passed). "links": one test and the next, or one answer and the next, are alike more or less often than
    independent ones.
    """
    tests = [entry.status == "labelled" for entry in entries]
    answers = [entry.label == "yes" for entry in entries if entry.status == "labelled"]
    pvalues = {
        "test": [_binomial(tests, passed)],
        "answer": [_binomial(answers, yes)],
        "links": [_alike(tests, passed), _alike(answers, yes)],
    }
    return {name for name, found in pvalues.items() if min(found) < ALARM / (3 * len(found))}


def _binomial(coins: Sequence[bool], chance: float) -> float:
    return float(stats.binomtest(sum(coins), len(coins), chance).pvalue) if coins else 1.0


def _alike(coins: Sequence[bool], chance: float) -> float:
    pairs = zip(coins[::2], coins[1::2], strict=False)  # disjoint: independent of each other
    return _binomial([one == other for one, other in pairs], chance**2 + (1.0 - chance) ** 2)


def presences(units: tuple[str, ...], runs: int, **options: Any) -> list[bool]:
    """Returns for each input whether a slot's only unit, which alone says yes, was in it; the noise hides nothing."""
    labeler = labeler_of(units, runs, noise_multiplier=0.01, **options)
    return [entry.label == "yes" for entry in labeler.stream(progress=False)]
