"""What a silent call keeps from logs, warnings and LangChain's run machinery. Knows no model, prompt or answer.

Three process-wide hooks are set when the first silent call is made, and looked after before each further one: the log
record factory, `warnings.showwarning`, and one of LangChain's configure hooks. Each of them asks a context variable
whether it runs inside a silent call, and passes everything else on untouched.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from langchain_core.callbacks import AsyncCallbackManager, BaseCallbackHandler, CallbackManager, manager
from langchain_core.tracers import context as tracers

from langchain_dpicl.exceptions import UnsilencableModelError

RUNS_INSIDE = (
    "starts LangChain runs of its own inside a call, and LangChain's debug output, handlers and caches would see them; "
    "pass the inner model itself, or a model whose _generate and _agenerate call the provider without invoke(), "
    "batch() or stream()"
)
"""Why a model that starts runs inside a call is refused; follows its name."""


class Call:
    """The mark of a silent call, carried by its context and every copy of it.

    Attributes:
      withholds: whether the call is private: nothing it logs or warns of is shown.
      tripped: whether it started a LangChain run, even if the exception was caught on the way.
    """

    __slots__ = ("tripped", "withholds")

    def __init__(self, *, withholds: bool) -> None:
        self.withholds = withholds
        self.tripped = False


_CALL: contextvars.ContextVar[Call | None] = contextvars.ContextVar("dpicl_silent_call", default=None)


def begin(*, withholds: bool) -> Call:
    """Marks the current context as that of a silent call. Contexts of silent calls are never used again.

    Raises:
      UnsilencableModelError: LangChain no longer asks its configure hooks, so runs inside a call would go unseen by us.
    """
    _look_after_hooks()
    call = Call(withholds=withholds)
    _CALL.set(call)
    return call


@contextlib.contextmanager
def watching(call: Call, text: str) -> Iterator[None]:
    """Trips a call also on runs in threads that lost its context, where they are about this text; "": about nothing.

    Only a public probe can be told by its text, and only one whose text nobody else uses.
    """
    entry = (text, call)
    if text:
        _WATCHED.append(entry)
    try:
        yield
    finally:
        if text:
            _WATCHED.remove(entry)


def _is_withheld() -> bool:
    call = _CALL.get()
    return call is not None and call.withholds


class RunInsideCallError(RuntimeError):
    """A model started a LangChain run inside a silent call."""

    def __init__(self) -> None:
        super().__init__(f"the model {RUNS_INSIDE}")


class _Tripwire:
    """Stands among LangChain's configure hooks in place of a context variable.

    LangChain asks every hook whenever it builds a callback manager: before a run has sent its first event, looked into
    a cache or printed its input, and whatever callbacks it was given. Raising here stops the run before all of that.
    """

    def get(self) -> BaseCallbackHandler | None:
        """Returns None, as a context variable without a handler does; raises inside a silent call."""
        call = _CALL.get()
        if call is None:
            return _WATCHER if _WATCHED else None
        call.tripped = True
        raise RunInsideCallError


class _Watcher(BaseCallbackHandler):
    """Added to the runs of other contexts while a probe is under way; knows the probe by its text."""

    run_inline = True

    def _look(self, *args: Any, **kwargs: Any) -> None:
        shown = str((args, kwargs))
        for text, call in tuple(_WATCHED):
            if text in shown:
                call.tripped = True

    on_chain_start = on_llm_start = on_chat_model_start = on_tool_start = on_retriever_start = _look


class _RecordFactory:
    """Makes log records; one made inside a private call is empty, and below the level of every handler.

    It is dropped rather than blanked: `extra=` is copied into a record after it is made, error reporters add the local
    variables of the frames above, and even the number of records would depend on what a row met.
    """

    __slots__ = ("_inner",)

    def __init__(self, inner: Callable[..., logging.LogRecord]) -> None:
        self._inner = inner

    def __call__(self, name: str, level: int, *args: Any, **kwargs: Any) -> logging.LogRecord:
        if _is_withheld():
            return logging.LogRecord(name, _BELOW_ALL_HANDLERS, "", 0, "withheld: a private model call", (), None)
        return self._inner(name, level, *args, **kwargs)


class _ShowWarning:
    """Shows warnings, but none of a private call."""

    __slots__ = ("_inner",)

    def __init__(self, inner: Callable[..., None]) -> None:
        self._inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if not _is_withheld():
            self._inner(*args, **kwargs)


_BELOW_ALL_HANDLERS = -1
_WATCHED: list[tuple[str, Call]] = []
_WATCHER = _Watcher()
_TRIPWIRE: Any = _Tripwire()  # of a context variable, LangChain uses `get` only
_trusted: tuple[Any, ...] = ()


def _look_after_hooks() -> None:
    """Sets what is missing, on top of what others set in the meantime."""
    global _trusted  # noqa: PLW0603
    # Two threads may both set one; two layers do what one does.
    if type(logging.getLogRecordFactory()) is not _RecordFactory:
        logging.setLogRecordFactory(_RecordFactory(logging.getLogRecordFactory()))
    if type(warnings.showwarning) is not _ShowWarning:
        warnings.showwarning = _ShowWarning(warnings.showwarning)
    if not any(hook[0] is _TRIPWIRE for hook in tracers._configure_hooks):  # noqa: SLF001
        tracers.register_configure_hook(_TRIPWIRE, inheritable=False)
    doors = (manager._configure, CallbackManager.__dict__["configure"], AsyncCallbackManager.__dict__["configure"])  # noqa: SLF001
    if doors != _trusted:
        contextvars.Context().run(_try_the_tripwire)
        _trusted = doors


def _try_the_tripwire() -> None:
    for kind in (CallbackManager, AsyncCallbackManager):
        call = Call(withholds=False)
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
