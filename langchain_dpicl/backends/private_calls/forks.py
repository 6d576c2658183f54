"""Gives a forked process HTTP connections of its own: the answers on those of its parent are not for it."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import ssl
import weakref
from typing import Any

from langchain_dpicl._opaque import PerProcess, is_forked

# What calls of models went through in this process, pools of httpcore and connections of `http.client`: nothing in
# these is shared. Others may hold what is: an application may call, here and in a forked process, without code of ours.
# A fork that runs no hooks of Python shares these too, for calls of the application: ours leave them.
_POOLS: PerProcess[weakref.WeakSet[Any]] = PerProcess(weakref.WeakSet)
_CONNECTIONS: PerProcess[weakref.WeakSet[Any]] = PerProcess(weakref.WeakSet)
_GIVEN: weakref.WeakSet[Any] = weakref.WeakSet()
"""Of these connections, those that were given their socket, and keep it in the process that was not forked."""
_kept: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
"""What was left of pools that are awaited: as long as these are there, as another process may use it."""

# Nothing is sent where a connection is left, neither an end of TLS nor a shutdown: the parent goes on with its copy.


def own_pool(pool: Any) -> None:
    """Makes a pool of httpcore leave what others opened, before the first call of ours goes through it."""
    known = _POOLS.here
    if pool not in known:
        with pool._optional_thread_lock:  # noqa: SLF001  no public way
            if pool not in known:
                _leave_all(pool)
                known.add(pool)


def own_connection(connection: Any) -> None:
    """Makes a connection of `http.client` leave what others opened, before the first request of ours opens it anew."""
    known = _CONNECTIONS.here
    if connection not in known:
        known.add(connection)
        if connection.sock is not None:
            is_given = not _opens_it_again(connection)
            if is_given and not is_forked():
                _GIVEN.add(connection)
            else:
                _leave(connection, is_given=is_given)


def record_opening(connection: Any) -> None:
    """Records that this process opens a connection of `http.client`."""
    _CONNECTIONS.here.add(connection)


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
        _kept.setdefault(pool, []).extend(pool._connections)  # noqa: SLF001
    pool._connections.clear()  # noqa: SLF001


def _leave(connection: Any, *, is_given: bool) -> None:
    plain = connection.sock
    if plain is None:
        return
    if is_given:
        connection.auto_open = 0  # its calls fail: elsewhere is not where they are meant to go
    # Not by its `close`, which waits where another thread reads the reply: here no thread of the parent ends that.
    connection.sock = None
    plain.close()


def _opens_it_again(connection: Any) -> bool:
    """Whether the `connect` of a connection leads where its socket does: one that it was given may lead elsewhere."""
    opens = next(kind for kind in type(connection).__mro__ if "connect" in vars(kind))
    if "connect" in vars(connection) or opens.__module__ != http.client.__name__:
        return True
    plain = connection.sock
    trusts = plain.context if isinstance(plain, ssl.SSLSocket) else None
    with contextlib.suppress(OSError, AttributeError):  # nobody is at the other end; not a socket
        named = socket.getaddrinfo(connection.host, connection.port, plain.family, socket.SOCK_STREAM)
        is_there = plain.getpeername()[:2] in {where[:2] for *_, where in named}
        return is_there and trusts is getattr(connection, "_context", None)
    return False


def _forget_in_forked_process() -> None:
    for pools in list(_POOLS._made.values()):  # noqa: SLF001  those of the ancestors
        for pool in list(pools):
            forget(pool)
    for connections in list(_CONNECTIONS._made.values()):  # noqa: SLF001
        for connection in list(connections):
            _leave(connection, is_given=connection in _GIVEN)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_forked_process)
