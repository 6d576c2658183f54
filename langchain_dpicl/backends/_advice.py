"""Holds the table of advice for public calls that fail or return no log-probabilities."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

TAKE_ANOTHER = (
    "Take a model that reports them: an OpenAI-compatible chat or completion server (llama.cpp, vLLM), an OpenAI model "
    "with logprobs, or the embedded model."
)
OTHER_NUMBER = "If it reports them for another number of tokens, hand in LangChainBackend(llm, max_top_k=...)."
VOTES = "As text alone it can still vote on labels: hand it to TextVoteBackend."


@dataclass(frozen=True)
class Fact:
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


QUOTA = Fact(
    said=r"HTTP 402|insufficient_quota|exceeded your current quota|credit balance",
    advice="The account has no credit left: check its plan and billing, or take another key.",
)
KEY = Fact(
    said=r"HTTP 40[13]|api[_ ]key|credential",
    advice="The server did not accept the key: check api_key, or the environment variable it is read from.",
)
ACCOUNT = (QUOTA, KEY)
"""Faults of the account; no other advice applies then."""

_BASE_URL = "check base_url (OpenAI's and that of most servers ends in /v1, Anthropic's must not)"
ADDRESS = (
    Fact(said=r"HTTP 404", advice=f"Nothing is served there: {_BASE_URL} and the name of the model."),
    Fact(
        said=r"has no attribute 'model_dump'|JSONDecodeError|null value for 'choices'|Unexpected response type from"
        r"|TypeError: 'NoneType' object is not iterable",
        advice=(
            "The reply is not an answer of the API that the client expects, for instance a web page: "
            f"{_BASE_URL}, or take another server."
        ),
    ),
)
"""Faults of the server's address."""

ARGUMENT = Fact(
    said=r"unexpected keyword argument '(?!(logprobs|top_logprobs|max_tokens|temperature)')",
    advice="The client does not know that argument: remove it from bind(...) or from the model's model_kwargs.",
)
"""An argument that this package does not set."""

FACTS = (
    *ACCOUNT,
    Fact(
        model=r"\S*codex|(gpt-|o)[0-9]\S*-pro|computer-use",
        advice=(
            "OpenAI serves codex and -pro models by its Responses API only, whose log-probabilities LangChain drops. "
            + TAKE_ANOTHER
        ),
    ),
    *ADDRESS,
    Fact(
        kind=r"\w*OpenAI",
        said=r"unexpected keyword .*'(include|reasoning|truncation|text|context_management|previous_response_id)",
        advice=(
            "That argument belongs to OpenAI's Responses API, whose log-probabilities LangChain drops, so calls go to "
            "Chat Completions instead. Leave it out; what switches reasoning off there is reasoning_effort='none'."
        ),
    ),
    ARGUMENT,
    Fact(
        model=r"gpt-5\.",
        advice=(
            "OpenAI's gpt-5.1 and its successors report them only without reasoning: "
            "ChatOpenAI(..., reasoning_effort='none')."
        ),
    ),
    Fact(
        model=r"o[1-9](-|$)|gpt-5(-|$)",
        advice=f"OpenAI's o-series, gpt-5, gpt-5-mini and gpt-5-nano never report them. {TAKE_ANOTHER} {VOTES}",
    ),
    Fact(kind=r"\w*Anthropic", advice=f"Anthropic reports none. {TAKE_ANOTHER} {VOTES}"),
    Fact(model=r"claude", advice=f"Anthropic reports none, whoever serves it. {TAKE_ANOTHER} {VOTES}"),
    Fact(
        kind=r"(Chat)?(GoogleGen|VertexAI|Google)",
        advice=(
            "Gemini reports them on Vertex AI only and not for every model, and LangChain's classes are not known to "
            f"pass them on. {TAKE_ANOTHER} {VOTES}"
        ),
    ),
    Fact(
        kind=r"\w*Bedrock",
        advice=f"Bedrock's Converse API is not known to report them. {TAKE_ANOTHER} {VOTES}",
    ),
    Fact(
        kind=r"\w*Ollama",
        advice=(
            "LangChain's Ollama classes take num_predict and not max_tokens. Ollama 0.12.11 and newer may "
            "report log-probabilities through its OpenAI-compatible address; the probe decides: "
            "ChatOpenAI(base_url='http://localhost:11434/v1', "
            f"api_key='none', model=...). {TAKE_ANOTHER}"
        ),
    ),
    Fact(kind=r"\w*Groq", advice=f"Groq is not known to report them. {TAKE_ANOTHER} {VOTES}"),
    Fact(
        kind=r"(Chat)?HuggingFace",
        advice=f"Pipelines of Hugging Face pass none on: serve the model with vLLM or llama.cpp. {VOTES}",
    ),
    Fact(
        kind=r"Azure",
        advice=(
            "On Azure the model behind the deployment decides: gpt-5.1 and its successors report them with "
            f"reasoning_effort='none', the o-series, gpt-5, gpt-5-mini and gpt-5-nano never. {TAKE_ANOTHER}"
        ),
    ),
    Fact(said=r".", advice=f"{OTHER_NUMBER} Otherwise: {TAKE_ANOTHER}"),
    Fact(
        advice=(
            "Some servers take the request and ignore it: `transformers serve` does, and proxies do; a model behind "
            f"one may still report them when asked directly. {TAKE_ANOTHER} {VOTES}"
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
    if "HTTP 4" in detail and not elsewhere(detail):
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


def elsewhere(detail: str) -> str:
    """Returns advice if the key, the account, the address or a bound argument is at fault; else "".

    >>> elsewhere("BadRequestError (HTTP 400): no logprobs here")
    ''
    """
    return _first((*ACCOUNT, *ADDRESS, ARGUMENT), "", "", detail) if detail else ""


def also(detail: str, own: str) -> str:
    """Returns the advice of `elsewhere` followed by the engine's own; one of them where it is enough.

    >>> also("BadRequestError (HTTP 400): no", "Take another model.")
    'Take another model.'
    """
    known = elsewhere(detail)
    if known and known == _first(ACCOUNT, "", "", detail):
        return known
    return own if "base_url" in known and "base_url" in own else f"{known} {own}".lstrip()


def _first(facts: Sequence[Fact], kind: str, model: str, detail: str) -> str:
    return next((fact.advice for fact in facts if fact.applies(kind, model, detail)), "")
