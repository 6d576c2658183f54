"""How released values are kept in files of plain JSON. Knows no demonstration, no label and no report.

Reading never builds an object other than strings, numbers, lists and dicts, so a file from a stranger can be wrong
but cannot act.
"""

from __future__ import annotations

import json
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from langchain_dpicl._plain_files import MAX_TEXT, read_plain
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy.release_claims import (
    CONTENT_DIGEST,
    check_claims,
    content_problems,
    with_content_digest,
)

_INDENTED = json.JSONEncoder(allow_nan=False, indent=2).encode
_COMPACT = json.JSONEncoder(allow_nan=False).encode


@dataclass(frozen=True, slots=True)
class FileForm:
    """The form of one kind of file.

    Attributes:
      what: its name in messages.
      format: the value of its key `format`.
      version: the only version that is read.
      keys: what it holds beside `format` and `version`; no more, no less.
      lines: the key of a list that is written one item per line: json indents in pure Python, which is slow where
        there are thousands of items; None: everything is indented.
    """

    what: str
    format: str
    version: int
    keys: frozenset[str]
    lines: str | None = None

    def text(self, state: Mapping[str, Any]) -> str:
        """Returns the JSON text of `state`, which has exactly `keys`; NaN and infinities raise ValueError.

        The content digest stands in the report, or beside the keys of a file that has none.
        """
        whole = with_content_digest({"format": self.format, "version": self.version, **state})
        parts = (f"  {_INDENTED(key)}: {self._value(key, value)}" for key, value in whole.items())
        return "{\n" + ",\n".join(parts) + "\n}\n"

    def _value(self, key: str, value: Any) -> str:
        """Returns the JSON text of one value, as it stands in an object that is indented by two."""
        if key == self.lines and value:
            return "[\n    " + ",\n    ".join(map(_COMPACT, value)) + "\n  ]"
        return _INDENTED(value).replace("\n", "\n  ")  # in JSON a line break never stands inside a string

    def read(self, text: str) -> dict[str, Any]:
        """Returns the object that `text` wrote, its keys and content digest checked and its values not.

        A report is checked for what it claims as well (`check_claims`), and comes without the digest.

        Raises:
          ConfigurationError: not JSON, another format or version, missing, unknown or repeated keys, another content
            than was written, or a report whose claims its ledger's report does not bear out.
        """
        state = self._parse(text)
        if not isinstance(state, dict) or state.get("format") != self.format:
            raise ConfigurationError(f"{self.what}: expected a JSON object whose 'format' is {self.format!r}.")
        version = state.get("version")
        if version != self.version or isinstance(version, bool):
            raise ConfigurationError(
                f"{self.what}: expected version {self.version}. Upgrade the package, or release again."
            )
        own = frozenset() if "report" in self.keys else {CONTENT_DIGEST}
        if frozenset(state) != (keys := self.keys | own | {"format", "version"}):
            raise ConfigurationError(f"{self.what}: expected exactly the keys {sorted(keys)}.")
        for problem in content_problems(state):
            raise ConfigurationError(f"{self.what}: {problem}. Get the file again from who wrote it.")
        holder = state["report"] if "report" in self.keys else state
        del holder[CONTENT_DIGEST]
        if holder is not state:
            check_claims(holder)
        return state

    def load(self, path: str | os.PathLike[str], *, most: int = MAX_TEXT) -> dict[str, Any]:
        """Returns the object that a file holds, as `read` does.

        Raises:
          ConfigurationError: it is no plain file, has more than `most` bytes, or holds something else.
          OSError: the file is missing or unreadable.
        """
        return self.read(text_in(path, most))

    def _parse(self, text: str) -> object:
        """Returns the JSON value, refusing repeated keys, NaN, infinities and nesting that exhausts the stack."""
        try:
            value: object = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
        except (ValueError, TypeError, RecursionError, MemoryError) as error:
            raise ConfigurationError(f"{self.what}: expected JSON text ({type(error).__name__}).") from None
        return value


class KeptAsJson(ABC):
    """A released value that stands in a file as the text of its `to_json`."""

    @abstractmethod
    def to_json(self) -> str:
        """Returns the JSON text; `from_json` reads it back to an equal object if the report is one of this package."""

    @classmethod
    @abstractmethod
    def from_json(cls, text: str) -> Self:
        """Reads what `to_json` wrote, and nothing else.

        Args:
          text: the JSON text. Its content stays data, whatever keys it carries.

        Raises:
          ConfigurationError: not JSON, another format or version, missing or unknown keys, wrong types, content that
            was changed after it was written, or a report whose claims its ledger's report does not bear out.
        """

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the JSON text to `path`; a reader sees the old file or the whole new one, never a part.

        Args:
          path: file to create or replace; its folder must exist.

        Raises:
          ConfigurationError: the text is larger than what `load` reads.
          OSError: the folder is missing or cannot be written; `path` is then untouched.
        """
        write_whole(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a file written by `save`.

        Args:
          path: the file; a link is followed to a plain file, and to nothing else.

        Raises:
          ConfigurationError: the content is not what `save` writes, or there is no plain file.
          OSError: the file is missing or unreadable.
        """
        return cls.from_json(text_in(path))


def write_whole(path: str | os.PathLike[str], text: str, most: int = MAX_TEXT) -> None:
    """Writes ASCII text to `path`; a reader sees the old file or the whole new one, never a part.

    Raises:
      ConfigurationError: more than `most` characters, which nobody would read again.
      OSError: the folder is missing or cannot be written; `path` is then untouched.
    """
    if len(text) > most:
        raise ConfigurationError(f"file: expected at most {most} bytes, found {len(text)}. Keep it in several parts.")
    target = Path(path)
    part = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
    try:
        with part.open("x", encoding="ascii", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def text_in(path: str | os.PathLike[str], most: int = MAX_TEXT) -> str:
    """Returns the text of a plain file; of bytes that are no text the empty one, which no reader takes.

    Raises:
      ConfigurationError: it is no plain file, or has more than `most` bytes.
      OSError: the file is missing or unreadable.
    """
    try:
        return read_plain(path, most).decode("utf-8")
    except UnicodeDecodeError:
        return ""  # refused by the reader, without the bytes in the exception chain


def plain(name: str, value: object) -> dict[str, Any]:
    """Returns a deep copy of a JSON object (tuples become lists), refusing NaN, infinities and foreign types."""
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
