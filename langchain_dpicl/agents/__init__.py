"""Private answers as a tool and as middleware of agents.

`DPVotingMiddleware` needs the package `langchain`, which is imported when the class is first used.
"""

from typing import TYPE_CHECKING, Any

from langchain_dpicl._lazy import on_first_use

if TYPE_CHECKING:
    from langchain_dpicl.agents.middleware import DPVotingMiddleware
    from langchain_dpicl.runs.private_tool import CAPPED, SPENT, PrivateTool, budget_metadata, thread_tenant

_HOME = {
    "CAPPED": "langchain_dpicl.runs.private_tool",
    "DPVotingMiddleware": "langchain_dpicl.agents.middleware",
    "PrivateTool": "langchain_dpicl.runs.private_tool",
    "SPENT": "langchain_dpicl.runs.private_tool",
    "budget_metadata": "langchain_dpicl.runs.private_tool",
    "thread_tenant": "langchain_dpicl.runs.private_tool",
}

if not TYPE_CHECKING:
    _load, __dir__ = on_first_use(__name__, _HOME)

    def __getattr__(name: str) -> Any:
        try:
            return _load(name)
        except ModuleNotFoundError as error:
            if str(error.name).partition(".")[0] != "langchain":
                raise
        from langchain_dpicl.exceptions import ConfigurationError

        raise ConfigurationError("agents: expected the package langchain, found none. Install langchain-dpicl[agents].")


__all__ = ["CAPPED", "SPENT", "DPVotingMiddleware", "PrivateTool", "budget_metadata", "thread_tenant"]
