"""Baselines for comparison: instruction only and votes of public examples (epsilon 0); others without a guarantee.

Epsilon is 0 because no private record is read. That holds only if the examples are public: their publication harms
nobody. Examples written by hand, of published data sets, or of people who agreed are public. A sample of one's
customers' records is NOT: it belongs in `PrivateExamples`, and its votes in `DPVotingRunnable`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypeVar, cast

import numpy as np
from langchain_core.documents import Document
from langchain_core.runnables import RunnableConfig
from numpy.random import PCG64
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, create_model
from typing_extensions import override

from langchain_dpicl._construction import tells_how_to_build
from langchain_dpicl._opaque import run_guarded
from langchain_dpicl.backends.base import (
    GradientBackend,
    NextTokenBackend,
    RealRows,
    Token,
    TrainingExample,
    row_hint_of,
)
from langchain_dpicl.backends.hf.backend import HuggingFaceBackend
from langchain_dpicl.backends.resolve import as_backend, as_model
from langchain_dpicl.backends.rows.gradient_rows import GradientRequest
from langchain_dpicl.backends.rows.label_rows import LabelRows
from langchain_dpicl.backends.sync_async import (
    Effect,
    EffectGenerator,
    LimitConcurrency,
    TopTokenRequest,
    awaitable,
    run_sync,
)
from langchain_dpicl.backends.tuning.tasks import PromptTask
from langchain_dpicl.exceptions import ConfigurationError, ModelCallError
from langchain_dpicl.generation.decoding_loop import (
    BlockTickets,
    DecodingSpec,
    PartialText,
    TextDecoder,
    check_room,
    make_script,
    write_draft,
)
from langchain_dpicl.generation.plan import Segment, release_plan
from langchain_dpicl.options import (
    LLM,
    Decoding,
    FewShotTask,
    GenerationTask,
    LabelAnswers,
    Noise,
    QueryInput,
    Rows,
    SoftPromptConfig,
    TemplateLike,
    TrainableModel,
    Training,
    Where,
    option_of,
    refuse_unused,
)
from langchain_dpicl.planning.expected_utility import RowDesign
from langchain_dpicl.planning.share_plan import Cost, check_counts
from langchain_dpicl.privacy._validate import calls_at_once, check_int, fail
from langchain_dpicl.privacy.mechanisms.bounded import ProbabilitySum, VoteSum
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.privacy.mechanisms.release_plan import GumbelMechanism, ReleasePlan
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.release.curator import (
    NOT_COMPUTED,
    Record,
    Render,
    Rendered,
    check_one_wording,
    draw_sample,
    pool_without_privacy,
    sum_rows,
)
from langchain_dpicl.release.token_block import ReleaseBlock, argmax_index, block_on
from langchain_dpicl.released.base import listed
from langchain_dpicl.released.demonstrations import ReleasedDemonstrations
from langchain_dpicl.released.soft_prompt import SoftPrompt
from langchain_dpicl.runs.query_plan import declared_design, design_of_queries
from langchain_dpicl.serving import PublicRunnable
from langchain_dpicl.soft_prompts.plan import ExampleFields, FieldNames, Floats, Optimizer, engine_of, given_fields
from langchain_dpicl.tasks import (
    PublicRecords,
    Query,
    VotingTask,
    abstention_of,
    check_other_label,
    check_rules,
    check_texts,
    choice_engine,
    generation_wording,
    reader_of,
)

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
class PublicVotingRunnable(PublicRunnable[QueryInput, str]):
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
        below = abstention_of(answers, voting.labels)
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
        [result] = self._batch_with_config(self._answered, self._checked([query], config, {}), config, is_whole=True)
        return cast("PublicVotingResult", result)

    async def avote(self, query: QueryInput, config: RunnableConfig | None = None) -> PublicVotingResult:
        """Async version of `vote`."""
        [result] = await self._abatch_with_config(
            self._aanswered, self._checked([query], config, {}), config, is_whole=True
        )
        return cast("PublicVotingResult", result)

    def __repr__(self) -> str:
        shape = f"num_rows={len(self._rows)}, shots_per_row={len(self._rows[0])}"
        return f"{type(self).__name__}(labels={self.labels!r}, num_examples={self._num_examples}, {shape})"

    # -- inside ----------------------------------------------------------------------------------------------------

    def _check_arguments(self, arguments: Mapping[str, Any]) -> None:
        if arguments:
            raise fail("invoke", "no further arguments", sorted(arguments))

    def _walk(
        self,
        inputs: Sequence[QueryInput],
        configs: Sequence[RunnableConfig],
        *,
        keep_errors: bool = False,
        is_whole: bool = False,
    ) -> EffectGenerator[list[Any]]:
        """Returns the label of each input, or the whole result, or what is wrong with it (an effect generator)."""
        limit = calls_at_once(configs[0])
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
        results = [query if isinstance(query, Exception) else found[query] for query in queries]
        return [one if is_whole or isinstance(one, Exception) else one.label for one in results]

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


BASELINE = "soft prompt without privacy"


def soft_prompt_without_privacy(
    records: Iterable[Mapping[str, str]],
    *,
    llm: TrainableModel | HuggingFaceBackend | GradientBackend | Where,
    training: Training,
    task: PromptTask | None = None,
    prompt: SoftPromptConfig | None = None,
    fields: FieldNames | None = None,
) -> SoftPrompt:
    """Trains the prompt WITHOUT clipping and WITHOUT noise: nothing is protected and epsilon is infinite.

    Every epoch deals the records anew into batches; a step follows the mean gradient of its batch.

    Args:
      records: records that no ledger protects; `PrivateExamples` are refused.
      llm: as of `PromptDPSGD.from_private_examples`.
      training: as there; `expected_batch_size` is the size of every batch but an epoch's last one, nothing is clipped,
        and `validation` is not taken.
      task: template and answers; None: the usual template of the model's kind, for writing texts.
      prompt: as of `PromptDPSGD.from_private_examples`.
      fields: the records' fields that hold the text, the target and the second text (pair); by default "text" and
        "label".

    Raises:
      ConfigurationError: private examples, records that cannot be read, or a parameter out of range.
      ModelCallError: the model failed.

    Source: Duan et al. (2023), Flocks of Stochastic Parrots, without its clips and noise.
    """
    if not isinstance(training, Training):
        raise fail("training", "Training(...)", type(training).__name__)
    if training.validation is not None:
        raise fail("training", "no validation", "public records", "Leave it out.")
    named = ExampleFields(**{"text": "text", "target": "label", **given_fields(fields)})
    engine = engine_of(llm, task=task, prompt=prompt)
    examples = named.examples_in("records", records, labels=engine.task.labels)
    size = training.expected_batch_size
    steps = training.steps or math.ceil((training.epochs or 0.0) * -(-len(examples) // size))
    rule = Optimizer(training.optimizer, training.learning_rate, training.schedule, steps)
    state = rule.start(engine.initial(None if prompt is None else prompt.init_text))
    for batch in _batches(examples, size, steps):
        state = rule.update(state, mean_gradient(engine, state.weights, batch))
    report = {
        "private": False,
        "epsilon": "infinity",
        "delta": 0.0,
        "baseline": BASELINE,
        "plan": {"steps": steps, "batch_size": size, "optimizer": rule.to_dict(), **named.to_dict()},
    }
    return SoftPrompt.of(engine, state.weights, report=report)


def mean_gradient(engine: GradientBackend, weights: Floats, examples: Sequence[TrainingExample]) -> Floats:
    """Returns float64[width]: the mean gradient of examples that nothing protects."""
    total = _UnclippedSum(engine.width)
    asked: _UnclippedSum = GradientRequest(engine, weights, [(example,) for example in examples], total).run().take()
    return asked.value / len(examples)


class _UnclippedSum:
    """Adds rows as they are: nothing is clipped."""

    def __init__(self, width: int) -> None:
        self.value: Floats = np.zeros(width)

    def add(self, rows: RealRows) -> None:
        self.value += np.asarray(rows, dtype=np.float64).sum(axis=0)

    def clear(self) -> None:
        self.value[:] = 0.0


def _batches(examples: Sequence[TrainingExample], size: int, count: int) -> Iterator[list[TrainingExample]]:
    """Yields `count` batches: epoch after epoch, each dealt anew."""
    made = 0
    while True:
        order = SYSTEM_RANDOM.permutation(len(examples))
        for start in range(0, len(order), size):
            if made == count:
                return
            made += 1
            yield [examples[int(place)] for place in order[start : start + size]]


T = TypeVar("T")


def release_once_without_privacy(
    private: PrivateExamples,
    *,
    plan: ReleasePlan,
    rows: Callable[[Rendered[T]], Effect],
    render: Callable[[Sequence[Record]], T],
    width: int,
) -> EffectGenerator[NDArray[np.float64]]:
    """Returns the exact sum float64[d] of one sample; the pool is refused if a ledger protects it."""
    check_one_wording(render, plan.sampler)
    pool = pool_without_privacy(private, None)
    ask = run_guarded(lambda: rows(draw_sample(pool, plan)(render)))
    if ask is None:
        raise ModelCallError(NOT_COMPUTED)
    boxed = yield ask
    return sum_rows(boxed, plan, width).value


@contextlib.contextmanager
def open_block_without_privacy(
    private: PrivateExamples,
    *,
    label: str | None,
    plan: ReleasePlan,
    length: int,
    backend: NextTokenBackend,
    render: Render,
    prefix: Sequence[Token] = (),
) -> Iterator[ReleaseBlock]:
    """Opens a token block that releases the exact argmax; the pool is refused if a ledger protects it."""
    pool = pool_without_privacy(private, label)
    block = block_on(pool, plan, render, prefix=prefix, backend=backend, length=length)
    block.release = argmax_index
    with contextlib.closing(block):
        yield block


def demonstrations_from_instruction(
    *,
    llm: LLM,
    text_key: str = "text",
    label_key: str | None = None,
    labels: Sequence[str] | None = None,
    instruction: str | None = None,
    task: GenerationTask | None = None,
    shots_per_label: int = 1,
    max_tokens: int = 60,
    decoding: Decoding | None = None,
) -> ReleasedDemonstrations:
    """Writes demonstrations from the public instruction alone; no private record is involved, so epsilon is 0.

    Args:
      llm: engine or LangChain model with token log-probabilities.
      text_key: field that is generated.
      label_key: field of the label; None without labels.
      labels: public labels.
      instruction: public task description.
      task: a `GenerationTask`, for the instruction and the template of a record.
      shots_per_label: demonstrations per label.
      max_tokens: cap of a text, in tokens.
      decoding: a `Decoding` without a grammar; its temperature is 1 by default, and `top_k=1` takes the likeliest.

    Raises:
      ConfigurationError: a parameter is out of range.
      ModelCallError: the model call failed.
    """
    check_int("shots_per_label", shots_per_label, low=1)
    if (label_key is None) != (labels is None):
        raise fail("label_key, labels", "both or neither", (label_key, labels))
    fields = (text_key,) if label_key is None else (text_key, label_key)
    given, writing = GenerationTask.of(task, instruction), option_of("decoding", decoding, Decoding)
    if given != GenerationTask(given.instruction, given.record_prompt) or (
        writing.grammar is not None or writing.released_words is not None
    ):
        expected = "no open label, variation_prompt, hints, grammar or released_words"
        raise fail("task, decoding", expected, "one of them")
    wording = generation_wording(text_key, label_key, fields, given.instruction, given.record_prompt)
    backend = as_backend(llm)
    rules = check_rules(backend, writing)
    decoder = TextDecoder(writing.temperature or 1.0, writing.top_k, writing.top_p)
    script = DecodingSpec(backend, wording, (Segment("text", max_tokens),), *rules, decoder)
    branches: list[str | None] = list(check_texts("labels", labels)) if labels is not None else [None]
    check_room(script, branches)
    drafts = [PartialText(label) for _ in range(shots_per_label) for label in branches]
    for draft in drafts:
        run_sync(_write_publicly(script, draft))
    return _result(script, drafts, baseline="instruction only", epsilon=0.0)


def demonstrations_without_privacy(
    private: PrivateExamples,
    *,
    llm: LLM,
    instruction: str | None = None,
    task: GenerationTask | None = None,
    shots_per_label: int = 1,
    max_tokens: int = 60,
    rows: Rows | None = None,
    decoding: Decoding | None = None,
) -> ReleasedDemonstrations:
    """Runs Algorithm 1 of Tang et al. (2023) WITHOUT NOISE: nothing is protected and epsilon is infinite.

    Args:
      private: examples that no ledger protects; unfit for one afterwards.
      llm: this and what follows are as for `DemonstrationSynthesizer.from_private_examples`.
      instruction: public task description.
      task: a `GenerationTask`.
      shots_per_label: demonstrations per label.
      max_tokens: cap of a text, in tokens.
      rows: a `Rows`; None: 40 unit rows per token.
      decoding: a `Decoding`.

    Raises:
      PrivateAccessError: the examples are attached to a ledger.
      ConfigurationError: a parameter is out of range.

    Source: Tang et al. (2023), Algorithm 1, without its noise.
    """
    wording = GenerationTask.of(task, instruction)
    shape, writing = option_of("rows", rows, Rows), option_of("decoding", decoding, Decoding)
    script = make_script(private, as_backend(llm), task=wording, max_tokens=max_tokens, noise=Noise(), decoding=writing)
    sizes = [private.public_size_of(label) for label in private.labels or (None,)]
    design = RowDesign.of(shape, smallest_size=min(sizes)) or RowDesign.choose(smallest_size=min(sizes))
    caps = [segment.max_tokens for segment in script.segments]
    redraw_every = max(caps) if shape.redraw_every == "run" else shape.redraw_every or 1
    drafts = [PartialText(label) for _ in range(shots_per_label) for label in (private.labels or (None,))]
    for draft in drafts:
        sampler = design.sampler(private.public_size_of(draft.label))
        plan = release_plan(sampler, redraw_every=redraw_every)

        def opener(
            draft: PartialText, length: int, name: str, known: dict[str, str], plan: Any = plan
        ) -> AbstractContextManager[ReleaseBlock]:
            return open_block_without_privacy(
                private,
                label=draft.label,
                plan=plan,
                length=length,
                backend=script.backend,
                render=script.wording.renderer(name, known),
                prefix=tuple(draft.tokens),
            )

        draft.tickets = {
            number: [BlockTickets(length, count) for length, count in plan.blocks(cap)]
            for number, cap in enumerate(caps)
        }
        run_sync(write_draft(script, draft, opener, lambda: None))
    return _result(script, drafts, baseline="generation without noise", epsilon=float("inf"))


def real_demonstrations_without_privacy(
    private: PrivateExamples, *, shots_per_label: int = 1
) -> ReleasedDemonstrations:
    """Returns REAL private records as demonstrations: nothing is protected and epsilon is infinite.

    Args:
      private: examples that no ledger protects; unfit for one afterwards.
      shots_per_label: records per label.

    Raises:
      PrivateAccessError: the examples are attached to a ledger.
      ConfigurationError: fewer records than asked for.
    """
    if not isinstance(private, PrivateExamples):
        raise fail("private", "PrivateExamples", type(private).__name__)
    check_int("shots_per_label", shots_per_label, low=1)
    shown = [name for name in (private.text_key, private.label_key) if name is not None]
    examples: list[dict[str, str]] = []
    columns = []
    for label in private.labels or (None,):
        pool = pool_without_privacy(private, label)
        order = SYSTEM_RANDOM.permutation(pool.num_units)
        records = [record for unit in order for record in pool.records(int(unit))][:shots_per_label]
        if len(records) < shots_per_label:
            raise ConfigurationError("shots_per_label: expected no more than every label has, found too many.")
        columns.append([{name: record[name] for name in shown} for record in records])
    for shot in range(shots_per_label):
        examples += [column[shot] for column in columns]
    return _released_baseline(
        examples,
        baseline="real private records",
        epsilon=float("inf"),
        plan={"shots_per_label": shots_per_label, "label_key": private.label_key},
    )


@dataclass(frozen=True, slots=True)
class UnprotectedVotes:
    """Votes of private rows WITHOUT NOISE: nothing is protected and epsilon is infinite.

    Attributes:
      labels: the answers, in the order that breaks ties.
      totals: float64[queries, labels] votes, or sums of label probabilities.
      plan: the public parameters.
    """

    labels: tuple[str, ...]
    totals: NDArray[np.float64] = field(repr=False)
    plan: Mapping[str, Any]

    @property
    def answers(self) -> tuple[str, ...]:
        """The label with the most votes per query; the first of equals."""
        return tuple(self.labels[place] for place in self.totals.argmax(axis=1))

    @property
    def epsilon(self) -> float:
        """Infinity."""
        return float("inf")


def label_votes_without_privacy(
    private: PrivateExamples,
    queries: Sequence[Any],
    *,
    llm: LLM,
    example_prompt: TemplateLike | None = None,
    suffix: TemplateLike | None = None,
    prefix: TemplateLike = "",
    task: FewShotTask | None = None,
    rows: Rows | None = None,
    answers: LabelAnswers | None = None,
) -> UnprotectedVotes:
    """Runs what `DPVotingRunnable` runs WITHOUT NOISE: nothing is protected and epsilon is infinite.

    Args:
      private: examples that no ledger protects; unfit for one afterwards.
      queries: what is asked, each on a fresh sample.
      llm: an engine or a model; it SEES the private prompts.
      example_prompt: this and what follows are as for `DPVotingRunnable.from_private_examples`.
      suffix: template of the query.
      prefix: template before the examples.
      task: a `FewShotTask` in place of the three templates.
      rows: a `Rows`; None: the shape that the engine declares, as for private votes.
      answers: a `LabelAnswers`, for how votes are read.

    Raises:
      PrivateAccessError: the examples are attached to a ledger.
      ConfigurationError: a parameter is out of range.
      CapabilityError: the model cannot choose among labels.

    Source: Panda et al. (2023), Differentially Private In-Context Learning, without its noise.
    """
    if not isinstance(private, PrivateExamples):
        raise fail("private", "PrivateExamples", type(private).__name__)
    queries = listed("queries", queries)
    answers = option_of("answers", answers, LabelAnswers)
    voting = VotingTask.of(private, FewShotTask.of(task, example_prompt, suffix, prefix), answers)
    size = private.public_size_of(None)
    wordings = voting.wording.num_wordings
    usual = declared_design(row_hint_of(choice_engine(llm, voting)), size)
    shape = design_of_queries(rows, size, usual=usual) or usual
    shape.check_wordings(wordings)
    plan = ReleasePlan(
        sampler=shape.sampler(size),
        aggregation=ProbabilitySum() if voting.votes == "soft" else VoteSum(),
        mechanism=GumbelMechanism(1.0),  # a plan must have one; it is never run
        adjacency="add_remove",
    )
    voting, scorer, reads = reader_of(llm, voting, is_wanted=answers.calibrate)
    asked = [voting.queries(voting.wording.query(query)) for query in queries]
    totals = [
        run_sync(
            release_once_without_privacy(
                private,
                plan=plan,
                rows=scorer.ask,
                render=voting.wording.renderer(asked_query),
                width=len(voting.labels),
            )
        )
        for asked_query in asked
    ]
    public = {"baseline": "votes without noise", **voting.to_dict(), **reads}
    sampling = {"sampler": plan.sampler.to_dict(), "aggregation": plan.aggregation.to_dict()}
    return UnprotectedVotes(
        labels=voting.labels,
        totals=np.array(totals, dtype=np.float64).reshape(len(asked), len(voting.labels)),
        plan={"private": False, "epsilon": "infinity", "delta": 0.0, **public, **sampling},
    )


def _write_publicly(script: DecodingSpec, draft: PartialText) -> EffectGenerator[None]:
    """Writes one demonstration from the public distribution alone."""
    known = script.known(draft)
    prompt = script.wording.renderer(script.wording.text_key, known)(())
    top_k = script.public_top_k or len(script.backend.vocabulary())
    tokens: list[Token] = []
    while len(tokens) < script.segments[0].max_tokens and not script.ended(tokens):
        pairs = yield TopTokenRequest(script.backend, prompt, tuple(tokens), top_k)
        place = script.decoder.choose(np.array([chance for _, chance in pairs]))
        tokens.append(pairs[place][0])
    if text := script.text(tokens):  # a blank one is left out, as in private runs
        draft.values[script.wording.text_key] = text
    draft.done = True


def _result(
    script: DecodingSpec, drafts: Sequence[PartialText], *, baseline: str, epsilon: float
) -> ReleasedDemonstrations:
    names = sorted(script.wording.generated_fields)
    written = [draft for draft in drafts if script.wording.text_key in draft.values]
    examples = [{name: script.known(draft)[name] for name in names} for draft in written]
    return _released_baseline(examples, baseline=baseline, epsilon=epsilon, plan=script.to_dict())


def _released_baseline(
    examples: Sequence[dict[str, str]], *, baseline: str, epsilon: float, plan: dict[str, Any]
) -> ReleasedDemonstrations:
    shown: float | str = epsilon if epsilon == 0 else "infinity"
    report = {"private": epsilon == 0, "epsilon": shown, "delta": 0.0, "baseline": baseline}
    return ReleasedDemonstrations(examples=tuple(examples), report=report, plan=plan)


__all__ = [
    "PublicVotingResult",
    "PublicVotingRunnable",
    "UnprotectedVotes",
    "demonstrations_from_instruction",
    "demonstrations_without_privacy",
    "label_votes_without_privacy",
    "real_demonstrations_without_privacy",
    "soft_prompt_without_privacy",
]
