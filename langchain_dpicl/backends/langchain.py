"""Any LangChain chat or completion model that reports top-k logprobs, as an engine. Knows nothing of privacy.

Every call, public or private, goes through `silent`; answers are read by `logprobs`. Tokens are keyed by their bytes.
A released prefix is continued in one of three ways, declared per model (`docs/providers.md`):

- "completion": prompt and prefix are one text, sent to a completion model. Exact.
- "prefill": the prompt is a user message, the prefix an assistant message that the server goes on writing. Exact where
  the server supports it.
- "instruct": the prefix is an assistant message, followed by the instruction to go on. Approximate.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage

from langchain_dpicl.backends.base import Rows, Token, TokenSession
from langchain_dpicl.backends.calls import Calls, limit_of, whole
from langchain_dpicl.backends.logprobs import (
    EOS,
    EOS_TEXTS,
    FINISHED,
    Probabilities,
    first_position,
    next_token,
    probability,
    to_rows,
)
from langchain_dpicl.backends.silent import (
    Answer,
    Hidden,
    Reply,
    Request,
    RetryPolicy,
    SilentModel,
    silence,
)
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError, ModelCallError

Continuation: TypeAlias = Literal["completion", "prefill", "instruct"]

CONTINUE = "Continue your last message exactly where it stops. Write the continuation only and repeat nothing."
"""The last message of an "instruct" continuation."""

PROBED_TOP_K = (20, 10, 5, 2)
"""How many top tokens a probe asks for when `max_top_k` is not given; the first number that is not rejected counts."""

# Public text; a server that starts a new message instead of going on begins with the first word again.
_PROBE_PROMPT = "Write these three words: Quartz lamps hum"
_PROBE_PREFIX = "Quartz lamps"
_NEW_MESSAGES = ("quartz", "hum")
_ADVICE = (
    "If it reports them for another number of tokens, hand in LangChainBackend(llm, max_top_k=...). Otherwise take a "
    "model that does: an OpenAI-compatible chat or completion server (llama.cpp, vLLM), an OpenAI model with logprobs, "
    "or the embedded model."
)


class LangChainBackend:
    """Next-token probabilities of a LangChain model, called in silence.

    Formal guarantees:
      - Row i of a session is computed from prompt i, the prefix and the domain alone; it is >= 0 and sums to <= 1.
      - A failed, filtered, refused or unreadable answer is a zero row; the content of a prompt raises nothing.
      - No prompt and no answer reaches a LangChain callback, tracer, cache, debug output or exception.

    Args:
      llm: a chat or completion model, bound or not; bound arguments are sent with every call.
      continuation: how a prefix is continued; None: "completion" for completion models, "prefill" for chat models.
      max_top_k: top tokens that one call reports; asked for in every call, and the probe must bring them. None: what
        the probe brings of 20, or of the largest of 10, 5 and 2 that the server does not reject; at least 2.
      max_concurrency: calls in flight at once; None: 32.
      full_vocabulary: how many tokens to ask for to get the whole vocabulary, where the server allows it (llama.cpp:
        the vocabulary size; vLLM started with `--max-logprobs -1`: -1). None: a top-k engine.
      eos_texts: how the provider spells the end of a text.
      count_tokens: counts the tokens of a public text; None: its UTF-8 bytes, an upper estimate.
      retry: how long each row's call is waited for.

    Raises:
      CapabilityError: a probe with public text shows no logprobs, fewer than `max_top_k`, or no continuation.
      ModelCallError: the probe got no answer; an unreachable or busy server is asked twice within a few seconds.
      UnsilencableModelError: see `silent.silence`.
      ConfigurationError: the continuation does not suit the kind of model, or a number is out of range.
    """

    def __init__(
        self,
        llm: Any,
        *,
        continuation: Continuation | None = None,
        max_top_k: int | None = None,
        max_concurrency: int | None = None,
        full_vocabulary: int | None = None,
        eos_texts: Iterable[str] = EOS_TEXTS,
        count_tokens: Callable[[str], int] | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        self._model = silence(llm)
        self._continuation = _continuation(self._model, continuation)
        numbers = _numbers_to_ask(max_top_k, full_vocabulary)
        self._asked = numbers[0]
        self._max_top_k: int | None = None
        self._calls = Calls(self._model, retry or RetryPolicy(), limit_of(max_concurrency))
        self._eos_texts = frozenset(eos_texts)
        self._count_tokens = count_tokens
        self._vocabulary: tuple[bytes, ...] = ()
        entries = self._probe(numbers)
        if full_vocabulary is None:
            self._max_top_k = _top_k(self.name, len(entries), self._asked, is_given=max_top_k is not None)
        else:
            _refuse_partial_vocabulary(self.name, entries, self._asked)

    def __repr__(self) -> str:
        return f"LangChainBackend({self.name!r}, continuation={self._continuation!r}, max_top_k={self._max_top_k})"

    @property
    def name(self) -> str:
        """Public name of the model, for reports."""
        return self._model.name

    @property
    def continuation(self) -> Continuation:
        """How a prefix is continued; "instruct" is approximate and belongs into reports."""
        return self._continuation

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
        request = self._public_request(prompt, self.decode(prefix), top_k)
        return self._ranked(self._calls.one(request), top_k)

    async def atop_tokens(self, prompt: str, prefix: Sequence[Token], *, top_k: int) -> list[tuple[Token, float]]:
        """Is `top_tokens`, awaitable."""
        request = self._public_request(prompt, self.decode(prefix), top_k)
        return self._ranked(await self._calls.aone(request), top_k)

    def open(self, prompts: Sequence[str], prefix: Sequence[Token]) -> TokenSession:
        """Starts a session on private prompts, each continued by the same released prefix."""
        boxes = [Hidden(prompt) for prompt in prompts]
        return _LangChainSession(boxes, prefix, score=self._score, ascore=self._ascore)

    def decode(self, tokens: Sequence[Token]) -> str:
        """Returns the text of tokens; the end decodes to nothing, invalid UTF-8 is replaced."""
        return _bytes(tokens).decode("utf-8", "replace")

    def count_tokens(self, text: str) -> int:
        """Returns the number of tokens of a public text; its UTF-8 bytes where the tokenizer is unknown."""
        return self._count_tokens(text) if self._count_tokens else len(text.encode("utf-8", "replace"))

    def _score(self, prompts: Sequence[Hidden[str]], prefix: str, domain: Sequence[Token]) -> Rows:
        replies = self._calls.many([self._request(prompt, prefix) for prompt in prompts])
        return to_rows([self._read(reply) for reply in replies], domain)

    async def _ascore(self, prompts: Sequence[Hidden[str]], prefix: str, domain: Sequence[Token]) -> Rows:
        replies = await self._calls.amany([self._request(prompt, prefix) for prompt in prompts])
        return to_rows([self._read(reply) for reply in replies], domain)

    def _request(self, prompt: Hidden[str], prefix: str, *, explain: Literal["", "kind", "text"] = "") -> Request:
        asked: dict[str, Any] = {"logprobs": self._asked}
        if self._model.is_chat:
            asked = {"logprobs": True, "top_logprobs": self._asked}
        render = _RENDER[self._continuation]
        # Temperature 1: some servers report the distribution they sample from. One token: see `_is_readable`.
        options = {**asked, "max_tokens": 1, "temperature": 1.0}
        return Request(prompt, lambda text: render(text, prefix), options, _is_readable, explain)

    def _public_request(self, prompt: str, prefix: str, top_k: int) -> Request:
        if self._max_top_k is not None and top_k > self._max_top_k:
            raise CapabilityError(
                f"expected top_k <= {self._max_top_k} (what {self.name} reports), found {top_k}; lower public_top_k"
            )
        return self._request(Hidden(prompt), prefix, explain="kind")

    def _read(self, reply: Reply) -> Probabilities:
        return {} if reply.answer is None else _probabilities(reply.answer.reveal(), self._eos_texts)

    def _ranked(self, reply: Reply, top_k: int) -> list[tuple[Token, float]]:
        found = self._read(reply)
        if not found:
            raise ModelCallError(f"a public call to {self.name} brought no logprobs. {reply.detail}".strip())
        ranked: list[tuple[Token, float]] = sorted(found.items(), key=lambda item: (-item[1], item[0]))
        return ranked[:top_k]

    def _probe(self, numbers: Sequence[int]) -> list[tuple[object, object]]:
        """Learns with public text whether logprobs come and a prefix is continued; returns what is reported."""
        reply = self._first_accepted(numbers)
        found = self._read(reply)
        entries = [] if reply.answer is None else first_position(reply.answer.reveal().logprobs)
        if not found or not entries:
            raise _probe_error(self.name, reply)
        if self._continuation == "prefill" and _starts_anew(found):
            raise CapabilityError(
                f"{self.name} starts a new message instead of continuing the assistant message; use a completion "
                "model or a server that continues it, or accept an approximation with continuation='instruct'"
            )
        self._vocabulary = tuple(sorted({*found, EOS}))
        return entries

    def _first_accepted(self, numbers: Sequence[int]) -> Reply:
        """Asks for fewer and fewer tokens until the server does not reject the call; keeps to that number."""
        reply = Reply()
        for number in numbers:
            self._asked = number
            reply = self._calls.probe(self._request(Hidden(_PROBE_PROMPT), _PROBE_PREFIX, explain="text"))
            if reply.fault != "content":
                break
        return reply


class _LangChainSession:
    """Private prompts, each in its box, and the prefix they share."""

    def __init__(
        self,
        prompts: Sequence[Hidden[str]],
        prefix: Sequence[Token],
        *,
        score: Callable[[Sequence[Hidden[str]], str, Sequence[Token]], Rows],
        ascore: Callable[[Sequence[Hidden[str]], str, Sequence[Token]], Awaitable[Rows]],
    ) -> None:
        self._prompts: tuple[Hidden[str], ...] | None = tuple(prompts)
        self._prefix = _bytes(prefix)
        self._score = score
        self._ascore = ascore

    def score(self, domain: Sequence[Token]) -> Rows:
        """Returns float64[rows, len(domain)]: next-token probabilities on `domain`."""
        return self._score(self._opened(), self._prefix.decode("utf-8", "replace"), domain)

    async def ascore(self, domain: Sequence[Token]) -> Rows:
        """Is `score`, awaitable; rows of one call run concurrently."""
        return await self._ascore(self._opened(), self._prefix.decode("utf-8", "replace"), domain)

    def push(self, token: Token) -> None:
        """Appends one released token to every row's prefix."""
        self._opened()
        self._prefix += _bytes([token])

    def close(self) -> None:
        """Drops the prompts."""
        self._prompts = None

    def _opened(self) -> tuple[Hidden[str], ...]:
        if self._prompts is None:
            raise ConfigurationError("this session is closed; open a new one")
        return self._prompts


def _render_completion(prompt: str, prefix: str) -> str:
    return prompt + prefix


def _render_prefill(prompt: str, prefix: str) -> list[BaseMessage]:
    return [HumanMessage(prompt), AIMessage(prefix)] if prefix else [HumanMessage(prompt)]


def _render_instruct(prompt: str, prefix: str) -> list[BaseMessage]:
    return [*_render_prefill(prompt, prefix), HumanMessage(CONTINUE)] if prefix else [HumanMessage(prompt)]


_RENDER: dict[Continuation, Callable[[str, str], str | list[BaseMessage]]] = {
    "completion": _render_completion,
    "prefill": _render_prefill,
    "instruct": _render_instruct,
}


def _probabilities(answer: Answer, eos_texts: Iterable[str]) -> Probabilities:
    if answer.refused:
        return {}
    return next_token(answer.logprobs, text=answer.text, finish_reason=answer.finish_reason, eos_texts=eos_texts)


def _is_readable(answer: Answer) -> bool:
    """Whether an answer is final, with or without logprobs.

    llama.cpp reports nothing when it happens to sample the first bytes of an unfinished character, and of a longer
    answer it would report a later position as the first. So one token is asked for, and sampled again if need be.
    """
    ended = answer.text == "" and answer.finish_reason in FINISHED
    return ended or answer.refused or answer.finish_reason == "content_filter" or bool(first_position(answer.logprobs))


def _probe_error(name: str, reply: Reply) -> CapabilityError | ModelCallError:
    """Says why a probe brought no logprobs: nobody answered, the call was rejected, or the answer has none."""
    said = reply.detail.rstrip(". ")
    if reply.fault in {"busy", "loop"}:
        return ModelCallError(
            f"{name} could not be reached: a public probe got no answer ({said}). Nothing was spent; check the "
            "address, the key and that the server is up, then build it again"
        )
    if reply.answer is None:
        return CapabilityError(f"{name} rejected a public probe that asks for logprobs ({said}). {_ADVICE}")
    return CapabilityError(f"{name} answered a public probe without logprobs. {_ADVICE}")


def _top_k(name: str, reported: int, asked: int, *, is_given: bool) -> int:
    """How many top tokens a model reports; entries may share a text, so a few of a given number can be missing."""
    if is_given and reported < asked / 2:
        raise CapabilityError(
            f"expected {asked} top logprobs from {name}, found {reported}; give LangChainBackend(llm, "
            f"max_top_k={reported}), or leave max_top_k out to take what the model reports"
        )
    if not is_given and reported < 2:
        raise CapabilityError(
            f"expected 2 or more top logprobs from {name}, found {reported}: one candidate leaves nothing to choose. "
            f"Take another model, or LangChainBackend(llm, max_top_k={reported}) if that is what you want"
        )
    return asked if is_given else min(asked, reported)


def _refuse_partial_vocabulary(name: str, entries: Sequence[tuple[object, object]], asked: int) -> None:
    """Some servers cut the list in silence. Entries that share a text may be merged, hence the tenth of slack."""
    mass = math.fsum(probability(logprob) for _, logprob in entries)
    if len(entries) < 0.9 * asked or mass < 0.99:
        raise CapabilityError(
            f"expected the whole vocabulary from {name} (asked for {asked}), found {len(entries)} tokens holding "
            f"{mass:.3f} of the probability; raise the server's limit on logprobs or leave full_vocabulary out"
        )


def _starts_anew(found: Probabilities) -> bool:
    """Whether the likeliest token opens a new message rather than going on after the probe's prefix."""
    text = max(found, key=lambda token: found[token]).decode().lower()
    return bool(text) and any(word.startswith(text) for word in _NEW_MESSAGES)


def _continuation(model: SilentModel, asked: Continuation | None) -> Continuation:
    suitable: tuple[Continuation, ...] = ("prefill", "instruct") if model.is_chat else ("completion",)
    if asked is None:
        return suitable[0]
    if asked not in suitable:
        kind = "chat" if model.is_chat else "completion"
        raise ConfigurationError(f"expected continuation in {suitable} for a {kind} model, found {asked!r}")
    return asked


def _numbers_to_ask(max_top_k: int | None, full_vocabulary: int | None) -> tuple[int, ...]:
    if full_vocabulary is not None:
        return (-1 if full_vocabulary == -1 else whole("full_vocabulary", full_vocabulary),)
    return PROBED_TOP_K if max_top_k is None else (whole("max_top_k", max_top_k),)


def _bytes(tokens: Sequence[Token]) -> bytes:
    if not all(isinstance(token, bytes) for token in tokens):
        raise ConfigurationError("expected tokens as bytes, found another type; pass keys of this engine")
    return b"".join(token for token in tokens if isinstance(token, bytes))
