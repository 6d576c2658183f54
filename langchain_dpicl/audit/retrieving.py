"""Checks answers from retrieved documents in games over whole runs of queries."""

# A trial is a run: the adversary asks a fresh component one query after the other, each chosen by the answers so far,
# and adds up the noisy votes. However long the run is, it has to stay below the one event that is charged.

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.embeddings import Embeddings

from langchain_dpicl._query_plan import QUERY_TEMPLATE
from langchain_dpicl.audit.games import Game
from langchain_dpicl.audit.laws import vector_law
from langchain_dpicl.audit.readers import MARK, ReadVotes
from langchain_dpicl.audit.results import AuditResult
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.privacy.accounting.events import Event
from langchain_dpicl.privacy.examples import PrivateExamples
from langchain_dpicl.privacy.extensions.individual_filter import FILTER_TEMPLATE
from langchain_dpicl.retrieval import DPRetrievalVotingRunnable

YES, NO = "1,0", "0,1"
_EPSILON = 1e12
_NOISE = 0.5
"""Noise over the sensitivity of one participation: with one participation, a run has a mu of 2."""
_CROWD = 5
_LONG = {"units": 4, "slots": 8}
"""Queries of a run that goes on: four times what is charged shows twice the mu."""


class ReadTopics(Embeddings):
    """Directions that a text states: "a 0.9" lies at similarity 0.9 to "a", and at none to "b"."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Returns float[texts, 3]: share of the topic a, of the topic b, and the rest."""
        return [self.embed_query(text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        """Returns one of them; a text without a number is the topic itself."""
        topic, *more = text.split()
        share = float(more[0]) if more and more[0][0].isdigit() else 1.0
        return [share * (topic == "a"), share * (topic == "b"), math.sqrt(max(0.0, 1.0 - share * share))]


def retriever_of(units: Sequence[str], **options: Any) -> DPRetrievalVotingRunnable:
    """Builds the component over units given as vote and place, such as "1,0 a 0.9"."""
    arguments: dict[str, Any] = {"noise_multiplier": _NOISE, "participations": 1, "rows": "units", **options}
    if arguments["rows"] == "slots":
        arguments.setdefault("num_slots", _CROWD + 1)
    arguments.pop("adjacency", None)
    parts = [unit.split(" ", 1) for unit in units]
    return DPRetrievalVotingRunnable.from_private_examples(
        PrivateExamples([{"text": place, "vote": vote} for vote, place in parts], fields=("vote",), public_size=1),
        llm=arguments.pop("llm", None) or ReadVotes(),
        embeddings=arguments.pop("embeddings", None) or ReadTopics(),
        labels=("yes", "no"),
        similarity_threshold=0.5,
        budget=Budget(epsilon=_EPSILON, delta=1e-6),
        epsilon=_EPSILON / 2,
        example_prompt=MARK + "{vote}",
        suffix="{input}",
        calibrate=False,
        min_votes=None,
        with_scores=True,
        memo_size=0,
        **arguments,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RetrievalGame(Game):
    """A game whose trials are runs of queries to a fresh component.

    Attributes:
      weights: of each query of a run; its noisy votes are projected on `direction` and added up with them.
    """

    weights: tuple[float, ...] = (1.0,)

    def sides(self) -> tuple[RetrievingSide, RetrievingSide]:
        """Prepares both data sets."""
        return RetrievingSide(self, self.units), RetrievingSide(self, self.neighbour)

    def event(self, side: RetrievingSide) -> Event:
        """Returns the event of the ticket that pays for a whole run."""
        tickets = retriever_of(side.units, **self.options).plan.tickets()
        event: Event = next(ticket.event for ticket in tickets if ticket.template == FILTER_TEMPLATE)
        return event

    def outcomes(self) -> tuple[str, ...]:
        """Returns where the sum stands; of two sides, one says all."""
        return ("above",)


class RetrievingSide:
    """One data set, and the runs that were played on it."""

    def __init__(self, game: RetrievalGame, units: tuple[str, ...]) -> None:
        self.game, self.units = game, units
        self.counts: Counter[str] = Counter()
        self._left: set[tuple[int, int]] = set()

    def play(self, runs: int) -> None:
        """Plays so many runs more."""
        for _ in range(runs):
            made = retriever_of(self.units, **self.game.options)
            total = self._run(made)
            self.counts["above" if total > self.game.threshold else "below"] += 1
            share, asked = made.share, len(self.game.weights)
            spent = made.plan.max_queries - share.remaining(QUERY_TEMPLATE)
            self._left.add((share.remaining(FILTER_TEMPLATE), asked - spent))

    def _run(self, made: DPRetrievalVotingRunnable) -> float:
        """Asks one query after the other, worded by the sum so far, and adds up."""
        yes, no = self.game.direction or (1.0, 0.0)
        total = 0.0
        for weight in self.game.weights:
            votes = made.invoke("a again" if total > 0 else "a").scores
            total += weight * (yes * votes["yes"] + no * votes["no"])
        return total

    @property
    def played(self) -> int:
        """Trials so far."""
        return self.counts.total()

    def faults(self) -> Iterator[str]:
        """Yields a fault if a run was not paid for once, or a query not counted."""
        if self._left - {(0, 0)}:
            yield "tickets: a run was answered and not paid for, or the ledger holds another number of queries"


def retrieval_cases(*, rows: str) -> Iterator[RetrievalGame]:
    """Yields the worst cases of runs, and those in which published ways of retrieval leak."""
    options: dict[str, Any] = {"rows": rows, "noise_multiplier": _NOISE}
    scale = _NOISE * (1.0 if rows == "units" else math.sqrt(2.0))
    mine, long = f"{YES} a 1", float(_LONG[rows])
    again: dict[str, Any] = {"weights": (1.0,) * _LONG[rows]}
    if rows == "units":
        most = 3
        noise = _NOISE * math.sqrt(most)
        yield RetrievalGame(
            name=f"a run: gaussian, {rows}, as often as one unit may",
            units=(mine,),
            neighbour=(),
            runs=220,
            options={**options, "participations": most, "noise_multiplier": noise},
            direction=(1.0, 0.0),
            weights=(1.0,) * most,
            threshold=most / 2,
            law=vector_law((float(most), 0.0), scale=noise * math.sqrt(most), threshold=most / 2),
        )
    yield _game("exhausted, and asked again", (mine,), (), options, scale, wrong=(long, 0.0), right=(1.0, 0.0), **again)
    far = f"{YES} b 1"
    yield _game("not near, and asked again", (far,), (), options, scale, wrong=(long, 0.0), right=(0.0, 0.0), **again)
    yield from _crowds(mine, options, scale)


def _crowds(mine: str, options: dict[str, Any], scale: float) -> Iterator[RetrievalGame]:
    """Yields the games on one unit that others are ranked behind, or measured against."""
    crowd = tuple(f"{NO if place % 2 == 0 else YES} a 0.9{9 - place}" for place in range(_CROWD))
    length = _CROWD + 1
    turns = tuple(1.0 if place % 2 == 0 else -1.0 for place in range(length))
    # With a row for the first alone, both worlds alternate, one query apart, until the crowd is through.
    wrong, right = (float(length), -float(_CROWD)), (0.0, -1.0)
    yield _game(
        "in front of a crowd",
        (mine, *crowd),
        crowd,
        options,
        scale * math.sqrt(2.0),
        wrong=wrong,
        right=right,
        weights=turns,
        direction=(1.0, -1.0),
    )
    level = tuple(f"{NO} a 0.8" for _ in range(_CROWD))
    wrong, right = (0.0, float(_CROWD)), (float(_CROWD), float(_CROWD))
    yield _game(
        "nearer than a crowd",
        (mine, *level),
        level,
        options,
        scale,
        wrong=wrong,
        right=right,
        weights=(1.0,),
        direction=(0.0, 1.0),
    )


def _game(
    name: str,
    units: tuple[str, ...],
    neighbour: tuple[str, ...],
    options: dict[str, Any],
    scale: float,
    *,
    wrong: tuple[float, float],
    right: tuple[float, float],
    weights: tuple[float, ...],
    direction: tuple[float, float] = (1.0, 0.0),
) -> RetrievalGame:
    """Returns a game that shows little of a sound component, and much of one that has the fault in question."""
    noise, middle = scale * math.sqrt(len(weights)), sum(wrong) / 2

    def law(factor: float) -> tuple[float, float]:
        return vector_law(wrong if factor > 1.0 else right, scale=noise, threshold=middle)(1.0)

    return RetrievalGame(
        name=f"a run: {name}, {options['rows']}",
        units=units,
        neighbour=neighbour,
        runs=260,
        options=options,
        direction=direction,
        weights=weights,
        threshold=middle,
        law=law,
        power_for=_FAULTS[name],
    )


_FAULTS = {
    "exhausted, and asked again": "units that are never exhausted",
    "not near, and asked again": "units that vote although they are not near",
    "in front of a crowd": "the first k instead of a threshold",
    "nearer than a crowd": "nearness that is measured against other documents",
}


def nothing_shown(rows: str) -> AuditResult:
    """Checks that all a component shows beside its votes is the same whoever is exhausted, or not there at all."""
    check = "balances: none is shown"
    seen = []
    for units in ((), (f"{YES} a 1",), tuple(f"{NO} a 0.9" for _ in range(_CROWD))):
        made = retriever_of(units, rows=rows, with_receipt=True, max_queries=9, component="audited")
        receipts = [made.invoke("a").receipt.model_dump() for _ in range(3)]
        told = [{**receipt, "ledger_id": "", "entry_hash": ""} for receipt in receipts]
        shown = [repr(made), str(made.filter), str(made.filter.participants), repr(told), repr(made.plan)]
        lines = [(line.kind, {**line.body, "nonce": ""}) for line in made.budget._desk.store.records()]  # noqa: SLF001  to be audited
        seen.append([*shown, repr([(kind, body) for kind, body in lines if kind != "bind"])])
    faults = [] if seen.count(seen[0]) == len(seen) else ["what is shown differs with who has a participation left"]
    return AuditResult(
        check=check,
        verdict="violated" if faults else "sound",
        runs=len(seen),
        confidence=1.0,
        details=tuple(faults),
        blind_to=("time", "what a provider sees"),
    )
