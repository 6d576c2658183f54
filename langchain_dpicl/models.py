"""Defines local models as LangChain completion and chat models."""

# Private components take the engine from `backend` and use it without callbacks, traces and caches. So one model in
# memory generates privately and serves public prompts.

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NoReturn, Self

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, BaseLLM
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.outputs import (
    ChatGeneration,
    ChatGenerationChunk,
    ChatResult,
    Generation,
    GenerationChunk,
    LLMResult,
)
from pydantic import Field

from langchain_dpicl._serving import (
    Served,
    Wish,
    chat_prompt,
    flatten_messages,
    num_read,
    served_from_path,
    text_prompt,
    write,
    write_all,
)
from langchain_dpicl.backends.embedded import EmbeddedModel
from langchain_dpicl.exceptions import CapabilityError

__all__ = ["ChatEmbedded", "ChatLocal", "EmbeddedLLM", "LocalLLM", "flatten_messages"]


class _ServedLLM(Served, BaseLLM):
    """A completion model around an engine."""

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        del run_manager
        asked = [text_prompt(self.backend, prompt) for prompt in prompts]
        texts = write_all(self.backend, asked, Wish.of(self, stop, kwargs))
        read, written = sum(map(self.backend.count_tokens, prompts)), sum(text.num_tokens for text in texts)
        return LLMResult(
            generations=[[Generation(text=text.text, generation_info=text.info)] for text in texts],
            llm_output={**self._identifying_params, "token_usage": _openai_usage(read, written)},
        )

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        for piece in write(self.backend, text_prompt(self.backend, prompt), Wish.of(self, stop, kwargs)):
            chunk = GenerationChunk(text=piece.text, generation_info=piece.info())
            if run_manager:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk


class _ServedChat(Served, BaseChatModel):
    """A chat model around an engine."""

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        del run_manager
        prompt = chat_prompt(self.backend, messages)
        [text] = write_all(self.backend, [prompt], Wish.of(self, stop, kwargs))
        info = {**text.info, "model_name": self.backend.name}
        usage = _usage(num_read(self.backend, prompt), text.num_tokens)
        message = AIMessage(content=text.text, response_metadata=info, usage_metadata=usage)
        return ChatResult(
            generations=[ChatGeneration(message=message, generation_info=info)],
            llm_output={"model_name": self.backend.name},
        )

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        prompt = chat_prompt(self.backend, messages)
        written = 0
        for piece in write(self.backend, prompt, Wish.of(self, stop, kwargs)):
            written += piece.num_tokens
            message, info = AIMessageChunk(content=piece.text), piece.info()
            if piece.finish_reason:
                message.usage_metadata = _usage(num_read(self.backend, prompt), written)
                info = {**(info or {}), "model_name": self.backend.name}
            chunk = ChatGenerationChunk(message=message, generation_info=info)
            if run_manager:
                run_manager.on_llm_new_token(piece.text, chunk=chunk)
            yield chunk

    def bind_tools(self, tools: Any, **kwargs: Any) -> NoReturn:
        """Refuses: no tools are called.

        Raises:
          CapabilityError: always.
        """
        del tools, kwargs
        raise CapabilityError(_TEXT_ONLY.format(type(self).__name__, "tools"))

    def with_structured_output(self, schema: Any, **kwargs: Any) -> NoReturn:
        """Refuses: the model writes text, which a parser of your own may read.

        Raises:
          CapabilityError: always.
        """
        del schema, kwargs
        raise CapabilityError(_TEXT_ONLY.format(type(self).__name__, "structured output"))


_TEXT_ONLY = (
    "expected to be asked for text, which is all that {} writes, found a request for {}; "
    "put an output parser behind it, such as JsonOutputParser() or StrOutputParser()"
)


class LocalLLM(_ServedLLM):
    r"""A local engine as a completion model: what generates privately also serves, in chains, streams and callbacks.

    It writes until the end of the text, a stop string or `max_tokens`. `bind(logprobs=True, top_logprobs=k)` adds
    OpenAI's `logprobs` to the generation's info. An engine with a chat template answers the prompt as a message;
    `from_path` makes one that continues it.

    Args:
      backend: an engine: `HuggingFaceBackend`, `EmbeddedModel`, or any with the same `generate`, `encode`,
        `count_tokens`, `token_bytes`, `eos` and `name`.
      max_tokens: most tokens of one completion; also per call, `model.bind(max_tokens=...)`.
      temperature: 0 takes the likeliest token; also per call, as the following.
      top_k: samples among this many likeliest tokens; public sampling alone, private generation never sees it.
      top_p: samples among the likeliest tokens that together have this probability; as `top_k`.
      seed: of the sampling at temperature > 0, which protects nobody; None for fresh coins.
      stop: strings that end a completion, where a call brings none.

    >>> from langchain_dpicl.backends.embedded import EmbeddedModel
    >>> model = LocalLLM(backend=EmbeddedModel(), max_tokens=8, stop=["?"])
    >>> model.invoke("Word: red\nKind: colour\n\nWord: red\nKind:")
    ' colour'
    """

    @property
    def _llm_type(self) -> str:
        return "dpicl-local"

    @classmethod
    def from_path(cls, path: str | os.PathLike[str], **options: Any) -> Self:
        """Returns a model of a local folder; prompts are continued as they are.

        Args:
          path: folder with a causal language model and its tokenizer.
          options: of `HuggingFaceBackend` (`chat` is False by default) and of this model.

        Raises:
          ConfigurationError: no such folder, or no such option.
        """
        model: Self = served_from_path(cls, path, {"chat": False, **options})
        return model


class ChatLocal(_ServedChat):
    """A local engine as a chat model; see `LocalLLM`.

    Messages are written with the engine's chat template; without one they become one text (`flatten_messages`). What
    looks like a marker of the template inside a message is read as plain text. A last message by the AI is continued.

    Args:
      backend: an engine, as of `LocalLLM`.
      max_tokens: most tokens of one answer; also per call.
      temperature: 0 takes the likeliest token; also per call, as the following.
      top_k: samples among this many likeliest tokens; public sampling alone, private generation never sees it.
      top_p: samples among the likeliest tokens that together have this probability; as `top_k`.
      seed: of the sampling at temperature > 0, which protects nobody; None for fresh coins.
      stop: strings that end an answer, where a call brings none.

    >>> from langchain_dpicl.backends.embedded import EmbeddedModel
    >>> model = ChatLocal(backend=EmbeddedModel(), max_tokens=8)
    >>> model.invoke([("human", "red"), ("ai", "colour"), ("human", "red")]).text
    'colour'
    """

    @property
    def _llm_type(self) -> str:
        return "dpicl-chat-local"

    @classmethod
    def from_path(cls, path: str | os.PathLike[str], **options: Any) -> Self:
        """Returns a model of a local folder, with its chat template if it has one.

        Args:
          path: folder with a causal language model and its tokenizer.
          options: of `HuggingFaceBackend` and of this model.

        Raises:
          ConfigurationError: no such folder, or no such option.
        """
        model: Self = served_from_path(cls, path, options)
        return model


class EmbeddedLLM(_ServedLLM):
    r"""The embedded model as a completion model: a toy that reads its demonstrations (docs/embedded-model.md).

    It writes until the end of its segment (a blank line), a stop string or `max_tokens`.

    Args:
      max_tokens: most tokens of one completion; also per call, `model.bind(max_tokens=...)`.
      temperature: 0 takes the likeliest token; also per call.
      seed: of the sampling at temperature > 0, which protects nobody; None for fresh coins.
      top_k: samples among this many likeliest tokens; None: all.
      top_p: samples among the likeliest tokens that together have this probability.
      stop: strings that end a completion, where a call brings none.
      backend: the engine; by default the one embedded model.

    >>> EmbeddedLLM().bind(max_tokens=8, stop=["?"]).invoke("Word: red\nKind: colour\n\nWord: red\nKind:")
    ' colour'
    """

    backend: Any = Field(default_factory=EmbeddedModel, exclude=True, repr=False)

    @property
    def _llm_type(self) -> str:
        return "dpicl-embedded"


class ChatEmbedded(_ServedChat):
    """The embedded model as a chat model; see `EmbeddedLLM` and, for how messages become one prompt,
    `flatten_messages`.

    `bind(logprobs=True, top_logprobs=k)` adds OpenAI's `logprobs` to the generation's info and the response metadata.

    Args:
      max_tokens: most tokens of one answer; also per call.
      temperature: 0 takes the likeliest token; also per call.
      seed: of the sampling at temperature > 0, which protects nobody; None for fresh coins.
      top_k: samples among this many likeliest tokens; None: all.
      top_p: samples among the likeliest tokens that together have this probability.
      stop: strings that end an answer, where a call brings none.
      backend: the engine; by default the one embedded model.
    """

    backend: Any = Field(default_factory=EmbeddedModel, exclude=True, repr=False)

    @property
    def _llm_type(self) -> str:
        return "dpicl-chat-embedded"


def _usage(read: int, written: int) -> UsageMetadata:
    return UsageMetadata(input_tokens=read, output_tokens=written, total_tokens=read + written)


def _openai_usage(read: int, written: int) -> dict[str, int]:
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
