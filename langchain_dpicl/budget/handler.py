"""Carries one budget through LangChain's callbacks, opens its ledger, and finds the budget of a component."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from datetime import date
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias, cast

from langchain_core.callbacks import BaseCallbackHandler, BaseCallbackManager
from langchain_core.runnables.config import RunnableConfig, ensure_config
from langchain_core.tracers.context import register_configure_hook

from langchain_dpicl._construction import tells_how_to_build
from langchain_dpicl._opaque import Uncopyable
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.budget.use import BudgetUse, SpentHook
from langchain_dpicl.exceptions import (
    ConfigurationError,
    DPICLError,
    LedgerError,
    LedgerUnavailableError,
    NoPrivacyBudgetError,
    PrivacyBudgetMismatchError,
)
from langchain_dpicl.privacy._validate import Adjacency, check_adjacency, check_delta, check_epsilon, fail
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.privacy.extensions.joint_plans import GdpPool, JointPlan, ZCdpPool
from langchain_dpicl.privacy.extensions.ledger_about import LedgerAbout
from langchain_dpicl.privacy.extensions.ledger_anchor import LedgerAnchor, check_anchor, read_anchor
from langchain_dpicl.privacy.extensions.stream_blocks import StreamTerms
from langchain_dpicl.privacy.ledger.amounts import check_name
from langchain_dpicl.privacy.ledger.purse import MOST_HELD
from langchain_dpicl.privacy.ledger.store import LIFE, LedgerStore, hide_password
from langchain_dpicl.stores import TIMEOUT

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


def check_place(place: Callable[[], Any]) -> None:
    """Refuses an argument that names no place, before anything is created."""
    _is_store(place)


def check_apart(place: Callable[[], Any], second: Callable[[], Any]) -> None:
    """Refuses an anchor in the file of the ledger, before either is created."""
    if _is_path(place) and _is_path(second) and os.path.realpath(place()) == os.path.realpath(second()):
        raise fail("anchor", "a file of its own, on another disk", "the ledger's own file")


def _is_path(place: Callable[[], Any]) -> bool:
    from langchain_dpicl.stores import is_address

    return isinstance(place(), (str, os.PathLike)) and not is_address(place())


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
          ConfigurationError: no place is given, and none is in the environment.
        """
        place, second = hide_password(_ledger_here() if store is None else store), hide_password(anchor)
        del store, anchor  # crash reporters show the variables of a frame that raises
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
        check_place(place)
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
    else:
        active = _active(place, second, name, {"epsilon": epsilon, "delta": delta, "adjacency": adjacency})
    token = _ACTIVE.set(active)
    try:
        yield active
    finally:
        _ACTIVE.reset(token)


def _active(
    place: Callable[[], Any], second: Callable[[], Any], name: str, limits: dict[str, Any]
) -> PrivacyBudgetCallbackHandler:
    if limits["epsilon"] is None:
        return PrivacyBudgetCallbackHandler.open(place(), name=name, anchor=second())
    return PrivacyBudgetCallbackHandler(**limits, store=place(), name=name, anchor=second())


def resolve_budget(budget: Any = None, config: RunnableConfig | Mapping[str, Any] | None = None) -> Budget:
    """Finds the budget of a component: what `budget=` gave, then handlers in the config, then the context variable.

    `budget` may be a RunnableConfig whose callbacks hold the handler.

    Formal guarantees:
      - Fails closed: no budget, or two different ones, is an error, never a default.

    Raises:
      NoPrivacyBudgetError: there is none in the constructor, the config or the context.
      PrivacyBudgetMismatchError: the constructor's budget is not the one in the config or context, or the config
        holds several.
      ConfigurationError: `budget` is neither a budget nor a handler, or `config` is no config.
    """
    if isinstance(budget, Mapping) and set(budget) <= set(RunnableConfig.__annotations__):
        budget, config = None, cast("RunnableConfig", budget)
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
    for key, (expected, is_right) in _EXPECTED.items():
        value = config.get(key)
        if value is not None and not is_right(value):
            raise ConfigurationError(f"config[{key!r}]: expected {expected}, found {type(value).__name__}.")
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
