"""What a method asks of a model, and what that costs: from public plans alone, never from what a run really asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from _tables_files import DataFile
from _tables_free import free_cost_plan
from _tables_methods import Method
from _tables_room import Engines, Room
from _tables_soft import soft_cost_plan
from _tables_texts import generation_cost_plan, slots_cost_plan
from _tables_votes import pate_cost_plan, voting_cost_plan

RECORD_TOKENS = 60
"""Assumed tokens of a record, and of a query with its instruction: the package's own default of a public cap."""


@dataclass(frozen=True)
class CostRow:
    """Expected use of a model by one method on one data set.

    Attributes:
      what: what is bought.
      private_calls, public_calls: with and without records.
      tokens_in, tokens_out: of all calls, no discount for caches.
      units: what the price is shared by, such as queries; 0: bought once.
      gradients: per-record gradients, where a model of one's own is trained instead.
    """

    what: str
    private_calls: int
    public_calls: int
    tokens_in: int
    tokens_out: int
    units: int = 0
    gradients: int = 0

    def money(self, *, price_in: float, price_out: float) -> float | None:
        """Returns the price at so much per million tokens; None where no calls are bought."""
        if self.gradients:
            return None
        return (self.tokens_in * price_in + self.tokens_out * price_out) / 1e6


def cost_of(method: Method, file: DataFile, knobs: Mapping[str, Any]) -> CostRow:
    """Returns the expected cost of a method at the settings of the tables."""
    room = Room(file, Engines(None, is_embedded=False), {})
    if method.name == "promptdpsgd":
        cost = soft_cost_plan(file, knobs).cost(record_tokens=knobs["length"])
        return CostRow(f"{knobs['steps']} steps, then free", 0, 0, cost.tokens_in, 0, gradients=cost.private_calls)
    if method.name in {"generation", "slots"}:
        plan = (generation_cost_plan if method.name == "generation" else slots_cost_plan)(file, knobs)
        branches = len(plan.branches)
        found = plan.cost(record_tokens=RECORD_TOKENS)
        return _row(f"{knobs['shots'] * branches} demonstrations, then free", found)
    if method.name == "pate":
        labelling = pate_cost_plan(file, knobs)
        student = knobs["candidates"] * knobs["validation"]
        found = labelling.cost(
            record_tokens=RECORD_TOKENS, student_calls=student, student_shots=knobs["student_shots"], public_rows=0
        )
        return _row(f"{knobs['inputs']} labels and a student, then free", found)
    if method.name == "voting":
        found = voting_cost_plan(room, file, knobs).cost(record_tokens=RECORD_TOKENS)
    else:
        # Candidates are spans of the question: nobody is asked for them.
        found = free_cost_plan(room, file, knobs).cost(
            record_tokens=RECORD_TOKENS, answer_tokens=knobs["answer_tokens"], public_rows=0
        )
    return _row(f"{knobs['queries']:,} queries", found, units=knobs["queries"])


def _row(what: str, cost: Any, *, units: int = 0) -> CostRow:
    return CostRow(what, cost.private_calls, cost.public_calls, cost.tokens_in, cost.tokens_out, units)


def cost_lines(rows: Sequence[tuple[Method, DataFile, CostRow]], *, price_in: float, price_out: float) -> list[str]:
    """Returns the cost table in Markdown."""
    head = ("method", "data", "for", "private calls", "public calls", "tokens in", "tokens out", "money", "per 1,000")
    lines = [_line(head), _line(["---", "---", "---", *["---:"] * 6])]
    for method, file, row in rows:
        money = row.money(price_in=price_in, price_out=price_out)
        each = "" if money is None or not row.units else f"{1_000 * money / row.units:.2f}"
        calls = f"{row.gradients:,} gradients" if row.gradients else f"{row.private_calls:,}"
        shown = (calls, f"{row.public_calls:,}", f"{row.tokens_in:,}", f"{row.tokens_out:,}")
        price = "own model" if money is None else f"{money:.2f}"
        lines.append(_line((method.title, file.title, row.what, *shown, price, each)))
    return lines


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
