"""Reads untrusted files (plain ones only, without blocking, up to a stated size), and writes files whole."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from langchain_dpicl.exceptions import ConfigurationError

MAX_TEXT = 1 << 28
"""Largest size of a JSON file, in bytes."""
MAX_ARRAYS = 1 << 30
"""Largest size of a file of vectors, in bytes."""
MAX_RECORDS = 1 << 32
"""Largest size of a file of records, in bytes, also of what it unpacks to."""

# O_NONBLOCK: a FIFO without a writer does not block. O_NOCTTY: a terminal does not become the controlling one.
# Some systems lack some of these flags.
_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_NOCTTY", "O_BINARY"))
_CHUNK = 1 << 20
_KINDS = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"))


def read_plain(path: str | os.PathLike[str], most: int) -> bytes:
    """Returns the content of a plain file, or of a link to one; see `open_plain`.

    Formal guarantees:
      - At most `most` + 1 bytes are read, also of a file that is sparse, grows or reports no size.
    """
    with os.fdopen(open_plain(path, most), "rb") as file:
        data = bytearray()
        while len(data) <= most:
            chunk = os.read(file.fileno(), min(_CHUNK, most + 1 - len(data)))
            if not chunk:
                return bytes(data)
            data += chunk
    raise _too_large(path, most)


def open_plain(path: str | os.PathLike[str], most: int) -> int:
    """Returns a descriptor, which the caller closes, of a plain file, or of a link to one.

    Formal guarantees:
      - Kind and size are read from the open descriptor, so the checked file is the one that is read.
      - Only a plain file is opened; a folder, a device, a FIFO or a socket is refused without blocking.
      - A file that reports more than `most` bytes is refused; it may grow, or report less than it holds.
    """
    try:
        number = os.open(path, _FLAGS)
    except (TypeError, ValueError):
        raise _impossible(path) from None
    except OSError as error:
        # The error would quote the text, which may be whole records.
        if isinstance(path, str) and (start := path.lstrip()[:1]) in {"{", "["}:
            raise _no_path(start) from None
        if error.errno not in {errno.ENXIO, errno.ENODEV, errno.EISDIR}:
            raise
        raise _no_file(path, "something that cannot be opened as one") from None
    status = os.fstat(number)
    is_plain = stat.S_ISREG(status.st_mode)
    if is_plain and status.st_size <= most:
        return number
    os.close(number)
    if is_plain:
        raise _too_large(path, most)
    raise _no_file(path, next((name for is_kind, name in _KINDS if is_kind(status.st_mode)), "a device"))


def _no_path(start: str) -> ConfigurationError:
    """Returns the refusal of JSON text in the place of a path."""
    return ConfigurationError(
        f"path: expected the path of a file, found text that begins with {start!r}. Give JSON text to from_json."
    )


def _impossible(path: object) -> ConfigurationError:
    """Returns the refusal of what is no path, or of a path with a NUL or a lone surrogate."""
    found = "an impossible one" if isinstance(path, str | os.PathLike) else type(path).__name__
    return ConfigurationError(f"path: expected the path of a file, found {found}.")


def check_path(name: str, value: Any) -> Path:
    """Returns the path of a file with its links followed; refuses what no file system has."""
    try:
        return Path(os.path.realpath(value))
    except (TypeError, ValueError):  # ValueError: a zero character, or a lone surrogate
        pass
    found = f"{os.fspath(value)!r}" if isinstance(value, (str, os.PathLike)) else type(value).__name__
    raise ConfigurationError(f"{name}: expected the path of a file, found {found}.")


def check_target(name: str, path: Any) -> Path:
    """Returns the path of a file that can be created or replaced."""
    if not isinstance(path, str | os.PathLike):
        raise ConfigurationError(f"{name}: expected the path of a file, or None, found {type(path).__name__}.")
    target = Path(path)
    try:
        folder = Path(os.path.realpath(target)).parent  # of what a link leads to
        can_be_written = folder.is_dir() and os.access(folder, os.W_OK)
        with contextlib.suppress(FileNotFoundError):
            can_be_written &= not stat.S_ISDIR(target.stat().st_mode)
    except (OSError, ValueError):  # a name too long, links in a circle; a zero character, or a lone surrogate
        can_be_written = False
    if not can_be_written:
        raise ConfigurationError(
            f"{name}: expected a file in a folder that exists and can be written, found {_display_path(path)!r}."
        )
    return target


def _no_file(path: str | os.PathLike[str], actual: str) -> ConfigurationError:
    return ConfigurationError(f"{_display_path(path)}: expected a plain file, found {actual}. Give the file itself.")


def _too_large(path: str | os.PathLike[str], most: int) -> ConfigurationError:
    return ConfigurationError(f"{_display_path(path)}: expected at most {most} bytes, found more.")


def _display_path(path: str | os.PathLike[str]) -> str:
    return os.fsdecode(path)


def write_bytes(path: str | os.PathLike[str], data: bytes, most: int = MAX_ARRAYS) -> None:
    """Writes a file atomically: a reader sees the old file or the whole new one."""
    if len(data) > most:
        raise ConfigurationError(f"file: expected at most {most} bytes, found {len(data)}. Store it in several parts.")
    try:
        target = Path(path)
        part = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
        is_path = b"\0" not in os.fsencode(target)
    except (TypeError, ValueError):
        is_path = False
    if not is_path:
        raise _impossible(path)
    # A rename would take the place of the device, or of the link to it, such as /dev/stdout.
    is_other = False
    with contextlib.suppress(OSError):  # a folder that may not be looked into: the write says so
        is_other = target.exists() and not (target.is_file() or target.is_dir())
    if is_other or os.path.realpath(target.parent) == "/dev":
        raise _no_file(path, "a device or a pipe")
    try:
        with faults_of(path):
            with part.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def faults_of(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raises an OSError of what is inside with the name that the caller gave, not that of the part."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # one that says all in its words, of a file system in Python
            raise
        raise OSError(error.errno, error.strerror, _display_path(path)) from None


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes an object of JSON, for `object_pairs_hook`; refuses a key that stands twice: readers take one or the other.

    Raises:
      ValueError: a key stands twice.
    """
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("repeated key")
    return value
