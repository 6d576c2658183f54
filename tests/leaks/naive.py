"""The component as people write it: records in a field, votes in another, the model called by its public methods."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from langchain_core.runnables import RunnableConfig, RunnableSerializable
from pydantic import Field

from tests.leaks.models import RECORDS


def text_of(reply: Any) -> str:
    """The text of a message, of a completion, or of anything else."""
    return str(getattr(reply, "content", reply))


class NaiveVoter(RunnableSerializable[Any, Any]):
    """Asks the model once per record and releases the winner. It adds no noise and hides nothing."""

    llm: Any
    examples: list[dict[str, str]]
    votes: list[str] = Field(default_factory=list)
    own_config: Any = None
    """The config it calls the model with; None: none; "given": the one it was called with."""
    ask: Any = str
    """How a prompt becomes what the model takes."""

    def _prompts(self) -> list[Any]:
        return [self.ask(f"text: {example['text']}\ntopic:") for example in self.examples]

    def _config(self, config: RunnableConfig | None) -> Any:
        return config if self.own_config == "given" else self.own_config

    def invoke(
        self,
        input: Any,  # noqa: A002  LangChain's name
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> str:
        for prompt in self._prompts():
            vote = text_of(self.llm.invoke(prompt, self._config(config)))
            self.votes.append(vote)
        return "card"

    async def ainvoke(
        self,
        input: Any,  # noqa: A002  LangChain's name
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> str:
        for prompt in self._prompts():
            vote = text_of(await self.llm.ainvoke(prompt, self._config(config)))
            self.votes.append(vote)
        return "card"

    def batch(self, inputs: list[Any], config: Any = None, **kwargs: Any) -> list[str]:
        prompts = self._prompts()
        self.votes.extend(map(text_of, self.llm.batch(prompts, self._config(config))))
        return ["card"] * len(inputs)

    async def abatch(self, inputs: list[Any], config: Any = None, **kwargs: Any) -> list[str]:
        prompts = self._prompts()
        self.votes.extend(map(text_of, await self.llm.abatch(prompts, self._config(config))))
        return ["card"] * len(inputs)

    def stream(
        self,
        input: Any,  # noqa: A002  LangChain's name
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> Iterator[str]:
        for prompt in self._prompts():
            for chunk in self.llm.stream(prompt, self._config(config)):
                vote = text_of(chunk)
                self.votes.append(vote)
                yield vote

    async def astream(
        self,
        input: Any,  # noqa: A002  LangChain's name
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[str]:
        for prompt in self._prompts():
            async for chunk in self.llm.astream(prompt, self._config(config)):
                vote = text_of(chunk)
                self.votes.append(vote)
                yield vote


def naive_voter(llm: Any, **options: Any) -> NaiveVoter:
    """The component over the first two private records."""
    return NaiveVoter(llm=llm, examples=RECORDS[:2], **options)
