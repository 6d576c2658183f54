"""Makes a component middleware of `langchain.agents.create_agent`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
from langchain_core.runnables.config import ensure_config
from typing_extensions import override

from langchain_dpicl.agents.tools import Per, ThreadQuota, add_run_metadata, private_tool
from langchain_dpicl.runs.query_runnable import QueryRunnable


class DPVotingMiddleware(AgentMiddleware[Any, Any, Any]):
    """Gives an agent a private voter as a tool, with an allowance per thread.

    Formal guarantees:
      - As of `private_tool`: the ledger counts the charged questions of each thread, and a refusal is a message that
        the model can read.
      - Each model call of the agent, and each question, carries in `config["metadata"]` what the budget stands at, as
        `budget_metadata` says: limits and counts; never a question, an answer or anything that depends on records.
      - Where the config names no thread, the agent works and shows no allowance; the tool refuses.
      - It keeps nothing in the agent's state: going back to an older checkpoint gives no allowance back.

    Args:
      component: a `DPVotingRunnable` or `DPFreeFormRunnable`. Give it `memo=`: an agent's runs are repeated after
        failures, interrupts and in other processes.
      name: of the tool.
      description: what the model reads of it; by default what the component says.
      queries_per_thread: charged questions of a thread; None: as many as the component allows.
      per: "thread", or "tenant": one allowance for all threads of `config["configurable"]["tenant"]`.

    Raises:
      ConfigurationError: an argument is out of range.
    """

    def __init__(
        self,
        component: QueryRunnable[Any],
        *,
        name: str = "ask_private_examples",
        description: str | None = None,
        queries_per_thread: int | None = 5,
        per: Per = "thread",
    ) -> None:
        super().__init__()
        self._desk = ThreadQuota(component, allowance=queries_per_thread, per=per)
        options: dict[str, Any] = {"queries_per_thread": queries_per_thread, "per": per}
        self.tools = [private_tool(component, name=name, description=description, **options)]

    @property
    @override
    def name(self) -> str:
        """Name of the middleware, one for each tool: an agent may have several."""
        return f"{type(self).__name__}[{self.tools[0].name}]"

    @override
    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Shows the budget in the metadata of the model's run."""
        with add_run_metadata(self._desk.metadata(ensure_config())):
            return handler(request)

    @override
    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        """Async version of `wrap_model_call`."""
        metadata = await self._desk.ametadata(ensure_config())
        with add_run_metadata(metadata):
            return await handler(request)
