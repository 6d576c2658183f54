"""Private answers as a tool and as middleware of agents.

`DPVotingMiddleware` needs the package `langchain`, which is imported when the class is first used.
"""

from typing import TYPE_CHECKING, Any

from langchain_dpicl._lazy import on_first_use

if TYPE_CHECKING:
    from langchain_dpicl.agents.middleware import DPVotingMiddleware
    from langchain_dpicl.agents.tools import CAPPED, SPENT, budget_metadata, private_tool, thread_tenant

_HOME = {
    "CAPPED": "langchain_dpicl.agents.tools",
    "DPVotingMiddleware": "langchain_dpicl.agents.middleware",
    "SPENT": "langchain_dpicl.agents.tools",
    "budget_metadata": "langchain_dpicl.agents.tools",
    "private_tool": "langchain_dpicl.agents.tools",
    "thread_tenant": "langchain_dpicl.agents.tools",
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


__all__ = ["CAPPED", "SPENT", "DPVotingMiddleware", "budget_metadata", "private_tool", "thread_tenant"]
