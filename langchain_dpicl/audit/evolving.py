"""Games against `PrivateEvolution`: votes on the same two candidates in every round."""

# The adversary chose candidates, embeddings and model, so that both candidates survive every round.

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.runnables import RunnableLambda

from langchain_dpicl.audit.components import share_of
from langchain_dpicl.audit.games import Game
from langchain_dpicl.audit.laws import vector_law
from langchain_dpicl.audit.readers import Opposite
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.evolution import PrivateEvolution
from langchain_dpicl.privacy.accounting.events import Event
from langchain_dpicl.privacy.examples import PrivateExamples

YES, NO = "yes", "no"
MANY = 3
"""Records of the target, all of which say the same: together they have one vote."""
_EPSILON = 1e12
_TEST_NOISE = 0.5


def evolution_of(units: Sequence[str], rounds: int, *, embeddings: Any = None, **options: Any) -> PrivateEvolution:
    """Builds an evolution between two candidates over units of several records that say "yes" or "no"."""
    arguments: dict[str, Any] = {"noise_multiplier": _TEST_NOISE, **options}
    adjacency = arguments.pop("adjacency", "add_remove")
    records = [{"text": text, "unit": place} for place, text in enumerate(units) for _ in range(MANY)]
    return PrivateEvolution.from_private_examples(
        PrivateExamples(records, public_size=1, unit_key="unit", records_per_unit=MANY),
        llm=RunnableLambda(_repeated),
        embeddings=Opposite() if embeddings is None else embeddings,
        candidates=(YES, NO),
        budget=Budget(epsilon=_EPSILON, delta=1e-6, adjacency=adjacency),
        epsilon=_EPSILON / 2,
        rounds=rounds,
        num_survivors=2,
        num_variations=1,
        shots_per_label=1,
        **arguments,
    )


def _repeated(_: Any) -> str:
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
