"""Demonstrations that have left the vault, with their privacy report. Knows no private record, no model, no LangChain.

Everything in here is public. Files are plain JSON: reading one never builds an object other than strings, numbers,
lists and dicts, so a file from a stranger can be wrong but cannot act.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_dpicl.exceptions import ConfigurationError

FORMAT = "langchain-dpicl/released-demonstrations"
VERSION = 1
INFINITY = "infinity"

_KEYS = frozenset({"format", "version", "examples", "report", "plan"})


@dataclass(frozen=True)
class ReleasedDemonstrations:
    """Demonstrations released by a mechanism (or by a non-private baseline), the report of their cost and their plan.

    Formal guarantees:
      - Holds public values only; copying, pickling, printing, saving and formatting them is free post-processing.
      - What `report` claims is carried, not checked: a file vouches for its examples as far as its sender does.
        `verify_report(released)` recomputes it; a signature over the file is the sender's matter.

    Args:
      examples: one `dict[str, str]` (field name to text) per demonstration, in the order of release.
      report: JSON-able privacy report; `report["epsilon"]` is a number >= 0 or the string "infinity".
      plan: JSON-able public plan (mechanism, rates, counts, label field).

    Raises:
      ConfigurationError: a value is of another type, is not finite, or cannot be written as JSON.
    """

    examples: tuple[dict[str, str], ...]
    report: Mapping[str, Any]
    plan: Mapping[str, Any]

    def __post_init__(self) -> None:
        # Copies, so that nobody holds a second handle on what was released.
        object.__setattr__(self, "examples", _checked_examples(self.examples))
        object.__setattr__(self, "report", _plain("report", self.report))
        object.__setattr__(self, "plan", _plain("plan", self.plan))
        epsilon_of(self.report)

    @property
    def epsilon(self) -> float:
        """The reported upper bound on epsilon; `math.inf` for non-private baselines."""
        return epsilon_of(self.report)

    def to_json(self) -> str:
        """Returns the JSON text; `from_json` reads it back to an equal object."""
        state = {
            "format": FORMAT,
            "version": VERSION,
            "examples": list(self.examples),
            "report": self.report,
            "plan": self.plan,
        }
        return json.dumps(state, allow_nan=False, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> ReleasedDemonstrations:
        """Reads what `to_json` wrote, and nothing else.

        Args:
          text: the JSON text. Its content stays data, whatever keys it carries.

        Raises:
          ConfigurationError: not JSON, another format or version, missing or unknown keys, or wrong types.
        """
        state = _parse(text)
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise ConfigurationError(f"released demonstrations: expected a JSON object whose 'format' is {FORMAT!r}.")
        version = state.get("version")
        if version != VERSION or isinstance(version, bool):
            raise ConfigurationError(
                f"released demonstrations: expected version {VERSION}. Upgrade the package, or release again."
            )
        if frozenset(state) != _KEYS:
            raise ConfigurationError(f"released demonstrations: expected exactly the keys {sorted(_KEYS)}.")
        if not isinstance(state["examples"], list):
            raise ConfigurationError("examples: expected a list of objects.")
        return cls(tuple(state["examples"]), state["report"], state["plan"])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the JSON text to `path`; a reader sees the old file or the whole new one, never a part.

        Args:
          path: file to create or replace; its folder must exist.

        Raises:
          OSError: the folder is missing or cannot be written; `path` is then untouched.
        """
        target = Path(path)
        part = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
        try:
            with part.open("x", encoding="ascii", newline="\n") as file:
                file.write(self.to_json())
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ReleasedDemonstrations:
        """Reads a file written by `save`.

        Args:
          path: the file.

        Raises:
          ConfigurationError: the content is not what `save` writes.
          OSError: the file is missing or unreadable.
        """
        try:
            text = Path(path).read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            text = ""  # refused below, without the bytes in the exception chain
        return cls.from_json(text)


def epsilon_of(report: Mapping[str, Any]) -> float:
    """Returns a report's epsilon as a float, refusing what is neither a number >= 0 nor "infinity"."""
    found = report.get("epsilon")
    if found == INFINITY:
        return math.inf
    if isinstance(found, (int, float)) and not isinstance(found, bool) and 0 <= found <= sys.float_info.max:
        return float(found)
    raise ConfigurationError(
        f'report["epsilon"]: expected a number >= 0 or {INFINITY!r}, found {type(found).__name__}.'
    )


def _checked_examples(examples: object) -> tuple[dict[str, str], ...]:
    """Returns a copy of the examples; the message names the place, not the content."""
    if not isinstance(examples, Sequence) or isinstance(examples, (str, bytes)):
        raise ConfigurationError(f"examples: expected a sequence of dicts, found {type(examples).__name__}.")
    for index, example in enumerate(examples):
        if not isinstance(example, Mapping):
            raise ConfigurationError(f"examples[{index}]: expected a dict, found {type(example).__name__}.")
        if not all(isinstance(part, str) for item in example.items() for part in item):
            raise ConfigurationError(f"examples[{index}]: expected text under text keys.")
    return tuple(dict(example) for example in examples)


def _plain(name: str, value: object) -> dict[str, Any]:
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


def _parse(text: str) -> object:
    """Returns the JSON value, refusing repeated keys, NaN, infinities and nesting that exhausts the stack."""
    try:
        value: object = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigurationError(f"released demonstrations: expected JSON text ({type(error).__name__}).") from None
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("repeated key")
    return value


def _no_constant(name: str) -> float:
    raise ValueError(name)
