"""Counts of values that have left the vault, with their privacy report. Knows no private record and no model.

Everything in here is public, and whatever is made of it is free: labels, sizes, a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias

from langchain_dpicl._released_files import FileForm, KeptAsJson, plain
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import check_choice, check_int, fail
from langchain_dpicl.privacy.amounts import check_name
from langchain_dpicl.privacy.count_margins import noise_margin
from langchain_dpicl.privacy.examples import PrivateExamples
from langchain_dpicl.privacy.extensions.count_histograms import CountPlan, count_release
from langchain_dpicl.privacy.unit_values import UNITS, UnitValues
from langchain_dpicl.released import epsilon_of

FORMAT = "langchain-dpicl/released-counts"
VERSION = 1

Side: TypeAlias = Literal["lower", "middle", "upper"]

_FORM = FileForm("released counts", FORMAT, VERSION, frozenset({"counts", "plan", "report"}))
_LARGEST = 2**53


@dataclass(frozen=True)
class ReleasedCounts(KeptAsJson):
    """How many units hold each value of a field, noise included, with the report of what that cost.

    Formal guarantees:
      - Holds public values only; printing, saving and using it is free post-processing.
      - Of an object in memory `report` is carried, not checked. Reading a file compares its content with the digest in
        it, and its claims (epsilon, delta) with the ledger's report inside; no price is computed.
        `verify_report(counts)` recomputes it.

    Args:
      counts: noisy count by value; may be below zero where values are declared. Found values: the largest first.
      report: JSON-able privacy report.
      plan: JSON-able public plan (`DiscoveryPlan.to_dict`).

    Raises:
      ConfigurationError: a value is of another type, or the counts are not those of the plan.
    """

    counts: Mapping[str, int]
    report: Mapping[str, Any]
    plan: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not isinstance(self.counts, Mapping):
            raise fail("counts", "a mapping of values to whole numbers", type(self.counts).__name__)
        checked = {
            check_name("counts", value): check_int(f"counts[{value!r}]", count, low=-_LARGEST, high=_LARGEST)
            for value, count in self.counts.items()
        }
        object.__setattr__(self, "counts", checked)
        object.__setattr__(self, "report", plain("report", self.report))
        object.__setattr__(self, "plan", plain("plan", self.plan))
        epsilon_of(self.report)
        release = self.release
        rule, threshold = release.rule, release.mechanism.threshold
        expected = (UNITS,) if rule.name is None else rule.declared
        if expected is not None and tuple(checked) != expected:
            raise fail("counts", f"one for each of {list(expected)}", list(checked))
        if threshold is not None and any(count < threshold for count in checked.values()):
            raise fail("counts", f"none below the threshold, {threshold}", min(checked.values()))

    @property
    def release(self) -> CountPlan:
        """How it was released: what a unit stands for, noise, threshold, adjacency.

        Raises:
          ConfigurationError: the plan is none of counts.
        """
        try:
            release = count_release(self.plan["counts"])
        except (LookupError, TypeError):
            raise ConfigurationError("plan: expected that of a release of counts, found another.") from None
        if not isinstance(release.rule, UnitValues):
            raise fail("plan", "that of counts of units or values", release.rule.kind)
        return release

    @property
    def field(self) -> str | None:
        """The field that was counted; None: units."""
        return self.release.rule.name

    @property
    def values(self) -> tuple[str, ...]:
        """The values, in order: what `labels=` may be from now on."""
        return tuple(self.counts)

    @property
    def epsilon(self) -> float:
        """The reported upper bound on epsilon."""
        return epsilon_of(self.report)

    def public_size(self, *, confidence: float = 0.95, side: Side = "lower") -> int | dict[str, int]:
        """Returns what `public_size=` may be from now on: a public number by value, or one number of units.

        Formal guarantees:
          - "lower": for each value by itself, the number is 1, or is above that of its units with a chance of
            1 - confidence at most, over the noise; "upper": below it. No number is below 1, so 1 says nothing: a value
            that nobody holds has 1, too.
          - No privacy rests on it: whatever the number, nothing is released that was not paid for.

        With too low a number samples are larger than planned: more calls, and slots that are full. With too high a one
        they are smaller: empty slots. A delta that is to be small beside the number of records goes with "upper".

        Args:
          confidence: in (0, 1); ignored by "middle".
          side: "lower", "middle" (the noisy count itself) or "upper".

        Raises:
          ConfigurationError: an argument out of range.
        """
        check_choice("side", side, ("lower", "middle", "upper"))
        margin = noise_margin(self.release.scale, confidence)
        move = {"lower": -margin, "middle": 0, "upper": margin}[side]
        sizes = {value: max(1, count + move) for value, count in self.counts.items()}
        return sizes[UNITS] if self.field is None else sizes

    def redeclare(
        self,
        private: PrivateExamples,
        *,
        dataset_id: str | None = None,
        public_size: int | Mapping[str, int] | None = None,
        confidence: float = 0.95,
        side: Side = "lower",
    ) -> PrivateExamples:
        """Returns the same units, on the same ledger, declared with what was found: see `PrivateExamples.redeclared`.

        Counts of units set the size. Counts of a field split the units by its values, and set the size of each; where
        the field held the declared label before, the sizes alone.

        The examples belong to the ledger that paid for the counts from then on, as if they were bound to it: what is
        released next adds up with them there. Where that ledger is gone, as one kept in memory, use
        `private.redeclared(labels=...)` on another, and add the epsilons of both.

        Args:
          private: the examples that were counted.
          dataset_id: public name of the new declaration; by default that of the old one and what was counted.
          public_size: another size than `public_size(confidence=, side=)` gives.
          confidence: as for `public_size`.
          side: as for `public_size`.

        Raises:
          ConfigurationError: nothing was found, or the examples are others than those that were counted.
          PrivacyBudgetMismatchError: the examples are bound to another ledger than the one that paid for the counts.
          PrivateAccessError: the examples were opened without privacy, and the counts were paid for.
        """
        counted = self.report.get("dataset_id")
        if private.dataset_id != counted:
            raise fail("private", f"the examples {counted!r}, which were counted", private.dataset_id)
        if not self.counts:
            raise fail("counts", "at least one value", "none", "Nothing reached the threshold; declare labels by hand.")
        size = self.public_size(confidence=confidence, side=side) if public_size is None else public_size
        name = f"{private.dataset_id} by {self.field or UNITS}" if dataset_id is None else dataset_id
        split: dict[str, Any] = {}
        if self.field not in {None, private.label_key}:
            fold_case = self.release.rule.to_dict()["fold_case"]
            split = {"label_key": self.field, "labels": self.values, "fold_case": fold_case}
        made = private.redeclared(dataset_id=name, public_size=size, **split)
        paid_by = self.report.get("ledger_id")
        if isinstance(paid_by, str):
            private._attach(paid_by)  # noqa: SLF001  its own ledger, and no other
        return made

    def to_json(self) -> str:
        """Returns the JSON text; `from_json` reads it back to an equal object if the report is one of this package."""
        return _FORM.text({"counts": list(self.counts.items()), "plan": self.plan, "report": self.report})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads what `to_json` wrote, and nothing else.

        Args:
          text: the JSON text. Its content stays data, whatever keys it carries.

        Raises:
          ConfigurationError: not JSON, another format or version, missing or unknown keys, wrong types, content that
            was changed after it was written, or a report whose claims its ledger's report does not bear out.
        """
        state = _FORM.read(text)
        pairs = state["counts"]
        if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            raise ConfigurationError("counts: expected a list of pairs of a value and a number.")
        counts = {str(value): count for value, count in pairs}
        if len(counts) != len(pairs):
            raise ConfigurationError("counts: expected every value once, found one twice.")
        return cls(counts, state["report"], state["plan"])
