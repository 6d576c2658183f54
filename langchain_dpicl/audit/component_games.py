"""Games against components: those that answer inputs one by one, and those that generate or train."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from langchain_core.embeddings import Embeddings
from langchain_core.runnables import RunnableLambda
from typing_extensions import override

from langchain_dpicl.audit.game import (
    TINY_DELTA,
    AuditResult,
    Game,
    GameSide,
    gaussian_epsilon,
    lower_bound,
    lower_mu,
    mu_squared,
    result_of,
    vector_law,
)
from langchain_dpicl.audit.targets import (
    MARK,
    QUERY,
    TOKENS,
    Opposite,
    ReadGradients,
    ReadVotes,
    helper_of,
    labeler_of,
    plain_steps,
    share_of,
    synthesizer_of,
    training_of,
    voter_of,
)
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.evolution import PrivateEvolution
from langchain_dpicl.generation.synthesizer import DemonstrationSynthesizer
from langchain_dpicl.options import Evolution, FewShotTask, LabelAnswers, Noise, Retrieval, Serving
from langchain_dpicl.pate.labeler import PromptPATELabeler
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy._validate import Adjacency
from langchain_dpicl.privacy.accounting.events import Event, GaussianEvent, RepeatedEvent, SubsampledEvent
from langchain_dpicl.privacy.extensions.confident_gnmax import ConfidentGNMaxMechanism
from langchain_dpicl.privacy.extensions.individual_filter import FILTER_TEMPLATE
from langchain_dpicl.privacy.extensions.registry import (
    ANSWER_TEMPLATE,
    LABEL_TEMPLATE,
    SAMPLE_TEMPLATE,
    STEP_TEMPLATE,
    TEST_TEMPLATE,
)
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.released.labelled_pool import PoolEntry
from langchain_dpicl.retrieval import DPRetrievalVotingRunnable
from langchain_dpicl.runs.query_plan import QUERY_TEMPLATE
from langchain_dpicl.soft_prompts.plan import TrainingPlan, plan_training
from langchain_dpicl.soft_prompts.trainer import PromptDPSGD

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


class RetrievingSide(GameSide[RetrievalGame]):
    """One data set, and the runs that were played on it."""

    def __init__(self, game: RetrievalGame, units: tuple[str, ...]) -> None:
        super().__init__(game, units)
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
    seen = []
    for units in ((), (f"{YES} a 1",), tuple(f"{NO} a 0.9" for _ in range(_CROWD))):
        made = retriever_of(units, rows=rows, max_queries=9, component="audited")
        receipts = [made.with_receipts().invoke("a").receipt.model_dump() for _ in range(3)]
        told = [{**receipt, "ledger_id": "", "entry_hash": ""} for receipt in receipts]
        shown = [repr(made), str(made.filter), str(made.filter.participants), repr(told), repr(made.plan)]
        lines = [(line.kind, {**line.body, "nonce": ""}) for line in made.budget._desk.store.records()]  # noqa: SLF001  to be audited
        seen.append([*shown, repr([(kind, body) for kind, body in lines if kind != "bind"])])
    faults = [] if seen.count(seen[0]) == len(seen) else ["what is shown differs with who has a participation left"]
    blind = ("time", "what a provider sees")
    return result_of("balances: none is shown", faults, runs=len(seen), blind=blind, is_certain=True)


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
    """Returns an event in the terms of `game`: n Gaussians on one data set are one of n times mu^2."""
    if isinstance(event, SubsampledEvent):
        return SubsampledEvent(_as_one(event.event), event.sampling_rate)
    if isinstance(event, RepeatedEvent) and isinstance(event.event, GaussianEvent):
        return GaussianEvent(event.event.noise_multiplier / math.sqrt(event.count))
    return event


class LabellingSide(GameSide[LabelGame]):
    """One data set: its trials so far, and whether the tickets add up."""

    def __init__(self, game: LabelGame, units: tuple[str, ...]) -> None:
        super().__init__(game, units)
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

    def _trial(self) -> list[PoolEntry]:
        if self._stream is None:
            self._num_asked = self._answered = 0
            self.labeler = labeler_of(self.units, self.game.together or 1, **self.game.options)
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


class AnsweringSide(GameSide[AnswerGame]):
    """One component and its answers so far."""

    def __init__(self, game: AnswerGame, units: tuple[str, ...]) -> None:
        super().__init__(game, units)
        self.component = game.component(units)

    def play(self, runs: int) -> None:
        """Asks the same query again and again."""
        self.counts.update(self.game.outcome(self.component.invoke(QUERY)) for _ in range(runs))

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


CANARY_LENGTH = 25.0
"""Length of a canary's gradient, in clips."""
CLIP = 0.1
CANARIES, _GUESSES = 1_000, 500
"""Canaries of a run, which are trained parameters as well, and how many of them are guessed about."""


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


class TrainingSide(GameSide[StepGame]):
    """One run, and where its steps went so far."""

    def __init__(self, game: StepGame, units: tuple[str, ...]) -> None:
        super().__init__(game, units)
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

    def faults(self) -> Iterator[str]:
        """Yields a fault if there were more steps than were paid for."""
        if self.run.steps_left != self.run.plan.steps - self.counts.total():
            yield "tickets: the ledger holds another number of them than there were steps"


Proved: TypeAlias = tuple[float, float, float, str]
"""What guesses prove, the same as an epsilon, what is claimed, and the unit of the first and the third."""


ONE_RUN = "one run, many canaries"


def canaries(run_options: dict[str, Any]) -> AuditResult:
    """Trains once with many canaries, half of them left out by fair coins, and guesses from the weights which.

    Every canary has an axis of its own: the worst there can be; under replace_one those left out turn round instead.
    The guesser speaks of half of them. Runs without sampling are compared by their mu, which tells several times as
    much; others by their epsilon at a delta of 1e-12. "Sound" says that a run without any noise would have been
    refuted, but for a chance of 1e-6: a sampled run may draw few canaries, and no noise is needed to hide the others.

    Args:
      run_options: `noise_multiplier`, `sampling_rate`, `steps`, `adjacency`, `epsilon` and `delta` of the run.
    """
    present = SYSTEM_RANDOM.uniform(CANARIES) < 0.5
    run = _train(present, dict(run_options))
    right = right_guesses(run.weights, present, _GUESSES)
    proved, seen, claimed, unit = _prove_epsilon(run.plan, right)
    is_exact = mu_squared(run.plan.event()) is not None
    seen_right, is_seen = _without_noise(run.plan)
    words = f"{right} of {_GUESSES} guesses were right"
    blind = f"without any noise {seen_right} would be, which proves too little to tell"
    return AuditResult(
        check=ONE_RUN,
        verdict="violated" if proved > claimed else "sound" if is_seen else "undecided",
        lower_bound=seen,
        claimed_epsilon=run.plan.epsilon if is_exact else claimed,
        delta=run.plan.delta if is_exact else TINY_DELTA,
        found=proved,
        claimed=claimed,
        unit=unit,
        runs=1,
        details=(words,) if is_seen or proved > claimed else (words, blind),
        blind_to=("noise that is too small, by less than a factor of ten and more: one run is a blunt tool",),
    )


def _prove_epsilon(plan: TrainingPlan, right: int) -> Proved:
    """Returns what so many right guesses prove."""
    event = plan.event()
    squared = mu_squared(event)
    if squared is not None:
        mu = lower_mu(right, _GUESSES, canaries=CANARIES)
        return mu, gaussian_epsilon(mu, plan.delta), math.sqrt(squared), "mu"
    delta = TINY_DELTA
    seen = lower_bound(right, _GUESSES, delta=delta, canaries=CANARIES)
    claimed = accounting.epsilon_upper_bound(event, delta=delta, adjacency=plan.release.adjacency)
    return seen, seen, claimed, "epsilon"


def _without_noise(plan: TrainingPlan) -> tuple[int, bool]:
    """Returns how many guesses are right without any noise, at least, and whether so many refute the claim."""
    share = 1.0 - (1.0 - plan.sampling_rate) ** plan.steps
    right = right_without_noise(share, count=CANARIES, is_replaced=plan.release.adjacency == "replace_one")
    proved, _, claimed, _ = _prove_epsilon(plan, right)
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


def can_refute(options: dict[str, Any]) -> bool:
    """Returns whether canaries could refute the claim of such a run if there were no noise."""
    plan = plan_training(
        CANARIES,
        epsilon=None,
        delta=options.get("delta", 1e-6),
        expected_batch_size=_batch(options["sampling_rate"]),
        l2_clip_norm=CLIP,
        width=CANARIES,
        steps=options["steps"],
        adjacency=options["adjacency"],
        noise_multiplier=options["noise_multiplier"],
    )
    return _without_noise(plan)[1]


def _batch(rate: float) -> int:
    return max(1, round(rate * CANARIES))


def _train(present: Any, options: dict[str, Any]) -> PromptDPSGD:
    adjacency = options.get("adjacency", "add_remove")
    is_replaced = adjacency == "replace_one"
    units = [
        f"{place}:{CANARY_LENGTH * CLIP * (1 - 2 * here)}" for place, here in enumerate(present) if here or is_replaced
    ]
    batch = _batch(options.get("sampling_rate", 1.0))
    run = training_of(
        units,
        engine=ReadGradients(CANARIES),
        training=plain_steps(options.get("steps", 8), expected_batch_size=batch, l2_clip_norm=CLIP),
        noise=Noise(multiplier=options["noise_multiplier"], delta=options.get("delta")),
        public_size=CANARIES,
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


YES_LABEL, NO_LABEL = "yes", "no"
MANY = 3
"""Records of the target, all of which say the same: together they have one vote."""

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
        PrivateExamples(records, public_size=10, unit_key="unit", records_per_unit=MANY),
        llm=RunnableLambda(lambda _: YES_LABEL),  # nothing new: a variation that is a survivor counts once
        embeddings=Opposite() if embeddings is None else embeddings,
        budget=Budget(epsilon=_EPSILON, delta=1e-6, adjacency=adjacency),
        epsilon=_EPSILON / 2,
        shots_per_label=1,
        evolution=Evolution(rounds=rounds, num_survivors=2, num_variations=1, candidates=(YES_LABEL, NO_LABEL)),
        noise=Noise(multiplier=noise_multiplier),
    )


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


class EvolvingSide(GameSide[EvolutionGame]):
    """One data set, and the rounds that were played on it."""

    def __init__(self, game: EvolutionGame, units: tuple[str, ...]) -> None:
        super().__init__(game, units)
        self._faults: list[str] = []

    def built(self, rounds: int) -> PrivateEvolution:
        """Builds the component for so many rounds."""
        return evolution_of(self.units, rounds, **self.game.options)

    def play(self, runs: int) -> None:
        """Has so many rounds more voted."""
        evolution = self.built(runs)
        evolution.run(progress=False)
        self.counts.update(self._outcome(votes) for votes in evolution.history[None])
        (ticket,) = evolution.plan.tickets()
        if share_of(evolution).remaining(ticket.template) != runs - len(evolution.history[None]):
            self._faults.append("tickets: the ledger holds another number of them than there were rounds")
        # One comes twice by chance, once in some two million runs of 220 rounds; more of them once in 10^13.
        if len({tuple(sorted(votes.items())) for votes in evolution.history[None]}) < len(evolution.history[None]) - 1:
            self._faults.append("noise: histograms came twice")

    def _outcome(self, votes: Mapping[str, float]) -> str:
        direction = self.game.direction or (1.0, -1.0)
        return (
            "above"
            if votes[YES_LABEL] * direction[0] + votes[NO_LABEL] * direction[1] > self.game.threshold
            else "below"
        )

    def faults(self) -> Iterator[str]:
        """Yields what is wrong without any chance."""
        yield from self._faults


def evolution_cases(*, adjacency: str) -> Iterator[Game]:
    """Yields the worst cases of one round: the vote of a unit of several records that goes, or changes."""
    moved = adjacency == "replace_one"
    ends, scale = (1.0, -1.0 if moved else 0.0), _TEST_NOISE * (2.0 if moved else 1.0)
    middle = sum(ends) / 2
    terms: dict[str, Any] = {"adjacency": adjacency, "noise_multiplier": _TEST_NOISE}
    shared: dict[str, Any] = {
        "units": (YES_LABEL,),
        "neighbour": (NO_LABEL,) if moved else (),
        "runs": 220,
        "options": terms,
    }
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


class WritingSide(GameSide[TokenGame]):
    """One data set, and the texts that were written from it so far."""

    def __init__(self, game: TokenGame, units: tuple[str, ...]) -> None:
        super().__init__(game, units)
        self._num_written = 0
        self._unpaid = False
        self.synthesizer = self._built(min(_AT_ONCE, game.runs))

    def _built(self, tokens: int) -> DemonstrationSynthesizer:
        return synthesizer_of(self.units, tokens, public=self.game.public, **self.game.options)

    def play(self, runs: int) -> None:
        """Has so many texts more written."""
        counted = self.game.kept
        for size in [_AT_ONCE] * (runs // _AT_ONCE) + [runs % _AT_ONCE] * (runs % _AT_ONCE > 0):
            self.synthesizer = self._built(size)
            texts = [text["text"] for text in self.synthesizer.stream(progress=False)]
            self._num_written += len(texts)
            self.counts.update(text for text in texts if not counted or text in counted)
            (ticket,) = self.synthesizer.plan.tickets()
            remaining = share_of(self.synthesizer).remaining(ticket.template)
            self._unpaid |= remaining != ticket.max_count - len(texts)

    @property
    @override
    def played(self) -> int:
        return self._num_written  # not all of them count

    def faults(self) -> Iterator[str]:
        """Yields a fault if the ledger holds another number of tickets than there were texts."""
        if self._unpaid:
            yield "tickets: the ledger holds another number of them than there were texts"
