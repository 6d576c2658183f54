"""Turns failed public calls and probes into errors with advice."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from langchain_dpicl.backends._advice import QUOTA, also, elsewhere
from langchain_dpicl.backends.silent import Answer, Hidden, Reply
from langchain_dpicl.exceptions import CapabilityError, ModelCallError


class _Trouble(NamedTuple):
    """Why a call got no answer: a pattern of the failure's kind, what happened, and what to do."""

    kind: str
    what: str
    todo: str


_TROUBLES = (
    _Trouble(r"HTTP 5", "answered, but with an error of its own", "look at the server and its load"),
    _Trouble(
        r"HTTP \d|RateLimit|Overloaded|ServiceUnavailable|InternalServer",
        "answered, but is busy",
        "wait, or lower max_concurrency",
    ),
    _Trouble(r"Timeout", "did not answer in time", "raise the client's timeout, and check the address"),
    _Trouble(r"", "could not be reached", "check the address and that the server is up"),
)
_NO_CREDIT = _Trouble(r"", "answered, but the account has no credit left", "check its plan and billing")
_LOOP = _Trouble(r"", "could not be reached", "its client belongs to another event loop: build the model in this one")
_REFUSED = (
    "Private prompts go to the configured address only, and time and size of replies are limited: correct base_url=, "
    "or raise deadline= or max_reply_bytes= of RetryPolicy"
)
_IN_CLIENT = re.compile(r"\w*(TypeError|AttributeError|ValueError|KeyError|DecodeError|ValidationError)(:|$)")


def answered(name: str, reply: Reply) -> Hidden[Answer]:
    """Returns the answer to a public prompt, or raises ModelCallError."""
    if reply.answer is not None:
        return reply.answer
    todo = "Check the model and the length of the prompt"
    if reply.fault == "refused":
        todo = _REFUSED
    if reply.fault in {"busy", "loop"}:
        todo = _sentence(_trouble(reply).todo)
    todo = elsewhere(reply.detail).rstrip(".") or todo
    raise ModelCallError(f"a public call to {name} failed ({_said(reply)}). {todo}, then call again")


def probed(
    name: str,
    reply: Reply,
    *,
    asked: str,
    advice: str | Callable[[str], str],
    lack: type[CapabilityError] = CapabilityError,
) -> Hidden[Answer]:
    """Returns the answer to a probe; raises `lack` if the request is at fault, ModelCallError if nothing answered."""
    if reply.answer is not None:
        return reply.answer
    if reply.fault == "refused":
        raise ModelCallError(
            f"the reply of {name} to a public probe was refused: {reply.detail}. {_REFUSED}, then build it again"
        )
    if reply.fault in {"busy", "loop"}:
        trouble = _trouble(reply)
        raise ModelCallError(
            f"{name} {trouble.what}: a public probe failed ({_kind(reply)}). Nothing was spent; {trouble.todo}, "
            "then build it again"
        )
    who = f"the client of {name}" if _IN_CLIENT.match(reply.detail) else name
    todo = advice(reply.detail) if callable(advice) else also(reply.detail, advice)
    error = CapabilityError if elsewhere(reply.detail) else lack
    detail = _kind(reply) if _is_quota(reply) else _said(reply)
    raise error(f"{who} rejected a public probe that asks for {asked} ({detail}). {todo}")


def _trouble(reply: Reply) -> _Trouble:
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


def _said(reply: Reply) -> str:
    return reply.detail.rstrip(". ") or "it did not say why"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]
