"""Withholds logs and warnings of silent calls, and detects LangChain runs that are started inside them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import thread as pools
from dataclasses import dataclass
from typing import Any

from langchain_core.callbacks import AsyncCallbackManager, BaseCallbackHandler, CallbackManager, manager
from langchain_core.messages import BaseMessage
from langchain_core.tracers import context as tracers

from langchain_dpicl.exceptions import UnsilencableModelError

# Process-wide hooks are set when the first silent call is made and checked before each further one: guards on
# `logging.Logger`, `warnings.showwarning`, threads, thread pools and their futures, and one of LangChain's configure
# hooks. Each reads a context variable to see whether it runs inside a silent call, and otherwise passes everything on.
# Threads and pools do not copy that variable, so the mark of a call is handed to the work that it starts there.
RUNS_INSIDE = (
    "starts LangChain runs of its own inside a call, and LangChain's debug output, handlers and caches would see them; "
    "pass the inner model itself, or a model whose _generate and _agenerate call the provider without invoke(), "
    "batch() or stream()"
)
"""Why a model that starts runs inside a call is refused; text that follows its name."""


class CallMark:
    """The mark of a silent call, carried by its context, the copies of it, and the threads that the call starts.

    Attributes:
      withholds: whether the call is private, so that its logs and warnings are dropped.
      tripped: whether it started a LangChain run, even if the exception was caught.
      passage: the limits on what it sends and receives over HTTP; None: it makes no model call.
    """

    __slots__ = ("passage", "tripped", "withholds")

    def __init__(self, *, withholds: bool, passage: Any = None) -> None:
        self.withholds = withholds
        self.passage = passage
        self.tripped = False


_CALL: contextvars.ContextVar[CallMark | None] = contextvars.ContextVar("dpicl_silent_call", default=None)

EXCHANGE: contextvars.ContextVar[Any] = contextvars.ContextVar("dpicl_exchange", default=None)
"""The limited HTTP exchange that the current code is part of; handed to threads with the mark."""

_LENT: contextvars.ContextVar[tuple[Any, Any, bool]] = contextvars.ContextVar(
    "dpicl_lent_threads", default=(None, None, False)
)
"""An event loop, the threads that do what is handed to its own, and whether also where the application chose those.

Handed to threads with the mark.
"""


def begin(*, withholds: bool, passage: Any = None) -> CallMark:
    """Marks the current context as that of a silent call; such a context is never used again."""
    _look_after_hooks()
    call = CallMark(withholds=withholds, passage=passage)
    _CALL.set(call)
    return call


def is_inside_call() -> bool:
    """Whether the current code runs inside a silent call."""
    return _CALL.get() is not None


def watch_runs(call: CallMark, text: str) -> contextlib.AbstractContextManager[None]:
    """Detects a call's runs also in threads without its mark, by their text; "" detects nothing.

    Works for public probes only: their text is unique.
    """
    return _watching((text, call)) if text else _NOTHING


@contextlib.contextmanager
def _watching(entry: tuple[str, CallMark]) -> Iterator[None]:
    _WATCHED.append(entry)
    try:
        yield
    finally:
        _WATCHED.remove(entry)


def _is_withheld() -> bool:
    call = _CALL.get()
    return call is not None and call.withholds


class RunInsideCallError(RuntimeError):
    """A model started a LangChain run inside a silent call."""

    def __init__(self) -> None:
        super().__init__(f"the model {RUNS_INSIDE}")


class _Tripwire:
    """Replaces a context variable among LangChain's configure hooks.

    LangChain calls every hook when it builds a callback manager: before a run sends its first event, reads a cache or
    prints its input, whatever its callbacks are. Raising here stops the run before all of that.
    """

    def get(self) -> BaseCallbackHandler | None:
        """Returns None, as a context variable without a handler does; raises inside a silent call."""
        call = _CALL.get()
        if call is None:
            return _WATCHER if _WATCHED else None
        call.tripped = True
        raise RunInsideCallError


class _RunObserver(BaseCallbackHandler):
    """Joins the runs of other contexts during a probe, and recognizes the probe by its text."""

    run_inline = True

    def _look(self, serialized: Any, *args: Any, inputs: Any = None, **kwargs: Any) -> None:  # noqa: ARG002
        shown = tuple(_texts((*args, inputs)))
        for text, call in tuple(_WATCHED):
            if any(str.__contains__(one, text) for one in shown):
                call.tripped = True

    on_chain_start = on_llm_start = on_chat_model_start = on_tool_start = on_retriever_start = _look


def _texts(value: Any, *, depth: int = 6) -> Iterator[str]:
    """Yields plain strings and the content of messages; calls no foreign code, such as a slow `__repr__`."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, BaseMessage):
        yield from _texts(value.content, depth=depth - 1)
    elif depth > 0 and type(value) in {list, tuple, dict}:
        for one in tuple(value.values() if type(value) is dict else value):  # its owner may go on changing it
            yield from _texts(one, depth=depth - 1)


class _HookTestMark(CallMark):
    """The mark under which a hook is tested: reaching the hook's own guard trips it, and nothing else happens."""

    __slots__ = ("hook",)

    def __init__(self, hook: GuardedMethod) -> None:
        super().__init__(withholds=False)
        self.hook = hook


@dataclass(frozen=True, eq=False)
class GuardedMethod:
    """A method that gets a guard.

    Attributes:
      owner: the class it is set on.
      name: its name.
      act: replaces the method inside a silent call; takes the inner method, the mark and the method's arguments.
      attempt: calls the method harmlessly, to see whether the guard is reached.
      acts_outside: whether `act` replaces the method outside of silent calls too; the mark is then None.
    """

    owner: type
    name: str
    act: Callable[..., Any]
    attempt: Callable[[], object]
    acts_outside: bool = False

    def install_guard(self) -> None:
        """Sets the guard, unless it is set already, perhaps below wrappers that others set since."""
        present = getattr(self.owner, self.name)
        if present is _GUARDED.get(self):
            return
        check = _HookTestMark(self)
        contextvars.Context().run(self._try, check)
        # Guarding again what is guarded would never end if others re-wrap too. Two threads may both set a guard; two
        # layers do what one does.
        if not check.tripped:
            present = self._over(present)
            setattr(self.owner, self.name, present)
        _GUARDED[self] = present

    def _try(self, check: _HookTestMark) -> None:
        _CALL.set(check)
        # Wrappers of others may reject the test's arguments: then the guard goes on top.
        with contextlib.suppress(Exception):
            self.attempt()

    def _over(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(inner)
        def guard(*args: Any, **kwargs: Any) -> Any:
            call = _CALL.get()
            if call is None and not self.acts_outside:
                return inner(*args, **kwargs)
            if not isinstance(call, _HookTestMark):
                return self.act(inner, call, *args, **kwargs)
            if call.hook is not self:
                return inner(*args, **kwargs)
            call.tripped = True
            return None

        return guard


def _make_record(inner: Callable[..., Any], call: CallMark, logger: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Hides a private call from record factories: error reporters add the locals of the frames above."""
    if call.withholds:
        return logging.LogRecord(name, _BELOW_ALL_HANDLERS, "", 0, "withheld: a private model call", (), None)
    return inner(logger, name, *args, **kwargs)


def _handle(inner: Callable[..., Any], call: CallMark, *args: Any, **kwargs: Any) -> Any:
    """Drops records before any filter: even their number would depend on a row's content."""
    return None if call.withholds else inner(*args, **kwargs)


def _start(inner: Callable[..., Any], call: CallMark, thread: threading.Thread) -> Any:
    """Starts a thread with the mark; except a pool's worker, which outlives the call and works for others."""
    target = getattr(thread, "_target", None)
    if target is not pools._worker:  # noqa: SLF001
        if target is not None:
            # Below the wrappers that others put around `run`, such as error reporters.
            thread._target = _MarkedFunction(call, target, is_thread=True)  # type: ignore[attr-defined]  # noqa: SLF001
        thread.run = _MarkedFunction(call, _SingleUseRun(thread.run), is_thread=True)  # type: ignore[method-assign]
    return inner(thread)


def _hand_over(inner: Callable[..., Any], call: CallMark, pool: Any, work: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Submits work to a pool with the mark, as a partial: no frame of ours in the worker names its arguments."""
    return inner(pool, _MarkedFunction(call, functools.partial(work, *args, **kwargs)))


def _run_in_executor(
    inner: Callable[..., Any], _: CallMark | None, loop: Any, /, executor: Any, *work: Any, **named: Any
) -> Any:
    """Gives what is handed to the threads of an event loop to those that are lent in their place."""
    lent_to, threads, is_always = _LENT.get()
    own = getattr(loop, "_default_executor", None)
    is_usual = own is None or getattr(own, "_thread_name_prefix", "") == "asyncio"  # nobody chose it
    if (executor is None and (is_usual or is_always)) or (is_always and executor is own):
        executor = threads if threads is not None and loop is lent_to else executor
    return inner(loop, executor, *work, **named)


def _call_back(inner: Callable[..., Any], call: CallMark, future: Any, fn: Callable[..., Any]) -> Any:
    """Adds a callback to a future with the mark: it runs in the pool's worker, after the work."""
    return inner(future, _MarkedFunction(call, fn))


class _MarkedFunction:
    """A function that runs with the mark of the call that handed it to a thread."""

    __slots__ = ("_call", "_exchange", "_inner", "_is_thread", "_lent")

    def __init__(self, call: CallMark, inner: Callable[..., Any], *, is_thread: bool = False) -> None:
        self._call = call
        self._exchange, self._lent = EXCHANGE.get(), _LENT.get()
        self._inner = inner
        self._is_thread = is_thread

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        token, place, lent = _CALL.set(self._call), EXCHANGE.set(self._exchange), _LENT.set(self._lent)
        try:
            return self._inner(*args, **kwargs)
        except BaseException:
            # Nothing awaits the thread: `threading.excepthook` would show the error on stderr or to an error reporter.
            if self._is_thread and self._call.withholds:
                return None
            raise
        finally:
            _LENT.reset(lent)
            EXCHANGE.reset(place)
            _CALL.reset(token)


class _SingleUseRun:
    """A thread's `run`, dropped when it is called: else the thread would keep itself and its arguments alive."""

    __slots__ = ("_runs",)

    def __init__(self, run: Callable[[], object]) -> None:
        self._runs = [run]

    def __call__(self, *_: Any) -> None:  # others may call what they find in `thread.run` with the thread
        self._runs.pop()()


class _ShowWarning:
    """Shows warnings except those of a private call, which it also removes from the registries of shown warnings."""

    __slots__ = ("_inner",)

    def __init__(self, inner: Callable[..., None]) -> None:
        self._inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if not _is_withheld():
            self._inner(*args, **kwargs)
        elif len(args) > 3:  # as `warnings` calls it; for anybody else it wrote nothing down
            _forget(*args[:4])


def _forget(message: Warning, category: type[Warning], filename: str, line: int) -> None:
    """Removes a warning from the registries, which would keep its text and hide the next one like it."""
    # A registry has the text that was warned of, or that of the warning where an instance was.
    texts = [str(message), *(one for one in message.args if isinstance(one, str))]
    keys = [key for text in texts for key in ((text, category, line), (text, category, 0), (text, category))]
    own: list[dict[str, Any]] = []
    others = [sys.__dict__]
    frame = sys._getframe()  # noqa: SLF001
    while frame.f_back is not None:
        frame = frame.f_back
        (own if frame.f_code.co_filename == filename else others).append(frame.f_globals)
    for place in own or others:
        _remove(keys, place.get("__warningregistry__"))
    _remove(keys, warnings.onceregistry)  # type: ignore[attr-defined]


def _remove(keys: list[Any], registry: dict[Any, Any] | None) -> None:
    if registry is not None:
        for key in keys:
            registry.pop(key, None)


def _nothing(*_: Any) -> None:
    pass


class _NoThreads(concurrent.futures.Executor):
    """An executor that does nothing, to try with a loop that runs: a method of C ends the process without one."""

    def submit(self, *_: Any, **__: Any) -> concurrent.futures.Future[Any]:
        done = concurrent.futures.Future[Any]()
        done.set_result(None)
        return done


def _lone_logger() -> logging.Logger:
    logger = logging.Logger("langchain_dpicl.check")  # noqa: LOG001  nobody else is to find it
    logger.addHandler(logging.NullHandler())
    return logger


def _try_the_pool() -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(_nothing)


_NOTHING = contextlib.nullcontext()
_BELOW_ALL_HANDLERS = -1
_WATCHED: list[tuple[str, CallMark]] = []
_WATCHER = _RunObserver()
_TRIPWIRE: Any = _Tripwire()  # of a context variable, LangChain uses `get` only
_trusted: tuple[Any, ...] = ()
_HOOKS = (
    GuardedMethod(
        logging.Logger,
        "makeRecord",
        _make_record,
        lambda: _lone_logger().makeRecord("", _BELOW_ALL_HANDLERS, "", 0, "", (), None),
    ),
    GuardedMethod(logging.Logger, "handle", _handle, lambda: _lone_logger().handle(logging.makeLogRecord({}))),
    GuardedMethod(threading.Thread, "start", _start, lambda: threading.Thread(target=_nothing).start()),
    GuardedMethod(concurrent.futures.ThreadPoolExecutor, "submit", _hand_over, _try_the_pool),
    GuardedMethod(
        concurrent.futures.Future,
        "add_done_callback",
        _call_back,
        lambda: concurrent.futures.Future[None]().add_done_callback(_nothing),
    ),
)
_GUARDED: dict[GuardedMethod, Any] = {}
_LOOPS: dict[type, GuardedMethod] = {}
_IN_PYTHON = 1 << 9
"""Flag of a class that can be changed: it is no static one of C."""


@contextlib.contextmanager
def lend_threads(threads: concurrent.futures.ThreadPoolExecutor | None, *, is_always: bool = False) -> Iterator[None]:
    """Has `threads` do what the block, which awaits, hands to the threads of its event loop; None: the loop's own do.

    Threads that the application chose, which may be more or have something of their own, go on unless `is_always`.

    As LangChain's default `_agenerate`, its calls of observers, the class of OpenAI and name lookups do: blocking code
    in all of the loop's may wait for the end of the block. Loops that a model runs itself keep their threads, and so do
    those of a class that cannot be changed.
    """
    loop = asyncio.get_running_loop()
    # The class that has the method, or the last before one of C, as uvloop's: a copy in the loop's own would hide what
    # others set on that one later.
    kind, method = type(loop), type(loop).run_in_executor
    for each in kind.__mro__:
        kind = each if each.__flags__ & _IN_PYTHON and getattr(each, "run_in_executor", None) is method else kind
        if "run_in_executor" in vars(each):
            break
    if kind not in _LOOPS:
        _LOOPS[kind] = GuardedMethod(
            kind,
            "run_in_executor",
            _run_in_executor,
            lambda: asyncio.get_running_loop().run_in_executor(_NoThreads(), _nothing),
            acts_outside=True,
        )
    with contextlib.suppress(TypeError, AttributeError):
        _LOOPS[kind].install_guard()
    token = _LENT.set((loop, threads, is_always))
    try:
        yield
    finally:
        _LENT.reset(token)


def _look_after_hooks() -> None:
    """Sets missing hooks, on top of the wrappers that others set since."""
    global _trusted  # noqa: PLW0603
    for hook in _HOOKS:
        hook.install_guard()
    if type(warnings.showwarning) is not _ShowWarning:
        warnings.showwarning = _ShowWarning(warnings.showwarning)
    if not any(known[0] is _TRIPWIRE for known in tracers._configure_hooks):  # noqa: SLF001
        tracers.register_configure_hook(_TRIPWIRE, inheritable=False)
    doors = (manager._configure, CallbackManager.__dict__["configure"], AsyncCallbackManager.__dict__["configure"])  # noqa: SLF001
    if doors != _trusted:
        contextvars.Context().run(_try_the_tripwire)
        _trusted = doors


def _try_the_tripwire() -> None:
    for kind in (CallbackManager, AsyncCallbackManager):
        call = CallMark(withholds=False)
        _CALL.set(call)
        try:
            kind.configure()
        except RunInsideCallError:
            continue
        raise UnsilencableModelError(
            "expected LangChain to ask its configure hooks before each run, but it did not, so a model could start "
            "runs inside a private call unnoticed; use langchain-core between 1.3.3 and 2, and do not replace its "
            "callback managers"
        )
