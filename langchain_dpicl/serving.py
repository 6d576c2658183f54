"""Public models for released prompts: classifiers, and LangChain models over local and embedded engines.

Sees no private record.
"""

from __future__ import annotations

import codecs
import inspect
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, NoReturn, Self

import numpy as np
from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel, BaseLLM
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ChatMessage, convert_to_messages
from langchain_core.messages.ai import UsageMetadata
from langchain_core.outputs import (
    ChatGeneration,
    ChatGenerationChunk,
    ChatResult,
    Generation,
    GenerationChunk,
    LLMResult,
)
from langchain_core.prompt_values import ChatPromptValue, PromptValue, StringPromptValue
from langchain_core.prompts import BasePromptTemplate, MessagesPlaceholder
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.utils import Input, Output
from numpy.typing import NDArray
from pydantic import Field, model_validator
from typing_extensions import override

from langchain_dpicl._calls import did_you_mean
from langchain_dpicl._construction import HidesInput, tells_how_to_build
from langchain_dpicl._templates import formats_in
from langchain_dpicl.backends.base import Rows, cut_at_stop
from langchain_dpicl.backends.embedded import EmbeddedModel
from langchain_dpicl.backends.private_calls.log_guard import is_inside_call
from langchain_dpicl.backends.rows.label_rows import LabelRows, LabelScores
from langchain_dpicl.backends.sync_async import Call, EffectGenerator, LimitConcurrency, run_async, run_sync
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError, ModelCallError
from langchain_dpicl.options import LLM, LabelAnswers, option_of
from langchain_dpicl.privacy._validate import calls_at_once, check_int, check_real, fail
from langchain_dpicl.tasks import public_text, unread_parts

# An engine needs `generate`, whose `rng` gets one source of coins per prompt, `encode`, `count_tokens`, `token_bytes`,
# `eos` and `name`. Optional are `top_k` and `top_p` of its `generate`, `chat` with `render_chat(messages)`, which turns
# roles and contents into a prompt for `generate`, `ends_in_space(text)` where it puts a text into a frame of its own,
# `by_itself(action)`, through which private calls generate, and `fingerprint`, a text that tells it from other engines
# of its name.


@dataclass(frozen=True, slots=True)
class Prompt:
    """What an engine continues.

    Attributes:
      given: a text, or what the engine's `render_chat` made of messages.
      ends_in_space: whether the text so far ends in a space. Engines leave it out, as their words start with one, so
        that it is dropped from what they write.
    """

    given: str | Sequence[int]
    ends_in_space: bool


ROWS = 16
"""Prompts that are written together where a call brings many."""

_NEEDED = ("generate", "encode", "count_tokens", "token_bytes", "eos", "name")
_ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool"}
_STOCK = frozenset({"model", "timeout", "max_retries", "api_key", "base_url", "streaming"})
"""What LangChain's classes take for a server; a model in this process has no use for it."""
_FIELDS = ("max_tokens", "temperature", "top_k", "top_p", "seed")
_ASKED = (*_FIELDS, "logprobs", "top_logprobs")
"""The options of one call, besides `stop`."""
_PASSED_ON = _STOCK | {"stream", "ls_structured_output_format"}
"""What else may come with a call, without effect here: LangChain reads some of it, and passes all on."""
_NEVER = -9999.0
"""What OpenAI reports as the logarithm of a probability too small to name; JSON has no infinity."""
_MOST_SEED = 2**128 - 1
"""The largest seed, of a model and of a call."""


class ServedFields(HidesInput):
    """The fields that a served model has, chat or not."""

    max_tokens: int = Field(default=64, ge=1)
    temperature: float = Field(default=0.0, ge=0.0)
    top_k: int | None = Field(default=None, ge=1)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    seed: int | None = Field(default=None, ge=0, le=_MOST_SEED)
    stop: list[str] | None = None
    backend: Any = Field(exclude=True, repr=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, values: Any) -> Any:
        """Refuses names that are no field; LangChain's own models would ignore them."""
        known = set(cls.model_fields)
        unknown = [name for name in values if name not in known | _STOCK] if isinstance(values, dict) else []
        if unknown:
            own = known - {*BaseLLM.model_fields, *BaseChatModel.model_fields}
            expected = f"fields among {sorted(own)}, found another."
            raise ConfigurationError(f"{cls.__name__}: expected {expected} {did_you_mean(unknown[0], known)}".rstrip())
        return values

    @model_validator(mode="after")
    def _check_backend(self) -> Self:
        missing = [name for name in _NEEDED if not hasattr(self.backend, name)]
        if missing or isinstance(self.backend, type):
            kind = self.backend.__name__ if isinstance(self.backend, type) else type(self.backend).__name__
            msg = (
                f"expected a local engine as backend, found {kind} without {', '.join(missing) or 'an instance'}; "
                "pass HuggingFaceBackend(...) or EmbeddedModel(), or use from_path(...)"
            )
            raise ConfigurationError(msg)
        _sampling_of(self.backend, self.top_k, self.top_p)
        return self

    def get_token_ids(self, text: str) -> list[int]:
        """Returns the model's own tokens."""
        return list(self.backend.encode(text))

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """What names the model in caches and traces: LangChain's caches take models of equal parameters for one."""
        return {
            "model_name": self.backend.name,
            "engine": getattr(self.backend, "fingerprint", None),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "seed": self.seed,
            "own_stop": self.stop,  # LangChain writes the call's own under "stop"
        }

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> Any:
        """What tracers get: the engine's name, and who serves it."""
        params = super()._get_ls_params(stop=stop if stop is not None else self.stop, **kwargs)  # type: ignore[misc]
        return {"ls_model_name": self.backend.name, **params, "ls_provider": "dpicl"}


def load_served_model(kind: type[Any], path: Any, options: dict[str, Any]) -> Any:
    """Returns a served model of a local folder; what is no option of the engine is a field of the model.

    Raises:
      ConfigurationError: an option of neither.
    """
    from langchain_dpicl.backends.hf.backend import HuggingFaceBackend

    known = inspect.signature(HuggingFaceBackend).parameters.keys() - {"model"}
    fields = {name: value for name, value in options.items() if name not in known}
    if strange := sorted(fields.keys() - (kind.model_fields.keys() - {"backend"})):
        fitting = sorted({*known, *ServedFields.model_fields} - {"backend"})
        msg = f"expected options of the engine or the model ({', '.join(fitting)}), found {strange}"
        raise ConfigurationError(msg)
    engine = {name: value for name, value in options.items() if name in known}
    return kind(backend=HuggingFaceBackend(path, **engine), **fields)


def _sampling_of(engine: Any, top_k: int | None, top_p: float) -> dict[str, Any]:
    """Returns the sampling options that are not at their default.

    Raises:
      ConfigurationError: the engine does not have one of them.
    """
    sampling = {**({} if top_k is None else {"top_k": top_k}), **({} if top_p == 1 else {"top_p": top_p})}
    if strange := sorted(set(sampling) - set(inspect.signature(engine.generate).parameters)):
        msg = f"expected {engine.name} to be sampled by temperature alone, found {strange}; leave that out"
        raise ConfigurationError(msg)
    return sampling


@dataclass(frozen=True, slots=True)
class CallOptions:
    """What one call asks for: the model's fields, overruled by the call."""

    max_tokens: int
    temperature: float
    sampling: dict[str, Any]
    seed: int | None
    stop: tuple[str, ...]
    top_logprobs: int | None

    @classmethod
    def of(cls, model: ServedFields, stop: Sequence[str] | None, kwargs: Mapping[str, Any]) -> CallOptions:
        """Reads a call.

        Raises:
          ConfigurationError: an option that would have no effect, is out of range, or that the engine does not have.
        """
        given = [name for name, value in kwargs.items() if value is not None]
        if unknown := [name for name in given if name not in {*_ASKED, *_PASSED_ON}]:
            expected = f"options of a call among {sorted(_ASKED)}, found {sorted(unknown)}."
            hint = did_you_mean(unknown[0], _ASKED)
            raise ConfigurationError(f"{type(model).__name__}: expected {expected} {hint}".rstrip())

        def asked(name: str) -> Any:
            given = kwargs.get(name)
            return getattr(model, name) if given is None else given

        top_k, top_p = asked("top_k"), asked("top_p")
        sampling = _sampling_of(model.backend, top_k, top_p)
        if top_k is not None:
            check_int("top_k", top_k, low=1)
        check_real("top_p", top_p, low=0.0, low_open=True, high=1.0)
        seed, words = asked("seed"), (model.stop if stop is None else stop) or ()
        words = [words] if isinstance(words, str) else words  # OpenAI's API takes a text too
        if not isinstance(words, Sequence):
            raise fail("stop", "a text or a list of texts", type(words))
        for word in words:
            if not isinstance(word, str):
                raise fail("stop", "texts alone in the list", type(word))
        logprobs, top = kwargs.get("logprobs"), kwargs.get("top_logprobs")
        if isinstance(logprobs, int) and not isinstance(logprobs, bool):  # as completion models are asked
            logprobs, top = True, logprobs if top is None else top
        if top and not logprobs:
            raise fail("top_logprobs", "logprobs=True beside it", "none")
        return cls(
            max_tokens=check_int("max_tokens", asked("max_tokens"), low=1),
            temperature=check_real("temperature", asked("temperature"), low=0.0),
            sampling=sampling,
            seed=None if seed is None else check_int("seed", seed, low=0, high=_MOST_SEED),
            stop=tuple(word for word in words if word),
            top_logprobs=check_int("top_logprobs", top or 0, low=0) if logprobs else None,
        )

    def coins(self, prompts: Sequence[str | Sequence[int]]) -> list[np.random.Generator]:
        """Coins of the public sampling: with a seed those of a text are the same alone and beside others.

        The same prompt again, in one call, has other coins: it is asked again for another text.
        """
        from numpy.random import PCG64, Generator

        asked: Counter[Any] = Counter()
        coins = []
        for prompt in prompts:
            key: Any = prompt if isinstance(prompt, str) else tuple(prompt)
            seed = self.seed if self.seed is None or not asked[key] else [self.seed, asked[key]]
            coins.append(Generator(PCG64(seed)))
            asked[key] += 1
        return coins


@dataclass(frozen=True, slots=True)
class TextPiece:
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


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """A whole text."""

    text: str
    num_tokens: int
    info: dict[str, Any]

    @classmethod
    def of(cls, pieces: Sequence[TextPiece], wish: CallOptions) -> GeneratedText:
        """Joins the pieces."""
        info: dict[str, Any] = {"finish_reason": pieces[-1].finish_reason}
        if wish.top_logprobs is not None:
            info["logprobs"] = {"content": [entry for piece in pieces for entry in piece.entries]}
        return cls("".join([piece.text for piece in pieces]), sum([piece.num_tokens for piece in pieces]), info)


def write(backend: Any, prompt: Prompt, wish: CallOptions) -> Iterator[TextPiece]:
    """Yields one piece per token and a last one that says why the text ended.

    Text that may become a stop string is held back until it is known not to.
    """
    row = _TextInProgress(backend, prompt, wish)
    for tokens, shares in _steps(backend, [prompt.given], wish, wish.coins([prompt.given])):
        yield row.add(int(tokens[0]), shares[0])
        if row.finished:
            return
    yield row.end("length", 0)


def write_all(backend: Any, prompts: Sequence[Prompt], wish: CallOptions) -> list[GeneratedText]:
    """Returns one text per prompt."""
    texts: list[GeneratedText] = []
    coins = wish.coins([prompt.given for prompt in prompts])
    for first in range(0, len(prompts), ROWS):
        rows = slice(first, first + ROWS)
        block = partial(_write_together, backend, prompts[rows], wish, coins[rows])
        by_itself = getattr(backend, "by_itself", None) if is_inside_call() else None
        texts += block() if by_itself is None else by_itself(block)
    return texts


def _write_together(
    backend: Any, prompts: Sequence[Prompt], wish: CallOptions, coins: Sequence[np.random.Generator]
) -> list[GeneratedText]:
    rows = [_TextInProgress(backend, prompt, wish) for prompt in prompts]
    pieces: list[list[TextPiece]] = [[] for _ in prompts]
    for tokens, shares in _steps(backend, [prompt.given for prompt in prompts], wish, coins):
        for place in [place for place, row in enumerate(rows) if not row.finished]:
            pieces[place].append(rows[place].add(int(tokens[place]), shares[place]))
        if all(row.finished for row in rows):
            break
    for place in [place for place, row in enumerate(rows) if not row.finished]:
        pieces[place].append(rows[place].end("length", 0))
    return [GeneratedText.of(one, wish) for one in pieces]


def _steps(
    backend: Any,
    texts: Sequence[str | Sequence[int]],
    wish: CallOptions,
    coins: Sequence[np.random.Generator],
) -> Iterator[tuple[Any, Any]]:
    """Yields at most `max_tokens` steps; fewer where the engine has no room for more."""
    steps = backend.generate(texts, temperature=wish.temperature, rng=coins, **wish.sampling)
    for _, step in zip(range(wish.max_tokens), steps, strict=False):
        yield step


class _TextInProgress:
    """One text that grows by tokens."""

    def __init__(self, backend: Any, prompt: Prompt, wish: CallOptions) -> None:
        self._backend = backend
        self._wish = wish
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._drops_space = prompt.ends_in_space
        self.finished = False

    def add(self, token: int, shares: NDArray[np.float64]) -> TextPiece:
        """Returns what a token adds; -1 says that the context has ended, while that of others goes on."""
        if token < 0:
            return self.end("length", 0)
        if not shares.any():
            raise ModelCallError(f"{self._backend.name} gave no numbers for a prompt; try another dtype or model")
        if token == self._backend.eos:
            return self.end("stop", 1)
        self._held += self._decoder.decode(self._backend.token_bytes(token))
        if self._drops_space and self._held:
            self._held, self._drops_space = self._held.removeprefix(" "), False
        if (short := cut_at_stop(self._held, self._wish.stop)) != self._held:
            self.finished = True
            return TextPiece(short, finish_reason="stop")
        entries = () if self._wish.top_logprobs is None else (self._entry(token, shares),)
        ready = len(self._held) - _num_undecided(self._held, self._wish.stop)
        piece, self._held = TextPiece(self._held[:ready], entries=entries), self._held[ready:]
        return piece

    def end(self, reason: str, num_tokens: int) -> TextPiece:
        """Returns what is left."""
        self.finished = True
        return TextPiece(self._held + self._decoder.decode(b"", final=True), num_tokens, finish_reason=reason)

    def _entry(self, token: int, shares: NDArray[np.float64]) -> dict[str, Any]:
        """One position of OpenAI's `logprobs.content`; the end of the text is the empty token."""

        def shown(candidate: int) -> dict[str, Any]:
            raw = self._backend.token_bytes(candidate)
            chance = math.log(shares[candidate]) if shares[candidate] > 0 else _NEVER
            return {"token": raw.decode("utf-8", "replace"), "bytes": list(raw), "logprob": chance}

        best = np.argsort(-shares, kind="stable")[: self._wish.top_logprobs]
        return {**shown(token), "top_logprobs": [shown(int(one)) for one in best if shares[one] > 0]}


def _num_undecided(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    lengths = range(min(len(text), max(map(len, stop), default=1) - 1), 0, -1)
    return next((length for length in lengths if any(word.startswith(text[-length:]) for word in stop)), 0)


def is_chat(backend: Any) -> bool:
    """Whether an engine takes a prompt as a user's message."""
    return bool(getattr(backend, "chat", False)) and hasattr(backend, "render_chat")


def text_prompt(backend: Any, text: str) -> Prompt:
    """Returns a text as the engine reads it: as a message where it has a chat template."""
    framed = getattr(backend, "ends_in_space", None)
    ends_in_space = text.endswith(" ") and not is_chat(backend) if framed is None else bool(framed(text))
    return Prompt(text, ends_in_space=ends_in_space)


def chat_prompt(backend: Any, messages: Sequence[BaseMessage]) -> Prompt:
    """Returns messages as the engine reads them: by its chat template, or as one text where it has none.

    Text alone is read. Where a message is a picture alone, or nothing was said, an answer would be to no question.
    """
    silent = [message for message in messages if not str(message.text).strip()]
    unread = [kind for message in silent for kind in unread_parts(message)]
    if unread or not messages:
        raise fail("messages", "text", unread)
    if not is_chat(backend):
        return text_prompt(backend, flatten_messages(messages))
    turns = [{"role": _role(message), "content": str(message.text)} for message in messages]
    continued = bool(turns) and turns[-1]["role"] == "assistant" and turns[-1]["content"].endswith(" ")
    if continued:
        turns[-1]["content"] = turns[-1]["content"].rstrip(" ")
    return Prompt(backend.render_chat(turns), ends_in_space=continued)


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    kind = message.type.removesuffix("MessageChunk").lower()
    if kind not in _ROLES:
        raise ConfigurationError(f"expected messages by {sorted(_ROLES)}, found one of type {message.type!r}")
    return _ROLES[kind]


def num_read(backend: Any, prompt: Prompt) -> int:
    """Returns the number of tokens of a prompt."""
    given = prompt.given
    return int(backend.count_tokens(given)) if isinstance(given, str) else len(given)


def flatten_messages(messages: Sequence[BaseMessage]) -> str:
    r"""Returns the one prompt that a chat model without a chat template continues.

    Contents are joined by blank lines; an AI message stands on the line after the message it answers. Where earlier AI
    messages show how answers look, the answer asked for starts on a line of its own; otherwise the model continues the
    last message where it ends. A last message by the AI is continued, too: on its own line, or, where no earlier AI
    message shows that, behind the message it answers.

    >>> from langchain_core.messages import AIMessage, HumanMessage
    >>> flatten_messages([HumanMessage("red"), AIMessage("colour"), HumanMessage("blue")])
    'red\ncolour\n\nblue\n'
    """
    prompt = ""
    answered = any(isinstance(message, AIMessage) for message in messages[:-1])
    for number, message in enumerate(messages):
        text = str(message.text)
        if number and isinstance(message, AIMessage):
            is_apart = not text or text[0].isspace() or prompt[-1:].isspace()
            prompt += "\n" if answered else "" if is_apart else " "
        elif number:
            prompt += "\n\n"
        prompt += text
    return prompt + "\n" if answered and not isinstance(messages[-1], AIMessage) else prompt


# Private components take the engine from `backend` and use it without callbacks, traces and caches. So one model in
# memory generates privately and serves public prompts.


class _ServedLLM(ServedFields, BaseLLM):
    """A completion model around an engine."""

    def generate(self, *args: Any, **kwargs: Any) -> LLMResult:
        """Returns texts, as `BaseLLM.generate`."""
        model, kwargs = self._of_call(kwargs)
        return super(_ServedLLM, model).generate(*args, **kwargs)

    async def agenerate(self, *args: Any, **kwargs: Any) -> LLMResult:
        """Async twin of `generate`."""
        model, kwargs = self._of_call(kwargs)
        return await super(_ServedLLM, model).agenerate(*args, **kwargs)

    def _of_call(self, kwargs: Mapping[str, Any]) -> tuple[Self, dict[str, Any]]:
        """Returns this model with the options of a call as its fields, and what remains of them.

        LangChain's cache tells completion models apart by their fields, and does not look at the options of a call.
        """
        fields = {name: kwargs[name] for name in _FIELDS if kwargs.get(name) is not None}
        logprobs = kwargs.get("logprobs")
        if logprobs is not None and logprobs is not False:  # 0 asks for those of the chosen tokens
            fields["cache"] = False
        model = self.model_copy(update=fields) if fields else self
        return model, {name: value for name, value in kwargs.items() if name not in _FIELDS}

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        del run_manager
        asked = [text_prompt(self.backend, prompt) for prompt in prompts]
        texts = write_all(self.backend, asked, CallOptions.of(self, stop, kwargs))
        read, written = sum(map(self.backend.count_tokens, prompts)), sum(text.num_tokens for text in texts)
        usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        return LLMResult(
            generations=[[Generation(text=text.text, generation_info=text.info)] for text in texts],
            llm_output={**self._identifying_params, "token_usage": usage},
        )

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        for piece in write(self.backend, text_prompt(self.backend, prompt), CallOptions.of(self, stop, kwargs)):
            chunk = GenerationChunk(text=piece.text, generation_info=piece.info())
            if run_manager:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk


class _ServedChat(ServedFields, BaseChatModel):
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
        [text] = write_all(self.backend, [prompt], CallOptions.of(self, stop, kwargs))
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
        for piece in write(self.backend, prompt, CallOptions.of(self, stop, kwargs)):
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
      seed: of each text's sampling at temperature > 0, which gives no privacy; None: another sample each time. A model
        in half precision may write otherwise beside other prompts.
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
        model: Self = load_served_model(cls, path, {"chat": False, **options})
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
      seed: of each text's sampling at temperature > 0, which gives no privacy; None: another sample each time. A model
        in half precision may write otherwise beside other prompts.
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
        model: Self = load_served_model(cls, path, options)
        return model


class EmbeddedLLM(_ServedLLM):
    r"""The embedded model as a completion model: it writes keywords, and reads its demonstrations.

    Do not judge a task by its answers; docs/embedded-model.md shows what it can do, in numbers.

    It writes until the end of its segment (a blank line), a stop string or `max_tokens`.

    Args:
      max_tokens: most tokens of one completion; also per call, `model.bind(max_tokens=...)`.
      temperature: 0 takes the likeliest token; also per call.
      seed: of each text's sampling at temperature > 0, which gives no privacy; None: another sample each time.
      top_k: of local models; refused here, as the engine samples by temperature alone.
      top_p: as `top_k`.
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
      seed: of each text's sampling at temperature > 0, which gives no privacy; None: another sample each time.
      top_k: of local models; refused here, as the engine samples by temperature alone.
      top_p: as `top_k`.
      stop: strings that end an answer, where a call brings none.
      backend: the engine; by default the one embedded model.
    """

    backend: Any = Field(default_factory=EmbeddedModel, exclude=True, repr=False)

    @property
    def _llm_type(self) -> str:
        return "dpicl-chat-embedded"


def _usage(read: int, written: int) -> UsageMetadata:
    return UsageMetadata(input_tokens=read, output_tokens=written, total_tokens=read + written)


CONTENT_FREE = ("N/A", "", "[MASK]")
"""The content-free inputs of Zhao et al. (2021)."""

_MOST_KEPT = 192  # scores after content-free prompts: 64 calibrations with the three inputs above


class PublicRunnable(Runnable[Input, Output]):
    """Base of Runnables that answer a batch of public inputs in one walk; subclasses implement `_walk`."""

    def _walk(
        self, inputs: Sequence[Input], configs: Sequence[RunnableConfig], *, keep_errors: bool = False
    ) -> EffectGenerator[list[Any]]:
        """Returns the answer to each input, or what is wrong with it (an effect generator)."""
        raise NotImplementedError

    def _check_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Refuses what a call brings beside its inputs; here it is ignored."""

    @override
    def invoke(self, input: Input, config: RunnableConfig | None = None, **kwargs: Any) -> Output:
        return self.batch([input], config, **kwargs)[0]

    @override
    async def ainvoke(self, input: Input, config: RunnableConfig | None = None, **kwargs: Any) -> Output:
        return (await self.abatch([input], config, **kwargs))[0]

    @override
    def batch(
        self,
        inputs: list[Input],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any | None,
    ) -> list[Output]:
        listed, kept = self._checked(inputs, config, kwargs), return_exceptions
        return self._batch_with_config(self._answered, listed, config, return_exceptions=kept, keep_errors=kept)

    @override
    async def abatch(
        self,
        inputs: list[Input],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any | None,
    ) -> list[Output]:
        listed, kept = self._checked(inputs, config, kwargs), return_exceptions
        return await self._abatch_with_config(self._aanswered, listed, config, return_exceptions=kept, keep_errors=kept)

    def _checked(self, inputs: Sequence[Input], config: Any, arguments: Mapping[str, Any]) -> list[Input]:
        """Returns the inputs of a call; refuses an invalid config and what else it cannot take."""
        from langchain_dpicl.budget.handler import check_configs  # here: the models above are imported without a budget

        check_configs(config)
        self._check_arguments(arguments)
        return list(_listed(inputs))

    # LangChain passes a config only beside a run manager.
    def _answered(
        self, inputs: list[Input], run_manager: Any, config: list[RunnableConfig], **options: Any
    ) -> list[Any]:
        del run_manager
        return run_sync(self._walk(inputs, config, **options))

    async def _aanswered(
        self, inputs: list[Input], run_manager: Any, config: list[RunnableConfig], **options: Any
    ) -> list[Any]:
        del run_manager
        return await run_async(self._walk(inputs, config, **options))


@tells_how_to_build("LabelClassifier(llm, labels=..., prompt=..., ...)")
class LabelClassifier(PublicRunnable[Any, str]):
    """A Runnable that chooses labels by their likelihood after a prompt; batches are scored as one batch.

    With `prompt`, the input is what the prompt takes, and answers are calibrated where that helps. Without, the input
    is what a prompt gives (a prompt value, messages or a text), as in `prompt | LabelClassifier(...)`.

    How labels are scored depends on the model, as in votes; `kind` names it, see `LabelRows`:

    - "whole labels": engines that score complete texts give the likelihood of the whole label.
    - "decisions": `OpenAIDecisions` gives a probability for every label.
    - "first tokens": models that report top tokens give the probability of the tokens that begin one label alone.
    - "text votes": models that only write text give 1 to the label they name and 0 to the others.

    An answer that names no label (a refusal, or another text) is an error unless `LabelAnswers(other_label=)` is one of
    the labels; that of a content-free input is left out of the calibration. A call that failed is always an error.

    Args:
      llm: an engine, an object that carries one, a LangChain model, or its name; see
        `backends.resolve.as_choice_backend`.
      labels: at least two distinct labels, as they will be returned.
      prompt: the template of the input, public.
      verbalizers: label to the text, or texts, that stand for it, verbatim; by default a space and the label.
      answers: a `LabelAnswers`, of which a classifier takes `votes` ("hard" or "text"), `calibrate`, `content_free` and
        `other_label`. `calibrate=None`: where there is a prompt of one variable that the model continues ("whole
        labels", "first tokens"); decision models are asked a question, and votes are not probabilities. None: the
        three content-free inputs of Zhao et al.

    Raises:
      ConfigurationError: labels, verbalizers or options are unusable, or what cannot be calibrated is to be.
      CapabilityError: the model has neither scores of texts nor logprobs, and `votes` is not "text".
      ModelCallError: the model could not be reached, or a local one would cut the prompt.

    Source: Zhao et al. (2021), Calibrate Before Use, section 4.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        labels: Sequence[str],
        prompt: BasePromptTemplate[Any] | None = None,
        verbalizers: Mapping[str, str | Sequence[str]] | None = None,
        answers: LabelAnswers | None = None,
    ) -> None:
        # Here: the models above are imported without what reads labels.
        from langchain_dpicl.backends.resolve import as_choice_backend
        from langchain_dpicl.tasks import distinct_texts, texts_of

        options = LabelAnswers(content_free=CONTENT_FREE) if answers is None else answers
        self.labels = distinct_texts("labels", labels, least=2)
        if prompt is not None and not hasattr(prompt, "input_variables"):
            advice = "Make one, such as with PromptTemplate.from_template(...)."
            raise fail("prompt", "a prompt template, or None", type(prompt).__name__, advice)
        self.prompt = prompt
        _check_options(option_of("answers", options, LabelAnswers), self.labels)
        is_named = answers is not None and answers.other_label in self.labels
        self._otherwise = options.other_label if is_named else None
        engine = as_choice_backend(llm, votes="text" if options.votes == "text" else None)
        self._rows = LabelRows(engine, list(texts_of(self.labels, verbalizers).values()), calibrate=False)
        # The default depends on how the model scores labels, which is known only now.
        self.content_free = options.content_free if self._calibrates(options) else ()
        self._known: dict[str, LabelScores] = {}

    @property
    def kind(self) -> str:
        """How labels are scored: "whole labels", "decisions", "first tokens" or "text votes"."""
        return self._rows.kind

    @property
    def calibrates(self) -> bool:
        """Whether probabilities are divided by those on content-free inputs."""
        return bool(self.content_free)

    def probabilities(self, inputs: Sequence[Any]) -> Rows:
        """Returns float64[n, labels]: label probabilities of each input, calibrated as configured.

        Args:
          inputs: as of `batch`.

        Raises:
          ModelCallError: a model call failed, or an answer names no label.
        """
        return self._stack(run_sync(self._scored(_rendered(self.prompt, _listed(inputs)))))

    async def aprobabilities(self, inputs: Sequence[Any]) -> Rows:
        """Asynchronous version of `probabilities`."""
        return self._stack(await run_async(self._scored(_rendered(self.prompt, _listed(inputs)))))

    def __repr__(self) -> str:
        return f"LabelClassifier(labels={self.labels!r}, kind={self.kind!r}, calibrates={self.calibrates})"

    # -- inside ----------------------------------------------------------------------------------------------------

    def _calibrates(self, answers: LabelAnswers) -> bool:
        """Returns whether content-free inputs are asked too; refuses what cannot be calibrated but is to be."""
        if answers.calibrate is False:
            return False
        fault = ""
        if self.prompt is None:
            fault = "prompt=, whose content-free version shows the bias"
        elif self.kind == "text votes":
            fault = "a model with logprobs (votes are not probabilities)"
        elif len(self.prompt.input_variables) != 1:
            fault = f"one input variable, found {sorted(self.prompt.input_variables)}: fix the others by prompt.partial"
        elif messages := [*_placeholders(self.prompt)]:
            fault = f"a variable of text, found {messages[0]!r} of messages"
        if fault and answers.calibrate:
            raise fail("LabelAnswers.calibrate", f"None or False, or {fault}", True)
        if not answers.content_free:
            raise fail("LabelAnswers.content_free", "at least one text", answers.content_free)
        return not fault and (answers.calibrate or self.kind != "decisions")

    def _walk(
        self, inputs: Sequence[Any], configs: Sequence[RunnableConfig], *, keep_errors: bool = False
    ) -> EffectGenerator[list[Exception | str]]:
        asked = _rendered(self.prompt, inputs, configs)
        rows = yield from self._scored(asked, calls_at_once(configs[0]), keep_errors=keep_errors)
        return [row if isinstance(row, Exception) else self.labels[row.index(max(row))] for row in rows]

    def _scored(
        self,
        inputs: EffectGenerator[list[str | Exception]],
        limit: int | None = None,
        *,
        keep_errors: bool = False,
    ) -> EffectGenerator[list[LabelScores | Exception]]:
        """Returns the label probabilities of each input, or what is wrong with it (an effect generator)."""
        values = yield from inputs
        texts = [value for value in values if isinstance(value, str)]
        # Rendered every time: an `example_selector` of the template may give content-free inputs other examples now.
        free: list[Any] = (yield from _rendered(self.prompt, self.content_free)) if texts else []
        kept = self._known  # replaced as a whole, by any thread
        known = {text: kept[text] for text in free if text in kept}
        wanted = [text for text in (*free, *texts) if text not in known]
        found: dict[str, LabelScores | ModelCallError] = yield LimitConcurrency(
            self._rows.request_public_texts(wanted, is_whole=True, keep_errors=keep_errors), limit
        )
        found |= known
        base = [_scores_or_raise(found[text]) for text in free]
        self._known = dict([*self._known.items(), *zip(free, base, strict=True)][-_MOST_KEPT:])
        return [value if isinstance(value, Exception) else self._read(found[value], base) for value in values]

    def _read(self, scores: LabelScores | ModelCallError, free: Sequence[LabelScores]) -> LabelScores | Exception:
        """Returns the probabilities of one input from its scores and those of its content-free versions."""
        if isinstance(scores, ModelCallError):
            return scores
        calibrated = self._rows.calibrated(scores, free)
        if (total := sum(calibrated)) > 0.0:
            return [value / total for value in calibrated]
        if self._otherwise is not None:
            return [float(label == self._otherwise) for label in self.labels]
        return ModelCallError(
            f"the answer to a public prompt names none of the labels {self.labels!r}. Ask for a label in the prompt, "
            "which has to show verbalizers that the model does not write by itself, or give "
            "LabelAnswers(other_label=...), the label that such an answer counts as."
        )

    def _stack(self, rows: Sequence[LabelScores | Exception]) -> Rows:
        scores = [_scores_or_raise(row) for row in rows]
        return np.array(scores, dtype=np.float64).reshape(len(rows), len(self.labels))


def _scores_or_raise(scores: LabelScores | Exception) -> LabelScores:
    if isinstance(scores, Exception):
        raise scores
    return scores


def _rendered(
    prompt: BasePromptTemplate[Any] | None, inputs: Sequence[Any], configs: Sequence[RunnableConfig] | None = None
) -> EffectGenerator[list[str | Exception]]:
    """Renders inputs to texts; with configs, each as a run of the template, where an error stands for its input."""
    texts: list[str | Exception] = []
    for item, config in zip(inputs, configs or repeat(None)):  # noqa: B905  `repeat` has no end
        try:
            value: PromptValue = _prompt_value(item) if prompt is None else (yield _filled(prompt, item, config))
            texts.append(_text_of(value))
        except Exception as error:  # an example selector may raise anything
            if config is None:
                raise
            texts.append(error)
    return texts


def _filled(prompt: BasePromptTemplate[Any], item: Any, config: RunnableConfig | None) -> Call:
    item = _with_texts(prompt, item)
    if config is not None:
        return Call(partial(prompt.invoke, item, config), partial(prompt.ainvoke, item, config))
    named = _variables(prompt, item)
    return Call(partial(prompt.format_prompt, **named), partial(prompt.aformat_prompt, **named))


def _check_options(answers: LabelAnswers, labels: tuple[str, ...]) -> None:
    """Refuses options of answers that a classifier has no use for."""
    if others := sorted(answers.to_dict().keys() - {"votes", "calibrate", "content_free", "other_label"}):
        raise fail("answers", "votes, calibrate, content_free and other_label alone, for a classifier", others)
    if answers.votes == "soft":
        raise fail("LabelAnswers.votes", "'hard' or 'text' for a classifier", answers.votes)
    if answers.other_label not in {"", LabelAnswers().other_label, *labels}:
        raise fail("LabelAnswers.other_label", f"one of {labels!r}", answers.other_label)


def _listed(values: Sequence[Any]) -> Sequence[Any]:
    """Returns `values`; refuses one text or dict, which would be iterated by letter or key."""
    if isinstance(values, (str, bytes, Mapping)):
        raise fail("inputs", "a list", type(values).__name__, "Put a single value into a list.")
    return values


def _prompt_value(item: Any) -> PromptValue:
    """Returns what a prompt gives: a prompt value, messages, or a text."""
    if isinstance(item, PromptValue):
        return item
    if isinstance(item, str):
        return StringPromptValue(text=item)
    if isinstance(item, Sequence):
        return ChatPromptValue(messages=convert_to_messages(item))
    advice = "Give the classifier prompt=, or stand it behind a prompt."
    raise fail("input", "a prompt value, messages or a text", type(item).__name__, advice)


def _text_of(value: PromptValue) -> str:
    # A conversation is scored where the model's turn begins, in the format of LangChain's `to_string`.
    return value.to_string() + ("\nAI:" if isinstance(value, ChatPromptValue) else "")


def _with_texts(prompt: BasePromptTemplate[Any], item: Any) -> Any:
    """Returns an input with the text of each message or document: an f-string would write its `repr`."""
    if any(language != "f-string" for language in formats_in(prompt)):
        return item  # other languages read parts of what they are given
    names = set(prompt.input_variables) - set(_placeholders(prompt))
    if not isinstance(item, Mapping):
        return (
            public_text("input", item) if len(names) == len(prompt.input_variables) == 1 and _has_text(item) else item
        )
    texts = {name: public_text(f"input[{name!r}]", item[name]) for name in names & set(item) if _has_text(item[name])}
    return {**item, **texts} if texts else item


def _has_text(value: Any) -> bool:
    listed = value if isinstance(value, list | tuple) and value else [value]
    return all(isinstance(one, BaseMessage | PromptValue | Document) for one in listed)


def _placeholders(prompt: object) -> Iterator[str]:
    """Yields the variables that take messages, of a chat template and of those in it."""
    for part in getattr(prompt, "messages", None) or ():
        if isinstance(part, MessagesPlaceholder):
            yield part.variable_name
        else:
            yield from _placeholders(part)


def _variables(prompt: BasePromptTemplate[Any], item: Any) -> Mapping[str, Any]:
    if isinstance(item, Mapping):
        return item
    if len(names := prompt.input_variables) != 1:
        raise fail("inputs", f"dicts of {sorted(names)}", type(item).__name__)
    return {names[0]: item}
