"""Asks chains and judges about the records of a secret sample, and turns the answers into rows."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from langchain_dpicl._opaque import OpaqueRows, run_guarded
from langchain_dpicl.backends.private_calls.call import OpaqueValue, read_silently
from langchain_dpicl.backends.rows.rows import arun_guarded
from langchain_dpicl.backends.sync_async import (
    EffectGenerator,
    limit_concurrency,
    run_async,
    run_in_thread,
    run_sync,
)
from langchain_dpicl.evaluation.chains import Answer, SilentChain
from langchain_dpicl.evaluation.evaluators import BoundEvaluator, cell_of
from langchain_dpicl.exceptions import CapabilityError
from langchain_dpicl.privacy.data.units import Unit
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM

ANSWER = "answer"
"""The variable of a judge's template that shows what the chain under test answered."""

Box = OpaqueValue[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Probe:
    """Starts the threads, and calls every model once with public words: a wrong key or address costs nothing.

    Each call goes the way that the private ones will go, blocking or awaited.

    Attributes:
      question: what will be asked.
      limit: calls in flight at once that the run's config allows.

    Raises:
      ConfigurationError: the system starts no more threads.
      ModelCallError: a model could not be called.
    """

    question: Question
    limit: int | None

    def run(self) -> None:
        """Runs, blocking."""
        with limit_concurrency(self.limit):
            for chain in self.question.silent:
                chain.calls.start()
                chain.probe()

    async def arun(self) -> None:
        """Runs, awaiting."""
        with limit_concurrency(self.limit):
            for chain in self.question.silent:
                await run_in_thread(chain.calls.start)
                await chain.aprobe()


@dataclass(frozen=True, repr=False, eq=False)
class Question:
    """What is asked about each record: answers of the chains, judgements of them, and an outcome per evaluator.

    Attributes:
      chains: the chains under test.
      evaluators: of one answer, or of a pair where there are two chains and `is_paired`.
      judges: the silent judge of each evaluator, or None.
      is_paired: whether an outcome is of all answers together; else each chain has a column per evaluator, its score.

    Raises:
      CapabilityError: a parser makes an object of an answer that is compared as a text.
    """

    chains: tuple[SilentChain, ...]
    evaluators: tuple[BoundEvaluator, ...]
    judges: tuple[SilentChain | None, ...]
    is_paired: bool = False
    is_choice: bool = False

    def __post_init__(self) -> None:
        compared = self.chains if any(one.reads_text for one in self.evaluators) else ()
        if not all(one.gives_text for one in (*compared, *filter(None, self.judges))):
            expected = "expected a text where Exact or a Judge compares it, found a parser that makes another object"
            msg = f"{expected}. End the chain in StrOutputParser(), or in RunnableLambda(Pure(function))."
            raise CapabilityError(msg)

    @property
    def silent(self) -> tuple[SilentChain, ...]:
        """All chains that see records: those under test, and the judges."""
        return (*self.chains, *filter(None, self.judges))

    @property
    def identity(self) -> tuple[Hashable, ...]:
        """What makes it another question beside what a report shows: templates, models, settings and functions."""
        chains, judges = (tuple(one and one.identity for one in listed) for listed in (self.chains, self.judges))
        return chains, judges, tuple(one.identity for one in self.evaluators)

    @property
    def width(self) -> int:
        """Columns of a row."""
        return len(self.chains) if self.is_choice else sum(map(len, self.widths))

    @property
    def widths(self) -> tuple[tuple[int, ...], ...]:
        """How many outcomes each table of each evaluator has."""
        return tuple(one.widths for one in self.evaluators)

    def ask(self, units: Sequence[OpaqueValue[Unit] | None]) -> OutcomeRequest:
        """Returns the effect that computes the rows of these units.

        Args:
          units: the records of each unit, private; None: they could not be read.
        """
        return OutcomeRequest(self, tuple(None if unit is None else _one_record(unit) for unit in units))

    @staticmethod
    def render(records: Sequence[Mapping[str, str]]) -> OpaqueValue[Unit]:
        """Returns what a row is asked: the records of its unit, hidden.

        Args:
          records: of one unit.
        """
        return OpaqueValue(tuple(map(dict, records)))


@dataclass(frozen=True, repr=False, eq=False)
class OutcomeRequest:
    """Computes the rows of one release: everything private runs below `run_guarded`, in boxes.

    A unit without records has a row that counts nowhere. What fails for a record is the worst score of that record.
    """

    question: Question
    records: tuple[Box | None, ...]

    def run(self) -> OpaqueRows:
        """Runs, blocking."""
        return run_guarded(lambda: run_sync(self._rows())) or OpaqueRows(self._nothing())

    async def arun(self) -> OpaqueRows:
        """Runs, awaiting."""
        return await arun_guarded(lambda: run_async(self._rows())) or OpaqueRows(self._nothing())

    def _nothing(self) -> Any:
        fill = 0.0 if self.question.is_choice else -1.0
        return np.full((len(self.records), self.question.width), fill)

    def _rows(self) -> EffectGenerator[OpaqueRows]:
        there = [box for box in self.records if box is not None]
        answers: list[tuple[Answer | None, ...]] = []
        for chain in self.question.chains:
            of_one = yield chain.requests(there)
            answers.append(of_one)
        judged: list[list[tuple[Answer | None, ...]]] = []
        for judge in self.question.judges:
            by_chain: list[tuple[Answer | None, ...]] = []
            for of_chain in answers:
                if judge is None:
                    by_chain.append((None,) * len(there))
                else:
                    by_chain.append((yield judge.requests(list(map(_with_answer, there, of_chain)))))
            judged.append(by_chain)
        return OpaqueRows(self._spread(there, answers, judged))

    def _spread(self, there: Sequence[Box], answers: Any, judged: Any) -> Any:
        out = self._nothing()
        places = [place for place, box in enumerate(self.records) if box is not None]
        for number, (place, box) in enumerate(zip(places, there, strict=True)):
            of_chains = [one[number] for one in answers]
            marks = [[one[number] for one in by_chain] for by_chain in judged]
            out[place] = self._row(box, of_chains, marks)
        return out

    def _row(self, box: Box, answers: Sequence[Answer | None], marks: Sequence[Sequence[Answer | None]]) -> list[float]:
        question = self.question
        if question.is_choice:  # one evaluator, one column per chain
            (evaluator,), (own,) = question.evaluators, marks
            marks_of = [
                evaluator.scores[_cell(evaluator, box, answer, mark)] for answer, mark in zip(answers, own, strict=True)
            ]
            return _rounded(marks_of, min(evaluator.scores), max(evaluator.scores))
        found: list[float] = []
        for evaluator, own in zip(question.evaluators, marks, strict=True):
            if question.is_paired:
                cell = _cell(evaluator, box, OpaqueValue(_revealed(answers)), OpaqueValue(_revealed(own)))
            else:
                cell = _cell(evaluator, box, answers[0], own[0])
            found.extend(evaluator.places(cell))
        return found


_COIN = 1 << 53


def _rounded(marks: Sequence[float], least: float, most: float) -> list[float]:
    """Returns 1 for each mark with the chance of its share of the range, else 0; one coin for all marks of a record."""
    coin = SYSTEM_RANDOM.integer_below(_COIN)
    return [float(coin < int(_COIN * ((mark - least) / (most - least)))) for mark in marks]


def _revealed(boxes: Sequence[Answer | None]) -> tuple[Any, ...]:
    return tuple(None if box is None else box.reveal() for box in boxes)


def _cell(evaluator: BoundEvaluator, box: Box, answer: Answer | None, judged: Answer | None) -> int:
    """Returns the place of an outcome; that of the worst score if the evaluator raises."""
    shown = (None if each is None else each.reveal() for each in (answer, judged))
    return cell_of(evaluator, box.reveal(), *shown)


def _one_record(unit: OpaqueValue[Unit]) -> Box | None:
    """Returns one record of a unit, drawn by secret coins if it has several; None if it has none."""
    count = len(unit.reveal())
    return None if not count else OpaqueValue(dict(unit.reveal()[SYSTEM_RANDOM.integer_below(count)]))


def _with_answer(box: Box, answer: Answer | None) -> Box:
    """Returns what a judge is shown of a record; without a text its template cannot be filled, and it fails."""
    text = None if answer is None else read_silently(lambda: str(answer.reveal()))
    return box if text is None else OpaqueValue({**box.reveal(), ANSWER: text})
