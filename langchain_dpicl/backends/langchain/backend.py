"""Wraps a LangChain model that reports top-k log-probabilities as an engine, and counts with its tokenizer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from langchain_dpicl.backends.base import Rows, Token, TokenSession, check_whole
from langchain_dpicl.backends.langchain.logprobs import (
    EOS,
    EOS_TEXTS,
    TOP_K,
    Continuation,
    Prefill,
    Probabilities,
    ProbeResult,
    ReplyFormat,
    is_whole,
    probe,
    refuse_partial_vocabulary,
    to_rows,
    top_k_of,
)
from langchain_dpicl.backends.langchain.texts import TextEngine
from langchain_dpicl.backends.langchain.tokenizer import PublicTokenizer, Tokenizer
from langchain_dpicl.backends.private_calls.call import (
    CallPool,
    OpaqueValue,
    Reply,
    Request,
    RetryPolicy,
    SilentModel,
    read_silently,
    silence,
    unwrap,
)
from langchain_dpicl.backends.private_calls.public_calls import answer_or_raise
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError, ModelCallError

_Report: TypeAlias = OpaqueValue[list[Probabilities]]
"""What the model reports after each private prompt."""


class LangChainBackend(TextEngine):
    """Next-token probabilities of a LangChain model, called silently.

    Formal guarantees:
      - Row i of a session is computed from prompt i, the prefix and the domain alone; it is >= 0 and sums to <= 1.
      - A failed, filtered, refused or unreadable answer is a zero row ("" as a completion); the content of a prompt
        raises nothing.
      - No prompt and no answer reaches a LangChain callback, tracer, cache, debug output or exception.

    Args:
      llm: a chat or completion model, bound or not; bound arguments are sent with every call, but for those that are
        ours: temperature, max_tokens, logprobs and top_logprobs are set, stop, stream, n, best_of and echo left out.
        None of these belongs into `extra_body` or `model_kwargs`, which can override a call: `n` would multiply its
        cost, a temperature change the rows of some servers, and a stop read as the end.
      continuation: how a prefix is continued; None: "completion" for completion models, "prefill" for chat models.
      prefill: how the server is asked to continue an assistant message: "plain" (it does so by itself, as
        llama.cpp), "vllm" (by `continue_final_message`); not checked. None: the first of them that the probe
        sees working.
      max_top_k: top tokens that one call reports; asked for in every call, and the probe must bring them, or else a
        whole vocabulary that is smaller. None: what the probe brings of 20, or of the largest of 10, 5 and 2 that the
        server does not reject; at least 2.
      max_concurrency: calls in flight at once, over all sessions, threads and event loops; None: 32.
      full_vocabulary: how many tokens to ask for to get the whole vocabulary, where the server allows it (llama.cpp:
        the vocabulary size; vLLM started with `--max-logprobs -1`: -1), in place of `max_top_k`. None: a top-k engine.
      eos_texts: how the provider spells the end of a text, in place of the known spellings of many model families.
      tokenizer: the model's tokenizer (a `tiktoken.Encoding`, one of transformers, or anything with `encode`), or the
        name of an encoding of tiktoken, loaded when it is needed. It turns token ids into bytes where the server
        reports ids, counts for `count_tokens`, and says with which tokens labels begin. None: ids stay unread, text is
        counted in UTF-8 bytes, and first tokens are guessed.
      text_options: further arguments of `complete`; they go before temperature 0, and None leaves one out.
      retry: how long each row's call is waited for.

    Raises:
      CapabilityError: a probe with public text shows no logprobs, those of thoughts, fewer than `max_top_k`, or no
        continuation; or it is a decision model.
      ModelCallError: the probe got no answer; an unreachable or busy server is asked twice, with a wait of at most 2
        seconds. The client's own retries and timeout come on top.
      UnsilencableModelError: see `silence`.
      ConfigurationError: the continuation does not suit the kind of model, a number or option is not what is expected
        here, or the tokenizer is none or cannot be loaded.
    """

    def __init__(
        self,
        llm: Any,
        *,
        continuation: Continuation | None = None,
        prefill: Prefill | None = None,
        max_top_k: int | None = None,
        max_concurrency: int | None = None,
        full_vocabulary: int | None = None,
        eos_texts: Iterable[str] = EOS_TEXTS,
        tokenizer: Tokenizer | str | None = None,
        text_options: Mapping[str, Any] | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        ends, self._text_options = _ends(eos_texts), _options(text_options)
        self._model = silence(llm)
        self._tokenizer = None if tokenizer is None else PublicTokenizer(tokenizer)
        self._calls = CallPool(self._model, retry or RetryPolicy(), max_concurrency)
        numbers = _numbers_to_ask(max_top_k, full_vocabulary)
        continuation = _continuation(self._model, continuation)
        wire = ReplyFormat(
            is_chat=self._model.is_chat,
            continuation=continuation,
            prefill=_prefill(continuation, prefill),
            asked=numbers[0],
            extra_body=_extra_body(llm),
            eos_texts=ends,
            spell=self._tokenizer.spelled if self._tokenizer else None,
        )
        seen = probe(
            self._calls,
            wire,
            kind=type(unwrap(llm)[0]).__name__,
            numbers=numbers,
            load=self._tokenizer.load if self._tokenizer else lambda: None,
            is_full=full_vocabulary is not None,
        )
        self._wire = seen.wire
        self._vocabulary = tuple(sorted({*seen.found, EOS}))
        self._max_top_k = self._reported(seen, is_given=max_top_k is not None, is_full=full_vocabulary is not None)

    def __repr__(self) -> str:
        goes_on = f"{self.continuation!r}" + (f", prefill={self.prefill!r}" if self.prefill else "")
        return f"LangChainBackend({self.name!r}, continuation={goes_on}, max_top_k={self._max_top_k})"

    @property
    def continuation(self) -> Continuation:
        """How a prefix is continued; "instruct" is approximate and belongs in reports."""
        return self._wire.continuation

    @property
    def prefill(self) -> Prefill | None:
        """How the server is asked to continue an assistant message; None where none is continued."""
        return self._wire.prefill

    @property
    def max_top_k(self) -> int | None:
        """How many top tokens one call reports; None: the whole vocabulary."""
        return self._max_top_k

    @property
    def eos(self) -> Token:
        """The key of the end of the text."""
        return EOS

    def vocabulary(self) -> Sequence[Token]:
        """Returns every token that is complete UTF-8, as the probe saw it, and the end of the text."""
        if self._max_top_k is not None:
            raise CapabilityError(
                f"{self.name} reports its top {self._max_top_k} tokens only; "
                "use a public top-k, or give full_vocabulary= where the server reports every token"
            )
        return self._vocabulary

    def top_tokens(self, prompt: str, prefix: Sequence[Token], *, top_k: int) -> list[tuple[Token, float]]:
        """Returns up to `top_k` (token, probability) pairs after a public prompt, likeliest first.

        Raises:
          ModelCallError: the call failed, or its answer has no logprobs.
          CapabilityError: `top_k` is above `max_top_k`.
        """
        text = self.decode(prefix)
        ranked = self._ranked(self._calls.one(self._public_request(prompt, text, top_k)), text, is_whole)
        return ranked[:top_k]

    async def atop_tokens(self, prompt: str, prefix: Sequence[Token], *, top_k: int) -> list[tuple[Token, float]]:
        """Async twin of `top_tokens`."""
        text = self.decode(prefix)
        ranked = self._ranked(await self._calls.aone(self._public_request(prompt, text, top_k)), text, is_whole)
        return ranked[:top_k]

    def first_tokens(self, prompt: str) -> list[tuple[Token, float]]:
        """Returns all that is reported after a prompt, likeliest first, parts of characters among it.

        Args:
          prompt: public.

        Raises:
          ModelCallError: the call failed, or its answer has no logprobs.
        """
        return self._ranked(self._calls.one(self._wire.request(OpaqueValue(prompt), "", explain="kind")), "")

    async def afirst_tokens(self, prompt: str) -> list[tuple[Token, float]]:
        """Async twin of `first_tokens`, with its `prompt`."""
        return self._ranked(await self._calls.aone(self._wire.request(OpaqueValue(prompt), "", explain="kind")), "")

    def open(self, prompts: Sequence[str], prefix: Sequence[Token]) -> TokenSession:
        """Starts a session on private prompts, each continued by the same released prefix."""
        boxes = [OpaqueValue(prompt) for prompt in prompts]
        del prompts  # from here on this frame holds boxes only
        return _LangChainSession(boxes, prefix, report=self._report, areport=self._areport)

    def decode(self, tokens: Sequence[Token]) -> str:
        """Returns the text of tokens; the end decodes to nothing, invalid UTF-8 is replaced."""
        return _bytes(tokens).decode("utf-8", "replace")

    @property
    def is_chat(self) -> bool:
        """Whether the model takes messages, so that its answers begin without a space."""
        return self._model.is_chat

    def spell(self, text: str) -> list[Token]:
        """Returns the tokens of a public text, U+FFFD for one that the tokenizer does not spell.

        Is no `encode`, by which an engine says that a server reports just these tokens.

        Args:
          text: public.

        Raises:
          CapabilityError: the tokenizer is unknown, only counts, or cannot be loaded.
        """
        if self._tokenizer is None:
            raise CapabilityError(f"the tokenizer of {self.name} is unknown; give LangChainBackend(llm, tokenizer=...)")
        try:
            return [*self._tokenizer.tokens(text)]
        except ConfigurationError as error:
            raise CapabilityError(str(error)) from None

    def count_tokens(self, text: str) -> int:
        """Returns the number of tokens of a public text; its UTF-8 bytes where the tokenizer is unknown.

        Plans, generation and accounting do not use it.
        """
        return self._tokenizer.count(text) if self._tokenizer else len(text.encode("utf-8", "replace"))

    def _report(self, prompts: Sequence[OpaqueValue[str]], prefix: str) -> _Report:
        replies = self._calls.many([self._wire.request(prompt, prefix) for prompt in prompts])
        return OpaqueValue([read_silently(partial(self._read, reply, prefix)) or {} for reply in replies])

    async def _areport(self, prompts: Sequence[OpaqueValue[str]], prefix: str) -> _Report:
        replies = await self._calls.amany([self._wire.request(prompt, prefix) for prompt in prompts])
        return OpaqueValue([read_silently(partial(self._read, reply, prefix)) or {} for reply in replies])

    def _read(self, reply: Reply, prefix: str) -> Probabilities:
        """Reads a private answer; foreign objects in it may raise at any access, also later, and are refused."""
        reported = self._wire.read(reply, prefix)
        return reported if all(type(key) is bytes for key in reported) else {}

    def _public_request(self, prompt: str, prefix: str, top_k: int) -> Request:
        if self._max_top_k is not None and top_k > self._max_top_k:
            raise CapabilityError(
                f"expected top_k <= {self._max_top_k} (what {self.name} reports), found {top_k}; take fewer candidates"
            )
        return self._wire.request(OpaqueValue(prompt), prefix, explain="kind")

    def _ranked(
        self, reply: Reply, prefix: str, is_wanted: Callable[[bytes], bool] = lambda _: True
    ) -> list[tuple[Token, float]]:
        answer_or_raise(self.name, reply)
        reported = {token: value for token, value in self._wire.read(reply, prefix).items() if is_wanted(token)}
        if not reported:
            raise ModelCallError(f"a public call to {self.name} brought no logprobs; check the model and call again")
        return sorted(reported.items(), key=lambda item: (-item[1], item[0]))

    def _reported(self, seen: ProbeResult, *, is_given: bool, is_full: bool) -> int | None:
        if not is_full:
            return top_k_of(self.name, seen.entries, seen.wire.asked, is_given=is_given)
        refuse_partial_vocabulary(self.name, seen.entries, seen.wire.asked)
        return None


class _LangChainSession:
    """Private prompts, hidden, and the prefix they share."""

    def __init__(
        self,
        prompts: Sequence[OpaqueValue[str]],
        prefix: Sequence[Token],
        *,
        report: Callable[[Sequence[OpaqueValue[str]], str], _Report],
        areport: Callable[[Sequence[OpaqueValue[str]], str], Awaitable[_Report]],
    ) -> None:
        self._prompts: tuple[OpaqueValue[str], ...] | None = tuple(prompts)
        self._prefix = _bytes(prefix)
        self._report = report
        self._areport = areport

    def score(self, domain: Sequence[Token]) -> Rows:
        return self.read(self.report(), domain)

    async def ascore(self, domain: Sequence[Token]) -> Rows:
        return self.read(await self.areport(), domain)

    def report(self) -> _Report:
        return self._report(self._opened(), self._prefix.decode("utf-8", "replace"))

    async def areport(self) -> _Report:
        return await self._areport(self._opened(), self._prefix.decode("utf-8", "replace"))

    def read(self, report: _Report, domain: Sequence[Token]) -> Rows:
        self._opened()
        return to_rows(report.reveal(), domain)

    def push(self, token: Token) -> None:
        self._opened()
        self._prefix += _bytes([token])

    def close(self) -> None:
        self._prompts = None

    def _opened(self) -> tuple[OpaqueValue[str], ...]:
        if self._prompts is None:
            raise ConfigurationError("this session is closed; open a new one")
        return self._prompts


def _continuation(model: SilentModel, asked: Continuation | None) -> Continuation:
    if model.kind == "decisions":
        raise CapabilityError(
            f"{model.name} is a decision model: it has a probability for every label and writes no text token by "
            "token. Hand it to DecisionsBackend; for text take a model that reports logprobs, or the embedded model"
        )
    suitable: tuple[Continuation, ...] = ("prefill", "instruct") if model.is_chat else ("completion",)
    if asked is None:
        return suitable[0]
    if asked not in suitable:
        raise ConfigurationError(f"expected continuation in {suitable} for a {model.kind} model, found {asked!r}")
    return asked


def _prefill(continuation: Continuation, asked: Prefill | None) -> Prefill | None:
    if asked is not None and (continuation != "prefill" or asked not in {"plain", "vllm"}):
        raise ConfigurationError(
            f"expected prefill as 'plain' or 'vllm', with continuation='prefill', found {asked!r} with {continuation!r}"
        )
    return asked


def _extra_body(llm: Any) -> dict[str, Any]:
    """Returns what a model and its bindings add to a request; bindings override the model."""
    inner, bound = unwrap(llm)
    return {**(getattr(inner, "extra_body", None) or {}), **(bound.get("extra_body") or {})}


def _numbers_to_ask(max_top_k: int | None, full_vocabulary: int | None) -> tuple[int, ...]:
    if max_top_k is not None and full_vocabulary is not None:
        raise ConfigurationError(
            f"expected max_top_k or full_vocabulary, found both ({max_top_k!r} and {full_vocabulary!r}); "
            "full_vocabulary alone asks for every token"
        )
    if full_vocabulary is not None:
        return (-1 if full_vocabulary == -1 else check_whole("full_vocabulary", full_vocabulary),)
    return TOP_K if max_top_k is None else (check_whole("max_top_k", max_top_k),)


def _ends(eos_texts: Any) -> frozenset[str]:
    is_list = isinstance(eos_texts, Iterable) and not isinstance(eos_texts, str)
    texts: list[Any] = list(eos_texts) if is_list else [None]
    if not all(isinstance(text, str) for text in texts):
        raise ConfigurationError(f"expected eos_texts as a collection of texts, found {eos_texts!r}")
    return frozenset(texts)


def _options(text_options: object) -> dict[str, Any]:
    if text_options is not None and not isinstance(text_options, Mapping):
        raise ConfigurationError(
            f"expected text_options as a mapping of arguments, found {type(text_options).__name__}"
        )
    return dict(text_options or {})


def _bytes(tokens: Sequence[Token]) -> bytes:
    if not all(isinstance(token, bytes) for token in tokens):
        raise ConfigurationError("expected tokens as bytes, found another type; pass keys of this engine")
    return b"".join(token for token in tokens if isinstance(token, bytes))
