"""Games against components that answer inputs one by one: votes, texts, labels, retrieved documents."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from langchain_core.embeddings import Embeddings

from langchain_dpicl.audit.adversarial_backends import MARK, ReadVotes
from langchain_dpicl.audit.closed_forms import vector_law
from langchain_dpicl.audit.game import AuditResult, Game
from langchain_dpicl.audit.targets import QUERY, helper_of, labeler_of, share_of, voter_of
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.options import FewShotTask, LabelAnswers, Noise, Retrieval, Serving
from langchain_dpicl.pate.labeler import PromptPATELabeler
from langchain_dpicl.privacy.accounting.events import Event, GaussianEvent, RepeatedEvent, SubsampledEvent
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.privacy.extensions.confident_gnmax import ConfidentGNMaxMechanism
from langchain_dpicl.privacy.extensions.individual_filter import FILTER_TEMPLATE
from langchain_dpicl.privacy.extensions.method_tickets import (
    ANSWER_TEMPLATE,
    LABEL_TEMPLATE,
    SAMPLE_TEMPLATE,
    TEST_TEMPLATE,
)
from langchain_dpicl.released.labelled_pool import PoolEntry
from langchain_dpicl.retrieval.voting import DPRetrievalVotingRunnable
from langchain_dpicl.runs.query_plan import QUERY_TEMPLATE

# A trial is a run: the adversary asks a fresh component one query after the other, each chosen by the answers so far,
# and adds up the noisy votes. However long the run is, it has to stay below the one event that is charged.


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


def retriever_of(
    units: Sequence[str],
    *,
    rows: str = "units",
    participations: int = 1,
    noise_multiplier: float = _NOISE,
    **more: Any,
) -> DPRetrievalVotingRunnable:
    """Builds the component over units given as vote and place, such as "1,0 a 0.9"."""
    parts = [unit.split(" ", 1) for unit in units]
    return DPRetrievalVotingRunnable.from_private_examples(
        PrivateExamples([{"text": place, "vote": vote} for vote, place in parts], fields=("vote",), public_size=1),
        llm=ReadVotes(),
        retrieval=Retrieval(
            ReadTopics(),
            similarity_threshold=0.5,
            participations=participations,
            slots="per_unit" if rows == "units" else _CROWD + 1,
        ),
        budget=Budget(epsilon=_EPSILON, delta=1e-6),
        epsilon=_EPSILON / 2,
        task=FewShotTask(MARK + "{vote}", "{input}", labels=("yes", "no")),
        noise=Noise(multiplier=noise_multiplier),
        answers=LabelAnswers(calibrate=False, abstain_below="never", scores=True),
        serving=Serving(memo_size=0),
        **more,
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
        total, asked = 0.0, made.with_receipts()
        for weight in self.game.weights:
            votes = asked.invoke("a again" if total > 0 else "a").scores or {}
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


def check_nothing_else_shown(rows: str) -> AuditResult:
    """Checks that all a component shows beside its votes is the same with any units exhausted or missing."""
    check = "balances: none is shown"
    seen = []
    for units in ((), (f"{YES} a 1",), tuple(f"{NO} a 0.9" for _ in range(_CROWD))):
        made = retriever_of(units, rows=rows, max_queries=9, component="audited")
        receipts = [made.with_receipts().invoke("a").receipt.model_dump() for _ in range(3)]
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


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelGame(Game):
    """A game whose trials are public inputs; see `targets.labeler_of` for its units and options.

    Attributes:
      together: inputs of one trial on one secret sample, which has a labeler of its own; None: each input is a trial.
      question: what the outcome reveals, and with it which event must cover it: all of a release, or with
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
        self._num_asked = self._answered = 0
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
            self._num_asked = self._answered = 0
            self.labeler = labeler_of(self._units, self.game.together or 1, **self.game.options)
            entries = list(self.labeler.stream(progress=False))
        else:
            entries = list(itertools.islice(self._stream, 1))
        self._num_asked += len(entries)
        self._answered += sum(entry.status == "labelled" for entry in entries)
        return entries

    def faults(self) -> Iterator[str]:
        """Yields what is wrong with the tickets, and whether the run continues where its share is spent."""
        if tickets_left(self.labeler) != tickets_expected(self.labeler, self._num_asked, self._answered):
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
    """A game against `DPVotingRunnable.invoke`; see `targets.voter_of` for its units and options."""

    def component(self, units: tuple[str, ...]) -> Any:
        """Builds the voter."""
        is_scored = self.direction is not None
        voter = voter_of(units, with_scores=is_scored, max_queries=self.runs, **self.options)
        return voter.with_receipts() if is_scored else voter

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
    """A game against `DPFreeFormRunnable.invoke`; see `targets.helper_of` for its units and options."""

    def component(self, units: tuple[str, ...]) -> Any:
        """Builds the helper."""
        return helper_of(units, max_queries=self.runs, **self.options).with_receipts()

    def outcomes(self) -> tuple[str, ...]:
        """Returns the first of two answers, which says all."""
        return ("yes",)

    def outcome(self, answer: Any) -> str:
        """Returns the chosen answer, or the one released keyword."""
        return str(answer) if answer.keywords is None else answer.keywords[0]
