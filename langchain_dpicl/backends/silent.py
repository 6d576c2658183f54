"""The only module that makes private calls of LangChain models."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from langchain_core.outputs import ChatResult, LLMResult
from langchain_core.runnables.base import RunnableBindingBase
from langsmith.run_helpers import tracing_context

from langchain_dpicl.backends._door import look_after_door, refuse_other_transports
from langchain_dpicl.backends._faults import sort
from langchain_dpicl.backends._passage import Passage
from langchain_dpicl.backends._preflight import (
    CLASSIFYING,
    Kind,
    Way,
    hush_clients,
    kind_and_doors,
    refuse_open_models,
)
from langchain_dpicl.backends._quiet import RUNS_INSIDE, Call, begin, watching
from langchain_dpicl.backends._settings import private_arguments, private_settings
from langchain_dpicl.backends._talk import Answer, Hidden, ProbePolicy, Render, Reply, Request, RetryPolicy
from langchain_dpicl.exceptions import ConfigurationError, UnsilencableModelError

__all__ = [
    "Answer",
    "Hidden",
    "ProbePolicy",
    "Render",
    "Reply",
    "Request",
    "RetryPolicy",
    "SilentModel",
    "quietly",
    "silence",
    "unwrap",
]

# A call goes straight to the model's `_generate` or `_agenerate` (a decision model's `_decide` or `_adecide`), on a
# copy without callbacks, cache and verbosity, in an empty context with tracing off; `.invoke` would run them all,
# whatever its config. `_preflight` refuses models with wrappers in the path, `_quiet` withholds logs and warnings and
# detects inner runs, `_door` limits HTTP. The result is a `Reply`, never an exception: its text, context chain and
# frames would hold the prompt.
T = TypeVar("T")


class SilentModel:
    """A LangChain model whose calls only the provider sees; made by `silence`.

    Formal guarantees:
      - A call runs on a model copy without callbacks, cache and verbosity, in an empty context with tracing off.
      - A reply depends on the model and the one request; no exception carries any of the request or the response.
      - The model's own `rate_limiter` is asked before every attempt.
      - No redirect is followed, and time and size of a reply are limited (`RetryPolicy`); a call that goes beyond is
        not made again: it abstains (fault "content"), and a public one has the fault "refused".
      - Nothing is logged, warned of or traced by a private call, and one that would be overheard is not made: it
        abstains (fault "content"), and a public one raises UnsilencableModelError.
    """

    def __init__(
        self, model: Any, bound: Mapping[str, Any], *, takes: tuple[Kind, tuple[str, str]] | None = None
    ) -> None:
        refuse_other_transports(model)
        self._model = model
        self._kind, self._doors = takes or kind_and_doors(model)
        self._way = Way(model)
        self._bound = dict(bound)
        self._limiter = getattr(model, "rate_limiter", None)
        self._hosts: dict[str, None] = {}

    @property
    def kind(self) -> Kind:
        """What the model takes: messages, text, or questions about a text."""
        return self._kind

    @property
    def is_chat(self) -> bool:
        """Whether the model takes messages."""
        return self._kind == "chat"

    @property
    def name(self) -> str:
        """Public name: the provider's model name where there is one, as a binding may set it."""
        named = self._bound.get("model") or getattr(self._model, "model_name", None)
        named = named or getattr(self._model, "model", None)
        return named if isinstance(named, str) else type(self._model).__name__

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts and ports of the public calls so far, proxies included; () for a model without HTTP."""
        return tuple(self._hosts)

    def trouble(self) -> str:
        """Returns who would see a call made now, with advice; "" if nobody would."""
        return self._way.trouble()

    def ask(self, request: Request, *, retry: RetryPolicy) -> Reply:
        """Makes one call, with retries."""
        self._refuse_options(request)
        attempt = 1
        while True:
            reply = contextvars.Context().run(self._attempt, request, retry)
            wait = retry.wait(reply, attempt=attempt)
            if wait is None:
                return self._final(reply, request)
            time.sleep(wait)
            attempt += 1

    async def aask(self, request: Request, *, retry: RetryPolicy) -> Reply:
        """Async twin of `ask`; a client that belongs to another event loop is replaced by the blocking one."""
        self._refuse_options(request)
        loop, attempt, is_lost = asyncio.get_running_loop(), 1, False
        while True:
            if is_lost:
                reply = await loop.run_in_executor(None, contextvars.Context().run, self._attempt, request, retry)
            else:
                reply = await self._awaited(request, retry)
                is_lost = reply.fault == "loop"
            wait = retry.wait(reply, attempt=attempt)
            if wait is None:
                return self._final(reply, request)
            await asyncio.sleep(wait)
            attempt += 1

    async def _awaited(self, request: Request, retry: RetryPolicy) -> Reply:
        """Runs one attempt as a task in its own context; a call that cancels itself is a fault of its row."""
        attempt = asyncio.get_running_loop().create_task(self._aattempt(request, retry), context=contextvars.Context())
        caller = asyncio.current_task()
        try:
            return await attempt
        except asyncio.CancelledError:
            if caller is None or caller.cancelling():
                raise
        return Reply(fault="content")

    def _attempt(self, request: Request, retry: RetryPolicy) -> Reply:
        """Makes one attempt; private values here get no name, and errors do not leave this frame."""
        call, passage = _begun(request, retry)
        if trouble := self.trouble():
            return Reply(fault="unsilent", detail=trouble)
        outcome: Reply | None = None
        try:
            try:
                _trace_nothing()
                with watching(call, _probe_text(request)):
                    if self._limiter is not None:
                        self._limiter.acquire(blocking=True)
                    with passage.calling():
                        outcome = _reply(request, self._door(0)(*self._input(request), **self._options(request)))
            except BaseException as error:  # noqa: BLE001  any failure of a row is that row's abstention
                outcome = _outcome(error, explain=request.explain)
        except KeyboardInterrupt:  # while a failure was looked at
            outcome = None
        if outcome is None:  # outside the handlers: the provider's exception is not its context
            raise KeyboardInterrupt
        if _came_late(passage):
            return self._attempt(request, retry)
        return self._if_untripped(outcome, call, passage, request)

    async def _aattempt(self, request: Request, retry: RetryPolicy) -> Reply:
        """Async twin of `_attempt`."""
        call, passage = _begun(request, retry)
        if trouble := self.trouble():
            return Reply(fault="unsilent", detail=trouble)
        outcome: Reply | None = None
        stop: type[BaseException] = KeyboardInterrupt
        try:
            try:
                _trace_nothing()
                with watching(call, _probe_text(request)):
                    if self._limiter is not None:
                        await self._limiter.aacquire(blocking=True)
                    with passage.calling():
                        door, options = self._door(1), self._options(request)
                        outcome = _reply(request, await door(*self._input(request), **options))
            except BaseException as error:  # noqa: BLE001  any failure of a row is that row's abstention
                outcome = _outcome(error, explain=request.explain)
        except KeyboardInterrupt:  # while a failure was looked at
            outcome = None
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # whatever the call makes of a cancellation
            outcome, stop = None, asyncio.CancelledError
        if outcome is None:  # outside the handlers: the provider's exception is not its context
            raise stop
        if _came_late(passage):
            return await self._aattempt(request, retry)
        return self._if_untripped(outcome, call, passage, request)

    def _if_untripped(self, reply: Reply, call: Call, passage: Passage, request: Request) -> Reply:
        """Returns the reply, or a fault in its place if the call broke a rule."""
        if request.explain:  # where a private call goes may depend on its prompt
            self._hosts |= passage.hosts
        if call.tripped:
            return Reply(fault="unsilent", detail=f"{type(self._model).__name__} {RUNS_INSIDE}")
        if passage.stray:
            return Reply(fault="unsilent", detail=f"{type(self._model).__name__} {passage.stray}")
        if passage.is_refused:
            return Reply(fault="refused", detail=passage.reason(request.explain))
        return reply

    def _final(self, reply: Reply, request: Request) -> Reply:
        """Hides the reason of a refused private call; raises that of a public one."""
        if reply.fault not in {"unsilent", "refused"}:
            return reply
        if not request.explain:
            return Reply(fault="content")
        if reply.fault == "unsilent":
            raise UnsilencableModelError(reply.detail)
        return reply

    def _refuse_options(self, request: Request) -> None:
        if self._kind == "decisions" and request.options:
            raise ConfigurationError(f"expected no options for a decision model, found {sorted(request.options)}")

    def _door(self, number: int) -> Callable[..., Any]:
        door: Callable[..., Any] = getattr(self._model, self._doors[number])
        return door

    def _input(self, request: Request) -> tuple[Any, ...]:
        """Returns the model's arguments: a list of messages, a list of texts, or a request."""
        if self._kind == "completion":
            return ([request.render(request.prompt.reveal())],)
        if self._doors == CLASSIFYING:
            return _state_and_questions(request.render(request.prompt.reveal()))
        return (request.render(request.prompt.reveal()),)

    def _options(self, request: Request) -> dict[str, Any]:
        if self._kind == "decisions":
            return {}
        return private_arguments({**self._bound, **request.options})


def _begun(request: Request, retry: RetryPolicy) -> tuple[Call, Passage]:
    """Marks the current context as that of a call, and limits its HTTP exchanges."""
    passage = Passage(retry.deadline, retry.max_reply_bytes)
    call = begin(withholds=not request.explain, passage=passage)
    look_after_door()
    return call, passage


def _came_late(passage: Passage) -> bool:
    """Whether the call imported the HTTP client that it used, so that it can be repeated under limits."""
    return bool(passage.stray) and look_after_door()


def quietly(action: Callable[[], T]) -> T | None:
    """Returns the result of reading a private answer, None if it raised; drops its logs and warnings."""
    stopped = False
    try:
        return contextvars.Context().run(_withheld, action)
    except KeyboardInterrupt:
        stopped = True
    except BaseException:  # noqa: BLE001  an answer that cannot be read is a row that abstains
        stopped = False
    if stopped:
        raise KeyboardInterrupt
    return None


def _withheld(action: Callable[[], T]) -> T:
    begin(withholds=True)
    _trace_nothing()
    return action()


def _untraced() -> dict[contextvars.ContextVar[Any], Any]:
    with tracing_context(enabled=False):
        values = dict(contextvars.copy_context())
    empty = contextvars.Context()
    return {variable: value for variable, value in values.items() if empty.run(variable.get, None) is not value}


_UNTRACED = contextvars.Context().run(_untraced)
"""The variables that `tracing_context` sets; setting them here is much cheaper than entering it per call."""


def _trace_nothing() -> None:
    """Turns tracing off in the current context, which belongs to one silent call."""
    for variable, value in _UNTRACED.items():
        variable.set(value)


def unwrap(model: Any) -> tuple[Any, dict[str, Any]]:
    """Returns a model without bindings, and the bound arguments; the outermost binding wins.

    Configs, listeners and retries of the bindings are dropped: they would watch or repeat the call.
    """
    bound: dict[str, Any] = {}
    while isinstance(model, RunnableBindingBase):
        bound = {**model.kwargs, **bound}
        model = model.bound
    return model, bound


def silence(model: Any) -> SilentModel:
    """Returns a silent copy of a LangChain model, bound or not; the given model is unchanged.

    Raises:
      ConfigurationError: arguments are bound to a decision model, which would ignore them.
      UnsilencableModelError: it is not a chat, completion or decision model; it holds another runnable or a callback
        handler, or overrides LangChain's caching step, which is bypassed here; it is routed through the LangSmith
        gateway; or its class, or the SDK it calls, is instrumented.
    """
    inner, bound = unwrap(model)
    bound = private_arguments({name: value for name, value in bound.items() if name not in _DROPPED})
    if kind_and_doors(inner)[0] == "decisions" and bound:
        raise ConfigurationError(
            f"expected no bound arguments, as {type(inner).__name__} takes none with a call, found {sorted(bound)}; "
            "give them to its constructor"
        )
    refuse_open_models(inner)
    fields = type(inner).model_fields
    settings = {name: value for name, value in _QUIET.items() if name in fields} | private_settings(inner)
    quiet = inner.model_copy(update=settings)
    if "stop" in fields:
        quiet = quiet.model_copy(update={"stop": [] if isinstance(getattr(quiet, "stop", None), list) else None})
    hush_clients(quiet)
    silent = SilentModel(quiet, bound)
    if trouble := silent.trouble():
        raise UnsilencableModelError(trouble)
    return silent


# The first three silence the model; the others make the answer one plain generation with logprobs.
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


def _state_and_questions(request: Any) -> tuple[Any, Any]:
    """Returns input and questions separately, as decision models of langchain_core take them."""
    return request["state"] if "state" in request else request["input"], request["questions"]


def _probe_text(request: Request) -> str:
    """Returns the text of a probe; "" for any other call."""
    return request.prompt.reveal() if request.explain == "text" else ""


def _reply(request: Request, result: Any) -> Reply:
    """Hides the first generation of a ChatResult or LLMResult, or a decision model's response, in a reply."""
    if not isinstance(result, ChatResult | LLMResult) and hasattr(result, "answers"):
        decided = Answer(text="", logprobs=None, finish_reason=None, refused=False, decision=result)
        return Reply(Hidden(decided), fault=None if request.is_readable(decided) else "unreadable")
    first = result.generations[0]
    answer = _answer(first[0] if isinstance(first, list) else first, result.llm_output)
    return Reply(Hidden(answer), fault=None if request.is_readable(answer) else "unreadable")


def _answer(generation: Any, about: Any) -> Answer:
    """Reads one generation; `about` is the result's output, where Anthropic's class puts the stop reason."""
    info = generation.generation_info or {}
    message = getattr(generation, "message", None)
    extra = getattr(message, "additional_kwargs", None) or {}
    return Answer(
        text=generation.text,
        logprobs=info.get("logprobs"),
        finish_reason=info.get("finish_reason") or (about.get("stop_reason") if isinstance(about, dict) else None),
        refused=bool(extra.get("refusal") or getattr(message, "tool_calls", None)),
    )


def _outcome(error: BaseException, *, explain: Literal["", "kind", "text"]) -> Reply | None:
    """Returns a failure as a reply, None for Ctrl-C; never raises, whatever a foreign exception does when read."""
    try:
        return None if isinstance(error, KeyboardInterrupt) else _fault(error, explain=explain)
    except KeyboardInterrupt:
        return None
    except BaseException:  # noqa: BLE001  see the docstring
        return Reply(fault="content")


def _fault(error: BaseException, *, explain: Literal["", "kind", "text"]) -> Reply:
    fault, retry_after, detail = sort(error, explain=explain)
    return Reply(fault=fault, retry_after=retry_after, detail=detail)
