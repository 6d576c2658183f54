"""Sends completion requests to a LangChain model and reads the answers as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from langchain_core.messages import HumanMessage

from langchain_dpicl.backends.calls import Calls, whole
from langchain_dpicl.backends.silent import Hidden, Render, Reply, Request, quietly
from langchain_dpicl.exceptions import ConfigurationError

GREEDY: Mapping[str, Any] = {"temperature": 0.0}
"""Default options of a completion: the likeliest text."""

_MOST_STOPS_SENT = 4  # OpenAI's endpoint rejects more


def complete(
    calls: Calls, prompts: Sequence[Hidden[str]], *, max_tokens: int, stop: Sequence[str], options: Mapping[str, Any]
) -> list[str]:
    """Returns one completion per prompt, cut before the first stop string; "" where the call failed."""
    is_chat, stops = calls.model.is_chat, stops_of(stop)
    requests = requests_for(prompts, is_chat=is_chat, max_tokens=max_tokens, stop=stops, options=options)
    return [quietly(partial(text_of, reply, stops)) or "" for reply in calls.many(requests)]


async def acomplete(
    calls: Calls, prompts: Sequence[Hidden[str]], *, max_tokens: int, stop: Sequence[str], options: Mapping[str, Any]
) -> list[str]:
    """Async twin of `complete`."""
    is_chat, stops = calls.model.is_chat, stops_of(stop)
    requests = requests_for(prompts, is_chat=is_chat, max_tokens=max_tokens, stop=stops, options=options)
    return [quietly(partial(text_of, reply, stops)) or "" for reply in await calls.amany(requests)]


def requests_for(
    prompts: Sequence[Hidden[str]],
    *,
    is_chat: bool,
    max_tokens: int,
    stop: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    explain: Literal["", "kind", "text"] = "",
) -> list[Request]:
    """Returns one request per prompt; `options` override the defaults, and None removes one.

    Stop strings are sent to completion models only, four at most: some chat servers reject them. `text_of` cuts at
    them in any case.
    """
    sent = {"stop": list(stop)[:_MOST_STOPS_SENT]} if stop and not is_chat else {}
    asked = {**GREEDY, "max_tokens": whole("max_tokens", max_tokens), **sent, **(options or {})}
    arguments = {name: value for name, value in asked.items() if value is not None}
    render: Render = (lambda text: [HumanMessage(text)]) if is_chat else (lambda text: text)
    return [Request(prompt, render, arguments, explain=explain) for prompt in prompts]


def text_of(reply: Reply, stop: Sequence[str] = ()) -> str:
    """Returns the answer's text before the first stop string; "" if it failed, was refused or was filtered."""
    if reply.answer is None or reply.answer.reveal().refused:
        return ""
    if reply.answer.reveal().finish_reason == "content_filter" or not isinstance(reply.answer.reveal().text, str):
        return ""
    return reply.answer.reveal().text[: _end(reply.answer, stop)]


def stops_of(stop: Sequence[str]) -> tuple[str, ...]:
    """Returns the stop strings; raises ConfigurationError unless each is a non-empty text."""
    if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
        raise ConfigurationError(f"expected stop as a list of strings that are not empty, found {stop!r}")
    return tuple(stop)


def _end(answer: Hidden[Any], stop: Sequence[str]) -> int:
    places = [answer.reveal().text.find(text) for text in stop]
    return min([place for place in places if place >= 0], default=len(answer.reveal().text))
