"""LangChain models for tests: scripted answers, counted calls, and switches for every kind of failure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langchain_core.language_models import LLM, BaseChatModel, BaseLLM
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult, Generation, LLMResult
from pydantic import Field

Tops = Mapping[str, float]


def chat_payload(tops: Tops) -> dict[str, Any]:
    """The logprobs of a chat answer, as OpenAI writes them; a byte of a part of a character is a surrogate escape."""
    entries = [
        {"token": token, "bytes": list(token.encode("utf-8", "surrogateescape")), "logprob": math.log(probability)}
        for token, probability in tops.items()
    ]
    return {"content": [{**entries[0], "top_logprobs": entries}] if entries else [], "refusal": None}


def legacy_payload(tops: Tops) -> dict[str, Any]:
    """The logprobs of a completion, as OpenAI wrote them."""
    first = next(iter(tops), "")
    return {
        "tokens": [first],
        "token_logprobs": [-1.0],
        "top_logprobs": [{token: math.log(probability) for token, probability in tops.items()}],
        "text_offset": [0],
    }


class StatusError(Exception):
    """An exception as SDKs raise it: the HTTP status, and the prompt in text and attributes."""

    def __init__(self, text: str, *, status_code: int) -> None:
        super().__init__(f"bad request: {text}")
        self.status_code = status_code
        self.body = {"echo": text}


def _respond(model: Any, text: str, options: Mapping[str, Any]) -> Tops:
    model.seen.append(dict(options))
    for mark, error in model.raises.items():
        if mark in text:
            left = model.times.setdefault(mark, -1)
            if left:
                model.times[mark] = left - 1
                raise error(text) if callable(error) else error
    return model.answer(text)


class ScriptedChat(BaseChatModel):
    """A chat model whose answer is a function of the text of its messages, roles and bars between them."""

    answer: Callable[[str], Tops]
    payload: Callable[[Tops], Any] = chat_payload
    raises: dict[str, Any] = Field(default_factory=dict)
    times: dict[str, int] = Field(default_factory=dict)
    seen: list[dict[str, Any]] = Field(default_factory=list)
    finish_reason: str = "length"
    refusal: str | None = None
    model_name: str = "scripted-chat"

    @property
    def _llm_type(self) -> str:
        return "scripted-chat"

    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        text = "|".join(f"{message.type}:{message.text}" for message in messages)
        tops = _respond(self, text, kwargs)
        message = AIMessage(
            next(iter(tops), ""),
            usage_metadata={"input_tokens": len(text), "output_tokens": 1, "total_tokens": len(text) + 1},
            response_metadata={"model_name": self.model_name},
            additional_kwargs={"refusal": self.refusal} if self.refusal else {},
        )
        info = {"finish_reason": self.finish_reason, "logprobs": self.payload(tops)}
        return ChatResult(generations=[ChatGeneration(message=message, generation_info=info)])


class ScriptedLLM(BaseLLM):
    """A completion model whose answer is a function of the prompt."""

    answer: Callable[[str], Tops]
    payload: Callable[[Tops], Any] = legacy_payload
    raises: dict[str, Any] = Field(default_factory=dict)
    times: dict[str, int] = Field(default_factory=dict)
    seen: list[dict[str, Any]] = Field(default_factory=list)
    finish_reason: str = "length"

    @property
    def _llm_type(self) -> str:
        return "scripted-llm"

    def _generate(
        self, prompts: list[str], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> LLMResult:
        generations = []
        for prompt in prompts:
            tops = _respond(self, prompt, kwargs)
            info = {"finish_reason": self.finish_reason, "logprobs": self.payload(tops)}
            generations.append([Generation(text=next(iter(tops), ""), generation_info=info)])
        return LLMResult(generations=generations)


def fixed(tops: Tops) -> Callable[[str], Tops]:
    """The same answer to everything."""
    return lambda text: tops


def by_word(table: Mapping[str, Tops], otherwise: Tops) -> Callable[[str], Tops]:
    """The answer of the first word of the table found in the text."""
    return lambda text: next((tops for word, tops in table.items() if word in text), otherwise)


def spread(words: Sequence[str], mass: float = 0.9) -> dict[str, float]:
    """A sloping distribution over `words`, likeliest first."""
    weights = [1.0 / (rank + 1) for rank in range(len(words))]
    return {word: mass * weight / sum(weights) for word, weight in zip(words, weights, strict=True)}


class Written(LLM):
    """A completion model of a user's own; what it does is a function of the prompt."""

    act: Callable[[str], str]

    @property
    def _llm_type(self) -> str:
        return "written"

    def _call(self, prompt: str, *_: Any, **__: Any) -> str:
        return self.act(str(prompt))
