"""Shared set-up: no test reaches the network; the data folder beside the repository is optional."""

from __future__ import annotations

import functools
import gc
import ssl
import sys
from pathlib import Path

import pytest
from pytest_socket import disable_socket, enable_socket

SHARED = Path(__file__).resolve().parents[2] / "shared"


def pytest_configure() -> None:
    """Lets clients share their certificates, which each of them would read again."""
    ssl.create_default_context = functools.cache(ssl.create_default_context)


def pytest_collection() -> None:
    """Spares the collector the rounds over what imports leave, which stays anyway."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Takes what imports left out of the collector's rounds from here on: many tests ask for one."""
    gc.collect()
    gc.freeze()
    gc.enable()


UNTRACED = {"test_aggregation", "test_ledger_format", "test_logit_sums", "test_plans_and_pools"}


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks the tests of tests: what plants a bug has to turn red, which `make planted` shows."""
    if "plant" in item.nodeid.split("::", 1)[-1].split("[")[0].lower():
        item.add_marker("planted")


@pytest.hookimpl(trylast=True)  # the mark is set by then
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Takes the longest properties out of the tracing: hundreds of examples pass where one is enough to count."""
    for item in items:
        if item.get_closest_marker("hypothesis") and item.path.stem in UNTRACED:
            item.add_marker("no_cover")


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
    then: the loop stops reading file numbers that belong to another test's connections, which then wait for ever.
    """
    for module, name in ASYNC_CLIENTS:
        client = getattr(sys.modules.get(module), name, None)
        if client is not None and "__del__" in vars(client):
            del client.__del__


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of reference numbers and benchmark data, where a checkout has one."""
    if not SHARED.is_dir():
        pytest.skip("no shared folder beside this checkout")
    return SHARED
