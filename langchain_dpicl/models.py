"""The embedded model as a LangChain completion model and chat model, offline. Knows nothing of privacy.

Both carry their engine as `backend`, which the private components take from them; nothing private passes here.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, BaseLLM
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import (
    ChatGeneration,
    ChatGenerationChunk,
    ChatResult,
    Generation,
    GenerationChunk,
    LLMResult,
)
from numpy.random import PCG64, Generator
from pydantic import Field

from langchain_dpicl.backends.embedded import EmbeddedModel, cut

__all__ = ["ChatEmbedded", "EmbeddedLLM", "flatten_messages"]


class EmbeddedLLM(BaseLLM):
    r"""The embedded model as a completion model: a toy that reads its demonstrations (docs/embedded-model.md).

    It writes until the end of its segment (a blank line), a stop string or `max_tokens`.

    Args:
      max_tokens: most tokens of one completion; also per call, `model.bind(max_tokens=...)`.
      temperature: 0 takes the likeliest token; also per call.
      seed: of the sampling at temperature > 0, which protects nobody; None for fresh coins.

    >>> EmbeddedLLM().bind(max_tokens=8, stop=["?"]).invoke("Word: red\nKind: colour\n\nWord: red\nKind:")
    ' colour'
    """

    max_tokens: int = Field(default=64, ge=1)
    temperature: float = Field(default=0.0, ge=0.0)
    seed: int | None = None
    backend: Any = Field(default_factory=EmbeddedModel, exclude=True, repr=False)

    @property
    def _llm_type(self) -> str:
        return "dpicl-embedded"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return _identity(self)

    def get_token_ids(self, text: str) -> list[int]:
        """Returns the model's own tokens."""
        return list(self.backend.encode(text))

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        del run_manager
        wish = _Wish.of(self, stop, kwargs)
        texts = self.backend.complete(
            prompts, max_tokens=wish.max_tokens, stop=wish.stop, temperature=wish.temperature, rng=wish.coins()
        )
        return LLMResult(generations=[[Generation(text=text)] for text in texts], llm_output=_identity(self))

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        for piece in _write(self.backend, prompt, _Wish.of(self, stop, kwargs)):
            chunk = GenerationChunk(text=piece.text, generation_info=piece.info())
            if run_manager:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk


class ChatEmbedded(BaseChatModel):
    """The embedded model as a chat model; see `EmbeddedLLM` and, for how messages become one prompt,
    `flatten_messages`.

    `bind(logprobs=True, top_logprobs=k)` adds OpenAI's `logprobs` to the generation's info and the response metadata.

    Args:
      max_tokens: most tokens of one answer; also per call.
      temperature: 0 takes the likeliest token; also per call.
      seed: of the sampling at temperature > 0, which protects nobody; None for fresh coins.
    """

    max_tokens: int = Field(default=64, ge=1)
    temperature: float = Field(default=0.0, ge=0.0)
    seed: int | None = None
    backend: Any = Field(default_factory=EmbeddedModel, exclude=True, repr=False)

    @property
    def _llm_type(self) -> str:
        return "dpicl-chat-embedded"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return _identity(self)

    def get_token_ids(self, text: str) -> list[int]:
        """Returns the model's own tokens."""
        return list(self.backend.encode(text))

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        del run_manager
        prompt = flatten_messages(messages)
        pieces = list(_write(self.backend, prompt, _Wish.of(self, stop, kwargs)))
        entries = [entry for piece in pieces for entry in piece.entries]
        info: dict[str, Any] = {"finish_reason": pieces[-1].finish_reason, "model_name": self.backend.name}
        if kwargs.get("logprobs"):
            info["logprobs"] = {"content": entries}
        read, written = self.backend.count_tokens(prompt), sum(piece.num_tokens for piece in pieces)
        message = AIMessage(
            content="".join(piece.text for piece in pieces),
            response_metadata=info,
            usage_metadata={"input_tokens": read, "output_tokens": written, "total_tokens": read + written},
        )
        return ChatResult(generations=[ChatGeneration(message=message, generation_info=info)])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        for piece in _write(self.backend, flatten_messages(messages), _Wish.of(self, stop, kwargs)):
            chunk = ChatGenerationChunk(message=AIMessageChunk(content=piece.text), generation_info=piece.info())
            if run_manager:
                run_manager.on_llm_new_token(piece.text, chunk=chunk)
            yield chunk


def flatten_messages(messages: Sequence[BaseMessage]) -> str:
    r"""Returns the one prompt that the chat model continues.

    Contents are joined by blank lines; an AI message stands on the line after the message it answers. Where earlier AI
    messages show how answers look, the answer asked for starts on a line of its own; otherwise the model continues the
    last message where it ends. A last message by the AI is continued, too.

    >>> from langchain_core.messages import AIMessage, HumanMessage
    >>> flatten_messages([HumanMessage("red"), AIMessage("colour"), HumanMessage("blue")])
    'red\ncolour\n\nblue\n'
    """
    prompt = ""
    for number, message in enumerate(messages):
        if number:
            prompt += "\n" if isinstance(message, AIMessage) else "\n\n"
        prompt += str(message.text)
    answered = any(isinstance(message, AIMessage) for message in messages)
    return prompt + "\n" if answered and not isinstance(messages[-1], AIMessage) else prompt


@dataclass(frozen=True)
class _Wish:
    """What one call asks for: the model's fields, overruled by the call."""

    max_tokens: int
    temperature: float
    seed: int | None
    stop: tuple[str, ...]
    top_logprobs: int | None

    @classmethod
    def of(cls, model: EmbeddedLLM | ChatEmbedded, stop: Sequence[str] | None, kwargs: dict[str, Any]) -> _Wish:
        return cls(
            max_tokens=int(kwargs.get("max_tokens") or model.max_tokens),
            temperature=float(kwargs.get("temperature", model.temperature)),
            seed=kwargs.get("seed", model.seed),
            stop=tuple(word for word in stop or () if word),
            top_logprobs=int(kwargs.get("top_logprobs") or 0) if kwargs.get("logprobs") else None,
        )

    def coins(self) -> Generator:
        """Coins of the public sampling."""
        return Generator(PCG64(self.seed))


@dataclass(frozen=True)
class _Piece:
    """What one token adds to a text."""

    text: str
    num_tokens: int = 1
    entries: tuple[dict[str, Any], ...] = ()
    finish_reason: str | None = None

    def info(self) -> dict[str, Any] | None:
        """The chunk's generation info."""
        info: dict[str, Any] = {"logprobs": {"content": list(self.entries)}} if self.entries else {}
        if self.finish_reason:
            info["finish_reason"] = self.finish_reason
        return info or None


def _write(backend: EmbeddedModel, prompt: str, wish: _Wish) -> Iterator[_Piece]:
    """Yields one piece per token and a last one that says why the text ended.

    Text that may become a stop string is held back until it is known not to.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    steps = backend.generate([prompt], temperature=wish.temperature, rng=wish.coins())
    held, started = "", not prompt.endswith(" ")
    for _ in range(wish.max_tokens):
        tokens, rows = next(steps)
        token = int(tokens[0])
        if token == backend.eos:
            yield _Piece(held + decoder.decode(b"", final=True), finish_reason="stop")
            return
        held += decoder.decode(backend.token_bytes(token))
        if not started:
            held, started = held.removeprefix(" "), True
        if (short := cut(held, wish.stop)) != held:
            yield _Piece(short, finish_reason="stop")
            return
        entries = () if wish.top_logprobs is None else (_entry(backend, token, rows[0], wish.top_logprobs),)
        ready = len(held) - _undecided(held, wish.stop)
        yield _Piece(held[:ready], entries=entries)
        held = held[ready:]
    yield _Piece(held + decoder.decode(b"", final=True), num_tokens=0, finish_reason="length")


def _undecided(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    lengths = range(min(len(text), max(map(len, stop), default=1) - 1), 0, -1)
    return next((length for length in lengths if any(word.startswith(text[-length:]) for word in stop)), 0)


def _entry(backend: EmbeddedModel, token: int, row: np.ndarray[Any, np.dtype[np.float64]], top: int) -> dict[str, Any]:
    """One position of OpenAI's `logprobs.content`; the end of the text is the empty token."""

    def shown(candidate: int) -> dict[str, Any]:
        raw = backend.token_bytes(candidate)
        return {"token": raw.decode("utf-8", "replace"), "bytes": list(raw), "logprob": math.log(row[candidate])}

    best = np.argsort(-row, kind="stable")[:top].tolist()
    return {**shown(token), "top_logprobs": [shown(candidate) for candidate in best]}


def _identity(model: EmbeddedLLM | ChatEmbedded) -> dict[str, Any]:
    """What names the model in caches and traces."""
    return {
        "model_name": model.backend.name,
        "max_tokens": model.max_tokens,
        "temperature": model.temperature,
        "seed": model.seed,
    }
