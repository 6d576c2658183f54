"""Classes with the names, fields and signatures of LangChain's providers, of the releases in benchmarks/results/providers.md.

Each answers as its server would, through `talk`, which keeps what would have been sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from langchain_core.language_models import LLM, BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from pydantic import BaseModel, ConfigDict, Field

TOPS = {"white": 0.7, "black": 0.2, " red": 0.1}


@dataclass
class Talk:
    """What a server received, and what it answers."""

    text: str = "white"
    reason: str = "length"
    tops: Mapping[str, float] = field(default_factory=lambda: dict(TOPS))
    sent: list[dict[str, Any]] = field(default_factory=list)


class TokenLogprob(BaseModel):
    """Ollama's SDK reports tokens as such objects, without their bytes."""

    token: str
    logprob: float


class Logprob(TokenLogprob):
    """A written token, and the likeliest in its place."""

    top_logprobs: Sequence[TokenLogprob] | None = None


def logprob_objects(tops: Mapping[str, float], most: int) -> list[Logprob]:
    """Returns one place, as the SDK of Ollama builds it."""
    entries = [TokenLogprob(token=token, logprob=math.log(value)) for token, value in tops.items()]
    return [Logprob(token=one.token, logprob=one.logprob, top_logprobs=entries[:most]) for one in entries[:1]]


def ollama_chat(
    *, messages: Any, stream: bool, model: str, options: Any, logprobs: Any = None, top_logprobs: Any = None
) -> None:
    """Has the signature of `ollama.Client.chat`, which refuses every other option."""


def ollama_generate(*, prompt: Any, stream: bool, model: str, options: Any) -> None:
    """Has the signature of `ollama.Client.generate`."""


class _ChatOllama(BaseChatModel):
    """Sends options that are fields, and arguments beside them, as `langchain_ollama.ChatOllama` does."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    talk: Talk = Field(default_factory=Talk)
    model: str = "m"
    num_predict: int | None = None
    num_ctx: int | None = None
    temperature: float | None = None
    stop: list[str] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def _llm_type(self) -> str:
        return "double"

    def _generate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        if self.stop is not None and stop is not None:
            raise ValueError("`stop` found in both the input and default params.")
        names = ("num_predict", "num_ctx", "temperature")
        options = kwargs.pop("options", None)
        if options is None:
            options = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        asked = {"logprobs": kwargs.pop("logprobs", self.logprobs), "top_logprobs": kwargs.pop("top_logprobs", None)}
        ollama_chat(messages=messages, stream=True, model=self.model, options=options, **asked, **kwargs)
        self.talk.sent.append({**options, **asked})
        logprobs = logprob_objects(self.talk.tops, asked["top_logprobs"] or 0) if asked["logprobs"] else None
        info = {"done": True, "done_reason": self.talk.reason, "logprobs": logprobs}
        return ChatResult(generations=[ChatGeneration(message=AIMessage(self.talk.text), generation_info=info)])


class _OllamaLLM(LLM):
    """Has no log-probabilities, whatever its server reports."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    talk: Talk = Field(default_factory=Talk)
    model: str = "m"
    num_predict: int | None = None
    temperature: float | None = None

    @property
    def _llm_type(self) -> str:
        return "double"

    def _call(self, prompt: str, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> str:
        options = kwargs.pop("options", {"num_predict": self.num_predict, "temperature": self.temperature})
        ollama_generate(prompt=prompt, stream=True, model=self.model, options=options, **kwargs)
        self.talk.sent.append(options)
        return self.talk.text


class GeminiConfig(BaseModel):
    """Refuses unknown options, as `google.genai.types.GenerateContentConfig` does."""

    model_config = ConfigDict(extra="forbid")
    max_output_tokens: int | None = None
    temperature: float | None = None


class _ChatGoogleGenerativeAI(BaseChatModel):
    """Gives arguments to a configuration that knows `max_output_tokens`."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    talk: Talk = Field(default_factory=Talk)

    @property
    def _llm_type(self) -> str:
        return "double"

    def _generate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        self.talk.sent.append(GeminiConfig(**kwargs).model_dump(exclude_none=True))
        return ChatResult(generations=[ChatGeneration(message=AIMessage(self.talk.text))])


class _HuggingFaceEndpoint(LLM):
    """Sends every argument that its client knows; TGI refuses a temperature that is not above 0."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    talk: Talk = Field(default_factory=Talk)
    temperature: float | None = 0.8
    max_new_tokens: int = 512

    @property
    def _llm_type(self) -> str:
        return "double"

    def _call(self, prompt: str, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> str:
        own = {"temperature": self.temperature, "max_new_tokens": self.max_new_tokens, **kwargs}
        if unknown := own.keys() - {"temperature", "max_new_tokens", "do_sample"}:
            raise TypeError(f"InferenceClient.text_generation() got an unexpected keyword argument {min(unknown)!r}")
        if own["temperature"] is not None and own["temperature"] <= 0.0:
            raise ValueError("Input validation error: `temperature` must be strictly positive")
        self.talk.sent.append({name: value for name, value in own.items() if value is not None})
        return self.talk.text


class PlainChat(BaseChatModel):
    """Takes OpenAI's names and has no log-probabilities."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    talk: Talk = Field(default_factory=Talk)

    @property
    def _llm_type(self) -> str:
        return "double"

    def _generate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        self.talk.sent.append(kwargs)
        return ChatResult(generations=[ChatGeneration(message=AIMessage(self.talk.text))])


# Code in the packages of providers that is not theirs would be refused, so these classes have none of their own.
class ChatOllama(_ChatOllama):
    """Stands for `langchain_ollama.ChatOllama`."""


class OllamaLLM(_OllamaLLM):
    """Stands for `langchain_ollama.OllamaLLM`."""


class ChatGoogleGenerativeAI(_ChatGoogleGenerativeAI):
    """Stands for `langchain_google_genai.ChatGoogleGenerativeAI`."""


class HuggingFaceEndpoint(_HuggingFaceEndpoint):
    """Stands for `langchain_huggingface.HuggingFaceEndpoint`."""


class ChatMistralAI(PlainChat):
    """Stands for `langchain_mistralai.ChatMistralAI`."""


class ChatBedrockConverse(PlainChat):
    """Stands for `langchain_aws.ChatBedrockConverse`."""


class ChatVertexAI(PlainChat):
    """Stands for `langchain_google_vertexai.ChatVertexAI`, whose client is made with the first call."""


class ChatLiteLLM(PlainChat):
    """Stands for `langchain_litellm.ChatLiteLLM`, which gives its arguments to a function with switches of its own."""


_PACKAGES: Mapping[type, str] = {
    ChatOllama: "langchain_ollama",
    OllamaLLM: "langchain_ollama",
    ChatGoogleGenerativeAI: "langchain_google_genai",
    HuggingFaceEndpoint: "langchain_huggingface",
    ChatMistralAI: "langchain_mistralai",
    ChatBedrockConverse: "langchain_aws",
    ChatLiteLLM: "langchain_litellm",
    ChatVertexAI: "langchain_google_vertexai",
}
for _kind, _package in _PACKAGES.items():
    _kind.__module__ = f"{_package}.chat_models"
