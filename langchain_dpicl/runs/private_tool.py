"""Makes a component a tool of an agent, with an allowance per thread and readable refusals."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, Literal, SupportsIndex

from langchain_core.callbacks import AsyncCallbackManagerForToolRun, CallbackManagerForToolRun
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config, merge_configs
from langchain_core.tools import BaseTool, ToolException
from pydantic import Field
from typing_extensions import override

from langchain_dpicl.backends.sync_async import run_in_thread
from langchain_dpicl.budget.handler import may_wait
from langchain_dpicl.exceptions import LedgerError, PrivacyBudgetExceededError, TenantCapExceededError
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.runs.answer_memo import TENANT, TENANT_CAP

CAPPED = (
    "Not answered: the private questions that may be asked here are used up. Questions that were asked before can be "
    "asked again. Go on with what is known, or say that a person will look at it."
)
"""What an agent reads when its allowance is used up."""

SPENT = (
    "Not answered: the privacy budget of these records is spent, for every conversation. Questions that were asked "
    "before can be asked again. Go on with what is known, or say that a person will look at it."
)
"""What an agent reads when the budget is spent."""

RESERVED = frozenset({"config", "callbacks", "run_manager", "runtime", "self"})
"""Names that LangChain and LangGraph give a meaning in a tool's arguments."""


class PrivateTool(BaseTool):
    """A component as a tool: a question in, a private answer or a readable refusal out. `component.as_tool` makes it.

    Formal guarantees:
      - Of each thread at most `queries_per_thread` questions are charged, over all processes: the ledger counts them.
        Threads mint no budget: the component's share is the limit of all together.
      - A used-up allowance and a spent budget come as a tool message with status "error"; other errors are raised.
        Where the component was built with `Serving(on_exhausted="zero_shot")`, the public model's answer comes.
        A blank or too long question is pydantic's ValidationError, which agents tell their model.
      - The message's artifact is the result with its receipt, as plain data; never a record.
      - A query with one variable may be a plain text: `tool.invoke("my card is gone", config)`.
    """

    component: Any = Field(exclude=True, repr=False)
    """The `QueryRunnable` that answers."""

    queries_per_thread: int | None = None
    """Charged questions of a thread; None: threads have no allowance, and a tenant has the cap of its own, if any."""

    response_format: Literal["content", "content_and_artifact"] = "content_and_artifact"
    """Content and artifact: what the model reads, and plain data beside it, which every checkpointer keeps."""

    handle_tool_error: bool | str | Callable[[ToolException], str] | None = True
    """True: refusals are messages."""

    def standing(self, config: RunnableConfig) -> dict[str, Any]:
        """Returns what the budget stands at, and the allowance of the tenant who asks, for `config["metadata"]`.

        Args:
          config: of a run; it names the thread and the tenant.
        """
        tenant, cap = self._asker(config)
        return budget_metadata(self.component, tenant=tenant, allowance=cap)

    async def astanding(self, config: RunnableConfig) -> dict[str, Any]:
        """Async version of `standing`; where the ledger may have to be waited for, in a thread."""
        return await run_in_thread(lambda: self.standing(config), is_slow=may_wait(self.component.budget))

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return self.component.__reduce_ex__(protocol)  # which is refused

    @override
    def _run(
        self,
        given: Any = None,
        /,
        *,
        config: RunnableConfig,
        run_manager: CallbackManagerForToolRun | None = None,
        **query: Any,
    ) -> tuple[str, dict[str, Any]]:
        config = ensure_config(config)  # `run` without a config gives none
        try:
            asking = self._asking(config, self.standing(config))
            result = self.component.with_receipts().invoke(query if given is None else given, asking)
        except PrivacyBudgetExceededError as error:
            refused = _refusal(error)
        else:
            return str(result), result.model_dump()
        raise refused  # out here: the refusal's numbers are not its context

    @override
    async def _arun(
        self,
        given: Any = None,
        /,
        *,
        config: RunnableConfig,
        run_manager: AsyncCallbackManagerForToolRun | None = None,
        **query: Any,
    ) -> tuple[str, dict[str, Any]]:
        config = ensure_config(config)
        try:
            asking = self._asking(config, await self.astanding(config))
            result = await self.component.with_receipts().ainvoke(query if given is None else given, asking)
        except PrivacyBudgetExceededError as error:
            refused = _refusal(error)
        else:
            return str(result), result.model_dump()
        raise refused

    def _asker(self, config: RunnableConfig) -> tuple[str | None, int | None]:
        """Returns whose questions the ledger counts, None for a thread without a name, and how many there may be."""
        tenant = self.component.tenants.of(config)
        if self.queries_per_thread is None:
            return tenant.name, tenant.cap
        if tenant.cap is not None:  # the ledger counts a ticket under one name: a thread's, or its tenant's
            expected = "none beside queries_per_thread, as it counts all threads of a tenant"
            advice = "Build the tool with queries_per_thread=None, or give another component its cap in its Serving."
            raise fail(TENANT_CAP, expected, tenant.cap, advice)
        thread = (config.get("configurable") or {}).get("thread_id")
        name = None if thread is None else thread_tenant(thread, tenant=tenant.name)
        return name, self.queries_per_thread

    def _asking(self, config: RunnableConfig, standing: Mapping[str, Any]) -> RunnableConfig:
        """Returns the config of one question: the tenant, the allowance, the budget in view."""
        tenant, cap = self._asker(config)
        if tenant is None:
            advice = "Or give queries_per_thread=None: then each tenant has the component's allowance."
            raise fail("config", 'a thread, {"configurable": {"thread_id": ...}}', "none", advice)
        return merge_configs(config, {"configurable": {TENANT: tenant, TENANT_CAP: cap}, "metadata": dict(standing)})


def thread_tenant(thread_id: object, *, tenant: str = "") -> str:
    """Returns the tenant under which the ledger counts a thread: a hash, as lines of a ledger are kept for good.

    Args:
      thread_id: of the thread; its text counts.
      tenant: whose thread it is; two tenants never share one.

    Example:
      >>> thread_tenant("17") == thread_tenant(17) != thread_tenant("17", tenant="oslo")
      True
    """
    text = json.dumps([tenant, str(thread_id)], ensure_ascii=False)  # two halves of a character are not the whole one
    return f"thread-{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"


def budget_metadata(component: Any, *, tenant: str | None = None, allowance: int | None = None) -> dict[str, Any]:
    """Returns what the budget of a component stands at, for `config["metadata"]`: flat, and public.

    Observers and tracers keep metadata with each run. It holds limits and counts of charged queries; no question, no
    answer, no record, and nothing that depends on records.

    Args:
      component: a component that answers queries.
      tenant: whose allowance to show.
      allowance: charged queries that the tenant may have.
    """
    share, budget = component.share, component.budget
    shown: dict[str, Any] = {"dpicl_component": share.component, "dpicl_budget": budget.name}
    try:
        shown |= {
            "dpicl_epsilon": share.epsilon,
            "dpicl_delta": share.delta,
            "dpicl_queries_left": component.queries_left,
            "dpicl_remaining_epsilon": budget.remaining_epsilon,
        }
        if tenant is not None and allowance is not None:
            shown["dpicl_allowance_left"] = max(allowance - share.used_by(tenant), 0)
    except LedgerError as error:  # the numbers can be read later; a run goes on without them
        shown["dpicl_ledger"] = type(error).__name__
    return shown


def _refusal(error: PrivacyBudgetExceededError) -> ToolException:
    """Returns the words that a model reads in place of an answer."""
    return ToolException(CAPPED if isinstance(error, TenantCapExceededError) else SPENT)
