"""Shares one budget through LangChain's callbacks and shows it; never guards it.

LangChain may swallow what a handler raises, so every component asks the ledger directly. This room finds the budget
for it (constructor, then config, then context) and shows reports; `run_events` tells a run's observers. Knows no
private record and no mechanism.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn, SupportsIndex

from langchain_core.callbacks import BaseCallbackHandler, BaseCallbackManager
from langchain_core.runnables.config import RunnableConfig, ensure_config
from langchain_core.tracers.context import register_configure_hook

from langchain_dpicl.exceptions import (
    ConfigurationError,
    NoPrivacyBudgetError,
    PrivacyBudgetError,
    PrivacyBudgetMismatchError,
)
from langchain_dpicl.privacy._validate import Adjacency
from langchain_dpicl.privacy.examples import PrivateExamples
from langchain_dpicl.privacy.ledger import Budget, GdpPool, JointPlan, ZCdpPool
from langchain_dpicl.privacy.report import PrivacyReport
from langchain_dpicl.privacy.stores import LedgerStore


class PrivacyBudgetCallbackHandler(BaseCallbackHandler):
    """Owns a privacy budget and carries it through LangChain. It reports; the ledger guards.

    Formal guarantees:
      - It reads no prompt, response or error of any run: every event is ignored.
      - It cannot be copied or pickled, so there is one budget however often LangChain copies a config.

    Args:
      epsilon: limit for the ledger's whole life.
      delta: limit for the ledger's whole life; at most 1/(10 * public_size) of the examples.
      adjacency: the neighbouring relation of everything on this ledger.
      store: where the ledger lives; None: in memory, which dies with this process.
      name: public name for reports.

    Attributes:
      budget: the budget, for components and for `declare`.

    Raises:
      ConfigurationError: an argument is out of range.
      PrivacyBudgetMismatchError: the store holds a ledger with other limits.

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
        store: LedgerStore | None = None,
        name: str = "budget",
    ) -> None:
        super().__init__()
        self.budget = Budget(epsilon=epsilon, delta=delta, adjacency=adjacency, store=store, name=name)

    @classmethod
    def from_budget(cls, budget: Budget) -> PrivacyBudgetCallbackHandler:
        """Returns a handler that carries an existing budget."""
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

    def report(self) -> PrivacyReport:
        """Returns what was promised to whom; see `Budget.report`."""
        return self.budget.report()

    def plan(self, *, epsilon: float | None = None, delta: float | None = None) -> AbstractContextManager[JointPlan]:
        """Opens a joint plan; see `Budget.plan`."""
        return self.budget.plan(epsilon=epsilon, delta=delta)

    def gdp_pool(self, component: str, *, epsilon: float, delta: float | None = None) -> GdpPool:
        """Sets a Gaussian pool aside; see `Budget.gdp_pool`."""
        return self.budget.gdp_pool(component, epsilon=epsilon, delta=delta)

    def zcdp_pool(self, component: str, *, epsilon: float, delta: float | None = None) -> ZCdpPool:
        """Sets a zCDP pool aside; see `Budget.zcdp_pool`."""
        return self.budget.zcdp_pool(component, epsilon=epsilon, delta=delta)

    def bind(self, private: PrivateExamples) -> None:
        """Binds private examples to the ledger; see `Budget.bind`."""
        self.budget.bind(private)

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
        return f"PrivacyBudgetCallbackHandler({self.budget!r})"

    def __copy__(self) -> PrivacyBudgetCallbackHandler:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> PrivacyBudgetCallbackHandler:
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise PrivacyBudgetError("PrivacyBudgetCallbackHandler: cannot be pickled, its copy would spend again.")


_ACTIVE: ContextVar[PrivacyBudgetCallbackHandler | None] = ContextVar("dpicl_privacy_budget", default=None)
# Once, at import: every registration stays in LangChain's global list for ever.
register_configure_hook(_ACTIVE, inheritable=True)


@contextmanager
def get_privacy_budget_callback(
    epsilon: float | None = None,
    delta: float | None = None,
    *,
    adjacency: Adjacency = "add_remove",
    store: LedgerStore | None = None,
    name: str = "budget",
    handler: PrivacyBudgetCallbackHandler | Budget | None = None,
) -> Iterator[PrivacyBudgetCallbackHandler]:
    """Makes a budget the one that components find while the block runs.

    Args:
      epsilon: limit of a new ledger (not with `handler`).
      delta: limit of a new ledger (not with `handler`).
      adjacency: neighbouring relation of a new ledger.
      store: where a new ledger lives; None: in memory, which dies with this process.
      name: public name of a new ledger.
      handler: an existing handler or budget to use instead of a new ledger.

    Yields:
      The handler; its `report()` stays readable after the block.

    Raises:
      ConfigurationError: neither limits nor a handler, both, or a handler of another type.

    Example:
      >>> with get_privacy_budget_callback(epsilon=1.0, delta=1e-6) as budget:
      ...     found = resolve_budget()
      >>> found is budget.budget
      True
    """
    if (handler is None) == (epsilon is None and delta is None) or (handler is None and None in {epsilon, delta}):
        raise ConfigurationError("get_privacy_budget_callback: expected epsilon and delta, or handler=; not both.")
    if handler is None:
        active = PrivacyBudgetCallbackHandler(epsilon or 0.0, delta or 0.0, adjacency=adjacency, store=store, name=name)
    else:
        held = budget_of(handler, "handler")
        active = PrivacyBudgetCallbackHandler.from_budget(held) if isinstance(handler, Budget) else handler
    token = _ACTIVE.set(active)
    try:
        yield active
    finally:
        _ACTIVE.reset(token)


def resolve_budget(budget: Any = None, config: RunnableConfig | Mapping[str, Any] | None = None) -> Budget:
    """Finds the budget of a component: constructor, then handlers in the config, then the context variable.

    Formal guarantees:
      - Fails closed: no budget, or two different ones, is an error, never a default.

    Args:
      budget: what the constructor was given: a `Budget`, a handler, or None.
      config: a RunnableConfig; inside a run its callbacks are found without it.

    Raises:
      NoPrivacyBudgetError: none was given, found in the config or active in the context.
      PrivacyBudgetMismatchError: the constructor's budget is not the one in the config or context, or the config
        holds several.
      ConfigurationError: `budget` is neither a budget nor a handler, or `config` is no config.
    """
    given = None if budget is None else budget_of(budget, "budget")
    found, place = _budgets_in(config), "the config's callbacks"
    active = _ACTIVE.get()
    if not found and active is not None:
        found, place = {active.budget.ledger_id: active.budget}, "the block of get_privacy_budget_callback"
    if given is not None:
        if found and given.ledger_id not in found:
            msg = f"budget: expected {_name(given)}, given to the constructor, found {_names(found)} in {place}."
            raise PrivacyBudgetMismatchError(msg + " Pass the same budget in both places, or in one.")
        return given
    if len(found) > 1:
        msg = f"budget: expected one budget, found {_names(found)} in {place}. Give the component budget=."
        raise PrivacyBudgetMismatchError(msg)
    if not found:
        msg = (
            "budget: expected a privacy budget, found none. Give budget=PrivacyBudgetCallbackHandler(epsilon=..., "
            "delta=...), pass that handler in config['callbacks'], or use `with get_privacy_budget_callback(...)`."
        )
        raise NoPrivacyBudgetError(msg)
    return next(iter(found.values()))


def budget_of(given: Any, name: str) -> Budget:
    """Returns the budget that a `Budget` or a handler is or carries.

    Raises:
      ConfigurationError: it is neither.
    """
    if isinstance(given, Budget):
        return given
    if isinstance(given, PrivacyBudgetCallbackHandler):
        return given.budget
    msg = f"{name}: expected a PrivacyBudgetCallbackHandler or a Budget, found {type(given).__name__}."
    raise ConfigurationError(msg)


def _budgets_in(config: RunnableConfig | Mapping[str, Any] | None) -> dict[str, Budget]:
    """Returns the budgets among the config's handlers, by ledger."""
    if config is not None and not isinstance(config, Mapping):
        msg = f"config: expected a RunnableConfig (a mapping) or None, found {type(config).__name__}."
        raise ConfigurationError(msg + " Pass a budget or handler as budget=.")
    given = None if config is None else config.get("callbacks")
    if given is not None and not isinstance(given, (list, BaseCallbackManager)):
        msg = f"config['callbacks']: expected a list of handlers or a manager, found {type(given).__name__}."
        raise ConfigurationError(msg)
    # Callbacks of a config take the place of the run's, so only without them the run is asked.
    callbacks = ensure_config().get("callbacks") if given is None else given
    handlers = callbacks if isinstance(callbacks, list) else getattr(callbacks, "handlers", [])
    budgets = [handler.budget for handler in handlers if isinstance(handler, PrivacyBudgetCallbackHandler)]
    return {budget.ledger_id: budget for budget in budgets}


def _name(budget: Budget) -> str:
    return f"{budget.name!r} (ledger {budget.ledger_id})"


def _names(found: Mapping[str, Budget]) -> str:
    return " and ".join(sorted(map(_name, found.values())))
