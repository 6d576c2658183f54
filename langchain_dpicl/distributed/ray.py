"""Runs workers on a Ray cluster, on this machine or on many."""

# What Ray carries, stores and shows (arguments, answers, names, logs) is public: orders, jobs and released results. Ray
# never repeats a job by itself: what burns a ticket runs once for it.

from __future__ import annotations

import atexit
import importlib
import json
import math
import os
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any, Literal, Self

from langchain_dpicl.distributed.executor import START_SECONDS, Executor, Job, JobResult, Worker, WorkerFactory
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.options import LocalExecutor
from langchain_dpicl.privacy._validate import check_int, check_real, fail

WORKPLACE = "DPICL_WORKPLACE"
"""Environment variable that `executor="ray"` takes the function from, as "module:function"."""

WORKERS = "DPICL_WORKERS"
"""Environment variable that `executor="ray"` takes the number of workers from."""

_SECRET = re.compile(r"://[^/@]*:[^/@]*@|(ssl)?password\s*=", re.IGNORECASE)
_SECRET_NAME = re.compile(
    r"pass(wd|word|phrase)|(?<![a-z])pass(?![a-z])|secret|token(?!iz)|api[_-]?key|credential|authorization",
    re.IGNORECASE,
)

STORE_BYTES = 80 * 2**20
"""Memory that a cluster started here sets aside for objects; orders and answers are small."""


class RayExecutor(Executor):
    """Runs independent jobs of a component in worker processes of a Ray cluster (extra `ray`).

    Each worker makes its own `Workplace` by a function of yours: it reads the records where it runs, loads the model on
    its own device or connects to a server with its own keys, and opens the ledger. Nothing private goes through Ray.

    Formal guarantees:
      - Arguments, answers, names and errors that Ray sees are public; no record and no key is among them.
      - A job runs once for the ticket that it burns: Ray repeats nothing. A worker that is killed loses the tickets
        that it had burnt and not committed, and nothing else; its job is handed out again if a ticket is left for it.
      - A cluster that is started here answers to this process and its workers alone, who share a token; it has no
        dashboard, forwards no logs and sends no usage statistics.

    Args:
      workplace: "module:function" that returns a `Workplace`; every worker has to be able to import the module.
      options: keyword arguments of the function: public JSON values, such as paths. Passwords and keys belong into the
        workers' environment; an address with a password, and text under a name such as `api_key`, are refused.
      address: "auto" or "host:port" of a cluster that this machine is part of; None: `RAY_ADDRESS` if it is set,
        otherwise a cluster of its own on this machine, as with "local". Where Ray is connected already, that
        connection is used. Ray's client (ray://) is refused: start Ray on this machine, with the cluster's address.
      num_workers: workers at a time.
      num_cpus: logical CPUs that Ray sets aside for a worker.
      num_gpus: GPUs of a worker; Ray shows each worker its own.
      resources: further resources of a worker, as Ray names them.
      start_timeout: seconds to wait for the first worker, model and records included, before a run stops.

    Raises:
      ConfigurationError: an argument is out of range, or Ray is not installed.

    Example:
      >>> RayExecutor("my_app.workers:workplace", num_workers=4)
      RayExecutor('my_app.workers:workplace', num_workers=4)
    """

    def __init__(
        self,
        workplace: str,
        *,
        options: Mapping[str, Any] | None = None,
        address: str | None = None,
        num_workers: int = 2,
        num_cpus: float = 1.0,
        num_gpus: float = 0.0,
        resources: Mapping[str, float] | None = None,
        start_timeout: float = START_SECONDS,
    ) -> None:
        super().__init__(start_timeout=start_timeout)
        if not isinstance(workplace, str) or not all(workplace.partition(":")[::2]):
            found = workplace if isinstance(workplace, str) else type(workplace).__name__
            raise fail("workplace", "'module:function' that returns a Workplace", found)
        if address is not None and (not isinstance(address, str) or not address):
            raise fail("address", "the address of a Ray cluster, 'auto', or None", type(address).__name__)
        self._setup = WorkerFactory(workplace, _plain(options))
        self._address = address
        self.num_workers = check_int("num_workers", num_workers, low=1)
        self._needs: dict[str, Any] = {
            "num_cpus": check_real("num_cpus", num_cpus, low=0.0),
            "num_gpus": check_real("num_gpus", num_gpus, low=0.0),
            "resources": dict(resources or {}),
        }
        self._check_target()
        self._ray: ModuleType = _import_ray(starts_its_own=self._target() is None)
        self._own_node = ""

    @classmethod
    def from_environment(cls) -> Self:
        """Returns the executor that `executor="ray"` means: `DPICL_WORKPLACE`, `DPICL_WORKERS` and `RAY_ADDRESS`.

        Raises:
          ConfigurationError: `DPICL_WORKPLACE` is not set, or a value is out of range.
        """
        workplace, number = os.environ.get(WORKPLACE), os.environ.get(WORKERS, "2")
        if not workplace:
            advice = f"Set {WORKPLACE}=module:function, or pass RayExecutor('module:function', ...)."
            raise fail("executor='ray'", f"the function of the workers in {WORKPLACE}", None, advice)
        if not number.isdecimal():
            raise fail(WORKERS, "an integer >= 1", number)
        return cls(workplace, num_workers=int(number))

    @property
    def is_one_host(self) -> bool:
        """Whether all workers are on this machine for sure: in a cluster that is started here."""
        if self._ray.is_initialized():
            return self._is_connected_to_own()
        return self._target() is None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the workers, and the cluster if it was started here; see `Executor.close`."""
        super().close()
        if self._own_node:
            is_own = self._is_connected_to_own()
            self._own_node = ""
            atexit.unregister(self.close)
            if is_own:
                self._ray.shutdown()

    def _is_connected_to_own(self) -> bool:
        """Whether Ray is connected to the cluster that was started here: it may have been connected anew since."""
        if not self._own_node or not self._ray.is_initialized():
            return False
        return bool(self._ray.get_runtime_context().get_node_id() == self._own_node)

    def _target(self) -> str | None:
        """Returns the address of somebody's cluster; None: one of its own."""
        address = self._address or os.environ.get("RAY_ADDRESS") or None
        return None if address == "local" else address

    def _check_target(self) -> None:
        if (self._target() or "").startswith("ray://"):
            advice = "Run `ray start --address=HOST:PORT` on this machine and pass 'auto', or submit this as a Ray job."
            raise fail("address", "'auto' or 'host:port' of a cluster that this machine is part of", "ray://", advice)

    def _connect(self) -> None:
        if self._ray.is_initialized():
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if self._target() is not None:
            self._init(address=self._target(), **quiet)
            return
        _check_closed(self._ray)
        cpus = max(1, math.ceil(self.num_workers * self._needs["num_cpus"]))
        resources = {name: self.num_workers * one for name, one in self._needs["resources"].items()}
        self._init(
            address="local",
            include_dashboard=False,
            num_cpus=cpus,
            object_store_memory=STORE_BYTES,
            resources=resources,
            **quiet,
        )
        self._own_node = self._ray.get_runtime_context().get_node_id()
        self._check_gpus()
        atexit.register(self.close)

    def _check_gpus(self) -> None:
        """Ends a cluster that was started here and that no worker would ever find its GPUs in.

        Raises:
          ConfigurationError: this machine has too few.
        """
        needed, available = self._needs["num_gpus"], 0.0
        if needed:
            available = float(self._ray.cluster_resources().get("GPU", 0.0))
        if needed > available:
            self.close()
            advice = "Ray counts those that it sees, by CUDA_VISIBLE_DEVICES where it is set."
            raise fail("num_gpus", f"at most the {available:g} GPUs of this machine", needed, advice)

    def _init(self, **options: Any) -> None:
        """Connects Ray; of what it raises only the class is named, as its text names hosts and files."""
        try:
            self._ray.init(**options)
        except Exception as error:  # noqa: BLE001  whatever Ray raises
            kind = type(error).__name__
        else:
            return
        where = "one that starts here" if options["address"] == "local" else "one at the address given"
        raise ConfigurationError(f"executor: expected a Ray cluster, {where}, found none ({kind}). Try `ray status`.")

    # -- what `Executor` asks for ------------------------------------------------------------------------------------

    def _hire(self) -> Any:
        self._connect()
        is_one_host = self.is_one_host  # of the cluster that the worker is started in, however it was connected
        # Ray would start an actor again, or repeat what it was at: a second run on the first one's ticket.
        once = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": 1}
        actor = self._ray.remote(Worker).options(**once, **self._needs)
        return actor.remote(self._setup, is_one_host=is_one_host)

    def _dismiss(self, handle: Any) -> None:
        if self._ray.is_initialized():
            self._ray.kill(handle, no_restart=True)

    def _begin(self, handle: Any, work: Job) -> Any:
        return handle.begin.remote(work)

    def _do(self, handle: Any, key: str, job: Any) -> Any:
        return handle.do.remote(key, job)

    def _ready(self, awaited: Sequence[Any], seconds: float) -> Sequence[Any]:
        ready, _ = self._ray.wait(list(awaited), num_returns=1, timeout=seconds)
        if ready and len(awaited) > 1:  # all that are there by now, in one look
            ready, _ = self._ray.wait(list(awaited), num_returns=len(awaited), timeout=0)
        return list(ready)

    def _answer(self, awaited: Any) -> JobResult | None:
        try:
            answer = self._ray.get(awaited)
        except self._ray.exceptions.RayError:
            return None  # the worker, its host or its memory is gone
        return answer if isinstance(answer, JobResult) else None

    def __repr__(self) -> str:
        return f"RayExecutor({self._setup.name!r}, num_workers={self.num_workers})"


def as_executor(executor: Any) -> Executor | LocalExecutor | None:
    """Returns an executor as it is, the one of the environment for "ray", and None for None.

    Args:
      executor: a `RayExecutor`, "ray", a `LocalExecutor` or None; the last two mean this process.

    Raises:
      ConfigurationError: it is something else, or Ray is not installed.
    """
    if executor is None or isinstance(executor, Executor | LocalExecutor):
        return executor
    if executor == "ray":
        return RayExecutor.from_environment()
    shown = executor if isinstance(executor, str) else type(executor).__name__
    raise fail("executor", "'ray', a RayExecutor, a LocalExecutor or None", shown)


def _plain(options: Any) -> dict[str, Any]:
    """Returns keyword arguments that are JSON values: no live object is pickled on its way to a worker."""
    plain, text = None, ""
    if options is None or isinstance(options, Mapping):
        try:
            text = json.dumps(dict(options or {}), allow_nan=False)
            plain = json.loads(text)
        except (TypeError, ValueError):
            plain = None
    if plain is None:
        advice = "Name files and models; each worker opens its own."
        raise fail("options", "a mapping of JSON values", type(options).__name__, advice)
    if _SECRET.search(text) or _has_secret(plain):
        advice = "Ray shows arguments. Take PGPASSWORD, a password file, or a variable of the workers' environment."
        raise fail("options", "no password and no key", "one (not shown)", advice)
    return dict(plain)


def _has_secret(value: Any, name: str = "") -> bool:
    """Whether text stands under a name that keys have, at any depth; `max_tokens=60` is none."""
    if isinstance(value, dict):
        return any(_has_secret(one, f"{name} {key}") for key, one in value.items())
    if isinstance(value, list):
        return any(_has_secret(one, name) for one in value)
    return isinstance(value, str) and bool(value) and bool(_SECRET_NAME.search(name))


def _import_ray(*, starts_its_own: bool) -> ModuleType:
    """Imports Ray; a cluster that it will start answers to those alone who have a token of this process."""
    if starts_its_own and "ray" not in sys.modules:  # which reads it as it is imported
        # Ray's ports are open to the network, and who may use them may run code as we do.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    ray: ModuleType | None = None
    with suppress(ImportError):
        ray = importlib.import_module("ray")
    if ray is None:
        raise ConfigurationError("executor: expected Ray, found none. Install it: pip install 'langchain-dpicl[ray]'.")
    if starts_its_own and not ray.is_initialized():
        _check_closed(ray)
    return ray


def _check_closed(ray: Any) -> None:
    """Refuses to start a cluster that everybody who reaches its ports may use. Ray reads this once, as it is imported.

    Raises:
      ConfigurationError: Ray asks for no token.
    """
    raylet = getattr(ray, "_raylet", None)
    mode = getattr(raylet, "get_authentication_mode", None)
    if mode is None or mode() != raylet.AuthenticationMode.TOKEN:  # type: ignore[union-attr]
        raise ConfigurationError(
            "executor: expected Ray to ask for a token, found that it was imported, or set up, without: a cluster of "
            "its own could not be closed to the network. Make the first RayExecutor before Ray is imported, set "
            "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN before the process starts, or connect Ray yourself."
        )


ExecutorLike = Executor | LocalExecutor | Literal["ray"] | None

__all__ = ["ExecutorLike", "RayExecutor", "as_executor"]
