"""The stock clients, on a provider of ours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

KEY = "none"


@functools.cache
def openai_models(address: str) -> dict[str, Callable[[], Any]]:
    """ChatOpenAI and OpenAI; one of each for an address."""
    from langchain_openai import ChatOpenAI, OpenAI

    options: dict[str, Any] = {"model": "m", "api_key": KEY, "max_retries": 0, "base_url": f"{address}/v1"}
    return {
        "chat": functools.cache(lambda: ChatOpenAI(**options, logprobs=True, top_logprobs=3)),
        "completion": functools.cache(lambda: OpenAI(**options, logprobs=3)),
    }


def decision_models(address: str) -> dict[str, Callable[[], Any]]:
    """OpenAIDecisions."""
    from langchain_openai.decisions import OpenAIDecisions

    options: dict[str, Any] = {"model": "m", "api_key": KEY, "max_retries": 0, "base_url": f"{address}/v1"}
    return {"decisions": lambda: OpenAIDecisions(**options)}


def decision_request(prompt: str) -> dict[str, Any]:
    """What a decision model takes."""
    from langchain_openai.decisions import Choice

    question: Any = Choice(instructions="Which topic?", choices={"card": None, "other": None})
    return {"input": prompt, "questions": {"topic": question}}


@functools.cache
def anthropic_models(address: str) -> dict[str, Callable[[], Any]]:
    """ChatAnthropic, which reports no token probabilities."""
    from langchain_anthropic import ChatAnthropic

    options: dict[str, Any] = {"model": "m", "api_key": KEY, "max_retries": 0, "max_tokens": 1, "base_url": address}
    return {"text": functools.cache(lambda: ChatAnthropic(**options))}
