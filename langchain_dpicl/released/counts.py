"""Released counts with their privacy report, as a value and as a JSON file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import check_choice, check_int, fail
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.privacy.extensions.count_histograms import CountPlan, count_release, noise_margin
from langchain_dpicl.privacy.extensions.unit_values import UNITS, UnitValues
from langchain_dpicl.privacy.ledger.amounts import check_name
from langchain_dpicl.released.base import Released
from langchain_dpicl.released.files import FileForm

FORMAT = "langchain-dpicl/released-counts"
VERSION = 1

Side: TypeAlias = Literal["lower", "middle", "upper"]

_LARGEST = 2**53


@dataclass(frozen=True)
class ReleasedCounts(Released):
    """Noisy counts of the units that hold each value of a field, with their privacy report.

    Formal guarantees:
      - Holds public values only; printing, saving and using it is free post-processing.

    Args:
      counts: noisy count by value; may be negative for declared values. Found values: the largest first.
      report: JSON-able privacy report.
      plan: JSON-able public plan (`DiscoveryPlan.to_dict`).

    Raises:
      ConfigurationError: a value is of another type, or the counts contradict the plan.
    """

    _FORM = FileForm("released counts", FORMAT, VERSION, frozenset({"counts", "plan", "report"}))

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
        self._copy_public("report", "plan")
        release = self.release
        rule, threshold = release.rule, release.mechanism.threshold
        expected = (UNITS,) if rule.name is None else rule.declared
        if expected is not None and tuple(checked) != expected:
            raise fail("counts", f"one for each of {list(expected)}", list(checked))
        if threshold is not None and any(count < threshold for count in checked.values()):
            raise fail("counts", f"none below the threshold, {threshold}", min(checked.values()))

    @property
    def release(self) -> CountPlan:
        """The release plan: what a unit counts for, noise, threshold, adjacency."""
        try:
            release = count_release(self.plan["counts"])
        except (LookupError, TypeError):
            raise ConfigurationError("plan: expected the plan of a release of counts, found another.") from None
        if not isinstance(release.rule, UnitValues):
            raise fail("plan", "the plan of counts of units or values", release.rule.kind)
        return release

    @property
    def field(self) -> str | None:
        """The counted field; None: units."""
        return self.release.rule.name

    @property
    def values(self) -> tuple[str, ...]:
        """The values, in order; usable as `labels=`."""
        return tuple(self.counts)

    def public_size(self, *, confidence: float = 0.95, side: Side = "lower") -> int | dict[str, int]:
        """Returns a public size for `public_size=`: by value, or one number of units.

        Formal guarantees:
          - "lower": for each value separately, the number is 1, or exceeds the true count with probability at most
            1 - confidence over the noise; "upper": is below it. Numbers are at least 1, also for values without units.
          - Privacy does not depend on it: no number releases anything that was not paid for.

        If the number is too low, samples are larger than planned: more calls and full slots. If it is too high, they
        are smaller: empty slots. To compare delta with the number of records, use "upper".

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
        """Returns the same units, on the same ledger, declared with the counts: see `PrivateExamples.redeclared`.

        Counts of units set the size. Counts of a field split the units by its values and set the size of each; counts
        of the declared label set the sizes only.

        The returned examples are bound to the ledger that paid for the counts, so that the costs of later releases add
        up with theirs. If that ledger is gone (it was in memory), use `private.redeclared(labels=...)` with another
        one, and add the epsilons of both.

        Args:
          private: the counted examples.
          dataset_id: public name of the new declaration; by default the old one and the counted field.
          public_size: the size; by default `public_size(confidence=, side=)`.
          confidence: as for `public_size`.
          side: as for `public_size`.

        Raises:
          ConfigurationError: nothing was found, or other examples were counted.
          PrivacyBudgetMismatchError: the examples are bound to a ledger that did not pay for the counts.
          PrivateAccessError: the examples were opened without privacy, and the counts were paid for.
        """
        counted = self.report.get("dataset_id")
        if private.dataset_id != counted:
            raise fail("private", f"the examples {counted!r}, which were counted", private.dataset_id)
        if not self.counts:
            raise fail("counts", "at least one value", "none", "Nothing reached the threshold; declare labels by hand.")
        size = self.public_size(confidence=confidence, side=side) if public_size is None else public_size
        name = f"{private.dataset_id} by {self.field or UNITS}" if dataset_id is None else dataset_id
        # Counts of units or of the declared label change sizes only; other fields become the label.
        split: dict[str, Any] = {}
        if self.field not in {None, private.label_key}:
            fold_case = self.release.rule.to_dict()["fold_case"]
            split = {"label_key": self.field, "labels": self.values, "fold_case": fold_case}
        made = private.redeclared(dataset_id=name, public_size=size, **split)
        paid_by = self.report.get("ledger_id")
        if isinstance(paid_by, str):
            private._attach(paid_by)  # noqa: SLF001  binds to the ledger that paid, and to no other
        return made

    def _state(self) -> dict[str, Any]:
        return {"counts": list(self.counts.items()), "plan": self.plan, "report": self.report}

    @classmethod
    def _of_state(cls, state: Mapping[str, Any]) -> Self:
        pairs = state["counts"]
        if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            raise ConfigurationError("counts: expected a list of pairs of a value and a number.")
        counts = {str(value): count for value, count in pairs}
        if len(counts) != len(pairs):
            raise ConfigurationError("counts: expected distinct values, found a repeated one.")
        return cls(counts, state["report"], state["plan"])
