"""Reads and writes released values as JSON files with a content digest."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from langchain_dpicl._plain_files import MAX_TEXT, read_plain, write_bytes
from langchain_dpicl.exceptions import ConfigurationError

_INDENTED = json.JSONEncoder(allow_nan=False, indent=2).encode
_COMPACT = json.JSONEncoder(allow_nan=False).encode


@dataclass(frozen=True, slots=True)
class FileForm:
    """The format of one kind of file.

    Attributes:
      what: its name in messages.
      format: the value of its key `format`.
      version: the only version that is read.
      keys: its exact keys beside `format` and `version`.
      lines: the key of a list that is written one item per line, because json's indentation is slow for thousands
        of items; None: everything is indented.
    """

    what: str
    format: str
    version: int
    keys: frozenset[str]
    lines: str | None = None

    def text(self, state: Mapping[str, Any]) -> str:
        """Returns the JSON text of `state`, which has exactly `keys`; NaN and infinities raise ValueError.

        The content digest is stored in the report, or at the top level of a file without a report.
        """
        from langchain_dpicl.reports.claims import with_content_digest

        whole = with_content_digest({"format": self.format, "version": self.version, **state})
        parts = (f"  {_INDENTED(key)}: {self._value(key, value)}" for key, value in whole.items())
        return "{\n" + ",\n".join(parts) + "\n}\n"

    def _value(self, key: str, value: Any) -> str:
        """Returns the JSON text of one value inside an object that is indented by two."""
        if key == self.lines and value:
            return "[\n    " + ",\n    ".join(map(_COMPACT, value)) + "\n  ]"
        return _INDENTED(value).replace("\n", "\n  ")  # JSON strings contain no line breaks

    def read(self, text: str) -> dict[str, Any]:
        """Returns the object that `text` wrote, after checking its keys, its content digest and its report's claims.

        Other values are not checked. The digest is removed.
        """
        from langchain_dpicl.reports.claims import CONTENT_DIGEST, check_claims, content_problems

        state = parse_json(self.what, text)
        if not isinstance(state, dict) or state.get("format") != self.format:
            raise ConfigurationError(f"{self.what}: expected a JSON object whose 'format' is {self.format!r}.")
        version = state.get("version")
        if version != self.version or isinstance(version, bool):
            raise ConfigurationError(
                f"{self.what}: expected version {self.version}. Upgrade the package, or release again."
            )
        # A report carries the digest itself; see `with_content_digest`.
        own = frozenset() if "report" in self.keys else {CONTENT_DIGEST}
        if frozenset(state) != (keys := self.keys | own | {"format", "version"}):
            raise ConfigurationError(f"{self.what}: expected exactly the keys {sorted(keys)}.")
        for problem in content_problems(state):
            raise ConfigurationError(f"{self.what}: {problem}. Get the file again from its author.")
        holder = state["report"] if "report" in self.keys else state
        del holder[CONTENT_DIGEST]
        if holder is not state:
            check_claims(holder)
        return state

    def load(self, path: str | os.PathLike[str], *, most: int = MAX_TEXT) -> dict[str, Any]:
        """Reads a file of at most `most` bytes; see `read`."""
        return self.read(text_in(path, most))


def write_whole(path: str | os.PathLike[str], text: str, most: int = MAX_TEXT) -> None:
    """Writes ASCII text to `path`; see `write_bytes`."""
    write_bytes(path, text.encode("ascii"), most)


def parse_json(what: str, text: str) -> object:
    """Returns the JSON value; refuses repeated keys, NaN, infinities and nesting that exhausts the stack."""
    try:
        value: object = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ConfigurationError(f"{what}: expected JSON text ({type(error).__name__}).") from None
    return value


def text_in(path: str | os.PathLike[str], most: int = MAX_TEXT) -> str:
    """Returns the text of a plain file; "" for invalid UTF-8, which every reader refuses."""
    try:
        return read_plain(path, most).decode("utf-8")
    except UnicodeDecodeError:
        return ""  # not raised here: the decode error would carry the bytes


def plain_json(name: str, value: object) -> dict[str, Any]:
    """Returns a deep copy of a JSON object (tuples become lists); refuses NaN, infinities and other types."""
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{name}: expected a JSON object, found {type(value).__name__}.")
    try:
        copy: dict[str, Any] = json.loads(json.dumps(dict(value), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{name}: expected JSON values with finite numbers ({type(error).__name__})."
        ) from None
    return copy


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("repeated key")
    return value


def _no_constant(name: str) -> float:
    raise ValueError(name)
