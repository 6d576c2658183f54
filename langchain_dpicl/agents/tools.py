"""Makes a component a tool of an agent, with an allowance per thread and readable refusals."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias, get_args

from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config, merge_configs, var_child_runnable_config
from langchain_core.tools import BaseTool, ToolException
from pydantic import BaseModel

from langchain_dpicl.backends.sync_async import run_in_thread
from langchain_dpicl.budget.handler import may_wait
from langchain_dpicl.exceptions import (
    LedgerError,
    PrivacyBudgetExceededError,
    TenantCapExceededError,
)
from langchain_dpicl.privacy._validate import check_choice, check_int, fail
from langchain_dpicl.runs.answer_memo import TENANT, TENANT_CAP
from langchain_dpicl.runs.query_plan import QUERY_TEMPLATE
from langchain_dpicl.runs.query_runnable import QueryRunnable
from langchain_dpicl.runs.retry_wrappers import QueryTool

__all__ = [
    "CAPPED",
    "SPENT",
    "Per",
    "ThreadQuota",
    "add_run_metadata",
    "budget_metadata",
    "private_tool",
    "thread_tenant",
]

Per: TypeAlias = Literal["thread", "tenant"]

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

_RESERVED = frozenset({"config", "callbacks", "run_manager", "self", "model_config"})


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


def budget_metadata(component: QueryRunnable[Any], *, tenant: str | None = None, allowance: int | None = None) -> Any:
    """Returns what the budget of a component stands at, for `config["metadata"]`: flat, and public.

    Observers and tracers keep metadata with each run. It holds limits and counts of charged queries; no question, no
    answer, no record, and nothing that depends on records.

    Args:
      component: a `DPVotingRunnable` or `DPFreeFormRunnable`.
      tenant: whose allowance to show.
      allowance: charged queries that the tenant may have.

    Raises:
      ConfigurationError: it is no such component.
    """
    share, budget = check_component(component).share, component.budget
    shown: dict[str, Any] = {"dpicl_component": share.component, "dpicl_budget": budget.name}
    try:
        shown |= {
            "dpicl_epsilon": share.epsilon,
            "dpicl_delta": share.delta,
            "dpicl_queries_left": share.remaining(QUERY_TEMPLATE),
            "dpicl_remaining_epsilon": budget.remaining_epsilon,
        }
        if tenant is not None and allowance is not None:
            shown["dpicl_allowance_left"] = max(allowance - share.used_by(tenant), 0)
    except LedgerError as error:  # the numbers can be read later; a run goes on without them
        shown["dpicl_ledger"] = type(error).__name__
    return shown


class ThreadQuota:
    """Who asks, with what allowance, and what that one is shown. Public.

    Args:
      component: what answers.
      allowance: charged queries of each; None: as many as the component allows.
      per: whose allowance it is.

    Raises:
      ConfigurationError: an argument is out of range.
    """

    def __init__(self, component: QueryRunnable[Any], *, allowance: int | None, per: Per) -> None:
        self.component = check_component(component)
        self.allowance = None if allowance is None else check_int("queries_per_thread", allowance, low=0)
        self._per = check_choice("per", per, get_args(Per))

    def tenant(self, config: Mapping[str, Any]) -> str:
        """Returns the tenant as the ledger knows it.

        Raises:
          ConfigurationError: the config names no thread, or what is no tenant.
        """
        name = self.component.tenants.of(config).name
        if self._per == "tenant":
            return str(name)
        thread = _thread_of(config)
        if thread is None:
            advice = 'Or give the tool per="tenant": then each tenant has one allowance for all threads.'
            raise fail("config", 'a thread, {"configurable": {"thread_id": ...}}', "none", advice)
        return thread_tenant(thread, tenant=name)

    def _cap(self, config: Mapping[str, Any]) -> int | None:
        """Returns the lowest of the allowance, the component's cap and the config's."""
        caps = [cap for cap in (self.component.tenants.of(config).cap, self.allowance) if cap is not None]
        return min(caps, default=None)

    def metadata(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what the budget stands at, and the allowance of whoever asks, where that one is named."""
        cap = self._cap(config)
        is_named = self._per == "tenant" or _thread_of(config) is not None
        tenant = self.tenant(config) if is_named else None
        shown: dict[str, Any] = budget_metadata(self.component, tenant=tenant, allowance=cap)
        return shown

    async def ametadata(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Is `metadata`, off the event loop where the ledger may have to be waited for."""
        return await run_in_thread(lambda: self.metadata(config), is_slow=may_wait(self.component.budget))

    def asking(self, config: RunnableConfig, metadata: dict[str, Any]) -> RunnableConfig:
        """Returns the config of one question: the tenant, the allowance, the budget in view."""
        named: dict[str, Any] = {TENANT: self.tenant(config), TENANT_CAP: self._cap(config)}
        return merge_configs(config, {"configurable": named, "metadata": metadata})

    def refusal(self, error: PrivacyBudgetExceededError) -> ToolException:
        """Returns the words that a model reads in place of an answer."""
        return ToolException(CAPPED if isinstance(error, TenantCapExceededError) else SPENT)


def private_tool(
    component: QueryRunnable[Any],
    *,
    name: str = "ask_private_examples",
    description: str | None = None,
    queries_per_thread: int | None = 5,
    per: Per = "thread",
) -> BaseTool:
    """Makes a tool for any agent or graph: a question in, a private answer or a readable refusal out.

    Formal guarantees:
      - Of each thread (or tenant) at most so many questions are charged, over all processes: the ledger counts them.
        Threads mint no budget: the component's share is the limit of all together.
      - A used-up allowance and a spent budget are told as a tool message with status "error"; other errors are raised.
        Where the component was built with `on_exhausted="zero_shot"`, the public model's answer is told instead.
      - The message's artifact is the answer, with its receipt if the component gives one; never a record or a vote.
      - A query with one variable may be a plain text: `tool.invoke("my card is gone", config)`.

    Args:
      component: a `DPVotingRunnable` or `DPFreeFormRunnable`; with `memo=`, runs that are repeated cost nothing.
      name: of the tool.
      description: what the model reads of it; by default what the component says.
      queries_per_thread: charged questions; None: as many as the component allows.
      per: "thread" (`config["configurable"]["thread_id"]`), or "tenant": one allowance for all of a tenant's threads.

    Raises:
      ConfigurationError: an argument is out of range.
    """
    desk = ThreadQuota(component, allowance=queries_per_thread, per=per)
    if clash := sorted(_RESERVED & set(component.wording.input_variables)):
        raise fail("suffix, prefix", f"variables other than {sorted(_RESERVED)}, for a tool", clash)

    def ask(*, config: RunnableConfig, **query: Any) -> tuple[str, Any]:
        refused, config = None, ensure_config(config)  # `run` without a config gives none
        try:
            return _tool_output(component.invoke(query, desk.asking(config, desk.metadata(config))))
        except PrivacyBudgetExceededError as error:
            refused = desk.refusal(error)
        raise refused  # out here: the refusal's numbers are not its context

    async def aask(*, config: RunnableConfig, **query: Any) -> tuple[str, Any]:
        refused, config = None, ensure_config(config)
        try:
            return _tool_output(await component.ainvoke(query, desk.asking(config, await desk.ametadata(config))))
        except PrivacyBudgetExceededError as error:
            refused = desk.refusal(error)
        raise refused

    defaults = component.tool_defaults()
    return QueryTool.from_function(
        func=ask,
        coroutine=aask,
        name=name,
        description=defaults["description"] if description is None else description,
        args_schema=defaults["args_schema"],
        response_format="content_and_artifact",
        handle_tool_error=True,
    )


def check_component(component: Any) -> QueryRunnable[Any]:
    """Returns a component that answers queries.

    Raises:
      ConfigurationError: it is none.
    """
    if isinstance(component, QueryRunnable):
        return component
    advice = "Wrappers (with_config, bind, with_retry) are left off: the tool has a config of its own."
    raise fail("component", "a DPVotingRunnable or DPFreeFormRunnable", type(component).__name__, advice)


@contextmanager
def add_run_metadata(metadata: Mapping[str, Any]) -> Iterator[None]:
    """Adds to the metadata of all runs that begin in the block, as the run's own config would."""
    config = merge_configs(ensure_config(), {"metadata": dict(metadata)})
    token = var_child_runnable_config.set(config)
    try:
        yield
    finally:
        var_child_runnable_config.reset(token)


def _thread_of(config: Mapping[str, Any]) -> Any:
    return (config.get("configurable") or {}).get("thread_id")


def _tool_output(answer: Any) -> tuple[str, Any]:
    """Returns what the model reads, and plain data beside it, which every checkpointer keeps."""
    return str(answer), answer.model_dump() if isinstance(answer, BaseModel) else {"answer": str(answer)}
