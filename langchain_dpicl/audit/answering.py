"""Games against components that answer single queries: votes and free-form answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from langchain_dpicl._query_plan import QUERY_TEMPLATE
from langchain_dpicl.audit.components import QUERY, helper_of, share_of, voter_of
from langchain_dpicl.audit.games import Game
from langchain_dpicl.privacy.accounting.events import Event


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerGame(Game):
    """A game whose trials are queries to one component, which draws a fresh sample for each."""

    def component(self, units: tuple[str, ...]) -> Any:
        """Builds the component over units."""
        raise NotImplementedError

    def outcome(self, answer: Any) -> str:
        """Returns what the adversary makes of an answer."""
        raise NotImplementedError

    def sides(self) -> tuple[AnsweringSide, AnsweringSide]:
        """Builds the component on both data sets."""
        return AnsweringSide(self, self.units), AnsweringSide(self, self.neighbour)

    def event(self, side: AnsweringSide) -> Event:
        """Returns the event of the ticket of one query."""
        event: Event = side.component.plan.tickets()[0].event
        return event


class AnsweringSide:
    """One component and its answers so far."""

    def __init__(self, game: AnswerGame, units: tuple[str, ...]) -> None:
        self.game = game
        self.component = game.component(units)
        self.counts: Counter[str] = Counter()

    def play(self, runs: int) -> None:
        """Asks the same query again and again."""
        self.counts.update(self.game.outcome(self.component.invoke(QUERY)) for _ in range(runs))

    @property
    def played(self) -> int:
        """Trials so far."""
        return self.counts.total()

    def faults(self) -> Iterator[str]:
        """Yields a fault if the ledger holds another number of tickets than there were answers."""
        remaining = share_of(self.component).remaining(QUERY_TEMPLATE)
        if remaining != self.component.plan.max_queries - self.counts.total():
            yield "tickets: the ledger holds another number of them than there were answers"


@dataclass(frozen=True, kw_only=True, slots=True)
class VotingGame(AnswerGame):
    """A game against `DPVotingRunnable.invoke`; see `components.voter_of` for its units and options."""

    def component(self, units: tuple[str, ...]) -> Any:
        """Builds the voter."""
        return voter_of(units, with_scores=self.direction is not None, max_queries=self.runs, **self.options)

    def outcomes(self) -> tuple[str, ...]:
        """Returns every outcome there can be; of two, one says all."""
        if self.direction is not None:
            return ("above",)
        labels = tuple(self.options.get("labels", ("yes", "no")))
        labels += ("abstain",) if self.options.get("abstain_below") is not None else ()
        return labels[:1] if len(labels) == 2 else labels

    def outcome(self, answer: Any) -> str:
        """Returns the label, or where the votes stand."""
        if self.direction is None:
            return str(answer)
        votes = float(np.dot(self.direction, list(answer.scores.values())))
        return "above" if votes > self.threshold else "below"


@dataclass(frozen=True, kw_only=True, slots=True)
class FreeFormGame(AnswerGame):
    """A game against `DPFreeFormRunnable.invoke`; see `components.helper_of` for its units and options."""

    def component(self, units: tuple[str, ...]) -> Any:
        """Builds the helper."""
        return helper_of(units, max_queries=self.runs, **self.options)

    def outcomes(self) -> tuple[str, ...]:
        """Returns the first of two answers, which says all."""
        return ("yes",)

    def outcome(self, answer: Any) -> str:
        """Returns the chosen answer, or the one released keyword."""
        return answer if isinstance(answer, str) else answer.keywords[0]
