"""Released demonstrations with their privacy report, as a value and as a JSON file."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.released.files import FileForm, StoredAsJson, plain_json

FORMAT = "langchain-dpicl/released-demonstrations"
VERSION = 1
INFINITY = "infinity"

_FORM = FileForm("released demonstrations", FORMAT, VERSION, frozenset({"examples", "report", "plan"}))


@dataclass(frozen=True)
class ReleasedDemonstrations(StoredAsJson):
    """Demonstrations released by a mechanism (or by a non-private baseline), the report of their cost and their plan.

    Formal guarantees:
      - Holds public values only; copying, pickling, printing, saving and formatting them is free post-processing.
      - The `report` of an object in memory is not checked. Reading a file compares its content with the digest in it,
        and its claims (epsilon, delta) with the ledger's report inside; no price is computed.
        `verify_report(released)` recomputes the price. Files are not signed.

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
        # Copies, so that the caller cannot change the released values afterwards.
        object.__setattr__(self, "examples", _check_examples(self.examples))
        object.__setattr__(self, "report", plain_json("report", self.report))
        object.__setattr__(self, "plan", plain_json("plan", self.plan))
        epsilon_of(self.report)

    @property
    def epsilon(self) -> float:
        """The reported upper bound on epsilon; `math.inf` for non-private baselines."""
        return epsilon_of(self.report)

    def to_json(self) -> str:
        """Returns the JSON text; `from_json` reads it back to an equal object if the report is one of this package."""
        return _FORM.text({"examples": list(self.examples), "report": self.report, "plan": self.plan})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads what `to_json` wrote, and nothing else.

        Args:
          text: the JSON text; nothing in it is executed.

        Raises:
          ConfigurationError: not JSON, another format or version, missing or unknown keys, wrong types, content that
            was changed after it was written, or a report whose claims its ledger's report contradicts.
        """
        state = _FORM.read(text)
        if not isinstance(state["examples"], list):
            raise ConfigurationError("examples: expected a list of objects.")
        return cls(tuple(state["examples"]), state["report"], state["plan"])


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


def _check_examples(examples: object) -> tuple[dict[str, str], ...]:
    """Returns a copy of the examples; messages name the index, not the content."""
    if not isinstance(examples, Sequence) or isinstance(examples, (str, bytes)):
        raise ConfigurationError(f"examples: expected a sequence of dicts, found {type(examples).__name__}.")
    for index, example in enumerate(examples):
        if not isinstance(example, Mapping):
            raise ConfigurationError(f"examples[{index}]: expected a dict, found {type(example).__name__}.")
        if not all(isinstance(part, str) for item in example.items() for part in item):
            raise ConfigurationError(f"examples[{index}]: expected text under text keys.")
    return tuple(dict(example) for example in examples)
