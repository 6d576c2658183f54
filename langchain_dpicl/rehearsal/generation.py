"""Rehearses generation: sums of next-token probabilities over rows of public examples, noised for any plan."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, TypeAlias, get_args

import numpy as np
from annotated_types import Interval, Len
from langchain_core.runnables import RunnableConfig
from numpy.random import PCG64, Generator
from numpy.typing import NDArray
from pydantic import ConfigDict

from langchain_dpicl._templates import Template
from langchain_dpicl.backends.base import NextTokenBackend, Token
from langchain_dpicl.backends.resolve import as_backend
from langchain_dpicl.backends.rows.rows import RowSource, restrict
from langchain_dpicl.backends.sync_async import Call, EffectGenerator, LimitConcurrency, TopTokenRequest
from langchain_dpicl.exceptions import ModelCallError
from langchain_dpicl.options import LLM, Count, Decoding, GenerationTask, html_table, option_of
from langchain_dpicl.planning.expected_utility import noise_deviation, occupancy, top_chances
from langchain_dpicl.planning.share_plan import Cost
from langchain_dpicl.privacy._validate import check_choice, check_int, fail
from langchain_dpicl.privacy.extensions.registry import MECHANISMS
from langchain_dpicl.privacy.mechanisms.release_plan import ReleasePlan
from langchain_dpicl.rehearsal.rehearsal import (
    EXACT_KEYS,
    MOST_CALLS,
    ONLY_PUBLIC,
    Origin,
    RehearsalCost,
    SavedRehearsal,
    arehearse_now,
    rehearse_now,
    rests_on,
)
from langchain_dpicl.released.base import FileForm
from langchain_dpicl.runs.release_run import tick
from langchain_dpicl.tasks import (
    GenerationTemplate,
    check_known,
    check_rules,
    distinct_texts,
    generation_wording,
    has_ended,
    read_public,
    refuse_private,
)

if TYPE_CHECKING:
    from langchain_core.documents import Document

Floats = NDArray[np.float64]

GENERATION_SHOTS = (1, 4)
MOST_ROWS = 20
KEPT = 20
"""Largest sums of a step that are kept one by one; of the others their number and total."""
_DEALS = 64
"""Deals after which no new row is looked for."""
_DIGITS = 6
"""Significant digits that are kept."""
_RESAMPLES, _TAIL, _SEED = 400, 0.05, 20_230_930
_INSTRUCTION_TOKENS = 30
_MOST_STEPS, _MOST_OTHERS = 100_000, 10_000_000
_Sum: TypeAlias = Annotated[float, Interval(ge=0.0, le=1e9)]


class TokenPlan(Protocol):
    """What a rehearsal reads of a `GenerationPlan`."""

    @property
    def branches(self) -> tuple[tuple[str | None, ReleasePlan], ...]:
        """Label and release."""

    @property
    def public_sizes(self) -> tuple[int, ...]:
        """Declared units of each branch."""

    @property
    def candidates(self) -> int:
        """Width of the public domain."""


@dataclass(frozen=True, slots=True)
class RehearsedStep:
    """The rows' probabilities of one token, summed over the rows; no token.

    Attributes:
      top: the largest sums, largest first.
      others: further candidates.
      rest: what these have together.
    """

    top: Annotated[tuple[_Sum, ...], Len(1, KEPT)]
    others: Annotated[int, Interval(ge=0, le=_MOST_OTHERS)]
    rest: _Sum

    __pydantic_config__: ClassVar[ConfigDict] = EXACT_KEYS


@dataclass(frozen=True, slots=True)
class RehearsedText:
    """One text that was written without noise, token by token.

    Attributes:
      label: its label; None where examples have none.
      shots: examples of a row as asked for; rows of a label with too few examples show fewer.
      rows: rows that were summed.
      steps: the sums.
    """

    label: str | None
    shots: Count
    rows: Count
    steps: Annotated[tuple[RehearsedStep, ...], Len(1, _MOST_STEPS)]

    __pydantic_config__: ClassVar[ConfigDict] = EXACT_KEYS


@dataclass(frozen=True)
class GenerationRehearsal(SavedRehearsal):
    """How far rows of public examples agree on the next token: sums that any plan's noise can be added to.

    `GenerationPlan.expected` and `compare` take it in place of a guess. Make it with `rehearse_generation`.

    Fidelity is the chance that a noisy token is the one that the same rows give without noise. It says what noise
    destroys, not whether noise-free text is any good. It is measured on sums of probabilities; the mechanisms on logits
    are refused.

    Formal guarantees:
      - A function of public examples, public wording and the model: no private record was read, and epsilon is 0.
      - It may be repeated and looked at freely before a share is declared.

    Attributes:
      model: public name of the model.
      wording: digest of instruction, template and rules of writing.
      origin: "same", "neighbour" or "made_up"; stated by the caller.
      num_examples: public examples.
      candidates: most candidates of a token.
      texts: the sums by text.
      calls: prompts that were asked.
    """

    model: str
    wording: str
    origin: Origin
    num_examples: Count
    candidates: Annotated[int, Interval(ge=2, le=_MOST_OTHERS)]
    texts: tuple[RehearsedText, ...]
    calls: Count

    _FORM: ClassVar[FileForm] = FileForm(
        "generation rehearsal",
        "langchain-dpicl-generation-rehearsal",
        2,
        frozenset({"model", "wording", "origin", "num_examples", "candidates", "texts", "calls"}),
        "texts",
    )

    @property
    def rests_on(self) -> str:
        """What a chance rests on, in words."""
        return rests_on(self.num_examples, self.origin)

    @property
    def labels(self) -> tuple[str | None, ...]:
        """The labels that texts were written for."""
        return tuple(dict.fromkeys(text.label for text in self.texts))

    @property
    def shots(self) -> tuple[int, ...]:
        """The numbers of examples that rows were measured with."""
        return tuple(sorted({text.shots for text in self.texts}))

    # -- numbers -----------------------------------------------------------------------------------------------------

    def shots_for(self, plan: TokenPlan, *, label: str | None = None) -> int:
        """Returns the measured number of shots that is nearest, by its ratio, to that of the plan's rows in use.

        Args:
          plan: a `GenerationPlan`.
          label: of the branch; None: the smallest one.
        """
        sizes = {name: size for (name, _), size in zip(plan.branches, plan.public_sizes, strict=True)}
        smallest = min(sizes, key=lambda name: sizes[name]) if label is None else label
        return next(self._nearest(release, size) for name, release, size in self._branches(plan, smallest))

    def fidelity(self, plan: TokenPlan, *, label: str | None = None) -> float:
        """Returns the chance that the noisy token is the noise-free one, in the mean over the steps.

        The sums are scaled to the plan's expected number of rows. Texts are those of the nearest measured number of
        shots, see `shots_for`. Tokens are the largest of the noisy sum, as the mechanisms take them without a sampling
        temperature of `Decoding`.

        Args:
          plan: a `GenerationPlan` of a mechanism on probabilities.
          label: one label only; None: all labels of the plan.

        Raises:
          ConfigurationError: a mechanism on logits, or a label that was not rehearsed.
        """
        return float(np.mean(np.concatenate(self._chances(plan, label))))

    def run(self, plan: TokenPlan, *, label: str | None = None) -> float:
        """Returns the chance that a text has no other token than the noise-free one, in the mean over the texts.

        It is that of as many tokens as were rehearsed: a longer text has a smaller one.

        Args:
          plan: as of `fidelity`.
          label: as of `fidelity`.
        """
        return float(np.mean([chances.prod() for chances in self._chances(plan, label)]))

    def interval(self, plan: TokenPlan, *, label: str | None = None) -> tuple[float, float]:
        """Returns the 90 % interval of `fidelity`: texts are drawn anew, and the steps of each.

        It is what the choice of examples and steps leaves open, and not how far the private domain is from theirs. One
        text of each label was written: with fewer than four labels it hardly sees how far texts differ, and is too
        narrow.

        Args:
          plan: as of `fidelity`.
          label: as of `fidelity`.
        """
        chances = self._chances(plan, label)
        rng = Generator(PCG64(_SEED))
        drawn = np.empty(_RESAMPLES)
        for place in range(_RESAMPLES):
            texts = [chances[text] for text in rng.integers(len(chances), size=len(chances))]
            drawn[place] = np.mean(np.concatenate([text[rng.integers(len(text), size=len(text))] for text in texts]))
        low, high = np.quantile(drawn, [_TAIL, 1.0 - _TAIL])
        return float(low), float(high)

    def signal_to_noise(self, plan: TokenPlan, *, label: str | None = None) -> float:
        """Returns the lead of the noise-free token over its rival, in deviations of the noise; mean over the steps.

        Args:
          plan: as of `fidelity`.
          label: as of `fidelity`.
        """
        release = plan.branches[0][1]
        leads = [
            (step.top[0] - (step.top[1] if len(step.top) > 1 else 0.0)) * scale
            for text, scale in self._scaled(plan, label)
            for step in text.steps
        ]
        return float(np.mean(leads)) / noise_deviation(release)

    def outlook(self, plan: TokenPlan, *, label: str | None = None) -> dict[str, Any]:
        """Returns all of it as plans show it: the chance of the right token, its interval, and what it rests on.

        Args:
          plan: as of `fidelity`.
          label: as of `fidelity`.
        """
        low, high = self.interval(plan, label=label)
        return {
            "signal_to_noise": self.signal_to_noise(plan, label=label),
            "right_token_prob": self.fidelity(plan, label=label),
            "right_token_low": low,
            "right_token_high": high,
            "run_prob": self.run(plan, label=label),
            "ceiling_prob": 1.0,  # the largest sum is released, whatever it is, where there is no noise
            "measured_shots": self.shots_for(plan, label=label),
            "rests_on": self.rests_on,
        }

    def _branches(self, plan: TokenPlan, label: str | None) -> list[tuple[str | None, ReleasePlan, int]]:
        """Returns (label, release, declared size) of the plan's branches, checked."""
        if plan.branches[0][1].aggregation.needs_public:
            advice = f"Plan with one of {MECHANISMS}, or give a guess."
            raise fail("source", "a plan on sums of probabilities", "logits, which were not measured", advice)
        if label is not None and label not in dict(plan.branches):
            raise fail("label", f"one of {[name for name, _ in plan.branches]}", label)
        found = [
            (name, release, size)
            for (name, release), size in zip(plan.branches, plan.public_sizes, strict=True)
            if label is None or name == label
        ]
        missing = [name for name, _, _ in found if name not in self.labels]
        if missing:
            advice = "Rehearse the labels of the plan."
            raise fail("source", f"a rehearsal of labels {[name for name, _, _ in found]}", list(self.labels), advice)
        return found

    def _nearest(self, release: ReleasePlan, size: int) -> int:
        fill = occupancy(release, size)
        used = max(1.0, fill.shots / max(1.0 - fill.empty, 1e-12))
        return min(self.shots, key=lambda shots: abs(math.log(shots / used)))

    def _scaled(self, plan: TokenPlan, label: str | None) -> Iterator[tuple[RehearsedText, float]]:
        """Yields the texts that stand for the plan, each with the plan's rows for one that was summed."""
        for name, release, size in self._branches(plan, label):
            rows, shots = occupancy(release, size).rows, self._nearest(release, size)
            for text in self.texts:
                if text.label == name and text.shots == shots:
                    yield text, rows / text.rows

    def _chances(self, plan: TokenPlan, label: str | None) -> list[Floats]:
        """Returns for each text float64[steps]: the chance that the noisy token is the noise-free one."""
        scaled = list(self._scaled(plan, label))
        release, wider = plan.branches[0][1], plan.candidates - self.candidates
        out = [np.empty(len(text.steps)) for text, _ in scaled]
        groups: dict[int, list[tuple[int, int, Floats, float]]] = {}
        for place, (text, scale) in enumerate(scaled):
            for at, step in enumerate(text.steps):
                # A plan with more candidates has more of those that hardly any row wants.
                others = max(0, step.others + wider)
                top = np.full(KEPT, -np.inf)
                top[: len(step.top)] = step.top
                groups.setdefault(others, []).append((place, at, top * scale, step.rest * scale))
        for others, group in groups.items():
            sums, rest = np.array([top for _, _, top, _ in group]), np.array([rest for *_, rest in group])
            for (place, at, _, _), chance in zip(
                group, top_chances(release, sums, others=others, rest=rest), strict=True
            ):
                out[place][at] = chance
        return out

    # -- file --------------------------------------------------------------------------------------------------------

    def _is_whole(self) -> bool:
        """Whether every label was rehearsed with the same numbers of shots, and sums are in their order."""
        asked = {(text.label, text.shots) for text in self.texts}
        return (
            bool(asked)
            and len(asked) == len(self.labels) * len(self.shots)
            and all(list(step.top) == sorted(step.top, reverse=True) for text in self.texts for step in text.steps)
        )

    # -- looking -----------------------------------------------------------------------------------------------------

    def rows(self) -> list[dict[str, Any]]:
        """Returns one row per number of shots: texts, tokens, rows of a token, and what its leader has of a row."""
        found = []
        for shots in self.shots:
            texts = [text for text in self.texts if text.shots == shots]
            leads = [step.top[0] / text.rows for text in texts for step in text.steps]
            answered = [(sum(step.top) + step.rest) / text.rows for text in texts for step in text.steps]
            found.append(
                {
                    "shots": shots,
                    "texts": len(texts),
                    "tokens": len(leads),
                    "rows": float(np.mean([text.rows for text in texts])),
                    "leading_share": float(np.mean(leads)),
                    "answered": float(np.mean(answered)),
                }
            )
        return found

    def __repr__(self) -> str:
        return f"GenerationRehearsal({self.rests_on}, model={self.model!r}, shots={self.shots!r}, calls={self.calls})"

    def _repr_html_(self) -> str:
        shown = {
            f"{row['shots']}-shot rows": f"{100 * row['leading_share']:.0f} % for the leader" for row in self.rows()
        }
        return html_table("GenerationRehearsal", {"rests on": self.rests_on, "model": self.model, **shown})


def rehearse_generation(
    llm: LLM,
    public_examples: Sequence[Mapping[str, Any] | Document],
    task: GenerationTask | None = None,
    *,
    instruction: str | None = None,
    text_key: str = "text",
    label_key: str | None = None,
    labels: Sequence[str] | None = None,
    shots: Sequence[int] = GENERATION_SHOTS,
    num_rows: int = MOST_ROWS,
    decoding: Decoding | None = None,
    max_tokens: int = 16,
    max_calls: int = MOST_CALLS,
    origin: Origin = "same",
    progress: bool | None = None,
    config: RunnableConfig | None = None,
) -> GenerationRehearsal:
    """Measures on public examples how far rows agree on the next token; epsilon 0.

    For every label and number of shots it writes a text without noise, as `DemonstrationSynthesizer` writes one: public
    candidates, rows of examples, their sum, its largest entry. The sums are kept, and no token. The rows of a text are
    those of its first token; they are distinct, and share examples where there are few of them.

    Args:
      llm: the model that will read the private records.
      public_examples: dicts or Documents with the text and, under `label_key`, the label. They must be PUBLIC, and not
        taken from the private records.
      task: the wording, as the component will have it.
      instruction: task description of a wording without one.
      text_key: field that is written.
      label_key: field of the label; None: examples have none.
      labels: the labels of the plan; None: those of the examples, sorted.
      shots: numbers of examples of a row.
      num_rows: most rows of a token.
      decoding: candidates and stops, as the component will have them.
      max_tokens: cap of a text.
      max_calls: a rehearsal that could ask more prompts is refused before the first call.
      origin: "same" where the examples are of the private records' domain, "neighbour" for another one like it, or
        "made_up".
      progress: True shows a bar, False hides it, None shows it on a terminal only.
      config: its `max_concurrency` bounds the calls in flight.

    Raises:
      ConfigurationError: `PrivateExamples`, examples that cannot be read, or more calls than `max_calls`.
      CapabilityError: the model cannot write token by token.
      ModelCallError: a public call failed, or no row of a token was answered.
    """
    writing = _Writing.of(
        llm=llm,
        public_examples=public_examples,
        task=task,
        instruction=instruction,
        text_key=text_key,
        label_key=label_key,
        labels=labels,
        shots=shots,
        num_rows=num_rows,
        decoding=decoding,
        max_tokens=max_tokens,
        max_calls=max_calls,
        origin=origin,
    )
    return rehearse_now(writing.walk, writing.most_calls, progress, config)


async def arehearse_generation(
    llm: LLM,
    public_examples: Sequence[Mapping[str, Any] | Document],
    task: GenerationTask | None = None,
    *,
    progress: bool | None = None,
    config: RunnableConfig | None = None,
    **options: Any,
) -> GenerationRehearsal:
    """Async version of `rehearse_generation`.

    Args:
      llm: as of `rehearse_generation`.
      public_examples: as of `rehearse_generation`.
      task: as of `rehearse_generation`.
      progress: as of `rehearse_generation`.
      config: as of `rehearse_generation`.
      options: the other parameters of `rehearse_generation`.
    """
    writing = _Writing.of(llm=llm, public_examples=public_examples, task=task, **options)
    return await arehearse_now(writing.walk, writing.most_calls, progress, config)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class _Draft:
    """One text to write: its prompts are those of its rows."""

    label: str | None
    shots: int
    prompts: tuple[str, ...]
    public: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class _Writing:
    """The texts of one rehearsal."""

    backend: NextTokenBackend
    drafts: tuple[_Draft, ...]
    top_k: int | None
    stop: tuple[str, ...]
    max_tokens: int
    num_examples: int
    wording: str
    origin: Origin

    @classmethod
    def of(
        cls,
        *,
        llm: LLM,
        public_examples: Any,
        task: GenerationTask | None = None,
        instruction: str | None = None,
        text_key: str = "text",
        label_key: str | None = None,
        labels: Sequence[str] | None = None,
        shots: Sequence[int] = GENERATION_SHOTS,
        num_rows: int = MOST_ROWS,
        decoding: Decoding | None = None,
        max_tokens: int = 16,
        max_calls: int = MOST_CALLS,
        origin: Origin = "same",
    ) -> _Writing:
        """Checks everything, and counts the calls, before the first call."""
        refuse_private(public_examples, ONLY_PUBLIC)
        check_choice("origin", origin, get_args(Origin))
        check_int("max_tokens", max_tokens, low=1)
        asked, rules = GenerationTask.of(task, instruction), option_of("decoding", decoding, Decoding)
        if asked.open_label is not None or asked.variation_prompt is not None or asked.hints:
            raise fail("task", "neither open_label nor what is of PrivateEvolution, which are not rehearsed", asked)
        if rules.grammar is not None:
            raise fail("Decoding.grammar", "None: what a grammar forces is not rehearsed", type(rules.grammar))
        if rules.released_words is not None:
            raise fail("Decoding.released_words", "None: words that records release are not rehearsed", "some")
        wording, drafts = _drafts(
            public_examples,
            asked,
            text_key=text_key,
            label_key=label_key,
            labels=labels,
            shots=shots,
            num_rows=num_rows,
        )
        most = _cost(drafts, max_tokens).public_calls
        if most > check_int("max_calls", max_calls, low=1):
            advice = "Give fewer num_rows, shots or max_tokens, or a larger max_calls= (--max-calls)."
            raise fail("max_calls", f"at least the {most:,} calls that this rehearsal may need", max_calls, advice)
        backend = as_backend(llm)
        top_k, stop = check_rules(backend, rules)
        digest = _digest(wording, top_k, stop)
        return cls(backend, drafts, top_k, stop, max_tokens, len(public_examples), digest, origin)

    @property
    def most_calls(self) -> int:
        """Prompts if every text is as long as it may be."""
        return _cost(self.drafts, self.max_tokens).public_calls

    @property
    def width(self) -> int:
        """Most candidates of a token."""
        return len(self.backend.vocabulary()) if self.top_k is None else self.top_k + 1

    def walk(self, limit: int | None, bar: Any) -> EffectGenerator[GenerationRehearsal]:
        """Writes everything (an effect generator)."""
        texts = []
        for draft in self.drafts:
            steps = yield from self._write(draft, limit, bar)
            texts.append(RehearsedText(draft.label, draft.shots, len(draft.prompts), tuple(steps)))
        return GenerationRehearsal(
            model=self.backend.name,
            wording=self.wording,
            origin=self.origin,
            num_examples=self.num_examples,
            candidates=self.width,
            texts=tuple(texts),
            calls=sum(len(text.steps) * (1 + text.rows) for text in texts),
        )

    def _write(self, draft: _Draft, limit: int | None, bar: Any) -> EffectGenerator[list[RehearsedStep]]:
        """Writes one text without noise and returns its sums (an effect generator)."""
        # Only sessions score given candidates; what they keep silent about is public here, and harms nobody.
        source = RowSource(self.backend, draft.prompts, [])
        steps: list[RehearsedStep] = []
        tokens: list[Token] = []
        try:
            while len(tokens) < self.max_tokens and not (tokens and has_ended(self.backend, tokens, self.stop)):
                top_k = self.top_k or len(self.backend.vocabulary())
                pairs = yield TopTokenRequest(self.backend, draft.public, tuple(tokens), top_k)
                domain = self._candidates([token for token, _ in pairs], tokens)
                asked = Call(partial(source.score, domain), partial(source.ascore, domain))
                boxed = yield LimitConcurrency(asked, limit)
                sums = restrict(boxed.take()).sum(axis=0)
                for _ in range(1 + len(draft.prompts)):
                    tick(bar)
                if not sums.any():
                    raise ModelCallError("rehearsal: expected rows of next-token probabilities, found that all failed.")
                steps.append(_step(sums))
                tokens.append(domain[int(np.argmax(sums))])
                source.push(tokens[-1])
        finally:
            source.close()
        return steps

    def _candidates(self, likeliest: Sequence[Token], written: Sequence[Token]) -> tuple[Token, ...]:
        """Returns the public candidates as `DecodingSpec.domain` does: the end is one behind other than blanks."""
        others = [token for token in likeliest if token != self.backend.eos]
        is_blank = not self.backend.decode(written).strip()
        return tuple(others) if others and is_blank else (*others, self.backend.eos)


def generation_rehearsal_cost(
    public_examples: Sequence[Mapping[str, Any] | Document],
    *,
    text_key: str = "text",
    label_key: str | None = None,
    labels: Sequence[str] | None = None,
    max_tokens: int = 16,
    record_tokens: int = 60,
) -> RehearsalCost:
    """Returns the calls and tokens of `rehearse_generation` with its usual rows; refuses what it would refuse.

    Args:
      public_examples: as of `rehearse_generation`.
      text_key: as of `rehearse_generation`.
      label_key: as of `rehearse_generation`.
      labels: as of `rehearse_generation`.
      max_tokens: as of `rehearse_generation`.
      record_tokens: cap of an example.
    """
    keys: dict[str, Any] = {"text_key": text_key, "label_key": label_key, "labels": labels}
    _, drafts = _drafts(public_examples, GenerationTask.of(None, None), **keys)
    # Every text may end after its first token.
    least, most = (_cost(drafts, tokens, record_tokens=record_tokens) for tokens in (1, max_tokens))
    return RehearsalCost(least, most)


def _cost(drafts: Sequence[_Draft], max_tokens: int, *, record_tokens: int = 60) -> Cost:
    calls = max_tokens * sum(1 + len(draft.prompts) for draft in drafts)
    shown = max_tokens * sum(len(draft.prompts) * draft.shots for draft in drafts)
    # A prompt holds half of a text's tokens on average.
    return Cost(0, calls, calls * (_INSTRUCTION_TOKENS + max_tokens // 2) + shown * record_tokens, calls)


def _drafts(
    public_examples: Any,
    task: GenerationTask,
    *,
    text_key: str,
    label_key: str | None,
    labels: Sequence[str] | None,
    shots: Sequence[int] = GENERATION_SHOTS,
    num_rows: int = MOST_ROWS,
) -> tuple[GenerationTemplate, tuple[_Draft, ...]]:
    """Returns the wording and the texts to write; asks no model."""
    given = sorted({check_int("shots", one, low=1) for one in shots})
    if not given:
        raise fail("shots", "at least one number", 0)
    names = _shown(task, text_key, label_key)
    wording = generation_wording(text_key, label_key, names, task.instruction, task.record_prompt)
    pools = _pools(read_public(public_examples, names, text_key=text_key, label_key=label_key), label_key, labels)
    check_int("num_rows", num_rows, low=2)
    drafts = tuple(
        _draft(wording, label, pools[label], one, _deal(len(pools[label]), one, num_rows, (place, one)))
        for one in given
        for place, label in enumerate(pools)
    )
    return wording, drafts


def _shown(task: GenerationTask, text_key: str, label_key: str | None) -> tuple[str, ...]:
    """Returns the fields that prompts show."""
    for name, key in (("text_key", text_key), ("label_key", label_key)):
        if (not isinstance(key, str) or not key) and (key is not None or name == "text_key"):
            raise fail(name, "the name of a field", type(key))
    own = (text_key,) if label_key is None else (label_key, text_key)
    prompt = task.record_prompt
    return own if prompt is None else tuple(dict.fromkeys((*own, *Template.of("record_prompt", prompt).names)))


def _pools(
    records: Sequence[Mapping[str, str]], label_key: str | None, labels: Sequence[str] | None
) -> dict[str | None, list[Mapping[str, str]]]:
    """Returns the examples by label, at least two of each."""
    pools: dict[str | None, list[Mapping[str, str]]] = {None: list(records)}
    if label_key is not None:
        found = [record[label_key] for record in records]
        known = distinct_texts("labels", sorted(set(found)) if labels is None else labels, least=1)
        check_known(found, known, key=label_key)
        pools = {label: [record for record in records if record[label_key] == label] for label in known}
    elif labels is not None:
        raise fail("labels", "None without label_key", labels)
    for label, pool in pools.items():
        if len(pool) < 2:
            of_label = "" if label is None else f" of label {label!r}"
            raise fail("public_examples", f"at least two examples{of_label}", len(pool))
    return pools


def _draft(
    wording: GenerationTemplate,
    label: str | None,
    pool: Sequence[Mapping[str, str]],
    shots: int,
    rows: Sequence[Sequence[int]],
) -> _Draft:
    known = {} if label is None or wording.label_key is None else {wording.label_key: label}
    render = wording.renderer(wording.text_key, known)
    return _Draft(label, shots, tuple(render([pool[place] for place in row]) for row in rows), render(()))


def _deal(count: int, shots: int, most: int, key: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns up to `most` distinct rows of places among `count` examples, which are used about equally often."""
    rng = Generator(PCG64([_SEED, *key]))
    size = min(shots, count - 1)
    rows: dict[frozenset[int], tuple[int, ...]] = {}
    for _ in range(_DEALS):
        order = rng.permutation(count).tolist()
        for first in range(0, count - size + 1, size):
            row = tuple(order[first : first + size])
            rows.setdefault(frozenset(row), row)
            if len(rows) == most:
                return list(rows.values())
    return list(rows.values())


def _step(sums: Floats) -> RehearsedStep:
    """Returns what is kept of float64[d] sums."""
    ordered = -np.sort(-sums)
    top = tuple(_rounded(value) for value in ordered[:KEPT])
    return RehearsedStep(top, max(0, len(ordered) - KEPT), _rounded(ordered[KEPT:].sum()))


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _digest(wording: GenerationTemplate, top_k: int | None, stop: Sequence[str]) -> str:
    """Returns the digest of what a prompt says besides its examples, and of the rules of writing."""
    shown = {
        "instruction": wording.instruction,
        "record_prompt": wording.template,
        "text_key": wording.text_key,
        "label_key": wording.label_key,
        "public_top_k": top_k,
        "stop": list(stop),
    }
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()
