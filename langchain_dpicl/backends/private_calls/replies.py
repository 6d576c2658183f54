"""Limits time and size of the HTTP exchanges of one private call, decodes their bodies and records what happened."""

from __future__ import annotations

import contextlib
import importlib
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol, TypeAlias
from urllib.parse import urlsplit

from langchain_dpicl.backends.private_calls.log_guard import EXCHANGE, CallMark

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
