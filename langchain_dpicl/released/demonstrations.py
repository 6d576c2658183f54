"""Released demonstrations with their privacy report, as a value and as a JSON file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.released.base import FileForm, Released, listed

FORMAT = "langchain-dpicl/released-demonstrations"
VERSION = 1


@dataclass(frozen=True)
class ReleasedDemonstrations(Released):
    """Demonstrations released by a mechanism (or by a non-private baseline), the report of their cost and their plan.

    Formal guarantees:
      - Holds public values only; copying, pickling, printing, saving and formatting them is free post-processing.

    Args:
      examples: one `dict[str, str]` (field name to text) per demonstration, in the order of release.
      report: JSON-able privacy report; `report["epsilon"]` is a number >= 0 or the string "infinity".
      plan: JSON-able public plan (mechanism, rates, counts, label field).

    Raises:
      ConfigurationError: a value is of another type, is not finite, or cannot be written as JSON.
    """

    _FORM = FileForm("released demonstrations", FORMAT, VERSION, frozenset({"examples", "report", "plan"}))

    examples: tuple[dict[str, str], ...]
    report: Mapping[str, Any]
    plan: Mapping[str, Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "examples", _check_examples(self.examples))
        self._copy_public("report", "plan")

    def _state(self) -> dict[str, Any]:
        return {"examples": list(self.examples), "report": self.report, "plan": self.plan}

    @classmethod
    def _of_state(cls, state: Mapping[str, Any]) -> Self:
        return cls(state["examples"], state["report"], state["plan"])


def _check_examples(examples: object) -> tuple[dict[str, str], ...]:
    """Returns a copy of the examples; messages name the index, not the content."""
    found = listed("examples", examples)
    for index, example in enumerate(found):
        if not isinstance(example, Mapping):
            raise ConfigurationError(f"examples[{index}]: expected a dict, found {type(example).__name__}.")
        if not all(isinstance(part, str) for item in example.items() for part in item):
            raise ConfigurationError(f"examples[{index}]: expected text under text keys.")
    return tuple(dict(example) for example in found)
