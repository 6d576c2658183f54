"""Limits the HTTP exchanges of silent calls: no redirects, limited time and size, no connection by unknown clients."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import importlib
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, TypeAlias

from langchain_dpicl.backends._bodies import Body
from langchain_dpicl.backends._http_client import connect_http, put_request, reply_http, reply_http2, send_http
from langchain_dpicl.backends._passage import (
    Passage,
    RefusedReplyError,
    at_most,
    inside,
    is_inside,
    passage_of,
    waiting,
)
from langchain_dpicl.backends._quiet import Call, Hook
from langchain_dpicl.exceptions import UnsilencableModelError

# The limits are set where Python's HTTP clients send one request: in httpx and httpx2, in the streams of httpcore and
# the TLS sockets below them, in `http.client` (used by requests, urllib3 and botocore; see `_http_client`), in cookie
# jars, and in `socket.connect`. These methods are guarded for the whole process, but a guard acts only inside a silent
# call. So no client, transport, proxy or certificate of the user is replaced, and clients that a model creates during a
# call are limited too. A connection opened during a silent call by anything else is refused, as nothing would limit it.
Inner: TypeAlias = Callable[..., Any]

_UNLIMITED = (
    "and not through httpx, requests or http.client: redirects, time and size of its replies cannot be limited; take a "
    "model class whose client uses one of these, such as ChatOpenAI with the base_url= of an OpenAI-compatible server"
)
_OTHER_TRANSPORTS = frozenset(
    {"aiohttp", "curl_cffi", "grpc", "primp", "pycurl", "pyreqwest", "websocket", "websockets"}
)
"""Packages that connect without one of the clients above; some do so in compiled code, where no guard sees it."""

_DEPTH = 6


# httpx and httpx2. One request, below redirects, authentication and event hooks, above the transport.


def _send(inner: Inner, passage: Passage, client: Any, request: Any) -> Any:
    _prepare(passage, client, request)
    with inside(passage):
        try:
            response = inner(client, request)
            with contextlib.closing(response.stream):
                body = _opened(passage, response)
                for chunk in response.stream:
                    passage.add(body, chunk)
        except Exception:
            passage.left()  # the time was up: then that is why it failed
            raise
    return _with_content(response, body)


async def _asend(inner: Inner, passage: Passage, client: Any, request: Any) -> Any:
    _prepare(passage, client, request)
    with inside(passage):
        async with _timed(passage):
            response = await inner(client, request)
            async with contextlib.aclosing(response.stream):
                body = _opened(passage, response)
                async for chunk in response.stream:
                    passage.add(body, chunk)
    return _with_content(response, body)


@contextlib.asynccontextmanager
async def _timed(passage: Passage) -> AsyncIterator[None]:
    """Cancels the awaited exchange when its time is up."""
    try:
        async with asyncio.timeout(passage.left()) as limit:
            yield
    except Exception:
        if limit.expired():
            raise passage.late() from None
        passage.left()
        raise


def _prepare(passage: Passage, client: Any, request: Any) -> None:
    """Records where a request goes, and caps each single wait at the remaining time."""
    remaining = passage.left()
    waits = request.extensions.get("timeout") or {}
    waits = {name: waits.get(name) for name in ("connect", "read", "write", "pool")}
    capped = {name: remaining if wait is None else min(wait, remaining) for name, wait in waits.items()}
    request.extensions = {**request.extensions, "timeout": capped}
    passage.hosts[request.url.netloc.decode("ascii", "replace")] = None
    with contextlib.suppress(Exception):  # transports that users write have no pool
        pool = vars(client._transport_for_url(request.url))["_pool"]  # noqa: SLF001  no public way
        proxy = vars(pool)["_proxy_url"]
        passage.hosts[f"{proxy.host.decode()}:{proxy.port or ''}".rstrip(":")] = None


def _opened(passage: Passage, response: Any) -> Body:
    passage.check_status(response.status_code, response.headers.get("location"), str(response.request.url))
    return passage.body(response.headers.get("content-encoding"))


def _with_content(response: Any, body: Body) -> Any:
    """Replaces the network stream of a response by its decoded body."""
    for name in ("content-encoding", "content-length", "transfer-encoding"):
        response.headers.pop(name, None)
    package = next(base for base in type(response).__mro__ if base.__name__ == "Response").__module__
    response.stream = sys.modules[package.partition(".")[0]].ByteStream(body.content())
    return response


# httpcore and httpcore2: waits of blocking clients. A wait is limited each time, as any number of them follow.


def _stream_read(inner: Inner, passage: Passage, stream: Any, max_bytes: int, timeout: float | None = None) -> Any:
    with _as_timeout(_errors(stream).ReadTimeout):
        return inner(stream, max_bytes, at_most(timeout, passage.left()))


@contextlib.contextmanager
def _as_timeout(kind: type[Exception]) -> Iterator[None]:
    """Raises httpcore's own timeout error when the time is up.

    HTTP/2 passes that error to the other rows on the connection, which then retry on another one. A refusal would
    end them.
    """
    try:
        yield
    except RefusedReplyError as error:
        raise kind(str(error)) from None


def _errors(stream: Any) -> Any:
    return sys.modules[type(stream).__module__.partition(".")[0]]


def _stream_write(inner: Inner, passage: Passage, stream: Any, buffer: bytes, timeout: float | None = None) -> Any:
    errors = _errors(stream)
    with _as_timeout(errors.WriteTimeout):
        remaining = at_most(timeout, passage.left())
    if stream.get_extra_info("ssl_object") is not None:
        return inner(stream, buffer, remaining)  # one wait for all of it
    try:
        plain = stream.get_extra_info("socket")  # here `inner` would wait anew for every part that the peer takes
        plain.settimeout(remaining)
        return plain.sendall(buffer)
    except TimeoutError as error:
        raise errors.WriteTimeout(str(error)) from error
    except OSError as error:
        raise errors.WriteError(str(error)) from error


# A connection of httpcore on which more came than one reply is not used again: the next row would read the rest.


def _reply_closed(inner: Inner, passage: Passage, connection: Any) -> Any:  # noqa: ARG001
    if not connection._h11_state.trailing_data[0]:  # noqa: SLF001  no public way
        return inner(connection)
    return connection.aclose() if hasattr(connection, "aclose") else connection.close()


# TLS of blocking clients: the handshake, and records that come in parts.


def _wait_tls(inner: Inner, passage: Passage, plain: Any, *args: Any, **options: Any) -> Any:
    with waiting(passage, plain):
        return inner(plain, *args, **options)


# Cookies. One that a private reply sets would ride along with other rows, and stay in the user's client.


def _take_cookies(inner: Inner, call: Call, *args: Any, **options: Any) -> Any:
    return None if call.withholds and passage_of(call) is not None else inner(*args, **options)


# Connections of anything else.


def _connect(inner: Inner, passage: Passage, plain: Any, address: Any) -> Any:
    if not is_inside():
        place = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "a local socket"
        passage.stray = f"connects to {place} by itself, {_UNLIMITED}"
        raise passage.refuse("a connection that is not an HTTP client's")
    with waiting(passage, plain):
        return inner(plain, address)


def refuse_other_transports(model: Any) -> None:
    """Raises UnsilencableModelError for a model that holds a client of another kind, directly or indirectly."""
    todo, seen = [(model, 0)], {id(model)}
    for thing, depth in todo:  # it grows
        tops = {base.__module__.partition(".")[0] for base in type(thing).__mro__}
        if transports := tops & _OTHER_TRANSPORTS:
            raise UnsilencableModelError(f"{type(model).__name__} calls through {min(transports)}, {_UNLIMITED}")
        if depth == _DEPTH or tops & {"httpx", "httpx2", "torch"}:
            continue
        for value in _held(thing):
            kind = type(value)
            is_plain = kind.__module__ in _PLAIN and kind not in _CONTAINERS
            if id(value) not in seen and not is_plain and not issubclass(kind, type):
                seen.add(id(value))
                todo.append((value, depth + 1))


def _held(thing: Any) -> Iterator[Any]:
    """Yields the attribute values of an object without calling its own `__getattr__`."""
    if type(thing) in _CONTAINERS:
        yield from tuple(thing.values() if type(thing) is dict else thing)
        return
    for name in ("__dict__", "__pydantic_private__", "__pydantic_extra__"):
        with contextlib.suppress(AttributeError):
            yield from tuple((object.__getattribute__(thing, name) or {}).values())


_CONTAINERS = (list, tuple, dict)
_PLAIN = frozenset({"builtins", "collections", "datetime", "functools", "typing"})
_STREAMS = ("SyncStream", "TLSinTLSStream")
_hooks: dict[str, tuple[Hook, ...]] = {}


def look_after_door() -> bool:
    """Sets missing guards on imported clients; returns whether a client was new."""
    is_new = _find_clients()
    for hooks in tuple(_hooks.values()):
        for hook in hooks:
            hook.look_after()
    return is_new


def _find_clients() -> bool:
    """Finds the methods of clients imported since the last call; refuses versions whose methods are unknown."""
    is_new = False
    for name, hooks_of in _MODULES.items():
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if spec is not None and name not in _hooks and not getattr(spec, "_initializing", False):
            is_new = True
            try:
                _hooks[name] = tuple(hooks_of(sys.modules[name]))
            except (AttributeError, ImportError):
                raise UnsilencableModelError(
                    f"expected a version of {name} whose requests can be limited in time, size and redirects, found "
                    f"{getattr(sys.modules[name], '__version__', 'another one')}; install one that this version of "
                    "langchain-dpicl was tested with"
                ) from None
    return is_new


def _hook(owner: type, name: str, act: Callable[..., Any], arguments: int) -> Hook:
    """Returns the guard of a method; it is tested by a call with `arguments` times None, which only the guard sees."""
    getattr(owner, name)

    def attempt() -> None:
        result = getattr(owner, name)(*[None] * arguments)
        if asyncio.iscoroutine(result):
            result.close()

    return Hook(owner, name, act, attempt)


def _limited_hook(owner: type, name: str, act: Callable[..., Any], arguments: int) -> Hook:
    """Returns a guard that acts only while limits apply; `act` takes the limits in the place of the mark."""

    def act_in_limits(inner: Inner, call: Call, *args: Any, **options: Any) -> Any:
        passage = passage_of(call)
        return inner(*args, **options) if passage is None else act(inner, passage, *args, **options)

    return _hook(owner, name, act_in_limits, arguments)


def _of_httpx(module: Any) -> Iterable[Hook]:
    importlib.import_module(module.__name__.replace("httpx", "httpcore"))  # else imported by the first request
    yield _limited_hook(module.Client, "_send_single_request", _send, 2)
    yield _limited_hook(module.AsyncClient, "_send_single_request", _asend, 2)


def _of_httpcore(module: Any) -> Iterable[Hook]:
    streams = importlib.import_module(f"{module.__name__}._backends.sync")
    for name in _STREAMS:
        yield _limited_hook(getattr(streams, name), "read", _stream_read, 2)
        yield _limited_hook(getattr(streams, name), "write", _stream_write, 2)
    for package, name in (("_sync", "HTTP11Connection"), ("_async", "AsyncHTTP11Connection")):
        connections = importlib.import_module(f"{module.__name__}.{package}.http11")
        yield _limited_hook(getattr(connections, name), "_response_closed", _reply_closed, 1)


def _of_http_client(module: Any) -> Iterable[Hook]:
    yield _limited_hook(module.HTTPConnection, "putrequest", put_request, 3)
    yield _limited_hook(module.HTTPConnection, "send", send_http, 2)
    yield _limited_hook(module.HTTPConnection, "getresponse", reply_http, 1)
    yield _limited_hook(module.HTTPConnection, "connect", connect_http, 1)
    yield _limited_hook(module.HTTPSConnection, "connect", connect_http, 1)


def _of_urllib3(module: Any) -> Iterable[Hook]:
    yield _limited_hook(module.HTTPConnection, "connect", connect_http, 1)
    yield _limited_hook(module.HTTPSConnection, "connect", connect_http, 1)


def _of_urllib3_http2(module: Any) -> Iterable[Hook]:
    yield _limited_hook(module.HTTP2Connection, "getresponse", reply_http2, 1)


def _of_socket(module: Any) -> Iterable[Hook]:
    # Sandboxes put a subclass in its place; connections still go through the class itself.
    owner = next((kind for kind in reversed(module.socket.__mro__) if kind.__module__ == "socket"), module.socket)
    yield _limited_hook(owner, "connect", _connect, 2)
    yield _limited_hook(owner, "connect_ex", _connect, 2)


def _of_ssl(module: Any) -> Iterable[Hook]:
    yield _limited_hook(module.SSLSocket, "do_handshake", _wait_tls, 1)
    yield _limited_hook(module.SSLSocket, "read", _wait_tls, 1)


def _of_cookies(module: Any) -> Iterable[Hook]:
    yield _hook(module.CookieJar, "extract_cookies", _take_cookies, 3)


_MODULES: dict[str, Callable[[Any], Iterable[Hook]]] = {
    "httpx": _of_httpx,
    "httpx2": _of_httpx,
    "httpcore": _of_httpcore,  # imported by the two above
    "httpcore2": _of_httpcore,
    http.client.__name__: _of_http_client,
    "urllib3.connection": _of_urllib3,
    "urllib3.http2.connection": _of_urllib3_http2,
    socket.__name__: _of_socket,
    "ssl": _of_ssl,
    "http.cookiejar": _of_cookies,
}

with contextlib.suppress(UnsilencableModelError):  # now, as cassettes put other classes in the place of these
    _find_clients()
