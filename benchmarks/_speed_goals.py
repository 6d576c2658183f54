"""One row of the table of `make bench`: a goal, our number, an anchor of the same run, and whether the goal is met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Goal:
    """A goal that is a ratio of two numbers of one run.

    Attributes:
      name: what is measured and which way the ratio goes, in a few words.
      ours: our number, in `unit`.
      anchor: what it is compared with, in `unit`.
      ratio: as the goal states it: ours / anchor, or anchor / ours.
      limit: the ratio that is asked for.
      at_least: whether the ratio has to reach the limit; else it may not pass it.
      unit: of `ours` and `anchor`.
    """

    name: str
    ours: float
    anchor: float
    ratio: float
    limit: float
    at_least: bool = False
    unit: str = "ms"

    @property
    def verdict(self) -> str:
        """PASS or MISSED."""
        is_met = self.ratio >= self.limit if self.at_least else self.ratio <= self.limit
        return "PASS" if is_met else "MISSED"


HEAD = ("goal", "ours", "anchor", "ratio", "asked", "verdict")


def rows_of(goals: Sequence[Goal]) -> list[tuple[str, ...]]:
    """Returns the cells of the table, without its head."""
    return [
        (
            goal.name,
            f"{goal.ours:,.4g} {goal.unit}",
            f"{goal.anchor:,.4g} {goal.unit}",
            f"{goal.ratio:.3g}",
            f"{'>=' if goal.at_least else '<='} {goal.limit:g}",
            goal.verdict,
        )
        for goal in goals
    ]


def table_of(goals: Sequence[Goal]) -> str:
    """Returns the table as lines of a Markdown page."""
    lines = [HEAD, tuple("---" for _ in HEAD), *rows_of(goals)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
