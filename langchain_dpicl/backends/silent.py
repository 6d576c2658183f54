"""The one module that makes private LangChain calls. Knows no mechanism, no ledger and no provider.

A call goes straight to the model's `_generate` or `_agenerate`, on a copy without callbacks, cache and verbosity, in
an empty context with tracing off: no handler, tracer, cache or debug switch stands on that way. `.invoke` has them all
on it, whatever its config says. What comes back is a `Reply`; an exception never does, as its text, its context chain
and its frames would hold the prompt.
"""

from __future__ import annotations

import asyncio
import contextvars
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NoReturn, TypeVar

from langchain_core.callbacks import BaseCallbackHandler, BaseCallbackManager
from langchain_core.language_models import BaseChatModel, BaseLLM
from langchain_core.messages import BaseMessage
from langchain_core.runnables import Runnable
from langchain_core.runnables.base import RunnableBindingBase
from langsmith.run_helpers import tracing_context

from langchain_dpicl.exceptions import ConfigurationError, PrivateAccessError, UnsilencableModelError

T = TypeVar("T")
Render = Callable[[str], "str | list[BaseMessage]"]
"""Turns the private prompt into what the model takes: text for a completion model, messages for a chat model."""


class Hidden(Generic[T]):
    """Private data in a box: no repr, no pickle; so a frame that holds only boxes shows nothing."""

    __slots__ = ("_value",)

    def __init__(self, value: T) -> None:
        self._value = value

    def reveal(self) -> T:
        """Returns the content; never bind it to a name."""
        return self._value

    def __repr__(self) -> str:
        return "Hidden(<private>)"

    def __reduce__(self) -> NoReturn:
        raise PrivateAccessError("private prompts and answers cannot be pickled or copied")


@dataclass(frozen=True)
class Answer:
    """The first generation of a result, without its usage, ids and headers."""

    text: str = field(repr=False)
    logprobs: Any = field(repr=False)
    finish_reason: Any = field(repr=False)
    refused: bool = field(repr=False)


@dataclass(frozen=True)
class Reply:
    """What a silent call returns: an answer in its box, or a fault.

    Attributes:
      answer: the answer, or None.
      fault: "busy" (rate limit, server error, timeout: worth waiting for), "unreadable" (an answer that another try
        may better), "loop" (the async client belongs to another event loop) or "content" (the same call fails again).
      retry_after: seconds the provider asked to wait, if it did.
      detail: why a call with PUBLIC text failed (see `Request.explain`); empty for private calls.
    """

    answer: Hidden[Answer] | None = field(default=None, repr=False)
    fault: Literal["busy", "unreadable", "loop", "content"] | None = field(default=None, repr=False)
    retry_after: float | None = field(default=None, repr=False)
    detail: str = ""


@dataclass(frozen=True)
class RetryPolicy:
    """How long one row's call is waited for: by its own count, so that no row's patience depends on another's.

    There is no wall-clock limit over attempts, as other rows' retries would move it; the client's own timeout starts
    with each call.

    Args:
      max_attempts: calls in all, the first included.
      first_wait: seconds before the second attempt at a busy server; doubled for each further one.
      max_wait: seconds a single wait may last, whatever the provider asks for.
    """

    max_attempts: int = 8
    first_wait: float = 0.5
    max_wait: float = 30.0

    def __post_init__(self) -> None:
        if self.max_attempts < 1 or not (self.first_wait >= 0.0 and self.max_wait >= 0.0):
            raise ConfigurationError(f"expected max_attempts >= 1 and waits >= 0 seconds, found {self}")

    def wait(self, reply: Reply, *, attempt: int) -> float | None:
        """Returns the seconds to wait before the next attempt; None: this reply is final."""
        if reply.fault in {None, "content"} or attempt >= self.max_attempts:
            return None
        if reply.fault != "busy":
            return 0.0
        return min(self.max_wait, max(self.first_wait * 2.0 ** (attempt - 1), reply.retry_after or 0.0))


@dataclass(frozen=True)
class ProbePolicy(RetryPolicy):
    """Patience with a public probe: a server that is busy or cannot be reached is asked once more, soon."""

    @classmethod
    def of(cls, retry: RetryPolicy) -> ProbePolicy:
        """Returns the probe's patience where rows have that of `retry`."""
        return cls(retry.max_attempts, retry.first_wait, min(retry.max_wait, 2.0))

    def wait(self, reply: Reply, *, attempt: int) -> float | None:
        """Is `RetryPolicy.wait`, but a second busy reply is final."""
        return None if reply.fault == "busy" and attempt >= 2 else super().wait(reply, attempt=attempt)


@dataclass(frozen=True)
class Request:
    """One call: the prompt in its box and the public rest.

    Attributes:
      prompt: the prompt.
      render: how the prompt becomes the model's input.
      options: keyword arguments of the call, such as `max_tokens`.
      is_readable: says whether an answer has what was asked for; if not, the call is made again.
      explain: what a failure may tell: "" of a private call; "kind" (type and status) of a public one; "text" of the
        probe, which comes before any private call: later texts may quote what private calls used.
    """

    prompt: Hidden[str]
    render: Render
    options: Mapping[str, Any]
    is_readable: Callable[[Answer], bool] = field(default=lambda answer: True, repr=False)  # noqa: ARG005
    explain: Literal["", "kind", "text"] = ""


class SilentModel:
    """A LangChain model that nobody overhears; made by `silence`.

    Formal guarantees:
      - A call runs on a model copy without callbacks, cache and verbosity, in an empty context with tracing off.
      - A reply depends on the model and the one request; no exception carries any of the request or the response.
      - The model's own `rate_limiter` is asked before every attempt.
    """

    def __init__(self, model: BaseChatModel | BaseLLM, bound: Mapping[str, Any]) -> None:
        self._model = model
        self._bound = dict(bound)
        self._limiter = getattr(model, "rate_limiter", None)

    @property
    def is_chat(self) -> bool:
        """Whether the model takes messages; otherwise it takes text."""
        return isinstance(self._model, BaseChatModel)

    @property
    def name(self) -> str:
        """Public name: the provider's model name where there is one."""
        named = getattr(self._model, "model_name", None) or getattr(self._model, "model", None)
        return named if isinstance(named, str) else type(self._model).__name__

    def ask(self, request: Request, *, retry: RetryPolicy) -> Reply:
        """Makes one call and waits out what is worth waiting for."""
        attempt = 1
        while True:
            reply = contextvars.Context().run(self._attempt, request)
            wait = retry.wait(reply, attempt=attempt)
            if wait is None:
                return reply
            time.sleep(wait)
            attempt += 1

    async def aask(self, request: Request, *, retry: RetryPolicy) -> Reply:
        """Is `ask`, awaitable; a client that belongs to another event loop is replaced by the blocking one."""
        loop, attempt, is_lost = asyncio.get_running_loop(), 1, False
        while True:
            if is_lost:
                reply = await loop.run_in_executor(None, contextvars.Context().run, self._attempt, request)
            else:
                reply = await loop.create_task(self._aattempt(request), context=contextvars.Context())
                is_lost = reply.fault == "loop"
            wait = retry.wait(reply, attempt=attempt)
            if wait is None:
                return reply
            await asyncio.sleep(wait)
            attempt += 1

    def _attempt(self, request: Request) -> Reply:
        """The private frame: what is private here gets no name, and what is raised stays here."""
        try:
            with tracing_context(enabled=False):
                if self._limiter is not None:
                    self._limiter.acquire(blocking=True)
                return _reply(request, self._model._generate(self._input(request), **self._options(request)))  # noqa: SLF001
        except KeyboardInterrupt as error:
            stop = _unmarked(error)
        except BaseException as error:  # noqa: BLE001  any failure of a row is that row's abstention
            return _fault(error, explain=request.explain)
        raise stop  # outside the handler: the provider's exception is not its context

    async def _aattempt(self, request: Request) -> Reply:
        """Is `_attempt`, awaitable."""
        try:
            with tracing_context(enabled=False):
                if self._limiter is not None:
                    await self._limiter.aacquire(blocking=True)
                return _reply(request, await self._model._agenerate(self._input(request), **self._options(request)))  # noqa: SLF001
        except BaseException as error:  # noqa: BLE001  any failure of a row is that row's abstention
            if not _is_stop(error):
                return _fault(error, explain=request.explain)
            stop = _unmarked(error)
        raise stop  # outside the handler: the provider's exception is not its context

    def _input(self, request: Request) -> Any:
        """Completion models take a list of texts, chat models one list of messages."""
        return request.render(request.prompt.reveal()) if self.is_chat else [request.render(request.prompt.reveal())]

    def _options(self, request: Request) -> dict[str, Any]:
        return {**self._bound, **request.options}


def unwrap(model: Any) -> tuple[Any, dict[str, Any]]:
    """Takes bindings off a model: returns it and the bound arguments, the outermost binding winning.

    Configs, listeners and retries of the bindings are dropped: they would watch or repeat the call.
    """
    bound: dict[str, Any] = {}
    while isinstance(model, RunnableBindingBase):
        bound = {**model.kwargs, **bound}
        model = model.bound
    return model, bound


def silence(model: Any) -> SilentModel:
    """Returns a silent copy of a LangChain model, bound or not; the given model is left as it is.

    Raises:
      UnsilencableModelError: it is no chat or completion model, it holds another runnable or a callback handler of
        its own (which would be called in the open), or it overrides LangChain's caching step (which is bypassed here).
    """
    inner, bound = unwrap(model)
    if not isinstance(inner, BaseChatModel | BaseLLM):
        raise UnsilencableModelError(
            f"expected a chat or completion model, found {type(inner).__name__}; "
            "pass the model itself, not a chain, fallback or configurable wrapper around it"
        )
    _refuse_overrides(type(inner))
    fields = type(inner).model_fields
    _refuse_company(type(inner).__name__, {name: getattr(inner, name, None) for name in fields})
    quiet = inner.model_copy(update={name: value for name, value in _QUIET.items() if name in fields})
    if "stop" in fields:
        quiet = quiet.model_copy(update={"stop": [] if isinstance(getattr(quiet, "stop", None), list) else None})
    return SilentModel(quiet, {name: value for name, value in bound.items() if name not in _DROPPED})


# The first three are silence; the others make the answer one plain generation with its logprobs.
_QUIET: dict[str, Any] = {
    "callbacks": None,
    "cache": False,
    "verbose": False,
    "streaming": False,
    "use_responses_api": False,
    "n": 1,
    "best_of": 1,
    "echo": False,
}
_DROPPED = frozenset({"callbacks", "run_manager", "config", "stop", "stream", "n", "best_of", "echo"})
_CACHING_STEPS = ("_generate_with_cache", "_agenerate_with_cache", "_generate_helper", "_agenerate_helper")
_BUSY_STATUS = frozenset({408, 409, 425, 429})
_OTHER_LOOP = re.compile(r"event loop|different loop", re.IGNORECASE)
_BUSY_NAMES = ("Timeout", "Connection", "RateLimit", "ServiceUnavailable", "Overloaded", "InternalServer")


def _refuse_overrides(kind: type) -> None:
    for name in _CACHING_STEPS:
        owner = next((base for base in kind.__mro__ if name in vars(base)), None)
        if owner is not None and not owner.__module__.startswith("langchain_core."):
            raise UnsilencableModelError(
                f"{kind.__name__} overrides {name}, a step that private calls leave out; "
                "pass a model that puts its own work into _generate and _agenerate"
            )


def _refuse_company(kind: str, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        inside = value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else [value]
        watched = any(isinstance(item, Runnable | BaseCallbackHandler | BaseCallbackManager) for item in inside)
        if watched and name != "callbacks":
            raise UnsilencableModelError(
                f"{kind} holds a runnable or callback handler in {name!r}, which would see the prompts; "
                "pass the inner model itself"
            )


def _reply(request: Request, result: Any) -> Reply:
    """Boxes the first generation of a ChatResult or LLMResult."""
    first = result.generations[0]
    answer = _answer(first[0] if isinstance(first, list) else first)
    return Reply(Hidden(answer), fault=None if request.is_readable(answer) else "unreadable")


def _answer(generation: Any) -> Answer:
    info = generation.generation_info or {}
    extra = getattr(getattr(generation, "message", None), "additional_kwargs", None) or {}
    return Answer(
        text=generation.text,
        logprobs=info.get("logprobs"),
        finish_reason=info.get("finish_reason"),
        refused=bool(extra.get("refusal")),
    )


def _is_stop(error: BaseException) -> bool:
    """Whether somebody stops this task, rather than a row's call raising what looks like a stop."""
    task = asyncio.current_task()
    is_cancelled = isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
    return is_cancelled or isinstance(error, KeyboardInterrupt)


def _fault(error: BaseException, *, explain: str) -> Reply:
    """Sorts a failure; total, as attributes of foreign exceptions may raise."""
    try:
        status = _status(error)
        names = [base.__name__ for base in type(error).__mro__]
        busy = status in _BUSY_STATUS or status >= 500 or isinstance(error, TimeoutError | ConnectionError)
        busy = busy or (status == 0 and any(mark in name for name in names for mark in _BUSY_NAMES))
        lost = isinstance(error, RuntimeError) and bool(_OTHER_LOOP.search(str(error)))
        detail = names[0] + (f" (HTTP {status})" if status else "") if explain else ""
        detail += f": {str(error)[:300]}" if explain == "text" else ""
        return Reply(
            fault="loop" if lost else "busy" if busy else "content", retry_after=_retry_after(error), detail=detail
        )
    except Exception:  # noqa: BLE001  see the docstring
        return Reply(fault="content")


def _status(error: BaseException) -> int:
    """Returns the HTTP status of an exception, 0 where it has none."""
    status = getattr(error, "status_code", None) or getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else 0


def _retry_after(error: BaseException) -> float | None:
    headers = getattr(getattr(error, "response", None), "headers", None) or {}
    asked = str(headers.get("retry-after", ""))
    return float(asked) if asked.isdecimal() and asked.isascii() else None


def _unmarked(error: BaseException) -> BaseException:
    """Returns a fresh exception of the same kind, without text, traceback and context."""
    return KeyboardInterrupt() if isinstance(error, KeyboardInterrupt) else asyncio.CancelledError()
