"""RunJournal: the checkpoint file of a run, one line for each release, written before its ticket commits."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Self

from langchain_dpicl._plain_files import MAX_ARRAYS, MAX_TEXT, check_target, read_plain, write_bytes
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.released.files import parse_json, plain_json

try:
    import fcntl
except ImportError:  # pragma: no cover  Windows has no such locks
    fcntl = None  # type: ignore[assignment]

FORMAT = "langchain-dpicl/run"
VERSION = 1
_TERMS = ("component", "ledger_id", "dataset_id", "plan")


class RunJournal:
    """The checkpoint of one run. Line 1 names the run, every other line holds one release as JSON.

    Formal guarantees:
      - A line is written and synced as a whole before `append` returns. The unfinished last line of a killed process is
        dropped: its ticket burnt and was not committed.
      - Each line has a digest of itself and of all lines above it. A file that was changed, belongs to another run, or
        was continued by another process is refused, and nothing is written to it.

    The file is untrusted: readers of `entries` check their values.

    Args:
      path: file to create or continue; its folder must exist.
      component: name of the share that pays.
      ledger_id: the ledger.
      dataset_id: the private data set.
      plan: the public parameters of the run, as JSON values; the file holds their digest.

    Attributes:
      entries: what the file holds, and what was appended since.

    Raises:
      ConfigurationError: no file can be written there, or it is not a journal of this run.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, component: str, ledger_id: str, dataset_id: str, plan: Mapping[str, Any]
    ) -> None:
        self._path = check_target("checkpoint", path)
        digest = _digest("", plain_json("plan", plan))
        terms = dict(zip(_TERMS, (component, ledger_id, dataset_id, digest), strict=True))
        self._head = {"format": FORMAT, "version": VERSION, **terms}
        lines, self._size, torn = _read(self._path)
        self.entries = [entry for entry, _ in lines[1:]]
        self._pending = b""
        self._arrays: dict[Path, bytes] = {}
        self._torn = torn if lines else b""  # without a first line it may be a file of something else
        self._digest = self._on_file = lines[-1][1] if lines else ""
        if lines:
            self._check_head(lines[0][0])
        else:
            self._add(self._head)

    @classmethod
    def open(cls, path: str | os.PathLike[str] | None, **terms: Any) -> Self | None:
        """Returns the journal at a path; None without a path."""
        return None if path is None else cls(path, **terms)

    @staticmethod
    def component_in(path: str | os.PathLike[str] | None) -> str | None:
        """Returns the component whose journal a path holds; None without a path or a file."""
        lines = [] if path is None else _read(check_target("checkpoint", path))[0]
        component = lines[0][0].get("component") if lines else None
        return component if isinstance(component, str) else None

    def append(self, entry: Mapping[str, Any], *, arrays: bytes | None = None) -> None:
        """Writes and syncs one release; after an error the line is kept, and the next `append` or `flush` writes it.

        Args:
          entry: JSON values, public.
          arrays: what is too large for a line; only those of the last two releases are kept, in files beside.

        Raises:
          ConfigurationError: another process has written to the file.
          OSError: the file cannot be written.
        """
        entry = plain_json("release", entry)
        if arrays is not None:
            # Two files in turn: those of the last release stay until the next line is written.
            self._arrays[self._beside(len(self.entries))] = arrays
            entry["arrays"] = hashlib.sha256(arrays).hexdigest()
        self._add(entry)
        self.entries.append(entry)
        self.flush()

    def holds(self, entry: Mapping[str, Any]) -> bool:
        """Whether a release is in the file, or is one that could not be written and waits for the next `flush`."""
        return plain_json("release", entry) in self.entries

    def flush(self) -> None:
        """Writes and syncs what is not written yet; errors as in `append`."""
        if self._size + len(self._pending) > MAX_TEXT:
            raise fail("checkpoint", f"at most {MAX_TEXT:,} bytes, which is what can be read again", "more")
        with _opened(self._path, may_create=not self._size) as file:
            if fcntl is not None:  # another run may not write between the look and the line
                fcntl.flock(file, fcntl.LOCK_EX)
            if not self._is_ours(file):
                advice = "Two runs cannot share one: build this one again to continue from the file, or take another."
                raise fail("checkpoint", "the file as this run left it", "one that another run wrote to", advice)
            for path, arrays in self._arrays.items():
                write_bytes(path, arrays)
            self._arrays.clear()
            if not self._pending:
                return
            file.seek(self._size)
            file.truncate()
            file.write(self._pending)
            file.flush()
            os.fsync(file.fileno())
        self._size, self._pending, self._torn = self._size + len(self._pending), b"", b""
        self._on_file = self._digest

    def arrays(self) -> bytes:
        """Returns the arrays of the last release.

        Raises:
          ConfigurationError: they are not those that were written with it, or there is no file of them.
        """
        path = self._beside(len(self.entries) - 1)
        data = read_plain(path, MAX_ARRAYS) if path.exists() else b""
        if hashlib.sha256(data).hexdigest() != self.entries[-1].get("arrays"):
            raise fail("checkpoint", "the arrays of its last release beside it", "others", "Keep the files together.")
        return data

    def _add(self, entry: Mapping[str, Any]) -> None:
        digest = _digest(self._digest, entry)
        line = json.dumps({"entry": entry, "digest": digest}, separators=(",", ":")).encode("ascii")
        self._pending, self._digest = self._pending + line + b"\n", digest  # both or none, where Ctrl-C comes

    def _is_ours(self, file: BinaryIO) -> bool:
        """Whether the file ends as this run knows it, or with a part of the pending lines, whose write failed."""
        end = f'{self._on_file}"}}\n'.encode() if self._on_file else b""
        file.seek(max(0, self._size - len(end)))
        found = file.read()
        rest = found.removeprefix(end)
        return found.startswith(end) and (self._pending.startswith(rest) or rest == self._torn)

    def _beside(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.arrays{number % 2}")

    def _check_head(self, found: Mapping[str, Any]) -> None:
        if found.get("format") != FORMAT or found.get("version") != VERSION:
            raise fail("checkpoint", f"a file whose format is {FORMAT!r}, version {VERSION}", "another")
        if other := [name for name in _TERMS if found.get(name) != self._head[name]]:
            advice = "Continue with the same ledger, data set, component and options; or take another file."
            raise fail("checkpoint", "one of this run", f"another run's: differences in {other}", advice)


def check_paid(released: int, *, used: int, what: str) -> None:
    """Refuses a checkpoint with more releases than the share has paid for, such as one beside an older ledger."""
    if released > used:
        expected = f"at most the {used} {what} that this component has paid for on this ledger"
        raise fail("checkpoint", expected, released, "Give the component that paid, or another file.")


def _read(path: Path) -> tuple[list[tuple[dict[str, Any], str]], int, bytes]:
    """Returns the entries of a file with their digests, the size of its whole lines, and its unfinished last line."""
    if not path.exists():
        return [], 0, b""
    whole, _, torn = read_plain(path, MAX_TEXT).rpartition(b"\n")
    lines: list[tuple[dict[str, Any], str]] = []
    digest = ""
    for number, raw in enumerate(whole.split(b"\n") if whole else (), start=1):
        what = f"checkpoint, line {number}"
        line = parse_json(what, raw.decode("ascii", "replace"))
        entry = line.get("entry") if isinstance(line, dict) else None
        digest = _digest(digest, plain_json(what, entry)) if isinstance(entry, dict) else ""
        if not isinstance(line, dict) or not isinstance(entry, dict) or line.get("digest") != digest:
            raise ConfigurationError(
                f"{what}: expected what a run wrote there, found other content. Take another file."
            )
        lines.append((entry, digest))
    return lines, len(whole) + bool(whole), torn


def _digest(above: str, entry: Mapping[str, Any]) -> str:
    """Returns the digest of an entry and of the lines above it."""
    text = json.dumps(entry, allow_nan=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"{above}\n{text}".encode("ascii")).hexdigest()


def _opened(path: Path, *, may_create: bool) -> BinaryIO:
    """Opens a file for reading and writing."""
    flags = os.O_RDWR | (os.O_CREAT if may_create else 0) | getattr(os, "O_BINARY", 0)
    return os.fdopen(os.open(path, flags, 0o666), "r+b")
