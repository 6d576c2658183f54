"""Asks the model, in public, for first candidates and for variations of survivors, here or on workers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import merge_configs

from langchain_dpicl._templates import Template
from langchain_dpicl.backends import PrivateProcess
from langchain_dpicl.backends.sync_async import Effect, EffectGenerator
from langchain_dpicl.distributed.executor import Executor, JobResult, Workplace, iterate_in_threads
from langchain_dpicl.distributed.ray import as_executor
from langchain_dpicl.exceptions import ConfigurationError, ModelCallError
from langchain_dpicl.free_form.answers import NO_STREAM, PublicModel, PublicRequest, distinct_texts
from langchain_dpicl.options import GenerationTask
from langchain_dpicl.options.base import refuse_unused
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.tasks.templates import GenerationTemplate
from langchain_dpicl.tasks.writing import check_texts, generation_wording

_TOO_FEW = (
    "Give the model a temperature above 0 and no response cache, or hints= for it to write differently each time, or "
    "public candidates= of your own. No ticket was taken for it."
)


@dataclass(frozen=True, slots=True)
class EvolutionTemplate:
    """The prompts for candidates and variations.

    Attributes:
      first: instruction and stub of a first candidate.
      variation: template of the prompt for a variation, with the text's field and, where there are labels, the label's.
      hints: public sentences, appended in turn to the instruction of each prompt.
    """

    first: GenerationTemplate
    variation: Template
    hints: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names, known = set(self.variation.names), self.first.generated_fields
        if self.first.text_key not in names or not names <= known:
            expected = f"a template with {{{self.first.text_key}}}, and fields among {sorted(known)}"
            raise fail("variation_prompt", expected, self.variation.text)

    @classmethod
    def of(
        cls, task: GenerationTask, *, text_key: str, label_key: str | None, fields: Sequence[str]
    ) -> EvolutionTemplate:
        """Builds the templates, with defaults for those not given."""
        refuse_unused(task, {"instruction", "record_prompt", "variation_prompt", "hints"}, "PrivateEvolution")
        still = "" if label_key is None else f" It still has to fit its {label_key}."
        stub = GenerationTemplate.default_template(text_key, label_key)
        request = f"Rewrite the following {text_key}: say something similar in other words.{still} Write nothing else."
        varied = task.variation_prompt
        if varied is None:
            varied = f"{request}\n\n{stub}\n\nAnother {text_key}:"
        return cls(
            first=generation_wording(text_key, label_key, fields, task.instruction, task.record_prompt),
            variation=Template.of("variation_prompt", varied),
            hints=check_texts("hints", task.hints, least=0),
        )

    def first_prompts(self, label: str | None, count: int) -> list[str]:
        """Returns `count` prompts for first candidates of a label."""
        prompt = self.first.renderer(self.first.text_key, self._known(label))(())
        return [self._add_hint(prompt, hint) for hint in self._turns(count)]

    def variation_prompts(self, label: str | None, texts: Iterable[str], count: int) -> list[str]:
        """Returns the prompts for `count` variations of each text."""
        values = [{**self._known(label), self.first.text_key: text} for text in texts]
        prompts = [self.variation.fill(known) for known in values for _ in range(count)]
        turns = self._turns(len(prompts))
        return [self._add_hint(prompt, hint) for prompt, hint in zip(prompts, turns, strict=True)]

    def example(self, label: str | None, text: str) -> dict[str, str]:
        """Returns a text as a demonstration."""
        known = {**self._known(label), self.first.text_key: text}
        return {name: known[name] for name in sorted(known)}

    def to_dict(self) -> dict[str, Any]:
        """Returns the public wording as JSON values."""
        return {
            "instruction": self.first.instruction,
            "generation_prompt": self.first.template,
            "variation_prompt": self.variation.text,
            "hints": list(self.hints),
            "text_key": self.first.text_key,
            "label_key": self.first.label_key,
        }

    def _known(self, label: str | None) -> dict[str, str]:
        return {} if label is None or self.first.label_key is None else {self.first.label_key: label}

    def _turns(self, count: int) -> list[str]:
        return list(itertools.islice(itertools.cycle(self.hints), count)) if self.hints else [""] * count

    @staticmethod
    def _add_hint(prompt: str, hint: str) -> str:
        """Appends a hint to the first paragraph, which is the instruction."""
        # The instruction is the first paragraph of every prompt; see `GenerationTemplate`.
        instruction, gap, rest = prompt.partition("\n\n")
        return f"{instruction} {hint}{gap}{rest}" if hint else prompt


@dataclass(frozen=True, slots=True, repr=False)
class EvolutionWriter:
    """Calls the model with the config of a call, or else of the run; all prompts are public.

    Attributes:
      model: writes the texts; it sees public prompts only.
      wording: the prompt templates.
      given: first candidates by label, if they are not generated.
      config: the run's config, for its tracers.
    """

    model: PublicModel
    wording: EvolutionTemplate
    given: Mapping[str | None, tuple[str, ...]] = field(default_factory=dict)
    config: RunnableConfig | None = None

    def first(
        self, label: str | None, count: int, config: RunnableConfig | None, *, least: int
    ) -> EffectGenerator[tuple[str, ...]]:
        """Returns distinct first candidates (an effect generator); `config` is the caller's."""
        texts = self.given.get(label)
        if texts is None:
            texts = yield self.model.request_each(self.wording.first_prompts(label, count), self._config(config))
        if len(texts) < least:
            raise fail("candidates", f"at least {least} distinct public texts", len(texts), _TOO_FEW)
        return texts

    def vary(
        self, label: str | None, texts: Sequence[str], count: int, config: RunnableConfig | None
    ) -> EffectGenerator[tuple[str, ...]]:
        """Returns the survivors and then their variations, without duplicates (an effect generator)."""
        if not count:
            return tuple(texts)
        prompts = self.wording.variation_prompts(label, texts, count)
        variations = yield self.model.request_each(prompts, self._config(config))
        return distinct_texts([*texts, *variations])

    def _config(self, given: RunnableConfig | None) -> RunnableConfig:
        return merge_configs(given or self.config or {}, {"tags": [NO_STREAM]})


def first_candidates(
    candidates: Mapping[str, tuple[str, ...]] | tuple[str, ...] | None, labels: Sequence[str | None]
) -> dict[str | None, tuple[str, ...]]:
    """Returns public first candidates by label; a single list is used for every label."""
    if candidates is None:
        return {}
    if not isinstance(candidates, Mapping):
        return dict.fromkeys(labels, distinct_texts(candidates))
    if set(candidates) != set(labels):
        raise ConfigurationError("candidates: expected a list of public texts, or one for each declared label.")
    return {label: distinct_texts(texts) for label, texts in candidates.items()}


PROMPTS_PER_JOB = 8
"""Prompts of one job."""

PromptsJob: TypeAlias = tuple[int, tuple[str, ...]]
"""Index of the job, and its prompts."""


@dataclass(frozen=True, slots=True)
class PublicTextJob:
    """The job description for workers that answer public prompts.

    Attributes:
      name: public name of the driver's model; a worker's must be equal.
      max_tokens: as of `PublicModel`.
      stop: as of `PublicModel`.
    """

    name: str
    max_tokens: int
    stop: tuple[str, ...]

    @property
    def key(self) -> str:
        """Public name, from all fields."""
        return f"texts/{self.name}/{self.max_tokens}/{self.stop!r}"

    def begin(self, place: Workplace) -> Callable[[PromptsJob], JobResult]:
        """Returns the function that answers the prompts of one job."""
        model = PublicModel(place.llm, max_tokens=self.max_tokens, stop=self.stop)
        if model.name != self.name:
            raise fail("workplace", f"the model of the driver, {self.name}", model.name)

        def write(job: PromptsJob) -> JobResult:
            return JobResult("done", list(model.request_each(job[1], {}).run()))

        return write


class WorkerModel(PublicModel):
    """A model whose public prompts are answered by workers; the driver's callbacks are not called."""

    def __init__(
        self, llm: Any, executor: Executor, *, max_tokens: int, stop: Sequence[str], is_ours: bool = False
    ) -> None:
        super().__init__(llm, max_tokens=max_tokens, stop=stop)
        self._executor = executor
        self._work = PublicTextJob(self.name, max_tokens, tuple(stop))
        self._is_ours = is_ours
        self._found: dict[PromptsJob, list[str]] = {}

    def rest(self) -> None:
        """Stops the workers, if this run started them."""
        if self._is_ours:
            self._executor.rest()

    def request_each(self, prompts: Sequence[str | PromptValue], config: RunnableConfig) -> Effect:  # noqa: ARG002
        """Returns the request to answer each of these public prompts once; see `PublicModel`."""
        texts = [text if isinstance(text, str) else text.to_string() for text in prompts]
        parts = [tuple(texts[at : at + PROMPTS_PER_JOB]) for at in range(0, len(texts), PROMPTS_PER_JOB)]

        jobs = list(enumerate(parts))

        def ask() -> tuple[str, ...]:
            for _ in self._answered(jobs):
                pass
            return self._told(jobs)

        async def aask() -> tuple[str, ...]:
            async with aclosing(iterate_in_threads(self._answered(jobs))) as answered:
                async for _ in answered:
                    pass
            return self._told(jobs)

        return PublicRequest(self.name, ask, aask)

    def _answered(self, jobs: list[PromptsJob]) -> Generator[PromptsJob | None]:
        """Sends the unanswered prompts to workers; keeps the answers when other jobs fail."""
        self._found = {job: texts for job, texts in self._found.items() if job in jobs}
        # The first fault is raised at the end, so that other jobs' answers are kept for the next attempt.
        fault: ModelCallError | None = None
        for one in self._executor.spread(self._work, [job for job in jobs if job not in self._found]):
            if one is None:
                yield None
                continue
            job, answer = one
            if answer.kind == "done":
                self._found[job] = list(answer.result)
                yield job
            elif fault is None:
                error = answer.as_error()
                fault = error if isinstance(error, ModelCallError) else ModelCallError(str(error))
        if fault is not None:
            raise fault

    def _told(self, jobs: list[PromptsJob]) -> tuple[str, ...]:
        """Returns and forgets the answers, so that the same prompts are answered anew next time."""
        answers, self._found = self._found, {}
        return distinct_texts(text for job in jobs for text in answers[job])


def writing_model(llm: Any, executor: Any, *, max_tokens: int, stop: Sequence[str]) -> PublicModel:
    """Returns the model that writes public texts: on workers, if there is an executor.

    Raises:
      ConfigurationError: it is a private process, whose calls do not vary.
    """
    if isinstance(llm, PrivateProcess):
        advice = "It sees public text alone and needs no process of its own."
        raise fail("llm", "the model itself", type(llm).__name__, advice)
    workers = as_executor(executor)
    if not isinstance(workers, Executor):
        return PublicModel(llm, max_tokens=max_tokens, stop=stop)
    return WorkerModel(llm, workers, max_tokens=max_tokens, stop=stop, is_ours=executor == "ray")
