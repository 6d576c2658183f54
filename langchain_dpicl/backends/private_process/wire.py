"""Encodes messages between this process and that of a private model: JSON, with bytes and arrays bit by bit."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from langchain_dpicl.backends.private_calls.call import OpaqueValue

_HEAD = struct.Struct(">QQ")
_READ = 1 << 20
"""Bytes read at once."""


def pack(message: Any) -> bytes:
    """Returns a message as one frame; raises TypeError for a value that has no form here.

    Boxes are opened, texts may hold lone surrogates, and sequences become lists.

    >>> unpack(pack({"rows": np.zeros((1, 2)), "tokens": (b"a", 7)}))
    {'rows': array([[0., 0.]]), 'tokens': [b'a', 7]}
    """
    buffers: list[bytes] = []

    def other(value: Any) -> Any:
        if isinstance(value, OpaqueValue):
            return value.reveal()
        if isinstance(value, bytes):
            return {"$bytes": value.decode("latin-1")}
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:  # whose bytes are addresses
            buffers.append(value.tobytes())
            return {"$array": [value.dtype.str, list(value.shape)]}
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, Sequence):
            return list(value)
        raise TypeError(f"expected text, numbers, bytes and arrays, found {type(value).__name__}")

    text = json.dumps(message, default=other).encode()
    return b"".join([_HEAD.pack(len(text), sum(map(len, buffers))), text, *buffers])


def unpack(frame: bytes) -> Any:
    """Returns the message of a whole frame."""
    at = _HEAD.size + _HEAD.unpack_from(frame)[0]
    text = frame[_HEAD.size : at].decode()

    def other(found: dict[str, Any]) -> Any:
        nonlocal at
        if "$bytes" in found:
            return found["$bytes"].encode("latin-1")
        if "$array" not in found:
            return found
        dtype, shape = np.dtype(found["$array"][0]), found["$array"][1]
        array = np.frombuffer(frame, dtype, int(np.prod(shape, dtype=np.int64)), at).reshape(shape).copy()
        at += array.nbytes
        return array

    return json.loads(text, object_hook=other)


def send(descriptor: int, frame: bytes) -> None:
    """Writes a frame; raises OSError where nothing reads any more."""
    rest = memoryview(frame)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def receive(descriptor: int) -> Any:
    """Returns the next message; raises EOFError at the end, also in the middle of a frame."""
    head = _read(descriptor, _HEAD.size)
    return unpack(head + _read(descriptor, sum(_HEAD.unpack(head))))


def _read(descriptor: int, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = os.read(descriptor, min(_READ, size - len(parts)))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
