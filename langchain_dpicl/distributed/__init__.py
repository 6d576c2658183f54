"""Independent jobs on other processes or machines: executors, workers, Ray. Private records travel only inside jobs."""

from typing import TYPE_CHECKING

from langchain_dpicl._lazy import on_first_use

if TYPE_CHECKING:
    from langchain_dpicl.distributed.executor import Workplace
    from langchain_dpicl.distributed.ray import RayExecutor

_HOME = {
    "RayExecutor": "langchain_dpicl.distributed.ray",
    "Workplace": "langchain_dpicl.distributed.executor",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = on_first_use(__name__, _HOME)

__all__ = [
    "RayExecutor",
    "Workplace",
]
