"""Private answers as a tool and as middleware of agents; the middleware needs the package `langchain`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from langchain_core.runnables.config import ensure_config, merge_configs, var_child_runnable_config
from typing_extensions import override

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.runs.private_tool import CAPPED, SPENT, PrivateTool, budget_metadata, thread_tenant
from langchain_dpicl.runs.query_runnable import WITHOUT_WRAPPERS, QueryRunnable

if TYPE_CHECKING:
    from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse

    _Base = AgentMiddleware[Any, Any, Any]
else:
    _Base = object


class DPVotingMiddleware(_Base):
    """Gives an agent a private voter as a tool, with an allowance per thread or the component's cap per tenant.

    Formal guarantees:
      - As of `PrivateTool`: where threads have an allowance, the ledger counts the charged questions of each, and a
        refusal is a message that the model can read.
      - Each model call of the agent, and each question, carries in `config["metadata"]` what the budget stands at, as
        `budget_metadata` says: limits and counts; never a question, an answer or anything that depends on records.
      - Where threads have an allowance and the config names no thread, a question ends the run with a
        ConfigurationError, uncharged; an agent that asks none works.
      - It keeps nothing in the agent's state: going back to an older checkpoint gives no allowance back.

    Args:
      component: a `DPVotingRunnable` or another component that answers queries. Give it a `memo`: an agent's runs are
        repeated after failures, interrupts and in other processes.
      name: of the tool.
      description: what the model reads of it; None: what the component says.
      queries_per_thread: charged questions of a thread; None: threads have no allowance of their own. "auto": 5, or
        None where the component has `tenant_max_queries`: that cap then counts all questions of a tenant.

    Raises:
      ConfigurationError: an argument is out of range, or an allowance is given beside `tenant_max_queries`.
    """

    def __init__(
        self,
        component: QueryRunnable[Any],
        *,
        name: str = "ask_private_examples",
        description: str | None = None,
        queries_per_thread: int | Literal["auto"] | None = "auto",
    ) -> None:
        super().__init__()
        if not isinstance(component, QueryRunnable):
            raise fail("component", "a component that answers queries", type(component).__name__, WITHOUT_WRAPPERS)
        if queries_per_thread == "auto":
            queries_per_thread = 5 if component.tenants.max_queries is None else None
        elif isinstance(queries_per_thread, str):
            raise fail("queries_per_thread", "'auto', None or an integer >= 0", queries_per_thread)
        self._tool = component.as_tool(name=name, description=description, queries_per_thread=queries_per_thread)
        self.tools = [self._tool]

    @property
    @override
    def name(self) -> str:
        """Name of the middleware, one for each tool: an agent may have several."""
        return f"{type(self).__name__}[{self._tool.name}]"

    @override
    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Shows the budget in the metadata of the model's run."""
        with _metadata_added(self._tool.standing(ensure_config())):
            return handler(request)

    @override
    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        """Async version of `wrap_model_call`."""
        standing = await self._tool.astanding(ensure_config())
        with _metadata_added(standing):
            return await handler(request)


@contextmanager
def _metadata_added(metadata: Mapping[str, Any]) -> Iterator[None]:
    """Adds to the metadata of all runs that begin in the block, as the run's own config would."""
    config = merge_configs(ensure_config(), {"metadata": dict(metadata)})
    token = var_child_runnable_config.set(config)
    try:
        yield
    finally:
        var_child_runnable_config.reset(token)


if not TYPE_CHECKING:  # the class gets its base when it is first used: langchain loads much, and may be missing
    _Middleware = globals().pop("DPVotingMiddleware")

    def __getattr__(name: str) -> Any:
        if name != "DPVotingMiddleware":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            from langchain.agents.middleware import AgentMiddleware
        except ModuleNotFoundError as error:
            if str(error.name).partition(".")[0] != "langchain":
                raise
        else:
            made = type(name, (_Middleware, AgentMiddleware), {"__module__": __name__, "__doc__": _Middleware.__doc__})
            return globals().setdefault(name, made)
        raise ConfigurationError("agents: expected the package langchain, found none. Install langchain-dpicl[agents].")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = ["CAPPED", "SPENT", "DPVotingMiddleware", "PrivateTool", "budget_metadata", "thread_tenant"]
