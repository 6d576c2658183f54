"""The only module that makes private calls of LangChain models: settings, retries, replies, threads and tasks."""

from __future__ import annotations

import asyncio
import contextvars
import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatResult, LLMResult
from langchain_core.runnables.base import RunnableBindingBase
from langsmith.run_helpers import tracing_context

from langchain_dpicl._opaque import Opaque, PerProcess, Uncopyable, this_process
from langchain_dpicl.backends.base import check_whole
from langchain_dpicl.backends.private_calls.http_client import CallLimits, look_after_door, refuse_other_transports
from langchain_dpicl.backends.private_calls.log_guard import RUNS_INSIDE, CallMark, begin, lend_threads, watch_runs
from langchain_dpicl.backends.private_calls.method_checks import LITELLM_CHECKED_ONCE, top_of
from langchain_dpicl.backends.private_calls.model_checks import (
    CLASSIFYING,
    Kind,
    PromptPath,
    calls_litellm,
    hush_clients,
    kind_and_doors,
    refuse_open_models,
)
from langchain_dpicl.backends.sync_async import (
    CallLimit,
    FairSemaphore,
    call_limit,
    call_stop,
    check_silent,
    concurrency_limit,
    is_in_loop,
    run_elsewhere,
)
from langchain_dpicl.exceptions import ConfigurationError, ModelCallError, UnsilencableModelError

CAP, HEAT = "max_tokens", "temperature"
"""The names of two options here; `stop`, `logprobs` and `top_logprobs` have the same name in every class."""

OPTIONS, STOP = "options", "stop"
"""Arguments of a class with fields: `options` is a mapping that it sends in the place of its fields and of `stop`."""

STOPS = (STOP, "stop_sequences")
"""The names that classes have for the texts that end an answer, as fields and as bound arguments."""


class SpelledOptions(NamedTuple):
    """Options as one class takes them: arguments of its call, and fields of the copy that is called."""

    arguments: dict[str, Any]
    fields: dict[str, Any]


@dataclass(frozen=True)
class Spelling:
    """How one class spells the options of a call.

    Attributes:
      cap: its name of the most tokens of an answer.
      fields: options, by its own names, that are fields of the model; as arguments its client rejects them. An
        argument `options` takes them in, as the class then ignores its fields.
      greedy: what it takes in the place of temperature 0, which its server rejects.
      added: what every call sends besides, whatever else is asked for.
      is_text_only: whether it passes no log-probabilities on, so that it votes with its text without being probed.
    """

    cap: str = CAP
    fields: frozenset[str] = frozenset()
    greedy: Mapping[str, Any] = field(default_factory=lambda: {HEAT: 0.0})
    added: Mapping[str, Any] = field(default_factory=dict)
    is_text_only: bool = False

    def spell(self, options: Mapping[str, Any]) -> SpelledOptions:
        """Returns options in the names of the class; of two with the same name the later counts.

        >>> Spelling("num_predict", fields=frozenset({"num_predict"})).spell({"max_tokens": 5, "logprobs": True})
        SpelledOptions(arguments={'logprobs': True}, fields={'num_predict': 5})
        """
        spelled: dict[str, Any] = {}
        for name, value in options.items():
            spelled |= self.greedy if name == HEAT and value == 0.0 else {self.cap if name == CAP else name: value}
        spelled |= self.added
        fields = {name: spelled.pop(name) for name in self.fields & spelled.keys()}
        own = spelled.get(OPTIONS)
        if not self.fields or not isinstance(own, Mapping):
            return SpelledOptions(spelled, fields)
        # These replace the fields and the argument `stop`; one bound among them is dropped as a bound `stop` is.
        kept = {name: value for name, value in own.items() if name != STOP}
        asked = {name: spelled.pop(name) for name in (STOP,) if name in spelled}
        return SpelledOptions({**spelled, OPTIONS: kept | fields | asked}, {})


_OLLAMA_FIELDS = frozenset({"num_predict", HEAT})
_OLLAMA = Spelling("num_predict", fields=_OLLAMA_FIELDS)
_OLLAMA_TEXT = Spelling("num_predict", fields=_OLLAMA_FIELDS, is_text_only=True)
_GEMINI = Spelling("max_output_tokens", is_text_only=True)
_TEXT = Spelling(is_text_only=True)
_LITELLM = Spelling(added={"no-log": True, "caching": False})

# By package and name, so that no provider's package is imported.
SPELLINGS: Mapping[tuple[str, str], Spelling] = {
    ("langchain_anthropic", "ChatAnthropic"): _TEXT,
    ("langchain_anthropic", "AnthropicLLM"): _TEXT,
    ("langchain_aws", "ChatBedrockConverse"): _TEXT,
    ("langchain_google_genai", "ChatGoogleGenerativeAI"): _GEMINI,
    # TGI rejects temperature 0; without a temperature it takes the likeliest token.
    ("langchain_huggingface", "HuggingFaceEndpoint"): Spelling(
        "max_new_tokens", greedy={HEAT: None, "do_sample": False}, is_text_only=True
    ),
    ("langchain_litellm", "ChatLiteLLM"): _LITELLM,
    ("langchain_mistralai", "ChatMistralAI"): _TEXT,
    ("langchain_ollama", "ChatOllama"): _OLLAMA,
    ("langchain_ollama", "OllamaLLM"): _OLLAMA_TEXT,
}
"""The spelling of each class that has one of its own; subclasses inherit it."""

_USUAL = Spelling()


def spelling_of(model: Any) -> Spelling:
    """Returns the spelling of a model's class, or of its nearest base in the table; that of OpenAI's for any other."""
    keys = ((top_of(base.__module__), base.__name__) for base in type(model).__mro__)
    return next((SPELLINGS[key] for key in keys if key in SPELLINGS), _USUAL)


T = TypeVar("T")

DEADLINE = 900.0
"""Seconds of one attempt, unless given: longer than the 600 seconds that the clients of OpenAI and Anthropic wait."""

MAX_REPLY_BYTES = 32 * 2**20
"""Bytes of one reply's body, unless given: enough for the log-probabilities of a vocabulary of 256,000 tokens."""

Fault: TypeAlias = Literal["busy", "unreadable", "loop", "content", "unsilent", "refused"]
Render = Callable[[str], "str | list[BaseMessage] | dict[str, Any]"]
"""Turns the private prompt into what the model takes: text for a completion model, messages for a chat model, a request
(input and questions) for a decision model."""


class OpaqueValue(Opaque, Generic[T]):
    """Private data without repr and pickle, so that frames and logs that hold it show nothing."""

    __slots__ = ("_value",)

    def __init__(self, value: T) -> None:
        self._value = value

    def reveal(self) -> T:
        """Returns the content; do not bind it to a name, as frames show their locals."""
        return self._value


@dataclass(frozen=True)
class ModelOutput:
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

    answer: OpaqueValue[ModelOutput] | None = field(default=None, repr=False)
    fault: Fault | None = field(default=None, repr=False)
    retry_after: float | None = field(default=None, repr=False)
    detail: str = ""


TASK_NAME = "dpicl call"
"""Name of the asyncio tasks of private calls."""


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
      options: keyword arguments of the call, such as `max_tokens`, in OpenAI's names or in those of the class
        (`SPELLINGS`); a decision model takes none.
      is_readable: whether an answer has what was asked for; if not, the call is made again.
      explain: what a failure may report: "" for a private call; "kind" (type and status) for a public one; "text" for
        the probe, which precedes all private calls: later messages may quote the usage of private calls.
      watch: of a public call: unique text of its prompt, by which runs that it starts in other threads are recognized;
        "": the whole prompt of a call with `explain` "text", nothing of any other.
    """

    prompt: OpaqueValue[str]
    render: Render
    options: Mapping[str, Any]
    is_readable: Callable[[ModelOutput], bool] = field(default=lambda answer: True, repr=False)  # noqa: ARG005
    explain: Literal["", "kind", "text"] = ""
    watch: str = ""


_BUSY_STATUS = frozenset({408, 409, 425, 429})
_FAILED = re.compile("[45][0-9]{2}")
_OTHER_LOOP = re.compile(r"event loop|different loop|handler is closed", re.IGNORECASE)  # the last: uvloop
_BUSY_NAMES = (
    *("Timeout", "Connection", "RateLimit", "ServiceUnavailable", "Overloaded", "InternalServer"),
    # Of httpx and requests, which some integrations do not wrap.
    *("NetworkError", "RemoteProtocolError", "ProxyError", "ChunkedEncodingError"),
)


class ClassifiedError(NamedTuple):
    """A classified failure; the fields are those of `Reply`."""

    fault: Literal["busy", "loop", "content"]
    retry_after: float | None = None
    detail: str = ""


def classify_error(error: BaseException, *, explain: Literal["", "kind", "text"]) -> ClassifiedError:
    """Classifies a failure, and never raises, although attributes of the exception may; `explain`: see `Request`."""
    try:
        # LangChain's classes raise errors of their own from those of the SDK, which know the status.
        told = next((one for one in _error_chain(error, causes_alone=True) if _status(one)), error)
        status = _status(told)
        names = [base.__name__ for base in type(error).__mro__]
        busy = status in _BUSY_STATUS or status >= 500 or isinstance(error, TimeoutError | ConnectionError)
        busy = busy or (status == 0 and any(mark in name for name in names for mark in _BUSY_NAMES))
        # SDKs raise their own connection error from the event loop's complaint.
        lost = any(isinstance(one, RuntimeError) and _OTHER_LOOP.search(str(one)) for one in _error_chain(error))
        detail = names[0] + (f" (HTTP {status})" if status else "") if explain else ""
        detail += f": {_one_line(error)[:300]}" if explain == "text" else ""
        return ClassifiedError("loop" if lost else "busy" if busy else "content", _retry_after(told), detail)
    except Exception:  # noqa: BLE001  see the docstring
        return ClassifiedError("content")


def _one_line(error: BaseException) -> str:
    """Returns the message of an exception on one line, without pydantic's reference to its documentation."""
    return " ".join(str(error).split()).partition(" For further information visit ")[0]


def _error_chain(error: BaseException | None, *, causes_alone: bool = False) -> Iterator[BaseException]:
    for _ in range(10):
        if error is None:
            return
        yield error
        error = error.__cause__ or (None if causes_alone else error.__context__)


def _status(error: BaseException) -> int:
    """Returns the HTTP status of an exception, 0 where it has none."""
    response = getattr(error, "response", None)
    places = [(error, "status_code"), (response, "status_code"), (error, "code"), (error, "status")]
    found = [_boto(response).get("HTTPStatusCode"), *(getattr(owner, name, None) for owner, name in places)]
    found += [body.get("code") for body in error.args[:1] if isinstance(body, dict)]  # of a reply of status 200
    # LiteLLM writes it as text; some enumerations show another text than their number.
    written = (str(int(one)) if isinstance(one, int) else one for one in found if isinstance(one, int | str))
    return next((int(status) for status in written if _FAILED.fullmatch(status)), 0)


def _boto(response: Any) -> Mapping[str, Any]:
    """Returns what botocore puts into its errors, whose classes are named as each service names its faults."""
    made: Any = response.get("ResponseMetadata") if isinstance(response, dict) else None
    return made if isinstance(made, dict) else {}


def _retry_after(error: BaseException) -> float | None:
    response = getattr(error, "response", None)
    headers = getattr(response, "headers", None) or _boto(response).get("HTTPHeaders") or {}
    asked = str(headers.get("retry-after", ""))
    return float(asked) if asked.isdecimal() and asked.isascii() else None


DROPPED = frozenset(
    {
        "cache_control",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "requestMetadata",
        "request_metadata",
        "safety_identifier",
        "session_id",
        "trace",
        "user",
        "user_profile_id",
    }
)
"""Arguments of providers that tag a call or store its prompt; never sent with private calls."""

_MAPPINGS = ("model_kwargs", "extra_body")
_STORING = "store"
_OWN_HOSTS = ("openai.com", "openai.azure.com")
"""Where `store` is known; other servers may reject it."""


def private_settings(model: Any) -> dict[str, Any]:
    """Returns the model's fields that have other values in private calls; the model is unchanged."""
    fields = type(model).model_fields
    changed: dict[str, Any] = {}
    for name in DROPPED & fields.keys():
        if fields[name].default is None:
            changed[name] = None
        elif isinstance(getattr(model, name, None), Mapping):  # `Field(default_factory=dict)`
            changed[name] = {}
        elif fields[name].default_factory is not None:  # `Field(default_factory=from_env(...))`
            changed[name] = None
    for name in _MAPPINGS:
        value = getattr(model, name, None)
        if name in fields and isinstance(value, Mapping):
            changed[name] = private_arguments(value)
    if _STORING in fields and (getattr(model, _STORING, None) is not None or _is_own_host(model)):
        changed[_STORING] = False
    return changed


def private_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keyword arguments of a call, or a part of its body, as private calls send them.

    >>> private_arguments({"seed": 7, "user": "me", "store": True, "extra_body": {"metadata": {"team": "x"}}})
    {'seed': 7, 'store': False, 'extra_body': {}}
    """
    sent = {name: value for name, value in arguments.items() if name not in DROPPED}
    for name in _MAPPINGS:
        if isinstance(sent.get(name), Mapping):
            sent[name] = private_arguments(sent[name])
    return {**sent, _STORING: False} if sent.get(_STORING) is not None else sent


def _is_own_host(model: Any) -> bool:
    """Whether any client of a model, blocking or awaited, calls one of these hosts."""
    names = ("root_client", "root_async_client", "client", "async_client")  # a root is None where a client is given
    clients = [getattr(model, name, None) for name in names]
    clients += [getattr(client, "_client", None) for client in clients]
    hosts = [getattr(getattr(client, "base_url", None), "host", None) for client in clients]
    return any(isinstance(host, str) and f".{host}".endswith(tuple(f".{own}" for own in _OWN_HOSTS)) for host in hosts)


# A call goes straight to the model's `_generate` or `_agenerate` (a decision model's `_decide` or `_adecide`), on a
# copy without callbacks, cache and verbosity, in an empty context with tracing off; `.invoke` would run them all,
# whatever its config. `model_checks` refuses models with wrappers in the path, `log_guard` withholds logs and warnings
# and detects inner runs, `http_client` limits HTTP. The result is a `Reply`, never an exception: its text, context
# chain and frames would hold the prompt.


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
        self._way = PromptPath(model)
        self._bound = dict(bound)
        self._spelling = spelling_of(model)
        self._unsent = LITELLM_CHECKED_ONCE if calls_litellm(model) else frozenset()
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
    def works_alone(self) -> bool:
        """Whether private calls of the model run one after the other anyway, as around a local engine."""
        return hasattr(getattr(self._model, "backend", None), "by_itself")

    def check_engine(self) -> None:
        """Raises UnsilencableModelError where a hook of others would see a prompt in the model's local engine."""
        check_silent(getattr(self._model, "backend", None))

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

    async def aask(self, request: Request, *, retry: RetryPolicy, threads: ThreadPoolExecutor | None = None) -> Reply:
        """Async twin of `ask`; a client that belongs to another event loop is replaced by the blocking one.

        What the call hands to threads of the event loop is done by `threads`; None: by those of the loop.
        """
        self._refuse_options(request)
        loop, attempt, is_lost = asyncio.get_running_loop(), 1, False
        while True:
            if is_lost:
                reply = await loop.run_in_executor(threads, contextvars.Context().run, self._attempt, request, retry)
            else:
                reply = await self._run_attempt(request, retry, threads)
                is_lost = reply.fault == "loop"
                if is_lost:
                    continue  # which is no attempt: whether there was one depends on what ran before in this process
            wait = retry.wait(reply, attempt=attempt)
            if wait is None:
                return self._final(reply, request)
            await asyncio.sleep(wait)
            attempt += 1

    async def _run_attempt(self, request: Request, retry: RetryPolicy, threads: ThreadPoolExecutor | None) -> Reply:
        """Runs one attempt as a task in its own context; a call that cancels itself is a fault of its row."""
        attempt = asyncio.get_running_loop().create_task(
            self._aattempt(request, retry, threads), name=TASK_NAME, context=contextvars.Context()
        )
        caller = asyncio.current_task()
        try:
            return await attempt
        except asyncio.CancelledError:
            if caller is None or caller.cancelling():
                raise
        return Reply(fault="content")

    def _attempt(self, request: Request, retry: RetryPolicy) -> Reply:
        """Makes one attempt; private values here get no name, and errors do not leave this frame."""
        call, passage = _enter_call(request, retry)
        if trouble := self.trouble():
            return Reply(fault="unsilent", detail=trouble)
        outcome: Reply | None = None
        try:
            try:
                _trace_nothing()
                with watch_runs(call, _probe_text(request)):
                    if self._limiter is not None:
                        self._limiter.acquire(blocking=True)
                    with passage.calling():
                        door, options = self._prepare(0, request)
                        outcome = _reply(request, door(*self._input(request), **options))
            except BaseException as error:  # noqa: BLE001  any failure of a row is that row's abstention
                outcome = _outcome(error, explain=request.explain)
        except KeyboardInterrupt:  # while a failure was looked at
            outcome = None
        if outcome is None:  # outside the handlers: the provider's exception is not its context
            raise KeyboardInterrupt
        if _came_late(passage):
            return self._attempt(request, retry)
        return self._reply_unless_tripped(outcome, call, passage, request)

    async def _aattempt(self, request: Request, retry: RetryPolicy, threads: ThreadPoolExecutor | None) -> Reply:
        call, passage = _enter_call(request, retry)
        if trouble := self.trouble():
            return Reply(fault="unsilent", detail=trouble)
        outcome: Reply | None = None
        stop: type[BaseException] = KeyboardInterrupt
        try:
            try:
                _trace_nothing()
                with watch_runs(call, _probe_text(request)), lend_threads(threads, is_always=True):
                    if self._limiter is not None:
                        await self._limiter.aacquire(blocking=True)
                    with passage.calling():
                        door, options = self._prepare(1, request)
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
            return await self._aattempt(request, retry, threads)
        return self._reply_unless_tripped(outcome, call, passage, request)

    def _reply_unless_tripped(self, reply: Reply, call: CallMark, passage: CallLimits, request: Request) -> Reply:
        """Returns the reply, or a fault in its place if the call broke a rule."""
        if request.explain:  # where a private call goes may depend on its prompt
            self._hosts |= passage.hosts
            refuse_other_transports(self._model)  # classes may make their client with the first call
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
        own = {**self._bound, **request.options}.get(OPTIONS)
        if self._spelling.fields and own is not None and not isinstance(own, Mapping):
            raise ConfigurationError(
                f"expected options= of {type(self._model).__name__} to be a mapping, found {type(own).__name__}; "
                "pass a dict, or set fields of the model"
            )

    def _prepare(self, number: int, request: Request) -> tuple[Callable[..., Any], dict[str, Any]]:
        """Returns the method to call and its arguments; options that are fields go into a copy made for this call."""
        arguments, fields = self._spelling.spell({} if self._kind == "decisions" else self._options(request))
        return self._door(number, self._model.model_copy(update=fields) if fields else self._model), arguments

    def _door(self, number: int, model: Any) -> Callable[..., Any]:
        door: Callable[..., Any] = getattr(model, self._doors[number])
        return door

    def _input(self, request: Request) -> tuple[Any, ...]:
        """Returns the model's arguments: a list of messages, a list of texts, or a request."""
        if self._kind == "completion":
            return ([request.render(request.prompt.reveal())],)
        if self._doors == CLASSIFYING:
            return _state_and_questions(request.render(request.prompt.reveal()))
        return (request.render(request.prompt.reveal()),)

    def _options(self, request: Request) -> dict[str, Any]:
        asked = private_arguments({**self._bound, **request.options})
        return {name: value for name, value in asked.items() if name not in self._unsent}


def _enter_call(request: Request, retry: RetryPolicy) -> tuple[CallMark, CallLimits]:
    """Marks the current context as that of a call, and limits its HTTP exchanges."""
    passage = CallLimits(retry.deadline, retry.max_reply_bytes)
    call = begin(withholds=not request.explain, passage=passage)
    look_after_door()
    return call, passage


def _came_late(passage: CallLimits) -> bool:
    """Whether the call imported the HTTP client that it used, so that it can be repeated under limits."""
    return bool(passage.stray) and look_after_door()


def read_silently(action: Callable[[], T]) -> T | None:
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


def _tracing_switches() -> dict[contextvars.ContextVar[Any], Any]:
    with tracing_context(enabled=False):
        values = dict(contextvars.copy_context())
    empty = contextvars.Context()
    return {variable: value for variable, value in values.items() if empty.run(variable.get, None) is not value}


_UNTRACED = contextvars.Context().run(_tracing_switches)
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
    bound = quiet_arguments(bound)
    if kind_and_doors(inner)[0] == "decisions" and bound:
        raise ConfigurationError(
            f"expected no bound arguments, as {type(inner).__name__} takes none with a call, found {sorted(bound)}; "
            "give them to its constructor"
        )
    refuse_open_models(inner)
    fields = type(inner).model_fields
    quiet = inner.model_copy(update=quiet_settings(inner))
    for name in STOPS:
        if name in fields:
            quiet = quiet.model_copy(update={name: [] if isinstance(getattr(quiet, name, None), list) else None})
    hush_clients(quiet)
    silent = SilentModel(quiet, bound)
    if trouble := silent.trouble():
        raise UnsilencableModelError(trouble)
    return silent


def quiet_settings(model: Any) -> dict[str, Any]:
    """Returns the fields of a model without bindings that a silent copy has other values of."""
    fields = type(model).model_fields
    return {name: value for name, value in _QUIET.items() if name in fields} | private_settings(model)


def quiet_arguments(bound: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the bound arguments that a silent copy sends."""
    return private_arguments({name: value for name, value in bound.items() if name not in _DROPPED})


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
_DROPPED = frozenset({"callbacks", "run_manager", "config", *STOPS, "stream", "n", "best_of", "echo"})


def _state_and_questions(request: Any) -> tuple[Any, Any]:
    """Returns input and questions separately, as decision models of langchain_core take them."""
    return request["state"] if "state" in request else request["input"], request["questions"]


def _probe_text(request: Request) -> str:
    """Returns the text by which a public call's runs are recognized; "" for a private call."""
    if not request.explain:
        return ""
    return request.watch or (request.prompt.reveal() if request.explain == "text" else "")


def _reply(request: Request, result: Any) -> Reply:
    """Hides the first generation of a ChatResult or LLMResult, or a decision model's response, in a reply."""
    if not isinstance(result, ChatResult | LLMResult) and hasattr(result, "answers"):
        decided = ModelOutput(text="", logprobs=None, finish_reason=None, refused=False, decision=result)
        return Reply(OpaqueValue(decided), fault=None if request.is_readable(decided) else "unreadable")
    first = result.generations[0]
    answer = output_of(first[0] if isinstance(first, list) else first, result.llm_output)
    return Reply(OpaqueValue(answer), fault=None if request.is_readable(answer) else "unreadable")


def output_of(generation: Any, about: Any) -> ModelOutput:
    """Reads one generation; `about` is the result's output, where Anthropic's class puts the stop reason."""
    info = generation.generation_info or {}
    message = getattr(generation, "message", None)
    extra = getattr(message, "additional_kwargs", None) or {}
    return ModelOutput(
        text=generation.text,
        logprobs=info.get("logprobs"),
        finish_reason=_finish_reason(info, about, getattr(message, "response_metadata", None)),
        refused=bool(extra.get("refusal") or getattr(message, "tool_calls", None)),
    )


def _finish_reason(info: Any, about: Any, metadata: Any) -> Any:
    """Returns why an answer ended: OpenAI's, Ollama's, Anthropic's or Bedrock's field."""
    own = info.get("finish_reason") or info.get("done_reason")
    own = own or (about.get("stop_reason") if isinstance(about, dict) else None)
    return own or (metadata.get("stopReason") if isinstance(metadata, dict) else None)


def _outcome(error: BaseException, *, explain: Literal["", "kind", "text"]) -> Reply | None:
    """Returns a failure as a reply, None for Ctrl-C; never raises, whatever a foreign exception does when read."""
    try:
        return None if isinstance(error, KeyboardInterrupt) else _fault(error, explain=explain)
    except KeyboardInterrupt:
        return None
    except BaseException:  # noqa: BLE001  see the docstring
        return Reply(fault="content")


def _fault(error: BaseException, *, explain: Literal["", "kind", "text"]) -> Reply:
    if isinstance(error, UnsilencableModelError):  # by a local engine, which looks for hooks itself
        return Reply(fault="unsilent", detail=str(error) if explain else "")
    fault, retry_after, detail = classify_error(error, explain=explain)
    return Reply(fault=fault, retry_after=retry_after, detail=detail)


DEFAULT_CONCURRENCY = 32
"""Calls in flight at once when neither the engine's `max_concurrency` nor that of the run is given."""

MOST_THREADS = 256
"""Threads that are started where the config of a run, which a client may have sent, allows more calls at once."""


_Gates: TypeAlias = tuple[AbstractContextManager[None], FairSemaphore]
"""The gate of the block that limits calls, and the engine's own."""


class CallPool:
    """Runs the calls of one engine, at most `limit` at a time over all its sessions.

    All threads start with the first batch and stay for reuse, so that their number tells no number of rows.

    Threads and event loops share the limit, except that blocking calls from a thread with a running event loop have
    a limit of their own: they stop that loop, so waiting for its awaited calls would never end. An awaited call needs
    no thread of its loop's own, in all of which blocking code may wait for a place: threads of the pool do what it
    hands to those.
    """

    def __init__(
        self, model: SilentModel, retry: RetryPolicy, max_concurrency: int | None, *, crew: Crew | None = None
    ) -> None:
        self._model = model
        self._crew = crew or Crew(1)  # threads that others use too, or its own: for each call that is allowed at once
        self._retry = retry
        # Threads that wait for a local engine would keep it from public calls.
        most = 1 if max_concurrency is None and model.works_alone else max_concurrency
        self._given = None if most is None else check_whole("max_concurrency", most)
        self._processes: dict[tuple[tuple[int, int], int], _Process] = {}

    @property
    def limit(self) -> int:
        """Calls in flight at once: those of a block that allows more where the engine was given no number."""
        if self._given is not None:
            return self._given
        return max(DEFAULT_CONCURRENCY, concurrency_limit() or 0)

    @property
    def model(self) -> SilentModel:
        """The silent model that is called."""
        return self._model

    def start(self) -> None:
        """Starts the threads that blocking calls need; raises ConfigurationError where the system has no room for them.

        Call it also where there is nothing to ask: whether they run would show that.
        """
        self._threads(self._gates(call_limit()))

    def one(self, request: Request) -> Reply:
        """Makes one call, with the retries of the engine's policy; it waits for a place, not for the end of a batch.

        In another thread where those of `many` run in others: a model may work in the first thread alone.
        """
        gates = self._gates(call_limit())
        ask = partial(self._through, gates, request, call_stop())
        return ask() if self._is_here(gates) else run_elsewhere(ask, name="call of dpicl")

    def probe(self, request: Request) -> Reply:
        """Makes one public call, with the few retries of a probe.

        In another thread where those of `many` run in others: a model may work in the first thread alone.
        """

        def ask() -> Reply:
            return self._model.ask(request, retry=ProbePolicy.of(self._retry))

        return ask() if self._at_once() == 1 and not is_in_loop() else run_elsewhere(ask, name="probe of dpicl")

    async def aprobe(self, request: Request) -> Reply:
        """Async twin of `probe`."""
        threads = self._here().awaited_threads()
        return await self._model.aask(request, retry=ProbePolicy.of(self._retry), threads=threads)

    async def aone(self, request: Request) -> Reply:
        """Async twin of `one`."""
        return await self._aone(request, self._here().awaited_threads())

    async def _aone(self, request: Request, threads: ThreadPoolExecutor | None) -> Reply:
        limit = call_limit()
        async with nullcontext() if limit is None else limit.gate, self._here().gate:
            return await self._model.aask(request, retry=self._retry, threads=threads)

    def many(self, requests: Sequence[Request]) -> list[Reply]:
        """Makes independent calls; replies come in the order of the requests.

        With a limit of 1 calls run in this thread, unless an event loop runs in it: a model that runs a loop of its own
        works only in another thread then. Where the system has no room for threads, all run in this one. The number of
        requests, which may be private, never decides this.
        """
        stop = call_stop()
        gates = self._gates(call_limit())
        try:
            threads = self._threads(gates)
        except ConfigurationError:
            threads = None
        if threads is None:
            return [self._through(gates, request, stop) for request in requests]
        replies: dict[int, Reply] = {}
        waiting = deque(enumerate(requests))

        def work() -> None:
            while waiting:
                try:
                    place, request = waiting.popleft()
                except IndexError:  # another thread was faster
                    return
                replies[place] = self._through(gates, request, stop)

        futures = [threads.submit(work) for _ in range(min(self._at_once(), len(waiting)))]
        try:
            for future in futures:
                future.result()
        finally:
            waiting.clear()
            for future in futures:
                future.cancel()
        return [replies[place] for place in range(len(requests))]

    async def amany(self, requests: Sequence[Request]) -> list[Reply]:
        """Async twin of `many`: no more tasks than calls are allowed at once, as others can count tasks."""
        # Once, also where there is nothing to ask: how often it is tried without room tells no number of rows.
        threads = self._here().awaited_threads()
        replies: dict[int, Reply] = {}
        waiting = deque(enumerate(requests))

        async def work() -> None:
            while waiting:
                place, request = waiting.popleft()
                replies[place] = await self._aone(request, threads)

        try:
            await asyncio.gather(*(_task(work()) for _ in range(min(self._at_once(), len(waiting)))))
        finally:
            waiting.clear()
        return [replies[place] for place in range(len(requests))]

    def _at_once(self) -> int:
        """Returns how many calls may be in flight at once here, in the block of a run's limit."""
        allowed = call_limit()
        return self.limit if allowed is None else min(self.limit, allowed.most)

    def _threads(self, gates: _Gates) -> ThreadPoolExecutor | None:
        """Returns the threads of blocking calls; None: calls run one after the other, in this thread."""
        here = self._here()
        return None if self._is_here(gates) else here.threads(inside_a_loop=gates[1] is not here.gate)

    def _is_here(self, gates: _Gates) -> bool:
        """Whether blocking calls run in the caller's thread: one at once, where no event loop runs."""
        return self._at_once() == 1 and gates[1] is self._here().gate

    def _through(self, gates: _Gates, request: Request, stop: threading.Event | None) -> Reply:
        outer, inner = gates
        with outer, inner:
            if stop is not None and stop.is_set():
                raise ModelCallError("the run was stopped before this call. Call it again.")
            return self._model.ask(request, retry=self._retry)

    def _gates(self, limit: CallLimit | None) -> _Gates:
        """Returns what a blocking call goes through; inside a running loop nothing that its awaited calls may hold."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return (nullcontext() if limit is None else limit.gate), self._here().gate
        return nullcontext(), self._here().gate_inside_a_loop

    def _here(self) -> _Process:
        """Returns the threads and gates of this process, for so many calls at once: neither survive a fork."""
        key = this_process(), self.limit
        threads = self._given or min(self.limit, MOST_THREADS)
        return self._processes.get(key) or self._processes.setdefault(key, _Process(self.limit, self._crew, threads))


def _task(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Returns a task of a constant name: asyncio numbers those without one, and later names would show their number."""
    return asyncio.get_running_loop().create_task(work, name=TASK_NAME)


class SilentEngine(Uncopyable):
    """Base of engines that call one LangChain model silently."""

    _pickle_advice = "it holds connections and threads. Construct it in the other process"

    _model: SilentModel
    _calls: CallPool

    @property
    def calls_at_once(self) -> int:
        """Calls in flight at once."""
        return self._calls.limit

    @property
    def name(self) -> str:
        """Public name of the model, for reports."""
        return self._model.name

    def start_calls(self) -> None:
        """Starts the threads of blocking calls; see `CallPool.start`."""
        self._calls.start()

    def check_silent(self) -> None:
        """Looks whether others would hear a private call made now.

        Raises:
          UnsilencableModelError: they would.
        """
        if trouble := self._model.trouble():
            raise UnsilencableModelError(trouble)
        self._model.check_engine()


_Work: TypeAlias = Literal["", "in-loop", "awaited"]


class Crew:
    """Threads of one call pool or of several; all of them start at once, so their number tells no number of calls.

    Args:
      size: how many; where more calls are allowed at once, twice as many, or four times, and so on.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._pools: dict[tuple[tuple[int, int], int, _Work], ThreadPoolExecutor] = {}
        self._starting = PerProcess(threading.Lock)

    def here(self, limit: int = 1, work: _Work = "") -> ThreadPoolExecutor:
        """Returns the threads of this process: they do not survive a fork.

        Args:
          limit: calls at once, public; at least so many threads.
          work: what they do; others never wait in those for blocking calls that stop a running loop ("in-loop"), nor in
            those for what calls that are awaited hand to threads ("awaited").
        """
        process, size = this_process(), self._size
        while size < limit:
            size *= 2
        with self._starting.here:
            if (pool := self._pools.get((process, size, work))) is None:
                pool = ThreadPoolExecutor(size, thread_name_prefix=f"dpicl-{work}" if work else "dpicl")
                _start_all(pool, size)
                # Only now: work of another caller would take the place of a start.
                self._pools[process, size, work] = pool
        return pool


def _start_all(pool: ThreadPoolExecutor, size: int) -> None:
    """Starts every thread of a pool: a pool starts one only where all others are at work, so each waits for all."""
    all_here = threading.Barrier(size)
    try:
        for _ in range(size):
            pool.submit(all_here.wait)
    except BaseException as error:
        all_here.abort()  # those that wait go on, and end
        pool.shutdown(wait=False, cancel_futures=True)
        if not isinstance(error, RuntimeError):  # Ctrl-C
            raise
        advice = "Raise the limit of threads, end other work here, or give the engine a smaller max_concurrency."
        raise ConfigurationError(
            f"threads: expected to start {size}, found that the system allows fewer. {advice}"
        ) from None


class _Process:
    """The threads and gates of one process."""

    def __init__(self, limit: int, crew: Crew, threads: int) -> None:
        self.gate = FairSemaphore(limit)
        self.gate_inside_a_loop = FairSemaphore(limit)
        self._crew, self._threads = crew, threads
        self._awaited: ThreadPoolExecutor | None = None

    def threads(self, *, inside_a_loop: bool) -> ThreadPoolExecutor:
        # Threads for other calls may wait for awaited calls of the loop that a blocking call inside it stops.
        return self._crew.here(self._threads, "in-loop" if inside_a_loop else "")

    def awaited_threads(self) -> ThreadPoolExecutor | None:
        """Returns the threads for what awaited calls hand to those of their loop; None: there is no room for them."""
        if self._awaited is None:
            with suppress(ConfigurationError):
                # What one call hands over may wait for more that it hands over.
                self._awaited = self._crew.here(max(self._threads, DEFAULT_CONCURRENCY), "awaited")
        return self._awaited
