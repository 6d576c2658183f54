"""Limits the exchanges of `http.client`, which requests, urllib3 and botocore use."""

from __future__ import annotations

import contextlib
import http.client
import io
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from langchain_dpicl.backends._passage import Passage, RefusedReplyError, inside, waiting

Inner: TypeAlias = Callable[..., Any]

_READ = 65_536


class _Reads(io.RawIOBase):
    """Reads from a socket's file, each read within the remaining time."""

    def __init__(self, passage: Passage, plain: Any) -> None:
        super().__init__()
        self._passage, self._socket, self._file = passage, plain, plain.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        with waiting(self._passage, self._socket):
            count: int | None = self._file.readinto(buffer)
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


class _TimedReplies:
    """Replaces the reply class of a connection."""

    def __init__(self, passage: Passage, made: Callable[..., Any]) -> None:
        self._passage, self._made = passage, made

    def __call__(self, plain: Any, *args: Any, **options: Any) -> Any:
        return self._made(_Timed(self._passage, plain), *args, **options)


class _Timed:
    """Replaces a socket while a reply is read from it."""

    def __init__(self, passage: Passage, plain: Any) -> None:
        self._passage, self._socket = passage, plain

    def makefile(self, *_: Any, **__: Any) -> io.BufferedReader:
        return io.BufferedReader(_Reads(self._passage, self._socket))


@contextlib.contextmanager
def _timed_replies(passage: Passage, connection: Any) -> Iterator[None]:
    """Makes a connection read its replies within the remaining time."""
    own = vars(connection).get("response_class")
    if isinstance(own, _TimedReplies):  # `connect` calls that of the base class
        yield
        return
    connection.response_class = _TimedReplies(passage, connection.response_class)
    try:
        yield
    finally:
        if own is None:
            del connection.response_class
        else:
            connection.response_class = own


def put_request(
    inner: Inner, passage: Passage, connection: Any, method: str, url: str, *more: Any, **options: Any
) -> Any:
    """Records where a request goes."""
    passage.left()
    passage.hosts[f"{connection.host}:{connection.port}"] = None
    tunnel = getattr(connection, "_tunnel_host", None)
    if tunnel:
        passage.hosts[f"{tunnel}:{connection._tunnel_port}"] = None  # noqa: SLF001  no public way
    elif url.startswith("http"):  # through a proxy
        passage.hosts[urlsplit(url).netloc.rpartition("@")[2]] = None
    return inner(connection, method, url, *more, **options)


def connect_http(inner: Inner, passage: Passage, connection: Any) -> Any:
    """Connects within the remaining time."""
    # A proxy replies before the provider does.
    with inside(passage), _closed_if_refused(connection), _timed_replies(passage, connection):
        return inner(connection)


def send_http(inner: Inner, passage: Passage, connection: Any, data: Any) -> Any:
    """Sends within the remaining time."""
    with inside(passage), _closed_if_refused(connection):
        if connection.sock is None and connection.auto_open:
            connection.connect()
        if connection.sock is None:
            return inner(connection, data)
        with waiting(passage, connection.sock):
            return inner(connection, data)


@contextlib.contextmanager
def _closed_if_refused(connection: Any) -> Iterator[None]:
    """Closes a connection whose exchange was refused halfway, so that the next row cannot read this row's reply."""
    try:
        yield
    except RefusedReplyError:
        connection.close()
        raise


def reply_http(inner: Inner, passage: Passage, connection: Any) -> Any:
    """Reads a reply and its body within the limits, and returns it with the body in memory."""
    with _closed_if_refused(connection), _timed_replies(passage, connection):
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


def reply_http2(inner: Inner, passage: Passage, connection: Any) -> Any:  # noqa: ARG001
    """Refuses HTTP/2 replies of urllib3, which no guard limits."""
    raise passage.refuse("HTTP/2 of urllib3, which has no limits")
