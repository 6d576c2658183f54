"""Carries one budget through LangChain's callbacks, finds that of a component, and reports charges to observers."""

from __future__ import annotations

import asyncio
import logging
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from datetime import date
from os import environ
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias, TypeVar, cast

from langchain_core.callbacks import (
    AsyncCallbackManager,
    BaseCallbackHandler,
    BaseCallbackManager,
    CallbackManager,
    manager,
)
from langchain_core.globals import get_debug
from langchain_core.runnables.config import RunnableConfig, ensure_config
from langchain_core.tracers import context as tracers
from langchain_core.tracers.context import register_configure_hook

from langchain_dpicl._construction import tells_how_to_build
from langchain_dpicl._opaque import Uncopyable
from langchain_dpicl.backends.sync_async import run_in_thread, run_to_completion
from langchain_dpicl.budget.budget import Budget, BudgetUse, SpentHook
from langchain_dpicl.exceptions import (
    ConfigurationError,
    DPICLError,
    LedgerError,
    LedgerUnavailableError,
    NoPrivacyBudgetError,
    PrivacyBudgetError,
    PrivacyBudgetMismatchError,
)
from langchain_dpicl.privacy._validate import Adjacency, check_adjacency, check_delta, check_epsilon, check_name, fail
from langchain_dpicl.privacy.extensions.durable_writer import MOST_HELD
from langchain_dpicl.privacy.extensions.joint_plans import GdpPool, JointPlan, ZCdpPool
from langchain_dpicl.privacy.extensions.ledger_anchor import LedgerAbout, LedgerAnchor, check_anchor, read_anchor
from langchain_dpicl.privacy.extensions.stream_ledger import StreamTerms
from langchain_dpicl.privacy.ledger.store import LIFE, LedgerStore, hide_password
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.stores import TIMEOUT, check_apart

if TYPE_CHECKING:  # see `budget`
    from langchain_dpicl.reports.report import PrivacyReport


Where: TypeAlias = LedgerStore | str | os.PathLike[str]
"""A store, the path of a SQLite file, or the address of a PostgreSQL database."""

AnchorPlace: TypeAlias = LedgerAnchor | str | os.PathLike[str]
"""An anchor, the path of its file, or the address of a PostgreSQL database."""

BudgetLike: TypeAlias = "PrivacyBudgetCallbackHandler | Budget | RunnableConfig"
"""What `budget=` takes: the shared handler, its budget, or a RunnableConfig whose callbacks hold the handler."""

LEDGER_VARIABLE = "DPICL_LEDGER"
"""Name of the environment variable that says where the ledger is."""

_NO_LEDGER = "0" * 32  # reading this id tests whether an anchor can be read


class OpenedStore(NamedTuple):
    """A store, and whether it was opened here and so has to be closed here."""

    store: LedgerStore
    is_ours: bool


def open_store_at(place: Callable[[], Any], name: str, *, timeout: float = TIMEOUT) -> OpenedStore:
    """Returns a store as it is, or opens the existing ledger that a path or an address names."""
    if _is_store(place):
        return OpenedStore(place(), is_ours=False)
    from langchain_dpicl.stores import open_store  # no database is loaded for a ledger in memory

    opened = open_store(place(), name=check_name("name", name), timeout=timeout)
    if opened.header() is None:
        opened.close()
        msg = f"ledger: expected one with limits, found one whose creation was interrupted ({opened.description})."
        raise LedgerError(f"{msg} PrivacyBudgetCallbackHandler.create finishes it.")
    return OpenedStore(opened, is_ours=True)


def _ledger_here() -> str:
    """Returns where the environment says that the ledger is."""
    where = os.environ.get(LEDGER_VARIABLE, "")
    if not where:
        advice = f"Give it, or set {LEDGER_VARIABLE}."
        raise ConfigurationError(f"ledger: expected a path or postgresql://..., found none. {advice}")
    return where


def make_store_at(place: Callable[[], Any], name: str) -> OpenedStore:
    """Returns a store as it is, a new one, or the empty one that an interrupted `create` left."""
    if _is_store(place):
        return OpenedStore(place(), is_ours=False)
    from langchain_dpicl.stores import new_store, open_store

    try:
        return OpenedStore(new_store(place(), name=name), is_ours=True)
    except LedgerUnavailableError:
        raise
    except LedgerError as error:
        refusal = error
    with suppress(LedgerError):
        store = open_store(place(), name=name)
        if store.header() is None and not store.records():  # a ledger with lines had limits before
            store.may_create = True
            return OpenedStore(store, is_ours=True)
        store.close()
    raise refusal


def anchor_at(place: Callable[[], Any], *, may_make: bool = False, timeout: float = TIMEOUT) -> LedgerAnchor | None:
    """Returns an anchor (or None) as it is, or opens the one that a path or an address names; it has been read once."""
    if not isinstance(place(), (str, os.PathLike)):
        anchor = check_anchor(place())
    else:
        from langchain_dpicl.stores import make_anchor, open_anchor

        anchor = make_anchor(place()) if may_make else open_anchor(place(), timeout=timeout)
    if anchor is not None:
        read_anchor(anchor, _NO_LEDGER)
    return anchor


@contextmanager
def close_on_error(opened: OpenedStore | None) -> Iterator[None]:
    """Closes the store if it was opened here and the block raises."""
    try:
        yield
    except BaseException:
        if opened is not None and opened.is_ours:
            getattr(opened.store, "close", lambda: None)()
        raise


def _is_store(place: Callable[[], Any]) -> bool:
    """Whether the argument is a store; False for a valid path or address."""
    if isinstance(place(), (str, os.PathLike)):
        from langchain_dpicl.stores import as_place

        as_place(place())
        return False
    if isinstance(place(), LedgerStore) and not isinstance(place(), type):
        return True
    kind = f"the class {place().__name__}" if isinstance(place(), type) else type(place()).__name__
    raise fail("store", "a path, an address such as postgresql://..., or a LedgerStore", kind)


# LangChain may suppress what a handler raises, so no check is made here: every component asks the ledger directly.


@tells_how_to_build("PrivacyBudgetCallbackHandler(epsilon=..., delta=1e-6), delta at most 1/(10 * public_size)")
class PrivacyBudgetCallbackHandler(Uncopyable, BaseCallbackHandler):
    """Owns a privacy budget and carries it through LangChain. The ledger, not the handler, enforces the budget.

    Formal guarantees:
      - It reads no prompt, response or error of any run: every event is ignored.
      - It cannot be copied or pickled, so there is one budget however often LangChain copies a config.

    Args:
      epsilon: limit for the ledger's whole life.
      delta: limit for the ledger's whole life; at most 1/(10 * public_size) of the examples.
      adjacency: the neighbouring relation of everything on this ledger.
      store: where the ledger lives: a store, or the path of an EXISTING SQLite ledger (or `postgresql://...`) with
        these limits; `create` makes one. None: in memory, until this process ends.
      name: public name for reports; with a path, which of the ledgers there.
      per: "life", or the windows that the promise is for, as of `create`.
      anchor: a second store of the ledger's last line, which detects an older copy of the ledger: an anchor, or the
        path or address of one. An anchor that does not know the ledger is refused.

    Attributes:
      budget: the budget, for components and for `declare`.

    Raises:
      ConfigurationError: an argument is out of range.
      PrivacyBudgetMismatchError: the store holds a ledger with other limits.
      LedgerError: there is no ledger, or it is broken, cannot be read, or does not match the anchor.

    Example:
      >>> handler = PrivacyBudgetCallbackHandler(epsilon=4.0, delta=1e-6)
      >>> handler.remaining_epsilon
      4.0
    """

    raise_error = True
    run_inline = True

    def __init__(
        self,
        epsilon: float,
        delta: float,
        *,
        adjacency: Adjacency = "add_remove",
        store: Where | None = None,
        name: str = "budget",
        per: str = LIFE,
        anchor: AnchorPlace | None = None,
    ) -> None:
        place, second = hide_password(store), hide_password(anchor)
        del store, anchor  # crash reporters show the variables of a frame that raises
        super().__init__()
        check_apart(place, second)
        opened = None if place() is None else open_store_at(place, name)
        limits: dict[str, Any] = {"epsilon": epsilon, "delta": delta, "adjacency": adjacency, "name": name}
        limits["per"] = per
        with close_on_error(opened):
            known = anchor_at(second, may_make=opened is None)
            self.budget = Budget(**limits, store=None if opened is None else opened.store, anchor=known)

    @classmethod
    def open(
        cls,
        store: Where | None = None,
        *,
        name: str = "budget",
        anchor: AnchorPlace | None = None,
        adopt_anchor: bool = False,
        most_held: int = MOST_HELD,
        timeout: float = TIMEOUT,
    ) -> Self:
        """Opens a ledger that exists, with its own limits; never makes one.

        Args:
          store: a path, `postgresql://...`, or a store; None: what the environment names as DPICL_LEDGER.
          name: which of the ledgers there; a store has only one.
          anchor: a second store of the ledger's last line, or its path or address.
          adopt_anchor: accept an anchor that does not know the ledger, which is otherwise refused. Use it once.
          most_held: most tickets of one kind that this process charges before they are asked for, so that not every
            query waits for the disk. They are lost if it is killed. 1: none.
          timeout: seconds to wait for a lock or a database before a call is refused. A store or an anchor that was
            opened before has its own.

        Raises:
          LedgerError: there is no ledger, or it is broken, cannot be read, or does not match the anchor.
          ConfigurationError: no place is given, and none is in the environment; or the anchor is in the ledger's own
            file or database.
        """
        place, second = hide_password(_ledger_here() if store is None else store), hide_password(anchor)
        del store, anchor  # crash reporters show the variables of a frame that raises
        check_apart(place, second, timeout=timeout)
        opened = open_store_at(place, name, timeout=timeout)
        with close_on_error(opened):
            known = anchor_at(second, timeout=timeout)
            return cls.from_budget(
                Budget.open(opened.store, anchor=known, adopt_anchor=adopt_anchor, most_held=most_held)
            )

    @classmethod
    def create(
        cls,
        store: Where,
        *,
        epsilon: float,
        delta: float,
        adjacency: Adjacency = "add_remove",
        name: str = "budget",
        per: str = LIFE,
        about: Mapping[str, Any] | None = None,
        anchor: AnchorPlace | None = None,
    ) -> Self:
        """Creates a ledger, once; use `open` afterwards.

        Args:
          store: a path, `postgresql://...`, or a store that holds no ledger yet.
          epsilon: limit for the ledger's whole life.
          delta: limit for the ledger's whole life; at most 1/(10 * public_size) of the examples.
          adjacency: the neighbouring relation of everything on this ledger.
          name: public name of the ledger; a database may hold several.
          per: "life", or the windows that the promise is for, in hours, days or weeks of the records' own time, such as
            "30 days": then a `PrivateStream` is what it pays for.
          about: public texts for those who approve the ledger; see `Budget`.
          anchor: a second store of the ledger's last line, or its path or address; a missing file is created.

        Raises:
          ConfigurationError: an argument is out of range; nothing was created.
          LedgerError: a ledger of that name exists already, or none can be written.
        """
        place, second = hide_password(store), hide_password(anchor)
        del store, anchor  # crash reporters show the variables of a frame that raises
        check_epsilon(epsilon)
        check_delta(delta)
        check_adjacency(adjacency)
        check_name("name", name)
        StreamTerms.parse(per)
        LedgerAbout.parse(about)
        _is_store(place)  # refuses what names no place, before anything is created
        check_apart(place, second)
        known = anchor_at(second, may_make=True)
        made = make_store_at(place, name)
        if made.store.header() is not None:
            raise LedgerError(f"store: expected no ledger yet, found one ({made.store.description}). Open it.")
        limits: dict[str, Any] = {"epsilon": epsilon, "delta": delta, "adjacency": adjacency, "name": name}
        limits |= {"per": per, "about": about}
        with close_on_error(made):
            return cls.from_budget(Budget(**limits, store=made.store, anchor=known))

    @classmethod
    def from_budget(cls, budget: Budget) -> Self:
        """Returns a handler that carries an existing budget.

        Args:
          budget: the budget, which stays the same object.

        Raises:
          ConfigurationError: it is not a `Budget`.
        """
        if not isinstance(budget, Budget):
            raise fail("budget", "a Budget", budget, "Make one with Budget(epsilon=..., delta=...).")
        handler = cls.__new__(cls)
        BaseCallbackHandler.__init__(handler)
        handler.budget = budget
        return handler

    @property
    def epsilon(self) -> float:
        """Limit of the whole ledger."""
        return self.budget.epsilon

    @property
    def delta(self) -> float:
        """Limit of the whole ledger."""
        return self.budget.delta

    @property
    def adjacency(self) -> Adjacency:
        """The neighbouring relation of everything on the ledger."""
        return self.budget.adjacency

    @property
    def remaining_epsilon(self) -> float:
        """Epsilon not yet promised to a share."""
        return self.budget.remaining_epsilon

    @property
    def remaining_delta(self) -> float:
        """Delta not yet promised to a share."""
        return self.budget.remaining_delta

    def _repr_html_(self) -> str:
        return self.budget._repr_html_()

    def remaining_at(self, day: str | date) -> tuple[float, float]:
        """Returns what every window with a day of the records has left; see `Budget.remaining_at`."""
        return self.budget.remaining_at(day)

    def retire(self, component: str) -> None:
        """Ends a component of a stream; see `Budget.retire`."""
        self.budget.retire(component)

    def report(self) -> PrivacyReport:
        """Returns the report of all shares; see `Budget.report`."""
        return self.budget.report()

    def plan(self, *, epsilon: float | None = None, delta: float | None = None) -> AbstractContextManager[JointPlan]:
        """Opens a joint plan; see `Budget.plan`."""
        return self.budget.plan(epsilon=epsilon, delta=delta)

    def gdp_pool(self, component: str, *, epsilon: float, delta: float | None = None) -> GdpPool:
        """Reserves a Gaussian pool; see `Budget.gdp_pool`."""
        return self.budget.gdp_pool(component, epsilon=epsilon, delta=delta)

    def zcdp_pool(self, component: str, *, epsilon: float, delta: float | None = None) -> ZCdpPool:
        """Reserves a zCDP pool; see `Budget.zcdp_pool`."""
        return self.budget.zcdp_pool(component, epsilon=epsilon, delta=delta)

    def use(self) -> BudgetUse:
        """Returns what is spent, left and open; see `Budget.use`."""
        return self.budget.use()

    def on_spent(self, part: float, hook: SpentHook, *, component: str | None = None) -> None:
        """Calls a hook once, as soon as a part is charged; see `Budget.on_spent`."""
        self.budget.on_spent(part, hook, component=component)

    def bind(self, private: PrivateExamples) -> None:
        """Binds private examples to the ledger; see `Budget.bind`."""
        self.budget.bind(private)

    def close(self) -> None:
        """Closes the ledger's store; see `Budget.close`."""
        self.budget.close()

    def _ignored(self) -> bool:
        return True

    ignore_llm = property(_ignored)
    ignore_retry = property(_ignored)
    ignore_chain = property(_ignored)
    ignore_agent = property(_ignored)
    ignore_retriever = property(_ignored)
    ignore_chat_model = property(_ignored)
    ignore_custom_event = property(_ignored)

    def __repr__(self) -> str:
        # Crash reporters show a handler whose constructor raised, without a budget.
        return f"PrivacyBudgetCallbackHandler({getattr(self, 'budget', 'not made')!r})"


_ACTIVE: ContextVar[PrivacyBudgetCallbackHandler | None] = ContextVar("dpicl_privacy_budget", default=None)
# Once, at import: LangChain never removes a registration from its global list.
register_configure_hook(_ACTIVE, inheritable=True)


@contextmanager
def get_privacy_budget_callback(
    epsilon: float | None = None,
    delta: float | None = None,
    *,
    adjacency: Adjacency = "add_remove",
    store: Where | None = None,
    name: str = "budget",
    anchor: AnchorPlace | None = None,
    handler: PrivacyBudgetCallbackHandler | Budget | None = None,
) -> Iterator[PrivacyBudgetCallbackHandler]:
    """Makes a budget the one that components use by default inside the block.

    Args:
      epsilon: limit of the ledger (not with `handler`); with `store`, None takes the ledger's own limits.
      delta: limit of the ledger (not with `handler`); with `store`, None takes the ledger's own limits.
      adjacency: neighbouring relation of the ledger; ignored if the ledger's own limits are used.
      store: where the ledger lives: as for `PrivacyBudgetCallbackHandler`. None: in memory, until this process ends.
      name: public name of the ledger.
      anchor: a second store of the ledger's last line.
      handler: an existing handler or budget to use instead of a ledger.

    Yields:
      The handler; its `report()` stays readable after the block.

    Raises:
      ConfigurationError: neither limits nor a ledger nor a handler, both, or a handler of another type.

    Example:
      >>> with get_privacy_budget_callback(epsilon=1.0, delta=1e-6) as budget:
      ...     resolved = resolve_budget()
      >>> resolved is budget.budget
      True
    """
    place, second = hide_password(store), hide_password(anchor)
    del store, anchor  # crash reporters show the variables of a frame that raises
    limits = [limit for limit in (epsilon, delta) if limit is not None]
    alone = handler is not None and not limits and place() is None and second() is None
    if not alone and (handler is not None or len(limits) == 1 or (place() is None and not limits)):
        msg = "get_privacy_budget_callback: expected epsilon and delta, or the store= of a ledger, or handler= alone"
        raise ConfigurationError(f"{msg}; found another choice of them.")
    if handler is not None:
        budget = budget_of(handler, "handler")
        active = PrivacyBudgetCallbackHandler.from_budget(budget) if isinstance(handler, Budget) else handler
    elif epsilon is None or delta is None:
        active = PrivacyBudgetCallbackHandler.open(place(), name=name, anchor=second())
    else:
        how: dict[str, Any] = {"adjacency": adjacency, "name": name}
        active = PrivacyBudgetCallbackHandler(epsilon, delta, store=place(), anchor=second(), **how)
    token = _ACTIVE.set(active)
    try:
        yield active
    finally:
        _ACTIVE.reset(token)


def resolve_budget(budget: Any = None, config: RunnableConfig | Mapping[str, Any] | None = None) -> Budget:
    """Finds the budget of a component: what `budget=` gave, then handlers in the config, then the context variable.

    `budget` may be a RunnableConfig whose callbacks hold the handler; beside `config` it is what the constructor gave.

    Formal guarantees:
      - Fails closed: no budget, or two different ones in the first place that has any, is an error, never a default.

    Raises:
      NoPrivacyBudgetError: there is none in the constructor, the config or the context.
      PrivacyBudgetMismatchError: the constructor's budget is not among those of the config (or, without any there, of
        the context), or it has none and the config holds several.
      ConfigurationError: `budget` is neither a budget nor a handler, or `config` is no config.
    """
    if isinstance(budget, Mapping) and set(budget) <= set(RunnableConfig.__annotations__):
        given = cast("RunnableConfig", budget)
        if config is None:
            budget, config = None, given
        else:
            check_config(given)
            has_own = given.get("callbacks") is not None and _budgets_in(given)  # else they are those of the run
            budget = resolve_budget(None, given) if has_own else None
    own = None if budget is None else budget_of(budget, "budget")
    budgets, place = _budgets_in(config), "the config's callbacks"
    active = _ACTIVE.get()
    if not budgets and active is not None:
        budgets, place = {active.budget.ledger_id: active.budget}, "the block of get_privacy_budget_callback"
    if own is not None:
        if budgets and own.ledger_id not in budgets:
            msg = f"budget: expected {_name(own)}, given to the constructor, found {_names(budgets)} in {place}."
            raise PrivacyBudgetMismatchError(msg + " Pass the same budget in both places, or in one.")
        return own
    if len(budgets) > 1:
        msg = f"budget: expected one budget, found {_names(budgets)} in {place}. Give the component budget=."
        raise PrivacyBudgetMismatchError(msg)
    if not budgets:
        msg = (
            "budget: expected a privacy budget, found none. Give budget=PrivacyBudgetCallbackHandler(epsilon=..., "
            "delta=...) or a config whose callbacks hold one, or use `with get_privacy_budget_callback(...)`."
        )
        raise NoPrivacyBudgetError(msg)
    return next(iter(budgets.values()))


def budget_of(given: Any, name: str) -> Budget:
    """Returns a `Budget`, or the budget of a handler; refuses everything else."""
    if isinstance(given, Budget):
        return given
    if isinstance(given, PrivacyBudgetCallbackHandler):
        return given.budget
    expected = "a PrivacyBudgetCallbackHandler, a Budget or a RunnableConfig with a handler"
    msg = f"{name}: expected {expected}, found {type(given).__name__}."
    raise ConfigurationError(msg)


_EXPECTED: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "callbacks": ("a list of handlers or a manager", lambda value: isinstance(value, (list, BaseCallbackManager))),
    "configurable": (
        "a mapping with keys of text",
        lambda value: isinstance(value, Mapping) and all(isinstance(key, str) for key in value),
    ),
    "max_concurrency": ("an integer >= 1", lambda value: type(value) is int and value >= 1),
    "metadata": ("a mapping", lambda value: isinstance(value, Mapping)),
    "run_name": ("text", lambda value: isinstance(value, str)),
    "tags": ("a list of texts", lambda value: isinstance(value, list) and all(isinstance(tag, str) for tag in value)),
}


def check_config(config: Any) -> None:
    """Refuses an invalid RunnableConfig before LangChain reads it: an untrusted client may have sent it."""
    if config is None:
        return
    if not isinstance(config, Mapping):
        msg = f"config: expected a RunnableConfig (a mapping) or None, found {type(config).__name__}."
        raise ConfigurationError(msg + " Pass a budget or handler as budget=.")
    for key, value in config.items():
        if not isinstance(key, str):
            raise ConfigurationError(f"config: expected keys that are texts, found {type(key).__name__}.")
        if value is None or key not in _EXPECTED:
            continue
        expected, is_right = _EXPECTED[key]
        if not is_right(value):
            found = value if isinstance(value, int) else type(value).__name__
            raise ConfigurationError(f"config[{key!r}]: expected {expected}, found {found}.")
    handlers = config.get("callbacks")
    wrong = (
        [each for each in handlers if not isinstance(each, BaseCallbackHandler)] if isinstance(handlers, list) else []
    )
    if wrong:
        msg = f"config['callbacks']: expected handlers, found {type(wrong[0]).__name__}."
        raise ConfigurationError(msg + " Of a budget pass the PrivacyBudgetCallbackHandler, or give budget=.")


def check_configs(configs: Any) -> None:
    """As `check_config`, for a batch: one config, or a list with one for each input."""
    for config in configs if isinstance(configs, Sequence) and not isinstance(configs, str) else [configs]:
        check_config(config)


def may_wait(budget: Any = None, config: RunnableConfig | Mapping[str, Any] | None = None) -> bool:
    """Whether the budget's ledger is on a disk or server, so that async code must not write it on the event loop."""
    try:
        return resolve_budget(budget, config).durable
    except DPICLError:  # no budget: the call that needs one refuses
        return False


def describe_tickets_left(left: Callable[[], int]) -> str:
    """Returns the number of remaining tickets for a repr, or the error's type if the ledger cannot be read."""
    try:
        return str(left())
    except LedgerError as error:
        return f"<{type(error).__name__}>"


def _budgets_in(config: RunnableConfig | Mapping[str, Any] | None) -> dict[str, Budget]:
    """Returns the budgets among the config's handlers, by ledger."""
    check_config(config)
    own = None if config is None else config.get("callbacks")
    # Callbacks of a config replace those of the run.
    callbacks = ensure_config().get("callbacks") if own is None else own
    handlers = callbacks if isinstance(callbacks, list) else getattr(callbacks, "handlers", [])
    budgets = [handler.budget for handler in handlers if isinstance(handler, PrivacyBudgetCallbackHandler)]
    return {budget.ledger_id: budget for budget in budgets}


def _name(budget: Budget) -> str:
    return f"{budget.name!r} (ledger {budget.ledger_id})"


def _names(budgets: Mapping[str, Budget]) -> str:
    return " and ".join(sorted(map(_name, budgets.values())))


CHARGED = "dpicl.charged"
"""Name of the event: tickets were charged."""

REFUSED = "dpicl.refused"
"""Name of the event: the budget refused."""

RELEASE = "dpicl.release"
"""Name of the event of an answer, with its receipt."""

_NOTE = "_dpicl_refusal"
_TELLING: set[asyncio.Future[None]] = set()
"""Events that are being sent: an event loop alone does not keep a task from the garbage collector."""
_REFUSALS_AWAITED: ContextVar[bool] = ContextVar("dpicl_refusals_awaited", default=False)

logger = logging.getLogger(__name__)
T = TypeVar("T")
Manager = TypeVar("Manager", CallbackManager, AsyncCallbackManager)


def record_event(
    name: str, data: Mapping[str, Any] | Callable[[], Mapping[str, Any]], config: RunnableConfig | None = None
) -> None:
    """Sends a custom event to the observers of the current run and of the config, which may be those of no run.

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
    """Async version of `record_event`; `is_slow`: `data` may wait for a ledger, and is called in a thread.

    A cancellation during such a wait is raised after the event is sent. One while it is sent is raised at once, and the
    sending goes on while the event loop runs: observers count what was charged, also behind the run's end.
    """
    stop = None
    with _OutcomeKept(name):
        run = _listening(config, AsyncCallbackManager)
        if run is not None:
            if is_slow and callable(data):
                data, stop = await run_to_completion(data)
            # A task of its own, as a cancelled one would take those of the observers with it before they begin.
            telling = asyncio.ensure_future(run.on_custom_event(name, _values(data), run_id=run.parent_run_id))
            # What was being sent when its loop was closed never ends.
            _TELLING.difference_update([one for one in list(_TELLING) if one.get_loop().is_closed()])
            _TELLING.add(telling)
            telling.add_done_callback(_told)
            await asyncio.wait({telling})
            try:
                telling.result()
            finally:
                del telling  # breaks a cycle: it holds an error, whose frames hold it
    if stop is not None:
        raise stop


def _told(telling: asyncio.Future[None]) -> None:
    """Forgets an event that was sent; asyncio would log the words of an error that nobody looks at."""
    _TELLING.discard(telling)
    if not telling.cancelled():
        telling.exception()


class RunEvents:
    """A block (`with` or `async with`) around a component's use of a budget; it sends events at its end.

    Formal guarantees:
      - `dpicl.charged` holds the tickets that stay charged, `dpicl.refused` the class of a PrivacyBudgetError and its
        two numbers; the rest is public names and limits. Epsilon and delta of the share are None while the ledger
        cannot be read.
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
        try:
            price = {"epsilon": share.epsilon, "delta": share.delta}
        except LedgerError:  # the tickets are gone all the same
            price = {"epsilon": None, "delta": None}
        shown = {"name": share.component, **price}
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
    """Returns the manager of the observers of the run and of the config; None without observers."""
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
    return listeners if heard else None


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
