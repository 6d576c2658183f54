"""Runs in the process of a private model: makes the model, answers requests, and ends when its parent does."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import inspect
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from langchain_dpicl import exceptions
from langchain_dpicl.backends.base import (
    ChoiceBackend,
    FullBackend,
    NextTokenBackend,
    PublicChoiceBackend,
    Rows,
    TextBackend,
)
from langchain_dpicl.backends.base import row_hint_of as hint_of
from langchain_dpicl.backends.private_calls.call import OpaqueValue, RetryPolicy
from langchain_dpicl.backends.private_calls.embeddings import SilentEmbeddings
from langchain_dpicl.backends.private_calls.method_checks import allow_wrappers
from langchain_dpicl.backends.private_process.connection import pack, receive, send
from langchain_dpicl.backends.resolve import (
    PROCESS,
    as_backend,
    as_choice_backend,
    as_text_backend,
    named_embeddings,
    named_model,
    recipients,
)
from langchain_dpicl.backends.rows.label_rows import FirstTokenBackend, OtherBackend
from langchain_dpicl.backends.sync_async import limit_concurrency, public_failure, run_engine
from langchain_dpicl.exceptions import ConfigurationError, DPICLError

_THREADS = 64
"""Requests of blocking callers that are answered at once; the engines limit their own calls."""

_LONGEST = 300
_SKILLS = {
    "tokens": NextTokenBackend,
    "full": FullBackend,
    "first tokens": FirstTokenBackend,
    "choices": ChoiceBackend,
    "public choices": PublicChoiceBackend,
    "other": OtherBackend,
    "texts": TextBackend,
}
_OPTIONAL = ("encode", "continued", "spell", "token_bytes", "complete_public", "check_public")


def main(inlet: int, outlet: int) -> None:
    """Answers what comes in until it ends; the parent closes its side also when it dies."""
    _keep_nothing()
    try:
        start = receive(inlet)
    except EOFError:
        return
    server = _Server(outlet)
    # Such a runner sets no current loop: a model that takes one while it is made, and closes it, gets its own.
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        server.listen(inlet, runner.get_loop())
        if server.begin(start):
            runner.run(asyncio.Event().wait())  # until the thread that reads ends the process


def _keep_nothing() -> None:
    """Drops logs, and core dumps where the system has them: both would hold prompts."""
    logging.disable(logging.CRITICAL)
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class _NotMadeAgainError(Exception):
    """An engine that was made before a restart could not be made after it."""


class _Server:
    """The model, its engines and the open sessions."""

    def __init__(self, outlet: int) -> None:
        self._outlet = outlet
        self._sending = threading.Lock()
        self._making = threading.Lock()
        self._model: Any = None
        self._retry = RetryPolicy()
        self._engines: dict[str, Any] = {}
        self._keeping = threading.Lock()
        self._sessions: dict[int, Any] = {}  # with None for one that is to be opened
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="dpicl-process")

    def begin(self, start: dict[str, Any]) -> bool:
        """Makes the model and reports whether that worked."""
        try:
            allow_wrappers(*start["allowed"])
            how = start["how"]
            self._retry = RetryPolicy(*how["retry"])
            named = named_embeddings if how["embeds"] else named_model
            self._model = _made(how["model"], how["function"], how["arguments"], named)
            self._threads.submit(int)  # where no thread starts, no blocking call would ever be answered
            reply = {"kind": "done", "value": None}
        except BaseException as error:  # noqa: BLE001  nothing private was sent yet
            reply = _explained(error)
        self._reply(0, reply)
        return reply["kind"] == "done"

    def listen(self, inlet: int, loop: asyncio.AbstractEventLoop) -> None:
        """Reads messages in a thread, also while the model is made: the parent may end meanwhile."""
        loop.set_exception_handler(lambda _loop, _context: None)  # it would log what a task left behind

        def read() -> None:
            with contextlib.suppress(Exception):  # the end, or a frame that cannot be read
                while True:
                    loop.call_soon_threadsafe(self._take, receive(inlet))
            os._exit(0)  # without waiting for calls: nothing reads their answers

        threading.Thread(target=read, daemon=True).start()

    def _take(self, message: dict[str, Any]) -> None:
        number, does = message["id"], message["does"]
        if does == "session" and message["open"] is not None:
            self._sessions[message["session"]] = None
        if does == "cancel":
            if (task := self._tasks.get(number)) is not None:
                task.cancel()
        elif message.get("awaited"):
            task = asyncio.get_running_loop().create_task(self._aanswer(message))
            self._tasks[number] = task
            task.add_done_callback(lambda _: self._tasks.pop(number, None))
        else:
            with contextlib.suppress(RuntimeError):  # no room for one more thread: one that runs takes it later
                self._threads.submit(self._answer, message)

    def _answer(self, message: dict[str, Any]) -> None:
        try:
            with limit_concurrency(message.get("limit")):
                reply = {"kind": "done", "value": self._target(message)()}
        except BaseException as error:  # noqa: BLE001  its kind alone goes back
            reply = _fault(error, message)
        self._reply(message["id"], reply)

    async def _aanswer(self, message: dict[str, Any]) -> None:
        try:
            with limit_concurrency(message.get("limit")):
                is_ready = message["does"] == "call" and message["role"] in self._engines
                target = self._target(message) if is_ready else await run_engine(lambda: self._target(message))
                reply = {"kind": "done", "value": await target()}
        except asyncio.CancelledError:
            reply = {"kind": "failed"}
        except BaseException as error:  # noqa: BLE001  its kind alone goes back
            reply = _fault(error, message)
        self._reply(message["id"], reply)

    def _target(self, message: dict[str, Any]) -> Callable[[], Any]:
        """Returns what answers a message."""
        does, arguments = message["does"], message.get("arguments", ())
        if does == "facts":
            return lambda: _facts(self._engine(message["role"]))
        if does == "close":
            return lambda: self._close(message["session"])
        held = self._known(message["role"]) if does == "call" else self._session(message)
        method = getattr(held, f"a{message['method']}" if message.get("awaited") else message["method"])
        return lambda: method(*arguments, **message.get("options", {}))

    def _engine(self, role: str) -> Any:
        with self._making:
            if role not in self._engines:
                self._engines[role] = _ROLES[role](self._model, self._retry)
            return self._engines[role]

    def _known(self, role: str) -> Any:
        """Returns the engine for a call; after a restart that makes it again, and why it fails must not go back."""
        try:
            return self._engine(role)
        except Exception:  # noqa: BLE001  the text of a probe, which would be raised where a row abstains
            raise _NotMadeAgainError from None

    def _session(self, message: dict[str, Any]) -> Any:
        """Returns a session with the tokens pushed that the message brings; opens it if the message says how."""
        number, how = message["session"], message["open"]
        if how is not None:
            engine = self._known(message["role"])
            given = {name: how[name] for name in ("public", "num_rows", "shared", "max_new_tokens") if name in how}
            opening = engine.open_full if given else engine.open
            self._keep(number, opening(how["prompts"], how["prefix"], **given))
        session = self._sessions[number]
        for token in message["push"]:
            session.push(token)
        return session

    def _keep(self, number: int, session: Any) -> None:
        """Keeps a session that was opened, or closes it where that came meanwhile, as of a task that was cancelled."""
        with self._keeping:
            is_wanted = number in self._sessions
            if is_wanted:
                self._sessions[number] = session
        if not is_wanted:
            session.close()

    def _close(self, number: int) -> None:
        with self._keeping:
            session = self._sessions.pop(number, None)
        if session is not None:
            session.close()

    def _reply(self, number: int, reply: dict[str, Any]) -> None:
        try:
            frame = pack({"id": number, **reply})
        except Exception:  # noqa: BLE001  an engine that returns something else than rows
            frame = pack({"id": number, "kind": "failed"})
        with self._sending, contextlib.suppress(OSError):
            send(self._outlet, frame)


def _made(name: str, function: str, arguments: dict[str, Any], named: Callable[..., Any]) -> Any:
    """Returns the model that LangChain makes of a name, or that a function or a name of a module stands for."""
    if function:
        return _called(_found(name, function), arguments)
    try:
        return named(name, **arguments)
    except ConfigurationError as error:
        reason = error
    module, _, function = name.partition(":")
    try:
        target = _found(module, function)
    except (ImportError, AttributeError):
        raise reason from None
    return _called(target, arguments)


def _found(module: str, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))


def _called(target: Any, arguments: dict[str, Any]) -> Any:
    makes = inspect.isroutine(target) or inspect.isclass(target) or isinstance(target, functools.partial)
    return target(**arguments) if makes or arguments else target


_ROLES: dict[str, Callable[[Any, RetryPolicy], Any]] = {
    "tokens": lambda model, retry: as_backend(model, retry=retry),
    "choices": lambda model, retry: as_choice_backend(model, retry=retry),
    "text votes": lambda model, retry: as_choice_backend(model, votes="text", retry=retry),
    "texts": lambda model, retry: as_text_backend(model, retry=retry),
    "embeddings": lambda model, retry: _Embedder(model, retry=retry),
}


class _Embedder:
    """Embeddings that are called silently, for texts as they come out of the pipe."""

    def __init__(self, model: Any, *, retry: RetryPolicy) -> None:
        self._silent = SilentEmbeddings(model, retry=retry)
        self.name, self.dimension = self._silent.name, self._silent.dimension
        self.is_sparse = self._silent.is_sparse
        self.public, self.apublic = self._silent.public, self._silent.apublic

    def rows(self, texts: Sequence[str]) -> Rows:
        """Returns float64[texts, dimension] for private texts; a failed row is zeros."""
        return self._silent.rows([OpaqueValue(text) for text in texts])

    async def arows(self, texts: Sequence[str]) -> Rows:
        return await self._silent.arows([OpaqueValue(text) for text in texts])


def _facts(engine: Any) -> dict[str, Any]:
    """Returns what is public of an engine."""
    hint = hint_of(engine)
    skills = [skill for skill, kind in _SKILLS.items() if isinstance(engine, kind)]
    skills += [name for name in _OPTIONAL if callable(getattr(engine, name, None))]
    skills += ["embeddings"] if isinstance(engine, _Embedder) else []
    is_writer = "tokens" in skills
    return {
        "skills": skills,
        "name": getattr(engine, "name", type(engine).__name__),
        "kind": getattr(engine, "kind", "") if "public choices" in skills else "",
        "hint": [hint.slots, hint.shots, hint.calibrate],
        "dimension": engine.dimension if isinstance(engine, _Embedder) else None,
        "is_sparse": engine.is_sparse if isinstance(engine, _Embedder) else None,
        "max_top_k": engine.max_top_k if is_writer else None,
        "eos": engine.eos if is_writer else None,
        "room": getattr(engine, "room", None) if is_writer else None,
        "is_chat": bool(getattr(engine, "is_chat", False)),
        "fingerprint": getattr(engine, "tokenizer_fingerprint", None) if is_writer else None,
        "hosts": ["a process of its own" if host == PROCESS else host for host in recipients(engine)],
    }


def _fault(error: BaseException, message: dict[str, Any]) -> dict[str, Any]:
    """Returns a failure as it may go back: our public errors with their text, of others the kind, for public calls."""
    if message["does"] == "facts":
        return _explained(error)
    if isinstance(error, _NotMadeAgainError):
        return {"kind": "failed"}
    if isinstance(error, DPICLError):
        return {"kind": "fault", "error": _public_kind(error), "text": str(error)}
    if message.get("public"):
        return {"kind": "fault", "error": "ModelCallError", "text": str(public_failure(type(error).__name__))}
    return {"kind": "failed"}


def _explained(error: BaseException) -> dict[str, Any]:
    """Returns a failure before the first private call: also the first line of an error that is not ours."""
    if isinstance(error, DPICLError):
        return {"kind": "fault", "error": _public_kind(error), "text": str(error)}
    said = str(error).strip().partition("\n")[0][:_LONGEST]
    text = (
        "PrivateProcess: expected a model, found a failure when it was made in its process: "
        f"{type(error).__name__}{': ' if said else ''}{said}"
    )
    return {"kind": "fault", "error": ConfigurationError.__name__, "text": text}


def _public_kind(error: DPICLError) -> str:
    names: Sequence[str] = [base.__name__ for base in type(error).__mro__]
    return next(name for name in names if hasattr(exceptions, name))
