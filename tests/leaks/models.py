"""Models whose private prompts hold one canary and whose private answers hold the other. Know no channel."""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.messages import AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import RunnableLambda

from langchain_dpicl.backends.langchain.backend import LangChainBackend
from langchain_dpicl.backends.private_calls.call import RetryPolicy
from tests.canary import RECORD, VOTE
from tests.scripted_models import ScriptedChat, ScriptedLLM, StatusError

RECORDS = [{"text": f"my card {RECORD}", "topic": "card", "user": f"{RECORD}-{number}"} for number in range(6)]
PUBLIC = {" my": 0.5, " card": 0.3, " late": 0.1}  # none ends a text: noise would leave one in a thousand empty
PRIVATE = {f" {VOTE}": 0.6, " my": 0.3, " card": 0.1}

ONCE = RetryPolicy(max_attempts=1)

PRIVATE_TOKENS = 1_000_003
"""Usage of a private prompt and of a private answer: a public call uses less."""

CALLS: list[str] = []
"""What the provider was asked since the last reset: "private" or "public" for each call."""


def answer(text: str) -> dict[str, float]:
    """What the provider sends; public candidates never name a vote, so no release can."""
    is_private = RECORD in text
    CALLS.append("private" if is_private else "public")
    return dict(PRIVATE if is_private else PUBLIC)


def failing(text: str) -> dict[str, float]:
    """Refuses every private prompt but the first, quoting it; then the public calls fail as well."""
    answered = answer(text)
    if RECORD in text and CALLS.count("private") > 1:
        raise StatusError(f"{text} {VOTE}", status_code=400)
    if RECORD not in text and "private" in CALLS:
        raise StatusError("offline", status_code=400)
    return answered


class StillChat(ScriptedChat):
    """A chat model without streaming, and with canaries for usage counters."""

    answer: Any = answer

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        result = super()._generate(messages, *args, **kwargs)
        message: Any = result.generations[0].message
        used = PRIVATE_TOKENS if any(RECORD in message.text for message in messages) else 1
        message.usage_metadata = {"input_tokens": used, "output_tokens": used, "total_tokens": 2 * used}
        return result


class LeakyChat(StillChat):
    """A chat model that streams."""

    streaming: bool = False

    def _stream(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> Iterator[ChatGenerationChunk]:
        whole: Any = self._generate(messages, *args, **kwargs).generations[0].message
        yield ChatGenerationChunk(message=AIMessageChunk(whole.content, usage_metadata=whole.usage_metadata))
        yield ChatGenerationChunk(message=AIMessageChunk("", response_metadata=whole.response_metadata))


class LeakyLLM(ScriptedLLM):
    """A completion model."""

    answer: Any = answer


def filed(path: str) -> LangChainBackend:
    """A chat model for a process of its own; that it was asked something private is noted in a file."""

    def noted(text: str) -> dict[str, float]:
        if RECORD in text:
            Path(path).touch()
        return answer(text)

    return LangChainBackend(LeakyChat(answer=noted), max_top_k=3, continuation="instruct", retry=ONCE)


def both(**fields: Any) -> dict[str, Callable[[], Any]]:
    """Factories of a chat and of a completion model with these fields."""
    return {"chat": lambda: LeakyChat(**fields), "completion": lambda: LeakyLLM(**fields)}


class WarningChat(LeakyChat):
    """Warns about what it serialises, as pydantic does inside SDKs."""

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        result = super()._generate(messages, *args, **kwargs)
        warnings.warn(f"unexpected value: {messages} {result}", UserWarning, stacklevel=2)
        return result


class LoggingChat(LeakyChat):
    """Writes bodies to its log at DEBUG, as SDKs do."""

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        result = super()._generate(messages, *args, **kwargs)
        logging.getLogger("some.sdk").debug("request %s response %s", messages, result)
        return result


class LeakyEmbeddings(DeterministicFakeEmbedding):
    """Embeddings that log and warn of what they embed."""

    size: int = 4

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        logging.getLogger("some.sdk").debug("request %s", texts)
        warnings.warn(f"unexpected value: {texts}", UserWarning, stacklevel=2)
        return super().embed_documents(texts)


class BusyInsideChat(LeakyChat):
    """Starts runs of its own while it generates."""

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        result = super()._generate(messages, *args, **kwargs)
        RunnableLambda(str).invoke(f"{messages} {result}")
        return result


class AroundChat(LeakyChat):
    """Hands its work to another model."""

    inner: Any = None

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        self.inner.invoke(messages)
        return super()._generate(messages, *args, **kwargs)


class StoppedChat(LeakyChat):
    """Is stopped while it answers a private prompt, and says what it was at."""

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        result = super()._generate(messages, *args, **kwargs)
        if RECORD in messages[0].text:
            raise KeyboardInterrupt(f"{messages} {result}")
        return result

    async def _agenerate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        result = super()._generate(messages, *args, **kwargs)
        try:
            await asyncio.sleep(60 if RECORD in messages[0].text else 0)
        except asyncio.CancelledError as error:
            raise asyncio.CancelledError(f"{messages} {result}") from error
        return result

    async def _astream(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        await self._agenerate(messages, *args, **kwargs)
        yield ChatGenerationChunk(message=AIMessageChunk(""))
