"""Defines the requests, replies and retry policies of silent calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NoReturn, TypeAlias, TypeVar

from langchain_core.messages import BaseMessage

from langchain_dpicl.exceptions import ConfigurationError, PrivateAccessError

T = TypeVar("T")

DEADLINE = 900.0
"""Seconds of one attempt, unless given: longer than the 600 seconds that the clients of OpenAI and Anthropic wait."""

MAX_REPLY_BYTES = 32 * 2**20
"""Bytes of one reply's body, unless given: enough for the log-probabilities of a vocabulary of 256,000 tokens."""

Fault: TypeAlias = Literal["busy", "unreadable", "loop", "content", "unsilent", "refused"]
Render = Callable[[str], "str | list[BaseMessage] | dict[str, Any]"]
"""Turns the private prompt into what the model takes: text for a completion model, messages for a chat model, a request
(input and questions) for a decision model."""


class Hidden(Generic[T]):
    """Private data without repr and pickle, so that frames and logs that hold it show nothing."""

    __slots__ = ("_value",)

    def __init__(self, value: T) -> None:
        self._value = value

    def reveal(self) -> T:
        """Returns the content; do not bind it to a name, as frames show their locals."""
        return self._value

    def __repr__(self) -> str:
        return "Hidden(<private>)"

    def __reduce__(self) -> NoReturn:
        raise PrivateAccessError("private prompts and answers cannot be pickled or copied")


@dataclass(frozen=True)
class Answer:
    """The first generation of a result, without its usage, ids and headers; or all of a decision model's response."""

    text: str = field(repr=False)
    logprobs: Any = field(repr=False)
    finish_reason: Any = field(repr=False)
    refused: bool = field(repr=False)
    decision: Any = field(default=None, repr=False)


@dataclass(frozen=True)
class Reply:
    """What a silent call returns: a hidden answer, or a fault.

    Attributes:
      answer: the answer, or None.
      fault: "busy" (rate limit, server error, timeout: worth waiting for), "unreadable" (an answer that another try
        may better), "loop" (the async client belongs to another event loop) or "content" (the same call fails again).
        Of a public call also "refused": the reply went beyond the limits on time, size and redirects. Inside `silent`
        also "unsilent": others would have seen the call, so it was not made or not finished.
      retry_after: seconds the provider asked to wait, if it did.
      detail: why a call with PUBLIC text failed (see `Request.explain`); empty for private calls.
    """

    answer: Hidden[Answer] | None = field(default=None, repr=False)
    fault: Fault | None = field(default=None, repr=False)
    retry_after: float | None = field(default=None, repr=False)
    detail: str = ""


@dataclass(frozen=True)
class RetryPolicy:
    """How often and how long one row's call is tried; counted per row, so that no row depends on another's retries.

    There is no wall-clock limit over attempts, as other rows' retries would move it. Each attempt has one. A row whose
    reply goes beyond `deadline` or `max_reply_bytes` abstains at once; the client's own timeout is waited out as a busy
    server is, so it should be the shorter one.

    Args:
      max_attempts: calls in all, the first included.
      first_wait: seconds before the second attempt at a busy server; doubled for each further one.
      max_wait: seconds a single wait may last, whatever the provider asks for.
      deadline: seconds one attempt may take over HTTP, from its first request until its reply is read, with the
        retries that the client makes by itself; local models have none.
      max_reply_bytes: bytes that the body of one reply may have, also after decompression.
    """

    max_attempts: int = 8
    first_wait: float = 0.5
    max_wait: float = 30.0
    deadline: float = DEADLINE
    max_reply_bytes: int = MAX_REPLY_BYTES

    def __post_init__(self) -> None:
        waits = (self.first_wait, self.max_wait, self.deadline)
        counts = (self.max_attempts, self.max_reply_bytes)
        counted = all(isinstance(count, int) and not isinstance(count, bool) and count >= 1 for count in counts)
        timed = all(isinstance(wait, int | float) and wait >= 0.0 for wait in waits)
        if not counted or not timed or not 0.0 < self.deadline < math.inf:
            raise ConfigurationError(
                "expected max_attempts and max_reply_bytes >= 1, waits >= 0 seconds and a finite deadline above 0, "
                f"found {self}"
            )

    def wait(self, reply: Reply, *, attempt: int) -> float | None:
        """Returns the seconds to wait before the next attempt; None: this reply is final."""
        if reply.fault in {None, "content", "unsilent", "refused"} or attempt >= self.max_attempts:
            return None
        if reply.fault != "busy":
            return 0.0
        return min(self.max_wait, max(self.first_wait * 2.0 ** (attempt - 1), reply.retry_after or 0.0))


@dataclass(frozen=True)
class ProbePolicy(RetryPolicy):
    """Retries of a public probe: a busy or unreachable server is asked once more, soon."""

    @classmethod
    def of(cls, retry: RetryPolicy) -> ProbePolicy:
        """Returns the probe's policy where rows have the policy `retry`."""
        limits = (retry.deadline, retry.max_reply_bytes)
        return cls(retry.max_attempts, retry.first_wait, min(retry.max_wait, 2.0), *limits)

    def wait(self, reply: Reply, *, attempt: int) -> float | None:
        """Returns what `RetryPolicy.wait` does, except that a second busy reply is final."""
        return None if reply.fault == "busy" and attempt >= 2 else super().wait(reply, attempt=attempt)


@dataclass(frozen=True)
class Request:
    """One call: the hidden prompt and the public rest.

    Attributes:
      prompt: the prompt.
      render: how the prompt becomes the model's input.
      options: keyword arguments of the call, such as `max_tokens`; a decision model takes none.
      is_readable: whether an answer has what was asked for; if not, the call is made again.
      explain: what a failure may report: "" for a private call; "kind" (type and status) for a public one; "text" for
        the probe, which precedes all private calls: later messages may quote the usage of private calls.
    """

    prompt: Hidden[str]
    render: Render
    options: Mapping[str, Any]
    is_readable: Callable[[Answer], bool] = field(default=lambda answer: True, repr=False)  # noqa: ARG005
    explain: Literal["", "kind", "text"] = ""
