"""Gives a forked process HTTP connections of its own: the answers on those of its parent are not for it."""

from __future__ import annotations

import os
import weakref
from typing import Any

from langchain_dpicl._opaque import this_process

# What calls of models went through in this process, pools of httpcore and connections of `http.client`: nothing in
# these is an ancestor's. Others may be, where the application called before a fork.
_POOLS: weakref.WeakSet[Any] = weakref.WeakSet()
_CONNECTIONS: weakref.WeakSet[Any] = weakref.WeakSet()
_kept: list[Any] = []

# Nothing is sent where a connection is left, neither an end of TLS nor a shutdown: the parent goes on with its copy.


def own_pool(pool: Any) -> None:
    """Makes a pool of httpcore leave what an ancestor opened, before a call goes through it."""
    if pool not in _POOLS:
        with pool._optional_thread_lock:  # noqa: SLF001  no public way
            if pool not in _POOLS:
                if _is_forked():
                    _leave_all(pool)
                _POOLS.add(pool)


def own_connection(connection: Any) -> None:
    """Makes a connection of `http.client` leave what an ancestor opened, before a request is written to it.

    Raises:
      ConnectionResetError: an ancestor may have opened it; the next attempt opens another.
    """
    if connection not in _CONNECTIONS:
        _CONNECTIONS.add(connection)
        if connection.sock is not None and _is_forked():
            _leave(connection)
            raise ConnectionResetError("a process that this one was forked from may have opened the connection")


def record_opening(connection: Any) -> None:
    """Records that this process opens a connection of `http.client`."""
    _CONNECTIONS.add(connection)


def forget(pool: Any) -> None:
    """Makes a pool of httpcore as it was before its first request, where no other thread runs.

    Raises:
      AttributeError: the version of httpcore is unknown.
    """
    # A thread of the parent may have held the lock, or waited for a connection: it does not run here.
    pool._optional_thread_lock = type(pool._optional_thread_lock)()  # noqa: SLF001
    pool._requests.clear()  # noqa: SLF001
    _leave_all(pool)


def _leave_all(pool: Any) -> None:
    if hasattr(pool, "handle_async_request"):  # an end of these may reach the parent's event loop by its selector
        _kept.extend(pool._connections)  # noqa: SLF001
    pool._connections.clear()  # noqa: SLF001


def _leave(connection: Any) -> None:
    # Not by its `close`, which waits where another thread reads the reply: here no thread of the parent ends that.
    plain, connection.sock = connection.sock, None
    plain.close()


def _is_forked() -> bool:
    return this_process()[1] > 0


def _forget_in_forked_process() -> None:
    for pool in list(_POOLS):
        forget(pool)
    for connection in list(_CONNECTIONS):
        if connection.sock is not None:
            _leave(connection)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_forked_process)
