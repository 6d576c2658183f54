"""Asks a model about public examples: rows of several shapes, each question answered from the other examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from langchain_core.runnables import RunnableConfig
from numpy.random import PCG64, Generator
from numpy.typing import NDArray

from langchain_dpicl.backends.rows.label_rows import LabelRows
from langchain_dpicl.backends.sync_async import EffectGenerator, LimitConcurrency, run_async, run_sync
from langchain_dpicl.options import FewShotTask, LabelAnswers
from langchain_dpicl.options.base import LLM, TemplateLike, option_of
from langchain_dpicl.planning.row_law import estimate_facts
from langchain_dpicl.planning.share_plan import Cost
from langchain_dpicl.privacy._validate import check_choice, check_int, fail
from langchain_dpicl.rehearsal.rehearsal import Origin, Rehearsal, RehearsedShape
from langchain_dpicl.runs.release_run import new_bar, tick
from langchain_dpicl.tasks.labels import VotingTask, choice_engine, wording_digest
from langchain_dpicl.tasks.public_records import PublicRecords

if TYPE_CHECKING:
    from langchain_core.documents import Document

SHOTS = (1, 2, 4, 8)
MOST_EXAMPLES, MOST_CALLS = 64, 10_000
_FEW, _MANY, _DEALS = 2, 6, 2
"""Rows of one deal: asked first, and asked in all where the first rows err on their own; and deals per question."""
_ALONE = 0.3
"""Correlation below which more rows tell more."""
_BATCH = 256
_SEED = 20_230_929
_PRIVATE = "A rehearsal is free because it reads no private record. Give public examples, or examples you made up."


def rehearse(
    llm: LLM,
    public_examples: Sequence[Mapping[str, Any] | Document],
    task: FewShotTask | None = None,
    *,
    example_prompt: TemplateLike | None = None,
    suffix: TemplateLike | None = None,
    prefix: TemplateLike = "",
    text_key: str = "text",
    label_key: str = "label",
    labels: Sequence[str] | None = None,
    answers: LabelAnswers | None = None,
    shots: Sequence[int] = SHOTS,
    max_examples: int = MOST_EXAMPLES,
    max_calls: int = MOST_CALLS,
    origin: Origin = "same",
    progress: bool | None = None,
    config: RunnableConfig | None = None,
) -> Rehearsal:
    """Measures on public examples what rows of each shape are worth with this model; epsilon 0.

    Every example is asked about in turn, with prompts of the other examples: rows of 1, 2, 4 and 8 of them, raw and
    calibrated, and the prompt without examples. Give about 60; the interval of what is said halves with four times as
    many. `rehearsal_cost` says beforehand what it costs.

    Args:
      llm: the model that will read the private records.
      public_examples: dicts or Documents with text and label. They must be PUBLIC, and not taken from the private
        records: a sample of one's customers' records is private, however small.
      task: the wording, as the component will have it; None: the three templates.
      example_prompt: template of one example; None: text and label on a line each.
      suffix: template of the query; None: as the example.
      prefix: template before the examples.
      text_key: field of the text.
      label_key: field of the label.
      labels: the answers, in the order of the component; None: those of the examples, sorted.
      answers: how labels are read; `calibrate` None measures both ways.
      shots: numbers of examples of a row; those above half of the examples are left out.
      max_examples: most examples that are used; the first ones after a fixed public shuffle.
      max_calls: a rehearsal that could need more is refused before the first call.
      origin: "same" where the examples are of the private records' domain, "neighbour" for another one like it, which
        widens what is said, or "made_up".
      progress: True shows a bar, False hides it, None shows it on a terminal only.
      config: its `max_concurrency` bounds the calls in flight.

    Raises:
      ConfigurationError: `PrivateExamples`, examples that cannot be read, or more calls than `max_calls`.
      CapabilityError: the model cannot choose among labels.
      ModelCallError: a call failed.
    """
    asking = _Asking.of(
        llm=llm,
        public_examples=public_examples,
        task=task,
        example_prompt=example_prompt,
        suffix=suffix,
        prefix=prefix,
        text_key=text_key,
        label_key=label_key,
        labels=labels,
        answers=answers,
        shots=shots,
        max_examples=max_examples,
        max_calls=max_calls,
        origin=origin,
    )
    with new_bar(asking.most_calls, "call", "rehearsal", progress=progress) as bar:
        rehearsal: Rehearsal = run_sync(asking.walk(_limit(config), bar))
    return rehearsal


async def arehearse(
    llm: LLM,
    public_examples: Sequence[Mapping[str, Any] | Document],
    task: FewShotTask | None = None,
    *,
    progress: bool | None = None,
    config: RunnableConfig | None = None,
    **options: Any,
) -> Rehearsal:
    """Async version of `rehearse`.

    Args:
      llm: as of `rehearse`.
      public_examples: as of `rehearse`.
      task: as of `rehearse`.
      progress: as of `rehearse`.
      config: as of `rehearse`.
      options: the other parameters of `rehearse`.
    """
    asking = _Asking.of(llm=llm, public_examples=public_examples, task=task, **options)
    with new_bar(asking.most_calls, "call", "rehearsal", progress=progress) as bar:
        rehearsal: Rehearsal = await run_async(asking.walk(_limit(config), bar))
    return rehearsal


@dataclass(frozen=True, slots=True)
class RehearsalCost:
    """What a rehearsal costs.

    Attributes:
      least: model use if the first rows of every shape are enough.
      most: model use if all rows are asked.
    """

    least: Cost
    most: Cost


def rehearsal_cost(
    num_examples: int,
    *,
    num_labels: int = 2,
    shots: Sequence[int] = SHOTS,
    calls_per_row: int = 2,
    record_tokens: int = 60,
    query_tokens: int = 60,
) -> RehearsalCost:
    """Returns the model calls and tokens of a rehearsal, before anything is asked.

    Args:
      num_examples: public examples.
      num_labels: labels that an answer can have.
      shots: numbers of examples of a row.
      calls_per_row: 2 where rows are calibrated with one content-free input, otherwise 1.
      record_tokens: cap of an example.
      query_tokens: cap of a query.

    Raises:
      ConfigurationError: a number is out of range, or too few examples for these shots.

    >>> cost = rehearsal_cost(64)
    >>> cost.least.public_calls, cost.most.public_calls
    (2176, 6272)
    """
    count = check_int("num_examples", num_examples, low=3)
    sizes = {"calls": calls_per_row, "record_tokens": record_tokens, "query_tokens": query_tokens}
    fitting = _possible(shots, count - num_labels)
    least, most = (_cost(count, fitting, per_deal, fits=count - num_labels, **sizes) for per_deal in (_FEW, _MANY))
    return RehearsalCost(least, most)


def _cost(
    count: int,
    shots: Sequence[int],
    per_deal: int,
    *,
    fits: int,
    calls: int,
    record_tokens: int = 60,
    query_tokens: int = 60,
) -> Cost:
    rows = {k: _DEALS * min(per_deal, fits // k) for k in shots}
    asked = count * calls * (1 + sum(rows.values()))
    tokens = (
        count * calls * (query_tokens + sum(number * (k * record_tokens + query_tokens) for k, number in rows.items()))
    )
    return Cost(private_calls=0, public_calls=asked, tokens_in=tokens, tokens_out=asked)


def _possible(shots: Sequence[int], fits: int) -> tuple[int, ...]:
    """Returns the numbers of shots of which two rows of different examples fit beside a question."""
    given = [check_int("shots", one, low=1) for one in shots]
    fitting = tuple(sorted({one for one in given if 2 * one <= fits}))
    if not fitting:
        least = 2 * min(given, default=1)
        raise fail("public_examples", f"at least {least} examples more than there are labels", max(0, fits))
    return fitting


def _limit(config: RunnableConfig | None) -> int | None:
    limit = (config or {}).get("max_concurrency")
    return None if limit is None else check_int("max_concurrency", limit, low=1)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class _Asking:
    """The questions of one rehearsal."""

    public: PublicRecords
    task: VotingTask
    scorer: LabelRows
    model: str
    readings: tuple[bool, ...]
    shots: tuple[int, ...]
    origin: Origin
    most_calls: int

    @classmethod
    def of(
        cls,
        *,
        llm: LLM,
        public_examples: Any,
        task: FewShotTask | None = None,
        example_prompt: TemplateLike | None = None,
        suffix: TemplateLike | None = None,
        prefix: TemplateLike = "",
        text_key: str = "text",
        label_key: str = "label",
        labels: Sequence[str] | None = None,
        answers: LabelAnswers | None = None,
        shots: Sequence[int] = SHOTS,
        max_examples: int = MOST_EXAMPLES,
        max_calls: int = MOST_CALLS,
        origin: Origin = "same",
    ) -> _Asking:
        """Checks everything, and counts the calls, before the first call."""
        check_choice("origin", origin, get_args(Origin))
        check_int("max_examples", max_examples, low=3)
        wording, reading = (
            FewShotTask.of(task, example_prompt, suffix, prefix),
            option_of("answers", answers, LabelAnswers),
        )
        public = PublicRecords.of(
            public_examples, wording, text_key=text_key, label_key=label_key, labels=labels, instead=_PRIVATE
        )
        order = Generator(PCG64(_SEED)).permutation(len(public.records))[:max_examples]
        public = PublicRecords(
            tuple(public.records[place] for place in order), text_key, label_key, public.labels, public.fields
        )
        asked = VotingTask.of(public, wording, reading)
        fits = len(public.records) - len(public.labels)
        possible = _possible(shots, fits)
        engine = choice_engine(llm, asked)
        texts = list(asked.texts.values())
        scorer = LabelRows(engine, texts, calibrate=False)
        calibrates = bool(asked.content_free) and scorer.kind in {"whole labels", "first tokens"}
        readings = (False, True) if calibrates else (False,)
        if reading.calibrate is not None:
            if reading.calibrate and not calibrates:
                advice = "A vote in text is no probability, and there has to be a content-free input."
                raise fail("LabelAnswers.calibrate", "False or None for this model and wording", True, advice)
            readings = (reading.calibrate,)
        calls = 1 + len(asked.content_free) if True in readings else 1
        most = _cost(len(public.records), possible, _MANY, fits=fits, calls=calls).public_calls
        if most > check_int("max_calls", max_calls, low=1):
            advice = (
                "Give fewer examples (max_examples=, --examples), fewer shots, or a larger max_calls= (--max-calls)."
            )
            raise fail("max_calls", f"at least the {most:,} calls that this rehearsal may need", max_calls, advice)
        name = getattr(engine, "name", type(engine).__name__)
        return cls(public, asked, scorer, name, readings, possible, origin, most)

    def walk(self, limit: int | None, bar: Any) -> EffectGenerator[Rehearsal]:
        """Asks everything (an effect generator)."""
        gold = [self.public.labels.index(record[self.public.label_key]) for record in self.public.records]
        shapes: list[RehearsedShape] = []
        calls = 0
        for shots in (0, *self.shots):
            deals = self._deals(shots, gold) if shots else []
            votes: dict[bool, list[NDArray[np.int64]]] = {read: [] for read in self.readings}
            for part in self._parts(shots):
                asked = [[deal[place] for deal in dealt for place in part] for dealt in deals] if shots else None
                found, made = yield from self._votes(asked, limit, bar)
                calls += made
                for read in self.readings:
                    votes[read].append(found[read])
                if shots == 0 or not self._tells_more(found, gold):
                    break
            widths = [array.shape[1] for array in votes[self.readings[0]]]
            places = [deal for width in widths for deal in _dealt(width)] if shots else [0]
            for read in self.readings:
                rows = np.concatenate(votes[read], axis=1)
                shapes.append(RehearsedShape(shots, read, tuple(map(tuple, rows.tolist())), tuple(places)))
        return Rehearsal(
            model=self.model,
            reads=self.scorer.kind,
            labels=self.task.labels,
            wording=wording_digest(self.task),
            origin=self.origin,
            gold=tuple(gold),
            shapes=tuple(shapes),
            calls=calls,
            content_free=self.task.content_free if True in self.readings else (),
        )

    def _parts(self, shots: int) -> Iterator[range]:
        """Yields which rows of a deal are asked at first, and which besides."""
        fits = self._rows_per_deal(shots)
        yield range(min(_FEW, fits))
        if fits > _FEW:
            yield range(_FEW, fits)

    def _tells_more(self, found: Mapping[bool, NDArray[np.int64]], gold: Sequence[int]) -> bool:
        """Whether rows err on their own, so that more of them tell more."""
        facts = (
            estimate_facts(votes, gold, labels=len(self.task.labels), deals=_dealt(votes.shape[1]))
            for votes in found.values()
        )
        return min(one.correlation for one in facts) < _ALONE

    def _deals(self, shots: int, gold: Sequence[int]) -> list[list[list[tuple[int, ...]]]]:
        """Returns for each question its deals, each of disjoint rows of the other examples.

        Leaving a question out would make its label rarer in its rows than in those of a new question. So one example of
        every other label that has several is left out beside it, another one in each deal.
        """
        rng = Generator(PCG64([_SEED, shots]))
        by_label = [np.flatnonzero(np.asarray(gold) == place) for place in range(len(self.public.labels))]
        every = []
        for question, label in enumerate(gold):
            deals = []
            for _ in range(_DEALS):
                out = {question}
                out |= {int(rng.choice(own)) for place, own in enumerate(by_label) if place != label and len(own) > 1}
                order = rng.permutation([place for place in range(len(gold)) if place not in out])
                rows = [order[first * shots : (first + 1) * shots] for first in range(self._rows_per_deal(shots))]
                deals.append([tuple(row.tolist()) for row in rows])
            every.append(deals)
        return every

    def _rows_per_deal(self, shots: int) -> int:
        """Returns how many rows of one deal fit beside a question and what is left out with it."""
        return min(_MANY, (len(self.public.records) - len(self.public.labels)) // max(shots, 1))

    def _votes(
        self, asked: Any, limit: int | None, bar: Any
    ) -> EffectGenerator[tuple[dict[bool, NDArray[np.int64]], int]]:
        """Returns int64[questions, rows] votes by reading, and how many prompts were asked (an effect generator)."""
        records = self.public.records
        prompts: list[tuple[str, ...]] = []
        for question, record in enumerate(records):
            rows = [()] if asked is None else asked[question]
            prompts += self._prompts(record, rows)
        scores: dict[str, Any] = {}
        texts = list(dict.fromkeys(text for prompt in prompts for text in prompt))
        for first in range(0, len(texts), _BATCH):
            part = texts[first : first + _BATCH]
            scores |= yield LimitConcurrency(self.scorer.request_public_texts(part), limit)
            for _ in part:
                tick(bar)
        out = {}
        for read in self.readings:
            rows = [
                self.scorer.calibrated(scores[own], [scores[text] for text in free]) if read else scores[own]
                for own, *free in prompts
            ]
            array = np.array(rows, dtype=np.float64)
            votes = np.where(array.any(axis=1), array.argmax(axis=1), -1)
            out[read] = votes.reshape(len(records), -1)
        return out, len(texts)

    def _prompts(self, record: Mapping[str, str], rows: Sequence[Sequence[int]]) -> list[tuple[str, ...]]:
        query = self._query(record)
        queries = [query, *(self.task.wording.with_content(query, text) for text in self.task.content_free)]
        render = self.task.wording.renderer(queries if True in self.readings else queries[:1])
        return [render.at(slot)([self.public.records[place] for place in row]) for slot, row in enumerate(rows)]

    def _query(self, record: Mapping[str, str]) -> tuple[str, ...]:
        """Returns the query's variables: `input` is the text, others are the record's fields of that name."""
        names, text = self.task.wording.input_variables, record.get(self.public.text_key)
        if len(names) == 1 and text is not None:
            return (text,)
        values = record if text is None else {"input": text, **record}
        missing = [name for name in names if name not in values]
        if missing:
            fields = f"the fields that example_prompt shows, {list(record)}, and 'input', which is text_key"
            raise fail("suffix", f"variables among {fields}", missing)
        return tuple(values[name] for name in names)


def _dealt(rows: int) -> list[int]:
    """Returns the deal of each row that was asked together: the same number of rows of each deal."""
    return [deal for deal in range(_DEALS) for _ in range(rows // _DEALS)]
