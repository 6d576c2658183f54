"""The base of released values: report and plan, file with a content digest, and what a verifier says of them."""

from __future__ import annotations

import hashlib
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from langchain_dpicl._plain_files import MAX_TEXT, read_plain, unique_keys, write_bytes
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.options import html_table
from langchain_dpicl.privacy._validate import check_real, fail, is_finite
from langchain_dpicl.privacy.accounting.events import canonical_json

if TYPE_CHECKING:  # loaded when something is verified
    from langchain_dpicl.reports.report import VerifiedReport


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
                f"{self.what}: expected version {self.version}. Upgrade the package, or make the file again."
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


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Writes ASCII text to `path`; see `write_bytes`."""
    write_bytes(path, text.encode("ascii"), MAX_TEXT)


def parse_json(what: str, text: str) -> object:
    """Returns the JSON value; refuses repeated keys, NaN, infinities and nesting that exhausts the stack."""
    try:
        value: object = json.loads(text, object_pairs_hook=unique_keys, parse_constant=_no_constant)
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ConfigurationError(f"{what}: expected JSON text ({type(error).__name__}).") from None
    return value


def text_in(path: str | os.PathLike[str], most: int = MAX_TEXT) -> str:
    """Returns the text of a plain file without a byte order mark; "" for invalid UTF-8, which every reader refuses."""
    try:
        return read_plain(path, most).decode("utf-8-sig")
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


def listed(name: str, values: object) -> tuple[Any, ...]:
    """Returns the items of a sequence; refuses a text, whose letters would be taken for them, and everything else."""
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise fail(name, "a sequence", type(values).__name__)
    return tuple(values)


def _no_constant(name: str) -> float:
    raise ValueError(name)


INFINITY = "infinity"


class Released(ABC):
    """Base of released values: public, and stored in a file as JSON text.

    Formal guarantees:
      - Holds public values only; copying, pickling, printing, saving and using it is free post-processing.
      - The `report` of an object in memory is not checked. Reading a file compares its content with the digest in it,
        and its claims with the ledger's report inside; no price is computed. `verify` recomputes the price. Files are
        not signed.
    """

    _FORM: ClassVar[FileForm]
    _MAY_BE_FREE: ClassVar[bool] = False
    """Whether the report may be empty, because nothing was charged."""

    report: Mapping[str, Any]
    plan: Mapping[str, Any]

    @property
    def epsilon(self) -> float:
        """The reported upper bound on epsilon; `math.inf` for non-private baselines."""
        return epsilon_of(self.report)

    @property
    def delta(self) -> float:
        """The reported delta; 0 if the report names none."""
        return delta_of(self.report)

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """Returns the JSON values of the file."""

    @classmethod
    @abstractmethod
    def _of_state(cls, state: Mapping[str, Any]) -> Self:
        """Returns the value of what `_state` made; refuses other values."""

    def _copy_public(self, *names: str) -> None:
        """Replaces fields by copies, so that nobody changes the released values afterwards; checks the report."""
        for name in names:
            object.__setattr__(self, name, plain_json(name, getattr(self, name)))
        if self.report or not self._MAY_BE_FREE:
            epsilon_of(self.report)
            delta_of(self.report)

    def verify(self) -> VerifiedReport:
        """Recomputes the price, and compares the value with what its report charges; see `verify_report`."""
        from langchain_dpicl.reports.report import verify_report

        return verify_report(self)

    def to_json(self) -> str:
        """Returns the JSON text; `from_json` reads it back to an equal object if the report is one of this package."""
        return self._FORM.text(self._state())

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads what `to_json` wrote, and nothing else.

        Args:
          text: the JSON text; nothing in it is executed.

        Raises:
          ConfigurationError: not JSON, another format or version, missing or unknown keys, wrong types, content that
            was changed after it was written, or a report whose claims its ledger's report contradicts.
        """
        return cls._of_state(cls._FORM.read(text))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the JSON text to `path` atomically: a reader sees the old file or the whole new one.

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
          path: a plain file, or a link to one.

        Raises:
          ConfigurationError: the content is not what `save` writes, or `path` is not a plain file.
          OSError: the file is missing or unreadable.
        """
        return cls.from_json(text_in(path))

    def _repr_html_(self) -> str:
        shown = {name: value for name, value in self.report.items() if name not in {"budget", "plan"}}
        return html_table(type(self).__name__, shown)


def epsilon_of(report: Mapping[str, Any]) -> float:
    """Returns a report's epsilon as a float; refuses anything but a number >= 0 or "infinity"."""
    epsilon: Any = report.get("epsilon")
    if epsilon == INFINITY:
        return math.inf
    if is_finite(epsilon) and epsilon >= 0:
        return float(epsilon)
    raise ConfigurationError(
        f'report["epsilon"]: expected a number >= 0 or {INFINITY!r}, found {type(epsilon).__name__}.'
    )


def delta_of(report: Mapping[str, Any]) -> float:
    """Returns a report's delta as a float, 0 if it names none; refuses anything but a number in [0, 1]."""
    return check_real("report['delta']", report.get("delta", 0.0), low=0.0, high=1.0)


def release_id(report: Mapping[str, Any], topics: Sequence[tuple[str, float]]) -> str:
    """Returns a public name of 12 hexadecimal digits, a digest of the report's ids and the topics."""
    named = {name: report.get(name) for name in ("ledger_id", "component", "dataset_id")}
    if "reads" in report:  # a run on a stream: another one has another name
        named["reads"] = report["reads"]
    whole = canonical_json({**named, "topics": [list(pair) for pair in topics]})
    return hashlib.sha256(whole.encode("utf-8")).hexdigest()[:12]
