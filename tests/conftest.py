"""Shared set-up: no test reaches the network; the data folder beside the repository is optional."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import logging
import os
import pkgutil
import ssl
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.logging import catching_logs
from hypothesis import HealthCheck, settings
from pytest_socket import disable_socket, enable_socket

from langchain_dpicl.backends import allow_wrappers
from langchain_dpicl.backends.private_calls import call, method_checks
from tests import ledgers
from tests.check_audit import CONTROL
from tests.hang_guard import HangGuard
from tests.ordering import shuffled
from tests.traced import is_traced

# It keeps the class of sockets that it finds when it is imported: in a test that closes sockets, that of closed ones.
with contextlib.suppress(ImportError):  # Windows
    importlib.import_module("uvloop")

# Ray lets its workers run only when nothing else wants the processor, and starts some that nobody asked for: on a busy
# machine a test of a cluster took minutes of waiting.
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("RAY_enable_worker_prestart", "0")

# For each word of a parser argparse looks through the disk for a translation, in every language but this one.
os.environ.setdefault("LANGUAGE", "C")

# All threads of an engine start at once, and nearly every test has engines of its own: fewer of them, for few rows.
DEFAULT_CONCURRENCY, call.DEFAULT_CONCURRENCY = call.DEFAULT_CONCURRENCY, 8

SHARED = Path(__file__).resolve().parents[2] / "shared"

# A busy machine is slow: Hypothesis neither times examples nor how they are made, which it takes for a fault of the test.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
if settings.get_current_profile_name() == "default":  # another one was asked for where changes of the source are tested
    settings.load_profile("suite")


def pytest_configure(config: pytest.Config) -> None:
    """Lets clients share their certificates, which each of them would read again; keeps workers from telling trifles."""
    ssl.create_default_context = functools.cache(ssl.create_default_context)
    if not getattr(config.option, "xmlpath", None):  # which is written from all of them
        for worker in config.pluginmanager.get_plugins():
            if type(worker).__name__ == "WorkerInteractor":
                worker.sendevent = functools.partial(tell, worker.sendevent)


def tell(send: Any, name: str, **event: Any) -> None:
    """Sends what is shown: not that a test starts, that its fixtures came and went, with nothing to say and in no time.

    Half of what xdist's workers send, and the process in between takes as long over each as a small test takes.
    """
    report = event.get("data", {}) if name == "testreport" else {}
    is_dull = report.get("outcome") == "passed" and report["when"] != "call" and not report["sections"]
    if name != "logstart" and not (is_dull and report["duration"] < 0.1):
        send(name, **event)


def pytest_collection(session: pytest.Session) -> None:
    """Spares the collector the rounds over what imports leave, which stays anyway; and coverage all but the vault."""
    gc.disable()
    pause_tracing(session.config)
    begin_elsewhere(session.config)


FAR = ("torch", "transformers.generation", "peft", "opacus", "scipy.stats", "matplotlib.pyplot")
"""What takes longest to compile of all that tests import late."""


def begin_elsewhere(config: pytest.Config) -> None:
    """Lets every other worker import what is far in a whole run: side by side all would compile the same, each for itself.

    A fresh environment is not compiled. What one worker did the others find.
    """
    number = getattr(config, "workerinput", {}).get("workerid", "gw0").removeprefix("gw")
    if int(number) % 2 and [Path(one).name for one in config.args] == config.getini("testpaths"):
        for name in FAR:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def pytest_collection_finish() -> None:
    gc.freeze()  # what imports leave is not looked through: hardly any of it could go
    gc.set_threshold(50_000, 20)  # tests make much that goes by itself, and few cycles
    gc.enable()
    catch_at_the_root()


def catch_at_the_root() -> None:
    """Has pytest catch what is logged at the root alone: for each test it looks through all loggers six times over.

    There are hundreds, and it looks for those that do not propagate: torch's are made to, no test asks for others.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.partition(".")[0] == "torch":
            logger.propagate = True

    def enter(caught: catching_logs[Any]) -> logging.Handler:
        logging.root.addHandler(caught.handler)
        caught.attached_loggers.append(logging.root)
        if caught.level is not None:
            caught.handler.setLevel(caught.level)
            caught.orig_level = logging.root.level
            logging.root.setLevel(min(caught.orig_level, caught.level))
        return caught.handler

    catching_logs.__enter__ = enter


def leave_aside() -> None:
    """Takes all that is alive out of the collector's rounds: many tests ask for one, and so does the package.

    With caches and leftovers of thousands of tests a round takes two seconds. Nothing that a test makes is aside before
    its module is done, and what is aside still goes with the last reference to it.
    """
    gc.collect()
    gc.freeze()


VAULT = Path(__file__).parent / "unit_tests" / "privacy"
STATISTICAL = Path(__file__).parent / "statistical_tests"
TRACERS = pytest.StashKey[tuple[Any, Any]]()
"""What coverage traces this thread and new ones with, while it is paused."""


def pause_tracing(config: pytest.Config) -> None:
    """Stops what coverage traces, once the vault's modules are imported: tracing all imports and tests is slow."""
    coverage = sys.modules.get("coverage")
    if coverage is None or coverage.Coverage.current() is None or sys.gettrace() is None:
        return
    import langchain_dpicl.privacy as vault

    for module in pkgutil.walk_packages(vault.__path__, f"{vault.__name__}."):
        importlib.import_module(module.name)
    config.stash[TRACERS] = (sys.gettrace(), threading.gettrace())
    trace(None, None)


def trace(here: Any, elsewhere: Any) -> None:
    sys.settrace(here)
    threading.settrace(elsewhere)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--order-seed", type=int, help="run tests in the random order of this seed (make steady)")


def pytest_report_header(config: pytest.Config) -> str | None:
    seed = config.getoption("order_seed")
    return None if seed is None else f"random order of seed {seed}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffles where a seed is given. Puts traced tests first: what others leave in caches would not be covered."""
    if (seed := config.getoption("order_seed")) is not None:
        items[:] = shuffled(items, seed)
    if TRACERS in config.stash:
        items.sort(key=lambda item: item.get_closest_marker("traced") is None)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Traces the tests that the coverage is taken of, and no others; tidies up behind the last one of a module."""
    is_traced_now = TRACERS in item.config.stash and item.get_closest_marker("traced") is not None
    if is_traced_now:
        trace(*item.config.stash[TRACERS])
    try:
        return (yield)
    finally:
        if is_traced_now:
            trace(None, None)
        if nextitem is not None and nextitem.path != item.path:
            leave_aside()


GUARD = HangGuard()


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """Watches tests from one thread, in place of one for each; leaves the other methods to pytest-timeout."""
    if settings.method != "thread":
        return None
    GUARD.watch(item, settings)
    return True


def pytest_timeout_cancel_timer() -> None:
    GUARD.leave()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks the tests of tests, which have to turn red (`make planted`), and those that the coverage is taken of."""
    name = item.nodeid.split("::", 1)[-1].split("[")[0]
    is_control = item.path.parent == STATISTICAL and CONTROL.search(name)
    if "plant" in name.lower() or is_control:
        item.add_marker("planted")
    if VAULT in item.path.parents and is_traced(item.nodeid.split("::", 1)[-1]):
        item.add_marker("traced")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Closes sockets; asyncio's own pair stays, and `loopback` tests may reach this machine only."""
    if item.get_closest_marker("loopback"):
        enable_socket()
        from pytest_socket import socket_allow_hosts

        leave_dropped_clients_alone()
        socket_allow_hosts(["127.0.0.1", "::1", "localhost"], allow_unix_socket=True)
    else:
        disable_socket(allow_unix_socket=True)


ASYNC_CLIENTS = (
    ("openai._base_client", "AsyncHttpxClientWrapper"),
    ("langchain_openai.chat_models._client_utils", "_AsyncHttpxClientWrapper"),
    ("anthropic._base_client", "AsyncHttpxClientWrapper"),
    ("langchain_anthropic._client_utils", "_AsyncHttpxClientWrapper"),
)


def leave_dropped_clients_alone() -> None:
    """Lets the collector close the sockets of dropped clients, and nobody else.

    An SDK's client that is collected asks the running loop to close its connections later. Their sockets are closed by
    then: the loop stops reading file numbers that belong to another test's connections, which then wait without end.
    """
    for module, name in ASYNC_CLIENTS:
        client = getattr(sys.modules.get(module), name, None)
        if client is not None and "__del__" in vars(client):
            del client.__del__


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Lets each test begin as a process that has bound no examples yet: names of data sets repeat between tests.

    No test writes to the stores of budgets that another one dropped, whose disks and servers are gone. What a test names
    for its process is forgotten after it. One fixture, as each costs every test a tenth of a millisecond.
    """
    bound = sys.modules.get("langchain_dpicl.privacy.private_examples")
    if bound is not None:
        bound._BOUND.clear()
    ledger = sys.modules.get("langchain_dpicl.privacy.extensions.durable_writer")
    if ledger is not None:
        ledger._DROPPED.clear()
    named = method_checks._named
    yield
    method_checks._named = named


@pytest.fixture
def own_hooks(nothing_left: None, request: pytest.FixtureRequest) -> None:
    """Lets a test watch models by hooks of its own, and by those of the doubles."""
    del nothing_left
    allow_wrappers(request.module.__name__, "tests.unit_tests.backends.hf_doubles")


@pytest.fixture
def remembered_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the accountants' own numbers, once per event and process."""
    monkeypatch.setattr(ledgers.accounting, "epsilon_bound", ledgers.remembered_price)


@pytest.fixture
def free_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asks no accountant: what events cost in all takes seconds, and is of no interest to many tests."""
    monkeypatch.setattr(ledgers.accounting, "epsilon_bound", ledgers.free_price)


@pytest.fixture
def simple_prices(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, float, str]]:
    """Prices that a person can add up; what was priced: (event, delta, adjacency)."""
    return ledgers.use_simple_prices(monkeypatch)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny models take longer on several threads, and much longer where other workers have them."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def default_concurrency() -> int:
    """How many calls the package has in flight at once by default."""
    return DEFAULT_CONCURRENCY


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of reference numbers and benchmark data, where a checkout has one."""
    if not SHARED.is_dir():
        pytest.skip("no shared folder beside this checkout")
    return SHARED
