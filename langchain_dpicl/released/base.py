"""The base of released values: their report and plan, their file, and what a verifier says of them."""

from __future__ import annotations

import hashlib
import math
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.options.base import html_table
from langchain_dpicl.privacy.accounting.events import canonical_json
from langchain_dpicl.released.files import FileForm, plain_json, text_in, write_whole

if TYPE_CHECKING:  # loaded when something is verified
    from langchain_dpicl.reports.report import VerifiedReport

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
        return float(self.report.get("delta", 0.0))

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
    epsilon = report.get("epsilon")
    if epsilon == INFINITY:
        return math.inf
    if isinstance(epsilon, (int, float)) and not isinstance(epsilon, bool) and 0 <= epsilon <= sys.float_info.max:
        return float(epsilon)
    raise ConfigurationError(
        f'report["epsilon"]: expected a number >= 0 or {INFINITY!r}, found {type(epsilon).__name__}.'
    )


def release_id(report: Mapping[str, Any], topics: Sequence[tuple[str, float]]) -> str:
    """Returns a public name of 12 hexadecimal digits, a digest of the report's ids and the topics."""
    named = {name: report.get(name) for name in ("ledger_id", "component", "dataset_id")}
    if "reads" in report:  # a run on a stream: another one has another name
        named["reads"] = report["reads"]
    whole = canonical_json({**named, "topics": [list(pair) for pair in topics]})
    return hashlib.sha256(whole.encode("utf-8")).hexdigest()[:12]
