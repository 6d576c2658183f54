"""Games against `PromptPATELabeler`: the labels of public inputs."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from langchain_dpicl.audit.components import labeler_of, share_of
from langchain_dpicl.audit.games import Game
from langchain_dpicl.labelled_pool import PoolEntry
from langchain_dpicl.labelling import PromptPATELabeler
from langchain_dpicl.privacy.accounting.events import Event, GaussianEvent, RepeatedEvent, SubsampledEvent
from langchain_dpicl.privacy.extensions.confident_gnmax import ConfidentGNMaxMechanism
from langchain_dpicl.privacy.extensions.label_tickets import (
    ANSWER_TEMPLATE,
    LABEL_TEMPLATE,
    SAMPLE_TEMPLATE,
    TEST_TEMPLATE,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelGame(Game):
    """A game whose trials are public inputs; see `components.labeler_of` for its units and options.

    Attributes:
      together: inputs of one trial on one secret sample, which has a labeler of its own; None: each input is a trial.
      question: what the outcome tells of, and with it which event must cover it: all of a release, or with
        Confident-GNMax whether the "test" was passed, or the "answer" alone.
    """

    together: int | None = None
    question: Literal["release", "test", "answer"] = "release"

    def outcomes(self) -> tuple[str, ...]:
        """Returns every outcome there can be; of two, one says all."""
        if self.direction is not None:
            return ("above",)
        if self.question == "test":
            return ("rejected",)
        return ("yes", "no", "rejected") if self.options.get("abstain_below") is not None else ("yes",)

    def outcome(self, entries: Sequence[PoolEntry]) -> str:
        """Returns what the adversary makes of the inputs of one trial: a label, a refusal, or where the votes stand."""
        if self.direction is None:
            return entries[0].label or entries[0].status
        votes = np.mean([list((entry.votes or {}).values()) for entry in entries], axis=0)
        return "above" if float(np.dot(self.direction, votes)) > self.threshold else "below"

    def sides(self) -> tuple[LabellingSide, LabellingSide]:
        """Builds the labeler on both data sets."""
        return LabellingSide(self, self.units), LabellingSide(self, self.neighbour)

    def event(self, side: LabellingSide) -> Event:
        """Returns what the ticket is charged for one trial."""
        plan = side.labeler.plan
        mechanism = plan.release.mechanism
        if isinstance(mechanism, ConfidentGNMaxMechanism) and self.question != "release":
            return mechanism.test_event if self.question == "test" else mechanism.answer_event
        charged = plan.tickets()[0].event
        if self.together is None and plan.teachers == "one_sample" and isinstance(charged, RepeatedEvent):
            # The whole run is one ticket; where the sample is no secret, each input has its part of it.
            return charged.event
        return _as_one(charged)


def _as_one(event: Event) -> Event:
    """Returns an event in the terms of `bounds`: n Gaussians on one data set are one of n times mu^2."""
    if isinstance(event, SubsampledEvent):
        return SubsampledEvent(_as_one(event.event), event.sampling_rate)
    if isinstance(event, RepeatedEvent) and isinstance(event.event, GaussianEvent):
        return GaussianEvent(event.event.noise_multiplier / math.sqrt(event.count))
    return event


class LabellingSide:
    """One data set: its trials so far, and whether the tickets add up."""

    def __init__(self, game: LabelGame, units: tuple[str, ...]) -> None:
        self.game = game
        self.counts: Counter[str] = Counter()
        self._units = units
        self._asked = self._answered = 0
        self.labeler = labeler_of(units, game.together or game.runs, **game.options)
        self._stream = None if game.together else self.labeler.stream(progress=False)

    def play(self, runs: int) -> None:
        """Plays so many trials more, or fewer if the run ends."""
        for _ in range(runs):
            entries = self._trial()
            if len(entries) < (self.game.together or 1):
                break
            self.counts[self.game.outcome(entries)] += 1

    @property
    def played(self) -> int:
        """Trials so far."""
        return self.counts.total()

    def _trial(self) -> list[PoolEntry]:
        if self._stream is None:
            self._asked = self._answered = 0
            self.labeler = labeler_of(self._units, self.game.together or 1, **self.game.options)
            entries = list(self.labeler.stream(progress=False))
        else:
            entries = list(itertools.islice(self._stream, 1))
        self._asked += len(entries)
        self._answered += sum(entry.status == "labelled" for entry in entries)
        return entries

    def faults(self) -> Iterator[str]:
        """Yields what is wrong with the tickets, and whether the run goes on where its share is spent."""
        if tickets_left(self.labeler) != tickets_expected(self.labeler, self._asked, self._answered):
            yield "tickets: the ledger holds another number of them than were paid"
        is_over = self.counts.total() == self.game.runs
        if is_over and self._stream is not None and next(self._stream, None) is not None:
            yield "stop: not where the share is spent"


def tickets_left(labeler: PromptPATELabeler) -> dict[str, int]:
    """Returns how many tickets of each kind the ledger still holds."""
    return {ticket.template: share_of(labeler).remaining(ticket.template) for ticket in labeler.plan.tickets()}


def tickets_expected(labeler: PromptPATELabeler, asked: int, answered: int) -> dict[str, int]:
    """Returns how many there have to be after so many inputs, of which so many were answered."""
    spent = {LABEL_TEMPLATE: asked, SAMPLE_TEMPLATE: min(asked, 1), TEST_TEMPLATE: asked, ANSWER_TEMPLATE: answered}
    return {ticket.template: ticket.max_count - spent[ticket.template] for ticket in labeler.plan.tickets()}
