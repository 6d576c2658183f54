"""Answers each query with a label: the majority of few-shot prompts made of public examples, without noise.

Epsilon is 0 because no private record is read. That holds only if the examples are public: their publication harms
nobody. Examples written by hand, of published data sets, or of people who agreed are public. A sample of one's
customers' records is NOT: it belongs into `PrivateExamples`, and its votes into `DPVotingRunnable`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self, cast

import numpy as np
from langchain_core.callbacks import AsyncCallbackManagerForChainRun, CallbackManagerForChainRun
from langchain_core.documents import Document
from langchain_core.runnables import Runnable, RunnableConfig
from numpy.random import PCG64
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, create_model
from typing_extensions import override

from langchain_dpicl._construction import awaitable, tells_how_to_build
from langchain_dpicl.backends.resolve import as_model
from langchain_dpicl.backends.rows.label_rows import LabelRows
from langchain_dpicl.backends.sync_async import EffectGenerator, LimitConcurrency, run_async, run_sync
from langchain_dpicl.exceptions import ConfigurationError, ModelCallError
from langchain_dpicl.options import FewShotTask, LabelAnswers, Rows
from langchain_dpicl.options.base import LLM, QueryInput, TemplateLike, option_of, refuse_unused
from langchain_dpicl.planning.share_plan import Cost, check_counts
from langchain_dpicl.privacy._validate import check_int, fail
from langchain_dpicl.privacy.mechanisms.vote_sums import ProbabilitySum, VoteSum
from langchain_dpicl.tasks.labels import VotingTask, abstention_of, check_other_label, reader_of
from langchain_dpicl.tasks.public_records import PublicRecords
from langchain_dpicl.tasks.templates import Query

DEFAULT_ROWS, DEFAULT_SHOTS = 20, 4
BASIS = "epsilon 0: the caller declares these examples public"

_SEED = 20  # Public: equal rows for equal examples.
_PRIVATE = "Epsilon is 0 because no private record is read; use DPVotingRunnable."


class PublicVotingResult(BaseModel):
    """An answer of `PublicVotingRunnable` with its votes. Public; prints as its label.

    Attributes:
      label: the answer; if `abstained`, the abstention text.
      abstained: whether no label had enough votes.
      scores: exact votes, or sums of probabilities, by label.
      epsilon: 0, if the examples are public.
    """

    label: str
    abstained: bool
    scores: dict[str, float]
    epsilon: float = 0.0

    model_config = ConfigDict(frozen=True)

    def __str__(self) -> str:
        return self.label


def shape_of(rows: Rows | None, num_examples: int) -> tuple[int, int]:
    """Returns the number of rows and of examples per row that `rows=` asks for."""
    given = option_of("rows", rows, Rows)
    refuse_unused(given, ("slots", "units", "shots"), "PublicVotingRunnable")
    if given == Rows():
        return DEFAULT_ROWS, min(DEFAULT_SHOTS, num_examples)
    if given.shots > num_examples:
        raise fail("Rows.shots", f"at most {num_examples}, the number of public examples", given.shots)
    return given.slots or given.units or DEFAULT_ROWS, given.shots


def fixed_rows(num_examples: int, *, num_rows: int, shots: int) -> tuple[tuple[int, ...], ...]:
    """Returns the places of the examples of each row; of any two examples one is in at most one row more.

    The raw numbers of PCG64 are the same with every version of numpy, and so are the rows.
    """
    coins = PCG64(_SEED)
    used = np.zeros(num_examples, dtype=np.int64)
    rows = []
    for _ in range(num_rows):
        order = np.argsort(coins.random_raw(num_examples), kind="stable")
        least_used = order[np.argsort(used[order], kind="stable")[:shots]]
        used[least_used] += 1
        mixed = least_used[np.argsort(coins.random_raw(shots), kind="stable")]
        rows.append(tuple(int(place) for place in mixed))
    return tuple(rows)


@tells_how_to_build("PublicVotingRunnable.from_public_examples(public_examples, llm=..., ...)")
class PublicVotingRunnable(Runnable[QueryInput, str]):
    """Answers each query with a label that many few-shot prompts of PUBLIC examples voted for, at epsilon 0.

    The free rival of `DPVotingRunnable`: the same prompts and votes, without noise, ledger and budget. If it is as good
    on a task, private records are not needed there. The rows are drawn once, by a public rule, and answer every query.

    Only examples whose publication harms nobody are public: written by hand, of published data sets, or of people who
    agreed. A sample of one's customers' records is NOT public, however small.

    Formal guarantees:
      - No private record is read: `PrivateExamples` are refused before any call.
      - Equal examples and options give the same prompts. An answer depends on its query alone, whatever else is in its
        batch, wherever the engine's own rows have that property.

    Build it with `from_public_examples`. Input: as of `DPVotingRunnable`. A batch is asked as one, and its
    `max_concurrency` bounds the calls in flight. A failed call is a ModelCallError. Callbacks see a run per query, but
    not its model calls, as with every component here.

    Example:
      >>> from langchain_dpicl import EmbeddedLLM
      >>> from langchain_dpicl.baselines import PublicVotingRunnable
      >>> written = [
      ...     {"text": "my card was declined", "label": "card"},
      ...     {"text": "is there a fee to send money abroad", "label": "transfer"},
      ... ]
      >>> voter = PublicVotingRunnable.from_public_examples(written, llm=EmbeddedLLM())
      >>> voter.invoke("why was my card declined?")
      'card'
      >>> voter.report["epsilon"], voter.report["basis"]
      (0.0, 'epsilon 0: the caller declares these examples public')
    """

    def __init__(
        self,
        *,
        public: PublicRecords,
        rows: tuple[tuple[int, ...], ...],
        task: VotingTask,
        scorer: LabelRows,
        answers: LabelAnswers,
        abstain_below: float | None,
        reading: Mapping[str, str],
    ) -> None:
        self._num_examples = len(public.records)
        self._rows = tuple(tuple(public.records[place] for place in row) for row in rows)
        self._task = task
        self._scorer = scorer
        self._abstain_label = answers.abstain_label
        self._abstain_below = abstain_below
        self._reading = dict(reading)

    @classmethod
    def from_public_examples(
        cls,
        public_examples: Sequence[Mapping[str, Any] | Document],
        *,
        llm: LLM,
        text_key: str = "text",
        label_key: str = "label",
        labels: Sequence[str] | None = None,
        example_prompt: TemplateLike | None = None,
        suffix: TemplateLike | None = None,
        prefix: TemplateLike = "",
        task: FewShotTask | None = None,
        rows: Rows | None = None,
        answers: LabelAnswers | None = None,
    ) -> Self:
        """Checks the examples, draws the rows and returns a Runnable.

        Args:
          public_examples: dicts, or LangChain Documents (`page_content` is the text, `metadata` has the other fields).
            They must be PUBLIC: see the class.
          llm: as of `DPVotingRunnable.from_private_examples`.
          text_key: field of the text, for the usual templates and for Documents.
          label_key: field of the label.
          labels: every label an answer can have; None: those of the examples, sorted.
          example_prompt: template of one example; None: text and label on a line each.
          suffix: template of the query, after the examples; the label is what follows. None: as the example.
          prefix: template before the examples.
          task: a `FewShotTask` in place of the three templates, with verbalizers.
          rows: a `Rows`, of which `slots` and `shots`, or `units` (so many one-shot rows), are taken. None: 20 rows of
            4 examples, or of as many as there are.
          answers: a `LabelAnswers`: how labels are read, and abstention. Scores are free and always in `vote`.

        Raises:
          ConfigurationError: private examples, examples that cannot be read, or a parameter out of range.
          CapabilityError: the model cannot choose among labels.
          ModelCallError: the model could not be reached.
        """
        answers = option_of("answers", answers, LabelAnswers)
        wording = FewShotTask.of(task, example_prompt, suffix, prefix)
        public = PublicRecords.of(
            public_examples, wording, text_key=text_key, label_key=label_key, labels=labels, instead=_PRIVATE
        )
        voting = VotingTask.of(public, wording, answers)
        below = abstention_of(answers, voting.labels, usual="never")
        check_other_label(answers)
        num_rows, shots = shape_of(rows, len(public.records))
        voting, scorer, reading = reader_of(as_model(llm), voting, is_wanted=answers.calibrate)
        return cls(
            public=public,
            rows=fixed_rows(len(public.records), num_rows=num_rows, shots=shots),
            task=voting,
            scorer=scorer,
            answers=answers,
            abstain_below=below,
            reading=reading,
        )

    afrom_public_examples: ClassVar = awaitable(from_public_examples)

    @property
    def labels(self) -> tuple[str, ...]:
        """Every label an answer can have; of labels with equal votes the first is the answer."""
        return self._task.labels

    @property
    @override
    def InputType(self) -> Any:
        names = self._task.wording.input_variables
        fields: dict[str, Any] = dict.fromkeys(names, (Any, ...))
        return str if len(names) == 1 else create_model("Query", **fields)

    @property
    def report(self) -> dict[str, Any]:
        """The public report: what was asked, and why epsilon is 0; no text of an example."""
        return {
            "private": True,
            "epsilon": 0.0,
            "delta": 0.0,
            "basis": BASIS,
            "num_examples": self._num_examples,
            "num_rows": len(self._rows),
            "shots_per_row": len(self._rows[0]),
            "abstain_below": self._abstain_below,
            **self._task.to_dict(),
            **self._reading,
        }

    def cost(
        self, num_queries: int, *, record_tokens: int = 60, query_tokens: int = 60, answer_tokens: int = 1
    ) -> Cost:
        """Returns the model calls and tokens of many queries, calibration included; equal prompts count each time.

        Args:
          num_queries: queries.
          record_tokens: cap of an example.
          query_tokens: cap of a query.
          answer_tokens: tokens of an answer.

        Raises:
          ConfigurationError: a number is out of range.
        """
        check_int("num_queries", num_queries, low=0)
        check_counts(record_tokens=record_tokens, query_tokens=query_tokens, answer_tokens=answer_tokens)
        calls = num_queries * len(self._rows) * (1 + len(self._task.content_free))
        tokens_in = calls * (len(self._rows[0]) * record_tokens + query_tokens)
        return Cost(private_calls=0, public_calls=calls, tokens_in=tokens_in, tokens_out=calls * answer_tokens)

    def vote(self, query: QueryInput, config: RunnableConfig | None = None) -> PublicVotingResult:
        """Returns the answer to one query with its votes.

        Args:
          query: as of `invoke`.
          config: of the run.

        Raises:
          ConfigurationError: the query lacks a variable of the wording, or is no text.
          ModelCallError: a call failed.
        """
        [result] = self._batch_with_config(self._answered, [query], config, is_whole=True)
        return cast("PublicVotingResult", result)

    async def avote(self, query: QueryInput, config: RunnableConfig | None = None) -> PublicVotingResult:
        """Async version of `vote`."""
        [result] = await self._abatch_with_config(self._aanswered, [query], config, is_whole=True)
        return cast("PublicVotingResult", result)

    @override
    def invoke(self, input: QueryInput, config: RunnableConfig | None = None, **kwargs: Any) -> str:
        return self.batch([input], config, **kwargs)[0]

    @override
    async def ainvoke(self, input: QueryInput, config: RunnableConfig | None = None, **kwargs: Any) -> str:
        return (await self.abatch([input], config, **kwargs))[0]

    @override
    def batch(
        self,
        inputs: list[QueryInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any | None,
    ) -> list[str]:
        _refuse_arguments(kwargs)
        return self._batch_with_config(
            self._answered, inputs, config, return_exceptions=return_exceptions, keep_errors=return_exceptions
        )

    @override
    async def abatch(
        self,
        inputs: list[QueryInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any | None,
    ) -> list[str]:
        _refuse_arguments(kwargs)
        return await self._abatch_with_config(
            self._aanswered, inputs, config, return_exceptions=return_exceptions, keep_errors=return_exceptions
        )

    def __repr__(self) -> str:
        shape = f"num_rows={len(self._rows)}, shots_per_row={len(self._rows[0])}"
        return f"{type(self).__name__}(labels={self.labels!r}, num_examples={self._num_examples}, {shape})"

    # -- inside ----------------------------------------------------------------------------------------------------

    def _answered(
        self,
        inputs: list[QueryInput],
        run_manager: list[CallbackManagerForChainRun],
        config: list[RunnableConfig],
        *,
        keep_errors: bool = False,
        is_whole: bool = False,
    ) -> list[Any]:
        del run_manager  # LangChain passes a config only beside it
        walk = self._walk(inputs, config[0].get("max_concurrency"), keep_errors=keep_errors)
        return _told(run_sync(walk), is_whole=is_whole)

    async def _aanswered(
        self,
        inputs: list[QueryInput],
        run_manager: list[AsyncCallbackManagerForChainRun],
        config: list[RunnableConfig],
        *,
        keep_errors: bool = False,
        is_whole: bool = False,
    ) -> list[Any]:
        del run_manager  # LangChain passes a config only beside it
        walk = self._walk(inputs, config[0].get("max_concurrency"), keep_errors=keep_errors)
        return _told(await run_async(walk), is_whole=is_whole)

    def _walk(
        self, inputs: Sequence[QueryInput], limit: int | None, *, keep_errors: bool
    ) -> EffectGenerator[list[PublicVotingResult | Exception]]:
        """Returns the result of each input, or what is wrong with it (an effect generator)."""
        queries: list[Query | ConfigurationError] = []
        for value in inputs:
            try:
                queries.append(self._task.wording.query(value))
            except ConfigurationError as error:
                if not keep_errors:
                    raise
                queries.append(error)
        asked = list(dict.fromkeys(query for query in queries if not isinstance(query, Exception)))
        found = (yield from self._found(asked, limit, keep_errors=keep_errors)) if asked else {}
        return [query if isinstance(query, Exception) else found[query] for query in queries]

    def _found(
        self, queries: Sequence[Query], limit: int | None, *, keep_errors: bool
    ) -> EffectGenerator[dict[Query, PublicVotingResult | Exception]]:
        """Asks all queries together; where a call failed and errors are kept, each alone."""
        try:
            return (yield from self._counted(queries, limit))
        except ModelCallError as error:
            if not keep_errors:
                raise
            if len(queries) == 1:
                return {queries[0]: error}
        found: dict[Query, PublicVotingResult | Exception] = {}
        for query in queries:
            found |= yield from self._found([query], limit, keep_errors=True)
        return found

    def _counted(
        self, queries: Sequence[Query], limit: int | None
    ) -> EffectGenerator[dict[Query, PublicVotingResult | Exception]]:
        prompts = []
        for query in queries:
            render = self._task.wording.renderer(self._task.queries(query))
            prompts += [render.at(slot)(row) for slot, row in enumerate(self._rows)]
        scores = yield LimitConcurrency(self._scorer.request_public_rows(prompts), limit)
        kind = ProbabilitySum() if self._task.votes == "soft" else VoteSum()
        votes = kind.bounded_rows(scores, width=len(self.labels))  # [queries * rows, labels]
        totals = votes.reshape(len(queries), len(self._rows), len(self.labels)).sum(axis=1)
        return dict(zip(queries, map(self._result, totals), strict=True))

    def _result(self, totals: NDArray[np.float64]) -> PublicVotingResult:
        best = int(totals.argmax())
        least = 0.0 if self._abstain_below is None else self._abstain_below * len(self._rows)
        abstained = bool(totals[best] < least or not totals.any())
        scores = dict(zip(self.labels, totals.tolist(), strict=True))
        label = self._abstain_label if abstained else self.labels[best]
        return PublicVotingResult(label=label, abstained=abstained, scores=scores)


def _told(results: Sequence[PublicVotingResult | Exception], *, is_whole: bool) -> list[Any]:
    """Returns the results, or their labels."""
    return [one if is_whole or isinstance(one, Exception) else one.label for one in results]


def _refuse_arguments(kwargs: Mapping[str, Any]) -> None:
    if kwargs:
        raise fail("invoke", "no further arguments", sorted(kwargs))
