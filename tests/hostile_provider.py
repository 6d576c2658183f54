"""A provider on this machine that answers as a hostile one would, byte by byte: redirects, bombs, bytes that never end.

`with hostile_provider(manner) as served:` answers requests that have `served.target` in their body in the given manner,
and all others as `loopback_provider` does. `served.seen` has what this address received, `served.elsewhere.seen` what
the second one did, to which redirects point.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import socketserver
import ssl
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tests.loopback_answers import Manners, RejectedError
from tests.loopback_formats import answer_to
from tests.loopback_provider import ANSWERS, Received, _read, _solve

TARGET = "PRIVATE"
VECTOR = [0.25, 0.5, -0.25]
OK_HEADERS = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


class Served:
    """One address of a hostile provider."""

    def __init__(self, manner: Manner | None) -> None:
        self.manner = manner
        self.seen: list[Received] = []
        self.root = ""
        self.ended = threading.Event()
        self.elsewhere: Served = self

    def private(self) -> list[Received]:
        """What was received that has the target in it."""
        return [one for one in self.seen if TARGET.encode() in one.raw]

    def arrived(self, least: int) -> int:
        """How many of those there are, once there are so many, which a client that gave up does not wait for."""
        end = time.monotonic() + 60
        while len(self.private()) < least and time.monotonic() < end:
            time.sleep(0.01)
        return len(self.private())


Manner = Callable[[Any, bytes, str, Served], None]
"""What is done with a request: takes its socket, the usual answer, the request's path and the address."""


def redirect(status: int, *, loops: bool = False) -> Manner:
    """Points to the second address, or to this one again."""

    def answer(plain: Any, _: bytes, path: str, served: Served) -> None:
        to = (served if loops else served.elsewhere).root + path
        plain.sendall(f"HTTP/1.1 {status} X\r\nlocation: {to}\r\ncontent-length: 0\r\n\r\n".encode())

    return answer


def dripped_body(plain: Any, _: bytes, __: str, served: Served) -> None:
    """One byte now and then, without end."""
    plain.sendall(OK_HEADERS + b"content-length: 1000000\r\n\r\n")
    while not served.ended.wait(0.02):
        plain.sendall(b" ")


def dripped_headers(plain: Any, _: bytes, __: str, served: Served) -> None:
    """One header now and then, without end."""
    plain.sendall(OK_HEADERS)
    while not served.ended.wait(0.02):
        plain.sendall(b"x: y\r\n")


def endless_status(status: int) -> Manner:
    """An informational status, such as 100 or 103, without end."""

    def answer(plain: Any, _: bytes, __: str, served: Served) -> None:
        while not served.ended.wait(0.002):
            plain.sendall(b"HTTP/1.1 %d X\r\nx: y\r\n\r\n" % status)

    return answer


def endless_chunks(plain: Any, _: bytes, __: str, served: Served) -> None:
    """A body without an end, as fast as it is read."""
    plain.sendall(OK_HEADERS + b"transfer-encoding: chunked\r\n\r\n")
    while not served.ended.is_set():
        plain.sendall(b"10000\r\n" + b" " * 0x10000 + b"\r\n")


def says_nothing(_: Any, __: bytes, ___: str, served: Served) -> None:
    """Nothing, without end."""
    served.ended.wait()


def bomb(encoding: str, megabytes: int) -> Manner:
    """A small body that is large when it is decoded."""
    body = _bomb(encoding, megabytes)

    def answer(plain: Any, _: bytes, __: str, ___: Served) -> None:
        name = encoding.rsplit(maxsplit=1)[-1].encode()
        plain.sendall(OK_HEADERS + b"content-encoding: %s\r\ncontent-length: %d\r\n\r\n" % (name, len(body)) + body)

    return answer


@functools.cache
def _bomb(encoding: str, megabytes: int) -> bytes:
    pack = {"gzip": _deflated(31), "deflate": _deflated(15), "raw deflate": _deflated(-15), "zstd": _zstd, "br": _br}
    return pack[encoding](megabytes)


def packed(encoding: str) -> Manner:
    """The usual answer, compressed as it should be."""
    pack: dict[str, Callable[[bytes], bytes]] = {
        "gzip": gzip.compress,
        "deflate": zlib.compress,
        "raw deflate": lambda text: zlib.compress(text, wbits=-15),
        "zstd": lambda text: __import__("zstandard").ZstdCompressor().compress(text),
        "br": lambda text: __import__("brotli").compress(text),
        "other": bytes,
    }

    def answer(plain: Any, usual: bytes, _: str, __: Served) -> None:
        body, name = pack[encoding](usual), encoding.rsplit(maxsplit=1)[-1].encode()
        plain.sendall(OK_HEADERS + b"content-encoding: %s\r\ncontent-length: %d\r\n\r\n" % (name, len(body)) + body)

    return answer


@contextlib.contextmanager
def hostile_provider(manner: Manner | None, *, tls: ssl.SSLContext | None = None) -> Iterator[Served]:
    """Runs both addresses on free ports; the first one behind TLS where a context is given."""
    first, second = Served(manner), Served(None)
    first.elsewhere = second
    with _running(first, tls), _running(second, None):
        second.root = second.root.replace("127.0.0.1", "localhost")  # another name
        try:
            yield first
        finally:
            first.ended.set()


@contextlib.contextmanager
def _running(served: Served, tls: ssl.SSLContext | None) -> Iterator[None]:
    server = _Server(("127.0.0.1", 0), type("Bound", (_Handler,), {"served": served}))
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    served.root = f"http{'s' if tls else ''}://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def handle_error(self, *_: Any) -> None:
        """Clients hang up on a hostile provider."""


class _Handler(socketserver.StreamRequestHandler):
    served: Served

    def handle(self) -> None:
        while (line := self.rfile.readline()) and self._answer(line):
            pass

    def _answer(self, line: bytes) -> bool:
        method, path = line.decode().split()[:2]
        headers: dict[str, str] = {}
        while (line := self.rfile.readline()).strip():
            name, _, value = line.decode().partition(":")
            headers[name.strip().lower()] = value.strip()
        raw = self.rfile.read(int(headers.get("content-length", 0)))
        path = "/" + path.split("/", 3)[3] if path.startswith("http") else path  # as proxies are asked
        request = Received(method, path, headers, raw, _read(raw))
        self.served.seen.append(request)
        try:
            usual = _usual(replace(request, path=path.partition("?")[0]))
        except RejectedError as error:
            body = json.dumps({"error": {"message": str(error), "param": error.param}}).encode()
            self.request.sendall(b"HTTP/1.1 400 X\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            return True
        if self.served.manner is not None and TARGET.encode() in raw:
            self.served.manner(self.request, usual, path, self.served)
            return False
        self.request.sendall(OK_HEADERS + b"content-length: %d\r\n\r\n" % len(usual) + usual)
        return True


def _usual(request: Received) -> bytes:
    if request.path.endswith("/embeddings"):
        data = [{"object": "embedding", "index": 0, "embedding": VECTOR}]
        usage = {"prompt_tokens": 1, "total_tokens": 1}
        return json.dumps({"object": "list", "data": data, "model": "m", "usage": usage}).encode()
    return _solve(request, Manners())[1] if request.path in ANSWERS or answer_to(request.path) else b"{}"


def _deflated(wbits: int) -> Callable[[int], bytes]:
    def pack(megabytes: int) -> bytes:
        packer = zlib.compressobj(9, zlib.DEFLATED, wbits)
        return b"".join(packer.compress(b" " * 2**20) for _ in range(megabytes)) + packer.flush()

    return pack


def _zstd(megabytes: int) -> bytes:
    return bytes(__import__("zstandard").ZstdCompressor().compress(b" " * (megabytes << 20)))


def _br(megabytes: int) -> bytes:
    return bytes(__import__("brotli").compress(b" " * (megabytes << 20)))
