"""Sends the observers of a LangChain run the events `dpicl.charged` and `dpicl.refused`, with public values only."""

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

from langchain_dpicl.backends.aside import aside
from langchain_dpicl.callbacks import budget_of, may_wait, resolve_budget
from langchain_dpicl.exceptions import DPICLError, PrivacyBudgetError

CHARGED = "dpicl.charged"
"""Name of the event: tickets were charged."""

REFUSED = "dpicl.refused"
"""Name of the event: the budget refused."""

_NOTE = "_dpicl_refusal"
_TOLD_BY_CALLER: ContextVar[bool] = ContextVar("dpicl_refusals_awaited", default=False)

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
Manager = TypeVar("Manager", CallbackManager, AsyncCallbackManager)


def record_event(
    name: str, data: Mapping[str, Any] | Callable[[], Mapping[str, Any]], config: RunnableConfig | None = None
) -> None:
    """Sends a custom event to the observers of the current run; does nothing outside a run.

    Formal guarantees:
      - What an observer raises is logged, not raised: no event changes the outcome of a run.

    `data` holds public values only, as observers and tracers store them; a function is called only with observers.
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
    """As `record_event`, awaiting async observers; `is_slow`: `data()` may wait for a ledger, so it leaves the loop."""
    with _OutcomeKept(name):
        run = _listening(config, AsyncCallbackManager)
        if run is not None:
            values = await aside(lambda: _values(data), is_slow=is_slow and callable(data))
            await run.on_custom_event(name, values, run_id=run.parent_run_id)


class RunEvents:
    """A block, `with` or `async with`, around a component's use of a budget; its end sends the events.

    Formal guarantees:
      - `dpicl.charged` holds the tickets that stay charged, `dpicl.refused` the class of a PrivacyBudgetError and its
        two numbers; beside them stand public names and limits, and nothing else.
      - A refusal is sent once, by the innermost block that it passes; every error is raised on unchanged.

    Args:
      component: public name of the component: its class.
      budget: whose limits to show: a `Budget`, a handler, or None to look it up.
      share: the share that the tickets are reserved from.

    Attributes:
      tickets: tickets charged in the block; the code that reserves or gives back updates it.
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
        if self._sees_first(error) and not _TOLD_BY_CALLER.get():
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
        """Whether no inner block has seen this refusal; attaches its public values to the error."""
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
        except DPICLError:  # none, or several: no limits are shown
            return None
        return {
            "name": budget.name,
            "epsilon": budget.epsilon,
            "delta": budget.delta,
            "adjacency": budget.adjacency,
        }


def tells_refusals(component: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Runs a function that takes `budget` and `config` by keyword in a block of `RunEvents`."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def with_events(*args: P.args, **kwargs: P.kwargs) -> T:
            config: Any = kwargs.get("config")
            with RunEvents(component, budget=kwargs.get("budget"), config=config):
                return function(*args, **kwargs)

        return with_events

    return decorate


async def refusals_awaited(
    action: Callable[[], T], config: RunnableConfig | None = None, *, is_slow: bool = False
) -> T:
    """Runs our blocking code from async code and awaits the observers of its refusals; `is_slow` as in `aside`."""
    token = _TOLD_BY_CALLER.set(True)
    try:
        try:
            return await aside(action, is_slow=is_slow)
        finally:
            _TOLD_BY_CALLER.reset(token)
    except PrivacyBudgetError as error:
        if _note_on(error):
            await arecord_event(REFUSED, _note_on(error), config)
        raise


def _note_on(error: BaseException | None) -> dict[str, Any]:
    return getattr(error, _NOTE, {})


def _values(data: Mapping[str, Any] | Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    return dict(data() if callable(data) else data)


def _listening(config: RunnableConfig | None, kind: type[Manager]) -> Manager | None:
    """Returns the callback manager of the run; None outside a run, or without observers."""
    if _nobody_listens(config):
        return None
    full = ensure_config(config)
    own = run = full.get("callbacks")
    if getattr(own, "parent_run_id", None) is None:
        # A list of callbacks given inside a run replaces the run's manager: notify the observers of both.
        run = ensure_config().get("callbacks")
    configured = kind.configure(
        run,
        None if own is run else own,
        inheritable_tags=full.get("tags"),
        inheritable_metadata=full.get("metadata"),
    )
    is_heard = any(not handler.ignore_custom_event for handler in configured.handlers)
    return configured if is_heard and configured.parent_run_id is not None else None


def _nobody_listens(config: RunnableConfig | None) -> bool:
    """Whether `configure` would find no observer, without building a manager; False if in doubt.

    The config holds the manager that LangChain configured when the run began, with every handler at that time. So only
    later additions are checked: debug output, tracing, configure hooks, and changes of LangChain itself.
    """
    own = None if config is None else config.get("callbacks")
    if not isinstance(own, BaseCallbackManager) or own.parent_run_id is None or not _is_stock():
        return False
    if not all(handler.ignore_custom_event for handler in own.handlers) or get_debug():
        return False
    if tracers._tracing_v2_is_enabled():  # noqa: SLF001
        return False
    for variable, _, handler_class, name in tracers._configure_hooks:  # noqa: SLF001
        # An environment variable requests a handler, which only `configure` can build.
        if name is not None and handler_class is not None and name in environ:
            return False
        handler = variable.get()
        if handler is not None and not handler.ignore_custom_event:
            return False
    return True


def _doors() -> tuple[Any, ...]:
    """The functions that build a run's manager; instrumentation that wraps one of them may add handlers."""
    blocking, awaiting = CallbackManager, AsyncCallbackManager
    made = (blocking.__init__, vars(blocking).get("configure"), awaiting.__init__, vars(awaiting).get("configure"))
    return (manager._configure, *made)  # noqa: SLF001


def _is_stock() -> bool:
    """Whether LangChain's own code builds managers, as at import of this module."""
    # By identity: a proxy compares equal to what it wraps.
    return _WAS_STOCK and all(map(operator.is_, _doors(), _STOCK))


def _is_langchains(door: Any) -> bool:
    function = door.__func__ if type(door) is classmethod else door
    # `functools.wraps` copies a function's `__module__`, but not its globals.
    return type(function) is FunctionType and str(function.__globals__.get("__name__")).startswith("langchain_core.")


_STOCK = _doors()
_WAS_STOCK = all(map(_is_langchains, _STOCK))


class _OutcomeKept:
    """Logs and suppresses what an observer raises, except interrupts and requested cancellations."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        """Does nothing."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        is_stray = isinstance(error, asyncio.CancelledError) and not _cancelled()
        if not (is_stray or isinstance(error, Exception)):
            return False
        logger.warning("%s: an observer failed with %s; the outcome stands.", self._name, type(error).__name__)
        return True


def _cancelled() -> bool:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop in this thread
        return False
    return task is not None and task.cancelling() > 0
