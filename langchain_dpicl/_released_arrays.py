"""Reads and writes float32 arrays in the safetensors format, and writes folders atomically."""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl._plain_files import MAX_ARRAYS, read_plain
from langchain_dpicl.exceptions import ConfigurationError

Array: TypeAlias = NDArray[np.float32]

_MAX_HEADER = 1 << 16
_ALIGNED = 8
_LITTLE_ENDIAN = np.dtype("<f4")


def array_bytes(arrays: Mapping[str, Array]) -> bytes:
    """Returns the content of a safetensors file with these arrays."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blocks, end = [], 0
    for name, array in arrays.items():
        block = np.ascontiguousarray(array, dtype=_LITTLE_ENDIAN).tobytes()
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [end, end + len(block)]}
        blocks.append(block)
        end += len(block)
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    # The format pads the header with blanks, so that the numbers are aligned.
    text += b" " * (-len(text) % _ALIGNED)
    return b"".join([len(text).to_bytes(8, "little"), text, *blocks])


def arrays_in(path: Path) -> dict[str, Array]:
    """Returns the float32 arrays of an untrusted safetensors file by name; builds no other objects."""
    whole = read_plain(path, MAX_ARRAYS)
    begin = 8 + int.from_bytes(whole[:8], "little")
    header = _header(whole[8:begin]) if begin <= min(len(whole), 8 + _MAX_HEADER) else None
    if header is None:
        raise ConfigurationError(f"{path.name}: expected a safetensors file.")
    # Sorted by offset: arrays must follow each other without gaps or overlaps.
    blocks = sorted((_block(path.name, name, entry), name) for name, entry in header.items())
    arrays: dict[str, Array] = {}
    end = 0
    for (first, last, shape), name in blocks:
        if first != end or begin + last > len(whole):
            raise _odd(path.name, name)
        arrays[name] = np.frombuffer(whole[begin + first : begin + last], _LITTLE_ENDIAN).reshape(shape)
        end = last
    if begin + end != len(whole):
        raise ConfigurationError(f"{path.name}: expected no bytes beside the arrays.")
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def _header(text: bytes) -> dict[str, Any] | None:
    """Returns the header's entry of each array; None if it is not a header."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return {name: entry for name, entry in value.items() if name != "__metadata__"} if isinstance(value, dict) else None


def _block(file: str, name: str, entry: Any) -> tuple[int, int, tuple[int, ...]]:
    """Returns the offsets of an array and its shape."""
    state = entry if isinstance(entry, dict) else {}
    shape, place = _sizes(state.get("shape")), _sizes(state.get("data_offsets"))
    if state.get("dtype") != "F32" or shape is None or place is None or len(place) != 2:
        raise _odd(file, name)
    if place[1] - place[0] != 4 * math.prod(shape):
        raise _odd(file, name)
    return place[0], place[1], shape


def _sizes(value: Any) -> tuple[int, ...] | None:
    is_list = isinstance(value, list) and all(type(one) is int and 0 <= one <= MAX_ARRAYS for one in value)
    return tuple(value) if is_list else None


def _odd(file: str, name: str) -> ConfigurationError:
    return ConfigurationError(f"{file}: expected {name!r} as float32 numbers, each stored once.")


def write_folder(path: str | os.PathLike[str], files: Mapping[str, bytes]) -> None:
    """Writes a folder of exactly these files; a reader sees the old folder, the whole new one, or briefly none."""
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        shown = os.fspath(path)
        raise ConfigurationError(f"expected a path in a folder that exists, found {shown!r}; create that folder first")
    _check_replaceable(target, files)
    mark = secrets.token_hex(8)
    part, old = target.with_name(f".{target.name}.{mark}.part"), target.with_name(f".{target.name}.{mark}.old")
    part.mkdir()
    try:
        for name, content in files.items():
            with (part / name).open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        _swap(part, target, old)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        # The old folder is deleted only if a complete one is in place.
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)


def _check_replaceable(target: Path, files: Mapping[str, bytes]) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise ConfigurationError(f"expected a folder to write to, found the file {target.name!r}; give another path")
    if strange := sorted({one.name for one in target.iterdir()} - set(files)):
        raise ConfigurationError(
            f"expected a new folder, or one of {sorted(files)} to replace, found {strange[:5]} in it; give another path"
        )


def _swap(part: Path, target: Path, old: Path) -> None:
    """Moves `target` to `old` and `part` to `target`; moves `old` back on failure."""
    had_one = target.exists()
    if had_one:
        target.rename(old)
    try:
        part.rename(target)
    except OSError:
        if had_one:
            old.rename(target)
        raise
