"""Baselines for comparison: instruction only and votes of public examples (epsilon 0); others without privacy."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

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
from langchain_dpicl.backends.resolve import as_backend
from langchain_dpicl.backends.rows.gradient_rows import GradientRequest
from langchain_dpicl.backends.sync_async import Effect, EffectGenerator, run_sync
from langchain_dpicl.backends.tuning.tasks import PromptTask
from langchain_dpicl.exceptions import ConfigurationError, ModelCallError
from langchain_dpicl.generation.decoding_loop import (
    BlockTickets,
    DecodingSpec,
    PartialText,
    TextDecoder,
    make_script,
    write_draft,
)
from langchain_dpicl.generation.plan import Segment
from langchain_dpicl.generation.token_mechanisms import release_plan
from langchain_dpicl.options import FewShotTask, LabelAnswers, Rows, SoftPromptConfig, TrainableModel, Training
from langchain_dpicl.options.base import LLM, TemplateLike, Where, option_of
from langchain_dpicl.options.rows import Noise
from langchain_dpicl.options.tasks import Decoding, GenerationTask
from langchain_dpicl.planning.expected_utility import RowDesign
from langchain_dpicl.privacy._validate import check_int, fail
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.privacy.mechanisms.noise import GumbelMechanism
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.privacy.mechanisms.release_plan import ReleasePlan
from langchain_dpicl.privacy.mechanisms.vote_sums import ProbabilitySum, VoteSum
from langchain_dpicl.public_voting import PublicVotingResult, PublicVotingRunnable
from langchain_dpicl.release.curator import Render, pool_without_privacy
from langchain_dpicl.release.sample import NOT_COMPUTED, Record, Rendered, check_one_wording, draw_sample, sum_rows
from langchain_dpicl.release.token_block import ReleaseBlock, argmax_index, block_on
from langchain_dpicl.released.demonstrations import ReleasedDemonstrations
from langchain_dpicl.released.soft_prompt import SoftPrompt
from langchain_dpicl.runs.query_plan import declared_design, design_of_queries
from langchain_dpicl.soft_prompts.engines import engine_of
from langchain_dpicl.soft_prompts.options import (
    ExampleFields,
    FieldNames,
    Floats,
    Optimizer,
    given_fields,
)
from langchain_dpicl.tasks.labels import VotingTask, choice_engine, reader_of
from langchain_dpicl.tasks.writing import check_rules, check_texts, generation_wording

BASELINE = "soft prompt without privacy"


def soft_prompt_without_privacy(
    records: Iterable[Mapping[str, str]],
    *,
    llm: TrainableModel | HuggingFaceBackend | GradientBackend | Where,
    training: Training,
    task: PromptTask | None = None,
    prompt: SoftPromptConfig | None = None,
    fields: FieldNames | None = None,
    told: Callable[[int, Floats], object] | None = None,
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
      told: called with the number of each step and the weights after it.

    Raises:
      ConfigurationError: private examples, records that cannot be read, or a parameter out of range.
      ModelCallError: the model failed.

    Source: Duan et al. (2023), Flocks of Stochastic Parrots, without its clips and noise.
    """
    if not isinstance(training, Training):
        raise fail("training", "Training(...)", type(training).__name__)
    if training.validation is not None:
        raise fail("training", "no validation", "public records", "Give told=... to look at the weights of each step.")
    named = ExampleFields(**{"text": "text", "target": "label", **given_fields(fields)})
    engine = engine_of(llm, task=task, prompt=prompt)
    examples = named.examples_in("records", records, labels=engine.task.labels)
    size = training.expected_batch_size
    steps = training.steps or math.ceil((training.epochs or 0.0) * -(-len(examples) // size))
    rule = Optimizer(training.optimizer, training.learning_rate, training.schedule, steps)
    state = rule.start(engine.initial(None if prompt is None else prompt.init_text))
    for batch in _batches(examples, size, steps):
        state = rule.update(state, mean_gradient(engine, state.weights, batch))
        if told is not None:
            told(state.step, state.weights)
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
            draft: PartialText, length: int, _: Any, name: str, known: dict[str, str], plan: Any = plan
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
    answers = option_of("answers", answers, LabelAnswers)
    voting = VotingTask.of(private, FewShotTask.of(task, example_prompt, suffix, prefix), answers)
    size = private.public_size_of(None)
    wordings = voting.wording.num_wordings
    shape = design_of_queries(rows, size) or declared_design(row_hint_of(choice_engine(llm, voting)), size)
    shape.check_wordings(wordings)
    plan = _voting_plan(shape, size, is_soft=voting.votes == "soft")
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


def _voting_plan(design: RowDesign, public_size: int, *, is_soft: bool) -> ReleasePlan:
    """Returns how rows are drawn and added up; the mechanism, which a plan must have, is never run."""
    return ReleasePlan(
        sampler=design.sampler(public_size),
        aggregation=ProbabilitySum() if is_soft else VoteSum(),
        mechanism=GumbelMechanism(1.0),
        adjacency="add_remove",
    )


def _write_publicly(script: DecodingSpec, draft: PartialText) -> EffectGenerator[None]:
    """Writes one demonstration from the public distribution alone."""
    known = script.known(draft)
    prompt = script.wording.renderer(script.wording.text_key, known)(())
    top_k = script.public_top_k or len(script.backend.vocabulary())
    tokens: list[Token] = []
    while len(tokens) < script.segments[0].max_tokens and not script.ended(tokens):
        pairs = yield from script.public_distribution(prompt, tokens, top_k=top_k)
        tokens.append(pairs[0][script.decoder.choose(pairs[1])])
    draft.values[script.wording.text_key] = script.text(tokens)
    draft.done = True


def _result(
    script: DecodingSpec, drafts: Sequence[PartialText], *, baseline: str, epsilon: float
) -> ReleasedDemonstrations:
    names = sorted(script.wording.generated_fields)
    examples = [{name: script.known(draft)[name] for name in names} for draft in drafts]
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
