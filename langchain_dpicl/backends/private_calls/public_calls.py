"""Turns public calls and probes that fail, or return no log-probabilities, into errors with advice."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from langchain_dpicl.backends.private_calls.call import ModelOutput, OpaqueValue, Reply
from langchain_dpicl.exceptions import CapabilityError, ModelCallError

PROBE_PROMPT = "Snow is white. Coal is black.\nColour of snow:"
PROBE_CHOICES = ("black", "white")
"""What engines that choose are probed with."""

TAKE_ANOTHER = (
    "Take one that reports them: an OpenAI-compatible server (llama.cpp, vLLM), an OpenAI model with logprobs, or the "
    "embedded model."
)
OTHER_NUMBER = "If it reports them for another number of tokens, hand in LangChainBackend(llm, max_top_k=...)."
VOTES = (
    "As text alone it can still vote on labels: hand it to TextVoteBackend. Or have it write for PrivateEvolution, "
    "which shows it no record."
)
ONE_HOT = (
    "DeepSeek's API does this for some models, vLLM where it is started with --logprobs-mode processed_logprobs and "
    f"samples one token. {TAKE_ANOTHER} {VOTES}"
)
"""Advice where a server writes 0 and -9999 in the place of log-probabilities."""

THINKING_OFF = (
    "switch the thinking off (ChatOllama(reasoning=False), reasoning_effort='none', or for vLLM and llama.cpp "
    "ChatOpenAI(extra_body={'chat_template_kwargs': {'enable_thinking': False}}))"
)
"""Advice where a model thinks before it answers."""


@dataclass(frozen=True)
class AdviceRow:
    """One row of the table; it applies where every pattern that it has matches, and the first row that applies is used.

    Attributes:
      advice: what to do, in sentences.
      kind: pattern at the start of the class name.
      model: pattern at the start of the model name, after a "provider/" if there is one.
      said: pattern anywhere in the error message of a rejected call.
    """

    advice: str
    kind: str = ""
    model: str = ""
    said: str = ""

    def applies(self, kind: str, model: str, detail: str) -> bool:
        """Whether every pattern of this row matches."""
        return bool(
            re.match(self.kind, kind)
            and re.match(f"(.*/)?({self.model})", model, re.IGNORECASE)
            and re.search(self.said, detail, re.IGNORECASE)
        )


QUOTA = AdviceRow(
    said=r"HTTP 402|insufficient_quota|exceeded your current quota|credit balance",
    advice="The account has no credit left: check its plan and billing, or take another key.",
)
AWAITED = AdviceRow(
    said=r"Sync client is not available",
    advice="An engine makes a blocking call when it is built: pass api_key as text or as a function that is not async.",
)
KEY = AdviceRow(
    said=r"HTTP 40[13]|api[_ ]key|credential",
    advice="The server did not accept the key: check api_key, or the environment variable it is read from.",
)
VERSION = AdviceRow(
    said=r"(unknown|unrecognized)[^:]*: '?store\b",
    advice=(
        "The server does not know `store`, which private calls to OpenAI and Azure send as False: take a newer API "
        "version, as in AzureChatOpenAI(api_version='2025-02-01-preview'), or leave out a store= of your own."
    ),
)
ACCOUNT = (QUOTA, AWAITED, KEY, VERSION)
"""Faults of the account, or of the version of its API; no other advice applies then."""

_BASE_URL = "check base_url (OpenAI's and that of most servers ends in /v1, Anthropic's must not)"
ADDRESS = (
    AdviceRow(
        said=r"only supported in v1/responses",
        advice=(
            "OpenAI serves that model by its Responses API only, which private calls do not use: take one that Chat "
            "Completions serves."
        ),
    ),
    AdviceRow(said=r"HTTP 404", advice=f"Nothing is served there: {_BASE_URL} and the name of the model."),
    AdviceRow(
        said=r"has no attribute 'model_dump'|JSONDecodeError|null value for 'choices'|Unexpected response type from"
        r"|TypeError: 'NoneType' object is not iterable",
        advice=(
            "The reply is not an answer of the API that the client expects, for instance a web page: "
            f"{_BASE_URL}, or take another server."
        ),
    ),
)
"""Faults of the server's address."""

ARGUMENT = AdviceRow(
    said=r"unexpected keyword argument '(?!(logprobs|top_logprobs|max_tokens|temperature)')",
    advice="The client does not know that argument: remove it from bind(...) or from the model's model_kwargs.",
)
"""An argument that this package does not set."""

FACTS = (
    *ACCOUNT,
    AdviceRow(
        model=r"\S*codex|(gpt-|o)[0-9]\S*-pro|computer-use",
        advice=(
            "OpenAI serves codex and -pro models by its Responses API only, whose log-probabilities LangChain drops. "
            + TAKE_ANOTHER
        ),
    ),
    *ADDRESS,
    AdviceRow(
        kind=r"\w*OpenAI",
        said=r"unexpected keyword .*'(include|reasoning|truncation|text|context_management|previous_response_id)",
        advice=(
            "That argument belongs to OpenAI's Responses API, whose log-probabilities LangChain drops, so calls go to "
            "Chat Completions instead. Leave it out; what switches reasoning off there is reasoning_effort='none'."
        ),
    ),
    ARGUMENT,
    AdviceRow(
        model=r"gpt-5\.",
        advice=(
            "OpenAI's gpt-5.1 and its successors report them only without reasoning: "
            "ChatOpenAI(..., reasoning_effort='none')."
        ),
    ),
    AdviceRow(
        model=r"o[1-9](-|$)|gpt-5(-|$)",
        advice=f"OpenAI's o-series, gpt-5, gpt-5-mini and gpt-5-nano never report them. {TAKE_ANOTHER} {VOTES}",
    ),
    AdviceRow(
        kind=r"\w*Fake",
        advice=f"{TAKE_ANOTHER} In a test take `langchain_dpicl.backends.fake.FakeBackend`. {VOTES}",
    ),
    AdviceRow(kind=r"\w*Anthropic", advice=f"Anthropic reports none. {TAKE_ANOTHER} {VOTES}"),
    AdviceRow(model=r"claude", advice=f"Anthropic reports none, on any host. {TAKE_ANOTHER} {VOTES}"),
    AdviceRow(
        kind=r"(Chat)?(GoogleGen|VertexAI|Google)",
        advice=f"LangChain's classes for Gemini pass none on, whatever the API reports. {TAKE_ANOTHER} {VOTES}",
    ),
    AdviceRow(kind=r"\w*Bedrock", advice=f"Bedrock's Converse API reports none. {TAKE_ANOTHER} {VOTES}"),
    AdviceRow(kind=r"\w*Mistral", advice=f"Mistral's API reports none. {TAKE_ANOTHER} {VOTES}"),
    AdviceRow(
        kind=r"OllamaLLM",
        advice=f"OllamaLLM passes none on: take ChatOllama, with the same model and base_url. {VOTES}",
    ),
    AdviceRow(
        kind=r"\w*Ollama",
        advice=(
            "Ollama reports them from version 0.12.11 on, and ChatOllama passes them on from langchain-ollama 1.1 on: "
            "upgrade the older of the two. A model that thinks before it answers reports its thoughts first: "
            f"ChatOllama(..., reasoning=False). {VOTES}"
        ),
    ),
    AdviceRow(kind=r"\w*Groq", advice=f"Groq is not known to report them. {TAKE_ANOTHER} {VOTES}"),
    AdviceRow(
        kind=r"HuggingFaceEndpoint",
        advice=(
            "It passes none on. TGI and Hugging Face's router report them through their OpenAI-compatible address: "
            f"ChatOpenAI(base_url='http://HOST:PORT/v1', api_key=..., model=...). {VOTES}"
        ),
    ),
    AdviceRow(
        kind=r"(Chat)?HuggingFace",
        advice=f"Pipelines of Hugging Face pass none on: serve the model with vLLM or llama.cpp. {VOTES}",
    ),
    AdviceRow(
        kind=r"Azure",
        advice=(
            "On Azure the model behind the deployment decides: gpt-5.1 and its successors report them with "
            f"reasoning_effort='none', the o-series, gpt-5, gpt-5-mini and gpt-5-nano never. {TAKE_ANOTHER}"
        ),
    ),
    AdviceRow(said=r".", advice=f"{OTHER_NUMBER} Otherwise: {TAKE_ANOTHER}"),
    AdviceRow(
        advice=(
            "Some servers take the request and ignore it, such as `transformers serve` and proxies: ask the model "
            f"behind them directly. {TAKE_ANOTHER} {VOTES}"
        )
    ),
)


def advice(kind: str, model: str, detail: str = "") -> str:
    """Returns what to do about a model without log-probabilities.

    >>> advice("ChatOpenAI", "gpt-5.1")
    "OpenAI's gpt-5.1 and its successors report them only without reasoning: ChatOpenAI(..., reasoning_effort='none')."
    """
    return _first(FACTS, kind, model, detail)


def whole_vocabulary(kind: str, model: str, detail: str = "", *, asked: int) -> str:
    """Returns advice where the whole vocabulary was requested by asking for `asked` tokens."""
    if "HTTP 4" in detail and not advice_elsewhere(detail):
        return (
            "The whole vocabulary was asked for: vLLM reports it when it is started with --max-logprobs -1, llama.cpp "
            "for its size as full_vocabulary. Otherwise leave full_vocabulary out."
        )
    if not detail and asked == -1:
        return (
            "Not every server knows -1: llama.cpp takes the size of the vocabulary as full_vocabulary. Otherwise: "
            f"{advice(kind, model)}"
        )
    return advice(kind, model, detail)


def advice_elsewhere(detail: str) -> str:
    """Returns advice if the key, the account, the address or a bound argument is at fault; else "".

    >>> advice_elsewhere("BadRequestError (HTTP 400): no logprobs here")
    ''
    """
    return _first((*ACCOUNT, *ADDRESS, ARGUMENT), "", "", detail) if detail else ""


def combine_advice(detail: str, own: str) -> str:
    """Returns the advice of `advice_elsewhere` followed by the engine's own; one of them where it is enough.

    >>> combine_advice("BadRequestError (HTTP 400): no", "Take another model.")
    'Take another model.'
    """
    known = advice_elsewhere(detail)
    if known and known == _first(ACCOUNT, "", "", detail):
        return known
    return own if "base_url" in known and "base_url" in own else f"{known} {own}".lstrip()


def _first(facts: Sequence[AdviceRow], kind: str, model: str, detail: str) -> str:
    return next((fact.advice for fact in facts if fact.applies(kind, model, detail)), "")


class _FailureAdvice(NamedTuple):
    """Why a call got no answer: a pattern of the failure's kind, what happened, and what to do."""

    kind: str
    what: str
    todo: str


_UNREACHED = _FailureAdvice(r"", "could not be reached", "check the address and that the server is up")
_TROUBLES = (
    _FailureAdvice(r"HTTP 5", "answered, but with an error of its own", "look at the server and its load"),
    _FailureAdvice(
        r"HTTP \d|RateLimit|Overloaded|ServiceUnavailable|InternalServer",
        "answered, but is busy",
        "wait, or lower max_concurrency",
    ),
    _FailureAdvice(r"Timeout", "did not answer in time", "raise the client's timeout, and check the address"),
    _UNREACHED,
)
_NO_CREDIT = _FailureAdvice(r"", "answered, but the account has no credit left", "check its plan and billing")
_LOOP = _FailureAdvice(
    r"",
    "could not be reached",
    "its client belongs to another event loop, or it looks for one in a thread that has none: build the model in this "
    "one, or let its blocking call make a loop by asyncio.run()",
)
_REFUSED = (
    "Private prompts go to the configured address only, and time and size of replies are limited: correct base_url=, "
    "or raise deadline= or max_reply_bytes= of RetryPolicy"
)
_IN_CLIENT = re.compile(r"\w*(TypeError|AttributeError|ValueError|KeyError|DecodeError|ValidationError)(:|$)")


def answer_or_raise(name: str, reply: Reply) -> OpaqueValue[ModelOutput]:
    """Returns the answer to a public prompt, or raises ModelCallError."""
    if reply.answer is not None:
        return reply.answer
    todo = "Check the model and the length of the prompt"
    if reply.fault == "refused":
        todo = _REFUSED
    if reply.fault in {"busy", "loop"}:
        todo = _trouble(reply).todo
        todo = todo[0].upper() + todo[1:]
    todo = advice_elsewhere(reply.detail).rstrip(".") or todo
    raise ModelCallError(f"a public call to {name} failed ({_failure_detail(reply)}). {todo}, then call again")


def probe_answer_or_raise(
    name: str,
    reply: Reply,
    *,
    asked: str,
    advice: str | Callable[[str], str],
    lack: type[CapabilityError] = CapabilityError,
    unreached: str = "",
) -> OpaqueValue[ModelOutput]:
    """Returns the answer to a probe; raises `lack` if the request is at fault, ModelCallError if nothing answered.

    Where no server was reached, the advice ends in `unreached`.
    """
    if reply.answer is not None:
        return reply.answer
    if reply.fault == "refused":
        raise ModelCallError(
            f"the reply of {name} to a public probe was refused: {reply.detail}. {_REFUSED}, then build it again"
        )
    if reply.fault in {"busy", "loop"}:
        trouble = _trouble(reply)
        todo = trouble.todo + (unreached if trouble is _UNREACHED else "")
        raise ModelCallError(
            f"{name} {trouble.what}: a public probe failed ({_kind(reply)}). Nothing was spent; {todo}, then build it "
            "again"
        )
    who = f"the client of {name}" if _IN_CLIENT.match(reply.detail) else name
    todo = advice(reply.detail) if callable(advice) else combine_advice(reply.detail, advice)
    error = CapabilityError if advice_elsewhere(reply.detail) else lack
    detail = _kind(reply) if _is_quota(reply) else _failure_detail(reply)
    raise error(f"{who} rejected a public probe that asks for {asked} ({detail}). {todo}")


def _trouble(reply: Reply) -> _FailureAdvice:
    if reply.fault == "loop":
        return _LOOP
    if _is_quota(reply):
        return _NO_CREDIT
    return next(trouble for trouble in _TROUBLES if re.search(trouble.kind, _kind(reply)))


def _is_quota(reply: Reply) -> bool:
    return QUOTA.applies("", "", reply.detail)


def _kind(reply: Reply) -> str:
    """Returns type and status of a failure; its text may quote the usage of private calls."""
    return reply.detail.partition(":")[0] or "it did not say why"


def _failure_detail(reply: Reply) -> str:
    return reply.detail.rstrip(". ") or "it did not say why"
