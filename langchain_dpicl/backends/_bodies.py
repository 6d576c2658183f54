"""Decodes the body of an HTTP reply up to a limited number of bytes."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable
from typing import Any, Protocol

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
class Body:
    """A reply's body, collected and decoded.

    Args:
      encoding: the reply's `Content-Encoding`; "" where it has none.
      limit: bytes that the body may have, before and after decoding.

    Raises:
      UnknownEncodingError: no decoder; stacked encodings are not decoded either.

    >>> body = Body("gzip", limit=100)
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


class _Fed:
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
        return _Fed(make(module))
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
