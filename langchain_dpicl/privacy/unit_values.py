"""Selects at most a fixed number of values per unit, and bounds the sensitivity of their counts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

from langchain_dpicl.privacy._validate import Adjacency, check_adjacency, check_int, fail
from langchain_dpicl.privacy.amounts import check_name
from langchain_dpicl.privacy.mechanisms.bounded import Closed
from langchain_dpicl.privacy.units import forms_of, normalized

UNITS = "units"
"""The one value of every unit, if units are counted instead of values of a field."""


class _AtMost(Closed, is_base=True):
    """The sensitivity of counts of values, if a unit has at most `max_values` distinct values."""

    __slots__ = ()
    max_values: int

    def l1_sensitivity(self, adjacency: Adjacency) -> int:
        """Returns how far the counts of all values move between neighbours, added up.

        Args:
          adjacency: neighbouring relation.
        """
        return self.max_values * (1 if check_adjacency(adjacency) == "add_remove" else 2)

    def l2_sensitivity(self, adjacency: Adjacency) -> float:
        """Returns how far they move as a vector, in L2, rounded up: each count by 1 at most.

        Args:
          adjacency: neighbouring relation.
        """
        square = self.l1_sensitivity(adjacency)
        root = math.sqrt(square)
        return root if math.isqrt(square) ** 2 == square else math.nextafter(root, math.inf)


@final
@dataclass(frozen=True, slots=True)
class UnitValues(_AtMost):
    """At most `max_values` distinct values of a unit: its most frequent ones, ties going to the one that came first.

    Formal guarantees:
      - `of` looks at one unit alone and returns distinct values, at most `max_values` of them.
      - Hence a unit that comes or goes moves the counts of values by at most `max_values` in L1, each by at most 1; one
        that is replaced, by at most twice that in L1.
      - With `declared` values, what is not declared counts nothing; without, every text that shows anything is a value.

    Args:
      name: field of the records; None: every unit that has a record stands for `UNITS`, and nothing else.
      max_values: most values of one unit, public.
      declared: the values that may occur, public; None: they are not known.
      fold_case: whether upper and lower case are made one.

    Raises:
      ConfigurationError: a parameter out of range, or two declared values that are one by the rule.

    Source: docs/proofs/value-counts.md.
    """

    name: str | None
    max_values: int = 1
    declared: tuple[str, ...] | None = None
    fold_case: bool = True
    _known: Mapping[str, str] = field(init=False, repr=False, compare=False)
    kind: ClassVar[str] = "unit_values"

    def __post_init__(self) -> None:
        check_int("max_values", self.max_values, low=1)
        if not isinstance(self.fold_case, bool):
            raise fail("fold_case", "True or False", self.fold_case)
        if self.name is None and (self.declared is not None or self.max_values != 1):
            raise fail("field", "a name beside values or max_values", self.name)
        if self.name is not None:
            check_name("field", self.name)
        object.__setattr__(self, "_known", self._forms())

    def _forms(self) -> dict[str, str]:
        """Returns the declared values by their form."""
        if self.declared is None:
            return {}
        known = forms_of(self.declared, fold_case=self.fold_case)
        object.__setattr__(self, "declared", tuple(known.values()))
        return known

    def of(self, records: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
        """Returns the values of one unit: declared ones as they are declared, others in their form.

        Args:
          records: of the unit; none, as of a unit that was removed, have no value.
        """
        if self.name is None:
            return (UNITS,) if any(True for _ in records) else ()
        counts: Counter[str] = Counter()
        for record in records:
            form = normalized(record.get(self.name) or "", fold_case=self.fold_case)
            value = form if self.declared is None else self._known.get(form, "")
            if value:
                counts[value] += 1
        return tuple(value for value, _ in counts.most_common(self.max_values))

    def to_dict(self) -> dict[str, Any]:
        """Returns the public parameters, for reports."""
        return {
            "field": self.name,
            "max_values": self.max_values,
            "values": None if self.declared is None else list(self.declared),
            "fold_case": self.fold_case,
        }
