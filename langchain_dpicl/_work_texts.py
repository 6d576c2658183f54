"""Answers public prompts on workers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeAlias

from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import RunnableConfig

from langchain_dpicl._candidates import AskInPublic, PublicModel, distinct
from langchain_dpicl.backends.walk import Ask
from langchain_dpicl.exceptions import ModelCallError
from langchain_dpicl.executors import Answer, Executor, taken_aside
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.ray_executor import as_executor
from langchain_dpicl.working import Workplace

PROMPTS_PER_JOB = 8
"""Prompts of one job."""

PromptsJob: TypeAlias = tuple[int, tuple[str, ...]]
"""Index of the job, and its prompts."""


@dataclass(frozen=True, slots=True)
class TextWork:
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

    def begin(self, place: Workplace) -> Callable[[PromptsJob], Answer]:
        """Returns the function that answers the prompts of one job."""
        model = PublicModel(place.llm, max_tokens=self.max_tokens, stop=self.stop)
        if model.name != self.name:
            raise fail("workplace", f"the model of the driver, {self.name}", model.name)

        def write(job: PromptsJob) -> Answer:
            return Answer("done", list(model.ask_each(job[1], {}).run()))

        return write


class SpreadModel(PublicModel):
    """A model whose public prompts are answered by workers; the driver's callbacks are not called."""

    def __init__(
        self, llm: Any, executor: Executor, *, max_tokens: int, stop: Sequence[str], is_ours: bool = False
    ) -> None:
        super().__init__(llm, max_tokens=max_tokens, stop=stop)
        self._executor = executor
        self._work = TextWork(self.name, max_tokens, tuple(stop))
        self._is_ours = is_ours
        self._found: dict[PromptsJob, list[str]] = {}

    def rest(self) -> None:
        """Stops the workers, if this run started them."""
        if self._is_ours:
            self._executor.rest()

    def ask_each(self, prompts: Sequence[str | PromptValue], config: RunnableConfig) -> Ask:  # noqa: ARG002
        """Returns the request to answer each of these public prompts once; see `PublicModel`."""
        texts = [text if isinstance(text, str) else text.to_string() for text in prompts]
        parts = [tuple(texts[at : at + PROMPTS_PER_JOB]) for at in range(0, len(texts), PROMPTS_PER_JOB)]

        jobs = list(enumerate(parts))

        def ask() -> tuple[str, ...]:
            for _ in self._answered(jobs):
                pass
            return self._told(jobs)

        async def aask() -> tuple[str, ...]:
            async with aclosing(taken_aside(self._answered(jobs))) as answered:
                async for _ in answered:
                    pass
            return self._told(jobs)

        return AskInPublic(self.name, ask, aask)

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
                self._found[job] = list(answer.told)
                yield job
            elif fault is None:
                error = answer.as_error()
                fault = error if isinstance(error, ModelCallError) else ModelCallError(str(error))
        if fault is not None:
            raise fault

    def _told(self, jobs: list[PromptsJob]) -> tuple[str, ...]:
        """Returns and forgets the answers, so that the same prompts are answered anew next time."""
        answers, self._found = self._found, {}
        return distinct(text for job in jobs for text in answers[job])


def writing_model(llm: Any, executor: Any, *, max_tokens: int, stop: Sequence[str]) -> PublicModel:
    """Returns the model that writes public texts: on workers, if there is an executor."""
    workers = as_executor(executor)
    if workers is None:
        return PublicModel(llm, max_tokens=max_tokens, stop=stop)
    return SpreadModel(llm, workers, max_tokens=max_tokens, stop=stop, is_ours=executor == "ray")


__all__ = ["SpreadModel", "TextWork", "writing_model"]
