"""Limits the HTTP exchanges of private calls: redirects, time, size, connections, and what is recorded."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import importlib
import io
import socket
import sys
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, Literal, Protocol, TypeAlias
from urllib.parse import urlsplit

from langchain_dpicl.backends.private_calls import forks
from langchain_dpicl.backends.private_calls.log_guard import EXCHANGE, CallMark, GuardedMethod
from langchain_dpicl.exceptions import UnsilencableModelError

_FED = 16
"""Bytes fed at once to a decoder without a limit: brotli expands them to at most 32 MiB, zstd to 512 KiB."""


class TooLargeError(Exception):
    """A body is larger than the limit."""


class UnknownEncodingError(Exception):
    """No decoder is installed for the encoding of a body."""


class _Decoder(Protocol):
    def add(self, chunk: bytes, limit: int) -> list[bytes]:
        """Returns the decoded chunk; if it exceeds `limit` bytes, little more than that of it."""


# The decoders of HTTP clients return all that a chunk holds, which may be a thousand times its size: a decompression
# bomb. Here every decoder stops soon after the limit.
class ReplyBody:
    """A reply's body, collected and decoded.

    Args:
      encoding: the reply's `Content-Encoding`; "" where it has none.
      limit: bytes that the body may have, before and after decoding.

    Raises:
      UnknownEncodingError: no decoder; stacked encodings are not decoded either.

    >>> body = ReplyBody("gzip", limit=100)
    >>> body.add(zlib.compress(b"hello", wbits=31))
    >>> body.content()
    b'hello'
    """

    def __init__(self, encoding: str, *, limit: int) -> None:
        self._decoder = _decoder(encoding.strip().lower())
        self._limit = limit
        self._received = self._size = 0
        self._parts: list[bytes] = []

    def add(self, chunk: bytes) -> None:
        """Adds the next bytes as received; raises TooLargeError beyond `limit` bytes, received or decoded."""
        self._received += len(chunk)
        if self._received > self._limit:
            raise TooLargeError
        for part in self._decoder.add(chunk, self._limit - self._size):
            self._size += len(part)
            self._parts.append(part)
        if self._size > self._limit:
            raise TooLargeError

    def content(self) -> bytes:
        """Returns the body so far, decoded."""
        return b"".join(self._parts)


class _Identity:
    def add(self, chunk: bytes, limit: int) -> list[bytes]:  # noqa: ARG002  what came is counted already
        return [chunk]


class _Zlib:
    """Decodes gzip and deflate, with or without the zlib header that some servers leave out."""

    def __init__(self, wbits: int) -> None:
        self._inner: Any = None
        self._wbits = wbits
        self._held = b""

    def add(self, chunk: bytes, limit: int) -> list[bytes]:
        if self._inner is None:
            self._held += chunk
            if len(self._held) < 2:  # the header has two bytes
                return []
            chunk, self._inner = self._held, zlib.decompressobj(self._found())
        return [self._inner.decompress(chunk, limit + 1)]

    def _found(self) -> int:
        first, second = self._held[:2]
        is_bare = self._wbits == zlib.MAX_WBITS and (first & 15 != 8 or (first * 256 + second) % 31 != 0)  # RFC 1950
        return -zlib.MAX_WBITS if is_bare else self._wbits


class _UnlimitedDecoder:
    """Wraps a decoder without a limit of its own, feeding it a few bytes at a time."""

    def __init__(self, decode: Callable[[bytes], bytes]) -> None:
        self._decode = decode

    def add(self, chunk: bytes, limit: int) -> list[bytes]:
        parts, size = [], 0
        for start in range(0, len(chunk), _FED):
            parts.append(self._decode(chunk[start : start + _FED]))
            size += len(parts[-1])
            if size > limit:
                break
        return parts


def _decoder(encoding: str) -> _Decoder:
    if encoding in {"", "identity"}:
        return _Identity()
    if encoding in {"gzip", "x-gzip"}:
        return _Zlib(zlib.MAX_WBITS | 16)
    if encoding == "deflate":
        return _Zlib(zlib.MAX_WBITS)
    for name, make in _OPTIONAL.get(encoding, {}).items():
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        return _UnlimitedDecoder(make(module))
    raise UnknownEncodingError


def _brotli(module: Any) -> Callable[[bytes], bytes]:
    made = module.Decompressor()
    decode: Callable[[bytes], bytes] = getattr(made, "process", None) or made.decompress
    return decode


def _zstandard(module: Any) -> Callable[[bytes], bytes]:
    decode: Callable[[bytes], bytes] = module.ZstdDecompressor().decompressobj().decompress
    return decode


def _zstd(module: Any) -> Callable[[bytes], bytes]:
    decode: Callable[[bytes], bytes] = module.ZstdDecompressor().decompress
    return decode


_OPTIONAL: dict[str, dict[str, Callable[[Any], Callable[[bytes], bytes]]]] = {
    "br": {"brotli": _brotli, "brotlicffi": _brotli},
    "zstd": {"zstandard": _zstandard, "compression.zstd": _zstd, "backports.zstd": _zstd},
}
"""Packages that HTTP clients decode with; clients ask for an encoding only if its package is installed."""


Explain: TypeAlias = Literal["", "kind", "text"]


class RefusedReplyError(Exception):
    """An HTTP exchange of a silent call exceeded its limits; holds nothing that was sent or received."""


class CallLimits:
    """The limits of one attempt of a silent call, and what became of its HTTP exchanges.

    Once an exchange has been refused, so is every further one of the attempt, as SDKs retry by themselves.

    Args:
      deadline: seconds from the first request of the attempt until its last reply is read.
      max_reply_bytes: size of each reply's body, before and after decompression.

    Attributes:
      hosts: names and ports that requests were sent to, and those of proxies.
      stray: what an unlimited client did, "" if there was none; text that follows the model's name.
    """

    __slots__ = (
        "_deadline",
        "_ends",
        "_is_calling",
        "_is_over",
        "_kind",
        "_target",
        "hosts",
        "max_reply_bytes",
        "stray",
    )

    def __init__(self, deadline: float, max_reply_bytes: int) -> None:
        self._deadline = deadline
        self._ends: float | None = None
        self._kind = self._target = ""
        self.max_reply_bytes = max_reply_bytes
        self.hosts: dict[str, None] = {}
        self.stray = ""
        self._is_calling = self._is_over = False

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Marks the model's call; no limits apply before it."""
        self._is_calling = True
        try:
            yield
        finally:
            self._is_over = True

    def now(self) -> CallLimits | None:
        """Returns the limits that apply now; None before the model is called.

        A thread that the model keeps carries the mark of the call that started it. Its work for later calls gets new
        limits: no row may stop the exchanges of another.
        """
        if not self._is_calling:
            return None
        if not self._is_over:
            return self
        exchange = EXCHANGE.get()
        if isinstance(exchange, _Exchange) and not exchange.is_over:
            return exchange.passage
        later = CallLimits(self._deadline, self.max_reply_bytes)
        later._is_calling = True
        return later

    @property
    def is_refused(self) -> bool:
        """Whether an exchange exceeded its limits."""
        return bool(self._kind)

    def reason(self, explain: Explain) -> str:
        """Returns why an exchange was refused, as far as `silent.Request.explain` allows; "" for a private call."""
        if not explain:
            return ""
        return self._kind + (f" {self._target}" if explain == "text" and self._target else "")

    def refuse(self, kind: str, target: str = "") -> RefusedReplyError:
        """Records why an exchange is refused, the first time; returns the error to raise."""
        if not self._kind:
            self._kind, self._target = kind, target
        return RefusedReplyError(f"a reply of a private model call was refused: {self._kind}")

    def left(self) -> float:
        """Returns the remaining seconds, above 0; the first call starts the clock; raises RefusedReplyError at 0."""
        now = time.monotonic()
        self._ends = now + self._deadline if self._ends is None else self._ends
        if self._kind or now >= self._ends:
            raise self.late()
        return self._ends - now

    def late(self) -> RefusedReplyError:
        """Records that the time is up; returns the error to raise."""
        return self.refuse(f"no whole reply within the deadline of {self._deadline:g} seconds")

    def check_status(self, status: int, location: str | None, asked: str) -> None:
        """Refuses redirects, and interim replies: the next row would read the answer that follows one."""
        if status < 200:
            raise self.refuse(f"an interim reply instead of an answer (HTTP {status})")
        if 300 <= status < 400:
            raise self.refuse(f"a redirect (HTTP {status})", f"to {_redirect_target(location, asked)}")

    def body(self, encoding: str | None) -> ReplyBody:
        """Returns the collector of a reply's body."""
        try:
            return ReplyBody(encoding or "", limit=self.max_reply_bytes)
        except UnknownEncodingError:
            raise self.refuse("an encoding of the reply that cannot be decoded") from None

    def add(self, body: ReplyBody, chunk: bytes) -> None:
        """Adds received bytes to a body, within the limits of time and size."""
        self.left()
        try:
            body.add(chunk)
        except TooLargeError:
            raise self.refuse(f"more than {self.max_reply_bytes} bytes of a reply") from None


def _redirect_target(location: str | None, asked: str) -> str:
    """Returns scheme, host and port of a redirect's address; never its path, which may repeat what was sent."""
    own = urlsplit(asked)
    try:
        parts = urlsplit(location or "")
        host, port = parts.hostname, f":{parts.port}" if parts.port else ""
    except ValueError:
        return "an address that cannot be read"
    itself = own.netloc.rpartition("@")[2]  # without a password
    return f"{parts.scheme or own.scheme}://{host}{port}" if host else f"{itself} itself"


class _Exchange:
    """A limited exchange; over once it is left, also for threads that were started in it."""

    __slots__ = ("is_over", "passage")

    def __init__(self, passage: CallLimits) -> None:
        self.passage = passage
        self.is_over = False


@contextlib.contextmanager
def limited_exchange(passage: CallLimits) -> Iterator[None]:
    """Marks the block as part of a limited exchange, which may open connections."""
    exchange = _Exchange(passage)
    token = EXCHANGE.set(exchange)
    try:
        yield
    finally:
        exchange.is_over = True
        EXCHANGE.reset(token)


def is_inside() -> bool:
    """Whether the current code is part of a limited exchange."""
    exchange = EXCHANGE.get()
    return isinstance(exchange, _Exchange) and not exchange.is_over


def passage_of(call: CallMark) -> CallLimits | None:
    """Returns the limits of a call; None where no model is called, or not yet, as while a rate limiter waits."""
    return call.passage.now() if isinstance(call.passage, CallLimits) else None


def shorter_wait(timeout: float | None, remaining: float) -> float:
    """Returns the shorter of two waits; None is no limit."""
    return remaining if timeout is None else min(timeout, remaining)


@contextlib.contextmanager
def limit_socket_waits(passage: CallLimits, plain: Any) -> Iterator[None]:
    """Limits the waits of a socket by the remaining time; a non-blocking socket does not wait."""
    own, remaining = plain.gettimeout(), passage.left()
    if own == 0.0:
        yield
        return
    plain.settimeout(shorter_wait(own, remaining))
    try:
        yield
    except TimeoutError:
        if own is None or remaining <= own:
            raise passage.late() from None
        raise
    finally:
        plain.settimeout(own)


Inner: TypeAlias = Callable[..., Any]

_READ = 65_536


class _DeadlineReads(io.RawIOBase):
    """Reads from a socket's file, each read within the remaining time."""

    def __init__(self, passage: CallLimits, plain: Any) -> None:
        super().__init__()
        self._passage, self._socket, self._file = passage, plain, plain.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        with limit_socket_waits(self._passage, self._socket):
            count: int | None = self._file.readinto(buffer)
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


class _DeadlineReplies:
    """Replaces the reply class of a connection."""

    def __init__(self, passage: CallLimits, made: Callable[..., Any]) -> None:
        self._passage, self._made = passage, made

    def __call__(self, plain: Any, *args: Any, **options: Any) -> Any:
        return self._made(_DeadlineSocket(self._passage, plain), *args, **options)


class _DeadlineSocket:
    """Replaces a socket while a reply is read from it."""

    def __init__(self, passage: CallLimits, plain: Any) -> None:
        self._passage, self._socket = passage, plain

    def makefile(self, *_: Any, **__: Any) -> io.BufferedReader:
        return io.BufferedReader(_DeadlineReads(self._passage, self._socket))


@contextlib.contextmanager
def _limit_replies(passage: CallLimits, connection: Any) -> Iterator[None]:
    """Makes a connection read its replies within the remaining time."""
    own = vars(connection).get("response_class")
    if isinstance(own, _DeadlineReplies):  # `connect` calls that of the base class
        yield
        return
    connection.response_class = _DeadlineReplies(passage, connection.response_class)
    try:
        yield
    finally:
        if own is None:
            del connection.response_class
        else:
            connection.response_class = own


def put_request(
    inner: Inner, passage: CallLimits, connection: Any, method: str, url: str, *more: Any, **options: Any
) -> Any:
    """Records where a request goes."""
    passage.left()
    forks.own_connection(connection)
    passage.hosts[f"{connection.host}:{connection.port}"] = None
    tunnel = getattr(connection, "_tunnel_host", None)
    if tunnel:
        passage.hosts[f"{tunnel}:{connection._tunnel_port}"] = None  # noqa: SLF001  no public way
    elif url.startswith("http"):  # through a proxy
        passage.hosts[urlsplit(url).netloc.rpartition("@")[2]] = None
    return inner(connection, method, url, *more, **options)


def connect_http(inner: Inner, passage: CallLimits, connection: Any) -> Any:
    """Connects within the remaining time."""
    forks.record_opening(connection)
    # A proxy replies before the provider does.
    with limited_exchange(passage), _close_if_refused(connection), _limit_replies(passage, connection):
        return inner(connection)


def send_http(inner: Inner, passage: CallLimits, connection: Any, data: Any) -> Any:
    """Sends within the remaining time."""
    with limited_exchange(passage), _close_if_refused(connection):
        if connection.sock is None and connection.auto_open:
            connection.connect()
        if connection.sock is None:
            return inner(connection, data)
        with limit_socket_waits(passage, connection.sock):
            return inner(connection, data)


@contextlib.contextmanager
def _close_if_refused(connection: Any) -> Iterator[None]:
    """Closes a connection whose exchange was refused halfway, so that the next row cannot read this row's reply."""
    try:
        yield
    except RefusedReplyError:
        connection.close()
        raise


def reply_http(inner: Inner, passage: CallLimits, connection: Any) -> Any:
    """Reads a reply and its body within the limits, and returns it with the body in memory."""
    with _close_if_refused(connection), _limit_replies(passage, connection):
        response = inner(connection)
    try:
        passage.check_status(response.status, response.headers.get("location"), f"http://{connection.host}/")
        body = passage.body(response.headers.get("content-encoding"))
        while chunk := response.read(_READ):
            passage.add(body, chunk)
        _check_length(response)
    except BaseException:
        response.close()
        connection.close()  # the rest of the reply is still on its way
        raise
    for name in ("content-encoding", "content-length", "transfer-encoding"):
        del response.headers[name]
    content = body.content()
    response.fp, response.length, response.chunked = io.BytesIO(content), len(content), False
    return response


def _check_length(response: Any) -> None:
    """Raises for a body that ended early, which `read` does not report."""
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)


def reply_http2(inner: Inner, passage: CallLimits, connection: Any) -> Any:  # noqa: ARG001
    """Refuses HTTP/2 replies of urllib3, which no guard limits."""
    raise passage.refuse("HTTP/2 of urllib3, which has no limits")


# The limits are set where Python's HTTP clients send one request: in httpx and httpx2, in the streams of httpcore and
# the TLS sockets below them, in `http.client` (used by requests, urllib3 and botocore), in cookie
# jars, and in `socket.connect`. These methods are guarded for the whole process, but a guard acts only inside a silent
# call. So no client, transport, proxy or certificate of the user is replaced, and clients that a model creates during a
# call are limited too. A connection opened during a silent call by anything else is refused, as nothing would limit it.

_UNLIMITED = (
    "and not through httpx, requests or http.client: redirects, time and size of its replies cannot be limited; take "
)
_INSTEAD = (
    "a model class whose client uses one of these, such as ChatOpenAI with the base_url= of an OpenAI-compatible server"
)
_OF_GRPC = frozenset({("langchain_google_vertexai", "ChatVertexAI"), ("langchain_google_vertexai", "VertexAI")})
"""Classes that make a client of grpc with their first call, by package and name."""

_INSTEAD_OF_GRPC = "ChatGoogleGenerativeAI(..., vertexai=True, project=..., location=...), which calls through httpx"
_OTHER_TRANSPORTS = frozenset(
    {"aiohttp", "curl_cffi", "grpc", "primp", "pycurl", "pyreqwest", "websocket", "websockets"}
)
"""Packages that connect without one of the clients above; some do so in compiled code, where no guard sees it."""

_DEPTH = 6


# httpx and httpx2. One request, below redirects, authentication and event hooks, above the transport.


def _send(inner: Inner, passage: CallLimits, client: Any, request: Any) -> Any:
    _prepare(passage, client, request)
    with limited_exchange(passage):
        try:
            response = inner(client, request)
            with contextlib.closing(response.stream):
                body = _open_body(passage, response)
                for chunk in response.stream:
                    passage.add(body, chunk)
        except Exception:
            passage.left()  # the time was up: then that is why it failed
            raise
    return _with_content(response, body)


async def _asend(inner: Inner, passage: CallLimits, client: Any, request: Any) -> Any:
    _prepare(passage, client, request)
    with limited_exchange(passage):
        async with _cancel_after(passage):
            response = await inner(client, request)
            async with contextlib.aclosing(response.stream):
                body = _open_body(passage, response)
                async for chunk in response.stream:
                    passage.add(body, chunk)
    return _with_content(response, body)


@contextlib.asynccontextmanager
async def _cancel_after(passage: CallLimits) -> AsyncIterator[None]:
    """Cancels the awaited exchange when its time is up."""
    try:
        async with asyncio.timeout(passage.left()) as limit:
            yield
    except Exception:
        if limit.expired():
            raise passage.late() from None
        passage.left()
        raise


def _prepare(passage: CallLimits, client: Any, request: Any) -> None:
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


def _open_body(passage: CallLimits, response: Any) -> ReplyBody:
    passage.check_status(response.status_code, response.headers.get("location"), str(response.request.url))
    return passage.body(response.headers.get("content-encoding"))


def _with_content(response: Any, body: ReplyBody) -> Any:
    """Replaces the network stream of a response by its decoded body."""
    for name in ("content-encoding", "content-length", "transfer-encoding"):
        response.headers.pop(name, None)
    package = next(base for base in type(response).__mro__ if base.__name__ == "Response").__module__
    response.stream = sys.modules[package.partition(".")[0]].ByteStream(body.content())
    return response


# httpcore and httpcore2: pools that a fork shares.


def _through_pool(inner: Inner, passage: CallLimits, pool: Any, request: Any) -> Any:  # noqa: ARG001
    forks.own_pool(pool)
    return inner(pool, request)


# httpcore and httpcore2: waits of blocking clients. A wait is limited each time, as any number of them follow.


def _stream_read(inner: Inner, passage: CallLimits, stream: Any, max_bytes: int, timeout: float | None = None) -> Any:
    with _as_timeout(_errors(stream).ReadTimeout):
        return inner(stream, max_bytes, shorter_wait(timeout, passage.left()))


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


def _stream_write(inner: Inner, passage: CallLimits, stream: Any, buffer: bytes, timeout: float | None = None) -> Any:
    errors = _errors(stream)
    with _as_timeout(errors.WriteTimeout):
        remaining = shorter_wait(timeout, passage.left())
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


def _close_reply(inner: Inner, passage: CallLimits, connection: Any) -> Any:  # noqa: ARG001
    if not connection._h11_state.trailing_data[0]:  # noqa: SLF001  no public way
        return inner(connection)
    return connection.aclose() if hasattr(connection, "aclose") else connection.close()


# TLS of blocking clients: the handshake, and records that come in parts.


def _wait_tls(inner: Inner, passage: CallLimits, plain: Any, *args: Any, **options: Any) -> Any:
    with limit_socket_waits(passage, plain):
        return inner(plain, *args, **options)


# Cookies. One that a private reply sets would ride along with other rows, and stay in the user's client.


def _take_cookies(inner: Inner, call: CallMark, *args: Any, **options: Any) -> Any:
    return None if call.withholds and passage_of(call) is not None else inner(*args, **options)


# Connections of anything else.


def _connect(inner: Inner, passage: CallLimits, plain: Any, address: Any) -> Any:
    if not is_inside():
        place = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "a local socket"
        passage.stray = f"connects to {place} by itself, {_UNLIMITED}{_INSTEAD}"
        raise passage.refuse("a connection that is not an HTTP client's")
    with limit_socket_waits(passage, plain):
        return inner(plain, address)


def refuse_other_transports(model: Any) -> None:
    """Raises UnsilencableModelError for a model that holds a client of another kind, directly or indirectly."""
    name = type(model).__name__
    if any((base.__module__.partition(".")[0], base.__name__) in _OF_GRPC for base in type(model).__mro__):
        raise UnsilencableModelError(f"{name} calls through grpc, {_UNLIMITED}{_INSTEAD_OF_GRPC}")
    todo, seen = [(model, 0)], {id(model)}
    for thing, depth in todo:  # it grows
        tops = {base.__module__.partition(".")[0] for base in type(thing).__mro__}
        if transports := tops & _OTHER_TRANSPORTS:
            raise UnsilencableModelError(f"{name} calls through {min(transports)}, {_UNLIMITED}{_INSTEAD}")
        if depth == _DEPTH or tops & {"httpx", "httpx2", "torch"}:
            continue
        for value in _attributes_of(thing):
            kind = type(value)
            is_plain = kind.__module__ in _PLAIN and kind not in _CONTAINERS
            if id(value) not in seen and not is_plain and not issubclass(kind, type):
                seen.add(id(value))
                todo.append((value, depth + 1))


def _attributes_of(thing: Any) -> Iterator[Any]:
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
_hooks: dict[str, tuple[GuardedMethod, ...]] = {}


def look_after_door() -> bool:
    """Sets missing guards on imported clients; returns whether a client was new."""
    is_new = _find_clients()
    for hooks in tuple(_hooks.values()):
        for hook in hooks:
            hook.install_guard()
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
                floor = " (httpcore>=1.0.3)" if name == "httpcore" else ""
                raise UnsilencableModelError(
                    f"expected a version of {name} whose requests can be limited in time, size and redirects, found "
                    f"{getattr(sys.modules[name], '__version__', 'another one')}; install one that this version of "
                    f"langchain-dpicl was tested with{floor}"
                ) from None
    return is_new


def _hook(owner: type, name: str, act: Callable[..., Any], arguments: int) -> GuardedMethod:
    """Returns the guard of a method; it is tested by a call with `arguments` times None, which only the guard sees."""
    getattr(owner, name)

    def attempt() -> None:
        result = getattr(owner, name)(*[None] * arguments)
        if asyncio.iscoroutine(result):
            result.close()

    return GuardedMethod(owner, name, act, attempt)


def _limited_hook(owner: type, name: str, act: Callable[..., Any], arguments: int) -> GuardedMethod:
    """Returns a guard that acts only while limits apply; `act` takes the limits in the place of the mark."""

    def act_in_limits(inner: Inner, call: CallMark, *args: Any, **options: Any) -> Any:
        passage = passage_of(call)
        return inner(*args, **options) if passage is None else act(inner, passage, *args, **options)

    return _hook(owner, name, act_in_limits, arguments)


def _of_httpx(module: Any) -> Iterable[GuardedMethod]:
    importlib.import_module(module.__name__.replace("httpx", "httpcore"))  # else imported by the first request
    yield _limited_hook(module.Client, "_send_single_request", _send, 2)
    yield _limited_hook(module.AsyncClient, "_send_single_request", _asend, 2)


def _of_httpcore(module: Any) -> Iterable[GuardedMethod]:
    streams = importlib.import_module(f"{module.__name__}._backends.sync")
    for name in _STREAMS:
        yield _limited_hook(getattr(streams, name), "read", _stream_read, 2)
        yield _limited_hook(getattr(streams, name), "write", _stream_write, 2)
    for package, name in (("_sync", "HTTP11Connection"), ("_async", "AsyncHTTP11Connection")):
        connections = importlib.import_module(f"{module.__name__}.{package}.http11")
        yield _limited_hook(getattr(connections, name), "_response_closed", _close_reply, 1)
    for kind, name in ((module.ConnectionPool, "handle_request"), (module.AsyncConnectionPool, "handle_async_request")):
        forks.forget(kind())  # raises where its parts have other names
        yield _limited_hook(kind, name, _through_pool, 2)


def _of_http_client(module: Any) -> Iterable[GuardedMethod]:
    yield _limited_hook(module.HTTPConnection, "putrequest", put_request, 3)
    yield _limited_hook(module.HTTPConnection, "send", send_http, 2)
    yield _limited_hook(module.HTTPConnection, "getresponse", reply_http, 1)
    yield _limited_hook(module.HTTPConnection, "connect", connect_http, 1)
    yield _limited_hook(module.HTTPSConnection, "connect", connect_http, 1)


def _of_urllib3(module: Any) -> Iterable[GuardedMethod]:
    yield _limited_hook(module.HTTPConnection, "connect", connect_http, 1)
    yield _limited_hook(module.HTTPSConnection, "connect", connect_http, 1)


def _of_urllib3_http2(module: Any) -> Iterable[GuardedMethod]:
    yield _limited_hook(module.HTTP2Connection, "getresponse", reply_http2, 1)


def _of_socket(module: Any) -> Iterable[GuardedMethod]:
    # Sandboxes put a subclass in its place; connections still go through the class itself.
    owner = next((kind for kind in reversed(module.socket.__mro__) if kind.__module__ == "socket"), module.socket)
    yield _limited_hook(owner, "connect", _connect, 2)
    yield _limited_hook(owner, "connect_ex", _connect, 2)


def _of_ssl(module: Any) -> Iterable[GuardedMethod]:
    yield _limited_hook(module.SSLSocket, "do_handshake", _wait_tls, 1)
    yield _limited_hook(module.SSLSocket, "read", _wait_tls, 1)


def _of_cookies(module: Any) -> Iterable[GuardedMethod]:
    yield _hook(module.CookieJar, "extract_cookies", _take_cookies, 3)


_MODULES: dict[str, Callable[[Any], Iterable[GuardedMethod]]] = {
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
