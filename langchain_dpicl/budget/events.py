"""Reports charges and refusals of a budget to the observers of a LangChain run."""

from __future__ import annotations

import asyncio
import logging
import operator
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import wraps
from os import environ
from types import FunctionType
from typing import Any, ParamSpec, Self, TypeVar

from langchain_core.callbacks import AsyncCallbackManager, BaseCallbackManager, CallbackManager, manager
from langchain_core.globals import get_debug
from langchain_core.runnables.config import RunnableConfig, ensure_config
from langchain_core.tracers import context as tracers

from langchain_dpicl.backends.sync_async import run_in_thread
from langchain_dpicl.budget.handler import budget_of, may_wait, resolve_budget
from langchain_dpicl.exceptions import DPICLError, PrivacyBudgetError

CHARGED = "dpicl.charged"
"""Name of the event: tickets were charged."""

REFUSED = "dpicl.refused"
"""Name of the event: the budget refused."""

RELEASE = "dpicl.release"
"""Name of the event of an answer, with its receipt."""

_NOTE = "_dpicl_refusal"
_REFUSALS_AWAITED: ContextVar[bool] = ContextVar("dpicl_refusals_awaited", default=False)

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
Manager = TypeVar("Manager", CallbackManager, AsyncCallbackManager)


def record_event(
    name: str, data: Mapping[str, Any] | Callable[[], Mapping[str, Any]], config: RunnableConfig | None = None
) -> None:
    """Sends a custom event to the observers of the current run; does nothing outside a run.

    Formal guarantees:
      - An observer's exception is logged and suppressed: no event changes the outcome of a run.
    """
    with _OutcomeKept(name):
        run = _listening(config, CallbackManager)
        if run is not None:
            run.on_custom_event(name, _values(data), run_id=run.parent_run_id)


async def arecord_event(
    name: str,
    data: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
    config: RunnableConfig | None = None,
    *,
    is_slow: bool = False,
) -> None:
    """Async version of `record_event`; `is_slow`: `data` may wait for a ledger, and is called in a thread."""
    with _OutcomeKept(name):
        run = _listening(config, AsyncCallbackManager)
        if run is not None:
            values = await run_in_thread(lambda: _values(data), is_slow=is_slow and callable(data))
            await run.on_custom_event(name, values, run_id=run.parent_run_id)


class RunEvents:
    """A block (`with` or `async with`) around a component's use of a budget; it sends events at its end.

    Formal guarantees:
      - `dpicl.charged` holds the tickets that stay charged, `dpicl.refused` the class of a PrivacyBudgetError and its
        two numbers; the rest is public names and limits.
      - A refusal is reported once, by the innermost block; every error propagates unchanged.

    Attributes:
      tickets: tickets charged in the block; updated by the code that reserves or returns them.
    """

    def __init__(
        self, component: str, *, budget: Any = None, share: Any = None, config: RunnableConfig | None = None
    ) -> None:
        self.tickets = 0
        self._component = component
        self._budget = budget
        self._share = share
        self._config = config

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self.tickets > 0:
            record_event(CHARGED, self._charge, self._config)
        # `await_refusals` sends the refusal on the caller's loop instead.
        if self._sees_first(error) and not _REFUSALS_AWAITED.get():
            record_event(REFUSED, _note_on(error), self._config)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self.tickets > 0:
            is_slow = may_wait(self._budget, self._config)
            await arecord_event(CHARGED, self._charge, self._config, is_slow=is_slow)
        if self._sees_first(error):
            await arecord_event(REFUSED, _note_on(error), self._config)

    def _charge(self) -> dict[str, Any]:
        share = self._share
        shown = {"name": share.component, "epsilon": share.epsilon, "delta": share.delta}
        return {"component": self._component, "tickets": self.tickets, "share": shown, "budget": self._limits()}

    def _sees_first(self, error: BaseException | None) -> bool:
        """Whether no inner block has reported this refusal; stores the report on the error."""
        if not isinstance(error, PrivacyBudgetError) or _note_on(error):
            return False
        vars(error)[_NOTE] = {
            "component": self._component,
            "error": type(error).__name__,
            "requested": getattr(error, "requested", None),
            "remaining": getattr(error, "remaining", None),
            "budget": self._limits(),
        }
        return True

    def _limits(self) -> dict[str, Any] | None:
        try:
            budget = resolve_budget(None, self._config) if self._budget is None else budget_of(self._budget, "budget")
        except DPICLError:  # no budget, or several: no limits to show
            return None
        return {
            "name": budget.name,
            "epsilon": budget.epsilon,
            "delta": budget.delta,
            "adjacency": budget.adjacency,
        }


def tells_refusals(component: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Runs a function with keywords `budget` and `config` inside a `RunEvents` block."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def told(*args: P.args, **kwargs: P.kwargs) -> T:
            config: Any = kwargs.get("config")
            with RunEvents(component, budget=kwargs.get("budget"), config=config):
                return function(*args, **kwargs)

        return told

    return decorate


async def await_refusals(action: Callable[[], T], config: RunnableConfig | None = None, *, is_slow: bool = False) -> T:
    """Runs blocking code from async code, and awaits the observers of its refusals (`is_slow`: in a thread)."""
    token = _REFUSALS_AWAITED.set(True)
    try:
        try:
            return await run_in_thread(action, is_slow=is_slow)
        finally:
            _REFUSALS_AWAITED.reset(token)
    except PrivacyBudgetError as error:
        if _note_on(error):
            await arecord_event(REFUSED, _note_on(error), config)
        raise


def _note_on(error: BaseException | None) -> dict[str, Any]:
    return getattr(error, _NOTE, {})


def _values(data: Mapping[str, Any] | Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    return dict(data() if callable(data) else data)


def _listening(config: RunnableConfig | None, kind: type[Manager]) -> Manager | None:
    """Returns the manager of the run's observers; None outside a run, or without observers."""
    if _nobody_listens(config):
        return None
    merged = ensure_config(config)
    own = run = merged.get("callbacks")
    if getattr(own, "parent_run_id", None) is None:
        # A list of callbacks inside a run replaces the run's manager: send to the observers of both.
        run = ensure_config().get("callbacks")
    listeners = kind.configure(
        run,
        None if own is run else own,
        inheritable_tags=merged.get("tags"),
        inheritable_metadata=merged.get("metadata"),
    )
    heard = any(not handler.ignore_custom_event for handler in listeners.handlers)
    return listeners if heard and listeners.parent_run_id is not None else None


def _nobody_listens(config: RunnableConfig | None) -> bool:
    """Whether `configure` would find no observers; the same checks, without building a manager. False: unknown.

    The config holds the manager that LangChain configured when the run began, with its handlers. So this checks only
    what may have been added since: debug output, tracing, configure hooks, and changes of LangChain itself.
    """
    own = None if config is None else config.get("callbacks")
    if not isinstance(own, BaseCallbackManager) or own.parent_run_id is None or not _is_stock():
        return False
    if not all(handler.ignore_custom_event for handler in own.handlers) or get_debug():
        return False
    if tracers._tracing_v2_is_enabled():  # noqa: SLF001
        return False
    for variable, _, handler_class, name in tracers._configure_hooks:  # noqa: SLF001
        # An environment variable asks for a new handler, which only `configure` creates.
        if name is not None and handler_class is not None and name in environ:
            return False
        handler = variable.get()
        if handler is not None and not handler.ignore_custom_event:
            return False
    return True


def _doors() -> tuple[Any, ...]:
    """The functions that create a run's manager; instrumentation that wraps one of them may add a handler to it."""
    blocking, awaiting = CallbackManager, AsyncCallbackManager
    made = (blocking.__init__, vars(blocking).get("configure"), awaiting.__init__, vars(awaiting).get("configure"))
    return (manager._configure, *made)  # noqa: SLF001


def _is_stock() -> bool:
    """Whether these functions are still LangChain's own, as when this module was imported."""
    # By identity, because a proxy compares equal to the wrapped function.
    return _WAS_STOCK and all(map(operator.is_, _doors(), _STOCK))


def _is_langchains(door: Any) -> bool:
    function = door.__func__ if type(door) is classmethod else door
    # `functools.wraps` copies a function's `__module__`, but not its globals.
    return type(function) is FunctionType and str(function.__globals__.get("__name__")).startswith("langchain_core.")


_STOCK = _doors()
_WAS_STOCK = all(map(_is_langchains, _STOCK))


class _OutcomeKept:
    """Logs and suppresses an observer's exception, but not a requested cancellation or an interrupt."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        """Required by the protocol."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        is_stray = isinstance(error, asyncio.CancelledError) and not _is_cancelled()
        if not (is_stray or isinstance(error, Exception)):  # an observer's failure must not end a paid run
            return False
        logger.warning("%s: an observer failed with %s; the outcome stands.", self._name, type(error).__name__)
        return True


def _is_cancelled() -> bool:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop in this thread
        return False
    return task is not None and task.cancelling() > 0
